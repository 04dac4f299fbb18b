"""Every fault of the log is shown by a test, or has a reason why it cannot be; and the page says so."""

from scripts.faults import PAGE, page, reasons, shown_by
from tests.core.facts import facts_of
from tests.torture.rows import CLASS_OF, CLASSES, LOG, TITLES


def test_every_row_is_shown_by_a_test_or_has_a_reason():
    assert sorted(TITLES.keys() - shown_by().keys() - reasons().keys()) == []


def test_no_row_has_both():
    assert sorted(shown_by().keys() & reasons().keys()) == []


def test_tests_name_rows_that_there_are():
    assert sorted(shown_by().keys() - TITLES.keys()) == []


def test_rows_are_those_that_the_page_on_conformance_knows_and_each_is_there_once():
    assert sorted(TITLES) == facts_of("B")
    assert len(TITLES) == sum(len(lines.strip().splitlines()) for lines in LOG.values())
    assert set(CLASS_OF.values()) == CLASSES.keys() == LOG.keys()


def test_each_of_the_twenty_cases_has_a_file():
    told = PAGE.read_text(encoding="utf-8")
    assert [case for case in range(1, 21) if f"T{case:02}" not in told] == []


def test_the_page_is_what_the_tests_say():
    """After a change: `python -m scripts.faults > docs/faults.md`."""
    assert PAGE.read_text(encoding="utf-8") == page()
