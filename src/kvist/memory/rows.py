"""Rows read and written by index: tokens by slot, blocks and states by block id, the bytes of whole blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvist.errors import ArgumentError, LayoutError
from kvist.memory.head_order import in_memory_order
from kvist.memory.layout import BlockLayout

__all__ = ["BlockBytes", "Rows", "ScatteredRows", "store"]


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


class BlockBytes:
    """The blocks of one group as bytes: `planes` are uint8 `[num_blocks, plane bytes]`, in the order of the layout.

    `whole` is uint8 `[num_blocks, layout.num_bytes]` where the layers of a block follow one another, None elsewhere.
    """

    def __init__(self, layout: BlockLayout, planes: Sequence[Tensor]) -> None:
        self.layout = layout
        self.planes = [
            in_memory_order(tensor, plane).flatten(1).view(torch.uint8)
            for plane, tensor in zip(layout.planes, planes, strict=True)
        ]
        self.whole = self._joined()
        self._pieces = [(0, self.whole)] if self.whole is not None and layout.is_dense else self._apart()

    def checked(self, blocks: Tensor) -> Tensor:
        """Return ids int64 `[n]` on the host; raises `ArgumentError` for one that the group has not."""
        index, num_blocks = blocks.cpu(), len(self.planes[0])
        outside = index[(index < 0) | (index >= num_blocks)]
        if len(outside):
            group = self.layout.group
            raise ArgumentError(f"block {int(outside[0])} is outside group {group} of blocks 0 to {num_blocks - 1}")
        return index

    def check_rows(self, index: Tensor, rows: Tensor) -> None:
        """Raise `LayoutError` for rows that are not of `index` int64 `[n]`, `ArgumentError` where that repeats one."""
        expected = (len(index), self.layout.num_bytes)
        if rows.dtype != torch.uint8 or rows.shape != expected:
            raise LayoutError(f"rows must be torch.uint8 {list(expected)}, got {rows.dtype} {list(rows.shape)}")
        if len(index.unique()) != len(index):
            raise ArgumentError(f"blocks {index.tolist()} must be all different")

    def read(self, index: Tensor) -> Tensor:
        """Copy blocks `index` int64 `[n]` out, uint8 `[n, layout.num_bytes]`; between planes are zeros."""
        index = index.to(self.planes[0].device)
        first = self._pieces[0][1]
        if first.shape[1] == self.layout.num_bytes:
            return first.index_select(0, index)
        rows = torch.zeros((len(index), self.layout.num_bytes), dtype=torch.uint8, device=index.device)
        for offset, piece in self._pieces:
            rows[:, offset : offset + piece.shape[1]] = piece.index_select(0, index)
        return rows

    def write(self, index: Tensor, rows: Tensor) -> None:
        """Write `rows`, uint8 `[n, layout.num_bytes]`, to blocks `index` int64 `[n]`, all different."""
        device = self.planes[0].device
        index, rows = index.to(device), rows.to(device)
        for offset, piece in self._pieces:
            piece.index_copy_(0, index, rows[:, offset : offset + piece.shape[1]])

    def _apart(self) -> list[tuple[int, Tensor]]:
        return list(zip(self.layout.offsets, self.planes, strict=True))

    def _joined(self) -> Tensor | None:
        first, num_bytes = self.planes[0], self.layout.num_bytes
        is_whole = first.stride(0) >= num_bytes and all(
            plane.data_ptr() == first.data_ptr() + offset and plane.stride(0) == first.stride(0)
            for offset, plane in self._apart()
        )
        if not is_whole:
            return None
        return first.as_strided((len(first), num_bytes), first.stride(), first.storage_offset())


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
