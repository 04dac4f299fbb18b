"""A small workload with everything that a report shows, and names that would be markup if they were let."""

import numpy as np

from kvist import HostTier
from kvist.lab.curves import lru_curve, optimal_curve, references_of, sampled_curve
from kvist.lab.replay import ReplayConfig, replay
from kvist.lab.report import PrefixIcicle
from kvist.lab.traces.requests import Request, TokenPrompt

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=2'>&\"\u2028$x"
"""Ends a script, begins another, is no JSON string in older browsers, and is a formula."""
BLOCK_SIZE = 4


class Requests(list):
    """Requests with a trace's name."""

    name = HOSTILE
    block_size = None


def requests():
    """Conversations of two tenants: 12 of 5 turns, each tenant's with a system prompt of three blocks of their own."""
    random = np.random.default_rng(7)
    systems = {name: random.integers(1000, 2000, 12) for name in ("acme", HOSTILE)}
    made = []
    for turn in range(1, 6):
        for user in range(12):
            tenant = ("acme", HOSTILE)[user % 2]
            said = np.random.default_rng(user).integers(0, 1000, 8 * turn)
            ids = np.concatenate([systems[tenant], said]).astype(np.int32)
            made.append(Request(TokenPrompt(ids), float(len(made)), 2, namespace=(tenant,), line=len(made) + 1))
    return Requests(made)


def parts():
    """The arguments of a report on them."""
    trace = requests()
    references = references_of(trace, BLOCK_SIZE)
    base = {"block_size": BLOCK_SIZE, "arrivals": "trace"}
    configs = [
        ReplayConfig(num_blocks=30, policy="lru", **base),
        ReplayConfig(num_blocks=60, policy="lru", concurrency=3, **base),
        ReplayConfig(num_blocks=30, policy="lru", tiers=[HostTier(num_blocks=40)], name=f"named {HOSTILE}", **base),
    ]
    sizes = np.arange(1, 200, 8)
    return {
        "trace_name": HOSTILE,
        "curves": [lru_curve(references), optimal_curve(references, sizes), sampled_curve(references, 0.5)],
        "results": [replay(trace, config) for config in configs],
        "references": references,
        "tree": PrefixIcicle.of(references, [request.namespace[0] for request in trace]),
    }
