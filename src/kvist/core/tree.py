"""The prefix tree: content is found by comparing token bytes, held and released by extents, and evicted leaf first.

Rules that must not be broken, with their reasons:

- Every extent but a root has at least one block, and only a leaf that nothing refers to may end in a partly filled
  block: sequences hold whole blocks, and copy from a partly filled one.
- `references` counts direct holders (sequences, pins) plus children that are themselves referenced. So an ancestor of
  anything held is referenced too, and holding or releasing stops at the first extent whose state does not change.
- Listed extents can be found by others (`key` is their key among the parent's children). An unlisted one (`key` is
  None) is shared only by the sequences that hold it, and ends with the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

import numpy as np

from kvist.core.eviction import EvictionQueue, Policy
from kvist.core.extents import Blocks, Extent, Match, Namespace, Root
from kvist.core.pool import BlockPool
from kvist.core.retention import DEFAULT_KEEP, DEFAULT_PRIORITY, Keep
from kvist.core.siblings import SortedKeys
from kvist.core.tokens import TOKEN_BYTES, common_prefix

__all__ = ["PrefixTree"]

FEW_CHILDREN = 4
MIN_SWEPT = 1024


class PrefixTree:
    """All cached content of one manager: one root per namespace, one eviction queue, one pool per group."""

    def __init__(
        self, pools: list[BlockPool], block_size: int, policy: Policy, clock: Callable[[], float], *, partial: bool
    ) -> None:
        self.pools = pools
        self.block_bytes = block_size * TOKEN_BYTES
        self.partial = partial
        self._clock = clock
        self._expiries: list[tuple[float, int, int, Extent]] = []
        self._num_expiries = 0
        self._max_expiries = MIN_SWEPT
        self.roots: dict[Namespace, Root] = {}
        self.queue = EvictionQueue(policy)
        self.num_evictable = 0
        self.num_evicted = 0
        self.tick = 0

    # -- looking ------------------------------------------------------------------------------------------------------

    def root(self, namespace: Namespace) -> Root:
        """Return the namespace's root, made if it is not there."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Root(namespace, len(self.pools))
        return root

    def find(self, extent: Extent, tokens: bytes | memoryview, limit: int, *, partial: bool) -> Match:
        """Follow `tokens` down from `extent`, at most `limit` bytes far; changes nothing."""
        block_bytes = self.block_bytes
        position = 0
        while position < limit and extent.children:
            child = extent.children.get(bytes(tokens[position : position + block_bytes]))
            if child is None:
                return self._find_beside(Match(extent, position), tokens, limit) if partial else Match(extent, position)
            size = len(child.tokens)
            if (
                position + size > limit
                or size % block_bytes
                or not child.tokens.startswith(tokens[position : position + size])
            ):
                return self._find_inside(Match(extent, position), child, tokens, limit, partial)
            extent = child
            position += size
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

    def _find_beside(self, match: Match, tokens: bytes | memoryview, limit: int) -> Match:
        position = match.position
        rest = bytes(tokens[position : min(position + self.block_bytes, limit)])
        match.source, agreed = self._nearest(match.extent, rest)
        match.num_partial_tokens = agreed // TOKEN_BYTES
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

    # -- holding ------------------------------------------------------------------------------------------------------

    def hold(self, extent: Extent) -> None:
        """Keep an extent and all its ancestors from being evicted."""
        while True:
            extent.references += 1
            parent = extent.parent
            if extent.references > 1 or parent is None:
                return
            self.num_evictable -= extent.blocks.shape[1]
            if extent.ticket:
                self.queue.withdraw(extent)
            extent = parent

    def release(self, extent: Extent) -> None:
        """End one hold; what nothing refers to any more becomes evictable, deepest first, as used now."""
        self.tick = tick = self.tick + 1
        while True:
            extent.references -= 1
            if extent.references:
                return
            parent = extent.parent
            if parent is None:
                self._forget_if_empty(extent)
                return
            if extent.key is None:
                extent.parent = None
                self._give(extent.blocks)
            else:
                extent.last_use = tick
                self.num_evictable += extent.blocks.shape[1]
                if not extent.children:
                    self.queue.offer(extent)
                if extent.keep is not DEFAULT_KEEP:
                    self._await_expiry(extent)
            extent = parent

    def _await_expiry(self, extent: Extent) -> None:
        """Note when the priority of an extent that nobody uses any more ends."""
        priority, duration_s = extent.keep
        if duration_s is not None and priority != DEFAULT_PRIORITY:
            self._num_expiries += 1
            if len(self._expiries) > self._max_expiries:
                self._sweep_expiries()
            heappush(self._expiries, (self._clock() + duration_s, self._num_expiries, extent.last_use, extent))

    def _sweep_expiries(self) -> None:
        """Drop the entries that were overtaken by a later use, so that they do not pile up."""
        self._expiries = [entry for entry in self._expiries if _is_due(entry[3], entry[2])]
        heapify(self._expiries)
        self._max_expiries = 2 * len(self._expiries) + MIN_SWEPT

    def expire_priorities(self) -> None:
        """Let priorities whose time is over fall back to the default; such extents count as used now."""
        now = self._clock() if self._expiries else 0.0
        while self._expiries and self._expiries[0][0] <= now:
            _, _, last_use, extent = heappop(self._expiries)
            if not _is_due(extent, last_use):
                continue
            self.tick += 1
            extent.keep, extent.last_use = DEFAULT_KEEP, self.tick
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

    def insert(self, held: Extent, tokens: bytes, blocks: Blocks, keep: Keep = DEFAULT_KEEP) -> tuple[Extent, int]:
        """Publish content below an extent that the caller holds, and move the hold to the deepest extent of it.

        Returns that extent and the number of leading `blocks` whose content was already there: these the tree does not
        take. The last block may be partly filled; then the caller must release the hold at once.
        """
        known = held.children is not None and tokens[: self.block_bytes] in held.children
        extent, existing = self._descend(held, tokens) if known else (held, 0)
        if extent is not held:
            self.hold(extent)
            held.references -= 1
        rest = tokens[existing * self.block_bytes :]
        is_short = len(rest) < self.block_bytes
        if not rest or ((is_short or extent.num_short_children) and self._is_covered(extent, rest)):
            return extent, -(-len(tokens) // self.block_bytes)
        return self._extend(extent, rest, blocks[:, existing:], keep, listed=True), existing

    def insert_unlisted(self, held: Extent, tokens: bytes, blocks: Blocks) -> Extent:
        """Put whole blocks below an extent that the caller holds, for the holders only; move the hold there."""
        return self._extend(held, tokens, blocks, DEFAULT_KEEP, listed=False)

    def _descend(self, extent: Extent, tokens: bytes) -> tuple[Extent, int]:
        match = self.find(extent, tokens, len(tokens), partial=False)
        extent = self.split(match.child, match.child_blocks) if match.child else match.extent
        return extent, match.position // self.block_bytes

    def _is_covered(self, extent: Extent, rest: bytes) -> bool:
        """Say whether a child holds all of a partly filled block; remove one that `rest` begins with."""
        child, agreed = self._nearest(extent, rest[: self.block_bytes])
        if child is None or agreed == len(rest):
            return child is not None
        if agreed == len(child.tokens) < self.block_bytes:
            self.queue.withdraw(child)
            self._let_go(child)
        return False

    def _extend(self, extent: Extent, tokens: bytes, blocks: Blocks, keep: Keep, *, listed: bool) -> Extent:
        """Grow an extent that only the caller has ever used, or give it a child; the caller's hold moves along."""
        self.tick += 1
        if extent.references == 1 and not extent.hits and extent.keep == keep and self._may_grow(extent, listed):
            if isinstance(extent.tokens, bytes):
                extent.tokens = bytearray(extent.tokens)
            extent.tokens += tokens
            extent.blocks = np.concatenate((extent.blocks, blocks), axis=1)
            return extent
        key = tokens[: self.block_bytes] if listed else None
        child = Extent(extent, key, tokens, blocks.copy(), self.tick)
        child.references, child.keep = 1, keep
        if listed:
            self._link(extent, child)
        return child

    @staticmethod
    def _may_grow(extent: Extent, listed: bool) -> bool:
        return extent.parent is not None and not extent.children and (extent.key is not None) == listed

    def split(self, extent: Extent, num_blocks: int) -> Extent:
        """Cut an extent after its first blocks and return the upper part; the lower one keeps its identity."""
        if num_blocks == extent.num_blocks:
            return extent
        at = num_blocks * self.block_bytes
        parent = extent.parent
        assert parent is not None
        upper = Extent(parent, extent.key, extent.tokens[:at], extent.blocks[:, :num_blocks], extent.created)
        upper.last_use, upper.hits, upper.keep = extent.last_use, extent.hits, extent.keep
        upper.references = 1 if extent.references else 0
        extent.parent, extent.tokens, extent.blocks = upper, extent.tokens[at:], extent.blocks[:, num_blocks:]
        if extent.key is not None:
            assert parent.children is not None
            parent.children[extent.key] = upper
            extent.key = bytes(extent.tokens[: self.block_bytes])
            self._link(upper, extent)
        return upper

    # -- letting go ---------------------------------------------------------------------------------------------------

    def evict(self, num_blocks: int) -> None:
        """Free that many evictable blocks, which must exist, in the policy's order and each victim from its tail."""
        if self._expiries:
            self.expire_priorities()
        self.num_evicted += num_blocks
        while num_blocks > 0:
            extent = self.queue.first()
            size = extent.blocks.shape[1]
            if size > num_blocks:
                self._shrink(extent, size - num_blocks)
                return
            self.queue.withdraw_first()
            self._let_go(extent)
            num_blocks -= size

    def _let_go(self, extent: Extent) -> None:
        """Give the blocks of an extent back that was a candidate until now, and take it out of the tree."""
        self.num_evictable -= extent.blocks.shape[1]
        self._give(extent.blocks)
        self._unlink(extent)

    def _shrink(self, extent: Extent, keep: int) -> None:
        dropped = extent.blocks.shape[1] - keep
        self.num_evictable -= dropped
        self._give(extent.blocks[:, keep:])
        extent.blocks = extent.blocks[:, :keep]
        if isinstance(extent.tokens, bytes):
            extent.tokens = bytearray(extent.tokens)
        del extent.tokens[keep * self.block_bytes :]

    def drop(self, namespace: Namespace) -> int:
        """Forget a namespace: free what is unreferenced, unlist the rest; returns how many blocks were freed."""
        root = self.roots.pop(namespace, None)
        if root is None:
            return 0
        before = self.num_evictable
        for extent in list(root.subtree()):
            if extent.ticket:
                self.queue.withdraw(extent)
            extent.children = extent.order = extent.key = None
            extent.num_short_children = 0
            if not extent.references and extent.parent is not None:
                extent.parent = None
                self.num_evictable -= extent.num_blocks
                self._give(extent.blocks)
        return before - self.num_evictable

    def clear(self) -> None:
        """Cut all links between extents, so that they go without waiting for a garbage collection."""
        for extent in [each for root in self.roots.values() for each in root.subtree()]:
            extent.parent = extent.children = extent.order = None
        self.roots.clear()

    def extents(self) -> Iterator[Extent]:
        """Yield all listed extents, roots left out, parents before children."""
        for root in self.roots.values():
            yield from (extent for extent in root.subtree() if extent is not root)

    def _give(self, blocks: Blocks) -> None:
        for group, pool in enumerate(self.pools):
            pool.give(blocks[group])

    def _link(self, parent: Extent, child: Extent) -> None:
        assert child.key is not None
        if parent.children is None:
            parent.children = {}
        parent.children[child.key] = child
        parent.num_short_children += len(child.key) < self.block_bytes
        if parent.order is not None:
            parent.order.add(child.key)

    def _unlink(self, extent: Extent) -> None:
        parent, key = extent.parent, extent.key
        assert parent is not None
        assert parent.children is not None
        assert key is not None
        del parent.children[key]
        parent.num_short_children -= len(key) < self.block_bytes
        if parent.order is not None:
            parent.order.remove(key)
        extent.parent = None
        if parent.children:
            return
        parent.children = parent.order = None
        if parent.references:
            return
        if parent.parent is None:
            self._forget_if_empty(parent)
        else:
            self.queue.offer(parent)

    def _forget_if_empty(self, root: Extent) -> None:
        assert isinstance(root, Root)
        if not root.children and self.roots.get(root.namespace) is root:
            del self.roots[root.namespace]


def _is_due(extent: Extent, last_use: int) -> bool:
    """Say whether nobody has used an extent since."""
    return not extent.references and extent.parent is not None and extent.last_use == last_use
