from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import transformers
from tests.serve.models import HYBRID_KINDS, STATE_KINDS, TINY_KINDS, VOCAB_SIZE, WINDOW, tiny_model

from kvist import AttentionSpec, NeverFits, StateSpec
from kvist.errors import ArgumentError, ConfigError, LayoutError
from kvist.serve import Engine, SamplingParams, cache_config
from kvist.serve import engine as module
from kvist.serve.attention import ATTENTION_NAME, using_paged_attention
from kvist.serve.sampling import Sampler, candidates, choose_tokens

ALL_KINDS = (*TINY_KINDS, *HYBRID_KINDS, *STATE_KINDS)

shared_model = cache(tiny_model)


@pytest.fixture
def model():
    return shared_model("llama")


def engine(model, *, num_blocks=64, max_sequences=8, max_step_tokens=64, block_size=4, **settings):
    config = cache_config(model, num_blocks=num_blocks, block_size=block_size, max_sequences=max_sequences, **settings)
    return Engine(model, config, max_step_tokens=max_step_tokens)


def pools(model, **num_blocks):
    """Blocks by group, given by kind."""
    return [num_blocks[group.kind] for group in cache_config(model, num_blocks=1).groups]


def prompt_of(length, seed=0):
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).tolist()


def reference(model, prompt, max_new_tokens, **settings):
    """What `transformers` alone generates, one prompt at a time, with its own cache and attention."""
    inputs = torch.tensor([prompt])
    output = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=max_new_tokens, do_sample=False, **settings
    )
    return output[0, len(prompt) :].tolist()


def tokens_of(generations):
    return [generation.token_ids for generation in generations]


def conversations(num_requests, seed=0):
    """Prompts as a tool-using agent makes them: one long system prompt, a few users, turns that grow and part ways."""
    random = np.random.default_rng(seed)
    system = random.integers(3, VOCAB_SIZE, 96).tolist()
    threads = [[] for _ in range(6)]
    for turn in range(num_requests):
        thread = threads[turn % len(threads)]
        if random.random() < 0.2:
            del thread[len(thread) // 2 :]
        thread += random.integers(3, VOCAB_SIZE, random.integers(1, 30)).tolist()
        yield system + thread


def test_tokens_under_constant_preemption_and_eviction_are_those_of_transformers(model):
    prompts, limits = list(conversations(24)), [4 + 7 * index % 29 for index in range(24)]
    longest = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
    pressed = engine(model, num_blocks=round(1.2 * longest / 4), max_step_tokens=48)
    generations = [
        pressed.submit(prompt, SamplingParams(max_new_tokens=limit))
        for prompt, limit in zip(prompts, limits, strict=True)
    ]
    while pressed.has_work:
        pressed.step()
        pressed.manager.check()
    assert tokens_of(generations) == [
        reference(model, prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)
    ]
    assert sum(generation.stats.num_preemptions for generation in generations) >= 10
    assert pressed.manager.stats().num_evicted_blocks >= 100
    assert sum(generation.stats.num_cached_tokens for generation in generations) >= 1000


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_on_each_kind_of_model_pressed_tokens_are_those_of_transformers(kind):
    model = shared_model(kind)
    prompts, limits = list(conversations(12, seed=1)), [4 + 7 * index % 29 for index in range(12)]
    longest = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
    # A window of 13 tokens and a chunk of 48 take 16 blocks of 4.
    num_blocks = pools(model, full=round(1.2 * longest / 4), sliding=18, chunked=18, state=4)
    pressed = engine(model, num_blocks=num_blocks, max_step_tokens=48)
    generations = [
        pressed.submit(prompt, SamplingParams(max_new_tokens=limit))
        for prompt, limit in zip(prompts, limits, strict=True)
    ]
    while pressed.has_work:
        pressed.step()
        pressed.manager.check()
    assert tokens_of(generations) == [
        reference(model, prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)
    ]
    assert pressed.manager.stats().num_evicted_blocks > 0
    assert sum(generation.stats.num_cached_tokens for generation in generations) > 4 * WINDOW
    assert sum(generation.stats.num_preemptions for generation in generations) > 0


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_mixed_batch_on_each_kind_of_model_yields_the_tokens_of_transformers(kind):
    model = shared_model(kind)
    prompts = [*(prompt_of(length, seed=length) for length in (1, 7, WINDOW, WINDOW + 1, 50)), prompt_of(50)[:30]]
    generations = engine(model, num_blocks=100, max_step_tokens=40).generate(prompts, SamplingParams(max_new_tokens=14))
    assert tokens_of(generations) == [reference(model, prompt, 14) for prompt in prompts]
    assert len({tuple(generation.token_ids) for generation in generations}) == len(prompts)


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("max_step_tokens", [8, 200])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "llama4_text", "falcon_h1"])
def test_block_size_and_chunking_change_no_token(kind, block_size, max_step_tokens):
    model = shared_model(kind)
    prompts = [prompt_of(45), prompt_of(45)[:30] + prompt_of(20, seed=5), prompt_of(9, seed=6)]
    runs = engine(model, num_blocks=240 // block_size, block_size=block_size, max_step_tokens=max_step_tokens)
    assert tokens_of(runs.generate(prompts, SamplingParams(max_new_tokens=6))) == [
        reference(model, prompt, 6) for prompt in prompts
    ]


def test_a_second_request_computes_only_what_is_new(model):
    runs, document = engine(model), prompt_of(50)
    first = runs.generate([[*document, 7]], SamplingParams(max_new_tokens=3))[0]
    second = runs.generate([[*document, 9]], SamplingParams(max_new_tokens=3))[0]
    assert (first.stats.num_cached_tokens, second.stats.num_cached_tokens) == (0, 50)
    assert second.token_ids == reference(model, [*document, 9], 3)
    assert runs.generate([[*document, 9]], SamplingParams(max_new_tokens=3))[0].stats.num_cached_tokens == 50


def test_reuse_off_and_other_namespaces_compute_everything(model):
    runs, prompt = engine(model), prompt_of(20)
    for settings in [{}, {"reuse": False}, {"namespace": ("other",)}]:
        generation = runs.submit(prompt, SamplingParams(max_new_tokens=2), **settings)
        while runs.has_work:
            runs.step()
        assert generation.stats.num_cached_tokens == 0
        assert generation.token_ids == reference(model, prompt, 2)


@pytest.mark.parametrize("kind", ["gemma3_text", "gemma3n_text", "llama4_text", "deepseek_v3"])
def test_a_second_request_finds_what_lies_in_every_layers_span(kind):
    model = shared_model(kind)
    runs, document = engine(model), prompt_of(50)
    runs.generate([[*document, 7]], SamplingParams(max_new_tokens=3))
    second = runs.generate([[*document, 9]], SamplingParams(max_new_tokens=3))[0]
    assert second.stats.num_cached_tokens == 50
    assert second.token_ids == reference(model, [*document, 9], 3)


@pytest.mark.parametrize("kind", STATE_KINDS)
def test_a_second_request_goes_on_from_a_state_at_a_block_boundary(kind):
    model = shared_model(kind)
    runs, document = engine(model), prompt_of(50)
    firsts = [runs.generate([[*document, token]], SamplingParams(max_new_tokens=3))[0] for token in (7, 9, 9)]
    # The first leaves a state where it generates from, 48 tokens. A prompt that parts from it earlier leaves one there.
    assert [each.stats.num_cached_tokens for each in firsts] == [0, 48, 48]
    assert firsts[1].token_ids == firsts[2].token_ids == reference(model, [*document, 9], 3)
    others = [
        runs.generate([[*document[:30], *prompt_of(20, seed=seed)]], SamplingParams(max_new_tokens=3))[0]
        for seed in (1, 2)
    ]
    assert [each.stats.num_cached_tokens for each in others] == [0, 28]
    assert others[1].token_ids == reference(model, [*document[:30], *prompt_of(20, seed=2)], 3)


def test_states_are_kept_at_the_distance_asked_for():
    model = shared_model("qwen3_next")
    runs, document = engine(model, checkpoint_tokens=16), prompt_of(50)
    runs.generate([document], SamplingParams(max_new_tokens=1))
    other = runs.generate([document[:40]], SamplingParams(max_new_tokens=3))[0]
    assert other.stats.num_cached_tokens == 32
    assert other.token_ids == reference(model, document[:40], 3)


def test_groups_may_share_one_pool():
    model = shared_model("gemma3_text")
    prompts = list(conversations(8))
    runs = engine(model, num_blocks=100, shared_pool=True)
    assert runs.manager.config.pool_num_blocks == (100,)
    assert tokens_of(runs.generate(prompts, SamplingParams(max_new_tokens=5))) == [
        reference(model, prompt, 5) for prompt in prompts
    ]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3", "falcon_h1"])
def test_a_stale_value_that_is_not_finite_reaches_no_other_request(kind):
    model = shared_model(kind)
    runs = engine(model)
    for layer in range(runs.memory.num_layers):
        for plane in planes(runs.memory, layer):
            plane.fill_(float("nan"))
    prompts = [prompt_of(30), prompt_of(17, seed=1), prompt_of(18, seed=2)]
    assert tokens_of(runs.generate(prompts, SamplingParams(max_new_tokens=5))) == [
        reference(model, prompt, 5) for prompt in prompts
    ]


def planes(memory, layer):
    try:
        return memory.states(layer)
    except LayoutError:
        return memory.keys(layer), memory.values(layer)


def test_stop_tokens_end_the_text_as_in_transformers(model):
    prompt = prompt_of(12)
    text = reference(model, prompt, 12)
    stop = text[6]
    generation = engine(model).generate([prompt], SamplingParams(max_new_tokens=12, stop_token_ids=(stop,)))[0]
    assert generation.token_ids == reference(model, prompt, 12, eos_token_id=stop) == text[: text.index(stop) + 1]
    assert generation.finish_reason == "stop"


def test_the_stop_tokens_of_the_model_are_the_default(model):
    stopping = tiny_model("llama")
    prompt = prompt_of(12)
    text = reference(model, prompt, 12)
    stopping.generation_config.eos_token_id = [text[4], text[8]]
    generation = engine(stopping).generate([prompt], SamplingParams(max_new_tokens=12))[0]
    assert generation.token_ids == text[: min(text.index(text[4]), text.index(text[8])) + 1]
    unstopped = engine(stopping).generate([prompt], SamplingParams(max_new_tokens=12, stop_token_ids=()))[0]
    assert unstopped.token_ids == text


def test_stream_yields_tokens_as_they_come_and_takes_the_others_along(model):
    runs = engine(model)
    other = runs.submit(prompt_of(5, seed=1), SamplingParams(max_new_tokens=3))
    events = []
    for event in runs.stream(prompt_of(9), SamplingParams(max_new_tokens=4)):
        assert event.generation.stats.num_generated_tokens == event.index + 1
        events.append(event)
    assert [event.token for event in events] == reference(model, prompt_of(9), 4)
    assert [event.index for event in events] == [0, 1, 2, 3]
    assert [event.finish_reason for event in events] == [None, None, None, "length"]
    assert other.token_ids == reference(model, prompt_of(5, seed=1), 3)


def test_two_streams_may_be_read_in_turn(model):
    runs = engine(model)
    prompts = [prompt_of(9), prompt_of(14, seed=1)]
    streams = [runs.stream(prompt, SamplingParams(max_new_tokens=5)) for prompt in prompts]
    pairs = [[event.token for event in pair] for pair in zip(*streams, strict=True)]
    assert [list(text) for text in zip(*pairs, strict=True)] == [reference(model, prompt, 5) for prompt in prompts]


def test_closing_a_stream_aborts_its_request_and_frees_its_blocks(model):
    runs = engine(model)
    stream = runs.stream(prompt_of(9), SamplingParams(max_new_tokens=50))
    generation = next(stream).generation
    stream.close()
    assert generation.finish_reason == "aborted"
    assert len(generation.token_ids) == 1
    assert not runs.has_work
    assert runs.manager.num_free_blocks == 64


def test_a_stream_that_was_never_read_can_be_aborted(model):
    runs = engine(model)
    generation = runs.submit(prompt_of(9))
    runs.abort(generation)
    runs.abort(generation)
    assert (generation.finish_reason, generation.token_ids) == ("aborted", [])
    assert runs.step() == []
    assert not runs._generations


def test_aborting_one_request_leaves_the_others_alone(model):
    runs = engine(model)
    aborted, kept = (runs.submit(prompt_of(20, seed=seed), SamplingParams(max_new_tokens=6)) for seed in (0, 1))
    runs.step()
    runs.abort(aborted)
    while runs.has_work:
        runs.step()
    assert kept.token_ids == reference(model, prompt_of(20, seed=1), 6)


def test_a_request_that_can_never_fit_is_refused_and_leaves_nothing_behind(model):
    runs = engine(model, num_blocks=8)
    with pytest.raises(
        NeverFits, match="30 prompt tokens and 4 new ones need 9 blocks of 4 tokens, but the whole cache has 8"
    ):
        runs.generate([prompt_of(5), prompt_of(30)], SamplingParams(max_new_tokens=4))
    assert not runs.has_work
    assert not runs._generations
    assert runs.manager.num_free_blocks == 8


@pytest.mark.parametrize("prompt", [[], [VOCAB_SIZE], [-1], [3, 2**40]])
def test_tokens_that_the_model_has_not_are_refused(model, prompt):
    runs = engine(model)
    with pytest.raises(ArgumentError, match="token"):
        runs.submit(prompt)
    assert not runs.has_work


def test_statistics_are_counted_by_the_clock_given(model):
    ticks = iter(range(100, 200))
    config = cache_config(model, num_blocks=64, block_size=4, max_sequences=4)
    runs = Engine(model, config, max_step_tokens=16, clock=lambda: next(ticks))
    generation = runs.submit(prompt_of(20), SamplingParams(max_new_tokens=2))
    assert generation.stats.num_cached_tokens is None
    assert generation.stats.time_to_first_token_s is None
    while runs.has_work:
        runs.step()
    stats = generation.stats
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_generated_tokens) == (20, 0, 2)
    # Submitted at 100; the steps end at 101 (16 tokens), 102 (4 tokens, the first new one) and 103.
    assert (stats.time_to_first_token_s, stats.duration_s) == (2, 3)
    assert repr(generation) == "Generation(20 prompt tokens, 2 generated, finish_reason='length')"


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
def test_a_failed_step_can_be_run_again(kind, monkeypatch):
    model = shared_model(kind)
    runs = engine(model, max_step_tokens=16)
    generation = runs.submit(prompt_of(20), SamplingParams(max_new_tokens=4))
    while runs.has_work:
        # What is computed twice is written twice; states must be as they were.
        with monkeypatch.context() as patched:
            patched.setattr(module, "choose_tokens", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                runs.step()
        runs.step()
    assert generation.token_ids == reference(model, prompt_of(20), 4)


SAMPLED = SamplingParams(max_new_tokens=10, temperature=1.5, top_k=50, top_p=0.95, seed=11)


def test_sampled_text_is_the_same_whatever_else_is_in_the_batch(model):
    prompt = prompt_of(20)
    alone = engine(model).generate([prompt], SAMPLED)[0].token_ids
    pressed = engine(model, num_blocks=12, max_step_tokens=16)
    others = [pressed.submit(prompt_of(12, seed=seed), SamplingParams(max_new_tokens=20)) for seed in (1, 2)]
    sampled = pressed.submit(prompt, SAMPLED)
    while pressed.has_work:
        pressed.step()
    assert sampled.token_ids == alone
    assert sampled.stats.num_preemptions + others[1].stats.num_preemptions > 0
    assert alone != reference(model, prompt, 10)


def test_another_seed_gives_another_text_and_no_seed_a_new_one(model):
    prompt = prompt_of(20)
    texts = [
        tuple(
            engine(model).generate([prompt], SamplingParams(max_new_tokens=10, temperature=1.5, seed=seed))[0].token_ids
        )
        for seed in (1, 2, None, None)
    ]
    assert len(set(texts)) == 4


@pytest.mark.parametrize(
    ("top_k", "top_p", "temperature"), [(5, 1.0, 1.0), (None, 0.6, 0.7), (20, 0.9, 2.0), (1, 1.0, 1.0)]
)
def test_the_tokens_that_may_be_drawn_are_those_of_transformers(top_k, top_p, temperature):
    logits = torch.randn(64, generator=torch.Generator().manual_seed(3)) * 2
    tokens, probabilities = candidates(logits, SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p))
    warpers = [transformers.TemperatureLogitsWarper(temperature), transformers.TopKLogitsWarper(top_k or 64)]
    expected = logits[None]
    for warper in [*warpers, transformers.TopPLogitsWarper(top_p)]:
        expected = warper(None, expected)
    expected = expected[0].double().softmax(0)
    assert sorted(tokens.tolist()) == expected.nonzero().flatten().tolist()
    torch.testing.assert_close(probabilities, expected[tokens], rtol=1e-5, atol=1e-7)


def test_draws_follow_the_probabilities():
    logits = torch.tensor([0.5, 0.2, 0.3]).log()
    sampler = Sampler(SamplingParams(temperature=1, seed=0))
    counts = np.bincount([sampler.choose(logits) for _ in range(2000)], minlength=3)
    assert np.abs(counts / 2000 - [0.5, 0.2, 0.3]).max() < 0.05


def test_greedy_and_sampled_rows_share_a_batch():
    logits = torch.tensor([[0.0, 9.0, 1.0], [0.0, 9.0, 1.0]])
    greedy, drawn = Sampler(SamplingParams()), Sampler(SamplingParams(temperature=1, top_k=1, seed=0))
    assert choose_tokens(logits, [greedy, drawn]) == [1, 1]
    assert choose_tokens(logits[:0], []) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 0},
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"top_p": 0},
        {"top_p": 1.1},
        {"seed": -1},
    ],
    ids=str,
)
def test_sampling_settings_out_of_range_are_refused(settings):
    with pytest.raises(ArgumentError, match=next(iter(settings))):
        SamplingParams(**settings)


def test_the_model_attends_as_before_between_steps(model):
    before = model.config._attn_implementation
    runs = engine(model)
    runs.generate([prompt_of(5)], SamplingParams(max_new_tokens=2))
    assert model.config._attn_implementation == before != ATTENTION_NAME
    with pytest.raises(RuntimeError, match="stop"), using_paged_attention(model.config):
        assert model.config._attn_implementation == ATTENTION_NAME
        raise RuntimeError("stop")
    assert model.config._attn_implementation == before


def test_paged_attention_outside_an_engine_says_what_it_needs(model):
    with using_paged_attention(model.config), pytest.raises(ConfigError, match="needs the kvist_batch of an Engine"):
        model(input_ids=torch.tensor([[1, 2]]))


def test_finished_requests_leave_nothing_in_the_engine(model):
    runs = engine(model)
    runs.generate([prompt_of(5), prompt_of(6)], SamplingParams(max_new_tokens=2))
    assert not runs._generations
    assert runs.scheduler.running == runs.scheduler.waiting == ()


def test_the_cache_is_shaped_after_the_model(model):
    config = cache_config(model, num_blocks=10, block_size=8, max_sequences=3)
    assert len(config.layers) == 4
    assert (config.layers[0].num_kv_heads, config.layers[0].head_dim, config.layers[0].dtype) == (2, 16, "float32")
    assert (config.num_blocks, config.block_size, config.max_sequences, config.max_sequence_length) == (10, 8, 3, 4096)
    assert cache_config(model, num_blocks=1, max_sequence_length=100).max_sequence_length == 100


def test_windows_hold_no_more_than_a_steps_tokens_beside_their_own():
    assert engine(shared_model("gemma3_text"), max_step_tokens=24).manager.config.max_chunk_tokens == 24
    limited = engine(shared_model("gemma3_text"), max_step_tokens=24, max_chunk_tokens=10)
    assert limited.manager.config.max_chunk_tokens == 10
    generation = limited.submit(prompt_of(30), SamplingParams(max_new_tokens=1))
    assert [len(limited.step()) for _ in range(3)] == [0, 0, 1]
    assert generation.is_finished


def test_a_cache_of_another_shape_is_refused(model):
    other = cache_config(tiny_model("llama", num_key_value_heads=4), num_blocks=8)
    with pytest.raises(ConfigError, match=r"layers are not those of LlamaForCausalLM; use cache_config"):
        Engine(model, other)
    with pytest.raises(ConfigError, match="max_sequence_length is 5000, but the model has 4096 positions"):
        Engine(model, cache_config(model, num_blocks=8, max_sequence_length=5000))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("bloom", {"n_head": 4, "n_layer": 2}, "BloomForCausalLM takes no position_ids"),
        ("mamba", {}, "MambaForCausalLM takes no position_ids"),
        ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}, "forgets its recurrent states"),
    ],
)
def test_a_model_that_the_engine_cannot_run_is_refused(kind, changes, message):
    with pytest.raises(ConfigError, match=message):
        cache_config(tiny_model(kind, **changes), num_blocks=8)


def test_attention_outside_the_registry_is_refused(monkeypatch):
    model = tiny_model("llama")
    attention = model.model.layers[2].self_attn
    monkeypatch.setattr(attention, "forward", lambda hidden_states, cache=None, **_: (use(cache), None))

    def use(cache):
        if cache is not None:
            cache.update(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), 2)
        return torch.zeros(1, 1, 64)

    with pytest.raises(ConfigError, match=r"LlamaForCausalLM does not call its attention .* in layers \[2\]"):
        cache_config(model, num_blocks=8)


QUANTISED = ("float8_e4m3fn", "float8_e5m2", "int8", "int4")


def last_logits(runs, prompt):
    """The logits after a prompt, whose last chunk reads the others from the cache."""
    computed = []
    compute = runs._runner.compute
    runs._runner.compute = lambda chunks: computed.append(compute(chunks)) or computed[-1]
    runs.generate([prompt], SamplingParams(max_new_tokens=1))
    return computed[-1].logits[0]


def scaled(config, **scales):
    """Settings with scales for K and V."""
    return replace(
        config,
        layers=[replace(spec, **scales) if isinstance(spec, AttentionSpec) else spec for spec in config.layers],
    )


@pytest.mark.parametrize(("kv_dtype", "most"), [*zip(QUANTISED, (0.08, 0.16, 0.04, 0.6), strict=True)])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "deepseek_v3", "falcon_h1"])
def test_a_cache_of_few_bits_changes_the_logits_little(kind, kv_dtype, most):
    model = tiny_model(kind, initializer_range=0.05)
    prompt = prompt_of(60)
    config = cache_config(model, num_blocks=64, block_size=4, max_sequences=2, kv_dtype=kv_dtype)
    largest = max_cached(model, prompt)
    if "int" in kv_dtype:
        reach = 127 if kv_dtype == "int8" else 7
        config = scaled(config, k_scale=largest / reach, v_scale=largest / reach)
    logits = last_logits(Engine(model, config, max_step_tokens=16), prompt)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1]
    assert 0 < (logits - expected).norm() / expected.norm() < most
    plain = cache_config(model, num_blocks=64, block_size=4)
    assert config.groups[0].block_bytes < plain.groups[0].block_bytes / 3


def max_cached(model, prompt):
    """The largest number that attention caches of a prompt."""
    runs = engine(model)
    runs.generate([prompt], SamplingParams(max_new_tokens=1))
    kept = [runs.memory.views(index) for index, spec in enumerate(runs.manager.config.layers) if not states(spec)]
    return max(float(plane.abs().max()) for views in kept for plane in (views.keys(), views.values()))


def states(spec):
    return isinstance(spec, StateSpec)


@pytest.mark.parametrize("kind", ["gemma3n_text", "gpt_oss", "llama4_text", "lfm2"])
@pytest.mark.parametrize("kv_dtype", QUANTISED)
def test_every_kind_of_layer_runs_on_a_cache_of_few_bits(kind, kv_dtype):
    runs = engine(shared_model(kind), num_blocks=100, kv_dtype=kv_dtype, max_step_tokens=16)
    generations = runs.generate([prompt_of(40), prompt_of(40)], SamplingParams(max_new_tokens=5))
    assert [generation.num_tokens for generation in generations] == [5, 5]
    assert generations[1].stats.num_cached_tokens > 0


def test_a_dtype_that_keeps_other_numbers_is_refused(model):
    for kv_dtype in ("bfloat16", "float31"):
        with pytest.raises(ConfigError, match=f"kv_dtype is '{kv_dtype}', must be one of float8_e4m3fn, float8_e5m2"):
            cache_config(model, num_blocks=8, kv_dtype=kv_dtype)
    other = replace(cache_config(model, num_blocks=8), layers=[AttentionSpec(2, 16, "bfloat16")] * 4)
    with pytest.raises(ConfigError, match="layers are not those of LlamaForCausalLM"):
        Engine(model, other)


def test_rings_are_refused():
    model = shared_model("gemma3_text")
    with pytest.raises(ConfigError, match="ring is True, but the engine serves windows whose blocks go back"):
        Engine(model, cache_config(model, num_blocks=8, ring=True))


def test_a_model_is_used_in_evaluation_mode():
    training = tiny_model("llama", attention_dropout=0.5).train()
    prompt = prompt_of(8)
    assert engine(training).generate([prompt], SamplingParams(max_new_tokens=3))[0].token_ids == reference(
        shared_model("llama"), prompt, 3
    )


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        {"use_bidirectional_attention": True},
    ],
)
def test_models_whose_prefix_depends_on_what_follows_it_are_refused(change):
    model = tiny_model("llama")
    for name, value in change.items():
        setattr(model.config, name, value)
    with pytest.raises(ConfigError, match="depend on what follows it"):
        cache_config(model, num_blocks=4)
