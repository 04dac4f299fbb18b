"""The suite that an engine built on Kvist passes: right text and no lost block, whatever happens around it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Protocol

from kvist.core.extents import Namespace
from kvist.errors import KvistError
from kvist.manager import KVCacheManager
from kvist.testing.event_replay import EventReplay
from kvist.testing.faulty_store import FAULTY_URL, LIES, FaultyStore, faulty_stores
from kvist.testing.holders import HolderLog
from kvist.testing.twin import Twin
from kvist.tier_config import DiskTier, HostTier, RemoteTier, TierSpec

__all__ = ["EngineSuite", "EngineUnderTest"]

TENANTS: tuple[Namespace, ...] = ((), ("tenant", 1))


class EngineUnderTest(Protocol):
    """What `EngineSuite` asks of an engine, or of a few lines around it."""

    @property
    def manager(self) -> KVCacheManager:
        """The manager of its cache."""

    def submit(self, prompt: list[int], max_new_tokens: int, namespace: Namespace) -> Any:
        """Take a request and return what stands for it; raises a KvistError if it can never be served."""

    def step(self) -> None:
        """Do one step of whatever there is to do."""

    def abort(self, request: Any) -> None:
        """End a request now; one that has ended stays as it is."""

    def output(self, request: Any) -> list[int]:
        """Return the tokens that were generated up to now, the likeliest each time."""

    def is_finished(self, request: Any) -> bool:
        """Say whether no more tokens come."""

    def close(self) -> None:
        """End everything, and close the manager."""


class EngineSuite:
    """What must hold of any engine. Inherit it, say how yours is opened, and pytest proves it.

        class TestMine(EngineSuite):
            def open_engine(self, num_blocks, *, tiers=(), event_buffer=0):
                return MyEngine(model, num_blocks=num_blocks, tiers=tiers, event_buffer=event_buffer)

    An engine must choose the likeliest token, or by a seed of the request's own: texts are compared with those of a
    request that had an engine to itself.
    """

    vocab_size: ClassVar[int] = 256
    """Prompts have tokens below it, and from 3 on."""
    block_size: ClassVar[int] = 4
    """Tokens of a block, as `open_engine` configures them."""
    has_tiers: ClassVar[bool] = True
    """Whether `open_engine` takes tiers, and the engine's memory gives bytes to stores."""
    max_steps: ClassVar[int] = 2000
    """More steps than that are none of an engine that gets on."""

    def open_engine(self, num_blocks: int, *, tiers: Sequence[TierSpec] = (), event_buffer: int = 0) -> EngineUnderTest:
        """Open an engine with so many blocks of `block_size` tokens in each group, and room for 4 requests at once."""
        raise NotImplementedError

    # -- what the tests say -------------------------------------------------------------------------------------------

    def run(self, engine: EngineUnderTest, requests: Iterable[Any]) -> list[list[int]]:
        """Step until all requests have ended, the books right after each step; returns their texts."""
        requests = list(requests)
        for _ in range(self.max_steps):
            if all(engine.is_finished(request) for request in requests):
                return [engine.output(request) for request in requests]
            engine.step()
            engine.manager.check()
            stats = engine.manager.stats()
            assert 0 <= stats.usage <= 1, f"usage is {stats.usage}"
        raise AssertionError(f"{self.max_steps} steps were not enough: {engine.manager.stats()}")

    def alone(self, prompt: list[int], max_new_tokens: int) -> list[int]:
        """Return the text of a request that has an engine to itself, and nothing to reuse."""
        engine = self.open_engine(self.blocks_for(len(prompt) + max_new_tokens) + 2)
        [text] = self.run(engine, [engine.submit(prompt, max_new_tokens, ())])
        engine.close()
        return text

    def all_alone(self, prompts: Sequence[list[int]], limits: Sequence[int]) -> list[list[int]]:
        """Return the texts of requests that each have an engine to themselves."""
        return [self.alone(prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks a sequence of so many tokens fills."""
        return -(-num_tokens // self.block_size)

    def prompt(self, num_tokens: int, seed: int = 0) -> list[int]:
        """Return a prompt of random tokens."""
        chance = Random(seed)
        return [chance.randrange(3, self.vocab_size) for _ in range(num_tokens)]

    def conversations(self, num_requests: int) -> list[list[int]]:
        """Return prompts that share beginnings, as those of chats and agents do."""
        chance, system = Random(1), self.prompt(3 * self.block_size + 1, seed=1)
        threads: list[list[int]] = [[], [], []]
        prompts = []
        for number in range(num_requests):
            thread = threads[number % len(threads)]
            if chance.random() < 0.3:
                del thread[len(thread) // 2 :]
            thread += self.prompt(chance.randrange(1, 2 * self.block_size), seed=number)
            prompts.append(system + thread)
        return prompts

    def pressed(self, prompts: Sequence[list[int]], limits: Sequence[int]) -> int:
        """Return how many blocks the longest of requests needs, and one more."""
        longest = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
        return self.blocks_for(longest) + 1

    # -- the tests ----------------------------------------------------------------------------------------------------

    def test_texts_are_the_same_together_as_alone(self) -> None:
        """Whoever else is in the batch changes no token."""
        prompts, limits = [self.prompt(n, seed=n) for n in (1, 3, 4, 5, 9, 17)], [5, 9, 1, 4, 7, 3]
        engine = self.open_engine(64)
        texts = self.run(engine, [engine.submit(p, n, ()) for p, n in zip(prompts, limits, strict=True)])
        assert texts == self.all_alone(prompts, limits)
        engine.close()

    def test_what_is_reused_changes_no_token(self) -> None:
        """Prompts that go on from one another find what was computed, and read it right."""
        prompts = self.conversations(8)
        engine = self.open_engine(64)
        texts = [self.run(engine, [engine.submit(prompt, 5, ())])[0] for prompt in prompts]
        assert texts == self.all_alone(prompts, [5] * len(prompts))
        assert engine.manager.stats().num_hit_tokens > 0
        engine.close()

    def test_at_least_one_token_is_computed_at_every_length(self) -> None:
        """A prompt that is cached whole still yields its next token, at all ends of blocks."""
        size = self.block_size
        for num_tokens in (1, size - 1, size, size + 1, 2 * size, 3 * size):
            prompt = self.prompt(num_tokens, seed=7)
            engine = self.open_engine(32)
            texts = [self.run(engine, [engine.submit(prompt, 3, ())])[0] for _ in range(3)]
            assert texts == [self.alone(prompt, 3)] * 3
            engine.close()

    def test_under_pressure_every_request_ends_with_the_right_text(self) -> None:
        """With room for hardly more than the longest, requests wait and give way, and none for ever."""
        prompts, limits = self.conversations(10), [3 + 5 * number % 11 for number in range(10)]
        engine = self.open_engine(self.pressed(prompts, limits))
        texts = self.run(engine, [engine.submit(p, n, ()) for p, n in zip(prompts, limits, strict=True)])
        assert texts == self.all_alone(prompts, limits)
        assert engine.manager.num_free_blocks == engine.manager.num_blocks
        engine.close()

    def test_a_request_can_be_aborted_at_any_step_and_leaves_nothing(self) -> None:
        """Before it is admitted, between chunks of its prompt, while it generates: blocks come back, others go on."""
        prompts = [self.prompt(n, seed=n) for n in (6, 11, 9)]
        expected = self.all_alone(prompts, [6] * 3)
        for num_steps in range(9):
            engine = self.open_engine(16)
            log = HolderLog(engine.manager)
            requests = [engine.submit(prompt, 6, ()) for prompt in prompts]
            for _ in range(num_steps):
                engine.step()
            engine.abort(requests[1])
            engine.abort(requests[1])
            engine.manager.check()
            assert engine.is_finished(requests[1])
            texts = self.run(engine, [requests[0], requests[2]])
            assert texts == [expected[0], expected[2]]
            assert engine.output(requests[1]) == expected[1][: len(engine.output(requests[1]))]
            log.require_none()
            engine.close()

    def test_an_aborted_prompt_that_is_asked_again_gets_its_text(self) -> None:
        """What an abort left is right, however far it had come."""
        prompt = self.prompt(3 * self.block_size + 1, seed=3)
        expected = self.alone(prompt, 4)
        engine = self.open_engine(32)
        for num_steps in range(6):
            request = engine.submit(prompt, 4, ())
            for _ in range(num_steps):
                engine.step()
            engine.abort(request)
            assert self.run(engine, [engine.submit(prompt, 4, ())]) == [expected]
        engine.close()

    def test_nothing_is_reused_across_namespaces(self) -> None:
        """A tenant that asks what another has asked finds nothing, and gets the same text."""
        prompt = self.prompt(3 * self.block_size, seed=5)
        engine = self.open_engine(64)
        texts, hits = [], []
        for namespace in (*TENANTS, ("tenant", 2)):
            before = engine.manager.stats().num_hit_tokens
            texts += self.run(engine, [engine.submit(prompt, 4, namespace)])
            hits.append(engine.manager.stats().num_hit_tokens - before)
        assert texts == [self.alone(prompt, 4)] * 3
        assert hits == [0, 0, 0]
        engine.close()

    def test_a_request_that_can_never_fit_is_refused_and_the_others_run(self) -> None:
        """It is told at once, or ends without text; it does not wait for ever, nor does anybody behind it."""
        engine = self.open_engine(6)
        log = HolderLog(engine.manager)
        first = engine.submit(self.prompt(5), 3, ())
        try:
            never = engine.submit(self.prompt(40 * self.block_size), 3, ())
        except KvistError:
            never = None
        behind = engine.submit(self.prompt(4, seed=4), 3, ())
        waited_for = [first, behind] if never is None else [first, never, behind]
        texts = self.run(engine, waited_for)
        assert [texts[0], texts[-1]] == self.all_alone([self.prompt(5), self.prompt(4, seed=4)], [3, 3])
        log.require_none()
        engine.close()

    def test_everything_comes_back_when_all_have_ended(self) -> None:
        """Round after round, no block and no row is lost, and no sequence forgotten."""
        prompts, limits = self.conversations(9), [1 + number % 5 for number in range(9)]
        engine = self.open_engine(self.pressed(prompts, limits) + 2)
        log = HolderLog(engine.manager)
        for _ in range(3):
            self.run(engine, [engine.submit(p, n, TENANTS[n % 2]) for p, n in zip(prompts, limits, strict=True)])
            log.require_none()
        engine.close()

    def test_another_manager_that_is_told_the_same_comes_to_the_same(self) -> None:
        """Every call decides by what it is given, so that the ranks of a job stay together."""
        prompts, limits = self.conversations(8), [4] * 8
        engine = self.open_engine(self.pressed(prompts, limits), tiers=[HostTier(num_blocks=6)] * self.has_tiers)
        with Twin(engine.manager) as twin:
            self.run(engine, [engine.submit(p, n, ()) for p, n in zip(prompts, limits, strict=True)])
            assert twin.manager.digest() == engine.manager.digest()
            assert twin.num_calls > len(prompts)
        engine.close()

    def test_events_tell_what_is_cached_after_every_step(self) -> None:
        """Whoever follows them can route by them."""
        prompts, limits = self.conversations(8), [4] * 8
        engine = self.open_engine(self.pressed(prompts, limits), event_buffer=10_000)
        replay = EventReplay(engine.manager)
        requests = [engine.submit(p, n, TENANTS[n % 2]) for p, n in zip(prompts, limits, strict=True)]
        for _ in range(self.max_steps):
            if all(engine.is_finished(request) for request in requests):
                break
            engine.step()
            replay.check()
        assert replay.num_events > 0
        engine.close()

    def test_what_goes_down_to_host_memory_comes_up_as_it_was(self) -> None:
        """Evicted and brought back again and again."""
        if not self.has_tiers:
            return
        prompts, limits = self.conversations(10), [5] * 10
        engine = self.open_engine(self.pressed(prompts, limits), tiers=[HostTier(num_blocks=10)])
        texts = []
        for prompt, limit in zip(prompts * 2, limits * 2, strict=True):
            texts += self.run(engine, [engine.submit(prompt, limit, ())])
        assert texts == self.all_alone(prompts, limits) * 2
        engine.close()

    def test_after_a_restart_what_is_on_disk_gives_the_same_text(self, tmp_path: Path) -> None:
        """A second engine reads what a first one wrote."""
        if not self.has_tiers:
            return
        prompt, tiers = self.prompt(5 * self.block_size + 1), [DiskTier(tmp_path / "disk", "16 MiB", timeout_s=60.0)]
        texts, num_hits = list[list[int]](), 0
        for _ in range(2):
            engine = self.open_engine(32, tiers=tiers)
            texts += self.run(engine, [engine.submit(prompt, 4, ())])
            assert engine.manager.flush(60.0)
            num_hits = engine.manager.stats().num_hit_tokens
            engine.close()
        assert texts == [self.alone(prompt, 4)] * 2
        assert num_hits >= self.block_size

    def test_a_store_that_hangs_lies_or_dies_costs_time_and_no_token(self) -> None:
        """Each fault for a while, with requests before, during and after it."""
        if not self.has_tiers:
            return
        prompts = self.conversations(4)
        expected = self.all_alone(prompts, [3] * 4)
        tier = RemoteTier(url=FAULTY_URL, timeout_s=0.05)
        for fault in ("hang", "die", "lose", *LIES):
            with faulty_stores() as stores:
                engine = self.open_engine(self.pressed(prompts, [3] * 4), tiers=[tier])
                log = HolderLog(engine.manager)
                for state in ("well", fault, "well"):
                    _let(stores[0], state)
                    requests = [engine.submit(prompt, 3, ()) for prompt in prompts]
                    assert self.run(engine, requests) == expected, f"with a store that is to {state}"
                    engine.manager.flush(0.0)
                log.require_none()
                engine.close()


def _let(store: FaultyStore, state: str) -> None:
    """Let a store be well, or have a fault."""
    store.release()
    store.revive()
    store.be_honest()
    if state == "hang":
        store.hold("get", "contains", "put")
    elif state in ("die", "lose"):
        store.die(keeps=state == "die")
    elif state != "well":
        store.lie(state)
