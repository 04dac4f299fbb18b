import numpy as np
import pytest
from tests.core.small import cached, computed, ids, label, refused, small

from kvist import ArgumentTypeError, Sequence, SequenceError
from kvist.core.rows import MIN_TAIL_TOKENS, Batch

PROPERTIES = ["num_tokens", "num_computed_tokens", "num_blocks", "capacity", "version", "block_ids", "tokens"]


# -- the handle -------------------------------------------------------------------------------------------------------


def test_a_sequence_knows_its_row_tokens_and_blocks():
    manager = small()
    manager.add_sequence([9])
    sequence = manager.add_sequence([1, 2, 3], namespace=("a", 1, b"b"))
    assert isinstance(sequence, Sequence)
    assert (sequence.row, sequence.is_live, sequence.namespace) == (1, True, ("a", 1, b"b"))
    assert (sequence.num_tokens, sequence.num_computed_tokens, sequence.num_cached_tokens) == (3, 0, 0)
    assert (sequence.num_blocks, sequence.capacity) == (2, 4)
    assert sequence.tokens.tolist() == [1, 2, 3]
    assert sequence.block_ids.tolist() == [1, 2]
    assert sequence.tokens.dtype == sequence.block_ids.dtype == np.int32
    assert sequence.beams == [sequence]


def test_what_a_sequence_returns_is_a_copy():
    manager = small()
    sequence = manager.add_sequence([1, 2, 3])
    sequence.block_ids[:] = 7
    sequence.beams.clear()
    assert ids(sequence) == [0, 1]
    assert sequence.beams == [sequence]
    manager.commit([sequence])
    manager.append([sequence], [4])
    assert sequence.tokens.tolist() == [1, 2, 3, 4]


def test_an_ended_sequence_has_no_row_and_says_so():
    manager = small()
    sequence = manager.add_sequence([1, 2, 3])
    manager.free(sequence)
    assert (sequence.row, sequence.is_live) == (-1, False)
    assert repr(sequence) == "<Sequence freed>"
    for name in PROPERTIES:
        with pytest.raises(SequenceError, match="has been freed"):
            getattr(sequence, name)


def test_its_text_names_row_and_counts():
    manager = small()
    sequence = manager.add_sequence([1, 2, 3])
    manager.commit([sequence], 2)
    assert repr(sequence) == "<Sequence row 0: 3 tokens, 2 computed, 2 blocks>"


def test_capacity_ends_at_max_sequence_length_though_the_last_block_goes_on():
    manager = small(block_size=4, max_sequence_length=6)
    sequence = manager.add_sequence([1, 2, 3, 4, 5])
    assert (sequence.num_blocks, sequence.capacity) == (2, 6)


def test_a_row_that_was_given_back_is_the_next_to_be_used():
    manager = small()
    first, second = manager.add_sequence([1]), manager.add_sequence([2])
    manager.free(first)
    third = manager.add_sequence([3])
    assert (second.row, third.row) == (1, 0)
    assert third.tokens.tolist() == [3]
    assert not first.is_live


# -- tokens: the earlier ones and the tail ----------------------------------------------------------------------------


def test_tokens_survive_more_single_appends_than_the_tail_holds():
    length = 2 * MIN_TAIL_TOKENS + 3
    manager = small(num_blocks=2 * length, max_sequence_length=2 * length)
    sequence, other = manager.add_sequence([7]), manager.add_sequence([8])
    for token in range(length):
        manager.append(np.array([0, 1]), np.array([token, token + 1]))
    assert sequence.tokens.tolist() == [7, *range(length)]
    assert other.tokens.tolist() == [8, *range(1, length + 1)]
    manager.check()


@pytest.mark.parametrize("commit_every", [1, 7, 2000])
def test_tokens_survive_mixed_appends_commits_and_rewinds(commit_every):
    chance = np.random.default_rng(commit_every)
    manager = small(num_blocks=2000, max_sequence_length=4000)
    sequence, expected = manager.add_sequence([1, 2, 3]), [1, 2, 3]
    for step in range(1500):
        if step % 50 == 49:
            taken = int(chance.integers(min(len(expected), 40)))
            manager.rewind(sequence, taken)
            expected = expected[: len(expected) - taken]
        elif step % 13 == 0:
            added = chance.integers(0, 9, int(chance.integers(9))).tolist()
            manager.append([sequence], [added])
            expected += added
        else:
            manager.append(np.array([0]), np.array([step]))
            expected.append(step)
        if step % commit_every == 0:
            manager.commit(np.array([0]))
            manager._state.publish_committed()
    assert sequence.tokens.tolist() == expected
    manager.commit([sequence])
    assert manager.match_prefix([*expected, 0]).num_tokens >= len(expected) // 2 * 2
    manager.check()


def test_tokens_read_through_tree_earlier_tokens_and_tail():
    manager = small(block_size=4)
    sequence = manager.add_sequence([1, 2, 3, 4, 5, 6])
    manager.commit([sequence])
    manager._state.publish_committed()
    manager.append([sequence], [[7]])
    manager.append([sequence], [8])
    manager.append([sequence], [9])
    assert sequence.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    manager.commit([sequence])
    assert manager.match_prefix([1, 2, 3, 4, 5, 6, 7, 8, 9]).num_tokens == 8
    assert sequence.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]


# -- naming rows ------------------------------------------------------------------------------------------------------

CALLS = {
    "append": lambda manager, named: manager.append(named, [1] * (len(named) if np.ndim(named) else 1)),
    "reserve": lambda manager, named: manager.reserve(named, 1),
    "commit": lambda manager, named: manager.commit(named),
    "commit to a count": lambda manager, named: manager.commit(named, 1),
    "tables": lambda manager, named: manager.tables(named),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@every_call
@pytest.mark.parametrize(
    ("named", "error", "part"),
    [
        (None, ArgumentTypeError, "NoneType"),
        (0, ArgumentTypeError, "int"),
        ("ab", ArgumentTypeError, "expected a Sequence, got str"),
        ([0, 1], ArgumentTypeError, "expected a Sequence, got int"),
        ([None], ArgumentTypeError, "expected a Sequence, got NoneType"),
        (np.array([0.0]), ArgumentTypeError, "rows must be a 1-D int array, not float64"),
        (np.array([True]), ArgumentTypeError, "rows must be a 1-D int array, not bool"),
        (np.array([None]), ArgumentTypeError, "rows must be a 1-D int array, not object"),
        (np.array([[0]]), ArgumentTypeError, "of shape (1, 1)"),
        (np.array(0), ArgumentTypeError, "of shape ()"),
        (np.array([-1]), SequenceError, "row -1 is not one of 0 .. 7"),
        (np.array([8]), SequenceError, "row 8 is not one of 0 .. 7"),
        (np.array([2**63], np.uint64), SequenceError, "is not one of 0 .. 7"),
        (np.array([0, 5]), SequenceError, "row 5 has no running sequence"),
        (np.array([5]), SequenceError, "row 5 has no running sequence"),
        (np.array([1, 0, 1]), SequenceError, "row 1 is named 2 times in one call"),
        (np.array([0, 0]), SequenceError, "row 0 is named 2 times in one call"),
    ],
    ids=label,
)
def test_rows_that_cannot_be_are_refused_before_any_change(call, named, error, part):
    manager = small()
    computed(manager, [1])
    manager.add_sequence([2, 3])
    with refused(manager, error, part):
        call(manager, named)


def test_a_single_sequence_is_no_list_of_sequences():
    manager = small()
    sequence = manager.add_sequence([1])
    for call in CALLS.values():
        with refused(manager, ArgumentTypeError, "a list of Sequence or an int array of rows, not Sequence"):
            call(manager, sequence)


@every_call
def test_a_sequence_named_twice_is_refused(call):
    manager = small()
    sequence, other = manager.add_sequence([1]), manager.add_sequence([2])
    with refused(manager, SequenceError, f"row {sequence.row} is named 2 times"):
        call(manager, [sequence, other, sequence])


@every_call
@pytest.mark.parametrize("beside", [True, False])
def test_an_ended_sequence_is_refused(call, beside):
    manager = small()
    ended, other = manager.add_sequence([1]), manager.add_sequence([2])
    manager.free(ended)
    with refused(manager, SequenceError, "the sequence has been freed"):
        call(manager, [other, ended] if beside else [ended])
    with refused(manager, SequenceError, "row 0 has no running sequence"):
        call(manager, np.array([1, 0] if beside else [0]))


@every_call
@pytest.mark.parametrize("beside", [True, False])
def test_a_sequence_of_another_manager_is_refused(call, beside):
    manager, stranger = small(), small().add_sequence([1])
    own = manager.add_sequence([2])
    with refused(manager, SequenceError, "the sequence belongs to another manager"):
        call(manager, [own, stranger] if beside else [stranger])


@every_call
def test_a_waiting_beam_is_refused(call):
    manager = small()
    leader = manager.add_sequence([1, 2, 3], num_beams=2)
    with refused(manager, SequenceError, "waits until its beam 0 has committed the whole prompt"):
        call(manager, [leader.beams[1]])
    with refused(manager, SequenceError, "row 1 is a beam that waits until its beam 0"):
        call(manager, np.array([0, 1]))


@every_call
@pytest.mark.parametrize("form", [list, tuple, iter, lambda named: np.array([each.row for each in named], np.uint8)])
def test_sequences_may_be_named_in_any_form_and_order(call, form):
    manager = small()
    named = [computed(manager, [token]) for token in range(3)]
    if form is not iter or call is not CALLS["append"]:
        call(manager, form(named[::-1]))
    manager.check()


@every_call
@pytest.mark.parametrize("named", [[], (), np.array([], np.int64)], ids=label)
def test_no_sequences_at_all_are_no_error(call, named):
    manager = small()
    before = manager.digest()
    call(manager, named)
    assert manager.digest() == before


@pytest.mark.parametrize("call", ["free", "rewind", "fork", "reorder"])
def test_calls_of_one_sequence_refuse_what_is_none(call):
    calls = {
        "free": lambda one: manager.free(one),
        "rewind": lambda one: manager.rewind(one, 0),
        "fork": lambda one: manager.fork(one),
        "reorder": lambda one: manager.reorder([one], [0]),
    }
    manager, stranger = small(), small().add_sequence([1])
    ended = manager.add_sequence([1, 2])
    manager.free(ended)
    for wrong in (None, 0, "a", [ended]):
        with refused(manager, ArgumentTypeError, f"{call}: expected a Sequence, got {type(wrong).__name__}"):
            calls[call](wrong)
    with refused(manager, SequenceError, f"{call}: the sequence has been freed"):
        calls[call](ended)
    with refused(manager, SequenceError, f"{call}: the sequence belongs to another manager"):
        calls[call](stranger)


def test_rows_named_again_are_checked_again_once_they_have_changed_hands():
    manager = small()
    rows = np.array([0, 1])
    first, _ = manager.add_sequence([1]), manager.add_sequence([2])
    manager.append(rows, np.array([5, 6]))
    manager.append(rows, np.array([7, 8]))
    manager.free(first)
    with refused(manager, SequenceError, "row 0 has no running sequence"):
        manager.append(rows, np.array([7, 8]))
    again = manager.add_sequence([3])
    manager.append(rows, np.array([7, 8]))
    assert again.tokens.tolist() == [3, 7]


def test_changing_the_callers_array_of_rows_changes_nothing_remembered():
    manager = small()
    first, second = manager.add_sequence([1]), manager.add_sequence([2])
    rows = np.array([0])
    manager.append(rows, np.array([5]))
    rows[0] = 1
    manager.append(rows, np.array([6]))
    manager.append(np.array([0]), np.array([7]))
    assert first.tokens.tolist() == [1, 5, 7]
    assert second.tokens.tolist() == [2, 6]


def test_rows_of_another_dtype_with_the_same_bytes_are_other_rows():
    manager = small()
    first, second = manager.add_sequence([1]), manager.add_sequence([2])
    manager.append(np.array([1, 0], np.int32), np.array([5, 6]))
    manager.append(np.array([1], np.int64), np.array([7]))
    assert (first.tokens.tolist(), second.tokens.tolist()) == ([1, 6], [2, 5, 7])


def test_neighbouring_rows_in_order_are_selected_as_a_slice():
    assert Batch(np.array([2, 3, 4])).select == slice(2, 5)
    assert Batch(np.array([3])).select == slice(3, 4)
    for rows in ([], [2, 4], [3, 2], [0, 2, 1, 3]):
        batch = Batch(np.array(rows, np.int64))
        assert batch.select is batch.rows


# -- arrays by row ----------------------------------------------------------------------------------------------------


def test_arrays_by_row_show_the_present_and_cannot_be_written():
    manager = small(max_sequences=3)
    num_tokens, num_computed, version = manager.num_tokens, manager.num_computed_tokens, manager.row_version
    sequence = computed(manager, [1, 2, 3])
    manager.append([sequence], [4])
    assert num_tokens.tolist() == [4, 0, 0]
    assert num_computed.tolist() == [3, 0, 0]
    assert version.tolist() == [sequence.version, 0, 0]
    for array in (num_tokens, num_computed, version):
        assert array.dtype == np.int64
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7
    manager.free(sequence)
    assert num_tokens.tolist() == num_computed.tolist() == [0, 0, 0]


def test_the_version_of_a_row_does_not_change_when_blocks_are_only_added():
    manager = small()
    sequence = computed(manager, [1, 2, 3])
    before = sequence.version
    manager.append([sequence], [[4, 5, 6]])
    manager.reserve([sequence], 4)
    manager.commit([sequence])
    manager.stats()
    assert sequence.version == before


def test_a_row_used_again_shows_nothing_of_its_last_sequence():
    manager = small()
    for length in (9, 1, 5):
        sequence = computed(manager, list(range(length, 2 * length)))
        manager.reserve([sequence], 3)
        assert sequence.tokens.tolist() == list(range(length, 2 * length))
        manager.free(sequence)
        assert not manager._state.rows.block_table.any()
        manager.check()


def test_a_single_row_is_enough():
    manager = small(max_sequences=1, block_size=1, num_blocks=1, max_sequence_length=1)
    assert cached(manager, [5]) == [0]
    sequence = manager.add_sequence([6])
    assert (sequence.capacity, ids(sequence)) == (1, [0])
    manager.check()
