"""Numbers in layers of 8 and 4 bits: quantised when written, stored bit by bit, numbers again when asked for."""

import numpy as np
import pytest
import torch

from kvist.config import DTYPE_BYTES, DTYPES, AttentionSpec, CacheConfig
from kvist.core.moves import Move
from kvist.errors import ArgumentError, LayoutError
from kvist.memory import TorchMemory
from kvist.memory.quantisation import Encoding

QUANTISED = ["float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int4", "uint4"]
PACKED = ["int4", "uint4"]
ORDERS = ["layer_major", "block_major", "heads_first"]
HEADS, DIM = 2, 6
# Relative to the largest number kept: half a step of ints, half a step of the mantissa of floats.
ERROR = {"float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3, "int8": 0.5 / 127, "uint8": 0.5 / 127, "int4": 0.5 / 7}
ERROR["uint4"] = ERROR["int4"]
LARGEST = {"float8_e4m3fn": 448, "float8_e5m2": 57344, "int8": 127, "uint8": 127, "int4": 7, "uint4": 7}


def memory_of(dtype, order="layer_major", **more):
    layers = [AttentionSpec(HEADS, DIM, dtype, **more), AttentionSpec(1, 2, "float32")]
    return TorchMemory(CacheConfig(layers, num_blocks=4, block_size=4, storage_order=order))


def numbers(num_tokens, largest=1.0):
    """Numbers up to `largest`, which the first of them is."""
    made = torch.rand((num_tokens, HEADS, DIM), generator=torch.Generator().manual_seed(3)) * 2 - 1
    made[0, 0, 0] = 1
    return made * largest


# ---- encoding -------------------------------------------------------------------------------------------------------


def test_8_bit_floats_keep_the_value_over_the_scale():
    # The scale of a layer is its largest number over 448, so that this becomes the largest of e4m3.
    stored = Encoding("float8_e4m3fn", scale=100 / 448).encode(torch.tensor([100.0, -50.0, 0.0]))
    assert stored.tolist() == [448.0, -224.0, 0.0]
    assert Encoding("float8_e4m3fn", 100 / 448).decode(stored, torch.float32).tolist() == [100.0, -50.0, 0.0]


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        ("float8_e4m3fn", [-448.0, 448.0]),
        ("float8_e5m2", [-57344.0, 57344.0]),
        ("int8", [-128, 127]),
        ("uint8", [0, 255]),
    ],
)
def test_numbers_beyond_the_range_are_kept_as_the_last_inside(dtype, kept):
    assert Encoding(dtype).encode(torch.tensor([-1e9, 1e9])).tolist() == kept


def test_not_a_number_stays_none():
    assert Encoding("float8_e4m3fn").encode(torch.tensor([float("nan")])).isnan().all()


def test_unsigned_ints_have_their_zero_in_the_middle():
    assert Encoding("uint8", 0.5).encode(torch.tensor([0.0, 1.0, -64.0])).tolist() == [128, 130, 0]
    assert Encoding("uint4").encode(torch.tensor([0.0, 7.0, -8.0, -1.0])).tolist() == [0xF8, 0x70]


@pytest.mark.parametrize("dtype", PACKED)
def test_two_numbers_of_4_bits_lie_in_a_byte_the_even_one_low(dtype):
    encoding, every = Encoding(dtype), torch.arange(-8, 8)
    stored = encoding.encode(every.float())
    assert (stored.shape, stored.dtype) == ((8,), torch.uint8)
    codes = every & 15 if dtype == "int4" else every + 8
    assert torch.equal(stored & 15, codes[0::2].to(torch.uint8))
    assert torch.equal(stored >> 4, codes[1::2].to(torch.uint8))
    assert torch.equal(encoding.decode(stored, torch.float32), every.float())


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
def test_numbers_come_back_to_within_half_a_step(dtype, source):
    largest = 3.0
    encoding = Encoding(dtype, largest / LARGEST[dtype])
    given = numbers(20, largest).to(source)
    found = encoding.decode(encoding.encode(given), torch.float32)
    step = given.float().abs() if dtype.startswith("float") else torch.tensor(largest)
    least = LARGEST[dtype] ** -1 * largest * 2**-3  # below this 8-bit floats are no finer
    assert ((found - given.float()).abs() <= ERROR[dtype] * step + least * dtype.startswith("float") + 1e-6).all()


@pytest.mark.parametrize("dtype", QUANTISED)
def test_what_was_decoded_is_encoded_the_same(dtype):
    encoding = Encoding(dtype, 0.25)
    stored = encoding.encode(numbers(20, 2.0))
    again = encoding.encode(encoding.decode(stored, torch.float32))
    assert torch.equal(again.view(torch.uint8), stored.view(torch.uint8))


# ---- in a memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", QUANTISED)
def test_numbers_are_quantised_with_the_scale_of_k_and_of_v(dtype, order):
    memory = memory_of(dtype, order, k_scale=0.5, v_scale=0.125)
    given, slots = numbers(3, 3.0), torch.tensor([9, -1, 2])
    memory.write(0, given, given.bfloat16(), slots)
    keys, values = memory.read(0, [9, 2])
    kept = given[[0, 2]]
    for found, scale, numbers_given in ((keys, 0.5, kept), (values, 0.125, kept.bfloat16())):
        assert found.dtype == Encoding(dtype).stored_dtype
        assert torch.equal(found.view(torch.uint8), Encoding(dtype, scale).encode(numbers_given).view(torch.uint8))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", QUANTISED)
def test_what_is_stored_already_is_written_bit_by_bit(dtype, order):
    memory, other = (memory_of(dtype, order, k_scale=0.5) for _ in range(2))
    memory.write(0, numbers(4), numbers(4), torch.arange(4))
    keys, values = memory.gather(0, torch.tensor([[0]]), 4)
    other.write(0, keys[0], values[0], torch.tensor([7, 6, 5, 4]))
    found, _ = other.gather(0, torch.tensor([[1]]), 4)
    assert torch.equal(found.view(torch.uint8), keys.flip(1).view(torch.uint8))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("as_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", QUANTISED)
def test_reading_and_gathering_give_numbers_when_asked(dtype, as_dtype, order):
    memory = memory_of(dtype, order, k_scale=0.5, v_scale=2.0)
    given = torch.tensor([1.0, -1.5, 0.0, 0.5, 2.0, -2.0]).expand(4, HEADS, DIM)
    memory.write(0, given, given * 4, torch.arange(4, 8))
    for keys, values in (
        memory.read(0, range(4, 8), dtype=as_dtype),
        (plane[0] for plane in memory.gather(0, torch.tensor([[1]]), 4, dtype=as_dtype)),
    ):
        assert keys.dtype == values.dtype == as_dtype
        assert torch.equal(keys.float(), given)
        assert torch.equal(values.float(), given * 4)


def test_layers_that_are_not_quantised_are_converted_when_asked_and_take_their_own_dtype_only():
    memory = memory_of("float16")
    memory.write(0, numbers(2).half(), numbers(2).half(), torch.tensor([0, 1]))
    keys, _ = memory.read(0, [0, 1], dtype=torch.float32)
    assert torch.equal(keys, numbers(2).half().float())
    with pytest.raises(LayoutError, match=r"as it is kept, torch.float16 on cpu, got torch.float32"):
        memory.write(0, numbers(2), numbers(2), torch.tensor([0, 1]))


def test_numbers_are_asked_for_as_floats():
    memory = memory_of("int8")
    with pytest.raises(ArgumentError, match=r"dtype is torch.int32, must be of floats"):
        memory.read(0, [0], dtype=torch.int32)


def test_keys_alone_are_quantised():
    memory = memory_of("int4", value_head_dim=0, k_scale=0.5)
    memory.write(0, torch.ones(1, HEADS, DIM), None, torch.tensor([3]))
    keys, values = memory.gather(0, np.array([[0]]), 4, dtype=torch.float32)
    assert (keys[0, 3] == 1).all()
    assert values is None


@pytest.mark.parametrize(
    ("dtype", "given", "message"),
    [
        (
            "int4",
            torch.zeros(2, HEADS, 3),
            r"must be \[T, 2, 6\] of floats or \[T, 2, 3\] of torch.uint8, got \[2, 2, 3\]",
        ),
        ("int4", torch.zeros(2, HEADS, 6, dtype=torch.uint8), r"must be \[2, 2, 3\] for 2 slots, got \[2, 2, 6\]"),
        ("int8", torch.zeros(3, HEADS, DIM), r"must be \[2, 2, 6\] for 2 slots, got \[3, 2, 6\]"),
        ("int8", torch.zeros(2, HEADS, DIM, dtype=torch.int32), "must be as it is kept, torch.int8 on cpu, got"),
        ("float8_e4m3fn", torch.zeros(2, HEADS, DIM).to(torch.float8_e5m2), "must be as it is kept, torch.float8_e4"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_before_anything_is_written(dtype, given, message):
    memory = memory_of(dtype)
    fitting = memory.read(0, [0, 0])[0]
    with pytest.raises(LayoutError, match=f"values of layer 0 {message}"):
        memory.write(0, fitting, given, torch.tensor([0, 1]))
    assert not memory.keys(0).view(torch.uint8).any()


# ---- moves ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS[:2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_part_of_a_block_is_its_first_tokens_but_all_of_it_with_4_bits(dtype, order):
    memory = memory_of(dtype, order)
    before = []
    for group_planes in (memory.plane_bytes(0),):
        for number, plane in enumerate(group_planes):
            plane.copy_((torch.arange(plane.numel()).view(plane.shape) * 3 + number) % 251)
            before.append(plane.clone())
    memory.perform([Move(1, 3, 3)])
    for found, plane, layout in zip(memory.plane_bytes(0), before, memory.layouts[0].planes, strict=True):
        expected = plane.clone()
        size = plane.shape[1] if dtype in PACKED else 3 * layout.token_bytes
        expected[3, :size] = plane[1, :size]
        assert torch.equal(found, expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", PACKED)
def test_single_tokens_of_4_bits_change_places_alone_and_no_tokens_are_none(dtype, order):
    memory = memory_of(dtype, order)
    memory.write(0, numbers(8, 7.0), numbers(8, 7.0), torch.arange(8))
    expected = [plane.clone() for plane in (memory.keys(0), memory.values(0))]
    memory.perform([Move(0, 1, 2, source_offset=2, destination_offset=1), Move(0, 1, 0)])
    for plane in expected:
        plane[1, 1:3] = plane[0, 2:4]
    assert torch.equal(memory.keys(0), expected[0])
    assert torch.equal(memory.values(0), expected[1])


@pytest.mark.parametrize("dtype", PACKED)
def test_moves_of_whole_blocks_wait_for_the_parts_they_would_overwrite(dtype):
    memory = memory_of(dtype)
    memory.write(0, numbers(16, 7.0), numbers(16, 7.0), torch.arange(16))
    keys = memory.keys(0).clone()
    memory.perform([Move(0, 1, 1), Move(1, 2, 2), Move(3, 1, 3)])
    keys[1] = keys[0]
    keys[2] = keys[1]
    keys[1] = keys[3]
    assert torch.equal(memory.keys(0), keys)


def test_every_dtype_that_torch_has_is_stored_as_itself():
    assert {dtype: Encoding(dtype).stored_dtype for dtype in DTYPE_BYTES} == {
        dtype: getattr(torch, dtype) for dtype in DTYPE_BYTES
    }
