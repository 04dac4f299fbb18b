import doctest

import pytest

from kvist.tiers import speed as module
from kvist.tiers.speed import Speed


def learnt(*calls, **options):
    speed = Speed(**options)
    for num_bytes, seconds in calls:
        speed.note(num_bytes, seconds)
    return speed


def test_the_example_in_the_docstring_runs():
    assert doctest.testmod(module).failed == 0


def test_nothing_known_costs_nothing():
    assert Speed().seconds(10**9, 100) == 0


def test_latency_counts_for_each_call_and_bytes_once():
    speed = learnt(*[(0, 0.5), (100, 1.5), (300, 3.5)] * 10)
    assert speed.seconds(1000, num_calls=4) == pytest.approx(4 * 0.5 + 1000 / 100)


def test_calls_of_one_size_tell_the_time_of_a_byte():
    assert learnt(*[(100, 2.0)] * 5).seconds(50) == pytest.approx(1.0)


def test_calls_that_bring_nothing_tell_the_latency():
    assert learnt(*[(0, 0.5)] * 5).seconds(1000) == pytest.approx(0.5)


def test_larger_calls_that_took_less_time_are_not_taken_for_a_rule():
    speed = learnt((1000, 1.0), (2000, 0.5), (1000, 1.0))
    assert 0 < speed.seconds(0) <= speed.seconds(1000)


def test_newer_calls_outweigh_older_ones():
    speed = learnt(*[(0, 1.0), (100, 2.0)] * 50, *[(0, 0.1), (100, 0.2)] * 50)
    assert speed.seconds(100) == pytest.approx(0.2, rel=0.01)


def test_what_was_learnt_long_ago_is_forgotten():
    now = 0.0
    speed = learnt((100, 9.0), memory_s=60, clock=lambda: now)
    assert speed.seconds(100) == pytest.approx(9.0)
    now = 61.0
    assert speed.seconds(100) == 0
    speed.note(100, 1.0)
    assert speed.seconds(100) == pytest.approx(1.0)
