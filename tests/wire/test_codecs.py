"""Every form of events passes the suite: what is sent while a cache is used tells an index what is in it."""

import json
from copy import deepcopy
from random import Random

import msgspec
import pytest
from tests.wire.blocks import Log, Media

from kvist.errors import ArgumentError, WireError
from kvist.testing import EventCodecSuite
from kvist.wire import (
    FORMATS,
    Converter,
    Encoder,
    PrefixIndex,
    Recorder,
    RunNames,
    Scope,
    dynamo,
    jsonl,
    mooncake,
    sglang,
    trtllm,
    vllm,
)

ODD = (
    None, -1, 0, 2**63, 2**64 - 1, 10**30, 1.5, float("nan"), True, "", "x", "cafe", b"y", [], [1, 2], [[]], [None], {},
    {"a": 1}, {"bytes": "zz"}, {"bytes": 1}, {"float": 1}, {"map": [[1]]}, {"map": [[[1], 2]]}, [["a", 1]],
)  # fmt: skip
"""Values that fields do not have, and some that they do."""


def all_events():
    """Every kind of event, with media, a tenant, a window and blocks that are left out."""
    log = Log()
    plain, media = log.run(range(12)), log.run(range(50, 62), media=[Media(2, 6, "cat")])
    tenants = log.run(range(8), namespace=("tenant", 7))
    return [
        log.created(), log.created(1, "sliding", 8), log.stored(plain), log.stored(media), log.stored(tenants),
        log.moved(plain, "device", "host", 1, 2), log.updated(plain, 35, 50), log.removed(plain, 0, 1),
        log.stored(plain, 0, 3, group=1, columns=(0, 2)), log.cleared(("tenant", 7)), log.cleared(),
    ]  # fmt: skip


def places(value, path=()):
    """Where in nested lists and maps there is a value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*path, key))


def with_something_odd(value, chance):
    """A copy in which one to three values are others, are missing, or are more."""
    value = deepcopy(value)
    for _ in range(chance.randint(1, 3)):
        *path, key = chance.choice([path for path in places(value) if path])
        inside, odd = value, deepcopy(chance.choice(ODD))
        for each in path:
            inside = inside[each]
        match chance.randrange(6):
            case 0:
                del inside[key]
            case 1 if isinstance(inside, list):
                inside.insert(key, odd)
            case _:
                inside[key] = odd
    return value


class Ours(EventCodecSuite):
    """A format of this library, by its name."""

    form = ""

    def encoder(self):
        return Encoder(self.form, Recorder(self.names()))

    def unpacked(self, message):
        if FORMATS[self.form].is_binary:
            return msgspec.msgpack.decode(message)
        return [json.loads(line) for line in message.splitlines()] if self.form == "kvist" else json.loads(message)

    def packed(self, values):
        if FORMATS[self.form].is_binary:
            return msgspec.msgpack.encode(values)
        lines = values if self.form == "kvist" else [values]
        return "\n".join(json.dumps(each, default=str) for each in lines).encode()

    def test_odd_values_are_refused_or_go_through_to_every_other_form(self):
        values, chance, num_read = self.unpacked(self.encoder()(all_events())), Random(4), 0
        for _ in range(300):
            try:
                message = self.packed(with_something_odd(values, chance))
            except OverflowError:  # MessagePack has no such ints
                continue
            try:
                records = self.decode(message)
            except WireError:
                continue
            num_read += 1
            PrefixIndex().apply("a worker", records)
            for target in FORMATS:
                try:
                    Converter(target, remembers=True).encode(records)
                except ArgumentError:
                    continue
        assert 10 < num_read < 290

    @pytest.mark.parametrize("depth", [500, 900, 20_000])
    def test_what_is_nested_too_deep_is_refused_or_read(self, depth):
        text = b"[" * depth + b"]" * depth
        if FORMATS[self.form].is_binary:
            text = b"\x91" * depth + b"\x90"
        for message in (text, b'{"event":"cleared","x":' + text + b"}"):
            try:
                self.decode(message)
            except WireError:
                continue

    @pytest.mark.parametrize("claim", [b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\x93\xcb\0\0\0\0\0\0\0\0\xdd"])
    def test_what_claims_to_be_huge_is_refused(self, claim):
        with pytest.raises(WireError):
            self.decode(claim + b"\xff\xff\xff\xff abc")


class TestJsonLines(Ours):
    form, short_names = "kvist", False

    def decode(self, message):
        return jsonl.decode(message)


class TestVllm(Ours):
    form, short_names = "vllm", False

    def decode(self, message):
        return vllm.decode(message)


class TestVllmArrays(Ours):
    form = "vllm-array"

    def decode(self, message):
        return vllm.decode(message)


class TestSglang(Ours):
    form = "sglang"

    def decode(self, message):
        return sglang.decode(message)


class TestTensorRT(Ours):
    form, tells_all_tiers = "trtllm", False

    def decode(self, message):
        return trtllm.loads(message)


class TestMooncake(Ours):
    form = "mooncake"

    def decode(self, message):
        return mooncake.decode(message)


class TestDynamo(Ours):
    form, tells_groups = "dynamo", False

    def names(self):
        """Dynamo cannot be told of tenants but by the names of their blocks."""
        return RunNames(short=True, scope=lambda namespace: Scope())

    def decode(self, message):
        return dynamo.loads(message)
