import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.edge.models import PAIRS, alike, cache, contents, fill, owned_pools, planes, state_planes

from kvist.edge import LayerConfig
from kvist.edge.mappings import survivors_of
from kvist.errors import ArgumentError, LayoutError


def running(*lengths, **settings):
    kept = cache(num_recurrent=1, **settings)
    fill(kept)
    kept.lengths.reset(list(lengths))
    return kept


def slot_views(kept):
    return [kept.kv.strided_slots(layer) for layer in kept.kv.owners]


def test_E8_rows_1_and_3_of_4_go_on_as_rows_0_and_1():
    kept = running(11, 12, 13, 14)
    before, states = [slots.clone() for slots in slot_views(kept)], [plane.clone() for plane in state_planes(kept)]
    kept.compact([-1, 0, -1, 1], 2)
    assert kept.lengths.tensor.tolist() == [12, 14]
    for slots, old in zip(slot_views(kept), before, strict=True):
        assert torch.equal(slots[:, 0, :12], old[:, 1, :12])
        assert torch.equal(slots[:, 1, :14], old[:, 3, :14])
    for plane, old in zip(state_planes(kept), states, strict=True):
        assert torch.equal(plane[:2], old[[1, 3]])
        assert torch.equal(plane[2:], old[2:])


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
@pytest.mark.parametrize("num_pages", [0, 70])
def test_E8_behind_5_and_20_live_tokens_the_tail_is_untouched(dtype, num_pages):
    kept = running(0, 0, 5, 20, dtype=dtype, num_pages=num_pages)
    expected = contents(kept)
    for pool in expected[:2]:
        slots = pool[:, :64].view(torch.uint8).unflatten(1, (8, 8)).flatten(2, 3)
        slots[:, 0, :5] = slots[:, 2, :5]
        slots[:, 1, :20] = slots[:, 3, :20]
        pool[:, :64].view(torch.uint8).copy_(slots.unflatten(2, (8, 4)).flatten(1, 2))
    kept.compact(torch.tensor([-1, -1, 0, 1], dtype=torch.int32), 2)
    assert alike(owned_pools(kept), expected[:2])


@pytest.mark.parametrize(
    ("mapping", "num_new"),
    [
        ([1, 0, -1, -1], 2),
        ([-1, 2, 0, 1], 3),
        ([0, 0, -1, -1], 1),
        ([0, 1], 2),
        ([0, 1, 2, 3, -1], 4),
        ([0, -1, 2, 1], 2),
    ],
)
def test_a_mapping_that_is_none_or_changes_the_order_moves_nothing(mapping, num_new):
    kept = running(1, 2, 3, 4)
    before = contents(kept)
    with pytest.raises(ArgumentError):
        kept.compact(mapping, num_new)
    assert alike(planes(kept), before)
    assert kept.lengths.tensor.tolist() == [1, 2, 3, 4]


def test_contents_are_moved_only_between_slots_of_an_identity_table():
    kept = running(1, 2)
    kept.page_table.set_row(0, [5])
    before = contents(kept)
    with pytest.raises(LayoutError, match=r"the page table is not identity; use remap\(\)"):
        kept.compact([-1, 0], 1)
    windowed = cache([LayerConfig(1, 4), LayerConfig(1, 4, capacity=5)])
    windowed.lengths.reset([1, 2])
    with pytest.raises(LayoutError, match="windows have no slots"):
        windowed.compact([-1, 0], 1)
    assert alike(planes(kept), before)


def test_remapping_takes_any_order_and_copies_no_k_and_v():
    kept = running(11, 12, 13, 14)
    before, states = [pool.clone() for pool in owned_pools(kept)], [plane.clone() for plane in state_planes(kept)]
    rows = kept.page_table.host.copy()
    kept.remap([1, -1, -1, 0], 2)
    assert alike(owned_pools(kept), before)
    assert (kept.page_table.host[:2] == rows[[3, 0]]).all()
    assert (kept.page_table.host[2:] == -1).all()
    assert kept.lengths.tensor.tolist() == [14, 11]
    for plane, old in zip(state_planes(kept), states, strict=True):
        assert torch.equal(plane[:2], old[[3, 0]])


def test_remapping_takes_the_table_of_windows_along():
    kept = cache([LayerConfig(1, 4), LayerConfig(1, 4, capacity=5)])
    kept.lengths.reset([9, 9])
    kept.sliding_table.set_entry(1, 2, 3)
    kept.remap([-1, 0], 1)
    assert kept.sliding_table.pages(0).tolist() == [-1, -1, 3]
    assert kept.sliding_table.pages(1).tolist() == []


def test_what_a_batch_does_not_have_is_not_remapped():
    kept = running(1, 2)
    rows = kept.page_table.host.copy()
    for mapping, num_new in (([0, 1, 2], 3), ([0], 1), ([0, 0], 1)):
        with pytest.raises(ArgumentError):
            kept.remap(mapping, num_new)
    assert (kept.page_table.host == rows).all()


def test_lengths_are_exchanged_where_there_are_no_states():
    kept = cache()
    kept.lengths.reset([3, 4])
    kept.swap(0, 1)
    assert kept.lengths.tensor.tolist() == [4, 3]
    with pytest.raises(LayoutError, match="states of 1 recurrent layers are not exchanged"):
        running(3, 4).swap(0, 1)


def test_a_cleared_slot_has_no_tokens_and_no_state():
    kept = running(3, 4)
    before = [pool.clone() for pool in owned_pools(kept)]
    kept.clear(1)
    assert kept.lengths.tensor.tolist() == [3, 0]
    assert all(not plane[1].any() and plane[0].any() for plane in state_planes(kept))
    assert alike(owned_pools(kept), before)


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.integers(0, 32), min_size=1, max_size=8))
    survives = draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    return lengths, [sum(survives[:row]) if goes_on else -1 for row, goes_on in enumerate(survives)]


@given(batches())
def test_compaction_is_that_of_lists_of_tokens(batch):
    lengths, mapping = batch
    kept = running(*lengths)
    model = [[slots[:, row, :length].clone() for row, length in enumerate(lengths)] for slots in slot_views(kept)]
    untouched = [slots.clone() for slots in slot_views(kept)]
    survivors = [row for row, new in enumerate(mapping) if new >= 0]
    kept.compact(mapping, len(survivors))
    assert kept.lengths.tensor.tolist() == [lengths[row] for row in survivors]
    for slots, old, before in zip(slot_views(kept), model, untouched, strict=True):
        for new, row in enumerate(survivors):
            assert torch.equal(slots[:, new, : lengths[row]], old[row])
            assert torch.equal(slots[:, new, lengths[row] :], before[:, new, lengths[row] :])
        assert torch.equal(slots[:, len(survivors) :], before[:, len(survivors) :])


@given(batches(), st.randoms())
def test_remapping_and_a_copy_of_contents_show_the_same_tokens(batch, random):
    lengths, mapping = batch
    survivors = [row for row, new in enumerate(mapping) if new >= 0]
    order = random.sample(range(len(survivors)), len(survivors))
    shuffled = [order[new] if new >= 0 else -1 for new in mapping]
    kept = running(*lengths)
    before = [[part[:, : max(lengths)] for part in kept.gather(layer, 32)] for layer in range(len(PAIRS))]
    kept.remap(shuffled, len(survivors))
    for layer, parts in enumerate(before):
        for part, old in zip(kept.gather(layer, 32), parts, strict=True):
            for row, new in enumerate(shuffled):
                assert new < 0 or torch.equal(part[new, : lengths[row]], old[row, : lengths[row]])


def test_survivors_say_who_moves():
    assert survivors_of([0, -1, 1, -1], 2, 4).moved == [(2, 1)]
    assert survivors_of([], 0, 4).moved == []
    assert survivors_of([1, 0], 2, 4).sources == (1, 0)
    with pytest.raises(ArgumentError, match="out of order"):
        survivors_of([1, 0], 2, 4).require_order()
