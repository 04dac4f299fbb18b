"""The suite that every form of events passes, those of this library and your own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from random import Random
from typing import ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from kvist.config import AttentionSpec, CacheConfig, LayerSpec, StateSpec
from kvist.core.contents import Contents
from kvist.core.events import Event
from kvist.errors import WireError
from kvist.manager import KVCacheManager
from kvist.testing.configs import cache_configs
from kvist.testing.machine import CacheMachine
from kvist.testing.stage import require
from kvist.tier_config import HostTier
from kvist.wire.index import PrefixIndex
from kvist.wire.naming import RunNames
from kvist.wire.records import TIERS, Hash, Record

__all__ = ["EventCodecSuite"]

Held = dict[tuple[int, str], set[Hash]]
"""The names of blocks by group and tier."""


class EventCodecSuite:
    """What a router relies on in any form of events. Inherit it, say how yours is written and read.

        class TestMine(EventCodecSuite):
            def encoder(self):
                return Encoder("mine", Recorder(self.names()))

            def decode(self, message):
                return mine.decode(message)

    `num_examples` histories of a cache that is too small, of `num_steps` calls each, are told in it, step by step.
    """

    num_examples: ClassVar[int] = 30
    num_steps: ClassVar[int] = 50
    short_names: ClassVar[bool] = True
    """Whether blocks are named by the last 8 bytes of Kvist's digests, else by all of them."""
    tells_groups: ClassVar[bool] = True
    """Whether it says which group has a block; else it says what any group has."""
    tells_all_tiers: ClassVar[bool] = True
    """Whether it says each tier that has a block; else the fastest."""

    def encoder(self) -> Callable[[Iterable[Event]], bytes]:
        """Return what makes messages of the events of one log, in order."""
        raise NotImplementedError

    def decode(self, message: bytes) -> list[Record]:
        """Return the records of a message; raise WireError for what is none."""
        raise NotImplementedError

    def names(self) -> RunNames:
        """Return what blocks are called."""
        return RunNames(short=self.short_names)

    def told(self, cached: Contents) -> Held:
        """Return what of a cache the form can say."""
        held: Held = {}
        for places in cached.blocks.values():
            for (tier, group), digests in places.items():
                names: Iterable[Hash] = (
                    (int.from_bytes(each[-8:], "big") for each in digests) if self.short_names else digests
                )
                held.setdefault((group if self.tells_groups else 0, tier), set()).update(names)
        if not self.tells_all_tiers:
            held = _fastest(held)
        return {place: names for place, names in held.items() if names}

    # -- the tests ----------------------------------------------------------------------------------------------------

    def test_messages_tell_what_is_cached_whatever_is_done(self) -> None:
        """An index that has only what was decoded has what is cached, after each step, by group and tier."""
        machine = type("CodecMachine", (CodecMachine,), {"suite": self, "__doc__": CodecMachine.__doc__})
        chosen = settings(
            max_examples=self.num_examples,
            stateful_step_count=self.num_steps,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        run_state_machine_as_test(machine, settings=chosen)

    def test_no_events_are_no_records(self) -> None:
        """What has nothing to say can be sent, or is nothing at all."""
        message = self.encoder()([])
        assert not message or self.decode(message) == []

    def test_what_was_written_in_parts_is_what_was_written_at_once(self) -> None:
        """How many events are in a message makes no difference to an index."""
        events, cached = _history()
        for size in (1, 3, len(events)):
            index, encode = PrefixIndex(), self.encoder()
            for at in range(0, len(events), size):
                assert index.apply("a worker", self.decode(encode(events[at : at + size]))) is None
            assert _held(index) == self.told(cached)

    def test_what_is_damaged_is_refused_or_read_but_nothing_else_happens(self) -> None:
        """A message cut off, with bits turned, or of something else: WireError, or records."""
        chance, message = Random(1), self.encoder()(_history()[0])
        damaged = [message[:end] for end in range(0, len(message), max(len(message) // 200, 1))]
        damaged += [_turned(message, chance) for _ in range(500)]
        damaged += [chance.randbytes(chance.randrange(40)) for _ in range(200)]
        for each in damaged:
            try:
                records = self.decode(each)
            except WireError:
                continue
            PrefixIndex().apply("a worker", records)


class CodecMachine(CacheMachine):
    """Tells an index what is done to a cache, in a form of events, and compares after each step."""

    configs: ClassVar[st.SearchStrategy[CacheConfig]] = st.one_of(
        cache_configs(host=st.booleans()),
        cache_configs(block_sizes=(1, 2), kinds=("sliding", "full", "state", "chunked"), host=st.booleans()),
        cache_configs(block_sizes=(1,), kinds=("sliding",), host=st.booleans()),
    ).map(lambda config: replace(config, event_buffer=1 << 20))
    suite: ClassVar[EventCodecSuite]

    def __init__(self) -> None:
        super().__init__()
        self.message_of = self.suite.encoder()
        self.index = PrefixIndex()

    def events_told(self, events: list[Event], cached: Contents) -> None:
        """Send events through the codec, and compare what the index has then with what is cached."""
        records = self.suite.decode(self.message_of(events)) if events else []
        gap = self.index.apply("a worker", records)
        require(gap is None, f"{gap} among {records}")
        held, told = _held(self.index), self.suite.told(cached)
        require(held == told, f"told was {held}, cached is {told}")


def _held(index: PrefixIndex) -> Held:
    """Return what an index has of its one worker."""
    found: Held = {}
    for worker, rank in index.workers:
        found |= index.blocks(worker, rank=rank)
    return found


def _fastest(held: Held) -> Held:
    """Return the blocks of each group in the fastest tier that has them."""
    return {
        (group, tier): names - _faster(held, group, TIERS[: TIERS.index(tier)]) for (group, tier), names in held.items()
    }


def _faster(held: Held, group: int, tiers: Collection[str]) -> set[Hash]:
    return set().union(*(held.get((group, tier), set()) for tier in tiers))


def _turned(message: bytes, chance: Random) -> bytes:
    """Return a message in which one to three bytes are others."""
    changed = bytearray(message)
    for _ in range(chance.randrange(1, 4)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def _history() -> tuple[list[Event], Contents]:
    """Return the events of a cache with a window, states and host memory, and what is cached in the end."""
    layers: list[LayerSpec] = [
        AttentionSpec(1, 8),
        AttentionSpec(1, 8, sliding_window=6, sink_tokens=1),
        StateSpec([(16,)], "uint8", 4),
    ]
    config = CacheConfig(layers, 2, num_blocks=[24, 20, 12], tiers=[HostTier(num_blocks=8)], event_buffer=1000)
    manager, chance = KVCacheManager(config), Random(2)
    for _ in range(25):
        sequence = manager.add_sequence([chance.randrange(3) for _ in range(chance.randrange(1, 30))])
        while num_tokens := manager.chunk_limit(sequence, sequence.num_tokens - sequence.num_computed_tokens):
            manager.commit([sequence], sequence.num_computed_tokens + num_tokens)
        manager.free(sequence)
    events = manager.events.poll()
    contents = Contents()
    contents.fold(events)
    return events, contents
