"""Which blocks the requests of a trace refer to: all that curves and bounds need to know of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvist.core.extents import Namespace
from kvist.errors import ArgumentError
from kvist.lab.curves.keys import Keys, chained, content_keys, mixed, scope_key
from kvist.lab.traces.fields import MAX_BLOCK_SIZE
from kvist.lab.traces.requests import HashedPrompt, Prompt, Request

__all__ = ["DEFAULT_BLOCK_SIZE", "References", "block_size_of", "references_of", "sample_of"]

DEFAULT_BLOCK_SIZE = 16
LOT = 1 << 20
"""Blocks that are named together."""

SCALE = 2.0**64


@dataclass(frozen=True, slots=True)
class References:
    """Block references of a trace: which block each request refers to, in order; equal ids are equal prefixes.

    `ids`, int64 `[num_references]`, are dense, 0 the first seen; those of request i are
    `ids[starts[i]:starts[i + 1]]`, from the root down. `block_size` is in tokens. A sample has only the references to
    blocks that were drawn with probability `rate`, and the trace has `num_seen` references; 0: those that are here.
    """

    ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    block_size: int
    name: str = ""
    rate: float = 1.0
    num_seen: int = 0

    @property
    def num_references(self) -> int:
        """References that are here."""
        return len(self.ids)

    @property
    def num_in_trace(self) -> int:
        """References of the trace, those that were not drawn included."""
        return self.num_seen or self.num_references

    @property
    def num_requests(self) -> int:
        """Requests of the trace."""
        return len(self.starts) - 1

    @property
    def num_unique(self) -> int:
        """Different blocks."""
        return int(self.ids.max(initial=-1)) + 1

    def sampled(self, rate: float, seed: int = 0) -> References:
        """Keep only references to blocks that are drawn, each with probability `rate`, by a hash of its id."""
        check_rate(rate)
        return self.only(sample_of(self.ids.astype(np.uint64), rate, seed), self.rate * rate)

    def only(self, kept: NDArray[np.bool_], rate: float) -> References:
        """Keep only some references, bool `[num_references]`, as a sample of that rate."""
        counts = np.add.reduceat(np.append(kept, False), self.starts[:-1]) if self.num_requests else np.zeros(0, int)
        counts[np.diff(self.starts) == 0] = 0
        return References(
            dense(self.ids[kept].view(np.uint64)),
            starts_of(counts),
            self.block_size,
            self.name,
            rate,
            self.num_in_trace,
        )


def references_of(
    trace: Iterable[Request], block_size: int | None = None, *, rate: float = 1.0, seed: int = 0
) -> References:
    """Read a trace, and say which blocks its requests refer to.

    `block_size` None takes that of the trace, or 16. At a trace's own block size every id of a request is a reference,
    the last one also where the block is partly filled; else, and where prompts are token ids, every full block of
    tokens is one. With a `rate` below 1 only blocks that are drawn, by a hash of what they are, are kept in memory.

    Raises ArgumentError for a block size outside 1 .. 2**20, a rate outside 0 .. 1, and what reading the trace raises.

    >>> from kvist.lab.traces.requests import TokenPrompt
    >>> asked = [[1, 2, 3, 4, 5], [1, 2, 3, 5, 6, 7], [3, 4]]
    >>> found = references_of([Request(TokenPrompt(np.array(ids, np.int32))) for ids in asked], block_size=2)
    >>> found.ids.tolist(), found.starts.tolist()
    ([0, 1, 0, 2, 3, 4], [0, 2, 5, 6])
    """
    check_rate(rate)
    size, numbers = block_size_of(trace, block_size), _Numbers()
    ids, counts, num_seen = [], [], 0
    for keys, of_requests in _named(trace, size):
        num_seen += len(keys)
        if rate < 1:
            drawn = sample_of(keys, rate, seed)
            owners = np.repeat(np.arange(len(of_requests)), of_requests)[drawn]
            keys, of_requests = keys[drawn], np.bincount(owners, minlength=len(of_requests))  # noqa: PLW2901
        ids.append(numbers.of(keys))
        counts.append(of_requests)
    starts = starts_of(np.concatenate(counts) if counts else np.zeros(0, np.int64))
    all_ids = np.concatenate(ids) if ids else np.zeros(0, np.int64)
    return References(all_ids, starts, size, str(getattr(trace, "name", "")), rate, num_seen)


def block_size_of(trace: Iterable[Request], block_size: int | None) -> int:
    """Return the block size asked for, else that of the trace's ids, else 16."""
    size = block_size if block_size is not None else getattr(trace, "block_size", None)
    if size is None and isinstance(trace, list | tuple):
        prompts = (request.prompt for request in trace)
        size = next((prompt.block_size for prompt in prompts if isinstance(prompt, HashedPrompt)), None)
    if size is not None and not 1 <= size <= MAX_BLOCK_SIZE:
        raise ArgumentError(f"block_size is {size}, must be 1 .. {MAX_BLOCK_SIZE:,}")
    return DEFAULT_BLOCK_SIZE if size is None else size


def check_rate(rate: float) -> None:
    """Raise ArgumentError for what is no rate."""
    if not 0 < rate <= 1:
        raise ArgumentError(f"rate is {rate}, must be above 0 and at most 1")


def sample_of(keys: Keys, rate: float, seed: int) -> NDArray[np.bool_]:
    """Say which blocks are drawn, bool `[n]`: those whose hash lies in the first `rate` of all hashes."""
    drawn: NDArray[np.bool_] = mixed(keys ^ mixed(np.array([seed + 1], np.uint64))) < min(rate * SCALE, SCALE - 2048)
    return drawn


def dense(keys: Keys) -> NDArray[np.int64]:
    """Number names, 0 the first seen, int64 `[n]`.

    >>> dense(np.array([7, 5, 7, 9], np.uint64)).tolist()
    [0, 1, 0, 2]
    """
    return _Numbers().of(keys)


class _Numbers:
    """Numbers names that come in lots, 0 the first seen, with 16 bytes of memory for each."""

    def __init__(self) -> None:
        self._keys, self._numbers = np.zeros(0, np.uint64), np.zeros(0, np.int64)

    def of(self, keys: Keys) -> NDArray[np.int64]:
        """Return the numbers of these names, int64 `[n]`."""
        names, firsts, inverse = np.unique(keys, return_index=True, return_inverse=True)
        places = np.searchsorted(self._keys, names)
        known = places < len(self._keys)
        known[known] = self._keys[places[known]] == names[known]
        numbers = np.empty(len(names), np.int64)
        numbers[known] = self._numbers[places[known]]
        new = np.flatnonzero(~known)
        numbers[new[np.argsort(firsts[new])]] = np.arange(len(self._keys), len(self._keys) + len(new))
        self._keys = np.insert(self._keys, places[new], names[new])
        self._numbers = np.insert(self._numbers, places[new], numbers[new])
        return numbers[inverse]


def starts_of(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each request's references begin, and the last one's end, `[num_requests + 1]`."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def _named(trace: Iterable[Request], block_size: int) -> Iterator[tuple[Keys, NDArray[np.int64]]]:
    """Yield the keys of the blocks of many requests at a time, and how many blocks each request has."""
    scopes: dict[tuple[Namespace, int], np.uint64] = {}
    contents: list[Keys] = []
    of_requests: list[np.uint64] = []
    num_blocks = 0
    for request in trace:
        of_blocks, salt = _contents(request.prompt, block_size)
        scope = (request.namespace, salt)
        if scope not in scopes:
            scopes[scope] = scope_key(*scope)
        contents.append(of_blocks)
        of_requests.append(scopes[scope])
        num_blocks += len(contents[-1])
        if num_blocks >= LOT:
            yield _chained(contents, of_requests)
            contents, of_requests, num_blocks = [], [], 0
    if contents:
        yield _chained(contents, of_requests)


def _contents(prompt: Prompt, block_size: int) -> tuple[Keys, int]:
    """Return a key for each block of a prompt, and the salt that these need to be told from others."""
    if isinstance(prompt, HashedPrompt) and prompt.block_size == block_size:
        return prompt.hash_ids.astype(np.int64, copy=False).view(np.uint64), prompt.salt
    return content_keys(prompt.tokens(), block_size), 0


def _chained(contents: list[Keys], scopes: list[np.uint64]) -> tuple[Keys, NDArray[np.int64]]:
    counts = np.fromiter(map(len, contents), np.int64, len(contents))
    return chained(np.concatenate(contents), counts, np.array(scopes, np.uint64)), counts
