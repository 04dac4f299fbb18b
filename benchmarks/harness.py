"""Times contestants against each other in one process: interleaved repetitions, collector paused, medians of many.

The clock is the processor time of the thread, not the time on the wall. All contestants compute in one thread and wait
for nothing; on a machine with other work, the wall would also time how long the thread was off the processor.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat

__all__ = ["Prepare", "Timing", "Work", "again", "interleave", "paused_collector"]


@dataclass(frozen=True, slots=True)
class Work:
    """What is timed once: a call, and how many units of work (requests, matches, ...) it does."""

    call: Callable[[], object]
    num_units: int = 1


Prepare = Callable[[int], Work]
"""Makes a contestant's work for one repetition, outside the timed part; gets the number of the repetition."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Nanoseconds per unit, one sample a repetition."""

    samples_ns: tuple[float, ...]

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_ns) / 1e3

    @property
    def best_us(self) -> float:
        return min(self.samples_ns) / 1e3


def interleave(contestants: Mapping[str, Prepare], *, repeats: int, warmup: int = 2) -> dict[str, Timing]:
    """Time all contestants in every repetition, each in turn the first, so that noise falls on all alike."""
    names = list(contestants)
    samples: dict[str, list[float]] = {name: [] for name in names}
    with paused_collector():
        for repetition in range(warmup + repeats):
            first = repetition % len(names)
            for name in names[first:] + names[:first]:
                elapsed = elapsed_ns_per_unit(contestants[name](repetition))
                if repetition >= warmup:
                    samples[name].append(elapsed)
    return {name: Timing(tuple(samples[name])) for name in names}


def elapsed_ns_per_unit(work: Work) -> float:
    """Time one piece of work; what it returns is dropped after the clock has stopped."""
    call = work.call
    start = time.thread_time_ns()
    result = call()
    elapsed = time.thread_time_ns() - start
    del result
    return elapsed / work.num_units


def again(call: Callable[[], object], times: int) -> Work:
    """Repeat a short call inside the timed part, so that the clock's own cost vanishes."""

    def loop() -> None:
        for _ in repeat(None, times):
            call()

    return Work(loop, times)


@contextmanager
def paused_collector() -> Iterator[None]:
    """Collect once, then keep the cyclic collector from running inside anybody's timed part."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
