"""The host tier's storage: a block is one row of bytes, whatever layers it is of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvist.config import CacheConfig
from kvist.memory.layout import BlockLayout

__all__ = ["host_planes"]


def host_planes(config: CacheConfig, layouts: Sequence[BlockLayout], *, is_pinned: bool) -> list[list[Tensor]]:
    """Make the storage of the host tier, and return the planes of each group there, `[num_blocks, plane bytes]`.

    Groups of one pool share its rows. Pinned memory can be copied from and to the device while the host goes on.
    Returns an empty list where the configuration has no host tier.
    """
    if config.host is None:
        return []
    row_bytes = [0] * len(config.host_num_blocks)
    for pool, layout in zip(config.pool_of, layouts, strict=True):
        row_bytes[pool] = max(row_bytes[pool], layout.num_bytes)
    rows = [
        torch.zeros((num_blocks, size), dtype=torch.uint8, pin_memory=is_pinned)
        for num_blocks, size in zip(config.host_num_blocks, row_bytes, strict=True)
    ]
    return [
        [rows[pool].narrow(1, plane.offset, plane.num_bytes) for plane in layout.planes]
        for pool, layout in zip(config.pool_of, layouts, strict=True)
    ]
