"""Sessions that begin by chance, of several kinds, as one trace in the order of arrival."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, islice

from kvist.errors import ArgumentError
from kvist.lab.synthetic.draws import Draw
from kvist.lab.synthetic.kinds import Agents, Chat, Kind, Retrieval, SharedPrompts, Step
from kvist.lab.synthetic.segments import Segment, block_ids, tokens_of
from kvist.lab.traces.problems import Problems
from kvist.lab.traces.requests import HashedPrompt, Request, TokenPrompt

__all__ = ["WORKLOADS", "SyntheticTrace", "Workload"]

MAX_TOO_LONG = 1000


@dataclass(frozen=True)
class Workload:
    """What is asked: kinds of sessions with their weights, how many begin in a second, and how fast answers come.

    Sessions begin as a Poisson process. An answer takes `seconds_per_token` for each of its tokens, then whoever asked
    thinks, or a tool works, and the next step is asked. No session gets a prompt of more than `max_tokens`: it ends.
    """

    kinds: Mapping[Kind, float]
    sessions_per_s: float = 1.0
    seconds_per_token: float = 0.02
    max_tokens: int = 128_000

    def __post_init__(self) -> None:
        if not self.kinds or any(not weight > 0 for weight in self.kinds.values()):
            raise ArgumentError("a workload needs kinds of sessions, with weights above 0")
        if not self.sessions_per_s > 0 or not self.seconds_per_token >= 0 or self.max_tokens < 1:
            raise ArgumentError(
                f"sessions_per_s is {self.sessions_per_s}, seconds_per_token {self.seconds_per_token}, max_tokens "
                f"{self.max_tokens}: must be above 0, 0 or more, and 1 or more"
            )


WORKLOADS: dict[str, Workload] = {
    "shared": Workload({SharedPrompts(): 1.0}, sessions_per_s=4.0),
    "chat": Workload({Chat(): 1.0}),
    "rag": Workload({Retrieval(): 1.0}, sessions_per_s=2.0),
    "agents": Workload({Agents(): 1.0}, sessions_per_s=0.2),
    "mixed": Workload({SharedPrompts(): 4.0, Chat(): 3.0, Retrieval(): 2.0, Agents(): 1.0}, sessions_per_s=2.0),
}
"""Workloads by name."""


@dataclass(order=True, slots=True)
class Running:
    """A session that goes on: when its next request comes, and what its prompt has up to now."""

    arrival_s: float
    number: int
    kind: Kind = field(compare=False)
    steps: Iterator[Step] = field(compare=False)
    draw: Draw = field(compare=False)
    step: Step = field(compare=False)
    segments: list[Segment] = field(compare=False, default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of its prompt."""
        return sum(segment.num_tokens for segment in self.segments)


class SyntheticTrace:
    """The requests of a workload, in the order of arrival; the same for the same seed, in any process.

    With a `block_size`, prompts are ids of blocks of so many tokens, else token ids. No more is held than the sessions
    that go on at the same time.

    >>> trace = SyntheticTrace(WORKLOADS["chat"], num_requests=3, seed=1)
    >>> [request.prompt.num_tokens for request in trace] == [request.prompt.num_tokens for request in trace]
    True
    """

    def __init__(
        self, workload: Workload, num_requests: int, *, seed: int = 0, block_size: int | None = None, name: str = ""
    ) -> None:
        if num_requests < 0 or (block_size is not None and block_size < 1):
            raise ArgumentError(f"num_requests is {num_requests}, block_size {block_size}: must be 0, and 1, or more")
        self.workload, self.num_requests, self.seed = workload, num_requests, seed
        self.block_size, self.name = block_size, name or f"synthetic, seed {seed}"
        self.problems = Problems()

    def __iter__(self) -> Iterator[Request]:
        """Generate the trace from its start."""
        return islice(self._requests(), self.num_requests)

    def _requests(self) -> Iterator[Request]:
        running: list[Running] = []
        beginnings = self._beginnings()
        coming = next(beginnings)
        for line in count(1):
            while not running or coming.arrival_s <= running[0].arrival_s:
                heappush(running, coming)
                coming = next(beginnings)
            session = heappop(running)
            output = Segment(session.draw.identity(), session.step.num_output_tokens)
            yield self._request(session, output, line)
            if self._go_on(session, output):
                heappush(running, session)

    def _beginnings(self) -> Iterator[Running]:
        """Yield sessions with their first request, by the time at which they begin."""
        draw, began_s = Draw(self.seed, "sessions"), 0.0
        kinds, weights = list(self.workload.kinds), tuple(self.workload.kinds.values())
        num_too_long = 0
        for number in count():
            began_s += draw.exponential(1 / self.workload.sessions_per_s)
            own = Draw(self.seed, "session", number)
            kind = kinds[own.choice(weights)]
            steps = kind.steps(own, self.seed)
            step = next(steps)
            session = Running(round(began_s, 6), number, kind, steps, own, step, list(step.new))
            num_too_long = num_too_long + 1 if session.num_tokens > self.workload.max_tokens else 0
            if not num_too_long:
                yield session
            elif num_too_long == MAX_TOO_LONG:
                told = f"{MAX_TOO_LONG:,} sessions in a row begin with more than {self.workload.max_tokens:,} tokens"
                raise ArgumentError(f"{told}; raise max_tokens, or make prompts shorter")

    def _go_on(self, session: Running, output: Segment) -> bool:
        """Let a session come to its next request; returns whether it has one."""
        done, step = session.step, next(session.steps, None)
        if step is None:
            return False
        session.segments += [output, *step.new]
        session.step = step
        took_s = done.num_output_tokens * self.workload.seconds_per_token + done.pause_s
        session.arrival_s = round(session.arrival_s + took_s, 6)
        return session.num_tokens <= self.workload.max_tokens

    def _request(self, session: Running, output: Segment, line: int) -> Request:
        name = f"{session.kind.name} {session.number}"
        if self.block_size is None:
            prompt = TokenPrompt(tokens_of(session.segments))
            return Request(prompt, session.arrival_s, output.num_tokens, tokens_of([output]), session=name, line=line)
        hashed = HashedPrompt(block_ids(session.segments, self.block_size), self.block_size, session.num_tokens)
        return Request(hashed, session.arrival_s, output.num_tokens, session=name, line=line)
