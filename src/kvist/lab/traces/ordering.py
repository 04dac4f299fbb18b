"""Requests in the order of their arrival, sorted within a window, so that memory is bounded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from heapq import heappop, heappush
from pathlib import Path

from kvist.lab.traces.problems import Problems
from kvist.lab.traces.requests import HashedPrompt, Request

__all__ = ["by_arrival", "from_first"]

WINDOW_REQUESTS, WINDOW_BYTES = 8192, 64 * 2**20


class Window:
    """The requests that are held back, since one that arrived earlier may still come; the earliest goes first."""

    def __init__(self, num_requests: int, num_bytes: int) -> None:
        self._max_requests, self._max_bytes = num_requests, num_bytes
        self._held: list[tuple[float, int, Request]] = []
        self._num_bytes = self._num_seen = 0

    @property
    def is_full(self) -> bool:
        """Whether one must go before the next is read."""
        return len(self._held) >= self._max_requests or self._num_bytes >= self._max_bytes

    def __bool__(self) -> bool:
        return bool(self._held)

    def push(self, request: Request) -> None:
        """Hold a request back; those that arrive together keep their order."""
        heappush(self._held, (request.arrival_s, self._num_seen, request))
        self._num_bytes += _bytes_of(request)
        self._num_seen += 1

    def pop(self) -> Request:
        """Let go of the one that arrived first."""
        request = heappop(self._held)[2]
        self._num_bytes -= _bytes_of(request)
        return request


def by_arrival(
    requests: Iterable[Request],
    problems: Problems,
    file: Path,
    *,
    num_requests: int = WINDOW_REQUESTS,
    num_bytes: int = WINDOW_BYTES,
) -> Iterator[Request]:
    """Yield requests by arrival, those that arrive together in the order of the file.

    A window of so many requests, or of prompts of so many bytes, is held back. What comes later than that is a problem:
    it arrived before a request that is already given. That lines had to be sorted is noted.
    """
    window = Window(num_requests, num_bytes)
    given_s = latest_s = float("-inf")
    for request in requests:
        if request.arrival_s < latest_s:
            if request.arrival_s < given_s:
                told = f"it arrived {given_s - request.arrival_s:.3f} s before one that is already given"
                problems.add(str(file), request.line, f"too late to be sorted in a window of {num_requests:,}", told)
                continue
            problems.note(f"{file} is not sorted by arrival; it was sorted in a window of {num_requests:,} requests")
        latest_s = max(latest_s, request.arrival_s)
        window.push(request)
        if window.is_full:
            given = window.pop()
            given_s = given.arrival_s
            yield given
    while window:
        yield window.pop()


def from_first(requests: Iterable[Request]) -> Iterator[Request]:
    """Yield requests with arrivals that count from the first one."""
    first_s: float | None = None
    for request in requests:
        first_s = request.arrival_s if first_s is None else first_s
        yield replace(request, arrival_s=request.arrival_s - first_s)


def _bytes_of(request: Request) -> int:
    prompt = request.prompt
    size = 8 * len(prompt.hash_ids) if isinstance(prompt, HashedPrompt) else 4 * prompt.num_tokens
    return size + (0 if request.output is None else request.output.nbytes) + 500
