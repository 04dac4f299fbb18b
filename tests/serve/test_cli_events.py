"""The commands on events and journals."""

import json
from threading import Thread

import pytest
from tests.core.small import small
from typer.testing import CliRunner

from kvist.cli import app
from kvist.journal import Journal
from kvist.wire import Encoder, Recorder, vllm
from kvist.wire.records import AllCleared
from kvist.wire.zmq import ZmqPublisher


def invoke(*arguments, **settings):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **settings)


def recorded(num_prompts=3):
    """The events of a few prompts, in Kvist's own lines."""
    manager = small(block_size=4, num_blocks=8, event_buffer=1024)
    for start in range(0, 100 * num_prompts, 100):
        sequence = manager.add_sequence(range(start, start + 9))
        manager.commit([sequence])
        manager.free(sequence)
    return Encoder("kvist", Recorder())(manager.events.poll()).decode()


def test_events_are_converted_there_and_back(tmp_path):
    (tmp_path / "events.kvist").write_text(recorded())
    there = invoke("events", "convert", "kvist", "vllm", tmp_path / "events.kvist")
    assert there.exit_code == 0, there.output
    back = invoke("events", "convert", "vllm", "kvist", input=there.stdout)
    assert [json.loads(line)["event"] for line in back.stdout.splitlines()].count("stored") == 3


def test_an_unknown_format_is_an_error_on_one_line():
    result = invoke("events", "convert", "kvist", "morse", input=recorded())
    assert result.exit_code == 1
    assert "morse" in result.stderr
    assert "Traceback" not in result.output


def test_what_is_no_event_is_an_error_on_one_line():
    result = invoke("events", "convert", "kvist", "vllm", input="{]\n")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1


def test_the_index_says_what_each_worker_has(tmp_path):
    for name, num_prompts in (("a", 3), ("b", 1)):
        (tmp_path / f"{name}.kvist").write_text(recorded(num_prompts))
    result = invoke("events", "index", "kvist", tmp_path / "a.kvist", tmp_path / "b.kvist")
    told = {line["worker"]: line["blocks"] for line in map(json.loads, result.stdout.splitlines())}
    assert [told[name][0]["num_blocks"] for name in "ab"] == [6, 2]


def test_the_index_says_who_has_most_of_a_prompt(tmp_path):
    lines = recorded(1)
    (tmp_path / "a.kvist").write_text(lines)
    stored = next(line for line in map(json.loads, lines.splitlines()) if line["event"] == "stored")
    result = invoke("events", "index", "kvist", tmp_path / "a.kvist", "--query", ",".join(stored["hashes"]))
    assert json.loads(result.stdout)["num_blocks"] == 2
    assert invoke("events", "index", "kvist", tmp_path / "a.kvist", "--query", "xyz").exit_code == 2


def test_tail_prints_what_a_publisher_sends():
    publisher = ZmqPublisher("tcp://127.0.0.1:*")
    manager = small(block_size=4, num_blocks=8, event_buffer=1024)
    sequence = manager.add_sequence(range(9))
    manager.commit([sequence])
    batch = Encoder("vllm", Recorder(clock=lambda: 1.0))(manager.events.poll())
    found = []

    def tail():
        found.append(invoke("events", "tail", publisher.endpoint, "--to", "kvist", "--count", "1"))

    reader = Thread(target=tail)
    reader.start()
    while reader.is_alive():  # a subscriber hears what is sent once it is known
        publisher.publish(batch)
        reader.join(0.05)
    publisher.close()
    assert [json.loads(line)["event"] for line in found[0].stdout.splitlines()][-1] == "stored"


def test_tail_says_what_is_no_event_and_goes_on():
    with ZmqPublisher("tcp://127.0.0.1:*") as publisher:
        found, cleared = [], vllm.encode([AllCleared()])

        def tail():
            found.append(invoke("events", "tail", publisher.endpoint, "--to", "kvist", "--count", "4"))

        reader = Thread(target=tail)
        reader.start()
        while reader.is_alive():
            for each in (b"\xc1", cleared):
                publisher.publish(each)
            reader.join(0.05)
    assert found[0].exit_code == 0
    assert [json.loads(line)["event"] for line in found[0].stdout.splitlines()] == ["cleared"] * 2
    assert found[0].stderr.count("kvist: payload: expected MessagePack") == 2


@pytest.fixture
def journal(tmp_path):
    manager, path = small(block_size=4), tmp_path / "calls.journal"
    kept = Journal(path)
    kept.attach(manager)
    sequence = manager.add_sequence(range(9))
    manager.commit([sequence])
    manager.free(sequence)
    kept.close()
    return path


def test_a_journal_is_replayed(journal):
    told = json.loads(invoke("replay", journal, "--json").stdout)
    assert (told["problem"], told["num_calls"]) == (None, 4)
    stopped = invoke("replay", journal, "--stop-at", "2", "--state")
    assert stopped.exit_code == 0
    assert "1 sequences run" in stopped.stdout


def test_what_is_no_journal_is_an_error_on_one_line(tmp_path):
    (tmp_path / "other").write_text("nothing\n")
    result = invoke("replay", tmp_path / "other")
    assert result.exit_code == 1
    assert result.stderr.startswith("kvist: ")
