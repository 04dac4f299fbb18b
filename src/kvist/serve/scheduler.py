"""Decides which requests compute how many tokens in each step; knows the cache manager, but no model and no clock."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import InitVar, dataclass, field
from typing import Literal

import numpy as np

from kvist import KVCacheManager, NeverFits, OutOfBlocks, Sequence
from kvist.config import CacheConfig, GroupSpec
from kvist.core.extents import Namespace
from kvist.core.tokens import MAX_TOKEN
from kvist.errors import ArgumentError, ArgumentTypeError, ConfigError

__all__ = ["Chunk", "FinishReason", "Request", "Scheduler"]

FinishReason = Literal["stop", "length", "aborted"]


@dataclass(eq=False, slots=True)
class Request:
    """A prompt, its limits, and what has been generated from it so far; its scheduler alone changes it.

    `stop_token_ids` end the text and are part of it. With `reuse=False` the prompt is computed anew, whatever is
    cached. `num_cached_tokens` is None until the request is first admitted. Raises `ArgumentError` for an empty prompt,
    a token outside 0 .. 2**31 - 1, or `max_new_tokens` under 1, and `ArgumentTypeError` for tokens that are no ints.
    """

    prompt: InitVar[Iterable[int]]
    max_new_tokens: int
    stop_token_ids: Collection[int] = ()
    namespace: Namespace = ()
    reuse: bool = True
    tokens: array[int] = field(init=False, repr=False)
    num_prompt_tokens: int = field(init=False)
    num_cached_tokens: int | None = field(init=False, default=None)
    num_preemptions: int = field(init=False, default=0)
    finish_reason: FinishReason | None = field(init=False, default=None)
    sequence: Sequence | None = field(init=False, default=None, repr=False)

    def __post_init__(self, prompt: Iterable[int]) -> None:
        self.tokens = _token_array(prompt)
        self.num_prompt_tokens = len(self.tokens)
        if self.max_new_tokens < 1:
            raise ArgumentError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")

    @property
    def output(self) -> list[int]:
        """The generated tokens, in order."""
        return self.tokens[self.num_prompt_tokens :].tolist()

    @property
    def num_generated_tokens(self) -> int:
        """How many tokens follow the prompt."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens `[start, end)` of one request, to be computed in one step.

    With `is_last` these are all the tokens known so far, and the step yields the next one.
    """

    request: Request
    sequence: Sequence
    start: int
    end: int
    is_last: bool

    @property
    def num_tokens(self) -> int:
        """How many tokens are to be computed."""
        return self.end - self.start


class Scheduler:
    """Continuous batching, first come first served, over one `KVCacheManager`.

    A step computes at most `max_step_tokens` tokens, in order of arrival: one of every request that generates, then
    prompts in chunks. A prompt is admitted when those before it leave budget, so it finds in the cache most of a long
    prefix that it shares with them. Chunks end where the manager wants states of recurrent layers to be kept. When no
    block is left for a running request, the latest arrival is preempted: its sequence is suspended, and waits in front
    of all others to be resumed and to compute again what was evicted meanwhile.

    `is_ready` says of a waiting request whether what is being loaded for it has come or is given up; until then those
    behind it pass. Such a request arrives, as far as the order is concerned, when it is admitted, and nobody passes one
    that was preempted. So order of arrival is never broken: every request that was preempted arrived after every
    running one. The oldest request is never preempted for another, each step takes it forward, and all requests end.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        max_running: int,
        max_step_tokens: int,
        is_ready: Callable[[Request], bool] = lambda _: True,
    ) -> None:
        if not 1 <= max_running <= max_step_tokens:
            raise ConfigError(
                [
                    f"max_step_tokens ({max_step_tokens}) must be at least max_running ({max_running}), "
                    "and both at least 1: every running request takes one token of each step"
                ]
            )
        self._manager = manager
        self._max_running = max_running
        self._max_step_tokens = max_step_tokens
        self._is_ready = is_ready
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    @property
    def waiting(self) -> tuple[Request, ...]:
        """Requests without blocks, the next to be admitted first."""
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests with blocks, in order of arrival."""
        return tuple(self._running)

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._waiting or self._running)

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises `NeverFits` when it would not fit even if it had the cache to itself, `ArgumentError` when it was
        submitted before.
        """
        if request.sequence is not None or request.is_finished or request in self._waiting:
            raise ArgumentError("this request was submitted before; make a new one")
        self._refuse_never_fitting(request)
        self._waiting.append(request)

    def abort(self, request: Request) -> None:
        """End a request now, whatever its state; its computed blocks stay reusable. An ended one stays as it is.

        Raises `ArgumentError` for a request that was not submitted here.
        """
        if request.is_finished:
            return
        if request in self._running:
            self._running.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        else:
            raise ArgumentError("this request was not submitted to this scheduler")
        self._end(request, "aborted")

    def plan(self) -> list[Chunk]:
        """Choose the next step's work, in order of arrival, admitting and preempting as blocks allow.

        The blocks of the chunks are allocated when this returns. A step that failed can be planned again, also where a
        copy has failed that running sequences needed, and the manager has suspended these. Without chunks, all requests
        there are wait for what is being loaded.
        Raises `OutOfBlocks` when the oldest request lacks blocks that no request of this scheduler holds, as by pins.
        """
        self._set_aside_suspended()
        self._append_generated()
        chunks: list[Chunk] = []
        budget = self._max_step_tokens
        at = 0
        while at < len(self._running):  # which a request that needs blocks may shorten from its end
            budget -= self._take_chunk(self._running[at], budget, chunks)
            at += 1
        while budget and self._admit_next():
            budget -= self._take_chunk(self._running[-1], budget, chunks)
        return chunks

    def complete(self, chunks: list[Chunk], next_tokens: Iterable[int]) -> list[Request]:
        """Record that `chunks` are computed: commit them, and add one token to each request whose chunk is its last.

        `next_tokens` are those tokens, in the order of the chunks. Requests aborted meanwhile are passed over.
        Returns the requests that got a token; those that reached a limit are finished and hold no blocks.
        Raises `ArgumentError` when there are not as many tokens as last chunks.
        """
        live = [chunk for chunk in chunks if chunk.request.sequence is chunk.sequence]
        grown = [chunk for chunk in chunks if chunk.is_last]
        tokens = list(next_tokens)
        if len(tokens) != len(grown):
            raise ArgumentError(
                f"{len(grown)} chunks are the last of their requests, but {len(tokens)} tokens were given"
            )
        pairs = list(zip(grown, tokens, strict=True))
        if live:
            ends = np.array([chunk.end for chunk in live], dtype=np.int64)
            self._manager.commit([chunk.sequence for chunk in live], ends)
        received = [(chunk.request, token) for chunk, token in pairs if chunk.request.sequence is chunk.sequence]
        for request, token in received:
            request.tokens.append(token)
            self._end_if_done(request, token)
        return [request for request, _ in received]

    def _refuse_never_fitting(self, request: Request) -> None:
        # The last new token is never an input, so it needs no place in the cache.
        num_tokens = request.num_prompt_tokens + request.max_new_tokens - 1
        asked = f"{request.num_prompt_tokens} prompt tokens and {request.max_new_tokens} new ones"
        config = self._manager.config
        if num_tokens > config.max_sequence_length:
            raise NeverFits(
                f"{asked} make a sequence of {num_tokens}, but max_sequence_length is {config.max_sequence_length}; "
                "shorten the prompt or ask for fewer new tokens"
            )
        for group, pool in enumerate(config.pool_of):
            sharing = [kind for kind, other in zip(config.groups, config.pool_of, strict=True) if other == pool]
            num_blocks = sum(_num_blocks(kind, num_tokens, config) for kind in sharing)
            if num_blocks > config.group_num_blocks[group]:
                whole = "cache" if len(config.groups) == 1 else f"pool of group {group}"
                raise NeverFits(
                    f"{asked} need {num_blocks} blocks of {config.block_size} tokens, but the whole {whole} has "
                    f"{config.group_num_blocks[group]}; give it more blocks, shorten the prompt or ask for fewer new "
                    "tokens"
                )

    def _set_aside_suspended(self) -> None:
        """Let requests whose sequences the manager has suspended wait again, and those that arrived after them."""
        while any(_sequence(request).is_suspended for request in self._running):
            self._set_aside(self._running.pop())

    def _append_generated(self) -> None:
        """Give each running request its last generated token as input, preempting the latest arrivals until all fit."""
        while behind := [request for request in self._running if len(request.tokens) > _sequence(request).num_tokens]:
            tokens = np.array([request.tokens[-1] for request in behind], dtype=np.int32)
            try:
                self._manager.append([_sequence(request) for request in behind], tokens)
            except OutOfBlocks:
                if not self._preempt_latest():
                    raise

    def _preempt_latest(self) -> bool:
        """Suspend the latest arrival; False where it is the only one that runs."""
        if len(self._running) == 1:
            return False
        self._set_aside(self._running.pop())
        return True

    def _set_aside(self, request: Request) -> None:
        """Let a request that ran wait in front of all others."""
        sequence = _sequence(request)
        if not sequence.is_suspended:
            self._manager.suspend(sequence)
        request.num_preemptions += 1
        self._waiting.appendleft(request)

    def _admit_next(self) -> bool:
        """Move the first ready request to the running ones; False when there is none or it must go on waiting."""
        if len(self._running) == self._max_running or (request := self._next_ready()) is None:
            return False
        try:
            self._admit(request)
        except OutOfBlocks:
            if not self._running:
                raise
            return False
        self._waiting.remove(request)
        self._running.append(request)
        return True

    def _next_ready(self) -> Request | None:
        for request in self._waiting:
            if self._is_ready(request):
                return request
            if request.num_preemptions:
                return None
        return None

    def _admit(self, request: Request) -> None:
        if request.sequence is not None:
            self._resume(request, request.sequence)
            return
        request.sequence = self._manager.add_sequence(request.tokens, namespace=request.namespace, reuse=request.reuse)
        request.num_cached_tokens = request.sequence.num_cached_tokens

    def _resume(self, request: Request, sequence: Sequence) -> None:
        """Let a preempted request go on with all its tokens; it stays suspended where they do not fit."""
        self._manager.resume(sequence, np.array(request.tokens[sequence.num_suspended_tokens :], np.int32))

    def _take_chunk(self, request: Request, budget: int, chunks: list[Chunk]) -> int:
        """Plan as many of the request's tokens as the budget and the manager allow; return how many."""
        sequence = _sequence(request)
        start = sequence.num_computed_tokens
        wanted = min(sequence.num_tokens - start, budget)
        num_tokens = self._manager.chunk_limit(sequence, wanted)
        if wanted and not num_tokens and self._reserve_chunk(request):
            num_tokens = self._manager.chunk_limit(sequence, wanted)
        if num_tokens:
            end = start + num_tokens
            chunks.append(Chunk(request, sequence, start, end, is_last=end == sequence.num_tokens))
        return num_tokens

    def _reserve_chunk(self, request: Request) -> bool:
        """Get blocks of windows for the next chunk, preempting the latest arrivals; False if that is the request."""
        while True:
            try:
                self._manager.reserve([_sequence(request)], 0)
            except OutOfBlocks:
                if not self._preempt_latest():
                    raise
                if request is self._waiting[0]:
                    return False
            else:
                return True

    def _end_if_done(self, request: Request, token: int) -> None:
        if token in request.stop_token_ids:
            reason: FinishReason = "stop"
        elif request.num_generated_tokens >= request.max_new_tokens:
            reason = "length"
        else:
            return
        self._running.remove(request)
        self._end(request, reason)

    def _end(self, request: Request, reason: FinishReason) -> None:
        sequence, request.sequence = request.sequence, None
        request.finish_reason = reason
        if sequence is not None:
            self._manager.free(sequence)


def _num_blocks(group: GroupSpec, num_tokens: int, config: CacheConfig) -> int:
    """Count the blocks of a group that a sequence of so many tokens has at most, if all of it is computed in chunks.

    What a chunk of C tokens sees in a window of W are W - 1 + C tokens, which touch one block more than they fill.
    """
    if group.kind == "state":
        return 1
    num_columns = -(-num_tokens // config.block_size)
    span = group.window or group.chunk_tokens
    if not span or config.max_chunk_tokens is None:
        return num_columns
    num_sinks = -(-group.sink_tokens // config.block_size)
    return min(num_columns, num_sinks + 1 + -(-(span + config.max_chunk_tokens - 2) // config.block_size))


def _sequence(request: Request) -> Sequence:
    assert request.sequence is not None, "running requests have a sequence"
    return request.sequence


def _token_array(tokens: Iterable[int]) -> array[int]:
    try:
        given = array("q", tokens)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"tokens must be ints: {error}") from error
    except OverflowError as error:
        raise ArgumentError(f"tokens must be in 0 .. {MAX_TOKEN}, and one of them needs more than 64 bits") from error
    if not given:
        raise ArgumentError("the prompt must have at least one token")
    if min(given) < 0 or max(given) > MAX_TOKEN:
        raise ArgumentError(f"tokens must be in 0 .. {MAX_TOKEN}, got {min(given)} .. {max(given)}")
    return array("i", given)
