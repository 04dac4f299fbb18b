"""What would fit: releases and admissions tried out on a copy of the counts, in any order, with nothing changed.

With full attention alone counts are enough, and exact, because it does not matter to them what is evicted on the way:
an admitted prompt takes as many blocks out of the free and evictable ones as it needs, less those of its cached prefix
that somebody else holds already. With windows and states it does matter, since a shorter hit takes more blocks; so
there the calls are tried out on a copy of the manager's state.
"""

from __future__ import annotations

import copy
from typing import Self

import numpy as np

from kvist.core import admission, branches, growth
from kvist.core.arguments import as_count, check_namespace, check_num_beams
from kvist.core.extents import Extent, Namespace
from kvist.core.identity import UNKNOWN
from kvist.core.sequences import Sequence
from kvist.core.state import CacheState
from kvist.core.tokens import TOKEN_BYTES, Tokens, as_token_bytes
from kvist.errors import NeverFits, OutOfBlocks, SequenceError

__all__ = ["Forecast", "forecast_of"]


class Forecast:
    """A what-if over one manager, valid until the manager's next call that changes anything.

    `free_blocks` and `free_rows` are what would be left, blocks that could be evicted included.
    Each call takes effect on the forecast, and returns it, or raises what the real call would, with the forecast
    unchanged.
    """

    def __init__(self, state: CacheState) -> None:
        self._state = state
        self._free_blocks = state.num_free_blocks
        self._free_rows = state.rows.num_free
        self._released: set[int] = set()
        self._ended_holds: dict[int, int] = {}
        self._claimed: dict[int, int] = {}
        self._added_tokens: dict[int, int] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks of all pools that would be free or evictable."""
        return self._free_blocks

    @property
    def free_rows(self) -> int:
        """Rows that would be free."""
        return self._free_rows

    def release(self, sequence: Sequence) -> Self:
        """Suppose that a sequence is freed."""
        state, rows = self._state, self._state.rows
        rows.check_running(sequence, "release")
        if sequence.row in self._released:
            raise SequenceError(f"release: {sequence!r} is released in this forecast already")
        self._released.add(sequence.row)
        self._free_rows += 1
        own = rows.num_blocks.item(sequence.row) - rows.num_published.item(sequence.row)
        self._free_blocks += own + self._added_blocks(sequence, 0)
        extent: Extent = sequence._extent
        while extent.parent is not None:
            self._ended_holds[id(extent)] = self._ended_holds.get(id(extent), 0) + 1
            if self._is_held(extent):
                break
            self._free_blocks += extent.num_blocks - self._claimed.get(id(extent), 0)
            extent = extent.parent
        assert self.free_blocks <= state.pools[0].num_blocks
        return self

    def add(self, prompt: int | Tokens, *, namespace: Namespace = (), reuse: bool = True, num_beams: int = 1) -> Self:
        """Suppose that a prompt is admitted: its tokens, or their number for one of which nothing is cached."""
        needed, path = self._admission(prompt, namespace, reuse, num_beams)
        self._free_blocks -= needed
        self._free_rows -= num_beams
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
        self._free_blocks -= needed
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
            admission.check_prompt(state, num_tokens, num_beams, self.free_rows, 0)
        else:
            tokens = as_token_bytes(prompt)
            num_tokens = len(tokens) // TOKEN_BYTES
            admission.check_prompt(state, num_tokens, num_beams, self.free_rows, 0)
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
        return max(-(-num_tokens // self._state.block_size) - sequence.num_columns, 0)

    def _require(self, needed: int) -> None:
        if needed > self.free_blocks:
            held = self._state.pools[0].num_blocks - self.free_blocks
            raise OutOfBlocks(
                f"group 0 needs {needed} blocks, but only {self.free_blocks} would be free or evictable ({held} held)",
                needed=needed,
                free=self.free_blocks,
                evictable=0,
                held=held,
            )


class TriedForecast(Forecast):
    """A what-if over a manager with several groups, or with windows or states: it works on a copy of everything."""

    def __init__(self, state: CacheState) -> None:
        state.settle()
        self._real = state
        self._state = copy_of(state)
        self._released: set[int] = set()

    @property
    def free_blocks(self) -> int:
        """Blocks of all pools that would be free or evictable."""
        return self._state.num_free_blocks

    @property
    def free_rows(self) -> int:
        """Rows that would be free."""
        return self._state.rows.num_free

    def release(self, sequence: Sequence) -> Self:
        """Suppose that a sequence is freed."""
        ours = self._ours(sequence, "release")
        if ours._beams is not None:
            branches.leave_beams(self._state, ours)
        self._released.add(sequence.row)
        self._state.end(ours, publish=True)
        return self

    def add(self, prompt: int | Tokens, *, namespace: Namespace = (), reuse: bool = True, num_beams: int = 1) -> Self:
        """Suppose that a prompt is admitted: its tokens, or their number for one of which nothing is cached."""
        tokens = self._checked(prompt, namespace, num_beams)
        match = admission.match_prompt(self._state, tokens, namespace) if reuse else None
        admission.admit(self._state, tokens, namespace, match, publishes=False, retention=None, num_beams=num_beams)
        return self

    def append(self, sequence: Sequence, num_tokens: int = 1) -> Self:
        """Suppose that a running sequence gets more tokens."""
        ours = self._ours(sequence, "append")
        n = as_count(num_tokens, "num_tokens")
        batch = self._state.rows.batch([ours], "append")
        growth.append_arrays(self._state, batch, [np.zeros(n, np.int32).tobytes()])
        return self

    def fits(self, prompt: int | Tokens, *, namespace: Namespace = (), reuse: bool = True, num_beams: int = 1) -> bool:
        """Say whether a prompt would be admitted now; changes nothing."""
        state = self._state
        try:
            tokens = self._checked(prompt, namespace, num_beams)
            match = admission.match_prompt(state, tokens, namespace) if reuse else None
            num_reused = match.position // state.tree.block_bytes if match else 0
            needs = admission.prompt_needs(state, len(tokens) // TOKEN_BYTES, num_reused, num_beams, 0)
            state.require(needs, match)
        except (OutOfBlocks, NeverFits):
            return False
        return True

    def _checked(self, prompt: int | Tokens, namespace: Namespace, num_beams: int) -> bytes:
        """Return a prompt's packed tokens, of one given by its length such as none has; it is not to be published."""
        check_namespace(namespace)
        check_num_beams(num_beams)
        if isinstance(prompt, int):
            tokens = np.full(as_count(prompt, "prompt"), UNKNOWN, np.int32).tobytes()
        else:
            tokens = as_token_bytes(prompt)
        state = self._state
        admission.check_prompt(state, len(tokens) // TOKEN_BYTES, num_beams, state.rows.num_free, 0)
        return tokens

    def _ours(self, sequence: Sequence, call: str) -> Sequence:
        self._real.rows.check_running(sequence, call)
        if sequence.row in self._released:
            raise SequenceError(f"{call}: {sequence!r} is released in this forecast")
        return self._state.rows.sequence_at(sequence.row)


def forecast_of(state: CacheState) -> Forecast:
    """Return a what-if over a manager's state."""
    return Forecast(state) if state.is_plain else TriedForecast(state)


def copy_of(state: CacheState) -> CacheState:
    """Copy a manager's state, which shares nothing with it that changes."""
    # Callers' objects are not ours to copy: their clock, their policy, what releases a pin.
    callers = [state.config, state.config.policy, state.clock, *state.pins]
    memo: dict[int, object] = {id(each): each for each in callers}
    made: dict[int, Extent] = {}
    for extent in state.all_extents():
        made[id(extent)] = memo[id(extent)] = extent.copied()
    for twin in made.values():
        if twin.parent is not None:
            twin.parent = made[id(twin.parent)]
        if twin.children is not None:
            twin.children = {key: made[id(child)] for key, child in twin.children.items()}
    return copy.deepcopy(state, memo)
