"""Stores one behind the other: who is asked, who is filled, what is fetched ahead, what is forgotten for good."""

import sys
from threading import Event, get_ident

import numpy as np
import pytest
from tests.tiers.hanging import PATIENT, HangingStore

from kvist import ConfigError, DiskTier, RemoteTier
from kvist.testing.stores import contents_of, key_of
from kvist.tiers import stack as module
from kvist.tiers.disk import DiskStore
from kvist.tiers.protocol import StoreFormat
from kvist.tiers.simulated import Conditions, SimulatedStore
from kvist.tiers.stack import HERE, NOWHERE, Coming, StoreStack, open_stack

FORMAT = StoreFormat("a model", block_size=2, block_bytes=(100, 40))
OURS, OTHERS = b"*" * 16, b"another tenant's"
KEYS = [key_of(number, OURS) for number in range(8)]
THEIRS = [key_of(number, OTHERS) for number in range(8)]


class AskedStore(HangingStore):
    """A store that notes what it is asked for, by call; `get` notes the keys."""

    def __init__(self, format):
        super().__init__(format)
        self.got = []

    def get(self, keys, buffers):
        self.got += keys
        return super().get(keys, buffers)

    def num_asked(self, call):
        return self.asked.count(call)


def remote(**settings):
    return RemoteTier(url="memory://", timeout_s=PATIENT, **settings)


@pytest.fixture
def stores():
    found = [AskedStore(FORMAT), AskedStore(FORMAT)]
    yield found
    for store in found:
        store.release()


@pytest.fixture
def stack(stores):
    made = stacked(stores)
    yield made
    for store in stores:
        store.release()
    made.close()


def stacked(stores, *tiers):
    tiers = tiers or [remote()] * len(stores)
    names = ["fast", "slow"][: len(stores)]
    return StoreStack(list(zip(tiers, stores, strict=True)), FORMAT.block_bytes, names=names)


def rows(keys, size=100):
    return np.array([np.frombuffer(contents_of(key, size), np.uint8) for key in keys]).reshape(len(keys), size)


def put(store, keys, size=100):
    store.put([(key, memoryview(row)) for key, row in zip(keys, rows(keys, size), strict=True)])


def got(stack, keys, group=0):
    """Of which keys the contents came; they must be the right ones."""
    contents = stack.get(keys, group)
    for key, row in zip(keys, contents, strict=True):
        assert row is None or row.tobytes() == contents_of(key, FORMAT.block_bytes[group])
    return [row is not None for row in contents]


def fetch(stack, *keys_by_group):
    assert stack.fetch_ahead(keys_by_group).wait(PATIENT)


# -- asking -----------------------------------------------------------------------------------------------------------


def test_a_slower_store_is_asked_for_what_faster_ones_lack_only(stack, stores):
    put(stores[0], KEYS[:2])
    put(stores[1], KEYS[:4])
    assert got(stack, KEYS) == [True] * 4 + [False] * 4
    assert stores[0].got == KEYS
    assert stores[1].got == KEYS[2:]


def test_a_look_tells_the_fastest_place_of_each(stack, stores):
    put(stores[0], KEYS[:2])
    put(stores[1], KEYS[:4])
    assert stack.look(KEYS[:5]).tolist() == [0, 0, 1, 1, NOWHERE]
    assert stack.contains(KEYS[:5]).tolist() == [True] * 4 + [False]
    assert stack.where(KEYS[:5]) == ["fast", "fast", "slow", "slow", ""]
    assert stack.names == ["fast", "slow"]


def test_nothing_asked_is_nothing_found(stack):
    assert stack.contains([]).tolist() == []
    assert got(stack, []) == []
    assert stack.get([], 1) == []


def test_what_a_slower_store_had_is_handed_to_the_faster_ones(stack, stores):
    put(stores[1], KEYS[:3])
    assert got(stack, KEYS[:3]) == [True] * 3
    assert stack.flush(PATIENT)
    assert stores[0].contains(KEYS[:3]) == [True] * 3
    stores[1].got.clear()
    assert got(stack, KEYS[:3]) == [True] * 3
    assert stores[1].got == []


def test_what_a_faster_store_had_is_not_written_to_the_slower_ones(stack, stores):
    put(stores[0], KEYS[:3])
    assert got(stack, KEYS[:3]) == [True] * 3
    assert stack.flush(PATIENT)
    assert stores[1].contains(KEYS[:3]) == [False] * 3


def test_damaged_content_of_a_faster_store_is_had_from_a_slower_one_and_mended(stack, stores):
    for store in stores:
        put(store, KEYS[:1])
    stores[0].change(KEYS[0], lambda entry: entry[:-1] + bytes([entry[-1] ^ 1]))
    assert got(stack, KEYS[:1]) == [True]
    assert stack.flush(PATIENT)
    assert got(stacked(stores[:1], remote()), KEYS[:1]) == [True]


def test_a_store_that_fails_is_passed_over(stack, stores):
    put(stores[1], KEYS[:2])
    stores[0].conditions = Conditions(failure=1.0)
    assert stack.contains(KEYS[:3]).tolist() == [True, True, False]
    assert got(stack, KEYS[:2]) == [True, True]
    assert stack.stats()["fast"].num_errors >= 1


def test_groups_have_contents_of_their_own_length(stack, stores):
    put(stores[0], KEYS[:2], 40)
    assert got(stack, KEYS[:2], group=1) == [True, True]
    assert stack.get(KEYS[:2], 0) == [None, None]


# -- keeping ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tier", "cause", "priority", "hits", "takes"),
    [
        ({}, "committed", 35, 0, True),
        ({}, "evicted", 35, 9, False),
        ({"write": "back"}, "committed", 35, 0, False),
        ({"write": "back"}, "evicted", 35, 0, True),
        ({"write": "back", "min_hits": 2}, "evicted", 35, 1, False),
        ({"write": "back", "min_hits": 2}, "evicted", 35, 2, True),
        ({"min_hits": 2}, "committed", 35, 0, True),
        ({"min_priority": 36}, "committed", 35, 0, False),
        ({"min_priority": 35}, "committed", 35, 0, True),
        ({"write": "back", "min_priority": 36}, "evicted", 35, 0, False),
    ],
)
def test_a_store_takes_what_its_settings_say(stores, tier, cause, priority, hits, takes):
    stack = stacked(stores[:1], remote(**tier))
    assert stack.wants(cause, priority, hits) == takes
    stack.put(KEYS[:2], rows(KEYS[:2]), cause, priority, hits)
    assert stack.flush(PATIENT)
    assert stores[0].contains(KEYS[:2]) == [takes] * 2
    stack.close()


def test_each_store_takes_for_itself(stores):
    stack = stacked(stores, remote(write="back"), remote())
    stack.put(KEYS[:1], rows(KEYS[:1]), "committed", 35, 0)
    stack.put(KEYS[1:2], rows(KEYS[1:2]), "evicted", 35, 0)
    assert stack.flush(PATIENT)
    assert [store.contains(KEYS[:2]) for store in stores] == [[False, True], [True, False]]
    stack.close()


def test_what_is_put_is_copied_before_the_call_returns(stack, stores):
    stores[0].hold("put")
    contents = rows(KEYS[:1])
    stack.put(KEYS[:1], contents, "committed", 35, 0)
    contents[:] = 0
    stores[0].release()
    assert stack.flush(PATIENT)
    assert got(stack, KEYS[:1]) == [True]


# -- fetching ahead ---------------------------------------------------------------------------------------------------


def test_what_was_fetched_ahead_is_had_once_without_asking_a_store(stack, stores):
    put(stores[1], KEYS[:3])
    fetch(stack, KEYS[:4])
    for store in stores:
        store.asked.clear()
        store.hold("get", "contains")
    assert stack.look(KEYS[:4]).tolist() == [HERE] * 3 + [NOWHERE]
    assert got(stack, KEYS[:3]) == [True] * 3
    assert [store.asked for store in stores] == [[], []]
    for store in stores:
        store.release()
    assert got(stack, KEYS[:3]) == [True] * 3
    assert stores[0].num_asked("get") == 1


def test_that_no_store_had_something_holds_for_one_look(stack, stores):
    fetch(stack, KEYS[:2])
    put(stores[1], KEYS[:2])  # another machine
    assert stack.contains(KEYS[:2]).tolist() == [False, False]
    assert stack.contains(KEYS[:2]).tolist() == [True, True]


def test_what_is_put_after_nothing_was_found_is_found(stack):
    fetch(stack, KEYS[:2])
    stack.put(KEYS[:2], rows(KEYS[:2]), "committed", 35, 0)
    assert stack.flush(PATIENT)
    assert stack.contains(KEYS[:2]).tolist() == [True, True]


def test_fetching_ahead_fills_faster_stores(stack, stores):
    put(stores[1], KEYS[:3])
    fetch(stack, KEYS[:3])
    assert stack.flush(PATIENT)
    assert stores[0].contains(KEYS[:3]) == [True] * 3


def test_all_groups_are_fetched(stack, stores):
    put(stores[0], KEYS[:2])
    put(stores[0], KEYS[2:4], 40)
    fetch(stack, KEYS[:2], KEYS[2:4])
    stores[0].asked.clear()
    assert got(stack, KEYS[:2]) == [True, True]
    assert got(stack, KEYS[2:4], group=1) == [True, True]
    assert stores[0].asked == []


def test_the_head_of_what_is_fetched_has_room_before_the_rest(stack, stores, monkeypatch):
    monkeypatch.setattr(module, "MAX_COMING_BYTES", 350)
    put(stores[0], KEYS)
    fetch(stack, KEYS)
    assert stores[0].got == KEYS[:3]
    assert stack.look(KEYS).tolist() == [HERE] * 3 + [0] * 5


def test_of_what_was_fetched_and_never_asked_for_the_oldest_goes(stores, monkeypatch):
    monkeypatch.setattr(module, "MAX_COMING_BYTES", 300)
    stack = stacked(stores)
    put(stores[0], KEYS)
    fetch(stack, KEYS[:3])
    fetch(stack, KEYS[3:5])
    assert stack.look(KEYS[:5]).tolist() == [0, 0, HERE, HERE, HERE]
    stack.close()


def test_what_is_being_fetched_is_not_fetched_twice_and_both_wait_for_it(stack, stores):
    put(stores[1], KEYS)
    stores[1].hold("get")
    first = stack.fetch_ahead([KEYS[:4]])
    assert stores[1].begun.wait(PATIENT)
    second, third = stack.fetch_ahead([KEYS[:6]]), stack.fetch_ahead([KEYS[:2]])
    assert not second.wait(0.001)
    assert not third.wait(0.001)
    stores[1].release()
    assert all(coming.wait(PATIENT) for coming in (first, second, third))
    assert stores[1].got == KEYS[:6]
    assert stack.look(KEYS).tolist() == [HERE] * 6 + [1] * 2


def test_only_what_is_chosen_is_fetched_and_where_the_rest_was_is_known_for_one_look(stack, stores):
    put(stores[0], KEYS[:4])

    def choose(look):
        assert look(KEYS[:5]).tolist() == [0] * 4 + [NOWHERE]
        return [KEYS[1:3]]

    assert stack.fetch_ahead([KEYS[:5]], choose).wait(PATIENT)
    assert stores[0].got == KEYS[1:3]
    for num_looks in (1, 2):
        assert stack.look(KEYS[:5]).tolist() == [0, HERE, HERE, 0, NOWHERE]
        assert stores[0].num_asked("contains") == num_looks


def test_what_has_come_for_an_earlier_call_is_not_fetched_again_though_it_was_taken(stack, stores):
    put(stores[1], KEYS)
    stores[1].hold("get")
    first = stack.fetch_ahead([KEYS[:4]])
    assert stores[1].begun.wait(PATIENT)
    may_look = Event()

    def choose(look):
        assert may_look.wait(PATIENT)
        return [[key for key, place in zip(KEYS[:6], look(KEYS[:6]).tolist(), strict=True) if place != HERE]]

    second = stack.fetch_ahead([KEYS[:6]], choose)
    stores[1].release()
    assert first.wait(PATIENT)
    assert got(stack, KEYS[:4]) == [True] * 4
    may_look.set()
    assert second.wait(PATIENT)
    assert stores[1].got == KEYS[:6]


def test_what_is_here_can_be_looked_for_and_taken_without_asking(stack, stores):
    put(stores[0], KEYS[:4])
    fetch(stack, KEYS[:2])
    stores[0].asked.clear()
    assert stack.look_here(KEYS[:3]).tolist() == [HERE, HERE, NOWHERE]
    contents = stack.take_here(KEYS[:3], 0)
    assert [row is not None for row in contents] == [True, True, False]
    assert contents[1].tobytes() == contents_of(KEYS[1], 100)
    assert stores[0].asked == []


def test_who_waits_for_what_is_coming_waits_no_longer_than_asked(stack, stores):
    put(stores[0], KEYS[:1])
    stores[0].hold("get")
    coming = stack.fetch_ahead([KEYS[:1]])
    assert stores[0].begun.wait(PATIENT)
    assert not coming.is_done
    assert not coming.wait(0.001)
    stores[0].release()
    assert coming.wait(PATIENT)
    assert coming.is_done


def test_fetching_happens_in_another_thread(stack, stores):
    threads = []
    stores[0].passes = lambda call: threads.append(get_ident())
    fetch(stack, KEYS[:1])
    assert threads
    assert get_ident() not in threads


def test_nothing_asked_for_is_done():
    assert Coming().is_done
    assert Coming().wait(0.0)


def test_a_fetch_that_goes_wrong_is_over(stack, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(stack, "_get", fail)
    put(stack._levels[0].store.store, KEYS[:1])
    coming = stack.fetch_ahead([KEYS[:1]])
    assert coming.wait(PATIENT)
    assert coming.is_done


# -- forgetting -------------------------------------------------------------------------------------------------------


def test_what_was_dropped_is_in_no_store_nor_coming(stack, stores):
    for store in stores:
        put(store, [*KEYS[:2], *THEIRS[:2]])
    fetch(stack, [*KEYS[:2], *THEIRS[:2]])
    stack.drop(OURS)
    assert stack.contains([*KEYS[:2], *THEIRS[:2]]).tolist() == [False, False, True, True]
    assert got(stack, [*KEYS[:2], *THEIRS[:2]]) == [False, False, True, True]
    stack.drop(b"")
    assert stack.contains(THEIRS[:2]).tolist() == [False, False]


def test_what_was_fetched_before_a_drop_and_comes_after_it_is_not_kept(stack, stores):
    """Neither for the next admission, nor in a faster store, where it would come back from."""
    put(stores[1], KEYS[:2])
    has_read, may_return = Event(), Event()
    get = stores[1].get

    def slow_get(keys, buffers):
        found = get(keys, buffers)
        has_read.set()
        assert may_return.wait(PATIENT)
        return found

    stores[1].get = slow_get
    coming = stack.fetch_ahead([KEYS[:2]])
    assert has_read.wait(PATIENT)
    stack.drop(OURS)
    may_return.set()
    assert coming.wait(PATIENT)
    assert stack.flush(PATIENT)
    stores[1].get = get
    assert stack.contains(KEYS[:2]).tolist() == [False, False]
    assert got(stack, KEYS[:2]) == [False, False]
    assert stores[0].contains(KEYS[:2]) == [False, False]


def test_what_is_put_after_a_drop_is_there(stack):
    stack.put(KEYS[:1], rows(KEYS[:1]), "committed", 35, 0)
    stack.drop(OURS)
    stack.put(KEYS[:1], rows(KEYS[:1]), "committed", 35, 0)
    assert stack.flush(PATIENT)
    assert got(stack, KEYS[:1]) == [True]


# -- numbers and the end ----------------------------------------------------------------------------------------------


def test_how_long_it_takes_is_told_by_store(stores):
    stack = stacked(stores)
    assert stack.seconds_to_get(HERE, 10**9, 10**6) == 0.0
    assert stack.seconds_to_get(0, 100, 1) == 0.0, "nothing is known yet"
    put(stores[1], KEYS)
    stores[1].conditions = Conditions(latency_s=0.001)
    assert got(stack, KEYS) == [True] * 8
    assert stack.seconds_to_get(1, 800, 8) >= 0.001
    assert stack.seconds_to_get(0, 800, 8) < stack.seconds_to_get(1, 800, 8)
    stack.close()


def test_numbers_are_told_by_the_name_of_the_store(stack, stores):
    put(stores[1], KEYS[:3])
    got(stack, KEYS[:4])
    stats = stack.stats()
    assert list(stats) == ["fast", "slow"]
    assert (stats["fast"].num_hits, stats["fast"].num_misses) == (0, 4)
    assert (stats["slow"].num_hits, stats["slow"].num_misses) == (3, 1)


def test_closing_twice_is_fine_and_nothing_is_fetched_after(stores):
    stack = stacked(stores)
    stack.close()
    stack.close()
    assert stack.fetch_ahead([KEYS]).is_done
    assert all(store.num_asked("close") == 1 for store in stores)


def broken_store(format, timeout_s):
    raise RuntimeError("no such server")


def kept_store(format, timeout_s):
    kept_store.made = AskedStore(format)
    return kept_store.made


HERE_AS_A_MODULE = "tests.tiers.test_stack"


def test_stores_are_named_disk_or_by_their_scheme_and_told_apart(tmp_path):
    tiers = [DiskTier(tmp_path / "a", "1 MiB"), remote(), DiskTier(tmp_path / "b", "1 MiB"), remote()]
    stack = open_stack(tiers, FORMAT)
    assert stack.names == ["disk", "memory", "disk 2", "memory 3"]
    stack.close()


@pytest.mark.parametrize("io", ["buffered", "direct"])
def test_a_directory_is_written_as_its_tier_says(tmp_path, monkeypatch, io):
    told = []

    class ToldStore(DiskStore):
        def __init__(self, *arguments, io):
            told.append(io)
            super().__init__(*arguments, io=io)

    monkeypatch.setattr("kvist.tiers.disk.DiskStore", ToldStore)
    open_stack([DiskTier(tmp_path, "1 MiB", io)], FORMAT).close()
    assert told == [io]


def test_a_store_that_cannot_be_opened_closes_those_that_were():
    assert HERE_AS_A_MODULE in sys.modules
    tiers = [RemoteTier(url=f"{HERE_AS_A_MODULE}:kept_store"), RemoteTier(url=f"{HERE_AS_A_MODULE}:broken_store")]
    with pytest.raises(RuntimeError, match="no such server"):
        open_stack(tiers, FORMAT)
    assert kept_store.made.num_asked("close") == 1


def test_a_directory_of_another_format_is_refused(tmp_path):
    open_stack([DiskTier(tmp_path, "1 MiB")], FORMAT).close()
    with pytest.raises(ConfigError):
        open_stack([DiskTier(tmp_path, "1 MiB")], StoreFormat("another model", 2, (100, 40)))


def test_a_store_of_nothing_simulates_as_well():
    store = SimulatedStore(FORMAT, capacity_bytes=0)
    stack = stacked([store], remote())
    stack.put(KEYS[:1], rows(KEYS[:1]), "committed", 35, 0)
    assert stack.flush(PATIENT)
    assert got(stack, KEYS[:1]) == [False]
    stack.close()
