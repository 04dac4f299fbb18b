"""Where the bytes of every layer lie: layers that take the same blocks from one pool lie in the same bytes."""

from __future__ import annotations

from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from kvist.config import AttentionSpec, CacheConfig, LayerSpec, StateSpec
from kvist.memory.storage import KVStorage, LayerStorage, StateStorage

__all__ = ["allocate", "owner_of"]

# Planes that lie side by side in a block begin at multiples of this, as the widest loads of kernels want.
_ALIGNMENT = 16

_Plane = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of what one tensor of a layer keeps in a block."""


def allocate(config: CacheConfig, device: torch.device) -> list[LayerStorage]:
    """Make the storage of each layer; one that shares another layer's cache has that layer's.

    It is all zeros, not whatever was there: a kernel that reads padding and multiplies it by 0 must not meet a NaN.
    """
    tensors: dict[int, list[Tensor]] = {}
    for pool, num_blocks in enumerate(config.pool_num_blocks):
        groups = [
            {index: _planes(config, index) for index in group.layers if owner_of(config, index) == index}
            for group, its_pool in zip(config.groups, config.pool_of, strict=True)
            if its_pool == pool
        ]
        tensors |= _allocate_pool(groups, num_blocks, device)
    stored = {index: _storage(config.layers[index], planes) for index, planes in tensors.items()}
    return [stored[owner_of(config, index)] for index in range(len(config.layers))]


def owner_of(config: CacheConfig, layer: int) -> int:
    """Return the layer whose cache this one reads: that which it shares, or its own.

    >>> config = CacheConfig([AttentionSpec(1, 8), AttentionSpec(1, 8, shares_layer=0)], num_blocks=4)
    >>> [owner_of(config, layer) for layer in (0, 1)]
    [0, 0]
    """
    spec = config.layers[layer]
    donor = spec.shares_layer if isinstance(spec, AttentionSpec) else None
    return layer if donor is None else donor


def _planes(config: CacheConfig, layer: int) -> list[_Plane]:
    spec = config.layers[layer]
    if isinstance(spec, StateSpec):
        return [(getattr(torch, dtype), tuple(shape)) for dtype, shape in zip(spec.dtypes, spec.shapes, strict=True)]
    value_dim = spec.head_dim if spec.value_head_dim is None else spec.value_head_dim
    dims = (spec.head_dim, value_dim) if value_dim else (spec.head_dim,)
    return [(getattr(torch, spec.dtype), (config.block_size, spec.num_kv_heads, dim)) for dim in dims]


def _storage(spec: LayerSpec, planes: list[Tensor]) -> LayerStorage:
    return StateStorage(tuple(planes)) if isinstance(spec, StateSpec) else KVStorage(*planes)


def _allocate_pool(
    groups: list[dict[int, list[_Plane]]], num_blocks: int, device: torch.device
) -> dict[int, list[Tensor]]:
    """Make the tensors `[num_blocks, *shape]` of the layers, in groups, that take their blocks from one pool.

    A block is one group's at a time, so its bytes may be those that another group would use. Layers of equal sizes are
    paired, so that each layer lies in one piece. Where only the sums of the groups agree, a block lies in one piece
    instead, and between a layer's blocks lie those of the other layers: no view of it is contiguous, but the pool is no
    larger, alignment aside.
    """
    ranked = [sorted(group.items(), key=lambda item: _sizes(item[1])) for group in groups]
    if all([_sizes(planes) for _, planes in group] == [_sizes(planes) for _, planes in ranked[0]] for group in ranked):
        return _layer_major(ranked, num_blocks, device)
    return _block_major(ranked, num_blocks, device)


def _layer_major(
    groups: list[list[tuple[int, list[_Plane]]]], num_blocks: int, device: torch.device
) -> dict[int, list[Tensor]]:
    tensors = {}
    for alike in zip(*groups, strict=True):
        columns = _columns(_sizes(alike[0][1]), num_blocks, device)
        for layer, planes in alike:
            tensors[layer] = [_typed(column, plane) for column, plane in zip(columns, planes, strict=True)]
    return tensors


def _block_major(
    groups: list[list[tuple[int, list[_Plane]]]], num_blocks: int, device: torch.device
) -> dict[int, list[Tensor]]:
    starts = [_starts([size for _, planes in group for size in _sizes(planes)]) for group in groups]
    slab = torch.zeros((num_blocks, max(ends[-1] for ends in starts)), dtype=torch.uint8, device=device)
    tensors = {}
    for group, offsets in zip(groups, map(iter, starts), strict=True):
        for layer, planes in group:
            columns = [slab.narrow(1, next(offsets), size) for size in _sizes(planes)]
            tensors[layer] = [_typed(column, plane) for column, plane in zip(columns, planes, strict=True)]
    return tensors


def _columns(sizes: list[int], num_blocks: int, device: torch.device) -> list[Tensor]:
    """Make bytes `[num_blocks, size]` for each size; equal ones lie one after the other, as K and V of a pool do."""
    if len(set(sizes)) > 1:
        return [torch.zeros((num_blocks, size), dtype=torch.uint8, device=device) for size in sizes]
    together = torch.zeros((len(sizes), num_blocks, sizes[0]), dtype=torch.uint8, device=device)
    return [together[index] for index in range(len(sizes))]


def _starts(sizes: list[int]) -> list[int]:
    """Return where in a block each plane begins, and where the last ends.

    >>> _starts([100, 32, 6])
    [0, 112, 144, 160]
    """
    return list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))


def _sizes(planes: list[_Plane]) -> list[int]:
    return [prod(shape) * dtype.itemsize for dtype, shape in planes]


def _typed(column: Tensor, plane: _Plane) -> Tensor:
    dtype, shape = plane
    typed: Tensor = column.view(dtype).unflatten(1, shape)
    return typed
