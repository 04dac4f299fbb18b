"""What a store did not take when it was offered is offered again while it is at hand: on the device or in host memory.

Otherwise a system prompt that was computed while a server was away would be missing in front of all that comes after.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from tests.core.layers import FULL, sliding, state

from kvist import CacheConfig, HostTier, KVCacheManager, RemoteTier
from kvist.core.chain import Chain
from kvist.core.extents import Extent, Root
from kvist.core.identity import IdentityTable
from kvist.core.keeping import Keeper
from kvist.journal import Journal, replay
from kvist.testing import FAULTY_URL, TokenMemory, faulty_stores
from kvist.tiers.breaker import CircuitBreaker
from kvist.tiers.missed import MissedKeys

PATIENT = 60.0
SYSTEM = range(8)
"""Four blocks that all prompts begin with."""


class Server:
    """A store that lives longer than the managers over it, and one that runs."""

    def __init__(self, stores, layers, host, tier):
        self.config = CacheConfig(
            list(layers),
            block_size=2,
            num_blocks=24,
            max_sequences=4,
            max_sequence_length=64,
            partial_reuse=False,
            tiers=[*([HostTier(num_blocks=24)] if host else []), RemoteTier(FAULTY_URL, timeout_s=PATIENT, **tier)],
            model="a model@1",
        )
        self.open(None)
        [self.store] = stores

    def open(self, prefixes):
        self.memory = TokenMemory(self.config)
        if prefixes is not None:
            self.memory.prefixes = prefixes
        self.manager = self.memory.attach(KVCacheManager(self.config, self.memory))
        self.guard = self.manager._link.stack._levels[0].store
        self.guard.breaker = CircuitBreaker(num_failures=10**9)

    def restart(self):
        """Begin anew, with nothing but what the store has."""
        self.manager.close()
        self.open(self.memory.prefixes)

    def leave(self, tokens, **options):
        """Compute a prompt, and end it when what it left is written, or given up; how much of it was there."""
        sequence = self.manager.add_sequence(tokens, **options)
        self.memory.verify(sequence)
        while (start := sequence.num_computed_tokens) < sequence.num_tokens:
            stop = start + self.manager.chunk_limit(sequence, sequence.num_tokens - start)
            self.memory.write(sequence, start, stop)
            self.manager.commit([sequence], stop)
        self.manager.free(sequence)
        assert self.manager.flush(PATIENT)
        self.manager.check()
        return sequence.num_cached_tokens

    def stats(self):
        [stats] = self.manager.store_stats().values()
        return stats


@contextmanager
def served(layers=(FULL,), host=False, **tier):
    with faulty_stores() as stores:
        server = Server(stores, layers, host, tier)
        yield server
        server.store.revive()
        server.manager.close()


def prompt(number):
    return [*SYSTEM, *[number] * 5]


@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("layers", [[FULL], [FULL, sliding(6)], [FULL, state()]], ids=["full", "sliding", "state"])
def test_a_system_prompt_computed_while_the_server_was_away_is_there_after_a_restart(layers, host):
    with served(layers, host) as server:
        server.store.die()
        server.leave(SYSTEM)
        server.store.revive()
        for number in range(3):
            if host:
                server.manager.evict(24)
            server.leave(prompt(number))
        server.restart()
        assert [server.leave(prompt(number)) for number in range(3)] == [12, 12, 12]


def test_a_suspended_sequence_that_goes_on_offers_its_prefix_again():
    with served() as server:
        server.store.die()
        sequence = server.manager.add_sequence(prompt(1)[:12])
        server.memory.write(sequence)
        server.manager.commit([sequence])
        assert server.manager.flush(PATIENT)
        server.store.revive()
        for _ in range(2):
            server.manager.suspend(sequence)
            assert server.manager.resume(sequence) == 0
            assert server.manager.flush(PATIENT)
        server.restart()
        assert server.leave(prompt(1)) == 12


def test_what_the_queue_had_no_room_for_is_offered_again_when_there_is_room():
    """A block is 8 bytes here: 4 of the 6 wait, 2 are refused."""
    with served() as server:
        [block_bytes] = server.memory.block_format()[0]
        server.guard._queue._max_bytes = 4 * block_bytes
        assert server.leave(prompt(1)) == 0
        assert (server.stats().num_entries, server.stats().num_refused) == (4, 2)
        assert server.leave(prompt(1)) == 12
        assert (server.stats().num_entries, server.stats().num_refilled) == (6, 2)


def test_nothing_is_read_for_a_store_that_is_not_asked_and_all_of_it_once_it_is_again(monkeypatch):
    now = 100.0
    with served() as server:
        server.guard.breaker = CircuitBreaker(num_failures=1, clock=lambda: now)
        server.store.die()
        server.leave(prompt(1))
        assert server.guard.breaker.is_open
        read = count_reads(server, monkeypatch)
        for _ in range(3):
            server.leave(prompt(1))
        assert read == []
        server.store.revive()
        now += 5.0
        server.leave(prompt(1))
        server.leave(prompt(1))
        server.leave(prompt(1))
        assert sum(read) == 6
        assert server.stats().num_refilled == 6


def test_a_store_that_fails_each_write_is_tried_with_one_block_for_an_admission(monkeypatch):
    """Such as a disk that is full, which still answers: 6 blocks wait for it, and none is lost from sight."""
    with served() as server:
        monkeypatch.setattr(server.store, "put", refuse)
        server.leave(prompt(1))
        read = count_reads(server, monkeypatch)
        for _ in range(3):
            server.leave(prompt(1))
        assert read == [1, 1, 1]
        assert len(server.guard.missed) == 6


def test_without_refusals_nothing_is_looked_at(monkeypatch):
    with served() as server:
        monkeypatch.setattr("kvist.core.keeping.Keeper.offer_again", refuse)
        assert [server.leave(prompt(1)) for _ in range(3)] == [0, 12, 12]


def test_a_prefix_of_which_stores_lack_nothing_is_looked_through_once_until_they_refuse_more(monkeypatch):
    """What is remembered may be gone for ever: the digests of a long prompt are not to be made for it each time."""
    with served() as server:
        assert [server.leave(prompt(1)) for _ in range(2)] == [0, 12]
        server.guard.missed.add([b"of a block that is evicted"])
        server.leave(prompt(1))
        with monkeypatch.context() as patch:
            patch.setattr("kvist.core.chain.Chain.of_path", refuse)
            assert server.leave(prompt(1)) == 12
        server.store._forget(key := next(iter(server.store._entries)))
        server.guard.missed.add([key])
        server.leave(prompt(1))
        assert server.stats().num_refilled == 1


def test_an_extent_is_looked_through_again_when_it_has_got_blocks_or_was_not_done_with():
    chain = Chain(b"fingerprint", 2, IdentityTable())
    tokens = np.arange(4, dtype=np.int32).tobytes()
    extent = Extent(Root((), 2), tokens[:8], tokens, np.array([[4, 5], [-1, 7]], np.int32), 1)
    keeper = Keeper(chain, refuse, on_commit=True, on_evict=False)

    def offered(refusals, is_done=True):
        seen = []
        keeper.offer_again(
            extent, refusals, lambda order: seen.append((order.group, order.sources.tolist())) or is_done
        )
        return seen

    assert offered(1, is_done=False) == [(0, [4, 5]), (1, [7])]
    assert offered(1) == [(0, [4, 5]), (1, [7])]
    assert offered(1) == []
    extent.blocks[1, 0] = 6
    assert offered(1) == [(0, [4, 5]), (1, [6, 7])]
    assert offered(1) == []
    assert offered(2) == [(0, [4, 5]), (1, [6, 7])]


def test_what_is_evicted_and_gone_is_not_offered_again_and_is_offered_when_it_is_computed_anew():
    with served() as server:
        server.store.die()
        server.leave(prompt(1))
        server.manager.evict(24)
        server.store.revive()
        assert server.leave(prompt(1)) == 0
        assert len(server.guard.missed) == 0
        assert server.stats().num_refilled == 0
        server.restart()
        assert server.leave(prompt(1)) == 12


def test_a_namespace_that_is_dropped_is_not_offered_again():
    with served() as server:
        server.store.die()
        server.leave(prompt(1), namespace=("one",))
        server.leave(prompt(1), namespace=("two",))
        server.store.revive()
        server.manager.drop(namespace=("one",))
        assert len(server.guard.missed) == 6
        server.leave(prompt(1), namespace=("two",))
        server.leave(prompt(1), namespace=("two",))
        assert len(server.guard.missed) == 0
        server.restart()
        assert server.leave(prompt(1), namespace=("one",)) == 0
        assert server.leave(prompt(1), namespace=("two",)) == 12


def test_each_namespace_has_its_own_contents_offered_again():
    with served() as server:
        server.store.die()
        server.leave(prompt(1), namespace=("one",))
        server.store.revive()
        server.leave(prompt(1), namespace=("two",))
        server.leave(prompt(1), namespace=("two",))
        assert server.stats().num_entries == 6
        assert len(server.guard.missed) == 6


def test_what_is_stored_on_eviction_is_not_remembered():
    with served(write="back") as server:
        server.store.die()
        server.leave(prompt(1))
        server.manager.evict(24)
        assert server.manager.flush(PATIENT)
        assert len(server.guard.missed) == 0
        assert server.stats().num_refused == 6


def test_a_memory_that_cannot_read_what_is_offered_again_costs_no_prompt(monkeypatch):
    with served() as server:
        server.store.die()
        server.leave(prompt(1))
        server.store.revive()
        monkeypatch.setattr(server.memory, "read_blocks", refuse)
        assert server.leave(prompt(1)) == 12
        assert server.manager._link.num_unread_blocks == 1


def test_a_journal_of_refusals_is_replayed_without_stores(tmp_path):
    with served(host=True) as server:
        journal = Journal(tmp_path / "calls.jsonl", digest_every=1).attach(server.manager)
        server.store.die()
        server.leave(prompt(1))
        server.store.revive()
        for number in range(3):
            server.manager.evict(24)
            server.leave(prompt(number))
        assert server.stats().num_refilled > 0
        digest = server.manager.digest()
        journal.close()
    assert replay(tmp_path / "calls.jsonl").manager.digest() == digest


def refuse(*arguments):
    raise OSError("there is no room on the device")


def count_reads(server, monkeypatch):
    """Note how many blocks are read at each call."""
    read, read_blocks = [], server.memory.read_blocks

    def counted(group, blocks, tier="device"):
        read.append(len(blocks))
        return read_blocks(group, blocks, tier)

    monkeypatch.setattr(server.memory, "read_blocks", counted)
    return read


def test_no_more_than_so_many_keys_are_remembered_the_newest():
    missed = MissedKeys(max_keys=3)
    missed.add([b"a", b"b", b"c", b"a", b"d"])
    assert (len(missed), missed.num_forgotten) == (3, 1)
    assert missed.take([b"a", b"b", b"c", b"d"], limit=2) == ([0, 2], False)
    assert missed.take([b"a", b"b", b"c", b"d"], limit=2) == ([3], True)
    assert len(missed) == 0


def test_keys_that_many_threads_add_and_take_are_taken_once():
    missed, keys = MissedKeys(), [bytes([number]) for number in range(200)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: missed.add([key]), keys))
        taken = [at for found, _ in pool.map(lambda _: missed.take(keys, limit=50), range(8)) for at in found]
    assert sorted(taken) == list(range(200))
