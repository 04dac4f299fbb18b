"""What has changed in the cache, as those outside are told: which blocks are stored where, moved, and gone.

Inside, events are about runs of blocks, as extents are; a digest of each block is made when it is asked for, and once.
So nothing is hashed while nobody listens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvist.core.chain import Chain
from kvist.core.extents import Namespace
from kvist.core.identity import Identity
from kvist.core.tokens import TOKEN_BYTES, TokenArray

__all__ = ["Cleared", "Created", "Event", "Moved", "Removed", "Run", "Stored", "Updated"]


class Run:
    """Blocks that follow one another in a prefix: the first is its block `start`, and comes after a part of `parent`.

    That part are the first `parent_end` blocks. A run only ever grows, so that events may name parts of it. `tokens`
    are token ids, int32; `marks` what tokens are besides their ids (media, extra ids), each with its position.
    """

    __slots__ = ("_chain", "_digests", "marks", "namespace", "parent", "parent_end", "start", "tokens")

    def __init__(self, chain: Chain, namespace: Namespace, parent: Run | None, parent_end: int, start: int) -> None:
        self._chain = chain
        self._digests: list[bytes] = []
        self.namespace = namespace
        self.parent = parent
        self.parent_end = parent_end
        self.start = start
        self.tokens = bytearray()
        self.marks: list[tuple[int, Identity]] = []

    @property
    def num_blocks(self) -> int:
        """Whole blocks of it."""
        return len(self.tokens) // self._chain.block_bytes

    def append(self, packed: bytes) -> None:
        """Add whole blocks of packed ids. What stands for more than a token is looked up now: it may be forgotten."""
        if (np.frombuffer(packed, np.int32) < 0).any():
            identities, begin = self._chain.identities, len(self.tokens) // TOKEN_BYTES
            before = self.digests()[-1:] or [self._before()]
            self._digests += self._chain.extend(before[0], packed)
            self.marks += [(begin + position, each) for position, each in identities.identities(packed)]
            packed = identities.tokens(packed).tobytes()
        self.tokens += packed

    @property
    def before(self) -> bytes | None:
        """The digest of the block before the first, None where the first begins the prefix."""
        return None if self.parent is None else self.parent.digests()[self.parent_end - 1]

    def digests(self) -> list[bytes]:
        """Return the digests of its blocks, 32 bytes each."""
        waiting: list[Run] = []
        run: Run | None = self
        while run is not None and len(run._digests) < run.num_blocks:
            waiting.append(run)
            run = run.parent if not run._digests else None
        for each in reversed(waiting):
            done = len(each._digests)
            before = each._digests[-1] if done else each._before()
            tokens = each.tokens[done * each._chain.block_bytes :] if done else each.tokens
            each._digests += each._chain.extend_tokens(before, tokens)
        return self._digests

    def _before(self) -> bytes:
        before = self.before
        return self._chain.root(self.namespace) if before is None else before

    def ids(self, first: int, end: int) -> TokenArray:
        """Return the token ids of blocks first .. end-1, int32."""
        size = self._chain.block_bytes
        return np.frombuffer(bytes(self.tokens[first * size : end * size]), np.int32)

    def identities(self, first: int, end: int) -> list[tuple[int, Identity]]:
        """List what tokens of blocks first .. end-1 are besides their ids, each with its position among them."""
        size = self._chain.block_bytes // TOKEN_BYTES
        return [(at - first * size, each) for at, each in self.marks if first * size <= at < end * size]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that has happened. `id` counts from 0 for each `epoch` of a log; gaps in it are events that were lost.

    `epoch` is a number that no other life of this or another log has.
    """

    id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class _OfBlocks(Event):
    """An event about blocks `first` .. `end` - 1 of a run, in one group and tier."""

    group: int
    tier: str
    run: Run
    first: int
    end: int

    @property
    def namespace(self) -> Namespace:
        """The namespace that they are in."""
        return self.run.namespace

    @property
    def start(self) -> int:
        """Which block of its prefix the first one is."""
        return self.run.start + self.first

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return self.end - self.first

    @property
    def digests(self) -> list[bytes]:
        """The digest of each block, 32 bytes."""
        return self.run.digests()[self.first : self.end]

    @property
    def parent(self) -> bytes | None:
        """The digest of the block before the first; None where that begins the prefix."""
        return self.run.digests()[self.first - 1] if self.first else self.run.before


@dataclass(frozen=True, slots=True)
class Stored(_OfBlocks):
    """Blocks can be hit in a tier from now on. `priority` is their retention priority; `reason` why they are there.

    `columns` are those of the blocks that the group has, relative to `first`; None: all of them. A window or a state
    keeps some blocks of a prefix only.
    """

    priority: int
    reason: str
    columns: tuple[int, ...] | None = None

    @property
    def tokens(self) -> TokenArray:
        """The token ids of all the blocks, int32 `[num_blocks * block_size]`."""
        return self.run.ids(self.first, self.end)

    @property
    def identities(self) -> list[tuple[int, Identity]]:
        """What tokens are besides their ids (media, extra ids), each with its position among `tokens`."""
        return self.run.identities(self.first, self.end)


@dataclass(frozen=True, slots=True)
class Removed(_OfBlocks):
    """Blocks cannot be hit in a tier any more, for a `reason` such as "made room". `columns` as in `Stored`."""

    reason: str
    columns: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Moved(_OfBlocks):
    """Blocks are in `tier` now and were in `source_tier` before. `columns` as in `Stored`."""

    source_tier: str
    reason: str
    columns: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Updated(_OfBlocks):
    """Blocks have another retention priority."""

    old_priority: int
    priority: int


@dataclass(frozen=True, slots=True)
class Cleared(Event):
    """All content is gone, or that of one `namespace`, from all tiers, for a `reason`."""

    namespace: Namespace | None
    reason: str


@dataclass(frozen=True, slots=True)
class Created(Event):
    """A log begins: a group has so many blocks in each tier, and keeps so much of the past."""

    group: int
    kind: str
    window: int | None
    block_size: int
    num_blocks: Mapping[str, int]
