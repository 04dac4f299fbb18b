"""Pages of sliding windows: each sequence has its own, and what a window has left waits until the device is done."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from kvist.core.arguments import as_count
from kvist.core.pool import BlockPool
from kvist.edge.geometry import TOKENS_PER_PAGE, UNUSED_PAGE, pages_per_sequence, retained_pages, sliding_pages_per_slot
from kvist.edge.mappings import check_slot, survivors_of
from kvist.edge.page_table import SparsePageTable
from kvist.errors import ArgumentError, OutOfBlocks, SequenceError

__all__ = ["SlidingPages"]


class SlidingPages:
    """Gives the slots of a sparse page table their pages, step by step; Edge-LLM's `BoundedSwaKVPageManager`.

    A slot that is admitted has `pages_per_slot` pages reserved, enough for a window wherever it begins, so that no step
    of it can lack one. `prepare` maps what the next tokens are written to and unmaps what their window has left; those
    pages may still be read by steps under way, and are used again after `complete`. Whoever remaps the table's rows
    with `HybridCache.remap` calls `compact` with the same mapping.

    >>> pages = SlidingPages(SparsePageTable(max_batch_size=2, max_pages=8, num_pages=14), window=129)
    >>> pages.admit([(0, 385)])
    >>> pages.table.pages(0).tolist(), pages.num_free_pages
    ([-1, -1, 0, 1], 7)
    """

    def __init__(self, table: SparsePageTable, window: int, page_size: int = TOKENS_PER_PAGE) -> None:
        if as_count(window, "window") == 0:
            raise ArgumentError("window is 0, must be positive")
        self.table, self.window, self.page_size = table, window, page_size
        self._pool = BlockPool(table.num_pages)
        self._spare: dict[int, list[int]] = {}
        self._leased: dict[int, list[int]] = {}

    @property
    def pages_per_slot(self) -> int:
        """Pages reserved for each slot."""
        return sliding_pages_per_slot(self.window, self.page_size)

    @property
    def num_free_pages(self) -> int:
        """Pages that are reserved for no slot."""
        return self._pool.num_free

    def admit(self, prompts: Sequence[tuple[int, int]]) -> None:
        """Reserve pages for slots, and map those that the windows of prompts of so many tokens need; all or none.

        `prompts` are pairs of a slot and its tokens. Raises `OutOfBlocks` where pages are short, `SequenceError` for a
        slot that has pages, `ArgumentError` for one that there is not, or that is named twice, or for too many tokens.
        """
        self._check(prompts, num_new=0)
        taken = [slot for slot, _ in prompts if slot in self._spare]
        if taken:
            raise SequenceError(f"slots {taken} are admitted already: release them first")
        needed, free = len(prompts) * self.pages_per_slot, self.num_free_pages
        if needed > free:
            raise self._short(f"{len(prompts)} windows need {needed} pages, but {free} are free", needed, free)
        for slot, num_tokens in prompts:
            self._spare[slot], self._leased[slot] = self._pool.take(self.pages_per_slot).tolist()[::-1], []
            self._map(slot, retained_pages(num_tokens, self.window, self.page_size))

    def prepare(self, lengths: Sequence[tuple[int, int]], num_new: int = 1) -> None:
        """Map what the next `num_new` tokens of slots are written to, and unmap what none of them sees; all or none.

        `lengths` are pairs of a slot and the tokens that it has. Raises `OutOfBlocks` where a slot's reservation is too
        small for that many tokens, or waits for `complete`; `SequenceError` for a slot that was not admitted.
        """
        self._check(lengths, as_count(num_new, "num_new"))
        live = {slot: self._live(num_tokens, num_new) for slot, num_tokens in lengths}
        for slot, columns in live.items():
            needed, spare = len(set(columns) - set(self._mapped(slot))), len(self._spare_of(slot))
            if needed > spare:
                leased = len(self._leased[slot])
                says = (
                    f"slot {slot} needs {needed} more pages, but {spare} of its own are free, {leased} not complete()"
                )
                raise self._short(says, needed, spare)
        for slot, columns in live.items():
            self._map(slot, columns)

    def complete(self) -> None:
        """Use pages again that were unmapped so far: the device has done all that was prepared before."""
        for slot, pages in self._leased.items():
            self._spare[slot] += pages
            self._leased[slot] = []

    def release(self, slot: int) -> None:
        """Give all pages of a slot back, when the device is done with it.

        Raises `SequenceError` for a slot that was not admitted.
        """
        pages = self._spare_of(slot) + self._leased[slot] + [int(page) for page in self._mapped(slot).values()]
        self.table.set_row(slot, [])
        self._pool.give(np.array(sorted(pages), np.int32))
        del self._spare[slot], self._leased[slot]

    def compact(self, old_to_new: ArrayLike | Tensor, num_new: int) -> None:
        """Follow `HybridCache.remap`: reservations go where their rows went, those of rows that ended go back."""
        sources = survivors_of(old_to_new, num_new, self.table.max_batch_size).sources
        spare, leased = self._spare, self._leased
        self._spare = {new: spare[old] for new, old in enumerate(sources) if old in spare}
        self._leased = {new: leased[old] for new, old in enumerate(sources) if old in leased}
        held = [page for slot in self._spare for page in self._of(slot)]
        everything = np.setdiff1d(np.arange(self.table.num_pages, dtype=np.int32), self._pool.free_blocks())
        self._pool.give(np.setdiff1d(everything, np.array(held, np.int32)).astype(np.int32))

    def _live(self, num_tokens: int, num_new: int) -> range:
        """Return the columns that the next tokens, the first at position `num_tokens`, see and are written to."""
        first = max(0, num_tokens + 1 - self.window) // self.page_size
        return range(first, pages_per_sequence(num_tokens + num_new, self.page_size))

    def _map(self, slot: int, columns: range) -> None:
        mapped = self._mapped(slot)
        for column in mapped.keys() - set(columns):
            self.table.clear_entry(slot, column)
            self._leased[slot].append(mapped[column])
        for column in sorted(set(columns) - mapped.keys()):
            self.table.set_entry(slot, column, self._spare[slot].pop())

    def _mapped(self, slot: int) -> dict[int, int]:
        """Return a slot's pages by column."""
        return {column: page for column, page in enumerate(self.table.pages(slot).tolist()) if page != UNUSED_PAGE}

    def _of(self, slot: int) -> list[int]:
        return [*self._spare[slot], *self._leased[slot], *self._mapped(slot).values()]

    def _spare_of(self, slot: int) -> list[int]:
        if slot not in self._spare:
            raise SequenceError(f"slot {slot} was not admitted")
        return self._spare[slot]

    def _check(self, lengths: Sequence[tuple[int, int]], num_new: int) -> None:
        slots, capacity = [slot for slot, _ in lengths], self.table.max_pages * self.page_size
        for slot, num_tokens in lengths:
            check_slot(slot, self.table.max_batch_size)
            if as_count(num_tokens, "num_tokens") + num_new > capacity:
                raise ArgumentError(f"slot {slot} would have {num_tokens + num_new} tokens, its table has {capacity}")
        if len(set(slots)) != len(slots):
            raise ArgumentError(f"slots {slots} are named twice")

    def _short(self, says: str, needed: int, free: int) -> OutOfBlocks:
        return OutOfBlocks(says, needed=needed, free=free, evictable=0, held=self.table.num_pages - self.num_free_pages)
