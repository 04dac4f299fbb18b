"""Neutral records, their form as JSON lines, and the protocols that are made of public descriptions."""

import json

import msgspec
import pytest
from hypothesis import given
from tests.wire.blocks import EPOCH, Log, Media
from tests.wire.drawn import any_record

from kvist.errors import ArgumentError, WireError
from kvist.wire import Encoder, Recorder, RunNames, dynamo, jsonl, mooncake
from kvist.wire.records import AllCleared, BlockMedia, RemovedBlocks, StoredBlocks, Unknown, check, unsigned

pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode


def test_names_below_0_have_the_same_64_bits():
    assert unsigned([1, -1, b"x"], "hashes") == (1, 2**64 - 1, b"x")
    for wrong in (2**64, -(2**63) - 1, "x", None, True):
        with pytest.raises(WireError, match="hashes: expected bytes or ints of 64 bits"):
            unsigned([wrong], "hashes")


def test_an_error_says_field_expected_and_got():
    with pytest.raises(WireError, match=r"^medium: expected str or nil, got 5$"):
        check(5, "medium", (str, type(None)))


def test_a_line_has_all_that_an_event_says():
    log = Log()
    run = log.run(range(8), namespace=("a", 1, b"\x02"), media=[Media(1, 2, "cat")])
    text = Encoder("kvist")([log.stored(run, 1, 2), log.cleared(("a", 1, b"\x02"))]).decode()
    stored, cleared = map(json.loads, text.splitlines())
    first, second = (each.hex() for each in run.digests())
    salt = stored.pop("salt")
    assert stored == {
        "event": "stored", "id": 0, "epoch": EPOCH, "hashes": [second], "parent": first, "tokens": [4, 5, 6, 7],
        "block_size": 4, "group": 0, "tier": "device", "start": 1, "priorities": [35],
        "namespace": ["a", 1, {"bytes": "02"}], "hash_name": "kvist_sha256", "reason": "computed",
    }  # fmt: skip
    assert len(salt) == 64
    namespace = ["a", 1, {"bytes": "02"}]
    assert cleared == {"event": "cleared", "id": 1, "epoch": EPOCH, "namespace": namespace, "reason": "reset"}


@given(any_record())
def test_lines_lose_nothing(record):
    assert jsonl.decode(jsonl.encode([record])) == [record]


def test_lines_of_later_versions_go_through():
    lines = ['{"event":"removed","hashes":[1],"later":{"x":[1]}}', '{"event":"touched","x":1}']
    records = jsonl.decode("\n".join([*lines, "", " "]), worker="w")
    assert records[0].worker == "w"
    assert isinstance(records[1], Unknown)
    written = [json.loads(line) for line in jsonl.encode(records).splitlines()]
    assert [{name: each[name] for name in each if name != "worker"} for each in written] == list(map(json.loads, lines))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line: expected a JSON object"),
        ("[]", r"line: expected dict, got \[\]"),
        ("{}", "event: expected str, got None"),
        ('{"event":"stored"}', "stored: expected a field hashes, got event"),
        ('{"event":"created"}', "created: expected a field num_blocks"),
        ('{"event":"removed","hashes":["x"]}', "hashes: expected hex digits, got 'x'"),
        ('{"event":"removed","hashes":[1],"group":"x"}', "group: expected int or nil, got 'x'"),
        ('{"event":"removed","hashes":[1],"tier":3}', "tier: expected str or nil, got 3"),
        ('{"event":"stored","hashes":[1],"tokens":3}', "tokens: expected list, got 3"),
    ],
)
def test_what_is_no_line_of_an_event_is_refused(line, says):
    with pytest.raises(WireError, match=says):
        jsonl.decode(line)


def test_dynamo_has_these_fields():
    log = Log()
    run = log.run(range(8))
    recorder = Recorder(RunNames(short=True), worker="12", rank=3)
    events = json.loads(
        Encoder("dynamo", recorder)([log.stored(run), log.removed(run, 1, 2, tier="host"), log.cleared()])
    )
    names = RunNames(short=True).of(run, 0, 2)
    hashes = dynamo.tokens_hashes(range(8), 4)
    blocks = [
        {"block_hash": name, "tokens_hash": tokens_hash, "mm_extra_info": None}
        for name, tokens_hash in zip(names, hashes, strict=True)
    ]
    stored = {"event_id": 0, "data": {"stored": {"parent_hash": None, "blocks": blocks}}, "dp_rank": 3}
    assert events[0] == {"worker_id": 12, "storage_tier": "device", "event": stored}
    assert events[1]["storage_tier"] == "host_pinned"
    assert events[1]["event"] == {"event_id": 1, "data": {"removed": {"block_hashes": [names[1]]}}, "dp_rank": 3}
    assert events[2]["event"]["data"] == "cleared"


def test_dynamos_events_go_through_with_fields_of_later_releases():
    media = {"mm_objects": [{"mm_hash": 5, "offsets": [[1, 3]]}]}
    block = {"block_hash": 1, "tokens_hash": 2, "mm_extra_info": media, "later": 1}
    data = {"stored": {"parent_hash": 9, "start_position": 7, "blocks": [block]}}
    outer = {"worker_id": 4, "storage_tier": "external", "event": {"event_id": 8, "data": data, "dp_rank": 0, "x": 1}}
    events = [outer | {"y": 2}, {"worker_id": 4, "event": {"event_id": 9, "data": {"pinned": 1}}}]
    records = dynamo.loads(json.dumps(events))
    assert records[0].media == ((BlockMedia(5, 1, 2),),)
    assert json.loads(dynamo.dumps(records)) == events
    (bare,) = dynamo.decode({"event_id": 1, "data": {"removed": {"block_hashes": [3]}}}, worker="w")
    assert bare == RemovedBlocks(worker="w", rank=0, id=1, hashes=(3,), tier="device")


def test_dynamo_is_not_told_what_cannot_be_hashed_for_it():
    for record in (
        StoredBlocks(hashes=(1,), tokens=(1,), block_size=1, salt="s"),
        StoredBlocks(hashes=(1, 2), tokens=(1,), block_size=1),
    ):
        with pytest.raises(ArgumentError, match="Dynamo"):
            dynamo.encode([record])


@pytest.mark.parametrize(
    "text", ["{", "[7]", '{"event": {"event_id": 1}}', '{"event": {"event_id": 1, "data": {"stored": {}}}}']
)
def test_what_is_no_event_of_dynamo_is_refused(text):
    with pytest.raises(WireError):
        dynamo.loads(text)


def test_mooncake_has_an_event_for_each_block():
    log = Log()
    run = log.run(range(8))
    encode = Encoder("mooncake", Recorder(clock=lambda: 1.5), backend_id="pool", model_name="m", tenant_id="t")
    stamp, events, rank = unpack(
        encode([log.stored(run, tier="host"), log.removed(run, 1, 2, tier="host"), log.cleared()])
    )
    digest = run.digests()[1]
    low = int.from_bytes(digest[-8:], "big")
    assert (stamp, rank, [each["event_id"] for each in events]) == (1500, None, [0, 1, 2, 3])
    assert events[1] == {
        "event_id": 1, "timestamp": 1500, "event_type": "stored", "model_name": "m", "block_size": 4,
        "additional_salt": None, "lora_name": None, "tenant_id": "t", "backend_id": "pool", "medium": "cpu",
        "dp_rank": 0, "group_id": "0", "seq_hashes": [low], "base_block_idx": 1,
        "parent_hash": int.from_bytes(run.digests()[0][-8:], "big"), "token_ids": [4, 5, 6, 7],
        "connector_block_hash": digest.hex(), "object_key": f"m@group:0@{digest.hex()}",
    }  # fmt: skip
    assert events[2]["event_type"] == "removed"
    assert not events[2].keys() & {"parent_hash", "token_ids", "connector_block_hash"}
    assert (events[3]["event_type"], events[3]["medium"]) == ("cleared", None)


def test_mooncakes_events_go_through():
    common = {"event_id": 3, "timestamp": 2000, "model_name": "m", "block_size": None, "additional_salt": None,
              "lora_name": None, "tenant_id": "t", "backend_id": "b", "medium": "Disk", "dp_rank": 0}  # fmt: skip
    removed = common | {"event_type": "removed", "group_id": None, "seq_hashes": [], "base_block_idx": None,
                        "object_key": "m@tp_rank:0@00ff", "tp_rank": 0}  # fmt: skip
    records = mooncake.decode(pack([2000, [removed, common | {"event_type": "pinned"}], None, "later"]))
    assert (records[0].hashes, records[0].tier, records[0].time_s) == ((255,), "disk", 2.0)
    _, again, _, later = unpack(mooncake.encode(records))
    assert later == "later"
    assert again == [removed | {"seq_hashes": [255]}, common | {"event_type": "pinned"}]


@pytest.mark.parametrize("batch", [7, [1, []], [1.5, [], None], [1, [7], None], [1, [{"event_type": "stored"}], None]])
def test_what_is_no_batch_of_mooncake_is_refused(batch):
    with pytest.raises(WireError):
        mooncake.decode(pack(batch))


def test_a_cleared_record_is_the_same_whoever_says_it():
    for text in (pack([1000, [{"event_type": "cleared", "event_id": 1}], None]),):
        assert isinstance(mooncake.decode(text)[0], AllCleared)
