"""The least one can do: memcmp, a SHA-256 chain over bytes, and one object per block with hardly any bookkeeping.

No engine runs this. It says how much of a ratio against `references.field` comes from objects and hashing as such,
and how much from the field's way of doing it: tokens arrive as int32 arrays, a hash is SHA-256 over the parent digest
and 64 bytes of the array's memory, there is one call for admission, one for a token, one for publishing, no groups, and
content that is known already is not published a second time. `ObjectPerBlockManager` makes the checks that Kvist makes
(freed sequences, token ids, counts, room) before anything changes, and keeps the block ids that a kernel reads.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

__all__ = ["BlockChainIndex", "BlockQueue", "ObjectPerBlockManager", "ObjectSequence", "block_digests", "bytes_agree"]

TOKEN_BYTES = 4
ROOT_DIGEST = bytes(32)


def bytes_agree(cached: bytes, tokens: bytes) -> bool:
    """Compare two prompts by their bytes, one memcmp and nothing else; give two objects, or nothing is compared."""
    return cached == tokens


def block_digests(tokens: bytes, block_bytes: int) -> list[bytes]:
    """Chain SHA-256 over parent digest and token bytes, for the full blocks of a prompt."""
    digest, digests = ROOT_DIGEST, []
    for start in range(0, len(tokens) - block_bytes + 1, block_bytes):
        digest = sha256(digest + tokens[start : start + block_bytes]).digest()
        digests.append(digest)
    return digests


class BlockChainIndex:
    """Finds prefixes by a SHA-256 chain over blocks and one dict look-up per block."""

    def __init__(self, block_size: int = 16) -> None:
        self.block_bytes = block_size * TOKEN_BYTES
        self.block_ids: dict[bytes, int] = {}

    def publish(self, tokens: bytes) -> None:
        """Make the full blocks of these int32 token bytes findable."""
        for digest in block_digests(tokens, self.block_bytes):
            self.block_ids.setdefault(digest, len(self.block_ids))

    def match(self, tokens: bytes) -> list[int]:
        """Find the ids of the leading full blocks of these int32 token bytes; hashing stops at the first miss."""
        digest, found = ROOT_DIGEST, []
        for start in range(0, len(tokens) - self.block_bytes + 1, self.block_bytes):
            digest = sha256(digest + tokens[start : start + self.block_bytes]).digest()
            block_id = self.block_ids.get(digest)
            if block_id is None:
                break
            found.append(block_id)
        return found


class Block:
    """One block: its id, how many sequences hold it, the digest it is published under, and its place in the queue."""

    __slots__ = ("block_id", "digest", "next", "previous", "references")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.references = 0
        self.digest: bytes | None = None
        self.previous: Block = self
        self.next: Block = self


class BlockQueue:
    """Blocks nobody holds, a doubly linked list between two sentinels; the first is given out next."""

    __slots__ = ("head", "num_blocks", "tail")

    def __init__(self, blocks: Iterable[Block]) -> None:
        self.head, self.tail = Block(-1), Block(-1)
        self.head.next, self.tail.previous = self.tail, self.head
        self.num_blocks = 0
        self.append(blocks)

    def take(self, n: int) -> list[Block]:
        """Remove the first n blocks; there must be as many."""
        taken, block = [], self.head.next
        for _ in range(n):
            taken.append(block)
            block = block.next
        self.head.next, block.previous = block, self.head
        self.num_blocks -= n
        return taken

    def remove(self, block: Block) -> None:
        """Take one block out of the middle, in constant time."""
        block.previous.next, block.next.previous = block.next, block.previous
        self.num_blocks -= 1

    def append(self, blocks: Iterable[Block]) -> None:
        """Put blocks at the end, to be given out last."""
        last = self.tail.previous
        for block in blocks:
            last.next, block.previous = block, last
            last = block
            self.num_blocks += 1
        last.next, self.tail.previous = self.tail, last

    def prepend(self, blocks: Iterable[Block]) -> None:
        """Put blocks at the front, to be given out first."""
        first = self.head.next
        for block in blocks:
            first.previous, block.next = block, first
            first = block
            self.num_blocks += 1
        first.previous, self.head.next = self.head, first


class ObjectSequence:
    """One running request: its tokens, its blocks and their ids, and the digests of its full blocks."""

    __slots__ = (
        "block_ids",
        "blocks",
        "digests",
        "is_live",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_published",
        "tokens",
    )

    def __init__(
        self, tokens: list[int], digests: list[bytes], blocks: list[Block], num_hits: int, num_cached: int
    ) -> None:
        self.tokens, self.digests, self.blocks = tokens, digests, blocks
        self.block_ids = [block.block_id for block in blocks]
        self.num_published = num_hits
        self.num_cached_tokens = self.num_computed_tokens = num_cached
        self.is_live = True


class ObjectPerBlockManager:
    """Allocates, reuses and evicts blocks in least-recently-used order, one Python object per block.

    A block freed without a digest holds nothing that can be found, so it is given out before any published one.
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.block_size = block_size
        self.block_bytes = block_size * TOKEN_BYTES
        self.pack_block = struct.Struct(f"={block_size}i").pack
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.free_queue = BlockQueue(self.blocks)
        self.cached: dict[bytes, Block] = {}

    def add_sequence(self, tokens: NDArray[np.int32]) -> ObjectSequence:
        """Admit a prompt: hold the longest cached prefix, short of the last token, and allocate the rest.

        Raises ValueError for an empty prompt or a negative token, RuntimeError when too few blocks are free.
        """
        if not len(tokens) or int(tokens.min()) < 0:
            raise ValueError("a prompt needs at least one token, and token ids are 0 .. 2**31-1")
        digests = block_digests(tokens.tobytes(), self.block_bytes)
        hits = self.find(digests[: (len(tokens) - 1) // self.block_size])
        num_new = -(-len(tokens) // self.block_size) - len(hits)
        self.require(num_new + sum(1 for block in hits if not block.references))
        self.hold(hits)
        blocks = hits + self.allocate(num_new)
        return ObjectSequence(tokens.tolist(), digests, blocks, len(hits), len(hits) * self.block_size)

    def can_append(self, sequence: ObjectSequence) -> bool:
        """Whether one more token fits, in the last block or in a free one."""
        return len(sequence.tokens) < len(sequence.blocks) * self.block_size or self.free_queue.num_blocks > 0

    def append(self, sequence: ObjectSequence, token: int) -> None:
        """Add one token, and a block when the last one is full.

        Raises ValueError for a freed sequence or a token out of range, RuntimeError when no block is free.
        """
        if not sequence.is_live:
            raise ValueError("this sequence was freed")
        if not 0 <= token < 2**31:
            raise ValueError(f"token {token} is not in 0 .. 2**31-1")
        if not self.can_append(sequence):
            raise RuntimeError("one block is needed, but none is free")
        tokens = sequence.tokens
        if len(tokens) == len(sequence.blocks) * self.block_size:
            self.extend(sequence)
        tokens.append(token)
        if len(tokens) % self.block_size == 0:
            parent = sequence.digests[-1] if sequence.digests else ROOT_DIGEST
            sequence.digests.append(sha256(parent + self.pack_block(*tokens[-self.block_size :])).digest())

    def extend(self, sequence: ObjectSequence) -> None:
        """Give a sequence one more block."""
        (block,) = self.allocate(1)
        sequence.blocks.append(block)
        sequence.block_ids.append(block.block_id)

    def commit(self, sequence: ObjectSequence, num_computed_tokens: int | None = None) -> None:
        """Publish the full blocks up to a count of computed tokens, default all; content known already is skipped.

        Raises ValueError for a freed sequence, or a count below the last one or above the tokens there are.
        """
        if not sequence.is_live:
            raise ValueError("this sequence was freed")
        num_computed = len(sequence.tokens) if num_computed_tokens is None else num_computed_tokens
        if not sequence.num_computed_tokens <= num_computed <= len(sequence.tokens):
            raise ValueError(f"{num_computed} tokens cannot be computed of {len(sequence.tokens)}")
        sequence.num_computed_tokens = num_computed
        num_full = num_computed // self.block_size
        if sequence.num_published < num_full:
            self.publish(sequence, num_full)

    def publish(self, sequence: ObjectSequence, num_full: int) -> None:
        """Make the first num_full blocks of a sequence findable, where their content is not so yet."""
        digests, blocks, cached = sequence.digests, sequence.blocks, self.cached
        for index in range(sequence.num_published, num_full):
            digest = digests[index]
            if digest not in cached:
                cached[digest] = block = blocks[index]
                block.digest = digest
        sequence.num_published = num_full

    def free(self, sequence: ObjectSequence) -> None:
        """End a sequence; blocks nobody else holds join the queue, the deepest first.

        Raises ValueError the second time.
        """
        if not sequence.is_live:
            raise ValueError("this sequence was freed")
        sequence.is_live = False
        reusable: list[Block] = []
        blank: list[Block] = []
        for block in reversed(sequence.blocks):
            block.references -= 1
            if not block.references:
                (blank if block.digest is None else reusable).append(block)
        self.free_queue.append(reusable)
        self.free_queue.prepend(blank)

    def find(self, digests: list[bytes]) -> list[Block]:
        """Look up blocks until the first one that is missing."""
        cached = self.cached
        hits: list[Block] = []
        for digest in digests:
            block = cached.get(digest)
            if block is None:
                break
            hits.append(block)
        return hits

    def hold(self, hits: list[Block]) -> None:
        """Count one more reference on each block, taking it off the queue if it was there."""
        for block in hits:
            if not block.references:
                self.free_queue.remove(block)
            block.references += 1

    def allocate(self, n: int) -> list[Block]:
        """Take n free blocks, forgetting what they held."""
        blocks = self.free_queue.take(n)
        for block in blocks:
            if block.digest is not None:
                del self.cached[block.digest]
                block.digest = None
            block.references = 1
        return blocks

    def require(self, n: int) -> None:
        """Refuse what does not fit."""
        if n > self.free_queue.num_blocks:
            raise RuntimeError(f"{n} blocks are needed, but only {self.free_queue.num_blocks} are free")
