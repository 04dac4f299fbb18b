"""A Hypothesis state machine that does everything to a manager and proves after every step that nothing is wrong."""

from __future__ import annotations

from hypothesis import strategies as st

from kvist.config import CacheConfig
from kvist.testing.admission_rules import AdmissionRules
from kvist.testing.configs import cache_configs
from kvist.testing.prefix_rules import PrefixRules

__all__ = ["CacheMachine", "cache_configs", "cache_machine"]


class CacheMachine(AdmissionRules, PrefixRules):
    """Does everything that the public API allows, and much that it does not, at random in caches that are too small.

    After every step `check()` must pass, every sequence must read its own contents from a `TokenMemory`, and a plain
    model that knows no tree must agree on lengths, free blocks and reuse: nothing is found that was not committed, all
    is found that was not evicted. Calls that are refused must change nothing. Run it as `CacheMachine.TestCase`, or
    with `hypothesis.stateful.run_state_machine_as_test`; `cache_machine` makes one for configurations of your own.
    """


def cache_machine(configs: st.SearchStrategy[CacheConfig]) -> type[CacheMachine]:
    """Return a CacheMachine over configurations of your own, for example with your own policy.

    >>> from hypothesis import settings
    >>> from hypothesis.stateful import run_state_machine_as_test
    >>> machine = cache_machine(cache_configs(policies=[lambda extent: extent.hits], block_sizes=[8]))
    >>> run_state_machine_as_test(machine, settings=settings(max_examples=2, stateful_step_count=10, deadline=None))
    """
    return type("CacheMachine", (CacheMachine,), {"configs": configs, "__doc__": CacheMachine.__doc__})
