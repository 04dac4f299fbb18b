"""Dynamo's router events as JSON: `{"worker_id", "storage_tier", "event": {"event_id", "data", "dp_rank"}}`.

There are no tokens in them, but a hash of the tokens of each block, XXH3 with seed 1337, which needs xxhash where it is
not known yet. How an adapter or a salt changes that seed is not public, so such blocks cannot be written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any

import numpy as np

from kvist.errors import ArgumentError, WireError
from kvist.wire.hashes import media_digest
from kvist.wire.narrowing import WithoutGroups
from kvist.wire.records import (
    AllCleared,
    BlockMedia,
    Hash,
    Record,
    RemovedBlocks,
    StoredBlocks,
    Unknown,
    check,
    check_each,
    ints,
    unsigned,
)

__all__ = ["decode", "dumps", "encode", "loads", "narrowing", "tokens_hashes"]

SEED = 1337
TIERS = {"device": "device", "host": "host_pinned", "disk": "disk", "remote": "external"}
_TIERS_READ = {word: tier for tier, word in TIERS.items()}
FIELDS = {"worker_id", "storage_tier", "event"}
EVENT_FIELDS = {"event_id", "data", "dp_rank"}
STORED_FIELDS = {"parent_hash", "blocks"}


def narrowing(*, remembers: bool = False) -> WithoutGroups:
    """Return what brings records into Dynamo's terms."""
    return WithoutGroups(remembers=remembers)


def encode(records: Iterable[Record], *, first_id: int = 0) -> list[dict[str, Any]]:
    """Return the events, as JSON objects, of those records that Dynamo has words for.

    Records without an id are counted from `first_id`. Raises ArgumentError for blocks with an adapter or a salt whose
    hash of tokens is not known.
    """
    found: list[dict[str, Any]] = []
    for record in records:
        if isinstance(record, Unknown) and record.protocol == "dynamo":
            found.append(record.raw)
            continue
        data = _data(record)
        if data is None:
            continue
        own = (record.own or {}).get("dynamo", {})
        number = first_id + len(found) if record.id is None else record.id
        event = {"event_id": number, "data": data, "dp_rank": record.rank or 0, **own.get("event", {})}
        tier = getattr(record, "tier", None) or "device"
        worker = int(record.worker) if record.worker.isdecimal() else _number(record.worker)
        found.append(
            {"worker_id": worker, "storage_tier": TIERS.get(tier, tier), "event": event, **own.get("outer", {})}
        )
    return found


def decode(events: Any, *, worker: str = "") -> list[Record]:
    """Return the records of one event or a list of them; raises WireError for what is none.

    `worker` stands for that of events without one, which an engine sends.
    """
    return [_record(each, worker) for each in (events if isinstance(events, list) else [events])]


def dumps(records: Iterable[Record], *, first_id: int = 0) -> str:
    """Return the events as the text of a JSON array."""
    return json.dumps(encode(records, first_id=first_id), separators=(",", ":"))


def loads(text: str | bytes, *, worker: str = "") -> list[Record]:
    """Return the records of the text of an event or of a JSON array of them; errors as in `decode`."""
    try:
        events = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"events: expected JSON, got {text[:40]!r}: {error}") from error
    return decode(events, worker=worker)


def tokens_hashes(tokens: Sequence[int], block_size: int, media: Sequence[Sequence[BlockMedia]] = ()) -> list[int]:
    """Return the hash of the tokens of each whole block, and of the media that cover it.

    Raises ModuleNotFoundError without xxhash.
    """
    try:
        from xxhash import xxh3_64_intdigest
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("hashes of tokens need xxhash: pip install 'kvist[disk]'", name=error.name) from error
    try:
        content, size = np.asarray(tokens, "<u4").tobytes(), 4 * block_size
    except (OverflowError, TypeError, ValueError) as error:
        raise ArgumentError(f"Dynamo hashes token ids of 32 bits: {error}") from error
    found = []
    for column, begin in enumerate(range(0, len(content) - size + 1, size)):
        marks = sorted(_media_hash(each) for each in media[column]) if media else []
        part = content[begin : begin + size] + b"".join(each.to_bytes(8, "little") for each in marks)
        found.append(xxh3_64_intdigest(part, seed=SEED))
    return found


def _data(record: Record) -> Any:
    if isinstance(record, StoredBlocks):
        own = (record.own or {}).get("dynamo", {})
        blocks = [
            {"block_hash": _short(each), "tokens_hash": tokens_hash, "mm_extra_info": info}
            for each, tokens_hash, info in zip(record.hashes, _hashes(record), _infos(record), strict=True)
        ]
        for block, others in zip(blocks, own.get("blocks", ()), strict=False):
            block.update(others)
        parent = None if record.parent is None else _short(record.parent)
        return {"stored": {"parent_hash": parent, "blocks": blocks, **own.get("stored", {})}}
    if isinstance(record, RemovedBlocks):
        return {"removed": {"block_hashes": list(map(_short, record.hashes))}}
    return "cleared" if isinstance(record, AllCleared) else None


def _hashes(record: StoredBlocks) -> Sequence[int]:
    known = (record.own or {}).get("dynamo", {}).get("tokens_hashes")
    if known is not None:
        return tuple(known)
    if record.lora_name is not None or record.lora_id is not None or record.salt is not None:
        raise ArgumentError("Dynamo's hash of tokens is not public for blocks with an adapter or a salt")
    size = record.block_size or 0
    if len(record.tokens) != size * len(record.hashes):
        raise ArgumentError(
            f"Dynamo needs the tokens of every block: {len(record.tokens)} for {len(record.hashes)} blocks of {size}"
        )
    return tokens_hashes(record.tokens, size, record.media)


def _infos(record: StoredBlocks) -> list[dict[str, Any] | None]:
    if not record.media:
        return [None] * len(record.hashes)
    size = record.block_size or 0
    return [{"mm_objects": [_object(each, size) for each in row]} if row else None for row in record.media]


def _object(media: BlockMedia, size: int) -> dict[str, Any]:
    end = size if media.length is None else media.offset + media.length
    return {"mm_hash": _media_hash(media), "offsets": [[max(media.offset, 0), min(end, size) if size else end]]}


def _media_hash(media: BlockMedia) -> int:
    if isinstance(media.key, int):
        return media.key
    return int.from_bytes(media_digest(media.key)[:8], "big")


def _short(name: Hash) -> int:
    """Return the name of a block as 64 bits: of a digest its last 8 bytes."""
    return name if isinstance(name, int) else int.from_bytes(name[-8:], "big")


def _number(worker: str) -> int:
    return int.from_bytes(sha256(worker.encode()).digest()[:8], "little")


def _record(read: Any, worker: str) -> Record:
    fields = check(read, "event", dict)
    event = check(fields.get("event", fields), "event", dict)
    data = event.get("data")
    number = fields.get("worker_id")
    told: dict[str, Any] = {
        "worker": worker if number is None else str(check(number, "worker_id", int)),
        "id": check(event.get("event_id"), "event_id", int),
        "rank": check(event.get("dp_rank", 0), "dp_rank", int),
    }
    word = check(fields.get("storage_tier", "device"), "storage_tier", str)
    tier = _TIERS_READ.get(word, word)
    own: dict[str, Any] = {}
    if fields is not event:
        _keep(own, "outer", fields, FIELDS)
        _keep(own, "event", event, EVENT_FIELDS)
    if data == "cleared":
        return AllCleared(**told, own={"dynamo": own} if own else None)
    if isinstance(data, dict) and "stored" in data:
        return _read_stored(check(data["stored"], "stored", dict), told, tier, own)
    if isinstance(data, dict) and "removed" in data:
        names = check(check(data["removed"], "removed", dict).get("block_hashes"), "block_hashes", list)
        return RemovedBlocks(
            **told, hashes=unsigned(names, "block_hashes"), tier=tier, own={"dynamo": own} if own else None
        )
    if data is None:
        raise WireError(f"event data: expected stored, removed or cleared, got {data!r}")
    return Unknown(**told, protocol="dynamo", raw=read)


def _keep(own: dict[str, Any], name: str, fields: dict[str, Any], known: set[str]) -> None:
    others = {key: value for key, value in fields.items() if key not in known}
    if others:
        own[name] = others


def _read_stored(data: dict[str, Any], told: dict[str, Any], tier: str, own: dict[str, Any]) -> StoredBlocks:
    blocks = [check(each, "blocks", dict) for each in check(data.get("blocks"), "blocks", list)]
    parent = data.get("parent_hash")
    own["tokens_hashes"] = tuple(check(each.get("tokens_hash"), "tokens_hash", int) for each in blocks)
    _keep(own, "stored", data, STORED_FIELDS)
    others = [
        {key: value for key, value in each.items() if key not in ("block_hash", "tokens_hash", "mm_extra_info")}
        for each in blocks
    ]
    if any(others):
        own["blocks"] = others
    media = tuple(_read_media(each.get("mm_extra_info")) for each in blocks)
    return StoredBlocks(
        **told,
        hashes=unsigned([each.get("block_hash") for each in blocks], "block_hash"),
        parent=None if parent is None else unsigned([parent], "parent_hash")[0],
        tier=tier,
        media=media if any(media) else (),
        own={"dynamo": own},
    )


def _read_media(info: Any) -> tuple[BlockMedia, ...]:
    if info is None:
        return ()
    found = []
    for each in check(check(info, "mm_extra_info", dict).get("mm_objects"), "mm_objects", list):
        key = check(check(each, "mm_objects", dict).get("mm_hash"), "mm_hash", int)
        for pair in check_each(each.get("offsets"), "offsets", list):
            if len(pair) != 2:
                raise WireError(f"offsets: expected pairs, got {pair!r:.60}")
            begin, end = ints(pair, "offsets")
            found.append(BlockMedia(key, begin, end - begin))
    return tuple(found)
