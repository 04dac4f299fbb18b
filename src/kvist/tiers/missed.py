"""Which contents a store was offered and did not take, so that they can be offered again while they are at hand."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock

__all__ = ["MAX_MISSED_KEYS", "MissedKeys"]

MAX_MISSED_KEYS = 1 << 16


class MissedKeys:
    """Keys of contents that were refused or could not be written, at most `max_keys`; several threads may call.

    Beyond that the oldest are forgotten, `num_forgotten` of the `num_added` so far.

    >>> missed = MissedKeys(max_keys=2)
    >>> missed.add([b"a", b"b", b"c"])
    >>> missed.take([b"a", b"b", b"c"], limit=1), len(missed), missed.num_forgotten
    (([1], False), 1, 1)
    """

    def __init__(self, max_keys: int = MAX_MISSED_KEYS) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._max_keys = max_keys
        self._lock = Lock()
        self.num_added = self.num_forgotten = 0

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Iterable[bytes]) -> None:
        """Remember keys; what is here already becomes the newest."""
        with self._lock:
            for key in keys:
                self._keys[key] = None
                self._keys.move_to_end(key)
                self.num_added += 1
            while len(self._keys) > self._max_keys:
                self._keys.popitem(last=False)
                self.num_forgotten += 1

    def take(self, keys: Sequence[bytes], limit: int) -> tuple[list[int], bool]:
        """Return the indexes of leading keys that are remembered, at most so many, and whether these are all.

        They are remembered no more.
        """
        with self._lock:
            found = [at for at, key in enumerate(keys) if key in self._keys]
            taken = found[: max(limit, 0)]
            for at in taken:
                self._keys.pop(keys[at], None)
            return taken, len(taken) == len(found)

    def discard(self, keys: Iterable[bytes]) -> None:
        """Remember keys no more: they are offered once again."""
        if not self._keys:
            return
        with self._lock:
            for key in keys:
                self._keys.pop(key, None)

    def drop(self, tag: bytes) -> None:
        """Forget what begins with a tag."""
        with self._lock:
            for key in [key for key in self._keys if key.startswith(tag)]:
                del self._keys[key]
