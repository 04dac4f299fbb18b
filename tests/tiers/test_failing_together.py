"""Memories and stores that fail at once, under all that an engine does: nothing read is wrong, and all goes on."""

from random import Random

import pytest
from tests.core.layers import FULL, sliding, state
from tests.core.test_failures import LosingMemory, within

from kvist import (
    CacheConfig,
    HostTier,
    KVCacheManager,
    NeverFits,
    OutOfBlocks,
    RemoteTier,
    SequenceError,
    TransferError,
)
from kvist.core import rings
from kvist.core.contents import Contents
from kvist.testing import FAULTY_URL, FaultyMemory, faulty_stores
from kvist.tiers.breaker import CircuitBreaker

PATIENT = 60.0
LAYERS = {
    "full": ([FULL], {}),
    "window": ([FULL, sliding(5)], {}),
    "state": ([FULL, state(2)], {}),
    "ring": ([FULL, sliding(9)], {"ring": True, "max_beams": 3}),
    "all in chunks": ([FULL, sliding(5), state(4)], {"max_chunk_tokens": 3}),
}


class Losing(FaultyMemory, LosingMemory):
    """Says which copies it has not made, and fails to read and fill blocks for stores."""

    def perform(self, moves, *, late=False):
        LosingMemory.perform(self, moves)


class Engine:
    """One manager of tiny tiers, whose copies fail in every third call; `live` run, `asleep` are suspended."""

    def __init__(self, layers, seed, stores, *, says_which):
        self.chance, self.stores, self.says_which = Random(seed), stores, says_which
        specs, needs = LAYERS[layers]
        pick = self.chance.choice
        host = HostTier(num_blocks=self.chance.randint(2, 12), write=pick(("back", "through")))
        store = RemoteTier(url=FAULTY_URL, timeout_s=PATIENT, write=pick(("back", "through")))
        settings = {
            "max_sequences": 6,
            "max_sequence_length": 18,
            "event_buffer": 1 << 16,
            "model": "a model@1",
        } | needs
        self.config = CacheConfig(specs, 2, self.chance.randint(7, 13), tiers=[host, store], **settings)
        self.memory = (Losing if says_which else FaultyMemory)(self.config)
        self.manager = self.opened(self.memory)
        self.has_states = any(group.kind == "state" for group in self.config.groups)
        self.live, self.asleep, self.prompts, self.contents = [], [], [[0, 0, 0, 0]], Contents()
        self.num_failed = 0

    def opened(self, memory):
        memory.prefixes = getattr(self, "memory", memory).prefixes
        manager = memory.attach(KVCacheManager(self.config, memory))
        guarded = manager._link.stack._levels[0].store
        guarded.breaker, guarded._queue._retry_s = CircuitBreaker(num_failures=10**9), 0.001
        return manager

    # -- calls that may fail ------------------------------------------------------------------------------------------

    def call(self, act):
        """Make a call during which things fail, and prove the books."""
        self.fail()
        try:
            return act()
        except TransferError:
            self.num_failed += 1
        except (OutOfBlocks, NeverFits, SequenceError):
            pass
        finally:
            self.work_again()
            self.prove()
        return None

    def fail(self):
        chance = self.chance
        if self.says_which:
            self.memory.loses = lambda move: chance.random() < (0.15 if within(move) else 0.25)
        if chance.random() < 0.35 and not self.says_which:
            self.memory.fail_next(after=chance.randrange(4), times=chance.choice((1, 2)))
        if chance.random() < 0.1:
            self.memory.fail_writes()
            self.memory.fail_reads()
        if self.stores and chance.random() < 0.1:
            self.stores[0].die()

    def work_again(self):
        self.memory.loses = lambda move: False
        self.memory.work_again()
        for store in self.stores:
            store.revive()

    def prove(self):
        manager = self.manager
        manager.check()
        assert self.contents.follow(manager.events.poll())
        assert self.contents.digest() == manager.events.content_digest()
        self.asleep = list(manager._state.suspended)
        running = manager._state.rows.running()
        self.live = [each for each in self.live if each.is_live]
        assert set(self.live) == set(running)
        if not manager._state.moves:
            for sequence in self.live:
                self.memory.verify(sequence)

    def settle(self):
        """Have copies made that wait, as an engine does before its next pass."""
        for _ in range(3):
            if self.manager._state.moves:
                try:
                    self.manager.evict(0)
                except TransferError:
                    self.num_failed += 1
        self.prove()
        assert not self.manager._state.moves

    # -- what an engine does ------------------------------------------------------------------------------------------

    def prompt(self):
        base = self.chance.choice(self.prompts[-6:])
        more = [self.chance.choice((0, 0, 1)) for _ in range(self.chance.randint(1, 7))]
        self.prompts.append([*base[: self.chance.randrange(len(base) + 1)], *more][:13])
        return self.prompts[-1]

    def pick(self):
        able = [each for each in self.live if each.leader is None and not each._waiting_beams()]
        return self.chance.choice(able) if able else None

    def compute(self, sequence):
        """Compute and commit what is left of a sequence, or a chunk of it."""
        self.settle()
        if sequence not in self.live or (missing := sequence.num_tokens - sequence.num_computed_tokens) <= 0:
            return
        limit = self.manager.chunk_limit(sequence, self.chance.choice((missing, min(missing, 2))))
        end = sequence.num_computed_tokens + limit
        self.memory.write(sequence, stop=end)
        self.call(lambda: self.manager.commit([sequence], end))

    def admit(self):
        beams, tokens, space = self.chance.choice((1, 1, 1, 2, 3)), self.prompt(), self.chance.choice(((), ("a",)))

        def add():
            sequence = self.manager.add_sequence(tokens, num_beams=beams, namespace=space)
            self.live += sequence.beams
            return sequence

        sequence = self.call(add)
        for _ in range(8 if sequence is not None else 0):
            self.compute(sequence)

    def grow(self):
        if (sequence := self.pick()) is not None:
            self.call(lambda: self.manager.append([sequence], [[0, 1][: self.chance.randint(1, 2)]]))
            self.compute(sequence)

    def rewind(self):
        if (sequence := self.pick()) is not None:
            self.call(lambda: self.manager.rewind(sequence, self.chance.randrange(min(sequence.num_tokens, 6))))
            self.compute(sequence)

    def accept(self):
        sequence = self.pick()
        if sequence is None or self.has_states or sequence.num_tokens > 9:
            return
        self.settle()
        start, pending = sequence.num_computed_tokens, sequence.num_tokens - sequence.num_computed_tokens
        nodes = [*range(pending), pending + 1, pending + 3 + self.chance.randrange(2)]
        self.call(lambda: self.manager.reserve([sequence], nodes[-1] + 1 - pending))
        self.settle()
        end = start + nodes[-1] + 1
        if sequence not in self.live or sequence.capacity < end or rings.wraps(self.manager._state, end):
            return
        if sequence.num_computed_tokens == start:
            tokens = [*sequence.tokens.tolist(), 1, 0]
            self.memory.write_tree(sequence, nodes, tokens=tokens)
            self.call(lambda: self.manager.accept(sequence, tokens[start:], nodes))

    def end(self):
        if self.live:
            sequence = self.live.pop(self.chance.randrange(len(self.live)))
            self.call(lambda: self.manager.free(sequence, publish=self.chance.random() < 0.8))

    def fork(self):
        if (sequence := self.pick()) is not None:
            self.call(lambda: self.live.extend(self.manager.fork(sequence)))

    def reorder(self):
        if (sequence := self.pick()) is not None:
            alike = [each for each in self.live if each.namespace == sequence.namespace]
            self.call(lambda: self.manager.reorder(alike, [self.chance.randrange(len(alike)) for _ in alike]))

    def suspend(self):
        if (sequence := self.pick()) is not None:
            self.call(lambda: self.manager.suspend(sequence))

    def resume(self):
        if self.asleep:
            sequence = self.chance.choice(self.asleep)
            self.live.append(sequence)  # unless it stays suspended
            self.call(lambda: self.manager.resume(sequence))
            self.compute(sequence)

    def evict(self):
        self.call(lambda: self.manager.evict(self.chance.randint(1, 8)))

    def prefetch(self):
        prefetched = self.call(lambda: self.manager.prefetch(self.chance.choice(self.prompts)))
        assert prefetched is None or prefetched.wait(PATIENT)

    def pin(self):
        pinned = self.call(lambda: self.manager.pin(self.manager.match_prefix(self.chance.choice(self.prompts))))
        if pinned is not None:
            self.call(lambda: self.manager.evict(4))
            pinned.release()

    def drop(self):
        self.call(lambda: self.manager.drop(namespace=("a",)))
        sequence = self.call(lambda: self.manager.match_prefix(self.chance.choice(self.prompts), namespace=("a",)))
        assert sequence.num_tokens == sum(num_tokens for _, num_tokens in sequence.stored) == 0

    def perform(self):
        forecast = self.manager.forecast()

        def supposed():
            for _ in range(2):
                forecast.add(self.prompt())
            self.live += self.manager.perform(forecast)

        self.call(supposed)

    def read_elsewhere(self):
        """Let another manager read what the store was given."""
        self.call(lambda: self.manager.flush(PATIENT))
        memory = FaultyMemory(self.config)
        with self.opened(memory) as other:
            for tokens in self.prompts[-3:]:
                sequence = other.add_sequence([*tokens, 7])
                memory.verify(sequence)
                other.free(sequence, publish=False)

    def finish(self):
        """End all: every block comes back, and prompts are found and computed as ever."""
        self.settle()
        for sequence in [*self.live, *self.asleep]:
            self.manager.free(sequence)
        self.live = []
        self.settle()
        assert self.manager.num_free_blocks == self.manager.num_blocks
        for tokens in self.prompts[-3:]:
            sequence = self.manager.add_sequence(tokens)
            self.memory.verify(sequence)
            self.manager.free(sequence, publish=False)
        self.manager.close()


ACTS = (
    [Engine.admit] * 4 + [Engine.end, Engine.evict] * 3 + [Engine.grow, Engine.rewind, Engine.resume] * 2
    + [Engine.accept, Engine.fork, Engine.reorder, Engine.suspend, Engine.prefetch, Engine.pin, Engine.drop]
    + [Engine.perform, Engine.read_elsewhere]
)  # fmt: skip


def run(layers, seed, *, says_which, num_steps=40):
    with faulty_stores() as stores:
        engine = Engine(layers, seed, stores, says_which=says_which)
        for _ in range(num_steps):
            engine.chance.choice(ACTS)(engine)
        engine.finish()
    return engine.num_failed


@pytest.mark.parametrize("says_which", [False, True], ids=["raises", "says which"])
@pytest.mark.parametrize("layers", LAYERS)
def test_whatever_fails_together_nothing_that_is_read_is_wrong(layers, says_which):
    assert sum(run(layers, seed, says_which=says_which) for seed in range(2)) > 0


@pytest.mark.long
@pytest.mark.parametrize("says_which", [False, True], ids=["raises", "says which"])
@pytest.mark.parametrize("layers", LAYERS)
def test_whatever_fails_together_for_long_nothing_that_is_read_is_wrong(layers, says_which):
    for seed in range(100, 125):
        run(layers, seed, says_which=says_which, num_steps=100)
