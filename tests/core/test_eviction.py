import random

import numpy as np
import pytest
from tests.core.small import cached, computed, ids, small

from kvist import ConfigError, KVCacheManager, Retention
from kvist.core.eviction import Candidates, EvictionQueue
from kvist.core.extents import Extent
from kvist.core.policies import POLICIES, queue_of


def hit(number):
    """An extent that has been hit so often, which is all that these queues look at."""
    extent = Extent(None, None, b"", np.empty((1, 0), np.int32), 0)
    extent.hits = number
    return extent


def drained(queue):
    """The keys of all candidates, in the order they would be evicted in."""
    order = []
    while queue.num_candidates:
        first = queue.first()
        queue.withdraw(first)
        order.append(first.hits)
    return order


def offered(*numbers, policy=lambda extent: extent.hits):
    queue = EvictionQueue(policy)
    candidates = [hit(number) for number in numbers]
    for candidate in candidates:
        queue.offer(candidate)
    return queue, candidates


# -- the queue --------------------------------------------------------------------------------------------------------


def test_the_least_key_goes_first():
    queue, _ = offered(3, 1, 2)
    assert queue.first().hits == 1
    assert drained(queue) == [1, 2, 3]


def test_among_equal_keys_the_one_offered_first_goes_first():
    queue, _ = offered(2, 1, 3, policy=lambda extent: 0)
    assert drained(queue) == [2, 1, 3]


def test_one_that_was_withdrawn_is_not_a_candidate_until_it_is_offered_again():
    queue, (one, _, _) = offered(1, 2, 3)
    queue.withdraw(one)
    assert queue.first().hits == 2
    assert queue.num_candidates == len(queue.candidates()) == 2
    queue.offer(one)
    assert queue.first() is one
    assert queue.num_candidates == len(queue.candidates()) == 3


def test_the_key_is_asked_for_when_offered_and_only_then():
    asked = []
    queue, (one, other) = offered(1, 2, policy=lambda extent: asked.append(extent.hits) or extent.hits)
    one.hits = 9
    assert queue.first() is one
    queue.withdraw(one)
    queue.offer(one)
    assert queue.first() is other
    assert asked == [1, 2, 9]


def test_stale_entries_are_swept_out():
    queue, (one, other) = offered(1, 2)
    for _ in range(1000):
        queue.withdraw(one)
        queue.offer(one)
    assert queue.num_entries < 200
    assert drained(queue) == [1, 2]
    assert other.ticket == 0


def test_order_holds_through_any_offers_and_withdrawals():
    chance = random.Random(0)
    queue, inside, outside = EvictionQueue(lambda extent: extent.hits), [], [hit(n) for n in range(30)]
    for _ in range(2000):
        source, target = (inside, outside) if inside and chance.random() < 0.5 else (outside, inside)
        if not source:
            continue
        candidate = source.pop(chance.randrange(len(source)))
        target.append(candidate)
        (queue.offer if target is inside else queue.withdraw)(candidate)
        assert queue.num_candidates == len(inside)
        assert set(queue.candidates()) == set(inside)
        if inside:
            assert queue.first() is min(inside, key=lambda extent: extent.hits)


# -- policies ---------------------------------------------------------------------------------------------------------


def survivors(manager, *prompts):
    """Which of these whole-block prompts are still cached as a whole."""
    return [prompt for prompt in prompts if manager.match_prefix([*prompt, 0]).num_tokens == len(prompt)]


A, B, C = [1, 2], [3, 4], [5, 6]


@pytest.mark.parametrize("policy", ["lru", "priority"])
def test_least_recently_used_goes_first(policy):
    manager = small(policy=policy, partial_reuse=False)
    for prompt in (A, B, C, A):
        cached(manager, [*prompt, 0])
    manager.evict(1)
    assert survivors(manager, A, B, C) == [A, C]
    manager.evict(1)
    assert survivors(manager, A, B, C) == [A]


def test_a_look_is_no_use():
    manager = small(policy="lru", partial_reuse=False)
    cached(manager, A)
    cached(manager, B)
    manager.match_prefix([*A, 0])
    manager.explain([*A, 0])
    manager.evict(1)
    assert survivors(manager, A, B) == [B]


def test_fifo_evicts_in_the_order_of_publication_whatever_is_used_since():
    manager = small(policy="fifo", partial_reuse=False)
    for prompt in (A, B, C, A, A):
        cached(manager, [*prompt, 0])
    manager.evict(1)
    assert survivors(manager, A, B, C) == [B, C]


def test_lfu_evicts_the_least_often_hit_and_among_equals_the_least_recently_used():
    manager = small(policy="lfu", partial_reuse=False)
    for prompt in (A, A, B, C, C):
        cached(manager, [*prompt, 0])
    cached(manager, [7, 8])
    manager.evict(1)
    assert survivors(manager, A, B, C, [7, 8]) == [A, C, [7, 8]]
    manager.evict(1)
    assert survivors(manager, A, B, C, [7, 8]) == [A, C]
    manager.evict(1)
    assert survivors(manager, A, B, C, [7, 8]) == [C]


def test_priority_evicts_low_retention_first_and_is_the_default():
    manager = small(partial_reuse=False)
    assert manager.config.policy == "priority"
    cached(manager, A, retention=Retention([(0, None, 80, None)]))
    cached(manager, B)
    cached(manager, C)
    manager.evict(2)
    assert survivors(manager, A, B, C) == [A]


def timed(*prompts, duration_s=30.0, **settings):
    """A manager whose clock is a list, with prompts cached that stay at priority 80 for so long."""
    now = [0.0]
    config = small(partial_reuse=False, **settings).config
    manager = KVCacheManager(config, clock=lambda: now[0])
    for prompt in prompts:
        cached(manager, prompt, retention=Retention([(0, None, 80, duration_s)]))
    return manager, now


def test_a_priority_ends_after_its_time_and_counts_as_used_then():
    manager, now = timed(A)
    cached(manager, B)
    now[0] = 29.0
    manager.evict(1)
    assert survivors(manager, A, B) == [A]
    cached(manager, B)
    now[0] = 30.0
    manager.evict(1)
    assert survivors(manager, A, B) == [A]
    cached(manager, C)
    manager.evict(1)
    assert survivors(manager, A, C) == [C]


def test_a_use_begins_the_time_of_a_priority_anew():
    manager, now = timed(A)
    now[0] = 20.0
    cached(manager, [*A, 0])
    now[0] = 40.0
    cached(manager, B)
    manager.evict(1)
    assert survivors(manager, A, B) == [A]
    manager.check()


def test_priorities_of_one_chain_may_end_at_the_same_time():
    manager, now = timed()
    cached(manager, [1, 2, 3, 4], retention=Retention([(0, 2, 80, 30.0), (2, 4, 70, 30.0)]))
    manager.check()
    cached(manager, B)
    now[0] = 30.0
    manager.evict(1)
    assert survivors(manager, [1, 2, 3, 4], B) == [[1, 2, 3, 4]]
    assert {extent.priority for extent in manager._state.tree.extents()} == {35}
    manager.check()


def priorities(manager):
    return {bytes(extent.tokens)[0]: extent.priority for extent in manager._state.tree.extents()}


def test_a_prompt_and_what_is_generated_after_it_are_kept_each_in_its_way():
    manager = small()
    sequence = computed(manager, [1, 2, 3, 4], retention=Retention([(0, 2, 80, None)], decode_priority=20))
    manager.stats()
    manager.append([sequence], [[5, 6]])
    manager.commit([sequence])
    manager.stats()
    assert priorities(manager) == {1: 80, 3: 35, 5: 20}
    manager.check()


def test_what_a_prompt_reuses_is_kept_as_it_asks():
    manager = small()
    cached(manager, [1, 2, 3, 4, 5, 6])
    manager.add_sequence([1, 2, 3, 4, 9], retention=Retention([(0, 2, 80, None), (2, None, 10, None)]))
    assert priorities(manager) == {1: 80, 3: 10, 5: 35}
    manager.check()


def test_times_that_were_overtaken_by_later_uses_do_not_pile_up():
    manager, _ = timed(duration_s=3600.0)
    for _ in range(5000):
        cached(manager, A, retention=Retention([(0, None, 80, 3600.0)]))
    assert len(manager._state.tree.expiries.entries) < 3000
    cached(manager, B)
    manager.evict(1)
    assert survivors(manager, A, B) == [A]


def test_a_callable_sees_the_extent_and_gives_the_order():
    seen = []

    def longest_first(extent):
        seen.append(
            (extent.num_blocks, extent.num_tokens, extent.hits, extent.priority, extent.last_use > extent.created)
        )
        return (-extent.num_blocks, extent.last_use)

    manager = small(policy=longest_first, partial_reuse=False)
    cached(manager, A)
    cached(manager, [3, 4, 5, 6])
    cached(manager, [7, 8])
    manager.evict(2)
    assert survivors(manager, A, [3, 4], [7, 8]) == [A, [7, 8]]
    assert seen == [(1, 2, 0, 35, True), (2, 4, 0, 35, True), (1, 2, 0, 35, True)]


def test_a_callable_may_prefer_what_was_used_last():
    manager = small(policy=lambda extent: -extent.last_use, partial_reuse=False)
    cached(manager, A)
    cached(manager, B)
    manager.evict(1)
    assert survivors(manager, A, B) == [A]


def test_policies_go_by_name_or_are_callables():
    names = ["cost", "fifo", "lfu", "lru", "priority", "s3fifo", "slru"]
    assert sorted(POLICIES) == names
    assert all(isinstance(queue_of(name), Candidates) for name in names)
    assert queue_of("lru") is not queue_of("lru")
    with pytest.raises(ConfigError, match=f"policy is 'mru', must be one of {', '.join(names)} or a callable"):
        small(policy="mru")


def test_what_a_callable_raises_is_counted_and_kept():
    queue = queue_of(lambda extent: 1 / extent.hits)
    for each in (hit(0), hit(2), hit(1)):
        queue.offer(each)
    assert (queue.num_policy_failures, queue.last_policy_failure) == (1, "ZeroDivisionError('division by zero')")
    assert sorted(drained(queue)) == [0, 1, 2]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_policy_with_a_name_never_fails(name):
    queue = queue_of(name)
    queue.offer(hit(1))
    assert (queue.num_policy_failures, queue.last_policy_failure) == (0, "")


def test_what_every_queue_must_answer_is_not_answered_by_none():
    queue = Candidates()
    for call in (queue.first, queue.withdraw_first, queue.candidates, lambda: queue.num_entries):
        with pytest.raises(NotImplementedError):
            call()


def test_a_policy_that_raises_costs_its_order_and_nothing_else():
    manager = small(policy=lambda extent: 1 / 0)
    cached(manager, [1, 2, 3, 4])
    cached(manager, [5, 6, 7, 8])
    manager.check()
    assert manager.evict(3) == 3
    manager.check()
    assert manager.num_free_blocks == 8
    assert manager.stats().num_policy_failures >= 2


def test_keys_that_cannot_be_compared_count_as_equal():
    keys = iter([1, "a", None, (2,), 3.0])
    manager = small(policy=lambda extent: next(keys))
    for start in range(0, 10, 2):
        cached(manager, [start, start + 1])
    assert manager.evict(5) == 5
    manager.check()
    assert manager.stats().num_policy_failures == 0


# -- what goes, and from where ----------------------------------------------------------------------------------------


def test_a_victim_loses_its_tail_first():
    manager = small(partial_reuse=False)
    blocks = cached(manager, [1, 2, 3, 4, 5, 6])
    assert manager.evict(1) == 1
    assert manager.match_prefix([1, 2, 3, 4, 5, 6, 7]).num_tokens == 4
    assert manager._state.pools[0].take(1).tolist() == blocks[-1:]


def test_a_partly_filled_last_block_goes_before_the_full_ones():
    manager = small()
    cached(manager, [1, 2, 3, 4, 5])
    assert manager.match_prefix([1, 2, 3, 4, 5, 6]).num_tokens == 5
    manager.evict(1)
    assert manager.match_prefix([1, 2, 3, 4, 5, 6]).num_tokens == 4
    manager.check()


def test_an_extent_that_lost_its_tail_can_grow_again():
    manager = small()
    cached(manager, [1, 2, 3, 4, 5])
    manager.evict(2)
    cached(manager, [1, 2, 3, 4, 5, 6])
    assert manager.match_prefix([1, 2, 3, 4, 5, 6, 7]).num_tokens == 6
    manager.check()


def test_leaves_go_before_what_they_hang_on_even_if_that_is_older():
    manager = small(policy="fifo", partial_reuse=False)
    cached(manager, [1, 2, 3, 4])
    cached(manager, [1, 2, 5, 6])
    manager.evict(2)
    assert survivors(manager, [1, 2]) == [[1, 2]]
    manager.evict(1)
    assert manager.match_prefix([1, 2, 0]).num_tokens == 0
    manager.check()


@pytest.mark.parametrize("policy", ["lru", "lfu", "priority", "slru"])
def test_what_has_lost_its_leaves_is_as_old_as_its_last_use(policy):
    manager = small(policy=policy, partial_reuse=False)
    for prompt in ([1, 2, 3, 4], [1, 2, 5, 6], [7, 8]):
        cached(manager, prompt, reuse=False)
    manager.evict(3)
    assert survivors(manager, [1, 2], [7, 8]) == [[7, 8]]


def test_nothing_held_is_evicted():
    manager = small()
    held = computed(manager, [1, 2, 3, 4])
    cached(manager, [1, 2, 5, 6])
    pin = manager.pin(manager.match_prefix([1, 2, 5, 6, 7]))
    cached(manager, [7, 8])
    assert manager.evict(8) == 1
    assert survivors(manager, [1, 2, 3, 4], [1, 2, 5, 6], [7, 8]) == [[1, 2, 3, 4], [1, 2, 5, 6]]
    pin.release()
    assert manager.evict(8) == 1
    assert survivors(manager, [1, 2, 3, 4]) == [[1, 2, 3, 4]]
    assert ids(held) == [0, 1]


def test_evicting_takes_as_many_victims_as_needed():
    manager = small(partial_reuse=False)
    for prompt in (A, B, C):
        cached(manager, prompt)
    computed(manager, list(range(10, 23)))
    assert survivors(manager, A, B, C) == [C]
    assert manager.stats().num_evicted_blocks == 2
    manager.check()


def test_what_a_prompt_reuses_is_not_evicted_for_it():
    manager = small(num_blocks=4, policy="lru")
    cached(manager, [1, 2, 3, 4])
    cached(manager, [5, 6, 7, 8])
    sequence = manager.add_sequence([1, 2, 3, 4, 9, 9, 9, 9])
    assert sequence.num_cached_tokens == 4
    assert manager.match_prefix([5, 6, 0]).num_tokens == 0
    manager.check()
