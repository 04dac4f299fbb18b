"""T18: a server that refuses, hangs, is slow, forgets in the middle, or lies: prompts are computed, and right."""

import pytest
from tests.tiers.services import Valkey, running
from tests.torture.over import WITH_STORES, over, without_groups
from tests.torture.rig import PATIENT, Rig, again, opened

from kvist import RemoteTier
from kvist.testing.faulty_store import LIES
from kvist.tiers.breaker import CircuitBreaker
from kvist.tiers.simulated import Conditions

STORED = without_groups(WITH_STORES, "ring", "cross")


def guard_of(rig):
    return rig.manager._link.stack._levels[0].store


def impatient(rig, timeout_s=0.03):
    """Give up on the store soon, and never stop asking it."""
    guard = guard_of(rig)
    guard.timeout_s, guard.breaker = timeout_s, CircuitBreaker(num_failures=10**9)


def prompts():
    return [[*range(8), *[number] * 9] for number in range(5)]


@over(STORED, num_blocks=24)
def test_B157_B145_a_store_that_hangs_at_any_call_holds_nobody_up(rig):
    for prompt in prompts():
        rig.leave(prompt)
    rig.send_down()
    impatient(rig)
    for call in ("contains", "get", "put", "stats", "drop"):
        rig.stores[0].hold(call)
        for prompt in prompts()[:2]:
            rig.leave(prompt)
        rig.manager.evict(rig.manager.num_blocks)
        rig.stores[0].release()
    rig.require_all_back()


@over(STORED, num_blocks=24)
def test_B159_B162_a_store_that_is_dead_for_a_while_is_filled_again(rig):
    rig.stores[0].die()
    for prompt in prompts():
        assert rig.leave(prompt) <= 8
    rig.manager.flush(PATIENT)
    rig.manager.evict(rig.manager.num_blocks)
    rig.stores[0].revive()
    guard_of(rig).breaker = CircuitBreaker()
    for _ in range(2):
        for prompt in prompts():
            rig.leave(prompt)
        rig.send_down()
    fresh = again(rig)
    for prompt in prompts():
        assert fresh.leave(prompt) == 16
    fresh.close()
    rig.require_all_back()


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("groups", ["full", "sliding", "mixed"])
def test_B142_B158_a_store_that_lies_costs_hits_and_no_content(groups, lie):
    with opened(groups, "store", False, num_blocks=24) as rig:
        rig.leave(prompts()[0])
        rig.send_down()
        rig.stores[0].lie(lie)
        for prompt in prompts() * 2:
            rig.leave(prompt)
            rig.manager.match_prefix(prompt)
            rig.manager.prefetch(prompt).wait(PATIENT)
            rig.manager.store_stats()
            rig.manager.evict(rig.manager.num_blocks)
        rig.stores[0].be_honest()
        for prompt in prompts():
            rig.leave(prompt)
        rig.require_all_back()


@pytest.mark.parametrize("missing", range(4))
def test_B161_what_is_missing_of_a_prefix_is_written_again_by_the_next_that_computes_it(missing):
    with opened("full", "store", False) as rig:
        rig.leave(range(17))
        rig.send_down()
        store = rig.stores[0]
        keys = list(store._entries)
        store._forget(keys[missing])
        fresh = again(rig)
        assert fresh.leave(range(17)) == 4 * missing
        assert fresh.manager.flush(PATIENT)
        assert len(store._entries) == 4
        third = again(rig)
        assert third.leave(range(17)) == 16
        third.close()
        fresh.close()


@over(STORED, num_blocks=24)
def test_B155_B158_content_that_goes_or_changes_between_two_calls_is_a_miss(rig):
    """A tenth of what is asked for is gone, a tenth comes damaged, a tenth of the calls fail; all are noticed."""
    for prompt in prompts():
        rig.leave(prompt)
    rig.send_down()
    rig.stores[0].conditions = Conditions(failure=0.1, loss=0.1, corruption=0.1)
    guard_of(rig).breaker = CircuitBreaker(num_failures=10**9)
    for _ in range(4):
        for prompt in prompts():
            rig.leave(prompt)
        rig.manager.evict(rig.manager.num_blocks)
    rig.require_all_back()


def test_B159_a_store_with_little_room_keeps_beginnings_or_nothing_that_cannot_be_reached():
    with opened("full", "store", False) as rig:
        rig.stores[0]._capacity = 3 * 8 * 4
        for prompt in prompts():
            rig.leave(prompt)
            rig.send_down()
        for prompt in prompts():
            rig.leave(prompt)
        assert rig.stores[0].stats().num_entries <= 3
        rig.require_all_back()


def test_B226_a_long_prompt_is_few_questions():
    with opened("full", "store", False, num_blocks=80, max_sequence_length=300) as rig:
        rig.leave(range(257))
        rig.send_down()
        rig.stores[0].calls.clear()
        assert rig.leave(range(257), publish=False) == 256
        asked = [call for call in rig.stores[0].calls if call in ("contains", "get")]
        assert len(asked) <= 3


def test_B157_a_real_server_is_stopped_killed_and_comes_back_empty_while_prompts_are_served(tmp_path):
    pytest.importorskip("redis")
    with running(Valkey(tmp_path)) as server:
        tier = RemoteTier(url=server.url, timeout_s=PATIENT)
        config = Rig("full").config
        rig = Rig.over_tiers([tier], config)
        assert [rig.leave(prompt) for prompt in prompts()] == [0, 8, 8, 8, 8]
        rig.manager.flush(PATIENT)
        rig.manager.evict(16)
        assert [rig.leave(prompt) for prompt in prompts()] == [16] * 5
        impatient(rig)
        server.pause()
        rig.manager.evict(16)
        for prompt in prompts():
            rig.leave(prompt)
        server.resume()
        server.kill()
        rig.manager.evict(16)
        for prompt in prompts():
            rig.leave(prompt)
        server.start()
        guard_of(rig).timeout_s = PATIENT
        for _ in range(2):
            rig.manager.evict(16)
            for prompt in prompts():
                rig.leave(prompt)
            rig.manager.flush(PATIENT)
        rig.manager.evict(16)
        assert rig.leave(prompts()[0]) == 16
        rig.require_all_back()
        rig.close()
