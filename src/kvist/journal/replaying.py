"""Makes the calls of a journal again, of a fresh manager without a device or stores, and holds it to what it did."""

from __future__ import annotations

import json
from collections.abc import Iterator
from os import PathLike
from typing import Any, NamedTuple

from kvist.config import CacheConfig
from kvist.core import restoring
from kvist.core.extents import Extent, Match, Namespace
from kvist.core.forecast import Forecast
from kvist.core.moves import Move
from kvist.core.restoring import Installed
from kvist.core.state import CacheState
from kvist.core.tokens import TOKEN_BYTES
from kvist.errors import KvistError, TransferError, WireError
from kvist.journal.recording import FORMAT, made_by
from kvist.journal.settings import Policies, read_config
from kvist.journal.taps import CALLS, LOOKS
from kvist.journal.values import MALFORMED, Names, Values
from kvist.manager import KVCacheManager
from kvist.storing import StoreLink

__all__ = ["Call", "Repeater", "Replay", "ReplayError", "replay"]

MAX_SHOWN = 160


class ReplayError(KvistError, RuntimeError):
    """A call did something else than the journal says."""


class Call(NamedTuple):
    """One line of a journal: `number` counts from 1; without an outcome it was begun and never returned."""

    number: int
    name: str
    arguments: list[Any]
    options: dict[str, Any]
    outcome: dict[str, Any] | None

    def __str__(self) -> str:
        options = [f"{name}={json.dumps(value)}" for name, value in self.options.items()]
        told = ", ".join([*map(json.dumps, self.arguments), *options])
        told = told if len(told) <= MAX_SHOWN else f"{told[:MAX_SHOWN]}..."
        raised = (self.outcome or {}).get("raised")
        end = f" raised {raised}" if raised else "" if self.outcome is not None else " never returned"
        return f"call {self.number}: {self.name.strip('_')}({told}){end}"


class Repeater:
    """Makes calls that another manager has made, of a fresh one, and holds it to what they did.

    `manager` is what they have come to. Without a device or stores: what the other had from them is in the calls.
    """

    def __init__(self, config: CacheConfig, *, has_memory: bool) -> None:
        self.num_calls = 0
        self.last: Call | None = None
        self._feed = _Feed()
        self._values = Values(Names())
        self.manager: KVCacheManager = _Again(config, self._feed, has_memory=has_memory)

    def make(self, call: Call) -> None:
        """Make a call; raises ReplayError if it does not what its outcome says. Without one, it may do anything."""
        self.last, self.num_calls = call, call.number
        raised, result = self._make(call)
        if call.outcome is not None:
            self._compare(call, raised, result)
        for made in made_by(result):
            self._values.names.add(made)

    def _make(self, call: Call) -> tuple[BaseException | None, Any]:
        try:
            arguments = [self._argument(each) for each in call.arguments]
            options = {name: self._argument(each) for name, each in call.options.items()}
        except MALFORMED as error:
            raise WireError(f"call {call.number}: expected arguments of {call.name}, got others: {error}") from error
        self._feed.fill(call.outcome or {})
        try:
            if call.name in LOOKS:
                return None, getattr(self.manager, call.name)
            return None, getattr(self.manager, call.name)(*arguments, **options)
        except ReplayError:
            raise
        except Exception as error:
            return error, None

    def _argument(self, told: Any) -> Any:
        value = self._values.read(told)
        if isinstance(told, dict) and "forecast" in told:
            forecast = Forecast.__new__(Forecast)
            forecast._steps = value
            return forecast
        return value

    def _compare(self, call: Call, raised: BaseException | None, result: Any) -> None:
        assert call.outcome is not None
        expected, actual = call.outcome.get("raised"), None if raised is None else type(raised).__name__
        if expected != actual:
            told = f"it raised {raised!r}" if raised is not None else "it raised nothing"
            raise ReplayError(f"{call}: {told}, the journal says {expected or 'nothing'}") from raised
        digest = call.outcome.get("digest", result)
        if call.name == "digest" and digest != result:
            raise ReplayError(f"{call}: the digest is {result}, the journal says {digest}")
        if left := self._feed.left():
            raise ReplayError(f"{call}: it asked less of clock, memory or stores than the journal says: {left} is left")


class Replay(Repeater):
    """The calls of a journal, made one by one; `manager` is what they have come to.

    `policies` are the eviction policies that are callables, by name. Raises WireError for what is no journal.
    """

    def __init__(self, path: str | PathLike[str], *, policies: Policies | None = None) -> None:
        self._lines = _lines(path)
        self.head = _head(next(self._lines, b""))
        super().__init__(read_config(self.head["config"], policies), has_memory=self.head["has_memory"])

    def step(self) -> Call | None:
        """Make the next call; returns it, or None after the last.

        A call that never returned is made, and may do anything. Raises ReplayError if it does not what the journal
        says.
        """
        line = next(self._lines, None)
        call = None if line is None else _call(self.num_calls + 1, line)
        if call is not None:
            self.make(call)
        return call

    def run(self, stop_at: int | None = None) -> KVCacheManager:
        """Make calls to the end, or up to and including call `stop_at`; returns the manager."""
        while (stop_at is None or self.num_calls < stop_at) and self.step() is not None:
            pass
        return self.manager


def replay(path: str | PathLike[str], *, stop_at: int | None = None, policies: Policies | None = None) -> Replay:
    """Make the calls of a journal, all or up to call `stop_at`, and return what they have come to.

    A last line that is cut off is left out, or made without comparing if it is a call that never returned. Raises
    ReplayError at the first call that does not what the journal says, WireError for what is no journal.
    """
    again = Replay(path, policies=policies)
    again.run(stop_at)
    return again


# -- reading ----------------------------------------------------------------------------------------------------------


def _lines(path: str | PathLike[str]) -> Iterator[bytes]:
    with open(path, "rb") as file:
        yield from file


def _head(line: bytes) -> dict[str, Any]:
    head = _parsed(line)
    if not isinstance(head, dict) or "kvist journal" not in head:
        raise WireError(f"head: expected that of a journal, got {line[:40]!r}")
    if head["kvist journal"] != FORMAT:
        raise WireError(f"head: expected format {FORMAT}, got {head['kvist journal']!r:.40}")
    for name in ("versions", "has_memory", "config"):
        if name not in head:
            raise WireError(f"head: expected a field {name}, got {', '.join(head):.80}")
    return head


def _call(number: int, line: bytes) -> Call | None:
    """Return the call of a line; None for a last line of which too little was written."""
    if not line.endswith(b"\n"):
        whole = _parsed(line.removesuffix(b",") + b"]")
        told = whole if isinstance(whole, list) and len(whole) == 3 else _parsed(line)
        if told is None:
            return None
    else:
        told = _parsed(line)
    if not _is_call(told):
        raise WireError(f"call {number}: expected a known call with its arguments, got {line[:80]!r}")
    return Call(number, *told, *([None] if len(told) == 3 else []))


def _is_call(told: Any) -> bool:
    if not isinstance(told, list) or len(told) not in (3, 4) or told[0] not in (*CALLS, *LOOKS):
        return False
    if not isinstance(told[1], list) or not isinstance(told[2], dict):
        return False
    return len(told) == 3 or (isinstance(told[3], dict) and all(map(_is_taken, told[3].items())))


def _is_taken(item: tuple[str, Any]) -> bool:
    """Say whether this is something that a call can have taken from elsewhere, or raised."""
    name, values = item
    kinds = _TAKEN.get(name)
    return kinds is None or (isinstance(values, list) and all(isinstance(each, kinds) for each in values))


_TAKEN: dict[str, type | tuple[type, ...]] = {
    "clock": (int, float), "memory": int, "stored": int, "unfilled": str, "unmade": list,
}  # fmt: skip


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


# -- what the core takes from elsewhere -------------------------------------------------------------------------------


class _Feed:
    """What one call took from clock, memory and stores, to be given to it again."""

    def __init__(self) -> None:
        self._outcome: dict[str, list[Any]] = {}
        self._last_reading = 0.0
        self.num_carried_out = 0
        self._may_run_dry = True

    def fill(self, outcome: dict[str, Any]) -> None:
        """Begin a call."""
        self._outcome = {what: list(values) for what, values in outcome.items() if isinstance(values, list)}
        self._may_run_dry = not outcome
        self.num_carried_out = 0

    def left(self) -> dict[str, list[Any]]:
        """Return what the call did not ask for."""
        return {what: values for what, values in self._outcome.items() if values and what not in ("memory", "unmade")}

    def read_clock(self) -> float:
        """Return the next reading; beyond those of the journal, the last one."""
        readings = self._outcome.get("clock")
        if readings:
            self._last_reading = readings.pop(0)
        return self._last_reading

    def carry_out(self) -> list[Move]:
        """Fail where the memory has failed; returns the copies that it has not made."""
        index, self.num_carried_out = self.num_carried_out, self.num_carried_out + 1
        if index in self._outcome.get("memory", ()):
            raise OSError("the memory failed here when the journal was written")
        return [Move(*move) for at, moves in self._outcome.get("unmade", ()) if at == index for move in moves]

    def stored(self) -> int:
        """Return how many blocks came from stores."""
        counts = self._outcome.get("stored")
        return counts.pop(0) if counts else 0

    def fill_blocks(self) -> None:
        """Fail where they could not be written."""
        if kinds := self._outcome.get("unfilled"):
            kind = kinds.pop(0)
            raise TransferError(kind) if kind == TransferError.__name__ else OSError(kind)


class _Again(KVCacheManager):
    """A manager whose clock, memory and stores do what they did before."""

    def __init__(self, config: Any, feed: _Feed, *, has_memory: bool) -> None:
        self._feed = feed
        stores, tiers = config.stores, config.tiers
        if stores:
            object.__setattr__(config, "tiers", [tier for tier in tiers if tier not in stores])
        super().__init__(config, _Making() if has_memory else None, clock=feed.read_clock)
        if stores:
            object.__setattr__(config, "tiers", tiers)
            self.reset()
            self._link = _Shelves(feed)  # type: ignore[assignment]

    def _carry_out(self, orders: list[Any]) -> list[Move]:
        return self._feed.carry_out()


class _Making:
    """A memory that holds nothing."""

    takes_block_moves = True

    def perform(self, moves: list[Any]) -> None:
        """Make no copies."""


class _Shelves:
    """Stands for the stores: what they had is known, what is in it does not matter."""

    prefill_tokens_per_s: float | None = None
    asks = True

    def __init__(self, feed: _Feed) -> None:
        self._feed = feed
        self.stack = self

    def keep(self, order: Any) -> None:
        """Keep nothing."""

    def offer_again(self, state: CacheState, extent: Extent) -> None:
        """Offer nothing: what was offered again is not part of what happened to the core."""

    def bring_up(
        self, state: CacheState, prompt: bytes | memoryview, namespace: Namespace, limit: int, match: Match | None,
        num_beams: int,
    ) -> tuple[Installed, list[Any]] | None:  # fmt: skip
        """Make room for as many blocks as came."""
        missing, end = restoring.missing_of(state, prompt, namespace, limit, match), self._feed.stored()
        if missing is None or not end:
            return None
        others = StoreLink._other_needs(state, prompt, missing, end, num_beams)
        installed = restoring.install(state, missing, end, others)
        if installed is None:
            raise ReplayError(f"there is no room for the {end} blocks that came from stores")
        return installed, []

    def fill(self, fillings: list[Any]) -> None:
        """Write nothing, or fail."""
        self._feed.fill_blocks()

    def told(
        self, state: CacheState, prompt: bytes | memoryview, namespace: Namespace, match: Match | None, first: int
    ) -> tuple[()]:
        """Say that stores have nothing."""
        restoring.missing_of(state, prompt, namespace, len(prompt) - TOKEN_BYTES, match)
        return ()

    def fetch_ahead(
        self, state: CacheState, prompt: bytes | memoryview, namespace: Namespace, limit: int, match: Match | None
    ) -> tuple[int, None]:
        """Fetch nothing."""
        restoring.missing_of(state, prompt, namespace, limit, match)
        return 0, None

    def drop(self, tag: bytes) -> None:
        """Forget nothing."""

    def flush(self, timeout_s: float) -> bool:
        """Have written everything."""
        return True

    def close(self) -> None:
        """Do nothing."""
