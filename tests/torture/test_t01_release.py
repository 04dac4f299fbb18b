"""T01: whatever holds blocks releases them once, on every way there is, and a second time is an error."""

from itertools import permutations

import pytest
from tests.core.small import refused
from tests.torture.over import EVERYWHERE, over, without_groups

from kvist import SequenceError


@over(EVERYWHERE)
def test_B001_B002_B010_B018_in_every_order_each_release_counts_once(rig):
    """A sequence, its fork, a pin, and one with room for drafts, in five orders."""
    for order in list(permutations(range(4)))[::5]:
        first = rig.serve(range(10))
        [copy] = rig.manager.fork(first)
        pin = rig.manager.pin(rig.manager.match_prefix(range(10)))
        drafting = rig.serve(range(50, 57))
        rig.manager.reserve([drafting], 6)
        releases = [lambda one=one: rig.manager.free(one) for one in (first, copy, drafting)] + [pin.release]
        free = [rig.manager.num_free_blocks]
        for number in order:
            releases[number]()
            rig.check()
            free.append(rig.manager.num_free_blocks)
            with refused(rig.manager, SequenceError):
                releases[number]()
        assert free == sorted(free)
        rig.require_all_back()


@over(without_groups(EVERYWHERE, "cross"))
def test_B001_B002_beams_hold_what_they_share_once_each(rig):
    for order in permutations(range(3)):
        leader = rig.add(range(10), num_beams=3)
        rig.compute(leader)
        beams = list(leader.beams)
        for beam in beams:
            rig.memory.verify(beam)
        for number in order:
            rig.free(beams[number])
            with refused(rig.manager, SequenceError):
                rig.manager.free(beams[number])
        rig.require_all_back()


@over(EVERYWHERE)
def test_B018_B041_a_suspended_sequence_is_ended_once_and_one_that_waits_holds_nothing(rig):
    sequence = rig.serve(range(11))
    rig.manager.suspend(sequence)
    rig.check()
    assert rig.manager.num_free_blocks == rig.manager.num_blocks
    with refused(rig.manager, SequenceError):
        rig.manager.suspend(sequence)
    rig.free(sequence)
    for call in (rig.manager.free, rig.manager.resume, rig.manager.suspend):
        with refused(rig.manager, SequenceError):
            call(sequence)
    rig.require_all_back()


@over(EVERYWHERE)
def test_B002_a_batch_that_names_one_twice_takes_and_gives_nothing(rig):
    first, second = rig.serve(range(9)), rig.serve(range(30, 37))
    for call in (
        lambda batch: rig.manager.append(batch, [[1], [2], [3]]),
        lambda batch: rig.manager.reserve(batch, 3),
        lambda batch: rig.manager.commit(batch, 9),
    ):
        with refused(rig.manager, SequenceError):
            call([first, second, first])
    for one in (first, second):
        rig.free(one)
    rig.require_all_back()


@over(EVERYWHERE)
def test_B029_B235_each_pin_protects_until_it_is_released_itself(rig):
    rig.leave(range(13))
    match = rig.manager.match_prefix(range(13))
    pins = [rig.manager.pin(match) for _ in range(3)]
    held = rig.manager.num_blocks - rig.manager.num_free_blocks
    for number in (1, 0):
        pins[number].release()
        with refused(rig.manager, SequenceError):
            pins[number].release()
        rig.manager.evict(rig.manager.num_blocks)
        assert rig.manager.num_blocks - rig.manager.num_free_blocks == held
        assert rig.manager.match_prefix([*range(12), 99]).num_tokens >= 8 * (not rig.has_states)
    pins[2].release()
    rig.require_all_back()


def test_an_order_that_frees_too_much_would_be_seen(monkeypatch):
    """The proofs are worth something: a pool that is given a block twice is found out at once."""
    from tests.torture.rig import Rig

    rig = Rig("full")
    sequence = rig.serve(range(9))
    pool = rig.manager._state.pools[0]
    pool.give(sequence.block_ids[:1])
    with pytest.raises(AssertionError, match="owners"):
        rig.check()
