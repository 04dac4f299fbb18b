"""MessagePack, which most streams of events are in: msgspec, or a word on how to get it."""

from __future__ import annotations

from typing import Any

from kvist.errors import WireError

try:
    import msgspec
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("MessagePack needs msgspec: pip install 'kvist[events]'", name=error.name) from error

__all__ = ["pack", "unpack"]

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode


def pack(value: Any) -> bytes:
    """Encode plain values."""
    return _pack(value)


def unpack(payload: bytes | memoryview) -> Any:
    """Decode plain values; raise WireError for what is not MessagePack."""
    try:
        return _unpack(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(
            f"payload: expected MessagePack, got {len(payload)} bytes of something else: {error}"
        ) from error
