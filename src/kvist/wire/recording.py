"""From Kvist's events to neutral records: the blocks of runs get names, and say all that others need to index them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from struct import unpack
from typing import Any

from kvist.core.events import Cleared, Created, Event, Moved, Removed, Stored, Updated
from kvist.core.tokens import TOKEN_BYTES
from kvist.wire.naming import RunNames, media_of
from kvist.wire.narrowing import STORED_FIELDS
from kvist.wire.records import (
    AllCleared,
    CreatedPools,
    MovedBlocks,
    Record,
    RemovedBlocks,
    StoredBlocks,
    UpdatedBlocks,
)

__all__ = ["Recorder"]


class Recorder:
    """Turns events of one log into records, in order; `names` says what blocks are called.

    What a group is, it learns from the `Created` events, which may also be given as `groups` to one that begins late.
    An event of which a group has only some blocks becomes a record for each stretch of them, so that names and tokens
    always belong to each other; all of these have its id. `clock` gives records their time, in seconds since 1970.
    """

    def __init__(
        self,
        names: RunNames | None = None,
        *,
        groups: Iterable[Created] = (),
        worker: str = "",
        rank: int | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._names = names or RunNames()
        self._groups = {each.group: each for each in groups}
        self._worker, self._rank, self._clock = worker, rank, clock
        self._makers: dict[type[Event], Callable[[Any, float | None], Iterable[Record]]] = {
            Stored: self._stored,
            Moved: self._moved,
            Removed: self._removed,
            Updated: self._updated,
            Cleared: self._cleared,
            Created: self._created,
        }

    def records(self, events: Iterable[Event]) -> list[Record]:
        """Return the records of some events."""
        time_s = None if self._clock is None else self._clock()
        found: list[Record] = []
        for event in events:
            found += self._makers[type(event)](event, time_s)
        return found

    def _stored(self, event: Stored, time_s: float | None) -> Iterator[Record]:
        for first, end in _stretches(event.first, event.end, event.columns):
            yield self._placed(event, first, end, time_s, (event.priority,) * (end - first))

    def _moved(self, event: Moved, time_s: float | None) -> Iterator[Record]:
        for first, end in _stretches(event.first, event.end, event.columns):
            placed = self._placed(event, first, end, time_s, ())
            told = {name: getattr(placed, name) for name in STORED_FIELDS}
            yield MovedBlocks(**told, source_tier=event.source_tier)

    def _placed(
        self, event: Stored | Moved, first: int, end: int, time_s: float | None, priorities: tuple[int, ...]
    ) -> StoredBlocks:
        """Return a record of blocks that are in a tier now, with all that is needed to index them."""
        run, names, group = event.run, self._names, self._groups.get(event.group)
        size, scope = len(run.tokens) // run.num_blocks, names.scope(run.namespace)
        media, extra_ids = media_of(run, first, end) if run.marks or run.parent is not None else ((), ())
        content = run.tokens[first * size : end * size]
        return StoredBlocks(
            worker=self._worker, rank=self._rank, id=event.id, epoch=event.epoch, time_s=time_s,
            hashes=names.of(run, first, end), parent=names.before(run, first),
            tokens=unpack(f"={len(content) // TOKEN_BYTES}i", content), block_size=size // TOKEN_BYTES,
            group=event.group, tier=event.tier, start=run.start + first, kind=None if group is None else group.kind,
            window=None if group is None else group.window, extra_ids=extra_ids, media=media, lora_id=scope.lora_id,
            lora_name=scope.lora_name, salt=scope.salt, namespace=run.namespace, hash_name=names.hash_name,
            reason=event.reason, priorities=priorities,
        )  # fmt: skip

    def _removed(self, event: Removed, time_s: float | None) -> Iterator[Record]:
        group = self._groups.get(event.group)
        hashes = [
            each
            for first, end in _stretches(event.first, event.end, event.columns)
            for each in self._names.of(event.run, first, end)
        ]
        yield RemovedBlocks(
            worker=self._worker, rank=self._rank, id=event.id, epoch=event.epoch, time_s=time_s,
            hashes=tuple(hashes), group=event.group, tier=event.tier, kind=None if group is None else group.kind,
            window=None if group is None else group.window, namespace=event.run.namespace,
            hash_name=self._names.hash_name, reason=event.reason,
        )  # fmt: skip

    def _updated(self, event: Updated, time_s: float | None) -> Iterator[Record]:
        group = self._groups.get(event.group)
        yield UpdatedBlocks(
            worker=self._worker, rank=self._rank, id=event.id, epoch=event.epoch, time_s=time_s,
            hashes=self._names.of(event.run, event.first, event.end), group=event.group,
            window=None if group is None else group.window, old_priority=event.old_priority,
            priority=event.priority, namespace=event.run.namespace, hash_name=self._names.hash_name,
        )  # fmt: skip

    def _cleared(self, event: Cleared, time_s: float | None) -> Iterator[Record]:
        yield AllCleared(
            worker=self._worker, rank=self._rank, id=event.id, epoch=event.epoch, time_s=time_s,
            namespace=event.namespace, reason=event.reason,
        )  # fmt: skip

    def _created(self, event: Created, time_s: float | None) -> Iterator[Record]:
        self._groups[event.group] = event
        yield CreatedPools(
            worker=self._worker, rank=self._rank, id=event.id, epoch=event.epoch, time_s=time_s, group=event.group,
            kind=event.kind, window=event.window, block_size=event.block_size,
            num_blocks=tuple(event.num_blocks.items()),
        )  # fmt: skip


def _stretches(first: int, end: int, columns: tuple[int, ...] | None) -> list[tuple[int, int]]:
    """Return the stretches of blocks that a group has, of first .. end-1.

    >>> _stretches(4, 10, (0, 1, 3))
    [(4, 6), (7, 8)]
    """
    if columns is None:
        return [(first, end)]
    found: list[tuple[int, int]] = []
    for column in sorted(columns):
        at = first + column
        if found and found[-1][1] == at:
            found[-1] = (found[-1][0], at + 1)
        else:
            found.append((at, at + 1))
    return found
