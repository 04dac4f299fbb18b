"""Sessions that have clocks of their own, or none, side by side: a few of them go on at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from heapq import heapify, heappop, heapreplace
from itertools import islice

from kvist.lab.traces.requests import Request

__all__ = ["Turns", "in_groups", "side_by_side"]

Turns = Iterator[tuple[Request, float]]
"""The requests of a session in order, arrivals since it began, each with how long it takes, in seconds."""


def side_by_side(sessions: Iterable[Turns], at_once: int, began_s: float = 0.0) -> Iterator[Request]:
    """Yield the requests of all sessions in the order of arrival, with arrivals from the start of the trace.

    The first `at_once` sessions begin at `began_s`, each of the others when one ends: when its last request is done. No
    more than that many are held.

    >>> from kvist.lab.traces.requests import HashedPrompt
    >>> def session(name, *times): return ((Request(None, time, session=name), 1.0) for time in times)
    >>> found = side_by_side([session("a", 0.0, 5.0), session("b", 1.0), session("c", 0.5)], at_once=2)
    >>> [(request.session, request.arrival_s) for request in found]
    [('a', 0.0), ('b', 1.0), ('c', 2.5), ('a', 5.0)]
    """
    waiting = iter(sessions)
    running = [lane for index in range(at_once) if (lane := _begin(waiting, began_s, index)) is not None]
    heapify(running)
    while running:
        arrival_s, index, request, duration_s, session_s, turns = running[0]
        yield replace(request, arrival_s=arrival_s)
        lane = _next(turns, session_s, index) or _begin(waiting, arrival_s + duration_s, index)
        if lane is None:
            heappop(running)
        else:
            heapreplace(running, lane)


def in_groups(sessions: Iterable[Turns], at_once: int) -> Iterator[Request]:
    """Yield the requests of `at_once` sessions that begin together; when all of them have ended, of the next group.

    >>> def session(name, *times): return ((Request(None, time, session=name), 1.0) for time in times)
    >>> found = in_groups([session("a", 0.0, 1.0), session("b", 0.0), session("c", 0.0)], at_once=2)
    >>> [(request.session, request.arrival_s) for request in found]
    [('a', 0.0), ('b', 0.0), ('a', 1.0), ('c', 2.0)]
    """
    waiting, end_s = iter(sessions), [0.0]
    while group := list(islice(waiting, at_once)):
        began_s = end_s[0]
        yield from side_by_side([_ending(turns, began_s, end_s) for turns in group], at_once, began_s)


def _ending(turns: Turns, began_s: float, end_s: list[float]) -> Turns:
    """Yield turns, and note when the last of all of them ends."""
    for request, duration_s in turns:
        end_s[0] = max(end_s[0], began_s + request.arrival_s + duration_s)
        yield request, duration_s


Lane = tuple[float, int, Request, float, float, Turns]


def _begin(waiting: Iterator[Turns], began_s: float, index: int) -> Lane | None:
    """Let the next session that has requests begin; None if there is none."""
    for turns in waiting:
        if (lane := _next(turns, began_s, index)) is not None:
            return lane
    return None


def _next(turns: Turns, began_s: float, index: int) -> Lane | None:
    turn = next(turns, None)
    if turn is None:
        return None
    request, duration_s = turn
    return began_s + request.arrival_s, index, request, duration_s, began_s, turns
