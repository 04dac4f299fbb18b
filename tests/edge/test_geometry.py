import pytest

from kvist.edge.geometry import (
    MAX_POOL_PAGES,
    TOKENS_PER_PAGE,
    UNUSED_PAGE,
    max_capacity,
    minimum_pool_pages,
    minimum_sliding_pages,
    padded_capacity,
    pages_per_sequence,
    pages_per_slot,
    retained_pages,
    sliding_pages_per_slot,
)


def test_the_constants_of_edge_llm():
    assert (TOKENS_PER_PAGE, UNUSED_PAGE) == (128, -1)
    assert MAX_POOL_PAGES == 1073741823
    assert max_capacity() == 2147483520
    assert 2 * MAX_POOL_PAGES <= 2**31 - 1
    assert padded_capacity(max_capacity()) == max_capacity()


def test_a_capacity_is_rounded_up_to_pages():
    assert [pages_per_sequence(capacity) for capacity in (1, 128, 129, 2**31 - 1)] == [1, 1, 2, 16777216]
    assert [pages_per_slot(capacity) for capacity in (0, 127, 128, 256)] == [0, 0, 1, 2]
    assert minimum_pool_pages(4, 129) == 8
    assert minimum_pool_pages(2**31 - 1, max_capacity()) == (2**31 - 1) * 16777215


def test_E16_a_window_of_129_tokens_has_7_pages_reserved():
    assert sliding_pages_per_slot(129, page_size=128, replacement_pages=1) == 2 * (2 + 1) + 1 == 7
    assert minimum_sliding_pages(3, 129) == 21


def test_E16_of_385_tokens_a_window_of_129_keeps_pages_2_and_3():
    assert (385 - 129) // 128 == 2
    assert retained_pages(385, window=129) == range(2, 4)


@pytest.mark.parametrize(("window", "page_size"), [(129, 128), (128, 128), (5, 4), (8, 4), (1, 4)])
def test_E16_a_step_needs_at_most_one_new_page_and_retires_at_most_one(window, page_size):
    before = retained_pages(0, window, page_size)
    for num_tokens in range(1, 6 * window):
        after = retained_pages(num_tokens, window, page_size)
        kept = range(max(0, num_tokens - window), num_tokens)
        assert set(after) == {token // page_size for token in kept}
        assert len(after) <= pages_per_sequence(window, page_size) + 1
        assert len(set(after) - set(before)) <= 1
        assert len(set(before) - set(after)) <= 1
        before = after
