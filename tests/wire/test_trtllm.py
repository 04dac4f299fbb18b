"""TensorRT-LLM's JSON, field by field, and the facts of its event manager that the form carries."""

import json

import pytest
from tests.wire.blocks import Log, Media

from kvist.errors import WireError
from kvist.wire import Encoder, Recorder, RunNames, trtllm
from kvist.wire.hashes import TensorRTChain1
from kvist.wire.records import BlockMedia, CreatedPools, RemovedBlocks, StoredBlocks, Unknown, UpdatedBlocks


def token(number, extra_id=0):
    return {"type": "unique_token", "token_id": number, "token_extra_id": extra_id}


def block(name, tokens, **more):
    return {"type": "stored_block", "block_hash": name, "tokens": tokens, "cache_level": 0, "priority": 35} | more


STORED = {
    "event_id": 1,
    "data": {
        "type": "stored",
        "parent_hash": 9,
        "blocks": [
            block(7, [token(1), token(2, 5)]),
            block(8, [token(3)], mm_keys=[{"hash": "ab", "start_offset": 4, "uuid": "u"}]),
        ],
    },
    "window_size": 128,
    "attention_dp_rank": 3,
}
UPDATED = {
    "event_id": 2,
    "data": {
        "type": "updated",
        "block_hash": 7,
        "cache_level": {"type": "event_diff", "new_value": 1, "old_value": 0},
        "priority": None,
    },
    "window_size": 128,
}
CREATED = {"event_id": 0, "data": {"type": "created", "num_blocks_per_cache_level": [8, 2]}, "window_size": 128}
REMOVED = {"event_id": 3, "data": {"type": "removed", "block_hashes": [7, 8]}, "window_size": 128}


def encoded(*events, short=True, **options):
    """The events in TensorRT-LLM's form, in one message."""
    recorder = Recorder(RunNames(short=short))
    return json.loads(Encoder("trtllm", recorder, **options)(events))


def test_every_field_of_a_stored_event_is_read_and_written():
    (record,) = trtllm.decode(STORED)
    assert record == StoredBlocks(
        id=1, rank=3, window=128, parent=9, hashes=(7, 8), tokens=(1, 2, 3), block_size=2, tier="device",
        extra_ids=(0, 5, 0), priorities=(35, 35), media=((), (BlockMedia("ab", -4, uuid="u"),)),
    )  # fmt: skip
    written = trtllm.encode([record])[0]
    keys = [each.pop("mm_keys") for each in written["data"]["blocks"]]
    assert keys[0] == []
    assert (keys[1][0]["start_offset"], keys[1][0]["uuid"]) == (4, "u")


@pytest.mark.parametrize("event", [CREATED, UPDATED, REMOVED])
def test_events_have_these_fields(event):
    text = json.dumps([event])
    assert json.loads(trtllm.dumps(trtllm.loads(text))) == [event]


def test_what_has_not_changed_is_null():
    """An update of the priority alone has no level, one of the level alone no priority."""
    log = Log()
    run = log.run(range(4))
    (event,) = encoded(log.updated(run, 35, 50))
    assert event["data"]["cache_level"] is None
    assert event["data"]["priority"] == {"type": "event_diff", "new_value": 50, "old_value": 35}
    (record,) = trtllm.decode(event)
    assert (record.tier, record.source_tier, record.old_priority, record.priority) == (None, None, 35, 50)


def test_a_move_is_an_update_of_the_level_for_each_block():
    log = Log()
    run = log.run(range(8))
    stored, *updates = encoded(log.stored(run), log.moved(run, "device", "host"))
    assert [each["data"]["cache_level"]["new_value"] for each in updates] == [1, 1]
    assert [each["event_id"] for each in (stored, *updates)] == [0, 1, 2]


def test_the_first_event_is_created_and_then_stored_ones_name_their_parents():
    """H 85 to 87: [8, 2] blocks, one stored event of two blocks without a parent, then one with the last of them."""
    log = Log()
    prompt = log.run(range(8))
    generated = log.run(range(8, 12), parent=prompt)
    created, first, second = encoded(log.created(), log.stored(prompt), log.stored(generated))
    assert (created["event_id"], created["data"]["num_blocks_per_cache_level"]) == (0, [8, 2])
    assert (first["event_id"], first["data"]["parent_hash"], len(first["data"]["blocks"])) == (1, None, 2)
    assert (second["event_id"], len(second["data"]["blocks"])) == (2, 1)
    assert second["data"]["parent_hash"] == first["data"]["blocks"][-1]["block_hash"]


def test_priorities_are_those_of_the_blocks():
    """H 93: stored with priority 50."""
    log = Log()
    event = encoded(log.stored(log.run(range(8)), priority=50))[0]
    assert [each["priority"] for each in event["data"]["blocks"]] == [50, 50]


def test_names_can_be_those_that_the_engine_would_compute():
    log = Log()
    run = log.run(range(8))
    encode = Encoder("trtllm", Recorder(RunNames(TensorRTChain1())))
    stored, removed = json.loads(encode([log.stored(run), log.removed(run, 1, 2)]))
    assert [each["block_hash"] for each in stored["data"]["blocks"]] == [733356887393045, 6310903394565074474]
    assert removed["data"]["block_hashes"] == [6310903394565074474]
    assert stored["hash_algo"] == "v1_block_key"


def test_a_group_without_a_window_has_the_longest_sequence_as_one():
    log = Log()
    assert encoded(log.created(), full_window=4096)[0]["window_size"] == 4096
    event = encoded(log.created(1, "sliding", 16), full_window=4096)[0]
    assert (event["window_size"], event["layer_group_id"]) == (16, 1)
    assert trtllm.decode(CREATED, full_window=128)[0].window is None


def test_B171_a_block_is_removed_when_its_last_copy_goes_and_not_before():
    log = Log()
    run = log.run(range(4))
    events = encoded(
        log.stored(run), log.stored(run, tier="host"), log.removed(run), log.stored(run), log.removed(run, tier="host"),
        log.removed(run),
    )  # fmt: skip
    kinds = [each["data"]["type"] for each in events]
    assert kinds == ["stored", "updated", "updated", "removed"]
    assert [each["data"]["cache_level"]["new_value"] for each in events[1:3]] == [1, 0]
    assert [each["event_id"] for each in events] == [0, 1, 2, 3], "what says nothing takes no id"


def test_a_clear_is_the_removal_of_what_is_there():
    log = Log()
    one, other = log.run(range(8)), log.run(range(4), namespace=("other",))
    events = encoded(log.stored(one), log.stored(other), log.cleared(()), log.cleared(), log.cleared())
    removed = [each["data"]["block_hashes"] for each in events[2:]]
    assert removed == [[each["block_hash"] for each in event["data"]["blocks"]] for event in events[:2]]


def test_a_gap_in_the_ids_of_a_log_is_a_gap_in_those_that_go_out():
    log = Log()
    run = log.run(range(4))
    encode = Encoder("trtllm", Recorder(RunNames(short=True)))
    first, _, _, last = log.stored(run), log.removed(run), log.stored(run), log.updated(run, 35, 36)
    assert [each["event_id"] for each in json.loads(encode([first]))] == [0]
    assert [each["event_id"] for each in json.loads(encode([last]))] == [3]


def test_fields_of_later_releases_go_through():
    event = json.loads(json.dumps(STORED)) | {"hash_algo": "v2_sha256", "layer_group_id": 2, "later": 1}
    event["data"]["later"] = [1]
    event["data"]["blocks"][0] |= {"cache_salt": "s", "later": {"x": 1}, "mm_keys": []}
    event["data"]["blocks"][0]["tokens"][0]["later"] = 2
    event["data"]["blocks"][1]["mm_keys"][0] |= {"type": "mm_key", "hash": "ab" * 32}
    event["data"]["blocks"][1]["cache_salt"] = "s"
    (record,) = trtllm.decode(event)
    assert (record.group, record.hash_name, record.salt) == (2, "v2_sha256", "s")
    assert trtllm.encode([record]) == [event]
    unknown = {"event_id": 5, "data": {"type": "touched", "x": 1}, "window_size": 1}
    assert isinstance(trtllm.decode(unknown)[0], Unknown)
    assert trtllm.encode(trtllm.decode(unknown)) == [unknown]


def test_digests_are_hex_digits():
    record = RemovedBlocks(id=0, hashes=(b"\x01\xff",))
    (event,) = trtllm.encode([record])
    assert event["data"]["block_hashes"] == ["01ff"]
    assert trtllm.decode(event) == [record]


def test_levels_beyond_the_host_have_numbers_too():
    record = UpdatedBlocks(id=0, hashes=(1,), source_tier="host", tier="remote")
    (event,) = trtllm.encode([record])
    assert event["data"]["cache_level"] == {"type": "event_diff", "new_value": 3, "old_value": 1}
    seventh = {"type": "event_diff", "new_value": 7, "old_value": 0}
    event["data"]["cache_level"] = seventh
    assert trtllm.encode(trtllm.decode(event))[0]["data"]["cache_level"] == seventh
    pools = CreatedPools(id=0, num_blocks=(("device", 4), ("disk", 9)))
    assert trtllm.encode([pools])[0]["data"]["num_blocks_per_cache_level"] == [4, 0, 9]


def test_media_are_said_by_their_32_bytes_and_how_far_inside_the_block_begins():
    log = Log()
    run = log.run(range(8), media=[Media(2, 5, bytes(range(32)))])
    blocks = encoded(log.stored(run))[0]["data"]["blocks"]
    keys = [{"hash": bytes(range(32)).hex(), "start_offset": offset} for offset in (0, 2)]
    assert [each["mm_keys"] for each in blocks] == [[keys[0]], [keys[1]]]


def with_block(**changes):
    """A stored event of one block, with some of its fields changed."""
    return STORED | {"data": STORED["data"] | {"blocks": [block(1, [token(1)]) | changes]}}


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (7, "event: expected dict, got 7"),
        ({"event_id": 1}, "data: expected dict, got None"),
        ({"data": {"type": "stored"}}, "event_id: expected int, got None"),
        (REMOVED | {"window_size": "x"}, "window_size: expected int or nil, got 'x'"),
        (REMOVED | {"data": {"type": "removed", "block_hashes": ["xyz"]}}, "block_hashes: expected ints or hex digits"),
        (UPDATED | {"data": UPDATED["data"] | {"priority": 3}}, "priority: expected dict, got 3"),
        (STORED | {"data": STORED["data"] | {"blocks": [{"block_hash": 1}]}}, "tokens: expected list, got None"),
        (
            STORED | {"data": STORED["data"] | {"blocks": [block(n, [token(1)] * n) for n in (2, 1, 2)]}},
            "blocks: expected 2 tokens in all but the last, got 1",
        ),
        (
            STORED | {"data": STORED["data"] | {"blocks": [block(n, [], cache_level=n) for n in (0, 1)]}},
            "blocks: expected one cache_level in an event, got .0, 1.",
        ),
        (with_block(tokens=None), "tokens: expected list, got None"),
        (with_block(tokens=[7]), "tokens: expected dict, got 7"),
        (with_block(cache_level=[0]), "cache_level: expected int, got .0."),
        (with_block(mm_keys=7), "mm_keys: expected list or nil, got 7"),
        (with_block(cache_salt=[1]), "cache_salt: expected str or int or nil, got .1."),
    ],
)
def test_what_is_no_event_is_refused_with_field_expected_and_got(event, says):
    with pytest.raises(WireError, match=says):
        trtllm.decode(event)


def test_text_that_is_no_json_is_refused():
    with pytest.raises(WireError, match="expected JSON"):
        trtllm.loads("{")
