"""Every form of events passes the suite: what is sent while a cache is used tells an index what is in it."""

from kvist.testing import EventCodecSuite
from kvist.wire import Encoder, Recorder, RunNames, Scope
from kvist.wire import dynamo, jsonl, mooncake, sglang, trtllm, vllm


class Ours(EventCodecSuite):
    """A format of this library, by its name."""

    form = ""

    def encoder(self):
        return Encoder(self.form, Recorder(self.names()))


class TestJsonLines(Ours):
    form, short_names = "kvist", False

    def decode(self, message):
        return jsonl.decode(message)


class TestVllm(Ours):
    form, short_names = "vllm", False

    def decode(self, message):
        return vllm.decode(message)


class TestVllmArrays(Ours):
    form = "vllm-array"

    def decode(self, message):
        return vllm.decode(message)


class TestSglang(Ours):
    form = "sglang"

    def decode(self, message):
        return sglang.decode(message)


class TestTensorRT(Ours):
    form, tells_all_tiers = "trtllm", False

    def decode(self, message):
        return trtllm.loads(message)


class TestMooncake(Ours):
    form = "mooncake"

    def decode(self, message):
        return mooncake.decode(message)


class TestDynamo(Ours):
    form, tells_groups = "dynamo", False

    def names(self):
        """Dynamo cannot be told of tenants but by the names of their blocks."""
        return RunNames(short=True, scope=lambda namespace: Scope())

    def decode(self, message):
        return dynamo.loads(message)
