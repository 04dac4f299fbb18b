"""Engine-like steps with their events published over ZeroMQ: to nobody, and to a process that reads none of them.

The clock is that on the wall, since a publisher that waited for its subscriber would not use the processor. The two
take turns, and each turn begins when all events of the one before have been handed to ZeroMQ.
"""

from __future__ import annotations

import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import zmq
from numpy.typing import NDArray

from harness import paused_collector
from kvist import AttentionSpec, CacheConfig, KVCacheManager, Sequence
from kvist.core.events import Event
from kvist.wire import Encoder, Recorder, RunNames
from kvist.wire.publishing import Feed
from kvist.wire.zmq import ZmqPublisher

__all__ = ["Turns", "step_times_us"]

NUM_ROWS, PROMPT_TOKENS, BLOCK_SIZE = 64, 512, 16
HWM = 4
"""Batches that the publisher keeps for a subscriber that does not read."""
STUFFING = bytes(1 << 20)
NUM_STUFFED = 32
"""More than sockets and kernel hold for a subscriber: what comes after that is lost to it."""
PATIENT_S = 60.0


@dataclass(frozen=True, slots=True)
class Turns:
    """How long both are run: `num_turns` each, of `num_steps`."""

    num_turns: int
    num_steps: int


def step_times_us(turns: Turns) -> tuple[float, float, int]:
    """Return the time of a step with a stalled subscriber, without one, and how many batches the stalled one lost.

    Times are medians over turns of means over their steps.
    """
    num_steps = turns.num_turns * turns.num_steps
    with ExitStack() as stack:
        engines = [stack.enter_context(publishing_engine(num_steps)) for _ in range(2)]
        stalled, alone = engines
        subscriber = stack.enter_context(stalled_subscriber(stalled.publisher))
        times: dict[Engine, list[float]] = {each: [] for each in engines}
        with paused_collector():
            for turn in range(turns.num_turns):
                for engine in engines if turn % 2 else engines[::-1]:
                    times[engine].append(engine.run(turns.num_steps))
        num_lost = stalled.publisher.stats().num_published - num_received(subscriber)
    if num_lost <= 0:
        raise RuntimeError("the subscriber has got everything, so it did not stall anybody")
    return statistics.median(times[stalled]), statistics.median(times[alone]), num_lost


class Engine:
    """A batch that decodes, and a prompt that comes and goes with each step; events are flushed once a step."""

    def __init__(self, publisher: ZmqPublisher, max_steps: int) -> None:
        longest = PROMPT_TOKENS + max_steps + BLOCK_SIZE
        config = CacheConfig(
            [AttentionSpec(1, 8)],
            BLOCK_SIZE,
            num_blocks=(NUM_ROWS + 4) * (longest // BLOCK_SIZE + 1),
            max_sequences=NUM_ROWS + 1,
            max_sequence_length=longest,
            event_buffer=100_000,
        )
        self.publisher = publisher
        self._manager = KVCacheManager(config)
        self._rng = np.random.default_rng(1)
        self._rows = np.array([self._admitted().row for _ in range(NUM_ROWS)], np.int64)
        self._encode = Encoder("vllm", Recorder(RunNames(short=True)))
        self._num_flushed = self._num_encoded = 0
        self.feed = Feed(self._manager.events.subscribe(), self._encoded, publisher, wait_s=0.005)

    def run(self, num_steps: int) -> float:
        """Take so many steps, and return the microseconds that one took; wait for all events to be sent, untimed."""
        prompts = self._rng.integers(0, 128_000, (num_steps, PROMPT_TOKENS), dtype=np.int32)
        tokens = self._rng.integers(0, 128_000, (num_steps, NUM_ROWS), dtype=np.int32)
        began = time.perf_counter_ns()
        for step in range(num_steps):
            self._step(prompts[step], tokens[step])
        elapsed = time.perf_counter_ns() - began
        wait_until(lambda: self._num_encoded == self._num_flushed and not self.publisher.stats().num_waiting)
        return elapsed / num_steps / 1e3

    def _step(self, prompt: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        sequence = self._manager.add_sequence(prompt)
        self._manager.append(self._rows, tokens)
        self._manager.commit(self._rows)
        self._manager.commit([sequence])
        self._manager.free(sequence)
        self._num_flushed += self._manager.events.flush()

    def _admitted(self) -> Sequence:
        sequence = self._manager.add_sequence(self._rng.integers(0, 128_000, PROMPT_TOKENS, dtype=np.int32))
        self._manager.commit([sequence])
        return sequence

    def _encoded(self, events: list[Event]) -> bytes:
        batch = self._encode(events)
        self._num_encoded += len(events)
        return batch


@contextmanager
def publishing_engine(max_steps: int) -> Iterator[Engine]:
    """An engine with a publisher that any process of this machine can subscribe to."""
    with ZmqPublisher("tcp://127.0.0.1:*", hwm=HWM) as publisher:
        engine = Engine(publisher, max_steps)
        with engine.feed:
            yield engine


@contextmanager
def stalled_subscriber(publisher: ZmqPublisher) -> Iterator[subprocess.Popen[str]]:
    """A process that has subscribed, reads nothing more, and for which there is no room left on the way."""
    command = [sys.executable, __file__, publisher.endpoint]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        output = process.stdout
        assert output is not None
        wait_until(lambda: publisher.publish(b"") and bool(select.select([output.fileno()], [], [], 0.01)[0]))
        output.readline()
        for _ in range(NUM_STUFFED):
            publisher.publish(STUFFING)
            wait_until(lambda: not publisher.stats().num_waiting)
        yield process
    finally:
        process.kill()
        process.communicate()


def num_received(process: subprocess.Popen[str]) -> int:
    """Let the subscriber read what it can get, and say how many batches that were."""
    return int(process.communicate("read\n", timeout=PATIENT_S)[0])


def subscribe(endpoint: str) -> None:
    """Subscribe, say when the first batch has come, and read no more until told; then count the batches."""
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.rcvhwm = 1
        socket.linger = 0
        socket.connect(endpoint)
        socket.subscribe(b"")
        socket.recv_multipart()
        print("subscribed", flush=True)
        sys.stdin.readline()
        num_batches = 1
        while socket.poll(1000):
            socket.recv_multipart()
            num_batches += 1
        print(num_batches, flush=True)


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait until something holds that another thread or process does."""
    deadline = time.monotonic() + PATIENT_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError("events are not sent, or the subscriber does not answer")
        time.sleep(0.001)


if __name__ == "__main__":
    subscribe(sys.argv[1])
