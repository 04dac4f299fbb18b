"""A crash or loss of power at any moment: the store comes up, has no wrong byte, lost only what was not written."""

from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiers.disks import PAIR, found, num_bytes, opened, put, room

from kvist.testing.faulty_files import Crash, FaultyFiles
from kvist.tiers.disk import space
from kvist.tiers.disk.segments import Geometry

CAPACITY = 8192 + 5 * Geometry(0, 5000, 1).num_bytes
TORN = [0.0, 0.01, 0.5, 0.99, 1.0]


class Life:
    """What a process does with a store until it crashes; `held` and `dropped` are what it was told for certain."""

    def __init__(self, directory, files, io="buffered", capacity=CAPACITY):
        self.directory, self.files, self.io, self.capacity = directory, files, io, capacity
        self.held, self.dropped = set(), set()

    def run(self):
        with opened(self.directory, self.capacity, PAIR, io=self.io, files=self.files) as store:
            for number in range(8):
                self.put(store, number, number + 1)
            self.put(store, 20, 21, size=5000)
            self.drop(store)
            for number in range(30, 34):
                self.put(store, number, number + 10, size=5000)
                self.put(store, number)
                found(store, 8, 31)
        return self

    def put(self, store, *numbers, size=100):
        written = {(number, size) for number in numbers}
        self.dropped -= written
        assert put(store, *numbers, size=size) == len(numbers)
        self.held = written  # the last put; what was put before may be evicted

    def drop(self, store):
        self.held = set()
        names = {(number, size) for number in range(50) for size in (100, 5000)}
        store.drop(b"")
        self.dropped = names


def crashed(directory, io="buffered", capacity=CAPACITY, **how):
    """Live until the crash, if there is one; the files of the dead are closed."""
    files = FaultyFiles(**how)
    life = Life(directory, files, io, capacity)
    try:
        life.run()
    except Crash:
        files.bury()
    return life


def check(life, *, with_power=True):
    """Open what a dead process left: right contents only, what it had been told is there, and work goes on."""
    with opened(life.directory, life.capacity, PAIR) as store:
        there = {(number, size) for size in (100, 5000) for number in found(store, *range(50), size=size)}
        assert not there & life.dropped
        if with_power:
            assert life.held <= there
            assert store.stats().num_corrupt == 0
        assert num_bytes(life.directory) <= life.capacity
        for number in range(60, 70):
            assert put(store, number) == 1
            assert put(store, number, size=5000) == 1
            assert found(store, number, size=5000) == [number]
    with opened(life.directory, life.capacity, PAIR) as store:
        assert found(store, 69) == [69]
        assert store.stats().num_errors == 0


def num_changes(*how):
    """How many moments there are to crash at."""
    with TemporaryDirectory() as directory:
        return crashed(directory, *how).files.num_changes


NUM_CHANGES = num_changes("buffered")


@pytest.mark.parametrize("io", ["buffered", "direct"])
@pytest.mark.parametrize("torn", TORN)
def test_a_crash_at_each_change_loses_only_what_was_not_yet_written(tmp_path, torn, io):
    assert NUM_CHANGES > 60
    for crash_at in range(num_changes(io)):
        life = crashed(tmp_path / str(crash_at), io, crash_at=crash_at, torn=torn)
        assert life.files.is_dead
        check(life)


@pytest.mark.parametrize("torn", TORN[1:4])
def test_a_crash_between_the_halves_of_a_call_loses_only_what_was_not_yet_written(tmp_path, monkeypatch, torn):
    monkeypatch.setattr(space, "SHARED_BYTES", 1)
    monkeypatch.setattr(space, "PART_BYTES", 1)
    capacity = 8192 + 24 * Geometry(0, 5000, 1).num_bytes
    for crash_at in range(num_changes("buffered", capacity)):
        life = crashed(tmp_path / str(crash_at), "buffered", capacity, crash_at=crash_at, torn=torn)
        assert life.files.is_dead
        check(life)


@given(seed=st.integers(0, 10**6), crash_at=st.integers(4, NUM_CHANGES - 1))
def test_a_loss_of_power_at_any_moment_loses_contents_but_never_changes_them(tmp_path_factory, seed, crash_at):
    directory = tmp_path_factory.mktemp("store")
    files = FaultyFiles(crash_at=crash_at)
    life = Life(directory, files)
    with pytest.raises(Crash):
        life.run()
    files.cut_power(Random(seed))
    files.bury()
    check(life, with_power=False)


def test_a_crash_during_the_recovery_from_a_crash_is_recovered_from(tmp_path):
    for crash_at in range(3, NUM_CHANGES, 5):
        directory = tmp_path / str(crash_at)
        life = crashed(directory, crash_at=crash_at, torn=0.5)
        for again in range(6):
            files = FaultyFiles(crash_at=again, torn=0.5)
            with pytest.raises(Crash):
                store = opened(directory, CAPACITY, PAIR, files=files)
                store.drop(b"")
                put(store, 1, 2)
                put(store, 3, size=5000)
            files.bury()
        life.held = life.dropped = set()
        check(life)


def test_a_writer_that_died_in_the_middle_of_contents_left_nothing_to_be_found(tmp_path):
    files = FaultyFiles()
    store = opened(tmp_path, room(2), files=files)
    files.crash_at, files.torn = files.num_changes + 2, 0.5  # a new file, its room, the contents
    with pytest.raises(Crash):
        put(store, 1)
    files.bury()
    with opened(tmp_path, room(2)) as store:
        assert found(store, 1) == []
        assert store.stats().num_corrupt == 0
