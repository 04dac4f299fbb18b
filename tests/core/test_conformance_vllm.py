"""What vLLM's block pool, hashing and prefix cache do, as facts about this manager: whole blocks only, as theirs.

Where the facts count n blocks, one of them is the null block, so there are n - 1 here; ids and the order of the free
ones may differ. The defaults are theirs: blocks of 16 tokens, 10 of them. Facts that do not apply are in `facts.py`,
with the reason.
"""

import numpy as np
import pytest
from tests.core.small import cached, computed, ids, refused, small

from kvist import OutOfBlocks, SequenceError
from kvist.core.pool import BlockPool

COMMON = [0] * 16 + [1] * 16 + [2] * 16


def blocks_of_16(num_blocks=10, **settings):
    settings = {"partial_reuse": False, "max_sequence_length": 1024} | settings
    return small(block_size=settings.pop("block_size", 16), num_blocks=num_blocks, **settings)


def hit(manager, tokens, **options):
    return manager.match_prefix(tokens, **options).num_tokens


# -- pool, queue, map -------------------------------------------------------------------------------------------------


def test_V1_fifty_five_tokens_take_four_blocks_of_which_the_three_full_ones_can_be_found():
    manager = blocks_of_16()
    sequence = computed(manager, COMMON + [3] * 7)
    assert sequence.num_blocks == 4
    assert hit(manager, COMMON + [3] * 8) == 48
    assert manager.num_free_blocks == 6


def test_V2_a_second_prompt_shares_the_three_common_blocks_and_takes_one():
    manager = blocks_of_16()
    first = computed(manager, COMMON + [3] * 7)
    second = manager.add_sequence(COMMON + [4] * 5)
    assert second.num_cached_tokens == 48
    assert ids(second)[:3] == ids(first)[:3]
    assert ids(second)[3] not in ids(first)
    assert manager.num_free_blocks == 5


def test_V3_after_both_have_ended_what_is_not_cached_is_taken_before_what_is():
    """Theirs queues the blocks as 5 4 6 7 8 9 10 3 2 1: those without content, then the cached ones from the tail."""
    manager = blocks_of_16()
    for rest in ([3] * 7, [4] * 5):
        cached(manager, COMMON + rest)
    assert manager.num_free_blocks == 10
    found = []
    for num_blocks in (7, 8, 9, 10):
        other = manager.add_sequence([9] * 16 * num_blocks)
        found.append(hit(manager, [*COMMON, 5]))
        manager.free(other)
    assert found == [48, 32, 16, 0]


def test_V5_a_foreign_prompt_of_the_whole_pool_takes_everything():
    manager = blocks_of_16()
    cached(manager, COMMON + [3] * 7)
    foreign = manager.add_sequence([9] * 160)
    assert sorted(ids(foreign)) == list(range(10))
    assert manager.num_free_blocks == 0
    assert hit(manager, COMMON + [3] * 7) == 0


def test_V7_the_only_block_is_handed_out_without_what_it_held():
    manager = blocks_of_16(1)
    left = cached(manager, [0] * 16)
    assert ids(manager.add_sequence([1] * 15)) == left
    assert hit(manager, [0] * 17) == 0


def test_V9_without_reuse_nothing_is_found_and_nothing_stays():
    manager = blocks_of_16(4, block_size=4, reuse=False)
    first = computed(manager, range(10))
    assert first.num_blocks == 3
    manager.free(first)
    second = computed(manager, range(16))
    assert (second.num_blocks, second.num_cached_tokens) == (4, 0)
    with pytest.raises(OutOfBlocks):
        manager.add_sequence([1, 2, 3, 4])


def test_V11_reset_is_refused_while_requests_run_and_forgets_everything_after():
    """Differs: theirs returns False; an error that names the rows cannot be taken for success."""
    manager = blocks_of_16()
    sequences = [computed(manager, COMMON + [3] * 7), computed(manager, COMMON + [4] * 5)]
    with pytest.raises(SequenceError, match="2 sequences run"):
        manager.reset()
    assert hit(manager, [*COMMON, 5]) == 48
    for sequence in sequences:
        manager.free(sequence)
    manager.reset()
    assert hit(manager, [*COMMON, 5]) == 0
    assert manager.stats().num_evictable_blocks == 0


def test_V12_more_than_the_pool_has_is_refused_and_takes_nothing():
    """Differs: theirs takes blocks that are hit out of the queue's middle; here free blocks hold nothing to hit."""
    pool = BlockPool(5)
    with pytest.raises(AssertionError, match="6 blocks asked of a pool with 5 free"):
        pool.take(6)
    assert sorted(pool.take(5).tolist()) == [0, 1, 2, 3, 4]
    with pytest.raises(AssertionError, match="0 free"):
        pool.take(1)


def test_V13_what_is_given_back_is_taken_first_and_in_the_order_given():
    pool = BlockPool(6)
    pool.take(6)
    for given in ([0], [4, 5], [1, 2]):
        pool.give(np.array(given, np.int32))
    assert pool.take(5).tolist() == [1, 2, 4, 5, 0]


def test_V14_blocks_given_in_one_go_come_in_that_order_however_many_at_a_time():
    pool = BlockPool(6)
    pool.take(6)
    pool.give(np.array([1, 3, 5, 4, 0, 2], np.int32))
    assert [pool.take(n).tolist() for n in (0, 1, 2, 3)] == [[], [1], [3, 5], [4, 0, 2]]


def test_V15_two_blocks_of_one_content_become_one():
    """Differs: theirs keeps both and returns the first; here the second sequence moves to the first's block."""
    manager = blocks_of_16()
    first, second = (manager.add_sequence(COMMON) for _ in range(2))
    assert not set(ids(first)) & set(ids(second))
    manager.commit([first, second])
    assert manager.num_free_blocks == 7
    assert ids(first) == ids(second)


def test_V18_decoding_takes_a_block_when_one_is_full_and_makes_it_reusable_when_committed():
    manager = blocks_of_16()
    sequence = computed(manager, COMMON + [3] * 7)
    blocks, found = [sequence.num_blocks], [hit(manager, [*COMMON, *[3] * 31])]
    for more in (4, 19):
        manager.append([sequence], [[3] * more])
        manager.commit([sequence])
        blocks.append(sequence.num_blocks)
        found.append(hit(manager, [*COMMON, *[3] * 31]))
    assert blocks == [4, 4, 5]
    assert found == [48, 48, 64]


@pytest.mark.parametrize(("partial_reuse", "expected"), [(False, [32, 32]), (True, [32, 39])])
def test_V21_of_forty_tokens_only_whole_blocks_are_found_while_they_are_held(partial_reuse, expected):
    """Differs: theirs can never reuse the last 8; here they are copied, too, once the first sequence has ended."""
    manager = blocks_of_16(partial_reuse=partial_reuse)
    first = computed(manager, range(40))
    found = [hit(manager, range(40))]
    manager.free(first)
    assert [*found, hit(manager, range(40))] == expected


# -- identity ---------------------------------------------------------------------------------------------------------


def test_V30_the_same_salt_finds_three_blocks_and_another_finds_none():
    """Differs: theirs mixes the salt into the first block's hash; a namespace of its own separates every block."""
    manager = blocks_of_16()
    cached(manager, COMMON, namespace=("salt1",))
    prompt = [*COMMON, 5]
    assert [hit(manager, prompt, namespace=salt) for salt in [("salt1",), ("salt2",), ()]] == [48, 0, 0]


def test_V31_a_block_is_its_tokens_and_all_tokens_before_it():
    """Theirs chains hashes; with tokens compared there is nothing that could collide."""
    manager = blocks_of_16(block_size=3)
    cached(manager, range(6))
    assert hit(manager, range(7)) == 6
    assert hit(manager, [3, 4, 5, 3, 4, 5, 6]) == 0
    assert hit(manager, [0, 1, 2, 3, 4, 6, 7]) == 3


# -- scheduling, as far as the cache decides it -----------------------------------------------------------------------


def test_V69_two_equal_prompts_of_one_step_are_computed_twice_and_stored_once():
    """Differs: theirs lets the second hit what the first has yet to compute; here nothing can be hit before it is
    written, so that a step that fails leaves nothing wrong behind. From the next step on they share, which theirs never
    do.
    """
    manager = blocks_of_16(14)
    first, second = (manager.add_sequence(range(100)) for _ in range(2))
    assert second.num_cached_tokens == 0
    manager.commit([first, second])
    assert manager.num_free_blocks == 14 - 6 - 2
    assert ids(first)[:6] == ids(second)[:6]


def test_V69_a_conversation_of_300_tokens_computes_the_rest_of_its_last_block():
    manager = blocks_of_16(20)
    cached(manager, range(300))
    assert 300 - manager.add_sequence(range(300)).num_cached_tokens == 300 % 16 == 12


def test_V66_the_first_goes_on_when_the_second_is_suspended_and_that_one_gets_its_late_token_when_it_is_back():
    """Differs: theirs appends a late token to a preempted request at once; here the sequence has no row to append to,
    and computes again one block of its five, since the four others are still there.
    """
    manager = blocks_of_16(reuse=True)
    first, second = computed(manager, range(80)), computed(manager, range(100, 180))
    with refused(manager, OutOfBlocks, "needs 1 blocks, but only 0"):
        manager.append([first], np.array([7]))
    manager.suspend(second)
    manager.append([first], np.array([7]))
    manager.commit([first])
    with refused(manager, SequenceError):
        manager.append([second], np.array([8]))
    manager.free(first)
    assert manager.resume(second) == 16
    assert (second.num_tokens, second.num_computed_tokens) == (80, 64)
    manager.append([second], np.array([8]))
    assert second.tokens.tolist() == [*range(100, 180), 8]


def test_V68_the_lower_of_two_is_suspended_and_comes_back_with_all_of_its_tokens():
    """Differs: theirs computes all 32 tokens again; here the block that was not needed meanwhile is found."""
    manager = blocks_of_16(4)
    higher, lower = computed(manager, range(30)), computed(manager, range(100, 132))
    assert manager.num_free_blocks == 0
    manager.append([higher], [[1, 2]])
    with refused(manager, OutOfBlocks, "row 0 with 2, row 1 with 2"):
        manager.append([higher], np.array([3]))
    manager.suspend(lower)
    manager.append([higher], np.array([3]))
    manager.free(higher)
    assert manager.resume(lower) == 16
    assert (lower.num_tokens, lower.num_computed_tokens) == (32, 16)
