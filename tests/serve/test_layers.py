import pytest
import torch
import transformers
from tests.serve.models import HYBRID_KINDS, STATE_KINDS, TINY_KINDS, WINDOW, tiny_model

from kvist.config import AttentionSpec, CacheConfig, StateSpec
from kvist.errors import ConfigError
from kvist.serve.layers import load_states, model_layers, state_tensors

FULL = AttentionSpec(num_kv_heads=2, head_dim=16, dtype="float32")
SLIDING = AttentionSpec(num_kv_heads=2, head_dim=16, dtype="float32", sliding_window=WINDOW)


def layers_of(kind, **changes):
    return model_layers(tiny_model(kind, **changes))


def groups_of(kind):
    config = CacheConfig(layers_of(kind).specs, num_blocks=8)
    return [(group.kind, group.layers) for group in config.groups]


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_plain_models_have_a_full_layer_each(kind):
    layers = layers_of(kind)
    assert layers.specs == (FULL,) * 4
    assert layers.attention == (0, 1, 2, 3)
    assert layers.states == (None,) * 4
    assert layers.device == torch.device("cpu")


@pytest.mark.parametrize("kind", ["gemma3_text", "gemma2", "gpt_oss", "cohere2", "olmo3"])
def test_sliding_and_full_layers_alternate(kind):
    assert layers_of(kind).specs == (SLIDING, FULL) * 2
    assert groups_of(kind) == [("full", (1, 3)), ("sliding", (0, 2))]


def test_a_window_without_layer_types_is_every_layers():
    assert layers_of("windowed mistral").specs == (SLIDING,) * 4


def test_chunks_are_told_from_windows():
    assert layers_of("llama4_text").specs[0] == AttentionSpec(2, 16, "float32", chunk_tokens=WINDOW)
    assert groups_of("llama4_text") == [("full", (1, 3)), ("chunked", (0, 2))]
    assert layers_of("llama4_text").asks_for_positions


def test_layers_without_kv_of_their_own_share_those_of_the_last_of_their_kind():
    layers = layers_of("gemma3n_text")
    assert [spec.shares_layer for spec in layers.specs] == [None, None, None, 1, 2, 1]
    assert [spec.sliding_window for spec in layers.specs] == [WINDOW, None] * 3
    assert CacheConfig(layers.specs, num_blocks=8).block_bytes == 16 * 3 * 256


def test_latents_are_cached_not_the_keys_and_values_made_of_them():
    layers = layers_of("deepseek_v3")
    assert layers.specs == (AttentionSpec(1, 24, "float32", value_head_dim=8),) * 4
    assert layers.latent == {0, 1, 2, 3}


def test_recurrent_layers_lie_beside_those_of_attention():
    layers = layers_of("qwen3_next")
    assert layers.attention == (None, None, None, 3)
    assert layers.states == (0, 1, 2, None)
    assert layers.specs[0] == StateSpec(((64, 4), (4, 8, 8)), ("float32", "float32"))
    assert layers.state_parts[0] == (("conv_states", 0), ("recurrent_states", 0))
    assert groups_of("qwen3_next") == [("full", (3,)), ("state", (0, 1, 2))]


def test_a_layer_with_attention_and_a_state_takes_two_places():
    layers = layers_of("falcon_h1")
    assert layers.attention == (0, 2, 4, 6)
    assert layers.states == (1, 3, 5, 7)
    assert groups_of("falcon_h1") == [("full", (0, 2, 4, 6)), ("state", (1, 3, 5, 7))]


def test_a_state_may_be_a_convolutions_inputs_alone():
    assert layers_of("lfm2").specs[0] == StateSpec(((64, 3),), ("float32",))


def test_states_have_the_dtype_of_each_tensor_and_the_distance_asked_for():
    model = tiny_model("falcon_h1").to(torch.bfloat16)
    spec = model_layers(model, checkpoint_tokens=64).specs[1]
    assert spec == StateSpec(((80, 4), (4, 16, 8)), ("bfloat16", "float32"), checkpoint_tokens=64)


def test_keys_and_values_have_the_dtype_of_the_model():
    assert model_layers(tiny_model("llama").to(torch.bfloat16)).specs[0].dtype == "bfloat16"


@pytest.mark.parametrize("kind", [*HYBRID_KINDS, *STATE_KINDS])
def test_looking_at_a_model_leaves_it_as_it_was(kind):
    model = tiny_model(kind)
    before = model.config.to_dict()
    assert model_layers(model) == model_layers(model)
    assert model.config.to_dict() == before


def test_a_loaded_state_goes_on_where_it_was_taken():
    model, token = tiny_model("qwen3_next"), torch.tensor([[7]])
    with torch.inference_mode():
        taken = model(torch.tensor([[3, 4, 5]]), use_cache=True).cache
        parts = model_layers(model).state_parts
        loaded = transformers.DynamicCache(config=model.config)
        for layer, source, its_parts in zip(loaded.layers, taken.layers, parts, strict=True):
            if its_parts:
                load_states(layer, its_parts, [each.clone() for each in state_tensors(source, its_parts)])
            else:
                layer.update(source.keys, source.values)
        logits = [model(token, position_ids=torch.tensor([[3]]), cache=each).logits for each in (taken, loaded)]
    assert torch.equal(*logits)


def test_an_encoder_decoder_is_refused():
    config = transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    with pytest.raises(ConfigError, match="T5ForConditionalGeneration is an encoder-decoder model"):
        model_layers(transformers.T5ForConditionalGeneration(config))


def test_layers_that_blocks_cannot_hold_are_refused():
    model = tiny_model("llama")
    model.config.layer_types = ["full_attention", "indexed_attention", "full_attention", "indexed_attention"]
    with pytest.raises(ConfigError, match="has layers of indexed_attention, and blocks cannot hold what these cache"):
        model_layers(model)


def test_a_model_that_reads_anothers_keys_and_values_is_refused():
    model = tiny_model("gemma4_text", vocab_size_per_layer_input=512, hidden_size_per_layer_input=16)
    model.config.num_kv_shared_layers = 4
    with pytest.raises(ConfigError, match="read the keys and values of another model: 0, 1, 2, 3"):
        model_layers(model)


def test_a_model_that_forgets_its_states_is_refused():
    model = tiny_model("jamba", attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, num_experts=2)
    with pytest.raises(ConfigError, match="forgets its recurrent states when it goes on with several tokens"):
        model_layers(model)
