import subprocess
import sys

import numpy as np
import pytest
import torch

from kvist.config import DTYPE_BYTES, AttentionSpec, CacheConfig
from kvist.core.moves import Move
from kvist.errors import ArgumentError, LayoutError
from kvist.memory import TorchMemory
from kvist.memory.arena import _batches, _scatter_rows

NUM_BLOCKS, BLOCK_SIZE, HEADS, DIM = 6, 4, 2, 3
PLAIN = AttentionSpec(HEADS, DIM, dtype="float32")


def arena(*layers, num_blocks=NUM_BLOCKS):
    return TorchMemory(CacheConfig(list(layers or [PLAIN]), num_blocks=num_blocks, block_size=BLOCK_SIZE))


def numbered(memory):
    """Fill every plane of `memory` with different numbers and return copies of them, layer by layer."""
    planes = []
    for layer in range(memory.num_layers):
        for plane in (memory.keys(layer), memory.values(layer)):
            plane.copy_(torch.arange(plane.numel()).reshape(plane.shape) + 10_000 * len(planes))
            planes.append(plane.clone())
    return planes


def all_planes(memory):
    return [plane for layer in range(memory.num_layers) for plane in (memory.keys(layer), memory.values(layer))]


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


def test_write_puts_each_token_in_its_slot_of_its_layer_only():
    memory = arena(PLAIN, PLAIN)
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


def test_negative_slots_are_skipped():
    memory = arena()
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
    assert all(torch.equal(*pair) for pair in zip(all_planes(memory), before, strict=True))


@pytest.mark.parametrize("slots", [[-1, 3, -7, 0], [2, -1], [-1, -2], [1, 0], [], [5, -1, 0]])
def test_the_write_that_never_waits_for_the_device_equals_the_checked_one(slots):
    memory = arena()
    (keys, _), new = numbered(memory), rows(len(slots), start=7000)
    memory.write(0, new, new, torch.tensor(slots, dtype=torch.int64))
    plane = keys.flatten(0, 1).clone()
    _scatter_rows(plane, torch.tensor(slots, dtype=torch.int64), new)
    assert torch.equal(plane, memory.keys(0).flatten(0, 1))


@pytest.mark.parametrize(
    ("keys", "values", "slots", "error", "message"),
    [
        (rows(2), rows(2), torch.tensor([0, 24]), ArgumentError, "slot 24 is outside the arena's 24 slots"),
        (
            rows(2),
            rows(2),
            torch.tensor([0]),
            LayoutError,
            r"keys of layer 0 must be \[1, 2, 3\] for 1 slots, got \[2, 2, 3\]",
        ),
        (rows(2), rows(3), torch.tensor([0, 1]), LayoutError, "values of layer 0 must be"),
        (rows(2), rows(2).half(), torch.tensor([0, 1]), LayoutError, "kept as torch.float32 on cpu, got torch.float16"),
        (rows(2), rows(2), torch.tensor([0, 1], dtype=torch.int32), LayoutError, "slot_mapping must be int64"),
        (rows(2), rows(2), torch.tensor([[0, 1]]), LayoutError, "slot_mapping must be int64"),
    ],
)
def test_a_write_that_does_not_fit_is_refused_before_anything_is_written(keys, values, slots, error, message):
    memory = arena()
    before = numbered(memory)
    with pytest.raises(error, match=message):
        memory.write(0, keys, values, slots)
    assert all(torch.equal(*pair) for pair in zip(all_planes(memory), before, strict=True))


@pytest.mark.parametrize("layer", [-1, 1])
def test_a_layer_that_is_not_there_is_refused(layer):
    with pytest.raises(ArgumentError, match=rf"layer must be in \[0, 1\), got {layer}"):
        arena().keys(layer)


@pytest.mark.parametrize("padding", [0, -1, 5, 2**31 - 1])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_gather_follows_the_block_table_and_any_padding(padding, dtype):
    memory = arena()
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


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_every_dtype_is_written_moved_and_gathered_bit_by_bit(dtype):
    memory = arena(AttentionSpec(HEADS, DIM, dtype=dtype))
    values = rows(4).to(getattr(torch, dtype))
    memory.write(0, values, values, torch.tensor([8, 9, -1, 11]))
    memory.perform([Move(2, 5, 4)])
    keys, _ = memory.gather(0, torch.tensor([[5]]), 4)
    assert keys.dtype == values.dtype
    assert torch.equal(keys[0, [0, 1, 3]].float(), values[[0, 1, 3]].float())


def test_a_move_copies_its_first_tokens_in_all_layers_and_nothing_else():
    memory = arena(PLAIN, AttentionSpec(HEADS, DIM, dtype="float32", value_head_dim=5))
    expected = numbered(memory)
    memory.perform([Move(source=1, destination=4, num_tokens=3)])
    for plane in expected:
        plane[4, :3] = plane[1, :3]
    assert all(torch.equal(*pair) for pair in zip(all_planes(memory), expected, strict=True))


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
def test_moves_give_what_they_give_one_by_one(moves):
    memory = arena(PLAIN, PLAIN)
    expected = numbered(memory)
    memory.perform(moves)
    for plane in expected:
        for move in moves:
            plane[move.destination, : move.num_tokens] = plane[move.source, : move.num_tokens].clone()
    assert all(torch.equal(*pair) for pair in zip(all_planes(memory), expected, strict=True))


def test_moves_without_a_hazard_are_copied_together():
    moves = [Move(0, 1, 4), Move(0, 2, 4), Move(3, 4, 4)]
    assert list(_batches(moves)) == [([0, 0, 3], [1, 2, 4], 4)]
    assert list(_batches([*moves, Move(4, 5, 2)])) == [([0, 0, 3], [1, 2, 4], 4), ([4], [5], 2)]


@pytest.mark.parametrize(
    "move",
    [
        Move(0, NUM_BLOCKS, 1),
        Move(-1, 0, 1),
        Move(0, 1, BLOCK_SIZE + 1),
        Move(0, 1, -1),
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
    assert all(torch.equal(*pair) for pair in zip(all_planes(memory), before, strict=True))


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
