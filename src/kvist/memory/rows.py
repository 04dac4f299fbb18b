"""Rows of a tensor, read and written by index: tokens by slot, blocks and states by block id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvist.errors import ArgumentError, LayoutError

__all__ = ["Rows", "ScatteredRows", "store"]


class Rows:
    """The rows of a tensor by their index in its first axis, copied bit by bit."""

    def __init__(self, tensor: Tensor) -> None:
        self.num_rows = tensor.shape[0]
        self.row_shape = tuple(tensor.shape[1:])
        self.dtype = tensor.dtype
        self.device = tensor.device
        self._bits = _bits(tensor)

    def read(self, index: Tensor) -> Tensor:
        """Copy the rows at `index` int64 `[n]` out, `[n, *row_shape]`."""
        return self._bits.index_select(0, index).view(self.dtype)

    def write(self, index: Tensor, rows: Tensor) -> None:
        """Write `rows` `[n, *row_shape]` at `index` int64 `[n]`."""
        self._bits.index_copy_(0, index, _bits(rows))

    def copy(self, sources: Tensor, destinations: Tensor, length: int | None = None) -> None:
        """Copy rows, or the first `length` of what each consists of; all are read before any is written."""
        rows = self._bits if length is None else self._bits[:, :length]
        rows.index_copy_(0, destinations, rows.index_select(0, sources))

    def write_kept(self, index: Tensor, rows: Tensor) -> None:
        """Write `rows` where their index is not negative, without asking the device how many are.

        A skipped row writes again what the first kept row writes, or, if none is kept, what row 0 holds already.
        """
        if index.numel() == 0:
            return
        kept = index >= 0
        first = kept.int().argmax().unsqueeze(0)
        anchor = index[first].clamp(min=0)
        bits = _bits(rows)
        anchor_row = torch.where(kept.any(), bits[first], _bits(self.read(anchor)))
        shape = (-1,) + (1,) * (rows.ndim - 1)
        chosen = torch.where(kept.view(shape), bits, anchor_row).view(self.dtype)
        self.write(torch.where(kept, index, anchor), chosen)


class ScatteredRows(Rows):
    """The token rows of `[num_blocks, block_size, ...]` by slot, where other layers' bytes lie between the blocks."""

    def __init__(self, plane: Tensor) -> None:
        super().__init__(plane)
        self._block_size = plane.shape[1]
        self.num_rows = plane.shape[0] * self._block_size
        self.row_shape = tuple(plane.shape[2:])

    def read(self, index: Tensor) -> Tensor:
        """Copy the rows at slots `index` int64 `[n]` out, `[n, *row_shape]`."""
        return self._bits[index // self._block_size, index % self._block_size].view(self.dtype)

    def copy(self, sources: Tensor, destinations: Tensor, length: int | None = None) -> None:
        """Copy rows from slots to slots; all are read before any is written."""
        self.write(destinations, self.read(sources))

    def write(self, index: Tensor, rows: Tensor) -> None:
        """Write `rows` `[n, *row_shape]` at slots `index` int64 `[n]`."""
        self._bits[index // self._block_size, index % self._block_size] = _bits(rows)


def store(targets: Sequence[Rows], index: Tensor, new: Mapping[str, Tensor | None], unit: str) -> None:
    """Write new rows, by name, into one target each, or, if any does not fit, nothing; negative indices are skipped.

    An `index` on the host is checked, one on an accelerator is not looked at. `unit` says what it counts.
    Raises `LayoutError` for rows that do not fit, `ArgumentError` for an index past the end.
    """
    rows = [
        _fitting(target, len(index), name, given, unit)
        for target, (name, given) in zip(targets, new.items(), strict=True)
    ]
    if index.device.type != "cpu":
        for target, given in zip(targets, rows, strict=True):
            target.write_kept(index, given)
        return
    index, rows = _drop_skipped(index, rows, targets[0].num_rows, unit)
    index = index.to(targets[0].device, non_blocking=True)
    for target, given in zip(targets, rows, strict=True):
        target.write(index, given)


def _fitting(target: Rows, num_rows: int, name: str, rows: Tensor | None, unit: str) -> Tensor:
    expected = (num_rows, *target.row_shape)
    if rows is None or tuple(rows.shape) != expected:
        got = None if rows is None else list(rows.shape)
        raise LayoutError(f"{name} must be {list(expected)} for {num_rows} {unit}s, got {got}")
    if rows.dtype != target.dtype or rows.device != target.device:
        raise LayoutError(
            f"{name} must be as it is kept, {target.dtype} on {target.device}, got {rows.dtype} on {rows.device}"
        )
    return rows


def _drop_skipped(index: Tensor, rows: list[Tensor], num_rows: int, unit: str) -> tuple[Tensor, list[Tensor]]:
    """Check an index that lies on the host, and leave out the rows that are to be skipped."""
    if index.numel() == 0:
        return index, rows
    lowest, highest = (int(bound) for bound in index.aminmax())
    if highest >= num_rows:
        raise ArgumentError(f"{unit} {highest} is outside the layer's {num_rows} {unit}s")
    if lowest >= 0:
        return index, rows
    kept = (index >= 0).nonzero().flatten()
    chosen = kept.to(rows[0].device)
    return index[kept], [_bits(given).index_select(0, chosen).view(given.dtype) for given in rows]


def _bits(tensor: Tensor) -> Tensor:
    """View 8-bit floats as bytes, since torch cannot index them; other tensors are returned as they are."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
