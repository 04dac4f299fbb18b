"""Kvist and the per-block objects side by side: how a benchmark builds both, and what it makes both do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from harness import Prepare, Work
from kvist import AttentionSpec, CacheConfig, KVCacheManager
from references import ObjectPerBlockManager, ObjectSequence
from workloads import Tokens

__all__ = ["BLOCK_SIZE", "fill", "kvist_manager", "serve", "serve_objects", "serving", "step", "step_objects"]

BLOCK_SIZE = 16
Serve = Callable[[Sequence[Tokens]], int]


def kvist_manager(num_blocks: int, *, max_sequences: int = 256, max_sequence_length: int = 32_768) -> KVCacheManager:
    """A manager that only decides, with the default policy and partial reuse on, as users get it."""
    config = CacheConfig(
        layers=[AttentionSpec(num_kv_heads=8, head_dim=128)],
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_sequences=max_sequences,
        max_sequence_length=max_sequence_length,
    )
    return KVCacheManager(config)


def serve(manager: KVCacheManager, prompts: Sequence[Tokens]) -> int:
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


def serve_objects(manager: ObjectPerBlockManager, prompts: Sequence[Tokens]) -> int:
    """Do as `serve` does, with one object per block."""
    num_cached = 0
    for tokens in prompts:
        sequence = manager.add_sequence(tokens)
        num_cached += sequence.num_cached_tokens
        manager.commit(sequence)
        manager.free(sequence)
    return num_cached


def serving(serve_prompts: Serve, batch: Callable[[], Sequence[Tokens]]) -> Prepare:
    """A contestant that serves one batch a repetition; the prompts are made outside the timed part."""

    def prepare(_: int) -> Work:
        prompts = batch()
        return Work(partial(serve_prompts, prompts), len(prompts))

    return prepare


def fill(serve_prompts: Serve, batch: Callable[[], Sequence[Tokens]], num_blocks: int) -> None:
    """Serve requests until the blocks they published would have filled a pool of num_blocks a tenth over."""
    num_published = 0
    while num_published < 1.1 * num_blocks:
        prompts = batch()
        num_full = sum(len(tokens) // BLOCK_SIZE for tokens in prompts)
        num_published += num_full - serve_prompts(prompts) // BLOCK_SIZE


def step(manager: KVCacheManager, rows: NDArray[np.int64], tokens: Tokens) -> None:
    """One decode step: a token for each row, int32 `[len(rows)]`, and all of it computed."""
    manager.append(rows, tokens)
    manager.commit(rows)


def step_objects(manager: ObjectPerBlockManager, sequences: Iterable[ObjectSequence], tokens: Tokens) -> None:
    """One decode step by a call per sequence."""
    append, commit = manager.append, manager.commit
    for sequence, token in zip(sequences, tokens.tolist(), strict=True):
        append(sequence, token)
        commit(sequence)
