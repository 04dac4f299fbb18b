import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.edge.models import cache

from kvist.edge import LayerConfig, SlidingPages, SparsePageTable
from kvist.errors import ArgumentError, OutOfBlocks, SequenceError


def windows(window=129, page_size=128, max_batch_size=2, max_pages=16, num_pages=None):
    reserved = SlidingPages(SparsePageTable(1, 1, 1), window, page_size).pages_per_slot
    table = SparsePageTable(max_batch_size, max_pages, num_pages or max_batch_size * reserved)
    return SlidingPages(table, window, page_size)


def columns(pages, slot):
    return [column for column, page in enumerate(pages.table.pages(slot).tolist()) if page >= 0]


def assert_no_page_is_lost_or_twice(pages, admitted):
    held = [page for slot in admitted for page in pages._of(slot)]
    assert sorted([*held, *pages._pool.free_blocks().tolist()]) == list(range(pages.table.num_pages))
    assert all(len(pages._of(slot)) == pages.pages_per_slot for slot in admitted)
    pages.table.check()


def test_E16_a_window_of_129_tokens_has_7_pages_and_keeps_2_of_385_tokens():
    pages = windows()
    assert pages.pages_per_slot == 7
    pages.admit([(0, 385)])
    assert pages.table.pages(0).tolist() == [-1, -1, 0, 1]
    assert pages.num_free_pages == 7


@pytest.mark.parametrize("delay", [0, 1])
def test_E16_a_step_takes_one_page_at_most_and_never_lacks_it(delay):
    """Pages that a window has left come back at once, or a step later, when the device is done with them."""
    pages = windows()
    pages.admit([(0, 385)])
    before = columns(pages, 0)
    for num_tokens in range(385, 1500):
        if not delay:
            pages.complete()
        pages.prepare([(0, num_tokens)])
        after = columns(pages, 0)
        assert after == list(range((num_tokens - 128) // 128, num_tokens // 128 + 1))
        assert len(after) <= 3
        assert len(set(after) - set(before)) <= 1
        assert len(set(before) - set(after)) <= 1
        if delay:
            pages.complete()
        before = after
    assert_no_page_is_lost_or_twice(pages, [0])


def test_a_page_that_a_window_left_waits_until_the_device_is_done():
    pages = windows(window=2, page_size=2, max_batch_size=1)
    assert pages.pages_per_slot == 5
    pages.admit([(0, 2)])
    seen = set()
    for num_tokens in (2, 4, 6):
        pages.prepare([(0, num_tokens)], num_new=2)
        seen |= {page for page in pages.table.pages(0).tolist() if page >= 0}
    assert seen == {0, 1, 2, 3}
    pages.prepare([(0, 8)], num_new=2)
    before = pages.table.host.copy()
    with pytest.raises(OutOfBlocks, match=r"slot 0 needs 1 more pages, but 0 of its own are free, 3 not complete\(\)"):
        pages.prepare([(0, 10)], num_new=2)
    assert (pages.table.host == before).all()
    pages.complete()
    pages.prepare([(0, 10)], num_new=2)
    assert columns(pages, 0) == [4, 5]
    assert_no_page_is_lost_or_twice(pages, [0])


def test_windows_are_admitted_all_or_none():
    few = windows(num_pages=8)
    with pytest.raises(OutOfBlocks, match="2 windows need 14 pages, but 8 are free") as raised:
        few.admit([(0, 3), (1, 3)])
    assert (raised.value.needed, raised.value.free, raised.value.held) == (14, 8, 0)
    assert columns(few, 0) == []


def test_windows_that_cannot_be_are_not_admitted():
    pages = windows(num_pages=15)
    pages.admit([(1, 3)])
    for error, prompts in (
        (SequenceError, [(0, 3), (1, 3)]),
        (ArgumentError, [(0, 3), (0, 4)]),
        (ArgumentError, [(0, 3), (2, 4)]),
        (ArgumentError, [(0, 16 * 128 + 1)]),
        (ArgumentError, [(0, -1)]),
    ):
        with pytest.raises(error):
            pages.admit(prompts)
    assert columns(pages, 0) == []
    assert pages.num_free_pages == 8


def test_only_admitted_slots_take_steps_and_are_released():
    pages = windows()
    pages.admit([(0, 3)])
    for act in (lambda: pages.prepare([(0, 3), (1, 3)]), lambda: pages.release(1)):
        with pytest.raises(SequenceError, match="slot 1 was not admitted"):
            act()
    pages.release(0)
    assert pages.num_free_pages == 14
    assert columns(pages, 0) == []
    with pytest.raises(SequenceError):
        pages.release(0)
    with pytest.raises(ArgumentError, match="window is 0"):
        SlidingPages(pages.table, 0)


def test_reservations_follow_their_rows():
    kept = cache([LayerConfig(1, 4), LayerConfig(1, 4, capacity=5)], max_batch_size=3)
    pages = SlidingPages(kept.sliding_table, window=5, page_size=4)
    pages.admit([(slot, 9) for slot in range(3)])
    kept.lengths.reset([9, 9, 9])
    mapped = pages.table.pages(2).tolist()
    kept.remap([-1, 1, 0], 2)
    pages.compact([-1, 1, 0], 2)
    assert pages.table.pages(0).tolist() == mapped
    assert pages.num_free_pages == pages.pages_per_slot
    assert_no_page_is_lost_or_twice(pages, [0, 1])
    pages.admit([(2, 9)])
    assert_no_page_is_lost_or_twice(pages, [0, 1, 2])


def test_what_a_window_sees_is_what_was_written():
    kept = cache([LayerConfig(1, 4, capacity=5)], max_batch_size=1, max_sequence_length=60)
    pages = SlidingPages(kept.sliding_table, window=5, page_size=4)
    pages.admit([(0, 0)])
    kept.lengths.reset([0])
    for token in range(60):
        pages.prepare([(0, token)])
        new = torch.full((1, 1, 1, 4), float(token), dtype=torch.float16)
        kept.write(0, new, -new)
        kept.lengths.commit(1)
        keys, values = kept.gather(0, token + 1)
        seen = list(range(max(0, token - 4), token + 1))
        assert keys[0, seen, 0, 0].tolist() == seen
        assert (-values[0, seen, 0, 0]).tolist() == seen
        pages.complete()


steps = st.lists(st.tuples(st.sampled_from(["admit", "step", "complete", "release"]), st.integers(0, 2)), max_size=60)


@given(steps, st.integers(1, 9), st.sampled_from([1, 2, 4]))
def test_no_history_loses_a_page_or_gives_it_twice(history, window, page_size):
    pages, lengths = windows(window, page_size, max_batch_size=3, max_pages=80), {}
    for act, slot in history:
        if act == "admit" and slot not in lengths:
            pages.admit([(slot, 5 * slot)])
            lengths[slot] = 5 * slot
        elif act == "step" and lengths:
            pages.complete()
            pages.prepare(list(lengths.items()))
            lengths = {each: length + 1 for each, length in lengths.items()}
            for each, length in lengths.items():
                first = max(0, length - window)
                assert columns(pages, each) == list(range(first // page_size, (length - 1) // page_size + 1))
        elif act == "complete":
            pages.complete()
        elif act == "release" and slot in lengths:
            pages.release(slot)
            del lengths[slot]
        assert_no_page_is_lost_or_twice(pages, lengths)
