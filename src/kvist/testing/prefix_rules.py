"""The rules of CacheMachine that match, pin and remove cached content, ask questions, and make calls that are wrong."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvist.core.extents import Namespace
from kvist.core.matching import Pin
from kvist.errors import KvistError, SequenceError, StaleMatch
from kvist.testing.configs import Draft, drafts, numbers, rare
from kvist.testing.refusals import REFUSALS
from kvist.testing.stage import NAMESPACES, Stage, named, require

__all__ = ["PrefixRules"]


class PrefixRules(Stage):
    """What is done to cached content, and what is asked."""

    # -- matching and pinning -----------------------------------------------------------------------------------------

    @rule(draft=drafts, namespace=rare)
    def match_prefix(self, draft: Draft, namespace: bool) -> None:
        """Look a prompt up, and keep the match for later."""
        prompt, space = self.prompt(draft), NAMESPACES[namespace]
        must, may = self.reusable.bounds(space, prompt, self.live)
        match = self.manager.match_prefix(prompt, namespace=space)
        require(must <= match.num_tokens <= may, f"{match} of {prompt}; {must} tokens must be found, {may} may be")
        require(match.num_block_tokens % self.block_size == 0, "a match of whole blocks ends inside one")
        if match.num_block_tokens or not self.matches:
            self.matches = [*self.matches[-3:], match]

    @precondition(lambda self: self.matches)
    @rule(pick=numbers)
    def pin(self, pick: int) -> None:
        """Pin what a match found, if it is still there."""
        match = self.matches[pick % len(self.matches)]
        prompt = [*np.frombuffer(match.tokens, np.int32).tolist(), 0]
        must, may = self.reusable.bounds(match.namespace, prompt, self.live)
        pinned = self.attempt(lambda: self.manager.pin(match))
        if isinstance(pinned, Pin):
            exact = pinned.num_tokens == match.num_block_tokens <= may
            require(exact, f"{match} was pinned with {pinned.num_tokens} tokens; {may} may be found")
            self.pins.append(pinned)
        else:
            gone = isinstance(pinned, StaleMatch) and must < match.num_block_tokens
            require(gone, f"{match} could not be pinned, though {must} tokens must be there: {pinned!r}")

    @precondition(lambda self: self.pins)
    @rule(pick=numbers)
    def release(self, pick: int) -> None:
        """Release a pin."""
        self.pins.pop(pick % len(self.pins)).release()

    # -- removing -----------------------------------------------------------------------------------------------------

    @rule(what=st.sampled_from(("evict", "evict", "wait", "drop", "reset")), n=numbers)
    def maintain(self, what: str, n: int) -> None:
        """Remove cached content by hand, or let time pass: free blocks stay as many."""
        self.all_published()
        free = self.manager.num_free_blocks
        if what == "evict":
            self.evict(n)
        elif what == "drop":
            self.drop(NAMESPACES[n % 2])
        elif what == "reset":
            self.reset()
        self.now_s += n / 10
        require(self.manager.num_free_blocks == free, f"{what} changed what is free or evictable")
        self.count_evictions()

    def evict(self, n: int) -> None:
        """Evict some blocks."""
        cached = self.manager.num_free_blocks - self.manager._state.pools[0].num_free
        evicted = self.manager.evict(n)
        require(evicted == min(n, cached), f"{evicted} blocks were evicted; {n} were asked for, of {cached}")

    def drop(self, namespace: Namespace) -> None:
        """Forget a namespace; what runs in it publishes no more."""
        self.manager.drop(namespace=namespace)
        self.reusable.forget(namespace)
        for shadow in self.live:
            shadow.publishes = shadow.publishes and shadow.namespace != namespace

    def reset(self) -> None:
        """Forget everything; refused while anything is held."""
        refused = self.attempt(self.manager.reset)
        if self.live or self.pins:
            held = f"{len(self.live)} sequences run, {len(self.pins)} pins hold"
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
        require(bool(str(self.manager.explain(self.prompt(draft)))), "nothing is explained")
        self.manager.match_prefix(self.prompt(draft))
        require(self.digest() == digest, "looking changed something")

    def require_true_numbers(self) -> None:
        """The statistics are what is held, what runs, and what was asked and hit."""
        stats, num_held = self.manager.stats(), len(self.held_blocks())
        free = self.manager.num_free_blocks
        require(free == self.manager.num_blocks - num_held, f"{free} blocks are free, and {num_held} are held")
        require(stats.num_held_blocks == num_held and 0 <= stats.usage <= 1, f"{stats}: {num_held} blocks are held")
        found = (stats.num_sequences, stats.num_pins, stats.num_query_tokens, stats.num_hit_tokens)
        expected = (len(self.live), len(self.pins), self.num_asked, self.num_hit)
        require(found == expected, f"{stats}: sequences, pins, tokens asked and hit should be {expected}")

    def require_sharing(self) -> None:
        """Equal content committed by sequences that publish is in one block."""
        seen: dict[int, int] = {}
        prefixes = self.memory.prefixes
        for shadow in self.live:
            if not shadow.publishes or shadow.leader is not None:
                continue
            committed = prefixes.along(shadow.namespace, shadow.tokens[: shadow.num_computed])
            ends = committed[self.block_size - 1 :: self.block_size].tolist()
            for prefix, block in zip(ends, shadow.sequence.block_ids.tolist(), strict=False):
                first = seen.setdefault(prefix, block)
                require(first == block, f"blocks {first} and {block} hold {prefixes.describe(prefix)}")

    def require_true_tables(self) -> None:
        """The tables of all running sequences say where each token that is not computed goes."""
        running, size = self.running(), self.block_size
        tables = self.manager.tables(named(running, by_rows=True), padding=-1)
        width = tables.block_table.shape[1]
        slots: list[int] = []
        for row, shadow in enumerate(running):
            blocks = shadow.sequence.block_ids.tolist()
            padded = blocks + [-1] * (width - len(blocks))
            require(tables.block_table[row].tolist() == padded, f"row {row} of the block table should be {padded}")
            places = range(shadow.num_computed, len(shadow.tokens))
            slots += [blocks[at // size] * size + at % size for at in places]
        require(tables.slot_mapping.tolist() == slots, f"slots {tables.slot_mapping.tolist()} should be {slots}")
        lengths = [len(shadow.tokens) for shadow in running]
        require(tables.seq_lens.tolist() == lengths, f"lengths {tables.seq_lens.tolist()} should be {lengths}")

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
