"""What content is called where it leaves the process: a chain of digests from the root of a namespace on.

The digest of a block is SHA-256 over that of the block before and its own token ids, int32 in little-endian order, and
what they stand for where that is more than a token. The root's is over the cache's fingerprint (model, layers, block
size) and the namespace. It depends on nothing else: not on the process, the machine, or the order of calls.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from hashlib import sha256
from struct import Struct

import numpy as np

from kvist.core.extents import Extent, Namespace, Root
from kvist.core.identity import IdentityTable
from kvist.core.tokens import TOKEN_BYTES

__all__ = ["TAG_BYTES", "Chain"]

TAG_BYTES = 16
_VERSION = b"kvist chain 1"


class Chain:
    """Digests of the blocks of one cache.

    >>> chain = Chain(b"fingerprint", block_size=2, identities=IdentityTable())
    >>> tokens = np.array([1, 2, 3, 4], np.int32).tobytes()
    >>> first, second = chain.extend(chain.root(()), tokens)
    >>> chain.extend(first, tokens[8:]) == [second], chain.root(("a",)) == chain.root(())
    (True, False)
    """

    def __init__(self, fingerprint: bytes, block_size: int, identities: IdentityTable) -> None:
        self._fingerprint = fingerprint
        self.block_bytes = block_size * TOKEN_BYTES
        self.identities = identities
        self._blocks = Struct(f"{self.block_bytes}s")

    def root(self, namespace: Namespace) -> bytes:
        """Return the digest that the chain of a namespace begins with."""
        return sha256(_VERSION + _framed([self._fingerprint, *map(_typed, namespace)])).digest()

    def tag(self, namespace: Namespace) -> bytes:
        """Return what every key of a namespace begins with; what the namespace is cannot be told from it."""
        return sha256(b"tag" + self.root(namespace)).digest()[:TAG_BYTES]

    def keys(self, namespace: Namespace, digests: Iterable[bytes], group: int) -> list[bytes]:
        """Return the keys of one group's blocks with these contents, 50 bytes each."""
        tag, end = self.tag(namespace), group.to_bytes(2, "little")
        return [tag + digest + end for digest in digests]

    def extend(self, digest: bytes, packed: bytes | bytearray | memoryview) -> list[bytes]:
        """Return the digest of each whole block of packed ids that come after the block with this digest."""
        size = self.block_bytes
        packed = packed[: len(packed) - len(packed) % size]
        if not (np.frombuffer(packed, np.int32) < 0).any():
            return self.extend_tokens(digest, packed)
        content, marks, digests = self.identities.tokens(packed).astype("<i4").tobytes(), self._marks(packed), []
        for at in range(0, len(content), size):
            digest = sha256(digest + content[at : at + size] + marks.get(at // size, b"")).digest()
            digests.append(digest)
        return digests

    def extend_tokens(self, digest: bytes, tokens: bytes | bytearray | memoryview) -> list[bytes]:
        """Return the digest of each of some whole blocks of token ids, int32, that are nothing but tokens.

        One call of SHA-256 a block, each over the digest before: that is all that this loop does.
        """
        content = tokens if sys.byteorder == "little" else np.frombuffer(tokens, np.int32).astype("<i4").tobytes()
        return [digest := sha256(digest + block).digest() for (block,) in self._blocks.iter_unpack(content)]

    def _marks(self, packed: bytes | bytearray | memoryview) -> dict[int, bytes]:
        """Return, by block, what its negative ids stand for; the ids themselves are of this process only."""
        marks: dict[int, bytes] = {}
        size = self.block_bytes // TOKEN_BYTES
        for position, each in self.identities.identities(packed):
            parts = [position % size, each.token, each.extra_id, each.length, each.key if each.key is not None else ""]
            marks[position // size] = marks.get(position // size, b"") + _framed(map(_typed, parts))
        return marks

    def of_path(self, extent: Extent, first: int, end: int) -> list[bytes]:
        """Return the digests of blocks first .. end-1 of the prefix that ends with an extent."""
        nodes, node = [], extent
        while node.parent is not None and node.start > first:
            nodes.append(node)
            node = node.parent
        digest = self._before(node, first)
        found: list[bytes] = []
        for each in [node, *reversed(nodes)]:
            if each.parent is not None:
                skip = max(first - each.start, 0) * self.block_bytes
                new = self.extend(digest, each.tokens[skip : (end - each.start) * self.block_bytes])
                found += new
                if new:
                    digest = new[-1]
                    self._note(each, first + len(found), digest)
        return found

    def _before(self, extent: Extent, column: int) -> bytes:
        """Return the digest of the block before a column of an extent, or before its first, and note it there."""
        path, node = [], extent
        while node.parent is not None and not _is_known(node, column):
            path.append(node)
            node = node.parent
        if isinstance(node, Root):
            done, digest = 0, self.root(node.namespace)
        else:
            assert node.chain is not None
            done, digest = node.chain
        for each in [node, *reversed(path)]:
            stop = min(each.start + each.num_blocks, column)
            if each.parent is not None and stop > done:
                low, high = (done - each.start) * self.block_bytes, (stop - each.start) * self.block_bytes
                digest, done = self.extend(digest, each.tokens[low:high])[-1], stop
                self._note(each, stop, digest)
        return digest

    @staticmethod
    def _note(extent: Extent, end: int, digest: bytes) -> None:
        """Keep the digest of a prefix that ends inside an extent, or at its end: the longest that is still right."""
        if extent.chain is None or not end <= extent.chain[0] <= extent.start + extent.num_blocks:
            extent.chain = (end, digest)

    @staticmethod
    def forget(extent: Extent, first: int) -> None:
        """Forget what was noted of blocks from `first` on of a prefix that ends with an extent: they are others now."""
        node = extent
        while node.parent is not None and node.start + node.num_blocks > first:
            if node.chain is not None and node.chain[0] > first:
                node.chain = None
            node = node.parent


def _is_known(extent: Extent, column: int) -> bool:
    """Say whether the digest of a prefix is noted that ends inside an extent, and not after a column."""
    if extent.chain is None:
        return False
    return extent.start < extent.chain[0] <= min(column, extent.start + extent.num_blocks)


def _typed(part: str | int | bytes) -> bytes:
    """Encode a value so that "1", 1 and b"1" differ."""
    if isinstance(part, bytes):
        return b"b" + part
    return (b"s" if isinstance(part, str) else b"i") + str(part).encode("utf-8", "surrogatepass")


def _framed(parts: Iterable[bytes]) -> bytes:
    """Join byte strings so that others cannot give the same."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)
