"""The prefix tree as boxes, and reuse distances in classes, against plain ways to count them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist import ArgumentError
from kvist.lab.curves import lru_curve, references_of
from kvist.lab.report import PrefixIcicle, reuse_classes
from kvist.lab.traces.requests import Request, TokenPrompt


def asked(prompts, block_size=1):
    """References of prompts of single letters."""
    requests = [Request(TokenPrompt(np.array([ord(letter) for letter in prompt], np.int32))) for prompt in prompts]
    return references_of(requests, block_size)


def shown(tree):
    return [(n.parent, n.label, n.first_block, n.num_blocks, n.num_requests, n.first_request) for n in tree.nodes]


def test_blocks_that_always_follow_one_another_are_one_box():
    """abcd splits after ab, where abx goes on differently, and after abcd, where one prompt goes on."""
    tree = PrefixIcicle.of(asked(["abcd", "abx", "abcde", "z"]))
    assert shown(tree) == [
        (-1, "all requests", 0, 0, 4, 0),
        (0, "", 0, 2, 3, 0),
        (1, "", 2, 2, 2, 0),
        (1, "", 2, 1, 1, 1),
        (2, "", 4, 1, 1, 2),
        (0, "", 0, 1, 1, 3),
    ]
    assert (tree.num_runs, tree.num_shown) == (5, 5)


def test_a_box_ends_where_a_prompt_does():
    assert shown(PrefixIcicle.of(asked(["ab", "abc"])))[1:] == [(0, "", 0, 2, 2, 0), (1, "", 2, 1, 1, 1)]


def test_prompts_of_a_label_are_under_it():
    tree = PrefixIcicle.of(asked(["ab", "x", "ac", "x"]), ["first", "second", "first", "second"])
    assert shown(tree) == [
        (-1, "all requests", 0, 0, 4, 0),
        (0, "first", 0, 0, 2, 0),
        (0, "second", 0, 0, 2, 1),
        (1, "", 0, 1, 2, 0),
        (3, "", 1, 1, 1, 0),
        (2, "", 0, 1, 2, 1),
        (3, "", 1, 1, 1, 2),
    ]


def test_the_boxes_of_most_requests_are_kept_and_the_others_counted():
    """a (4), b (2) and ac (2) stay; ad, ae and f are left out."""
    tree = PrefixIcicle.of(asked(["ac", "ac", "ad", "ae", "b", "b", "f"]), max_nodes=3)
    assert [(n.num_requests, n.num_hidden, n.num_hidden_requests) for n in tree.nodes] == [
        (7, 1, 1),
        (4, 2, 2),
        (2, 0, 0),
        (2, 0, 0),
    ]
    assert (tree.num_runs, tree.num_shown) == (6, 3)


def test_what_is_below_a_box_that_is_left_out_is_not_counted_at_its_parent():
    tree = PrefixIcicle.of(asked(["a", "a", "abc", "abd"]), max_nodes=1)
    assert [(n.num_hidden, n.num_hidden_requests) for n in tree.nodes] == [(0, 0), (1, 2)]


def test_requests_without_a_block_are_counted_and_have_no_box():
    tree = PrefixIcicle.of(asked(["", "ab", ""]))
    assert shown(tree) == [(-1, "all requests", 0, 0, 3, 0), (0, "", 0, 2, 1, 1)]
    assert shown(PrefixIcicle.of(asked([]))) == [(-1, "all requests", 0, 0, 0, 0)]


@given(st.lists(st.text("abc", max_size=6), max_size=12))
def test_every_prefix_of_every_prompt_is_in_one_box(prompts):
    tree = PrefixIcicle.of(asked(prompts))
    text = {0: ""}
    for place, node in enumerate(tree.nodes[1:], start=1):
        prompt = prompts[node.first_request]
        text[place] = prompt[: node.first_block + node.num_blocks]
        assert text[node.parent] == prompt[: node.first_block]
        for length in range(node.first_block + 1, node.first_block + node.num_blocks + 1):
            assert node.num_requests == sum(other.startswith(prompt[:length]) for other in prompts)
    prefixes = {prompt[:length] for prompt in prompts for length in range(1, len(prompt) + 1)}
    assert sum(node.num_blocks for node in tree.nodes) == len(prefixes)


@given(st.lists(st.text("abc", max_size=6), max_size=12), st.integers(1, 6))
def test_boxes_left_out_are_accounted_for(prompts, max_nodes):
    references = asked(prompts)
    whole, part = PrefixIcicle.of(references), PrefixIcicle.of(references, max_nodes=max_nodes)
    assert part.num_shown == min(max_nodes, whole.num_shown)
    least = min((node.num_requests for node in part.nodes[1:]), default=0)
    left_out = sorted((node.num_requests for node in whole.nodes[1:]), reverse=True)[max_nodes:]
    assert all(num_requests <= least for num_requests in left_out)
    for node in part.nodes:
        below = sum(other.num_requests for other in part.nodes if other.parent == part.nodes.index(node))
        assert below + node.num_hidden_requests <= node.num_requests


def test_references_are_looked_at_a_piece_at_a_time(monkeypatch):
    references = asked(["abcd", "abx", "abcde", "z", "abx"])
    whole = PrefixIcicle.of(references)
    for size in (1, 2, 3, 5):
        monkeypatch.setattr("kvist.lab.report.icicle.PIECE", size)
        assert PrefixIcicle.of(references) == whole


def test_a_sample_has_no_tree():
    with pytest.raises(ArgumentError, match=r"references are a sample of 0.5 of all blocks: prefixes have holes"):
        PrefixIcicle.of(asked(["abc", "abd"]).sampled(0.5))


def test_labels_are_one_for_each_request():
    with pytest.raises(ArgumentError, match="labels has 1 entries for 2 requests"):
        PrefixIcicle.of(asked(["a", "b"]), ["x"])
    with pytest.raises(ArgumentError, match="max_nodes is 0"):
        PrefixIcicle.of(asked(["a"]), max_nodes=0)


def test_reuse_classes_add_up_to_the_hit_rate_of_their_sizes():
    random = np.random.default_rng(3)
    references = asked(["".join(random.choice(list("abc"), random.integers(0, 9))) for _ in range(300)])
    classes = reuse_classes(references)
    sizes = [each.up_to for each in classes[:-1]]
    assert sizes == [2**power for power in range(len(sizes))]
    rates = lru_curve(references, sizes).hit_rate
    assert np.cumsum([each.share for each in classes[:-1]]) == pytest.approx(rates)
    assert sum(each.num_references for each in classes) == references.num_references
    assert classes[-1].num_references == references.num_unique
    assert classes[-1].up_to is None


def test_reuse_classes_of_a_sample_are_estimates_for_the_whole():
    random = np.random.default_rng(5)
    references = asked([bytes(random.integers(97, 123, 3)).decode() for _ in range(4000)])
    whole, sample = reuse_classes(references), reuse_classes(references.sampled(0.3))
    assert sample[-1].num_references == pytest.approx(whole[-1].num_references, rel=0.1)
    total = sum(each.num_references for each in sample)
    assert total == pytest.approx(references.num_references, rel=0.2)


def test_nothing_is_reused_where_nothing_comes_again():
    assert [(each.up_to, each.num_references) for each in reuse_classes(asked(["abc"]))] == [(1, 0), (None, 3)]
