"""Kvist: the KV cache manager for LLM inference, as a library."""

from kvist.config import AttentionSpec, CacheConfig, GroupSpec, StateSpec
from kvist.core.explanation import Explanation, Part
from kvist.core.forecast import Forecast
from kvist.core.identity import Media
from kvist.core.matching import Pin, Prefetch, PrefixMatch
from kvist.core.moves import Move
from kvist.core.retention import Retention
from kvist.core.sequences import Sequence
from kvist.core.statistics import GroupStats, Stats, TierStats
from kvist.errors import (
    ArgumentError,
    ArgumentTypeError,
    ConfigError,
    InvariantError,
    KvistError,
    LayoutError,
    NeverFits,
    OutOfBlocks,
    OutOfRows,
    SequenceError,
    StaleMatch,
    TransferError,
    WireError,
)
from kvist.manager import KVCacheManager, Memory
from kvist.memory.tables import BatchTables
from kvist.tier_config import DiskTier, HostTier, RemoteTier

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "AttentionSpec",
    "BatchTables",
    "CacheConfig",
    "ConfigError",
    "DiskTier",
    "Explanation",
    "Forecast",
    "GroupSpec",
    "GroupStats",
    "HostTier",
    "InvariantError",
    "KVCacheManager",
    "KvistError",
    "LayoutError",
    "Media",
    "Memory",
    "Move",
    "NeverFits",
    "OutOfBlocks",
    "OutOfRows",
    "Part",
    "Pin",
    "Prefetch",
    "PrefixMatch",
    "RemoteTier",
    "Retention",
    "Sequence",
    "SequenceError",
    "StaleMatch",
    "StateSpec",
    "Stats",
    "TierStats",
    "TransferError",
    "WireError",
]
