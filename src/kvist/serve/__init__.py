"""Runs models on a managed KV cache: a pure scheduler, an engine for `transformers` decoders, and a demo.

The scheduler needs no torch, so importing this package loads none; the other names are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvist.serve.scheduler import Chunk, Request, Scheduler

if TYPE_CHECKING:
    from kvist.serve.engine import Engine, Generation, RequestStats, TokenEvent
    from kvist.serve.model import cache_config, load_model
    from kvist.serve.sampling import SamplingParams

__all__ = [
    "Engine", "Generation", "RequestStats", "SamplingParams", "TokenEvent",
    "Chunk", "Request", "Scheduler",
    "cache_config", "load_model",
]  # fmt: skip

_LAZY = {
    "Engine": "kvist.serve.engine",
    "Generation": "kvist.serve.engine",
    "RequestStats": "kvist.serve.engine",
    "TokenEvent": "kvist.serve.engine",
    "SamplingParams": "kvist.serve.sampling",
    "cache_config": "kvist.serve.model",
    "load_model": "kvist.serve.model",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
