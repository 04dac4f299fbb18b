"""Sessions that have clocks of their own, side by side: a few go on at once, and when one ends the next begins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from heapq import heapify, heappop, heapreplace

from kvist.lab.traces.requests import Request

__all__ = ["Turns", "side_by_side"]

Turns = Iterator[tuple[Request, float]]
"""The requests of a session in order, arrivals since it began, each with how long it takes, in seconds."""


def side_by_side(sessions: Iterable[Turns], at_once: int) -> Iterator[Request]:
    """Yield the requests of all sessions in the order of arrival, with arrivals from the start of the trace.

    The first `at_once` sessions begin at 0, each of the others when one ends: when its last request is done. No more
    than that many are held.

    >>> from kvist.lab.traces.requests import HashedPrompt
    >>> def session(name, *times): return ((Request(None, time, session=name), 1.0) for time in times)
    >>> found = side_by_side([session("a", 0.0, 5.0), session("b", 1.0), session("c", 0.5)], at_once=2)
    >>> [(request.session, request.arrival_s) for request in found]
    [('a', 0.0), ('b', 1.0), ('c', 2.5), ('a', 5.0)]
    """
    waiting = iter(sessions)
    running = [lane for index in range(at_once) if (lane := _begin(waiting, 0.0, index)) is not None]
    heapify(running)
    while running:
        arrival_s, index, request, duration_s, began_s, turns = running[0]
        yield replace(request, arrival_s=arrival_s)
        lane = _next(turns, began_s, index) or _begin(waiting, arrival_s + duration_s, index)
        if lane is None:
            heappop(running)
        else:
            heapreplace(running, lane)


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
