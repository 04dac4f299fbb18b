import pytest
import torch

from kvist.edge import SequenceLengths
from kvist.edge.mappings import survivors_of
from kvist.errors import ArgumentError


def begun(*counts, capacity=256):
    lengths = SequenceLengths(4, capacity)
    lengths.reset(list(counts))
    return lengths


def added(*counts):
    return torch.tensor(counts, dtype=torch.int32)


def test_E7_a_commit_adds_to_the_rows_of_the_batch():
    lengths = begun(0, 5, 0)
    assert lengths.num_active == 3
    lengths.resize(2)
    lengths.commit(7)
    assert lengths.tensor.tolist() == [7, 12]
    assert lengths.tensor.dtype == torch.int32


@pytest.mark.parametrize("num_active", [-1, 5, True, 1.5])
def test_E7_a_batch_below_0_or_above_the_largest_is_refused(num_active):
    lengths = begun(0, 5, 0)
    with pytest.raises(ArgumentError):
        lengths.resize(num_active)
    assert lengths.num_active == 3


def test_lengths_are_zeros_at_first_and_stay_where_they_are():
    lengths = SequenceLengths(4, 256)
    assert lengths.num_active == 0
    lengths.resize(4)
    assert lengths.tensor.tolist() == [0, 0, 0, 0]
    address = lengths.tensor.data_ptr()
    lengths.reset([1, 2])
    lengths.commit(3)
    assert lengths.tensor.data_ptr() == address


def test_rows_beyond_the_batch_keep_what_they_hold():
    lengths = begun(1, 2, 3)
    lengths.resize(1)
    lengths.commit(1)
    lengths.resize(3)
    assert lengths.tensor.tolist() == [2, 2, 3]
    lengths.resize(0)
    lengths.commit(1)
    assert lengths.tensor.tolist() == []


def test_all_is_empty_until_something_is_reused_or_committed():
    assert SequenceLengths(4, 256).all_empty
    assert not begun(0, 5).all_empty
    for commit in (1, added(0, 0)):
        lengths = begun(0, 0)
        assert lengths.all_empty
        lengths.commit(commit)
        assert not lengths.all_empty
        lengths.reset([0, 0])
        assert lengths.all_empty


def test_a_prefill_commits_by_row():
    lengths = begun(0, 5, 0)
    lengths.commit(added(3, 0, 9))
    assert lengths.tensor.tolist() == [3, 5, 9]


@pytest.mark.parametrize(
    "counts", [added(1, 2), added(1, 2, -1), added(1, 2, 3).long(), added(1, 2, 252), 252, -1, 1.5, True]
)
def test_a_commit_that_cannot_be_changes_nothing(counts):
    lengths = begun(0, 0, 5)
    with pytest.raises(ArgumentError):
        lengths.commit(counts)
    assert lengths.tensor.tolist() == [0, 0, 5]


@pytest.mark.parametrize("counts", [[1] * 5, [-1], [257], [[1]], [0.5]])
def test_a_batch_that_cannot_be_changes_nothing(counts):
    lengths = begun(3, 4)
    with pytest.raises(ArgumentError):
        lengths.reset(counts)
    assert lengths.tensor.tolist() == [3, 4]


def test_E8_lengths_of_rows_that_go_on_come_to_the_front():
    lengths = SequenceLengths(8, 256)
    lengths.reset([11, 12, 13, 14])
    lengths.compact(survivors_of([-1, 0, -1, 1], 2, 8, num_old=4))
    assert lengths.tensor.tolist() == [12, 14]


def test_two_rows_exchange_their_lengths_and_back():
    lengths = begun(1, 2, 3)
    lengths.swap(0, 2)
    assert lengths.tensor.tolist() == [3, 2, 1]
    lengths.swap(2, 0)
    assert lengths.tensor.tolist() == [1, 2, 3]
    lengths.swap(1, 1)
    lengths.clear(0)
    assert lengths.tensor.tolist() == [0, 2, 3]
    for act in (lambda: lengths.swap(0, 4), lambda: lengths.clear(-1)):
        with pytest.raises(ArgumentError):
            act()
