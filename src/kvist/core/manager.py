"""The state machine: admits, grows, commits and ends sequences, and says which copies that needs.

Every call first finds out whether it can be done, and only then changes anything. Nothing here knows bytes, devices or
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvist.config import CacheConfig
from kvist.core import (
    admission,
    branches,
    explanation,
    growth,
    invariants,
    misses,
    pinning,
    promotion,
    reclaiming,
    recurrent,
    resuming,
    rewinding,
    rings,
)
from kvist.core.arguments import (
    as_count,
    as_counts,
    as_int_array,
    check_lifetime,
    check_namespace,
    check_num_beams,
    is_one_token_each,
)
from kvist.core.digest import state_digest
from kvist.core.explanation import Explanation
from kvist.core.extents import Extent, Match, Namespace
from kvist.core.forecast import Forecast, Step, forecast_of
from kvist.core.identity import Media
from kvist.core.lower import DEVICE, HOST
from kvist.core.matching import Awaited, Pin, Prefetch, PrefixMatch
from kvist.core.moves import Move, one_by_one
from kvist.core.recording import RESET, EventRecorder
from kvist.core.retention import Retention
from kvist.core.rows import NEVER
from kvist.core.sequences import Sequence, Sequences, Wishes
from kvist.core.state import CacheState
from kvist.core.statistics import GroupStats, Stats, TierStats
from kvist.core.tokens import TOKEN_BYTES, Tokens, as_token_array, as_token_buffer, as_token_bytes
from kvist.errors import ArgumentError, ArgumentTypeError, KvistError, NeverFits, SequenceError, TransferError

__all__ = ["CacheCore"]

NO_TOKENS, ONE_BEAM = 0, 1
NO_NAMESPACE: Namespace = ()
"""What is the default, and so one object, need not be checked."""


class CacheCore:
    """Decides which blocks of each group hold which tokens.

    Costs: a request costs what its extents cost, a decode step a few array operations for each group, whatever the
    number of blocks.
    """

    def __init__(self, config: CacheConfig, clock: Callable[[], float], epoch: int = 0) -> None:
        if not isinstance(config, CacheConfig):
            raise ArgumentTypeError(f"config is a {type(config).__name__}, must be a CacheConfig")
        config.validate()
        if not callable(clock):
            raise ArgumentTypeError(f"clock is a {type(clock).__name__}, must be callable and return seconds")
        self.config = config
        self.clock = clock
        self._state = CacheState(config, clock)
        if config.event_buffer:
            self._record(EventRecorder(self._state.chain, self._state.spans, epoch))

    def _record(self, recorder: EventRecorder) -> None:
        """Note what happens from now on, as events, beginning with how many blocks there are."""
        state = self._state
        counts = {DEVICE: [pool.num_blocks for pool in state.group_pools]}
        if state.lower is not None:
            counts[HOST] = [state.lower.pools[pool].num_blocks for pool in state.pool_of]
        recorder.created(counts)
        state.record(recorder)

    # -- admission ----------------------------------------------------------------------------------------------------

    def add_sequence(
        self,
        tokens: Tokens,
        *,
        namespace: Namespace = NO_NAMESPACE,
        media: Iterable[Media] = (),
        extra_ids: ArrayLike | None = None,
        retention: Retention | None = None,
        reuse: bool = True,
        publish: bool = True,
        num_beams: int = ONE_BEAM,
        encoder_tokens: int = NO_TOKENS,
    ) -> Sequence:
        """Admit a prompt: find its longest reusable prefix and allocate every block it needs.

        `tokens`: 1-D int array, `array`, buffer or list of ids 0 .. 2**31-1, at least one. The first
        `num_cached_tokens` of the sequence returned, at most all but the last, are computed already. `namespace`
        separates content that must not be shared; `media` are spans of the prompt whose K and V come from something
        else than their ids; `extra_ids`, one int of 0 .. 2**64-1 for each token, 0 for plain text, belong to what must
        be equal, too. `retention` says what of it should stay longest; `reuse=False` does not look for content,
        `publish=False` leaves none to others. `encoder_tokens` is how many tokens cross attention is to keep: a
        prompt that depends on an encoder reuses nothing and leaves nothing. With `num_beams`, `beams` lists that many
        sequences: they share the prompt's full blocks, only the first is to be computed, and the others may be used
        once it has committed the whole prompt.

        Raises NeverFits for a prompt longer than `max_sequence_length` or the whole pool, OutOfBlocks or OutOfRows if
        there is no room now, ArgumentError for tokens or a namespace that cannot be.
        """
        prompt = as_token_buffer(tokens)
        num_tokens = len(prompt) // TOKEN_BYTES
        state = self._state
        wishes, rows = state.usual_wishes, state.rows
        if namespace is not NO_NAMESPACE:
            check_namespace(namespace)
        if not (retention is None and reuse and publish and num_beams is ONE_BEAM and encoder_tokens is NO_TOKENS):
            wishes = self._wishes(retention, num_beams, encoder_tokens, reuse=bool(reuse), publish=bool(publish))
            admission.check_prompt(state, num_tokens, wishes.num_beams, rows.num_free, wishes.num_encoder_tokens)
        elif not 0 < num_tokens <= state.sure_tokens or rows.num_running == rows.max_sequences:
            admission.check_prompt(state, num_tokens, 1, rows.num_free, 0)
        if media != () or extra_ids is not None:
            prompt = state.identify(prompt, media, extra_ids)
        match = admission.match_prompt(state, prompt, namespace) if wishes.reuses else None
        if state.tree.has_tiers and wishes.reuses:
            sequence = self._admit_from_tiers(prompt, namespace, match, wishes)
        else:
            sequence = admission.admit(state, prompt, namespace, match, wishes)
        if state.moves:
            self._perform_moves([sequence])
        if state.keeper is not None and wishes.reuses:
            self._offer_again(sequence._extent)
        admission.count_prompt(state, sequence)
        return sequence

    def _wishes(
        self, retention: Retention | None, num_beams: int, encoder_tokens: int, *, reuse: bool, publish: bool
    ) -> Wishes:
        """Check how a prompt is to be treated, unless it is as usual."""
        check_num_beams(num_beams)
        num_encoder_tokens = as_count(encoder_tokens, "encoder_tokens")
        if retention is not None and not isinstance(retention, Retention):
            raise ArgumentTypeError(f"retention is a {type(retention).__name__}, must be a Retention or None")
        # What follows an encoder depends on what that has seen, which is not part of any identity here.
        is_alone = num_encoder_tokens > 0
        publishes = publish and self._state.reuses and not is_alone
        return Wishes(publishes, reuse and not is_alone, retention, num_beams, num_encoder_tokens)

    def _admit_from_tiers(
        self, prompt: bytes | memoryview, namespace: Namespace, match: Match | None, wishes: Wishes
    ) -> Sequence:
        """Admit a prompt after what slower tiers have of it has been brought up."""
        held: list[Extent] = []
        try:
            match = self._bring_up(prompt, namespace, len(prompt) - TOKEN_BYTES, match, wishes.num_beams, held)
            return admission.admit(self._state, prompt, namespace, match, wishes)
        finally:
            for extent in held:
                self._state.tree.release(extent)

    def _bring_up(
        self,
        prompt: bytes | memoryview,
        namespace: Namespace,
        limit: int,
        match: Match | None,
        num_beams: int,
        held: list[Extent],
    ) -> Match | None:
        """Bring to the device what slower tiers have of a prompt, up to `limit` bytes; returns the match then.

        What keeps it there is added to `held`, also where this raises, and is for the caller to release.
        """
        state = self._state
        if match is not None and state.lower is not None:
            match, raised = admission.bring_up(state, prompt, namespace, match, num_beams, limit)
            held += [] if raised is None else [raised]
        if state.keeper is not None:
            restored = self._restore(prompt, namespace, limit, match, num_beams)
            held += [] if restored is None else [restored]
            match = admission.match_prompt(state, prompt, namespace, limit)
        return match

    def _restore(
        self, prompt: bytes | memoryview, namespace: Namespace, limit: int, match: Match | None, num_beams: int
    ) -> Extent | None:
        """Bring to the device what stores have of a prompt, up to `limit` bytes, and hold it; here there are none."""
        return None

    def _offer_again(self, extent: Extent) -> None:
        """Hand to stores what they did not take before of the prefix that ends with an extent; here there are none."""

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
            if self._state.moves:
                self._perform_moves()
            return
        packed = [as_token_bytes(each, f"tokens[{index}]") for index, each in enumerate(tokens)]
        if len(packed) != len(batch.rows):
            raise ArgumentError(f"append: {len(batch.rows)} sequences, but {len(packed)} arrays of tokens")
        growth.append_arrays(self._state, batch, packed)
        self._perform_moves()

    def reserve(self, sequences: Sequences, n: ArrayLike) -> None:
        """Give sequences capacity for n more tokens than they have, for drafts and multi-step decode.

        `n` is an int, or one for each. With `max_chunk_tokens`, also the blocks of windows for the next chunk of a
        prompt, which `commit` gives only as far as there are any. Raises as `append` does.
        """
        batch = self._state.rows.batch(sequences, "reserve")
        growth.reserve(self._state, batch, as_counts(n, len(batch.rows), "n"))
        self._perform_moves()

    def commit(self, sequences: Sequences, num_computed_tokens: ArrayLike | None = None) -> None:
        """Say that K and V are written up to `num_computed_tokens` (one for all or one each; default: all tokens).

        Full blocks up to there become reusable. Raises SequenceError where the count is less than before or more than
        the tokens.
        """
        state = self._state
        if num_computed_tokens is None and type(sequences) is list and len(sequences) == 1:
            growth.commit_one(state, sequences[0])
        else:
            growth.commit_rows(state, state.rows.batch(sequences, "commit"), num_computed_tokens)
        if state.publishes_at_commit:
            state.publish_committed()
        if state.moves:
            self._perform_moves()

    def accept(self, sequence: Sequence, tokens: Tokens, nodes: ArrayLike) -> None:
        """Add and commit the accepted nodes of a tree of drafts that one forward pass has verified.

        Node i was computed at position `num_computed_tokens + i`, in reserved capacity. `nodes` are the accepted ones
        from the root down, increasing, and `tokens` their ids; the sequence may have the first of them already, such as
        the root. Their K and V move to their places in the sequence, which are Moves of single tokens. Raises
        SequenceError where tokens differ, or where capacity or a recurrent state stands against it.
        """
        state, rows = self._state, self._state.rows
        rows.check_running(sequence, "accept")
        ids, places = as_token_array(tokens), as_int_array(nodes, "nodes").astype(np.int64)
        if places.shape != ids.shape or not len(ids):
            raise ArgumentError(f"accept: {len(ids)} tokens, but nodes of shape {places.shape}; one node for each")
        if places[0] < 0 or (np.diff(places) <= 0).any():
            raise ArgumentError(f"accept: nodes are {places.tolist()}, must increase from the root down")
        if state.recurrent is not None:
            raise SequenceError("accept: a recurrent state cannot be taken from the middle of a forward pass")
        branches.refuse_waiting(sequence, "accept")
        pending = sequence.tokens[rows.computed_of[sequence.row] :]
        if len(pending) > len(ids) or not np.array_equal(pending, ids[: len(pending)]):
            raise SequenceError(f"accept: {sequence!r} goes on with {pending.tolist()}, accepted are {ids.tolist()}")
        end = rows.computed_of[sequence.row] + int(places[-1]) + 1
        if end > sequence.capacity:
            raise SequenceError(f"accept: node {places[-1]} is at position {end - 1}, capacity is {sequence.capacity}")
        if state.max_chunk_tokens:
            growth.check_chunk(state, np.array([sequence.row]), np.array([end]), "accept")
        if state.rings and rings.wraps(state, end):
            raise SequenceError(f"accept: node {places[-1]} at position {end - 1} has overwritten tokens in a ring")
        growth.accept(state, sequence, ids, places)
        self._perform_moves()
        if state.publishes_at_commit and not state.moves:  # nothing moves into what is published
            state.publish_committed()
            self._perform_moves()

    # -- taking back and ending ---------------------------------------------------------------------------------------

    def rewind(self, sequence: Sequence, num_tokens: int) -> None:
        """Take the last `num_tokens` tokens back, and give back the blocks that are not needed any more.

        Published blocks stay readable by others and are never written again: where the sequence must go on inside one,
        it gets a copy (a Move). Where a window has let go of what the tokens left need, or a state has gone past them,
        `num_computed_tokens` falls to where the cache still has all, and what follows must be computed again. Raises
        SequenceError if it has fewer tokens or would end inside a media span, OutOfBlocks if there is no room.
        """
        state, rows = self._state, self._state.rows
        rows.check_running(sequence, "rewind")
        branches.refuse_waiting(sequence, "rewind")
        row = sequence.row
        n = as_count(num_tokens, "num_tokens")
        left = rows.tokens_of[row] - n
        if left < 0:
            raise SequenceError(f"rewind: row {row} has {rows.tokens_of[row]} tokens, {n} cannot be taken back")
        rewinding.refuse_open_media(state, sequence, left)
        rows.most_tokens[row] = max(rows.most_tokens.item(row), rows.tokens_of[row])
        if not state.is_plain and not left:
            rewinding.rewind_to_nothing(state, sequence)
        elif not state.is_plain and not rewinding.can_step_back(state, sequence, left):
            resuming.rewind_anew(state, sequence, left)
        elif left // state.block_size < rows.published_of[row]:
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
        state = self._state
        if type(sequence) is not Sequence or sequence.row < 0 or sequence._rows is not state.rows:
            if resuming.is_suspended(state, sequence):
                sequence._suspended = None
                del state.suspended[sequence]
                return
            state.rows.check_live(sequence, "free")
        if sequence._beams is not None:
            branches.leave_beams(state, sequence)
        state.end(sequence, publish=publish)
        if state.copies is not None:
            self._write_through()

    def _close(self, sequence: Sequence) -> None:
        """End a running sequence, publish nothing of it, and have nothing copied yet."""
        if sequence._beams is not None:
            branches.leave_beams(self._state, sequence)
        self._state.end(sequence, publish=False)

    def _write_through(self) -> None:
        """Make the copies to host memory that the end of a sequence has ordered; the next call tries again.

        Only a failure that has taken what running sequences had is the caller's concern.
        """
        try:
            self._perform_moves()
        except TransferError as error:
            if error.sequences:
                raise

    def suspend(self, sequence: Sequence) -> None:
        """Free a sequence's row and blocks until `resume`; what is computed stays reusable as far as it fits.

        It can be freed while it is suspended.
        """
        self._state.rows.check_running(sequence, "suspend")
        branches.refuse_waiting(sequence, "suspend")
        resuming.suspend(self._state, sequence)
        if self._state.copies is not None:
            self._write_through()

    def resume(self, sequence: Sequence, tokens: Tokens = ()) -> int:
        """Let a suspended sequence go on; returns how many of its computed tokens must be computed again.

        They are those from its `num_computed_tokens` on. `tokens` are added at its end in the same act, such as the one
        that found no room before. Raises OutOfBlocks or OutOfRows without room for all of it; then it stays suspended.
        NeverFits says that it would be longer than `max_sequence_length`.
        """
        resuming.check_suspended(self._state, sequence, "resume")
        more = bytes(as_token_buffer(tokens))
        num_tokens, longest = sequence.num_suspended_tokens + len(more) // TOKEN_BYTES, self._state.rows.max_tokens
        if num_tokens > longest:
            raise NeverFits(f"resume: the sequence would have {num_tokens} tokens, max_sequence_length is {longest}")
        held: list[Extent] = []
        try:
            if self._state.keeper is not None and sequence.reuses:
                self._restore_suspended(sequence, held)
            num_lost = resuming.resume(self._state, sequence, more)
        finally:
            for extent in held:
                self._state.tree.release(extent)
        self._perform_moves()
        if self._state.keeper is not None and sequence.reuses:
            self._offer_again(sequence._extent)
        return num_lost

    def _restore_suspended(self, sequence: Sequence, held: list[Extent]) -> None:
        """Bring to the device what slower tiers have of a suspended sequence, and add what keeps it there to `held`."""
        suspended = sequence._suspended
        assert suspended is not None
        limit = suspended.num_computed * TOKEN_BYTES
        if limit and not suspended.num_encoder_tokens:
            match = admission.match_prompt(self._state, suspended.tokens, sequence.namespace, limit)
            self._bring_up(suspended.tokens, sequence.namespace, limit, match, 1, held)

    def cheapest_victims(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Sort running sequences by what their preemption costs, cheapest first.

        That is the computed tokens which nobody else holds, and so may have to be computed again, per block that would
        become free or evictable.
        """
        named = list(sequences)
        for sequence in named:
            self._state.rows.check_running(sequence, "cheapest_victims")
        return resuming.cheapest_first(self._state, named)

    def chunk_limit(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many of the next `num_tokens` tokens to compute in one forward pass: all, or up to a boundary.

        Models with recurrent states keep them where others may go on, and only if a commit ends there. With
        `max_chunk_tokens`, windows have blocks for no more than the next chunk; 0 says that `reserve` must get some.
        """
        self._state.rows.check_running(sequence, "chunk_limit")
        return recurrent.chunk_limit(self._state, sequence, as_count(num_tokens, "num_tokens"))

    # -- prefixes without sequences -----------------------------------------------------------------------------------

    def match_prefix(
        self,
        tokens: Tokens,
        *,
        namespace: Namespace = NO_NAMESPACE,
        media: Iterable[Media] = (),
        extra_ids: ArrayLike | None = None,
    ) -> PrefixMatch:
        """Look how much of a prompt could be reused now, all tokens but the last, and why not more; changes nothing.

        Arguments are those of `add_sequence`. Stores are asked, each for its time limit at most; what they say that
        they have is in `tiers`, and not in `num_tokens`: an admission has yet to get it.
        """
        prompt = self._looked_up(tokens, namespace, media, extra_ids)
        state = self._state
        match = admission.match_prompt(state, prompt, namespace)
        if not state.tree.has_tiers:
            return self._told(prompt, namespace, match)
        told = self._told_with_host(prompt, namespace, match)
        if state.keeper is None:
            return told
        return told._replace(stored=self._in_stores(prompt, namespace, match, told.num_block_tokens))

    def _in_stores(
        self, prompt: bytes | memoryview, namespace: Namespace, match: Match | None, first: int
    ) -> tuple[tuple[str, int], ...]:
        """Return how many tokens of a prompt after the first so many each store says it has; here there are none."""
        return ()

    def _told_with_host(self, prompt: bytes | memoryview, namespace: Namespace, match: Match | None) -> PrefixMatch:
        """Say what a match of a prompt is, and what host memory adds to it."""
        if self._state.lower is None:
            return self._told(prompt, namespace, match)
        limit = len(prompt) - TOKEN_BYTES
        find = promotion.find_lower(self._state, prompt, namespace, limit, match)
        if find is None:
            return self._told(prompt, namespace, match)._replace(num_host_tokens=0)
        num_host = (find.num_columns - find.num_device) * self._state.block_size
        told = self._told(prompt, namespace, find.whole(self._state.tree.block_bytes))
        return told._replace(num_host_tokens=num_host)

    def _told(self, prompt: bytes | memoryview, namespace: Namespace, match: Match | None) -> PrefixMatch:
        """Say what a match of a prompt is, and why it is not longer."""
        state, num_tokens = self._state, len(prompt) // TOKEN_BYTES
        miss = misses.miss_of(state, prompt, namespace, match)
        if miss is misses.COLD and state.publish_committed():  # another namespace may have just committed it
            miss = misses.miss_of(state, prompt, namespace, match)
        evicted_s, eviction = None, ""
        if miss is misses.OTHER_NAMESPACE:
            miss = misses.shown_miss(state, miss)
        elif miss is misses.EVICTED:
            loss = misses.loss_after(state, prompt, namespace, match)
            assert loss is not None
            evicted_s, eviction = self.clock() - loss[0], loss[1]
        if match is None:
            return PrefixMatch(namespace, num_tokens, 0, 0, 0, miss, evicted_s, eviction)
        return PrefixMatch(
            namespace,
            num_tokens,
            match.position // TOKEN_BYTES,
            match.num_partial_tokens,
            max(match.known, match.position) // TOKEN_BYTES,
            miss,
            evicted_s,
            eviction,
            match.runs(state.block_size) if match.position else (),
        )

    def _looked_up(
        self, tokens: Tokens, namespace: Namespace, media: Iterable[Media], extra_ids: ArrayLike | None
    ) -> bytes | memoryview:
        """Check a prompt that is only looked up; returns it packed."""
        prompt = as_token_buffer(tokens)
        if not prompt:
            raise ArgumentError("tokens is empty; a prompt has at least one token")
        if namespace is not NO_NAMESPACE:
            check_namespace(namespace)
        if extra_ids is not None or media != ():
            prompt = self._state.identities.look(prompt, media, extra_ids)
        return prompt

    def pin(self, match: PrefixMatch, *, lifetime_s: float | None = None) -> Pin:
        """Hold the whole blocks of a match without a sequence, until `release`; works as a context manager, too.

        With `lifetime_s`, no longer than that many seconds. Raises StaleMatch if they have been evicted since,
        OutOfBlocks if all pins together would hold more than the `pin_budget` of a pool, or if what is in host memory
        does not fit on the device, TransferError if it cannot be copied there.
        """
        if not isinstance(match, PrefixMatch):
            raise ArgumentTypeError(f"pin: expected a PrefixMatch, got {type(match).__name__}")
        check_lifetime(lifetime_s)
        pin = pinning.pin(self._state, match, self._release_pin, lifetime_s)
        try:
            self._perform_moves()
        except TransferError:
            self._state.end_pin(pin)
            raise
        return pin

    def _release_pin(self, pin: Pin) -> None:
        pinning.release_pin(self._state, pin)

    def prefetch(
        self,
        tokens: Tokens,
        *,
        namespace: Namespace = (),
        media: Iterable[Media] = (),
        extra_ids: ArrayLike | None = None,
    ) -> Prefetch:
        """Bring a prompt up from slower tiers: from host memory at once, from stores behind the caller's back.

        Arguments are those of `add_sequence`, which finds what has come by then without waiting for a store. What is on
        the device stays until it is evicted; what comes from stores waits in host memory for a while. Without room for
        all that host memory has, nothing of it is moved.
        """
        prompt = self._looked_up(tokens, namespace, media, extra_ids)
        state, limit = self._state, len(prompt) - TOKEN_BYTES
        match = admission.match_prompt(state, prompt, namespace)
        find = promotion.find_lower(state, prompt, namespace, limit, match)
        held = None if find is None else promotion.promote(state, find, [0] * len(state.pools))
        if held is not None:
            match = admission.match_prompt(state, prompt, namespace)
            state.tree.release(held)
            self._perform_moves()
        num_asked, coming = 0, None
        if state.keeper is not None:
            num_asked, coming = self._fetch_ahead(prompt, namespace, limit, match)
        return Prefetch(0 if match is None else match.position // TOKEN_BYTES, num_asked, coming)

    def _fetch_ahead(
        self, prompt: bytes | memoryview, namespace: Namespace, limit: int, match: Match | None
    ) -> tuple[int, Awaited | None]:
        """Start to get what stores have of a prompt, and return how many tokens they are asked for; here are none."""
        return 0, None

    def evict(self, num_blocks: int) -> int:
        """Evict up to that many cached blocks, of all groups, in the policy's order; returns how many went.

        With several groups whole positions go, so that what is left can still be hit: a few blocks more than asked.
        """
        wanted = as_count(num_blocks, "num_blocks")
        self._state.settle()
        num_evicted = reclaiming.evict_positions(self._state.tree, wanted)
        self._perform_moves()
        return num_evicted

    def drop(self, *, namespace: Namespace) -> int:
        """Forget all content of a namespace; returns how many blocks became free at once.

        Running sequences and pins keep what they hold until they end; from now on nobody can hit it, and such
        sequences publish no more.
        """
        check_namespace(namespace)
        self._state.settle()
        for sequence in [*self._state.rows.running(), *self._state.suspended]:
            if sequence.namespace == namespace:
                sequence.publishes = False
                if sequence.is_live:
                    self._state.rows.publish_due[sequence.row] = NEVER
        return self._state.tree.drop(namespace)

    def reset(self) -> None:
        """Forget everything cached, and the statistics.

        Raises SequenceError while sequences run or pins hold, and says which.
        """
        running = self._state.rows.running()
        suspended, pins = len(self._state.suspended), len(self._state.pins)
        if running or pins or suspended:
            names = ", ".join(f"row {sequence.row} ({sequence.num_tokens} tokens)" for sequence in running[:8])
            names += ", ..." if len(running) > 8 else ""
            also = f", {suspended} are suspended" if suspended else ""
            raise SequenceError(f"reset: {len(running)} sequences run ({names}){also} and {pins} pins hold")
        old = self._state.recorder
        self._state.tree.clear()
        # Ids are not used twice: a match from before must not be one of other media.
        self._state = CacheState(self.config, self.clock, self._state.identities)
        if old is not None:
            old.cleared(None, RESET)
            recorder = EventRecorder(self._state.chain, self._state.spans, old.epoch, old.next_id)
            recorder.staged, recorder.overflow = old.staged, old.overflow
            self._state.record(recorder)

    # -- forecasts ----------------------------------------------------------------------------------------------------

    def forecast(self) -> Forecast:
        """Return a what-if for a scheduler that asks before it acts: on a copy of the counts, or of all that is kept.

        A copy of all is made where windows or states make it matter what is evicted, when something is first supposed.
        """
        return forecast_of(self._state)

    def perform(self, forecast: Forecast) -> list[Sequence]:
        """Do all that was supposed in a forecast of this manager, in that order, or nothing; returns the new sequences.

        What has changed since the forecast was made is taken into account: it is tried out again first. Raises what the
        first call that does not fit would, and SequenceError for prompts or tokens of which only the number is known.
        Where a copy fails, new sequences have ended again; what was appended or released before that stays so.
        """
        if not isinstance(forecast, Forecast):
            raise ArgumentTypeError(f"perform: expected a Forecast, got {type(forecast).__name__}")
        again = self.forecast()
        for step in forecast.steps:
            if not step.is_certain:
                raise SequenceError(f"perform: {step.call} with {step.tokens} tokens: their ids must be known")
            if step.call == "add":
                again.add(step.tokens, **step.options)
            elif step.call == "append":
                again.append(step.options["sequence"], step.tokens)
            else:
                again.release(step.options["sequence"])
        added = list[Sequence]()
        try:
            for step in forecast.steps:
                added += self._perform_step(step)
        except KvistError as error:
            self._end_all(added, error)
            raise
        return added

    def _end_all(self, added: list[Sequence], error: KvistError) -> None:
        """End new sequences that the caller will not get, since a later step has raised."""
        beams = [beam for sequence in added for beam in sequence.beams]
        if isinstance(error, TransferError):
            error.sequences = tuple(each for each in error.sequences if each not in beams)
        for beam in beams:
            if beam.is_live:
                self._close(beam)
            elif resuming.is_suspended(self._state, beam):
                del self._state.suspended[beam]
                beam._suspended = None

    def _perform_step(self, step: Step) -> list[Sequence]:
        if step.call == "add":
            return [self.add_sequence(step.tokens, **step.options)]
        if step.call == "append":
            self.append([step.options["sequence"]], [step.tokens])
        else:
            self.free(step.options["sequence"])
        return []

    def blocks_needed_next_step(self, sequence: Sequence, lookahead: int = 1, *, num_draft_tokens: int = 0) -> int:
        """Count the blocks, of all groups, that the sequence must be given for its next `lookahead` steps.

        Each step adds a token and `num_draft_tokens` drafts; nothing is needed beyond `max_sequence_length`. What
        windows still need for the chunks of its prompt is not counted.
        """
        self._state.rows.check_running(sequence, "blocks_needed_next_step")
        num_added = as_count(lookahead, "lookahead") * (1 + as_count(num_draft_tokens, "num_draft_tokens"))
        return self._num_missing_blocks(sequence, sequence.num_tokens + num_added)

    def blocks_needed_to_completion(self, sequence: Sequence, max_new_tokens: int) -> int:
        """Count the blocks, of all groups, that the sequence must be given until its prompt and `max_new_tokens` more.

        Blocks that fall out of a window on the way, and so come back, are not subtracted.
        """
        state, rows = self._state, self._state.rows
        rows.check_running(sequence, "blocks_needed_to_completion")
        total = sequence.num_prompt_tokens + as_count(max_new_tokens, "max_new_tokens")
        ends = [rows.ends_of[group.index][sequence.row] for group in state.sliding]
        num_of_chunks: int = sum(max(sequence.num_columns - end, 0) for end in ends)
        return num_of_chunks + self._num_missing_blocks(sequence, total)

    def _num_missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        state, have = self._state, sequence.num_columns
        total = max(min(num_tokens, state.rows.max_tokens), sequence.num_tokens)
        num_columns = max(state.rows.columns_for(total), have)
        needed = sum(state.column_needs(num_columns - have))
        if state.rings:
            row, columns, tokens = np.array([sequence.row]), np.array([num_columns]), np.array([total])
            grown = rings.growth_of(state, row, columns, tokens)
            needed += sum(rings.num_needed(state, grown, taking_over=True))
        return needed

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
        """Blocks of all pools."""
        return sum(pool.num_blocks for pool in self._state.pools)

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
        state = self._state
        state.settle()
        tree, counters = state.tree, state.counters
        return Stats(
            groups=tuple(map(self._group_stats, range(len(state.spans)))),
            num_sequences=len(state.rows.running()),
            num_suspended_now=len(state.suspended),
            num_pins=len(state.pins),
            num_extents=sum(1 for _ in tree.extents()),
            num_admitted=counters.num_admitted,
            num_query_tokens=counters.num_query_tokens,
            num_hit_tokens=counters.num_hit_tokens,
            misses=counters.frozen_misses(),
            recent_token_hit_rate=counters.recent_token_hit_rate,
            num_shared_blocks=counters.num_shared_blocks,
            evictions=MappingProxyType(dict(tree.num_evicted)),
            num_suspended=counters.num_suspended,
            num_resumed=counters.num_resumed,
            num_recomputed_tokens=counters.num_recomputed_tokens,
            num_policy_failures=tree.queue.num_policy_failures,
            last_policy_failure=tree.queue.last_policy_failure,
            num_blocks=self.num_blocks,
            num_free_blocks=state.num_free_blocks,
            num_evictable_blocks=sum(map(tree.evictable_in, state.pools)),
            tiers=self._tier_stats(),
        )

    def _tier_stats(self) -> tuple[TierStats, ...]:
        lower = self._state.lower
        if lower is None:
            return ()
        return (
            TierStats(
                name=HOST,
                num_blocks=sum(pool.num_blocks for pool in lower.pools),
                num_free_blocks=sum(pool.num_free for pool in lower.pools),
                num_extents=lower.num_extents,
                num_demoted_blocks=lower.num_demoted,
                num_promoted_blocks=lower.num_promoted,
                num_evicted_blocks=lower.num_evicted,
                num_refused_blocks=lower.num_refused,
                num_copied_blocks=lower.copies.num_made,
            ),
        )

    def _group_stats(self, group: int) -> GroupStats:
        state = self._state
        pool, counters = state.group_pools[group], state.counters.groups[group]
        evictable = state.tree.evictable_in(pool)
        return GroupStats(
            kind=state.spans[group].kind,
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free + evictable,
            num_evictable_blocks=evictable,
            num_held_blocks=pool.num_blocks - pool.num_free - evictable,
            num_pinned_blocks=pinning.num_pinned(state)[group],
            num_allocated_blocks=counters.num_allocated,
            num_new_blocks=counters.num_allocated - counters.num_reallocated,
            num_reused_blocks=counters.num_reused,
            num_missed_blocks=counters.num_missed,
        )

    def explain(
        self,
        subject: Sequence | Tokens,
        *,
        namespace: Namespace = (),
        media: Iterable[Media] = (),
        extra_ids: ArrayLike | None = None,
    ) -> Explanation:
        """Say who holds what of a sequence, or how far a prompt is cached and why not further."""
        if isinstance(subject, Sequence):
            self._state.rows.check_live(subject, "explain")
            return explanation.of_sequence(self._state, subject)
        prompt = self._looked_up(subject, namespace, media, extra_ids)
        match = self.match_prefix(subject, namespace=namespace, media=media, extra_ids=extra_ids)
        return explanation.of_prompt(self._state, bytes(prompt), match)

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
        self._state.settle()
        return state_digest(self._state)

    def _perform_moves(self, new: Iterable[Sequence] = ()) -> None:
        """Have the copies made that a call has ordered; here nobody can, and they wait for `take_moves`.

        `new` are the sequences that end again if the copies cannot be made.
        """

    def take_moves(self) -> list[Move]:
        """Return the copies still to be made, in order, once: before the next forward pass reads or writes.

        What stores were to keep in between they are not given: by the next call it may be overwritten.
        """
        moves = one_by_one(self._state.moves) if self._state.moves else []
        if moves:
            self._state.moves = []
        return moves


def _read_only(array: NDArray[np.int64]) -> NDArray[np.int64]:
    view = array.view()
    view.flags.writeable = False
    return view
