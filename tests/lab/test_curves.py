"""Hit rates over sizes: exact, sampled, and what is read off them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.lab.forests import asked, forest, hashed, hits_of_lru, token_requests, traces_folder

from kvist.errors import ArgumentError
from kvist.lab.curves import (
    Curve,
    curve_of_sample,
    knee,
    lru_curve,
    references_of,
    regret,
    sampled_curve,
    sizes_for,
    stack_distances,
)
from kvist.lab.curves.distances import weight_of_greater_before
from kvist.lab.traces import open_trace


def test_a_block_is_as_deep_as_the_blocks_used_since_and_a_request_is_touched_from_its_tail():
    distances = stack_distances(asked([0, 1, 2], [0, 3], [0, 1, 2], [0, 3]))
    assert distances.tolist() == [0, 0, 0, 1, 0, 1, 3, 4, 1, 4]


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 5, 8, 13, 40, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_the_curve_is_what_a_dict_hits_at_each_size(num_blocks, seed):
    prompts = forest(seed, num_requests=200)
    curve = lru_curve(asked(*prompts), [num_blocks])
    assert curve.hit_rate[0] * sum(map(len, prompts)) == pytest.approx(hits_of_lru(prompts, num_blocks))


@given(st.permutations(range(9)))
def test_the_weights_of_greater_numbers_before_each_are_added_up(numbers):
    expected = [sum(10**before for before in numbers[:at] if before > each) for at, each in enumerate(numbers)]
    ranks = np.array(numbers)
    assert weight_of_greater_before(ranks, 10**ranks).tolist() == expected


def test_the_whole_curve_agrees_with_itself_at_given_sizes():
    references = asked(*forest(5, num_requests=300))
    sizes = np.arange(1, references.num_unique + 2)
    whole, at_sizes = lru_curve(references), lru_curve(references, sizes)
    assert whole.at(sizes).tolist() == at_sizes.hit_rate.tolist()
    assert (np.diff(whole.hit_rate) > 0).all()
    assert whole.hit_rate[-1] == pytest.approx(1 - references.num_unique / references.num_references)


@pytest.mark.parametrize("prompts", [[], [[]], [[], [0, 1]]])
def test_a_trace_in_which_nothing_comes_again_never_hits(prompts):
    references = asked(*prompts)
    assert lru_curve(references).num_blocks.tolist() == []
    assert lru_curve(references, [1, 10]).hit_rate.tolist() == [0.0, 0.0]
    assert knee(lru_curve(references)) is None
    assert curve_of_sample(references, [1, 10]).hit_rate.tolist() == [0.0, 0.0]


def test_sizes_are_positive_ints():
    for sizes in ([0, 1], [1.5], [[1]]):
        with pytest.raises(ArgumentError, match="must be positive ints"):
            lru_curve(asked([0]), sizes)


# -- references -------------------------------------------------------------------------------------------------------


def test_token_prompts_refer_to_their_full_blocks_and_equal_prefixes_are_one_block():
    references = references_of(token_requests([1, 2, 3, 4, 5], [1, 2, 3, 4], [3, 4, 1, 2], [7]), block_size=2)
    assert references.ids.tolist() == [0, 1, 0, 1, 2, 3]
    assert references.starts.tolist() == [0, 2, 4, 6, 6]


def test_ids_of_a_trace_are_its_references_as_they_are_the_last_partly_filled_one_too():
    requests = hashed([10, 11], [10, 12])
    references = references_of(requests)
    assert (references.block_size, references.ids.tolist()) == (4, [0, 1, 0, 2])


def test_other_block_sizes_divide_the_tokens_that_stand_for_ids():
    requests = hashed([10, 11, 12], [10, 11, 13])
    assert references_of(requests, 2).ids.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 6, 7]
    assert references_of(requests, 8).ids.tolist() == [0, 0]


def test_namespaces_and_salts_have_blocks_of_their_own():
    requests = [
        *hashed([1, 2]),
        *hashed([1, 2], namespace=("a",)),
        *hashed([1, 2], namespace=("b",)),
        *hashed([1, 2], namespace=("a",)),
    ]
    assert references_of(requests).ids.tolist() == [0, 1, 2, 3, 4, 5, 2, 3]


def test_an_id_after_another_prefix_is_another_block():
    assert references_of(hashed([1, 2, 3], [9, 2, 3])).ids.tolist() == [0, 1, 2, 3, 4, 5]


def test_bad_block_sizes_and_rates_are_refused():
    with pytest.raises(ArgumentError, match="block_size is 0"):
        references_of([], 0)
    for rate in (0.0, 1.5):
        with pytest.raises(ArgumentError, match="rate is"):
            references_of([], rate=rate)


# -- samples ----------------------------------------------------------------------------------------------------------


def test_a_sample_of_all_blocks_is_exact():
    references = asked(*forest(7, num_requests=300))
    sizes = sizes_for(references, 20)
    assert sampled_curve(references, 1.0, sizes=sizes).hit_rate == pytest.approx(lru_curve(references, sizes).hit_rate)


def test_a_sample_is_within_its_error_nearly_everywhere():
    references = asked(*forest(8, num_requests=20_000, fan_out=4, longest=12))
    sizes = np.geomspace(200, references.num_unique, 12).astype(np.int64)
    exact = lru_curve(references, sizes).hit_rate
    off = [np.abs((curve := sampled_curve(references, 0.1, seed, sizes)).hit_rate - exact) for seed in range(5)]
    within = [difference <= sampled_curve(references, 0.1, seed, sizes).error for seed, difference in enumerate(off)]
    assert np.mean(within) >= 0.9
    assert np.mean(off) < 0.02
    assert curve.error is not None


def test_a_trace_can_be_sampled_while_it_is_read():
    requests = hashed(*forest(9, num_requests=3_000, fan_out=4, longest=10))
    sample = references_of(requests, rate=0.2, seed=3)
    whole = references_of(requests)
    assert (sample.num_seen, sample.num_requests) == (whole.num_references, whole.num_requests)
    assert 0.1 < sample.num_unique / whole.num_unique < 0.3
    estimate = curve_of_sample(sample, [50, 5_000])
    assert np.abs(estimate.hit_rate - lru_curve(whole, [50, 5_000]).hit_rate).max() < 0.1


def test_samples_differ_by_seed_and_are_the_same_for_the_same():
    references = asked(*forest(10, num_requests=200))
    first, again, other = (references.sampled(0.5, seed) for seed in (1, 1, 2))
    assert first.starts.tolist() == again.starts.tolist()
    assert first.starts.tolist() != other.starts.tolist()


# -- reading a curve --------------------------------------------------------------------------------------------------


def test_a_curve_can_be_thinned_and_keeps_its_end():
    sizes = np.arange(1, 10_001)
    thin = Curve("lru", sizes, sizes / 20_000).thinned(100)
    assert len(thin.num_blocks) <= 100
    assert (thin.num_blocks[0], thin.num_blocks[-1], thin.hit_rate[-1]) == (1, 10_000, 0.5)
    assert thin.thinned(100) is thin


def test_the_knee_is_where_the_curve_is_farthest_above_the_line_to_its_end():
    curve = Curve("lru", np.array([10, 20, 30, 40, 1000]), np.array([0.1, 0.2, 0.3, 0.4, 0.5]))
    assert (knee(curve).num_blocks, knee(curve).hit_rate) == (40, 0.4)
    flat_end = Curve("lru", np.array([10, 20, 30, 1000]), np.array([0.3, 0.4, 0.5, 0.5]))
    assert knee(flat_end).num_blocks == 10


def test_regret_is_what_is_missing_to_the_optimum_at_the_same_sizes():
    optimal = Curve("optimal", np.array([1, 2, 4]), np.array([0.25, 0.5, 0.75]))
    assert regret(Curve("lru", np.array([1, 4]), np.array([0.25, 0.5])), optimal).tolist() == [0.0, 0.25]
    with pytest.raises(ArgumentError, match=r"not known at \[3\] blocks"):
        regret(Curve("lru", np.array([3, 4]), np.array([0.25, 0.5])), optimal)


# -- other people's traces --------------------------------------------------------------------------------------------


def test_lru_on_the_mooncake_conversations_is_what_an_independent_one_found():
    references = references_of(open_trace(traces_folder() / "mooncake" / "conversation_trace.jsonl.gz"))
    assert (references.num_requests, references.num_references, references.num_unique) == (12_031, 288_500, 182_790)
    curve = lru_curve(references)
    shares = [int(references.num_unique * share) for share in (0.01, 0.05, 0.10, 0.25, 0.50)]
    assert curve.at(shares).round(3).tolist() == [0.052, 0.196, 0.279, 0.353, 0.363]
    sizes = [1_000, 10_000, 30_000, 50_000, 100_000]
    assert curve.at(sizes).round(3).tolist() == [0.045, 0.212, 0.326, 0.355, 0.364]
    assert round(float(curve.hit_rate[-1]), 3) == 0.366


def test_lru_on_the_sharegpt_tokens_is_what_an_independent_one_found():
    folder = traces_folder() / "sharegpt-tokens"
    references = references_of(open_trace(f"tokens:{folder / 'sharegpt-llama-3.1-8b-300-sps10.jsonl.gz'}"))
    assert (references.num_requests, references.num_references, references.num_unique) == (300, 15_942, 14_722)
    curve = lru_curve(references)
    shares = [int(references.num_unique * share) for share in (0.01, 0.05, 0.10, 0.25, 0.50)]
    assert curve.at(shares).round(3).tolist() == [0.002, 0.009, 0.014, 0.041, 0.068]
    assert round(float(curve.hit_rate[-1]), 3) == 0.077


def test_a_sample_of_the_mooncake_conversations_is_within_its_error():
    references = references_of(open_trace(traces_folder() / "mooncake" / "conversation_trace.jsonl.gz"))
    sizes = np.array([1_000, 10_000, 30_000, 100_000])
    exact, sampled = lru_curve(references, sizes), sampled_curve(references, 0.1, sizes=sizes)
    assert (np.abs(sampled.hit_rate - exact.hit_rate) <= sampled.error).all()
    assert np.abs(sampled.hit_rate - exact.hit_rate).max() < 0.01
