"""The state machine: admits, grows, commits and ends sequences, and says which copies that needs.

Every call first finds out whether it can be done, and only then changes anything. Nothing here knows bytes, devices or
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvist.config import CacheConfig
from kvist.core import admission, branches, explanation, growth, invariants, rewinding
from kvist.core.arguments import as_count, as_counts, check_namespace, check_num_beams, is_one_token_each
from kvist.core.digest import state_digest
from kvist.core.explanation import Explanation
from kvist.core.extents import Namespace
from kvist.core.forecast import Forecast
from kvist.core.matching import Pin, PrefixMatch
from kvist.core.moves import Move
from kvist.core.retention import Retention
from kvist.core.sequences import NEVER, Sequence, Sequences
from kvist.core.state import CacheState
from kvist.core.statistics import Stats
from kvist.core.tokens import TOKEN_BYTES, Tokens, as_token_array, as_token_buffer, as_token_bytes
from kvist.errors import ArgumentError, ArgumentTypeError, SequenceError, StaleMatch

__all__ = ["CacheCore"]


class CacheCore:
    """Decides which blocks hold which tokens; one full-attention group, the device tier.

    Costs: a request costs what its extents cost, a decode step a few array operations, whatever the number of blocks.
    """

    def __init__(self, config: CacheConfig, clock: Callable[[], float]) -> None:
        if not isinstance(config, CacheConfig):
            raise ArgumentTypeError(f"config is a {type(config).__name__}, must be a CacheConfig")
        config.validate()
        if not callable(clock):
            raise ArgumentTypeError(f"clock is a {type(clock).__name__}, must be callable and return seconds")
        self.config = config
        self.clock = clock
        self._state = CacheState(config, clock)

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
        state = self._state
        check_namespace(namespace)
        check_num_beams(num_beams)
        admission.check_prompt(state, num_tokens, num_beams, state.rows.num_free)
        if retention is not None and not isinstance(retention, Retention):
            raise ArgumentTypeError(f"retention is a {type(retention).__name__}, must be a Retention or None")
        match = admission.match_prompt(state, prompt, namespace) if reuse else None
        publishes = bool(publish) and self.config.reuse
        sequence = admission.admit(
            state, prompt, namespace, match, publishes=publishes, retention=retention, num_beams=num_beams
        )
        self._perform_moves([sequence])
        return sequence

    # -- growth -------------------------------------------------------------------------------------------------------

    def append(self, sequences: Sequences, tokens: Any) -> None:
        """Add tokens, and the blocks they need: one token each as a 1-D int array, or a list of arrays.

        `sequences` is a list of Sequence or a 1-D int array of rows. Raises OutOfBlocks (nothing is added to any),
        NeverFits beyond `max_sequence_length`, SequenceError for rows that are not running or are named twice.
        """
        batch = self._state.rows.batch(sequences, "append")
        if is_one_token_each(tokens):
            ids = as_token_array(tokens)
            if len(ids) != len(batch.rows):
                raise ArgumentError(f"append: {len(batch.rows)} sequences, but {len(ids)} tokens")
            growth.append_one_each(self._state, batch, ids)
            return
        packed = [as_token_bytes(each, f"tokens[{index}]") for index, each in enumerate(tokens)]
        if len(packed) != len(batch.rows):
            raise ArgumentError(f"append: {len(batch.rows)} sequences, but {len(packed)} arrays of tokens")
        growth.append_arrays(self._state, batch, packed)

    def reserve(self, sequences: Sequences, n: ArrayLike) -> None:
        """Give sequences capacity for n more tokens than they have, for drafts and multi-step decode.

        `n` is an int, or one for each. Raises as `append` does.
        """
        batch = self._state.rows.batch(sequences, "reserve")
        growth.grow(self._state, batch, as_counts(n, len(batch.rows), "n"), "reserve")

    def commit(self, sequences: Sequences, num_computed_tokens: ArrayLike | None = None) -> None:
        """Say that K and V are written up to `num_computed_tokens` (one for all or one each; default: all tokens).

        Full blocks up to there become reusable. Raises SequenceError where the count is less than before or more than
        the tokens.
        """
        if num_computed_tokens is None and type(sequences) is list and len(sequences) == 1:
            growth.commit_one(self._state, sequences[0])
        else:
            growth.commit_rows(self._state, self._state.rows.batch(sequences, "commit"), num_computed_tokens)
        self._perform_moves()

    # -- taking back and ending ---------------------------------------------------------------------------------------

    def rewind(self, sequence: Sequence, num_tokens: int) -> None:
        """Take the last `num_tokens` tokens back, and give back the blocks that are not needed any more.

        Published blocks stay readable by others and are never written again: where the sequence must go on inside one,
        it gets a copy (a Move). Raises SequenceError if it has fewer tokens, OutOfBlocks if there is no block for the
        copy.
        """
        state, rows = self._state, self._state.rows
        rows.check_running(sequence, "rewind")
        branches.refuse_waiting(sequence, "rewind")
        row = sequence.row
        n = as_count(num_tokens, "num_tokens")
        left = rows.tokens_of[row] - n
        if left < 0:
            raise SequenceError(f"rewind: row {row} has {rows.tokens_of[row]} tokens, {n} cannot be taken back")
        if left // state.block_size < rows.published_of[row]:
            rewinding.rewind_published(state, sequence, left)
        else:
            rewinding.rewind_own(state, sequence, left)
        rows.computed_of[row] = min(rows.computed_of[row], left)
        rows.refresh_limit(row)
        self._perform_moves()

    def free(self, sequence: Sequence, *, publish: bool = True) -> None:
        """End a sequence, once: what is computed stays reusable until it is evicted.

        With `publish=False` that holds only for what has been published already.
        """
        self._state.rows.check_live(sequence, "free")
        if sequence._beams is not None:
            branches.leave_beams(self._state, sequence)
        if publish and sequence.publishes:
            self._state.publish_last(sequence)
        self._state.end(sequence)

    # -- prefixes without sequences -----------------------------------------------------------------------------------

    def match_prefix(self, tokens: Tokens, *, namespace: Namespace = ()) -> PrefixMatch:
        """Look how much of a prompt could be reused now, all tokens but the last; changes nothing."""
        prompt = as_token_buffer(tokens)
        if not prompt:
            raise ArgumentError("tokens is empty; a prompt has at least one token")
        check_namespace(namespace)
        match = admission.match_prompt(self._state, prompt, namespace)
        if match is None:
            return PrefixMatch(namespace, len(prompt) // TOKEN_BYTES)
        found, partial = match.position // TOKEN_BYTES, match.num_partial_tokens
        return PrefixMatch(namespace, len(prompt) // TOKEN_BYTES, found, partial, match.runs(self._state.block_size))

    def pin(self, match: PrefixMatch) -> Pin:
        """Hold the whole blocks of a match without a sequence, until `release`; works as a context manager, too.

        Raises StaleMatch if they have been evicted since.
        """
        if not isinstance(match, PrefixMatch):
            raise ArgumentTypeError(f"pin: expected a PrefixMatch, got {type(match).__name__}")
        state, tree = self._state, self._state.tree
        state.publish_committed()
        root, tokens = tree.roots.get(match.namespace), match.tokens
        found = tree.find(root, tokens, len(tokens), partial=False) if root else None
        left = found.position // TOKEN_BYTES if found else 0
        if left < match.num_block_tokens:
            raise StaleMatch(
                f"pin: the match had {match.num_block_tokens} tokens in whole blocks, {left} are left; match again"
            )
        extent = admission.extent_of(state, found) if found else tree.root(match.namespace)
        tree.hold(extent)
        pin = Pin(self._release_pin, match.namespace, match.num_block_tokens)
        state.pins[pin] = extent
        return pin

    def _release_pin(self, pin: Pin) -> None:
        if pin not in self._state.pins:
            raise SequenceError("the pin has been released")
        self._state.tree.release(self._state.pins.pop(pin))

    def evict(self, num_blocks: int) -> int:
        """Evict up to that many cached blocks in the policy's order; returns how many were there to evict."""
        wanted = as_count(num_blocks, "num_blocks")
        self._state.publish_committed()
        evicted = min(wanted, self._state.tree.num_evictable)
        self._state.tree.evict(evicted)
        return evicted

    def drop(self, *, namespace: Namespace) -> int:
        """Forget all content of a namespace; returns how many blocks became free at once.

        Running sequences and pins keep what they hold until they end; from now on nobody can hit it, and such
        sequences publish no more.
        """
        check_namespace(namespace)
        self._state.publish_committed()
        for sequence in self._state.rows.running():
            if sequence.namespace == namespace:
                sequence.publishes = False
                self._state.rows.publish_due[sequence.row] = NEVER
        return self._state.tree.drop(namespace)

    def reset(self) -> None:
        """Forget everything cached, and the statistics.

        Raises SequenceError while sequences run or pins hold, and says which.
        """
        running = self._state.rows.running()
        if running or self._state.pins:
            names = ", ".join(f"row {sequence.row} ({sequence.num_tokens} tokens)" for sequence in running[:8])
            names += ", ..." if len(running) > 8 else ""
            raise SequenceError(f"reset: {len(running)} sequences run ({names}) and {len(self._state.pins)} pins hold")
        self._state.tree.clear()
        self._state = CacheState(self.config, self.clock)

    # -- forecasts ----------------------------------------------------------------------------------------------------

    def forecast(self) -> Forecast:
        """Return a what-if on a copy of the counts, for a scheduler that asks before it acts."""
        return Forecast(self._state)

    def blocks_needed_next_step(self, sequence: Sequence, lookahead: int = 1, *, num_draft_tokens: int = 0) -> int:
        """Count the blocks that the sequence must be given for its next `lookahead` steps.

        Each step adds a token and `num_draft_tokens` drafts; nothing is needed beyond `max_sequence_length`.
        """
        self._state.rows.check_running(sequence, "blocks_needed_next_step")
        num_added = as_count(lookahead, "lookahead") * (1 + as_count(num_draft_tokens, "num_draft_tokens"))
        return self._num_missing_blocks(sequence, sequence.num_tokens + num_added)

    def blocks_needed_to_completion(self, sequence: Sequence, max_new_tokens: int) -> int:
        """Count the blocks that the sequence must be given until it has its prompt and `max_new_tokens` more."""
        self._state.rows.check_running(sequence, "blocks_needed_to_completion")
        total = sequence.num_prompt_tokens + as_count(max_new_tokens, "max_new_tokens")
        return self._num_missing_blocks(sequence, total)

    def _num_missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        return max(-(-min(num_tokens, self._state.rows.max_tokens) // self._state.block_size) - sequence.num_blocks, 0)

    # -- branches -----------------------------------------------------------------------------------------------------

    def fork(self, sequence: Sequence, n: int = 1) -> list[Sequence]:
        """Return n copies of a sequence: they share its full committed blocks, and copy the block being written.

        Each copy is a Move. Raises SequenceError if more than one block with tokens is not committed, OutOfBlocks or
        OutOfRows without room.
        """
        children = branches.fork(self._state, sequence, as_count(n, "n"))
        self._perform_moves(children)
        return children

    def reorder(self, beams: list[Sequence], parents: ArrayLike) -> None:
        """Let `beams[i]` go on from what `beams[parents[i]]` is now.

        Copies only blocks being written that several go on from. Raises SequenceError for beams that wait, are named
        twice or have more than one block of uncommitted tokens to be copied, OutOfBlocks without room for the copies.
        """
        branches.reorder(self._state, beams, parents)
        self._perform_moves()

    # -- numbers ------------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self._state.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that an allocation could take now: never used, given back, or cached and unreferenced."""
        return self._state.num_free_blocks

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """Tokens by row, a read-only view `[max_sequences]`; 0 where no sequence runs."""
        return _read_only(self._state.rows.num_tokens)

    @property
    def num_computed_tokens(self) -> NDArray[np.int64]:
        """Computed tokens by row, a read-only view `[max_sequences]`."""
        return _read_only(self._state.rows.num_computed)

    @property
    def row_version(self) -> NDArray[np.int64]:
        """Versions by row, a read-only view `[max_sequences]`: see `Sequence.version`."""
        return _read_only(self._state.rows.version)

    def stats(self) -> Stats:
        """Return the numbers of now and the counts since the start or the last `reset`."""
        self._state.publish_committed()
        state = self._state
        return state.counters.stats(
            pool=state.pool, tree=state.tree, num_sequences=len(state.rows.running()), num_pins=len(state.pins)
        )

    def explain(self, subject: Sequence | Tokens, *, namespace: Namespace = ()) -> Explanation:
        """Say who holds what of a sequence, or how far a prompt is cached and why not further."""
        if isinstance(subject, Sequence):
            self._state.rows.check_live(subject, "explain")
            return explanation.of_sequence(self._state, subject)
        return explanation.of_prompt(
            self._state, as_token_bytes(subject), self.match_prefix(subject, namespace=namespace)
        )

    def check(self) -> None:
        """Prove the books: every block has one owner, every reference a holder, every candidate its place.

        Raises InvariantError, which says what is wrong and who holds it.
        """
        invariants.check(self._state)

    def digest(self) -> str:
        """Return SHA-256 in hex over what is cached, where, and who runs.

        Managers of equal settings that were given the same calls have equal digests, in any process. To look is a call,
        too: like `stats`, it publishes what is committed.
        """
        self._state.publish_committed()
        return state_digest(self._state)

    def _perform_moves(self, new: Iterable[Sequence] = ()) -> None:
        """Have the copies made that a call has ordered; here nobody can, and they wait for `take_moves`.

        `new` are the sequences that end again if the copies cannot be made.
        """

    def take_moves(self) -> list[Move]:
        """Return the copies still to be made, in order, once: before the next forward pass reads or writes."""
        moves, self._state.moves = self._state.moves, []
        return moves


def _read_only(array: NDArray[np.int64]) -> NDArray[np.int64]:
    view = array.view()
    view.flags.writeable = False
    return view
