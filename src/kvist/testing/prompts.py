"""Prompts as CacheMachine makes them: token ids, and what tells tokens apart besides."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from itertools import cycle, islice

from kvist.core.identity import Media, MediaKey

__all__ = ["Prompt"]

MEDIA_KEYS: tuple[MediaKey, ...] = ("cat", "1", b"1", 1)
EXTRA_IDS = (1, 2**64 - 1)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids with their media and extra ids; `extra_ids` has one for each token, or is empty for none at all."""

    tokens: tuple[int, ...] = ()
    media: tuple[Media, ...] = ()
    extra_ids: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def symbols(self) -> list[Hashable]:
        """Return what K and V of each position depend on by itself: its token id, or that and more.

        >>> Prompt((7, 8, 9), (Media(1, 2, "cat"),)).symbols()
        [7, (8, 0, 'str', 'cat', 2, 0), (9, 0, 'str', 'cat', 2, 1)]
        """
        found: list[Hashable] = list(self.tokens)
        for at, extra_id in enumerate(self.extra_ids):
            found[at] = (self.tokens[at], extra_id) if extra_id else self.tokens[at]
        for span in self.media:
            for at in range(span.offset, span.end):
                extra_id = self.extra_ids[at] if self.extra_ids else 0
                kind = type(span.key).__name__
                found[at] = (self.tokens[at], extra_id, kind, span.key, span.length, at - span.offset)
        return found

    def cut(self, num_tokens: int) -> Prompt:
        """Return the first tokens, without media that lie only partly among them."""
        media = tuple(span for span in self.media if span.end <= num_tokens)
        return Prompt(self.tokens[:num_tokens], media, self.extra_ids[:num_tokens])

    def followed_by(self, pattern: list[int], num_tokens: int, marks: int = 0) -> Prompt:
        """Return the prompt with a pattern after it; `marks` says whether media cover a part of that, and extra ids."""
        start, added = len(self), tuple(islice(cycle(pattern), num_tokens))
        prompt = self.appended(added)
        if not marks or not added:
            return prompt
        if marks % 3 != 1:
            offset = start + marks // 3 % num_tokens
            length = 1 + marks // 7 % (start + num_tokens - offset)
            prompt = replace(prompt, media=(*self.media, Media(offset, length, MEDIA_KEYS[marks % len(MEDIA_KEYS)])))
        if marks % 3:
            extra_ids = (self.extra_ids or (0,) * start) + (EXTRA_IDS[marks % len(EXTRA_IDS)],) * num_tokens
            prompt = replace(prompt, extra_ids=extra_ids)
        return prompt

    def appended(self, tokens: tuple[int, ...]) -> Prompt:
        """Return the prompt with tokens after it that are nothing but their ids."""
        extra_ids = self.extra_ids + (0,) * len(tokens) if self.extra_ids else ()
        return Prompt(self.tokens + tokens, self.media, extra_ids)
