"""The fields of a line of a trace, checked as they are read: what is wrong is said with the field and what it has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvist.core.tokens import MAX_TOKEN

__all__ = [
    "MAX_BLOCK_SIZE", "MAX_PROMPT_TOKENS", "MAX_SECONDS", "Malformed", "block_size", "count", "first_of", "hash_ids",
    "prompt_length", "seconds", "text", "token_ids",
]  # fmt: skip

WORD = 2**64
MAX_PROMPT_TOKENS = 2**24
"""More than any model reads; what stands for them takes 400 MB of memory."""
MAX_SECONDS = 1e15
"""More than any clock says; beyond it a second is not told from the next."""
MAX_BLOCK_SIZE = 2**20
"""Tokens that a block of a trace may have; a manager holds as many for each sequence."""


class Malformed(ValueError):
    """A line cannot be used: `reason` is the same for all lines with this fault, `detail` is of this one."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason, self.detail = reason, detail
        super().__init__(reason, detail)


def first_of(fields: dict[str, Any], names: Iterable[str]) -> Any:
    """Return the value of the first of these fields that is there and not null, else None."""
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def count(fields: dict[str, Any], name: str, default: int | None = None) -> int:
    """Return a field that counts something: an int, 0 or more."""
    value = _value(fields, name, default)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not 0 <= value < 2**31:
        raise Malformed(*_wrong(fields, name, "a count"))
    return value


def seconds(fields: dict[str, Any], name: str, scale: float = 1.0, default: float | None = None) -> float:
    """Return a field that is a time, times `scale`, in seconds: 0 or more, and finite."""
    value = _value(fields, name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_SECONDS / scale:
        raise Malformed(*_wrong(fields, name, "a time"))
    return value * scale


def prompt_length(fields: dict[str, Any], name: str) -> int:
    """Return a field that counts the tokens of a prompt: no more than any model reads, and memory holds."""
    length = count(fields, name)
    if not length:
        raise Malformed("no tokens", f"{name} is 0")
    if length > MAX_PROMPT_TOKENS:
        raise Malformed("a prompt too long", f"{name} is {length:,}, must be at most {MAX_PROMPT_TOKENS:,}")
    return length


def block_size(fields: dict[str, Any], default: int | None = None) -> int:
    """Return the field `block_size`, in tokens."""
    size = count(fields, "block_size", default)
    if not 1 <= size <= MAX_BLOCK_SIZE:
        raise Malformed(f"block_size is not 1 .. {MAX_BLOCK_SIZE:,}", f"got {size:,}")
    return size


def text(fields: dict[str, Any], name: str, default: str = "") -> str:
    """Return a field that is text; a number is the text that it is written as."""
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise Malformed(*_wrong(fields, name, "text"))
    return str(value)


def token_ids(value: Any, name: str) -> NDArray[np.int32]:
    """Return a list of token ids as an array, `[num_tokens]`."""
    ids = _ints(value, name)
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) > MAX_TOKEN):
        raise Malformed(f"{name} has what is no token id", f"token ids are 0 .. {MAX_TOKEN}")
    return ids.astype(np.int32)


def hash_ids(value: Any, name: str) -> NDArray[np.int64]:
    """Return a list of ids of blocks, `[num_blocks]`: ints of 64 bits, those from 2**63 up as if they were signed."""
    ids = _ints(value, name)
    return ids.view(np.int64) if ids.dtype == np.uint64 else ids.astype(np.int64, copy=False)


def _ints(value: Any, name: str) -> NDArray[Any]:
    if not isinstance(value, list):
        raise Malformed(f"no {name}" if value is None else f"{name} is no list", f"got {value!r:.60}")
    if not value:
        return np.empty(0, np.int64)
    try:
        ids = np.array(value)
    except (ValueError, OverflowError):
        ids = np.array(None)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        odd = next((each for each in value if type(each) is not int or not -(2**63) <= each < WORD), value)
        raise Malformed(f"{name} is no list of ints", f"got {odd!r:.60}")
    return ids


def _value(fields: dict[str, Any], name: str, default: float | None) -> Any:
    """Return a field, or the default where it is missing or null."""
    value = fields.get(name)
    return default if value is None else value


def _wrong(fields: dict[str, Any], name: str, expected: str) -> tuple[str, str]:
    if name not in fields:
        return f"no {name}", f"the fields are {', '.join(fields) or 'none'}"[:120]
    return f"{name} is not {expected}", f"got {fields[name]!r:.60}"
