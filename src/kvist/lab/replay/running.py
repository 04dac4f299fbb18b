"""Runs replays: one, or many side by side in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from kvist.errors import ArgumentError
from kvist.lab.curves.references import block_size_of
from kvist.lab.replay.config import ReplayConfig
from kvist.lab.replay.result import ReplayResult
from kvist.lab.replay.serving import Serving
from kvist.lab.traces.opening import open_trace
from kvist.lab.traces.requests import Request

__all__ = ["Progress", "ReplayInterrupted", "TraceSource", "compare", "replay"]

TraceSource = str | Path | Iterable[Request]
"""A trace, or what `open_trace` opens."""

TELL_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class Progress:
    """How far replays are: requests of all configurations together, and configurations that are done.

    `num_total` is None where the length of the trace is not known.
    """

    num_requests: int
    num_total: int | None
    num_done: int
    num_configs: int
    elapsed_s: float

    @property
    def requests_per_s(self) -> float:
        """Requests replayed in a second, so far."""
        return self.num_requests / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def left_s(self) -> float | None:
        """How long it will take at this rate, where that can be told.

        >>> Progress(250, 1000, 0, 1, elapsed_s=2.0).left_s
        6.0
        """
        if self.num_total is None or not self.num_requests:
            return None
        return (self.num_total - self.num_requests) * self.elapsed_s / self.num_requests


Told = Callable[[Progress], None]


class ReplayInterrupted(KeyboardInterrupt):
    """Ctrl-C ended it; `results` has what was done, the last ones perhaps of a part of the trace."""

    def __init__(self, results: list[ReplayResult]) -> None:
        self.results = results
        super().__init__(f"interrupted with {len(results)} results")


def replay(trace: TraceSource, config: ReplayConfig, progress: Told | None = None) -> ReplayResult:
    """Replay a trace through a manager of one configuration.

    `progress` is told every tenth of a second. Raises ConfigError for settings that cannot be, what reading the trace
    raises, and ReplayInterrupted on Ctrl-C.
    """
    opened = _opened(trace)
    total = num_requests_of(opened) if progress else None
    began = time.monotonic()

    def tell(num_requests: int) -> bool:
        if progress is not None:
            progress(Progress(num_requests, total, 0, 1, time.monotonic() - began))
        return True

    result = _replayed(opened, config, tell)
    if not result.is_complete:
        raise ReplayInterrupted([result])
    if progress is not None:
        progress(Progress(result.num_requests, total, 1, 1, time.monotonic() - began))
    return result


def compare(
    trace: TraceSource,
    configs: Sequence[ReplayConfig],
    processes: int | None = None,
    progress: Told | None = None,
    *,
    num_requests: int | None = None,
) -> list[ReplayResult]:
    """Replay a trace with each configuration, as many at a time as there are `processes` (default: processors).

    Results come in the order of the configurations. Each process opens the trace itself; what is no name of one is
    pickled. On Ctrl-C, ReplayInterrupted has the results there are. For `progress`, the trace is read once more to
    count its requests, unless `num_requests` says how many it has.

    Raises ConfigError for settings that cannot be, before anything runs, and what reading the trace raises.
    """
    opened = _opened(trace)
    size = block_size_of(opened, None)
    for config in configs:
        config.cache_config(config.block_size or size)
    if processes is not None and processes < 1:
        raise ArgumentError(f"processes is {processes}, must be at least 1")
    num_processes = min(processes or os.cpu_count() or 1, len(configs))
    total = num_requests if num_requests is not None or progress is None else num_requests_of(opened)
    board = _Board(configs, None if total is None else total * len(configs), progress)
    if num_processes <= 1:
        return _in_turn(opened, configs, board)
    return _side_by_side(trace, configs, num_processes, board)


def num_requests_of(trace: Iterable[Request]) -> int:
    """Count the requests of a trace: by its length where it says so, else by reading it."""
    try:
        return len(trace)  # type: ignore[arg-type]
    except TypeError:
        return sum(1 for _ in trace)


@dataclass(slots=True)
class _Board:
    """What is known of all configurations, and who is told of it."""

    configs: Sequence[ReplayConfig]
    num_total: int | None
    told: Told | None
    counts: dict[int, int] = field(default_factory=dict)
    results: dict[int, ReplayResult] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def note(self, index: int, num_requests: int) -> None:
        """Note how many requests a configuration has seen, and tell."""
        self.counts[index] = num_requests
        if self.told is not None:
            elapsed = time.monotonic() - self.began
            num_done = len(self.results)
            self.told(Progress(sum(self.counts.values()), self.num_total, num_done, len(self.configs), elapsed))

    def finish(self, index: int, result: ReplayResult) -> None:
        """Note a result, and tell."""
        self.results[index] = result
        self.note(index, result.num_requests)

    @property
    def in_order(self) -> list[ReplayResult]:
        """The results there are, in the order of the configurations."""
        return [self.results[index] for index in sorted(self.results)]


def _opened(trace: TraceSource) -> Iterable[Request]:
    return open_trace(trace) if isinstance(trace, str | Path) else trace


def _replayed(trace: Iterable[Request], config: ReplayConfig, tell: Callable[[int], bool]) -> ReplayResult:
    """Replay until the end, Ctrl-C, or until `tell`, which gets the number of requests now and then, says no."""
    began = time.monotonic()
    serving = Serving(config, config.block_size or block_size_of(trace, None))
    is_complete = False
    try:
        due = began + TELL_EVERY_S
        for _ in serving.run(iter(trace)):
            if (now := time.monotonic()) >= due:
                due = now + TELL_EVERY_S
                if not tell(serving.tally.num_requests):
                    break
        else:
            is_complete = True
    except KeyboardInterrupt:
        pass
    name = str(getattr(trace, "name", ""))
    return serving.result(name, wall_s=time.monotonic() - began, is_complete=is_complete)


def _in_turn(trace: Iterable[Request], configs: Sequence[ReplayConfig], board: _Board) -> list[ReplayResult]:
    for index, config in enumerate(configs):

        def tell(num_requests: int, index: int = index) -> bool:
            board.note(index, num_requests)
            return True

        result = _replayed(trace, config, tell)
        if not result.is_complete:
            board.results[index] = result
            raise ReplayInterrupted(board.in_order)
        board.finish(index, result)
    return board.in_order


def _side_by_side(
    trace: TraceSource, configs: Sequence[ReplayConfig], num_processes: int, board: _Board
) -> list[ReplayResult]:
    context = multiprocessing.get_context("spawn")
    told, stop = context.Queue(), context.Event()
    source = trace if isinstance(trace, str | Path) else list(trace) if _is_iterator(trace) else trace
    with ProcessPoolExecutor(
        num_processes, mp_context=context, initializer=_begin_worker, initargs=(told, stop)
    ) as executor:
        futures: dict[Future[ReplayResult | None], int] = {}
        try:
            with _interrupts_held():  # workers begin with the first of these
                futures |= {executor.submit(_work, source, each, index): index for index, each in enumerate(configs)}
            _watch(futures, told, board)
        except KeyboardInterrupt:
            stop.set()
            _gather(futures, board)
            raise ReplayInterrupted(board.in_order) from None
        except BaseException:
            stop.set()
            executor.shutdown(wait=False, cancel_futures=True)
            raise
    return board.in_order


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Let Ctrl-C wait until the end of this; processes that begin within never get it, where systems can do that.

    Else it would reach workers before they ignore it, while they import what they need.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _is_iterator(trace: Iterable[Request]) -> bool:
    return iter(trace) is trace


def _watch(futures: dict[Future[ReplayResult | None], int], told: Any, board: _Board) -> None:
    """Tell how far the workers are until all are done; raises what one of them raised."""
    left = set(futures)
    while left:
        done, left = wait(left, timeout=TELL_EVERY_S, return_when=FIRST_COMPLETED)
        for index, num_requests in _drained(told):
            if index not in board.results:
                board.note(index, num_requests)
        for future in done:
            if (result := future.result()) is not None:
                board.finish(futures[future], result)


def _drained(told: Any) -> list[tuple[int, int]]:
    """Take what workers have told."""
    found = []
    try:
        while True:
            found.append(told.get_nowait())
    except queue.Empty:
        return found


def _gather(futures: dict[Future[ReplayResult | None], int], board: _Board) -> None:
    """Take the results of workers that have been told to stop; what has not begun is left out."""
    for future, index in futures.items():
        result = None if future.cancel() or future.exception() is not None else future.result()
        if result is not None:
            board.results[index] = result


_worker: dict[str, Any] = {}
"""What a worker process was given at its start."""


def _begin_worker(told: Any, stop: Event) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first one says what is to be done
    _worker.update(told=told, stop=stop)


def _work(trace: TraceSource, config: ReplayConfig, index: int) -> ReplayResult | None:
    """Replay in a worker; nothing if it was told to stop before."""
    if _worker["stop"].is_set():
        return None

    def tell(num_requests: int) -> bool:
        _worker["told"].put((index, num_requests))
        return not _worker["stop"].is_set()

    return _replayed(_opened(trace), config, tell)
