"""What an engine does, as spans: one for each request, with its queueing, prefill and decode, and one for each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvist.wire.tracing import Span, Tracing, tracing

__all__ = ["EngineSpans"]


class _Request(Protocol):
    """What spans say of a request."""

    num_prompt_tokens: int
    num_cached_tokens: int | None
    num_preemptions: int

    @property
    def num_generated_tokens(self) -> int: ...

    @property
    def is_finished(self) -> bool: ...

    @property
    def finish_reason(self) -> str | None: ...


class _Chunk(Protocol):
    """What spans say of a part of a step."""

    @property
    def request(self) -> _Request: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def is_last(self) -> bool: ...


class EngineSpans:
    """Follows an engine, as its `observer`, and records spans.

    `kvist.request` begins where a request is submitted, as a child of the current span, and has `kvist.queue`,
    `kvist.prefill` and `kvist.decode`; at its end it knows its prompt, cached and generated tokens, its preemptions and
    why it ended. `kvist.step` is one forward pass. Without OpenTelemetry nothing is recorded.
    """

    def __init__(self, traced: Tracing | None = None) -> None:
        self._tracing = tracing() if traced is None else traced
        self._requests: dict[_Request, _RequestSpans] = {}
        self._step: Span | None = None

    def submitted(self, request: _Request) -> None:
        """Begin a request's span; it waits."""
        self._requests[request] = _RequestSpans(
            self._tracing.begin("kvist.request", num_prompt_tokens=request.num_prompt_tokens)
        )

    def began(self, chunks: Sequence[_Chunk]) -> None:
        """Begin a step, and the prefill of those requests that wait no more; a step before that failed has ended."""
        if self._step is not None:
            self._step.end(RuntimeError("the step failed"))
        for chunk in chunks:
            self._requests[chunk.request].leave("queue", "prefill")
        num_prefills = sum(self._requests[chunk.request].part_name == "prefill" for chunk in chunks)
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        self._step = self._tracing.begin(
            "kvist.step", num_tokens=num_tokens, num_requests=len(chunks), num_prefills=num_prefills
        )

    def computed(self, chunks: Sequence[_Chunk]) -> None:
        """End a step, the prefill of requests whose prompt is computed, and requests that are finished."""
        if self._step is not None:
            self._step.end()
            self._step = None
        for chunk in chunks:
            spans = self._requests.get(chunk.request)  # None: aborted meanwhile
            if spans is not None and chunk.is_last:
                spans.leave("prefill", "decode")
            if chunk.request.is_finished:
                self.ended(chunk.request)

    def ended(self, request: _Request) -> None:
        """End a request's span; one that has ended stays as it is."""
        spans = self._requests.pop(request, None)
        if spans is None:
            return
        spans.whole.note(
            num_cached_tokens=request.num_cached_tokens or 0,
            num_generated_tokens=request.num_generated_tokens,
            num_preemptions=request.num_preemptions,
            finish_reason=request.finish_reason or "",
        )
        spans.part.end()
        spans.whole.end()


class _RequestSpans:
    """The span of a request, and that of the part of its life it is in."""

    def __init__(self, whole: Span) -> None:
        self.whole = whole
        self.part_name, self.part = "queue", whole.child("kvist.queue")

    def leave(self, part: str, following: str) -> None:
        """Go from one part to the next, if it is in the first."""
        if self.part_name == part:
            self.part.end()
            self.part_name, self.part = following, self.whole.child(f"kvist.{following}")
