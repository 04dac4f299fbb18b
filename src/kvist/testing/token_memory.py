"""An oracle in place of memory: slots hold what the K and V there would depend on, so that any wrong block is seen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvist.config import CacheConfig
from kvist.core.extents import Namespace
from kvist.core.manager import CacheCore
from kvist.core.moves import Move
from kvist.core.sequences import Sequence

__all__ = ["NOTHING", "Prefixes", "TokenMemory", "WrongContents", "committed_blocks"]

Manager = TypeVar("Manager", bound=CacheCore)

NOTHING = 0
"""What a slot holds that was never written, or whose content nobody may rely on."""


class WrongContents(AssertionError):
    """A slot does not hold what its reader needs, or was written while others could read it."""


class Prefixes:
    """Gives every (namespace, tokens up to and including one position) an int of its own, compared exactly.

    >>> prefixes = Prefixes()
    >>> [prefixes.along(namespace, [7, token]).tolist() for namespace, token in [((), 8), (("a",), 8), ((), 9)]]
    [[2, 3], [5, 6], [2, 7]]
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
        tokens: list[int] = []
        namespaces = {root: name for name, root in self._roots.items()}
        while prefix not in namespaces:
            prefix, token = self._parents[prefix]
            tokens.append(token)
        return f"position {len(tokens) - 1} of {tokens[::-1]} in namespace {namespaces[prefix]}"

    def _new(self, parent: int, token: int) -> int:
        self._children.append({})
        self._parents.append((parent, token))
        return len(self._children) - 1


class TokenMemory:
    """A memory whose slots hold, instead of numbers, the tokens and namespace that the K and V there would depend on.

    Give it to a manager as `memory=`, or hand `perform` what `take_moves()` returns. Play the model with `write`,
    before `commit`; `verify` then reads a sequence through its block table. A wrong block, an early reuse, a lost copy,
    and a copy of too many or too few tokens raise WrongContents. It sees who else holds a block only of a manager that
    it is attached to.

    `slots` is int64 `[num_blocks, block_size]`; `prefixes` says what the ints mean.

    >>> from kvist import AttentionSpec, CacheConfig, KVCacheManager
    >>> config = CacheConfig([AttentionSpec(num_kv_heads=1, head_dim=1)], block_size=2, num_blocks=4)
    >>> memory = TokenMemory(config)
    >>> manager = memory.attach(KVCacheManager(config, memory=memory))
    >>> first = manager.add_sequence([1, 2, 3, 4])
    >>> memory.write(first)
    >>> manager.commit([first])
    >>> second = manager.add_sequence([1, 2, 3, 5])
    >>> second.num_cached_tokens
    3
    >>> memory.verify(second)
    >>> memory.slots[first.block_ids[0], 0] = NOTHING
    >>> memory.verify(second)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    kvist.testing.token_memory.WrongContents: <Sequence row 1: ...>: slot 0 of block 0 holds nothing; needed is ...
    """

    def __init__(self, config: CacheConfig) -> None:
        self.block_size = config.block_size
        self.slots = np.full((config.group_num_blocks[0], config.block_size), NOTHING, np.int64)
        self.prefixes = Prefixes()
        self.num_copied_tokens = 0
        self._manager: CacheCore | None = None

    def attach(self, manager: Manager) -> Manager:
        """Let every write and copy prove that nobody else holds the block; returns the manager."""
        self._manager = manager
        return manager

    def perform(self, moves: Iterable[Move], *, late: bool = False) -> None:
        """Make copies in the order given; rows past the copied ones hold nothing afterwards.

        A copy must be of exactly as many tokens as its reader counts as computed in the block, unless the moves are
        `late`: calls that were made since they were ordered may have changed both.
        """
        moves = list(moves)
        if not late:
            self._require_exact_copies(moves)
        for move in moves:
            if not 0 < move.num_tokens <= self.block_size or move.source == move.destination:
                raise WrongContents(f"{move} is no copy of 1 .. {self.block_size} tokens from one block to another")
            self.slots[move.destination, : move.num_tokens] = self.slots[move.source, : move.num_tokens]
            self.slots[move.destination, move.num_tokens :] = NOTHING
            self.num_copied_tokens += move.num_tokens

    def write(self, sequence: Sequence, start: int | None = None, stop: int | None = None) -> None:
        """Write positions start .. stop-1 of a sequence as its forward pass would; default: all not computed yet.

        The positions before `start`, which a forward pass reads, must hold what the sequence needs, and nobody else may
        hold the blocks that are written.
        """
        start = sequence.num_computed_tokens if start is None else start
        stop = sequence.num_tokens if stop is None else stop
        needed = self._needed(sequence)
        self._require(sequence, needed[:start])
        self._put(sequence, np.arange(start, stop), needed[start:stop])

    def spoil(self, sequence: Sequence) -> None:
        """Write nonsense to all positions that are not computed, reserved ones too, as drafts do that are rejected."""
        self._put(sequence, np.arange(sequence.num_computed_tokens, sequence.capacity), NOTHING)

    def verify(self, sequence: Sequence) -> None:
        """Read every computed position through the block table; raise WrongContents at the first wrong one."""
        self._require(sequence, self._needed(sequence)[: sequence.num_computed_tokens])

    def _needed(self, sequence: Sequence) -> NDArray[np.int64]:
        return self.prefixes.along(sequence.namespace, sequence.tokens.tolist())

    def _put(self, sequence: Sequence, positions: NDArray[np.int64], contents: NDArray[np.int64] | int) -> None:
        if not len(positions):
            return
        blocks = sequence.block_ids
        self._require_sole_owner(
            sequence, set(blocks[positions[0] // self.block_size : positions[-1] // self.block_size + 1].tolist())
        )
        self.slots[blocks[positions // self.block_size], positions % self.block_size] = contents

    def _require(self, sequence: Sequence, needed: NDArray[np.int64]) -> None:
        blocks = sequence.block_ids
        if len(blocks) * self.block_size < len(needed):
            raise WrongContents(f"{sequence!r}: {len(needed)} tokens are computed, in {len(blocks)} blocks")
        positions = np.arange(len(needed))
        found = self.slots[blocks[positions // self.block_size], positions % self.block_size]
        wrong = np.flatnonzero(found != needed)
        if not len(wrong):
            return
        at = int(wrong[0])
        raise WrongContents(
            f"{sequence!r}: slot {at % self.block_size} of block {blocks[at // self.block_size]} holds "
            f"{self.prefixes.describe(int(found[at]))}; needed is {self.prefixes.describe(int(needed[at]))}"
        )

    def _require_sole_owner(self, sequence: Sequence, blocks: set[int]) -> None:
        if self._manager is None:
            return
        if read_only := blocks & committed_blocks(self._manager):
            raise WrongContents(f"{sequence!r} writes blocks {read_only}, which are committed and read-only")
        for other in self._manager._state.rows.running():
            if other is sequence or other.leader is sequence:
                continue
            if shared := blocks & set(other.block_ids.tolist()):
                raise WrongContents(f"{sequence!r} writes blocks {shared}, which {other!r} holds too")

    def _require_exact_copies(self, moves: list[Move]) -> None:
        if self._manager is None:
            return
        last = {move.destination: move for move in moves}
        if read_only := last.keys() & committed_blocks(self._manager):
            raise WrongContents(f"{[last[block] for block in read_only]} write blocks that are committed and read-only")
        for sequence in self._manager._state.rows.running():
            if sequence.leader is not None:
                continue
            for index, block in enumerate(sequence.block_ids.tolist()):
                computed = min(max(sequence.num_computed_tokens - index * self.block_size, 0), self.block_size)
                if block in last and last[block].num_tokens != computed:
                    raise WrongContents(f"{last[block]}, but {sequence!r} counts {computed} tokens in it as computed")


def committed_blocks(manager: CacheCore) -> set[int]:
    """Collect the ids of all blocks that are read-only: cached ones, and those that only their holders can reach."""
    extents = list(manager._state.tree.extents())
    for holder in [*(sequence._extent for sequence in manager._state.rows.running()), *manager._state.pins.values()]:
        extents += holder.path()
    return {block for extent in extents for block in extent.blocks[0].tolist()}
