"""The generator: the same for a seed anywhere, and with the distributions that it says."""

import hashlib
import math
import subprocess
import sys
from itertools import islice, pairwise
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.errors import ArgumentError
from kvist.lab.curves import lru_curve, references_of
from kvist.lab.synthetic import WORKLOADS, Agents, Chat, Retrieval, SharedPrompts, SyntheticTrace, Workload
from kvist.lab.synthetic.draws import Draw
from kvist.lab.synthetic.segments import Segment, block_ids, tokens_of
from kvist.lab.traces import mooncake, open_trace, tokens

NUM_DRAWS = 20_000


def test_the_same_seed_gives_the_same_bytes_in_another_process(tmp_path):
    program = (
        "import sys; from pathlib import Path; from kvist.lab.traces import mooncake; "
        "from kvist.lab.synthetic import *; "
        "mooncake.write(SyntheticTrace(WORKLOADS['mixed'], 200, seed=5), Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "other.jsonl")], check=True)
    mooncake.write(SyntheticTrace(WORKLOADS["mixed"], 200, seed=5), tmp_path / "here.jsonl")
    assert (tmp_path / "other.jsonl").read_bytes() == (tmp_path / "here.jsonl").read_bytes()


def test_a_seed_means_what_it_meant_before(tmp_path):
    mooncake.write(SyntheticTrace(WORKLOADS["mixed"], 100, seed=1, block_size=512), tmp_path / "m.jsonl")
    assert hashlib.sha256((tmp_path / "m.jsonl").read_bytes()).hexdigest()[:16] == "f71de37dc38c19a6"


def test_another_seed_gives_other_requests():
    one, other = ([r.prompt.num_tokens for r in SyntheticTrace(WORKLOADS["mixed"], 50, seed=seed)] for seed in (1, 2))
    assert one != other


@pytest.mark.parametrize("name", WORKLOADS)
def test_requests_come_in_order_and_as_many_as_asked_for(name):
    requests = list(SyntheticTrace(WORKLOADS[name], 300, seed=2, block_size=16))
    assert len(requests) == 300
    assert all(one.arrival_s <= other.arrival_s for one, other in pairwise(requests))
    assert all(len(r.prompt.hash_ids) == -(-r.prompt.num_tokens // 16) for r in requests)
    assert [r.line for r in requests] == list(range(1, 301))


@pytest.mark.parametrize("name", WORKLOADS)
def test_token_ids_and_ids_of_blocks_say_the_same_of_what_is_shared(name):
    """Up to full blocks: the last, partly filled one has an id of its own."""
    workload = WORKLOADS[name]
    hashed, plain = (SyntheticTrace(workload, 60, seed=3, block_size=size) for size in (16, None))
    full = [r.prompt.hash_ids[: r.prompt.num_tokens // 16] for r in hashed]
    expected = references_of(plain, 16)
    _, numbers = np.unique(np.concatenate(full), return_inverse=True)
    pairs = {*zip(numbers.tolist(), expected.ids.tolist(), strict=True)}
    assert len(pairs) == len(set(numbers.tolist())) == expected.num_unique


def test_a_chat_goes_on_from_its_answers():
    sessions = {}
    for request in SyntheticTrace(WORKLOADS["chat"], 200, seed=4):
        sessions.setdefault(request.session, []).append(request)
    pairs = [pair for each in sessions.values() for pair in pairwise(each)]
    assert len(pairs) > 100
    for one, other in pairs:
        before = np.concatenate([one.prompt.tokens(), one.output])
        assert other.prompt.num_tokens > len(before)
        assert (other.prompt.tokens()[: len(before)] == before).all()
        assert other.arrival_s > one.arrival_s + one.num_output_tokens * 0.02


def test_sessions_begin_as_a_poisson_process():
    """Times between them are exponential: their mean is 1 / rate, and a share of 1 / e of them is above that."""
    workload = Workload({SharedPrompts(): 1.0}, sessions_per_s=5.0)
    times = [request.arrival_s for request in SyntheticTrace(workload, NUM_DRAWS, seed=1, block_size=512)]
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps.std() == pytest.approx(0.2, rel=0.05)
    assert (gaps > 0.2).mean() == pytest.approx(1 / math.e, abs=0.015)
    assert np.corrcoef(gaps[:-1], gaps[1:])[0, 1] == pytest.approx(0, abs=0.03)


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.5])
def test_popularity_follows_zipf(exponent):
    draw = Draw(7, "zipf")
    counts = np.bincount([draw.zipf(10, exponent) for _ in range(NUM_DRAWS)], minlength=10) / NUM_DRAWS
    weights = np.arange(1, 11) ** -exponent
    assert counts == pytest.approx(weights / weights.sum(), abs=0.012)


def test_lengths_are_log_normal_with_their_mean():
    draw = Draw(7, "length")
    lengths = [draw.length(500, 0.8) for _ in range(NUM_DRAWS)]
    assert fmean(lengths) == pytest.approx(500, rel=0.04)
    assert np.log(lengths).std() == pytest.approx(0.8, rel=0.03)
    assert np.median(lengths) == pytest.approx(500 * math.exp(-0.32), rel=0.03)


def test_turns_are_geometric():
    draw = Draw(7, "turns")
    turns = np.array([draw.geometric(5) for _ in range(NUM_DRAWS)])
    assert turns.mean() == pytest.approx(5, rel=0.04)
    assert (turns == 1).mean() == pytest.approx(0.2, abs=0.012)
    assert {draw.geometric(1) for _ in range(100)} == {1}


def test_kinds_come_with_their_weights():
    draw = Draw(7, "choice")
    counts = np.bincount([draw.choice((4.0, 1.0)) for _ in range(NUM_DRAWS)]) / NUM_DRAWS
    assert counts == pytest.approx([0.8, 0.2], abs=0.012)


def test_thinking_takes_its_mean_time():
    pauses = [step.pause_s for n in range(1500) for step in Chat(think_s=12).steps(Draw(n, "s"), 0)]
    assert fmean(pauses) == pytest.approx(12, rel=0.05)


def test_documents_are_asked_for_by_popularity_and_never_twice_in_a_prompt():
    kind = Retrieval(num_documents=50, documents_per_request=3, zipf=1.0)
    found = [next(kind.steps(Draw(n, "s"), 0)).new for n in range(4000)]
    documents = [segment.id for new in found for segment in new[1:4]]
    assert all(len({segment.id for segment in new}) == 5 for new in found)
    assert len(set(documents)) == 50
    counts = sorted(np.unique(documents, return_counts=True)[1].tolist(), reverse=True)
    assert counts[0] > 4 * counts[9] > 8 * counts[49] > 0


def test_the_more_popular_the_popular_prompts_the_more_hits_a_small_cache_has():
    def hit_rate(zipf):
        workload = Workload({SharedPrompts(num_prompts=200, zipf=zipf): 1.0})
        return lru_curve(references_of(SyntheticTrace(workload, 3000, seed=1, block_size=16)), [2000]).hit_rate[0]

    assert hit_rate(0.0) < hit_rate(1.0) < hit_rate(2.0)


def test_agents_hit_more_than_questions_about_documents():
    def ceiling(name):
        references = references_of(SyntheticTrace(WORKLOADS[name], 1000, seed=1, block_size=16))
        return 1 - references.num_unique / references.num_references

    assert ceiling("agents") > 0.9
    assert 0.05 < ceiling("rag") < 0.5


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=5), st.integers(1, 6))
def test_ids_of_blocks_are_equal_exactly_where_tokens_are_up_to_there(parts, size):
    segments = [Segment(*part) for part in parts]
    shorter = [*segments[:-1], Segment(segments[-1].id, segments[-1].num_tokens + 3)]
    one, other = (block_ids(each, size).tolist() for each in (segments, shorter))
    first, second = (tokens_of(each).tolist() for each in (segments, shorter))
    assert second[: len(first)] == first
    num_full = len(first) // size
    assert one[:num_full] == other[:num_full]
    assert len(set(one)) == len(one)
    if len(first) % size:
        assert one[num_full] != other[num_full]


def test_segments_that_differ_in_length_are_told_apart_by_what_follows():
    one, other = [Segment(1, 4), Segment(2, 4)], [Segment(1, 5), Segment(2, 3)]
    assert block_ids(one, 4)[0] == block_ids(other, 4)[0]
    assert block_ids(one, 4)[1] != block_ids(other, 4)[1]


def test_no_session_gets_longer_than_allowed():
    workload = Workload({Agents(): 1.0}, max_tokens=9000)
    lengths = [request.prompt.num_tokens for request in SyntheticTrace(workload, 500, seed=1, block_size=512)]
    assert 8000 < max(lengths) <= 9000


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Chat(turns=0), "turns is 0"),
        (lambda: Retrieval(num_documents=3, documents_per_request=4), "4 documents a request"),
        (lambda: Workload({}), "needs kinds"),
        (lambda: Workload({Chat(): -1.0}), "weights above 0"),
        (lambda: Workload({Chat(): 1.0}, sessions_per_s=0), "sessions_per_s is 0"),
        (lambda: SyntheticTrace(WORKLOADS["chat"], -1), "num_requests is -1"),
        (lambda: SyntheticTrace(WORKLOADS["chat"], 1, block_size=0), "block_size 0"),
        (lambda: next(iter(SyntheticTrace(Workload({Agents(): 1.0}, max_tokens=5), 1))), "raise max_tokens"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, said):
    with pytest.raises(ArgumentError, match=said):
        make()


@pytest.mark.parametrize("writer", [mooncake.write, tokens.write])
def test_a_workload_can_be_written_and_read(tmp_path, writer):
    size = 16 if writer is mooncake.write else None
    trace = SyntheticTrace(WORKLOADS["mixed"], 40, seed=1, block_size=size)
    writer(trace, tmp_path / "w.jsonl.gz")
    again = list(open_trace(tmp_path / "w.jsonl.gz"))
    assert [r.arrival_s for r in again] == pytest.approx([r.arrival_s for r in trace], abs=1e-6)
    assert [r.session for r in again] == [r.session for r in trace]
    assert references_of(again, 16).ids.tolist() == references_of(trace, 16).ids.tolist()


def test_no_more_than_asked_for_is_made():
    assert list(islice(SyntheticTrace(WORKLOADS["chat"], 0), 1)) == []
