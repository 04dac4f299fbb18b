"""Traces in every form: what is read, in which order, and what is said of what cannot be."""

import json
import os
import pickle
import subprocess
import sys
import textwrap
from base64 import b64encode

import numpy as np
import pytest
from tests.core.small import small
from tests.lab.trace_files import ids, mooncake, tokens_of, word_tokenizer, written

from kvist.errors import ArgumentError, TraceError
from kvist.journal import Journal
from kvist.lab.traces import HashedPrompt, Request, TokenPrompt, open_trace, tokens
from kvist.lab.traces import mooncake as mooncake_form
from kvist.lab.traces.ordering import by_arrival
from kvist.lab.traces.problems import Problems
from kvist.lab.traces.streams import MAX_LINE_BYTES, Source
from kvist.wire import Encoder, Recorder


@pytest.fixture
def tokenizer(tmp_path):
    return word_tokenizer(tmp_path / "tokenizer.json")


# -- mooncake ---------------------------------------------------------------------------------------------------------


def test_a_mooncake_line_is_a_request(tmp_path):
    path = written(tmp_path / "day.jsonl", mooncake(1500, [7, 8], num_tokens=600))
    (request,) = open_trace(path)
    assert (request.arrival_s, request.prompt.num_tokens, request.num_output_tokens, request.line) == (1.5, 600, 7, 1)
    assert request.prompt.hash_ids.tolist() == [7, 8]


@pytest.mark.parametrize("name", ["day.jsonl", "day.jsonl.gz", "day.jsonl.zst", "day"])
def test_a_trace_is_the_same_packed_or_not_and_can_be_read_twice(tmp_path, name):
    trace = open_trace(written(tmp_path / name, *(mooncake(1000 * at, [at, at + 1]) for at in range(50))))
    assert [request.arrival_s for request in trace] == [request.arrival_s for request in trace] == list(range(50))
    assert (trace.kind, trace.block_size) == ("mooncake", 512)


def test_a_line_says_if_blocks_are_not_512_tokens(tmp_path):
    path = written(tmp_path / "day.jsonl", mooncake(0, [1, 2, 3], num_tokens=40, block_size=16))
    assert open_trace(path).block_size == 16
    assert next(iter(open_trace(path))).prompt.block_size == 16


def test_equal_ids_stand_for_equal_tokens_in_any_process():
    prompt = HashedPrompt(np.array([3, 2**62, -5]), block_size=4, num_tokens=10)
    program = textwrap.dedent(
        """
        import numpy as np
        from kvist.lab.traces import HashedPrompt
        print(HashedPrompt(np.array([3, 2**62, -5]), block_size=4, num_tokens=10).tokens().tolist())
        """
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert json.loads(told) == prompt.tokens().tolist()
    assert prompt.tokens().dtype == np.int32
    assert prompt.tokens().min() >= 0


def test_a_prompt_begins_with_the_tokens_of_another_exactly_as_far_as_ids_agree():
    one = HashedPrompt(np.array([1, 2, 3]), 4, 12).tokens()
    other = HashedPrompt(np.array([1, 2, 4]), 4, 11).tokens()
    assert (one[:8] == other[:8]).all()
    assert not (one[8:11] == other[8:]).any()


def test_ids_with_another_salt_stand_for_other_tokens():
    one, other = (HashedPrompt(np.array([1, 2]), 8, 16, salt).tokens() for salt in (5, 6))
    assert not (one == other).any()


def test_a_tail_that_has_no_id_is_made_up_from_what_is_before_it():
    short = HashedPrompt(np.array([1]), 4, 4).tokens()
    one, same, longer = (HashedPrompt(np.array([1]), 4, length).tokens() for length in (6, 6, 7))
    assert one[:4].tolist() == short.tolist()
    assert one.tolist() == same.tolist()
    assert not (one[4:] == longer[4:6]).any()
    assert len(HashedPrompt(np.empty(0, np.int64), 4, 3).tokens()) == 3


# -- malformed, empty, unsorted, huge ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{]", "no JSON"),
        ("[1, 2]", "no JSON object"),
        ("17", "no JSON object"),
        ('{"timestamp": 0}', "no input_length"),
        (mooncake(0, [1], num_tokens=513), "input_length and hash_ids disagree: 513 tokens are 2 blocks of 512, got 1"),
        (mooncake(-1, [1]), "timestamp is not a time: got -1"),
        (mooncake(float("nan"), [1]), "timestamp is not a time"),
        (mooncake("soon", [1]), "timestamp is not a time: got 'soon'"),
        (mooncake(0, [1.5]), "hash_ids is no list of ints: got 1.5"),
        (mooncake(0, [2**70]), "hash_ids is no list of ints"),
        (mooncake(0, ["a"]), "hash_ids is no list of ints: got 'a'"),
        (mooncake(0, [True]), "hash_ids is no list of ints: got True"),
        (mooncake(0, [[1]]), "hash_ids is no list of ints"),
        (mooncake(0, "abc", num_tokens=9), "hash_ids is no list: got 'abc'"),
        (mooncake(0, []), "no tokens"),
        (mooncake(0, [1], num_tokens=-3), "input_length is not a count: got -3"),
        (mooncake(0, [1], block_size=0), "block_size is not 1 .. 1,048,576: got 0"),
        (mooncake(0, [1], num_tokens=5, block_size=2**31 - 1), "block_size is not 1 .. 1,048,576: got 2,147,483,647"),
        (mooncake(0, [1, 2], num_tokens=2**25, block_size=2**20), "a prompt too long: input_length is 33,554,432"),
        (mooncake(10**400, [1]), "timestamp is not a time: got 1000"),
        (mooncake(1e300, [1]), "timestamp is not a time: got 1e+300"),
        (mooncake(0, [1], num_tokens=10**400), "input_length is not a count"),
        (mooncake(0, [1], session="\ud800"), "text that is no Unicode"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_a_malformed_line_is_told_with_file_and_line_or_skipped_and_counted(tmp_path, line, said):
    good = [mooncake(0, [1]), mooncake(9, [2])]
    path = written(tmp_path / "day.jsonl", good[0], "", line, good[1])
    with pytest.raises(TraceError) as caught:
        list(open_trace(f"mooncake:{path}"))
    assert str(caught.value).startswith(f"{path}:3: {said}")
    assert (caught.value.file, caught.value.line) == (str(path), 3)
    trace = open_trace(path, on_error="skip")
    assert [request.line for request in trace] == [1, 4]
    assert (trace.problems.num_skipped, len(trace.problems.first)) == (1, 1)
    assert trace.problems.first[0].startswith(f"{path}:3: {said}")


def test_problems_are_counted_by_reason_for_each_pass_and_the_first_20_kept(tmp_path):
    lines = [mooncake(0, [1]), *["{]"] * 30, *[{"input_length": 512, "hash_ids": [1]}] * 5]
    trace = open_trace(written(tmp_path / "day.jsonl", *lines), on_error="skip")
    for _ in range(2):
        assert len(list(trace)) == 1
        assert dict(trace.problems.counts) == {"no JSON": 30, "no timestamp": 5}
        assert len(trace.problems.first) == 20


def test_a_line_that_is_too_long_is_skipped_without_being_held(tmp_path, monkeypatch):
    monkeypatch.setattr("kvist.lab.traces.streams.MAX_LINE_BYTES", 1000)
    path = written(tmp_path / "day.jsonl", mooncake(0, [1]), mooncake(1, list(range(900))), mooncake(2, [2]))
    trace = open_trace(path, on_error="skip")
    assert [request.line for request in trace] == [1, 3]
    assert dict(trace.problems.counts) == {"line too long": 1}


@pytest.mark.parametrize("content", [b"", b"\n\n  \n", b"[]", b"[ ]\n"])
def test_an_empty_trace_is_told(tmp_path, content):
    path = tmp_path / "day.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"day\.jsonl: is empty; there are no requests"):
        open_trace(path)
    assert list(open_trace(f"mooncake:{path}")) == []


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nowhere.jsonl", "there is no such file"),
        ("mooncake:nowhere.jsonl", "there is no such file"),
        ("morse:day.jsonl", "there is no such file; a kind before the path is one of kvist, journal, mooncake"),
        (".", "is a folder; name the file"),
        ("odd.jsonl", "is of no known kind; name it as one of"),
    ],
)
def test_what_cannot_be_opened_is_told(tmp_path, monkeypatch, spec, said):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "odd.jsonl", {"colour": "green"}, "no JSON at all")
    with pytest.raises(TraceError, match=said.replace(".", r"\.")):
        open_trace(spec)


def test_a_path_with_a_colon_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "mooncake:day.jsonl", mooncake(0, [1]))
    assert len(list(open_trace("mooncake:day.jsonl"))) == 1


@pytest.mark.parametrize("name", ["day.jsonl.gz", "day.jsonl.zst"])
def test_a_packed_file_that_is_cut_off_or_damaged_is_told(tmp_path, name):
    path = written(tmp_path / name, *(mooncake(at, [at, 3 * at]) for at in range(3000)))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match="cannot be read"):
        list(open_trace(f"mooncake:{path}"))
    path.write_bytes(whole[:200] + bytes(100) + whole[300:])
    with pytest.raises(TraceError):
        list(open_trace(f"mooncake:{path}"))


@pytest.mark.parametrize(
    ("options", "said"),
    [({"on_error": "ignore"}, "on_error"), ({"limit": -1}, "limit"), ({"at_once": 0}, "at_once")],
)
def test_wrong_options_are_refused(tmp_path, options, said):
    path = written(tmp_path / "day.jsonl", mooncake(0, [1]))
    with pytest.raises(ArgumentError, match=said):
        open_trace(path, **options)


def test_a_limit_ends_the_trace_before_a_bad_line(tmp_path):
    path = written(tmp_path / "day.jsonl", mooncake(0, [1]), mooncake(1, [2]), "{]")
    assert len(list(open_trace(path, limit=0))) == 0
    with pytest.raises(TraceError):
        list(open_trace(path, limit=3))


def test_an_unsorted_trace_is_sorted_those_that_come_together_stay_in_order_and_it_is_noted(tmp_path):
    times = [5, 1, 3, 1, 0, 5]
    path = written(tmp_path / "day.jsonl", *(mooncake(1000 * time, [at]) for at, time in enumerate(times)))
    trace = open_trace(path)
    assert [request.prompt.hash_ids[0] for request in trace] == [4, 1, 3, 2, 0, 5]
    assert trace.problems.num_skipped == 0
    assert trace.problems.notes == [f"{path} is not sorted by arrival; it was sorted in a window of 8,192 requests"]


def test_a_sorted_trace_is_not_noted(tmp_path):
    trace = open_trace(written(tmp_path / "day.jsonl", mooncake(0, [1]), mooncake(0, [2])))
    assert len(list(trace)) == 2
    assert trace.problems.notes == []


def some_requests(*times):
    return [Request(TokenPrompt(np.array([at], np.int32)), time, line=at) for at, time in enumerate(times, 1)]


def test_what_comes_too_late_for_the_window_is_a_problem(tmp_path):
    path = tmp_path / "day.jsonl"
    requests = some_requests(1, 2, 3, 4, 0.5, 5)
    with pytest.raises(
        TraceError, match=rf"{path.name}:5: too late to be sorted in a window of 3: it arrived 1\.500 s"
    ):
        list(by_arrival(requests, Problems("fatal"), path, num_requests=3))
    problems = Problems("skip")
    found = list(by_arrival(requests, problems, path, num_requests=3))
    assert [request.arrival_s for request in found] == [1, 2, 3, 4, 5]
    assert problems.num_skipped == 1


def test_the_window_holds_no_more_than_its_bytes(tmp_path):
    given = []

    def requests():
        for request in some_requests(*range(100)):
            given.append(request.line)
            yield request

    first = next(by_arrival(requests(), Problems(), tmp_path, num_bytes=5000))
    assert first.line == 1
    assert len(given) == 10


@pytest.mark.slow
def test_five_million_references_are_read_in_little_memory(tmp_path):
    program = textwrap.dedent(
        f"""
        import resource
        from pathlib import Path
        from kvist.lab.synthetic import WORKLOADS, SyntheticTrace
        from kvist.lab.traces import mooncake, open_trace
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        path = Path({str(tmp_path)!r}) / "huge.jsonl"
        mooncake.write(SyntheticTrace(WORKLOADS["agents"], 7_000, seed=3, block_size=16), path)
        num_references = sum(len(request.prompt.hash_ids) for request in open_trace(path))
        print(num_references, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        """
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    num_references, grown_kib = map(int, told.split())
    assert num_references > 5_000_000
    assert grown_kib < 150 * 1024  # the window of 64 MiB, and what Python makes of it


def test_a_trace_can_be_given_to_another_process(tmp_path):
    trace = open_trace(written(tmp_path / "day.jsonl", mooncake(0, [1]), "{]"), on_error="skip")
    again = pickle.loads(pickle.dumps(trace))
    assert [request.line for request in again] == [1]
    assert again.problems.num_skipped == 1


# -- arrays -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("indent", [None, 0, 2])
def test_an_array_is_read_however_it_is_laid_out(tmp_path, indent):
    path = tmp_path / "day.json"
    path.write_text(" \n" + json.dumps([mooncake(at, [at]) for at in range(2000)], indent=indent) + "\n")
    assert [request.prompt.hash_ids[0] for request in open_trace(path)] == list(range(2000))


def test_a_character_between_two_pieces_of_an_array_stays_whole(tmp_path):
    values = [{"text": "ä€😀" * number} for number in range(1, 600)]
    path = tmp_path / "texts.json"
    path.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    read = [value for _, value in Source(path, Problems()).values()]
    assert path.stat().st_size > 1_000_000
    assert read == values


@pytest.mark.parametrize(
    ("content", "num_read", "said"),
    [
        ('[{"a": 1}, {"b": ]', 1, ":1: no JSON: in an array"),
        ('[{"a": 1},\n{"b": 2}', 2, ":2: no JSON: the array has no end"),
        ('[{"a": 1}] x', 1, ":1: no JSON: something follows the array"),
    ],
)
def test_a_broken_array_is_told_with_its_line(tmp_path, content, num_read, said):
    path = tmp_path / "day.json"
    path.write_text(content)
    problems = Problems("skip")
    assert len(list(Source(path, problems).values())) == num_read
    assert said in problems.first[0]


def test_arrays_on_lines_are_read_one_after_another(tmp_path):
    path = tmp_path / "events.json"
    path.write_text('[1, 2]\n[3]\n\n[]\n[{"a": [4]}]')
    assert list(Source(path, Problems()).values()) == [(1, 1), (1, 2), (2, 3), (5, {"a": [4]})]


def test_the_bound_of_a_line_has_room_for_the_longest_prompts():
    assert len(json.dumps([2**31 - 1] * 4_000_000)) < MAX_LINE_BYTES


# -- sessions ---------------------------------------------------------------------------------------------------------


def session(name, *requests, block_size=4, **others):
    return {"id": name, "block_size": block_size, "requests": list(requests), **others}


def asked(time_s, runs, num_tokens, took_s=1.0):
    return {"t": time_s, "in": num_tokens, "out": 3, "api": took_s, "h": runs}


def test_runs_of_a_session_are_ids_that_only_it_has(tmp_path):
    path = written(
        tmp_path / "s.jsonl",
        session("a", asked(0, [[1, 2], [5, 5]], 13)),
        session("b", asked(0.5, [[1, 2], [5, 5]], 13)),
    )
    one, other = open_trace(path)
    assert one.prompt.hash_ids.tolist() == other.prompt.hash_ids.tolist() == [1, 2, 5]
    assert (one.prompt.num_tokens, one.num_output_tokens, one.session, other.session) == (13, 3, "a", "b")
    assert not (one.prompt.tokens() == other.prompt.tokens()).any()


def test_sessions_go_side_by_side_and_the_next_begins_when_one_ends(tmp_path):
    path = written(
        tmp_path / "s.jsonl",
        session("a", asked(0, [[1, 1]], 4), asked(10, [[1, 2]], 8, took_s=2)),
        session("b", asked(0, [[1, 1]], 4), asked(3, [[1, 2]], 8, took_s=2)),
        session("c", asked(1, [[1, 1]], 4)),
    )
    found = [(request.session, request.arrival_s) for request in open_trace(path, at_once=2)]
    assert found == [("a", 0), ("b", 0), ("b", 3), ("c", 6), ("a", 10)]
    alone = [(request.session, request.arrival_s) for request in open_trace(path, at_once=1)]
    assert alone == [("a", 0), ("a", 10), ("b", 12), ("b", 15), ("c", 18)]


def test_subagents_ask_in_between_from_when_they_began(tmp_path):
    agent = {"t": 5.0, "requests": [asked(0, [[7, 7]], 5), asked(2, [[7, 8]], 9)]}
    path = written(tmp_path / "s.jsonl", session("a", asked(0, [[1, 1]], 4), asked(6, [[1, 2]], 8), subagents=[agent]))
    found = [(request.arrival_s, request.prompt.hash_ids.tolist()) for request in open_trace(path)]
    assert found == [(0, [1]), (5, [7]), (6, [1, 2]), (7, [7, 8])]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"id": "x", "block_size": 4}, "no session"),
        (session("x", asked(0, [[1, 1]], 64), block_size=64), "another block_size: the first session has 4"),
        (session("x", asked(0, [[1, 1]], 9)), "in and h disagree: 9 tokens are 2 full blocks of 4, got 1 ids"),
        (session("x", asked(0, [[2, 1]], 4)), "h has what is no run: expected [first, last], got [2, 1]"),
        (session("x", asked(0, [[0, 2**60]], 4)), "h has what is no run"),
        (session("x", asked(0, 5, 4)), "h is no list of runs"),
        (session("x", asked(None, [[1, 1]], 4)), "t is not a time"),
        (session("x", 7), "a request is no object"),
        (session("x", subagents=[7]), "a subagent has no requests"),
        (session("x", subagents=True), "a subagent has no requests"),
        (session([]), "id is not text"),
    ],
)
def test_what_is_wrong_with_a_session_is_told_with_its_line(tmp_path, line, said):
    path = written(tmp_path / "s.jsonl", session("a", asked(0, [[1, 1]], 4)), line)
    trace = open_trace(path, on_error="skip")
    assert [request.session for request in trace] == ["a"]
    assert trace.problems.first[0].startswith(f"{path}:2: {said}")


# -- token ids --------------------------------------------------------------------------------------------------------


def test_halves_of_characters_are_told_in_an_array_and_whole_ones_are_read(tmp_path):
    told = {"tokens": [1], "session": "\U0001f600"}
    assert [request.session for request in open_trace(written(tmp_path / "whole.json", [told]))] == ["\U0001f600"]
    half = written(tmp_path / "half.json", [told, {"tokens": [1], "session": "\udc00"}])
    with pytest.raises(TraceError, match=r":1: text that is no Unicode: .*udc00"):
        list(open_trace(half))


@pytest.mark.parametrize("field", ["tokens", "prompt_token_ids", "input_tok_ids", "input_ids", "token_ids", "prompt"])
def test_token_ids_are_read_by_any_of_their_names(tmp_path, field):
    line = {field: [5, 6, 7], "output_token_ids": [8], "arrival_time_ns": 2_500_000_000, "namespace": ["a", 1]}
    (request,) = open_trace(written(tmp_path / "t.jsonl", line))
    assert request.prompt.tokens().tolist() == [5, 6, 7]
    assert (request.output.tolist(), request.num_output_tokens) == ([8], 1)
    assert (request.arrival_s, request.namespace) == (2.5, ("a", 1))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"tokens": [1, -1]}, "tokens has what is no token id"),
        ({"tokens": [2**31]}, "tokens has what is no token id"),
        ({"tokens": []}, "no tokens"),
        ({"tokens": [1], "arrival_s": -0.5}, "arrival_s is not a time"),
        ({"tokens": [1], "namespace": [1.5]}, "namespace is no text"),
        ({"tokens": [1], "output_length": -1}, "output_length is not a count"),
    ],
)
def test_what_is_wrong_with_token_ids_is_told(tmp_path, line, said):
    with pytest.raises(TraceError, match=said):
        list(open_trace(f"tokens:{written(tmp_path / 't.jsonl', line)}"))


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz", "t.jsonl.zst"])
def test_token_ids_go_out_and_come_back(tmp_path, name):
    line = {"tokens": [5, 6], "output": [7, 8, 9], "arrival_s": 1.25, "namespace": ["x"], "session": "s"}
    one = next(iter(open_trace(written(tmp_path / "in.jsonl", line))))
    assert tokens.write([one, Request(TokenPrompt(np.array([3], np.int32)), 2.0, 4)], tmp_path / name) == 2
    again, second = open_trace(tmp_path / name)
    assert (again.namespace, again.session, again.arrival_s, again.output.tolist()) == (("x",), "s", 1.25, [7, 8, 9])
    assert (second.num_output_tokens, second.output) == (4, None)


# -- text and logs ----------------------------------------------------------------------------------------------------


def test_text_needs_a_tokenizer_and_says_so(tmp_path):
    path = written(tmp_path / "t.jsonl", {"text": "w1 w2"})
    with pytest.raises(TraceError, match="needs a tokenizer"):
        open_trace(path)


def test_a_line_of_text_is_a_prompt(tmp_path, tokenizer):
    path = written(tmp_path / "t.jsonl", {"prompt": "w1 w2", "completion": "w3"}, '"w4 w5 w6"')
    one, other = open_trace(path, tokenizer=tokenizer)
    assert (one.prompt.tokens().tolist(), one.output.tolist()) == (ids("w1", "w2"), ids("w3"))
    assert other.prompt.tokens().tolist() == ids("w4", "w5", "w6")


def test_each_answer_of_a_chat_is_a_request_with_all_before_it(tmp_path, tokenizer):
    roles = ["system", "user", "assistant", "tool", "assistant", "user"]
    messages = [{"role": role, "content": f" w{at} "} for at, role in enumerate(roles, 1)]
    path = written(tmp_path / "c.jsonl", {"id": "c", "messages": messages})
    one, other = open_trace(path, tokenizer=tokenizer)
    assert other.prompt.tokens()[: one.prompt.num_tokens].tolist() == one.prompt.tokens().tolist()
    both = [*one.prompt.tokens().tolist(), *one.output.tolist()]
    assert other.prompt.tokens()[: len(both)].tolist() == both
    assert ids("w5")[0] in other.output
    assert (one.session, one.arrival_s, other.arrival_s) == ("c", 0, 1)


def test_a_chat_without_an_answer_and_the_turns_of_a_user_are_requests(tmp_path, tokenizer):
    path = written(
        tmp_path / "c.jsonl",
        {"conversations": [{"from": "human", "value": " w1 "}]},
        {"turns": [" w1 ", " w2 "]},
    )
    chat, first, second = open_trace(path, tokenizer=tokenizer, at_once=1)
    assert ids("w1")[0] in chat.prompt.tokens()
    assert second.prompt.tokens()[: first.prompt.num_tokens].tolist() == first.prompt.tokens().tolist()


def test_chats_without_a_clock_take_turns_until_all_of_a_group_have_ended(tmp_path, tokenizer):
    def chat(name, num_answers):
        return {
            "id": name,
            "messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}] * num_answers,
        }

    path = written(tmp_path / "c.jsonl", chat("a", 2), chat("b", 1), chat("c", 1))
    found = [(request.session, request.arrival_s) for request in open_trace(path, tokenizer=tokenizer, at_once=2)]
    assert found == [("a", 0), ("b", 0), ("a", 1), ("c", 2)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"messages": [{"content": "w1"}]}, "a message has no role"),
        ({"messages": [7]}, "a message is no object"),
        ({"messages": []}, "no messages"),
        ({"messages": [{"role": "user", "content": 7}]}, "content is no text"),
        ({"text": "  "}, "no tokens"),
        ({"text": 5}, "a prompt that is no text"),
        ({"colour": "green"}, "no text"),
        ({"text": "\ud800"}, "text that is no Unicode"),
        ("7", "no text, nor an object"),
    ],
)
def test_what_is_wrong_with_text_is_told_with_its_line(tmp_path, tokenizer, line, said):
    path = written(tmp_path / "t.jsonl", {"text": "w1"}, line, {"text": "w2"})
    trace = open_trace(path, tokenizer=tokenizer, on_error="skip")
    assert [request.line for request in trace] == [1, 3]
    assert trace.problems.first[0].startswith(f"{path}:2: {said}")


def test_a_file_that_is_no_tokenizer_is_told(tmp_path):
    path, bad = written(tmp_path / "t.jsonl", {"text": "w1"}), written(tmp_path / "bad.json", {"a": 1})
    with pytest.raises(TraceError, match=r"bad\.json: is no tokenizer that can be read"):
        list(open_trace(path, tokenizer=bad))


def test_the_text_of_a_chat_is_tokenized_once(tmp_path, tokenizer):
    long = " ".join(f"w{number}" for number in range(300))
    messages = [
        {"role": "system", "content": long},
        {"role": "user", "content": "w1"},
        {"role": "assistant", "content": "w2"},
    ]
    path = written(tmp_path / "c.jsonl", *[{"messages": messages}] * 3)
    assert len({tuple(each) for each in tokens_of(path, tokenizer=tokenizer)}) == 1


def log_line(**changes):
    return {
        "timestamp": 1_700_000_000.5,
        "body": {"model": "m", "messages": [{"role": "user", "content": " w1 w2 "}]},
        "response": {"body": {"choices": [{"message": {"content": " w3 "}}], "usage": {"completion_tokens": 9}}},
        **changes,
    }


def test_a_logged_chat_is_a_request_of_its_model(tmp_path, tokenizer):
    path = written(tmp_path / "log.jsonl", log_line(), log_line(timestamp="2023-11-14T22:13:30.5Z"))
    one, other = open_trace(path, tokenizer=tokenizer)
    assert (one.arrival_s, other.arrival_s, one.namespace) == (0, 10, ("m",))
    assert ids("w3")[0] in one.output


def test_the_next_turn_of_a_logged_chat_begins_with_the_last_prompt_and_its_answer(tmp_path, tokenizer):
    messages = [
        {"role": "user", "content": " w1 w2 "},
        {"role": "assistant", "content": " w3 "},
        {"role": "user", "content": " w4 "},
    ]
    path = written(tmp_path / "log.jsonl", log_line(), log_line(body={"model": "m", "messages": messages}))
    one, other = open_trace(path, tokenizer=tokenizer)
    both = [*one.prompt.tokens().tolist(), *one.output.tolist()]
    assert other.prompt.tokens()[: len(both)].tolist() == both


def test_logged_completions_may_be_tokens_which_need_no_tokenizer(tmp_path):
    line = {"model": "m", "prompt": [4, 5, 6], "response": {"usage": {"completion_tokens": 9}}, "user": "ann"}
    (request,) = open_trace(written(tmp_path / "log.jsonl", line))
    assert (request.prompt.tokens().tolist(), request.num_output_tokens, request.session) == ([4, 5, 6], 9, "ann")


def test_a_completion_of_several_prompts_is_several_requests(tmp_path, tokenizer):
    line = {"model": "m", "prompt": ["w1", "w2 w3"], "choices": [{"text": "w4"}, {"text": "w5 w6"}]}
    one, other = open_trace(written(tmp_path / "log.jsonl", line), tokenizer=tokenizer)
    assert (one.output.tolist(), other.output.tolist()) == (ids("w4"), ids("w5", "w6"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (log_line(timestamp="yesterday"), "a time that cannot be read"),
        (log_line(timestamp=-1), "a time that cannot be read"),
        (log_line(body={"model": "m"}), "no messages and no prompt"),
        (log_line(body="{]"), "a body that is no JSON"),
        (log_line(body={"model": 7, "prompt": [1]}), "model or cache_salt is no text"),
        (log_line(response={"choices": [7]}), "a choice is no object"),
        (log_line(response={"usage": {"completion_tokens": -1}}), "completion_tokens is not a count"),
        (log_line(body={"model": "m", "prompt": []}), "no messages and no prompt"),
        (log_line(body={"model": "m", "prompt": ["", "w1"]}), "no tokens"),
    ],
)
def test_what_is_wrong_with_a_log_is_told_with_its_line(tmp_path, tokenizer, line, said):
    path = written(tmp_path / "log.jsonl", log_line(), line)
    trace = open_trace(path, tokenizer=tokenizer, on_error="skip")
    assert [request.line for request in trace] == [1]
    assert trace.problems.first[0].startswith(f"{path}:2: {said}")


# -- captures and journals --------------------------------------------------------------------------------------------


def served(manager, tokens_, num_output=0, namespace=()):
    """Let a manager serve a request, one output token at a time."""
    sequence = manager.add_sequence(tokens_, namespace=namespace)
    manager.commit([sequence])
    for token in range(900, 900 + num_output):
        manager.append([sequence], np.array([token], np.int32))
        manager.commit([sequence])
        manager.stats()  # publishes, so that full blocks are told of one by one
    manager.free(sequence)


def capture(path, form, *asked_):
    manager = small(block_size=4, num_blocks=64, event_buffer=4096)
    encode, lines = Encoder(form, Recorder()), []
    for prompt, num_output, namespace in asked_:
        served(manager, prompt, num_output, namespace)
        for event in manager.events.poll():
            message = encode([event])
            lines.append(b64encode(message).decode() if form == "vllm" else message.decode().rstrip())
    return written(path, *lines)


@pytest.mark.parametrize(
    ("form", "kind"), [("vllm", "vllm-events"), ("trtllm", "trtllm-events"), ("kvist", "kvist-events")]
)
def test_a_capture_gives_the_requests_that_stored_something(tmp_path, form, kind):
    first, second = list(range(1, 13)), [*range(1, 9), *range(50, 62)]
    trace = open_trace(capture(tmp_path / "events", form, (first, 0, ()), (second, 0, ()), (first, 0, ())))
    assert trace.kind == kind
    assert [request.prompt.tokens().tolist() for request in trace] == [first, second]


def test_blocks_stored_one_at_a_time_are_output(tmp_path):
    path = capture(tmp_path / "events", "vllm", (list(range(1, 9)), 9, ()))
    (request,) = open_trace(path)
    assert request.prompt.tokens().tolist() == list(range(1, 9))
    assert request.output.tolist() == list(range(900, 908))


def test_a_capture_that_begins_late_has_a_block_for_what_came_before(tmp_path):
    path = capture(tmp_path / "events", "vllm", (list(range(1, 13)), 0, ()), ([*range(1, 13), *range(60, 68)], 0, ()))
    lines = path.read_text().splitlines()
    written(path, *lines[-1:])
    trace = open_trace(path)
    (request,) = trace
    assert request.prompt.num_tokens == 12
    assert request.prompt.tokens()[4:].tolist() == list(range(60, 68))
    assert "1 events go on from blocks that were stored before the capture began" in trace.problems.notes[0]


def test_a_capture_holds_no_more_blocks_than_its_bound_those_used_last(tmp_path, monkeypatch):
    monkeypatch.setattr("kvist.lab.traces.captures.MAX_BLOCKS", 4)
    system = list(range(1, 9))
    asked_ = [(system, 0, ()), *(([*system, *range(start, start + 4)], 0, ()) for start in range(50, 90, 4))]
    trace = open_trace(capture(tmp_path / "events", "vllm", *asked_))
    assert [request.prompt.tokens()[:8].tolist() for request in trace] == [
        system
    ] * 10  # the second goes on where the first ended
    assert trace.problems.notes == []


def test_namespaces_of_a_capture_stay_apart(tmp_path):
    path = capture(tmp_path / "events", "kvist", (list(range(1, 9)), 0, ("a",)), (list(range(1, 9)), 0, ("b",)))
    assert [request.namespace for request in open_trace(path)] == [("a",), ("b",)]


@pytest.mark.parametrize(
    ("missing", "name", "said"),
    [
        ("msgspec", "vllm-events:events", "has batches of vLLM's events, which need msgspec; pip install 'kvist[lab]'"),
        ("tokenizers", "text:text", "has text, which needs tokenizers; pip install 'kvist[lab]'"),
        ("zstandard", "mooncake:day.zst", "a .zst needs zstandard; pip install 'kvist[lab]'"),
        ("msgspec", "events", "is of no known kind"),
    ],
)
def test_a_missing_package_is_told_with_the_extra_that_brings_it(tmp_path, missing, name, said):
    capture(tmp_path / "events", "vllm", (list(range(1, 9)), 0, ()))
    written(tmp_path / "text", {"text": "w1"})
    written(tmp_path / "day.zst", mooncake(0, [1]))
    word_tokenizer(tmp_path / "tokenizer.json")
    program = (
        f"import sys; sys.modules[{missing!r}] = None; from kvist.lab.traces import open_trace; "
        f"list(open_trace({name!r}, tokenizer='tokenizer.json'))"
    )
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path, env=paths
    )
    assert told.returncode == 1
    last = told.stderr.splitlines()[-1]
    assert last.startswith("kvist.errors.TraceError: ")
    assert said in last


def test_a_line_that_is_no_event_is_told(tmp_path):
    path = capture(tmp_path / "events", "vllm", (list(range(1, 9)), 0, ()))
    written(path, *path.read_text().splitlines(), "!!", "AAAA")
    trace = open_trace(path, on_error="skip")
    assert len(list(trace)) == 1
    assert dict(trace.problems.counts) == {"not of this protocol": 2}


def test_a_journal_is_a_trace_of_what_was_admitted(tmp_path):
    manager = small(block_size=4, num_blocks=64)
    with Journal(tmp_path / "calls.journal").attach(manager):
        served(manager, list(range(1, 13)), 3, ("a",))
        served(manager, list(range(1, 9)), 0)
        running = manager.add_sequence([7, 8, 9])
    manager.free(running)
    trace = open_trace(tmp_path / "calls.journal")
    one, other, third = trace
    assert (one.prompt.tokens().tolist(), one.output.tolist(), one.namespace) == (
        list(range(1, 13)),
        [900, 901, 902],
        ("a",),
    )
    assert (other.prompt.tokens().tolist(), other.output) == (list(range(1, 9)), None)
    assert third.prompt.tokens().tolist() == [7, 8, 9]


def test_a_packed_journal_is_read_and_a_broken_one_told(tmp_path):
    manager = small(block_size=4, num_blocks=64)
    with Journal(tmp_path / "calls.journal").attach(manager):
        served(manager, list(range(1, 13)))
    lines = (tmp_path / "calls.journal").read_text().splitlines()
    assert tokens_of(written(tmp_path / "calls.gz", *lines)) == [list(range(1, 13))]
    broken = written(tmp_path / "broken", *lines[:2], "{]", *lines[2:])
    with pytest.raises(TraceError, match=r"broken:2: a call that cannot be made again"):
        tokens_of(broken)
    with pytest.raises(TraceError, match="expected format 1, got 99"):
        tokens_of(written(tmp_path / "later", {"kvist journal": 99}))


# -- writing Mooncake's form ------------------------------------------------------------------------------------------


def shape(trace):
    """Who refers to what, whatever ids are called: for each block the number of the first one that it equals."""
    numbers = {}
    return [[numbers.setdefault(each, len(numbers)) for each in request.prompt.hash_ids.tolist()] for request in trace]


def test_a_mooncake_trace_goes_out_as_it_came(tmp_path):
    path = written(tmp_path / "day.jsonl", mooncake(0, [9, 4]), mooncake(1500.25, [9, 5, 6], num_tokens=1100))
    assert mooncake_form.write(open_trace(path), tmp_path / "again.jsonl") == 2
    assert (tmp_path / "again.jsonl").read_bytes() == path.read_bytes()


def test_token_ids_become_prefix_chained_blocks(tmp_path):
    lines = [
        {"tokens": [1, 2, 3, 4, 5]},
        {"tokens": [1, 2, 3, 4, 5, 6]},
        {"tokens": [3, 4]},
        {"tokens": [1, 2], "namespace": "x"},
    ]
    mooncake_form.write(open_trace(written(tmp_path / "t.jsonl", *lines)), tmp_path / "m.jsonl", block_size=2)
    trace = open_trace(tmp_path / "m.jsonl")
    assert shape(trace) == [[0, 1, 2], [0, 1, 3], [4], [5]]
    assert [request.prompt.num_tokens for request in trace] == [5, 6, 2, 2]


def test_sessions_become_a_mooncake_trace_with_the_same_references(tmp_path):
    path = written(
        tmp_path / "s.jsonl",
        session("a", asked(0, [[1, 2]], 8), asked(5, [[1, 3]], 12)),
        session("b", asked(1, [[1, 2]], 8), asked(6, [[1, 2], [4, 4]], 13)),
    )
    mooncake_form.write(open_trace(path), tmp_path / "m.jsonl")
    found = [(request.session, request.arrival_s) for request in open_trace(tmp_path / "m.jsonl")]
    assert found == [("a", 0), ("b", 1), ("a", 5), ("b", 6)]
