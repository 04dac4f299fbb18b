"""What a token is besides its id: media spans and extra ids become ids below 0, by which prefixes are told apart.

Token ids are never negative. So whatever must be equal besides them gets a negative int32 of its own, and the prefix
tree, which compares packed ids from the root on, keeps apart what differs without knowing of it:

    position    0    1    2    3    4    5    6    7
    token       5    9    9    9    9    9    9    7
    media            "cat", 4 tokens    | "dog", 2
    extra id    0    0    0    0    0    0    0    8
    packed      5   -3    9    9    9   -4    9   -2

A span is marked at its first position only. All others follow from it, since prefixes are equal only if they are equal
from the root on: which media covers a position, and how far inside it the position lies. The length belongs to the
mark, so that two spans of 3 tokens are not taken for one of 6.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter, index
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvist.core.tokens import MAX_TOKEN, TokenArray
from kvist.errors import ArgumentError, ArgumentTypeError, NeverFits, StaleMatch

__all__ = ["UNKNOWN", "Identity", "IdentityTable", "Media", "MediaKey", "PackedTokens"]

UNKNOWN = -1
"""Stands for an identity that no content has: it is never given out, so a comparison ends there."""
FIRST_ID = -2
LAST_ID = -(2**31)
MAX_EXTRA_ID = 2**64 - 1
MIN_SWEPT = 1024
TOKEN_BITS = 31

MediaKey = str | int | bytes
PackedTokens = bytes | bytearray | memoryview | TokenArray
ExtraIds = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Media:
    """A span of a prompt, in tokens, whose K and V come from something else than its token ids: an image, a sound.

    `key` says what that is, such as a hash of the image and of all that its preparation depends on: a string, an int
    or bytes, and "1", 1 and b"1" are three keys. Raises ArgumentError for a span that is empty or begins before 0.

    >>> Media(offset=3, length=576, key="sha256:9f86d081").end
    579
    """

    offset: int
    length: int
    key: MediaKey

    def __post_init__(self) -> None:
        _check_int(self.offset, "offset", 0)
        _check_int(self.length, "length", 1)
        if type(self.key) not in (str, int, bytes):
            raise ArgumentTypeError(f"media: key is {self.key!r}, must be a string, an int or bytes")

    @property
    def end(self) -> int:
        """The position after its last token."""
        return int(self.offset) + int(self.length)


class Identity(NamedTuple):
    """What a negative id stands for: a token with an extra id, or the first of `length` tokens of media, or both."""

    token: int
    extra_id: int = 0
    key: MediaKey | None = None
    length: int = 0


class IdentityTable:
    """The negative ids of one manager: from -2 downwards in the order of the calls, and never used twice.

    It is needed only for prompts with media or extra ids; the packed ids of others are their token ids.

    >>> table = IdentityTable()
    >>> packed = table.identify(np.array([5, 9, 9, 9], np.int32).tobytes(), [Media(1, 3, "cat")])
    >>> np.frombuffer(packed, np.int32).tolist(), table.tokens(packed).tolist()
    ([5, -2, 9, 9], [5, 9, 9, 9])
    >>> table.identities(packed)
    [(1, Identity(token=9, extra_id=0, key='cat', length=3))]
    """

    def __init__(self) -> None:
        self._ids: dict[Identity, int] = {}
        self._identities: dict[int, Identity] = {}
        self._next_id = FIRST_ID
        self._max_entries = MIN_SWEPT

    def __len__(self) -> int:
        return len(self._ids)

    def identify(
        self, tokens: bytes | memoryview, media: Iterable[Media] = (), extra_ids: ArrayLike | None = None
    ) -> bytes:
        """Return packed ids for content that is to be stored; what is new among them gets an id.

        `tokens` are packed token ids, `extra_ids` one int of 0 .. 2**64-1 for each, 0 for none. Raises ArgumentError
        for spans that overlap or reach beyond the tokens and for other numbers of extra ids, ArgumentTypeError for
        what is neither, and NeverFits when no ids are left; then nothing has changed.
        """
        marks = _Marks(tokens, media, extra_ids)
        self._check_room(marks.identities)
        return marks.packed([self._intern(identity) for identity in marks.identities])

    def look(
        self, tokens: bytes | memoryview, media: Iterable[Media] = (), extra_ids: ArrayLike | None = None
    ) -> bytes:
        """Return packed ids to compare with what is stored, changing nothing; `UNKNOWN` stands where nothing can match.

        Errors as in `identify`.
        """
        marks = _Marks(tokens, media, extra_ids)
        return marks.packed([self._ids.get(identity, UNKNOWN) for identity in marks.identities])

    def tokens(self, packed: PackedTokens) -> TokenArray:
        """Return the token ids as a new array.

        Raises StaleMatch for ids that a sweep has dropped.
        """
        ids = np.frombuffer(packed, np.int32).copy()
        at = _negatives(ids)
        if at.size:
            ids[at] = [self._identity(each).token for each in ids[at].tolist()]
        return ids

    def identities(self, packed: PackedTokens) -> list[tuple[int, Identity]]:
        """List every negative id, by position, as what it stands for; errors as in `tokens`."""
        ids = np.frombuffer(packed, np.int32)
        at = _negatives(ids)
        return [(where, self._identity(each)) for where, each in zip(at.tolist(), ids[at].tolist(), strict=True)]

    def num_open_tokens(self, packed: PackedTokens) -> int:
        """Count the tokens that the last media span lacks where `packed` was cut off inside it; 0 if it was not.

        Other tokens must not follow there: they would be taken for those of the span. Errors as in `tokens`.
        """
        for position, identity in reversed(self.identities(packed)):
            if identity.key is not None:
                return max(position + identity.length - len(np.frombuffer(packed, np.int32)), 0)
        return 0

    @property
    def needs_sweep(self) -> bool:
        """Whether it has about doubled since the last sweep."""
        return len(self._ids) > self._max_entries

    def sweep(self, in_use: Iterable[PackedTokens]) -> None:
        """Forget what occurs nowhere in `in_use`, which must be all that is stored and may be compared again."""
        used: set[int] = set()
        for packed in in_use:
            ids = np.frombuffer(packed, np.int32)
            used.update(ids[_negatives(ids)].tolist())
        self._ids = {identity: each for identity, each in self._ids.items() if each in used}
        self._identities = {each: identity for identity, each in self._ids.items()}
        self._max_entries = 2 * len(self._ids) + MIN_SWEPT

    def _intern(self, identity: Identity) -> int:
        known = self._ids.get(identity)
        if known is not None:
            return known
        new = self._next_id
        self._next_id = new - 1
        self._ids[identity] = new
        self._identities[new] = identity
        return new

    def _check_room(self, identities: list[Identity]) -> None:
        num_left = self._next_id - LAST_ID + 1
        if len(identities) <= num_left:
            return
        num_new = len(set(identities) - self._ids.keys())
        if num_new > num_left:
            raise NeverFits(
                f"{num_new} new ids needed for media and extra ids, but only {num_left} of {FIRST_ID - LAST_ID + 1} "
                "were never used; make a new manager"
            )

    def _identity(self, each: int) -> Identity:
        identity = self._identities.get(each)
        if identity is None:
            raise StaleMatch(f"id {each} stands for nothing any more: all content that had it has been evicted")
        return identity


class _Marks:
    """The positions of a prompt that get a negative id, and what for: `identities[which]`, sorted `[num_marks]`."""

    __slots__ = ("_ids", "_positions", "_which", "identities")

    def __init__(self, tokens: bytes | memoryview, media: Iterable[Media], extra_ids: ArrayLike | None) -> None:
        self._ids: TokenArray = np.frombuffer(tokens, np.int32)
        spans = _spans(media, len(self._ids))
        extras = None if extra_ids is None else _as_extra_ids(extra_ids, len(self._ids))
        starts = np.array([span.offset for span in spans], np.int64)
        heads = [_head(self._ids, extras, span) for span in spans]
        if extras is None:
            self._positions, self._which, self.identities = starts, np.arange(len(heads)), heads
            return
        extras[starts] = 0
        at = np.flatnonzero(extras)
        which, pairs = _distinct_pairs(self._ids[at], extras[at])
        self._positions = np.concatenate((at, starts))
        self._which = np.concatenate((which, np.arange(len(pairs), len(pairs) + len(heads))))
        self.identities = pairs + heads

    def packed(self, ids: list[int]) -> bytes:
        """Return the tokens with an id for each of `identities` in its places."""
        if not ids:
            return self._ids.tobytes()
        marked = self._ids.copy()
        marked[self._positions] = np.array(ids, np.int32)[self._which]
        return marked.tobytes()


def _head(tokens: TokenArray, extras: ExtraIds | None, span: Media) -> Identity:
    extra_id = 0 if extras is None else extras.item(span.offset)
    return Identity(tokens.item(span.offset), extra_id, span.key, int(span.length))


def _distinct_pairs(tokens: TokenArray, extras: ExtraIds) -> tuple[NDArray[np.intp], list[Identity]]:
    """Return the different pairs of token and extra id, and for each position `[n]` which of them it has.

    A pair is sorted as one int64: the rank of its extra id, then its token.
    """
    values, ranks = np.unique(extras, return_inverse=True)
    codes, which = np.unique(ranks.astype(np.int64) << TOKEN_BITS | tokens, return_inverse=True)
    token_of, extra_id_of = codes & MAX_TOKEN, values[codes >> TOKEN_BITS]
    pairs = zip(token_of.tolist(), extra_id_of.tolist(), strict=True)
    return which, [Identity(token, extra_id) for token, extra_id in pairs]


def _negatives(ids: TokenArray) -> NDArray[np.intp]:
    """Return where ids are negative, `[num_negative]`; the least of all says fastest that none is."""
    if not ids.size or ids.item(ids.argmin()) >= 0:
        return np.empty(0, np.intp)
    return np.flatnonzero(ids < 0)


def _spans(media: Iterable[Media], num_tokens: int) -> list[Media]:
    """Return media by offset, or say what is wrong with them."""
    if not isinstance(media, Iterable):
        raise ArgumentTypeError(f"media is a {type(media).__name__}, must be a list or tuple of Media")
    spans = list(media)
    for at, span in enumerate(spans):
        if not isinstance(span, Media):
            raise ArgumentTypeError(f"media[{at}] is a {type(span).__name__}, must be a Media")
        if span.end > num_tokens:
            raise ArgumentError(
                f"media[{at}] spans tokens {span.offset} .. {span.end - 1}, but there are only {num_tokens} tokens; "
                "a span must lie inside the tokens"
            )
    spans.sort(key=attrgetter("offset"))
    for before, after in pairwise(spans):
        if before.end > after.offset:
            raise ArgumentError(f"media: {after!r} begins before {before!r} ends; spans must not overlap")
    return spans


def _as_extra_ids(extra_ids: ArrayLike, num_tokens: int) -> ExtraIds:
    """Return extra ids as a new array `[num_tokens]`, or say what is wrong with them."""
    if isinstance(extra_ids, list | tuple | range):
        ids: NDArray[Any] = np.frombuffer(_pack(extra_ids), np.uint64)
    else:
        ids = np.asarray(extra_ids)
    if ids.dtype.kind not in "iu":
        raise ArgumentTypeError(f"extra_ids must hold ints, not {ids.dtype}")
    if ids.shape != (num_tokens,):
        raise ArgumentError(f"extra_ids has shape {ids.shape}, must be one int for each of {num_tokens} tokens")
    if ids.size and int(ids.min()) < 0:
        at = int(np.flatnonzero(ids < 0)[0])
        _check_extra_id(int(ids[at]), at)
    return ids.astype(np.uint64)


def _pack(extra_ids: list[Any] | tuple[Any, ...] | range) -> bytes:
    try:
        return struct.pack(f"{len(extra_ids)}Q", *extra_ids)
    except (struct.error, TypeError):
        for at, extra_id in enumerate(extra_ids):
            _check_extra_id(extra_id, at)
        raise


def _check_extra_id(extra_id: Any, at: int) -> None:
    try:
        value = index(extra_id)
    except TypeError:
        raise ArgumentTypeError(f"extra_ids[{at}] is a {type(extra_id).__name__}, not an int") from None
    if not 0 <= value <= MAX_EXTRA_ID:
        raise ArgumentError(f"extra_ids[{at}] is {value}; extra ids are 0 .. {MAX_EXTRA_ID}")


def _check_int(value: Any, name: str, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ArgumentTypeError(f"media: {name} is {value!r}, must be an int")
    if value < least:
        raise ArgumentError(f"media: {name} is {value}, must be at least {least}")
