"""How many parameters a decoder has, and how many bytes they take, estimated from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvist.config import DTYPE_BYTES
from kvist.errors import ConfigError
from kvist.planning.models import decoder_settings, dtype_of_model, model_setting, numbered_layers
from kvist.planning.settings import Settings

__all__ = ["LayerWeights", "Weights", "weights_of_model"]

# Projections of the MLP: up and down; all others have a gate as well.
_UNGATED = {"gpt2", "gpt_bigcode", "gpt_neox", "gptj", "bloom", "falcon", "mpt", "opt", "phi", "starcoder2"}
# The output of attention is gated, by as many numbers as the queries have.
_GATED_ATTENTION = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
# Bits of a weight, with its part of the scales, by the method that it was quantised with.
_METHOD_BITS = {"fp8": 8.0, "fbgemm_fp8": 8.0, "modelopt": 8.0, "mxfp4": 4.25, "nvfp4": 4.5}
_SCALE_BITS = 0.25


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Parameters of one layer: those of attention and the MLP, of all experts, and of the experts that a token uses."""

    num_dense: int
    num_experts: int = 0
    num_active_experts: int = 0


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters of a decoder, and what they take in memory.

    `embedding` and `head` are the parameters of the first and the last stage besides their `layers`; `head` is 0 where
    both share theirs. `dense_bits` and `expert_bits` are those of a parameter of a layer, `other_bits` of all others.
    `source` says where the bits come from.
    """

    embedding: int
    head: int
    layers: tuple[LayerWeights, ...]
    dense_bits: float
    expert_bits: float
    other_bits: float
    source: str

    @property
    def num_parameters(self) -> int:
        """All of them."""
        return self.embedding + self.head + sum(layer.num_dense + layer.num_experts for layer in self.layers)

    @property
    def num_active(self) -> int:
        """Those that the forward pass of one token multiplies with: of the experts, the ones that it uses."""
        of_layers = sum(layer.num_dense + layer.num_active_experts for layer in self.layers)
        return of_layers + (self.head or self.embedding)

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters."""
        return self.stage_bytes(range(len(self.layers)))

    def stage_bytes(self, stage: range) -> int:
        """Return the bytes of a stage of layers; the first has the embedding, the last has the head, or that again."""
        bits = sum(self._layer_bits(self.layers[index]) for index in stage)
        is_first, is_last = 0 in stage, len(self.layers) - 1 in stage
        bits += self.other_bits * self.embedding * is_first
        bits += self.other_bits * (self.head or self.embedding * (not is_first)) * is_last
        return int(bits / 8)

    def _layer_bits(self, layer: LayerWeights) -> float:
        return layer.num_dense * self.dense_bits + layer.num_experts * self.expert_bits


def weights_of_model(model_config: Settings) -> Weights:
    """Return the parameters of a decoder, by the contents of its config.json.

    Counted are embeddings, projections, experts and their routers, convolutions; not norms and biases, nor what is no
    part of the decoder, such as an encoder of pictures or layers for drafts. Raises `ConfigError` where sizes are
    missing.

    >>> llama_8b = {
    ...     "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
    ...     "intermediate_size": 14336, "vocab_size": 128256,
    ... }
    >>> weights = weights_of_model(llama_8b)
    >>> weights.num_parameters, weights.num_bytes / 1e9
    (8029995008, 16.059990016)
    """
    settings = decoder_settings(model_config)
    missing = [name for name in ("vocab_size", "hidden_size") if not model_setting(settings, name)]
    if missing:
        raise ConfigError([f"the model's config has no {', '.join(missing)}, so its weights cannot be counted"])
    try:
        layers = _layers(model_config, settings)
    except KeyError as error:
        raise ConfigError([f"the model's config has no {error.args[0]}, so its weights cannot be counted"]) from error
    embedding = settings["vocab_size"] * model_setting(settings, "hidden_size")
    per_layer = settings.get("vocab_size_per_layer_input", 0) * (settings.get("hidden_size_per_layer_input") or 0)
    is_tied = settings.get("tie_word_embeddings", model_config.get("tie_word_embeddings", _is_tied(settings)))
    dense, experts, source = _bits(model_config)
    return Weights(
        embedding + per_layer * len(layers),
        0 if is_tied else embedding,
        layers,
        dense,
        experts,
        8 * DTYPE_BYTES.get(dtype_of_model(model_config), 2),
        source,
    )


def _is_tied(settings: Settings) -> bool:
    return str(settings.get("model_type", "")).startswith(("gemma", "gpt2", "cohere"))


def _layers(model_config: Settings, settings: Settings) -> tuple[LayerWeights, ...]:
    kept: dict[int, list[str]] = {}
    for index, layer in numbered_layers(model_config):
        kept.setdefault(index, []).append(type(layer).__name__)
    exceptions = settings.get("per_layer_config") or {}
    return tuple(
        _layer({**settings, **exceptions.get(str(index), {})}, index, "AttentionSpec" in kinds, "StateSpec" in kinds)
        for index, kinds in kept.items()
    )


def _layer(settings: Settings, index: int, has_attention: bool, has_state: bool) -> LayerWeights:
    dense = _attention(settings) * has_attention + (_recurrence(settings) if has_state else 0)
    num_experts = next((settings[name] for name in _EXPERTS if settings.get(name)), 0)
    if not num_experts or not _has_experts(settings, index):
        return LayerWeights(dense + _mlp(settings, _width(settings, index)))
    width = settings.get("moe_intermediate_size") or settings["intermediate_size"]
    one = _mlp(settings, width[index] if isinstance(width, list) else width)
    dense += model_setting(settings, "hidden_size") * num_experts + _shared_experts(settings, one)
    active = settings.get("num_experts_per_tok") or settings.get("top_k_experts") or 1
    return LayerWeights(dense, num_experts * one, active * one)


def _has_experts(settings: Settings, index: int) -> bool:
    if (listed := settings.get("moe_layers")) is not None:
        return index in listed
    if index < (settings.get("first_k_dense_replace") or 0) or index in (settings.get("mlp_only_layers") or ()):
        return False
    step = settings.get("decoder_sparse_step") or settings.get("interleave_moe_layer_step") or 1
    return bool((index + 1) % step == 0)


def _shared_experts(settings: Settings, one: int) -> int:
    """Count the parameters of the experts that every token uses."""
    if settings.get("model_type") == "llama4_text":
        return one
    if width := settings.get("shared_expert_intermediate_size"):
        return _mlp(settings, width)
    return one * (settings.get("n_shared_experts") or 0)


def _width(settings: Settings, index: int) -> int:
    """Return the numbers of a token between the projections of an MLP that is not one of experts."""
    width: Any = settings.get("intermediate_size_mlp") or settings.get("intermediate_size") or settings.get("n_inner")
    width = width or 4 * model_setting(settings, "hidden_size")
    width = width[index] if isinstance(width, list) else width
    if settings.get("block_auto_adjust_ff_dim"):
        multiple = settings["block_multiple_of"]
        width = int(int(2 * width / 3) * settings.get("block_ffn_dim_multiplier", 1))
        width = -(-width // multiple) * multiple
    return int(width)


def _mlp(settings: Settings, width: int) -> int:
    num_projections = 2 if settings.get("model_type") in _UNGATED else 3
    return num_projections * int(model_setting(settings, "hidden_size")) * width


def _attention(settings: Settings) -> int:
    hidden, heads = model_setting(settings, "hidden_size"), model_setting(settings, "num_attention_heads")
    if rank := settings.get("kv_lora_rank"):
        rope, nope, values = (settings[name] for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
        lora = settings.get("q_lora_rank")
        queries = lora * (hidden + heads * (nope + rope)) if lora else hidden * heads * (nope + rope)
        latent = hidden * (rank + rope) + rank * heads * (nope + values)
        return int(queries + latent + heads * values * hidden)
    dim = settings.get("head_dim") or hidden // heads
    kv_heads = settings.get("num_key_value_heads") or settings.get("num_kv_heads") or heads
    kv_heads = 1 if settings.get("multi_query") and not settings.get("new_decoder_architecture") else kv_heads
    num_queries = 2 if settings.get("model_type") in _GATED_ATTENTION else 1
    return int(hidden * dim * (heads * (num_queries + 1) + 2 * kv_heads))


def _recurrence(settings: Settings) -> int:
    hidden = model_setting(settings, "hidden_size")
    if heads := settings.get("linear_num_value_heads"):
        keys = settings["linear_num_key_heads"] * settings["linear_key_head_dim"]
        values = heads * settings["linear_value_head_dim"]
        inputs = hidden * (2 * keys + 2 * values + 2 * heads)
        return int(inputs + (2 * keys + values) * settings["linear_conv_kernel_dim"] + values * hidden)
    if heads := settings.get("mamba_n_heads"):
        inner = settings.get("mamba_d_ssm") or settings["mamba_expand"] * hidden
        convolved = inner + 2 * settings["mamba_n_groups"] * settings["mamba_d_state"]
        return int(hidden * (inner + convolved + heads) + convolved * settings["mamba_d_conv"] + inner * hidden)
    return int(4 * hidden * hidden + hidden * settings["conv_L_cache"])


def _bits(model_config: Settings) -> tuple[float, float, str]:
    """Return the bits of a parameter outside experts and in them, and where that is said."""
    dtype = dtype_of_model(model_config)
    own = 8.0 * DTYPE_BYTES.get(dtype, 2)
    told: Any = model_config.get("quantization_config") or decoder_settings(model_config).get("quantization_config")
    if not isinstance(told, Mapping):
        return own, own, f"weights in {dtype}"
    method = told.get("quant_method")
    bits = _quantised_bits(told)
    if bits is None:
        return own, own, f"weights in {dtype}: how many bits quant_method={method!r} takes is not known"
    return (own if method == "mxfp4" else bits), bits, f"weights quantised by {method}, {bits:g} bits each"


def _quantised_bits(told: Mapping[str, Any]) -> float | None:
    method = str(told.get("quant_method"))
    if method in _METHOD_BITS:
        return _METHOD_BITS[method]
    if method == "bitsandbytes":
        return 4 + _SCALE_BITS if told.get("load_in_4bit") else 8.0
    groups: Any = told.get("config_groups")
    of_group: Any = next(iter(groups.values()), {}) if isinstance(groups, Mapping) else {}
    bits = told.get("bits") or told.get("w_bit") or (of_group.get("weights") or {}).get("num_bits")
    return float(bits) + (_SCALE_BITS if bits < 8 else 0) if isinstance(bits, int) else None
