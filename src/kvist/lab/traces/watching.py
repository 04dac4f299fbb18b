"""Watches a manager, or an engine: each request that ends is told, with its tokens and when it came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvist.core.extents import Namespace
from kvist.core.sequences import Sequence
from kvist.core.tokens import MAX_TOKEN
from kvist.errors import SequenceError
from kvist.manager import KVCacheManager

__all__ = ["EngineWatch", "Seen", "Watch", "Watching"]

WATCHED = ("add_sequence", "free")
ENGINE_CALLS = ("submit", "step", "abort")


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that has ended: `tokens` of prompt and output, int32 `[num_prompt_tokens + num_output_tokens]`.

    An image's tokens stand for its identity, in this process. Forks and beams beside the first are not requests.
    """

    tokens: NDArray[np.int32]
    num_prompt_tokens: int
    arrival_s: float
    namespace: Namespace


class Watching(Protocol):
    """Tells of requests until it is closed."""

    def close(self) -> None:
        """Tell of what still runs, and let go; a second time does nothing."""


class Watch:
    """Calls `ended` with each request of a manager that ends while this is attached, in the order of their ends.

    Those that are running when it is closed are told then, as they are. `clock` says when requests arrive, in seconds.
    Nothing of the manager is changed, and it may be attached and closed at any time.
    """

    def __init__(self, manager: KVCacheManager, ended: Callable[[Seen], None], clock: Callable[[], float]) -> None:
        if any(name in vars(manager) for name in WATCHED):
            raise SequenceError("the manager is watched already; close that first")
        self._manager, self._ended, self._clock = manager, ended, clock
        self._arrivals: dict[Sequence, float] = {}
        own = vars(manager)
        own["add_sequence"], own["free"] = self._add_sequence, self._free

    def close(self) -> None:
        """Tell of what still runs, and let go of the manager; a second time does nothing."""
        if not any(name in vars(self._manager) for name in WATCHED):
            return
        for name in WATCHED:
            vars(self._manager).pop(name, None)
        for sequence in list(self._arrivals):
            self._end(sequence)

    def _add_sequence(self, *arguments: Any, **options: Any) -> Sequence:
        sequence = type(self._manager).add_sequence(self._manager, *arguments, **options)
        self._arrivals[sequence] = self._clock()
        return sequence

    def _free(self, sequence: Sequence, **options: Any) -> None:
        """End a sequence; what it had is read before, and told after, so that a call that raises tells nothing."""
        seen = self._seen(sequence)
        type(self._manager).free(self._manager, sequence, **options)
        self._arrivals.pop(sequence, None)
        if seen is not None:
            self._ended(seen)

    def _end(self, sequence: Sequence) -> None:
        seen = self._seen(sequence)
        self._arrivals.pop(sequence, None)
        if seen is not None:
            self._ended(seen)

    def _seen(self, sequence: Sequence) -> Seen | None:
        arrival_s = self._arrivals.get(sequence)
        if arrival_s is None or not (sequence.is_live or sequence.is_suspended):
            return None
        tokens = np.frombuffer(_packed(sequence), np.int32) & np.int32(MAX_TOKEN)
        return Seen(tokens, min(sequence.num_prompt_tokens, len(tokens)), arrival_s, sequence.namespace)


class EngineWatch:
    """Calls `ended` with each request of a `kvist.serve.Engine` that ends while this is attached.

    Arrivals are when requests were submitted, and outputs have the last token, too, which never gets into the cache.
    """

    def __init__(self, engine: Any, ended: Callable[[Seen], None], clock: Callable[[], float]) -> None:
        if any(name in vars(engine) for name in ENGINE_CALLS):
            raise SequenceError("the engine is watched already; close that first")
        self._engine, self._ended, self._clock = engine, ended, clock
        self._arrivals: dict[Any, float] = {}
        own = vars(engine)
        own["submit"], own["step"], own["abort"] = self._submit, self._step, self._abort

    def close(self) -> None:
        """Tell of what still runs, and let go of the engine; a second time does nothing."""
        for name in ENGINE_CALLS:
            vars(self._engine).pop(name, None)
        self._tell(list(self._arrivals))

    def _submit(self, *arguments: Any, **options: Any) -> Any:
        arrival_s = self._clock()
        generation = type(self._engine).submit(self._engine, *arguments, **options)
        self._arrivals[generation] = arrival_s
        return generation

    def _step(self) -> Any:
        events = type(self._engine).step(self._engine)
        self._tell([event.generation for event in events if event.finish_reason is not None])
        return events

    def _abort(self, generation: Any) -> None:
        type(self._engine).abort(self._engine, generation)
        self._tell([generation])

    def _tell(self, generations: list[Any]) -> None:
        for generation in generations:
            arrival_s = self._arrivals.pop(generation, None)
            if arrival_s is not None:
                request = generation._request
                tokens = np.array(request.tokens, np.int32)
                self._ended(Seen(tokens, request.num_prompt_tokens, arrival_s, request.namespace))


def _packed(sequence: Sequence) -> bytes:
    """Return the packed tokens of a sequence that runs or is suspended, with media as what they are known by."""
    if sequence._suspended is not None:
        return sequence._suspended.tokens
    if sequence.leader is not None:
        return _packed(sequence.leader)[: 4 * sequence.num_tokens]
    return sequence._rows.packed_tokens(sequence)
