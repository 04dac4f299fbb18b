"""Tiers without bytes: a memory that copies nothing, and slow stores that only know which blocks they would have."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvist.config import CacheConfig
from kvist.lab.replay.config import SlowTier
from kvist.manager import KVCacheManager
from kvist.tiers.protocol import StoreStats
from kvist.tiers.stack import NOWHERE, Coming, Row, StoreStack

__all__ = ["NoBytes", "SimulatedStack", "simulated_manager"]


NO_BYTES = memoryview(b"")


class NoBytes:
    """A memory without contents: what is to be copied, is; reading gives rows of no bytes."""

    takes_block_moves = True

    def __init__(self, config: CacheConfig) -> None:
        self._block_bytes = tuple(group.block_bytes for group in config.groups)

    def perform(self, moves: list[Any]) -> None:
        """Copy nothing."""

    def block_format(self) -> tuple[tuple[int, ...], tuple[dict[str, Any], ...]]:
        """Return the bytes that one block of each group would have."""
        return self._block_bytes, ()

    def read_blocks(self, group: int, blocks: NDArray[np.int32], tier: str = "device") -> NDArray[np.uint8]:
        """Return rows of no bytes, `[n, 0]`."""
        return np.empty((len(blocks), 0), np.uint8)

    def write_blocks(self, group: int, blocks: NDArray[np.int32], rows: Any) -> None:
        """Write nothing."""


class _Level:
    """What one store has: keys of blocks, the least recently used first."""

    def __init__(self, tier: SlowTier, num_groups: int) -> None:
        self.tier = tier
        self.keys: OrderedDict[bytes, None] = OrderedDict()
        self.capacity = tier.num_blocks * num_groups
        self.num_hits = self.num_put = self.num_evicted = 0

    def takes(self, cause: str, priority: int, hits: int) -> bool:
        """Say whether blocks are for this store."""
        if priority < self.tier.min_priority:
            return False
        if self.tier.write == "through":
            return cause == "committed"
        return cause == "evicted" and hits >= self.tier.min_hits

    def keep(self, keys: Sequence[bytes]) -> None:
        """Have these keys as the latest used, and forget the least recently used without room for them."""
        held = self.keys
        for key in keys:
            held[key] = None
            held.move_to_end(key)
        self.num_put += len(keys)
        while len(held) > self.capacity:
            held.popitem(last=False)
            self.num_evicted += 1


class SimulatedStack:
    """Slow tiers as a manager's stores, at once and always alike: what they would take is added to `seconds`.

    `num_blocks_from` counts the blocks that came from each, by name.
    """

    def __init__(self, tiers: Sequence[SlowTier], block_bytes: Sequence[int]) -> None:
        self.seconds = 0.0
        self.num_blocks_from = {tier.name: 0 for tier in tiers}
        self._levels = [_Level(tier, len(block_bytes)) for tier in tiers]
        self._block_bytes = tuple(block_bytes)

    @property
    def names(self) -> list[str]:
        """The names of the tiers, faster ones first."""
        return [level.tier.name for level in self._levels]

    @property
    def num_entries(self) -> dict[str, int]:
        """Blocks that each has, by name."""
        return {level.tier.name: len(level.keys) for level in self._levels}

    def look(self, keys: Sequence[bytes]) -> NDArray[np.int8]:
        """Say of each key which tier is the fastest that has it, or NOWHERE, int8 `[n]`."""
        held = [level.keys for level in self._levels]
        places = (next((at for at, each in enumerate(held) if key in each), NOWHERE) for key in keys)
        return np.fromiter(places, np.int8, len(keys))

    def contains(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """Say of each key whether some tier has it."""
        found: NDArray[np.bool_] = self.look(keys) != NOWHERE
        return found

    def where(self, keys: Sequence[bytes]) -> list[str]:
        """Return the name of the fastest tier that has each key, empty where none has."""
        return [self.names[place] if place >= 0 else "" for place in self.look(keys).tolist()]

    def get(self, keys: Sequence[bytes], group: int) -> list[Row | None]:
        """Return rows of no bytes, and None for keys that are nowhere; faster tiers keep what slower ones had."""
        places = self.look(keys)
        for index, level in enumerate(self._levels):
            mine = [keys[at] for at in np.flatnonzero(places == index).tolist()]
            if not mine:
                continue
            self.seconds += self.seconds_to_get(index, len(mine) * self._block_bytes[group], len(mine))
            self.num_blocks_from[level.tier.name] += len(mine)
            for each in self._levels[: index + 1]:
                each.keep(mine)
        return [NO_BYTES if place != NOWHERE else None for place in places.tolist()]

    def seconds_to_get(self, index: int, num_bytes: int, num_entries: int) -> float:
        """Return how long it takes to get so much from a tier."""
        tier = self._levels[index].tier
        return tier.latency_s + num_bytes / tier.bytes_per_s

    def fetch_ahead(self, keys_by_group: Sequence[Sequence[bytes]]) -> Coming:
        """Fetch nothing: an admission gets it at once."""
        return Coming()

    may_refill = False
    """No tier refuses anything."""

    def wants(self, cause: str, priority: int, hits: int) -> bool:
        """Say whether any tier takes such blocks."""
        return any(level.takes(cause, priority, hits) for level in self._levels)

    def put(self, keys: Sequence[bytes], rows: NDArray[np.uint8], cause: str, priority: int, hits: int) -> None:
        """Keep keys in the tiers that take such."""
        for level in self._levels:
            if level.takes(cause, priority, hits):
                level.keep(keys)

    def drop(self, tag: bytes) -> None:
        """Forget what begins with a tag."""
        for level in self._levels:
            for key in [key for key in level.keys if key.startswith(tag)]:
                del level.keys[key]

    def stats(self) -> dict[str, StoreStats]:
        """Return what each tier has and has done, by its name."""
        return {
            level.tier.name: StoreStats(
                num_entries=len(level.keys),
                num_hits=self.num_blocks_from[level.tier.name],
                num_put=level.num_put,
                num_evicted=level.num_evicted,
            )
            for level in self._levels
        }

    def flush(self, timeout_s: float) -> bool:
        """Nothing waits to be written."""
        return True

    def close(self) -> None:
        """Nothing is open."""


def simulated_manager(
    config: CacheConfig, tiers: Sequence[SlowTier], clock: Callable[[], float], prefill_tokens_per_s: float
) -> tuple[KVCacheManager, SimulatedStack | None]:
    """Return a manager of no bytes, with these tiers as its stores, and what they did."""
    manager = KVCacheManager(config, memory=NoBytes(config), clock=clock)
    if manager._link is None:
        return manager, None
    stack = SimulatedStack(tiers, [group.block_bytes for group in config.groups])
    manager._link.stack.close()
    manager._link.stack = cast(StoreStack, stack)  # it has all that the link and the manager call
    manager.prefill_tokens_per_s = prefill_tokens_per_s
    return manager, stack
