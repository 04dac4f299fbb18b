"""The suite finds what is wrong with a store: each fault is planted in one that is right, and some test must fail."""

import inspect

import pytest

from kvist.testing.stores import StoreSuite
from kvist.tiers.simulated import SimulatedStore


class ForgetsNothing(SimulatedStore):
    def drop(self, tag):
        pass


class DropsTooMuch(SimulatedStore):
    def drop(self, tag):
        super().drop(tag[:0])


class MixesUpKeys(SimulatedStore):
    def put(self, entries):
        return super().put([(key[:17], contents) for key, contents in entries])

    def get(self, keys, buffers):
        return super().get([key[:17] for key in keys], buffers)

    def contains(self, keys):
        return super().contains([key[:17] for key in keys])


class SaysYes(SimulatedStore):
    def get(self, keys, buffers):
        super().get(keys, buffers)
        return [True] * len(keys)


class AnswersInAnotherOrder(SimulatedStore):
    def contains(self, keys):
        return super().contains(keys)[::-1]


class KeepsTheCallersMemory(SimulatedStore):
    def __init__(self, format):
        super().__init__(format)
        self.kept = {}

    def put(self, entries):
        self.kept.update(entries)
        return super().put(entries)

    def get(self, keys, buffers):
        for key, buffer in zip(keys, buffers, strict=True):
            if key in self.kept and self.kept[key].nbytes == buffer.nbytes:
                buffer[:] = self.kept[key]
        return [key in self.kept and key in self._entries for key in keys]


class FillsPartOfTheBuffer(SimulatedStore):
    def get(self, keys, buffers):
        answers = []
        for key, buffer in zip(keys, buffers, strict=True):
            whole = memoryview(bytearray(96))
            (is_there,) = super().get([key], [whole])
            buffer[: len(whole)] = whole[: len(buffer)]
            answers.append(is_there)
        return answers


class CountsNothing(SimulatedStore):
    def get(self, keys, buffers):
        counts = dict(self._counts._numbers)
        found = super().get(keys, buffers)
        self._counts._numbers.clear()
        self._counts._numbers.update(counts)
        return found


class OverflowsItsBound(SimulatedStore):
    def __init__(self, format):
        super().__init__(format, capacity_bytes=64 * sum(format.block_bytes))
        self._capacity *= 2

    def stats(self):
        self._capacity //= 2
        stats = super().stats()
        self._capacity *= 2
        return stats


class ClosesOnce(SimulatedStore):
    is_closed = False

    def close(self):
        assert not self.is_closed
        self.is_closed = True


FAULTS = [
    ForgetsNothing,
    DropsTooMuch,
    MixesUpKeys,
    SaysYes,
    AnswersInAnotherOrder,
    KeepsTheCallersMemory,
    FillsPartOfTheBuffer,
    CountsNothing,
    OverflowsItsBound,
    ClosesOnce,
]


def failures(store, folder):
    """The tests of the suite that a kind of store does not pass."""

    class Suite(StoreSuite):
        keeps = False

        def open_store(self, format, place):
            return store(format)

    tests = [(name, test) for name, test in inspect.getmembers(Suite()) if name.startswith("test_")]
    failed = []
    for name, test in tests:
        try:
            test(folder)
        except Exception:
            failed.append(name)
    return failed


def test_a_store_that_is_right_passes(tmp_path):
    assert failures(SimulatedStore, tmp_path) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, tmp_path):
    assert failures(fault, tmp_path) != []


def test_a_store_that_lacks_a_call_is_found(tmp_path):
    class NoStats:
        contains = put = get = drop = close = lambda *_: None

    assert "test_it_has_all_calls_of_the_protocol" in failures(lambda _: NoStats(), tmp_path)
