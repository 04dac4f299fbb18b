"""Whether what a model caches depends on the tokens up to that one and on nothing else, and what of the model it is."""

from __future__ import annotations

import inspect

import torch
from transformers import PreTrainedModel

from kvist.config import CacheConfig
from kvist.errors import ConfigError
from kvist.serve.layers import ModelLayers, model_layers
from kvist.serve.model import prefix_problems

__all__ = ["max_length", "reusable_layers", "sizes", "weight_stamps"]


def weight_stamps(model: torch.nn.Module) -> list[tuple[int, int]]:
    """Return what changes whenever the weights of `model` do: in place (an optimizer's step, a merged adapter) or anew.

    Switching adapters that lie beside the weights changes nothing here.
    """
    return [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in model.parameters()]


def reusable_layers(model: PreTrainedModel, checkpoint_tokens: int | None) -> ModelLayers:
    """Return what each layer of `model` caches; `checkpoint_tokens` is how far apart states are kept for reuse.

    Raises `ConfigError`, naming every reason, for a model whose cached prefixes could not be reused.
    """
    config = model.config.get_text_config(decoder=True)
    problems = [f"{type(model).__name__} {problem}" for problem in prefix_problems(config)]
    if model.config.is_encoder_decoder:
        problems.append(f"{type(model).__name__} is an encoder-decoder; a PagedCache serves decoders only")
    elif "position_ids" not in inspect.signature(model.forward).parameters:
        problems.append(f"{type(model).__name__} takes no position_ids, so what they would be cannot be checked")
    if problems:
        raise ConfigError(problems)
    layers = model_layers(model, checkpoint_tokens=checkpoint_tokens)
    if not any(index is not None for index in layers.attention):
        raise ConfigError([f"{type(model).__name__} has no attention, and a PagedCache counts tokens by its K and V"])
    return layers


def sizes(config: CacheConfig) -> str:
    """Say how many blocks there are: `8 blocks of 4 tokens`, or by group `100 full + 20 sliding blocks of 4 tokens`."""
    kinds = [f" {group.kind}" for group in config.groups] if len(config.groups) > 1 else [""]
    told = " + ".join(f"{num_blocks}{kind}" for num_blocks, kind in zip(config.group_num_blocks, kinds, strict=True))
    return f"{told} blocks of {config.block_size} tokens"


def max_length(model: PreTrainedModel) -> int:
    """Return how long sequences may be: as many tokens as the model has positions, or 32768 where it sets no limit."""
    return int(getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 32768)
