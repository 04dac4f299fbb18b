"""The examples that people read are run: in the README, the pages of the documentation, and the docstrings."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

import kvist

ROOT = Path(__file__).resolve().parent.parent
PAGES = [path for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if ">>> " in path.read_text()]
MODULES = [path for path in sorted((ROOT / "src").rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]
FENCE = re.compile(r"^```(?:python|pycon)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPTIONAL = {
    "torch",
    "transformers",
    "typer",
    "rich",
    "zmq",
    "msgspec",
    "redis",
    "obstore",
    "mpi4py",
    "prometheus_client",
}
IMPORTED = re.compile(r"^>>> import (\w+)$", re.MULTILINE)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def examples(text):
    """The text with everything but its fenced Python blocks blanked, so that line numbers stay true."""
    kept = [" " if character != "\n" else "\n" for character in text]
    for match in FENCE.finditer(text):
        kept[match.start(1) : match.end(1)] = match[1]
    return "".join(kept)


def failures(text, name, path, namespace=None):
    """What doctest reports of the examples in a page; empty if all hold. One namespace for the page."""
    report = []
    test = doctest.DocTestParser().get_doctest(examples(text), namespace or {}, name, str(path), 0)
    doctest.DocTestRunner(verbose=False, optionflags=FLAGS).run(test, out=report.append)
    return "".join(report)


def test_the_readme_has_examples():
    assert ROOT / "README.md" in PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_example_of_a_page_gives_what_it_says(page):
    for name in OPTIONAL.intersection(IMPORTED.findall(page.read_text(encoding="utf-8"))):
        module(name)
    assert failures(page.read_text(encoding="utf-8"), page.name, page) == ""


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_example_of_a_page_is_in_a_fenced_block(page):
    text = page.read_text(encoding="utf-8")
    assert examples(text).count(">>> ") == text.count(">>> ")


def test_every_public_name_has_a_place_in_the_reference():
    places = re.findall(
        r"^::: kvist\.(\w+)$", (ROOT / "docs" / "reference.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(places) == sorted(kvist.__all__)


def test_a_wrong_example_is_reported():
    page = "# Title\n\n```python\n>>> 1 + 1\n3\n```\n\nand `>>> this` is prose\n"
    assert "Expected:\n    3\nGot:\n    2\n" in failures(page, "page", "page.md")
    assert 'File "page.md", line 4' in failures(page, "page", "page.md")


def module(name):
    """The module; the test is skipped where an optional package that it needs is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name not in OPTIONAL:
            raise
        pytest.skip(f"{missing.name} is not installed here")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_example_of_a_docstring_gives_what_it_says(path):
    name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
    result = doctest.testmod(module(name), optionflags=FLAGS)
    assert (result.failed, result.attempted > 0) == (0, True)
