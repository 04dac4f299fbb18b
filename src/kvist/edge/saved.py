"""A prompt's cache, saved from one slot and restored to others, and how much of a longer prompt it spares."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvist.errors import ArgumentError

__all__ = ["PromptReuse", "SavedPrefix", "reuse_of"]


@dataclass(frozen=True, slots=True, eq=False)
class SavedPrefix:
    """The first `num_tokens` of a slot; what `captureKVCache`, `captureRecurrentStates` and `captureConvStates` return.

    `kv` has a tensor `[2, num_tokens, num_kv_heads, head_dim]` for each attention layer, of its dtype, that of an owner
    for those that share its pool; `scales` are theirs, so that fp8 numbers keep their meaning. `recurrent` and `conv`
    are the states of the recurrent layers as they were, after however many tokens that was.
    """

    num_tokens: int
    kv: tuple[Tensor, ...]
    scales: tuple[tuple[float, float], ...]
    recurrent: tuple[Tensor, ...]
    conv: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class PromptReuse:
    """How a prompt begins with a saved one: so many tokens are reused, so many are left to prefill."""

    num_reused_tokens: int
    num_prefill_tokens: int


def reuse_of(num_saved_tokens: int, num_tokens: int) -> PromptReuse:
    """Say what a prompt of `num_tokens` reuses of a saved one, as Edge-LLM does with system prompts: all but its last.

    A recurrent state to go on from is that after `num_reused_tokens`, not after all that were saved. Raises
    `ArgumentError` unless the saved prompt has tokens, and fewer than the other.

    >>> reuse_of(8, 20)
    PromptReuse(num_reused_tokens=7, num_prefill_tokens=13)
    """
    if not 0 < num_saved_tokens < num_tokens:
        raise ArgumentError(f"{num_saved_tokens} tokens are saved, must be at least 1 and fewer than the {num_tokens}")
    return PromptReuse(num_saved_tokens - 1, num_tokens - num_saved_tokens + 1)
