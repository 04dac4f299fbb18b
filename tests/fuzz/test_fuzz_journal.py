"""A journal that is not as it was written is replayed as far as it says something, or is refused by a KvistError."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.drawn import DEEP, VALUES, as_json, changed, damaged

from kvist import AttentionSpec, CacheConfig, HostTier, KVCacheManager, Media, Retention
from kvist.errors import KvistError
from kvist.journal import Journal, report


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("journal") / "calls.journal"


@pytest.fixture(scope="module")
def lines(path):
    config = CacheConfig(
        [AttentionSpec(1, 1), AttentionSpec(1, 1, sliding_window=3)], 2, 8, max_sequences=3, max_sequence_length=12,
        tiers=[HostTier(num_blocks=4)], event_buffer=64,
    )  # fmt: skip
    manager = KVCacheManager(config, clock=lambda: 1.0)
    with Journal(path, digest_every=4).attach(manager):
        first = manager.add_sequence(
            np.arange(5), namespace=("a", 1, b"b"), media=[Media(1, 2, "m")], retention=Retention([(0, 2, 80, 5.0)])
        )
        manager.commit([first])
        [second] = manager.fork(first)
        manager.append([first, second], np.array([1, 2]))
        manager.free(first)
        with manager.pin(manager.match_prefix(range(4), namespace=("a", 1, b"b"), media=[Media(1, 2, "m")])):
            manager.evict(3)
        manager.suspend(second)
        manager.resume(second)
        manager.forecast()
        manager.drop(namespace=("a",))
        manager.events.poll()
    return path.read_bytes().splitlines(keepends=True)


def replayed(path, content):
    path.write_bytes(content)
    try:
        told = report(path, state=True)
    except (KvistError, OSError):
        return
    json.dumps(told)


SMALL = st.integers(-1, 100) | st.sampled_from((None, True, 0.5, "a", "1 KiB", [], {}, [1], {"tuple": []}, 10**30))
"""Settings of a size that no test has to worry about."""


@given(data=st.data())
def test_a_journal_with_damaged_bytes_is_replayed_or_refused(path, lines, data):
    replayed(path, data.draw(damaged([b"".join(lines)])))


@given(data=st.data())
def test_a_call_with_values_of_other_kinds_is_replayed_or_refused(path, lines, data):
    at = data.draw(st.integers(1, len(lines) - 1))
    value = data.draw(changed([json.loads(lines[at])], values=VALUES | ODD))
    replayed(path, b"".join([*lines[:at], as_json(value).encode() + b"\n", *lines[at + 1 :]]))


@given(data=st.data())
def test_a_head_with_values_of_other_kinds_is_replayed_or_refused(path, lines, data):
    value = data.draw(changed([json.loads(lines[0])], values=SMALL))
    replayed(path, b"".join([as_json(value).encode() + b"\n", *lines[1:]]))


ODD = st.sampled_from(
    [
        {"array": ["<i4", "u1", [2], "AQI="]},
        {"array": ["<i4", "u1", [2**40], "AQI="]},
        {"array": ["O", "O", [1], "AQI="]},
        {"array": ["<U2147483647", "u1", [2], "AQI="]},
        {"array": ["9" * 5000, "<i8", [1], "AAAAAAAAAAA="]},
        {"range": [0, 2**62, 1]},
        {"range": [0, 9, 0]},
        {"typed": ["u", ""]},
        {"memory": ["O", "AQI="]},
        {"scalar": ["<f8", "<f8", [], ""]},
        {"objects": [[3], [1]]},
        {"sequence": "x"},
        {"sequences": 3},
        {"pin": [1]},
        {"match": []},
        {"media": [1]},
        {"retention": [[], 200, -1]},
        {"forecast": [[1]]},
        {"dict": [[], 1]},
        {"foreign": 1},
        {"bytes": 1},
        {"tuple": 5},
        {"array": 3},
        {"sequence": 10**30},
    ]
)


@pytest.mark.parametrize("bracket", [b"[", b'{"tuple":', b'["evict",['])
def test_brackets_without_end_are_refused(path, lines, bracket):
    replayed(path, bracket * DEEP + b"\n")
    replayed(path, lines[0] + bracket * DEEP + b"\n")
    for depth in (300, 900, 980):
        call = b'["evict",[' + b"[" * depth + b"]" * depth + b"],{},{}]\n"
        replayed(path, lines[0] + call)
