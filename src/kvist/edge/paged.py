"""Tokens by slot and position: found through a page table on the device, read and written without the host waiting."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvist.memory.rows import Rows

__all__ = ["move_rows", "prefix_runs", "quantized", "read_rows", "rows_at"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integers of as many bytes: 8-bit floats cannot be filled."""


def rows_at(table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Return in which row of a pool, `page * page_size + offset`, tokens are: int64 as `positions`, -1 for nowhere.

    `table` is int32 `[B, 2, M]`, `positions` int64 `[B, T]`; nowhere is what is unmapped, negative or past the table.

    >>> table = torch.tensor([[[3, -1], [7, -1]]], dtype=torch.int32)
    >>> rows_at(table, torch.tensor([[0, 1, 2, 9, -1]]), page_size=2).tolist()
    [[6, 7, -1, -1, -1]]
    """
    num_columns = table.shape[2]
    columns = positions.div(page_size, rounding_mode="floor")
    inside = (columns >= 0) & (columns < num_columns)
    pages = table[:, 0].to(torch.int64).gather(1, columns.clamp(0, num_columns - 1))
    return torch.where(inside & (pages >= 0), pages * page_size + positions % page_size, -1)


def read_rows(rows: Rows, index: Tensor) -> Tensor:
    """Copy rows out, `[*index.shape, H, D]`, with zeros where the index, int64 of any shape, is negative."""
    flat = index.flatten()
    found = rows.read(flat.clamp(min=0))
    found.view(_BITS[found.element_size()]).masked_fill_((flat < 0).view(-1, 1, 1), 0)
    return found.view(*index.shape, *rows.row_shape)


def move_rows(rows: Rows, sources: Tensor, destinations: Tensor) -> None:
    """Copy rows, int64 of equal shapes, all read before any is written; from nowhere zeros, to nowhere nothing."""
    rows.write_kept(destinations.flatten(), read_rows(rows, sources).flatten(0, -3))


def prefix_runs(pages: NDArray[np.int32], num_tokens: int, page_size: int) -> list[range]:
    """Return the rows of the first `num_tokens` in these pages, those of neighbouring pages as one run.

    >>> prefix_runs(np.array([4, 5, 2], np.int32), num_tokens=10, page_size=4)
    [range(16, 24), range(8, 10)]
    """
    needed = pages[: -(-num_tokens // page_size)]
    runs = []
    for run in np.split(needed, np.flatnonzero(np.diff(needed) != 1) + 1):
        start = int(run[0]) * page_size
        runs.append(range(start, start + min(len(run) * page_size, num_tokens)))
        num_tokens -= len(runs[-1])
    return runs


def quantized(numbers: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Return numbers as they are stored: those of the pool's dtype bit by bit, others for fp8 divided by the scale.

    What fp8 has no numbers for becomes its largest.

    >>> quantized(torch.tensor([1.0, 2000.0]), torch.float8_e4m3fn, scale=0.5).float().tolist()
    [2.0, 448.0]
    """
    if numbers.dtype == dtype:
        return numbers
    limit = torch.finfo(dtype).max
    return (numbers.float() / scale).clamp(-limit, limit).to(dtype)
