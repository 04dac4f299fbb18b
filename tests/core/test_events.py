"""Events: what the log tells is what is cached; it is bounded, wakes who waits, and costs nothing where nobody asks."""

import threading

import numpy as np
import pytest
from tests.core.layers import FULL, grouped, sliding, state
from tests.core.small import cached, small

from kvist import ArgumentError, HostTier, Media, Retention, SequenceError
from kvist.core import chain
from kvist.core.contents import Contents, contents_of
from kvist.core.events import Cleared, Created, Moved, Removed, Stored, Updated


def told(**settings):
    settings = {"block_size": 4, "num_blocks": 8, "event_buffer": 1024} | settings
    return small(**settings)


def serve(manager, prompt, **options):
    sequence = manager.add_sequence(prompt, **options)
    manager.commit([sequence])
    manager.free(sequence)


def kinds(events):
    return [type(event).__name__ for event in events]


# -- what is told -----------------------------------------------------------------------------------------------------


def test_TRT85_a_log_begins_with_the_blocks_that_there_are():
    manager = told(tiers=[HostTier(num_blocks=2)])
    (created,) = manager.events.poll()
    assert isinstance(created, Created)
    assert (created.id, created.num_blocks) == (0, {"device": 8, "host": 2})
    assert manager.events.poll() == []


def test_TRT86_what_is_committed_is_told_once_by_whole_blocks():
    manager = told()
    sequence = manager.add_sequence(range(10), namespace=("lora", 42))
    manager.commit([sequence])
    _, stored = manager.events.poll()
    assert isinstance(stored, Stored)
    assert (stored.id, stored.parent, stored.num_blocks, stored.tier) == (1, None, 2, "device")
    assert stored.namespace == ("lora", 42)
    assert stored.tokens.tolist() == list(range(8))


def test_TRT87_the_next_block_names_the_one_before_it():
    """Differs: a block is told once it is whole, so that the same tokens are never told twice."""
    manager = told()
    sequence = manager.add_sequence(range(10))
    manager.commit([sequence])
    first = manager.events.poll()[-1]
    manager.append([sequence], [np.array([10, 11, 12])])
    manager.commit([sequence])
    (second,) = manager.events.poll()
    assert (second.id, second.num_blocks, second.start) == (2, 1, 2)
    assert second.parent == first.digests[-1]


def test_TRT88_equal_content_is_told_once():
    manager = told()
    serve(manager, range(9))
    manager.events.poll()
    serve(manager, range(9))
    assert manager.events.poll() == []


def test_B167_a_prompt_that_branches_off_names_the_last_block_that_it_shares():
    manager = told(num_blocks=16)
    serve(manager, range(12))
    first = manager.events.poll()[-1]
    serve(manager, [*range(8), 99, 100, 101, 102])
    (second,) = manager.events.poll()
    assert (first.parent, first.num_blocks, second.num_blocks) == (None, 3, 1)
    assert second.parent == first.digests[1]


def test_TRT93_TRT94_blocks_of_a_priority_are_told_with_it_and_using_them_again_tells_nothing():
    """Differs: both blocks are one event, and what is used again without a priority of its own is not told again."""
    manager = told()
    serve(manager, range(8), retention=Retention([(0, 8, 50, None)]))
    created, stored = manager.events.poll()
    assert (type(created), type(stored)) == (Created, Stored)
    assert (stored.num_blocks, stored.priority) == (2, 50)
    sequence = manager.add_sequence(range(8))
    assert sequence.num_computed_tokens == 7
    manager.commit([sequence])
    manager.free(sequence)
    assert manager.events.poll() == []


def test_a_priority_is_told_with_the_blocks_and_when_it_changes():
    manager = told(num_blocks=16)
    serve(manager, range(9), retention=Retention([(0, 9, 50, None)]))
    assert [event.priority for event in manager.events.poll()[1:]] == [50]
    manager.free(manager.add_sequence(range(9), retention=Retention([(0, 9, 80, None)])), publish=False)
    (updated,) = [event for event in manager.events.poll() if isinstance(event, Updated)]
    assert (updated.old_priority, updated.priority, updated.num_blocks) == (50, 80, 2)


def test_TRT97_narrow_windows_come_first():
    layers = [sliding(16), sliding(12)]
    manager = grouped(layers, block_size=4, num_blocks=[8, 4], event_buffer=64, partial_reuse=False)
    created = manager.events.poll()
    assert [(event.window, event.num_blocks["device"]) for event in created] == [(12, 4), (16, 8)]
    sequence = manager.add_sequence(range(9))
    manager.commit([sequence])
    assert [event.group for event in manager.events.poll()] == [1, 0]


def test_a_window_without_the_first_block_comes_after_those_that_have_it():
    manager = grouped([FULL, sliding(4), sliding(8)], block_size=4, num_blocks=8, event_buffer=64)
    serve(manager, range(12))
    manager.events.poll()
    (extent,) = manager._state.tree.extents()
    extent.blocks[1, 0] = -1
    recorder = manager._state.recorder
    recorder.stored(extent, 0, "device", "published")
    events = recorder.take()
    assert [(event.group, event.start) for event in events] == [(2, 0), (0, 0), (1, 1)]
    assert events[-1].parent == events[0].digests[0]


def test_an_eviction_says_why_and_is_one_event_for_the_tail_of_a_prefix():
    manager = told(num_blocks=4)
    serve(manager, range(16))
    manager.events.poll()
    manager.evict(1)
    manager.evict(1)
    (removed,) = manager.events.poll()
    assert isinstance(removed, Removed)
    assert (removed.reason, removed.start, removed.num_blocks) == ("asked for", 2, 2)


def test_removals_merge_whatever_happens_to_other_namespaces_in_between():
    manager = told(num_blocks=6)
    serve(manager, range(16), namespace=("a tenant",))
    manager.events.poll()
    manager.evict(1)
    serve(manager, range(100, 104), namespace=("another",))
    manager.evict(1)
    first, second = manager.events.poll()
    assert kinds([first, second]) == ["Removed", "Stored"]
    assert (first.start, first.num_blocks) == (2, 2)


def test_removals_do_not_merge_across_other_events():
    manager = told(num_blocks=6)
    serve(manager, range(16))
    manager.events.poll()
    manager.evict(1)
    serve(manager, range(100, 104))
    manager.evict(1)
    assert kinds(manager.events.poll()) == ["Removed", "Stored", "Removed"]


def test_what_goes_to_host_memory_and_back_is_moved():
    manager = told(num_blocks=2, tiers=[HostTier(num_blocks=4)])
    serve(manager, range(8))
    serve(manager, range(100, 108))
    serve(manager, range(9)[:8])
    moved = [event for event in manager.events.poll() if isinstance(event, Moved)]
    assert {(event.source_tier, event.tier) for event in moved} == {("device", "host"), ("host", "device")}


def test_a_window_tells_which_blocks_it_has():
    manager = grouped([FULL, sliding(3)], block_size=2, num_blocks=[16, 16], event_buffer=64, partial_reuse=False)
    sequence = manager.add_sequence(range(12))
    manager.commit([sequence], 6)
    manager.num_free_blocks  # noqa: B018  # what is out of span goes
    manager.commit([sequence], 12)
    stored = [event for event in manager.events.poll() if isinstance(event, Stored)]
    assert {event.group for event in stored} == {0, 1}
    manager.free(sequence)


def test_a_state_is_told_where_it_is_kept():
    manager = grouped([FULL, state()], block_size=2, num_blocks=[16, 8], event_buffer=64, partial_reuse=False)
    sequence = manager.add_sequence(range(9))
    manager.commit([sequence], 8)
    events = [event for event in manager.events.poll() if isinstance(event, Stored) and event.group == 1]
    assert [(event.start, event.num_blocks) for event in events] == [(3, 1)]


def test_forgetting_a_namespace_is_one_event():
    manager = told(num_blocks=16)
    serve(manager, range(9), namespace=("a",))
    serve(manager, range(9), namespace=("b",))
    manager.events.poll()
    manager.drop(namespace=("a",))
    assert [(event.namespace, event.reason) for event in manager.events.poll()] == [(("a",), "dropped")]
    manager.reset()
    (cleared,) = manager.events.poll()
    assert isinstance(cleared, Cleared)
    assert (cleared.namespace, cleared.reason) == (None, "reset")
    serve(manager, range(5))
    assert manager.events.poll()[0].id == cleared.id + 1


def test_media_are_told_by_what_they_are():
    manager = told()
    serve(manager, [7, 9, 9, 9, 5], media=[Media(1, 3, "cat")])
    stored = manager.events.poll()[-1]
    assert stored.tokens.tolist() == [7, 9, 9, 9]
    assert [(at, each.key, each.length) for at, each in stored.identities] == [(1, "cat", 3)]


# -- the log ----------------------------------------------------------------------------------------------------------


def test_TRT96_without_a_buffer_there_is_nothing_and_asking_does_not_wait():
    manager = small(block_size=4)
    serve(manager, range(9))
    assert manager.events.poll(None) == []
    with pytest.raises(SequenceError, match="event_buffer"):
        manager.events.snapshot()


def test_nothing_is_hashed_while_nobody_reads(monkeypatch):
    def hashed(*_):
        raise AssertionError("a digest was made")

    manager = told(num_blocks=4)
    monkeypatch.setattr(chain.Chain, "extend", hashed)
    for start in range(0, 100, 10):
        serve(manager, range(start, start + 10))
    manager.events.flush()


def test_TRT92_the_oldest_events_are_lost_and_counted():
    manager = told(event_buffer=1)
    serve(manager, range(9))
    (stored,) = manager.events.poll()
    assert isinstance(stored, Stored)
    assert (stored.id, manager.events.num_lost) == (1, 1)


def test_TRT100_B186_a_reader_that_waits_is_woken():
    """By the flush itself: nothing looks for events from time to time."""
    manager, found = told(), []
    ready = threading.Event()
    reader = manager.events.subscribe()

    def read():
        ready.set()
        found.extend(reader.poll(30))

    thread = threading.Thread(target=read)
    thread.start()
    ready.wait()
    serve(manager, range(5))
    manager.events.flush()
    thread.join(30)
    assert kinds(found) == ["Created", "Stored"]


def test_closing_wakes_readers_and_loses_nothing():
    manager = told()
    reader = manager.events.subscribe()
    serve(manager, range(5))
    manager.close()
    assert kinds(reader.poll(None)) == ["Created", "Stored"]
    assert reader.poll(None) == []
    assert manager.events.poll(None)[0].id == 0


def test_a_stalled_reader_loses_its_own_events_only():
    manager = told(num_blocks=64)
    stalled, other = manager.events.subscribe(2), manager.events.subscribe()
    for start in range(0, 50, 10):
        serve(manager, range(start, start + 9))
        manager.events.flush()
    assert (len(stalled.poll()), stalled.num_lost) == (2, 4)
    assert len(other.poll()) == 6


def test_a_reader_has_room_for_a_whole_number_of_events():
    with pytest.raises(ArgumentError, match="max_events is -1"):
        told().events.subscribe(-1)


# -- rebuilding -------------------------------------------------------------------------------------------------------


def test_events_tell_what_is_cached():
    manager = told(num_blocks=4, tiers=[HostTier(num_blocks=3)])
    contents = Contents()
    for start in (0, 10, 0, 20, 10, 30, 0):
        serve(manager, [*range(start, start + 8), *range(5)])
        assert contents.follow(manager.events.poll())
        assert contents.digest() == manager.events.content_digest()
    assert (contents.num_blocks("device"), contents.num_blocks("host")) == (3, 3)


@pytest.mark.parametrize("seed", range(20))
def test_B169_a_parent_is_always_a_block_that_was_told_and_is_there(seed):
    """Over random prompts that share prefixes, in little room and with host memory below it."""
    rng = np.random.default_rng(seed)
    manager = told(num_blocks=6, tiers=[HostTier(num_blocks=4)])
    held = {"device": set(), "host": set()}
    num_with_parent = 0
    for _ in range(60):
        serve(manager, rng.integers(2, size=rng.integers(1, 24)).tolist())
        if rng.random() < 0.2:
            manager.evict(int(rng.integers(1, 4)))
        for event in manager.events.poll():
            if isinstance(event, Stored | Moved):
                assert event.parent is None or any(event.parent in blocks for blocks in held.values())
                num_with_parent += event.parent is not None
                held[event.tier].update(event.digests)
            if isinstance(event, Moved):
                held[event.source_tier].difference_update(event.digests)
            if isinstance(event, Removed):
                held[event.tier].difference_update(event.digests)
    assert num_with_parent > 0


def test_a_snapshot_and_what_comes_after_it_tell_the_same():
    manager = told(num_blocks=4, tiers=[HostTier(num_blocks=3)])
    reader = manager.events.subscribe()
    serve(manager, range(13))
    snapshot = manager.events.snapshot()
    serve(manager, range(50, 63))
    manager.events.flush()
    contents = Contents.of_snapshot(snapshot)
    assert contents.follow(reader.poll())
    assert contents.digest() == contents_of(manager._state).digest()


def test_a_namespace_that_is_dropped_is_told_to_be_cleared_and_nothing_after_that():
    """What it had in host memory, and what somebody still holds, is not removed a second time."""
    manager = told(tiers=[HostTier(num_blocks=8)])
    serve(manager, range(13), namespace=("a",))
    manager.evict(8)
    running = manager.add_sequence(range(6), namespace=("a",))
    manager.events.poll()
    manager.drop(namespace=("a",))
    manager.free(running)
    assert kinds(manager.events.poll()) == ["Cleared"]
    assert manager.num_free_blocks == 8


def test_a_gap_is_noticed():
    manager = told(num_blocks=16)
    contents = Contents()
    contents.follow(manager.events.poll())
    serve(manager, range(5))
    manager.events.poll()
    serve(manager, range(10, 15))
    before = contents.digest()
    assert not contents.follow(manager.events.poll())
    assert contents.digest() == before


def test_another_life_of_a_manager_has_another_epoch():
    managers = [told(), told()]
    first, second = (manager.events.poll() for manager in managers)
    assert first[0].epoch != second[0].epoch
    contents = Contents()
    assert contents.follow(first)
    serve(manager := told(), range(5))
    assert not contents.follow(manager.events.poll()[1:])


def test_contents_hold_nothing_of_a_namespace_whose_blocks_are_all_gone():
    manager, contents = small(event_buffer=1000), Contents()
    for tenant in range(20):
        cached(manager, [1, 2, 3, 4, 5], namespace=("tenant", tenant))
        manager.drop(namespace=("tenant", tenant))
        cached(manager, [1, 2, 3, 4, 5], namespace=("visitor", tenant))
        manager.evict(8)
    assert contents.follow(manager.events.poll())
    assert contents.blocks == {}
