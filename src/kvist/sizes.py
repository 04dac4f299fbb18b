"""Numbers of bytes, as people write them."""

import re

from kvist.errors import ConfigError

__all__ = ["parse_bytes"]

SIZE_UNITS = {
    "": 1,
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
MAX_DIGITS = 100


def parse_bytes(size: int | str) -> int:
    """Return a number of bytes; text is a number with a unit of KiB, MiB, GiB, TiB (or kB, MB, GB, TB, powers of ten).

    >>> parse_bytes("1.5 GiB")
    1610612736
    """
    if isinstance(size, int) and not isinstance(size, bool):
        if size <= 0:
            raise ConfigError([f"{size} is not a positive number of bytes"])
        return size
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", size) if isinstance(size, str) else None
    if not found or found[2] not in SIZE_UNITS:
        raise ConfigError([f"{size!r} is not a size such as 1073741824 or '20 GiB'"])
    number = _times(found[1], SIZE_UNITS[found[2]])
    if number <= 0:
        raise ConfigError([f"{size!r} is not a positive number of bytes"])
    return number


def _times(number: str, unit: int) -> int:
    """Return a decimal number times a unit, exactly, rounded down: no float, which would be off from 2**53 on."""
    if len(number) > MAX_DIGITS:
        raise ConfigError([f"a size of {len(number)} digits is none, {number[:10]}..."])
    whole, _, fraction = number.partition(".")
    scale: int = 10 ** len(fraction)
    return int(whole + fraction) * unit // scale
