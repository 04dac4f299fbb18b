"""What a protocol has no word for is said in words that it has.

One that names the medium in every event says a move as a store and a removal; one that has a level for each block says
it as an update, and a block as removed when its last copy goes. For that it is known what is stored: one entry for each
block, and no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

from kvist.wire.records import (
    TIERS,
    AllCleared,
    Hash,
    MovedBlocks,
    Record,
    RemovedBlocks,
    StoredBlocks,
    Unknown,
    UpdatedBlocks,
)

__all__ = ["STORED_FIELDS", "ByLevel", "ByMedium", "WithoutGroups"]

Stream = tuple[str, int | None]
"""A worker and its rank."""
Place = tuple[int | None, str | None]
"""A group and a tier."""
STORED_FIELDS = [each.name for each in fields(StoredBlocks)]
ALIKE = ("worker", "rank", "id", "epoch", "time_s", "tier", "source_tier")
"""What a move says as the update that it stands for."""
DEVICE = TIERS[0]


class ByMedium:
    """For protocols whose events name a medium and can clear everything, but know nothing of moves and namespaces.

    A move becomes a store followed by a removal. Clearing a namespace becomes removals where another has content.
    A change of tier that comes without tokens gets those of the store before, if `remembers` is set.
    """

    def __init__(self, *, remembers: bool = False) -> None:
        self._held: dict[Stream, dict[Any, dict[Place, set[Hash]]]] = {}
        self._known: dict[tuple[Stream, int | None], dict[Hash, StoredBlocks]] | None = {} if remembers else None

    def narrow(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yield what takes the place of each record."""
        for record in records:
            if isinstance(record, MovedBlocks):
                yield from self._moved(record)
            elif isinstance(record, StoredBlocks):
                self._note(record)
                yield record
            elif isinstance(record, RemovedBlocks):
                yield from self._removed(record)
            elif isinstance(record, UpdatedBlocks):
                yield from self._updated(record)
            elif isinstance(record, AllCleared):
                yield from self._cleared(record)
            elif isinstance(record, Unknown):
                yield record

    def _places(self, record: StoredBlocks | RemovedBlocks) -> dict[Place, set[Hash]]:
        stream = self._held.setdefault((record.worker, record.rank), {})
        return stream.setdefault(record.namespace, {})

    def _note(self, record: StoredBlocks) -> None:
        self._places(record).setdefault((record.group, record.tier), set()).update(record.hashes)
        if self._known is not None:
            known = self._known.setdefault(((record.worker, record.rank), record.group), {})
            known.update(zip(record.hashes, _single_blocks(record), strict=True))

    def _removed(self, record: RemovedBlocks) -> Iterator[Record]:
        """Yield a removal; of one that names no tier, one for each tier that has any of the blocks."""
        places = self._places(record)
        found = [] if record.tier else [(place, places[place]) for place in _of_group(places, record.group)]
        parts = {place[1]: tuple(each for each in record.hashes if each in held) for place, held in found}
        self._forget(record)
        if any(parts.values()):
            yield from (replace(record, tier=tier, hashes=hashes) for tier, hashes in parts.items() if hashes)
            known = {each for hashes in parts.values() for each in hashes}
            left = tuple(each for each in record.hashes if each not in known)
            record = replace(record, hashes=left)
        if record.hashes:
            yield record

    def _forget(self, record: RemovedBlocks) -> None:
        places = self._places(record)
        for place in [(record.group, record.tier)] if record.tier else _of_group(places, record.group):
            held = places.get(place)
            if held is not None:
                held.difference_update(record.hashes)
                if not held:
                    del places[place]
        if not places:
            del self._held[record.worker, record.rank][record.namespace]
        if self._known is not None:
            known = self._known.get(((record.worker, record.rank), record.group), {})
            others = [held for place, held in places.items() if place[0] == record.group]
            for each in record.hashes:
                if not any(each in held for held in others):
                    known.pop(each, None)

    def _moved(self, record: MovedBlocks) -> Iterator[Record]:
        stored = StoredBlocks(**{name: getattr(record, name) for name in STORED_FIELDS})
        self._note(stored)
        yield stored
        if record.source_tier is not None:
            removed = _removal(record, record.hashes, record.group, record.source_tier)
            self._forget(removed)
            yield removed

    def _updated(self, record: UpdatedBlocks) -> Iterator[Record]:
        """Yield a store and a removal for a change of tier; a change of priority alone has no word."""
        if record.tier is None:
            return
        known = (self._known or {}).get(((record.worker, record.rank), record.group), {})
        for each in record.hashes:
            before = known.get(each)
            told: dict[str, Any] = {name: getattr(record, name) for name in ALIKE} | {"own": None}
            if before is None:
                moved = MovedBlocks(hashes=(each,), group=record.group, window=record.window, **told)
            else:
                moved = MovedBlocks(
                    **{name: getattr(before, name) for name in STORED_FIELDS if name not in told}, **told
                )
            yield from self._moved(moved)

    def _cleared(self, record: AllCleared) -> Iterator[Record]:
        stream = self._held.setdefault((record.worker, record.rank), {})
        gone = [
            (namespace, place)
            for namespace, places in stream.items()
            for place in places
            if (record.namespace is None or namespace == record.namespace) and record.tier in (None, place[1])
        ]
        held = {key: stream[key[0]].pop(key[1]) for key in gone}
        if any(hashes for places in stream.values() for hashes in places.values()):
            for (_, (group, tier)), hashes in held.items():
                if hashes:
                    yield _removal(record, tuple(hashes), group, tier)
        else:
            yield replace(record, namespace=None, tier=None)


class WithoutGroups(ByMedium):
    """For protocols that know nothing of groups either: a block is there until the last group lets it go."""

    def __init__(self, *, remembers: bool = False) -> None:
        super().__init__(remembers=remembers)
        self._groups: dict[tuple[Stream, str | None], dict[Hash, set[int | None]]] = {}

    def narrow(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yield what takes the place of each record."""
        for record in super().narrow(records):
            if isinstance(record, StoredBlocks):
                yield from self._first(record)
            elif isinstance(record, RemovedBlocks):
                yield from self._last(record)
            else:
                if isinstance(record, AllCleared):
                    self._forget_all((record.worker, record.rank))
                yield record

    def _first(self, record: StoredBlocks) -> Iterator[Record]:
        """Yield a store of those blocks that no other group has in this tier."""
        groups, new = self._groups.setdefault(((record.worker, record.rank), record.tier), {}), []
        for column, each in enumerate(record.hashes):
            holders = groups.setdefault(each, set())
            if not holders - {record.group}:
                new.append(column)
            holders.add(record.group)
        yield from _stored_runs(record, new)

    def _last(self, record: RemovedBlocks) -> Iterator[Record]:
        """Yield a removal of those blocks that no other group has in this tier, also of those that are not known."""
        groups, gone = self._groups.get(((record.worker, record.rank), record.tier), {}), []
        for each in record.hashes:
            holders = groups.get(each, set())
            holders.discard(record.group)
            if not holders:
                groups.pop(each, None)
                gone.append(each)
        if gone:
            yield record if len(gone) == len(record.hashes) else replace(record, hashes=tuple(gone))

    def _forget_all(self, stream: Stream) -> None:
        for key in [key for key in self._groups if key[0] == stream]:
            del self._groups[key]


class ByLevel:
    """For TensorRT-LLM, where a block has one level, removals name none, and nothing says that all is cleared.

    A copy of a block in a second tier changes its level if that is the faster one now; removing a copy changes the
    level where another is left. A clear becomes removals.
    """

    def __init__(self) -> None:
        self._tiers: dict[tuple[Stream, int | None], dict[Hash, tuple[str, ...]]] = {}
        self._about: dict[tuple[Stream, int | None], Any] = {}
        self._namespaces: dict[tuple[Stream, int | None], dict[Hash, Any]] = {}

    def narrow(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yield what takes the place of each record."""
        for record in records:
            if isinstance(record, MovedBlocks):
                yield from self._placed(record, record.source_tier)
            elif isinstance(record, StoredBlocks):
                yield from self._placed(record, None)
            elif isinstance(record, RemovedBlocks):
                yield from self._removed(record)
            elif isinstance(record, UpdatedBlocks):
                yield from self._updated(record)
            elif isinstance(record, AllCleared):
                yield from self._cleared(record)
            else:
                yield record

    def _of(self, record: StoredBlocks | RemovedBlocks | UpdatedBlocks) -> dict[Hash, tuple[str, ...]]:
        key = ((record.worker, record.rank), record.group)
        self._about[key] = (record.window, record.hash_name)
        return self._tiers.setdefault(key, {})

    def _placed(self, record: StoredBlocks, source: str | None) -> Iterator[Record]:
        tiers = self._of(record)
        new, moved = [], []
        namespaces = self._namespaces.setdefault(((record.worker, record.rank), record.group), {})
        to = record.tier or DEVICE
        for column, each in enumerate(record.hashes):
            before = tiers.get(each, ())
            after = tuple(sorted({*before, to} - {source}, key=_rank))
            tiers[each] = after
            if record.namespace:
                namespaces[each] = record.namespace
            if not before:
                new.append(column)
            elif before[0] != after[0]:
                moved.append((each, before[0], after[0]))
        yield from _stored_runs(record, new)
        for each, old, tier in moved:
            yield _level_change(record, each, old, tier)

    def _removed(self, record: RemovedBlocks) -> Iterator[Record]:
        tiers, gone, moved = self._of(record), [], []
        for each in record.hashes:
            before = tiers.get(each, ())
            after = tuple(tier for tier in before if record.tier not in (None, tier))
            if after:
                tiers[each] = after
                if after[0] != before[0]:
                    moved.append((each, before[0], after[0]))
            else:
                tiers.pop(each, None)
                gone.append(each)
        self._drop_namespaces(record, gone)
        if gone:
            yield record if len(gone) == len(record.hashes) else replace(record, hashes=tuple(gone))
        for each, old, tier in moved:
            yield _level_change(record, each, old, tier)

    def _drop_namespaces(self, record: RemovedBlocks, gone: list[Hash]) -> None:
        namespaces = self._namespaces.get(((record.worker, record.rank), record.group), {})
        for each in gone:
            namespaces.pop(each, None)

    def _updated(self, record: UpdatedBlocks) -> Iterator[Record]:
        tiers = self._of(record)
        for each in record.hashes:
            if record.tier is not None:
                tiers[each] = (record.tier,)
            yield record if len(record.hashes) == 1 else replace(record, hashes=(each,))

    def _cleared(self, record: AllCleared) -> Iterator[Record]:
        for key in [each for each in self._tiers if each[0] == (record.worker, record.rank)]:
            namespaces = self._namespaces.get(key, {})
            hashes = tuple(
                each
                for each in self._tiers[key]
                if record.namespace is None or namespaces.get(each, ()) == record.namespace
            )
            if hashes:
                window, hash_name = self._about[key]
                removal = _removal(record, hashes, key[1], record.tier)
                yield from self._removed(replace(removal, window=window, hash_name=hash_name))


def _of_group(places: Iterable[Place], group: int | None) -> list[Place]:
    return [each for each in places if each[0] == group]


def _rank(tier: str) -> int:
    return TIERS.index(tier) if tier in TIERS else len(TIERS)


def _stored_runs(record: StoredBlocks, columns: list[int]) -> Iterator[Record]:
    """Yield a record for each stretch of the blocks in these columns."""
    if len(columns) == len(record.hashes):
        yield record if type(record) is StoredBlocks else _as_stored(record)
        return
    begin = 0
    for at in range(1, len(columns) + 1):
        if at == len(columns) or columns[at] != columns[at - 1] + 1:
            yield _cut(record, columns[begin], columns[at - 1] + 1)
            begin = at


def _single_blocks(record: StoredBlocks) -> Iterator[StoredBlocks]:
    for column in range(len(record.hashes)):
        yield _cut(record, column, column + 1)


def _cut(record: StoredBlocks, first: int, end: int) -> StoredBlocks:
    """Return a record of some of the blocks."""
    told = {name: getattr(record, name) for name in STORED_FIELDS}
    size = record.block_size or 0
    told["hashes"] = record.hashes[first:end]
    told["parent"] = record.hashes[first - 1] if first else record.parent
    told["tokens"] = record.tokens[first * size : end * size]
    told["extra_ids"] = record.extra_ids[first * size : end * size]
    for name in ("priorities", "media"):
        told[name] = told[name][first:end]
    if record.extra_keys is not None:
        told["extra_keys"] = record.extra_keys[first:end]
    if record.start is not None:
        told["start"] = record.start + first
    return StoredBlocks(**told)


def _as_stored(record: StoredBlocks) -> StoredBlocks:
    return StoredBlocks(**{name: getattr(record, name) for name in STORED_FIELDS})


def _removal(record: Any, hashes: tuple[Hash, ...], group: int | None, tier: str | None) -> RemovedBlocks:
    """Return a removal that says all that another record says of its blocks."""
    names = (
        "worker",
        "rank",
        "id",
        "epoch",
        "time_s",
        "kind",
        "window",
        "namespace",
        "locality",
        "hash_name",
        "reason",
    )
    told: dict[str, Any] = {name: getattr(record, name, None) for name in names}
    return RemovedBlocks(hashes=hashes, group=group, tier=tier, **told)


def _level_change(record: Any, block: Hash, old: str, tier: str) -> UpdatedBlocks:
    names = ("worker", "rank", "id", "epoch", "time_s", "group", "window", "namespace", "hash_name")
    told = {name: getattr(record, name) for name in names}
    return UpdatedBlocks(hashes=(block,), source_tier=old, tier=tier, **told)
