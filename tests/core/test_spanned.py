"""What of the past a group needs, how far a prefix reaches in it, and which of its blocks matter least."""

import numpy as np
import pytest
from tests.core.layers import FULL, chunked, grouped, lose, sliding, state
from tests.core.small import cached, computed

from kvist.core.extents import Extent, Root
from kvist.core.groups import Span, spans_of
from kvist.core.pool import BlockPool
from kvist.core.spanned import SpannedGroup

# -- spans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("window", [1, 2, 3, 5, 8])
def test_the_first_block_of_a_window_holds_the_first_token_that_the_next_one_sees(window, block_size):
    span = Span("sliding", block_size, window=window)
    for num_computed in range(20):
        seen = [token for token in range(num_computed + 1) if token > num_computed - window]
        assert span.first_block(num_computed) == seen[0] // block_size


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 6])
def test_the_first_block_of_a_chunk_holds_its_first_token(chunk_tokens, block_size):
    span = Span("chunked", block_size, chunk_tokens=chunk_tokens)
    for num_computed in range(20):
        seen = [token for token in range(num_computed + 1) if token // chunk_tokens == num_computed // chunk_tokens]
        assert span.first_block(num_computed) == seen[0] // block_size


def test_a_state_needs_the_block_of_its_last_token_and_full_attention_all():
    assert [Span("state", 4).first_block(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]
    assert [Span("full", 4).first_block(n) for n in (0, 5, 100)] == [0, 0, 0]


@pytest.mark.parametrize(
    "span",
    [Span("full", 2), Span("sliding", 2, window=5), Span("chunked", 4, chunk_tokens=6)],
    ids=lambda span: span.kind,
)
def test_spans_of_many_sequences_are_those_of_each(span):
    computed_tokens = np.arange(30)
    assert span.first_blocks(computed_tokens).tolist() == [span.first_block(int(n)) for n in computed_tokens]


def test_sinks_fill_whole_blocks_and_only_windows_and_chunks_slide():
    spans = spans_of(grouped([FULL, sliding(8, 5), chunked(8), state(8)]).config)
    assert [(span.kind, span.num_sink_blocks, span.slides) for span in spans] == [
        ("full", 0, False),
        ("sliding", 2, True),
        ("chunked", 0, True),
        ("state", 0, False),
    ]
    assert spans[3].checkpoint_blocks == 2


@pytest.mark.parametrize("layer", [sliding(1), sliding(7), sliding(8), chunked(6), chunked(16)])
def test_no_more_blocks_are_in_span_than_the_bound_says(layer):
    [span] = spans_of(grouped([layer]).config)
    for num_blocks in range(1, 12):
        first = span.first_block(num_blocks * span.block_size)
        assert num_blocks - first <= span.num_most_blocks


# -- how far a prefix reaches -----------------------------------------------------------------------------------------


def path(*columns):
    """Extents of one group below one another, each of the blocks given, in blocks of 2 tokens; -1 are holes."""
    extent: Extent = Root((), 1)
    for blocks in columns:
        tokens = np.arange(2 * len(blocks), dtype=np.int32).tobytes()
        parent, extent = extent, Extent(extent, tokens[:8], tokens, np.array([blocks], np.int32), 1)
        extent.has_holes = -1 in blocks
        parent.children = {extent.key: extent}
    return extent


def group_of(span):
    return SpannedGroup(0, span, BlockPool(16), np.zeros(16, np.int32))


@pytest.mark.parametrize(
    ("columns", "reached"),
    [
        ([[0, 1, 2, 3]], 4),
        ([[-1, -1, 2, 3]], 4),
        ([[0, 1, -1, 3]], 2),
        ([[0, 1], [2, 3]], 4),
        ([[0, 1], [-1, 3]], 2),
        ([[0, 1], [2, -1]], 3),
        ([[-1, -1], [-1, 3]], 0),
        ([[0], [-1], [2], [3]], 4),
        ([[0], [-1], [-1], [3]], 1),
    ],
)
def test_a_window_of_four_tokens_reaches_the_last_place_with_two_blocks_before_it(columns, reached):
    assert group_of(Span("sliding", 2, window=4)).reach(path(*columns), 4) == reached


@pytest.mark.parametrize(
    ("columns", "end", "reached"),
    [([[0, 1, 2, 3]], 4, 4), ([[-1, 1, 2, 3]], 4, 0), ([[0, -1, 2, 3]], 4, 4), ([[-1], [1, 2, 3]], 4, 0)],
)
def test_without_its_sinks_a_window_reaches_nothing(columns, end, reached):
    assert group_of(Span("sliding", 2, window=4, num_sink_blocks=1)).reach(path(*columns), end) == reached


@pytest.mark.parametrize(
    ("columns", "end", "reached"),
    [([[-1, 1, -1]], 3, 2), ([[-1, 1], [-1]], 3, 2), ([[-1], [-1, 2]], 3, 3), ([[-1]], 1, 0)],
)
def test_a_state_reaches_the_last_checkpoint(columns, end, reached):
    assert group_of(Span("state", 2)).reach(path(*columns), end) == reached


@pytest.mark.parametrize(
    ("columns", "end", "reached"), [([[-1, -1, 2]], 3, 3), ([[-1, -1, 2]], 2, 2), ([[0, -1, 2]], 2, 2)]
)
def test_a_chunk_that_has_just_begun_needs_nothing(columns, end, reached):
    """Chunks of 4 tokens are 2 blocks: after the second one the next token sees none of them."""
    assert group_of(Span("chunked", 2, chunk_tokens=4)).reach(path(*columns), end) == reached


def test_a_window_of_one_token_reaches_everything():
    assert group_of(Span("sliding", 2, window=1)).reach(path([-1, -1, -1]), 3) == 3


# -- references -------------------------------------------------------------------------------------------------------


def test_a_block_is_evictable_again_with_the_end_of_its_last_hold():
    group = group_of(Span("sliding", 2, window=4))
    group.num_evictable = 3
    group.retain(np.array([0, 1], np.int32))
    group.retain(np.array([1, 2], np.int32))
    assert (group.num_evictable, group.references[:3].tolist()) == (0, [1, 2, 1])
    assert group.num_unheld(np.array([0, 1, 5], np.int32)) == 1
    group.relinquish(np.array([0, 1], np.int32))
    assert group.num_evictable == 1
    group.relinquish_each(np.array([2, 1], np.int32))
    assert (group.num_evictable, group.references.any()) == (3, False)


def test_holds_of_several_rows_on_one_block_end_at_once():
    group = group_of(Span("sliding", 2, window=4))
    for _ in range(3):
        group.retain(np.array([4], np.int32))
    group.relinquish_each(np.array([4, 4], np.int32))
    assert group.references[4] == 1
    group.relinquish_each(np.array([4], np.int32))
    assert group.references[4] == 0


# -- which blocks go first --------------------------------------------------------------------------------------------


def evicted(manager, num_blocks):
    """Let the first group that is short lose so many blocks; which columns of the only extent have lost theirs."""
    [group] = manager._state.spanned
    manager.stats()
    assert group.take_spare(num_blocks, "made room") <= num_blocks
    [extent] = manager._state.tree.extents()
    return np.flatnonzero(extent.blocks[group.index] < 0).tolist()


def test_blocks_in_span_at_the_end_and_at_the_middle_of_an_extent_are_not_spare():
    manager = grouped([FULL, sliding(4)], block_size=2, partial_reuse=True)
    cached(manager, range(20))
    lost = evicted(manager, 20)
    assert lost
    for kept in (8, 9, 3, 4):
        assert kept not in lost
    manager.check()


def test_sinks_are_not_spare():
    manager = grouped([sliding(2, 4)], block_size=2)
    cached(manager, range(20))
    assert min(evicted(manager, 20)) == 2


def test_no_more_spare_blocks_go_than_are_wanted_and_the_first_go_first():
    manager = grouped([sliding(2)], block_size=2)
    cached(manager, range(20))
    assert evicted(manager, 1) == [0]
    assert evicted(manager, 2) == [0, 1, 2]


def test_blocks_that_somebody_has_in_span_are_not_spare():
    manager = grouped([sliding(6)], block_size=2)
    cached(manager, range(20))
    running = manager.add_sequence([*range(8), 99])
    held = running.group_blocks(0)[1:4].tolist()
    [group] = manager._state.spanned
    group.take_spare(100, "made room")
    left = {block for extent in manager._state.tree.extents() for block in extent.blocks[0].tolist()}
    assert set(held) <= left
    manager.check()


def test_what_matters_least_goes_by_priority_then_by_last_use():
    manager = grouped([sliding(2)], block_size=2)
    for start in (0, 100, 200):
        cached(manager, range(start, start + 12))
    manager.free(manager.add_sequence([*range(12), 99]))
    [group] = manager._state.spanned
    group.take_spare(1, "made room")
    holes = {int(np.frombuffer(extent.tokens, np.int32)[0]): (extent.blocks < 0).any() for extent in _extents(manager)}
    assert holes == {0: False, 100: True, 200: False}


def _extents(manager):
    return [extent for extent in manager._state.tree.extents() if extent.start == 0]


def test_under_pressure_spare_blocks_go_before_whole_positions():
    manager = grouped([FULL, sliding(4)], block_size=2, num_blocks=[32, 12])
    cached(manager, range(20))
    computed(manager, range(100, 108))
    assert manager.match_prefix([*range(20), 99]).num_tokens == 20
    assert manager.stats().evictions["made room"] == 2


def test_a_hole_in_the_middle_is_filled_by_the_next_one_who_computes_it():
    manager = grouped([FULL, sliding(4)], block_size=2)
    blocks = cached(manager, range(12))
    lose(manager, 1, 3)
    assert manager.match_prefix([*range(8), 99]).num_tokens == 6
    again = computed(manager, [*range(8), 99])
    manager.stats()
    assert again.num_cached_tokens == 6
    assert again.group_blocks(0)[:4].tolist() == blocks[:4]
    manager.free(again)
    assert manager.match_prefix([*range(8), 98]).num_tokens == 8
    manager.check()
