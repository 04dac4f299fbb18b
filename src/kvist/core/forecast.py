"""What would fit: releases and admissions tried out on a copy of the counts, in any order, with nothing changed.

With full attention alone counts are enough, and exact, because it does not matter to them what is evicted on the way:
an admitted prompt takes as many blocks out of the free and evictable ones as it needs, less those of its cached prefix
that somebody else holds already. With windows and states it does matter, since a shorter hit takes more blocks, and
beams that wait for a prompt inherit what its sequence has; so there the calls are tried out on a copy of the manager's
state.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike

from kvist.core import admission, branches, growth, resuming
from kvist.core.arguments import as_count, check_namespace, check_num_beams
from kvist.core.extents import Extent, Namespace
from kvist.core.identity import UNKNOWN, Media
from kvist.core.promotion import find_lower
from kvist.core.retention import Retention
from kvist.core.sequences import Sequence, Wishes
from kvist.core.state import CacheState
from kvist.core.tokens import TOKEN_BYTES, TokenArray, Tokens, as_token_array, as_token_bytes
from kvist.errors import NeverFits, OutOfBlocks, SequenceError

__all__ = ["Forecast", "forecast_of"]


class Step(NamedTuple):
    """Something that was supposed: the call, the prompt or the tokens, or their number, and its other arguments."""

    call: str
    tokens: Any
    options: dict[str, Any]

    @property
    def is_certain(self) -> bool:
        """Whether all is known that the real call needs."""
        return not isinstance(self.tokens, int)


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt that is only supposed: its packed tokens, where nothing is known of them such as no prompt has."""

    tokens: bytes
    namespace: Namespace
    reuse: bool
    num_beams: int
    num_encoder_tokens: int


class Forecast:
    """A what-if over one manager, valid until the manager's next call that changes anything.

    `free_blocks` and `free_rows` are what would be left, blocks that could be evicted included.
    Each call takes effect on the forecast, and returns it, or raises what the real call would, with the forecast
    unchanged.
    """

    def __init__(self, state: CacheState) -> None:
        self._real = self._state = state
        self._free_blocks = state.num_free_blocks
        self._free_rows = state.rows.num_free
        self._released: set[Sequence] = set()
        self._ended_holds: dict[int, int] = {}
        self._claimed: dict[int, int] = {}
        self._added_tokens: dict[int, int] = {}
        self._steps: list[Step] = []

    @property
    def steps(self) -> tuple[Step, ...]:
        """What has been supposed, in order."""
        return tuple(self._steps)

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
        rows = self._state.rows
        self._check(sequence, "release")
        self._released.add(sequence)
        self._steps.append(Step("release", None, {"sequence": sequence}))
        if resuming.is_suspended(self._real, sequence):  # it has nothing
            return self
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
        assert self.free_blocks <= self._state.pools[0].num_blocks
        return self

    def add(
        self,
        prompt: int | Tokens,
        *,
        namespace: Namespace = (),
        media: Iterable[Media] = (),
        extra_ids: ArrayLike | None = None,
        retention: Retention | None = None,
        reuse: bool = True,
        publish: bool = True,
        num_beams: int = 1,
        encoder_tokens: int = 0,
    ) -> Self:
        """Suppose that a prompt is admitted: its tokens, or their number for one of which nothing is cached.

        The other arguments are those of `add_sequence`.
        """
        # What is supposed is what is done later, whatever the caller does with its own arrays.
        known = prompt if isinstance(prompt, int) else as_token_array(prompt).copy()
        spans, ids = tuple(media), None if extra_ids is None else copy.deepcopy(extra_ids)
        self._admit(self._asked(known, namespace, spans, ids, reuse, num_beams, encoder_tokens))
        options: dict[str, Any] = {
            "namespace": namespace,
            "media": spans,
            "extra_ids": ids,
            "retention": retention,
            "reuse": reuse,
            "publish": publish,
            "num_beams": num_beams,
            "encoder_tokens": encoder_tokens,
        }
        self._steps.append(Step("add", known, options))
        return self

    def fits(
        self,
        prompt: int | Tokens,
        *,
        namespace: Namespace = (),
        media: Iterable[Media] = (),
        extra_ids: ArrayLike | None = None,
        reuse: bool = True,
        num_beams: int = 1,
        encoder_tokens: int = 0,
    ) -> bool:
        """Say whether a prompt would be admitted now; changes nothing."""
        try:
            self._require(self._asked(prompt, namespace, media, extra_ids, reuse, num_beams, encoder_tokens))
        except (OutOfBlocks, NeverFits):
            return False
        return True

    def _asked(
        self,
        prompt: int | Tokens,
        namespace: Namespace,
        media: Iterable[Media],
        extra_ids: ArrayLike | None,
        reuse: bool,
        num_beams: int,
        encoder_tokens: int,
    ) -> Asked:
        """Check what is asked as an admission would."""
        state = self._state
        check_namespace(namespace)
        check_num_beams(num_beams)
        num_encoder_tokens = as_count(encoder_tokens, "encoder_tokens")
        tokens = None if isinstance(prompt, int) else as_token_bytes(prompt)
        num_tokens = as_count(prompt, "prompt") if tokens is None else len(tokens) // TOKEN_BYTES
        admission.check_prompt(state, num_tokens, num_beams, self.free_rows, num_encoder_tokens)
        if tokens is None:
            tokens = np.full(num_tokens, UNKNOWN, np.int32).tobytes()
        elif extra_ids is not None or media != ():
            tokens = state.identities.look(tokens, media, extra_ids)
        return Asked(tokens, namespace, reuse and not num_encoder_tokens, num_beams, num_encoder_tokens)

    def _admit(self, asked: Asked) -> None:
        needed, path = self._admission(asked)
        self._free_blocks -= needed
        self._free_rows -= asked.num_beams
        for extent, num_blocks in path:
            self._claimed[id(extent)] = max(self._claimed.get(id(extent), 0), num_blocks)

    def _require(self, asked: Asked) -> None:
        self._admission(asked)

    def append(self, sequence: Sequence, tokens: int | Tokens = 1) -> Self:
        """Suppose that a running sequence gets more tokens: these, or so many."""
        self._check(sequence, "append")
        self._state.rows.check_running(sequence, "append")
        added = self._added_tokens.get(sequence.row, 0)
        known = tokens if isinstance(tokens, int) else as_token_array(tokens).copy()
        n = _num_tokens(known)
        if sequence.num_tokens + added + n > self._state.rows.max_tokens:
            raise NeverFits(f"append: {sequence!r} with {added + n} more tokens exceeds max_sequence_length")
        needed = self._added_blocks(sequence, n) - self._added_blocks(sequence, 0)
        self._require_blocks(needed)
        self._free_blocks -= needed
        self._added_tokens[sequence.row] = added + n
        self._steps.append(Step("append", known, {"sequence": sequence}))
        return self

    def _admission(self, asked: Asked) -> tuple[int, list[tuple[Extent, int]]]:
        """Return how many blocks an admission would take, and the extents it would hold, each with how much of it."""
        path = self._path(asked.tokens, asked.namespace) if asked.reuse else []
        [total] = admission.prompt_needs(self._state, len(asked.tokens) // TOKEN_BYTES, 0, asked.num_beams, 0)
        needed = total - sum(self._num_held(extent, num_blocks) for extent, num_blocks in path)
        self._require_blocks(needed)
        return needed, path

    def _path(self, tokens: bytes, namespace: Namespace) -> list[tuple[Extent, int]]:
        match = admission.match_prompt(self._state, tokens, namespace)
        if match is None:
            return []
        path = [(extent, extent.num_blocks) for extent in match.extent.path()]
        return path if match.child is None else [*path, (match.child, match.child_blocks)]

    def _check(self, sequence: Sequence, call: str) -> None:
        if call != "release" or not resuming.is_suspended(self._real, sequence):
            self._real.rows.check_live(sequence, call)
        if sequence in self._released:
            raise SequenceError(f"{call}: {sequence!r} is released in this forecast already")

    def _num_held(self, extent: Extent, num_blocks: int) -> int:
        return num_blocks if self._is_held(extent) else min(num_blocks, self._claimed.get(id(extent), 0))

    def _is_held(self, extent: Extent) -> bool:
        return extent.references > self._ended_holds.get(id(extent), 0)

    def _added_blocks(self, sequence: Sequence, num_more: int) -> int:
        """Count the blocks that the tokens appended in this forecast, and some more, take beyond the real ones."""
        num_tokens = sequence.num_tokens + self._added_tokens.get(sequence.row, 0) + num_more
        return max(self._state.rows.columns_for(num_tokens) - sequence.num_columns, 0)

    def _require_blocks(self, needed: int) -> None:
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
    """A what-if where counts are not enough: it works on a copy of everything."""

    def __init__(self, state: CacheState) -> None:
        state.settle()
        self._real = self._state = state
        self._released: set[Sequence] = set()
        self._steps: list[Step] = []

    def _own(self) -> CacheState:
        """Return the state that may be changed: a copy, made when it is needed first."""
        if self._state is self._real:
            self._state = self._real.copied()
        return self._state

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
        self._check(sequence, "release")
        self._released.add(sequence)
        self._steps.append(Step("release", None, {"sequence": sequence}))
        if resuming.is_suspended(self._real, sequence):
            return self
        ours = self._own().rows.sequence_at(sequence.row)
        if ours._beams is not None:
            branches.leave_beams(self._state, ours)
        self._state.end(ours, publish=True)
        return self

    def append(self, sequence: Sequence, tokens: int | Tokens = 1) -> Self:
        """Suppose that a running sequence gets more tokens: these, or so many."""
        self._check(sequence, "append")
        ours = self._own().rows.sequence_at(sequence.row)
        self._state.rows.check_running(ours, "append")
        known = tokens if isinstance(tokens, int) else as_token_array(tokens).copy()
        n = _num_tokens(known)
        batch = self._state.rows.batch([ours], "append")
        growth.append_arrays(self._state, batch, [np.zeros(n, np.int32).tobytes()])
        self._steps.append(Step("append", known, {"sequence": sequence}))
        return self

    def _admit(self, asked: Asked) -> None:
        state = self._own()
        match = admission.match_prompt(state, asked.tokens, asked.namespace) if asked.reuse else None
        held = None
        if match is not None and state.lower is not None and not asked.num_encoder_tokens:
            match, held = admission.bring_up(state, asked.tokens, asked.namespace, match, asked.num_beams)
        # What stands for unknown tokens must not be found.
        wishes = Wishes(False, num_beams=asked.num_beams, num_encoder_tokens=asked.num_encoder_tokens)
        admission.admit(state, asked.tokens, asked.namespace, match, wishes)
        if held is not None:
            state.tree.release(held)

    def _require(self, asked: Asked) -> None:
        state = self._state
        match = admission.match_prompt(state, asked.tokens, asked.namespace) if asked.reuse else None
        if state.lower is not None and find_lower(
            state, asked.tokens, asked.namespace, len(asked.tokens) - TOKEN_BYTES, match
        ):
            state = state.copied()
            match, _ = admission.bring_up(state, asked.tokens, asked.namespace, match, asked.num_beams)
        num_cached = match.position // TOKEN_BYTES + match.num_partial_tokens if match else 0
        num_tokens = len(asked.tokens) // TOKEN_BYTES
        needs = admission.prompt_needs(state, num_tokens, num_cached, asked.num_beams, asked.num_encoder_tokens)
        state.require(needs, match)


def _num_tokens(tokens: int | TokenArray) -> int:
    return as_count(tokens, "tokens") if isinstance(tokens, int) else len(tokens)


def forecast_of(state: CacheState) -> Forecast:
    """Return a what-if over a manager's state."""
    counts_are_enough = state.is_plain and state.lower is None and not state.rows.num_waiting
    return Forecast(state) if counts_are_enough else TriedForecast(state)
