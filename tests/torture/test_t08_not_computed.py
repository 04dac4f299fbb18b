"""T08: nothing is found before it is computed, and nothing that an abort leaves is blank."""

from tests.torture.over import EVERYWHERE, over

PROMPT = list(range(100, 123))


@over(EVERYWHERE, num_blocks=40)
def test_B074_in_the_same_step_nobody_finds_what_the_other_has_yet_to_compute(rig):
    first, second = rig.add(PROMPT), rig.add(PROMPT)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 0)
    assert rig.manager.match_prefix(PROMPT).num_tokens == 0
    rig.compute(first, 9)
    third = rig.add(PROMPT)
    assert third.num_cached_tokens <= 9
    for sequence in (third, second, first):
        rig.compute(sequence)
        rig.memory.verify(sequence)
        rig.free(sequence)
    rig.require_all_back()


@over(EVERYWHERE)
def test_B074_B114_what_is_preempted_before_it_was_computed_is_not_found(rig):
    for computed in (0, 3, 4, 9, 16):
        first = rig.add(PROMPT, reuse=False)
        rig.compute(first, computed)
        rig.manager.suspend(first)
        rig.check()
        assert rig.manager.match_prefix(PROMPT).num_tokens <= computed
        rig.manager.resume(first)
        assert first.num_computed_tokens <= computed
        rig.compute(first)
        rig.memory.verify(first)
        rig.free(first)
        rig.manager.drop(namespace=())
    rig.require_all_back()


@over(EVERYWHERE)
def test_B075_B022_after_an_abort_at_any_chunk_what_is_found_is_right(rig):
    """With and without leaving what was computed, the next one that asks reads its own tokens."""
    for publish in (True, False):
        for end in (0, 1, 4, 6, 8, 13, 20, 23):
            first = rig.add(PROMPT)
            rig.compute(first, max(end, first.num_computed_tokens))
            computed = first.num_computed_tokens
            rig.free(first, publish=publish)
            again = rig.add(PROMPT)
            assert again.num_cached_tokens <= computed
            rig.compute(again)
            rig.free(again, publish=False)
            if rig.tiers != "no tiers":
                rig.send_down()
            rig.free(rig.serve([*PROMPT[:18], 7]), publish=False)
            rig.manager.drop(namespace=())
    rig.require_all_back()


@over(EVERYWHERE)
def test_B074_tokens_that_were_added_and_not_computed_are_nobodys(rig):
    """Decoded tokens, drafts and reserved room, freed before they were computed."""
    first = rig.serve(PROMPT[:9])
    rig.manager.reserve([first], 7)
    rig.manager.append([first], [PROMPT[9:16]])
    rig.manager.free(first)
    assert rig.manager.match_prefix(PROMPT).num_tokens <= 9
    rig.free(rig.serve(PROMPT))
    rig.require_all_back()


@over(EVERYWHERE)
def test_B039_B069_who_leaves_nothing_or_takes_nothing_still_gets_on(rig):
    quiet = rig.add(PROMPT, publish=False)
    for end in (4, 9, 16, 23):
        rig.compute(quiet, end)
        assert rig.manager.match_prefix(PROMPT).num_tokens == 0
    rig.free(quiet)
    assert rig.manager.match_prefix(PROMPT).num_tokens == 0
    rig.leave(PROMPT)
    alone = rig.serve(PROMPT, reuse=False)
    assert alone.num_cached_tokens == 0
    rig.free(alone)
    rig.require_all_back()
