"""Marks that let a test run over configurations: a few that differ in everything quickly, all others as slow ones."""

import pytest
from tests.torture.rig import EVERYWHERE, GROUPS, TIERS, WITH_HOST, WITH_STORES, WITHOUT_STORES, names

QUICK = [("full", tiers, at % 2 == 0) for at, tiers in enumerate(TIERS)] + [
    (groups, TIERS[at % len(TIERS)], at % 3 == 0) for at, groups in enumerate(name for name in GROUPS if name != "full")
]
"""Of all groups and tiers some, each with and without partial reuse."""


def over(combinations, **settings):
    """Run a test, which takes a `rig`, over combinations of groups, tiers and partial reuse."""
    quick = [each for each in combinations if each in QUICK] or combinations[::4]
    params = [
        pytest.param((*each, settings), id=names(each), marks=() if each in quick else pytest.mark.slow)
        for each in combinations
    ]
    return pytest.mark.parametrize("rig", params, indirect=True)


def of_groups(combinations, *groups):
    return [each for each in combinations if each[0] in groups]


def without_groups(combinations, *groups):
    return [each for each in combinations if each[0] not in groups]


__all__ = ["EVERYWHERE", "WITHOUT_STORES", "WITH_HOST", "WITH_STORES", "of_groups", "over", "without_groups"]
