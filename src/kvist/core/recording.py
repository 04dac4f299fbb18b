"""How changes of the cache become events: called where they happen, and only where somebody wants to know."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvist.core.chain import Chain
from kvist.core.events import Cleared, Created, Event, Moved, Removed, Run, Stored, Updated
from kvist.core.extents import Blocks, Extent, Namespace, Root
from kvist.core.groups import Span

__all__ = [
    "DISPLACED",
    "DROPPED",
    "LOADED",
    "NOT_FILLED",
    "OUT_OF_SPAN",
    "PROMOTED",
    "PUBLISHED",
    "RESET",
    "TAKEN_OVER",
    "EventRecorder",
]

PUBLISHED, LOADED, DISPLACED, OUT_OF_SPAN = "published", "loaded", "stored on the device", "out of span"
PROMOTED, NOT_FILLED, DROPPED, RESET, TAKEN_OVER = "promoted", "could not be filled", "dropped", "reset", "overwritten"
"""Why content is stored, or goes, besides evictions."""

MAX_STAGED = 4096
UNBOUNDED = 2**62


class EventRecorder:
    """Makes events of what happens to extents, in order, until they are taken; of several groups narrow windows first.

    Each listed extent knows its `run` and where in it the extent begins. When many are `staged`, they are handed to
    `overflow`, if that is set.
    """

    def __init__(self, chain: Chain, spans: Sequence[Span], epoch: int, first_id: int = 0) -> None:
        self.chain = chain
        self._spans = spans
        self.epoch = epoch
        widths = [span.window or span.chunk_tokens or UNBOUNDED for span in spans]
        self._order = sorted(range(len(spans)), key=lambda group: widths[group])
        self.staged: list[Event] = []
        self._last: dict[Namespace, int] = {}
        self.overflow: Callable[[list[Event]], None] | None = None
        self._next_id = first_id

    @property
    def next_id(self) -> int:
        """The id of the next event."""
        return self._next_id

    def take(self) -> list[Event]:
        """Return what has happened since the last call."""
        staged, self.staged = self.staged, []
        self._last.clear()
        return staged

    def _stage(self, event: Event) -> None:
        if isinstance(event, Stored | Removed | Moved | Updated):
            self._last[event.run.namespace] = len(self.staged)
        else:
            self._last.clear()
        self.staged.append(event)
        if len(self.staged) > MAX_STAGED and self.overflow is not None:
            self.overflow(self.take())

    def _id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    # -- the whole cache ----------------------------------------------------------------------------------------------

    def created(self, num_blocks: dict[str, list[int]]) -> None:
        """Note how many blocks each group has in each tier; narrow windows first."""
        for group in self._order:
            span = self._spans[group]
            counts = {tier: counts[group] for tier, counts in num_blocks.items()}
            window = span.window or span.chunk_tokens or None
            self._stage(Created(self._id(), self.epoch, group, span.kind, window, span.block_size, counts))

    def cleared(self, namespace: Namespace | None, reason: str) -> None:
        """Note that a namespace, or everything, is forgotten in all tiers."""
        self._stage(Cleared(self._id(), self.epoch, namespace, reason))

    # -- names --------------------------------------------------------------------------------------------------------

    def name(self, extent: Extent) -> None:
        """Give a new extent a run: that of the same content below its parent."""
        parent = extent.parent
        assert parent is not None
        if isinstance(parent, Root):
            new = Run(self.chain, parent.namespace, None, 0, extent.start)
        else:
            assert parent.run is not None
            run, offset = parent.run
            new = Run(self.chain, run.namespace, run, offset + extent.start - parent.start, extent.start)
        new.append(self._whole(extent, 0))
        extent.run = new, 0

    def _whole(self, extent: Extent, first: int) -> bytes:
        size = self.chain.block_bytes
        return bytes(extent.tokens[first * size : len(extent.tokens) // size * size])

    def rename_grown(self, extent: Extent, first: int) -> None:
        """Let the run of an extent go on with its blocks from `first` on, or another begin if it went on otherwise."""
        assert extent.run is not None
        run, offset = extent.run
        if run.num_blocks == offset + first:
            run.append(self._whole(extent, first))
        else:
            self.name(extent)

    # -- blocks -------------------------------------------------------------------------------------------------------

    def stored(self, extent: Extent, first: int, tier: str, reason: str, blocks: Blocks | None = None) -> None:
        """Note that an extent's blocks from `first` on, or those that `blocks` has there, can be hit in a tier.

        A group that lacks the first of them comes after those that have it: it goes on from a block of theirs.
        """
        parts = self._parts(extent, first, blocks)
        begin = min((low for _, _, low, _, _ in parts), default=0)
        for group, run, low, end, columns in sorted(parts, key=lambda part: part[2] > begin):
            event = Stored(self._id(), self.epoch, group, tier, run, low, end, extent.priority, reason, columns)
            self._stage(event)

    def stored_in(self, extent: Extent, group: int, columns: NDArray[np.intp], tier: str) -> None:
        """Note that some columns of an extent have a block of a group now."""
        for run, low, end, chosen in self._of_group(extent, columns):
            event = Stored(self._id(), self.epoch, group, tier, run, low, end, extent.priority, PUBLISHED, chosen)
            self._stage(event)

    def removed(self, extent: Extent, first: int, tier: str, reason: str, blocks: Blocks | None = None) -> None:
        """Note that an extent's blocks from `first` on, or those that `blocks` has there, cannot be hit any more."""
        for group, run, low, end, columns in self._parts(extent, first, blocks):
            at = self._last.get(run.namespace, -1)  # how others' events lie between must not be seen in one's own
            last = self.staged[at] if at >= 0 else None
            if (
                isinstance(last, Removed)
                and (last.group, last.tier, last.reason, last.run, last.first) == (group, tier, reason, run, end)
                and columns is None
                and last.columns is None
            ):  # the tail of a prefix goes block by block: one event
                self.staged[at] = Removed(last.id, self.epoch, group, tier, run, low, last.end, reason)
                continue
            self._stage(Removed(self._id(), self.epoch, group, tier, run, low, end, reason, columns))

    def removed_in(self, extent: Extent, group: int, columns: NDArray[np.intp], tier: str, reason: str) -> None:
        """Note that some columns of an extent have no block of a group any more."""
        for run, low, end, chosen in self._of_group(extent, columns):
            self._stage(Removed(self._id(), self.epoch, group, tier, run, low, end, reason, chosen))

    def moved(self, extent: Extent, first: int, blocks: Blocks, source: str, tier: str, reason: str) -> None:
        """Note that blocks `[num_groups, n]` of an extent from `first` on are in another tier now."""
        for group, run, low, end, columns in self._parts(extent, first, blocks):
            self._stage(Moved(self._id(), self.epoch, group, tier, run, low, end, source, reason, columns))

    def updated(self, extent: Extent, old_priority: int, tier: str) -> None:
        """Note that an extent has another priority than before."""
        if extent.priority == old_priority or extent.run is None:
            return
        for group, run, low, end, _ in self._parts(extent, 0, None):
            event = Updated(self._id(), self.epoch, group, tier, run, low, end, old_priority, extent.priority)
            self._stage(event)

    def _parts(
        self, extent: Extent, first: int, blocks: Blocks | None
    ) -> list[tuple[int, Run, int, int, tuple[int, ...] | None]]:
        """List by group what of an extent from `first` on is there: run, first and end in it, columns if not all."""
        end = len(extent.tokens) // self.chain.block_bytes
        if blocks is None:
            blocks = extent.blocks[:, first:end]
        blocks = blocks[:, : end - first]
        if extent.run is None or not blocks.shape[1]:
            return []
        run, offset = extent.run
        low, parts = offset + first, []
        for group in self._order:
            column = blocks[group]
            present = np.flatnonzero(column >= 0)
            if not len(present):
                continue
            at, stop = int(present[0]), int(present[-1]) + 1
            columns = None if len(present) == stop - at else tuple((present - at).tolist())
            parts.append((group, run, low + at, low + stop, columns))
        return parts

    def _of_group(
        self, extent: Extent, columns: NDArray[np.intp]
    ) -> list[tuple[Run, int, int, tuple[int, ...] | None]]:
        columns = columns[columns < len(extent.tokens) // self.chain.block_bytes]
        if extent.run is None or not len(columns):
            return []
        run, offset = extent.run
        at, stop = int(columns[0]), int(columns[-1]) + 1
        chosen = None if len(columns) == stop - at else tuple((columns - at).tolist())
        return [(run, offset + at, offset + stop, chosen)]
