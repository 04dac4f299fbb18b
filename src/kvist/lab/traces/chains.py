"""Names for the blocks of prompts: each stands for its tokens, all that came before, and the namespace."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from kvist.core.extents import Namespace
from kvist.core.tokens import TOKEN_BYTES
from kvist.lab.traces.requests import HashedPrompt, Request

__all__ = ["Chains", "chain_hashes", "namespace_bytes"]

DEFAULT_BLOCK_SIZE = 16


class Chains:
    """Numbers the blocks of a trace's prompts, 0 the first seen: equal numbers are equal prefixes.

    `block_size` is in tokens; None takes that of hashed prompts, and 16 for token ids. Ids that are of the whole trace
    already are numbers as they are; others cost about 150 bytes of memory for each that is new. Hashed prompts of
    another block size are taken as the token ids that stand for them.

    >>> from kvist.lab.traces.requests import TokenPrompt
    >>> chains = Chains(block_size=2)
    >>> ask = lambda *ids: Request(TokenPrompt(np.array(ids, np.int32)))
    >>> chains.ids(ask(1, 2, 3, 4)).tolist(), chains.ids(ask(1, 2, 3, 5, 6)).tolist(), chains.ids(ask(3, 4)).tolist()
    ([0, 1], [0, 2, 3], [4])
    """

    def __init__(self, block_size: int | None = None) -> None:
        self.block_size = block_size
        self._numbers: dict[object, int] = {}

    def size_for(self, request: Request) -> int:
        """Return the tokens of a block of this request's prompt."""
        if self.block_size is None:
            prompt = request.prompt
            self.block_size = prompt.block_size if isinstance(prompt, HashedPrompt) else DEFAULT_BLOCK_SIZE
        return self.block_size

    def ids(self, request: Request) -> NDArray[np.int64]:
        """Return the numbers of a prompt's blocks, `[ceil(num_tokens / block_size)]`."""
        prompt, size = request.prompt, self.size_for(request)
        if isinstance(prompt, HashedPrompt) and prompt.block_size == size:
            if not (prompt.salt or request.namespace):
                return prompt.hash_ids
            scope = (prompt.salt, request.namespace)
            names: list[object] = [(each, scope) for each in prompt.hash_ids.tolist()]
        else:
            root = blake2b(namespace_bytes(request.namespace), digest_size=8).digest()
            names = [bytes(each) for each in chain_hashes(prompt.tokens(), size, root).view("V8")]
        numbers = self._numbers
        return np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)


def chain_hashes(tokens: NDArray[np.int32], block_size: int, root: bytes, key: bytes = b"") -> NDArray[np.int64]:
    """Return a hash for each block of a prompt, `[ceil(num_tokens / block_size)]`: 64 bits of BLAKE2b with a `key`.

    Each is that of the hash before it (`root` for the first one) and the block's tokens, as packed little-endian int32.
    """
    packed, step = tokens.astype("<i4", copy=False).tobytes(), block_size * TOKEN_BYTES
    found, parent = [], root
    for start in range(0, len(packed), step):
        parent = blake2b(parent + packed[start : start + step], digest_size=8, key=key).digest()
        found.append(parent)
    return np.frombuffer(b"".join(found), "<i8").astype(np.int64)


def namespace_bytes(namespace: Namespace) -> bytes:
    """Return bytes that differ for different namespaces: each part with its kind and length."""
    parts = []
    for each in namespace:
        content = each if isinstance(each, bytes) else str(each).encode()
        parts.append(f"{type(each).__name__} {len(content)} ".encode() + content)
    return b"".join(parts)
