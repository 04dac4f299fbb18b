"""Traces served by a `KVCacheManager` in simulated time: what hits, where, how long it takes."""

from kvist.lab.replay.config import ReplayConfig, SlowTier, grid
from kvist.lab.replay.cost import CostModel, StepTime, StepTimer
from kvist.lab.replay.result import ReplayResult
from kvist.lab.replay.results import curves_of, table, write_results
from kvist.lab.replay.running import Progress, ReplayInterrupted, compare, replay

__all__ = [
    "CostModel", "Progress", "ReplayConfig", "ReplayInterrupted", "ReplayResult", "SlowTier", "StepTime", "StepTimer",
    "compare", "curves_of", "grid", "replay", "table", "write_results",
]  # fmt: skip
