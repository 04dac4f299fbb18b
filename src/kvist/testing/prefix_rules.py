"""The rules of CacheMachine that match, pin and remove cached content, ask questions, and make calls that are wrong."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvist.core.extents import Namespace
from kvist.core.matching import Pin, PrefixMatch
from kvist.errors import KvistError, OutOfBlocks, SequenceError, StaleMatch, TransferError
from kvist.testing.configs import Draft, drafts, numbers, rare
from kvist.testing.prompts import Prompt
from kvist.testing.refusals import REFUSALS
from kvist.testing.stage import BY_THE_MANAGER, NAMESPACES, Stage, named, require

__all__ = ["PrefixRules"]


class PrefixRules(Stage):
    """What is done to cached content, and what is asked."""

    # -- matching and pinning -----------------------------------------------------------------------------------------

    @rule(draft=drafts, namespace=rare)
    def match_prefix(self, draft: Draft, namespace: bool) -> None:
        """Look a prompt up, and keep the match for later."""
        prompt, space = self.prompt(draft), NAMESPACES[namespace]
        must, may = self.reusable.bounds(space, prompt, self.live)
        match = self.look_up(prompt, space)
        require(must <= match.num_tokens <= may, f"{match} of {prompt}; {must} tokens must be found, {may} may be")
        require(match.num_block_tokens % self.block_size == 0, "a match of whole blocks ends inside one")
        if match.num_block_tokens or not self.matches:
            self.matches = [*self.matches[-3:], (match, prompt)]

    def look_up(self, prompt: Prompt, namespace: Namespace = ()) -> PrefixMatch:
        """Return what the manager finds of a prompt."""
        return self.manager.match_prefix(
            prompt.tokens, namespace=namespace, media=prompt.media, extra_ids=prompt.extra_ids or None
        )

    @precondition(lambda self: self.matches)
    @rule(pick=numbers, lifetime_s=st.sampled_from((None, None, 0.0, 3.0)))
    def pin(self, pick: int, lifetime_s: float | None) -> None:
        """Pin what a match found, if it is still there and the budget allows."""
        match, prompt = self.matches[pick % len(self.matches)]
        _, may = self.reusable.bounds(match.namespace, prompt, self.live)
        num_tokens = match.num_block_tokens
        is_there = not num_tokens or self.reusable.must_have(match.namespace, prompt, num_tokens, self.live)
        pinned = self.attempt(lambda: self.manager.pin(match, lifetime_s=lifetime_s))
        if isinstance(pinned, Pin):
            exact = pinned.num_tokens == num_tokens <= may
            require(exact, f"{match} was pinned with {pinned.num_tokens} tokens; {may} may be found")
            self.pins.append(pinned)
            self.require_budget()
            self.wait(0)
        elif isinstance(pinned, TransferError):
            require(self.memory_failed, f"{match} could not be pinned, though the memory works: {pinned!r}")
        elif isinstance(pinned, OutOfBlocks):
            may_lack = self.config.pin_budget < 1 or bool(self.config.tiers)
            require(may_lack, f"{match} could not be pinned, though there is no budget: {pinned!r}")
        else:
            gone = isinstance(pinned, StaleMatch) and not is_there
            require(gone, f"{match} could not be pinned, though its tokens must be there: {pinned!r}")

    @precondition(lambda self: self.live)
    @rule(pick=numbers, what=st.sampled_from(("evict", "evict", "evict", "drop")))
    def pin_what_may_be_gone(self, pick: int, what: str) -> None:
        """Look up what a sequence has, evict all that can be or forget its namespace, and pin it: gone is refused."""
        shadow = self.live[pick % len(self.live)]
        if not shadow.num_tokens:
            return
        self.matches = [*self.matches[-3:], (self.look_up(shadow.prompt, shadow.namespace), shadow.prompt)]
        self.maintain(what, 63 if what == "evict" else NAMESPACES.index(shadow.namespace))
        self.pin(len(self.matches) - 1, None)

    def require_budget(self) -> None:
        """All pins together hold no more of each group than they may."""
        for stats in self.manager.stats().groups:
            budget = int(self.config.pin_budget * stats.num_blocks)
            require(stats.num_pinned_blocks <= budget, f"{stats}: pins may hold {budget} blocks")

    @precondition(lambda self: self.pins)
    @rule(pick=numbers)
    def release(self, pick: int) -> None:
        """Release a pin."""
        self.pins.pop(pick % len(self.pins)).release()

    # -- removing -----------------------------------------------------------------------------------------------------

    @rule(what=st.sampled_from(("evict", "evict", "wait", "drop", "reset")), n=numbers)
    def maintain(self, what: str, n: int) -> None:
        """Remove cached content by hand, or let time pass: free blocks stay as many, but for pins that expire."""
        self.all_published()
        free = self.manager.num_free_blocks
        if what == "evict":
            self.evict(n)
        elif what == "drop":
            self.drop(NAMESPACES[n % 2])
        elif what == "reset":
            self.reset()
        else:
            self.wait(n / 10)
        now_free, may_grow = self.manager.num_free_blocks, what == "wait"
        require(now_free == free or (may_grow and now_free > free), f"{what} changed what is free or evictable")
        self.count_evictions()

    def wait(self, seconds: float) -> None:
        """Let time pass; pins may expire."""
        self.now_s += seconds
        self.pins = [pin for pin in self.pins if pin.expires_at_s is None or pin.expires_at_s > self.now_s]

    def evict(self, n: int) -> None:
        """Evict some blocks: as many, or with several groups maybe more, as whole positions go."""
        pools = self.manager._state.pools
        cached = self.manager.num_free_blocks - sum(pool.num_free for pool in pools)
        evicted = self.manager.evict(n)
        least, most = min(n, cached), min(n, cached) if self.is_plain else cached
        require(least <= evicted <= most, f"{evicted} blocks were evicted; {n} were asked for, of {cached}")

    def drop(self, namespace: Namespace) -> None:
        """Forget a namespace; what runs in it publishes no more."""
        self.manager.drop(namespace=namespace)
        self.reusable.forget(namespace)
        for shadow in [*self.live, *self.asleep]:
            shadow.publishes = shadow.publishes and shadow.namespace != namespace

    def reset(self) -> None:
        """Forget everything; refused while anything is held."""
        refused = self.attempt(self.manager.reset)
        if self.live or self.pins or self.asleep:
            held = f"{len(self.live)} sequences run, {len(self.asleep)} are suspended, {len(self.pins)} pins hold"
            return require(isinstance(refused, SequenceError), f"{held}, but: {refused!r}")
        for namespace in NAMESPACES:
            self.reusable.forget(namespace)
        self.num_asked = self.num_hit = 0
        return None

    # -- asking -------------------------------------------------------------------------------------------------------

    @rule(draft=drafts)
    def look(self, draft: Draft) -> None:
        """Ask all questions; the answers agree with what is held, and asking changes nothing."""
        digest = self.digest()
        self.require_true_numbers()
        self.require_sharing()
        self.require_true_tables()
        for shadow in self.live:
            self.mirror(shadow)
            require(bool(str(self.manager.explain(shadow.sequence))), "nothing is explained")
        require(bool(str(self.manager.explain(self.prompt(draft).tokens))), "nothing is explained")
        self.look_up(self.prompt(draft))
        require(self.digest() == digest, "looking changed something")

    def require_true_numbers(self) -> None:
        """The statistics are what is held, what runs, and what was asked and hit."""
        stats = self.manager.stats()
        held = [len(blocks) for blocks in self.held_blocks()]
        free = self.manager.num_free_blocks
        require(free == self.manager.num_blocks - sum(held), f"{free} blocks are free, and {held} are held")
        for pool, group in zip(self.config.pool_of, stats.groups, strict=True):
            true = group.num_held_blocks == held[pool] and 0 <= group.usage <= 1
            require(true, f"{group}: {held[pool]} blocks are held")
        found = (stats.num_sequences, stats.num_suspended_now, stats.num_pins)
        expected = (len(self.live), len(self.asleep), len(self.pins))
        require(found == expected, f"{stats}: sequences, suspended ones and pins should be {expected}")
        asked = (stats.num_query_tokens, stats.num_hit_tokens)
        require(asked == (self.num_asked, self.num_hit), f"{stats}: {self.num_asked} asked for, {self.num_hit} hit")

    def require_sharing(self) -> None:
        """Equal content committed by sequences that publish is in one block."""
        for group, spec in enumerate(self.config.groups):
            if spec.kind in ("full", "sliding", "chunked"):
                self.require_sharing_in(group)

    def require_sharing_in(self, group: int) -> None:
        """Equal content committed by sequences that publish is in one block of a group."""
        seen: dict[int, int] = {}
        prefixes = self.memory.prefixes
        for shadow in self.live:
            if not shadow.publishes or shadow.leader is not None:
                continue
            committed = prefixes.along(shadow.namespace, shadow.symbols[: shadow.num_computed])
            ends = committed[self.block_size - 1 :: self.block_size].tolist()
            for prefix, block in zip(ends, shadow.sequence.group_blocks(group).tolist(), strict=False):
                first = seen.setdefault(prefix, block) if block >= 0 else block
                require(first == block, f"blocks {first} and {block} hold {prefixes.describe(prefix)}")

    def require_true_tables(self) -> None:
        """The tables of all running sequences say where each token that is not computed goes."""
        for group, spec in enumerate(self.config.groups):
            if spec.kind in ("full", "sliding", "chunked"):
                self.require_true_table(group)

    def require_true_table(self, group: int) -> None:
        """The table of a group has the blocks of all running sequences, and the slots of what is not computed."""
        running, size = self.running(), self.block_size
        tables = self.manager.tables(named(running, by_rows=True), group=group, padding=-1)
        width = tables.block_table.shape[1]
        slots: list[int] = []
        for row, shadow in enumerate(running):
            blocks = shadow.sequence.group_blocks(group).tolist()
            padded = blocks + [-1] * (width - len(blocks))
            require(tables.block_table[row].tolist() == padded, f"row {row} of the block table should be {padded}")
            places = range(shadow.num_computed, shadow.num_tokens)
            slots += [blocks[at // size] * size + at % size if at // size < len(blocks) else -1 for at in places]
        require(tables.slot_mapping.tolist() == slots, f"slots {tables.slot_mapping.tolist()} should be {slots}")
        lengths = [shadow.num_tokens for shadow in running]
        require(tables.seq_lens.tolist() == lengths, f"lengths {tables.seq_lens.tolist()} should be {lengths}")

    @precondition(lambda self: self.delivery == BY_THE_MANAGER)
    @rule()
    def break_memory(self) -> None:
        """Let the memory fail at the next call that needs copies."""
        self.breaks_next = True

    @rule(which=st.sampled_from(sorted(REFUSALS)), pick=numbers)
    def refuse(self, which: str, pick: int) -> None:
        """Make a call that is wrong: it is refused, and changes nothing."""
        expected, call = REFUSALS[which]
        if (wrong := call(self, pick)) is None:
            return
        digest = self.digest()
        try:
            wrong()
        except expected as error:
            require(isinstance(error, KvistError), f"{which}: {error!r} is no KvistError")
        else:
            raise AssertionError(f"{which}: was not refused")
        require(self.digest() == digest, f"{which}: was refused, and changed something")
