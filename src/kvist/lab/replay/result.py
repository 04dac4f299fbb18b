"""What a replay found: plain numbers, and how they are counted while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from kvist.core.extents import Namespace
from kvist.lab.replay.config import ReplayConfig

__all__ = ["MAX_POINTS", "ReplayResult", "Tally", "namespace_name"]

MAX_POINTS = 128
"""Points of the series that a result has at most; with more, every other one is left out."""

PERCENTILES = {"p50": 50, "p90": 90, "p99": 99}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """What one configuration did with a trace.

    Of `num_requests`, `num_never_fit` were more than the whole cache and were passed over. References are blocks of
    prompts as `references_of` counts them; hits are whole blocks that were found, in whatever tier. `hit_rate_tokens`
    counts tokens, also those found in a block that agrees in part. `by_namespace` has prompt_tokens and hit_tokens of
    each namespace; `evictions` device blocks by reason, and of tiers under their name; `misses` tokens by class,
    the last one of each prompt apart, which is always computed.
    `num_preemptions` is how often a sequence had to give its blocks up, after which `num_recomputed_tokens` were
    computed again. `ttft_s` has percentiles of the time to the first token, simulated, from arrival; `duration_s` is
    simulated too, `wall_s` is not. `series` has up to 128 points in time: hit rate by tokens since the one before, and
    blocks that hold something, by tier and by namespace. `num_peak_blocks` were held at once by running sequences.
    What was interrupted is not `is_complete`.
    """

    name: str
    trace: str
    config: dict[str, Any]
    num_requests: int
    num_never_fit: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_references: int
    num_hit_blocks: int
    hit_rate_blocks: float
    hit_rate_tokens: float
    hit_tokens_by_tier: dict[str, int]
    by_namespace: dict[str, dict[str, int]]
    evictions: dict[str, int]
    misses: dict[str, int]
    num_preemptions: int
    num_recomputed_tokens: int
    num_peak_blocks: int
    ttft_s: dict[str, float]
    duration_s: float
    wall_s: float
    series: list[dict[str, Any]]
    is_complete: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values that JSON can say."""
        return asdict(self)


@dataclass(slots=True)
class Tally:
    """Counts of a running replay."""

    num_requests: int = 0
    num_never_fit: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_references: int = 0
    num_hit_blocks: int = 0
    num_hit_tokens: int = 0
    num_peak_blocks: int = 0
    hit_tokens_by_tier: dict[str, int] = field(default_factory=dict)
    by_namespace: dict[Namespace, list[int]] = field(default_factory=dict)
    ttft_s: list[float] = field(default_factory=list)
    series: list[dict[str, Any]] = field(default_factory=list)
    points_every: int = 1
    before: tuple[int, int] = (0, 0)

    def admitted(self, namespace: Namespace, num_tokens: int, num_cached: int) -> None:
        """Count the tokens of a prompt that has been admitted, and those that were found."""
        self.num_prompt_tokens += num_tokens
        self.num_hit_tokens += num_cached
        counts = self.by_namespace.get(namespace)
        if counts is None:
            counts = self.by_namespace[namespace] = [0, 0]
        counts[0] += num_tokens
        counts[1] += num_cached

    def found(self, tier: str, num_tokens: int) -> None:
        """Count tokens by where they were found."""
        self.hit_tokens_by_tier[tier] = self.hit_tokens_by_tier.get(tier, 0) + num_tokens

    @property
    def is_point_due(self) -> bool:
        """Whether the series is to get another point now."""
        return self.num_requests % self.points_every == 0

    def add_point(self, time_s: float, occupancy: Mapping[str, int], by_namespace: Mapping[Namespace, int]) -> None:
        """Lengthen the series; when it has too many points, leave out every other one from now on."""
        tokens, hits = self.num_prompt_tokens - self.before[0], self.num_hit_tokens - self.before[1]
        self.before = (self.num_prompt_tokens, self.num_hit_tokens)
        point = {
            "time_s": time_s,
            "num_requests": self.num_requests,
            "num_prompt_tokens": tokens,
            "hit_rate": hits / tokens if tokens else 0.0,
            "occupancy": dict(occupancy),
            "by_namespace": {namespace_name(each): count for each, count in by_namespace.items()},
        }
        self.series.append(point)
        if len(self.series) > MAX_POINTS:
            self.series = [_joined(*pair) for pair in zip(self.series[::2], self.series[1::2], strict=False)]
            self.points_every *= 2

    def result(
        self,
        trace: str,
        config: ReplayConfig,
        *,
        evictions: Mapping[str, int],
        misses: Mapping[str, int],
        num_recomputed_tokens: int,
        num_preemptions: int,
        duration_s: float,
        wall_s: float,
        is_complete: bool,
    ) -> ReplayResult:
        """Return what has been found so far."""
        return ReplayResult(
            name=config.label,
            trace=trace,
            config=config.as_dict(),
            num_requests=self.num_requests,
            num_never_fit=self.num_never_fit,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            num_references=self.num_references,
            num_hit_blocks=self.num_hit_blocks,
            hit_rate_blocks=_share(self.num_hit_blocks, self.num_references),
            hit_rate_tokens=_share(self.num_hit_tokens, self.num_prompt_tokens),
            hit_tokens_by_tier=dict(self.hit_tokens_by_tier),
            by_namespace={
                namespace_name(name): {"prompt_tokens": tokens, "hit_tokens": hits}
                for name, (tokens, hits) in self.by_namespace.items()
            },
            evictions=dict(evictions),
            misses=dict(misses),
            num_preemptions=num_preemptions,
            num_recomputed_tokens=num_recomputed_tokens,
            num_peak_blocks=self.num_peak_blocks,
            ttft_s=percentiles(self.ttft_s),
            duration_s=duration_s,
            wall_s=wall_s,
            series=self.series,
            is_complete=is_complete,
        )


def namespace_name(namespace: Namespace) -> str:
    """Return a namespace as text; the one without a name is "default".

    >>> namespace_name(("acme", 7)), namespace_name(())
    ('acme/7', 'default')
    """
    return "/".join(each.hex() if isinstance(each, bytes) else str(each) for each in namespace) or "default"


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Return the percentiles that are told of times, 0 where there are none.

    >>> percentiles([1.0, 2.0, 3.0])["p50"]
    2.0
    """
    if not seconds:
        return dict.fromkeys(PERCENTILES, 0.0)
    return {name: float(np.percentile(seconds, share)) for name, share in PERCENTILES.items()}


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return the later of two points, with the hit rate since the one before both."""
    tokens = first["num_prompt_tokens"] + second["num_prompt_tokens"]
    hits = sum(each["num_prompt_tokens"] * each["hit_rate"] for each in (first, second))
    return second | {"num_prompt_tokens": tokens, "hit_rate": _share(hits, tokens)}


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
