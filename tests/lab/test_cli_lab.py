"""`kvist lab`: data on stdout, notes on stderr, and a line for what is wrong."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import transformers
from tests.lab.trace_files import mooncake, word_tokenizer, written
from tests.serve.models import tiny_model
from typer.testing import CliRunner

from kvist import cli_lab, cli_replays
from kvist.cli import app
from kvist.lab.curves import knee, lru_curve, references_of
from kvist.lab.traces import FileTrace, open_trace

COMMANDS = ("curve", "replay", "compare", "report", "make", "record")


def invoke(*arguments, **settings):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **settings)


def done(*arguments):
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def day(tmp_path):
    """A Mooncake trace: 60 requests of 3 blocks after 2 that all share, each asked for twice."""
    lines = [mooncake(1000 * at, [0, 1, *range(10 + 3 * (at // 2), 13 + 3 * (at // 2))]) for at in range(60)]
    return written(tmp_path / "day.jsonl", *lines)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny llama with a tokenizer of words, saved as `transformers` saves models."""
    folder = tmp_path_factory.mktemp("model")
    file = word_tokenizer(folder / "words.json")
    words = tokenizers.Tokenizer.from_file(str(file))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0").save_pretrained(folder)
    tiny_model("llama").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_examples_and_tells_its_exit_status(command):
    told = done("lab", command, "--help").stdout
    assert f"kvist lab {command}" in told
    assert "Exit status: 0 done" in told


def test_the_shell_completes_commands_and_kinds_of_options():
    environment = {**os.environ, "_KVIST_COMPLETE": "complete_bash", "COMP_WORDS": "kvist lab ", "COMP_CWORD": "2"}
    told = subprocess.run([sys.executable, "-c", "from kvist.cli import app; app(prog_name='kvist')"],
                          env=environment, capture_output=True, text=True, check=False)  # fmt: skip
    assert set(COMMANDS) <= set(told.stdout.split())
    assert "--show-completion" in done("--help").stdout


@pytest.mark.parametrize("page", ["lab.md", "report.md"])
def test_the_commands_of_a_page_name_options_that_there_are(page):
    text = (Path(__file__).parents[2] / "docs" / page).read_text(encoding="utf-8")
    commands = re.findall(r"^(?:\$ )?kvist lab (\w+) (.*)$", text, re.MULTILINE)
    assert commands
    for command, options in commands:
        known = done("lab", command, "--help").stdout
        shown = re.findall(r"--[a-z-]+", options)
        assert [option for option in shown if not re.search(rf"{option}\b", known)] == []


# -- curve ------------------------------------------------------------------------------------------------------------


def test_a_curve_has_lru_the_optimal_bound_and_the_knee(day):
    told = json.loads(done("lab", "curve", day, "--sizes", "2,5,92", "--json").stdout)
    assert (told["num_requests"], told["num_references"], told["num_unique"], told["block_size"]) == (60, 300, 92, 512)
    lru, optimal = told["curves"]
    assert (lru["name"], lru["num_blocks"], optimal["name"]) == ("lru", [2, 5, 92], "optimal")
    assert lru["hit_rate"][-1] == optimal["hit_rate"][-1] == pytest.approx(208 / 300)
    assert all(low <= high for low, high in zip(lru["hit_rate"], optimal["hit_rate"], strict=True))
    assert told["knee"] == {"num_blocks": 2, "hit_rate": pytest.approx(118 / 300)}


def test_a_curve_is_a_table_and_notes_go_to_stderr(day):
    result = done("lab", "curve", day, "--sizes", "5,92")
    assert "0.693" in result.stdout
    assert "60 requests" in result.stderr
    assert "60 requests" not in result.stdout


def test_a_sampled_curve_has_its_error_and_no_bound(day):
    told = json.loads(done("lab", "curve", day, "--sample", "0.5", "--json").stdout)
    (lru,) = told["curves"]
    at = json.loads(done("lab", "curve", day, "--sample", "0.5", "--sizes", "5,92", "--json").stdout)
    assert (at["curves"][0]["num_blocks"], at["knee"]) == ([5, 92], told["knee"])
    assert "±" in done("lab", "curve", day, "--sample", "0.5").stdout
    assert told["sampled"] == 0.5
    assert len(lru["error"]) == len(lru["hit_rate"])


def test_a_curve_is_drawn(day, tmp_path):
    done("lab", "curve", day, "--plot", tmp_path / "curve.svg")
    assert (tmp_path / "curve.svg").read_text().lstrip().startswith("<?xml")


# -- replay and compare -----------------------------------------------------------------------------------------------


def test_a_replay_of_whole_blocks_hits_what_the_curve_says(day):
    curve = json.loads(done("lab", "curve", day, "--sizes", "5,20,92", "--json").stdout)["curves"][0]
    for size, rate in zip(curve["num_blocks"], curve["hit_rate"], strict=True):
        replay = done("lab", "replay", day, "--blocks", size, "--policy", "lru", "--content", "blocks", "--json")
        (result,) = json.loads(replay.stdout)
        assert result["hit_rate_blocks"] == pytest.approx(rate)


def test_every_combination_is_compared_in_order(day):
    told = json.loads(
        done("lab", "compare", day, "--blocks", "8,100", "--policy", "lru,lfu", "--processes", 1, "--json").stdout
    )
    found = [(each["config"]["policy"], each["config"]["num_blocks"]) for each in told]
    assert found == [("lru", 8), ("lru", 100), ("lfu", 8), ("lfu", 100)]
    assert all(each["num_requests"] == 60 for each in told)


def test_replays_side_by_side_say_what_replays_in_turn_say(day):
    options = ("lab", "compare", day, "--blocks", "8,100", "--json", "--processes")
    one, other = (json.loads(done(*options, number).stdout) for number in (1, 2))
    for each in (*one, *other):
        each.pop("wall_s")
    assert one == other


def test_tiers_retention_and_a_rate_reach_the_replay(day):
    options = (
        "--host-blocks",
        50,
        "--disk-blocks",
        200,
        "--disk-rate",
        "1 GiB",
        "--retain",
        "0:1024:90",
        "--prefill-rate",
        5000,
    )
    (told,) = json.loads(done("lab", "replay", day, "--blocks", 12, *options, "--json").stdout)
    assert [tier["kind"] for tier in told["config"]["tiers"]] == ["HostTier", "SlowTier"]
    assert told["config"]["cost"]["prefill_tokens_per_s"] == 5000
    assert told["config"]["retention"]["ranges"][0][:3] == [0, 1024, 90]
    assert set(told["hit_tokens_by_tier"]) == {"device", "host", "disk"}


def test_configurations_are_named_by_what_tells_them_apart(day):
    several = ("--host-blocks", "0,30", "--concurrency", "1,4", "--retain", "none", "--retain", "0:1024:90,2048::10")
    told = json.loads(done("lab", "compare", day, "--blocks", 12, *several, "--processes", 1, "--json").stdout)
    names = [each["name"] for each in told]
    assert len(set(names)) == 8
    assert names[0] == "priority 12 blocks 1 at once retain none"
    assert names[-1] == "priority 12 blocks + host 30 4 at once retain 0:1024:90,2048::10"
    (alone,) = json.loads(done("lab", "replay", day, "--blocks", 12, "--json").stdout)
    assert alone["name"] == "priority 12 blocks"


def test_what_is_skipped_is_told_also_where_processes_of_their_own_replay(day):
    with day.open("a") as file:
        file.write("{]\n")
    result = done("lab", "compare", day, "--blocks", "8,9", "--processes", 2, "--on-error", "skip")
    assert result.stderr.count("skipped 1: 1 no JSON") == 1


def test_times_are_fitted_to_measured_steps(day, tmp_path):
    steps = [{"num_prefill_tokens": n, "num_decoding": d, "seconds": 0.01 + n / 2000 + d / 1000}
             for n, d in ((0, 1), (100, 0), (0, 9), (50, 2))]  # fmt: skip
    fit = written(tmp_path / "steps.jsonl", *steps)
    (told,) = json.loads(done("lab", "replay", day, "--blocks", 12, "--fit", fit, "--json").stdout)
    assert told["config"]["cost"]["prefill_tokens_per_s"] == pytest.approx(2000)


@pytest.mark.parametrize("ending", ["json", "csv", "parquet"])
def test_results_are_written_as_asked(day, tmp_path, ending):
    out = tmp_path / f"results.{ending}"
    result = done("lab", "compare", day, "--blocks", "8,100", "--processes", 1, "--out", out)
    assert "priority 100 blocks" in result.stdout
    assert len(read_results(out)) == 2


def read_results(out):
    if out.suffix == ".json":
        return json.loads(out.read_text())
    if out.suffix == ".csv":
        with out.open() as file:
            return list(csv.DictReader(file))
    from pyarrow import parquet

    return parquet.read_table(out).to_pylist()


def test_ctrl_c_keeps_what_is_done_and_exits_with_status_130(tmp_path):
    trace = tmp_path / "long.jsonl"
    done("lab", "make", "mixed", "--requests", 3000, "--block-size", 16, "--out", trace)
    out = tmp_path / "results.json"
    command = ["compare", trace, "--blocks", "2000,4000,6000,8000", "--processes", 1, "--json", "--out", out]
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, "lab", *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    assert "interrupted with 1 of 4 results" in stderr
    (told,) = json.loads(stdout)
    assert not told["is_complete"]
    assert json.loads(out.read_text()) == [told]


INTERRUPTIBLE = """
import sys
from kvist.lab.replay import running
whole = running.Serving.run
def run(self, trace):
    for index, step in enumerate(whole(self, trace)):
        if index == 1:
            print("begun", file=sys.stderr, flush=True)
        yield step
running.Serving.run = run
from kvist.cli import app
app(sys.argv[1:])
"""


# -- report -----------------------------------------------------------------------------------------------------------


def test_a_report_is_one_page_that_names_the_trace_and_needs_no_network(day, tmp_path):
    result = done("lab", "report", day, "--out", tmp_path / "report.html", "--processes", 1)
    page = (tmp_path / "report.html").read_text()
    assert "day.jsonl" in page
    assert "<script src" not in page
    assert "report.html" in result.stderr


# -- make -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["mooncake", "tokens"])
def test_a_workload_is_made_the_same_for_a_seed(tmp_path, form):
    for name in ("one", "other"):
        told = json.loads(
            done(
                "lab", "make", "chat", "--requests", 50, "--seed", 3, "--form", form, "-o", tmp_path / name, "--json"
            ).stdout
        )
        assert told["num_requests"] == 50
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    assert open_trace(tmp_path / "one").kind == form


def test_another_trace_is_brought_into_mooncakes_form(tmp_path):
    path = written(tmp_path / "t.jsonl", {"tokens": list(range(20))}, {"tokens": [*range(16), 99]})
    result = done("lab", "make", "--from", path, "-o", tmp_path / "m.jsonl.gz", "--block-size", 8)
    one, other = open_trace(tmp_path / "m.jsonl.gz")
    assert one.prompt.hash_ids.tolist() == [0, 1, 2]
    assert other.prompt.hash_ids.tolist() == [0, 1, 3]
    assert "2 requests" in result.stderr
    assert not result.stdout


def test_a_file_that_is_read_can_be_written_over_and_stays_if_it_cannot_be_read(tmp_path):
    path = written(tmp_path / "t.jsonl", {"tokens": [1, 2]}, {"tokens": [3]})
    done("lab", "make", "--from", path, "-o", path, "--block-size", 1)
    assert open_trace(path).kind == "mooncake"
    kept = written(tmp_path / "u.jsonl", {"tokens": [1, 2]}, "{]").read_bytes()
    assert invoke("lab", "make", "--from", tmp_path / "u.jsonl", "-o", tmp_path / "u.jsonl").exit_code == 1
    assert (tmp_path / "u.jsonl").read_bytes() == kept
    assert sorted(each.name for each in tmp_path.iterdir()) == ["t.jsonl", "u.jsonl"]


# -- record -----------------------------------------------------------------------------------------------------------


def test_prompts_that_run_are_recorded_with_the_times_of_steps(model, tmp_path):
    prompts = written(tmp_path / "prompts.txt", "w1 w2 w3 w4 w5 w6 w7 w8 w9", "w1 w2 w3 w4 w5 w6 w7 w8 w20 w21")
    options = ("--block-size", 4, "--max-tokens", 3, "--steps", tmp_path / "steps.jsonl")
    told = json.loads(
        done("lab", "record", "--model", model, "--prompts", prompts, *options, "-o", tmp_path / "day", "--json").stdout
    )
    assert told["num_requests"] == 2
    one, other = open_trace(tmp_path / "day")
    assert sorted((one.prompt.num_tokens, other.prompt.num_tokens)) == [9, 10]
    assert (one.prompt.hash_ids[:2] == other.prompt.hash_ids[:2]).all()
    assert 1 <= one.num_output_tokens <= 3
    replay = invoke("lab", "replay", tmp_path / "day", "--blocks", 16, "--fit", tmp_path / "steps.jsonl", "--json")
    assert replay.exit_code in (0, 2)  # a few steps may tell too little


def test_another_trace_is_recorded_without_its_text(tmp_path):
    tokenizer = word_tokenizer(tmp_path / "tokenizer.json")
    path = written(tmp_path / "t.jsonl", {"text": "w1 w2 w3"}, {"text": "w1 w2 w4"})
    done("lab", "record", "--from", path, "--tokenizer", tokenizer, "--block-size", 2, "-o", tmp_path / "day")
    one, other = open_trace(tmp_path / "day")
    assert one.prompt.hash_ids[0] == other.prompt.hash_ids[0]
    assert one.prompt.hash_ids[1] != other.prompt.hash_ids[1]


def test_a_folder_that_is_not_there_is_told(day, tmp_path):
    result = invoke("lab", "make", "chat", "-o", tmp_path / "no" / "m")
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"there is no folder {tmp_path / 'no'}\n" in result.stderr


def test_the_prefix_tree_of_a_report_begins_with_namespaces(tmp_path):
    lines = [{"tokens": list(range(40)), "namespace": ["<b>acme", number]} for number in (7, 7, 8)]
    page = tmp_path / "day.html"
    done("lab", "report", written(tmp_path / "day.jsonl", *lines), "--out", page, "--blocks", "9", "--policy", "lru")
    shown = page.read_text()
    assert "acme/7" in shown
    assert "acme/8" in shown
    assert "<b>acme" not in shown


def test_curves_are_drawn_in_steps_from_the_first_size_with_the_knee_that_is_told(tmp_path):
    asked = written(tmp_path / "day.jsonl", *(mooncake(at, [10 * (at % 9), 10 * (at % 9) + 1]) for at in range(90)))
    references = references_of(open_trace(asked))
    exact = lru_curve(references)
    drawn = cli_lab._drawn(exact, references)
    assert exact.num_blocks[0] > 9
    assert drawn.num_blocks.tolist() == list(range(1, 19))
    assert (drawn.hit_rate == exact.at(drawn.num_blocks)).all()
    assert knee(drawn) == knee(exact)


def test_of_many_namespaces_the_smallest_go_together_in_the_tree(tmp_path, monkeypatch):
    monkeypatch.setattr(cli_lab, "MAX_LABELS", 2)
    lines = [{"tokens": [number] * 20, "namespace": name} for number, name in enumerate(["a", "b", "b", "c"])]
    page = tmp_path / "day.html"
    done("lab", "report", written(tmp_path / "day.jsonl", *lines), "--out", page, "--blocks", "9", "--policy", "lru")
    assert "2 other namespaces" in page.read_text()


def test_a_trace_is_read_twice_for_a_replay_with_a_bar(day, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    num_passes, read = [], FileTrace.__iter__
    monkeypatch.setattr(FileTrace, "__iter__", lambda trace: (num_passes.append(1), read(trace))[1])
    result = done("lab", "replay", day, "--blocks", "50")
    assert "requests/s" in result.stderr
    assert len(num_passes) == 2


def test_blocks_larger_than_memory_are_refused_in_a_line(day):
    result = invoke("lab", "replay", day, "--blocks", 5, "--block-size", 2**40)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "block_size is 1099511627776, must be 1 .. 1,048,576\n" in result.stderr
    assert invoke("lab", "curve", day, "--block-size", 2**40).exit_code == 2


@pytest.mark.parametrize("command", ["replay", "compare", "report"])
@pytest.mark.parametrize(("out", "said"), [("no/out", "there is no folder no"), ("out", "it is a folder")])
def test_what_cannot_be_written_is_told_before_anything_is_replayed(day, monkeypatch, command, out, said):
    monkeypatch.chdir(day.parent)
    ending = ".html" if command == "report" else ".json"
    Path(f"out{ending}").mkdir()
    monkeypatch.setattr(cli_replays, "replayed", None)
    result = invoke("lab", command, day, "--blocks", 5, "--out", out + ending)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"kvist: {out}{ending} cannot be written: {said}\n"


# -- what is wrong ----------------------------------------------------------------------------------------------------


def test_malformed_lines_stop_a_command_or_are_skipped_and_told(day):
    with day.open("a") as file:
        file.write('{]\n{"timestamp": 60000}\n')
    stopped = invoke("lab", "curve", day)
    assert (stopped.exit_code, stopped.stdout) == (1, "")
    assert stopped.stderr.startswith(f"kvist: {day}:61: no JSON")
    assert stopped.stderr.count("\n") == 1
    skipped = done("lab", "curve", day, "--on-error", "skip", "--sizes", "92")
    assert "skipped 2: 1 no JSON, 1 no input_length" in skipped.stderr
    assert f"{day}:61: no JSON" in skipped.stderr
    assert "0.693" in skipped.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("curve",), ("replay", "--blocks", 5), ("compare", "--blocks", 5), ("report", "-o", "r.html"),
        ("make", "-o", "m", "--from"), ("record", "-o", "m", "--from"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("content", ["", "{]\n"])
def test_a_trace_without_requests_is_told_in_a_line_and_nothing_is_written(tmp_path, monkeypatch, arguments, content):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "day.jsonl").write_text(content)
    command, *options = arguments
    trace = "mooncake:day.jsonl"
    given = [*options, trace] if options[-1:] == ["--from"] else [trace, *options]
    result = invoke("lab", command, *given, "--on-error", "skip")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "kvist: day.jsonl: has no requests\n" in result.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["day.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("curve", "DAY", "--sizes", "a"), "--sizes is 'a', must be numbers"),
        (("curve", "DAY", "--sizes", "0"), "--sizes has 0, must be 1 or more"),
        (("curve", "DAY", "--sample", "1.5"), "--sample is 1.5"),
        (("curve", "DAY", "--plot", "curve.txt"), "--plot is curve.txt, must end in .png or .svg"),
        (("replay", "DAY", "--blocks", "1,2"), "these are 2 configurations"),
        (("replay", "DAY", "--blocks", "9", "--policy", "luck"), "--policy: 'luck' is not one of"),
        (("replay", "DAY", "--blocks", "9", "--retain", "5"), "--retain is '5'"),
        (("replay", "DAY", "--blocks", "9", "--retain", "0:9:900"), "900"),
        (("replay", "DAY", "--blocks", "9", "--fit", "nowhere"), "--fit: nowhere has no steps"),
        (("replay", "DAY", "--blocks", "9", "--prefill-rate", "-1"), "prefill_tokens_per_s is -1"),
        (("replay", "DAY", "--blocks", "9", "--disk-blocks", "9", "--disk-rate", "fast"), "fast"),
        (("compare", "DAY", "--blocks", "9", "--out", "r.txt"), "--out is r.txt, must end in .json"),
        (("make", "-o", "m"), "name either a workload or, with --from, a trace"),
        (("make", "dance", "-o", "m"), "there is no workload 'dance'; it is one of shared, chat"),
        (("make", "chat", "--rate", "0", "-o", "m"), "sessions_per_s is 0"),
        (("record", "-o", "m"), "give either --model and --prompts, or --from"),
        (("record", "--model", "m", "--prompts", "nowhere.txt", "-o", "m"), "--prompts: cannot read nowhere.txt"),
    ],
)
def test_wrong_arguments_are_told_in_a_line_with_status_2(day, monkeypatch, arguments, said):
    monkeypatch.chdir(day.parent)
    result = invoke("lab", *(str(day) if each == "DAY" else each for each in arguments))
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
