"""One batch of sequences as the index arrays that attention kernels read. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvist.core.arguments import as_count
from kvist.core.groups import Span
from kvist.core.rows import SequenceRows
from kvist.errors import ArgumentError, LayoutError, SequenceError
from kvist.memory.dialects import (
    FlashInferTables,
    FlexTables,
    PoolOffsets,
    coarser_table,
    edge_table,
    finer_table,
    flashinfer_tables,
    flex_tables,
    leading_part,
    left_table,
    tensorrt_offsets,
)

__all__ = ["BatchTables", "build_tables"]

MAX_INT32 = 2**31 - 1
ANY_SPAN = Span("full", block_size=1)
"""Of buffers, which have none."""


@dataclass(frozen=True, slots=True)
class BatchTables:
    """The tables of one forward pass over B sequences with T query tokens in all, for the layers of one group.

    `block_table` int32 `[B, M]`: block ids, padded. `slot_mapping` int64 `[T]`: where K and V of each query token go,
    `block_id * block_size + offset`, -1 where the group has no block for it. `seq_lens` int32 `[B]`: tokens attended
    to, query tokens included. `cu_seqlens` int32 `[B + 1]`: where each sequence's query tokens begin in the packed
    batch. Of a group for cross attention, `slot_mapping` and `seq_lens` are of the encoder's tokens.

    A row has blocks in its first `span.num_sink_blocks` columns and in columns `first_blocks` .. `num_blocks` - 1, both
    int64 `[B]`; between these are holes, whose blocks fell out of span, and what follows is `padding`. For `out`, the
    four arrays above are enough.

    The methods say the same in the words of other kernels, in arrays of their own, or in `out`: buffers that are at
    least as large, and of which they return the leading parts. They read `block_table`, so where that is a view, call
    them before the manager's next call.
    """

    block_table: NDArray[np.int32]
    slot_mapping: NDArray[np.int64]
    seq_lens: NDArray[np.int32]
    cu_seqlens: NDArray[np.int32]
    first_blocks: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    num_blocks: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    span: Span = ANY_SPAN
    padding: int = 0

    @property
    def block_size(self) -> int:
        """Tokens of one block."""
        return self.span.block_size

    @property
    def query_lens(self) -> NDArray[np.int32]:
        """Query tokens by sequence, int32 `[B]`."""
        return np.diff(self.cu_seqlens)

    @property
    def start_lens(self) -> NDArray[np.int32]:
        """Tokens before the query tokens, int32 `[B]`: what kernels want that append K and V themselves."""
        return self.seq_lens - self.query_lens

    @property
    def held(self) -> NDArray[np.bool_]:
        """Which entries of `block_table` name a block, bool `[B, M]`; the others are holes and padding."""
        columns = np.arange(self.block_table.shape[1])
        held: NDArray[np.bool_] = columns < self.num_blocks[:, None]
        if self.span.slides:
            held &= (columns >= self.first_blocks[:, None]) | (columns < self.span.num_sink_blocks)
        return held

    @property
    def indptr(self) -> NDArray[np.int32]:
        """FlashInfer's `kv_indptr`, int32 `[B + 1]`; `flashinfer` makes all of its tables at once."""
        return self.flashinfer().indptr

    @property
    def indices(self) -> NDArray[np.int32]:
        """FlashInfer's `kv_indices`, int32 `[indptr[-1]]`."""
        return self.flashinfer().indices

    @property
    def last_page_len(self) -> NDArray[np.int32]:
        """FlashInfer's `kv_last_page_len`, int32 `[B]`."""
        return self.flashinfer().last_page_len

    @classmethod
    def buffers(cls, max_sequences: int, max_blocks: int, max_query_tokens: int) -> Self:
        """Make buffers for `out`: batches up to these sizes are written into their leading parts."""
        return cls(
            np.zeros((max_sequences, max_blocks), np.int32),
            np.zeros(max_query_tokens, np.int64),
            np.zeros(max_sequences, np.int32),
            np.zeros(max_sequences + 1, np.int32),
        )

    # -- dialects -----------------------------------------------------------------------------------------------------

    def flashinfer(self, *, out: FlashInferTables | None = None) -> FlashInferTables:
        """Return the pages that hold tokens, one sequence after the other, for FlashInfer's wrappers.

        Holes are listed with the number that they have in `block_table`; `compacted().flashinfer()` leaves them out.
        Raises LayoutError for a state, and for a ring once its tokens are out of order.
        """
        self._require_order("flashinfer")
        return flashinfer_tables(self.block_table, self.seq_lens, self.cu_seqlens, self.block_size, out)

    def tensorrt(
        self,
        pools: int | PoolOffsets | Sequence[int | PoolOffsets],
        *,
        secondary: NDArray[np.bool_] | None = None,
        fill: int = MAX_INT32,
        out: NDArray[np.int32] | None = None,
    ) -> NDArray[np.int32]:
        """Return where K and V of each block lie in TensorRT-LLM's pools, int32 `[num_pools, B, 2, M]`.

        `pools` gives for each pool the number of layers in it, or a `PoolOffsets` where K and V are not side by side.
        Entries without a block are `fill`; entries that `secondary`, bool `[B, M]`, marks get the sign bit, which says
        that the block is in the secondary pool. Raises LayoutError where an offset does not fit int32.
        """
        self._require_tokens("tensorrt")
        return tensorrt_offsets(self.block_table, self.held, pools, secondary=secondary, fill=fill, out=out)

    def edge(self, num_blocks: int, *, out: NDArray[np.int32] | None = None) -> NDArray[np.int32]:
        """Return Edge-LLM's page table of a pool `[2, num_blocks, ...]`, int32 `[B, 2, M]`: K ids, then V ids.

        The V id is the K id + `num_blocks`; entries without a block are -1.
        """
        self._require_tokens("edge")
        return edge_table(self.block_table, self.held, num_blocks, out)

    def flex(self, num_blocks: int, *, out: FlexTables | None = None) -> FlexTables:
        """Return the page table of FlexAttention over a pool of `num_blocks`, its inverse, and which pages to read.

        Raises LayoutError as `flashinfer` does.
        """
        self._require_order("flex")
        num_pages = -(-self.seq_lens.astype(np.int64) // self.block_size)
        return flex_tables(self.block_table, self.held, num_pages, num_blocks, out)

    def token_rows(self) -> NDArray[np.int64]:
        """Return the slots of all tokens attended to, in their order, one sequence after the other.

        int64 `[sum(seq_lens)]`, -1 where the group no longer has the token. They index the token rows
        `[num_blocks * block_size, H, D]` of a pool.
        """
        self._require_tokens("token_rows")
        return _slots(self, *_Tokens.of_length(self.seq_lens.astype(np.int64)).each())

    # -- other tables of the same blocks ------------------------------------------------------------------------------

    def refined(self, page_size: int, *, out: NDArray[np.int32] | None = None) -> Self:
        """Return the tables in pages of `page_size` tokens, a divisor of `block_size`; slots stay the same.

        `out` takes the block table, int32. Raises LayoutError where a page number does not fit int32.
        """
        self._require_tokens("refined")
        if not as_count(page_size, "refined: page_size") or self.block_size % page_size:
            raise LayoutError(
                f"refined: a block of {self.block_size} tokens has no pages of {page_size}; divisors work"
            )
        factor = self.block_size // page_size
        return replace(
            self,
            block_table=finer_table(self.block_table, self.held, factor, out),
            first_blocks=self.first_blocks * factor,
            num_blocks=self.num_blocks * factor,
            span=replace(self.span, block_size=page_size, num_sink_blocks=self.span.num_sink_blocks * factor),
        )

    def coarsened(self, page_size: int, *, out: NDArray[np.int32] | None = None) -> Self:
        """Return the tables in pages of `page_size` tokens, a multiple of `block_size`; slots stay the same.

        `out` takes the block table, int32. Raises LayoutError where the blocks of a page are not neighbours in the
        pool, or do not begin where a page does: which they are, and the sizes that work.
        """
        self._require_tokens("coarsened")
        if not as_count(page_size, "coarsened: page_size") or page_size % self.block_size:
            raise LayoutError(
                f"coarsened: blocks of {self.block_size} tokens make no pages of {page_size}; multiples work"
            )
        factor = page_size // self.block_size
        return replace(
            self,
            block_table=coarser_table(self.block_table, self.held, self.block_size, page_size, out),
            first_blocks=self.first_blocks // factor,
            num_blocks=-(-self.num_blocks // factor),
            span=replace(self.span, block_size=page_size, num_sink_blocks=-(-self.span.num_sink_blocks // factor)),
        )

    def compacted(self, *, out: NDArray[np.int32] | None = None) -> Self:
        """Return the tables without the columns that a window has passed: what follows moves to the left.

        Holes are gone, and blocks that no query token needs though they have not been given back. `seq_lens` count the
        tokens that are left, and slots stay the same; tokens that are not sinks count from the first of them on, so
        windows of kernels that count from the end still fit where there are no sinks. `out` takes the block table,
        int32.
        """
        self._require_tokens("compacted")
        passed = self._num_passed()
        held = self.held
        if self.span.slides:
            columns = np.arange(held.shape[1])
            held &= (columns < self.span.num_sink_blocks) | (columns >= self.span.num_sink_blocks + passed[:, None])
        return replace(
            self,
            block_table=left_table(self.block_table, held, self.span.num_sink_blocks, passed, self.padding, out),
            seq_lens=self.seq_lens - (passed * self.block_size).astype(np.int32),
            first_blocks=np.zeros_like(self.first_blocks),
            num_blocks=self.num_blocks - passed,
            span=Span("full", self.block_size) if self.span.slides else self.span,
        )

    def _num_passed(self) -> NDArray[np.int64]:
        """Count the columns after those of the sinks that the window of the first query token has passed."""
        if not self.span.slides:
            return np.zeros_like(self.num_blocks)
        first = np.maximum(self.first_blocks, self.span.first_blocks(self.start_lens.astype(np.int64)))
        passed: NDArray[np.int64] = np.maximum(np.minimum(first, self.num_blocks), self.span.num_sink_blocks)
        return passed - self.span.num_sink_blocks

    # -- checks -------------------------------------------------------------------------------------------------------

    def _require_tokens(self, call: str) -> None:
        if self.span.kind == "state":
            raise LayoutError(
                f"{call}: a block of this group is the state of a sequence, not the K and V of tokens; "
                "block_table [B, 1] names it"
            )

    def _require_order(self, call: str) -> None:
        """Raise unless token t of every sequence is in column t // block_size, or in none."""
        self._require_tokens(call)
        ring = self.span.ring
        if ring is None:
            return
        limit = ring.sink_tokens if ring.num_bubble_tokens else ring.num_tokens
        if int(self.seq_lens.max(initial=0)) > limit:
            row = int(self.seq_lens.argmax())
            raise LayoutError(
                f"{call}: row {row} of the batch has {self.seq_lens[row]} tokens, which a ring holds in order up to "
                f"{limit}; tensorrt and edge say which blocks it has, token_rows where each token is"
            )


def build_tables(
    rows: SequenceRows,
    batch: NDArray[np.int64],
    num_query_tokens: NDArray[np.int64] | None,
    *,
    group: int = 0,
    padding: int = 0,
    holes: int | None = None,
    max_blocks: int | None = None,
    out: BatchTables | None = None,
) -> BatchTables:
    """Build the tables of checked rows for one group; see `KVCacheManager.tables`."""
    span, computed = rows.spans[group], rows.num_computed[batch]
    query = rows.num_tokens[batch] - computed if num_query_tokens is None else num_query_tokens
    _check_query(rows, batch, computed, query)
    ends = np.cumsum(query)
    written = _Tokens(computed, query, ends)
    if span.kind == "cross":
        written = _Tokens.of_length(_encoder_lens(rows, batch))
    num_blocks = rows.ends[group][batch]
    first_blocks = rows.firsts[group][batch] if span.slides else np.zeros(len(batch), np.int64)
    width = _width(num_blocks, max_blocks, out)
    view = None if out is not None or padding or holes else _view(rows.block_table[group], batch, width)
    arrays = _arrays(out, view, (len(batch), width), written.num_tokens)
    tables = BatchTables(*arrays, first_blocks, num_blocks, span, padding)
    if view is None:
        _fill_block_table(tables, rows.block_table[group], batch, padding if holes is None else holes)
    tables.seq_lens[:] = written.starts + written.counts
    tables.cu_seqlens[0] = 0
    tables.cu_seqlens[1:] = ends
    tables.slot_mapping[:] = _slots(tables, *written.each())
    return tables


def _encoder_lens(rows: SequenceRows, batch: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the encoder's tokens of each row; a loop, since encoders are objects, which beams share."""
    return np.array([rows.sequence_at(row).num_encoder_tokens for row in batch.tolist()], np.int64)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Tokens of the sequences of a batch: of each sequence `counts` from position `starts` on; `ends` sums them up."""

    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    ends: NDArray[np.int64]

    @classmethod
    def of_length(cls, lengths: NDArray[np.int64]) -> Self:
        """All tokens of sequences of these lengths."""
        return cls(np.zeros_like(lengths), lengths, np.cumsum(lengths))

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def each(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the owner and the position of every token, one sequence after the other."""
        owners = np.arange(len(self.counts))
        if len(owners) and int(self.counts.min()) == 1 == int(self.counts.max()):
            return owners, self.starts
        firsts = np.repeat(self.starts - (self.ends - self.counts), self.counts)
        return np.repeat(owners, self.counts), np.arange(self.num_tokens) + firsts


def _width(num_blocks: NDArray[np.int64], max_blocks: int | None, out: BatchTables | None) -> int:
    """Return how many columns the block table has: as asked for, else as the buffers, else as the longest row."""
    needed = int(num_blocks.max(initial=0))
    if max_blocks is None:
        return needed if out is None else max(needed, np.shape(out.block_table)[-1])
    if max_blocks < needed:
        raise ArgumentError(f"tables: max_blocks is {max_blocks}, a sequence has {needed} blocks")
    return max_blocks


def _view(source: NDArray[np.int32], batch: NDArray[np.int64], width: int) -> NDArray[np.int32] | None:
    """Return the rows' leading columns as a read-only view, or None where they are not neighbours, or too narrow."""
    if not len(batch) or width > source.shape[1] or int(batch[-1] - batch[0]) != len(batch) - 1:
        return None
    if not (batch[1:] - batch[:-1] == 1).all():
        return None
    view: NDArray[np.int32] = source[batch[0] : batch[0] + len(batch), :width]
    view.flags.writeable = False
    return view


def _arrays(
    out: BatchTables | None, view: NDArray[np.int32] | None, shape: tuple[int, int], num_tokens: int
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
    """Return the block table, slots, lengths and query starts to be filled: the caller's buffers, checked, or new."""
    if out is None:
        return (
            np.empty(shape, np.int32) if view is None else view,
            np.empty(num_tokens, np.int64),
            np.empty(shape[0], np.int32),
            np.empty(shape[0] + 1, np.int32),
        )
    return (
        leading_part(out.block_table, np.int32, shape, "tables: out.block_table"),
        leading_part(out.slot_mapping, np.int64, (num_tokens,), "tables: out.slot_mapping"),
        leading_part(out.seq_lens, np.int32, (shape[0],), "tables: out.seq_lens"),
        leading_part(out.cu_seqlens, np.int32, (shape[0] + 1,), "tables: out.cu_seqlens"),
    )


def _fill_block_table(tables: BatchTables, source: NDArray[np.int32], batch: NDArray[np.int64], holes: int) -> None:
    """Copy the rows' columns. Holes, which are 0 in the source, become `holes`, and what follows becomes padding."""
    table = tables.block_table
    num_columns = min(table.shape[1], source.shape[1])
    table[:, :num_columns] = source[batch, :num_columns]
    if holes and tables.span.slides:
        table[~tables.held] = holes
    if holes or tables.padding or num_columns < table.shape[1]:
        table[np.arange(table.shape[1]) >= tables.num_blocks[:, None]] = tables.padding


def _slots(tables: BatchTables, owners: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the slots of tokens of the sequences `owners`, -1 for those that the group does not have."""
    span, width = tables.span, tables.block_table.shape[1]
    if span.kind == "state" or not width:
        return np.full(len(tokens), -1, np.int64)
    positions = tokens if span.ring is None else span.ring.positions(tokens)
    columns = positions // span.block_size
    lost = _lost(tables, owners, tokens, columns)
    entries = columns if lost is None else np.minimum(columns, width - 1)
    # That is block * block_size + offset: position less column * block_size is the offset.
    slots: NDArray[np.int64] = (tables.block_table[owners, entries] - columns) * span.block_size + positions
    if lost is not None:
        slots[lost] = -1
    return slots


def _lost(
    tables: BatchTables, owners: NDArray[np.int64], tokens: NDArray[np.int64], columns: NDArray[np.int64]
) -> NDArray[np.bool_] | None:
    """Say which tokens are in no block, or are overwritten by later ones of the ring; None where none can be."""
    span = tables.span
    if span.ring is not None:
        overwritten = tokens < tables.seq_lens[owners] - span.ring.num_ring_tokens
        return overwritten & (tokens >= span.ring.sink_tokens)
    if not span.slides:
        return None
    is_hole = (columns < tables.first_blocks[owners]) & (columns >= span.num_sink_blocks)
    return is_hole | (columns >= tables.num_blocks[owners])


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
