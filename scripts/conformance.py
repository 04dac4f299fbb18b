"""Write the page on what other systems' cache managers do and what holds here, from the names and docstrings of tests.

python -m scripts.conformance > docs/conformance.md

A test whose name begins with facts, such as `test_V7_V9_...`, is a row of the table of that system; its docstring says
more, and where it begins with "Differs:", what is another number here and why.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.core.facts import REASONS, TESTS, facts_of, facts_of_test

PAGE = Path(__file__).resolve().parents[1] / "docs" / "conformance.md"
DIFFERS = "Differs:"
SYSTEMS = {
    "TRT": "TensorRT-LLM",
    "V": "vLLM",
    "M": "mistral.rs",
    "E": "Edge-LLM",
    "B": "Faults that users reported",
}
INTRODUCTION = """\
# What others' cache managers do, and what holds here

This page is made from the tests by `scripts/conformance.py`.

What the KV cache managers of other systems do was noted down as facts with small numbers, and so was what their users
reported to have gone wrong. Each fact has a letter for its system (TRT TensorRT-LLM, V vLLM, M mistral.rs, E Edge-LLM,
B reported faults) and a number, which is part of the name of the test that holds it here. Ids of blocks may differ
everywhere; counts, tokens reused, what stays cached and what is evicted are equal, or better, and then a row says
"Differs" and why.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One test of facts: where it is, which facts, what its name says, and its docstring."""

    path: Path
    facts: tuple[str, ...]
    says: str
    remark: str

    @property
    def differs(self) -> bool:
        """Whether the facts' numbers are others here."""
        return self.remark.startswith(DIFFERS)

    def facts_in(self, system: str) -> list[str]:
        """Which of its facts are of a system."""
        return [fact for fact in self.facts if fact.rstrip("0123456789") == system]

    def cells(self, system: str) -> str:
        """Return it as a line of the table of a system."""
        remark = self.remark.replace(DIFFERS, f"**{DIFFERS}**", 1)
        where = f"`{self.path.relative_to(TESTS.parent).as_posix()}`"
        return _line(", ".join(self.facts_in(system)), f"{self.says} {remark}".strip(), where)


def rows() -> list[Row]:
    """Collect the tests of facts from all files of tests."""
    return [row for path in sorted(TESTS.rglob("test_*.py")) for row in _rows_of(path)]


def _rows_of(path: Path) -> Iterator[Row]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and (facts := facts_of_test(node.name)):
            words = node.name.removeprefix("_".join(["test", *facts])).split("_")
            sentence = " ".join(words).strip()
            remark = " ".join((ast.get_docstring(node) or "").split())
            yield Row(path, tuple(facts), f"{sentence[:1].upper()}{sentence[1:]}.", remark)


def page() -> str:
    """Return the whole page."""
    tested = rows()
    tables = [_table(system, tested) for system in SYSTEMS]
    return "\n".join([INTRODUCTION, _summary(tested), *tables, _reasons()])


def _summary(tested: list[Row]) -> str:
    lines = [_line("System", "Facts", "Tested", "of these with another number", "Not tested"), "|---|--:|--:|--:|--:|"]
    for system, name in SYSTEMS.items():
        facts = facts_of(system)
        held = {fact for row in tested for fact in row.facts_in(system)}
        others = {fact for row in tested if row.differs for fact in row.facts_in(system)}
        lines.append(_line(name, *map(str, (len(facts), len(held), len(others), len(facts) - len(held)))))
    return "\n".join([*lines, ""])


def _table(system: str, tested: list[Row]) -> str:
    order = {fact: at for at, fact in enumerate(facts_of(system))}
    of_system = [row for row in tested if row.facts_in(system)]
    of_system.sort(key=lambda row: order[row.facts_in(system)[0]])
    lines = [_line("Fact", "What holds here", "Test"), "|---|---|---|", *(row.cells(system) for row in of_system)]
    return "\n".join([f"## {SYSTEMS[system]}", "", *lines, ""])


def _reasons() -> str:
    lines = [_line("Why", "Facts"), "|---|---|"]
    lines += [_line(reason, facts.replace(" ", ", ")) for reason, facts in REASONS.items()]
    return "\n".join(["## What is not tested, and why", "", *lines, ""])


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.stdout.write(page())
