"""A guarded ValkeyStore while its real server is paused, killed, filled and restarted in the middle of the work."""

from threading import Event, Thread

import pytest
from tests.tiers.remote import FORMAT, PATIENT, entries
from tests.tiers.services import Valkey, needs, running

from kvist.testing.stores import contents_of, key_of
from kvist.tiers.breaker import CircuitBreaker
from kvist.tiers.guard import GuardedStore, Limits

needs("redis")

from kvist.tiers.valkey import ValkeyStore  # noqa: E402

KEYS = [key_of(number) for number in range(50)]


def found(store, keys):
    buffers = [bytearray(1000) for _ in keys]
    answers = store.get(keys, [memoryview(buffer) for buffer in buffers])
    for key, buffer, is_there in zip(keys, buffers, answers, strict=True):
        assert bytes(buffer) == (contents_of(key, 1000) if is_there else bytes(1000))
    return answers


def guarded(server, timeout_s=0.1):
    """A guard whose breaker opens at the second failure, and asks again at the next call but one at the latest."""
    breaker = CircuitBreaker(num_failures=2, retry_s=0.01)
    return GuardedStore(ValkeyStore(server.url, FORMAT, timeout_s=timeout_s), timeout_s, Limits(), breaker=breaker)


def until_all_are_found(store, keys):
    """Put and get until all are there again: outcomes, whatever the time they take."""
    for _ in range(10_000):
        store.put(entries(keys))
        store.flush(PATIENT)
        if all(found(store, keys)):
            return True
    return False


@pytest.fixture
def server(tmp_path):
    with running(Valkey(tmp_path)) as server:
        yield server


class Engine(Thread):
    """Puts and gets as an engine would, until it is told to stop; any wrong byte or error is kept."""

    def __init__(self, store):
        super().__init__()
        self.store, self.told, self.wrong = store, Event(), None
        self.num_steps = self.num_hits = 0
        self.stepped = Event()

    def run(self):
        try:
            while not self.told.is_set():
                at = self.num_steps % 40
                self.store.put(entries(KEYS[at : at + 4]))
                self.num_hits += sum(found(self.store, KEYS[at : at + 10]))
                self.num_steps += 1
                self.stepped.set()
        except Exception as error:
            self.wrong = error
            self.stepped.set()

    def steps(self, num_steps):
        """Wait until it has made so many more steps."""
        for _ in range(num_steps):
            self.stepped.clear()
            assert self.stepped.wait(PATIENT)
            assert self.wrong is None

    def stop(self):
        self.told.set()
        self.join()
        assert self.wrong is None


def test_an_engine_goes_on_while_the_server_is_stopped_killed_filled_and_restarted(server):
    store = guarded(server)
    engine = Engine(store)
    engine.start()
    try:
        engine.steps(20)
        server.pause()
        engine.steps(20)  # while it is stopped
        server.resume()
        engine.steps(5)
        server.kill()
        engine.steps(20)  # while there is none
        server.start()
        engine.steps(5)
        with server.client() as client:
            client.config_set("maxmemory", 1)
            engine.steps(20)  # while it takes nothing
            client.config_set("maxmemory", 0)
        engine.steps(5)
    finally:
        engine.stop()
    assert until_all_are_found(store, KEYS)
    stats = store.stats()
    assert stats.num_refused > 0
    assert stats.num_errors > 0
    assert stats.num_corrupt == 0
    store.close()


def test_calls_return_while_the_server_is_stopped_and_hits_come_back(server):
    store = guarded(server)
    assert until_all_are_found(store, KEYS[:5])
    server.pause()
    assert found(store, KEYS[:5]) == store.contains(KEYS[:5]) == [False] * 5
    assert store.put(entries(KEYS[5:8])) in (0, 3)
    store.flush(PATIENT)
    store.drop(key_of(0)[:16])
    assert store.stats().num_misses >= 5
    server.resume()
    assert store.flush(PATIENT)  # the drop has been made up for
    patient = guarded(server, PATIENT)
    assert found(patient, KEYS[:8]) == [False] * 8
    patient.close()
    assert until_all_are_found(store, KEYS[:5])
    store.close()


def test_closing_returns_while_the_server_is_stopped(server):
    store = guarded(server)
    server.pause()
    store.put(entries(KEYS))
    store.close()
    assert store.stats().num_put == 0
