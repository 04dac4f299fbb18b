"""Text: a line, or a value of a JSON array, is a prompt, the turns of a user, or a chat with its answers.

Each answer of a chat is a request with all that came before it; a chat without an answer is one request. Chats have no
clock here: a turn takes one second, a few of them go on at once, and when all of these have ended come the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from kvist.lab.traces.conversations import Chat, Tokenizing
from kvist.lab.traces.fields import Malformed, count, first_of, text
from kvist.lab.traces.requests import Request, TokenPrompt
from kvist.lab.traces.side_by_side import Turns, in_groups
from kvist.lab.traces.streams import Source
from kvist.lab.traces.tokens import TIMES, arrival_of, namespace_of

__all__ = ["is_text", "read"]

PROMPTS = ("text", "prompt", "input", "question", "instruction")
OUTPUTS = ("output", "completion", "response", "answer")
CHATS = ("messages", "traj", "conversations", "conversation")
ANSWERING = ("assistant", "gpt", "model", "bot")
TURN_S = 1.0


def is_text(value: Any) -> bool:
    """Whether a JSON value looks like a prompt, or a chat, without a server's answer around it."""
    if isinstance(value, str):
        return True
    if not isinstance(value, dict):
        return False
    is_chat = any(isinstance(value.get(name), list) for name in (*CHATS, "turns"))
    return is_chat or any(isinstance(value.get(name), str) for name in PROMPTS)


def read(source: Source, tokenizing: Tokenizing, at_once: int) -> Iterator[Request]:
    """Yield the requests by arrival: of a trace with times as it says, else with so many chats or prompts at once."""
    if _has_times(source):
        return source.each_of(partial(_timed, tokenizing))
    return in_groups(_sessions(source, tokenizing), at_once)


def _has_times(source: Source) -> bool:
    first = next((value for _, value in source.heads() if isinstance(value, dict)), {})
    return any(name in first for name, _ in TIMES)


def _timed(tokenizing: Tokenizing, value: dict[str, Any], line: int) -> Iterator[Request]:
    began_s = arrival_of(value)
    for request, _ in _turns(tokenizing, value, line):
        yield Request(
            request.prompt, began_s + request.arrival_s, request.num_output_tokens, request.output, request.namespace,
            request.session, line,
        )  # fmt: skip


def _sessions(source: Source, tokenizing: Tokenizing) -> Iterator[Turns]:
    for line, value in source.values():
        with source.trying(line):
            yield _tried(source, line, _turns(tokenizing, {"text": value} if isinstance(value, str) else value, line))


def _tried(source: Source, line: int, turns: Turns) -> Turns:
    """Yield turns as far as they can be read."""
    with source.trying(line):
        yield from turns


def _turns(tokenizing: Tokenizing, value: Any, line: int) -> Turns:
    if not isinstance(value, dict):
        raise Malformed("no text, nor an object", f"got {value!r:.60}")
    chat = first_of(value, CHATS)
    if chat is not None:
        return _chat(tokenizing, value, chat, line)
    if isinstance(value.get("turns"), list):
        return _user_turns(tokenizing, value, line)
    return _single(tokenizing, value, line)


def _chat(tokenizing: Tokenizing, value: dict[str, Any], messages: Any, line: int) -> Turns:
    if not isinstance(messages, list) or not messages:
        raise Malformed("no messages", f"got {messages!r:.60}")
    chat, num_turns, namespace, session = Chat(tokenizing), 0, namespace_of(value), _session(value, line)
    prompt = chat.ids()
    for message in messages:
        prompt, is_answer = chat.ids(), _role(message) in ANSWERING
        answer = chat.add(message)
        if is_answer and len(prompt):
            told = (TokenPrompt(prompt), num_turns * TURN_S, len(answer), answer, namespace, session, line)
            yield Request(*told), TURN_S
            num_turns += 1
    if not num_turns:
        yield Request(TokenPrompt(chat.ids()), num_turns * TURN_S, 0, None, namespace, session, line), TURN_S


def _user_turns(tokenizing: Tokenizing, value: dict[str, Any], line: int) -> Turns:
    """Yield a request for each turn of a user, with those before it; what was answered is not known."""
    chat = Chat(tokenizing)
    for index, turn in enumerate(value["turns"]):
        chat.add({"role": "user", "content": turn})
        prompt = TokenPrompt(chat.ids())
        yield Request(prompt, index * TURN_S, 0, None, namespace_of(value), _session(value, line), line), TURN_S


def _single(tokenizing: Tokenizing, value: dict[str, Any], line: int) -> Turns:
    prompt = first_of(value, PROMPTS)
    if not isinstance(prompt, str):
        told = f"the fields are {', '.join(value)}"[:120]
        raise Malformed("no text" if prompt is None else "a prompt that is no text", told)
    ids = tokenizing.ids(prompt)
    if not len(ids):
        raise Malformed("no tokens", "the prompt is empty")
    answer = first_of(value, OUTPUTS)
    output = tokenizing.ids(answer) if isinstance(answer, str) else None
    num_output = len(output) if output is not None else count(value, "num_output_tokens", 0)
    yield Request(TokenPrompt(ids), 0.0, num_output, output, namespace_of(value), text(value, "session"), line), TURN_S


def _role(message: Any) -> Any:
    return message.get("role", message.get("from")) if isinstance(message, dict) else None


def _session(value: dict[str, Any], line: int) -> str:
    for name in ("session", "id", "conversation_id", "question_id"):
        if isinstance(value.get(name), str | int) and not isinstance(value.get(name), bool):
            return str(value[name])
    return f"line {line}"
