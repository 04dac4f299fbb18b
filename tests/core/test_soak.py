"""A soak: it ends, says how far it came, and keeps what it finds as a journal that replays to the failing call."""

import re

import pytest
from tests.core.test_planted_faults import FAULTS

from kvist import ArgumentError, KVCacheManager
from kvist.core import rows
from kvist.journal import replay, report
from kvist.testing.odd_policies import ODD_POLICIES
from kvist.testing.soak import ROUND_EXAMPLES, SHAPES, Plan, Soak

ALL_USUAL = SHAPES.index("usual")


class Ticks:
    """A clock that goes on by a second whenever it is read."""

    now_s = 0.0

    def __call__(self):
        self.now_s += 1
        return self.now_s


def test_a_clean_soak_finds_nothing_and_counts_what_it_did(tmp_path):
    soak = Soak(Plan(seed=3, examples=4, steps=8), tmp_path / "fault.journal")
    assert soak.run() is None
    assert soak.tally.num_examples >= 4
    assert soak.tally.num_steps >= 4 * 8
    assert list(tmp_path.iterdir()) == []


def test_a_soak_ends_with_its_time_in_the_middle_of_a_round(tmp_path):
    seen = []
    plan = Plan(seed=3, minutes=0.5, steps=100)
    soak = Soak(plan, tmp_path / "fault.journal", clock=Ticks(), watch=lambda tally: seen.append(tally.num_steps))
    assert soak.run() is None
    assert 20 < soak.tally.num_steps < 40
    assert seen == list(range(1, soak.tally.num_steps + 1))


@pytest.mark.parametrize("stop_s", range(30, 330, 30))
def test_wherever_its_time_ends_a_soak_takes_that_for_no_fault(stop_s, tmp_path):
    soak = Soak(Plan(seed=3, minutes=stop_s / 60, steps=12), tmp_path / "fault.journal", clock=Ticks())
    assert soak.run() is None


@pytest.mark.parametrize("stop_at", range(10, 130, 20))
def test_what_the_watcher_raises_ends_a_soak_and_is_no_fault(stop_at, tmp_path):
    def watch(tally):
        if tally.num_steps == stop_at:
            raise KeyboardInterrupt

    soak = Soak(Plan(seed=3, examples=20, steps=12), tmp_path / "fault.journal", watch=watch)
    with pytest.raises(KeyboardInterrupt):
        soak.run()


def test_soaks_with_neighbouring_seeds_share_no_round_and_take_turns_at_shapes(tmp_path):
    seeds = []
    for seed in range(4):
        soak = Soak(Plan(seed=seed, examples=4 * ROUND_EXAMPLES, steps=1), tmp_path / "fault.journal")
        told = []
        soak._watch = lambda tally, told=told: told.append(tally.seed)
        soak.run()
        seeds += dict.fromkeys(told)
        assert {each % len(SHAPES) for each in told} == set(range(len(SHAPES)))
    assert len(set(seeds)) == len(seeds) == 16


def test_the_same_seed_does_the_same(tmp_path):
    steps = []
    for _ in range(2):
        soak = Soak(Plan(seed=9, examples=6, steps=10), tmp_path / "fault.journal")
        soak.run()
        steps.append(soak.tally.num_steps)
    assert steps[0] == steps[1]


@pytest.mark.parametrize("name", ["free_keeps_a_block", "an_uncommitted_block_is_hit"])
def test_a_planted_fault_is_found_shrunk_and_kept_as_a_journal(name, tmp_path, monkeypatch):
    path = tmp_path / "fault.journal"
    with monkeypatch.context() as planted:
        FAULTS[name](planted)
        soak = Soak(Plan(seed=ALL_USUAL, examples=20 * ROUND_EXAMPLES, steps=40), path)
        fault = soak.run()
        assert fault is not None
        told = report(path, policies=ODD_POLICIES)
    assert soak.tally.is_shrinking
    rules = re.findall(r"^state\.(\w+)\(.+\)$", fault.steps, re.MULTILINE)
    assert 2 <= len(rules) <= 12, fault.steps
    assert fault.error in (tmp_path / "fault.journal.steps").read_text()
    assert 0 < told["num_calls"] <= fault.num_calls == path.read_bytes().count(b"\n") - 1 <= 60
    assert told["never_returned"] is False


def test_the_journal_of_what_the_books_show_ends_with_the_call_that_breaks_them(tmp_path, monkeypatch):
    path = tmp_path / "fault.journal"
    with monkeypatch.context() as planted:
        FAULTS["free_keeps_a_block"](planted)
        fault = Soak(Plan(seed=ALL_USUAL, examples=20 * ROUND_EXAMPLES, steps=40), path).run()
        replay(path, stop_at=fault.num_calls - 1, policies=ODD_POLICIES).manager.check()
        told = report(path, policies=ODD_POLICIES)
        assert "free(" in told["last_calls"][-1]
        assert told["problem"] in fault.error
    assert report(path, policies=ODD_POLICIES)["problem"] is None


def test_what_raises_in_a_call_is_a_fault_and_the_last_of_its_journal(tmp_path, monkeypatch):
    path = tmp_path / "fault.journal"

    def rewind(manager, *arguments):
        raise IndexError("planted")

    monkeypatch.setattr(KVCacheManager, "rewind", rewind)
    fault = Soak(Plan(seed=ALL_USUAL, examples=20 * ROUND_EXAMPLES, steps=40), path).run()
    assert fault.error == "IndexError: planted"
    told = report(path, policies=ODD_POLICIES)
    assert (told["problem"], told["raised"]) == (None, {"IndexError": 1})
    assert "rewind(" in told["last_calls"][-1]


def test_tails_are_as_before_after_a_soak(tmp_path):
    before = rows.MIN_TAIL_TOKENS
    Soak(Plan(seed=SHAPES.index("short tails"), examples=1, steps=2), tmp_path / "fault.journal").run()
    assert before == rows.MIN_TAIL_TOKENS


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"minutes": 0},
        {"minutes": float("nan")},
        {"minutes": float("inf")},
        {"examples": -1},
        {"examples": 1, "steps": 0},
        {"examples": 1, "kinds": ["none"]},
        {"examples": 1, "kinds": []},
        {"examples": 1, "policies": []},
        {"examples": 1, "block_sizes": [0]},
        {"examples": 1, "block_sizes": []},
    ],
)
def test_a_plan_that_runs_nothing_or_never_ends_is_refused(wrong):
    with pytest.raises(ArgumentError):
        Plan(seed=1, **wrong)
