"""Running sequences as rows of arrays: lengths, block tables, and the tokens that are not in the tree yet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvist.core.groups import Span
from kvist.core.identity import IdentityTable
from kvist.core.retention import Retention
from kvist.core.sequences import Sequence, Sequences
from kvist.core.tokens import TOKEN_BYTES
from kvist.errors import ArgumentTypeError, SequenceError

if TYPE_CHECKING:
    from kvist.core.extents import Extent, Twins

__all__ = ["NEVER", "RUNNING", "WAITING", "Batch", "RowState", "SequenceRows"]

NEVER = np.iinfo(np.int64).max
MIN_TAIL_TOKENS = 512
CACHE_LINE_TOKENS = 16
"""Added to the width of a tail: were it a power of two, rows that grow in step would all fall into one cache set."""
FREE, RUNNING, WAITING = 0, 1, 2
ROW_ARRAYS = (
    "num_tokens",
    "num_computed",
    "num_blocks",
    "num_published",
    "limit",
    "version",
    "firsts",
    "ends",
    "frozen",
    "wrapped",
    "most_tokens",
    "publish_due",
    "tail_origin",
    "state",
)
"""The arrays of SequenceRows that are small; of the block table and the tails, only rows in use are copied."""

row_of = attrgetter("row")


class Batch:
    """Rows that were checked: live, distinct. `select` indexes the row arrays, a slice where it can be one."""

    __slots__ = ("rows", "select")

    def __init__(self, rows: NDArray[np.int64]) -> None:
        self.rows = rows
        self.select: slice | NDArray[np.int64] = rows
        if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (len(rows) == 1 or bool((np.diff(rows) == 1).all())):
            self.select = slice(int(rows[0]), int(rows[-1]) + 1)


@dataclass(frozen=True, slots=True)
class RowState:
    """What a row holds: its extent, block ids `[num_groups, columns]` and packed unpublished tokens."""

    extent: Extent
    blocks: NDArray[np.int32]
    firsts: NDArray[np.int64]
    ends: NDArray[np.int64]
    frozen: NDArray[np.int64]
    wrapped: bool
    most_tokens: int
    num_blocks: int
    num_published: int
    num_computed: int
    tokens: bytes
    publishes: bool
    reuses: bool
    num_prompt_tokens: int
    retention: Retention | None


class SequenceRows:
    """The arrays behind the sequences; row i of each belongs to one sequence. int64 where not said otherwise.

    `num_computed <= num_tokens <= capacity` always. `num_published` counts the leading blocks that the tree owns: the
    row holds them by its sequence's extent (a waiting beam's are its leader's), the rest belongs to the row alone.
    Tokens not yet published lie in `Sequence._earlier` (from `_earlier_start` on), the latest in the row's `tail`,
    `[max_sequences, tail_tokens]`. `limit` is the number of tokens up to which appending needs neither a block nor
    room in the tail; `publish_due` the number of computed tokens from which on there is a block to publish.

    `firsts` and `ends`, `[num_groups, max_sequences]`, say which columns of the table a row has in each group: from the
    first to the end, and the sinks. Other entries of the table are 0. A ring has all up to its end; once `wrapped`, of
    its first `frozen` columns those from the sinks to the first are the row's own (see `holdings`), and tokens up to
    `most_tokens` may have been written. `bubble` positions after the sinks of a ring are not used.

    `columns_of` are views of the table by row, `[num_groups, columns]`, and `table_of` is the same memory by group and
    row, int32 `[columns]`: copying a few ids costs half of what it costs in arrays.
    """

    def __init__(
        self, max_sequences: int, max_tokens: int, spans: list[Span], identities: IdentityTable | None = None
    ) -> None:
        self.identities = IdentityTable() if identities is None else identities
        block_size, num_groups = spans[0].block_size, len(spans)
        self.spans = spans
        self.has_full = spans[0].kind == "full"
        self.is_plain = self.has_full and num_groups == 1
        self.block_size = block_size
        self.rings = [(group, span.ring) for group, span in enumerate(spans) if span.ring is not None]
        self.bubble = max(span.ring.num_bubble_tokens if span.ring else 0 for span in spans)
        self.max_tokens, self.max_sequences = max_tokens, max_sequences
        self.num_tokens, self.num_computed, self.num_published, self.limit, self.version = np.zeros(
            (5, max_sequences), np.int64
        )
        self.firsts, self.ends = np.zeros((2, num_groups, max_sequences), np.int64)
        self.firsts_of = [self.firsts[group].data for group in range(num_groups)]
        self.ends_of = [self.ends[group].data for group in range(num_groups)]
        self.num_blocks = self.ends[0] if self.has_full else np.zeros(max_sequences, np.int64)
        self.publish_due = np.full(max_sequences, NEVER)
        self.tail_origin = np.zeros(max_sequences, np.int64)
        # The same memory, for what concerns one row: indexing a memoryview costs half of what indexing an array does.
        self.tokens_of, self.computed_of, self.blocks_of = (
            self.num_tokens.data,
            self.num_computed.data,
            self.num_blocks.data,
        )
        self.published_of, self.due_of = self.num_published.data, self.publish_due.data
        self.limit_of, self.origin_of = self.limit.data, self.tail_origin.data
        self.frozen = np.zeros((num_groups, max_sequences), np.int64)
        self.wrapped = np.zeros(max_sequences, np.bool_)
        self.most_tokens = np.zeros(max_sequences, np.int64)
        self.state = np.zeros(max_sequences, np.uint8)
        self.state_of = self.state.data
        self.block_table = np.zeros((num_groups, max_sequences, self.columns_for(max_tokens)), np.int32)
        self.columns_of = [self.block_table[:, row] for row in range(max_sequences)]
        self.table_of = [[row.data for row in table] for table in self.block_table]
        self._groups = list(zip(self.table_of, self.firsts_of, self.ends_of, strict=True))
        self._no_blocks = np.zeros(self.columns_for(max_tokens), np.int32).data
        self.tail_tokens = max(4 * block_size, MIN_TAIL_TOKENS) + CACHE_LINE_TOKENS
        self.tail = np.zeros(max_sequences * self.tail_tokens, np.int32)
        self.sequences: list[Sequence | None] = [None] * max_sequences
        self.num_waiting = self.num_running = 0
        self._free_rows = list(range(max_sequences - 1, -1, -1))
        self._last_batch: tuple[tuple[np.dtype[Any], bytes], Batch] | None = None

    def copy_from(self, other: SequenceRows, twins: Twins) -> None:
        """Have the same rows, of sequences that hold the copies of extents where the others hold the originals."""
        for name in ROW_ARRAYS:
            getattr(self, name)[:] = getattr(other, name)
        for row in (sequence.row for sequence in other.running()):
            self.block_table[:, row] = other.block_table[:, row]
            tail = slice(row * self.tail_tokens, (row + 1) * self.tail_tokens)
            self.tail[tail] = other.tail[tail]
        self._free_rows = list(other._free_rows)
        self.num_waiting, self.num_running = other.num_waiting, other.num_running
        for sequence in other.running():
            self.sequences[sequence.row] = sequence.copied(self, twins[id(sequence._extent)])
        for sequence in other.running():
            twin = self.sequence_at(sequence.row)
            twin.leader = None if sequence.leader is None else self.sequence_at(sequence.leader.row)
            if sequence._beams is not None:
                twin._beams = [self.sequence_at(beam.row) for beam in sequence._beams]
        encoders = {id(each._encoder): each._encoder for each in other.running() if each._encoder is not None}
        copies = {which: replace(encoder) for which, encoder in encoders.items()}
        for sequence in other.running():
            if sequence._encoder is not None:
                self.sequence_at(sequence.row)._encoder = copies[id(sequence._encoder)]

    # -- rows ---------------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Rows that no sequence has."""
        return len(self._free_rows)

    def free_rows(self) -> list[int]:
        """List the rows that no sequence has."""
        return list(self._free_rows)

    def running(self) -> list[Sequence]:
        """List the live sequences, by row."""
        return [sequence for sequence in self.sequences if sequence is not None]

    def sequence_at(self, row: int) -> Sequence:
        """Return the sequence of a row that has one."""
        sequence = self.sequences[row]
        assert sequence is not None, f"row {row} has no sequence"
        return sequence

    def open(self, sequence: Sequence, extent: Extent) -> int:
        """Give a sequence that has none a row, and an extent, which is held for it; returns the row."""
        row = self._free_rows.pop()
        sequence.row, sequence._extent = row, extent
        self.sequences[row] = sequence
        self.num_running += 1
        self.state_of[row] = RUNNING
        self._last_batch = None
        return row

    def close(self, sequence: Sequence) -> None:
        """Take the row back; its blocks must have been given back."""
        row = sequence.row
        for tables, firsts, ends in self._groups:
            end = ends[row]
            tables[row][:end] = self._no_blocks[:end]
            firsts[row] = ends[row] = 0
        if self.rings:
            self.frozen[:, row] = 0
            self.wrapped[row] = False
            self.most_tokens[row] = 0
        if sequence.leader is not None:
            self.num_waiting -= 1
        self.tokens_of[row] = self.computed_of[row] = self.blocks_of[row] = self.published_of[row] = 0
        self.due_of[row] = NEVER
        self.state_of[row] = FREE
        self.sequences[row] = None
        self.num_running -= 1
        self._free_rows.append(row)
        self._last_batch = None
        sequence.row = -1
        sequence._earlier = b""

    def begin(self, sequence: Sequence, num_reused: int, num_blocks: int, tokens: bytes) -> None:
        """Let a new row begin: its table has `num_blocks` blocks, of which the tree's come first."""
        row, start = sequence.row, num_reused * self.block_size
        end = start + len(tokens) // TOKEN_BYTES
        sequence._earlier, sequence._earlier_start = tokens, start
        self.tokens_of[row], self.computed_of[row] = end, start
        self.blocks_of[row], self.published_of[row] = num_blocks, num_reused
        self.due_of[row] = start + self.block_size if sequence.publishes else NEVER
        self.origin_of[row] = row * self.tail_tokens - end
        capacity = num_blocks * self.block_size - self.bubble  # less than a block, and so than a tail, behind the end
        self.limit_of[row] = capacity if capacity < self.max_tokens else self.max_tokens
        if self.rings:
            self.refresh_limit(row)

    def set_state(self, sequence: Sequence, state: int) -> None:
        """Let a beam wait for its leader, or run."""
        self.num_waiting += int(state == WAITING) - int(self.state[sequence.row] == WAITING)
        self.state[sequence.row] = state
        self._last_batch = None

    def check_running(self, sequence: Any, call: str) -> None:
        """Raise SequenceError unless the sequence is a live one of this manager that runs."""
        self.check_live(sequence, call)
        if sequence.leader is not None:
            raise SequenceError(
                f"{call}: {sequence!r} is a beam that waits until its beam 0 has committed the whole prompt"
            )

    def check_live(self, sequence: Any, call: str) -> None:
        """Raise unless it is a live sequence of this manager."""
        if type(sequence) is not Sequence:
            raise ArgumentTypeError(f"{call}: expected a Sequence, got {type(sequence).__name__}")
        if sequence.row < 0:
            is_over = "is suspended: resume it first" if sequence.is_suspended else "has been freed"
            raise SequenceError(f"{call}: the sequence {is_over}")
        if sequence._rows is not self:
            raise SequenceError(f"{call}: the sequence belongs to another manager")

    def batch(self, sequences: Sequences, call: str) -> Batch:
        """Check the sequences or rows of one call: live, running, each named once."""
        if not isinstance(sequences, np.ndarray):
            return self._batch_of_sequences(sequences, call)
        if sequences.ndim != 1 or sequences.dtype.kind not in "iu":
            raise ArgumentTypeError(
                f"{call}: rows must be a 1-D int array, not {sequences.dtype} of shape {sequences.shape}"
            )
        content = (sequences.dtype, sequences.tobytes())
        if self._last_batch is not None and self._last_batch[0] == content:
            return self._last_batch[1]
        batch = self._checked(sequences.astype(np.int64), call)
        self._last_batch = (content, batch)
        return batch

    def _batch_of_sequences(self, sequences: Iterable[Any], call: str) -> Batch:
        if isinstance(sequences, Sequence) or not isinstance(sequences, Iterable):
            raise ArgumentTypeError(
                f"{call}: sequences must be a list of Sequence or an int array of rows, not {type(sequences).__name__}"
            )
        named: list[Any] = list(sequences)
        for sequence in named:
            if type(sequence) is not Sequence or sequence.row < 0 or sequence._rows is not self:
                self.check_live(sequence, call)
        return self._checked(np.fromiter(map(row_of, named), np.int64, len(named)), call)

    def _checked(self, rows: NDArray[np.int64], call: str) -> Batch:
        if not len(rows):
            return Batch(rows)
        if len(rows) == 1 and 0 <= rows[0] < len(self.state) and self.state[rows[0]] == RUNNING:
            return Batch(rows)
        outside = (rows < 0) | (rows >= len(self.state))
        if outside.any():
            raise SequenceError(f"{call}: row {rows[outside][0]} is not one of 0 .. {len(self.state) - 1}")
        if (self.state[rows] != RUNNING).any():
            row = int(rows[self.state[rows] != RUNNING][0])
            if self.state[row] == WAITING:
                raise SequenceError(
                    f"{call}: row {row} is a beam that waits until its beam 0 has committed the whole prompt"
                )
            raise SequenceError(f"{call}: row {row} has no running sequence")
        batch = Batch(rows)
        if batch.select is rows and len(np.unique(rows)) < len(rows):
            values, counts = np.unique(rows, return_counts=True)
            raise SequenceError(
                f"{call}: row {values[counts > 1][0]} is named {counts[counts > 1][0]} times in one call"
            )
        return batch

    # -- whole rows ---------------------------------------------------------------------------------------------------

    def snapshot(self, sequence: Sequence) -> RowState:
        """Copy what a row holds."""
        row = sequence.row
        published, num_tokens = self.num_published.item(row), self.num_tokens.item(row)
        return RowState(
            extent=sequence._extent,
            blocks=self.block_table[:, row, : self.width(row)].copy(),
            firsts=self.firsts[:, row].copy(),
            ends=self.ends[:, row].copy(),
            frozen=self.frozen[:, row].copy(),
            wrapped=bool(self.wrapped[row]),
            most_tokens=self.most_tokens.item(row),
            num_blocks=self.blocks_of[row],
            num_published=published,
            num_computed=self.num_computed.item(row),
            tokens=self.token_bytes(sequence, published * self.block_size, num_tokens),
            publishes=sequence.publishes,
            reuses=sequence.reuses,
            num_prompt_tokens=sequence.num_prompt_tokens,
            retention=sequence.retention,
        )

    def restore(self, sequence: Sequence, state: RowState) -> None:
        """Make a row hold what another held; who owns the blocks and holds the extent is the caller's business."""
        row = sequence.row
        table, width = self.block_table[:, row], state.blocks.shape[1]
        table[:, width : self.width(row)] = 0
        table[:, :width] = state.blocks
        self.firsts[:, row], self.ends[:, row] = state.firsts, state.ends
        self.frozen[:, row], self.wrapped[row] = state.frozen, state.wrapped
        self.most_tokens[row] = state.most_tokens
        self.num_blocks[row] = state.num_blocks
        self.num_computed[row] = state.num_computed
        self.version[row] += 1
        sequence._extent, sequence.publishes, sequence.reuses = state.extent, state.publishes, state.reuses
        sequence.num_prompt_tokens, sequence.retention = state.num_prompt_tokens, state.retention
        self.set_earlier(sequence, state.num_published * self.block_size, state.tokens)
        self.set_published(sequence, state.num_published)
        self.refresh_limit(row)

    def width(self, row: int) -> int:
        """Count the columns that the row uses in some group."""
        width: int = self.blocks_of[row]
        if not self.is_plain:
            for ends in self.ends_of:
                width = max(width, ends[row])
        return width

    # -- capacity -----------------------------------------------------------------------------------------------------

    def capacity(self, row: int) -> int:
        """Tokens that the row's blocks have room for."""
        return min(max(self.blocks_of[row] * self.block_size - self.bubble, 0), self.max_tokens)

    def columns_for(self, num_tokens: int) -> int:
        """Count the columns that so many tokens take."""
        return -(-(num_tokens + self.bubble) // self.block_size) if num_tokens else 0

    def columns_for_each(self, num_tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count the columns that each of these numbers of tokens takes."""
        positions = np.where(num_tokens > 0, num_tokens + self.bubble, 0) if self.bubble else num_tokens
        columns: NDArray[np.int64] = (positions + (self.block_size - 1)) // self.block_size
        return columns

    def refresh_limit(self, row: int) -> None:
        """Derive `limit` of a row whose blocks or tail have changed."""
        self.limit_of[row] = min(self.capacity(row), self.tail_start(row) + self.tail_tokens)
        if self.rings:
            self.limit_of[row] = min(self.limit_of[row], self._ring_limit(row))

    def refresh_limits(self, rows: NDArray[np.int64]) -> None:
        """Derive `limit` of rows whose blocks or tail have changed."""
        tail_end = rows * self.tail_tokens - self.tail_origin[rows] + self.tail_tokens
        capacity = np.maximum(self.num_blocks[rows] * self.block_size - self.bubble, 0)
        self.limit[rows] = np.minimum(np.minimum(capacity, self.max_tokens), tail_end)
        if self.rings:
            for row in rows.tolist():
                self.limit_of[row] = min(self.limit_of[row], self._ring_limit(row))

    def num_shared_of(self, group: int, row: int) -> int:
        """Count a ring's leading columns that the tree has, or had before they became the row's own."""
        num_shared: int = self.frozen.item(group, row) if self.wrapped[row] else self.published_of[row]
        return num_shared

    def _ring_limit(self, row: int) -> int:
        """Return up to which number of tokens a row can grow without wrapping, or overwriting what is not its own."""
        limit = NEVER
        if self.num_waiting and self.wrapped[row] and self.sequence_at(row)._waiting_beams():
            return int(self.tokens_of[row])
        for group, ring in self.rings:
            if not self.wrapped[row]:
                limit = min(limit, ring.num_tokens)
                continue
            first = max(self.firsts_of[group][row], self.spans[group].num_sink_blocks)
            if first < self.num_shared_of(group, row):
                # The token that is the first to be written to column `first`.
                turn = ring.num_tokens + max(first * ring.block_size - ring.num_sink_positions, 0)
                limit = min(limit, max(turn, self.tokens_of[row]))
        return limit

    def set_published(self, sequence: Sequence, num_blocks: int) -> None:
        """Note that the tree owns the row's first `num_blocks` blocks; forget their tokens."""
        row, boundary = sequence.row, num_blocks * self.block_size
        self.published_of[row] = num_blocks
        self.due_of[row] = boundary + self.block_size if sequence.publishes else NEVER
        held = len(sequence._earlier) // TOKEN_BYTES
        done = boundary - sequence._earlier_start
        if done >= held:
            sequence._earlier = b""
            sequence._earlier_start = boundary
        elif 2 * done >= held:
            sequence._earlier = sequence._earlier[done * TOKEN_BYTES :]
            sequence._earlier_start = boundary

    # -- tokens -------------------------------------------------------------------------------------------------------

    def tail_start(self, row: int) -> int:
        """Return the position of the first token in the row's tail."""
        return row * self.tail_tokens - self.origin_of[row]

    def set_earlier(self, sequence: Sequence, start: int, tokens: bytes | bytearray) -> None:
        """Make `tokens` the row's unpublished ones, from position `start` to its end, and the tail empty."""
        row = sequence.row
        end = start + len(tokens) // TOKEN_BYTES
        sequence._earlier, sequence._earlier_start = tokens, start
        self.tokens_of[row] = end
        self.origin_of[row] = row * self.tail_tokens - end

    def extend_earlier(self, sequence: Sequence, tokens: bytes) -> None:
        """Append tokens of any number, through the earlier ones."""
        self.empty_tail(sequence)
        row = sequence.row
        sequence._earlier += tokens
        self.tokens_of[row] += len(tokens) // TOKEN_BYTES
        self.origin_of[row] = row * self.tail_tokens - self.tokens_of[row]

    def empty_tail(self, sequence: Sequence) -> None:
        """Move the row's tail to the earlier tokens, without what has been published meanwhile."""
        row = sequence.row
        start, end = self.tail_start(row), self.tokens_of[row]
        origin = row * self.tail_tokens
        earlier = sequence._earlier if isinstance(sequence._earlier, bytearray) else bytearray(sequence._earlier)
        skip = 0 if earlier else max(sequence._earlier_start - start, 0)
        earlier += self.tail[origin + skip : origin + end - start].tobytes()
        sequence._earlier = earlier
        self.origin_of[row] = origin - end

    def packed_tokens(self, sequence: Sequence) -> bytes:
        """Return all packed tokens of a row that does not wait, in the tree and not yet in it."""
        row = sequence.row
        path = b"".join(bytes(extent.tokens) for extent in sequence._extent.path())
        return path + self.token_bytes(sequence, self.published_of[row] * self.block_size, self.tokens_of[row])

    def cut(self, row: int, num_blocks: int) -> None:
        """Forget the columns of a row from `num_blocks` on; whose blocks they were is the caller's business."""
        have = self.blocks_of[row]
        for group, span in enumerate(self.spans):
            if span.kind not in ("state", "cross"):
                end = max(have, self.ends_of[group][row])  # a ring that has wrapped keeps all its columns
                self.block_table[group, row, num_blocks:end] = 0
                self.ends_of[group][row] = min(num_blocks, self.ends_of[group][row])
                self.firsts_of[group][row] = min(self.firsts_of[group][row], num_blocks)
        self.blocks_of[row] = num_blocks

    def token_bytes(self, sequence: Sequence, start: int, end: int) -> bytes:
        """Return the packed unpublished tokens at positions start .. end-1."""
        row, base = sequence.row, sequence._earlier_start
        origin = self.origin_of[row]
        tail_start = row * self.tail_tokens - origin
        if end <= tail_start:
            return bytes(sequence._earlier[(start - base) * TOKEN_BYTES : (end - base) * TOKEN_BYTES])
        earlier = sequence._earlier[(start - base) * TOKEN_BYTES :] if start < tail_start else b""
        return bytes(earlier) + self.tail[origin + max(start, tail_start) : origin + end].tobytes()
