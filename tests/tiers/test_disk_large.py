"""Blocks that are moved in parts, and calls that two threads share: whole, checked and in order as small ones are."""

import errno
import mmap
import os
from collections import deque
from threading import Event, Thread, get_ident

import numpy as np
import pytest
from tests.tiers.disks import found, key, num_bytes, opened, put, room, segments

from kvist.testing.faulty_files import Crash, Fault, FaultyFiles
from kvist.tiers.disk import space
from kvist.tiers.disk.directory import overhead_bytes
from kvist.tiers.disk.runs import DIRECT_PART_BYTES, huge_page
from kvist.tiers.disk.segments import Geometry, neighbours
from kvist.tiers.disk.sharing import PART_BYTES, SHARED_BYTES, Helper
from kvist.tiers.protocol import StoreFormat

PADDED = 2 * PART_BYTES + 100
PAGED = 3 * PART_BYTES
VAST = DIRECT_PART_BYTES + PART_BYTES
VAST_PADDED = VAST + 100
QUARTER = SHARED_BYTES // 4


def format_of(size):
    return StoreFormat("a model", block_size=2, block_bytes=(size,))


@pytest.mark.parametrize("io", ["buffered", "direct"])
@pytest.mark.parametrize("size", [PADDED, PAGED, VAST, VAST_PADDED])
def test_blocks_larger_than_a_part_come_back_whole_now_and_after_a_restart(tmp_path, size, io):
    with opened(tmp_path, room(4, size), format_of(size), io=io) as store:
        assert put(store, 1, 2, 3, size=size) == 3
        assert found(store, 3, 1, 2, 4, size=size) == [3, 1, 2]
    with opened(tmp_path, room(4, size), format_of(size)) as store:
        assert found(store, 1, 2, 3, size=size) == [1, 2, 3]
        assert (store.stats().num_corrupt, store.stats().num_errors) == (0, 0)


@pytest.mark.parametrize("io", ["buffered", "direct"])
def test_a_large_block_that_is_written_later_leaves_its_neighbour_as_it_is(tmp_path, io):
    three_slots = 8192 + 4 * Geometry(0, PADDED, 3).num_bytes
    with opened(tmp_path, three_slots, format_of(PADDED), io=io) as store:
        put(store, 0, 1, 2, size=PADDED)
        store.drop(key(0))
        assert put(store, 3, size=PADDED) == 1  # in the slot before that of 1
        assert found(store, 1, 2, 3, size=PADDED) == [1, 2, 3]
        assert len(segments(tmp_path)) == 1


@pytest.mark.parametrize(
    ("io", "size", "offset"),
    [("buffered", PADDED, offset) for offset in (0, PART_BYTES - 1, PART_BYTES, 2 * PART_BYTES, PADDED - 1)]
    + [("direct", VAST_PADDED, offset) for offset in (0, DIRECT_PART_BYTES - 1, DIRECT_PART_BYTES, VAST_PADDED - 1)],
)
def test_a_flipped_bit_in_any_part_is_a_miss(tmp_path, io, size, offset):
    with opened(tmp_path, room(2, size), format_of(size), io=io) as store:
        put(store, 1, size=size)
    (path,) = segments(tmp_path)
    data = bytearray(path.read_bytes())
    data[Geometry.parse(path.name).slot_offset(0) + offset] ^= 1
    path.write_bytes(data)
    with opened(tmp_path, room(2, size), format_of(size), io=io) as store:
        assert found(store, 1, size=size) == []
        assert store.stats().num_corrupt == 1


@pytest.mark.parametrize("lost", [1, 4096, PART_BYTES, VAST])
@pytest.mark.parametrize("io", ["buffered", "direct"])
def test_a_block_whose_end_is_cut_off_while_the_store_is_open_is_a_miss(tmp_path, io, lost):
    with opened(tmp_path, room(2, VAST), format_of(VAST), io=io) as store:
        put(store, 1, size=VAST)
        (path,) = segments(tmp_path)
        os.truncate(path, Geometry.parse(path.name).slot_offset(0) + VAST - lost)
        assert found(store, 1, size=VAST) == []
        assert store.stats().num_corrupt == 1


@pytest.mark.parametrize(
    ("io", "size", "skip"),
    [("buffered", PADDED, skip) for skip in (0, 1, 2)] + [("direct", VAST_PADDED, skip) for skip in (0, 1)],
)
def test_a_part_that_cannot_be_written_or_read_is_that_block_only(tmp_path, io, size, skip):
    files = FaultyFiles()
    with opened(tmp_path, room(4, size), format_of(size), io=io, files=files) as store:
        files.faults.append(Fault("write", errno.EIO, skip=skip))
        assert put(store, 1, size=size) == 0
        assert found(store, 1, size=size) == []
        assert put(store, 1, size=size) == 1
        files.faults.append(Fault("read", errno.EIO, skip=skip))
        assert found(store, 1, size=size) == []
        assert store.stats().num_errors == 2


@pytest.mark.parametrize("refusal", [None, OSError(errno.EINVAL, "no huge pages")])
def test_direct_reads_and_writes_go_through_a_page_of_huge_alignment_or_small_ones(monkeypatch, refusal):
    class Pages(mmap.mmap):
        def madvise(self, *_):
            if refusal is not None:
                raise refusal

    monkeypatch.setattr(mmap, "mmap", Pages)
    page = huge_page()
    assert len(page) == DIRECT_PART_BYTES
    assert np.frombuffer(page, np.uint8).__array_interface__["data"][0] % DIRECT_PART_BYTES == 0


def bytes_of_segments(directory):
    return sum(path.stat().st_size for path in segments(directory))


def in_each_segment(store):
    """The numbers of the blocks in each segment."""
    (queue,) = store._space.queues.values()
    places = {}
    for entry in queue.values():
        places.setdefault(entry.segment.name, []).append(int.from_bytes(entry.key[16:], "big"))
    return sorted(sorted(each) for each in places.values())


def test_the_halves_of_a_call_are_in_two_segments_after_evictions_and_a_restart_as_well(tmp_path):
    size, capacity = QUARTER, room(32, QUARTER)
    with opened(tmp_path, capacity, format_of(size)) as store:
        put(store, *range(6), size=size)
        assert in_each_segment(store) == [[0, 1, 2], [3, 4, 5]]
    with opened(tmp_path, capacity, format_of(size)) as store:
        put(store, 6, 7, size=size)
        assert in_each_segment(store) == [[0, 1, 2, 6], [3, 4, 5, 7]]
        for first in range(8, 96, 8):
            put(store, *range(first, first + 8), size=size)
            last = [[number for number in each if number >= first] for each in in_each_segment(store)]
            assert sorted(len(each) for each in last if each) == [4, 4]
        num_kept = store.stats().num_entries
        assert num_kept < 96
        assert found(store, *range(96 - num_kept, 96), size=size) == list(range(96 - num_kept, 96))
        assert store.num_file_bytes == bytes_of_segments(tmp_path) + overhead_bytes(format_of(size)) <= capacity


def test_a_call_stays_in_few_stretches_however_often_others_were_evicted_for_one(tmp_path, monkeypatch):
    monkeypatch.setattr(space, "SHARED_BYTES", 1)
    monkeypatch.setattr(space, "PART_BYTES", 1)
    size, num_blocks = 4096, 128
    with opened(tmp_path, room(5 * num_blocks // 2, size), format_of(size)) as store:
        for first in range(0, 40 * num_blocks, num_blocks):
            assert put(store, *range(first, first + num_blocks), size=size) == num_blocks
            entries = [store._space.queues[size][key(number)] for number in range(first, first + num_blocks)]
            assert len(list(neighbours([entry.position for entry in entries]))) <= 8
            if first == 0:
                assert [len(each) for each in in_each_segment(store)] == [num_blocks // 2] * 2


def test_a_store_grows_by_one_segment_where_there_is_room_for_one_only(tmp_path):
    size = QUARTER
    files = FaultyFiles(Fault("allocate", errno.ENOSPC, skip=1, times=1000))
    with opened(tmp_path, room(32, size), format_of(size), files=files) as store:
        assert put(store, 0, 1, 2, size=size) == 3
        assert in_each_segment(store) == [[0, 1, 2]]
        assert put(store, *range(3, 20), size=size) < 17
        assert len(segments(tmp_path)) == 1
        assert store.num_file_bytes == bytes_of_segments(tmp_path) + overhead_bytes(format_of(size))


@pytest.mark.parametrize("io", ["buffered", "direct"])
def test_a_call_that_two_threads_share_keeps_and_finds_all_of_several_segments(tmp_path, io):
    size, capacity = QUARTER, room(8, QUARTER)
    with opened(tmp_path, capacity, format_of(size), io=io) as store:
        assert put(store, *range(8), size=size) == 8
        assert len(segments(tmp_path)) > 1
        assert found(store, *reversed(range(8)), size=size) == list(reversed(range(8)))
        assert put(store, *range(5, 12), size=size) == 7
        assert found(store, *range(4, 12), size=size) == [4, *range(5, 12)]
        assert num_bytes(tmp_path) <= capacity
    with opened(tmp_path, capacity, format_of(size)) as store:
        assert found(store, *range(4, 12), size=size) == list(range(4, 12))


def test_after_an_error_in_either_thread_a_put_keeps_the_first_and_none_after_the_one_that_failed(tmp_path):
    size = QUARTER
    for skip in range(0, 16, 3):
        files = FaultyFiles()
        with opened(tmp_path / str(skip), room(8, size), format_of(size), files=files) as store:
            files.faults.append(Fault("write", errno.EIO, skip=skip))
            num_there = put(store, *range(8), size=size)
            assert num_there < 8
            assert found(store, *range(8), size=size) == list(range(num_there))
            assert store.stats().num_errors == 1
            assert put(store, *range(num_there, 8), size=size) >= 1


def test_a_crash_in_either_thread_ends_the_call_and_leaves_nothing_half_written_to_be_found(tmp_path):
    size = QUARTER
    for skip in range(3, 20, 4):
        directory, files = tmp_path / str(skip), FaultyFiles()
        store = opened(directory, room(8, size), format_of(size), files=files)
        files.crash_at, files.torn = files.num_changes + skip, 0.5
        with pytest.raises(Crash):
            put(store, *range(8), size=size)
        files.bury()
        with opened(directory, room(8, size), format_of(size)) as store:
            assert len(found(store, *range(8), size=size)) == store.stats().num_entries
            assert store.stats().num_corrupt == 0


@pytest.fixture
def helper():
    helper = Helper()
    yield helper
    helper.close()


def test_two_threads_do_all_the_work_and_each_goes_on_with_what_the_other_has_left(helper):
    met, done = Event(), []

    def work(task):
        if task == "long":  # until the other thread has done everything else
            assert met.wait(30)
        done.append((task, get_ident()))
        if len(done) == 4:
            met.set()

    helper.work_off(deque(["long", 1, 2]), deque([3, 4]), work)
    assert {task for task, _ in done} == {"long", 1, 2, 3, 4}
    assert len({thread for _, thread in done}) == 2


@pytest.mark.parametrize("who", ["own", "others"])
def test_what_either_thread_raises_is_raised_and_what_is_left_is_not_begun(who, helper):
    both, failed, done = Event(), Event(), []

    def work(task):
        if task == who:
            assert both.wait(30)
            failed.set()
            raise KeyError(task)
        both.set()
        assert failed.wait(30)
        done.append(task)

    own, others = deque(["own", *range(1000)]), deque(["others", *range(1000)])
    with pytest.raises(KeyError, match=who):
        helper.work_off(own, others, work)
    assert not own
    assert not others
    assert len(done) < 1000


def test_where_no_thread_is_to_be_had_one_does_all(monkeypatch, helper):
    def start(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Thread, "start", start)
    done = []
    helper.work_off(deque([1, 2]), deque([3]), done.append)
    assert done == [1, 2, 3]


def test_help_that_has_not_begun_is_not_waited_for(helper):
    met, let_go, done = Event(), Event(), []

    def work(task):
        if task == "busy":
            met.set()
            assert let_go.wait(30)
        elif task == "first":
            assert met.wait(30)
        done.append(task)

    first = Thread(target=helper.work_off, args=(deque(["first"]), deque(["busy"]), work))
    first.start()
    assert met.wait(30)
    helper.work_off(deque([1, 2]), deque([3]), work)
    assert [task for task in done if task != "first"] == [1, 2, 3]
    let_go.set()
    first.join(30)
    assert sorted(map(str, done)) == ["1", "2", "3", "busy", "first"]
