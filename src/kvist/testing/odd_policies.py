"""Eviction policies that are no library's: callables of a user's own, which CacheMachine draws besides the built-in.

Journals of them are replayed with `policies=ODD_POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["ODD_POLICIES", "longest", "most_recently_used"]


def most_recently_used(extent: Any) -> int:
    """Evict what was used last first: a policy of a user's own, and the opposite of a sensible one."""
    return -int(extent.last_use)


def longest(extent: Any) -> tuple[int, bytes]:
    """Evict the longest extent first, among equals by its tokens."""
    return (-int(extent.num_blocks), bytes(extent.tokens))


ODD_POLICIES: dict[str, Callable[[Any], Any]] = {
    f"{policy.__module__}.{policy.__qualname__}": policy for policy in (most_recently_used, longest)
}
"""By the name that a journal has for them."""
