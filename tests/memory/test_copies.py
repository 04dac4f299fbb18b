from random import Random

import pytest

from kvist.core.moves import Move
from kvist.memory.copies import batched

BLOCK_SIZE = 4


def batches(moves, pool_of=(0, 1)):
    return [(c.group, c.num_tokens, c.sources, c.destinations) for c in batched(moves, pool_of, BLOCK_SIZE)]


def test_moves_without_a_hazard_are_copied_together():
    moves = [Move(0, 1, 4), Move(0, 2, 4), Move(3, 4, 4)]
    assert batches(moves) == [(0, 4, [0, 0, 3], [1, 2, 4])]
    assert batches([*moves, Move(4, 5, 2)]) == [(0, 4, [0, 0, 3], [1, 2, 4]), (0, 2, [4], [5])]


def test_a_block_that_is_read_first_may_be_written_by_the_same_copies_but_not_before_by_others():
    assert batches([Move(0, 1, 4), Move(2, 0, 4)]) == [(0, 4, [0, 2], [1, 0])]
    moves = [Move(3, 4, 2), Move(0, 1, 4), Move(2, 0, 2)]
    assert batches(moves) == [(0, 2, [3], [4]), (0, 4, [0], [1]), (0, 2, [2], [0])]


def test_blocks_of_groups_with_pools_of_their_own_are_different_blocks():
    moves = [Move(0, 1, 4), Move(1, 2, 4, group=1), Move(3, 4, 4)]
    assert batches(moves) == [(0, 4, [0, 3], [1, 4]), (1, 4, [1], [2])]
    assert batches(moves, pool_of=(0, 0)) == [(0, 4, [0], [1]), (1, 4, [1], [2]), (0, 4, [3], [4])]


def test_single_tokens_of_many_trees_are_one_copy():
    moves = [
        Move(block, block, 1, source_offset=source, destination_offset=source - 1)
        for block in range(3)
        for source in (2, 3)
    ]
    assert batches(moves) == [(0, None, [2, 3, 6, 7, 10, 11], [1, 2, 5, 6, 9, 10])]


def test_rows_that_do_not_overlap_are_no_hazard_within_one_block():
    assert len(batches([Move(0, 1, 2), Move(1, 2, 2, source_offset=2)])) == 2
    assert batches([Move(0, 1, 2), Move(1, 2, 1, source_offset=2), Move(4, 3, 2)]) == [
        (0, 2, [0, 4], [1, 3]),
        (0, None, [6], [8]),
    ]


@pytest.mark.parametrize("pool_of", [(0, 1), (0, 0)])
def test_batches_give_what_the_moves_give_one_by_one(pool_of):
    for seed in range(2000):
        moves = random_moves(Random(seed))
        found, expected = numbers(), numbers()
        for copies in batched(moves, pool_of, BLOCK_SIZE):
            apply_at_once(copies, found[pool_of[copies.group]])
        for move in moves:
            rows = expected[pool_of[move.group]]
            source, destination = (
                move.source * BLOCK_SIZE + move.source_offset,
                move.destination * BLOCK_SIZE + move.destination_offset,
            )
            rows[destination : destination + move.num_tokens] = rows[source : source + move.num_tokens]
        assert found == expected, moves


def test_equal_ids_of_two_tiers_are_two_blocks_and_copies_are_made_by_direction():
    down, up = {"destination_tier": "host"}, {"source_tier": "host"}
    moves = [Move(0, 1, 4, **down), Move(1, 0, 4, **up), Move(2, 3, 4, **down)]
    found = [(c.source_tier, c.destination_tier, c.sources, c.destinations) for c in batched(moves, [0, 1], BLOCK_SIZE)]
    assert found == [("device", "host", [0], [1]), ("host", "device", [1], [0]), ("device", "host", [2], [3])]
    apart = [Move(0, 1, 4, **down), Move(1, 2, 4), Move(3, 4, 4, **down)]
    assert batches(apart) == [(0, 4, [0, 3], [1, 4]), (0, 4, [1], [2])]


def test_pools_may_be_shared_on_one_tier_and_not_on_the_other():
    moves = [Move(0, 1, 4, destination_tier="host"), Move(1, 3, 4, group=1, source_tier="host")]
    moves += [Move(2, 5, 4, destination_tier="host")]
    for host, sources in (([0, 1], [[0, 2], [1]]), ([0, 0], [[0], [1], [2]])):
        pools = {"device": [0, 0], "host": host}
        assert [copies.sources for copies in batched(moves, pools, BLOCK_SIZE)] == sources


def random_moves(random):
    moves = []
    for _ in range(random.randrange(2, 9)):
        num_tokens = random.randrange(BLOCK_SIZE + 1)
        offsets = [random.choice([0, random.randrange(BLOCK_SIZE - num_tokens + 1)]) for _ in range(2)]
        moves.append(
            Move(
                random.randrange(4),
                random.randrange(4),
                num_tokens,
                group=random.randrange(2),
                source_offset=offsets[0],
                destination_offset=offsets[1],
            )
        )
    return moves


def numbers():
    """Token rows of two pools of four blocks."""
    return [list(range(pool * 100, pool * 100 + 4 * BLOCK_SIZE)) for pool in range(2)]


def apply_at_once(copies, rows):
    """Copy as storage does: read all, then write all, which must not meet."""
    if copies.num_tokens is None:
        sources, destinations = copies.sources, copies.destinations
    else:
        sources, destinations = (
            [block * BLOCK_SIZE + token for block in blocks for token in range(copies.num_tokens)]
            for blocks in (copies.sources, copies.destinations)
        )
    read = [rows[source] for source in sources]
    assert len(set(destinations)) == len(destinations)
    for destination, row in zip(destinations, read, strict=True):
        rows[destination] = row
