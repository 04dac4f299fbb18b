"""CacheMachine for long: rounds of examples until the time is up; the first fault is shrunk and kept as a journal.

A round is repeated by its seed alone, which also chooses its shape: usual tails, tails so short that they overflow, the
smallest pools, or always a host tier.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.control import current_build_context
from hypothesis.errors import FailedHealthCheck, InvalidArgument, UnsatisfiedAssumption
from hypothesis.reporting import with_reporter
from hypothesis.stateful import invariant, run_state_machine_as_test

import kvist.core.rows
from kvist.config import CacheConfig
from kvist.errors import ArgumentError
from kvist.journal import Journal
from kvist.testing.configs import ALL_KINDS, ALL_POLICIES, BLOCK_SIZES, cache_configs
from kvist.testing.machine import CacheMachine, cache_machine

__all__ = ["ROUND_EXAMPLES", "SHAPES", "Fault", "Plan", "Soak", "Tally"]

ROUND_EXAMPLES = 20
"""Examples of a round: few, so that a fault is repeated in seconds."""
ROUND_STRIDE = 2**32 + 1
"""Between the seeds of rounds: soaks with neighbouring seeds share none, and shapes take turns."""

SHAPES = ("usual", "short tails", "smallest pools", "host tier")
"""What a round is like, by its seed modulo four."""
SMALLEST_POOLS = 5


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run: until `minutes` have passed or so many `examples` are done, of `steps` rules each.

    `policies`, `block_sizes` and `kinds` are those that configurations are drawn from. Without `shrinks` the first
    failing example is kept however long it is. Raises ArgumentError for what can never end, or runs nothing.
    """

    seed: int
    minutes: float | None = None
    examples: int | None = None
    steps: int = 100
    policies: Sequence[str | Callable[[Any], Any]] = ALL_POLICIES
    block_sizes: Sequence[int] = BLOCK_SIZES
    kinds: Sequence[str] = ALL_KINDS
    shrinks: bool = True

    def __post_init__(self) -> None:
        if self.minutes is None and self.examples is None:
            raise ArgumentError("a soak ends after minutes or examples: give one of them, or both")
        limits = {"minutes": self.minutes, "examples": self.examples, "steps": self.steps}
        for name, limit in limits.items():
            if limit is not None and not 0 < limit < float("inf"):
                raise ArgumentError(f"{name} is {limit}, must be a positive number")
        if unknown := sorted(set(self.kinds) - set(ALL_KINDS)):
            raise ArgumentError(f"kinds has {', '.join(unknown)}, must be of {', '.join(ALL_KINDS)}")
        if not self.kinds or not self.policies or min(self.block_sizes, default=0) < 1:
            raise ArgumentError("kinds, policies and block sizes must not be empty, and block sizes be positive")

    def configs(self, seed: int) -> st.SearchStrategy[CacheConfig]:
        """Return the configurations of the round with this seed."""
        shape = SHAPES[seed % len(SHAPES)]
        more: dict[str, Any] = {"host": st.just(True)} if shape == "host tier" else {}
        if shape == "smallest pools":
            more["max_blocks"] = SMALLEST_POOLS
        return cache_configs(self.policies, self.block_sizes, kinds=self.kinds, **more)


@dataclass(slots=True)
class Tally:
    """How far a soak has come: `num_steps` counts rules, those of shrinking included; `seed` is that of the round."""

    seed: int
    num_examples: int = 0
    num_steps: int = 0
    num_calls: int = 0
    is_shrinking: bool = False
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Fault:
    """What was found: the error, the rules that lead to it, and the journal of the calls that they made.

    `seed` repeats the round that found it. The last of the `num_calls` calls of the journal is that which failed, or
    after which something was wrong.
    """

    seed: int
    shape: str
    error: str
    steps: str
    journal: Path
    num_calls: int
    tally: Tally = field(repr=False)


class Soak:
    """Runs rounds of CacheMachine by a plan, and tells `watch` how far it is after every rule.

    A fault's journal is written to `journal`, its printed rules beside it, as `{journal}.steps`. What `watch` raises
    ends the soak. `clock` counts seconds.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     soak = Soak(Plan(seed=7, examples=2, steps=5), f"{folder}/fault.journal")
    ...     print(soak.run(), soak.tally.num_examples)
    None 2
    """

    def __init__(
        self,
        plan: Plan,
        journal: Path | str,
        *,
        watch: Callable[[Tally], None] = lambda tally: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan, self.journal = plan, Path(journal)
        self.tally = Tally(plan.seed)
        self._watch, self._clock = watch, clock
        self._began = clock()
        self._stopped: BaseException | None = None

    def run(self) -> Fault | None:
        """Run until the plan is done, or return the first fault."""
        self._began = self._clock()
        number = 0
        while (num_examples := self._num_left()) > 0:
            if (fault := self._round(self.plan.seed + number * ROUND_STRIDE, num_examples)) is not None:
                return fault
            number += 1
        return None

    def _num_left(self) -> int:
        """Return how many examples the next round has: none when the plan is done."""
        self.tally.elapsed_s = self._clock() - self._began
        if self._is_late():
            return 0
        if self.plan.examples is None:
            return ROUND_EXAMPLES
        return min(ROUND_EXAMPLES, self.plan.examples - self.tally.num_examples)

    def _is_late(self) -> bool:
        return self.plan.minutes is not None and self.tally.elapsed_s >= 60 * self.plan.minutes

    def _round(self, seed: int, num_examples: int) -> Fault | None:
        self.tally.seed = seed
        told: list[object] = []
        machine = self._machine(seed)
        machine._hypothesis_internal_use_seed = seed  # what @seed sets, for a class
        try:
            with with_reporter(told.append), _tails(seed):
                run_state_machine_as_test(machine, settings=self._settings(num_examples))
        except (FailedHealthCheck, InvalidArgument):
            raise
        except BaseException as error:
            stopped = self._stopped or error
            if isinstance(stopped, Exception):
                return self._fault(seed, stopped, told)
            if not isinstance(stopped, _TimeIsUp):
                raise stopped from None
        return None

    def _settings(self, num_examples: int) -> settings:
        phases = [Phase.generate, Phase.shrink] if self.plan.shrinks else [Phase.generate]
        return settings(
            max_examples=num_examples,
            stateful_step_count=self.plan.steps,
            phases=phases,
            report_multiple_bugs=False,
            database=None,
            deadline=None,
            print_blob=False,
            suppress_health_check=list(HealthCheck),
        )

    def _machine(self, seed: int) -> type[CacheMachine]:
        members = {"configs": self.plan.configs(seed), "soak": self, "__doc__": CacheMachine.__doc__}
        return type("CacheMachine", (_Watched, cache_machine(self.plan.configs(seed))), members)

    def _fault(self, seed: int, error: Exception, told: list[object]) -> Fault:
        notes = map(str, [*told, *getattr(error, "__notes__", ())])
        steps = "\n".join(dict.fromkeys(notes))
        text = f"{type(error).__name__}: {error}"
        Path(f"{self.journal}.steps").write_text(f"{steps}\n\n{text}\n", encoding="utf-8")
        self.tally.elapsed_s = self._clock() - self._began
        shape = SHAPES[seed % len(SHAPES)]
        return Fault(seed, shape, text, steps, self.journal, self.tally.num_calls, self.tally)

    # -- what machines tell -------------------------------------------------------------------------------------------

    def stepped(self) -> None:
        """Count a rule, and stop here if the time is up; a fault that was found is shrunk to its end."""
        self.tally.num_steps += 1
        self.tally.elapsed_s = self._clock() - self._began
        self._watch(self.tally)
        if not self.tally.is_shrinking and self._is_late():
            raise _TimeIsUp

    def ended(self, journal: Journal | None, raised: BaseException | None) -> None:
        """Count an example that is whole, and write no more of it."""
        has_failed = isinstance(raised, Exception) and not isinstance(raised, UnsatisfiedAssumption)
        if isinstance(raised, _TimeIsUp | KeyboardInterrupt):
            self._stopped = raised  # Hypothesis may tell of it as of an example that was drawn otherwise before
        self.tally.num_examples += raised is None and not self.tally.is_shrinking
        self.tally.is_shrinking = self.tally.is_shrinking or has_failed
        if journal is not None:
            journal.cut()
            self.tally.num_calls = journal.num_calls


class _TimeIsUp(BaseException):
    """Ends a round between two steps: no Exception, so that it is no fault."""


class _Watched(CacheMachine):
    """A CacheMachine that tells a soak of each step, and writes its last run, that of a fault, down as a journal."""

    soak: Soak
    journal: Journal | None = None

    def made(self) -> None:
        """Begin the journal, where this is the run that is kept."""
        if current_build_context().is_final:
            self.journal = Journal(self.soak.journal).attach(self.manager)

    @invariant()
    def every_step_is_counted(self) -> None:
        """Tell that a rule is done."""
        self.soak.stepped()

    def teardown(self) -> None:
        """End the example, and say how it went."""
        raised = sys.exc_info()[1]
        raised = None if raised is self._outer_error else raised
        try:
            super().teardown()
        except Exception as error:
            raised = error
            raise
        finally:
            self.soak.ended(self.journal, raised)


@contextmanager
def _tails(seed: int) -> Iterator[None]:
    """Let tails of sequences be so short that they overflow, in rounds that are to be like that."""
    usual = kvist.core.rows.MIN_TAIL_TOKENS
    kvist.core.rows.MIN_TAIL_TOKENS = 1 if SHAPES[seed % len(SHAPES)] == "short tails" else usual
    try:
        yield
    finally:
        kvist.core.rows.MIN_TAIL_TOKENS = usual
