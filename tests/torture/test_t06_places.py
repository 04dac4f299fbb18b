"""T06: identity holds in every tier and after a restart; of another model, dtype or block size nothing is found."""

from dataclasses import replace

import pytest
from tests.torture.over import WITH_STORES, over, without_groups
from tests.torture.rig import PATIENT, again

from kvist import AttentionSpec, CacheConfig, ConfigError, DiskTier, KVCacheManager
from kvist.memory.arena import TorchMemory

PROMPT = list(range(100, 117))


@over(without_groups(WITH_STORES, "ring"))
def test_B062_B063_after_a_restart_each_tenant_finds_its_own_and_no_other(rig):
    tenants = [(), ("salt", 1), ("salt", 2), ("lora", "a"), ("lora", "a", 2)]
    for tenant in tenants[:3]:
        assert rig.leave(PROMPT, namespace=tenant) == 0
    rig.send_down()
    fresh = again(rig)
    for tenant in reversed(tenants):
        found = fresh.leave(PROMPT, namespace=tenant, publish=False)
        assert found == (16 if tenant in tenants[:3] else 0), tenant
    fresh.require_all_back()
    fresh.close()


LAYER = AttentionSpec(num_kv_heads=2, head_dim=4, dtype="float16")
BASE = CacheConfig([LAYER] * 2, 4, 16, max_sequences=4, max_sequence_length=64, model="a model@1")
OTHERS = {
    "revision": {"model": "a model@2"},
    "dtype": {"layers": [replace(LAYER, dtype="bfloat16")] * 2},
    "heads, as another tensor-parallel size has": {"layers": [replace(LAYER, num_kv_heads=1)] * 2},
    "head size": {"layers": [replace(LAYER, head_dim=8)] * 2},
    "V left out": {"layers": [replace(LAYER, value_head_dim=0)] * 2},
    "layers": {"layers": [LAYER] * 3},
    "block size": {"block_size": 8},
    "window": {"layers": [replace(LAYER, sliding_window=8)] * 2},
}


def served(config, tokens):
    """Compute a prompt on real arenas; how much was there, and the bytes of its first block."""
    memory = TorchMemory(config)
    with KVCacheManager(config, memory) as manager:
        sequence = manager.add_sequence(tokens)
        cached = sequence.num_cached_tokens
        row = memory.read_blocks(0, sequence.block_ids[:1]).numpy().copy()
        if not cached:
            row[:] = 7
            memory.write_blocks(0, sequence.block_ids[:1], row)
        manager.commit([sequence])
        manager.free(sequence)
        assert manager.flush(PATIENT)
    return cached, bytes(row[0])


@pytest.mark.parametrize("differs", OTHERS)
def test_B065_B154_bytes_of_another_format_are_refused_or_not_found(tmp_path, differs):
    config = replace(BASE, tiers=[DiskTier(tmp_path / "cache", "1 MiB", timeout_s=PATIENT)])
    assert served(config, PROMPT)[0] == 0
    try:
        cached, _ = served(replace(config, **OTHERS[differs]), PROMPT)
    except ConfigError:
        cached = 0
    assert cached == 0
    cached, row = served(config, PROMPT)
    assert (cached, set(row)) == (16, {7})


@pytest.mark.parametrize("order", ["layer_major", "block_major"])
def test_B154_how_the_arena_is_laid_out_does_not_matter_to_what_is_stored(tmp_path, order):
    """Blocks are stored in one form, whichever the arena has, so that a restart may choose another."""
    config = replace(BASE, tiers=[DiskTier(tmp_path / "cache", "1 MiB", timeout_s=PATIENT)], storage_order=order)
    assert served(config, PROMPT)[0] == 0
    for again_order in ("layer_major", "block_major"):
        cached, row = served(replace(config, storage_order=again_order), PROMPT)
        assert (cached, set(row)) == (16, {7})
