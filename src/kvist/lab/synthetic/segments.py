"""Prompts put together of segments, such as a system prompt or an answer: their token ids, and ids of their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvist.lab.traces.requests import GOLDEN, mixed

__all__ = ["Segment", "block_ids", "tokens_of"]

MAX_ID = np.uint64(2**63 - 1)


class Segment(NamedTuple):
    """Text of so many tokens; equal ids are equal text."""

    id: int
    num_tokens: int


def tokens_of(segments: Sequence[Segment]) -> NDArray[np.int32]:
    """Return the token ids of segments one after another, `[num_tokens]`: fixed pseudo-random ones of each id."""
    with np.errstate(over="ignore"):
        pieces = [
            mixed(mixed(np.full(1, id, np.uint64)) + np.arange(1, num_tokens + 1, dtype=np.uint64) * GOLDEN)
            for id, num_tokens in segments
        ]
    return (np.concatenate(pieces) >> np.uint64(33)).astype(np.int32)


def block_ids(segments: Sequence[Segment], block_size: int) -> NDArray[np.int64]:
    """Return the ids of a prompt's prefix-chained blocks, `[ceil(num_tokens / block_size)]`, 0 .. 2**63-1.

    Where a block ends, and what segments there are up to there, says what it and all before it hold; so an id is a hash
    of these, and no tokens are needed. The last block may end early, and then has an id of its own.

    >>> one, other = [Segment(5, 8), Segment(6, 3)], [Segment(5, 8), Segment(7, 9)]
    >>> (block_ids(one, 4)[:2] == block_ids(other, 4)[:2]).tolist(), len(block_ids(one, 4)), len(block_ids(other, 4))
    ([True, True], 3, 5)
    """
    num_tokens = sum(segment.num_tokens for segment in segments)
    ends = np.minimum(np.arange(1, -(-num_tokens // block_size) + 1, dtype=np.int64) * block_size, num_tokens)
    bounds = np.cumsum([0, *(segment.num_tokens for segment in segments)])
    with np.errstate(over="ignore"):
        prefixes = _prefixes(segments)[np.searchsorted(bounds, ends, "left") - 1]
        hashes = mixed(prefixes + ends.astype(np.uint64) * GOLDEN)
    return (hashes & MAX_ID).astype(np.int64)


def _prefixes(segments: Sequence[Segment]) -> NDArray[np.uint64]:
    """Return for each segment a hash of itself and of those before it, with their lengths, `[num_segments]`."""
    found, parent = np.empty(len(segments), np.uint64), np.zeros(1, np.uint64)
    for index, (id, num_tokens) in enumerate(segments):
        found[index] = (here := mixed(parent + np.full(1, id, np.uint64) * GOLDEN))[0]
        parent = mixed(here + np.uint64(num_tokens))
    return found
