"""The rules of CacheMachine that admit, grow, commit, take back, branch and end sequences."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, islice

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvist.core.extents import Namespace
from kvist.core.retention import Retention
from kvist.core.sequences import Sequence, Sequences
from kvist.errors import KvistError, NeverFits, OutOfRows, SequenceError
from kvist.testing.configs import (
    Draft,
    Keeping,
    drafts,
    few_beams,
    keepings,
    lefts,
    numbers,
    often,
    patterns,
    rare,
    some,
)
from kvist.testing.model import Shadow, blocks_for
from kvist.testing.stage import NAMESPACES, Stage, named, require

__all__ = ["SequenceRules"]


class SequenceRules(Stage):
    """What is done to sequences. A rule makes the call, says which outcomes are right, and notes them in the model."""

    # -- admission ----------------------------------------------------------------------------------------------------

    @rule(
        draft=drafts,
        namespace=rare,
        beams=few_beams,
        reuse=often,
        publish=often,
        keeping=keepings,
        make_room=st.integers(0, 3).map(bool),
    )
    def admit(
        self, draft: Draft, namespace: bool, beams: int, reuse: bool, publish: bool, keeping: Keeping, make_room: bool
    ) -> None:
        """Add a prompt that begins as an earlier one does; what the forecast said must come true."""
        prompt = self.prompt(draft)
        if make_room:
            self.make_room(blocks_for(len(prompt), self.block_size) + beams - 1, beams)
        space, forecast = NAMESPACES[namespace], None
        if self.num_calls % 2:
            self.all_published()
            forecast = self.manager.forecast().fits(prompt, namespace=space, reuse=reuse, num_beams=beams)
        added = self.add(prompt, space, beams, reuse, publish, self.retention(keeping))
        require(forecast in (None, added), f"the forecast was {forecast} for {len(prompt)} tokens, not {added}")

    def add(
        self,
        prompt: list[int],
        namespace: Namespace = (),
        beams: int = 1,
        reuse: bool = True,
        publish: bool = True,
        retention: Retention | None = None,
    ) -> bool:
        """Add a prompt, or prove that there is no room for it; say which."""
        must, may = self.reusable.bounds(namespace, prompt, self.live) if reuse else (0, 0)
        added = self.allocate(
            lambda: self.manager.add_sequence(
                np.array(prompt, np.int32),
                namespace=namespace,
                retention=retention,
                reuse=reuse,
                publish=publish,
                num_beams=beams,
            )
        )
        if isinstance(added, KvistError):
            self.require_true_refusal(added, len(prompt), beams)
            return False
        cached = added.num_cached_tokens
        require(must <= cached <= may, f"{cached} tokens of {prompt} were reused; {must} must be, {may} may be")
        self.admitted(added, prompt, publish)
        return True

    def require_true_refusal(self, error: KvistError, num_tokens: int, beams: int) -> None:
        """A prompt is refused for the reason given, and only for that."""
        full, rest = divmod(num_tokens, self.block_size)
        needed, config = full + (beams if rest else 0), self.config
        too_long = num_tokens > config.max_sequence_length or needed > self.manager.num_blocks
        if too_long or beams > config.max_sequences:
            require(isinstance(error, NeverFits), f"{num_tokens} tokens in {beams} beams never fit, but: {error!r}")
        elif len(self.live) + beams > config.max_sequences:
            require(
                isinstance(error, OutOfRows), f"{len(self.live)} of {config.max_sequences} rows run, but: {error!r}"
            )
        else:
            self.require_no_room(error, needed)

    def admitted(self, sequence: Sequence, prompt: list[int], publish: bool) -> None:
        """Note a new sequence and its beams."""
        self.num_asked += len(prompt)
        self.num_hit += sequence.num_cached_tokens
        self.prompts.append(prompt)
        num_blocks, publishes = blocks_for(len(prompt), self.block_size), publish and self.config.reuse
        first = Shadow(sequence, prompt, sequence.num_cached_tokens, num_blocks, publishes)
        self.live.append(first)
        for beam in sequence.beams[1:]:
            self.live.append(Shadow(beam, list(prompt), 0, num_blocks, publishes, leader=first))

    @rule(draft=drafts, namespace=rare, beams=few_beams, publish=often, keeping=keepings, left=lefts)
    def prefill(
        self, draft: Draft, namespace: bool, publish: bool, keeping: Keeping, beams: int = 1, left: int = 0
    ) -> None:
        """Add a prompt and compute it, all or all but the last few tokens."""
        prompt, retention = self.prompt(draft), self.retention(keeping)
        self.make_room(blocks_for(len(prompt), self.block_size) + beams - 1, beams)
        if self.add(prompt, NAMESPACES[namespace], beams, publish=publish, retention=retention):
            self.compute(1 << len(self.running()) - 1, left, by_rows=False)

    @rule(draft=drafts, namespace=rare, steps=st.integers(0, 4), keeping=keepings)
    def serve(self, draft: Draft, namespace: bool, steps: int, keeping: Keeping) -> None:
        """Take a request from beginning to end."""
        before = list(self.live)
        self.prefill(draft, namespace, publish=True, keeping=keeping)
        if self.live and self.live[-1] not in before:
            self.decode(1 << len(self.running()) - 1, draft[2], steps)
            self.free(len(self.live) - 1, publish=True)

    def make_room(self, num_blocks: int, num_rows: int) -> None:
        """End the oldest sequences until so many blocks and rows are free."""

        def has_room() -> bool:
            free_blocks = self.manager.num_blocks - len(self.held_blocks())
            return free_blocks >= num_blocks and self.config.max_sequences - len(self.live) >= num_rows

        while self.live and not has_room():
            self.free(0, publish=True)

    def retention(self, keeping: Keeping) -> Retention | None:
        """Return the retention of a prompt whose first blocks are kept so."""
        size = self.block_size
        ranges = [(at * size, (at + 1) * size, *keep) for at, keep in enumerate(keeping)]
        return Retention(ranges, *keeping[-1]) if keeping else None

    # -- growth -------------------------------------------------------------------------------------------------------

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
        lengths = [len(shadow.tokens) + len(ids) + reserved for shadow, ids in zip(chosen, added, strict=True)]
        wanted = [
            max(shadow.num_blocks, blocks_for(length, self.block_size))
            for shadow, length in zip(chosen, lengths, strict=True)
        ]
        for shadow, length in zip(chosen, lengths, strict=True):
            self.require_foreseen_growth(shadow, length)
        refused = self.allocate(lambda: call(named(chosen, by_rows=by_rows)))
        if max(lengths) > self.config.max_sequence_length:
            require(isinstance(refused, NeverFits), f"{max(lengths)} tokens never fit, but: {refused!r}")
        elif refused is not None:
            self.require_no_room(refused, sum(wanted) - sum(shadow.num_blocks for shadow in chosen), exactly=True)
        else:
            for shadow, ids, num_blocks in zip(chosen, added, wanted, strict=True):
                shadow.tokens += ids
                shadow.num_blocks = num_blocks

    def require_foreseen_growth(self, shadow: Shadow, length: int) -> None:
        """The blocks that growing to a length needs are what the manager says when asked."""
        within = min(length, self.config.max_sequence_length)
        needed = max(blocks_for(within, self.block_size) - shadow.num_blocks, 0)
        told = self.manager.blocks_needed_next_step(shadow.sequence, lookahead=length - len(shadow.tokens))
        require(told == needed, f"{shadow.sequence!r} needs {needed} blocks for {length} tokens, {told} were foreseen")

    @precondition(lambda self: self.running())
    @rule(picks=some, left=lefts, by_rows=st.booleans())
    def compute(self, picks: int, left: int, by_rows: bool) -> None:
        """Write K and V of some sequences, all or all but the last few tokens, and commit them."""
        chosen = self.pick(picks)
        self.deliver()
        stops = [max(len(shadow.tokens) - left, shadow.num_computed) for shadow in chosen]
        for shadow, stop in zip(chosen, stops, strict=True):
            self.mirror(shadow)
            self.memory.write(shadow.sequence, shadow.num_computed, stop)
        self.manager.commit(named(chosen, by_rows=by_rows), np.array(stops) if left else None)
        for shadow, stop in zip(chosen, stops, strict=True):
            shadow.num_computed = stop
            self.start_beams(shadow)
        self.called()

    def start_beams(self, leader: Shadow) -> None:
        """Note that the beams of a prompt that is committed run from now on."""
        for beam in self.live:
            if beam.leader is leader and leader.num_computed >= len(beam.tokens):
                beam.leader, beam.num_computed = None, len(beam.tokens)

    @precondition(lambda self: self.running())
    @rule(picks=some, pattern=patterns, steps=st.integers(1, 6))
    def decode(self, picks: int, pattern: list[int], steps: int) -> None:
        """Take several decode steps with nothing in between that would look at the tree."""
        for step in range(steps):
            self.append_one_each(picks, pattern[step % len(pattern) :] + pattern, by_rows=True)
            self.compute(picks, 0, by_rows=True)

    @precondition(lambda self: self.running())
    @rule(picks=some)
    def spoil(self, picks: int) -> None:
        """Write nonsense wherever a sequence may write."""
        self.deliver()
        for shadow in self.pick(picks):
            self.memory.spoil(shadow.sequence)

    # -- taking back, branching, ending -------------------------------------------------------------------------------

    @precondition(lambda self: self.alone())
    @rule(pick=numbers, n=numbers)
    def rewind(self, pick: int, n: int) -> None:
        """Take tokens back, often across a block boundary."""
        shadow = self.alone()[pick % len(self.alone())]
        left = len(shadow.tokens) - n % (len(shadow.tokens) + 1)
        refused = self.attempt(lambda: self.manager.rewind(shadow.sequence, len(shadow.tokens) - left))
        if refused is not None:
            return self.require_no_room(refused, 1, exactly=True)
        self.reusable.rewind(shadow, left)
        self.count_evictions()  # only now: the copy may have evicted what the sequence has just let go
        shadow.tokens = shadow.tokens[:left]
        shadow.num_computed = min(shadow.num_computed, left)
        shadow.num_blocks = blocks_for(left, self.block_size)
        return None

    @precondition(lambda self: self.alone())
    @rule(pick=numbers, n=st.integers(0, 3), again=st.booleans())
    def fork(self, pick: int, n: int, again: bool) -> None:
        """Branch a sequence, and perhaps the branch, before anything is copied."""
        shadow = self.alone()[pick % len(self.alone())]
        if self.branch(shadow, n) and again and n:
            self.branch(self.live[-1], 1)

    def branch(self, shadow: Shadow, n: int) -> bool:
        """Fork a sequence n times, or prove that it cannot be; say which."""
        forked = self.allocate(lambda: self.manager.fork(shadow.sequence, n))
        private, num_free_rows = self.num_private(shadow), self.config.max_sequences - len(self.live)
        if n > num_free_rows:
            require(isinstance(forked, OutOfRows | NeverFits), f"{num_free_rows} rows are free, but: {forked!r}")
        elif private > 1:
            require(isinstance(forked, SequenceError), f"{private} blocks are not committed, but: {forked!r}")
        elif isinstance(forked, KvistError):
            self.require_no_room(forked, n * private, exactly=True)
        else:
            require(len(forked) == n, f"{len(forked)} forks, {n} were asked for")
            for child in forked:
                self.live.append(Shadow.of(child, shadow, blocks_for(len(shadow.tokens), self.block_size)))
        return not isinstance(forked, KvistError)

    @precondition(lambda self: len(self.alone()) > 1)
    @rule(picks=some, seeds=st.lists(numbers, min_size=6, max_size=6))
    def reorder(self, picks: int, seeds: list[int]) -> None:
        """Let beams go on from each other."""
        chosen = [shadow for shadow in self.pick(picks) if shadow in self.alone()]
        chosen = [shadow for shadow in chosen if shadow.namespace == chosen[0].namespace]
        parents = [seed % len(chosen) for seed, _ in zip(seeds, chosen, strict=False)]
        refused = self.attempt(lambda: self.manager.reorder([shadow.sequence for shadow in chosen], parents))
        heirs = {parent: parent if parents[parent] == parent else parents.index(parent) for parent in parents}
        copied = [self.num_private(chosen[parent]) for at, parent in enumerate(parents) if heirs[parent] != at]
        if max(copied, default=0) > 1:
            require(isinstance(refused, SequenceError), f"blocks are not committed, but: {refused!r}")
        elif refused is not None:
            self.require_no_room(refused, sum(copied))
        else:
            self.reordered(chosen, parents, heirs)

    def reordered(self, chosen: list[Shadow], parents: list[int], heirs: dict[int, int]) -> None:
        """Note what beams are now: the heir of each parent has all its blocks, others those with tokens.

        What they were is published first, and may then be evicted by the same call.
        """
        for shadow in chosen:
            self.reusable.publish(shadow)
            self.reusable.leave(shadow, publish=False)
        self.count_evictions()
        before = [Shadow.of(shadow.sequence, shadow, shadow.num_blocks) for shadow in chosen]
        for at, parent in enumerate(parents):
            if at != parent:
                whole, origin = heirs[parent] == at, before[parent]
                num_blocks = origin.num_blocks if whole else blocks_for(len(origin.tokens), self.block_size)
                chosen[at].take_over(origin, num_blocks)

    @precondition(lambda self: self.live)
    @rule(pick=numbers, publish=often)
    def free(self, pick: int, publish: bool) -> None:
        """End a sequence; a beam that others wait for hands what is computed to the first of them."""
        shadow = self.live.pop(pick % len(self.live))
        self.prompts.append(shadow.tokens)
        self.manager.free(shadow.sequence, publish=publish)
        waiting = [beam for beam in self.live if beam.leader is shadow]
        if waiting:
            self.inherit(waiting, shadow)
        else:
            self.reusable.leave(shadow, publish=publish)
        require(not shadow.sequence.is_live and shadow.sequence.row == -1, "a freed sequence still has a row")
        self.ended = [*self.ended[-3:], shadow.sequence]
        self.called()

    def inherit(self, waiting: list[Shadow], leader: Shadow) -> None:
        """Note that the first beam that waits for a leader takes its place, with the prompt alone."""
        heir = waiting[0]
        heir.num_computed, heir.num_blocks = leader.num_computed, blocks_for(len(heir.tokens), self.block_size)
        heir.num_surely_published = leader.num_surely_published
        for beam in waiting:
            beam.leader = heir if beam is not heir else None

    # -- forecasts ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.alone())
    @rule(picks=some, draft=drafts, n=st.integers(0, 3))
    def foresee(self, picks: int, draft: Draft, n: int) -> None:
        """Forecast that some sequences end, and one grows or a prompt is added; then do it, and compare."""
        ending = [shadow for shadow in self.pick(picks) if shadow in self.alone()]
        prompt, growing = self.prompt(draft), ending.pop() if ending and n else None
        forecast = self.manager.forecast()
        try:
            for shadow in ending:
                forecast.release(shadow.sequence)
            _ = forecast.append(growing.sequence, n) if growing else forecast.add(prompt)
        except KvistError:
            return
        for shadow in ending:
            self.free(self.live.index(shadow), publish=bool(n % 2))
        if growing:
            self.grow([growing], [[0] * n], False, lambda batch: self.manager.append(batch, [[0] * n]))
        else:
            self.add(prompt)
        free_blocks, free_rows = self.manager.num_free_blocks, self.config.max_sequences - len(self.live)
        require(free_blocks == forecast.free_blocks, f"{forecast.free_blocks} blocks forecast, {free_blocks} are free")
        require(free_rows == forecast.free_rows, f"{forecast.free_rows} rows forecast, {free_rows} are free")
