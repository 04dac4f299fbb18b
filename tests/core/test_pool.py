import numpy as np
import pytest

from kvist.core.pool import BlockPool


def test_a_new_pool_hands_out_neighbours_from_0_on():
    pool = BlockPool(5)
    assert pool.take(3).tolist() == [0, 1, 2]
    assert pool.take(2).tolist() == [3, 4]
    assert pool.num_free == 0
    assert pool.num_blocks == 5


def test_blocks_given_back_together_come_again_together_and_in_order():
    pool = BlockPool(6)
    taken = pool.take(6).copy()
    pool.give(taken[[4, 1, 3]])
    pool.give(taken[[0, 5]])
    assert pool.take(2).tolist() == [0, 5]
    assert pool.take(3).tolist() == [4, 1, 3]


def test_blocks_can_be_taken_into_the_columns_of_a_table():
    pool, table = BlockPool(5), np.zeros(4, np.int32)
    pool.take(1)
    pool.take_into(table.data, 1, 3)
    assert table.tolist() == [0, 1, 2, 0]
    assert pool.num_free == 2
    pool.take_into(table.data, 2, 2)
    assert (table.tolist(), pool.num_free) == ([0, 1, 2, 0], 2)


@pytest.mark.parametrize(("start", "end"), [(0, 3), (2, 1)])
def test_taking_more_into_a_table_than_there_are_or_less_than_none_changes_nothing(start, end):
    pool, table = BlockPool(2), np.full(4, 7, np.int32)
    with pytest.raises(AssertionError, match=f"{end - start} blocks asked of a pool with 2 free"):
        pool.take_into(table.data, start, end)
    assert (table.tolist(), pool.num_free) == ([7, 7, 7, 7], 2)


def test_blocks_come_back_from_the_memory_of_a_table_too():
    pool, table = BlockPool(4), np.zeros(4, np.int32)
    pool.take_into(table.data, 0, 4)
    pool.give(table.data[1:3])
    assert pool.take(2).tolist() == [1, 2]


def test_no_blocks_can_be_taken_and_given():
    pool = BlockPool(1)
    assert pool.take(0).tolist() == []
    pool.give(np.array([], np.int32))
    assert pool.num_free == 1


def test_ids_are_int32():
    assert BlockPool(2).take(2).dtype == np.int32


@pytest.mark.parametrize("n", [3, -1])
def test_taking_more_than_there_are_or_less_than_none_changes_nothing(n):
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match=f"{n} blocks asked of a pool with 2 free"):
        pool.take(n)
    assert pool.take(2).tolist() == [0, 1]


def test_giving_more_than_was_taken_changes_nothing():
    pool = BlockPool(3)
    pool.take(1)
    with pytest.raises(AssertionError, match="2 blocks given to a pool that lacks 1"):
        pool.give(np.array([0, 1], np.int32))
    assert pool.num_free == 2


def test_free_blocks_is_a_copy():
    pool = BlockPool(3)
    pool.free_blocks()[:] = 7
    assert sorted(pool.free_blocks().tolist()) == [0, 1, 2]


def test_each_block_is_either_taken_or_free_after_any_number_of_calls():
    random = np.random.default_rng(0)
    pool, taken = BlockPool(20), []
    for _ in range(300):
        if random.integers(2):
            taken += pool.take(int(random.integers(pool.num_free + 1))).tolist()
        else:
            random.shuffle(taken)
            given = [taken.pop() for _ in range(random.integers(len(taken) + 1))]
            pool.give(np.array(given, np.int32))
        assert sorted(taken + pool.free_blocks().tolist()) == list(range(20))
