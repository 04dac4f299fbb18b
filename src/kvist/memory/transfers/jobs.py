"""What one batch of moves copies: bytes of blocks, or of single tokens, between the planes of two places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvist.memory.layout import BlockLayout

__all__ = ["Ids", "Job", "Pair", "columns_of", "paired", "token_pairs"]

Ids = NDArray[np.int64]

Pair = tuple[Tensor, Tensor]
"""The same bytes of blocks in two places, source and destination: uint8 `[num_blocks, num_bytes]` each."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Bytes to copy: of each pair, the source's row `sources[i]` into the destination's row `destinations[i]`.

    `offsets` None: rows are blocks, and the tensors `[num_blocks, num_bytes]`. Else single tokens are copied: rows are
    `[block_size, token_bytes]`, of which `offsets` gives the token in the source and in the destination. Where
    `overlaps`, some rows are both read and written, and all must be read before any is written.
    """

    pairs: Sequence[Pair]
    sources: Ids
    destinations: Ids
    offsets: tuple[Ids, Ids] | None = None
    overlaps: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes that are copied."""
        widths = [source.shape[-1] for source, _ in self.pairs]
        return sum(widths) * len(self.sources)


def columns_of(rows: Tensor, layout: BlockLayout) -> list[Tensor]:
    """View block-major rows, uint8 `[num_blocks, at least layout.num_bytes]`, as the planes of the layout."""
    return [rows[:, plane.offset : plane.offset + plane.num_bytes] for plane in layout.planes]


def paired(
    sources: Sequence[Tensor], destinations: Sequence[Tensor], layout: BlockLayout, num_tokens: int | None = None
) -> list[Pair]:
    """Pair the planes of one group in two places; with `num_tokens`, the first so many tokens of each.

    Planes that follow one another in both places make one pair, with what lies between them: so blocks that are one
    piece of memory on both sides are copied as one. What only moves whole is not cut.
    """
    if num_tokens is not None and num_tokens < layout.block_size and not layout.moves_whole:
        sizes = [plane.token_bytes * num_tokens for plane in layout.planes]
        return [(s[:, :size], d[:, :size]) for s, d, size in zip(sources, destinations, sizes, strict=True) if size]
    joined: list[Pair] = []
    for pair in zip(sources, destinations, strict=True):
        if joined and (both := _joined(joined[-1], pair)) is not None:
            joined[-1] = both
        else:
            joined.append(pair)
    return joined


def token_pairs(sources: Sequence[Tensor], destinations: Sequence[Tensor], layout: BlockLayout) -> list[Pair]:
    """Pair the planes of one group in two places by token, `[num_blocks, block_size, token_bytes]` each."""
    shape = layout.block_size, -1
    return [(s.unflatten(1, shape), d.unflatten(1, shape)) for s, d in zip(sources, destinations, strict=True)]


def _joined(first: Pair, second: Pair) -> Pair | None:
    """View two pairs as one, where the second follows the first at the same distance inside the rows of both."""
    distances = {after.data_ptr() - before.data_ptr() for before, after in zip(first, second, strict=True)}
    distance = distances.pop()
    width = distance + second[0].shape[1]
    inside = all(
        before.stride() == after.stride() and before.stride(0) >= width
        for before, after in zip(first, second, strict=True)
    )
    if distances or not inside or distance < first[0].shape[1]:
        return None
    return _widened(first[0], width), _widened(first[1], width)


def _widened(plane: Tensor, width: int) -> Tensor:
    return torch.as_strided(plane, (plane.shape[0], width), plane.stride(), plane.storage_offset())
