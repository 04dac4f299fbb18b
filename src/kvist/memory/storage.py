"""What one layer keeps: K and V, whose rows are blocks and tokens, or states, whose rows are blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvist.errors import LayoutError
from kvist.memory.quantisation import Encoding
from kvist.memory.rows import Rows, ScatteredRows

__all__ = ["KVStorage", "LayerStorage", "StateStorage"]


class KVStorage:
    """K and, where they are kept, V of one attention layer, `[num_blocks, block_size, num_kv_heads, dim]` each.

    `blocks` and `tokens` are the rows of each, by block id and by slot; `encodings` say how their numbers are kept.
    """

    def __init__(self, planes: Sequence[Tensor], encodings: Sequence[Encoding]) -> None:
        self.planes = tuple(planes)
        self.encodings = tuple(encodings)
        self.blocks = tuple(Rows(plane) for plane in planes)
        self.tokens = tuple(
            Rows(plane.flatten(0, 1)) if plane.is_contiguous() else ScatteredRows(plane) for plane in planes
        )

    @property
    def keys(self) -> Tensor:
        """The K of all blocks."""
        return self.planes[0]

    @property
    def values(self) -> Tensor | None:
        """The V of all blocks, None where the layer keeps keys only."""
        return self.planes[1] if len(self.planes) == 2 else None

    def copy(self, sources: Tensor, destinations: Tensor, num_tokens: int | None) -> None:
        """Copy the first `num_tokens` rows of blocks, by id, or, if None, single rows, by slot.

        All are read before any is written.
        """
        for rows in self.tokens if num_tokens is None else self.blocks:
            rows.copy(sources, destinations, num_tokens)

    def encoded(self, new: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Quantise new K and V, by name, where they are numbers; return what is stored already as it is.

        Raises `LayoutError` for numbers of other heads or dims than the layer's.
        """
        return {
            name: given if given is None or not encoding.takes(given) else _encoded(name, given, rows, encoding)
            for (name, given), rows, encoding in zip(new.items(), self.tokens, self.encodings, strict=True)
        }

    def decoded(self, planes: Sequence[Tensor], dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
        """Return K and V as floats of `dtype`, or, if None, as they are stored; V is None if there are keys only."""
        if dtype is not None:
            planes = [encoding.decode(plane, dtype) for plane, encoding in zip(planes, self.encodings, strict=True)]
        return planes[0], planes[1] if len(planes) == 2 else None


class StateStorage:
    """The states of one recurrent layer, `[num_blocks, *shape]` for each of its shapes: a block is one state."""

    def __init__(self, planes: Sequence[Tensor]) -> None:
        self.planes = tuple(planes)
        self.blocks = tuple(Rows(plane) for plane in planes)

    def copy(self, sources: Tensor, destinations: Tensor, num_tokens: int | None) -> None:
        """Copy whole states, whatever `num_tokens` is; all are read before any is written."""
        for rows in self.blocks:
            rows.copy(sources, destinations)


LayerStorage = KVStorage | StateStorage


def _encoded(name: str, numbers: Tensor, rows: Rows, encoding: Encoding) -> Tensor:
    expected = encoding.numbers_shape(rows.row_shape)
    if numbers.shape[1:] != expected:
        stored = f"or [T, {', '.join(map(str, rows.row_shape))}] of {rows.dtype}"
        raise LayoutError(
            f"{name} must be [T, {', '.join(map(str, expected))}] of floats {stored}, got {list(numbers.shape)}"
        )
    return encoding.encode(numbers)
