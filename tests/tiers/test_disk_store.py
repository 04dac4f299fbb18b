"""The disk store against a dict, over restarts: bounded, in order of use, of one format, in one hand."""

import mmap
import multiprocessing
import os
import stat
from collections import OrderedDict
from tempfile import TemporaryDirectory

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.tiers.disks import PAGES, PAIR, TINY, contents, entry, found, key, num_bytes, opened, put, room, segments

from kvist.errors import ArgumentError, ConfigError
from kvist.testing.faulty_files import FaultyFiles
from kvist.tiers.disk import checksums
from kvist.tiers.disk.directory import overhead_bytes
from kvist.tiers.disk.files import Files
from kvist.tiers.disk.segments import Geometry
from kvist.tiers.protocol import Store, StoreFormat

NUMBERS = st.integers(0, 11)
BATCHES = st.lists(NUMBERS, min_size=1, max_size=5, unique=True)


def test_it_is_a_store(tmp_path):
    with opened(tmp_path) as store:
        assert isinstance(store, Store)


@pytest.mark.parametrize("io", ["buffered", "direct"])
@pytest.mark.parametrize(("format", "size"), [(TINY, 100), (PAGES, 4096), (PAIR, 5000)])
def test_what_was_put_is_found_now_and_after_a_restart(tmp_path, format, size, io):
    with opened(tmp_path, format=format, io=io) as store:
        assert put(store, 1, 2, 3, size=size) == 3
        assert found(store, 1, 2, 3, 4, size=size) == [1, 2, 3]
    with opened(tmp_path, format=format, io=io) as store:
        assert store.contains([key(1), key(4)]) == [True, False]
        assert found(store, 4, 3, 2, 1, size=size) == [3, 2, 1]
        assert store.stats().num_bytes == 3 * size


@pytest.mark.parametrize("now", ["buffered", "direct"])
def test_a_directory_written_in_one_way_is_read_in_the_other(tmp_path, now):
    with opened(tmp_path, format=PAGES, io="direct" if now == "buffered" else "buffered") as store:
        put(store, 1, 2, size=4096)
    with opened(tmp_path, format=PAGES, io=now) as store:
        assert found(store, 1, 2, size=4096) == [1, 2]


def test_recovered_blocks_count_toward_the_capacity(tmp_path):
    with opened(tmp_path, room(4)) as store:
        put(store, 0, 1, 2, 3)
    with opened(tmp_path, room(4)) as store:
        put(store, 4, 5)
        stats = store.stats()
        assert (stats.num_entries, stats.num_evicted) == (4, 2)
        assert num_bytes(tmp_path) <= store.num_file_bytes <= room(4)


def test_the_least_recently_used_goes_first_also_after_a_restart(tmp_path):
    with opened(tmp_path, room(4)) as store:
        for number in range(4):
            put(store, number)
        assert found(store, 0) == [0]
    with opened(tmp_path, room(4)) as store:
        put(store, 4, 5)
        assert store.contains([key(number) for number in range(6)]) == [True, False, False, True, True, True]


def test_the_order_of_puts_survives_a_crash(tmp_path):
    files = FaultyFiles()
    store = opened(tmp_path, room(3), files=files)
    for number in (2, 0, 1):
        put(store, number)
    files.bury()
    with opened(tmp_path, room(3)) as store:
        put(store, 3)
        assert store.contains([key(number) for number in range(4)]) == [True, True, False, True]


def test_of_one_prefix_the_end_goes_first(tmp_path):
    with opened(tmp_path, room(4)) as store:
        put(store, 0, 1, 2, 3)
        put(store, 4)
        assert store.contains([key(number) for number in range(5)]) == [True, True, True, False, True]
        found(store, 4)
        found(store, 0, 1, 2)
        put(store, 5, 6)
        assert store.contains([key(number) for number in (0, 1, 2, 5)]) == [True, True, False, True]


def test_a_put_evicts_none_of_its_own_and_refuses_what_follows(tmp_path):
    with opened(tmp_path, room(4)) as store:
        put(store, 9, 3)
        assert put(store, 0, 1, 2, 3, 4, 5) == 4
        assert store.contains([key(number) for number in range(6)]) == [True, True, True, True, False, False]
        assert store.stats().num_refused == 2


def test_putting_again_is_a_use_and_writes_nothing(tmp_path):
    with opened(tmp_path, room(2)) as store:
        put(store, 0)
        put(store, 1)
        assert put(store, 0) == 1
        assert store.stats().num_put == 2
        put(store, 2)
        assert found(store, 0, 1, 2) == [0, 2]


def test_a_key_twice_in_one_call_is_kept_once(tmp_path):
    with opened(tmp_path) as store:
        assert put(store, 1, 1) == 2
        assert found(store, 1, 1) == [1, 1]
        assert store.stats().num_entries == 1


def test_one_size_of_blocks_takes_room_from_another_that_is_used_less(tmp_path):
    capacity = 8192 + 4 * Geometry(0, 5000, 1).num_bytes
    with opened(tmp_path, capacity, PAIR) as store:
        for number in range(40):
            put(store, number, size=100)
        assert put(store, 50, 51, size=5000) == 2
        assert found(store, 50, 51, size=5000) == [50, 51]
        assert num_bytes(tmp_path) <= capacity
        for number in range(100, 140):
            assert put(store, number, size=100) == 1
            assert found(store, number, size=100) == [number]


def test_a_smaller_capacity_keeps_what_was_used_last(tmp_path):
    with opened(tmp_path, room(8)) as store:
        for number in range(8):
            put(store, number)
    with opened(tmp_path, room(4)) as store:
        assert num_bytes(tmp_path) <= room(4)
        assert 0 < store.stats().num_entries == 8 - store.stats().num_evicted < 8
        assert store.contains([key(7), key(0)]) == [True, False]


def test_drop_takes_one_namespace_and_stays_done(tmp_path):
    with opened(tmp_path) as store:
        put(store, 1, 2, tag=1)
        put(store, 1, 3, tag=2)
        store.drop(bytes([1]) * 16)
        assert found(store, 1, 2, tag=1) == []
    with opened(tmp_path) as store:
        assert found(store, 1, 2, tag=1) == []
        assert found(store, 1, 3, tag=2) == [1, 3]
        store.drop(b"")
        assert store.stats().num_entries == 0


def test_a_closed_store_finds_and_keeps_nothing_and_its_directory_is_free(tmp_path):
    store = opened(tmp_path)
    put(store, 1)
    store.close()
    store.close()
    assert put(store, 2) == 0
    assert found(store, 1) == []
    assert store.contains([key(1)]) == [False]
    store.drop(b"")
    with opened(tmp_path) as again:
        assert found(again, 1, 2) == [1]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (StoreFormat("another model", 2, (100,)), "another model"),
        (StoreFormat("a model", 4, (100,)), '"block_size": 4'),
        (StoreFormat("a model", 2, (100, 100)), "[100, 100]"),
        (StoreFormat("a model", 2, (100,), ({"dtype": "float16"},)), "float16"),
        (StoreFormat("a model", 2, (100,), version=2), '"kvist": 2'),
    ],
)
def test_a_directory_of_another_format_is_refused_and_left_as_it_is(tmp_path, other, named):
    with opened(tmp_path) as store:
        put(store, 1)
    with pytest.raises(ConfigError, match="give another directory") as refused:
        opened(tmp_path, format=other)
    assert named in str(refused.value)
    assert TINY.describe()[1:10] in str(refused.value).replace(" ", "")
    with opened(tmp_path) as store:
        assert found(store, 1) == [1]


def test_a_directory_that_is_no_store_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=r"neither empty nor a store \(it holds 'thesis.txt'\)"):
        opened(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(ConfigError, match="cannot be a store's directory"):
        opened(tmp_path / "thesis.txt")


@pytest.mark.parametrize(
    ("options", "named"),
    [({"capacity": 8192}, "one block of each group takes"), ({"io": "fast"}, "must be 'buffered' or 'direct'")],
)
def test_wrong_settings_are_refused_before_anything_is_made(tmp_path, options, named):
    with pytest.raises(ConfigError, match=named):
        opened(tmp_path / "store", **options)
    assert not (tmp_path / "store").exists()


def test_keys_and_contents_that_are_of_no_block_are_refused(tmp_path):
    with opened(tmp_path) as store:
        with pytest.raises(ArgumentError, match="a key of 16 bytes"):
            store.put([entry(1), (bytes(16), memoryview(bytes(100)))])
        with pytest.raises(ArgumentError, match="contents of 99 bytes, but blocks of this format have 100"):
            store.put([entry(1), (key(2), memoryview(bytes(99)))])
        with pytest.raises(ArgumentError, match="1 keys, but 0 buffers"):
            store.get([key(1)], [])
        assert store.stats().num_entries == 0


def test_a_buffer_of_another_length_is_a_miss(tmp_path):
    with opened(tmp_path) as store:
        put(store, 1)
        assert store.get([key(1)], [memoryview(bytearray(99))]) == [False]


def test_only_the_owner_can_read_what_is_written(tmp_path):
    (tmp_path / "store").mkdir(mode=0o755)
    with opened(tmp_path / "store") as store:
        put(store, 1)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "store").iterdir()}
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_one_directory_has_one_store_at_a_time_in_this_process_too(tmp_path):
    with opened(tmp_path) as store:
        with pytest.raises(ConfigError, match=f"in use by a store of process {os.getpid()}; close that"):
            opened(tmp_path)
        assert put(store, 1) == 1
    with opened(tmp_path) as store:
        assert found(store, 1) == [1]


def test_a_forked_process_has_no_share_in_the_store(tmp_path):
    with opened(tmp_path) as store:
        put(store, 1)
        child = os.fork()
        if not child:
            silent = put(store, 2) == 0 and found(store, 1) == []
            store.close()
            os._exit(0 if silent else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert found(store, 1, 2) == [1]


def test_another_process_is_refused_with_the_owner_named(tmp_path):
    with opened(tmp_path) as store:
        put(store, 1)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            told = pool.apply(_refusal, (str(tmp_path),))
    assert f"in use by a store of process {os.getpid()}" in told


def _refusal(directory):
    try:
        opened(directory).close()
    except ConfigError as error:
        return str(error)
    return "opened"


def test_without_xxhash_a_directory_gets_crc32_and_one_with_xxh3_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("xxhash")
    with opened(tmp_path / "xxh3") as store:
        put(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr(checksums, "_xxh3", lambda: None)
        with opened(tmp_path / "crc32") as store:
            put(store, 1)
            assert found(store, 1) == [1]
        with pytest.raises(ConfigError, match=r"pip install 'kvist\[disk\]'"):
            opened(tmp_path / "xxh3")
    with opened(tmp_path / "crc32") as store:
        assert found(store, 1) == [1]


@pytest.mark.parametrize("refused", ["open", "write"])
def test_where_direct_io_is_not_possible_it_goes_through_the_page_cache(tmp_path, refused):
    class NoDirect(Files):
        direct = None

        def open(self, name, *, direct=False):
            if direct and refused == "open":
                raise OSError(22, "no direct I/O here")
            file = super().open(name)
            self.direct = file if direct else self.direct
            return file

        def write(self, file, buffers, offset):
            if file == self.direct:
                raise OSError(22, "no direct I/O here")
            return super().write(file, buffers, offset)

        def close(self, file):
            self.direct = None if file == self.direct else self.direct
            super().close(file)

    files = NoDirect()
    with opened(tmp_path, io="direct", files=files) as store:
        assert files.direct is None
        assert not store.is_direct
        assert put(store, 1) == 1
        assert found(store, 1) == [1]


@pytest.mark.parametrize("num_layers", [1, 40, 120])
def test_a_long_format_counts_toward_the_capacity(tmp_path, num_layers):
    layers = tuple({"kind": "full", "dtype": "torch.float32", "name": f"layer {n}" * 20} for n in range(num_layers))
    format = StoreFormat("a model", block_size=2, block_bytes=(100,), layers=layers)
    least = overhead_bytes(format) + Geometry(0, 100, 1).num_bytes
    with pytest.raises(ConfigError, match=f"takes {least}"):
        opened(tmp_path, least - 1, format)
    with opened(tmp_path, least, format) as store:
        put(store, 1)
        put(store, 2)
        assert found(store, 1, 2) == [2]
        allocated = sum(4096 * -(-path.stat().st_size // 4096) for path in tmp_path.iterdir())
        assert allocated == store.num_file_bytes == least


def test_files_hold_keys_and_contents_and_nothing_else_of_the_caller(tmp_path):
    with opened(tmp_path) as store:
        put(store, 1)
    text = b"".join(path.read_bytes() for path in sorted(tmp_path.iterdir()))
    assert key(1) in text
    assert contents(1) in text
    assert {path.name for path in tmp_path.iterdir()} == {"format", "lock", segments(tmp_path)[0].name}


class DiskMachine(RuleBasedStateMachine):
    """A store of room for few blocks beside a dict in order of use; both must hold the same, and in the same order."""

    CAPACITY = 5

    def __init__(self):
        super().__init__()
        self.folder = TemporaryDirectory()
        self.store = opened(self.folder.name, room(self.CAPACITY))
        self.model = OrderedDict()

    @rule(numbers=BATCHES, tag=st.integers(0, 1))
    def put(self, numbers, tag):
        assert put(self.store, *numbers, tag=tag) == len(numbers)
        missing = [number for number in numbers if (number, tag) not in self.model]
        for number in numbers:
            if number not in missing:
                self.model.move_to_end((number, tag))
        others = [name for name in self.model if name not in {(number, tag) for number in numbers}]
        num_evicted = max(0, len(self.model) + len(missing) - self.CAPACITY)
        for name in others[:num_evicted]:
            del self.model[name]
        for number in reversed(numbers):
            self.model[number, tag] = True
            self.model.move_to_end((number, tag))

    @rule(numbers=BATCHES, tag=st.integers(0, 1))
    def get(self, numbers, tag):
        assert found(self.store, *numbers, tag=tag) == [number for number in numbers if (number, tag) in self.model]
        for number in reversed(numbers):
            if (number, tag) in self.model:
                self.model.move_to_end((number, tag))

    @rule(tag=st.integers(0, 1))
    def drop(self, tag):
        self.store.drop(bytes([tag]) * 16)
        self.model = OrderedDict((name, True) for name in self.model if name[1] != tag)

    @rule()
    def reopen(self):
        self.store.close()
        self.store = opened(self.folder.name, room(self.CAPACITY))

    @invariant()
    def both_hold_the_same(self):
        names = [(number, tag) for number in range(12) for tag in range(2)]
        there = self.store.contains([key(number, tag) for number, tag in names])
        assert [name for name, answer in zip(names, there, strict=True) if answer] == sorted(self.model)
        stats = self.store.stats()
        assert (stats.num_entries, stats.num_bytes) == (len(self.model), 100 * len(self.model))
        assert (stats.num_corrupt, stats.num_errors) == (0, 0)
        assert num_bytes(self.folder.name) <= self.store.num_file_bytes <= room(self.CAPACITY)

    def teardown(self):
        self.store.close()
        self.folder.cleanup()


TestDiskMachine = DiskMachine.TestCase


@pytest.mark.parametrize("shift", [0, 1, 512])
def test_direct_io_takes_memory_at_page_boundaries_as_it_is_and_copies_from_and_to_any_other(tmp_path, shift):
    memory = memoryview(mmap.mmap(-1, 4 * 4096))
    source, target = memory[shift : shift + 4096], memory[8192 + shift : 8192 + shift + 4096]
    source[:] = contents(1, 4096)
    with opened(tmp_path, format=PAGES, io="direct") as store:
        assert store.put([(key(1), source)]) == 1
        assert store.get([key(1)], [target]) == [True]
        assert (target, store.stats().num_errors) == (contents(1, 4096), 0)
