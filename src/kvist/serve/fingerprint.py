"""What the K and V of a model depend on besides tokens, as a name that any process makes alike."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvist.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["model_fingerprint"]

NUM_SAMPLES = 64
"""Of each tensor so many elements are taken as they are, evenly spread, besides a sum of all."""

# Where a model was loaded from and by what, how it attends, and what concerns text alone.
_NOT_ITS_NUMBERS = {
    "_name_or_path", "_commit_hash", "transformers_version", "architectures", "_attn_implementation", "use_cache",
    "return_dict", "output_attentions", "output_hidden_states", "bos_token_id", "eos_token_id", "pad_token_id",
}  # fmt: skip

_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def model_fingerprint(model: PreTrainedModel) -> str:
    """Return a name for all that the K and V of `model` depend on besides tokens, for `CacheConfig.model`.

    It has the class and dtype of the model, and a SHA-256 over its config, and over name, shape, dtype and contents of
    every weight and buffer, adapters that are loaded included. Contents count as the sum of their bits, taken as ints,
    and samples, so that any single change is seen, and all weights are read once: about a second per GB on one core.

    Where the model came from is not part of it: a hub's name and revision say less than contents do, and a folder's
    name would keep machines from sharing. Neither is which of several loaded adapters is in use (that belongs into the
    namespace), nor device, kernels and versions of torch, from which numbers differ by rounding.

    Raises `ConfigError` for a model whose weights are not loaded.
    """
    digest = sha256(_settings(model).encode())
    for name, tensor in _tensors(model):
        if tensor.is_meta:
            raise ConfigError(
                [f"{name} of {type(model).__name__} is not loaded: name the model yourself, as model=..."]
            )
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        digest.update(_contents(tensor))
    dtype = str(model.dtype).removeprefix("torch.")
    return f"{type(model).__name__} {dtype} {digest.hexdigest()[:32]}"


def _settings(model: PreTrainedModel) -> str:
    return json.dumps(_told(model.config.to_dict()), sort_keys=True, separators=(",", ":"), default=str)


def _told(settings: Any) -> Any:
    if not isinstance(settings, dict):
        return settings
    return {str(name): _told(value) for name, value in settings.items() if name not in _NOT_ITS_NUMBERS}


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _contents(tensor: Tensor) -> bytes:
    """Return what changes with any element: the sum of all, taken as ints, and some of them as they are."""
    if not tensor.numel():
        return b""
    flat = tensor.detach().contiguous().flatten()
    ints = flat.view(_INTS.get(flat.itemsize, torch.uint8))
    places = torch.linspace(0, len(ints) - 1, NUM_SAMPLES, dtype=torch.float64).long()
    numbers = [ints.sum(dtype=torch.int64)[None], ints[places.to(ints.device)].long()]
    return torch.cat(numbers).cpu().numpy().tobytes()
