"""Whatever is typed, the command line ends with status 0, 1 or 2 and without a traceback."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.small import small
from tests.fuzz.drawn import DEEP
from typer.main import get_command
from typer.testing import CliRunner

from kvist.cli import app
from kvist.journal import Journal

TOO_MUCH = "9" * 400 + " TiB"
NUMBERS = ("0", "1", "-1", "16", "1e3", "nan", "inf", "99999999999999999999", "0x1", "", " ", "１")
WORDS = (
    "lru",
    "full,ring",
    "kvist",
    "vllm",
    "trtllm",
    "dynamo",
    "1 GiB",
    "9" * 400 + " TiB",
    "a:1",
    "valkey://x",
    "\x00",
    "-",
)


def commands(command, path=()):
    """Every command, as the words that name it, with its options."""
    inner = getattr(command, "commands", {})
    for name, each in inner.items():
        yield from commands(each, (*path, name))
    if not inner:
        yield path, [option for parameter in command.params for option in parameter.opts if option.startswith("-")]


LEFT_OUT = {"tail", "soak"}
"""One waits for a publisher, for ever; the other is Hypothesis itself, which does not run in itself."""
COMMANDS = sorted(each for each in commands(get_command(app)) if each[0][-1] not in LEFT_OUT)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files to name: of each kind that a command reads, and some that none does."""
    folder = tmp_path_factory.mktemp("files")
    with Journal(folder / "calls.journal").attach(manager := small()):
        manager.free(manager.add_sequence([1, 2, 3]))
    model = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(model))
    (folder / "list.json").write_text("[1]")
    (folder / "deep.json").write_text("[" * DEEP)
    (folder / "wrong.json").write_text(json.dumps({"text_config": [1], "num_hidden_layers": 2}))
    (folder / "events.kvist").write_text('{"event":"cleared","id":1}\n')
    (folder / "noise").write_bytes(bytes(range(256)))
    (folder / "empty").write_bytes(b"")
    return [str(folder), str(folder / "missing"), *sorted(str(path) for path in folder.iterdir())]


@given(data=st.data())
def test_any_arguments_end_with_a_status_and_no_traceback(files, data):
    path, options = data.draw(st.sampled_from(COMMANDS))
    word = st.sampled_from((*NUMBERS, *WORDS)) | st.sampled_from(files) | st.text(max_size=5)
    pairs = st.tuples(st.sampled_from((*options, "--none")), word)
    arguments = data.draw(st.lists(word, max_size=3))
    chosen = [each for pair in data.draw(st.lists(pairs, max_size=4)) for each in pair]
    last = ["--model", files[1]] if path == ("generate",) else []
    typed = [*path, *chosen, *last, *arguments]
    ended(typed)


@given(st.lists(st.sampled_from(("--version", "--help", "plan", "events", "replay", "--", "x", "")), max_size=4))
def test_any_words_end_with_a_status_and_no_traceback(words):
    if "generate" not in words and "soak" not in words:
        ended(words)


def test_every_file_as_every_argument(files):
    for name in files:
        for typed in (["plan", name, "--memory", "1 GiB"], ["replay", name], ["events", "index", "kvist", name]):
            ended(typed)
        for source in ("kvist", "vllm", "trtllm", "dynamo"):
            ended(["events", "convert", source, "vllm", name])


def ended(typed):
    result = CliRunner().invoke(app, typed, input="x\n")
    assert result.exception is None or isinstance(result.exception, SystemExit), (typed, result.exception)
    assert result.exit_code in (0, 1, 2), (typed, result.output)
    assert "Traceback" not in result.output
