"""Kvist and its references side by side: how a benchmark builds each, and what it makes each do.

Each gets its tokens in its own kind: Kvist and the lean reference int32 arrays, the field's manager lists of ints. They
are converted outside the timed parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from functools import partial
from itertools import count
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

import kvist
from harness import Prepare, Work
from kvist import AttentionSpec, CacheConfig, KVCacheManager, StateSpec
from references.field import FieldManager, Request
from references.lean import ObjectPerBlockManager, ObjectSequence
from workloads import SharedPrefixes, Tokens

__all__ = [
    "BLOCK_SIZE",
    "FULL",
    "Prompt",
    "admit_field",
    "compute",
    "field_manager",
    "fill",
    "kvist_manager",
    "lean_manager",
    "serve",
    "serve_field",
    "serve_in_chunks",
    "serve_lean",
    "serving",
    "steady",
    "step",
    "step_field",
    "step_lean",
]

BLOCK_SIZE = 16
FULL = AttentionSpec(num_kv_heads=8, head_dim=128)
Prompt = TypeVar("Prompt", bound=Sized)
request_numbers = count()


def kvist_manager(
    num_blocks: int,
    *,
    layers: Sequence[AttentionSpec | StateSpec] = (FULL,),
    policy: str = "priority",
    max_sequences: int = 256,
    max_sequence_length: int = 32_768,
) -> KVCacheManager:
    """A manager that only decides, with partial reuse on, as users get it; every group has so many blocks."""
    config = CacheConfig(
        layers=layers,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_sequences=max_sequences,
        max_sequence_length=max_sequence_length,
        policy=policy,
    )
    return KVCacheManager(config)


def field_manager(num_blocks: int) -> FieldManager:
    """The field's manager; it gets one block more, which it keeps as its null block."""
    return FieldManager(num_blocks + 1, BLOCK_SIZE)


def lean_manager(num_blocks: int) -> ObjectPerBlockManager:
    """The leanest manager of per-block objects."""
    return ObjectPerBlockManager(num_blocks, BLOCK_SIZE)


def serve(manager: KVCacheManager, prompts: Sequence[Tokens] | Sequence[list[int]]) -> int:
    """Admit, commit and free one request after the other; returns the tokens found in the cache.

    The copies of partial reuse are taken each time, as an engine would before it writes.
    """
    num_cached = 0
    for tokens in prompts:
        sequence = manager.add_sequence(tokens)
        num_cached += sequence.num_cached_tokens
        manager.commit([sequence])
        manager.take_moves()
        manager.free(sequence)
    return num_cached


def serve_in_chunks(manager: KVCacheManager, prompts: Sequence[Tokens]) -> int:
    """Do as `serve` does, and commit wherever states are kept."""
    num_cached = 0
    for tokens in prompts:
        sequence = manager.add_sequence(tokens)
        num_cached += sequence.num_cached_tokens
        compute(manager, sequence)
        manager.take_moves()
        manager.free(sequence)
    return num_cached


def compute(manager: KVCacheManager, sequence: kvist.Sequence) -> None:
    """Commit all tokens of a sequence, in chunks that end where states are kept."""
    num_tokens, num_computed = sequence.num_tokens, sequence.num_computed_tokens
    while num_computed < num_tokens:
        num_computed += manager.chunk_limit(sequence, num_tokens - num_computed)
        manager.commit([sequence], num_computed)


def serve_field(manager: FieldManager, prompts: Sequence[list[int]]) -> int:
    """Do as `serve` does, with the field's manager."""
    num_cached = 0
    for tokens in prompts:
        request, num_hit_tokens = admit_field(manager, tokens)
        num_cached += num_hit_tokens
        manager.free(request)
    return num_cached


def admit_field(manager: FieldManager, tokens: list[int]) -> tuple[Request, int]:
    """What a scheduler does to start a request: make it, look it up, allocate all its slots, count them computed.

    Returns the request and the number of tokens found in the cache. Raises RuntimeError if it does not fit.
    """
    request = Request(f"request-{next(request_numbers)}", tokens, manager.block_size)
    hits, num_hit_tokens = manager.computed_blocks(request)
    num_new_tokens = request.num_tokens - num_hit_tokens
    if manager.allocate_slots(request, num_new_tokens, num_hit_tokens, hits) is None:
        raise RuntimeError(f"{num_new_tokens} tokens do not fit")
    request.is_running = True
    request.num_computed_tokens = num_hit_tokens + num_new_tokens
    return request, num_hit_tokens


def serve_lean(manager: ObjectPerBlockManager, prompts: Sequence[Tokens]) -> int:
    """Do as `serve` does, with the lean manager."""
    num_cached = 0
    for tokens in prompts:
        sequence = manager.add_sequence(tokens)
        num_cached += sequence.num_cached_tokens
        manager.commit(sequence)
        manager.free(sequence)
    return num_cached


def serving(serve_prompts: Callable[[Sequence[Prompt]], int], batch: Callable[[], Sequence[Prompt]]) -> Prepare:
    """A contestant that serves one batch a repetition; the prompts are made outside the timed part."""

    def prepare(_: int) -> Work:
        prompts = batch()
        return Work(partial(serve_prompts, prompts), len(prompts))

    return prepare


def fill(
    serve_prompts: Callable[[Sequence[Prompt]], int], batch: Callable[[], Sequence[Prompt]], num_blocks: int
) -> None:
    """Serve requests until the blocks they published would have filled a pool of num_blocks a tenth over."""
    num_published = 0
    while num_published < 1.1 * num_blocks:
        prompts = batch()
        num_full = sum(len(tokens) // BLOCK_SIZE for tokens in prompts)
        num_published += num_full - serve_prompts(prompts) // BLOCK_SIZE


def steady(
    run: Callable[[Sequence[Prompt]], int],
    prompts: SharedPrefixes,
    batch: Callable[[int], Sequence[Prompt]],
    num_blocks: int,
    times: int,
) -> Prepare:
    """A contestant whose pool is full and has every shared prefix."""
    num_prefixes, prefix_tokens = len(prompts.prefixes), len(prompts.prefixes[0])
    fill(run, partial(batch, num_prefixes), num_blocks)
    num_cached = run(batch(num_prefixes))
    if num_cached < num_prefixes * prefix_tokens:
        raise RuntimeError(f"{num_prefixes} prefixes should be cached, but only {num_cached} tokens are")
    return serving(run, partial(batch, times))


def step(manager: KVCacheManager, rows: NDArray[np.int64], tokens: Tokens | list[int]) -> None:
    """One decode step: a token for each row, `[len(rows)]`, and all of it computed."""
    manager.append(rows, tokens)
    manager.commit(rows)


def step_field(manager: FieldManager, requests: Iterable[Request], tokens: list[int]) -> None:
    """One decode step as a scheduler takes it: the token, its slot, and the count of computed tokens, each in turn.

    Raises RuntimeError when the pool is short, where a scheduler would preempt.
    """
    for request, token in zip(requests, tokens, strict=True):
        request.append(token)
        num_new_tokens = request.num_tokens - request.num_computed_tokens
        if manager.allocate_slots(request, num_new_tokens) is None:
            raise RuntimeError("no block is free")
        request.num_computed_tokens += num_new_tokens


def step_lean(manager: ObjectPerBlockManager, sequences: Iterable[ObjectSequence], tokens: list[int]) -> None:
    """One decode step by two calls per sequence."""
    append, commit = manager.append, manager.commit
    for sequence, token in zip(sequences, tokens, strict=True):
        append(sequence, token)
        commit(sequence)
