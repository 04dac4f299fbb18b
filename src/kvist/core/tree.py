"""The prefix tree: content is found by comparing token bytes, held and released by extents, and evicted leaf first.

Rules that must not be broken, with their reasons:

- Every extent but a root has at least one block, and only a leaf that nothing refers to may end in a partly filled
  block: sequences hold whole blocks, and copy from a partly filled one.
- `references` counts direct holders (sequences, pins) plus children that are themselves referenced. So an ancestor of
  anything held is referenced too, and holding or releasing stops at the first extent whose state does not change.
- Listed extents can be found by others (`key` is their key among the parent's children). An unlisted one (`key` is
  None) is shared only by the sequences that hold it, and ends with the last of them.
- A group with full attention has a block in every column of an extent, and holding the extent holds them. The blocks of
  the other groups are held one by one (see `SpannedGroup`), and may be missing.
- A candidate for eviction ends where all groups can go on from: what nothing could reach is let go at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from kvist.core import reclaiming
from kvist.core.eviction import Candidates
from kvist.core.expiries import Expiries
from kvist.core.extents import Blocks, Extent, Match, Namespace, Root, Twins
from kvist.core.keeping import Keeper
from kvist.core.losses import ASKED_FOR, MADE_ROOM, MAX_LOSSES_BELOW, UNREACHABLE, Losses
from kvist.core.lower import DEVICE, LowerTier
from kvist.core.pool import BlockPool
from kvist.core.recording import DROPPED, NOT_FILLED, PUBLISHED, EventRecorder
from kvist.core.retention import DEFAULT_KEEP, Keep
from kvist.core.siblings import SortedKeys
from kvist.core.spanned import SpannedGroup
from kvist.core.tokens import TOKEN_BYTES, common_prefix

__all__ = ["PrefixTree"]

FEW_CHILDREN = 4
SHORT_BYTES = 4096
"""So many bytes are copied faster than they are made to shrink in place."""


class PrefixTree:
    """All cached content of one manager: one root per namespace, one eviction queue, one pool per group.

    `full_pool` is that of the group with full attention, the first one, where there is one; `spanned` are the groups
    that hold a part of the past, cross attention left out.
    """

    def __init__(
        self,
        num_groups: int,
        full_pool: BlockPool | None,
        spanned: list[SpannedGroup],
        block_size: int,
        queue: Candidates,
        clock: Callable[[], float],
        *,
        partial: bool,
    ) -> None:
        self.num_groups = num_groups
        self.full_pool = full_pool
        self.spanned = spanned
        self.groups_of: dict[BlockPool, list[SpannedGroup]] = {}
        for group in spanned:
            self.groups_of.setdefault(group.pool, []).append(group)
        self.block_size = block_size
        self.lower: LowerTier | None = None
        self.keeper: Keeper | None = None
        self.recorder: EventRecorder | None = None
        self.has_tiers = self.has_listeners = False
        self._no_blocks = np.empty((num_groups, 0), np.int32)
        self._widest = max((group.span.num_most_blocks for group in spanned), default=0)
        self._all_spare = sum(group.bit for group in spanned)
        self.block_bytes = block_size * TOKEN_BYTES
        self.partial = partial
        self._clock = clock
        self.expiries = Expiries()
        self.losses = Losses()
        self.roots: dict[Namespace, Root] = {}
        self.queue = queue
        self.num_evictable = 0
        self.num_evicted = dict.fromkeys((MADE_ROOM, ASKED_FOR, UNREACHABLE), 0)
        self.tick = 0
        self.reason = MADE_ROOM

    def copy_from(self, other: PrefixTree, twins: Twins) -> None:
        """Have the copies of another tree's extents where that has the originals; evictions are not remembered."""
        for twin in twins.values():
            if twin.parent is not None:
                twin.parent = twins[id(twin.parent)]
            if twin.children is not None:
                twin.children = {key: twins[id(child)] for key, child in twin.children.items()}
            if twin.lower is not None:
                twin.lower = {key: twins[id(child)] for key, child in twin.lower.items()}
        for namespace, root in other.roots.items():
            twin_root = twins[id(root)]
            assert isinstance(twin_root, Root)
            self.roots[namespace] = twin_root
            for key in root.children or ():
                self.losses.note_first(twin_root, key)
        self.num_evictable, self.tick = other.num_evictable, other.tick
        self.queue.copy_from(other.queue, twins)
        self.expiries.copy_from(other.expiries, twins)

    # -- looking ------------------------------------------------------------------------------------------------------

    def root(self, namespace: Namespace) -> Root:
        """Return the namespace's root, made if it is not there."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Root(namespace, self.num_groups)
        return root

    def find(self, extent: Extent, tokens: bytes | memoryview, limit: int, *, partial: bool) -> Match:
        """Follow `tokens` down from `extent`, at most `limit` bytes far; changes nothing."""
        block_bytes, position = self.block_bytes, 0
        children = extent.children
        while children and position < limit:
            key = bytes(tokens[position : position + block_bytes])
            child = children.get(key)
            if child is None:
                match = Match(extent, position)
                if partial:
                    match.source, agreed = self._nearest(extent, key[: limit - position])
                    match.num_partial_tokens = agreed // TOKEN_BYTES
                return match
            known = child.tokens
            end = position + len(known)
            if end > limit or len(known) % block_bytes or not known.startswith(tokens[position:end]):
                return self._find_inside(Match(extent, position), child, tokens, limit, partial)
            extent, position, children = child, end, child.children
        return Match(extent, position)

    def _find_inside(self, match: Match, child: Extent, tokens: bytes | memoryview, limit: int, partial: bool) -> Match:
        length = min(len(child.tokens), limit - match.position)
        agreed = common_prefix(tokens, match.position, child.tokens, length)
        blocks, rest = divmod(agreed, self.block_bytes)
        match.position += agreed - rest
        if blocks:
            match.child, match.child_blocks = child, blocks
        if partial and rest:
            match.source, match.source_block, match.num_partial_tokens = child, blocks, rest // TOKEN_BYTES
        return match

    def _nearest(self, extent: Extent, rest: bytes) -> tuple[Extent | None, int]:
        """Return the child whose first block agrees longest with `rest`, and in how many bytes."""
        children, order = extent.children, extent.order
        if not children:
            return None, 0
        if order is None and len(children) > FEW_CHILDREN:
            order = extent.order = SortedKeys(children)
        first_token = rest[:TOKEN_BYTES]  # less than a token in common is nothing
        nearest, longest = None, 0
        for key in children if order is None else order.neighbours(rest):
            if key.startswith(first_token):
                agreed = common_prefix(rest, 0, key, min(len(key), len(rest)))
                if agreed > longest:
                    nearest, longest = children[key], agreed
        return nearest, longest

    def fit(self, match: Match) -> Match:
        """Shorten a match to where every group has what it needs to go on."""
        match.known = match.position
        num_blocks = match.position // self.block_bytes
        reached = self.reach(match.bottom, num_blocks)
        if reached < num_blocks:
            shorter = Match(match.bottom, reached * self.block_bytes)
            shorter.known = match.known
            while shorter.extent.parent is not None and shorter.extent.start >= reached:
                shorter.extent = shorter.extent.parent
            node = shorter.extent
            if node.parent is not None and node.start + node.blocks.shape[1] > reached:
                shorter.extent, shorter.child, shorter.child_blocks = node.parent, node, reached - node.start
            return shorter
        if match.source is not None and not self._has_block(match.source, match.source_block):
            match.source, match.num_partial_tokens = None, 0
        return match

    def reach(self, extent: Extent, num_blocks: int) -> int:
        """Return the longest prefix of at most that many blocks, on the path to an extent, that all groups reach."""
        node, widest = extent, self._widest
        while not node.has_holes:
            if node.parent is None or not node.start or node.start + widest <= num_blocks:
                return num_blocks
            node = node.parent
        reached, last = num_blocks, -1
        while reached != last:
            last = reached
            for group in self.spanned:
                reached = group.reach(extent, reached)
        return reached

    def _has_block(self, extent: Extent, column: int) -> bool:
        return all(
            group.span.kind != "state" and extent.blocks.item(group.index, column) >= 0 for group in self.spanned
        )

    # -- holding ------------------------------------------------------------------------------------------------------

    def hold(self, extent: Extent) -> None:
        """Keep an extent and all its ancestors from being evicted."""
        while True:
            extent.references = held = extent.references + 1
            parent = extent.parent
            if held > 1 or parent is None:
                return
            self.num_evictable -= extent.blocks.shape[1]
            if extent.ticket:
                self.queue.withdraw(extent)
            extent = parent

    def release(self, extent: Extent) -> None:
        """End one hold; what nothing refers to any more becomes evictable, deepest first, as used now."""
        self.tick = tick = self.tick + 1
        while True:
            extent.references = left = extent.references - 1
            if left:
                return
            parent = extent.parent
            if parent is None:
                if not extent.children:
                    self._forget_if_empty(extent)
                return
            if extent.key is None:
                self._give(extent.blocks, has_holes=extent.has_holes)
                self._forget_content(extent)
            else:
                extent.last_use = tick
                self.num_evictable += extent.blocks.shape[1]
                if not extent.children:
                    if self.spanned:
                        self.offer(extent)
                    else:
                        self.queue.offer(extent)
                if extent.keep is not DEFAULT_KEEP:
                    self.expiries.wait(extent, self._clock())
            extent = parent

    def offer(self, extent: Extent) -> None:
        """Make a leaf that nobody holds a candidate, less what no group could reach."""
        if self.spanned:
            leaf = self._cut_to_reach(extent)
            if leaf is None:
                return
            extent = leaf
            self.offer_spare(extent, extent.start)
        self.queue.offer(extent)

    def offer_spare(self, extent: Extent, first: int) -> None:
        """Note that an extent, and those above it down to column `first`, may have blocks that matter little."""
        if extent.spare == self._all_spare and extent.start <= first:
            return
        for group in self.spanned:
            group.offer(extent, first)

    def _cut_to_reach(self, extent: Extent) -> Extent | None:
        """Let go of what nothing could reach at the end of a leaf, or of a chain of them; return what stays."""
        reason, self.reason = self.reason, UNREACHABLE
        leaf: Extent | None = extent
        while leaf is not None:
            num_full = leaf.start + len(leaf.tokens) // self.block_bytes
            reached = self.reach(leaf, num_full)
            if reached == num_full and (reached > leaf.start or self._has_block(leaf, 0)):
                break
            if reached > leaf.start:
                self.shrink(leaf, reached - leaf.start)
                break
            leaf = self._remove(leaf, remember=True)
        self.reason = reason
        return leaf

    def expire_priorities(self) -> None:
        """Let priorities whose time is over fall back to the default; such extents count as used now."""
        for extent in self.expiries.take_due(self._clock()):
            self.tick += 1
            old_priority = extent.priority
            extent.keep, extent.last_use = DEFAULT_KEEP, self.tick
            if self.recorder is not None:
                self.recorder.updated(extent, old_priority, DEVICE)
            if extent.ticket:
                self.queue.withdraw(extent)
                self.queue.offer(extent)

    def num_evictable_on(self, extent: Extent) -> int:
        """Count the blocks that holding `extent` would take out of the evictable ones."""
        count = 0
        while not extent.references and extent.parent is not None:
            count += extent.blocks.shape[1]
            extent = extent.parent
        return count

    # -- publishing ---------------------------------------------------------------------------------------------------

    def insert(
        self,
        held: Extent,
        tokens: bytes,
        blocks: Blocks,
        keep: Keep = DEFAULT_KEEP,
        *,
        apart: bool = False,
        has_holes: bool = False,
    ) -> tuple[Extent, int]:
        """Publish content below an extent that the caller holds, and move the hold to the deepest extent of it.


        Returns that extent and the number of leading `blocks` whose content was already there: these the tree does not
        take. With groups that need a part of the past, the array itself becomes the extent's. The last block may be
        partly filled; then the caller must release the hold at once. With `apart`, new content gets an extent of its
        own, so that what has been there before can be gone on from.
        """
        key, extent, existing = tokens[: self.block_bytes], held, 0
        if held.children and key in held.children:
            num_blocks: int = blocks.shape[1]
            extent, existing = self._descend(held, tokens)
            self.hold(extent)
            held.references -= 1
            if existing == num_blocks:
                return extent, existing
            tokens, blocks, apart = tokens[existing * self.block_bytes :], blocks[:, existing:], False
            key = tokens[: self.block_bytes]
        if (extent.num_short_children or len(key) < self.block_bytes) and self._is_covered(extent, tokens):
            return extent, existing + blocks.shape[1]
        return self._extend(extent, key, tokens, blocks, keep, apart=apart, has_holes=has_holes), existing

    def insert_unlisted(self, held: Extent, tokens: bytes, blocks: Blocks) -> Extent:
        """Put whole blocks below an extent that the caller holds, for the holders only; move the hold there."""
        return self._extend(held, None, tokens, blocks, DEFAULT_KEEP, apart=False, has_holes=bool(self.spanned))

    def _descend(self, extent: Extent, tokens: bytes) -> tuple[Extent, int]:
        match = self.find(extent, tokens, len(tokens), partial=False)
        extent = self.split(match.child, match.child_blocks) if match.child else match.extent
        return extent, match.position // self.block_bytes

    def _is_covered(self, extent: Extent, rest: bytes) -> bool:
        """Say whether a child holds all of a partly filled block; remove one that `rest` begins with."""
        child, agreed = self._nearest(extent, rest[: self.block_bytes])
        if child is None:
            return False
        is_lost = len(child.tokens) < self.block_bytes and not self._has_block(child, 0)
        if agreed == len(rest) and not is_lost:
            return True
        if is_lost or agreed == len(child.tokens) < self.block_bytes:
            self.queue.withdraw(child)
            self._remove(child, remember=False)
        return False

    def _extend(
        self,
        extent: Extent,
        key: bytes | None,
        tokens: bytes,
        blocks: Blocks,
        keep: Keep,
        *,
        apart: bool,
        has_holes: bool,
    ) -> Extent:
        """Grow an extent that only the caller has ever used, or give it a child; the caller's hold moves along.

        `key` is the child's, None for one that is not listed.
        """
        self.tick += 1
        listed = key is not None
        if extent.references == 1 and not extent.hits and not apart and self._may_grow(extent, keep, listed):
            if isinstance(extent.tokens, bytes):
                extent.tokens = bytearray(extent.tokens)
            num_before = extent.num_blocks
            extent.tokens += tokens
            extent.blocks = np.concatenate((extent.blocks, blocks), axis=1)
            extent.lost = None
            extent.has_holes |= has_holes
            if listed and self.recorder is not None:
                self.recorder.rename_grown(extent, num_before)
                self.recorder.stored(extent, num_before, DEVICE, PUBLISHED)
            return extent
        child = Extent(extent, key, tokens, blocks if self.spanned else blocks.copy(), self.tick)
        child.references, child.keep, child.has_holes = 1, keep, has_holes
        if listed:
            self._link(extent, child)
            if self.recorder is not None:
                self.recorder.name(child)
                self.recorder.stored(child, 0, DEVICE, PUBLISHED)
            if extent.lower is not None and self.lower is not None:
                self.lower.make_way(child)
        return child

    def add_unheld(self, parent: Extent, origin: Extent, blocks: Blocks) -> Extent:
        """Put content below a held extent that nobody holds yet, with the tokens and past of one in another tier."""
        assert origin.key is not None
        child = Extent(parent, origin.key, origin.tokens, blocks, origin.created)
        child.last_use, child.hits, child.keep, child.lost = origin.last_use, origin.hits, origin.keep, origin.lost
        child.has_holes, child.run = bool((blocks < 0).any()), origin.run
        self._link(parent, child)
        self.num_evictable += child.num_blocks
        for group in self.spanned:
            group.num_evictable += int(np.count_nonzero(blocks[group.index] >= 0))
        return child

    @staticmethod
    def _may_grow(extent: Extent, keep: Keep, listed: bool) -> bool:
        has_none_below = not extent.children and not extent.lower
        is_alike = extent.keep == keep and (extent.key is not None) == listed
        return extent.parent is not None and has_none_below and is_alike

    def split(self, extent: Extent, num_blocks: int) -> Extent:
        """Cut an extent after its first blocks and return the upper part; the lower one keeps its identity."""
        if num_blocks == extent.num_blocks:
            return extent
        at = num_blocks * self.block_bytes
        parent = extent.parent
        assert parent is not None
        upper = Extent(parent, extent.key, extent.tokens[:at], extent.blocks[:, :num_blocks], extent.created)
        upper.start, upper.has_holes = extent.start, extent.has_holes
        upper.last_use, upper.hits, upper.keep = extent.last_use, extent.hits, extent.keep
        upper.references = 1 if extent.references else 0
        extent.start += num_blocks
        extent.parent, extent.tokens, extent.blocks = upper, extent.tokens[at:], extent.blocks[:, num_blocks:]
        if extent.run is not None:
            run, offset = upper.run = extent.run
            extent.run = run, offset + num_blocks
        if extent.key is not None:
            assert parent.children is not None
            parent.children[extent.key] = upper
            extent.key = bytes(extent.tokens[: self.block_bytes])
            self._link(upper, extent)
        if self.lower is not None:
            self.lower.copies.split(upper, extent)
        for group in self.spanned:
            group.offer(upper, upper.start)
        return upper

    # -- letting go ---------------------------------------------------------------------------------------------------

    def evict(self, pool: BlockPool, num_blocks: int) -> None:
        """Free that many evictable blocks of a pool, which must exist, in the policy's order, victims from their tails.

        Groups that draw from the pool first lose what matters least; then whole positions go, in all groups.
        """
        if self.expiries.entries:
            self.expire_priorities()
        if self.spanned:
            reclaiming.evict_in_groups(self, pool, pool.num_free + num_blocks)
            return
        queue = self.queue
        while num_blocks > 0:
            extent = queue.first()
            size = extent.blocks.shape[1]
            if size > num_blocks:
                self.shrink(extent, size - num_blocks)
                return
            queue.withdraw_first()
            self.let_go(extent)
            num_blocks -= size

    def evictable_in(self, pool: BlockPool) -> int:
        """Count the blocks of a pool that could be evicted."""
        count = self.num_evictable if pool is self.full_pool else 0
        for group in self.spanned:
            if group.pool is pool:
                count += group.num_evictable
        return count

    def let_go(self, extent: Extent) -> None:
        """Give the blocks of an extent back that was a candidate until now, and take it out of the tree."""
        parent = self._remove(extent, remember=True)
        if parent is not None:
            self.offer(parent)

    def _remove(self, extent: Extent, *, remember: bool) -> Extent | None:
        """Take a leaf that nobody holds out of the tree; return its parent if that has become one."""
        is_lost = self._demote(extent, 0, remember=remember) if self.has_listeners else remember
        self.num_evictable -= extent.blocks.shape[1]
        num_blocks = self._give(extent.blocks, has_holes=extent.has_holes)
        if remember:
            self.num_evicted[self.reason] += num_blocks
        if is_lost:
            assert extent.parent is not None and extent.key is not None
            self.remember_loss(extent.parent, extent.key)
        parent = self._unlink(extent)
        extent.tokens, extent.blocks, extent.lost = b"", self._no_blocks, None
        return parent

    def _forget_content(self, extent: Extent) -> None:
        """Let an extent that has left the tree weigh nothing, whoever still knows of it."""
        extent.parent = None
        extent.tokens, extent.blocks, extent.lost = b"", self._no_blocks, None

    def shrink(self, extent: Extent, keep: int) -> None:
        """Let go of a leaf's blocks but the first `keep`."""
        is_lost = self._demote(extent, keep, remember=True) if self.has_listeners else True
        blocks, tokens, at = extent.blocks, extent.tokens, keep * self.block_bytes
        self.num_evictable -= blocks.shape[1] - keep
        num_blocks = self._give(blocks[:, keep:], has_holes=extent.has_holes)
        extent.blocks, extent.lost = blocks[:, :keep], None
        self.num_evicted[self.reason] += num_blocks
        if is_lost:
            self.remember_loss(extent, bytes(tokens[at : at + self.block_bytes]))
        if len(tokens) <= SHORT_BYTES:
            extent.tokens = tokens[:at]
        else:
            if isinstance(tokens, bytes):
                tokens = extent.tokens = bytearray(tokens)
            del tokens[at:]

    def _demote(self, extent: Extent, keep: int, *, remember: bool) -> bool:
        """Offer slower tiers the blocks of a leaf but the first `keep`; returns whether they are lost."""
        parent = extent if keep else extent.parent
        assert parent is not None
        if remember and self.reason != UNREACHABLE:
            if self.lower is not None and self.lower.take(parent, extent, keep):
                return False
            if self.keeper is not None:
                self.keeper.evicted(extent, keep, DEVICE)
        elif self.lower is not None:
            self.lower.forget_below(extent, keep)
        if self.recorder is not None:
            self.recorder.removed(extent, keep, DEVICE, self.reason if remember else NOT_FILLED)
        return remember

    def discard(self, extent: Extent) -> None:
        """Take a leaf that nobody holds out of the tree, whose content is not there."""
        if extent.ticket:
            self.queue.withdraw(extent)
        parent = self._remove(extent, remember=False)
        if parent is not None:
            self.offer(parent)

    def remember_loss(self, parent: Extent, key: bytes) -> None:
        """Remember that what began with `key` below an extent was evicted."""
        loss, lost = (self._clock(), self.reason), parent.lost
        if parent.parent is None:
            self.losses.note_of_prompt(parent, key, loss)
        elif lost is None:
            parent.lost = {key: loss}
        else:
            lost[key] = loss
            if len(lost) > MAX_LOSSES_BELOW:
                del lost[next(iter(lost))]

    def note_evicted(self, num_blocks: int) -> None:
        """Count blocks that were evicted for the reason that holds now."""
        self.num_evicted[self.reason] += num_blocks

    def disown(self, extent: Extent) -> None:
        """Take a listed extent whose content is not there out of the tree, with all below it.

        What sequences and pins hold stays theirs until they end, and nobody else finds it.
        """
        parent, below = extent.parent, list(extent.subtree())
        assert parent is not None
        for each in reversed(below):
            if self.lower is not None:
                self.lower.forget_below(each)
            if self.recorder is not None:
                self.recorder.removed(each, 0, DEVICE, NOT_FILLED)
        self._take_out(parent, extent)
        self._unlist(below)
        if not parent.children and not parent.references:
            if parent.parent is None:
                self._forget_if_empty(parent)
            else:
                self.offer(parent)

    def drop(self, namespace: Namespace) -> int:
        """Forget a namespace: free what is unreferenced, unlist the rest; returns how many blocks were freed."""
        root = self.roots.pop(namespace, None)
        if root is None:
            return 0
        if self.recorder is not None:
            self.recorder.cleared(namespace, DROPPED)
        for key in root.children or ():
            self.losses.forget_first(key)
        return self._unlist(list(root.subtree()))

    def _unlist(self, extents: list[Extent]) -> int:
        """Let nobody find extents, which have no others below them; frees what is unreferenced, returns how much."""
        num_freed = 0
        for extent in extents:
            if extent.ticket:
                self.queue.withdraw(extent)
            if self.lower is not None:
                self.lower.drop_below(extent)
            extent.children = extent.order = extent.key = extent.lost = extent.run = None
            extent.num_short_children = 0
            if extent.parent is None:
                continue
            if extent.references:
                for group in self.spanned:
                    group.offer(extent, extent.start)
            else:
                self.num_evictable -= extent.num_blocks
                num_freed += self._give(extent.blocks, has_holes=extent.has_holes)
                self._forget_content(extent)
        return num_freed

    def clear(self) -> None:
        """Cut all links between extents, so that they go without waiting for a garbage collection."""
        lower = [] if self.lower is None else self.lower.extents()
        for extent in [*lower, *(each for root in self.roots.values() for each in root.subtree())]:
            extent.parent = extent.children = extent.order = extent.lower = None
        self.roots.clear()

    def extents(self) -> Iterator[Extent]:
        """Yield all listed extents, roots left out, parents before children."""
        for root in self.roots.values():
            yield from (extent for extent in root.subtree() if extent is not root)

    def _give(self, blocks: Blocks, *, has_holes: bool) -> int:
        """Give the blocks of columns back in all groups; returns how many."""
        num_blocks: int = 0
        if self.full_pool is not None:
            self.full_pool.give(blocks[0])
            num_blocks = blocks.shape[1]
        for group in self.spanned:
            num_blocks += group.give(blocks[group.index], has_holes=has_holes)
        return num_blocks

    def _link(self, parent: Extent, child: Extent) -> None:
        key, children = child.key, parent.children
        assert key is not None
        if children is None:
            children = parent.children = {}
        children[key] = child
        if parent.lost is not None:
            parent.lost.pop(key, None)
        if parent.parent is None:
            self.losses.note_first(parent, key)
        if len(key) < self.block_bytes:
            parent.num_short_children += 1
        if parent.order is not None:
            parent.order.add(key)

    def _unlink(self, extent: Extent) -> Extent | None:
        """Take a listed leaf from its parent; return the parent if it is now a leaf that nobody holds."""
        parent = extent.parent
        assert parent is not None
        self._take_out(parent, extent)
        extent.parent = None
        if parent.children or parent.references:
            return None
        if parent.parent is None:
            self._forget_if_empty(parent)
            return None
        return parent

    def _take_out(self, parent: Extent, extent: Extent) -> None:
        """Take an extent from the children of its parent."""
        key = extent.key
        assert parent.children is not None and key is not None
        del parent.children[key]
        if len(key) < self.block_bytes:
            parent.num_short_children -= 1
        if parent.order is not None:
            parent.order.remove(key)
        if parent.parent is None:
            self.losses.forget_first(key)
        if not parent.children:
            parent.children = parent.order = None

    def forget_if_unused(self, extent: Extent) -> None:
        """Forget a root below which nothing is left in the lower tier, unless it has something on the device."""
        if extent.parent is None and not extent.references:
            self._forget_if_empty(extent)

    def _forget_if_empty(self, root: Extent) -> None:
        assert isinstance(root, Root)
        if not root.children and not root.lower and self.roots.get(root.namespace) is root:
            del self.roots[root.namespace]
