"""T16: transfers that fail at any copy, have nothing to copy, are late, or never end."""

import pytest
from tests.core.small import moves, refused, small
from tests.memory.transfer_rig import FULL, Rig, configured
from tests.torture.over import EVERYWHERE, WITH_HOST, over
from tests.torture.rig import PATIENT, again, opened
from tests.torture.traffic import Traffic

from kvist import SequenceError, TransferError
from kvist.core.moves import Move
from kvist.memory.transfers import MovesFailed
from kvist.testing import FakeDevice, WaitsForever


def demote(source, destination):
    return Move(source, destination, 4, 0, "device", "host")


def promote(source, destination):
    return Move(source, destination, 4, 0, "host", "device")


@over(WITH_HOST, num_blocks=10)
def test_B146_copies_that_fail_before_the_first_cost_the_call_and_no_content(rig):
    """Every third call may fail; whoever is admitted reads its own, and in the end all blocks are back."""
    traffic, failed = Traffic(rig, seed=11), 0
    for step in range(60):
        if step % 3 == 0:
            rig.memory.fail_next()
        try:
            traffic.step()
        except TransferError:
            failed += 1
        rig.memory.work_again()
        if rig.memory.has_failed:
            rig.manager.evict(1)  # the next call that needs copies makes those as well
            rig.memory.perform(rig.manager.take_moves())
        for one in traffic.live:
            rig.compute(one)
        rig.check()
    traffic.finish()
    rig.require_all_back()
    assert failed > 0


@pytest.mark.parametrize("after", range(6))
def test_B146_copies_that_were_made_before_one_failed_are_not_made_again(after):
    """Two blocks go down and two come up in their places: made again, the first would copy what has come up."""
    with opened("full", "host", num_blocks=3) as rig:
        rig.leave(range(8))
        rig.manager.evict(2)
        rig.leave(range(10, 18))
        rig.memory.fail_next(after=after)
        try:
            rig.free(rig.serve([*range(8), 9]), publish=False)
        except TransferError:
            assert rig.manager.num_free_blocks == 3
        rig.memory.work_again()
        rig.manager.evict(9)
        for tokens in ([*range(10, 18), 9], [*range(8), 9]):
            sequence = rig.serve(tokens)
            assert sequence.num_cached_tokens == 8
            rig.free(sequence, publish=False)
        rig.require_all_back()


@over(EVERYWHERE)
def test_B035_a_hit_that_needs_no_copy_orders_none_and_nobody_waits(rig):
    rig.leave(range(17))
    rig.memory.num_copied_tokens = 0
    sequence = rig.add([*range(16), 99])
    if not rig.has_states:
        assert rig.memory.num_copied_tokens == 0
    rig.compute(sequence)
    rig.free(sequence)
    prefetched = rig.manager.prefetch([*range(16), 99])
    assert prefetched.wait(PATIENT)
    assert rig.manager.prefetch([777]).num_tokens == 0
    rig.require_all_back()


def test_B037_B038_results_of_an_earlier_life_of_a_row_reach_nobody():
    manager = small(block_size=4)
    first = manager.add_sequence(range(6))
    row = first.row
    manager.free(first)
    second = manager.add_sequence(range(50, 56))
    assert second.row == row
    for late in (
        lambda: manager.commit([first]),
        lambda: manager.append([first], [[1]]),
        lambda: manager.rewind(first, 1),
        lambda: manager.accept(first, [1], [0]),
        lambda: manager.free(first),
    ):
        with refused(manager, SequenceError):
            late()
    assert second.num_computed_tokens == 0
    assert manager.match_prefix(range(7)).num_tokens == 0
    assert moves(manager) == []


@pytest.fixture
def device():
    return FakeDevice()


@pytest.fixture
def rig_of_bytes(device):
    return Rig(configured([FULL]), device)


def test_B146_of_copies_on_a_device_those_behind_a_failed_one_fail_and_others_arrive(rig_of_bytes, device):
    before = {block: rig_of_bytes.contents("device", 0, block) for block in range(4)}
    rig_of_bytes.manager.perform([demote(block, block) for block in range(4)])
    device.complete("demote", OSError("bus"))
    while device.ready:
        device.complete(device.ready[0])
    with pytest.raises(MovesFailed) as told:
        rig_of_bytes.manager.poll()
    lost = {move.destination for move in told.value.moves}
    assert lost
    for block in range(4):
        assert rig_of_bytes.manager.is_ready("host", 0, block) == (block not in lost)
        assert block in lost or rig_of_bytes.contents("host", 0, block) == before[block]
    with pytest.raises(MovesFailed, match="its source was not written"):
        rig_of_bytes.manager.perform([promote(min(lost), 7)])


def test_B145_a_copy_whose_end_is_lost_is_never_ready_and_holds_nobody_up(rig_of_bytes, device):
    """Other streams go on; who would have to wait for it is told, here, instead of hanging."""
    device.lose("demote")
    rig_of_bytes.manager.perform([demote(0, 0)])
    rig_of_bytes.manager.perform([promote(3, 5)])
    device.finish()
    assert not rig_of_bytes.manager.is_ready("host", 0, 0)
    assert rig_of_bytes.manager.is_ready("device", 0, 5)
    assert rig_of_bytes.manager.num_under_way == 1
    with pytest.raises(WaitsForever, match="demote"):
        rig_of_bytes.manager.finish()


def test_B033_a_copy_that_was_only_late_arrives_as_it_was_ordered(rig_of_bytes, device):
    before = rig_of_bytes.contents("device", 0, 0)
    device.lose("demote")
    rig_of_bytes.manager.perform([demote(0, 0)])
    rig_of_bytes.manager.sync()
    device.compute(lambda: rig_of_bytes.fill(0, 0, 9))  # the next pass writes what is being read: it waits
    device.finish()
    assert rig_of_bytes.contents("device", 0, 0) == before
    device.recover("demote")
    device.finish()
    assert rig_of_bytes.contents("host", 0, 0) == before
    assert set(rig_of_bytes.contents("device", 0, 0)) == {9}


def test_B145_a_call_to_a_store_that_ends_after_its_time_changes_nothing():
    """The answer comes when the prompt is being computed; what it wrote is in a buffer that nobody reads."""
    with opened("full", "store", num_blocks=12) as rig:
        rig.leave(range(17))
        rig.send_down()
        rig.manager._link.stack._levels[0].store.timeout_s = 0.05
        rig.stores[0].hold("get")
        first = rig.serve([*range(16), 99])
        assert first.num_cached_tokens == 0
        rig.stores[0].release()
        rig.memory.verify(first)
        rig.free(first)
        rig.manager.drop(namespace=())
        rig.require_all_back()


@pytest.mark.parametrize("num_blocks", range(1, 6))
def test_B146_of_n_blocks_in_a_store_each_may_be_missing_or_damaged(num_blocks):
    for at in range(num_blocks):
        for damage in (lambda entry: b"", lambda entry: entry[:-1], lambda entry: entry[:-1] + bytes([entry[-1] ^ 1])):
            with opened("full", "store", False) as rig:
                rig.leave(range(4 * num_blocks))
                rig.send_down()
                keys = rig.stores[0]._entries
                assert len(keys) == num_blocks
                rig.stores[0].change(list(keys)[at], damage)
                fresh = again(rig)
                assert fresh.leave([*range(4 * num_blocks), 99], publish=False) == 4 * at
                assert fresh.manager.flush(PATIENT)
                fresh.close()


def test_B035_nothing_to_move_is_nothing_moved():
    rig = Rig(configured([FULL]), FakeDevice())
    before = rig.everything()
    rig.manager.perform([])
    rig.manager.queue([])
    rig.manager.poll()
    rig.manager.sync()
    rig.manager.finish()
    assert rig.manager.num_under_way == 0
    assert rig.everything() == before
    assert rig.manager.is_ready("host", 0, 0)
