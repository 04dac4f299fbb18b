"""What is done on a CUDA stream, done on CPU: gathering, crossing as rows, scattering; the streams are not in it."""

from itertools import product

import pytest
import torch
from tests.memory.transfer_rig import BLOCK_SIZE, FULL, MIXED, STATES, Rig, configured, int64

from kvist.config import AttentionSpec
from kvist.memory.transfers import Job, cuda
from kvist.memory.transfers.jobs import paired, token_pairs

CPU = torch.device("cpu")
CONFIGS = {
    "layer-major": configured(MIXED),
    "block-major": configured(MIXED, storage_order="block_major"),
    "states": configured([STATES]),
    "4 bits": configured([FULL, AttentionSpec(1, 6, dtype="int4")]),
    "sizes that leave gaps": configured([AttentionSpec(1, 3, dtype="int8"), AttentionSpec(1, 5, dtype="int8")]),
}
IDS = {"scattered": ([5, 0, 3], [2, 4, 1]), "neighbours": ([1, 2, 5, 3], [3, 4, 5, 0]), "one": ([2], [5])}


@pytest.fixture(params=product(CONFIGS, IDS, (BLOCK_SIZE, 3)), ids=lambda given: ", ".join(map(str, given)))
def case(request):
    """A rig, a second one that is full of the same, the blocks to be copied, and how many tokens of them."""
    name, ids, num_tokens = request.param
    return Rig(CONFIGS[name]), Rig(CONFIGS[name]), [int64(*some) for some in IDS[ids]], num_tokens


@pytest.fixture(params=[1, 200, 1 << 20], ids=lambda size: f"{size} bytes of staging")
def staging_bytes(request):
    return request.param


def pairs_of(rig, source, destination, num_tokens):
    return paired(rig.planes[source][0], rig.planes[destination][0], rig.layouts[0], num_tokens)


def apply(rig, source, destination, sources, destinations, num_tokens):
    for read, written in zip(sources.tolist(), destinations.tolist(), strict=True):
        for before, after in pairs_of(rig, source, destination, num_tokens):
            after[written] = before[read].clone()


@pytest.mark.parametrize(("source", "destination"), [("host", "device"), ("device", "host")])
def test_blocks_are_staged_on_their_way(case, source, destination, staging_bytes):
    rig, plain, ids, num_tokens = case
    pairs = pairs_of(rig, source, destination, num_tokens)
    for sources, destinations in cuda.chunks(Job(pairs, *ids), staging_bytes):
        if destination == "device":
            cuda.copy_up(pairs, sources, torch.from_numpy(destinations), CPU)
        else:
            cuda.copy_down(pairs, torch.from_numpy(sources), destinations, CPU)
    apply(plain, source, destination, *ids, num_tokens)
    assert rig.everything() == plain.everything()


def test_blocks_within_the_device_may_change_places():
    rig, plain = Rig(CONFIGS["layer-major"]), Rig(CONFIGS["layer-major"])
    pairs = pairs_of(rig, "device", "device", BLOCK_SIZE)
    cuda.copy_staged(Job(pairs, int64(0, 2, 1), int64(2, 1, 5), overlaps=True), CPU, staging_bytes=1)
    contents = [plain.contents("device", 0, block) for block in range(3)]
    assert [rig.contents("device", 0, block) for block in (2, 1, 5)] == [contents[0], contents[2], contents[1]]


def test_single_tokens_are_copied_between_blocks():
    rig = Rig(CONFIGS["layer-major"])
    planes = rig.planes["device"][0]
    before = [plane.unflatten(1, (BLOCK_SIZE, -1)).clone() for plane in planes]
    job = Job(token_pairs(planes, planes, rig.layouts[0]), int64(1, 1), int64(1, 4), (int64(3, 2), int64(2, 0)))
    cuda.copy_staged(job, CPU)
    for plane, old in zip(planes, before, strict=True):
        tokens = plane.unflatten(1, (BLOCK_SIZE, -1))
        assert torch.equal(tokens[1, 2], old[1, 3])
        assert torch.equal(tokens[4, 0], old[1, 2])
