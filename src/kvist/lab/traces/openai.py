"""Logs of OpenAI-style requests: a line has the body of a chat or a completion, and perhaps the response to it.

The body stands at the top, or in `body` or `request`; the response in `response`. Model and cache salt become the
namespace, since nothing is reused across them. Arrivals count from the first request.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvist.core.extents import Namespace
from kvist.lab.traces.conversations import Chat, Tokenizing
from kvist.lab.traces.fields import MAX_SECONDS, Malformed, first_of, token_ids
from kvist.lab.traces.requests import Request, TokenPrompt
from kvist.lab.traces.streams import Source

__all__ = ["is_openai", "read"]

BODIES, RESPONSES = ("body", "request"), ("response",)
TIMES = ("timestamp", "created_at", "created", "time", "ts", "arrival_time", "start_time")
MIN_MS = 1e11
"""A number that is larger is a time in ms since 1970; as seconds it would be in the year 5138."""


class Log:
    """Makes requests of the lines of a log; the tokenizer is loaded for the first text."""

    def __init__(self, source: Source, load: Any) -> None:
        self._load = load
        self._tokenizing: Tokenizing | None = None

    @property
    def tokenizing(self) -> Tokenizing:
        """What makes token ids of text."""
        if self._tokenizing is None:
            self._tokenizing = self._load()
        return self._tokenizing

    def requests(self, value: dict[str, Any], line: int) -> Iterator[Request]:
        """Yield the request of a line; a completion of several prompts is several."""
        body, response = _body(value), _response(value)
        prompts, outputs = list(self._prompts(body)), list(self._outputs(response))
        arrival_s, namespace, session = _time_of(value, response), _namespace(body), _session(value, body)
        if not all(map(len, prompts)):
            raise Malformed("no tokens", "the prompt is empty")
        for index, ids in enumerate(prompts):
            output = outputs[index] if len(outputs) == len(prompts) else None
            num_output = _num_output_tokens(value, response) // len(prompts) if output is None else len(output)
            yield Request(TokenPrompt(ids), arrival_s, num_output, output, namespace, session, line)

    def _prompts(self, body: dict[str, Any]) -> Iterator[NDArray[np.int32]]:
        if "messages" in body:
            yield self._chat(body)
            return
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            yield self.tokenizing.ids(prompt)
        elif isinstance(prompt, list) and prompt and type(prompt[0]) is int:
            yield token_ids(prompt, "prompt")
        elif isinstance(prompt, list) and prompt:
            for each in prompt:
                yield self.tokenizing.ids(each) if isinstance(each, str) else token_ids(each, "prompt")
        else:
            raise Malformed("no messages and no prompt", f"the fields are {', '.join(body)}"[:120])

    def _chat(self, body: dict[str, Any]) -> NDArray[np.int32]:
        messages = body["messages"]
        if not isinstance(messages, list) or not messages:
            raise Malformed("no messages", f"got {messages!r:.60}")
        chat = Chat(self.tokenizing)
        if body.get("tools"):
            chat.add({"role": "tools", "content": json.dumps(body["tools"])})
        for message in messages:
            chat.add(message)
        return chat.ids()

    def _outputs(self, response: dict[str, Any]) -> Iterator[NDArray[np.int32]]:
        """Yield the token ids of the choices, where they are text."""
        choices = response.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict):
                raise Malformed("a choice is no object", f"got {choice!r:.60}")
            if isinstance(choice.get("token_ids"), list):
                yield token_ids(choice["token_ids"], "token_ids")
            elif isinstance(choice.get("message"), dict):
                yield self.tokenizing.message({"role": "assistant", **choice["message"]})
            elif isinstance(choice.get("text"), str):
                yield self.tokenizing.ids(choice["text"])


def is_openai(value: Any) -> bool:
    """Whether a JSON value looks like a request of this kind: a chat or prompt with a model, or in a body."""
    if not isinstance(value, dict):
        return False
    body = first_of(value, BODIES)
    inner = body if isinstance(body, dict) else value
    has_prompt = isinstance(inner.get("messages"), list) or isinstance(inner.get("prompt"), str | list)
    return has_prompt and ("model" in inner or inner is not value or isinstance(value.get("response"), dict))


def read(source: Source, load: Any) -> Iterable[Request]:
    """Yield the requests, as they lie in the file, with arrivals since 1970; `load` makes what tokenizes text."""
    return source.each_of(Log(source, load).requests)


def _body(value: dict[str, Any]) -> dict[str, Any]:
    body = first_of(value, BODIES)
    if body is None:
        return value
    if isinstance(body, str):
        try:
            body = json.loads(body)
        except ValueError as error:
            raise Malformed("a body that is no JSON", str(error)) from error
    if not isinstance(body, dict):
        raise Malformed("a body that is no object", f"got {body!r:.60}")
    return body


def _response(value: dict[str, Any]) -> dict[str, Any]:
    response = first_of(value, RESPONSES)
    if not isinstance(response, dict):
        return value if "choices" in value else {}
    return response["body"] if isinstance(response.get("body"), dict) else response


def _session(value: dict[str, Any], body: dict[str, Any]) -> str:
    told = first_of(value, ("session_id", "session", "conversation_id"))
    return str(told if told is not None else body.get("user") or "")


def _num_output_tokens(value: dict[str, Any], response: dict[str, Any]) -> int:
    """Return how many tokens were generated, as the server counted; 0 where it has not."""
    usage = first_of(response, ("usage",)) or first_of(value, ("usage",))
    told = first_of(usage, ("completion_tokens", "output_tokens")) if isinstance(usage, dict) else None
    if told is None:
        return 0
    if type(told) is not int or not 0 <= told < 2**31:
        raise Malformed("completion_tokens is not a count", f"got {told!r:.60}")
    return told


def _namespace(body: dict[str, Any]) -> Namespace:
    parts = [body.get("model"), body.get("cache_salt")]
    if any(not isinstance(part, str | None) for part in parts):
        raise Malformed("model or cache_salt is no text", f"got {parts!r:.60}")
    return tuple(str(part) for part in parts if part is not None)


def _time_of(value: dict[str, Any], response: dict[str, Any]) -> float:
    """Return when a request was made, in seconds since 1970, or 0."""
    told = first_of(value, TIMES)
    if told is None:
        told = first_of(response, TIMES)
    if told is None:
        return 0.0
    if isinstance(told, str):
        try:
            then = datetime.fromisoformat(told)
        except ValueError as error:
            raise Malformed("a time that cannot be read", f"got {told!r:.60}") from error
        return (then if then.tzinfo else then.replace(tzinfo=UTC)).timestamp()
    if isinstance(told, bool) or not isinstance(told, int | float) or not 0 <= told <= MAX_SECONDS:
        raise Malformed("a time that cannot be read", f"got {told!r:.60}")
    return told / 1e3 if told > MIN_MS else float(told)
