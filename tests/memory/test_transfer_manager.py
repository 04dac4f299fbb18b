"""Moves between tiers: right on CPU at once, and right on streams whose copies end in any order they may."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.memory.transfer_rig import (
    BLOCK_SIZE,
    FULL,
    MIXED,
    NUM_DEVICE,
    NUM_HOST,
    SLIDING,
    STATES,
    Rig,
    configured,
    int64,
)

from kvist.config import DTYPES, AttentionSpec
from kvist.core.moves import BlockMoves, Move
from kvist.errors import ArgumentError, TransferError
from kvist.memory.transfers import Copier, CpuDevice, MovesFailed
from kvist.testing.fake_device import TORN, FakeDevice

CONFIGS = {
    "one group": configured(MIXED),
    "one group, block-major": configured(MIXED, storage_order="block_major"),
    "groups and states": configured([FULL, SLIDING, STATES]),
    "groups of one pool": configured([FULL, SLIDING], shared_pool=True),
    "4 bits": configured([FULL, AttentionSpec(1, 6, dtype="int4")]),
}
FULL_ONLY = configured([FULL])


def demote(source, destination, group=0, num_tokens=BLOCK_SIZE):
    return Move(source, destination, num_tokens, group, destination_tier="host")


def promote(source, destination, group=0, num_tokens=BLOCK_SIZE):
    return Move(source, destination, num_tokens, group, source_tier="host")


@pytest.fixture
def device():
    return FakeDevice()


@pytest.fixture
def rig(device):
    """One group over a device whose copies end when told to."""
    return Rig(FULL_ONLY, device)


def on_cpu(config, seed=0):
    return Rig(config, CpuDevice(Copier(1)), seed)


# ---- at once, on CPU ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_moves_in_batches_give_what_they_give_one_by_one(config):
    random, rig, plain = Random(0), on_cpu(config), Rig(config)
    for _ in range(60):
        moves = [random_move(random, config) for _ in range(random.randrange(1, 7))]
        rig.manager.perform(moves)
        for move in moves:
            plain.apply(move)
        rig.manager.sync()
        assert rig.everything() == plain.everything(), moves
    assert rig.manager.num_under_way == 0


def random_move(random, config, *, whole=False):
    """Any move between tiers; of tokens where the group has some."""
    group = random.randrange(len(config.groups))
    tiers = random.choice([("device", "host"), ("host", "device"), ("device", "device")])
    sizes = {"device": NUM_DEVICE, "host": NUM_HOST}
    source, destination = (random.randrange(sizes[tier]) for tier in tiers)
    if whole or config.groups[group].kind == "state":
        return Move(source, destination, BLOCK_SIZE, group, *tiers)
    num_tokens = random.randrange(BLOCK_SIZE + 1)
    offsets = [random.choice([0, random.randrange(BLOCK_SIZE - num_tokens + 1)]) for _ in range(2)]
    return Move(source, destination, num_tokens, group, *tiers, *offsets)


@pytest.mark.parametrize("order", ["layer_major", "block_major"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_of_every_dtype_comes_back_from_the_host_as_it_was(dtype, order):
    rig = on_cpu(configured([AttentionSpec(2, 6, dtype=dtype)] * 2, storage_order=order))
    before = rig.contents("device", 0, 3)
    rig.manager.perform([demote(3, 5)])
    rig.fill(0, 3, 0)
    rig.manager.perform([promote(5, 1), promote(5, 3)])
    assert rig.contents("device", 0, 1) == rig.contents("device", 0, 3) == before


def test_many_whole_blocks_are_moved_as_arrays():
    rig, plain = on_cpu(FULL_ONLY), Rig(FULL_ONLY)
    ids = np.array([7, 2, 3], np.int32), np.array([1, 4, 5], np.int32)
    moves = [BlockMoves(*ids, BLOCK_SIZE, 0, "device", "host"), Move(1, 7, 2), promote(4, 1)]
    rig.manager.perform(moves)
    for move in [demote(7, 1), demote(2, 4), demote(3, 5), Move(1, 7, 2), promote(4, 1)]:
        plain.apply(move)
    assert rig.everything() == plain.everything()


@pytest.mark.parametrize("num_tokens", [8, 4, 2, 1])
def test_TRT81_three_tokens_of_a_block_of_eight_are_copied_and_the_rest_stays_clear(num_tokens):
    """Of every layer, K and V; as many tokens as are asked for, up to the whole block."""
    config = replace(configured([FULL, FULL]), block_size=8)
    rig = on_cpu(config)
    rig.fill(0, 2, 0)
    rig.manager.perform([Move(1, 2, num_tokens)])
    for plane in rig.planes["device"][0]:
        tokens = plane.unflatten(1, (8, -1))
        assert torch.equal(tokens[2, :num_tokens], tokens[1, :num_tokens])
        assert not tokens[2, num_tokens:].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_TRT82_tokens_of_every_element_type_are_copied_alike(dtype):
    """Differs: numbers of 4 bits move as whole blocks; there are no elements of 8 bytes."""
    config = replace(configured([AttentionSpec(2, 4, dtype=dtype)] * 2), block_size=8)
    rig = on_cpu(config)
    rig.fill(0, 2, 0)
    rig.manager.perform([Move(1, 2, 3)])
    num_tokens = 8 if dtype in ("int4", "uint4") else 3
    for plane in rig.planes["device"][0]:
        tokens = plane.unflatten(1, (8, -1))
        assert torch.equal(tokens[2, :num_tokens], tokens[1, :num_tokens])
        assert not tokens[2, num_tokens:].any()


def test_blocks_that_are_read_and_written_are_not_left_to_threads(monkeypatch):
    rig, plain = on_cpu(FULL_ONLY), Rig(FULL_ONLY)
    monkeypatch.setattr(Copier, "copy_pairs", lambda *_: pytest.fail("threads may write before they have read"))
    moves = [Move(0, 1, BLOCK_SIZE), Move(2, 0, BLOCK_SIZE), Move(4, 2, BLOCK_SIZE)]
    rig.manager.perform(moves)
    for move in moves:
        plain.apply(move)
    assert rig.everything() == plain.everything()


def test_a_token_is_read_before_a_block_that_only_moves_whole_is_written_over_it():
    rig, plain = on_cpu(CONFIGS["4 bits"]), Rig(CONFIGS["4 bits"])
    moves = [Move(3, 4, 2), Move(1, 5, 1, source_offset=3), Move(0, 1, 2)]
    rig.manager.perform(moves)
    for move in moves:
        plain.apply(move)
    assert rig.everything() == plain.everything()


@pytest.mark.parametrize(
    ("move", "says"),
    [
        (Move(0, 1, 4, destination_tier="disk"), "goes from device to disk; tiers here are"),
        (Move(0, 1, 4, source_tier="host", destination_tier="host"), "goes from host to host"),
        (Move(0, 1, 4, group=1), "names group 1, but there are 1 groups"),
        (demote(0, NUM_HOST), "names block 6 of host, where group 0 has blocks 0 to 5"),
        (promote(0, -1), "names block -1 of device, where group 0 has blocks 0 to 7"),
        (BlockMoves(int64(0, 9), int64(1, 2), 4, 0, "device", "host"), "names block 9 of device"),
        (Move(0, 1, 3, source_offset=2), "copies 3 tokens from 2 to 0, but blocks are of 4"),
        (Move(0, 1, -1), "copies -1 tokens"),
    ],
)
def test_moves_of_what_is_not_there_are_refused_before_anything_is_copied(move, says):
    rig = on_cpu(FULL_ONLY)
    before = rig.everything()
    with pytest.raises(ArgumentError, match=says):
        rig.manager.perform([demote(0, 1), move])
    assert rig.everything() == before


def test_states_have_no_single_tokens():
    rig = on_cpu(configured([FULL, STATES]))
    with pytest.raises(ArgumentError, match="group 1 keeps states, which have none"):
        rig.manager.perform([Move(0, 1, 1, group=1, source_offset=2)])


# ---- hazards -----------------------------------------------------------------------------------------------------


def test_a_promote_waits_for_the_demote_that_it_reads(rig, device):
    before = rig.contents("device", 0, 1)
    rig.manager.perform([demote(1, 0)])
    rig.manager.perform([promote(0, 5)])
    assert device.ready == ["demote"]
    assert not rig.manager.is_ready("device", 0, 5)
    device.complete("demote")
    assert device.ready == ["promote"]
    assert rig.manager.is_ready("host", 0, 0)
    device.complete("promote")
    assert rig.manager.is_ready("device", 0, 5)
    assert rig.contents("device", 0, 5) == before


def test_TRT83_a_block_that_is_brought_back_at_once_is_what_it_was(rig, device):
    first = rig.contents("device", 0, 0)
    rig.manager.perform([demote(0, 0)])
    rig.fill(0, 7, 0)
    rig.manager.perform([promote(0, 7)])
    rig.manager.sync()
    rig.manager.perform([demote(7, 0)])
    while device.ready:
        device.complete(device.ready[-1])
    assert rig.contents("device", 0, 7) == rig.contents("host", 0, 0) == first


def test_B131_of_two_demotes_to_one_block_the_second_is_there(rig, device):
    second = rig.contents("device", 0, 2)
    rig.manager.perform([demote(1, 0)])
    rig.manager.perform([demote(2, 0), promote(0, 6)])
    for stream in ("demote", "demote", "promote"):
        assert device.ready == [stream]
        device.complete(stream)
    assert rig.contents("host", 0, 0) == rig.contents("device", 0, 6) == second


def test_a_block_is_not_overwritten_while_a_promote_reads_it(rig, device):
    first, second = rig.contents("host", 0, 0), rig.contents("device", 0, 2)
    rig.manager.perform([promote(0, 5)])
    rig.manager.perform([demote(2, 0)])
    assert device.ready == ["promote"]
    device.finish()
    assert (rig.contents("device", 0, 5), rig.contents("host", 0, 0)) == (first, second)


def test_copies_on_two_streams_do_not_write_one_block_in_the_wrong_order(rig, device):
    rig.manager.perform([promote(0, 5), Move(1, 5, BLOCK_SIZE), promote(2, 5)])
    expected = rig.contents("host", 0, 2)
    for stream in ("promote", "local", "promote"):
        assert device.ready == [stream]
        device.complete(stream)
    assert rig.contents("device", 0, 5) == expected


def test_a_block_is_not_overwritten_while_copies_on_two_streams_read_it(rig, device):
    rig.manager.perform([Move(1, 2, BLOCK_SIZE), demote(1, 0), promote(3, 1)])
    assert device.ready == ["demote", "local"]
    device.complete("demote")
    assert device.ready == ["local"]
    device.complete("local")
    assert device.ready == ["promote"]


def test_equal_ids_of_two_tiers_are_two_blocks(rig, device):
    rig.manager.perform([demote(3, 0), promote(3, 0)])
    assert device.ready == ["demote", "promote"]


def test_equal_ids_of_two_pools_are_two_blocks_and_of_one_pool_one(device):
    apart, together = FakeDevice(), FakeDevice()
    Rig(configured([FULL, SLIDING]), apart).manager.perform([demote(3, 0), promote(1, 3, group=1)])
    Rig(configured([FULL, SLIDING], shared_pool=True), together).manager.perform([demote(3, 0), promote(1, 3, group=1)])
    assert (apart.ready, together.ready) == (["demote", "promote"], ["demote"])


def test_B133_nothing_is_copied_before_the_forward_pass_has_written_it(rig, device):
    device.compute(lambda: rig.fill(0, 1, 9))
    rig.manager.perform([demote(1, 0)])
    assert device.ready == ["compute"]
    device.finish()
    assert set(rig.contents("host", 0, 0)) == {9}


def test_B134_B141_nothing_is_loaded_over_what_the_forward_pass_still_reads(rig, device):
    seen, before = [], rig.contents("device", 0, 4)
    device.compute(lambda: seen.append(rig.contents("device", 0, 4)))
    rig.manager.perform([promote(0, 4)])
    assert device.ready == ["compute"]
    device.finish()
    assert seen == [before]


def test_B137_what_is_evicted_in_flight_and_written_anew_arrives_as_it_was(rig, device):
    before = rig.contents("device", 0, 1)
    rig.manager.perform([demote(1, 0)])
    rig.manager.sync()
    device.compute(lambda: rig.fill(0, 1, 9))
    assert device.ready == ["demote"]
    device.finish()
    assert rig.contents("host", 0, 0) == before
    assert set(rig.contents("device", 0, 1)) == {9}


def test_the_forward_pass_waits_for_all_copies_and_the_host_for_none(rig, device, monkeypatch):
    monkeypatch.setattr(device, "finish", lambda: pytest.fail("the host waits"))
    rig.manager.perform([promote(0, 5), Move(1, 2, 3), demote(6, 1)])
    seen = []
    rig.manager.sync()
    rig.manager.sync()
    device.compute(lambda: seen.append(rig.contents("device", 0, 5)))
    assert device.ready == ["demote", "local", "promote"]
    for stream in ("local", "demote", "promote", "compute"):
        device.complete(stream)
    assert seen == [rig.contents("host", 0, 0)]


def test_what_is_done_is_let_go_of_in_any_order(rig, device):
    for block in range(4):
        rig.manager.perform([demote(block, block), promote(4 + block % 2, 4 + block)])
    assert rig.manager.num_under_way == 8
    device.complete("promote")
    rig.manager.poll()
    assert rig.manager.num_under_way == 7
    device.finish()
    rig.manager.poll()
    assert rig.manager.num_under_way == 0


def test_an_id_that_is_used_again_after_all_is_done_waits_for_nothing(rig, device):
    rig.manager.perform([demote(1, 0)])
    device.finish()
    rig.manager.perform([promote(0, 1)])
    assert device.ready == ["promote"]


def test_the_host_waits_for_the_copies_of_the_blocks_it_asks_for(rig, device):
    rig.manager.perform([demote(1, 0)])
    queued = rig.manager.queue([demote(2, 1)])
    rig.manager.wait_for("host", 0, [0, 1])
    assert queued.state == "started"
    assert device.num_outstanding == rig.manager.num_under_way == 0
    rig.manager.perform([demote(3, 2)])
    rig.manager.finish()
    assert rig.contents("host", 0, 2) == rig.contents("device", 0, 3)


# ---- moves that may start later ----------------------------------------------------------------------------------


def test_queued_moves_start_when_fewer_are_under_way(rig, device):
    queued = [rig.manager.queue([demote(block, block)]) for block in range(3)]
    assert device.ready == []
    rig.manager.poll()
    assert [transfer.state for transfer in queued] == ["started", "started", "queued"]
    assert not rig.manager.is_ready("host", 0, 2)
    device.complete("demote")
    rig.manager.poll()
    assert [transfer.state for transfer in queued] == ["started", "started", "started"]


def test_a_cancelled_move_copies_nothing_and_its_destination_is_not_ready(rig, device):
    before = rig.everything()
    transfer = rig.manager.queue([demote(1, 0), demote(2, 3)])
    assert transfer.cancel()
    rig.manager.sync()
    device.finish()
    assert rig.everything() == before
    assert not rig.manager.is_ready("host", 0, 0)
    assert rig.manager.is_ready("host", 0, 1)
    rig.manager.perform([demote(1, 0)])
    device.finish()
    assert rig.manager.is_ready("host", 0, 0)


def test_a_move_that_has_started_is_not_cancelled(rig, device):
    transfer = rig.manager.queue([demote(1, 0)])
    rig.manager.sync()
    assert not transfer.cancel()
    device.finish()
    assert rig.contents("host", 0, 0) == rig.contents("device", 0, 1)


def test_what_reads_the_destination_of_a_cancelled_move_is_not_copied_and_what_writes_it_is(rig, device):
    before = rig.contents("device", 0, 5)
    first = rig.manager.queue([promote(0, 7)])
    cancelled = rig.manager.queue([demote(1, 0)])
    cancelled.cancel()
    second = rig.contents("host", 0, 0)
    with pytest.raises(MovesFailed, match="block 0 of group 0 was not copied from host to block 5 of device"):
        rig.manager.perform([promote(0, 5)])
    assert first.state == "started"
    rig.manager.perform([demote(2, 0), promote(0, 6)])
    device.finish()
    assert rig.contents("device", 0, 5) == before
    assert rig.contents("device", 0, 7) == second
    assert rig.contents("device", 0, 6) == rig.contents("device", 0, 2)


def test_a_move_that_meets_a_queued_one_starts_it_first(rig, device):
    before = rig.contents("device", 0, 1)
    apart, meeting, later = (rig.manager.queue([demote(block, block)]) for block in (0, 1, 2))
    rig.manager.perform([Move(3, 1, BLOCK_SIZE)])
    assert [transfer.state for transfer in (apart, meeting, later)] == ["started", "started", "queued"]
    device.finish()
    assert rig.contents("host", 0, 1) == before


# ---- failures ----------------------------------------------------------------------------------------------------


def test_a_copy_that_cannot_be_started_fails_alone_and_is_named(rig, device):
    device.fail_next(RuntimeError("out of staging"))
    with pytest.raises(TransferError, match=r"and 1 more: RuntimeError: out of staging") as raised:
        rig.manager.perform([demote(1, 0), demote(2, 1), Move(3, 6, BLOCK_SIZE)])
    assert raised.value.moves == [demote(1, 0), demote(2, 1)]
    device.finish()
    assert not rig.manager.is_ready("host", 0, 0)
    assert rig.contents("device", 0, 6) == rig.contents("device", 0, 3)
    rig.manager.sync()


def test_a_copy_that_fails_on_the_way_takes_with_it_what_reads_its_destination(rig, device):
    rig.manager.perform([demote(1, 0)])
    rig.manager.perform([promote(0, 5)])
    rig.manager.perform([Move(5, 6, 2)])
    rig.manager.perform([demote(2, 3)])
    device.complete("demote", error=OSError("bus"))
    device.finish()
    with pytest.raises(MovesFailed, match=r"to block 0 of host, and 2 more: bus") as raised:
        rig.manager.sync()
    assert raised.value.moves == [demote(1, 0), promote(0, 5), Move(5, 6, 2)]
    ready = [rig.manager.is_ready(*block) for block in (("host", 0, 0), ("device", 0, 5), ("device", 0, 6))]
    assert ready == [False] * 3
    assert rig.manager.is_ready("host", 0, 3)
    rig.manager.sync()


def test_a_copy_that_has_failed_by_the_time_it_was_started_is_told(monkeypatch):
    device = FakeDevice()
    rig = Rig(FULL_ONLY, device)
    queue = device.copy

    def copied_at_once(stream, job):
        event = queue(stream, job)
        device.complete(stream, OSError("bus"))
        return event

    monkeypatch.setattr(device, "copy", copied_at_once)
    rig.manager.perform([demote(1, 0)])
    assert not rig.manager.is_ready("host", 0, 0)
    with pytest.raises(MovesFailed, match="bus"):
        rig.manager.poll()


def test_a_block_that_was_written_again_is_ready_though_an_earlier_copy_failed(rig, device):
    rig.manager.perform([demote(1, 0)])
    rig.manager.perform([demote(2, 0)])
    device.complete("demote", error=OSError("bus"))
    device.complete("demote")
    with pytest.raises(MovesFailed) as raised:
        rig.manager.poll()
    assert raised.value.moves == [demote(1, 0)]
    assert rig.manager.is_ready("host", 0, 0)
    assert rig.contents("host", 0, 0) == rig.contents("device", 0, 2)


def test_a_block_whose_move_failed_may_be_forgotten_and_moved_again(rig, device):
    device.fail_next(OSError("bus"))
    with pytest.raises(MovesFailed):
        rig.manager.perform([promote(0, 5)])
    with pytest.raises(MovesFailed, match="its source was not written"):
        rig.manager.perform([demote(5, 1)])
    rig.manager.forget("device", 0, [5])
    rig.fill(0, 5, 9)
    rig.manager.perform([demote(5, 1)])
    device.finish()
    assert set(rig.contents("host", 0, 1)) == {9}


def test_tokens_that_could_not_change_places_inside_a_block_may_do_so_later(rig, device):
    before = {block: rig.contents("device", 0, block) for block in (2, 5)}
    moves = [Move(5, 5, 1, source_offset=2), Move(2, 2, 1, source_offset=3, destination_offset=1)]
    device.fail_next(OSError("bus"))
    with pytest.raises(MovesFailed):
        rig.manager.perform(moves)
    assert {block: rig.contents("device", 0, block) for block in (2, 5)} == before
    rig.manager.perform(moves)
    rig.manager.perform([demote(5, 1)])
    device.finish()
    assert rig.contents("host", 0, 1) == rig.contents("device", 0, 5) != before[5]


def test_a_failing_copy_on_cpu_leaves_the_rest_as_it_should_be(monkeypatch):
    rig = on_cpu(FULL_ONLY)
    copy = rig.manager._device.copier.copy
    monkeypatch.setattr(
        rig.manager._device.copier, "copy", lambda job: fail() if 1 in job.sources.tolist() else copy(job)
    )

    def fail():
        raise MemoryError("none left")

    with pytest.raises(MovesFailed, match="MemoryError: none left") as raised:
        rig.manager.perform([demote(1, 0), promote(0, 5), demote(2, 3)])
    assert promote(0, 5) in raised.value.moves
    assert not rig.manager.is_ready("device", 0, 5)


# ---- any order ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["one group", "groups and states", "groups of one pool", "4 bits"])
@given(random=st.randoms(use_true_random=False))
def test_copies_that_end_in_any_order_give_what_moves_give_one_by_one(name, random):
    config = CONFIGS[name]
    device = FakeDevice()
    rig, plain = Rig(config, device), Rig(config)
    seen = []
    for _ in range(random.randrange(1, 12)):
        match random.choice(["perform", "perform", "queue", "poll", "compute", "complete", "complete"]):
            case "perform" | "queue" as call:
                moves = [random_move(random, config) for _ in range(random.randrange(1, 4))]
                getattr(rig.manager, call)(moves)
                for move in moves:
                    plain.apply(move)
            case "poll":
                rig.manager.poll()
            case "compute":
                rig.manager.sync()
                forward_pass(random, device, rig, plain, seen)
            case "complete":
                complete_any(random, device)
    rig.manager.sync()
    while device.ready:
        complete_any(random, device)
    assert rig.everything() == plain.everything()
    assert all(found == expected for found, expected in seen)
    rig.manager.poll()
    assert rig.manager.num_under_way == 0


def complete_any(random, device, error=None):
    if device.ready:
        device.complete(random.choice(device.ready), error)


def forward_pass(random, device, rig, plain, seen):
    """Read one block and write another, later; what is read is kept beside what should be."""
    group, read, written, value = (random.randrange(n) for n in (len(rig.layouts), NUM_DEVICE, NUM_DEVICE, 256))
    expected = plain.contents("device", group, read)
    plain.fill(group, written, value)

    def act():
        seen.append((rig.contents("device", group, read), expected))
        rig.fill(group, written, value)

    device.compute(act)


@given(random=st.randoms(use_true_random=False))
def test_whatever_fails_or_is_cancelled_contents_are_right_or_said_to_be_missing(random):
    config = CONFIGS["groups and states"]
    device = FakeDevice()
    rig, plain = Rig(config, device), Rig(config)
    made, failed, cancelled = [], [], []
    for _ in range(random.randrange(1, 12)):
        move = random_move(random, config, whole=True)
        if move in made:
            continue
        made.append(move)
        with told(failed):
            device.fail_next(random.choice([None, None, None, OSError("refused")]))
            if random.random() < 0.7:
                rig.manager.perform([move])
            else:
                transfer = rig.manager.queue([move])
                cancelled += [move] if random.random() < 0.5 and transfer.cancel() else []
        complete_any(random, device, random.choice([None, None, OSError("bus")]))
    device.fail_next(None)
    with told(failed):
        rig.manager.sync()
    while device.ready:
        complete_any(random, device)
    with told(failed):
        rig.manager.poll()
    lost = left_out(plain, made, [*failed, *cancelled])
    found = rig.everything()
    for block, contents in plain.everything().items():
        assert rig.manager.is_ready(*block) == (block not in lost)
        assert block in lost or found[block] == contents


class told:  # noqa: N801
    """Collects the moves that a call says have failed."""

    def __init__(self, failed):
        self.failed = failed

    def __enter__(self):
        return self

    def __exit__(self, _kind, error, _trace):
        if isinstance(error, MovesFailed):
            self.failed += error.moves
        return isinstance(error, MovesFailed)


def left_out(plain, made, left):
    """Make the moves but for those that were left out, and return the blocks that hold nothing then."""
    lost = set()
    for move in made:
        source = move.source_tier, move.group, move.source
        destination = move.destination_tier, move.group, move.destination
        if move in left:
            lost.add(destination)
            continue
        assert source not in lost, f"{move} read what was not there"
        lost.discard(destination)
        plain.apply(move)
    return lost


def test_a_failed_copy_leaves_its_destination_torn_on_the_fake_device(rig, device):
    """The tests above would see it if such a block were said to be ready."""
    rig.manager.perform([demote(1, 0)])
    device.complete("demote", error=OSError("bus"))
    assert set(rig.contents("host", 0, 0)) == {TORN}
