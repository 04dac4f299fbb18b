"""A second manager that is told whatever a first one is, and must come to the same at each step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvist.config import CacheConfig
from kvist.errors import ArgumentError
from kvist.journal.recording import made_by
from kvist.journal.replaying import Call, Repeater
from kvist.journal.taps import taps_of
from kvist.journal.values import Names, Values
from kvist.manager import KVCacheManager

__all__ = ["Twin"]


class Twin:
    """Makes every call of a manager again, of another one, as the rank beside it would; they must not part ways.

    It begins with a manager on which nothing runs, which forgets what is cached. Every `every_n_calls` calls the
    digests of both are compared. What the first took from its clock, its memory and its stores, the other is given.
    `config` is that of the other, where it is to be another. A call that does something else raises
    `kvist.journal.ReplayError`, out of the very call of the first manager.

    >>> from kvist import AttentionSpec, CacheConfig, KVCacheManager
    >>> manager = KVCacheManager(CacheConfig([AttentionSpec(1, 1)], block_size=2, num_blocks=8))
    >>> with Twin(manager) as twin:
    ...     first = manager.add_sequence([1, 2, 3])
    ...     manager.commit([first])
    >>> twin.manager.digest() == manager.digest(), twin.num_calls
    (True, 4)
    """

    def __init__(self, manager: KVCacheManager, *, config: CacheConfig | None = None, every_n_calls: int = 1) -> None:
        if type(every_n_calls) is not int or every_n_calls < 1:
            raise ArgumentError(f"every_n_calls is {every_n_calls!r}, must be an int above 0")
        self._leader, self._every = manager, every_n_calls
        self._again = Repeater(replace(config or manager.config), has_memory=manager.memory is not None)
        self._values = Values(Names())
        self._begun: tuple[str, list[Any], dict[str, Any]] = ("", [], {})
        self._outcome: dict[str, Any] = {}
        self._is_comparing = False
        self.num_calls = 0
        taps_of(manager).add(self)

    @property
    def manager(self) -> KVCacheManager:
        """The other manager."""
        return self._again.manager

    def close(self) -> None:
        """Follow no more; the first manager is as it was before."""
        if self in (taps := taps_of(self._leader)).listeners:
            taps.remove(self)

    def __enter__(self) -> Twin:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- what the taps tell -------------------------------------------------------------------------------------------

    def begin(self, call: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Write a call down."""
        write = self._values.write
        self._begun = call, list(map(write, arguments)), {name: write(value) for name, value in options.items()}
        self._outcome = {}

    def note(self, what: str, value: Any) -> None:
        """Keep what the call took from elsewhere."""
        self._outcome.setdefault(what, []).append(value)

    def end(self, call: str, result: Any, error: BaseException | None) -> None:
        """Make the call again."""
        for made in made_by(result):
            self._values.names.add(made)
        if error is not None:
            self._outcome["raised"] = type(error).__name__
        elif call == "digest":
            self._outcome["digest"] = result
        self.num_calls += 1
        self._again.make(Call(self.num_calls, *self._begun, self._outcome))

    def rest(self) -> None:
        """Compare the digests, where it is due."""
        if self._is_comparing or self.num_calls % self._every:
            return
        self._is_comparing = True
        try:
            self._leader.digest()
        finally:
            self._is_comparing = False
