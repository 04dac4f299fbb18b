"""What a manager keeps, and the acts that its calls share: checking for room, giving blocks, publishing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvist.config import CacheConfig
from kvist.core import holdings, recurrent, rings
from kvist.core.chain import Chain
from kvist.core.extents import Blocks, Extent, Match, Twins
from kvist.core.groups import spans_of
from kvist.core.identity import IdentityTable, Media
from kvist.core.keeping import Keeper, Order
from kvist.core.lower import DEVICE, LowerTier
from kvist.core.matching import Pin
from kvist.core.moves import Move
from kvist.core.policies import queue_of
from kvist.core.pool import BlockPool
from kvist.core.recording import EventRecorder
from kvist.core.retention import Keep
from kvist.core.rows import SequenceRows
from kvist.core.sequences import Encoder, Sequence, Wishes
from kvist.core.spanned import SpannedGroup
from kvist.core.statistics import Counters
from kvist.core.tree import PrefixTree
from kvist.errors import NeverFits, OutOfBlocks, OutOfRows

__all__ = ["CacheState"]


class PinHold(NamedTuple):
    """What a pin holds: an extent, and the blocks in span of each group that needs a part of the past."""

    extent: Extent
    blocks: list[NDArray[np.int32]]


class CacheState:
    """The pools, the tree, the rows, the pins, the counts and the copies still to be made.

    `group_pools` are the pools by group. Of the groups that need a part of the past, `linear` have a table that follows
    the sequence: `sliding` ones, whose blocks fall out of span, and `rings`, which are written in place. `recurrent`
    holds one state a sequence; `cross` is the index of the group for an encoder's tokens. `is_plain` says that there is
    one group, with full attention.

    Whoever changes it checks first: `require_rows` and `require` raise and change nothing that can be seen, and what
    comes after them must not fail.
    """

    def __init__(
        self, config: CacheConfig, clock: Callable[[], float], identities: IdentityTable | None = None
    ) -> None:
        self.config = config
        self.clock = clock
        self.block_size = config.block_size
        self.spans = spans_of(config)
        self.pools = [BlockPool(num_blocks) for num_blocks in config.pool_num_blocks]
        self.pool_of = list(config.pool_of)
        self._first_group = [self.pool_of.index(pool) for pool in range(len(self.pools))]
        # A prompt of so few columns, or tokens, fits in every pool, whatever its groups.
        self.sure_columns = min(pool.num_blocks // self.pool_of.count(i) for i, pool in enumerate(self.pools)) - 1
        self.sure_tokens = min((self.sure_columns - 1) * self.block_size - 1, config.max_sequence_length)
        self._num_groups = [self.pool_of.count(pool) for pool in range(len(self.pools))]
        self._shares_pools = len(self.pools) < len(self.spans)
        self._num_evicted_for = [0] * len(self.pools)
        self.group_pools = [self.pools[pool] for pool in self.pool_of]
        self.has_full = self.spans[0].kind == "full"
        self.is_plain = self.has_full and len(self.spans) == 1
        self.max_chunk_tokens = config.max_chunk_tokens
        self.spanned = self._spanned_groups()
        self.linear = [group for group in self.spanned if group.span.kind != "state"]
        self.rings = [group for group in self.spanned if group.span.ring is not None]
        self.sliding = [group for group in self.spanned if group.span.slides]
        self.recurrent = next((group for group in self.spanned if group.span.kind == "state"), None)
        growing = [*([0] if self.has_full else []), *(self.pool_of[group.index] for group in self.sliding)]
        self._num_growing = [growing.count(pool) for pool in range(len(self.pools))]
        self.cross = next((index for index, span in enumerate(self.spans) if span.kind == "cross"), None)
        # Unused positions after the sinks would shift tokens against blocks, so nothing could be matched.
        self.reuses = config.reuse and not any(rings.geometry(group).num_bubble_tokens for group in self.rings)
        self.usual_wishes = Wishes(publishes=self.reuses)
        self.tree = PrefixTree(
            len(self.spans),
            self.pools[0] if self.has_full else None,
            self.spanned,
            config.block_size,
            queue_of(config.policy),
            clock,
            partial=self.reuses and config.partial_reuse and self.recurrent is None,
        )
        sharers = [self.tree.groups_of.get(pool, []) for pool in self.pools]
        self._sharing = list(zip(self.pools, sharers, self._num_groups, strict=True))
        self.identities = IdentityTable() if identities is None else identities
        self.chain = Chain(config.fingerprint, self.block_size, self.identities)
        self._add_tiers()
        self.recorder: EventRecorder | None = None
        self._note_listeners()
        self.rows = SequenceRows(config.max_sequences, config.max_sequence_length, self.spans, self.identities)
        self.counters = Counters(len(self.spans))
        self.pins: dict[Pin, PinHold] = {}
        self._expiring_pins = False
        self.suspended: dict[Sequence, None] = {}
        self.moves: list[Order] = []
        self._due_rows: set[int] = set()
        self._any_row_due = False
        self._slides_due = False

    def _add_tiers(self) -> None:
        self.lower = self.tree.lower = self._lower_tier()
        self.keeper = self.tree.keeper = self._keeper()
        self.copies = self.lower.copies if self.lower is not None and self.lower.writes_through else None
        for group in self.spanned:
            group.copies = self.copies
        # Bit by bit, and not all at once when there is no room.
        self.publishes_at_commit = self.copies is not None or (self.keeper is not None and self.keeper.on_commit)

    def _lower_tier(self) -> LowerTier | None:
        spec = self.config.host
        if spec is None or not self.reuses:
            return None
        return LowerTier(
            self.tree,
            [BlockPool(num_blocks) for num_blocks in self.config.host_num_blocks],
            self.pool_of,
            queue_of(spec.policy),
            self.order,
            min_priority=spec.min_priority,
            min_hits=spec.min_hits,
            writes_through=spec.write == "through",
        )

    def record(self, recorder: EventRecorder) -> None:
        """Let a recorder note what happens from now on."""
        self.recorder = self.tree.recorder = recorder
        for group in self.spanned:
            group.recorder = recorder
        self._note_listeners()

    def _note_listeners(self) -> None:
        tree = self.tree
        tree.has_tiers = tree.lower is not None or tree.keeper is not None
        tree.has_listeners = tree.has_tiers or tree.recorder is not None

    def _keeper(self) -> Keeper | None:
        stores = self.config.stores
        if not stores or not self.reuses:
            return None
        writes = {store.write for store in stores}
        return Keeper(self.chain, self.order, on_commit="through" in writes, on_evict="back" in writes)

    def _spanned_groups(self) -> list[SpannedGroup]:
        references: dict[int, NDArray[np.int32]] = {}
        groups = []
        for index, span in enumerate(self.spans):
            if span.kind not in ("full", "cross"):
                pool = self.pool_of[index]
                if pool not in references:
                    references[pool] = np.zeros(self.pools[pool].num_blocks, np.int32)
                groups.append(SpannedGroup(index, span, self.pools[pool], references[pool]))
        return groups

    @property
    def num_free_blocks(self) -> int:
        """Blocks of all pools that an allocation could take now, after all that is committed has been published."""
        self.settle()
        return sum(pool.num_free + self.tree.evictable_in(pool) for pool in self.pools)

    def settle(self) -> None:
        """Do what has been put off: publish what is committed, let go of what has fallen out of span or expired."""
        self.publish_committed()
        self.slide()
        self._expire_pins()

    def identify(self, prompt: bytes | memoryview, media: Iterable[Media], extra_ids: ArrayLike | None) -> bytes:
        """Put what a prompt's identity has besides its ids into them; forget before what nothing refers to any more."""
        if self.identities.needs_sweep:
            running = [self.rows.packed_tokens(each) for each in self.rows.running() if each.leader is None]
            suspended = [each._suspended.tokens for each in self.suspended if each._suspended is not None]
            cached = [*self.tree.extents(), *self.lower_extents()]
            self.identities.sweep([*running, *suspended, *(extent.tokens for extent in cached)])
        return self.identities.identify(prompt, media, extra_ids)

    def all_extents(self) -> list[Extent]:
        """List every extent, roots included: the listed ones, and those that only holders reach."""
        found = {id(extent): extent for root in self.tree.roots.values() for extent in root.subtree()}
        holders = [sequence._extent for sequence in self.rows.running()]
        for holder in [*holders, *(hold.extent for hold in self.pins.values())]:
            extent: Extent | None = holder
            while extent is not None and id(extent) not in found:
                found[id(extent)] = extent
                extent = extent.parent
        return list(found.values())

    def lower_extents(self) -> list[Extent]:
        """List every extent of the host tier."""
        return [] if self.lower is None else self.lower.extents()

    def copied(self) -> CacheState:
        """Return a copy that shares nothing with this state that changes, for trying things out.

        Identities are shared, since looking one up changes nothing; pins and suspended sequences are left out, and what
        they hold stays held.
        """
        twin = CacheState(self.config, self.clock, self.identities)
        twin.keeper = twin.tree.keeper = None  # what is only supposed is not stored
        twin._note_listeners()
        twins: Twins = {id(extent): extent.copied() for extent in [*self.all_extents(), *self.lower_extents()]}
        for pool, original in zip(twin.pools, self.pools, strict=True):
            pool.copy_from(original)
        for group, original_group in zip(twin.spanned, self.spanned, strict=True):
            group.references[:] = original_group.references
            group.copy_from(original_group, twins)
        twin.tree.copy_from(self.tree, twins)
        if twin.lower is not None and self.lower is not None:
            twin.lower.copy_from(self.lower, twins)
        twin.rows.copy_from(self.rows, twins)
        twin._due_rows, twin._any_row_due = set(self._due_rows), self._any_row_due
        twin._slides_due = self._slides_due
        return twin

    # -- pins ---------------------------------------------------------------------------------------------------------

    def add_pin(self, pin: Pin, extent: Extent, blocks: list[NDArray[np.int32]]) -> None:
        """Keep a pin's hold."""
        self.pins[pin] = PinHold(extent, blocks)
        self._expiring_pins = self._expiring_pins or pin.expires_at_s is not None

    def end_pin(self, pin: Pin) -> None:
        """End a pin's hold."""
        hold = self.pins.pop(pin)
        for group, blocks in zip(self.spanned, hold.blocks, strict=True):
            group.relinquish(blocks)
            group.offer(hold.extent)
        self.tree.release(hold.extent)

    def _expire_pins(self) -> None:
        """End the holds of pins whose time is over."""
        if not self._expiring_pins:
            return
        now = self.clock()
        for pin in [pin for pin in self.pins if pin.expires_at_s is not None and pin.expires_at_s <= now]:
            self.end_pin(pin)
        self._expiring_pins = any(pin.expires_at_s is not None for pin in self.pins)

    def slide(self) -> None:
        """Let rows give up the blocks that have fallen out of span."""
        if self._slides_due:
            self._slides_due = False
            if self.rows.num_running:
                holdings.slide(self)

    # -- room ---------------------------------------------------------------------------------------------------------

    def column_needs(self, num_columns: int) -> list[int]:
        """Count the blocks by pool that so many new columns take, in all groups whose tables grow without bound."""
        return [num_columns * num_growing for num_growing in self._num_growing]

    def needs_between(self, start: int, end: int) -> list[int]:
        """Count the blocks by pool that new columns start .. end-1 of a table take, in all groups whose tables grow."""
        needs = self.column_needs(end - start)
        for group in self.rings:
            num_blocks = rings.geometry(group).num_blocks
            needs[self.pool_of[group.index]] += max(min(end, num_blocks) - min(start, num_blocks), 0)
        return needs

    def chunk_end(self, num_tokens: int, num_computed: int) -> int:
        """Return how far a sliding group must have blocks for the next chunk of a sequence, in columns."""
        chunk = num_tokens if self.max_chunk_tokens is None else self.max_chunk_tokens
        return -(-min(num_tokens, num_computed + chunk) // self.block_size)

    def most_columns(self, group: SpannedGroup) -> int:
        """Count the columns that a sequence holds at most in a sliding group: what is in span, and a chunk.

        W tokens in span and C in a chunk are W - 1 + C in a row, which touch one block more than they fill.
        """
        span, chunk = group.span, self.max_chunk_tokens or self.rows.max_tokens
        num_tokens = (span.window or span.chunk_tokens) - 1 + chunk
        return -(-(num_tokens - 1) // self.block_size) + 1 + span.num_sink_blocks

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

    def require(self, needs: list[int], match: Match | None = None) -> None:
        """Raise OutOfBlocks unless so many blocks of each pool could be had without what the match would hold."""
        for index, needed in enumerate(needs):
            if needed > self.pools[index].num_free:
                self.require_evictable(needs, match)
                return

    def require_evictable(self, needs: list[int], match: Match | None) -> None:
        """Raise OutOfBlocks unless so many blocks of each pool are free or can be evicted, as `require` does."""
        if self._surely_can(needs, 0 if match is None else match.position // self.tree.block_bytes):
            return
        self.settle()
        for index, needed in enumerate(needs):
            self._require_unclaimed(index, needed, match)

    def _surely_can(self, needs: list[int], most_claimed: int) -> bool:
        """Say whether pools have so many blocks, free or evictable, even if a match of so many columns holds all."""
        of_full = self.tree.num_evictable if self.has_full else 0
        for index, (pool, sharers, num_groups) in enumerate(self._sharing):
            can = pool.num_free + of_full - most_claimed * num_groups
            for group in sharers:
                can += group.num_evictable
            if needs[index] > can:
                return False
            of_full = 0
        return True

    def _require_unclaimed(self, index: int, needed: int, match: Match | None) -> None:
        pool = self.pools[index]
        free, evictable = pool.num_free, self.tree.evictable_in(pool)
        held = pool.num_blocks - free - evictable
        if match is not None:
            evictable -= self.num_claimed(pool, match)
        if needed <= free + evictable:
            return
        can, group = free + evictable, self._first_group[index]
        raise OutOfBlocks(
            f"group {group} needs {needed} blocks, but only {can} are free or evictable "
            f"({held} held by {self._holders()})",
            needed=needed,
            free=free,
            evictable=evictable,
            held=held,
            group=group,
        )

    def num_claimed(self, pool: BlockPool, match: Match) -> int:
        """Count the evictable blocks of a pool that a sequence with this match would hold."""
        claimed = 0
        if pool is self.tree.full_pool:
            claimed = self.tree.num_evictable_on(match.extent)
            if match.child is not None and not match.child.references:
                claimed += match.child_blocks
        num_columns = match.position // self.tree.block_bytes
        for group in self.linear:
            if group.pool is pool:
                claimed += group.num_unheld(self.blocks_in_span(group, match.bottom, num_columns))
        return claimed

    def blocks_in_span(self, group: SpannedGroup, extent: Extent, num_columns: int) -> NDArray[np.int32]:
        """Return a group's blocks that a sequence needs after a prefix, which ends inside an extent."""
        first, num_sinks = group.span.first_block(num_columns * self.block_size), group.span.num_sink_blocks
        parts = []
        node = extent
        while node.parent is not None and (node.start + node.blocks.shape[1] > first or num_sinks):
            column = node.blocks[group.index]
            parts.append(column[max(first - node.start, 0) : max(num_columns - node.start, 0)])
            if node.start < num_sinks:
                parts.append(column[: max(min(num_sinks, num_columns, first) - node.start, 0)])
            node = node.parent
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def _holders(self) -> str:
        """Count who holds blocks, and name the sequences that hold most."""
        sequences = sorted(self.rows.running(), key=lambda sequence: -sequence.num_blocks)
        largest = ", ".join(f"row {sequence.row} with {sequence.num_blocks}" for sequence in sequences[:3])
        counts = f"{len(sequences)} sequences and {len(self.pins)} pins"
        return f"{counts}: {largest}{', ...' if len(sequences) > 3 else ''}" if sequences else counts

    # -- blocks -------------------------------------------------------------------------------------------------------

    def fill(self, row: int, start: int, end: int, num_computed: int | None = None) -> None:
        """Give the row new blocks at columns start .. end-1 of all tables that grow; there must be as many.

        Sliding groups get no more than the next chunk after `num_computed` tokens needs, where that is given.
        """
        if num_computed is None:
            self.make_room(self.needs_between(start, end))
        if self.has_full:
            self.take_into(0, row, start, end)
        stop, ends_of = end, self.rows.ends_of
        if self.max_chunk_tokens and num_computed is not None:
            stop = self.chunk_end(self.rows.tokens_of[row], num_computed)
        for group in self.sliding:
            index = group.index
            self.take_into(index, row, start, stop)
            ends_of[index][row] = stop
        for group in self.rings:
            stop = min(end, rings.geometry(group).num_blocks)
            if stop > start:
                self.take_into(group.index, row, start, stop)
            self.rows.ends_of[group.index][row] = stop
        self.rows.blocks_of[row] = end

    def give_row(self, row: int, keep: int) -> None:
        """Give back the row's blocks from column `keep` on; they must be its own."""
        have = self.rows.blocks_of[row]
        if have > keep:
            if self.has_full:
                own = self.rows.block_table[0, row, keep:have]
                self.pools[0].give(own)
                own[:] = 0
            if self.linear:
                holdings.give_own(self, row, keep)
            self.rows.blocks_of[row] = keep

    def own_blocks(self, sequence: Sequence) -> list[set[int]]:
        """Return the ids of the blocks that are a sequence's own, by group."""
        published, row = self.rows.published_of[sequence.row], sequence.row
        own = []
        for group, span in enumerate(self.spans):
            start = 0 if span.kind in ("state", "cross") else published
            own.append(set(self.rows.block_table[group, row, start : self.rows.ends_of[group][row]].tolist()))
        for ring in self.rings:
            columns = holdings.own_columns(self, ring, row, self.rows.ends_of[ring.index][row])
            own[ring.index] = set(self.rows.block_table[ring.index, row, columns].tolist())
        return own

    def end(self, sequence: Sequence, *, publish: bool) -> None:
        """Give back all that a sequence holds: its blocks, its row, its place in the tree; publish first, if asked."""
        row, rows = sequence.row, self.rows
        if self.linear and sequence.leader is None:
            holdings.release_shared(self, sequence)
        if publish and sequence.publishes:
            self._publish_last(sequence)
        keep, have = rows.published_of[row], rows.blocks_of[row]
        if have > keep and self.has_full:
            self.pools[0].give(rows.table_of[0][row][keep:have])
        if not self.is_plain:
            self._end_in_groups(sequence)
        self._due_rows.discard(row)
        rows.close(sequence)
        self.tree.release(sequence._extent)

    def _end_in_groups(self, sequence: Sequence) -> None:
        row = sequence.row
        holdings.give_all_own(self, row)
        if self.recurrent is not None:
            recurrent.give_states(self, sequence)
        if self.cross is not None:
            self.leave_encoder(sequence)

    def leave_encoder(self, sequence: Sequence) -> None:
        """Let a sequence leave its encoder's blocks, which go with the last that has them."""
        encoder = sequence._encoder
        if encoder is None or self.cross is None:
            return
        self.end_encoder_hold(encoder)
        sequence._encoder = None
        self.rows.block_table[self.cross, sequence.row, : len(encoder.blocks)] = 0
        self.rows.ends_of[self.cross][sequence.row] = 0

    def end_encoder_hold(self, encoder: Encoder) -> None:
        """End one hold of an encoder's blocks, which go with the last."""
        encoder.num_holders -= 1
        if not encoder.num_holders and self.cross is not None:
            self.group_pools[self.cross].give(encoder.blocks)

    def join_encoder(self, sequence: Sequence, encoder: Encoder | None) -> None:
        """Let a sequence share an encoder's blocks."""
        if encoder is None or self.cross is None:
            return
        encoder.num_holders += 1
        sequence._encoder = encoder
        num_blocks = len(encoder.blocks)
        self.rows.block_table[self.cross, sequence.row, :num_blocks] = encoder.blocks
        self.rows.ends_of[self.cross][sequence.row] = num_blocks

    def make_room(self, needs: list[int]) -> None:
        """Evict so that this many blocks of each pool are free; so many must be free or evictable."""
        for index, needed in enumerate(needs):
            pool = self.pools[index]
            missing = needed - pool.num_free
            if missing > 0:
                if self._num_groups[index] == 1:
                    self.counters.groups[self._first_group[index]].num_reallocated += missing
                else:
                    self._num_evicted_for[index] += missing
                self.tree.evict(pool, missing)

    def take(self, group: int, n: int) -> NDArray[np.int32]:
        """Take n free blocks for a group, and count them; returns a view that holds only until the next `give`."""
        self.counters.groups[group].num_allocated += n
        if self._shares_pools:
            self._count_reallocated(group, n)
        return self.group_pools[group].take(n)

    def take_into(self, group: int, row: int, start: int, end: int) -> None:
        """Take free blocks for columns start .. end-1 of a group's table, and count them."""
        self.counters.groups[group].num_allocated += end - start
        if self._shares_pools:
            self._count_reallocated(group, end - start)
        self.group_pools[group].take_into(self.rows.table_of[group][row], start, end)

    def _count_reallocated(self, group: int, n: int) -> None:
        """Count those of n blocks taken by a group that were evicted for it, or for others that share its pool."""
        index = self.pool_of[group]
        evicted = min(self._num_evicted_for[index], n)
        self.counters.groups[group].num_reallocated += evicted
        self._num_evicted_for[index] -= evicted

    def order_move(self, source: int, destination: int, num_tokens: int, group: int = 0) -> None:
        """Order a copy, unless the block already is where it should be."""
        if source != destination:
            self.moves.append(Move(source, destination, num_tokens, group))

    def order(self, order: Order) -> None:
        """Order copies of whole blocks, between tiers or to stores."""
        self.moves.append(order)

    def note_filled(self, extent: Extent, group: int, columns: NDArray[np.intp]) -> None:
        """Tell who listens that an extent of the device has blocks of a group in columns where it had none."""
        if self.recorder is not None:
            self.recorder.stored_in(extent, group, columns, DEVICE)
        if self.keeper is not None:
            self.keeper.filled(extent, group, columns)
        if self.copies is not None and len(columns):
            self.copies.filled(extent, group, columns)

    def _note_published(self, extent: Extent, first: int, end: int) -> None:
        """Tell slower tiers of blocks first .. end-1 of the prefix that ends with an extent, which are new there."""
        if self.keeper is not None:
            self.keeper.committed(extent, first, end)
        if self.copies is not None:
            self.copies.committed(extent, first, end)

    def _keep_sources(self, source_blocks: Blocks, column: int, row: int, groups: list[SpannedGroup]) -> None:
        """Let groups that draw from one pool exchange new blocks, so that each gets its own source if that is one.

        Sources may have been evicted for this very column: then a copy into one group's must not destroy another's.
        """
        table, ends_of = self.rows.block_table, self.rows.ends_of
        filled = [group.index for group in groups if column < ends_of[group.index][row]]  # a ring has no such column
        growing = [0, *filled] if self.has_full else filled
        for group in growing:
            source = source_blocks.item(group)
            for other in growing:
                is_there = self.pool_of[other] == self.pool_of[group] and table.item(other, row, column) == source
                if other != group and is_there:
                    table[other, row, column] = table.item(group, row, column)
                    table[group, row, column] = source

    def order_column_moves(
        self, source_blocks: Blocks, column: int, row: int, num_tokens: int, *, skip_rings: bool = False
    ) -> None:
        """Order copies of the first tokens of a block in each group, `source_blocks` `[groups]`, to a row's column."""
        table, groups = self.rows.block_table, self.sliding if skip_rings else self.linear
        if len(self.pools) < len(self.spans):
            self._keep_sources(source_blocks, column, row, groups)
        if self.has_full:
            self.order_move(source_blocks.item(0), table.item(0, row, column), num_tokens)
        for group in groups:
            index = group.index
            self.order_move(source_blocks.item(index), table.item(index, row, column), num_tokens, index)

    # -- publishing ---------------------------------------------------------------------------------------------------

    def note_committed(self, row: int, num_computed: int) -> None:
        """Note that one row has more computed tokens, so many in all."""
        if num_computed >= self.rows.due_of[row]:
            self._due_rows.add(row)
        if self.sliding:
            self._slides_due = True

    def note_rows_committed(self) -> None:
        """Note that any row may have more computed tokens."""
        self._any_row_due = True
        self._slides_due = bool(self.sliding)

    def publish_committed(self) -> bool:
        """Put every full committed block into the tree, and say whether there may have been any."""
        if not self._any_row_due and not self._due_rows:
            return False
        due = self._take_due_rows()
        for row in due:
            self.publish(self.rows.sequence_at(row))
        return bool(due)

    def publish_along(self, match: Match) -> bool:
        """Publish the rows whose committed blocks may lengthen a match, and say whether there were any.

        These go on from an extent on its path; all others can wait, so that an admission into a full batch costs what
        concerns it.
        """
        if not self._any_row_due and not self._due_rows:
            return False
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
        if sequence.publishes:
            self._publish_listed(sequence, start, end)
        else:
            tokens = rows.token_bytes(sequence, start * self.block_size, end * self.block_size)
            blocks = holdings.as_tree_blocks(self, sequence, start, end)
            sequence._extent = self.tree.insert_unlisted(sequence._extent, tokens, blocks)
            self._adopt(sequence, blocks, start, held=True)
            rows.set_published(sequence, end)
        if sequence._checkpoints:
            sequence._checkpoints = [each for each in sequence._checkpoints if each[0] >= end]

    def _publish_listed(self, sequence: Sequence, start: int, end: int) -> None:
        for stop, keep in sequence._keeps(start, end):
            existing, blocks = self._insert(sequence, start, stop, stop * self.block_size, keep)
            if existing:
                self._rebase(sequence, start, existing, stop, blocks)
            if self.spanned:
                self._adopt(sequence, blocks[:, existing:], start + existing, held=True)
            if self.tree.has_tiers:
                self._note_published(sequence._extent, start + existing, stop)
            self.rows.set_published(sequence, stop)
            start = stop

    def _publish_last(self, sequence: Sequence) -> None:
        """Publish all that is computed, a partly filled last block too, of a sequence that ends and holds no more."""
        rows, row, block_size = self.rows, sequence.row, self.block_size
        start, computed = rows.published_of[row], rows.computed_of[row]
        if self.recurrent is not None:
            recurrent.keep_last_state(self, sequence)
        if not self.tree.partial:
            computed -= computed % block_size
        end = -(-computed // block_size)
        if end <= start:
            return
        for stop, keep in sequence._keeps(start, end):
            end_token = computed if stop == end else stop * block_size
            existing, blocks = self._insert(sequence, start, stop, end_token, keep)
            if existing:
                self.counters.num_shared_blocks += existing
                if self.is_plain:
                    self.pools[0].give(blocks[0, :existing])
                else:
                    holdings.merge(self, sequence, start, existing, blocks, held=False)
            if self.spanned:
                new = blocks[:, existing:] if existing else blocks
                holdings.adopt(self, sequence._extent, new, held=False)
                self.tree.offer_spare(sequence._extent, start + existing)
            if self.tree.has_tiers:
                self._note_published(sequence._extent, start + existing, min(stop, computed // block_size))
            rows.published_of[row] = start = stop
        if self.recurrent is not None:
            sequence._checkpoints.clear()

    def _insert(self, sequence: Sequence, start: int, stop: int, end_token: int, keep: Keep) -> tuple[int, Blocks]:
        """Put a row's blocks start .. stop-1 into the tree; returns how many leading ones it did not take, and all."""
        tokens = self.rows.token_bytes(sequence, start * self.block_size, end_token)
        if self.is_plain:
            blocks: Blocks = self.rows.columns_of[sequence.row][:, start:stop]
            sequence._extent, existing = self.tree.insert(sequence._extent, tokens, blocks, keep)
        else:
            has_holes = holdings.has_holes(self, sequence, start)
            if has_holes or self.rings:
                blocks = holdings.as_tree_blocks(self, sequence, start, stop)
            else:
                blocks = self.rows.columns_of[sequence.row][:, start:stop].copy()
            apart = start == sequence.prompt_boundary
            sequence._extent, existing = self.tree.insert(
                sequence._extent, tokens, blocks, keep, apart=apart, has_holes=has_holes
            )
        return existing, blocks

    def _adopt(self, sequence: Sequence, blocks: Blocks, first: int, *, held: bool) -> None:
        if self.spanned:
            holdings.adopt(self, sequence._extent, blocks, held=held)
            self.tree.offer_spare(sequence._extent, first)

    def _rebase(self, sequence: Sequence, start: int, existing: int, end: int, blocks: Blocks) -> None:
        """Replace the row's blocks whose content was in the tree already by the tree's, and give its own back."""
        if self.is_plain:
            self._rebase_plain(sequence, start, existing, end)
        else:
            holdings.merge(self, sequence, start, existing, blocks, held=True)
        self.rows.version[sequence.row] += 1
        self.counters.num_shared_blocks += existing
        for beam in sequence._waiting_beams():
            self.show_leaders_blocks(beam)

    def _rebase_plain(self, sequence: Sequence, start: int, existing: int, end: int) -> None:
        table = self.rows.block_table[:, sequence.row]
        own: np.ndarray[tuple[int], np.dtype[np.int32]] = table[0, start : start + existing].copy()
        extent = sequence._extent
        while end > start and extent.parent is not None:
            first = end - extent.num_blocks
            table[:, max(first, start) : end] = extent.blocks[:, max(start - first, 0) :]
            extent, end = extent.parent, first
        self.pools[0].give(own)

    def show_leaders_blocks(self, beam: Sequence) -> None:
        """Show the full blocks of a leader's prompt in the row of a beam that waits for it."""
        rows, leader = self.rows, beam.leader
        assert leader is not None
        num_full = rows.num_published.item(beam.row)
        if self.has_full:
            rows.block_table[0, beam.row, :num_full] = rows.block_table[0, leader.row, :num_full]
        for group in self.linear:
            if group.span.ring is not None and rows.wrapped[leader.row]:
                continue
            index = group.index
            rows.block_table[index, beam.row, :num_full] = rows.block_table[index, leader.row, :num_full]
            rows.firsts_of[index][beam.row] = min(rows.firsts_of[index][leader.row], num_full)
        rows.version[beam.row] += 1
