"""T19: whoever follows events knows what is cached, in every tier and group, and notices when something is lost."""

from random import Random

import pytest
from tests.core.small import small
from tests.torture.over import EVERYWHERE, over
from tests.torture.rig import some_tokens
from tests.torture.traffic import Traffic

from kvist import HostTier
from kvist.core.contents import Contents
from kvist.core.events import Cleared, Removed, Stored
from kvist.testing import EventReplay, WrongEvents


@over(EVERYWHERE, num_blocks=12)
def test_B167_B169_B170_B171_B179_after_each_call_events_come_to_what_is_cached(rig):
    """Random traffic of three tenants, with all that makes content come, change places and go."""
    traffic = Traffic(rig, seed=5, tenants=((), ("tenant", 1), ("tenant", 2)))
    for _ in range(60):
        traffic.step()
    traffic.finish()
    assert rig.replay.num_events > 20
    rig.require_all_back()


@over(EVERYWHERE)
def test_B178_B229_B230_a_reset_clears_every_tier_and_the_stream_goes_on(rig):
    rig.leave(range(17))
    rig.send_down()
    before = rig.replay.num_events
    rig.reset()
    rig.replay.check()
    assert rig.replay.num_events > before
    assert rig.replay.contents.digest() == Contents().digest()
    found = rig.leave(range(17))
    assert found == 0 or "store" in rig.tiers
    rig.require_all_back()


def test_B171_of_two_copies_one_goes_without_a_word():
    """Two compute the same in one step: stored once, and told to be gone once, when it is."""
    manager = small(block_size=4, num_blocks=16, event_buffer=100)
    replay, reader = EventReplay(manager), manager.events.subscribe()
    both = [manager.add_sequence(range(12)) for _ in range(2)]
    manager.commit(both)
    for one in both:
        manager.free(one)
        replay.check()
    manager.evict(16)
    replay.check()
    told = [type(event) for event in reader.poll()]
    assert (told.count(Stored), told.count(Removed)) == (1, 1)


@pytest.mark.parametrize("buffer", [1, 2, 5, 20])
def test_B173_B174_a_reader_that_is_too_slow_knows_what_it_missed_and_catches_up_by_a_snapshot(buffer):
    """A stalled reader holds nobody up, and its gap is a gap in the numbers."""
    manager = small(block_size=2, num_blocks=12, event_buffer=buffer, tiers=[HostTier(num_blocks=6)])
    reader, contents = manager.events.subscribe(buffer), Contents.of_snapshot(manager.events.snapshot())
    chance, recoveries = Random(buffer), 0
    for turn in range(40):
        sequence = manager.add_sequence(some_tokens(chance, most=9))
        manager.commit([sequence])
        manager.free(sequence)
        manager.events.flush()
        if turn % 7 == 6 and not contents.follow(reader.poll()):
            recoveries += 1
            contents = Contents.of_snapshot(manager.events.snapshot())
            assert contents.follow(reader.poll())
            assert contents.digest() == manager.events.content_digest()
    assert recoveries > 0 or buffer == 20
    assert (reader.num_lost > 0) == (recoveries > 0)


def test_B177_another_life_is_another_epoch_and_what_was_known_of_the_first_is_gone():
    first, second = (small(block_size=4, event_buffer=50) for _ in range(2))
    contents = Contents()
    assert contents.follow(first.events.poll())
    sequence = first.add_sequence(range(8))
    first.commit([sequence])
    assert contents.follow(first.events.poll())
    assert contents.num_blocks("device") == 2
    sequence = second.add_sequence(range(4))
    second.commit([sequence])
    assert not contents.follow(second.events.poll()[1:])
    assert second.events.snapshot().epoch != contents.epoch
    assert Contents.of_snapshot(second.events.snapshot()).num_blocks("device") == 1


def test_what_is_told_wrong_would_be_found():
    """The checker is worth something: events that are left out, told twice or of other blocks are noticed."""
    manager = small(block_size=4, num_blocks=16, event_buffer=100)
    sequence = manager.add_sequence(range(12))
    manager.commit([sequence])
    replay = EventReplay(manager)
    manager.append([sequence], [range(12, 17)])
    manager.commit([sequence])
    manager.events.flush()
    events = replay._reader.poll()
    assert events
    with pytest.raises(WrongEvents, match="something else is cached"):
        replay.check()
    again = EventReplay(manager)
    manager.free(sequence)
    manager.evict(2)
    manager.events.flush()
    [removed] = [event for event in again._reader.poll() if isinstance(event, Removed)]
    with pytest.raises(WrongEvents, match="does not follow"):
        again._take(
            Removed(
                removed.id + 1,
                *[getattr(removed, name) for name in ("epoch", "group", "tier", "run", "first", "end", "reason")],
            )
        )
    with pytest.raises(WrongEvents, match="another epoch"):
        again._take(Cleared(removed.id, removed.epoch + 1, None, "reset"))
