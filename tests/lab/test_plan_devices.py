"""What models keep on accelerators: weights, stages, heads over ranks, and what tiers would be worth."""

import pytest
from tests.lab.plan_models import DEEPSEEK_V3, GEMMA3, GPT_OSS, LLAMA, MODELS, QWEN3_NEXT

from kvist import ArgumentError, AttentionSpec, ConfigError, KvistError, NeverFits, StateSpec
from kvist.planning import (
    Demand,
    Deployment,
    Rates,
    decoder_settings,
    layers_of_model,
    plan_devices,
    rates_of,
    stage_configs,
    value_of_tiers,
    weights_of_model,
)
from kvist.planning.stages import stages_of

SMALL = {
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64, "vocab_size": 1000,
    "intermediate_size": 128,
}  # fmt: skip
HYBRID = SMALL | {
    "model_type": "falcon_h1", "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
    "mamba_n_groups": 1, "mamba_d_conv": 4,
}  # fmt: skip


def small(**deployment):
    """A deployment of the small model where nothing but the cache takes memory."""
    return Deployment(**({"gpu_memory": "1 MiB", "weights": 1, "reserved": 1, "utilisation": 1.0} | deployment))


# -- heads over ranks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1), (32, 1)])
def test_heads_of_k_and_v_are_divided_over_ranks_and_kept_again_when_there_are_too_few(ranks, heads):
    assert {layer.num_kv_heads for layer in layers_of_model(LLAMA, tensor_parallel=ranks)} == {heads}


def test_heads_that_do_not_divide_are_rounded_up():
    (layer, *_) = layers_of_model(SMALL | {"num_key_value_heads": 6, "num_attention_heads": 12}, tensor_parallel=4)
    assert layer.num_kv_heads == 2


def test_every_rank_keeps_the_whole_latent():
    assert layers_of_model(DEEPSEEK_V3, tensor_parallel=8) == layers_of_model(DEEPSEEK_V3)


def test_states_are_divided_by_heads():
    state = layers_of_model(QWEN3_NEXT, tensor_parallel=4)[0]
    assert state == StateSpec(((2048, 4), (8, 128, 128)), ("bfloat16", "float32"))


def test_the_groups_of_mamba_are_kept_by_every_rank_that_reads_them():
    """64 numbers and 4 heads over two ranks, and the one group's 2 x 8 numbers in both."""
    (_, state, *_) = layers_of_model(HYBRID, tensor_parallel=2)
    assert state.shapes == ((32 + 16, 4), (2, 16, 8))


def test_ranks_that_do_not_divide_the_heads_of_attention_are_refused():
    with pytest.raises(ConfigError, match="tensor_parallel is 3, which does not divide the 32 heads of attention"):
        layers_of_model(LLAMA, tensor_parallel=3)
    with pytest.raises(ArgumentError, match="tensor_parallel is 0"):
        layers_of_model(LLAMA, tensor_parallel=0)


# -- reading configs --------------------------------------------------------------------------------------------------


def test_dtypes_have_short_names_and_states_are_not_quantised():
    layers = layers_of_model(QWEN3_NEXT, dtype="fp8")
    assert layers[3] == AttentionSpec(2, 256, "float8_e4m3fn")
    assert layers[0].dtypes == ("bfloat16", "float32")
    assert layers_of_model(SMALL, dtype="fp16")[0].dtype == "float16"
    with pytest.raises(ConfigError, match=r"dtype is 'fp6', must be one of float32, .*, bf16, fp8"):
        layers_of_model(SMALL, dtype="fp6")


def test_the_decoder_of_a_model_may_be_two_levels_down():
    assert decoder_settings({"thinker_config": {"text_config": SMALL}}) == SMALL
    assert len(layers_of_model({"thinker_config": {"text_config": SMALL, "dtype": "float16"}})) == 4


def test_layers_are_convolutions_where_an_older_config_says_which_attend():
    layers = layers_of_model(SMALL | {"model_type": "lfm2", "full_attn_idxs": [1, 3], "conv_L_cache": 3})
    assert [type(layer) for layer in layers] == [StateSpec, AttentionSpec] * 2


@pytest.mark.parametrize("name", ["hybrid_override_pattern", "attn_type_list", "block_types", "linear_attn_config"])
def test_kinds_of_layers_that_are_not_known_are_not_taken_for_full_attention(name):
    with pytest.raises(ConfigError, match=f"the model's config has {name}, that is .*, which cannot be read"):
        layers_of_model(SMALL | {name: ["something"]})


def test_a_size_that_is_missing_is_named():
    lacking = {name: value for name, value in DEEPSEEK_V3.items() if name != "qk_rope_head_dim"}
    with pytest.raises(ConfigError, match="the model's config has no qk_rope_head_dim"):
        layers_of_model(lacking)
    lacking = {name: value for name, value in DEEPSEEK_V3.items() if name != "v_head_dim"}
    with pytest.raises(ConfigError, match="the model's config has no v_head_dim, so its weights cannot be counted"):
        weights_of_model(lacking)
    with pytest.raises(ConfigError, match="no vocab_size, so its weights"):
        weights_of_model({name: value for name, value in SMALL.items() if name != "vocab_size"})


JUNK = [None, "8", -1, 0, 1.5, [], {}, "x", [1, 2], True, 10**12, {"1": {"head_dim": "x"}}, [None], [[]]]
HINTS = {
    "full_attention_interval": 4, "mamba_n_heads": 4, "conv_L_cache": 3, "num_kv_shared_layers": 2, "num_experts": 4,
    "attention_chunk_size": 128, "no_rope_layers": [1, 0], "attn_layer_indices": [1], "full_attn_idxs": [1],
    "moe_layers": [1], "quantization_config": {"bits": 4}, "hidden_size_per_layer_input": 8, "text_config": {},
    "vocab_size_per_layer_input": 8, "layers_block_type": ["attention"], "per_layer_config": {"1": {}},
}  # fmt: skip
"""Settings that other models have."""


@pytest.mark.parametrize("name", MODELS)
def test_any_setting_may_be_anything_and_is_read_or_refused(name):
    """Each setting, and each of other models, replaced by what it should not be."""
    decoder = decoder_settings(MODELS[name])
    refused = 0
    for setting in {**decoder, **HINTS}:
        for value in [*JUNK, HINTS.get(setting)]:
            settings = {**decoder, setting: value}
            try:
                plan_devices(settings, Deployment("900 GiB", 2, 2), Demand(1024))
            except KvistError:
                refused += 1
    assert refused > 100


# -- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "billions", "active", "gigabytes"),
    [("llama", 8.03, 7.50, 16.1), ("gemma3", 27.0, 27.0, 54.0), ("gpt_oss", 20.9, 3.6, 13.75),
     ("deepseek_v3", 671.0, 36.6, 672.9), ("qwen3_next", 79.7, 3.6, 159.3)],
)  # fmt: skip
def test_the_weights_of_published_models_come_out(name, billions, active, gigabytes):
    weights = weights_of_model(MODELS[name])
    assert round(weights.num_parameters / 1e9, 2) == pytest.approx(billions, rel=0.005)
    assert weights.num_active / 1e9 == pytest.approx(active, rel=0.02)
    assert weights.num_bytes / 1e9 == pytest.approx(gigabytes, rel=0.005)


@pytest.mark.parametrize(
    ("quantised", "bits"),
    [
        ({"quant_method": "gptq", "bits": 4}, 4.25),
        ({"quant_method": "awq", "w_bit": 4}, 4.25),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.25),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, 8),
        ({"quant_method": "some new one"}, 16),
    ],
)
def test_quantised_weights_take_their_bits_and_embeddings_do_not(quantised, bits):
    weights = weights_of_model(LLAMA | {"quantization_config": quantised})
    assert (weights.dense_bits, weights.expert_bits, weights.other_bits) == (bits, bits, 16)
    assert str(quantised["quant_method"]) in weights.source


def test_stages_have_the_embedding_first_and_the_head_last():
    weights = weights_of_model(SMALL)
    first, last = weights.stage_bytes(range(2)), weights.stage_bytes(range(2, 4))
    assert first + last == weights.num_bytes
    assert first == last == 2 * (64_000 + 2 * weights.layers[0].num_dense)
    tied = weights_of_model(SMALL | {"tie_word_embeddings": True})
    assert tied.num_bytes == weights.num_bytes - 2 * 64_000
    assert tied.stage_bytes(range(2, 4)) == last  # another copy of what the first stage has


# -- stages -----------------------------------------------------------------------------------------------------------


def test_layers_left_over_go_to_stages_before_the_last():
    assert [len(stage) for stage in stages_of(61, 4)] == [15, 15, 16, 15]
    assert [len(stage) for stage in stages_of(62, 4)] == [15, 16, 16, 15]
    assert [len(stage) for stage in stages_of(5, 1)] == [5]
    with pytest.raises(ConfigError, match="pipeline_parallel is 5, more than the 4 layers of the model"):
        stages_of(4, 5)


def test_every_stage_has_equal_blocks_and_the_fullest_decides():
    made = plan_devices(SMALL, small(pipeline_parallel=3), Demand(64))
    first, second, third = stage_configs(SMALL, small(pipeline_parallel=3), Demand(64))
    assert [len(config.layers) for config in (first, second, third)] == [1, 2, 1]
    assert first.num_blocks == second.num_blocks == third.num_blocks == (made.cache.pools[0].num_blocks,)
    assert [stage.cache_bytes for stage in made.stages][1] == 2 * made.stages[0].cache_bytes


def test_a_stage_without_windows_has_no_blocks_of_them():
    settings = SMALL | {"sliding_window": 8, "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2}
    first, last = stage_configs(settings, small(pipeline_parallel=2), Demand(64))
    assert [[group.kind for group in config.groups] for config in (first, last)] == [["sliding"], ["full"]]


def test_a_layer_cannot_read_the_cache_of_another_stage():
    settings = SMALL | {"num_kv_shared_layers": 2}
    with pytest.raises(ConfigError, match="layer 2 reads the cache of layer 1, which pipeline_parallel puts elsewhere"):
        plan_devices(settings, small(pipeline_parallel=2), Demand(64))
    assert plan_devices(settings, small(), Demand(64)).cache.token_bytes == 2 * 2 * 2 * 8 * 2


def test_a_layer_with_attention_and_a_state_stays_in_one_stage():
    first, last = stage_configs(HYBRID, small(pipeline_parallel=2), Demand(64))
    assert [type(layer) for layer in first.layers] == [AttentionSpec, StateSpec] * 2
    assert first.layers == last.layers


# -- what fits --------------------------------------------------------------------------------------------------------


def test_a_plan_takes_weights_and_activations_off():
    """80 GiB x 0.9 less 14.96 GiB of weights leaves some 440 thousand tokens of 128 KiB."""
    made = plan_devices(LLAMA, Deployment("80 GiB", reserved="1 GiB"), Demand(8192))
    (stage,) = made.stages
    assert stage.weights_bytes == weights_of_model(LLAMA).num_bytes
    assert made.cache.pools[0].num_blocks == (int(80 * 2**30 * 0.9) - stage.weights_bytes - 2**30) // (16 * 131072)
    assert made.num_sequences_at[-1] == (8192, made.cache.concurrency)


def test_all_groups_run_out_at_the_same_number_of_sequences():
    for model in (GEMMA3, GPT_OSS, QWEN3_NEXT):
        made = plan_devices(model, Deployment("640 GiB"), Demand(32768))
        counts = [pool.concurrency / (2 if group.kind == "state" else 1)
                  for pool, group in zip(made.cache.pools, made.cache.groups, strict=True)]  # fmt: skip
        assert max(counts) - min(counts) < 1


def test_so_many_sequences_together_can_be_so_long():
    made = plan_devices(LLAMA, Deployment("80 GiB"), Demand(8192, concurrency=64))
    assert made.longest_together is not None
    assert made.longest_together * 64 <= made.cache.pools[0].num_blocks * 16 < (made.longest_together + 16) * 64
    assert plan_devices(LLAMA, Deployment("80 GiB"), Demand(8192)).longest_together is None


def test_what_was_assumed_is_said():
    told = " ".join(plan_devices(QWEN3_NEXT, Deployment("80 GiB", 4), Demand(8192)).assumptions)
    assert "2 heads of K and V do not divide over 4 ranks: each keeps 1, so some are kept twice" in told
    assert "parameters of the decoder by its config, weights in bfloat16" in told
    assert "two states of each sequence" in told
    assert "activations: 8,192 tokens a pass" in told
    told = " ".join(plan_devices(DEEPSEEK_V3, Deployment("900 GiB", 8, weights="640 GiB"), Demand()).assumptions)
    assert "each of 8 ranks keeps the whole latent" in told
    assert "parameters" not in told


def test_a_model_that_leaves_no_room_is_refused():
    with pytest.raises(NeverFits, match=r"weights and activations take .* bytes more than the 23,192,823,398"):
        plan_devices(GEMMA3, Deployment("24 GiB"), Demand())
    with pytest.raises(NeverFits, match="less than a block of every group takes"):
        plan_devices(LLAMA, Deployment("1 MiB", weights=1, reserved=1), Demand())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Deployment("80 GiB", 0), "tensor_parallel is 0"),
        (lambda: Deployment("80 GiB", 1, -1), "pipeline_parallel is -1"),
        (lambda: Deployment("80 GiB", utilisation=1.5), "utilisation is 1.5, must be more than 0 and at most 1"),
        (lambda: Deployment("80 GiB", utilisation=float("nan")), "utilisation is nan"),
        (lambda: Demand(0), "max_len is 0"),
        (lambda: Demand(8, concurrency=0), "concurrency is 0"),
        (lambda: Rates(0), "prefill_tokens_s is 0, must be a positive number"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(wrong, message):
    with pytest.raises(ArgumentError, match=message):
        wrong()


# -- tiers ------------------------------------------------------------------------------------------------------------


def value(rates, *, hits_up_to=2**20):
    """What a trace of 4 Mi tokens is worth whose hit rate grows evenly up to so many tokens in the cache."""
    made = plan_devices(LLAMA, Deployment("80 GiB"), Demand(8192))
    return value_of_tiers(made, rates, "a trace", lambda tokens: 0.8 * min(tokens / hits_up_to, 1), 2**22)


def test_a_tier_pays_as_far_as_doubling_it_finds_more():
    """457 thousand tokens fit on the device; up to a million there is more to find, in 71 GiB more."""
    found = value(Rates(10_000))
    host, disk = found.tiers
    assert (host.pays, disk.pays) == (True, True)
    assert (host.worth_bytes, disk.worth_bytes) == (128 * 2**30, 128 * 2**30)
    assert host.best_bytes <= 64 * 2**30  # up to there every GiB finds as much as the first
    assert host.load_s == 131072 / 25e9
    assert found.largest_hit_rate == 0.8
    assert found.hit_rate == pytest.approx(0.8 * found.device_tokens / 2**20)
    gains = [size.gain for size in found.sizes]
    assert found.hit_rate + sum(gains) == pytest.approx(0.8)
    assert found.sizes[0].gain_per_gib == found.sizes[0].gain / (found.sizes[0].memory_bytes / 2**30)


def test_a_tier_does_not_pay_where_computing_is_faster():
    host, disk = value(Rates(100_000)).tiers
    assert (host.pays, disk.pays) == (True, False)
    assert "disk: does not pay, computing is faster: 26.21 µs to load a token, 10.00 µs" in str(value(Rates(100_000)))


def test_a_tier_does_not_pay_where_the_device_has_all_that_comes_again():
    found = value(Rates(10_000), hits_up_to=1000)
    assert [tier.pays for tier in found.tiers] == [False, False]
    assert "host: does not pay, doubling it finds little more" in str(found)


def test_typical_rates_follow_from_the_parameters_that_a_token_uses():
    made = plan_devices(DEEPSEEK_V3, Deployment("141 GiB", 8), Demand(8192))
    assert rates_of(made, Deployment("141 GiB", 8)).prefill_tokens_s == 8 * 4e14 / (2 * made.num_active_parameters)
    assert rates_of(made, Deployment("141 GiB", 8), prefill_tokens_s=5000.0).prefill_tokens_s == 5000
