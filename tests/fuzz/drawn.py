"""What fuzzing draws: values of all JSON and MessagePack kinds, and valid ones with a few places changed."""

import copy
import json

from hypothesis import strategies as st

INTS = st.sampled_from((0, 1, -1, 2, 255, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63, 2**64 - 1, -(2**63)))
HUGE = st.sampled_from((2**64, -(2**63) - 1, 10**30, 10**400))
FLOATS = st.sampled_from((0.0, -0.0, 0.5, -1.5, 1e300, float("inf"), float("-inf"), float("nan")))
TEXTS = st.sampled_from(
    ("", "0", "-1", "a", "device", "GPU", "full", "\ud800", "é", "x" * 300, "9" * 5000, "\x00", "f0")
)
SCALARS = st.none() | st.booleans() | INTS | FLOATS | TEXTS
CONTAINERS = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(("a", "bytes", "map", "0")), inner, max_size=2)
    ),
    max_leaves=5,
)
VALUES = CONTAINERS | HUGE
DEEP = 100_000
"""Brackets in one another: more than any parser may follow by calling itself."""


@st.composite
def changed(draw, seeds, values=VALUES, max_changes=3):
    """One of some values of dicts and lists, with up to so many places changed, left out, doubled or added."""
    value = copy.deepcopy(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, max_changes))):
        value = _change(draw, value, values)
    return value


def _change(draw, value, values):
    places = list(_places(value))
    if not places:
        return copy.deepcopy(draw(values))
    holder, key = draw(st.sampled_from(places))
    what = draw(st.sampled_from(("set", "set", "set", "leave out", "add")))
    if what == "set":
        holder[key] = copy.deepcopy(draw(values))
    elif what == "leave out":
        del holder[key]
    elif isinstance(holder, list) and key < len(holder):
        holder.insert(key, copy.deepcopy(holder[key]))
    else:
        holder[draw(st.sampled_from(("x", "own", "type", "map")))] = copy.deepcopy(draw(values))
    return value


def _places(value):
    """Every (container, key) inside a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)


@st.composite
def damaged(draw, seeds, max_changes=4):
    """One of some bytes objects, with bytes flipped, cut out, doubled, put in or cut off."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, max_changes))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        size = draw(st.sampled_from((1, 1, 2, 8, 100)))
        what = draw(st.sampled_from(("flip", "flip", "out", "double", "in", "cut")))
        if what == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif what == "out":
            del data[at : at + size]
        elif what == "double":
            data[at:at] = data[at : at + size]
        elif what == "in":
            data[at:at] = draw(st.binary(min_size=1, max_size=size))
        else:
            del data[at:]
    return bytes(data)


def as_json(value):
    """JSON text of a value, also of what is not quite JSON: NaN, and ints of any length."""
    return json.dumps(value) if not _is_long(value) else json.dumps(value, default=str)


def _is_long(value):
    return isinstance(value, int) and abs(value) >= 10**4000
