"""What a look at the cache found, and the hold that it can be turned into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from kvist.core.extents import Namespace
from kvist.core.tokens import TOKEN_BYTES

__all__ = ["Pin", "PrefixMatch"]


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """How much of a prompt could be reused when it was looked up: a fact of that moment, it holds nothing.

    `num_partial_tokens` of `num_tokens` lie in a block that agrees in part, the rest in whole blocks, whose packed ids
    are `tokens`.
    """

    tokens: bytes = field(repr=False)
    namespace: Namespace
    num_prompt_tokens: int
    num_partial_tokens: int

    @property
    def num_block_tokens(self) -> int:
        """Tokens found in whole blocks."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def num_tokens(self) -> int:
        """Tokens that need not be computed, at most all but the last."""
        return self.num_block_tokens + self.num_partial_tokens

    @property
    def num_missing_tokens(self) -> int:
        """Tokens that would have to be computed."""
        return self.num_prompt_tokens - self.num_tokens


class Pin:
    """Keeps `num_tokens` leading tokens of a prefix in the cache until it is released, once."""

    __slots__ = ("_release", "namespace", "num_tokens")

    def __init__(self, release: Callable[[Pin], None], namespace: Namespace, num_tokens: int) -> None:
        self._release = release
        self.namespace = namespace
        self.num_tokens = num_tokens

    def release(self) -> None:
        """End the hold; a second time is a SequenceError."""
        self._release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
