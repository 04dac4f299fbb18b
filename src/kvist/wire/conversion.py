"""Events from one protocol to another: Kvist's own to any, and any of them to any other.

Formats are "kvist" (JSON lines), "trtllm" and "dynamo" (JSON), and "vllm", "vllm-array", "sglang" and "mooncake"
(MessagePack; in text, such as files and pipes, a batch is a line of base64).
"""

from __future__ import annotations

import binascii
import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

from kvist.core.events import Event
from kvist.errors import ArgumentError, KvistError, WireError
from kvist.wire.recording import Recorder
from kvist.wire.records import Record

__all__ = ["FORMATS", "Converter", "Encoder", "convert", "decode_line"]


@dataclass(frozen=True, slots=True)
class _Format:
    """How records are read from and written to the messages of a protocol; `is_binary` messages are bytes."""

    module: str
    is_binary: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def call(self, name: str) -> Callable[..., Any]:
        """Return a function of the module."""
        found: Callable[..., Any] = getattr(import_module(f"kvist.wire.{self.module}"), name)
        return found


FORMATS = {
    "kvist": _Format("jsonl"),
    "vllm": _Format("vllm", is_binary=True),
    "vllm-array": _Format("vllm", is_binary=True, options=(("form", "array"),)),
    "sglang": _Format("sglang", is_binary=True),
    "trtllm": _Format("trtllm"),
    "dynamo": _Format("dynamo"),
    "mooncake": _Format("mooncake", is_binary=True),
}
"""The names of the formats."""


class Converter:
    """Writes records in one format, in order; it knows what is stored, to say in the words of the format what it lacks.

    `remembers` keeps the tokens of what is stored as well, which is needed where the source says moves without them, as
    TensorRT-LLM does. Other arguments go to the format's `encode`. Where a format counts events, they are counted here,
    and a gap in the ids of the records is a gap in those that go out.
    """

    def __init__(self, target: str, *, remembers: bool = False, **options: Any) -> None:
        self._format = _format(target)
        self._keeps_all = target == "kvist"
        self._narrowing = None if self._keeps_all else self._format.call("narrowing")(remembers=remembers)
        self._encode = partial(self._format.call("encode"), **dict(self._format.options), **options)
        self._counts = target in ("trtllm", "dynamo", "mooncake")
        self._next: dict[tuple[str, int | None], tuple[int | None, int]] = {}
        self._num_said = 0

    def encode(self, records: Iterable[Record]) -> bytes:
        """Return a message of these records: a batch, lines, or a JSON array.

        Raises ArgumentError for values that the format cannot say, such as ints of more than 64 bits in MessagePack.
        """
        try:
            return self._message(records)
        except KvistError:
            raise
        except (IndexError, OverflowError, RecursionError, TypeError, ValueError) as error:
            raise ArgumentError(f"a value cannot be said in this format: {error}") from error

    def _message(self, records: Iterable[Record]) -> bytes:
        if self._narrowing is None:
            lines: str = self._encode(records)
            return lines.encode()
        if self._counts and not self._format.is_binary:
            return json.dumps(self._counted(records), separators=(",", ":")).encode()
        if self._counts:
            told = [replace(each, id=number) for each, number in self._numbered(records)]
        else:
            told = list(self._narrowing.narrow(records))
        batch: bytes = self._encode(told)
        return batch

    def _counted(self, records: Iterable[Record]) -> list[Any]:
        """Return the events of records, JSON objects, each with the id of the next."""
        found: list[Any] = []
        for each, number in self._numbered(records):
            events = self._encode([replace(each, id=None)], first_id=number)
            self._num_said = len(events)
            found += events
        return found

    def _numbered(self, records: Iterable[Record]) -> Iterator[tuple[Record, int]]:
        """Yield what takes the place of records in the format, and the id of its first event.

        Whoever takes one sets `_num_said` to the number of its events, where that is not one for each block.
        """
        assert self._narrowing is not None
        for record in records:
            stream = (record.worker, record.rank)
            last, number = self._next.get(stream, (None, record.id or 0))
            if record.id is not None and last is not None and record.id > last + 1:
                number += record.id - last - 1
            for each in self._narrowing.narrow([record]):
                self._num_said = len(getattr(each, "hashes", (None,)))
                yield each, number
                number += self._num_said
            self._next[stream] = (record.id, number)


class Encoder:
    """Encodes Kvist's events in a format: call it with events, in the order of their log, and it returns a message.

    >>> encode = Encoder("kvist")
    >>> encode([])
    b''
    """

    def __init__(self, target: str, recorder: Recorder | None = None, **options: Any) -> None:
        self._recorder = recorder or Recorder()
        self._converter = Converter(target, **options)

    def __call__(self, events: Iterable[Event]) -> bytes:
        """Return the message of these events."""
        return self._converter.encode(self._recorder.records(events))


def decode_line(line: str | bytes, source: str, *, worker: str = "") -> list[Record]:
    """Return the records of one line of text in a format; raises WireError for what is none."""
    found = _format(source)
    if found.is_binary:
        try:
            message = b64decode(line, validate=True)
        except (binascii.Error, ValueError) as error:
            raise WireError(f"line: expected base64, got {line[:40]!r}: {error}") from error
        records: list[Record] = found.call("decode")(message, worker=worker)
    elif source == "kvist":
        records = found.call("decode")([line], worker=worker)
    else:
        records = found.call("loads")(line, worker=worker)
    return records


def convert(lines: Iterable[str | bytes], source: str, target: str, **options: Any) -> Iterator[str]:
    """Yield lines of text in one format for those in another, without their ends; empty lines are left out.

    In "trtllm" and "dynamo" a line is an event or an array of them, and goes out as one event a line. Raises WireError
    for what is not of the source, ArgumentError for a format that there is not.
    """
    converter = Converter(target, remembers=source != "kvist" and target != "kvist", **options)
    for line in lines:
        text = line.strip()
        if text:
            yield from _lines(converter.encode(decode_line(text, source)), target)


def _lines(message: bytes, target: str) -> list[str]:
    if _format(target).is_binary:
        return [b64encode(message).decode()]
    text = message.decode()
    if target == "kvist":
        return text.splitlines()
    return [json.dumps(each, separators=(",", ":")) for each in json.loads(text)]


def _format(name: str) -> _Format:
    found = FORMATS.get(name)
    if found is None:
        raise ArgumentError(f"format {name!r} is not one of {', '.join(FORMATS)}")
    return found
