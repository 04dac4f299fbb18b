"""An oracle in place of memory: slots hold what the K and V there would depend on, so that any wrong block is seen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvist.config import CacheConfig
from kvist.core.extents import Namespace
from kvist.core.moves import Move
from kvist.core.sequences import Sequence
from kvist.errors import KvistError

if TYPE_CHECKING:
    from kvist.manager import KVCacheManager

__all__ = ["NOTHING", "Prefixes", "TokenMemory", "WrongContents"]

NOTHING = 0
"""What a slot holds that was never written, or that a copy of fewer tokens left behind."""

NO_COPY = -1


class WrongContents(KvistError, AssertionError):
    """A slot does not hold what its reader needs, or was written by one who does not own it."""


class Prefixes:
    """Gives every (namespace, tokens up to and including one position) an int of its own, compared exactly.

    >>> prefixes = Prefixes()
    >>> prefixes.along(("a",), [7, 8]).tolist(), prefixes.along(("b",), [7]).tolist(), prefixes.along(("a",), [7, 9]).tolist()
    ([2, 3], [5], [2, 6])
    """

    def __init__(self) -> None:
        self._children: list[dict[int, int]] = [{}]
        self._parents: list[tuple[int, int]] = [(NOTHING, 0)]
        self._roots: dict[Namespace, int] = {}

    def along(self, namespace: Namespace, tokens: Iterable[int]) -> NDArray[np.int64]:
        """Return the prefix that ends at each position, int64 `[num_tokens]`."""
        prefix = self._roots.get(namespace) or self._roots.setdefault(namespace, self._new(NOTHING, 0))
        found = []
        for token in tokens:
            children = self._children[prefix]
            prefix = children.get(token) or children.setdefault(token, self._new(prefix, token))
            found.append(prefix)
        return np.array(found, np.int64)

    def describe(self, prefix: int) -> str:
        """Say in words which namespace, position and tokens a prefix stands for."""
        if prefix == NOTHING:
            return "nothing"
        tokens = []
        while prefix not in self._roots.values():
            prefix, token = self._parents[prefix]
            tokens.append(token)
        namespace = next(name for name, root in self._roots.items() if root == prefix)
        return f"position {len(tokens) - 1} of {tokens[::-1]} in namespace {namespace}"

    def _new(self, parent: int, token: int) -> int:
        self._children.append({})
        self._parents.append((parent, token))
        return len(self._children) - 1


class TokenMemory:
    """A memory whose slots hold, instead of numbers, the tokens and namespace that the K and V there would depend on.

    Give it to a manager as `memory=`, or hand it what `take_moves()` returns. Play the model with `write`, before `commit`;
    `verify` then reads a sequence through its block table. A wrong block, an early reuse, a lost copy, and a copy of too
    many or too few tokens raise WrongContents. `attach` lets `write` prove as well that nobody else holds the slots.

    `slots` is int64 `[num_blocks, block_size]`; see `Prefixes` for what the ints mean.

    >>> from kvist import AttentionSpec, CacheConfig, KVCacheManager
    >>> config = CacheConfig([AttentionSpec(num_kv_heads=1, head_dim=1)], block_size=2, num_blocks=4)
    >>> memory = TokenMemory(config)
    >>> manager = KVCacheManager(config, memory=memory)
    >>> memory.attach(manager)
    >>> first = manager.add_sequence([1, 2, 3, 4])
    >>> memory.write(first)
    >>> manager.commit([first])
    >>> second = manager.add_sequence([1, 2, 3, 5])
    >>> second.num_cached_tokens
    3
    >>> memory.verify(second)
    """

    def __init__(self, config: CacheConfig) -> None:
        self.block_size = config.block_size
        self.slots = np.full((config.resolved_num_blocks, config.block_size), NOTHING, np.int64)
        self.num_moved_tokens = 0
        self._prefixes = Prefixes()
        self._manager: KVCacheManager | None = None
        self._copied = np.full(config.resolved_num_blocks, NO_COPY, np.int64)

    def attach(self, manager: KVCacheManager) -> None:
        """Let `write` ask this manager who else holds a block."""
        self._manager = manager

    def perform(self, moves: Iterable[Move]) -> None:
        """Make copies in the order given; rows past the copied ones hold nothing afterwards."""
        for move in moves:
            if not 0 < move.num_tokens <= self.block_size:
                raise WrongContents(f"{move} copies {move.num_tokens} of {self.block_size} token rows")
            self._require_unheld_destination(move)
            copied = self.slots[move.source, : move.num_tokens].copy()
            self.slots[move.destination, : move.num_tokens] = copied
            self.slots[move.destination, move.num_tokens :] = NOTHING
            self._copied[move.destination] = move.num_tokens
            self.num_moved_tokens += move.num_tokens

    def write(self, sequence: Sequence, start: int | None = None, stop: int | None = None) -> None:
        """Write positions start .. stop-1 of a sequence, as its forward pass would.

        Default: all that is not computed yet. Every position before `start` must hold what the sequence needs (a forward
        pass reads it), and nobody else may hold a block that is written.
        """
        start = sequence.num_computed_tokens if start is None else start
        stop = sequence.num_tokens if stop is None else stop
        needed = self._needed(sequence)
        blocks = sequence.block_ids
        self._require(sequence, blocks, needed[:start])
        self._require_exact_copies(sequence, blocks, start)
        if stop <= start:
            return
        written = blocks[start // self.block_size : -(-stop // self.block_size)]
        self._require_sole_owner(sequence, written)
        positions = np.arange(start, stop)
        self.slots[blocks[positions // self.block_size], positions % self.block_size] = needed[start:stop]
        self._copied[written] = NO_COPY

    def verify(self, sequence: Sequence) -> None:
        """Read every computed position through the block table; raise WrongContents at the first wrong one.

        A block that was copied since the last `write` or `verify` must have received exactly as many tokens as the
        sequence counts as computed there, so verify after the call that made the copy, before rewinding the sequence.
        """
        blocks = sequence.block_ids
        num_computed = sequence.num_computed_tokens
        self._require(sequence, blocks, self._needed(sequence)[:num_computed])
        self._require_exact_copies(sequence, blocks, num_computed)

    def _needed(self, sequence: Sequence) -> NDArray[np.int64]:
        return self._prefixes.along(sequence.namespace, sequence.tokens.tolist())

    def _require(self, sequence: Sequence, blocks: NDArray[np.int32], needed: NDArray[np.int64]) -> None:
        positions = np.arange(len(needed))
        if len(blocks) * self.block_size < len(needed):
            raise WrongContents(f"{sequence!r}: {len(needed)} tokens are computed, in {len(blocks)} blocks")
        held = self.slots[blocks[positions // self.block_size], positions % self.block_size]
        wrong = np.flatnonzero(held != needed)
        if len(wrong):
            at = int(wrong[0])
            raise WrongContents(
                f"{sequence!r}: slot {at % self.block_size} of block {blocks[at // self.block_size]} holds "
                f"{self._prefixes.describe(int(held[at]))}; needed is {self._prefixes.describe(int(needed[at]))}"
            )

    def _require_exact_copies(self, sequence: Sequence, blocks: NDArray[np.int32], num_computed: int) -> None:
        computed = np.clip(num_computed - np.arange(len(blocks)) * self.block_size, 0, self.block_size)
        copied = self._copied[blocks]
        wrong = np.flatnonzero((copied != NO_COPY) & (copied != computed))
        if len(wrong):
            at = int(wrong[0])
            raise WrongContents(
                f"{sequence!r}: {copied[at]} tokens were copied into block {blocks[at]}, of which {computed[at]} count as computed"
            )
        self._copied[blocks] = NO_COPY

    def _require_unheld_destination(self, move: Move) -> None:
        if self._manager is not None and move.destination in tree_blocks(self._manager):
            raise WrongContents(f"{move} writes a block that is committed and read-only")

    def _require_sole_owner(self, sequence: Sequence, blocks: NDArray[np.int32]) -> None:
        if self._manager is None:
            return
        committed = tree_blocks(self._manager)
        for block in blocks.tolist():
            if block in committed:
                raise WrongContents(f"{sequence!r} writes block {block}, which is committed and read-only")
        for other in live_sequences(self._manager):
            shared = set(blocks.tolist()) & set(other.block_ids.tolist()) if other is not sequence else set()
            if shared:
                raise WrongContents(f"{sequence!r} writes block {min(shared)}, which {other!r} holds too")


def live_sequences(manager: KVCacheManager) -> list[Sequence]:
    """List the live sequences of a manager, beams that wait included."""
    raise NotImplementedError


def tree_blocks(manager: KVCacheManager) -> set[int]:
    """Collect the ids of all committed blocks: those in the tree, and those that only their holders can see."""
    raise NotImplementedError
