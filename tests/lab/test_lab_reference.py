"""The reference names all that the lab offers."""

import importlib
import re
from pathlib import Path

import pytest

REFERENCE = Path(__file__).parents[2] / "docs" / "reference.md"


@pytest.mark.parametrize("module", ["traces", "synthetic", "recording", "curves", "replay", "report", "shadow"])
def test_every_public_name_is_in_the_reference(module):
    name = f"kvist.lab.{module}"
    told = set(re.findall(rf"^::: {re.escape(name)}\.(\w+)$", REFERENCE.read_text(encoding="utf-8"), re.MULTILINE))
    assert told == set(importlib.import_module(name).__all__)
