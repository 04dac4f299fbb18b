"""Numbers of each group: they are what a recount says, never negative, and never drift."""

import dataclasses
import random

import pytest
from tests.core.layers import CROSS, FULL, chunked, grouped, sliding, state, tables
from tests.core.small import cached, computed, small

from kvist import NeverFits, OutOfBlocks, SequenceError
from kvist.core.statistics import RECENT_PROMPTS

LAYERS = {
    "full": [FULL],
    "window": [FULL, sliding(3)],
    "sinks": [sliding(2, 3)],
    "chunks": [FULL, chunked(3)],
    "state": [FULL, state()],
    "all": [FULL, sliding(4), chunked(4), state(), CROSS],
}


# -- small cases ------------------------------------------------------------------------------------------------------


def test_each_group_counts_its_own_blocks():
    manager = grouped([FULL, sliding(4), state(), CROSS], block_size=2, num_blocks=[16, 12, 8, 4])
    sequence = manager.add_sequence(range(11), encoder_tokens=3)
    manager.commit([sequence], 10)
    kinds = [group.kind for group in manager.stats().groups]
    held = [group.num_held_blocks for group in manager.stats().groups]
    sizes = [group.num_blocks for group in manager.stats().groups]
    assert (kinds, sizes) == (["full", "sliding", "state", "cross"], [16, 12, 8, 4])
    assert held == [6, 3, 1 + len(sequence._checkpoints), 2]
    assert manager.stats().groups[0].usage == 6 / 16


def test_what_a_window_has_let_go_is_evictable_and_not_held():
    manager = grouped([FULL, sliding(2)], block_size=2, num_blocks=8)
    computed(manager, range(9))
    full, windows = manager.stats().groups
    assert (full.num_held_blocks, full.num_evictable_blocks, full.num_free_blocks) == (5, 0, 3)
    assert (windows.num_held_blocks, windows.num_evictable_blocks, windows.num_free_blocks) == (1, 4, 7)


def test_reused_and_missed_blocks_are_counted_by_group():
    manager = grouped([FULL, sliding(4)], block_size=2)
    cached(manager, range(8))
    manager.add_sequence([*range(8), 50, 51, 52])
    full, windows = manager.stats().groups
    assert (full.num_reused_blocks, full.num_missed_blocks) == (4, 4 + 2)
    assert (windows.num_reused_blocks, windows.num_missed_blocks) == (2, 4 + 2)
    assert full.block_hit_rate == 0.4
    assert windows.block_hit_rate == 0.25
    stats = manager.stats()
    assert (stats.num_reused_blocks, stats.num_missed_blocks) == (6, 12)
    assert stats.block_hit_rate == 6 / 18


def test_sinks_that_are_shared_are_reused():
    manager = grouped([FULL, sliding(2, 2)], block_size=2)
    cached(manager, range(12))
    sequence = manager.add_sequence([*range(12), 50])
    held = [block for block in sequence.group_blocks(1).tolist() if block >= 0]
    assert manager.stats().groups[1].num_reused_blocks == len(held) - 1 == 2


def test_allocated_blocks_are_new_or_evicted_for_the_purpose():
    manager = grouped([FULL, sliding(4)], block_size=2, num_blocks=4)
    cached(manager, range(8))
    assert [(group.num_allocated_blocks, group.num_new_blocks) for group in manager.stats().groups] == [(4, 4), (4, 4)]
    computed(manager, range(50, 54))
    # What went for the first group's sake went in both, so the second one found its blocks free.
    assert [(group.num_allocated_blocks, group.num_new_blocks) for group in manager.stats().groups] == [(6, 4), (6, 6)]


def test_growth_forks_and_states_are_allocated_too():
    manager = grouped([FULL, state()], block_size=2, num_blocks=16)
    parent = computed(manager, [1, 2, 3])
    manager.append([parent], [[4, 5]])
    manager.commit([parent])
    manager.fork(parent, 2)
    full, states = manager.stats().groups
    assert full.num_allocated_blocks == 2 + 1 + 2
    assert states.num_allocated_blocks == 1 + 2
    assert full.num_new_blocks == full.num_allocated_blocks


def test_forks_that_evict_do_not_make_new_blocks_negative():
    manager = small(num_blocks=2)
    parent = computed(manager, [1])
    for token in range(10, 20):
        (child,) = manager.fork(parent)
        manager.append([child], [token])
        manager.commit([child])
        manager.free(child)
    [group] = manager.stats().groups
    assert (group.num_allocated_blocks, group.num_new_blocks) == (11, 2)


def test_evictions_are_counted_by_reason():
    manager = small(num_blocks=4)
    cached(manager, [1, 2, 3, 4])
    cached(manager, [5, 6, 7, 8])
    manager.free(manager.add_sequence([9]), publish=False)
    manager.evict(2)
    stats = manager.stats()
    assert {reason: n for reason, n in stats.evictions.items() if n} == {"made room": 1, "asked for": 2}
    assert stats.num_evicted_blocks == 3


def test_what_nothing_can_reach_is_evicted_for_that_reason():
    manager = grouped([FULL, state()], block_size=2)
    manager.free(computed(manager, range(5)))
    assert {reason: n for reason, n in manager.stats().evictions.items() if n} == {"unreachable": 2}


def test_a_failed_admission_counts_nothing():
    manager = small(num_blocks=4)
    manager.add_sequence([1] * 6)
    before = manager.stats()
    with pytest.raises(OutOfBlocks):
        manager.add_sequence([2] * 5)
    assert manager.stats() == before


def test_the_recent_hit_rate_forgets_what_is_long_ago():
    manager = small(block_size=4, num_blocks=8)
    for _ in range(RECENT_PROMPTS):
        manager.free(manager.add_sequence([1] * 5))
    assert manager.stats().recent_token_hit_rate == 0
    computed(manager, [1] * 5)
    for _ in range(RECENT_PROMPTS // 2):
        manager.free(manager.add_sequence([1] * 5))
    assert manager.stats().recent_token_hit_rate == pytest.approx(0.4, abs=0.001)
    for _ in range(RECENT_PROMPTS):
        manager.free(manager.add_sequence([1] * 5))
    assert manager.stats().recent_token_hit_rate == 0.8
    assert manager.stats().token_hit_rate < 0.8


def test_rates_of_nothing_are_nothing():
    stats = small().stats()
    assert (stats.token_hit_rate, stats.block_hit_rate, stats.recent_token_hit_rate, stats.usage) == (0, 0, 0, 0)
    assert stats.groups[0].block_hit_rate == 0


def test_reset_begins_to_count_again():
    manager = grouped([FULL, sliding(2)], block_size=2)
    cached(manager, range(8))
    manager.reset()
    stats = manager.stats()
    assert (stats.num_admitted, stats.num_allocated_blocks, stats.num_query_tokens) == (0, 0, 0)
    assert not any(stats.misses.values())


# -- recounts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shared_pool", [False, True], ids=["pools", "one pool"])
@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_numbers_are_those_of_a_recount_whatever_was_done(layers, shared_pool, seed):
    chance = random.Random(seed)
    manager = grouped(
        layers,
        block_size=chance.choice([1, 2]),
        num_blocks=[chance.randint(5, 14) for _ in layers],
        max_sequences=5,
        max_sequence_length=24,
        partial_reuse=chance.random() < 0.5,
        shared_pool=shared_pool,
    )
    asked = Asked()
    for _ in range(50):
        act(manager, chance, asked)
        manager.check()
        stats = manager.stats()
        for numbers in (stats, *stats.groups):
            for field in dataclasses.fields(numbers):
                value = getattr(numbers, field.name)
                assert not isinstance(value, int | float) or value >= 0, field.name
        assert (stats.num_admitted, stats.num_query_tokens, stats.num_hit_tokens) == asked.counts
        assert sum(stats.misses.values()) + stats.num_hit_tokens + stats.num_admitted == stats.num_query_tokens
        for index, group in enumerate(stats.groups):
            assert group.num_held_blocks + group.num_free_blocks == group.num_blocks
            assert group.num_new_blocks <= group.num_allocated_blocks
            if manager._state.group_pools.index(manager._state.group_pools[index]) == index:
                assert group.num_held_blocks == len(held_blocks(manager, index))
    for sequence in manager._state.rows.running():
        manager.free(sequence)
    assert manager.num_free_blocks == manager.num_blocks


class Asked:
    """What was asked of a manager, counted beside it."""

    def __init__(self):
        self.counts = (0, 0, 0)

    def admit(self, sequence):
        num_admitted, num_tokens, num_hit = self.counts
        self.counts = (num_admitted + 1, num_tokens + sequence.num_prompt_tokens, num_hit + sequence.num_cached_tokens)


def act(manager, chance, asked):
    """Do something at random, which may be refused."""
    running = [sequence for sequence in manager._state.rows.running() if sequence.leader is None]
    sequence = chance.choice(running) if running else None
    calls = (
        [add, add, evict] if sequence is None else [add, add, append, commit, commit, free, fork, rewind, evict, pause]
    )
    try:
        chance.choice(calls)(manager, chance, asked, sequence)
    except (OutOfBlocks, NeverFits, SequenceError):
        if sequence is not None and sequence.is_suspended:
            manager.free(sequence)


def add(manager, chance, asked, _):
    tokens = [chance.randrange(2) for _ in range(chance.randint(1, 9))]
    asked.admit(manager.add_sequence(tokens, num_beams=chance.choice([1, 1, 2])))


def append(manager, chance, _, sequence):
    manager.append([sequence], [[chance.randrange(2)] * chance.randint(1, 3)])


def commit(manager, _, __, sequence):
    waiting = sequence._waiting_beams()
    manager.commit([sequence], waiting[0].num_tokens if waiting else sequence.num_tokens)


def free(manager, _, __, sequence):
    manager.free(sequence)


def fork(manager, _, __, sequence):
    manager.fork(sequence)


def rewind(manager, chance, _, sequence):
    manager.rewind(sequence, chance.randint(0, sequence.num_tokens - 1))


def evict(manager, chance, _, __):
    manager.evict(chance.randint(1, 4))


def pause(manager, _, __, sequence):
    manager.suspend(sequence)
    manager.resume(sequence)


def held_blocks(manager, group):
    """The blocks of a group's pool that sequences have."""
    pool_of = manager.config.pool_of
    held = set()
    for index in range(len(pool_of)):
        if pool_of[index] == pool_of[group]:
            for sequence in manager._state.rows.running():
                held.update(block for block in sequence.group_blocks(index).tolist() if block >= 0)
                if manager._state.spans[index].kind == "state":
                    held.update(block for _, block in sequence._checkpoints)
    return held


def test_tables_and_numbers_agree():
    manager = grouped([FULL, sliding(3), state()], block_size=2)
    sequences = [computed(manager, range(start, start + 7)) for start in (0, 100)]
    for group in range(3):
        blocks = {block for sequence in sequences for block in tables(manager, sequence)[group] if block >= 0}
        assert manager.stats().groups[group].num_held_blocks == len(blocks)
