"""Eviction policies by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvist.core.cost import CostQueue
from kvist.core.eviction import CallersPolicy, Candidates, EvictionQueue, Policy, fifo, lfu, lru, priority
from kvist.core.segments import S3FifoQueue, SlruQueue

__all__ = ["POLICIES", "queue_of"]

POLICIES: dict[str, Callable[[], Candidates]] = {
    "cost": CostQueue,
    "fifo": partial(EvictionQueue, fifo),
    "lfu": partial(EvictionQueue, lfu),
    "lru": partial(EvictionQueue, lru),
    "priority": partial(EvictionQueue, priority),
    "s3fifo": S3FifoQueue,
    "slru": SlruQueue,
}
"""What makes the queue of each policy that has a name."""


def queue_of(policy: str | Policy) -> Candidates:
    """Return a new queue for the policy of that name, or for a caller's sort key."""
    return POLICIES[policy]() if isinstance(policy, str) else EvictionQueue(CallersPolicy(policy))
