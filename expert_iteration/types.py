"""The data in the order in which it flows, and the contracts of the parts that pass it on.

    Prompt -> GenerationRequest -> Turn -> Rollout -> RolloutGroup -> TrainingSample -> Batch

Legend for shapes: B sequences of a batch, T tokens of a sequence, N samples of a group.

Example, one prompt of three tokens answered twice (token 2 ends a response):

    Prompt(row_id=7, messages=({"role": "user", "content": "1 + 1?"},), gold="2")
    GenerationRequest(prompt_ids=(5, 6, 7), seeds=(11, 12))
    Turn(prompt_ids=(5, 6, 7), response_ids=(9, 2), log_probs=(-0.1, -0.2), finish_reason="stop")
    Rollout(turns=(that turn,), text="2", score=Score(1.0, {"success": 1.0}), policy_version=3)
    RolloutGroup(prompt, epoch=0, rollouts=(that rollout, the other one))
    TrainingSample: token_ids [5, 6, 7, 9, 2], loss_mask [0, 0, 0, 1, 1]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:  # rewards need no torch: their worker processes start in a third of the time and memory without
    import torch
    from torch import Tensor

FinishReason = Literal["stop", "length"]
Split = Literal["train", "test"]

POLICY = "policy"
"""Source of the rollouts that the engine has sampled."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a data set."""

    row_id: int
    """Unique over all splits of the data set; groups are keyed by it and the epoch, never by the text."""
    messages: tuple[Mapping[str, str], ...]
    """Chat messages with "role" and "content"."""
    gold: Any = None
    """What the task needs to score a response; only the task reads it."""
    question: str = ""
    """The row's own text, before the prompt template; files of responses name prompts by it."""


@dataclass(frozen=True, slots=True)
class Score:
    """What a task says about one response."""

    reward: float | None
    """The reward that selection uses; None means that the response could not be scored."""
    details: dict[str, float] = field(default_factory=dict)
    """Named components. "success" (0 or 1) is the exact metric that evaluation reports."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the engine draws tokens."""

    temperature: float
    """0 is greedy."""
    max_tokens: int
    """Most tokens of a response, the end token included."""
    stop_token_ids: tuple[int, ...]
    """Sampling one of these ends the response; it stays the last of the response ids."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and the seeds of the samples wanted for it: len(seeds) samples."""

    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion, exactly as the engine sampled it."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    """The sampled ids, the end token included when it was sampled; never re-tokenised text."""
    log_probs: tuple[float, ...]
    """log p(token) under the model at temperature 1 over the whole vocabulary, one per response id,
    whatever temperature, top-p, top-k or min-p the token was drawn with. NaN where no engine has sampled it."""
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Rollout:
    """A list of turns (one for now) with its score."""

    turns: tuple[Turn, ...]
    text: str
    """The response as the reward saw it."""
    score: Score
    policy_version: int
    """The version of the weights, read when the request was dispatched."""
    source: str = POLICY
    """Who wrote it: the policy, or what env.expert_data says."""

    @property
    def reward(self) -> float | None:
        return self.score.reward

    @property
    def truncated(self) -> bool:
        """Whether the length limit cut the last turn."""
        return self.turns[-1].finish_reason == "length"

    @property
    def num_response_tokens(self) -> int:
        return sum(len(turn.response_ids) for turn in self.turns)


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All rollouts of one visit to one prompt. Selection looks at a group and at nothing else."""

    prompt: Prompt
    epoch: int
    """How often the data set had been passed over before this visit."""
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One selected rollout, ready for the buffer. Tensors are on the CPU and carry no graph."""

    token_ids: Tensor
    """(T,) int64."""
    loss_mask: Tensor
    """(T,) bool, true on response tokens."""
    engine_log_probs: Tensor
    """(T,) float32, NaN outside the response and in responses that no engine has sampled."""
    ref_log_probs: Tensor | None
    """(T,) float32, zero outside the response; None when nothing needs a reference."""
    reward: float
    policy_version: int
    row_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch: samples padded on the right to a common length."""

    token_ids: Tensor
    """(B, T) int64."""
    attention_mask: Tensor
    """(B, T) bool, true on prompt and response, from lengths and never from `ids != pad`."""
    loss_mask: Tensor
    """(B, T) bool."""
    engine_log_probs: Tensor
    """(B, T) float32, NaN outside the response and in responses that no engine has sampled."""
    ref_log_probs: Tensor | None
    """(B, T) float32 or None."""
    rewards: Tensor
    """(B,) float32."""
    importance_weights: Tensor
    """(B,) float32, at most 1; all 1 unless prioritized sampling corrects for its preference."""
    policy_versions: Tensor
    """(B,) int64."""
    row_ids: Tensor
    """(B,) int64."""

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: None if value is None else value.to(device) for name, value in tensors.items()}
        return Batch(**moved)

    @property
    def num_sequences(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens, without padding."""
        return int(self.attention_mask.sum())

    @property
    def num_response_tokens(self) -> int:
        return int(self.loss_mask.sum())


ScoreMany = Callable[[Sequence[tuple[Prompt, str]]], list[Score]]
"""Scores prompts with responses to them, in order."""


class Task(Protocol):
    """A data set with its verifiable reward."""

    name: str

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Rows of a split; no question text stands in two splits."""
        ...

    def score(self, prompt: Prompt, response_text: str) -> Score:
        """Never raises for any text; reward None when the response could not be scored."""
        ...

    def self_check(self, score_many: ScoreMany | None = None) -> None:
        """Raises UserError, naming rows, unless every gold answer scores the maximum, and neither an empty response nor
        another row's answer does; with env.invalid_rows=drop such rows are dropped.

        `score_many` scores, so that a verifier with a time limit can do it; blank scores in place.
        """
        ...


class Verifier(Protocol):
    """Scores many responses at once; `tasks.make_verifier` builds it around a task."""

    def score_many(self, items: Sequence[tuple[Prompt, str]]) -> list[Score]:
        """One score per prompt and response text, in order."""
        ...

    def close(self) -> None:
        """Ends what it has started."""
        ...


class Engine(Protocol):
    """Generates with its own copy of the weights."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that it holds."""
        ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and response together."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type of its weights, which what is published is cast to."""
        ...

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[list[Turn]]:
        """One list per request with one turn per seed, in the order asked for."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> float:
        """Replaces every weight and returns the share of them in [0, 1] that this has changed; raises WeightSyncError
        that lists missing, unknown or misshapen names."""
        ...

    def checksum(self) -> str:
        """Checksum over names, dtypes, shapes and bits of the weights that it holds now."""
        ...

    def held_weights(self) -> dict[str, Tensor]:
        """What was loaded last, by name: `load_weights` of it changes nothing. Not to be written to."""
        ...

    def close(self) -> None:
        """Ends what it has started."""
        ...


@runtime_checkable
class ScoringEngine(Engine, Protocol):
    """An engine that can say what it makes of given tokens."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """Of every replica: log p(token | tokens before it) at temperature 1 of every token but the first, for each
        sequence."""
        ...


class WeightSync(Protocol):
    """Carries the trained weights to the engine and proves that they arrived."""

    changed_share: float
    """Share of the engine's weights that the last publish changed."""
    canary_difference: float | None
    """Mean absolute difference of trainer's and engine's log-probs after it; None where nothing compares them."""

    def publish(self) -> int:
        """Pushes the weights, verifies them, returns the new policy version."""
        ...

    def verify(self) -> None:
        """Raises WeightSyncError unless the engine holds the version and content last published."""
        ...

    def published_weights(self) -> dict[str, Tensor]:
        """What the engine holds, by name. Not to be written to."""
        ...
