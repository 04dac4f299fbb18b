"""A device whose copies end when a test says so, in any order that streams and events allow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvist.memory.transfers import Event, Job

__all__ = ["FakeDevice", "WaitsForever"]

COMPUTE = "compute"
TORN = 0xEE
"""What the destination of a failed copy is full of."""


class WaitsForever(AssertionError):
    """The host waits for a copy whose end was lost: a real process would hang here."""


class FakeEvent:
    """A point in a stream of a `FakeDevice`."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.done = False
        self.error: Exception | None = None

    def wait(self) -> None:
        """Let everything end that can, in order of the streams' names; raises WaitsForever if this one cannot."""
        self._device.finish()
        if not self.done:
            raise WaitsForever(f"the end of a copy was lost: {', '.join(self._device.lost)} tell no more")


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """What a stream does next: it waits for an event, or ends something by reaching one."""

    event: FakeEvent
    waits: bool = False
    act: Callable[[], None] | None = None
    job: Job | None = None


class FakeDevice:
    """Streams whose work happens, contents and all, when `complete` is called; see `TransferManager`.

    Whatever order a test takes, a stream's own work is in order, and nothing overtakes an event that it waits for. So
    contents that are right in all orders show that everything is waited for that has to be. `compute` stands for the
    forward pass. What is completed after other calls is late; what a stream does after `lose` is never told, nor what
    waits for it, until `recover`.
    """

    def __init__(self) -> None:
        self._streams: dict[str, deque[_Work]] = {}
        self._lost: set[str] = set()
        self._next_error: Exception | None = None

    # ---- what tests do ----------------------------------------------------------------------------------------------

    @property
    def ready(self) -> list[str]:
        """Streams that have work which waits for nothing, by name."""
        self._pass_events()
        return sorted(
            name for name, works in self._streams.items() if works and not works[0].waits and name not in self._lost
        )

    @property
    def lost(self) -> list[str]:
        """Streams whose work has no end, by name."""
        return sorted(self._lost)

    @property
    def num_outstanding(self) -> int:
        """Copies and acts that have not ended."""
        return sum(not work.waits and work.act is not _nothing for works in self._streams.values() for work in works)

    def compute(self, act: Callable[[], None]) -> None:
        """Queue what the forward pass does on the compute stream."""
        self._streams.setdefault(COMPUTE, deque()).append(_Work(FakeEvent(self), act=act))

    def complete(self, stream: str, error: Exception | None = None) -> None:
        """Let the next work of a stream happen; with an error, it fails, and leaves its destination torn."""
        assert stream in self.ready, f"{stream} has to wait, or has nothing to do; these have: {self.ready}"
        work = self._streams[stream].popleft()
        if work.job is not None:
            _copy(work.job) if error is None else _tear(work.job)
        if work.act is not None:
            work.act()
        work.event.error, work.event.done = error, True
        self._pass_events()

    def lose(self, stream: str) -> None:
        """Let what a stream does from now on never end, as if its completions were lost."""
        self._lost.add(stream)

    def recover(self, stream: str) -> None:
        """Let a stream go on where it was: its completions were only late."""
        self._lost.discard(stream)

    def finish(self) -> None:
        """Let all work happen, but that of lost streams and what waits for it."""
        while names := self.ready:
            self.complete(names[0])

    def fail_next(self, error: Exception | None) -> None:
        """Refuse the next copy when it is queued; None: take it."""
        self._next_error = error

    # ---- what a TransferManager does --------------------------------------------------------------------------------

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Do nothing."""

    def copy(self, stream: str, job: Job) -> Event:
        """Queue a job."""
        error, self._next_error = self._next_error, None
        if error is not None:
            raise error
        event = FakeEvent(self)
        self._streams.setdefault(stream, deque()).append(_Work(event, job=job))
        return event

    def record(self, stream: str) -> Event:
        """Return the point that a stream has been filled to."""
        event = FakeEvent(self)
        works = self._streams.get(stream)
        event.done = not works
        if works:
            works.append(_Work(event, act=_nothing))
        return event

    def wait(self, stream: str, event: Event) -> None:
        """Make what is queued on a stream from now on wait for an event."""
        assert isinstance(event, FakeEvent)
        if not event.done:
            self._streams.setdefault(stream, deque()).append(_Work(event, waits=True))

    def _pass_events(self) -> None:
        """Let streams go on over events that are done, and over points that they have been asked to name."""
        while any(self._passes(works) for works in self._streams.values()):
            pass

    def _passes(self, works: deque[_Work]) -> bool:
        if not works or not ((works[0].waits and works[0].event.done) or works[0].act is _nothing):
            return False
        work = works.popleft()
        work.event.done = True
        return True


def _nothing() -> None:
    """Stand for a point in a stream at which nothing happens."""


def _copy(job: Job) -> None:
    """Copy as a device does: all is read, then all is written."""
    read, written = _index(job)
    for source, destination in job.pairs:
        destination[written] = source[read]


def _tear(job: Job) -> None:
    _, written = _index(job)
    for _, destination in job.pairs:
        destination[written] = TORN


def _index(job: Job) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return where a job reads and writes, as torch indexes it."""
    offsets = [()] * 2 if job.offsets is None else [(torch.from_numpy(ids),) for ids in job.offsets]
    read, written = torch.from_numpy(job.sources), torch.from_numpy(job.destinations)
    return (read, *offsets[0]), (written, *offsets[1])
