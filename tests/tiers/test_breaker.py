import doctest

import pytest

from kvist.errors import ArgumentError
from kvist.tiers import breaker as module
from kvist.tiers.breaker import CircuitBreaker


class Time:
    now = 0.0

    def __call__(self):
        return self.now


def failing(breaker, num_calls):
    """How many of so many calls, one after the other, are admitted and fail."""
    num_admitted = 0
    for _ in range(num_calls):
        if breaker.admits():
            breaker.note_failure()
            num_admitted += 1
    return num_admitted


def test_the_example_in_the_docstring_runs():
    assert doctest.testmod(module).failed == 0


def test_it_opens_at_failures_in_a_row():
    breaker = CircuitBreaker(num_failures=3, clock=Time())
    assert failing(breaker, 2) == 2
    breaker.note_success()
    assert failing(breaker, 10) == 3
    assert breaker.is_open


def test_it_tells_once_that_it_has_opened():
    breaker = CircuitBreaker(num_failures=2, retry_s=1, clock=(time := Time()))
    assert [breaker.note_failure() for _ in range(4)] == [False, True, False, False]
    time.now = 5
    assert breaker.admits()
    assert not breaker.note_failure()


def test_after_a_while_one_call_decides():
    breaker = CircuitBreaker(num_failures=1, retry_s=5, clock=(time := Time()))
    assert failing(breaker, 1) == 1
    time.now = 4.9
    assert not breaker.admits()
    time.now = 5
    assert not breaker.is_open
    assert [breaker.admits() for _ in range(3)] == [True, False, False]
    breaker.note_failure()
    time.now = 9.9
    assert not breaker.admits()
    time.now = 10
    assert breaker.admits()
    breaker.note_success()
    assert breaker.admits()
    assert breaker.admits()


def test_a_trying_call_that_is_never_heard_of_is_followed_by_another():
    breaker = CircuitBreaker(num_failures=1, retry_s=5, clock=(time := Time()))
    failing(breaker, 1)
    for time.now in (5, 10, 15):
        assert [breaker.admits() for _ in range(3)] == [True, False, False]


@pytest.mark.parametrize("wrong", [{"num_failures": 0}, {"retry_s": -1}])
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(ArgumentError):
        CircuitBreaker(**wrong)
