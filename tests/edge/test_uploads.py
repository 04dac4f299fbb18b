import numpy as np
import torch

from kvist.edge.uploads import Mirror, StagingBuffers, runs_of


class Event:
    """Stands for the end of a copy, which a test lets come."""

    def __init__(self):
        self.passed = False

    def query(self):
        return self.passed


def test_a_buffer_is_used_again_when_its_copy_has_ended():
    buffers = StagingBuffers(lambda: torch.empty(3))
    first, copied = buffers.take(), Event()
    buffers.give(copied)
    copied.passed = True
    assert buffers.take() is first
    assert len(buffers) == 1


def test_while_copies_are_under_way_there_is_one_more_buffer():
    buffers = StagingBuffers(lambda: torch.empty(3))
    events = [Event(), Event()]
    first = buffers.take()
    buffers.give(events[0])
    second = buffers.take()
    buffers.give(events[1])
    assert second is not first
    assert len(buffers) == 2
    events[1].passed = True
    assert buffers.take() is second
    buffers.give(Event())
    assert buffers.take() is not first
    assert len(buffers) == 3


def test_the_buffer_given_last_is_that_taken_last():
    buffers = StagingBuffers(lambda: torch.empty(3))
    one, other = Event(), Event()
    first = buffers.take()
    buffers.give(one)
    buffers.take()
    buffers.give(other)
    one.passed = True
    assert buffers.take() is first
    buffers.give(Event())
    assert not other.passed
    assert buffers.take() is not first
    assert len(buffers) == 3


def test_runs_are_of_numbers_that_follow_one_another():
    assert runs_of(np.array([], np.int32)).tolist() == []
    assert runs_of(np.arange(4)).tolist() == [[0, 4]]
    assert runs_of(np.array([1, 3, 4])).tolist() == [[1, 2], [3, 5]]


def test_only_runs_are_written():
    mirror = Mirror((2, 4), "cpu")
    mirror.write(np.arange(8, dtype=np.int32).reshape(2, 4), np.array([[1, 3], [6, 7]]))
    assert mirror.tensor.tolist() == [[-1, 1, 2, -1], [-1, -1, 6, -1]]


def test_a_mirror_made_in_inference_mode_can_be_written_outside_of_it():
    with torch.inference_mode():
        mirror = Mirror((2,), "cpu")
    mirror.write(np.array([3, 4], np.int32), np.array([[0, 2]]))
    assert mirror.tensor.tolist() == [3, 4]
