"""Write the page on faults that users of cache managers reported, from the names of the tests that show each.

python -m scripts.faults > docs/faults.md
"""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

from scripts.conformance import Row, rows
from tests.core.facts import NOT_TESTED, TESTS
from tests.torture.rows import CLASS_OF, CLASSES, REASONS, TITLES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "faults.md"
INTRODUCTION = """\
# Faults that others' users reported, and what shows that they do not happen here

This page is made from the tests by `scripts/faults.py`.

Users of the cache managers of vLLM, SGLang, TensorRT-LLM, LMCache, Dynamo and others reported what went wrong for them.
The log has a number for each report; a test that shows how it would go here has the number in its name. Each stands for
its kind: `tests/torture` runs kinds of faults over all kinds of groups and tiers, with an oracle in place of memory and
all proofs after each call. The part that takes seconds runs with `make check`, all of it with `make test`.
"""


def reasons() -> dict[str, str]:
    """Return why rows of the log are not tested, by row."""
    return {row: reason for row, reason in (NOT_TESTED | REASONS).items() if row in TITLES}


def shown_by() -> dict[str, list[Row]]:
    """Return the tests that name each row of the log."""
    return _by_row(rows())


def _by_row(tests: list[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = defaultdict(list)
    for test in tests:
        for row in test.facts_in("B"):
            found[row].append(test)
    return found


def page() -> str:
    """Return the whole page."""
    tests = rows()
    tested = _by_row(tests)
    return "\n".join([INTRODUCTION, _summary(tested), _cases(tests), *(_table(name, tested) for name in CLASSES)])


def _summary(tested: dict[str, list[Row]]) -> str:
    lines = [_line("Class", "", "Reports", "Tests that name them", "Not tested"), "|---|---|--:|--:|--:|"]
    for name, title in CLASSES.items():
        of_class = [row for row in TITLES if CLASS_OF[row] == name]
        tests = {(test.path, test.says) for row in of_class for test in tested.get(row, ())}
        untested = sum(row not in tested for row in of_class)
        lines.append(_line(f"[{name}](#{_anchor(title)})", title, str(len(of_class)), str(len(tests)), str(untested)))
    return "\n".join([*lines, ""])


def _cases(tests: list[Row]) -> str:
    """Return the table of the cases that run over all configurations."""
    lines = [_line("Case", "What holds", "Reports"), "|---|---|---|"]
    for path in sorted((TESTS / "torture").glob("test_t*.py")):
        told = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        case, _, says = told.partition(": ")
        named = sorted({row for test in tests if test.path == path for row in test.facts_in("B")})
        lines.append(_line(f"{case}, `{path.name}`", says[:1].upper() + says[1:], ", ".join(named)))
    return "\n".join(["## Cases that run over every kind of group and tier", "", *lines, ""])


def _table(name: str, tested: dict[str, list[Row]]) -> str:
    lines = [_line("Report", "What went wrong", "What shows it, or why nothing does"), "|---|---|---|"]
    for row in (row for row in TITLES if CLASS_OF[row] == name):
        shown = [f"{test.says} `{_place(test)}`" for test in tested.get(row, ())]
        told = "<br>".join(shown) or f"Not tested: {reasons()[row][:1].lower()}{reasons()[row][1:]}"
        lines.append(_line(row, f"{TITLES[row]}.", told))
    return "\n".join([f"## {CLASSES[name]}", "", *lines, ""])


def _place(test: Row) -> str:
    return test.path.relative_to(TESTS).as_posix()


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.stdout.write(page())
