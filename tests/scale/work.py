"""How much work a call is, counted and not timed: calls of functions, and bytes that it allocated at its peak."""

import gc
import sys
import tracemalloc
from contextlib import contextmanager


def num_calls(act):
    """Calls of functions, Python's and others', that an act makes."""
    counted = 0

    def count(frame, event, argument):
        nonlocal counted
        counted += event in ("call", "c_call")

    with _uncollected():
        sys.setprofile(count)
        try:
            act()
        finally:
            sys.setprofile(None)
    return counted


def peak_bytes(act):
    """Bytes that an act had allocated at its peak: what is copied, or made anew, in proportion to something shows."""
    with _uncollected():
        tracemalloc.start()
        try:
            act()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


@contextmanager
def _uncollected():
    """Keep the collector out: Hypothesis counts its runs, which would be calls."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
