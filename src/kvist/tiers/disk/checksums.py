"""Checksums of contents: XXH3 where xxhash is installed, which is ten times as fast as zlib's CRC-32."""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

from kvist.errors import ConfigError

__all__ = ["CRC32", "XXH3", "checksum_named", "preferred_checksum"]

Checksum = Callable[[memoryview], int]
CRC32, XXH3 = "crc32", "xxh3_64"


def preferred_checksum() -> str:
    """Name the checksum that a new directory gets."""
    return CRC32 if _xxh3() is None else XXH3


def checksum_named(name: str) -> Checksum:
    """Return a checksum of at most 64 bits by its name; raises `ConfigError` if it cannot be computed here."""
    if name == CRC32:
        return crc32
    found = _xxh3() if name == XXH3 else None
    if found is None:
        raise ConfigError([f"checksums {name!r} need xxhash: pip install 'kvist[disk]', or give another directory"])
    return found


def _xxh3() -> Checksum | None:
    try:
        from xxhash import xxh3_64_intdigest
    except ModuleNotFoundError:
        return None
    return xxh3_64_intdigest
