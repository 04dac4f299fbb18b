"""The arena on a CUDA device: the same contents as on CPU, with nothing that makes the host wait."""

import pytest
import torch
from tests.serve.models import tiny_model

from kvist.config import AttentionSpec, CacheConfig
from kvist.core.moves import Move
from kvist.memory import TorchMemory
from kvist.serve import Engine, SamplingParams, cache_config

NUM_BLOCKS, BLOCK_SIZE, HEADS, DIM = 64, 16, 2, 32
CONFIG = CacheConfig(
    [AttentionSpec(HEADS, DIM, dtype="float32"), AttentionSpec(HEADS, DIM, dtype="float16", value_head_dim=16)],
    num_blocks=NUM_BLOCKS,
    block_size=BLOCK_SIZE,
)


@pytest.fixture
def pair():
    """The same arena on CPU and on the device, filled alike."""
    on_cpu, on_device = TorchMemory(CONFIG), TorchMemory(CONFIG, device="cuda")
    generator = torch.Generator().manual_seed(0)
    for layer in range(on_cpu.num_layers):
        for plane in ("keys", "values"):
            filled = getattr(on_cpu, plane)(layer)
            filled.copy_(torch.randn(filled.shape, generator=generator))
            getattr(on_device, plane)(layer).copy_(filled)
    return on_cpu, on_device


def rows(layer, num_tokens):
    generator = torch.Generator().manual_seed(num_tokens)
    dtype = getattr(torch, CONFIG.layers[layer].dtype)
    value_dim = CONFIG.layers[layer].value_head_dim or DIM
    return [torch.randn(num_tokens, HEADS, dim, generator=generator).to(dtype) for dim in (DIM, value_dim)]


def assert_alike(on_cpu, on_device):
    on_device.sync()
    for layer in range(on_cpu.num_layers):
        assert torch.equal(on_device.keys(layer).cpu(), on_cpu.keys(layer))
        assert torch.equal(on_device.values(layer).cpu(), on_cpu.values(layer))


@pytest.mark.parametrize("slots_on_device", [False, True])
@pytest.mark.parametrize("slots", [[5, 900, -1, 17], [-1, -1], [0], []], ids=str)
def test_write_and_gather_equal_those_on_cpu(pair, slots, slots_on_device):
    on_cpu, on_device = pair
    slots = torch.tensor(slots, dtype=torch.int64)
    table = torch.tensor([[3, 60, 1], [56, -1, 999]], dtype=torch.int32)
    for layer in range(on_cpu.num_layers):
        keys, values = rows(layer, len(slots))
        on_cpu.write(layer, keys, values, slots)
        on_device.write(layer, keys.cuda(), values.cuda(), slots.cuda() if slots_on_device else slots)
        expected, got = on_cpu.gather(layer, table, 40), on_device.gather(layer, table.cuda(), 40)
        assert torch.equal(got[0].cpu(), expected[0])
        assert torch.equal(got[1].cpu(), expected[1])
    assert_alike(on_cpu, on_device)


def test_moves_equal_those_on_cpu_and_come_between_the_writes_around_them(pair):
    on_cpu, on_device = pair
    moves = [Move(1, 2, 16), Move(2, 3, 5), Move(9, 1, 16), Move(7, 8, 5), Move(3, 7, 1)]
    for memory in pair:
        for step in range(20):
            slots = torch.arange(16 * 16, dtype=torch.int64) + 16 * (step % 4)
            for layer in range(memory.num_layers):
                keys, values = (plane.to(memory.device) + step for plane in rows(layer, len(slots)))
                memory.write(layer, keys, values, slots.to(memory.device))
            memory.perform(moves)
    assert_alike(on_cpu, on_device)


def test_moves_run_beside_the_current_stream_until_it_asks_for_them(pair):
    _, on_device = pair
    on_device.perform([Move(1, 2, 16)])
    assert on_device._moves_done is not None
    on_device.gather(0, torch.tensor([[2]]), 16)
    assert on_device._moves_done is None


def test_a_step_of_writes_moves_and_gathers_never_makes_the_host_wait(pair):
    _, memory = pair
    slots = torch.tensor([5, 900, -1, 17]).cuda()
    table = torch.tensor([[3, 60, 1]], dtype=torch.int32).cuda()
    planes = [[plane.cuda() for plane in rows(layer, 4)] for layer in range(memory.num_layers)]
    memory.perform([Move(1, 2, 16)])
    torch.cuda.set_sync_debug_mode("error")
    try:
        memory.perform([Move(1, 2, 16), Move(2, 3, 5)])
        for layer in range(memory.num_layers):
            memory.write(layer, *planes[layer], slots)
            memory.gather(layer, table, 40)
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
