"""From each format to each other: what both can say is said, and an index has what it had of the source."""

import json
from base64 import b64decode, b64encode
from itertools import product

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.blocks import Log
from tests.wire.drawn import stored_by_all

from kvist.errors import ArgumentError, WireError
from kvist.wire import FORMATS, Converter, Encoder, PrefixIndex, Recorder, RunNames, convert, decode_line
from kvist.wire.records import RemovedBlocks, StoredBlocks

BLOCKS = {"hashes", "parent", "tier"}
VLLM = {
    *BLOCKS,
    "tokens",
    "block_size",
    "group",
    "kind",
    "window",
    "lora_id",
    "lora_name",
    "salt",
    "locality",
    "rank",
    "time_s",
}
SAYS = {
    "kvist": {*VLLM},
    "vllm": VLLM,
    "vllm-array": VLLM,
    "sglang": VLLM,
    "trtllm": {*BLOCKS, "tokens", "block_size", "group", "window", "salt", "rank"},
    "dynamo": BLOCKS,
    "mooncake": {*BLOCKS, "tokens", "block_size", "group", "lora_name", "salt"},
}
PAIRS = list(product(FORMATS, FORMATS))


def lines_of(records, target):
    """Records in a format, as lines of text."""
    message = Converter(target).encode(records)
    return [b64encode(message).decode()] if FORMATS[target].is_binary else message.decode().splitlines()


def read(lines, source):
    return [record for line in lines for record in decode_line(line, source)]


def joined(records):
    """One record of all blocks, where a format has a record for each."""
    first, found = records[0], {}
    for name in SAYS["vllm"]:
        values = [getattr(each, name) for each in records]
        found[name] = sum(values, ()) if name in ("hashes", "tokens") else values[0]
    return first, found


@pytest.mark.parametrize(("source", "target"), PAIRS)
@given(record=stored_by_all())
def test_what_both_can_say_is_not_lost(source, target, record):
    said = SAYS[source] & SAYS[target]
    if "dynamo" in (source, target):
        record = StoredBlocks(**{name: getattr(record, name) for name in (*BLOCKS, "tokens", "block_size")})
    if source == "dynamo" and target == "dynamo":
        said = BLOCKS
    if "vllm" in source + target or "sglang" in source + target:
        said = said if record.parent is None else said - {"salt"}
    if source == "dynamo":
        said = said & BLOCKS
    found = read(convert(lines_of([record], source), source, target), target)
    _, values = joined(found)
    for name in sorted(said):
        assert values[name] == getattr(record, name), name


@pytest.mark.parametrize("target", [each for each in FORMATS if each != "dynamo"])
def test_the_same_format_gives_the_same_lines(target):
    log = Log()
    run = log.run(range(8))
    events = [log.created(), log.stored(run), log.moved(run, "device", "host", 1, 2), log.removed(run, 0, 1)]
    message = Encoder(target, Recorder(RunNames(short=True)))(events)
    lines = [b64encode(message).decode()] if FORMATS[target].is_binary else message.decode().splitlines()
    again = list(convert(lines, target, target))
    if FORMATS[target].is_binary:
        assert [msgspec.msgpack.decode(b64decode(line)) for line in again] == [msgspec.msgpack.decode(message)]
    elif target == "trtllm":
        assert list(map(json.loads, again)) == json.loads(message)
    else:
        assert again == lines


@st.composite
def histories(draw):
    """A log of what happens to three runs of four blocks, in two tiers; stored in both, or moved, or removed."""
    log = Log()
    runs = [log.run(range(100 * at, 100 * at + 16)) for at in range(3)]
    held, events = set(), []
    for _ in range(draw(st.integers(1, 12))):
        which, tier = draw(st.integers(0, 2)), draw(st.sampled_from(["device", "host"]))
        other = {"device": "host", "host": "device"}[tier]
        if (which, tier) not in held:
            held.add((which, tier))
            if (which, other) in held and draw(st.booleans()):
                held.remove((which, other))
                events.append(log.moved(runs[which], other, tier))
            else:
                events.append(log.stored(runs[which], tier=tier))
        elif draw(st.integers(0, 5)):
            held.remove((which, tier))
            events.append(log.removed(runs[which], tier=tier))
        else:
            held.clear()
            events.append(log.cleared())
    return events, {(name, tier) for which, tier in held for name in RunNames(short=True).of(runs[which], 0, 4)}


def indexed(records):
    index = PrefixIndex()
    for record in records:
        assert index.apply("", [record], sequence=None, rank=0) is None or record.id is not None
    return {
        (name, tier)
        for worker, rank in index.workers
        for (_, tier), names in index.blocks(worker, rank=rank).items()
        for name in names
    }


@pytest.mark.parametrize("target", FORMATS)
@given(history=histories())
def test_an_index_of_each_format_has_what_the_log_has(target, history):
    events, held = history
    message = Encoder(target, Recorder(RunNames(short=True)))(events)
    line = b64encode(message).decode() if FORMATS[target].is_binary else message
    records = read(line.splitlines() if target == "kvist" else [line], target)
    if target == "trtllm":
        held = {(name, tier) for name, tier in held if tier == "device" or (name, "device") not in held}
    assert indexed(records) == held


@pytest.mark.parametrize(("source", "target"), [pair for pair in PAIRS if "dynamo" not in pair])
@given(history=histories())
def test_an_index_of_what_was_converted_is_that_of_the_source(source, target, history):
    message = Encoder(source, Recorder(RunNames(short=True)))(history[0])
    lines = [b64encode(message).decode()] if FORMATS[source].is_binary else message.decode().splitlines()
    before, after = indexed(read(lines, source)), indexed(read(convert(lines, source, target), target))
    if target == "trtllm":
        before = {(name, tier) for name, tier in before if tier == "device" or (name, "device") not in before}
    assert after == before


def test_a_change_of_level_brings_the_tokens_of_the_store_before():
    log = Log()
    run = log.run(range(8))
    message = Encoder("trtllm", Recorder(RunNames(short=True)))(
        [log.stored(run), log.moved(run, "device", "host", 1, 2)]
    )
    (line,) = convert([message], "trtllm", "vllm")
    records = decode_line(line, "vllm")
    assert [type(each) for each in records] == [StoredBlocks, StoredBlocks, RemovedBlocks]
    assert (records[1].tier, records[1].tokens, records[1].parent) == ("host", (4, 5, 6, 7), records[0].hashes[0])


def test_events_of_json_formats_go_out_one_a_line():
    log = Log()
    run = log.run(range(4))
    message = Encoder("trtllm", Recorder(RunNames(short=True)))([log.stored(run), log.removed(run)])
    assert len(list(convert([message, b"\n"], "trtllm", "trtllm"))) == 2
    assert len(list(convert([message], "trtllm", "kvist"))) == 2


def test_what_is_not_of_the_source_is_refused():
    with pytest.raises(WireError, match="base64"):
        list(convert(["?"], "vllm", "kvist"))
    with pytest.raises(WireError, match="batch"):
        list(convert([b64encode(msgspec.msgpack.encode(1)).decode()], "vllm", "kvist"))
    with pytest.raises(ArgumentError, match="'xml' is not one of kvist, vllm"):
        list(convert([], "kvist", "xml"))
