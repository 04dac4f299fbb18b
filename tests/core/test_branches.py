import itertools

import numpy as np
import pytest
from tests.core.small import cached, computed, ids, label, moves, refused, small

from kvist import ArgumentError, ArgumentTypeError, NeverFits, OutOfBlocks, OutOfRows, SequenceError
from kvist.core.rows import MIN_TAIL_TOKENS


def hit(manager, tokens, **options):
    return manager.match_prefix([*tokens, 99], **options).num_tokens


def texts(sequences):
    return [sequence.tokens.tolist() for sequence in sequences]


# -- fork -------------------------------------------------------------------------------------------------------------


def test_a_fork_shares_full_blocks_and_copies_the_one_being_written():
    manager = small()
    parent = computed(manager, [1, 2, 3])
    (child,) = manager.fork(parent)
    assert (child.tokens.tolist(), child.num_computed_tokens, child.num_cached_tokens) == ([1, 2, 3], 3, 0)
    assert ids(parent) == [0, 1]
    assert ids(child) == [0, 2]
    assert moves(manager) == [(1, 2, 1)]
    assert child.row != parent.row
    manager.check()


def test_a_fork_at_a_block_boundary_copies_nothing_and_takes_no_block():
    manager = small()
    parent = computed(manager, [1, 2, 3, 4])
    children = manager.fork(parent, 3)
    assert [ids(child) for child in children] == [[0, 1]] * 3
    assert moves(manager) == []
    assert manager.num_free_blocks == 6
    manager.check()


def test_forks_go_their_own_ways():
    manager = small(num_blocks=16)
    parent = computed(manager, [1, 2, 3])
    family = [parent, *manager.fork(parent, 2)]
    manager.append(family, [7, 8, 9])
    manager.append(family, [4, 5, 6])
    manager.commit(family)
    assert texts(family) == [[1, 2, 3, 7, 4], [1, 2, 3, 8, 5], [1, 2, 3, 9, 6]]
    assert [hit(manager, [1, 2, 3, token]) for token in (7, 8, 9)] == [4, 4, 4]
    for sequence in family:
        manager.free(sequence)
        manager.check()
    assert manager.num_free_blocks == 16


def test_a_fork_copies_only_what_is_computed_of_the_block_being_written():
    manager = small(block_size=4)
    parent = computed(manager, [1, 2, 3, 4, 5])
    manager.append([parent], [[6, 7]])
    (child,) = manager.fork(parent)
    assert (child.tokens.tolist(), child.num_computed_tokens) == ([1, 2, 3, 4, 5, 6, 7], 5)
    assert moves(manager) == [(1, 2, 1)]


def test_a_fork_of_a_block_of_which_nothing_is_computed_copies_nothing():
    manager = small()
    parent = computed(manager, [1, 2])
    manager.append([parent], [3])
    (child,) = manager.fork(parent)
    assert ids(child) == [0, 2]
    assert moves(manager) == []


def test_a_fork_does_not_take_over_reserved_blocks():
    manager = small()
    parent = computed(manager, [1, 2, 3])
    manager.reserve([parent], 5)
    (child,) = manager.fork(parent)
    assert (parent.num_blocks, child.num_blocks) == (4, 2)
    manager.check()


def test_the_parent_may_end_before_the_fork():
    manager = small()
    parent = computed(manager, [1, 2, 3])
    (child,) = manager.fork(parent)
    manager.free(parent, publish=False)
    manager.append([child], [4])
    manager.commit([child])
    assert child.tokens.tolist() == [1, 2, 3, 4]
    assert hit(manager, [1, 2, 3, 4]) == 4
    manager.check()


def test_a_fork_of_what_is_not_published_shares_with_its_family_alone():
    manager = small()
    parent = computed(manager, [1, 2, 3], publish=False)
    (child,) = manager.fork(parent)
    assert ids(child)[0] == ids(parent)[0]
    manager.append([parent, child], [[4, 5], [6, 7]])
    manager.commit([parent, child])
    assert hit(manager, [1, 2, 3, 4]) == 0
    manager.check()
    manager.free(parent)
    manager.check()
    assert texts([child]) == [[1, 2, 3, 6, 7]]
    manager.free(child)
    assert (manager.num_free_blocks, manager.stats().num_evictable_blocks) == (8, 0)
    manager.check()


def test_no_forks_at_all_are_none():
    manager = small()
    parent = computed(manager, [1, 2, 3])
    before = manager.digest()
    assert manager.fork(parent, 0) == []
    assert manager.digest() == before


def test_forks_that_do_not_fit_are_refused_all_together():
    manager = small(num_blocks=3)
    parent = computed(manager, [1, 2, 3])
    with refused(manager, OutOfBlocks, "needs 2 blocks, but only 1 are free"):
        manager.fork(parent, 2)
    manager.fork(parent, 1)
    manager = small(max_sequences=3)
    parent = computed(manager, [1, 2, 3])
    with refused(manager, OutOfRows, "3 rows needed, but 2 of max_sequences=3 are free"):
        manager.fork(parent, 3)
    with refused(manager, NeverFits, "4 sequences asked for, max_sequences is 3"):
        manager.fork(parent, 4)


@pytest.mark.parametrize("publish", [True, False])
def test_a_sequence_with_more_than_one_uncommitted_block_is_not_forked(publish):
    manager = small()
    parent = computed(manager, [1, 2, 3], publish=publish)
    manager.append([parent], [[4, 5]])
    with refused(
        manager,
        SequenceError,
        "fork: row 0 has 2 blocks of tokens",
        "3 of its 5",
        "commit first",
    ):
        manager.fork(parent)
    manager.commit([parent])
    assert texts(manager.fork(parent)) == [[1, 2, 3, 4, 5]]


@pytest.mark.parametrize("publish", [True, False])
def test_a_fork_without_room_changes_nothing(publish):
    manager = small(num_blocks=2)
    parent = computed(manager, [1, 2, 3], publish=publish)
    with refused(manager, OutOfBlocks, "needs 1 blocks, but only 0"):
        manager.fork(parent)


@pytest.mark.parametrize(
    ("n", "error"),
    [
        (-1, ArgumentError),
        (1.0, ArgumentTypeError),
        (True, ArgumentTypeError),
        (None, ArgumentTypeError),
        ("1", ArgumentTypeError),
        ([1], ArgumentTypeError),
    ],
    ids=label,
)
def test_a_number_of_forks_that_cannot_be_is_refused(n, error):
    manager = small()
    parent = computed(manager, [1, 2, 3])
    with refused(manager, error, "n is "):
        manager.fork(parent, n)


# -- reorder ----------------------------------------------------------------------------------------------------------


def beams_of(manager, *tails, prompt=(1, 2, 3, 4)):
    """Forks of one prompt, each gone on with its own tail and committed."""
    first = computed(manager, list(prompt))
    family = [first, *manager.fork(first, len(tails) - 1)]
    manager.append(family, list(tails))
    manager.commit(family)
    manager.take_moves()
    return family


def test_beams_that_stay_are_left_alone():
    manager = small()
    beams = beams_of(manager, [5], [6])
    before = manager.digest(), manager.row_version.tolist()
    manager.reorder(beams, [0, 1])
    assert (manager.digest(), manager.row_version.tolist()) == before
    assert moves(manager) == []


def test_one_beam_takes_over_the_block_of_its_parent_and_the_others_copy_it():
    manager = small(num_blocks=16)
    beams = beams_of(manager, [5], [6], [7])
    written = [ids(beam)[-1] for beam in beams]
    manager.reorder(beams, [1, 1, 1])
    assert texts(beams) == [[1, 2, 3, 4, 6]] * 3
    assert ids(beams[1])[-1] == written[1]
    assert [(source, n) for source, _, n in moves(manager)] == [(written[1], 1), (written[1], 1)]
    assert len({ids(beam)[-1] for beam in beams}) == 3
    manager.check()


def test_beams_that_trade_places_trade_blocks_and_copy_nothing():
    manager = small()
    beams = beams_of(manager, [5], [6])
    before = [ids(beam) for beam in beams]
    versions = [beam.version for beam in beams]
    manager.reorder(beams, [1, 0])
    assert texts(beams) == [[1, 2, 3, 4, 6], [1, 2, 3, 4, 5]]
    assert [ids(beam) for beam in beams] == before[::-1]
    assert all(beam.version > version for beam, version in zip(beams, versions, strict=True))
    assert moves(manager) == []
    manager.check()


@pytest.mark.parametrize("parents", list(itertools.product(range(3), repeat=3)), ids=label)
@pytest.mark.parametrize("publish", [True, False])
def test_any_parents_give_each_beam_its_parents_tokens(parents, publish):
    manager = small(num_blocks=16)
    first = computed(manager, [1, 2, 3], publish=publish)
    beams = [first, *manager.fork(first, 2)]
    manager.append(beams, [[4, 5], [6], [7, 8, 9]])
    manager.commit(beams, [5, 4, 6])
    expected = [texts(beams)[parent] for parent in parents]
    counts = [beams[parent].num_computed_tokens for parent in parents]
    needed = [parent for at, parent in enumerate(parents) if parent != at and parent in parents[:at]]
    manager.reorder(beams, np.array(parents))
    assert texts(beams) == expected
    assert [beam.num_computed_tokens for beam in beams] == counts
    assert len(moves(manager)) <= 2 + len(needed)
    manager.check()
    for beam in beams:
        manager.append([beam], [0])
    assert texts(beams) == [[*tokens, 0] for tokens in expected]
    for beam in beams:
        manager.free(beam)
        manager.check()
    assert manager.num_free_blocks == 16


def test_reordering_beams_of_different_lengths_moves_their_reserved_blocks_along():
    manager = small(num_blocks=16)
    beams = beams_of(manager, [5], [6, 7, 8])
    manager.reserve(beams, [0, 4])
    manager.reorder(beams, [1, 0])
    assert [beam.num_blocks for beam in beams] == [6, 3]
    manager.check()


def test_a_beam_that_takes_over_a_long_reservation_keeps_its_tokens_apart_from_its_neighbours():
    length = 2 * MIN_TAIL_TOKENS
    manager = small(num_blocks=3 * length, max_sequence_length=3 * length)
    beams = beams_of(manager, [5], [6])
    manager.reserve(beams, length)
    manager.reorder(beams, [1, 0])
    for token in range(length):
        manager.append(beams, [token, token + 1])
    assert texts(beams) == [[1, 2, 3, 4, 6, *range(length)], [1, 2, 3, 4, 5, *range(1, length + 1)]]
    manager.check()


def test_blocks_of_beams_that_end_make_room_for_the_copies():
    manager = small(num_blocks=4)
    beams = beams_of(manager, [5], [6])
    assert manager.num_free_blocks == 0
    manager.reorder(beams, [1, 1])
    assert texts(beams) == [[1, 2, 3, 4, 6]] * 2
    manager.check()


def test_copies_that_do_not_fit_are_refused_all_together():
    manager = small(num_blocks=5)
    first = computed(manager, [1, 2])
    beams = [first, *manager.fork(first, 2)]
    manager.append(beams, [[3, 4], [5, 6], [7]])
    manager.commit(beams)
    manager.add_sequence([9, 9])
    with refused(manager, OutOfBlocks, "needs 2 blocks, but only 0"):
        manager.reorder(beams, [2, 2, 2])
    assert texts(beams) == [[1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 7]]


def test_a_beam_that_is_not_committed_may_be_taken_over_but_not_copied():
    manager = small(num_blocks=16)
    beams = beams_of(manager, [5], [6])
    manager.append(beams, [[], [7, 8, 9]])
    with refused(manager, SequenceError, "reorder: row 1 has 2 blocks of tokens"):
        manager.reorder(beams, [1, 1])
    manager.reorder(beams, [1, 0])
    assert texts(beams) == [[1, 2, 3, 4, 6, 7, 8, 9], [1, 2, 3, 4, 5]]
    manager.check()


def test_any_sequences_of_a_namespace_may_be_reordered():
    manager = small(num_blocks=16)
    one, other = computed(manager, [1, 2, 3]), computed(manager, [7, 8, 9, 10, 11])
    manager.reorder((one, other), [1, 0])
    assert texts([one, other]) == [[7, 8, 9, 10, 11], [1, 2, 3]]
    manager.check()


def test_a_beam_publishes_as_its_parent_does():
    manager = small(num_blocks=16)
    public = computed(manager, [1, 2, 3])
    private = computed(manager, [5, 6, 7], publish=False)
    manager.reorder([public, private], [1, 1])
    manager.append([public, private], [[8, 9], [10, 11]])
    manager.commit([public, private])
    assert hit(manager, [5, 6, 7, 8]) == 0
    manager.check()
    manager.free(private)
    manager.free(public)
    manager.check()
    assert manager.num_free_blocks == 16


def test_beams_from_before_and_after_a_drop_may_be_reordered():
    manager = small(num_blocks=16)
    before = computed(manager, [1, 2, 3, 4])
    manager.drop(namespace=())
    after = computed(manager, [5, 6, 7, 8])
    for parents in ([0, 0], [1, 0], [1, 1]):
        manager.reorder([before, after], parents)
        manager.append([before, after], [[9, 9], [8, 8]])
        manager.commit([before, after])
        manager.check()
    manager.free(before)
    manager.check()
    manager.free(after)
    manager.check()
    assert manager.num_free_blocks == 16


@pytest.mark.parametrize(
    ("parents", "error", "part"),
    [
        ([0], ArgumentError, "reorder: parents must be 2 ints, one for each beam"),
        ([0, 1, 1], ArgumentError, "reorder: parents must be 2 ints"),
        ([[0, 1]], ArgumentError, "reorder: parents must be 2 ints"),
        ([0, 2], ArgumentError, "reorder: parents are indices into beams, 0 .. 1, not [0, 2]"),
        ([0, -1], ArgumentError, "reorder: parents are indices into beams, 0 .. 1, not [0, -1]"),
        ([0.0, 1.0], ArgumentTypeError, "reorder: parents must hold ints, not "),
        ([True, False], ArgumentTypeError, "reorder: parents must hold ints, not "),
        ([None, 0], ArgumentTypeError, "reorder: parents must hold ints, not "),
        ([2**64, 0], ArgumentError, "reorder: parents"),
        ([[0], [0, 1]], ArgumentError, "parents"),
        (None, ArgumentTypeError, "reorder: parents must hold ints, not "),
        ("01", ArgumentTypeError, "reorder: parents must hold ints, not "),
    ],
    ids=label,
)
def test_parents_that_cannot_be_are_refused(parents, error, part):
    manager = small()
    beams = beams_of(manager, [5], [6])
    with refused(manager, error, part):
        manager.reorder(beams, parents)


def test_beams_that_cannot_be_reordered_are_refused():
    manager = small(num_blocks=16)
    one, other = beams_of(manager, [5], [6])
    stranger, ended = computed(manager, [1], namespace=("a",)), manager.add_sequence([1])
    leader = manager.add_sequence([7, 8, 9], num_beams=2)
    manager.free(ended)
    with refused(manager, SequenceError, "reorder: a sequence is named twice"):
        manager.reorder([one, one], [0, 1])
    with refused(manager, SequenceError, "reorder: the sequences are of different namespaces"):
        manager.reorder([one, stranger], [1, 0])
    with refused(manager, SequenceError, "reorder: the sequence has been freed"):
        manager.reorder([one, ended], [0, 0])
    with refused(manager, SequenceError, "reorder: 1 beams wait until"):
        manager.reorder([one, leader], [0, 0])
    with refused(manager, SequenceError, "reorder:", "is a beam that waits"):
        manager.reorder([one, leader.beams[1]], [0, 0])
    for wrong in (one, iter([one, other]), None, "ab", np.array([0, 1])):
        with refused(manager, ArgumentTypeError, "reorder: beams must be a list of Sequence"):
            manager.reorder(wrong, [0, 1])
    manager.reorder([], [])


# -- beams that wait for their prompt ---------------------------------------------------------------------------------


def test_beams_have_rows_at_once_and_share_the_full_blocks_of_the_prompt():
    manager = small()
    leader = manager.add_sequence([1, 2, 3], num_beams=3)
    first, second, third = leader.beams
    assert first is leader
    assert first.beams == second.beams == third.beams
    assert [beam.row for beam in leader.beams] == [0, 1, 2]
    assert [ids(beam) for beam in leader.beams] == [[0, 1], [0, 2], [0, 3]]
    assert texts(leader.beams) == [[1, 2, 3]] * 3
    assert [beam.num_computed_tokens for beam in leader.beams] == [0, 0, 0]
    assert manager.num_free_blocks == 4
    manager.check()


def test_beams_of_a_prompt_of_whole_blocks_need_none_of_their_own():
    manager = small()
    leader = manager.add_sequence([1, 2, 3, 4], num_beams=3)
    assert manager.num_free_blocks == 6
    manager.commit([leader])
    assert moves(manager) == []
    assert [beam.num_computed_tokens for beam in leader.beams] == [4, 4, 4]
    manager.append(leader.beams, [5, 6, 7])
    assert texts(leader.beams) == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 7]]
    manager.check()


@pytest.mark.parametrize("by_rows", [True, False])
def test_beams_run_once_the_whole_prompt_is_committed(by_rows):
    manager = small()
    leader = manager.add_sequence([1, 2, 3, 4, 5], num_beams=2)
    _, waiting = leader.beams
    named = np.array([leader.row]) if by_rows else [leader]
    for count in (1, 4):
        manager.commit(named, count)
        assert (waiting.num_computed_tokens, moves(manager)) == (0, [])
        with refused(manager, SequenceError, "waits until its beam 0 has committed the whole prompt"):
            manager.append([waiting], [6])
    manager.commit(named)
    assert waiting.num_computed_tokens == 5
    assert moves(manager) == [(2, 3, 1)]
    manager.append([leader, waiting], [6, 7])
    assert texts([leader, waiting]) == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7]]
    manager.check()


def test_beams_follow_when_their_leaders_blocks_turn_out_to_be_known():
    manager = small(num_blocks=16)
    known = manager.add_sequence([1, 2, 3, 4])
    leader = manager.add_sequence([1, 2, 3, 4, 5], num_beams=2)
    _, waiting = leader.beams
    manager.commit([known])
    manager.stats()
    version = waiting.version
    manager.commit([leader], 2)
    manager.stats()
    assert ids(waiting)[:2] == ids(leader)[:2] == [ids(known)[0], ids(leader)[1]]
    assert waiting.version > version
    manager.commit([leader])
    manager.stats()
    assert ids(waiting)[:2] == ids(leader)[:2] == ids(known)
    manager.check()


def test_beams_count_what_their_prompt_reused():
    manager = small(num_blocks=16)
    cached(manager, [1, 2, 3, 4])
    leader = manager.add_sequence([1, 2, 3, 9, 9], num_beams=2)
    assert [beam.num_cached_tokens for beam in leader.beams] == [3, 3]
    assert [beam.num_computed_tokens for beam in leader.beams] == [3, 0]
    assert moves(manager) == [(1, ids(leader)[1], 1)]
    manager.commit([leader])
    assert [num_tokens for _, _, num_tokens in moves(manager)] == [1]
    manager.check()


@pytest.mark.parametrize("publish", [True, False])
@pytest.mark.parametrize("prompt", [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]], ids=label)
@pytest.mark.parametrize("computed_before", [0, 1, 2, 9])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=label)
def test_leaders_and_followers_may_end_in_any_order(prompt, computed_before, order, publish):
    """Whoever is left has the prompt, and can be computed and go on."""
    manager = small(num_blocks=16)
    beams = manager.add_sequence(prompt, num_beams=3, publish=publish).beams
    manager.commit([beams[0]], min(computed_before, len(prompt)))
    for at, index in enumerate(order):
        manager.free(beams[index])
        manager.check()
        assert beams[index].beams == [beams[index]]
        left = [beams[each] for each in order[at + 1 :]]
        assert texts(left) == [prompt] * len(left)
        assert all(set(beam.beams) == set(left) for beam in left)
        if left:
            (heir,) = [beam for beam in left if beam.leader is None] if computed_before < len(prompt) else [left[0]]
            assert heir.num_computed_tokens == min(computed_before, len(prompt))
            assert all(beam.leader in {heir, None} for beam in left)
    assert (manager.num_free_blocks, manager._state.rows.num_waiting) == (16, 0)
    assert hit(manager, prompt) == (min(computed_before, len(prompt)) if publish else 0)
    manager.check()


def test_an_heir_goes_on_where_its_leader_stopped():
    manager = small()
    beams = manager.add_sequence([1, 2, 3, 4, 5], num_beams=3).beams
    manager.commit([beams[0]], 3)
    blocks = ids(beams[0])
    manager.free(beams[0])
    assert (ids(beams[1]), beams[1].num_computed_tokens) == (blocks, 3)
    manager.commit([beams[1]])
    assert moves(manager) == [(blocks[2], ids(beams[2])[2], 1)]
    manager.append(beams[1:], [6, 7])
    assert texts(beams[1:]) == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7]]
    manager.check()


def test_what_a_leader_was_given_beyond_the_prompt_is_its_own():
    manager = small(num_blocks=16)
    beams = manager.add_sequence([1, 2, 3], num_beams=3).beams
    manager.append([beams[0]], [[7, 8, 9]])
    manager.free(beams[0])
    assert texts(beams[1:]) == [[1, 2, 3]] * 2
    manager.check()
    manager.commit([beams[1]])
    manager.append(beams[1:], [4, 5])
    assert texts(beams[1:]) == [[1, 2, 3, 4], [1, 2, 3, 5]]
    manager.check()


def test_a_leader_that_commits_beyond_the_prompt_starts_its_beams():
    manager = small(num_blocks=16)
    beams = manager.add_sequence([1, 2, 3], num_beams=2).beams
    manager.append([beams[0]], [[4, 5]])
    manager.commit([beams[0]], 4)
    assert (beams[1].num_computed_tokens, texts(beams)) == (3, [[1, 2, 3, 4, 5], [1, 2, 3]])
    assert [num_tokens for _, _, num_tokens in moves(manager)] == [1]
    manager.append([beams[1]], [9])
    manager.check()


def test_beams_of_a_dropped_namespace_run_all_the_same():
    manager = small(num_blocks=16)
    beams = manager.add_sequence([1, 2, 3], num_beams=2).beams
    manager.commit([beams[0]], 2)
    manager.stats()
    manager.drop(namespace=())
    manager.commit([beams[0]])
    manager.append(beams, [[4, 5], [6, 7]])
    manager.commit(beams)
    assert texts(beams) == [[1, 2, 3, 4, 5], [1, 2, 3, 6, 7]]
    assert hit(manager, [1, 2]) == 0
    for beam in beams:
        manager.free(beam)
        manager.check()
    assert manager.num_free_blocks == 16


def test_a_sequence_whose_beams_wait_is_not_forked():
    manager = small()
    leader = manager.add_sequence([1, 2, 3], num_beams=2)
    with refused(manager, SequenceError, "fork: 1 beams wait until"):
        manager.fork(leader)
    with refused(manager, SequenceError, "fork:", "is a beam that waits"):
        manager.fork(leader.beams[1])
    manager.commit([leader])
    assert texts(manager.fork(leader.beams[1])) == [[1, 2, 3]]
    manager.check()


def test_one_beam_is_no_beams():
    manager = small()
    sequence = manager.add_sequence([1, 2, 3], num_beams=1)
    assert sequence.beams == [sequence]
    assert manager.fork(computed(manager, [4]))[0].beams != [sequence]


def test_what_a_leader_has_committed_is_found_after_its_heir_has_taken_over():
    manager = small(block_size=4, num_blocks=12)
    cached(manager, [0] * 8)
    leader = manager.add_sequence([0] * 8 + [1] * 6, num_beams=2)
    manager.commit([leader], 12)
    manager.match_prefix([5] * 9)
    manager.free(leader)
    assert manager.match_prefix([0] * 8 + [1] * 6).num_tokens == 12
    manager.check()
