from threading import Event, Thread
from threading import enumerate as all_threads

import pytest
from tests.tiers.hanging import PATIENT, SHORT

from kvist.tiers.workers import Busy, Late, Workers


def num_threads(name):
    return sum(thread.name == name for thread in all_threads())


def waiting(event):
    return lambda _: event.wait(PATIENT)


def test_a_call_returns_what_it_returns_and_raises_what_it_raises():
    workers = Workers(1, "returning")
    assert workers.call(lambda _: "an answer", PATIENT) == "an answer"
    with pytest.raises(ZeroDivisionError):
        workers.call(lambda _: 1 // 0, PATIENT)
    assert workers.call(lambda _: "still there", PATIENT) == "still there"
    workers.stop()


def test_one_thread_does_for_calls_one_after_the_other():
    workers = Workers(4, "frugal")
    for _ in range(10):
        workers.call(lambda _: None, PATIENT)
    assert num_threads("frugal") <= 2  # the first may not have been idle again yet
    workers.stop()


def test_calls_from_several_threads_wait_for_their_turn():
    workers, answers, gate = Workers(2, "turns"), [], Event()
    callers = [Thread(target=lambda: answers.append(workers.call(waiting(gate), PATIENT))) for _ in range(6)]
    for caller in callers:
        caller.start()
    while num_threads("turns") < 2:
        pass
    gate.set()
    for caller in callers:
        caller.join()
    assert answers == [True] * 6
    workers.stop()


def test_a_late_call_is_told_that_nobody_waits():
    workers, gate, told, begun = Workers(1, "told"), Event(), [], Event()

    def late(call):
        told.append(call.is_wanted)
        gate.wait(PATIENT)
        told.append(call.is_wanted)
        begun.set()

    with pytest.raises(Late):
        workers.call(late, SHORT)
    gate.set()
    assert begun.wait(PATIENT)
    assert told == [True, False]
    workers.stop()


def test_late_calls_hold_their_threads_and_no_more_are_begun():
    workers, gate = Workers(2, "held"), Event()
    for _ in range(2):
        with pytest.raises(Late):
            workers.call(waiting(gate), SHORT)
    with pytest.raises(Busy):
        workers.call(lambda _: None, PATIENT)
    gate.set()
    while True:
        try:
            assert workers.call(lambda _: "free again", PATIENT) == "free again"
            break
        except Busy:
            pass
    assert num_threads("held") == 2
    workers.stop()


def test_a_call_that_finds_no_thread_in_time_is_never_made():
    workers, gate, begun, made = Workers(1, "never"), Event(), Event(), []

    def hold(_):
        begun.set()
        gate.wait(PATIENT)

    holder = Thread(target=lambda: workers.call(hold, PATIENT))
    holder.start()
    assert begun.wait(PATIENT)
    with pytest.raises(Busy):
        workers.call(lambda _: made.append(1), SHORT)
    gate.set()
    holder.join()
    workers.call(lambda _: None, PATIENT)
    assert made == []
    workers.stop()


def test_stopped_workers_end_and_take_nothing():
    workers = Workers(2, "stopped")
    workers.call(lambda _: None, PATIENT)
    workers.stop()
    with pytest.raises(Busy):
        workers.call(lambda _: None, PATIENT)
    while num_threads("stopped"):
        pass
