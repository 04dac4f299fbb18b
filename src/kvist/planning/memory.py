"""How much memory a cache may take, and which group gets what part of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvist.config import CacheConfig, parse_bytes
from kvist.errors import ArgumentError
from kvist.planning.blocks import blocks_needed
from kvist.planning.loads import Load

__all__ = ["balanced_shares", "common_num_blocks", "memory_budget", "with_shares"]


def memory_budget(free: int | str, *, fraction: float = 0.9, reserved: int | str | None = None) -> int:
    """Return the bytes that a cache may take: a fraction of those free, after those `reserved` for other uses.

    The fraction is more than 0 and less than 1: with all of it, nothing is left for what was not thought of.

    >>> memory_budget("10 GiB") // (32 * 2**20)
    288
    """
    given: Any = fraction
    if not isinstance(given, int | float) or not 0 < given < 1:
        raise ArgumentError(f"fraction is {fraction!r}, must be more than 0 and less than 1")
    left = parse_bytes(free) - (0 if reserved is None else parse_bytes(reserved))
    budget = int(left * fraction)
    if budget <= 0:
        raise ArgumentError(f"reserved is {reserved!r}, which leaves nothing of free={free!r}")
    return budget


def balanced_shares(config: CacheConfig, load: int | Load) -> tuple[float, ...]:
    """Return the part of memory of each group with which all groups run out at the same number of such sequences.

    `CacheConfig.memory_shares` counts the tokens that are kept. This counts whole blocks, and those held while a pass
    is computed, which matters where windows are not much longer than blocks, or shorter than a pass.

    >>> from kvist import AttentionSpec
    >>> layers = [AttentionSpec(1, 8), AttentionSpec(1, 8, sliding_window=8)]
    >>> balanced_shares(CacheConfig(layers, block_size=16, max_chunk_tokens=16), 432)
    (0.9, 0.1)
    """
    needs = blocks_needed(config, load)
    sizes = [max(n, 1) * group.block_bytes for n, group in zip(needs, config.groups, strict=True)]
    return tuple(size / sum(sizes) for size in sizes)


def with_shares(config: CacheConfig, shares: Sequence[float]) -> CacheConfig:
    """Return the configuration with its `memory` shared out among the groups as given, in whole blocks.

    `shares` are positive and add up to 1, in the order of `config.groups`. Raises `ConfigError` where a group gets less
    than a block.

    >>> from kvist import AttentionSpec
    >>> layers = [AttentionSpec(1, 8), AttentionSpec(1, 8, sliding_window=64)]
    >>> with_shares(CacheConfig(layers, memory=51200), [0.75, 0.25]).group_num_blocks
    (75, 25)
    """
    if config.memory is None:
        raise ArgumentError("config has no memory to share out, give it memory instead of num_blocks")
    groups, size = config.groups, parse_bytes(config.memory)
    if len(shares) != len(groups):
        raise ArgumentError(f"shares has {len(shares)} entries, there are {len(groups)} groups")
    if not all(share > 0 for share in shares) or not math.isclose(math.fsum(shares), 1, abs_tol=1e-9):
        raise ArgumentError(f"shares is {list(shares)!r}, must be positive numbers that add up to 1")
    num_blocks = [int(size * share / group.block_bytes + 1e-9) for share, group in zip(shares, groups, strict=True)]
    shared_out = replace(config, num_blocks=tuple(num_blocks), memory=None)
    shared_out.validate()
    return shared_out


def common_num_blocks(ranks: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the blocks of each group that all ranks have, to be the `num_blocks` of every one of them.

    `ranks` has the `group_num_blocks` of each rank. With more, a rank would be told of blocks that it does not have.

    >>> common_num_blocks([(2111, 64), (2055, 80)])
    (2055, 64)
    """
    if len({len(rank) for rank in ranks}) != 1 or not all(n > 0 for rank in ranks for n in rank):
        told = "; ".join(f"rank {number}: {list(rank)}" for number, rank in enumerate(ranks)) or "no ranks"
        raise ArgumentError(f"ranks must all have blocks in the same groups, got {told}")
    return tuple(map(min, zip(*ranks, strict=True)))
