"""How shared stores wrap an entry, so that what is torn, foreign, of another format or damaged is told from contents.

    offset  bytes  what
    0       4      "Kvst"
    4       2      version of this layout, little-endian as all numbers
    6       2      length of the key
    8       8      length of the contents
    16      16     fingerprint of the format, its first 16 bytes
    32      64     the key, padded with zeros
    96      4      CRC-32 of all before it and of the contents
    100            the contents

A reader knows every byte of the head but the checksum beforehand: it builds the head that it expects and compares.
"""

from __future__ import annotations

import struct
from zlib import crc32

from kvist.errors import ArgumentError
from kvist.tiers.protocol import NAMESPACE_TAG_BYTES, StoreFormat

__all__ = ["ENVELOPE_BYTES", "MAX_KEY_BYTES", "Envelope"]

MAX_KEY_BYTES = 64

_HEAD = struct.Struct(f"<4sHHQ16s{MAX_KEY_BYTES}s")
_CHECKSUM = struct.Struct("<I")
_MAGIC, _VERSION = b"Kvst", 1

ENVELOPE_BYTES = _HEAD.size + _CHECKSUM.size
"""What wrapping adds to each entry."""


class Envelope:
    """Wraps contents of one format, and unwraps nothing else.

    >>> envelope = Envelope(StoreFormat("a model", block_size=2, block_bytes=(4,)))
    >>> key, buffer = bytes(48), bytearray(4)
    >>> sealed = envelope.seal(key, memoryview(b"KKVV"))
    >>> envelope.unseal(key, sealed, memoryview(buffer)), bytes(buffer)
    (True, b'KKVV')
    >>> envelope.unseal(key, sealed[:-1], memoryview(buffer))
    False
    """

    def __init__(self, format: StoreFormat) -> None:
        self._fingerprint = format.fingerprint[:16]
        self._lengths = frozenset(format.block_bytes)

    def seal(self, key: bytes, contents: memoryview) -> bytes:
        """Return the contents, uint8 [n], behind their head; what does not fit the format is refused."""
        self.check_key(key)
        if contents.nbytes not in self._lengths:
            allowed = " or ".join(map(str, sorted(self._lengths)))
            raise ArgumentError(f"contents of {contents.nbytes} bytes, but blocks of this format have {allowed}")
        head = self._head(key, contents.nbytes)
        return b"".join((head, _CHECKSUM.pack(crc32(contents, crc32(head))), contents))

    def unseal(self, key: bytes, sealed: bytes | bytearray | memoryview, buffer: memoryview) -> bool:
        """Fill a buffer, uint8 [n], if `sealed` is the whole and unharmed entry of this key and length; say so."""
        entry = memoryview(sealed)
        if entry.nbytes != ENVELOPE_BYTES + buffer.nbytes:
            return False
        head, contents = self._head(key, buffer.nbytes), entry[ENVELOPE_BYTES:]
        checksum = _CHECKSUM.pack(crc32(contents, crc32(head)))
        if entry[:ENVELOPE_BYTES] != head + checksum:
            return False
        buffer[:] = contents
        return True

    @staticmethod
    def check_key(key: bytes) -> None:
        """Raise `ArgumentError` if this cannot be a key."""
        if not NAMESPACE_TAG_BYTES < len(key) <= MAX_KEY_BYTES:
            asked = f"{NAMESPACE_TAG_BYTES + 1} to {MAX_KEY_BYTES} bytes"
            raise ArgumentError(f"a key of {len(key)} bytes, but keys have {asked}")

    def _head(self, key: bytes, num_bytes: int) -> bytes:
        return _HEAD.pack(_MAGIC, _VERSION, len(key), num_bytes, self._fingerprint, key)
