"""The arena on a CUDA device: the same contents as on CPU, with nothing that makes the host wait."""

from contextlib import suppress

import pytest
import torch
from tests.serve.models import tiny_model

from kvist.config import AttentionSpec, CacheConfig, StateSpec
from kvist.core.moves import Move
from kvist.errors import LayoutError
from kvist.memory import TorchMemory
from kvist.serve import Engine, SamplingParams, cache_config

BLOCK_SIZE, HEADS, DIM = 16, 2, 32
CONFIG = CacheConfig(
    [
        AttentionSpec(HEADS, DIM, dtype="float32"),
        AttentionSpec(HEADS, DIM, dtype="float16", value_head_dim=16),
        AttentionSpec(HEADS, DIM, dtype="float8_e4m3fn", sliding_window=24),
        AttentionSpec(1, 24, dtype="bfloat16", value_head_dim=0),
        AttentionSpec(HEADS, DIM, dtype="float32", shares_layer=0),
        StateSpec([(4, 8), (3,)], dtype=["float32", "bfloat16"]),
    ],
    num_blocks=[64, 40, 8],
    block_size=BLOCK_SIZE,
)
# One pool, from which every group takes blocks of equal bytes, though their layers have no equal sizes.
UNEVEN = CacheConfig(
    [
        AttentionSpec(2, 32, dtype="float32"),
        AttentionSpec(2, 32, dtype="float32"),
        AttentionSpec(8, 32, dtype="float16", sliding_window=24),
        StateSpec([(48, 64), (16, 64)]),
    ],
    num_blocks=64,
    block_size=BLOCK_SIZE,
    shared_pool=True,
)
FULL, SLIDING, STATE = range(3)
MOVES = [
    Move(1, 2, 16),
    Move(2, 3, 5),
    Move(9, 1, 16, group=SLIDING),
    Move(7, 8, 5),
    Move(3, 7, 1),
    Move(2, 6, BLOCK_SIZE, group=STATE),
    Move(6, 4, BLOCK_SIZE, group=STATE),
    Move(5, 5, 1, source_offset=3, destination_offset=1),
    Move(5, 5, 1, source_offset=7, destination_offset=2),
    Move(5, 4, 1, source_offset=1, destination_offset=15),
]


@pytest.fixture(params=[CONFIG, UNEVEN], ids=["pools of their own", "one pool"])
def pair(request):
    """The same arena on CPU and on the device, filled alike."""
    return filled_alike(request.param)


def filled_alike(config):
    on_cpu, on_device = TorchMemory(config), TorchMemory(config, device="cuda")
    generator = torch.Generator().manual_seed(0)
    for plane, other in zip(planes(on_cpu), planes(on_device), strict=True):
        plane.copy_(torch.randn(plane.shape, generator=generator))
        other.copy_(plane)
    return on_cpu, on_device


def planes(memory):
    """Every plane of every layer, K and V apart, and states."""
    found = []
    for layer in range(memory.num_layers):
        try:
            found += memory.states(layer)
        except LayoutError:
            found.append(memory.keys(layer))
            with suppress(LayoutError):
                found.append(memory.values(layer))
    return found


def bits(plane):
    """A plane as bytes: torch cannot compare 8-bit floats, and numbers of another group may be no numbers here."""
    return plane.contiguous().view(torch.uint8)


def attention_layers(memory):
    """Layers with K and V of their own."""
    return [0, 1, 2, 3] if memory.num_layers == len(CONFIG.layers) else [0, 1, 2]


def state_layer(memory):
    return memory.num_layers - 1


def rows(memory, layer, num_tokens):
    """K and V of that many tokens, on the memory's device; V is None where a layer keeps keys only."""
    generator = torch.Generator().manual_seed(num_tokens)
    kept = [memory.keys(layer)]
    with suppress(LayoutError):
        kept.append(memory.values(layer))
    new = [
        torch.randn((num_tokens, *plane.shape[2:]), generator=generator).to(plane.dtype).to(memory.device)
        for plane in kept
    ]
    return new if len(new) == 2 else [*new, None]


def new_states(memory, num_blocks):
    generator = torch.Generator().manual_seed(num_blocks)
    return [
        torch.randn((num_blocks, *plane.shape[1:]), generator=generator).to(plane.dtype).to(memory.device)
        for plane in memory.states(state_layer(memory))
    ]


def assert_equal(on_cpu, on_device):
    for expected, got in zip(on_cpu, on_device, strict=True):
        assert (expected is None) == (got is None)
        assert expected is None or torch.equal(bits(got.cpu()), bits(expected))


def assert_alike(on_cpu, on_device):
    on_device.sync()
    assert_equal(planes(on_cpu), planes(on_device))


@pytest.mark.parametrize("slots_on_device", [False, True])
@pytest.mark.parametrize("slots", [[5, 600, -1, 17], [-1, -1], [0], []], ids=str)
def test_write_read_and_gather_equal_those_on_cpu(pair, slots, slots_on_device):
    on_cpu, on_device = pair
    slots = torch.tensor(slots, dtype=torch.int64)
    table = torch.tensor([[3, 60, 1], [39, -1, 999]], dtype=torch.int32)
    for layer in attention_layers(on_cpu):
        on_cpu.write(layer, *rows(on_cpu, layer, len(slots)), slots)
        on_device.write(layer, *rows(on_device, layer, len(slots)), slots.cuda() if slots_on_device else slots)
        assert_equal(on_cpu.gather(layer, table, 40), on_device.gather(layer, table.cuda(), 40))
        assert_equal(on_cpu.read(layer, slots), on_device.read(layer, slots.cuda() if slots_on_device else slots))
    assert_alike(on_cpu, on_device)


@pytest.mark.parametrize("blocks_on_device", [False, True])
@pytest.mark.parametrize("blocks", [[5, 7, -1, 0], [-1, -1], [0], []], ids=str)
def test_states_are_written_read_and_cleared_as_on_cpu(pair, blocks, blocks_on_device):
    on_cpu, on_device = pair
    layer = state_layer(on_cpu)
    blocks = torch.tensor(blocks, dtype=torch.int32)
    given = blocks.cuda() if blocks_on_device else blocks
    on_cpu.write_states(layer, blocks, new_states(on_cpu, len(blocks)))
    on_device.write_states(layer, given, new_states(on_device, len(blocks)))
    assert_equal(on_cpu.read_states(layer, blocks), on_device.read_states(layer, given))
    assert_alike(on_cpu, on_device)
    on_cpu.clear_states(blocks[:2])
    on_device.clear_states(given[:2])
    assert_alike(on_cpu, on_device)


def test_moves_equal_those_on_cpu_and_come_between_the_writes_around_them(pair):
    on_cpu, on_device = pair
    for memory in pair:
        for step in range(20):
            slots = torch.arange(16 * 16, dtype=torch.int64) + 16 * (step % 4)
            for layer in attention_layers(memory):
                new = [plane if plane is None else step_later(plane, step) for plane in rows(memory, layer, len(slots))]
                memory.write(layer, *new, slots.to(memory.device))
            states = [step_later(state, step) for state in new_states(memory, 3)]
            memory.write_states(state_layer(memory), torch.tensor([2, 6, 0]).to(memory.device), states)
            memory.perform(MOVES)
    assert_alike(on_cpu, on_device)


def step_later(plane, step):
    return (plane.float() + step).to(plane.dtype)


def test_moves_run_beside_the_current_stream_until_it_asks_for_them(pair):
    _, on_device = pair
    layer = state_layer(on_device)
    block = torch.tensor([2])
    asks = [
        lambda: on_device.gather(0, block[None], 16),
        lambda: on_device.read(0, block),
        lambda: on_device.write(0, *rows(on_device, 0, 1), block),
        lambda: on_device.read_states(layer, block),
        lambda: on_device.write_states(layer, block, new_states(on_device, 1)),
        lambda: on_device.clear_states(block),
    ]
    for ask in asks:
        on_device.perform([Move(1, 2, 16)])
        assert on_device._moves_done is not None
        ask()
        assert on_device._moves_done is None


def test_a_step_of_writes_moves_and_gathers_never_makes_the_host_wait(pair):
    _, memory = pair
    slots = torch.tensor([5, 600, -1, 17]).cuda()
    blocks = torch.tensor([5, -1, 0], dtype=torch.int32).cuda()
    table = torch.tensor([[3, 39, 1]], dtype=torch.int32).cuda()
    new = {layer: rows(memory, layer, 4) for layer in attention_layers(memory)}
    states = new_states(memory, 3)
    memory.perform(MOVES)
    torch.cuda.set_sync_debug_mode("error")
    try:
        memory.perform(MOVES)
        for layer, pair_of_rows in new.items():
            memory.write(layer, *pair_of_rows, slots)
            memory.read(layer, slots)
            memory.gather(layer, table, 40)
        memory.write_states(state_layer(memory), blocks, states)
        memory.read_states(state_layer(memory), blocks)
        memory.clear_states(blocks)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_an_engine_on_the_device_yields_the_tokens_of_transformers_on_cpu():
    model = tiny_model("llama")
    prompts = [list(range(3, 3 + length)) for length in (40, 41, 9, 1)]
    expected = []
    for prompt in prompts:
        inputs = torch.tensor([prompt])
        output = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=8, do_sample=False)
        expected.append(output[0, len(prompt) :].tolist())
    model = model.to("cuda")
    engine = Engine(model, cache_config(model, num_blocks=16, block_size=4, max_sequences=4), max_step_tokens=24)
    generations = engine.generate(prompts, SamplingParams(max_new_tokens=8))
    assert [generation.token_ids for generation in generations] == expected
