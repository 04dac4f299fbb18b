"""Pins: prefixes that are held without a sequence, for a time and within a budget."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvist.core import admission
from kvist.core.extents import Extent, Match
from kvist.core.matching import Pin, PrefixMatch
from kvist.core.promotion import find_lower, path_blocks, promote
from kvist.core.state import CacheState
from kvist.core.tokens import TOKEN_BYTES
from kvist.errors import OutOfBlocks, SequenceError, StaleMatch

__all__ = ["num_pinned", "pin", "release_pin"]


def pin(state: CacheState, match: PrefixMatch, release: Callable[[Pin], None], lifetime_s: float | None) -> Pin:
    """Hold the whole blocks of a match, if they are all there and the budget allows."""
    state.settle()
    extent = _raised(state, match) if state.lower is not None and match.num_block_tokens else None
    if extent is None:
        found = _found_again(state, match)
        if found is not None:
            _require_budget(state, _blocks_of_match(state, found))
        extent = admission.extent_of(state, found) if found else state.tree.root(match.namespace)
        state.tree.hold(extent)
    num_columns = match.num_block_tokens // state.block_size
    blocks = [state.blocks_in_span(group, extent, num_columns) for group in state.spanned]
    for group, held in zip(state.spanned, blocks, strict=True):
        group.retain(held)
    expires_at_s = None if lifetime_s is None else state.clock() + lifetime_s
    made = Pin(release, match.namespace, match.num_block_tokens, expires_at_s)
    state.add_pin(made, extent, blocks)
    return made


def _raised(state: CacheState, match: PrefixMatch) -> Extent | None:
    """Bring what a match found in the host tier to the device and hold it; None if it is not in the host tier now."""
    tokens = match.tokens
    on_device = admission.match_prompt(state, tokens, match.namespace, len(tokens))
    find = find_lower(state, tokens, match.namespace, len(tokens), on_device)
    if find is None:
        return None
    if find.num_columns * state.block_size < match.num_block_tokens:
        raise _stale(match, find.num_columns * state.block_size)
    there = find.blocks_on_device(state)
    _require_budget(state, there, [len(columns) for columns in find.wanted(state)])
    extent = promote(state, find, [0] * len(state.pools))
    if extent is None:
        needed, free = find.num_columns - find.num_device, state.num_free_blocks
        raise OutOfBlocks(
            f"pin: {needed} blocks are in the host tier, and there is no room for them on the device",
            needed=needed,
            free=free,
            evictable=0,
            held=sum(pool.num_blocks for pool in state.pools) - free,
        )
    return extent


def _stale(match: PrefixMatch, left: int) -> StaleMatch:
    return StaleMatch(
        f"pin: the match had {match.num_block_tokens} tokens in whole blocks, {left} are left; match again"
    )


def release_pin(state: CacheState, made: Pin) -> None:
    """End the hold of a pin, which must not have been released."""
    if made not in state.pins:
        if made.is_released or made.expires_at_s is None:
            raise SequenceError("the pin has been released")
        return
    state.end_pin(made)


def _found_again(state: CacheState, match: PrefixMatch) -> Match | None:
    tree, tokens = state.tree, match.tokens
    root = tree.roots.get(match.namespace)
    found = tree.fit(tree.find(root, tokens, len(tokens), partial=False)) if root else None
    left = found.position // TOKEN_BYTES if found else 0
    if left < match.num_block_tokens:
        raise _stale(match, left)
    return found


def _require_budget(state: CacheState, blocks: list[NDArray[np.int32]], to_come: list[int] | None = None) -> None:
    """Raise OutOfBlocks if pins may not hold these blocks, and so many to come, by group, besides what they hold."""
    held = _pinned_blocks(state)
    for index, pool in enumerate(state.pools):
        groups = [group for group in range(len(state.spans)) if state.pool_of[group] == index]
        num_held = sum(len(held[group]) for group in groups)
        num_wanted = sum(
            len(np.union1d(held[group], blocks[group])) + (to_come[group] if to_come else 0) for group in groups
        )
        budget = int(state.config.pin_budget * pool.num_blocks)
        if num_wanted > budget:
            raise OutOfBlocks(
                f"pin: pins may hold {budget} of the {pool.num_blocks} blocks of group {groups[0]}, hold {num_held}, "
                f"and would hold {num_wanted}: {', '.join(map(repr, state.pins)) or 'no other pins'}",
                needed=num_wanted - num_held,
                free=max(budget - num_held, 0),
                evictable=0,
                held=num_held,
                group=groups[0],
            )


def _blocks_of_match(state: CacheState, found: Match) -> list[NDArray[np.int32]]:
    """Return the blocks that are needed to go on after a match, by group."""
    num_columns = found.position // state.tree.block_bytes
    blocks = [np.empty(0, np.int32) for _ in state.spans]
    if state.has_full:
        blocks[0] = path_blocks(found.bottom)[:num_columns]
    for group in state.spanned:
        blocks[group.index] = state.blocks_in_span(group, found.bottom, num_columns)
    return blocks


def num_pinned(state: CacheState) -> list[int]:
    """Count the blocks that pins hold, by group."""
    return [len(blocks) for blocks in _pinned_blocks(state)]


def _pinned_blocks(state: CacheState) -> list[NDArray[np.int32]]:
    """Return the ids of the blocks that pins hold, by group, each once."""
    parts: list[list[NDArray[np.int32]]] = [[np.empty(0, np.int32)] for _ in state.spans]
    for hold in state.pins.values():
        if state.has_full:
            parts[0].append(path_blocks(hold.extent))
        for group, blocks in zip(state.spanned, hold.blocks, strict=True):
            parts[group.index].append(blocks)
    return [np.unique(np.concatenate(blocks)) for blocks in parts]
