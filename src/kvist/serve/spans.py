"""Which of the cached tokens the queries of one forward pass see: index tensors and masks, made once for all layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvist.config import GroupSpec
from kvist.memory.tables import BatchTables

__all__ = ["DecodeSpan", "GroupBatch", "PrefillSpan", "lay_out"]

Indices = npt.NDArray[np.intp]
Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DecodeSpan:
    """Sequences that compute one token each and see spans of similar lengths: one gather and one attention for all.

    `rows` int64 `[B]` are their places among the pass's tokens. The first `length` positions of the blocks in
    `block_table` `[B, M]` are looked at. What a sequence does not see of them is -inf in `mask` `[B, 1, 1, length]`,
    which is added to the scores, and True in `edges`: pairs of some positions and a bool `[B, those positions, 1, 1]`.
    Where all see all, `mask` is None and `edges` empty.
    """

    rows: Tensor
    block_table: Tensor
    length: int
    mask: Tensor | None
    edges: tuple[tuple[slice, Tensor], ...]

    @property
    def num_rows(self) -> int:
        """Positions looked at, of all sequences."""
        return len(self.block_table) * self.length


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """The `[start, stop)` of the pass's tokens that belong to one sequence.

    The first `length` positions of the blocks in `block_table` `[1, M]` are looked at, but for the first `num_unseen`
    of them, which the chunk's first token does not see and so none does. `mask`, `[stop - start, length - num_unseen]`,
    is added to the scores; None is plain causal attention. With `is_fresh` nothing of the sequence precedes the chunk:
    what it sees is in the pass itself.
    """

    start: int
    stop: int
    block_table: Tensor
    length: int
    num_unseen: int
    mask: Tensor | None
    is_fresh: bool

    @property
    def num_rows(self) -> int:
        """Positions looked at."""
        return self.length


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """One forward pass for the layers of one group: where new K and V go, int64 `[T]`, and what is seen."""

    slot_mapping: Tensor
    spans: tuple[DecodeSpan | PrefillSpan, ...]


def lay_out(
    group: GroupSpec, tables: BatchTables, block_size: int, dtype: torch.dtype, device: torch.device
) -> GroupBatch:
    """Lay out one pass for the layers of `group`, from its tables; `dtype` is that of the model's queries."""
    layout = _Layout(group, tables, block_size, dtype, device)
    single = np.flatnonzero(tables.query_lens == 1)
    firsts = first_seen(group, tables.seq_lens[single] - np.int64(1))
    lengths = tables.seq_lens[single] - firsts // block_size * block_size
    decodes = [layout.decodes(single[near], firsts[near], lengths[near]) for near in _similar(lengths)]
    prefills = [layout.prefill(int(index)) for index in np.flatnonzero(tables.query_lens > 1)]
    return GroupBatch(torch.from_numpy(tables.slot_mapping).to(device, non_blocking=True), (*decodes, *prefills))


def first_seen(group: GroupSpec, positions: Positions) -> Positions:
    """Return the first token that the token at each position sees.

    >>> first_seen(GroupSpec("sliding", (0,), 64, window=4), np.array([0, 3, 4, 9]))
    array([0, 0, 1, 6])
    >>> first_seen(GroupSpec("chunked", (0,), 64, chunk_tokens=4), np.array([0, 3, 4, 9]))
    array([0, 0, 4, 8])
    """
    if group.kind == "sliding":
        return np.maximum(positions + 1 - group.window, 0)
    if group.kind == "chunked":
        return positions // group.chunk_tokens * group.chunk_tokens
    return np.zeros_like(positions)


@dataclass(frozen=True, slots=True)
class _Layout:
    """What all spans of one group's batch are made from."""

    group: GroupSpec
    tables: BatchTables
    block_size: int
    dtype: torch.dtype
    device: torch.device

    def decodes(self, indices: Indices, firsts: Positions, lengths: Positions) -> DecodeSpan:
        """Lay out sequences that compute one token each; they see what follows `firsts`.

        `lengths` count from the block in which that lies to the sequence's end.
        """
        length = int(lengths.max())
        columns = firsts // self.block_size
        seen_from = firsts - columns * self.block_size
        at = np.arange(length)
        hidden = (at < seen_from[:, None]) | (at >= lengths[:, None])
        edges = [slice(0, int(seen_from.max())), slice(int(lengths.min()), length)]
        return DecodeSpan(
            self._tensor(self.tables.cu_seqlens[indices].astype(np.int64)),
            self._tensor(self._columns(indices, columns, length)),
            length,
            self._masked(hidden)[:, None, None, :] if hidden.any() else None,
            tuple((edge, self._tensor(hidden[:, edge, None, None])) for edge in edges if edge.stop > edge.start),
        )

    def prefill(self, index: int) -> PrefillSpan:
        """Lay out the chunk of one sequence."""
        start, stop = (int(bound) for bound in self.tables.cu_seqlens[index : index + 2])
        end = int(self.tables.seq_lens[index])
        positions = np.arange(end - (stop - start), end)
        firsts = first_seen(self.group, positions)
        first = int(firsts[0])
        column = first // self.block_size
        length = end - column * self.block_size
        return PrefillSpan(
            start,
            stop,
            self._tensor(self._columns(np.array([index]), np.array([column]), length)),
            length,
            first - column * self.block_size,
            self._chunk_mask(positions, firsts),
            is_fresh=bool(positions[0] == 0),
        )

    def _chunk_mask(self, positions: Positions, firsts: Positions) -> Tensor | None:
        """Return what to add to the scores of a chunk with the keys from `firsts[0]` on.

        Its queries are at `positions`, and see what follows `firsts`.
        """
        if positions[0] == 0 == firsts[-1]:
            return None
        keys = np.arange(firsts[0], positions[-1] + 1)
        hidden = (keys > positions[:, None]) | (keys < firsts[:, None])
        return self._masked(hidden)

    def _columns(self, indices: Indices, columns: Positions, length: int) -> npt.NDArray[np.int32]:
        """Return the block ids of `length` positions from a column of each row's block table on."""
        width = -(-length // self.block_size)
        last = self.tables.block_table.shape[1] - 1
        # Rows shorter than the longest look at other blocks there, which are hidden.
        wanted = np.minimum(columns[:, None] + np.arange(width), last)
        ids: npt.NDArray[np.int32] = self.tables.block_table[indices[:, None], wanted]
        return ids

    def _masked(self, hidden: npt.NDArray[np.bool_]) -> Tensor:
        """Turn a mask of what must not be seen into numbers to add to scores: made once here, not by every layer."""
        mask = torch.zeros(hidden.shape, dtype=self.dtype)
        return mask.masked_fill_(torch.from_numpy(hidden), float("-inf")).to(self.device)

    def _tensor(self, values: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self.device)


def _similar(lengths: Positions) -> Iterator[Indices]:
    """Yield the indices of `lengths` in groups in which the longest is less than twice the shortest.

    So padding stays under half.

    >>> [group.tolist() for group in _similar(np.array([90, 3000, 100, 2000]))]
    [[1, 3], [2, 0]]
    """
    ordered = np.argsort(-lengths, kind="stable")
    while ordered.size:
        num_near = int(np.count_nonzero(2 * lengths[ordered] > lengths[ordered[0]]))
        yield ordered[:num_near]
        ordered = ordered[num_near:]
