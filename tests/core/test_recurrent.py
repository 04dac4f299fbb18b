"""Recurrent states: one block that a sequence works in, and copies at block boundaries that others go on from."""

import pytest
from tests.core.layers import FULL, grouped, hit, sliding, state, tables
from tests.core.small import cached, computed, group_moves, refused

from kvist import KVCacheManager, NeverFits, OutOfBlocks, SequenceError, TransferError


def hybrid(checkpoint_tokens=None, block_size=2, **settings):
    return grouped([FULL, state(checkpoint_tokens)], block_size=block_size, **settings)


def prefilled(manager, tokens, **options):
    """A sequence whose prompt was computed as far as `chunk_limit` says at a time."""
    sequence = manager.add_sequence(tokens, **options)
    while left := sequence.num_tokens - sequence.num_computed_tokens:
        manager.commit([sequence], sequence.num_computed_tokens + manager.chunk_limit(sequence, left))
    return sequence


def kept(manager):
    """After how many tokens of the first prompt a state is kept."""
    manager.stats()
    columns = []
    for extent in manager._state.tree.extents():
        columns += [extent.start + at for at, block in enumerate(extent.blocks[1].tolist()) if block >= 0]
    return sorted((column + 1) * manager.config.block_size for column in columns)


# -- the working state ------------------------------------------------------------------------------------------------


def test_a_sequence_has_one_block_for_its_state_however_long_it_is():
    manager = hybrid(num_blocks=[64, 2])
    sequence = manager.add_sequence(range(9))
    for token in range(30):
        manager.append([sequence], [token])
        assert len(sequence.group_blocks(1)) == 1
    assert manager.tables([sequence], group=1).block_table.tolist() == [sequence.group_blocks(1).tolist()]


def test_a_new_prompt_begins_without_a_copy_of_a_state():
    manager = hybrid()
    manager.add_sequence(range(9))
    assert group_moves(manager) == []


def test_a_hit_begins_with_a_copy_of_the_state_after_it():
    manager = hybrid()
    sequence = prefilled(manager, range(7))
    [checkpoint] = [destination for group, _, destination, _ in group_moves(manager) if group == 1]
    manager.free(sequence)
    follower = manager.add_sequence(range(7))
    assert follower.num_cached_tokens == 6
    assert group_moves(manager) == [(1, checkpoint, follower.group_blocks(1)[0], 2)]
    manager.check()


def test_states_are_copied_whole_whatever_the_block_size():
    manager = hybrid(block_size=4)
    manager.free(prefilled(manager, range(9)))
    manager.add_sequence(range(9))
    assert [num_tokens for _, _, _, num_tokens in group_moves(manager)] == [4, 4]


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_state_is_kept_where_a_commit_ends_at_a_block_boundary():
    manager = hybrid()
    sequence = manager.add_sequence(range(12))
    for num_computed in (3, 4, 7, 8, 11):
        manager.commit([sequence], num_computed)
    assert kept(manager) == [4, 8]
    working = sequence.group_blocks(1)[0]
    moves = [(source, num_tokens) for group, source, _, num_tokens in group_moves(manager) if group == 1]
    assert moves == [(working, 2), (working, 2)]


def test_a_commit_that_passes_boundaries_keeps_no_state_and_nothing_can_be_found():
    manager = hybrid()
    sequence = computed(manager, range(9))
    manager.free(sequence)
    assert hit(manager, range(9)) == 0
    assert manager.num_free_blocks == manager.num_blocks
    assert manager.stats().num_extents == 0


def test_a_sequence_that_ends_at_a_boundary_leaves_the_state_it_worked_in():
    manager = hybrid()
    sequence = manager.add_sequence(range(8))
    working = sequence.group_blocks(1)[0]
    manager.commit([sequence], 7)
    manager.append([sequence], [8])
    manager.commit([sequence], 8)
    manager.rewind(sequence, 1)
    group_moves(manager)
    manager.free(sequence)
    follower = manager.add_sequence([*range(8), 99])
    assert follower.num_cached_tokens == 8
    [(_, source, _, _)] = group_moves(manager)
    assert source != follower.group_blocks(1)[0]
    assert working >= 0
    manager.check()


def test_regular_checkpoints_are_kept_at_multiples_and_before_the_end_of_the_prompt():
    manager = hybrid(checkpoint_tokens=6)
    sequence = prefilled(manager, range(17))
    assert kept(manager) == [6, 12, 16]
    for token in range(17, 26):
        manager.append([sequence], [token])
        manager.commit([sequence])
    assert kept(manager) == [6, 12, 16, 18, 24]


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, 1), (4, 4), (6, 6), (9, 6)])
def test_a_chunk_ends_at_the_next_regular_checkpoint(num_tokens, expected):
    manager = hybrid(checkpoint_tokens=6)
    sequence = manager.add_sequence(range(20))
    assert manager.chunk_limit(sequence, num_tokens) == expected


def test_a_chunk_ends_before_the_last_token_of_the_prompt_and_where_others_left_the_path():
    manager = hybrid()
    first = manager.add_sequence(range(9))
    assert manager.chunk_limit(first, 9) == 8
    manager.commit([first], 8)
    assert manager.chunk_limit(first, 1) == 1
    manager.commit([first])
    manager.free(first)
    second = manager.add_sequence([0, 1, 2, 3, 99, 98, 97, 96, 95])
    assert (second.num_cached_tokens, second.num_shared_tokens) == (0, 4)
    assert manager.chunk_limit(second, 9) == 4
    manager.commit([second], 4)
    assert manager.chunk_limit(second, 5) == 4
    third = manager.add_sequence([0, 1, 2, 3, 77])
    assert third.num_cached_tokens == 4


def test_models_without_states_have_no_boundaries():
    manager = grouped([FULL, sliding(4)])
    sequence = manager.add_sequence(range(20))
    assert manager.chunk_limit(sequence, 20) == 20


def test_without_a_block_for_it_a_checkpoint_is_not_kept_and_nothing_else_happens():
    manager = hybrid(num_blocks=[64, 1])
    sequence = manager.add_sequence(range(9))
    manager.commit([sequence], 4)
    assert group_moves(manager) == []
    assert manager.stats().groups[1].num_held_blocks == 1
    manager.commit([sequence])
    manager.check()


def test_an_older_checkpoint_makes_room_for_the_next_one():
    manager = hybrid(num_blocks=[64, 2])
    sequence = manager.add_sequence(range(12))
    for num_computed in (4, 8, 11):
        manager.commit([sequence], num_computed)
        manager.check()
    manager.free(sequence)
    assert hit(manager, range(12)) == 8


def test_a_checkpoint_of_content_that_was_there_already_goes_back():
    manager = hybrid()
    both = [manager.add_sequence(range(5)) for _ in range(2)]
    manager.commit(both, 4)
    free = manager.stats().groups[1].num_free_blocks
    assert kept(manager) == [4]
    assert free == 64 - 2
    assert manager._state.pools[1].num_free == 64 - 3
    manager.check()


def test_a_state_fills_the_hole_that_another_left_at_the_same_place():
    manager = hybrid()
    first = computed(manager, range(9))
    second = manager.add_sequence(range(9))
    assert (second.num_cached_tokens, second.num_shared_tokens) == (0, 8)
    manager.commit([second], 8)
    manager.free(first)
    assert hit(manager, range(9)) == 8
    manager.check()


# -- hits -------------------------------------------------------------------------------------------------------------


def test_no_block_is_found_in_part_since_its_state_is_not_there():
    manager = hybrid(block_size=4, partial_reuse=True)
    manager.free(prefilled(manager, range(12)))
    assert hit(manager, [*range(10), 99]) == 8
    assert hit(manager, [*range(7), 99]) == 0


def test_a_miss_for_want_of_a_state_is_told_from_unknown_content():
    manager = hybrid()
    manager.free(prefilled(manager, range(9)))
    match = manager.match_prefix([0, 1, 2, 3, 99])
    assert (match.num_tokens, match.num_known_tokens, match.miss) == (0, 4, "window")
    assert manager.match_prefix([50, 51, 52]).miss == "cold"


def test_all_three_kinds_of_groups_must_have_what_they_need():
    manager = grouped([FULL, sliding(2), state()], block_size=2)
    sequence = manager.add_sequence(range(12))
    for num_computed in (4, 8, 12):
        manager.commit([sequence], num_computed)
    manager.free(sequence)
    assert [hit(manager, [*range(n), 99]) for n in (3, 4, 6, 8, 11)] == [0, 4, 4, 8, 8]
    manager.check()


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_states_alone_are_cached_too(block_size):
    manager = grouped([state()], block_size=block_size, num_blocks=16)
    sequence = manager.add_sequence(range(3 * block_size))
    assert len(sequence.group_blocks(0)) == 1
    for n in (1, 2, 3):
        manager.commit([sequence], n * block_size)
    manager.free(sequence)
    assert [hit(manager, [*range(n * block_size), 99]) for n in (1, 2, 3)] == [
        block_size,
        2 * block_size,
        3 * block_size,
    ]
    manager.check()


def test_a_prompt_needs_a_state_for_each_beam():
    manager = hybrid(num_blocks=[64, 2])
    with refused(manager, NeverFits, "needs 3 blocks"):
        manager.add_sequence(range(5), num_beams=3)
    manager.add_sequence(range(5), num_beams=2)
    with refused(manager, OutOfBlocks, "group 1 needs 1 blocks"):
        manager.add_sequence([9])


def test_under_pressure_states_in_the_middle_go_before_the_last_one():
    manager = hybrid(num_blocks=[64, 6])
    sequence = manager.add_sequence(range(12))
    for num_computed in (2, 4, 6, 8, 10):
        manager.commit([sequence], num_computed)
    manager.free(sequence)
    others = [manager.add_sequence([90 + n]) for n in range(4)]
    assert hit(manager, [*range(10), 99]) == 10
    assert len(kept(manager)) == 2
    for other in others:
        manager.free(other)
    manager.check()


# -- stepping back and branching --------------------------------------------------------------------------------------


def test_a_step_back_goes_on_from_the_last_checkpoint_before_it():
    manager = hybrid()
    sequence = manager.add_sequence(range(9))
    for num_computed in (4, 9):
        manager.commit([sequence], num_computed)
    manager.rewind(sequence, 2)
    assert (sequence.tokens.tolist(), sequence.num_computed_tokens) == (list(range(7)), 4)
    assert group_moves(manager)[-1][::3] == (1, 2)
    manager.commit([sequence])
    manager.check()


def test_a_step_back_without_a_checkpoint_begins_again():
    manager = hybrid()
    sequence = computed(manager, range(5))
    manager.rewind(sequence, 1)
    assert (sequence.num_tokens, sequence.num_computed_tokens) == (4, 0)
    assert group_moves(manager) == []


def test_tokens_that_were_not_computed_are_taken_back_in_place():
    manager = hybrid()
    sequence = computed(manager, range(5))
    working = sequence.group_blocks(1).tolist()
    manager.append([sequence], [[7, 8, 9]])
    manager.rewind(sequence, 3)
    assert (sequence.num_tokens, sequence.num_computed_tokens, sequence.group_blocks(1).tolist()) == (5, 5, working)


def test_a_fork_gets_a_copy_of_the_state():
    manager = hybrid()
    parent = computed(manager, range(4))
    group_moves(manager)
    (child,) = manager.fork(parent)
    ours, theirs = child.group_blocks(1)[0], parent.group_blocks(1)[0]
    assert group_moves(manager) == [(1, theirs, ours, 2)]
    manager.check()


def test_a_fork_of_what_is_not_computed_copies_no_state():
    manager = hybrid()
    (child,) = manager.fork(manager.add_sequence([1]))
    assert group_moves(manager) == []
    assert len(child.group_blocks(1)) == 1


def test_beams_get_the_state_after_the_prompt_and_it_must_be_committed_exactly():
    manager = hybrid()
    leader = manager.add_sequence([1, 2, 3], num_beams=3)
    manager.append([leader], [4])
    with refused(manager, SequenceError, "commit"):
        manager.commit([leader])
    with refused(manager, SequenceError, "commit"):
        manager.commit([leader], 4)
    manager.commit([leader], 3)
    working = leader.group_blocks(1)[0]
    copies = [(source, destination) for group, source, destination, _ in group_moves(manager) if group == 1]
    assert copies == [(working, beam.group_blocks(1)[0]) for beam in leader.beams[1:]]
    manager.check()


@pytest.mark.parametrize("num_beams", [2, 3])
def test_the_heir_of_a_leader_has_the_states_that_were_kept_for_it(num_beams):
    manager = hybrid(num_blocks=[16, 16])
    leader = manager.add_sequence(range(6), num_beams=num_beams)
    manager.commit([leader], [2])
    manager.commit([leader], [4])
    manager.free(leader)
    assert kept(manager) == [2, 4]
    assert hit(manager, range(6)) == 4
    manager.check()


def test_reordered_beams_exchange_states_and_copy_what_two_go_on_from():
    manager = hybrid()
    beams = manager.add_sequence([1, 2, 3], num_beams=3).beams
    manager.commit([beams[0]])
    states = [beam.group_blocks(1)[0] for beam in beams]
    group_moves(manager)
    manager.reorder(beams, [1, 1, 0])
    ours = [beam.group_blocks(1)[0] for beam in beams]
    assert ours[2] == states[0]
    assert states[1] in ours[:2]
    assert [(source, num_tokens) for group, source, _, num_tokens in group_moves(manager) if group == 1] == [
        (states[1], 2)
    ]
    assert len(set(ours)) == 3
    manager.check()


def test_all_states_come_back():
    manager = hybrid(num_blocks=[32, 8])
    leader = manager.add_sequence(range(7), num_beams=2)
    for num_computed in (2, 4, 6, 7):
        manager.commit([leader], num_computed)
    for sequence in [*leader.beams, *manager.fork(leader, 2)]:
        manager.free(sequence)
    assert manager.num_free_blocks == 40
    cached(manager, [50])
    assert tables(manager, manager.add_sequence([60]))[1] != []
    manager.check()


# -- copies that fail -------------------------------------------------------------------------------------------------


class States:
    """A memory that keeps what each state is after how many tokens, and fails when told to."""

    def __init__(self):
        self.after, self.fails = {}, False

    def perform(self, moves):
        if self.fails:
            raise OSError("no")
        for move in moves:
            self.after[move.group, move.destination] = self.after.get((move.group, move.source))


def test_a_checkpoint_whose_copy_failed_is_never_found_with_a_later_state():
    memory = States()
    manager = KVCacheManager(hybrid().config, memory)
    sequence = manager.add_sequence([1, 2, 3])
    working = (1, int(sequence.group_blocks(1)[0]))
    memory.after[working], memory.fails = 2, True
    with pytest.raises(TransferError):
        manager.commit([sequence], 2)
    memory.after[working], memory.fails = 3, False
    manager.commit([sequence], 3)
    follower = manager.add_sequence([1, 2, 9])
    assert memory.after.get((1, int(follower.group_blocks(1)[0])), 0) == follower.num_cached_tokens
    manager.check()


def test_an_admission_whose_copy_failed_leaves_nothing_behind():
    memory = States()
    manager = KVCacheManager(hybrid().config, memory)
    manager.free(prefilled(manager, range(5)))
    free, memory.fails = manager.num_free_blocks, True
    with pytest.raises(TransferError):
        manager.add_sequence(range(5))
    memory.fails = False
    assert (manager.num_free_blocks, manager.take_moves()) == (free, [])
    assert manager.add_sequence(range(5)).num_cached_tokens == 4
    manager.check()
