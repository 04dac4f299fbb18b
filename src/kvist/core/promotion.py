"""How content of the host tier comes back to the device when a prompt, a pin or a sequence that goes on asks for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvist.core.extents import Extent, Match, Namespace
from kvist.core.spanned import SpannedGroup
from kvist.core.state import CacheState

__all__ = ["Find", "find_lower", "path_blocks", "promote"]


@dataclass(slots=True)
class Find:
    """What of a prompt the host tier can add: `on_device` is where it goes on from, `match` where it ends there.

    `num_columns` blocks of the prompt could be reused in all, the first `num_device` of them on the device.
    """

    on_device: Match
    match: Match
    num_device: int
    num_columns: int

    def wanted(self, state: CacheState) -> list[NDArray[np.intp]]:
        """Return, by group, the columns of the host tier whose blocks are needed to go on after all that was found."""
        return [_wanted(state, group, self) for group in range(len(state.spans))]

    def blocks_on_device(self, state: CacheState) -> list[NDArray[np.int32]]:
        """Return, by group, the blocks on the device that are needed to go on after all that was found."""
        blocks = [np.empty(0, np.int32) for _ in state.spans]
        if state.has_full:
            blocks[0] = path_blocks(self.on_device.extent)
        for group in state.spanned:
            blocks[group.index] = _in_span_on_device(state, group, self)
        return blocks

    def whole(self, block_bytes: int) -> Match:
        """Return all of it as one match, cut to what could be gone on from."""
        node, match = self.match.bottom, Match(self.match.extent, self.num_columns * block_bytes)
        while node.start >= self.num_columns:
            assert node.parent is not None
            node = node.parent
        match.extent = node
        if node.start + node.num_blocks > self.num_columns:
            assert node.parent is not None
            match.extent, match.child, match.child_blocks = node.parent, node, self.num_columns - node.start
        match.known = self.match.position
        return match

    def path(self) -> list[Extent]:
        """List the extents of the host tier from the first on, the last one perhaps matched in part."""
        path, node = [], self.match.bottom
        while node.start + node.num_blocks > self.num_device:
            path.append(node)
            assert node.parent is not None
            node = node.parent
        return [extent for extent in path[::-1] if extent.start < self.num_columns]


def path_blocks(extent: Extent) -> NDArray[np.int32]:
    """Return the blocks of the first group of the prefix that ends with an extent."""
    return np.concatenate([np.empty(0, np.int32), *(node.blocks[0] for node in extent.path())])


def find_lower(
    state: CacheState, prompt: bytes | memoryview, namespace: Namespace, limit: int, match: Match | None
) -> Find | None:
    """Find what the host tier has of a prompt beyond what a match on the device has, up to `limit` bytes."""
    lower, tree = state.lower, state.tree
    if lower is None or not lower.num_extents or match is None:
        return None
    root = tree.roots.get(namespace)
    if root is None:
        return None
    on_device = tree.find(root, prompt, limit, partial=False)
    found = lower.find(on_device, prompt, limit)
    if found.position > on_device.position:
        state.settle()  # first, since what is published may take the place of what was found
        on_device = tree.find(root, prompt, limit, partial=False)
        found = lower.find(on_device, prompt, limit)
    num_columns = found.position // tree.block_bytes
    if found.position <= on_device.position or found.position <= match.position:
        return None
    if state.spanned:
        num_columns = tree.reach(found.bottom, num_columns)
    num_device = on_device.position // tree.block_bytes
    if num_columns <= num_device or num_columns * tree.block_bytes <= match.position:
        return None
    return Find(on_device, found, num_device, num_columns)


def promote(state: CacheState, find: Find, other_needs: list[int]) -> Extent | None:
    """Bring what was found to the device, and hold it; the caller releases the extent that is returned.

    `other_needs` are the blocks by pool that the caller will take besides: room is made for them, too. Returns None,
    and changes nothing, where there is not so much room.
    """
    wanted = find.wanted(state)
    needs = list(other_needs)
    for group, columns in enumerate(wanted):
        needs[state.pool_of[group]] += len(columns)
    in_span = [_in_span_on_device(state, each, find) for each in state.spanned]
    if not _is_room(state, find, in_span, needs):
        return None
    tree, device = state.tree, find.on_device.extent
    tree.hold(device)
    for each, blocks in zip(state.spanned, in_span, strict=True):
        each.retain(blocks)
    path = _claim(state, find)
    state.make_room(needs)
    raised = device
    for extent in path:
        raised = _raise(state, extent, raised, wanted)
    tree.hold(raised)
    for each, blocks in zip(state.spanned, in_span, strict=True):
        each.relinquish(blocks)
    tree.release(device)
    return raised


def _wanted(state: CacheState, group: int, find: Find) -> NDArray[np.intp]:
    """Return the columns of the host tier whose blocks of a group are needed to go on after all that was found."""
    span, first = state.spans[group], 0
    if span.kind == "cross":
        return np.empty(0, np.intp)
    if span.kind == "state":
        first = find.num_columns - 1
    elif span.kind != "full":
        first = span.first_block(find.num_columns * state.block_size)
    columns = np.arange(find.num_device, find.num_columns)
    return columns[(columns >= first) | (columns < (span.num_sink_blocks if span.kind != "full" else 0))]


def _in_span_on_device(state: CacheState, group: SpannedGroup, find: Find) -> NDArray[np.int32]:
    """Return the blocks of a group on the device that are needed to go on after all that was found."""
    if group.span.kind == "state":
        return np.empty(0, np.int32)
    first, num_sinks = group.span.first_block(find.num_columns * state.block_size), group.span.num_sink_blocks
    parts, node = [np.empty(0, np.int32)], find.on_device.extent
    while node.parent is not None:
        columns = np.arange(node.start, node.start + node.num_blocks)
        parts.append(node.blocks[group.index][(columns >= first) | (columns < num_sinks)])
        node = node.parent
    return np.concatenate(parts)


def _is_room(state: CacheState, find: Find, in_span: list[NDArray[np.int32]], needs: list[int]) -> bool:
    for index, pool in enumerate(state.pools):
        claimed = state.tree.num_evictable_on(find.on_device.extent) if pool is state.tree.full_pool else 0
        for group, blocks in zip(state.spanned, in_span, strict=True):
            if group.pool is pool:
                claimed += group.num_unheld(blocks)
        if needs[index] > pool.num_free + state.tree.evictable_in(pool) - claimed:
            return False
    return True


def _claim(state: CacheState, find: Find) -> list[Extent]:
    """Take what was found out of reach of the host tier's evictions; returns its extents, none too long."""
    lower, path = state.lower, find.path()
    assert lower is not None
    last = path[-1]
    path[-1] = lower.split(last, find.num_columns - last.start)
    for extent in path:
        extent.references = 1
        if extent.ticket:
            lower.queue.withdraw(extent)
    return path


def _raise(state: CacheState, extent: Extent, parent: Extent, wanted: list[NDArray[np.intp]]) -> Extent:
    """Give an extent of the host tier blocks on the device, where it is wanted, below its parent there."""
    assert state.lower is not None
    start, end = extent.start, extent.start + extent.num_blocks
    blocks = np.full((len(state.spans), extent.num_blocks), -1, np.int32)
    for group, columns in enumerate(wanted):
        inside = columns[(columns >= start) & (columns < end)] - start
        if len(inside):
            blocks[group, inside] = state.take(group, len(inside))
    return state.lower.bring_up(extent, parent, blocks)
