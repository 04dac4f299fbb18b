"""Opens the store that a URL or an import path names."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from kvist.errors import ConfigError, KvistError
from kvist.tiers.protocol import Store, StoreFormat

__all__ = ["SCHEMES", "open_store"]


def open_store(place: str, format: StoreFormat, *, timeout_s: float = 1.0) -> Store:
    """Return the store at a place, for contents of a format; no server is asked before the first call.

    | place | store | settings behind a `?` |
    |---|---|---|
    | `valkey://host:port/number`, `redis://` | `ValkeyStore` | `ttl_s`, `cluster` |
    | with TLS `valkeys://`, `rediss://` | `ValkeyStore` | these, and `ca_file`, `cert_file`, `key_file` |
    | `s3://bucket/prefix`, `gs://`, `az://container/prefix` | `ObjectStore` | `ca_file`, and as `obstore` has |
    | `file:///folder` | `ObjectStore` | |
    | `memory://` | `SimulatedStore`, gone with the process | `capacity_bytes` |
    | `package.module:factory` | what `factory(format, timeout_s=...)` returns | |

    Servers are given `timeout_s` for each answer. A `GuardedStore` around it bounds whole calls.

    Raises:
        ConfigError: there is no such kind of store, setting, module or factory.
        ModuleNotFoundError: the client is not installed; the message says which extra brings it.
    """
    scheme, separator, _ = place.partition("://")
    if not separator:
        return _made(place, format, timeout_s)
    if scheme not in SCHEMES:
        allowed = ", ".join(f"{each}://" for each in SCHEMES)
        raise ConfigError([f"no store is named by {scheme}://, only by {allowed} and package.module:factory"])
    try:
        return SCHEMES[scheme](place, format, timeout_s)
    except KvistError:
        raise
    except ValueError as error:  # what the parsers of URLs raise
        raise ConfigError([f"{scheme}:// is followed by what is no address: {error}"]) from error


def _made(path: str, format: StoreFormat, timeout_s: float) -> Store:
    module, _, name = path.partition(":")
    if not module or not name:
        raise ConfigError([f"a store is named by a URL or as package.module:factory, not by {path!r}"])
    try:
        factory = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError([f"{path} cannot be imported: {error}"]) from error
    store = factory(format, timeout_s=timeout_s)
    if not isinstance(store, Store):
        raise ConfigError([f"{path} made {type(store).__name__}, which lacks some call of the Store protocol"])
    return store


def _valkey(url: str, format: StoreFormat, timeout_s: float) -> Store:
    from kvist.tiers.valkey import TLS_SETTINGS, ValkeyStore

    address, settings = _split(url, "ttl_s", "cluster", *TLS_SETTINGS)
    files = urlencode([(name, settings[name]) for name in TLS_SETTINGS if name in settings])
    ttl_s = _number(settings, "ttl_s")
    is_cluster = settings.get("cluster", "false")
    if is_cluster not in ("true", "false"):
        raise ConfigError([f"cluster is {is_cluster!r}, but must be true or false"])
    address += f"?{files}" if files else ""
    return ValkeyStore(address, format, timeout_s=timeout_s, ttl_s=ttl_s, cluster=is_cluster == "true")


def _objects(url: str, format: StoreFormat, timeout_s: float) -> Store:
    from kvist.tiers.objects import ObjectStore

    return ObjectStore(url, format, timeout_s=timeout_s)


def _memory(url: str, format: StoreFormat, timeout_s: float) -> Store:
    from kvist.tiers.simulated import SimulatedStore

    capacity = _number(_split(url, "capacity_bytes")[1], "capacity_bytes")
    return SimulatedStore(format, None if capacity is None else int(capacity))


def _split(url: str, *known: str) -> tuple[str, dict[str, str]]:
    """Return a URL without its settings, and these."""
    parts = urlsplit(url)
    settings = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := settings.keys() - set(known):
        raise ConfigError([f"{parts.scheme}:// has the settings {', '.join(known)}, not {', '.join(sorted(unknown))}"])
    return urlunsplit(parts._replace(query="")), settings


def _number(settings: dict[str, str], name: str) -> float | None:
    if name not in settings:
        return None
    try:
        number = float(settings[name])
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ConfigError([f"{name} is {settings[name]!r}, but must be a number above 0"])
    return number


SCHEMES: dict[str, Callable[[str, StoreFormat, float], Store]] = {
    **dict.fromkeys(("valkey", "valkeys", "redis", "rediss"), _valkey),
    **dict.fromkeys(("s3", "gs", "az", "file"), _objects),
    "memory": _memory,
}
"""How a store is opened, by the scheme of its URL."""
