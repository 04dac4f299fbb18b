"""What one batch of moves copies: bytes of blocks, or of single tokens, between the planes of two places."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvist.errors import ArgumentError, LayoutError
from kvist.memory.layout import BlockLayout, Plane

__all__ = ["Ids", "Job", "Pair", "Pairs", "Side", "columns_of", "paired", "token_pairs"]

Ids = NDArray[np.int64]

Pair = tuple[Tensor, Tensor]
"""The same bytes of blocks in two places, source and destination: uint8 `[num_blocks, num_bytes]` each."""


class Pairs(Sequence[Pair]):
    """The pairs of tensors of one group in two places, and where the rows of those on CPU lie."""

    def __init__(self, pairs: Iterable[Pair]) -> None:
        self._pairs = list(pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    @overload
    def __getitem__(self, index: int) -> Pair: ...
    @overload
    def __getitem__(self, index: slice) -> list[Pair]: ...
    def __getitem__(self, index: int | slice) -> Pair | list[Pair]:
        return self._pairs[index]

    @cached_property
    def sides(self) -> tuple[Side, Side]:
        """Where the rows of all sources and of all destinations lie; all must be on CPU.

        Raises `LayoutError` for tensors of other kinds.
        """
        for source, destination in self._pairs:
            if source.shape[1:] != destination.shape[1:]:
                raise LayoutError(
                    f"rows of {list(source.shape[1:])} cannot be copied into {list(destination.shape[1:])}"
                )
        return Side("source", [source for source, _ in self]), Side("destination", [written for _, written in self])

    @cached_property
    def widths(self) -> Ids:
        """Bytes of a row of each pair."""
        return np.array([source.shape[1] for source, _ in self._pairs], np.int64)


class Side:
    """Rows of bytes on CPU: as arrays, and as addresses `[num_pairs]` of their first rows, with the strides of each."""

    def __init__(self, name: str, tensors: Sequence[Tensor]) -> None:
        for rows in tensors:
            _check(name, rows)
        self.name = name
        self.arrays = [rows.numpy() for rows in tensors]
        self.addresses = np.array([rows.data_ptr() for rows in tensors], np.int64)
        self.strides = np.array([rows.stride(0) for rows in tensors], np.int64)
        self.num_rows = min((rows.shape[0] for rows in tensors), default=0)

    def addresses_of(self, ids: Ids) -> Ids:
        """Return the addresses of rows, `[num_pairs, n]`."""
        addresses: Ids = self.addresses[:, None] + self.strides[:, None] * ids
        return addresses

    def check(self, ids: Ids) -> None:
        """Raise `ArgumentError` unless all rows are there: addresses are made of them."""
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_rows:
            raise ArgumentError(f"{self.name} ids must be in [0, {self.num_rows}), got {ids.min()} to {ids.max()}")


def _check(name: str, rows: Tensor) -> None:
    if rows.dtype != torch.uint8 or rows.device.type != "cpu" or rows.ndim != 2 or rows.stride(1) != 1:
        raise LayoutError(
            f"the {name} must be uint8 [num_rows, num_bytes] on CPU, dense in its last axis, "
            f"got {rows.dtype} {list(rows.shape)} of strides {list(rows.stride())} on {rows.device}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Bytes to copy: of each pair, the source's row `sources[i]` into the destination's row `destinations[i]`.

    `offsets` None: rows are blocks, and the tensors `[num_blocks, num_bytes]`. Else single tokens are copied: rows are
    `[block_size, token_bytes]`, of which `offsets` gives the token in the source and in the destination. Where
    `overlaps`, some rows are both read and written, and all must be read before any is written.
    """

    pairs: Pairs
    sources: Ids
    destinations: Ids
    offsets: tuple[Ids, Ids] | None = None
    overlaps: bool = False


def columns_of(rows: Tensor, layout: BlockLayout) -> list[Tensor]:
    """View block-major rows, uint8 `[num_blocks, at least layout.num_bytes]`, as the planes of the layout."""
    return [rows[:, plane.offset : plane.offset + plane.num_bytes] for plane in layout.planes]


def paired(
    sources: Sequence[Tensor], destinations: Sequence[Tensor], layout: BlockLayout, num_tokens: int | None = None
) -> Pairs:
    """Pair the planes of one group in two places; with `num_tokens`, the first so many tokens of each.

    Planes that follow one another in both places make one pair, with what lies between them: so blocks that are one
    piece of memory on both sides are copied as one. What only moves whole is not cut.
    """
    if num_tokens is not None and num_tokens < layout.block_size and not layout.moves_whole:
        sizes = [plane.token_bytes * num_tokens for plane in layout.planes]
        return Pairs(
            (s[:, :size], d[:, :size]) for s, d, size in zip(sources, destinations, sizes, strict=True) if size
        )
    joined: list[Pair] = []
    for pair in zip(sources, destinations, strict=True):
        if joined and (both := _joined(joined[-1], pair)) is not None:
            joined[-1] = both
        else:
            joined.append(pair)
    return Pairs(joined)


def token_pairs(sources: Sequence[Tensor], destinations: Sequence[Tensor], layout: BlockLayout) -> Pairs:
    """Pair the planes of one group in two places by token, `[num_blocks, block_size, token_bytes]` each.

    Those whose heads come first are `[num_blocks, block_size, num_kv_heads, dim_bytes]`.
    """
    sides = zip(sources, destinations, layout.planes, strict=True)
    return Pairs((_by_token(source, plane), _by_token(destination, plane)) for source, destination, plane in sides)


def _by_token(rows: Tensor, plane: Plane) -> Tensor:
    num_tokens, num_heads = plane.shape[:2]
    by_token: Tensor = rows.unflatten(1, (num_tokens, -1))
    if plane.heads_first:
        by_token = rows.unflatten(1, (num_heads, num_tokens, -1)).transpose(1, 2)
    return by_token


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
