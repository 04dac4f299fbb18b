"""What mistral.rs's cache manager does, as facts about this one: blocks of 4 tokens, and no block lost to a null block.

Where the facts count n blocks, one of them is the null block, so there are n - 1 here. Facts that do not apply are in
`facts.py`, with the reason.
"""

import numpy as np
import pytest
from tests.core.small import cached, computed, ids, moves, small

from kvist import OutOfBlocks, SequenceError
from kvist.core.pool import BlockPool


def blocks_of_4(num_blocks, **settings):
    return small(block_size=4, num_blocks=num_blocks, **({"partial_reuse": False} | settings))


def hit(manager, tokens, **options):
    return manager.match_prefix(tokens, **options).num_tokens


def test_M1_ten_tokens_take_three_blocks_without_any_reuse():
    sequence = blocks_of_4(15, reuse=False).add_sequence(range(10))
    assert sequence.num_blocks == 3


def test_M2_growing_from_eight_to_twelve_tokens_takes_one_new_block():
    manager = blocks_of_4(15)
    sequence = manager.add_sequence(range(8))
    first = ids(sequence)
    manager.append([sequence], [[8, 9, 10, 11]])
    assert ids(sequence)[:2] == first
    assert sequence.num_blocks == 3


def test_M3_a_prompt_is_refused_while_another_has_all_blocks():
    manager = blocks_of_4(3)
    manager.add_sequence(range(12))
    with pytest.raises(OutOfBlocks) as refused:
        manager.add_sequence([20, 21, 22, 23])
    assert (refused.value.needed, refused.value.free, refused.value.evictable, refused.value.held) == (1, 0, 0, 3)


def test_M4_ending_a_sequence_gives_all_its_blocks_back():
    manager = blocks_of_4(7)
    sequence = manager.add_sequence(range(12))
    assert manager.num_free_blocks == 4
    manager.free(sequence)
    assert manager.num_free_blocks == 7
    assert not sequence.is_live


def test_M5_a_prompt_of_twelve_reuses_the_eight_tokens_that_another_left():
    manager = blocks_of_4(15)
    left = cached(manager, range(8))
    sequence = manager.add_sequence(range(12))
    assert sequence.num_cached_tokens == 8
    assert ids(sequence)[:2] == left
    assert sequence.num_blocks == 3
    assert manager.stats().num_missed_blocks == 2 + 1


def test_M6_all_eight_cached_tokens_of_twelve_are_found():
    manager = blocks_of_4(15)
    cached(manager, range(8))
    assert hit(manager, range(12)) == 8


def test_M8_each_commit_makes_the_full_blocks_up_to_there_reusable():
    manager = blocks_of_4(15)
    sequence = manager.add_sequence(range(16))
    found = []
    for num_computed in (8, 16):
        manager.commit([sequence], num_computed)
        found.append(hit(manager, range(17)))
    assert found == [8, 16]


def test_M9_slots_are_block_ids_times_block_size_plus_offset():
    manager = blocks_of_4(15)
    sequence = manager.add_sequence(range(8))
    first, second = ids(sequence)
    slots = manager.tables([sequence]).slot_mapping
    assert slots.dtype == np.int64
    assert slots.tolist() == [first * 4 + at for at in range(4)] + [second * 4 + at for at in range(4)]


def test_M10_after_a_hit_only_the_tokens_to_compute_have_slots():
    manager = blocks_of_4(15)
    cached(manager, range(8))
    sequence = manager.add_sequence(range(12))
    assert manager.tables([sequence]).slot_mapping.tolist() == [ids(sequence)[2] * 4 + at for at in range(4)]


def test_M11_a_table_is_padded_to_the_columns_asked_for():
    manager = blocks_of_4(15)
    sequence = manager.add_sequence(range(8))
    table = manager.tables([sequence], max_blocks=5).block_table
    assert table.dtype == np.int32
    assert table.tolist() == [[*ids(sequence), 0, 0, 0]]


def test_M12_taking_tokens_back_gives_their_blocks_back():
    manager = blocks_of_4(7)
    sequence = manager.add_sequence(range(12))
    assert manager.num_free_blocks == 4
    manager.rewind(sequence, 4)
    assert (sequence.num_blocks, manager.num_free_blocks) == (2, 5)


@pytest.mark.parametrize(("partial_reuse", "expected"), [(False, 4), (True, 7)])
def test_M14_a_prompt_that_is_cached_whole_keeps_a_token_to_compute(partial_reuse, expected):
    """Differs: they find 4 of 8 tokens, one block; by copying part of the second, one token is computed, not four."""
    manager = blocks_of_4(15, partial_reuse=partial_reuse)
    left = cached(manager, range(8))
    sequence = manager.add_sequence(range(8))
    assert sequence.num_cached_tokens == expected
    assert ids(sequence)[0] == left[0]
    assert moves(manager) == ([(left[1], ids(sequence)[1], 3)] if partial_reuse else [])


def test_M16_the_pool_counts_what_is_taken_and_given():
    """Their pools of 4, 4 and 2 with a null block are pools of 3, 3 and 1 here; no pool is ever asked for too much."""
    pool = BlockPool(3)
    pool.take(2)
    assert pool.num_free == 1
    pool = BlockPool(3)
    pool.give(pool.take(3).copy())
    assert pool.num_free == 3
    manager = blocks_of_4(1)
    manager.add_sequence([1])
    with pytest.raises(OutOfBlocks):
        manager.add_sequence([2])


def test_M17_three_committed_blocks_are_found_in_order():
    manager = blocks_of_4(7)
    left = cached(manager, range(12))
    assert manager.stats().num_evictable_blocks == 3
    assert ids(manager.add_sequence([0, 1, 2, 3, 99]))[0] == left[0]
    assert hit(manager, range(13)) == 12


def test_M18_what_is_found_in_a_free_block_is_taken_out_of_the_free_ones():
    manager = blocks_of_4(7)
    cached(manager, range(8))
    assert manager.num_free_blocks == 7
    assert hit(manager, range(9)) == 8
    with manager.pin(manager.match_prefix(range(5))):
        assert manager.num_free_blocks == 6
    assert manager.num_free_blocks == 7


def test_M19_a_block_held_twice_is_free_when_the_second_holder_lets_go():
    manager = blocks_of_4(7)
    cached(manager, range(4))
    match = manager.match_prefix(range(5))
    pins = [manager.pin(match), manager.pin(match)]
    free = [manager.num_free_blocks]
    for pin in pins:
        pin.release()
        free.append(manager.num_free_blocks)
    assert free == [6, 6, 7]
    with pytest.raises(SequenceError, match="released"):
        pins[0].release()


def test_M20_usage_goes_from_none_to_all():
    manager = blocks_of_4(3)
    assert manager.stats().usage == 0.0
    manager.add_sequence(range(12))
    assert manager.stats().usage == 1.0


def test_M23_only_full_blocks_of_the_same_prefix_and_namespace_are_the_same():
    """Differs: they compare 64-bit hashes; here tokens are compared, and two prefixes can never be taken for one."""
    manager = blocks_of_4(15)
    sequence = manager.add_sequence(range(16))
    manager.commit([sequence], 10)
    assert hit(manager, range(17)) == 8  # 10 tokens fill 2 blocks
    manager.commit([sequence])
    assert hit(manager, range(17)) == 16  # the other 2 join them
    assert hit(manager, range(4, 9)) == 0  # the second block's tokens with another past
    assert [hit(manager, range(17), namespace=adapter) for adapter in [("A",), ("B",)]] == [0, 0]


def test_M30_a_prompt_that_is_preempted_and_comes_back_is_counted_once():
    """The sizes of the chunks that their scheduler cuts are none of the cache's business; what it counts is."""
    manager = small(block_size=8, num_blocks=127, partial_reuse=False)
    cached(manager, range(8))
    sequence = computed(manager, range(17))
    for _ in range(2):
        manager.suspend(sequence)
        assert manager.resume(sequence) == 1
        manager.commit([sequence])
    stats = manager.stats()
    assert (stats.num_admitted, stats.num_query_tokens, stats.num_hit_tokens) == (2, 8 + 17, 8)
    assert (stats.num_suspended, stats.num_resumed, stats.num_recomputed_tokens) == (2, 2, 2)
