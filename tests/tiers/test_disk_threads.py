"""Calls from several threads at once, also in the middle of each other: no wrong bytes, no lost slots."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from random import Random
from signal import ITIMER_REAL, SIGALRM, setitimer, signal
from threading import Event, Thread, current_thread, main_thread

import pytest
from tests.tiers.disks import PAGES, PAIR, UnsyncedFiles, entry, found, key, num_bytes, opened, put, room

from kvist.testing.faulty_files import FaultyFiles
from kvist.tiers.disk.sharing import SHARED_BYTES
from kvist.tiers.protocol import StoreFormat


class Gate(FaultyFiles):
    """Files whose next read or write of contents waits until it is let on."""

    def __init__(self):
        super().__init__()
        self.reached, self.open_again = Event(), Event()
        self.stops = None

    def stop(self, operation):
        self.reached.clear()
        self.open_again.clear()
        self.stops = operation

    def _wait(self, operation, offset):
        if self.stops == operation and offset >= 4096:
            self.stops = None
            self.reached.set()
            assert self.open_again.wait(30)

    def read(self, file, buffers, offset):
        self._wait("read", offset)
        return super().read(file, buffers, offset)

    def write(self, file, buffers, offset):
        self._wait("write", offset)
        return super().write(file, buffers, offset)


@pytest.fixture
def gate():
    return Gate()


def meanwhile(gate, operation, call, act):
    """Start a call in another thread, act when it is in the middle of its bytes, and return what both return."""
    gate.stop(operation)
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(call)
        assert gate.reached.wait(30)
        try:
            done = act()
        finally:
            gate.open_again.set()
        return future.result(30), done


def test_what_is_half_written_is_not_there_yet(tmp_path, gate):
    with opened(tmp_path, files=gate) as store:
        num_put, seen = meanwhile(
            gate, "write", lambda: put(store, 1), lambda: (found(store, 1), store.contains([key(1)]))
        )
        assert (num_put, seen) == (1, ([], [False]))
        assert found(store, 1) == [1]


def test_what_another_thread_is_writing_is_not_written_twice(tmp_path, gate):
    with opened(tmp_path, files=gate) as store:
        assert meanwhile(gate, "write", lambda: put(store, 1), lambda: put(store, 1, 2)) == (1, 1)
        assert found(store, 1, 2) == [1, 2]
        assert store.stats().num_put == 2


def test_what_is_dropped_while_it_is_written_is_not_there_afterwards(tmp_path, gate):
    with opened(tmp_path, files=gate) as store:
        assert meanwhile(gate, "write", lambda: put(store, 1, tag=1), lambda: store.drop(bytes([1]) * 16)) == (0, None)
        assert found(store, 1, tag=1) == []
        assert put(store, 1, tag=1) == 1
    with opened(tmp_path) as store:
        assert found(store, 1, tag=1) == [1]


def test_a_slot_is_not_given_to_others_while_it_is_read(tmp_path, gate):
    with opened(tmp_path, room(1), files=gate) as store:
        put(store, 1)
        assert meanwhile(gate, "read", lambda: found(store, 1), lambda: put(store, 2)) == ([1], 0)
        assert put(store, 2) == 1


def test_a_slot_that_is_dropped_while_it_is_read_is_free_afterwards(tmp_path, gate):
    with opened(tmp_path, room(1), files=gate) as store:
        put(store, 1)
        answer, _ = meanwhile(gate, "read", lambda: found(store, 1), lambda: (store.drop(b""), put(store, 2)))
        assert answer == [1]
        assert found(store, 1) == []
        assert put(store, 2) == 1
        assert found(store, 2) == [2]


def test_close_waits_for_calls_that_are_under_way(tmp_path, gate):
    store = opened(tmp_path, files=gate)
    put(store, 1)
    closer = Thread(target=store.close)
    answer, _ = meanwhile(gate, "read", lambda: found(store, 1), closer.start)
    closer.join(30)
    assert answer == [1]
    assert not closer.is_alive()
    with opened(tmp_path) as store:
        assert found(store, 1) == [1]


@pytest.mark.parametrize("io", ["buffered", "direct"])
@pytest.mark.parametrize(("format", "sizes"), [(PAGES, [4096]), (PAIR, [100, 5000])])
def test_threads_that_put_get_and_drop_under_eviction_never_see_wrong_bytes(tmp_path, format, sizes, io):
    capacity = room(6, max(sizes))

    def work(seed):
        chance = Random(seed)
        for _ in range(250):
            size = chance.choice(sizes)
            numbers = [chance.randrange(16) for _ in range(chance.randrange(1, 5))]
            act = chance.choice((put, put, found, found, found, None))
            if act is not None:
                act(store, *numbers, size=size)
            elif chance.random() < 0.2:
                store.drop(b"")

    with opened(tmp_path, capacity, format, io=io) as store:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(work, range(4)))
        stats = store.stats()
        assert (stats.num_corrupt, stats.num_errors) == (0, 0)
        assert stats.num_evicted > 0
        assert stats.num_hits > 0
        assert num_bytes(tmp_path) <= capacity
        for size in sizes:  # no slot was lost: a batch of all the room is taken
            store.drop(b"")
            num_there = store.put([entry(number, size) for number in range(100, 200)])
            assert len(found(store, *range(100, 200), size=size)) == num_there >= 6
    with opened(tmp_path, capacity, format) as store:
        assert store.stats().num_entries == num_there


@pytest.mark.parametrize("io", ["buffered", "direct"])
def test_a_call_that_a_signal_ends_ends_when_its_helper_has(tmp_path, io):
    """Else the helper would write into slots that others have got meanwhile."""
    size, began, let_on = SHARED_BYTES, Event(), Event()

    class Slow(UnsyncedFiles):
        def write(self, file, buffers, offset):
            if current_thread() is not main_thread() and not began.is_set():
                began.set()
                assert let_on.wait(30)
            return super().write(file, buffers, offset)

    def interrupt(*_):
        raise TimeoutError("a signal")

    format = StoreFormat("a model", block_size=2, block_bytes=(size,))
    with opened(tmp_path, room(4, size) + 4 * size, format, io=io, files=Slow()) as store:
        earlier = signal(SIGALRM, interrupt)

        def alarm_then_let_on():
            assert began.wait(30)
            setitimer(ITIMER_REAL, 0.05)
            time.sleep(0.5)
            let_on.set()

        Thread(target=alarm_then_let_on).start()
        try:
            with pytest.raises(TimeoutError, match="a signal"):
                put(store, 1, 2, 3, 4, size=size)
        finally:
            signal(SIGALRM, earlier)
        assert let_on.is_set()
        assert put(store, 11, 12, 13, 14, size=size) == 4
        assert found(store, 11, 12, 13, 14, size=size) == [11, 12, 13, 14]


HUNG = """
import sys, threading, time
from kvist.tiers.disk import DiskStore
from kvist.tiers.disk.files import Files
from kvist.tiers.guard import GuardedStore
from kvist.tiers.protocol import StoreFormat

size, hung = 4 << 20, threading.Event()

class Hung(Files):
    def read(self, file, buffers, offset):
        if hung.is_set():
            time.sleep(600)
        return super().read(file, buffers, offset)

guard = GuardedStore(DiskStore(sys.argv[1], 20 * size, StoreFormat("m", 4, (size,)), files=Hung()), 1.0)
keys = [number.to_bytes(48, "big") for number in range(4)]
guard.put([(key, memoryview(bytes(size))) for key in keys])
assert guard.flush(30.0)
hung.set()
assert guard.fetch(keys, [size] * 4) == [None] * 4
assert any(thread.name == "kvist-disk" for thread in threading.enumerate())
guard.close()
"""


def test_a_disk_that_hangs_does_not_hold_up_the_end_of_the_process(tmp_path):
    subprocess.run([sys.executable, "-c", HUNG, str(tmp_path / "store")], check=True, timeout=60)
