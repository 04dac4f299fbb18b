"""The engine with slower tiers: the tokens of `transformers`, whatever was demoted, stored, fetched and lost."""

import threading
from functools import cache

import pytest
import torch
from tests.serve.models import tiny_model
from tests.serve.test_engine import conversations, pools, prompt_of, reference, tokens_of

from kvist import DiskTier, HostTier, RemoteTier
from kvist.serve import Engine, SamplingParams, cache_config
from kvist.serve.transformers import PagedCache
from kvist.tiers import opening
from kvist.tiers.simulated import SimulatedStore

KINDS = ("llama", "gemma3_text", "qwen3_next", "falcon_h1")
PATIENT = 60.0
"""Seconds: a limit that is not reached, however busy the machine."""

shared_model = cache(tiny_model)


@cache
def work(kind):
    """Prompts, limits and the tokens of `transformers`."""
    prompts, limits = list(conversations(12, seed=1)), [4 + 7 * index % 29 for index in range(12)]
    model = shared_model(kind)
    return prompts, limits, [reference(model, *each) for each in zip(prompts, limits, strict=True)]


def pressed(kind, tiers, **settings):
    """An engine with about as many blocks as the longest request needs, so that it preempts and evicts all the time."""
    prompts, limits, _ = work(kind)
    longest = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
    model = shared_model(kind)
    num_blocks = pools(model, full=round(1.2 * longest / 4), sliding=18, chunked=18, state=4)
    config = cache_config(model, num_blocks=num_blocks, block_size=4, max_sequences=8, tiers=tiers, **settings)
    return Engine(model, config, max_step_tokens=48)


def run(engine, kind):
    """Do all the work, and return the generations."""
    prompts, limits, expected = work(kind)
    generations = [
        engine.submit(prompt, SamplingParams(max_new_tokens=limit))
        for prompt, limit in zip(prompts, limits, strict=True)
    ]
    while engine.has_work:
        engine.step()
        engine.manager.check()
    assert tokens_of(generations) == expected
    return generations


def num_cached(generations):
    return sum(generation.stats.num_cached_tokens for generation in generations)


@pytest.mark.parametrize("write", ["through", "back"])
@pytest.mark.parametrize("order", ["layer_major", "block_major"])
@pytest.mark.parametrize("kind", KINDS)
def test_pressed_tokens_are_those_of_transformers_with_host_memory(kind, order, write):
    with pressed(kind, [HostTier(num_blocks=40, write=write)], storage_order=order) as engine:
        generations = run(engine, kind)
        (host,) = engine.manager.stats().tiers
    assert sum(generation.stats.num_preemptions for generation in generations) > 0
    assert host.num_demoted_blocks > 0
    assert (host.num_copied_blocks > 0) == (write == "through")


@pytest.mark.parametrize("write", ["through", "back"])
@pytest.mark.parametrize("kind", KINDS)
def test_pressed_tokens_are_those_of_transformers_with_every_tier(kind, write, tmp_path):
    tiers = [
        HostTier(num_blocks=20, write=write),
        DiskTier(tmp_path, "8 MiB", write=write, timeout_s=PATIENT),
        RemoteTier("memory://", write=write, timeout_s=PATIENT),
    ]
    with pressed(kind, tiers) as engine:
        run(engine, kind)
        assert engine.manager.flush(PATIENT)
        assert engine.manager.store_stats()["disk"].num_errors == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_one_engine_computed_the_next_finds_on_disk(kind, tmp_path):
    with pressed(kind, [DiskTier(tmp_path, "8 MiB", timeout_s=PATIENT)]) as engine:
        before = run(engine, kind)
        assert engine.manager.flush(PATIENT)
    with pressed(kind, [DiskTier(tmp_path, "8 MiB", timeout_s=PATIENT)]) as engine:
        after = run(engine, kind)
        assert engine.manager.store_stats()["disk"].num_hits > 0
    assert num_cached(after) > num_cached(before)
    assert after[0].stats.num_cached_tokens > before[0].stats.num_cached_tokens == 0


def test_another_model_finds_nothing_in_the_store_of_the_first(monkeypatch):
    shared = {}
    monkeypatch.setitem(opening.SCHEMES, "shared", lambda _, format, __: shared.setdefault(format.model, Kept(format)))
    prompt = prompt_of(50)
    cached = []
    for seed in (0, 1, 0):
        model = tiny_model("llama", seed=seed)
        config = cache_config(
            model, num_blocks=64, block_size=4, max_sequences=2, tiers=[RemoteTier("shared://", timeout_s=PATIENT)]
        )
        with Engine(model, config) as engine:
            (generation,) = engine.generate([prompt], SamplingParams(max_new_tokens=4))
            assert engine.manager.flush(PATIENT)
        assert generation.token_ids == reference(model, prompt, 4)
        cached.append(generation.stats.num_cached_tokens)
    assert cached == [0, 0, 48]
    assert len(shared) == 2


class Kept(SimulatedStore):
    """A store that outlives those who close it."""

    def close(self):
        pass


class Held(Kept):
    """A store whose answers wait until the test lets them go."""

    def __init__(self, format):
        super().__init__(format)
        self.may_answer, self.is_asked = threading.Event(), threading.Event()
        self.may_answer.set()
        self.num_looks, self.got = 0, []

    def get(self, keys, buffers):
        self.got += keys
        return super().get(keys, buffers)

    def contains(self, keys):
        self.num_looks += 1
        self.is_asked.set()
        self.may_answer.wait(PATIENT)
        return super().contains(keys)


@pytest.fixture
def held(monkeypatch):
    """Settings of a tier whose store the test holds back, once something was put there."""
    stores = []

    def opened(_, format, timeout_s):
        stores.append(stores[0] if stores else Held(format))
        return stores[-1]

    monkeypatch.setitem(opening.SCHEMES, "held", opened)
    yield stores
    for store in stores:
        store.may_answer.set()


def engine_on(model, timeout_s=PATIENT, **settings):
    config = cache_config(
        model, num_blocks=64, block_size=4, max_sequences=4, tiers=[RemoteTier("held://", timeout_s=timeout_s)]
    )
    return Engine(model, config, max_step_tokens=64, **settings)


def test_others_run_while_a_request_waits_for_a_store(held):
    model = shared_model("llama")
    prompt, other = prompt_of(40), prompt_of(9, seed=1)
    with engine_on(model) as engine:
        engine.generate([prompt], SamplingParams(max_new_tokens=2))
        assert engine.manager.flush(PATIENT)
    with engine_on(model) as engine:
        running = engine.submit(other, SamplingParams(max_new_tokens=8))
        while not engine.scheduler.running:
            engine.step()
        held[0].may_answer.clear()
        held[0].is_asked.clear()
        waiting = engine.submit(prompt, SamplingParams(max_new_tokens=2))
        assert held[0].is_asked.wait(PATIENT)
        while engine.scheduler.running:
            engine.step()
        assert (running.token_ids, waiting.token_ids) == (reference(model, other, 8), [])
        held[0].may_answer.set()
        while engine.has_work:
            engine.step()
        assert waiting.stats.num_cached_tokens == 36
        assert waiting.token_ids == reference(model, prompt, 2)


def test_a_request_whose_time_is_over_is_computed(held):
    model = shared_model("llama")
    prompt = prompt_of(40)
    with engine_on(model) as engine:
        engine.generate([prompt], SamplingParams(max_new_tokens=2))
        assert engine.manager.flush(PATIENT)
    with engine_on(model, timeout_s=0.05) as engine:
        held[0].may_answer.clear()
        num_looks = held[0].num_looks
        late = engine.submit(prompt, SamplingParams(max_new_tokens=2))
        while engine.has_work:  # the store is held back all the time
            engine.step()
        assert late.stats.num_cached_tokens == 0
        assert late.token_ids == reference(model, prompt, 2)
        assert held[0].num_looks == num_looks + 1, "its admission does not ask again"
        assert engine.manager.store_stats()["held"].num_timeouts > 0
        held[0].may_answer.set()


def test_requests_that_wait_for_the_same_prefix_get_it_once(held):
    model = shared_model("llama")
    prefix = prompt_of(40)
    prompts = [[*prefix, *prompt_of(9, seed=seed)] for seed in range(1, 4)]
    with engine_on(model) as engine:
        engine.generate([prefix], SamplingParams(max_new_tokens=2))
        assert engine.manager.flush(PATIENT)
    with engine_on(model) as engine:
        held[0].may_answer.clear()
        held[0].got.clear()
        waiting = [engine.submit(prompt, SamplingParams(max_new_tokens=4)) for prompt in prompts]
        assert held[0].is_asked.wait(PATIENT)
        held[0].may_answer.set()
        while engine.has_work:
            engine.step()
        assert tokens_of(waiting) == [reference(model, prompt, 4) for prompt in prompts]
        assert all(generation.stats.num_cached_tokens >= 40 for generation in waiting)
        assert len(held[0].got) == len(set(held[0].got)) == 10


def test_a_request_that_waits_can_be_aborted_and_closing_aborts_all(held):
    model = shared_model("llama")
    engine = engine_on(model)
    held[0].may_answer.clear()
    aborted, closed = (engine.submit(prompt_of(40, seed=seed)) for seed in (0, 1))
    engine.abort(aborted)
    held[0].may_answer.set()
    engine.close()
    engine.close()
    assert (aborted.finish_reason, closed.finish_reason) == ("aborted", "aborted")
    assert not engine.has_work


def test_the_engine_tells_the_manager_how_fast_it_computes_prompts(tmp_path):
    ticks = iter(range(1000))
    model = shared_model("llama")
    config = cache_config(model, num_blocks=64, block_size=4, max_sequences=2, tiers=[DiskTier(tmp_path, "8 MiB")])
    with Engine(model, config, max_step_tokens=128, clock=lambda: next(ticks)) as engine:
        assert engine.manager.prefill_tokens_per_s is None
        engine.generate([prompt_of(100)], SamplingParams(max_new_tokens=3))
        assert engine.manager.prefill_tokens_per_s == 100


@pytest.mark.parametrize("kind", KINDS)
def test_a_paged_cache_finds_on_disk_what_an_earlier_one_computed(kind, tmp_path):
    model = tiny_model(kind)
    prompt = torch.tensor([prompt_of(60)])
    expected = model.generate(prompt, max_new_tokens=8, do_sample=False).tolist()
    cached = []
    for _ in range(2):
        tiers = [HostTier(num_blocks=20), DiskTier(tmp_path, "8 MiB", timeout_s=PATIENT)]
        with PagedCache(model, num_blocks=60, block_size=4, tiers=tiers) as paged:
            assert model.generate(prompt, cache=paged, max_new_tokens=8, do_sample=False).tolist() == expected
            cached += paged.num_cached_tokens
            paged.reset()
            assert paged.manager.flush(PATIENT)
    assert cached[0] == 0
    assert cached[1] >= 56


def test_a_paged_cache_shares_nothing_across_a_change_of_weights(tmp_path):
    model, prompt = tiny_model("llama"), torch.tensor([prompt_of(60)])

    def cached_tokens():
        """Of a prompt in a new cache, and whether the text is that of `transformers`."""
        with PagedCache(model, num_blocks=60, block_size=4, tiers=[DiskTier(tmp_path, timeout_s=PATIENT)]) as paged:
            return once(paged)

    def once(paged):
        expected = model.generate(prompt, max_new_tokens=4, do_sample=False).tolist()
        assert model.generate(prompt, cache=paged, max_new_tokens=4, do_sample=False).tolist() == expected
        paged.reset()
        assert paged.manager.flush(PATIENT)
        return paged.num_cached_tokens[0] if paged.num_cached_tokens else paged.num_skipped_tokens[0]

    assert cached_tokens() == 0
    weight = model.model.layers[0].self_attn.k_proj.weight
    with PagedCache(model, num_blocks=60, block_size=4, tiers=[DiskTier(tmp_path, timeout_s=PATIENT)]) as paged:
        assert once(paged) >= 56
        with torch.no_grad():
            weight *= 2
        assert once(paged) == 0
        assert once(paged) >= 56
        with torch.no_grad():
            weight /= 2
    assert cached_tokens() >= 56
