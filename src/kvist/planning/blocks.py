"""The blocks and bytes that one sequence takes, by group."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvist.config import AttentionSpec, CacheConfig, GroupSpec, Kind, dtype_bytes
from kvist.planning.loads import Load, as_load, ceil_div, check_count
from kvist.planning.rings import ring_of

__all__ = ["LayerBytes", "blocks_held", "blocks_needed", "layer_bytes", "sequence_bytes"]


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """What one layer keeps: `key_bytes` and `value_bytes` of each token, or `state_bytes` of each sequence.

    `group` is the index of its group, in the order of `CacheConfig.groups`.
    """

    layer: int
    group: int
    kind: Kind
    key_bytes: int
    value_bytes: int
    state_bytes: int


def layer_bytes(config: CacheConfig) -> tuple[LayerBytes, ...]:
    """Return what each layer keeps, in the order of layers; one that reads another layer's cache keeps nothing.

    >>> [layer.key_bytes for layer in layer_bytes(CacheConfig([AttentionSpec(8, 128), AttentionSpec(4, 64)]))]
    [2048, 512]
    """
    group_of = {index: number for number, group in enumerate(config.groups) for index in group.layers}
    return tuple(_layer_bytes(config, index, group_of[index]) for index in range(len(config.layers)))


def blocks_held(config: CacheConfig, num_tokens: int, *, encoder_tokens: int = 0) -> tuple[int, ...]:
    """Return, for each group, the blocks that a sequence keeps once `num_tokens` are computed.

    A window of 10 tokens over blocks of 4, with 13 computed: the next token sees tokens 4 to 13, so the first of four
    blocks has gone back.

    >>> blocks_held(CacheConfig([AttentionSpec(1, 8), AttentionSpec(1, 8, sliding_window=10)], block_size=4), 13)
    (4, 3)
    """
    check_count(num_tokens, "num_tokens", at_least=0)
    check_count(encoder_tokens, "encoder_tokens", at_least=0)
    return tuple(_num_held(config, group, num_tokens, encoder_tokens) for group in config.groups)


def sequence_bytes(config: CacheConfig, num_tokens: int, *, encoder_tokens: int = 0) -> int:
    """Return the bytes of the blocks that a sequence keeps once `num_tokens` are computed.

    >>> sequence_bytes(CacheConfig([AttentionSpec(8, 128)] * 32), 100) // 2**20
    14
    """
    held = blocks_held(config, num_tokens, encoder_tokens=encoder_tokens)
    return sum(n * group.block_bytes for n, group in zip(held, config.groups, strict=True))


def blocks_needed(config: CacheConfig, load: int | Load) -> tuple[int, ...]:
    """Return, for each group, the most blocks that a sequence has at any one time while its passes are computed.

    The most is over all ways to cut the prompt into chunks of at most `max_chunk_tokens`, and over beams that agree in
    nothing but the prompt. A state counts once, the one in use: those kept to be found again can be evicted.

    >>> layers = [AttentionSpec(1, 8), AttentionSpec(1, 8, sliding_window=64)]
    >>> blocks_needed(CacheConfig(layers, block_size=16, max_chunk_tokens=128), 512)
    (32, 13)
    """
    load = as_load(config, load)
    return tuple(_num_needed(config, group, load) for group in config.groups)


def _layer_bytes(config: CacheConfig, index: int, group: int) -> LayerBytes:
    layer = config.layers[index]
    keys = 0
    if isinstance(layer, AttentionSpec) and layer.shares_layer is None:
        keys = layer.num_kv_heads * dtype_bytes(layer.dtype, layer.head_dim)
    return LayerBytes(index, group, config.groups[group].kind, keys, layer.token_bytes - keys, layer.state_bytes)


def _num_held(config: CacheConfig, group: GroupSpec, num_tokens: int, encoder_tokens: int) -> int:
    size = config.block_size
    if group.kind == "state":
        return 1
    if group.kind == "cross":
        return ceil_div(encoder_tokens, size)
    if group.kind == "ring":
        return ring_of(config, group).num_blocks(num_tokens)
    first = 0
    if group.kind == "sliding":
        first = max(num_tokens + 1 - group.window, 0) // size
    elif group.kind == "chunked":
        first = num_tokens // group.chunk_tokens * group.chunk_tokens // size
    return ceil_div(num_tokens, size) - first + min(_num_sink_blocks(config, group), first)


def _num_needed(config: CacheConfig, group: GroupSpec, load: Load) -> int:
    if group.kind == "state":
        return load.num_beams
    if group.kind == "cross":
        return ceil_div(load.encoder_tokens, config.block_size)
    if group.kind == "ring":
        return ring_of(config, group).num_blocks_of_beams(load)
    size, prompt, total = config.block_size, load.prompt_tokens, load.num_tokens
    num_shared = prompt // size
    prefill = _num_spanned(config, group, prompt, min(prompt, config.max_chunk_tokens or prompt))
    prefill += (ceil_div(prompt, size) - num_shared) * (load.num_beams - 1)
    if total == prompt:
        return prefill
    decode = _num_spanned(config, group, total, min(load.step_tokens, total - prompt))
    num_shared_sinks = min(_num_sink_blocks(config, group), num_shared)
    own = min(ceil_div(total, size) - num_shared, decode - num_shared_sinks)
    return max(prefill, decode + own * (load.num_beams - 1))


def _num_spanned(config: CacheConfig, group: GroupSpec, num_tokens: int, num_new: int) -> int:
    """Count the blocks held at most in passes of `num_new` tokens up to a length, wherever passes begin.

    A window of 64 and 128 new tokens are 191 tokens: they lie in 13 blocks of 16 if they begin with a block's last.
    """
    size, whole = config.block_size, ceil_div(num_tokens, config.block_size)
    if group.kind == "full":
        return whole
    if group.kind == "sliding":
        num_seen, offset = group.window - 1 + num_new, size - 1
    else:
        num_seen, offset = group.chunk_tokens - 1 + num_new, size - math.gcd(size, group.chunk_tokens)
    return min(whole, _num_sink_blocks(config, group) + ceil_div(offset + num_seen, size))


def _num_sink_blocks(config: CacheConfig, group: GroupSpec) -> int:
    return ceil_div(group.sink_tokens, config.block_size)
