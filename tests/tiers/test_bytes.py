"""Every byte is what it was, for every dtype and storage order, by whatever path: device, host, disk, remote, back.

A model is imagined whose K and V, and states, are bytes that depend on all tokens up to there. Random calls on caches
that are much too small share them in whole and in part, fork, suspend, evict, restart; what a sequence reads is proved.
"""

import sys
from random import Random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.tiers.services import Valkey, needs, running

from kvist import (
    AttentionSpec,
    CacheConfig,
    DiskTier,
    HostTier,
    KVCacheManager,
    NeverFits,
    OutOfBlocks,
    RemoteTier,
    StateSpec,
)
from kvist.memory import TorchMemory
from kvist.tiers.simulated import SimulatedStore

PATIENT = 60.0
"""Seconds: a limit that is not reached, however busy the machine."""

DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int4", "uint4"]
ORDERS = ["layer_major", "block_major", "heads_first"]
SIZE = 4
LAYERS = {
    "full": lambda dtype: [AttentionSpec(2, 4, dtype=dtype), AttentionSpec(1, 8, dtype=dtype)],
    "windows": lambda dtype: [AttentionSpec(2, 4, dtype=dtype), AttentionSpec(1, 4, dtype=dtype, sliding_window=7)],
    "states": lambda dtype: [AttentionSpec(2, 4, dtype=dtype), StateSpec([(3, 2), (5,)], "float32", SIZE)],
}
KEPT = {}
"""The stores that outlive the managers of a test, by what they hold."""


class Kept(SimulatedStore):
    """A store that outlives those who close it, as a server does."""

    def close(self):
        pass


def kept(format, timeout_s):
    return KEPT.setdefault(format.fingerprint, Kept(format))


def in_process():
    assert "tests.tiers.test_bytes" in sys.modules
    return RemoteTier(url="tests.tiers.test_bytes:kept", timeout_s=PATIENT)


def content(tokens, layer, plane, num_bytes):
    """The bytes that a layer keeps for the last of these tokens, or after all of them."""
    return list(Random(repr((tuple(tokens), layer, plane))).randbytes(num_bytes))


class Machine:
    """A manager over real memory, and what its sequences must read."""

    def __init__(self, config):
        self.config = config
        self.live, self.asleep, self.num_cached = {}, {}, 0
        self.start()

    def start(self):
        self.memory = TorchMemory(self.config)
        self.manager = KVCacheManager(self.config, self.memory)

    def restart(self):
        assert self.manager.flush(PATIENT)
        self.manager.close()
        self.live, self.asleep = {}, {}
        self.start()

    def planes(self, layer):
        """K and V of a layer as bytes, `[num_blocks, block_size, heads, bytes]`, or its states, `[num_blocks, ...]`."""
        spec = self.config.layers[layer]
        is_state = isinstance(spec, StateSpec)
        tensors = self.memory.states(layer) if is_state else (self.memory.keys(layer), self.memory.values(layer))
        return [tensor.view(torch.uint8) for tensor in tensors]

    def group_of(self, layer):
        return next(at for at, group in enumerate(self.config.groups) if layer in group.layers)

    def places(self, sequence, layer, start, end):
        """Where the bytes of a layer are that depend on tokens up to each of `start` .. `end` - 1: (tokens, views)."""
        group = self.group_of(layer)
        blocks, kind = sequence.group_blocks(group).tolist(), self.config.groups[group].kind
        if kind == "state":
            yield end, [plane[blocks[0]] for plane in self.planes(layer)]
            return
        for at in range(start, end):
            yield at + 1, [plane[blocks[at // SIZE], at % SIZE] for plane in self.planes(layer)]

    def write(self, sequence, tokens, start, end):
        for layer in range(len(self.config.layers)):
            for length, views in self.places(sequence, layer, start, end):
                for plane, view in enumerate(views):
                    wanted = content(tokens[:length], layer, plane, view.numel())
                    view.copy_(torch.tensor(wanted, dtype=torch.uint8).view(view.shape))

    def prove(self, sequence, tokens):
        """Compare all that the next token reads with what was written for these tokens."""
        end = sequence.num_computed_tokens
        for layer in range(len(self.config.layers)) if end else ():
            window = self.config.groups[self.group_of(layer)].window
            for length, views in self.places(sequence, layer, max(end + 1 - window, 0) if window else 0, end):
                for plane, view in enumerate(views):
                    assert view.flatten().tolist() == content(tokens[:length], layer, plane, view.numel())

    def compute(self, sequence, tokens):
        """Prove what is said to be there, and compute the rest."""
        self.prove(sequence, tokens)
        while (done := sequence.num_computed_tokens) < len(tokens):
            end = done + self.manager.chunk_limit(sequence, len(tokens) - done)
            self.write(sequence, tokens, done, end)
            self.manager.commit([sequence], end)
        self.prove(sequence, tokens)

    # -- calls --------------------------------------------------------------------------------------------------------

    def prompt(self, document, length, tail):
        tokens = [*(100 * document + at for at in range(length)), *([7] * tail)]
        sequence = self.manager.add_sequence(tokens)
        self.num_cached += sequence.num_cached_tokens
        self.live[sequence] = tokens
        self.compute(sequence, tokens)

    def pick(self, number, among):
        return list(among)[number % len(among)] if among else None

    def call(self, what, number, length, tail):
        """Make one call; `number` says of which sequence or document, where there is a choice."""
        chosen = self.pick(number, self.asleep if what == "resume" else self.live)
        if what == "prompt":
            self.prompt(number % 3, length, tail)
        elif what == "evict":
            self.manager.evict(length)
        elif what == "restart":
            self.restart()
        elif chosen is None:
            return
        elif what == "append":
            self.manager.append([chosen], [number])
            self.live[chosen] = [*self.live[chosen], number]
            self.compute(chosen, self.live[chosen])
        elif what == "fork":
            (copy,) = self.manager.fork(chosen)
            self.live[copy] = self.live[chosen]
        elif what == "suspend":
            self.manager.suspend(chosen)
            self.asleep[chosen] = self.live.pop(chosen)
        elif what == "resume":
            self.manager.resume(chosen)
            self.live[chosen] = self.asleep.pop(chosen)
            self.compute(chosen, self.live[chosen])
        else:
            del self.live[chosen]
            self.manager.free(chosen)

    def run(self, calls):
        for each in calls:
            try:
                self.call(*each)
            except (OutOfBlocks, NeverFits):
                self.live and self.call("free", *each[1:])
            for sequence, tokens in self.live.items():
                self.prove(sequence, tokens)
            self.manager.check()
            assert self.manager.flush(PATIENT)
        self.manager.close()


def config_of(kind, dtype, order, remote, directory, write, io="buffered"):
    return CacheConfig(
        LAYERS[kind](dtype), SIZE, [9, 9][: 1 + (kind != "full")], max_sequences=4, max_sequence_length=40,
        storage_order=order, model="an imagined one", partial_reuse=kind != "states",
        tiers=[HostTier(num_blocks=5, write=write), DiskTier(directory, "4 MiB", io, timeout_s=PATIENT), remote],
    )  # fmt: skip


CALLS = st.lists(
    st.tuples(
        st.sampled_from(
            ("prompt", "prompt", "prompt", "append", "fork", "suspend", "resume", "free", "free", "evict", "restart")
        ),
        st.integers(0, 5),
        st.integers(1, 20),
        st.integers(0, 4),
    ),
    min_size=8,
    max_size=30,
)
ALL_PATHS = [
    ("prompt", 0, 18, 0), ("fork", 0, 1, 0), ("append", 3, 1, 0), ("suspend", 0, 1, 0), ("free", 0, 1, 0),
    ("evict", 0, 6, 0), ("resume", 0, 1, 0), ("free", 0, 1, 0), ("prompt", 0, 14, 3), ("free", 0, 1, 0),
    ("prompt", 1, 20, 0), ("free", 0, 1, 0), ("prompt", 0, 18, 2), ("restart", 0, 1, 0), ("prompt", 0, 18, 1),
    ("free", 0, 1, 0), ("prompt", 1, 15, 1),
]  # fmt: skip
"""Shared in whole and in part, forked, suspended and resumed from below, evicted to host, brought up, restarted."""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=12)
@example(kind="full", write="back", io="direct", calls=ALL_PATHS)
@example(kind="windows", write="through", io="buffered", calls=ALL_PATHS)
@example(kind="states", write="back", io="direct", calls=ALL_PATHS)
@given(
    kind=st.sampled_from(list(LAYERS)),
    write=st.sampled_from(("back", "through")),
    io=st.sampled_from(("buffered", "direct")),
    calls=CALLS,
)
def test_bytes_are_what_they_were_whatever_path_they_took(dtype, order, kind, write, io, calls, tmp_path_factory):
    KEPT.clear()
    machine = Machine(config_of(kind, dtype, order, in_process(), tmp_path_factory.mktemp("blocks"), write, io))
    machine.run(calls)
    if calls is ALL_PATHS:
        assert machine.num_cached >= 40
        assert machine.manager.store_stats()["disk"].num_hits > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_what_they_were_after_a_real_server_had_them(dtype, kind, tmp_path):
    """Written from one storage order, read into the other, on another machine that has an empty directory."""
    needs("redis")
    with running(Valkey(tmp_path)) as server:
        remote = RemoteTier(server.url, timeout_s=PATIENT)
        first = Machine(config_of(kind, dtype, "layer_major", remote, tmp_path / "one", "back"))
        first.run(ALL_PATHS)
        second = Machine(config_of(kind, dtype, "block_major", remote, tmp_path / "other", "through"))
        second.run([("prompt", 0, 18, 1), ("free", 0, 1, 0), ("prompt", 1, 20, 0)])
        assert second.num_cached >= 32


def test_a_byte_that_is_another_would_be_seen(tmp_path):
    KEPT.clear()
    machine = Machine(config_of("full", "int8", "layer_major", in_process(), tmp_path, "back"))
    machine.prompt(0, 18, 0)
    machine.memory.keys(1)[machine.pick(0, machine.live).group_blocks(0)[2], 1, 0, 3] ^= 1
    with pytest.raises(AssertionError):
        machine.run([])
        machine.call("append", 0, 1, 0)
