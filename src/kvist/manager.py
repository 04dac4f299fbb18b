"""The public face: decisions of the core and, where a memory is given, the bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from secrets import randbits
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self

from numpy.typing import ArrayLike

from kvist.config import CacheConfig
from kvist.core import failures, recurrent, restoring
from kvist.core.arguments import as_count, as_counts
from kvist.core.contents import Snapshot, contents_of, snapshot_of
from kvist.core.events import Event
from kvist.core.extents import Extent, Match, Namespace
from kvist.core.keeping import KeptBlocks, Order, part_lost, repeatable_runs, written_by
from kvist.core.manager import CacheCore
from kvist.core.matching import Awaited
from kvist.core.moves import Move, one_by_one
from kvist.core.sequences import Sequence, Sequences
from kvist.errors import ArgumentError, ArgumentTypeError, SequenceError, TransferError
from kvist.event_log import EventLog
from kvist.memory.tables import BatchTables, build_tables

if TYPE_CHECKING:
    from kvist.storing import StoreLink
    from kvist.tiers.protocol import StoreStats

__all__ = ["KVCacheManager", "Memory"]


EPOCH_BITS = 62


class Memory(Protocol):
    """Holds the bytes of the blocks: given to a manager, it makes the moves of each call before the call returns."""

    def perform(self, moves: list[Move]) -> None:
        """Make the copies in the order given, before anything that is written or read after this call.

        What it raises reaches the caller as a TransferError. A sequence that was being admitted or forked is ended
        again; after any other call the moves are kept, and made with those of the next call that needs some. Moves that
        write what others have read come in a call of their own, so that all of a call may be made again.

        A TransferError with `moves` says that these were not made, of this call or an earlier one, nor those that would
        have read what they were to write, and that all others were; what else is in their blocks is as it was. Those
        within a tier are made again if they are of this call. Others are not: what they were to bring is forgotten, and
        running sequences that have it are suspended. Then `forget(moves)`, if there is such a method, is told that
        their destinations are free.
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
        super().__init__(config, clock, randbits(EPOCH_BITS))
        if memory is not None and not callable(getattr(memory, "perform", None)):
            raise ArgumentTypeError(f"memory is a {type(memory).__name__}, must have perform(moves)")
        self.memory = memory
        self._link = _open_stores(config, memory) if config.stores else None
        self.events = EventLog(config.event_buffer, self)
        if self._state.recorder is not None:
            self._state.recorder.overflow = self.events.publish

    # -- events -------------------------------------------------------------------------------------------------------

    def _take_events(self) -> list[Event]:
        if self._state.recorder is None:
            return []
        self._state.settle()
        return self._state.recorder.take()

    def _snapshot(self) -> Snapshot:
        if self._state.recorder is None:
            raise SequenceError("events: there are none, since event_buffer of the CacheConfig is 0")
        return snapshot_of(self._state)

    def _content_digest(self) -> str:
        return contents_of(self._state).digest()

    # -- bytes --------------------------------------------------------------------------------------------------------

    def _perform_moves(self, new: Iterable[Sequence] = ()) -> None:
        state = self._state
        if not state.moves or self.memory is None:
            return
        runs = [state.moves] if len(state.moves) == 1 else repeatable_runs(state.moves)
        num_made, unmade, cause = 0, list[Move](), None
        try:
            while num_made < len(runs) and not unmade:
                unmade = self._carry_out(runs[num_made])
                num_made += 1
        except Exception as error:
            cause = error
        state.moves = [order for run in runs[num_made:] for order in run]
        if cause is not None:
            self._give_up([], [], new, cause)
        if unmade:  # what comes later may write what they are to read, and read what they were to bring
            self._give_up(unmade, runs[num_made - 1], new, None)

    def _carry_out(self, orders: list[Order]) -> list[Move]:
        """Make the copies, and hand blocks to stores in their place among them; returns those said not to be made."""
        if self._link is None:
            return self._copy(orders)
        unmade: list[Move] = []
        for is_kept, each in groupby(orders, lambda order: isinstance(order, KeptBlocks)):
            if not is_kept:
                unmade += self._copy(list(each))
                continue
            for order in part_lost(each, written_by(unmade))[0]:
                assert isinstance(order, KeptBlocks)
                self._link.keep(order)
        return unmade

    def _copy(self, orders: list[Order]) -> list[Move]:
        """Make copies; returns those that the memory says it has not made, and raises if it does not say which."""
        assert self.memory is not None
        try:
            self.memory.perform(self._as_taken(orders))
        except TransferError as error:
            unmade = getattr(error, "moves", None)
            if not unmade:
                raise
            return list(unmade)
        return []

    def _give_up(
        self, unmade: list[Move], run: list[Order], new: Iterable[Sequence], cause: Exception | None
    ) -> NoReturn:
        """End new sequences whose copies were not made, forget what is lost, and raise the TransferError."""
        state = self._state
        again, lost = failures.sort_unmade(unmade, run)
        left, fed = part_lost(state.moves, written_by(lost))
        state.moves, lost = [*again, *left], lost + fed
        waiting = one_by_one(state.moves)
        num_copies = len(unmade) + len(fed) + len(one_by_one(left))
        recurrent.abandon_copies(state)
        self._end(beam for sequence in new for beam in sequence.beams)
        suspended = failures.forget_unmade(state, lost) if lost else []
        self._forget([*unmade, *fed, *waiting])
        if cause is None and not again:
            suspended += self._suspended_by_rest()
        why = repr(cause) if cause is not None else f"{unmade[0]} and {len(unmade) - 1} more were not made"
        rows = f"; suspended, since they had what is lost: {suspended}" if suspended else ""
        error = TransferError(f"the memory could not make {num_copies} copies: {why}{rows}")
        error.sequences = tuple(suspended)
        raise error from cause

    def _forget(self, moves: list[Move]) -> None:
        """Tell the memory which of these moves wait no more, and will not be made."""
        forget, waiting = getattr(self.memory, "forget", None), set(one_by_one(self._state.moves))
        gone = [move for move in moves if move not in waiting]
        if forget is not None and gone:
            forget(gone)

    def _suspended_by_rest(self) -> list[Sequence]:
        """Make what comes after copies that are forgotten; returns the sequences that are suspended if that fails."""
        try:
            self._perform_moves()
        except TransferError as error:
            return list(error.sequences)
        return []

    def _as_taken(self, orders: list[Order]) -> list[Any]:
        """Return moves as the memory takes them: whole blocks one by one, unless it says that it takes many at once."""
        return orders if getattr(self.memory, "takes_block_moves", False) else one_by_one(orders)

    def _end(self, sequences: Iterable[Sequence]) -> None:
        """End sequences whose blocks could not be filled, and forget the moves into these blocks."""
        state = self._state
        for sequence in sequences:
            state.moves = failures.without_fills(state.moves, state.own_blocks(sequence))
            self._close(sequence)

    # -- stores -------------------------------------------------------------------------------------------------------

    def _restore(
        self, prompt: bytes | memoryview, namespace: Namespace, limit: int, match: Match | None, num_beams: int
    ) -> Extent | None:
        if self._link is None:
            return None
        came = self._link.bring_up(self._state, prompt, namespace, limit, match, num_beams)
        if came is None:
            return None
        installed, fillings = came
        try:
            self._perform_moves()  # what was evicted for it is still in its blocks
            self._link.fill(fillings)
        except TransferError:
            restoring.discard(self._state, installed)
            raise
        except Exception:
            restoring.discard(self._state, installed)
            return None
        return installed.extent

    def _offer_again(self, extent: Extent) -> None:
        if self._link is not None and not self._state.moves:  # else its blocks are not filled yet
            self._link.offer_again(self._state, extent)

    def _in_stores(
        self, prompt: bytes | memoryview, namespace: Namespace, match: Match | None, first: int
    ) -> tuple[tuple[str, int], ...]:
        if self._link is None:
            return ()
        return self._link.told(self._state, prompt, namespace, match, first)

    def _fetch_ahead(
        self, prompt: bytes | memoryview, namespace: Namespace, limit: int, match: Match | None
    ) -> tuple[int, Awaited | None]:
        if self._link is None:
            return 0, None
        return self._link.fetch_ahead(self._state, prompt, namespace, limit, match)

    def drop(self, *, namespace: Namespace) -> int:
        """Forget all content of a namespace, in all tiers; returns how many device blocks became free at once.

        Running sequences and pins keep what they hold until they end; from now on nobody can hit it, and such
        sequences publish no more.
        """
        state, num_freed = self._state, super().drop(namespace=namespace)
        if self._link is not None and state.keeper is not None:
            tag = state.keeper.chain.tag(namespace)  # what is still to be kept of it is not kept at all
            state.moves = [order for order in state.moves if not (isinstance(order, KeptBlocks) and order.is_of(tag))]
            self._link.stack.drop(tag)
            self._perform_moves()
        return num_freed

    def reset(self) -> None:
        """Forget everything cached, and the statistics.

        Raises SequenceError while sequences run or pins hold, and says which.
        """
        waiting = one_by_one(self._state.moves)
        super().reset()
        self._forget(waiting)

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """How fast the engine computes prompts: what stores would take longer to load is computed; None: load all."""
        return None if self._link is None else self._link.prefill_tokens_per_s

    @prefill_tokens_per_s.setter
    def prefill_tokens_per_s(self, rate: float | None) -> None:
        if rate is not None and not rate > 0:
            raise ArgumentError(f"prefill_tokens_per_s is {rate}, must be above 0")
        if self._link is not None:
            self._link.prefill_tokens_per_s = rate

    @property
    def asks_stores(self) -> bool:
        """Whether an admission asks the stores; if not, it takes what was prefetched and has come, and waits for none.

        True unless set; without stores it says nothing.
        """
        return self._link is None or self._link.asks

    @asks_stores.setter
    def asks_stores(self, asks: bool) -> None:
        if self._link is not None:
            self._link.asks = bool(asks)

    def store_stats(self) -> dict[str, StoreStats]:
        """Return the numbers of each store, by name: "disk", or the scheme of its URL."""
        return {} if self._link is None else self._link.stack.stats()

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Hand all that is committed to the stores and wait until it is written, at most so long; returns whether."""
        self._state.settle()
        self._perform_moves()
        return self._link is None or self._link.stack.flush(timeout_s)

    def close(self) -> None:
        """Publish the last events, write what stores still wait for, and close them.

        A manager without an event log and stores need not be closed.
        """
        self.events.close()
        if self._link is not None:
            try:
                self.flush(0.0)
            finally:
                self._link.stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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


def _open_stores(config: CacheConfig, memory: Memory | None) -> StoreLink | None:
    from kvist.storing import link_of

    return link_of(config, memory)
