from tests.core.facts import NOT_TESTED, REASONS, all_facts, facts_in_names


def test_every_fact_is_a_test_or_has_a_reason_not_to_be():
    assert sorted(all_facts() - facts_in_names() - NOT_TESTED.keys()) == []


def test_no_fact_is_both():
    assert sorted(facts_in_names() & NOT_TESTED.keys()) == []


def test_no_reason_is_given_for_what_is_no_fact_or_twice():
    assert sorted(NOT_TESTED.keys() - all_facts()) == []
    assert len(NOT_TESTED) == sum(len(facts.split()) for facts in REASONS.values())
