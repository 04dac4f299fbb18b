"""Who wants to know what an engine does, such as what records spans of it."""

from __future__ import annotations

from typing import Protocol

from kvist.serve.scheduler import Chunk, Request

__all__ = ["NO_OBSERVER", "EngineObserver"]


class EngineObserver(Protocol):
    """Is told of requests and steps, by the thread that calls the engine; what it raises leaves the engine's call."""

    def submitted(self, request: Request) -> None:
        """A request waits from now on."""

    def began(self, chunks: list[Chunk]) -> None:
        """A step begins, which computes these chunks; it ends with `computed`, or fails."""

    def computed(self, chunks: list[Chunk]) -> None:
        """A step has ended, and its tokens are known."""

    def ended(self, request: Request) -> None:
        """A request was aborted; it may have been finished before."""


class _NoObserver:
    """Wants to know nothing."""

    def submitted(self, request: Request) -> None:
        pass

    def began(self, chunks: list[Chunk]) -> None:
        pass

    def computed(self, chunks: list[Chunk]) -> None:
        pass

    def ended(self, request: Request) -> None:
        pass


NO_OBSERVER: EngineObserver = _NoObserver()
"""Wants to know nothing."""
