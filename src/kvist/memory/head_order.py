"""Blocks whose heads come before their tokens in memory, and the same bytes with the heads of each token together.

Slower tiers that others read keep blocks as the layout says, `[block_size, num_kv_heads, dim]`, whatever the order of
the device's storage.
"""

from __future__ import annotations

from torch import Tensor

from kvist.memory.layout import BlockLayout, Plane

__all__ = ["as_laid_out", "as_stored", "in_memory_order"]


def in_memory_order(tensor: Tensor, plane: Plane) -> Tensor:
    """View a plane `[num_blocks, ...]` with its axes in the order in which they lie in memory."""
    return tensor.transpose(1, 2) if plane.heads_first else tensor


def as_laid_out(rows: Tensor, layout: BlockLayout) -> Tensor:
    """Return blocks, uint8 `[n, layout.num_bytes]` as they are stored, with the heads of each token together."""
    return _exchanged(rows, layout, heads_are_outer=True)


def as_stored(rows: Tensor, layout: BlockLayout) -> Tensor:
    """Return blocks, uint8 `[n, layout.num_bytes]` as the layout says, as they are to be stored."""
    return _exchanged(rows, layout, heads_are_outer=False)


def _exchanged(rows: Tensor, layout: BlockLayout, *, heads_are_outer: bool) -> Tensor:
    """Exchange tokens and heads in the planes whose heads come first in memory; the others stay as they are."""
    planes = [plane for plane in layout.planes if plane.heads_first]
    if not planes:
        return rows
    exchanged = rows.clone()
    for plane in planes:
        num_tokens, num_heads = plane.shape[:2]
        outer, inner = (num_heads, num_tokens) if heads_are_outer else (num_tokens, num_heads)
        piece = rows[:, plane.offset : plane.offset + plane.num_bytes].unflatten(1, (outer, inner, -1))
        exchanged[:, plane.offset : plane.offset + plane.num_bytes] = piece.transpose(1, 2).flatten(1)
    return exchanged
