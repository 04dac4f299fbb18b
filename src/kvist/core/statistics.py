"""Counts that only grow, and the numbers of a moment made from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["RECENT_PROMPTS", "Counters", "GroupCounters", "GroupStats", "Stats", "TierStats"]

RECENT_PROMPTS = 1000
"""Prompts that the recent hit rate is about."""


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Numbers of one group of layers: blocks now, then counts since the start or the last `reset`.

    Blocks now are those of its pool, which several groups may draw from; `num_pinned_blocks` are held by pins, counted
    once, whoever else holds them. Of `num_allocated_blocks`, `num_new_blocks` were free, the others were evicted for
    the purpose. Of the blocks of admitted prompts, `num_reused_blocks` were shared, and `num_missed_blocks` allocated.
    """

    kind: str
    num_blocks: int
    num_free_blocks: int
    num_evictable_blocks: int
    num_held_blocks: int
    num_pinned_blocks: int
    num_allocated_blocks: int
    num_new_blocks: int
    num_reused_blocks: int
    num_missed_blocks: int

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences and pins hold, 0 to 1."""
        return self.num_held_blocks / self.num_blocks

    @property
    def block_hit_rate(self) -> float:
        """Share of the prompts' blocks that were shared, 0 to 1."""
        asked = self.num_reused_blocks + self.num_missed_blocks
        return self.num_reused_blocks / asked if asked else 0.0


@dataclass(frozen=True, slots=True)
class TierStats:
    """Numbers of a slower tier: its blocks now, of all pools, then positions since the start or the last `reset`.

    Of positions of `block_size` tokens, with a block in each group, `num_demoted_blocks` came from the device,
    `num_promoted_blocks` went back there, `num_evicted_blocks` were forgotten and `num_refused_blocks` not taken in:
    their priority or hits were too low, or there was no room for them.
    """

    name: str
    num_blocks: int
    num_free_blocks: int
    num_extents: int
    num_demoted_blocks: int
    num_promoted_blocks: int
    num_evicted_blocks: int
    num_refused_blocks: int

    @property
    def num_used_blocks(self) -> int:
        """Blocks that hold something."""
        return self.num_blocks - self.num_free_blocks


@dataclass(frozen=True, slots=True)
class Stats:
    """Numbers of one manager: blocks now, then counts since its start or last `reset`; of all groups together.

    A prompt is counted once, when it is admitted; a failed admission is not. `num_hit_tokens` counts the tokens of
    admitted prompts that were reused, out of `num_query_tokens`; `misses` the others by why they were missed (the last
    token of each prompt is no miss), and of cold ones whether they begin as one in an "other namespace" does.
    `num_reused_blocks` are whole blocks that were shared, `num_missed_blocks` the prompts' blocks that had to be
    allocated, `num_allocated_blocks` these and those of growth, `num_new_blocks` those of them for which nothing had to
    be evicted; `num_shared_blocks` were computed although the content was there.
    `evictions` are blocks by reason. A sequence that is suspended and resumed is counted in `num_suspended` and
    `num_resumed`, and what it had to compute again in `num_recomputed_tokens`, not among the prompts. What a caller's
    policy raised is counted in `num_policy_failures`, the latest in words is `last_policy_failure`.
    """

    groups: tuple[GroupStats, ...]
    num_sequences: int
    num_suspended_now: int
    num_pins: int
    num_extents: int
    num_admitted: int
    num_query_tokens: int
    num_hit_tokens: int
    misses: Mapping[str, int]
    recent_token_hit_rate: float
    num_shared_blocks: int
    evictions: Mapping[str, int]
    num_suspended: int
    num_resumed: int
    num_recomputed_tokens: int
    num_policy_failures: int
    last_policy_failure: str
    num_blocks: int
    num_free_blocks: int
    num_evictable_blocks: int
    tiers: tuple[TierStats, ...] = ()

    @property
    def num_held_blocks(self) -> int:
        """Blocks that sequences and pins hold."""
        return self.num_blocks - self.num_free_blocks

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks that pins hold."""
        return sum(group.num_pinned_blocks for group in self.groups)

    @property
    def num_allocated_blocks(self) -> int:
        """Blocks that were allocated."""
        return sum(group.num_allocated_blocks for group in self.groups)

    @property
    def num_new_blocks(self) -> int:
        """Blocks that were allocated without an eviction."""
        return sum(group.num_new_blocks for group in self.groups)

    @property
    def num_reused_blocks(self) -> int:
        """Blocks of prompts that were shared."""
        return sum(group.num_reused_blocks for group in self.groups)

    @property
    def num_missed_blocks(self) -> int:
        """Blocks of prompts that had to be allocated."""
        return sum(group.num_missed_blocks for group in self.groups)

    @property
    def num_missed_tokens(self) -> int:
        """Tokens of prompts that had to be computed, the last of each included."""
        return self.num_query_tokens - self.num_hit_tokens

    @property
    def num_evicted_blocks(self) -> int:
        """Blocks that were evicted, for whatever reason."""
        return sum(self.evictions.values())

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences and pins hold, 0 to 1."""
        return self.num_held_blocks / self.num_blocks

    @property
    def token_hit_rate(self) -> float:
        """Share of the prompts' tokens that were reused, 0 to 1."""
        return self.num_hit_tokens / self.num_query_tokens if self.num_query_tokens else 0.0

    @property
    def block_hit_rate(self) -> float:
        """Share of the prompts' blocks that were shared, 0 to 1."""
        asked = self.num_reused_blocks + self.num_missed_blocks
        return self.num_reused_blocks / asked if asked else 0.0


class GroupCounters:
    """What is counted of one group."""

    __slots__ = ("num_allocated", "num_missed", "num_reallocated", "num_reused")

    def __init__(self) -> None:
        self.num_allocated = self.num_reallocated = self.num_reused = self.num_missed = 0

    def admit(self, num_reused: int, num_new: int) -> None:
        """Count the blocks of a prompt."""
        self.num_reused += num_reused
        self.num_missed += num_new


class Counters:
    """What a manager counts as it goes."""

    __slots__ = (
        "groups",
        "misses",
        "num_admitted",
        "num_hit_tokens",
        "num_query_tokens",
        "num_recomputed_tokens",
        "num_resumed",
        "num_shared_blocks",
        "num_suspended",
        "recent",
    )

    def __init__(self, num_groups: int) -> None:
        self.groups = [GroupCounters() for _ in range(num_groups)]
        self.misses: dict[str, int] = {}
        self.num_admitted = self.num_query_tokens = self.num_hit_tokens = self.num_shared_blocks = 0
        self.num_suspended = self.num_resumed = self.num_recomputed_tokens = 0
        self.recent: deque[tuple[int, int]] = deque(maxlen=RECENT_PROMPTS)

    @property
    def recent_token_hit_rate(self) -> float:
        """Share of the tokens of the last prompts that were reused, 0 to 1."""
        tokens = sum(num_tokens for num_tokens, _ in self.recent)
        return sum(num_cached for _, num_cached in self.recent) / tokens if tokens else 0.0

    def frozen_misses(self) -> Mapping[str, int]:
        """Copy the missed tokens by reason."""
        return MappingProxyType(dict(self.misses))
