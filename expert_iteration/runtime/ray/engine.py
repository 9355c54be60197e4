"""An engine of several vLLM replicas, each a Ray actor.

Requests are dealt out to the replicas in turn. One that dies or does not answer in time is started again, gets the
weights that the others hold, and its requests are issued again with the seeds that they had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from threading import Lock
from time import monotonic
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from torch import Tensor

from expert_iteration.engines.vllm.replica import ReplicaInfo, VllmReplica, VllmSettings
from expert_iteration.engines.weight_files import PublishedFile, WeightFiles, read_weights
from expert_iteration.errors import ComponentError, WeightSyncError
from expert_iteration.runtime.ray.placement import Placement
from expert_iteration.types import GenerationRequest, SamplingParams, Turn

START_LIMIT_S = 900.0
"""Longest wait for a replica that starts, unless a call may take longer: it loads the model and may compile it."""
MAX_CALLS = 256
"""Calls that a replica takes at a time."""
START = "start"
"""What a replica is asked first; an error in its making is the answer to it."""
Handle = Any
"""Of an actor; Ray's are untyped."""


class VllmRayEngine:
    """Generates with vLLM replicas that hold the same weights.

    Args:
        settings: of every replica.
        placement: where each replica runs; given back when the engine is closed.
        files: where publishes are written, for all replicas to read.
        time_limit_s: longest wait for one call of a replica, in seconds.
        max_restarts: how often replicas may be started again, over the whole run and all replicas.
        tell: takes a line for the user.

    Raises:
        ComponentError: a replica does not start.
    """

    def __init__(
        self,
        settings: VllmSettings,
        placement: Placement,
        files: WeightFiles,
        *,
        time_limit_s: float,
        max_restarts: int,
        tell: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._placement = placement
        self._files = files
        self._time_limit_s = time_limit_s
        self._start_limit_s = max(START_LIMIT_S, time_limit_s)
        self._max_restarts = max_restarts
        self._tell = tell
        self._policy_version = -1
        self._published: PublishedFile | None = None
        """What every replica has to hold."""
        self.restarts = 0
        self._restarting = Lock()
        """Several threads may generate at a time."""
        self._first_replica = count()
        """Which replica gets the first request of a call, so that calls of one request do not all go to the same."""
        self._infos: list[ReplicaInfo] = []
        self._replicas = [self._create(index) for index in range(len(placement.options))]
        try:
            self._infos = self._on_all(START, lambda replica: replica.info.remote(), self._start_limit_s)
        except BaseException:
            self.close()
            raise

    @property
    def policy_version(self) -> int:
        """Version of the weights that all replicas have acknowledged; -1 before the first publish."""
        return self._policy_version

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and response together."""
        return min(info.max_model_len for info in self._infos)

    @property
    def dtype(self) -> torch.dtype:
        """Type that weights are published in."""
        dtype: torch.dtype = getattr(torch, self._settings.dtype)
        return dtype

    @property
    def replica_pids(self) -> list[int]:
        """Process ids of the replicas."""
        return [info.pid for info in self._infos]

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[list[Turn]]:
        """One list per request with one turn per seed, in the order asked for.

        Raises:
            ComponentError: a replica raised an error, or died or hung more often than `max_restarts` allows.
        """
        num_replicas, first = len(self._replicas), next(self._first_replica)
        shares = {
            (first + start) % num_replicas: range(start, len(requests), num_replicas)
            for start in range(min(num_replicas, len(requests)))
        }

        def submit(index: int) -> Any:
            return self._replicas[index].generate.remote([requests[place] for place in shares[index]], sampling)

        turns: list[list[Turn]] = [[] for _ in requests]
        answers = self._gather("generate", list(shares), submit)
        for share, of_share in zip(shares.values(), answers, strict=True):
            for place, of_request in zip(share, of_share, strict=True):
                turns[place] = of_request
        return turns

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """Of every replica: log p of every token but the first, for each sequence."""
        return self._on_all("score", lambda replica: replica.score.remote(sequences))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> float:
        """Writes a file, has every replica load it, and takes over `version` when all have.

        Returns:
            The share of the weights in [0, 1] that differ from the publish before; 1 for the first.

        Raises:
            WeightSyncError: it could not be written, or a replica did not load all of it.
        """
        published, share = self._files.write(weights, version)
        self._published = published
        self._on_all("load weights", lambda replica: _load(replica, published))
        self._files.keep(published)
        self._policy_version = version
        return share

    def checksum(self) -> str:
        """Of the published file that every replica has loaded and still holds.

        Raises:
            WeightSyncError: replicas hold different versions or contents, or one whose weights changed since.
        """
        held = self._on_all("verify weights", lambda replica: replica.holds.remote())
        if len(set(held)) > 1:
            listed = "; ".join(f"replica {index}: version {each[0]}, {each[1][:16]}" for index, each in enumerate(held))
            raise WeightSyncError(f"the engine's replicas hold different weights: {listed}")
        version, checksum = held[0]
        if version != self._policy_version:
            raise WeightSyncError(f"the engine's replicas hold version {version}, not {self._policy_version}")
        return str(checksum)

    def held_weights(self) -> dict[str, Tensor]:
        """The newest file's tensors."""
        return {} if self._published is None else read_weights(self._published.path)

    def close(self) -> None:
        """Ends the replicas and removes the files."""
        for replica in self._replicas:
            ray.kill(replica)
        self._replicas = []
        self._placement.release()
        self._files.close()

    def _create(self, index: int) -> Handle:
        options = {"max_restarts": 0, "max_concurrency": MAX_CALLS, **self._placement.options[index]}
        return ray.remote(VllmReplica).options(**options).remote(self._settings)

    def _on_all(self, what: str, submit: Callable[[Handle], Any], time_limit_s: float | None = None) -> list[Any]:
        """The answer of every replica to one call."""
        everywhere = range(len(self._replicas))
        return self._gather(what, everywhere, lambda index: submit(self._replicas[index]), time_limit_s)

    def _gather(
        self, what: str, indices: Sequence[int], submit: Callable[[int], Any], time_limit_s: float | None = None
    ) -> list[Any]:
        """Answers of the replicas of these indices, submitted side by side. Whoever fails is started again and asked
        again."""
        limit = self._time_limit_s if time_limit_s is None else time_limit_s

        def ask(index: int) -> tuple[Handle, Any, float]:
            """The replica that is asked, the reference to its answer, and when that is due."""
            return self._replicas[index], submit(index), monotonic() + limit

        pending = {index: ask(index) for index in indices}
        answers: dict[int, Any] = {}
        for index in indices:
            while index not in answers:
                replica, reference, deadline = pending[index]
                try:
                    answers[index] = ray.get(reference, timeout=max(0.0, deadline - monotonic()))
                except GetTimeoutError:
                    self._replace(index, replica, what, f"did not answer within {limit:g} s")
                    pending[index] = ask(index)
                except RayTaskError as error:
                    if isinstance(error.cause, ComponentError):
                        raise error.cause from error
                    failed = "does not start" if what == START else f"failed to {what}"
                    raise ComponentError(f"vLLM replica {index} {failed}: {error.cause}") from error
                except RayActorError as error:
                    if getattr(error, "actor_init_failed", False):
                        raise ComponentError(f"vLLM replica {index} does not start: {error}") from error
                    self._replace(index, replica, what, f"died ({error})")
                    pending[index] = ask(index)
        return [answers[index] for index in indices]

    def _replace(self, index: int, failed: Handle, what: str, why: str) -> None:
        """Starts a replica again unless another thread has done so since it failed."""
        with self._restarting:
            if self._replicas[index] is failed:
                self._restart(index, what, why)

    def _restart(self, index: int, what: str, why: str) -> None:
        """Puts a new actor in the place of one that failed, with the weights that all have to hold."""
        while True:
            if self.restarts == self._max_restarts:
                raise ComponentError(
                    f"vLLM replica {index}, asked to {what}, {why}; it has been started again {self.restarts} times, "
                    f"inference_model.max_restarts={self._max_restarts} is the most"
                )
            self.restarts += 1
            self._tell(f"vLLM replica {index}, asked to {what}, {why}. It is started again.")
            ray.kill(self._replicas[index])
            self._placement.wait()
            replica = self._create(index)
            try:
                info = ray.get(replica.info.remote(), timeout=self._start_limit_s)
                if self._published is not None:
                    ray.get(_load(replica, self._published), timeout=self._time_limit_s)
            except RayTaskError as error:
                ray.kill(replica)
                raise ComponentError(f"vLLM replica {index} could not be started again: {error}") from error
            except (GetTimeoutError, RayActorError) as error:
                ray.kill(replica)
                why = f"did not start again ({error})"
            else:
                self._infos[index : index + 1] = [info]  # while all are being started there is nothing to replace
                # Only now, or another thread would be answered from weights that it did not load.
                self._replicas[index] = replica
                return


def _load(replica: Handle, published: PublishedFile) -> Any:
    return replica.load.remote(str(published.path), published.version, published.checksum)
