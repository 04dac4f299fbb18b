"""Lines of every form with values that nobody expects: each is a request, or a problem that is told."""

import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.small import small
from tests.lab.test_traces import asked, capture, log_line, served, session
from tests.lab.trace_files import mooncake, word_tokenizer, written

from kvist.errors import TraceError
from kvist.journal import Journal
from kvist.lab.traces import KINDS, open_trace

KEYS = st.sampled_from(["id", "t", "in", "h", "role", "x"])
ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("fuzz")
    word_tokenizer(made / "tokenizer.json")
    return made


@pytest.fixture(scope="module")
def samples(folder):
    """Good lines of each kind, as text."""
    prompt = (list(range(1, 13)), 5, ())
    manager = small(block_size=4, num_blocks=64)
    with Journal(folder / "calls").attach(manager):
        served(manager, list(range(1, 13)), 3)
    message = {"role": "user", "content": [{"type": "text", "text": "w1"}], "tool_calls": [{"a": 1}]}
    lines = {
        "kvist": [{"kvist trace": 1, "block_size": 4}, {"t": 0, "in": 5, "out": 9, "h": [1, 2], "ns": "a", "s": "b"}],
        "mooncake": [mooncake(0, [1, 2], num_tokens=20, block_size=16, session="s")],
        "sessions": [session("a", asked(0, [[1, 2]], 8), subagents=[{"t": 1, "requests": [asked(0, [[7, 7]], 5)]}])],
        "openai": [log_line(tools=[{"a": 1}]), {"model": "m", "prompt": ["w1", [1, 2]], "choices": [{"text": "w1"}]}],
        "tokens": [{"tokens": [1, 2], "output": [3], "arrival_s": 1.0, "namespace": ["a", 1], "session": "s"}],
        "text": [{"messages": [message, {"role": "assistant", "content": "w2"}]}, {"turns": ["w1"], "arrival_s": 1}],
        "trtllm-events": capture(folder / "t", "trtllm", prompt).read_text().splitlines(),
        "kvist-events": capture(folder / "k", "kvist", prompt).read_text().splitlines(),
        "vllm-events": capture(folder / "v", "vllm", prompt).read_text().splitlines(),
        "journal": (folder / "calls").read_text().splitlines(),
    }
    return {
        kind: [each if isinstance(each, str) else json.dumps(each) for each in found] for kind, found in lines.items()
    }


def read(folder, kind, lines):
    """Read lines as a trace of a kind, those that are malformed left out; any error but TraceError is a failure."""
    path = written(folder / "fuzzed", *lines)
    try:
        trace = open_trace(f"{kind}:{path}", tokenizer=folder / "tokenizer.json", on_error="skip")
        requests = list(trace)
    except TraceError as error:
        return str(error)
    for request in requests:
        tokens = request.prompt.tokens()
        assert len(tokens) == request.prompt.num_tokens > 0
        assert tokens.min() >= 0
        assert request.output is None or len(request.output) == request.num_output_tokens
        assert request.arrival_s >= 0
    return trace.problems.first


@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_a_value_in_any_place_of_a_line_is_read_or_told(folder, samples, kind, data):
    lines = list(samples[kind])
    at = data.draw(st.integers(0, len(lines) - 1))
    if lines[at].startswith(("{", "[")):
        lines[at] = json.dumps(changed(json.loads(lines[at]), data))
    read(folder, kind, lines)


def changed(value, data):
    """The value with one part of it, wherever inside, replaced, or left out."""
    places = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not places or data.draw(st.integers(0, 3)) == 0:
        return data.draw(ODD)
    place = data.draw(st.sampled_from(places))
    if isinstance(value, dict) and data.draw(st.integers(0, 5)) == 0:
        return {key: each for key, each in value.items() if key != place}
    if isinstance(value, dict):
        return {**value, place: changed(value[place], data)}
    return [*value[:place], changed(value[place], data), *value[place + 1 :]]


@given(content=st.binary(max_size=60))
@pytest.mark.parametrize("kind", [*KINDS, ""])
def test_bytes_of_any_kind_are_read_or_told(folder, kind, content):
    path = folder / "bytes"
    path.write_bytes(content)
    with suppress(TraceError):
        list(open_trace(f"{kind}:{path}" if kind else path, tokenizer=folder / "tokenizer.json", on_error="skip"))


@settings(max_examples=20)
@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_cut_off_anywhere_is_read_up_to_there(folder, samples, kind, data):
    content = "\n".join(samples[kind])
    read(folder, kind, [content[: data.draw(st.integers(0, len(content)))]])


def test_good_lines_of_each_kind_are_read_without_a_problem_and_told_by_their_content(folder, samples):
    assert set(samples) == set(KINDS)
    for kind, lines in samples.items():
        assert read(folder, kind, lines) == [], kind
        assert open_trace(folder / "fuzzed", tokenizer=folder / "tokenizer.json").kind == kind
