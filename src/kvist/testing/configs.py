"""What CacheMachine draws: caches that are much too small, and prompts that meet in them all the time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hypothesis import strategies as st

from kvist.config import AttentionSpec, CacheConfig, LayerSpec, StateSpec
from kvist.core.policies import POLICIES
from kvist.testing.odd_policies import ODD_POLICIES
from kvist.tier_config import HostTier

__all__ = [
    "ALL_KINDS",
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

Draft = tuple[int, int, list[int], int, int]
"""A prompt yet to be made: which earlier one it begins as, how much of that to leave out, a pattern to go on with, how
far, and what of that is more than its token ids."""

Keeping = list[tuple[int, float | None]]
"""Priority and duration in seconds of a prompt's first, second, ... block; an empty list is no retention."""

numbers = st.integers(0, 63)
some = st.integers(1, 63)
rare = st.integers(0, 7).map(lambda n: n == 7)
often = st.integers(0, 7).map(lambda n: n < 7)
often_not = st.integers(0, 3).map(lambda n: n == 3)
few_beams = st.sampled_from((1, 1, 1, 2, 3))
lefts = st.sampled_from((0, 0, 0, 0, -1, -1, 1, 2, 7, 18))
patterns = st.lists(st.sampled_from(TOKEN_IDS), min_size=1, max_size=4)
marks = st.integers(0, 255).map(lambda n: max(n - 192, 0))
drafts: st.SearchStrategy[Draft] = st.tuples(numbers, numbers, patterns, numbers, marks)
blocks_kept = st.lists(st.tuples(st.sampled_from((0, 35, 80)), st.sampled_from((None, 0.0, 5.0))), max_size=4)
keepings: st.SearchStrategy[Keeping] = st.one_of(st.builds(list), blocks_kept)


BLOCK_SIZES = (1, 2, 4, 16)
ALL_POLICIES: tuple[str | Callable[[Any], Any], ...] = (*POLICIES, *ODD_POLICIES.values())
ALL_KINDS = ("full", "sliding", "ring", "chunked", "state", "cross")


@st.composite
def cache_configs(
    draw: st.DrawFn,
    policies: Iterable[str | Callable[[Any], Any]] = ALL_POLICIES,
    block_sizes: Iterable[int] = BLOCK_SIZES,
    max_blocks: int = 20,
    kinds: Iterable[str] = ALL_KINDS,
    host: st.SearchStrategy[bool] = often_not,
) -> CacheConfig:
    """Return a strategy of small configurations, of 3 to `max_blocks` blocks a group, which run out all the time.

    `kinds` are the kinds of groups that it mixes, one to three of them; `("full",)` is one group with full attention.
    `host` says whether there is a host tier, of as few blocks.
    """
    block_size = draw(st.sampled_from(tuple(block_sizes)))
    mix = _mixed(draw, tuple(kinds))
    checkpoint_tokens = draw(st.sampled_from((0, 0, 1, 2))) * block_size or None
    layers = [_layer(draw, kind, block_size, checkpoint_tokens) for kind in mix]
    num_groups = len(CacheConfig(layers, block_size, 1).groups)
    tiers = [_host_tier(draw, tuple(policies), max_blocks)] if draw(host) else []
    return CacheConfig(
        layers,
        block_size,
        num_blocks=draw(st.lists(st.integers(3, max_blocks), min_size=num_groups, max_size=num_groups)),
        max_sequences=draw(st.integers(2, 10)),
        max_sequence_length=MAX_BLOCKS_PER_SEQUENCE * block_size - block_size // 2,
        reuse=draw(often),
        partial_reuse=draw(st.booleans()),
        policy=draw(st.sampled_from(tuple(policies))),
        shared_pool=num_groups > 1 and draw(st.booleans()),
        ring="ring" in mix,
        max_beams=draw(st.sampled_from((1, 3))) if "ring" in mix else 1,
        max_chunk_tokens=draw(st.sampled_from((None, None, 1, block_size, 2 * block_size + 1))),
        pin_budget=draw(st.sampled_from((1.0, 1.0, 1.0, 0.5, 0.0))),
        tiers=tiers,
        event_buffer=draw(st.sampled_from((0, 1 << 20))),
    )


def _host_tier(draw: st.DrawFn, policies: tuple[str | Callable[[Any], Any], ...], max_blocks: int) -> HostTier:
    return HostTier(
        num_blocks=draw(st.integers(1, max_blocks)),
        policy=draw(st.sampled_from(policies)),
        min_priority=draw(st.sampled_from((0, 0, 35, 80))),
        min_hits=draw(st.sampled_from((0, 0, 0, 1))),
        write=draw(st.sampled_from(("back", "through"))),
    )


def _mixed(draw: st.DrawFn, kinds: tuple[str, ...]) -> list[str]:
    """Choose the kinds of one to three groups; of one alone it is often the first, as it is often one of several."""
    size = draw(st.sampled_from((1, 1, 2, 2, 3)))
    often_first = st.sampled_from((kinds[0],) * len(kinds) + kinds)
    mix = [draw(often_first), *draw(st.lists(st.sampled_from(kinds), min_size=size - 1, max_size=size - 1))]
    return mix if set(mix) != {"cross"} else ["full", *mix]


def _layer(draw: st.DrawFn, kind: str, block_size: int, checkpoint_tokens: int | None) -> LayerSpec:
    """Make one layer; those of all kinds have blocks of as many bytes, so that groups can share a pool."""
    if kind == "full":
        return AttentionSpec(1, 1)
    if kind == "cross":
        return AttentionSpec(1, 1, cross=True)
    if kind == "state":
        return StateSpec([(4 * block_size,)], "uint8", checkpoint_tokens)
    size = draw(st.integers(1, (6 if kind == "ring" else 3) * block_size + 1))
    if kind == "chunked":
        return AttentionSpec(1, 1, chunk_tokens=size)
    sink_tokens = draw(st.sampled_from((0, 0, 1, block_size, block_size + 1)))
    return AttentionSpec(1, 1, sliding_window=size + sink_tokens, sink_tokens=sink_tokens)
