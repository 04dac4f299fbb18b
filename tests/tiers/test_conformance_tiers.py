"""Facts about others' slower tiers, and faults that users reported of them, as facts about these.

Host memory belongs to the core, and each fact that concerns it alone is proved by decisions and an oracle. Stores are
reached by the manager, through the store that `tests.tiers.test_stored` lets several managers share.
"""

import threading

import numpy as np
import pytest
from tests.core.layers import FULL, sliding
from tests.core.small import cached, computed, ids, refused
from tests.core.test_host_tier import FailingMemory, compute, directions, host, leave, played, tiered, tiers, used
from tests.core.test_restoring import core, missing
from tests.tiers import test_stored
from tests.tiers.disks import UnsyncedFiles, contents, found, key, opened, put, room, segments
from tests.tiers.hanging import HangingStore
from tests.tiers.test_stored import CLIENTS, PATIENT, SERVERS, BadMemory, Machine, again, configured, shared, the_store

from kvist import (
    AttentionSpec,
    ConfigError,
    DiskTier,
    HostTier,
    KVCacheManager,
    Media,
    OutOfBlocks,
    RemoteTier,
    Retention,
    StaleMatch,
    TransferError,
)
from kvist.core.pool import BlockPool
from kvist.testing import TokenMemory
from kvist.tiers.disk import DiskStore
from kvist.tiers.protocol import StoreFormat
from kvist.tiers.simulated import Conditions, SimulatedStore

HANGING = []
"""Stores whose calls a test holds up, as they are opened."""


def hanging(format, timeout_s):
    """Open a store whose calls can be held up."""
    HANGING.append(HangingStore(format))
    return HANGING[-1]


def failing_once(format, timeout_s):
    """Open a store that fails at its second `put`."""

    class FailingOnce(SimulatedStore):
        num_puts = 0

        def put(self, entries):
            self.num_puts += 1
            if self.num_puts == 2:
                raise OSError("no room for a moment")
            return super().put(entries)

    SERVERS[b"failing once"] = FailingOnce(format)
    return SERVERS[b"failing once"]


@pytest.fixture(autouse=True)
def _no_servers():
    SERVERS.clear()
    CLIENTS.clear()
    HANGING.clear()
    yield
    for store in HANGING:
        store.release()
    SERVERS.clear()
    CLIENTS.clear()


def held_up(timeout_s=0.2, **options):
    return RemoteTier(url="tests.tiers.test_conformance_tiers:hanging", timeout_s=timeout_s, **options)


# -- TensorRT-LLM: the secondary pool ---------------------------------------------------------------------------------


def two_blocks_of_a_leaf(**tier):
    """4 blocks and 1 of host memory: 12 tokens of which the middle 4 have priority 0, and 4 of another."""
    manager = tiered(num_blocks=4, num_host_blocks=1, block_size=4, tier=tier)
    first = computed(manager, range(12), retention=Retention([(4, 8, 0, None)]))
    second = computed(manager, range(100, 104))
    assert manager.num_free_blocks == 0
    manager.free(first)
    assert manager.num_free_blocks == 3
    return manager, second


def test_TRT68_TRT69_a_leaf_goes_to_the_second_tier_before_its_parent_of_less_priority():
    manager, second = two_blocks_of_a_leaf()
    manager.append([second], [104])
    assert tiers(manager, range(13)) == {"device": 8, "host": 4}
    assert directions(manager) == [("device > host", 1)]


def test_TRT70_a_parent_of_too_little_priority_is_not_taken_in():
    """Differs: what hangs below it goes with it, since nothing could find it; there it stays until it is evicted."""
    manager, second = two_blocks_of_a_leaf(min_priority=35)
    manager.append([second], [[*range(104, 109)]])
    assert tiers(manager, range(13)) == {"device": 4, "host": 0}
    assert used(manager) == 0
    manager.check()


def test_TRT72_two_tiers_count_for_themselves_and_what_is_given_back_is_handed_out_next():
    """Differs: what has no content goes to the front always; what has is evicted in the policy's order."""
    primary, secondary = BlockPool(8), BlockPool(4)
    assert (primary.num_free, secondary.num_free) == (8, 4)
    [block] = primary.take(1).tolist()
    secondary.take(1)
    assert (primary.num_free, secondary.num_free) == (7, 3)
    primary.give(np.array([block], np.int32))
    assert primary.take(1).tolist() == [block]


@pytest.mark.parametrize(("priority", "is_taken"), [(35, True), (5, False)])
def test_TRT74_a_victim_of_usual_priority_goes_to_the_second_tier_and_one_of_5_does_not(priority, is_taken):
    manager = tiered(num_blocks=4, block_size=4, tier={"min_priority": 35})
    cached(manager, range(4), retention=Retention([(0, None, priority, None)]))
    cached(manager, range(20, 24), retention=Retention([(0, None, 80, None)]))
    manager.evict(1)
    assert used(manager) == is_taken
    assert manager.match_prefix([*range(20, 24), 9]).tiers == {"device": 4, "host": 0}


def test_TRT79_TRT80_blocks_that_went_down_and_came_up_one_by_one_are_reused():
    manager, memory = played(tiered(num_blocks=4, num_host_blocks=4, block_size=8))
    sequence = compute(manager, memory, range(17))
    assert sequence.num_cached_tokens == 0
    manager.free(sequence)
    for _ in range(2):
        manager.evict(1)
    assert manager.prefetch(range(17)).num_tokens == 16
    assert leave(manager, memory, range(17)) == 16


def test_TRT121_of_two_sequences_that_need_all_memory_one_waits_in_host_memory_and_on_disk(tmp_path):
    tiers = [HostTier(num_blocks=2), DiskTier(tmp_path, "1 MiB", write="back", timeout_s=PATIENT)]
    with Machine(configured(*tiers, num_blocks=4)) as machine:
        first = machine.compute(range(8))
        machine.manager.suspend(first)
        second = machine.compute(range(20, 28))
        with pytest.raises(OutOfBlocks):
            machine.manager.resume(first)
        machine.manager.suspend(second)
        assert machine.manager.flush(PATIENT)
        for _ in range(3):
            for sequence in (first, second):
                machine.manager.resume(sequence)
                machine.memory.verify(sequence)
                machine.memory.write(sequence)
                machine.manager.commit([sequence])
                machine.manager.check()
                machine.manager.suspend(sequence)
                assert machine.manager.flush(PATIENT)


# -- vLLM: offloading to host memory ----------------------------------------------------------------------------------


def single(number):
    """A prompt of one block and a token."""
    return [number, number, 99]


def demoted(manager, *numbers):
    """Let one block each of these be in host memory."""
    for number in numbers:
        cached(manager, single(number)[:2])
    manager.evict(manager.num_blocks)


def in_host(manager, *numbers):
    return [manager.match_prefix(single(number)).tiers["host"] > 0 for number in numbers]


def test_V83_of_four_blocks_the_one_used_least_recently_makes_room():
    manager = tiered(num_blocks=8, num_host_blocks=4)
    demoted(manager, 1, 2)
    assert in_host(manager, 1, 2, 3) == [True, True, False]
    demoted(manager, 3, 4, 5)
    assert in_host(manager, 1, 2, 3, 4, 5) == [False, True, True, True, True]
    assert host(manager).num_evicted_blocks == 1


def test_V85_what_is_stored_may_be_evicted_until_it_is_brought_up():
    """Differs: what is brought up leaves host memory, and comes back when the device evicts it."""
    manager = tiered(num_blocks=8, num_host_blocks=4)
    queue = manager._state.lower.queue
    demoted(manager, 1, 2, 3)
    assert queue.num_candidates == 3
    for number in (1, 2):
        manager.free(manager.add_sequence(single(number)), publish=False)
    assert queue.num_candidates == 1
    manager.reset()
    assert manager._state.lower.queue.num_candidates == 0


def test_V86_usage_is_what_is_taken_of_all():
    manager = tiered(num_blocks=8, num_host_blocks=4)
    usage = [used(manager) / 4]
    for numbers in ((1, 2), (3, 4), (5, 6)):
        demoted(manager, *numbers)
        usage.append(used(manager) / 4)
    manager.drop(namespace=())
    assert [*usage, used(manager) / 4] == [0.0, 0.5, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("hits", "window", "expected"),
    [([1, 1], None, 2), ([1, 1, 0], None, 2), ([0, 1], None, 0), ([1, 1], 3, 2), ([0, 1, 1], 3, 3),
     ([0, 1, 1, 0], 3, 3), ([1, 1], 4, 2), ([0, 0, 0], 3, 0)],
)  # fmt: skip
def test_V89_prefixes_are_found_to_the_first_gap_and_windows_from_their_end(hits, window, expected):
    """Blocks of one token: of a window of 3, the two blocks before the next token count."""
    manager = core(layers=[FULL if window is None else sliding(window)], block_size=1)
    prefix = missing(manager, range(len(hits) + 1))
    assert prefix.reach(np.array([hits], bool)) == expected


# -- reported: host memory --------------------------------------------------------------------------------------------


def test_B015_each_tiers_counts_are_what_is_there_however_often_blocks_change_tiers():
    manager = tiered(num_blocks=2, num_host_blocks=2)
    cached(manager, range(4))
    for number in range(100):
        sequence = manager.add_sequence([number % 3 + 50])
        manager.free(sequence)
        if number % 7 == 0:
            cached(manager, range(2))
        stats, lower = host(manager), manager._state.lower
        held = sum(int((each.blocks >= 0).sum()) for each in lower.extents())
        assert stats.num_blocks - stats.num_free_blocks == held
        assert 0 <= held <= 2
        assert manager.num_free_blocks == 2
        manager.check()


def test_B027_the_same_content_twice_takes_no_more_room_and_pins_are_never_evicted():
    manager = tiered(num_blocks=16, num_host_blocks=8)
    for _ in range(2):
        cached(manager, range(16))
        manager.evict(16)
        assert used(manager) == 8
    pin = manager.pin(manager.match_prefix([*range(16), 9]))
    cached(manager, range(100, 116))
    assert manager.evict(16) == 8
    assert manager.match_prefix([*range(16), 9]).tiers == {"device": 16, "host": 0}
    pin.release()
    for _ in range(2):
        manager.drop(namespace=())
        assert used(manager) == 0
    manager.check()


@pytest.mark.parametrize("outcome", ["written", "failed", "late"])
def test_B030_a_block_can_be_evicted_whatever_becomes_of_its_copy_in_a_store(outcome):
    with Machine(configured(HostTier(num_blocks=2), held_up(), num_blocks=4)) as machine:
        if outcome == "failed":
            HANGING[0].conditions = Conditions(failure=1.0)
        elif outcome == "late":
            HANGING[0].hold("put")
        sequence = machine.compute(range(4))
        machine.manager.free(sequence)
        machine.manager.evict(4)
        assert machine.manager.match_prefix([*range(4), 9]).num_block_tokens == 4
        machine.manager.free(machine.compute(range(20, 28)))
        machine.manager.evict(4)
        assert machine.manager.match_prefix([*range(4), 9]).num_block_tokens == 0
        HANGING[0].release()


def test_B035_with_all_of_it_on_the_device_nothing_is_transferred_and_nobody_waits():
    with Machine(configured(HostTier(num_blocks=4), shared())) as machine:
        machine.leave(range(9))
        CLIENTS[0].asked.clear()
        assert machine.manager.prefetch(range(9)).is_done
        assert machine.leave(range(9)) == 8
        assert CLIENTS[0].asked == []


def test_B119_with_a_device_full_of_unused_content_a_block_comes_up_in_the_place_of_another():
    manager, memory = played(tiered(num_blocks=4, num_host_blocks=4))
    leave(manager, memory, [1, 1])
    manager.evict(4)
    leave(manager, memory, range(20, 28))
    assert leave(manager, memory, [1, 1, 9]) == 2
    manager.check()


def test_B123_a_tier_without_room_refuses_at_once():
    manager = tiered(num_blocks=4, num_host_blocks=1, tier={"min_priority": 90})
    cached(manager, range(8))
    assert manager.evict(4) == 4
    assert host(manager).num_refused_blocks == 4
    assert manager.num_free_blocks == 4


def test_B126_evicting_does_not_wait_for_a_store_that_never_answers():
    with Machine(configured(held_up(write="back"), num_blocks=4)) as machine:
        HANGING[0].hold("put", "contains", "get")
        for first in range(0, 60, 10):
            sequence = machine.compute(range(first, first + 8))
            machine.manager.free(sequence)
        assert machine.manager.store_stats()["tests.tiers.test_conformance_tiers"].num_timeouts > 0
        HANGING[0].release()


def test_B131_B138_B139_what_is_being_brought_up_is_not_written_over_by_what_goes_down_for_it():
    """Two blocks each, all full: what the device evicts for it finds no room, and is dropped."""
    manager, memory = played(tiered(num_blocks=2, num_host_blocks=2))
    leave(manager, memory, range(4))
    manager.evict(2)
    leave(manager, memory, range(20, 24))
    match = manager.match_prefix([*range(4), 9])
    assert match.tiers == {"device": 0, "host": 4}
    pin = manager.pin(match)
    manager.check()
    pin.release()
    sequence = manager.add_sequence(range(4))
    assert sequence.num_cached_tokens == 2
    memory.verify(sequence)
    assert host(manager).num_refused_blocks > 0


def test_B135_what_came_up_is_not_cleared_by_blocks_given_to_others_in_the_same_call():
    manager, memory = played(tiered(num_blocks=6, num_host_blocks=6, partial_reuse=True))
    leave(manager, memory, range(6))
    manager.evict(6)
    sequence = manager.add_sequence([*range(6), 7, 8, 9])
    memory.verify(sequence)
    assert sequence.num_cached_tokens == 6
    other = manager.add_sequence([50])
    memory.write(other)
    memory.verify(sequence)


def test_B142_a_match_that_was_evicted_before_it_is_used_is_shorter_or_stale():
    manager, memory = played(tiered(num_blocks=6, num_host_blocks=4))
    leave(manager, memory, range(8))
    manager.evict(6)
    match = manager.match_prefix([*range(8), 9])
    assert match.tiers == {"device": 0, "host": 8}
    leave(manager, memory, range(20, 24))
    manager.evict(6)
    with refused(manager, StaleMatch):
        manager.pin(match)
    assert leave(manager, memory, [*range(8), 9]) == 4


def test_B143_a_block_is_read_for_a_store_before_it_is_given_to_another_and_failing_is_a_miss():
    config = configured(shared(write="back"), num_blocks=4)
    with Machine(config, memory=BadMemory(config)) as machine:
        machine.leave(range(8))
        machine.memory.cannot = ("read",)
        assert machine.leave(range(20, 28)) == 0
        machine.memory.cannot = ()
        assert machine.leave([*range(6), 9]) == 0
        assert machine.leave([*range(20, 26), 9]) == 6


def test_B145_B157_a_load_that_never_ends_is_computed_instead():
    with Machine(configured(held_up())) as machine:
        machine.leave(range(8))
        machine.manager.evict(12)
        HANGING[0].hold("get")
        assert machine.leave([*range(8), 9], publish=False) == 0
        [stats] = machine.manager.store_stats().values()
        assert stats.num_timeouts == 1
        HANGING[0].release()


def test_B146_what_could_not_be_loaded_of_one_group_shortens_the_prefix_and_touches_no_other():
    config = configured(layers=[FULL, sliding(64)], num_blocks=[12, 12])
    with Machine(config) as machine:
        machine.leave(range(8))
        of_window = [each for each in CLIENTS[0].keys_put if each.endswith(b"\x01\x00")]
        assert the_store().change(of_window[2], lambda entry: entry[:-1])
        machine.manager.evict(24)
        assert machine.leave([*range(8), 9], publish=False) == 4


def test_B195_blocks_of_host_memory_are_counted_apart():
    manager = tiered(num_blocks=8, num_host_blocks=8)
    assert manager.stats().num_blocks == manager.num_blocks == manager.num_free_blocks == 8
    assert host(manager).num_blocks == 8


def test_B218_host_memory_takes_nothing_from_the_device_and_none_can_be_had():
    layers = [AttentionSpec(2, 64)] * 2
    without = configured(RemoteTier(url="memory://"), layers=layers)
    config = configured(HostTier(num_blocks=99), layers=layers)
    assert config.pool_num_blocks == without.pool_num_blocks
    assert without.host_num_blocks == ()


def test_B231_reset_while_a_store_writes_forgets_at_once_and_what_is_late_does_no_harm():
    """What stores hold outlives `reset`, as it does the process; `drop` forgets it there."""
    with Machine(configured(held_up(PATIENT), num_blocks=4)) as machine:
        HANGING[0].hold("put")
        machine.manager.free(machine.compute(range(8)))
        machine.manager.stats()
        machine.manager._perform_moves()
        assert HANGING[0].begun.wait(PATIENT)
        machine.manager.reset()
        assert machine.manager.stats().num_extents == 0
        HANGING[0].release()
        assert machine.manager.flush(PATIENT)
        assert machine.leave([*range(4), 9]) == 4


def test_B238_content_can_be_sent_down_by_hand_and_each_tier_tells_what_it_has():
    manager = tiered(num_blocks=8, num_host_blocks=8)
    cached(manager, range(8))
    assert manager.evict(4) == 4
    assert directions(manager) == [("device > host", 4)]
    assert manager.stats().num_evictable_blocks == 0
    assert (host(manager).num_blocks, host(manager).num_free_blocks) == (8, 4)


def test_B133_a_copy_down_is_ordered_after_what_wrote_the_block_and_before_what_writes_it_next():
    """Only what is committed can be evicted, so its forward pass came before the call that orders the copy."""
    manager = tiered(num_blocks=4)
    sequence = manager.add_sequence(range(8))
    manager.commit([sequence], 4)
    manager.free(sequence)
    assert tiers(manager, [*range(8), 9]) == {"device": 4, "host": 0}
    assert manager.evict(4) == 2
    assert [move.destination_tier for move in manager.take_moves()] == ["host", "host"]


def test_a_memory_that_fails_while_content_comes_up_costs_no_block():
    config = tiered(num_blocks=4).config
    memory = FailingMemory(config)
    manager = memory.attach(KVCacheManager(config, memory))
    leave(manager, memory, range(6))
    manager.evict(4)
    memory.is_broken = True
    with pytest.raises(TransferError):
        manager.add_sequence([*range(6), 9])
    manager.check()
    assert manager.num_free_blocks == 4


# -- reported: identity in every tier ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["host", "disk", "server"])
def test_B062_B063_an_adapter_and_a_salt_tell_content_apart_in_every_tier_and_after_a_restart(tier, tmp_path):
    tier = {
        "host": HostTier(num_blocks=16),
        "disk": DiskTier(tmp_path, "1 MiB", timeout_s=PATIENT),
        "server": shared(),
    }[tier]
    with Machine(configured(tier)) as machine:
        machine.leave(range(8), namespace=("adapter a", "salt 1"))
        machine.manager.evict(12)
        others = [("adapter b", "salt 1"), ("adapter a", "salt 2"), ("adapter a",), ()]
        for other in others:
            assert machine.leave([*range(8), 9], namespace=other, publish=False) == 0
        assert machine.leave([*range(8), 9], namespace=("adapter a", "salt 1"), publish=False) == 8
    if isinstance(tier, HostTier):
        return
    with again(machine) as second:
        assert second.leave([*range(8), 9], namespace=("adapter a", "salt 2"), publish=False) == 0
        assert second.leave([*range(8), 9], namespace=("adapter a", "salt 1"), publish=False) == 8


@pytest.mark.parametrize(
    "change",
    [{"model": "a model@2"}, {"block_size": 4}, {"layers": [AttentionSpec(1, 1, dtype="float32")]},
     {"layers": [AttentionSpec(2, 1)]}],
    ids=str,
)  # fmt: skip
def test_B065_B154_content_of_another_revision_dtype_or_block_size_is_not_found(change):
    store = SimulatedStore(StoreFormat("any", 2, (16,)))
    first, second = configured(shared()), configured(shared(), **change)
    with Machine(first) as machine:
        machine.leave(range(8))
        store = CLIENTS[0].store
    test_stored.SERVERS.clear()
    with Machine(second, machine.memory.prefixes) as other:
        CLIENTS[-1].store = store  # the same place, in spite of the format
        assert other.leave(range(8), publish=False) == 0


def test_B077_a_load_writes_only_blocks_that_nobody_has():
    with Machine(configured(shared(), block_size=4)) as one:
        one.leave(range(12))
        prefixes = one.memory.prefixes
    with Machine(configured(shared(), block_size=4), prefixes) as machine:
        first = machine.compute(range(8))
        written = []
        write = machine.memory.write_blocks
        machine.memory.write_blocks = lambda group, blocks, rows: (
            written.extend(blocks.tolist()),
            write(group, blocks, rows),
        )
        second = machine.compute([*range(12), 9], publish=False)
        assert second.num_cached_tokens == 12
        assert ids(second)[:1] == ids(first)[:1]
        assert written
        assert not set(written) & set(ids(first))


def test_B063_media_tell_content_apart_in_a_store():
    with Machine(configured(shared())) as machine:
        for number in range(3):
            symbols = [(number, 9)] * 4 + [1]
            machine.leave([9, 9, 9, 9, 1], media=[Media(0, 4, f"image {number}")], symbols=symbols)
        machine.manager.evict(12)
        for number in range(4):
            symbols = [(number, 9)] * 4 + [1]
            cached = machine.leave([9, 9, 9, 9, 1], media=[Media(0, 4, f"image {number}")], symbols=symbols)
            assert cached == (4 if number < 3 else 0)


# -- reported: disk and remote stores ---------------------------------------------------------------------------------


def test_B149_after_a_restart_the_content_is_there_and_counts_toward_the_capacity(tmp_path):
    store = opened(tmp_path, room(6))
    put(store, 1, 2, 3, 4)
    before = store.stats()
    store.close()
    store = opened(tmp_path, room(6))
    assert found(store, 1, 2, 3, 4) == [1, 2, 3, 4]
    assert store.stats().num_bytes == before.num_bytes > 0
    for number in range(5, 30):
        put(store, number)
    assert store.stats().num_evicted > 0
    store.close()


def test_B150_a_file_that_is_gone_is_a_miss_every_time(tmp_path):
    store = opened(tmp_path)
    put(store, 1, 2)
    store.close()
    for path in segments(tmp_path):
        path.unlink()
    store = opened(tmp_path)
    assert [found(store, 1), found(store, 1)] == [[], []]
    assert put(store, 1) == 1
    assert found(store, 1) == [1]
    store.close()


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
def test_B151_B153_B155_half_an_entry_is_a_miss_and_is_removed_and_the_next_one_is_found(keep):
    with Machine(configured(shared())) as machine:
        machine.leave(range(4), namespace=("a",))
        torn = list(CLIENTS[0].keys_put)
        machine.leave(range(4), namespace=("b",))
        for each in torn:
            assert the_store().change(each, lambda entry: entry[: int(keep * len(entry))])
        machine.manager.evict(12)
        num_entries = the_store().stats().num_entries
        assert machine.leave([*range(4), 9], namespace=("a",), publish=False) == 0
        assert the_store().stats().num_entries < num_entries
        assert machine.leave([*range(4), 9], namespace=("b",), publish=False) == 4


def test_B153_a_truncated_file_ends_no_thread_and_the_next_prompt_is_found(tmp_path):
    tier = DiskTier(tmp_path, "1 MiB", timeout_s=PATIENT)
    with Machine(configured(tier)) as machine:
        machine.leave(range(8))
    for path in tmp_path.glob("*.blocks"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 // 4096 * 4096 + 1])
    with again(machine) as second:
        assert second.manager.prefetch(range(9)).wait(PATIENT)
        second.leave(range(9))
        second.leave(range(50, 58))
        second.manager.evict(12)
        assert second.leave([*range(50, 58), 9]) == 8


def test_B157_of_a_long_load_what_came_before_the_store_hung_is_used():
    """A store is asked for 256 blocks at a time; it hangs at the second lot."""
    config = configured(held_up(1.0), block_size=1, num_blocks=400, max_sequence_length=400)
    with Machine(config) as machine:
        machine.leave(range(300))
        machine.manager.evict(400)
        get, num_calls = HANGING[0].get, []

        def second_hangs(keys, buffers):
            num_calls.append(len(keys))
            if len(num_calls) == 2:
                HANGING[0].hold("get")
            return get(keys, buffers)

        HANGING[0].get = second_hangs
        assert machine.leave([*range(300), 9], publish=False) == 256
        HANGING[0].release()


def test_B158_content_that_changes_while_it_is_read_is_a_miss():
    with Machine(configured(shared())) as machine:
        machine.leave(range(8))
        machine.manager.evict(12)
        the_store().conditions = Conditions(corruption=1.0)
        assert machine.leave([*range(8), 9], publish=False) == 0
        assert the_store().stats().num_corrupt > 0


def test_B159_B161_what_a_store_did_not_take_is_given_to_it_again_with_the_next_prompt():
    with Machine(configured(shared())) as machine:
        machine.leave(range(12))
        for each in CLIENTS[0].keys_put[:2]:
            the_store()._forget(each)
        machine.manager.evict(12)
        assert machine.leave([*range(12), 9]) == 0
        machine.manager.evict(12)
        assert machine.leave([*range(12), 9], publish=False) == 12


def test_B162_of_what_a_store_failed_to_take_the_rest_is_not_stored_without_its_beginning():
    tier = RemoteTier(url="tests.tiers.test_conformance_tiers:failing_once", timeout_s=PATIENT)
    config = configured(tier, block_size=1, num_blocks=900, max_sequence_length=900)
    with Machine(config) as machine:
        machine.leave(range(800))
        stats = machine.manager.store_stats()["tests.tiers.test_conformance_tiers"]
        assert stats.num_entries == 256
        assert stats.num_refused == 800 - 256
        machine.manager.evict(900)
        assert machine.leave([*range(800), 9]) == 256
        assert machine.manager.store_stats()["tests.tiers.test_conformance_tiers"].num_entries == 801


def test_B163_a_second_process_does_not_count_for_itself_in_the_same_directory(tmp_path):
    """It is refused, and told who has the directory."""
    store = opened(tmp_path)
    with pytest.raises(ConfigError):
        DiskStore(tmp_path, 1 << 20, StoreFormat("a model", 2, (100,)), files=UnsyncedFiles())
    store.close()


def test_B165_a_full_disk_makes_room_by_what_is_old_and_not_by_what_has_just_come(tmp_path):
    store = opened(tmp_path, room(4))
    put(store, 1, 2, 3, 4)
    assert put(store, 5) == 1
    assert found(store, 5) == [5]
    assert len(found(store, 1, 2, 3, 4)) < 4
    store.close()


def test_B226_a_prompt_of_64_blocks_is_two_questions_to_a_store():
    config = configured(shared(), block_size=1, num_blocks=80)
    with Machine(config) as machine:
        machine.leave(range(64))
        machine.manager.evict(80)
        CLIENTS[0].asked.clear()
        assert machine.leave([*range(64), 99], publish=False) == 64
        assert CLIENTS[0].asked == ["contains", "get"]


def test_B227_threads_that_store_load_prefetch_and_ask_for_numbers_never_wait_for_each_other():
    with Machine(configured(shared())) as machine:
        stack = machine.manager._link.stack
        keys = [key(number) for number in range(8)]
        rows = np.array([np.frombuffer(contents(number, 16), np.uint8) for number in range(8)])

        def load():
            stack.get(keys, 0)

        acts = [
            lambda: stack.put(keys, rows, "committed", 35, 0),
            load,
            lambda: stack.fetch_ahead([keys]).wait(PATIENT),
            stack.stats,
            lambda: stack.contains(keys),
            lambda: stack.drop(keys[0][:16]),
        ]
        threads = [threading.Thread(target=lambda act=act: [act() for _ in range(100)]) for act in acts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENT)
        assert not any(thread.is_alive() for thread in threads)


def test_what_the_oracle_of_these_tests_takes_for_a_store_is_bytes():
    config = configured(shared())
    memory = TokenMemory(config)
    assert memory.block_format() == ((16,), ({"slots": "int64"},))
