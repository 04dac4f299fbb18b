"""What each layer of a `transformers` decoder caches, found by running one token through it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer, get_layer_types_and_kwargs

from kvist.config import DTYPES, AttentionSpec, LayerSpec, StateSpec, is_quantised
from kvist.errors import ConfigError

__all__ = [
    "ModelLayers",
    "StatePart",
    "cache_argument",
    "kept_as",
    "load_states",
    "model_layers",
    "run_tokens",
    "state_tensors",
]

StatePart = tuple[Literal["conv_states", "recurrent_states"], int]
"""A tensor of a recurrent layer's state: the attribute of a `LinearAttentionLayer` that holds it, and its key there."""

# What transformers calls the layers that a cache of ours can hold, "reuse" apart, which it calls "dummy", too.
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "hybrid"}
_RECURRENT = {"conv", "linear_attention", "hybrid"}
_NOTHING = {"dummy"}

# States that differ by more, relative to their size, do not differ by rounding, whatever the dtype.
_MAX_ROUNDING = 0.05


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """What a model caches, as the `specs` of a `CacheConfig`, and where among them each of its layers finds its own.

    `attention` and `states` have an entry for each layer of the model: the index of the spec of its K and V, and of its
    recurrent state, or None. A layer may have both, and then takes two places. One that reads the K and V of another
    has a spec that says so (`AttentionSpec.shares_layer`). `state_parts` says, for each layer, what the shapes of its
    `StateSpec` are, in their order. `latent` are the layers that make their keys and values anew, of all tokens, from
    what they cache. With `asks_for_positions`, layers take the position of the first new token from the cache.
    """

    specs: tuple[LayerSpec, ...]
    attention: tuple[int | None, ...]
    states: tuple[int | None, ...]
    state_parts: tuple[tuple[StatePart, ...], ...]
    latent: frozenset[int]
    asks_for_positions: bool
    device: torch.device

    @property
    def has_states(self) -> bool:
        """Whether any layer is recurrent."""
        return any(index is not None for index in self.states)


def model_layers(model: PreTrainedModel, *, checkpoint_tokens: int | None = None) -> ModelLayers:
    """Return what each layer of `model` caches; `checkpoint_tokens` goes to the `StateSpec`s of recurrent ones.

    One token is run through the model, so heads, sizes and dtypes are those of its real keys, values and states. What
    of the past a layer sees is what its config says. Raises `ConfigError`, naming every reason, for a layer that a
    cache of blocks cannot hold, for recurrent layers that forget their state when they go on with more than one token,
    and for layers on several devices.
    """
    config: Any = model.config.get_text_config(decoder=True)
    kinds, settings = get_layer_types_and_kwargs(config)
    donors = _donors(config)
    if problems := list(_problems(model, kinds, donors)):
        raise ConfigError(problems)
    layers: list[Any] = _cached(model, 1).layers
    if _RECURRENT & set(kinds) and _forgets_states(model):
        raise ConfigError(
            [
                f"{type(model).__name__} forgets its recurrent states when it goes on with several tokens at once, "
                "so neither can a prompt be computed in chunks, nor only what follows a cached prefix"
            ]
        )
    windows = [each.get("sliding_window") for each in settings]
    specs, attention, states = _placed(kinds, windows, layers, donors, checkpoint_tokens)
    is_latent = getattr(config, "kv_lora_rank", None) is not None
    return ModelLayers(
        tuple(specs),
        tuple(attention),
        tuple(states),
        tuple(_state_parts(layer) for layer in layers),
        frozenset(index for index, place in enumerate(attention) if is_latent and place is not None),
        bool(getattr(config, "attn_temperature_tuning", False)),
        _device(model, layers),
    )


def kept_as(specs: Sequence[LayerSpec], kv_dtype: str | None) -> tuple[LayerSpec, ...]:
    """Return the specs of layers with K and V in another dtype: one of 8 or 4 bits, or, where None, the model's own.

    Raises `ConfigError` for others.
    """
    if kv_dtype is None:
        return tuple(specs)
    if kv_dtype not in DTYPES or not is_quantised(kv_dtype):
        allowed = ", ".join(filter(is_quantised, DTYPES))
        raise ConfigError([f"kv_dtype is {kv_dtype!r}, must be one of {allowed}, or None for the model's own"])
    return tuple(replace(spec, dtype=kv_dtype) if isinstance(spec, AttentionSpec) else spec for spec in specs)


def cache_argument(model: torch.nn.Module) -> str:
    """Return the name by which `model` takes its cache: `cache` since transformers 5.24, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def run_tokens(model: PreTrainedModel, first: int, end: int, **arguments: Any) -> None:
    """Run the tokens `[first, end)`, at positions of these numbers, through the model."""
    tokens = torch.arange(first, end, device=model.device)[None]
    if "position_ids" in inspect.signature(model.forward).parameters:
        arguments["position_ids"] = tokens
    forward: Any = model
    with torch.inference_mode():
        forward(input_ids=tokens, **arguments)


def state_tensors(layer: Any, parts: Sequence[StatePart]) -> list[Tensor]:
    """Return the state of a `LinearAttentionLayer`, `[B, *shape]` for each of its parts."""
    return [getattr(layer, name)[key] for name, key in parts]


def load_states(layer: Any, parts: Sequence[StatePart], tensors: Sequence[Tensor]) -> None:
    """Let a `LinearAttentionLayer` go on from a state, `[B, *shape]` for each of its parts: it changes these."""
    for (name, key), tensor in zip(parts, tensors, strict=True):
        getattr(layer, name)[key] = tensor
        getattr(layer, f"is_{name}_initialized")[key] = True
        layer.has_previous_state[key] = True
        if name == "conv_states":
            layer.conv_kernel_size[key] = tensor.shape[-1]
            layer.dtype, layer.device = tensor.dtype, tensor.device


def _cached(model: PreTrainedModel, *ends: int) -> DynamicCache:
    """Return what the model caches of the tokens up to the last of `ends`, run in pieces that end there."""
    cache = DynamicCache(config=model.config)
    for first, end in pairwise((0, *ends)):
        run_tokens(model, first, end, use_cache=True, **{cache_argument(model): cache})
    return cache


def _forgets_states(model: PreTrainedModel) -> bool:
    """Whether what the recurrent layers keep of four tokens depends on whether they come in two pieces."""
    for whole, pieces in zip(_cached(model, 4).layers, _cached(model, 2, 4).layers, strict=True):
        parts = _state_parts(whole)
        for one, other in zip(state_tensors(whole, parts), state_tensors(pieces, parts), strict=True):
            difference = (one.float() - other.float()).norm() / one.float().norm().clamp(min=1e-9)
            if difference > _MAX_ROUNDING:
                return True
    return False


def _problems(model: PreTrainedModel, kinds: list[str], donors: dict[int, int]) -> Iterator[str]:
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        yield f"{name} is an encoder-decoder model, and only decoders are supported"
    if others := sorted(set(kinds) - _ATTENTION - _RECURRENT - _NOTHING):
        yield f"{name} has layers of {', '.join(others)}, and blocks cannot hold what these cache"
    if foreign := [index for index, donor in donors.items() if donor < 0]:
        yield f"{name} has layers that read the keys and values of another model: {', '.join(map(str, foreign))}"


def _donors(config: Any) -> dict[int, int]:
    """Return, by layer that reads another one's K and V, the last before it of its kind that stores them; or -1."""
    last: dict[str, int] = {}
    donors = {}
    for index, mode in enumerate(getattr(config, "kv_sharing_modes", None) or []):
        kind = config.layer_types[index]
        if mode == "store":
            last[kind] = index
        elif mode == "reuse":
            donors[index] = last.get(kind, -1)
    return donors


def _device(model: PreTrainedModel, layers: list[Any]) -> torch.device:
    devices = sorted({str(tensor.device) for layer in layers for tensor in _tensors(layer)})
    if len(devices) > 1:
        raise ConfigError(
            [f"the layers of {type(model).__name__} lie on {', '.join(devices)}, and a cache lies on one device"]
        )
    return torch.device(devices[0])


def _placed(
    kinds: list[str],
    windows: list[int | None],
    layers: list[Any],
    donors: dict[int, int],
    checkpoint_tokens: int | None,
) -> tuple[list[LayerSpec], list[int | None], list[int | None]]:
    """Return the specs of all layers, and by layer the places of its attention's and its state's among them."""
    specs: list[LayerSpec] = []
    attention: list[int | None] = []
    states: list[int | None] = []
    for index, (kind, layer) in enumerate(zip(kinds, layers, strict=True)):
        donor = attention[donors[index]] if index in donors else None
        attention.append(len(specs) if kind in _ATTENTION or donor is not None else None)
        if donor is not None:
            specs.append(replace(cast("AttentionSpec", specs[donor]), shares_layer=donor))
        elif kind in _ATTENTION:
            specs.append(_attention_spec(layer, kind, windows[index]))
        states.append(len(specs) if kind in _RECURRENT else None)
        if kind in _RECURRENT:
            specs.append(_state_spec(layer, checkpoint_tokens))
    return specs, attention, states


def _attention_spec(layer: DynamicLayer, kind: str, window: int | None) -> AttentionSpec:
    keys, values = layer.keys, layer.values
    assert keys is not None
    assert values is not None
    return AttentionSpec(
        num_kv_heads=keys.shape[1],
        head_dim=keys.shape[3],
        value_head_dim=None if values.shape[3] == keys.shape[3] else values.shape[3],
        dtype=_dtype_name(keys),
        sliding_window=window if kind == "sliding_attention" else None,
        chunk_tokens=window if kind == "chunked_attention" else None,
    )


def _state_spec(layer: LinearAttentionLayer, checkpoint_tokens: int | None) -> StateSpec:
    tensors = state_tensors(layer, _state_parts(layer))
    return StateSpec(
        tuple(tuple(tensor.shape[1:]) for tensor in tensors),
        tuple(_dtype_name(tensor) for tensor in tensors),
        checkpoint_tokens,
    )


def _state_parts(layer: Any) -> tuple[StatePart, ...]:
    if not isinstance(layer, LinearAttentionLayer):
        return ()
    names: tuple[Literal["conv_states", "recurrent_states"], ...] = ("conv_states", "recurrent_states")
    pairs = ((name, key) for key in range(layer.number_of_states) for name in names)
    return tuple((name, key) for name, key in pairs if getattr(layer, name)[key] is not None)


def _tensors(layer: Any) -> list[Tensor]:
    states = state_tensors(layer, _state_parts(layer))
    own = (getattr(layer, "keys", None), getattr(layer, "values", None))
    return [tensor for tensor in own if tensor is not None] + states


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
