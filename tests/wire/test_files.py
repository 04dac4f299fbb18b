"""JSON lines in files and pipes: whole batches, rotation, readers that die or stall, ends."""

import json
import os
import select
import sys

import pytest
from tests.wire.listed import PATIENT, ListedSource, cleared, wait_until

from kvist import ArgumentError
from kvist.wire.files import FilePublisher
from kvist.wire.publishing import Feed

posix = pytest.mark.skipif(sys.platform == "win32", reason="there are no named pipes")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


@pytest.fixture
def pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def lines(path):
    return path.read_text().splitlines()


def written(publisher, *batches):
    """Publish one batch after the other, each when the one before is out."""
    for batch in batches:
        done = publisher.stats().num_published + publisher.stats().num_dropped
        publisher.publish(batch)
        wait_until(lambda done=done: publisher.stats().num_published + publisher.stats().num_dropped > done)


def test_batches_are_lines_and_are_there_at_once(path):
    with FilePublisher(path) as publisher:
        written(publisher, b'{"id":0}\n{"id":1}\n')
        assert lines(path) == ['{"id":0}', '{"id":1}']
        written(publisher, b'{"id":2}')
        assert path.read_bytes().endswith(b'{"id":2}\n')


def test_events_of_a_source_are_written_until_the_end(path):
    source = ListedSource(*cleared(0, 1))

    def encode(events):
        return b"".join(json.dumps({"id": event.id}).encode() + b"\n" for event in events)

    with FilePublisher(path) as publisher, Feed(source, encode, publisher):
        wait_until(lambda: publisher.stats().num_published == 1)
        source.add(*cleared(2, 3))
    assert [json.loads(line)["id"] for line in lines(path)] == [0, 1, 2, 3]


def test_a_file_that_is_there_is_continued(path):
    for number in range(2):
        with FilePublisher(path) as publisher:
            publisher.publish(b"%d" % number)
    assert lines(path) == ["0", "1"]


def test_after_a_line_that_was_cut_off_comes_a_new_one(path):
    path.write_bytes(b'{"id":0}\n{"i')
    with FilePublisher(path) as publisher:
        publisher.publish(b'{"id":1}')
    assert lines(path) == ['{"id":0}', '{"i', '{"id":1}']


def test_what_was_queued_before_the_end_is_written(path):
    publisher = FilePublisher(path)
    for number in range(5000):
        assert publisher.publish(b"%d" % number)
    assert publisher.close(PATIENT)
    assert lines(path) == [str(number) for number in range(5000)]
    assert not publisher.publish(b"late")
    assert publisher.stats().num_dropped == 1
    assert publisher.close()


def test_a_long_file_is_rotated_and_so_many_are_kept(path):
    with FilePublisher(path, rotate_bytes=8, num_kept=2) as publisher:
        written(publisher, *(b"%d\n" % number for number in range(10, 26)))
    kept = [lines(path.with_name(f"events.jsonl{end}")) for end in ("", ".1", ".2")]
    assert kept == [["24", "25"], ["22", "23"], ["20", "21"]]
    assert not path.with_name("events.jsonl.3").exists()


def test_a_batch_longer_than_a_file_may_be_has_one_of_its_own(path):
    with FilePublisher(path, rotate_bytes=4) as publisher:
        written(publisher, b"123456789", b"1")
    assert lines(path) == ["1"]
    assert lines(path.with_name("events.jsonl.1")) == ["123456789"]


@pytest.mark.parametrize("settings", [{"rotate_bytes": 0}, {"rotate_bytes": 9, "num_kept": 0}])
def test_limits_below_1_are_refused(path, settings):
    with pytest.raises(ArgumentError, match="at least 1"):
        FilePublisher(path, **settings)


def test_a_descriptor_is_not_rotated():
    with pytest.raises(ArgumentError, match="for paths only"):
        FilePublisher(1, rotate_bytes=9)


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        FilePublisher(tmp_path / "nowhere" / "events.jsonl")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk_costs_batches_and_nothing_else(caplog):
    with FilePublisher("/dev/full") as publisher:
        written(publisher, b"1", b"2")
        assert publisher.stats().num_errors == 2
        assert publisher.stats().num_dropped == 2
    assert caplog.text.count("could not be written") == 1


# -- pipes ------------------------------------------------------------------------------------------------------------


def readable(fd):
    assert select.select([fd], [], [], PATIENT)[0]
    return os.read(fd, 1 << 20)


@posix
def test_a_descriptor_is_written_to_and_stays_open():
    reader, writer = os.pipe()
    with FilePublisher(writer) as publisher:
        publisher.publish(b'{"id":0}')
        assert readable(reader) == b'{"id":0}\n'
    os.write(writer, b"open")
    assert readable(reader) == b"open"
    os.close(reader)
    os.close(writer)


@posix
def test_a_pipe_without_a_reader_costs_batches_until_there_is_one(pipe):
    with FilePublisher(pipe) as publisher:
        written(publisher, b"0", b"1")
        assert publisher.stats().num_dropped == 2
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        written(publisher, b"2")
        assert readable(reader) == b"2\n"
        os.close(reader)


@posix
def test_a_reader_that_dies_costs_batches_until_there_is_another(pipe):
    first = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with FilePublisher(pipe) as publisher:
        written(publisher, b"0")
        assert readable(first) == b"0\n"
        os.close(first)
        written(publisher, b"1", b"2")
        assert publisher.stats().num_dropped == 2
        second = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        written(publisher, b"3")
        assert readable(second) == b"3\n"
        os.close(second)


@posix
def test_a_descriptor_whose_reader_has_died_costs_batches():
    reader, writer = os.pipe()
    os.close(reader)
    with FilePublisher(writer) as publisher:
        written(publisher, b"0", b"1")
        assert publisher.stats().num_dropped == 2
    os.close(writer)


@posix
def test_a_reader_that_stalls_fills_the_queue_and_then_gets_whole_batches(pipe):
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    publisher = FilePublisher(pipe, max_queue_size=4)
    batch = b"x" * 9999
    for _ in range(200):
        publisher.publish(batch)
    wait_until(lambda: publisher.stats().num_waiting == 4)
    assert not publisher.publish(batch)
    num_dropped = publisher.stats().num_dropped
    taken = b""
    while taken.count(b"\n") < 201 - num_dropped:
        taken += readable(reader)
    assert set(taken.splitlines()) == {batch}
    assert publisher.stats().num_dropped == num_dropped
    assert publisher.close(PATIENT)
    os.close(reader)


@posix
def test_a_reader_that_never_reads_holds_an_end_up_until_its_limit_only(pipe):
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    publisher = FilePublisher(pipe)
    for _ in range(100):
        publisher.publish(b"x" * 9999)
    assert not publisher.close(0.05)
    wait_until(lambda: publisher.stats().num_waiting == 0)
    assert publisher.stats().num_dropped > 0
    os.close(reader)
