"""Token ids as bytes: 4 bytes each in the machine's order, so that comparing prefixes is a memcmp."""

import struct
import sys
from array import array
from collections.abc import Sequence as AbstractSequence
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvist.errors import ArgumentError, ArgumentTypeError

__all__ = [
    "MAX_TOKEN",
    "TOKEN_BYTES",
    "TokenArray",
    "Tokens",
    "as_token_array",
    "as_token_buffer",
    "as_token_bytes",
    "common_prefix",
]

TOKEN_BYTES = 4
MAX_TOKEN = 2**31 - 1
SHORT_TOKENS, LONG_TOKENS = 256, 8192
SIGN_BYTE = TOKEN_BYTES - 1 if sys.byteorder == "little" else 0

type_of_int32 = np.dtype(np.int32)
TokenArray = NDArray[np.int32]
Tokens = AbstractSequence[int] | NDArray[np.integer[Any]] | array | memoryview | bytes  # type: ignore[type-arg]


def as_token_bytes(tokens: Tokens, name: str = "tokens") -> bytes:
    """Return token ids as packed int32.

    Takes 1-D integer arrays of any dtype (an int32 array is the fastest), `array`s, buffers, and lists or tuples of
    ints. Raises ArgumentTypeError for anything else and ArgumentError for ids outside 0 .. 2**31-1.
    """
    if isinstance(tokens, (list, tuple, range)):
        return _pack(tokens, name)
    return as_token_array(tokens, name).tobytes()


def as_token_buffer(tokens: Tokens, name: str = "tokens") -> bytes | memoryview:
    """Return token ids as packed int32 for the length of a call: of a long int32 array a view, which saves copying
    what is cached already.

    Errors as in `as_token_bytes`.
    """
    if type(tokens) is not np.ndarray:
        return as_token_bytes(tokens, name)
    size, ids = tokens.size, tokens
    if tokens.dtype is not type_of_int32 or tokens.ndim != 1:
        ids = as_token_array(tokens, name)
    elif size < SHORT_TOKENS:
        packed = tokens.tobytes()
        if packed[SIGN_BYTE::TOKEN_BYTES].isascii():  # cheaper than a look at the array, for a few hundred ids
            return packed
        _refuse_range(tokens, name)
    elif tokens.item(tokens.argmin()) < 0:
        _refuse_range(tokens, name)
    return ids.tobytes() if size < LONG_TOKENS or not ids.flags.c_contiguous else ids.data.cast("B")


def as_token_array(tokens: Tokens, name: str = "tokens") -> TokenArray:
    """Return token ids as a 1-D int32 array (the same array where it is one); errors as in `as_token_bytes`."""
    if type(tokens) is np.ndarray and tokens.dtype is type_of_int32 and tokens.ndim == 1:
        ids: TokenArray = tokens  # type: ignore[assignment]  # a cast is a call, and this is on every request's path
        if ids.size and ids.item(ids.argmin()) < 0:
            _refuse_range(ids, name)
        return ids
    if isinstance(tokens, (list, tuple, range)):
        return np.frombuffer(_pack(tokens, name), np.int32)
    return _narrow(tokens if isinstance(tokens, np.ndarray) else _array_of(tokens, name), name)


def common_prefix(query: bytes | memoryview, position: int, tokens: bytes | bytearray, length: int) -> int:
    """Count the leading bytes, in whole tokens, in which `query[position:]` and `tokens` agree, at most `length`.

    Halves the range with memcmp, so that a long common part costs little more than one memcmp of it.
    """
    if tokens.startswith(query[position : position + length]):
        return length
    low, high = 0, length
    while high - low > 128:
        middle = (low + high) // 2 & ~(TOKEN_BYTES - 1)
        if tokens.startswith(query[position + low : position + middle], low):
            low = middle
        else:
            high = middle
    ours = int.from_bytes(query[position + low : position + high], "little")
    differing = ours ^ int.from_bytes(tokens[low:high], "little")
    first_bit = (differing & -differing).bit_length() - 1
    return low + first_bit // (8 * TOKEN_BYTES) * TOKEN_BYTES


def _pack(tokens: AbstractSequence[int], name: str) -> bytes:
    try:
        packed = struct.pack(f"{len(tokens)}i", *tokens)
    except (struct.error, TypeError):
        _refuse_elements(tokens, name)
        raise
    if packed:
        as_token_array(np.frombuffer(packed, np.int32), name)
    return packed


def _array_of(tokens: Any, name: str) -> NDArray[Any]:
    if isinstance(tokens, str) or not (
        hasattr(tokens, "__array__") or isinstance(tokens, array | memoryview | bytes | bytearray)
    ):
        raise ArgumentTypeError(
            f"{name} must be a 1-D integer array, an array, a buffer or a list of ints, not {type(tokens).__name__}"
        )
    if isinstance(tokens, bytes | bytearray):
        return np.frombuffer(tokens, np.uint8)
    return np.asarray(tokens)


def _narrow(ids: NDArray[Any], name: str) -> TokenArray:
    if ids.dtype.kind not in "iu":
        raise ArgumentTypeError(f"{name} must hold integers, not {ids.dtype}")
    if ids.ndim != 1:
        raise ArgumentError(f"{name} must have one dimension, not shape {ids.shape}")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) > MAX_TOKEN):
        _refuse_range(ids, name)
    return ids.astype(np.int32)


def _refuse_range(ids: NDArray[Any], name: str) -> None:
    at = int(np.flatnonzero((ids < 0) | (ids > MAX_TOKEN))[0])
    raise ArgumentError(f"{name}[{at}] is {int(ids[at])}; token ids are 0 .. {MAX_TOKEN}")


def _refuse_elements(tokens: AbstractSequence[Any], name: str) -> None:
    for at, token in enumerate(tokens):
        try:
            value = index(token)
        except TypeError:
            raise ArgumentTypeError(f"{name}[{at}] is a {type(token).__name__}, not an int") from None
        if not 0 <= value <= MAX_TOKEN:
            raise ArgumentError(f"{name}[{at}] is {token}; token ids are 0 .. {MAX_TOKEN}")
