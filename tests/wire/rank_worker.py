"""One rank of a job, for the tests of gathering: `rank_worker.py mpi|torch FOLDER SCENARIO...`.

Each rank writes what it saw and how it ended to a file of its own in the folder, as JSON: a launcher's standard output
may end with the first rank that does.
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

from kvist.errors import TransferError
from kvist.wire.gather import Gather

NUM_EVENTS = 20_000
KILLED_RANK = 2
TIME_LIMIT_S = 3.0


def main(kind, folder, *scenarios):
    transport_of, rank, leave = {"mpi": over_mpi, "torch": over_torch}[kind]()
    told = {}
    for scenario in scenarios:
        seen = told[scenario] = {}
        try:
            SCENARIOS[scenario](transport_of(), seen)
        except TransferError as error:
            seen["error"] = str(error)
        seen["left_s"] = time.monotonic()
    path = Path(folder) / f"rank {rank}.json"
    path.with_suffix(".part").write_text(json.dumps(told), encoding="utf-8")
    path.with_suffix(".part").rename(path)
    if any("error" in seen for seen in told.values()):
        os._exit(3)  # who has lost a rank cannot finalise
    leave()


def over_mpi():
    import mpi4py

    mpi4py.rc.thread_level = os.environ.get("THREAD_LEVEL", "multiple")
    from mpi4py import MPI

    from kvist.wire.gather_mpi import MpiTransport

    return lambda: MpiTransport(MPI.COMM_WORLD), MPI.COMM_WORLD.Get_rank(), lambda: None


def over_torch():
    import torch.distributed as dist

    from kvist.wire.gather_torch import TorchTransport

    dist.init_process_group("gloo")
    return lambda: TorchTransport(2 * TIME_LIMIT_S), dist.get_rank(), dist.destroy_process_group


def events_of(rank):
    return [b"event %d of rank %d" % (number, rank) for number in range(NUM_EVENTS)]


def gather_all(transport, told, **options):
    """All ranks offer their events in pieces; rank 0 takes them as they come, and stops when it has all."""
    gather = Gather(transport, period_s=0.01, timeout_s=30.0, **options)
    events = events_of(transport.rank)
    gathered = []
    for start in range(0, NUM_EVENTS, 500):
        gather.offer(events[start : start + 500])
        gathered += gather.poll() if transport.rank == 0 else []
    while transport.rank == 0 and len(gathered) < NUM_EVENTS * transport.size:
        gathered += gather.poll(1.0)
    while transport.rank and not gather.is_stopped:
        gather.advance()
        time.sleep(0.001)
    gather.close()
    told["num_lost"] = gather.num_lost
    if transport.rank == 0:
        by_rank = {rank: [event for origin, event in gathered if origin == rank] for rank in range(transport.size)}
        told["num_gathered"] = {rank: len(own) for rank, own in by_rank.items()}
        told["in_order"] = all(own == events_of(rank) for rank, own in by_rank.items())


def bounded(transport, told):
    """Events are offered faster than they may be kept; nobody takes them before the end."""
    gather = Gather(transport, period_s=0.01, max_events=1000, timeout_s=30.0)
    gather.offer(events_of(transport.rank))
    if transport.rank:
        gather.close()
        return
    gathered = []
    while events := gather.poll(None):
        gathered += events
    gather.close()
    told["num_gathered"] = {rank: sum(origin == rank for origin, _ in gathered) for rank in range(transport.size)}
    told["num_lost"] = gather.num_lost


def stop_early(transport, told):
    """Rank 1 stops at once, the others would go on for ever."""
    gather = Gather(transport, period_s=0.01, timeout_s=30.0)
    gather.offer(events_of(transport.rank)[:100])
    if transport.rank == 1:
        gather.close()
        return
    gathered = []
    while not gather.is_stopped:
        gathered += gather.poll(0.05) if transport.rank == 0 else []
        time.sleep(0 if transport.rank == 0 else 0.005)
    gathered += gather.poll() if transport.rank == 0 else []
    gather.close()
    told["num_gathered"] = {rank: sum(origin == rank for origin, _ in gathered) for rank in range(transport.size)}


def lose_one(transport, told):
    """One rank is killed in the middle; the others find out, within their time limit."""
    gather = Gather(transport, period_s=0.01, timeout_s=TIME_LIMIT_S)
    gather.offer(events_of(transport.rank)[:100])
    if transport.rank == 0:
        num_gathered = 0
        while num_gathered < 100 * transport.size:
            num_gathered += len(gather.poll(None))
        told["num_gathered"] = num_gathered
    told["heard_all_s"] = time.monotonic()
    transport.all_gather(b"", 30.0)
    if transport.rank == KILLED_RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while not gather.is_stopped:
            gather.offer([b"more"])
            time.sleep(0.005)
    finally:
        with contextlib.suppress(TransferError):
            gather.close()
    raise TransferError(str(gather.error))


def gather_without_threads(transport, told):
    """The same as `gather_all`, in the one thread that may call MPI."""
    told["unfit"] = transport.unfit_for_threads
    gather_all(transport, told, threaded=False)


def all_gather(transport, told):
    """Messages of different lengths, empty ones too."""
    for round_ in range(20):
        parts = transport.all_gather(bytes([transport.rank]) * (transport.rank * round_), 30.0)
        assert parts == [bytes([rank]) * (rank * round_) for rank in range(transport.size)]
    told["is_equal"] = transport.all_gather(b"", 30.0) == [b""] * transport.size


SCENARIOS = {
    "gather_all": gather_all,
    "bounded": bounded,
    "stop_early": stop_early,
    "lose_one": lose_one,
    "gather_without_threads": gather_without_threads,
    "all_gather": all_gather,
}

if __name__ == "__main__":
    main(*sys.argv[1:])
