"""Where one forward call finds what its layers have cached, and where it puts what they cache now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, as_tensor

from kvist import KVCacheManager
from kvist.config import GroupSpec
from kvist.serve.transformers.batch import Batch, Part

__all__ = ["AttentionStep", "StateStep", "Step", "first_column", "plan_step"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """Where the layers of one group read and write K and V, by slot; int64 on the arena's device.

    `write_slots` `[T]` says where the new tokens go, -1 for one that no later one will need. `read_slots`
    `[n * (end - first_column)]` is the slot of every column from `first_column` on. Columns of padding, and those that
    the row has let go, read the first token that it has: finite numbers, which the mask leaves out.
    """

    first_column: int
    write_slots: Tensor
    read_slots: Tensor


@dataclass(frozen=True, slots=True)
class StateStep:
    """Which blocks hold the states that the layers of one group go on from; int64 on the arena's device.

    `blocks` `[n]` are read by the part's rows, of which those in `is_new` bool `[n]` begin with no state whatever their
    block holds; None if none does. Rows `write_rows` put the new states into `write_blocks`.
    """

    blocks: Tensor
    is_new: Tensor | None
    write_rows: Tensor
    write_blocks: Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """One forward call over a part of the batch. `groups` has an entry for each group of the manager.

    `write_rows` int64 `[T]` picks the tokens to store out of the `n * (end - first)` that the forward computes.
    """

    part: Part
    write_rows: Tensor
    groups: tuple[AttentionStep | StateStep, ...]

    @property
    def num_rows(self) -> int:
        """Rows that the forward computes, n."""
        return len(self.part.rows)


def first_column(group: GroupSpec, num_past: int) -> int:
    """Return the first column that a window or chunk may need for the token in column `num_past`; 0 for all others.

    As transformers has it, for a chunk this is its column as if the token were the chunk's last.
    """
    size = group.window or group.chunk_tokens
    return max(num_past + 1 - size, 0) if size else 0


def plan_step(manager: KVCacheManager, batch: Batch, part: Part, device: Any) -> Step:
    """Plan a forward that computes a part of the batch and stores what is not stored yet."""
    return _Plan(manager, batch, part, device).step()


class _Plan:
    def __init__(self, manager: KVCacheManager, batch: Batch, part: Part, device: Any) -> None:
        self._manager, self._groups, self._part, self._device = manager, batch.groups, part, device
        self._block_size = manager.config.block_size
        owners, self._owner_of_row = batch.owners_in(part)
        self._sequences = batch.sequences(owners)
        self._padding = batch.padding[part.rows, None]
        stored = batch.columns_stored
        self._num_new_tokens = part.end - stored[owners]
        is_owner = (part.rows == owners[self._owner_of_row])[:, None]
        self._written = (np.arange(part.first, part.end) >= stored[part.rows, None]) & is_owner

    def step(self) -> Step:
        groups = enumerate(self._groups)
        return Step(
            self._part,
            self._tensor(np.flatnonzero(self._written)),
            tuple(self._states(i) if group.kind == "state" else self._attention(i, group) for i, group in groups),
        )

    def _attention(self, index: int, group: GroupSpec) -> AttentionStep:
        tables = self._manager.tables(self._sequences, self._num_new_tokens, group=index)
        first = first_column(group, self._part.first)
        tokens = np.maximum(np.arange(first, self._part.end) - self._padding, self._first_tokens(group))
        blocks = np.take_along_axis(tables.block_table[self._owner_of_row], tokens // self._block_size, axis=1)
        slots = blocks.astype(np.int64) * self._block_size + tokens % self._block_size
        return AttentionStep(first, self._tensor(tables.slot_mapping), self._tensor(slots.ravel()))

    def _first_tokens(self, group: GroupSpec) -> IntArray:
        """The first token of each row that may still be needed and is within reach, `[n, 1]`."""
        num_past = np.maximum(self._part.first - self._padding, 0)
        return num_past // group.chunk_tokens * group.chunk_tokens if group.chunk_tokens else np.zeros_like(num_past)

    def _states(self, index: int) -> StateStep:
        blocks = self._manager.tables(self._sequences, self._num_new_tokens, group=index).block_table[:, 0]
        is_new = self._padding[:, 0] >= self._part.first
        # The owners are the rows of the part that have something to write.
        return StateStep(
            self._tensor(blocks[self._owner_of_row].astype(np.int64)),
            self._tensor(is_new) if is_new.any() else None,
            self._tensor(np.flatnonzero(self._written.any(axis=1))),
            self._tensor(blocks.astype(np.int64)),
        )

    def _tensor(self, array: npt.NDArray[Any]) -> Tensor:
        return as_tensor(array, device=self._device)
