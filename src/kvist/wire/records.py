"""What streams of KV events say, whoever sends them, in one neutral form of plain values.

Every codec reads into these records and writes from them, so that what one protocol says can be said in another. A
field that a protocol does not have is None, or empty. What only that protocol has is in `own`, which is None where
there is nothing, and goes back out where the record is written in the same protocol.

Records are values, and nothing changes them. They are not frozen, since one is made for each event, and making a frozen
one with so many fields takes four times as long.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from kvist.errors import WireError

__all__ = [
    "TIERS",
    "AllCleared",
    "BlockMedia",
    "CreatedPools",
    "Hash",
    "MovedBlocks",
    "Record",
    "RemovedBlocks",
    "StoredBlocks",
    "Unknown",
    "UpdatedBlocks",
    "check",
    "check_each",
    "ints",
    "unsigned",
]

Hash = bytes | int
"""What a block is called: a digest, or an int of 0 .. 2**64-1. Which of them is the choice of who sends it."""
TIERS = ("device", "host", "disk", "remote")
"""The tiers that all protocols have a word for, from fast to slow. Others go through as they are written."""
WORD = 2**64 - 1


@dataclass(frozen=True, slots=True)
class BlockMedia:
    """An image or the like that covers a part of a block.

    It begins at token `offset` of the block, below 0 where it began before, and has `length` tokens, if that is known;
    `uuid` is a name that its user gave it.

    >>> BlockMedia("sha256:9f86d081", -3)
    BlockMedia(key='sha256:9f86d081', offset=-3, length=None, uuid=None)
    """

    key: str | int | bytes
    offset: int = 0
    length: int | None = None
    uuid: str | None = None


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class Record:
    """What all records say: who sends it, as which of its events, and when.

    `id` counts the events of a `rank` of a worker, `epoch` names the life of the log that counts, `time_s` is seconds
    since 1970.
    """

    worker: str = ""
    rank: int | None = None
    id: int | None = None
    epoch: int | None = None
    time_s: float | None = None
    own: Mapping[str, Any] | None = None


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class StoredBlocks(Record):
    """Blocks that follow one another, after the block called `parent`, can be hit in a tier from now on.

    `tokens` are the ids of all of them, `extra_ids` one more number for each (or none). `priorities` and `media` are
    one entry for each block, or empty. `start` is which block of its prefix the first one is. `kind` and `window` (in
    tokens) say what of the past the group needs; `salt` and the LoRA adapter keep contents apart, as `namespace` does.
    `extra_keys` are what vLLM hashes besides tokens, one entry for each block.
    """

    hashes: tuple[Hash, ...]
    parent: Hash | None = None
    tokens: tuple[int, ...] = ()
    block_size: int | None = None
    group: int | None = None
    tier: str | None = None
    start: int | None = None
    kind: str | None = None
    window: int | None = None
    priorities: tuple[int, ...] = ()
    extra_ids: tuple[int, ...] = ()
    media: tuple[tuple[BlockMedia, ...], ...] = ()
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    salt: str | int | None = None
    namespace: tuple[str | int | bytes, ...] | None = None
    locality: str | None = None
    hash_name: str | None = None
    reason: str | None = None


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class MovedBlocks(StoredBlocks):
    """Blocks are in `tier` from now on, and in `source_tier` no more."""

    source_tier: str | None = None


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class RemovedBlocks(Record):
    """Blocks cannot be hit in a tier any more; `tier` None: in none that the protocol speaks of."""

    hashes: tuple[Hash, ...]
    group: int | None = None
    tier: str | None = None
    kind: str | None = None
    window: int | None = None
    namespace: tuple[str | int | bytes, ...] | None = None
    locality: str | None = None
    hash_name: str | None = None
    reason: str | None = None


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class UpdatedBlocks(Record):
    """Blocks have another tier, another priority, or both; what is the same as before is None."""

    hashes: tuple[Hash, ...]
    group: int | None = None
    window: int | None = None
    source_tier: str | None = None
    tier: str | None = None
    old_priority: int | None = None
    priority: int | None = None
    namespace: tuple[str | int | bytes, ...] | None = None
    hash_name: str | None = None


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class AllCleared(Record):
    """All content is gone, or that of one `tier`, or of one `namespace`; None: of all of them."""

    tier: str | None = None
    namespace: tuple[str | int | bytes, ...] | None = None
    reason: str | None = None


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class CreatedPools(Record):
    """A group has room for so many blocks in each tier: `num_blocks` are (tier, number), from fast to slow."""

    num_blocks: tuple[tuple[str, int], ...]
    group: int | None = None
    kind: str | None = None
    window: int | None = None
    block_size: int | None = None


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class Unknown(Record):
    """An event of a kind that is not known here, as it was read: it is written again by `protocol` only."""

    protocol: str
    raw: Any


def check(value: Any, field: str, expected: type | tuple[type, ...]) -> Any:
    """Return a value that has the expected type; raise WireError, which names the field, for others and for bools.

    Ints have 64 bits, with or without a sign, and floats are finite: no protocol has a word for others.
    """
    if isinstance(value, bool) or not isinstance(value, expected):
        kinds = expected if isinstance(expected, tuple) else (expected,)
        names = " or ".join("nil" if each is type(None) else each.__name__ for each in kinds)
        raise WireError(f"{field}: expected {names}, got {_shown(value)}")
    if isinstance(value, int) and not -(2**63) <= value <= WORD:
        raise WireError(f"{field}: expected an int of 64 bits, got {_shown(value)}")
    if isinstance(value, float) and not isfinite(value):
        raise WireError(f"{field}: expected a number, got {value}")
    return value


def check_each(values: Any, field: str, expected: type | tuple[type, ...]) -> list[Any]:
    """Return the values of a list, each of the expected type; raise WireError as `check` does."""
    return [check(each, field, expected) for each in check(values, field, list)]


def ints(values: Any, field: str) -> tuple[int, ...]:
    """Return a list of ints of 64 bits as a tuple; raise WireError for what is none."""
    found = tuple(check(values, field, list))
    if found and (set(map(type, found)) != {int} or min(found) < -(2**63) or max(found) > WORD):
        check_each(list(found), field, int)
    return found


def unsigned(hashes: list[Any], field: str) -> tuple[Hash, ...]:
    """Return the names of blocks that were read, ints below 0 as those that have the same 64 bits.

    Raises WireError for what is neither bytes nor an int of 64 bits.
    """
    for each in hashes:
        kind = type(each)
        if kind is not bytes and (kind is not int or not 0 <= each <= WORD):
            return tuple(_unsigned(value, field) for value in hashes)
    return tuple(hashes)


def _unsigned(value: Any, field: str) -> Hash:
    if type(value) is int and -(2**63) <= value <= WORD:
        return value & WORD
    if type(value) is bytes:
        return value
    raise WireError(f"{field}: expected bytes or ints of 64 bits, got {_shown(value)}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
