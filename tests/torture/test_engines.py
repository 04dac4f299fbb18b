"""The suite for engines, passed by the reference engine on models of several kinds, and by the toy of the manual."""

import re
from pathlib import Path

import pytest
from tests.core.layers import chunked, sliding, state
from tests.serve.test_engine import shared_model

from kvist import AttentionSpec
from kvist.serve import Engine, SamplingParams, cache_config
from kvist.testing import EngineSuite

PAGE = Path(__file__).resolve().parents[2] / "docs" / "testing.md"
FULL = AttentionSpec(1, 1)


def toys():
    """What the page on testing defines: a toy engine, and its suite."""
    names = {}
    for block in re.findall(r"^```python\n(from .*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


TestToy = toys()["TestToy"]


class TestToyWithWindows(TestToy):
    layers = (FULL, sliding(5), sliding(9, sink_tokens=2))


class TestToyWithChunks(TestToy):
    layers = (FULL, chunked(8))


class TestToyWithStates(TestToy):
    layers = (FULL, state())


class Served:
    """The reference engine as the suite takes it."""

    def __init__(self, engine):
        self.engine, self.manager = engine, engine.manager
        self.step, self.abort, self.close = engine.step, engine.abort, engine.close

    def submit(self, prompt, max_new_tokens, namespace):
        sampling = SamplingParams(max_new_tokens=max_new_tokens, stop_token_ids=())
        return self.engine.submit(prompt, sampling, namespace=namespace)

    def output(self, request):
        return request.token_ids

    def is_finished(self, request):
        return request.is_finished


class ReferenceSuite(EngineSuite):
    __test__ = False
    kind = "llama"

    def open_engine(self, num_blocks, *, tiers=(), event_buffer=0):
        model = shared_model(self.kind)
        config = cache_config(
            model,
            num_blocks=self.groups(num_blocks),
            block_size=self.block_size,
            max_sequences=4,
            tiers=list(tiers),
            event_buffer=event_buffer,
            model=f"tiny {self.kind}",
        )
        return Served(Engine(model, config, max_step_tokens=8))

    def groups(self, num_blocks):
        return num_blocks


class TestReference(ReferenceSuite):
    __test__ = True


@pytest.mark.slow
class TestReferenceWithWindows(ReferenceSuite):
    __test__ = True
    kind = "gemma3_text"


@pytest.mark.slow
class TestReferenceWithStates(ReferenceSuite):
    __test__ = True
    kind = "qwen3_next"
