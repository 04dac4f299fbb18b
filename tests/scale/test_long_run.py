"""Eight simulated hours of mixed traffic: nothing grows but the cache, no count drifts, hits are what was predicted."""

import dataclasses
import gc
import heapq
import sys
from collections import Counter, deque
from random import Random
from types import FunctionType, ModuleType

import numpy as np
import pytest

from kvist import AttentionSpec, CacheConfig, HostTier, KVCacheManager, Media, OutOfBlocks, Retention
from kvist.core.contents import Contents

HOUR_S = 3600.0
FULL, WINDOW = AttentionSpec(1, 1), AttentionSpec(1, 1, sliding_window=24)
ACTS = {"retained": 2, "pinned": 1, "suspended": 1, "forked": 1, "dropped": 0.3, "shown": 1, "rewound": 1, "plain": 6}


class Service:
    """A manager and its traffic, in simulated time: a request every few seconds, each of which runs for a while.

    Documents are shared and come and go; each tenth request is of a tenant, and shows a picture, that never come back.
    """

    def __init__(self, seed=7):
        config = CacheConfig(
            [FULL, WINDOW],
            block_size=8,
            num_blocks=300,
            max_sequences=16,
            max_sequence_length=512,
            max_beams=2,
            policy="priority",
            tiers=[HostTier(num_blocks=600)],
            event_buffer=1 << 16,
        )
        self.now = 0.0
        self.manager = KVCacheManager(config, clock=lambda: self.now)
        self.random, self.contents, self.counts = Random(seed), Contents(), Counter()
        self.running, self.suspended, self.pins = [], deque(), deque()
        self.number, self.removed = 0, Counter()

    def run(self, until_s):
        while self.now < until_s:
            self.now += self.random.expovariate(1 / 3)
            while self.running and self.running[0][0] <= self.now:
                self.end(heapq.heappop(self.running)[2])
            while self.pins and self.pins[0][0] <= self.now:
                self.pins.popleft()[1].release()
            self.request()
            self.follow()

    def request(self):
        self.number += 1
        act = self.random.choices(list(ACTS), ACTS.values())[0]
        prompt, namespace, media = self.prompt(), (), ()
        if self.number % 10 == 0:
            namespace, media = ("tenant", self.number), [Media(2, 4, f"picture {self.number}".encode())]
        retention = Retention([(0, 64, 80, 600.0), (64, None, 20, 30.0)]) if act == "retained" else None
        try:
            sequence = self.manager.add_sequence(prompt, namespace=namespace, media=media, retention=retention)
        except OutOfBlocks:
            self.counts["refused"] += 1
            return
        self.counts += Counter(admitted=1, queried=len(prompt), hit=sequence.num_cached_tokens)
        self.manager.commit([sequence])
        self.go_on(act, sequence, prompt, namespace)

    def go_on(self, act, sequence, prompt, namespace):
        ends = [sequence]
        self.counts[act] += act in ("forked", "pinned", "rewound")
        if act == "forked":
            ends += self.tried(lambda: self.manager.fork(sequence), instead=[])
        elif act == "suspended":
            self.manager.suspend(sequence)
            self.suspended.append(sequence)
            self.counts["suspended"] += 1
            ends = []
        elif act == "pinned" and not namespace:
            pins = self.tried(lambda: [self.manager.pin(self.manager.match_prefix(prompt))], instead=[])
            self.pins += [(self.now + 60.0, pin) for pin in pins]
        elif act == "dropped":
            self.manager.drop(namespace=namespace if namespace else ("nobody",))
        elif act == "shown":
            self.manager.explain(prompt, namespace=namespace)
            self.manager.evict(self.random.randrange(4))
        for each in ends:
            self.grow(each, act)
            heapq.heappush(self.running, (self.now + self.random.uniform(1, 20), id(each), each))
        if len(self.suspended) > 4:
            self.resume(self.suspended.popleft())

    def grow(self, sequence, act):
        tokens = np.array([self.random.randrange(1 << 20) for _ in range(self.random.randrange(1, 40))], np.int32)
        self.tried(lambda: self.manager.append([sequence], [tokens]))
        self.manager.commit([sequence])
        if act == "rewound":
            self.tried(lambda: self.manager.rewind(sequence, min(len(tokens), sequence.num_tokens - 1)))
            self.manager.commit([sequence])

    def resume(self, sequence):
        self.tried(lambda: self.manager.resume(sequence))
        if sequence in self.manager._state.suspended:
            self.manager.free(sequence)
            return
        self.counts["resumed"] += 1
        self.manager.commit([sequence])
        heapq.heappush(self.running, (self.now + 5.0, id(sequence), sequence))

    def tried(self, act, instead=None):
        """Do what may be refused for want of room; returns what it gives, or something instead."""
        try:
            return act()
        except OutOfBlocks:
            self.counts["refused"] += 1
            return instead

    def prompt(self):
        """A document of the hour, more often a popular one, and a question."""
        hour, document = int(self.now // HOUR_S), min(int(self.random.expovariate(0.1)), 200)
        words = Random(hour * 1000 + document)
        shared = [words.randrange(1 << 20) for _ in range(words.randrange(16, 200))]
        return np.array(
            shared + [self.random.randrange(1 << 20) for _ in range(self.random.randrange(4, 60))], np.int32
        )

    def end(self, sequence):
        self.manager.free(sequence)

    def follow(self):
        """Take the moves, as an engine does, and fold the events, as an index does."""
        self.manager.take_moves()
        if self.number % 16 == 0:
            assert self.contents.follow(self.manager.events.poll())

    def quiet(self):
        """End all that runs, is suspended or pinned."""
        for _, _, sequence in self.running:
            self.manager.free(sequence)
        for sequence in self.suspended:
            self.manager.free(sequence)
        for _, pin in self.pins:
            pin.release()
        self.running, self.suspended, self.pins = [], deque(), deque()
        self.manager.take_moves()
        assert self.contents.follow(self.manager.events.poll())

    def emptied(self):
        """Forget all content, serve the same few prompts as ever; objects that the collector follows then, and bytes.

        What is remembered of evictions and of media is bounded elsewhere: it is forgotten first.
        """
        manager, state = self.manager, self.manager._state
        manager.drop(namespace=())
        manager.evict(10**6)
        for namespace in list(state.tree.roots):
            manager.drop(namespace=namespace)
        for seed in range(2000):
            prompt = np.random.default_rng(seed).integers(0, 1 << 20, 100, dtype=np.int32)
            sequence = manager.add_sequence(prompt)
            manager.commit([sequence])
            manager.free(sequence)
            manager.take_moves()
        assert self.contents.follow(manager.events.poll())
        state.tree.losses._of_prompts.clear()
        state.identities.sweep([])
        self.counts.update(admitted=2000, queried=200_000)
        gc.collect()
        return len(gc.get_objects()), bytes_held(manager, self.contents)

    def recount(self):
        """Count everything anew, and compare it with what the manager says."""
        manager, counts = self.manager, self.counts
        manager.check()
        stats = manager.stats()
        assert stats.num_held_blocks + stats.num_free_blocks == stats.num_blocks
        assert (stats.num_admitted, stats.num_query_tokens) == (counts["admitted"], counts["queried"])
        assert stats.num_hit_tokens == counts["hit"]
        assert stats.num_hit_tokens + sum(stats.misses.values()) + stats.num_admitted == stats.num_query_tokens
        assert (stats.num_suspended, stats.num_resumed) == (counts["suspended"], counts["resumed"])
        assert self.contents.digest() == manager.events.content_digest()
        extents = list(manager._state.tree.extents())
        for group, pool in enumerate(manager._state.group_pools):
            cut = [extent for extent in extents if extent.num_tokens % 8]  # which events do not tell
            num_told = self.contents.num_blocks("device", group)
            num_cached = num_told + sum(int(extent.blocks[group, -1] >= 0) for extent in cut)
            assert num_cached == pool.num_blocks - pool.num_free
        host = stats.tiers[0]
        assert host.num_demoted_blocks >= host.num_promoted_blocks
        return stats


def bytes_held(*owners):
    """Bytes of all objects that can be reached from some, classes, modules and functions left out."""
    seen, waiting, total = set(), list(owners), 0
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, type | ModuleType | FunctionType):
            continue
        seen.add(id(each))
        total += sys.getsizeof(each)
        waiting += gc.get_referents(each)
    return total


@pytest.mark.slow
def test_eight_hours_of_mixed_traffic_leave_no_more_behind_than_four():
    service, held = Service(), []
    for hour in (1, 2, 3, 4, 5, 6, 7, 8):
        service.run(hour * HOUR_S)
        service.quiet()
        service.recount()
        if hour in (4, 8):
            held.append(service.emptied())
    (num_objects, num_bytes), (num_objects_later, num_bytes_later) = held

    assert service.number > 9000
    assert min(service.counts[each] for each in ("suspended", "resumed", "forked", "pinned", "rewound")) > 100
    assert service.manager.stats().evictions["made room"] > 100_000
    assert num_objects_later <= num_objects + 100
    assert num_bytes_later <= num_bytes + 100_000


@pytest.mark.slow
def test_hits_of_eight_hours_are_those_that_the_lab_predicts():
    """A service of several at once hits within a point of what the lab's replay, and the curve of LRU, say."""
    replay = pytest.importorskip("kvist.lab.replay")
    curves, synthetic = pytest.importorskip("kvist.lab.curves"), pytest.importorskip("kvist.lab.synthetic.workload")
    workload = dataclasses.replace(synthetic.WORKLOADS["mixed"], sessions_per_s=0.1, max_tokens=8000)
    trace = synthetic.SyntheticTrace(workload, 9000, seed=11)
    assert max(request.arrival_s for request in trace) > 8 * HOUR_S
    num_blocks = 6000
    config = replay.ReplayConfig(num_blocks=num_blocks, policy="lru", layers=[FULL], concurrency=4, outputs="none")
    predicted = replay.replay(trace, config)
    manager = KVCacheManager(
        CacheConfig([FULL], 16, num_blocks, max_sequences=4, max_sequence_length=10_000, policy="lru")
    )
    running, num_blocks_asked, num_blocks_hit = deque(), 0, 0
    for request in trace:
        if len(running) == 4:
            manager.free(running.popleft())
        sequence = manager.add_sequence(request.prompt.tokens(), namespace=request.namespace)
        manager.commit([sequence])
        manager.take_moves()
        running.append(sequence)
        num_blocks_asked += sequence.num_prompt_tokens // 16
        num_blocks_hit += sequence.num_cached_tokens // 16
    manager.check()
    assert manager.stats().num_evicted_blocks > num_blocks
    assert manager.stats().token_hit_rate == pytest.approx(predicted.hit_rate_tokens, abs=0.01)
    on_curve = curves.lru_curve(curves.references_of(trace, 16)).at([num_blocks])[0]
    assert num_blocks_hit / num_blocks_asked == pytest.approx(on_curve, abs=0.01)
