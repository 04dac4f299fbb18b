import subprocess
import sys
from contextlib import suppress

import numpy as np
import pytest
import torch

from kvist.config import DTYPE_BYTES, AttentionSpec, CacheConfig, StateSpec
from kvist.core.moves import Move
from kvist.errors import ArgumentError, LayoutError
from kvist.memory import TorchMemory

NUM_BLOCKS, BLOCK_SIZE, HEADS, DIM = 6, 4, 2, 3
PLAIN = AttentionSpec(HEADS, DIM, dtype="float32")
both_orders = pytest.mark.parametrize("order", ["layer_major", "block_major"])
every_order = pytest.mark.parametrize("order", ["layer_major", "block_major", "heads_first"])


def arena(*layers, num_blocks=NUM_BLOCKS, **settings):
    return TorchMemory(CacheConfig(list(layers or [PLAIN]), num_blocks=num_blocks, block_size=BLOCK_SIZE, **settings))


def all_planes(memory):
    """Every plane of every layer, K and V apart."""
    planes = []
    for layer in range(memory.num_layers):
        try:
            planes += memory.states(layer)
        except LayoutError:
            planes.append(memory.keys(layer))
            with suppress(LayoutError):
                planes.append(memory.values(layer))
    return planes


def numbered(memory):
    """Fill every plane of `memory` with different numbers and return copies of them, layer by layer."""
    for index, plane in enumerate(all_planes(memory)):
        plane.copy_(torch.arange(plane.numel()).reshape(plane.shape) + 10_000 * index)
    return copies_of(memory)


def copies_of(memory):
    return [plane.clone() for plane in all_planes(memory)]


def alike(planes, others):
    return all(torch.equal(*pair) for pair in zip(planes, others, strict=True))


def rows(num_tokens, start=0, dim=DIM):
    return torch.arange(start, start + num_tokens * HEADS * dim, dtype=torch.float32).view(num_tokens, HEADS, dim)


def test_each_layer_is_one_contiguous_pool_with_k_before_v():
    memory = arena(PLAIN, AttentionSpec(1, 8, dtype="bfloat16"))
    pool = memory.kv(0)
    assert pool.shape == (2, NUM_BLOCKS, BLOCK_SIZE, HEADS, DIM)
    assert pool.is_contiguous()
    assert memory.keys(0).data_ptr() == pool.data_ptr()
    assert memory.values(0).data_ptr() == pool.data_ptr() + NUM_BLOCKS * BLOCK_SIZE * HEADS * DIM * 4
    assert memory.kv(1).shape == (2, NUM_BLOCKS, BLOCK_SIZE, 1, 8)
    assert memory.kv(1).dtype == torch.bfloat16
    assert memory.num_bytes == NUM_BLOCKS * BLOCK_SIZE * (2 * HEADS * DIM * 4 + 2 * 8 * 2)


def test_the_arena_starts_as_zeros_so_padding_is_finite():
    assert not any(plane.any() for plane in all_planes(arena(PLAIN, AttentionSpec(1, 8, "float32", value_head_dim=2))))


def test_keys_and_values_of_different_size_are_kept_apart():
    memory = arena(AttentionSpec(HEADS, DIM, dtype="float32", value_head_dim=5))
    assert memory.keys(0).shape == (NUM_BLOCKS, BLOCK_SIZE, HEADS, DIM)
    assert memory.values(0).shape == (NUM_BLOCKS, BLOCK_SIZE, HEADS, 5)
    with pytest.raises(LayoutError, match=r"keys of 3 and values of 5 .* use keys\(layer\) and values\(layer\)"):
        memory.kv(0)
    memory.write(0, rows(2), rows(2, dim=5), torch.tensor([0, 1]))
    keys, values = memory.gather(0, torch.tensor([[0]]), 2)
    assert torch.equal(keys[0], rows(2))
    assert torch.equal(values[0], rows(2, dim=5))


@every_order
def test_write_puts_each_token_in_its_slot_of_its_layer_only(order):
    memory = arena(PLAIN, PLAIN, storage_order=order)
    keys, values = rows(3), rows(3, start=100)
    memory.write(1, keys, values, torch.tensor([9, 4, 23]))
    expected = torch.zeros(NUM_BLOCKS * BLOCK_SIZE, HEADS, DIM)
    expected[[9, 4, 23]] = keys
    assert torch.equal(memory.keys(1).flatten(0, 1), expected)
    expected[[9, 4, 23]] = values
    assert torch.equal(memory.values(1).flatten(0, 1), expected)
    assert not memory.kv(0).any()


def test_write_takes_strided_rows_and_numpy_slots():
    memory = arena()
    heads_first = torch.randn(HEADS, 3, DIM)
    memory.write(0, heads_first.transpose(0, 1), heads_first.transpose(0, 1), torch.tensor([5, 6, 7]).numpy())
    assert torch.equal(memory.keys(0)[1, 1:], heads_first.transpose(0, 1))


@every_order
def test_negative_slots_are_skipped(order):
    memory = arena(storage_order=order)
    memory.write(0, rows(4), rows(4, start=50), torch.tensor([-1, 3, -7, 0]))
    assert torch.equal(
        memory.keys(0)[0], torch.stack([rows(4)[3], torch.zeros(HEADS, DIM), torch.zeros(HEADS, DIM), rows(4)[1]])
    )
    assert torch.equal(memory.values(0)[0, 3], rows(4, start=50)[1])
    assert not memory.kv(0)[:, 1:].any()


def test_a_write_of_nothing_or_of_skipped_tokens_changes_nothing():
    memory = arena()
    before = numbered(memory)
    memory.write(0, rows(0), rows(0), torch.tensor([], dtype=torch.int64))
    memory.write(0, rows(2), rows(2), torch.tensor([-1, -1]))
    assert alike(all_planes(memory), before)


@pytest.mark.parametrize(
    ("keys", "values", "slots", "error", "message"),
    [
        (rows(2), rows(2), torch.tensor([0, 24]), ArgumentError, "slot 24 is outside the layer's 24 slots"),
        (
            rows(2),
            rows(2),
            torch.tensor([0]),
            LayoutError,
            r"keys of layer 0 must be \[1, 2, 3\] for 1 slots, got \[2, 2, 3\]",
        ),
        (rows(2), rows(3), torch.tensor([0, 1]), LayoutError, "values of layer 0 must be"),
        (
            rows(2),
            rows(2).half(),
            torch.tensor([0, 1]),
            LayoutError,
            "as it is kept, torch.float32 on cpu, got torch.float16",
        ),
        (rows(2), rows(2), torch.tensor([0, 1], dtype=torch.int32), LayoutError, "slot_mapping must be int64"),
        (rows(2), rows(2), torch.tensor([[0, 1]]), LayoutError, "slot_mapping must be int64"),
    ],
)
def test_a_write_that_does_not_fit_is_refused_before_anything_is_written(keys, values, slots, error, message):
    memory = arena()
    before = numbered(memory)
    with pytest.raises(error, match=message):
        memory.write(0, keys, values, slots)
    assert alike(all_planes(memory), before)


@pytest.mark.parametrize("layer", [-1, 1])
def test_a_layer_that_is_not_there_is_refused(layer):
    with pytest.raises(ArgumentError, match=rf"layer must be in \[0, 1\), got {layer}"):
        arena().keys(layer)


@pytest.mark.parametrize("padding", [0, -1, 5, 2**31 - 1])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@every_order
def test_gather_follows_the_block_table_and_any_padding(padding, dtype, order):
    memory = arena(storage_order=order)
    numbered(memory)
    table = torch.tensor([[4, 1, 0], [2, padding, padding]], dtype=dtype)
    keys, values = memory.gather(0, table, 10)
    assert keys.shape == values.shape == (2, 10, HEADS, DIM)
    assert torch.equal(keys[0], memory.keys(0)[[4, 1, 0]].flatten(0, 1)[:10])
    assert torch.equal(values[1, :4], memory.values(0)[2])


def test_gather_copies():
    memory = arena()
    keys, _ = memory.gather(0, torch.tensor([[0]]), 4)
    keys.fill_(1)
    assert not memory.keys(0).any()


def test_gather_takes_read_only_numpy_and_reads_no_more_columns_than_it_needs():
    memory = arena()
    numbered(memory)
    table = np.array([[3, 99]], dtype=np.int32)
    table.flags.writeable = False
    keys, _ = memory.gather(0, table, 4)
    assert torch.equal(keys[0], memory.keys(0)[3])
    assert memory.gather(0, torch.tensor([[3]]), 0)[0].shape == (1, 0, HEADS, DIM)


@pytest.mark.parametrize(
    ("table", "max_len", "error"), [([[0, 1]], 9, ArgumentError), ([[0]], -1, ArgumentError), ([0, 1], 4, LayoutError)]
)
def test_a_gather_that_does_not_fit_is_refused(table, max_len, error):
    with pytest.raises(error, match="block_table"):
        arena().gather(0, torch.tensor(table), max_len)


@every_order
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_every_dtype_is_written_moved_and_gathered_bit_by_bit(dtype, order):
    memory = arena(AttentionSpec(HEADS, DIM, dtype=dtype), storage_order=order)
    values = rows(4).to(getattr(torch, dtype))
    memory.write(0, values, values, torch.tensor([8, 9, -1, 11]))
    memory.perform([Move(2, 5, 4)])
    keys, _ = memory.gather(0, torch.tensor([[5]]), 4)
    assert keys.dtype == values.dtype
    assert torch.equal(keys[0, [0, 1, 3]].float(), values[[0, 1, 3]].float())


@both_orders
def test_a_move_copies_its_first_tokens_in_all_layers_and_nothing_else(order):
    memory = arena(PLAIN, AttentionSpec(HEADS, DIM, dtype="float32", value_head_dim=5), storage_order=order)
    expected = numbered(memory)
    memory.perform([Move(source=1, destination=4, num_tokens=3)])
    for plane in expected:
        plane[4, :3] = plane[1, :3]
    assert alike(all_planes(memory), expected)


@pytest.mark.parametrize(
    "moves",
    [
        [Move(0, 1, 4), Move(1, 2, 4)],
        [Move(0, 1, 4), Move(2, 0, 4)],
        [Move(0, 1, 2), Move(2, 0, 4), Move(0, 3, 2)],
        [Move(0, 1, 4), Move(2, 1, 2)],
        [Move(3, 4, 2), Move(0, 1, 4), Move(2, 0, 2)],
        [Move(0, 1, 4), Move(0, 2, 4), Move(0, 3, 1)],
        [Move(2, 2, 3), Move(5, 1, 0)],
        [Move(0, 1, 3), Move(1, 0, 2), Move(0, 2, 4), Move(2, 1, 1), Move(1, 0, 4)],
    ],
    ids=str,
)
@both_orders
def test_moves_give_what_they_give_one_by_one(moves, order):
    memory = arena(PLAIN, PLAIN, storage_order=order)
    expected = numbered(memory)
    memory.perform(moves)
    for plane in expected:
        for move in moves:
            plane[move.destination, : move.num_tokens] = plane[move.source, : move.num_tokens].clone()
    assert alike(all_planes(memory), expected)


@pytest.mark.parametrize(
    "move",
    [
        Move(0, NUM_BLOCKS, 1),
        Move(-1, 0, 1),
        Move(0, 1, BLOCK_SIZE + 1),
        Move(0, 1, -1),
        Move(0, 1, 2, source_offset=3),
        Move(0, 1, 2, destination_offset=3),
        Move(0, 1, 1, source_offset=-1),
        Move(0, 1, 1, group=-1),
        Move(0, 1, 1, group=1),
        Move(0, 1, 1, source_tier="host"),
        Move(0, 1, 1, destination_tier="disk"),
    ],
    ids=str,
)
def test_a_move_that_leaves_the_arena_stops_all_of_them(move):
    memory = arena()
    before = numbered(memory)
    with pytest.raises(ArgumentError, match="Move"):
        memory.perform([Move(0, 1, 4), move])
    assert alike(all_planes(memory), before)


@every_order
def test_a_move_with_offsets_copies_these_token_rows_only(order):
    memory = arena(PLAIN, AttentionSpec(HEADS, DIM, dtype="float8_e5m2", value_head_dim=5), storage_order=order)
    expected = numbered(memory)
    memory.perform([Move(1, 4, 2, source_offset=2, destination_offset=1), Move(5, 5, 1, source_offset=3)])
    for plane in expected:
        plane[4, 1:3] = plane[1, 2:4]
        plane[5, 0] = plane[5, 3]
    assert alike(bits(all_planes(memory)), bits(expected))


def test_accepted_nodes_of_a_tree_move_up_to_their_places():
    # Verification wrote the root at position 6 and nodes 1 .. 5 at 7 .. 11; the path 0, 2, 3, 5 was accepted.
    memory = arena()
    keys, _ = numbered(memory)
    blocks, tokens = [3, 1, 4], keys.flatten(0, 1)
    moves = [
        Move(blocks[source // 4], blocks[target // 4], 1, source_offset=source % 4, destination_offset=target % 4)
        for target, source in [(7, 8), (8, 9), (9, 11)]
    ]
    memory.perform(moves)
    gathered, _ = memory.gather(0, torch.tensor([blocks]), 12)
    before = torch.cat([tokens[4 * block : 4 * block + 4] for block in blocks])
    assert torch.equal(gathered[0], before[[0, 1, 2, 3, 4, 5, 6, 8, 9, 11, 10, 11]])


def test_edge_llm_addresses_of_heterogeneous_layers():
    # Two sequences of 200 tokens in pages of 128: 4 pages, and 10 with 6 more to keep; V follows all of K.
    for num_pages in (4, 10):
        layers = [AttentionSpec(4, 64, "float16"), AttentionSpec(2, 128, "float16")]
        memory = TorchMemory(CacheConfig(layers, num_blocks=num_pages, block_size=128))
        for layer, (num_heads, dim) in enumerate([(4, 64), (2, 128)]):
            assert memory.kv(layer).shape == (2, num_pages, 128, num_heads, dim)
            distance = memory.values(layer).data_ptr() - memory.keys(layer).data_ptr()
            assert distance == num_pages * 128 * num_heads * dim * 2


def test_edge_llm_offset_of_fp8_values():
    memory = TorchMemory(CacheConfig([AttentionSpec(2, 64, "float8_e4m3fn")], num_blocks=6, block_size=128))
    assert memory.values(0).data_ptr() - memory.keys(0).data_ptr() == 6 * 128 * 2 * 64


def test_edge_llm_writes_across_the_edge_of_a_page_in_any_order_of_pages():
    memory = TorchMemory(CacheConfig([AttentionSpec(4, 64, "float32")], num_blocks=4, block_size=128))
    pages = np.array([[3, 2], [1, 0]])  # of two sequences, which go on at 126 and at 50
    positions = np.array([np.arange(126, 132), np.arange(50, 56)])
    slots = np.take_along_axis(pages, positions // 128, axis=1) * 128 + positions % 128
    slots[0, 2:] = -1  # as if the second page were not there
    keys, values = torch.randn(2, 12, 4, 64)
    memory.write(0, keys, values, slots.ravel())
    gathered, _ = memory.gather(0, pages, 256)
    assert torch.equal(gathered[0, 126:128], keys[:2])
    assert torch.equal(gathered[1, 50:56], keys[6:])
    assert torch.count_nonzero(memory.keys(0).any(-1).any(-1)) == 8


def test_edge_llm_sizes_of_a_snapshot():
    states = StateSpec([(2, 3, 4), (5, 6)], "float16")
    memory = TorchMemory(CacheConfig([AttentionSpec(1, 1)] + [states] * 2, num_blocks=[1, 8], block_size=1))
    assert memory.num_bytes == 4 + 8 * 216
    layers = [AttentionSpec(2, 4, "float16"), AttentionSpec(1, 8, "float16")]
    memory = TorchMemory(CacheConfig(layers, num_blocks=2, block_size=128))
    assert memory.num_bytes == 2 * 8192
    expected = numbered(memory)
    memory.perform([Move(0, 1, 17)])
    for plane in expected:
        plane[1, :17] = plane[0, :17]
    assert alike(all_planes(memory), expected)


# ---- groups ---------------------------------------------------------------------------------------------------------

SLIDING = AttentionSpec(HEADS, DIM, dtype="float32", sliding_window=6)
KEYS_ONLY = AttentionSpec(1, 5, dtype="float32", value_head_dim=0)
STATE = StateSpec([(2, 3), (4,)], dtype=["float32", "bfloat16"])


def bits(planes):
    """Planes of 8-bit floats as bytes, which torch can compare."""
    return [plane.view(torch.uint8) if plane.element_size() == 1 else plane for plane in planes]


def test_each_layer_has_as_many_blocks_as_its_group():
    memory = arena(SLIDING, PLAIN, STATE, num_blocks=[6, 3, 2])
    assert memory.group_num_blocks == (6, 3, 2)
    assert memory.kv(0).shape == (2, 3, BLOCK_SIZE, HEADS, DIM)
    assert memory.kv(1).shape == (2, 6, BLOCK_SIZE, HEADS, DIM)
    assert [state.shape for state in memory.states(2)] == [(2, 2, 3), (2, 4)]
    assert memory.num_bytes == 9 * BLOCK_SIZE * 2 * HEADS * DIM * 4 + 2 * (6 * 4 + 4 * 2)


def test_slots_and_blocks_are_checked_against_the_group_of_the_layer():
    memory = arena(SLIDING, PLAIN, num_blocks=[6, 3])
    numbered(memory)
    memory.write(1, rows(1), rows(1), torch.tensor([23]))
    with pytest.raises(ArgumentError, match="slot 12 is outside the layer's 12 slots"):
        memory.write(0, rows(1), rows(1), torch.tensor([12]))
    memory.perform([Move(5, 0, 4, group=0)])
    with pytest.raises(ArgumentError, match="names block 3 of device, where group 1 has blocks 0 to 2"):
        memory.perform([Move(0, 3, 4, group=1)])
    with pytest.raises(ArgumentError, match="names group 2, but there are 2 groups"):
        memory.perform([Move(0, 1, 4, group=2)])
    keys, _ = memory.gather(0, torch.tensor([[5]]), 4)
    assert torch.equal(keys[0], memory.keys(0)[2])


@pytest.mark.parametrize(
    "span",
    [
        {"sliding_window": 6},
        {"sliding_window": 6, "sink_tokens": 2},
        {"chunk_tokens": 8},
        {"cross": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("ring", [False, True])
def test_k_and_v_are_kept_alike_whatever_part_of_the_past_is_seen(span, ring):
    memory = arena(PLAIN, AttentionSpec(HEADS, DIM, dtype="float32", **span), num_blocks=[3, 5], ring=ring)
    memory.write(1, rows(2), rows(2, start=50), torch.tensor([19, 0]))
    memory.perform([Move(4, 2, 4, group=1)])
    keys, values = memory.gather(1, torch.tensor([[2]]), 4)
    assert torch.equal(keys[0, 3], rows(2)[0])
    assert torch.equal(values[0, 3], rows(2, start=50)[0])
    assert not memory.kv(0).any()


def test_a_window_is_gathered_from_the_columns_that_are_held():
    memory = arena(SLIDING)
    numbered(memory)
    whole_table, first_held = torch.tensor([[0, 0, 5, 1]]), 2
    keys, _ = memory.gather(0, whole_table[:, first_held:], 7)
    assert torch.equal(keys[0], memory.keys(0)[[5, 1]].flatten(0, 1)[:7])


@both_orders
def test_a_move_copies_in_the_layers_of_its_group_only(order):
    memory = arena(SLIDING, PLAIN, STATE, SLIDING, storage_order=order)
    expected = numbered(memory)
    memory.perform([Move(1, 2, 3, group=1), Move(0, 4, BLOCK_SIZE, group=2)])
    for plane in [*expected[0:2], *expected[6:8]]:
        plane[2, :3] = plane[1, :3]
    for plane in expected[4:6]:
        plane[4] = plane[0]
    assert alike(all_planes(memory), expected)


def test_reading_by_slot_gives_what_was_written_there():
    memory = arena(PLAIN, KEYS_ONLY)
    numbered(memory)
    keys, values = memory.read(0, np.array([9, 9, 3, -5, 400]))
    assert torch.equal(keys, memory.keys(0).flatten(0, 1)[[9, 9, 3, 0, 23]])
    assert torch.equal(values, memory.values(0).flatten(0, 1)[[9, 9, 3, 0, 23]])
    keys, values = memory.read(1, torch.tensor([2], dtype=torch.int32))
    assert torch.equal(keys, memory.keys(1).flatten(0, 1)[[2]])
    assert values is None


def test_a_layer_that_keeps_keys_only_has_no_values():
    memory = arena(KEYS_ONLY)
    keys = torch.randn(2, 1, 5)
    memory.write(0, keys, None, torch.tensor([4, 9]))
    memory.perform([Move(1, 3, 2)])
    gathered, values = memory.gather(0, torch.tensor([[3, 2]]), 6)
    assert torch.equal(gathered[0, [0, 5]], keys)
    assert values is None
    assert memory.num_bytes == NUM_BLOCKS * BLOCK_SIZE * 5 * 4
    with pytest.raises(LayoutError, match=r"layer 0 keeps keys only, there are no values; use keys\(layer\)"):
        memory.values(0)
    with pytest.raises(LayoutError, match=r"keys of 5 and values of 0 .* use keys\(layer\)$"):
        memory.kv(0)
    with pytest.raises(LayoutError, match=r"layer 0 keeps keys only: values must be None, got \[2, 1, 5\]"):
        memory.write(0, keys, keys, torch.tensor([4, 9]))


def test_values_are_asked_for_where_they_are_kept():
    with pytest.raises(LayoutError, match=r"values of layer 0 must be \[1, 2, 3\] for 1 slots, got None"):
        arena().write(0, rows(1), None, torch.tensor([0]))


def test_a_layer_that_shares_a_cache_shows_that_of_its_donor_and_is_not_written():
    memory = arena(AttentionSpec(HEADS, DIM, dtype="float32", shares_layer=1), PLAIN)
    assert memory.num_layers == 2
    assert memory.num_bytes == arena().num_bytes
    memory.write(1, rows(2), rows(2, start=50), torch.tensor([0, 1]))
    memory.perform([Move(0, 2, 1)])
    assert memory.kv(0).data_ptr() == memory.kv(1).data_ptr()
    assert alike(memory.gather(0, torch.tensor([[2]]), 4), memory.gather(1, torch.tensor([[2]]), 4))
    assert torch.equal(memory.keys(0)[2, 0], rows(2)[0])
    with pytest.raises(LayoutError, match=r"layer 0 reads the cache of layer 1 .* only layer 1 is written"):
        memory.write(0, rows(2), rows(2), torch.tensor([0, 1]))


# ---- states ---------------------------------------------------------------------------------------------------------


def states(num_blocks, start=0):
    first = torch.arange(start, start + num_blocks * 6, dtype=torch.float32).view(num_blocks, 2, 3)
    return first, torch.arange(num_blocks * 4).view(num_blocks, 4).to(torch.bfloat16) + 1


def test_states_begin_as_zeros_of_their_own_shapes_and_dtypes():
    first, second = arena(PLAIN, STATE).states(1)
    assert (first.shape, first.dtype) == ((NUM_BLOCKS, 2, 3), torch.float32)
    assert (second.shape, second.dtype) == ((NUM_BLOCKS, 4), torch.bfloat16)
    assert not first.any()
    assert not second.any()


@every_order
def test_states_are_written_read_and_cleared_by_block(order):
    memory = arena(STATE, PLAIN, STATE, storage_order=order)
    memory.write_states(2, np.array([4, -1, 0], dtype=np.int32), states(3))
    assert alike(memory.read_states(2, torch.tensor([4, 0])), [state[[0, 2]] for state in states(3)])
    assert not any(state.any() for state in memory.states(0))
    memory.write_states(0, torch.tensor([4, 3]), states(2, start=9))
    memory.clear_states([4, -1])
    assert not any(state[[1, 2, 4, 5]].any() for layer in (0, 2) for state in memory.states(layer))
    assert alike(memory.read_states(2, [0]), [state[[2]] for state in states(3)])
    assert alike(memory.read_states(0, [3]), [state[[1]] for state in states(2, start=9)])


@pytest.mark.parametrize("blocks", [[], np.empty(0, np.int32), [-1, -1]], ids=str)
def test_states_of_no_block_are_none(blocks):
    memory = arena(STATE)
    before = numbered(memory)
    memory.write_states(0, blocks, states(len(blocks)))
    memory.clear_states(blocks)
    assert [len(state) for state in memory.read_states(0, blocks)] == [len(blocks)] * 2
    assert alike(all_planes(memory), before)


def test_reading_states_copies_and_takes_any_padding():
    memory = arena(STATE)
    numbered(memory)
    first, _ = memory.read_states(0, np.array([5, -3, 77]))
    assert torch.equal(first, memory.states(0)[0][[5, 0, 5]])
    first.fill_(-1)
    assert memory.states(0)[0].min() == 0


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_states_of_every_dtype_are_moved_and_cleared_bit_by_bit(dtype):
    memory = arena(PLAIN, StateSpec([(2, 3)], dtype))
    state = torch.arange(1, 13, dtype=torch.float32).view(2, 2, 3).to(getattr(torch, dtype))
    memory.write_states(1, [0, 3], [state])
    memory.perform([Move(3, 5, BLOCK_SIZE, group=1)])
    memory.clear_states([3])
    (found,) = memory.read_states(1, [0, 3, 5])
    assert found.dtype == state.dtype
    assert torch.equal(found.float(), torch.stack([state[0], torch.zeros(2, 3).to(state.dtype), state[1]]).float())


@pytest.mark.parametrize(
    ("blocks", "new", "error", "message"),
    [
        ([0, 6], states(2), ArgumentError, "block 6 is outside the layer's 6 blocks"),
        ([0, 1], states(1), LayoutError, r"state 0 of layer 1 must be \[2, 2, 3\] for 2 blocks, got \[1, 2, 3\]"),
        ([0], states(1)[:1], LayoutError, "layer 1 keeps 2 tensors of each state, got 1"),
        ([0], [states(1)[0], states(1)[1].half()], LayoutError, "state 1 of layer 1 must be as it is kept, torch.bfl"),
        ([0.5], states(1), LayoutError, r"blocks must be int32 or int64 \[B\], got torch.float32 \[1\]"),
        ([[0]], states(1), LayoutError, r"blocks must be int32 or int64 \[B\], got torch.int64 \[1, 1\]"),
    ],
)
def test_states_that_do_not_fit_are_refused_before_anything_is_written(blocks, new, error, message):
    memory = arena(PLAIN, STATE)
    before = numbered(memory)
    with pytest.raises(error, match=message):
        memory.write_states(1, blocks, new)
    assert alike(all_planes(memory), before)


def test_clearing_checks_its_blocks_first():
    memory = arena(STATE, PLAIN, STATE)
    before = numbered(memory)
    with pytest.raises(ArgumentError, match="block 6 is outside the layer's 6 blocks"):
        memory.clear_states([0, 6])
    assert alike(all_planes(memory), before)
    with pytest.raises(LayoutError, match="no layer keeps states"):
        arena().clear_states([0])


def test_a_state_is_moved_whole():
    memory = arena(PLAIN, STATE)
    numbered(memory)
    memory.perform([Move(0, 1, 3, group=1)])
    assert all(torch.equal(state[0], state[1]) for state in memory.states(1))
    with pytest.raises(ArgumentError, match="copies single tokens, but group 1 keeps states"):
        memory.perform([Move(0, 1, 1, group=1, source_offset=1)])


def test_states_and_kv_are_told_apart():
    memory = arena(PLAIN, STATE)
    for act in (memory.kv, memory.keys, memory.values):
        with pytest.raises(LayoutError, match=r"layer 1 keeps states, not K and V; use states\(layer\)"):
            act(1)
    with pytest.raises(LayoutError, match=r"layer 0 keeps K and V, no states; use keys\(layer\)"):
        memory.states(0)


def test_sync_on_cpu_has_nothing_to_wait_for():
    memory = arena()
    memory.perform([Move(0, 1, 1)])
    memory.sync()
    assert memory.device == torch.device("cpu")


def test_without_torch_the_arena_names_the_extra_that_brings_it():
    program = "import sys; sys.modules['torch'] = None; import kvist.memory; kvist.memory.TorchMemory"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: TorchMemory needs torch: pip install 'kvist[torch]'"
    )
