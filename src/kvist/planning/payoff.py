"""What slower tiers would be worth to a trace: tokens found by size, and whether loading them beats computing them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvist.config import parse_bytes
from kvist.errors import ArgumentError
from kvist.planning.devices import Deployment, DevicePlan
from kvist.planning.report import Plan, aligned

__all__ = ["Rates", "TierSize", "TierValue", "TraceValue", "rates_of", "value_of_tiers"]

FLOPS = 4e14
"""Floating point operations a second that an accelerator gets done in a prefill: 40 % of the 1e15 of dense bfloat16."""
LEAST_GAIN = 0.01
"""Twice the memory is worth while as long as it finds so much more of all prompt tokens."""
MAX_DOUBLINGS = 14


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast all accelerators compute prompt tokens, and each of them loads from its tiers, in bytes a second."""

    prefill_tokens_s: float
    host_bytes_s: float = 25e9
    disk_bytes_s: float = 5e9

    def __post_init__(self) -> None:
        for name in ("prefill_tokens_s", "host_bytes_s", "disk_bytes_s"):
            value: object = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ArgumentError(f"{name} is {value!r}, must be a positive number")


@dataclass(frozen=True, slots=True)
class TierSize:
    """A tier of `memory_bytes` on each accelerator: the hit rate with it, and what it adds to that of half the size.

    `gain_per_gib` is that difference by the GiB it takes.
    """

    memory_bytes: int
    num_tokens: int
    hit_rate: float
    gain: float
    gain_per_gib: float


@dataclass(frozen=True, slots=True)
class TierValue:
    """Whether a tier pays: seconds to load a token and to compute it, and the size up to which doubling it pays.

    With `best_bytes` it adds most to the hit rate for its size. Both are 0 where it does not pay at all.
    """

    name: str
    load_s: float
    compute_s: float
    best_bytes: int
    worth_bytes: int

    @property
    def pays(self) -> bool:
        """Whether some size of it does."""
        return self.worth_bytes > 0


@dataclass(frozen=True, slots=True)
class TraceValue:
    """What a trace finds in the cache, without tiers and with ones of several sizes; hit rates are by block, 0 to 1.

    `device_tokens` fit without tiers, for a rate of `hit_rate`; `largest_hit_rate` is that of a cache for everything.
    """

    trace: str
    device_tokens: int
    hit_rate: float
    largest_hit_rate: float
    sizes: tuple[TierSize, ...]
    tiers: tuple[TierValue, ...]

    def __str__(self) -> str:
        lines = [f"{self.trace}: {self.hit_rate:.1%} of blocks hit with {self.device_tokens:,} tokens cached by LRU, "]
        lines[0] += f"{self.largest_hit_rate:.1%} if everything is kept"
        return "\n".join([*lines, "", *aligned(_size_rows(self)), "", *map(_told, self.tiers)])


def rates_of(made: DevicePlan, deployment: Deployment, *, prefill_tokens_s: float | None = None) -> Rates:
    """Return typical rates: two operations for each parameter that a token uses, `FLOPS` of them on each accelerator.

    Attention's own operations, which grow with the prompt, are not counted, so that computing looks no dearer than it
    is.
    """
    num_devices = deployment.tensor_parallel * deployment.pipeline_parallel
    return Rates(prefill_tokens_s or FLOPS * num_devices / (2 * made.num_active_parameters))


def value_of_tiers(
    made: DevicePlan, rates: Rates, trace: str, hit_rate: Callable[[int], float], num_trace_tokens: int
) -> TraceValue:
    """Return what tiers would be worth to a trace.

    `hit_rate` gives the share of blocks found with so many tokens in the cache, as a curve does; with
    `num_trace_tokens` everything is kept. A tier holds what the device has evicted, in the same proportions of groups.
    """
    device = device_tokens(made.cache)
    largest = hit_rate(max(num_trace_tokens, device))
    sizes = tuple(_sizes(made, hit_rate, device, num_trace_tokens))
    bytes_s = {"host": rates.host_bytes_s, "disk": rates.disk_bytes_s}
    load_bytes = _load_bytes(made.cache) / len(made.stages)
    tiers = [_tier(name, load_bytes / each, 1 / rates.prefill_tokens_s, sizes) for name, each in bytes_s.items()]
    return TraceValue(trace, device, hit_rate(device), largest, sizes, tuple(tiers))


def device_tokens(made: Plan) -> int:
    """Return how many tokens the blocks of the group with the widest span, the first one, are for."""
    return made.pools[made.groups[0].pool].num_blocks * made.block_size


def _sizes(
    made: DevicePlan, hit_rate: Callable[[int], float], device: int, num_trace_tokens: int
) -> Iterator[TierSize]:
    """Yield sizes, doubling, from a GiB on or what few doublings bring to all of the trace."""
    token_bytes = made.cache.memory_bytes / device / len(made.stages)
    lacking = max(num_trace_tokens - device, 0) * token_bytes
    size = float(parse_bytes("1 GiB"))
    while size * 2**MAX_DOUBLINGS < lacking:
        size *= 2
    before, before_bytes = hit_rate(device), 0.0
    while before_bytes < lacking:
        num_tokens = int(size / token_bytes)
        found = hit_rate(device + num_tokens)
        gain = found - before
        yield TierSize(int(size), num_tokens, found, gain, gain / ((size - before_bytes) / 2**30))
        before, before_bytes, size = found, size, size * 2


def _load_bytes(made: Plan) -> int:
    """Return the bytes of a token that a hit has to load: those of groups which need all of the past, if there are."""
    return sum(group.token_bytes for group in made.groups if not group.span_tokens) or made.token_bytes


def _tier(name: str, load_s: float, compute_s: float, sizes: tuple[TierSize, ...]) -> TierValue:
    worth = 0
    for size in sizes if load_s < compute_s else ():
        if size.gain < LEAST_GAIN and worth:
            break
        worth = size.memory_bytes if size.gain >= LEAST_GAIN else worth
    found = 0.0
    by_gib = {}
    for size in sizes:
        found += size.gain
        by_gib[size.memory_bytes] = found / size.memory_bytes
    best = max((each for each in by_gib if each <= worth), key=lambda each: by_gib[each], default=0)
    return TierValue(name, load_s, compute_s, best, worth)


# -- for people -------------------------------------------------------------------------------------------------------


def _size_rows(value: TraceValue) -> Iterator[list[str]]:
    yield ["tier of each accelerator", "tokens", "hit rate", "gain", "gain/GiB"]
    for size in value.sizes:
        gains = (f"{size.hit_rate:.1%}", f"{size.gain:+.1%}", f"{size.gain_per_gib:+.4%}")
        yield [f"{size.memory_bytes / 2**30:,.0f} GiB", f"{size.num_tokens:,}", *gains]


def _told(tier: TierValue) -> str:
    times = f"{tier.load_s * 1e6:,.2f} µs to load a token, {tier.compute_s * 1e6:,.2f} µs to compute it"
    if tier.pays:
        best, worth = (f"{each / 2**30:,.0f} GiB" for each in (tier.best_bytes, tier.worth_bytes))
        return f"{tier.name}: pays up to {worth} of each accelerator, finds most for its size with {best}: {times}"
    reason = "doubling it finds little more" if tier.load_s < tier.compute_s else "computing is faster"
    return f"{tier.name}: does not pay, {reason}: {times}"
