"""One batch of sequences as the index arrays that attention kernels read. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kvist.core.sequences import SequenceRows
from kvist.errors import ArgumentError, ArgumentTypeError, SequenceError

__all__ = ["BatchTables", "build_tables"]


@dataclass(frozen=True, slots=True)
class BatchTables:
    """The tables of one forward pass over B sequences with T query tokens in all.

    `block_table` int32 `[B, M]`: block ids, padded. `slot_mapping` int64 `[T]`: where K and V of each query token go,
    `block_id * block_size + offset`. `seq_lens` int32 `[B]`: tokens attended to, query tokens included. `cu_seqlens`
    int32 `[B + 1]`: where each sequence's query tokens begin in the packed batch.
    """

    block_table: NDArray[np.int32]
    slot_mapping: NDArray[np.int64]
    seq_lens: NDArray[np.int32]
    cu_seqlens: NDArray[np.int32]

    @property
    def query_lens(self) -> NDArray[np.int32]:
        """Query tokens by sequence, int32 `[B]`."""
        return np.diff(self.cu_seqlens)

    @classmethod
    def buffers(cls, max_sequences: int, max_blocks: int, max_query_tokens: int) -> Self:
        """Make buffers for `out`: batches up to these sizes are written into their leading parts."""
        return cls(
            np.zeros((max_sequences, max_blocks), np.int32),
            np.zeros(max_query_tokens, np.int64),
            np.zeros(max_sequences, np.int32),
            np.zeros(max_sequences + 1, np.int32),
        )


def build_tables(
    rows: SequenceRows,
    batch: NDArray[np.int64],
    num_query_tokens: NDArray[np.int64] | None,
    *,
    padding: int,
    max_blocks: int | None,
    out: BatchTables | None,
) -> BatchTables:
    """Build the tables of checked rows; see `KVCacheManager.tables`."""
    computed = rows.num_computed[batch]
    query = rows.num_tokens[batch] - computed if num_query_tokens is None else num_query_tokens
    _check_query(rows, batch, computed, query)
    num_blocks = rows.num_blocks[batch]
    width = int(num_blocks.max(initial=0)) if max_blocks is None else max_blocks
    ends = np.cumsum(query)
    if out is not None:
        columns = width if max_blocks is not None else max(width, np.shape(out.block_table)[-1])
        out = _parts_of(out, len(batch), columns, int(ends[-1]) if len(batch) else 0)
        width = out.block_table.shape[1]
    table = _block_table(rows, batch, num_blocks, width, padding, None if out is None else out.block_table)
    seq_lens, cu_seqlens = (
        (np.empty(len(batch), np.int32), np.empty(len(batch) + 1, np.int32))
        if out is None
        else (out.seq_lens, out.cu_seqlens)
    )
    seq_lens[:] = computed + query
    cu_seqlens[0] = 0
    cu_seqlens[1:] = ends
    slots = _slots(rows, batch, computed, query, ends)
    if out is None:
        return BatchTables(table, slots, seq_lens, cu_seqlens)
    out.slot_mapping[:] = slots
    return out


def _block_table(
    rows: SequenceRows,
    batch: NDArray[np.int64],
    num_blocks: NDArray[np.int64],
    width: int,
    padding: int,
    out: NDArray[np.int32] | None,
) -> NDArray[np.int32]:
    """Take the rows' leading columns: a view of the manager's own table where they are neighbours and padding is 0."""
    source = rows.block_table[0]
    columns = min(width, source.shape[1])
    neighbours = len(batch) > 0 and int(batch[-1] - batch[0]) == len(batch) - 1 and bool((np.diff(batch) == 1).all())
    if out is None and neighbours and padding == 0 and width <= source.shape[1]:
        view: NDArray[np.int32] = source[batch[0] : batch[0] + len(batch), :width]
        view.flags.writeable = False
        return view
    table = np.empty((len(batch), width), np.int32) if out is None else out
    table[:, :columns] = source[batch, :columns]
    if padding or width > columns:
        table[np.arange(width) >= num_blocks[:, None]] = padding
    return table


def _slots(
    rows: SequenceRows,
    batch: NDArray[np.int64],
    computed: NDArray[np.int64],
    query: NDArray[np.int64],
    ends: NDArray[np.int64],
) -> NDArray[np.int64]:
    block_size = rows.block_size
    if len(query) and int(query.min()) == 1 == int(query.max()):
        positions, owners = computed, batch
    else:
        total = int(ends[-1]) if len(ends) else 0
        positions = np.arange(total) + np.repeat(computed - (ends - query), query)
        owners = np.repeat(batch, query)
    blocks, offsets = np.divmod(positions, block_size)
    slots: NDArray[np.int64] = rows.block_table[0, owners, blocks].astype(np.int64) * block_size + offsets
    return slots


def _check_query(
    rows: SequenceRows, batch: NDArray[np.int64], computed: NDArray[np.int64], query: NDArray[np.int64]
) -> None:
    wrong = computed + query > np.minimum(rows.num_blocks[batch] * rows.block_size, rows.max_tokens)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise SequenceError(
            f"tables: row {batch[at]} cannot have {query[at]} query tokens: {computed[at]} of its "
            f"{rows.num_tokens[batch[at]]} tokens are computed, and it has room for {rows.capacity(int(batch[at]))}"
        )


def _parts_of(out: BatchTables, num_sequences: int, width: int, num_query: int) -> BatchTables:
    """Return the leading parts of the caller's buffers, after checking that they are large enough, and their types."""
    wanted: AbstractSequence[tuple[str, Any, tuple[int, ...]]] = (
        ("block_table", np.int32, (num_sequences, width)),
        ("slot_mapping", np.int64, (num_query,)),
        ("seq_lens", np.int32, (num_sequences,)),
        ("cu_seqlens", np.int32, (num_sequences + 1,)),
    )
    parts = []
    for name, dtype, shape in wanted:
        buffer = getattr(out, name)
        if buffer.dtype != dtype or buffer.ndim != len(shape):
            raise ArgumentTypeError(
                f"tables: out.{name} is {buffer.dtype} of shape {buffer.shape}, "
                f"must be {np.dtype(dtype)} with {len(shape)} dimensions"
            )
        if any(have < need for have, need in zip(buffer.shape, shape, strict=True)):
            raise ArgumentError(f"tables: out.{name} has shape {buffer.shape}, this batch needs {shape}")
        parts.append(buffer[tuple(slice(0, size) for size in shape)])
    return BatchTables(*parts)
