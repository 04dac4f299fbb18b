"""The state machine: admits, grows, commits and ends sequences, and says which copies that needs.

Every call first finds out whether it can be done, and only then changes anything. Nothing here knows bytes, devices or
time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvist.config import CacheConfig
from kvist.core import admission, branches, explanation, invariants, publishing, rewinding
from kvist.core.arguments import as_count, as_counts, check_namespace, is_one_token_each
from kvist.core.digest import state_digest
from kvist.core.eviction import policy_named
from kvist.core.explanation import Explanation
from kvist.core.extents import Extent, Match, Namespace, PrefixTree
from kvist.core.forecast import Forecast
from kvist.core.matching import Pin, PrefixMatch
from kvist.core.moves import Move
from kvist.core.pool import BlockPool
from kvist.core.retention import Retention
from kvist.core.sequences import Batch, Sequence, SequenceRows, Sequences
from kvist.core.statistics import Counters, Stats
from kvist.core.tokens import TOKEN_BYTES, Tokens, as_token_array, as_token_buffer, as_token_bytes
from kvist.errors import ArgumentError, ArgumentTypeError, NeverFits, OutOfBlocks, OutOfRows, SequenceError, StaleMatch

__all__ = ["CacheCore"]


class CacheCore:
    """Decides which blocks hold which tokens; one full-attention group, the device tier.

    Costs: a request costs what its extents cost, a decode step a few array operations, whatever the number of blocks.
    """

    def __init__(self, config: CacheConfig, clock: Callable[[], float]) -> None:
        if not isinstance(config, CacheConfig):
            raise ArgumentTypeError(f"config is a {type(config).__name__}, must be a CacheConfig")
        config.validate()
        self.config = config
        self.block_size = config.block_size
        self.clock = clock
        self._start()

    def _start(self) -> None:
        config = self.config
        self.pool = BlockPool(config.resolved_num_blocks)
        policy, partial = policy_named(config.policy), config.reuse and config.partial_reuse
        self.tree = PrefixTree([self.pool], config.block_size, policy, self.clock, partial=partial)
        self.rows = SequenceRows(config.max_sequences, config.max_sequence_length, config.block_size, num_groups=1)
        self.counters = Counters()
        self.pins: dict[Pin, Extent] = {}
        self._moves: list[Move] = []
        self._due_rows: set[int] = set()
        self._any_row_due = False

    # -- admission ----------------------------------------------------------------------------------------------------

    def add_sequence(
        self,
        tokens: Tokens,
        *,
        namespace: Namespace = (),
        retention: Retention | None = None,
        reuse: bool = True,
        publish: bool = True,
        num_beams: int = 1,
    ) -> Sequence:
        """Admit a prompt: find its longest reusable prefix and allocate every block it needs.

        `tokens`: 1-D int array, `array`, buffer or list of ids 0 .. 2**31-1, at least one. The first
        `num_cached_tokens` of the sequence returned, at most all but the last, are computed already. `namespace`
        separates content that must not be shared; `retention` says what of it should stay longest; `reuse=False` does
        not look for content, `publish=False` leaves none to others. With `num_beams`, `beams` lists that many
        sequences: they share the prompt's full blocks, only the first is to be computed, and the others may be used
        once it has committed the whole prompt.

        Raises NeverFits for a prompt longer than `max_sequence_length` or the whole pool, OutOfBlocks or OutOfRows if
        there is no room now, ArgumentError for tokens or a namespace that cannot be.
        """
        prompt = as_token_buffer(tokens)
        num_tokens = len(prompt) // TOKEN_BYTES
        admission.check_prompt(self, num_tokens, namespace, num_beams, free_rows=self.rows.num_free)
        if not isinstance(retention, Retention | None):
            raise ArgumentTypeError(f"retention is a {type(retention).__name__}, must be a Retention or None")
        match = admission.match_prompt(self, prompt, namespace) if reuse else None
        publishes = publish and self.config.reuse
        return admission.admit(
            self, prompt, namespace, match, publishes=publishes, retention=retention, num_beams=num_beams
        )

    # -- growth -------------------------------------------------------------------------------------------------------

    def append(self, sequences: Sequences, tokens: Any) -> None:
        """Add tokens, and the blocks they need: one token each as a 1-D int array, or a list of arrays.

        `sequences` is a list of Sequence or a 1-D int array of rows. Raises OutOfBlocks (nothing is added to any),
        NeverFits beyond `max_sequence_length`, SequenceError for rows that are not running or are named twice.
        """
        batch = self.rows.batch(sequences, "append")
        if is_one_token_each(tokens):
            ids = as_token_array(tokens)
            if len(ids) != len(batch.rows):
                raise ArgumentError(f"append: {len(batch.rows)} sequences, but {len(ids)} tokens")
            self._append_one_each(batch, ids)
            return
        packed = [as_token_bytes(each, f"tokens[{index}]") for index, each in enumerate(tokens)]
        if len(packed) != len(batch.rows):
            raise ArgumentError(f"append: {len(batch.rows)} sequences, but {len(packed)} arrays of tokens")
        self._grow(batch, np.fromiter(map(len, packed), np.int64, len(packed)) // TOKEN_BYTES, "append")
        for row, added in zip(batch.rows.tolist(), packed, strict=True):
            self.rows.extend_earlier(self.rows.sequences[row], added)
        self.rows.refresh_limits(batch.rows)

    def _append_one_each(self, batch: Batch, ids: NDArray[np.int32]) -> None:
        rows, select = self.rows, batch.select
        num_tokens = rows.num_tokens[select]
        longer = num_tokens + 1
        if np.logical_or.reduce(longer > rows.limit[select]):
            crossing = Batch(batch.rows[longer > rows.limit[select]])
            self._grow(crossing, 1, "append")
            self._make_room_in_tails(crossing)
        rows.tail[rows.tail_origin[select] + num_tokens] = ids
        rows.num_tokens[select] = longer

    def _make_room_in_tails(self, batch: Batch) -> None:
        """Empty the tails that are full: once in `tail_tokens` steps of a row."""
        rows = self.rows
        used = rows.tail_origin[batch.rows] + rows.num_tokens[batch.rows] - batch.rows * rows.tail_tokens
        full = batch.rows[used >= rows.tail_tokens]
        for row in full.tolist():
            rows.empty_tail(rows.sequences[row])
        rows.refresh_limits(full)

    def reserve(self, sequences: Sequences, n: ArrayLike) -> None:
        """Give sequences capacity for n more tokens than they have (an int, or one for each), for drafts and
        multi-step decode.
        """
        batch = self.rows.batch(sequences, "reserve")
        self._grow(batch, as_counts(n, len(batch.rows), "n"), "reserve")

    def _grow(self, batch: Batch, num_added: int | NDArray[np.int64], call: str) -> None:
        """Give each row the blocks that `num_added` more tokens need; all rows or none."""
        rows = self.rows
        if not len(batch.rows):
            return
        wanted = rows.num_tokens[batch.select] + num_added
        if (wanted > rows.max_tokens).any():
            at = int(np.flatnonzero(wanted > rows.max_tokens)[0])
            raise NeverFits(
                f"{call}: row {batch.rows[at]} would have {wanted[at]} tokens, max_sequence_length is {rows.max_tokens}"
            )
        have = rows.num_blocks[batch.select].copy()
        extra = np.maximum((wanted + self.block_size - 1) // self.block_size - have, 0)
        total = int(extra.sum())
        if not total:
            return
        self.require_blocks(total)
        self._evict_for(total)
        at_rows = np.repeat(batch.rows, extra)
        firsts = np.cumsum(extra) - extra
        columns = np.repeat(have - firsts, extra) + np.arange(total)
        rows.block_table[0, at_rows, columns] = self.pool.take(total)
        rows.num_blocks[batch.select] = have + extra
        rows.refresh_limits(batch.rows)
        self.counters.num_allocated_blocks += total

    def commit(self, sequences: Sequences, num_computed_tokens: ArrayLike | None = None) -> None:
        """Say that K and V are written up to `num_computed_tokens` (one for all or one each; default: all tokens).

        Full blocks up to there become reusable. Raises SequenceError where the count is less than before or more than
        the tokens.
        """
        rows = self.rows
        if num_computed_tokens is None and type(sequences) is list and len(sequences) == 1:
            self._commit_one(sequences[0])
            return
        batch = rows.batch(sequences, "commit")
        select = batch.select
        if num_computed_tokens is None:
            rows.num_computed[select] = rows.num_tokens[select]
        else:
            counts = np.broadcast_to(
                as_counts(num_computed_tokens, len(batch.rows), "num_computed_tokens"), len(batch.rows)
            )
            self._check_commit(batch, counts)
            rows.num_computed[select] = counts
        self._any_row_due = True
        if rows.num_waiting:
            for row in batch.rows.tolist():
                branches.start_beams(self, rows.sequences[row])

    def _commit_one(self, sequence: Sequence) -> None:
        """Commit all tokens of one sequence without the array operations, which cost more than they save for a single
        row.
        """
        rows = self.rows
        rows.check_running(sequence, "commit")
        row = sequence.row
        rows.num_computed[row] = computed = rows.num_tokens.item(row)
        if computed >= rows.publish_due.item(row):
            self._due_rows.add(row)
        if rows.num_waiting:
            branches.start_beams(self, sequence)

    def _check_commit(self, batch: Batch, counts: NDArray[np.int64]) -> None:
        rows = self.rows
        wrong = (counts < rows.num_computed[batch.rows]) | (counts > rows.num_tokens[batch.rows])
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            row = batch.rows[at]
            raise SequenceError(
                f"commit: row {row} cannot have {counts[at]} computed tokens: it has {rows.num_tokens[row]} tokens, "
                f"and {rows.num_computed[row]} of them are computed (rewind takes tokens back)"
            )

    # -- taking back and ending ---------------------------------------------------------------------------------------

    def rewind(self, sequence: Sequence, num_tokens: int) -> None:
        """Take the last `num_tokens` tokens back, and give back the blocks that are not needed any more.

        Published blocks stay readable by others and are never written again: where the sequence must go on inside one,
        it gets a copy (a Move). Raises SequenceError if it has fewer tokens, OutOfBlocks if there is no block for the
        copy.
        """
        self.rows.check_running(sequence, "rewind")
        branches.refuse_waiting(sequence, "rewind")
        row = sequence.row
        n = as_count(num_tokens, "num_tokens")
        left = self.rows.num_tokens.item(row) - n
        if left < 0:
            raise SequenceError(f"rewind: row {row} has {self.rows.num_tokens[row]} tokens, {n} cannot be taken back")
        if not self.pool.num_free:
            self.publish_committed()
        if left // self.block_size < self.rows.num_published[row]:
            rewinding.rewind_published(self, sequence, left)
        else:
            rewinding.rewind_own(self, sequence, left)
        self.rows.num_computed[row] = min(self.rows.num_computed.item(row), left)
        self.rows.refresh_limit(row)

    def free(self, sequence: Sequence, *, publish: bool = True) -> None:
        """End a sequence: what is computed stays reusable until evicted (what is not published yet only if
        `publish`).
        """
        self.rows.check_live(sequence, "free")
        if sequence._beams is not None:
            branches.leave_beams(self, sequence)
        row = sequence.row
        if publish and sequence.publishes:
            publishing.publish_last(self, sequence)
        self.give_row(row, self.rows.num_published.item(row))
        self.rows.close(sequence)
        self.tree.release(sequence._extent)

    def publish_committed(self) -> None:
        """Put every full committed block into the tree; done before anything looks there, so that a decode step need
        not.
        """
        if self._any_row_due:
            due = np.flatnonzero(self.rows.num_computed >= self.rows.publish_due).tolist()
        elif self._due_rows:
            due = [row for row in sorted(self._due_rows) if self.rows.num_computed[row] >= self.rows.publish_due[row]]
        else:
            return
        self._any_row_due = False
        self._due_rows.clear()
        publishing.publish_rows(self, due)

    # -- prefixes without sequences -----------------------------------------------------------------------------------

    def match_prefix(self, tokens: Tokens, *, namespace: Namespace = ()) -> PrefixMatch:
        """Look how much of a prompt could be reused now, all tokens but the last; changes nothing."""
        prompt = as_token_buffer(tokens)
        if not prompt:
            raise ArgumentError("tokens is empty; a prompt has at least one token")
        check_namespace(namespace)
        match = admission.match_prompt(self, prompt, namespace)
        if match is None:
            return PrefixMatch(b"", namespace, len(prompt) // TOKEN_BYTES, 0)
        return PrefixMatch(
            bytes(prompt[: match.position]), namespace, len(prompt) // TOKEN_BYTES, match.num_partial_tokens
        )

    def pin(self, match: PrefixMatch) -> Pin:
        """Hold the whole blocks of a match without a sequence, until `release`; works as a context manager, too.

        Raises StaleMatch if they have been evicted since.
        """
        if not isinstance(match, PrefixMatch):
            raise ArgumentTypeError(f"pin: expected a PrefixMatch, got {type(match).__name__}")
        self.publish_committed()
        root = self.tree.roots.get(match.namespace)
        found = self.tree.find(root, match.tokens, len(match.tokens), partial=False) if root else None
        left = found.position // TOKEN_BYTES if found else 0
        if left < match.num_block_tokens:
            raise StaleMatch(
                f"pin: the match had {match.num_block_tokens} tokens in whole blocks, {left} are left; match again"
            )
        extent = admission.extent_of(self, found) if found else self.tree.root(match.namespace)
        self.tree.hold(extent)
        pin = Pin(self._release_pin, match.namespace, match.num_block_tokens)
        self.pins[pin] = extent
        return pin

    def _release_pin(self, pin: Pin) -> None:
        if pin not in self.pins:
            raise SequenceError("the pin has been released")
        self.tree.release(self.pins.pop(pin))

    def evict(self, num_blocks: int) -> int:
        """Evict up to that many cached blocks in the policy's order; returns how many were there to evict."""
        wanted = as_count(num_blocks, "num_blocks")
        self.publish_committed()
        evicted = min(wanted, self.tree.num_evictable)
        self.tree.evict(evicted)
        return evicted

    def drop(self, *, namespace: Namespace) -> int:
        """Forget all content of a namespace; returns how many blocks became free at once.

        Running sequences and pins keep what they hold until they end; from now on nobody can hit it, and such
        sequences publish no more.
        """
        check_namespace(namespace)
        self.publish_committed()
        for sequence in self.rows.running():
            if sequence.namespace == namespace:
                sequence.publishes = False
                self.rows.publish_due[sequence.row] = np.iinfo(np.int64).max
        return self.tree.drop(namespace)

    def reset(self) -> None:
        """Forget everything cached, and the statistics. Raises SequenceError while sequences run or pins hold; says
        which.
        """
        running = self.rows.running()
        if running or self.pins:
            names = ", ".join(f"row {sequence.row} ({sequence.num_tokens} tokens)" for sequence in running[:8])
            names += ", ..." if len(running) > 8 else ""
            raise SequenceError(f"reset: {len(running)} sequences run ({names}) and {len(self.pins)} pins hold")
        self.tree.clear()
        self._start()

    # -- forecasts ----------------------------------------------------------------------------------------------------

    def forecast(self) -> Forecast:
        """Return a what-if on a copy of the counts, for a scheduler that asks before it acts."""
        return Forecast(self)

    def blocks_needed_next_step(self, sequence: Sequence, lookahead: int = 1, *, num_draft_tokens: int = 0) -> int:
        """Count the blocks that the sequence must be given for its next `lookahead` steps.

        Each step adds a token and `num_draft_tokens` drafts; nothing is needed beyond `max_sequence_length`.
        """
        self.rows.check_running(sequence, "blocks_needed_next_step")
        num_added = as_count(lookahead, "lookahead") * (1 + as_count(num_draft_tokens, "num_draft_tokens"))
        return self._num_missing_blocks(sequence, sequence.num_tokens + num_added)

    def blocks_needed_to_completion(self, sequence: Sequence, max_new_tokens: int) -> int:
        """Count the blocks that the sequence must be given until it has its prompt and `max_new_tokens` more."""
        self.rows.check_running(sequence, "blocks_needed_to_completion")
        total = sequence.num_prompt_tokens + as_count(max_new_tokens, "max_new_tokens")
        return self._num_missing_blocks(sequence, total)

    def _num_missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        return max(-(-min(num_tokens, self.rows.max_tokens) // self.block_size) - sequence.num_blocks, 0)

    # -- branches -----------------------------------------------------------------------------------------------------

    def fork(self, sequence: Sequence, n: int = 1) -> list[Sequence]:
        """Return n copies of a sequence: they share its full committed blocks, and copy the block being written (a
        Move each).

        Raises SequenceError if more than one block with tokens is not committed, OutOfBlocks or OutOfRows without room.
        """
        return branches.fork(self, sequence, as_count(n, "n"))

    def reorder(self, beams: list[Sequence], parents: ArrayLike) -> None:
        """Let `beams[i]` go on from what `beams[parents[i]]` is now; copies only blocks being written that several go
        on from.
        """
        branches.reorder(self, beams, parents)

    # -- numbers ------------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that an allocation could take now: never used, given back, or cached and unreferenced."""
        self.publish_committed()
        return self.pool.num_free + self.tree.num_evictable

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """Tokens by row, a read-only view `[max_sequences]`; 0 where no sequence runs."""
        return _read_only(self.rows.num_tokens)

    @property
    def num_computed_tokens(self) -> NDArray[np.int64]:
        """Computed tokens by row, a read-only view `[max_sequences]`."""
        return _read_only(self.rows.num_computed)

    @property
    def row_version(self) -> NDArray[np.int64]:
        """Versions by row, a read-only view `[max_sequences]`: see `Sequence.version`."""
        return _read_only(self.rows.version)

    def stats(self) -> Stats:
        """Return the numbers of now and the counts since the start or the last `reset`."""
        self.publish_committed()
        return self.counters.stats(self)

    def explain(self, subject: Sequence | Tokens, *, namespace: Namespace = ()) -> Explanation:
        """Say who holds what of a sequence, or how far a prompt is cached and why not further."""
        if isinstance(subject, Sequence):
            self.rows.check_live(subject, "explain")
            return explanation.of_sequence(self, subject)
        return explanation.of_prompt(self, as_token_bytes(subject), self.match_prefix(subject, namespace=namespace))

    def check(self) -> None:
        """Prove the books: every block has one owner, every reference a holder, ...; raises InvariantError naming the
        holders.
        """
        invariants.check(self)

    def digest(self) -> str:
        """Return SHA-256 in hex over what is cached, where, and who runs: equal in managers that were given the same
        calls.
        """
        self.publish_committed()
        return state_digest(self)

    def take_moves(self) -> list[Move]:
        """Return the copies still to be made, in order, once: before the next forward pass reads or writes."""
        moves, self._moves = self._moves, []
        return moves

    # -- blocks -------------------------------------------------------------------------------------------------------

    def order_move(self, source: int, destination: int, num_tokens: int) -> None:
        """Order a copy, unless the block already is where it should be."""
        if source != destination:
            self._moves.append(Move(source, destination, num_tokens))

    def require_rows(self, n: int, free_rows: int) -> None:
        """Raise unless n rows are free."""
        if n <= free_rows:
            return
        total = len(self.rows.sequences)
        if n > total:
            raise NeverFits(f"{n} sequences asked for, max_sequences is {total}")
        raise OutOfRows(
            f"{n} rows needed, but {free_rows} of max_sequences={total} are free",
            needed=n,
            free=free_rows,
            evictable=0,
            held=total - free_rows,
        )

    def require_blocks(self, needed: int, match: Match | None = None) -> None:
        """Raise OutOfBlocks unless that many blocks could be had without what the match would hold."""
        if needed <= self.pool.num_free:
            return
        self.publish_committed()
        free, evictable = self.pool.num_free, self.tree.num_evictable
        held = self.pool.num_blocks - free - evictable
        if match is not None:
            evictable -= self.tree.num_evictable_on(match.extent)
            if match.child is not None and not match.child.references:
                evictable -= match.child_blocks
        if needed <= free + evictable:
            return
        holders = f"{len(self.rows.running())} sequences and {len(self.pins)} pins"
        raise OutOfBlocks(
            f"{needed} blocks needed, but only {free + evictable} are free or evictable ({held} held by {holders})",
            needed=needed,
            free=free,
            evictable=evictable,
            held=held,
        )

    def _evict_for(self, needed: int) -> None:
        if needed > self.pool.num_free:
            self.tree.evict(needed - self.pool.num_free)

    def fill(self, row: int, start: int, end: int) -> None:
        """Give the row new blocks at positions start .. end-1; there must be as many."""
        self._evict_for(end - start)
        self.rows.block_table[0, row, start:end] = self.pool.take(end - start)
        self.rows.num_blocks[row] = end

    def give_row(self, row: int, keep: int) -> None:
        """Give back the row's blocks from position `keep` on; they must be its own."""
        have = self.rows.num_blocks.item(row)
        if have > keep:
            own = self.rows.block_table[:, row, keep:have]
            self.pool.give(own[0])
            own[:] = 0
            self.rows.num_blocks[row] = keep


def _read_only(array: NDArray[np.int64]) -> NDArray[np.int64]:
    view = array.view()
    view.flags.writeable = False
    return view
