"""Chooses each next token from its logits: the likeliest, or one drawn with a request's own stream of chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvist.errors import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Sampler", "SamplingParams", "choose_tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen, and when it ends.

    `temperature` 0 takes the likeliest token. Otherwise logits are divided by it; then only the `top_k` likeliest
    tokens remain, and of these the likeliest that together reach the probability `top_p`. The same `seed` gives the
    same text, whatever else is in the batch; None takes a new one each time. `stop_token_ids` None means the model's
    own end-of-sequence tokens, an empty tuple none.

    Raises `ArgumentError` for a setting out of range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ArgumentError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise ArgumentError(f"temperature must be 0 (greedy) or a positive number, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ArgumentError(f"top_k must be at least 1, or None for all tokens, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ArgumentError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.seed is not None and self.seed < 0:
            raise ArgumentError(f"seed must not be negative, got {self.seed}")


class Sampler:
    """One request's chooser of tokens; its draws depend on its seed and how many it has made, on no other request."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._random = np.random.default_rng(params.seed)

    @property
    def is_greedy(self) -> bool:
        """Whether it takes the likeliest token, always."""
        return self.params.temperature == 0

    def choose(self, logits: Tensor) -> int:
        """Return a token drawn from `logits`, `[vocab_size]` of any floating dtype."""
        if self.is_greedy:
            return int(logits.argmax())
        tokens, probabilities = candidates(logits, self.params)
        cumulative = probabilities.cumsum(0)
        # The last sum may fall short of 1 by rounding, and a draw above it must still be a candidate.
        drawn = int((cumulative <= self._random.random() * float(cumulative[-1])).sum())
        return int(tokens[min(drawn, len(tokens) - 1)])


def candidates(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Return the tokens that may be drawn, likeliest first, and their float64 probabilities, which sum to 1.

    Equal logits are ordered by token id, so that ties are settled alike on every device.
    """
    scores, tokens = (logits.double().cpu() / params.temperature).sort(descending=True, stable=True)
    if params.top_k is not None:
        scores, tokens = scores[: params.top_k], tokens[: params.top_k]
    probabilities = scores.softmax(0)
    if params.top_p < 1:
        # A token stays while those before it are still short of top_p; so the likeliest always stays.
        num_kept = int((probabilities.cumsum(0) - probabilities < params.top_p).sum())
        tokens, probabilities = tokens[:num_kept], probabilities[:num_kept]
    return tokens, probabilities / probabilities.sum()


def choose_tokens(logits: Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """Return one token a row of `logits`, `[N, vocab_size]`; greedy rows are decided together, on their device."""
    greedy: list[int] = logits.argmax(dim=-1).tolist()
    return [
        token if sampler.is_greedy else sampler.choose(row)
        for token, row, sampler in zip(greedy, logits, samplers, strict=True)
    ]
