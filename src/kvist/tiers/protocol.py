"""What a slower tier must be: a bounded store of block contents by key. It may forget, refuse and fail, never lie."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Protocol, runtime_checkable

__all__ = ["NAMESPACE_TAG_BYTES", "Store", "StoreFormat", "StoreStats"]

NAMESPACE_TAG_BYTES = 16
"""Every key begins with so many bytes that stand for its namespace: `drop` takes them."""


@dataclass(frozen=True, slots=True)
class StoreFormat:
    """What contents in a store are of: two stores of equal format may exchange them, others must not.

    `model` names what K and V depend on besides the tokens: checkpoint, revision, adapter. `block_bytes` are the bytes
    of one block of each group; `layers` describes them (kind, heads, dims, dtypes), as JSON can say it.
    """

    model: str
    block_size: int
    block_bytes: tuple[int, ...]
    layers: tuple[Mapping[str, Any], ...] = field(default=())
    version: int = 1

    def describe(self) -> str:
        """Return the format as canonical JSON, which people can read and compare."""
        told = {
            "kvist": self.version,
            "model": self.model,
            "block_size": self.block_size,
            "block_bytes": list(self.block_bytes),
            "layers": [dict(layer) for layer in self.layers],
        }
        return json.dumps(told, sort_keys=True, separators=(",", ":"))

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the description, 32 bytes."""
        return sha256(self.describe().encode()).digest()


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds and has done since it was opened. Bytes are those of contents, without overhead.

    What is held is 0 where a shared store cannot know it. `num_calls` of a guarded store have ended or were given up,
    after `seconds` together, as its callers saw it; `num_refilled` are entries that it did not take when they were put
    first, and that waited to be written again.
    """

    num_entries: int = 0
    num_bytes: int = 0
    capacity_bytes: int | None = None
    num_hits: int = 0
    num_misses: int = 0
    num_put: int = 0
    num_refused: int = 0
    num_evicted: int = 0
    num_corrupt: int = 0
    num_errors: int = 0
    num_timeouts: int = 0
    num_calls: int = 0
    seconds: float = 0.0
    num_refilled: int = 0


@runtime_checkable
class Store(Protocol):
    """A bounded store of block contents by key.

    A key is 17 to 64 bytes, the first `NAMESPACE_TAG_BYTES` of them the tag of its namespace; equal keys always have
    equal contents, so putting one that is there may do nothing. Contents are as long as the format says of some group.
    Calls come from several threads. A call may raise: the caller counts it and goes on as if nothing had been found or
    kept. What is wrong, torn or of another length must be found out by the store, and is not there.
    """

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Say of each key whether it is likely there."""

    def put(self, entries: Sequence[tuple[bytes, memoryview]]) -> int:
        """Keep contents, as many as there is room for, and return how many are there now, or will be written."""

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Fill one writable buffer of bytes for each key, and say of each whether it was: whole, and as it was put."""

    def drop(self, tag: bytes) -> None:
        """Forget all contents whose keys begin with the tag of a namespace; an empty tag: everything."""

    def stats(self) -> StoreStats:
        """Return what is held and what was done."""

    def close(self) -> None:
        """Write out what is still to be written, and let go of files, sockets and threads; closing twice is fine."""
