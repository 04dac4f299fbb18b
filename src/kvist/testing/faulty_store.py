"""A store that hangs, lies and dies when told to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Event, Lock
from typing import Any

from kvist.errors import ArgumentError
from kvist.tiers.protocol import StoreFormat, StoreStats
from kvist.tiers.simulated import Conditions, SimulatedStore

__all__ = ["FAULTY_URL", "LIES", "FaultyStore", "faulty_stores"]

FAULTY_URL = f"{__name__}:shared"
"""What to give `RemoteTier` as `url` for a store of `faulty_stores`."""

CALLS = ("contains", "put", "get", "drop", "stats", "close")

LIES = (
    "has everything", "has nothing", "answers too few", "answers too many", "answers nonsense", "keeps nothing",
    "forgets nothing", "counts nonsense",
)  # fmt: skip
"""What a store can say that is not so, and still be noticed: contents that are wrong it must never give."""


class FaultyStore(SimulatedStore):
    """A store in memory, as `SimulatedStore` is, with faults that last until they are taken back.

    `hold("get", ...)` lets calls wait, once they have begun, until `release`; `begun` is set when one waits. `die` lets
    every call raise until `revive`, as a server does that is gone, with its contents or without. `lie` says one of
    `LIES`, until `be_honest`. `calls` are all that were made, by name. It is opened again by whoever has it: closing it
    keeps contents, so that it can stand for a server that several clients reach.

    >>> store = FaultyStore(StoreFormat("a model", block_size=2, block_bytes=(4,)))
    >>> store.die()
    >>> store.contains([bytes(48)])
    Traceback (most recent call last):
    ConnectionError: the store is dead
    >>> store.revive()
    >>> store.lie("has everything")
    >>> store.contains([bytes(48)]), store.get([bytes(48)], [memoryview(bytearray(4))])
    ([True], [False])
    """

    def __init__(self, format: StoreFormat, capacity_bytes: int | None = None, **options: Any) -> None:
        super().__init__(format, capacity_bytes, options.pop("conditions", Conditions()), **options)
        self.format = format
        self.calls: list[str] = []
        self.begun = Event()
        self._released = Event()
        self._released.set()
        self._held: frozenset[str] = frozenset()
        self._lie = ""
        self._is_dead = False
        self._noting = Lock()

    # -- what tests do ------------------------------------------------------------------------------------------------

    def hold(self, *calls: str) -> None:
        """Let calls of these names wait; without names, all of them."""
        if unknown := set(calls) - set(CALLS):
            raise ArgumentError(f"calls are {sorted(unknown)}, must be of {', '.join(CALLS)}")
        self.begun.clear()
        self._released.clear()
        self._held = frozenset(calls or CALLS)

    def release(self) -> None:
        """Let all calls go on."""
        self._held = frozenset()
        self._released.set()

    def die(self, *, keeps: bool = True) -> None:
        """Raise from now on; without `keeps`, contents are lost."""
        self._is_dead = True
        if not keeps:
            super().close()

    def revive(self) -> None:
        """Answer again."""
        self._is_dead = False

    def lie(self, what: str) -> None:
        """Say what is not so, from now on."""
        if what not in LIES:
            raise ArgumentError(f"what is {what!r}, must be one of {', '.join(LIES)}")
        self._lie = what

    def be_honest(self) -> None:
        """Lie no more."""
        self._lie = ""

    # -- what stores do -----------------------------------------------------------------------------------------------

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Say of each key whether it is there, or not the truth."""
        self._pass("contains")
        return self._answer(super().contains(keys))

    def put(self, entries: Sequence[tuple[bytes, memoryview]]) -> int:
        """Keep contents, or say so."""
        self._pass("put")
        if self._lie == "keeps nothing":
            return len(entries)
        num_put = super().put(entries)
        return -7 if self._lie == "counts nonsense" else num_put

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Fill buffers; what is said of them may be too little, too much or nonsense, but no buffer is wrong."""
        self._pass("get")
        found = super().get(keys, buffers)
        return found if self._lie == "has everything" else self._answer(found)

    def drop(self, tag: bytes) -> None:
        """Forget contents, or say so."""
        self._pass("drop")
        if self._lie != "forgets nothing":
            super().drop(tag)

    def stats(self) -> StoreStats:
        """Return numbers."""
        self._pass("stats")
        told = super().stats()
        return replace(told, num_entries=-1, num_bytes=-1) if self._lie == "counts nonsense" else told

    def close(self) -> None:
        """Keep everything."""
        self._pass("close")

    def _pass(self, call: str) -> None:
        with self._noting:
            self.calls.append(call)
        if call in self._held:
            self.begun.set()
            self._released.wait()
        if self._is_dead:
            raise ConnectionError("the store is dead")

    def _answer(self, found: list[bool]) -> list[Any]:
        answers: dict[str, Callable[[], list[Any]]] = {
            "has everything": lambda: [True] * len(found),
            "has nothing": lambda: [False] * len(found),
            "answers too few": lambda: found[:-1],
            "answers too many": lambda: [*found, True],
            "answers nonsense": lambda: ["perhaps"] * len(found),
        }
        return answers[self._lie]() if self._lie in answers else found


_shared: list[FaultyStore] | None = None


@contextmanager
def faulty_stores() -> Iterator[list[FaultyStore]]:
    """Let `RemoteTier(url=FAULTY_URL)` open faulty stores; yields the list of them, which grows.

    A format has one, whoever opens it, as a server would. At the end all calls that are held go on.

    >>> from kvist import AttentionSpec, CacheConfig, KVCacheManager, RemoteTier
    >>> from kvist.testing import TokenMemory
    >>> config = CacheConfig([AttentionSpec(1, 1)], 2, 8, tiers=[RemoteTier(url=FAULTY_URL)], model="a model@1")
    >>> with faulty_stores() as stores, KVCacheManager(config, TokenMemory(config)):
    ...     stores[0].die()
    """
    global _shared  # noqa: PLW0603  # a tier names its store by import path, so it has to be found there
    before, _shared = _shared, []
    opened = _shared
    try:
        yield opened
    finally:
        _shared = before
        for store in opened:
            store.release()


def shared(format: StoreFormat, timeout_s: float) -> FaultyStore:
    """Open the faulty store that there is of a format. Raises ArgumentError outside of `faulty_stores`."""
    if _shared is None:
        raise ArgumentError(f"{FAULTY_URL} is opened outside of faulty_stores()")
    known = [store for store in _shared if store.format == format]
    if not known:
        _shared.append(FaultyStore(format))
    return known[0] if known else _shared[-1]
