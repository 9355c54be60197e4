"""Keys of TorchRL's expert-iteration recipe that are refused here, each with what to use instead.

A key stands for all keys below it. Keys that the schema has are never listed: tests/unit/test_config_retired.py.
"""

from __future__ import annotations

USE_INSTEAD = {
    "train.sync": "choose the script instead: scripts/expert-iteration-sync.py, with mode=sync",
    "train.update_weight_frequency": "use train.weight_update_frequency, in optimizer steps",
    "train_model.eval": "use train_model.lora.dropout=0, which leaves nothing random in the forward pass",
    "ref_model.lora": "use train_model.lora; the reference is the trained model with its adapter switched off",
    "ref_model.gradient_checkpointing": "use train_model.gradient_checkpointing; the reference has no backward pass",
    "logging.checkpoint_frequency": "use train.checkpoint_frequency, in optimizer steps",
}

NOT_AVAILABLE = {
    "ray.collector_config": "leave it out; collections are made by the process that trains",
    "ray.train_handler_config": "leave it out; training is done by the process that was started",
    "ray.replay_buffer_config": "leave it out; the buffer is in the process that trains",
    "train_model.quantization": "leave it out; train_model.lora.enabled=true saves memory",
    "ref_model.quantization": "leave it out; ref_model.torch_dtype=bfloat16 saves memory",
    "inference_model.attn_implementation": "leave it out; the engines choose their own attention",
}


def refusal(key: str) -> tuple[str, str] | None:
    """(constraint, way out) of a retired key or of a key below one; None for any other key."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        retired = ".".join(parts[:length])
        if retired in USE_INSTEAD:
            return "the key of another recipe", USE_INSTEAD[retired]
        if retired in NOT_AVAILABLE:
            return "not available in this version", NOT_AVAILABLE[retired]
    return None
