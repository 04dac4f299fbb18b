"""What CacheMachine draws: caches that are much too small, and prompts that meet in them all the time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hypothesis import strategies as st

from kvist.config import AttentionSpec, CacheConfig
from kvist.core.policies import POLICIES

__all__ = [
    "ALL_POLICIES",
    "BLOCK_SIZES",
    "Draft",
    "Keeping",
    "cache_configs",
    "drafts",
    "few_beams",
    "keepings",
    "lefts",
    "numbers",
    "often",
    "patterns",
    "rare",
    "some",
]

# Few, so that prompts meet; two differ in their second byte only, one has all the bits that an id may have.
TOKEN_IDS = (0, 0, 0, 1, 1, 257, 2**16, 2**31 - 1)
MAX_BLOCKS_PER_SEQUENCE = 8

Draft = tuple[int, int, list[int], int]
"""A prompt yet to be made: which earlier one it begins as, how much of that to leave out, a pattern to go on with, how
far."""

Keeping = list[tuple[int, float | None]]
"""Priority and duration in seconds of a prompt's first, second, ... block; an empty list is no retention."""

numbers = st.integers(0, 63)
some = st.integers(1, 63)
rare = st.integers(0, 7).map(lambda n: n == 7)
often = st.integers(0, 7).map(lambda n: n < 7)
few_beams = st.sampled_from((1, 1, 1, 2, 3))
lefts = st.sampled_from((0, 0, 0, 0, 1, 2, 7, 18))
patterns = st.lists(st.sampled_from(TOKEN_IDS), min_size=1, max_size=4)
drafts: st.SearchStrategy[Draft] = st.tuples(numbers, numbers, patterns, numbers)
blocks_kept = st.lists(st.tuples(st.sampled_from((0, 35, 80)), st.sampled_from((None, 0.0, 5.0))), max_size=4)
keepings: st.SearchStrategy[Keeping] = st.one_of(st.builds(list), blocks_kept)


def most_recently_used(extent: Any) -> int:
    """Evict what was used last first: a policy of a user's own, and the opposite of a sensible one."""
    return -int(extent.last_use)


def longest(extent: Any) -> tuple[int, bytes]:
    """Evict the longest extent first, among equals by its tokens."""
    return (-int(extent.num_blocks), bytes(extent.tokens))


BLOCK_SIZES = (1, 2, 4, 16)
ALL_POLICIES: tuple[str | Callable[[Any], Any], ...] = (*POLICIES, most_recently_used, longest)


def cache_configs(
    policies: Iterable[str | Callable[[Any], Any]] = ALL_POLICIES,
    block_sizes: Iterable[int] = BLOCK_SIZES,
    max_blocks: int = 20,
) -> st.SearchStrategy[CacheConfig]:
    """Return a strategy of small configurations, of 3 to `max_blocks` blocks, in which blocks run out all the time."""

    def config(block_size: int, **settings: Any) -> CacheConfig:
        length = MAX_BLOCKS_PER_SEQUENCE * block_size - block_size // 2
        return CacheConfig([AttentionSpec(1, 1)], block_size, max_sequence_length=length, **settings)

    return st.builds(
        config,
        st.sampled_from(tuple(block_sizes)),
        num_blocks=st.integers(3, max_blocks),
        max_sequences=st.integers(2, 10),
        reuse=often,
        partial_reuse=st.booleans(),
        policy=st.sampled_from(tuple(policies)),
    )
