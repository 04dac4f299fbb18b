"""What was dropped stays so: after errors at any earlier moment, a restart and a loss of power."""

import errno
from random import Random

import pytest
from tests.tiers.disks import PAIR, TINY, found, key, num_bytes, opened, put, room, segments

from kvist.errors import TransferError
from kvist.testing.faulty_files import Fault, FaultyFiles
from kvist.tiers.guard import GuardedStore, Limits

PATIENT = 30.0


def left_on_disk(directory, *numbers, capacity=1 << 20, format=TINY, size=100):
    with opened(directory, capacity, format) as store:
        return found(store, *numbers, size=size)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("operation", "times"), [("write", 2), ("sync", 1), ("sync_names", 1)])
def test_a_drop_that_failed_is_made_good_by_the_next_one(tmp_path, operation, times, seed):
    files = FaultyFiles()
    store = opened(tmp_path, files=files)
    put(store, 0, 1)
    put(store, 2, tag=1)
    store._space.sync(store._space.segments.values())
    files.faults.append(Fault(operation, errno.EIO, times=times))
    with pytest.raises(TransferError, match="would be there again later"):
        store.drop(key(0)[:16])
    assert found(store, 0, 1) == []
    store.drop(key(0)[:16])
    files.cut_power(Random(seed))
    files.bury()
    with opened(tmp_path) as again:
        assert found(again, 0, 1) == []
        assert found(again, 2, tag=1) == [2]


def test_one_error_while_a_drop_is_written_is_made_good_at_once(tmp_path):
    files = FaultyFiles()
    with opened(tmp_path, files=files) as store:
        put(store, 0, 1)
        files.faults.append(Fault("write", errno.EIO))
        store.drop(b"")
        assert store.stats().num_errors == 1
    assert left_on_disk(tmp_path, 0, 1) == []


def test_a_guard_drops_again_until_it_is_written(tmp_path):
    files = FaultyFiles()
    guard = GuardedStore(opened(tmp_path, files=files), PATIENT, Limits(retry_s=0.01))
    guard.put([(key(0), memoryview(bytes(100)))])
    assert guard.flush(PATIENT)
    files.faults.append(Fault("write", errno.EIO, times=6))
    guard.drop(key(0)[:16])
    assert guard.flush(PATIENT)
    assert guard.stats().num_errors > 0
    guard.close()
    assert left_on_disk(tmp_path, 0) == []


def test_what_could_not_be_cleared_when_it_was_evicted_is_dropped_later(tmp_path):
    files = FaultyFiles()
    with opened(tmp_path, room(1), files=files) as store:
        put(store, 0)
        files.faults.append(Fault("write", errno.EIO, times=3))  # clearing, writing, and clearing once more
        assert put(store, 1, tag=1) == 0
        store.drop(key(0)[:16])
    assert left_on_disk(tmp_path, 0, capacity=room(1)) == []


@pytest.mark.parametrize(("operation", "number", "skip"), [("open", errno.EMFILE, 2), ("read", errno.EIO, 1)])
def test_a_segment_that_could_not_be_read_for_a_moment_is_dropped_too(tmp_path, operation, number, skip):
    with opened(tmp_path) as store:
        put(store, 0)
    with opened(tmp_path, files=FaultyFiles(Fault(operation, number, skip=skip))) as store:
        assert (found(store, 0), store.stats().num_errors) == ([], 1)
        store.drop(key(0)[:16])
        assert num_bytes(tmp_path) < store.num_file_bytes + 1
        assert segments(tmp_path) == []
    assert left_on_disk(tmp_path, 0) == []


def test_a_segment_whose_file_could_not_be_removed_is_dropped_too(tmp_path):
    files = FaultyFiles()
    with opened(tmp_path, room(2, 5000), PAIR, files=files) as store:
        put(store, *range(4))
        files.faults.append(Fault("remove", errno.EIO))
        for number in range(10, 14):
            put(store, number, size=5000, tag=1)
        assert store.stats().num_errors > 0
        store.drop(key(0)[:16])
    assert left_on_disk(tmp_path, *range(4), capacity=room(2, 5000), format=PAIR) == []


@pytest.mark.parametrize("operation", ["remove", "write"])
def test_a_drop_tells_as_long_as_it_would_not_last(tmp_path, operation):
    """A file that cannot be read nor removed, and records that cannot be written."""
    with opened(tmp_path) as store:
        put(store, 0)
    files = FaultyFiles(*([Fault("open", errno.EMFILE, skip=2)] if operation == "remove" else []))
    with opened(tmp_path, files=files) as store:
        files.faults.append(Fault(operation, errno.EIO, times=1000))
        for _ in range(3):
            with pytest.raises(TransferError, match="would be there again later"):
                store.drop(key(0)[:16])
        files.faults.clear()
        store.drop(key(0)[:16])
    assert left_on_disk(tmp_path, 0) == []


@pytest.mark.parametrize("seed", range(20))
def test_what_was_evicted_before_a_drop_does_not_come_back_after_a_loss_of_power(tmp_path, seed):
    files = FaultyFiles()
    store = opened(tmp_path, room(2), files=files)
    put(store, 0, 1)
    store._space.sync(store._space.segments.values())
    put(store, 2, 3, tag=1)
    store.drop(key(0)[:16])
    files.cut_power(Random(seed))
    files.bury()
    assert left_on_disk(tmp_path, 0, 1, capacity=room(2)) == []


def test_records_that_are_made_anew_keep_what_is_held(tmp_path):
    files = FaultyFiles()
    with opened(tmp_path, files=files) as store:
        put(store, 0, 1, 2)
        put(store, 3, 4, tag=1)
        files.faults.append(Fault("write", errno.EIO))
        store.drop(key(0)[:16])
        put(store, 5, tag=1)
    with opened(tmp_path) as store:
        assert found(store, 0, 1, 2) == []
        assert found(store, 3, 4, 5, tag=1) == [3, 4, 5]
        assert store.stats().num_corrupt == 0
