import doctest

import pytest

from kvist.errors import ArgumentError
from kvist.testing.stores import StoreSuite, contents_of, key_of
from kvist.tiers import counting
from kvist.tiers import simulated as module
from kvist.tiers.protocol import StoreFormat
from kvist.tiers.simulated import Conditions, SimulatedStore

FORMAT = StoreFormat("a model", block_size=2, block_bytes=(100,))
KEYS = [key_of(number) for number in range(200)]


def filled(num_entries, conditions=Conditions(), **options):  # noqa: B008
    store = SimulatedStore(FORMAT, **options)
    store.put([(key, memoryview(contents_of(key, 100))) for key in KEYS[:num_entries]])
    store.conditions = conditions
    return store


def found(store, keys):
    buffers = [bytearray(100) for _ in keys]
    answers = store.get(keys, [memoryview(buffer) for buffer in buffers])
    for key, buffer, is_there in zip(keys, buffers, answers, strict=True):
        assert not is_there or bytes(buffer) == contents_of(key, 100)
    return answers


class TestSimulated(StoreSuite):
    keeps = False

    def open_store(self, format, place):
        return SimulatedStore(format)

    def damage(self, store, key, change):
        return store.change(key, change)


class TestSimulatedWithABound(TestSimulated):
    def open_store(self, format, place):
        return SimulatedStore(format, capacity_bytes=64 * sum(self.block_bytes))


def test_the_examples_in_the_docstrings_run():
    assert doctest.testmod(module).failed == doctest.testmod(counting).failed == 0


def test_the_least_recently_used_goes_first():
    store = filled(3, capacity_bytes=300)
    assert found(store, KEYS[:1]) == [True]
    store.put([(KEYS[3], memoryview(contents_of(KEYS[3], 100)))])
    assert found(store, KEYS[:4]) == [True, False, True, True]
    assert (store.stats().num_evicted, store.stats().num_bytes, store.stats().num_entries) == (1, 300, 3)


def test_what_is_larger_than_the_store_is_refused():
    store = filled(2, capacity_bytes=99)
    assert (store.stats().num_refused, store.stats().num_put, store.stats().num_entries) == (2, 0, 0)


def test_calls_take_latency_and_their_bytes_at_bandwidth():
    waited = []
    store = filled(3, Conditions(latency_s=0.5, bytes_per_s=1000), sleep=waited.append)
    found(store, KEYS[:4])
    store.contains(KEYS[:4])
    store.put([(KEYS[4], memoryview(bytes(100)))])
    assert waited == [0.5 + 300 / 1000, 0.5, 0.5 + 100 / 1000]


def test_what_is_lost_is_gone_from_then_on():
    store = filled(200, Conditions(loss=0.5))
    first = found(store, KEYS)
    store.conditions = Conditions()
    assert 60 < sum(first) < 140
    assert found(store, KEYS) == first


def test_what_comes_damaged_is_never_taken_for_contents():
    store = filled(200, Conditions(corruption=0.5))
    num_found = sum(found(store, KEYS))
    assert 60 < num_found < 140
    assert store.stats().num_corrupt == 200 - num_found == store.stats().num_misses


def test_calls_fail_with_the_probability_that_was_said():
    store = filled(1, Conditions(failure=1))
    with pytest.raises(ConnectionError):
        store.contains(KEYS[:1])
    store.conditions = Conditions()
    assert found(store, KEYS[:1]) == [True]


def test_equal_seeds_give_equal_faults():
    stores = [filled(200, Conditions(loss=0.2, corruption=0.2), seed=seed) for seed in (3, 3, 4)]
    answers = [found(store, KEYS) for store in stores]
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize(
    "wrong", [{"loss": 1.5}, {"corruption": -0.1}, {"failure": 2}, {"latency_s": -1}, {"bytes_per_s": 0}]
)
def test_conditions_that_cannot_be_are_refused(wrong):
    with pytest.raises(ArgumentError):
        Conditions(**wrong)
