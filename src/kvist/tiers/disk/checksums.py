"""Checksums of contents: XXH3 where xxhash is installed, which is ten times as fast as zlib's CRC-32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from zlib import crc32

from kvist.errors import ConfigError

__all__ = ["CRC32", "XXH3", "Checksum", "RunningChecksum", "WholeChecksum", "checksum_named", "preferred_checksum"]

CRC32, XXH3 = "crc32", "xxh3_64"


class WholeChecksum(Protocol):
    """The checksum of contents; another `seed`, of 32 bits, gives another one."""

    def __call__(self, contents: memoryview | bytes, seed: int = 0, /) -> int:
        """Return it."""


class RunningChecksum(Protocol):
    """The checksum of all that it was given so far."""

    def update(self, part: memoryview, /) -> None:
        """Go on with the next part."""

    def intdigest(self) -> int:
        """Return what `whole` would say of all parts together."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """A checksum of at most 64 bits: of contents as a `whole`, or of one part after the other once it is `begun`."""

    whole: WholeChecksum
    begun: Callable[[], RunningChecksum]


def preferred_checksum() -> str:
    """Name the checksum that a new directory gets."""
    return CRC32 if _xxh3() is None else XXH3


def checksum_named(name: str) -> Checksum:
    """Return a checksum by its name; raises `ConfigError` if it cannot be computed here.

    >>> crc = checksum_named("crc32")
    >>> running = crc.begun()
    >>> running.update(memoryview(b"KK"))
    >>> running.update(memoryview(b"VV"))
    >>> running.intdigest() == crc.whole(memoryview(b"KKVV"))
    True
    """
    if name == CRC32:
        return Checksum(crc32, _RunningCrc32)
    found = _xxh3() if name == XXH3 else None
    if found is None:
        raise ConfigError([f"checksums {name!r} need xxhash: pip install 'kvist[disk]', or give another directory"])
    return found


def _xxh3() -> Checksum | None:
    try:
        from xxhash import xxh3_64, xxh3_64_intdigest
    except ModuleNotFoundError:
        return None
    return Checksum(xxh3_64_intdigest, xxh3_64)


class _RunningCrc32:
    def __init__(self) -> None:
        self._sum = 0

    def update(self, part: memoryview, /) -> None:
        self._sum = crc32(part, self._sum)

    def intdigest(self) -> int:
        return self._sum
