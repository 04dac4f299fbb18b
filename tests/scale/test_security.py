"""A tenant learns nothing of what another's prompts hold; files are their owner's alone; peers are bounded."""

import os
import re
import stat
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist import (
    AttentionSpec,
    CacheConfig,
    ConfigError,
    DiskTier,
    HostTier,
    KVCacheManager,
    RemoteTier,
    Retention,
    StateSpec,
)
from kvist.journal import Journal
from kvist.testing import TokenMemory
from kvist.tiers.simulated import SimulatedStore
from kvist.wire.files import FilePublisher

FULL = AttentionSpec(1, 1)
A, B = ("tenant a", b"salt of a"), ("tenant b", b"salt of b")
PROMPTS = (
    [1, 2, 3, 4, 5, 6, 7],
    [1, 2, 3, 4, 5, 9],
    [1, 2, 3, 8],
    [1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13],
    [1],
    [2, 2, 2, 2, 2],
)
ACTS = ("serve", "admit", "end", "look", "suspend", "evict", "drop")
SETTINGS = {
    "plain": {},
    "whole blocks": {"partial_reuse": False},
    "windows": {"layers": [FULL, AttentionSpec(1, 1, sliding_window=4)]},
    "ring": {"layers": [FULL, AttentionSpec(1, 1, sliding_window=6)], "ring": True},
    "states": {"layers": [FULL, StateSpec([(1,)])]},
    "host memory": {"tiers": [HostTier(num_blocks=400)]},
    "through to a store": {"tiers": [RemoteTier(f"{__name__}:shared")]},
    "back to host memory and a store": {
        "tiers": [HostTier(num_blocks=400), RemoteTier(f"{__name__}:shared", write="back")]
    },
}
STORES = []


def shared(format, timeout_s):
    """The store that a manager is given: a test finds it in `STORES`."""
    STORES.append(SimulatedStore(format))
    return STORES[-1]


class Tenants:
    """A manager with two tenants. `told` is all that tenant B is shown; A may do the same things in between.

    Its clock is that of B's acts, so that times since can be compared. The pool is so large that nobody is short.
    """

    def __init__(self, **settings):
        settings = {"layers": [FULL], "model": "a model@1", "event_buffer": 1 << 16} | settings
        config = CacheConfig(
            block_size=2,
            num_blocks=400,
            max_sequences=100,
            max_sequence_length=64,
            private_namespaces=True,
            **settings,
        )
        self.now, self.told, self.running, self.suspended = 0.0, [], {A: [], B: []}, {A: [], B: []}
        self.memory = TokenMemory(config)
        self.manager = self.memory.attach(KVCacheManager(config, self.memory, clock=lambda: self.now))

    def act(self, tenant, act, prompt):
        """Let a tenant do something with one of the prompts."""
        self.now += tenant is B
        assert self.manager.flush()  # so that what a store has does not depend on its threads
        shown = getattr(self, act)(tenant, PROMPTS[prompt])
        if tenant is B:
            self.told.append((act, shown))

    def serve(self, tenant, tokens):
        sequence = self.admit(tenant, tokens)
        return sequence, self.end(tenant, tokens)

    def admit(self, tenant, tokens):
        sequence = self.manager.add_sequence(tokens, namespace=tenant, retention=Retention([(0, None, 50, None)]))
        self.running[tenant].append(sequence)
        return self.seen(sequence)

    def end(self, tenant, tokens):
        if not self.running[tenant]:
            return None
        sequence = self.running[tenant].pop()
        self.compute(sequence)
        self.manager.append([sequence], [tokens[-1]])
        shown = self.seen(sequence), self.parts(self.manager.explain(sequence))
        self.manager.free(sequence)
        return shown

    def look(self, tenant, tokens):
        match = self.manager.match_prefix([*tokens, 99], namespace=tenant)
        return match, match.tokens, self.parts(self.manager.explain([*tokens, 99], namespace=tenant))

    def suspend(self, tenant, tokens):
        if self.suspended[tenant]:
            sequence = self.suspended[tenant].pop()
            self.manager.resume(sequence)
            self.running[tenant].append(sequence)
        elif self.running[tenant]:
            sequence = self.running[tenant].pop()
            self.manager.suspend(sequence)
            self.suspended[tenant].append(sequence)
            return None
        else:
            return None
        return self.seen(sequence)

    def evict(self, tenant, tokens):
        """Take from the device all that nobody uses: whoever runs the cache does so between the same acts of B."""
        if tenant is B:
            self.manager.evict(400)

    def drop(self, tenant, tokens):
        self.manager.drop(namespace=tenant)

    def compute(self, sequence):
        while sequence.num_computed_tokens < sequence.num_tokens:
            n = self.manager.chunk_limit(sequence, sequence.num_tokens - sequence.num_computed_tokens)
            end = sequence.num_computed_tokens + n
            self.memory.write(sequence, stop=end)
            self.manager.commit([sequence], end)

    @staticmethod
    def seen(sequence):
        """What of a sequence a tenant may be shown: not the row and blocks, which say how busy others are."""
        return sequence.num_cached_tokens, sequence.num_computed_tokens, sequence.num_tokens, sequence.miss

    @staticmethod
    def parts(explanation):
        return [str(part) for part in explanation.parts], re.sub(r"row \d+", "row", explanation.reason)

    def close(self):
        """End all, and return what B was shown, its events, and what stores have under its keys."""
        for tenant in (A, B):
            for sequence in [*self.running[tenant], *self.suspended[tenant]]:
                self.manager.free(sequence)
        self.manager.check()
        events = [told_of(event) for event in self.manager.events.poll() if getattr(event, "namespace", None) == B]
        chain = self.manager._state.chain
        self.manager.flush()
        contents = self.contents(chain.tag(B))
        self.manager.close()
        return self.told, events, contents, chain.root(B)

    def contents(self, tag):
        if not self.manager.config.stores:
            return None
        return sorted(key for key in STORES[-1]._entries if key.startswith(tag))


def told_of(event):
    """All that an event says but its number, which counts the events of others, too."""
    shown = [type(event).__name__, *(getattr(event, name, None) for name in ("digests", "parent", "start"))]
    names = {field.name for field in fields(event)} - {"id", "epoch", "run", "first", "end"}
    shown += [(name, getattr(event, name)) for name in sorted(names)]
    return [*shown, getattr(event, "tokens", np.zeros(0)).tolist()]


def shown_to_b(acts, settings):
    tenants = Tenants(**SETTINGS[settings])
    for tenant, act, prompt in acts:
        tenants.act(tenant, act, prompt)
    return tenants.close()


@pytest.mark.parametrize("settings", SETTINGS)
@given(
    acts=st.lists(
        st.tuples(st.sampled_from([A, B]), st.sampled_from(ACTS), st.integers(0, len(PROMPTS) - 1)), max_size=24
    )
)
def test_whatever_another_tenant_does_a_tenant_is_shown_the_same(settings, acts):
    alone = [each for each in acts if each[0] is B]
    assert shown_to_b(acts, settings) == shown_to_b(alone, settings)


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def open_umask():
    """A process whose files everybody could read and write, if they were not made otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


def rights(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("open_umask")
def test_a_journal_is_its_owners_alone_for_it_has_the_prompts(tmp_path):
    manager = KVCacheManager(CacheConfig([FULL], block_size=2, num_blocks=4))
    with Journal(tmp_path / "calls.jsonl").attach(manager):
        manager.add_sequence([1, 2, 3])
    assert rights(tmp_path / "calls.jsonl") == 0o600


@pytest.mark.usefixtures("open_umask")
def test_a_file_of_events_is_its_owners_alone_also_once_it_is_rotated(tmp_path):
    with FilePublisher(tmp_path / "events.jsonl", rotate_bytes=10) as publisher:
        for _ in range(3):
            publisher.publish(b'{"tokens": [1, 2, 3]}')
    found = sorted(tmp_path.iterdir())
    assert [path.name for path in found] == ["events.jsonl", "events.jsonl.1", "events.jsonl.2"]
    assert {rights(path) for path in found} == {0o600}


@pytest.mark.usefixtures("open_umask")
def test_a_file_of_events_that_was_prepared_keeps_the_rights_that_it_was_given(tmp_path):
    (tmp_path / "events.jsonl").touch(0o640)
    with FilePublisher(tmp_path / "events.jsonl") as publisher:
        publisher.publish(b"{}")
    assert rights(tmp_path / "events.jsonl") == 0o640


@pytest.mark.usefixtures("open_umask")
def test_all_of_a_disk_tier_is_its_owners_alone(tmp_path):
    config = CacheConfig(
        [FULL], 2, 8, max_sequence_length=16, model="a@1", tiers=[DiskTier(directory=tmp_path / "store")]
    )
    memory = TokenMemory(config)
    with KVCacheManager(config, memory) as manager:
        sequence = manager.add_sequence([1, 2, 3, 4, 5])
        memory.write(sequence)
        manager.commit([sequence])
        assert manager.flush()
    assert rights(tmp_path / "store") == 0o700
    assert {rights(path) for path in (tmp_path / "store").iterdir()} == {0o600}


@pytest.mark.parametrize("what", ["file", "pipe", "missing device"])
def test_what_is_no_directory_is_refused_as_a_disk_tier(tmp_path, what):
    place = tmp_path / "place"
    if what == "file":
        place.write_text("mine")
    elif what == "pipe":
        os.mkfifo(place)
    else:
        place = place.parent / "/dev/null"
    config = CacheConfig([FULL], 2, 8, max_sequence_length=16, model="a@1", tiers=[DiskTier(directory=place)])
    with pytest.raises(ConfigError, match="cannot be a store's directory"):
        KVCacheManager(config, TokenMemory(config))
    assert what != "file" or place.read_text() == "mine"


def test_a_directory_of_other_things_is_refused_whatever_way_it_is_named(tmp_path):
    (tmp_path / "home" / "deep").mkdir(parents=True)
    (tmp_path / "home" / "letter").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "home")
    for place in (tmp_path / "home" / "deep" / "..", tmp_path / "link"):
        config = CacheConfig([FULL], 2, 8, max_sequence_length=16, model="a@1", tiers=[DiskTier(directory=place)])
        with pytest.raises(ConfigError, match="neither empty nor a store"):
            KVCacheManager(config, TokenMemory(config))
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == ["deep", "letter"]
