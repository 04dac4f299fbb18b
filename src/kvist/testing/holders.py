"""Who holds blocks: which sequence or pin, made by which call, from where, and how long ago."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvist.core.matching import Pin
from kvist.core.sequences import Sequence
from kvist.journal.recording import made_by
from kvist.journal.taps import taps_of
from kvist.manager import KVCacheManager

__all__ = ["Holder", "HolderLog", "Leaked"]

INSIDE = ("kvist.core", "kvist.journal", "kvist.manager", "kvist.testing")
"""Modules whose frames say nothing of who made a call."""
MAX_SHOWN = 20

Block = tuple[int, int]
"""A pool and a block of it."""


class Leaked(AssertionError):
    """Something still holds blocks that should not; says what, made by which call, and its age."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A sequence or pin that has not ended: the call that made it, where that is in the caller's code, and its age.

    `num_blocks` are the device blocks that it holds, of all groups; of these nobody else holds `num_alone`. A sequence
    that is suspended holds none.
    """

    what: Sequence | Pin
    call: str
    call_number: int
    where: str
    age_calls: int
    age_s: float
    num_blocks: int
    num_alone: int

    def __str__(self) -> str:
        held = f"{self.num_blocks} blocks ({self.num_alone} alone)"
        return (
            f"{self.what!r} holds {held}: made by call {self.call_number}, {self.call}, in {self.where}, "
            f"{self.age_calls} calls and {self.age_s:.3g} s ago"
        )


@dataclass(frozen=True, slots=True)
class _Made:
    call: str
    number: int
    where: str
    at_s: float


class HolderLog:
    """Notes which call of a manager made each sequence and pin, so that a leak has a name.

    It begins with a manager on which nothing runs, which forgets what is cached. `clock` gives seconds; default: the
    manager's.

    >>> from kvist import AttentionSpec, CacheConfig, KVCacheManager
    >>> manager = KVCacheManager(CacheConfig([AttentionSpec(1, 1)], block_size=2, num_blocks=8))
    >>> log = HolderLog(manager)
    >>> sequence = manager.add_sequence([1, 2, 3])
    >>> [(holder.call, holder.num_blocks, holder.num_alone) for holder in log.holders()]
    [('add_sequence', 2, 2)]
    >>> log.require_none()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    kvist.testing.holders.Leaked: 1 holders, oldest first:
      <Sequence row 0: ...> holds 2 blocks (2 alone): made by call 1, add_sequence, in ..., 0 calls and ... s ago
    >>> manager.free(sequence)
    >>> log.require_none()
    """

    def __init__(self, manager: KVCacheManager, *, clock: Callable[[], float] | None = None) -> None:
        self._manager = manager
        self._clock = manager.clock if clock is None else clock
        self._made: dict[Sequence | Pin, _Made] = {}
        self._where = ""
        self.num_calls = 0
        taps_of(manager).add(self)

    def holders(self) -> list[Holder]:
        """List what has not ended, oldest first."""
        self._forget_ended()
        held = {each: _blocks_of(self._manager, each) for each in self._made}
        counts = Counter(block for blocks in held.values() for block in blocks)
        return [self._holder(each, blocks, counts) for each, blocks in held.items()]

    def report(self) -> str:
        """Return what holds blocks, one a line; that nothing does, if so."""
        holders = self.holders()
        if not holders:
            return "nothing holds blocks"
        more = [f"  ... and {len(holders) - MAX_SHOWN} more"] if len(holders) > MAX_SHOWN else []
        shown = [f"  {holder}" for holder in holders[:MAX_SHOWN]]
        return "\n".join([f"{len(holders)} holders, oldest first:", *shown, *more])

    def require_none(self) -> None:
        """Raise Leaked unless everything has ended, and all blocks have come back."""
        manager = self._manager
        if self.holders():
            raise Leaked(self.report())
        if manager.num_free_blocks != manager.num_blocks:
            raise Leaked(f"nothing holds blocks, but only {manager.num_free_blocks} of {manager.num_blocks} are free")

    def close(self) -> None:
        """Note no more."""
        if self in (taps := taps_of(self._manager)).listeners:
            taps.remove(self)

    def _holder(self, what: Sequence | Pin, blocks: set[Block], counts: Counter[Block]) -> Holder:
        made = self._made[what]
        alone = sum(counts[block] == 1 for block in blocks)
        age_calls, age_s = self.num_calls - made.number, self._clock() - made.at_s
        return Holder(what, made.call, made.number, made.where, age_calls, age_s, len(blocks), alone)

    def _forget_ended(self) -> None:
        self._made = {what: made for what, made in self._made.items() if not _has_ended(self._manager, what)}

    # -- what the taps tell -------------------------------------------------------------------------------------------

    def begin(self, call: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Note from where a call is made."""
        self.num_calls += 1
        self._where = _caller()

    def note(self, what: str, value: Any) -> None:
        """Do nothing."""

    def end(self, call: str, result: Any, error: BaseException | None) -> None:
        """Note what a call has made."""
        for made in made_by(result):
            self._made.setdefault(made, _Made(call, self.num_calls, self._where, self._clock()))
        if len(self._made) > 2 * self._manager.config.max_sequences:
            self._forget_ended()

    def rest(self) -> None:
        """Do nothing."""


def _has_ended(manager: KVCacheManager, what: Sequence | Pin) -> bool:
    if isinstance(what, Pin):
        return what not in manager._state.pins
    return not (what.is_live or what.is_suspended)


def _blocks_of(manager: KVCacheManager, what: Sequence | Pin) -> set[Block]:
    """Collect the device blocks that a sequence or pin refers to, by pool."""
    named = _pinned(manager, what) if isinstance(what, Pin) else _of_sequence(manager, what)
    pool_of = manager.config.pool_of
    return {(pool_of[group], block) for group, block in named if block >= 0}


def _pinned(manager: KVCacheManager, pin: Pin) -> list[Block]:
    """List the blocks of a pin, each with its group."""
    state, named = manager._state, list[Block]()
    hold = state.pins[pin]
    full = [group for group, spec in enumerate(manager.config.groups) if spec.kind == "full"]
    for group in full:
        named += [(group, block) for extent in hold.extent.path() for block in extent.blocks[group].tolist()]
    for spanned, blocks in zip(state.spanned, hold.blocks, strict=True):
        named += [(spanned.index, block) for block in blocks.tolist()]
    return named


def _of_sequence(manager: KVCacheManager, sequence: Sequence) -> list[Block]:
    """List the blocks of a sequence, each with its group; states that it keeps for others are its own, too."""
    if not sequence.is_live:
        return []
    groups, recurrent = range(len(manager.config.groups)), manager._state.recurrent
    named = [(group, block) for group in groups for block in sequence.group_blocks(group).tolist()]
    kept = [] if recurrent is None else [(recurrent.index, block) for _, block in sequence._checkpoints]
    return named + kept


def _caller() -> str:
    """Say which line of whose code has called a manager."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith(INSIDE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
