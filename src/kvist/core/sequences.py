"""Sequences: handles on the running requests, and what each knows besides its row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvist.core.retention import DEFAULT_KEEP, Keep, Retention
from kvist.core.tokens import TOKEN_BYTES, TokenArray
from kvist.errors import SequenceError

if TYPE_CHECKING:
    from kvist.core.extents import Extent, Namespace
    from kvist.core.rows import SequenceRows

__all__ = ["Encoder", "Sequence", "Sequences", "Suspended", "Wishes"]

Sequences = Iterable["Sequence"] | NDArray[np.integer[Any]]


@dataclass(slots=True)
class Encoder:
    """The blocks of an encoder's tokens, shared by the sequences that came from one prompt."""

    blocks: NDArray[np.int32]
    num_tokens: int
    num_holders: int = 0


@dataclass(frozen=True, slots=True)
class Suspended:
    """What a suspended sequence is to go on from: its packed tokens, how many were computed, and its version."""

    tokens: bytes
    num_computed: int
    num_encoder_tokens: int
    version: int


@dataclass(frozen=True, slots=True)
class Wishes:
    """How a prompt is to be treated: whether it leaves content to others, reuses theirs, how long that should stay."""

    publishes: bool
    reuses: bool = True
    retention: Retention | None = None
    num_beams: int = 1
    num_encoder_tokens: int = 0


class Sequence:
    """One running request: a handle on a row of the manager's arrays. Made by the manager, ended by `free`.

    `row` indexes the manager's arrays by row, and is -1 once it has ended or while it is suspended. `namespace` is what
    it was admitted with, `num_prompt_tokens` the length of its prompt, `num_cached_tokens` how many of these were found
    in the cache, and `miss` why not more (empty if only the last token was missing). Where a model keeps states or
    windows, `num_shared_tokens` of the prompt were known although not all of it was there to go on from.
    """

    __slots__ = (
        "_beams",
        "_checkpoints",
        "_earlier",
        "_earlier_start",
        "_encoder",
        "_extent",
        "_rows",
        "_suspended",
        "leader",
        "miss",
        "namespace",
        "num_cached_tokens",
        "num_prompt_tokens",
        "num_shared_tokens",
        "publishes",
        "retention",
        "reuses",
        "row",
    )

    def __init__(
        self,
        rows: SequenceRows,
        namespace: Namespace,
        wishes: Wishes,
        num_prompt_tokens: int = 0,
        num_cached_tokens: int = 0,
        miss: str = "",
    ) -> None:
        """Make a sequence that has no row yet: `SequenceRows.open` gives it one."""
        self._rows = rows
        self.row = -1
        self.namespace = namespace
        self._extent: Extent
        self.publishes, self.reuses, self.retention = wishes.publishes, wishes.reuses, wishes.retention
        self.num_prompt_tokens = num_prompt_tokens
        self.num_cached_tokens = num_cached_tokens
        self.miss = miss
        self.num_shared_tokens = self._earlier_start = 0
        self.leader: Sequence | None = None
        self._beams: list[Sequence] | None = None
        self._earlier: bytes | bytearray = b""
        self._checkpoints: list[tuple[int, int]] = []
        self._encoder: Encoder | None = None
        self._suspended: Suspended | None = None

    def copied(self, rows: SequenceRows, extent: Extent) -> Sequence:
        """Return a copy in other rows that holds another extent; who its beams are is the caller's business."""
        wishes = Wishes(self.publishes, self.reuses, self.retention)
        twin = Sequence(rows, self.namespace, wishes, self.num_prompt_tokens, self.num_cached_tokens, self.miss)
        twin.row, twin._extent = self.row, extent
        twin.num_shared_tokens, twin._checkpoints = self.num_shared_tokens, list(self._checkpoints)
        twin._earlier, twin._earlier_start = bytes(self._earlier), self._earlier_start
        return twin

    def __repr__(self) -> str:
        if not self.is_live:
            return "<Sequence freed>" if self._suspended is None else "<Sequence suspended>"
        counts = f"{self.num_tokens} tokens, {self.num_computed_tokens} computed, {self.num_blocks} blocks"
        return f"<Sequence row {self.row}: {counts}>"

    @property
    def is_live(self) -> bool:
        """Whether it still runs."""
        return self.row >= 0

    @property
    def is_suspended(self) -> bool:
        """Whether it waits to be resumed."""
        return self._suspended is not None

    @property
    def num_suspended_tokens(self) -> int:
        """Tokens that it will be resumed with, 0 unless it is suspended."""
        return 0 if self._suspended is None else len(self._suspended.tokens) // TOKEN_BYTES

    @property
    def num_encoder_tokens(self) -> int:
        """Tokens of the encoder whose K and V it attends to."""
        return 0 if self._encoder is None else self._encoder.num_tokens

    @property
    def beams(self) -> list[Sequence]:
        """The live sequences that were admitted together for beam search, in order; just itself if there was one."""
        return [self] if self._beams is None else list(self._beams)

    def _waiting_beams(self) -> list[Sequence]:
        """List the beams that wait until this sequence has committed the whole prompt."""
        return [beam for beam in self._beams or () if beam.leader is self]

    @property
    def num_tokens(self) -> int:
        """Tokens, computed or not."""
        return self._rows.num_tokens.item(self._live_row())

    @property
    def num_computed_tokens(self) -> int:
        """Leading tokens whose K and V are known to be written."""
        return self._rows.num_computed.item(self._live_row())

    @property
    def num_blocks(self) -> int:
        """Blocks in its tables, of all groups, shared ones and reserved ones included; those let go are not counted."""
        rows, row = self._rows, self._live_row()
        if rows.is_plain:
            return int(rows.blocks_of[row])
        return sum(int(np.count_nonzero(self.group_blocks(group) >= 0)) for group in range(len(rows.spans)))

    @property
    def capacity(self) -> int:
        """Tokens that its blocks have room for, at most `max_sequence_length`."""
        return self._rows.capacity(self._live_row())

    @property
    def num_columns(self) -> int:
        """Columns of its tables that it has, in groups that keep all of the past or slide over it."""
        return int(self._rows.blocks_of[self._live_row()])

    @property
    def version(self) -> int:
        """Grows when block ids already in the table change: equal content was found, rewind, reorder."""
        return self._rows.version.item(self._live_row())

    @property
    def block_ids(self) -> NDArray[np.int32]:
        """A copy of its block ids in the first group, int32 `[columns]`; see `group_blocks`."""
        return self.group_blocks(0)

    @property
    def tokens(self) -> TokenArray:
        """A copy of its token ids, int32 `[num_tokens]`."""
        self._live_row()
        if self.leader is not None:
            return self.leader.tokens[: self.num_tokens]
        return self._rows.identities.tokens(self._rows.packed_tokens(self))

    def group_blocks(self, group: int) -> NDArray[np.int32]:
        """Return a copy of its block ids in one group, int32 `[columns]`, -1 where the group has let a block go."""
        rows, row = self._rows, self._live_row()
        span = rows.spans[group]
        blocks = rows.block_table[group, row, : rows.ends_of[group][row]].copy()
        if self.leader is not None:
            blocks[rows.ends_of[group][self.leader.row] : rows.published_of[row]] = -1
        if span.ring is None:
            blocks[span.num_sink_blocks : rows.firsts_of[group][row]] = -1
        return blocks

    @property
    def prompt_boundary(self) -> int:
        """Where a hit of its prompt can end, in whole blocks: the last token of a prompt is always computed."""
        return (self.num_prompt_tokens - 1) // self._rows.block_size

    def _keeps(self, start: int, end: int) -> Iterable[tuple[int, Keep]]:
        """Return how its blocks start .. end-1 are to be published, in runs: (end of the run, how to keep it)."""
        if self.retention is None and self._rows.is_plain:
            return ((end, DEFAULT_KEEP),)
        boundary = self.prompt_boundary
        if self.retention is None:
            is_cut = start < boundary < end - 1
            return ((boundary, DEFAULT_KEEP), (end, DEFAULT_KEEP)) if is_cut else ((end, DEFAULT_KEEP),)
        runs = self.retention.keeps(start, end, self._rows.block_size, self.num_prompt_tokens)
        return runs if self._rows.is_plain or boundary >= end - 1 else _cut_at(boundary, start, runs)

    def _live_row(self) -> int:
        if self.row < 0:
            raise SequenceError(f"the sequence {'is suspended' if self.is_suspended else 'has been freed'}")
        return self.row


def _cut_at(boundary: int, start: int, runs: Iterable[tuple[int, Keep]]) -> Iterator[tuple[int, Keep]]:
    """Yield runs of blocks from `start` on, of which none goes on across the boundary."""
    for end, keep in runs:
        if start < boundary < end:
            yield boundary, keep
        yield end, keep
        start = end
