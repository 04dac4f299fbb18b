"""Values of trace files, plain, gz or zst, one at a time; no line is held that is longer than a line may be."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, TypeVar, cast

from kvist.errors import TraceError, WireError
from kvist.lab.traces.fields import Malformed
from kvist.lab.traces.problems import Problems

__all__ = ["MAX_LINE_BYTES", "Source", "created", "first_byte", "opened", "uncompressed"]

T = TypeVar("T")

MAX_LINE_BYTES = 64 * 2**20
"""A line (or a value of a JSON array) that is longer is malformed. It could have 6 million token ids."""
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
PIECE_BYTES = 1 << 16
ZSTD_PIECE_BYTES = 1 << 12
"""As packed: what a piece unpacks to is held, and may be ten thousand times as long."""
NUM_HEADS = 100
HALF = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""Where half of a surrogate pair may be: JSON can say it, but it is no character, and no file or hash can have it."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file that is being read, and where its problems go."""

    path: Path
    problems: Problems

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the lines that are not blank, with their numbers."""
        with opened(self.path) as file:
            for number, line in enumerate(_bounded_lines(file), 1):
                if len(line) > MAX_LINE_BYTES:
                    self.add(number, "line too long", f"more than {MAX_LINE_BYTES:,} bytes")
                elif line.strip():
                    yield number, line

    def values(self) -> Iterator[tuple[int, Any]]:
        """Yield the JSON values: one a line, or those of one array, however it is laid out."""
        if first_byte(self.path) == b"[":
            yield from self._array_values()
            return
        for number, line in self.lines():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                self.add(number, "no JSON", f"{error}, in {line[:60]!r}")
                continue
            if _is_unicode(value, line):
                yield number, value
            else:
                self.add(number, "text that is no Unicode", f"{line[:60]!r}")

    def heads(self) -> Iterator[tuple[int, Any]]:
        """Yield the first values, JSON or else lines as they are, without complaint; enough to tell what this is."""
        if first_byte(self.path) == b"[":
            yield from islice(self._array_values(), NUM_HEADS)
            return
        for number, line in islice(self.lines(), NUM_HEADS):
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError):
                yield number, line

    def objects(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the JSON objects, with their lines."""
        for number, value in self.values():
            if isinstance(value, dict):
                yield number, value
            else:
                self.add(number, "no JSON object", f"got {value!r:.60}")

    def each(self, read: Callable[[dict[str, Any], int], T]) -> Iterator[T]:
        """Yield what `read(object, line)` makes of each object; those for which it raises Malformed are problems."""
        for number, value in self.objects():
            with self.trying(number):
                yield read(value, number)

    def each_of(self, read: Callable[[dict[str, Any], int], Iterable[T]]) -> Iterator[T]:
        """Yield all that `read(object, line)` makes of each object; what raises Malformed is a problem."""
        for number, value in self.objects():
            with self.trying(number):
                yield from read(value, number)

    @contextmanager
    def trying(self, line: int) -> Iterator[None]:
        """Make a problem of this line of a Malformed or a WireError that is raised within."""
        try:
            yield
        except Malformed as error:
            self.add(line, error.reason, error.detail)
        except WireError as error:
            self.add(line, "not of this protocol", str(error))

    def add(self, line: int, reason: str, detail: str = "") -> None:
        """Count a problem of this file, or raise it as TraceError."""
        self.problems.add(str(self.path), line, reason, detail)

    def _array_values(self) -> Iterator[tuple[int, Any]]:
        """Yield the values of arrays, one after another, that are the whole file, holding one value at a time.

        What is no JSON inside of one ends the file, since nothing says where the next value begins.
        """
        decoder = json.JSONDecoder()
        with opened(self.path) as file:
            pieces = _Pieces(file)
            while pieces.skip(b"["):
                while pieces.ahead() not in (b"]", b""):
                    line = pieces.line
                    try:
                        value, content = pieces.value(decoder)
                    except (ValueError, RecursionError) as error:
                        self.add(line, "no JSON", f"in an array: {error}")
                        return
                    if _is_unicode(value, content.encode()):
                        yield line, value
                    else:
                        self.add(line, "text that is no Unicode", f"{content[:60]!r}")
                    pieces.skip(b",")
                if not pieces.skip(b"]"):
                    self.add(pieces.line, "no JSON", "the array has no end")
            if pieces.ahead():
                self.add(pieces.line, "no JSON", "something follows the array")


def _is_unicode(value: Any, content: bytes) -> bool:
    """Say whether all text of a JSON value can be written again: whether it has no half of a surrogate pair."""
    if not HALF.search(content):
        return True
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


class _Pieces:
    """Text of which the beginning is held, enough for the value that is being read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._text = ""
        self._left = b""
        self._at = 0
        self.line = 1

    def ahead(self) -> bytes:
        """Return the next byte that is no space, b"" at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at].isspace():
                self.line += self._text[self._at] == "\n"
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at].encode()
            if not self._more(PIECE_BYTES):
                return b""

    def skip(self, expected: bytes) -> bool:
        """Go past this byte, if it comes next; returns whether it did."""
        if self.ahead() != expected:
            return False
        self._at += 1
        return True

    def value(self, decoder: json.JSONDecoder) -> tuple[Any, str]:
        """Return the value that begins here, and its text; more is read until it is whole."""
        value, end = None, -1
        while end < 0:
            try:
                value, end = decoder.raw_decode(self._text, self._at)
                if end == len(self._text) and self._more(PIECE_BYTES):  # a number may go on
                    end = -1
            except json.JSONDecodeError:
                held = len(self._text) - self._at
                if held > MAX_LINE_BYTES or not self._more(max(PIECE_BYTES, held)):
                    raise
        content = self._text[self._at : end]
        self.line += content.count("\n")
        self._at = end
        return value, content

    def _more(self, num_bytes: int) -> bool:
        """Let go of what was read, and hold more; returns whether there was any."""
        piece = self._file.read(num_bytes)
        whole = self._left + piece
        cut = len(whole) if not piece else _whole_characters(whole)
        self._text, self._at = self._text[self._at :] + whole[:cut].decode("utf-8", "replace"), 0
        self._left = whole[cut:]
        return bool(piece)


def _whole_characters(content: bytes) -> int:
    """Return how many bytes are whole characters of UTF-8: a last one that is cut off is left for later."""
    for back in range(1, min(4, len(content)) + 1):
        byte = content[-back]
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(content) - back if needed > back else len(content)
        if byte < 0x80:
            break
    return len(content)


def _bounded_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield lines; of one that is too long only its beginning, one byte longer than it may be."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        yield line
        rest = line
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES + 1)


def first_byte(path: Path) -> bytes:
    """Return the first byte of the content that is no space, b"" if there is none."""
    with opened(path) as file:
        while piece := file.read(PIECE_BYTES):
            if found := piece.lstrip().removeprefix(b"\xef\xbb\xbf")[:1]:
                return found
    return b""


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading; its first bytes say whether it is gz or zst.

    Raises TraceError where it cannot be read, or is damaged.
    """
    damages = _damages()
    try:
        with path.open("rb") as raw:
            head = raw.read(4)
            raw.seek(0)
            with _decompressed(raw, head) as file:
                yield file
    except damages as error:
        raise TraceError(f"cannot be read: {error}", file=str(path)) from error


@contextmanager
def uncompressed(path: Path) -> Iterator[Path]:
    """Give a path to the same content, not compressed: itself, or a temporary copy."""
    with path.open("rb") as raw:
        head = raw.read(4)
    if not head.startswith(GZIP) and head != ZSTD:
        yield path
        return
    with TemporaryDirectory() as folder, opened(path) as packed:
        copy = Path(folder) / path.name
        with copy.open("wb") as file:
            shutil.copyfileobj(packed, file)
        yield copy


@contextmanager
def created(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file for writing; gz or zst if its name ends so. A gz has no time in it: same content, same bytes."""
    path = Path(path)
    with path.open("wb") as raw:
        if path.suffix == ".gz":
            with gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as packed:
                yield cast("BinaryIO", packed)
        elif path.suffix in (".zst", ".zstd"):
            with _zstandard().ZstdCompressor().stream_writer(raw, closefd=False) as packed:
                yield packed
        else:
            yield raw


@contextmanager
def _decompressed(raw: BinaryIO, head: bytes) -> Iterator[BinaryIO]:
    if head.startswith(GZIP):
        with gzip.GzipFile(fileobj=raw, mode="rb") as file:
            yield cast("BinaryIO", file)
    elif head == ZSTD:
        with BufferedReader(_ZstdFrames(raw), PIECE_BYTES) as file:
            yield file
    else:
        yield raw


class _ZstdFrames(RawIOBase):
    """Reads zst, all frames of it; the library's own reader takes a file that is cut off for a whole one."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._make = _zstandard().ZstdDecompressor().decompressobj
        self._frame: Any = None
        self._packed = self._ready = b""

    def readable(self) -> bool:
        """Whether it can be read: yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer as far as there is content; 0 at the end. Raises EOFError where the last frame has none."""
        while not self._ready:
            piece = self._packed or self._raw.read(ZSTD_PIECE_BYTES)
            if not piece:
                if self._frame is not None:
                    raise EOFError("the file is cut off")
                return 0
            self._frame = self._frame or self._make()
            self._ready, self._packed = self._frame.decompress(piece), b""
            if self._frame.eof:
                self._packed, self._frame = self._frame.unused_data, None
        num_bytes = min(len(buffer), len(self._ready))
        buffer[:num_bytes], self._ready = self._ready[:num_bytes], self._ready[num_bytes:]
        return num_bytes


def _zstandard() -> Any:
    try:
        import zstandard
    except ModuleNotFoundError as missing:
        raise TraceError("a .zst needs zstandard; pip install 'kvist[lab]'") from missing
    return zstandard


def _damages() -> tuple[type[Exception], ...]:
    """Return what reading raises where a file is missing, cut off or damaged."""
    found: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)
    try:
        import zstandard
    except ModuleNotFoundError:
        return found
    return (*found, zstandard.ZstdError)
