"""What a model caches for a token, and whether it depends on the tokens up to that one and on nothing else."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvist.config import AttentionSpec
from kvist.errors import ConfigError
from kvist.serve.model import prefix_problems

__all__ = ["attention_specs", "cache_argument", "weight_stamps"]


def weight_stamps(model: torch.nn.Module) -> list[tuple[int, int]]:
    """Return what changes whenever the weights of `model` do: in place (an optimizer's step, a merged adapter) or anew.

    Switching adapters that lie beside the weights changes nothing here.
    """
    return [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in model.parameters()]


def cache_argument(model: torch.nn.Module) -> str:
    """Return the name by which `model` takes its cache: `cache` since transformers 5.24, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def attention_specs(model: PreTrainedModel) -> tuple[list[AttentionSpec], torch.device]:
    """Return what each attention layer of `model` caches, and the device it lies on.

    Found by running one token through the model, so heads, sizes and dtypes are those of its real keys and values.
    Raises `ConfigError`, naming every reason, for a model whose cached prefixes could not be reused.
    """
    if problems := _problems(model):
        raise ConfigError(problems)
    layers = _cache_one_token(model)
    devices = sorted({str(keys.device) for keys, _ in layers})
    if len(devices) > 1:
        raise ConfigError([f"the model's layers lie on {', '.join(devices)}; a PagedCache needs them on one device"])
    return [_spec(keys, values) for keys, values in layers], layers[0][0].device


def _cache_one_token(model: PreTrainedModel) -> list[tuple[Tensor, Tensor]]:
    """Run one token through the model and return each layer's keys and values, `[1, num_kv_heads, 1, head_dim]`."""
    cache = DynamicCache(config=model.config)
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    with torch.no_grad():
        model(input_ids=token, use_cache=True, **{cache_argument(model): cache})
    return [(keys, values) for keys, values, *_ in cache]


def _spec(keys: Tensor, values: Tensor) -> AttentionSpec:
    return AttentionSpec(
        num_kv_heads=keys.shape[1],
        head_dim=keys.shape[3],
        value_head_dim=None if values.shape[3] == keys.shape[3] else values.shape[3],
        dtype=str(keys.dtype).removeprefix("torch."),
    )


def _problems(model: PreTrainedModel) -> list[str]:
    config = model.config.get_text_config(decoder=True)
    problems = []
    if model.config.is_encoder_decoder:
        problems.append(f"{type(model).__name__} is an encoder-decoder; a PagedCache serves decoders only")
    if other := sorted(
        {type(layer).__name__ for layer in DynamicCache(config=config).layers} - {DynamicLayer.__name__}
    ):
        problems.append(f"a PagedCache serves layers of plain full attention; this model also needs {', '.join(other)}")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        problems.append(f"{type(model).__name__} takes no position_ids, so what they would be cannot be checked")
    problems += prefix_problems(config)
    return problems
