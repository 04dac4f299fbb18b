"""The suite that every eviction policy passes, by name or of your own, and a count of hits to compare them by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import Any, ClassVar

import numpy as np

from kvist.config import AttentionSpec, CacheConfig
from kvist.core.eviction import Candidates, Policy
from kvist.core.extents import Extent
from kvist.core.policies import queue_of
from kvist.manager import KVCacheManager

__all__ = ["Life", "PolicySuite", "num_hit_tokens"]

BLOCK_SIZE = 2
NUM_CONTENTS = 60
MAX_BLOCKS = 4


def num_hit_tokens(policy: str | Policy, prompts: Iterable[Sequence[int]], *, num_blocks: int, block_size: int) -> int:
    """Return how many tokens are reused when prompts are admitted, computed and freed one after the other.

    Only whole blocks are reused, and of each prompt at most all but its last token.

    >>> num_hit_tokens("lru", [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], num_blocks=8, block_size=2)
    4
    """
    manager = _manager(policy, num_blocks, block_size)
    for prompt in prompts:
        _compute(manager, prompt)
    return manager.stats().num_hit_tokens


def _manager(policy: str | Policy, num_blocks: int, block_size: int) -> KVCacheManager:
    settings = CacheConfig(
        [AttentionSpec(1, 1)],
        block_size,
        num_blocks,
        max_sequences=4,
        max_sequence_length=num_blocks * block_size,
        partial_reuse=False,
        policy=policy,
    )
    return KVCacheManager(settings)


def _compute(manager: KVCacheManager, prompt: Sequence[int]) -> None:
    sequence = manager.add_sequence(prompt)
    manager.commit([sequence])
    manager.free(sequence)


class Life:
    """A queue and the extents in and around it, to which all happens that a tree does to them.

    What happens is drawn from `seed`: equal seeds give equal lives, as long as the queue gives the same victims. All
    extents hang below one root; `waiting` are those that must be candidates, `used` those that somebody holds, and
    `evicted` has (content, blocks that went) of each victim in turn.
    """

    def __init__(self, queue: Candidates, seed: int = 0) -> None:
        self.queue = queue
        self.waiting: list[Extent] = []
        self.used: list[Extent] = []
        self.evicted: list[tuple[int, int]] = []
        self._chance = Random(seed)
        self._root = Extent(None, None, b"", np.empty((1, 0), np.int32), 0)
        self._tick = 0

    @property
    def num_waiting_blocks(self) -> int:
        """Blocks that could be evicted."""
        return sum(extent.num_blocks for extent in self.waiting)

    def step(self) -> None:
        """Let something happen that can."""
        self._tick += 1
        acts = [self.publish]
        if self.used:
            acts += [self.release, self.release, self.vanish]
        if self.waiting:
            acts += [self.use, self.use, self.hold, self.split, self.evict]
        self._chance.choice(acts)()

    def publish(self) -> None:
        """Let content come into the tree, often such as was there before; somebody still uses it."""
        content = self._chance.randrange(NUM_CONTENTS)
        if any(_content(extent) == content for extent in self.waiting + self.used):
            return
        num_blocks = 1 + content % MAX_BLOCKS
        tokens = np.full(num_blocks * BLOCK_SIZE, content, np.int32).tobytes()
        blocks = np.zeros((1, num_blocks), np.int32)
        extent = Extent(self._root, tokens[: len(tokens) // num_blocks], tokens, blocks, self._tick)
        self.used.append(extent)

    def use(self) -> None:
        """Let a candidate be hit; it is in use from now on."""
        extent = self._pick(self.waiting)
        extent.hits += 1
        self._withdraw(extent)

    def hold(self) -> None:
        """Let somebody hold a candidate without a hit."""
        self._withdraw(self._pick(self.waiting))

    def _withdraw(self, extent: Extent) -> None:
        self.queue.withdraw(extent)
        self.used.append(extent)

    def release(self) -> None:
        """Let an extent not be in use any more."""
        extent = self._pick(self.used)
        extent.last_use = self._tick
        self.queue.offer(extent)
        self.waiting.append(extent)

    def vanish(self) -> None:
        """Let an extent leave the tree while it is in use, as when its namespace is dropped."""
        self._pick(self.used).parent = None

    def split(self) -> None:
        """Let a candidate lose its leading blocks to an extent of their own, which is in use."""
        extent = self._chance.choice(self.waiting)
        num_blocks = extent.num_blocks // 2
        if not num_blocks:
            return
        at = num_blocks * len(extent.tokens) // extent.num_blocks
        upper = Extent(self._root, extent.key, extent.tokens[:at], extent.blocks[:, :num_blocks], extent.created)
        upper.hits, upper.last_use = extent.hits, extent.last_use
        extent.parent, extent.key, extent.start = upper, bytes(extent.tokens[:at]), num_blocks
        extent.tokens, extent.blocks = extent.tokens[at:], extent.blocks[:, num_blocks:]

    def evict(self) -> None:
        """Evict the first candidate, or half of its blocks, from the tail."""
        extent = self.queue.first()
        num_blocks = extent.num_blocks
        kept = self._chance.choice((0, num_blocks // 2))
        self.evicted.append((_content(extent), num_blocks - kept))
        if kept:
            extent.tokens = extent.tokens[: kept * len(extent.tokens) // num_blocks]
            extent.blocks = extent.blocks[:, :kept]
            return
        self.queue.withdraw_first()
        self.waiting.remove(extent)
        extent.parent = None

    def evict_all(self) -> None:
        """Evict until no candidate is left."""
        while self.waiting:
            self.evict()

    def _pick(self, extents: list[Extent]) -> Extent:
        return extents.pop(self._chance.randrange(len(extents)))


def _content(extent: Extent) -> int:
    return int.from_bytes(extent.tokens[:4], "little")


class PolicySuite:
    """What the tree and its users rely on in any policy. Inherit it, and pytest proves yours.

        class TestLongestFirst(PolicySuite):
            policy = staticmethod(lambda extent: -extent.num_blocks)

    `policy` is what `CacheConfig(policy=...)` takes: a name, or a callable that gives an extent its sort key.
    """

    policy: ClassVar[Any] = "lru"

    def live(self, seed: int = 0, num_steps: int = 0) -> Life:
        """Return a life under the policy after so many steps."""
        life = Life(queue_of(self.policy), seed)
        for _ in range(num_steps):
            life.step()
        return life

    def test_the_candidates_are_those_that_were_offered_and_not_withdrawn(self) -> None:
        """Whatever happens, the queue holds these and no others."""
        life = self.live()
        for _ in range(2000):
            life.step()
            candidates = life.queue.candidates()
            assert life.queue.num_candidates == len(candidates) == len(life.waiting)
            assert set(candidates) == set(life.waiting)
            assert all(extent.ticket for extent in life.waiting)
            assert not any(extent.ticket for extent in life.used)

    def test_a_victim_is_a_candidate_and_stays_the_same_until_something_happens(self) -> None:
        """Asking what goes first does not change what goes first."""
        life = self.live()
        for _ in range(2000):
            life.step()
            if life.waiting:
                victim = life.queue.first()
                assert victim in life.waiting
                assert life.queue.first() is victim
                assert life.queue.num_candidates == len(life.waiting)

    def test_all_candidates_go_in_the_end_each_once(self) -> None:
        """Evicting as long as there are candidates evicts all of their blocks."""
        for seed in range(20):
            life = self.live(seed, 200)
            num_blocks, num_before = life.num_waiting_blocks, len(life.evicted)
            life.evict_all()
            assert sum(gone for _, gone in life.evicted[num_before:]) == num_blocks
            assert life.queue.num_candidates == 0
            assert life.queue.candidates() == []

    def test_equal_histories_evict_equally(self) -> None:
        """Nothing but what happened decides the order: no clock, no chance, no address in memory."""
        lives = [self.live(seed, 1000) for seed in (3, 3)]
        assert lives[0].evicted == lives[1].evicted != []

    def test_what_was_withdrawn_does_not_go_until_it_is_offered_again(self) -> None:
        """The first candidate, once withdrawn, outlives all others."""
        life = self.live(1, 300)
        while len(life.waiting) < 5:
            life.step()
        first = life.queue.first()
        life.queue.withdraw(first)
        life.waiting.remove(first)
        others = set(life.waiting)
        while life.queue.num_candidates:
            others.remove(life.queue.first())
            life.queue.withdraw_first()
        assert others == set()
        life.queue.offer(first)
        assert life.queue.first() is first

    def test_memory_is_bounded_by_what_is_cached_at_one_time(self) -> None:
        """What is kept of extents that are gone does not pile up."""
        life, most = self.live(), 0
        for _ in range(30_000):
            life.step()
            most = max(most, sum(extent.num_blocks for extent in life.waiting + life.used))
        assert life.queue.num_entries <= 8 * most + 512

    def test_a_manager_stays_whole_and_its_twin_equal(self) -> None:
        """A manager whose pool is too small for its prompts keeps its invariants, and another one goes the same way."""
        managers = [_manager(self.policy, num_blocks=12, block_size=BLOCK_SIZE) for _ in range(2)]
        chance = Random(0)
        for _ in range(300):
            prompt = [chance.randrange(3) for _ in range(chance.randrange(1, 20))]
            for manager in managers:
                _compute(manager, prompt)
                manager.check()
            assert managers[0].digest() == managers[1].digest()
        assert managers[0].stats().num_evicted_blocks > 0
        cached = managers[0].stats().num_evictable_blocks
        assert managers[0].evict(12) == cached > 0
        assert managers[0].stats().num_evictable_blocks == 0
