"""Attention over the paged cache, for `transformers` models: one packed batch of decodes and prefill chunks at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from kvist.errors import ConfigError
from kvist.memory.arena import TorchMemory
from kvist.memory.tables import BatchTables

__all__ = ["ATTENTION_NAME", "PackedBatch", "pack", "paged_attention", "using_paged_attention"]

ATTENTION_NAME = "kvist"

# What some models' attention needs besides Q, K and V, by the names under which transformers passes it.
_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")


@dataclass(frozen=True, slots=True)
class DecodeSpan:
    """Sequences that compute one token each, of similar lengths: one gather and one attention call for all.

    `rows` int64 `[B]` are their places in the packed batch, `mask` `[B, 1, 1, max_len]` is added to the scores, or None
    where all are of the same length; `padding` bool `[B, max_len - shortest, 1, 1]` marks positions past each one's
    end.
    """

    rows: Tensor
    block_table: Tensor
    max_len: int
    shortest: int
    mask: Tensor | None
    padding: Tensor | None


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """The `[start, stop)` of the packed batch that belong to one sequence, which ends with them at `length` tokens.

    `mask` `[stop - start, length]` is added to the scores; None where nothing precedes the chunk, so plain causal
    attention over the chunk itself is all there is.
    """

    start: int
    stop: int
    length: int
    block_table: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """What every layer's attention needs to know about one forward pass; made once a step by `pack`."""

    memory: TorchMemory
    slot_mapping: Tensor
    decodes: tuple[DecodeSpan, ...]
    prefills: tuple[PrefillSpan, ...]


def pack(memory: TorchMemory, tables: BatchTables, dtype: torch.dtype) -> PackedBatch:
    """Lay out one batch for `paged_attention`; `dtype` is that of the model's queries."""
    query_lens = np.diff(tables.cu_seqlens)
    single = np.flatnonzero(query_lens == 1)
    return PackedBatch(
        memory,
        torch.from_numpy(tables.slot_mapping).to(memory.device, non_blocking=True),
        tuple(_decode_span(memory, tables, group, dtype) for group in _similar(single, tables.seq_lens)),
        tuple(_prefill_span(memory, tables, int(index), dtype) for index in np.flatnonzero(query_lens > 1)),
    )


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    kvist_batch: PackedBatch | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Write the batch's new K and V into the arena and attend each token to its own sequence up to itself.

    `query` is `[1, num_heads, T, head_dim]`, `key` and `value` `[1, num_kv_heads, T, dim]`, T being all tokens of the
    `kvist_batch` that is passed to the model's forward. Returns `[1, T, num_heads, value_head_dim]`.
    Raises `ConfigError` when the layer asks for more than plain causal attention.
    """
    if kvist_batch is None:
        raise ConfigError([f"attention {ATTENTION_NAME!r} needs the kvist_batch of an Engine's forward pass"])
    _refuse_other_attention(module, attention_mask, kwargs)
    memory, layer = kvist_batch.memory, module.layer_idx
    memory.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1), kvist_batch.slot_mapping)
    num_tokens = query.shape[2]
    output = query.new_empty((num_tokens, query.shape[1], value.shape[-1]))
    for decode in kvist_batch.decodes:
        output[decode.rows] = _decode(memory, layer, query[0].index_select(1, decode.rows), decode, scaling)
    for prefill in kvist_batch.prefills:
        span = slice(prefill.start, prefill.stop)
        if prefill.mask is None:
            keys, values = key[0, :, span], value[0, :, span]
        else:
            cached = memory.gather(layer, prefill.block_table, prefill.length)
            keys, values = (plane[0].transpose(0, 1) for plane in cached)
        output[span] = _prefill(query[0, :, span], keys, values, prefill.mask, scaling)
    return output.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)


@contextmanager
def using_paged_attention(config: Any) -> Iterator[None]:
    """Let the model with this `config` attend through `paged_attention`, and as before when the block ends."""
    before = config._attn_implementation
    config._attn_implementation = ATTENTION_NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def _decode(memory: TorchMemory, layer: int, query: Tensor, span: DecodeSpan, scaling: float | None) -> Tensor:
    """Attend one token of each sequence, `query` `[num_heads, B, head_dim]`; returns `[B, num_heads, value_head_dim]`.

    The query heads that share a KV head take the place of query positions, so K and V are never repeated.
    """
    keys, values = memory.gather(layer, span.block_table, span.max_len)
    if span.padding is not None:
        # Masked scores weigh 0, but 0 times what another request left there is NaN if that was not finite.
        for plane in (keys, values):
            plane[:, span.shortest :].masked_fill_(span.padding, 0)
    num_heads, num_sequences, head_dim = query.shape
    num_kv_heads = keys.shape[2]
    grouped = query.transpose(0, 1).reshape(num_sequences, num_kv_heads, num_heads // num_kv_heads, head_dim)
    output = scaled_dot_product_attention(
        grouped, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=span.mask, scale=scaling
    )
    return output.reshape(num_sequences, num_heads, values.shape[-1])


def _prefill(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Attend a chunk of n tokens, `query` `[num_heads, n, head_dim]`, to `[num_kv_heads, length, dim]` keys and values.

    Query heads that share a KV head form the batch, over which K and V are expanded, not copied.
    Returns `[n, num_heads, value_head_dim]`.
    """
    num_heads, num_tokens, head_dim = query.shape
    num_kv_heads = keys.shape[0]
    num_groups = num_heads // num_kv_heads
    grouped = query.reshape(num_kv_heads, num_groups, num_tokens, head_dim).transpose(0, 1)
    output = scaled_dot_product_attention(
        grouped,
        keys.expand(num_groups, -1, -1, -1),
        values.expand(num_groups, -1, -1, -1),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
    )
    return output.permute(2, 1, 0, 3).reshape(num_tokens, num_heads, values.shape[-1])


def _decode_span(
    memory: TorchMemory, tables: BatchTables, group: npt.NDArray[np.intp], dtype: torch.dtype
) -> DecodeSpan:
    lengths = torch.from_numpy(tables.seq_lens[group])
    shortest, longest = int(lengths.min()), int(lengths.max())
    mask = padding = None
    if shortest < longest:
        past_end = torch.arange(longest) >= lengths[:, None]
        padding = past_end[:, shortest:, None, None].to(memory.device)
        mask = _masked(past_end, dtype)[:, None, None, :].to(memory.device)
    return DecodeSpan(
        torch.from_numpy(tables.cu_seqlens[group].astype(np.int64)).to(memory.device),
        torch.from_numpy(tables.block_table[group]).to(memory.device),
        longest,
        shortest,
        mask,
        padding,
    )


def _prefill_span(memory: TorchMemory, tables: BatchTables, index: int, dtype: torch.dtype) -> PrefillSpan:
    start, stop = (int(bound) for bound in tables.cu_seqlens[index : index + 2])
    length = int(tables.seq_lens[index])
    num_before = length - (stop - start)
    mask = None
    if num_before:
        # Query i is at position num_before + i and sees keys up to there.
        later = torch.ones((stop - start, length), dtype=torch.bool).triu(num_before + 1)
        mask = _masked(later, dtype).to(memory.device)
    table = torch.from_numpy(tables.block_table[[index]]).to(memory.device)
    return PrefillSpan(start, stop, length, table, mask)


def _masked(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a mask of what must not be seen into numbers to add to scores: made once here, not by every layer."""
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


def _similar(indices: npt.NDArray[np.intp], lengths: npt.NDArray[np.int32]) -> Iterator[npt.NDArray[np.intp]]:
    """Yield `indices` in groups in which the longest is less than twice the shortest, so padding stays under half.

    >>> [group.tolist() for group in _similar(np.array([0, 1, 2, 3]), np.array([90, 3000, 100, 2000], np.int32))]
    [[1, 3], [2, 0]]
    """
    ordered = indices[np.argsort(-lengths[indices], kind="stable")]
    while ordered.size:
        num_near = int(np.count_nonzero(2 * lengths[ordered] > lengths[ordered[0]]))
        yield ordered[:num_near]
        ordered = ordered[num_near:]


def _refuse_other_attention(module: Any, attention_mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    asked = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if attention_mask is not None:
        asked.append("attention_mask")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        asked.append("is_causal=False")
    if asked:
        raise ConfigError(
            [
                f"layer {module.layer_idx} asks for {name}, but only plain causal attention is supported"
                for name in asked
            ]
        )
