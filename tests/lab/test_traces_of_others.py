"""Other people's traces, where KVIST_TRACES names the folder: all open, and have what is known of them."""

import os
from pathlib import Path

import numpy as np
import pytest
from tests.lab.forests import traces_folder

from kvist.lab.curves import lru_curve, references_of
from kvist.lab.traces import mooncake, open_trace


@pytest.fixture(scope="module")
def tokenizer():
    """The tokenizer.json of SmolLM2, with which the numbers were made."""
    named = os.environ.get("KVIST_TOKENIZER")
    kept = sorted((Path.home() / ".cache" / "kvist").glob("SmolLM2-135M-Instruct*/tokenizer.json"))
    found = Path(named) if named else kept[0] if kept else None
    if found is None:
        pytest.skip("KVIST_TOKENIZER names no tokenizer.json of SmolLM2, and none is in ~/.cache/kvist")
    return found


def described(trace):
    """Number of requests, and mean length of their prompts in whole tokens."""
    lengths = [request.prompt.num_tokens for request in trace]
    return len(lengths), round(sum(lengths) / len(lengths))


def test_the_mooncake_conversation_trace_has_12031_requests_and_288500_blocks():
    trace = open_trace(traces_folder() / "mooncake" / "conversation_trace.jsonl.gz")
    references = references_of(trace)
    assert (trace.kind, trace.block_size) == ("mooncake", 512)
    assert described(trace) == (12031, 12035)
    assert (references.num_references, references.num_unique) == (288500, 182790)


def test_the_sharegpt_trace_has_300_requests_with_token_ids_in_and_out():
    trace = open_trace(traces_folder() / "sharegpt-tokens" / "sharegpt-llama-3.1-8b-300-sps10.jsonl.gz")
    references = references_of(trace, 16)
    assert trace.kind == "tokens"
    assert described(trace) == (300, 857)
    assert (references.num_references, references.num_unique) == (15942, 14722)
    assert all(len(request.output) == request.num_output_tokens > 0 for request in trace)
    assert lru_curve(references, [147, 736, 1472, 3680, 7361]).hit_rate.round(3).tolist() == [
        0.002, 0.009, 0.014, 0.041, 0.068,
    ]  # fmt: skip


def test_tau_bench_has_2454_answers_of_200_agents_sixteen_at_once(tokenizer):
    trace = open_trace(traces_folder() / "tau-bench" / "gpt-4o-airline.json.gz", tokenizer=tokenizer)
    references = references_of(trace, 16)
    assert trace.kind == "text"
    assert described(trace) == (2454, 3394)
    assert (references.num_references, references.num_unique) == (519436, 38595)
    assert lru_curve(references, [386, 1930, 3860]).hit_rate.round(3).tolist() == [0.445, 0.852, 0.926]


def test_mt_bench_has_two_turns_of_80_users(tokenizer):
    trace = open_trace(traces_folder() / "mtbench" / "question.jsonl.gz", tokenizer=tokenizer)
    assert described(trace)[0] == 160


def test_the_claude_code_sessions_have_all_requests_of_agents_and_subagents_in_order():
    trace = open_trace(traces_folder() / "claude-code" / "sessions.jsonl.gz")
    arrivals, sessions, num_blocks = [], set(), 0
    for request in trace:
        arrivals.append(request.arrival_s)
        sessions.add(request.session)
        num_blocks += len(request.prompt.hash_ids)
    assert (trace.kind, trace.block_size, len(sessions)) == ("sessions", 64, 668)
    assert (len(arrivals), num_blocks) == (44087, 80863609)
    assert (np.diff(arrivals) >= 0).all()


@pytest.mark.parametrize("block_size", [16, 64])
def test_a_trace_in_mooncakes_form_has_the_same_references(tmp_path, block_size):
    trace = open_trace(traces_folder() / "sharegpt-tokens" / "sharegpt-llama-3.1-8b-300-sps10.jsonl.gz")
    mooncake.write(trace, tmp_path / "m.jsonl.zst", block_size=block_size)
    again = references_of(open_trace(tmp_path / "m.jsonl.zst"))
    expected = references_of(trace, block_size)
    full = [
        again.ids[start : start + request.prompt.num_tokens // block_size]
        for start, request in zip(again.starts.tolist(), trace, strict=False)
    ]
    _, numbers = np.unique(np.concatenate(full), return_inverse=True)
    _, expected_numbers = np.unique(expected.ids, return_inverse=True)
    assert same_partition(numbers, expected_numbers)


def same_partition(one, other):
    """Whether two arrays are equal but for what their elements are called."""
    return len(one) == len(other) and len({*zip(one.tolist(), other.tolist(), strict=True)}) == len(
        set(one.tolist())
    ) == len(set(other.tolist()))
