"""Where the bytes of every layer lie: layers that take the same blocks from one pool lie in the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from kvist.config import CacheConfig
from kvist.memory.layout import BlockLayout, Plane, layouts, owner_of
from kvist.memory.quantisation import Encoding
from kvist.memory.storage import KVStorage, LayerStorage, StateStorage

__all__ = ["allocate"]

_Layers = list[list[Plane]]
"""The planes of each layer of one group."""


def allocate(config: CacheConfig, device: torch.device) -> list[LayerStorage]:
    """Make the storage of each layer; one that shares another layer's cache has that layer's.

    It is all zeros, not whatever was there: a kernel that reads padding and multiplies it by 0 must not meet a NaN.
    """
    stored: dict[int, LayerStorage] = {}
    for pool, num_blocks in enumerate(config.pool_num_blocks):
        members = [layout for layout in layouts(config) if config.pool_of[layout.group] == pool]
        tensors = _allocate_pool(members, num_blocks, device, config.storage_order == "block_major")
        for layer, planes in (pair for layout in members for pair in _by_layer(layout)):
            stored[layer] = _storage(planes, [tensors[layer, plane.name] for plane in planes])
    return [stored[owner_of(config, layer)] for layer in range(len(config.layers))]


def _by_layer(layout: BlockLayout) -> list[tuple[int, list[Plane]]]:
    return [(layer, list(planes)) for layer, planes in groupby(layout.planes, key=lambda plane: plane.layer)]


def _storage(planes: list[Plane], tensors: list[Tensor]) -> LayerStorage:
    if planes[0].name == "keys":
        return KVStorage(tensors, [Encoding.of(plane) for plane in planes])
    return StateStorage(tensors)


def _allocate_pool(
    members: Sequence[BlockLayout], num_blocks: int, device: torch.device, block_major: bool
) -> dict[tuple[int, str], Tensor]:
    """Make the tensors `[num_blocks, *shape]`, by layer and name, of the groups that take their blocks from one pool.

    A block is one group's at a time, so its bytes may be those that another group would use. Layers of equal sizes are
    paired, so that each layer lies in one piece. Where only the sums of the groups agree, or block-major storage is
    asked for, a block lies in one piece instead, and between a layer's blocks lie those of the other layers: no view of
    it is contiguous, but the pool is no larger, alignment aside.
    """
    ranked = [sorted((planes for _, planes in _by_layer(layout)), key=_sizes) for layout in members]
    if block_major or any([*map(_sizes, group)] != [*map(_sizes, ranked[0])] for group in ranked):
        return _block_major(members, num_blocks, device)
    return _layer_major(ranked, num_blocks, device)


def _layer_major(ranked: list[_Layers], num_blocks: int, device: torch.device) -> dict[tuple[int, str], Tensor]:
    tensors = {}
    for alike in zip(*ranked, strict=True):
        columns = _columns(_sizes(alike[0]), num_blocks, device)
        for planes in alike:
            for column, plane in zip(columns, planes, strict=True):
                tensors[plane.layer, plane.name] = _typed(column, plane)
    return tensors


def _block_major(
    members: Sequence[BlockLayout], num_blocks: int, device: torch.device
) -> dict[tuple[int, str], Tensor]:
    row_bytes = max(layout.num_bytes for layout in members)
    slab = torch.zeros((num_blocks, row_bytes), dtype=torch.uint8, device=device)
    return {
        (plane.layer, plane.name): _typed(slab.narrow(1, plane.offset, plane.num_bytes), plane)
        for layout in members
        for plane in layout.planes
    }


def _columns(sizes: list[int], num_blocks: int, device: torch.device) -> list[Tensor]:
    """Make bytes `[num_blocks, size]` for each size; equal ones lie one after the other, as K and V of a pool do."""
    if len(set(sizes)) > 1:
        return [torch.zeros((num_blocks, size), dtype=torch.uint8, device=device) for size in sizes]
    together = torch.zeros((len(sizes), num_blocks, sizes[0]), dtype=torch.uint8, device=device)
    return [together[index] for index in range(len(sizes))]


def _sizes(planes: list[Plane]) -> list[int]:
    return [plane.num_bytes for plane in planes]


def _typed(column: Tensor, plane: Plane) -> Tensor:
    """View bytes `[num_blocks, plane bytes]` as elements, `[num_blocks, *shape]`, however they lie in memory."""
    elements = column.view(Encoding.of(plane).stored_dtype)
    typed: Tensor = elements.unflatten(1, plane.stored_shape)
    if plane.heads_first:
        num_tokens, num_heads, dim = plane.stored_shape
        typed = elements.unflatten(1, (num_heads, num_tokens, dim)).transpose(1, 2)
    return typed
