"""How many tokens each row of a batch has: one vector on the device, that all layers read."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from kvist.core.arguments import as_count, as_int_array
from kvist.edge.mappings import Survivors, check_slot
from kvist.errors import ArgumentError

__all__ = ["SequenceLengths"]


class SequenceLengths:
    """Tokens of each row of the batch, int32, at one address for life; the lengths of Edge-LLM's `HybridCacheManager`.

    The batch is the first `num_active` of `max_batch_size` rows. On CPU no row may get more than `capacity` tokens, and
    what would is refused before anything changes. On an accelerator only what `reset` is given is looked at: for the
    rest the host would have to wait.

    >>> lengths = SequenceLengths(max_batch_size=4, capacity=256)
    >>> lengths.reset([0, 5, 0])
    >>> lengths.resize(2)
    >>> lengths.commit(7)
    >>> lengths.tensor.tolist()
    [7, 12]
    """

    def __init__(self, max_batch_size: int, capacity: int, device: str | torch.device = "cpu") -> None:
        self.max_batch_size, self.capacity = max_batch_size, capacity
        with torch.inference_mode(mode=False):
            self._all = torch.zeros(max_batch_size, dtype=torch.int32, device=device)
        self._num_active = 0
        self._all_empty = True

    @property
    def tensor(self) -> Tensor:
        """The lengths of the batch, int32 `[num_active]`, a view."""
        return self._all[: self._num_active]

    @property
    def num_active(self) -> int:
        """Rows of the batch."""
        return self._num_active

    @property
    def all_empty(self) -> bool:
        """Whether no row had anything at `reset` and nothing was committed since; `getKVCacheAllEmpty`.

        Then a prefill is the first one, else one that goes on.
        """
        return self._all_empty

    def reset(self, num_reused_tokens: ArrayLike) -> None:
        """Begin a batch of as many rows, each with so many tokens that are there already, ints `[B]` on the host.

        `resetForNewSequences`. Raises `ArgumentError` for more rows than `max_batch_size`, tokens than `capacity`.
        """
        counts = as_int_array(num_reused_tokens, "num_reused_tokens")
        if counts.ndim != 1 or len(counts) > self.max_batch_size:
            raise ArgumentError(
                f"num_reused_tokens has shape {list(counts.shape)}, must be [B] of at most {self.max_batch_size} rows"
            )
        self._check(counts, "num_reused_tokens")
        self._num_active = len(counts)
        self.tensor.copy_(self._brought(counts), non_blocking=True)
        self._all_empty = not counts.any()

    def commit(self, num_tokens: int | Tensor) -> None:
        """Add tokens that are written: one number for all rows, or int32 `[num_active]` on the device.

        `commitSequenceLength`: of a decode step, or of a prefill or verification.
        """
        self.check_commit(num_tokens)
        self.tensor.add_(num_tokens)
        self._all_empty = False

    def check_commit(self, num_tokens: int | Tensor) -> None:
        """Raise `ArgumentError` for what `commit` would refuse; nothing changes."""
        if isinstance(num_tokens, Tensor):
            self._check_added(num_tokens)
        else:
            as_count(num_tokens, "num_tokens")
        if self._all.device.type == "cpu":
            self._check((self.tensor.long() + num_tokens).numpy(), "lengths would be")

    def resize(self, num_active: int) -> None:
        """Have this many rows; what the others held stays; `setActiveBatchSize`."""
        if as_count(num_active, "num_active") > self.max_batch_size:
            raise ArgumentError(f"num_active is {num_active}, must be in [0, {self.max_batch_size}]")
        self._num_active = num_active

    def compact(self, survivors: Survivors) -> None:
        """Have the rows that go on, in their new order; lengths of `compactBatch`, `compactKVCacheLengths`."""
        sources = torch.tensor(survivors.sources, dtype=torch.int64)
        self._all[: len(sources)] = self._all[sources.to(self._all.device, non_blocking=True)]
        self._num_active = len(sources)

    def swap(self, row: int, other: int) -> None:
        """Exchange the lengths of two rows; twice is as before; `swapSlotState`."""
        for each in (row, other):
            check_slot(each, self.max_batch_size)
        kept = self._all[row].clone()
        self._all[row].copy_(self._all[other])
        self._all[other].copy_(kept)

    def clear(self, row: int) -> None:
        """Set the length of a row to 0; `clearResidentSlot`."""
        check_slot(row, self.max_batch_size)
        self._all[row].zero_()

    def _brought(self, counts: np.ndarray) -> Tensor:
        host = torch.from_numpy(counts.astype(np.int32))
        return host.pin_memory() if self._all.device.type == "cuda" else host

    def _check_added(self, added: Tensor) -> None:
        expected = (self._num_active,)
        if added.dtype != torch.int32 or added.device != self._all.device or tuple(added.shape) != expected:
            raise ArgumentError(
                f"num_tokens must be int32 {list(expected)} on {self._all.device}, "
                f"got {added.dtype} {list(added.shape)} on {added.device}"
            )
        if added.device.type == "cpu" and bool((added < 0).any()):
            raise ArgumentError(f"num_tokens holds {int(added.min())}, must not be negative")

    def _check(self, counts: np.ndarray, name: str) -> None:
        wrong = counts[(counts < 0) | (counts > self.capacity)]
        if len(wrong):
            raise ArgumentError(f"{name} {int(wrong[0])} in a row, must be in [0, {self.capacity}]")
