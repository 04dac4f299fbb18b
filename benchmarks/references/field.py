"""A KV cache manager as serving engines in Python build it today: lists of tokens, pickled hashes, an object per block.

It follows what the first version of vLLM's v1 core made common, in code of its own:

- A request holds its token ids as a list, and hashes its full blocks when it is made and whenever one fills. The hash
  of a block is SHA-256 over the pickle of parent hash, tuple of token ids, and extra keys or None.
- One slotted object per block, all made once; a doubly linked queue of free blocks between two sentinels; a dict from
  hash and group id to a block, or to several with the same content. Nothing is evicted before its block is given out.
- Admission is `computed_blocks` and `allocate_slots`, a decode step is one `allocate_slots` per running request, which
  also publishes the blocks that are full. `free` gives the deepest block back first.

It does nothing twice. Left out, which makes it faster than what it follows: the coordinator between manager and
groups, windows, connectors, encoder tokens, events, statistics, a second check that a whole chunked prompt fits.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

__all__ = [
    "Block",
    "BlockMap",
    "BlockPool",
    "FieldManager",
    "FreeQueue",
    "FullAttentionGroup",
    "GroupBlocks",
    "Request",
    "block_hash",
    "group_key",
]

ExtraKeys = tuple[str, ...]
ROOT_HASH = sha256(b"no parent").digest()


def block_hash(parent: bytes, tokens: tuple[int, ...], extra_keys: ExtraKeys | None) -> bytes:
    """Hash one full block by its content and all that precedes it."""
    return sha256(pickle.dumps((parent, tokens, extra_keys), pickle.HIGHEST_PROTOCOL)).digest()


def group_key(content: bytes, group: int) -> bytes:
    """The key of a block in the map: its hash and four bytes for its group."""
    return content + group.to_bytes(4, "big")


class Request:
    """A request: its tokens so far, and the hashes of those of its blocks that are full.

    Args:
        request_id: names it in the tables of the manager.
        prompt: token ids.
        block_size: tokens per block.
        adapter: part of every block's hash, unless None.
        salt: part of the first block's hash, unless None.
    """

    def __init__(
        self,
        request_id: str,
        prompt: list[int],
        block_size: int = 16,
        *,
        adapter: str | None = None,
        salt: str | None = None,
    ) -> None:
        self.request_id, self.block_size, self.adapter, self.salt = request_id, block_size, adapter, salt
        self.tokens = prompt.copy()
        self.output_tokens: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_computed_tokens = 0
        self.is_running = False
        self.hash_full_blocks()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def append(self, token: int) -> None:
        """Add a generated token; hash its block if that is full now."""
        self.output_tokens.append(token)
        self.tokens.append(token)
        self.hash_full_blocks()

    def hash_full_blocks(self) -> None:
        """Hash the full blocks that have no hash yet."""
        size, tokens, hashes = self.block_size, self.tokens, self.block_hashes
        start = len(hashes) * size
        if start + size > len(tokens):
            return
        parent = hashes[-1] if hashes else ROOT_HASH
        for first in range(start, len(tokens) - size + 1, size):
            parent = block_hash(parent, tuple(tokens[first : first + size]), self.extra_keys(first))
            hashes.append(parent)

    def extra_keys(self, start: int) -> ExtraKeys | None:
        """What sets the block that starts at this token apart from others with the same tokens."""
        if self.adapter is None and self.salt is None:
            return None
        salt = self.salt if start == 0 else None
        return tuple(key for key in (self.adapter, salt) if key is not None) or None


class Block:
    """One block: who holds it, the key it is published under, and its neighbours in the queue while it is free."""

    __slots__ = ("block_id", "is_null", "key", "next", "num_references", "previous")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.num_references = 0
        self.key: bytes | None = None
        self.previous: Block | None = None
        self.next: Block | None = None
        self.is_null = False


class FreeQueue:
    """Free blocks in the order in which they are given out, a doubly linked list between two sentinels."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self.head, self.tail = Block(-1), Block(-1)
        self.head.next, self.tail.previous = self.tail, self.head
        self.num_blocks = 0
        self.append_n(list(blocks))

    def popleft_n(self, n: int) -> list[Block]:
        """Take the first n blocks; there must be as many."""
        assert n <= self.num_blocks
        taken: list[Block] = []
        block = self.head.next
        for _ in range(n):
            assert block is not None
            taken.append(block)
            following = block.next
            block.previous = block.next = None
            block = following
        assert block is not None
        self.head.next, block.previous = block, self.head
        self.num_blocks -= n
        return taken

    def remove(self, block: Block) -> None:
        """Take one block out of the middle. Raises RuntimeError if it is not in the queue."""
        previous, following = block.previous, block.next
        if previous is None or following is None:
            raise RuntimeError(f"block {block.block_id} is not in the queue")
        previous.next, following.previous = following, previous
        block.previous = block.next = None
        self.num_blocks -= 1

    def append_n(self, blocks: Sequence[Block]) -> None:
        """Put blocks at the end, in this order."""
        if not blocks:
            return
        last = self.tail.previous
        assert last is not None
        for block in blocks:
            last.next, block.previous = block, last
            last = block
        last.next, self.tail.previous = self.tail, last
        self.num_blocks += len(blocks)

    def prepend_n(self, blocks: Sequence[Block]) -> None:
        """Put blocks at the front, in this order."""
        if not blocks:
            return
        first, last = self.head.next, self.head
        assert first is not None
        for block in blocks:
            last.next, block.previous = block, last
            last = block
        last.next, first.previous = first, last
        self.num_blocks += len(blocks)


class BlockMap:
    """Published blocks by key: the block itself, or a dict from id to block once there are several."""

    def __init__(self) -> None:
        self.by_key: dict[bytes, Block | dict[int, Block]] = {}

    def find(self, key: bytes) -> Block | None:
        """One block with this key, the one published first."""
        found = self.by_key.get(key)
        if found is None or isinstance(found, Block):
            return found
        return next(iter(found.values()))

    def insert(self, key: bytes, block: Block) -> None:
        """Publish a block beside those that have its key already."""
        known = self.by_key.get(key)
        if known is None:
            self.by_key[key] = block
        elif isinstance(known, Block):
            self.by_key[key] = {known.block_id: known, block.block_id: block}
        else:
            known[block.block_id] = block

    def remove(self, key: bytes, block_id: int) -> None:
        """Forget that this block has this key."""
        known = self.by_key.pop(key)
        if isinstance(known, Block):
            return
        del known[block_id]
        if known:
            self.by_key[key] = known


class BlockPool:
    """All blocks of all groups, the free ones in a queue, the published ones in a map. Block 0 is the null block."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.free_queue = FreeQueue(self.blocks)
        self.block_map = BlockMap()
        (self.null_block,) = self.free_queue.popleft_n(1)
        self.null_block.is_null = True

    @property
    def num_free_blocks(self) -> int:
        return self.free_queue.num_blocks

    def cached_blocks(self, content: bytes, groups: Sequence[int]) -> list[Block] | None:
        """A block with this hash for each group, or None if one has none."""
        found = []
        for group in groups:
            block = self.block_map.find(group_key(content, group))
            if block is None:
                return None
            found.append(block)
        return found

    def new_blocks(self, n: int) -> list[Block]:
        """Take n free blocks and forget what they held. Raises ValueError if fewer are free."""
        if n > self.num_free_blocks:
            raise ValueError(f"{n} blocks are needed, but only {self.num_free_blocks} are free")
        blocks = self.free_queue.popleft_n(n)
        for block in blocks:
            self.evict(block)
            assert block.num_references == 0
            block.num_references = 1
        return blocks

    def evict(self, block: Block) -> None:
        """Forget what a block holds, if it was published."""
        if block.key is None:
            return
        self.block_map.remove(block.key, block.block_id)
        block.key = None

    def touch(self, blocks: Sequence[Block]) -> None:
        """Hold cached blocks for one more request."""
        for block in blocks:
            if block.num_references == 0 and not block.is_null:
                self.free_queue.remove(block)
            block.num_references += 1

    def publish(self, request: Request, blocks: Sequence[Block], start: int, end: int, group: int) -> None:
        """Make blocks start to end of a request findable; they are full."""
        for block, content in zip(blocks[start:end], request.block_hashes[start:end], strict=True):
            if block.is_null:
                continue
            assert block.key is None
            block.key = key = group_key(content, group)
            self.block_map.insert(key, block)

    def free(self, blocks: Iterable[Block]) -> None:
        """Let go of blocks; of those nobody holds, unpublished ones are given out first, published ones last."""
        published: list[Block] = []
        unpublished: list[Block] = []
        for block in blocks:
            block.num_references -= 1
            if block.num_references == 0 and not block.is_null:
                (unpublished if block.key is None else published).append(block)
        self.free_queue.prepend_n(unpublished)
        self.free_queue.append_n(published)


class FullAttentionGroup:
    """The layers that share one block table: which blocks each request holds, and how many of them are published."""

    def __init__(self, pool: BlockPool, block_size: int, group: int) -> None:
        self.pool, self.block_size, self.group = pool, block_size, group
        self.blocks_of: dict[str, list[Block]] = {}
        self.num_published: dict[str, int] = {}

    def num_blocks_needed(self, request_id: str, num_tokens: int, hits: Sequence[Block]) -> int:
        """Free blocks that it takes to hold num_tokens, those among the hits that are free now included."""
        num_required = -(-num_tokens // self.block_size)
        num_held = len(self.blocks_of.get(request_id, ()))
        if request_id in self.num_published:  # a running request has no new hits
            return max(num_required - num_held, 0)
        num_evictable = sum(block.num_references == 0 and not block.is_null for block in hits)
        return max(num_required - len(hits) - num_held, 0) + num_evictable

    def hold_hits(self, request_id: str, hits: Sequence[Block]) -> None:
        """Start a request with the blocks found for it."""
        if request_id in self.num_published:
            assert not hits
            return
        self.pool.touch(hits)
        self.blocks_of[request_id] = list(hits)
        self.num_published[request_id] = len(hits)

    def allocate(self, request_id: str, num_tokens: int) -> list[Block]:
        """Give a request the blocks that it lacks for num_tokens, and return those."""
        blocks = self.blocks_of.setdefault(request_id, [])
        num_new = -(-num_tokens // self.block_size) - len(blocks)
        if num_new <= 0:
            return []
        new = self.pool.new_blocks(num_new)
        blocks.extend(new)
        return new

    def publish(self, request: Request, num_tokens: int) -> None:
        """Publish the blocks that are full with num_tokens and were not before."""
        start = self.num_published.get(request.request_id, 0)
        end = num_tokens // self.block_size
        if start >= end:
            return
        self.pool.publish(request, self.blocks_of[request.request_id], start, end, self.group)
        self.num_published[request.request_id] = end

    def free(self, request_id: str) -> None:
        """Let go of all blocks of a request, the deepest first; nothing happens if it has none."""
        self.pool.free(reversed(self.blocks_of.pop(request_id, [])))
        self.num_published.pop(request_id, None)


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """Blocks of a request, one list for each group."""

    blocks: tuple[Sequence[Block], ...]

    def block_ids(self) -> tuple[list[int], ...]:
        """What goes to the worker."""
        return tuple([block.block_id for block in group] for group in self.blocks)


class FieldManager:
    """What a scheduler calls: find cached blocks, allocate slots, free. The pool counts the null block.

    Args:
        num_blocks: blocks of the pool, the null block among them.
        block_size: tokens per block.
        max_model_len: tokens that a request can have at most.
        num_groups: block tables per request.
        watermark: share of the pool that admission leaves free while others run.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        max_model_len: int = 131_072,
        num_groups: int = 1,
        watermark: float = 0.0,
    ) -> None:
        self.block_size, self.max_model_len = block_size, max_model_len
        self.pool = BlockPool(num_blocks)
        self.groups = [FullAttentionGroup(self.pool, block_size, group) for group in range(num_groups)]
        self.group_ids = list(range(num_groups))
        self.watermark_blocks = int(watermark * num_blocks)
        self.no_blocks = GroupBlocks(tuple(() for _ in self.groups))

    def computed_blocks(self, request: Request) -> tuple[GroupBlocks, int]:
        """Find the longest cached prefix short of the last token: its blocks, and how many tokens that is."""
        found: tuple[list[Block], ...] = tuple([] for _ in self.groups)
        max_blocks = (request.num_tokens - 1) // self.block_size
        for content in request.block_hashes[:max_blocks]:
            cached = self.pool.cached_blocks(content, self.group_ids)
            if cached is None:
                break
            for blocks, block in zip(found, cached, strict=True):
                blocks.append(block)
        if not found[0]:
            return self.no_blocks, 0
        return GroupBlocks(found), len(found[0]) * self.block_size

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_hit_tokens: int = 0,
        hits: GroupBlocks | None = None,
        *,
        num_lookahead_tokens: int = 0,
        num_reserved_blocks: int = 0,
        others_run: bool = True,
    ) -> GroupBlocks | None:
        """Make room for new tokens after the computed ones and the hits, and publish the blocks that they fill.

        Returns the new blocks, or None with nothing changed where they do not fit. Raises ValueError for no tokens.
        """
        if num_new_tokens <= 0:
            raise ValueError(f"num_new_tokens is {num_new_tokens}, must be positive")
        num_computed = min(request.num_computed_tokens + num_hit_tokens, self.max_model_len)
        num_slots = min(num_computed + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        hit_blocks = (self.no_blocks if hits is None else hits).blocks
        num_needed = self.num_blocks_needed(request.request_id, num_slots, hit_blocks)
        watermark = self.watermark_blocks if others_run and not request.is_running else 0
        if num_needed + watermark > self.pool.num_free_blocks - num_reserved_blocks:
            return None
        if hits is not None:
            self.hold_hits(request.request_id, hit_blocks)
        new = self.allocate(request.request_id, num_slots)
        self.publish(request, min(num_computed + num_new_tokens, request.num_tokens))
        return GroupBlocks(new) if any(new) else self.no_blocks

    def num_blocks_needed(self, request_id: str, num_tokens: int, hits: tuple[Sequence[Block], ...]) -> int:
        """Free blocks needed over all groups."""
        num_needed = 0
        for group, blocks in zip(self.groups, hits, strict=True):
            num_needed += group.num_blocks_needed(request_id, num_tokens, blocks)
        return num_needed

    def hold_hits(self, request_id: str, hits: tuple[Sequence[Block], ...]) -> None:
        """Start a request in every group with the blocks found."""
        for group, blocks in zip(self.groups, hits, strict=True):
            group.hold_hits(request_id, blocks)

    def allocate(self, request_id: str, num_tokens: int) -> tuple[list[Block], ...]:
        """Give a request what it lacks, in every group."""
        return tuple([group.allocate(request_id, num_tokens) for group in self.groups])

    def publish(self, request: Request, num_tokens: int) -> None:
        """Publish what is full, in every group."""
        for group in self.groups:
            group.publish(request, num_tokens)

    def free(self, request: Request) -> None:
        """End a request; its published blocks can be found until they are given out again."""
        for group in self.groups:
            group.free(request.request_id)

    def block_ids(self, request: Request) -> tuple[list[int], ...]:
        """The block tables of a request, one for each group."""
        return GroupBlocks(tuple(group.blocks_of.get(request.request_id, ()) for group in self.groups)).block_ids()
