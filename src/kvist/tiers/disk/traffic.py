"""Performs what a put or a get has planned, without a lock: what fails is counted, and nothing is raised."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

from kvist.tiers.counting import Counts
from kvist.tiers.disk.runs import Buffered, Piece, Run, runs
from kvist.tiers.disk.sharing import SHARED_BYTES, Helper

__all__ = ["Traffic"]

NUM_RUNS_AHEAD = 8
"""What the system is to read while what came before is copied and checked. It foresees runs that follow each other, and
a get then takes two thirds of the processor time that it takes with asking; so only the others are asked for."""

NUM_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

UNLIMITED_BYTES = 1 << 62


class Traffic:
    """Writes and reads the pieces of one call; results are sets of their places, to which is added as it goes on."""

    def __init__(self, io: Buffered, counts: Counts) -> None:
        self._io, self._counts, self._helper = io, counts, Helper()

    def close(self) -> None:
        """End the thread that helps."""
        self._helper.close()

    def write(self, pieces: Sequence[Piece], stamps: Sequence[int], said: dict[int, bytes], failed: set[int]) -> None:
        """Write contents until something fails, and prepare what is then to be said of each, by its place."""

        def write(run: Run) -> None:
            if failed:
                return
            try:
                self._io.write(run)
            except OSError:
                self._counts.add(num_errors=1)
                failed.update([piece.place for piece in run.pieces])
            else:
                sealed = run.segment.sealed
                said.update({piece.place: sealed(piece.entry, stamps[piece.place]) for piece in run.pieces})

        self._work_off(runs(pieces, self._io.part_bytes), write)

    def record(self, pieces: Sequence[Piece], said: Mapping[int, bytes], failed: set[int]) -> set[int]:
        """Say on disk what is in the slots, until that fails; returns the places of which it was said."""
        recorded: set[int] = set()
        for run in runs(pieces, UNLIMITED_BYTES):
            places = [piece.place for piece in run.pieces]
            try:
                run.segment.write_records(run.first, [said[place] for place in places])
            except OSError:
                self._counts.add(num_errors=1)
                failed.update(places)
                break
            recorded.update(places)
        return recorded

    def read(self, pieces: Sequence[Piece], whole: set[int], bad: set[int]) -> None:
        """Read contents, and tell those that are what was put from those that are not."""
        all_runs = runs(pieces, self._io.part_bytes)
        unforeseen = deque(run for last, run in pairwise(all_runs) if not run.follows(last))
        for _ in range(min(NUM_RUNS_AHEAD, len(unforeseen))):
            self._io.expect(unforeseen.popleft())

        def read(run: Run) -> None:
            self._read_run(run, whole, bad)

        self._work_off(all_runs, read)

    def _read_run(self, run: Run, whole: set[int], bad: set[int]) -> None:
        try:
            answers = self._io.read(run)
        except OSError:
            self._read_singly(run, whole, bad)
            return
        if False not in answers:
            whole.update([piece.place for piece in run.pieces])
            return
        for piece, is_whole in zip(run.pieces, answers, strict=True):
            (whole if is_whole else bad).add(piece.place)
        self._counts.add(num_corrupt=answers.count(False))

    def _read_singly(self, run: Run, whole: set[int], bad: set[int]) -> None:
        """Read the blocks one by one, of which one at least cannot be read."""
        if run.num_slots == 1:
            self._counts.add(num_errors=1)
            bad.add(run.pieces[0].place)
            return
        for single in run.singly():
            self._read_run(single, whole, bad)

    def _work_off(self, all_runs: Sequence[Run], work: Callable[[Run], None]) -> None:
        """Work in two threads where there is much to do, else in this one."""
        if NUM_CORES > 1 and sum([run.num_bytes for run in all_runs]) >= SHARED_BYTES:
            self._helper.work_off(*_halves(all_runs), work)
            return
        for run in all_runs:
            work(run)


def _halves(all_runs: Sequence[Run]) -> tuple[deque[Run], deque[Run]]:
    """Cut runs in two where a segment ends, near the middle: one segment is best read by both from its beginning on."""
    ends = list(accumulate(run.num_bytes for run in all_runs))
    cuts = [nth for nth, (last, run) in enumerate(pairwise(all_runs), 1) if run.segment is not last.segment]
    middle = ends[-1] // 2 if ends else 0
    cut = min(cuts, key=lambda nth: abs(ends[nth - 1] - middle), default=len(all_runs))
    return deque(all_runs[:cut]), deque(all_runs[cut:])
