"""What blocks are called in events: the digests of Kvist, or those that an engine would have computed.

A chain makes a link for each block from the link before it and its own tokens. The name that goes out may be shorter.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvist.core.chain import Chain
from kvist.core.extents import Namespace
from kvist.core.identity import IdentityTable
from kvist.errors import ArgumentError
from kvist.wire.records import BlockMedia, Hash

__all__ = [
    "HashChain",
    "KvistChain",
    "Scope",
    "SglangChain",
    "TensorRTChain1",
    "TensorRTChain2",
    "VllmChain",
    "extra_keys_of",
    "hash_query",
    "low_words",
    "media_digest",
    "salt_id",
]

WORD = 2**64 - 1
HALF = 2**32 - 1
WORD_BYTES = 8
DIGEST_BYTES = 32
Media = Sequence[Sequence[BlockMedia]]


@dataclass(frozen=True, slots=True)
class Scope:
    """What keeps contents apart in the engines' own words: a LoRA adapter and the salt of a tenant."""

    lora_id: int | None = None
    lora_name: str | None = None
    salt: str | int | None = None


def salt_id(salt: str | int) -> int:
    """Return the number that stands for a salt in TensorRT-LLM: the first 8 bytes of its SHA-256, little-endian.

    >>> salt_id("tenant-a")
    16248643848220682112
    """
    if isinstance(salt, int):
        return salt
    return int.from_bytes(sha256(salt.encode("utf-8", "surrogatepass")).digest()[:WORD_BYTES], "little")


def media_digest(key: str | int | bytes) -> bytes:
    """Return the 32 bytes that stand for media: the key itself if it is 32 bytes or 64 hex digits, else its SHA-256."""
    if isinstance(key, bytes) and len(key) == DIGEST_BYTES:
        return key
    if isinstance(key, str) and len(key) == 2 * DIGEST_BYTES:
        try:
            return bytes.fromhex(key)
        except ValueError:
            pass
    return sha256(key if isinstance(key, bytes) else str(key).encode("utf-8", "surrogatepass")).digest()


class HashChain(ABC):
    """How the blocks of a prompt get their names; `name` is what an event calls it, if it does."""

    name: str = ""

    @abstractmethod
    def extend(
        self,
        link: Hash | None,
        scope: Scope,
        tokens: NDArray[np.int32],
        media: Media = (),
        extra_ids: Sequence[int] = (),
    ) -> list[Hash]:
        """Return a link for each row of `tokens`, int32 `[num_blocks, block_size]`, after the one before them.

        `link` None: they begin a prompt. `media` is one entry for each block, `extra_ids` one for each token, or empty.
        """

    def names(self, links: Sequence[Hash]) -> list[Hash]:
        """Return what blocks with these links are called."""
        return list(links)


class TensorRTChain1(HashChain):
    """The older chain of TensorRT-LLM, which mixes 64-bit words.

    >>> chain = TensorRTChain1()
    >>> chain.extend(None, Scope(), np.arange(8, dtype=np.int32).reshape(2, 4))
    [733356887393045, 6310903394565074474]
    """

    name = "v1_block_key"

    def extend(
        self,
        link: Hash | None,
        scope: Scope,
        tokens: NDArray[np.int32],
        media: Media = (),
        extra_ids: Sequence[int] = (),
    ) -> list[Hash]:
        """Return a 64-bit int for each block."""
        parent = 0 if link is None else int(link)
        size, terms, links = tokens.shape[1], _mixed_tokens(tokens), []
        for column, row in enumerate(terms.tolist()):
            seed = size ^ parent * 0xBF58476D1CE4E5B9 & WORD
            if not parent and scope.salt is not None:
                seed = _fold64(seed, salt_id(scope.salt))
            if extra_ids:
                seed = _folded_pairs(seed, row, extra_ids[column * size : (column + 1) * size])
            else:
                for term in row:
                    seed ^= term + (seed << 6) + (seed >> 2) & WORD
            if scope.lora_id is not None:
                seed = _fold64(seed, scope.lora_id)
            for each in media[column] if media else ():
                seed = _fold_media(seed, each)
            parent = seed
            links.append(seed)
        return list(links)


class TensorRTChain2(HashChain):
    """The chain of TensorRT-LLM's second manager: SHA-256 over the digest before and the tokens, 4 bytes each.

    Where media begin, their 32 bytes stand in place of the token. With `short`, names are the first 8 bytes as an int.

    >>> chain = TensorRTChain2()
    >>> chain.extend(None, Scope(), np.arange(4, dtype=np.int32)[None])[0].hex()[:16]
    '7b894451a88bc030'
    """

    def __init__(self, *, short: bool = False) -> None:
        self.name = "v2_sha256_64" if short else "v2_sha256"
        self._is_short = short

    @staticmethod
    def root(scope: Scope) -> bytes:
        """Return the digest that a prompt of this scope begins with."""
        fields = [scope.lora_id, None if scope.salt is None else salt_id(scope.salt)]
        mask = sum(1 << bit for bit, each in enumerate(fields) if each is not None)
        return sha256(
            bytes([mask]) + b"".join(each.to_bytes(8, "little") for each in fields if each is not None)
        ).digest()

    def extend(
        self,
        link: Hash | None,
        scope: Scope,
        tokens: NDArray[np.int32],
        media: Media = (),
        extra_ids: Sequence[int] = (),
    ) -> list[Hash]:
        """Return 32 bytes for each block."""
        digest = self.root(scope) if link is None else _digest(link)
        content, size, links = tokens.astype("<i4").tobytes(), 4 * tokens.shape[1], []
        for column in range(len(tokens)):
            part = content[column * size : (column + 1) * size]
            for each in reversed(media[column] if media else ()):
                if each.offset >= 0:
                    part = part[: 4 * each.offset] + media_digest(each.key) + part[4 * each.offset + 4 :]
            digest = sha256(digest + part).digest()
            links.append(digest)
        return list(links)

    def names(self, links: Sequence[Hash]) -> list[Hash]:
        """Return the digests, or their first 8 bytes as ints."""
        return [int.from_bytes(_digest(each)[:8], "big") for each in links] if self._is_short else list(links)


class SglangChain(HashChain):
    """The chain of SGLang's radix cache: SHA-256 over the digest before, if any, and the tokens, 4 bytes each.

    Names are the first 8 bytes as an int (which SGLang sends with a sign).
    """

    name = "sglang_sha256"

    def extend(
        self,
        link: Hash | None,
        scope: Scope,
        tokens: NDArray[np.int32],
        media: Media = (),
        extra_ids: Sequence[int] = (),
    ) -> list[Hash]:
        """Return 32 bytes for each block; of the scope nothing goes in."""
        digest = b"" if link is None else _digest(link)
        content, size, links = tokens.astype("<i4").tobytes(), 4 * tokens.shape[1], []
        for begin in range(0, len(content), size):
            digest = sha256(digest + content[begin : begin + size]).digest()
            links.append(digest)
        return list(links)

    def names(self, links: Sequence[Hash]) -> list[Hash]:
        """Return the first 8 bytes of each, as an int."""
        return [int.from_bytes(_digest(each)[:8], "big") for each in links]


class VllmChain(HashChain):
    """The chains of vLLM, over (digest before, token ids, extra keys): "sha256" of a pickle, "sha256_cbor" of CBOR.

    `seed` is the PYTHONHASHSEED that the engine runs with; without one its first digest is random, and can be given as
    `none_hash`. With `short` (vLLM's default) names are the last 8 bytes as an int. Nothing is ever unpickled.

    >>> VllmChain("sha256_cbor", seed="0").none_hash.hex()[:16]
    '4e1195df020de59e'
    """

    def __init__(
        self,
        algorithm: Literal["sha256", "sha256_cbor"] = "sha256",
        *,
        seed: str | None = None,
        none_hash: bytes | None = None,
        short: bool = True,
    ) -> None:
        if algorithm not in ("sha256", "sha256_cbor"):
            raise ArgumentError(f"algorithm is {algorithm!r}, must be 'sha256' or 'sha256_cbor'")
        if (seed is None) == (none_hash is None):
            raise ArgumentError("give either seed, the PYTHONHASHSEED of the engine, or none_hash, its first digest")
        self.name = algorithm
        self._encode: Callable[[Any], bytes] = _pickled if algorithm == "sha256" else _cbor
        self.none_hash = sha256(self._encode(seed)).digest() if none_hash is None else none_hash
        self._is_short = short

    def extend(
        self,
        link: Hash | None,
        scope: Scope,
        tokens: NDArray[np.int32],
        media: Media = (),
        extra_ids: Sequence[int] = (),
    ) -> list[Hash]:
        """Return 32 bytes for each block."""
        digest = self.none_hash if link is None else _digest(link)
        links: list[Hash] = []
        plain = not media and scope.salt is None and scope.lora_name is None
        for column, row in enumerate(tokens.tolist()):
            extra = None if plain else extra_keys_of(scope, media[column] if media else (), link is None and not column)
            digest = sha256(self._encode((digest, tuple(row), extra))).digest()
            links.append(digest)
        return links

    def names(self, links: Sequence[Hash]) -> list[Hash]:
        """Return the digests, or their last 8 bytes as ints."""
        return list(low_words(links)) if self._is_short else list(links)


class KvistChain(HashChain):
    """Kvist's own chain, for those who want to look up a prompt by its tokens: see `kvist.core.chain`.

    `fingerprint` is that of the cache; the scope of its prompts is `namespace`. With `short`, names are the last 8
    bytes as an int. Media and extra ids are not looked at.
    """

    name = "kvist_sha256"

    def __init__(self, fingerprint: bytes, block_size: int, *, namespace: Namespace = (), short: bool = False) -> None:
        self._chain = Chain(fingerprint, block_size, IdentityTable())
        self._root = self._chain.root(namespace)
        self._is_short = short

    def extend(
        self,
        link: Hash | None,
        scope: Scope,
        tokens: NDArray[np.int32],
        media: Media = (),
        extra_ids: Sequence[int] = (),
    ) -> list[Hash]:
        """Return 32 bytes for each block."""
        digests = self._chain.extend(self._root if link is None else _digest(link), tokens.astype(np.int32).tobytes())
        return list(digests)

    def names(self, links: Sequence[Hash]) -> list[Hash]:
        """Return the digests, or their last 8 bytes as ints."""
        return list(low_words(links)) if self._is_short else list(links)


def hash_query(chain: HashChain, tokens: ArrayLike, block_size: int, scope: Scope | None = None) -> list[Hash]:
    """Return the names of the whole blocks of a prompt, to look them up in an index."""
    ids = np.asarray(tokens, np.int32)
    whole = ids[: len(ids) - len(ids) % block_size].reshape(-1, block_size)
    return chain.names(chain.extend(None, scope or Scope(), whole))


def low_words(digests: Sequence[Hash]) -> list[int]:
    """Return the last 8 bytes of digests of 32 bytes, big-endian.

    >>> low_words([b"........................Kvist..."]) == [int.from_bytes(b"Kvist...", "big")]
    True
    """
    words = np.frombuffer(b"".join(digests), ">u8")  # type: ignore[arg-type]  # digests are bytes
    low: list[int] = words[DIGEST_BYTES // WORD_BYTES - 1 :: DIGEST_BYTES // WORD_BYTES].tolist()
    return low


def extra_keys_of(scope: Scope, media: Sequence[BlockMedia], is_first: bool) -> tuple[Any, ...] | None:
    """Return what vLLM hashes of a block besides its tokens: the adapter, media with their offsets, and the salt.

    The salt belongs to the first block of a prompt only.

    >>> extra_keys_of(Scope(salt="s"), [BlockMedia("cat", -3)], is_first=True)
    (('cat', -3), 's')
    """
    keys: list[Any] = [] if scope.lora_name is None else [scope.lora_name]
    keys += [(each.key, each.offset) for each in media]
    if is_first and scope.salt is not None:
        keys.append(scope.salt)
    return tuple(keys) or None


def _digest(link: Hash) -> bytes:
    assert isinstance(link, bytes)
    return link


def _mixed_tokens(tokens: NDArray[np.int32]) -> NDArray[np.uint64]:
    """Return what each token adds before the seed is mixed in, 64-bit words of 0 .. 2**32-1."""
    words = tokens.astype(np.uint32).astype(np.uint64)
    for _ in range(2):
        words = ((words >> np.uint64(16)) ^ words) * np.uint64(0x45D9F3B) & np.uint64(HALF)
    words = (words >> np.uint64(16)) ^ words
    return (words + np.uint64(0x9E3779B9)) & np.uint64(HALF)


def _fold64(seed: int, value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & WORD
    value = (value ^ value >> 27) * 0x94D049BB133111EB & WORD
    value ^= value >> 31
    return seed ^ (value + 0x9E3779B9 + (seed << 6) + (seed >> 2) & WORD)


def _folded_pairs(seed: int, terms: list[int], extra_ids: Sequence[int]) -> int:
    for term, extra_id in zip(terms, extra_ids, strict=True):
        seed ^= term + (seed << 6) + (seed >> 2) & WORD
        seed = _fold64(seed, extra_id)
    return seed


def _fold_media(seed: int, media: BlockMedia) -> int:
    """Fold in the 32 bytes of media, word by word, and where inside them the block begins."""
    words = np.frombuffer(media_digest(media.key), "<u4").astype(np.uint32)
    for term in _mixed_tokens(words.view(np.int32)).tolist():
        seed ^= term + (seed << 6) + (seed >> 2) & WORD
    return _fold64(seed, max(-media.offset, 0))


def _pickled(value: Any) -> bytes:
    return pickle.dumps(value, protocol=5)


def _cbor(value: Any) -> bytes:
    """Encode a value in canonical CBOR: None, bools, ints of 64 bits, bytes, text, and sequences of these."""
    if value is None or isinstance(value, bool):
        return {None: b"\xf6", True: b"\xf5", False: b"\xf4"}[value]
    if isinstance(value, int):
        return _cbor_head(0, value) if value >= 0 else _cbor_head(1, -1 - value)
    if isinstance(value, bytes):
        return _cbor_head(2, len(value)) + value
    if isinstance(value, str):
        text = value.encode()
        return _cbor_head(3, len(text)) + text
    if isinstance(value, (tuple, list)):
        return _cbor_head(4, len(value)) + b"".join(map(_cbor, value))
    raise ArgumentError(f"{value!r} cannot be hashed: extra keys are text, bytes, ints, None and tuples of these")


def _cbor_head(major: int, argument: int) -> bytes:
    if argument < 24:
        return bytes([major << 5 | argument])
    for extra, num_bytes in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if argument < 1 << 8 * num_bytes:
            return bytes([major << 5 | extra]) + argument.to_bytes(num_bytes, "big")
    raise ArgumentError(f"{argument} does not fit in 64 bits")
