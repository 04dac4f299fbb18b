"""Follows the events of a manager as an index outside would, and proves that they tell what is cached."""

from __future__ import annotations

from kvist.core.contents import Contents
from kvist.core.events import Cleared, Event, Moved, Removed, Stored, Updated
from kvist.manager import KVCacheManager

__all__ = ["EventReplay", "WrongEvents"]

OfBlocks = Stored | Removed | Moved | Updated


class WrongEvents(AssertionError):
    """Events are missing, contradict each other, or tell something else than what is cached."""


class EventReplay:
    """What one has who follows the events of a manager from now on; `check` proves it right, as often as you like.

    Nothing is missing between two events; what is stored comes after a block that is known, unless it is of a window or
    state, whose past may be gone; tokens and digests are of the same blocks; only what is there is removed or moved;
    and what all events come to is what is cached, by tier and group. Needs a manager with an `event_buffer` that holds
    what happens between two checks.

    >>> from kvist import AttentionSpec, CacheConfig, KVCacheManager
    >>> manager = KVCacheManager(CacheConfig([AttentionSpec(1, 1)], block_size=2, num_blocks=8, event_buffer=100))
    >>> replay = EventReplay(manager)
    >>> sequence = manager.add_sequence([1, 2, 3, 4, 5])
    >>> manager.commit([sequence])
    >>> replay.check()
    >>> replay.contents.num_blocks("device")
    2
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._block_size = manager.config.block_size
        self._reader = manager.events.subscribe()
        self.contents = Contents.of_snapshot(manager.events.snapshot())
        self.num_events = 0

    def check(self) -> None:
        """Take in what has happened, and compare; raises WrongEvents, which says what is wrong."""
        self._manager.events.flush()
        for event in self._reader.poll():
            self._take(event)
        if self.contents.digest() != self._manager.events.content_digest():
            raise WrongEvents(f"after {self.num_events} events, they tell {self._told()}, and something else is cached")

    def close(self) -> None:
        """Follow no more."""
        self._reader.close()

    def _take(self, event: Event) -> None:
        self.num_events += 1
        if isinstance(event, Stored | Removed | Moved):
            self._check_known(event)
        if isinstance(event, Stored):
            self._check_tokens(event)
        if isinstance(event, Cleared) and self.contents.epoch != event.epoch:
            raise WrongEvents(f"event {event.id} is of another epoch")
        if not self.contents.follow([event]):
            raise WrongEvents(f"event {event.id} does not follow: {self.contents.next_id} was to come")

    def _check_known(self, event: OfBlocks) -> None:
        places = self.contents.blocks.get(event.namespace, {})
        known = set().union(*(digests for (_, group), digests in places.items() if group == event.group))
        parent, is_whole = event.parent, self._manager.config.groups[event.group].kind == "full"
        if isinstance(event, Stored) and is_whole and parent is not None and parent not in known:
            raise WrongEvents(f"event {event.id} stores blocks after {parent.hex()[:12]}, which nobody was told of")
        tier = event.source_tier if isinstance(event, Moved) else event.tier
        named = event.digests
        columns = getattr(event, "columns", None)
        named = named if columns is None else [named[column] for column in columns]
        if not isinstance(event, Stored) and not places.get((tier, event.group), set()).issuperset(named):
            raise WrongEvents(f"event {event.id} takes blocks from {tier} that are not there: {event!r}")

    def _check_tokens(self, event: Stored) -> None:
        num_tokens, num_blocks = len(event.tokens), len(event.digests)
        if num_tokens != num_blocks * self._block_size or num_blocks != event.num_blocks:
            raise WrongEvents(f"event {event.id} has {num_tokens} tokens and {num_blocks} digests")

    def _told(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for places in self.contents.blocks.values():
            for (tier, group), digests in places.items():
                counts[f"{tier} {group}"] = counts.get(f"{tier} {group}", 0) + len(digests)
        return counts
