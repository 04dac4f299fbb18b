"""vLLM's event stream: MessagePack batches `[time, events, data-parallel rank]`.

Each event is a map, or, as older releases have it, an array `[name, field, ...]`. Both are read as they come.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvist.errors import WireError
from kvist.wire.hashes import Scope, extra_keys_of
from kvist.wire.msgpack import pack, unpack
from kvist.wire.narrowing import ByMedium
from kvist.wire.records import (
    AllCleared,
    BlockMedia,
    Record,
    RemovedBlocks,
    StoredBlocks,
    Unknown,
    check,
    check_each,
    ints,
    unsigned,
)

__all__ = ["KINDS", "STORED", "Dialect", "as_array", "decode", "encode", "events_of", "narrowing", "read_batch"]

Form = Literal["map", "array"]
TIERS = {
    "GPU": "device", "DEVICE": "device", "CPU": "host", "CPU_PINNED": "host", "CPU_TIER1": "host", "FS": "disk",
    "DISK": "disk", "NVME": "disk", "CPU_TIER2": "disk", "OBJ": "remote", "EXTERNAL": "remote", "NETWORK": "remote",
    "REMOTE": "remote", "SHARED": "remote",
}  # fmt: skip
KINDS = {
    "full": "full_attention", "sliding": "sliding_window", "ring": "sliding_window", "state": "mamba",
    "chunked": "chunked_local_attention", "cross": "cross_attention",
}  # fmt: skip
_KINDS_READ = {word: kind for kind, word in KINDS.items() if kind != "ring"}
STORED = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality",
)  # fmt: skip
REMOVED = ("block_hashes", "medium", "group_idx", "locality")
_STORED_KNOWN = frozenset(("type", *STORED))
_REMOVED_KNOWN = frozenset(("type", *REMOVED))
ARRAY = "as array"
"""Where a map of fields keeps how many of them an array had, and what came after those that are known."""
_BATCH = ("ts", "events", "data_parallel_rank")
_EMPTY: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Dialect:
    """A protocol with vLLM's events: its words for tiers, and its array form.

    `arrays` has, for each event, its fields in their order, and how many of them are always written; others are left
    out at the end where they are None.
    """

    name: str
    media: Mapping[str, str]
    arrays: Mapping[str, tuple[tuple[str, ...], int]]


VLLM = Dialect(
    "vllm",
    {"device": "GPU", "host": "CPU", "disk": "FS", "remote": "OBJ"},
    {"BlockStored": (STORED, 7), "BlockRemoved": (REMOVED, 2), "AllBlocksCleared": ((), 0)},
)


def narrowing(*, remembers: bool = False) -> ByMedium:
    """Return what brings records into vLLM's terms."""
    return ByMedium(remembers=remembers)


def encode(
    records: Sequence[Record], *, form: Form = "map", time_s: float | None = None, rank: int | None = None
) -> bytes:
    """Return a batch of these records; what vLLM has no word for is left out.

    `time_s` and `rank` stand for those that the records do not have.
    """
    first = records[0] if records else Record()
    events = events_of(records, VLLM)
    if form == "array":
        events = [as_array(event, VLLM) for event in events]
    else:
        for event in events:
            if isinstance(event, dict):
                event.pop(ARRAY, None)
    stamp = first.time_s if first.time_s is not None else time_s or 0.0
    batch: list[Any] = [stamp, events, first.rank if first.rank is not None else rank]
    return pack(batch + list((first.own or {}).get("vllm batch", ())))


def decode(payload: bytes, *, worker: str = "") -> list[Record]:
    """Return the records of a batch; raises WireError for what is none."""
    return read_batch(unpack(payload), worker, VLLM)


def events_of(records: Iterable[Record], dialect: Dialect) -> list[Any]:
    """Return the events, as maps, of those records that the dialect has words for."""
    found: list[Any] = []
    for record in records:
        if isinstance(record, StoredBlocks):
            found.append(_stored(record, dialect))
        elif isinstance(record, RemovedBlocks):
            found.append(_removed(record, dialect))
        elif isinstance(record, AllCleared):
            found.append({"type": "AllBlocksCleared"} | _others(record, dialect))
        elif isinstance(record, Unknown) and record.protocol == dialect.name:
            found.append(record.raw)
    return found


def _stored(record: StoredBlocks, dialect: Dialect) -> dict[str, Any]:
    event: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": record.hashes,
        "parent_block_hash": record.parent,
        "token_ids": record.tokens,
        "block_size": record.block_size or 0,
        "lora_id": record.lora_id,
        "medium": _medium(record, dialect),
        "lora_name": record.lora_name,
    }
    extra_keys = record.extra_keys
    if extra_keys is None and (record.media or record.lora_name is not None or record.salt is not None):
        extra_keys = _extra_keys(record)
    if extra_keys is not None:
        event["extra_keys"] = extra_keys
    if record.group is not None:
        event["group_idx"] = record.group
    if record.kind is not None:
        event["kv_cache_spec_kind"] = KINDS.get(record.kind, record.kind)
    if record.window is not None:
        event["kv_cache_spec_sliding_window"] = record.window
    if record.locality is not None:
        event["locality"] = record.locality
    return event | _others(record, dialect) if record.own else event


def _removed(record: RemovedBlocks, dialect: Dialect) -> dict[str, Any]:
    event: dict[str, Any] = {
        "type": "BlockRemoved",
        "block_hashes": record.hashes,
        "medium": _medium(record, dialect),
    }
    if record.group is not None:
        event["group_idx"] = record.group
    if record.locality is not None:
        event["locality"] = record.locality
    return event | _others(record, dialect) if record.own else event


def _medium(record: StoredBlocks | RemovedBlocks, dialect: Dialect) -> str | None:
    """Return the word for the tier: the one that was read, where it means the same."""
    word = (record.own or {}).get(f"{dialect.name} medium")
    if word is not None and TIERS.get(word, word) == record.tier:
        return str(word)
    return None if record.tier is None else dialect.media.get(record.tier, record.tier)


def _extra_keys(record: StoredBlocks) -> tuple[tuple[Any, ...] | None, ...] | None:
    scope = Scope(lora_name=record.lora_name, salt=record.salt)
    media = record.media or (_EMPTY,) * len(record.hashes)
    keys = tuple(extra_keys_of(scope, each, record.parent is None and not column) for column, each in enumerate(media))
    return keys if any(keys) else None


def _others(record: Record, dialect: Dialect) -> dict[str, Any]:
    """Return the fields that only this dialect knows."""
    return dict((record.own or {}).get(dialect.name, {}))


def as_array(event: Any, dialect: Dialect) -> Any:
    """Return the array form of an event; what is not known comes after the fields, as it was read."""
    if not isinstance(event, dict) or event.get("type") not in dialect.arrays:
        return event
    names, num_least = dialect.arrays[event["type"]]
    values = [event.get(name) for name in names]
    end = len(values)
    while end > num_least and values[end - 1] is None:
        end -= 1
    read = event.get(ARRAY)
    if read is not None and not any(value is not None for value in values[read[0] :]):
        return [event["type"], *values[: read[0]], *read[1]]
    return [event["type"], *values[:end]]


def read_batch(batch: Any, worker: str, dialect: Dialect) -> list[Record]:
    """Return the records of a batch, an array or a map."""
    if isinstance(batch, dict):
        batch = [batch.get(name) for name in _BATCH]
    items = check(batch, "batch", list)
    if len(items) < 2:
        raise WireError(f"batch: expected [time, events, rank], got {len(items)} values")
    time_s = float(check(items[0], "batch time", (int, float)))
    rank = check(items[2], "batch rank", (int, type(None))) if len(items) > 2 else None
    told: dict[str, Any] = {"worker": worker, "rank": rank, "time_s": time_s}
    more = {f"{dialect.name} batch": tuple(items[3:])} if len(items) > 3 else None
    return [_record(event, told, dialect, more) for event in check(items[1], "batch events", list)]


def _record(event: Any, told: dict[str, Any], dialect: Dialect, more: dict[str, Any] | None) -> Record:
    fields = _fields(event, dialect)
    kind = fields.get("type")
    if kind == "BlockStored":
        return _read_stored(fields, told, dialect, more)
    if kind == "BlockRemoved":
        return _read_removed(fields, told, dialect, more)
    if kind == "AllBlocksCleared":
        return AllCleared(**told, own=_own_read(fields, ("type",), None, dialect, more))
    if not isinstance(kind, str):
        raise WireError(f"event type: expected str, got {kind!r}")
    return Unknown(**told, protocol=dialect.name, raw=event, own=more)


def _fields(event: Any, dialect: Dialect) -> dict[str, Any]:
    """Return the fields of an event of either form by name, and how an array was longer or shorter."""
    if isinstance(event, dict):
        return event
    items = check(event, "event", list)
    if not items or not isinstance(items[0], str):
        raise WireError(f"event: expected a map or [name, ...], got {items!r:.60}")
    names, num_least = dialect.arrays.get(items[0], ((), 0))
    fields = {"type": items[0], **dict(zip(names, items[1:], strict=False))}
    more = tuple(items[1 + len(names) :])
    if more or len(items) - 1 < num_least or (len(items) - 1 > num_least and items[-1] is None):
        fields[ARRAY] = (min(len(items) - 1, len(names)), more)
    return fields


def _read_stored(
    fields: dict[str, Any], told: dict[str, Any], dialect: Dialect, more: dict[str, Any] | None
) -> StoredBlocks:
    name = "BlockStored"
    hashes = unsigned(_list(fields, "block_hashes", name), f"{name}.block_hashes")
    parent = fields.get("parent_block_hash")
    medium = check(fields.get("medium"), f"{name}.medium", (str, type(None)))
    lora_name = check(fields.get("lora_name"), f"{name}.lora_name", (str, type(None)))
    extra_keys = _read_extra_keys(fields.get("extra_keys"), len(hashes))
    media, salt = _read_keys(extra_keys, lora_name, parent is None)
    kind = check(fields.get("kv_cache_spec_kind"), f"{name}.kv_cache_spec_kind", (str, type(None)))
    return StoredBlocks(
        **told,
        hashes=hashes,
        parent=None if parent is None else unsigned([parent], f"{name}.parent_block_hash")[0],
        tokens=_tokens(fields, name),
        block_size=check(fields.get("block_size"), f"{name}.block_size", int),
        group=_count(fields, "group_idx", name),
        tier=TIERS.get(medium, medium) if medium else None,
        kind=_KINDS_READ.get(kind, kind) if kind else None,
        window=_count(fields, "kv_cache_spec_sliding_window", name),
        media=media,
        extra_keys=extra_keys,
        lora_id=_count(fields, "lora_id", name),
        lora_name=lora_name,
        salt=salt,
        locality=check(fields.get("locality"), f"{name}.locality", (str, type(None))),
        own=_own_read(fields, _STORED_KNOWN, medium, dialect, more),
    )


def _read_removed(
    fields: dict[str, Any], told: dict[str, Any], dialect: Dialect, more: dict[str, Any] | None
) -> RemovedBlocks:
    name = "BlockRemoved"
    medium = check(fields.get("medium"), f"{name}.medium", (str, type(None)))
    return RemovedBlocks(
        **told,
        hashes=unsigned(_list(fields, "block_hashes", name), f"{name}.block_hashes"),
        group=_count(fields, "group_idx", name),
        tier=TIERS.get(medium, medium) if medium else None,
        locality=check(fields.get("locality"), f"{name}.locality", (str, type(None))),
        own=_own_read(fields, _REMOVED_KNOWN, medium, dialect, more),
    )


def _list(fields: dict[str, Any], field: str, name: str) -> list[Any]:
    return list(check(fields.get(field), f"{name}.{field}", (list, tuple)))


def _count(fields: dict[str, Any], field: str, name: str) -> int | None:
    value = fields.get(field)
    return None if value is None else int(check(value, f"{name}.{field}", int))


def _tokens(fields: dict[str, Any], name: str) -> tuple[int, ...]:
    """Return the token ids; a pair of them, as drafting models have it, is kept as it is."""
    tokens = _list(fields, "token_ids", name)
    for each in tokens:
        if type(each) is not int:
            ints(each if isinstance(each, list) else [each], f"{name}.token_ids")
    return tuple(tokens)


def _read_extra_keys(value: Any, num_blocks: int) -> tuple[tuple[Any, ...] | None, ...] | None:
    if value is None:
        return None
    keys = check(value, "BlockStored.extra_keys", list)
    if len(keys) != num_blocks:
        raise WireError(f"BlockStored.extra_keys: expected {num_blocks} entries, one a block, got {len(keys)}")
    rows = check_each(keys, "BlockStored.extra_keys", (list, type(None)))
    return tuple(None if each is None else tuple(map(_frozen, each)) for each in rows)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _read_keys(
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None, lora_name: str | None, begins: bool
) -> tuple[tuple[tuple[BlockMedia, ...], ...], str | None]:
    """Return the media and the salt that extra keys tell of."""
    if extra_keys is None:
        return (), None
    media = tuple(tuple(_media(each) for each in keys or () if _is_media(each)) for keys in extra_keys)
    texts = [each for each in extra_keys[0] or () if isinstance(each, str)] if extra_keys and begins else []
    if lora_name is not None and texts[:1] == [lora_name]:
        del texts[0]
    return media if any(media) else (), texts[-1] if texts else None


def _is_media(key: Any) -> bool:
    return isinstance(key, tuple) and len(key) == 2 and isinstance(key[1], int)


def _media(key: tuple[Any, int]) -> BlockMedia:
    return BlockMedia(key[0], key[1])


def _own_read(
    fields: dict[str, Any], known: Iterable[str], medium: str | None, dialect: Dialect, more: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Return what only this dialect knows: other fields, and a word for the medium that is not the usual one."""
    own: dict[str, Any] = dict(more or {})
    others = {name: value for name, value in fields.items() if name not in known}
    if others:
        own[dialect.name] = others
    if medium is not None and dialect.media.get(TIERS.get(medium, medium), medium) != medium:
        own[f"{dialect.name} medium"] = medium
    return own or None
