"""Disks under a manager that fail when a test says so: opened by import path, as any store of a user's own."""

from contextlib import contextmanager

from kvist import RemoteTier
from kvist.testing import FaultyFiles
from kvist.tiers.disk import DiskStore

PATIENT = 60.0
_SETTINGS = {}


def opened(format, timeout_s):
    """Open the disk store of the block that this is in."""
    return DiskStore(_SETTINGS["directory"], _SETTINGS["capacity"], format, files=_SETTINGS["files"])


@contextmanager
def disk(directory, files=None, capacity=1 << 20):
    """A tier on disk for the length of a block; yields the tier and its files."""
    files = files or FaultyFiles()
    _SETTINGS.update(directory=directory, capacity=capacity, files=files)
    tier = RemoteTier(url=f"{__name__}:opened", timeout_s=PATIENT)
    try:
        yield tier, files
    finally:
        _SETTINGS.clear()
