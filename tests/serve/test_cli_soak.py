"""`kvist soak`: its exit statuses, its words, and the journal that it leaves."""

import json

import pytest
from tests.core.test_planted_faults import FAULTS
from typer.testing import CliRunner

from kvist.cli import app
from kvist.cli_soak import progress
from kvist.testing.soak import Plan, Soak, Tally


def invoke(*arguments):
    return CliRunner().invoke(app, ["soak", *map(str, arguments)])


def test_a_clean_soak_says_its_seed_and_what_it_did():
    result = invoke("--examples", 3, "--steps", 5, "--seed", 7, "--policy", "lfu", "--kinds", "full, ring")
    assert result.exit_code == 0, result.output
    assert "seed 7: nothing wrong" in result.stdout
    assert result.stderr == "kvist: seed 7\n"


def test_a_seed_that_is_not_given_is_told():
    told = json.loads(invoke("--examples", 2, "--steps", 3, "--block-size", 4, "--json").stdout)
    assert told["fault"] is None
    assert 0 <= told["seed"] < 2**32


def test_a_fault_is_exit_status_1_and_its_journal_is_replayed(tmp_path, monkeypatch):
    path = tmp_path / "found.journal"
    FAULTS["free_keeps_a_block"](monkeypatch)
    result = invoke("--examples", 400, "--seed", 4, "--steps", 40, "--no-shrink", "--journal", path)
    assert result.exit_code == 1, result.output
    assert f"journal: {path}" in result.stdout
    assert "state.start(" in result.stdout
    replayed = CliRunner().invoke(app, ["replay", str(path), "--json"])
    assert replayed.exit_code == 1, replayed.output
    assert json.loads(replayed.stdout)["problem"]


def test_ctrl_c_is_exit_status_130_and_says_how_far_it_came(monkeypatch):
    def stepped(soak):
        soak.tally.num_steps += 1
        if soak.tally.num_steps == 12:
            raise KeyboardInterrupt

    monkeypatch.setattr(Soak, "stepped", stepped)
    result = invoke("--minutes", 5, "--json")
    assert result.exit_code == 130
    told = json.loads(result.stdout)
    assert (told["interrupted"], told["steps"], told["fault"]) == (True, 12, None)


@pytest.mark.parametrize(
    "wrong",
    [
        ["--policy", "best"],
        ["--kinds", "full,none"],
        ["--kinds", ""],
        ["--minutes", "0"],
        ["--minutes", "nan"],
        ["--examples", "0"],
        ["--steps", "0"],
        ["--block-size", "0"],
        ["--journal", "no/such/folder/x"],
    ],
)
def test_wrong_arguments_are_exit_status_2(wrong):
    result = invoke(*wrong)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_the_line_of_progress_says_rate_counts_seed_and_time_left():
    tally = Tally(seed=5, num_examples=1200, num_steps=9000, elapsed_s=45.0)
    line = progress(Plan(seed=4, minutes=2), [tally])
    assert line == "1,200 examples, 9,000 steps, 200 steps/s, seed 5, 1:15 left"
    assert progress(Plan(seed=4, examples=2000), [tally]).endswith("800 examples left")
    tally.is_shrinking = True
    assert progress(Plan(seed=4, minutes=2), [tally]).endswith("a fault was found: shrinking it")
    assert progress(Plan(seed=4, minutes=2), []) == "starting"
