"""Arguments of calls as JSON and back: arrays as their bytes, sequences and pins as numbers, never as code.

Everything but numbers, text, None and lists is an object with one key that says what it is.
"""

from __future__ import annotations

import json
import re
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvist.core.forecast import Forecast, Step
from kvist.core.identity import Media
from kvist.core.matching import Pin, PrefixMatch
from kvist.core.retention import Retention
from kvist.core.sequences import Sequence
from kvist.errors import WireError

__all__ = ["MALFORMED", "Names", "Values", "compact"]

MIN_NARROWED = 256
"""Shorter arrays are not worth a look whether fewer bytes hold them."""
MAX_FORGOTTEN = 4096
NOT_HERE = -1
PLAIN_DTYPE = re.compile(r"[<>|=]?[a-zA-Z]\d{0,4}(\[\w{1,9}\])?")
"""As `numpy.dtype.str` is; NumPy would read much more."""
MAX_ITEM_BYTES = 1024
"""Numbers and short text: what an element of an array has at most."""
MALFORMED = (TypeError, ValueError, LookupError, AttributeError, OverflowError, RecursionError)
"""What reading raises where the JSON is not what was written."""

compact = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class Names:
    """Numbers for the sequences and pins of one manager, in the order in which it made them.

    Of those that have ended the latest are remembered; others are known as ended, and nothing more.
    """

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._things: dict[int, Any] = {}
        self._next = 0
        self._sweep_at = 2 * MAX_FORGOTTEN

    def add(self, thing: Sequence | Pin) -> None:
        """Give the next number to a sequence or a pin that has none."""
        if thing in self._numbers:
            return
        self._numbers[thing], self._things[self._next] = self._next, thing
        self._next += 1
        if len(self._things) >= self._sweep_at:
            self._sweep()

    def number(self, thing: Sequence | Pin) -> int:
        """Return its number, -1 for one that is not known."""
        return self._numbers.get(thing, NOT_HERE)

    def thing(self, number: int) -> Any:
        """Return what has a number, None if that is not known any more."""
        return self._things.get(number)

    def _sweep(self) -> None:
        for number, thing in list(self._things.items()):
            if number < self._next - MAX_FORGOTTEN and _has_ended(thing):
                del self._things[number], self._numbers[thing]
        self._sweep_at = 2 * len(self._things) + MAX_FORGOTTEN


def _has_ended(thing: Sequence | Pin) -> bool:
    return thing.is_released if isinstance(thing, Pin) else not (thing.is_live or thing.is_suspended)


class Foreign:
    """Stands for an argument of a type that no call takes."""


class Values:
    """Writes and reads the arguments of one manager's calls."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self._writers: dict[type, Callable[[Any], Any]] = {
            type(None): _same, bool: _same, int: _same, float: _same, str: _same,
            list: self._write_list,
            tuple: lambda value: {"tuple": self._write_each(value)},
            dict: lambda value: {"dict": self._write_each([key for item in value.items() for key in item])},
            range: lambda value: {"range": [value.start, value.stop, value.step]},
            bytes: lambda value: {"bytes": _text(value)},
            bytearray: lambda value: {"bytearray": _text(value)},
            np.ndarray: self._write_array,
            array: lambda value: {"typed": [value.typecode, _text(value.tobytes())]},
            Sequence: lambda value: {"sequence": names.number(value)},
            Pin: lambda value: {"pin": names.number(value)},
            PrefixMatch: lambda value: {"match": self._write_each(value)},
            Media: lambda value: {"media": self._write_each([value.offset, value.length, value.key])},
            Retention: lambda value: {
                "retention": self._write_each([value.ranges, value.decode_priority, value.decode_duration_s])
            },
        }  # fmt: skip
        self._readers: dict[str, Callable[[Any], Any]] = {
            "tuple": lambda told: tuple(map(self.read, told)),
            "dict": lambda told: dict(zip(map(self.read, told[::2]), map(self.read, told[1::2]), strict=True)),
            "range": lambda told: range(*told),
            "bytes": b64decode,
            "bytearray": lambda told: bytearray(b64decode(told)),
            "memory": lambda told: memoryview(b64decode(told[1])).cast(told[0]),
            "array": _read_array,
            "objects": lambda told: self._read_objects(*told),
            "scalar": lambda told: _read_array(told)[()],
            "typed": lambda told: array(told[0], b64decode(told[1])),
            "sequence": self._read_sequence,
            "sequences": lambda told: list(map(self._read_sequence, told)),
            "pin": self._read_pin,
            "match": lambda told: PrefixMatch(*map(self.read, told)),
            "media": lambda told: Media(*map(self.read, told)),
            "retention": lambda told: Retention(*map(self.read, told)),
            "forecast": lambda told: [Step(*map(self.read, step)) for step in told],
            "foreign": lambda _: Foreign(),
        }

    def write(self, value: Any) -> Any:
        """Return a value as JSON can say it."""
        writer = self._writers.get(type(value))
        return writer(value) if writer is not None else self._write_other(value)

    def read(self, told: Any) -> Any:
        """Return the value that was written; raises WireError for what was not."""
        if type(told) is list:
            return list(map(self.read, told))
        if type(told) is not dict:
            return told
        ((kind, content),) = told.items() if len(told) == 1 else (("", None),)
        if kind not in self._readers:
            raise WireError(f"argument: expected one of {', '.join(self._readers)}, got {kind or told!r}")
        return self._readers[kind](content)

    def _write_each(self, values: Any) -> list[Any]:
        return list(map(self.write, values))

    def _write_list(self, values: list[Any]) -> Any:
        kinds = set(map(type, values))
        if kinds == {int}:
            return values
        if kinds == {Sequence}:
            return {"sequences": list(map(self.names.number, values))}
        return self._write_each(values)

    def _write_array(self, values: NDArray[Any]) -> Any:
        if values.dtype.hasobject:
            return {"objects": [list(values.shape), self._write_each(values.ravel().tolist())]}
        narrow = _narrowed(values) if values.dtype.kind in "iu" and values.size >= MIN_NARROWED else values
        return {"array": [values.dtype.str, narrow.dtype.str, list(values.shape), _text(narrow.tobytes())]}

    def _write_other(self, value: Any) -> Any:
        if isinstance(value, np.generic):
            return {"scalar": self._write_array(np.asarray(value)).get("array")}
        if isinstance(value, Forecast):
            return {"forecast": list(map(self._write_each, value.steps))}
        if isinstance(value, memoryview):
            return {"memory": [value.format, _text(value.tobytes())]}
        kinds: tuple[Any, ...] = (bool, int, float, str, list, tuple, np.ndarray)
        for kind in kinds:
            if isinstance(value, kind):
                return self._writers[kind](np.asarray(value) if kind is np.ndarray else kind(value))
        if hasattr(value, "__array__"):
            return self._write_array(np.asarray(value))
        if hasattr(value, "__iter__"):
            return self._write_list(list(value))
        return {"foreign": type(value).__name__}

    def _read_sequence(self, number: int) -> Any:
        known = self.names.thing(number)
        return _ended_sequence() if known is None else known

    def _read_pin(self, number: int) -> Any:
        known = self.names.thing(number)
        return known if isinstance(known, Pin) else _ended_pin()

    def _read_objects(self, shape: list[int], told: list[Any]) -> NDArray[Any]:
        values = np.empty(len(told), object)
        values[:] = list(map(self.read, told))
        return values.reshape(shape)


def _same(value: Any) -> Any:
    return value


def _text(content: bytes | bytearray) -> str:
    return b64encode(content).decode()


def _narrowed(values: NDArray[Any]) -> NDArray[Any]:
    """Return integers in the smallest unsigned dtype that holds them, or as they are."""
    low, high = values.min(), values.max()
    for dtype in ("u1", "<u2", "<u4"):
        if low >= 0 and high <= np.iinfo(dtype).max and np.dtype(dtype).itemsize < values.itemsize:
            return values.astype(dtype)
    return values


def _read_array(told: list[Any]) -> NDArray[Any]:
    dtype, narrow, shape, content = told
    for each in (dtype, narrow):
        if not isinstance(each, str) or not PLAIN_DTYPE.fullmatch(each):
            raise WireError(f"array: expected a plain dtype such as '<i8', got {str(each)[:80]!r}")
        if np.dtype(each).itemsize > MAX_ITEM_BYTES:
            raise WireError(f"array: expected elements of at most {MAX_ITEM_BYTES} bytes, got {each}")
    return np.frombuffer(b64decode(content), narrow).astype(dtype).reshape(shape)


def _ended_sequence() -> Sequence:
    """Return a sequence that no manager knows."""
    ended = Sequence.__new__(Sequence)
    ended.row, ended._suspended, ended._beams = -1, None, None
    return ended


def _ended_pin() -> Pin:
    def release(_pin: Pin) -> None:
        raise AssertionError("nobody holds this pin")

    ended = Pin(release, (), 0, None)
    ended.is_released = True
    return ended
