"""How long an engine takes for its steps, and tiers for their blocks: given, or fitted to what was measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any, Protocol

import numpy as np

from kvist.errors import ArgumentError

__all__ = ["CostModel", "StepTime", "StepTimer"]


@dataclass(frozen=True, slots=True)
class StepTime:
    """One measured step: it computed so many prompt tokens, and one token each of so many sequences."""

    num_prefill_tokens: int
    num_decoding: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CostModel:
    """A step takes `step_s`, and more for each prompt token and for each sequence that decodes in it.

    `prefill_tokens_per_s` is how fast prompts are computed apart from the step's own time; `decode_s` is for each
    sequence that decodes. A step computes at most `max_step_tokens` tokens. What a prompt finds in host memory takes
    `host_latency_s`, and its bytes at `host_bytes_per_s`, before it is computed; slower tiers say their own. What
    attention over a long past adds is not in it. The defaults are no machine's: about those of a model of 8 billion
    parameters on one current accelerator.
    """

    prefill_tokens_per_s: float = 10_000.0
    step_s: float = 0.01
    decode_s: float = 1e-4
    max_step_tokens: int = 2_048
    host_bytes_per_s: float = 20e9
    host_latency_s: float = 20e-6

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = name.endswith("_s") and not name.endswith("_per_s")
            if not isinstance(value, int | float) or not isfinite(value) or value < 0 or not (value or least):
                bound = "of at least 0" if least else "above 0"
                raise ArgumentError(f"cost: {name} is {value!r}, must be a finite number {bound}")

    def seconds(self, num_prefill_tokens: int, num_decoding: int) -> float:
        """Return how long a step takes.

        >>> CostModel(prefill_tokens_per_s=1000, step_s=0.01, decode_s=0.001).seconds(100, 5)
        0.115
        """
        return self.step_s + num_prefill_tokens / self.prefill_tokens_per_s + num_decoding * self.decode_s

    def fitted(self, steps: Iterable[StepTime]) -> CostModel:
        """Return this model with the three times of a step that fit measured ones best: least squares, none negative.

        Raises ArgumentError for steps that tell too little: fewer than three, or no prompt tokens among them.

        >>> steps = [StepTime(0, 1, 0.011), StepTime(100, 0, 0.03), StepTime(0, 11, 0.021), StepTime(50, 2, 0.022)]
        >>> model = CostModel().fitted(steps)
        >>> round(model.step_s, 6), round(model.prefill_tokens_per_s), round(model.decode_s, 6)
        (0.01, 5000, 0.001)
        """
        told = np.array([(1, each.num_prefill_tokens, each.num_decoding, each.seconds) for each in steps], np.float64)
        if len(told) < 3 or not told[:, 1].any():
            raise ArgumentError(
                f"{len(told)} measured steps tell too little: at least 3, with prompt tokens, are needed"
            )
        step_s, prefill_s, decode_s = _least_squares(told[:, :3], told[:, 3])
        if prefill_s <= 0:
            raise ArgumentError(
                "the measured steps do not take longer with more prompt tokens: a model cannot be fitted"
            )
        return replace(self, prefill_tokens_per_s=1 / prefill_s, step_s=step_s, decode_s=decode_s)


def _least_squares(known: np.ndarray[Any, Any], seconds: np.ndarray[Any, Any]) -> tuple[float, float, float]:
    """Solve without negative coefficients: those that come out so are taken as 0, and the others are fitted again."""
    used = list(range(known.shape[1]))
    while True:
        found = np.linalg.lstsq(known[:, used], seconds, rcond=None)[0]
        if (found >= 0).all() or len(used) == 1:
            break
        used.pop(int(found.argmin()))
    solved = np.zeros(known.shape[1])
    solved[used] = np.maximum(found, 0)
    return float(solved[0]), float(solved[1]), float(solved[2])


class Steps(Protocol):
    """What plans and completes steps: the scheduler of an engine of `kvist.serve`."""

    def plan(self) -> list[Any]:
        """Choose the next step's work."""

    def complete(self, chunks: list[Any], next_tokens: Iterable[int]) -> Any:
        """Record that it is done."""


class StepTimer:
    """Times the steps of a running engine, from plan to completion, while it is entered as a context.

    `with StepTimer(engine.scheduler) as timer: engine.generate(prompts)`, then `CostModel().fitted(timer.steps)`.
    """

    def __init__(self, scheduler: Steps, clock: Callable[[], float] = time.perf_counter) -> None:
        self.steps: list[StepTime] = []
        self._scheduler = scheduler
        self._clock = clock
        self._began = 0.0

    def __enter__(self) -> StepTimer:
        plan, complete = self._scheduler.plan, self._scheduler.complete

        def timed_plan() -> list[Any]:
            self._began = self._clock()
            return plan()

        def timed_complete(chunks: list[Any], next_tokens: Iterable[int]) -> Any:
            seconds = self._clock() - self._began
            self.steps.append(_step_of(chunks, seconds))
            return complete(chunks, next_tokens)

        vars(self._scheduler).update(plan=timed_plan, complete=timed_complete)
        return self

    def __exit__(self, *_: object) -> None:
        for name in ("plan", "complete"):
            del vars(self._scheduler)[name]


def _step_of(chunks: Sequence[Any], seconds: float) -> StepTime:
    decoding = [chunk for chunk in chunks if chunk.num_tokens == 1 and chunk.request.num_generated_tokens]
    num_tokens = sum(chunk.num_tokens for chunk in chunks)
    return StepTime(num_tokens - len(decoding), len(decoding), seconds)
