import numpy as np
import pytest
from tests.core.small import cached, small

from kvist.core import cost
from kvist.core.cost import LINEAR_TOKENS, MAX_MARKS, CostQueue, recompute_cost
from kvist.core.extents import Extent
from kvist.core.policies import POLICIES, queue_of
from kvist.core.segments import Ghosts, S3FifoQueue, SlruQueue, fingerprint
from kvist.testing.policies import PolicySuite, num_hit_tokens

# -- the suite, for each policy ---------------------------------------------------------------------------------------


class TestCost(PolicySuite):
    policy = "cost"


class TestFifo(PolicySuite):
    policy = "fifo"


class TestLfu(PolicySuite):
    policy = "lfu"


class TestLru(PolicySuite):
    policy = "lru"


class TestPriority(PolicySuite):
    policy = "priority"


class TestS3Fifo(PolicySuite):
    policy = "s3fifo"


class TestSlru(PolicySuite):
    policy = "slru"


class TestLongestFirst(PolicySuite):
    policy = staticmethod(lambda extent: (-extent.num_blocks, extent.last_use))


class TestOneThatAlwaysRaises(PolicySuite):
    policy = staticmethod(lambda extent: 1 / 0)


def test_every_policy_with_a_name_has_passed_the_suite():
    passed = {each.policy for each in PolicySuite.__subclasses__() if isinstance(each.policy, str)}
    assert passed == set(POLICIES)


# -- small trees ------------------------------------------------------------------------------------------------------


class Cache:
    """A queue, and extents that hang below one root or each other, used by hand."""

    def __init__(self, queue):
        self.queue = queue
        self.tick = 0
        self.root = Extent(None, None, b"", np.empty((1, 0), np.int32), 0)

    def publish(self, content, num_blocks=1, parent=None):
        """New content, one token a block, already offered."""
        self.tick += 1
        tokens = np.full(num_blocks, content, np.int32).tobytes()
        extent = Extent(parent or self.root, tokens[:4], tokens, np.zeros((1, num_blocks), np.int32), self.tick)
        self.queue.offer(extent)
        return extent

    def hit(self, *extents):
        for extent in extents:
            self.tick += 1
            self.queue.withdraw(extent)
            extent.hits += 1
            extent.last_use = self.tick
            self.queue.offer(extent)

    def evict(self):
        """Evict the first candidate whole; the first token of its content."""
        extent = self.queue.first()
        self.queue.withdraw_first()
        extent.parent = None
        return extent.tokens[0]

    def drained(self):
        order = []
        while self.queue.num_candidates:
            order.append(self.evict())
        return order


def shrink(extent, num_blocks):
    extent.blocks = extent.blocks[:, :num_blocks]
    extent.tokens = extent.tokens[: 4 * num_blocks]


# -- slru -------------------------------------------------------------------------------------------------------------


def test_slru_evicts_what_was_never_hit_before_what_was_even_if_that_is_older():
    cache = Cache(SlruQueue())
    hit, *_ = [cache.publish(content) for content in range(1, 5)]
    cache.hit(hit)
    cache.publish(5)
    assert cache.drained() == [2, 3, 4, 5, 1]


def test_slru_protects_no_more_than_a_third_of_the_candidates_blocks():
    cache = Cache(SlruQueue())
    extents = [cache.publish(content) for content in range(1, 10)]
    cache.hit(*extents)
    cache.queue.first()
    assert cache.queue.main.num_blocks == 3
    assert cache.queue.newcomers.num_blocks == 6
    assert cache.drained() == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_slru_counts_blocks_not_extents():
    cache = Cache(SlruQueue())
    long, *short = [cache.publish(content, num_blocks) for content, num_blocks in [(1, 6), (2, 1), (3, 1), (4, 1)]]
    cache.hit(long, short[0])
    assert cache.queue.first() is short[1]
    assert (cache.queue.newcomers.num_blocks, cache.queue.main.num_blocks) == (8, 1)


def test_slru_what_lost_its_protection_counts_as_used_just_then_and_is_protected_again_by_a_hit():
    cache = Cache(SlruQueue())
    extents = [cache.publish(content) for content in range(1, 4)]
    cache.hit(*extents[:2])
    assert cache.queue.first() is extents[2]
    assert cache.queue.main.extents() == [extents[1]]
    cache.publish(4)
    assert cache.evict() == 3
    cache.hit(extents[0])
    assert cache.evict() == 4
    assert cache.drained() == [2, 1]


def test_slru_a_hold_without_a_hit_protects_nothing():
    cache = Cache(SlruQueue())
    held, other = cache.publish(1), cache.publish(2)
    cache.queue.withdraw(held)
    held.last_use = cache.tick + 1
    cache.queue.offer(held)
    assert cache.queue.main.num_extents == 0
    assert cache.queue.first() is other


# -- s3fifo -----------------------------------------------------------------------------------------------------------


def test_s3fifo_evicts_newcomers_in_the_order_of_publication_though_they_were_hit_once():
    cache = Cache(S3FifoQueue())
    extents = [cache.publish(content) for content in range(1, 5)]
    cache.hit(extents[0], extents[2])
    assert cache.drained() == [1, 2, 3, 4]


def test_s3fifo_moves_a_newcomer_that_was_hit_twice_to_the_main_queue():
    cache = Cache(S3FifoQueue())
    extents = [cache.publish(content) for content in range(1, 4)]
    cache.hit(extents[0], extents[0])
    assert cache.evict() == 2
    assert cache.queue.main.extents() == [extents[0]]
    assert cache.drained() == [3, 1]


def main_of(*contents):
    """A cache whose contents are all in the main queue, in this order, their hits spent."""
    cache = Cache(S3FifoQueue())
    extents = [cache.publish(content) for content in contents]
    cache.hit(*extents, *extents)
    assert cache.queue.first() is extents[0]
    assert cache.queue.main.num_extents == len(contents)
    return cache, extents


def test_s3fifo_lets_the_main_queue_go_round_once_for_each_hit_up_to_three():
    cache, (first, second, _) = main_of(1, 2, 3)
    cache.hit(*[first] * 9, second)
    assert cache.evict() == 3
    assert cache.evict() == 2
    assert cache.drained() == [1]
    cache, (first, second) = main_of(1, 2)
    cache.hit(*[first] * 9, *[second] * 3)
    assert cache.drained() == [1, 2]


def test_s3fifo_a_place_in_the_main_queue_is_kept_while_in_use():
    cache, (first, _, _) = main_of(1, 2, 3)
    cache.queue.withdraw(first)
    cache.queue.offer(first)
    assert cache.drained() == [1, 2, 3]


def test_s3fifo_leaves_newcomers_a_tenth_and_then_takes_from_the_main_queue():
    cache, _ = main_of(*range(1, 10))
    cache.publish(20)
    cache.publish(21)
    assert cache.drained() == [20, 1, 21, 2, 3, 4, 5, 6, 7, 8, 9]


def test_s3fifo_what_comes_back_soon_after_it_was_evicted_is_in_the_main_queue_at_once():
    cache = Cache(S3FifoQueue())
    for content in range(1, 5):
        cache.publish(content)
    assert cache.evict() == 1
    again = cache.publish(1)
    assert cache.queue.main.extents() == [again]
    assert cache.drained() == [2, 3, 4, 1]


def test_s3fifo_ghosts_stand_for_as_many_blocks_as_were_candidates_at_one_time():
    cache = Cache(S3FifoQueue())
    for content in range(1, 1000):
        cache.publish(content, num_blocks=2)
        if content > 5:
            cache.evict()
    assert len(cache.queue.ghosts) == 6
    assert cache.queue.ghosts.num_blocks == 12
    assert cache.queue.num_entries < 200


def test_s3fifo_only_what_goes_as_a_newcomer_becomes_a_ghost():
    cache, _ = main_of(1, 2)
    assert cache.drained() == [1, 2]
    assert len(cache.queue.ghosts) == 0


def test_ghosts_forget_the_oldest_first():
    ghosts = Ghosts()
    for each in (1, 2, 3):
        ghosts.add(each, 2, max_blocks=5)
    assert [ghosts.take(each) for each in (1, 2, 3)] == [False, True, True]
    assert (len(ghosts), ghosts.num_blocks) == (0, 0)
    ghosts.add(1, 9, max_blocks=5)
    assert len(ghosts) == 0


def test_fingerprints_are_the_same_in_every_process_and_tell_places_and_contents_apart():
    cache = Cache(queue_of("lru"))
    first = cache.publish(7)
    below = cache.publish(7, parent=first)
    assert fingerprint(first) == 0xBC93E7A5
    assert fingerprint(below) == (1 << 32) + fingerprint(first)
    assert fingerprint(cache.publish(8)) != fingerprint(first)


# -- cost -------------------------------------------------------------------------------------------------------------


def test_the_cost_of_a_token_is_linear_in_what_comes_before_it():
    cache = Cache(queue_of("lru"))
    first = cache.publish(1, num_blocks=10)
    below = cache.publish(2, num_blocks=5, parent=first)
    assert recompute_cost(first) == LINEAR_TOKENS + 10
    assert recompute_cost(below) == LINEAR_TOKENS + 15


def test_cost_keeps_the_tail_of_a_long_prefix_longer_than_a_short_one_of_equal_use():
    manager = small(num_blocks=32, policy="cost", partial_reuse=False)
    long, short, later = list(range(1, 21)), [31, 32], [41, 42, 43, 44]
    for prompt in (long, short, later):
        cached(manager, prompt)
    manager.evict(1)
    assert manager.match_prefix([*short, 0]).num_tokens == 0
    manager.evict(2)
    assert manager.match_prefix([*later, 0]).num_tokens == 0
    assert manager.match_prefix([*long, 0]).num_tokens == 20
    manager.check()


def test_cost_weighs_what_is_twice_as_costly_like_what_is_hit_once(monkeypatch):
    monkeypatch.setattr(cost, "LINEAR_TOKENS", 10)
    cache = Cache(CostQueue())
    cache.publish(1, num_blocks=13)
    hit, _ = cache.publish(2), cache.publish(3)
    cache.hit(hit)
    assert cache.drained() == [3, 2, 1]


def test_cost_lets_go_in_the_end_of_what_was_hit_often_but_long_ago():
    cache = Cache(CostQueue())
    often = cache.publish(1)
    cache.hit(*[often] * 7)
    evicted = []
    for content in range(2, 7):
        cache.publish(content)
        evicted.append(cache.evict())
    assert evicted == [2, 3, 4, 1, 5]


def test_cost_what_is_offered_since_its_children_went_is_as_old_as_its_last_use():
    cache = Cache(CostQueue())
    parent = cache.publish(1)
    cache.queue.withdraw(parent)
    cache.publish(2, parent=parent)
    assert cache.evict() == 2
    cache.publish(3)
    cache.queue.offer(parent)
    assert cache.evict() == 1


def test_cost_remembers_a_bounded_past_of_its_clock():
    cache = Cache(CostQueue())
    for content in range(1, 5000):
        cache.publish(content)
        cache.evict()
    ticks, clocks = cache.queue._cost._ticks, cache.queue._cost._clocks
    assert len(ticks) == len(clocks) == cache.queue._cost.num_marks <= MAX_MARKS
    assert ticks == sorted(set(ticks))
    assert clocks == sorted(set(clocks))


# -- all of them ------------------------------------------------------------------------------------------------------

NAMES = sorted(POLICIES)


@pytest.mark.parametrize("name", ["s3fifo", "slru"])
def test_weights_follow_a_victim_that_loses_its_tail_and_what_is_split_off(name):
    cache = Cache(queue_of(name))
    long, short = cache.publish(1, num_blocks=8), cache.publish(2)
    assert cache.queue.first() is long
    shrink(long, 3)
    assert cache.queue.first() is long
    assert cache.queue.newcomers.num_blocks == 4
    upper = Extent(cache.root, long.key, long.tokens[:8], long.blocks[:, :2], long.created)
    long.parent, long.start, long.tokens, long.blocks = upper, 2, long.tokens[8:], long.blocks[:, 2:]
    assert cache.queue.first() is long
    cache.queue.withdraw(long)
    cache.queue.withdraw(short)
    assert (cache.queue.newcomers.num_blocks, cache.queue.main.num_blocks) == (0, 0)


@pytest.mark.parametrize("name", ["s3fifo", "slru"])
def test_what_left_the_tree_while_in_use_is_forgotten(name):
    cache = Cache(queue_of(name))
    for content in range(1, 1000):
        extent = cache.publish(content)
        cache.queue.withdraw(extent)
        extent.parent = None
    assert len(cache.queue._standings) <= 64 + 1


def hits(name, prompts, num_blocks=12):
    return num_hit_tokens(name, prompts, num_blocks=num_blocks, block_size=2) // 2


HOT = [[content, content, 0] for content in range(1, 5)]
"""Prompts of one block each that can be hit."""
SCAN = [[content, content, 0] for content in range(100, 130)]
"""As many as evict all else, each asked once."""


def test_a_scan_takes_hot_contents_from_lru_and_not_from_s3fifo_and_slru():
    prompts = HOT * 3 + SCAN + HOT
    assert {name: hits(name, prompts) - hits(name, HOT * 3) for name in NAMES} == {
        "cost": 0,
        "fifo": 0,
        "lfu": 4,
        "lru": 0,
        "priority": 0,
        "s3fifo": 4,
        "slru": 3,  # a third of the 11 blocks that nobody uses when room is needed
    }


def test_contents_whose_day_is_over_make_room_in_all_but_lfu():
    others = [[content, content, 0] for content in range(50, 58)]
    assert {name: hits(name, HOT * 5 + others * 20) - hits(name, HOT * 5) for name in NAMES} == {
        "cost": 138,
        "fifo": 152,
        "lfu": 0,
        "lru": 152,
        "priority": 152,
        "s3fifo": 145,
        "slru": 145,
    }


@pytest.mark.parametrize("name", NAMES)
def test_what_fits_is_always_hit(name):
    assert hits(name, HOT * 5) == 4 * 4


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_that_outgrows_the_pool_keeps_its_beginning(name):
    manager = small(policy=name, partial_reuse=False)
    for length in range(3, 16, 2):
        cached(manager, list(range(1, length + 1)))
    manager.evict(4)
    assert manager.match_prefix([*range(1, 17)]).num_tokens >= 6
    manager.check()
