"""Groups whose blocks have equal bytes may draw from one pool: no block is in two places, whoever takes it."""

import pytest
from tests.core.layers import FULL, chunked, grouped, hit, sliding, state
from tests.core.small import cached, computed, refused

from kvist import AttentionSpec, NeverFits, OutOfBlocks


def shared(layers=None, block_size=2, num_blocks=(4, 4), **settings):
    settings = {"partial_reuse": True, "shared_pool": True} | settings
    return grouped(layers or [FULL, sliding(6)], block_size=block_size, num_blocks=list(num_blocks), **settings)


def held_by(sequence, manager):
    return [
        [block for block in sequence.group_blocks(group).tolist() if block >= 0]
        for group in range(len(manager.config.groups))
    ]


def test_groups_of_equal_bytes_share_the_sum_of_their_blocks():
    manager = shared(num_blocks=(3, 5))
    assert manager.num_blocks == 8
    assert [group.num_blocks for group in manager.stats().groups] == [8, 8]
    sequence = manager.add_sequence(range(8))
    assert manager.num_free_blocks == 0
    full, windows = held_by(sequence, manager)
    assert sorted(full + windows) == list(range(8))


def test_groups_of_other_bytes_have_their_own():
    manager = shared(
        [FULL, FULL, AttentionSpec(2, 1, sliding_window=4), AttentionSpec(1, 1, chunk_tokens=4)], num_blocks=(2, 3, 4)
    )
    assert manager.config.pool_of == (0, 0, 1)
    assert [group.num_blocks for group in manager.stats().groups] == [5, 5, 4]


def test_one_group_takes_what_the_other_does_not_need():
    manager = shared([FULL, sliding(2)], num_blocks=(4, 4))
    sequence = computed(manager, range(4))
    for token in range(4, 12):
        manager.append([sequence], [token])
        manager.commit([sequence])
        manager.check()
    full, windows = held_by(sequence, manager)
    assert len(full) == 6
    assert not set(full) & set(windows)


def test_a_prompt_that_needs_more_than_both_pools_never_fits():
    manager = shared()
    with refused(manager, NeverFits, "needs 10 blocks", "has 8"):
        manager.add_sequence(range(10))


def test_a_refusal_counts_the_blocks_of_both_groups():
    manager = shared()
    manager.add_sequence(range(6))
    with refused(manager, OutOfBlocks, "needs 4 blocks, but only 2") as caught:
        manager.add_sequence([9] * 3)
    assert (caught.value.needed, caught.value.free, caught.value.held) == (4, 2, 6)


def test_one_group_evicts_what_another_has_cached():
    manager = shared()
    cached(manager, range(8))
    assert manager.num_free_blocks == 8
    sequence = manager.add_sequence([9] * 8)
    assert manager.num_free_blocks == 0
    full, windows = held_by(sequence, manager)
    assert sorted(full + windows) == list(range(8))
    manager.check()


@pytest.mark.parametrize("layers", [[FULL, sliding(6)], [sliding(6), sliding(4)], [FULL, sliding(6), chunked(8)]])
@pytest.mark.parametrize("block_size", [2, 4])
@pytest.mark.parametrize("spare", [0, 1, 2, 3])
def test_copies_of_one_call_never_overwrite_what_the_next_one_reads(layers, block_size, spare):
    """What is copied in part may be evicted by the very admission that copies it, for another group."""
    columns = 3
    num_blocks = [columns] * (len(layers) - 1) + [columns + spare]
    manager = shared(layers, block_size, num_blocks)
    contents = {}
    first = computed(manager, range(block_size - 1))
    for group in range(len(layers)):
        contents[first.group_blocks(group).tolist()[0]] = group
    manager.free(first)
    sequence = manager.add_sequence([*range(block_size - 1), *[99] * (block_size * (columns - 1) + 1)])
    if sequence.num_cached_tokens:
        for move in manager.take_moves():
            contents[move.destination] = contents.get(move.source)
        found = [contents.get(sequence.group_blocks(group).tolist()[0]) for group in range(len(layers))]
        assert found == list(range(len(layers)))
    manager.check()


@pytest.mark.parametrize("num_blocks", [(5, 5), (5, 6), (8, 8)])
def test_a_step_back_copies_in_both_groups_before_either_is_overwritten(num_blocks):
    manager = shared(num_blocks=num_blocks)
    sequence = computed(manager, range(8))
    (fork,) = manager.fork(sequence)
    contents = {}
    for group in range(2):
        for column, block in enumerate(sequence.group_blocks(group).tolist()):
            contents[block] = (group, column)
    manager.rewind(sequence, 1)
    for move in manager.take_moves():
        contents[move.destination] = contents[move.source]
    for group in range(2):
        assert contents[sequence.group_blocks(group).tolist()[3]] == (group, 3)
        assert contents[fork.group_blocks(group).tolist()[3]] == (group, 3)
    manager.check()


def test_states_share_with_attention_whose_blocks_are_as_large():
    manager = shared([AttentionSpec(1, 1, "float16"), state()], block_size=1)
    assert manager.config.pool_of == (0, 0)
    sequence = manager.add_sequence([1, 2, 3])
    for num_computed in (1, 2, 3):
        manager.commit([sequence], num_computed)
        manager.check()
    manager.free(sequence)
    assert hit(manager, [1, 2, 3, 4]) == 3
    assert manager.num_free_blocks == 8


def test_counts_of_each_group_add_up_and_never_fall_below_nothing():
    manager = shared(block_size=1)
    for start in range(0, 100, 10):
        cached(manager, range(start, start + 4))
        for group in manager.stats().groups:
            assert 0 <= group.num_new_blocks <= group.num_allocated_blocks
    groups = manager.stats().groups
    assert [group.num_allocated_blocks for group in groups] == [40, 40]
    assert sum(group.num_new_blocks for group in groups) == 8


@pytest.mark.parametrize("num_tokens", range(3, 14, 2))
def test_a_fork_copies_blocks_of_windows_beyond_the_end_of_a_ring(num_tokens):
    """Whichever ids the blocks have: a ring has no block there that could be the source of another group."""
    manager = shared([sliding(1), chunked(2)], num_blocks=(3, 3), ring=True, partial_reuse=False)
    sequence = computed(manager, [1])
    for _ in range(num_tokens - 1):
        manager.append([sequence], [1])
        manager.commit([sequence])
    (fork,) = manager.fork(sequence)
    manager.check()
    copied = {(move.group, move.source): move.destination for move in manager.take_moves()}
    column = num_tokens // 2
    assert copied[1, sequence.group_blocks(1).item(column)] == fork.group_blocks(1).item(column)
