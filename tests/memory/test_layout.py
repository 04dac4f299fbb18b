"""Which bytes of a block are whose, and blocks as bytes: read, written, the same in both orders of storage."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvist.config import DTYPES, AttentionSpec, CacheConfig, StateSpec, dtype_bytes
from kvist.errors import ArgumentError, ConfigError, LayoutError
from kvist.memory import TorchMemory
from kvist.memory.layout import layouts, owner_of
from kvist.planning import layer_bytes, layers_of_model, pool_bytes

N, P = 5, 4
ORDERS = ["layer_major", "block_major"]
MIXED = [
    AttentionSpec(2, 3, "float16"),
    AttentionSpec(1, 8, "float8_e4m3fn", sliding_window=6, k_scale=0.5, v_scale=2.0),
    AttentionSpec(2, 6, "int4", value_head_dim=2),
    StateSpec([(3, 5), (7,)], ["float32", "bfloat16"]),
    AttentionSpec(1, 5, "int8", value_head_dim=0),
    AttentionSpec(2, 3, "float16", shares_layer=0),
    AttentionSpec(1, 8, "float8_e4m3fn", sliding_window=6, k_scale=0.5, v_scale=2.0),
]


def config(layers=MIXED, order="layer_major", **more):
    return CacheConfig(layers, **({"num_blocks": N, "block_size": P, "storage_order": order} | more))


def filled(chosen):
    """A memory whose every plane has bytes of its own."""
    memory = TorchMemory(chosen)
    for group, layout in enumerate(memory.layouts):
        for plane, held in zip(layout.planes, memory.plane_bytes(group), strict=True):
            count = torch.arange(held.numel()).view(held.shape)
            held.copy_((count * 7 + 31 * plane.layer + len(plane.name)) % 251)
    return memory


# ---- layouts --------------------------------------------------------------------------------------------------------


def test_planes_follow_one_another_by_layer_and_begin_at_multiples_of_16():
    full, sliding, state = layouts(config())
    assert [(plane.layer, plane.name, plane.offset, plane.num_bytes) for plane in full.planes] == [
        (0, "keys", 0, 48),
        (0, "values", 48, 48),
        (2, "keys", 96, 24),
        (2, "values", 128, 8),
        (4, "keys", 144, 20),
    ]
    assert full.offsets == (0, 48, 96, 128, 144)
    assert (full.num_bytes, full.is_dense) == (176, False)
    assert [(plane.layer, plane.offset) for plane in sliding.planes] == [(1, 0), (1, 32), (6, 64), (6, 96)]
    assert (sliding.num_bytes, sliding.is_dense) == (128, True)
    assert [(plane.name, plane.dtype, plane.shape, plane.offset) for plane in state.planes] == [
        ("state 0", "float32", (3, 5), 0),
        ("state 1", "bfloat16", (7,), 64),
    ]
    assert state.num_bytes == 80


def test_a_layer_that_shares_a_cache_has_no_bytes():
    assert 5 not in {plane.layer for layout in layouts(config()) for plane in layout.planes}
    assert [owner_of(config(), layer) for layer in (0, 5, 3)] == [0, 0, 3]


def test_the_first_tokens_of_a_plane_are_its_first_bytes_but_of_states_and_4_bits():
    planes = {(plane.layer, plane.name): plane for layout in layouts(config()) for plane in layout.planes}
    assert {name: plane.token_bytes for name, plane in planes.items()} == {
        (0, "keys"): 12, (0, "values"): 12, (1, "keys"): 8, (1, "values"): 8, (2, "keys"): 0, (2, "values"): 0,
        (3, "state 0"): 0, (3, "state 1"): 0, (4, "keys"): 5, (6, "keys"): 8, (6, "values"): 8,
    }  # fmt: skip
    assert [layout.moves_whole for layout in layouts(config())] == [True, False, True]


@pytest.mark.parametrize("dtype", DTYPES)
def test_planes_say_as_what_array_they_are_stored(dtype):
    (layout,) = layouts(config([AttentionSpec(2, 6, dtype)]))
    plane = layout.planes[0]
    packed = dtype in ("int4", "uint4")
    assert plane.shape == (P, 2, 6)
    assert (plane.stored_dtype, plane.stored_shape) == ("uint8" if packed else dtype, (P, 2, 3 if packed else 6))
    held = TorchMemory(config([AttentionSpec(2, 6, dtype)])).keys(0)
    assert (str(held.dtype), held.shape[1:]) == (f"torch.{plane.stored_dtype}", plane.stored_shape)
    assert plane.num_bytes == held[0].nbytes == P * 2 * dtype_bytes(dtype, 6)


def test_edge_llms_partial_page_of_two_layers_takes_8192_bytes_and_a_snapshot_216():
    layers = [AttentionSpec(2, 4, "float16"), AttentionSpec(1, 8, "float16")]
    (page,) = layouts(config(layers, block_size=128))
    assert page.num_bytes == 8192
    (slot,) = layouts(config([StateSpec([(2, 3, 4), (5, 6)], "float16")] * 2))
    assert sum(plane.num_bytes for plane in slot.planes) == 216
    assert slot.num_bytes == 2 * (48 + 64)


def test_a_description_is_json_and_equal_where_bytes_mean_the_same():
    first, other = layouts(config())[1], layouts(config(order="block_major", num_blocks=9))[1]
    assert json.loads(json.dumps(first.describe())) == {
        "block_size": 4,
        "num_bytes": 128,
        "planes": [
            {"layer": 1, "name": "keys", "dtype": "float8_e4m3fn", "shape": [4, 1, 8], "offset": 0, "scale": 0.5},
            {"layer": 1, "name": "values", "dtype": "float8_e4m3fn", "shape": [4, 1, 8], "offset": 32, "scale": 2.0},
            {"layer": 6, "name": "keys", "dtype": "float8_e4m3fn", "shape": [4, 1, 8], "offset": 64, "scale": 0.5},
            {"layer": 6, "name": "values", "dtype": "float8_e4m3fn", "shape": [4, 1, 8], "offset": 96, "scale": 2.0},
        ],
    }
    assert first.fingerprint == other.fingerprint
    assert len(first.fingerprint) == 32


@pytest.mark.parametrize(
    "change",
    [{"dtype": "float8_e5m2"}, {"k_scale": 0.25}, {"v_scale": 1.0}, {"head_dim": 4, "num_kv_heads": 2}],
    ids=str,
)
def test_bytes_that_mean_something_else_have_another_fingerprint(change):
    layers = [replace(layer, **change) if index in (1, 6) else layer for index, layer in enumerate(MIXED)]
    assert layouts(config(layers))[1].num_bytes == layouts(config())[1].num_bytes
    assert layouts(config(layers))[1].fingerprint != layouts(config())[1].fingerprint
    assert layouts(config(layers))[0].fingerprint == layouts(config())[0].fingerprint


def test_layouts_need_no_torch():
    program = "import sys; sys.modules['torch'] = None; from kvist.memory.layout import layouts"
    subprocess.run([sys.executable, "-c", program], check=True)


# ---- settings -------------------------------------------------------------------------------------------------------


def test_every_problem_of_dtypes_scales_and_order_is_told_at_once():
    layers = [
        AttentionSpec(1, 5, "int4", value_head_dim=3, k_scale=0),
        AttentionSpec(1, 4, "float16", k_scale=0.5, v_scale=float("nan")),
        AttentionSpec(1, 4, "fp8", v_scale="2"),
        StateSpec([(2,)], "int4"),
        AttentionSpec(1, 4, "uint4", k_scale=float("inf"), v_scale=True),
    ]
    with pytest.raises(ConfigError) as caught:
        config(layers, order="token_major").validate()
    assert caught.value.problems == [
        "layers[0]: head_dim is 5, must be even, since int4 lies two to a byte",
        "layers[0]: value_head_dim is 3, must be even, since int4 lies two to a byte",
        "layers[0]: k_scale is 0, must be a positive finite number",
        "layers[1]: k_scale is 0.5, but float16 is kept as it is, without a scale",
        "layers[1]: v_scale is nan, must be a positive finite number",
        f"layers[2]: dtype is 'fp8', must be one of {', '.join(DTYPES)}",
        "layers[2]: v_scale is '2', must be a positive finite number",
        f"layers[3]: dtype is 'int4', must be one of {', '.join(DTYPES[:-2])}",
        "layers[4]: k_scale is inf, must be a positive finite number",
        "layers[4]: v_scale is True, must be a positive finite number",
        "storage_order is 'token_major', must be one of layer_major, block_major, heads_first",
    ]


def test_layers_share_a_cache_only_with_the_same_scales():
    layers = [AttentionSpec(1, 4, "int8", k_scale=0.5), AttentionSpec(1, 4, "int8", shares_layer=0)]
    with pytest.raises(ConfigError, match=r"layers\[1\]: differs from layers\[0\], whose cache it shares"):
        config(layers).validate()


@pytest.mark.parametrize(("dtype", "size"), [("int4", 2 * 2 * 64), ("uint4", 2 * 2 * 64), ("int8", 2 * 2 * 128)])
def test_plans_count_two_numbers_of_4_bits_to_a_byte(dtype, size):
    layer = AttentionSpec(2, 128, dtype)
    assert layer.token_bytes == size
    chosen = CacheConfig([layer] * 3, block_size=16, memory="1 MiB")
    assert chosen.group_num_blocks == (2**20 // (16 * 3 * size),)
    assert pool_bytes(chosen) == (chosen.group_num_blocks[0] * 16 * 3 * size,)
    assert [(one.key_bytes, one.value_bytes) for one in layer_bytes(chosen)] == [(size // 2, size // 2)] * 3
    assert TorchMemory(chosen).num_bytes == pool_bytes(chosen)[0]


def test_a_model_with_4_bits_of_k_and_v_keeps_its_states_as_they_were():
    settings = {
        "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8, "dtype": "bfloat16", "hidden_size": 32,
        "layer_types": ["full_attention", "conv"], "conv_L_cache": 3,
    }  # fmt: skip
    attention, state = layers_of_model(settings, dtype="int4")
    assert attention.dtype == "int4"
    assert state.dtypes == ("bfloat16",)
    config([attention, state]).validate()


# ---- planes as bytes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_planes_as_bytes_are_the_storage_in_the_order_of_the_layout(order):
    memory = TorchMemory(config(order=order))
    for group, layout in enumerate(memory.layouts):
        planes = memory.plane_bytes(group)
        assert [(len(held), held.shape[1]) for held in planes] == [(N, plane.num_bytes) for plane in layout.planes]
        for plane, held in zip(layout.planes, planes, strict=True):
            assert (held.dtype, held.stride(1)) == (torch.uint8, 1)
            assert held.stride(0) == (plane.num_bytes if order == "layer_major" else layout.num_bytes)
            assert held.data_ptr() == held_by(memory, plane).data_ptr()


def held_by(memory, plane):
    if plane.name.startswith("state"):
        return memory.states(plane.layer)[int(plane.name.split()[1])]
    return memory.keys(plane.layer) if plane.name == "keys" else memory.values(plane.layer)


def test_in_block_major_storage_a_block_is_one_row_of_bytes():
    memory = filled(config(order="block_major"))
    for group, layout in enumerate(memory.layouts):
        rows = memory.block_rows(group)
        assert rows.shape == (N, layout.num_bytes)
        assert rows.is_contiguous()
        for plane, held in zip(layout.planes, memory.plane_bytes(group), strict=True):
            assert held.data_ptr() == rows.data_ptr() + plane.offset
            assert torch.equal(rows[:, plane.offset : plane.offset + plane.num_bytes], held)
    assert memory.num_bytes == N * sum(layout.num_bytes for layout in memory.layouts)


def test_in_layer_major_storage_layers_lie_apart():
    memory = TorchMemory(config())
    with pytest.raises(LayoutError, match=r"group 0 lie apart.*storage_order='block_major'; use plane_bytes\(group\)"):
        memory.block_rows(0)


def test_a_single_plane_of_whole_steps_is_a_row_in_any_order():
    memory = filled(config([AttentionSpec(1, 8, "float16", value_head_dim=0)]))
    assert memory.block_rows(0).data_ptr() == memory.keys(0).data_ptr()
    assert torch.equal(memory.read_blocks(0, [3]), memory.plane_bytes(0)[0][[3]])
    memory = filled(config([AttentionSpec(1, 5, "float16", value_head_dim=0)]))
    assert [plane.shape for plane in memory.plane_bytes(0)] == [(N, 40)]
    assert memory.read_blocks(0, [3]).shape == (1, 48)
    with pytest.raises(LayoutError, match="lie apart"):
        memory.block_rows(0)


def test_groups_that_share_a_block_major_pool_lie_in_the_same_rows():
    layers = [AttentionSpec(2, 4, "float32"), AttentionSpec(2, 4, "float32", sliding_window=6), StateSpec([(16, 4)])]
    memory = TorchMemory(config(layers, "block_major", shared_pool=True))
    assert len({memory.block_rows(group).data_ptr() for group in range(3)}) == 1
    assert memory.num_bytes == N * 256


def test_rows_of_a_shared_pool_are_as_long_as_the_longest_layout_and_each_group_sees_its_own():
    layers = [AttentionSpec(2, 5, "int8", value_head_dim=3), StateSpec([(60,), (4,)], "int8")]
    memory = TorchMemory(config(layers, "block_major", shared_pool=True))
    assert [layout.num_bytes for layout in memory.layouts] == [80, 80]
    layers = [AttentionSpec(2, 5, "int8", value_head_dim=3), StateSpec([(20,), (20,), (24,)], "int8")]
    memory = TorchMemory(config(layers, "block_major", shared_pool=True))
    assert [layout.num_bytes for layout in memory.layouts] == [80, 96]
    assert [memory.block_rows(group).shape for group in range(2)] == [(N, 80), (N, 96)]
    assert memory.keys(0).stride(0) == 96


# ---- reading and writing blocks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ids", [[3, 0], [4], [], np.array([1, 2, 0], np.int32), torch.tensor([2, 4])], ids=str)
def test_blocks_are_read_as_the_layout_says_whatever_the_order(order, ids):
    memory = filled(config(order=order))
    for group, layout in enumerate(memory.layouts):
        rows = memory.read_blocks(group, ids)
        assert (rows.shape, rows.dtype, rows.is_contiguous()) == ((len(ids), layout.num_bytes), torch.uint8, True)
        expected = torch.zeros_like(rows)
        for plane, held in zip(layout.planes, memory.plane_bytes(group), strict=True):
            expected[:, plane.offset : plane.offset + plane.num_bytes] = held[torch.as_tensor(ids, dtype=torch.int64)]
        assert torch.equal(rows, expected)


@pytest.mark.parametrize("shared_pool", [False, True])
def test_blocks_go_from_one_order_to_the_other_and_back_byte_by_byte(shared_pool):
    there, back = filled(config(shared_pool=shared_pool)), TorchMemory(config(shared_pool=shared_pool))
    between = TorchMemory(config(order="block_major", shared_pool=shared_pool))
    for group in range(3):
        between.write_blocks(group, [4, 0, 2], there.read_blocks(group, [0, 1, 3]))
        back.write_blocks(group, [0, 1, 3], between.read_blocks(group, [4, 0, 2]))
        for found, expected in zip(back.plane_bytes(group), there.plane_bytes(group), strict=True):
            assert torch.equal(found[[0, 1, 3]], expected[[0, 1, 3]])
            assert not found[[2, 4]].any()


@pytest.mark.parametrize("order", ORDERS)
def test_what_lies_between_planes_is_neither_read_nor_written(order):
    memory = TorchMemory(config(order=order))
    full = memory.layouts[0]
    memory.write_blocks(0, [1], torch.full((1, full.num_bytes), 255, dtype=torch.uint8))
    row = memory.read_blocks(0, [1])[0]
    assert int((row == 255).sum()) == sum(plane.num_bytes for plane in full.planes) == 148
    assert int((row == 0).sum()) == 176 - 148


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_that_do_not_fit_are_refused_before_anything_is_written(order):
    memory = filled(config(order=order))
    before = memory.read_blocks(0, range(N))
    row = torch.zeros((1, 176), dtype=torch.uint8)
    for blocks, rows, error, message in [
        ([5], row, ArgumentError, "block 5 is outside group 0 of blocks 0 to 4"),
        ([-1], row, ArgumentError, "block -1 is outside group 0"),
        ([1, 1], row.expand(2, -1), ArgumentError, r"blocks \[1, 1\] must be all different"),
        ([1], row[:, :-1], LayoutError, r"rows must be torch.uint8 \[1, 176\], got torch.uint8 \[1, 175\]"),
        ([1, 2], row, LayoutError, r"rows must be torch.uint8 \[2, 176\]"),
        ([1], row.float(), LayoutError, r"got torch.float32 \[1, 176\]"),
        ([[1]], row, LayoutError, r"blocks must be int32 or int64 \[B\]"),
    ]:
        with pytest.raises(error, match=message):
            memory.write_blocks(0, blocks, rows)
    assert torch.equal(memory.read_blocks(0, range(N)), before)


@pytest.mark.parametrize("group", [-1, 3])
def test_a_group_that_is_not_there_is_refused(group):
    memory = TorchMemory(config())
    for act in (memory.plane_bytes, memory.block_rows, lambda group: memory.read_blocks(group, [0])):
        with pytest.raises(ArgumentError, match=rf"group must be in \[0, 3\), got {group}"):
            act(group)
