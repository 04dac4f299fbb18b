"""The rows of one `generate` call as sequences of the manager, in the columns of a left-padded batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, as_tensor

from kvist import KVCacheManager, Sequence
from kvist.errors import SequenceError

__all__ = ["Batch", "Step"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Step:
    """Where one forward call writes and reads K and V; the same for all layers.

    `write_rows` [T] picks the tokens to store out of the `B * num_query_columns` that the forward computes, and
    `write_slots` [T] says where; `read_slots` [B * num_columns] is the slot of every column. All int64, on the arena's
    device. Columns of padding read the row's first token: finite numbers, which the mask leaves out.
    """

    num_past: int
    num_columns: int
    write_rows: Tensor
    write_slots: Tensor
    read_slots: Tensor


class Batch:
    """One sequence per row, in columns that are common to all rows: column = padding of the row + index of the token.

        column    0 1 2 3 4 5
        row 0     . . a b c d     padding 2
        row 1     e f g h i j     padding 0

    Rows with equal prompts, as beam search makes them, are beams of one sequence: only the first of them is stored
    until the prompt is committed. Every act does all or nothing.
    """

    def __init__(self, manager: KVCacheManager, block_size: int) -> None:
        self._manager = manager
        self._block_size = block_size
        self._rows: list[Sequence] = []
        self._padding = np.zeros(0, dtype=np.int64)
        # Of each row, the row whose blocks hold its K and V: itself, except for beams whose prompt is not committed.
        self._owners = np.zeros(0, dtype=np.int64)
        self.num_columns = 0
        self.num_cached_tokens: list[int] = []

    @property
    def num_rows(self) -> int:
        """Rows of the batch, B."""
        return len(self._rows)

    @property
    def padding(self) -> IntArray:
        """Columns of left padding, [B]."""
        return self._padding

    @property
    def num_cached_columns(self) -> int:
        """Leading columns that hold padding or cached tokens in every row."""
        return int((self._padding + np.array(self.num_cached_tokens, dtype=np.int64)).min())

    def admit(self, token_ids: IntArray, padding: IntArray, namespace: tuple[Any, ...]) -> None:
        """Begin one sequence per row of `token_ids` [B, S] in an empty batch. Raises what `add_sequence` raises."""
        groups: dict[bytes, list[int]] = {}
        for row, tokens in enumerate(token_ids):
            groups.setdefault(tokens[padding[row] :].tobytes(), []).append(row)
        admitted: list[tuple[list[int], Sequence]] = []
        try:
            for members in groups.values():
                tokens = token_ids[members[0], padding[members[0]] :]
                sequence = self._manager.add_sequence(tokens, namespace=namespace, num_beams=len(members))
                admitted.append((members, sequence))
        except BaseException:
            self._free([beam for _, sequence in admitted for beam in sequence.beams])
            raise
        beams = {row: beam for members, sequence in admitted for row, beam in zip(members, sequence.beams, strict=True)}
        owners = {row: members[0] for members in groups.values() for row in members}
        self._rows = [beams[row] for row in range(len(token_ids))]
        self._owners = np.array([owners[row] for row in range(len(token_ids))])
        self._padding = padding
        self.num_columns = token_ids.shape[1]
        self.num_cached_tokens = [self._rows[owner].num_cached_tokens for owner in self._owners]

    def extend(self, token_ids: IntArray) -> None:
        """Add the columns `token_ids` [B, S] to the rows. Raises what `append` raises."""
        self._manager.append(self._rows, token_ids[:, 0] if token_ids.shape[1] == 1 else list(token_ids))
        self.num_columns += token_ids.shape[1]

    def step(self, num_past: int, device: Any) -> Step:
        """Plan a forward that computes the columns from `num_past` on and stores what is not stored yet."""
        slots = self._slots()
        stored = self._padding + np.array([self._rows[owner].num_computed_tokens for owner in self._owners])
        is_owner = self._owners == np.arange(self.num_rows)
        written = (np.arange(num_past, self.num_columns) >= stored[:, None]) & is_owner[:, None]
        return Step(
            num_past,
            self.num_columns,
            as_tensor(np.flatnonzero(written), device=device),
            as_tensor(slots[:, num_past:][written], device=device),
            as_tensor(slots.ravel(), device=device),
        )

    def _slots(self) -> IntArray:
        """The slot of every column of every row, int64 [B, num_columns]."""
        owners, owner_of_row = np.unique(self._owners, return_inverse=True)
        table = self._manager.tables([self._rows[owner] for owner in owners]).block_table[owner_of_row]
        tokens = np.maximum(np.arange(self.num_columns) - self._padding[:, None], 0)
        blocks = np.take_along_axis(table, tokens // self._block_size, axis=1).astype(np.int64)
        slots: IntArray = blocks * self._block_size + tokens % self._block_size
        return slots

    def commit(self) -> None:
        """Declare all columns written, so that others may find them."""
        self._manager.commit([self._rows[owner] for owner in np.unique(self._owners)])
        self._owners = np.arange(self.num_rows)

    def rewind(self, num_columns: int) -> None:
        """Take the last `num_columns` columns back. Raises `SequenceError` if a row would keep nothing but padding."""
        kept = self.num_columns - num_columns
        if kept == 0:
            self.free()
        elif kept <= self._padding.max(initial=0):
            raise SequenceError(
                f"can't take {num_columns} of {self.num_columns} columns back: row {int(self._padding.argmax())} "
                f"begins at column {int(self._padding.max())} and would keep no token; reset() the cache instead"
            )
        elif num_columns:
            for row in self._rows:
                self._manager.rewind(row, num_columns)
            self.num_columns = kept

    def reorder(self, parents: IntArray) -> None:
        """Let row i go on as row `parents[i]`, [B]."""
        self._manager.reorder(self._rows, parents)
        self._padding = self._padding[parents]

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
        self._padding = self._padding[rows]
        self._owners = np.arange(len(rows))

    def free(self) -> None:
        """End all rows; what they had committed stays reusable."""
        rows, self._rows = self._rows, []
        self._padding = self._owners = np.zeros(0, dtype=np.int64)
        self.num_columns = 0
        self._free(rows)

    def _free(self, sequences: list[Sequence]) -> None:
        # Beams that wait for their prompt go before the one that computes it, so that none has to take its place.
        for sequence in reversed(sequences):
            self._manager.free(sequence)
