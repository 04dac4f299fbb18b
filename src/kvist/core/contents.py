"""Which content is in which tier: as events tell it, or as it is, so that the two can be compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from kvist.core.events import Cleared, Created, Event, Moved, Removed, Stored, Updated
from kvist.core.extents import Blocks, Extent, Namespace
from kvist.core.lower import DEVICE, HOST
from kvist.core.recording import PUBLISHED, EventRecorder
from kvist.core.state import CacheState

__all__ = ["Contents", "Snapshot", "contents_of", "snapshot_of"]

Place = tuple[str, int]
"""A tier and a group."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that is cached at one moment, as `events` that store it. The next event of the log has the id `next_id`."""

    epoch: int
    next_id: int
    events: tuple[Event, ...]


class Contents:
    """What is cached where, built from events: the digests of blocks by namespace, tier and group.

    >>> contents = Contents()
    >>> contents.fold([])
    >>> contents.digest() == Contents().digest()
    True
    """

    def __init__(self) -> None:
        self.blocks: dict[Namespace, dict[Place, set[bytes]]] = {}
        self.epoch: int | None = None
        self.next_id: int | None = None

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot) -> Contents:
        """Begin with what a snapshot tells."""
        contents = cls()
        contents.fold(snapshot.events)
        contents.epoch, contents.next_id = snapshot.epoch, snapshot.next_id
        return contents

    def fold(self, events: Iterable[Event]) -> None:
        """Take events in, in their order."""
        for event in events:
            if isinstance(event, Cleared):
                self._clear(event.namespace)
            elif isinstance(event, Stored):
                self._place(event.namespace, (event.tier, event.group)).update(_named(event))
            elif isinstance(event, Removed):
                self._remove(event.namespace, (event.tier, event.group), _named(event))
            elif isinstance(event, Moved):
                named = _named(event)
                self._remove(event.namespace, (event.source_tier, event.group), named)
                self._place(event.namespace, (event.tier, event.group)).update(named)

    def follow(self, events: Iterable[Event]) -> bool:
        """Take events in that go on from what has been taken in; returns False, and stops, where some are missing.

        Then a snapshot is needed, or the events in between. Events from before a snapshot are skipped.
        """
        for event in events:
            is_known = self.epoch == event.epoch and self.next_id is not None
            if not is_known and not isinstance(event, Created):
                return False
            if is_known and self.next_id is not None and event.id < self.next_id:
                continue
            if is_known and event.id != self.next_id:
                return False
            self.fold([event])
            self.epoch, self.next_id = event.epoch, event.id + 1
        return True

    def num_blocks(self, tier: str, group: int = 0) -> int:
        """Count the blocks of a group in a tier."""
        return sum(len(places.get((tier, group), ())) for places in self.blocks.values())

    def digest(self) -> str:
        """Return SHA-256 in hex over all of it, in an order of its own."""
        sha = sha256()
        for namespace in sorted(self.blocks, key=repr):
            for place in sorted(self.blocks[namespace]):
                if digests := self.blocks[namespace][place]:
                    sha.update(repr((namespace, place, len(digests))).encode())
                    sha.update(b"".join(sorted(digests)))
        return sha.hexdigest()

    def _clear(self, namespace: Namespace | None) -> None:
        if namespace is None:
            self.blocks.clear()
        else:
            self.blocks.pop(namespace, None)

    def _add(self, namespace: Namespace, tier: str, blocks: Blocks, digests: list[bytes]) -> None:
        """Add the blocks `[num_groups, n]` of a tier that have these digests, -1 for those that are not there."""
        for group, column in enumerate(blocks[:, : len(digests)]):
            present = np.flatnonzero(column >= 0).tolist()
            if present:
                self._place(namespace, (tier, group)).update(digests[at] for at in present)

    def _remove(self, namespace: Namespace, place: Place, named: list[bytes]) -> None:
        """Take blocks away; what is empty then goes, too: namespaces come and go without end."""
        there = self._place(namespace, place)
        there.difference_update(named)
        if not there:
            places = self.blocks[namespace]
            del places[place]
            if not places:
                del self.blocks[namespace]

    def _place(self, namespace: Namespace, place: Place) -> set[bytes]:
        return self.blocks.setdefault(namespace, {}).setdefault(place, set())


def _named(event: Stored | Removed | Moved | Updated) -> list[bytes]:
    """List the digests of the blocks that an event is about."""
    digests = event.digests
    columns = None if isinstance(event, Updated) else event.columns
    return digests if columns is None else [digests[column] for column in columns]


def snapshot_of(state: CacheState) -> Snapshot:
    """Return all that is cached now, as events that store it."""
    recorder = state.recorder
    assert recorder is not None
    writer = EventRecorder(recorder.chain, state.spans, recorder.epoch)
    for tier, extents in ((DEVICE, list(state.tree.extents())), (HOST, state.lower_extents())):
        for extent in extents:
            writer.stored(extent, 0, tier, PUBLISHED)
    if state.copies is not None:
        for extent in state.copies.extents():
            writer.stored(extent, 0, HOST, PUBLISHED, state.copies.of(extent))
    return Snapshot(recorder.epoch, recorder.next_id, tuple(writer.take()))


def contents_of(state: CacheState) -> Contents:
    """Return what is cached now, found without events: digests are made anew from the tokens of the tree."""
    contents, chain = Contents(), state.chain
    for root in state.tree.roots.values():
        waiting: list[tuple[Extent, bytes, str]] = [
            *((child, chain.root(root.namespace), DEVICE) for child in (root.children or {}).values()),
            *((child, chain.root(root.namespace), HOST) for child in (root.lower or {}).values()),
        ]
        while waiting:
            extent, before, tier = waiting.pop()
            digests = chain.extend(before, extent.tokens)
            held = [(tier, extent.blocks)]
            if state.copies is not None and tier == DEVICE:
                held.append((HOST, state.copies.of(extent)))
            for where, blocks in held:
                contents._add(root.namespace, where, blocks, digests)
            last = digests[-1] if digests else before
            waiting += [(child, last, tier) for child in (extent.children or {}).values()]
            waiting += [(child, last, HOST) for child in (extent.lower or {}).values()]
    return contents
