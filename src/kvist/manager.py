"""The public face: decisions of the core and, where a memory is given, the bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic
from typing import Protocol

from numpy.typing import ArrayLike

from kvist.config import CacheConfig
from kvist.core import recurrent
from kvist.core.arguments import as_count, as_counts
from kvist.core.manager import CacheCore
from kvist.core.moves import Move
from kvist.core.sequences import Sequence, Sequences
from kvist.errors import ArgumentError, ArgumentTypeError, TransferError
from kvist.memory.tables import BatchTables, build_tables

__all__ = ["KVCacheManager", "Memory"]


class Memory(Protocol):
    """Holds the bytes of the blocks: given to a manager, it makes the moves of each call before the call returns."""

    def perform(self, moves: list[Move]) -> None:
        """Make the copies in the order given, before anything that is written or read after this call.

        What it raises reaches the caller as a TransferError. A sequence that was being admitted or forked is ended
        again; after any other call the moves are kept, and made with those of the next call that needs some.
        """


class KVCacheManager(CacheCore):
    """Manages the KV cache of one model: which blocks hold which tokens, and what is reused.

    Without `memory` it only decides: `take_moves` then returns the copies to be made before each forward pass. With
    it, they are made before the call that needs them returns. `clock` gives seconds, for the durations of retention.

    >>> from kvist import AttentionSpec, CacheConfig
    >>> manager = KVCacheManager(CacheConfig([AttentionSpec(2, 64)], block_size=4, num_blocks=8))
    >>> first = manager.add_sequence([1, 2, 3, 4, 5, 6])
    >>> manager.commit([first])
    >>> manager.free(first)
    >>> manager.add_sequence([1, 2, 3, 4, 5, 9]).num_cached_tokens
    5
    """

    def __init__(
        self, config: CacheConfig, memory: Memory | None = None, *, clock: Callable[[], float] = monotonic
    ) -> None:
        super().__init__(config, clock)
        if memory is not None and not callable(getattr(memory, "perform", None)):
            raise ArgumentTypeError(f"memory is a {type(memory).__name__}, must have perform(moves)")
        self.memory = memory

    def _perform_moves(self, new: Iterable[Sequence] = ()) -> None:
        if not self._state.moves or self.memory is None:
            return
        try:
            self.memory.perform(self._state.moves)
        except Exception as error:
            num_copies = len(self._state.moves)
            recurrent.abandon_copies(self._state)
            self._end(beam for sequence in new for beam in sequence.beams)
            raise TransferError(f"the memory could not make {num_copies} copies: {error!r}") from error
        self._state.moves = []

    def _end(self, sequences: Iterable[Sequence]) -> None:
        """End sequences whose blocks could not be filled, and forget the moves into these blocks."""
        state = self._state
        for sequence in sequences:
            own = state.own_blocks(sequence)
            state.moves = [move for move in state.moves if move.destination not in own[move.group]]
            self.free(sequence, publish=False)

    def tables(
        self,
        sequences: Sequences,
        num_query_tokens: ArrayLike | None = None,
        *,
        group: int = 0,
        padding: int = 0,
        holes: int | None = None,
        max_blocks: int | None = None,
        out: BatchTables | None = None,
    ) -> BatchTables:
        """Return the index arrays of one forward pass over these sequences, for the layers of one group.

        The query tokens of a sequence are the `num_query_tokens` (an int, or one for each; default: all) after its
        computed ones; they may reach into reserved capacity. `block_table` has `max_blocks` columns (default: as many
        as the longest sequence has blocks), entries past a sequence's blocks are `padding`, those that have fallen out
        of span `holes` (default: `padding`). Where rows are neighbours and both are 0 it is a read-only view that shows
        later changes, else a fresh array. `out` takes buffers (`BatchTables.buffers`) and returns their leading parts.
        """
        batch = self._state.rows.batch(sequences, "tables").rows
        query = None if num_query_tokens is None else as_counts(num_query_tokens, len(batch), "num_query_tokens")
        if not isinstance(out, BatchTables | None):
            raise ArgumentTypeError(f"tables: out is a {type(out).__name__}, must be BatchTables.buffers(...)")
        for name, entry in (("padding", padding), ("holes", holes)):
            if (entry is not None or name == "padding") and (type(entry) is not int or not -(2**31) <= entry < 2**31):
                raise ArgumentError(f"tables: {name} is {entry!r}, must be an int32")
        if as_count(group, "group") >= len(self._state.spans):
            raise ArgumentError(f"tables: group is {group}, there are {len(self._state.spans)}")
        if max_blocks is not None:
            needed = int(self._state.rows.ends[group, batch].max(initial=0))
            if as_count(max_blocks, "max_blocks") < needed:
                raise ArgumentError(f"tables: max_blocks is {max_blocks}, a sequence has {needed} blocks")
        return build_tables(
            self._state.rows,
            batch,
            query,
            group=group,
            padding=padding,
            holes=holes,
            max_blocks=max_blocks,
            out=out,
        )
