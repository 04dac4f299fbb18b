"""What was wrong with the lines of a trace: counted by reason, the first of them with file and line."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from kvist.errors import TraceError

__all__ = ["OnError", "Problems"]

OnError = Literal["skip", "fatal"]
MAX_SHOWN = 20


@dataclass(slots=True)
class Problems:
    """The malformed lines of one pass over a trace.

    >>> problems = Problems(on_error="skip")
    >>> problems.add("day.jsonl", 7, "no hash_ids", "got timestamp, input_length")
    >>> problems.num_skipped, dict(problems.counts), problems.first
    (1, {'no hash_ids': 1}, ['day.jsonl:7: no hash_ids: got timestamp, input_length'])
    """

    on_error: OnError = "fatal"
    counts: Counter[str] = field(default_factory=Counter)
    first: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is worth telling although no line was skipped, such as that the trace was sorted, and how."""

    @property
    def num_skipped(self) -> int:
        """Lines (or requests) that were left out."""
        return self.counts.total()

    def add(self, file: str, line: int, reason: str, detail: str = "") -> None:
        """Count a line that cannot be used; raises TraceError where such lines are fatal.

        Lines are counted by `reason`, which is the same for all lines with the same fault; `detail` is of this line.
        """
        error = TraceError(f"{reason}: {detail}" if detail else reason, file=file, line=line)
        if self.on_error == "fatal":
            raise error
        self.counts[reason] += 1
        if len(self.first) < MAX_SHOWN:
            self.first.append(str(error))

    def note(self, told: str) -> None:
        """Keep a remark, once."""
        if told not in self.notes:
            self.notes.append(told)
