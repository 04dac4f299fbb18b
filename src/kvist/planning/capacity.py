"""How many sequences fit at the same time, and how long one can be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from kvist.config import CacheConfig
from kvist.planning.blocks import blocks_needed
from kvist.planning.loads import Load, check_count, load_or_typical

__all__ = [
    "by_pool", "longest_sequence", "max_concurrency", "pool_block_bytes", "pool_bytes", "pool_concurrency",
    "sized_for",
]  # fmt: skip


def max_concurrency(config: CacheConfig, load: int | Load | None = None) -> float:
    """Return how many such sequences fit at the same time if they share nothing; the tightest pool decides.

    Where no load is given, it is a prompt of `typical_length`, or of `max_sequence_length`. Rows are not counted:
    `max_sequences` may allow fewer.

    >>> from kvist import AttentionSpec
    >>> max_concurrency(CacheConfig([AttentionSpec(1, 8)], num_blocks=1536), 16384)
    1.5
    """
    config.validate()
    needs = blocks_needed(config, load_or_typical(config, load))
    return min(pool_concurrency(config.pool_num_blocks, by_pool(config, needs)))


def longest_sequence(config: CacheConfig, load: Load | None = None) -> int:
    """Return the most tokens, up to `max_sequence_length`, that one sequence alone can have, or 0.

    Without a load, all of them are its prompt. With one, everything but `num_tokens` is as it says, and the tokens
    beyond its prompt are generated.

    >>> from kvist import AttentionSpec
    >>> layers = [AttentionSpec(32, 128, "float16")] * 32
    >>> longest_sequence(CacheConfig(layers, memory="8 GiB", max_sequence_length=16385))
    16384
    """
    config.validate()
    load = load or Load(1)
    shortest = load.num_prompt_tokens or 1
    low, high = shortest - 1, config.max_sequence_length
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _fits(config, replace(load, num_tokens=middle)) else (low, middle - 1)
    return low if low >= shortest else 0


def sized_for(config: CacheConfig, load: int | Load, num_sequences: int) -> CacheConfig:
    """Return the configuration with as many blocks as that many such sequences need at the same time.

    >>> from kvist import AttentionSpec
    >>> config = sized_for(CacheConfig([AttentionSpec(8, 128)] * 32), 8192, num_sequences=4)
    >>> config.num_blocks, sum(pool_bytes(config)) // 2**30
    ((2048,), 4)
    """
    check_count(num_sequences, "num_sequences", at_least=1)
    needs = blocks_needed(config, load)
    return replace(config, num_blocks=tuple(max(n, 1) * num_sequences for n in needs), memory=None)


def by_pool(config: CacheConfig, needs: Sequence[int]) -> tuple[int, ...]:
    """Return the blocks needed of each pool, from those of each group."""
    totals = [0] * (max(config.pool_of) + 1)
    for pool, need in zip(config.pool_of, needs, strict=True):
        totals[pool] += need
    return tuple(totals)


def pool_concurrency(sizes: Sequence[int], needs: Sequence[int]) -> list[float]:
    """Return for how many sequences each pool has blocks."""
    return [size / need if need else math.inf for size, need in zip(sizes, needs, strict=True)]


def pool_block_bytes(config: CacheConfig) -> tuple[int, ...]:
    """Return the bytes of a block of each pool."""
    sizes = dict(zip(config.pool_of, (group.block_bytes for group in config.groups), strict=True))
    return tuple(sizes[pool] for pool in sorted(sizes))


def pool_bytes(config: CacheConfig) -> tuple[int, ...]:
    """Return the bytes that each pool takes."""
    return tuple(n * size for n, size in zip(config.pool_num_blocks, pool_block_bytes(config), strict=True))


def _fits(config: CacheConfig, load: Load) -> bool:
    needs = by_pool(config, blocks_needed(config, load))
    return all(need <= size for need, size in zip(needs, config.pool_num_blocks, strict=True))
