"""How long content should stay: priorities by range of a prompt, and how long they count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from operator import itemgetter
from typing import Any, NamedTuple

from kvist.errors import ArgumentError, ArgumentTypeError

__all__ = ["DEFAULT_KEEP", "DEFAULT_PRIORITY", "MAX_PRIORITY", "Keep", "Retention"]

DEFAULT_PRIORITY = 35
MAX_PRIORITY = 100


class Keep(NamedTuple):
    """How an extent is kept: its priority, and for how many seconds after its last use (None: without end)."""

    priority: int
    duration_s: float | None


DEFAULT_KEEP = Keep(DEFAULT_PRIORITY, None)


@dataclass(frozen=True, slots=True)
class Retention:
    """Priorities of a prompt's ranges `(start, end, priority, duration_s)`, and of what is generated after it.

    Ranges are in tokens and do not overlap; `end` None reaches to the end of the prompt and only the last range may
    have it; a block counts with the range that holds its first token, and with the default of 35 where none does. With
    the policy `priority`, the least priority is evicted first. A duration counts from the moment nobody uses the
    content any more; then its priority falls back to the default. Raises ArgumentError for ranges that cannot be.

    >>> Retention([(0, 1024, 80, None), (1024, None, 10, 30.0)], decode_priority=20).ranges[1]
    (1024, None, 10, 30.0)
    """

    ranges: Sequence[tuple[int, int | None, int, float | None]] = ()
    decode_priority: int = DEFAULT_PRIORITY
    decode_duration_s: float | None = None

    def __post_init__(self) -> None:
        _check_keep("decode", self.decode_priority, self.decode_duration_s)
        for each in self.ranges:
            _check_range(each)
        object.__setattr__(self, "ranges", tuple(sorted(self.ranges, key=itemgetter(0))))
        for before, after in pairwise(self.ranges):
            if before[1] is None or before[1] > after[0]:
                raise ArgumentError(f"retention: range {after!r} overlaps {before!r}")

    def keeps(self, start: int, end: int, block_size: int, num_prompt_tokens: int) -> Iterator[tuple[int, Keep]]:
        """Yield, for the blocks start .. end-1 of a sequence, runs that are kept alike, as (end of the run, how)."""
        last: Keep | None = None
        for boundary, keep in self._changes(block_size, num_prompt_tokens):
            stop = min(boundary, end)
            if stop > start:
                if last is not None and keep != last:
                    yield start, last
                last, start = keep, stop
        if last is not None:
            yield start, last

    def _changes(self, block_size: int, num_prompt_tokens: int) -> Iterator[tuple[int, Keep]]:
        """Yield runs of blocks from the first one on: (end of the run, how it is kept); the last has no end."""
        num_prompt_blocks = -(-num_prompt_tokens // block_size)
        for start, end, priority, duration_s in self.ranges:
            yield min(-(-start // block_size), num_prompt_blocks), DEFAULT_KEEP
            yield (
                (num_prompt_blocks if end is None else min(-(-end // block_size), num_prompt_blocks)),
                Keep(priority, duration_s),
            )
        yield num_prompt_blocks, DEFAULT_KEEP
        yield 2**62, Keep(self.decode_priority, self.decode_duration_s)


def _check_range(each: Any) -> None:
    name = f"retention range {each!r}"
    if not isinstance(each, tuple) or len(each) != 4:
        raise ArgumentTypeError(f"{name} must be a tuple (start, end, priority, duration_s)")
    start, end, priority, duration_s = each
    _check_keep(name, priority, duration_s)
    if type(start) is not int or not (end is None or type(end) is int):
        raise ArgumentTypeError(f"{name}: start and end must be ints, or end None")
    if start < 0 or (end is not None and end <= start):
        raise ArgumentError(f"{name}: is empty, reversed or begins before 0")


def _check_keep(name: str, priority: Any, duration_s: Any) -> None:
    if type(priority) is not int:
        raise ArgumentTypeError(f"{name}: priority is {priority!r}, must be an int")
    if not 0 <= priority <= MAX_PRIORITY:
        raise ArgumentError(f"{name}: priority is {priority}, must be 0 .. {MAX_PRIORITY}")
    if duration_s is None:
        return
    if isinstance(duration_s, bool) or not isinstance(duration_s, int | float):
        raise ArgumentTypeError(f"{name}: duration is {duration_s!r}, must be seconds or None")
    if not isfinite(duration_s) or duration_s < 0:
        raise ArgumentError(f"{name}: duration is {duration_s}, must not be negative")
