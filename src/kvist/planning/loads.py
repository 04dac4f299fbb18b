"""The sequence for which room is planned."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.config import CacheConfig
from kvist.errors import ArgumentError

__all__ = ["Load", "as_load", "ceil_div", "check_count", "load_or_typical"]


@dataclass(frozen=True, slots=True)
class Load:
    """One sequence at its longest, for which room is planned.

    Of its `num_tokens`, `num_prompt_tokens` (all where None) are its prompt, computed in one forward pass or in chunks
    of the configuration's `max_chunk_tokens`. The others are generated, at most `step_tokens` in a pass (1 + draft
    tokens), by each of `num_beams`, which share the prompt. What a decoder attends to across has `encoder_tokens`.
    """

    num_tokens: int
    num_prompt_tokens: int | None = None
    num_beams: int = 1
    step_tokens: int = 1
    encoder_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("num_tokens", "num_beams", "step_tokens"):
            check_count(getattr(self, name), name, at_least=1)
        check_count(self.encoder_tokens, "encoder_tokens", at_least=0)
        if self.num_prompt_tokens is not None:
            check_count(self.num_prompt_tokens, "num_prompt_tokens", at_least=1)
            if self.num_prompt_tokens > self.num_tokens:
                raise ArgumentError(
                    f"num_prompt_tokens is {self.num_prompt_tokens}, more than num_tokens={self.num_tokens}"
                )

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.num_tokens if self.num_prompt_tokens is None else self.num_prompt_tokens


def as_load(config: CacheConfig, load: int | Load) -> Load:
    """Return a load as such; a number of tokens is a prompt of that length."""
    load = load if isinstance(load, Load) else Load(load)
    if load.num_beams > config.max_beams:
        raise ArgumentError(f"num_beams is {load.num_beams}, more than max_beams={config.max_beams}")
    return load


def load_or_typical(config: CacheConfig, load: int | Load | None) -> Load:
    """Return a load, where there is none that of a prompt of `typical_length`, or of `max_sequence_length`."""
    return as_load(config, (config.typical_length or config.max_sequence_length) if load is None else load)


def check_count(value: object, name: str, *, at_least: int) -> None:
    """Raise `ArgumentError` for what is no int of at least so much."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ArgumentError(f"{name} is {value!r}, must be an int of at least {at_least}")


def ceil_div(number: int, size: int) -> int:
    """Return how many pieces of a size a number needs, such as blocks for tokens."""
    return -(-number // size)
