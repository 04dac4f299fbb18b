"""Whatever settings, sizes and configs of models say, they are taken, or are an error of Kvist's own."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.drawn import VALUES, changed

from kvist import AttentionSpec, CacheConfig, KVCacheManager, StateSpec
from kvist.errors import ConfigError, KvistError
from kvist.planning import Load, layers_of_model, plan
from kvist.sizes import SIZE_UNITS, parse_bytes
from kvist.tier_config import DiskTier, HostTier, RemoteTier

SMALL = st.integers(-1, 70) | VALUES
LAYER_FIELDS = tuple(AttentionSpec.__dataclass_fields__)
CONFIG_FIELDS = [name for name in CacheConfig.__dataclass_fields__ if name not in ("layers", "tiers")]
MOST_BLOCKS = 10_000

attention = st.builds(
    lambda fields: AttentionSpec(**{"num_kv_heads": 1, "head_dim": 8} | fields),
    st.dictionaries(st.sampled_from(LAYER_FIELDS), SMALL, max_size=3),
)
state = st.builds(StateSpec, SMALL | st.just([(2, 3)]) | st.lists(SMALL, max_size=2), SMALL | st.just("uint8"), SMALL)
tiers = st.one_of(
    st.builds(HostTier, SMALL | st.just("1 MiB"), SMALL, SMALL | st.just("lru"), SMALL, SMALL),
    st.builds(DiskTier, directory=SMALL | st.just("cache"), capacity=SMALL | st.just("1 GiB"), write=SMALL),
    st.builds(RemoteTier, url=SMALL | st.just("valkey://x"), timeout_s=SMALL),
    SMALL,
)


@given(
    layers=st.lists(attention | state | SMALL, max_size=3) | SMALL,
    fields=st.dictionaries(st.sampled_from(CONFIG_FIELDS), SMALL, max_size=3),
    tiers=st.lists(tiers, max_size=2) | SMALL,
)
def test_a_configuration_is_right_or_says_all_that_is_wrong(layers, fields, tiers):
    try:
        config = CacheConfig(layers, **{"num_blocks": 4, "max_sequences": 2, "tiers": tiers} | fields)
        config.validate()
    except KvistError:
        return
    assert config.block_bytes > 0
    assert len(config.fingerprint) == 32
    is_small = sum(config.pool_num_blocks) <= MOST_BLOCKS and config.max_sequences <= 100
    if is_small and config.max_sequence_length <= MOST_BLOCKS and not config.tiers:
        manager = KVCacheManager(config)
        with suppress(KvistError):
            manager.free(manager.add_sequence([1, 2]))
        manager.check()


@given(VALUES | st.text(max_size=12) | st.from_regex(r"\A[0-9]{1,400}(\.[0-9]{0,20})? ?[KMGTkiB]{0,3}\Z"))
def test_a_size_is_a_positive_int_or_refused(size):
    try:
        found = parse_bytes(size)
    except ConfigError:
        return
    assert type(found) is int
    assert found > 0


@given(number=st.integers(1, 10**30), unit=st.sampled_from(sorted(SIZE_UNITS)))
def test_a_size_of_a_whole_number_is_exact(number, unit):
    assert parse_bytes(f"{number} {unit}") == number * SIZE_UNITS[unit]


MODELS = [
    {
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "torch_dtype": "float16",
    },
    {
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "head_dim": 8,
        "sliding_window": 64,
        "use_sliding_window": True,
        "max_window_layers": 2,
        "max_position_embeddings": 512,
    },
    {
        "text_config": {
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "head_dim": 8,
            "model_type": "gemma3_text",
            "sliding_window": 32,
            "sliding_window_pattern": 2,
        },
        "dtype": "bfloat16",
    },
    {"num_hidden_layers": 2, "num_attention_heads": 8, "kv_lora_rank": 32, "qk_rope_head_dim": 8},
    {
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
        "linear_num_key_heads": 2,
        "linear_conv_kernel_dim": 4,
    },
    {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 32,
        "model_type": "falcon_h1",
        "mamba_n_heads": 2,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_d_state": 4,
        "mamba_d_conv": 4,
        "mamba_d_head": 8,
    },
    {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 32,
        "attention_chunk_size": 16,
        "no_rope_layers": [1, 0],
    },
    {"n_layer": 2, "n_head": 4, "n_embd": 32, "per_layer_config": {"1": {"head_dim": 16}}, "num_kv_shared_layers": 1},
    {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 32,
        "attn_layer_indices": [1],
        "conv_L_cache": 3,
        "full_attention_interval": 2,
    },
]


@given(settings=changed(MODELS) | VALUES, dtype=st.none() | st.sampled_from(("float16", "int4", "none")))
def test_the_config_of_a_model_tells_its_layers_or_is_refused(settings, dtype):
    try:
        layers = layers_of_model(settings, dtype=dtype)
        config = CacheConfig(layers, memory="1 GiB", max_sequence_length=64)
        made = plan(config, Load(64))
    except KvistError:
        return
    assert len(layers) < 20_000
    assert str(made)


@pytest.mark.parametrize("number", [10**6, 10**18])
def test_a_model_of_endless_layers_is_refused_without_listing_them(number):
    shape = {"num_hidden_layers": number, "num_attention_heads": 8, "head_dim": 8, "sliding_window": 16}
    with pytest.raises(ConfigError, match="layers, which are more than"):
        layers_of_model(shape)
