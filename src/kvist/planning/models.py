"""The layers of a model as its config.json tells them, without the model, `transformers` or torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from kvist.config import DTYPES, PACKED_DTYPES, AttentionSpec, LayerSpec, StateSpec
from kvist.errors import ConfigError

__all__ = ["layers_of_model"]

Settings = Mapping[str, Any]

_KINDS = {
    "full_attention": "full", "attention": "full",
    "sliding_attention": "sliding", "chunked_attention": "chunked",
    "linear_attention": "state", "mamba": "state", "conv": "state",
    "hybrid": "hybrid",
}  # fmt: skip
"""What a layer keeps, by what it is called in `layer_types`; "hybrid" is K and V of all tokens, and a state."""

# Every so many layers one attends to everything, in models whose older configs do not say which.
_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "olmo3": 4}
# These have attention and a state in each layer.
_HYBRIDS = {"falcon_h1"}
MAX_LAYERS = 10_000
_OTHER_NAMES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embd"}
# Settings that make layers keep something that cannot be read here, each with what that is.
_UNREADABLE = {
    "is_encoder_decoder": "an encoder",
    "block_configs": "settings of their own for some layers",
    "compress_ratios": "compressed keys and values",
    "attn_layer_period": "states of the first Mamba",
    "index_topk": "an index of keys",
}


def layers_of_model(model_config: Settings, *, dtype: str | None = None) -> list[LayerSpec]:
    """Return what the layers of a decoder keep, by the contents of its config.json.

    `dtype` is that of K and V, the model's own where None, or "bfloat16"; states are not packed two to a byte. Latent
    attention (MLA) keeps one latent of each token for all heads. A layer with attention and a recurrent state becomes
    two. Raises `ConfigError` for what cannot be read.

    >>> shape = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    >>> [layer.sliding_window for layer in layers_of_model(shape | {"sliding_window": 512})]
    [512, 512]
    """
    try:
        return _layers(model_config, dtype)
    except ConfigError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise ConfigError([f"the model's config has values of kinds that cannot be read: {error}"]) from error


def _layers(model_config: Settings, dtype: str | None) -> list[LayerSpec]:
    settings = model_config.get("text_config") or model_config
    of_model = _dtype(settings) or _dtype(model_config) or "bfloat16"
    known = dtype or of_model
    problems = list(_problems(settings))
    if known not in DTYPES:
        problems.append(f"dtype is {known!r}, must be one of {', '.join(DTYPES)}")
    if problems:
        raise ConfigError(problems)
    kinds = [_KINDS[name] for name in _layer_types(settings)]
    layers: list[LayerSpec] = []
    keepers: dict[str, int] = {}
    first_reader = len(kinds) - (settings.get("num_kv_shared_layers") or 0)
    exceptions = settings.get("per_layer_config") or {}
    for index, kind in enumerate(kinds):
        own = {**settings, **exceptions.get(str(index), {})}
        if kind != "state":
            attention = _attention(own, kind, known)
            if index >= first_reader and kind in keepers:
                attention = replace(attention, shares_layer=keepers[kind])
            else:
                keepers[kind] = len(layers)
            layers.append(attention)
        if kind in ("state", "hybrid"):
            layers.append(_state(own, of_model if known in PACKED_DTYPES else known))
    return layers


def _problems(settings: Settings) -> Iterator[str]:
    needed = ["num_hidden_layers", "num_attention_heads"]
    if not settings.get("head_dim") and not settings.get("kv_lora_rank"):
        needed.append("hidden_size")
    if missing := [name for name in needed if not _is_size(_setting(settings, name))]:
        yield f"the model's config has no {', '.join(missing)}"
        return
    for name, meaning in _UNREADABLE.items():
        if settings.get(name):
            yield f"the model's config has {name}, that is {meaning}, which cannot be read"
    types = _layer_types(settings)
    if len(types) != settings.get("num_hidden_layers", len(types)):
        yield f"layer_types has {len(types)} entries for {settings['num_hidden_layers']} layers"
    if unknown := sorted(set(types) - _KINDS.keys()):
        yield f"the model's config has layers of {', '.join(unknown)}, which cannot be read"
    kinds = {_KINDS.get(name) for name in types}
    for kind, name in {"sliding": "sliding_window", "chunked": "attention_chunk_size"}.items():
        if kind in kinds and not _is_size(settings.get(name)):
            yield f"the model's config has {kind} layers and no {name}"
    if kinds & {"state", "hybrid"} and _state_shapes(settings) is None:
        yield f"the states of model_type={settings.get('model_type')!r} cannot be read"


def _layer_types(settings: Settings) -> list[str]:
    """Return what each layer is, by name as in `layer_types`."""
    num_layers = _setting(settings, "num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise ConfigError([f"num_hidden_layers is {num_layers}, must be at most {MAX_LAYERS}"])
    if types := settings.get("layer_types"):
        return [str(name) for name in types]
    model_type = settings.get("model_type")
    if model_type in _HYBRIDS:
        return ["hybrid"] * num_layers
    if interval := settings.get("full_attention_interval"):
        return _every(interval, num_layers, "linear_attention")
    if (attending := settings.get("attn_layer_indices")) is not None:
        return ["full_attention" if index in attending else "mamba" for index in range(num_layers)]
    if settings.get("attention_chunk_size"):
        rotates = settings.get("no_rope_layers") or [1] * num_layers
        return ["chunked_attention" if one else "full_attention" for one in rotates]
    if settings.get("sliding_window") and settings.get("use_sliding_window", True):
        if pattern := settings.get("sliding_window_pattern") or _PATTERNS.get(model_type or ""):
            return _every(pattern, num_layers, "sliding_attention")
        first = settings.get("max_window_layers", 0) if "use_sliding_window" in settings else 0
        return ["full_attention" if index < first else "sliding_attention" for index in range(num_layers)]
    return ["full_attention"] * num_layers


def _every(interval: int, num_layers: int, other: str) -> list[str]:
    return [other if (index + 1) % interval else "full_attention" for index in range(num_layers)]


def _attention(settings: Settings, kind: str, dtype: str) -> AttentionSpec:
    window = settings.get("sliding_window") if kind == "sliding" else None
    chunk = settings.get("attention_chunk_size") if kind == "chunked" else None
    if rank := settings.get("kv_lora_rank"):
        return AttentionSpec(
            1, rank, dtype, value_head_dim=settings["qk_rope_head_dim"], sliding_window=window, chunk_tokens=chunk
        )
    num_heads = _setting(settings, "num_attention_heads")
    head_dim = settings.get("head_dim") or _setting(settings, "hidden_size") // num_heads
    one_head = settings.get("multi_query") and not settings.get("new_decoder_architecture")
    told = settings.get("num_key_value_heads") or settings.get("num_kv_heads")
    num_kv_heads = 1 if one_head else told or num_heads
    if kind == "full":
        head_dim = settings.get("global_head_dim") or head_dim
        num_kv_heads = settings.get("num_global_key_value_heads") or num_kv_heads
    return AttentionSpec(num_kv_heads, head_dim, dtype, sliding_window=window, chunk_tokens=chunk)


def _state(settings: Settings, dtype: str) -> StateSpec:
    """Return a state: the last inputs of its convolution, in the model's dtype, and what recurs, in float32."""
    shapes = _state_shapes(settings)
    assert shapes is not None
    return StateSpec(shapes, (dtype, "float32")[: len(shapes)])


def _state_shapes(settings: Settings) -> tuple[tuple[int, ...], ...] | None:
    if num_heads := settings.get("linear_num_value_heads"):
        key_dim, value_dim = settings["linear_key_head_dim"], settings["linear_value_head_dim"]
        num_inputs = 2 * settings["linear_num_key_heads"] * key_dim + num_heads * value_dim
        return (num_inputs, settings["linear_conv_kernel_dim"]), (num_heads, key_dim, value_dim)
    if num_heads := settings.get("mamba_n_heads"):
        inner = settings.get("mamba_d_ssm") or settings["mamba_expand"] * settings["hidden_size"]
        num_inputs = inner + 2 * settings["mamba_n_groups"] * settings["mamba_d_state"]
        return (num_inputs, settings["mamba_d_conv"]), (num_heads, settings["mamba_d_head"], settings["mamba_d_state"])
    if length := settings.get("conv_L_cache"):
        return ((settings["hidden_size"], length),)
    return None


def _setting(settings: Settings, name: str) -> Any:
    return settings.get(name, settings.get(_OTHER_NAMES.get(name, name)))


def _dtype(settings: Settings) -> str | None:
    named = settings.get("dtype") or settings.get("torch_dtype")
    return str(named).removeprefix("torch.") if named else None


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
