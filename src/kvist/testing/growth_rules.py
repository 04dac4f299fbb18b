"""The rules of CacheMachine that give sequences tokens and blocks, and compute them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, islice

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvist.core.sequences import Sequences
from kvist.errors import NeverFits, SequenceError, TransferError
from kvist.testing.bills import Counts
from kvist.testing.configs import lefts, numbers, patterns, some
from kvist.testing.model import Shadow
from kvist.testing.stage import Stage, named, require

__all__ = ["GrowthRules"]


class GrowthRules(Stage):
    """How sequences grow. A rule makes the call, says which outcomes are right, and notes them in the model."""

    @precondition(lambda self: self.running())
    @rule(picks=some, pattern=patterns, by_rows=st.booleans())
    def append_one_each(self, picks: int, pattern: list[int], by_rows: bool) -> None:
        """Append one token to each of some sequences, as a decode step does."""
        chosen = self.pick(picks)
        ids = list(islice(cycle(pattern), len(chosen)))
        added = [[token] for token in ids]
        self.grow(chosen, added, by_rows, lambda batch: self.manager.append(batch, np.array(ids, np.int64)))

    @precondition(lambda self: self.running())
    @rule(picks=some, pattern=patterns, sizes=st.lists(numbers, min_size=1, max_size=3), by_rows=st.booleans())
    def append_many(self, picks: int, pattern: list[int], sizes: list[int], by_rows: bool) -> None:
        """Append several tokens, or none, to each of some sequences."""
        chosen = self.pick(picks)
        lengths = [size % (2 * self.block_size + 1) for _, size in zip(chosen, cycle(sizes), strict=False)]
        added = [list(islice(cycle(pattern), length)) for length in lengths]
        arrays = [np.array(ids, np.int32) for ids in added]
        self.grow(chosen, added, by_rows, lambda batch: self.manager.append(batch, arrays))

    @precondition(lambda self: self.running())
    @rule(picks=some, n=numbers, by_rows=st.booleans())
    def reserve(self, picks: int, n: int, by_rows: bool) -> None:
        """Reserve capacity for drafts."""
        extra = n % (2 * self.block_size + 1)
        chosen = self.pick(picks)
        self.grow(chosen, [[]] * len(chosen), by_rows, lambda batch: self.manager.reserve(batch, extra), extra)

    def grow(
        self,
        chosen: list[Shadow],
        added: list[list[int]],
        by_rows: bool,
        call: Callable[[Sequences], None],
        reserved: int = 0,
    ) -> None:
        """Make a call that appends `added` or reserves, and note what it has changed: all or nothing."""
        lengths = [shadow.num_tokens + len(ids) + reserved for shadow, ids in zip(chosen, added, strict=True)]
        wanted = [
            max(shadow.num_blocks, self.bill.num_columns(length))
            for shadow, length in zip(chosen, lengths, strict=True)
        ]
        bill = sum(map(self.foreseen_growth, chosen, wanted, lengths), self.bill.growth(0, 0, 0))
        if max(lengths) > self.config.max_sequence_length:
            refused = self.attempt(lambda: call(named(chosen, by_rows=by_rows)))
            return require(isinstance(refused, NeverFits), f"{max(lengths)} tokens never fit, but: {refused!r}")
        for shadow, length in zip(chosen, lengths, strict=True):
            self.before_wrapping(shadow, length)
        refused = self.allocate(lambda: call(named(chosen, by_rows=by_rows)), bill)
        if self.waits_to_wrap(chosen, lengths):
            require(isinstance(refused, SequenceError), f"beams wait for what would be overwritten, but: {refused!r}")
        elif refused is not None and not isinstance(refused, TransferError):
            self.require_no_room(refused, bill + len(chosen) * self.bill.chunk(), exactly=self.bill.is_exact)
        else:
            for shadow, ids, num_blocks, length in zip(chosen, added, wanted, lengths, strict=True):
                shadow.append(ids)
                shadow.num_blocks = num_blocks
                self.wrapped(shadow, length)
        return None

    def foreseen_growth(self, shadow: Shadow, columns: int, length: int) -> Counts:
        """Return the blocks that growing takes; it is what the manager says when asked."""
        within = min(length, self.config.max_sequence_length)
        bill = self.bill.growth(shadow.num_blocks, max(self.bill.num_columns(within), shadow.num_blocks), within)
        told = self.manager.blocks_needed_next_step(shadow.sequence, lookahead=length - shadow.num_tokens)
        right = told == bill.sum() if self.bill.is_exact else told <= bill.sum()
        require(right, f"{shadow.sequence!r} needs {bill} blocks for {length} tokens, {told} were foreseen")
        return self.bill.growth(shadow.num_blocks, columns, length)

    def waits_to_wrap(self, chosen: list[Shadow], lengths: list[int]) -> bool:
        """Say whether a ring would overwrite what beams wait for."""
        leaders = {id(beam.leader) for beam in self.live if beam.leader is not None}
        return any(
            id(shadow) in leaders and length > max(self.bill.max_ring_tokens, shadow.num_tokens)
            for shadow, length in zip(chosen, lengths, strict=True)
        )

    # -- computing ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.running())
    @rule(picks=some, left=lefts, by_rows=st.booleans())
    def compute(self, picks: int, left: int, by_rows: bool) -> None:
        """Compute some sequences: all or all but the last few tokens, or, below 0, chunk by chunk as is asked for."""
        chosen = self.pick(picks)
        if left >= 0:
            self.compute_up_to(
                chosen, [max(shadow.num_tokens - left, shadow.num_computed) for shadow in chosen], by_rows
            )
            return
        for shadow in chosen:
            while (stop := self.chunk_end(shadow)) > shadow.num_computed:
                self.compute_up_to([shadow], [stop], by_rows)

    def compute_up_to(self, chosen: list[Shadow], stops: list[int], by_rows: bool) -> None:
        """Write K, V and states of some sequences up to some tokens, as far as one pass goes, and commit them."""
        self.deliver()
        stops = [min(stop, self.last_stop(shadow)) for shadow, stop in zip(chosen, stops, strict=True)]
        for shadow, stop in zip(chosen, stops, strict=True):
            self.mirror(shadow)
            self.write(shadow, stop)
        self.commit(chosen, stops, by_rows)

    def chunk_end(self, shadow: Shadow) -> int:
        """Return up to where a sequence is to be computed next, after getting the blocks for that if it has none."""
        most = shadow.num_tokens - shadow.num_computed
        chunk = self.manager.chunk_limit(shadow.sequence, most)
        if most and not chunk:
            self.grow([shadow], [[]], False, lambda batch: self.manager.reserve(batch, 0))
            chunk = self.manager.chunk_limit(shadow.sequence, most)
        require(bool(self.config.max_chunk_tokens) or chunk > 0 or not most, f"{shadow.sequence!r}: no chunk of {most}")
        require(chunk <= most, f"{shadow.sequence!r}: a chunk of {chunk} tokens, {most} were asked for")
        return min(shadow.num_computed + chunk, self.last_stop(shadow))

    def last_stop(self, shadow: Shadow) -> int:
        """Return how far a pass may compute a sequence: where its windows end, or before its state leaves a prompt."""
        stop = shadow.num_tokens
        if self.config.max_chunk_tokens:
            stop = shadow.num_computed + self.manager.chunk_limit(shadow.sequence, stop - shadow.num_computed)
        waiting = [beam.num_tokens for beam in self.live if beam.leader is shadow]
        return min(stop, waiting[0]) if waiting and self.has_kind("state") else stop

    def commit(self, chosen: list[Shadow], stops: list[int], by_rows: bool) -> None:
        """Commit what has been computed, and note it; where there is room, states are kept."""
        is_all = all(stop == shadow.num_tokens for shadow, stop in zip(chosen, stops, strict=True))
        is_roomy = self.has_room_for_states(len(chosen))
        self.act(lambda: self.manager.commit(named(chosen, by_rows=by_rows), None if is_all else np.array(stops)))
        is_roomy = is_roomy and not (self.memory.has_failed or self.memory_failed)
        for shadow, stop in zip(chosen, stops, strict=True):
            shadow.note_computed(stop, is_roomy=is_roomy)
            self.start_beams(shadow)
        self.count_evictions()

    def start_beams(self, leader: Shadow) -> None:
        """Note that the beams of a prompt that is committed run from now on."""
        for beam in self.live:
            if beam.leader is leader and leader.num_computed >= beam.num_tokens:
                beam.leader = None
                beam.note_computed(beam.num_tokens, is_roomy=False)

    @precondition(lambda self: self.running())
    @rule(picks=some, pattern=patterns, steps=st.integers(1, 6))
    def decode(self, picks: int, pattern: list[int], steps: int) -> None:
        """Take several decode steps with nothing in between that would look at the tree."""
        for step in range(steps):
            self.append_one_each(picks, pattern[step % len(pattern) :] + pattern, by_rows=True)
            self.compute(picks, 0, by_rows=True)

    @precondition(lambda self: self.alone())
    @rule(pick=numbers, pattern=patterns, gaps=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def accept(self, pick: int, pattern: list[int], gaps: list[int]) -> None:
        """Verify a tree of drafts, and accept a path in it: what the sequence has anyway, and a few tokens more."""
        shadow = self.alone()[pick % len(self.alone())]
        start, pending = shadow.num_computed, shadow.num_tokens - shadow.num_computed
        accepted = list(islice(cycle(pattern), len(gaps)))
        nodes = [*range(pending), *(pending + at + sum(gaps[: at + 1]) for at in range(len(gaps)))]
        end = start + nodes[-1] + 1
        if end > self.config.max_sequence_length or end > self.bill.max_ring_tokens or self.has_kind("state"):
            return
        self.grow(
            [shadow],
            [[]],
            False,
            lambda batch: self.manager.reserve(batch, end - shadow.num_tokens),
            end - shadow.num_tokens,
        )
        if shadow.sequence.capacity < end or (self.config.max_chunk_tokens or end) < nodes[-1] + 1:
            return
        ids = [*shadow.prompt.tokens[start:], *accepted]
        if self.manager.chunk_limit(shadow.sequence, nodes[-1] + 1) <= nodes[-1]:
            refused = self.attempt(lambda: self.manager.accept(shadow.sequence, ids, nodes))
            require(isinstance(refused, SequenceError), f"node {nodes[-1]} has no block in a window: {refused!r}")
            return
        self.deliver()
        tokens = [*shadow.symbols, *accepted]
        self.memory.write_tree(shadow.sequence, nodes, tokens=tokens, encoder=shadow.encoder)
        self.act(lambda: self.manager.accept(shadow.sequence, ids, nodes))
        shadow.append(accepted)
        shadow.note_computed(shadow.num_tokens, is_roomy=False)

    @precondition(lambda self: self.running())
    @rule(picks=some)
    def spoil(self, picks: int) -> None:
        """Write nonsense wherever a sequence may write."""
        self.deliver()
        for shadow in self.pick(picks):
            self.memory.spoil(shadow.sequence)
