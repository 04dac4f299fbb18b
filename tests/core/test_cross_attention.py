"""Cross attention: an encoder's tokens have blocks once, for all sequences of a prompt; nobody else finds anything."""

import pytest
from tests.core.layers import CROSS, FULL, grouped, hit, sliding, state, tables
from tests.core.small import cached, computed, refused

from kvist import ArgumentError, ConfigError, NeverFits, OutOfBlocks


def crossed(block_size=2, num_blocks=(32, 8), **settings):
    return grouped([FULL, CROSS], block_size=block_size, num_blocks=list(num_blocks), **settings)


def test_an_encoders_tokens_take_whole_blocks_of_their_own_group():
    manager = crossed()
    sequence = manager.add_sequence([1, 2, 3], encoder_tokens=5)
    full, cross = tables(manager, sequence)
    assert (len(full), len(cross), sequence.num_encoder_tokens) == (2, 3, 5)
    assert manager.stats().groups[1].num_held_blocks == 3


def test_without_an_encoder_nothing_is_taken_and_prompts_are_shared():
    manager = crossed()
    cached(manager, range(6))
    sequence = manager.add_sequence(range(6))
    assert (sequence.num_encoder_tokens, sequence.num_cached_tokens) == (0, 4)
    assert tables(manager, sequence)[1] == []


def test_generated_tokens_take_no_blocks_of_the_encoders_group():
    manager = crossed()
    sequence = manager.add_sequence([1], encoder_tokens=4)
    manager.append([sequence], [list(range(20))])
    manager.reserve([sequence], 5)
    assert len(sequence.group_blocks(1)) == 2


def test_a_prompt_with_an_encoder_finds_nothing_and_leaves_nothing():
    manager = crossed()
    cached(manager, range(8))
    sequence = computed(manager, range(8), encoder_tokens=2)
    assert sequence.num_cached_tokens == 0
    manager.append([sequence], [[50, 51]])
    manager.commit([sequence])
    manager.stats()
    assert hit(manager, [*range(8), 50, 51, 52]) == 8
    manager.free(sequence)
    assert hit(manager, [*range(8), 50, 51, 52]) == 8
    manager.check()


def test_forks_and_beams_share_the_encoders_blocks_and_the_last_gives_them_back():
    manager = crossed()
    leader = manager.add_sequence([1, 2, 3], encoder_tokens=5, num_beams=2)
    manager.commit([leader])
    family = [*leader.beams, *manager.fork(leader)]
    assert len({tuple(sequence.group_blocks(1).tolist()) for sequence in family}) == 1
    held = []
    for sequence in family:
        held.append(manager.stats().groups[1].num_held_blocks)
        manager.free(sequence)
    assert held == [3, 3, 3]
    assert manager.stats().groups[1].num_held_blocks == 0
    manager.check()


def test_a_beam_that_takes_its_leaders_place_keeps_the_encoder():
    manager = crossed()
    leader = manager.add_sequence([1, 2, 3], encoder_tokens=4, num_beams=2)
    blocks, heir = leader.group_blocks(1).tolist(), leader.beams[1]
    manager.free(leader)
    assert heir.group_blocks(1).tolist() == blocks
    manager.commit([heir])
    manager.check()


def test_reordered_sequences_take_over_the_encoder_with_the_rest():
    manager = crossed()
    one, other = (computed(manager, [n], encoder_tokens=2 + n) for n in (1, 2))
    theirs = other.group_blocks(1).tolist()
    manager.reorder([one, other], [1, 1])
    assert one.tokens.tolist() == [2]
    assert (one.group_blocks(1).tolist(), one.num_encoder_tokens) == (theirs, 4)
    assert manager.stats().groups[1].num_held_blocks == 2
    manager.check()


@pytest.mark.parametrize("num_tokens", [1, 4, 6])
def test_a_step_back_leaves_the_encoder_alone(num_tokens):
    manager = crossed()
    sequence = computed(manager, range(7), encoder_tokens=6)
    manager.stats()
    (fork,) = manager.fork(sequence)
    blocks = sequence.group_blocks(1).tolist()
    assert len(blocks) == 3
    manager.rewind(sequence, num_tokens)
    assert sequence.group_blocks(1).tolist() == fork.group_blocks(1).tolist() == blocks
    assert sequence.num_encoder_tokens == 6
    manager.check()


@pytest.mark.parametrize("layer", [sliding(2), state()], ids=["window", "state"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_step_back_to_the_start_never_finds_what_was_computed_without_the_encoder(layer, which):
    manager = grouped([FULL, layer, CROSS], block_size=1)
    plain = manager.add_sequence([1, 2, 3, 4, 5, 6])
    for num_computed in range(1, 7):
        manager.commit([plain], num_computed)
    manager.free(plain)
    leader = manager.add_sequence([1, 2, 3, 4, 5, 6], encoder_tokens=2, num_beams=2)
    manager.commit([leader], 6)
    manager.stats()
    sequence = leader.beams[which]
    manager.rewind(sequence, 3)
    assert (sequence.num_tokens, sequence.num_computed_tokens, sequence.num_encoder_tokens) == (3, 0, 2)
    manager.check()


@pytest.mark.parametrize("layer", [sliding(2), state()], ids=["window", "state"])
def test_a_step_back_that_begins_again_keeps_the_only_encoder(layer):
    manager = grouped([FULL, layer, CROSS], block_size=1)
    sequence = computed(manager, [1, 2, 3, 4, 5, 6], encoder_tokens=3)
    blocks = tables(manager, sequence)[2]
    manager.rewind(sequence, 3)
    manager.add_sequence([9], encoder_tokens=4)
    assert (sequence.num_computed_tokens, tables(manager, sequence)[2]) == (0, blocks)
    manager.check()


def test_a_resumed_sequence_has_blocks_for_its_encoder_again_and_computes_all_of_its_tokens():
    manager = crossed()
    sequence = computed(manager, range(7), encoder_tokens=5)
    manager.suspend(sequence)
    assert manager.stats().groups[1].num_held_blocks == 0
    cached(manager, range(7))
    assert manager.resume(sequence) == 7
    assert (sequence.num_computed_tokens, sequence.num_encoder_tokens, len(sequence.group_blocks(1))) == (0, 5, 3)
    manager.check()


def test_a_short_pool_of_encoder_blocks_refuses_and_names_its_group():
    manager = crossed()
    manager.add_sequence([1], encoder_tokens=10)
    with refused(manager, OutOfBlocks, "group 1 needs 4 blocks, but only 3 are free") as caught:
        manager.add_sequence([1], encoder_tokens=8)
    assert (caught.value.group, caught.value.needed, caught.value.free) == (1, 4, 3)


def test_an_encoder_that_can_never_be_kept_is_refused():
    manager = crossed(max_sequence_length=12)
    with refused(manager, NeverFits, "max_sequence_length is 12"):
        manager.add_sequence([1], encoder_tokens=13)
    with refused(crossed(num_blocks=(8, 2)), NeverFits, "the whole pool of group 1 has 2"):
        crossed(num_blocks=(8, 2)).add_sequence([1], encoder_tokens=5)


def test_encoder_tokens_without_cross_attention_are_refused():
    manager = grouped([FULL])
    with refused(manager, ArgumentError, "encoder_tokens is 3", "no layer has cross attention"):
        manager.add_sequence([1], encoder_tokens=3)


@pytest.mark.parametrize("wrong", [-1, 1.5, "3", None, True])
def test_a_number_of_encoder_tokens_that_cannot_be_is_refused(wrong):
    manager = crossed()
    with refused(manager, ArgumentError, "encoder_tokens"):
        manager.add_sequence([1], encoder_tokens=wrong)


def test_cross_attention_alone_is_no_cache():
    with pytest.raises(ConfigError, match="cross attention only"):
        grouped([CROSS])


def test_tables_of_the_encoders_group_are_of_its_tokens():
    manager = crossed()
    sequences = [manager.add_sequence([1, 2], encoder_tokens=n) for n in (3, 1)]
    batch = manager.tables(sequences, group=1)
    first, second = (sequence.group_blocks(1).tolist() for sequence in sequences)
    assert batch.seq_lens.tolist() == [3, 1]
    assert batch.slot_mapping.tolist() == [2 * first[0], 2 * first[0] + 1, 2 * first[1], 2 * second[0]]


@pytest.mark.parametrize("left", range(1, 9))
def test_what_keeps_its_encoder_does_not_count_on_its_blocks_to_begin_again(left):
    manager = grouped([sliding(2), CROSS], block_size=2, num_blocks=[6, 6], shared_pool=True)
    sequence = manager.add_sequence(range(8), encoder_tokens=6)
    manager.commit([sequence])
    manager.append([sequence], [8])
    manager.commit([sequence])
    for token in range(50, 57):
        manager.add_sequence([token])
    if left <= 4:
        manager.rewind(sequence, 9 - left)
        assert (sequence.num_tokens, sequence.num_encoder_tokens) == (left, 6)
    else:
        with pytest.raises(OutOfBlocks, match="to begin again"):
            manager.rewind(sequence, 9 - left)
        assert (sequence.num_tokens, sequence.num_computed_tokens) == (9, 9)
    manager.check()
