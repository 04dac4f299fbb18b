import itertools
import random
from bisect import bisect_left

import numpy as np
import pytest

from kvist.core import siblings
from kvist.core.siblings import SortedKeys


def common_length(one, other):
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def test_keys_are_kept_in_order_whatever_the_order_they_are_added_in():
    keys = SortedKeys([b"c", b"a"])
    keys.add(b"b")
    keys.add(b"\xff")
    keys.add(b"")
    assert list(keys) == [b"", b"a", b"b", b"c", b"\xff"]


def test_neighbours_are_the_greatest_below_and_the_least_not_below():
    keys = SortedKeys([b"a", b"c", b"e"])
    assert keys.neighbours(b"b") == [b"a", b"c"]
    assert keys.neighbours(b"c") == [b"a", b"c"]
    assert keys.neighbours(b"A") == [b"a"]
    assert keys.neighbours(b"z") == [b"e"]


def test_an_empty_collection_has_no_neighbours():
    keys = SortedKeys([])
    assert keys.neighbours(b"a") == []
    keys.add(b"a")
    keys.remove(b"a")
    assert list(keys) == keys.neighbours(b"a") == []


def test_a_key_and_its_own_beginning_are_two_keys():
    keys = SortedKeys([b"ab", b"a", b"abc"])
    assert keys.neighbours(b"abd") == [b"abc"]
    assert keys.neighbours(b"ab") == [b"a", b"ab"]


@pytest.mark.parametrize("max_run", [2, 3, 4, 7])
@pytest.mark.parametrize("seed", range(5))
def test_runs_split_and_vanish_without_losing_order(monkeypatch, max_run, seed):
    monkeypatch.setattr(siblings, "MAX_RUN", max_run)
    chance = random.Random(seed)
    expected = sorted({bytes(chance.choices(range(5), k=chance.randrange(5))) for _ in range(20)})
    keys = SortedKeys(expected)
    for _ in range(300):
        key = bytes(chance.choices(range(5), k=chance.randrange(5)))
        at = bisect_left(expected, key)
        around = expected[max(at - 1, 0) : at] + expected[at : at + 1]
        assert keys.neighbours(key) == around
        if expected:
            assert max(common_length(key, one) for one in around) == max(common_length(key, one) for one in expected)
        if expected[at : at + 1] == [key]:
            keys.remove(key)
            del expected[at]
        else:
            keys.add(key)
            expected.insert(at, key)
        assert list(keys) == expected


def test_all_keys_can_be_removed_from_either_end_and_added_again(monkeypatch):
    monkeypatch.setattr(siblings, "MAX_RUN", 4)
    names = [bytes([n]) for n in range(40)]
    keys = SortedKeys(names)
    for name in names[:20] + names[:19:-1]:
        keys.remove(name)
    assert list(keys) == []
    for name in reversed(names):
        keys.add(name)
    assert list(keys) == names


def test_a_hundred_thousand_keys_lie_in_runs_of_bounded_length():
    names = np.random.default_rng(1).permutation(100_000).astype(">i4").tobytes()
    names = [names[start : start + 4] for start in range(0, len(names), 4)]
    keys = SortedKeys(names[:1000])
    for name in names[1000:]:
        keys.add(name)
    assert list(keys) == sorted(names)
    assert max(map(len, keys._runs)) <= siblings.MAX_RUN
