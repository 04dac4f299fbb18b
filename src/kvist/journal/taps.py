"""Listens to the calls of one manager: a tapped manager is of a class of its own, whose methods tell listeners.

Only calls from outside are told, not those that a call makes itself. Besides calls, what the core takes from elsewhere
is told: readings of the clock, failures of the memory, what came from stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import astuple
from functools import wraps
from typing import Any, Protocol

from kvist.core.moves import Move
from kvist.errors import SequenceError
from kvist.manager import KVCacheManager

__all__ = ["CALLS", "Listener", "Taps", "taps_of"]

CALLS = (
    "add_sequence", "append", "reserve", "commit", "accept", "rewind", "free", "suspend", "resume", "fork", "reorder",
    "match_prefix", "pin", "_release_pin", "prefetch", "evict", "drop", "reset", "forecast", "perform", "take_moves",
    "stats", "explain", "digest", "flush", "_take_events",
)  # fmt: skip
"""The methods that change a manager. Looking counts, too: it publishes what is committed."""

LOOKS = ("num_free_blocks",)
"""Properties that do."""


class Listener(Protocol):
    """Is told what happens to a manager, in order."""

    def begin(self, call: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """A call is about to be made."""

    def note(self, what: str, value: Any) -> None:
        """The call has read the clock, failed to make copies, or got something from a store."""

    def end(self, call: str, result: Any, error: BaseException | None) -> None:
        """The call has returned, or raised."""

    def rest(self) -> None:
        """All listeners know of the call, and this one may make another."""


class Taps:
    """The listeners of one manager, and whether a call is being made."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.listeners: list[Listener] = []
        self._is_calling = False
        self._num_carried_out = 0
        self._clock = manager.clock

    def add(self, listener: Listener) -> None:
        """Begin to tell a listener, of a manager that forgets all that is cached.

        Raises SequenceError while anything runs or holds.
        """
        try:
            if self.listeners:
                self.manager.reset()
            else:
                self._open()
        except SequenceError as error:
            raise SequenceError(f"a journal begins with an empty manager, before its first call; {error}") from error
        self.listeners.append(listener)

    def remove(self, listener: Listener) -> None:
        """Tell a listener no more; after the last, the manager is as it was."""
        self.listeners.remove(listener)
        if not self.listeners:
            self._close()

    def _open(self) -> None:
        manager = self.manager
        manager.clock = self.read_clock
        try:
            manager.reset()
        except SequenceError:
            manager.clock = self._clock
            raise
        manager.__class__ = _tapped(type(manager))
        vars(manager)["_taps"] = self
        if manager._link is not None:
            _tap_link(manager._link, self)

    def _close(self) -> None:
        manager = self.manager
        manager.__class__ = type(manager).__bases__[0]
        del vars(manager)["_taps"]
        if manager._link is not None:
            del manager._link.bring_up, manager._link.fill

    def read_clock(self) -> float:
        """Return what the manager's clock says, and tell."""
        reading = self._clock()
        self.note("clock", reading)
        return reading

    def note(self, what: str, value: Any) -> None:
        """Tell what the call that is being made has taken from elsewhere."""
        if self._is_calling:
            for listener in self.listeners:
                listener.note(what, value)

    def call(self, name: str, method: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Make a call, and tell."""
        if self._is_calling:
            return method(self.manager, *arguments, **options)
        arguments = tuple(map(_kept, arguments))
        options = {option: _kept(value) for option, value in options.items()}
        for listener in self.listeners:
            listener.begin(name, arguments, options)
        self._is_calling, self._num_carried_out = True, 0
        result, raised = None, None
        try:
            result = method(self.manager, *arguments, **options)
        except BaseException as error:
            raised = error
            raise
        finally:
            self._is_calling = False
            for listener in self.listeners:
                listener.end(name, result, raised)
            for listener in self.listeners:
                listener.rest()
        return result

    def carry_out(self, method: Callable[..., list[Move]], orders: list[Any]) -> list[Move]:
        """Let the memory make copies, and tell if it fails, or which it has not made."""
        index, self._num_carried_out = self._num_carried_out, self._num_carried_out + 1
        try:
            unmade = method(self.manager, orders)
        except Exception:
            self.note("memory", index)
            raise
        if unmade:
            self.note("unmade", [index, [list(astuple(move)) for move in unmade]])
        return unmade


def taps_of(manager: KVCacheManager) -> Taps:
    """Return the taps of a manager: those it has, or new ones."""
    taps = vars(manager).get("_taps")
    return taps if isinstance(taps, Taps) else Taps(manager)


def _kept(value: Any) -> Any:
    """Return an argument that can be read twice."""
    return list(value) if isinstance(value, Iterator) else value


def _tapped(kind: type[KVCacheManager]) -> type[KVCacheManager]:
    """Return a class that does what another does, and tells."""
    members: dict[str, Any] = {
        "__doc__": kind.__doc__,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    members |= {name: _telling(name, getattr(kind, name)) for name in CALLS}
    members |= {name: property(_telling(name, getattr(kind, name).fget)) for name in LOOKS}
    carry_out = kind._carry_out
    members["_carry_out"] = lambda self, orders: taps_of(self).carry_out(carry_out, orders)
    return type(kind.__name__, (kind,), members)


def _telling(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: KVCacheManager, *arguments: Any, **options: Any) -> Any:
        taps = vars(self).get("_taps")
        if taps is None:  # a pin or a bound method has outlived them
            return method(self, *arguments, **options)
        return taps.call(name, method, arguments, options)

    return call


def _tap_link(link: Any, taps: Taps) -> None:
    """Tell how many blocks come from stores, and whether they could be written."""
    bring_up, fill = link.bring_up, link.fill

    def told_bring_up(*arguments: Any) -> Any:
        came = bring_up(*arguments)
        taps.note("stored", 0 if came is None else came[0].blocks.shape[1])
        return came

    def told_fill(fillings: Any) -> None:
        try:
            fill(fillings)
        except Exception as error:
            taps.note("unfilled", type(error).__name__)
            raise

    link.bring_up, link.fill = told_bring_up, told_fill
