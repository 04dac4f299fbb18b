"""Many configurations side by side, what is kept on Ctrl-C, and results as tables and files."""

import csv
import doctest
import json
import math
import signal
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tests.lab.forests import forest, hashed

from kvist import AttentionSpec, CacheConfig, HostTier, KVCacheManager
from kvist.errors import ArgumentError, ConfigError
from kvist.lab.replay import (
    CostModel,
    Progress,
    ReplayConfig,
    ReplayInterrupted,
    SlowTier,
    StepTime,
    StepTimer,
    compare,
    curves_of,
    grid,
    replay,
    table,
    write_results,
)
from kvist.lab.replay.running import _interrupts_held
from kvist.serve.scheduler import Request as Served
from kvist.serve.scheduler import Scheduler

BASE = ReplayConfig(num_blocks=20, block_size=4, layers=[AttentionSpec(1, 8)])


def plain(results):
    return [replace(result, wall_s=0.0) for result in results]


def mooncake_file(folder, prompts):
    path = folder / "trace.jsonl"
    lines = [
        {"timestamp": 1000 * at, "input_length": 512 * len(ids), "output_length": 3, "hash_ids": ids}
        for at, ids in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def newest_first(extent):
    return -extent.created


# -- side by side -----------------------------------------------------------------------------------------------------


def test_processes_find_what_one_does_in_the_order_of_the_configurations(tmp_path):
    path = mooncake_file(tmp_path, forest(1, num_requests=50))
    configs = grid(replace(BASE, block_size=None), num_blocks=[10, 30], policy=["lru", newest_first])
    told = []
    together = compare(path, configs, processes=2, progress=told.append)
    assert plain(together) == plain(compare(path, configs, processes=1))
    assert [result.name for result in together] == [config.label for config in configs]
    assert told[-1].num_requests == told[-1].num_total == 200
    assert (told[-1].num_done, told[-1].num_configs, told[-1].left_s) == (4, 4, 0.0)


def test_what_fails_in_a_process_is_raised_here(tmp_path):
    path = mooncake_file(tmp_path, forest(1, num_requests=4))
    with path.open("a") as file:
        file.write("no JSON\n")
    with pytest.raises(Exception, match=r"trace\.jsonl:5"):
        compare(path, [BASE, BASE], processes=2)


def test_settings_are_checked_before_anything_runs():
    told = []
    with pytest.raises(ConfigError, match="policy"):
        compare(hashed([1]), [BASE, replace(BASE, policy="newest")], processes=1, progress=told.append)
    assert told == []
    with pytest.raises(ArgumentError, match="processes is 0"):
        compare(hashed([1]), [BASE], processes=0)
    assert compare(hashed([1]), []) == []


def interrupt(_):
    raise KeyboardInterrupt


def test_an_interrupted_replay_has_what_it_did(monkeypatch):
    monkeypatch.setattr("kvist.lab.replay.running.TELL_EVERY_S", 0.0)
    with pytest.raises(ReplayInterrupted) as caught:
        replay(hashed(*forest(1, num_requests=50)), BASE, progress=interrupt)
    (result,) = caught.value.results
    assert not result.is_complete
    assert 1 <= result.num_requests < 50
    assert isinstance(caught.value, KeyboardInterrupt)


def test_of_interrupted_replays_those_that_are_done_are_kept(monkeypatch):
    monkeypatch.setattr("kvist.lab.replay.running.TELL_EVERY_S", 0.0)

    def stop_in_the_second(progress):
        if progress.num_done == 1 and progress.num_requests > progress.num_total // 3 + 10:
            raise KeyboardInterrupt

    with pytest.raises(ReplayInterrupted) as caught:
        configs = grid(BASE, num_blocks=[10, 20, 30])
        compare(hashed(*forest(1, num_requests=50)), configs, processes=1, progress=stop_in_the_second)
    assert [result.is_complete for result in caught.value.results] == [True, False]
    assert [result.config["num_blocks"] for result in caught.value.results] == [10, 20]


def test_interrupted_processes_stop_and_what_is_done_is_kept(tmp_path):
    requests = hashed(*forest(1, num_requests=2_000, fan_out=5))
    configs = grid(BASE, num_blocks=[10, 20, 30, 40, 50, 60, 70, 80])

    def stop(progress):
        if progress.num_done:
            raise KeyboardInterrupt

    with pytest.raises(ReplayInterrupted) as caught:
        compare(requests, configs, processes=2, progress=stop)
    results = caught.value.results
    assert any(result.is_complete for result in results)
    assert len(results) < len(configs)


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="signals cannot be held here")
def test_ctrl_c_while_processes_begin_waits_and_never_reaches_them():
    show = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    begun = []
    with pytest.raises(KeyboardInterrupt), _interrupts_held():
        signal.raise_signal(signal.SIGINT)
        begun.append(subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True).stdout)
    assert begun == ["True\n"]


def test_progress_tells_the_rate_and_the_time_left():
    progress = Progress(250, 1_000, 1, 4, elapsed_s=2.0)
    assert (progress.requests_per_s, progress.left_s) == (125.0, 6.0)
    assert Progress(0, 1_000, 0, 4, elapsed_s=0.0).left_s is None
    assert Progress(5, None, 0, 1, elapsed_s=1.0).left_s is None


# -- results ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def results():
    requests = [*hashed(*forest(2, num_requests=40)), *hashed(*forest(2, num_requests=40), namespace=("a",))]
    tiers = [HostTier(num_blocks=10), SlowTier(num_blocks=500)]
    return [replay(requests, config) for config in grid(BASE, num_blocks=[12, 24], tiers=[(), tiers])]


def test_results_are_plain_values(results):
    assert [json.loads(json.dumps(result.as_dict())) for result in results] == [each.as_dict() for each in results]


def test_results_are_written_whole_as_json(results, tmp_path):
    write_results(results, tmp_path / "results.json")
    assert json.loads((tmp_path / "results.json").read_text()) == [result.as_dict() for result in results]


def test_results_are_rows_of_a_csv_file(results, tmp_path):
    write_results(results, tmp_path / "results.csv")
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["hit_rate_blocks"]) for row in rows] == [result.hit_rate_blocks for result in results]
    assert [row["config.num_blocks"] for row in rows] == ["12", "12", "24", "24"]
    assert [row["hit_tokens_by_tier.host"] == "" for row in rows] == [True, False, True, False]
    assert int(rows[0]["by_namespace.a.prompt_tokens"]) == results[0].by_namespace["a"]["prompt_tokens"]


def test_results_are_rows_of_a_parquet_file(results, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    write_results(results, tmp_path / "results.parquet")
    rows = parquet.read_table(tmp_path / "results.parquet").to_pylist()
    assert [row["num_hit_blocks"] for row in rows] == [result.num_hit_blocks for result in results]
    assert rows[0]["hit_tokens_by_tier.host"] is None
    assert json.loads(rows[1]["config.tiers"])[1]["name"] == "disk"


def test_a_file_of_another_kind_is_refused(results, tmp_path):
    with pytest.raises(ArgumentError, match="json, csv, parquet, not as 'xls'"):
        write_results(results, tmp_path / "results.xls")
    write_results([], tmp_path / "none.csv")
    assert (tmp_path / "none.csv").read_text() == "name\n"


def test_results_are_shown_side_by_side(results):
    console = Console(width=200, record=True, file=StringIO())
    console.print(table(results))
    text = console.export_text()
    for result in results:
        assert f"{result.hit_rate_blocks:.3f}" in text
    assert all(word in text for word in ("from host", "from disk", "TTFT p50", "priority 24 blocks of 4 + host + disk"))


def test_results_over_sizes_are_a_curve_for_each_policy_and_its_tiers(results):
    bare, tiered = curves_of(results)
    assert (bare.name, tiered.name) == ("priority blocks of 4", "priority blocks of 4 + host + disk")
    assert bare.num_blocks.tolist() == tiered.num_blocks.tolist() == [12, 24]
    assert bare.hit_rate.tolist() == [results[0].hit_rate_blocks, results[2].hit_rate_blocks]


# -- costs ------------------------------------------------------------------------------------------------------------


def test_a_cost_model_is_fitted_to_measured_steps():
    true = CostModel(prefill_tokens_per_s=2_000, step_s=0.02, decode_s=0.003)
    steps = [StepTime(p, d, true.seconds(p, d)) for p in (0, 64, 512) for d in (0, 1, 16) if p + d]
    fitted = CostModel(host_latency_s=7.0).fitted(steps)
    assert (fitted.prefill_tokens_per_s, fitted.step_s, fitted.decode_s) == pytest.approx((2_000, 0.02, 0.003))
    assert fitted.host_latency_s == 7.0


def test_a_fitted_cost_is_never_negative():
    rng = np.random.default_rng(1)
    steps = [StepTime(n, 1, n / 500 * float(rng.uniform(0.9, 1.1))) for n in range(1, 200)]
    fitted = CostModel().fitted(steps)
    assert fitted.step_s >= 0
    assert fitted.decode_s >= 0
    assert math.isclose(fitted.prefill_tokens_per_s, 500, rel_tol=0.1)


def test_steps_that_tell_too_little_are_refused():
    with pytest.raises(ArgumentError, match="2 measured steps tell too little"):
        CostModel().fitted([StepTime(1, 0, 1.0)] * 2)
    with pytest.raises(ArgumentError, match="3 measured steps tell too little"):
        CostModel().fitted([StepTime(0, 1, 1.0)] * 3)
    with pytest.raises(ArgumentError, match="do not take longer"):
        CostModel().fitted([StepTime(n, 0, 1.0 / n) for n in range(1, 9)])


def test_the_steps_of_a_scheduler_are_timed_and_it_is_left_as_it_was():
    manager = KVCacheManager(CacheConfig([AttentionSpec(1, 8)], block_size=4, num_blocks=32, max_sequence_length=64))
    scheduler = Scheduler(manager, max_running=2, max_step_tokens=6)
    ticks = iter(range(100))
    for prompt in ([1, 2, 3, 4, 5, 6, 7, 8], [9, 10]):
        scheduler.submit(Served(prompt, 3))
    with StepTimer(scheduler, clock=lambda: float(next(ticks))) as timer:
        while scheduler.has_work:
            chunks = scheduler.plan()
            scheduler.complete(chunks, [50] * sum(chunk.is_last for chunk in chunks))
    assert [(step.num_prefill_tokens, step.num_decoding) for step in timer.steps] == [(6, 0), (4, 0), (0, 2), (0, 2)]
    assert {step.seconds for step in timer.steps} == {1.0}
    assert vars(scheduler).keys().isdisjoint({"plan", "complete"})


def test_the_page_on_replays_says_what_is_true():
    page = Path(__file__).parents[2] / "docs" / "replay.md"
    outcome = doctest.testfile(str(page), module_relative=False)
    assert outcome.attempted > 15
    assert outcome.failed == 0
