"""The rules of CacheMachine that take tokens back, branch, suspend and end sequences."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvist.errors import KvistError, NeverFits, OutOfRows, SequenceError, TransferError
from kvist.testing.bills import Counts
from kvist.testing.configs import numbers, often, some
from kvist.testing.model import Shadow
from kvist.testing.stage import Stage, require

__all__ = ["BranchRules"]


class BranchRules(Stage):
    """How sequences step back, branch, sleep and end. A rule makes the call, says what is right, and notes it."""

    @precondition(lambda self: self.alone())
    @rule(pick=numbers, n=numbers)
    def rewind(self, pick: int, n: int) -> None:
        """Take tokens back, often across a block boundary; what windows or states lack then is to be computed again."""
        shadow = self.alone()[pick % len(self.alone())]
        left = shadow.num_tokens - n % (shadow.num_tokens + 1)
        refused = self.attempt(lambda: self.manager.rewind(shadow.sequence, shadow.num_tokens - left))
        if shadow.ends_inside_media(left):
            return require(isinstance(refused, SequenceError), f"{left} tokens end inside media, but: {refused!r}")
        if refused is not None and not isinstance(refused, TransferError):
            return self.require_not_rewound(shadow, left, refused)
        self.reusable.rewind(shadow, left)
        self.count_evictions()  # only now: the copy may have evicted what the sequence has just let go
        self.rewound(shadow, left)
        return None

    def require_not_rewound(self, shadow: Shadow, left: int, error: KvistError) -> None:
        """A sequence cannot step back inside a shared block without a copy, nor begin again without the blocks."""
        if self.reusable.can_step_back(shadow, min(left, shadow.num_computed)):
            self.require_no_room(error, self.bill.growth(0, 1, 0), exactly=self.bill.is_exact)
        else:
            self.require_no_room(error, self.bill.prompt(left) + self.bill.growth(0, 1, 0))

    def rewound(self, shadow: Shadow, left: int) -> None:
        """Note what is left of a sequence that stepped back, and how much of that is still computed."""
        wanted, computed = min(shadow.num_computed, left), shadow.sequence.num_computed_tokens
        surely = wanted if self.reusable.can_step_back(shadow, wanted) else 0
        shadow.rewind(left, computed)
        if computed < surely or not surely:
            shadow.num_reused, shadow.num_evictions = computed, self.reusable.num_evictions
        shadow.num_blocks = self.bill.num_columns(left)
        must, _ = self.reusable.bounds(shadow.namespace, shadow.prompt, [], wanted)
        must = must if shadow.reuses else 0
        least = max(surely, must)
        require(least <= computed <= wanted, f"{shadow.sequence!r}: should have {least} to {wanted} computed tokens")

    @precondition(lambda self: self.alone())
    @rule(pick=numbers, n=st.integers(0, 3), again=st.booleans())
    def fork(self, pick: int, n: int, again: bool) -> None:
        """Branch a sequence, and perhaps the branch, before anything is copied."""
        shadow = self.alone()[pick % len(self.alone())]
        if self.branch(shadow, n) and again and n:
            self.branch(self.live[-1], 1)

    def branch(self, shadow: Shadow, n: int) -> bool:
        """Fork a sequence n times, or prove that it cannot be; say which."""
        bill = self.copies(shadow, n)
        forked = self.allocate(lambda: self.manager.fork(shadow.sequence, n), bill)
        if n > self.num_free_rows():
            require(isinstance(forked, OutOfRows | NeverFits), f"{self.num_free_rows()} rows are free: {forked!r}")
        elif not self.can_be_copied(shadow):
            require(isinstance(forked, SequenceError), f"{shadow.sequence!r} is not committed, but: {forked!r}")
        elif isinstance(forked, TransferError):
            return False
        elif isinstance(forked, KvistError):
            self.require_no_room(forked, bill, exactly=self.bill.is_exact)
        else:
            require(len(forked) == n, f"{len(forked)} forks, {n} were asked for")
            for child in forked:
                self.live.append(Shadow.of(child, shadow, self.bill.num_columns(shadow.num_tokens)))
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
        copied = [chosen[parent] for at, parent in enumerate(parents) if heirs[parent] != at]
        bills = [self.copies(each, 1) for each in copied]
        if not all(map(self.can_be_copied, copied)):
            require(isinstance(refused, SequenceError), f"blocks are not committed, but: {refused!r}")
        elif refused is not None and not isinstance(refused, TransferError):
            self.require_no_room(refused, sum(bills, self.bill.growth(0, 0, 0)))
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
                num_blocks = origin.num_blocks if whole else self.bill.num_columns(origin.num_tokens)
                chosen[at].take_over(origin, num_blocks)

    # -- ending and sleeping ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.live)
    @rule(pick=numbers, publish=often)
    def free(self, pick: int, publish: bool) -> None:
        """End a sequence; a beam that others wait for hands what is computed to the first of them."""
        shadow = self.live.pop(pick % len(self.live))
        self.act(lambda: self.manager.free(shadow.sequence, publish=publish))
        self.note_end(shadow, publish=publish)

    def note_end(self, shadow: Shadow, *, publish: bool) -> None:
        """Note that a sequence has ended."""
        self.prompts.append(shadow.prompt)
        waiting = [beam for beam in self.live if beam.leader is shadow]
        if waiting:
            self.inherit(waiting, shadow)
        else:
            self.reusable.leave(shadow, publish=publish)
        self.count_evictions()
        self.ended_well(shadow)

    def ended_well(self, shadow: Shadow) -> None:
        """Prove that a sequence has no row any more, and keep it to be used wrongly."""
        require(not shadow.sequence.is_live and shadow.sequence.row == -1, "a freed sequence still has a row")
        self.ended = [*self.ended[-3:], shadow.sequence]

    def inherit(self, waiting: list[Shadow], leader: Shadow) -> None:
        """Note that the first beam that waits for a leader takes its place, with the prompt alone."""
        heir = waiting[0]
        heir.num_computed, heir.num_blocks = leader.num_computed, self.bill.num_columns(heir.num_tokens)
        heir.num_surely_published = leader.num_surely_published
        heir.landed, heir.roomy = set(leader.landed), set(leader.roomy)
        for beam in waiting:
            beam.leader = heir if beam is not heir else None

    @precondition(lambda self: self.alone())
    @rule(pick=numbers)
    def suspend(self, pick: int) -> None:
        """Let a sequence give up its row and its blocks; its contents stay as if it had ended."""
        shadow = self.alone()[pick % len(self.alone())]
        self.act(lambda: self.manager.suspend(shadow.sequence))
        self.live.remove(shadow)
        self.asleep.append(shadow)
        self.reusable.leave(shadow, publish=True)
        self.count_evictions()
        require(shadow.sequence.is_suspended and shadow.sequence.row == -1, f"{shadow.sequence!r}: is not suspended")

    @precondition(lambda self: self.asleep)
    @rule(pick=numbers, make_room=st.booleans())
    def resume(self, pick: int, make_room: bool) -> None:
        """Let a suspended sequence go on, and compute again what was evicted meanwhile."""
        shadow = self.asleep[pick % len(self.asleep)]
        num_encoder_tokens = shadow.num_encoder_tokens
        bill = self.bill.prompt(shadow.num_tokens, 1, num_encoder_tokens)
        if make_room:
            self.make_room(bill, 1)
        must, may = self.reusable.bounds(shadow.namespace, shadow.prompt, self.live, shadow.num_computed)
        must = self.surely(must, bill) if shadow.reuses else 0
        if self.config.max_chunk_tokens and not self.has_unused(bill):
            must = 0  # a window's cached blocks may take the room that a chunk from the start does not need
        num_computed = shadow.num_computed
        resumed = self.allocate(lambda: self.manager.resume(shadow.sequence), bill)
        if isinstance(resumed, KvistError) and not isinstance(resumed, TransferError):
            self.require_not_resumed(shadow, resumed, bill)
        else:
            self.resumed(shadow, must, may)
            lost = num_computed - shadow.num_computed
            right = isinstance(resumed, TransferError) or resumed == lost
            require(right, f"{shadow.sequence!r}: {lost} computed tokens are lost, not {resumed}")

    def require_not_resumed(self, shadow: Shadow, error: KvistError, bill: Counts) -> None:
        """A sequence that cannot be resumed stays suspended, and for a reason."""
        require(shadow.sequence.is_suspended, f"{shadow.sequence!r}: is not suspended any more after {error!r}")
        if not self.num_free_rows():
            require(isinstance(error, OutOfRows), f"no row is free, but: {error!r}")
        else:
            self.require_no_room(error, bill)

    def resumed(self, shadow: Shadow, must: int, may: int) -> None:
        """Note that a sequence runs again, and let its encoder run again."""
        computed = shadow.sequence.num_computed_tokens
        require(must <= computed <= may, f"{shadow.sequence!r}: {must} computed tokens must be found, {may} may be")
        self.asleep.remove(shadow)
        self.live.append(shadow)
        shadow.rewind(shadow.num_tokens, computed)
        shadow.num_blocks = self.bill.num_columns(shadow.num_tokens)
        shadow.num_surely_published = computed // self.block_size * self.block_size
        shadow.roomy, shadow.seen_version = set(), -1
        shadow.num_reused, shadow.num_evictions = computed, self.reusable.num_evictions
        if shadow.num_encoder_tokens:
            self.encode(shadow)

    @precondition(lambda self: self.asleep)
    @rule(pick=numbers)
    def free_asleep(self, pick: int) -> None:
        """End a sequence that is suspended."""
        shadow = self.asleep.pop(pick % len(self.asleep))
        self.prompts.append(shadow.prompt)
        self.act(lambda: self.manager.free(shadow.sequence))
        self.ended_well(shadow)

    def make_room(self, bill: Counts, num_rows: int) -> None:
        """End the oldest sequences until so many blocks and rows are free."""

        def has_room() -> bool:
            return bool((self.available() >= bill).all()) and self.num_free_rows() >= num_rows

        while self.live and not has_room():
            self.free(0, publish=True)
