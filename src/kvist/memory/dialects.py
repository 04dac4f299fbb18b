"""Block tables in the words of each attention kernel: pure functions of arrays. NumPy only.

`block_table` is int32 `[B, M]` here, and `held` bool `[B, M]` says which of its entries name a block; the others, holes
and padding, may be any number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kvist.core.arguments import as_count
from kvist.errors import ArgumentError, ArgumentTypeError, LayoutError

__all__ = [
    "FlashInferTables",
    "FlexTables",
    "PoolOffsets",
    "batch_indices_positions",
    "coarser_table",
    "edge_table",
    "finer_table",
    "flashinfer_tables",
    "flex_tables",
    "leading_part",
    "left_table",
    "split_offsets",
    "tensorrt_offsets",
]

Table = NDArray[np.int32]
Held = NDArray[np.bool_]

MAX_INT32 = 2**31 - 1
MAX_SPLIT_BLOCKS = MAX_INT32 // 2
"""Blocks of a pool whose V ids, K id + num_blocks, still are int32."""


# -- FlashInfer -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FlashInferTables:
    """The pages of B sequences one after the other, as FlashInfer's wrappers plan with them. All arrays are int32.

    Pages `indices[indptr[i]:indptr[i + 1]]` hold the `(pages - 1) * page_size + last_page_len[i]` tokens of sequence i;
    a sequence without tokens has no page and a `last_page_len` of 0. `indptr` and `qo_indptr` are `[B + 1]`,
    `last_page_len` is `[B]`; `qo_indptr` says where each sequence's query tokens begin.
    """

    indptr: NDArray[np.int32]
    indices: NDArray[np.int32]
    last_page_len: NDArray[np.int32]
    qo_indptr: NDArray[np.int32]
    page_size: int

    @property
    def seq_lens(self) -> NDArray[np.int32]:
        """Tokens of each sequence in its pages, int32 `[B]`."""
        full_pages: NDArray[np.int32] = np.maximum(np.diff(self.indptr) - 1, 0)
        return full_pages * np.int32(self.page_size) + self.last_page_len

    def batch_indices_positions(self, num_tokens: int | None = None) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Say of each query token whose it is and where among the sequence's tokens, for `append_paged_kv_cache`.

        See the function of this name; positions count the tokens in the listed pages, which is what the kernel does.
        """
        return batch_indices_positions(self.qo_indptr, self.seq_lens, num_tokens)

    @classmethod
    def buffers(cls, max_sequences: int, max_pages: int) -> Self:
        """Make buffers for `out`: up to `max_sequences` sequences of `max_pages` pages in all."""
        return cls(
            np.zeros(max_sequences + 1, np.int32),
            np.zeros(max_pages, np.int32),
            np.zeros(max_sequences, np.int32),
            np.zeros(max_sequences + 1, np.int32),
            page_size=0,
        )


def flashinfer_tables(
    block_table: Table,
    seq_lens: NDArray[np.int32],
    qo_indptr: NDArray[np.int32],
    page_size: int,
    out: FlashInferTables | None = None,
) -> FlashInferTables:
    """List the pages of `seq_lens` tokens of each row, holes with the number that they have in the table.

    >>> table = np.array([[4, 7, 2], [5, 0, 0]], np.int32)
    >>> csr = flashinfer_tables(table, np.array([11, 3], np.int32), np.array([0, 1, 4], np.int32), page_size=4)
    >>> csr.indptr.tolist(), csr.indices.tolist(), csr.last_page_len.tolist()
    ([0, 3, 4], [4, 7, 2, 5], [3, 3])
    """
    num_pages = -(-seq_lens // page_size)
    width = _checked_width(num_pages, block_table, "flashinfer")
    num_sequences, total = len(seq_lens), int(num_pages.sum())
    parts = FlashInferTables.buffers(num_sequences, total) if out is None else out
    indptr = leading_part(parts.indptr, np.int32, (num_sequences + 1,), "flashinfer: out.indptr")
    indices = leading_part(parts.indices, np.int32, (total,), "flashinfer: out.indices")
    last_page_len = leading_part(parts.last_page_len, np.int32, (num_sequences,), "flashinfer: out.last_page_len")
    queries = leading_part(parts.qo_indptr, np.int32, (num_sequences + 1,), "flashinfer: out.qo_indptr")
    indptr[0] = 0
    indptr[1:] = np.cumsum(num_pages)
    indices[:] = block_table[:, :width][np.arange(width) < num_pages[:, None]]
    last_page_len[:] = seq_lens - np.maximum(num_pages - 1, 0) * page_size
    queries[:] = qo_indptr
    return FlashInferTables(indptr, indices, last_page_len, queries, page_size)


def batch_indices_positions(
    append_indptr: NDArray[np.int32], seq_lens: NDArray[np.int32], num_tokens: int | None = None
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Say of each appended token whose it is and where in the sequence, which it ends: two int32 `[num_tokens]`.

    `append_indptr` `[B + 1]` says where each sequence's tokens begin, `seq_lens` `[B]` counts them in. Entries from
    `append_indptr[-1]` up to `num_tokens`, for batches of a fixed size, are -1 and 0: the kernel skips them.

    >>> [array.tolist() for array in batch_indices_positions(np.array([0, 1, 3]), np.array([5, 5]), 4)]
    [[0, 1, 1, -1], [4, 3, 4, 0]]
    """
    appended = np.diff(append_indptr)
    total = int(append_indptr[-1])
    size = total if num_tokens is None else num_tokens
    if size < total:
        raise ArgumentError(f"batch_indices_positions: num_tokens is {num_tokens}, the batch has {total}")
    batch_indices, positions = np.full(size, -1, np.int32), np.zeros(size, np.int32)
    batch_indices[:total] = np.repeat(np.arange(len(appended)), appended)
    positions[:total] = np.arange(total) + np.repeat(seq_lens - append_indptr[1:], appended)
    return batch_indices, positions


# -- TensorRT-LLM and Edge-LLM ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolOffsets:
    """How a pool counts, in K (or V) blocks of one layer: K of block b is at `b * block_stride`, V `value_stride` on.

    >>> PoolOffsets.interleaved(num_layers=4)
    PoolOffsets(block_stride=8, value_stride=1)
    """

    block_stride: int
    value_stride: int

    @classmethod
    def interleaved(cls, num_layers: int) -> Self:
        """Of storage `[num_blocks, num_layers, 2, ...]`, as TensorRT-LLM keeps it: K and V side by side in a block."""
        return cls(2 * num_layers, 1)

    @classmethod
    def keys_only(cls, num_layers: int) -> Self:
        """Of storage `[num_blocks, num_layers, ...]` of keys only (MLA): both entries name the one block."""
        return cls(num_layers, 0)

    @classmethod
    def split(cls, num_blocks: int) -> Self:
        """Of storage `[2, num_blocks, ...]`, one layer's, as `TorchMemory` and Edge-LLM keep it: all K before all V."""
        return cls(1, num_blocks)


def tensorrt_offsets(
    block_table: Table,
    held: Held,
    pools: int | PoolOffsets | Sequence[int | PoolOffsets],
    *,
    secondary: Held | None = None,
    fill: int = MAX_INT32,
    out: NDArray[np.int32] | None = None,
) -> NDArray[np.int32]:
    """Return where K (row 0) and V (row 1) of each block are in each pool, int32 `[num_pools, B, 2, M]`.

    A pool that is an int n is `PoolOffsets.interleaved(n)`. Entries without a block are `fill`; those of blocks that
    `secondary` `[B, M]` marks as lying in the secondary (host) pool have the sign bit set.

    >>> tensorrt_offsets(np.array([[5, 0]], np.int32), np.array([[True, False]]), 4).tolist()
    [[[[40, 2147483647], [41, 2147483647]]]]
    """
    rules = _rules(pools)
    largest = _largest_id(block_table, held)
    for rule in rules:
        _require_int32(largest * rule.block_stride + rule.value_stride, f"tensorrt: {rule} puts block {largest}")
    if not -(2**31) <= fill < 2**31:
        raise ArgumentError(f"tensorrt: fill is {fill}, must be an int32")
    if secondary is not None and np.shape(secondary) != block_table.shape:
        raise ArgumentError(f"tensorrt: secondary has shape {np.shape(secondary)}, must be {block_table.shape}")
    shape = (len(rules), block_table.shape[0], 2, block_table.shape[1])
    offsets = np.empty(shape, np.int32) if out is None else leading_part(out, np.int32, shape, "tensorrt: out")
    marks = np.zeros((), np.int32) if secondary is None else np.where(secondary, np.int32(-(2**31)), np.int32(0))
    ids = np.where(held, block_table, 0)
    for pool, rule in zip(offsets, rules, strict=True):
        keys = ids * np.int32(rule.block_stride)
        pool[:, 0] = np.where(held, keys | marks, fill)
        pool[:, 1] = np.where(held, (keys + np.int32(rule.value_stride)) | marks, fill)
    return offsets


def split_offsets(offsets: NDArray[np.int32]) -> tuple[NDArray[np.int32], Held]:
    """Take TensorRT-LLM's offsets apart: the places, and which lie in the secondary pool; of the same shape.

    >>> [array.tolist() for array in split_offsets(np.array([40, 40 - 2**31], np.int32))]
    [[40, 40], [False, True]]
    """
    return offsets & np.int32(MAX_INT32), offsets < 0


def edge_table(
    block_table: Table, held: Held, num_blocks: int, out: NDArray[np.int32] | None = None
) -> NDArray[np.int32]:
    """Return the K ids (row 0) and V ids (row 1) of a pool `[2, num_blocks, ...]` read flat, int32 `[B, 2, M]`.

    The V id is the K id + `num_blocks`; entries without a block are -1.

    >>> edge_table(np.array([[3, 7, 0]], np.int32), np.array([[True, True, False]]), num_blocks=10).tolist()
    [[[3, 7, -1], [13, 17, -1]]]
    """
    _check_pool(block_table, held, num_blocks, "edge")
    if num_blocks > MAX_SPLIT_BLOCKS:
        raise ArgumentError(f"edge: num_blocks is {num_blocks}, int32 has V ids for {MAX_SPLIT_BLOCKS}")
    shape = (block_table.shape[0], 2, block_table.shape[1])
    table = np.empty(shape, np.int32) if out is None else leading_part(out, np.int32, shape, "edge: out")
    table[:, 0] = np.where(held, block_table, -1)
    table[:, 1] = np.where(held, block_table + np.int32(num_blocks), -1)
    return table


# -- FlexAttention ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FlexTables:
    """What FlexAttention needs to read K and V of a pool `[1, H, num_blocks * block_size, D]` in place.

    `page_table` int64 `[B, num_blocks]`: the block of each page of a sequence, -1 where there is none; it is wider
    where the pages of a sequence, holes included, outnumber the blocks. `physical_to_logical` int64 `[B, num_blocks]`
    is its inverse, for `mask_mod`: which of the sequence's pages a block holds, -1 for blocks of others.
    `kv_num_blocks` int32 `[B]` and `kv_indices` int32 `[B, num_blocks]` are those of a `BlockMask` in which every query
    block sees all pages that hold tokens.
    """

    page_table: NDArray[np.int64]
    physical_to_logical: NDArray[np.int64]
    kv_num_blocks: NDArray[np.int32]
    kv_indices: NDArray[np.int32]

    @classmethod
    def buffers(cls, max_sequences: int, num_blocks: int, max_blocks: int = 0) -> Self:
        """Make buffers for `out`; `max_blocks` are the columns in use of a table that has more than `num_blocks`."""
        return cls(
            np.zeros((max_sequences, max(num_blocks, max_blocks)), np.int64),
            np.zeros((max_sequences, num_blocks), np.int64),
            np.zeros(max_sequences, np.int32),
            np.zeros((max_sequences, num_blocks), np.int32),
        )


def flex_tables(
    block_table: Table, held: Held, num_pages: NDArray[np.int64], num_blocks: int, out: FlexTables | None = None
) -> FlexTables:
    """Return the tables of a pool of `num_blocks`; the first `num_pages` `[B]` columns of a row hold its tokens.

    >>> tables = flex_tables(np.array([[2, 0]], np.int32), np.array([[True, True]]), np.array([2]), num_blocks=4)
    >>> tables.page_table.tolist(), tables.physical_to_logical.tolist(), tables.kv_indices.tolist()
    ([[2, 0, -1, -1]], [[1, -1, 0, -1]], [[2, 0, 0, 0]])
    """
    _check_pool(block_table, held, num_blocks, "flex")
    num_sequences, num_columns = len(block_table), int(np.flatnonzero(held.any(0)).max(initial=-1)) + 1
    parts = FlexTables.buffers(num_sequences, num_blocks, num_columns) if out is None else out
    by_block = (num_sequences, num_blocks)
    pages = (num_sequences, max(num_blocks, num_columns))
    page_table = leading_part(parts.page_table, np.int64, pages, "flex: out.page_table")
    inverse = leading_part(parts.physical_to_logical, np.int64, by_block, "flex: out.physical_to_logical")
    counts = leading_part(parts.kv_num_blocks, np.int32, (num_sequences,), "flex: out.kv_num_blocks")
    kv_indices = leading_part(parts.kv_indices, np.int32, by_block, "flex: out.kv_indices")
    page_table[:] = inverse[:] = -1
    page_table[:, :num_columns] = np.where(held, block_table, -1)[:, :num_columns]
    rows, columns = np.nonzero(held)
    inverse[rows, block_table[rows, columns]] = columns
    listed = held & (np.arange(block_table.shape[1]) < num_pages[:, None])
    counts[:] = np.count_nonzero(listed, axis=1)
    kv_indices[:] = 0
    kv_indices[np.arange(num_blocks) < counts[:, None]] = block_table[listed]
    return FlexTables(page_table, inverse, counts, kv_indices)


# -- pages of other sizes ---------------------------------------------------------------------------------------------


def finer_table(block_table: Table, held: Held, factor: int, out: NDArray[np.int32] | None = None) -> Table:
    """Number the pages of `1 / factor` of a block each, int32 `[B, M * factor]`: page j of block b is b * factor + j.

    Holes and padding keep their number.

    >>> finer_table(np.array([[3, -1]], np.int32), np.array([[True, False]]), 2).tolist()
    [[6, 7, -1, -1]]
    """
    largest = _largest_id(block_table, held)
    _require_int32(largest * factor + factor - 1, f"refined: {factor} pages a block put the last of block {largest}")
    num_sequences, width = block_table.shape
    shape = (num_sequences, width * factor)
    table = np.empty(shape, np.int32) if out is None else leading_part(out, np.int32, shape, "refined: out")
    first_pages = np.where(held, block_table * np.int32(factor), block_table)
    places = np.tile(np.arange(factor, dtype=np.int32), width)
    table[:] = np.repeat(first_pages, factor, axis=1) + places * np.repeat(held, factor, axis=1)
    return table


def coarser_table(
    block_table: Table, held: Held, block_size: int, page_size: int, out: NDArray[np.int32] | None = None
) -> Table:
    """Number the pages of several blocks each, int32 `[B, ceil(M * block_size / page_size)]`.

    The blocks of a page must be neighbours in the pool and begin at a multiple of their number; those that a sequence
    does not hold count as fitting, since its tokens are not there. A page without a block keeps its first column's
    number. Raises LayoutError where the blocks do not lie so, with the first that does not and the sizes that would do.

    >>> coarser_table(np.array([[4, 5, 2, -1]], np.int32), np.array([[True, True, True, False]]), 16, 32).tolist()
    [[2, 1]]
    """
    factor = page_size // block_size
    pages, held_pages = _in_pages(block_table, held, factor)
    misfit = _first_misfit(pages, held_pages)
    if misfit is not None:
        raise LayoutError(_misfit_message(block_table, held, misfit, block_size, factor))
    shape = (pages.shape[0], pages.shape[1])
    table = np.empty(shape, np.int32) if out is None else leading_part(out, np.int32, shape, "coarsened: out")
    first = held_pages.argmax(2)[:, :, None]
    blocks = np.take_along_axis(pages, first, 2)[:, :, 0]
    table[:] = np.where(held_pages.any(2), blocks // factor, pages[:, :, 0])
    return table


def left_table(
    block_table: Table,
    held: Held,
    num_sink_blocks: int,
    num_passed: NDArray[np.int64],
    padding: int,
    out: NDArray[np.int32] | None = None,
) -> Table:
    """Leave out `num_passed` `[B]` columns after those of the sinks, int32 `[B, most blocks held]`.

    `held` has none of these, and the rest of it moves to the left.

    >>> held = np.array([[True, False, False, True], [True, True, False, False]])
    >>> left_table(np.array([[4, 0, 0, 6], [1, 2, 0, 0]], np.int32), held, 1, np.array([2, 0]), padding=-1).tolist()
    [[4, 6], [1, 2]]
    """
    num_held = np.count_nonzero(held, axis=1)
    width = int(num_held.max(initial=0))
    shape = (len(block_table), width)
    table = np.empty(shape, np.int32) if out is None else leading_part(out, np.int32, shape, "compacted: out")
    columns = np.broadcast_to(np.arange(width), shape)
    sources = columns + np.where(columns >= num_sink_blocks, num_passed[:, None], 0)
    taken = np.take_along_axis(block_table, np.minimum(sources, max(block_table.shape[1] - 1, 0)), 1)
    table[:] = np.where(columns < num_held[:, None], taken, padding)
    return table


def _in_pages(block_table: Table, held: Held, factor: int) -> tuple[Table, Held]:
    """Return the table and `held` as `[B, pages, factor]`, with entries that are not held at the end."""
    num_sequences, width = block_table.shape
    num_pages = -(-width // factor)
    blocks = np.zeros((num_sequences, num_pages * factor), np.int32)
    blocks[:, :width] = block_table
    if num_pages * factor > width:
        blocks[:, width:] = block_table[:, -1:]
    has = np.zeros(blocks.shape, np.bool_)
    has[:, :width] = held
    shape = (num_sequences, num_pages, factor)
    return blocks.reshape(shape), has.reshape(shape)


def _first_misfit(pages: Table, held: Held) -> tuple[int, int] | None:
    """Return the row and column of the first block that does not lie where its page would have it."""
    factor = pages.shape[2]
    places = np.arange(factor, dtype=np.int32)
    starts = pages - places
    first = np.take_along_axis(starts, held.argmax(2)[:, :, None], 2)
    wrong = held & ((starts % factor != 0) | (starts != first))
    if not wrong.any():
        return None
    row, page, place = np.argwhere(wrong)[0].tolist()
    return row, page * factor + place


def _misfit_message(block_table: Table, held: Held, misfit: tuple[int, int], block_size: int, factor: int) -> str:
    row, column = misfit
    others = [
        other
        for other in range(1, factor)
        if factor % other == 0 and _first_misfit(*_in_pages(block_table, held, other)) is None
    ]
    works = " or ".join(str(other * block_size) for other in others)
    page = column // factor * factor
    blocks = block_table[row, page : page + factor][held[row, page : page + factor]].tolist()
    return (
        f"coarsened: pages of {factor * block_size} tokens need {factor} neighbouring blocks, the first at a multiple "
        f"of {factor}; row {row} has {blocks} from column {page} on, where column {column} does not fit; "
        f"pages of {works} tokens work"
    )


# -- checks -----------------------------------------------------------------------------------------------------------


def leading_part(buffer: Any, dtype: type[np.generic], shape: tuple[int, ...], name: str) -> NDArray[Any]:
    """Return the leading part of a caller's buffer, after checking that it has the type and is large enough."""
    if not isinstance(buffer, np.ndarray):
        raise ArgumentTypeError(f"{name} is a {type(buffer).__name__}, must be a NumPy array")
    if buffer.dtype != dtype or buffer.ndim != len(shape):
        raise ArgumentTypeError(
            f"{name} is {buffer.dtype} of shape {buffer.shape}, must be {np.dtype(dtype)} with {len(shape)} dimensions"
        )
    if any(have < need for have, need in zip(buffer.shape, shape, strict=True)):
        raise ArgumentError(f"{name} has shape {buffer.shape}, this batch needs {shape}")
    if not buffer.flags.writeable:
        raise ArgumentError(f"{name} is read-only")
    return buffer[tuple(slice(0, size) for size in shape)]


def _rules(pools: int | PoolOffsets | Sequence[int | PoolOffsets]) -> list[PoolOffsets]:
    listed = pools if isinstance(pools, Sequence) and not isinstance(pools, str) else [pools]
    return [
        pool
        if isinstance(pool, PoolOffsets)
        else PoolOffsets.interleaved(as_count(pool, "tensorrt: the number of layers of a pool"))
        for pool in listed
    ]


def _largest_id(block_table: Table, held: Held) -> int:
    return int(block_table.max(initial=0, where=held))


def _require_int32(number: int, what: str) -> None:
    if number >= MAX_INT32:
        raise LayoutError(f"{what} at {number}, more than the {MAX_INT32 - 1} that an int32 table can name")


def _check_pool(block_table: Table, held: Held, num_blocks: int, name: str) -> None:
    largest = _largest_id(block_table, held)
    if largest >= as_count(num_blocks, f"{name}: num_blocks") and held.any():
        row = int(np.argwhere(held & (block_table == largest))[0, 0])
        raise ArgumentError(f"{name}: num_blocks is {num_blocks}, row {row} of the batch has block {largest}")


def _checked_width(num_pages: NDArray[np.int32], block_table: Table, name: str) -> int:
    """Return the most pages of a row, after checking that the table has as many columns."""
    width = int(num_pages.max(initial=0))
    if width > block_table.shape[1]:
        raise LayoutError(
            f"{name}: row {int(num_pages.argmax())} of the batch has tokens in {width} pages, "
            f"the block table has {block_table.shape[1]} columns"
        )
    return width
