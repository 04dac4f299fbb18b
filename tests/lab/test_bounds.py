"""The optimal bound: against a plain Belady, against trying everything, and against what others found."""

from itertools import combinations

import pytest
from tests.lab.forests import asked, forest, traces_folder

from kvist.lab.curves import lru_curve, optimal_curve, references_of
from kvist.lab.traces import open_trace

NEVER = 10**9


def hits_of_belady(prompts, num_blocks):
    """Keep of what is held and of the prompt what is used soonest, the shallower of those used by the same request."""
    held, num_hits = {}, 0
    for at, prompt in enumerate(prompts):
        leading = next((depth for depth, block in enumerate(prompt) if block not in held), len(prompt))
        assert leading == sum(block in held for block in prompt)  # what is held are whole prefixes
        num_hits += leading
        candidates = {**held, **{block: depth for depth, block in enumerate(prompt)}}
        next_use = {block: next_use_of(block, prompts, at) for block in candidates}
        soonest = sorted(candidates, key=lambda block: (next_use[block], candidates[block]))[:num_blocks]
        held = {block: candidates[block] for block in soonest}
    return num_hits


def next_use_of(block, prompts, at):
    return next((later for later in range(at + 1, len(prompts)) if block in prompts[later]), NEVER)


def most_hits(prompts, num_blocks, held=frozenset()):
    """The most hits there can be, by trying every choice of what to keep after each request."""
    if not prompts:
        return 0
    first, rest = prompts[0], prompts[1:]
    leading = next((depth for depth, block in enumerate(first) if block not in held), len(first))
    candidates = held | set(first)
    size = min(num_blocks, len(candidates))
    return leading + max(most_hits(rest, num_blocks, frozenset(kept)) for kept in combinations(candidates, size))


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 5, 8, 13, 40])
@pytest.mark.parametrize("seed", range(4))
def test_the_bound_is_what_a_plain_belady_hits(num_blocks, seed):
    prompts = forest(seed, num_requests=80)
    curve = optimal_curve(asked(*prompts), [num_blocks])
    assert curve.hit_rate[0] * sum(map(len, prompts)) == pytest.approx(hits_of_belady(prompts, num_blocks))


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_nothing_hits_more_than_the_bound(num_blocks, seed):
    prompts = forest(seed, num_requests=5, fan_out=2, longest=3)
    curve = optimal_curve(asked(*prompts), [num_blocks])
    assert curve.hit_rate[0] * sum(map(len, prompts)) == pytest.approx(most_hits(prompts, num_blocks))


def test_lru_is_never_above_the_bound_and_meets_it_where_everything_fits():
    references = asked(*forest(3, num_requests=400))
    sizes = [1, 2, 5, 10, 50, 100, references.num_unique]
    lru, optimal = lru_curve(references, sizes), optimal_curve(references, sizes)
    assert (lru.hit_rate <= optimal.hit_rate).all()
    assert lru.hit_rate[-1] == optimal.hit_rate[-1]


def test_without_reuse_the_bound_is_nothing():
    assert optimal_curve(asked(), [1]).hit_rate.tolist() == [0.0]
    assert optimal_curve(asked([0, 1], [2]), [1, 9]).hit_rate.tolist() == [0.0, 0.0]


def test_the_bound_on_the_mooncake_conversations_is_what_an_independent_one_found():
    references = references_of(open_trace(traces_folder() / "mooncake" / "conversation_trace.jsonl.gz"))
    assert optimal_curve(references, [3_000, 10_000]).hit_rate.round(3).tolist() == [0.294, 0.366]
