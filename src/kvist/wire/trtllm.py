"""TensorRT-LLM's events, as `get_kv_cache_events` and `/kv_cache_events` give them: a JSON object for each.

Levels are numbers, 0 for the device and 1 for the host. A difference that an update does not have is null.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from kvist.errors import WireError
from kvist.wire.hashes import media_digest
from kvist.wire.narrowing import ByLevel
from kvist.wire.records import (
    TIERS,
    BlockMedia,
    CreatedPools,
    Hash,
    Record,
    RemovedBlocks,
    StoredBlocks,
    Unknown,
    UpdatedBlocks,
    check,
    check_each,
    unsigned,
)

__all__ = ["DEFAULT_PRIORITY", "FULL_WINDOW", "decode", "dumps", "encode", "loads", "narrowing"]

DEFAULT_PRIORITY = 35
FULL_WINDOW = 2**31 - 1
"""The window of groups that keep everything, where nobody says what the longest sequence is."""
EVENT_FIELDS = {"event_id", "data", "window_size", "attention_dp_rank", "hash_algo", "layer_group_id"}
DATA_FIELDS = {
    "created": {"type", "num_blocks_per_cache_level"},
    "stored": {"type", "parent_hash", "blocks"},
    "removed": {"type", "block_hashes"},
    "updated": {"type", "block_hash", "cache_level", "priority"},
}
BLOCK_FIELDS = {"type", "block_hash", "tokens", "cache_level", "priority", "mm_keys", "cache_salt"}
NUM_TOKEN_FIELDS = 3
MIN_LEVELS = 2


def narrowing(*, remembers: bool = False) -> ByLevel:
    """Return what brings records into TensorRT-LLM's terms."""
    return ByLevel()


def encode(records: Iterable[Record], *, first_id: int = 0, full_window: int = FULL_WINDOW) -> list[dict[str, Any]]:
    """Return the events, as JSON objects, of those records that TensorRT-LLM has words for.

    Records without an id are counted from `first_id`. `full_window` is the window size of groups that keep everything,
    in TensorRT-LLM the longest sequence.
    """
    found: list[dict[str, Any]] = []
    for record in records:
        if isinstance(record, Unknown) and record.protocol == "trtllm":
            found.append(record.raw)
            continue
        for data in _data(record):
            event = _event(record, data, first_id + len(found), full_window)
            found.append(_merged((record.own or {}).get("trtllm"), event))
    return found


def decode(events: Any, *, worker: str = "", full_window: int = FULL_WINDOW) -> list[Record]:
    """Return the records of one event or a list of them; raises WireError for what is none."""
    return [_record(each, worker, full_window) for each in (events if isinstance(events, list) else [events])]


def dumps(records: Iterable[Record], *, first_id: int = 0, full_window: int = FULL_WINDOW) -> str:
    """Return the events as the text of a JSON array."""
    return json.dumps(encode(records, first_id=first_id, full_window=full_window), separators=(",", ":"))


def loads(text: str | bytes, *, worker: str = "", full_window: int = FULL_WINDOW) -> list[Record]:
    """Return the records of the text of an event or of a JSON array of them; errors as in `decode`."""
    try:
        events = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"events: expected JSON, got {text[:40]!r}: {error}") from error
    return decode(events, worker=worker, full_window=full_window)


def _event(record: Record, data: dict[str, Any], number: int, full_window: int) -> dict[str, Any]:
    window = getattr(record, "window", None)
    event: dict[str, Any] = {
        "event_id": number if record.id is None else record.id,
        "data": data,
        "window_size": full_window if window is None else window,
    }
    optional = {
        "attention_dp_rank": record.rank,
        "hash_algo": getattr(record, "hash_name", None),
        "layer_group_id": getattr(record, "group", None),
    }
    return event | {name: value for name, value in optional.items() if value is not None}


def _data(record: Record) -> list[dict[str, Any]]:
    if isinstance(record, StoredBlocks):
        blocks = _blocks(record)
        return [{"type": "stored", "parent_hash": _outward(record.parent), "blocks": blocks}] if blocks else []
    if isinstance(record, RemovedBlocks):
        return [{"type": "removed", "block_hashes": list(map(_outward, record.hashes))}] if record.hashes else []
    if isinstance(record, UpdatedBlocks):
        level = _difference(_level(record.source_tier), _level(record.tier))
        priority = _difference(record.old_priority, record.priority)
        return [
            {"type": "updated", "block_hash": _outward(each), "cache_level": level, "priority": priority}
            for each in record.hashes
        ]
    if isinstance(record, CreatedPools):
        return [{"type": "created", "num_blocks_per_cache_level": _per_level(record)}]
    return []


def _blocks(record: StoredBlocks) -> list[dict[str, Any]]:
    size = record.block_size or len(record.tokens)
    extra_ids = record.extra_ids or (0,) * len(record.tokens)
    level = _level(record.tier) or 0
    found = []
    for column, each in enumerate(record.hashes):
        ids = slice(column * size, (column + 1) * size)
        tokens = [
            {"type": "unique_token", "token_id": token, "token_extra_id": extra_id}
            for token, extra_id in zip(record.tokens[ids], extra_ids[ids], strict=True)
        ]
        block = {
            "type": "stored_block",
            "block_hash": _outward(each),
            "tokens": tokens,
            "cache_level": level,
            "priority": record.priorities[column] if record.priorities else DEFAULT_PRIORITY,
        }
        if record.media:
            block["mm_keys"] = [_media_key(item) for item in record.media[column]]
        if record.salt is not None:
            block["cache_salt"] = record.salt
        found.append(block)
    return found


def _media_key(media: BlockMedia) -> dict[str, Any]:
    key = {"hash": media_digest(media.key).hex(), "start_offset": max(-media.offset, 0)}
    return key if media.uuid is None else key | {"uuid": media.uuid}


def _difference(old: int | None, new: int | None) -> dict[str, Any] | None:
    return None if new is None else {"type": "event_diff", "new_value": new, "old_value": old}


def _level(tier: str | None) -> int | None:
    if tier is None:
        return None
    if tier.startswith("level ") and tier[6:].isdigit():
        return int(tier[6:])
    return TIERS.index(tier) if tier in TIERS else len(TIERS) - 1


def _tier(level: Any, field: str) -> str:
    number = check(level, field, int)
    return TIERS[number] if 0 <= number < len(TIERS) else f"level {number}"


def _per_level(record: CreatedPools) -> list[int]:
    numbers = {_level(tier): number for tier, number in record.num_blocks}
    num_levels = max([MIN_LEVELS, *(level + 1 for level in numbers if level is not None)])
    return [numbers.get(level, 0) for level in range(num_levels)]


def _outward(name: Hash | None) -> int | str | None:
    """Return the name of a block as JSON has it: an int, or the hex digits of a digest."""
    return name.hex() if isinstance(name, bytes) else name


def _inward(names: Sequence[Any], field: str) -> tuple[Hash, ...]:
    try:
        return unsigned([bytes.fromhex(each) if isinstance(each, str) else each for each in names], field)
    except ValueError as error:
        if isinstance(error, WireError):
            raise
        raise WireError(f"{field}: expected ints or hex digits, got {names!r:.60}") from error


def _merged(read: Any, new: Any) -> Any:
    """Return what is to be written, with those fields of what was read that are not known here."""
    if isinstance(read, dict) and isinstance(new, dict):
        return {**read, **{name: _merged(read.get(name), value) for name, value in new.items()}}
    if isinstance(read, list) and isinstance(new, list) and len(read) == len(new):
        return [_merged(old, value) for old, value in zip(read, new, strict=True)]
    return new


def _record(event: Any, worker: str, full_window: int) -> Record:
    fields = check(event, "event", dict)
    data = check(fields.get("data"), "data", dict)
    kind = check(data.get("type"), "data.type", str)
    window = check(fields.get("window_size"), "window_size", (int, type(None)))
    told: dict[str, Any] = {
        "worker": worker,
        "id": check(fields.get("event_id"), "event_id", int),
        "rank": check(fields.get("attention_dp_rank"), "attention_dp_rank", (int, type(None))),
    }
    if kind not in DATA_FIELDS:
        return Unknown(**told, protocol="trtllm", raw=event)
    if _has_others(fields, data, kind):
        told["own"] = {"trtllm": event}
    told["window"] = None if window == full_window else window
    told["group"] = check(fields.get("layer_group_id"), "layer_group_id", (int, type(None)))
    if kind == "created":
        levels = check(data.get("num_blocks_per_cache_level"), "num_blocks_per_cache_level", list)
        numbers = tuple((_tier(level, "level"), check(each, "blocks", int)) for level, each in enumerate(levels))
        return CreatedPools(**told, num_blocks=numbers)
    told["hash_name"] = check(fields.get("hash_algo"), "hash_algo", (str, type(None)))
    if kind == "stored":
        return _read_stored(data, told)
    if kind == "removed":
        names = check(data.get("block_hashes"), "block_hashes", list)
        return RemovedBlocks(**told, hashes=_inward(names, "block_hashes"))
    return _read_updated(data, told)


def _has_others(fields: dict[str, Any], data: dict[str, Any], kind: str) -> bool:
    """Say whether there are fields that are not known here."""
    if not (fields.keys() <= EVENT_FIELDS and data.keys() <= DATA_FIELDS[kind]):
        return True
    blocks = data.get("blocks")
    return isinstance(blocks, list) and any(
        isinstance(block, dict) and (not block.keys() <= BLOCK_FIELDS or _has_other_tokens(block.get("tokens")))
        for block in blocks
    )


def _has_other_tokens(tokens: Any) -> bool:
    return isinstance(tokens, list) and any(isinstance(each, dict) and len(each) != NUM_TOKEN_FIELDS for each in tokens)


def _read_stored(data: dict[str, Any], told: dict[str, Any]) -> StoredBlocks:
    blocks = [check(each, "blocks", dict) for each in check(data.get("blocks"), "blocks", list)]
    parent = data.get("parent_hash")
    tokens = [check_each(each.get("tokens"), "tokens", dict) for each in blocks]
    size = len(tokens[0]) if tokens else None
    for each in tokens[:-1]:
        if len(each) != size:
            raise WireError(f"blocks: expected {size} tokens in all but the last, got {len(each)}")
    extra_ids = tuple(check(each.get("token_extra_id", 0), "token_extra_id", int) for row in tokens for each in row)
    keys = [check(each.get("mm_keys"), "mm_keys", (list, type(None))) or () for each in blocks]
    media = tuple(tuple(map(_read_media, row)) for row in keys)
    levels = {check(each.get("cache_level", 0), "cache_level", int) for each in blocks}
    if len(levels) > 1:
        raise WireError(f"blocks: expected one cache_level in an event, got {sorted(levels)}")
    return StoredBlocks(
        **told,
        hashes=_inward([each.get("block_hash") for each in blocks], "block_hash"),
        parent=None if parent is None else _inward([parent], "parent_hash")[0],
        tokens=tuple(check(each.get("token_id"), "token_id", int) for row in tokens for each in row),
        block_size=size,
        tier=_tier(levels.pop() if levels else 0, "cache_level"),
        priorities=tuple(check(each.get("priority", DEFAULT_PRIORITY), "priority", int) for each in blocks),
        extra_ids=extra_ids if any(extra_ids) else (),
        media=media if any("mm_keys" in each for each in blocks) else (),
        salt=check(blocks[0].get("cache_salt"), "cache_salt", (str, int, type(None))) if blocks else None,
    )


def _read_media(key: Any) -> BlockMedia:
    fields = check(key, "mm_keys", dict)
    return BlockMedia(
        check(fields.get("hash"), "mm_keys.hash", str),
        -check(fields.get("start_offset"), "mm_keys.start_offset", int),
        uuid=check(fields.get("uuid"), "mm_keys.uuid", (str, type(None))),
    )


def _read_updated(data: dict[str, Any], told: dict[str, Any]) -> UpdatedBlocks:
    old_level, level = _read_difference(data.get("cache_level"), "cache_level")
    old_priority, priority = _read_difference(data.get("priority"), "priority")
    return UpdatedBlocks(
        **told,
        hashes=_inward([data.get("block_hash")], "block_hash"),
        source_tier=None if old_level is None else _tier(old_level, "cache_level"),
        tier=None if level is None else _tier(level, "cache_level"),
        old_priority=old_priority,
        priority=priority,
    )


def _read_difference(value: Any, field: str) -> tuple[int | None, int | None]:
    if value is None:
        return None, None
    fields = check(value, field, dict)
    old = check(fields.get("old_value"), f"{field}.old_value", (int, type(None)))
    return old, check(fields.get("new_value"), f"{field}.new_value", int)
