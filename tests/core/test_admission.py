from array import array

import numpy as np
import pytest
from tests.core.small import cached, computed, ids, label, moves, refused, small

from kvist import ArgumentError, ArgumentTypeError, NeverFits, OutOfBlocks, OutOfRows

# -- what is reused ---------------------------------------------------------------------------------------------------


def test_a_cold_prompt_gets_blocks_for_all_of_its_tokens():
    manager = small()
    sequence = manager.add_sequence([1, 2, 3, 4, 5])
    assert (sequence.num_cached_tokens, sequence.num_computed_tokens, ids(sequence)) == (0, 0, [0, 1, 2])
    assert manager.num_free_blocks == 5


def test_the_last_prompt_token_is_never_counted_as_cached():
    manager = small()
    cached(manager, [1, 2, 3, 4])
    sequence = manager.add_sequence([1, 2, 3, 4])
    assert sequence.num_cached_tokens == sequence.num_computed_tokens == 3
    assert moves(manager) == [(1, 2, 1)]
    assert ids(sequence) == [0, 2]


@pytest.mark.parametrize("length", range(1, 10))
@pytest.mark.parametrize("partial", [True, False])
def test_of_a_prompt_cached_as_a_whole_all_but_the_last_token_is_reused_as_blocks_allow(length, partial):
    manager = small(num_blocks=16, partial_reuse=partial)
    prompt = list(range(length))
    cached(manager, prompt)
    sequence = manager.add_sequence(prompt)
    assert sequence.num_cached_tokens == (length - 1 if partial else (length - 1) // 2 * 2)
    assert sequence.tokens.tolist() == prompt
    manager.check()


def test_whole_blocks_are_shared_and_not_copied():
    manager = small()
    first = computed(manager, [1, 2, 3, 4])
    second = manager.add_sequence([1, 2, 3, 4, 5, 6])
    assert second.num_cached_tokens == 4
    assert ids(second) == [*ids(first), 2]
    assert moves(manager) == []


def test_a_partial_match_copies_the_tokens_that_agree_into_a_block_of_its_own():
    manager = small(block_size=4)
    cached(manager, [1, 2, 3, 4, 5, 6, 7, 8])
    sequence = manager.add_sequence([1, 2, 3, 4, 5, 6, 9, 9, 9])
    assert sequence.num_cached_tokens == 6
    assert ids(sequence) == [0, 2, 3]
    assert moves(manager) == [(1, 2, 2)]


def test_a_partial_match_copies_at_most_one_block():
    manager = small(block_size=4, num_blocks=32)
    for first in range(8):
        cached(manager, [1, 2, 3, first, 5, 6, 7, 8])
    manager.take_moves()
    sequence = manager.add_sequence([1, 2, 3, 9, 5, 6, 7, 8, 9])
    assert sequence.num_cached_tokens == 3
    assert [num_tokens for _, _, num_tokens in moves(manager)] == [3]


def test_the_sibling_that_agrees_longest_is_copied():
    manager = small(block_size=4, num_blocks=32)
    for tail in ([1, 0, 0, 0], [1, 2, 0, 0], [1, 2, 3, 0], [1, 3, 3, 3], [2, 2, 3, 4], [0, 9, 9, 9]):
        cached(manager, tail)
    manager.take_moves()
    assert manager.add_sequence([1, 2, 3, 4, 5]).num_cached_tokens == 3
    assert manager.add_sequence([1, 2, 4, 4, 5]).num_cached_tokens == 2
    assert manager.add_sequence([7, 2, 3, 4, 5]).num_cached_tokens == 0
    assert [num_tokens for _, _, num_tokens in moves(manager)] == [3, 2]


def test_a_partly_filled_block_that_was_committed_last_is_reused():
    manager = small(block_size=4)
    cached(manager, [1, 2, 3, 4, 5, 6])
    sequence = manager.add_sequence([1, 2, 3, 4, 5, 6, 7, 8])
    assert sequence.num_cached_tokens == 6
    assert moves(manager) == [(1, 2, 2)]


def test_without_partial_reuse_only_whole_blocks_are():
    manager = small(block_size=4, partial_reuse=False)
    cached(manager, [1, 2, 3, 4, 5, 6])
    sequence = manager.add_sequence([1, 2, 3, 4, 5, 6, 7])
    assert sequence.num_cached_tokens == 4
    assert moves(manager) == []


def test_blocks_of_one_token_are_never_partial():
    manager = small(block_size=1)
    cached(manager, [1, 2, 3])
    sequence = manager.add_sequence([1, 2, 3])
    assert sequence.num_cached_tokens == 2
    assert moves(manager) == []


def test_reuse_false_finds_nothing_and_is_found_by_others():
    manager = small()
    first = computed(manager, [1, 2, 3, 4])
    sequence = computed(manager, [1, 2, 3, 4, 5], reuse=False)
    assert sequence.num_cached_tokens == 0
    assert manager.add_sequence([1, 2, 3, 4, 5]).num_cached_tokens == 4
    assert ids(sequence)[:2] == ids(first)


def test_publish_false_finds_others_and_is_found_by_nobody():
    manager = small()
    cached(manager, [1, 2])
    sequence = computed(manager, [1, 2, 3, 4, 5, 6], publish=False)
    assert sequence.num_cached_tokens == 2
    assert manager.match_prefix([1, 2, 3, 4, 5]).num_tokens == 2
    manager.free(sequence)
    assert manager.match_prefix([1, 2, 3, 4, 5]).num_tokens == 2
    assert manager.stats().num_evictable_blocks == 1


def test_a_manager_without_reuse_keeps_and_finds_nothing():
    manager = small(reuse=False)
    computed(manager, [1, 2, 3, 4])
    cached(manager, [1, 2, 3, 4])
    assert manager.add_sequence([1, 2, 3, 4, 5]).num_cached_tokens == 0
    assert manager.stats().num_evictable_blocks == 0
    manager.check()


@pytest.mark.parametrize("namespace", [("a",), ("a", 1), (1,), (b"a",), ("",), ("a", "")])
def test_other_namespaces_see_nothing_of_it(namespace):
    manager = small()
    cached(manager, [1, 2, 3, 4])
    cached(manager, [1, 2, 3, 4], namespace=namespace)
    for other in [(), ("a",), ("a", 1), (1,), (b"a",), ("",), ("a", ""), ("1",), ("a1",)]:
        expected = 3 if other in ((), namespace) else 0
        assert manager.match_prefix([1, 2, 3, 4], namespace=other).num_tokens == expected


def test_equal_prompts_of_two_namespaces_share_no_block():
    manager = small()
    first = computed(manager, [1, 2, 3, 4])
    second = computed(manager, [1, 2, 3, 4], namespace=("a",))
    manager.stats()
    assert not set(ids(first)) & set(ids(second))


@pytest.mark.parametrize(
    "form",
    [list, tuple, lambda ids: array("q", ids), np.array, lambda ids: memoryview(np.array(ids, np.uint16)), bytes],
)
def test_the_form_of_a_prompt_does_not_matter(form):
    manager = small()
    cached(manager, form([1, 2, 3, 4]))
    assert manager.add_sequence(form([1, 2, 3, 4, 5])).num_cached_tokens == 4


def test_a_prompt_keeps_its_tokens_when_the_caller_changes_the_array():
    manager = small(block_size=16, num_blocks=1100, max_sequence_length=20_000)
    prompt = np.arange(9000, dtype=np.int32)
    sequence = manager.add_sequence(prompt)
    prompt[:] = 1
    assert sequence.tokens.tolist() == list(range(9000))
    manager.commit([sequence])
    again = manager.add_sequence(np.arange(9001, dtype=np.int32))
    assert again.num_cached_tokens == 8992
    manager.check()


# -- what does not fit ------------------------------------------------------------------------------------------------


def test_a_prompt_of_exactly_the_pool_fits_and_one_token_more_never_does():
    manager = small(num_blocks=3)
    manager.free(manager.add_sequence([1, 2, 3, 4, 5, 6]))
    with refused(manager, NeverFits, "needs 4 blocks of 2 tokens", "the whole pool of group 0 has 3"):
        manager.add_sequence([1, 2, 3, 4, 5, 6, 7])


def test_a_prompt_of_max_sequence_length_fits_and_one_token_more_never_does():
    manager = small(max_sequence_length=5)
    assert manager.add_sequence([1, 2, 3, 4, 5]).capacity == 5
    with refused(manager, NeverFits, "6 tokens", "max_sequence_length is 5"):
        manager.add_sequence([1, 2, 3, 4, 5, 6])


def test_a_prompt_that_does_not_fit_now_says_who_holds_what():
    manager = small(num_blocks=4)
    manager.add_sequence([1, 2, 3, 4, 5])
    with refused(
        manager, OutOfBlocks, "needs 2 blocks, but only 1 are free or evictable (3 held by 1 sequences"
    ) as caught:
        manager.add_sequence([6, 7, 8])
    error = caught.value
    assert (error.needed, error.free, error.evictable, error.held, error.group) == (2, 1, 0, 3, 0)
    assert isinstance(error, RuntimeError)


def test_what_a_prompt_would_reuse_cannot_be_evicted_for_it():
    manager = small(num_blocks=4)
    cached(manager, [1, 2, 3, 4])
    held = computed(manager, [5, 6, 7, 8])
    with refused(manager, OutOfBlocks) as caught:
        manager.add_sequence([1, 2, 3, 4, 9])
    error = caught.value
    assert (error.needed, error.free, error.evictable, error.held) == (1, 0, 0, 2)
    manager.free(held)
    assert manager.add_sequence([1, 2, 3, 4, 9]).num_cached_tokens == 4


def test_what_a_prompt_would_reuse_of_an_extent_cannot_be_evicted_for_it():
    manager = small(num_blocks=4)
    cached(manager, [1, 2, 3, 4, 5, 6])
    manager.add_sequence([9])
    with refused(manager, OutOfBlocks, "needs 2 blocks, but only 1 are free") as caught:
        manager.add_sequence([1, 2, 3, 4, 9, 9, 9, 9])
    assert (caught.value.free, caught.value.evictable, caught.value.held) == (0, 1, 1)
    assert manager.add_sequence([1, 2, 3, 4, 9, 9]).num_cached_tokens == 4
    manager.check()


def test_only_the_matching_part_of_an_extent_is_kept_from_eviction():
    manager = small(num_blocks=4)
    cached(manager, [1, 2, 3, 4, 5, 6, 7, 8])
    sequence = manager.add_sequence([1, 2, 9, 9, 9, 9, 9, 9])
    assert sequence.num_cached_tokens == 2
    assert ids(sequence)[0] == 0
    assert manager.num_free_blocks == 0
    manager.check()


@pytest.mark.parametrize("num_blocks", range(2, 7))
def test_partial_reuse_never_makes_an_admission_fail(num_blocks):
    """The source of the copy may be the very block that must be evicted for it."""
    manager = small(block_size=4, num_blocks=num_blocks)
    cached(manager, list(range(4 * num_blocks)))
    prompt = [*range(4 * num_blocks - 2), 99, 99]
    sequence = manager.add_sequence(prompt)
    assert sequence.num_cached_tokens == 4 * num_blocks - 2
    assert sequence.tokens.tolist() == prompt
    assert moves(manager) == []
    assert ids(sequence) == list(range(num_blocks))
    manager.check()


def test_a_source_evicted_for_other_blocks_of_the_prompt_is_copied_before_they_are_written():
    manager = small(num_blocks=4)
    cached(manager, [1, 2])
    cached(manager, [3, 4])
    sequence = manager.add_sequence([1, 9, 9, 9, 9, 9, 9, 9])
    assert sequence.num_cached_tokens == 1
    ((source, destination, num_tokens),) = moves(manager) or [(ids(sequence)[0], ids(sequence)[0], 1)]
    assert (source, destination, num_tokens) == (0, ids(sequence)[0], 1)
    manager.check()


def test_spares_of_other_prompts_that_were_committed_make_room():
    manager = small(num_blocks=6)
    twins = [manager.add_sequence([1, 2, 3, 4]) for _ in range(2)]
    cached(manager, [7, 8])
    manager.commit(twins)
    sequence = manager.add_sequence([7, 8, 9, 9, 9, 9])
    assert sequence.num_cached_tokens == 2
    assert ids(twins[0]) == ids(twins[1])
    manager.check()


def test_no_row_is_a_different_error_than_no_block():
    manager = small(max_sequences=2)
    manager.add_sequence([1])
    with refused(manager, OutOfRows, "2 rows needed, but 1 of max_sequences=2 are free") as caught:
        manager.add_sequence([1], num_beams=2)
    error = caught.value
    assert (error.needed, error.free, error.evictable, error.held) == (2, 1, 0, 1)
    with refused(manager, NeverFits, "3 sequences asked for, max_sequences is 2"):
        manager.add_sequence([1], num_beams=3)


def test_beams_that_never_fit_are_told_from_those_that_do_not_fit_now():
    manager = small(num_blocks=3)
    with refused(manager, NeverFits, "needs 4 blocks"):
        manager.add_sequence([1, 2, 3], num_beams=3)
    manager.add_sequence([5])
    with refused(manager, OutOfBlocks, "needs 3 blocks, but only 2"):
        manager.add_sequence([1, 2, 3], num_beams=2)


# -- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", [[], (), b"", array("i"), np.array([], np.int64), np.array([], np.int32)], ids=label)
def test_an_empty_prompt_is_refused(empty):
    manager = small()
    with refused(manager, ArgumentError, "tokens is empty; a prompt has at least one token"):
        manager.add_sequence(empty)


@pytest.mark.parametrize(
    "wrong",
    [None, "abc", 5, 1.5, [1.5], [1, None], np.array([1.0]), np.array([True]), np.array([1], object), iter([1]), {1}],
    ids=label,
)
def test_a_prompt_of_a_wrong_type_is_refused(wrong):
    manager = small()
    cached(manager, [1, 2, 3])
    with refused(manager, ArgumentTypeError, "tokens"):
        manager.add_sequence(wrong)


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        ([1, -1], "tokens[1] is -1; token ids are 0 .. 2147483647"),
        (np.array([1, -1]), "tokens[1] is -1"),
        (np.array([1, -1], np.int32), "tokens[1] is -1"),
        ([2**31], "tokens[0] is 2147483648"),
        (np.array([2**31]), "tokens[0] is 2147483648"),
        (np.array([[1, 2]]), "one dimension, not shape (1, 2)"),
    ],
    ids=label,
)
def test_a_prompt_of_ids_that_cannot_be_is_refused(wrong, part):
    manager = small()
    cached(manager, [1, 2, 3])
    with refused(manager, ArgumentError, part):
        manager.add_sequence(wrong)


@pytest.mark.parametrize("namespace", [None, "a", ["a"], 1, (1.0,), (None,), (True,), (("a",),), ({},)], ids=label)
def test_a_namespace_is_a_tuple_of_strings_ints_and_bytes(namespace):
    manager = small()
    calls = [
        lambda: manager.add_sequence([1], namespace=namespace),
        lambda: manager.match_prefix([1], namespace=namespace),
        lambda: manager.drop(namespace=namespace),
        lambda: manager.explain([1], namespace=namespace),
    ]
    for call in calls:
        with refused(manager, ArgumentTypeError, f"namespace is {namespace!r}, must be a tuple of"):
            call()


@pytest.mark.parametrize("num_beams", [0, -1, True, 1.0, None, "2"], ids=label)
def test_a_number_of_beams_is_a_positive_int(num_beams):
    manager = small()
    with refused(manager, ArgumentError, f"num_beams is {num_beams!r}"):
        manager.add_sequence([1], num_beams=num_beams)


def test_a_refused_prompt_is_not_counted():
    manager = small(num_blocks=1)
    with pytest.raises(NeverFits):
        manager.add_sequence([1, 2, 3])
    assert manager.stats().num_admitted == manager.stats().num_query_tokens == 0
