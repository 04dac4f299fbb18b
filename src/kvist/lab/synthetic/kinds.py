"""What users do: ask with a shared prompt, chat, ask about documents, or let an agent work. Lengths are in tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvist.errors import ArgumentError
from kvist.lab.synthetic.draws import Draw
from kvist.lab.synthetic.segments import Segment

__all__ = ["Agents", "Chat", "Kind", "Retrieval", "SharedPrompts", "Step"]

SPREAD = 0.8


class Step(NamedTuple):
    """One request of a session: what is new in its prompt, how much is generated, and how long whoever asks waits then.

    The prompt is all that came before, answers included, and what is new; `pause_s` begins when the answer has ended.
    """

    new: tuple[Segment, ...]
    num_output_tokens: int
    pause_s: float


class Kind(Protocol):
    """A kind of sessions."""

    @property
    def name(self) -> str:
        """What sessions of this kind are called."""

    def steps(self, draw: Draw, seed: int) -> Iterator[Step]:
        """Yield the requests of one session; what sessions share is the same for a seed."""


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """One question each, after one of a few system prompts, some of which are much more popular than others."""

    num_prompts: int = 20
    prompt_tokens: float = 800
    zipf: float = 1.0
    question_tokens: float = 150
    output_tokens: float = 250
    name: str = "shared"

    def __post_init__(self) -> None:
        _check(self)

    def steps(self, draw: Draw, seed: int) -> Iterator[Step]:
        """Yield the one request of a session."""
        prompt = _shared(seed, self.name, draw.zipf(self.num_prompts, self.zipf), self.prompt_tokens)
        question = _own(draw, self.question_tokens)
        yield Step((prompt, question), draw.length(self.output_tokens, SPREAD), 0.0)


@dataclass(frozen=True, slots=True)
class Chat:
    """Conversations after one of a few system prompts: each turn goes on from all turns and answers before it."""

    num_prompts: int = 5
    prompt_tokens: float = 500
    zipf: float = 1.0
    turns: float = 5
    turn_tokens: float = 80
    output_tokens: float = 300
    think_s: float = 30.0
    name: str = "chat"

    def __post_init__(self) -> None:
        _check(self)

    def steps(self, draw: Draw, seed: int) -> Iterator[Step]:
        """Yield the turns of a conversation."""
        new: tuple[Segment, ...] = (
            _shared(seed, self.name, draw.zipf(self.num_prompts, self.zipf), self.prompt_tokens),
        )
        for _ in range(draw.geometric(self.turns)):
            turn = _own(draw, self.turn_tokens)
            yield Step((*new, turn), draw.length(self.output_tokens, SPREAD), draw.exponential(self.think_s))
            new = ()


@dataclass(frozen=True, slots=True)
class Retrieval:
    """Questions about documents: a system prompt, the documents that were found, then the question."""

    prompt_tokens: float = 300
    num_documents: int = 2000
    document_tokens: float = 600
    documents_per_request: int = 4
    zipf: float = 0.9
    question_tokens: float = 60
    output_tokens: float = 200
    name: str = "rag"

    def __post_init__(self) -> None:
        _check(self)
        if self.documents_per_request > self.num_documents:
            raise ArgumentError(f"{self.documents_per_request} documents a request, but there are {self.num_documents}")

    def steps(self, draw: Draw, seed: int) -> Iterator[Step]:
        """Yield the one request of a session."""
        found: dict[int, None] = {}
        while len(found) < self.documents_per_request:
            found[draw.zipf(self.num_documents, self.zipf)] = None
        documents = [_shared(seed, "document", each, self.document_tokens) for each in found]
        prompt = _shared(seed, self.name, 0, self.prompt_tokens)
        yield Step((prompt, *documents, _own(draw, self.question_tokens)), draw.length(self.output_tokens, SPREAD), 0.0)


@dataclass(frozen=True, slots=True)
class Agents:
    """Agents that work in many short steps, after a long prompt with their tools: each step adds what a tool said."""

    num_agents: int = 3
    tools_tokens: float = 6000
    zipf: float = 1.0
    task_tokens: float = 300
    steps_per_task: float = 15
    result_tokens: float = 500
    output_tokens: float = 120
    tool_s: float = 3.0
    name: str = "agents"

    def __post_init__(self) -> None:
        _check(self)

    def steps(self, draw: Draw, seed: int) -> Iterator[Step]:
        """Yield the steps of a task."""
        tools = _shared(seed, self.name, draw.zipf(self.num_agents, self.zipf), self.tools_tokens)
        new: tuple[Segment, ...] = (tools, _own(draw, self.task_tokens))
        for _ in range(draw.geometric(self.steps_per_task)):
            yield Step(new, draw.length(self.output_tokens, SPREAD), draw.exponential(self.tool_s))
            new = (_own(draw, self.result_tokens),)


def _shared(seed: int, name: str, index: int, mean_tokens: float) -> Segment:
    """Return text that sessions share; the same id and length whoever asks."""
    draw = Draw(seed, name, "shared", index)
    return Segment(draw.identity(), draw.length(mean_tokens, SPREAD / 2))


def _own(draw: Draw, mean_tokens: float) -> Segment:
    """Return text that nobody else has."""
    return Segment(draw.identity(), draw.length(mean_tokens, SPREAD))


def _check(kind: Kind) -> None:
    """Raise ArgumentError for settings that are not positive; times and exponents may be 0."""
    for field in type(kind).__dataclass_fields__:  # type: ignore[attr-defined]
        value = getattr(kind, field)
        least = 0 if field in ("zipf", "think_s", "tool_s") else 1
        if not isinstance(value, str) and not value >= least:
            raise ArgumentError(f"{field} is {value}, must be {least} or more")
