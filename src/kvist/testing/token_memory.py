"""An oracle in place of memory: slots hold what the K and V there would depend on, so that any wrong block is seen."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvist.config import CacheConfig
from kvist.core.groups import RingGeometry, spans_of
from kvist.core.lower import DEVICE, HOST
from kvist.core.manager import CacheCore
from kvist.core.moves import Move, one_by_one
from kvist.core.sequences import Sequence

__all__ = ["NOTHING", "Prefixes", "TokenMemory", "WrongContents", "committed_blocks"]

Manager = TypeVar("Manager", bound=CacheCore)
Positions = NDArray[np.int64]
Prefix = NDArray[np.int64]

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
        self._children: list[dict[Hashable, int]] = [{}]
        self._parents: list[tuple[int, Hashable]] = [(NOTHING, 0)]
        self._roots: dict[Hashable, int] = {}

    def along(self, namespace: Hashable, tokens: Iterable[Hashable]) -> NDArray[np.int64]:
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
        tokens: list[Hashable] = []
        namespaces = {root: name for name, root in self._roots.items()}
        while prefix not in namespaces:
            prefix, token = self._parents[prefix]
            tokens.append(token)
        return f"position {len(tokens) - 1} of {tokens[::-1]} in namespace {namespaces[prefix]}"

    def _new(self, parent: int, token: Hashable) -> int:
        self._children.append({})
        self._parents.append((parent, token))
        return len(self._children) - 1


class TokenMemory:
    """A memory whose slots hold, instead of numbers, the tokens and namespace that the K and V there would depend on.

    Give it to a manager as `memory=`, or hand `perform` what `take_moves()` returns. Play the model with `write`,
    before `commit`; `verify` then reads a sequence as its next forward pass would, in every group: all positions, those
    in a window, chunk or ring, the state after the last computed token, the encoder's tokens. A wrong block, an early
    reuse, a lost copy, and a copy of too many or too few tokens raise WrongContents. It sees who else holds a block
    only of a manager that it is attached to.

    `slots` is int64 `[num_blocks, block_size]` of the first group, `group_slots` of any; groups that share a pool share
    the array. `prefixes` says what the ints mean, divided by the number of groups: the same token is other content in
    another group. A state fills its block with the prefix after which it is.

    Where more than token ids tells tokens apart, pass as `tokens` a hashable for each; where layers attend to an
    encoder, fill their blocks by `encode` and say as `encoder` what it was given, on which all of the sequence depends.

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
        self.groups = config.groups
        self.pool_of = config.pool_of
        self.prefixes = Prefixes()
        self.num_copied_tokens = 0
        self._tiers = {
            tier: [np.full((size, config.block_size), NOTHING, np.int64) for size in sizes]
            for tier, sizes in ((DEVICE, config.pool_num_blocks), (HOST, config.host_num_blocks))
        }
        self._rings: list[RingGeometry | None] = [span.ring for span in spans_of(config)]
        self._manager: CacheCore | None = None

    @property
    def slots(self) -> NDArray[np.int64]:
        """What the slots of the first group hold, int64 `[num_blocks, block_size]`."""
        return self.group_slots(0)

    def group_slots(self, group: int, tier: str = DEVICE) -> NDArray[np.int64]:
        """Return what the slots that a group takes hold, int64 `[num_blocks, block_size]`, to read and to write."""
        return self._tiers[tier][self.pool_of[group]]

    def attach(self, manager: Manager) -> Manager:
        """Let every write and copy prove that nobody else holds the block; returns the manager."""
        self._manager = manager
        return manager

    # -- copies -------------------------------------------------------------------------------------------------------

    def perform(self, moves: Iterable[Move], *, late: bool = False) -> None:
        """Make copies in the order given; rows past the copied ones hold nothing afterwards.

        A copy must be of exactly as many tokens as its reader counts as computed in the block, unless the moves are
        `late`: calls that were made since they were ordered may have changed both.
        """
        moves = list(moves)
        if not late:
            self._require_exact_copies(moves)
        for move in moves:
            self._copy(move)

    def _copy(self, move: Move) -> None:
        sources = self.group_slots(move.group, move.source_tier)
        slots, is_state = self.group_slots(move.group, move.destination_tier), self.groups[move.group].kind == "state"
        n, source, destination = move.num_tokens, move.source_offset, move.destination_offset
        is_same_block = move.source == move.destination and move.source_tier == move.destination_tier
        in_place = is_same_block and (is_state or source == destination)
        if in_place or not 0 < n <= self.block_size - max(source, destination):
            raise WrongContents(f"{move} is no copy of 1 .. {self.block_size} tokens from one block to another")
        if is_state and n < self.block_size:
            raise WrongContents(f"{move} is of a part of a state")
        if not (0 <= move.source < len(sources) and 0 <= move.destination < len(slots)):
            raise WrongContents(f"{move} names a block that is none of {len(sources)} and {len(slots)}")
        slots[move.destination, destination : destination + n] = sources[move.source, source : source + n].copy()
        if not destination and not is_same_block:
            slots[move.destination, n:] = NOTHING
        self.num_copied_tokens += n

    # -- bytes --------------------------------------------------------------------------------------------------------

    def block_format(self) -> tuple[tuple[int, ...], tuple[dict[str, Any], ...]]:
        """Return the bytes of a block of each group: its slots, int64; for stores."""
        return (8 * self.block_size,) * len(self.groups), ({"slots": "int64"},)

    def read_blocks(self, group: int, blocks: NDArray[np.int32], tier: str = DEVICE) -> NDArray[np.uint8]:
        """Return the slots of blocks as bytes, uint8 `[n, 8 * block_size]`.

        The prefixes that they hold are numbered in this process, and by this memory.
        """
        return self.group_slots(group, tier)[blocks].view(np.uint8)

    def write_blocks(self, group: int, blocks: NDArray[np.int32], rows: NDArray[np.uint8]) -> None:
        """Fill blocks from bytes as `read_blocks` returns them."""
        self.group_slots(group)[blocks] = np.ascontiguousarray(rows).view(np.int64)
        self.num_copied_tokens += len(blocks) * self.block_size

    # -- playing the model --------------------------------------------------------------------------------------------

    def write(
        self,
        sequence: Sequence,
        start: int | None = None,
        stop: int | None = None,
        *,
        tokens: Iterable[Hashable] | None = None,
        encoder: Hashable = None,
    ) -> None:
        """Write positions start .. stop-1 of a sequence as its forward pass would; default: all not computed yet.

        What a forward pass from `start` on reads must be what the sequence needs, and nobody else may hold the blocks
        that are written.
        """
        start = sequence.num_computed_tokens if start is None else start
        stop = sequence.num_tokens if stop is None else stop
        needed = self._needed(sequence, tokens, encoder)
        self._require(sequence, needed[:start], encoder)
        for group in range(len(self.groups)) if stop > start else ():
            self._put(sequence, group, self._kept(group, start, stop), needed)

    def encode(self, sequence: Sequence, encoder: Hashable = None) -> None:
        """Write the encoder's tokens of a sequence, as the pass does that comes before the decoder's first."""
        needed = self._encoded(sequence, encoder)
        for group, spec in enumerate(self.groups):
            if spec.kind == "cross":
                self._put(sequence, group, np.arange(len(needed)), needed)

    def write_tree(
        self,
        sequence: Sequence,
        nodes: Iterable[int],
        *,
        tokens: Iterable[Hashable] | None = None,
        encoder: Hashable = None,
    ) -> None:
        """Write a tree of drafts as a forward pass would that verifies it: node i at position num_computed_tokens + i.

        `nodes` are those that will be accepted, from the root down, and `tokens` what the sequence will be with them;
        all others up to the last of them are nonsense.
        """
        places, start = np.array(list(nodes)), sequence.num_computed_tokens
        needed = self._needed(sequence, tokens, encoder)
        self._require(sequence, needed[:start], encoder)
        tree = np.full(start + int(places.max()) + 1, NOTHING, np.int64)
        tree[start + places] = needed[start : start + len(places)]
        for group, spec in enumerate(self.groups):
            if spec.kind not in ("state", "cross"):
                self._put(sequence, group, np.arange(start, len(tree)), tree)

    def spoil(self, sequence: Sequence) -> None:
        """Write nonsense wherever drafts could write that are rejected: to what is not computed, reserved or not.

        A ring is written only where the sequence has tokens, and nothing is overwritten that is needed again; a state
        not at all.
        """
        computed, capacity = sequence.num_computed_tokens, sequence.capacity
        for group, spec in enumerate(self.groups):
            positions = np.arange(computed, capacity if spec.kind not in ("state", "cross") else computed)
            if ring := self._rings[group]:
                needed_again = np.isin(positions - ring.num_ring_tokens, self._read(group, computed))
                first = int(np.append(needed_again, True).argmax())
                positions = positions[: min(first, sequence.num_tokens - computed)]
            self._put(sequence, group, positions, None)

    def verify(self, sequence: Sequence, *, tokens: Iterable[Hashable] | None = None, encoder: Hashable = None) -> None:
        """Read what the next forward pass would, through the block tables; raise WrongContents where it is wrong."""
        needed = self._needed(sequence, tokens, encoder)
        self._require(sequence, needed[: sequence.num_computed_tokens], encoder)

    # -- positions ----------------------------------------------------------------------------------------------------

    def _read(self, group: int, num_computed: int) -> Positions:
        """List the positions that the token after `num_computed` others reads; of a state the last one, all in one."""
        spec, first = self.groups[group], 0
        if spec.kind == "state":
            first = max(num_computed - 1, 0)
        elif spec.kind == "chunked":
            first = num_computed // spec.chunk_tokens * spec.chunk_tokens
        elif spec.window:
            window = spec.window - (spec.sink_tokens if spec.kind == "ring" else 0)
            first = max(num_computed + 1 - window, 0)
        return np.concatenate((np.arange(min(spec.sink_tokens, first)), np.arange(first, num_computed)))

    def _kept(self, group: int, start: int, stop: int) -> Positions:
        """List those of the positions start .. stop-1 that are not overwritten by later ones of them."""
        if self.groups[group].kind == "cross":
            return np.arange(0)
        if self.groups[group].kind == "state":
            return np.arange(stop - 1, stop)
        positions = np.arange(start, stop)
        if ring := self._rings[group]:
            return positions[(positions < ring.sink_tokens) | (positions >= stop - ring.num_ring_tokens)]
        return positions

    def _places(
        self, sequence: Sequence, group: int, positions: Positions
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the block, -1 for none, and the slot inside it of positions: `[n]`, of a state `[n, block_size]`."""
        blocks = np.append(sequence.group_blocks(group), np.int32(-1))
        if self.groups[group].kind == "state":
            shape = (len(positions), self.block_size)
            return np.broadcast_to(blocks[:1], shape), np.broadcast_to(np.arange(self.block_size), shape)
        if ring := self._rings[group]:
            positions = ring.positions(positions)
        columns, offsets = np.divmod(positions, self.block_size)
        return blocks[np.minimum(columns, len(blocks) - 1)], offsets

    # -- contents -----------------------------------------------------------------------------------------------------

    def _needed(self, sequence: Sequence, tokens: Iterable[Hashable] | None, encoder: Hashable) -> Prefix:
        """Return the prefixes that end at a sequence's positions, int64 `[num_tokens]`."""
        root = sequence.namespace if encoder is None else (sequence.namespace, encoder)
        return self.prefixes.along(root, sequence.tokens.tolist() if tokens is None else tokens)

    def _encoded(self, sequence: Sequence, encoder: Hashable) -> Prefix:
        """Return what stands for the encoder's tokens of a sequence, int64 `[num_encoder_tokens]`."""
        return self.prefixes.along(("encoder", encoder), range(sequence.num_encoder_tokens))

    def _content(self, group: int, prefixes: Prefix) -> Prefix:
        """Return what a group's slots hold, in the shape of its places."""
        content = np.where(prefixes == NOTHING, NOTHING, prefixes * len(self.groups) + group)
        return content[:, np.newaxis] if self.groups[group].kind == "state" else content

    def _put(self, sequence: Sequence, group: int, positions: Positions, needed: Prefix | None) -> None:
        """Write what is needed at positions, or, with None, nonsense where there are blocks."""
        if not len(positions):
            return
        blocks, offsets = self._places(sequence, group, positions)
        if needed is None:
            blocks, offsets = blocks[blocks >= 0], offsets[blocks >= 0]
        elif len(missing := positions[blocks.reshape(len(positions), -1)[:, 0] < 0]):
            raise WrongContents(f"{sequence!r}: position {missing[0]} has no block in group {group}")
        self._require_sole_owner(sequence, group, set(blocks.ravel().tolist()))
        self.group_slots(group)[blocks, offsets] = (
            NOTHING if needed is None else self._content(group, needed[positions])
        )

    def _require(self, sequence: Sequence, needed: Prefix, encoder: Hashable) -> None:
        """Read all that the token after the needed ones reads."""
        for group, spec in enumerate(self.groups):
            if spec.kind != "cross":
                self._require_at(sequence, group, self._read(group, len(needed)), needed)
            elif sequence.leader is None:
                encoded = self._encoded(sequence, encoder)
                self._require_at(sequence, group, np.arange(len(encoded)), encoded)

    def _require_at(self, sequence: Sequence, group: int, positions: Positions, needed: Prefix) -> None:
        blocks, offsets = self._places(sequence, group, positions)
        content = np.broadcast_to(self._content(group, needed[positions]), blocks.shape)
        found = np.where(blocks < 0, NOTHING, self.group_slots(group)[blocks, offsets])
        wrong = np.flatnonzero(found != content)
        if not len(wrong):
            return
        at = np.unravel_index(wrong[0], blocks.shape)
        place = (
            f"slot {offsets[at]} of block {blocks[at]}"
            if blocks[at] >= 0
            else f"no block for position {positions[at[0]]}"
        )
        raise WrongContents(
            f"{sequence!r}: {place}{self._named(group)} holds {self._described(int(found[at]))}; "
            f"needed is {self._described(int(content[at]))}"
        )

    def _described(self, content: int) -> str:
        prefix, group = divmod(content, len(self.groups))
        return self.prefixes.describe(prefix) + (self._named(group) if prefix else "")

    def _named(self, group: int) -> str:
        return f" of group {group}" if len(self.groups) > 1 else ""

    # -- owners -------------------------------------------------------------------------------------------------------

    def _require_sole_owner(self, sequence: Sequence, group: int, blocks: set[int]) -> None:
        if self._manager is None or not blocks:
            return
        pool = self.pool_of[group]
        if read_only := blocks & committed_blocks(self._manager)[pool]:
            raise WrongContents(f"{sequence!r} writes blocks {read_only}, which are committed and read-only")
        for other in self._manager._state.rows.running():
            if other is sequence or other.leader is sequence:
                continue
            if shared := blocks & self._blocks_of(other)[pool]:
                raise WrongContents(f"{sequence!r} writes blocks {shared}, which {other!r} holds too")

    def _blocks_of(self, sequence: Sequence) -> list[set[int]]:
        """Collect the blocks that a sequence has, by pool."""
        found: list[set[int]] = [set() for _ in self._tiers[DEVICE]]
        for group, pool in enumerate(self.pool_of):
            found[pool].update(sequence.group_blocks(group).tolist())
            found[pool].discard(-1)
        return found

    def _require_exact_copies(self, moves: list[Move]) -> None:
        if self._manager is None:
            return
        to_device = [move for move in moves if move.destination_tier == DEVICE]
        last = {(move.group, move.destination): move for move in to_device if self.groups[move.group].kind != "state"}
        # Single tokens that change places add to what is there, and may come in several calls.
        for move in [*to_device, *one_by_one(self._manager._state.moves)]:
            if move.source_offset or move.destination_offset:
                last.pop((move.group, move.destination), None)
        committed = committed_blocks(self._manager)
        copied = [(group, block, move) for (group, block), move in last.items() if move.source_tier == DEVICE]
        if read_only := [move for group, block, move in copied if block in committed[self.pool_of[group]]]:
            raise WrongContents(f"{read_only} write blocks that are committed and read-only")
        for sequence in self._manager._state.rows.running() if last else ():
            if sequence.leader is None:
                self._require_exact_copies_of(sequence, last)

    def _require_exact_copies_of(self, sequence: Sequence, last: dict[tuple[int, int], Move]) -> None:
        for group, spec in enumerate(self.groups):
            if spec.kind in ("ring", "state", "cross"):
                continue
            for index, block in enumerate(sequence.group_blocks(group).tolist()):
                computed = min(max(sequence.num_computed_tokens - index * self.block_size, 0), self.block_size)
                move = last.get((group, block))
                if move is not None and move.num_tokens != computed:
                    raise WrongContents(f"{move}, but {sequence!r} counts {computed} tokens in it as computed")


def committed_blocks(manager: CacheCore) -> list[set[int]]:
    """Collect, by pool, the blocks that are read-only: cached ones, and those that only their holders can reach."""
    state, pool_of = manager._state, manager.config.pool_of
    extents = list(state.tree.extents())
    holders = [*(sequence._extent for sequence in state.rows.running()), *(hold.extent for hold in state.pins.values())]
    for holder in holders:
        extents += holder.path()
    found: list[set[int]] = [set() for _ in range(max(pool_of) + 1)]
    for extent in extents:
        for group, pool in enumerate(pool_of):
            found[pool].update(extent.blocks[group].tolist())
    for blocks in found:
        blocks.discard(-1)
    return found
