"""SGLang's event stream: MessagePack arrays `[time, events, rank]` of arrays `[name, field, ...]`.

Names of blocks are ints with a sign, and media have words of their own. Newer releases have the fields of vLLM, in
the same order, and whose they are after them; the salt of a tenant comes in a map.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvist.errors import ArgumentError
from kvist.wire.msgpack import pack, unpack
from kvist.wire.narrowing import ByMedium
from kvist.wire.records import Hash, Record, RemovedBlocks, StoredBlocks
from kvist.wire.vllm import STORED, Dialect, as_array, events_of, read_batch

__all__ = ["decode", "encode", "narrowing"]

SALT_PREFIX = "dynamo-cache-salt:"
SIGN = 2**63
METADATA_AT = 14
SGLANG = Dialect(
    "sglang",
    {"device": "GPU", "host": "CPU_PINNED", "disk": "DISK", "remote": "EXTERNAL"},
    {
        "BlockStored": ((*STORED, "ownership", "metadata"), 6),
        "BlockRemoved": (
            ("block_hashes", "medium", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality",
             "ownership"),
            2,
        ),
        "AllBlocksCleared": (("ownership",), 0),
    },
)  # fmt: skip


def narrowing(*, remembers: bool = False) -> ByMedium:
    """Return what brings records into SGLang's terms."""
    return ByMedium(remembers=remembers)


def encode(records: Sequence[Record], *, time_s: float | None = None, rank: int | None = None) -> bytes:
    """Return a batch of these records; what SGLang has no word for is left out.

    `time_s` and `rank` stand for those that the records do not have. Raises ArgumentError for names that are not ints.
    """
    first = records[0] if records else Record()
    events = [as_array(event, SGLANG) for event in events_of(map(_outward, records), SGLANG)]
    stamp = first.time_s if first.time_s is not None else time_s or 0.0
    rank = first.rank if first.rank is not None else rank
    batch: list[Any] = [stamp, events, rank, *(first.own or {}).get("sglang batch", ())]
    return pack(batch if batch[2:] != [None] else batch[:2])


def decode(payload: bytes, *, worker: str = "") -> list[Record]:
    """Return the records of a batch; raises WireError for what is none."""
    batch = unpack(payload)
    if isinstance(batch, list) and len(batch) > 1 and isinstance(batch[1], list):
        batch[1] = [_with_salt_in_place(event) for event in batch[1]]
    return [_inward(record) for record in read_batch(batch, worker, SGLANG)]


def _with_salt_in_place(event: Any) -> Any:
    """Return an event with the map of its salt where the newest releases have it, not right after the medium."""
    if isinstance(event, list) and len(event) == 8 and event[0] == "BlockStored" and isinstance(event[7], dict):
        return [*event[:7], *[None] * (METADATA_AT - 7), event[7]]
    return event


def _inward(record: Record) -> Record:
    """Return a record with the salt that its map or its prefixed key tells."""
    if not isinstance(record, StoredBlocks):
        return record
    own = (record.own or {}).get("sglang", {})
    metadata = own.get("metadata")
    salt = metadata.get("cache_salt") if isinstance(metadata, dict) else record.salt
    if isinstance(salt, str):
        salt = salt.removeprefix(SALT_PREFIX)
    return replace(record, salt=salt, extra_keys=_salted(record.extra_keys, f"{SALT_PREFIX}{salt}", salt))


def _outward(record: Record) -> Record:
    """Return a record with ints that have a sign, and the salt as SGLang says it."""
    if isinstance(record, RemovedBlocks):
        return replace(record, hashes=_signed(record.hashes))
    if not isinstance(record, StoredBlocks):
        return record
    parent = () if record.parent is None else _signed((record.parent,))
    told: dict[str, Any] = {"hashes": _signed(record.hashes), "parent": parent[0] if parent else None}
    if record.salt is not None:
        own = dict(record.own or {})
        own["sglang"] = {"metadata": {"cache_salt": str(record.salt)}, **own.get("sglang", {})}
        told["own"] = own
        told["salt"] = f"{SALT_PREFIX}{record.salt}"
        told["extra_keys"] = _salted(record.extra_keys, record.salt, told["salt"])
    return replace(record, **told)


def _salted(
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None, old: Any, new: Any
) -> tuple[tuple[Any, ...] | None, ...] | None:
    """Return extra keys with another salt in place of the old one."""
    if extra_keys is None or new is None:
        return extra_keys
    return tuple(None if keys is None else tuple(new if each == old else each for each in keys) for keys in extra_keys)


def _signed(hashes: tuple[Hash, ...]) -> tuple[Any, ...]:
    for each in hashes:
        if not isinstance(each, int):
            raise ArgumentError(f"SGLang names blocks by ints of 64 bits, not by {len(each)} bytes: use short names")
    return tuple(each - 2 * SIGN if isinstance(each, int) and each >= SIGN else each for each in hashes)
