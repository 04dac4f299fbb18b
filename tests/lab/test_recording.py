"""Recorded traces: the requests' shape, and nothing that tells what they said."""

import json
from itertools import count

import numpy as np
import pytest
from tests.core.small import small
from tests.lab.test_traces import served
from tests.lab.trace_files import mooncake, written
from tests.serve.models import tiny_model

from kvist.core.identity import Media
from kvist.errors import ArgumentError, NeverFits, SequenceError
from kvist.journal import Journal, replay
from kvist.lab.curves import lru_curve, references_of
from kvist.lab.recording import TraceRecorder, record
from kvist.lab.synthetic import WORKLOADS, SyntheticTrace
from kvist.lab.traces import Request, TokenPrompt, open_trace
from kvist.serve import Engine, SamplingParams, cache_config

SALT = bytes(range(32))


def ticking():
    return count().__next__


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_request_of_a_manager_is_a_line_of_hashes(tmp_path):
    manager = small(block_size=4, num_blocks=64)
    with TraceRecorder(tmp_path / "day.jsonl", block_size=4, clock=ticking()) as recorder:
        recorder.attach(manager)
        served(manager, list(range(1, 11)), num_output=3)
        served(manager, list(range(1, 7)))
    head, first, second = lines(tmp_path / "day.jsonl")
    assert head == {"kvist trace": 1, "block_size": 4}
    assert (first["t"], first["in"], first["out"], len(first["h"])) == (1, 10, 3, 4)
    assert (second["t"], second["in"], second["out"], len(second["h"])) == (2, 6, 0, 2)
    assert first["h"][0] == second["h"][0]
    assert first["h"][1] != second["h"][1]
    assert recorder.num_recorded == 2


def test_a_next_turn_begins_with_the_last_prompt_and_its_output(tmp_path):
    manager = small(block_size=4, num_blocks=64)
    with TraceRecorder(tmp_path / "day.jsonl", block_size=4) as recorder:
        recorder.attach(manager)
        served(manager, list(range(1, 7)), num_output=6)
        served(manager, [*range(1, 7), *range(900, 906), 50, 51])
    one, other = open_trace(tmp_path / "day.jsonl")
    both = [*one.prompt.tokens().tolist(), *one.output.tolist()]
    assert len(both) == 12
    assert other.prompt.tokens()[:12].tolist() == both


def test_nothing_of_the_text_is_in_the_file_and_hashes_of_two_recorders_have_nothing_in_common(tmp_path):
    request = Request(
        TokenPrompt(np.arange(31_000, 31_064, dtype=np.int32)), namespace=("tenant-green",), session="ann-7"
    )
    for name in ("one", "other"):
        assert record([request], tmp_path / name, block_size=16) == 1
    one, other = (path.read_text() for path in (tmp_path / "one", tmp_path / "other"))
    assert not any(told in one for told in ("green", "ann", "31000", "31001", "31063"))
    ours, theirs = (json.loads(text.splitlines()[1]) for text in (one, other))
    assert not set(ours["h"]) & set(theirs["h"])
    assert ours["ns"] != theirs["ns"]
    assert ours["s"] != theirs["s"]


def test_hashes_are_not_those_of_the_content_alone(tmp_path):
    """Who knows the text and the format, and not the salt, cannot tell whether a block is of it."""
    request = Request(TokenPrompt(np.arange(16, dtype=np.int32)))
    record([request], tmp_path / "one", block_size=16, salt=SALT)
    record([request], tmp_path / "other", block_size=16, salt=SALT[::-1])
    assert lines(tmp_path / "one")[1]["h"] != lines(tmp_path / "other")[1]["h"]
    assert SALT.hex() not in (tmp_path / "one").read_text()


def test_traces_with_the_same_salt_can_be_compared(tmp_path):
    request = Request(TokenPrompt(np.arange(40, dtype=np.int32)), namespace=("a",), session="s")
    for name in ("one", "other"):
        record([request], tmp_path / name, block_size=16, salt=SALT)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_namespaces_stay_apart_in_hashes_and_in_name(tmp_path):
    prompt = TokenPrompt(np.arange(32, dtype=np.int32))
    requests = [Request(prompt, namespace=space) for space in ((), ("a",), ("b",), ("a",), (1,), ("1",))]
    record(requests, tmp_path / "day", block_size=16)
    found = list(open_trace(tmp_path / "day"))
    firsts = [request.prompt.hash_ids[0] for request in found]
    assert len(set(firsts)) == 5
    assert firsts[1] == firsts[3]
    assert len({request.namespace for request in found}) == 5
    assert found[0].namespace == ()


def test_images_that_differ_are_told_apart(tmp_path):
    manager = small(block_size=4, num_blocks=64)
    with TraceRecorder(tmp_path / "day", block_size=4) as recorder:
        recorder.attach(manager)
        for key in ("cat", "dog", "cat"):
            sequence = manager.add_sequence(list(range(1, 10)), media=[Media(4, 3, key)])
            manager.commit([sequence])
            manager.free(sequence)
    one, other, same = lines(tmp_path / "day")[1:]
    assert one["h"] == same["h"]
    assert one["h"][0] == other["h"][0]
    assert one["h"][1] != other["h"][1]


def test_a_trace_that_is_recorded_hits_as_the_original(tmp_path):
    trace = SyntheticTrace(WORKLOADS["mixed"], 300, seed=1, block_size=16)
    record(trace, tmp_path / "day.jsonl.zst")
    again = open_trace(tmp_path / "day.jsonl.zst")
    assert (again.kind, again.block_size) == ("kvist", 16)
    sizes = [100, 1000, 10_000]
    one, other = (lru_curve(references_of(each), sizes).hit_rate.tolist() for each in (trace, again))
    assert one == other
    assert [r.arrival_s for r in again] == [r.arrival_s for r in trace]


def test_a_manager_can_be_recorded_when_it_is_warm_and_goes_on_after(tmp_path):
    manager = small(block_size=4, num_blocks=64)
    served(manager, list(range(1, 13)))
    running = manager.add_sequence(list(range(1, 9)))
    with TraceRecorder(tmp_path / "day", block_size=4) as recorder:
        recorder.attach(manager)
        manager.free(running)  # came before
        sequence = manager.add_sequence(list(range(1, 13)))
        assert sequence.num_cached_tokens == 11
    assert [line["in"] for line in lines(tmp_path / "day")[1:]] == [12]
    manager.free(sequence)
    assert not {"add_sequence", "free"} & vars(manager).keys()
    manager.check()


def test_a_suspended_request_is_recorded_with_all_its_tokens(tmp_path):
    manager = small(block_size=4, num_blocks=64)
    with TraceRecorder(tmp_path / "day", block_size=4) as recorder:
        recorder.attach(manager)
        sequence = manager.add_sequence(list(range(1, 8)))
        manager.commit([sequence])
        manager.append([sequence], np.array([9], np.int32))
        manager.suspend(sequence)
    assert [(line["in"], line["out"]) for line in lines(tmp_path / "day")[1:]] == [(7, 1)]


def test_a_call_that_raises_records_nothing(tmp_path):
    manager = small(block_size=4, num_blocks=4)
    with TraceRecorder(tmp_path / "day", block_size=4) as recorder:
        recorder.attach(manager)
        with pytest.raises(NeverFits):
            manager.add_sequence(list(range(1, 100)))
        served(manager, [1, 2, 3])
        sequence = manager.add_sequence([1, 2, 3])
        manager.free(sequence)
        with pytest.raises(SequenceError):
            manager.free(sequence)
    assert len(lines(tmp_path / "day")) == 3


def test_a_full_disk_ends_the_recording_and_not_the_requests(tmp_path, caplog):
    manager = small(block_size=4, num_blocks=64)
    recorder = TraceRecorder(tmp_path / "day", block_size=4)
    recorder.attach(manager)

    class Full:
        def write(self, _):
            raise OSError(28, "No space left on device")

    recorder._file = Full()
    for _ in range(3):
        served(manager, [1, 2, 3])
    assert (recorder.num_recorded, recorder.num_lost) == (0, 3)
    assert caplog.text.count("No space left") == 1
    recorder.close()


@pytest.mark.parametrize("journal_ends_first", [True, False])
def test_a_manager_with_a_journal_can_be_recorded_as_well(tmp_path, journal_ends_first):
    manager = small(block_size=4, num_blocks=64)
    journal, recorder = Journal(tmp_path / "calls").attach(manager), TraceRecorder(tmp_path / "day", block_size=4)
    recorder.attach(manager)
    served(manager, list(range(1, 10)))
    for each in (journal, recorder) if journal_ends_first else (recorder, journal):
        each.close()
        served(manager, list(range(1, 6)))
    assert replay(tmp_path / "calls").num_calls == (4 if journal_ends_first else 7)
    assert [line["in"] for line in lines(tmp_path / "day")[1:]] == ([9, 5] if journal_ends_first else [9])


def test_only_the_first_of_sequences_that_were_forked_is_a_request(tmp_path):
    manager = small(block_size=4, num_blocks=64)
    with TraceRecorder(tmp_path / "day", block_size=4) as recorder:
        recorder.attach(manager)
        sequence = manager.add_sequence(list(range(1, 10)))
        manager.commit([sequence])
        for each in (*manager.fork(sequence, 2), sequence):
            manager.free(each)
    assert len(lines(tmp_path / "day")) == 2


def test_a_manager_is_recorded_once_at_a_time(tmp_path):
    manager = small(block_size=4, num_blocks=8)
    with TraceRecorder(tmp_path / "one") as one, TraceRecorder(tmp_path / "other") as other:
        one.attach(manager)
        with pytest.raises(SequenceError, match="watched already"):
            other.attach(manager)


@pytest.mark.parametrize(
    ("options", "said"), [({"block_size": 0}, "block_size is 0"), ({"salt": b"short"}, "salt has 5 bytes")]
)
def test_wrong_settings_are_refused_before_a_file_is_made(tmp_path, options, said):
    with pytest.raises(ArgumentError, match=said):
        TraceRecorder(tmp_path / "day", **options)
    assert not (tmp_path / "day").exists()


def test_an_engine_is_recorded_with_its_last_tokens_and_the_time_of_submission(tmp_path):
    model = tiny_model("llama")
    engine = Engine(model, cache_config(model, num_blocks=64, block_size=4, max_sequences=1))
    times = iter([0.0, 1.0, 2.0, 3.0])
    with TraceRecorder(tmp_path / "day", block_size=4, clock=times.__next__) as recorder:
        recorder.attach(engine)
        sampling = SamplingParams(max_new_tokens=5, stop_token_ids=())
        generations = engine.generate([list(range(3, 12)), list(range(3, 9))], sampling)
        aborted = engine.submit([3, 4, 5], sampling)
        engine.abort(aborted)
    assert [(line["t"], line["in"], line["out"]) for line in lines(tmp_path / "day")[1:]] == [
        (1, 9, 5), (2, 6, 5), (3, 3, 0),
    ]  # fmt: skip
    assert all(generation.num_tokens == 5 for generation in generations)
    engine.close()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            {"t": 0, "in": 9, "out": 0, "h": [1, 2]},
            "in, out and h disagree: 9 and 0 tokens are 3 or 3 blocks of 4, got 2",
        ),
        ({"t": 0, "in": 0, "out": 0, "h": []}, "no tokens"),
        ({"t": -1, "in": 4, "out": 0, "h": [1]}, "t is not a time"),
        ({"in": 4, "h": [1]}, "no t"),
        ({"t": 0, "in": 4, "h": [2**65]}, "h is no list of ints"),
    ],
)
def test_what_is_wrong_with_a_recorded_line_is_told(tmp_path, line, said):
    path = written(tmp_path / "day", {"kvist trace": 1, "block_size": 4}, {"t": 0, "in": 4, "h": [1]}, line)
    trace = open_trace(path, on_error="skip")
    assert len(list(trace)) == 1
    assert trace.problems.first[0].startswith(f"{path}:3: {said}")


def test_a_recorded_trace_of_another_format_or_without_its_head_is_told(tmp_path):
    later = open_trace(written(tmp_path / "later", {"kvist trace": 9, "block_size": 4}), on_error="skip")
    assert list(later) == []
    assert "another format: expected 1, got 9" in later.problems.first[0]
    headless = open_trace(f"kvist:{written(tmp_path / 'no', mooncake(0, [1]))}", on_error="skip")
    assert list(headless) == []
    assert "no head" in headless.problems.first[0]
