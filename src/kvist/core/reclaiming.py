"""Making room where groups need different parts of the past: what goes first, and what goes with it.

First the blocks of a group that matter least, then whole positions from the tails of the policy's victims, in all
groups, then blocks that only prefixes in use would need again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvist.core.extents import Extent
from kvist.core.losses import ASKED_FOR, MADE_ROOM
from kvist.core.pool import BlockPool
from kvist.core.spanned import SpannedGroup

if TYPE_CHECKING:
    from kvist.core.tree import PrefixTree

__all__ = ["evict_in_groups", "evict_positions"]


def evict_in_groups(tree: PrefixTree, pool: BlockPool, wanted: int) -> None:
    """Evict until so many blocks of a pool are free; so many must be free or evictable."""
    groups = tree.groups_of.get(pool, [])
    for group in groups:
        if pool.num_free < wanted:
            tree.note_evicted(group.take_spare(wanted - pool.num_free, tree.reason))
    if pool is not tree.full_pool:
        for group in groups:
            if pool.num_free < wanted:
                tree.note_evicted(group.take_middles(wanted - pool.num_free, tree.reason))
    _evict_tails(tree, pool, groups, wanted)
    for group in groups:
        if pool.num_free < wanted:
            _take_anywhere(tree, group, wanted)
        if group.emptied:
            _drop_emptied(tree, group)


def _drop_emptied(tree: PrefixTree, group: SpannedGroup) -> None:
    """Let go of leaves that have no block left in any group."""
    for extent in group.emptied:
        if extent.ticket and (extent.blocks < 0).all():
            tree.queue.withdraw(extent)
            tree.let_go(extent)
    group.emptied.clear()


def _evict_tails(tree: PrefixTree, pool: BlockPool, groups: list[SpannedGroup], wanted: int) -> None:
    """Let go of positions at the tails of victims, until so many blocks of a pool are free or no victim has any."""
    passed = []
    while pool.num_free < wanted and tree.queue.num_candidates:
        extent = tree.queue.first()
        num_blocks, missing = extent.blocks.shape[1], wanted - pool.num_free
        keep = 0 if not groups and missing >= num_blocks else _num_kept(tree, extent, pool, groups, missing)
        if 0 < keep < num_blocks:
            tree.shrink(extent, keep)
        elif keep and (extent.blocks >= 0).any():
            tree.queue.withdraw(extent)
            passed.append(extent)
        else:
            tree.queue.withdraw_first()
            tree.let_go(extent)
    for extent in passed:
        tree.queue.offer(extent)


def evict_positions(tree: PrefixTree, num_blocks: int) -> int:
    """Evict about so many blocks, of all groups, by whole positions in the policy's order; returns the number.

    Positions without blocks go on the way to others, but not where there is no block to be had.
    """
    pools = [*tree.groups_of] if tree.full_pool is None else [tree.full_pool, *tree.groups_of]
    if tree.spanned and not any(map(tree.evictable_in, pools)):
        return 0
    if tree.expiries.entries:
        tree.expire_priorities()
    tree.reason = ASKED_FOR
    before = sum(tree.num_evicted.values())
    groups = [*tree.spanned]
    while (missing := num_blocks - sum(tree.num_evicted.values()) + before) > 0 and tree.queue.num_candidates:
        extent = tree.queue.first()
        keep = _num_kept(tree, extent, tree.full_pool, groups, missing)
        if 0 < keep < extent.blocks.shape[1]:
            tree.shrink(extent, keep)
        else:
            tree.queue.withdraw_first()
            tree.let_go(extent)
    for group in groups:
        if (missing := num_blocks - sum(tree.num_evicted.values()) + before) > 0:
            wanted = group.pool.num_free + missing
            tree.note_evicted(group.take_spare(missing, tree.reason))
            _take_anywhere(tree, group, wanted)
    tree.reason = MADE_ROOM
    return sum(tree.num_evicted.values()) - before


def _num_kept(tree: PrefixTree, extent: Extent, pool: BlockPool | None, groups: list[SpannedGroup], wanted: int) -> int:
    """Count the leading columns of a victim that stay when so many blocks of a pool go from its tail."""
    num_blocks: int = extent.blocks.shape[1]
    of_full = int(pool is not None and pool is tree.full_pool)
    if not groups:
        keep = num_blocks - wanted
    elif not extent.has_holes:
        keep = num_blocks + -wanted // (len(groups) + of_full)
    else:
        present = np.sum([extent.blocks[group.index] >= 0 for group in groups], axis=0)
        from_tail = np.cumsum(present[::-1] + of_full)
        total = int(from_tail[-1])
        if not total:
            return num_blocks
        keep = num_blocks - 1 - int(np.searchsorted(from_tail, min(wanted, total)))
    if keep <= 0:
        return 0
    keep = tree.reach(extent, extent.start + keep) - extent.start
    return keep if keep > 0 else 0


def _take_anywhere(tree: PrefixTree, group: SpannedGroup, wanted: int) -> None:
    """Take blocks that only the ends of prefixes in use would need again."""
    for extent in list(tree.extents()):
        if group.pool.num_free >= wanted:
            return
        if extent.parent is None:
            continue
        tree.note_evicted(group.take_any(extent, wanted - group.pool.num_free, tree.reason))
        if extent.ticket:
            tree.queue.withdraw(extent)
            tree.offer(extent)
