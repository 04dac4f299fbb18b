"""What a look at the cache found, and the hold that it can be turned into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from kvist.core.extents import Namespace

__all__ = ["Pin", "PrefixMatch"]


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """How much of a prompt could be reused when it was looked up: a fact of that moment, it holds nothing.

    `num_block_tokens` lie in whole blocks, `num_partial_tokens` more in a block that agrees in part. `runs` are the
    packed ids of the whole blocks, each with the number of its bytes that count: what the tree has in bytes is not
    copied for them.
    """

    namespace: Namespace
    num_prompt_tokens: int
    num_block_tokens: int = 0
    num_partial_tokens: int = 0
    runs: tuple[tuple[bytes, int], ...] = field(default=(), repr=False)

    @property
    def tokens(self) -> bytes:
        """The packed ids of what was found in whole blocks."""
        return b"".join(run[:size] for run, size in self.runs)

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

    __slots__ = ("_release", "is_released", "namespace", "num_tokens")

    def __init__(self, release: Callable[[Pin], None], namespace: Namespace, num_tokens: int) -> None:
        self._release = release
        self.namespace = namespace
        self.num_tokens = num_tokens
        self.is_released = False

    def release(self) -> None:
        """End the hold; a second time is a SequenceError."""
        self._release(self)
        self.is_released = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_released:
            self.release()
