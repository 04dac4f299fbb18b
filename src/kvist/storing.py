"""Between the core, which knows what is worth keeping, the memory, which has the bytes, and the stores."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvist.config import CacheConfig
from kvist.core import restoring
from kvist.core.admission import prompt_needs
from kvist.core.extents import Blocks, Extent, Match, Namespace
from kvist.core.keeping import KeptBlocks
from kvist.core.restoring import Missing
from kvist.core.state import CacheState
from kvist.core.tokens import TOKEN_BYTES
from kvist.errors import ArgumentTypeError
from kvist.tiers.protocol import StoreFormat
from kvist.tiers.stack import HERE, NOWHERE, Coming, StoreStack, open_stack

__all__ = ["ByteMemory", "StoreLink", "link_of"]

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
    loads everything that is found. `num_stored_tokens` counts the tokens of prompts that came from stores, and
    `num_declined_tokens` those that were there and were faster to compute. `num_unread_blocks` were to be stored, and
    the memory could not read them.
    """

    def __init__(self, config: CacheConfig, memory: ByteMemory) -> None:
        block_bytes, layers = memory.block_format()
        self._memory = memory
        self._block_bytes = block_bytes
        format = StoreFormat(config.model, config.block_size, block_bytes, layers)
        self.stack: StoreStack = open_stack(config.stores, format)
        self.prefill_tokens_per_s: float | None = None
        self.num_stored_tokens = self.num_declined_tokens = self.num_unread_blocks = 0

    def keep(self, order: KeptBlocks) -> None:
        """Hand blocks to the stores that want such; those that the memory cannot read are not stored."""
        if not self.stack.wants(order.cause, order.priority, order.hits):
            return
        try:
            rows = np.asarray(self._memory.read_blocks(order.group, order.sources, order.source_tier))
        except Exception:
            self.num_unread_blocks += len(order.keys)
            return
        self.stack.put(order.keys, rows, order.cause, order.priority, order.hits)

    def find(
        self, state: CacheState, prompt: bytes | memoryview, namespace: Namespace, limit: int, match: Match | None
    ) -> tuple[Missing, int, Places] | None:
        """Look what the stores have of a prompt beyond the device.

        Returns what the device misses, how many of these blocks could be had, and where they are.
        """
        missing = restoring.missing_of(state, prompt, namespace, limit, match)
        if missing is None:
            return None
        end = len(missing.digests)
        columns, places = np.arange(end), np.full((len(state.spans), end), NOWHERE, np.int8)
        for group, span in enumerate(state.spans):  # full attention comes first, and says how far it is worth asking
            if span.kind != "cross":
                places[group, :end] = self.stack.look(missing.keys(state, group, columns[:end]))
                end = end if span.kind != "full" else missing.reach_of_full(places != NOWHERE)
        end = missing.reach(state, places != NOWHERE)
        return (missing, end, places) if end else None

    def bring_up(
        self, state: CacheState, prompt: bytes | memoryview, namespace: Namespace, limit: int, match: Match | None,
        num_beams: int,
    ) -> tuple[Extent, list[tuple[NDArray[np.int32], Any]]] | None:  # fmt: skip
        """Get what the stores have of a prompt, and make room for it on the device.

        Returns the extent, held, and for each group the blocks and the bytes to be written into them. None where
        nothing was found, or came in time, or where there is no room for it and the rest of the prompt.
        """
        found = self.find(state, prompt, namespace, limit, match)
        end = 0 if found is None else self._num_worth_loading(state, *found)
        if found is None or not end:
            return None
        missing = found[0]
        if not restoring.can_install(state, missing, end, self._other_needs(state, prompt, missing, end, num_beams)):
            return None
        wanted = missing.wanted(state, end)
        present = np.zeros((len(state.spans), len(missing.digests)), bool)
        rows: list[NDArray[np.uint8]] = []
        for group, columns in enumerate(wanted):
            contents, came = self.stack.get(missing.keys(state, group, columns), group)
            present[group, columns[came]] = True
            rows.append(contents)
        end = missing.reach(state, present)
        others = self._other_needs(state, prompt, missing, end, num_beams)
        installed = restoring.install(state, missing, end, others) if end else None
        if installed is None:
            return None
        extent, blocks = installed
        self.num_stored_tokens += end * state.block_size
        return extent, _filled(blocks, wanted, rows)

    def told(
        self, state: CacheState, prompt: bytes | memoryview, namespace: Namespace, match: Match | None, first: int
    ) -> tuple[tuple[str, int], ...]:
        """Return how many tokens of a prompt after its first `first` each store says it has, by name."""
        counts = dict.fromkeys(self.stack.names, 0)
        found = self.find(state, prompt, namespace, len(prompt) - TOKEN_BYTES, match)
        if found is not None:
            missing, end, _ = found
            columns = np.arange(max(first // state.block_size - missing.num_device, 0), end)
            group = next(group for group, span in enumerate(state.spans) if span.kind != "cross")
            wanted = np.intersect1d(missing.wanted(state, end)[group], columns)
            for name in self.stack.where(missing.keys(state, group, wanted)):
                counts[name] = counts.get(name, 0) + state.block_size
            counts.pop("", None)
        return tuple(counts.items())

    def fill(self, fillings: list[tuple[NDArray[np.int32], Any]]) -> None:
        """Write bytes into the blocks of each group."""
        for group, (blocks, rows) in enumerate(fillings):
            if len(blocks):
                self._memory.write_blocks(group, blocks, rows)

    def fetch_ahead(
        self, state: CacheState, prompt: bytes | memoryview, namespace: Namespace, limit: int, match: Match | None
    ) -> tuple[int, Coming]:
        """Start to get what the stores have of a prompt; returns how many tokens are asked for."""
        missing = restoring.missing_of(state, prompt, namespace, limit, match)
        if missing is None:
            return 0, Coming()
        columns = np.arange(len(missing.digests))
        kinds = [span.kind for span in state.spans]
        keys = [[] if kind == "cross" else missing.keys(state, group, columns) for group, kind in enumerate(kinds)]
        return len(columns) * state.block_size, self.stack.fetch_ahead(keys)

    def _num_worth_loading(self, state: CacheState, missing: Missing, end: int, places: Places) -> int:
        """Return how many of the first `end` missing blocks to load: runs from one place, until one does not pay."""
        if self.prefill_tokens_per_s is None:
            return end
        wanted = np.zeros((len(places), end), bool)
        for group, columns in enumerate(missing.wanted(state, end)):
            wanted[group, columns] = True
        slowest = np.where(wanted, places[:, :end], HERE).max(axis=0)
        starts = [0, *(np.flatnonzero(np.diff(slowest)) + 1).tolist(), end]
        worth = 0
        for start, stop in pairwise(starts):
            num_tokens = (stop - start) * state.block_size
            seconds = self._seconds(places[:, start:stop], wanted[:, start:stop])
            if seconds and seconds >= num_tokens / self.prefill_tokens_per_s:
                break
            worth = stop
        if worth < end:
            present = places != NOWHERE
            present[:, worth:] = False
            worth = missing.reach(state, present) if worth else 0
            self.num_declined_tokens += (end - worth) * state.block_size
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
        num_cached = (missing.num_device + end) * state.block_size
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


def _filled(
    blocks: Blocks, wanted: list[NDArray[np.intp]], rows: list[NDArray[np.uint8]]
) -> list[tuple[NDArray[np.int32], Any]]:
    """Pair the blocks of each group with the bytes for them."""
    fillings = []
    for group, (columns, contents) in enumerate(zip(wanted, rows, strict=True)):
        used = np.flatnonzero(columns < blocks.shape[1])
        used = used[blocks[group, columns[used]] >= 0]
        fillings.append((blocks[group, columns[used]], contents[used]))
    return fillings
