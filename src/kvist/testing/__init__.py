"""What proves a cache manager right, for users to prove theirs with: an oracle memory, a machine, a suite for policies.

`TokenMemory` and `PolicySuite` need NumPy only; `CacheMachine` and what makes one need Hypothesis
(`pip install kvist[testing]`).
"""

from typing import TYPE_CHECKING, Any

from kvist.testing.policies import PolicySuite, num_hit_tokens
from kvist.testing.token_memory import Prefixes, TokenMemory, WrongContents

if TYPE_CHECKING:
    from kvist.testing.machine import CacheMachine, cache_configs, cache_machine

__all__ = [
    "CacheMachine",
    "PolicySuite",
    "Prefixes",
    "TokenMemory",
    "WrongContents",
    "cache_configs",
    "cache_machine",
    "num_hit_tokens",
]


def __getattr__(name: str) -> Any:
    if name not in ("CacheMachine", "cache_configs", "cache_machine"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from kvist.testing import machine
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise ModuleNotFoundError(
            f"{name} needs Hypothesis: pip install 'kvist[testing]'", name="hypothesis"
        ) from error
    return getattr(machine, name)
