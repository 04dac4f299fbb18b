"""Continuous batching of a `transformers` decoder over a managed, paged KV cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvist import CacheConfig, KVCacheManager
from kvist.config import AttentionSpec, LayerSpec, StateSpec, is_quantised
from kvist.core.extents import Namespace
from kvist.errors import ArgumentError, ConfigError
from kvist.memory.arena import TorchMemory
from kvist.serve.layers import ModelLayers
from kvist.serve.loading import Loading, PrefillRate, num_prefill_tokens
from kvist.serve.model import max_positions, named, supported_layers
from kvist.serve.observing import NO_OBSERVER, EngineObserver
from kvist.serve.runner import Runner
from kvist.serve.sampling import Sampler, SamplingParams, choose_tokens
from kvist.serve.scheduler import Chunk, FinishReason, Request, Scheduler

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Engine", "Generation", "RequestStats", "TokenEvent"]

GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token: the `index`th of its generation, with the reason on the last one."""

    generation: Generation
    index: int
    token: int
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class RequestStats:
    """What one request took.

    `num_cached_tokens` of the prompt were found in the cache when it was first admitted, and not computed; None before
    that. Times are seconds since it was submitted; None for what has not happened yet.
    """

    num_prompt_tokens: int
    num_cached_tokens: int | None
    num_generated_tokens: int
    num_preemptions: int
    time_to_first_token_s: float | None
    duration_s: float | None


class Generation:
    """A submitted request: its text so far, why it ended, and what it took. Made by `Engine.submit`."""

    def __init__(self, request: Request, sampler: Sampler, submitted_s: float) -> None:
        self._request = request
        self._sampler = sampler
        self._submitted_s = submitted_s
        self._first_token_s: float | None = None
        self._finished_s: float | None = None

    def __repr__(self) -> str:
        stats = self.stats
        return (
            f"Generation({stats.num_prompt_tokens} prompt tokens, {stats.num_generated_tokens} generated, "
            f"finish_reason={self.finish_reason!r})"
        )

    @property
    def token_ids(self) -> list[int]:
        """The generated tokens, without the prompt; the last is the stop token if one ended it."""
        return self._request.output

    @property
    def num_tokens(self) -> int:
        """How many tokens have been generated."""
        return self._request.num_generated_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        """`"stop"` at a stop token, `"length"` at the limit, `"aborted"`, or None while it goes on."""
        return self._request.finish_reason

    @property
    def is_finished(self) -> bool:
        """Whether no more tokens will come."""
        return self._request.is_finished

    @property
    def stats(self) -> RequestStats:
        """Counts and times up to now."""
        return RequestStats(
            num_prompt_tokens=self._request.num_prompt_tokens,
            num_cached_tokens=self._request.num_cached_tokens,
            num_generated_tokens=self._request.num_generated_tokens,
            num_preemptions=self._request.num_preemptions,
            time_to_first_token_s=_since(self._submitted_s, self._first_token_s),
            duration_s=_since(self._submitted_s, self._finished_s),
        )


class Engine:
    """Generates with one model for many requests at once, reusing what earlier requests left in the cache.

    `config` must be one of `cache_config(model, ...)`; its `max_sequences` is how many requests run at once. A step
    computes at most `max_step_tokens` tokens, prompts in chunks. The model is used in evaluation mode and otherwise
    left as it is, so it can be used directly between steps. One thread at a time may call an engine.

    An `observer` is told of requests and steps; `kvist.wire.engine_spans.EngineSpans` makes spans of them.

    With tiers on disk or in the network, what they have of the first waiting prompts is fetched ahead: a request waits
    for it, for as long as the tiers' time limit, and others run. What would take longer to load than to compute is
    computed; the engine measures how fast that goes. Such an engine is to be closed.

    Raises `ConfigError` for a model with layers that are not supported, and for limits that contradict each other; and
    what opening the tiers raises: `ModuleNotFoundError`, which names the extra, for a client that is not installed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: CacheConfig,
        *,
        max_step_tokens: int = 512,
        clock: Callable[[], float] = time.perf_counter,
        observer: EngineObserver = NO_OBSERVER,
    ) -> None:
        self._observer = observer
        self.model = model.eval()
        layers = supported_layers(model)
        _check_geometry(model, layers, config)
        # A window then needs room for a step's tokens, not for a whole prompt.
        config = replace(config, max_chunk_tokens=min(config.max_chunk_tokens or max_step_tokens, max_step_tokens))
        config = named(model, config)
        self.memory = TorchMemory(config, device=layers.device)
        self.manager = KVCacheManager(config, memory=self.memory)
        self._clock = clock
        self._loading = Loading(self.manager, clock) if config.stores and config.reuse else None
        self.manager.asks_stores = self._loading is None  # which asks for all, and knows when to stop waiting
        self._prefill_rate = PrefillRate()
        self.scheduler = Scheduler(
            self.manager,
            max_running=config.max_sequences,
            max_step_tokens=max_step_tokens,
            is_ready=self._loading.is_ready if self._loading else lambda _: True,
        )
        self._runner = Runner(model, layers, self.manager, self.memory)
        self._generations: dict[Request, Generation] = {}

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return self.scheduler.has_work

    def submit(
        self,
        prompt: Iterable[int],
        sampling: SamplingParams = GREEDY,
        *,
        namespace: Namespace = (),
        reuse: bool = True,
    ) -> Generation:
        """Queue a prompt of token ids; `step` takes it forward.

        Nothing is reused across namespaces, nor with `reuse=False`.
        Raises `NeverFits` if it would not fit even alone, and `ArgumentError` for an empty prompt or tokens that are
        none.
        """
        stop = self._model_stop_tokens() if sampling.stop_token_ids is None else sampling.stop_token_ids
        request = Request(prompt, sampling.max_new_tokens, frozenset(stop), namespace, reuse)
        self._check_tokens(request)
        self.scheduler.submit(request)
        generation = Generation(request, Sampler(sampling), self._clock())
        self._generations[request] = generation
        self._observer.submitted(request)
        if self._loading is not None:
            self._loading.begin(self.scheduler.waiting)
        return generation

    def step(self) -> list[TokenEvent]:
        """Run one forward pass and return the tokens that it yielded; none when there is no work.

        Where all requests wait for what is being loaded, so does this, until the first has it or its time is over, and
        yields nothing yet.

        Raises `OutOfBlocks` when blocks that no request holds, such as pinned ones, keep the oldest request from going
        on.
        """
        chunks = self._plan()
        if not chunks:
            return []
        self._observer.began(chunks)
        began = self._clock() if self._loading is not None else 0.0
        computed = self._runner.compute(chunks)
        samplers = [self._generations[chunk.request]._sampler for chunk in chunks if chunk.is_last]
        tokens = choose_tokens(computed.logits, samplers)
        computed.store()
        grown = self.scheduler.complete(chunks, tokens)
        self._observer.computed(chunks)
        now = self._clock()
        if self._loading is not None:
            self.manager.prefill_tokens_per_s = self._prefill_rate.note(chunks, now - began)
            if num_prefill_tokens(chunks) >= self.manager.config.block_size:
                # Now, since stores refuse what comes all at once when a long prompt has ended; it waits for none.
                self.manager.flush(0.0)
        return [self._record(request, now) for request in grown]

    def _plan(self) -> list[Chunk]:
        if self._loading is None:
            return self.scheduler.plan()
        self._loading.begin(self.scheduler.waiting)
        chunks = self.scheduler.plan()
        if not chunks and self.scheduler.has_work:
            self._loading.wait()  # and no more: then it is the next step's turn
        return chunks

    def stream(
        self,
        prompt: Iterable[int],
        sampling: SamplingParams = GREEDY,
        *,
        namespace: Namespace = (),
        reuse: bool = True,
    ) -> Iterator[TokenEvent]:
        """Submit a prompt and yield its tokens as they come, stepping the engine, and so all other requests, meanwhile.

        Closing the iterator early aborts the request. Arguments and errors are those of `submit`, raised by this call.
        """
        return self._follow(self.submit(prompt, sampling, namespace=namespace, reuse=reuse))

    def generate(self, prompts: Iterable[Iterable[int]], sampling: SamplingParams = GREEDY) -> list[Generation]:
        """Submit all prompts, run until all are finished, and return them in order.

        Raises what `submit` and `step` raise; then none of these prompts is left in the engine.
        """
        generations: list[Generation] = []
        try:
            for prompt in prompts:
                generations += [self.submit(prompt, sampling)]
            while not all(generation.is_finished for generation in generations):
                self.step()
        except BaseException:
            for generation in generations:
                self.abort(generation)
            raise
        return generations

    def abort(self, generation: Generation) -> None:
        """End a request now and free its blocks; what was computed stays reusable. A finished one stays as it is."""
        self.scheduler.abort(generation._request)
        if self._generations.pop(generation._request, None) is not None:
            generation._finished_s = self._clock()
            self._observer.ended(generation._request)

    def close(self) -> None:
        """Abort all requests, write what tiers still wait for, and close these; without such, it need not be called."""
        for generation in list(self._generations.values()):
            self.abort(generation)
        self.manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _follow(self, generation: Generation) -> Iterator[TokenEvent]:
        index, request = 0, generation._request
        try:
            # Other streams step the engine, too, so tokens and the end may come while this one waits at its yield.
            while index < generation.num_tokens or not generation.is_finished:
                if index == generation.num_tokens:
                    self.step()
                    continue
                is_last = generation.is_finished and index + 1 == generation.num_tokens
                token = request.tokens[request.num_prompt_tokens + index]
                yield TokenEvent(generation, index, token, request.finish_reason if is_last else None)
                index += 1
        finally:
            self.abort(generation)

    def _record(self, request: Request, now: float) -> TokenEvent:
        generation = self._generations[request]
        if generation._first_token_s is None:
            generation._first_token_s = now
        if request.is_finished:
            generation._finished_s = now
            del self._generations[request]
        return TokenEvent(generation, request.num_generated_tokens - 1, request.tokens[-1], request.finish_reason)

    def _model_stop_tokens(self) -> Collection[int]:
        stop = self.model.generation_config.eos_token_id if self.model.generation_config else None
        return [stop] if isinstance(stop, int) else stop or []

    def _check_tokens(self, request: Request) -> None:
        vocab_size = self.model.get_input_embeddings().num_embeddings
        if max(request.tokens) >= vocab_size:
            raise ArgumentError(f"token {max(request.tokens)} is not one of the model's {vocab_size}")


def _check_geometry(model: PreTrainedModel, layers: ModelLayers, config: CacheConfig) -> None:
    """Raise `ConfigError` unless `config` has the layers and positions of the model."""
    problems = []
    if _without_choices(config.layers, layers.specs) != list(layers.specs):
        problems.append(f"layers are not those of {type(model).__name__}; use cache_config(model, ...)")
    if config.ring:
        problems.append("ring is True, but the engine serves windows whose blocks go back, not those written in place")
    num_positions = max_positions(model)
    if num_positions is not None and config.max_sequence_length > num_positions:
        problems.append(
            f"max_sequence_length is {config.max_sequence_length}, but the model has {num_positions} positions"
        )
    if problems:
        raise ConfigError(problems)


def _without_choices(given: Sequence[LayerSpec], own: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return the specs that are given without what is the user's choice: distances of states, and quantised dtypes."""
    specs: list[LayerSpec] = []
    for index, spec in enumerate(given):
        if isinstance(spec, StateSpec):
            specs.append(replace(spec, checkpoint_tokens=None))
        elif is_quantised(spec.dtype) and index < len(own) and isinstance(models := own[index], AttentionSpec):
            specs.append(replace(spec, dtype=models.dtype, k_scale=1.0, v_scale=1.0))
        else:
            specs.append(spec)
    return specs


def _since(start_s: float, then_s: float | None) -> float | None:
    return None if then_s is None else then_s - start_s
