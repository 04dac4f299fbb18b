import copy
import subprocess
import sys

import pytest
import torch
from tests.edge.models import PAIRS, bits, pool_config

from kvist import AttentionSpec, CacheConfig
from kvist.edge import KVPagePool, LayerConfig
from kvist.errors import ArgumentError, ArgumentTypeError, ConfigError, LayoutError
from kvist.memory import TorchMemory


def small(layers=PAIRS, **settings):
    return KVPagePool(pool_config(layers, **({"max_sequence_length": 7, "page_size": 4} | settings)))


def numbered(pool):
    for layer in pool.owners:
        view = pool.pool(layer)
        view.copy_(torch.arange(view.numel()).reshape(view.shape) % 251)
    return pool


def test_E1_layers_of_their_own_sizes_in_pages():
    pool = KVPagePool(pool_config())
    assert (pool.padded_capacity, pool.num_pages, pool.num_layers, pool.is_uniform) == (256, 4, 2, False)
    for layer, (heads, dim) in enumerate([(4, 64), (2, 128)]):
        assert pool.slots(layer).shape == (2, 2, 256, heads, dim)
        assert pool.pool(layer).shape == (2, 4, 128, heads, dim)
        assert pool.values_pointer(layer) - pool.keys_pointer(layer) == 4 * 128 * heads * dim * 2


def test_E2_fp8_halves_the_offset_of_values():
    layers = [LayerConfig(2, 64)]
    pool = KVPagePool(pool_config(layers, max_batch_size=3, max_sequence_length=130, dtype="float8_e4m3fn"))
    assert (pool.padded_capacity, pool.num_pages) == (256, 6)
    assert pool.values_pointer(0) - pool.keys_pointer(0) == 6 * 128 * 2 * 64
    assert pool.pool(0).dtype == torch.float8_e4m3fn


def test_E3_with_retained_pages_slots_are_refused_and_k_and_v_apart_are_not():
    pool = KVPagePool(pool_config([LayerConfig(4, 64)], num_pages=10))
    assert pool.pool(0).shape == (2, 10, 128, 4, 64)
    with pytest.raises(
        LayoutError, match=r"10 pages, 6 more than the 4 .* use strided_slots\(layer\), keys_and_values"
    ):
        pool.slots(0)
    keys, values = pool.keys_and_values(0)
    assert keys.shape == values.shape == (2, 256, 4, 64)
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert keys.data_ptr() == pool.keys_pointer(0)
    assert values.data_ptr() == pool.keys_pointer(0) + 10 * 128 * 4 * 64 * 2


@pytest.mark.parametrize("num_pages", [0, 10])
def test_strided_slots_are_there_with_and_without_retained_pages(num_pages):
    pool = numbered(small(num_pages=num_pages))
    for layer in (0, 1):
        slots, pages = pool.strided_slots(layer), pool.pool(layer)
        assert slots.shape == (2, 2, 8, *pages.shape[3:])
        assert slots.data_ptr() == pages.data_ptr()
        assert slots.stride(0) == pages.stride(0)
        assert slots.is_contiguous() == (num_pages == 0)
        for slot in (0, 1):
            for position in range(8):
                page = 2 * slot + position // 4
                assert torch.equal(slots[:, slot, position], pages[:, page, position % 4])


def test_slots_and_pools_are_the_same_bytes():
    pool = numbered(small())
    slots = pool.slots(0)
    assert slots.is_contiguous()
    slots[1, 1, 5] = 77
    assert pool.pool(0)[1, 3, 1].eq(77).all()
    assert pool.keys_and_values(0)[1][1, 5].eq(77).all()


def test_the_address_of_an_element_is_that_of_its_page_token_head_and_dim():
    pool = numbered(small(num_pages=5))
    base, (heads, dim) = pool.pool(0), (2, 4)
    offset = ((3 * 4 + 2) * heads + 1) * dim + 3
    assert base[0, 3, 2, 1, 3].data_ptr() == pool.keys_pointer(0) + 2 * offset
    assert base[1, 3, 2, 1, 3].data_ptr() == pool.keys_pointer(0) + 2 * (offset + 5 * 4 * heads * dim)


def test_everything_starts_as_zeros():
    assert not any(small().pool(layer).any() for layer in (0, 1))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"])
def test_every_dtype_has_its_bytes(dtype):
    pool = small(dtype=dtype)
    assert pool.pool(0).dtype == getattr(torch, dtype)
    assert pool.num_bytes == pool.config.page_bytes * 4 == sum(map(pool.config.layer_bytes, pool.config.layers))


def test_an_empty_pool_has_nothing():
    for pool in (KVPagePool(), KVPagePool(pool_config([]))):
        assert (pool.num_layers, pool.num_bytes, pool.is_uniform) == (0, 0, True)
        with pytest.raises(ArgumentError, match=r"layer must be in \[0, 0\), got 0"):
            pool.pool(0)
    assert KVPagePool().num_pages == 0
    assert KVPagePool(pool_config([])).num_pages == 4


@pytest.mark.parametrize("layer", [-1, 2])
def test_a_layer_that_there_is_not_is_refused_everywhere(layer):
    pool = small()
    questions = (pool.pool, pool.slots, pool.strided_slots, pool.keys_and_values, pool.keys_pointer)
    for ask in (*questions, pool.values_pointer, pool.layer_config, pool.storage_of, pool.scales, pool.rows):
        with pytest.raises(ArgumentError, match=r"layer must be in \[0, 2\)"):
            ask(layer)


def test_moving_hands_everything_over_and_leaves_an_empty_pool():
    pool = numbered(small())
    address, numbers = pool.keys_pointer(1), pool.pool(1).clone()
    moved = pool.move()
    assert moved.keys_pointer(1) == address
    assert torch.equal(moved.pool(1), numbers)
    assert (moved.num_pages, moved.padded_capacity) == (4, 8)
    assert (pool.num_layers, pool.num_pages, pool.padded_capacity, pool.is_uniform) == (0, 0, 0, True)
    assert pool.config == KVPagePool().config


def test_a_pool_cannot_be_copied():
    for act in (copy.copy, copy.deepcopy):
        with pytest.raises(ArgumentTypeError, match="has one owner"):
            act(small())


def test_a_config_that_makes_no_sense_allocates_nothing():
    with pytest.raises(ConfigError, match="num_pages is 3"):
        small(num_pages=3)


def test_with_fewer_pages_than_a_full_batch_takes_there_are_no_slots():
    pool = small(num_pages=3, allow_undercommit=True)
    assert pool.pool(0).shape == (2, 3, 4, 2, 4)
    for ask in (pool.slots, pool.strided_slots, pool.keys_and_values):
        with pytest.raises(LayoutError, match=r"3 pages, slots of a full batch take 4; use pool\(layer\)"):
            ask(0)


def test_a_layer_with_a_window_has_a_pool_of_its_own_size():
    layers = [LayerConfig(1, 8), LayerConfig(1, 8, capacity=5)]
    pool = small(layers, max_sequence_length=30)
    assert pool.sliding_capacity == 5
    assert pool.pool(0).shape == (2, 16, 4, 1, 8)
    assert pool.pool(1).shape == (2, 14, 4, 1, 8)
    full, sliding = pool.storage_of(0), pool.storage_of(1)
    assert (full.kind, full.num_pages, full.pages_per_sequence) == ("full", 16, 8)
    assert (sliding.kind, sliding.num_pages, sliding.pages_per_sequence) == ("sliding", 14, 8)
    assert (sliding.num_kv_heads, sliding.head_dim) == (1, 8)
    keys, values = pool.keys_and_values(1)
    assert keys.shape == values.shape == (14, 4, 1, 8)
    assert values.data_ptr() == pool.values_pointer(1)
    for ask in (pool.slots, pool.strided_slots):
        with pytest.raises(LayoutError, match="keeps a window in pages and has no slots"):
            ask(1)
    assert pool.slots(0).shape == (2, 2, 32, 1, 8)


def test_a_layer_that_shares_another_shows_its_pool():
    scales = (0.5, 0.25, 2.0)
    layers = [LayerConfig(1, 8, scales=scales), LayerConfig(1, 8, scales=(3.0, 1.0, 1.0), shares_layer=0)]
    pool = small(layers, dtype="float8_e4m3fn")
    assert pool.keys_pointer(1) == pool.keys_pointer(0)
    assert pool.owners == [0]
    assert pool.owner(1) == 0
    assert pool.num_bytes == 2 * 4 * 4 * 8
    assert pool.scales(0) == scales
    assert pool.scales(1) == (3.0, 0.25, 2.0)


def test_E15_a_page_is_copied_up_to_17_tokens_and_the_rest_stays():
    pool = numbered(KVPagePool(pool_config(PAIRS)))
    before = [pool.pool(layer).clone() for layer in (0, 1)]
    pool.copy_page(1, 3, 17)
    for layer, expected in enumerate(before):
        expected[:, 3, :17] = expected[:, 1, :17]
        assert torch.equal(pool.pool(layer), expected)


@pytest.mark.parametrize("arguments", [(4, 0, 1), (0, -1, 1), (0, 1, 5), (0, 1, -1)])
def test_a_page_or_token_that_there_is_not_is_not_copied(arguments):
    pool = numbered(small())
    before = pool.pool(0).clone()
    with pytest.raises(ArgumentError):
        pool.copy_page(*arguments)
    assert torch.equal(pool.pool(0), before)


def test_fp8_pages_are_copied_bit_by_bit():
    pool = small(dtype="float8_e4m3fn")
    pool.pool(0).view(torch.uint8).copy_(torch.randint(0, 256, pool.pool(0).shape, dtype=torch.uint8))
    expected = bits(pool.pool(0)).clone()
    pool.copy_page(0, 2, 3)
    expected[:, 2, :3] = expected[:, 0, :3]
    assert torch.equal(bits(pool.pool(0)), expected)


def test_a_pool_can_lie_in_the_bytes_of_kvists_arena():
    specs = [AttentionSpec(2, 4, "float16"), AttentionSpec(1, 8, "float16")]
    memory = TorchMemory(CacheConfig(specs, num_blocks=4, block_size=4))
    config = pool_config(PAIRS, max_sequence_length=7, page_size=4)
    pool = KVPagePool(config, storage=[memory.kv(0), memory.kv(1)])
    ones = torch.ones(1, 2, 4, dtype=torch.float16)
    memory.write(0, ones, 2 * ones, torch.tensor([9]))
    assert pool.slots(0)[:, 1, 1, 0, 0].tolist() == [1.0, 2.0]
    assert pool.keys_pointer(1) == memory.keys(1).data_ptr()


def test_a_storage_that_does_not_fit_is_refused():
    config = pool_config(PAIRS, max_sequence_length=7, page_size=4)
    right = [torch.zeros(2, 4, 4, 2, 4, dtype=torch.float16), torch.zeros(2, 4, 4, 1, 8, dtype=torch.float16)]
    KVPagePool(config, storage=right)
    wrong = [right[:1], [right[0], right[0]], [right[0], right[1].float()]]
    wrong.append([right[0], torch.zeros(2, 5, 4, 1, 8, dtype=torch.float16)[:, :4]])
    for storage in wrong:
        with pytest.raises(LayoutError, match="storage"):
            KVPagePool(config, storage=storage)


def test_configurations_need_no_torch():
    program = "import sys, kvist.edge; kvist.edge.PoolConfig; kvist.edge.geometry; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("name", ["KVPagePool", "SlidingPages", "reuse_of"])
def test_without_torch_what_holds_tensors_names_the_extra_that_brings_it(name):
    program = f"import sys; sys.modules['torch'] = None; import kvist.edge; kvist.edge.{name}"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    says = f"ModuleNotFoundError: {name} needs torch: pip install 'kvist[torch]'"
    assert result.stderr.splitlines()[-1] == says


def test_every_name_of_the_package_is_there():
    import kvist.edge

    assert [name for name in kvist.edge.__all__ if not getattr(kvist.edge, name).__doc__] == []
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        kvist.edge.Nothing  # noqa: B018
