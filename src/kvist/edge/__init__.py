"""The cache of TensorRT Edge-LLM, member by member: pool, page table, lengths, states, and the manager around them.

Names are those of this library; each docstring says which member of Edge-LLM it stands for. Configurations and page
arithmetic need the standard library only; what holds tensors is loaded when first named, and needs torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvist.edge.config import HybridConfig, LayerConfig, PoolConfig, RecurrentConfig

if TYPE_CHECKING:
    from kvist.edge.hybrid import HybridCache
    from kvist.edge.lengths import SequenceLengths
    from kvist.edge.page_table import KVPageTable, SparsePageTable
    from kvist.edge.pool import KVPagePool
    from kvist.edge.saved import PromptReuse, SavedPrefix, reuse_of
    from kvist.edge.sliding import SlidingPages
    from kvist.edge.states import RecurrentStates

__all__ = [
    "HybridCache",
    "HybridConfig",
    "KVPagePool",
    "KVPageTable",
    "LayerConfig",
    "PoolConfig",
    "PromptReuse",
    "RecurrentConfig",
    "RecurrentStates",
    "SavedPrefix",
    "SequenceLengths",
    "SlidingPages",
    "SparsePageTable",
    "reuse_of",
]

_MODULES = {
    "HybridCache": "hybrid",
    "KVPagePool": "pool",
    "KVPageTable": "page_table",
    "PromptReuse": "saved",
    "RecurrentStates": "states",
    "SavedPrefix": "saved",
    "SequenceLengths": "lengths",
    "SlidingPages": "sliding",
    "SparsePageTable": "page_table",
    "reuse_of": "saved",
}
"""Where the names are that need torch."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(f"{name} needs torch: pip install 'kvist[torch]'", name="torch") from error
