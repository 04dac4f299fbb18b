"""What the rules of CacheMachine stand on: the manager, what is kept beside it, and the proofs after every step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import cycle, islice
from typing import Any, ClassVar, TypeVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from kvist.config import CacheConfig
from kvist.core.extents import Namespace
from kvist.core.matching import Pin, PrefixMatch
from kvist.core.sequences import Sequence, Sequences
from kvist.errors import KvistError, OutOfBlocks, OutOfRows
from kvist.manager import KVCacheManager
from kvist.testing.configs import Draft, cache_configs
from kvist.testing.model import Reusable, Shadow, blocks_for
from kvist.testing.token_memory import TokenMemory

__all__ = ["BEFORE_EACH_WRITE", "NAMESPACES", "Stage", "named", "require"]

Result = TypeVar("Result")

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
        self.ended: list[Sequence] = []
        self.prompts: list[list[int]] = [[]]
        self.pins: list[Pin] = []
        self.matches: list[PrefixMatch] = []
        self.num_calls = self.num_evicted = self.num_asked = self.num_hit = 0
        self.now_s = 0.0
        self._outer_error = sys.exc_info()[1]

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        """Make a manager and what is kept beside it."""
        self.config = data.draw(self.configs, label="config")
        self.delivery = data.draw(st.sampled_from(self.deliveries), label="copies are made")
        self.block_size = self.config.block_size
        self.memory = TokenMemory(self.config)
        memory = self.memory if self.delivery == BY_THE_MANAGER else None
        self.manager = self.memory.attach(KVCacheManager(self.config, memory, clock=lambda: self.now_s))
        self.reusable = Reusable(self.memory.prefixes, self.block_size, partial=self.config.partial_reuse)

    # -- proofs -------------------------------------------------------------------------------------------------------

    @invariant()
    def the_books_are_right(self) -> None:
        """Prove the manager's invariants."""
        self.manager.check()

    @invariant()
    def every_sequence_is_what_it_should_be(self) -> None:
        """Compare lengths, tokens and capacities with the model's."""
        for shadow in self.live:
            sequence = shadow.sequence
            counts = (sequence.num_tokens, sequence.num_computed_tokens, sequence.num_blocks)
            expected = (len(shadow.tokens), shadow.num_computed, shadow.num_blocks)
            require(counts == expected, f"{sequence!r}: tokens, computed, blocks should be {expected}")
            ids = sequence.tokens.tolist()
            require(ids == shadow.tokens, f"{sequence!r}: has tokens {ids}, should have {shadow.tokens}")
            capacity = min(shadow.num_blocks * self.block_size, self.config.max_sequence_length)
            require(sequence.capacity == capacity, f"{sequence!r}: capacity is {sequence.capacity}, not {capacity}")
            by_row = (int(self.manager.num_tokens[sequence.row]), int(self.manager.num_computed_tokens[sequence.row]))
            require(by_row == counts[:2], f"{sequence!r}: its row says {by_row}")

    @invariant()
    def every_sequence_reads_its_own_contents(self) -> None:
        """Read all that is computed, where the copies it needs have been made or may be made now."""
        if self.delivery == BEFORE_EACH_WRITE and self.num_calls % 10:
            return
        self.deliver()
        for shadow in self.live:
            self.memory.verify(shadow.sequence)

    def require_no_room(self, error: Any, needed: int, *, exactly: bool = False) -> None:
        """Prove that a refusal for want of blocks is true."""
        wanted = isinstance(error, OutOfBlocks) and not isinstance(error, OutOfRows)
        require(wanted, f"expected success or OutOfBlocks, got {error!r}")
        available = self.manager.num_blocks - len(self.held_blocks())
        require(needed > available, f"{error!r}: {available} blocks are free or evictable, {needed} are needed")
        require(error.needed > error.free + error.evictable, f"{error!r} contradicts itself: {vars(error)}")
        require(not exactly or error.needed == needed, f"{error!r}: {needed} are needed")

    def mirror(self, shadow: Shadow) -> None:
        """Look at a table as one who keeps a copy of it: ids seen before stay, unless the version grows."""
        version, blocks = shadow.sequence.version, shadow.sequence.block_ids
        common = min(len(blocks), len(shadow.seen_blocks))
        same = np.array_equal(blocks[:common], shadow.seen_blocks[:common])
        require(version >= shadow.seen_version, f"{shadow.sequence!r}: its version fell")
        require(same or version > shadow.seen_version, f"{shadow.sequence!r}: its table changed, its version did not")
        shadow.seen_version, shadow.seen_blocks = version, blocks

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

    def prompt(self, draft: Draft) -> list[int]:
        """Return the beginning of an earlier prompt, and a pattern after it: at least one token."""
        which, less, pattern, size = draft
        base = self.prompts[-1 - which % len(self.prompts[-8:])]
        kept = base[: len(base) - less % (len(base) + 1)]
        return kept + list(islice(cycle(pattern), max(size % (2 * self.block_size + 2), 0 if kept else 1)))

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
        """Count the blocks with tokens that a fork could not share."""
        committed = shadow.num_computed // self.block_size * self.block_size
        return blocks_for(len(shadow.tokens) - committed, self.block_size)

    def held_blocks(self) -> set[int]:
        """Collect the blocks that sequences and pins hold."""
        held = {block for shadow in self.live for block in shadow.sequence.block_ids.tolist()}
        for extent in self.manager._state.pins.values():
            held.update(block for each in extent.path() for block in each.blocks[0].tolist())
        return held

    def all_published(self) -> None:
        """Note that what follows looks at the whole cache, and so publishes all that is committed."""
        for shadow in self.live:
            self.reusable.publish(shadow)

    # -- calling ------------------------------------------------------------------------------------------------------

    def attempt(self, call: Callable[[], Result]) -> Result | KvistError:
        """Make a call that may be refused; every third time, prove that a refusal has changed nothing."""
        digest = self.digest() if self.num_calls % 3 == 0 else None
        try:
            return call()
        except KvistError as error:
            require(digest is None or self.digest() == digest, f"{error!r} was raised, and something changed")
            return error
        finally:
            self.called()

    def digest(self) -> str:
        """Return the manager's digest, which publishes all that is committed."""
        self.all_published()
        return self.manager.digest()

    def allocate(self, call: Callable[[], Result]) -> Result | KvistError:
        """Make a call that may need blocks, and so evict."""
        result = self.attempt(call)
        self.count_evictions()
        return result

    def count_evictions(self) -> None:
        """Note that blocks were evicted, if so."""
        if self.manager._state.tree.num_evicted != self.num_evicted:
            self.num_evicted = self.manager._state.tree.num_evicted
            self.reusable.evicted()

    def called(self) -> None:
        """Count a call, and make the copies that it ordered."""
        self.num_calls += 1
        if self.delivery == AFTER_EACH_CALL:
            self.deliver()

    def deliver(self) -> None:
        """Make the copies that were ordered."""
        moves = self.manager.take_moves()
        require(not moves or self.delivery != BY_THE_MANAGER, f"{moves} were left, though there is a memory")
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
