"""Captures of servers' event streams: what was stored, in order, as the requests that must have been behind it.

An event says which blocks a server computed, and after which. So a request is the chain of blocks up to there, and what
it found in the cache is part of it; one that found everything has left no event, and is not seen. Blocks that are
stored one at a time after a request's own are its output; more at a time, within two seconds, are further pieces of its
prompt. Tokens of blocks that were stored before the capture began are not known: one block stands for all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvist.core.extents import Namespace
from kvist.errors import TraceError
from kvist.lab.traces.fields import Malformed, token_ids
from kvist.lab.traces.requests import HashedPrompt, Request, TokenPrompt, salt_of
from kvist.lab.traces.streams import Source
from kvist.wire import decode_line
from kvist.wire.records import AllCleared, Hash, Record, RemovedBlocks, StoredBlocks

__all__ = ["is_kvist", "is_trtllm", "is_vllm", "read"]

MAX_OPEN = 256
MAX_BLOCKS = 2**20
"""So many blocks are known, about 300 bytes each, where a capture does not tell of those that were removed."""
MAX_PAUSE_S = 2.0


@dataclass(slots=True)
class Stored:
    """A block that the server has: the one before it, and its tokens, packed."""

    parent: Hash | None
    tokens: bytes


@dataclass(slots=True)
class Behind:
    """A request that is being put together: its prompt, and what came after it."""

    arrival_s: float
    prompt: bytes
    namespace: Namespace
    line: int
    latest_s: float
    tip: Hash = 0
    output: bytearray = field(default_factory=bytearray)

    def go_on(self, pieces: list[bytes], time_s: float) -> None:
        """Add what came next: one block of output, or more of the prompt."""
        if len(pieces) == 1:
            self.output += pieces[0]
        else:
            self.prompt, self.output = b"".join([self.prompt, self.output, *pieces]), bytearray()
        self.latest_s = time_s

    def request(self) -> Request:
        """Return it as it is known now."""
        output = np.frombuffer(bytes(self.output), np.int32)
        prompt = TokenPrompt(np.frombuffer(self.prompt, np.int32))
        return Request(
            prompt, self.arrival_s, len(output), output if len(output) else None, self.namespace, line=self.line
        )


class Capture:
    """Puts the requests of one capture together; holds the blocks that the server has, and the latest requests."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._blocks: dict[Hash, Stored] = {}
        self._open: dict[int, Behind] = {}
        self._tips: dict[Hash, int] = {}
        self._num_begun = 0
        self._group: int | None = None
        self._first_s: float | None = None
        self._num_unseen = 0

    def requests(self, records: Iterator[tuple[int, Record]]) -> Iterator[Request]:
        """Yield requests in the order in which their first blocks were stored."""
        for line, record in records:
            if isinstance(record, StoredBlocks):
                with self._source.trying(line):
                    self._store(record, line)
            elif isinstance(record, RemovedBlocks) and record.tier in (None, "device"):
                for each in record.hashes:
                    self._blocks.pop(each, None)
            elif isinstance(record, AllCleared) and record.tier in (None, "device"):
                self._blocks.clear()
            while len(self._open) > MAX_OPEN:
                oldest = next(iter(self._open))
                yield self._open[oldest].request()
                self._tips.pop(self._open.pop(oldest).tip, None)
        for behind in self._open.values():
            yield behind.request()
        if self._num_unseen:
            self._source.problems.note(
                f"{self._source.path}: {self._num_unseen:,} events go on from blocks that were stored before the "
                "capture began; one block stands for what came before"
            )

    def _store(self, record: StoredBlocks, line: int) -> None:
        """Take what one event tells. Groups other than the first one repeat it; other tiers only copy."""
        self._group = record.group if self._group is None else self._group
        if record.group != self._group or record.tier not in (None, "device") or not record.hashes:
            return
        pieces, time_s, parent = _pieces(record), self._time_of(record), record.parent
        number = self._continued(parent, len(pieces), time_s)
        if number is None:
            before = self._tokens_up_to(parent, len(pieces[0]))
            behind = Behind(time_s, before + b"".join(pieces), _namespace(record), line, time_s)
            number, self._num_begun = self._num_begun, self._num_begun + 1
            self._open[number] = behind
        else:
            behind = self._open[number]
            behind.go_on(pieces, time_s)
            self._tips.pop(behind.tip)
        behind.tip = record.hashes[-1]
        self._tips[behind.tip] = number
        for name, piece in zip(record.hashes, pieces, strict=True):
            self._blocks[name] = Stored(parent, piece)
            parent = name
        while len(self._blocks) > MAX_BLOCKS:
            del self._blocks[next(iter(self._blocks))]

    def _continued(self, parent: Hash | None, num_blocks: int, time_s: float) -> int | None:
        """Return the number of the open request that goes on with these blocks, None if they begin one."""
        number = None if parent is None else self._tips.get(parent)
        if number is None or (num_blocks > 1 and time_s - self._open[number].latest_s > MAX_PAUSE_S):
            return None
        return number

    def _tokens_up_to(self, name: Hash | None, num_bytes: int) -> bytes:
        """Return the packed tokens up to and including a block; what is not known is one block that stands for it."""
        pieces = []
        while name is not None:
            block = self._blocks.pop(name, None)
            if block is None:
                self._num_unseen += 1
                pieces.append(_stand_in(name, num_bytes))
                break
            self._blocks[name] = block  # the last that was used
            pieces.append(block.tokens)
            name = block.parent
        return b"".join(reversed(pieces))

    def _time_of(self, record: Record) -> float:
        if record.time_s is None:
            return 0.0
        self._first_s = record.time_s if self._first_s is None else self._first_s
        return max(0.0, record.time_s - self._first_s)


def read(source: Source, protocol: str) -> Iterator[Request]:
    """Yield the requests behind a capture; `protocol` is one of `kvist.wire.FORMATS`."""
    return Capture(source).requests(_records(source, protocol))


def is_vllm(value: Any) -> bool:
    """Whether a line that is no JSON, as bytes, looks like a batch of vLLM's events in base64."""
    if not isinstance(value, bytes):
        return False
    try:
        return bool(decode_line(value.strip(), "vllm"))
    except (ValueError, ModuleNotFoundError):  # without msgspec it can still be named, and says then what is missing
        return False


def is_trtllm(value: Any) -> bool:
    """Whether a JSON value looks like an event of TensorRT-LLM, or a list of them."""
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, dict) and "event_id" in first and isinstance(first.get("data"), dict)


def is_kvist(value: Any) -> bool:
    """Whether a JSON value looks like an event of Kvist."""
    return isinstance(value, dict) and isinstance(value.get("event"), str) and ("worker" in value or "hashes" in value)


def _records(source: Source, protocol: str) -> Iterator[tuple[int, Record]]:
    if protocol == "vllm":
        _check_msgspec(source)
        for line, content in source.lines():
            yield from ((line, each) for each in _decoded(source, line, content.strip(), protocol))
        return
    for line, value in source.values():
        yield from ((line, each) for each in _decoded(source, line, json.dumps(value), protocol))


def _check_msgspec(source: Source) -> None:
    try:
        import kvist.wire.msgpack  # noqa: F401
    except ModuleNotFoundError as missing:
        told = f"has batches of vLLM's events, which need {missing.name}; pip install 'kvist[lab]'"
        raise TraceError(told, file=str(source.path)) from missing


def _decoded(source: Source, line: int, content: str | bytes, protocol: str) -> list[Record]:
    with source.trying(line):
        return decode_line(content, protocol)
    return []


def _pieces(record: StoredBlocks) -> list[bytes]:
    """Return the packed tokens of each block of an event."""
    num_blocks = len(record.hashes)
    tokens = token_ids(list(record.tokens), "token_ids") & np.int32(0x7FFFFFFF)
    if not len(tokens) or len(tokens) % num_blocks:
        raise Malformed("blocks without their tokens", f"{num_blocks} blocks have {len(tokens)} tokens")
    packed, step = tokens.tobytes(), 4 * len(tokens) // num_blocks
    pieces = [packed[start : start + step] for start in range(0, len(packed), step)]
    if not record.media:
        return pieces
    return [
        _stand_in(name, step) if media else piece
        for name, media, piece in zip(record.hashes, record.media, pieces, strict=True)
    ]


def _stand_in(name: Hash, num_bytes: int) -> bytes:
    """Return packed tokens for a block of which the tokens do not say all, such as one with a part of an image."""
    return HashedPrompt(np.array([salt_of(repr(name))]), num_bytes // 4, num_bytes // 4).tokens().tobytes()


def _namespace(record: StoredBlocks) -> Namespace:
    """Return what keeps contents apart, as far as the protocol says it."""
    if record.namespace is not None:
        return record.namespace
    parts = (record.lora_name, record.lora_id, record.salt)
    return tuple(f"{name}={part}" for name, part in zip(("lora", "lora_id", "salt"), parts, strict=True) if part)
