"""What a manager keeps, and the acts that its calls share: checking for room, giving blocks, publishing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvist.config import CacheConfig
from kvist.core.eviction import policy_named
from kvist.core.extents import Extent, Match
from kvist.core.matching import Pin
from kvist.core.moves import Move
from kvist.core.pool import BlockPool
from kvist.core.retention import Keep
from kvist.core.sequences import Sequence, SequenceRows
from kvist.core.statistics import Counters
from kvist.core.tree import PrefixTree
from kvist.errors import NeverFits, OutOfBlocks, OutOfRows

__all__ = ["CacheState"]


class CacheState:
    """The pool, the tree, the rows, the pins, the counts and the copies still to be made.

    Whoever changes it checks first: `require_rows` and `require_blocks` raise and change nothing that can be seen, and
    what comes after them must not fail.
    """

    def __init__(self, config: CacheConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self.block_size = config.block_size
        self.pool = BlockPool(config.resolved_num_blocks)
        policy, partial = policy_named(config.policy), config.reuse and config.partial_reuse
        self.tree = PrefixTree([self.pool], config.block_size, policy, clock, partial=partial)
        self.rows = SequenceRows(config.max_sequences, config.max_sequence_length, config.block_size, num_groups=1)
        self.counters = Counters()
        self.pins: dict[Pin, Extent] = {}
        self.moves: list[Move] = []
        self._due_rows: set[int] = set()
        self._any_row_due = False

    @property
    def num_free_blocks(self) -> int:
        """Blocks that an allocation could take now, after all that is committed has been published."""
        self.publish_committed()
        return self.pool.num_free + self.tree.num_evictable

    # -- room ---------------------------------------------------------------------------------------------------------

    def require_rows(self, n: int, free_rows: int) -> None:
        """Raise unless n rows are free."""
        if n <= free_rows:
            return
        total = len(self.rows.sequences)
        if n > total:
            raise NeverFits(f"{n} sequences asked for, max_sequences is {total}")
        raise OutOfRows(
            f"{n} rows needed, but {free_rows} of max_sequences={total} are free",
            needed=n,
            free=free_rows,
            evictable=0,
            held=total - free_rows,
        )

    def require_blocks(self, needed: int, match: Match | None = None) -> None:
        """Raise OutOfBlocks unless that many blocks could be had without what the match would hold."""
        if needed <= self.pool.num_free:
            return
        self.publish_committed()
        free, evictable = self.pool.num_free, self.tree.num_evictable
        held = self.pool.num_blocks - free - evictable
        if match is not None:
            evictable -= self.tree.num_evictable_on(match.extent)
            if match.child is not None and not match.child.references:
                evictable -= match.child_blocks
        if needed <= free + evictable:
            return
        can = free + evictable
        raise OutOfBlocks(
            f"{needed} blocks needed, but only {can} are free or evictable ({held} held by {self._holders()})",
            needed=needed,
            free=free,
            evictable=evictable,
            held=held,
        )

    def _holders(self) -> str:
        """Count who holds blocks, and name the sequences that hold most."""
        sequences = sorted(self.rows.running(), key=lambda sequence: -sequence.num_blocks)
        largest = ", ".join(f"row {sequence.row} with {sequence.num_blocks}" for sequence in sequences[:3])
        counts = f"{len(sequences)} sequences and {len(self.pins)} pins"
        return f"{counts}: {largest}{', ...' if len(sequences) > 3 else ''}" if sequences else counts

    # -- blocks -------------------------------------------------------------------------------------------------------

    def fill(self, row: int, start: int, end: int) -> None:
        """Give the row new blocks at positions start .. end-1; there must be as many."""
        self.evict_for(end - start)
        self.rows.block_table[0, row, start:end] = self.pool.take(end - start)
        self.rows.blocks_of[row] = end

    def give_row(self, row: int, keep: int) -> None:
        """Give back the row's blocks from position `keep` on; they must be its own."""
        have = self.rows.blocks_of[row]
        if have > keep:
            own = self.rows.block_table[:, row, keep:have]
            self.pool.give(own[0])
            own[:] = 0
            self.rows.blocks_of[row] = keep

    def end(self, sequence: Sequence) -> None:
        """Give back all that a sequence holds: its own blocks, its row, and its place in the tree."""
        row, rows = sequence.row, self.rows
        keep, have = rows.published_of[row], rows.blocks_of[row]
        if have > keep:
            self.pool.give(rows.block_table[0, row, keep:have])
        self._due_rows.discard(row)
        rows.close(sequence)
        self.tree.release(sequence._extent)

    def evict_for(self, needed: int) -> None:
        """Evict so that this many blocks are free; so many must be free or evictable."""
        if needed > self.pool.num_free:
            self.tree.evict(needed - self.pool.num_free)

    def order_move(self, source: int, destination: int, num_tokens: int) -> None:
        """Order a copy, unless the block already is where it should be."""
        if source != destination:
            self.moves.append(Move(source, destination, num_tokens))

    # -- publishing ---------------------------------------------------------------------------------------------------

    def note_committed(self, row: int) -> None:
        """Note that one row has more computed tokens."""
        if self.rows.computed_of[row] >= self.rows.due_of[row]:
            self._due_rows.add(row)

    def note_rows_committed(self) -> None:
        """Note that any row may have more computed tokens."""
        self._any_row_due = True

    def publish_committed(self) -> None:
        """Put every full committed block into the tree."""
        for row in self._take_due_rows():
            self.publish(self.rows.sequence_at(row))

    def publish_along(self, match: Match) -> bool:
        """Publish the rows whose committed blocks may lengthen a match, and say whether there were any.

        These go on from an extent on its path; all others can wait, so that an admission into a full batch costs what
        concerns it.
        """
        due = self._take_due_rows()
        if not due:
            return False
        path = {id(match.extent)}
        extent = match.extent
        while extent.parent is not None:
            extent = extent.parent
            path.add(id(extent))
        on_path = {row for row in due if id(self.rows.sequence_at(row)._extent) in path}
        self._due_rows.update(row for row in due if row not in on_path)
        for row in sorted(on_path):
            self.publish(self.rows.sequence_at(row))
        return bool(on_path)

    def _take_due_rows(self) -> list[int]:
        """Return the rows that have something to publish, in order; they are not noted as such any more."""
        rows = self.rows
        if self._any_row_due:
            due = np.flatnonzero(rows.num_computed >= rows.publish_due).tolist()
        elif self._due_rows:
            due = [row for row in sorted(self._due_rows) if rows.computed_of[row] >= rows.due_of[row]]
        else:
            return []
        self._any_row_due = False
        self._due_rows.clear()
        return due

    def publish(self, sequence: Sequence) -> None:
        """Put the sequence's full committed blocks into the tree; where the content is there already, share it.

        A sequence that must not publish keeps them unlisted, for itself and its forks.
        """
        rows, row = self.rows, sequence.row
        start, end = rows.published_of[row], rows.computed_of[row] // self.block_size
        if end <= start:
            return
        if not sequence.publishes:
            tokens = rows.token_bytes(sequence, start * self.block_size, end * self.block_size)
            sequence._extent = self.tree.insert_unlisted(sequence._extent, tokens, rows.block_table[:, row, start:end])
            rows.set_published(sequence, end)
            return
        for stop, keep in sequence._keeps(start, end):
            existing = self._insert(sequence, start, stop, stop * self.block_size, keep)
            if existing:
                self._rebase(sequence, start, existing, stop)
            rows.set_published(sequence, stop)
            start = stop

    def publish_last(self, sequence: Sequence) -> None:
        """Publish all that is computed, a partly filled last block too; the sequence must end right after."""
        rows, row = self.rows, sequence.row
        start, computed = rows.published_of[row], rows.computed_of[row]
        if not self.tree.partial:
            computed -= computed % self.block_size
        end = -(-computed // self.block_size)
        if end <= start:
            return
        for stop, keep in sequence._keeps(start, end):
            existing = self._insert(sequence, start, stop, min(stop * self.block_size, computed), keep)
            if existing:
                self.pool.give(rows.block_table[0, row, start : start + existing])
                self.counters.num_shared_blocks += existing
            rows.published_of[row] = start = stop

    def _insert(self, sequence: Sequence, start: int, stop: int, end_token: int, keep: Keep) -> int:
        """Put a row's blocks start .. stop-1 into the tree; returns how many leading ones the tree did not take."""
        tokens = self.rows.token_bytes(sequence, start * self.block_size, end_token)
        blocks = self.rows.block_table[:, sequence.row, start:stop]
        sequence._extent, existing = self.tree.insert(sequence._extent, tokens, blocks, keep)
        return existing

    def _rebase(self, sequence: Sequence, start: int, existing: int, end: int) -> None:
        """Replace the row's blocks whose content was in the tree already by the tree's, and give its own back."""
        table = self.rows.block_table[:, sequence.row]
        own: np.ndarray[tuple[int], np.dtype[np.int32]] = table[0, start : start + existing].copy()
        extent = sequence._extent
        while end > start and extent.parent is not None:
            first = end - extent.num_blocks
            table[:, max(first, start) : end] = extent.blocks[:, max(start - first, 0) :]
            extent, end = extent.parent, first
        self.pool.give(own)
        self.rows.version[sequence.row] += 1
        self.counters.num_shared_blocks += existing
        self._show_waiting_beams(sequence)

    def _show_waiting_beams(self, leader: Sequence) -> None:
        """Show a change in a leader's blocks in the rows of the beams that wait for it."""
        rows = self.rows
        for beam in leader._waiting_beams():
            num_full = rows.num_published.item(beam.row)
            rows.block_table[:, beam.row, :num_full] = rows.block_table[:, leader.row, :num_full]
            rows.version[beam.row] += 1
