"""Whatever was done to what a store keeps, an entry is what was put there, or a miss; and the store goes on."""

import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.drawn import damaged
from tests.tiers.disks import TINY, contents, found, key, opened, put, segments
from tests.tiers.services import needs

from kvist.errors import KvistError
from kvist.tiers.disk.segments import Geometry
from kvist.tiers.envelope import Envelope

CAPACITY = 8192 + 4 * Geometry(0, 100, 3).num_bytes
NUMBERS = tuple(range(6))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The files of a closed store of six entries in two segments: names and bytes."""
    directory = tmp_path_factory.mktemp("whole") / "store"
    with opened(directory, CAPACITY) as store:
        put(store, *NUMBERS)
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@given(data=st.data())
def test_files_of_a_disk_store_that_were_changed_are_hits_of_what_is_left(tmp_path_factory, whole, data):
    directory = tmp_path_factory.mktemp("store")
    try:
        changed = write_changed(directory, whole, data)
        try:
            store = opened(directory, CAPACITY, io=data.draw(st.sampled_from(("buffered", "direct"))))
        except KvistError:
            return
        with store:
            found(store, *NUMBERS)
            assert put(store, *NUMBERS) == len(NUMBERS)
            assert found(store, *NUMBERS) == list(NUMBERS), changed
            store.drop(b"")
            assert found(store, *NUMBERS) == []
        assert sum(path.stat().st_size for path in segments(directory)) <= CAPACITY
    finally:
        shutil.rmtree(directory)


def write_changed(directory, whole, data):
    """Write the files, one to three of them changed; returns what was done."""
    files = dict(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(files)))
        other = data.draw(st.sampled_from(sorted(files)))
        what = data.draw(st.sampled_from(("damage", "damage", "damage", "sparse", "swap", "rename", "drop")))
        if what == "damage":
            files[name] = data.draw(damaged([files[name]]))
        elif what == "sparse":
            files[name] = flipped(files[name], data)
        elif what == "swap":
            files[name], files[other] = files[other], files[name]
        elif what == "rename":
            files[data.draw(st.sampled_from(NAMES))] = files[name]
        elif len(files) > 1:
            del files[name]
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return {name: content for name, content in files.items() if whole.get(name) != content}


def flipped(content, data):
    """Bytes with some bits flipped in the records at their beginning, where they say most."""
    changed = bytearray(content)
    for at in data.draw(st.lists(st.integers(0, 511), min_size=1, max_size=5)):
        if at < len(changed):
            changed[at] ^= 1 << data.draw(st.integers(0, 7))
    return bytes(changed)


NAMES = (
    "00000007-100x3.blocks",
    "00000000-100x3.blocks",
    "00000001-100x9999999999.blocks",
    "99999999-999999999999999x1.blocks",
    "00000001-1x1.blocks",
    "format",
    "lock",
    "format.new",
    "notes.txt",
    "00000001-100x3.blocks.bak",
)
ENVELOPE = Envelope(TINY)


@given(number=st.integers(0, 2), data=st.data())
def test_a_wrapped_entry_is_unwrapped_whole_or_not_at_all(number, data):
    sealed = [ENVELOPE.seal(key(each), memoryview(contents(each))) for each in range(3)]
    entry = data.draw(st.sampled_from(sealed) | damaged(sealed) | st.binary(max_size=300))
    buffer = bytearray(b"\xaa" * 100)
    if ENVELOPE.unseal(key(number), entry, memoryview(buffer)):
        assert entry == sealed[number]
        assert buffer == contents(number)
    else:
        assert entry != sealed[number]
        assert buffer == b"\xaa" * 100


needs("obstore")
needs("redis")

from kvist.tiers.objects import ObjectStore  # noqa: E402
from kvist.tiers.opening import open_store  # noqa: E402
from kvist.tiers.valkey import ValkeyStore  # noqa: E402


@given(data=st.data())
def test_an_object_that_was_changed_is_a_miss(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("bucket")
    store = ObjectStore(f"file://{directory}", TINY, timeout_s=60)
    try:
        assert put(store, 0, 1) == 2
        paths = sorted(path for path in directory.rglob("*") if path.is_file())
        before = paths[0].read_bytes()
        paths[0].write_bytes(data.draw(damaged([before, paths[1].read_bytes()])))
        is_same = paths[0].read_bytes() == before
        assert found(store, 0, 1) == ([0, 1] if is_same else [1])
        assert put(store, 0) == 1
        assert found(store, 0, 1) == [0, 1]
    finally:
        store.close()
        shutil.rmtree(directory)


class Answers:
    """Stands for a server that answers what a test wants, for each name the same to all commands."""

    def __init__(self, answers):
        self.answers, self.names = answers, []

    def ask(self, commands):
        asked = [name for _, name, *_ in commands]
        self.names = self.names or asked
        return [self.answers[self.names.index(name)] for name in asked]

    def close(self):
        pass


ANSWERS = st.none() | st.integers() | st.binary(max_size=300) | st.text(max_size=5) | st.lists(st.binary(max_size=3))


@given(data=st.data())
def test_whatever_a_server_answers_is_the_entry_or_a_miss(data):
    sealed = [ENVELOPE.seal(key(each), memoryview(contents(each))) for each in range(2)]
    answer = st.sampled_from(sealed) | damaged(sealed) | ANSWERS
    answers = [data.draw(answer), data.draw(answer)]
    store = ValkeyStore("valkey://localhost", TINY)
    store._connected = Answers(answers)
    assert found(store, 0, 1) == [number for number in range(2) if answers[number] == sealed[number]]


URLS = ("valkey://h", "redis://h:1/2", "s3://b/p", "az://c", "gs://b", "unix:///s")


@given(
    url=st.text(max_size=20)
    | st.builds(
        "".join,
        st.lists(
            st.sampled_from((*URLS, "?", "&", "ttl_s=1", "cluster=yes", "=", "%zz", ":", "[", "@", "\x00")), max_size=6
        ),
    )
)
def test_any_url_names_a_store_or_is_refused(url):
    try:
        store = open_store(url, TINY, timeout_s=0.01)
    except KvistError:
        return
    store.close()
