"""What makes copies: work queued on streams, and events that say how far they are; on CPU all is done at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

from torch import Tensor

from kvist.memory.transfers.copying import Copier
from kvist.memory.transfers.jobs import Job

__all__ = ["COMPUTE", "DEMOTE", "DONE", "LOCAL", "PROMOTE", "CpuDevice", "Device", "Event"]

COMPUTE, PROMOTE, DEMOTE, LOCAL = "compute", "promote", "demote", "local"
"""Streams: the forward pass; copies up to the device, down from it, and within it."""


class Event(Protocol):
    """A point in a stream."""

    @property
    def done(self) -> bool:
        """Whether all before it has ended; asking does not wait."""
        ...

    @property
    def error(self) -> Exception | None:
        """Why the copy before it failed, once it is done."""
        ...

    def wait(self) -> None:
        """Make the host wait until it is done."""
        ...


class Device(Protocol):
    """Queues work on streams, which each do it in order, and not before what they were told to wait for."""

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Be ready to copy between these: what was queued for them so far comes first, and they stay alive."""
        ...

    def copy(self, stream: str, job: Job) -> Event:
        """Queue a job; raise, having queued nothing, where that is impossible."""
        ...

    def record(self, stream: str) -> Event:
        """Return the point that a stream has been filled to."""
        ...

    def wait(self, stream: str, event: Event) -> None:
        """Make what is queued on a stream from now on wait for an event; the host does not wait."""
        ...


class _Done:
    """The event of work that is done when it is asked for."""

    done: Final = True
    error: Final = None

    def wait(self) -> None:
        """Return at once."""


DONE: Event = _Done()


class CpuDevice:
    """Copies at once, on the threads of a `Copier`; there are no streams, and nothing to wait for."""

    def __init__(self, copier: Copier | None = None) -> None:
        self.copier = copier or Copier()

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Do nothing."""

    def copy(self, stream: str, job: Job) -> Event:
        """Do the job."""
        self.copier.copy(job)
        return DONE

    def record(self, stream: str) -> Event:
        """Return what is done already."""
        return DONE

    def wait(self, stream: str, event: Event) -> None:
        """Do nothing."""
