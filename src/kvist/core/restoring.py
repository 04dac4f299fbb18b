"""How content of stores comes to the device: what of a prompt to ask them for, and where to put what they had.

Most of it goes on from what the device has, as a new extent. Blocks of windows and states that the device has let go
of, below content that it still has of other groups, fill the holes that they have left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvist.core import rings
from kvist.core.extents import Blocks, Extent, Match, Namespace
from kvist.core.groups import Span
from kvist.core.identity import UNKNOWN
from kvist.core.lower import DEVICE
from kvist.core.recording import LOADED, NOT_FILLED
from kvist.core.spanned import SpannedGroup
from kvist.core.state import CacheState
from kvist.core.tokens import TOKEN_BYTES

__all__ = ["Installed", "Missing", "can_install", "discard", "install", "missing_of"]

Present = NDArray[np.bool_]
"""Which blocks are there of those that are missing and those between them, bool `[num_groups, n]`."""


@dataclass(slots=True)
class Missing:
    """The whole blocks of a prompt that the device lacks, from column `first` of the prompt on.

    `on_device` is what it has, `num_device` blocks, None where it has nothing of the namespace; it can go on after
    `num_reached` of them. `digests` are those of the columns from `first` on, and `held`, `[num_groups, n]`, says what
    the device has there. `tokens` are the packed ids of the blocks after those that it has. Columns below are counted
    from `first` on.
    """

    namespace: Namespace
    on_device: Match | None
    num_device: int
    num_reached: int
    first: int
    digests: list[bytes]
    held: Present
    tokens: bytes
    spans: list[Span]

    @property
    def num_of_use(self) -> int:
        """How many of the columns from `first` on could be gone on from without any store."""
        return max(self.num_reached - self.first, 0)

    def keys(self, state: CacheState, group: int, columns: NDArray[np.intp]) -> list[bytes]:
        """Return the keys of a group's blocks in some columns."""
        assert state.keeper is not None
        digests = [self.digests[column] for column in columns.tolist()]
        return state.keeper.chain.keys(self.namespace, digests, group)

    def asked_for(self, group: int, end: int) -> NDArray[np.intp]:
        """Return the columns before `end` that a group lacks, and may need to go on somewhere."""
        span, columns = self.spans[group], np.flatnonzero(~self.held[group, :end])
        if span.kind == "cross":
            return columns[:0]
        if span.kind == "full":
            return columns
        return columns[self._in_span(span, self.num_of_use + 1, columns)]

    def _in_span(self, span: Span, end: int, columns: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Say which columns a group needs to go on after the first `end`, or after any later one."""
        first = span.first_block((self.first + end) * span.block_size) - self.first
        return (columns >= first) | (columns < span.num_sink_blocks - self.first)

    def reach(self, present: Present) -> int:
        """Return how many columns could be gone on from with those that are present; 0 if no more than without."""
        have = present | self.held
        end = self.reach_of_full(have) if self.spans[0].kind == "full" else len(self.digests)
        while end > self.num_of_use:
            ends = [self._reach_of(span, have[group], end) for group, span in enumerate(self.spans)]
            if min(ends) == end:
                return end
            end = min(ends)
        return 0

    @staticmethod
    def reach_of_full(present: Present) -> int:
        """Return how many leading blocks of the first group are present."""
        return int(np.append(present[0], False).argmin())

    def _reach_of(self, span: Span, have: NDArray[np.bool_], end: int) -> int:
        """Return `end`, or the longest shorter prefix that a group may go on from, where it has not all in its span."""
        if span.kind in ("full", "cross"):
            return end
        if span.kind == "state":
            there = np.flatnonzero(have[:end])
            return int(there[-1]) + 1 if len(there) else 0
        columns = np.arange(end)
        holes = np.flatnonzero(self._in_span(span, end, columns) & ~have[:end])
        return int(holes[-1]) if len(holes) else end

    def wanted(self, end: int) -> list[NDArray[np.intp]]:
        """Return, by group, which columns are needed from stores to go on after the first `end` of them."""
        found = []
        for group, span in enumerate(self.spans):
            columns = np.flatnonzero(~self.held[group, :end])
            if span.kind == "cross":
                columns = columns[:0]
            elif span.kind != "full":
                columns = columns[self._in_span(span, end, columns)]
            found.append(columns)
        return found


class Installed(NamedTuple):
    """Room on the device for what stores had: `extent` is held, and new if `is_new`.

    `blocks` `[num_groups, n]` are the new ones by column from `Missing.first` on, -1 where there is none. Those that
    fill holes are named in `filled`: the extent that they are in, or above which they are once it is split, the group,
    the columns of the prefix.
    """

    extent: Extent
    blocks: Blocks
    filled: list[tuple[Extent, SpannedGroup, NDArray[np.intp]]]
    is_new: bool


def missing_of(
    state: CacheState, prompt: bytes | memoryview, namespace: Namespace, limit: int, match: Match | None
) -> Missing | None:
    """Say what of a prompt's whole blocks, up to `limit` bytes, the device lacks; None if that is nothing.

    `match` is what it can go on from. What it has beyond that, without windows or states to go on, lacks these.
    """
    chain, tree = state.keeper.chain if state.keeper else None, state.tree
    if chain is None or limit < tree.block_bytes:
        return None
    if state.rings and rings.wraps(state, len(prompt) // TOKEN_BYTES):
        return None  # which reuses nothing
    state.settle()
    root = tree.roots.get(namespace)
    on_device = None if root is None else tree.find(root, prompt, limit, partial=False)
    position = 0 if on_device is None else on_device.position
    end = limit // tree.block_bytes * tree.block_bytes
    num_reached = 0 if match is None else match.position // tree.block_bytes
    if num_reached * tree.block_bytes >= end or (match is not None and match.position > position):
        return None
    num_device = position // tree.block_bytes
    tokens = _identified(bytes(prompt[position:end]), tree.block_bytes)
    total = num_device + len(tokens) // tree.block_bytes
    if total <= num_reached:
        return None
    held = _held(state, on_device, num_device, total)
    first = _first_missing(state, held, num_device, num_reached)
    before = _digests(state, namespace, on_device, min(first, max(num_device - 1, 0)), num_device)
    digests = [*before[len(before) - num_device + first :], *chain.extend(before[-1], tokens)]
    return Missing(namespace, on_device, num_device, num_reached, first, digests, held[:, first:], tokens, state.spans)


def _digests(
    state: CacheState, namespace: Namespace, on_device: Match | None, first: int, num_device: int
) -> list[bytes]:
    """Return the digests of blocks first .. num_device-1 of what the device has, or what a chain begins with."""
    assert state.keeper is not None
    if on_device is None or not num_device:
        return [state.keeper.chain.root(namespace)]
    return state.keeper.chain.of_path(on_device.bottom, first, num_device)


def _held(state: CacheState, on_device: Match | None, num_device: int, total: int) -> Present:
    """Return which blocks of a prompt the device has, bool `[num_groups, total]`."""
    held: Present = np.zeros((len(state.spans), total), bool)
    held[:, :num_device] = [[span.kind == "full"] for span in state.spans]
    node = None if on_device is None else on_device.bottom
    while state.spanned and node is not None and node.parent is not None:
        stop = min(node.start + node.num_blocks, num_device)
        held[:, node.start : stop] = node.blocks[:, : stop - node.start] >= 0
        node = node.parent
    return held


def _first_missing(state: CacheState, held: Present, num_device: int, num_reached: int) -> int:
    """Return the first column that some group lacks, and would need to go on after more than can be reached."""
    first = num_device
    for group in state.spanned:
        low = group.span.first_block((num_reached + 1) * state.block_size)
        columns = np.flatnonzero(~held[group.index, :num_device])
        columns = columns[(columns >= low) | (columns < group.span.num_sink_blocks)]
        first = min([first, *columns[:1].tolist()])
    return first


def _identified(tokens: bytes, block_bytes: int) -> bytes:
    """Return leading whole blocks of packed ids, up to one with an identity that was only looked up, and is not known.

    What that stands for is not kept, so it has no digest.
    """
    unknown = np.flatnonzero(np.frombuffer(tokens, np.int32) == UNKNOWN)
    return tokens[: unknown[0] * TOKEN_BYTES // block_bytes * block_bytes] if len(unknown) else tokens


def can_install(state: CacheState, missing: Missing, end: int, other_needs: list[int]) -> bool:
    """Say whether there is room for what is wanted of the first `end` columns, and for others, by pool."""
    needs = _needs(state, missing.wanted(end), other_needs)
    return _is_room(state, missing, _in_span(state, missing, end), needs)


def install(state: CacheState, missing: Missing, end: int, other_needs: list[int]) -> Installed | None:
    """Make room on the device for what is wanted of the first `end` columns; the caller fills it and releases it.

    `other_needs` are the blocks by pool that the caller will take besides. Returns None, and changes nothing, where
    there is not so much room.
    """
    wanted = missing.wanted(end)
    needs, in_span = _needs(state, wanted, other_needs), _in_span(state, missing, end)
    if not _is_room(state, missing, in_span, needs):
        return None
    tree = state.tree
    parent = _parent_of(state, missing)
    tree.hold(parent)
    for each, held in zip(state.spanned, in_span, strict=True):
        each.retain(held)
    state.make_room(needs)
    blocks: Blocks = np.full((len(state.spans), end), -1, np.int32)
    for group, columns in enumerate(wanted):
        if len(columns):
            blocks[group, columns] = state.take(group, len(columns))
    filled = _fill_holes(state, parent, missing.first, blocks)
    num_held = missing.num_device - missing.first
    is_new = end > num_held
    extent = _extended(state, parent, missing, blocks[:, num_held:]) if is_new else parent
    tree.hold(extent)
    if is_new and state.lower is not None:
        state.lower.make_way(extent)
    for each, held in zip(state.spanned, in_span, strict=True):
        each.relinquish(held)
    tree.release(parent)
    return Installed(extent, blocks, filled, is_new)


def _parent_of(state: CacheState, missing: Missing) -> Extent:
    """Return the extent that ends where what the device has of a prompt does, split off where needed."""
    if missing.on_device is None:
        return state.tree.root(missing.namespace)
    match = missing.on_device
    return match.extent if match.child is None else state.tree.split(match.child, match.child_blocks)


def _extended(state: CacheState, parent: Extent, missing: Missing, blocks: Blocks) -> Extent:
    """Add an extent with the blocks `[num_groups, n]` that come after what the device has; nobody holds it yet."""
    tree = state.tree
    tokens = missing.tokens[: blocks.shape[1] * tree.block_bytes]
    tree.tick += 1
    origin = Extent(parent, tokens[: tree.block_bytes], tokens, blocks, tree.tick)
    extent = tree.add_unheld(parent, origin, blocks.copy())
    if state.recorder is not None:
        state.recorder.name(extent)
        state.recorder.stored(extent, 0, DEVICE, LOADED)
    return extent


def _fill_holes(
    state: CacheState, bottom: Extent, first: int, blocks: Blocks
) -> list[tuple[Extent, SpannedGroup, NDArray[np.intp]]]:
    """Give extents of the device the blocks of their columns, of `blocks` from column `first` of the prompt on."""
    filled, node = [], bottom
    while node.parent is not None and node.start + node.num_blocks > first:
        low, stop = max(first, node.start), min(node.start + node.num_blocks, first + blocks.shape[1])
        for group in state.spanned if stop > low else ():
            new = blocks[group.index, low - first : stop - first]
            at = np.flatnonzero(new >= 0)
            if len(at):
                columns = low - node.start + at
                group.fill(node, columns, new[at])
                group.offer(node, node.start)
                if state.recorder is not None:
                    state.recorder.stored_in(node, group.index, columns, DEVICE)
                filled.append((node, group, low + at))
        node = node.parent
    return filled


def discard(state: CacheState, installed: Installed) -> None:
    """Release what could not be filled, and forget it, with what was split off its head since it was made."""
    unfilled, node = [], installed.extent
    while installed.is_new and node.parent is not None and node.created == installed.extent.created:
        unfilled.append(node)
        node = node.parent
    for extent, group, columns in installed.filled:
        _empty(state, extent, group, columns)
    state.tree.release(installed.extent)
    for each in unfilled:
        if each.key is not None and each.parent is not None and not each.references and not each.children:
            if state.lower is not None:
                state.lower.forget_below(each)
            state.tree.discard(each)


def _empty(state: CacheState, bottom: Extent, group: SpannedGroup, columns: NDArray[np.intp]) -> None:
    """Take the blocks of a group back from columns of the prefix that ends with an extent."""
    node = bottom
    while node.parent is not None and node.start + node.num_blocks > columns[0]:
        inside = columns[(columns >= node.start) & (columns < node.start + node.num_blocks)] - node.start
        if len(inside):
            group.empty(node, inside)
            if state.recorder is not None:
                state.recorder.removed_in(node, group.index, inside, DEVICE, NOT_FILLED)
        node = node.parent


def _needs(state: CacheState, wanted: list[NDArray[np.intp]], other_needs: list[int]) -> list[int]:
    needs = list(other_needs)
    for group, columns in enumerate(wanted):
        needs[state.pool_of[group]] += len(columns)
    return needs


def _in_span(state: CacheState, missing: Missing, end: int) -> list[NDArray[np.int32]]:
    return [_in_span_on_device(state, each, missing, end) for each in state.spanned]


def _in_span_on_device(state: CacheState, group: SpannedGroup, missing: Missing, end: int) -> NDArray[np.int32]:
    """Return the blocks of a group on the device that are needed to go on after the first `end` columns."""
    if missing.on_device is None or (group.span.kind == "state" and missing.first + end > missing.num_device):
        return np.empty(0, np.int32)
    total = missing.first + end
    first = group.span.first_block(total * state.block_size)
    parts, node = [np.empty(0, np.int32)], missing.on_device.bottom
    while node.parent is not None:
        columns = np.arange(node.start, min(node.start + node.num_blocks, missing.num_device, total))
        blocks = node.blocks[group.index, : len(columns)]
        parts.append(blocks[((columns >= first) | (columns < group.span.num_sink_blocks)) & (blocks >= 0)])
        node = node.parent
    return np.concatenate(parts)


def _is_room(state: CacheState, missing: Missing, in_span: list[NDArray[np.int32]], needs: list[int]) -> bool:
    """Say whether so many blocks of each pool could be had without what the device has of the prompt."""
    match = missing.on_device
    for index, pool in enumerate(state.pools):
        claimed = 0
        if match is not None and pool is state.tree.full_pool:
            claimed = state.tree.num_evictable_on(match.extent)
            if match.child is not None and not match.child.references:
                claimed += match.child_blocks
        for group, blocks in zip(state.spanned, in_span, strict=True):
            if group.pool is pool:
                claimed += group.num_unheld(blocks)
        if needs[index] > pool.num_free + state.tree.evictable_in(pool) - claimed:
            return False
    return True
