"""Performs what a put or a get has planned, without a lock: what fails is counted, and nothing is raised."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, pairwise

from kvist.tiers.counting import Counts
from kvist.tiers.disk.runs import Buffered, Piece, Run, runs

__all__ = ["Traffic"]

NUM_RUNS_AHEAD = 8
"""What the system is to read while what came before is copied and checked. It foresees runs that follow each other, and
a get then takes two thirds of the processor time that it takes with asking; so only the others are asked for."""


class Traffic:
    """Writes and reads the pieces of one call; results are sets of their places, to which is added as it goes on."""

    def __init__(self, io: Buffered, counts: Counts) -> None:
        self._io, self._counts = io, counts

    def write(self, pieces: Sequence[Piece], written: set[int], failed: set[int]) -> None:
        """Write contents until something fails."""
        for run in runs(pieces, self._io.run_bytes):
            places = {piece.place for piece in run.pieces}
            try:
                self._io.write(run)
            except OSError:
                self._counts.add(num_errors=1)
                failed |= places
                return
            written |= places

    def record(self, pieces: Sequence[Piece], stamps: Sequence[int], failed: set[int]) -> set[int]:
        """Say on disk what is in the slots, until that fails; returns the places of which it was said."""
        recorded: set[int] = set()
        for run in runs(pieces, self._io.run_bytes):
            places = [piece.place for piece in run.pieces]
            try:
                run.segment.write_records([piece.entry for piece in run.pieces], [stamps[place] for place in places])
            except OSError:
                self._counts.add(num_errors=1)
                failed.update(places)
                break
            recorded.update(places)
        return recorded

    def read(self, pieces: Sequence[Piece], whole: set[int], bad: set[int]) -> None:
        """Read contents, and tell those that are what was put from those that are not."""
        all_runs = runs(pieces, self._io.run_bytes)
        unforeseen = [run for last, run in pairwise(all_runs) if not run.follows(last)]
        ahead = iter(unforeseen)
        for run in islice(ahead, NUM_RUNS_AHEAD):
            self._io.expect(run)
        for nth, run in enumerate(all_runs):
            if nth and not run.follows(all_runs[nth - 1]) and (later := next(ahead, None)) is not None:
                self._io.expect(later)
            self._read_run(run, whole, bad)

    def _read_run(self, run: Run, whole: set[int], bad: set[int]) -> None:
        try:
            answers = self._io.read(run)
        except OSError:
            self._read_singly(run, whole, bad)
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
