"""What is on its way from stores for requests that wait, and how fast prompts are computed: both need a clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from kvist import KVCacheManager
from kvist.core.matching import Prefetch
from kvist.errors import TransferError
from kvist.serve.scheduler import Chunk, Request

__all__ = ["Loading", "PrefillRate", "num_prefill_tokens"]

AHEAD_BYTES = 512 << 20
"""Waiting requests are loaded for until so much was asked for: what is more would be forgotten before its turn."""

MIN_TOKENS = 64
"""Steps that compute less of prompts tell how long a step takes, not how fast prompts are computed."""

KEPT = 0.8
"""The weight of all earlier steps with each new one."""


class Loading:
    """Prefetches for the first of the waiting requests, each waited for as long as the stores' time limit."""

    def __init__(self, manager: KVCacheManager, clock: Callable[[], float]) -> None:
        self._manager = manager
        self._clock = clock
        self._limit_s = max(tier.timeout_s for tier in manager.config.stores)
        self._max_ahead = manager.config.max_sequences
        self._token_bytes = manager.config.block_bytes / manager.config.block_size
        self._begun: dict[Request, tuple[Prefetch, float]] = {}

    def begin(self, waiting: Iterable[Request]) -> None:
        """Begin with those of the first waiting requests that have not begun, and forget those that wait no more."""
        before, self._begun, num_bytes = self._begun, {}, 0.0
        for request in islice(waiting, self._max_ahead):
            if num_bytes > AHEAD_BYTES:
                break
            self._begun[request] = before.get(request) or self._prefetched(request)
            num_bytes += self._begun[request][0].num_asked_tokens * self._token_bytes

    def is_ready(self, request: Request) -> bool:
        """Whether all that could be had for a request has come, or its time is over; not before it has begun."""
        if request not in self._begun:
            return False
        prefetch, ends_s = self._begun[request]
        return prefetch.is_done or self._clock() >= ends_s

    def wait(self) -> None:
        """Wait until the first of them is ready, at most until its time is over."""
        for prefetch, ends_s in islice(self._begun.values(), 1):
            prefetch.wait(max(ends_s - self._clock(), 0.0))

    def _prefetched(self, request: Request) -> tuple[Prefetch, float]:
        if not request.reuse:
            return Prefetch(0), self._clock()
        try:
            prefetch = self._manager.prefetch(request.tokens, namespace=request.namespace)
        except TransferError:  # it is computed
            prefetch = Prefetch(0)
        return prefetch, self._clock() + self._limit_s


class PrefillRate:
    """How fast prompts are computed: an average in which later steps count more, and larger ones as much as they do."""

    def __init__(self) -> None:
        self._num_tokens = self._seconds = 0.0

    def note(self, chunks: Sequence[Chunk], seconds: float) -> float | None:
        """Count a step; returns tokens per second, None where nothing has been measured."""
        num_tokens = num_prefill_tokens(chunks)
        if num_tokens >= MIN_TOKENS and seconds > 0:
            self._num_tokens = KEPT * self._num_tokens + num_tokens
            self._seconds = KEPT * self._seconds + seconds
        return self._num_tokens / self._seconds if self._seconds else None


def num_prefill_tokens(chunks: Sequence[Chunk]) -> int:
    """Count the tokens of prompts that a step computes."""
    return sum(chunk.num_tokens for chunk in chunks if chunk.num_tokens > 1)
