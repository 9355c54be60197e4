"""What this project adds to vLLM's worker process: loading a published file, and the fingerprint of what it holds.

vLLM mixes the class into its own worker (`worker_extension_cls`), on a CPU and on GPUs alike. Its weights are fused
and on a CPU packed for the matrix library, so they cannot be hashed as they were sent. The proof has three parts
instead: the checksum of the bytes that were read, the names that vLLM's model has loaded, and a canary that compares
log-probs (weight_sync.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from expert_iteration.engines.checksum import weights_checksum
from expert_iteration.engines.weight_files import read_weights


class WeightLoading:
    """Mixed into vLLM's worker, whose attributes it uses."""

    model_config: Any
    model_runner: Any
    reload_weights: Any

    def load_published(self, path: str) -> tuple[str, list[str]]:
        """Loads a file of `weight_files` into the model and returns the checksum of what was read, and the names of
        what is incomplete: parameters that nothing was loaded into, and layers of which a part was left out."""
        weights = read_weights(Path(path))
        model = self.model_runner.get_model()
        wanted = {name for name, _ in model.named_parameters()}
        loaded: set[str] = set()
        partly: list[str] = []
        load = model.load_weights

        def recorded(pairs: Iterable[tuple[str, Tensor]]) -> set[str]:
            loaded.update(load(pairs))
            partly.extend(_partly_loaded(model))
            return loaded

        model.load_weights = recorded  # vLLM only warns of what was not loaded
        try:
            self.reload_weights(weights_iterator=iter(weights.items()))
        finally:
            del model.load_weights
        _prepare_tied_heads(model)
        if self.model_config.quantization is not None:  # some parameters are computed from others and never loaded
            wanted &= loaded
        return weights_checksum(weights.items()), sorted(wanted - loaded) + partly

    def weights_fingerprint(self) -> str:
        """Checksum of the parameters as the model holds them, fused and packed; it changes when one of them does."""
        model = self.model_runner.get_model()
        parameters = ((name, parameter.detach()) for name, parameter in model.named_parameters())
        return weights_checksum((name, tensor) for name, tensor in parameters if tensor.numel() > 0)


def _prepare_tied_heads(model: Any) -> None:
    """On a CPU vLLM computes logits with a packed copy of the head. One that is tied to the embedding gets its weights
    with that, and without this its copy would stay as it was."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    layers = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    for head in layers:
        if isinstance(head, ParallelLMHead) and any(
            head.weight is layer.weight for layer in layers if layer is not head
        ):
            head.quant_method.process_weights_after_loading(head)


def _partly_loaded(model: Any) -> list[str]:
    """Layers that are waiting for more. vLLM fuses q, k and v, and gate and up: one of them alone is no complete layer,
    and vLLM would fill the others with whatever lay in memory."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    infos = ((name, layer, get_layerwise_info(layer)) for name, layer in model.named_modules())
    return [
        name
        for name, layer, info in infos
        # An embedding is padded to a round size, and the padding is never loaded.
        if info.can_load() and 0 < info.load_numel < info.load_numel_total
        if not isinstance(layer, VocabParallelEmbedding)
    ]
