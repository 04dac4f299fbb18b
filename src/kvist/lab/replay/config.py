"""What a replay is to try: the cache, the tiers behind it, and how requests come and are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from itertools import product
from math import isfinite
from typing import Any, Literal, get_args

from kvist.config import AttentionSpec, CacheConfig, LayerSpec
from kvist.core.retention import Retention
from kvist.errors import ConfigError
from kvist.lab.replay.cost import CostModel
from kvist.lab.traces.fields import MAX_BLOCK_SIZE
from kvist.tier_config import HostTier, RemoteTier, TierSpec

__all__ = ["ReplayConfig", "SlowTier", "grid"]

Arrivals = Literal["trace", "asap"]
Content = Literal["tokens", "blocks"]
Outputs = Literal["known", "all", "none"]

MAX_SEQUENCE_LENGTH = 1 << 22


@dataclass(frozen=True, slots=True)
class SlowTier:
    """A disk or a store in the network, simulated: `num_blocks` of each group, the least recently used going first.

    To get blocks of a prompt takes `latency_s`, and their bytes at `bytes_per_s`; what would take longer than to
    compute it is computed. Blocks come here when they are committed (`write="through"`) or evicted ("back"), unless
    their priority or hits are too low. Nothing is lost and nothing fails.
    """

    name: str = "disk"
    num_blocks: int = 1_000_000
    bytes_per_s: float = 2e9
    latency_s: float = 2e-4
    write: Literal["through", "back"] = "through"
    min_priority: int = 0
    min_hits: int = 0

    def problems(self, name: str) -> list[str]:
        """List what is wrong, `name`d in each line."""
        found = [] if self.num_blocks >= 1 else [f"{name}: num_blocks is {self.num_blocks}, must be at least 1"]
        if not (isfinite(self.latency_s) and self.latency_s >= 0 and self.bytes_per_s > 0):
            told = f"latency_s {self.latency_s}, bytes_per_s {self.bytes_per_s}"
            found.append(f"{name}: {told}: the first must be at least 0, the second above it")
        if self.name in ("", "device", "host"):
            found.append(f"{name}: name is {self.name!r}, must be one of its own, such as 'disk'")
        return found


def _default_layers() -> Sequence[LayerSpec]:
    return [AttentionSpec(num_kv_heads=8, head_dim=128)] * 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """One way to serve a trace.

    `num_blocks`, `policy`, `layers` and host tiers are those of a `CacheConfig`; `tiers` may go on with `SlowTier`s.
    `block_size` None takes that of the trace, or 16. `retention` is asked for with every request.

    At most `concurrency` sequences run at once. With `arrivals="trace"` requests come when they did, and wait for a
    free place; with "asap" each comes when there is one.

    `content="tokens"` gives the manager all tokens as they are: the last of a prompt is always computed, and a block
    must be full to be shared. With "blocks" every prompt is whole blocks and one token more, which has a place of its
    own in `concurrency` further blocks, and outputs take no place: one request at a time then hits exactly what
    `lru_curve` says. `outputs` says which of them stay in the cache: those whose tokens the trace has ("known"), others
    being made up and forgotten at the end; "all"; or "none", and they take no place.

    `max_sequence_length` None allows what the cache has room for. `name` None is made of the settings.
    """

    num_blocks: int | Sequence[int]
    policy: str | Callable[[Any], Any] = "priority"
    block_size: int | None = None
    tiers: Sequence[HostTier | SlowTier] = ()
    retention: Retention | None = None
    concurrency: int = 1
    arrivals: Arrivals = "asap"
    cost: CostModel = field(default_factory=CostModel)
    content: Content = "tokens"
    outputs: Outputs = "known"
    layers: Sequence[LayerSpec] = field(default_factory=_default_layers)
    max_sequence_length: int | None = None
    name: str | None = None

    @property
    def slow_tiers(self) -> tuple[SlowTier, ...]:
        """The tiers behind host memory, faster ones first."""
        return tuple(tier for tier in self.tiers if isinstance(tier, SlowTier))

    @property
    def label(self) -> str:
        """The name, or what would tell it from others: policy, size, block size, tiers."""
        if self.name is not None:
            return self.name
        parts = [policy_name(self.policy), f"{_total(self.num_blocks):,} blocks"]
        parts += [] if self.block_size is None else [f"of {self.block_size}"]
        for tier in self.tiers:
            parts.append(f"+ {tier.name if isinstance(tier, SlowTier) else 'host'}")
        return " ".join(parts)

    def cache_config(self, block_size: int) -> CacheConfig:
        """Return the settings of the manager that serves it, checked.

        Raises ConfigError, which names all that is wrong.
        """
        problems = self._problems()
        if block_size > MAX_BLOCK_SIZE:
            problems.append(f"block_size is {block_size}, must be 1 .. {MAX_BLOCK_SIZE:,}")
        if problems:
            raise ConfigError(problems)
        sizes = [self.num_blocks] if isinstance(self.num_blocks, int) else list(self.num_blocks)
        extra = self.concurrency if self.content == "blocks" else 0
        longest = min(max(sizes) * block_size, MAX_SEQUENCE_LENGTH)
        config = CacheConfig(
            self.layers,
            block_size=block_size,
            num_blocks=sizes[0] + extra if len(sizes) == 1 else [size + extra for size in sizes],
            max_sequences=self.concurrency,
            max_sequence_length=(self.max_sequence_length or longest) + (1 if extra else 0),
            policy=self.policy,
            partial_reuse=not extra,
            tiers=[_as_setting(tier) for tier in self.tiers],
            model="replay",
        )
        config.validate()
        return config

    def _problems(self) -> list[str]:
        found = []
        for name, allowed in {"arrivals": Arrivals, "content": Content, "outputs": Outputs}.items():
            value = getattr(self, name)
            if value not in get_args(allowed):
                found.append(f"{name} is {value!r}, must be one of {', '.join(get_args(allowed))}")
        if type(self.concurrency) is not int or self.concurrency < 1:
            found.append(f"concurrency is {self.concurrency!r}, must be an int of at least 1")
        if self.retention is not None and not isinstance(self.retention, Retention):
            found.append(f"retention is a {type(self.retention).__name__}, must be a Retention or None")
        if not isinstance(self.num_blocks, int) and not self.num_blocks:
            found.append("num_blocks is empty, must be a number for each group")
        for index, tier in enumerate(self.tiers):
            if isinstance(tier, SlowTier):
                found += tier.problems(f"tiers[{index}]")
            elif not isinstance(tier, HostTier):
                found.append(f"tiers[{index}] is a {type(tier).__name__}, must be a HostTier or a SlowTier")
        names = [tier.name for tier in self.slow_tiers]
        if len(set(names)) < len(names):
            found.append(f"tiers are named {', '.join(names)}: each needs a name of its own")
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        told = {name: getattr(self, name) for name in self.__slots__}
        told |= {"policy": policy_name(self.policy), "num_layers": len(self.layers), "name": self.label}
        told["layers"] = list(dict.fromkeys(map(repr, self.layers)))
        told["cost"] = asdict(self.cost)
        for name in ("tiers", "retention"):
            told[name] = _plain(told[name])
        if not isinstance(self.num_blocks, int):
            told["num_blocks"] = list(self.num_blocks)
        return told


def grid(base: ReplayConfig, **choices: Iterable[Any]) -> list[ReplayConfig]:
    """Return a configuration for each combination of choices, by the names of settings; the rest is as in `base`.

    >>> base = ReplayConfig(num_blocks=1)
    >>> [each.label for each in grid(base, num_blocks=[1000, 2000], policy=["lru", "lfu"])]
    ['lru 1,000 blocks', 'lfu 1,000 blocks', 'lru 2,000 blocks', 'lfu 2,000 blocks']
    """
    from dataclasses import replace

    unknown = [name for name in choices if name not in ReplayConfig.__slots__]
    if unknown:
        raise ConfigError([f"{', '.join(unknown)}: a replay has no such setting"])
    combined = product(*map(list, choices.values()))
    return [replace(base, **dict(zip(choices, chosen, strict=True))) for chosen in combined]


def policy_name(policy: str | Callable[[Any], Any]) -> str:
    """Return a policy's name, also that of a caller's function."""
    return policy if isinstance(policy, str) else getattr(policy, "__qualname__", type(policy).__name__)


def _as_setting(tier: HostTier | SlowTier) -> TierSpec:
    """Return the tier as a manager is told of it; what keeps a slow one's blocks is put in its place afterwards."""
    if isinstance(tier, HostTier):
        return tier
    return RemoteTier(
        url="memory://simulated", write=tier.write, min_priority=tier.min_priority, min_hits=tier.min_hits
    )


def _total(num_blocks: int | Sequence[int]) -> int:
    return num_blocks if isinstance(num_blocks, int) else sum(num_blocks)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {"kind": type(value).__name__} | {name: _plain(each) for name, each in asdict(value).items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return policy_name(value) if callable(value) else value
