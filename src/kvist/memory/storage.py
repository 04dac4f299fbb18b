"""What one layer keeps: K and V, whose rows are blocks and tokens, or states, whose rows are blocks."""

from __future__ import annotations

from torch import Tensor

from kvist.memory.rows import Rows, ScatteredRows

__all__ = ["KVStorage", "LayerStorage", "StateStorage"]


class KVStorage:
    """K and V of one attention layer, `[num_blocks, block_size, num_kv_heads, dim]` each; `values` None if keys only.

    `pool` is both as one view `[2, num_blocks, ...]`, None where they differ in size; `blocks` and `tokens` are the
    rows of each, by block id and by slot.
    """

    def __init__(self, keys: Tensor, values: Tensor | None = None) -> None:
        self.keys = keys
        self.values = values
        self.pool = None if values is None or values.shape != keys.shape else _joined(keys, values)
        self.planes = (keys,) if values is None else (keys, values)
        self.blocks = tuple(Rows(plane) for plane in self.planes)
        self.tokens = tuple(
            Rows(plane.flatten(0, 1)) if plane.is_contiguous() else ScatteredRows(plane) for plane in self.planes
        )

    def copy(self, sources: Tensor, destinations: Tensor, num_tokens: int | None) -> None:
        """Copy the first `num_tokens` rows of blocks, by id, or, if None, single rows, by slot.

        All are read before any is written.
        """
        for rows in self.tokens if num_tokens is None else self.blocks:
            rows.copy(sources, destinations, num_tokens)


class StateStorage:
    """The states of one recurrent layer, `[num_blocks, *shape]` for each of its shapes: a block is one state."""

    def __init__(self, planes: tuple[Tensor, ...]) -> None:
        self.planes = planes
        self.blocks = tuple(Rows(plane) for plane in planes)

    def copy(self, sources: Tensor, destinations: Tensor, num_tokens: int | None) -> None:
        """Copy whole states, whatever `num_tokens` is; all are read before any is written."""
        for rows in self.blocks:
            rows.copy(sources, destinations)


LayerStorage = KVStorage | StateStorage


def _joined(keys: Tensor, values: Tensor) -> Tensor:
    """View two planes of equal shape and one storage, the values behind the keys, as one tensor."""
    start = keys.storage_offset()
    return keys.as_strided((2, *keys.shape), (values.storage_offset() - start, *keys.stride()), start)
