"""What proves a cache manager right, for users to prove theirs with: an oracle memory, a machine, suites, faults.

`CacheMachine` and what makes one need Hypothesis (`pip install kvist[testing]`), `FakeDevice` needs torch, the
suites pytest; the others need NumPy only.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvist.testing.clock import ManualClock
from kvist.testing.engines import EngineSuite, EngineUnderTest
from kvist.testing.event_replay import EventReplay, WrongEvents
from kvist.testing.faulty_files import Crash, Fault, FaultyFiles
from kvist.testing.faulty_memory import FaultyMemory
from kvist.testing.faulty_store import FAULTY_URL, FaultyStore, faulty_stores
from kvist.testing.holders import Holder, HolderLog, Leaked
from kvist.testing.policies import PolicySuite, num_hit_tokens
from kvist.testing.stores import StoreSuite
from kvist.testing.token_memory import Prefixes, TokenMemory, WrongContents
from kvist.testing.twin import Twin

if TYPE_CHECKING:
    from kvist.testing.codecs import EventCodecSuite
    from kvist.testing.fake_device import FakeDevice, WaitsForever
    from kvist.testing.machine import CacheMachine, cache_configs, cache_machine

__all__ = [
    "CacheMachine",
    "Crash",
    "EngineSuite",
    "EventCodecSuite",
    "EventReplay",
    "FAULTY_URL",
    "FakeDevice",
    "Fault",
    "FaultyFiles",
    "FaultyMemory",
    "FaultyStore",
    "Holder",
    "HolderLog",
    "Leaked",
    "ManualClock",
    "PolicySuite",
    "Prefixes",
    "StoreSuite",
    "EngineUnderTest",
    "TokenMemory",
    "Twin",
    "WaitsForever",
    "WrongContents",
    "WrongEvents",
    "cache_configs",
    "cache_machine",
    "faulty_stores",
    "num_hit_tokens",
]


_NEEDS = {
    "CacheMachine": ("machine", "hypothesis", "Hypothesis: pip install 'kvist[testing]'"),
    "cache_configs": ("machine", "hypothesis", "Hypothesis: pip install 'kvist[testing]'"),
    "cache_machine": ("machine", "hypothesis", "Hypothesis: pip install 'kvist[testing]'"),
    "EventCodecSuite": ("codecs", "hypothesis", "Hypothesis: pip install 'kvist[testing]'"),
    "FakeDevice": ("fake_device", "torch", "torch: pip install 'kvist[torch]'"),
    "WaitsForever": ("fake_device", "torch", "torch: pip install 'kvist[torch]'"),
}
"""Names that need an optional package: their module, the package, and how it is had."""


def __getattr__(name: str) -> Any:
    if name not in _NEEDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, package, told = _NEEDS[name]
    try:
        return getattr(import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ModuleNotFoundError(f"{name} needs {told}", name=package) from error
