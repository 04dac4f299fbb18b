"""Arithmetic of pages: how many a sequence, a batch and a window take, and which of them a window still needs."""

__all__ = [
    "MAX_POOL_PAGES",
    "SLIDING_HEADROOM_PAGES",
    "SLIDING_REPLACEMENT_PAGES",
    "TOKENS_PER_PAGE",
    "UNUSED_PAGE",
    "max_capacity",
    "minimum_pool_pages",
    "minimum_sliding_pages",
    "padded_capacity",
    "pages_per_sequence",
    "pages_per_slot",
    "retained_pages",
    "sliding_pages_per_slot",
]

MAX_INT32 = 2**31 - 1

TOKENS_PER_PAGE = 128
"""Tokens of a page, unless configured otherwise; `kTOKENS_PER_PAGE`."""

UNUSED_PAGE = -1
"""What a page table holds where no page is mapped; `kUNUSED_PAGE_ENTRY`."""

MAX_POOL_PAGES = MAX_INT32 // 2
"""Most pages of a pool: ids of V pages are those of K plus `num_pages`, and are int32 too; `kMAX_KV_POOL_PAGES`."""

SLIDING_HEADROOM_PAGES = 1
"""Pages of a window beyond its own, since it seldom begins where a page does; `kSWA_BOUNDARY_HEADROOM_PAGES`."""

SLIDING_REPLACEMENT_PAGES = 1
"""Pages of a window for what a step writes while those it retires are still being read; `kSWA_REPLACEMENT_PAGES`."""


def max_capacity(page_size: int = TOKENS_PER_PAGE) -> int:
    """Return the most tokens a sequence may have, still int32 when rounded up to pages; `kMAX_KV_CACHE_CAPACITY`.

    >>> max_capacity()
    2147483520
    """
    return MAX_INT32 // page_size * page_size


def pages_per_sequence(capacity: int, page_size: int = TOKENS_PER_PAGE) -> int:
    """Return the pages that `capacity` tokens begin; `computeMaxPagesPerSeq`.

    >>> pages_per_sequence(200)
    2
    """
    return -(-capacity // page_size)


def padded_capacity(capacity: int, page_size: int = TOKENS_PER_PAGE) -> int:
    """Return `capacity` tokens rounded up to whole pages.

    >>> padded_capacity(200)
    256
    """
    return pages_per_sequence(capacity, page_size) * page_size


def pages_per_slot(capacity: int, page_size: int = TOKENS_PER_PAGE) -> int:
    """Return the pages that `capacity` tokens fill, a padded capacity all of its pages; `pagesPerSlot`.

    >>> pages_per_slot(256)
    2
    """
    return capacity // page_size


def minimum_pool_pages(max_batch_size: int, capacity: int, page_size: int = TOKENS_PER_PAGE) -> int:
    """Return the pages that a full batch of full sequences takes; `computeMinimumKvPoolPages`.

    >>> minimum_pool_pages(3, 130)
    6
    """
    return max_batch_size * pages_per_sequence(capacity, page_size)


def sliding_pages_per_slot(
    window: int, page_size: int = TOKENS_PER_PAGE, replacement_pages: int = SLIDING_REPLACEMENT_PAGES
) -> int:
    """Return the pages reserved for a sequence that keeps a window of tokens; `computeSwaPrivatePagesPerSlot`.

    A window is rounded up to pages and has one more where it begins inside one. That is taken twice, for the pages of a
    prompt and those that decoding goes on to, and once more are the pages that replace retired ones.

    >>> sliding_pages_per_slot(129)
    7
    """
    return 2 * (pages_per_sequence(window, page_size) + SLIDING_HEADROOM_PAGES) + replacement_pages


def minimum_sliding_pages(max_batch_size: int, window: int, page_size: int = TOKENS_PER_PAGE) -> int:
    """Return the pages reserved for a full batch of windows; `computeMinimumSwaPoolPages`.

    >>> minimum_sliding_pages(4, 129)
    28
    """
    return max_batch_size * sliding_pages_per_slot(window, page_size)


def retained_pages(num_tokens: int, window: int, page_size: int = TOKENS_PER_PAGE) -> range:
    """Return the pages of a sequence, counted from its start, that hold any of its last `window` tokens.

    385 tokens in pages of 128, of which the last 129 are kept::

        page      0         1         2         3
        token  |0     127|128   255|256   383|384    |
        kept                        [256       384]

    >>> retained_pages(385, window=129)
    range(2, 4)
    """
    return range(max(0, num_tokens - window) // page_size, pages_per_sequence(num_tokens, page_size))
