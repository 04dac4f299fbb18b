"""Mooncake's shared-pool events: MessagePack batches `[time in ms, events, rank]` of maps, an event for each block.

A block is named by the last 8 bytes of the hash that its connector gave it, and is an object of the store besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvist.errors import WireError
from kvist.wire.msgpack import pack, unpack
from kvist.wire.narrowing import ByMedium
from kvist.wire.records import AllCleared, Hash, Record, RemovedBlocks, StoredBlocks, Unknown, check, ints, unsigned

__all__ = ["decode", "encode", "narrowing"]

MEDIA = {"device": "gpu", "host": "cpu", "disk": "disk", "remote": "external"}
_TIERS_READ = {word: tier for tier, word in MEDIA.items()}
COMMON = (
    "event_id", "timestamp", "event_type", "model_name", "block_size", "additional_salt", "lora_name", "tenant_id",
    "backend_id", "medium", "dp_rank",
)  # fmt: skip
KNOWN = {
    "stored": {*COMMON, "group_id", "seq_hashes", "base_block_idx", "parent_hash", "token_ids"},
    "removed": {*COMMON, "group_id", "seq_hashes", "base_block_idx"},
    "cleared": {*COMMON},
}
CONTEXT = ("model_name", "tenant_id", "backend_id", "additional_salt", "object_key", "connector_block_hash")
"""What of an event is kept as it was read, and what records of other protocols do not say."""


def narrowing(*, remembers: bool = False) -> ByMedium:
    """Return what brings records into Mooncake's terms."""
    return ByMedium(remembers=remembers)


def encode(
    records: Sequence[Record],
    *,
    backend_id: str = "kvist",
    model_name: str = "model",
    tenant_id: str = "default",
    first_id: int = 0,
    time_s: float | None = None,
    rank: int | None = None,
) -> bytes:
    """Return a batch of these records; what Mooncake has no word for is left out.

    Events are counted from the id of their record, or from `first_id`. The other arguments stand for what the records
    do not have; the key of an object is made of the model's name, the group and the block's name, as connectors do.
    """
    first = records[0] if records else Record()
    stamp = first.time_s if first.time_s is not None else time_s or 0.0
    context = {"backend_id": backend_id, "model_name": model_name, "tenant_id": tenant_id}
    events: list[dict[str, Any]] = []
    for record in records:
        if isinstance(record, Unknown) and record.protocol == "mooncake":
            events.append(record.raw)
        number = first_id + len(events) if record.id is None else record.id
        events += _events(record, context, round(stamp * 1000), number)
    batch = [round(stamp * 1000), events, first.rank if first.rank is not None else rank]
    return pack(batch + list((first.own or {}).get("mooncake batch", ())))


def decode(payload: bytes, *, worker: str = "") -> list[Record]:
    """Return the records of a batch; raises WireError for what is none."""
    items = check(unpack(payload), "batch", list)
    if len(items) < 3:
        raise WireError(f"batch: expected [time, events, rank], got {len(items)} values")
    time_s = check(items[0], "batch time", int) / 1000
    rank = check(items[2], "batch rank", (int, type(None)))
    more = {"mooncake batch": tuple(items[3:])} if len(items) > 3 else {}
    return [_record(each, worker, rank, time_s, more) for each in check(items[1], "batch events", list)]


def _events(record: Record, context: dict[str, str], stamp: int, number: int) -> list[dict[str, Any]]:
    """Return an event for each block of a record."""
    if isinstance(record, AllCleared):
        return [_common(record, "cleared", context, stamp, number) | {"medium": None}]
    if not isinstance(record, (StoredBlocks, RemovedBlocks)):
        return []
    found = []
    for column, name in enumerate(record.hashes):
        kind = "stored" if isinstance(record, StoredBlocks) else "removed"
        event = _common(record, kind, context, stamp, number + column)
        event |= {"group_id": None if record.group is None else str(record.group), "seq_hashes": [_short(name)]}
        event["base_block_idx"] = None
        if isinstance(record, StoredBlocks):
            event["base_block_idx"] = None if record.start is None else record.start + column
            before = record.hashes[column - 1] if column else record.parent
            event["parent_hash"] = None if before is None else _short(before)
            size = record.block_size or 0
            tokens = record.tokens[column * size : (column + 1) * size]
            event["token_ids"] = list(tokens) if tokens else None
            event["connector_block_hash"] = _hex(name)
        event["object_key"] = f"{event['model_name']}@group:{record.group or 0}@{_hex(name)}"
        found.append(event | (record.own or {}).get("mooncake", {}))
    return found


def _common(record: Record, kind: str, context: dict[str, str], stamp: int, number: int) -> dict[str, Any]:
    tier = getattr(record, "tier", None) or "device"
    salt = getattr(record, "salt", None)
    own = (record.own or {}).get("mooncake", {})
    return {
        "event_id": number,
        "timestamp": stamp,
        "event_type": kind,
        "block_size": getattr(record, "block_size", None),
        "additional_salt": None if salt is None else str(salt),
        "lora_name": getattr(record, "lora_name", None),
        "medium": MEDIA.get(tier, tier),
        "dp_rank": record.rank or 0,
        **context,
        **own,
    }


def _short(name: Hash) -> int:
    return name if isinstance(name, int) else int.from_bytes(name[-8:], "big")


def _hex(name: Hash) -> str:
    return name.hex() if isinstance(name, bytes) else f"{name:016x}"


def _record(event: Any, worker: str, rank: int | None, time_s: float, more: dict[str, Any]) -> Record:
    fields = check(event, "event", dict)
    kind = check(fields.get("event_type"), "event_type", str)
    number = check(fields.get("event_id"), "event_id", int)
    told: dict[str, Any] = {"worker": worker, "rank": rank, "id": number, "time_s": time_s}
    if kind not in KNOWN:
        return Unknown(**told, protocol="mooncake", raw=event, own=more or None)
    own = {key: value for key, value in fields.items() if key not in KNOWN[kind] or key in CONTEXT}
    told["own"] = {"mooncake": own, **more}
    if kind == "cleared":
        return AllCleared(**told)
    medium = check(fields.get("medium"), "medium", str)
    if medium not in _TIERS_READ:
        own["medium"] = medium
    group = check(fields.get("group_id"), "group_id", (str, type(None)))
    told |= {"group": int(group) if group and group.isdecimal() else None, "hashes": _names(fields)}
    told["tier"] = _TIERS_READ.get(medium.lower(), medium)
    return RemovedBlocks(**told) if kind == "removed" else _read_stored(fields, told)


def _names(fields: dict[str, Any]) -> tuple[Hash, ...]:
    """Return what the block is called: its sequence hash, or what is left of the connector's at the end of its key."""
    names = unsigned(check(fields.get("seq_hashes"), "seq_hashes", list), "seq_hashes")
    if names:
        return names
    text = fields.get("connector_block_hash") or str(fields.get("object_key", "")).rpartition("@")[2]
    try:
        return (int(str(text).removeprefix("0x")[-16:], 16),)
    except ValueError as error:
        raise WireError(f"seq_hashes: expected one, or a key that ends in a hash, got {text!r:.60}") from error


def _read_stored(fields: dict[str, Any], told: dict[str, Any]) -> StoredBlocks:
    parent, tokens = fields.get("parent_hash"), fields.get("token_ids")
    return StoredBlocks(
        **told,
        parent=None if parent is None else unsigned([parent], "parent_hash")[0],
        tokens=() if tokens is None else ints(tokens, "token_ids"),
        block_size=check(fields.get("block_size"), "block_size", (int, type(None))),
        start=check(fields.get("base_block_idx"), "base_block_idx", (int, type(None))),
        lora_name=check(fields.get("lora_name"), "lora_name", (str, type(None))),
        salt=check(fields.get("additional_salt"), "additional_salt", (str, type(None))),
    )
