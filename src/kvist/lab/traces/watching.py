"""Watches a manager: each sequence that ends is a request, with its tokens, when it came, and what was generated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kvist.core.extents import Namespace
from kvist.core.sequences import Sequence
from kvist.core.tokens import MAX_TOKEN
from kvist.errors import SequenceError
from kvist.manager import KVCacheManager

__all__ = ["Seen", "Watch"]

WATCHED = ("add_sequence", "free")


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that has ended: `tokens` of prompt and output, int32 `[num_prompt_tokens + num_output_tokens]`.

    An image's tokens stand for its identity, in this process. Forks and beams beside the first are not requests.
    """

    tokens: NDArray[np.int32]
    num_prompt_tokens: int
    arrival_s: float
    namespace: Namespace


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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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


def _packed(sequence: Sequence) -> bytes:
    """Return the packed tokens of a sequence that runs or is suspended, with media as what they are known by."""
    if sequence._suspended is not None:
        return sequence._suspended.tokens
    if sequence.leader is not None:
        return _packed(sequence.leader)[: 4 * sequence.num_tokens]
    return sequence._rows.packed_tokens(sequence)
