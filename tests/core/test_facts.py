from scripts.conformance import PAGE, page
from tests.core.facts import NOT_TESTED, REASONS, all_facts, facts_in_names


def test_every_fact_is_a_test_or_has_a_reason_not_to_be():
    assert sorted(all_facts() - facts_in_names() - NOT_TESTED.keys()) == []


def test_no_fact_is_both():
    assert sorted(facts_in_names() & NOT_TESTED.keys()) == []


def test_what_is_said_of_facts_is_said_of_such_as_there_are_and_once():
    assert sorted((NOT_TESTED.keys() | facts_in_names()) - all_facts()) == []
    assert len(NOT_TESTED) == sum(len(facts.split()) for facts in REASONS.values())


def test_the_page_on_conformance_is_what_the_tests_say():
    """After a change: `python -m scripts.conformance > docs/conformance.md`."""
    assert PAGE.read_text(encoding="utf-8") == page()
