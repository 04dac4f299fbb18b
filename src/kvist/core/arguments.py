"""Checks of arguments that any state of the cache would refuse."""

from array import array
from collections.abc import Iterable
from math import isfinite
from operator import index
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvist.core.extents import Namespace
from kvist.errors import ArgumentError, ArgumentTypeError

__all__ = [
    "as_count",
    "as_counts",
    "as_int_array",
    "check_lifetime",
    "check_namespace",
    "check_num_beams",
    "is_one_token_each",
]

MAX_COUNT = 2**62


def check_namespace(namespace: Namespace) -> None:
    """Raise ArgumentTypeError unless it is a tuple of strings, ints and bytes.

    Types are compared exactly: True equals 1 and 1.0, and would name the same namespace.
    """
    if type(namespace) is tuple and (not namespace or all(type(part) in (str, int, bytes) for part in namespace)):
        return
    raise ArgumentTypeError(f"namespace is {namespace!r}, must be a tuple of strings, ints and bytes")


def check_num_beams(num_beams: int) -> None:
    """Raise ArgumentError unless it is a positive int."""
    if type(num_beams) is not int or num_beams < 1:
        raise ArgumentError(f"num_beams is {num_beams!r}, must be an int of at least 1")


def check_lifetime(lifetime_s: float | None) -> None:
    """Raise ArgumentError unless it is None or seconds."""
    if lifetime_s is None:
        return
    if isinstance(lifetime_s, bool) or not isinstance(lifetime_s, int | float):
        raise ArgumentTypeError(f"lifetime_s is {lifetime_s!r}, must be seconds or None")
    if not isfinite(lifetime_s) or lifetime_s < 0:
        raise ArgumentError(f"lifetime_s is {lifetime_s}, must not be negative")


def is_one_token_each(tokens: Any) -> bool:
    """Say whether tokens are one for each sequence, rather than an array for each."""
    if isinstance(tokens, np.ndarray):
        return tokens.ndim <= 1
    if isinstance(tokens, list | tuple):
        return not tokens or isinstance(tokens[0], int | np.integer)
    return not isinstance(tokens, Iterable) or isinstance(tokens, array | memoryview | bytes)


def as_count(n: Any, name: str) -> int:
    """Return a non-negative int, or say what is wrong with it."""
    if isinstance(n, bool | np.bool_):
        raise ArgumentTypeError(f"{name} is {n!r}, must be an int")
    try:
        value = index(n)
    except TypeError:
        raise ArgumentTypeError(f"{name} is {n!r}, must be an int") from None
    if value < 0:
        raise ArgumentError(f"{name} is {value}, must not be negative")
    return value


def as_counts(n: ArrayLike, length: int, name: str) -> NDArray[np.int64]:
    """Return non-negative ints `[length]`, from one for all or one for each.

    What is so large that adding to it could overflow is cut off.
    """
    counts = as_int_array(n, name)
    if counts.ndim and counts.shape != (length,):
        raise ArgumentError(f"{name} has shape {counts.shape}, must be one int or one for each of {length} sequences")
    if counts.size and int(counts.min()) < 0:
        raise ArgumentError(f"{name} holds {int(counts.min())}, must not be negative")
    wide = counts.astype(np.uint64)
    return np.broadcast_to(np.minimum(wide, np.uint64(MAX_COUNT)).astype(np.int64), (length,))


def as_int_array(n: ArrayLike, name: str) -> NDArray[np.integer[Any]]:
    """Return ints of any shape and type as an array, or say what is wrong with them."""
    try:
        ints = np.asarray(n)
    except ValueError:
        raise ArgumentTypeError(f"{name} is {n!r}, must be ints, in lists of equal length") from None
    if ints.dtype.kind not in "iu" and ints.size:
        raise ArgumentTypeError(f"{name} must hold ints, not {ints.dtype}")
    return ints
