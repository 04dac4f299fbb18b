"""Whatever is done to the files of a disk store, or fails while it uses them, is a miss and a counter, nothing else."""

import errno
import os
from random import Random

import pytest
from tests.tiers.disks import PAGES, TINY, contents, found, key, num_bytes, opened, put, room, segments

from kvist.errors import ConfigError, TransferError
from kvist.testing.faulty_files import Fault, FaultyFiles
from kvist.tiers.disk.segments import Geometry

GEOMETRY = Geometry(0, 100, 3)
CAPACITY = 8192 + 4 * GEOMETRY.num_bytes


def filled(directory, **options):
    """A closed store of one segment with the contents 0, 1 and 2 in its slots of these numbers."""
    with opened(directory, CAPACITY, **options) as store:
        put(store, 0, 1, 2)
    (path,) = segments(directory)
    return path


def flip(path, offset, bit=1):
    data = bytearray(path.read_bytes())
    data[offset] ^= bit
    path.write_bytes(data)


def reopened(directory):
    return opened(directory, CAPACITY)


def use_all(store):
    """Read all three, put them again, and read them again."""
    before = found(store, 0, 1, 2)
    assert put(store, 0, 1, 2) == 3
    assert found(store, 0, 1, 2) == [0, 1, 2]
    return before


def test_the_segment_is_as_these_tests_think(tmp_path):
    assert filled(tmp_path).name == GEOMETRY.name


@pytest.mark.parametrize("offset", [0, 8, 9, 24, 40, 41, 72, 73, 80, 81, 88, 89, 127])
def test_a_flipped_bit_of_a_record_loses_that_entry_only(tmp_path, offset):
    flip(filled(tmp_path), 128 + offset)
    with reopened(tmp_path) as store:
        assert store.contains([key(0), key(1), key(2)]) == [True, False, True]
        assert use_all(store) == [0, 2]


@pytest.mark.parametrize("offset", [0, 1, 50, 99])
@pytest.mark.parametrize("io", ["buffered", "direct"])
def test_a_flipped_bit_of_contents_is_a_miss_and_counted(tmp_path, offset, io):
    flip(filled(tmp_path), GEOMETRY.slot_offset(1) + offset, 128)
    with opened(tmp_path, CAPACITY, io=io) as store:
        assert found(store, 0, 1, 2) == [0, 2]
        assert store.stats().num_corrupt == 1
        assert not store.contains([key(1)])[0]
        assert found(store, 0, 1, 2) == [0, 2]
        assert store.stats().num_corrupt == 1
        assert put(store, 1) == 1
    with reopened(tmp_path) as store:
        assert found(store, 0, 1, 2) == [0, 1, 2]


def test_a_flipped_bit_of_padding_or_of_the_order_of_use_loses_nothing(tmp_path):
    path = filled(tmp_path)
    for offset in [GEOMETRY.slot_offset(1) + 100, *(GEOMETRY.stamps_offset + 8 * slot + 7 for slot in range(3))]:
        flip(path, offset, 0x80)
    with reopened(tmp_path) as store:
        assert use_all(store) == [0, 1, 2]


def test_any_flipped_bit_of_the_format_file_is_mended_without_loss(tmp_path):
    filled(tmp_path)
    path = tmp_path / "format"
    whole = path.read_bytes()
    for offset in range(0, len(whole), 7):
        flip(path, offset)
        with reopened(tmp_path) as store:
            assert found(store, 0, 1, 2) == [0, 1, 2]
        assert path.read_bytes() == whole


@pytest.mark.parametrize("name", ["format", "lock"])
@pytest.mark.parametrize("how", ["unlink", "empty"])
def test_without_its_small_files_a_directory_still_has_its_contents(tmp_path, name, how):
    filled(tmp_path)
    if how == "unlink":
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(b"")
    with reopened(tmp_path) as store:
        assert use_all(store) == [0, 1, 2]


def test_without_the_format_file_contents_of_another_format_are_not_found(tmp_path):
    filled(tmp_path)
    (tmp_path / "format").unlink()
    with opened(tmp_path, format=type(TINY)("another model", 2, (100,))) as store:
        assert found(store, 0, 1, 2) == []
        assert put(store, 1) == 1
    (tmp_path / "format").unlink()
    with opened(tmp_path, format=PAGES) as store:
        assert found(store, 1, size=4096) == []
        assert segments(tmp_path) == []


@pytest.mark.parametrize("length", [0, 1, 127, 128, 408, 4096, 4196, 8192, 8291, 8292, 12_388, 16_383])
def test_a_truncated_file_loses_what_was_cut_off(tmp_path, length):
    os.truncate(filled(tmp_path), length)
    left = [slot for slot in range(3) if GEOMETRY.slot_offset(slot) + 100 <= length]
    with reopened(tmp_path) as store:
        assert use_all(store) == left
    with reopened(tmp_path) as store:
        assert found(store, 0, 1, 2) == [0, 1, 2]


@pytest.mark.parametrize("length", [0, 1, 4196, 16_384 - 4097])
def test_a_file_that_is_truncated_while_in_use_loses_what_was_cut_off(tmp_path, length):
    path = filled(tmp_path)
    left = [slot for slot in range(3) if GEOMETRY.slot_offset(slot) + 100 <= length]
    with reopened(tmp_path) as store:
        os.truncate(path, length)
        assert use_all(store) == left
        assert store.stats().num_corrupt == 3 - len(left)


def test_an_unlinked_file_loses_its_contents_at_the_next_start_at_the_latest(tmp_path):
    path = filled(tmp_path)
    with reopened(tmp_path) as store:
        path.unlink()
        assert use_all(store) in ([], [0, 1, 2])
    with reopened(tmp_path) as store:
        assert found(store, 0, 1, 2) == []
        assert use_all(store) == []


@pytest.mark.parametrize("what", ["noise", "text", "zeros", "another segment"])
def test_a_foreign_file_in_place_of_a_segment_holds_nothing(tmp_path, what):
    path = filled(tmp_path)
    other = filled(tmp_path / "other", format=type(TINY)("another model", 2, (100,)))
    foreign = {"noise": Random(0).randbytes(16_384), "text": b"Dear diary, " * 900, "zeros": bytes(16_384)}
    path.write_bytes(foreign.get(what, other.read_bytes()))
    (tmp_path / "readme.txt").write_text("not ours")
    with reopened(tmp_path) as store:
        assert use_all(store) == []
    assert (tmp_path / "readme.txt").read_text() == "not ours"


def test_a_record_in_another_place_does_not_give_other_contents(tmp_path):
    path = filled(tmp_path)
    data = bytearray(path.read_bytes())
    data[0:128], data[128:256] = data[128:256], data[0:128]
    path.write_bytes(data)
    with reopened(tmp_path) as store:
        assert use_all(store) == [2]
        assert store.stats().num_corrupt == 2


def test_a_segment_that_is_there_twice_gives_each_entry_once_and_what_was_dropped_never_again(tmp_path):
    path = filled(tmp_path)
    path.with_name("00000009-100x3.blocks").write_bytes(path.read_bytes())
    with opened(tmp_path) as store:
        assert store.stats().num_entries == 3
        assert found(store, 0, 1, 2) == [0, 1, 2]
        store.drop(b"")
    with opened(tmp_path) as store:
        assert found(store, 0, 1, 2) == []


@pytest.mark.parametrize(
    "name", ["00000001-100x99999.blocks", "99999999-100x1.blocks", "00000001-100x9999999999.blocks"]
)
def test_names_that_promise_too_much_are_not_believed(tmp_path, name):
    filled(tmp_path)
    (tmp_path / name).write_bytes(b"")
    with reopened(tmp_path) as store:
        assert use_all(store) == [0, 1, 2]
        assert put(store, 3, 4) == 2
        assert num_bytes(tmp_path) <= CAPACITY


@pytest.mark.parametrize("kind", ["symbolic", "hard", "dangling", "folder", "pipe"])
@pytest.mark.parametrize("io", ["buffered", "direct"])
def test_links_out_of_the_directory_are_not_followed(tmp_path, kind, io):
    path, outside = filled(tmp_path / "store"), tmp_path / "outside"
    outside.write_bytes(path.read_bytes())
    before = outside.read_bytes()
    path.unlink()
    if kind == "hard":
        os.link(outside, path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(outside if kind == "symbolic" else tmp_path / "nowhere")
    with opened(tmp_path / "store", io=io) as store:
        assert use_all(store) == []
        assert store.stats().num_errors == 1
    assert outside.read_bytes() == before
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("name", ["lock", "format", "format.new"])
def test_links_in_place_of_the_small_files_are_not_followed(tmp_path, name):
    filled(tmp_path / "store")
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (tmp_path / "store" / name).unlink(missing_ok=True)
    (tmp_path / "store" / name).symlink_to(outside)
    if name == "lock":
        with pytest.raises(ConfigError, match="lock cannot be opened"):
            reopened(tmp_path / "store")
    else:
        with reopened(tmp_path / "store") as store:
            assert use_all(store) == [0, 1, 2]
    assert outside.read_text() == "mine"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_what_cannot_be_written_is_refused_and_counted(tmp_path, number):
    files = FaultyFiles()
    with opened(tmp_path, format=PAGES, files=files) as store:
        put(store, 0, size=4096)
        files.faults.append(Fault("write", number))
        assert put(store, 1, 2, size=4096) == 0
        assert (store.stats().num_errors, store.stats().num_refused) == (1, 2)
        assert found(store, 0, 1, 2, size=4096) == [0]
        assert put(store, 1, 2, size=4096) == 2
        assert found(store, 0, 1, 2, size=4096) == [0, 1, 2]
    with opened(tmp_path, format=PAGES) as store:
        assert found(store, 0, 1, 2, size=4096) == [0, 1, 2]


def test_a_full_file_system_makes_room_by_eviction(tmp_path):
    files = FaultyFiles()
    with opened(tmp_path, room(20), files=files) as store:
        put(store, 0, 1, 2)
        size = num_bytes(tmp_path)
        files.faults.append(Fault("allocate", errno.ENOSPC, times=1000))
        for number in range(3, 40):
            assert put(store, number) == 1
            assert found(store, number) == [number]
        assert store.stats().num_evicted > 20
        assert num_bytes(tmp_path) == size


def test_a_file_system_that_is_full_from_the_start_refuses(tmp_path):
    files = FaultyFiles(Fault("allocate", errno.ENOSPC, times=1000))
    with opened(tmp_path, files=files) as store:
        assert put(store, 1) == 0
        assert found(store, 1) == []
        assert segments(tmp_path) == []


def test_slots_that_cannot_be_written_are_not_tried_again(tmp_path):
    files = FaultyFiles()
    with opened(tmp_path, room(4), files=files) as store:
        put(store, 0)
        put(store, 1)
        for _ in range(2):
            files.faults.append(Fault("write", errno.EIO))
            assert put(store, 2) == 0
        assert put(store, 3) == 1
        assert found(store, 3) == [3]
        assert store.stats().num_evicted == 1


def test_what_cannot_be_read_is_a_miss_and_its_neighbours_are_not(tmp_path):
    files = FaultyFiles()
    with opened(tmp_path, format=PAGES, files=files) as store:
        put(store, 0, 1, 2, size=4096)
        files.faults.append(Fault("read", errno.EIO, times=3))  # all at once, then 0, then 1
        assert found(store, 0, 1, 2, size=4096) == [2]
        assert store.stats().num_errors == 2
        assert found(store, 0, 1, 2, size=4096) == [2]


@pytest.mark.parametrize("operation", ["open", "read"])
def test_a_segment_that_cannot_be_read_at_start_is_passed_over_and_counts_toward_the_capacity(tmp_path, operation):
    path = filled(tmp_path)
    before = path.read_bytes()
    files = FaultyFiles(Fault(operation, errno.EIO, skip=2 if operation == "open" else 1))
    with opened(tmp_path, CAPACITY, files=files) as store:
        assert store.stats().num_entries == 0
        assert (store.stats().num_errors, path.read_bytes()) == (1, before)
        for number in range(12):
            assert put(store, number) == 1
        assert store.stats().num_entries == 9
        assert num_bytes(tmp_path) <= CAPACITY


@pytest.mark.parametrize("short", [1, 99, 100, 4096, 5000])
def test_short_writes_and_reads_are_gone_on_with(tmp_path, short):
    faults = [Fault(operation, skip=skip, times=1, short=short) for operation in ("write", "read") for skip in range(4)]
    with opened(tmp_path, files=FaultyFiles(*faults)) as store:
        assert put(store, 0, 1, 2) == 3
        assert found(store, 0, 1, 2) == [0, 1, 2]
    with opened(tmp_path) as store:
        assert found(store, 0, 1, 2) == [0, 1, 2]


def test_a_write_that_gets_nowhere_is_refused(tmp_path):
    files = FaultyFiles()
    with opened(tmp_path, files=files) as store:
        files.faults.append(Fault("write", short=0))
        assert put(store, 1) == 0
        assert put(store, 1) == 1


@pytest.mark.parametrize("operation", ["write", "sync"])
def test_drop_tells_when_it_would_not_last(tmp_path, operation):
    files = FaultyFiles()
    with opened(tmp_path, files=files) as store:
        put(store, 0, 1)
        files.faults.append(Fault(operation, errno.EIO, times=2))
        with pytest.raises(TransferError, match="would be there again later"):
            store.drop(b"")
        assert found(store, 0, 1) == []


def test_a_store_grows_again_after_a_file_that_could_be_neither_filled_nor_removed(tmp_path):
    files = FaultyFiles()
    with opened(tmp_path, files=files) as store:
        files.faults += [Fault("allocate", errno.ENOSPC), Fault("remove", errno.EIO)]
        assert put(store, 1) == 0
        files.faults.clear()
        assert put(store, 1, 2) == 2
        assert store.num_file_bytes <= 1 << 20
    with opened(tmp_path) as store:
        assert found(store, 1, 2) == [1, 2]


@pytest.mark.parametrize("how", ["cannot be removed", "is a folder"])
def test_a_probe_that_is_in_the_way_means_no_direct_io_and_nothing_else(tmp_path, how):
    files = FaultyFiles()
    opened(tmp_path).close()
    if how == "is a folder":
        (tmp_path / "probe").mkdir()
    else:
        files.faults.append(Fault("remove", errno.EIO, times=2))
    with opened(tmp_path, io="direct", files=files) as store:
        assert not store.is_direct or how != "is a folder"
        assert put(store, 1) == 1
    opened(tmp_path).close()


def test_errors_while_the_order_of_use_is_written_are_counted_only(tmp_path):
    files = FaultyFiles()
    store = opened(tmp_path, files=files)
    put(store, 0, 1)
    files.faults.append(Fault("write", errno.EIO))
    store.close()
    assert store.stats().num_errors == 1
    with opened(tmp_path) as store:
        assert found(store, 0, 1) == [0, 1]


def test_an_error_at_every_single_call_never_gives_wrong_contents_and_never_raises(tmp_path):
    """Each call of a short life fails once; the store comes up afterwards whatever it was."""
    operations = ("write", "read", "open", "create", "allocate", "remove")
    for operation in operations:
        for skip in range(30):
            directory = tmp_path / f"{operation}{skip}"
            files = FaultyFiles(Fault(operation, errno.EIO, skip=skip))
            try:
                store = opened(directory, room(3), files=files)
            except ConfigError:
                continue
            with store:
                for number in range(6):
                    put(store, number, number + 1)
                    found(store, *range(8))
                assert store.stats().num_errors <= 2
            with opened(directory, room(3)) as store:
                found(store, *range(8))
                assert put(store, 1) == 1


def test_what_is_told_of_contents_does_not_depend_on_the_order_of_bytes(tmp_path):
    """Golden bytes: a change of these needs another version of the format."""
    path = filled(tmp_path)
    data = path.read_bytes()
    assert data[8] == 48
    assert data[9:57] == key(0)
    assert data[57:73] == bytes(16)
    assert data[81:89] == (3).to_bytes(8, "little")
    assert data[89:128] == bytes(39)
    assert data[GEOMETRY.slot_offset(0) :][:100] == contents(0)
