"""Extents: runs of consecutive blocks with the tokens they hold, the nodes of the prefix tree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvist.core.retention import DEFAULT_KEEP
from kvist.core.siblings import SortedKeys
from kvist.core.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from kvist.core.events import Run

__all__ = ["Blocks", "Extent", "Loss", "Match", "Namespace", "Root", "Twins"]

Blocks = NDArray[np.int32]
"""Block ids `[num_groups, n]`."""
Namespace = tuple[str | int | bytes, ...]
Loss = tuple[float, str]
"""An eviction: when, in seconds of the manager's clock, and why."""


class Extent:
    """A run of blocks that follow one another in a prefix.

    `tokens` are the packed ids that the blocks hold, `blocks` the ids `[num_groups, num_blocks]`, -1 where a group has
    let one go, which can only be where it `has_holes`; `start` is the place of the first block in the prefix.
    `last_use` and `created` are ticks of the tree; `hits` counts the admissions that reused it; `ticket` is nonzero
    while it waits in the eviction queue, and `spare` has a bit for each group that it waits in with blocks that are not
    needed much. What was evicted from below it, and when, is in `lost`, by the key that it had. What goes on from an
    extent of the device in the host tier is in `lower`, like `children`. `chain` is, where that was needed once, a
    number of blocks of its prefix and the digest of what these hold. `run` is what events call its content,
    and where in that it begins. `offered` says at which state of refusals by stores it was last looked through for what
    they lack, and how many blocks it had.
    """

    __slots__ = (
        "blocks",
        "chain",
        "children",
        "created",
        "has_holes",
        "hits",
        "keep",
        "key",
        "last_use",
        "lost",
        "lower",
        "num_short_children",
        "offered",
        "order",
        "parent",
        "references",
        "run",
        "spare",
        "start",
        "ticket",
        "tokens",
    )

    def __init__(
        self, parent: Extent | None, key: bytes | None, tokens: bytes | bytearray, blocks: Blocks, tick: int
    ) -> None:
        self.parent = parent
        self.key = key
        self.tokens = tokens
        self.blocks = blocks
        self.children: dict[bytes, Extent] | None = None
        self.lower: dict[bytes, Extent] | None = None
        self.chain: tuple[int, bytes] | None = None
        self.run: tuple[Run, int] | None = None
        self.offered: tuple[int, int] | None = None
        self.order: SortedKeys | None = None
        self.num_short_children = 0
        self.references = self.hits = self.ticket = self.spare = 0
        self.start: int = 0 if parent is None else parent.start + parent.blocks.shape[1]
        self.lost: dict[bytes, Loss] | None = None
        self.created = self.last_use = tick
        self.has_holes = False
        self.keep = DEFAULT_KEEP

    def copied(self) -> Extent:
        """Return a copy with the same relatives, which the caller replaces by their own copies."""
        tokens = bytearray(self.tokens) if isinstance(self.tokens, bytearray) else self.tokens
        if isinstance(self, Root):
            twin: Extent = Root(self.namespace, len(self.blocks))
        else:
            twin = Extent(self.parent, self.key, tokens, self.blocks.copy(), self.created)
        twin.children, twin.num_short_children, twin.lower = self.children, self.num_short_children, self.lower
        twin.order = None if self.order is None else self.order.copied()
        twin.references, twin.hits, twin.ticket, twin.spare = self.references, self.hits, self.ticket, self.spare
        twin.last_use, twin.keep, twin.start, twin.has_holes = self.last_use, self.keep, self.start, self.has_holes
        twin.lost = None if self.lost is None else dict(self.lost)
        return twin

    @property
    def num_blocks(self) -> int:
        """Blocks per group, the partly filled one included."""
        return int(self.blocks.shape[1])

    @property
    def priority(self) -> int:
        """Its retention priority, 0 to 100."""
        return self.keep.priority

    @property
    def num_tokens(self) -> int:
        """Tokens held by the blocks."""
        return len(self.tokens) // TOKEN_BYTES

    def path(self) -> list[Extent]:
        """List the extents from the first below the root down to this one."""
        path = []
        extent = self
        while extent.parent is not None:
            path.append(extent)
            extent = extent.parent
        return path[::-1]

    def subtree(self) -> Iterator[Extent]:
        """Yield this extent and all listed ones below it, parents first."""
        waiting = [self]
        while waiting:
            extent = waiting.pop()
            yield extent
            if extent.children:
                waiting.extend(reversed(extent.children.values()))

    def subtree_in_order(self) -> Iterator[Extent]:
        """Yield the same extents as `subtree`, siblings in the order of their keys, whenever they were added."""
        waiting = [self]
        while waiting:
            extent = waiting.pop()
            yield extent
            waiting.extend(child for _, child in sorted((extent.children or {}).items(), reverse=True))


class Root(Extent):
    """Where the prefixes of one namespace begin: an extent without blocks."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace, num_groups: int) -> None:
        super().__init__(None, None, b"", np.empty((num_groups, 0), np.int32), 0)
        self.namespace = namespace


Twins = dict[int, Extent]
"""Copies of extents, by the `id` of what each is a copy of."""


class Match:
    """Where a prefix was found: `extent` matches to its end; below it the first `child_blocks` blocks of `child` do.

    `position` is the number of bytes in whole blocks that match; the `num_partial_tokens` that follow are the first of
    block `source_block` of `source`. `known` is the position up to which the tree knows the content, although further
    groups lack what they would need there.
    """

    __slots__ = ("child", "child_blocks", "extent", "known", "num_partial_tokens", "position", "source", "source_block")

    def __init__(self, extent: Extent, position: int) -> None:
        self.extent = extent
        self.position = self.known = position
        self.child: Extent | None = None
        self.source: Extent | None = None
        self.child_blocks = self.source_block = self.num_partial_tokens = 0

    @property
    def bottom(self) -> Extent:
        """The deepest extent that matches, whole or in part."""
        return self.extent if self.child is None else self.child

    def runs(self, block_size: int) -> tuple[tuple[bytes, int], ...]:
        """Return the packed ids that match in whole blocks, by extents from the root down, each with its length."""
        runs = [(bytes(extent.tokens), len(extent.tokens)) for extent in self.extent.path()]
        if self.child is not None:
            runs.append((bytes(self.child.tokens), self.child_blocks * block_size * TOKEN_BYTES))
        return tuple(runs)
