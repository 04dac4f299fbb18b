"""The host tier: what the device evicts goes on there, below what the device still has of its prefix.

With write-through it has copies of what the device has, too, which are in no tree of its own: see `Copies`.

Rules that must not be broken, with their reasons:

- An extent here hangs in `lower` of an extent of the device, or in `children` of another one here. So a prefix is on
  the device up to some block and here from there on, and whoever finds it finds the faster part first.
- No two extents below one place have the same first block, on whichever tier: what the device publishes anew replaces
  what is here.
- Extents here have whole blocks only, and nobody goes on from one: it is promoted first. Until it has been, it has a
  reference, and is not evicted.
- What could not be reached any more, since what it hangs below is gone, goes at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvist.core.copies import Copies
from kvist.core.eviction import Candidates
from kvist.core.expiries import Expiries
from kvist.core.extents import Blocks, Extent, Match, Twins
from kvist.core.moves import BlockMoves
from kvist.core.pool import BlockPool
from kvist.core.recording import DISPLACED, OUT_OF_SPAN, PROMOTED
from kvist.core.retention import DEFAULT_KEEP
from kvist.core.tokens import common_prefix

if TYPE_CHECKING:
    from kvist.core.tree import PrefixTree

__all__ = ["DEVICE", "HOST", "LowerTier"]

DEVICE, HOST = "device", "host"

MAX_JOINED = 256
"""Blocks up to which an extent here is lengthened at its front: taken in block by block, a prefix is few extents."""


class LowerTier:
    """The pools of host memory, what is in them, and what is evicted from them first.

    `pool_of` gives each group's pool; `order` takes the moves that are needed. What has less than `min_priority` or
    `min_hits` is not taken in. With `writes_through`, content is copied when the device gets it.
    """

    def __init__(
        self,
        tree: PrefixTree,
        pools: list[BlockPool],
        pool_of: list[int],
        queue: Candidates,
        order: Callable[[BlockMoves], None],
        *,
        min_priority: int,
        min_hits: int,
        writes_through: bool = False,
    ) -> None:
        self.tree = tree
        self.pools = pools
        self.pool_of = pool_of
        self._groups_of = [[group for group, own in enumerate(pool_of) if own == pool] for pool in range(len(pools))]
        self.queue = queue
        self.expiries = Expiries()
        self.order = order
        self.min_priority = min_priority
        self.min_hits = min_hits
        self.writes_through = writes_through
        self.copies = Copies(self)
        self.num_extents = 0
        self.num_demoted = self.num_promoted = self.num_evicted = self.num_refused = 0

    def copy_from(self, other: LowerTier, twins: Twins) -> None:
        """Have the copies of extents where another tier has the originals; `twins` are those of both tiers."""
        for pool, original in zip(self.pools, other.pools, strict=True):
            pool.copy_from(original)
        self.queue.copy_from(other.queue, twins)
        self.expiries.copy_from(other.expiries, twins)
        self.num_extents = other.num_extents
        self.num_demoted, self.num_promoted = other.num_demoted, other.num_promoted
        self.num_evicted, self.num_refused = other.num_evicted, other.num_refused
        self.copies.copy_from(other.copies, twins)

    # -- looking ------------------------------------------------------------------------------------------------------

    def find(self, match: Match, tokens: bytes | memoryview, limit: int) -> Match:
        """Follow `tokens` on from where a match on the device ends, in whole blocks, at most `limit` bytes far."""
        block_bytes, position, extent = self.tree.block_bytes, match.position, match.extent
        below = extent.lower if match.child is None else None
        while below and position + block_bytes <= limit:
            child = below.get(bytes(tokens[position : position + block_bytes]))
            if child is None:
                break
            length = min(len(child.tokens), limit - position)
            num_blocks = common_prefix(tokens, position, child.tokens, length) // block_bytes
            position += num_blocks * block_bytes
            if num_blocks < child.num_blocks:
                longer = Match(extent, position)
                longer.child, longer.child_blocks = child, num_blocks
                return longer
            extent, below = child, child.children
        return Match(extent, position)

    def extents(self) -> list[Extent]:
        """List all extents here, parents first, in an order that does not depend on when they came."""
        found: list[Extent] = []
        for _, root in sorted(self.tree.roots.items(), key=lambda item: repr(item[0])):
            for extent in root.subtree_in_order():
                for _, child in sorted((extent.lower or {}).items()):
                    found += child.subtree_in_order()
        return found

    # -- taking in ----------------------------------------------------------------------------------------------------

    def take(self, parent: Extent, extent: Extent, keep: int) -> bool:
        """Take in what an extent of the device is about to lose, its blocks but the first `keep`, below `parent`.

        What hangs below it goes along, and what has a copy here is not moved. Returns whether any of it was taken; what
        was not is gone, with all below it.
        """
        num_blocks = len(extent.tokens) // self.tree.block_bytes - keep
        if extent.keep.priority < self.min_priority or extent.hits < self.min_hits or num_blocks <= 0:
            self.num_refused += extent.num_blocks - keep
            self._evict_below(extent)
            self.copies.drop(extent, keep, self.tree.reason)
            return False
        copies = self.copies.take(extent, keep, num_blocks)
        blocks: Blocks = np.where(copies < 0, extent.blocks[:, keep : keep + num_blocks], -1)
        num_taken = self.make_room(blocks, over_copies=True)
        if num_taken < num_blocks:
            self.num_refused += num_blocks - num_taken
            self._evict_below(extent)
            self.give_copies(extent, keep + num_taken, copies[:, num_taken:], self.tree.reason)
            blocks, copies = blocks[:, :num_taken], copies[:, :num_taken]
        if not num_taken:
            return False
        size, end = self.tree.block_bytes, keep + num_taken
        if num_taken < num_blocks and self.tree.keeper is not None:
            self.tree.keeper.evicted(extent, end, DEVICE)
        tokens = bytes(extent.tokens[keep * size : end * size])
        if self.tree.recorder is not None:
            self.tree.recorder.moved(extent, keep, blocks, DEVICE, HOST, self.tree.reason)
            self.tree.recorder.removed(extent, keep, DEVICE, self.tree.reason, copies)
            self.tree.recorder.removed(extent, end, DEVICE, self.tree.reason)
        taken: Blocks = np.maximum(copies, self.bring_in(blocks))
        hung = self._hang(parent, extent, tokens, taken, extent.start + keep)
        if num_taken < num_blocks and hung.parent is not None:
            self.tree.remember_loss(hung, bytes(extent.tokens[end * size : (end + 1) * size]))
        self.num_demoted += num_taken
        return True

    def make_room(self, blocks: Blocks, *, over_copies: bool = False) -> int:
        """Evict so that as many leading columns as can be fit in all pools; returns how many these are.

        Copies go last, if they may at all.
        """
        needs = [np.cumsum((blocks[groups] >= 0).sum(axis=0)) for groups in self._groups_of]
        for index, needed in enumerate(needs):
            if needed[-1] > self.pools[index].num_free:
                wanted = int(min(needed[-1], self.pools[index].num_blocks))
                self._evict(index, wanted)
                if over_copies:
                    self.copies.make_room(index, wanted)
        return min(
            int(np.searchsorted(needed, pool.num_free, side="right"))
            for needed, pool in zip(needs, self.pools, strict=True)
        )

    def bring_in(self, blocks: Blocks) -> Blocks:
        """Order moves of the device's blocks `[num_groups, n]`, and return the blocks here that they go to."""
        taken = np.full(blocks.shape, -1, np.int32)
        for group, index in enumerate(self.pool_of):
            present = np.flatnonzero(blocks[group] >= 0)
            if len(present):
                taken[group, present] = self.pools[index].take(len(present))
                self._order(group, blocks[group, present], taken[group, present], DEVICE, HOST)
        return taken

    def _order(
        self, group: int, sources: NDArray[np.int32], destinations: NDArray[np.int32], source: str, destination: str
    ) -> None:
        self.order(BlockMoves(sources, destinations, self.tree.block_size, group, source, destination))

    def _hang(self, parent: Extent, origin: Extent, tokens: bytes, blocks: Blocks, start: int) -> Extent:
        """Put blocks below an extent of the device, and what has hung below them until now, in `origin.lower`.

        Returns the extent here that they are in.
        """
        below, origin.lower = origin.lower, None
        key = tokens[: self.tree.block_bytes]
        if parent.lower is None:
            parent.lower = {}
        only = next(iter(below.values())) if below and len(below) == 1 else None
        if only is not None and only.num_blocks <= MAX_JOINED and only.keep == origin.keep:
            only.tokens, only.blocks = tokens + bytes(only.tokens), np.concatenate((blocks, only.blocks), axis=1)
            only.has_holes = bool((only.blocks < 0).any())
            only.start, only.key, only.parent = start, key, parent
            parent.lower[key] = only
            if self.tree.recorder is not None:
                self.tree.recorder.name(only)
            return only
        extent = Extent(parent, key, tokens, blocks, origin.created)
        extent.start, extent.has_holes = start, bool((blocks < 0).any())
        extent.last_use, extent.hits, extent.keep = origin.last_use, origin.hits, origin.keep
        # Anew, since when the device would have let it fall back is not known.
        self.expiries.wait(extent, self.tree._clock())
        if origin.run is not None:
            extent.run = origin.run[0], origin.run[1] + start - origin.start
        extent.children = below or None
        for child in (below or {}).values():
            child.parent = extent
        parent.lower[key] = extent
        self.num_extents += 1
        if not below:
            self._offer(extent)
        return extent

    # -- letting go ---------------------------------------------------------------------------------------------------

    def _offer(self, leaf: Extent | None) -> None:
        """Make a leaf a candidate for eviction, less what nothing could reach at its end."""
        while leaf is not None and not leaf.references:
            end = leaf.start + leaf.num_blocks
            reached = self.tree.reach(leaf, end)
            if reached > leaf.start:
                if reached < end:
                    self._shrink(leaf, reached - leaf.start)
                self.queue.offer(leaf)
                return
            leaf = self._remove(leaf)

    def _evict(self, index: int, wanted: int) -> None:
        """Evict, in the policy's order and victims from their tails, until so many blocks of a pool are free."""
        if self.expiries.entries:
            self._expire_priorities()
        pool, groups = self.pools[index], self._groups_of[index]
        while pool.num_free < wanted and self.queue.num_candidates:
            victim = self.queue.first()
            from_tail = np.cumsum((victim.blocks[groups] >= 0).sum(axis=0)[::-1])
            keep = victim.num_blocks - 1 - int(np.searchsorted(from_tail, wanted - pool.num_free))
            if keep > 0:
                keep = self.tree.reach(victim, victim.start + keep) - victim.start
            if keep > 0:
                self.num_evicted += victim.num_blocks - keep
                self._offer_to_stores(victim, keep)
                self._shrink(victim, keep)
            else:
                self.queue.withdraw_first()
                self.num_evicted += victim.num_blocks
                self._offer_to_stores(victim, 0)
                self._offer(self._remove(victim))

    def _expire_priorities(self) -> None:
        """Let priorities whose time is over fall back to the default, as on the device."""
        for extent in self.expiries.take_due(self.tree._clock()):
            self.tree.tick += 1
            extent.keep, extent.last_use = DEFAULT_KEEP, self.tree.tick
            if extent.ticket:
                self.queue.withdraw(extent)
                self.queue.offer(extent)

    def _offer_to_stores(self, victim: Extent, keep: int) -> None:
        if self.tree.keeper is not None:
            self.tree.keeper.evicted(victim, keep, HOST)

    def _shrink(self, leaf: Extent, keep: int) -> None:
        at = keep * self.tree.block_bytes
        self._note_removed(leaf, keep, self.tree.reason)
        self._give(leaf.blocks[:, keep:])
        self.tree.remember_loss(leaf, bytes(leaf.tokens[at : at + self.tree.block_bytes]))
        leaf.tokens, leaf.blocks = leaf.tokens[:at], leaf.blocks[:, :keep]

    def _remove(self, leaf: Extent) -> Extent | None:
        """Take a leaf that is no candidate out; returns its parent if that is here, and a leaf now."""
        parent, key = leaf.parent, leaf.key
        assert parent is not None
        assert key is not None
        self._note_removed(leaf, 0, self.tree.reason)
        self._give(leaf.blocks)
        self.num_extents -= 1
        leaf.parent = None
        self.tree.remember_loss(parent, key)
        if parent.lower is not None and parent.lower.get(key) is leaf:
            self.unhang(parent, key)
            return None
        assert parent.children is not None
        del parent.children[key]
        if parent.children:
            return None
        parent.children = None
        return parent

    def unhang(self, parent: Extent, key: bytes) -> Extent:
        """Take an extent, with all below it, from below one of the device; it is not given back."""
        assert parent.lower is not None
        extent = parent.lower.pop(key)
        if not parent.lower:
            parent.lower = None
            self.tree.forget_if_unused(parent)
        return extent

    def forget_below(self, extent: Extent, keep: int = 0) -> None:
        """Let go of all that hangs below an extent of the device, and of the copies of its blocks from `keep` on."""
        self.copies.drop(extent, keep, self.tree.reason)
        if extent.lower is not None:
            self._forget_below(extent)

    def lose(self, extent: Extent, keep: int) -> None:
        """Forget the blocks of an extent here but the first `keep`, which do not hold what they should, and all below.

        Neither is offered to stores.
        """
        for child in (extent.children or {}).values():
            self._forget_subtree(child)
        extent.children = None
        if extent.ticket:
            self.queue.withdraw(extent)
        if keep:
            self._shrink(extent, keep)
            self._offer(extent)
        else:
            self._offer(self._remove(extent))

    def drop_below(self, extent: Extent) -> None:
        """Let go of all that hangs below an extent of a namespace that is cleared, and tell no more of either."""
        extent.run = None
        for child in (extent.lower or {}).values():
            for each in child.subtree():
                each.run = None
        self.forget_below(extent)

    def _evict_below(self, extent: Extent) -> None:
        """Let go of all that hangs below an extent of the device, and offer it to stores."""
        for child in (extent.lower or {}).values():
            for each in child.subtree():
                self._offer_to_stores(each, 0)
        self._forget_below(extent)

    def _forget_below(self, extent: Extent) -> None:
        below, extent.lower = extent.lower, None
        for child in (below or {}).values():
            self._forget_subtree(child)

    def _forget_subtree(self, extent: Extent) -> None:
        """Give back an extent that hangs nowhere any more, and all below it."""
        for each in list(extent.subtree()):
            if each.ticket:
                self.queue.withdraw(each)
            self._note_removed(each, 0, self.tree.reason)
            self._give(each.blocks)
            self.num_extents -= 1
            self.num_evicted += each.num_blocks
            each.parent = each.children = None

    def _note_removed(self, extent: Extent, keep: int, reason: str) -> None:
        if self.tree.recorder is not None:
            self.tree.recorder.removed(extent, keep, HOST, reason)

    def give_copies(self, extent: Extent, first: int, copies: Blocks, reason: str) -> None:
        """Give back blocks that were copies of the columns of an extent of the device from `first` on."""
        if self.tree.recorder is not None:
            self.tree.recorder.removed(extent, first, HOST, reason, copies)
        self._give(copies)

    def _give(self, blocks: Blocks) -> None:
        for group, index in enumerate(self.pool_of):
            column = blocks[group]
            self.pools[index].give(column[column >= 0])

    # -- going up -----------------------------------------------------------------------------------------------------

    def split(self, extent: Extent, num_blocks: int) -> Extent:
        """Cut an extent here after its first blocks and return the upper part; the lower one keeps its identity."""
        if num_blocks == extent.num_blocks:
            return extent
        at, parent = num_blocks * self.tree.block_bytes, extent.parent
        assert parent is not None
        assert extent.key is not None
        upper = Extent(parent, extent.key, bytes(extent.tokens[:at]), extent.blocks[:, :num_blocks], extent.created)
        upper.start, upper.has_holes, upper.last_use = extent.start, extent.has_holes, extent.last_use
        upper.hits, upper.keep = extent.hits, extent.keep
        below = parent.lower if parent.lower is not None and parent.lower.get(extent.key) is extent else parent.children
        assert below is not None
        below[extent.key] = upper
        extent.start += num_blocks
        extent.parent, extent.tokens, extent.blocks = upper, extent.tokens[at:], extent.blocks[:, num_blocks:]
        extent.key = bytes(extent.tokens[: self.tree.block_bytes])
        if extent.run is not None:
            run, offset = upper.run = extent.run
            extent.run = run, offset + num_blocks
        upper.children = {extent.key: extent}
        self.num_extents += 1
        return upper

    def bring_up(self, extent: Extent, parent: Extent, blocks: Blocks) -> Extent:
        """Replace an extent here that hangs below one of the device by one there, and copy what `blocks` are for.

        `blocks` `[num_groups, n]` are the device's, -1 where nothing is needed. Returns the extent there, which nobody
        refers to yet; what hung below this one hangs below that.
        """
        assert extent.key is not None
        self.unhang(parent, extent.key)
        if extent.ticket:
            self.queue.withdraw(extent)
        if self.tree.recorder is not None:
            if not self.writes_through:
                self.tree.recorder.moved(extent, 0, blocks, HOST, DEVICE, PROMOTED)
            unused = np.where(blocks < 0, extent.blocks, -1)
            self.tree.recorder.removed(extent, 0, HOST, OUT_OF_SPAN, unused)
        for group in range(len(self.pool_of)):
            wanted = np.flatnonzero(blocks[group] >= 0)
            if len(wanted):
                self._order(group, extent.blocks[group, wanted], blocks[group, wanted], HOST, DEVICE)
        self.num_extents -= 1
        self.num_promoted += extent.num_blocks
        raised = self.tree.add_unheld(parent, extent, blocks)
        if self.tree.recorder is not None and self.writes_through:
            self.tree.recorder.stored(raised, 0, DEVICE, PROMOTED)
        self._give(self.copies.adopt(raised, 0, extent.blocks))
        self.hang_below(raised, extent.children)
        extent.parent = extent.children = None
        return raised

    @staticmethod
    def hang_below(extent: Extent, below: dict[bytes, Extent] | None) -> None:
        """Let extents here hang below one of the device that nothing hangs below."""
        extent.lower = below or None
        for child in (below or {}).values():
            child.parent = extent

    def make_way(self, extent: Extent) -> None:
        """Let go of what the device has just published, in `extent`; what hung below it here, hangs there."""
        parent, key = extent.parent, extent.key
        if parent is None or parent.lower is None or key is None or key not in parent.lower:
            return
        for end, below in self._left_over(self.unhang(parent, key), extent):
            upper = extent if end == extent.start + extent.num_blocks else self.tree.split(extent, end - extent.start)
            self.hang_below(upper, below)

    def _left_over(self, twin: Extent, extent: Extent) -> list[tuple[int, dict[bytes, Extent]]]:
        """Let go of what an extent that hangs nowhere, and those below it, have in common with one of the device.

        Returns what is left of them, by the number of blocks of the prefix that it comes after.
        """
        content, size, at = bytes(extent.tokens), self.tree.block_bytes, 0
        left: list[tuple[int, dict[bytes, Extent]]] = []
        each: Extent | None = twin
        while each is not None:
            length = min(len(each.tokens), len(content) - at)
            num_blocks = common_prefix(content, at, each.tokens, length) // size
            unused = self.copies.adopt(extent, at // size, each.blocks[:, :num_blocks])
            at += num_blocks * size
            if num_blocks < each.num_blocks:
                below = {self._cut_loose(each, unused): each}
                each = None
            else:
                below = self._given_up(each, unused)
                each = below.pop(content[at : at + size], None)
            if below:
                left.append((extent.start + at // size, below))
        return left

    def _given_up(self, extent: Extent, unused: Blocks) -> dict[bytes, Extent]:
        """Forget an extent that hangs nowhere, give its `unused` blocks back, and return what has hung below it."""
        if extent.ticket:
            self.queue.withdraw(extent)
        if self.tree.recorder is not None:
            self.tree.recorder.removed(extent, 0, HOST, DISPLACED, unused)
        self._give(unused)
        self.num_extents -= 1
        below = extent.children or {}
        extent.parent = extent.children = None
        return below

    def _cut_loose(self, extent: Extent, unused: Blocks) -> bytes:
        """Cut the first columns off an extent that hangs nowhere, and return the key that it has then.

        Those of their blocks that are `unused` are given back.
        """
        num_blocks = unused.shape[1]
        at = num_blocks * self.tree.block_bytes
        if self.tree.recorder is not None:
            self.tree.recorder.removed(extent, 0, HOST, DISPLACED, unused)
        if extent.run is not None:
            extent.run = extent.run[0], extent.run[1] + num_blocks
        self._give(unused)
        extent.tokens, extent.blocks = bytes(extent.tokens[at:]), extent.blocks[:, num_blocks:]
        extent.start += num_blocks
        extent.key = extent.tokens[: self.tree.block_bytes]
        return extent.key
