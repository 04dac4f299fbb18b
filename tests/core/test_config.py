import numpy as np
import pytest
from tests.core.small import label

from kvist import AttentionSpec, CacheConfig, ConfigError, KVCacheManager
from kvist.config import DTYPE_BYTES, parse_bytes

LAYER = AttentionSpec(num_kv_heads=2, head_dim=4, dtype="float16")


def problems(layers=(LAYER,), **settings):
    """What is wrong with these settings."""
    with pytest.raises(ConfigError) as caught:
        CacheConfig(layers, **({"num_blocks": 8} | settings)).validate()
    assert str(caught.value) == "; ".join(caught.value.problems)
    return caught.value.problems


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_a_token_takes_its_k_and_v():
    assert LAYER.token_bytes == 2 * (4 + 4) * 2
    assert AttentionSpec(2, 4, "float16", value_head_dim=3).token_bytes == 2 * (4 + 3) * 2
    assert AttentionSpec(1, 1).token_bytes == 4


@pytest.mark.parametrize(("dtype", "size"), DTYPE_BYTES.items())
def test_every_dtype_has_its_size(dtype, size):
    assert AttentionSpec(1, 1, dtype).token_bytes == 2 * size
    CacheConfig([AttentionSpec(1, 1, dtype)], num_blocks=1).validate()


def test_a_block_takes_its_tokens_in_all_layers():
    config = CacheConfig([LAYER, AttentionSpec(1, 8, "float32")], block_size=4, num_blocks=8)
    assert config.block_bytes == 4 * (32 + 64)


@pytest.mark.parametrize(("memory", "num_blocks"), [(128, 1), (255, 1), (256, 2), ("1 KiB", 8), ("1 kB", 7)])
def test_memory_is_as_many_whole_blocks_as_fit(memory, num_blocks):
    config = CacheConfig([LAYER], block_size=4, memory=memory)
    config.validate()
    assert (config.block_bytes, config.resolved_num_blocks) == (128, num_blocks)
    assert KVCacheManager(config).num_blocks == num_blocks


def test_the_table_has_columns_for_the_longest_sequence():
    assert CacheConfig([LAYER], block_size=4, num_blocks=1, max_sequence_length=8).max_blocks_per_sequence == 2
    assert CacheConfig([LAYER], block_size=4, num_blocks=1, max_sequence_length=9).max_blocks_per_sequence == 3


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("20 GiB", 20 * 2**30),
        ("1.5 KiB", 1536),
        ("0.5KiB", 512),
        ("  2 MB ", 2_000_000),
        ("3 kB", 3000),
        ("1 TiB", 2**40),
        ("1 TB", 10**12),
        ("7 B", 7),
        ("8 MiB", 2**23),
        ("1 GB", 10**9),
        (5, 5),
    ],
)
def test_sizes_are_read_with_their_units(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [
        *("", "GiB", "1 XB", "1 gib", "-1 GiB", "1e9", "1,5 GiB", "1 GiB 2", "٣ GiB", "nan", "0", "0 GiB", "0.0001 B"),
        *(0, -1, True, 1.5, None, b"1 GiB", [1]),
    ],
    ids=label,
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError):
        parse_bytes(text)
    if text is not None:
        (problem,) = problems(num_blocks=None, memory=text)
        assert problem.startswith("memory: ")
        assert str(text) in problem


# -- problems ---------------------------------------------------------------------------------------------------------


def test_the_least_settings_are_enough():
    config = CacheConfig([LAYER], num_blocks=1)
    config.validate()
    assert (config.block_size, config.max_sequences, config.max_sequence_length) == (16, 256, 32768)
    assert (config.reuse, config.partial_reuse, config.policy) == (True, True, "priority")


def test_every_problem_is_told_at_once():
    found = problems(
        [AttentionSpec(0, 4), LAYER, "layer", AttentionSpec(1, -1, "float99", value_head_dim=0, sliding_window=4)],
        block_size=0,
        num_blocks=-3,
        max_sequences=1.5,
        max_sequence_length=None,
        policy="mru",
    )
    assert found == [
        "layers[0]: num_kv_heads is 0, must be a positive int",
        "layers[2] is a str, must be an AttentionSpec",
        "layers[3]: head_dim is -1, must be a positive int",
        "layers[3]: value_head_dim is 0, must be a positive int",
        "layers[3]: sliding windows, sink tokens and cross attention cannot be cached by this version",
        f"layers[3]: dtype is 'float99', must be one of {', '.join(DTYPE_BYTES)}",
        "block_size is 0, must be a positive int",
        "max_sequences is 1.5, must be a positive int",
        "max_sequence_length is None, must be a positive int",
        "policy is 'mru', must be one of fifo, lfu, lru, priority or a callable",
        "num_blocks is -3, must be a positive int",
    ]


def test_a_manager_is_not_made_of_settings_that_are_wrong():
    with pytest.raises(ConfigError, match="block_size is 0"):
        KVCacheManager(CacheConfig([LAYER], block_size=0, num_blocks=1))
    with pytest.raises(ValueError, match="give either"):
        KVCacheManager(CacheConfig([LAYER]))


@pytest.mark.parametrize("size", [0, -1, 1.0, "4", None, True, [4]], ids=label)
@pytest.mark.parametrize("name", ["block_size", "max_sequences", "max_sequence_length"])
def test_sizes_are_positive_ints(name, size):
    assert f"{name} is {size!r}, must be a positive int" in problems(**{name: size})


@pytest.mark.parametrize("size", [0, -1, 1.0, "4", True], ids=label)
def test_a_number_of_blocks_is_a_positive_int(size):
    assert problems(num_blocks=size) == [f"num_blocks is {size!r}, must be a positive int"]


@pytest.mark.parametrize("size", [0, -1, 1.0, "4", None, True], ids=label)
@pytest.mark.parametrize("name", ["num_kv_heads", "head_dim"])
def test_heads_are_positive_ints(name, size):
    layer = AttentionSpec(**({"num_kv_heads": 1, "head_dim": 1} | {name: size}))
    assert f"layers[0]: {name} is {size!r}, must be a positive int" in problems([layer])


@pytest.mark.parametrize(
    "layers", [[], (), None, "layers", LAYER, 3, {LAYER}, iter([LAYER])], ids=lambda value: type(value).__name__
)
def test_layers_are_a_list_of_at_least_one(layers):
    (problem,) = problems(layers)
    assert problem.endswith("must be a list of at least one AttentionSpec")


@pytest.mark.parametrize(
    "dtype", ["float64", "", None, 4, ["float32"], float, np.float32, np.dtype("float32")], ids=label
)
def test_a_dtype_is_named_as_torch_names_it(dtype):
    (problem,) = problems([AttentionSpec(1, 1, dtype)])
    assert problem.startswith(f"layers[0]: dtype is {dtype!r}, must be one of float32, float16")


@pytest.mark.parametrize("change", [{"sliding_window": 4}, {"sink_tokens": 2}, {"cross": True}], ids=label)
def test_what_this_version_cannot_cache_is_refused(change):
    (problem,) = problems([AttentionSpec(1, 1, **change)])
    assert "cannot be cached by this version" in problem


@pytest.mark.parametrize("policy", [None, 3, "", "LRU", ["lru"], b"lru"], ids=label)
def test_a_policy_is_a_name_or_a_callable(policy):
    assert problems(policy=policy) == [f"policy is {policy!r}, must be one of fifo, lfu, lru, priority or a callable"]


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "priority", len, lambda extent: 0])
def test_every_policy_is_accepted(policy):
    CacheConfig([LAYER], num_blocks=1, policy=policy).validate()


def test_either_blocks_or_memory_are_given():
    assert problems(num_blocks=None) == ["give either num_blocks or memory, not neither"]
    assert problems(num_blocks=1, memory="1 GiB") == ["give either num_blocks or memory, not both"]


def test_memory_holds_at_least_one_block():
    assert problems(num_blocks=None, block_size=4, memory=127) == [
        "memory is 127 bytes, less than one block of 128 bytes"
    ]


def test_no_more_blocks_than_int32_can_name():
    assert problems(num_blocks=2**31) == [
        "num_blocks is 2147483648, more than the 2147483647 that int32 block ids can name"
    ]
    (problem,) = problems(num_blocks=None, block_size=1, memory="1000 TiB")
    assert problem.startswith("memory / block bytes is 34359738368000")
    CacheConfig([LAYER], num_blocks=2**31 - 1).validate()


def test_a_memory_without_end_is_refused():
    (problem,) = problems(num_blocks=None, memory="9" * 400 + " GiB")
    assert problem.startswith("memory")


def test_settings_cannot_be_changed():
    with pytest.raises(AttributeError):
        CacheConfig([LAYER], num_blocks=1).num_blocks = 2
    with pytest.raises(AttributeError):
        LAYER.head_dim = 2
