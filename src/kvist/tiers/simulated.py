"""A store in this process's memory; on request as slow, forgetful and unreliable as one far away."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from random import Random
from threading import Lock

from kvist.errors import ArgumentError
from kvist.tiers.counting import Counts
from kvist.tiers.envelope import ENVELOPE_BYTES, Envelope
from kvist.tiers.protocol import StoreFormat, StoreStats

__all__ = ["Conditions", "SimulatedStore"]


@dataclass(frozen=True, slots=True)
class Conditions:
    """How well a simulated store works.

    Each call takes `latency_s` plus its bytes at `bytes_per_s`. `failure` is the probability that a call raises, `loss`
    that an entry is gone when it is asked for, `corruption` that it comes damaged.
    """

    latency_s: float = 0.0
    bytes_per_s: float = inf
    failure: float = 0.0
    loss: float = 0.0
    corruption: float = 0.0

    def __post_init__(self) -> None:
        if self.latency_s < 0 or self.bytes_per_s <= 0:
            told = f"latency_s {self.latency_s}, bytes_per_s {self.bytes_per_s}"
            raise ArgumentError(f"{told}: the first must be at least 0, the second above it")
        for name in ("failure", "loss", "corruption"):
            if not 0 <= getattr(self, name) <= 1:
                raise ArgumentError(f"{name} is {getattr(self, name)}, but a probability lies between 0 and 1")


_PERFECT = Conditions()


class SimulatedStore:
    """Keeps contents in memory, up to `capacity_bytes` of them, the least recently used going first.

    `conditions` may be replaced at any time. Equal seeds and equal calls give equal faults. `sleep` takes seconds, and
    need not wait.

    >>> store = SimulatedStore(StoreFormat("a model", block_size=2, block_bytes=(4,)))
    >>> store.put([(bytes(48), memoryview(b"KKVV"))])
    1
    >>> buffer = bytearray(4)
    >>> store.get([bytes(48)], [memoryview(buffer)]), bytes(buffer)
    ([True], b'KKVV')
    """

    def __init__(
        self,
        format: StoreFormat,
        capacity_bytes: int | None = None,
        conditions: Conditions = _PERFECT,
        *,
        seed: int = 0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.conditions = conditions
        self._envelope = Envelope(format)
        self._capacity = inf if capacity_bytes is None else capacity_bytes
        self._chance = Random(seed)
        self._sleep = sleep
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()
        self._num_bytes = 0
        self._counts = Counts()
        self._lock = Lock()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Say of each key whether it is there."""
        self._travel(0)
        with self._lock:
            return [key in self._entries for key in keys]

    def put(self, entries: Sequence[tuple[bytes, memoryview]]) -> int:
        """Keep contents, evicting older ones; what is larger than the capacity is refused."""
        sealed = [(key, self._envelope.seal(key, contents)) for key, contents in entries]
        self._travel(sum(len(entry) - ENVELOPE_BYTES for _, entry in sealed))
        with self._lock:
            num_put = sum(self._keep(key, entry) for key, entry in sealed)
        self._counts.add(num_put=num_put, num_refused=len(sealed) - num_put)
        return num_put

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Fill the buffers of the keys whose contents are there and unharmed."""
        with self._lock:
            arrived = [self._fetched(key) for key in keys]
        self._travel(sum(len(entry) - ENVELOPE_BYTES for entry in arrived if entry is not None))
        found = [
            entry is not None and self._accept(key, entry, buffer)
            for key, entry, buffer in zip(keys, arrived, buffers, strict=True)
        ]
        self._counts.add_found(found)
        return found

    def drop(self, tag: bytes) -> None:
        """Forget all contents of a namespace; an empty tag: everything."""
        self._travel(0)
        with self._lock:
            for key in [key for key in self._entries if key.startswith(tag)]:
                self._forget(key)

    def change(self, key: bytes, change: Callable[[bytes], bytes]) -> bool:
        """Replace what is kept of a key, head and contents, as damage would; False if it is not there."""
        with self._lock:
            if key not in self._entries:
                return False
            self._store(key, change(self._forget(key)))
            return True

    def stats(self) -> StoreStats:
        """Return what is held and what was done."""
        with self._lock:
            held, num_bytes = len(self._entries), self._num_bytes
        capacity = None if self._capacity == inf else int(self._capacity)
        return self._counts.stats(num_entries=held, num_bytes=num_bytes, capacity_bytes=capacity)

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self._num_bytes = 0

    def _travel(self, num_bytes: int) -> None:
        seconds = self.conditions.latency_s + num_bytes / self.conditions.bytes_per_s
        if seconds:
            self._sleep(seconds)
        if self._happens(self.conditions.failure):
            self._counts.add(num_errors=1)
            raise ConnectionError("the simulated store is out of reach")

    def _happens(self, probability: float) -> bool:
        return probability > 0 and self._chance.random() < probability

    def _keep(self, key: bytes, entry: bytes) -> bool:
        if key in self._entries:
            self._forget(key)
        num_bytes = len(entry) - ENVELOPE_BYTES
        if num_bytes > self._capacity:
            return False
        while self._num_bytes + num_bytes > self._capacity:
            self._forget(next(iter(self._entries)))
            self._counts.add(num_evicted=1)
        self._store(key, entry)
        return True

    def _store(self, key: bytes, entry: bytes) -> None:
        self._entries[key] = entry
        self._num_bytes += len(entry) - ENVELOPE_BYTES

    def _forget(self, key: bytes) -> bytes:
        entry = self._entries.pop(key)
        self._num_bytes -= len(entry) - ENVELOPE_BYTES
        return entry

    def _fetched(self, key: bytes) -> bytes | None:
        if key not in self._entries:
            return None
        if self._happens(self.conditions.loss):
            self._forget(key)
            return None
        self._entries.move_to_end(key)
        entry = self._entries[key]
        return self._damaged(entry) if self._happens(self.conditions.corruption) else entry

    def _damaged(self, entry: bytes) -> bytes:
        at = self._chance.randrange(len(entry))
        flipped = entry[:at] + bytes([entry[at] ^ 1 << self._chance.randrange(8)]) + entry[at + 1 :]
        return self._chance.choice((flipped, entry[:at], entry + b"\0", bytes(len(entry))))

    def _accept(self, key: bytes, entry: bytes, buffer: memoryview) -> bool:
        if self._envelope.unseal(key, entry, buffer):
            return True
        self._counts.add(num_corrupt=1)
        with self._lock:
            if self._entries.get(key) is not None:
                self._forget(key)
        return False
