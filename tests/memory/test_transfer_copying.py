"""Copies of scattered rows on CPU: every way of copying gives what a plain loop gives."""

from itertools import product
from random import Random

import numpy as np
import pytest
import torch
from tests.memory.transfer_rig import BLOCK_SIZE, MIXED, NUM_DEVICE, STATES, Rig, configured, int64

from kvist.config import DTYPES, AttentionSpec
from kvist.errors import ArgumentError, LayoutError
from kvist.memory.transfers import Copier, copying

WAYS = {"a call for each piece": 1, "through the cache": 1 << 30}
"""The size from which pieces are large."""


@pytest.fixture(params=product(WAYS.values(), (1, 3), (0, 16)), ids=lambda ways: ", ".join(map(str, ways)))
def copier(request, monkeypatch):
    """Every way, in tasks so small that there are several of each."""
    limit, num_threads, few = request.param
    monkeypatch.setattr(copying, "FEW_ROWS", few)
    monkeypatch.setattr(copying, "LARGE_PIECE_BYTES", limit)
    monkeypatch.setattr(copying, "CACHED_BYTES", 96)
    monkeypatch.setattr(copying, "TASK_BYTES", 128)
    copier = Copier(num_threads)
    yield copier
    copier.close()


def random_bytes(*shape, seed=0):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


IDS = {
    "scattered": ([7, 0, 5, 3, 9], [2, 8, 0, 6, 11]),
    "one": ([3], [4]),
    "none": ([], []),
    "neighbours on both sides": ([2, 3, 4, 9, 5, 6], [0, 1, 2, 3, 8, 9]),
    "a run to be written": ([9, 2, 5, 0], [4, 5, 6, 7]),
    "a run to be read": ([4, 5, 6, 7], [9, 2, 5, 0]),
    "everything": (range(12), range(12)),
    "one read often": ([5, 5, 5], [1, 9, 4]),
}


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS.keys())
@pytest.mark.parametrize(("read_in", "written_in"), [(16, 16), (40, 16), (16, 40), (40, 40)])
def test_rows_are_copied_and_nothing_beside_them(copier, ids, read_in, written_in):
    source, destination = random_bytes(12, read_in), random_bytes(12, written_in, seed=1)
    expected = destination.clone()
    for read, written in zip(*ids, strict=True):
        expected[written, :16] = source[read, :16]
    copier.copy_rows(source[:, :16], np.array(ids[0], np.int32), destination[:, :16], np.array(ids[1], np.int32))
    assert torch.equal(destination, expected)


def test_many_rows_are_copied_by_all_threads(copier):
    ids = list(range(4000))
    read, written = Random(0).sample(ids, 3000), Random(1).sample(ids, 3000)
    source, destination = random_bytes(4000, 24), torch.zeros((4000, 24), dtype=torch.uint8)
    copier.copy_rows(source, np.array(read), destination, np.array(written))
    expected = torch.zeros_like(destination)
    expected[written] = source[read]
    assert torch.equal(destination, expected)


@pytest.mark.parametrize("order", ["layer_major", "block_major"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [None, 1, 3, 4])
def test_planes_of_every_dtype_become_rows_and_planes_again(copier, dtype, order, num_tokens):
    """Of 4-bit numbers whole blocks are copied."""
    config = configured([AttentionSpec(2, 6, dtype=dtype), AttentionSpec(1, 10, dtype=dtype)], storage_order=order)
    rig, other = Rig(config), Rig(config, seed=1)
    [layout] = rig.layouts
    ids, places = int64(6, 1, 2, 7), int64(0, 5, 3, 4)
    rows = torch.zeros((4, layout.num_bytes), dtype=torch.uint8)
    copier.gather(rig.planes["device"][0], layout, ids, rows, num_tokens)
    copier.scatter(rows, other.planes["device"][0], layout, places, num_tokens)
    kept = Rig(config, seed=1)
    for plane, read, written in zip(layout.planes, rig.planes["device"][0], kept.planes["device"][0], strict=True):
        size = plane.num_bytes if num_tokens is None or layout.moves_whole else plane.token_bytes * num_tokens
        written[torch.from_numpy(places), :size] = read[torch.from_numpy(ids), :size]
    assert other.everything() == kept.everything()
    assert layout.moves_whole == (dtype in ("int4", "uint4"))


def test_planes_of_different_sizes_and_states_become_rows(copier):
    rig = Rig(configured([*MIXED, STATES]))
    for group, layout in enumerate(rig.layouts):
        rows = torch.zeros((NUM_DEVICE, layout.num_bytes), dtype=torch.uint8)
        copier.gather(rig.planes["device"][group], layout, np.arange(NUM_DEVICE), rows)
        for plane, column in zip(layout.planes, rig.planes["device"][group], strict=True):
            assert torch.equal(rows[:, plane.offset : plane.offset + plane.num_bytes], column)


def test_blocks_that_are_one_piece_on_both_sides_are_copied_as_one():
    rig = Rig(configured(MIXED, storage_order="block_major"))
    [layout] = rig.layouts
    whole = copying.paired(rig.planes["device"][0], rig.planes["host"][0], layout)
    assert [source.shape[1] for source, _ in whole] == [layout.planes[-1].offset + layout.planes[-1].num_bytes]
    parts = copying.paired(rig.planes["device"][0], rig.planes["host"][0], layout, BLOCK_SIZE - 1)
    assert [source.shape[1] for source, _ in parts] == [plane.token_bytes * 3 for plane in layout.planes]


def test_planes_that_are_neighbours_on_one_side_only_are_copied_apart():
    rig = Rig(configured(MIXED))
    assert len(copying.paired(rig.planes["device"][0], rig.planes["host"][0], rig.layouts[0])) == 5


def test_planes_at_other_distances_on_the_two_sides_are_copied_apart():
    [layout] = Rig(configured([AttentionSpec(1, 8, dtype="float16")])).layouts
    near, far = random_bytes(4, 128), random_bytes(4, 160)
    sides = [near[:, :64], near[:, 64:]], [far[:, :64], far[:, 80:144]]
    assert [source.shape[1] for source, _ in copying.paired(*sides, layout)] == [64, 64]
    assert [source.shape[1] for source, _ in copying.paired(sides[1], sides[1], layout)] == [144]


@pytest.mark.parametrize(
    ("source_ids", "destination_ids", "says"),
    [
        ([0, 4], [0, 1], r"source ids must be in \[0, 4\), got 0 to 4"),
        ([0, 1], [-1, 3], r"destination ids must be in \[0, 4\), got -1 to 3"),
    ],
)
def test_ids_outside_are_refused_before_anything_is_copied(copier, source_ids, destination_ids, says):
    source, destination = random_bytes(4, 8), torch.zeros((4, 8), dtype=torch.uint8)
    with pytest.raises(ArgumentError, match=says):
        copier.copy_rows(source, np.array(source_ids), destination, np.array(destination_ids))
    assert not destination.any()


def test_tensors_of_another_kind_are_refused():
    copier, rows = Copier(1), random_bytes(4, 8)
    with pytest.raises(LayoutError, match=r"got torch.int64 \[4, 8\]"):
        copier.copy_rows(rows.to(torch.int64), int64(0), rows, int64(1))
    with pytest.raises(LayoutError, match="dense in its last axis"):
        copier.copy_rows(rows, int64(0), random_bytes(8, 4).T, int64(1))
    with pytest.raises(LayoutError, match=r"rows of \[8\] cannot be copied into \[4\]"):
        copier.copy_rows(rows, int64(0), rows[:, :4], int64(1))
    with pytest.raises(LayoutError, match="there are 2 source ids, but 1 destination ids"):
        copier.copy_rows(rows, int64(0, 1), rows, int64(1))
    with pytest.raises(LayoutError, match=r"ids must be \[n\], got \[1, 1\]"):
        copier.copy_rows(rows, int64(0)[None], rows, int64(1)[None])
    with pytest.raises(ArgumentError, match="num_threads must be at least 1, got 0"):
        Copier(0)


def test_an_error_of_any_thread_is_raised_and_the_next_copy_is_made(monkeypatch):
    copier = Copier(2)
    source, destination = random_bytes(4, 8), torch.zeros((4, 8), dtype=torch.uint8)

    def failing(*_):
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr(copying, "_move", failing)
        with pytest.raises(OSError, match="no"):
            copier.copy_rows(source, int64(0), destination, int64(1))
    copier.copy_rows(source, int64(0), destination, int64(1))
    copier.close()
    copier.copy_rows(source, int64(2), destination, int64(3))
    assert torch.equal(destination[[1, 3]], source[[0, 2]])


def test_storage_made_in_inference_mode_is_copied_too():
    with torch.inference_mode():
        source, destination = random_bytes(4, 64), torch.zeros((4, 64), dtype=torch.uint8)
        Copier(2).copy_rows(source[:, :8], int64(3, 1), destination[:, :8], int64(0, 2))
    Copier(2).copy_rows(source[:, :8], int64(3, 1), destination[:, :8], int64(0, 2))
    assert torch.equal(destination[[0, 2], :8], source[[3, 1], :8])
