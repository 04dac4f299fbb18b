"""Rigs as fixtures: `rig` is opened for each combination that a test is marked with."""

import pytest
from tests.torture.rig import opened


@pytest.fixture
def rig(request):
    groups, tiers, partial, *rest = request.param
    with opened(groups, tiers, partial, **(rest[0] if rest else {})) as each:
        yield each
