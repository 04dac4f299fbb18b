"""All numbers of a plan, with what they are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvist.config import CacheConfig, Kind, parse_bytes
from kvist.errors import ArgumentError, ConfigError
from kvist.planning.blocks import blocks_held, blocks_needed
from kvist.planning.capacity import by_pool, longest_sequence, max_concurrency, pool_block_bytes, pool_concurrency
from kvist.planning.loads import Load, load_or_typical
from kvist.planning.memory import balanced_shares, with_shares

__all__ = ["GroupPlan", "Plan", "PoolPlan", "TierPlan", "aligned", "plan"]


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One group: its `span_tokens` (0 for all), the bytes of a token and of a block, and the blocks of a sequence."""

    kind: Kind
    layers: tuple[int, ...]
    span_tokens: int
    token_bytes: int
    block_bytes: int
    pool: int
    blocks_per_sequence: int


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """One pool: `num_blocks` of `block_bytes` make `memory_bytes`; `concurrency` sequences find their blocks in it."""

    num_blocks: int
    block_bytes: int
    memory_bytes: int
    blocks_per_sequence: int
    concurrency: float


@dataclass(frozen=True, slots=True)
class TierPlan:
    """A slower tier: its blocks by pool, and how many cached sequences of the planned length it holds."""

    name: str
    memory_bytes: int
    num_blocks: tuple[int, ...]
    num_sequences: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What a configuration gives for one kind of sequence; as text, tables for people.

    The pools take `memory_bytes`; of the memory given, `unused_bytes` are too few for another block. `num_sequences`
    fit at the same time, at most one a row; it is `concurrency`, which pool `tightest_pool` limits, rounded down. A
    sequence takes up to `sequence_bytes`, and one alone could be `longest_sequence` tokens long. With the memory shared
    out as `balanced_shares`, `balanced_concurrency` sequences would fit; None where there is nothing to share out.
    """

    load: Load
    block_size: int
    groups: tuple[GroupPlan, ...]
    pools: tuple[PoolPlan, ...]
    tiers: tuple[TierPlan, ...]
    memory_bytes: int
    unused_bytes: int
    token_bytes: int
    sequence_bytes: int
    num_sequences: int
    concurrency: float
    tightest_pool: int
    longest_sequence: int
    balanced_shares: tuple[float, ...] | None
    balanced_concurrency: float | None

    def __str__(self) -> str:
        return "\n".join([*aligned(_group_rows(self)), "", *aligned(_pool_rows(self)), "", *_sentences(self)])


def plan(config: CacheConfig, load: int | Load | None = None, *, tiers: Mapping[str, int | str] | None = None) -> Plan:
    """Return what a configuration gives for sequences of one kind.

    Where no load is given, it is a prompt of `typical_length`, or of `max_sequence_length`. `tiers` are the sizes of
    slower tiers by name; they are shared out as the memory is. Raises `ConfigError`, and `ArgumentError` for a load
    longer than `max_sequence_length`.
    """
    config.validate()
    load = load_or_typical(config, load)
    if load.num_tokens > config.max_sequence_length:
        raise ArgumentError(
            f"num_tokens is {load.num_tokens}, more than max_sequence_length={config.max_sequence_length}"
        )
    groups, pools = _group_plans(config, load), _pool_plans(config, load)
    memory = sum(pool.memory_bytes for pool in pools)
    balanced = _balanced(config, load)
    tightest = min(range(len(pools)), key=lambda pool: pools[pool].concurrency)
    return Plan(
        load=load,
        block_size=config.block_size,
        groups=groups,
        pools=pools,
        tiers=tuple(_tier_plan(config, load, name, size) for name, size in (tiers or {}).items()),
        memory_bytes=memory,
        unused_bytes=0 if config.memory is None else parse_bytes(config.memory) - memory,
        token_bytes=sum(group.token_bytes for group in groups),
        sequence_bytes=sum(pool.blocks_per_sequence * pool.block_bytes for pool in pools),
        num_sequences=int(min(pools[tightest].concurrency, config.max_sequences)),
        concurrency=pools[tightest].concurrency,
        tightest_pool=tightest,
        longest_sequence=longest_sequence(config, load),
        balanced_shares=None if balanced is None else balanced_shares(config, load),
        balanced_concurrency=None if balanced is None else max_concurrency(balanced, load),
    )


def _group_plans(config: CacheConfig, load: Load) -> tuple[GroupPlan, ...]:
    return tuple(
        GroupPlan(
            kind=group.kind,
            layers=group.layers,
            span_tokens=group.window or group.chunk_tokens,
            token_bytes=sum(config.layers[index].token_bytes for index in group.layers),
            block_bytes=group.block_bytes,
            pool=pool,
            blocks_per_sequence=need,
        )
        for group, pool, need in zip(config.groups, config.pool_of, blocks_needed(config, load), strict=True)
    )


def _pool_plans(config: CacheConfig, load: Load) -> tuple[PoolPlan, ...]:
    sizes, needs = config.pool_num_blocks, by_pool(config, blocks_needed(config, load))
    return tuple(
        PoolPlan(num_blocks, block_bytes, num_blocks * block_bytes, need, concurrency)
        for num_blocks, block_bytes, need, concurrency in zip(
            sizes, pool_block_bytes(config), needs, pool_concurrency(sizes, needs), strict=True
        )
    )


def _balanced(config: CacheConfig, load: Load) -> CacheConfig | None:
    """Return the configuration with balanced shares, None where all memory is in one pool or some group gets none."""
    if config.memory is None or len(config.pool_num_blocks) == 1:
        return None
    try:
        return with_shares(config, balanced_shares(config, load))
    except ConfigError:
        return None


def _tier_plan(config: CacheConfig, load: Load, name: str, size: int | str) -> TierPlan:
    sizes = replace(config, memory=size, num_blocks=None).pool_num_blocks
    held = blocks_held(config, load.num_tokens, encoder_tokens=load.encoder_tokens)
    return TierPlan(name, parse_bytes(size), sizes, min(pool_concurrency(sizes, by_pool(config, held))))


# -- for people -------------------------------------------------------------------------------------------------------


def _group_rows(made: Plan) -> Iterator[list[str]]:
    yield ["group", "layers", "span", "bytes/token", "bytes/block", "blocks/sequence", "pool"]
    for group in made.groups:
        counts = (len(group.layers), group.span_tokens or "-", group.token_bytes, group.block_bytes)
        yield [group.kind, *map(_text, counts), _text(group.blocks_per_sequence), str(group.pool)]


def _pool_rows(made: Plan) -> Iterator[list[str]]:
    yield ["pool", "blocks", "bytes", "blocks/sequence", "sequences"]
    for number, pool in enumerate(made.pools):
        counts = (pool.num_blocks, pool.memory_bytes, pool.blocks_per_sequence)
        yield [str(number), *map(_text, counts), f"{pool.concurrency:,.2f}"]


def _sentences(made: Plan) -> Iterator[str]:
    yield f"{made.memory_bytes:,} bytes in blocks of {made.block_size} tokens, {made.unused_bytes:,} left over"
    yield (
        f"{made.num_sequences:,} sequences of {made.load.num_tokens:,} tokens at the same time, each up to "
        f"{made.sequence_bytes:,} bytes; pool {made.tightest_pool} is the first to run out"
    )
    yield f"{made.longest_sequence:,} tokens in the longest sequence"
    if made.balanced_shares is not None:
        shares = ", ".join(f"{share:.4f}" for share in made.balanced_shares)
        yield f"{made.balanced_concurrency:,.2f} sequences with the memory shared out as {shares}"
    for tier in made.tiers:
        yield f"{tier.name}: {tier.num_sequences:,.2f} cached sequences of that length in {tier.memory_bytes:,} bytes"


def _text(value: int | str) -> str:
    return value if isinstance(value, str) else f"{value:,}"


def aligned(rows: Iterator[list[str]]) -> list[str]:
    """Return rows as lines, the first column to the left and the others to the right."""
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(_padded(row, widths)) for row in cells]


def _padded(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
    return [row[0].ljust(widths[0]), *numbers]
