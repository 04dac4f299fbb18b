import numpy as np
import pytest
from tests.core.small import cached, computed, ids, label, moves, refused, small

from kvist import ArgumentError, ArgumentTypeError, OutOfBlocks, SequenceError


def hit(manager, tokens):
    return manager.match_prefix([*tokens, 99]).num_tokens


def published(manager, tokens, **options):
    """A running sequence whose full blocks are in the tree."""
    sequence = computed(manager, tokens, **options)
    manager._state.publish_committed()
    return sequence


# -- inside what is the sequence's own --------------------------------------------------------------------------------


def test_drafts_are_taken_back_in_place():
    manager = small()
    sequence = published(manager, [1, 2, 3])
    manager.append([sequence], [[7, 8, 9]])
    manager.rewind(sequence, 3)
    assert (sequence.tokens.tolist(), sequence.num_computed_tokens, ids(sequence)) == ([1, 2, 3], 3, [0, 1])
    assert moves(manager) == []
    assert manager.num_free_blocks == 6


def test_the_version_grows_when_blocks_are_given_back_since_others_may_come_in_their_place():
    manager = small()
    sequence = published(manager, [1, 2, 3])
    manager.append([sequence], [4])
    version = sequence.version
    manager.rewind(sequence, 1)
    assert sequence.version == version
    manager.reserve([sequence], 4)
    assert sequence.version == version
    manager.rewind(sequence, 1)
    assert sequence.version > version


def test_computed_tokens_that_are_taken_back_are_computed_no_more():
    manager = small(block_size=4)
    sequence = published(manager, [1, 2, 3, 4, 5, 6, 7])
    manager.rewind(sequence, 2)
    assert (sequence.num_tokens, sequence.num_computed_tokens) == (5, 5)
    manager.append([sequence], [[8, 9, 10]])
    manager.commit([sequence], 6)
    assert sequence.tokens.tolist() == [1, 2, 3, 4, 5, 8, 9, 10]
    assert moves(manager) == []


def test_uncommitted_tokens_are_taken_back_without_touching_the_committed_count():
    manager = small()
    sequence = published(manager, [1, 2, 3])
    manager.append([sequence], [[4, 5]])
    manager.rewind(sequence, 1)
    assert (sequence.num_tokens, sequence.num_computed_tokens) == (4, 3)


def test_rewinding_nothing_gives_reserved_blocks_back():
    manager = small()
    sequence = published(manager, [1, 2, 3])
    manager.reserve([sequence], 6)
    manager.rewind(sequence, 0)
    assert (sequence.tokens.tolist(), ids(sequence)) == ([1, 2, 3], [0, 1])
    manager.check()


def test_rewinding_to_the_end_of_a_published_block_needs_no_copy():
    manager = small()
    sequence = published(manager, [1, 2, 3, 4, 5])
    manager.rewind(sequence, 1)
    assert (sequence.num_tokens, ids(sequence)) == (4, [0, 1])
    assert moves(manager) == []
    manager.append([sequence], [6])
    assert sequence.tokens.tolist() == [1, 2, 3, 4, 6]


@pytest.mark.parametrize("single", [1, 5, 700])
def test_tokens_are_right_after_rewinding_across_tail_and_earlier_tokens(single):
    manager = small(block_size=4, num_blocks=400, max_sequence_length=1600)
    sequence, expected = manager.add_sequence([1, 2, 3]), [1, 2, 3]
    for token in range(single):
        manager.append(np.array([0]), np.array([token]))
        expected.append(token)
    for taken, added in ((single // 2, [5]), (1, []), (2, [6, 7, 8])):
        manager.rewind(sequence, taken)
        expected = expected[: len(expected) - taken]
        manager.append([sequence], [added])
        manager.append([sequence], [9])
        expected += [*added, 9]
        assert sequence.tokens.tolist() == expected
        manager.check()


# -- below what was published -----------------------------------------------------------------------------------------


def test_a_published_block_stays_readable_and_the_sequence_writes_a_copy():
    manager = small(block_size=4)
    sequence = published(manager, [1, 2, 3, 4, 5])
    version = sequence.version
    manager.rewind(sequence, 2)
    assert (sequence.tokens.tolist(), sequence.num_computed_tokens) == ([1, 2, 3], 3)
    assert sequence.version > version
    ((source, destination, num_tokens),) = moves(manager)
    assert (source, num_tokens) == (0, 3)
    assert ids(sequence) == [destination]
    assert destination != source
    assert hit(manager, [1, 2, 3, 4]) == 4
    manager.append([sequence], [[9, 9]])
    manager.commit([sequence])
    assert hit(manager, [1, 2, 3, 4]) == 4
    assert hit(manager, [1, 2, 3, 9, 9]) == 4
    manager.check()


def test_others_keep_the_published_blocks():
    manager = small()
    sequence = published(manager, [1, 2, 3, 4])
    other = manager.add_sequence([1, 2, 3, 4, 5])
    manager.rewind(sequence, 1)
    assert moves(manager) == [(1, ids(sequence)[1], 1)]
    assert ids(other)[:2] == [0, 1]
    assert ids(sequence)[0] == 0
    manager.check()


def test_rewinding_to_a_boundary_below_what_was_published_copies_nothing():
    manager = small()
    sequence = published(manager, [1, 2, 3, 4, 5, 6])
    version = sequence.version
    manager.rewind(sequence, 4)
    assert (sequence.tokens.tolist(), ids(sequence), moves(manager)) == ([1, 2], [0], [])
    assert sequence.version > version
    assert hit(manager, [1, 2, 3, 4, 5, 6]) == 6
    assert manager.stats().num_evictable_blocks == 2
    manager.check()


def test_rewinding_through_several_extents_stops_in_the_right_one():
    manager = small(num_blocks=16)
    for tail in ([9], [3, 9], [3, 4, 9], [3, 4, 5, 9]):
        published(manager, [1, 2, *tail])
    sequence = published(manager, [1, 2, 3, 4, 5, 6, 7, 8, 10])
    manager.take_moves()
    manager.rewind(sequence, 6)
    assert sequence.tokens.tolist() == [1, 2, 3]
    assert [num_tokens for _, _, num_tokens in moves(manager)] == [1]
    manager.append([sequence], [[4, 5, 6]])
    manager.commit([sequence])
    assert sequence.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert hit(manager, [1, 2, 3, 4, 5, 6, 7, 8]) == 8
    manager.check()


@pytest.mark.parametrize("publish", [True, False])
def test_all_tokens_can_be_taken_back(publish):
    manager = small()
    sequence = published(manager, [1, 2, 3, 4, 5], publish=publish)
    manager.rewind(sequence, 5)
    assert (sequence.num_tokens, sequence.num_computed_tokens, sequence.num_blocks) == (0, 0, 0)
    assert sequence.tokens.tolist() == []
    manager.check()
    manager.append([sequence], [[7, 8, 9]])
    manager.commit([sequence])
    assert sequence.tokens.tolist() == [7, 8, 9]
    manager.free(sequence)
    assert manager.num_free_blocks == 8
    manager.check()


def test_a_sequence_of_no_tokens_can_be_forked_and_freed():
    manager = small()
    sequence = published(manager, [1, 2, 3])
    manager.rewind(sequence, 3)
    (child,) = manager.fork(sequence)
    assert child.num_tokens == 0
    manager.append([child, sequence], [5, 6])
    assert (child.tokens.tolist(), sequence.tokens.tolist()) == ([5], [6])
    manager.free(sequence)
    manager.free(child)
    manager.check()


def test_what_was_published_is_not_hit_as_longer_than_it_is_after_growing_again():
    manager = small()
    sequence = published(manager, [1, 2, 3, 4])
    manager.rewind(sequence, 2)
    manager.append([sequence], [[5, 6]])
    manager.commit([sequence])
    assert hit(manager, [1, 2, 3, 4]) == 4
    assert hit(manager, [1, 2, 5, 6]) == 4
    manager.check()


def test_what_was_reused_can_be_taken_back_too():
    manager = small(block_size=4)
    cached(manager, [1, 2, 3, 4, 5, 6, 7, 8])
    sequence = manager.add_sequence([1, 2, 3, 4, 5, 6, 7, 8, 9])
    manager.take_moves()
    manager.rewind(sequence, 3)
    assert (sequence.tokens.tolist(), sequence.num_computed_tokens) == ([1, 2, 3, 4, 5, 6], 6)
    assert [(source, num_tokens) for source, _, num_tokens in moves(manager)] == [(1, 2)]
    assert hit(manager, [1, 2, 3, 4, 5, 6, 7, 8]) == 8
    manager.check()


# -- the block of the copy --------------------------------------------------------------------------------------------


def test_the_copy_may_take_one_of_the_blocks_given_back():
    manager = small(num_blocks=3)
    sequence = published(manager, [1, 2, 3, 4])
    other = manager.add_sequence([1, 2, 3, 4, 5])
    manager.free(other)
    manager.append([sequence], [5])
    manager.rewind(sequence, 2)
    assert sequence.tokens.tolist() == [1, 2, 3]
    assert moves(manager) == [(1, 2, 1)]
    manager.check()


def test_without_room_for_a_copy_a_block_that_nobody_else_holds_is_taken_over():
    manager = small(num_blocks=2)
    sequence = published(manager, [1, 2, 3, 4])
    manager.rewind(sequence, 1)
    assert (sequence.tokens.tolist(), ids(sequence), moves(manager)) == ([1, 2, 3], [0, 1], [])
    assert hit(manager, [1, 2, 3, 4]) == 2
    manager.check()


def test_without_room_for_a_copy_of_a_block_that_others_hold_nothing_changes():
    manager = small(num_blocks=3)
    sequence = published(manager, [1, 2, 3, 4])
    other = manager.add_sequence([1, 2, 3, 4, 5])
    with refused(
        manager, OutOfBlocks, "needs 1 blocks, but only 0 are free or evictable (3 held by 2 sequences"
    ) as caught:
        manager.rewind(sequence, 1)
    assert (caught.value.needed, caught.value.held) == (1, 3)
    manager.rewind(sequence, 2)
    manager.free(other)
    manager.check()


def test_the_block_for_the_copy_is_evicted_from_others():
    manager = small(num_blocks=3)
    sequence = published(manager, [1, 2])
    (child,) = manager.fork(sequence)
    cached(manager, [7, 8])
    computed(manager, [5, 6])
    manager.rewind(sequence, 1)
    assert [num_tokens for _, _, num_tokens in moves(manager)] == [1]
    assert hit(manager, [7, 8]) == 0
    assert child.tokens.tolist() == [1, 2]
    manager.check()


def test_an_unlisted_block_nobody_else_holds_is_taken_over():
    manager = small(num_blocks=2)
    sequence = published(manager, [1, 2, 3, 4], publish=False)
    (child,) = manager.fork(sequence)
    manager.free(child)
    manager.rewind(sequence, 1)
    assert (sequence.tokens.tolist(), moves(manager)) == ([1, 2, 3], [])
    manager.check()


# -- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "error", "part"),
    [
        (4, SequenceError, "rewind: row 0 has 3 tokens, 4 cannot be taken back"),
        (2**64, SequenceError, "18446744073709551616 cannot be taken back"),
        (-1, ArgumentError, "num_tokens is -1, must not be negative"),
        (np.int64(-1), ArgumentError, "num_tokens is -1"),
        (1.0, ArgumentTypeError, "num_tokens is 1.0, must be an int"),
        (True, ArgumentTypeError, "num_tokens is True, must be an int"),
        (None, ArgumentTypeError, "num_tokens is None, must be an int"),
        ("1", ArgumentTypeError, "num_tokens is '1', must be an int"),
        ([1], ArgumentTypeError, "num_tokens is [1], must be an int"),
        (np.array([1]), ArgumentTypeError, "must be an int"),
        (np.array(1.0), ArgumentTypeError, "must be an int"),
        (np.True_, ArgumentTypeError, "must be an int"),
    ],
    ids=label,
)
def test_counts_that_cannot_be_are_refused(n, error, part):
    manager = small()
    sequence = published(manager, [1, 2, 3])
    with refused(manager, error, part):
        manager.rewind(sequence, n)


@pytest.mark.parametrize("n", [np.int8(1), np.uint64(1), np.array(1)], ids=label)
def test_a_count_may_be_any_int(n):
    manager = small()
    sequence = published(manager, [1, 2, 3])
    manager.rewind(sequence, n)
    assert sequence.num_tokens == 2


def test_a_sequence_whose_beams_wait_is_not_rewound():
    manager = small()
    leader = manager.add_sequence([1, 2, 3], num_beams=2)
    with refused(manager, SequenceError, "rewind: 1 beams wait until", "has committed the whole prompt"):
        manager.rewind(leader, 1)
    with refused(manager, SequenceError, "rewind:", "is a beam that waits"):
        manager.rewind(leader.beams[1], 1)
