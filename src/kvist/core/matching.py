"""What a look at the cache found, and the hold that it can be turned into."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from kvist.core.extents import Namespace
from kvist.core.lower import DEVICE, HOST

__all__ = ["Awaited", "Pin", "Prefetch", "PrefixMatch"]


class PrefixMatch(NamedTuple):
    """How much of a prompt could be reused when it was looked up: a fact of that moment, it holds nothing.

    `num_block_tokens` lie in whole blocks, `num_partial_tokens` more in a block that agrees in part. `miss` says why it
    is not more: "cold", "evicted", "uncommitted", "under a block", "window", or nothing where only the last token is
    missing. What was evicted went `evicted_s` seconds before, for the reason `eviction`. Nothing of a match depends on
    what other namespaces hold.
    `num_known_tokens` are known to the cache, in whole blocks, although windows or states to go on from are not there.
    `runs` are the packed ids of the whole blocks, each with the number of its bytes that count: what the tree has in
    bytes is not copied for them. With a host tier, `num_host_tokens` of the tokens in whole blocks are there. `stored`
    are tokens beyond these that stores say they have, by the store's name: they come if they come in time.
    """

    namespace: Namespace
    num_prompt_tokens: int
    num_block_tokens: int = 0
    num_partial_tokens: int = 0
    num_known_tokens: int = 0
    miss: str = ""
    evicted_s: float | None = None
    eviction: str = ""
    runs: tuple[tuple[bytes, int], ...] = ()
    num_host_tokens: int | None = None
    stored: tuple[tuple[str, int], ...] = ()

    def __repr__(self) -> str:
        told = (f"{name}={value!r}" for name, value in zip(self._fields[:8], self, strict=False))
        return f"PrefixMatch({', '.join(told)})"

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

    @property
    def tiers(self) -> dict[str, int]:
        """Tokens by the tier that they were found in, with those that stores say they have."""
        if self.num_host_tokens is None:
            return {DEVICE: self.num_tokens, **dict(self.stored)}
        return {DEVICE: self.num_tokens - self.num_host_tokens, HOST: self.num_host_tokens, **dict(self.stored)}


class Awaited(Protocol):
    """What is going on behind the caller's back."""

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has, at most so long; returns whether it has."""


class Prefetch:
    """What a call of `prefetch` did: `num_tokens` of the prompt are on the device now, in whole blocks.

    Stores were asked for `num_asked_tokens` more. `is_done` says whether all that they have of these has come, or the
    time for it is over.
    """

    __slots__ = ("_coming", "num_asked_tokens", "num_tokens")

    def __init__(self, num_tokens: int, num_asked_tokens: int = 0, coming: Awaited | None = None) -> None:
        self.num_tokens = num_tokens
        self.num_asked_tokens = num_asked_tokens
        self._coming = coming

    def __repr__(self) -> str:
        coming = f", {self.num_asked_tokens} tokens asked for" if self.num_asked_tokens else ""
        return f"<Prefetch: {self.num_tokens} tokens on the device{coming}>"

    @property
    def is_done(self) -> bool:
        """Whether nothing is still to come."""
        return self._coming is None or self._coming.is_done

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is still to come, at most so long; returns whether that is so."""
        return self._coming is None or self._coming.wait(timeout_s)


class Pin:
    """Keeps `num_tokens` leading tokens of a prefix in the cache until it is released, once, or its lifetime ends."""

    __slots__ = ("_release", "expires_at_s", "is_released", "namespace", "num_tokens")

    def __init__(
        self, release: Callable[[Pin], None], namespace: Namespace, num_tokens: int, expires_at_s: float | None
    ) -> None:
        self._release = release
        self.namespace = namespace
        self.num_tokens = num_tokens
        self.expires_at_s = expires_at_s
        self.is_released = False

    def __repr__(self) -> str:
        end = "released" if self.is_released else f"{self.num_tokens} tokens in namespace {self.namespace!r}"
        return f"<Pin {end}>"

    def release(self) -> None:
        """End the hold; a second time is a SequenceError, unless its lifetime has ended it meanwhile."""
        self._release(self)
        self.is_released = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_released:
            self.release()
