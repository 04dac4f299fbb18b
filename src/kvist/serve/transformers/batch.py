"""The rows of one `generate` call as sequences of the manager, in the columns of a left-padded batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvist import KVCacheManager, Sequence
from kvist.errors import SequenceError

__all__ = ["Batch", "Part"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Part:
    """What one forward call computes: the columns `[first, end)` of these rows of the batch, int64 `[n]`, ascending."""

    rows: IntArray
    first: int
    end: int


class Batch:
    """One sequence per row, in columns that are common to all rows: column = padding of the row + index of the token.

        column    0 1 2 3 4 5
        row 0     . . a b c d     padding 2
        row 1     e f g h i j     padding 0

    Rows with equal prompts, as beam search makes them, are beams of one sequence: only the first of them, their owner,
    is stored until the prompt is committed. Every act does all or nothing.

    A row whose layers all attend to everything can be computed again from any column. One with windows or states can't:
    it has what the next token needs, and nothing of what the tokens before that one needed.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self.groups = manager.config.groups
        kinds = {group.kind for group in self.groups}
        self._has_states = "state" in kinds
        self._can_start_anywhere = kinds == {"full"}
        self._max_columns = manager.config.max_chunk_tokens or manager.config.max_sequence_length
        self._rows: list[Sequence] = []
        self.padding = np.zeros(0, dtype=np.int64)
        """Columns of left padding, `[B]`."""
        self._owners = np.zeros(0, dtype=np.int64)
        self._first_computed = np.zeros(0, dtype=np.int64)
        self.num_columns = 0
        self.num_cached_tokens: list[int] = []

    @property
    def num_rows(self) -> int:
        """Rows of the batch, B."""
        return len(self._rows)

    @property
    def has_waiting_rows(self) -> bool:
        """Whether some rows wait for the prompt that they share to be committed."""
        return bool((self._owners != np.arange(self.num_rows)).any())

    @property
    def num_skipped_tokens(self) -> list[int]:
        """Leading tokens that have not been computed in this batch, by row."""
        return [int(n) for n in np.maximum(self._first_computed - self.padding, 0)]

    @property
    def columns_stored(self) -> IntArray:
        """Leading columns of each row that are padding or computed, `[B]`."""
        computed = np.array([row.num_computed_tokens for row in self._rows], dtype=np.int64)
        stored: IntArray = self.padding + computed[self._owners]
        return stored

    # ---- the life of the rows ---------------------------------------------------------------------------------------

    def admit(self, token_ids: IntArray, padding: IntArray, namespaces: list[tuple[Any, ...]], goal: int) -> None:
        """Begin one sequence per row of `token_ids` `[B, S]` in an empty batch, to be computed from column `goal` on.

        Raises what `add_sequence` and `append` raise.
        """
        prompts = [tokens[pad:] for tokens, pad in zip(token_ids, padding, strict=True)]
        limits = np.full(len(prompts), token_ids.shape[1])
        if not self._can_start_anywhere:
            # What is found of a prompt ends before its last token: so no row is ahead of the goal.
            limits = np.maximum(goal - padding, 0) + 1
        owners = self._owners_of(prompts, limits)
        rows: dict[int, Sequence] = {}
        try:
            for owner in dict.fromkeys(owners):
                beams = [row for row, its_owner in enumerate(owners) if its_owner == owner]
                start, rest = np.split(prompts[owner], [limits[owner]])
                sequence = self._manager.add_sequence(start, namespace=namespaces[owner], num_beams=len(beams))
                rows |= zip(beams, sequence.beams, strict=True)
                if len(rest):
                    self._manager.append([sequence], [rest])
        except BaseException:
            self._free(list(rows.values()))
            raise
        self._rows = [rows[row] for row in range(len(prompts))]
        self._owners = np.array(owners)
        self.padding = padding
        self.num_columns = token_ids.shape[1]
        self.num_cached_tokens = [self._rows[owner].num_cached_tokens for owner in owners]
        self._first_computed = np.full(len(prompts), self.num_columns)

    @staticmethod
    def _owners_of(prompts: list[IntArray], limits: IntArray) -> list[int]:
        """Return for each row the first with an equal prompt; itself where tokens are to be added to the prompt."""
        first: dict[bytes, int] = {}
        return [
            first.setdefault(prompt.tobytes(), row) if len(prompt) <= limits[row] else row
            for row, prompt in enumerate(prompts)
        ]

    def extend(self, token_ids: IntArray) -> None:
        """Add the columns `token_ids` [B, S] to the rows. Raises what `append` raises."""
        self._manager.append(self._rows, token_ids[:, 0] if token_ids.shape[1] == 1 else list(token_ids))
        self.num_columns += token_ids.shape[1]

    def rewind(self, num_columns: int) -> None:
        """Take the last `num_columns` columns back. Raises `SequenceError` if a row would keep nothing but padding."""
        kept = self.num_columns - num_columns
        if kept == 0:
            self.free()
        elif kept <= self.padding.max(initial=0):
            raise SequenceError(
                f"can't take {num_columns} of {self.num_columns} columns back: row {int(self.padding.argmax())} "
                f"begins at column {int(self.padding.max())} and would keep no token; reset() the cache instead"
            )
        elif num_columns:
            for row in self._rows:
                self._manager.rewind(row, num_columns)
            self.num_columns = kept

    def reorder(self, parents: IntArray) -> None:
        """Let row i go on as row `parents[i]`, [B]."""
        names = [row.namespace for row in self._rows]
        if any(names[row] != names[parent] for row, parent in enumerate(parents)):
            raise SequenceError("reorder_cache: a row would go on as one whose keys and values are kept apart from it")
        for name in dict.fromkeys(names):
            rows = np.array([row for row, its_name in enumerate(names) if its_name == name])
            self._manager.reorder(self.sequences(rows), np.searchsorted(rows, parents[rows]))
        self.padding = self.padding[parents]

    def select(self, rows: IntArray) -> None:
        """Let the batch consist of these rows, in this order; repeated ones are forked, the others freed."""
        copies: list[list[Sequence]] = []
        try:
            for row, count in zip(self._rows, np.bincount(rows, minlength=self.num_rows), strict=True):
                copies.append([row, *self._manager.fork(row, int(count) - 1)] if count > 1 else [row] * int(count))
        except BaseException:
            self._free([fork for forks in copies for fork in forks[1:]])
            raise
        self._free([row for row, kept in zip(self._rows, copies, strict=True) if not kept])
        self._rows = [copies[row].pop() for row in rows]
        self.padding = self.padding[rows]
        self._owners = np.arange(len(rows))
        self._first_computed = self._first_computed[rows]

    def free(self) -> None:
        """End all rows; what they had committed stays reusable."""
        rows, self._rows = self._rows, []
        self.padding = self._owners = self._first_computed = np.zeros(0, dtype=np.int64)
        self.num_columns = 0
        self._free(rows)

    def _free(self, sequences: list[Sequence]) -> None:
        # Beams that wait for their prompt go before the one that computes it, so that none has to take its place.
        for sequence in reversed(sequences):
            self._manager.free(sequence)

    # ---- what is computed when --------------------------------------------------------------------------------------

    def next_part(self, first: int, goal: int) -> Part | None:
        """Return what is to be computed next before all rows can be computed together, from a column in [first, goal].

        None if they can. Rows that are behind catch up with the others. States are computed up to the tokens after
        which the manager keeps them, if these come before the goal. No part is longer than `max_chunk_tokens`.
        """
        stored = self.columns_stored
        start = int(stored.min())
        if start >= goal:
            return None
        ready = (stored == start) | (stored == self.padding) | self._can_start_anywhere
        rows = np.flatnonzero(ready & (self._owners == np.arange(self.num_rows)))
        ends = [self.num_columns, *stored[~ready].tolist()]
        if start < first:
            ends.append(first)
        if self.num_columns - start > self._max_columns:
            ends += [start + self._max_columns, goal]
        if self._has_states:
            ends += [self._next_checkpoint(row, min(ends)) for row in rows.tolist()]
        end = min(ends)
        return Part(rows[stored[rows] < end], start, end) if end <= goal else None

    def _next_checkpoint(self, row: int, end: int) -> int:
        """Return the column before which the manager wants the state of a row next, at most `end`."""
        num_stored = int(self.padding[row]) + self._rows[row].num_computed_tokens
        if num_stored >= end:
            return end
        return num_stored + self._manager.chunk_limit(self._rows[row], end - num_stored)

    def last_part(self, goal: int) -> Part:
        """Return what is left when there is no next part: all rows, from the column on from which they can start."""
        return Part(np.arange(self.num_rows), min(int(self.columns_stored.min()), goal), self.num_columns)

    def owners_in(self, part: Part) -> tuple[IntArray, IntArray]:
        """Return the rows that hold the K and V of the part's rows, ascending, and for each of these which one it is.

        int64 `[n]`, as rows of the batch, and `[len(part.rows)]`, as indices into the first.
        """
        owners, of_row = np.unique(self._owners[part.rows], return_inverse=True)
        return owners, of_row

    def sequences(self, rows: IntArray) -> list[Sequence]:
        """The sequences of these rows."""
        return [self._rows[row] for row in rows]

    def tokens(self, part: Part) -> IntArray:
        """The token ids of a part, `[n, end - first]`; 0 on padding."""
        ids = np.zeros((len(part.rows), part.end - part.first), dtype=np.int64)
        for line, row in zip(ids, part.rows, strict=True):
            pad = int(self.padding[row])
            tokens = self._rows[row].tokens[max(part.first - pad, 0) : part.end - pad]
            line[len(line) - len(tokens) :] = tokens
        return ids

    def note_start(self, part: Part) -> None:
        """Remember that a part's rows, and those that they own, are computed from its first column on."""
        mine = np.isin(self._owners, self._owners[part.rows])
        self._first_computed[mine] = np.minimum(self._first_computed[mine], part.first)

    def commit(self, part: Part) -> None:
        """Declare a part written, so that others may find it."""
        owners, _ = self.owners_in(part)
        rows = self.sequences(owners)
        if part.end == self.num_columns:
            self._manager.commit(rows)
            self._owners = np.arange(self.num_rows)
        else:
            self._manager.commit(rows, np.maximum(part.end, self.columns_stored[owners]) - self.padding[owners])
