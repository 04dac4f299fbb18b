"""Answers in words: who holds the blocks of a sequence, how far a prompt is cached and why not further."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.core.extents import Extent
from kvist.core.matching import PrefixMatch
from kvist.core.sequences import Sequence
from kvist.core.state import CacheState
from kvist.core.tokens import TOKEN_BYTES

__all__ = ["Explanation", "Part", "of_prompt", "of_sequence"]


@dataclass(frozen=True, slots=True)
class Part:
    """A run of tokens with one fate; `num_holders` sequences, pins and longer prefixes in use refer to its blocks."""

    start: int
    num_tokens: int
    num_blocks: int
    state: str
    num_holders: int

    def __str__(self) -> str:
        tokens = f"tokens {self.start} .. {self.start + self.num_tokens - 1}"
        return f"{tokens}: {_counted(self.num_blocks, 'block')}, {self.state}, {_counted(self.num_holders, 'holder')}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """A subject, its tokens in parts, and `reason`, why no more of it is cached (empty for a sequence)."""

    subject: str
    parts: tuple[Part, ...]
    reason: str = ""

    def __str__(self) -> str:
        return "\n  ".join([self.subject, *map(str, self.parts), *([self.reason] if self.reason else [])])


def of_sequence(state: CacheState, sequence: Sequence) -> Explanation:
    """Describe a sequence's blocks: those in the tree by extent, then its own."""
    rows, row = state.rows, sequence.row
    parts, start = _shared_parts(state, sequence), rows.published_of[row] * state.block_size
    computed, num_tokens = int(rows.num_computed[row]), int(rows.num_tokens[row])
    own = sequence.num_columns - int(rows.num_published[row])
    if num_tokens > start or own:
        use = f"its own, {max(computed - start, 0)} tokens computed"
        parts.append(Part(start, num_tokens - start, own, use, 1))
    return Explanation(
        f"{sequence!r}, {sequence.num_cached_tokens} of its prompt's tokens came from the cache", tuple(parts)
    )


def _shared_parts(state: CacheState, sequence: Sequence) -> list[Part]:
    if sequence.leader is not None:
        num_blocks = state.rows.published_of[sequence.row]
        use = "its beam 0's, until that has committed the prompt"
        return [Part(0, num_blocks * state.block_size, num_blocks, use, 1)] if num_blocks else []
    parts, start = [], 0
    for extent in sequence._extent.path():
        use = "committed, for all to share" if extent.key is not None else "committed, for its holders only"
        parts.append(Part(start, extent.num_tokens, extent.num_blocks, use, extent.references))
        start += extent.num_tokens
    return parts


def of_prompt(state: CacheState, prompt: bytes, match: PrefixMatch) -> Explanation:
    """Describe what of a prompt is cached, and say why not more."""
    subject = f"prompt of {match.num_prompt_tokens} tokens in namespace {match.namespace!r}: {match.num_tokens} cached"
    return Explanation(subject, tuple(_cached_parts(state, prompt, match)), _why_not_more(state, prompt, match))


def _cached_parts(state: CacheState, prompt: bytes, match: PrefixMatch) -> list[Part]:
    root = state.tree.roots.get(match.namespace)
    if root is None:
        return []
    found = state.tree.fit(state.tree.find(root, prompt, len(prompt) - TOKEN_BYTES, partial=state.tree.partial))
    parts, start = [], 0
    for extent in found.extent.path():
        use = _use(state, extent, extent.num_blocks)
        parts.append(Part(start, extent.num_tokens, extent.num_blocks, use, extent.references))
        start += extent.num_tokens
    if found.child is not None:
        size = found.child_blocks * state.block_size
        use = _use(state, found.child, found.child_blocks)
        parts.append(Part(start, size, found.child_blocks, use, found.child.references))
        start += size
    if found.num_partial_tokens:
        parts.append(Part(start, found.num_partial_tokens, 1, "in a block that agrees in part, to be copied", 0))
    return parts


def _use(state: CacheState, extent: Extent, num_blocks: int) -> str:
    """Say what holds the first so many blocks of an extent, and how many of them host memory has, too."""
    use = "in use" if extent.references else "evictable"
    num_copied = 0 if state.copies is None else state.copies.num_columns(extent, num_blocks)
    return f"{use}, {num_copied} in host memory, too" if num_copied else use


def _why_not_more(state: CacheState, prompt: bytes, match: PrefixMatch) -> str:
    if not match.miss:
        return "only the last token is missing, which is always computed"
    if match.miss == "evicted":
        return f"evicted: what follows went {match.evicted_s:.3g} s ago ({match.eviction})"
    if match.miss == "window":
        return f"window: {match.num_known_tokens} tokens are known, but windows or states to go on from are not there"
    if waiting := [sequence for sequence in state.rows.running() if _has_more(sequence, prompt, match)]:
        best = max(waiting, key=lambda sequence: sequence.num_tokens)
        computed = best.num_computed_tokens
        return f"uncommitted: row {best.row} has more of it, but only {computed} of its tokens are computed"
    if match.miss == "uncommitted":
        return "uncommitted: a running sequence has more of it, in a block that is not full"
    for namespace, root in () if state.config.private_namespaces else state.tree.roots.items():
        if namespace != match.namespace:
            other = state.tree.find(root, prompt, len(prompt) - TOKEN_BYTES, partial=False)
            if other.position // TOKEN_BYTES > match.num_tokens:
                return f"other namespace: {namespace!r} has {other.position // TOKEN_BYTES} tokens of it"
    if match.miss == "under a block":
        return "under a block: what is missing fills no block"
    return "cold: the rest has never been committed here, or so long ago that its eviction is forgotten"


def _has_more(sequence: Sequence, prompt: bytes, match: PrefixMatch) -> bool:
    if (
        sequence.namespace != match.namespace
        or not sequence.publishes
        or sequence.num_computed_tokens > match.num_tokens
    ):
        return False
    if sequence.leader is not None or sequence.num_tokens <= match.num_tokens:
        return False
    return sequence._rows.packed_tokens(sequence).startswith(prompt[: (match.num_tokens + 1) * TOKEN_BYTES])


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
