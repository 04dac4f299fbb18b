"""The layers of a model as its config.json tells them, without the model, `transformers` or torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from kvist.config import DTYPES, AttentionSpec, LayerSpec, StateSpec, is_quantised
from kvist.errors import ConfigError
from kvist.planning.loads import ceil_div, check_count
from kvist.planning.settings import Settings, form_problems, is_size

__all__ = ["decoder_settings", "dtype_of_model", "layers_of_model", "model_setting", "numbered_layers"]

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
_OTHER_NAMES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embd"}
# Where models of several parts, such as one for pictures, have their decoder.
_DECODERS = ("text_config", "thinker_config", "language_config", "llm_config")
# Short names of dtypes, as engines' options have them.
_SHORT_DTYPES = {
    "fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2",
}  # fmt: skip
MAX_LAYERS = 10_000
# Settings that make layers keep something that cannot be read here, each with what that is.
_UNREADABLE = {
    "is_encoder_decoder": "an encoder",
    "block_configs": "settings of their own for some layers",
    "compress_ratios": "compressed keys and values",
    "attn_layer_period": "states of the first Mamba",
    "index_topk": "an index of keys",
    "hybrid_override_pattern": "a pattern of other layers",
    "attn_type_list": "a list of other kinds of attention",
    "block_types": "blocks of another recurrence",
    "linear_attn_config": "another linear attention",
}


def layers_of_model(model_config: Settings, *, dtype: str | None = None, tensor_parallel: int = 1) -> list[LayerSpec]:
    """Return what the layers of a decoder keep, by the contents of its config.json.

    `dtype` is that of K and V, a torch dtype's name or one such as "fp8"; the model's own where None, or "bfloat16".
    States are not quantised: they have the model's dtype then. Latent attention (MLA) keeps one latent of each token
    for all heads. A layer with attention and a recurrent state becomes two.

    With `tensor_parallel`, they are what one of so many ranks keeps: its part of the heads, rounded up. Fewer K and V
    heads than ranks are kept more than once, and so is the latent. Raises `ConfigError` for what cannot be read.

    >>> shape = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    >>> [layer.sliding_window for layer in layers_of_model(shape | {"sliding_window": 512})]
    [512, 512]
    >>> layers_of_model(shape, dtype="fp8", tensor_parallel=4)[0]  # doctest: +ELLIPSIS
    AttentionSpec(num_kv_heads=1, head_dim=64, dtype='float8_e4m3fn', ...)
    """
    return [layer for _, layer in numbered_layers(model_config, dtype=dtype, tensor_parallel=tensor_parallel)]


def numbered_layers(
    model_config: Settings, *, dtype: str | None = None, tensor_parallel: int = 1
) -> list[tuple[int, LayerSpec]]:
    """Return the same, each with the number of the model's layer that it is, or is a part of."""
    check_count(tensor_parallel, "tensor_parallel", at_least=1)
    settings = decoder_settings(model_config)
    of_model = dtype_of_model(model_config)
    known = of_model if dtype is None else _SHORT_DTYPES.get(dtype, dtype)
    try:
        problems = list(_problems(settings, tensor_parallel))
        if known not in DTYPES:
            problems.append(f"dtype is {known!r}, must be one of {', '.join((*DTYPES, *_SHORT_DTYPES))}")
        if problems:
            raise ConfigError(problems)
        return _read(settings, known, of_model if is_quantised(known) else known, tensor_parallel)
    except KeyError as error:
        raise ConfigError([f"the model's config has no {error.args[0]}"]) from error


def _read(settings: Settings, dtype: str, of_states: str, ranks: int) -> list[tuple[int, LayerSpec]]:
    layers: list[tuple[int, LayerSpec]] = []
    keepers: dict[str, int] = {}
    kinds = [_KINDS[name] for name in _layer_types(settings)]
    first_reader = len(kinds) - (settings.get("num_kv_shared_layers") or 0)
    exceptions = settings.get("per_layer_config") or {}
    for index, kind in enumerate(kinds):
        own = {**settings, **exceptions.get(str(index), {})}
        if kind != "state":
            attention = _attention(own, kind, dtype, ranks)
            if index >= first_reader and kind in keepers:
                attention = replace(attention, shares_layer=keepers[kind])
            else:
                keepers[kind] = len(layers)
            layers.append((index, attention))
        if kind in ("state", "hybrid"):
            layers.append((index, _state(own, of_states, ranks)))
    return layers


def decoder_settings(model_config: Settings) -> Settings:
    """Return the settings of the decoder, which models of several parts have one or two levels down, without Nones.

    >>> decoder_settings({"thinker_config": {"text_config": {"num_hidden_layers": 2}}})
    {'num_hidden_layers': 2}
    """
    if not isinstance(model_config, Mapping):
        raise ConfigError([f"the model's config is a {type(model_config).__name__}, must be a mapping"])
    for name in _DECODERS:
        if isinstance(part := model_config.get(name), Mapping) and part:
            return decoder_settings(part)
    return {name: value for name, value in model_config.items() if value is not None}


def dtype_of_model(model_config: Settings) -> str:
    """Return the dtype of the weights as the config names it, "bfloat16" where it does not.

    >>> dtype_of_model({"torch_dtype": "torch.float16"})
    'float16'
    """
    settings = decoder_settings(model_config)
    return _dtype(settings) or _dtype(model_config) or "bfloat16"


def model_setting(settings: Settings, name: str) -> Any:
    """Return a setting of the decoder by its name, or by the one that older configs have for it; None without."""
    return settings.get(name, settings.get(_OTHER_NAMES.get(name, name)))


def _problems(settings: Settings, ranks: int) -> Iterator[str]:
    if wrong := list(form_problems(settings)):
        yield from wrong
        return
    needed = ["num_hidden_layers", "num_attention_heads"]
    if not settings.get("head_dim") and not settings.get("kv_lora_rank"):
        needed.append("hidden_size")
    if missing := [name for name in needed if not is_size(model_setting(settings, name))]:
        yield f"the model's config has no {', '.join(missing)}"
        return
    num_layers = model_setting(settings, "num_hidden_layers")
    if num_layers > MAX_LAYERS:
        yield f"the model's config has {num_layers:,} layers, which are more than {MAX_LAYERS:,}"
        return
    if isinstance(width := settings.get("intermediate_size"), list) and len(width) != num_layers:
        yield f"intermediate_size has {len(width)} entries for {num_layers} layers"
    if (num_heads := model_setting(settings, "num_attention_heads")) % ranks:
        yield f"tensor_parallel is {ranks}, which does not divide the {num_heads} heads of attention"
    for name, meaning in _UNREADABLE.items():
        if settings.get(name):
            yield f"the model's config has {name}, that is {meaning}, which cannot be read"
    yield from _type_problems(settings, _layer_types(settings))


def _type_problems(settings: Settings, types: list[str]) -> Iterator[str]:
    if len(types) != settings.get("num_hidden_layers", len(types)):
        yield f"layer_types has {len(types)} entries for {settings['num_hidden_layers']} layers"
    if unknown := sorted(set(types) - _KINDS.keys()):
        yield f"the model's config has layers of {', '.join(unknown)}, which cannot be read"
    kinds = {_KINDS.get(name) for name in types}
    for kind, name in {"sliding": "sliding_window", "chunked": "attention_chunk_size"}.items():
        if kind in kinds and not is_size(settings.get(name)):
            yield f"the model's config has {kind} layers and no {name}"
    if kinds & {"state", "hybrid"} and _state_shapes(settings, 1) is None:
        yield f"the states of model_type={settings.get('model_type')!r} cannot be read"


def _layer_types(settings: Settings) -> list[str]:
    """Return what each layer is, by name as in `layer_types`."""
    num_layers = model_setting(settings, "num_hidden_layers")
    if types := settings.get("layer_types") or settings.get("layers_block_type"):
        return list(types)
    model_type = settings.get("model_type")
    if model_type in _HYBRIDS:
        return ["hybrid"] * num_layers
    if interval := settings.get("full_attention_interval"):
        return _every(interval, num_layers, "linear_attention")
    if (attending := settings.get("attn_layer_indices")) is not None:
        return ["full_attention" if index in attending else "mamba" for index in range(num_layers)]
    if (attending := settings.get("full_attn_idxs")) is not None:
        return ["full_attention" if index in attending else "conv" for index in range(num_layers)]
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


def _attention(settings: Settings, kind: str, dtype: str, ranks: int) -> AttentionSpec:
    window = settings.get("sliding_window") if kind == "sliding" else None
    chunk = settings.get("attention_chunk_size") if kind == "chunked" else None
    if rank := settings.get("kv_lora_rank"):
        return AttentionSpec(
            1, rank, dtype, value_head_dim=settings["qk_rope_head_dim"], sliding_window=window, chunk_tokens=chunk
        )
    num_heads = model_setting(settings, "num_attention_heads")
    head_dim = settings.get("head_dim") or model_setting(settings, "hidden_size") // num_heads
    one_head = settings.get("multi_query") and not settings.get("new_decoder_architecture")
    told = settings.get("num_key_value_heads") or settings.get("num_kv_heads")
    num_kv_heads = 1 if one_head else told or num_heads
    if kind == "full":
        head_dim = settings.get("global_head_dim") or head_dim
        num_kv_heads = settings.get("num_global_key_value_heads") or num_kv_heads
    num_kv_heads = ceil_div(num_kv_heads, ranks)
    return AttentionSpec(num_kv_heads, head_dim, dtype, sliding_window=window, chunk_tokens=chunk)


def _state(settings: Settings, dtype: str, ranks: int) -> StateSpec:
    """Return a state: the last inputs of its convolution, in the model's dtype, and what recurs, in float32."""
    shapes = _state_shapes(settings, ranks)
    assert shapes is not None
    return StateSpec(shapes, (dtype, "float32")[: len(shapes)])


def _state_shapes(settings: Settings, ranks: int) -> tuple[tuple[int, ...], ...] | None:
    """Return the shapes of a rank's states: its part of the heads, and the groups of Mamba-2 that these read."""
    if num_heads := settings.get("linear_num_value_heads"):
        num_heads, num_key_heads = ceil_div(num_heads, ranks), ceil_div(settings["linear_num_key_heads"], ranks)
        key_dim, value_dim = settings["linear_key_head_dim"], settings["linear_value_head_dim"]
        num_inputs = 2 * num_key_heads * key_dim + num_heads * value_dim
        return (num_inputs, settings["linear_conv_kernel_dim"]), (num_heads, key_dim, value_dim)
    if num_heads := settings.get("mamba_n_heads"):
        inner = settings.get("mamba_d_ssm") or settings["mamba_expand"] * settings["hidden_size"]
        num_groups = ceil_div(settings["mamba_n_groups"], ranks)
        num_inputs = ceil_div(inner, ranks) + 2 * num_groups * settings["mamba_d_state"]
        heads = (ceil_div(num_heads, ranks), settings["mamba_d_head"], settings["mamba_d_state"])
        return (num_inputs, settings["mamba_d_conv"]), heads
    if length := settings.get("conv_L_cache"):
        return ((ceil_div(settings["hidden_size"], ranks), length),)
    return None


def _dtype(settings: Settings) -> str | None:
    named = settings.get("dtype") or settings.get("torch_dtype")
    return str(named).removeprefix("torch.") if named else None
