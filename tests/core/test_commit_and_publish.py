import numpy as np
import pytest
from tests.core.small import cached, computed, ids, label, moves, refused, small

from kvist import ArgumentError, ArgumentTypeError, SequenceError


def hit(manager, tokens, **options):
    """How many of these tokens can be reused, were they followed by one more."""
    return manager.match_prefix([*tokens, 99], **options).num_tokens


# -- commit -----------------------------------------------------------------------------------------------------------


def test_nothing_uncommitted_can_be_hit():
    manager = small()
    sequence = manager.add_sequence([1, 2, 3, 4])
    assert hit(manager, [1, 2, 3, 4]) == 0
    manager.commit([sequence], 1)
    assert hit(manager, [1, 2, 3, 4]) == 0
    manager.commit([sequence], 3)
    assert hit(manager, [1, 2, 3, 4]) == 2
    manager.commit([sequence])
    assert hit(manager, [1, 2, 3, 4]) == 4


def test_a_partly_filled_block_of_a_running_sequence_cannot_be_hit():
    manager = small(block_size=4)
    computed(manager, [1, 2, 3, 4, 5, 6])
    assert hit(manager, [1, 2, 3, 4, 5, 6]) == 4


def test_appended_tokens_are_uncommitted():
    manager = small()
    sequence = computed(manager, [1, 2])
    manager.append([sequence], [[3, 4]])
    assert (sequence.num_tokens, sequence.num_computed_tokens) == (4, 2)
    assert hit(manager, [1, 2, 3, 4]) == 2
    manager.free(sequence)
    assert hit(manager, [1, 2, 3, 4]) == 2
    assert manager.num_free_blocks == 8


def test_freeing_publishes_the_partly_filled_block_as_far_as_committed():
    manager = small(block_size=4)
    sequence = manager.add_sequence([1, 2, 3, 4, 5, 6, 7])
    manager.commit([sequence], 6)
    manager.free(sequence)
    assert hit(manager, [1, 2, 3, 4, 5, 6, 7]) == 6


def test_freeing_without_publishing_leaves_only_what_was_published_before():
    manager = small()
    sequence = computed(manager, [1, 2])
    assert hit(manager, [1, 2]) == 2
    manager.append([sequence], [[3, 4]])
    manager.commit([sequence])
    manager.free(sequence, publish=False)
    assert hit(manager, [1, 2, 3, 4]) == 2
    manager.check()


def test_commit_takes_rows_sequences_and_one_count_for_all_or_each():
    manager = small(num_blocks=16)
    sequences = [manager.add_sequence([token] * 4) for token in range(3)]
    manager.commit(np.array([2, 0]), 1)
    assert manager.num_computed_tokens[:3].tolist() == [1, 0, 1]
    manager.commit(sequences, [1, 2, 3])
    assert manager.num_computed_tokens[:3].tolist() == [1, 2, 3]
    manager.commit(np.array([1]), np.array([2], np.uint8))
    manager.commit(np.array([1, 0]))
    assert manager.num_computed_tokens[:3].tolist() == [4, 4, 3]
    manager.commit(sequences)
    assert [hit(manager, [token] * 4) for token in range(3)] == [4, 4, 4]


def test_committing_what_is_committed_changes_nothing():
    manager = small()
    sequence = computed(manager, [1, 2, 3])
    before = manager.digest()
    manager.commit([sequence])
    manager.commit([sequence], 3)
    manager.commit([sequence], [3])
    assert manager.digest() == before


@pytest.mark.parametrize(
    ("counts", "error", "part"),
    [
        (4, SequenceError, "row 0 cannot have 4 computed tokens: it has 3 tokens, and 2 of them are computed"),
        (1, SequenceError, "row 0 cannot have 1 computed tokens: it has 3 tokens, and 2 of them are computed (rewind"),
        ([2, 9], SequenceError, "row 1 cannot have 9 computed tokens"),
        ([2, 0], SequenceError, "row 1 cannot have 0 computed tokens"),
        (-1, ArgumentError, "num_computed_tokens holds -1, must not be negative"),
        ([3, -1], ArgumentError, "num_computed_tokens holds -1"),
        ([3], ArgumentError, "num_computed_tokens has shape (1,), must be one int or one for each of 2 sequences"),
        ([], ArgumentError, "num_computed_tokens has shape (0,)"),
        ([[2, 2]], ArgumentError, "num_computed_tokens has shape (1, 2)"),
        (2.0, ArgumentTypeError, "num_computed_tokens must hold ints, not float64"),
        (True, ArgumentTypeError, "num_computed_tokens must hold ints, not bool"),
        ("2", ArgumentTypeError, "num_computed_tokens must hold ints"),
        ([None, 2], ArgumentTypeError, "num_computed_tokens must hold ints, not object"),
        ([[2], [2, 3]], ArgumentError, "num_computed_tokens"),
        (2**63 - 1, SequenceError, "it has 3 tokens, and 2 of them are computed"),
        (2**64 - 1, (SequenceError, ArgumentError), ""),
        (2**64, (SequenceError, ArgumentError), ""),
    ],
    ids=label,
)
def test_counts_that_cannot_be_are_refused_for_the_whole_batch(counts, error, part):
    manager = small()
    sequences = [manager.add_sequence([1, 2, 3]), manager.add_sequence([4, 5, 6])]
    manager.commit(sequences, 2)
    with refused(manager, error, part):
        manager.commit(sequences, counts)
    with refused(manager, error, part):
        manager.commit(np.array([0, 1]), counts)


# -- sharing ----------------------------------------------------------------------------------------------------------


def test_equal_content_ends_up_in_one_block_and_the_spare_goes_back():
    manager = small()
    first, second = manager.add_sequence([1, 2, 3]), manager.add_sequence([1, 2, 4])
    assert manager.num_free_blocks == 4
    manager.commit([first, second])
    before = second.version
    assert manager.num_free_blocks == 5
    assert ids(first) == [0, 1]
    assert ids(second) == [0, 3]
    assert second.version == before + 1
    assert first.version == 0
    assert manager.row_version[:2].tolist() == [0, before + 1]
    assert manager.stats().num_shared_blocks == 1
    manager.check()


def test_sharing_is_found_whoever_commits_first():
    manager = small()
    first, second = manager.add_sequence([1, 2, 3]), manager.add_sequence([1, 2, 4])
    manager.commit([second])
    manager.stats()
    manager.commit([first])
    manager.stats()
    assert ids(first) == [2, 1]
    assert ids(second) == [2, 3]
    assert (first.version, second.version) == (1, 0)


def test_a_decode_that_meets_known_content_goes_on_sharing_block_by_block():
    manager = small(num_blocks=16)
    computed(manager, [1, 2, 3, 4, 5, 6, 7])
    second = computed(manager, [1])
    for token in (2, 3, 4, 5, 9, 8):
        manager.append([second], [token])
        manager.commit([second])
        manager.stats()
    assert ids(second)[:2] == [0, 1]
    assert ids(second)[2] not in (0, 1, 2, 3)
    assert manager.stats().num_shared_blocks == 2
    assert second.tokens.tolist() == [1, 2, 3, 4, 5, 9, 8]
    manager.check()


def test_content_is_shared_in_the_middle_of_an_extent():
    manager = small(num_blocks=16)
    first = computed(manager, [1, 2, 3, 4, 5, 6, 7, 8])
    manager.stats()
    second = computed(manager, [1, 2, 3, 4, 5, 6, 0, 0], reuse=False)
    manager.stats()
    assert ids(second)[:3] == ids(first)[:3]
    assert ids(second)[3] != ids(first)[3]
    assert manager.stats().num_shared_blocks == 3
    manager.check()


def test_what_follows_a_shared_block_hangs_below_it():
    manager = small(num_blocks=16)
    first = computed(manager, [1, 2])
    second = computed(manager, [1, 2, 3, 4], reuse=False)
    manager.stats()
    assert ids(second) == [ids(first)[0], 2]
    manager.free(first)
    manager.free(second)
    assert hit(manager, [1, 2, 3, 4]) == 4
    manager.check()


def test_freeing_gives_the_spare_of_a_full_and_a_partly_filled_block_back():
    manager = small(block_size=4)
    cached(manager, [1, 2, 3, 4, 5, 6])
    manager.free(computed(manager, [1, 2, 3, 4, 5, 6], reuse=False))
    stats = manager.stats()
    assert (stats.num_free_blocks, stats.num_evictable_blocks, stats.num_shared_blocks) == (8, 2, 2)
    manager.free(computed(manager, [1, 2, 3, 4, 5], reuse=False))
    assert manager.stats().num_evictable_blocks == 2
    manager.free(computed(manager, [1, 2, 3, 4, 5, 6, 7], reuse=False))
    assert manager.stats().num_evictable_blocks == 2
    assert hit(manager, [1, 2, 3, 4, 5, 6, 7]) == 7
    manager.check()


def test_nothing_is_shared_between_sequences_that_do_not_publish():
    manager = small()
    first = computed(manager, [1, 2], publish=False)
    second = computed(manager, [1, 2], publish=False)
    assert manager.num_free_blocks == 6
    assert ids(first) != ids(second)
    manager.check()


def test_reserved_blocks_are_not_published():
    manager = small()
    sequence = computed(manager, [1, 2])
    manager.reserve([sequence], 4)
    manager.free(sequence)
    assert manager.stats().num_evictable_blocks == 1
    assert manager.num_free_blocks == 8


def test_a_table_shows_shared_ids_once_anything_has_looked():
    manager = small()
    first, second = computed(manager, [1, 2, 3]), computed(manager, [1, 2, 4], reuse=False)
    view = manager.tables([first, second]).block_table
    manager.match_prefix([5])
    assert view[:, 0].tolist() == [0, 0]


def test_a_copy_ordered_into_a_block_that_turns_out_spare_is_still_made_first():
    manager = small(block_size=4)
    cached(manager, [1, 2, 3, 4])
    sequence = manager.add_sequence([1, 2, 3, 5])
    other = computed(manager, [1, 2, 3, 5], reuse=False)
    manager.stats()
    manager.commit([sequence])
    manager.stats()
    assert ids(sequence) == ids(other)
    assert moves(manager) == [(0, 1, 3)]
    manager.check()


# -- namespaces that were dropped -------------------------------------------------------------------------------------


def test_a_sequence_whose_namespace_was_dropped_goes_on_and_publishes_no_more():
    manager = small()
    sequence = computed(manager, [1, 2, 3], namespace=("a",))
    manager.drop(namespace=("a",))
    manager.append([sequence], [4])
    manager.commit([sequence])
    assert hit(manager, [1, 2, 3, 4], namespace=("a",)) == 0
    assert sequence.tokens.tolist() == [1, 2, 3, 4]
    later = computed(manager, [1, 2, 3, 4], namespace=("a",))
    assert hit(manager, [1, 2, 3, 4], namespace=("a",)) == 4
    manager.free(sequence)
    manager.free(later)
    assert manager.num_free_blocks == 8
    manager.check()
