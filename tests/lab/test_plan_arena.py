"""Plans and the memory that is then really allocated agree to the byte."""

from dataclasses import replace

import pytest
from tests.lab.plan_models import DEEPSEEK_V3, LLAMA, MODELS

from kvist.memory import TorchMemory
from kvist.planning import Demand, Deployment, plan_devices, stage_configs

# All but the cache is taken as a byte, so that the memory is small enough to be had here.
NOTHING = {"weights": 1, "reserved": 1}
SPREADS = {
    "one accelerator": (1, 1, {}),
    "two ranks": (2, 1, {}),
    "four ranks, three stages": (4, 3, {"dtype": "fp8"}),
    "blocks of 32": (8, 2, {"block_size": 32, "max_chunk_tokens": 256}),
}


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("name", MODELS)
def test_the_arena_of_every_stage_takes_the_bytes_that_were_planned(name, spread):
    tensor, pipeline, settings = SPREADS[spread]
    deployment = Deployment("512 MiB", tensor, pipeline, 1.0, **NOTHING)
    demand = Demand(2048, **settings)
    made, configs = plan_devices(MODELS[name], deployment, demand), stage_configs(MODELS[name], deployment, demand)
    allocated = [TorchMemory(config, device="cpu").num_bytes for config in configs]
    assert allocated == [stage.cache_bytes for stage in made.stages]
    assert sum(allocated) == made.cache.memory_bytes == sum(pool.memory_bytes for pool in made.cache.pools)
    for stage in made.stages:
        told = stage.weights_bytes, stage.reserved_bytes, stage.cache_bytes, stage.unused_bytes
        assert sum(told) == deployment.usable_bytes
    fullest = min(made.stages, key=lambda stage: stage.unused_bytes)
    assert 0 <= fullest.unused_bytes < sum(group.block_bytes for group in made.cache.groups)


@pytest.mark.parametrize("name", MODELS)
def test_the_arena_is_as_large_when_a_block_lies_in_one_piece(name):
    deployment, demand = Deployment("512 MiB", 2, 1, 1.0, **NOTHING), Demand(1024)
    (config,) = stage_configs(MODELS[name], deployment, demand)
    (stage,) = plan_devices(MODELS[name], deployment, demand).stages
    assert TorchMemory(replace(config, storage_order="block_major"), device="cpu").num_bytes == stage.cache_bytes


def test_a_token_takes_in_the_arena_what_the_plan_says():
    """Llama: 2 x 32 layers x 8 heads x 128 x 2 bytes; DeepSeek V3: 61 layers x (512 + 64) x 2 bytes."""
    expected = {131072: LLAMA, 70272: DEEPSEEK_V3}
    for token_bytes, model in expected.items():
        deployment, demand = Deployment("256 MiB", utilisation=1.0, **NOTHING), Demand(512, block_size=4)
        (config,) = stage_configs(model, deployment, demand)
        made = plan_devices(model, deployment, demand)
        assert made.cache.token_bytes == token_bytes
        (layout,) = TorchMemory(config, device="cpu").layouts
        assert layout.num_bytes == 4 * token_bytes
