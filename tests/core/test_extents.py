import sys

import numpy as np
import pytest
from tests.core.small import cached, computed, small

from kvist.core import tree as tree_module
from kvist.core.eviction import EvictionQueue
from kvist.core.pool import BlockPool
from kvist.core.retention import Keep
from kvist.core.tree import PrefixTree


def packed(*tokens):
    return np.array(tokens, np.int32).tobytes()


def tokens_of(extent):
    return np.frombuffer(bytes(extent.tokens), np.int32).tolist()


def tree_of(num_blocks=16, block_size=2):
    return PrefixTree(1, BlockPool(num_blocks), [], block_size, EvictionQueue(last_use), lambda: 0.0, partial=True)


def last_use(extent):
    return extent.last_use


def put(tree, *tokens, namespace=()):
    """Insert tokens below the namespace's root, as an ended sequence does; the deepest extent."""
    root = tree.root(namespace)
    tree.hold(root)
    num_blocks = -(-len(tokens) * 4 // tree.block_bytes)
    blocks = tree.full_pool.take(num_blocks).copy()[None]
    extent, existing = tree.insert(root, packed(*tokens), blocks)
    tree.full_pool.give(blocks[0, :existing])
    tree.release(extent)
    return extent


def find(tree, *tokens, partial=True, namespace=()):
    return tree.find(tree.root(namespace), packed(*tokens), 4 * len(tokens), partial=partial)


def shape(tree, namespace=()):
    """The tree below a root as nested lists of [tokens, children]."""

    def of(extent):
        return [tokens_of(extent), [of(child) for _, child in sorted((extent.children or {}).items())]]

    return [of(child) for _, child in sorted((tree.root(namespace).children or {}).items())]


# -- looking ----------------------------------------------------------------------------------------------------------


def test_a_whole_extent_matches_to_its_end():
    tree = tree_of()
    extent = put(tree, 1, 2, 3, 4)
    match = find(tree, 1, 2, 3, 4, 5)
    assert (match.extent, match.child, match.position, match.num_partial_tokens) == (extent, None, 16, 0)
    assert (match.child or match.extent) is extent


def test_a_match_may_end_inside_an_extent_at_a_block_boundary():
    tree = tree_of()
    extent = put(tree, 1, 2, 3, 4)
    match = find(tree, 1, 2, 9, 9)
    assert (match.extent, match.child, match.child_blocks, match.position) == (tree.root(()), extent, 1, 8)
    assert (match.child or match.extent) is extent
    assert match.num_partial_tokens == 0


def test_a_match_inside_a_block_is_partial_and_names_its_source():
    tree = tree_of()
    extent = put(tree, 1, 2, 3, 4)
    match = find(tree, 1, 2, 3, 9)
    assert (match.child, match.child_blocks, match.source, match.source_block) == (extent, 1, extent, 1)
    assert match.num_partial_tokens == 1
    assert match.position == 8


def test_partial_matches_are_found_only_where_asked_for():
    tree = tree_of()
    put(tree, 1, 2, 3, 4)
    assert find(tree, 1, 2, 3, 9, partial=False).num_partial_tokens == 0
    assert find(tree, 1, 9, partial=False).source is None


def test_the_sibling_that_agrees_longest_is_found_among_few_and_among_many():
    tree = tree_of(num_blocks=64, block_size=4)
    for number in range(2 * tree_module.FEW_CHILDREN):
        for third in (3, 4):
            put(tree, 1, 2, third, 100 + number)
        put(tree, 50 + number, 0, 0, 0)
        match = find(tree, 1, 2, 3, 7)
        assert match.num_partial_tokens == 3
        assert tokens_of(match.source)[:3] == [1, 2, 3]
        assert find(tree, 1, 9, 9, 9).num_partial_tokens == 1
        assert find(tree, 9, 1, 2, 3).num_partial_tokens == 0


def test_the_limit_is_kept_even_where_more_would_match():
    tree = tree_of()
    extent = put(tree, 1, 2, 3, 4)
    match = tree.find(tree.root(()), packed(1, 2, 3, 4), 12, partial=True)
    assert (match.position, match.num_partial_tokens, match.source) == (8, 1, extent)
    match = tree.find(tree.root(()), packed(1, 2, 3, 4), 4, partial=True)
    assert (match.position, match.num_partial_tokens) == (0, 1)
    match = tree.find(tree.root(()), packed(1, 2, 3, 4), 0, partial=True)
    assert (match.position, match.num_partial_tokens) == (0, 0)


def test_a_partly_filled_block_is_no_whole_block():
    tree = tree_of(block_size=4)
    extent = put(tree, 1, 2, 3, 4, 5)
    match = find(tree, 1, 2, 3, 4, 5, 6, 7, 8)
    assert (match.child, match.child_blocks, match.source_block, match.num_partial_tokens) == (extent, 1, 1, 1)
    put(tree, 9)
    match = find(tree, 9)
    assert (match.position, match.num_partial_tokens) == (0, 1)


def test_a_match_goes_on_through_extents_and_ends_inside_the_last():
    tree = tree_of()
    put(tree, 1, 2, 3, 4)
    put(tree, 1, 2, 5, 6, 7, 8)
    match = find(tree, 1, 2, 5, 6, 7, 9)
    assert match.position == 16
    assert match.num_partial_tokens == 1
    assert match.child_blocks == 1
    assert tokens_of(match.extent) == [1, 2]


# -- publishing -------------------------------------------------------------------------------------------------------


def test_equal_beginnings_are_kept_once_and_the_rest_hangs_below_a_split():
    tree = tree_of()
    put(tree, 1, 2, 3, 4)
    put(tree, 1, 2, 5, 6)
    assert shape(tree) == [[[1, 2], [[[3, 4], []], [[5, 6], []]]]]
    assert tree.full_pool.num_free == 13
    assert tree.num_evictable == 3


def test_a_split_keeps_blocks_hits_and_use():
    tree = tree_of()
    lower = put(tree, 1, 2, 3, 4, 5, 6)
    lower.hits, lower.keep = 3, Keep(50, None)
    upper = tree.split(lower, 2)
    assert upper.blocks.tolist() == [[0, 1]]
    assert lower.blocks.tolist() == [[2]]
    assert lower.parent is upper
    assert upper.children == {packed(5, 6): lower}
    for extent in (upper, lower):
        assert (extent.hits, extent.priority, extent.created, extent.last_use) == (3, 50, lower.created, lower.last_use)
    assert tree.split(upper, 2) is upper


def test_a_split_of_what_is_held_keeps_both_parts_held():
    tree = tree_of()
    extent = put(tree, 1, 2, 3, 4)
    tree.hold(extent)
    tree.hold(extent)
    upper = tree.split(extent, 1)
    assert (extent.references, upper.references) == (2, 1)
    tree.release(extent)
    tree.release(extent)
    assert (extent.references, upper.references) == (0, 0)
    assert tree.num_evictable == 2


def test_content_that_is_there_already_is_not_taken():
    tree = tree_of()
    first = put(tree, 1, 2, 3, 4)
    assert put(tree, 1, 2, 3, 4) is first
    assert put(tree, 1, 2, 3) is not first
    assert tree.full_pool.num_free == 14
    assert shape(tree) == [[[1, 2], [[[3, 4], []]]]]


def test_a_longer_partly_filled_block_replaces_a_shorter_one_and_is_replaced_by_a_full_one():
    tree = tree_of(block_size=4)
    put(tree, 1)
    put(tree, 1, 2)
    assert shape(tree) == [[[1, 2], []]]
    put(tree, 1)
    assert shape(tree) == [[[1, 2], []]]
    put(tree, 1, 3)
    assert shape(tree) == [[[1, 2], []], [[1, 3], []]]
    put(tree, 1, 2, 3, 4)
    assert shape(tree) == [[[1, 2, 3, 4], []], [[1, 3], []]]
    assert tree.root(()).num_short_children == 1
    assert tree.full_pool.num_free == 14


def test_a_partly_filled_end_is_replaced_when_its_extent_is_split_for_more():
    tree = tree_of()
    put(tree, 1, 2, 3)
    put(tree, 1, 2, 3, 4, 5)
    assert shape(tree) == [[[1, 2, 3, 4, 5], []]]
    assert tree.full_pool.num_free == 13
    assert find(tree, 1, 2, 3, 4, 5).num_partial_tokens == 1


def test_an_extent_grows_in_place_while_only_one_has_ever_used_it():
    tree = tree_of()
    root = tree.root(())
    tree.hold(root)
    extent, _ = tree.insert(root, packed(1, 2), tree.full_pool.take(1).copy()[None])
    grown, _ = tree.insert(extent, packed(3, 4), tree.full_pool.take(1).copy()[None])
    assert grown is extent
    assert tokens_of(extent) == [1, 2, 3, 4]
    extent.hits = 1
    child, _ = tree.insert(extent, packed(5, 6), tree.full_pool.take(1).copy()[None])
    assert child.parent is extent
    assert tokens_of(child) == [5, 6]
    assert (extent.references, child.references) == (1, 1)


def test_an_extent_held_twice_does_not_grow():
    tree = tree_of()
    root = tree.root(())
    tree.hold(root)
    extent, _ = tree.insert(root, packed(1, 2), tree.full_pool.take(1).copy()[None])
    tree.hold(extent)
    child, _ = tree.insert(extent, packed(3, 4), tree.full_pool.take(1).copy()[None])
    assert child is not extent
    assert (extent.references, child.references) == (2, 1)


def test_unlisted_content_cannot_be_found_and_ends_with_its_last_holder():
    tree = tree_of()
    root = tree.root(())
    tree.hold(root)
    extent = tree.insert_unlisted(root, packed(1, 2, 3, 4), tree.full_pool.take(2).copy()[None])
    tree.hold(extent)
    assert find(tree, 1, 2, 3, 4).position == 0
    assert list(tree.extents()) == []
    tree.release(extent)
    assert tree.full_pool.num_free == 14
    tree.release(extent)
    assert tree.full_pool.num_free == 16
    assert tree.num_evictable == 0
    assert tree.roots == {}


def test_unlisted_content_hangs_below_listed_content_and_does_not_lengthen_it():
    tree = tree_of()
    root = tree.root(())
    tree.hold(root)
    listed, _ = tree.insert(root, packed(1, 2), tree.full_pool.take(1).copy()[None])
    unlisted = tree.insert_unlisted(listed, packed(3, 4), tree.full_pool.take(1).copy()[None])
    assert unlisted.parent is listed
    assert shape(tree) == [[[1, 2], []]]
    tree.release(unlisted)
    assert (tree.full_pool.num_free, tree.num_evictable) == (15, 1)


# -- holding and letting go -------------------------------------------------------------------------------------------


def test_holding_the_deepest_extent_holds_all_above_it():
    tree = tree_of()
    put(tree, 1, 2, 3, 4)
    deepest = put(tree, 1, 2, 5, 6)
    assert tree.num_evictable_on(deepest) == 2
    tree.hold(deepest)
    assert tree.num_evictable == 1
    assert [tokens_of(extent) for extent in tree.queue.candidates()] == [[3, 4]]
    assert tree.num_evictable_on(deepest) == 0
    tree.release(deepest)
    assert tree.num_evictable == 3


def test_path_lists_extents_from_the_first_down():
    tree = tree_of()
    put(tree, 1, 2, 3, 4)
    deepest = put(tree, 1, 2, 5, 6)
    assert [tokens_of(extent) for extent in deepest.path()] == [[1, 2], [5, 6]]
    assert tree.root(()).path() == []


def test_a_root_lives_as_long_as_it_is_held_or_has_content():
    tree = tree_of()
    root = tree.root(("a",))
    tree.hold(root)
    assert list(tree.roots) == [("a",)]
    tree.release(root)
    assert tree.roots == {}
    put(tree, 1, 2, namespace=("a",))
    assert list(tree.roots) == [("a",)]
    tree.evict(tree.full_pool, 1)
    assert tree.roots == {}


def test_dropping_frees_what_is_unreferenced_and_hides_the_rest():
    tree = tree_of()
    held = put(tree, 1, 2, 3, 4)
    put(tree, 1, 2, 5, 6)
    tree.hold(held)
    assert tree.drop(()) == 1
    assert find(tree, 1, 2, 3, 4).position == 0
    assert tree.full_pool.num_free == 14
    tree.release(held)
    assert tree.full_pool.num_free == 16
    assert tree.drop(("unknown",)) == 0


def test_extents_are_listed_parents_first():
    tree = tree_of()
    put(tree, 5, 6)
    put(tree, 1, 2, 3, 4)
    put(tree, 1, 2, 7, 8)
    listed = [tokens_of(extent) for extent in tree.extents()]
    assert sorted(listed) == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert listed.index([1, 2]) < min(listed.index([3, 4]), listed.index([7, 8]))
    ordered = [tokens_of(extent) for extent in tree.root(()).subtree_in_order()]
    assert ordered == [[], [1, 2], [3, 4], [7, 8], [5, 6]]


# -- extremes ---------------------------------------------------------------------------------------------------------


MANY = [1000, pytest.param(100_000, marks=pytest.mark.slow)]


@pytest.mark.parametrize("num", MANY)
def test_any_number_of_siblings_are_found_and_evicted(num):
    tree = tree_of(num_blocks=num)
    for first in range(num):
        put(tree, first, 7)
    for first in (0, 1, num * 7 // 9, num - 1):
        assert find(tree, first, 7).position == 8
        assert find(tree, first, 8).num_partial_tokens == 1
    assert find(tree, num, 7).num_partial_tokens == 0
    assert tree.num_evictable == num
    tree.evict(tree.full_pool, num)
    assert tree.roots == {}
    assert tree.full_pool.num_free == num


@pytest.mark.parametrize("num", MANY)
def test_any_number_of_namespaces_are_kept_apart(num):
    manager = small(block_size=1, num_blocks=num)
    for number in range(num):
        cached(manager, [5], namespace=(number,))
    assert manager.match_prefix([5, 6], namespace=(num - 1,)).num_tokens == 1
    assert manager.match_prefix([5, 6], namespace=(num,)).num_tokens == 0
    assert len(manager._state.tree.roots) == num
    assert manager.drop(namespace=(3,)) == 1
    assert manager.evict(num) == num - 1
    assert not manager._state.tree.roots


@pytest.mark.parametrize("depth", [1200, pytest.param(5000, marks=pytest.mark.slow)])
def test_a_chain_of_thousands_of_extents_needs_no_recursion(depth):
    manager = small(num_blocks=2 * depth, max_sequence_length=2 * depth + 2, partial_reuse=False)
    tokens = [token for number in range(depth) for token in (number, 1)]
    sequence = manager.add_sequence(tokens[:2])
    for number in range(1, depth + 1):
        manager.commit([sequence])
        manager._state.publish_committed()
        sequence._extent.hits = 1  # so that it does not grow
        manager.append([sequence], [tokens[2 * number : 2 * number + 2]])
    assert len(sequence._extent.path()) == depth > sys.getrecursionlimit()
    manager.free(sequence)
    manager.check()
    again = manager.add_sequence([*tokens, 9])
    assert again.num_cached_tokens == 2 * depth
    assert again.tokens.tolist() == [*tokens, 9]
    assert str(manager.explain(again)).count("\n") > depth
    manager.rewind(again, 2 * depth)
    manager.free(again)
    manager.digest()
    assert manager.evict(10) == 10
    assert manager.match_prefix([*tokens, 9]).num_tokens == 2 * (depth - 10)
    assert manager.drop(namespace=()) == depth - 10
    manager.check()


def test_a_deep_chain_is_let_go_without_recursion():
    depth = 20_000
    tree = tree_of(num_blocks=depth, block_size=1)
    root = tree.root(())
    tree.hold(root)
    extent = root
    for number in range(depth):
        extent = tree.insert_unlisted(extent, packed(number), tree.full_pool.take(1).copy()[None])
        extent.hits = 1
    assert len(extent.path()) == depth
    tree.release(extent)
    assert tree.full_pool.num_free == depth


@pytest.mark.parametrize("reset", [True, False])
def test_clearing_cuts_all_links(reset):
    manager = small()
    cached(manager, [1, 2, 3, 4])
    cached(manager, [1, 2, 5, 6])
    extents_then = list(manager._state.tree.extents())
    if reset:
        manager.reset()
    else:
        manager._state.tree.clear()
    assert all(extent.parent is extent.children is None for extent in extents_then)
    assert manager._state.tree.roots == {}


def test_ids_at_the_top_of_their_range_are_told_apart():
    top = 2**31 - 1
    manager = small()
    computed(manager, [top, top, top - 1, top])
    assert manager.match_prefix([top, top, top - 1, top, 0]).num_tokens == 4
    assert manager.match_prefix([top, top, top - 1, top - 1, 0]).num_tokens == 3
    assert manager.match_prefix([top, top, top, top, 0]).num_tokens == 2
    assert manager.match_prefix([top - 1, top]).num_tokens == 0
