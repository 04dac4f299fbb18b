"""Runs models on a managed KV cache: a pure scheduler, an engine for `transformers` decoders, and a demo.

The scheduler and the settings of sampling need no torch, so importing this package loads none; the other names are
loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvist.serve.sampling import SamplingParams
from kvist.serve.scheduler import Chunk, Request, Scheduler

if TYPE_CHECKING:
    from kvist.serve.engine import Engine, Generation, RequestStats, TokenEvent
    from kvist.serve.fingerprint import model_fingerprint
    from kvist.serve.model import cache_config, load_model

__all__ = [
    "Engine", "Generation", "RequestStats", "SamplingParams", "TokenEvent",
    "Chunk", "Request", "Scheduler",
    "cache_config", "load_model", "model_fingerprint",
]  # fmt: skip

_LAZY = {
    "Engine": "kvist.serve.engine",
    "Generation": "kvist.serve.engine",
    "RequestStats": "kvist.serve.engine",
    "TokenEvent": "kvist.serve.engine",
    "cache_config": "kvist.serve.model",
    "load_model": "kvist.serve.model",
    "model_fingerprint": "kvist.serve.fingerprint",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(_LAZY[name])
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        raise ModuleNotFoundError(f"{name} needs {error.name}: pip install 'kvist[serve]'", name=error.name) from error
    return getattr(module, name)
