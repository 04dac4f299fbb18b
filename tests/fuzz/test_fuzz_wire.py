"""Whatever comes over the wire is read, or is a WireError; what was read can be told on, or is a KvistError."""

from base64 import b64encode

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.drawn import DEEP, VALUES, as_json, changed, damaged
from tests.wire.blocks import Log
from tests.wire.drawn import any_record

from kvist.errors import KvistError, WireError
from kvist.wire import FORMATS, Converter, Encoder, PrefixIndex, Recorder, RunNames, decode_line
from kvist.wire.records import AllCleared, BlockMedia, RemovedBlocks, StoredBlocks, UpdatedBlocks

BINARY = [name for name, each in FORMATS.items() if each.is_binary]
TEXT = [name for name in FORMATS if name not in BINARY]

STORED = StoredBlocks(
    worker="3", rank=0, id=4, epoch=1, time_s=1.5, hashes=(7, 2**63 + 1), parent=5, tokens=(1, 2, 3, 4), block_size=2,
    group=0, tier="host", start=1, kind="sliding", window=64, priorities=(35, 80), extra_ids=(0, 0, 1, 1),
    media=((BlockMedia("m", -1, 3, "u"),), ()), lora_id=2, lora_name="l", salt="s", locality="LOCAL",
)  # fmt: skip
PLAIN = StoredBlocks(hashes=(1, 2), tokens=(1, 2, 3, 4), block_size=2, tier="device", rank=0, id=1, time_s=0.0)
RECORDS = [
    PLAIN,
    RemovedBlocks(hashes=(1,), tier="device", id=2),
    AllCleared(id=3),
    UpdatedBlocks(hashes=(7,), priority=3),
]


def seeds_of(name):
    """Messages of a format, as plain values."""
    log = Log()
    run = log.run(range(8))
    events = [log.created(), log.stored(run), log.moved(run, "device", "host", 1, 2), log.removed(run, 0, 1)]
    messages = [Encoder(name, Recorder(RunNames(short=True)))(events)]
    told = [[STORED], RECORDS] if name != "dynamo" else [RECORDS]
    messages += [Converter(name).encode(records) for records in told]
    if FORMATS[name].is_binary:
        return [msgspec.msgpack.decode(message) for message in messages]
    return [msgspec.json.decode(line) for message in messages for line in message.splitlines()]


SEEDS = {name: seeds_of(name) for name in FORMATS}
PACKED = {name: [msgspec.msgpack.encode(each) for each in SEEDS[name]] for name in BINARY}


def told_on(line, source):
    """Read a line; where it can be read, tell it in every format and to an index. Only Kvist's own errors come out."""
    try:
        records = decode_line(line, source)
    except WireError:
        return
    for target in FORMATS:
        try:
            Converter(target, remembers=True).encode(records)
        except KvistError:
            continue
    index = PrefixIndex()
    try:
        for record in records:
            index.apply("w", [record])
    except KvistError:
        return
    index.query([1, 2, 7])


def packed(value):
    """MessagePack of a value; ints that it has no room for are left as text."""
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError):
        return msgspec.msgpack.encode(repr(value))


@pytest.mark.parametrize("name", BINARY)
@given(st.data())
def test_a_batch_with_values_of_other_kinds_is_read_or_refused(name, data):
    value = data.draw(changed(SEEDS[name]) | VALUES)
    told_on(b64encode(packed(value)), name)


@pytest.mark.parametrize("name", BINARY)
@given(st.data())
def test_a_batch_with_damaged_bytes_is_read_or_refused(name, data):
    told_on(b64encode(data.draw(damaged(PACKED[name]) | st.binary(max_size=50))), name)


@pytest.mark.parametrize("name", TEXT)
@given(st.data())
def test_a_line_with_values_of_other_kinds_is_read_or_refused(name, data):
    told_on(as_json(data.draw(changed(SEEDS[name]) | VALUES)), name)


@pytest.mark.parametrize("name", TEXT)
@given(st.data())
def test_a_line_with_damaged_text_is_read_or_refused(name, data):
    lines = [as_json(value).encode() for value in SEEDS[name]]
    told_on(data.draw(damaged(lines) | st.binary(max_size=50)), name)


@pytest.mark.parametrize("name", FORMATS)
@given(line=st.text(max_size=60) | st.binary(max_size=60))
def test_any_text_is_read_or_refused(name, line):
    told_on(line, name)


@pytest.mark.parametrize("name", TEXT)
@pytest.mark.parametrize("bracket", ["[", '{"a":', '{"event":"stored","hashes":['])
def test_brackets_without_end_are_refused(name, bracket):
    with pytest.raises(WireError):
        decode_line(bracket * DEEP, name)


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize(
    "head", [b"\x91", b"\x81\xa1a", b"\x93\x00\x91", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
)
def test_arrays_and_lengths_without_end_are_refused(name, head):
    for message in (head * DEEP, head):
        with pytest.raises(WireError):
            decode_line(b64encode(message), name)


@given(record=any_record())
def test_kvists_own_lines_give_back_the_record_they_were_written_from(record):
    line = Converter("kvist").encode([record])
    assert decode_line(line, "kvist") == [record]
