"""vLLM's events, both forms, against golden bytes and the facts of its stream."""

import msgspec
import pytest
from tests.wire.blocks import Log, Media

from kvist.errors import WireError
from kvist.wire import Encoder, Recorder, RunNames, vllm
from kvist.wire.records import AllCleared, BlockMedia, RemovedBlocks, StoredBlocks, Unknown

pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode
STORED = StoredBlocks(
    hashes=(7, 2**64 - 1), parent=5, tokens=(1, 2, 300, 70_000), block_size=2, tier="device", group=0, kind="full",
    rank=1, time_s=2.5,
)  # fmt: skip
HEAD = bytes.fromhex("93cb4004000000000000")  # [2.5,
MAP = bytes.fromhex(
    "91"  # one event
    "8a" + "a474797065" + "ab426c6f636b53746f726564"  # 10 fields: type BlockStored
    "ac626c6f636b5f686173686573" + "9207cfffffffffffffffff"  # block_hashes
    "b1706172656e745f626c6f636b5f68617368" + "05"  # parent_block_hash
    "a9746f6b656e5f696473" + "940102cd012cce00011170"  # token_ids
    "aa626c6f636b5f73697a65" + "02"  # block_size
    "a76c6f72615f6964" + "c0"  # lora_id
    "a66d656469756d" + "a3475055"  # medium GPU
    "a96c6f72615f6e616d65" + "c0"  # lora_name
    "a967726f75705f696478" + "00"  # group_idx
    "b26b765f63616368655f737065635f6b696e64" + "ae66756c6c5f617474656e74696f6e"  # full_attention
)
ARRAY = bytes.fromhex(
    "91"
    "9b" + "ab426c6f636b53746f726564" + "9207cfffffffffffffffff" + "05" + "940102cd012cce00011170" + "02"
    "c0a3475055c0" + "c000" + "ae66756c6c5f617474656e74696f6e"
)
RANK = b"\x01"


def encoded(*events, names=None, groups=(), form="map"):
    target = "vllm" if form == "map" else "vllm-array"
    return unpack(Encoder(target, Recorder(names, groups=groups))(events))[1]


def test_a_batch_of_maps_has_these_bytes():
    assert vllm.encode([STORED]) == HEAD + MAP + RANK
    assert vllm.decode(HEAD + MAP + RANK) == [STORED]


def test_a_batch_of_arrays_has_these_bytes():
    assert vllm.encode([STORED], form="array") == HEAD + ARRAY + RANK
    assert vllm.decode(HEAD + ARRAY + RANK) == [STORED]


def test_removed_and_cleared_have_these_bytes():
    records = [RemovedBlocks(hashes=(b"\x01\x02",), tier="host", group=1), AllCleared()]
    batch = [0.0, [{"type": "BlockRemoved", "block_hashes": [b"\x01\x02"], "medium": "CPU", "group_idx": 1},
                   {"type": "AllBlocksCleared"}], None]  # fmt: skip
    assert vllm.encode(records) == pack(batch)
    arrays = [0.0, [["BlockRemoved", [b"\x01\x02"], "CPU", 1], ["AllBlocksCleared"]], None]
    assert vllm.encode(records, form="array") == pack(arrays)
    for form in (batch, arrays):
        read = vllm.decode(pack(form), worker="w")
        assert [(each.worker, each.time_s) for each in read] == [("w", 0.0)] * 2
        assert (read[0].hashes, read[0].tier, read[0].group) == ((b"\x01\x02",), "host", 1)


@pytest.mark.parametrize(("tier", "medium"), [("device", "GPU"), ("host", "CPU"), ("disk", "FS"), ("remote", "OBJ")])
def test_every_tier_has_its_medium(tier, medium):
    event = unpack(vllm.encode([StoredBlocks(hashes=(1,), tier=tier)]))[1][0]
    assert event["medium"] == medium
    assert vllm.decode(vllm.encode([StoredBlocks(hashes=(1,), tier=tier)]))[0].tier == tier


def test_digests_go_out_as_bytes_or_as_their_low_64_bits():
    log = Log()
    run = log.run(range(8))
    (as_bytes,) = encoded(log.stored(run))
    (as_ints,) = encoded(log.stored(run), names=RunNames(short=True))
    assert as_bytes["block_hashes"] == run.digests()
    assert as_ints["block_hashes"] == [int.from_bytes(each[-8:], "big") for each in run.digests()]


@pytest.mark.parametrize("num_blocks", [2, 3, 10])
def test_V76_one_event_stores_a_run_with_all_its_tokens(num_blocks):
    """Blocks are one event with a name each and all their tokens; then one removal, then all cleared."""
    log = Log()
    run = log.run(range(4 * num_blocks))
    stored, removed, cleared = encoded(log.stored(run), log.removed(run), log.cleared())
    assert (len(stored["block_hashes"]), stored["token_ids"]) == (num_blocks, list(range(4 * num_blocks)))
    assert removed["block_hashes"] == stored["block_hashes"]
    assert cleared == {"type": "AllBlocksCleared"}


def test_V77_the_parent_is_the_logical_block_before_also_where_the_group_does_not_have_it():
    """A window has let the block before go; its name is the parent's all the same."""
    log = Log()
    run = log.run(range(16))
    (stored,) = encoded(log.stored(run, group=1, columns=(2, 3)))
    assert stored["parent_block_hash"] == run.digests()[1]


def test_V82_B170_names_and_tokens_of_a_window_belong_to_each_other():
    """Differs: a group that has only some blocks says which, with the tokens of these and no others."""
    log = Log()
    run = log.run(range(64))
    events = encoded(log.stored(run, group=1, columns=(0, 6, 7)), log.stored(run, group=1, columns=()))
    assert [len(each["block_hashes"]) for each in events] == [1, 2]
    assert [each["token_ids"] for each in events] == [list(range(4)), list(range(24, 32))]


def test_V78_what_groups_are_is_told_with_every_store():
    """An event says of its group what it is; a group that nobody has told of goes without."""
    log = Log()
    created = log.created(1, "sliding", 8)
    run = log.run(range(8))
    stored = encoded(created, log.stored(run, group=1))[0]
    assert (stored["group_idx"], stored["kv_cache_spec_kind"]) == (1, "sliding_window")
    assert stored["kv_cache_spec_sliding_window"] == 8
    assert "kv_cache_spec_kind" not in encoded(log.stored(run, group=2))[0]
    assert encoded(log.stored(run, group=1), groups=[created])[0]["kv_cache_spec_kind"] == "sliding_window"


def test_V78_a_lora_id_is_shown_else_nil():
    for lora_id in (42, None):
        event = unpack(vllm.encode([StoredBlocks(hashes=(1,), lora_id=lora_id)]))[1][0]
        assert event["lora_id"] == lora_id


def test_B187_a_host_store_can_be_indexed_without_what_came_before():
    log = Log()
    run = log.run(range(8))
    stored, removed = encoded(log.moved(run, "device", "host", 1, 2))
    assert (stored["medium"], stored["block_size"], stored["token_ids"]) == ("CPU", 4, [4, 5, 6, 7])
    assert stored["parent_block_hash"] == run.digests()[0]
    assert (removed["type"], removed["medium"]) == ("BlockRemoved", "GPU")


def test_clearing_one_namespace_leaves_the_others():
    log = Log()
    mine, theirs = log.run(range(4), namespace=("a",)), log.run(range(4), namespace=("b",))
    events = encoded(log.stored(mine), log.stored(theirs), log.cleared(("a",)), log.cleared(("b",)))
    assert events[2] == {"type": "BlockRemoved", "block_hashes": mine.digests(), "medium": "GPU", "group_idx": 0}
    assert events[3] == {"type": "AllBlocksCleared"}, "nothing is left that it could take with it"


def test_salts_and_media_are_extra_keys():
    log = Log()
    run = log.run(range(12), namespace=("tenant",), media=[Media(2, 7, "cat")])
    keys = encoded(log.stored(run))[0]["extra_keys"]
    assert keys[0][0] == ["cat", 2]
    assert isinstance(keys[0][1], str)
    assert keys[1:] == [[["cat", -2]], [["cat", -6]]]


def test_extra_keys_are_read_as_media_and_salt():
    keys = [["adapter", ["img", 3], "salt"], None]
    event = {"type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None, "token_ids": [], "block_size": 4,
             "lora_name": "adapter", "extra_keys": keys}  # fmt: skip
    (record,) = vllm.decode(pack([1.0, [event], None]))
    assert record.salt == "salt"
    assert record.media == ((BlockMedia("img", 3),), ())
    assert unpack(vllm.encode([record]))[1][0]["extra_keys"] == keys


def test_fields_events_and_values_of_later_releases_go_through():
    stored = {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": [1],
        "block_size": 1,
        "lora_id": None,
        "medium": "CXL",
        "lora_name": None,
        "locality": "REMOTE",
        "ownership": "shared",
    }
    removed = {"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU_TIER1", "ownership": "shared"}
    cleared = {"type": "AllBlocksCleared", "medium": "GPU"}
    batch = pack([1.5, [stored, removed, cleared, {"type": "BlockTouched", "x": b"1"}], 3, "later"])
    records = vllm.decode(batch)
    assert [each.tier for each in records[:2]] == ["CXL", "host"]
    assert records[0].locality == "REMOTE"
    assert isinstance(records[3], Unknown)
    assert vllm.encode(records) == batch


@pytest.mark.parametrize("length", [5, 6, 7, 8, 12, 13, 14])
def test_arrays_of_older_and_later_releases_go_through(length):
    event = ["BlockStored", [1], None, [1], 1, None, "GPU", None, None, None, None, None, None, None, "later"]
    batch = pack([1.5, [event[: length + 1], ["BlockRemoved", [1]], ["AllBlocksCleared", None]]])
    records = vllm.decode(batch)
    assert records[0].tier == ("device" if length > 5 else None)
    assert unpack(vllm.encode(records, form="array"))[1] == unpack(batch)[1]
    assert "as array" not in str(unpack(vllm.encode(records)))


def test_a_batch_may_be_a_map():
    batch = {"ts": 1.0, "events": [{"type": "AllBlocksCleared"}]}
    assert vllm.decode(pack(batch)) == [AllCleared(time_s=1.0)]


def test_no_records_are_an_empty_batch():
    assert unpack(vllm.encode([], time_s=3.0, rank=2)) == [3.0, [], 2]
    assert vllm.decode(vllm.encode([])) == []


def stored(**changes):
    event = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1], "block_size": 1}
    return [1.0, [event | changes], None]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (b"\xc1", "expected MessagePack"),
        (pack(7), "batch: expected list, got 7"),
        (pack([1.0]), "expected .time, events, rank., got 1 values"),
        (pack(["x", []]), "batch time: expected int or float, got 'x'"),
        (pack([1.0, [], "r"]), "batch rank: expected int or nil, got 'r'"),
        (pack([1.0, [7]]), "event: expected list, got 7"),
        (pack([1.0, [[]]]), "event: expected a map"),
        (pack([1.0, [{"x": 1}]]), "event type: expected str, got None"),
        (pack(stored(block_hashes=None)), "BlockStored.block_hashes: expected list or tuple, got None"),
        (pack(stored(block_hashes=["x"])), "BlockStored.block_hashes: expected bytes or ints of 64 bits, got 'x'"),
        (pack(stored(parent_block_hash=1.5)), "BlockStored.parent_block_hash: expected bytes or ints"),
        (pack(stored(block_size="4")), "BlockStored.block_size: expected int, got '4'"),
        (pack(stored(block_size=True)), "BlockStored.block_size: expected int, got True"),
        (pack(stored(medium=1)), "BlockStored.medium: expected str or nil, got 1"),
        (pack(stored(extra_keys=[None, None])), "BlockStored.extra_keys: expected 1 entries, one a block, got 2"),
        (pack([1.0, [["BlockRemoved"]]]), "BlockRemoved.block_hashes: expected list or tuple, got None"),
    ],
)
def test_what_is_no_message_is_refused_with_field_expected_and_got(message, says):
    with pytest.raises(WireError, match=says):
        vllm.decode(message)
