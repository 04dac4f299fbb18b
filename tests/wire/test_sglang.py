"""SGLang's events: arrays with signed names, short as in older releases and long as in newer ones."""

import msgspec
import pytest
from tests.wire.blocks import Log

from kvist.errors import ArgumentError
from kvist.wire import Encoder, Recorder, RunNames, sglang, vllm
from kvist.wire.records import AllCleared, RemovedBlocks, StoredBlocks

pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode


def test_a_batch_has_these_bytes():
    records = [
        StoredBlocks(hashes=(7, 2**64 - 1), parent=2**63, tokens=(1, 2), block_size=1, tier="device", time_s=2.5),
        RemovedBlocks(hashes=(2**64 - 1,), tier="host", time_s=2.5),
        AllCleared(time_s=2.5),
    ]
    golden = bytes.fromhex(
        "92cb4004000000000000" + "93"
        "97" + "ab426c6f636b53746f726564" + "9207ff" + "d38000000000000000" + "920102" + "01" + "c0" + "a3475055"
        "93" + "ac426c6f636b52656d6f766564" + "91ff" + "aa4350555f50494e4e4544"
        "91" + "b0416c6c426c6f636b73436c6561726564"
    )  # fmt: skip
    assert sglang.encode(records) == golden
    assert sglang.decode(golden) == records


LONG = ["BlockStored", [123], None, [1, 2], 2, None, "GPU", None, None, None, None, None, None, None]


@pytest.mark.parametrize(
    "event",
    [
        LONG,
        [*LONG[:8], [["dynamo-cache-salt:tenant-a"]], *LONG[9:], {"cache_salt": "tenant-a"}],
        ["BlockStored", [-5], -7, [[1, 2], [2, 3]], 2, None],
        ["BlockStored", [123], None, [1, 2], 2, None, "CPU_TIER1"],
        ["BlockRemoved", [123], None, None, None, None, None, None],
        ["BlockRemoved", [-1]],
        ["AllBlocksCleared", None],
        ["BlockPinned", 1, {"x": 2}],
    ],
)
def test_events_of_all_releases_go_through(event):
    batch = pack([1.0, [event], 4])
    assert unpack(sglang.encode(sglang.decode(batch))) == unpack(batch)


def test_the_salt_is_read_from_its_map_wherever_that_is():
    newest = [*LONG, {"cache_salt": "tenant-a"}]
    older = [*LONG[:7], {"cache_salt": "tenant-a"}]
    for event in (newest, older):
        (record,) = sglang.decode(pack([1.0, [event]]))
        assert (record.salt, record.tier, record.lora_name) == ("tenant-a", "device", None)


def test_a_salt_of_others_is_said_in_the_key_and_in_the_map():
    record = StoredBlocks(hashes=(1, 2), tokens=(1, 2), block_size=1, tier="device", salt="s")
    event = unpack(sglang.encode([record]))[1][0]
    assert event[8] == [["dynamo-cache-salt:s"], None]
    assert event[14] == {"cache_salt": "s"}
    (read,) = sglang.decode(sglang.encode([record]))
    assert vllm.decode(vllm.encode([read]))[0].salt == "s"


def test_media_have_the_words_of_sglang():
    log = Log()
    run = log.run(range(4))
    events = [log.stored(run, tier=tier) for tier in ("device", "host", "disk", "remote")]
    batch = unpack(Encoder("sglang", Recorder(RunNames(short=True)))(events))
    assert [event[6] for event in batch[1]] == ["GPU", "CPU_PINNED", "DISK", "EXTERNAL"]


def test_digests_are_no_names_there():
    with pytest.raises(ArgumentError, match="use short names"):
        sglang.encode([StoredBlocks(hashes=(bytes(32),))])
