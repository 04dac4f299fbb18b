"""The stores of a manager, one behind the other: what is faster is asked first, and gets what a slower one had."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from os import fspath

import numpy as np
from numpy.typing import NDArray

from kvist.sizes import parse_bytes
from kvist.tier_config import DiskTier, RemoteTier
from kvist.tiers.guard import GuardedStore
from kvist.tiers.missed import MAX_MISSED_KEYS, MissedKeys
from kvist.tiers.opening import open_store
from kvist.tiers.protocol import Store, StoreFormat, StoreStats

__all__ = ["HERE", "NOWHERE", "Coming", "Look", "Row", "StoreStack", "open_stack"]

Row = memoryview
"""The bytes of one block."""

Look = Callable[[Sequence[bytes]], NDArray[np.int8]]
"""Says of each key where its contents are."""

Choose = Callable[[Look], Sequence[Sequence[bytes]]]
"""Says by group which keys to fetch, and looks for that where they are."""

Read = Callable[[NDArray[np.intp]], NDArray[np.uint8] | None]
"""Returns the contents of blocks with such indexes, `[n, block_bytes]`, or None where it cannot."""

HERE, NOWHERE = -1, -2
"""Where contents are that were fetched ahead, and those that no store has."""

MAX_COMING_BYTES = 1 << 30
"""What is fetched ahead and not asked for yet takes no more than that; the oldest goes."""


@dataclass(frozen=True, slots=True)
class _Level:
    """One store with its settings."""

    name: str
    tier: DiskTier | RemoteTier
    store: GuardedStore

    def takes(self, cause: str, priority: int, hits: int) -> bool:
        """Say whether blocks are for this store."""
        if priority < self.tier.min_priority:
            return False
        if self.tier.write == "through":
            return cause == "committed"
        return cause == "evicted" and hits >= self.tier.min_hits


class Coming:
    """Contents that are being fetched ahead."""

    def __init__(self, future: Future[None] | None = None) -> None:
        self._future = future

    @property
    def is_done(self) -> bool:
        """Whether all that could be had has come, or the time is over."""
        return self._future is None or self._future.done()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is done, at most so long; returns whether it is."""
        if self._future is not None:
            try:
                self._future.result(timeout_s)
            except TimeoutError:
                return self.is_done
            except Exception:
                return True
        return True


class _Ahead:
    """What was fetched ahead: contents by key, or where they were when a store was asked; bounded, and taken once."""

    def __init__(self, max_bytes: int) -> None:
        self._rows: OrderedDict[bytes, Row | int] = OrderedDict()
        self._num_bytes, self._max_bytes = 0, max_bytes
        self._lock = threading.Lock()

    def note(self, key: bytes, row: Row | int) -> None:
        """Keep what was fetched, or where it is."""
        with self._lock:
            self._drop(key)
            self._rows[key] = row
            self._num_bytes += 0 if isinstance(row, int) else row.nbytes
            while self._num_bytes > self._max_bytes or len(self._rows) > 1 << 20:
                self._drop(next(iter(self._rows)))

    def knows(self, keys: Iterable[bytes]) -> list[int | None]:
        """Say of each key where its contents are, `HERE` or as `StoreStack.look` says, or None where nothing is known.

        Where else they are, or that they are nowhere, is told once: they may be elsewhere the next time.
        """
        with self._lock:
            known: dict[bytes, int] = {}
            for key in keys:
                if (row := self._rows.get(key)) is not None:
                    known[key] = row if isinstance(row, int) else HERE
            for key, place in known.items():
                if place != HERE:
                    del self._rows[key]
            return [known.get(key) for key in keys]

    def has(self, keys: Iterable[bytes]) -> list[bool]:
        """Say of each key whether its contents are here."""
        with self._lock:
            return [not isinstance(self._rows.get(key, NOWHERE), int) for key in keys]

    def take(self, key: bytes) -> Row | None:
        """Return contents that are here, which then are not any more."""
        with self._lock:
            row = self._rows.get(key)
            self._drop(key)
            return None if isinstance(row, int) else row

    def forget(self, keys: Iterable[bytes]) -> None:
        """Forget what is known of keys."""
        with self._lock:
            for key in keys:
                self._drop(key)

    def drop(self, tag: bytes) -> None:
        """Forget what begins with a tag."""
        with self._lock:
            for key in [key for key in self._rows if key.startswith(tag)]:
                self._drop(key)

    def _drop(self, key: bytes) -> None:
        row = self._rows.pop(key, NOWHERE)
        self._num_bytes -= 0 if isinstance(row, int) else row.nbytes


@dataclass(slots=True)
class _Lot:
    """Keys of one call that fetches ahead, and which of them have come when its `future` is done."""

    keys: set[bytes]
    come: set[bytes]
    future: Future[None] | None = None

    @property
    def is_done(self) -> bool:
        return self.future is None or self.future.done()


class _Places:
    """Where keys were found when they were looked for; what has `come` already is `HERE`, though it may be taken."""

    def __init__(self, look: Look, come: set[bytes]) -> None:
        self._look, self._come = look, come
        self.of: dict[bytes, Row | int] = {}

    def look(self, keys: Sequence[bytes]) -> NDArray[np.int8]:
        """Look for keys, and note where each is."""
        found = np.full(len(keys), HERE, np.int8)
        asked = np.array([key not in self._come for key in keys], bool)
        found[asked] = self._look([key for key, is_asked in zip(keys, asked, strict=True) if is_asked])
        self.of.update(zip(keys, found.tolist(), strict=True))
        return found


def _all_there(keys_by_group: Sequence[Sequence[bytes]]) -> Choose:
    """Choose all that some store likely has."""

    def choose(look: Look) -> list[list[bytes]]:
        places = [look(keys).tolist() for keys in keys_by_group]
        return [
            [key for key, place in zip(keys, each, strict=True) if place not in (HERE, NOWHERE)]
            for keys, each in zip(keys_by_group, places, strict=True)
        ]

    return choose


class StoreStack:
    """Stores by content, faster ones first, asked and filled as one.

    `block_bytes` are those of a block of each group.
    """

    def __init__(
        self, stores: Sequence[tuple[DiskTier | RemoteTier, Store]], block_bytes: Sequence[int], *, names: Sequence[str]
    ) -> None:
        self._levels = [
            _Level(name, tier, GuardedStore(store, tier.timeout_s, name=name, missed=_missed_by(tier)))
            for name, (tier, store) in zip(names, stores, strict=True)
        ]
        self._block_bytes = tuple(block_bytes)
        self._ahead = _Ahead(MAX_COMING_BYTES)
        self._fetching = ThreadPoolExecutor(2, thread_name_prefix="kvist prefetch")
        self._under_way: list[_Lot] = []
        self._is_closed = False
        self._epoch = 0  # odd while something is dropped: what is fetched then, or before, may be of that
        self._turning = threading.Lock()

    @property
    def names(self) -> list[str]:
        """The names of the stores, faster ones first."""
        return [level.name for level in self._levels]

    # -- finding and getting ------------------------------------------------------------------------------------------

    def contains(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """Say of each key whether some store likely has it, bool `[n]`."""
        found: NDArray[np.bool_] = self.look(keys) != NOWHERE
        return found

    def look(self, keys: Sequence[bytes]) -> NDArray[np.int8]:
        """Say of each key what is the fastest place that likely has it, int8 `[n]`.

        That is `HERE` for what was fetched ahead, the index of a store in `names`, or `NOWHERE`.
        """
        known = self._ahead.knows(keys)
        found = np.array([NOWHERE if each is None else each for each in known], np.int8)
        left = np.flatnonzero([each is None for each in known])
        for index, level in enumerate(self._levels):
            if not len(left):
                break
            there = np.array(level.store.contains([keys[at] for at in left.tolist()]), bool)
            found[left[there]] = index
            left = left[~there]
        return found

    def look_here(self, keys: Sequence[bytes]) -> NDArray[np.int8]:
        """Say of each key whether it was fetched ahead, `HERE` or `NOWHERE`, int8 `[n]`; no store is asked."""
        return np.array([HERE if each else NOWHERE for each in self._ahead.has(keys)], np.int8)

    def where(self, keys: Sequence[bytes]) -> list[str]:
        """Return the name of the fastest store that likely has each key, empty where none has."""
        found = [""] * len(keys)
        for level in self._levels:
            left = [at for at, name in enumerate(found) if not name]
            there = level.store.contains([keys[at] for at in left]) if left else []
            for at, is_there in zip(left, there, strict=True):
                found[at] = level.name if is_there else ""
        return found

    def get(self, keys: Sequence[bytes], group: int) -> list[Row | None]:
        """Return the contents of keys of one group, and None for those that were not to be had."""
        return self._get(keys, group, self._epoch)

    def take_here(self, keys: Sequence[bytes], group: int) -> list[Row | None]:
        """Return, as `get` does, what was fetched ahead; no store is asked."""
        rows = [self._ahead.take(key) for key in keys]
        return [None if row is None or row.nbytes != self._block_bytes[group] else row for row in rows]

    def _get(self, keys: Sequence[bytes], group: int, epoch: int) -> list[Row | None]:
        rows = self.take_here(keys, group)
        for index, level in enumerate(self._levels):
            left = [at for at, row in enumerate(rows) if row is None]
            if not left:
                break
            came = level.store.fetch([keys[at] for at in left], [self._block_bytes[group]] * len(left))
            for at, row in zip(left, came, strict=True):
                rows[at] = row
            entries = [(keys[at], row) for at, row in zip(left, came, strict=True) if row is not None and index]
            with self._turning:
                for faster in self._levels[:index] if entries and self._is_now(epoch) else ():
                    faster.store.put(entries)
        return rows

    def _is_now(self, epoch: int) -> bool:
        """Say whether nothing has been dropped since an epoch, nor is being dropped."""
        return epoch == self._epoch and not epoch % 2

    def seconds_to_get(self, index: int, num_bytes: int, num_entries: int) -> float:
        """Return how long it takes to get so much from a store, by what was measured; what is `HERE` takes no time."""
        return 0.0 if index == HERE else self._levels[index].store.seconds_to_get(num_bytes, num_entries)

    def fetch_ahead(self, keys_by_group: Sequence[Sequence[bytes]], choose: Choose | None = None) -> Coming:
        """Start to get contents, of each group, that are asked for later.

        `choose` says, in another thread, which of the keys to get; without it, all that some store has. What an earlier
        call is getting is waited for, and not got twice.
        """
        if self._is_closed:
            return Coming()
        all_keys = [list(keys) for keys in keys_by_group]
        lot = _Lot({key for keys in all_keys for key in keys}, set())
        self._under_way = [each for each in self._under_way if not each.is_done]
        earlier = [each for each in self._under_way if not each.keys.isdisjoint(lot.keys)]
        lot.future = self._fetching.submit(self._fetch, lot, all_keys, choose or _all_there(all_keys), earlier)
        self._under_way.append(lot)
        return Coming(lot.future)

    def _fetch(self, lot: _Lot, keys_by_group: list[list[bytes]], choose: Choose, earlier: list[_Lot]) -> None:
        """Fetch the chosen contents of each group, leading ones, as much as there is room for."""
        wait([each.future for each in earlier if each.future is not None])  # begun before: they end without this thread
        lot.come.update(*(each.come for each in earlier))
        epoch, room, places = self._epoch, MAX_COMING_BYTES, _Places(self.look, lot.come)
        for group, chosen in enumerate(choose(places.look)):
            wanted = list(chosen)[: room // self._block_bytes[group]]
            room -= len(wanted) * self._block_bytes[group]
            for key, row in zip(wanted, self._get(wanted, group, epoch), strict=True):
                places.of[key] = NOWHERE if row is None else row
        with self._turning:
            for key in [key for keys in keys_by_group for key in keys] if self._is_now(epoch) else ():
                place = places.of.get(key, HERE)
                if not isinstance(place, int) or place != HERE:
                    self._ahead.note(key, place)
        lot.come.update(key for key, place in places.of.items() if not isinstance(place, int))

    # -- keeping ------------------------------------------------------------------------------------------------------

    def wants(self, cause: str, priority: int, hits: int) -> bool:
        """Say whether any store takes such blocks."""
        return any(level.takes(cause, priority, hits) for level in self._levels)

    def put(self, keys: Sequence[bytes], rows: NDArray[np.uint8], cause: str, priority: int, hits: int) -> None:
        """Hand contents `[n, block_bytes]` to the stores that take such; they are copied, and written later."""
        entries = [(key, memoryview(row)) for key, row in zip(keys, rows, strict=True)]
        self._ahead.forget(keys)
        for level in self._levels:
            if level.takes(cause, priority, hits):
                level.store.put(entries)

    @property
    def may_refill(self) -> bool:
        """Whether some store might now take what it did not take before."""
        return any(level.store.may_refill for level in self._levels)

    @property
    def num_missed(self) -> int:
        """How many blocks stores did not take so far, one after the other; it only grows."""
        return sum(level.store.missed.num_added for level in self._levels)

    def refill(self, keys: Sequence[bytes], group: int, priority: int, hits: int, read: Read) -> bool:
        """Hand each store what it did not take when it was committed, of blocks of a group, as much as it has room for.

        The keys are of one namespace. Returns whether that is all of it.
        """
        is_all = True
        for level in self._levels:
            if not level.takes("committed", priority, hits):
                continue
            at, are_all = level.store.take_missed(keys, self._block_bytes[group])
            is_all = is_all and are_all
            rows = read(np.array(at)) if at else None
            if rows is not None:
                level.store.refill([(keys[each], memoryview(row)) for each, row in zip(at, rows, strict=True)])
        return is_all

    def drop(self, tag: bytes) -> None:
        """Forget all contents of a namespace in every store; an empty tag: everything.

        What is being fetched ahead meanwhile, of whatever namespace, is thrown away.
        """
        self._turn()
        try:
            for level in self._levels:
                level.store.drop(tag)
            self._ahead.drop(tag)
        finally:
            self._turn()

    def _turn(self) -> None:
        with self._turning:
            self._epoch += 1

    # -- numbers and the end ------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, StoreStats]:
        """Return the numbers of each store, by its name, faster ones first."""
        return {level.name: level.store.stats() for level in self._levels}

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was put is written, at most so long for each store; returns whether it is."""
        written = [level.store.flush(timeout_s) for level in self._levels]
        return all(written)

    def close(self) -> None:
        """Write what still waits, and close the stores; closing twice is fine."""
        if self._is_closed:
            return
        self._is_closed = True
        self._fetching.shutdown(wait=False, cancel_futures=True)
        for level in self._levels:
            level.store.close()


def open_stack(tiers: Sequence[DiskTier | RemoteTier], format: StoreFormat) -> StoreStack:
    """Open the stores of a configuration, for blocks of a format.

    Raises ConfigError for a directory that holds another format, and for a place that names no store.
    """
    opened: list[tuple[DiskTier | RemoteTier, Store]] = []
    names: list[str] = []
    try:
        for tier in tiers:
            opened.append((tier, _opened(tier, format)))
            kind = "disk" if isinstance(tier, DiskTier) else tier.url.partition(":")[0]
            names.append(kind if kind not in names else f"{kind} {len(names)}")
    except BaseException:
        for _, store in opened:
            store.close()
        raise
    return StoreStack(opened, format.block_bytes, names=names)


def _missed_by(tier: DiskTier | RemoteTier) -> MissedKeys:
    """Return a memory for what a store does not take; what is stored when it is evicted is not at hand any more."""
    return MissedKeys(MAX_MISSED_KEYS if tier.write == "through" else 0)


def _opened(tier: DiskTier | RemoteTier, format: StoreFormat) -> Store:
    if isinstance(tier, DiskTier):
        from kvist.tiers.disk import DiskStore

        return DiskStore(fspath(tier.directory), parse_bytes(tier.capacity), format, io=tier.io)
    return open_store(tier.url, format, timeout_s=tier.timeout_s)
