"""Attention over the paged cache, for `transformers` models: decodes and prefill chunks of many sequences at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from kvist.config import AttentionSpec
from kvist.errors import ConfigError
from kvist.memory.arena import TorchMemory
from kvist.serve.layers import ModelLayers, run_tokens
from kvist.serve.spans import DecodeSpan, GroupBatch, PrefillSpan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ATTENTION_NAME", "PackedBatch", "layers_attending", "paged_attention", "using_paged_attention"]

ATTENTION_NAME = "kvist"
_PROBE_NAME = "kvist_probe"

# What some models' attention needs besides Q, K and V, by the names under which transformers passes it.
_UNSUPPORTED = ("position_bias", "indices", "block_indices")


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """What every layer's attention needs to know about one forward pass.

    `groups` has an entry for each group of the cache, None for those without attention; `group_of` says which is whose,
    by index of the layer's spec. The specs in `layers` are the model's own: K and V are read in their dtype, whatever
    they are stored as.
    """

    memory: TorchMemory
    layers: ModelLayers
    group_of: Sequence[int]
    groups: Sequence[GroupBatch | None]

    def of_layer(self, layer: int) -> tuple[int, AttentionSpec, GroupBatch]:
        """Return the index and spec of the K and V of a layer of the model, and its group's part of the batch."""
        index = self.layers.attention[layer]
        if index is None:
            raise ConfigError([f"layer {layer} attends, but was found to cache no keys and values"])
        spec, group = self.layers.specs[index], self.groups[self.group_of[index]]
        assert isinstance(spec, AttentionSpec)
        assert group is not None
        return index, spec, group

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the pass's new K and V of a layer of the model, `[B, num_kv_heads, T, dim]`."""
        index, _, group = self.of_layer(layer)
        self.memory.write(index, _by_token(keys), _by_token(values), group.slot_mapping)

    def gather(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return what a layer of the model keeps of all tokens that are attended to, `[1, num_kv_heads, rows, dim]`.

        The rows are those of the group's spans, one span after the other.
        """
        index, spec, group = self.of_layer(layer)
        dtype = getattr(torch, spec.dtype)
        pairs = [self.memory.gather(index, span.block_table, span.length, dtype=dtype) for span in group.spans]
        keys, values = (torch.cat([_rows(plane) for plane in planes]) for planes in zip(*pairs, strict=True))
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    kvist_batch: PackedBatch | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Write the batch's new K and V into the arena and attend each token to what it may see of its own sequence.

    `query` is `[B, num_heads, T, head_dim]`, `key` and `value` `[B, num_kv_heads, T, dim]`: one row of all sequences'
    new tokens, or one sequence a row. Where they come from latents that were gathered before, they are those of
    `PackedBatch.gather`, and nothing is written. `s_aux` `[num_heads]` are learned scores of a token that is not there.
    Returns `[B, T, num_heads, value_head_dim]`.

    Raises `ConfigError` when the layer asks for what is not supported.
    """
    if kvist_batch is None:
        raise ConfigError([f"attention {ATTENTION_NAME!r} needs the kvist_batch of an Engine's forward pass"])
    layer: int = module.layer_idx
    index, spec, group = kvist_batch.of_layer(layer)
    _refuse_other_attention(module, attention_mask, spec, kwargs)
    keys, values = _by_token(key), _by_token(value)
    is_gathered = layer in kvist_batch.layers.latent
    if not is_gathered and spec.shares_layer is None:
        kvist_batch.memory.write(index, keys, values, group.slot_mapping)
    queries = _by_token(query)
    scores = _Scores(scaling, softcap, s_aux)
    output = queries.new_empty((*queries.shape[:2], values.shape[-1]))
    first = 0
    for span in group.spans:
        if is_gathered:
            rows = slice(first, first := first + span.num_rows)
            past = keys[rows].unflatten(0, (-1, span.length)), values[rows].unflatten(0, (-1, span.length))
        elif isinstance(span, PrefillSpan) and span.is_fresh:
            past = keys[None, span.start : span.stop], values[None, span.start : span.stop]
        else:
            past = kvist_batch.memory.gather(index, span.block_table, span.length, dtype=keys.dtype)
        if isinstance(span, DecodeSpan):
            output[span.rows] = _decode(queries.index_select(0, span.rows), *past, span, scores)
        else:
            output[span.start : span.stop] = _prefill(queries[span.start : span.stop], *past, span, scores)
    return output.view(query.shape[0], query.shape[2], *output.shape[1:]), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)


@contextmanager
def using_paged_attention(config: Any, name: str = ATTENTION_NAME) -> Iterator[None]:
    """Let the model with this `config` attend through `paged_attention`, and as before when the block ends.

    Or through another attention that is registered by that `name`.
    """
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def layers_attending(model: PreTrainedModel) -> set[int]:
    """Return the layers that attend through transformers' attention registry, found by running one token."""
    found: set[int] = set()
    with using_paged_attention(model.config, _PROBE_NAME):
        run_tokens(model, 0, 1, use_cache=False, kvist_layers=found)
    return found


def _note_layer(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, kvist_layers: set[int], **__: Any
) -> tuple[Tensor, None]:
    kvist_layers.add(module.layer_idx)
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2), None


AttentionInterface.register(_PROBE_NAME, _note_layer)


@dataclass(frozen=True, slots=True)
class _Scores:
    """How a layer makes weights of Q and K: `sinks` `[num_heads]` join the softmax and are dropped from its result."""

    scaling: float | None
    softcap: float | None
    sinks: Tensor | None

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | Literal["causal"] | None, sinks: Tensor | None
    ) -> Tensor:
        """Attend `query` `[..., n, head_dim]` to `keys` and `values` `[..., L, dim]`; returns `[..., n, value_dim]`.

        `mask` is added to the scores, if it is not "causal", for as many queries as keys. `sinks` are those of the
        queries, shaped to be laid beside their scores.
        """
        is_causal, mask = (True, None) if isinstance(mask, str) else (False, mask)
        if self.softcap is None and sinks is None:
            return scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, is_causal=is_causal, scale=self.scaling
            )
        scaling = query.shape[-1] ** -0.5 if self.scaling is None else self.scaling
        scores = query @ keys.transpose(-1, -2) * scaling
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if is_causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        elif mask is not None:
            scores = scores + mask
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], dim=-1)
        weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
        return weights[..., : keys.shape[-2]] @ values


def _decode(query: Tensor, keys: Tensor, values: Tensor, span: DecodeSpan, scores: _Scores) -> Tensor:
    """Attend one token of each sequence, `query` `[B, num_heads, head_dim]`; returns `[B, num_heads, value_head_dim]`.

    `keys` and `values` are `[B, L, num_kv_heads, dim]`. The query heads that share a KV head take the place of query
    positions, so K and V are never repeated.
    """
    for edge, hidden in span.edges:
        # Masked scores weigh 0, but 0 times what another request left there is NaN if that was not finite.
        for plane in (keys, values):
            plane[:, edge].masked_fill_(hidden, 0)
    num_heads, num_kv_heads = query.shape[1], keys.shape[2]
    grouped = query.unflatten(1, (num_kv_heads, num_heads // num_kv_heads))
    sinks = None if scores.sinks is None else scores.sinks.view(num_kv_heads, -1, 1)
    output = scores.attend(grouped, keys.transpose(1, 2), values.transpose(1, 2), span.mask, sinks)
    return output.flatten(1, 2)


def _prefill(query: Tensor, keys: Tensor, values: Tensor, span: PrefillSpan, scores: _Scores) -> Tensor:
    """Attend a chunk of n tokens, `query` `[n, num_heads, head_dim]`, to `[1, L, num_kv_heads, dim]` keys and values.

    Query heads that share a KV head form the batch, over which K and V are expanded, not copied.
    Returns `[n, num_heads, value_head_dim]`.
    """
    num_heads, num_kv_heads = query.shape[1], keys.shape[2]
    num_groups = num_heads // num_kv_heads
    grouped = query.unflatten(1, (num_kv_heads, num_groups)).permute(2, 1, 0, 3)
    keys, values = (
        plane[0, span.num_unseen :].transpose(0, 1).expand(num_groups, -1, -1, -1) for plane in (keys, values)
    )
    sinks = None if scores.sinks is None else scores.sinks.view(num_kv_heads, num_groups, 1, 1).transpose(0, 1)
    output = scores.attend(grouped, keys, values, "causal" if span.mask is None else span.mask, sinks)
    return output.permute(2, 1, 0, 3).flatten(1, 2)


def _by_token(heads: Tensor) -> Tensor:
    """View `[B, num_heads, T, dim]` as `[B * T, num_heads, dim]`, a copy where B is over 1."""
    return heads.transpose(1, 2).flatten(0, 1)


def _rows(plane: Tensor | None) -> Tensor:
    assert plane is not None, "latent layers keep two planes"
    return plane.flatten(0, 1)


def _refuse_other_attention(
    module: Any, attention_mask: Tensor | None, spec: AttentionSpec, kwargs: dict[str, Any]
) -> None:
    asked = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if attention_mask is not None:
        asked.append("attention_mask")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        asked.append("is_causal=False")
    window = kwargs.get("sliding_window")
    if window is not None and window != spec.sliding_window:
        asked.append(f"sliding_window={window}")
    if asked:
        raise ConfigError(
            [
                f"layer {module.layer_idx} asks for {name}, which is not what was found to be cached for it"
                for name in asked
            ]
        )
