import logging
import subprocess
import sys
from math import inf
from random import Random
from threading import enumerate as all_threads

import pytest
from tests.tiers.hanging import PATIENT, SHORT, HangingStore

from kvist.errors import ArgumentError
from kvist.testing import FaultyStore
from kvist.testing.stores import StoreSuite, contents_of, key_of
from kvist.tiers.breaker import CircuitBreaker
from kvist.tiers.guard import GuardedStore, Limits
from kvist.tiers.protocol import StoreFormat
from kvist.tiers.simulated import Conditions, SimulatedStore

FORMAT = StoreFormat("a model", block_size=2, block_bytes=(100,))
OURS, OTHERS = b"*" * 16, b"another tenant's"
KEYS = [key_of(number, OURS) for number in range(20)]
NEVER = CircuitBreaker(num_failures=10**9)


class Time:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def hanging():
    store = HangingStore(FORMAT)
    yield store
    store.release()


def guarded(store, timeout_s=PATIENT, limits=Limits(), **options):  # noqa: B008
    return GuardedStore(store, timeout_s, limits, **options)


def impatient(store, name="store", **limits):
    """A guard that soon gives up, and never stops asking."""
    return guarded(store, SHORT, Limits(**limits), breaker=NEVER, name=name)


def entries(keys):
    return [(key, memoryview(contents_of(key, 100))) for key in keys]


def found(store, keys):
    buffers = [bytearray(100) for _ in keys]
    answers = store.get(keys, [memoryview(buffer) for buffer in buffers])
    for key, buffer, is_there in zip(keys, buffers, answers, strict=True):
        assert bytes(buffer) == (contents_of(key, 100) if is_there else bytes(100))
    return answers


def num_workers(name):
    return sum(thread.name == f"kvist {name}" for thread in all_threads())


class TestGuarded(StoreSuite):
    keeps = False

    def open_store(self, format, place):
        return guarded(SimulatedStore(format))

    def settle(self, store):
        assert store.flush(PATIENT)

    def damage(self, store, key, change):
        return store.store.change(key, change)


class TestGuardedByTheLot(TestGuarded):
    def open_store(self, format, place):
        return guarded(SimulatedStore(format), limits=Limits(num_threads=1, lot_entries=3, lot_bytes=200))


# -- reading in time --------------------------------------------------------------------------------------------------


def test_a_late_read_is_a_miss_and_what_comes_late_is_thrown_away(hanging):
    hanging.put(entries(KEYS[:2]))
    store = impatient(hanging, name="late")
    hanging.hold("get")
    buffers = [bytearray(100) for _ in range(2)]
    assert store.get(KEYS[:2], [memoryview(buffer) for buffer in buffers]) == [False, False]
    hanging.release()
    assert found(guarded(hanging), KEYS[:2]) == [True, True]
    store.close()
    while num_workers("late"):
        pass  # until the late call has ended
    assert buffers == [bytearray(100)] * 2
    assert (store.stats().num_timeouts, store.stats().num_misses) == (1, 2)


def test_of_a_long_read_what_came_before_the_deadline_counts():
    class StallsAtTheThird(HangingStore):
        def get(self, keys, buffers):
            if self.asked.count("get") == 2:
                self.hold("get")
            return super().get(keys, buffers)

    inner = StallsAtTheThird(FORMAT)
    inner.put(entries(KEYS[:6]))
    store = guarded(inner, 1.0, Limits(lot_entries=1), breaker=NEVER)
    assert found(store, KEYS[:6]) == [True, True, False, False, False, False]
    inner.release()
    store.close()
    assert inner.asked.count("get") == 3  # nobody waited for the rest


def test_a_late_look_finds_nothing(hanging):
    hanging.put(entries(KEYS[:2]))
    store = impatient(hanging)
    hanging.hold("contains")
    assert store.contains(KEYS[:2]) == [False, False]
    hanging.release()
    assert guarded(hanging).contains(KEYS[:2]) == [True, True]


def test_a_store_that_hangs_costs_so_many_threads_and_refuses_then_at_once(hanging):
    store = guarded(hanging, SHORT, Limits(num_threads=2), breaker=NEVER, name="bounded")
    hanging.hold("get")
    for _ in range(2):
        found(store, KEYS[:1])
    store.timeout_s = PATIENT
    assert found(store, KEYS[:1]) == [False]  # returns though the limit is far away
    assert num_workers("bounded") == 2
    assert hanging.asked.count("get") == 2
    hanging.release()
    hanging.put(entries(KEYS[:1]))
    while found(store, KEYS[:1]) != [True]:
        pass  # until the late calls have ended
    store.close()


def test_what_the_store_raises_is_a_miss_and_counted():
    inner = SimulatedStore(FORMAT)
    store = guarded(inner)
    store.put(entries(KEYS[:2]))
    assert store.flush(PATIENT)
    inner.conditions = Conditions(failure=1)
    assert found(store, KEYS[:2]) == store.contains(KEYS[:2]) == [False, False]
    assert (store.stats().num_errors, store.stats().num_timeouts) == (2, 0)
    assert isinstance(store.last_error, ConnectionError)
    inner.conditions = Conditions()
    assert found(store, KEYS[:2]) == [True, True]


@pytest.mark.parametrize("lie", ["answers too few", "answers too many", "answers nonsense"])
def test_answers_that_are_not_one_for_each_key_are_a_miss_and_an_error(lie):
    store = FaultyStore(FORMAT)
    guard = guarded(store, breaker=NEVER)
    guard.put(entries(KEYS[:2]))
    assert guard.flush(PATIENT)
    store.lie(lie)
    assert guard.contains(KEYS[:3]) == [False] * 3
    assert found(guard, KEYS[:3]) == [False] * 3
    assert guard.stats().num_errors == 2
    store.be_honest()
    assert found(guard, KEYS[:3]) == [True, True, False]
    guard.close()


def test_numbers_that_are_none_leave_those_that_were_told_before():
    store = FaultyStore(FORMAT)
    guard = guarded(store)
    guard.put(entries(KEYS[:2]))
    assert guard.flush(PATIENT)
    assert guard.stats().num_entries == 2
    store.stats = lambda: None
    assert guard.stats().num_entries == 2
    guard.close()


def test_wrong_arguments_are_the_callers_fault():
    from kvist.tiers.envelope import Envelope

    class Strict(SimulatedStore):
        def contains(self, keys):
            for key in keys:
                Envelope.check_key(key)
            return super().contains(keys)

    store = guarded(Strict(FORMAT), breaker=CircuitBreaker(num_failures=1))
    with pytest.raises(ArgumentError):
        store.contains([b"short"])
    assert not store.breaker.is_open


# -- the breaker ------------------------------------------------------------------------------------------------------


def test_a_store_that_fails_is_not_asked_for_some_time_and_then_once(caplog):
    time, inner = Time(), HangingStore(FORMAT)
    inner.put(entries(KEYS[:2]))
    inner.conditions = Conditions(failure=1)
    store = guarded(inner, breaker=CircuitBreaker(num_failures=2, retry_s=5, clock=time), name="remote")
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            assert found(store, KEYS[:2]) == [False, False]
    assert inner.asked.count("get") == 2
    assert store.put(entries(KEYS[:2])) == 0
    assert store.seconds_to_get(100, 1) == inf
    assert len(caplog.records) == 1
    assert "remote failed (the simulated store is out of reach)" in caplog.text
    time.now += 5
    for _ in range(3):
        found(store, KEYS[:2])
    assert inner.asked.count("get") == 3
    inner.conditions = Conditions()
    time.now += 5
    assert found(store, KEYS[:2]) == found(store, KEYS[:2]) == [True, True]
    assert store.put(entries(KEYS[:2])) == 2
    assert store.stats().num_refused == 2
    store.close()


def test_a_store_that_hangs_opens_the_breaker_too(hanging):
    time = Time()
    hanging.put(entries(KEYS[:1]))
    store = guarded(hanging, SHORT, breaker=CircuitBreaker(num_failures=2, retry_s=5, clock=time))
    hanging.hold("get")
    for _ in range(4):
        found(store, KEYS[:1])
    assert hanging.asked.count("get") == 2
    hanging.release()
    time.now += 5
    store.timeout_s = PATIENT
    assert found(store, KEYS[:1]) == [True]
    store.close()


# -- writing behind the caller's back ---------------------------------------------------------------------------------


def test_put_never_waits_and_refuses_what_the_queue_has_no_room_for(hanging):
    store = guarded(hanging, limits=Limits(max_queued_bytes=350))
    hanging.hold("put")
    assert store.put(entries(KEYS[:2])) == 2
    assert hanging.begun.wait(PATIENT)
    assert store.put(entries(KEYS[2:6])) == 1  # what is being written takes room, too
    assert store.put(entries(KEYS[6:7])) == 0
    assert not store.flush(SHORT)
    hanging.release()
    assert store.flush(PATIENT)
    assert found(store, KEYS[:7]) == [True] * 3 + [False] * 4
    assert (store.stats().num_put, store.stats().num_refused) == (3, 4)
    assert store.put(entries(KEYS[3:6])) == 3
    store.close()


def test_a_late_write_takes_room_until_it_has_ended(hanging):
    store = impatient(hanging, max_queued_bytes=300)
    hanging.hold("put")
    assert store.put(entries(KEYS[:3])) == 3
    assert store.flush(PATIENT)
    assert store.put(entries(KEYS[3:4])) == 0
    hanging.release()
    while not store.put(entries(KEYS[3:4])):
        pass
    assert store.stats().num_timeouts == 1


def test_what_follows_a_block_that_could_not_be_written_is_not_written_either():
    class FailsAtTheSecond(HangingStore):
        def put(self, entries):
            self.conditions = Conditions(failure=self.asked.count("put") == 1)
            return super().put(entries)

    store = guarded(FailsAtTheSecond(FORMAT), limits=Limits(lot_entries=2))
    store.store.hold("put")
    assert store.put(entries(KEYS[:8])) == 8
    assert store.put(entries(KEYS[10:12])) == 2
    store.store.release()
    assert store.flush(PATIENT)
    store.store.conditions = Conditions()
    assert found(store, KEYS[:12]) == [True] * 2 + [False] * 8 + [True] * 2
    assert (store.stats().num_put, store.stats().num_refused) == (4, 6)


def test_what_the_format_does_not_have_is_refused_and_harms_nothing_else():
    store = guarded(SimulatedStore(FORMAT), breaker=CircuitBreaker(num_failures=1))
    store.put([(KEYS[0], memoryview(b"three"))])
    assert store.flush(PATIENT)
    store.put(entries(KEYS[1:2]))
    assert store.flush(PATIENT)
    assert found(store, KEYS[:2]) == [False, True]
    assert store.stats().num_refused == 1
    assert isinstance(store.last_error, ArgumentError)


# -- dropping ---------------------------------------------------------------------------------------------------------


def test_a_dropped_namespace_is_gone_at_once_though_the_store_fails():
    other = key_of(1, OTHERS)
    inner = SimulatedStore(FORMAT)
    store = guarded(inner, 0.5, Limits(retry_s=SHORT), breaker=NEVER)
    store.put(entries([*KEYS[:2], other]))
    assert store.flush(PATIENT)
    inner.conditions = Conditions(failure=1)
    store.drop(OURS)
    inner.conditions = Conditions()
    if inner.contains(KEYS[:1]) == [True]:  # else it was tried again meanwhile
        assert store.contains([*KEYS[:2], other]) in ([False, False, True], [False] * 3)
    assert store.flush(PATIENT)
    assert found(store, [*KEYS[:2], other]) == [False, False, True]
    assert inner.contains(KEYS[:2]) == [False, False]
    assert store.put(entries(KEYS[:2])) == 2
    assert store.flush(PATIENT)
    assert found(store, KEYS[:2]) == [True, True]
    store.close()


def test_reads_and_writes_of_a_namespace_wait_for_its_drop(hanging):
    store = impatient(hanging, retry_s=SHORT)
    hanging.put(entries(KEYS[:2]))
    hanging.hold("drop")
    store.drop(OURS)
    store.timeout_s = PATIENT
    assert found(store, KEYS[:2]) == store.contains(KEYS[:2]) == [False, False]
    assert store.put(entries(KEYS[:2])) == 0
    assert hanging.contains(KEYS[:2]) == [True, True]
    hanging.release()
    assert store.flush(PATIENT)
    assert store.put(entries(KEYS[:2])) == 2
    store.close()


def test_what_waits_to_be_written_is_dropped_with_its_namespace(hanging):
    other = key_of(1, OTHERS)
    store = guarded(hanging, limits=Limits(lot_entries=1))
    hanging.hold("put")
    store.put(entries([other, *KEYS[:3]]))
    assert hanging.begun.wait(PATIENT)
    store.timeout_s = SHORT
    store.drop(OURS)
    store.timeout_s = PATIENT
    hanging.release()
    assert store.flush(PATIENT)
    assert hanging.asked.count("put") == 1
    assert found(store, [other, *KEYS[:3]]) == [True, False, False, False]


def test_a_write_that_ends_after_its_namespace_was_dropped_is_dropped_again(hanging):
    store = guarded(hanging, 0.5, Limits(retry_s=SHORT), breaker=NEVER)
    hanging.hold("put")
    store.put(entries(KEYS[:2]))
    assert hanging.begun.wait(PATIENT)
    store.drop(OURS)  # the write is late by now
    assert not store.flush(SHORT)
    assert store.contains(KEYS[:2]) == [False, False]
    hanging.release()
    assert store.flush(PATIENT)
    assert hanging.contains(KEYS[:2]) == [False, False]
    assert hanging.asked.count("drop") == 1
    store.close()


# -- how long it takes ------------------------------------------------------------------------------------------------


def test_how_long_a_read_takes_is_learnt_from_reads():
    time = Time()
    inner = SimulatedStore(FORMAT, conditions=Conditions(latency_s=0.01, bytes_per_s=1e4), sleep=time.sleep)
    store = guarded(inner, clock=time)
    assert store.seconds_to_get(10**6, 10) == 0
    store.put(entries(KEYS))
    assert store.flush(PATIENT)
    for number in (1, 3, 5, 8) * 3:
        found(store, KEYS[:number])
        store.contains(KEYS)
    assert store.seconds_to_get(500, 5) == pytest.approx(0.01 + 500 / 1e4)
    assert store.seconds_to_get(100 << 20, 300) == pytest.approx(7 * 0.01 + (100 << 20) / 1e4)
    time.now += 61
    assert store.seconds_to_get(500, 5) == 0


# -- the end ----------------------------------------------------------------------------------------------------------


def test_closing_writes_what_waits(hanging):
    store = guarded(hanging)
    store.put(entries(KEYS))
    store.close()
    assert hanging.asked[-1] == "close"
    assert hanging.contains(KEYS) == [True] * 20
    assert store.stats().num_put == 20


def test_closing_is_bounded_though_the_store_hangs(hanging):
    store = impatient(hanging)
    hanging.hold("put", "close")
    store.put(entries(KEYS))
    store.close()  # returns while it hangs
    assert found(store, KEYS[:1]) == [False]
    assert store.put(entries(KEYS[:1])) == 0
    store.drop(OURS)
    store.close()


def test_an_interpreter_ends_though_the_store_hangs():
    program = """if True:
        from tests.tiers.test_guard import *
        store = impatient(HangingStore(FORMAT))
        store.store.hold("get", "put", "drop", "close")
        store.put(entries(KEYS))
        found(store, KEYS)
        store.drop(b"")
        store.close()
        print("done")
    """
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=PATIENT - 1
    )
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


@pytest.mark.parametrize("seed", range(10))
def test_whatever_happens_nothing_wrong_is_read(seed):
    chance, time = Random(seed), Time()
    inner = SimulatedStore(FORMAT, capacity_bytes=1500, seed=seed)
    breaker = CircuitBreaker(num_failures=2, retry_s=1, clock=time)
    store = guarded(inner, limits=Limits(lot_entries=3, retry_s=SHORT), breaker=breaker)
    keys = [key_of(number, tag) for number in range(10) for tag in (OURS, OTHERS)]
    for _ in range(200):
        time.now += chance.random()
        inner.conditions = Conditions(failure=chance.choice((0, 0, 0.5)), loss=0.1, corruption=0.2)
        chosen = chance.sample(keys, 6)
        chance.choice((store.contains, lambda some: store.put(entries(some)), lambda some: found(store, some)))(chosen)
        if chance.random() < 0.02:
            assert store.flush(PATIENT)
            inner.conditions = Conditions()
            time.now += 1
            store.drop(OURS)
            assert not any(found(store, [key for key in chosen if key.startswith(OURS)]))
    inner.conditions = Conditions()
    time.now += 1
    store.contains(keys)
    assert store.flush(PATIENT)
    store.put(entries(keys[:5]))
    assert store.flush(PATIENT)
    assert found(store, keys[:5]) == [True] * 5
    stats = store.stats()
    assert stats.num_corrupt > 0
    assert stats.num_errors > 0
    store.close()


@pytest.mark.parametrize("wrong", [{"num_threads": 0}, {"lot_bytes": 0}, {"lot_entries": 0}])
def test_limits_that_let_nothing_through_are_refused(wrong):
    with pytest.raises(ArgumentError):
        Limits(**wrong)
    with pytest.raises(ArgumentError):
        GuardedStore(SimulatedStore(FORMAT), 0)
