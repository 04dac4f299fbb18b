"""T02: content that is held leaves what is free, whoever holds it, and is not promised to anybody as room."""

import pytest
from tests.core.small import refused
from tests.torture.over import EVERYWHERE, over, without_groups
from tests.torture.rig import opened

from kvist import OutOfBlocks, StaleMatch


@over(EVERYWHERE)
def test_B011_what_was_in_nobodys_use_is_not_free_once_it_is_pinned(rig):
    rig.leave(range(21))
    assert rig.manager.num_free_blocks == rig.manager.num_blocks
    match = rig.manager.match_prefix(range(21))
    with rig.manager.pin(match) as pin:
        rig.check()
        held = rig.manager.num_blocks - rig.manager.num_free_blocks
        assert pin.num_tokens >= 16
        assert held >= 1
        rig.manager.evict(rig.manager.num_blocks)
        assert rig.manager.num_blocks - rig.manager.num_free_blocks == held
        rig.check()
        if not rig.has_states:
            again = rig.add(range(21))
            assert again.num_cached_tokens >= pin.num_tokens
            rig.free(again, publish=False)
    rig.require_all_back()


@over(without_groups(EVERYWHERE, "windows alone", "state", "mixed", "one pool"), num_blocks=8)
def test_B129_what_a_prompt_would_reuse_is_no_room_for_it(rig):
    """5 of 8 blocks are cached and 2 in use; a prompt that goes on from 4 of them and needs 3 more has 2 to be had."""
    rig.leave(range(20))
    other = rig.serve(range(200, 208))
    assert rig.manager.num_free_blocks >= 6
    prompt = [*range(17), *range(100, 108)]
    assert not rig.manager.forecast().fits(prompt)
    with refused(rig.manager, OutOfBlocks, "only 2"):
        rig.manager.add_sequence(prompt)
    assert rig.manager.forecast().fits(prompt[:24])
    rig.free(rig.serve(prompt[:24]))
    rig.free(other)
    rig.free(rig.serve(prompt))
    rig.require_all_back()


@pytest.mark.parametrize("budget", [0.0, 0.25, 0.5])
def test_B234_pins_leave_the_rest_to_be_had(budget):
    with opened("full", num_blocks=8, pin_budget=budget) as rig:
        rig.leave(range(25))
        pins, refusals = [], 0
        for end in range(5, 26, 4):
            try:
                pins.append(rig.manager.pin(rig.manager.match_prefix(range(end))))
            except OutOfBlocks:
                refusals += 1
            rig.check()
        assert (refusals, rig.manager.num_free_blocks >= 8 * (1 - budget)) == (6 - int(8 * budget), True)
        filler = rig.serve(range(100, 100 + 4 * rig.manager.num_free_blocks))
        rig.free(filler)
        for pin in pins:
            pin.release()
        rig.require_all_back()


@over(EVERYWHERE)
def test_B142_a_match_that_was_evicted_since_is_stale_and_pins_nothing(rig):
    rig.leave(range(21))
    match = rig.manager.match_prefix(range(21))
    rig.manager.drop(namespace=())
    with refused(rig.manager, StaleMatch):
        rig.manager.pin(match)
    rig.require_all_back()
