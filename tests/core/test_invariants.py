"""Each kind of wrong book is found by `check`, and the one who holds it is named."""

import numpy as np
import pytest
from tests.core.small import cached, computed, small

from kvist import InvariantError
from kvist.core.extents import Extent


def problems(manager):
    """What `check` finds wrong."""
    with pytest.raises(InvariantError) as caught:
        manager.check()
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


def only(manager):
    (problem,) = problems(manager)
    return problem


def cached_extent(manager, tokens):
    cached(manager, tokens)
    (extent,) = manager._state.tree.extents()
    return extent


# -- blocks -----------------------------------------------------------------------------------------------------------


def test_a_lost_block_is_named():
    manager = small()
    manager._state.pools[0].take(1)
    assert only(manager) == "block 0 has 0 owners: it is lost"


def test_a_block_given_back_while_a_sequence_has_it_is_named_with_both():
    manager = small()
    manager.add_sequence([1])
    manager._state.pools[0].give(np.array([0], np.int32))
    assert only(manager) == "block 0 has 2 owners: the free list, <Sequence row 0: 1 tokens, 0 computed, 1 blocks>"


def test_a_block_that_is_cached_and_free_is_named_with_both():
    manager = small()
    cached(manager, [1, 2, 3, 4])
    manager._state.pools[0].give(np.array([1], np.int32))
    problem = only(manager)
    assert problem.startswith("block 1 has 2 owners: the free list, extent of blocks 0 .. 1 of a prefix, ids [0, 1]")


def test_a_block_in_two_rows_is_named_with_both():
    manager = small()
    manager.add_sequence([1])
    manager.add_sequence([2, 3, 4])
    manager._state.rows.block_table[0, 1, 1] = 0
    lost, shared = sorted(problems(manager), key=len)
    assert lost == "block 2 has 0 owners: it is lost"
    assert shared.startswith("block 0 has 2 owners: <Sequence row 0")
    assert "<Sequence row 1" in shared


def test_a_free_block_listed_twice_is_named():
    manager = small(num_blocks=3)
    manager._state.pools[0]._free[-1] = manager._state.pools[0]._free[-2]
    assert sorted(problems(manager)) == [
        "block 1 has 2 owners: the free list, the free list",
        "block 2 has 0 owners: it is lost",
    ]


@pytest.mark.parametrize("block", [8, -1, 2**31 - 1])
def test_a_block_that_does_not_exist_is_named_with_its_holder(block):
    manager = small()
    manager.add_sequence([1])
    manager._state.rows.block_table[0, 0, 0] = block
    assert sorted(problems(manager)) == [
        "block 0 has 0 owners: it is lost",
        f"blocks [{block}] do not exist, held by <Sequence row 0: 1 tokens, 0 computed, 1 blocks>",
    ]


# -- references -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [1, -1])
def test_a_reference_too_many_or_too_few_is_named_with_the_holders(change):
    manager = small()
    sequence, other = computed(manager, [1, 2, 3]), computed(manager, [1, 2, 4])
    manager._state.publish_committed()
    sequence._extent.references += change
    problem = only(manager)
    assert problem.startswith(f"extent of blocks 0 .. 0 of a prefix, ids [0], {2 + change} references: 2 holders found")
    assert repr(sequence) in problem
    assert repr(other) in problem


def test_a_reference_that_nobody_has_is_named():
    manager = small()
    cached_extent(manager, [1, 2]).references = 1
    found = problems(manager)
    assert any("1 references: 0 holders found: no sequence" in problem for problem in found)
    assert any(problem == "1 blocks are counted as evictable, 0 are" for problem in found)


def test_a_lost_reference_of_a_pin_is_found():
    manager = small()
    extent = cached_extent(manager, [1, 2])
    manager.pin(manager.match_prefix([1, 2, 3]))
    extent.references = 0
    assert any("1 holders found: no sequence" in problem for problem in problems(manager))


def test_a_wrong_count_of_evictable_blocks_is_found():
    manager = small()
    cached(manager, [1, 2, 3])
    manager._state.tree.num_evictable = 5
    assert only(manager) == "5 blocks are counted as evictable, 2 are"


# -- extents ----------------------------------------------------------------------------------------------------------


def test_a_child_under_a_wrong_key_is_named():
    manager = small()
    cached_extent(manager, [1, 2]).key = b"wrongkey"
    assert (
        only(manager) == "extent of blocks 0 .. 0 of a prefix, ids [0], 0 references: is not what its parent's key says"
    )


def test_a_child_whose_tokens_have_changed_is_named():
    manager = small()
    extent = cached_extent(manager, [1, 2])
    extent.tokens = bytes(8)
    assert only(manager).endswith("is not what its parent's key says")


def test_a_child_that_points_to_another_parent_is_named():
    manager = small()
    cached(manager, [1, 2, 3, 4])
    cached(manager, [1, 2, 5, 6])
    extent = next(extent for extent in manager._state.tree.extents() if not extent.children)
    extent.parent = manager._state.tree.roots[()]
    assert any(problem.endswith("is not what its parent's key says") for problem in problems(manager))


def test_sorted_keys_that_are_not_the_childrens_are_found():
    manager = small(num_blocks=16)
    for token in range(8):
        cached(manager, [token, 1])
    manager.match_prefix([9, 9, 9])
    root = manager._state.tree.roots[()]
    root.order.remove(next(iter(root.children)))
    assert only(manager).endswith("its sorted keys are not its children's")


def test_a_wrong_count_of_partly_filled_children_is_found():
    manager = small()
    cached(manager, [1])
    manager._state.tree.roots[()].num_short_children = 0
    assert only(manager).endswith("0 children in partly filled blocks are counted")


@pytest.mark.parametrize("kept", [1, 2, 5])
def test_tokens_that_do_not_fill_the_blocks_are_found(kept):
    manager = small()
    extent = cached_extent(manager, [1, 2, 3, 4, 5, 6])
    extent.tokens = (extent.tokens + bytes(8))[: 4 * kept] if kept < 5 else extent.tokens + bytes(4)
    expected = f"{kept if kept < 5 else 7} tokens do not fill its blocks"
    assert any(problem.endswith(expected) for problem in problems(manager))


def test_an_extent_without_blocks_is_found():
    manager = small()
    extent = cached_extent(manager, [1, 2])
    extent.blocks = extent.blocks[:, :0]
    assert any(problem.endswith("tokens do not fill its blocks") for problem in problems(manager))


def test_a_partly_filled_extent_that_is_referenced_is_found():
    manager = small()
    extent = cached_extent(manager, [1, 2, 3])
    manager._state.tree.hold(extent)
    assert any(problem.endswith("is partly filled, and yet referenced or not a leaf") for problem in problems(manager))


def test_a_partly_filled_extent_with_children_is_found():
    manager = small()
    extent = cached_extent(manager, [1, 2, 3])
    child = Extent(extent, bytes(8), bytes(8), manager._state.pools[0].take(1).copy()[None], 1)
    manager._state.tree._link(extent, child)
    assert any(problem.endswith("is partly filled, and yet referenced or not a leaf") for problem in problems(manager))


def test_an_unlisted_extent_that_nobody_holds_is_found():
    manager = small()
    sequence = computed(manager, [1, 2, 3], publish=False)
    manager.fork(sequence)
    sequence._extent.references = 0
    found = problems(manager)
    assert any("unlisted extent of blocks 0 .. 0" in problem and "2 holders found" in problem for problem in found)
    assert any(problem.endswith("is unlisted, and nobody holds it") for problem in found)


# -- the eviction queue -----------------------------------------------------------------------------------------------


def test_a_candidate_missing_from_the_queue_is_named():
    manager = small()
    manager._state.tree.queue.withdraw(cached_extent(manager, [1, 2]))
    assert only(manager).endswith("is 0 times in the eviction queue, not 1")


def test_an_extent_twice_in_the_queue_is_named():
    manager = small()
    extent = cached_extent(manager, [1, 2])
    queue = manager._state.tree.queue
    queue._heap.append(queue._row[0])
    found = problems(manager)
    assert "1 eviction candidates are counted, 2 are queued" in found
    assert any(problem.endswith("is 2 times in the eviction queue, not 1") for problem in found)
    assert extent.ticket


def test_a_held_extent_in_the_queue_is_named():
    manager = small()
    sequence = computed(manager, [1, 2])
    manager._state.publish_committed()
    manager._state.tree.queue.offer(sequence._extent)
    assert only(manager).endswith("is 1 times in the eviction queue, not 0")


def test_an_extent_with_children_in_the_queue_is_named():
    manager = small()
    cached(manager, [1, 2, 3, 4])
    cached(manager, [1, 2, 5, 6])
    manager._state.tree.queue.offer(next(extent for extent in manager._state.tree.extents() if extent.children))
    assert only(manager).endswith("is 1 times in the eviction queue, not 0")


def test_a_wrong_count_of_candidates_is_found():
    manager = small()
    manager._state.tree.queue.num_candidates = 3
    assert only(manager) == "3 eviction candidates are counted, 0 are queued"


# -- rows -------------------------------------------------------------------------------------------------------------


def running(manager):
    return manager.add_sequence([1, 2, 3])


ROW = "<Sequence row 0: 3 tokens, 0 computed, 2 blocks>: "


def test_a_row_in_a_wrong_state_is_found():
    manager = small()
    running(manager)
    manager._state.rows.state[0] = 2
    assert ROW + "its row has another state" in problems(manager)


def test_two_sequences_in_one_row_are_found():
    manager = small()
    sequence, other = running(manager), manager.add_sequence([5])
    other.row = sequence.row
    assert any(problem.endswith("its row has another state") for problem in problems(manager))


@pytest.mark.parametrize("num_computed", [-1, 4])
def test_more_computed_than_there_are_tokens_or_less_than_none_is_found(num_computed):
    manager = small()
    running(manager)
    manager._state.rows.num_computed[0] = num_computed
    assert only(manager).endswith("computed <= tokens <= capacity (4) does not hold")


def test_more_tokens_than_there_is_room_for_are_found():
    manager = small()
    running(manager)
    manager._state.rows.num_tokens[0] = 5
    assert any(problem.endswith("computed <= tokens <= capacity (4) does not hold") for problem in problems(manager))


def test_a_table_that_goes_on_is_found():
    manager = small()
    running(manager)
    manager._state.rows.block_table[0, 0, 5] = 3
    assert only(manager) == ROW + "its table of group 0 has blocks where it should have none"


def test_token_ids_that_were_lost_are_found():
    manager = small()
    sequence = running(manager)
    sequence._earlier = sequence._earlier[:4]
    assert only(manager) == ROW + "1 token ids are kept"


@pytest.mark.parametrize("limit", [3, 5])
def test_a_wrong_limit_for_appends_is_found(limit):
    manager = small()
    running(manager)
    manager._state.rows.limit[0] = limit
    expected = (
        f"may append up to {limit} tokens, its blocks reach to 4 and its tail to {3 + manager._state.rows.tail_tokens}"
    )
    assert only(manager) == ROW + expected


def test_a_published_block_that_is_not_the_trees_is_found():
    manager = small()
    sequence = computed(manager, [1, 2, 3])
    manager._state.publish_committed()
    manager._state.rows.block_table[0, 0, 0] = 5
    assert only(manager) == f"{sequence!r}: its first 1 blocks of group 0 are not those that it shares"


def test_a_waiting_beam_that_does_not_show_its_leaders_blocks_is_found():
    manager = small()
    beam = manager.add_sequence([1, 2, 3], num_beams=2).beams[1]
    manager._state.rows.block_table[0, beam.row, 0] = 5
    assert only(manager) == f"{beam!r}: its first 1 blocks of group 0 are not those that it shares"


def test_a_live_row_marked_free_is_found():
    manager = small()
    running(manager)
    manager._state.rows.state[0] = 0
    assert "row 0 is free, and has a sequence" in problems(manager)


def test_a_lost_row_is_found():
    manager = small()
    running(manager)
    manager._state.rows._free_rows.pop()
    assert only(manager) == "6 rows are free and 1 are live, of 8"


# -- many at once -----------------------------------------------------------------------------------------------------


def test_all_problems_come_at_once_and_too_many_are_only_counted():
    manager = small(num_blocks=50)
    manager._state.pools[0].take(50)
    manager._state.tree.num_evictable = 1
    found = problems(manager)
    assert len(found) == 21
    assert found[0] == "block 0 has 0 owners: it is lost"
    assert found[-1] == "... and 31 more"


def test_a_wrong_count_of_waiting_beams_is_found():
    manager = small()
    manager.add_sequence([1, 2, 3], num_beams=2)
    manager._state.rows.num_waiting = 0
    assert only(manager) == "0 beams are counted as waiting, 1 are"


def test_a_row_that_would_be_published_at_the_wrong_time_is_named():
    manager = small()
    sequence = computed(manager, [1, 2, 3])
    manager._state.rows.publish_due[sequence.row] = 4
    assert only(manager) == f"{sequence!r}: is to be published from 4 computed tokens on, not 2"


def test_a_candidate_that_is_in_no_tree_is_named():
    manager = small()
    stray = Extent(cached_extent(manager, [1, 2, 3, 4]), b"", b"", np.zeros((1, 1), np.int32), 0)
    manager._state.tree.queue.offer(stray)
    assert "waits to be evicted, and is in no tree" in only(manager)


def test_a_row_listed_as_free_twice_is_found():
    manager = small(max_sequences=3)
    manager._state.rows._free_rows[0] = manager._state.rows._free_rows[1]
    assert "rows [1, 1, 0] are listed as free, and [] are live" in problems(manager)


def test_a_root_under_another_namespace_is_named():
    manager = small()
    cached(manager, [1, 2, 3, 4], namespace=("a",))
    manager._state.tree.roots[("b",)] = manager._state.tree.roots.pop(("a",))
    assert only(manager) == "root of namespace ('a',), 0 references: is filed under namespace ('b',)"
