"""T10: drafts that are rejected leave no trace: in tables, in what is found, in states, in the draft model's cache."""

from random import Random

import pytest
from tests.torture.over import EVERYWHERE, over
from tests.torture.rig import GROUPS, Rig


@over(EVERYWHERE)
def test_B085_B091_after_any_step_back_the_sequence_reads_what_it_has_left(rig):
    """From 15 tokens back to each length, then on with others, past where it was."""
    for back in range(15):
        sequence = rig.serve(range(15))
        rig.manager.rewind(sequence, back)
        rig.check()
        assert sequence.num_tokens == 15 - back
        assert sequence.num_computed_tokens <= 15 - back
        if sequence.num_tokens:
            rig.compute(sequence)
            rig.memory.verify(sequence)
        rig.manager.append([sequence], [range(200, 202 + back)])
        rig.compute(sequence)
        rig.memory.verify(sequence)
        rig.free(sequence)
        rig.free(rig.serve(range(15)))
        rig.manager.drop(namespace=())
    rig.require_all_back()


@over(EVERYWHERE)
def test_B085_a_block_is_found_when_its_last_token_is_accepted_and_not_before(rig):
    sequence = rig.serve(range(7))
    rig.manager.append([sequence], [[7, 100, 101]])  # two of three drafts are rejected
    rig.memory.write(sequence)
    if rig.has_states:  # a state has seen them all, and says so, since it can only go back to where one was kept
        rig.manager.commit([sequence])
    rig.manager.rewind(sequence, 2)
    assert rig.manager.match_prefix([*range(8), 100, 101]).num_tokens <= 7
    rig.compute(sequence)
    found = rig.manager.match_prefix([*range(8), 100, 101]).num_tokens
    assert found in ((0, 8) if rig.has_states else (8,))
    rig.memory.verify(sequence)
    rig.free(sequence)
    rig.free(rig.serve([*range(8), 100, 101]))
    rig.require_all_back()


@pytest.mark.parametrize("groups", list(GROUPS))
def test_B089_B090_a_target_and_a_draft_model_have_as_many_tokens_after_each_step(groups):
    """50 steps of 4 drafts of which 0 to 4 are accepted; one prompt for both, which neither changes."""
    chance, prompt = Random(3), list(range(9))
    target, draft = (
        Rig(groups, num_blocks=40, max_sequence_length=160),
        Rig(groups, num_blocks=40, max_sequence_length=160),
    )
    both = [(rig, rig.serve(prompt)) for rig in (target, draft)]
    for step in range(25):
        accepted, drafts = chance.randrange(5), [1000 + 10 * step + number for number in range(5)]
        for rig, sequence in both:
            rig.manager.append([sequence], [drafts])
            rig.memory.write(sequence)
            rig.manager.commit([sequence], None if rig.has_states else sequence.num_tokens - (4 - accepted))
            rig.manager.rewind(sequence, 4 - accepted)
            rig.check()
            rig.memory.spoil(sequence)
            rig.compute(sequence)
            rig.memory.verify(sequence)
        assert both[0][1].tokens.tolist() == both[1][1].tokens.tolist()
    assert prompt == list(range(9))
    for rig, sequence in both:
        rig.free(sequence)
        rig.require_all_back()


@over(EVERYWHERE)
def test_B086_what_rejected_drafts_wrote_is_found_by_nobody(rig):
    """Drafts write nonsense into reserved room; whoever goes on from the accepted part reads none of it."""
    chance = Random(1)
    for length in (3, 7, 8, 11, 12):
        sequence = rig.serve(range(length))
        rig.manager.reserve([sequence], chance.randrange(1, 9))
        rig.memory.spoil(sequence)
        rig.memory.verify(sequence)
        rig.decode([sequence], [[77]])
        rig.memory.verify(sequence)
        rig.free(sequence)
        if rig.tiers != "no tiers":
            rig.send_down()
        rig.free(rig.serve([*range(length), 77, 78]))
        rig.manager.drop(namespace=())
    rig.require_all_back()
