"""Pins: prefixes that are held without a sequence, for a time and within a budget."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvist.core import admission
from kvist.core.extents import Extent, Match
from kvist.core.matching import Pin, PrefixMatch
from kvist.core.state import CacheState
from kvist.core.tokens import TOKEN_BYTES
from kvist.errors import OutOfBlocks, SequenceError, StaleMatch

__all__ = ["num_pinned", "pin", "release_pin"]


def pin(state: CacheState, match: PrefixMatch, release: Callable[[Pin], None], lifetime_s: float | None) -> Pin:
    """Hold the whole blocks of a match, if they are all there and the budget allows."""
    state.settle()
    found = _found_again(state, match)
    if found is not None:
        _require_budget(state, found)
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
        raise StaleMatch(
            f"pin: the match had {match.num_block_tokens} tokens in whole blocks, {left} are left; match again"
        )
    return found


def _require_budget(state: CacheState, found: Match) -> None:
    """Raise OutOfBlocks if pins would hold more of a pool than they may."""
    num_columns = found.position // state.tree.block_bytes
    held = _pinned_blocks(state)
    for index, pool in enumerate(state.pools):
        groups = [group for group in range(len(state.spans)) if state.pool_of[group] == index]
        num_held = sum(len(held[group]) for group in groups)
        num_wanted = sum(
            len(np.union1d(held[group], _blocks_of_match(state, group, found, num_columns))) for group in groups
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


def _blocks_of_match(state: CacheState, group: int, found: Match, num_columns: int) -> NDArray[np.int32]:
    for spanned in state.spanned:
        if spanned.index == group:
            return state.blocks_in_span(spanned, found.bottom, num_columns)
    if state.spans[group].kind == "cross":
        return np.empty(0, np.int32)
    return _path_blocks(found.bottom)[:num_columns]


def _path_blocks(extent: Extent) -> NDArray[np.int32]:
    return np.concatenate([np.empty(0, np.int32), *(node.blocks[0] for node in extent.path())])


def num_pinned(state: CacheState) -> list[int]:
    """Count the blocks that pins hold, by group."""
    return [len(blocks) for blocks in _pinned_blocks(state)]


def _pinned_blocks(state: CacheState) -> list[NDArray[np.int32]]:
    """Return the ids of the blocks that pins hold, by group, each once."""
    parts: list[list[NDArray[np.int32]]] = [[np.empty(0, np.int32)] for _ in state.spans]
    for hold in state.pins.values():
        if state.has_full:
            parts[0].append(_path_blocks(hold.extent))
        for group, blocks in zip(state.spanned, hold.blocks, strict=True):
            parts[group.index].append(blocks)
    return [np.unique(np.concatenate(blocks)) for blocks in parts]
