"""What was evicted, and which prompts begin where: so that a miss can be told to be one, or to be elsewhere."""

from __future__ import annotations

from collections import OrderedDict

from kvist.core.extents import Extent, Loss, Namespace, Root

__all__ = ["ASKED_FOR", "MADE_ROOM", "UNREACHABLE", "MAX_LOSSES_BELOW", "Losses"]

MADE_ROOM, ASKED_FOR, UNREACHABLE = "made room", "asked for", "unreachable"
"""Why content is evicted: others needed room, a caller wanted it, or no group could have gone on from it."""

MAX_LOSSES, MAX_LOSSES_BELOW = 4096, 16
"""Evictions that are remembered: of whole prompts, and below each extent."""


class Losses:
    """Evictions, by the key that the content had below what is left of its prefix; and first blocks of all namespaces.

    Those below an extent are kept with it, in `Extent.lost`, and go with it.
    """

    __slots__ = ("_num_first", "_of_prompts")

    def __init__(self) -> None:
        # A plain dict would look at all that has left it before it finds its first entry.
        self._of_prompts: OrderedDict[tuple[Namespace, bytes], Loss] = OrderedDict()
        self._num_first: dict[bytes, int] = {}

    def note_of_prompt(self, root: Extent, key: bytes, loss: Loss) -> None:
        """Remember that a prompt which began with `key` was evicted."""
        assert isinstance(root, Root)
        self._of_prompts[root.namespace, key] = loss
        if len(self._of_prompts) > MAX_LOSSES:
            self._of_prompts.popitem(last=False)

    def after(self, namespace: Namespace, extent: Extent | None, key: bytes) -> Loss | None:
        """Return the eviction of what began with `key` below an extent, or of a prompt, if it is remembered."""
        if extent is None or extent.parent is None:
            return self._of_prompts.get((namespace, key))
        return None if extent.lost is None else extent.lost.get(key)

    def note_first(self, root: Extent, key: bytes) -> None:
        """Note that one namespace more has a prompt that begins with this block."""
        assert isinstance(root, Root)
        self._of_prompts.pop((root.namespace, key), None)
        self._num_first[key] = self._num_first.get(key, 0) + 1

    def forget_first(self, key: bytes) -> None:
        """Note that one namespace less has a prompt that begins with this block."""
        left = self._num_first[key] - 1
        if left:
            self._num_first[key] = left
        else:
            del self._num_first[key]

    def is_first_elsewhere(self, key: bytes, root: Extent | None) -> bool:
        """Say whether another namespace than this has a prompt that begins with this block."""
        num_namespaces = self._num_first.get(key)
        if num_namespaces is None:
            return False
        is_here = root is not None and root.children is not None and key in root.children
        return num_namespaces > int(is_here)
