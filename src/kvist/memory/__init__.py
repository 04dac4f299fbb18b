"""Holds and moves bytes: the arena, and one batch's tables in the kernels' own words.

`kvist.memory.tables` needs NumPy only, so importing this package loads no torch; `TorchMemory` is loaded when first
named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvist.memory.arena import TorchMemory

__all__ = ["TorchMemory"]


def __getattr__(name: str) -> Any:
    if name != "TorchMemory":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from kvist.memory.arena import TorchMemory
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError("TorchMemory needs torch: pip install 'kvist[torch]'", name="torch") from error
    return TorchMemory
