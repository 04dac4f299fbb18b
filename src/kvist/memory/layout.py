"""The bytes of one block: which layer's K, V or state lies where when all of a group's layers follow one another.

Slower tiers keep blocks in this form whatever the order of the device's storage, so layouts need no torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from hashlib import sha256
from math import prod
from typing import Any

from kvist.config import (
    PACKED_DTYPES,
    AttentionSpec,
    CacheConfig,
    LayerSpec,
    StateSpec,
    dtype_bytes,
    is_quantised,
)

__all__ = ["ALIGNMENT", "BlockLayout", "Plane", "layouts", "owner_of"]

ALIGNMENT = 16
"""Planes begin at multiples of so many bytes, as the widest loads of kernels want."""


@dataclass(frozen=True, slots=True)
class Plane:
    """What one tensor of a layer keeps of a block: `shape` elements of `dtype`, at byte `offset` of the block.

    `name` is "keys", "values" or "state 0", "state 1", ... Keys and values are `[block_size, num_kv_heads, dim]`; the
    first n tokens of them are the first `n * token_bytes` bytes. `token_bytes` is 0 for what only moves as a whole:
    states, and numbers of 4 bits. Quantised numbers are kept divided by `scale`. With `heads_first` the device and host
    memory keep the block as `[num_kv_heads, block_size, dim]`, so that it moves as a whole there.
    """

    layer: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    token_bytes: int
    scale: float = 1.0
    heads_first: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the plane in a block, without what is left free before the next one."""
        return prod(self.shape[:-1]) * dtype_bytes(self.dtype, self.shape[-1])

    @property
    def stored_dtype(self) -> str:
        """The dtype of the array that holds it: "uint8" where two elements lie in a byte."""
        return "uint8" if self.dtype in PACKED_DTYPES else self.dtype

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the array that holds it: its last axis is half as long where two elements lie in a byte."""
        packing = 2 if self.dtype in PACKED_DTYPES else 1
        return (*self.shape[:-1], self.shape[-1] // packing)

    def describe(self) -> dict[str, Any]:
        """Return what decides the meaning of the bytes, as JSON can say it."""
        told = {"layer": self.layer, "name": self.name, "dtype": self.dtype, "shape": list(self.shape)}
        scale = {"scale": float(self.scale)} if is_quantised(self.dtype) else {}
        return {**told, "offset": self.offset, **scale}


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The bytes of one block of a group, one plane after the other: layers ascending, K before V, states as listed."""

    group: int
    block_size: int
    planes: tuple[Plane, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of a block, a multiple of `ALIGNMENT`, so that blocks that follow one another are all aligned."""
        return _aligned(self.planes[-1].offset + self.planes[-1].num_bytes)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each plane begins, in bytes."""
        return tuple(plane.offset for plane in self.planes)

    @property
    def is_dense(self) -> bool:
        """Whether every byte of a block is some plane's."""
        return sum(plane.num_bytes for plane in self.planes) == self.num_bytes

    @property
    def moves_whole(self) -> bool:
        """Whether some plane has no first n tokens that could be moved alone."""
        return not all(plane.token_bytes for plane in self.planes)

    def describe(self) -> dict[str, Any]:
        """Return the layout as JSON can say it; equal ones hold equal contents as equal bytes."""
        return {
            "block_size": self.block_size,
            "num_bytes": self.num_bytes,
            "planes": [plane.describe() for plane in self.planes],
        }

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the description, 32 bytes."""
        return sha256(json.dumps(self.describe(), sort_keys=True, separators=(",", ":")).encode()).digest()


def layouts(config: CacheConfig) -> list[BlockLayout]:
    """Return the layout of a block of each group; layers that share another's cache have no bytes of their own.

    >>> (layout,) = layouts(CacheConfig([AttentionSpec(1, 3, "float16"), AttentionSpec(1, 8, "int4")], num_blocks=1))
    >>> [(plane.layer, plane.name, plane.offset, plane.num_bytes) for plane in layout.planes]
    [(0, 'keys', 0, 96), (0, 'values', 96, 96), (1, 'keys', 192, 64), (1, 'values', 256, 64)]
    >>> layout.num_bytes
    320
    """
    return [_layout(config, number) for number in range(len(config.groups))]


def owner_of(config: CacheConfig, layer: int) -> int:
    """Return the layer whose cache this one reads: that which it shares, or its own.

    >>> config = CacheConfig([AttentionSpec(1, 8), AttentionSpec(1, 8, shares_layer=0)], num_blocks=4)
    >>> [owner_of(config, layer) for layer in (0, 1)]
    [0, 0]
    """
    spec = config.layers[layer]
    donor = spec.shares_layer if isinstance(spec, AttentionSpec) else None
    return layer if donor is None else donor


def _layout(config: CacheConfig, group: int) -> BlockLayout:
    planes: list[Plane] = []
    offset = 0
    for layer in config.groups[group].layers:
        if owner_of(config, layer) != layer:
            continue
        for plane in _planes(config.layers[layer], layer, config.block_size, config.storage_order == "heads_first"):
            planes.append(replace(plane, offset=offset))
            offset = _aligned(offset + plane.num_bytes)
    return BlockLayout(group, config.block_size, tuple(planes))


def _planes(spec: LayerSpec, layer: int, block_size: int, heads_first: bool) -> list[Plane]:
    """Return the planes of a layer, as if each were alone."""
    if isinstance(spec, StateSpec):
        states = enumerate(zip(spec.dtypes, spec.shapes, strict=True))
        return [Plane(layer, f"state {number}", dtype, tuple(shape), 0, 0) for number, (dtype, shape) in states]
    scales = {"keys": spec.k_scale, "values": spec.v_scale}
    planes = [
        Plane(layer, name, spec.dtype, (block_size, spec.num_kv_heads, dim), 0, _token_bytes(spec, dim), scales[name])
        for name, dim in zip(scales, spec.head_dims, strict=False)
    ]
    return [replace(plane, token_bytes=0, heads_first=True) for plane in planes] if heads_first else planes


def _token_bytes(spec: AttentionSpec, dim: int) -> int:
    return 0 if spec.dtype in PACKED_DTYPES else spec.num_kv_heads * dtype_bytes(spec.dtype, dim)


def _aligned(size: int) -> int:
    """Round up to where the next plane may begin.

    >>> _aligned(100), _aligned(112)
    (112, 112)
    """
    return -(-size // ALIGNMENT) * ALIGNMENT
