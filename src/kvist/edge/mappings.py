"""Which rows of a batch go on, and where: the mapping from old to new rows with which a batch is compacted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from kvist.core.arguments import as_count, as_int_array
from kvist.errors import ArgumentError

__all__ = ["Survivors", "check_slot", "survivors_of"]


@dataclass(frozen=True, slots=True)
class Survivors:
    """Rows that go on: the new row i is the old row `sources[i]`."""

    sources: tuple[int, ...]

    @property
    def moved(self) -> list[tuple[int, int]]:
        """Old and new row of those that do not stay where they are, by new row."""
        return [(old, new) for new, old in enumerate(self.sources) if old != new]

    def require_order(self) -> None:
        """Raise `ArgumentError` unless rows keep their order.

        Contents are moved in place, the lowest row first. In order, every row moves down onto one that has moved or
        ended; out of order, one would be overwritten before it is read.
        """
        if list(self.sources) != sorted(self.sources):
            raise ArgumentError(
                f"rows {list(self.sources)} become rows 0 to {len(self.sources) - 1} out of order, and contents moved "
                "in place must keep it; remap() can change it"
            )


def survivors_of(old_to_new: ArrayLike | Tensor, num_new: int, max_old: int, num_old: int | None = None) -> Survivors:
    """Read a mapping, ints `[old rows]`, from each old row to its new one, or -1 where it ends.

    It may be shorter than `max_old`, unless it must be `num_old` long. A mapping on an accelerator is read, for which
    the host waits. Raises `ArgumentError` unless the new rows are 0 to `num_new` - 1, once each.

    >>> survivors_of([-1, 0, -1, 1], num_new=2, max_old=8).sources
    (1, 3)
    """
    given: ArrayLike = old_to_new.cpu().numpy() if isinstance(old_to_new, torch.Tensor) else old_to_new
    mapping = as_int_array(given, "old_to_new")
    longest = max_old if num_old is None else num_old
    if mapping.ndim != 1 or len(mapping) > longest or (num_old is not None and len(mapping) != num_old):
        raise ArgumentError(
            f"old_to_new has shape {list(mapping.shape)}, must have {longest} rows" + " at most" * (num_old is None)
        )
    kept = np.flatnonzero(mapping != -1)
    if sorted(mapping[kept].tolist()) != list(range(num_new)):
        raise ArgumentError(
            f"old_to_new is {mapping.tolist()}, must hold rows 0 to {num_new - 1} once each, and -1 for what ends"
        )
    return Survivors(tuple(kept[np.argsort(mapping[kept])].tolist()))


def check_slot(slot: int, num_slots: int) -> None:
    """Raise `ArgumentError` for a slot that there is not."""
    if not 0 <= as_count(slot, "slot") < num_slots:
        raise ArgumentError(f"slot must be in [0, {num_slots}), got {slot}")
