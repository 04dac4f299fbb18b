"""Groups that draw their blocks from one pool: whose bytes lie where, and that nothing else changes."""

from random import Random

import pytest
import torch

from kvist.config import AttentionSpec, CacheConfig, StateSpec
from kvist.core.moves import Move
from kvist.memory import TorchMemory

NUM_BLOCKS, BLOCK_SIZE = 6, 4


def full(num_kv_heads, head_dim, dtype="float32", **more):
    return AttentionSpec(num_kv_heads, head_dim, dtype, **more)


def sliding(num_kv_heads, head_dim, dtype="float32", **more):
    return AttentionSpec(num_kv_heads, head_dim, dtype, sliding_window=6, **more)


ALIKE = [full(2, 4), sliding(2, 4), sliding(2, 4), full(2, 4)]
OTHER_HEADS = [full(2, 4), full(1, 16), sliding(4, 8, "bfloat16"), sliding(8, 2, "bfloat16")]
WITH_STATES = [full(2, 4), StateSpec([(32,), (4, 8)])]
UNEVEN = [full(2, 4), full(2, 4), sliding(4, 4)]
EVERY_DTYPE = [
    full(2, 4), full(2, 4, "bfloat16"), full(2, 4, "float8_e4m3fn", k_scale=0.5), full(2, 4, "int8"),
    sliding(2, 4, "float16"), sliding(2, 4), sliding(2, 4, "uint8"), sliding(2, 4, "float8_e5m2", v_scale=2.0),
]  # fmt: skip
FOUR_BITS = [full(2, 4, "int4"), full(2, 12, "uint4", value_head_dim=4), sliding(2, 6, "int8")]
UNEVEN_KEYS_ONLY = [full(2, 5, value_head_dim=3), sliding(2, 8, value_head_dim=0), StateSpec([(3, 5), (49,)])]
MIXES = {
    "alike": ALIKE,
    "other heads": OTHER_HEADS,
    "states": WITH_STATES,
    "uneven": UNEVEN,
    "every dtype": EVERY_DTYPE,
    "4 bits": FOUR_BITS,
    "uneven, keys only": UNEVEN_KEYS_ONLY,
}


def config(layers, *, shared_pool=True, num_blocks=NUM_BLOCKS, order="layer_major"):
    return CacheConfig(
        layers, num_blocks=num_blocks, block_size=BLOCK_SIZE, shared_pool=shared_pool, storage_order=order
    )


def span(tensor):
    """Where the bytes of block 1 of a plane begin and end."""
    return tensor[1].data_ptr(), tensor[1].data_ptr() + tensor[1].nbytes


@pytest.mark.parametrize("layers", MIXES.values(), ids=MIXES)
def test_a_shared_pool_takes_no_more_than_its_blocks_and_alignment(layers):
    chosen = config(layers)
    assert len(chosen.pool_num_blocks) == 1
    memory = TorchMemory(chosen)
    size = NUM_BLOCKS * chosen.groups[0].block_bytes
    assert size <= memory.num_bytes <= size + NUM_BLOCKS * 16 * len(layers)
    assert TorchMemory(config(layers, shared_pool=False)).num_bytes == len(chosen.groups) * size


def test_the_layers_of_equal_groups_lie_pairwise_in_the_same_bytes():
    memory = TorchMemory(config(ALIKE))
    assert memory.kv(0).data_ptr() == memory.kv(1).data_ptr() != memory.kv(2).data_ptr() == memory.kv(3).data_ptr()
    assert all(memory.kv(layer).is_contiguous() for layer in range(4))


def test_layers_of_other_geometry_are_paired_by_size_and_stay_in_one_piece():
    memory = TorchMemory(config(OTHER_HEADS))
    for layer, twin in ((0, 3), (1, 2)):
        assert memory.kv(layer).is_contiguous()
        assert span(memory.keys(layer)) == span(memory.keys(twin))
        assert span(memory.values(layer)) == span(memory.values(twin))
    assert memory.keys(2).shape == (NUM_BLOCKS, BLOCK_SIZE, 4, 8)
    assert memory.keys(2).dtype == torch.bfloat16


def test_states_lie_where_k_and_v_of_a_block_would():
    memory = TorchMemory(config(WITH_STATES))
    assert [span(state) for state in memory.states(1)] == [span(memory.keys(0)), span(memory.values(0))]


def test_where_layers_have_no_equal_sizes_a_block_is_one_piece_and_k_and_v_are_still_one_view():
    memory = TorchMemory(config(UNEVEN))
    block_bytes = config(UNEVEN).groups[0].block_bytes
    starts = [span(plane)[0] for layer in (0, 1) for plane in (memory.keys(layer), memory.values(layer))]
    assert [start - starts[0] for start in starts] == [0, 128, 256, 384]
    assert span(memory.keys(2)) == (starts[0], starts[0] + 256)
    for layer in range(3):
        pool = memory.kv(layer)
        assert pool.stride(1) * 4 == block_bytes
        assert pool[0].data_ptr() == memory.keys(layer).data_ptr()
        assert pool[1].data_ptr() == memory.values(layer).data_ptr()


def test_planes_within_a_block_begin_at_multiples_of_16_bytes():
    memory = TorchMemory(config(UNEVEN_KEYS_ONLY))
    planes = [memory.keys(0), memory.values(0), memory.keys(1), *memory.states(2)]
    assert all(plane[block].data_ptr() % 16 == 0 for plane in planes for block in range(NUM_BLOCKS))


@pytest.mark.parametrize("layers", MIXES.values(), ids=MIXES)
def test_in_any_order_of_storage_and_in_one_pool_groups_read_what_they_read_from_pools_of_their_own(layers):
    random, generator = Random(0), torch.Generator().manual_seed(0)
    chosen = config(layers)
    apart, *others = memories = [
        TorchMemory(config(layers, shared_pool=shared_pool, order=order))
        for order in ("layer_major", "block_major")
        for shared_pool in (False, True)
    ]
    owners = [random.randrange(len(chosen.groups)) for _ in range(NUM_BLOCKS)]
    for step in range(60):
        group = random.randrange(len(chosen.groups))
        own = [block for block, owner in enumerate(owners) if owner == group]
        if step % 3 == 2 and own:  # a block changes hands, and is filled before it is read
            move = Move(random.choice(own), random.randrange(NUM_BLOCKS), BLOCK_SIZE, group=group)
            owners[move.destination] = group
            for memory in memories:
                memory.perform([move])
        block = random.randrange(NUM_BLOCKS)
        owners[block] = group
        for layer in chosen.groups[group].layers:
            fill(memories, layer, block, generator)
        for layer, spec in enumerate(layers):
            held = [b for b, owner in enumerate(owners) if layer in chosen.groups[owner].layers]
            expected = [*contents(apart, layer, spec, held)]
            for memory in others:
                found = [*contents(memory, layer, spec, held)]
                assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True) if pair[1] is not None)


def fill(memories, layer, block, generator):
    """Write random contents to a block of a layer, the same in all memories."""
    try:
        shapes = [(state.shape[1:], state.dtype) for state in memories[0].states(layer)]
    except ValueError:
        shapes = None
    if shapes is not None:
        new = [torch.randn((1, *shape), generator=generator).to(dtype) for shape, dtype in shapes]
        for memory in memories:
            memory.write_states(layer, [block], new)
        return
    slots = torch.arange(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)
    keys = memories[0].keys(layer)
    new_keys = random_bits((BLOCK_SIZE, *keys.shape[2:]), keys.dtype, generator)
    _, old_values = memories[0].read(layer, slots)
    new_values = None
    if old_values is not None:
        new_values = random_bits(old_values.shape, keys.dtype, generator)
    for memory in memories:
        memory.write(layer, new_keys, new_values, slots)


def random_bits(shape, dtype, generator):
    """Random numbers, of ints all there are."""
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 256, shape, generator=generator).to(torch.uint8).view(dtype)


def contents(memory, layer, spec, blocks):
    if isinstance(spec, StateSpec):
        yield from memory.read_states(layer, torch.tensor(blocks, dtype=torch.int64))
        return
    table = torch.tensor([blocks], dtype=torch.int64)
    slots = torch.tensor(blocks, dtype=torch.int64) * BLOCK_SIZE + 1
    for plane in (*memory.gather(layer, table, len(blocks) * BLOCK_SIZE), *memory.read(layer, slots)):
        yield plane if plane is None or plane.element_size() > 1 else plane.view(torch.uint8)


def test_a_layer_that_shares_a_cache_adds_nothing_to_the_pool():
    layers = [full(2, 4), full(2, 4, shares_layer=0), sliding(2, 4)]
    memory = TorchMemory(config(layers))
    assert memory.kv(0).data_ptr() == memory.kv(1).data_ptr() == memory.kv(2).data_ptr()
    assert memory.num_bytes == NUM_BLOCKS * BLOCK_SIZE * 2 * 4 * 2 * 4


def test_groups_of_other_block_sizes_keep_pools_of_their_own():
    memory = TorchMemory(config([full(2, 4), sliding(2, 4), full(2, 4), sliding(2, 4), StateSpec([(2, 2)])]))
    assert memory.group_num_blocks == (NUM_BLOCKS, NUM_BLOCKS, NUM_BLOCKS)
    assert memory.kv(0).data_ptr() == memory.kv(1).data_ptr()
    assert memory.states(4)[0].data_ptr() not in {memory.kv(layer).data_ptr() for layer in range(4)}
