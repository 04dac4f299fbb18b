"""What the device evicts goes to host memory, tail first, and comes back when a prompt asks for it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from tests.core.layers import FULL, chunked, hit, sliding, state, tables
from tests.core.small import books, cached, computed, ids, refused

from kvist import (
    CacheConfig,
    HostTier,
    KVCacheManager,
    Media,
    OutOfBlocks,
    Retention,
    SequenceError,
    StaleMatch,
    TransferError,
)
from kvist.testing import TokenMemory, cache_configs, cache_machine
from kvist.testing.configs import often
from kvist.testing.token_memory import NOTHING

DEVICE, HOST = "device", "host"


def tiered(num_blocks=4, num_host_blocks=8, block_size=2, layers=(FULL,), tier=None, **settings):
    """A manager of few blocks, with host memory, that only decides."""
    settings = {"max_sequences": 8, "max_sequence_length": 256, "partial_reuse": False} | settings
    tiers = [HostTier(num_blocks=num_host_blocks, **(tier or {}))]
    return KVCacheManager(CacheConfig(list(layers), block_size, num_blocks, tiers=tiers, **settings))


def played(manager):
    """The same manager anew, with an oracle for its memory; returns both."""
    memory = TokenMemory(manager.config)
    return memory.attach(KVCacheManager(manager.config, memory, clock=manager.clock)), memory


def compute(manager, memory, tokens, *, symbols=None, **options):
    """Admit a prompt, prove what is said to be cached, compute the rest."""
    sequence = manager.add_sequence(tokens, **options)
    memory.verify(sequence, tokens=symbols)
    memory.write(sequence, tokens=symbols)
    manager.commit([sequence])
    return sequence


def leave(manager, memory, tokens, **options):
    """Compute a prompt and end it; how many of its tokens were cached."""
    sequence = compute(manager, memory, tokens, **options)
    manager.free(sequence)
    return sequence.num_cached_tokens


def tier_moves(manager):
    """The copies to be made as (group, from, to), in order, such as (0, "device 3", "host 0")."""
    return [
        (move.group, f"{move.source_tier} {move.source}", f"{move.destination_tier} {move.destination}")
        for move in manager.take_moves()
    ]


def directions(manager):
    """The directions of the copies to be made, as "device > host", with how many there are of each in a row."""
    found = []
    for move in manager.take_moves():
        name = f"{move.source_tier} > {move.destination_tier}"
        if found and found[-1][0] == name:
            found[-1][1] += 1
        else:
            found.append([name, 1])
    return [tuple(each) for each in found]


def host(manager):
    """The numbers of the host tier."""
    [stats] = manager.stats().tiers
    assert stats.name == HOST
    return stats


def used(manager):
    """Blocks of host memory that hold something."""
    stats = host(manager)
    return stats.num_blocks - stats.num_free_blocks


def tiers(manager, tokens, **options):
    return manager.match_prefix(tokens, **options).tiers


def host_extents(manager):
    """What is in host memory, as (first block, tokens of it), parents first."""
    state = manager._state
    return [(each.start, state.identities.tokens(each.tokens).tolist()) for each in state.lower.extents()]


def fill(manager, first=1000, namespace=("filler",)):
    """Let other content take every block of the device that can be had."""
    size, free = manager.config.block_size, manager.num_free_blocks
    sequence = manager.add_sequence(range(first, first + free * size), namespace=namespace, publish=False)
    manager.free(sequence, publish=False)
    manager.check()


# -- demotion ---------------------------------------------------------------------------------------------------------


def test_what_is_evicted_goes_to_host_memory_from_the_tail():
    manager = tiered(num_blocks=4)
    blocks = cached(manager, range(8))
    manager.add_sequence([20, 21, 22, 23])
    assert tiers(manager, [*range(8), 9]) == {DEVICE: 4, HOST: 4}
    assert tier_moves(manager) == [(0, f"device {blocks[2]}", "host 0"), (0, f"device {blocks[3]}", "host 1")]
    manager.check()


def test_nothing_is_demoted_while_there_are_unused_blocks():
    manager = tiered(num_blocks=8)
    cached(manager, range(8))
    manager.add_sequence(range(20, 28))
    assert manager.take_moves() == []
    assert used(manager) == 0


def test_blocks_that_follow_one_another_into_host_memory_are_one_extent():
    manager = tiered(num_blocks=4)
    cached(manager, range(8))
    for _ in range(4):
        assert manager.evict(1) == 1
    assert host_extents(manager) == [(0, list(range(8)))]
    assert host(manager).num_extents == 1
    assert tiers(manager, [*range(8), 9]) == {DEVICE: 0, HOST: 8}
    manager.check()


def test_an_extent_of_another_priority_is_not_joined_with_what_follows_it():
    manager = tiered(num_blocks=4)
    cached(manager, range(8), retention=Retention([(0, 4, 80, None), (4, 8, 20, None)]))
    assert manager.evict(4) == 4
    assert host_extents(manager) == [(0, [0, 1, 2, 3]), (2, [4, 5, 6, 7])]
    assert hit(manager, [*range(8), 9]) == 8
    manager.check()


def test_joining_ends_at_256_blocks_so_that_no_step_copies_much():
    manager = tiered(num_blocks=300, num_host_blocks=300, block_size=1, max_sequence_length=300)
    cached(manager, range(300))
    for _ in range(300):
        manager.evict(1)
    assert [(start, len(tokens)) for start, tokens in host_extents(manager)] == [(0, 43), (43, 257)]
    assert hit(manager, [*range(300)]) == 299
    manager.check()


def test_a_partly_filled_block_is_not_taken_and_what_comes_before_it_is():
    manager = tiered(num_blocks=4, partial_reuse=True)
    cached(manager, range(7))
    assert manager.evict(4) == 4
    assert host_extents(manager) == [(0, list(range(6)))]
    assert hit(manager, range(8)) == 6


def test_an_ancestor_that_goes_takes_what_hangs_below_it_along():
    """A prefix is on the device up to some block, and in host memory from there on."""
    manager = tiered(num_blocks=6)
    cached(manager, [0, 1, 2, 3, 4, 5])
    cached(manager, [0, 1, 2, 3, 6, 7])
    assert manager.evict(2) == 2
    assert host_extents(manager) == [(2, [4, 5]), (2, [6, 7])]
    assert manager.evict(1) == 1
    assert host_extents(manager) == [(1, [2, 3]), (2, [4, 5]), (2, [6, 7])]
    assert tiers(manager, [0, 1, 2, 3, 4, 5, 9]) == {DEVICE: 2, HOST: 4}
    assert tiers(manager, [0, 1, 2, 3, 6, 7, 9]) == {DEVICE: 2, HOST: 4}
    manager.check()


def test_evicting_by_hand_demotes_and_reset_forgets_all_tiers():
    manager = tiered(num_blocks=4)
    cached(manager, range(8))
    assert manager.evict(4) == 4
    assert used(manager) == 4
    manager.reset()
    assert used(manager) == 0
    assert hit(manager, [*range(8), 9]) == 0


@pytest.mark.parametrize(
    ("tier", "priority", "num_taken"),
    [({"min_priority": 50}, 50, 4), ({"min_priority": 50}, 49, 0), ({"min_priority": 36}, 35, 0), ({}, 0, 4)],
)
def test_content_below_the_least_priority_is_not_taken(tier, priority, num_taken):
    manager = tiered(num_blocks=4, tier=tier)
    cached(manager, range(8), retention=Retention([(0, None, priority, None)]))
    assert manager.evict(4) == 4
    assert used(manager) == host(manager).num_demoted_blocks == num_taken
    assert host(manager).num_refused_blocks == 4 - num_taken
    manager.check()


def test_content_that_was_hit_less_often_than_asked_is_not_taken():
    manager = tiered(num_blocks=6, tier={"min_hits": 1})
    cached(manager, range(4))
    cached(manager, range(10, 14))
    manager.free(manager.add_sequence([*range(4), 9]), publish=False)
    assert manager.evict(4) == 4
    assert host_extents(manager) == [(0, [0, 1, 2, 3])]


def test_a_victim_that_is_refused_takes_what_hangs_below_it_with_it():
    """What could not be reached any more must not take room."""
    manager = tiered(num_blocks=6, tier={"min_priority": 30})
    cached(manager, range(8), retention=Retention([(0, 4, 10, None), (4, 8, 80, None)]))
    cached(manager, range(20, 24), retention=Retention([(0, None, 5, None)]))
    assert manager.evict(2) == 2  # those of priority 5
    assert manager.evict(2) == 2
    assert host_extents(manager) == [(2, [4, 5, 6, 7])]
    assert manager.evict(1) == 1  # of priority 10
    assert host_extents(manager) == []
    assert used(manager) == 0
    assert hit(manager, [*range(8), 9]) == 2
    manager.check()


def test_a_full_tier_takes_as_many_leading_blocks_as_it_has_room_for():
    manager = tiered(num_blocks=6, num_host_blocks=3)
    cached(manager, range(12))
    assert manager.evict(6) == 6
    assert host_extents(manager) == [(0, list(range(6)))]
    stats = host(manager)
    assert (stats.num_demoted_blocks, stats.num_refused_blocks, stats.num_free_blocks) == (3, 3, 0)
    assert hit(manager, [*range(12), 99]) == 6
    manager.check()


def test_a_full_tier_lets_go_of_what_its_own_policy_says_from_the_tail():
    manager = tiered(num_blocks=4, num_host_blocks=4)
    cached(manager, range(8))
    manager.evict(4)
    cached(manager, range(20, 24))
    manager.evict(2)
    assert host_extents(manager) == [(0, [0, 1, 2, 3]), (0, [20, 21, 22, 23])]
    assert host(manager).num_evicted_blocks == 2
    manager.check()


@pytest.mark.parametrize(("policy", "left"), [("priority", 10), ("lru", 20)])
def test_host_memory_has_a_policy_of_its_own(policy, left):
    manager = tiered(num_blocks=4, num_host_blocks=4, policy="lru", tier={"policy": policy})
    for first, priority in ((10, 90), (20, 20)):
        cached(manager, range(first, first + 4), retention=Retention([(0, None, priority, None)]))
    manager.evict(4)
    cached(manager, range(30, 34), retention=Retention([(0, None, 50, None)]))
    manager.evict(2)
    assert [tokens[0] for _, tokens in host_extents(manager)] == [left, 30]


def test_what_has_no_room_even_in_an_empty_tier_is_cut_to_it():
    manager = tiered(num_blocks=4, num_host_blocks=1)
    cached(manager, range(8))
    manager.evict(4)
    assert host_extents(manager) == [(0, [0, 1])]


def test_a_priority_whose_time_is_over_protects_nothing_in_host_memory():
    now = [0.0]
    config = tiered(num_blocks=8, num_host_blocks=4).config
    manager = KVCacheManager(config, clock=lambda: now[0])
    cached(manager, range(4), retention=Retention([(0, None, 90, 5.0)]))
    cached(manager, range(10, 14), retention=Retention([(0, None, 80, None)]))
    manager.evict(8)
    now[0] = 10.0
    cached(manager, range(20, 22))
    manager.evict(1)
    assert [tokens for _, tokens in host_extents(manager)] == [[0, 1], [10, 11, 12, 13], [20, 21]]
    manager.check()
    assert manager.forecast().fits(range(12))
    twin = manager._state.copied()
    assert [each.priority for each in twin.lower.extents()] == [35, 80, 35]


def test_a_priority_holds_in_host_memory_until_its_time_is_over():
    now = [0.0]
    config = tiered(num_blocks=8, num_host_blocks=4).config
    manager = KVCacheManager(config, clock=lambda: now[0])
    cached(manager, range(4), retention=Retention([(0, None, 90, 5.0)]))
    cached(manager, range(10, 14), retention=Retention([(0, None, 80, None)]))
    manager.evict(8)
    now[0] = 4.0
    cached(manager, range(20, 22))
    manager.evict(1)
    assert [tokens for _, tokens in host_extents(manager)] == [[0, 1, 2, 3], [10, 11], [20, 21]]


def test_a_tier_for_no_reuse_is_no_tier():
    manager = tiered(reuse=False)
    computed(manager, range(8))
    assert manager.stats().tiers == ()


# -- promotion --------------------------------------------------------------------------------------------------------


def test_a_prompt_brings_what_it_matches_back_before_it_is_computed_on():
    manager = tiered(num_blocks=4)
    cached(manager, range(6))
    manager.evict(3)
    manager.take_moves()
    before = manager.match_prefix([0, 1, 2, 3, 9])
    assert before.tiers == {DEVICE: 0, HOST: 4}
    sequence = manager.add_sequence([0, 1, 2, 3, 9])
    assert sequence.num_cached_tokens == 4
    copies = manager.take_moves()
    assert [(move.source, move.source_tier, move.destination_tier) for move in copies] == [
        (0, HOST, DEVICE),
        (1, HOST, DEVICE),
    ]
    assert [move.destination for move in copies] == ids(sequence)[:2]
    assert host_extents(manager) == [(2, [4, 5])]
    stats = host(manager)
    assert (stats.num_demoted_blocks, stats.num_promoted_blocks) == (3, 2)
    manager.check()


def test_looking_changes_nothing_in_any_tier():
    manager = tiered(num_blocks=4)
    cached(manager, range(8))
    manager.evict(3)
    before = books(manager)
    assert tiers(manager, [*range(8), 9]) == {DEVICE: 2, HOST: 6}
    manager.explain([*range(8), 9])
    assert books(manager) == before


def test_the_last_token_of_a_prompt_is_computed_even_if_all_of_it_is_in_host_memory():
    manager = tiered(num_blocks=4)
    cached(manager, range(4))
    manager.evict(2)
    assert tiers(manager, range(4)) == {DEVICE: 0, HOST: 2}
    assert manager.add_sequence(range(4)).num_cached_tokens == 2
    assert host_extents(manager) == [(1, [2, 3])]
    manager.check()


def test_only_what_a_prompt_matches_is_brought_up_and_the_rest_stays_below_it():
    manager = tiered(num_blocks=6)
    cached(manager, range(12))
    manager.evict(6)
    manager.free(manager.add_sequence([0, 1, 2, 3, 99, 99]))
    assert host_extents(manager) == [(2, list(range(4, 12)))]
    assert tiers(manager, [*range(12), 9]) == {DEVICE: 4, HOST: 8}
    assert hit(manager, [0, 1, 2, 3, 99, 99, 9]) == 4  # it was not committed
    manager.check()


def test_a_prompt_of_which_all_room_is_taken_by_its_own_rest_brings_nothing_up_and_is_admitted():
    """Five columns are needed: two from host memory and three new ones, or five new ones: as many either way."""
    manager = tiered(num_blocks=5)
    cached(manager, range(4))
    manager.evict(2)
    sequence = manager.add_sequence([*range(4), *range(50, 56)])
    assert sequence.num_cached_tokens == 4
    assert manager.num_free_blocks == 0
    manager.check()


def test_a_prompt_that_does_not_fit_is_refused_and_nothing_is_brought_up():
    manager = tiered(num_blocks=5)
    cached(manager, range(4))
    manager.evict(2)
    computed(manager, range(20, 24))
    with refused(manager, OutOfBlocks):
        manager.add_sequence([*range(4), *range(50, 56)])
    assert host_extents(manager) == [(0, [0, 1, 2, 3])]


def test_bringing_up_may_evict_and_demote_what_is_on_the_device():
    manager = tiered(num_blocks=4, num_host_blocks=4)
    cached(manager, range(6))
    manager.evict(3)
    cached(manager, range(20, 28))
    manager.take_moves()
    manager.add_sequence([*range(6), 9])
    assert directions(manager) == [("device > host", 1), ("host > device", 3)]
    manager.check()


def test_what_is_brought_up_keeps_its_priority_hits_and_age():
    manager = tiered(num_blocks=4)
    cached(manager, range(4), retention=Retention([(0, None, 77, None)]))
    manager.free(manager.add_sequence([*range(4), 9]), publish=False)
    [before] = manager._state.tree.extents()
    created = before.created
    manager.evict(2)
    manager.free(manager.add_sequence([*range(4), 9]), publish=False)
    [after] = manager._state.tree.extents()
    assert (after.priority, after.hits, after.created) == (77, 2, created)


def test_blocks_copied_up_were_free_or_are_copied_down_before():
    """Host blocks that are given back by going up may be taken by what goes down later, never before."""
    manager, memory = played(tiered(num_blocks=4, num_host_blocks=4))
    for _ in range(6):
        assert leave(manager, memory, [*range(6), 9]) in (0, 6)
        leave(manager, memory, [*range(20, 26), 9])
        manager.check()


def test_of_a_partly_matching_block_in_host_memory_nothing_is_taken():
    manager = tiered(num_blocks=4, block_size=4, partial_reuse=True)
    cached(manager, range(8))
    manager.evict(2)
    assert hit(manager, [0, 1, 2, 3, 4, 5, 9, 9]) == 4


def test_a_match_that_is_longer_on_the_device_than_in_host_memory_brings_nothing_up():
    manager = tiered(num_blocks=8, partial_reuse=True, block_size=4)
    cached(manager, range(12))
    manager.evict(2)
    computed(manager, range(12))
    manager.stats()
    assert tiers(manager, [*range(12), 9]) == {DEVICE: 12, HOST: 0}
    manager.check()


def test_beams_share_what_was_brought_up():
    manager, memory = played(tiered(num_blocks=8))
    leave(manager, memory, range(6))
    manager.evict(3)
    leader = manager.add_sequence([*range(6), 9], num_beams=3)
    assert leader.num_cached_tokens == 6
    assert {tuple(ids(beam)[:3]) for beam in leader.beams} == {tuple(ids(leader)[:3])}
    memory.write(leader)
    manager.commit([leader])
    for beam in leader.beams:
        memory.verify(beam)
    manager.check()


def test_forks_of_what_was_brought_up_read_the_same():
    manager, memory = played(tiered(num_blocks=10))
    leave(manager, memory, range(6))
    manager.evict(3)
    sequence = compute(manager, memory, [*range(6), 9])
    for fork in manager.fork(sequence, 2):
        memory.verify(fork)
        manager.append([fork], [7])
        memory.write(fork)
        manager.commit([fork])
    manager.check()


def test_a_thousand_extents_below_one_another_go_down_come_up_and_go():
    manager = tiered(num_blocks=1200, num_host_blocks=1200, block_size=1, max_sequence_length=1100)
    keeps = Retention([(at, at + 1, 30 + at % 2, None) for at in range(1000)])
    cached(manager, range(1000), retention=keeps)
    assert manager.stats().num_extents == 1000
    manager.evict(1000)
    assert host(manager).num_extents == 1000
    manager.check()
    assert tiers(manager, range(1001)) == {DEVICE: 0, HOST: 1000}
    sequence = manager.add_sequence(range(1001))
    assert sequence.num_cached_tokens == 1000
    manager.check()
    manager.free(sequence)
    manager.evict(1000)
    assert manager.drop(namespace=()) == 0
    assert used(manager) == 0
    manager.check()


# -- what the device publishes anew -----------------------------------------------------------------------------------


def below(manager, prompt):
    """Let a prompt be in host memory only."""
    cached(manager, prompt)
    manager.evict(manager.num_blocks)
    manager.take_moves()


def anew(manager, prompt):
    """Compute a prompt without looking for it, so that the device publishes it anew."""
    sequence = computed(manager, prompt, reuse=False)
    manager.stats()
    manager.check()
    assert manager.take_moves() == []
    return sequence


def test_equal_content_leaves_host_memory_when_the_device_publishes_it():
    manager = tiered(num_blocks=8)
    below(manager, range(6))
    anew(manager, range(6))
    assert host_extents(manager) == []
    assert tiers(manager, [*range(6), 9]) == {DEVICE: 6, HOST: 0}


def test_a_longer_one_on_the_device_takes_the_place_of_a_shorter_one_in_host_memory():
    manager = tiered(num_blocks=8)
    below(manager, range(4))
    anew(manager, range(8))
    assert host_extents(manager) == []
    assert hit(manager, [*range(8), 9]) == 8


def test_of_a_longer_one_in_host_memory_the_rest_hangs_below_what_the_device_published():
    manager = tiered(num_blocks=8)
    below(manager, range(8))
    anew(manager, range(4))
    assert host_extents(manager) == [(2, [4, 5, 6, 7])]
    assert tiers(manager, [*range(8), 9]) == {DEVICE: 4, HOST: 4}


def test_where_both_part_in_the_middle_both_can_be_found():
    manager = tiered(num_blocks=8)
    below(manager, [0, 1, 2, 3, 4, 5])
    anew(manager, [0, 1, 2, 3, 8, 9])
    assert host_extents(manager) == [(2, [4, 5])]
    assert tiers(manager, [0, 1, 2, 3, 4, 5, 9]) == {DEVICE: 4, HOST: 2}
    assert tiers(manager, [0, 1, 2, 3, 8, 9, 9]) == {DEVICE: 6, HOST: 0}


def test_children_in_host_memory_hang_below_what_took_the_place_of_their_parent():
    manager = tiered(num_blocks=8)
    cached(manager, [0, 1, 2, 3, 4, 5])
    cached(manager, [0, 1, 2, 3, 6, 7])
    manager.evict(8)
    assert host_extents(manager) == [(0, [0, 1, 2, 3]), (2, [4, 5]), (2, [6, 7])]
    manager.take_moves()
    anew(manager, [0, 1, 2, 3])
    assert host_extents(manager) == [(2, [4, 5]), (2, [6, 7])]
    assert hit(manager, [0, 1, 2, 3, 6, 7, 9]) == 6


def test_one_of_several_children_is_published_together_with_its_parent():
    manager = tiered(num_blocks=8)
    cached(manager, [0, 1, 2, 3, 4, 5])
    cached(manager, [0, 1, 2, 3, 6, 7])
    manager.evict(8)
    manager.take_moves()
    anew(manager, [0, 1, 2, 3, 6, 7, 8, 9])
    assert host_extents(manager) == [(2, [4, 5])]
    assert tiers(manager, [0, 1, 2, 3, 6, 7, 8, 9, 1]) == {DEVICE: 8, HOST: 0}
    assert tiers(manager, [0, 1, 2, 3, 4, 5, 1]) == {DEVICE: 4, HOST: 2}


def test_a_sequence_whose_blocks_took_the_place_of_host_memorys_goes_on():
    manager, memory = played(tiered(num_blocks=12))
    leave(manager, memory, [0, 1, 2, 3, 4, 5])
    manager.evict(3)
    sequence = compute(manager, memory, [0, 1, 2, 3, 8, 9], reuse=False)
    manager.stats()
    manager.append([sequence], [[7, 7, 7]])
    memory.write(sequence)
    manager.commit([sequence])
    memory.verify(sequence)
    manager.check()
    manager.free(sequence)
    assert leave(manager, memory, [0, 1, 2, 3, 8, 9, 7, 7, 7]) == 8
    assert leave(manager, memory, [0, 1, 2, 3, 4, 5, 7]) == 6


def test_a_device_that_publishes_over_two_thousand_extents_at_once_takes_the_place_of_all():
    """Each level has another child of its own, so that host memory's extents cannot be one."""
    manager = tiered(num_blocks=4100, num_host_blocks=4100, block_size=1, max_sequence_length=2100)
    keeps = Retention([(at, at + 1, 30 + at % 2, None) for at in range(2000)])
    cached(manager, range(2000), retention=keeps)
    manager.evict(2000)
    assert host(manager).num_extents == 2000
    manager.take_moves()
    anew(manager, range(2000))
    assert host_extents(manager) == []
    assert manager.stats().num_extents == 1, "it is cut only where something hangs below"


# -- forgetting -------------------------------------------------------------------------------------------------------


def test_dropping_a_namespace_forgets_it_in_host_memory_and_no_other():
    manager = tiered(num_blocks=8)
    for namespace in ((), ("a",), ("b",)):
        cached(manager, range(4), namespace=namespace)
    manager.evict(3)
    manager.drop(namespace=("a",))
    manager.check()
    assert [hit(manager, [*range(4), 9], namespace=each) for each in ((), ("a",), ("b",))] == [4, 0, 4]
    manager.evict(8)
    manager.drop(namespace=())
    assert used(manager) == 2
    assert list(manager._state.tree.roots) == [("b",)]
    manager.drop(namespace=("b",))
    assert used(manager) == 0
    manager.check()


def test_dropping_while_a_sequence_runs_forgets_what_hangs_below_what_it_holds():
    manager = tiered(num_blocks=8)
    cached(manager, range(8))
    manager.evict(2)
    sequence = manager.add_sequence([0, 1, 2, 3])
    assert tiers(manager, [*range(8), 9]) == {DEVICE: 4, HOST: 4}
    manager.drop(namespace=())
    assert used(manager) == 0
    manager.check()
    manager.commit([sequence])
    manager.free(sequence)
    assert manager.num_free_blocks == 8
    manager.check()


def test_a_namespace_with_nothing_left_anywhere_is_forgotten():
    manager = tiered(num_blocks=4, num_host_blocks=2)
    cached(manager, range(4), namespace=("gone",))
    manager.evict(4)
    cached(manager, range(20, 24), namespace=("new",))
    manager.evict(4)
    assert list(manager._state.tree.roots) == [("new",)]
    manager.check()


def test_content_lost_from_host_memory_is_a_miss_by_eviction():
    manager = tiered(num_blocks=4, num_host_blocks=2)
    cached(manager, range(4))
    manager.evict(4)
    assert manager.match_prefix([*range(4), 9]).miss == ""
    cached(manager, range(20, 24))
    manager.evict(4)
    assert manager.match_prefix([*range(4), 9]).miss == "evicted"


# -- identity ---------------------------------------------------------------------------------------------------------


def test_namespaces_never_mix_in_host_memory():
    manager, memory = played(tiered(num_blocks=6, num_host_blocks=16))
    for namespace in (("a",), ("b",), (1,), ("1",)):
        assert leave(manager, memory, range(6), namespace=namespace) == 0
        manager.evict(6)
    for namespace in (("a",), ("b",), (1,), ("1",)):
        assert leave(manager, memory, [*range(6), 9], namespace=namespace) == 6
        manager.check()
    assert leave(manager, memory, [*range(6), 9], namespace=("c",)) == 0


def test_media_and_extra_ids_are_told_apart_in_host_memory():
    manager = tiered(num_blocks=6, num_host_blocks=40)
    prompts = [
        {},
        {"media": [Media(1, 3, "cat")]},
        {"media": [Media(1, 3, "dog")]},
        {"media": [Media(1, 4, "cat")]},
        {"extra_ids": [0, 0, 7, 0, 0, 0, 0]},
        {"extra_ids": [0, 0, 8, 0, 0, 0, 0]},
    ]
    for options in prompts:
        cached(manager, [5, 9, 9, 9, 9, 6, 7], **options)
        manager.evict(6)
    for options in prompts:
        assert tiers(manager, [5, 9, 9, 9, 9, 6, 7], **options) == {DEVICE: 0, HOST: 6}
        assert manager.add_sequence([5, 9, 9, 9, 9, 6, 7], **options).num_cached_tokens == 6
        manager.check()
        manager.free(manager._state.rows.running()[0], publish=False)
        manager.evict(6)


def test_ids_that_stand_for_media_in_host_memory_are_not_forgotten():
    manager = tiered(num_blocks=4, num_host_blocks=4)
    cached(manager, [9, 9, 9, 9], media=[Media(0, 4, "cat")])
    manager.evict(2)
    for number in range(3000):  # enough to have what nothing refers to swept out
        manager.free(manager.add_sequence([9, 9], media=[Media(0, 2, number)]), publish=False)
    assert len(manager._state.identities) < 3000
    assert hit(manager, [9, 9, 9, 9, 1], media=[Media(0, 4, "cat")]) == 4


# -- suspending, pins, prefetch, forecasts ----------------------------------------------------------------------------


def test_a_suspended_sequence_comes_back_from_host_memory_and_computes_nothing_again():
    manager, memory = played(tiered(num_blocks=4, num_host_blocks=4))
    sequence = compute(manager, memory, range(8))
    manager.suspend(sequence)
    other = compute(manager, memory, range(20, 28))
    assert used(manager) == 4
    manager.free(other, publish=False)
    assert manager.resume(sequence) == 0
    memory.verify(sequence)
    manager.check()


def test_a_suspended_sequence_computes_again_what_host_memory_had_no_room_for():
    manager, memory = played(tiered(num_blocks=4, num_host_blocks=3))
    sequence = compute(manager, memory, range(8))
    manager.suspend(sequence)
    manager.free(compute(manager, memory, range(20, 28)), publish=False)
    assert manager.resume(sequence) == 2
    memory.verify(sequence)
    memory.write(sequence)
    manager.commit([sequence])
    memory.verify(sequence)
    manager.check()


def test_a_resume_without_room_changes_nothing():
    manager = tiered(num_blocks=4)
    sequence = computed(manager, range(8))
    manager.suspend(sequence)
    computed(manager, range(20, 24))
    with refused(manager, OutOfBlocks):
        manager.resume(sequence)
    assert tiers(manager, [*range(8), 9]) == {DEVICE: 4, HOST: 4}


def test_a_match_in_host_memory_is_brought_up_to_be_pinned():
    manager = tiered(num_blocks=4)
    cached(manager, range(6))
    manager.evict(2)
    manager.take_moves()
    match = manager.match_prefix([*range(6), 9])
    assert match.tiers == {DEVICE: 2, HOST: 4}
    with manager.pin(match) as pin:
        assert pin.num_tokens == 6
        assert directions(manager) == [("host > device", 2)]
        assert manager.num_free_blocks == 1
        assert manager.stats().groups[0].num_pinned_blocks == 3
        manager.check()
        fill(manager)
        assert tiers(manager, [*range(6), 9]) == {DEVICE: 6, HOST: 0}
    assert manager.num_free_blocks == 4
    manager.check()


def test_a_pin_of_what_is_in_host_memory_needs_room_on_the_device():
    manager = tiered(num_blocks=4)
    cached(manager, range(6))
    manager.evict(3)
    match = manager.match_prefix([*range(6), 9])
    computed(manager, range(20, 24))
    with refused(manager, OutOfBlocks, "host tier"):
        manager.pin(match)


def test_a_pin_of_what_is_in_host_memory_counts_against_the_budget():
    manager = tiered(num_blocks=4, pin_budget=0.5)
    cached(manager, range(6))
    manager.evict(3)
    with refused(manager, OutOfBlocks, "pins may hold 2"):
        manager.pin(manager.match_prefix([*range(6), 9]))
    assert manager.pin(manager.match_prefix([*range(4), 9])).num_tokens == 4
    manager.check()


def test_a_match_whose_end_has_left_host_memory_is_stale():
    manager = tiered(num_blocks=4, num_host_blocks=3)
    cached(manager, range(6))
    manager.evict(3)
    match = manager.match_prefix([*range(6), 9])
    cached(manager, range(20, 22))
    manager.evict(1)
    with refused(manager, StaleMatch, "4 are left"):
        manager.pin(match)
    manager.drop(namespace=())
    with refused(manager, StaleMatch, "0 are left"):
        manager.pin(match)


def test_a_match_stays_good_when_its_content_has_changed_its_tier():
    manager = tiered(num_blocks=4)
    cached(manager, range(6))
    match = manager.match_prefix([*range(6), 9])
    manager.evict(3)
    assert manager.pin(match).num_tokens == 6
    manager.check()


def test_prefetch_brings_a_prompt_to_the_device_and_holds_nothing():
    manager = tiered(num_blocks=4)
    cached(manager, range(8))
    manager.evict(4)
    manager.take_moves()
    fetched = manager.prefetch([*range(6), 9])
    assert (fetched.num_tokens, fetched.num_asked_tokens, fetched.is_done, fetched.wait()) == (6, 0, True, True)
    assert directions(manager) == [("host > device", 3)]
    assert tiers(manager, [*range(8), 9]) == {DEVICE: 6, HOST: 2}
    assert manager.num_free_blocks == 4
    manager.check()


def test_prefetch_without_room_for_all_moves_nothing():
    manager = tiered(num_blocks=4)
    cached(manager, range(8))
    manager.evict(4)
    computed(manager, range(20, 24))
    before = books(manager)
    assert manager.prefetch([*range(8), 9]).num_tokens == 0
    assert books(manager) == before


def test_a_forecast_knows_what_would_be_brought_up_and_what_would_be_evicted_for_it():
    manager = tiered(num_blocks=6)
    cached(manager, range(8))
    manager.evict(4)
    running = computed(manager, range(20, 24))
    before = books(manager)
    forecast = manager.forecast()
    assert not forecast.fits([*range(8), 9])
    forecast.release(running)
    assert forecast.fits([*range(8), 9])
    forecast.add([*range(8), 9])
    assert not forecast.fits(range(40, 44))
    assert forecast.fits(range(40, 42))
    assert books(manager) == before
    expected = forecast.free_blocks
    manager.perform(forecast)
    assert manager.num_free_blocks == expected
    manager.check()


def test_a_forecast_refuses_exactly_what_the_manager_refuses():
    manager = tiered(num_blocks=6)
    cached(manager, range(8))
    manager.evict(4)
    computed(manager, range(20, 24))
    for prompt in ([*range(8), 9], [*range(8)], [*range(4), 9, 9, 9], [*range(50, 60)], [*range(50, 58)]):
        forecast, fits = manager.forecast(), manager.forecast().fits(prompt)
        try:
            forecast.add(prompt)
        except OutOfBlocks:
            assert not fits
            with refused(manager, OutOfBlocks):
                manager.add_sequence(prompt)
        else:
            sequence = manager.add_sequence(prompt)
            assert fits
            assert manager.num_free_blocks == forecast.free_blocks
            manager.free(sequence, publish=False)
            manager.check()


# -- groups -----------------------------------------------------------------------------------------------------------


def grouped_in_tiers(layers, num_blocks=12, num_host_blocks=32, block_size=2, **settings):
    return tiered(num_blocks, num_host_blocks, block_size, layers, **settings)


LAYERS = {
    "full and sliding": [FULL, sliding(4)],
    "full and sliding with a sink": [FULL, sliding(5, sink_tokens=1)],
    "sliding": [sliding(4)],
    "full and chunked": [FULL, chunked(4)],
    "two windows": [sliding(3), sliding(6)],
}


@pytest.mark.parametrize("num_tokens", [12, 10, 6])
@pytest.mark.parametrize("name", LAYERS)
def test_groups_come_back_with_all_that_the_next_token_needs(name, num_tokens):
    manager, memory = played(grouped_in_tiers(LAYERS[name]))
    leave(manager, memory, range(12))
    manager.evict(64)
    assert leave(manager, memory, [*range(num_tokens), 9]) == num_tokens
    manager.check()
    manager.evict(64)
    assert leave(manager, memory, [*range(num_tokens), 9]) == num_tokens
    manager.check()


def test_only_the_blocks_in_span_of_a_window_are_brought_up():
    manager = grouped_in_tiers([FULL, sliding(4)], num_blocks=[12, 12])
    cached(manager, range(12))
    manager.evict(64)
    manager.take_moves()
    sequence = manager.add_sequence([*range(12), 9])
    assert sequence.num_cached_tokens == 12
    by_group = [move.group for move in manager.take_moves() if move.destination_tier == DEVICE]
    assert (by_group.count(0), by_group.count(1)) == (6, 2)
    assert tables(manager, sequence)[1][:4] == [-1] * 4
    manager.check()


def test_a_state_is_brought_up_for_the_block_that_a_prompt_goes_on_from():
    manager, memory = played(grouped_in_tiers([FULL, state(2)], num_blocks=[10, 8], num_host_blocks=[16, 16]))
    sequence = manager.add_sequence(range(8))
    for end in (2, 4, 6, 8):
        memory.write(sequence, stop=end)
        manager.commit([sequence], end)
    manager.free(sequence)
    manager.evict(64)
    assert used(manager) > 4
    assert leave(manager, memory, [*range(6), 9]) == 6
    manager.check()


def test_content_whose_state_was_not_kept_in_host_memory_is_reused_as_far_as_a_state_is():
    manager, memory = played(grouped_in_tiers([FULL, state()], num_blocks=[10, 8], num_host_blocks=[16, 1]))
    leave(manager, memory, range(9))
    manager.evict(64)
    manager.check()
    cached_tokens = leave(manager, memory, [*range(8), 9])
    assert cached_tokens in (0, 8)
    manager.check()


def test_groups_that_share_a_pool_share_host_memory():
    manager, memory = played(
        grouped_in_tiers([FULL, sliding(4)], num_blocks=[8, 8], num_host_blocks=[8, 8], shared_pool=True)
    )
    leave(manager, memory, range(12))
    manager.evict(64)
    assert host(manager).num_blocks == 16
    assert leave(manager, memory, [*range(12), 9]) in (10, 12)
    manager.check()


def test_host_memory_full_in_one_group_takes_only_columns_that_fit_in_all():
    manager = grouped_in_tiers([FULL, sliding(8)], num_blocks=[8, 8], num_host_blocks=[8, 2])
    cached(manager, range(12))
    manager.evict(64)
    manager.check()
    for stats, free in zip(manager.config.host_num_blocks, manager._state.lower.pools, strict=True):
        assert 0 <= free.num_free <= stats


def test_what_nothing_could_go_on_from_is_not_kept_in_host_memory():
    """Without the window before it, a block of the middle is of no use."""
    manager = grouped_in_tiers([FULL, sliding(4)], num_blocks=[8, 8], num_host_blocks=[8, 1])
    cached(manager, range(12))
    manager.evict(64)
    for extent in manager._state.lower.extents():
        if not extent.children:
            end = extent.start + extent.num_blocks
            assert manager._state.tree.reach(extent, end) == end
    manager.check()


# -- memory that fails ------------------------------------------------------------------------------------------------


class FailingMemory(TokenMemory):
    """An oracle that makes only some copies while it is broken."""

    is_broken, num_left = False, 0

    def perform(self, moves, *, late=False):
        moves = list(moves)
        if self.is_broken:
            made, self.num_left = min(self.num_left, len(moves)), self.num_left - len(moves)
            super().perform(moves[:made], late=True)
            if self.num_left >= 0:
                return
            self.num_left = 0
            raise OSError("broken")
        super().perform(moves, late=late)


def failing(**settings):
    config = tiered(**settings).config
    memory = FailingMemory(config)
    return memory.attach(KVCacheManager(config, memory)), memory


def test_a_promotion_that_fails_ends_the_new_sequence_and_is_made_up_for_before_anything_is_read():
    manager, memory = failing(num_blocks=4)
    leave(manager, memory, range(6))
    manager.evict(3)
    memory.is_broken = True
    with pytest.raises(TransferError):
        manager.add_sequence([*range(6), 9])
    assert manager.stats().num_sequences == 0
    assert manager.num_free_blocks == 4
    manager.check()
    memory.is_broken = False
    assert leave(manager, memory, [*range(6), 9]) == 6
    manager.check()


def test_a_promotion_that_keeps_failing_is_never_read():
    manager, memory = failing(num_blocks=4)
    leave(manager, memory, range(6))
    manager.evict(3)
    memory.is_broken = True
    for _ in range(3):
        with pytest.raises(TransferError):
            manager.add_sequence([*range(6), 9])
        manager.check()
    manager.reset()
    memory.is_broken = False
    assert leave(manager, memory, [*range(6), 9]) == 0


@pytest.mark.parametrize("num_made", range(4))
def test_copies_are_not_made_again_over_what_they_have_read_when_the_memory_fails_among_them(num_made):
    manager, memory = failing(num_blocks=3, num_host_blocks=4)
    leave(manager, memory, range(4))
    manager.evict(2)
    leave(manager, memory, range(10, 14))
    memory.is_broken, memory.num_left = True, num_made  # two go down, then two come up into their blocks
    with pytest.raises(TransferError):
        manager.add_sequence([*range(4), 9])
    memory.is_broken = False
    manager.evict(9)
    assert leave(manager, memory, [*range(10, 14), 9]) == 4
    assert leave(manager, memory, [*range(4), 9]) == 4


def test_a_demotion_that_fails_is_made_up_for_before_its_block_is_written():
    manager, memory = failing(num_blocks=4)
    leave(manager, memory, range(8))
    memory.is_broken = True
    with pytest.raises(TransferError):
        manager.add_sequence(range(20, 28))
    memory.is_broken = False
    assert leave(manager, memory, range(20, 28)) == 0
    manager.check()
    assert leave(manager, memory, [*range(6), 9]) == 6


@pytest.mark.parametrize("call", ["pin", "prefetch", "resume"])
def test_other_calls_whose_promotion_fails_leave_it_to_the_next(call):
    manager, memory = failing(num_blocks=6)
    sequence = compute(manager, memory, range(6))
    manager.suspend(sequence)
    manager.evict(6)
    match = manager.match_prefix([*range(6), 9])
    memory.is_broken = True
    calls = {
        "pin": lambda: manager.pin(match),
        "prefetch": lambda: manager.prefetch([*range(6), 9]),
        "resume": lambda: manager.resume(sequence),
    }
    with pytest.raises(TransferError):
        calls[call]()
    manager.check()
    memory.is_broken = False
    assert leave(manager, memory, [*range(4), 9]) == 4
    manager.check()


# -- the whole machine ------------------------------------------------------------------------------------------------


def test_the_machine_finds_nothing_wrong_with_host_memory_of_few_blocks():
    machine = cache_machine(cache_configs(max_blocks=8, host=often))
    options = {"database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}
    chosen = settings(max_examples=60, stateful_step_count=40, phases=[Phase.generate], derandomize=True, **options)
    run_state_machine_as_test(machine, settings=chosen)


def test_managers_given_the_same_calls_agree_in_all_tiers():
    def digest():
        manager = tiered(num_blocks=4, num_host_blocks=6)
        for first in (0, 20, 0, 40, 20):
            cached(manager, [*range(first, first + 6)])
        return manager.digest()

    assert digest() == digest()


def test_contents_of_host_memory_are_part_of_the_digest():
    def digest(num_evicted):
        manager = tiered(num_blocks=4)
        cached(manager, range(8))
        manager.evict(num_evicted)
        return manager.digest()

    assert len({digest(n) for n in range(5)}) == 5


def test_a_forgotten_copy_up_would_be_seen():
    manager, memory = played(tiered(num_blocks=4))
    leave(manager, memory, range(6))
    manager.evict(3)
    memory.group_slots(0, HOST)[:] = NOTHING
    with pytest.raises(AssertionError, match="holds nothing"):
        compute(manager, memory, [*range(6), 9])


def test_reset_with_host_content_refuses_while_sequences_run():
    manager = tiered(num_blocks=4)
    cached(manager, range(8))
    manager.evict(4)
    manager.add_sequence([1])
    with refused(manager, SequenceError):
        manager.reset()
    assert np.array_equal(manager.num_tokens[:1], [1])


# -- write-through ----------------------------------------------------------------------------------------------------


def through(num_blocks=4, num_host_blocks=8, block_size=2, layers=(FULL,), tier=None, **settings):
    """A manager of few blocks whose host memory gets content when it is committed."""
    return tiered(num_blocks, num_host_blocks, block_size, layers, {"write": "through"} | (tier or {}), **settings)


def copied(manager):
    """What the device and host memory both have, as (first block, how many of its blocks are copied)."""
    copies = manager._state.lower.copies
    return [(each.start, copies.num_columns(each, each.num_blocks)) for each in copies.extents()]


def test_committed_content_is_copied_at_once_and_the_device_keeps_it():
    manager = through()
    sequence = manager.add_sequence(range(6))
    assert manager.take_moves() == []
    manager.commit([sequence], 4)
    assert tier_moves(manager) == [
        (0, f"device {ids(sequence)[0]}", "host 0"),
        (0, f"device {ids(sequence)[1]}", "host 1"),
    ]
    manager.commit([sequence])
    assert tier_moves(manager) == [(0, f"device {ids(sequence)[2]}", "host 2")]
    assert tiers(manager, [*range(6), 9]) == {DEVICE: 6, HOST: 0}
    assert (host(manager).num_copied_blocks, host(manager).num_demoted_blocks, used(manager)) == (3, 0, 3)
    manager.check()


def test_what_was_copied_is_evicted_without_a_move_and_comes_back_with_one():
    manager = through()
    cached(manager, range(8))
    manager.take_moves()
    manager.add_sequence([20, 21, 22, 23])
    assert manager.take_moves() == []
    assert tiers(manager, [*range(8), 9]) == {DEVICE: 4, HOST: 4}
    assert host(manager).num_demoted_blocks == 2
    manager.check()


def test_what_comes_back_stays_in_host_memory_so_that_it_goes_again_without_a_move():
    manager, memory = played(through())
    for _ in range(3):
        leave(manager, memory, range(6))
        assert manager.evict(4) == 3
        assert host_extents(manager) == [(0, list(range(6)))]
        sequence = compute(manager, memory, [*range(6), 9])
        assert sequence.num_cached_tokens == 6
        assert (host_extents(manager), used(manager)) == ([], 3)
        manager.check()
        manager.free(sequence, publish=False)
        manager.evict(4)
    assert host(manager).num_copied_blocks == 3


def test_a_partly_filled_block_is_not_copied():
    manager = through(partial_reuse=True)
    cached(manager, range(7))
    assert [(move.source_tier, move.num_tokens) for move in manager.take_moves()] == [(DEVICE, 2)] * 3
    assert copied(manager) == [(0, 3)]


def test_accepted_drafts_are_copied_when_they_are_in_their_places():
    manager, memory = played(through(num_blocks=8))
    sequence = compute(manager, memory, [0, 1])
    manager.reserve([sequence], 6)
    memory.write_tree(sequence, [1, 4], tokens=[0, 1, 2, 3])
    manager.accept(sequence, [2, 3], [1, 4])
    assert copied(manager) == [(0, 2)]
    manager.free(sequence)
    manager.evict(8)
    assert leave(manager, memory, [0, 1, 2, 3, 9]) == 4


def test_equal_content_is_copied_once():
    manager = through(num_blocks=8)
    first, second = manager.add_sequence(range(4)), manager.add_sequence(range(4))
    manager.commit([first, second])
    assert len(manager.take_moves()) == 2
    assert used(manager) == 2
    manager.check()


def test_content_that_host_memory_has_already_is_kept_there_when_the_device_computes_it_anew():
    manager = through(num_blocks=8)
    cached(manager, range(8))
    manager.evict(8)
    manager.take_moves()
    computed(manager, range(6), reuse=False)
    assert manager.take_moves() == []
    assert copied(manager) == [(0, 3)]
    assert host_extents(manager) == [(3, [6, 7])]
    manager.check()


def test_a_full_tier_lets_go_of_what_only_it_has_for_new_copies_and_of_no_copy():
    manager = through(num_blocks=6, num_host_blocks=4)
    cached(manager, range(4))
    manager.evict(2)
    cached(manager, range(20, 26))
    assert host_extents(manager) == [(0, [0, 1])]
    assert copied(manager) == [(0, 3)]
    computed(manager, range(40, 46))
    assert copied(manager) == [(0, 3), (0, 1)], "of the second as much as there was room for without the first"
    assert host(manager).num_refused_blocks == 2
    manager.check()


def test_what_the_device_is_about_to_lose_takes_the_place_of_the_copies_made_last():
    manager, memory = played(through(num_blocks=8, num_host_blocks=4, policy="lru"))
    leave(manager, memory, range(6))
    first = compute(manager, memory, range(20, 24), publish=True)
    assert copied(manager) == [(0, 3), (0, 1)]
    held = compute(manager, memory, [*range(6), 9])
    manager.free(first)
    manager.evict(2)
    assert host_extents(manager) == [(0, [20, 21, 22, 23])]
    assert copied(manager) == [(0, 2)]
    manager.check()
    manager.free(held)
    assert leave(manager, memory, [*range(20, 24), 9]) == 4
    assert leave(manager, memory, [*range(6), 9]) == 6


@pytest.mark.parametrize(("priority", "num_copied"), [(50, 4), (49, 0)])
def test_content_below_the_least_priority_is_not_copied(priority, num_copied):
    manager = through(tier={"min_priority": 50})
    cached(manager, range(8), retention=Retention([(0, None, priority, None)]))
    assert len(manager.take_moves()) == host(manager).num_copied_blocks == num_copied
    manager.evict(4)
    assert used(manager) == num_copied
    manager.check()


def test_content_is_copied_when_it_has_been_hit_as_often_as_asked():
    manager = through(num_blocks=8, tier={"min_hits": 2})
    cached(manager, range(4))
    for num_moves in (0, 2, 0):
        manager.free(manager.add_sequence([*range(4), 9]), publish=False)
        assert len(manager.take_moves()) == num_moves
    assert copied(manager) == [(0, 2)]
    manager.evict(2)
    assert manager.take_moves() == []
    assert tiers(manager, [*range(4), 9]) == {DEVICE: 0, HOST: 4}
    manager.check()


def test_an_extent_cut_in_two_has_its_copies_in_both_parts():
    manager = through(num_blocks=8)
    cached(manager, range(8))
    cached(manager, [0, 1, 2, 3, 50, 51])
    manager.take_moves()
    assert sorted(copied(manager)) == [(0, 2), (2, 1), (2, 2)]
    manager.evict(8)
    assert manager.take_moves() == []
    assert tiers(manager, [*range(8), 9]) == {DEVICE: 0, HOST: 8}
    manager.check()


def test_a_pin_of_what_host_memory_has_leaves_it_there():
    manager, memory = played(through())
    leave(manager, memory, range(4))
    manager.evict(2)
    with manager.pin(manager.match_prefix([*range(4), 9])):
        assert copied(manager) == [(0, 2)]
        manager.check()
    manager.evict(2)
    assert host_extents(manager) == [(0, [0, 1, 2, 3])]
    assert leave(manager, memory, [*range(4), 9]) == 4


def test_a_suspended_sequence_comes_back_from_its_copies():
    manager, memory = played(through(num_blocks=6))
    sequence = compute(manager, memory, range(6))
    manager.suspend(sequence)
    demoted = host(manager).num_demoted_blocks
    fill(manager)
    assert (host(manager).num_demoted_blocks - demoted, host(manager).num_copied_blocks) == (3, 3)
    assert manager.resume(sequence) == 0
    memory.verify(sequence)
    manager.check()


def test_dropping_a_namespace_forgets_its_copies_though_a_sequence_still_runs():
    manager = through(num_blocks=8)
    sequence = computed(manager, range(8))
    assert used(manager) == 4
    manager.drop(namespace=())
    assert used(manager) == 0
    manager.check()
    manager.free(sequence)
    manager.check()


def test_copies_go_with_the_blocks_that_a_window_lets_go_of():
    manager, memory = played(through(num_blocks=[12, 7], num_host_blocks=[12, 12], layers=[FULL, sliding(4)]))
    leave(manager, memory, range(12))
    leave(manager, memory, range(20, 30))
    copies, tree = manager._state.lower.copies, manager._state.tree
    assert any((extent.blocks < 0).any() for extent in tree.extents())
    for extent in tree.extents():
        assert np.array_equal(copies.of(extent) >= 0, extent.blocks >= 0)
    manager.evict(64)
    assert leave(manager, memory, [*range(12), 9]) in (10, 12)
    manager.check()


@pytest.mark.parametrize("name", [*LAYERS, "full and states"])
def test_groups_are_written_through_and_come_back_without_a_move_down(name):
    layers = {**LAYERS, "full and states": [FULL, state(2)]}[name]
    manager, memory = played(through(num_blocks=12, num_host_blocks=32, layers=layers))
    sequence = manager.add_sequence(range(12))
    for end in range(2, 13, 2):
        memory.write(sequence, stop=end)
        manager.commit([sequence], end)
    manager.free(sequence)
    kept = sum(each.num_blocks for each in manager._state.tree.extents())
    manager.evict(64)
    assert host(manager).num_demoted_blocks <= kept <= host(manager).num_copied_blocks
    assert leave(manager, memory, [*range(12), 9]) == 12
    manager.check()


def test_forecasts_with_copies_are_what_happens():
    manager = through(num_blocks=[8, 8], num_host_blocks=[6, 6], layers=[FULL, sliding(4)])
    cached(manager, range(8))
    cached(manager, range(20, 28))
    for prompt in ([*range(8), 9], [*range(20, 28), 9], [*range(40, 50)]):
        forecast = manager.forecast().add(prompt)
        before = manager.digest()
        assert manager.digest() == before
        sequence = manager.add_sequence(prompt)
        assert forecast.free_blocks == manager.num_free_blocks
        manager.commit([sequence])
        manager.free(sequence)
        manager.check()


def told(manager):
    """What new events say, as (what, tier, number of blocks)."""
    return [
        (type(event).__name__, getattr(event, "tier", ""), len(getattr(event, "digests", ())))
        for event in manager.events.poll()
    ]


def test_events_tell_of_content_in_host_memory_while_the_device_has_it_too():
    manager = through(event_buffer=100)
    manager.events.poll()
    cached(manager, range(4))
    assert told(manager) == [("Stored", DEVICE, 2), ("Stored", HOST, 2)]
    manager.evict(2)
    assert told(manager) == [("Removed", DEVICE, 2)]
    manager.free(manager.add_sequence([*range(4), 9]), publish=False)
    assert told(manager) == [("Stored", DEVICE, 2)]
    manager.drop(namespace=())
    assert told(manager)[0][0] == "Cleared"


def test_explain_says_what_host_memory_has_too():
    manager = through()
    cached(manager, range(4))
    assert "evictable, 2 in host memory, too" in str(manager.explain([*range(4), 9]))


def test_copies_are_part_of_the_digest():
    def digest(write):
        manager = through(tier={"write": write})
        cached(manager, range(4))
        manager.take_moves()
        return manager.digest()

    assert digest("through") == digest("through") != digest("back")


def test_a_forgotten_copy_down_would_be_seen():
    manager, memory = played(through())
    leave(manager, memory, range(6))
    memory.group_slots(0, HOST)[:] = NOTHING
    manager.evict(3)
    with pytest.raises(AssertionError, match="holds nothing"):
        compute(manager, memory, [*range(6), 9])


def test_the_machine_finds_nothing_wrong_with_host_memory_that_is_written_through():
    configs = cache_configs(max_blocks=8, host=often).filter(lambda config: config.tiers)
    written = configs.map(lambda config: replace(config, tiers=[replace(config.tiers[0], write="through")]))
    options = {"database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}
    chosen = settings(max_examples=60, stateful_step_count=40, phases=[Phase.generate], derandomize=True, **options)
    run_state_machine_as_test(cache_machine(written), settings=chosen)
