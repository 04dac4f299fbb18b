"""The settings of a manager as JSON and back, without what is nobody's business: directories, hosts, credentials."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from itertools import groupby
from typing import Any

from kvist.config import AttentionSpec, CacheConfig, StateSpec
from kvist.errors import ArgumentError, KvistError, WireError
from kvist.journal.values import MALFORMED, Names, Values
from kvist.tier_config import DiskTier, HostTier, RemoteTier

__all__ = ["Policies", "policy_name", "read_config", "write_config"]

Policies = Mapping[str, Callable[[Any], Any]]
"""Eviction policies that are callables, by the name that a journal has for them: see `policy_name`."""

MAX_LAYERS = 100_000
VALUES = Values(Names())
SPECS = {kind.__name__: kind for kind in (AttentionSpec, StateSpec, HostTier, DiskTier, RemoteTier)}


def policy_name(policy: str | Callable[[Any], Any]) -> str:
    """Return the name of a policy in a journal.

    >>> policy_name("lru"), policy_name(lambda extent: extent.hits).rpartition(".")[2]
    ('lru', '<lambda>')
    """
    if isinstance(policy, str):
        return policy
    return f"{policy.__module__}.{getattr(policy, '__qualname__', type(policy).__name__)}"


def write_config(config: CacheConfig) -> dict[str, Any]:
    """Return settings as JSON can say them; layers that follow one another and are alike once, with their number."""
    told = {name: VALUES.write(value) for name, value in _fields(config).items() if name not in ("layers", "tiers")}
    told["layers"] = [[len(list(alike)), spec] for spec, alike in groupby(map(_spec, config.layers))]
    told["policy"] = policy_name(config.policy)
    told["tiers"] = [_tier(tier) for tier in config.tiers]
    return told


def read_config(told: dict[str, Any], policies: Policies | None = None) -> CacheConfig:
    """Return the settings that were written.

    Raises WireError for what are none, ArgumentError for a policy that is a callable and not among `policies`.
    """
    try:
        return _read_config(told, policies or {})
    except KvistError:
        raise
    except MALFORMED as error:
        raise WireError(f"config: expected settings of a manager, got others: {error!r}") from error


def _read_config(told: dict[str, Any], policies: Policies) -> CacheConfig:
    known = {field.name for field in fields(CacheConfig)}
    if unknown := sorted(set(told) - known):
        raise WireError(f"config: expected fields of CacheConfig, got {', '.join(unknown)}")
    settings = {name: VALUES.read(value) for name, value in told.items() if name not in ("layers", "tiers")}
    num_layers = sum(max(n, 0) for n, _ in told["layers"])
    if num_layers > MAX_LAYERS:
        raise WireError(f"config: expected at most {MAX_LAYERS} layers, got {num_layers}")
    settings["layers"] = [_read_spec(spec) for n, spec in told["layers"] for _ in range(n)]
    settings["tiers"] = [_read_tier(tier, policies) for tier in told["tiers"]]
    settings["policy"] = _read_policy(told["policy"], policies)
    config = CacheConfig(**settings)
    config.validate()
    return config


def _fields(settings: Any) -> dict[str, Any]:
    return {field.name: getattr(settings, field.name) for field in fields(settings)}


def _spec(spec: Any) -> list[Any]:
    return [type(spec).__name__, {name: VALUES.write(value) for name, value in _fields(spec).items()}]


def _tier(tier: Any) -> list[Any]:
    if isinstance(tier, HostTier):
        tier = replace(tier, policy=policy_name(tier.policy))
    elif isinstance(tier, DiskTier):
        tier = replace(tier, directory="journal")
    elif isinstance(tier, RemoteTier):
        tier = replace(tier, url=f"{tier.url.partition(':')[0]}://journal")
    return _spec(tier)


def _read_spec(told: list[Any]) -> Any:
    kind, settings = told
    if kind not in SPECS:
        raise WireError(f"config: expected one of {', '.join(SPECS)}, got {kind!r}")
    return SPECS[kind](**{name: VALUES.read(value) for name, value in settings.items()})


def _read_tier(told: list[Any], policies: Policies) -> Any:
    tier = _read_spec(told)
    return replace(tier, policy=_read_policy(str(tier.policy), policies)) if isinstance(tier, HostTier) else tier


def _read_policy(name: str, policies: Policies) -> str | Callable[[Any], Any]:
    if "." not in name:
        return name
    if name not in policies:
        raise ArgumentError(f"the journal is of a manager with the policy {name}: pass policies={{{name!r}: ...}}")
    return policies[name]
