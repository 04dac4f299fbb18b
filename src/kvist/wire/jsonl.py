"""Kvist's own form of events: a JSON object a line, which has all that records have.

Bytes are `{"bytes": hex}` where text could stand as well, numbers that JSON lacks `{"float": "nan"}`, and names of
blocks are ints or hex digits. A field that has nothing to say is left out; one that is not known here goes through.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from math import isfinite
from typing import Any

from kvist.errors import WireError
from kvist.wire.records import (
    AllCleared,
    BlockMedia,
    CreatedPools,
    Hash,
    MovedBlocks,
    Record,
    RemovedBlocks,
    StoredBlocks,
    Unknown,
    UpdatedBlocks,
    check,
    check_each,
    ints,
    unsigned,
)

__all__ = ["decode", "encode"]

KINDS: dict[str, type[Record]] = {
    "stored": StoredBlocks,
    "moved": MovedBlocks,
    "removed": RemovedBlocks,
    "updated": UpdatedBlocks,
    "cleared": AllCleared,
    "created": CreatedPools,
    "unknown": Unknown,
}
_NAMES = {kind: name for name, kind in KINDS.items()}
_DEFAULTS = {
    kind: {each.name: None if each.default is MISSING else each.default for each in fields(kind)}
    for kind in KINDS.values()
}
_RUNS_OF_INTS = ("tokens", "priorities", "extra_ids")
_OPTIONAL_INTS = (
    "rank",
    "id",
    "epoch",
    "block_size",
    "group",
    "start",
    "window",
    "lora_id",
    "old_priority",
    "priority",
)
_TEXTS = ("worker", "tier", "source_tier", "kind", "lora_name", "locality", "hash_name", "reason", "protocol")
_PLAIN: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(_OPTIONAL_INTS, (int, type(None))),
    **dict.fromkeys(_TEXTS, (str, type(None))),
    "time_s": (int, float, type(None)),
    "salt": (str, int, type(None)),
}


def encode(records: Iterable[Record]) -> str:
    """Return a line for each record, each with its end."""
    return "".join(json.dumps(_object(each), separators=(",", ":"), allow_nan=False) + "\n" for each in records)


def decode(lines: str | bytes | Iterable[str | bytes], *, worker: str = "") -> list[Record]:
    """Return the records of lines, empty ones left out; raises WireError for what is none.

    `worker` stands for that of lines that name none.
    """
    if isinstance(lines, (str, bytes)):
        lines = lines.splitlines()
    try:
        return [_record(line, worker) for line in lines if line.strip()]
    except RecursionError as error:
        raise WireError("line: expected a JSON object, got one that is nested too deep") from error


def _object(record: Record) -> dict[str, Any]:
    if isinstance(record, Unknown) and record.protocol == "kvist":
        return dict(record.raw)
    found: dict[str, Any] = {"event": _NAMES[type(record)]}
    for name, default in _DEFAULTS[type(record)].items():
        value = getattr(record, name)
        if name == "hashes":
            found[name] = list(map(_name, value))
        elif name == "parent" and value is not None:
            found[name] = _name(value)
        elif name == "media" and value:
            found[name] = [[_media(each) for each in row] for row in value]
        elif name == "own" and value:
            found |= {key: _plain(each) for key, each in value.get("kvist", {}).items()}
            own = {key: _plain(each) for key, each in value.items() if key != "kvist"}
            found |= {"own": own} if own else {}
        elif name not in ("hashes", "own") and value != default:
            found[name] = _plain(value)
    return found


def _name(value: Hash) -> int | str:
    return value.hex() if isinstance(value, bytes) else value


def _media(media: BlockMedia) -> dict[str, Any]:
    found = {"key": _plain(media.key), "offset": media.offset, "length": media.length, "uuid": media.uuid}
    return {name: value for name, value in found.items() if value is not None}


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not isfinite(value):
        return {"float": repr(value)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and value.keys() - {"bytes", "float", "map"}:
            return {key: _plain(each) for key, each in value.items()}
        return {"map": [[_plain(key), _plain(each)] for key, each in value.items()]}
    return value


def _restored(value: Any) -> Any:
    """Return what a JSON value stands for; arrays are tuples."""
    if isinstance(value, list):
        return tuple(_restored(each) for each in value)
    if isinstance(value, dict):
        if value.keys() == {"bytes"}:
            return _bytes(value["bytes"], "bytes")
        if value.keys() == {"float"}:
            return _float(value["float"])
        if value.keys() == {"map"}:
            return dict(map(_pair, check_each(value["map"], "map", list)))
        return {key: _restored(each) for key, each in value.items()}
    return value


def _record(line: str | bytes, worker: str) -> Record:
    try:
        read = json.loads(line)
    except ValueError as error:
        raise WireError(f"line: expected a JSON object, got {line[:40]!r}: {error}") from error
    values = check(read, "line", dict)
    name = check(values.get("event"), "event", str)
    kind = KINDS.get(name)
    if kind is None:
        return Unknown(worker=worker, protocol="kvist", raw=values)
    told = {key: _value(key, each) for key, each in values.items() if key in _DEFAULTS[kind]}
    others = {key: _restored(each) for key, each in values.items() if key not in _DEFAULTS[kind] and key != "event"}
    if others:
        told["own"] = {**(told.get("own") or {}), "kvist": others}
    told.setdefault("worker", worker)
    for needed in ("hashes", "num_blocks", "protocol", "raw"):
        if needed in _DEFAULTS[kind] and needed not in told:
            raise WireError(f"{name}: expected a field {needed}, got {', '.join(values)}")
    return kind(**told)


def _value(field: str, value: Any) -> Any:
    """Return the value of a field, checked."""
    if field in _RUNS_OF_INTS:
        return ints(value, field)
    if field in _PLAIN:
        return check(value, field, _PLAIN[field])
    reader = _READERS.get(field)
    return _restored(value) if reader is None else reader(value, field)


def _read_hashes(value: Any, field: str) -> tuple[Hash, ...]:
    names = check(value, field, list)
    return unsigned([_bytes(each, field) if isinstance(each, str) else each for each in names], field)


def _read_parent(value: Any, field: str) -> Hash:
    return _read_hashes([value], field)[0]


def _read_rows_of_media(value: Any, field: str) -> tuple[tuple[BlockMedia, ...], ...]:
    rows = [check_each(row, field, dict) for row in check_each(value, field, list)]
    return tuple(tuple(map(_read_media, row)) for row in rows)


def _read_pools(value: Any, field: str) -> tuple[tuple[str, int], ...]:
    return tuple(map(_read_pool, check_each(value, field, list)))


def _read_extra_keys(value: Any, field: str) -> Any:
    return _restored(check_each(value, field, (list, type(None))))


def _read_namespace(value: Any, field: str) -> tuple[str | int | bytes, ...] | None:
    parts = check(value, field, (list, type(None)))
    return None if parts is None else tuple(check_each(list(_restored(parts)), field, (str, int, bytes)))


def _read_own(value: Any, field: str) -> Any:
    return _restored(check(value, field, dict))


_READERS: dict[str, Callable[[Any, str], Any]] = {
    "hashes": _read_hashes,
    "parent": _read_parent,
    "media": _read_rows_of_media,
    "num_blocks": _read_pools,
    "extra_keys": _read_extra_keys,
    "namespace": _read_namespace,
    "own": _read_own,
}


def _read_pool(pair: list[Any]) -> tuple[str, int]:
    """Return a tier and how many blocks it has."""
    if len(pair) != 2:
        raise WireError(f"num_blocks: expected a tier and a number, got {pair!r:.60}")
    return check(pair[0], "num_blocks", str), check(pair[1], "num_blocks", int)


def _read_media(item: dict[str, Any]) -> BlockMedia:
    """Return media; what else is told of them is not known here, and left out."""
    return BlockMedia(
        check(_restored(item.get("key")), "media.key", (str, int, bytes)),
        check(item.get("offset", 0), "media.offset", int),
        check(item.get("length"), "media.length", (int, type(None))),
        check(item.get("uuid"), "media.uuid", (str, type(None))),
    )


def _pair(pair: list[Any]) -> tuple[Any, Any]:
    try:
        key, value = map(_restored, pair)
        hash(key)
    except (TypeError, ValueError) as error:
        raise WireError(f"map: expected a key and a value, got {pair!r:.60}") from error
    return key, value


def _float(text: Any) -> float:
    try:
        return float(check(text, "float", str))
    except ValueError as error:
        raise WireError(f"float: expected nan, inf or -inf, got {text!r:.60}") from error


def _bytes(text: Any, field: str) -> bytes:
    try:
        return bytes.fromhex(check(text, field, str))
    except ValueError as error:
        raise WireError(f"{field}: expected hex digits, got {text!r:.60}") from error
