"""What stores are to keep: which blocks, when, under which keys, and in what place among the copies."""

import numpy as np
import pytest
from tests.core.layers import FULL, sliding, state
from tests.core.small import cached, computed, ids

from kvist import CacheConfig, HostTier, RemoteTier, Retention
from kvist.core.keeping import KeptBlocks, repeatable_runs
from kvist.core.manager import CacheCore
from kvist.core.moves import BlockMoves, Move

THROUGH, BACK = {"write": "through"}, {"write": "back"}


def keeping(*stores, num_blocks=8, block_size=2, layers=(FULL,), host=None, **settings):
    """A core that orders blocks to be kept, and has nobody to do it."""
    tiers = [RemoteTier(url=f"memory://{number}", **store) for number, store in enumerate(stores)]
    if host is not None:
        tiers.insert(0, HostTier(**host))
    settings = {"max_sequences": 8, "max_sequence_length": 64, "partial_reuse": False, "model": "m"} | settings
    return CacheCore(CacheConfig(list(layers), block_size, num_blocks, tiers=tiers, **settings), lambda: 0.0)


def orders(manager):
    """What was ordered since the last time: kept blocks as (cause, tier, group, blocks), copies as "copies"."""
    manager._state.settle()
    taken, manager._state.moves = manager._state.moves, []
    return [
        (each.cause, each.source_tier, each.group, each.sources.tolist())
        if isinstance(each, KeptBlocks)
        else (f"{each.source_tier} > {each.destination_tier}", each.sources.tolist(), each.destinations.tolist())
        for each in taken
        if isinstance(each, KeptBlocks | BlockMoves)
    ]


def kept(manager):
    """The orders to keep something since the last time."""
    manager._state.settle()
    taken, manager._state.moves = manager._state.moves, []
    return [each for each in taken if isinstance(each, KeptBlocks)]


def keys_of(manager, tokens, namespace=(), group=0):
    """The keys of a prompt's whole blocks."""
    chain = manager._state.keeper.chain
    digests = chain.extend(chain.root(namespace), np.array(tokens, np.int32).tobytes())
    return chain.keys(namespace, digests, group)


# -- on commit --------------------------------------------------------------------------------------------------------


def test_full_blocks_are_kept_when_they_are_published_and_others_are_not():
    manager = keeping(THROUGH)
    sequence = computed(manager, range(5))
    assert orders(manager) == [("committed", "device", 0, ids(sequence)[:2])]
    manager.append([sequence], [[5, 6]])
    manager.commit([sequence])
    assert orders(manager) == [("committed", "device", 0, ids(sequence)[2:3])]
    manager.free(sequence)
    assert orders(manager) == []


def test_keys_are_those_of_the_content():
    manager = keeping(THROUGH)
    computed(manager, range(4), namespace=("a", 1))
    [order] = kept(manager)
    assert order.keys == keys_of(manager, range(4), ("a", 1))


def test_what_was_there_already_is_not_kept_again():
    manager = keeping(THROUGH)
    cached(manager, range(4))
    orders(manager)
    sequence = computed(manager, [*range(4), 7, 8])
    assert orders(manager) == [("committed", "device", 0, ids(sequence)[2:])]
    again = computed(manager, [*range(4), 7, 8], reuse=False)
    assert orders(manager) == []
    manager.free(again)
    assert orders(manager) == []


def test_the_last_blocks_of_a_sequence_are_kept_when_it_ends():
    manager = keeping(THROUGH)
    sequence = manager.add_sequence(range(6))
    manager.commit([sequence], 4)
    assert orders(manager) == [("committed", "device", 0, ids(sequence)[:2])]
    manager._state.rows.computed_of[sequence.row] = 6
    blocks = ids(sequence)
    manager.free(sequence)
    assert orders(manager) == [("committed", "device", 0, blocks[2:])]


def test_what_must_not_be_published_is_not_kept():
    manager = keeping(THROUGH, BACK)
    manager.free(computed(manager, range(6), publish=False))
    assert orders(manager) == []


def test_what_runs_in_a_dropped_namespace_is_not_kept():
    manager = keeping(THROUGH)
    sequence = computed(manager, range(4))
    orders(manager)
    manager.drop(namespace=())
    manager.append([sequence], [[5, 6]])
    manager.commit([sequence])
    assert orders(manager) == []


def test_priority_and_hits_are_told_with_what_is_kept():
    manager = keeping(THROUGH, BACK)
    cached(manager, range(6), retention=Retention([(0, 2, 80, None), (2, 6, 20, None)]))
    assert [(each.priority, len(each.keys)) for each in kept(manager)] == [(80, 1), (20, 2)]
    manager.free(manager.add_sequence([*range(6), 9]), publish=False)
    manager.evict(8)
    assert [(each.priority, each.hits, each.cause) for each in kept(manager)] == [
        (20, 1, "evicted"),
        (80, 1, "evicted"),
    ]


# -- on eviction ------------------------------------------------------------------------------------------------------


def test_nothing_is_kept_at_commit_for_a_store_that_is_written_back():
    manager = keeping(BACK)
    cached(manager, range(6))
    assert orders(manager) == []


def test_evicted_blocks_are_kept_and_only_the_whole_ones():
    manager = keeping(BACK, partial_reuse=True)
    blocks = cached(manager, range(7))
    manager.evict(2)
    assert orders(manager) == [("evicted", "device", 0, blocks[2:3])]
    manager.evict(8)
    assert orders(manager) == [("evicted", "device", 0, blocks[:2])]


def test_blocks_that_a_prompt_takes_are_kept_before_it_has_them():
    manager = keeping(BACK, num_blocks=4)
    blocks = cached(manager, range(8))
    sequence = manager.add_sequence(range(20, 24))
    assert set(ids(sequence)) == set(blocks[2:])
    [order] = kept(manager)
    assert order.keys == keys_of(manager, range(8))[2:]
    assert order.sources.tolist() == blocks[2:]


def test_what_nothing_could_go_on_from_is_not_kept_on_eviction():
    """A prefix that ends where no state was kept is of no use to anybody."""
    manager = keeping(BACK, layers=[FULL, state(4)], num_blocks=[8, 4])
    sequence = computed(manager, range(4))
    manager.append([sequence], [[4, 5, 6, 7]])
    manager.commit([sequence])
    manager.free(sequence)
    kept(manager)
    manager.drop(namespace=())
    assert kept(manager) == []
    manager.check()


def test_dropping_and_reset_keep_nothing():
    manager = keeping(BACK, host={"num_blocks": 8})
    cached(manager, range(8))
    manager.evict(2)
    orders(manager)
    manager.drop(namespace=())
    assert orders(manager) == []
    cached(manager, range(8))
    manager.evict(2)
    orders(manager)
    manager.reset()
    assert orders(manager) == []


# -- with host memory between -----------------------------------------------------------------------------------------


def test_what_goes_to_host_memory_is_kept_only_when_that_evicts_it():
    manager = keeping(BACK, num_blocks=4, host={"num_blocks": 4})
    blocks = cached(manager, range(8))
    manager.evict(4)
    assert orders(manager) == [("device > host", blocks, [0, 1, 2, 3])]
    others = cached(manager, range(20, 24))
    manager.evict(2)
    assert orders(manager) == [("evicted", "host", 0, [2, 3]), ("device > host", others, [2, 3])]


def test_host_memorys_tail_is_kept_under_the_keys_of_its_place_in_the_prefix():
    manager = keeping(BACK, num_blocks=8, host={"num_blocks": 4})
    cached(manager, range(8))
    manager.evict(2)
    kept(manager)
    cached(manager, range(20, 26))
    manager.evict(3)
    [order] = kept(manager)
    assert (order.source_tier, order.keys) == ("host", keys_of(manager, range(8))[3:])


def test_what_host_memory_refuses_is_kept():
    manager = keeping(BACK, num_blocks=4, host={"num_blocks": 4, "min_priority": 50})
    blocks = cached(manager, range(8))
    manager.evict(4)
    assert orders(manager) == [("evicted", "device", 0, blocks)]


def test_the_part_that_host_memory_has_no_room_for_is_kept():
    manager = keeping(BACK, num_blocks=4, host={"num_blocks": 3})
    blocks = cached(manager, range(8))
    manager.evict(4)
    told = orders(manager)
    assert ("evicted", "device", 0, blocks[3:]) in told
    assert ("device > host", blocks[:3], [0, 1, 2]) in told
    assert manager.match_prefix([*range(8), 9]).miss == "evicted"


def test_what_hangs_below_a_refused_block_is_kept_with_it():
    manager = keeping(BACK, num_blocks=4, host={"num_blocks": 4, "min_priority": 30})
    blocks = cached(manager, range(8), retention=Retention([(0, 4, 10, None), (4, 8, 80, None)]))
    manager.evict(2)
    assert orders(manager) == [("device > host", blocks[2:], [0, 1])]
    manager.evict(2)
    found = kept(manager)
    assert sorted((each.source_tier, tuple(each.keys)) for each in found) == [
        ("device", tuple(keys_of(manager, range(8))[:2])),
        ("host", tuple(keys_of(manager, range(8))[2:])),
    ]


def test_content_on_commit_is_kept_whatever_host_memory_does():
    manager = keeping(THROUGH, num_blocks=4, host={"num_blocks": 4})
    blocks = cached(manager, range(8))
    manager.evict(4)
    assert orders(manager) == [("committed", "device", 0, blocks), ("device > host", blocks, [0, 1, 2, 3])]


# -- groups -----------------------------------------------------------------------------------------------------------


def test_every_group_keeps_what_it_has_under_keys_of_its_own():
    manager = keeping(THROUGH, layers=[FULL, sliding(4)], num_blocks=[8, 8])
    sequence = computed(manager, range(8))
    found = kept(manager)
    assert [(each.group, len(each.keys)) for each in found] == [(0, 4), (1, 4)]
    for each in found:
        assert each.keys == keys_of(manager, range(8), group=each.group)
    assert found[1].sources.tolist() == sequence.group_blocks(1).tolist()[:4] or len(found[1].sources) == 4


def test_a_window_that_slides_before_it_is_published_keeps_what_is_left():
    manager = keeping(THROUGH, layers=[FULL, sliding(4)], num_blocks=[16, 16], max_chunk_tokens=4)
    sequence = manager.add_sequence(range(16))
    for end in (4, 8, 12, 16):
        manager.reserve([sequence], 0)
        manager.commit([sequence], end)
        manager._state.settle()
    by_group = {0: 0, 1: 0}
    for each in kept(manager):
        by_group[each.group] += len(each.keys)
        assert set(each.keys) <= set(keys_of(manager, range(16), group=each.group))
    assert by_group[0] == 8
    assert 2 <= by_group[1] <= 8


def test_a_state_is_kept_after_the_block_that_it_follows():
    manager = keeping(THROUGH, layers=[FULL, state(4)], num_blocks=[8, 4])
    sequence = manager.add_sequence(range(8))
    manager.commit([sequence], 4)
    manager.commit([sequence], 8)
    manager.free(sequence)
    of_state = [key for each in kept(manager) if each.group == 1 for key in each.keys]
    assert set(of_state) <= {keys_of(manager, range(8), group=1)[column] for column in (1, 3)}
    assert of_state


@pytest.mark.parametrize("stores", [(), (THROUGH,)])
def test_without_reuse_or_stores_nothing_is_kept(stores):
    manager = keeping(*stores, reuse=not stores)
    cached(manager, range(8))
    assert orders(manager) == []
    assert manager._state.keeper is None


# -- orders that can be made again -------------------------------------------------------------------------------------


def several(*blocks, source="device", destination="host"):
    """Copies of many blocks at once."""
    return BlockMoves(np.array(blocks, np.int32), np.array(blocks, np.int32), 4, 0, source, destination)


@pytest.mark.parametrize(
    ("orders", "lengths"),
    [
        ([Move(0, 1, 4), Move(2, 3, 4)], [2]),
        ([Move(0, 1, 4), Move(2, 0, 4)], [1, 1]),
        ([Move(0, 1, 4), Move(1, 2, 4)], [2]),  # what reads a copy is made again with it
        ([Move(1, 0, 1, 0, "device", "device", 1, 3), Move(2, 1, 1)], [1, 1]),  # the rest of 1 is nobody's afterwards
        ([Move(1, 0, 1, 0, "device", "device", 1, 3), Move(2, 1, 1, 0, "device", "device", 0, 2)], [2]),
        ([Move(1, 0, 1, 0, "device", "device", 1, 3), Move(2, 1, 1, 0, "device", "device", 0, 1)], [1, 1]),
        ([several(0), several(5)], [2]),
        ([several(0), several(5, source="host", destination="device")], [1, 1]),
        ([KeptBlocks([b"k"], np.array([3], np.int32), 0, "device", "evicted", 35, 0), Move(2, 3, 4)], [1, 1]),
        ([Move(2, 3, 4), KeptBlocks([b"k"], np.array([3], np.int32), 0, "device", "evicted", 35, 0)], [2]),
        ([], []),
    ],
)
def test_no_run_of_orders_writes_what_an_earlier_order_in_it_has_read(orders, lengths):
    runs = repeatable_runs(orders)
    assert [len(run) for run in runs] == lengths
    assert [order for run in runs for order in run] == orders
