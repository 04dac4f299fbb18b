from dataclasses import replace

import pytest
from tests.edge.models import LAYERS, PAIRS, pool_config, recurrent_config

from kvist.edge import HybridConfig, LayerConfig, PoolConfig, RecurrentConfig
from kvist.edge.geometry import MAX_POOL_PAGES, max_capacity
from kvist.errors import ConfigError

RIGHT = pool_config()
# Each is wrong in one more way than what Edge-LLM checks after it.
IN_ORDER = [
    ({"dtype": "int8"}, "dtype is 'int8'"),
    ({"num_attention_layers": -1}, "num_attention_layers is -1"),
    ({"max_batch_size": 0}, "max_batch_size is 0"),
    ({"max_sequence_length": 0}, "max_sequence_length is 0"),
    ({"max_sequence_length": max_capacity() + 1}, "max_sequence_length is 2147483521, must be at most 2147483520"),
    ({"layers": [LayerConfig(0, 64)]}, "layers are 1, but num_attention_layers is 2"),
    ({"max_batch_size": 2**31 - 1, "max_sequence_length": max_capacity()}, "a full batch takes"),
    ({"num_pages": 3}, "num_pages is 3, must be 0 or at least 4: a full batch takes 4"),
    ({"num_pages": -1}, "num_pages is -1, must be 0 or at least 4"),
    ({"num_pages": MAX_POOL_PAGES + 1}, "num_pages is 1073741824, int32 has V ids for 1073741823"),
    ({"layers": [LayerConfig(4, 64), LayerConfig(0, 64)]}, "layer 1: num_kv_heads is 0"),
    ({"layers": [LayerConfig(4, 64), LayerConfig(2, -8)]}, "layer 1: head_dim is -8"),
]


@pytest.mark.parametrize(("wrong", "message"), IN_ORDER)
def test_every_setting_is_checked(wrong, message):
    with pytest.raises(ConfigError) as raised:
        replace(RIGHT, **wrong).validate()
    assert raised.value.problems[0].startswith(message)


@pytest.mark.parametrize("first", range(len(IN_ORDER)))
def test_the_first_problem_is_that_which_edge_llm_would_name(first):
    settings = {}
    for wrong, _ in reversed(IN_ORDER[first:]):
        settings |= wrong
    problems = replace(RIGHT, **settings).problems()
    assert problems[0].startswith(IN_ORDER[first][1])


def test_all_problems_are_named_at_once():
    layers = [LayerConfig(0, 64), LayerConfig(4, 0)]
    assert len(replace(RIGHT, num_pages=3, layers=layers).problems()) == 3
    assert len(replace(RIGHT, dtype="int8", max_batch_size=0).problems()) == 2


def test_no_layers_are_legal_and_their_geometry_is_checked_all_the_same():
    none = PoolConfig(0, 2, 200)
    none.validate()
    assert none.is_uniform
    assert none.total_pages == 4
    assert "num_pages is 3" in replace(none, num_pages=3).problems()[0]
    assert "max_batch_size" in replace(none, max_batch_size=0).problems()[0]


@pytest.mark.parametrize("page_size", [0, 3, 96, -4, True, 2.0])
def test_a_page_has_a_power_of_two_of_tokens(page_size):
    assert replace(RIGHT, page_size=page_size).problems() == [f"page_size is {page_size!r}, must be a power of two"]


def test_pages_may_be_of_one_token():
    config = replace(RIGHT, page_size=1)
    config.validate()
    assert (config.padded_capacity, config.total_pages) == (200, 400)


def test_fewer_pages_than_a_full_batch_takes_can_be_allowed():
    assert replace(RIGHT, num_pages=1, allow_undercommit=True).problems() == []
    assert replace(RIGHT, num_pages=-1, allow_undercommit=True).problems() != []


@pytest.mark.parametrize(
    "scales", [(1.0, 1.0), (1.0, 0.0, 1.0), (1.0, float("inf"), 1.0), (1.0, -1.0, 1.0), None, (1, "", 1)]
)
def test_scales_are_three_positive_numbers(scales):
    config = pool_config([LayerConfig(2, 8, scales=scales)], dtype="float8_e4m3fn")
    assert "must be three positive numbers" in config.problems()[0]


def test_only_fp8_is_scaled():
    layers = [LayerConfig(2, 8, scales=(1.0, 0.5, 0.5))]
    assert "only fp8 is scaled" in pool_config(layers).problems()[0]
    assert pool_config(layers, dtype="float8_e5m2").problems() == []


def test_a_layer_shares_another_that_has_a_pool_of_its_own_and_equal_sizes():
    def problem(*layers, **settings):
        return (pool_config(layers, **settings).problems() or [None])[0]

    assert problem(LayerConfig(2, 8), LayerConfig(2, 8, shares_layer=0)) is None
    assert problem(LayerConfig(2, 8, shares_layer=1), LayerConfig(2, 8)) is None
    assert "must be another of the 1" in problem(LayerConfig(2, 8, shares_layer=0))
    assert "must be another of the 1" in problem(LayerConfig(2, 8, shares_layer=-1))
    chain = [LayerConfig(2, 8), LayerConfig(2, 8, shares_layer=0), LayerConfig(2, 8, shares_layer=1)]
    assert "which shares layer 0 itself" in problem(*chain)
    assert "this layer's are (1, 8, 0)" in problem(LayerConfig(2, 8), LayerConfig(1, 8, shares_layer=0))
    scaled = LayerConfig(2, 8, scales=(1.0, 0.5, 0.5))
    other = LayerConfig(2, 8, scales=(1.0, 0.25, 0.5), shares_layer=0)
    assert "whose scales of K and V hold" in problem(scaled, other, dtype="float8_e4m3fn")


def test_windows_are_all_equal_and_not_fp8():
    windowed = pool_config([LayerConfig(1, 8), LayerConfig(1, 8, capacity=129)])
    assert windowed.problems() == []
    assert (windowed.sliding_capacity, windowed.total_sliding_pages) == (129, 14)
    assert "fp8" not in str(windowed.problems())
    assert "must be in [0, 200]" in pool_config([LayerConfig(1, 8, capacity=201)]).problems()[0]
    two = pool_config([LayerConfig(1, 8, capacity=129), LayerConfig(1, 8, capacity=100)])
    assert two.problems()[0] == "layers keep windows of 100, 129 tokens, must all be equal"
    assert "cannot be float8_e4m3fn" in replace(windowed, dtype="float8_e4m3fn").problems()[0]
    assert replace(windowed, num_sliding_pages=13).problems() == ["num_sliding_pages is 13, must be 0 or at least 14"]
    assert replace(windowed, num_sliding_pages=15).total_sliding_pages == 15


def test_a_window_as_long_as_a_sequence_or_unbounded_is_no_window():
    layers = [LayerConfig(1, 8, capacity=200)]
    assert pool_config(layers).sliding_capacity is None
    assert pool_config([LayerConfig(1, 8, capacity=129)], bounded_sliding=False).sliding_capacity is None


def test_a_layer_larger_than_any_memory_is_refused():
    layers = [LayerConfig(2**20, 2**20)]
    assert "layer 0 would take" in pool_config(layers, num_pages=MAX_POOL_PAGES).problems()[0]


def test_E15_a_slot_of_states_takes_216_bytes_and_a_page_8192():
    assert recurrent_config(2, 1).slot_bytes == 216
    assert pool_config(PAIRS).page_bytes == 8192


def test_bytes_of_a_layer_are_those_of_k_and_v_in_all_pages():
    config = pool_config(LAYERS, num_pages=10)
    assert [config.layer_bytes(layer) for layer in config.layers] == [
        2 * 10 * 128 * 4 * 64 * 2,
        2 * 10 * 128 * 2 * 128 * 2,
    ]
    assert config.page_bytes * 10 == sum(map(config.layer_bytes, config.layers))
    fp8 = replace(config, dtype="float8_e4m3fn")
    assert 2 * fp8.page_bytes == config.page_bytes


def test_recurrent_layers_are_checked_unless_there_are_none():
    assert RecurrentConfig().problems() == []
    assert RecurrentConfig(-1).problems()[0].startswith("num_recurrent_layers is -1")
    assert len(RecurrentConfig(1).problems()) == 6
    assert recurrent_config(1, 2, dtype="int8").problems()[0].startswith("dtype is 'int8'")
    assert recurrent_config(1, 2, max_verify_tokens=-1).problems()[0].startswith("max_verify_tokens is -1")


def test_a_model_is_checked_in_edge_llms_order():
    right = HybridConfig(["attention", "mamba", "attention"], pool_config(), recurrent_config(1, 2), 2)
    assert right.problems() == []
    assert [right.local_index(layer) for layer in range(3)] == [0, 0, 1]
    assert right.problems() == replace(right, layer_types=("mamba", "attention", "attention")).problems()
    assert replace(right, layer_types=[]).problems()[0].startswith("layer_types is empty")
    assert replace(right, max_batch_size=0).problems()[0].startswith("max_batch_size is 0")
    assert replace(right, layer_types=["attention", "mamba"]).problems() == [
        "layer_types holds attention 1 times, but 2 such layers are configured"
    ]
    assert replace(right, recurrent=RecurrentConfig()).problems() == [
        "layer_types holds mamba 1 times, but 0 such layers are configured"
    ]
    assert (
        replace(right, layer_types=["attention", "rnn", "attention"])
        .problems()[0]
        .startswith("layer_types holds 'rnn'")
    )
    assert "must be equal" in replace(right, max_batch_size=3).problems()[0]
    with pytest.raises(ConfigError):
        replace(right, max_batch_size=3).validate()
    with pytest.raises(ConfigError):
        recurrent_config(1, 0).validate()
