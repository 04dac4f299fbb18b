"""What would fit: releases and admissions tried out on a copy of the counts, in any order, with nothing changed.

The count is exact because it does not matter to it what is evicted on the way: an admitted prompt takes as many blocks
out of the free and evictable ones as it needs, less those of its cached prefix that somebody else holds already.
"""

from __future__ import annotations

from typing import Self

from kvist.core import admission
from kvist.core.arguments import as_count, check_namespace, check_num_beams
from kvist.core.extents import Extent, Namespace
from kvist.core.sequences import Sequence
from kvist.core.state import CacheState
from kvist.core.tokens import TOKEN_BYTES, Tokens, as_token_bytes
from kvist.errors import NeverFits, OutOfBlocks, SequenceError

__all__ = ["Forecast"]


class Forecast:
    """A what-if over one manager, valid until the manager's next call that changes anything.

    `free_blocks` and `free_rows` are what would be left, blocks that could be evicted included.
    Each call takes effect on the forecast, and returns it, or raises what the real call would, with the forecast
    unchanged.
    """

    def __init__(self, state: CacheState) -> None:
        self._state = state
        self.free_blocks = state.num_free_blocks
        self.free_rows = state.rows.num_free
        self._released: set[int] = set()
        self._ended_holds: dict[int, int] = {}
        self._claimed: dict[int, int] = {}
        self._added_tokens: dict[int, int] = {}

    def release(self, sequence: Sequence) -> Self:
        """Suppose that a sequence is freed."""
        state, rows = self._state, self._state.rows
        rows.check_running(sequence, "release")
        if sequence.row in self._released:
            raise SequenceError(f"release: {sequence!r} is released in this forecast already")
        self._released.add(sequence.row)
        self.free_rows += 1
        own = rows.num_blocks.item(sequence.row) - rows.num_published.item(sequence.row)
        self.free_blocks += own + self._added_blocks(sequence, 0)
        extent: Extent = sequence._extent
        while extent.parent is not None:
            self._ended_holds[id(extent)] = self._ended_holds.get(id(extent), 0) + 1
            if self._is_held(extent):
                break
            self.free_blocks += extent.num_blocks - self._claimed.get(id(extent), 0)
            extent = extent.parent
        assert self.free_blocks <= state.pool.num_blocks
        return self

    def add(self, prompt: int | Tokens, *, namespace: Namespace = (), reuse: bool = True, num_beams: int = 1) -> Self:
        """Suppose that a prompt is admitted: its tokens, or their number for one of which nothing is cached."""
        needed, path = self._admission(prompt, namespace, reuse, num_beams)
        self.free_blocks -= needed
        self.free_rows -= num_beams
        for extent, num_blocks in path:
            self._claimed[id(extent)] = max(self._claimed.get(id(extent), 0), num_blocks)
        return self

    def append(self, sequence: Sequence, num_tokens: int = 1) -> Self:
        """Suppose that a running sequence gets more tokens."""
        self._state.rows.check_running(sequence, "append")
        if sequence.row in self._released:
            raise SequenceError(f"append: {sequence!r} is released in this forecast")
        added = self._added_tokens.get(sequence.row, 0)
        n = as_count(num_tokens, "num_tokens")
        if sequence.num_tokens + added + n > self._state.rows.max_tokens:
            raise NeverFits(f"append: {sequence!r} with {added + n} more tokens exceeds max_sequence_length")
        needed = self._added_blocks(sequence, n) - self._added_blocks(sequence, 0)
        self._require(needed)
        self.free_blocks -= needed
        self._added_tokens[sequence.row] = added + n
        return self

    def fits(self, prompt: int | Tokens, *, namespace: Namespace = (), reuse: bool = True, num_beams: int = 1) -> bool:
        """Say whether a prompt would be admitted now; changes nothing."""
        try:
            self._admission(prompt, namespace, reuse, num_beams)
        except (OutOfBlocks, NeverFits):
            return False
        return True

    def _admission(
        self, prompt: int | Tokens, namespace: Namespace, reuse: bool, num_beams: int
    ) -> tuple[int, list[tuple[Extent, int]]]:
        """Return how many blocks an admission would take, and the extents it would hold, each with how much of it."""
        state = self._state
        check_namespace(namespace)
        check_num_beams(num_beams)
        if isinstance(prompt, int):
            num_tokens, path = as_count(prompt, "prompt"), []
            admission.check_prompt(state, num_tokens, num_beams, self.free_rows)
        else:
            tokens = as_token_bytes(prompt)
            num_tokens = len(tokens) // TOKEN_BYTES
            admission.check_prompt(state, num_tokens, num_beams, self.free_rows)
            path = self._path(tokens, namespace) if reuse else []
        total = -(-num_tokens // state.block_size) + (num_beams - 1 if num_tokens % state.block_size else 0)
        needed = total - sum(self._num_held(extent, num_blocks) for extent, num_blocks in path)
        self._require(needed)
        return needed, path

    def _path(self, tokens: bytes, namespace: Namespace) -> list[tuple[Extent, int]]:
        match = admission.match_prompt(self._state, tokens, namespace)
        if match is None:
            return []
        path = [(extent, extent.num_blocks) for extent in match.extent.path()]
        return path if match.child is None else [*path, (match.child, match.child_blocks)]

    def _num_held(self, extent: Extent, num_blocks: int) -> int:
        return num_blocks if self._is_held(extent) else min(num_blocks, self._claimed.get(id(extent), 0))

    def _is_held(self, extent: Extent) -> bool:
        return extent.references > self._ended_holds.get(id(extent), 0)

    def _added_blocks(self, sequence: Sequence, num_more: int) -> int:
        """Count the blocks that the tokens appended in this forecast, and some more, take beyond the real ones."""
        num_tokens = sequence.num_tokens + self._added_tokens.get(sequence.row, 0) + num_more
        return max(-(-num_tokens // self._state.block_size) - sequence.num_blocks, 0)

    def _require(self, needed: int) -> None:
        if needed > self.free_blocks:
            held = self._state.pool.num_blocks - self.free_blocks
            raise OutOfBlocks(
                f"{needed} blocks needed, but only {self.free_blocks} would be free or evictable ({held} held)",
                needed=needed,
                free=self.free_blocks,
                evictable=0,
                held=held,
            )
