"""How content of stores comes to the device: what of a prompt to ask them for, and where to put what they had."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvist.core.extents import Blocks, Extent, Match, Namespace
from kvist.core.identity import UNKNOWN
from kvist.core.lower import DEVICE
from kvist.core.recording import LOADED
from kvist.core.spanned import SpannedGroup
from kvist.core.state import CacheState
from kvist.core.tokens import TOKEN_BYTES

__all__ = ["Missing", "can_install", "discard", "install", "missing_of"]

Present = NDArray[np.bool_]
"""Which blocks after those on the device are there, bool `[num_groups, n]`."""


@dataclass(slots=True)
class Missing:
    """The whole blocks of a prompt that the device does not have: `digests` of those after the first `num_device`.

    `on_device` is what it has, None where it has nothing of the namespace; `tokens` are the packed ids of the others.
    """

    namespace: Namespace
    on_device: Match | None
    num_device: int
    digests: list[bytes]
    tokens: bytes

    def keys(self, state: CacheState, group: int, columns: NDArray[np.intp]) -> list[bytes]:
        """Return the keys of a group's blocks in some columns of what is missing."""
        assert state.keeper is not None
        digests = [self.digests[column] for column in columns.tolist()]
        return state.keeper.chain.keys(self.namespace, digests, group)

    def reach(self, state: CacheState, present: Present) -> int:
        """Return how many of the missing blocks could be gone on from, with those that are present."""
        end = self.reach_of_full(present) if state.has_full else len(self.digests)
        while end and not all(self._is_whole(state, group, present[group.index], end) for group in state.spanned):
            end -= 1
        return end

    @staticmethod
    def reach_of_full(present: Present) -> int:
        """Return how many leading blocks of the first group are present."""
        return int(np.append(present[0], False).argmin())

    def wanted(self, state: CacheState, end: int) -> list[NDArray[np.intp]]:
        """Return, by group, which of the missing columns are needed to go on after the first `end` of them."""
        found = []
        for span in state.spans:
            columns = np.arange(0 if span.kind != "cross" else end, end)
            if span.kind not in ("full", "cross"):
                first = span.first_block((self.num_device + end) * state.block_size) - self.num_device
                is_needed = (columns >= first) | (columns < span.num_sink_blocks - self.num_device)
                columns = columns[is_needed]
            found.append(columns)
        return found

    def _is_whole(self, state: CacheState, group: SpannedGroup, present: NDArray[np.bool_], end: int) -> bool:
        """Say whether a group has all that is in span after `end` missing blocks, here and on the device."""
        total = self.num_device + end
        first, num_sinks = group.span.first_block(total * state.block_size), group.span.num_sink_blocks
        columns = np.arange(self.num_device, total)
        if not present[:end][(columns >= first) | (columns < num_sinks)].all():
            return False
        if self.on_device is None or group.span.kind == "state":
            return True
        bottom = self.on_device.bottom
        has_hole = group.last_hole(bottom, first, self.num_device) >= 0
        return not has_hole and group.last_hole(bottom, 0, min(num_sinks, self.num_device)) < 0


def missing_of(
    state: CacheState, prompt: bytes | memoryview, namespace: Namespace, limit: int, match: Match | None
) -> Missing | None:
    """Say what of a prompt's whole blocks, up to `limit` bytes, the device lacks; None if that is nothing.

    `match` is what it can go on from. What it has beyond, without windows or states to go on, is not asked for.
    """
    chain, tree = state.keeper.chain if state.keeper else None, state.tree
    if chain is None or limit < tree.block_bytes:
        return None
    state.settle()
    root = tree.roots.get(namespace)
    on_device = None if root is None else tree.find(root, prompt, limit, partial=False)
    position = 0 if on_device is None else on_device.position
    end = limit // tree.block_bytes * tree.block_bytes
    if position >= end or (match is not None and match.position > position):
        return None
    num_device = position // tree.block_bytes
    before = chain.root(namespace)
    if on_device is not None and num_device:
        before = chain.of_path(on_device.bottom, num_device - 1, num_device)[-1]
    tokens = _identified(bytes(prompt[position:end]), tree.block_bytes)
    if not tokens:
        return None
    return Missing(namespace, on_device, num_device, chain.extend(before, tokens), tokens)


def _identified(tokens: bytes, block_bytes: int) -> bytes:
    """Return leading whole blocks of packed ids, up to one with an identity that was only looked up, and is not known.

    What that stands for is not kept, so it has no digest.
    """
    unknown = np.flatnonzero(np.frombuffer(tokens, np.int32) == UNKNOWN)
    return tokens[: unknown[0] * TOKEN_BYTES // block_bytes * block_bytes] if len(unknown) else tokens


def can_install(state: CacheState, missing: Missing, end: int, other_needs: list[int]) -> bool:
    """Say whether there is room for the first `end` missing blocks, and for others, by pool."""
    needs = _needs(state, missing.wanted(state, end), other_needs)
    return _is_room(state, missing, _in_span(state, missing, end), needs)


def install(state: CacheState, missing: Missing, end: int, other_needs: list[int]) -> tuple[Extent, Blocks] | None:
    """Make an extent on the device of the first `end` missing blocks, and hold it; the caller fills it and releases it.

    Returns it with its blocks `[num_groups, end]`, -1 where a group needs none. `other_needs` are the blocks by pool
    that the caller will take besides. Returns None, and changes nothing, where there is not so much room.
    """
    wanted = missing.wanted(state, end)
    needs, in_span = _needs(state, wanted, other_needs), _in_span(state, missing, end)
    if not _is_room(state, missing, in_span, needs):
        return None
    tree, on_device = state.tree, missing.on_device
    parent: Extent = tree.root(missing.namespace)
    if on_device is not None:
        parent = on_device.extent
        if on_device.child is not None:
            parent = tree.split(on_device.child, on_device.child_blocks)
    tree.hold(parent)
    for each, held in zip(state.spanned, in_span, strict=True):
        each.retain(held)
    state.make_room(needs)
    blocks: Blocks = np.full((len(state.spans), end), -1, np.int32)
    for group, columns in enumerate(wanted):
        if len(columns):
            blocks[group, columns] = state.take(group, len(columns))
    tokens = missing.tokens[: end * tree.block_bytes]
    tree.tick += 1
    origin = Extent(parent, tokens[: tree.block_bytes], tokens, blocks, tree.tick)
    extent = tree.add_unheld(parent, origin, blocks)
    if state.recorder is not None:
        state.recorder.name(extent)
        state.recorder.stored(extent, 0, DEVICE, LOADED)
    tree.hold(extent)
    if state.lower is not None:
        state.lower.make_way(extent)
    for each, held in zip(state.spanned, in_span, strict=True):
        each.relinquish(held)
    tree.release(parent)
    return extent, blocks


def discard(state: CacheState, extent: Extent) -> None:
    """Release an extent that could not be filled, and forget it, with what was split off its head since it was made."""
    unfilled, node = [], extent
    while node.parent is not None and node.created == extent.created:
        unfilled.append(node)
        node = node.parent
    state.tree.release(extent)
    for each in unfilled:
        if each.key is not None and each.parent is not None and not each.references and not each.children:
            if state.lower is not None:
                state.lower.forget_below(each)
            state.tree.discard(each)


def _needs(state: CacheState, wanted: list[NDArray[np.intp]], other_needs: list[int]) -> list[int]:
    needs = list(other_needs)
    for group, columns in enumerate(wanted):
        needs[state.pool_of[group]] += len(columns)
    return needs


def _in_span(state: CacheState, missing: Missing, end: int) -> list[NDArray[np.int32]]:
    return [_in_span_on_device(state, each, missing, end) for each in state.spanned]


def _in_span_on_device(state: CacheState, group: SpannedGroup, missing: Missing, end: int) -> NDArray[np.int32]:
    """Return the blocks of a group on the device that are needed to go on after the first `end` missing ones."""
    if group.span.kind == "state" or missing.on_device is None:
        return np.empty(0, np.int32)
    first = group.span.first_block((missing.num_device + end) * state.block_size)
    parts, node = [np.empty(0, np.int32)], missing.on_device.bottom
    while node.parent is not None:
        columns = np.arange(node.start, min(node.start + node.num_blocks, missing.num_device))
        blocks = node.blocks[group.index, : len(columns)]
        parts.append(blocks[(columns >= first) | (columns < group.span.num_sink_blocks)])
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
