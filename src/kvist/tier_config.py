"""The slower places that blocks may go to, as settings: host memory, a directory, a store in the network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from kvist.errors import ConfigError
from kvist.sizes import parse_bytes

__all__ = ["POLICY_NAMES", "DiskTier", "HostTier", "PathLike", "RemoteTier", "StoreTier", "TierSpec", "tier_problems"]

POLICY_NAMES = ("cost", "fifo", "lfu", "lru", "priority", "s3fifo", "slru")
WRITES = ("through", "back")
DISK_IO = ("buffered", "direct")
MAX_PRIORITY = 100


class PathLike(Protocol):
    """A path that is not text."""

    def __fspath__(self) -> str:
        """Return it as text."""


@dataclass(frozen=True, slots=True)
class HostTier:
    """Host memory: what the device evicts goes here, and comes back when a prompt asks for it.

    With `write="through"` content is copied here when it is committed, as far as there is room, so that it need not be
    moved when the device evicts it; with `"back"` it is moved then.

    `capacity` is bytes or text such as `"8 GiB"`, shared out among the groups as device memory is; or give
    `num_blocks`, one number for every pool or one for each. It has an eviction `policy` of its own. Blocks whose
    retention priority is below `min_priority` (0 to 100), or which have been hit less than `min_hits` times, are not
    taken; written through they are when they have been hit so often.
    """

    capacity: int | str | None = None
    num_blocks: int | Sequence[int] | None = None
    policy: str | Callable[[Any], Any] = "priority"
    min_priority: int = 0
    min_hits: int = 0
    write: str = "back"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTier:
    """What stores that keep blocks by their content have in common.

    With `write="through"` blocks are stored when they are committed, else, with `"back"`, when the faster tiers evict
    them; not those whose retention priority is below `min_priority`, nor, on the way back, those hit less than
    `min_hits` times. An admission waits for a store for `timeout_s` seconds at most; what has not come by then is
    computed.
    """

    write: str = "through"
    min_priority: int = 0
    min_hits: int = 0
    timeout_s: float = 2.0


@dataclass(frozen=True, slots=True)
class DiskTier(StoreTier):
    """A directory that survives the process: bounded by `capacity`, bytes or text such as `"200 GiB"`.

    With `io="buffered"` the system's page cache holds what was used last, as far as it has memory. With `"direct"`
    contents pass it by: it stays for others, and what it would not hold comes sooner. Where the file system cannot do
    that, they go through it.
    """

    directory: str | PathLike
    capacity: int | str = "1 GiB"
    io: Literal["buffered", "direct"] = "buffered"


@dataclass(frozen=True, slots=True)
class RemoteTier(StoreTier):
    """A store in the network, by URL, which several machines may share; or any other by its import path.

    URLs are `valkey://`, `redis://` (and `valkeys://`, `rediss://` with TLS), `s3://`, `gs://`, `az://`, `file://`; an
    import path is `package.module:factory`, whose factory is called with the format and returns a `Store`.
    """

    url: str


TierSpec = HostTier | DiskTier | RemoteTier


def tier_problems(tiers: Any, model: Any) -> list[str]:
    """List what is wrong with the tiers of a configuration, sizes of host memory left out."""
    found = [] if isinstance(model, str) else [f"model is {model!r}, must be text"]
    if not isinstance(tiers, Sequence) or isinstance(tiers, str):
        return [*found, f"tiers is {tiers!r}, must be a list of HostTier, DiskTier and RemoteTier"]
    for index, tier in enumerate(tiers):
        name = f"tiers[{index}]"
        if not isinstance(tier, HostTier | DiskTier | RemoteTier):
            found.append(f"{name} is a {type(tier).__name__}, must be a HostTier, DiskTier or RemoteTier")
            continue
        found += _write_problems(name, tier)
        found += _host_problems(name, tier, index) if isinstance(tier, HostTier) else _store_problems(name, tier)
    has_store = any(isinstance(tier, DiskTier | RemoteTier) for tier in tiers)
    if has_store and not model:
        found.append("model is empty: name what stored K and V depend on besides tokens, such as checkpoint@revision")
    return found


def _write_problems(name: str, tier: TierSpec) -> list[str]:
    """List what is wrong with when blocks are written, and which."""
    found = []
    if tier.write not in WRITES:
        found.append(f"{name}: write is {tier.write!r}, must be one of {', '.join(WRITES)}")
    if type(tier.min_priority) is not int or not 0 <= tier.min_priority <= MAX_PRIORITY:
        found.append(f"{name}: min_priority is {tier.min_priority!r}, must be an int from 0 to {MAX_PRIORITY}")
    if type(tier.min_hits) is not int or tier.min_hits < 0:
        found.append(f"{name}: min_hits is {tier.min_hits!r}, must be an int of at least 0")
    return found


def _host_problems(name: str, tier: HostTier, index: int) -> list[str]:
    found = [] if not index else [f"{name}: host memory is the fastest tier there can be, and one: it comes first"]
    if tier.policy not in POLICY_NAMES if isinstance(tier.policy, str) else not callable(tier.policy):
        found.append(f"{name}: policy is {tier.policy!r}, must be one of {', '.join(POLICY_NAMES)} or a callable")
    return found


def _store_problems(name: str, tier: DiskTier | RemoteTier) -> list[str]:
    found = []
    limit: Any = tier.timeout_s
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < float("inf"):
        found.append(f"{name}: timeout_s is {limit!r}, must be a positive number of seconds")
    if isinstance(tier, RemoteTier):
        url: Any = tier.url
        if not isinstance(url, str) or ":" not in url:
            found.append(f"{name}: url is {url!r}, must be a URL or package.module:factory")
        return found
    directory: Any = tier.directory
    if not directory or not (isinstance(directory, str) or hasattr(directory, "__fspath__")):
        found.append(f"{name}: directory is {directory!r}, must be a path")
    if tier.io not in DISK_IO:
        found.append(f"{name}: io is {tier.io!r}, must be one of {', '.join(DISK_IO)}")
    try:
        parse_bytes(tier.capacity)
    except ConfigError as error:
        found += [f"{name}: capacity: {line}" for line in error.problems]
    return found
