"""How numbers become what is stored, and back: as they are, or divided by a scale as 8-bit floats or small ints."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvist.config import PACKED_DTYPES, is_quantised
from kvist.errors import ArgumentError
from kvist.memory.layout import Plane

__all__ = ["Encoding"]

_REACH = {"int8": 128, "uint8": 128, "int4": 8, "uint4": 8}
"""Dtypes of ints keep -reach to reach - 1."""
_ZERO = {"int8": 0, "uint8": 128, "int4": 0, "uint4": 8}
"""As what each of them keeps 0."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """How the numbers of a plane are kept.

    Floats of 16 and 32 bits are kept as they are. 8-bit floats and ints keep a number divided by `scale`, rounded to
    the nearest and, beyond their range, as the last inside. Unsigned ints have their zero in the middle of their range:
    uint8 keeps 0.0 as 128, uint4 as 8. Two ints of 4 bits lie in a byte, the even element in its low half.
    """

    dtype: str
    scale: float = 1.0

    @classmethod
    def of(cls, plane: Plane) -> Encoding:
        """Return how numbers of this plane are kept."""
        return cls(plane.dtype, plane.scale)

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of the tensor that holds the numbers."""
        dtype: torch.dtype = torch.uint8 if self.is_packed else getattr(torch, self.dtype)
        return dtype

    @property
    def is_packed(self) -> bool:
        """Whether two elements lie in a byte, so that the last axis is stored half as long."""
        return self.dtype in PACKED_DTYPES

    def takes(self, numbers: Tensor) -> bool:
        """Say whether these are numbers to be quantised, rather than such as are stored already."""
        return is_quantised(self.dtype) and numbers.dtype.is_floating_point and numbers.dtype.itemsize > 1

    def encode(self, numbers: Tensor) -> Tensor:
        """Quantise floats `[..., dim]`; returns `[..., dim]`, or `[..., dim / 2]` where two lie in a byte.

        >>> Encoding("int4", scale=0.5).encode(torch.tensor([1.0, -0.5, 9.0, 0.2])).tolist()
        [242, 7]
        """
        scaled = numbers.float() / self.scale
        if self.dtype not in _REACH:
            limit = torch.finfo(self.stored_dtype).max
            return scaled.clamp(-limit, limit).to(self.stored_dtype)
        reach = _REACH[self.dtype]
        stored = scaled.round().clamp(-reach, reach - 1).to(torch.int16) + _ZERO[self.dtype]
        if not self.is_packed:
            return stored.to(self.stored_dtype)
        return (stored[..., 0::2] & 15 | (stored[..., 1::2] & 15) << 4).to(torch.uint8)

    def decode(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the numbers as floats of `dtype`: what is stored times the scale.

        Raises `ArgumentError` for a dtype that is no float.

        >>> Encoding("int4", scale=0.5).decode(torch.tensor([242, 7], dtype=torch.uint8), torch.float32).tolist()
        [1.0, -0.5, 3.5, 0.0]
        """
        if not dtype.is_floating_point:
            raise ArgumentError(f"dtype is {dtype}, must be of floats, to which stored numbers are converted")
        if not is_quantised(self.dtype):
            return stored.to(dtype)
        if self.dtype in _REACH:
            stored = self._signed(stored)
        return (stored.float() * self.scale).to(dtype)

    def _signed(self, stored: Tensor) -> Tensor:
        """Return stored ints as int16, unpacked, with 0 for 0."""
        if self.is_packed:
            stored = torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2)
        signed = stored.to(torch.int16)
        if self.dtype == "int4":
            signed = (signed ^ 8) - 8
        return signed - _ZERO[self.dtype]

    def numbers_shape(self, stored_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of numbers that are stored in this shape."""
        return (*stored_shape[:-1], stored_shape[-1] * 2) if self.is_packed else stored_shape
