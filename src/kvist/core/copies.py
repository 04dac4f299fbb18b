"""Write-through: what host memory has of content that the device has, too, so that evicting it there moves nothing.

Rules that must not be broken, with their reasons:

- A copy belongs to a column of a listed extent of the device, and is there only where the device has the block: it goes
  with it, unless host memory then takes the content in, and the copy with it.
- A copy never pushes another one out, for the device has what both hold. Content that the device is about to lose does:
  the copies made last go first, since the device will have what they hold the longest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvist.core.extents import Blocks, Extent, Twins
from kvist.core.losses import MADE_ROOM
from kvist.core.recording import PUBLISHED

if TYPE_CHECKING:
    from kvist.core.lower import LowerTier

__all__ = ["Copies"]

HOST = "host"


class Copies:
    """The blocks of a host tier whose content the device has, too, by extent of the device.

    Of each extent they are kept as `[num_groups, n]`, -1 where there is none, for as many columns as had some once.
    """

    def __init__(self, tier: LowerTier) -> None:
        self._tier = tier
        self._of: dict[Extent, Blocks] = {}
        self.num_made = 0

    def copy_from(self, other: Copies, twins: Twins) -> None:
        """Have the copies of other extents for their twins."""
        self._of = {twins[id(extent)]: blocks.copy() for extent, blocks in other._of.items()}
        self.num_made = other.num_made

    # -- looking ------------------------------------------------------------------------------------------------------

    def extents(self) -> list[Extent]:
        """List the extents that have copies, in the order in which these were made."""
        return list(self._of)

    def of(self, extent: Extent) -> Blocks:
        """Return the copies of an extent's columns, `[num_groups, num_blocks]`, -1 where there are none."""
        copies: Blocks = np.full(extent.blocks.shape, -1, np.int32)
        if extent in self._of:
            known = self._of[extent]
            copies[:, : known.shape[1]] = known
        return copies

    def num_columns(self, extent: Extent, num_blocks: int) -> int:
        """Count the first so many columns of an extent that have a copy in some group."""
        return int((self.of(extent)[:, :num_blocks] >= 0).any(axis=0).sum()) if extent in self._of else 0

    # -- making -------------------------------------------------------------------------------------------------------

    def committed(self, extent: Extent, first: int, end: int) -> None:
        """Copy blocks first .. end-1 of the prefix that ends with an extent, just published, if there is room."""
        path, node = [], extent
        while node.parent is not None and node.start + node.num_blocks > first:
            path.append(node)
            node = node.parent
        for each in path[::-1]:
            if not self._copy(each, max(first - each.start, 0), end - each.start):
                return

    def filled(self, extent: Extent, group: int, columns: NDArray[np.intp]) -> None:
        """Copy blocks of one group in columns of an extent where the device had none before."""
        first, end = int(columns[0]), int(columns[-1]) + 1
        self._copy(extent, first, end, only=group)

    def hit(self, extent: Extent) -> None:
        """Copy what of the prefix that ends with an extent has been hit for the time that counts."""
        for each in extent.path():
            if each.hits == max(self._tier.min_hits, 1) and not self._copy(each, 0, each.num_blocks):
                return

    def _copy(self, extent: Extent, first: int, end: int, only: int | None = None) -> bool:
        """Copy columns of an extent that have no copies yet; returns whether there was room for all."""
        tier = self._tier
        end = min(end, len(extent.tokens) // tier.tree.block_bytes)
        is_wanted = extent.keep.priority >= tier.min_priority and extent.hits >= tier.min_hits
        if end <= first or extent.key is None or not is_wanted:
            return True
        copies = self.of(extent)
        missing: Blocks = np.where(copies[:, first:end] < 0, extent.blocks[:, first:end], -1)
        if only is not None:
            missing[np.arange(len(missing)) != only] = -1
        num_fit = tier.make_room(missing)
        new = tier.bring_in(missing[:, :num_fit])
        copies[:, first : first + num_fit] = np.maximum(copies[:, first : first + num_fit], new)
        self._note(extent, first, new)
        if (copies >= 0).any():
            self._of[extent] = copies
        tier.num_refused += end - first - num_fit
        return num_fit == end - first

    def _note(self, extent: Extent, first: int, new: Blocks) -> None:
        self.num_made += int((new >= 0).any(axis=0).sum())
        if self._tier.tree.recorder is not None:
            self._tier.tree.recorder.stored(extent, first, HOST, PUBLISHED, new)

    def adopt(self, extent: Extent, first: int, blocks: Blocks) -> Blocks:
        """Keep blocks of host memory as copies of an extent's columns from `first` on, where it has a block and none.

        Returns `blocks` with -1 for those that are kept.
        """
        if not self._tier.writes_through:
            return blocks
        copies, end = self.of(extent), first + blocks.shape[1]
        is_kept = (copies[:, first:end] < 0) & (extent.blocks[:, first:end] >= 0)
        copies[:, first:end] = np.where(is_kept, blocks, copies[:, first:end])
        if (copies >= 0).any():
            self._of[extent] = copies
        return np.where(is_kept, -1, blocks)

    # -- letting go ---------------------------------------------------------------------------------------------------

    def split(self, upper: Extent, extent: Extent) -> None:
        """Let the first columns of an extent, which are those of `upper` now, have their copies there."""
        copies = self._of.get(extent)
        if copies is None:
            return
        at = upper.num_blocks
        for each, part in ((upper, copies[:, :at]), (extent, copies[:, at:])):
            self._keep(each, part)

    def _keep(self, extent: Extent, copies: Blocks) -> None:
        if (copies >= 0).any():
            self._of[extent] = copies
        else:
            self._of.pop(extent, None)

    def take(self, extent: Extent, keep: int, num_blocks: int) -> Blocks:
        """Return copies of so many columns of an extent from `keep` on, which are no copies any more."""
        if extent not in self._of:
            return np.full((len(extent.blocks), num_blocks), -1, np.int32)
        copies = self.of(extent)
        self._keep(extent, copies[:, :keep])
        return copies[:, keep : keep + num_blocks]

    def drop(self, extent: Extent, keep: int, reason: str) -> None:
        """Give back the copies of an extent's columns from `keep` on."""
        if extent in self._of:
            self._tier.give_copies(extent, keep, self.take(extent, keep, extent.num_blocks - keep), reason)

    def drop_in(self, extent: Extent, group: int, columns: NDArray[np.intp], reason: str) -> None:
        """Give back the copies of columns whose blocks of one group the device lets go of."""
        if extent not in self._of:
            return
        copies = self.of(extent)
        gone = np.full(copies.shape, -1, np.int32)
        gone[group, columns] = copies[group, columns]
        copies[group, columns] = -1
        self._keep(extent, copies)
        self._tier.give_copies(extent, 0, gone, reason)

    def make_room(self, index: int, wanted: int) -> None:
        """Give copies back, those made last first and from their tails, until so many blocks of a pool are free."""
        pool = self._tier.pools[index]
        groups = [group for group, own in enumerate(self._tier.pool_of) if own == index]
        for extent in reversed(list(self._of)) if pool.num_free < wanted else ():
            from_tail = np.cumsum((self.of(extent)[groups] >= 0).sum(axis=0)[::-1])
            num_gone = int(np.searchsorted(from_tail, wanted - pool.num_free)) + 1
            if from_tail[-1]:
                self.drop(extent, max(extent.num_blocks - num_gone, 0), MADE_ROOM)
            if pool.num_free >= wanted:
                return
