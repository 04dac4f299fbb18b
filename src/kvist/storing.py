"""Between the core, which knows what is worth keeping, the memory, which has the bytes, and the stores."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from threading import Lock
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvist.config import CacheConfig
from kvist.core import restoring
from kvist.core.admission import prompt_needs
from kvist.core.extents import Blocks, Extent, Match, Namespace
from kvist.core.keeping import KeptBlocks
from kvist.core.restoring import Installed, Missing
from kvist.core.state import CacheState
from kvist.core.tokens import TOKEN_BYTES
from kvist.errors import ArgumentTypeError
from kvist.tiers.protocol import StoreFormat
from kvist.tiers.stack import HERE, NOWHERE, Coming, Look, Row, StoreStack, open_stack

__all__ = ["ByteMemory", "StoreLink", "link_of"]

FILLED_BYTES = 16 << 20
"""What is written to the memory at once: more leaves the processor's cache before it is copied, less is more calls."""

Filling = tuple[NDArray[np.int32], list[Row]]
"""Blocks of a group, and the bytes for each of them."""

Places = NDArray[np.int8]
"""Where the stores have each missing block of each group, `[num_groups, n]`: see `StoreStack.look`."""


@runtime_checkable
class ByteMemory(Protocol):
    """A memory whose blocks can be read and written as bytes, as stores keep them."""

    def block_format(self) -> tuple[tuple[int, ...], tuple[dict[str, Any], ...]]:
        """Return the bytes of one block of each group, and what they are, as JSON can say it."""

    def read_blocks(self, group: int, blocks: NDArray[np.int32], tier: str = "device") -> Any:
        """Return blocks as bytes, `[n, block_bytes]`, contiguous, on the host, as an array or tensor."""

    def write_blocks(self, group: int, blocks: NDArray[np.int32], rows: Any) -> None:
        """Fill blocks from bytes as `read_blocks` returns them."""


class StoreLink:
    """Hands blocks to the stores and gets them back, for one manager.

    `prefill_tokens_per_s` is how fast the engine computes a prompt: what would take longer to load is computed. None
    loads everything that is found. Unless it `asks`, an admission loads only what was fetched ahead and has come.
    `num_stored_tokens` counts the tokens of prompts that came from stores, and `num_declined_tokens` those that were
    there and were faster to compute. `num_unread_blocks` were to be stored, and the memory could not read them.
    """

    def __init__(self, config: CacheConfig, memory: ByteMemory) -> None:
        block_bytes, layers = memory.block_format()
        self._memory = memory
        self._block_bytes = block_bytes
        format = StoreFormat(config.model, config.block_size, block_bytes, layers)
        self.stack: StoreStack = open_stack(config.stores, format)
        self.prefill_tokens_per_s: float | None = None
        self.asks = True
        self.num_stored_tokens = self.num_declined_tokens = self.num_unread_blocks = 0
        self._counting = Lock()

    def keep(self, order: KeptBlocks) -> None:
        """Hand blocks to the stores that want such; those that the memory cannot read are not stored."""
        if not self.stack.wants(order.cause, order.priority, order.hits):
            return
        rows = self._read(order, np.arange(len(order.keys)))
        if rows is not None:
            self.stack.put(order.keys, rows, order.cause, order.priority, order.hits)

    def offer_again(self, state: CacheState, extent: Extent) -> None:
        """Hand to the stores what they did not take before of the prefix that ends with an extent of the device."""
        if self.stack.may_refill and state.keeper is not None:
            state.keeper.offer_again(extent, self.stack.num_missed, self._refill)

    def _refill(self, order: KeptBlocks) -> bool:
        read = partial(self._read, order)
        return self.stack.refill(order.keys, order.group, order.priority, order.hits, read)

    def _read(self, order: KeptBlocks, at: NDArray[np.intp]) -> NDArray[np.uint8] | None:
        """Return the bytes of some blocks of an order, `[n, block_bytes]`; None where the memory cannot read them."""
        try:
            return np.asarray(self._memory.read_blocks(order.group, order.sources[at], order.source_tier))
        except Exception:
            self.num_unread_blocks += len(at)
            return None

    def find(
        self,
        state: CacheState,
        prompt: bytes | memoryview,
        namespace: Namespace,
        limit: int,
        match: Match | None,
        look: Look,
    ) -> tuple[Missing, int, Places] | None:
        """Look what the stores have of a prompt beyond the device, each key with `look`.

        Returns what the device lacks, how many of these columns could be had, and where their blocks are.
        """
        missing = restoring.missing_of(state, prompt, namespace, limit, match)
        if missing is None:
            return None
        all_keys = partial(missing.keys, state)
        end, places = _looked(missing, lambda group, columns: look(all_keys(group, columns)))
        return (missing, end, places) if end else None

    def bring_up(
        self, state: CacheState, prompt: bytes | memoryview, namespace: Namespace, limit: int, match: Match | None,
        num_beams: int,
    ) -> tuple[Installed, list[Filling]] | None:  # fmt: skip
        """Get what the stores have of a prompt, and make room for it on the device.

        Returns where it goes, held, and for each group the blocks and the bytes to be written into each. None where
        nothing was found, or came in time, or where there is no room for it and the rest of the prompt.
        """
        look = self.stack.look if self.asks else self.stack.look_here
        found = self.find(state, prompt, namespace, limit, match, look)
        end = 0 if found is None else self._num_worth_loading(*found)
        if found is None or not end:
            return None
        missing = found[0]
        if not restoring.can_install(state, missing, end, self._other_needs(state, prompt, missing, end, num_beams)):
            return None
        wanted = missing.wanted(end)
        present = np.zeros(missing.held.shape, bool)
        rows: list[list[Row | None]] = []
        get = self.stack.get if self.asks else self.stack.take_here
        for group, columns in enumerate(wanted):
            rows.append(get(missing.keys(state, group, columns), group))
            present[group, columns[[row is not None for row in rows[-1]]]] = True
        end = missing.reach(present)
        others = self._other_needs(state, prompt, missing, end, num_beams)
        installed = restoring.install(state, missing, end, others) if end else None
        if installed is None:
            return None
        self.num_stored_tokens += (end - missing.num_of_use) * state.block_size
        return installed, _filled(installed.blocks, wanted, rows)

    def told(
        self, state: CacheState, prompt: bytes | memoryview, namespace: Namespace, match: Match | None, first: int
    ) -> tuple[tuple[str, int], ...]:
        """Return how many tokens of a prompt after its first `first` each store says it has, by name.

        Where a token takes blocks of several groups, that is the store with the first of these.
        """
        counts = dict.fromkeys(self.stack.names, 0)
        limit = len(prompt) - TOKEN_BYTES
        found = self.find(state, prompt, namespace, limit, match, self.stack.look)
        if found is None:
            return tuple(counts.items())
        missing, end, _ = found
        owners = _first_wanted(missing, end)
        start = max(first // state.block_size - missing.first, missing.num_of_use)
        keys = [missing.keys(state, group, np.array([column]))[0] for group, column in owners[start:]]
        for name in self.stack.where(keys):
            counts[name] = counts.get(name, 0) + state.block_size
        counts.pop("", None)
        return tuple(counts.items())

    def fill(self, fillings: list[Filling]) -> None:
        """Write bytes into the blocks of each group, part by part."""
        for group, (blocks, rows) in enumerate(fillings):
            step = max(1, FILLED_BYTES // max(1, self._block_bytes[group]))
            for first in range(0, len(blocks), step):
                part = np.stack([np.asarray(row) for row in rows[first : first + step]])
                self._memory.write_blocks(group, blocks[first : first + step], part)

    def fetch_ahead(
        self, state: CacheState, prompt: bytes | memoryview, namespace: Namespace, limit: int, match: Match | None
    ) -> tuple[int, Coming]:
        """Start to get what the stores have of a prompt, as far as that pays; returns how many tokens are asked for."""
        missing = restoring.missing_of(state, prompt, namespace, limit, match)
        if missing is None:
            return 0, Coming()
        asked = [missing.asked_for(group, len(missing.digests)) for group in range(len(missing.spans))]
        keys = [missing.keys(state, group, columns) for group, columns in enumerate(asked)]
        by_column = [dict(zip(columns.tolist(), each, strict=True)) for columns, each in zip(asked, keys, strict=True)]
        coming = self.stack.fetch_ahead(keys, lambda look: self._chosen(missing, by_column, look))
        return (len(missing.digests) - missing.num_of_use) * state.block_size, coming

    def _chosen(self, missing: Missing, by_column: list[dict[int, bytes]], look: Look) -> list[list[bytes]]:
        """Return, by group, which of its keys to fetch; called in another thread, and needs nothing of the core."""

        def look_in(group: int, columns: NDArray[np.intp]) -> NDArray[np.int8]:
            return look([by_column[group][column] for column in columns.tolist()])

        end, places = _looked(missing, look_in)
        end = self._num_worth_loading(missing, end, places) if end else 0
        return [
            [by_column[group][column] for column in columns.tolist() if places[group, column] != HERE]
            for group, columns in enumerate(missing.wanted(end))
        ]

    def _num_worth_loading(self, missing: Missing, end: int, places: Places) -> int:
        """Return how many of the first `end` columns to load: runs from one place, until one does not pay.

        What is needed of columns that can be gone on from without stores belongs to the first run.
        """
        rate, block_size = self.prefill_tokens_per_s, missing.spans[0].block_size
        if rate is None:
            return end
        wanted = np.zeros((len(places), end), bool)
        for group, columns in enumerate(missing.wanted(end)):
            wanted[group, columns] = True
        start = missing.num_of_use
        slowest = np.where(wanted, places[:, :end], HERE).max(axis=0)[start:]
        starts = [start, *(start + np.flatnonzero(np.diff(slowest)) + 1).tolist(), end]
        worth = 0
        for low, stop in pairwise(starts):
            begin = 0 if low == start else low
            seconds = self._seconds(places[:, begin:stop], wanted[:, begin:stop])
            if seconds and seconds >= (stop - low) * block_size / rate:
                break
            worth = stop
        if worth < end:
            present = places != NOWHERE
            present[:, worth:] = False
            worth = missing.reach(present) if worth else 0
            with self._counting:
                self.num_declined_tokens += (end - max(worth, start)) * block_size
        return worth

    def _seconds(self, places: Places, wanted: NDArray[np.bool_]) -> float:
        """Return how long it takes to get the wanted blocks from where they are."""
        total, sizes = 0.0, np.array(self._block_bytes)
        for place in np.unique(places[wanted]).tolist():
            counts = ((places == place) & wanted).sum(axis=1)
            total += self.stack.seconds_to_get(place, int((counts * sizes).sum()), int(counts.sum()))
        return total

    @staticmethod
    def _other_needs(
        state: CacheState, prompt: bytes | memoryview, missing: Missing, end: int, num_beams: int
    ) -> list[int]:
        num_cached = (missing.first + end) * state.block_size
        return prompt_needs(state, len(prompt) // TOKEN_BYTES, num_cached, num_beams, 0)


def link_of(config: CacheConfig, memory: object) -> StoreLink | None:
    """Open the stores of a configuration, if it has any.

    Raises ArgumentTypeError without a memory that gives bytes, and what opening the stores raises.
    """
    if not config.stores or not config.reuse:
        return None
    if not isinstance(memory, ByteMemory):
        raise ArgumentTypeError(
            f"memory is a {type(memory).__name__}: stores need one with block_format, read_blocks and write_blocks"
        )
    return StoreLink(config, memory)


def _filled(blocks: Blocks, wanted: list[NDArray[np.intp]], rows: list[list[Row | None]]) -> list[Filling]:
    """Pair the blocks of each group with the bytes for them."""
    fillings = []
    for group, (columns, contents) in enumerate(zip(wanted, rows, strict=True)):
        used = [at for at in np.flatnonzero(columns < blocks.shape[1]).tolist() if blocks[group, columns[at]] >= 0]
        fillings.append((blocks[group, columns[used]], [row for at in used if (row := contents[at]) is not None]))
    return fillings


def _looked(missing: Missing, look: Callable[[int, NDArray[np.intp]], NDArray[np.int8]]) -> tuple[int, Places]:
    """Look for what is missing, by group and column; returns how many columns could be had, and where all blocks are.

    Full attention comes first, and says how far it is worth asking. What the device has is `HERE`.
    """
    end = len(missing.digests)
    places = np.where(missing.held, HERE, NOWHERE).astype(np.int8)
    for group, span in enumerate(missing.spans):
        columns = missing.asked_for(group, end)
        if len(columns):
            places[group, columns] = look(group, columns)
        if span.kind == "full":
            end = missing.reach_of_full(places != NOWHERE)
    return missing.reach(places != NOWHERE), places


def _first_wanted(missing: Missing, end: int) -> list[tuple[int, int]]:
    """Return for each of the first `end` columns the group and column of a block that is needed to go on after it.

    Returns nothing where windows need no block at all.
    """
    owners: list[tuple[int, int] | None] = [None] * end
    for group, columns in enumerate(missing.wanted(end)):
        for column in columns.tolist():
            owners[column] = owners[column] or (group, column)
    last = next((each for each in reversed(owners) if each is not None), None)
    if last is None:
        return []
    found = [last := each or last for each in reversed(owners)]
    return found[::-1]
