"""What must be true of a manager, kept plainly beside it: what each sequence has, what may and what must be found."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvist.core.extents import Namespace
from kvist.core.sequences import Sequence
from kvist.testing.token_memory import Prefixes

__all__ = ["Reusable", "Shadow", "blocks_for"]


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold that many tokens."""
    return -(-num_tokens // block_size)


@dataclass(eq=False, slots=True)
class Shadow:
    """What a sequence should have, and what its block table showed when it was last seen."""

    sequence: Sequence
    tokens: list[int]
    num_computed: int
    num_blocks: int
    publishes: bool
    leader: Shadow | None = None
    num_surely_published: int = 0
    seen_version: int = -1
    seen_blocks: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))

    @classmethod
    def of(cls, sequence: Sequence, other: Shadow, num_blocks: int) -> Shadow:
        """Make the shadow of a sequence that is what another is."""
        shadow = cls(sequence, [], 0, 0, publishes=False)
        shadow.take_over(other, num_blocks)
        return shadow

    @property
    def namespace(self) -> Namespace:
        """The sequence's namespace."""
        return self.sequence.namespace

    def take_over(self, other: Shadow, num_blocks: int) -> None:
        """Go on from what another sequence is."""
        self.tokens, self.num_computed, self.num_blocks = list(other.tokens), other.num_computed, num_blocks
        self.publishes, self.num_surely_published = other.publishes, other.num_surely_published


class Reusable:
    """What a prompt may hit and what it must hit, as sets of prefixes found without any tree.

    A prefix *may* be found once a sequence that publishes has committed it. It *must* be found while such a sequence
    runs, and after that until blocks are evicted; of a sequence that ends or steps back without publishing, only what a
    look at the whole cache had published before.
    """

    def __init__(self, prefixes: Prefixes, block_size: int, *, partial: bool) -> None:
        self.block_size = block_size
        self.partial = partial
        self._prefixes = prefixes
        self._may: dict[Namespace, set[int]] = {}
        self._must: dict[Namespace, set[int]] = {}

    def publish(self, shadow: Shadow) -> None:
        """Note that the full committed blocks of a sequence have been published."""
        if shadow.publishes and shadow.leader is None:
            shadow.num_surely_published = self._full_tokens(shadow)

    def leave(self, shadow: Shadow, *, publish: bool) -> None:
        """Note that a sequence ends, leaving all that is computed, or, without `publish`, what was published before."""
        if not shadow.publishes or shadow.leader is not None:
            return
        full = self._full_tokens(shadow)
        left = shadow.num_computed if self.partial else full
        num_may, num_must = (left, left) if publish else (full, shadow.num_surely_published)
        ids = self._ids(shadow, num_may)
        self._may.setdefault(shadow.namespace, set()).update(ids)
        self._must.setdefault(shadow.namespace, set()).update(ids[:num_must])

    def rewind(self, shadow: Shadow, left: int) -> None:
        """Note that a sequence steps back: what had been published by then stays."""
        self.leave(shadow, publish=False)
        shadow.num_surely_published = min(shadow.num_surely_published, left // self.block_size * self.block_size)

    def evicted(self) -> None:
        """Note that blocks were evicted: nothing but what sequences hold must be found any more."""
        self._must.clear()

    def forget(self, namespace: Namespace) -> None:
        """Note that a namespace was dropped."""
        self._may.pop(namespace, None)
        self._must.pop(namespace, None)

    def bounds(self, namespace: Namespace, prompt: list[int], live: list[Shadow]) -> tuple[int, int]:
        """Return how many tokens of a prompt must, and how many may be reused, all but the last at most.

        `live` are the sequences that have not ended.
        """
        running: set[int] = set()
        for shadow in live:
            if shadow.publishes and shadow.leader is None and shadow.namespace == namespace:
                running.update(self._ids(shadow, self._full_tokens(shadow)))
        ids = self._prefixes.along(namespace, prompt[:-1]).tolist()
        must = _leading(ids, running | self._must.get(namespace, set()))
        may = _leading(ids, running | self._may.get(namespace, set()))
        if self.partial:
            return must, may
        return must // self.block_size * self.block_size, may // self.block_size * self.block_size

    def _full_tokens(self, shadow: Shadow) -> int:
        return shadow.num_computed // self.block_size * self.block_size

    def _ids(self, shadow: Shadow, num_tokens: int) -> list[int]:
        ids: list[int] = self._prefixes.along(shadow.namespace, shadow.tokens[:num_tokens]).tolist()
        return ids


def _leading(ids: list[int], known: set[int]) -> int:
    for count, prefix in enumerate(ids):
        if prefix not in known:
            return count
    return len(ids)
