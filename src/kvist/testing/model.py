"""What must be true of a manager, kept plainly beside it: what each sequence has, what may and what must be found."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvist.config import CacheConfig, GroupSpec
from kvist.core.extents import Namespace
from kvist.core.sequences import Sequence
from kvist.testing.prompts import Prompt
from kvist.testing.token_memory import Prefixes

__all__ = ["Reusable", "Shadow"]


@dataclass(eq=False, slots=True)
class Shadow:
    """What a sequence should have, and what its block table showed when it was last seen.

    `symbols` are what its positions stand for, `landed` the numbers of tokens after which a commit found it, `encoder`
    names what its encoder was given, if it has one; `roomy` are those of `landed` where a state could be kept. It began
    with `num_reused` tokens that were there, after `num_evictions`; once `wrapped`, it overwrites a ring.
    """

    sequence: Sequence
    prompt: Prompt
    symbols: list[Hashable]
    num_computed: int
    num_blocks: int
    publishes: bool
    leader: Shadow | None = None
    encoder: int | None = None
    num_encoder_tokens: int = 0
    landed: set[int] = field(default_factory=set)
    roomy: set[int] = field(default_factory=set)
    reuses: bool = True
    wrapped: bool = False
    num_reused: int = 0
    num_evictions: int = 0
    num_surely_published: int = 0
    seen_version: int = -1
    seen_blocks: dict[int, NDArray[np.int32]] = field(default_factory=dict)

    @classmethod
    def of(cls, sequence: Sequence, other: Shadow, num_blocks: int) -> Shadow:
        """Make the shadow of a sequence that is what another is."""
        shadow = cls(sequence, Prompt(), [], 0, 0, publishes=False)
        shadow.take_over(other, num_blocks)
        return shadow

    @property
    def namespace(self) -> Namespace:
        """The sequence's namespace."""
        return self.sequence.namespace

    @property
    def num_tokens(self) -> int:
        """Tokens, computed or not."""
        return len(self.symbols)

    def append(self, tokens: list[int]) -> None:
        """Add tokens that are nothing but their ids."""
        self.symbols += tokens
        self.prompt = self.prompt.appended(tuple(tokens))

    def note_computed(self, num_tokens: int, *, is_roomy: bool) -> None:
        """Note that a commit went up to so many tokens, and whether there was room to keep the state after them.

        Where there was none, an older state of the sequence may have been given up for it.
        """
        if num_tokens > self.num_computed:
            self.roomy = self.roomy | {num_tokens} if is_roomy else set()
        self.num_computed = num_tokens
        self.landed.add(num_tokens)

    def rewind(self, left: int, num_computed: int) -> None:
        """Keep the first tokens only, of which so many are computed."""
        self.symbols = self.symbols[:left]
        self.prompt = self.prompt.cut(left)
        self.num_computed = num_computed
        self.landed = {count for count in self.landed if count <= num_computed} | {num_computed}

    def ends_inside_media(self, left: int) -> bool:
        """Say whether the first tokens end inside media."""
        return any(span.offset < left < span.end for span in self.prompt.media)

    def take_over(self, other: Shadow, num_blocks: int) -> None:
        """Go on from what another sequence is."""
        self.prompt, self.symbols, self.num_computed = other.prompt, list(other.symbols), other.num_computed
        self.num_blocks, self.landed, self.roomy = num_blocks, set(other.landed), set(other.roomy)
        self.encoder, self.num_encoder_tokens = other.encoder, other.num_encoder_tokens
        self.publishes, self.num_surely_published = other.publishes, other.num_surely_published
        self.num_reused, self.num_evictions = other.num_reused, other.num_evictions
        self.reuses, self.wrapped = other.reuses, other.wrapped


class Reusable:
    """What a prompt may hit and what it must hit, as sets of prefixes found without any tree.

    A prefix *may* be found once a sequence that publishes has committed it; with recurrent states, where a commit ended
    at a block boundary. It *must* be found while such a sequence runs, and after that until blocks are evicted; of a
    sequence that ends or steps back without publishing, only what a look at the whole cache had published before. Once
    blocks have been evicted, of a sequence with windows only that much is sure which its own next token needs.
    """

    def __init__(self, prefixes: Prefixes, config: CacheConfig, max_ring_tokens: int, *, has_bubble: bool) -> None:
        self.block_size = config.block_size
        self.groups = config.groups
        self.checkpoint_blocks = [
            max(group.checkpoint_tokens // config.block_size, 1) for group in self.groups if group.kind == "state"
        ]
        self.partial = config.partial_reuse and not self.checkpoint_blocks
        self.max_ring_tokens, self.has_bubble = max_ring_tokens, has_bubble
        self._prefixes = prefixes
        self._may: dict[Namespace, set[int]] = {}
        self._must: dict[Namespace, set[int]] = {}
        self.num_evictions = 0
        self.is_plain = [group.kind for group in config.groups] == ["full"]

    def publish(self, shadow: Shadow) -> None:
        """Note that the full committed blocks of a sequence have been published."""
        if shadow.publishes and shadow.leader is None:
            shadow.num_surely_published = self._full_tokens(shadow)

    def leave(self, shadow: Shadow, *, publish: bool) -> None:
        """Note that a sequence ends, leaving all that is computed, or, without `publish`, what was published before."""
        if not shadow.publishes or shadow.leader is not None:
            return
        full = self._full_tokens(shadow)
        left = shadow.num_computed if self.partial else full
        num_may, num_must = (left, left) if publish else (full, shadow.num_surely_published)
        ids = self._ids(shadow, num_may)
        ends = self._ends(shadow, num_may)
        self._may.setdefault(shadow.namespace, set()).update(ids[end - 1] for end in ends)
        self._must.setdefault(shadow.namespace, set()).update(
            ids[end - 1] for end in ends if end <= num_must and self._is_held(shadow, end)
        )

    def rewind(self, shadow: Shadow, left: int) -> None:
        """Note that a sequence steps back: what had been published by then stays.

        Where it lacks what it would go on from, it publishes all that it has computed and begins again.
        """
        if not self.can_step_back(shadow, min(left, shadow.num_computed)):
            self._note_may(shadow)
        self.leave(shadow, publish=False)
        shadow.num_surely_published = min(shadow.num_surely_published, left // self.block_size * self.block_size)

    def can_step_back(self, shadow: Shadow, num_computed: int) -> bool:
        """Say whether a sequence has all that its next token needs if only so many of its tokens were computed."""
        if num_computed < shadow.num_computed and (self.checkpoint_blocks or self.has_bubble):
            return False
        return not shadow.wrapped and self._needs_no_more(shadow, num_computed)

    def evicted(self) -> None:
        """Note that blocks were evicted: nothing but what sequences hold must be found any more."""
        self._must.clear()
        self.num_evictions += 1

    def forget(self, namespace: Namespace) -> None:
        """Note that a namespace was dropped."""
        self._may.pop(namespace, None)
        self._must.pop(namespace, None)

    def bounds(
        self, namespace: Namespace, prompt: Prompt, live: Iterable[Shadow], limit: int | None = None
    ) -> tuple[int, int]:
        """Return how many tokens of a prompt must, and how many may be reused, at most `limit`: all but the last.

        `live` are the sequences that have not ended. A prompt that a ring cannot hold is not looked up.
        """
        if len(prompt) > self.max_ring_tokens:
            return 0, 0
        must, may = self._known(namespace, live)
        limit = len(prompt) - 1 if limit is None else limit
        ids = self._prefixes.along(namespace, prompt.symbols()[:limit]).tolist()
        bounds = (_longest(ids, must), _longest(ids, may))
        return bounds if self.partial else (self._whole(bounds[0]), self._whole(bounds[1]))

    def must_have(self, namespace: Namespace, prompt: Prompt, num_tokens: int, live: Iterable[Shadow]) -> bool:
        """Say whether a prompt's first tokens, so many, must be found if others come after them."""
        must, _ = self._known(namespace, live)
        return int(self._prefixes.along(namespace, prompt.symbols()[:num_tokens])[-1]) in must

    def _known(self, namespace: Namespace, live: Iterable[Shadow]) -> tuple[set[int], set[int]]:
        """Collect the prefixes of a namespace that must, and those that may be found."""
        must, may = set(self._must.get(namespace, ())), set(self._may.get(namespace, ()))
        for shadow in live:
            if shadow.publishes and shadow.leader is None and shadow.namespace == namespace:
                full = self._full_tokens(shadow)
                ids, ends = self._ids(shadow, full), self._ends(shadow, full)
                may.update(ids[end - 1] for end in ends)
                must.update(ids[end - 1] for end in ends if self._is_held(shadow, end))
        return must, may

    def _note_may(self, shadow: Shadow) -> None:
        """Note that all that a sequence has computed may be found."""
        if shadow.publishes:
            ids, ends = self._ids(shadow, shadow.num_computed), self._ends(shadow, shadow.num_computed)
            self._may.setdefault(shadow.namespace, set()).update(ids[end - 1] for end in ends)

    def _whole(self, num_tokens: int) -> int:
        return num_tokens // self.block_size * self.block_size

    def _full_tokens(self, shadow: Shadow) -> int:
        return self._whole(shadow.num_computed)

    def _ids(self, shadow: Shadow, num_tokens: int) -> list[int]:
        ids: list[int] = self._prefixes.along(shadow.namespace, shadow.symbols[:num_tokens]).tolist()
        return ids

    def _ends(self, shadow: Shadow, num_tokens: int) -> list[int]:
        """List the numbers of tokens, up to one, after which others may go on from what a sequence has committed."""
        if not self.checkpoint_blocks:
            return list(range(1, num_tokens + 1))
        return [count for count in shadow.landed if 0 < count <= num_tokens and count % self.block_size == 0]

    def _is_held(self, shadow: Shadow, end: int) -> bool:
        """Say whether all is there that others need to go on after so many tokens of a sequence.

        Blocks that its own next token does not need, and states, may have been evicted since it began, or before.
        """
        if self.is_plain:
            return True
        if end % self.block_size and self.num_evictions:  # what has lost a block may stand in for a part of another
            return False
        if not self.checkpoint_blocks and self._needs_no_more(shadow, self._whole(end)):
            return True
        return end > shadow.num_reused and shadow.num_evictions == self.num_evictions and self._is_kept(shadow, end)

    def _is_kept(self, shadow: Shadow, end: int) -> bool:
        """Say whether a state is kept after so many tokens, where there are states: if there was room and reason."""
        if not self.checkpoint_blocks:
            return True
        regular = all(end // self.block_size % blocks == 0 for blocks in self.checkpoint_blocks)
        return end in shadow.roomy and (regular or end == self._whole(shadow.sequence.num_prompt_tokens - 1))

    def _needs_no_more(self, shadow: Shadow, end: int) -> bool:
        """Say whether a shorter prefix of a sequence needs no blocks before those that the sequence needs."""
        return all(
            self._first_block(group, end) >= self._first_block(group, shadow.num_computed) for group in self.groups
        )

    def _first_block(self, group: GroupSpec, num_tokens: int) -> int:
        """Return the first block, sinks apart, that the token after so many others needs."""
        if group.kind == "chunked":
            return num_tokens // group.chunk_tokens * group.chunk_tokens // self.block_size
        return max(num_tokens + 1 - group.window, 0) // self.block_size if group.kind == "sliding" else 0


def _longest(ids: list[int], known: set[int]) -> int:
    return next((count for count in range(len(ids), 0, -1) if ids[count - 1] in known), 0)
