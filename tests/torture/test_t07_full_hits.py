"""T07: a prompt that is cached whole leaves at least one token to compute, wherever it is cached."""

import pytest
from tests.torture.over import EVERYWHERE, over, without_groups
from tests.torture.rig import opened

LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17)


@over(EVERYWHERE)
def test_B071_B073_at_every_length_the_last_token_is_computed(rig):
    """In the device alone; then from the slower tiers; then with a part in each."""
    for length in LENGTHS:
        prompt = range(1000 * length, 1000 * length + length)
        rig.leave(prompt)
        whole = (length - 1) // 4 * 4
        again = rig.leave(prompt)
        assert whole - 8 * rig.has_states <= again <= length - 1
        if rig.groups == "full":
            assert again == (length - 1 if rig.partial else whole)
        rig.send_down()
        if rig.tiers != "no tiers":
            assert rig.leave(prompt) <= length - 1
            rig.manager.evict(1)
            assert rig.leave(prompt) <= length - 1
        rig.manager.drop(namespace=())
    rig.require_all_back()


@pytest.mark.parametrize("tiers", ["host", "store", "host and store"])
@pytest.mark.parametrize("groups", ["full", "sliding", "chunked"])
def test_B071_a_prompt_of_whole_blocks_is_brought_up_without_its_last(groups, tiers):
    for num_blocks in (1, 2, 3, 4):
        with opened(groups, tiers, False) as rig:
            prompt = range(4 * num_blocks)
            rig.leave(prompt)
            rig.send_down()
            assert rig.leave(prompt) == 4 * num_blocks - 4
            rig.send_down()
            assert rig.leave([*prompt, 99]) == 4 * num_blocks
            rig.require_all_back()


@over(without_groups(EVERYWHERE, "cross"))
def test_B071_a_beam_search_over_a_cached_prompt_computes_its_last_token(rig):
    for length in (4, 5, 8, 12):
        rig.leave(range(length))
        leader = rig.add(range(length), num_beams=3)
        assert leader.num_cached_tokens < length
        rig.compute(leader)
        for beam in list(leader.beams):
            rig.memory.verify(beam)
            rig.free(beam)
    rig.require_all_back()


@over(EVERYWHERE)
def test_B071_what_is_computed_again_adds_no_second_copy(rig):
    rig.leave(range(16))
    before = sum(group.num_evictable_blocks for group in rig.manager.stats().groups[:1])
    for _ in range(5):
        rig.leave(range(16))
    assert rig.manager.stats().groups[0].num_evictable_blocks == before
    rig.require_all_back()
