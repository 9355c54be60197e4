"""From prompts to training samples: generate, score, select, then ask the reference about what was kept.

Task.prompts -> Engine.generate -> Verifier.score_many -> TopKRewardSelector -> Reference -> samples
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from time import perf_counter
from typing import Any

import torch

from expert_iteration.chat import ChatEncoder
from expert_iteration.engine_gate import EngineGate
from expert_iteration.errors import Problem, UserError
from expert_iteration.expert_data import ExpertData
from expert_iteration.metrics.aggregate import collection_metrics
from expert_iteration.metrics.logger import MetricsLogger
from expert_iteration.reference import Reference, with_reference
from expert_iteration.seeding import derive_seed
from expert_iteration.selection import Selection, TopKRewardSelector
from expert_iteration.statistics import summarize
from expert_iteration.types import (
    POLICY,
    Engine,
    GenerationRequest,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
    TrainingSample,
    Turn,
    Verifier,
    WeightSync,
)


@dataclass(frozen=True, slots=True)
class Visit:
    """One turn of a prompt in the data order."""

    prompt: Prompt
    epoch: int
    prompt_ids: tuple[int, ...]

    @property
    def key(self) -> tuple[int, int]:
        """Row and epoch, which no other visit has."""
        return self.prompt.row_id, self.epoch


class PromptStream:
    """Endless passes over the prompts, each in a new order fixed by the seed.

    Prompts whose ids leave no room for the response are left out and counted, the first time that they are met.

    Args:
        prompts: at least one.
        encoder: turns messages into ids.
        max_prompt_tokens: most ids of a prompt.
        seed: fixes the orders.
    """

    def __init__(self, prompts: Sequence[Prompt], encoder: ChatEncoder, *, max_prompt_tokens: int, seed: int) -> None:
        self._prompts = list(prompts)
        self._encoder = encoder
        self._max_prompt_tokens = max_prompt_tokens
        self._seed = seed
        self._too_long: set[int] = set()
        self._put_back: deque[Visit] = deque()
        self._under_way: dict[tuple[int, int], Visit] = {}
        """Taken and not yet told to be finished, by row and epoch, in the order in which they were taken."""
        self._asked_twice: set[tuple[int, int]] = set()
        self._lock = Lock()
        """Collections may be made in several threads."""
        self._start_epoch(0)

    @property
    def dropped_too_long(self) -> int:
        """Prompts left out so far."""
        return len(self._too_long)

    def take(self, count: int) -> list[Visit]:
        """The next `count` visits. Raises UserError when no prompt of the data set fits."""
        visits: list[Visit] = []
        with self._lock:
            while len(visits) < count:
                if self._put_back:
                    visits.append(self._put_back.popleft())
                elif (visit := self._next()) is not None:
                    visits.append(visit)
            self._under_way |= {visit.key: visit for visit in visits}
        return visits

    def finish(self, visits: Sequence[Visit]) -> None:
        """Tells that what came of these is stored: a run that is resumed need not ask them again."""
        with self._lock:
            for visit in visits:
                self._under_way.pop(visit.key, None)

    def put_back(self, visits: Sequence[Visit]) -> bool:
        """Hands these out again before all others; False, and nothing done, where one has been put back before."""
        keys = {visit.key for visit in visits}
        with self._lock:
            if keys & self._asked_twice:
                return False
            self._asked_twice |= keys
            self._put_back.extend(visits)
            for key in keys:
                del self._under_way[key]
        return True

    def state_dict(self) -> dict[str, Any]:
        """Where the passes stand, in plain types. What is under way counts as not taken."""
        with self._lock:
            waiting = [*self._under_way.values(), *self._put_back]
            return {
                "epoch": self._epoch,
                "position": self._position,
                "too_long": sorted(self._too_long),
                "waiting": [visit.key for visit in waiting],
                "asked_twice": sorted(self._asked_twice),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken, with what was under way first, in the same order."""
        by_row = {prompt.row_id: prompt for prompt in self._prompts}
        with self._lock:
            self._start_epoch(state["epoch"])
            self._position = state["position"]
            self._too_long = set(state["too_long"])
            self._asked_twice = {(row_id, epoch) for row_id, epoch in state["asked_twice"]}
            self._under_way = {}
            waiting = [(by_row[row_id], epoch) for row_id, epoch in state["waiting"]]
            self._put_back = deque(Visit(prompt, epoch, self._encoder.encode(prompt)) for prompt, epoch in waiting)

    def _next(self) -> Visit | None:
        """The next prompt of the data order; None where it has no room."""
        if self._position == len(self._order):
            self._start_epoch(self._epoch + 1)
        prompt = self._prompts[self._order[self._position]]
        self._position += 1
        if prompt.row_id in self._too_long:
            return None
        prompt_ids = self._encoder.encode(prompt)
        if len(prompt_ids) <= self._max_prompt_tokens:
            return Visit(prompt, self._epoch, prompt_ids)
        self._drop(prompt)
        return None

    def _start_epoch(self, epoch: int) -> None:
        generator = torch.Generator().manual_seed(derive_seed(self._seed, "data order", epoch))
        self._order = torch.randperm(len(self._prompts), generator=generator).tolist()
        self._epoch, self._position = epoch, 0

    def _drop(self, prompt: Prompt) -> None:
        self._too_long.add(prompt.row_id)
        if len(self._too_long) == len(self._prompts):
            raise UserError(
                Problem(
                    "inference_model.max_tokens",
                    f"leaves {self._max_prompt_tokens} tokens for the prompt",
                    f"none of the {len(self._prompts)} prompts is that short",
                    "lower inference_model.max_tokens, or take shorter prompts or a model with a longer context",
                )
            )


@dataclass(frozen=True, slots=True)
class Collection:
    """What one call of the collector gave."""

    groups: tuple[RolloutGroup, ...]
    selections: tuple[Selection, ...]
    """One per group."""
    samples: tuple[TrainingSample, ...]
    """What was kept; with reference log-probs once `Collector.attach_reference` has run."""
    generated_tokens: int
    generation_seconds: float
    visits: tuple[Visit, ...]
    """What was asked."""
    policy_version: int
    """Of the weights that all of it was sampled from."""

    @property
    def dialog_turns(self) -> int:
        """Completions that the policy has sampled."""
        return sum(rollout.source == POLICY for group in self.groups for rollout in group.rollouts)

    def metrics(self) -> dict[str, float]:
        """`reward/*`, `length/*`, `selection/*` and, with expert data, `expert/*` of the collection."""
        outcomes = [selection.outcome for selection in self.selections]
        metrics = {
            **collection_metrics(self.groups),
            "selection/accepted_groups": outcomes.count("accepted"),
            "selection/tied_groups": outcomes.count("tied"),
            "selection/unscored_groups": outcomes.count("unscored"),
            "selection/below_min_reward_groups": outcomes.count("below_min_reward"),
            "selection/truncated_groups": outcomes.count("truncated"),
            "selection/not_above_groups": outcomes.count("not_above"),
            "selection/accepted_samples": len(self.samples),
        }
        if self.samples:
            metrics["selection/accepted_reward_mean"] = summarize([sample.reward for sample in self.samples]).mean
        if "expert/rollouts" in metrics:
            kept = [
                group.rollouts[index].source != POLICY
                for group, selection in zip(self.groups, self.selections, strict=True)
                for index in selection.indices
            ]
            metrics["expert/selected"] = sum(kept)
            if kept:
                metrics["expert/selected_share"] = summarize(kept).mean
        return metrics


class Collector:
    """Samples `repeats` completions for each of `prompts_per_collection` prompts and keeps the best.

    With `verify_first` the engine proves before each collection that it holds what was published last; without it the
    loop sees to that.

    `collect` is the verb of the loops. It has two halves so that the first may run beside training: `sample` touches
    the engine, `attach_reference` may touch the policy (a LoRA run's reference is the policy with its adapter off).
    """

    def __init__(
        self,
        *,
        verifier: Verifier,
        stream: PromptStream,
        encoder: ChatEncoder,
        engine: Engine,
        weight_sync: WeightSync,
        selector: TopKRewardSelector,
        reference: Reference | None,
        sampling: SamplingParams,
        prompts_per_collection: int,
        repeats: int,
        include_stop: bool,
        seed: int,
        logger: MetricsLogger,
        gate: EngineGate,
        on_collected: Callable[[Sequence[RolloutGroup]], None],
        verify_first: bool = True,
        expert_data: ExpertData | None = None,
    ) -> None:
        self.stream = stream
        self._verifier = verifier
        self._encoder = encoder
        self._engine = engine
        self._weight_sync = weight_sync
        self._selector = selector
        self._reference = reference
        self._sampling = sampling
        self._prompts_per_collection = prompts_per_collection
        self._repeats = repeats
        self._include_stop = include_stop
        self._expert_data = expert_data
        self._seed = seed
        self._logger = logger
        self._gate = gate
        self._on_collected = on_collected
        self._verify_first = verify_first

    def collect(self) -> Collection:
        """One collection, ready for the buffer."""
        return self.attach_reference(self.sample())

    def sample(self) -> Collection:
        """Generates, scores and selects. May run in several threads at a time."""
        visits = self.stream.take(self._prompts_per_collection)
        with self._gate.shared():
            if self._verify_first:
                with self._logger.stage("verify"):
                    self._weight_sync.verify()
            version = self._engine.policy_version
            start = perf_counter()
            with self._logger.stage("generate"):
                turns = self._engine.generate([self._request(visit) for visit in visits], self._sampling)
            generation_seconds = perf_counter() - start
        with self._logger.stage("score"):
            groups = self._scored_groups(visits, turns, version)
        self._on_collected(groups)
        with self._logger.stage("select"):
            selections = tuple(self._selector.select(group) for group in groups)
            samples = tuple(
                training_sample(group, group.rollouts[index])
                for group, selection in zip(groups, selections, strict=True)
                for index in selection.indices
            )
        generated = sum(len(turn.response_ids) for group in turns for turn in group)
        return Collection(groups, selections, samples, generated, generation_seconds, tuple(visits), version)

    def take_back(self, collection: Collection) -> bool:
        """Puts its prompts before all others, to be asked again. False where they have been asked twice already."""
        return self.stream.put_back(collection.visits)

    def attach_reference(self, collection: Collection) -> Collection:
        """The collection with the reference's log-probs on its samples."""
        with self._logger.stage("reference"):
            samples = tuple(with_reference(self._reference, collection.samples))
        return replace(collection, samples=samples)

    def dropped(self) -> dict[str, float]:
        """What could not be used so far, as metrics: prompts, and rows of the expert data."""
        expert = {} if self._expert_data is None else self._expert_data.metrics()
        return {"prompts/dropped_too_long": self.stream.dropped_too_long, **expert}

    def _request(self, visit: Visit) -> GenerationRequest:
        seeds = tuple(
            derive_seed(self._seed, "sample", visit.prompt.row_id, visit.epoch, index) for index in range(self._repeats)
        )
        return GenerationRequest(visit.prompt_ids, seeds)

    def _scored_groups(
        self, visits: Sequence[Visit], turns: Sequence[Sequence[Turn]], version: int
    ) -> tuple[RolloutGroup, ...]:
        """One group per visit: what was sampled, then what experts wrote. All of it goes to the verifier together, so
        that it may be scored side by side."""
        groups = [
            [*((turn, POLICY) for turn in sampled), *self._expert_turns(visit)]
            for visit, sampled in zip(visits, turns, strict=True)
        ]
        texts = [[self._encoder.decode(turn, include_stop=self._include_stop) for turn, _ in group] for group in groups]
        items = [(visit.prompt, text) for visit, group in zip(visits, texts, strict=True) for text in group]
        scores = iter(self._verifier.score_many(items))
        return tuple(
            RolloutGroup(
                visit.prompt,
                visit.epoch,
                tuple(
                    Rollout((turn,), text, next(scores), version, source)
                    for (turn, source), text in zip(group, group_texts, strict=True)
                ),
            )
            for visit, group, group_texts in zip(visits, groups, texts, strict=True)
        )

    def _expert_turns(self, visit: Visit) -> list[tuple[Turn, str]]:
        responses = () if self._expert_data is None else self._expert_data.responses.get(visit.prompt.row_id, ())
        return [(response.turn(visit.prompt_ids), response.source) for response in responses]


def training_sample(group: RolloutGroup, rollout: Rollout) -> TrainingSample:
    """The sampled ids, never re-tokenised text, with the loss on the response alone."""
    (turn,) = rollout.turns
    prompt_length, response_length = len(turn.prompt_ids), len(turn.response_ids)
    assert rollout.reward is not None, "an unscored rollout is never selected"
    return TrainingSample(
        token_ids=torch.tensor(turn.prompt_ids + turn.response_ids),
        loss_mask=torch.arange(prompt_length + response_length) >= prompt_length,
        engine_log_probs=torch.tensor((float("nan"),) * prompt_length + turn.log_probs),
        ref_log_probs=None,
        reward=rollout.reward,
        policy_version=rollout.policy_version,
        row_id=group.prompt.row_id,
        epoch=group.epoch,
    )
