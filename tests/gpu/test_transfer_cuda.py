"""Moves between a CUDA device and pinned host memory: the same contents as on CPU, and nothing makes the host wait."""

from random import Random

import pytest
import torch
from tests.memory.test_transfer_manager import CONFIGS, demote, promote, random_move
from tests.memory.transfer_rig import FULL, NUM_DEVICE, Rig, configured

from kvist.memory import TorchMemory
from kvist.memory.transfers import CudaDevice, TransferManager, columns_of


class CudaRig(Rig):
    """The same as a rig, with the device's planes on the device, the host's pinned, and a manager."""

    def __init__(self, config, seed=0):
        super().__init__(config, seed=seed)
        device = torch.device("cuda", torch.cuda.current_device())
        memory = TorchMemory(config, device="cuda")
        groups = range(len(self.layouts))
        on_device = [memory.plane_bytes(group) for group in groups]
        for ours, others in zip(self.planes["device"], on_device, strict=True):
            for plane, other in zip(ours, others, strict=True):
                other.copy_(plane)
        rows = [rows.pin_memory() for rows in self.rows]
        on_host = [columns_of(rows[config.pool_of[group]], self.layouts[group]) for group in groups]
        self.memory, self.rows, self.planes = memory, rows, {"device": on_device, "host": on_host}
        pools = dict.fromkeys(self.planes, config.pool_of)
        self.manager = TransferManager(CudaDevice(device), self.layouts, self.planes, pools)

    def contents(self, tier, group, block):
        return b"".join(plane[block].cpu().numpy().tobytes() for plane in self.planes[tier][group])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_moves_on_streams_give_what_they_give_one_by_one(config):
    random, rig, plain = Random(1), CudaRig(config), Rig(config)
    for _ in range(40):
        moves = [random_move(random, config) for _ in range(random.randrange(1, 7))]
        rig.manager.perform(moves)
        for move in moves:
            plain.apply(move)
        if random.random() < 0.5:
            rig.manager.sync()
            written = random.randrange(NUM_DEVICE)
            rig.fill(0, written, 9)
            plain.fill(0, written, 9)
    rig.manager.finish()
    rig.manager.sync()
    assert rig.manager.num_under_way == 0
    assert rig.everything() == plain.everything()


def test_what_the_compute_stream_writes_late_is_what_arrives():
    rig = CudaRig(configured([FULL]))
    torch.cuda._sleep(200_000_000)
    rig.fill(0, 1, 9)
    rig.manager.perform([demote(1, 0), promote(0, 5)])
    assert rig.manager.num_under_way == 2
    assert not rig.manager.is_ready("host", 0, 0)
    rig.manager.wait_for("host", 0, [0])
    assert set(rig.contents("host", 0, 0)) == {9}
    rig.manager.sync()
    assert set(rig.contents("device", 0, 5)) == {9}


def test_nothing_makes_the_host_wait():
    rig = CudaRig(configured([FULL]))
    rig.manager.perform([demote(1, 0), promote(2, 3)])
    rig.manager.finish()
    torch.cuda.set_sync_debug_mode("error")
    try:
        rig.manager.perform([demote(1, 0), promote(0, 5), demote(2, 3)])
        rig.manager.sync()
        rig.manager.poll()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    rig.manager.finish()
