"""T05: tokens are compared whole and exactly, and what leaves the process has the same name in any other."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.torture.over import EVERYWHERE, over
from tests.torture.rig import GROUPS, again, opened

TRAPS = {
    "8 bits": (65, 321),
    "16 bits": (70_000, 70_000 - 65_536),
    "24 bits": (5, 5 + 2**24),
    "the highest bit": (5, 5 + 2**30),
    "all bits": (0, 2**31 - 1),
    "bytes in another order": (0x01020304, 0x04030201),
    "zeros": (0, 256),
}
"""Pairs of tokens that are equal where some bits, or their order, are left out."""


@over(EVERYWHERE)
def test_B051_B050_tokens_that_some_cut_takes_for_equal_are_not(rig):
    for one, other in TRAPS.values():
        for token in (one, other):
            assert rig.leave([token] * 9) == 0
            assert rig.leave([token] * 4 + [7] * 5) <= 4
        rig.manager.drop(namespace=())
    rig.require_all_back()


@over(EVERYWHERE)
def test_B051_every_position_counts(rig):
    """Prompts that differ in one token each are found up to it, and no further."""
    tokens = list(range(100, 117))
    rig.leave(tokens)
    for at in range(17):
        changed = [*tokens[:at], 5, *tokens[at + 1 :]]
        assert rig.leave(changed, publish=False) <= at
    rig.require_all_back()


NAMES = """
import sys
sys.path.insert(0, {root!r})
from tests.torture.rig import Rig
rig = Rig({groups!r})
for namespace in [(), ("salt", 1), (b"salt",), ("a", "b")]:
    rig.leave(range(64), namespace=namespace)
sequence = rig.serve([5, *range(30)])
print(rig.manager.digest(), rig.manager.events.content_digest(), rig.config.fingerprint.hex())
"""


@pytest.mark.parametrize("groups", ["full", "mixed"])
def test_B047_names_of_content_are_the_same_in_processes_with_other_seeds(groups):
    root = str(Path(__file__).resolve().parents[2])
    told = set()
    for seed in ("1", "2", "random"):
        settings = os.environ | {"PYTHONHASHSEED": seed}
        code = NAMES.format(root=root, groups=groups)
        ran = subprocess.run([sys.executable, "-c", code], env=settings, capture_output=True, text=True, check=True)
        told.add(ran.stdout)
    assert len(told) == 1
    assert len(told.pop()) > 128


@pytest.mark.parametrize("groups", [name for name in GROUPS if name not in ("cross", "ring")])
def test_B050_a_name_that_collides_in_a_store_cannot_be_made_by_splitting_otherwise(groups):
    """Where blocks begin and end is part of a name: the same bytes under another namespace are other content."""
    with opened(groups, "store", partial=False) as rig:
        rig.leave(range(16), namespace=("a",))
        rig.send_down()
        fresh = again(rig)
        for tokens in (range(4, 20), [0, *range(16)], range(1, 17)):
            assert fresh.leave(tokens, namespace=("a",), publish=False) == 0
        assert fresh.leave([*range(16), 99], namespace=("a",)) == 16
        fresh.close()
