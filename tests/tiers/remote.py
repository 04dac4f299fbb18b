"""What tests of stores behind a server share: a format, contents by key, and what of them a store has."""

from kvist.testing.stores import contents_of
from kvist.tiers.protocol import StoreFormat

FORMAT = StoreFormat("a model", block_size=2, block_bytes=(1000,))
PATIENT = 60.0
"""Seconds: a limit that no healthy server reaches, however busy the machine."""


def entries(keys):
    """What is put for each key."""
    return [(key, memoryview(contents_of(key, 1000))) for key in keys]


def found(store, keys):
    """Say of each key whether a store has it, whose contents must then be right."""
    buffers = [bytearray(1000) for _ in keys]
    answers = store.get(keys, [memoryview(buffer) for buffer in buffers])
    for key, buffer, is_there in zip(keys, buffers, answers, strict=True):
        assert not is_there or bytes(buffer) == contents_of(key, 1000)
    return answers
