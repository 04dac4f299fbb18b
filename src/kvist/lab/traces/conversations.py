r"""Text and chats as token ids, by any `tokenizer.json`.

A message is rendered as `<|im_start|>role\ncontent<|im_end|>\n`, tool calls as JSON after the content, and each by
itself, so that a chat that goes on begins with the same tokens. Which template a model has matters little for what can
be reused: it is the same at the start of all.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvist.errors import TraceError
from kvist.lab.traces.fields import Malformed

__all__ = ["NEEDS_TOKENIZER", "Chat", "Tokenizing", "content_of", "rendered"]

NEEDS_TOKENIZER = "has text, and needs a tokenizer: a tokenizer.json, or the folder that it is in"
NUM_REMEMBERED = 512
MAX_REMEMBERED_CHARACTERS = 1 << 16


class Tokenizing:
    """Makes token ids of text; the last few hundred texts are remembered.

    Raises TraceError without a tokenizer, or where it cannot be read.
    """

    def __init__(self, tokenizer: Path | None, file: Path) -> None:
        self._tokenizer = _loaded(tokenizer, file)
        self._remembered = lru_cache(NUM_REMEMBERED)(self._ids)

    def ids(self, text: str) -> NDArray[np.int32]:
        """Return the token ids of a text, `[num_tokens]`, without those that a tokenizer puts around it."""
        return self._ids(text) if len(text) > MAX_REMEMBERED_CHARACTERS else self._remembered(text)

    def message(self, message: Any) -> NDArray[np.int32]:
        """Return the token ids of a message of a chat."""
        return self.ids(rendered(message))

    def _ids(self, text: str) -> NDArray[np.int32]:
        try:
            ids = np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        except (UnicodeEncodeError, TypeError) as error:  # half of a surrogate pair, which JSON can say
            raise Malformed("text that is no Unicode", str(error)) from error
        ids.flags.writeable = False
        return ids


class Chat:
    """The token ids of a chat, message by message."""

    def __init__(self, tokenizing: Tokenizing) -> None:
        self._tokenizing = tokenizing
        self._messages: list[NDArray[np.int32]] = []

    def add(self, message: Any) -> NDArray[np.int32]:
        """Go on with a message; returns its token ids."""
        ids = self._tokenizing.message(message)
        self._messages.append(ids)
        return ids

    def ids(self) -> NDArray[np.int32]:
        """Return the token ids up to now, `[num_tokens]`."""
        return np.concatenate(self._messages) if self._messages else np.empty(0, np.int32)


def rendered(message: Any) -> str:
    r"""Return the text of a message.

    >>> rendered({"role": "user", "content": "Hello"})
    '<|im_start|>user\nHello<|im_end|>\n'
    """
    if not isinstance(message, dict):
        raise Malformed("a message is no object", f"got {message!r:.60}")
    role = message.get("role", message.get("from"))
    if not isinstance(role, str):
        raise Malformed("a message has no role", f"the fields are {', '.join(message)}"[:120])
    content = content_of(message.get("content", message.get("value")))
    calls = message.get("tool_calls")
    return f"<|im_start|>{role}\n{content}{json.dumps(calls) if calls else ''}<|im_end|>\n"


def content_of(content: Any) -> str:
    """Return the text of a message's content; parts that are no text, such as images, stand as their JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Malformed("content is no text, nor a list of parts", f"got {content!r:.60}")
    return "".join(_part(each) for each in content)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    return json.dumps(part)


def _loaded(tokenizer: Path | None, file: Path) -> Any:
    if tokenizer is None:
        raise TraceError(NEEDS_TOKENIZER, file=str(file))
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as missing:
        raise TraceError("has text, which needs tokenizers; pip install 'kvist[lab]'", file=str(file)) from missing
    path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    try:
        content = path.read_text(encoding="utf-8")
        return Tokenizer.from_str(content)
    except Exception as error:  # what tokenizers raises has no class of its own
        raise TraceError(f"is no tokenizer that can be read: {error}", file=str(path)) from error
