"""The pages about serving: their examples are run, and the commands they show are commands there are."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvist.cli import app

ROOT = Path(__file__).parents[2]
PAGES = ("serve.md", "transformers.md")


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_hold(page):
    path = ROOT / "docs" / page
    blocks = re.findall(r"^```python\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert sum(block.count("assert ") for block in blocks) > 10
    names = {}
    for block in blocks:
        exec(compile(block, str(path), "exec"), names)


@pytest.mark.parametrize("page", ["README.md", "docs/serve.md"])
def test_the_commands_of_a_page_name_options_that_there_are(page):
    commands = re.findall(r"^(?:\$ )?kvist generate (.*)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert commands
    known = CliRunner().invoke(app, ["generate", "--help"]).stdout
    shown = {option for command in commands for option in re.findall(r"--[a-z-]+", command)}
    assert "--model" in shown
    assert [option for option in sorted(shown) if not re.search(rf"^ +{option} ", known, re.MULTILINE)] == []
