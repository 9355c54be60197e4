from __future__ import annotations

import hashlib
import json
import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from expert_iteration.atomic import atomic_directory
from expert_iteration.checkpoint import CheckpointWriter, Snapshot, check_writable, latest, load_policy, load_state
from expert_iteration.checkpoint_files import COMPLETE, complete, damage, prune
from expert_iteration.errors import ComponentError, UserError
from expert_iteration.model import Policy

NOBODY = 65534
IDS = torch.tensor([[3, 1, 4, 1, 5]])


def make_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
            tie_word_embeddings=True,
        )
    ).eval()


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "one": 3}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary)), eos_token="</s>")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    return tokenizer


def save(model: torch.nn.Module, folder: Path, step: int, **metadata: float) -> Path:
    policy = Policy("tiny", model, torch.float32)
    state = {"counters": {"a": 1}, "moments": [torch.tensor([0.1, 0.2])]}
    return Snapshot(policy, make_tokenizer(), step=step, metadata=metadata, state=state).write(folder)


def test_a_saved_model_loads_with_transformers_and_gives_the_same_logits(tmp_path: Path) -> None:
    policy = Policy("tiny", make_model(), torch.float32)
    folder = Snapshot(policy, make_tokenizer(), step=7, metadata={"run": "test"}).write(tmp_path / "checkpoints")
    assert folder == tmp_path / "checkpoints" / "checkpoint_0007"
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert loaded.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, policy.model(IDS).logits)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"
    assert json.loads((folder / "metadata.json").read_text()) == {
        "run": "test",
        "step": 7,
        "base_model": "tiny",
        "is_lora": False,
    }


def test_a_saved_adapter_loads_with_peft_and_gives_the_same_logits(tmp_path: Path) -> None:
    base = make_model()
    base.save_pretrained(tmp_path / "base")
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), LoraConfig(r=2, target_modules="all-linear")
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    folder = save(model, tmp_path, 12345)
    assert folder.name == "checkpoint_12345"
    assert set(load_file(folder / "adapter_model.safetensors")) == {
        name.replace(".default", "") for name, _ in model.named_parameters() if "lora_" in name
    }
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(tmp_path / "base")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), folder).eval()
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
        assert not torch.allclose(loaded(IDS).logits, base(IDS).logits)


def test_the_completion_marker_lists_every_file_with_its_checksum(tmp_path: Path) -> None:
    folder = save(make_model(), tmp_path, 1)
    sums = dict(reversed(line.split("  ")) for line in (folder / COMPLETE).read_text().splitlines())
    assert set(sums) == {file.name for file in folder.iterdir()} - {COMPLETE}
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"} <= set(sums)
    for name, digest in sums.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    for seed in (0, 1):
        save(make_model(seed), tmp_path, 3)
    embedding = load_file(tmp_path / "checkpoint_0003" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(embedding, make_model(1).model.embed_tokens.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_0003"]


def test_latest_is_the_complete_one_of_the_highest_step(tmp_path: Path) -> None:
    assert latest(tmp_path / "nowhere") is None
    assert latest(tmp_path) is None
    for name in (
        "checkpoint_0009",
        "checkpoint_0100",
        "checkpoint_10000",
        "checkpoint_0101-copy",
        ".checkpoint_0999-x",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / COMPLETE).touch()
    (tmp_path / "checkpoint_20000").mkdir()
    assert latest(tmp_path) == tmp_path / "checkpoint_10000"


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    with atomic_directory(target, replace=True) as new:
        (new / "file").write_text("old")
    with pytest.raises(RuntimeError, match="half way"), atomic_directory(target, replace=True) as new:
        (new / "file").write_text("new")
        raise RuntimeError("half way")
    assert (target / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_of_two_writers_at_once_the_first_to_finish_stays_unless_replaced(tmp_path: Path) -> None:
    for replace, kept in ((False, "first to finish"), (True, "last to finish")):
        target = tmp_path / str(replace)
        with atomic_directory(target, replace=replace) as slow:
            (slow / "file").write_text("last to finish")
            with atomic_directory(target, replace=replace) as fast:
                (fast / "file").write_text("first to finish")
            assert (target / "file").read_text() == "first to finish"
        assert (target / "file").read_text() == kept
    assert {path.name for path in tmp_path.iterdir()} == {"False", "True"}


def test_a_folder_that_cannot_be_written_is_reported_before_the_run(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "checkpoints")
    assert list((tmp_path / "new" / "checkpoints").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as caught:
        check_writable(tmp_path / "file" / "checkpoints")
    (problem,) = caught.value.problems
    assert problem.key == "logging.checkpoint_dir"
    assert str(tmp_path / "file" / "checkpoints") in str(problem)


@pytest.mark.parametrize("lora", [False, True])
def test_a_policy_gets_its_weights_back_bit_for_bit(tmp_path: Path, lora: bool) -> None:
    def policy_of(seed: int) -> Policy:
        model = make_model()  # the base is the same
        torch.manual_seed(seed)
        if lora:
            options = {"init_lora_weights": False}
            model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", **options))
        else:
            torch.nn.init.normal_(model.model.embed_tokens.weight)
        return Policy("tiny", model, torch.float32)

    trained, fresh = policy_of(1), policy_of(2)
    folder = Snapshot(trained, make_tokenizer(), step=1, metadata={}).write(tmp_path)
    pairs = list(zip(trained.model.state_dict().items(), fresh.model.state_dict().values(), strict=True))
    assert not all(torch.equal(old, new) for (_, old), new in pairs)
    load_policy(fresh, folder)
    for name, tensor in trained.model.state_dict().items():
        assert torch.equal(tensor, fresh.model.state_dict()[name]), name


def test_a_snapshot_does_not_follow_the_training(tmp_path: Path) -> None:
    model = make_model()
    moments = torch.tensor([1.0])
    policy = Policy("tiny", model, torch.float32)
    snapshot = Snapshot(policy, make_tokenizer(), step=1, metadata={}, state={"moments": moments})
    before = model.model.norm.weight.detach().clone()
    with torch.no_grad():
        model.model.norm.weight += 1
        moments += 1
    folder = snapshot.write(tmp_path)
    assert torch.equal(load_file(folder / "model.safetensors")["model.norm.weight"], before)
    assert load_state(folder)["moments"].tolist() == [1.0]


def test_damage_is_found_by_name(tmp_path: Path) -> None:
    folder = save(make_model(), tmp_path, 1)
    assert damage(folder) is None
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1  # one bit
    weights.write_bytes(content)
    assert damage(folder) == "model.safetensors is not what was written"
    (folder / "state.pt").write_bytes((folder / "state.pt").read_bytes()[:-1])
    weights.unlink()
    assert damage(folder) == "model.safetensors is missing"


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    for step, score in ((1, 0.1), (2, 0.9), (3, 0.5), (4, 0.2)):
        save(make_model(), tmp_path, step, score=score)
    prune(tmp_path, None, keep_best=False)
    assert len(complete(tmp_path)) == 4
    prune(tmp_path, 1, keep_best=True)
    assert [folder.name for folder in complete(tmp_path)] == ["checkpoint_0004", "checkpoint_0002"]
    prune(tmp_path, 1, keep_best=False)
    assert [folder.name for folder in tmp_path.iterdir()] == ["checkpoint_0004"]


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond 40 kB, which the weights do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def no_folder(folder: Path) -> Iterator[None]:
    """A file is in its place."""
    away = folder.with_name("away")
    folder.rename(away)
    folder.touch()
    yield
    folder.unlink()
    away.rename(folder)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nobody may write there. Root always may, so as root this works as somebody else."""
    own = os.geteuid()
    folder.chmod(0o555)
    if own == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(own)
        folder.chmod(0o755)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that every user may read: pytest's own are its user's alone."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


FAULTS: dict[str, Callable[[Path], AbstractContextManager[None]]] = {
    "full disk": lambda folder: full_disk(),
    "no folder": no_folder,
    "read-only folder": read_only,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_save_that_fails_is_told_and_the_one_before_stays(open_folder: Path, fault: str) -> None:
    told: list[str] = []
    policy = Policy("tiny", make_model(), torch.float32)
    folder = open_folder / "checkpoints"
    writer = CheckpointWriter(folder, keep_last=None, keep_best=False, tell=told.append)

    def save_step(step: int) -> None:
        writer.submit(Snapshot(policy, make_tokenizer(), step=step, metadata={}))
        writer.wait()

    save_step(1)
    with FAULTS[fault](folder):
        with pytest.raises(ComponentError, match="the last checkpoint could not be saved"):
            save_step(2)
        assert told[1].startswith("The checkpoint of step 2 could not be saved")
        if fault != "no folder":
            assert told[1].endswith(f"The last good one is {folder / 'checkpoint_0001'}.")
            assert [path.name for path in folder.iterdir()] == ["checkpoint_0001"]  # nothing half-written
    assert damage(folder / "checkpoint_0001") is None
    save_step(3)
    assert [checkpoint.name for checkpoint in complete(folder)] == ["checkpoint_0003", "checkpoint_0001"]
