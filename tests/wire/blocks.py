"""Runs of small blocks and events about them, as a log would have them."""

import numpy as np

from kvist.core.chain import Chain
from kvist.core.events import Cleared, Created, Moved, Removed, Run, Stored, Updated
from kvist.core.identity import IdentityTable, Media

BLOCK_SIZE = 4
EPOCH = 77


class Log:
    """Makes runs and events that are numbered one after the other."""

    def __init__(self, block_size=BLOCK_SIZE):
        self.identities = IdentityTable()
        self.chain = Chain(b"fingerprint", block_size, self.identities)
        self.block_size = block_size
        self.next_id = 0

    def run(self, tokens, *, parent=None, parent_end=None, namespace=(), media=(), extra_ids=None):
        packed = self.identities.identify(np.asarray(tokens, np.int32).tobytes(), media, extra_ids)
        end = parent_end if parent_end is not None or parent is None else parent.num_blocks
        start = 0 if parent is None else parent.start + end
        run = Run(self.chain, namespace, parent, end or 0, start)
        run.append(packed)
        return run

    def _number(self):
        self.next_id += 1
        return self.next_id - 1, EPOCH

    def stored(self, run, first=0, end=None, *, group=0, tier="device", priority=35, columns=None):
        end = run.num_blocks if end is None else end
        return Stored(*self._number(), group, tier, run, first, end, priority, "computed", columns)

    def removed(self, run, first=0, end=None, *, group=0, tier="device", columns=None):
        end = run.num_blocks if end is None else end
        return Removed(*self._number(), group, tier, run, first, end, "made room", columns)

    def moved(self, run, source, tier, first=0, end=None, *, group=0):
        end = run.num_blocks if end is None else end
        return Moved(*self._number(), group, tier, run, first, end, source, "made room")

    def updated(self, run, old, new, first=0, end=None, *, group=0):
        end = run.num_blocks if end is None else end
        return Updated(*self._number(), group, "device", run, first, end, old, new)

    def cleared(self, namespace=None):
        return Cleared(*self._number(), namespace, "reset")

    def created(self, group=0, kind="full", window=None, num_blocks=None):
        return Created(*self._number(), group, kind, window, self.block_size, num_blocks or {"device": 8, "host": 2})


__all__ = ["BLOCK_SIZE", "EPOCH", "Log", "Media"]
