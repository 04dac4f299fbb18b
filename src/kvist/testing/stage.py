"""What the rules of CacheMachine stand on: the manager, what is kept beside it, and the proofs after every step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from kvist.config import CacheConfig
from kvist.core.contents import Contents, contents_of
from kvist.core.events import Event, Moved, Stored
from kvist.core.extents import Namespace
from kvist.core.lower import DEVICE, HOST
from kvist.core.matching import Pin, PrefixMatch
from kvist.core.sequences import Sequence, Sequences
from kvist.core.state import PinHold
from kvist.errors import KvistError, OutOfBlocks, OutOfRows, TransferError
from kvist.event_log import Subscription
from kvist.manager import KVCacheManager
from kvist.testing.bills import Bill, Counts
from kvist.testing.configs import Draft, cache_configs, rare
from kvist.testing.faulty_memory import FaultyMemory
from kvist.testing.model import Reusable, Shadow
from kvist.testing.prompts import Prompt

__all__ = ["BEFORE_EACH_WRITE", "NAMESPACES", "Stage", "named", "require"]

Result = TypeVar("Result")

MAX_MADE = 4
"""A memory that fails has made fewer copies than that of those that were ordered together."""
NAMESPACES: tuple[Namespace, ...] = ((), ("tenant", 1))
BY_THE_MANAGER, AFTER_EACH_CALL, BEFORE_EACH_WRITE = "by the manager", "after each call", "before each write"


class Stage(RuleBasedStateMachine):
    """A manager with its oracle and its model; rules act on it, invariants judge it.

    `live` are the sequences that run or wait, oldest first; `prompts` what others may begin as. Copies are made by the
    manager itself, by hand after each call, or by hand as late as a forward pass allows.
    """

    configs: ClassVar[st.SearchStrategy[CacheConfig]] = cache_configs()
    deliveries: ClassVar[tuple[str, ...]] = (BY_THE_MANAGER, AFTER_EACH_CALL, BEFORE_EACH_WRITE)

    def __init__(self) -> None:
        super().__init__()
        self.live: list[Shadow] = []
        self.asleep: list[Shadow] = []
        self.ended: list[Sequence] = []
        self.prompts: list[Prompt] = [Prompt()]
        self.pins: list[Pin] = []
        self.matches: list[tuple[PrefixMatch, Prompt]] = []
        self.breaks_next = self.memory_failed = False
        self.num_calls = self.num_evicted = self.num_asked = self.num_hit = self.num_encoders = 0
        self.now_s = 0.0
        self._outer_error = sys.exc_info()[1]

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        """Make a manager and what is kept beside it."""
        self.config = data.draw(self.configs, label="config")
        self.delivery = data.draw(st.sampled_from(self.deliveries), label="copies are made")
        self.block_size = self.config.block_size
        self.breaks_next = data.draw(rare, label="the memory is to fail")
        self.bill = Bill(self.config)
        self.is_plain = [group.kind for group in self.config.groups] == ["full"]
        self.memory = FaultyMemory(self.config)
        memory = self.memory if self.delivery == BY_THE_MANAGER else None
        self.manager = self.memory.attach(KVCacheManager(self.config, memory, clock=lambda: self.now_s))
        self.made()
        self.reusable = Reusable(
            self.memory.prefixes, self.config, self.bill.max_ring_tokens, has_bubble=self.bill.bubble > 0
        )

        self.contents = Contents()

    def made(self) -> None:
        """Watch the manager from before its first call on, in machines that do."""

    # -- proofs -------------------------------------------------------------------------------------------------------

    @invariant()
    def the_books_are_right(self) -> None:
        """Prove the manager's invariants."""
        self.manager.check()

    @invariant()
    def events_tell_what_is_cached(self) -> None:
        """Fold the events that have come, published or not, and compare with what is in the trees."""
        recorder = self.manager._state.recorder
        if recorder is None:
            return
        events = [*Subscription.poll(self.manager.events), *recorder.take()]
        for event in events:
            self.every_parent_is_there(event)
            require(self.contents.follow([event]), "an event is missing")
        actual = contents_of(self.manager._state)
        told, found = self.contents.blocks, actual.blocks
        require(self.contents.digest() == actual.digest(), f"events tell {told}, cached are {found}")
        self.events_told(events, actual)

    def every_parent_is_there(self, event: Event) -> None:
        """Prove of blocks that are stored that a group which keeps everything has the block before them.

        Where that group has them itself, the one before is in the same tier or a faster one.
        """
        full = [group for group, spec in enumerate(self.config.groups) if spec.kind == "full"]
        if not full or not isinstance(event, Stored | Moved) or event.parent is None:
            return
        tiers = (DEVICE,) if (event.group in full and event.tier == DEVICE) else (DEVICE, HOST)
        places = self.contents.blocks.get(event.namespace, {})
        is_there = any(event.parent in places.get((tier, group), ()) for tier in tiers for group in full)
        require(is_there, f"{event}: the block before it is in none of {tiers}")

    def events_told(self, events: list[Event], cached: Contents) -> None:
        """Do more with the events of a step, and with what is cached after it: for machines that go further."""

    @invariant()
    def every_sequence_is_what_it_should_be(self) -> None:
        """Compare lengths, tokens and capacities with the model's."""
        for shadow in self.live:
            sequence = shadow.sequence
            counts = (sequence.num_tokens, sequence.num_computed_tokens, sequence.num_columns)
            expected = (shadow.num_tokens, shadow.num_computed, shadow.num_blocks)
            require(counts == expected, f"{sequence!r}: tokens, computed, blocks should be {expected}")
            ids = tuple(sequence.tokens.tolist())
            require(ids == shadow.prompt.tokens, f"{sequence!r}: has tokens {ids}, should have {shadow.prompt.tokens}")
            capacity = min(
                max(shadow.num_blocks * self.block_size - self.bill.bubble, 0), self.config.max_sequence_length
            )
            require(sequence.capacity == capacity, f"{sequence!r}: capacity is {sequence.capacity}, not {capacity}")
            by_row = (int(self.manager.num_tokens[sequence.row]), int(self.manager.num_computed_tokens[sequence.row]))
            require(by_row == counts[:2], f"{sequence!r}: its row says {by_row}")

    @invariant()
    def every_sequence_reads_its_own_contents(self) -> None:
        """Read all that is computed, where the copies it needs have been made or may be made now."""
        if self.memory.has_failed or (self.delivery == BEFORE_EACH_WRITE and self.num_calls % 10):
            return
        self.deliver()
        for shadow in self.live:
            self.memory.verify(shadow.sequence, tokens=shadow.symbols, encoder=shadow.encoder)

    def require_no_room(self, error: Any, needed: Counts, *, exactly: bool = False) -> None:
        """Prove that a refusal for want of blocks is true."""
        wanted = isinstance(error, OutOfBlocks) and not isinstance(error, OutOfRows)
        require(wanted, f"expected success or OutOfBlocks, got {error!r}")
        available = self.available()
        require(bool((needed > available).any()), f"{error!r}: {available} blocks can be had, {needed} are needed")
        require(error.needed > error.free + error.evictable, f"{error!r} contradicts itself: {vars(error)}")
        expected = needed[self.config.pool_of[error.group]]
        require(not exactly or error.needed == expected, f"{error!r}: {expected} are needed")

    def mirror(self, shadow: Shadow) -> None:
        """Look at tables as one who keeps a copy of them: ids seen before stay, unless the version grows."""
        version = shadow.sequence.version
        require(version >= shadow.seen_version, f"{shadow.sequence!r}: its version fell")
        for group in range(len(self.config.groups)):
            blocks, seen = shadow.sequence.group_blocks(group), shadow.seen_blocks.get(group)
            if seen is not None and version == shadow.seen_version:
                common = min(len(blocks), len(seen))
                same = np.array_equal(blocks[:common], seen[:common])
                require(same, f"{shadow.sequence!r}: its table {group} changed, its version did not")
            shadow.seen_blocks[group] = blocks
        shadow.seen_version = version

    def end(self) -> None:
        """End what runs, release what is pinned: all blocks must come back."""
        for shadow in self.live:
            self.manager.free(shadow.sequence)
        for pin in self.pins:
            pin.release()
        self.manager.check()
        free, total = self.manager.num_free_blocks, self.manager.num_blocks
        require(free == total, f"{free} of {total} blocks came back")

    def teardown(self) -> None:
        """End everything, unless something was wrong already."""
        if hasattr(self, "manager") and sys.exc_info()[1] is self._outer_error:
            self.end()

    # -- choosing -----------------------------------------------------------------------------------------------------

    def prompt(self, draft: Draft) -> Prompt:
        """Return the beginning of an earlier prompt, and a pattern after it: at least one token."""
        which, less, pattern, size, marks = draft
        base = self.prompts[-1 - which % len(self.prompts[-8:])]
        kept = base.cut(len(base) - less % (len(base) + 1))
        return kept.followed_by(pattern, max(size % (2 * self.block_size + 2), 0 if kept else 1), marks)

    def running(self) -> list[Shadow]:
        """List the sequences that may be appended to and committed."""
        return [shadow for shadow in self.live if shadow.leader is None]

    def alone(self) -> list[Shadow]:
        """List the running sequences that no beams wait for."""
        leaders = {id(shadow.leader) for shadow in self.live if shadow.leader is not None}
        return [shadow for shadow in self.running() if id(shadow) not in leaders]

    def pick(self, picks: int) -> list[Shadow]:
        """Choose running sequences by the bits of a number, at least one; odd numbers give them in reverse."""
        running = self.running()
        chosen = [shadow for at, shadow in enumerate(running) if picks >> at & 1] or running[:1]
        return chosen[:: -1 if picks & 1 else 1]

    # -- counting -----------------------------------------------------------------------------------------------------

    def num_private(self, shadow: Shadow) -> int:
        """Count the columns with tokens that a fork could not share."""
        return self.bill.num_columns(shadow.num_tokens) - shadow.num_computed // self.block_size

    def copies(self, shadow: Shadow, n: int) -> Counts:
        """Count what n copies of a sequence take."""
        return self.bill.copies(shadow.num_tokens, shadow.num_computed // self.block_size, n, wrapped=shadow.wrapped)

    def can_be_copied(self, shadow: Shadow) -> bool:
        """Say whether all of a sequence is committed but what is in the block being written."""
        return self.num_private(shadow) <= self.bill.num_columns(1)

    def held_blocks(self) -> list[set[int]]:
        """Collect, by pool, the blocks that sequences and pins hold."""
        held: list[set[int]] = [set() for _ in self.config.pool_num_blocks]
        for shadow in self.live:
            for group, pool in enumerate(self.config.pool_of):
                held[pool].update(shadow.sequence.group_blocks(group).tolist())
            for pool in self.state_pools():
                held[pool].update(block for _, block in shadow.sequence._checkpoints)
        for hold in self.manager._state.pins.values():
            self.add_held_by_pin(held, hold)
        for blocks in held:
            blocks.discard(-1)
        return held

    def add_held_by_pin(self, held: list[set[int]], hold: PinHold) -> None:
        """Add the blocks of a pin to those that are held, by pool."""
        spanned = iter(hold.blocks)
        for group, pool in zip(self.config.groups, self.config.pool_of, strict=True):
            if group.kind == "full":
                held[pool].update(block for each in hold.extent.path() for block in each.blocks[0].tolist())
            elif group.kind != "cross":
                held[pool].update(next(spanned).tolist())

    def available(self) -> Counts:
        """Count, by pool, the blocks that surely are free or could be evicted."""
        return np.array(
            [size - len(held) for size, held in zip(self.config.pool_num_blocks, self.held_blocks(), strict=True)]
        )

    def num_free_rows(self) -> int:
        """Count the rows that no sequence has."""
        return self.config.max_sequences - len(self.live)

    def state_pools(self) -> list[int]:
        """List the pools that recurrent states take blocks from."""
        return [
            pool for group, pool in zip(self.config.groups, self.config.pool_of, strict=True) if group.kind == "state"
        ]

    def has_unused(self, bill: Counts) -> bool:
        """Say whether so many blocks can be had without evicting anything."""
        return all(needed <= pool.num_free for needed, pool in zip(bill, self.manager._state.pools, strict=True))

    def surely(self, must: int, bill: Counts) -> int:
        """Return how much must be found by a call that takes so many blocks: it may evict the very state it found."""
        return must if self.has_unused(bill) or not self.has_kind("state") else 0

    def has_room_for_states(self, n: int) -> bool:
        """Say whether so many states could be kept without evicting anything."""
        return all(self.manager._state.pools[pool].num_free >= n for pool in self.state_pools())

    def has_kind(self, kind: str) -> bool:
        """Say whether there is a group of a kind."""
        return any(group.kind == kind for group in self.config.groups)

    def all_published(self) -> None:
        """Note that what follows looks at the whole cache, and so publishes all that is committed."""
        for shadow in self.live:
            self.reusable.publish(shadow)

    def before_wrapping(self, shadow: Shadow, num_tokens: int) -> None:
        """Note that a sequence is published before it overwrites a ring."""
        if num_tokens > self.bill.max_ring_tokens and not shadow.wrapped:
            self.reusable.publish(shadow)
            self.reusable.leave(shadow, publish=False)

    def wrapped(self, shadow: Shadow, num_tokens: int) -> None:
        """Note that a sequence with room for so many tokens may have overwritten a ring: it is published no more."""
        if num_tokens > self.bill.max_ring_tokens:
            shadow.wrapped, shadow.publishes = True, False

    # -- calling ------------------------------------------------------------------------------------------------------

    def attempt(self, call: Callable[[], Result]) -> Result | KvistError:
        """Make a call that may be refused; every third time, prove that a refusal has changed nothing."""
        digest = self.digest() if self.num_calls % 3 == 0 else None
        try:
            return self.called_with_failures(call)
        except TransferError as error:
            return error
        except KvistError as error:
            require(digest is None or self.digest() == digest, f"{error!r} was raised, and something changed")
            return error
        finally:
            self.called()

    def act(self, call: Callable[[], None]) -> None:
        """Make a call that must succeed; the memory may fail, and then its copies are still to be made."""
        try:
            self.called_with_failures(call)
        except TransferError:
            pass
        finally:
            self.called()

    def called_with_failures(self, call: Callable[[], Result]) -> Result:
        """Make a call; once the memory is to break, it does at the first that needs copies."""
        num_failures = self.memory.num_failures
        if self.breaks_next:
            self.memory.fail_next(after=self.num_calls % MAX_MADE)
        try:
            return call()
        finally:
            self.memory.work_again()
            self.memory_failed = self.memory.num_failures > num_failures
            self.breaks_next = self.breaks_next and not self.memory_failed

    def digest(self) -> str:
        """Return the manager's digest, which publishes all that is committed."""
        self.all_published()
        return self.manager.digest()

    def allocate(self, call: Callable[[], Result], bill: Counts) -> Result | KvistError:
        """Make a call that may need so many blocks, and so evict, or give up what is out of span unpublished."""
        if not self.has_unused(bill):
            self.reusable.evicted()
        result = self.attempt(call)
        self.count_evictions()
        return result

    def count_evictions(self) -> None:
        """Note that blocks were evicted, if so."""
        num_evicted = sum(self.manager._state.tree.num_evicted.values())
        if num_evicted != self.num_evicted:
            self.num_evicted = num_evicted
            self.reusable.evicted()

    def write(self, shadow: Shadow, stop: int) -> None:
        """Let a forward pass compute a sequence up to some token."""
        start = shadow.num_computed
        self.memory.write(shadow.sequence, start, stop, tokens=shadow.symbols, encoder=shadow.encoder)

    def encode(self, shadow: Shadow) -> None:
        """Let the encoder write a sequence's tokens, where copies that were ordered may still have to be made first."""
        self.deliver()
        self.memory.encode(shadow.sequence, shadow.encoder)

    def called(self) -> None:
        """Count a call, and make the copies that it ordered."""
        self.num_calls += 1
        if self.delivery == AFTER_EACH_CALL:
            self.deliver()

    def deliver(self) -> None:
        """Make the copies that were ordered, also those at which the memory has failed.

        A look may have published what a call that failed had not come to: this is written through with the next call.
        """
        moves = self.manager.take_moves()
        if self.delivery == BY_THE_MANAGER and not self.memory.has_failed:
            left = [move for move in moves if move.destination_tier != "host"]
            require(not left, f"{left} were left, though there is a memory")
        self.memory.perform(moves, late=self.delivery == BEFORE_EACH_WRITE)


def named(chosen: list[Shadow], *, by_rows: bool) -> Sequences:
    """Name sequences by their rows, or themselves."""
    if by_rows:
        return np.array([shadow.sequence.row for shadow in chosen], np.int64)
    return [shadow.sequence for shadow in chosen]


def require(condition: bool, message: str) -> None:
    """Raise AssertionError unless the condition holds, whatever Python's flags."""
    if not condition:
        raise AssertionError(message)
