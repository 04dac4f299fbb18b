import pytest
import torch

from kvist.memory.rows import Rows, ScatteredRows, store

SHAPE = (3, 2, 5)


def plain_and_scattered():
    """Equal tokens `[3 blocks, 2, 5]`: in one piece, and with others' bytes between the blocks."""
    plane = torch.arange(30.0).view(SHAPE)
    slab = torch.full((3, 17), -1.0)
    scattered = slab[:, 4:14].unflatten(1, SHAPE[1:])
    scattered.copy_(plane)
    return [(Rows(plane.flatten(0, 1)), plane, plane), (ScatteredRows(scattered), scattered, slab)]


@pytest.mark.parametrize("slots", [[-1, 3, -7, 0], [2, -1], [-1, -2], [1, 0], [], [5, -1, 0]])
def test_the_write_that_never_waits_for_the_device_equals_the_checked_one(slots):
    index, new = torch.tensor(slots, dtype=torch.int64), torch.randn(len(slots), 5)
    for (checked, expected, _), (unchecked, found, _) in zip(plain_and_scattered(), plain_and_scattered(), strict=True):
        store([checked], index, {"keys": new}, "slot")
        unchecked.write_kept(index, new)
        assert torch.equal(found, expected)


def test_scattered_rows_are_those_of_the_same_tokens_in_one_piece():
    (rows, plane, _), (scattered, view, slab) = plain_and_scattered()
    index, new = torch.tensor([5, 0, 3]), torch.randn(3, 5)
    assert (scattered.num_rows, scattered.row_shape) == (rows.num_rows, rows.row_shape) == (6, (5,))
    assert torch.equal(scattered.read(index), rows.read(index))
    rows.write(index, new)
    scattered.write(index, new)
    assert torch.equal(view, plane)
    assert torch.equal(scattered.read(index), new)
    assert (slab[:, [0, 1, 2, 3, 14, 15, 16]] == -1).all()
