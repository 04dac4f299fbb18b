from array import array

import numpy as np
import pytest
from tests.core.small import cached, ids, label, refused, small

from kvist import ArgumentError, ArgumentTypeError, NeverFits, OutOfBlocks
from kvist.core.rows import MIN_TAIL_TOKENS


def batch_of(manager, *prompts):
    return [manager.add_sequence(prompt) for prompt in prompts]


# -- append -----------------------------------------------------------------------------------------------------------


def test_a_token_inside_the_last_block_needs_no_block():
    manager = small()
    (sequence,) = batch_of(manager, [1])
    manager.append([sequence], [2])
    assert (sequence.num_tokens, sequence.num_computed_tokens, ids(sequence)) == (2, 0, [0])
    manager.append([sequence], [3])
    assert (sequence.tokens.tolist(), ids(sequence)) == ([1, 2, 3], [0, 1])


def test_one_token_each_goes_to_its_row_whatever_the_order_of_rows():
    manager = small(num_blocks=16)
    sequences = batch_of(manager, [1], [2, 2], [3], [4, 4])
    manager.append(np.array([2, 0, 3, 1]), np.array([7, 8, 9, 5]))
    manager.append(sequences[::-1], [10, 11, 12, 13])
    assert [sequence.tokens.tolist() for sequence in sequences] == [
        [1, 8, 13],
        [2, 2, 5, 12],
        [3, 7, 11],
        [4, 4, 9, 10],
    ]
    manager.check()


@pytest.mark.parametrize(
    "form",
    [
        list,
        tuple,
        np.array,
        lambda ids: np.array(ids, np.uint8),
        lambda ids: array("h", ids),
        memoryview,
        lambda ids: [np.int64(token) for token in ids],
    ],
)
def test_one_token_each_may_come_in_any_form(form):
    manager = small()
    sequences = batch_of(manager, [1], [2])
    manager.append(sequences, form(np.array([5, 6])))
    assert [sequence.tokens.tolist() for sequence in sequences] == [[1, 5], [2, 6]]


@pytest.mark.parametrize(
    "tokens",
    [
        [[5, 6, 7], []],
        ([5, 6, 7], np.array([], np.int32)),
        [np.array([5, 6, 7], np.uint16), b""],
        (each for each in ([5, 6, 7], [])),
    ],
)
def test_several_tokens_or_none_may_be_added_to_each(tokens):
    manager = small()
    first, second = batch_of(manager, [1], [2])
    manager.append([first, second], tokens)
    assert first.tokens.tolist() == [1, 5, 6, 7]
    assert (second.tokens.tolist(), second.num_blocks) == ([2], 1)
    manager.check()


def test_a_matrix_is_a_list_of_rows_of_tokens():
    manager = small()
    first, second = batch_of(manager, [1], [2])
    manager.append([first, second], np.array([[5, 6], [7, 8]]))
    assert [first.tokens.tolist(), second.tokens.tolist()] == [[1, 5, 6], [2, 7, 8]]


def test_appending_evicts_what_nobody_holds():
    manager = small(num_blocks=2)
    cached(manager, [1, 2])
    (sequence,) = batch_of(manager, [5, 6])
    manager.append([sequence], [7])
    assert manager.stats().num_evicted_blocks == 1
    manager.check()


def test_appending_is_all_or_nothing_over_the_batch():
    manager = small(num_blocks=4)
    sequences = batch_of(manager, [1, 2], [3, 4], [5])
    with refused(manager, OutOfBlocks, "needs 2 blocks, but only 1 are free or evictable (3 held") as caught:
        manager.append(sequences, [7, 8, 9])
    error = caught.value
    assert (error.needed, error.free, error.evictable, error.held) == (2, 1, 0, 3)
    with refused(manager, OutOfBlocks, "needs 3 blocks"):
        manager.append(np.array([0, 1, 2]), [[7] * 4, [], [8, 9]])
    manager.append(sequences[1:], [8, 9])
    assert [sequence.tokens.tolist() for sequence in sequences] == [[1, 2], [3, 4, 8], [5, 9]]


def test_committed_blocks_are_published_before_an_append_is_refused_for_want_of_them():
    manager = small(num_blocks=4)
    first, second = batch_of(manager, [1, 2, 3], [1, 2, 5])
    manager.commit([first, second])
    manager.append([first, second], [[4, 8], []])
    assert (first.num_blocks, second.num_blocks) == (3, 2)
    assert ids(first)[0] == ids(second)[0]
    manager.check()


def test_no_sequence_grows_beyond_max_sequence_length():
    manager = small(max_sequence_length=5)
    short, long = batch_of(manager, [1], [2, 3, 4])
    manager.append([short, long], [[7], [7, 7]])
    with refused(manager, NeverFits, "append: row 1 would have 6 tokens, max_sequence_length is 5"):
        manager.append([short, long], [8, 9])
    with refused(manager, NeverFits, "append: row 1 would have 7 tokens"):
        manager.append([short, long], [[8], [9, 9]])
    with refused(manager, NeverFits, "reserve: row 1 would have 6 tokens"):
        manager.reserve([short, long], 1)


@pytest.mark.parametrize(
    ("tokens", "error", "part"),
    [
        ([1], ArgumentError, "append: 2 sequences, but 1 tokens"),
        ([1, 2, 3], ArgumentError, "append: 2 sequences, but 3 tokens"),
        (np.array([], np.int32), ArgumentError, "append: 2 sequences, but 0 tokens"),
        ([], ArgumentError, "append: 2 sequences, but 0 tokens"),
        ([[1]], ArgumentError, "append: 2 sequences, but 1 arrays"),
        ([[1], [2], [3]], ArgumentError, "append: 2 sequences, but 3 arrays"),
        ([1, -1], ArgumentError, "tokens[1] is -1; token ids are 0 .. 2147483647"),
        (np.array([1, -1]), ArgumentError, "tokens[1] is -1"),
        (np.array([1, 2**31]), ArgumentError, "tokens[1] is 2147483648"),
        ([[1], [5, -1]], ArgumentError, "tokens[1][1] is -1"),
        ([[1], np.array([5, -1], np.int8)], ArgumentError, "tokens[1][1] is -1"),
        ([[1], [2**31]], ArgumentError, "tokens[1][0] is 2147483648"),
        (np.array([[1], [-2]]), ArgumentError, "tokens[1][0] is -2"),
        ([[1], np.array([[5]])], ArgumentError, "tokens[1] must have one dimension"),
        (np.array([1.0, 2.0]), ArgumentTypeError, "tokens must hold integers, not float64"),
        (np.array([True, False]), ArgumentTypeError, "tokens must hold integers, not bool"),
        (np.array([1, 2], object), ArgumentTypeError, "tokens must hold integers, not object"),
        ([1.0, 2.0], ArgumentTypeError, "tokens[0]"),
        ([1, None], ArgumentTypeError, "tokens[1] is a NoneType"),
        ([1, [2]], ArgumentTypeError, "tokens[1] is a list"),
        ([[1], 2], ArgumentTypeError, "tokens[1] must be"),
        ([[1], [2.0]], ArgumentTypeError, "tokens[1][0] is a float"),
        ([[1], "a"], ArgumentTypeError, "tokens[1] must be"),
        ("ab", ArgumentTypeError, "tokens"),
        (None, ArgumentTypeError, "tokens must be"),
        (5, ArgumentTypeError, "tokens must be"),
        (np.array(5), ArgumentError, "tokens"),
        ({7: 1, 8: 2}, ArgumentTypeError, "tokens"),
    ],
    ids=label,
)
def test_tokens_that_cannot_be_are_refused_for_the_whole_batch(tokens, error, part):
    manager = small()
    sequences = batch_of(manager, [1], [2])
    with refused(manager, error, part):
        manager.append(sequences, tokens)
    with refused(manager, error, part):
        manager.append(np.array([0, 1]), tokens)


def test_a_decode_step_does_no_tree_work(monkeypatch):
    manager = small(num_blocks=64)
    batch_of(manager, [1, 2], [3, 4], [5, 6])
    tree = type(manager._state.tree)
    for name in ("find", "hold", "release", "insert", "insert_unlisted", "split", "evict"):
        monkeypatch.setattr(tree, name, None)
    rows = np.arange(3)
    for step in range(20):
        manager.append(rows, np.array([step, step, step]))
        manager.commit(rows)
    monkeypatch.undo()
    assert manager.match_prefix([1, 2, *range(20), 0]).num_tokens == 22
    manager.check()


# -- reserve ----------------------------------------------------------------------------------------------------------


def test_reserved_capacity_is_used_before_new_blocks_are_taken():
    manager = small()
    (sequence,) = batch_of(manager, [1])
    manager.reserve([sequence], 4)
    assert (sequence.num_tokens, sequence.capacity, ids(sequence)) == (1, 6, [0, 1, 2])
    manager.append([sequence], [[2, 3, 4, 5, 6]])
    assert ids(sequence) == [0, 1, 2]
    manager.append([sequence], [7])
    assert ids(sequence) == [0, 1, 2, 3]


def test_a_full_tail_takes_no_block_where_there_is_capacity():
    length = 3 * MIN_TAIL_TOKENS
    manager = small(num_blocks=length, max_sequence_length=2 * length)
    (sequence,) = batch_of(manager, [1])
    manager.reserve([sequence], length)
    blocks = ids(sequence)
    for token in range(length):
        manager.append(np.array([0]), np.array([token]))
    assert ids(sequence) == blocks
    assert sequence.tokens.tolist() == [1, *range(length)]
    manager.check()


def test_every_way_to_grow_is_counted():
    manager = small()
    (sequence,) = batch_of(manager, [1, 2])
    manager.append([sequence], [3])
    assert manager.stats().num_allocated_blocks == 2
    manager.append([sequence], [[4, 5]])
    assert manager.stats().num_allocated_blocks == 3
    manager.reserve([sequence], 4)
    assert manager.stats().num_allocated_blocks == 5


def test_reserving_is_not_cumulative():
    manager = small()
    (sequence,) = batch_of(manager, [1])
    for n in (4, 4, 2, 0):
        manager.reserve([sequence], n)
        assert sequence.num_blocks == 3


def test_one_count_for_all_or_one_for_each_may_be_reserved():
    manager = small(num_blocks=16)
    sequences = batch_of(manager, [1], [2, 2], [3, 3, 3])
    manager.reserve(sequences, 3)
    assert [sequence.capacity for sequence in sequences] == [4, 6, 6]
    manager.reserve(np.array([2, 0, 1]), [5, 0, 1])
    assert [sequence.capacity for sequence in sequences] == [4, 6, 8]
    manager.reserve(sequences, np.array([6, 0, 0], np.uint8))
    assert [sequence.capacity for sequence in sequences] == [8, 6, 8]
    manager.check()


def test_capacity_may_be_reserved_up_to_a_length_inside_the_last_block():
    manager = small(block_size=4, max_sequence_length=6)
    (sequence,) = batch_of(manager, [1])
    manager.reserve([sequence], 5)
    assert (sequence.capacity, sequence.num_blocks) == (6, 2)
    manager.append([sequence], [[2, 3, 4, 5, 6]])
    manager.check()


def test_reserving_is_all_or_nothing_over_the_batch():
    manager = small(num_blocks=4)
    sequences = batch_of(manager, [1, 2], [3, 4])
    with refused(manager, OutOfBlocks, "needs 3 blocks, but only 2"):
        manager.reserve(sequences, [1, 3])
    manager.reserve(sequences, [1, 1])
    assert manager.num_free_blocks == 0


@pytest.mark.parametrize(
    ("n", "error", "part"),
    [
        (-1, ArgumentError, "n holds -1, must not be negative"),
        ([0, -3], ArgumentError, "n holds -3, must not be negative"),
        (np.int8(-1), ArgumentError, "n holds -1"),
        ([1], ArgumentError, "n has shape (1,), must be one int or one for each of 2 sequences"),
        ([1, 2, 3], ArgumentError, "n has shape (3,)"),
        ([], ArgumentError, "n has shape (0,)"),
        ([[1, 2]], ArgumentError, "n has shape (1, 2)"),
        (1.0, ArgumentTypeError, "n must hold ints, not float64"),
        ([1, 2.0], ArgumentTypeError, "n must hold ints, not float64"),
        (True, ArgumentTypeError, "n must hold ints, not bool"),
        (None, ArgumentTypeError, "n must hold ints, not object"),
        ("1", ArgumentTypeError, "n must hold ints"),
        ([[1], [1, 2]], ArgumentError, "n"),
    ],
    ids=label,
)
def test_counts_that_cannot_be_are_refused(n, error, part):
    manager = small()
    sequences = batch_of(manager, [1], [2])
    with refused(manager, error, part):
        manager.reserve(sequences, n)


@pytest.mark.parametrize("n", [2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, np.uint64(2**64 - 1), [0, 2**63 - 1]])
def test_no_count_is_so_great_that_it_is_taken_for_a_small_one(n):
    manager = small()
    sequences = batch_of(manager, [1, 2], [3])
    with refused(manager, (NeverFits, ArgumentError)):
        manager.reserve(sequences, n)
