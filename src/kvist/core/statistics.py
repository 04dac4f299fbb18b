"""Counts that only grow, and the numbers of a moment made from them."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.core.pool import BlockPool
from kvist.core.tree import PrefixTree

__all__ = ["Counters", "Stats"]


@dataclass(frozen=True, slots=True)
class Stats:
    """Numbers of one manager: blocks now, then counts since its start or last `reset`.

    A prompt is counted once, when it is admitted; a failed admission is not. `num_hit_tokens` counts the tokens of
    admitted prompts that were reused, out of `num_query_tokens`; `num_reused_blocks` whole blocks that were shared,
    `num_missed_blocks` the prompts' blocks that had to be allocated, `num_allocated_blocks` these and those of growth.
    What a caller's policy raised is counted in `num_policy_failures`, the latest in words is `last_policy_failure`.
    """

    num_blocks: int
    num_free_blocks: int
    num_evictable_blocks: int
    num_held_blocks: int
    num_sequences: int
    num_pins: int
    num_extents: int
    num_admitted: int
    num_query_tokens: int
    num_hit_tokens: int
    num_reused_blocks: int
    num_missed_blocks: int
    num_allocated_blocks: int
    num_shared_blocks: int
    num_evicted_blocks: int
    num_policy_failures: int
    last_policy_failure: str

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


class Counters:
    """What a manager counts as it goes."""

    __slots__ = (
        "num_admitted",
        "num_allocated_blocks",
        "num_hit_tokens",
        "num_missed_blocks",
        "num_query_tokens",
        "num_reused_blocks",
        "num_shared_blocks",
    )

    def __init__(self) -> None:
        self.num_admitted = self.num_query_tokens = self.num_hit_tokens = 0
        self.num_reused_blocks = self.num_missed_blocks = 0
        self.num_allocated_blocks = self.num_shared_blocks = 0

    def admit(self, num_tokens: int, num_cached_tokens: int, num_blocks: int, num_reused: int) -> None:
        """Count a prompt that was admitted; `num_blocks` of all its beams."""
        self.num_admitted += 1
        self.num_query_tokens += num_tokens
        self.num_hit_tokens += num_cached_tokens
        self.num_reused_blocks += num_reused
        self.num_missed_blocks += num_blocks - num_reused
        self.num_allocated_blocks += num_blocks - num_reused

    def stats(self, *, pool: BlockPool, tree: PrefixTree, num_sequences: int, num_pins: int) -> Stats:
        """Put counts and the numbers of now together."""
        free, evictable = pool.num_free, tree.num_evictable
        return Stats(
            num_blocks=pool.num_blocks,
            num_free_blocks=free + evictable,
            num_evictable_blocks=evictable,
            num_held_blocks=pool.num_blocks - free - evictable,
            num_sequences=num_sequences,
            num_pins=num_pins,
            num_extents=sum(1 for _ in tree.extents()),
            num_evicted_blocks=tree.num_evicted,
            num_policy_failures=tree.queue.num_policy_failures,
            last_policy_failure=tree.queue.last_policy_failure,
            num_admitted=self.num_admitted,
            num_query_tokens=self.num_query_tokens,
            num_hit_tokens=self.num_hit_tokens,
            num_reused_blocks=self.num_reused_blocks,
            num_missed_blocks=self.num_missed_blocks,
            num_allocated_blocks=self.num_allocated_blocks,
            num_shared_blocks=self.num_shared_blocks,
        )
