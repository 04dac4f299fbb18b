"""Every call of a manager, written down, so that what happened can be made to happen again.

The core is deterministic: what it does follows from its settings, the calls, the readings of the clock, and what the
memory and the stores did. A journal records these and nothing else; `replay` makes the same calls of a fresh manager,
without a device or a store, and comes to the same `digest()`. `Lockstep` compares managers that are given the same
calls in several processes.
"""

from kvist.journal.lockstep import Lockstep, LockstepError
from kvist.journal.recording import Journal
from kvist.journal.replaying import Replay, ReplayError, replay
from kvist.journal.report import describe, report

__all__ = ["Journal", "Lockstep", "LockstepError", "Replay", "ReplayError", "describe", "replay", "report"]
