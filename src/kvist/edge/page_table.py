"""Which pages each slot of a batch has: kept on the host, changed row by row, and brought to the device in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from kvist.core.arguments import as_count, as_int_array
from kvist.edge.geometry import MAX_POOL_PAGES, UNUSED_PAGE
from kvist.edge.mappings import check_slot, survivors_of
from kvist.edge.uploads import Mirror, runs_of
from kvist.errors import ArgumentError, InvariantError

__all__ = ["KVPageTable", "SparsePageTable", "Upload"]


@dataclass(frozen=True, slots=True)
class Upload:
    """What an upload copied: entries, K and V counted, in so many pieces.

    `lastUploadEntryCount` and `lastUploadRangeCount`.
    """

    num_entries: int = 0
    num_runs: int = 0


class KVPageTable:
    """The page table that all layers of a cache share; Edge-LLM's `KVPageTable`.

    Int32 `[max_batch_size, 2, max_pages]`: of each slot the ids of its K pages, then those of its V pages, which are
    `num_pages` higher; -1 where no page is mapped, and behind the first -1 there is none. Changes are made on the host
    and reach `device_table`, which stays at one address for life, with `upload`.

    Raises `ArgumentError` for a table that cannot be; `num_pages` is at most `MAX_POOL_PAGES`.

    >>> table = KVPageTable(max_batch_size=2, max_pages=4, num_pages=10)
    >>> table.set_row(1, [3, 7])
    >>> table.host[1].tolist(), table.upload()
    ([[3, 7, -1, -1], [13, 17, -1, -1]], True)
    """

    def __init__(self, max_batch_size: int, max_pages: int, num_pages: int, device: str | torch.device = "cpu") -> None:
        sizes = {"max_batch_size": max_batch_size, "max_pages": max_pages, "num_pages": num_pages}
        for name, size in sizes.items():
            if as_count(size, name) == 0:
                raise ArgumentError(f"{name} is 0, must be positive")
        if num_pages > MAX_POOL_PAGES:
            raise ArgumentError(f"num_pages is {num_pages}, int32 has V ids for {MAX_POOL_PAGES}")
        self.max_batch_size, self.max_pages, self.num_pages = max_batch_size, max_pages, num_pages
        self.last_upload = Upload()
        self._entries = np.full((max_batch_size, 2, max_pages), UNUSED_PAGE, np.int32)
        self._dirty = np.ones(max_batch_size, np.bool_)
        self._is_identity = False
        self._mirror = Mirror(self._entries.shape, device)

    @property
    def host(self) -> NDArray[np.int32]:
        """The table as it is now, int32 `[max_batch_size, 2, max_pages]`, a view that cannot be written."""
        view = self._entries.view()
        view.flags.writeable = False
        return view

    @property
    def device_table(self) -> Tensor:
        """The table as it was last uploaded, int32 `[max_batch_size, 2, max_pages]`, all -1 before; bind it once."""
        return self._mirror.tensor

    @property
    def is_identity(self) -> bool:
        """Whether the last change was `set_identity`; another that comes to the same does not count; `isIdentity`."""
        return self._is_identity

    def pages(self, slot: int) -> NDArray[np.int32]:
        """Copy the ids of a slot's K pages, int32, without the -1 behind them."""
        check_slot(slot, self.max_batch_size)
        mapped = np.flatnonzero(self._entries[slot, 0] != UNUSED_PAGE)
        return self._entries[slot, 0, : int(mapped.max(initial=-1)) + 1].copy()

    # ---- changes ----------------------------------------------------------------------------------------------------

    def set_identity(self) -> None:
        """Give slot b the pages b * max_pages to (b + 1) * max_pages - 1; `setIdentity`.

        Raises `ArgumentError` where there are not that many pages.
        """
        needed = self.max_batch_size * self.max_pages
        if needed > self.num_pages:
            raise ArgumentError(f"identity takes {needed} pages, but there are {self.num_pages}")
        self._assign(slice(None), np.arange(needed, dtype=np.int32).reshape(self.max_batch_size, self.max_pages))
        self._is_identity = True

    def set_row(self, slot: int, pages: ArrayLike) -> None:
        """Give a slot these pages and no others; none clear it; `setRow`. Raises as `set_rows`."""
        self.set_rows([(slot, pages)])

    def set_rows(self, rows: Sequence[tuple[int, ArrayLike]]) -> None:
        """Give each slot its pages and no others, all rows or none; `setRows`.

        Raises `ArgumentError` for a slot or page that there is not, a slot named twice, or more than `max_pages` pages.
        """
        checked: dict[int, NDArray[np.int32]] = {}
        for slot, pages in rows:
            check_slot(slot, self.max_batch_size)
            if slot in checked:
                raise ArgumentError(f"slot {slot} is named twice")
            checked[slot] = self._row(pages, f"pages of slot {slot}")
        if checked:
            self._assign(list(checked), np.stack(list(checked.values())))

    def compact(self, old_to_new: ArrayLike | Tensor, num_new: int) -> None:
        """Move rows to where a mapping `[old rows]` says, -1 for those that end; `compactRows` of 0.10.

        Pages keep their numbers and contents; rows may change their order; all rows from `num_new` on are cleared.
        Raises `ArgumentError` unless the new rows are 0 to `num_new` - 1, once each.
        """
        survivors = survivors_of(old_to_new, num_new, self.max_batch_size)
        keys = np.full_like(self._entries[:, 0], UNUSED_PAGE)
        keys[: len(survivors.sources)] = self._entries[list(survivors.sources), 0]
        self._assign(slice(None), keys)

    def _assign(self, slots: slice | list[int], keys: NDArray[np.int32]) -> None:
        """Take K ids `[slots, max_pages]`, derive V ids, and note what differs."""
        self._note(slots, keys != self._entries[slots, 0])
        self._entries[slots, 0] = keys
        self._entries[slots, 1] = self._values_of(keys)
        self._is_identity = False

    def _note(self, slots: slice | list[int], changed: NDArray[np.bool_]) -> None:
        """Note which of the entries `[slots, max_pages]` change."""
        self._dirty[slots] |= changed.any(axis=1)

    def _values_of(self, keys: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.where(keys == UNUSED_PAGE, np.int32(UNUSED_PAGE), keys + np.int32(self.num_pages))

    def _row(self, pages: ArrayLike, name: str) -> NDArray[np.int32]:
        """Check a row's pages and fill it up with -1."""
        ids = as_int_array(pages, name)
        if ids.ndim != 1 or len(ids) > self.max_pages:
            raise ArgumentError(f"{name} have shape {list(ids.shape)}, must be at most {self.max_pages} ids")
        self._check_ids(ids, name)
        row = np.full(self.max_pages, UNUSED_PAGE, np.int32)
        row[: len(ids)] = ids
        return row

    def _check_ids(self, ids: NDArray[np.integer], name: str) -> None:
        outside = ids[(ids < 0) | (ids >= self.num_pages)]
        if len(outside):
            raise ArgumentError(f"{name} hold {int(outside[0])}, must be in [0, {self.num_pages})")

    # ---- the device -------------------------------------------------------------------------------------------------

    def upload(self) -> bool:
        """Bring what changed to `device_table`, on the current stream; say whether anything had; `upload`.

        The first time all goes over. Pieces are copied through pinned memory, and the host does not wait. Raises
        `InvariantError` instead where what would go over is not what a table must be.
        """
        if not self._dirty.any():
            return False
        if problems := self._problems(np.flatnonzero(self._dirty)):
            raise InvariantError(problems)
        runs = self._dirty_runs()
        self._mirror.write(self._entries, runs)
        self.last_upload = Upload(int((runs[:, 1] - runs[:, 0]).sum()), len(runs))
        self._dirty[:] = False
        return True

    def _dirty_runs(self) -> NDArray[np.int64]:
        """Return where in the table, as one row of numbers, what goes over begins and ends: whole rows."""
        return runs_of(np.flatnonzero(self._dirty)) * (2 * self.max_pages)

    def gather_rows(self, slots: Tensor, out: Tensor | None = None) -> Tensor:
        """Copy rows of the table last uploaded, `[n, 2, max_pages]`, for a batch of `slots`, int32 or int64 `[n]`.

        `gatherRows`: a batch of sequences that stay in their slots. `out` is where to, on the table's device.
        """
        return torch.index_select(self.device_table, 0, slots, out=out)

    def check(self) -> None:
        """Raise `InvariantError` unless all holds that is said of a table; `checkInvariants`."""
        if problems := self._problems(np.arange(self.max_batch_size)):
            raise InvariantError(problems)

    def _problems(self, slots: NDArray[np.intp]) -> list[str]:
        """Say what is wrong with rows, and of which slots."""
        keys, values = self._entries[slots, 0], self._entries[slots, 1]
        wrong = {
            f"ids outside [0, {self.num_pages})": ((keys < UNUSED_PAGE) | (keys >= self.num_pages)).any(axis=1),
            "V ids that are not those of K plus num_pages": (values != self._values_of(keys)).any(axis=1),
        } | self._wrong_keys(keys)
        return [f"slots {slots[rows].tolist()} have {what}" for what, rows in wrong.items() if rows.any()]

    def _wrong_keys(self, keys: NDArray[np.int32]) -> dict[str, NDArray[np.bool_]]:
        """Say of which rows of K ids `[rows, max_pages]` something is wrong that this kind of table must not have."""
        mapped = keys != UNUSED_PAGE
        return {"pages behind a hole": (mapped[:, 1:] & ~mapped[:, :-1]).any(axis=1)}


class SparsePageTable(KVPageTable):
    """A page table with holes, for layers that keep a window; Edge-LLM's sparse window mode.

    Columns are the pages of a sequence counted from its start, and those that a window has left are -1. A slot has no
    page twice, slots may share pages. Changes are made by entry, and single entries go over.

    >>> table = SparsePageTable(max_batch_size=1, max_pages=4, num_pages=10)
    >>> table.set_entry(0, 2, 5)
    >>> table.host[0].tolist()
    [[-1, -1, 5, -1], [-1, -1, 15, -1]]
    """

    def __init__(self, max_batch_size: int, max_pages: int, num_pages: int, device: str | torch.device = "cpu") -> None:
        super().__init__(max_batch_size, max_pages, num_pages, device)
        self._dirty[:] = False  # the device's table is all -1 too
        self._changed = np.zeros((max_batch_size, max_pages), np.bool_)

    def set_entry(self, slot: int, column: int, page: int) -> None:
        """Map a page; `setEntry`. Raises `ArgumentError` for what there is not, or a page that the slot has already."""
        self._check_column(slot, column)
        self._check_ids(as_int_array([page], "page"), "page")
        row = self._entries[slot, 0].copy()
        row[column] = UNUSED_PAGE
        if page in row:
            raise ArgumentError(f"slot {slot} has page {page} in column {int(np.flatnonzero(row == page)[0])} already")
        self._set(slot, column, page)

    def clear_entry(self, slot: int, column: int) -> None:
        """Leave a hole; `clearEntry`. Raises `ArgumentError` for what there is not."""
        self._check_column(slot, column)
        self._set(slot, column, UNUSED_PAGE)

    def _set(self, slot: int, column: int, page: int) -> None:
        value = page if page == UNUSED_PAGE else page + self.num_pages
        if self._entries[slot, 0, column] != page:
            self._entries[slot, :, column] = page, value
            self._changed[slot, column] = self._dirty[slot] = True
        self._is_identity = False

    def _check_column(self, slot: int, column: int) -> None:
        check_slot(slot, self.max_batch_size)
        if not 0 <= as_count(column, "column") < self.max_pages:
            raise ArgumentError(f"column must be in [0, {self.max_pages}), got {column}")

    def _note(self, slots: slice | list[int], changed: NDArray[np.bool_]) -> None:
        super()._note(slots, changed)
        self._changed[slots] |= changed

    def _dirty_runs(self) -> NDArray[np.int64]:
        slots = np.flatnonzero(self._dirty)
        rows, columns = np.nonzero(self._changed[slots])
        keys = slots[rows] * (2 * self.max_pages) + columns
        self._changed[slots] = False
        return runs_of(np.sort(np.concatenate([keys, keys + self.max_pages])))

    def _check_ids(self, ids: NDArray[np.integer], name: str) -> None:
        mapped = ids[ids != UNUSED_PAGE]
        super()._check_ids(mapped, name)
        if len(np.unique(mapped)) != len(mapped):
            raise ArgumentError(f"{name} are {ids.tolist()}, must not hold a page twice")

    def _wrong_keys(self, keys: NDArray[np.int32]) -> dict[str, NDArray[np.bool_]]:
        ranked = np.sort(keys, axis=1)
        return {"a page twice": ((ranked[:, 1:] == ranked[:, :-1]) & (ranked[:, 1:] != UNUSED_PAGE)).any(axis=1)}
