"""Makes moves between tiers, in order, on streams of their own: what depends on a copy waits for it, the host does not.

Rules that must not be broken, with their reasons:

- A copy is queued behind all that the compute stream was given before: it may still write the source, or read what the
  destination held.
- A copy waits for writes of what it reads, and for writes and reads of what it writes, by tier, pool and block; never
  for less, since copies on several streams end in any order.
- What reads a block whose write failed or was cancelled fails as well: contents are right, or said to be missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kvist.core.moves import BlockMoves, Move
from kvist.errors import TransferError
from kvist.memory.layout import BlockLayout
from kvist.memory.transfers.devices import COMPUTE, Device, Event
from kvist.memory.transfers.hazards import Blocks, Hazards
from kvist.memory.transfers.jobs import Ids, Job, Pairs, paired, token_pairs
from kvist.memory.transfers.orders import STREAMS, Order, Places

__all__ = ["MovesFailed", "Transfer", "TransferManager"]

_Moves = Sequence[Move | BlockMoves]


class MovesFailed(TransferError):
    """Some moves were not made; `moves` lists them. Their destinations hold nothing, all others what they should."""

    def __init__(self, failed: Sequence[tuple[Order, str]]) -> None:
        self.failed = failed
        self.moves = [move for order, _ in failed for move in order.moves]
        first, cause = self.moves[0], failed[0][1]
        more = f", and {len(self.moves) - 1} more" if len(self.moves) > 1 else ""
        super().__init__(
            f"block {first.source} of group {first.group} was not copied from {first.source_tier} to block "
            f"{first.destination} of {first.destination_tier}{more}: {cause}"
        )


@dataclass(slots=True, eq=False)
class Transfer:
    """Moves that need not start at once; until they have, they can be cancelled."""

    orders: Sequence[Order]
    state: str = "queued"
    """ "queued", "started" or "cancelled"."""

    def cancel(self) -> bool:
        """Make no move of these, unless they have started; returns whether they are cancelled.

        Their destinations then hold nothing, and moves that would read them fail.
        """
        if self.state == "queued":
            self.state = "cancelled"
        return self.state == "cancelled"


@dataclass(slots=True, eq=False)
class _Started:
    """A copy under way, and those whose results it reads."""

    order: Order
    stream: str
    event: Event
    sources: list[_Started]

    @property
    def cause(self) -> str | None:
        """Why it failed, or None."""
        if self.event.error is not None:
            return str(self.event.error)
        return "its source was not written" if any(source.cause for source in self.sources) else None


class TransferManager:
    """Makes moves between the tiers "device" and "host", and within "device".

    `planes` has for each tier and group the planes of the group's layout, uint8 `[num_blocks, plane_bytes]` each;
    `pool_of` for each tier the pool of each group: groups of one pool share their blocks. Nothing that is called waits
    for copies but `wait_for` and `finish`. Calls that start or look after copies raise `MovesFailed` for those that
    were found to have failed since the last call, after having done their own work.
    """

    def __init__(
        self,
        device: Device,
        layouts: Sequence[BlockLayout],
        planes: Mapping[str, Sequence[Sequence[Tensor]]],
        pool_of: Mapping[str, Sequence[int]],
    ) -> None:
        self._device = device
        self._layouts = layouts
        self._planes = planes
        self._places = places = Places(layouts, planes, pool_of)
        self._hazards = Hazards(places.pool_num_blocks(), list(dict.fromkeys(STREAMS.values())))
        self._pairs: dict[tuple[int, int | None, str, str], Pairs] = {}
        self._queue: deque[Transfer] = deque()
        self._started: dict[int, _Started] = {}
        self._last_ticket = 0
        self._unsynced: dict[str, Event] = {}
        self._failed: list[tuple[Order, str]] = []
        device.adopt(plane for groups in planes.values() for group in groups for plane in group)

    # ---- moves ------------------------------------------------------------------------------------------------------

    @property
    def num_under_way(self) -> int:
        """Copies that were started and not yet seen to be done."""
        return len(self._started)

    def perform(self, moves: _Moves) -> None:
        """Start moves now, in order, after all that the compute stream was given so far.

        Raises `ArgumentError`, before anything is copied, for a move that names a tier, group, block or token that is
        not there.
        """
        orders = self._places.orders(moves)
        self._start_before(orders)
        self._start(orders)
        self._report()

    def queue(self, moves: _Moves) -> Transfer:
        """Take moves that may start later: in `poll` or `sync`, or when something else needs them to have started.

        The compute stream writes none of these blocks before the next `sync`.
        """
        transfer = Transfer(self._places.orders(moves))
        self._queue.append(transfer)
        return transfer

    def poll(self, max_under_way: int = 2) -> None:
        """Look which copies are done, and start queued ones while fewer than `max_under_way` are not."""
        self._retire()
        for _ in range(max_under_way - len(self._started)):
            if self._queue:
                self._start_next()
        self._report()

    def sync(self) -> None:
        """Start what is queued, and make the compute stream wait for all copies; the host does not wait."""
        self._start_queued()
        for event in self._unsynced.values():
            self._device.wait(COMPUTE, event)
        self._unsynced.clear()
        self._retire()
        self._report()

    # ---- blocks -----------------------------------------------------------------------------------------------------

    def is_ready(self, tier: str, group: int, block: int) -> bool:
        """Say whether all that was to be written into a block by moves is there."""
        self._retire()
        books, ids = self._books(tier, group), np.array([block], np.int64)
        if any(self._writes(transfer, tier, group, block) for transfer in self._queue):
            return False
        return not books.lost[block] and not any(
            ticket in self._started for ticket in self._hazards.writers(books, ids)
        )

    def require_written(self, tier: str, group: int, blocks: Sequence[int] | Ids) -> None:
        """Make the host wait for these blocks, as `wait_for` does, and raise TransferError if one holds nothing."""
        self.wait_for(tier, group, blocks)
        ids = np.asarray(blocks, np.int64)
        lost = ids[self._books(tier, group).lost[ids]]
        if len(lost):
            raise TransferError(
                f"blocks {lost.tolist()} of group {group} in {tier} hold nothing: a copy to them failed"
            )

    def forget(self, tier: str, group: int, blocks: Sequence[int] | Ids) -> None:
        """Take blocks whose move failed for free ones: who takes them next writes before reading."""
        self._books(tier, group).lost[np.asarray(blocks, np.int64)] = False

    def wait_for(self, tier: str, group: int, blocks: Sequence[int] | Ids) -> None:
        """Make the host wait until no copy reads or writes these blocks, so that it may do so itself."""
        ids = np.asarray(blocks, np.int64)
        self._start_queued()
        for ticket in self._hazards.users(self._books(tier, group), ids):
            if ticket in self._started:
                self._started[ticket].event.wait()
        self._retire()
        self._report()

    def finish(self) -> None:
        """Make the host wait until all copies are done."""
        self._start_queued()
        for started in self._started.values():
            started.event.wait()
        self._retire()
        self._report()

    # ---- starting ---------------------------------------------------------------------------------------------------

    def _start_queued(self) -> None:
        while self._queue:
            self._start_next()

    def _start_next(self) -> None:
        transfer = self._queue.popleft()
        if transfer.state == "cancelled":
            for order in transfer.orders:
                self._lose(order)
            return
        transfer.state = "started"
        self._start(transfer.orders)

    def _start_before(self, orders: Sequence[Order]) -> None:
        """Start the queued moves that these must follow, and those queued before them."""
        meeting = [number for number, transfer in enumerate(self._queue, 1) if self._meet(transfer.orders, orders)]
        for _ in range(meeting[-1] if meeting else 0):
            self._start_next()

    def _start(self, orders: Sequence[Order]) -> None:
        self._retire()
        computed: Event | None = None
        behind: set[str] = set()
        for order in orders:
            stream = STREAMS[order.source_tier, order.destination_tier]
            if stream not in behind:
                computed = computed or self._device.record(COMPUTE)
                self._device.wait(stream, computed)
                behind.add(stream)
            self._issue(order, stream)

    def _issue(self, order: Order, stream: str) -> None:
        source, destination = self._sides(order)
        lost = source.lost[order.sources]
        if lost.any():
            self._fail(order.part(lost), "its source was not written")
            order = order.part(~lost)
        if not len(order.sources):
            return
        for ticket in self._hazards.before(source, order.sources, destination, order.destinations):
            before = self._started.get(ticket)
            if before is not None and before.stream != stream:
                self._device.wait(stream, before.event)
        try:
            event = self._device.copy(stream, self._job(order))
        except Exception as error:  # whatever it is, the destination holds nothing that may be read
            self._fail(order, f"{type(error).__name__}: {error}")
            return
        self._note(order, stream, event, source, destination)

    def _note(self, order: Order, stream: str, event: Event, source: Blocks, destination: Blocks) -> None:
        """Write down a copy that was started; one that is done already leaves nothing but its result."""
        writers = self._hazards.writers(source, order.sources)
        read = [self._started[ticket] for ticket in writers if ticket in self._started]
        if event.done and event.error is None and not read:
            destination.lost[order.destinations] = False
            return
        self._last_ticket = ticket = self._last_ticket + 1
        self._hazards.note(ticket, stream, source, order.sources, destination, order.destinations)
        self._started[ticket] = _Started(order, stream, event, read)
        self._unsynced[stream] = event

    def _job(self, order: Order) -> Job:
        key = order.group, order.num_tokens, order.source_tier, order.destination_tier
        pairs = self._pairs.get(key)
        if pairs is None:
            layout = self._layouts[order.group]
            sides = self._planes[order.source_tier][order.group], self._planes[order.destination_tier][order.group]
            whole = order.num_tokens is None
            pairs = token_pairs(*sides, layout) if whole else paired(*sides, layout, order.num_tokens)
            self._pairs[key] = pairs
        return Job(pairs, order.sources, order.destinations, order.offsets, order.overlaps)

    # ---- ending -----------------------------------------------------------------------------------------------------

    def _retire(self) -> None:
        """Let go of copies that are done; on each stream they end in order."""
        busy: set[str] = set()
        for ticket, started in list(self._started.items()):
            if started.stream in busy or not started.event.done:
                busy.add(started.stream)
                continue
            cause = started.cause
            if cause is not None:
                self._failed.append((started.order, cause))
                _, destination = self._sides(started.order)
                ids = started.order.emptied
                destination.lost[ids[destination.written[ids] == ticket]] = True
            del self._started[ticket]

    def _fail(self, order: Order, cause: str) -> None:
        self._failed.append((order, cause))
        self._lose(order)

    def _lose(self, order: Order) -> None:
        self._sides(order)[1].lost[order.emptied] = True

    def _report(self) -> None:
        failed, self._failed = self._failed, []
        if failed:
            raise MovesFailed(failed)

    # ---- what moves name --------------------------------------------------------------------------------------------

    def _books(self, tier: str, group: int) -> Blocks:
        return self._hazards.of(tier, self._places.pool_of[tier][group])

    def _sides(self, order: Order) -> tuple[Blocks, Blocks]:
        return self._books(order.source_tier, order.group), self._books(order.destination_tier, order.group)

    def _writes(self, transfer: Transfer, tier: str, group: int, block: int) -> bool:
        books = self._books(tier, group)
        return any(self._sides(order)[1] is books and block in order.destinations for order in transfer.orders)

    def _meet(self, first: Iterable[Order], second: Sequence[Order]) -> bool:
        """Say whether one writes what the other reads or writes."""
        return any(self._meets(one, other) or self._meets(other, one) for one in first for other in second)

    def _meets(self, one: Order, other: Order) -> bool:
        """Say whether the first writes what the second reads or writes."""
        written = self._sides(one)[1]
        used = zip(self._sides(other), (other.sources, other.destinations), strict=True)
        return any(books is written and bool(np.isin(one.destinations, ids).any()) for books, ids in used)
