"""Traces served by the real manager in simulated time."""

from dataclasses import replace

import numpy as np
import pytest
from tests.lab.forests import forest, hashed, token_requests, traces_folder

from kvist import AttentionSpec, HostTier, Retention, StateSpec
from kvist.errors import ArgumentError, ConfigError
from kvist.lab.curves import lru_curve, references_of
from kvist.lab.replay import CostModel, ReplayConfig, SlowTier, grid, replay
from kvist.lab.replay.serving import Serving
from kvist.lab.traces import open_trace
from kvist.lab.traces.requests import Request, TokenPrompt

FREE = CostModel(prefill_tokens_per_s=1e9, step_s=0.0, decode_s=0.0)
SECONDS = CostModel(prefill_tokens_per_s=1.0, step_s=0.5, decode_s=0.25, max_step_tokens=8)
"""A step takes half a second, a second for each prompt token, a quarter for each sequence that decodes."""
ONE_LAYER = [AttentionSpec(1, 8)]


def asking(num_tokens, first=0, *, output=0, arrival_s=0.0, **fields):
    """A request for tokens `first`, `first + 1`, ..."""
    prompt = TokenPrompt(np.arange(first, first + num_tokens, dtype=np.int32))
    return Request(prompt, arrival_s, output, **fields)


def config(num_blocks, **settings):
    return ReplayConfig(**{"num_blocks": num_blocks, "block_size": 4, "cost": FREE, "layers": ONE_LAYER} | settings)


def plain(result):
    """What must be the same whenever and wherever it is replayed."""
    return replace(result, wall_s=0.0)


# -- hits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [8, 9, 10, 12, 15, 20, 30, 40, 60, 100, 200, 1000])
def test_replayed_lru_hits_what_the_curve_says(num_blocks):
    requests = hashed(*forest(1, num_requests=400, fan_out=3, longest=8))
    result = replay(requests, config(num_blocks, policy="lru", content="blocks"))
    references = references_of(requests)
    expected = lru_curve(references, [num_blocks]).hit_rate[0]
    assert result.num_hit_blocks == round(expected * references.num_references)
    assert (result.num_requests, result.num_references) == (400, references.num_references)
    assert result.hit_rate_blocks == expected


def test_replayed_lru_hits_what_the_curve_says_of_token_prompts_shorter_than_a_block_too():
    rng = np.random.default_rng(2)
    prompts = [[int(each) for each in rng.integers(0, 2, rng.integers(1, 12))] for _ in range(300)]
    requests = token_requests(*prompts)
    for num_blocks in (5, 9, 20):
        result = replay(requests, config(num_blocks, block_size=2, policy="lru", content="blocks"))
        references = references_of(requests, 2)
        assert result.num_references == references.num_references
        assert result.hit_rate_blocks == lru_curve(references, [num_blocks]).hit_rate[0]


def test_as_tokens_the_last_of_a_prompt_is_computed_and_partly_filled_blocks_are_found():
    result = replay([asking(8), asking(8), asking(11)], config(8))
    assert result.hit_tokens_by_tier == {"device": 7 + 8}
    assert (result.num_references, result.num_hit_blocks) == (2 + 2 + 2, 1 + 2)
    assert result.hit_rate_tokens == 15 / 27
    assert result.misses == {"cold": 7 - 0, "under a block": 2}


def test_outputs_that_the_trace_has_are_found_by_the_next_turn():
    first = Request(TokenPrompt(np.arange(6, dtype=np.int32)), 0.0, 3, np.array([6, 7, 8], np.int32))
    assert replay([first, asking(10)], config(8)).hit_tokens_by_tier == {"device": 8}
    assert replay([first, asking(10)], config(8, outputs="none")).hit_tokens_by_tier == {"device": 6}


def test_outputs_that_the_trace_does_not_have_take_blocks_and_stay_only_if_asked_to():
    requests = [asking(4, output=13), asking(4, 100), asking(5)]
    held = replay(requests, config(6))
    kept = replay(requests, config(6, outputs="all"))
    none = replay(requests, config(6, outputs="none"))
    assert (held.num_peak_blocks, kept.num_peak_blocks, none.num_peak_blocks) == (4, 4, 2)
    assert (held.hit_rate_blocks, kept.hit_rate_blocks) == (none.hit_rate_blocks, 1 / 3)
    after = [Serving(config(6, outputs=outputs), 4) for outputs in ("known", "all")]
    for serving in after:
        list(serving.run(iter(requests[:1])))
    assert [serving.manager.stats().num_free_blocks for serving in after] == [6, 6]
    assert [6 - sum(pool.num_free for pool in serving.manager._state.pools) for serving in after] == [1, 4]


def test_namespaces_share_nothing_and_are_counted_apart():
    requests = [asking(8, namespace=("a",)), asking(8, namespace=("b", 7)), asking(9, namespace=("a",))]
    result = replay(requests, config(8))
    assert result.by_namespace == {
        "a": {"prompt_tokens": 17, "hit_tokens": 8},
        "b/7": {"prompt_tokens": 8, "hit_tokens": 0},
    }
    assert result.misses["other namespace"] == 7
    assert result.series[-1]["by_namespace"] == {"a": 2, "b/7": 2}
    assert result.series[-1]["occupancy"] == {"device": 5}


def test_what_retention_asks_for_stays_longer():
    system, others = asking(8), [asking(8, 100 * n) for n in range(1, 5)]
    requests = [system, *others, system]
    asked = Retention([(0, 8, 90, None)])
    assert replay(requests, config(6)).num_hit_blocks == 0
    first = replay(requests, config(6, retention=asked))
    assert first.num_hit_blocks == 0  # all ask for the same, so it is as if none did
    tagged = Retention([(0, 4, 90, None), (4, 8, 10, None)])
    assert replay([*requests, asking(5)], config(6, retention=tagged)).num_hit_blocks == 2


def test_policies_and_sizes_are_those_of_the_manager():
    popular = [asking(5) for _ in range(4)]
    scan = [asking(4, 100 * n) for n in range(1, 9)]
    requests = [*popular, *scan, asking(5)]
    assert replay(requests, config(4, policy="lfu")).num_hit_blocks == 4
    assert replay(requests, config(4, policy="lru")).num_hit_blocks == 3
    assert replay(requests, config(20, policy="lru")).num_hit_blocks == 4


@pytest.mark.parametrize("policy", ["cost", "fifo", "lfu", "lru", "priority", "s3fifo", "slru"])
def test_every_policy_serves_under_pressure_and_the_books_are_right(policy):
    rng = np.random.default_rng(3)
    requests = [
        replace(request, arrival_s=at * 3.0, num_output_tokens=int(rng.integers(0, 30)))
        for at, request in enumerate(hashed(*forest(4, num_requests=150, fan_out=2)))
    ]
    tried = config(
        18, policy=policy, concurrency=5, arrivals="trace", outputs="all", tiers=[HostTier(num_blocks=9), SlowTier()],
        cost=SECONDS,
    )  # fmt: skip
    serving = Serving(tried, 4)
    for _ in serving.run(iter(requests)):
        serving.manager.check()
    stats = serving.manager.stats()
    assert (stats.num_sequences, stats.num_suspended_now, stats.num_admitted) == (0, 0, 150)
    assert serving.tally.num_requests == 150
    result = serving.result("", wall_s=0.0, is_complete=True)
    assert result.num_preemptions > 0
    assert set(result.hit_tokens_by_tier) == {"device", "host", "disk"}


def test_equal_replays_have_equal_results():
    requests = hashed(*forest(6, num_requests=100), num_output_tokens=9)
    tried = config(20, concurrency=3, tiers=[HostTier(num_blocks=4)], cost=SECONDS)
    assert plain(replay(requests, tried)) == plain(replay(requests, tried))


@pytest.mark.parametrize(
    "layers",
    [
        [AttentionSpec(1, 8), AttentionSpec(1, 8, sliding_window=6)],
        [AttentionSpec(1, 8, sliding_window=6)],
        [AttentionSpec(1, 8), StateSpec([(4,)])],
    ],
)
def test_models_with_windows_and_states_are_served_too(layers):
    requests = hashed(*forest(7, num_requests=80, fan_out=2), num_output_tokens=9)
    serving = Serving(config(40, layers=layers, concurrency=3, cost=SECONDS, tiers=[SlowTier()]), 4)
    for _ in serving.run(iter(requests)):
        serving.manager.check()
    result = serving.result("", wall_s=0.0, is_complete=True)
    assert result.num_requests == 80
    assert result.num_hit_blocks > 0


# -- time -------------------------------------------------------------------------------------------------------------


def test_the_first_token_comes_when_the_prompt_is_computed_in_chunks():
    result = replay([asking(20, output=3)], config(8, cost=SECONDS))
    # two steps of 8 tokens and one of 4, then two steps that decode
    assert result.ttft_s["p50"] == 2 * 8.5 + 4.5
    assert result.duration_s == 21.5 + 2 * 0.75


def test_what_is_cached_need_not_be_computed():
    result = replay([asking(8), asking(8)], config(8, cost=SECONDS))
    assert result.ttft_s["p99"] == pytest.approx(8.5, abs=0.1)
    assert result.duration_s == 8.5 + 1.5


def test_a_prompt_of_many_chunks_lets_others_decode_a_token_in_each():
    requests = [asking(4, output=10), asking(21, 100, output=1)]
    result = replay(requests, config(16, concurrency=2, cost=SECONDS))
    # both in the first step (4 + 4), then chunks of 7 beside one that decodes: 7, 7 and 3; then 6 tokens alone
    first, second = 8.5, 8.5 + 2 * 7.75 + 3.75
    assert result.ttft_s["p50"] == (first + second) / 2
    assert result.duration_s == second + 6 * 0.75


def test_requests_of_a_trace_wait_until_they_come_and_until_there_is_a_place():
    requests = [asking(4, arrival_s=10.0), asking(4, 100, arrival_s=11.0), asking(4, 200, arrival_s=100.0)]
    result = replay(requests, config(8, arrivals="trace", cost=SECONDS))
    assert result.ttft_s["p90"] == pytest.approx(np.percentile([4.5, 8.0, 4.5], 90))
    assert result.duration_s == 104.5
    asap = replay(requests, config(8, cost=SECONDS))
    assert asap.duration_s == 3 * 4.5
    assert asap.ttft_s["p99"] == 4.5


def test_an_arrival_joins_the_sequences_that_decode_at_the_next_step():
    requests = [asking(4, output=101), asking(4, 100, output=1, arrival_s=10.0)]
    result = replay(requests, config(32, arrivals="trace", concurrency=2, cost=SECONDS))
    # the first one's steps end at 4.5, 5.25, ... and the one at 10.5 is the first after the arrival
    assert result.ttft_s["p99"] == pytest.approx(np.percentile([4.5, 0.5 + 0.5 + 4 + 0.25], 99))


def test_many_decode_steps_are_one_stride():
    result = replay([asking(4, output=1_000_001)], config(250_010, cost=SECONDS))
    assert result.duration_s == 4.5 + 1_000_000 * 0.75
    assert result.num_peak_blocks == 250_001


# -- room -------------------------------------------------------------------------------------------------------------


def test_running_sequences_hold_their_blocks_so_the_next_one_waits():
    requests = [asking(8, output=40), asking(8, 100)]
    alone = replay(requests, config(12, concurrency=1, cost=SECONDS))
    both = replay(requests, config(14, concurrency=2, cost=SECONDS))
    waits = replay(requests, config(12, concurrency=2, cost=SECONDS))
    assert both.num_peak_blocks == 12
    assert waits.num_requests == both.num_requests == 2
    assert both.duration_s < alone.duration_s


def test_the_latest_is_preempted_for_want_of_blocks_and_computes_again_what_is_lost():
    requests = [asking(8, output=17), asking(8, 100, output=17)]
    result = replay(requests, config(8, concurrency=2, cost=SECONDS))
    assert result.num_preemptions == 1
    assert result.num_recomputed_tokens > 0
    assert (result.num_requests, result.num_never_fit) == (2, 0)
    roomy = replay(requests, config(12, concurrency=2, cost=SECONDS))
    assert roomy.num_preemptions == 0
    assert roomy.duration_s < result.duration_s


def test_requests_that_can_never_fit_are_passed_over_and_counted():
    requests = [asking(4), asking(40), asking(8, output=100), asking(5)]
    result = replay(requests, config(4))
    assert (result.num_requests, result.num_never_fit) == (4, 2)
    assert (result.num_prompt_tokens, result.num_hit_blocks) == (9, 1)
    assert replay(requests, config(4, max_sequence_length=4)).num_never_fit == 3


def test_a_prompt_without_tokens_is_passed_over():
    assert replay([asking(0), asking(4)], config(4)).num_prompt_tokens == 4


def test_an_empty_trace_has_empty_results():
    result = replay([], config(4))
    assert (result.num_requests, result.hit_rate_blocks, result.hit_rate_tokens) == (0, 0.0, 0.0)
    assert result.ttft_s == {"p50": 0.0, "p90": 0.0, "p99": 0.0}


# -- tiers ------------------------------------------------------------------------------------------------------------


def test_what_the_device_evicts_comes_back_from_host_memory_and_takes_its_time():
    requests = [asking(9), asking(12, 100), asking(9)]
    token_bytes = 2 * 8 * 2
    slow = replace(SECONDS, host_bytes_per_s=float(token_bytes), host_latency_s=3.0)
    result = replay(requests, config(3, tiers=[HostTier(num_blocks=8)], cost=slow))
    assert result.hit_tokens_by_tier == {"device": 0, "host": 8}
    # 8.5 and 1.5, 8.5 and 4.5 to compute; then 3 and a second for each of 8 tokens, and one token to compute
    assert result.duration_s == (8.5 + 1.5) + (8.5 + 4.5) + (3 + 8 + 1.5)
    assert result.evictions["host evicted"] == 0


def test_what_both_have_forgotten_comes_from_disk_unless_computing_it_is_faster():
    requests = [asking(9), asking(12, 100), asking(12, 200), asking(9)]
    disk = SlowTier("disk", num_blocks=100, latency_s=0.5, bytes_per_s=1e9)
    result = replay(requests, config(3, tiers=[disk], cost=SECONDS))
    assert result.hit_tokens_by_tier == {"device": 0, "disk": 8}
    assert result.ttft_s["p50"] > 0
    slower = replay(requests, config(3, tiers=[replace(disk, latency_s=20.0)], cost=SECONDS))
    assert slower.hit_tokens_by_tier == {"device": 0, "disk": 0}


def test_a_slow_tier_forgets_the_least_recently_used_and_a_faster_one_keeps_what_came():
    requests = [asking(9), asking(9, 100), asking(9, 200), asking(9)]
    near, far = SlowTier("disk", num_blocks=2, latency_s=0.0), SlowTier("remote", num_blocks=100, latency_s=0.0)
    result = replay([*requests, asking(9, 100)], config(3, tiers=[near, far], cost=SECONDS))
    assert result.hit_tokens_by_tier == {"device": 0, "disk": 0, "remote": 16}
    assert result.evictions["disk evicted"] == 8


def test_a_request_whose_blocks_are_coming_does_not_hold_up_others():
    disk = SlowTier("disk", latency_s=6.0, bytes_per_s=1e12)
    requests = [asking(13), *(asking(12, 100 * n) for n in (1, 2)), asking(13), asking(4, 900)]
    result = replay(requests, config(5, tiers=[disk], cost=SECONDS, concurrency=1))
    together = replay(requests, config(5, tiers=[disk], cost=SECONDS, concurrency=2))
    assert result.hit_tokens_by_tier["disk"] == together.hit_tokens_by_tier["disk"] == 12
    assert together.duration_s < result.duration_s


# -- settings ---------------------------------------------------------------------------------------------------------


def test_settings_that_cannot_be_are_refused_together():
    wrong = config(
        4, arrivals="soon", content="letters", concurrency=0, tiers=[SlowTier("host"), SlowTier("host", num_blocks=0)]
    )
    with pytest.raises(ConfigError) as caught:
        replay([], wrong)
    assert len(caught.value.problems) == 7
    with pytest.raises(ConfigError, match="policy"):
        replay([], config(4, policy="newest"))
    with pytest.raises(ConfigError, match="num_blocks"):
        replay([], config([]))
    with pytest.raises(ConfigError, match="size: a replay has no such setting"):
        grid(config(4), size=[1])


def test_a_cost_that_cannot_be_is_refused():
    for wrong in ({"prefill_tokens_per_s": 0.0}, {"step_s": -1.0}, {"decode_s": float("nan")}, {"max_step_tokens": 0}):
        with pytest.raises(ArgumentError, match=f"cost: {next(iter(wrong))} is"):
            CostModel(**wrong)


def test_a_series_keeps_at_most_128_points_and_their_hit_rates_add_up():
    requests = hashed(*forest(8, num_requests=1_000))
    result = replay(requests, config(30))
    points = result.series
    assert 64 <= len(points) <= 128
    tokens = sum(point["num_prompt_tokens"] for point in points)
    hits = sum(point["num_prompt_tokens"] * point["hit_rate"] for point in points)
    assert hits / tokens == pytest.approx(result.hit_rate_tokens, abs=0.02)
    assert [point["num_requests"] for point in points] == sorted(point["num_requests"] for point in points)


# -- other people's traces --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_blocks", [300, 500, 1_000, 1_827, 3_000, 5_000, 10_000, 18_279, 30_000, 50_000, 100_000, 182_790]
)
def test_replayed_lru_hits_what_the_curve_says_on_the_mooncake_conversations(num_blocks):
    trace = open_trace(traces_folder() / "mooncake" / "conversation_trace.jsonl.gz")
    result = replay(trace, ReplayConfig(num_blocks=num_blocks, policy="lru", content="blocks", cost=FREE))
    curve = lru_curve(references_of(trace), [num_blocks])
    assert (result.num_requests, result.num_references, result.num_never_fit) == (12_031, 288_500, 0)
    assert result.num_hit_blocks == round(curve.hit_rate[0] * 288_500)


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [12_000, 60_000])
def test_replayed_lru_hits_what_the_curve_says_on_coding_sessions(num_blocks):
    trace = open_trace(traces_folder() / "claude-code" / "sessions.jsonl.gz", limit=2_000)
    result = replay(trace, ReplayConfig(num_blocks=num_blocks, policy="lru", content="blocks", cost=FREE))
    curve = lru_curve(references_of(trace), [num_blocks])
    assert result.num_never_fit == 0
    assert result.num_hit_blocks == round(curve.hit_rate[0] * result.num_references)
