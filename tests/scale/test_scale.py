"""Large pools, long prompts, many rows, namespaces, siblings and extents: right, and no more work than they must be.

Work is counted in calls of functions and in bytes allocated, at one size and at ten times that size.
"""

import gc
from functools import partial

import numpy as np
import pytest
from tests.scale.work import num_calls, peak_bytes

from kvist import AttentionSpec, CacheConfig, KVCacheManager
from kvist.memory.dialects import tensorrt_offsets
from kvist.testing import TokenMemory

FULL = AttentionSpec(1, 1)
MAX_TOKEN = 2**31 - 1


def made(num_blocks, block_size=16, **settings):
    settings = {"layers": [FULL], "max_sequences": 8, "max_sequence_length": 4096} | settings
    return KVCacheManager(CacheConfig(block_size=block_size, num_blocks=num_blocks, **settings))


def proved(num_blocks, block_size=16, **settings):
    """A manager whose every block is seen to hold what it should, and the memory that sees it."""
    settings = {"layers": [FULL], "max_sequences": 8, "max_sequence_length": 4096} | settings
    config = CacheConfig(block_size=block_size, num_blocks=num_blocks, **settings)
    memory = TokenMemory(config)
    return KVCacheManager(config, memory), memory


def ids(n, seed=0):
    return np.random.default_rng(seed).integers(0, MAX_TOKEN, n, dtype=np.int32, endpoint=True)


def serve(manager, tokens, **options):
    sequence = manager.add_sequence(tokens, **options)
    manager.commit([sequence])
    manager.take_moves()
    manager.free(sequence)
    return sequence.num_cached_tokens


def served(manager, memory, tokens, **options):
    """Serve a prompt, and see that it reads what it should before and after."""
    sequence = manager.add_sequence(tokens, **options)
    memory.verify(sequence)
    memory.write(sequence)
    manager.commit([sequence])
    memory.verify(sequence)
    manager.free(sequence)
    return sequence.num_cached_tokens


def assert_same_work(few, many, *, calls=1.1, kibibytes=64):
    """Expect ten times as much of everything around it to make an act no more work: few and many make it."""
    few_calls, many_calls = num_calls(few()), num_calls(many())
    assert many_calls <= calls * few_calls + 8, f"{many_calls} calls, {few_calls} with a tenth of it"
    few_bytes, many_bytes = peak_bytes(few()), peak_bytes(many())
    assert many_bytes <= calls * few_bytes + kibibytes * 1024, f"{many_bytes} bytes, {few_bytes} with a tenth of it"


# -- pools and ids ----------------------------------------------------------------------------------------------------


def test_slots_beyond_32_bits_are_exact():
    """The last of 1,000,000 blocks of 4,096 tokens has slots from 4,095,995,904 on."""
    manager = made(1_000_000, 4096, max_sequence_length=8192)
    manager._state.pools[0].take(999_998)
    sequence = manager.add_sequence([MAX_TOKEN, 0, MAX_TOKEN - 1])
    tables = manager.tables([sequence])
    assert sequence.block_ids.tolist() == [999_998]
    assert tables.slot_mapping.tolist() == [999_998 * 4096 + position for position in range(3)]
    assert tables.token_rows().tolist() == tables.slot_mapping.tolist()
    manager.append([sequence], [np.arange(4094, dtype=np.int32)])
    assert manager.tables([sequence]).slot_mapping[-1] == 999_999 * 4096
    assert sequence.tokens[:3].tolist() == [MAX_TOKEN, 0, MAX_TOKEN - 1]


def test_the_greatest_block_id_has_exact_slots():
    manager = made(8, 4096)
    sequence = manager.add_sequence([1, 2, 3])
    manager._state.rows.block_table[0, sequence.row, 0] = 2**31 - 2
    tables = manager.tables([sequence])
    assert tables.slot_mapping.tolist() == [(2**31 - 2) * 4096 + position for position in range(3)]
    assert tables.token_rows().tolist() == tables.slot_mapping.tolist()
    assert tables.flashinfer().indices.tolist() == [2**31 - 2]


def test_offsets_that_do_not_fit_in_32_bits_are_refused_not_wrapped():
    manager = made(8)
    sequence = manager.add_sequence([1, 2, 3])
    manager._state.rows.block_table[0, sequence.row, 0] = 2**31 - 2
    tables = manager.tables([sequence])
    with pytest.raises(ValueError, match="int32"):
        tensorrt_offsets(tables.block_table, tables.held, 1)


def test_the_greatest_token_ids_are_found_again_and_told_apart():
    manager, memory = proved(16, 2)
    assert served(manager, memory, [MAX_TOKEN, MAX_TOKEN - 1, MAX_TOKEN, 0, MAX_TOKEN]) == 0
    assert served(manager, memory, [MAX_TOKEN, MAX_TOKEN - 1, MAX_TOKEN, 0, 7]) == 4
    assert served(manager, memory, [MAX_TOKEN, MAX_TOKEN - 1, MAX_TOKEN - 1, 0, 7]) == 2


def filled(num_blocks, length=1600):
    """A manager whose pool is full of cached prompts."""
    manager = made(num_blocks)
    for seed in range(-(-num_blocks * 16 // length) + 1):
        serve(manager, ids(length, seed))
    assert manager.stats().num_evicted_blocks > 0
    return manager


def test_a_full_pool_of_ten_times_the_blocks_is_no_more_work_for_a_request_that_evicts():
    managers = filled(2_000), filled(20_000)
    seeds = iter(range(10**6, 2 * 10**6))

    def request(manager):
        prompt = ids(1600, next(seeds))
        return lambda: serve(manager, prompt)

    assert_same_work(lambda: request(managers[0]), lambda: request(managers[1]))


@pytest.mark.parametrize("length", [160, 1600])
def test_the_garbage_collector_follows_three_objects_for_an_extent_at_most_and_none_for_a_block(length):
    manager, prompts = made(20_000), [ids(length, seed) for seed in range(102)]
    for prompt in prompts[:2]:
        serve(manager, prompt)
    manager.stats()
    gc.collect()
    before = len(gc.get_objects())
    for prompt in prompts[2:]:
        serve(manager, prompt)
    gc.collect()
    assert manager.stats().num_extents == 102
    assert len(gc.get_objects()) - before <= 3 * 100


@pytest.mark.slow
def test_a_pool_of_a_million_blocks_is_right():
    manager = filled(1_000_000, 4000)
    manager.check()
    stats = manager.stats()
    assert (stats.num_blocks, stats.num_free_blocks, stats.num_held_blocks) == (1_000_000, 1_000_000, 0)
    assert stats.num_allocated_blocks - stats.num_evicted_blocks == 1_000_000 - manager._state.pools[0].num_free
    assert serve(manager, ids(4000, 4000)) > 3900
    prompt = ids(1600, 10**7)
    small = filled(10_000, 4000)
    assert num_calls(lambda: serve(manager, prompt)) <= 1.1 * num_calls(lambda: serve(small, prompt)) + 8


# -- long sequences ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sequence_of_a_million_tokens_is_right():
    n = 1_000_000
    manager, memory = proved(n // 16 + 100, max_sequence_length=n + 1000)
    prompt = ids(n)
    assert served(manager, memory, prompt) == 0
    sequence = manager.add_sequence(prompt)
    assert sequence.num_cached_tokens == n - 1
    memory.verify(sequence)
    manager.append([sequence], [ids(900, 1)])
    memory.write(sequence)
    manager.commit([sequence])
    memory.verify(sequence)
    manager.rewind(sequence, 500)
    memory.verify(sequence)
    twin = manager.fork(sequence)[0]
    memory.verify(twin)
    assert twin.tokens.tolist() == [*prompt.tolist(), *ids(900, 1)[:400].tolist()]
    manager.check()


def test_a_prompt_ten_times_as_long_is_no_more_calls_cold_or_cached():
    manager = made(30_000, max_sequence_length=400_000)
    short, long = ids(32_000, 1), ids(320_000, 2)
    cold = [num_calls(lambda prompt=prompt: serve(manager, prompt)) for prompt in (short, long)]
    found = [num_calls(lambda prompt=prompt: serve(manager, prompt)) for prompt in (short, long)]
    looked = [num_calls(lambda prompt=prompt: manager.match_prefix(prompt)) for prompt in (short, long)]
    assert [serve(manager, prompt) for prompt in (short, long)] == [31_999, 319_999]
    for few, many in (cold, found, looked):
        assert many <= few + 8


# -- rows -------------------------------------------------------------------------------------------------------------


def running(num_rows, shared=64):
    """A manager in which so many sequences run, that share a prefix."""
    manager = made(num_rows * 4 + 16, max_sequences=num_rows)
    prefix = ids(shared)
    manager.commit([manager.add_sequence([*prefix, 0])])
    for row in range(1, num_rows):
        manager.commit([manager.add_sequence([*prefix, row])])
    return manager


def test_a_step_of_ten_times_the_rows_is_no_more_calls():
    few, many = (running(num_rows) for num_rows in (400, 4000))

    def step(manager):
        rows = np.arange(manager.config.max_sequences)
        manager.append(rows, np.full(len(rows), 5, np.int32))
        manager.commit(rows)
        manager.tables(rows)

    for _ in range(20):  # every row crosses a block boundary on the way
        assert num_calls(lambda: step(many)) <= num_calls(lambda: step(few)) + 8


def test_a_prefix_shared_by_4096_sequences_is_right_and_costs_each_what_it_costs_the_first():
    manager, memory = proved(4096 + 64, max_sequences=4096)
    prefix = ids(64)
    first = manager.add_sequence([*prefix, 0])
    memory.write(first)
    manager.commit([first])
    costs = []
    sequences = [first]
    for row in range(1, 4096):
        prompt = np.append(prefix, np.int32(row))
        costs.append(num_calls(lambda prompt=prompt: sequences.append(manager.add_sequence(prompt))))
    assert max(costs[2000:]) <= max(costs[:100]) + 8
    assert {tuple(each.block_ids[:4].tolist()) for each in sequences} == {tuple(first.block_ids[:4].tolist())}
    assert manager.stats().num_held_blocks == 4096 + 4
    for sequence in sequences[1:]:
        memory.write(sequence)
    manager.commit(sequences)
    for sequence in sequences[::100]:
        memory.verify(sequence)
    manager.check()
    ends = [num_calls(lambda sequence=sequence: manager.free(sequence)) for sequence in sequences]
    assert max(ends[:100]) <= max(ends[-100:]) + 8
    manager.check()
    assert manager.stats().num_held_blocks == 0


# -- namespaces, siblings and depth -----------------------------------------------------------------------------------


def with_namespaces(n):
    """A manager with a cached block in each of so many namespaces."""
    manager = made(n + 64, 2)
    for name in range(n):
        serve(manager, [1, 2], namespace=("tenant", name))
    return manager


def test_ten_times_the_namespaces_are_no_more_work_for_a_request():
    few, many = with_namespaces(1_000), with_namespaces(10_000)
    names = iter(range(10**6, 2 * 10**6))

    def request(manager):
        name = next(names)

        def act():
            serve(manager, [1, 2, 3], namespace=("tenant", name))
            manager.match_prefix([1, 2, 3], namespace=("tenant", 7))
            manager.explain([1, 2, 3, 4], namespace=("nobody",))
            manager.drop(namespace=("tenant", name))

        return act

    assert_same_work(lambda: request(few), lambda: request(many))


@pytest.mark.slow
def test_a_hundred_thousand_namespaces_are_right():
    manager = with_namespaces(100_000)
    manager.check()
    assert manager.stats().num_extents == 100_000
    assert [serve(manager, [1, 2, 3], namespace=("tenant", name)) for name in (0, 50_000, 99_999)] == [2, 2, 2]
    assert serve(manager, [1, 2, 3], namespace=("tenant", 100_000)) == 0
    assert [manager.drop(namespace=("tenant", name)) for name in range(100_001)] == [2] + [1] * 49_999 + [2] + (
        [1] * 49_998
    ) + [2, 2]
    assert manager.stats().num_extents == 0
    manager.check()


def with_children(n):
    """A manager in which one extent has so many children."""
    manager = made(n + 64, 2)
    for child in range(n):
        serve(manager, [1, 2, child, 3])
    return manager


def test_ten_times_the_siblings_are_no_more_work_for_a_request():
    few, many = with_children(2_000), with_children(20_000)
    children = iter(range(10**6, 2 * 10**6))

    def request(manager):
        child = next(children)

        def act():
            serve(manager, [1, 2, 777, 3, 4])  # found
            serve(manager, [1, 2, 777, 4])  # agrees in part
            serve(manager, [1, 2, child, 3])  # new

        return act

    assert_same_work(lambda: request(few), lambda: request(many), calls=1.2)


@pytest.mark.slow
def test_a_hundred_thousand_children_of_one_extent_are_right():
    manager = with_children(100_000)
    manager.check()
    assert manager.stats().num_extents == 100_001
    assert [serve(manager, [1, 2, child, 3, 4]) for child in (0, 50_000, 99_999)] == [4, 4, 4]
    assert serve(manager, [1, 2, 50_000, 9, 9]) == 3
    assert manager.evict(50_000) == 50_000
    manager.check()
    assert manager.drop(namespace=()) + manager.stats().num_evicted_blocks >= 100_001
    assert manager.num_free_blocks == manager.num_blocks


def chained(depth, manager):
    """Let the cache have a prompt in so many extents: at each block another one goes its own way."""
    prompt = ids(2 * depth)
    for block in range(1, depth):
        serve(manager, [*prompt[: 2 * block], 7, block])
    serve(manager, prompt)
    return prompt


@pytest.mark.parametrize("depth", [1_000, pytest.param(3_000, marks=pytest.mark.slow)])
def test_chains_of_extents_deeper_than_any_recursion_are_right(depth):
    manager, memory = proved(2 * depth + 64, 2, max_sequence_length=2 * depth + 64)
    prompt = ids(2 * depth)
    for block in range(1, depth):
        sequence = manager.add_sequence([*prompt[: 2 * block], 7, block])
        memory.write(sequence, sequence.num_computed_tokens)
        manager.commit([sequence])
        manager.free(sequence)
    assert served(manager, memory, prompt) == 2 * depth - 2
    sequence = manager.add_sequence([*prompt, 5])
    memory.verify(sequence)
    manager.check()
    assert len(manager.explain(sequence).parts) >= depth - 1
    assert manager.match_prefix(prompt).num_tokens == 2 * depth - 1
    assert len(manager.digest()) == 64
    manager.suspend(sequence)
    manager.check()
    manager.resume(sequence)
    manager.rewind(sequence, depth)
    manager.free(sequence)
    assert manager.evict(depth) == depth
    manager.check()
    manager.reset()


def test_a_chain_of_ten_times_the_extents_is_at_most_ten_times_the_calls():
    managers = [made(8_000, 2, max_sequence_length=8_000) for _ in range(2)]
    prompts = [chained(depth, manager) for depth, manager in zip((100, 1_000), managers, strict=True)]
    few, many = (
        [num_calls(partial(act, prompt)) for act in (manager.match_prefix, partial(serve, manager))]
        for manager, prompt in zip(managers, prompts, strict=True)
    )
    assert all(large <= 10.5 * small for small, large in zip(few, many, strict=True))
