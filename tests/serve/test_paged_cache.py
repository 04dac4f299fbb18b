"""PagedCache in plain `generate` calls: the default cache's tokens, with less computed when prompts share prefixes."""

import functools
import gc
import re

import numpy as np
import pytest
import torch
from tests.serve.models import HYBRID_KINDS, STATE_KINDS, TINY_KINDS, VOCAB_SIZE, WINDOW, tiny_config, tiny_model
from transformers import DynamicCache, MambaConfig, MambaForCausalLM, T5Config, T5ForConditionalGeneration

from kvist.config import StateSpec
from kvist.errors import ConfigError, NeverFits, OutOfBlocks, SequenceError
from kvist.serve.transformers import PagedCache
from kvist.serve.transformers import cache as module

BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def draft_model():
    return tiny_model("llama", seed=1)


@functools.cache
def model_of(kind):
    return tiny_model(kind, **_eager(kind))


@pytest.fixture
def cache(llama):
    with PagedCache(llama, num_blocks=200, block_size=BLOCK_SIZE) as cache:
        yield cache
        cache.reset()
        assert_nothing_held(cache)


def _eager(kind):
    """What a model of a kind that transformers can't run with sdpa needs."""
    return {"attn_implementation": "eager"} if kind in {"gemma2", "gpt_oss"} else {}


def assert_nothing_held(cache):
    cache.manager.check()
    assert cache.manager.num_free_blocks == cache.manager.num_blocks


def prompt(length, seed=0):
    """A prompt `[1, length]` of random tokens; a longer one of the same seed begins with a shorter one."""
    return torch.from_numpy(np.random.default_rng(seed).integers(3, VOCAB_SIZE, (1, length)))


def left_padded(*rows):
    width = max(row.shape[1] for row in rows)
    ids = torch.zeros((len(rows), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, width - row.shape[1] :] = row
        mask[index, width - row.shape[1] :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def text(model, *, seed=0, max_new_tokens=12, **settings):
    torch.manual_seed(seed)
    return model.generate(**{"do_sample": False, **settings}, max_new_tokens=max_new_tokens).tolist()


class Counted:
    """How many token embeddings a model looks up while this is entered: by forward `[rows, columns]`, and in all."""

    def __init__(self, model):
        self._embedding = model.get_input_embeddings()
        self.forwards = []

    @property
    def num_tokens(self):
        return sum(rows * columns for rows, columns in self.forwards)

    def _count(self, _, args):
        self.forwards.append(tuple(args[0].shape))

    def __enter__(self):
        self._hook = self._embedding.register_forward_pre_hook(self._count)
        return self

    def __exit__(self, *_):
        self._hook.remove()


# ---- the tokens of the default cache ---------------------------------------------------------------------------------

WAYS = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 1.5, "top_k": 50},
    "sampled twice": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3},
    "all beams": {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 0.5},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}
BATCHED = [way for way in WAYS if way != "prompt lookup"]


@pytest.mark.parametrize("way", WAYS)
def test_one_prompt_gives_the_default_tokens_cold_and_warm(llama, cache, way):
    ids = prompt(21)
    expected = text(llama, input_ids=ids, **WAYS[way])
    cold = text(llama, input_ids=ids, cache=cache, **WAYS[way])
    warm = text(llama, input_ids=ids, cache=cache, **WAYS[way])
    assert (cold, warm) == (expected, expected)
    assert cache.num_skipped_tokens[0] > 0


@pytest.mark.parametrize("way", BATCHED)
def test_left_padded_prompts_give_the_default_tokens_cold_and_warm(llama, cache, way):
    rows = left_padded(prompt(21), prompt(5, seed=1), prompt(13, seed=2), prompt(13, seed=2))
    expected = text(llama, **rows, **WAYS[way])
    cold = text(llama, **rows, cache=cache, **WAYS[way])
    warm = text(llama, **rows, cache=cache, **WAYS[way])
    assert (cold, warm) == (expected, expected)


def test_a_draft_models_guesses_give_the_default_tokens_cold_and_warm(llama, draft_model, cache):
    ids = prompt(19)
    expected = text(llama, input_ids=ids, max_new_tokens=24)
    for _ in range(2):
        assert text(llama, input_ids=ids, max_new_tokens=24, cache=cache, assistant_model=draft_model) == expected


def test_a_perfect_draft_model_gives_the_default_tokens(llama, cache):
    twin = tiny_model("llama")
    expected = text(llama, input_ids=prompt(19), max_new_tokens=24)
    assert text(llama, input_ids=prompt(19), max_new_tokens=24, cache=cache, assistant_model=twin) == expected


def test_an_end_token_stops_rows_at_different_times(llama, cache):
    rows = left_padded(prompt(9), prompt(12, seed=5))
    settings = {"eos_token_id": text(llama, **rows)[0][14], "pad_token_id": 0, "max_new_tokens": 20}
    expected = text(llama, **rows, **settings)
    assert 0 in expected[0][12:]
    for _ in range(2):
        assert text(llama, **rows, **settings, cache=cache) == expected


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_every_kind_of_model_reuses_a_shared_prefix(kind):
    model = tiny_model(kind)
    document = prompt(40)
    questions = [torch.cat([document, prompt(6, seed)], dim=1) for seed in (1, 2)]
    with PagedCache(model, num_blocks=100, block_size=BLOCK_SIZE) as cache:
        for question in questions:
            expected = text(model, input_ids=question)
            with Counted(model) as computed:
                assert text(model, input_ids=question, cache=cache) == expected
        assert computed.num_tokens == 6 + 11
        assert cache.num_cached_tokens == cache.num_skipped_tokens == [40]
        cache.reset()
        assert_nothing_held(cache)


def test_eager_attention_sees_the_same_masks():
    model = tiny_model("llama", attn_implementation="eager")
    rows = left_padded(prompt(21), prompt(5, seed=1))
    with PagedCache(model, num_blocks=100, block_size=BLOCK_SIZE) as cache:
        expected = text(model, **rows)
        assert [text(model, **rows, cache=cache) for _ in range(2)] == [expected, expected]


def test_bfloat16_models_are_served_in_their_own_dtype():
    model = tiny_model("llama").to(torch.bfloat16)
    with PagedCache(model, num_blocks=100, block_size=BLOCK_SIZE) as cache:
        assert cache.memory.keys(0).dtype == torch.bfloat16
        assert text(model, input_ids=prompt(21), cache=cache) == text(model, input_ids=prompt(21))


def test_random_calls_over_a_pool_that_evicts_all_the_time(llama):
    random = np.random.default_rng(3)
    num_skipped = 0
    with PagedCache(llama, num_blocks=40, block_size=BLOCK_SIZE) as cache:
        for call in range(40):
            way = str(random.choice(list(WAYS)))
            rows = [prompt(int(length), seed=int(random.integers(2))) for length in random.integers(1, 24, 3)]
            inputs = left_padded(*rows[: 1 if way not in {"greedy", "sampled"} else random.integers(1, 4)])
            settings = {**inputs, **WAYS[way], "max_new_tokens": int(random.integers(1, 8)), "seed": call}
            assert text(llama, **settings, cache=cache) == text(llama, **settings), (call, way)
            cache.manager.check()
            num_skipped += sum(cache.num_skipped_tokens)
        cache.reset()
        assert_nothing_held(cache)
    assert num_skipped > 100


# ---- windows, chunks, sinks, latents, shared layers and states -------------------------------------------------------

KINDS = (*HYBRID_KINDS, *STATE_KINDS)
# transformers has no assisted decoding for these two.
ASSISTED_KINDS = [kind for kind in KINDS if kind not in {"qwen3_next", "falcon_h1"}]


@pytest.fixture
def hybrid(request):
    """A cache of 200 blocks in each group, for the model of the kind that is asked for."""
    with PagedCache(model_of(request.param), num_blocks=200, block_size=BLOCK_SIZE) as cache:
        yield request.param, model_of(request.param), cache
        cache.reset()
        assert_nothing_held(cache)


def with_kinds(*kinds):
    return pytest.mark.parametrize("hybrid", kinds, indirect=True)


@with_kinds(*KINDS)
def test_prompts_longer_than_the_window_give_the_default_tokens_cold_and_warm(hybrid):
    _, model, cache = hybrid
    for way in BATCHED:
        settings = {"input_ids": prompt(30), "max_new_tokens": 6, **WAYS[way]}
        expected = text(model, **settings)
        assert [text(model, **settings, cache=cache) for _ in range(2)] == [expected, expected], way
        assert cache.num_skipped_tokens[0] >= 28, way


@with_kinds(*KINDS)
def test_left_padded_prompts_around_the_window_give_the_default_tokens_cold_and_warm(hybrid):
    _, model, cache = hybrid
    first = left_padded(prompt(30), prompt(5, seed=1), prompt(WINDOW, seed=2), prompt(WINDOW, seed=2))
    second = left_padded(torch.cat([prompt(24), prompt(7, seed=5)], dim=1), prompt(22))
    for way in ("greedy", "sampled", "beams"):
        for rows in (first, second):
            settings = {**rows, "max_new_tokens": 6, **WAYS[way]}
            expected = text(model, **settings)
            assert [text(model, **settings, cache=cache) for _ in range(2)] == [expected, expected], (way, len(rows))


@with_kinds(*ASSISTED_KINDS)
def test_guesses_taken_back_beyond_the_window_leave_the_default_tokens(hybrid, draft_model):
    kind, model, cache = hybrid
    twin = tiny_model(kind, **_eager(kind))
    helpers = [{"assistant_model": twin}, {"assistant_model": draft_model}, {"prompt_lookup_num_tokens": 3}]
    for length, some in ((5, helpers[:1]), (30, helpers)):
        settings = {"input_ids": prompt(length), "max_new_tokens": 12}
        expected = text(model, **settings)
        for helper in some:
            given = [text(model, **settings, cache=cache, **helper) for _ in range(2)]
            assert given == [expected, expected], (length, list(helper))


@with_kinds(*KINDS)
def test_a_conversation_goes_on_past_the_window_turn_by_turn(hybrid):
    _, model, cache = hybrid
    turn = prompt(6)
    for number in range(4):
        settings = {"input_ids": turn, "attention_mask": torch.ones_like(turn), "max_new_tokens": 8}
        expected = text(model, **settings)
        assert text(model, **settings, cache=cache) == expected, number
        assert cache.num_skipped_tokens[0] >= (number and turn.shape[1] - 6 - 2 * BLOCK_SIZE)
        turn = torch.cat([torch.tensor(expected), prompt(5, seed=10 + number)], dim=1)


@with_kinds(*KINDS)
def test_a_prompt_of_a_hybrid_prefilled_in_chunks_gives_the_default_tokens(hybrid):
    _, model, cache = hybrid
    for length in (30, 33):
        expected = text(model, input_ids=prompt(length), prefill_chunk_size=8)
        assert text(model, input_ids=prompt(length), prefill_chunk_size=8, cache=cache) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_random_calls_of_hybrids_over_pools_that_evict_all_the_time(kind):
    model, random, num_skipped = model_of(kind), np.random.default_rng(3), 0
    # Of states two more than three beams have.
    num_blocks = [40, 5] if kind in STATE_KINDS else 40
    with PagedCache(model, num_blocks=num_blocks, block_size=BLOCK_SIZE) as cache:
        for call in range(12):
            way = str(random.choice(list(WAYS if kind in ASSISTED_KINDS else BATCHED)))
            rows = [prompt(int(length), seed=int(random.integers(2))) for length in random.integers(1, 30, 3)]
            inputs = left_padded(*rows[: 1 if way not in {"greedy", "sampled"} else random.integers(1, 4)])
            settings = {**inputs, **WAYS[way], "max_new_tokens": int(random.integers(1, 8)), "seed": call}
            assert text(model, **settings, cache=cache) == text(model, **settings), (call, way)
            cache.manager.check()
            num_skipped += sum(cache.num_skipped_tokens)
        cache.reset()
        assert_nothing_held(cache)
    assert num_skipped > 20


@with_kinds("windowed mistral", "gemma3_text", "llama4_text", "qwen3_next", "falcon_h1", "lfm2")
def test_rows_that_are_behind_catch_up_with_those_that_have_more_in_the_pool(hybrid):
    _, model, cache = hybrid
    text(model, input_ids=prompt(30), cache=cache, max_new_tokens=1)
    rows = {"input_ids": torch.cat([prompt(30), prompt(30, seed=4)])}
    expected = text(model, **rows)
    with Counted(model) as computed:
        assert text(model, **rows, cache=cache) == expected
    found, nothing = cache.num_cached_tokens
    assert found >= 28
    assert nothing == 0
    assert cache.num_skipped_tokens == [found, 0]
    assert computed.num_tokens == found + 2 * (30 - found + 11)


@with_kinds("qwen3_next", "falcon_h1", "lfm2")
def test_a_state_is_kept_after_the_last_whole_block_before_a_prompts_last_token(hybrid):
    _, model, cache = hybrid
    with Counted(model) as computed:
        text(model, input_ids=prompt(33), cache=cache, max_new_tokens=1)
    assert computed.forwards == [(1, 32), (1, 1)]
    with Counted(model) as computed:
        text(model, input_ids=prompt(35), cache=cache, max_new_tokens=1)
    assert computed.forwards == [(1, 3)]


@with_kinds("qwen3_next", "falcon_h1", "lfm2")
def test_a_state_is_kept_where_two_prompts_part_so_that_the_third_finds_it(hybrid):
    _, model, cache = hybrid
    cached = []
    for seed in (1, 2, 3):
        question = torch.cat([prompt(20), prompt(9, seed)], dim=1)
        expected = text(model, input_ids=question)
        assert text(model, input_ids=question, cache=cache) == expected
        cached += cache.num_cached_tokens
    assert cached == [0, 0, 20]


@pytest.mark.parametrize("kind", STATE_KINDS)
def test_states_can_be_kept_at_regular_distances(kind):
    model = model_of(kind)
    with PagedCache(model, num_blocks=100, block_size=BLOCK_SIZE, checkpoint_tokens=8) as cache:
        assert {spec.checkpoint_tokens for spec in cache.manager.config.layers if isinstance(spec, StateSpec)} == {8}
        with Counted(model) as computed:
            text(model, input_ids=prompt(30), cache=cache, max_new_tokens=1)
        assert computed.forwards == [(1, 8), (1, 8), (1, 8), (1, 4), (1, 2)]
        question = torch.cat([prompt(20), prompt(9, seed=1)], dim=1)
        expected = text(model, input_ids=question)
        assert text(model, input_ids=question, cache=cache) == expected
        assert cache.num_cached_tokens == [16]


@with_kinds("windowed mistral", "gemma3n_text", "qwen3_next", "falcon_h1")
def test_beams_of_hybrids_with_different_prompts_share_what_is_cached(hybrid):
    _, model, cache = hybrid
    text(model, input_ids=prompt(30), cache=cache, max_new_tokens=1)
    rows = left_padded(torch.cat([prompt(24), prompt(9, seed=1)], dim=1), prompt(30), prompt(9, seed=2))
    expected = text(model, **rows, num_beams=3)
    assert [text(model, **rows, num_beams=3, cache=cache) for _ in range(2)] == [expected, expected]


def test_rows_whose_queries_are_scaled_by_column_reuse_what_had_as_much_padding():
    model = model_of("llama4_text")
    with PagedCache(model, num_blocks=100, block_size=BLOCK_SIZE) as cache:
        cached = []
        for other in (30, 30, 40, 20):
            rows = left_padded(prompt(20), prompt(other, seed=1))
            expected = text(model, **rows)
            assert text(model, **rows, cache=cache) == expected
            cached.append(cache.num_cached_tokens[0])
        assert cached == [0, 19, 0, 0]


# ---- what is not computed again --------------------------------------------------------------------------------------


def test_the_same_prompt_again_computes_its_last_token_only(llama, cache):
    text(llama, input_ids=prompt(30), cache=cache)
    with Counted(llama) as computed:
        text(llama, input_ids=prompt(30), cache=cache, max_new_tokens=1)
    assert computed.num_tokens == 1
    assert cache.num_cached_tokens == [29]


def test_the_next_turn_of_a_conversation_computes_what_is_new(llama, cache):
    first = torch.tensor(text(llama, input_ids=prompt(20), cache=cache))
    second = torch.cat([first, prompt(7, seed=9)], dim=1)
    expected = text(llama, input_ids=second)
    with Counted(llama) as computed:
        assert text(llama, input_ids=second, cache=cache) == expected
    # The last token of the first turn was never fed to the model.
    assert computed.num_tokens == 1 + 7 + 11


def test_a_next_turn_may_pass_only_its_new_tokens_with_the_mask_of_all(llama, cache):
    rows = left_padded(prompt(14), prompt(20, seed=1))
    default = DynamicCache(config=llama.config)
    for kept in (cache, default):
        text(llama, **rows, cache=kept)
    length = cache.get_seq_length()
    new = torch.cat([prompt(6, seed=2), prompt(6, seed=3)])
    mask = torch.cat([rows["attention_mask"], torch.ones((2, length - 20 + 6), dtype=torch.long)], dim=1)
    turn = {"input_ids": new, "attention_mask": mask}
    with Counted(llama) as computed:
        given = text(llama, **turn, cache=cache)
    assert computed.num_tokens == 2 * (6 + 11)
    assert given == text(llama, **turn, cache=default)


def test_rows_start_together_where_the_least_cached_one_must(llama, cache):
    text(llama, input_ids=prompt(30), cache=cache)
    rows = left_padded(torch.cat([prompt(20), prompt(4, seed=7)], dim=1), prompt(16))
    expected = text(llama, **rows)
    with Counted(llama) as computed:
        assert text(llama, **rows, cache=cache) == expected
    # Row 0 has 20 of its 24 tokens; row 1, padded by 8, has 15 of its 16, so 23 columns: both can start at column 20.
    assert cache.num_cached_tokens == [20, 15]
    assert cache.num_skipped_tokens == [20, 12]
    assert computed.num_tokens == 2 * (4 + 11)


def test_a_row_without_anything_cached_makes_all_rows_start_at_the_front(llama, cache):
    text(llama, input_ids=prompt(30), cache=cache)
    rows = left_padded(prompt(30), prompt(30, seed=4))
    expected = text(llama, **rows)
    assert text(llama, **rows, cache=cache) == expected
    assert (cache.num_cached_tokens, cache.num_skipped_tokens) == ([29, 0], [0, 0])


def test_what_is_stored_already_is_not_written_again(llama, cache, monkeypatch):
    text(llama, input_ids=prompt(30), cache=cache)
    written = []
    write = cache.memory.write
    monkeypatch.setattr(cache.memory, "write", lambda *given: (written.append(given[3].tolist()), write(*given)))
    rows = left_padded(torch.cat([prompt(20), prompt(4, seed=7)], dim=1), prompt(16))
    text(llama, **rows, cache=cache, num_beams=2, max_new_tokens=1)
    # Four new tokens of row 0 and the last one of row 1, each for the first of two beams.
    assert [(len(slots), len(set(slots))) for slots in written] == [(5, 5)] * len(cache)


def test_beams_store_their_prompt_once(llama):
    with PagedCache(llama, num_blocks=12, block_size=BLOCK_SIZE) as cache:
        ids = prompt(24)
        expected = text(llama, input_ids=ids, num_beams=4, max_new_tokens=3)
        # Six blocks of prompt; four copies of it would need 24.
        assert text(llama, input_ids=ids, num_beams=4, max_new_tokens=3, cache=cache) == expected


def test_states_of_all_tokens_are_computed_when_they_are_asked_for(llama, cache):
    settings = {"max_new_tokens": 2, "return_dict_in_generate": True, "output_hidden_states": True, "do_sample": False}
    expected = llama.generate(input_ids=prompt(20), **settings)
    for _ in range(2):
        given = llama.generate(input_ids=prompt(20), cache=cache, **settings)
        assert given.hidden_states[0][0].shape == expected.hidden_states[0][0].shape
        assert torch.allclose(given.hidden_states[0][-1], expected.hidden_states[0][-1], atol=1e-4)
        assert given.cache is cache


def test_a_prompt_prefilled_in_chunks_gives_the_default_tokens(llama, cache):
    for length in (30, 33):
        expected = text(llama, input_ids=prompt(length), prefill_chunk_size=8)
        assert text(llama, input_ids=prompt(length), prefill_chunk_size=8, cache=cache) == expected


# ---- never another model's text --------------------------------------------------------------------------------------


def test_what_other_weights_computed_is_not_reused():
    model = tiny_model("llama")
    with PagedCache(model, num_blocks=100, block_size=BLOCK_SIZE) as cache:
        before = text(model, input_ids=prompt(20), cache=cache)
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(-1)
        expected = text(model, input_ids=prompt(20))
        assert before != expected
        assert text(model, input_ids=prompt(20), cache=cache) == expected
        assert cache.num_cached_tokens == [0]


def test_namespaces_share_nothing(llama, cache):
    found = []
    for namespace in (("a",), ("b",), ("a",)):
        cache.namespace = namespace
        text(llama, input_ids=prompt(20), cache=cache)
        found += cache.num_cached_tokens
    assert found == [0, 0, 19]


def test_rows_do_not_go_on_in_another_namespace(llama, cache):
    text(llama, input_ids=prompt(20), cache=cache)
    turn = {"input_ids": prompt(3), "attention_mask": torch.ones(1, cache.get_seq_length() + 3, dtype=torch.long)}
    cache.namespace = ("another adapter",)
    refused(llama, cache, "1 rows would go on at column 31, but the cache holds 0 rows", **turn)


def test_two_caches_of_one_model_do_not_mix(llama, cache):
    with PagedCache(llama, num_blocks=50, block_size=BLOCK_SIZE) as other:
        expected = text(llama, input_ids=prompt(20))
        assert text(llama, input_ids=prompt(20), cache=cache) == expected
        assert text(llama, input_ids=prompt(20), cache=other) == expected
        assert other.num_cached_tokens == [0]


def test_the_default_cache_goes_on_working_beside_it(llama, cache):
    text(llama, input_ids=prompt(20), cache=cache)
    with Counted(llama) as computed:
        text(llama, input_ids=prompt(20), max_new_tokens=1)
    assert computed.num_tokens == 20


# ---- forward calls without generate ----------------------------------------------------------------------------------


def test_forward_calls_of_ones_own_give_the_default_logits(llama, cache):
    ids, default = prompt(20), DynamicCache(config=llama.config)
    for _ in range(2):
        cache.reset()
        with torch.no_grad():
            given = llama(ids[:, :15], cache=cache).logits
            assert torch.allclose(given, llama(ids[:, :15]).logits, atol=1e-4)
            given = torch.cat(
                [given, llama(ids[:, 15:19], cache=cache).logits, llama(ids[:, 19:], cache=cache).logits], 1
            )
    assert cache.get_seq_length() == 20
    assert torch.allclose(given, llama(ids, cache=default).logits, atol=1e-4)


@with_kinds(*KINDS)
def test_forward_calls_of_ones_own_give_the_default_logits_past_the_window(hybrid):
    _, model, cache = hybrid
    ids = prompt(30)
    for _ in range(2):
        cache.reset()
        with torch.no_grad():
            given = [
                model(part, cache=cache).logits for part in (ids[:, :17], ids[:, 17:19], ids[:, 19:20], ids[:, 20:])
            ]
    assert cache.get_seq_length() == 30
    assert torch.allclose(torch.cat(given, dim=1), model(ids).logits, atol=1e-3)


@with_kinds("windowed mistral", "gemma3_text", "llama4_text", "qwen3_next", "falcon_h1")
def test_the_last_logits_of_equal_rows_of_a_hybrid_skip_what_is_cached(hybrid):
    kind, model, cache = hybrid
    ids = prompt(30).expand(2, -1)
    text(model, input_ids=ids, cache=cache, max_new_tokens=2)
    for num_logits in (1, 3, 12):
        cache.reset()
        with Counted(model) as computed, torch.no_grad():
            given = model(ids, cache=cache, logits_to_keep=num_logits).logits
        assert torch.allclose(given, model(ids).logits[:, -num_logits:], atol=1e-3)
        # The state that is kept is one after 28 tokens, too late for those who want more than the last two logits.
        assert computed.num_tokens <= 2 * (
            30 if kind in STATE_KINDS and num_logits > 2 else num_logits + 2 * BLOCK_SIZE
        )


def test_a_forward_that_wants_the_last_logits_skips_what_is_cached(llama, cache):
    text(llama, input_ids=prompt(20), cache=cache)
    cache.reset()
    with Counted(llama) as computed, torch.no_grad():
        given = llama(prompt(20), cache=cache, logits_to_keep=3).logits
    assert computed.num_tokens == 3
    assert torch.allclose(given, llama(prompt(20)).logits[:, -3:], atol=1e-4)


@pytest.mark.parametrize("removed", [-3, 17])
def test_crop_takes_columns_back_by_either_convention(llama, cache, removed):
    with torch.no_grad():
        llama(prompt(20), cache=cache)
        cache.crop(removed)
        assert cache.get_seq_length() == 17
        given = llama(prompt(3, seed=8), cache=cache).logits
        expected = llama(torch.cat([prompt(17), prompt(3, seed=8)], dim=1)).logits[:, -3:]
    assert torch.allclose(given, expected, atol=1e-4)


@with_kinds("windowed mistral", "gemma3_text", "llama4_text", "qwen3_next", "falcon_h1", "lfm2")
@pytest.mark.parametrize("is_recording", [False, True], ids=["unannounced", "announced"])
def test_crop_takes_columns_of_hybrids_back_beyond_the_last_forward(hybrid, is_recording):
    _, model, cache = hybrid
    ids = torch.cat([prompt(30), prompt(30, seed=1)])
    if is_recording:
        cache.activate_past_recording()
    with torch.no_grad():
        model(ids[:, :28], cache=cache)
        model(ids[:, 28:], cache=cache)
        for removed, kept in ((1, 29), (0, 29), (8, 21), (15, 6)):
            cache.crop(-removed)
            assert cache.get_seq_length() == kept
            if removed:
                given = model(prompt(3, seed=8).expand(2, -1), cache=cache).logits
                expected = model(torch.cat([ids[:, :kept], prompt(3, seed=8).expand(2, -1)], dim=1)).logits[:, -3:]
                assert torch.allclose(given, expected, atol=1e-3)
                cache.crop(-3)
    cache.manager.check()


def test_crop_leaves_rows_that_would_be_padding_only_alone(llama, cache):
    text(llama, **left_padded(prompt(12), prompt(2, seed=1)), cache=cache)
    with pytest.raises(SequenceError, match=r"row 1 begins at column 10 and would keep no token; reset\(\)"):
        cache.crop(10)
    assert cache.get_seq_length() == 23
    cache.crop(-23)
    assert cache.get_seq_length() == 0


def test_rows_can_be_repeated_and_selected(llama, cache):
    rows = torch.cat([prompt(10), prompt(10, seed=1), prompt(10, seed=2)])
    with torch.no_grad():
        llama(rows, cache=cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([5, 0, 1, 0]))
        cache.batch_select_indices(torch.tensor([True, True, False, True]))
        new = torch.cat([prompt(2, seed=seed) for seed in (3, 4, 5)])
        given = llama(new, cache=cache).logits
        expected = llama(torch.cat([rows[[2, 0, 0]], new], dim=1)).logits[:, -2:]
    assert torch.allclose(given, expected, atol=1e-4)
    cache.manager.check()


@with_kinds("windowed mistral", "gemma3_text", "qwen3_next", "falcon_h1")
def test_rows_of_hybrids_can_be_repeated_and_selected(hybrid):
    _, model, cache = hybrid
    rows = torch.cat([prompt(30), prompt(30, seed=1), prompt(30, seed=2)])
    with torch.no_grad():
        model(rows, cache=cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([5, 0, 1]))
        given = model(prompt(2, seed=3).expand(3, -1), cache=cache).logits
        expected = model(torch.cat([rows[[2, 0, 0]], prompt(2, seed=3).expand(3, -1)], dim=1)).logits[:, -2:]
    assert torch.allclose(given, expected, atol=1e-3)


def test_selected_rows_keep_their_padding(llama, cache):
    inputs = left_padded(prompt(10), prompt(4, seed=1))
    expected = text(llama, **left_padded(prompt(4, seed=1), prompt(10)))
    with torch.no_grad():
        positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        logits = llama(**inputs, position_ids=positions, cache=cache).logits[:, -1]
        order = torch.tensor([1, 0])
        cache.batch_select_indices(order)
        mask = torch.cat([inputs["attention_mask"][order], torch.ones(2, 1, dtype=torch.long)], dim=1)
        ids, positions = logits[order].argmax(-1, keepdim=True), positions[order][:, -1:] + 1
        given = llama(ids, attention_mask=mask, position_ids=positions, cache=cache).logits[:, -1].argmax(-1)
    assert [[*ids[row].tolist(), int(given[row])] for row in (0, 1)] == [row[10:12] for row in expected]


# ---- too little room -------------------------------------------------------------------------------------------------


def test_running_out_of_blocks_says_what_to_do_and_leaves_the_cache_usable(llama):
    with PagedCache(llama, num_blocks=8, block_size=BLOCK_SIZE) as cache:
        with pytest.raises(OutOfBlocks, match=r"1 blocks?, .* with more num_blocks, .* share 8 blocks of 4 tokens"):
            text(llama, input_ids=prompt(20), max_new_tokens=20, cache=cache)
        assert_nothing_held(cache)
        with pytest.raises(SequenceError, match=r"failed half way"):
            llama(prompt(1), cache=cache)
        expected = text(llama, input_ids=prompt(20), max_new_tokens=8)
        assert text(llama, input_ids=prompt(20), max_new_tokens=8, cache=cache) == expected
        assert cache.num_skipped_tokens == [19]


def test_running_out_of_one_groups_blocks_says_how_many_each_has():
    model = model_of("gemma3_text")
    with PagedCache(model, num_blocks=[20, 6], block_size=BLOCK_SIZE) as cache:
        with pytest.raises(NeverFits, match=re.escape("share 20 full + 6 sliding blocks of 4 tokens")) as raised:
            text(model, input_ids=prompt(40), cache=cache)
        assert "unless you set max_chunk_tokens" in str(raised.value)
        assert_nothing_held(cache)
        expected = text(model, input_ids=prompt(20))
        assert text(model, input_ids=prompt(20), cache=cache) == expected


@pytest.mark.parametrize(
    ("kind", "num_blocks"), [("gemma3_text", [20, 6]), ("windowed mistral", 6), ("falcon_h1", [20, 2])]
)
def test_no_forward_is_longer_than_was_promised_and_windows_hold_no_whole_prompt(kind, num_blocks):
    model = model_of(kind)
    with PagedCache(model, num_blocks=num_blocks, block_size=BLOCK_SIZE, max_chunk_tokens=8) as cache:
        expected = text(model, input_ids=prompt(60), max_new_tokens=6)
        with Counted(model) as computed:
            assert text(model, input_ids=prompt(60), max_new_tokens=6, cache=cache) == expected
        assert max(columns for _, columns in computed.forwards) <= 8
        with pytest.raises(SequenceError, match="logits or states of 9 tokens, but max_chunk_tokens promises"):
            model(prompt(9, seed=1), cache=cache)
        cache.reset()
        assert_nothing_held(cache)


def test_prompts_that_do_not_fit_are_all_refused(llama):
    with PagedCache(llama, num_blocks=8, block_size=BLOCK_SIZE) as cache:
        with pytest.raises(OutOfBlocks, match="make the PagedCache with more num_blocks"):
            text(llama, input_ids=torch.cat([prompt(20), prompt(20, seed=1)]), cache=cache)
        assert_nothing_held(cache)
        with pytest.raises(NeverFits, match="make the PagedCache with more num_blocks"):
            text(llama, input_ids=prompt(33), cache=cache)
        assert_nothing_held(cache)


def test_rows_that_cannot_be_repeated_are_all_ended(llama):
    with PagedCache(llama, num_blocks=7, block_size=BLOCK_SIZE) as cache:
        with torch.no_grad():
            llama(torch.cat([prompt(9), prompt(9, seed=1)]), cache=cache)
        with pytest.raises(OutOfBlocks, match="make the PagedCache with more num_blocks"):
            cache.batch_repeat_interleave(2)
        assert_nothing_held(cache)


def test_more_rows_than_there_may_be_are_refused(llama):
    with PagedCache(llama, num_blocks=20, block_size=BLOCK_SIZE, max_sequences=3) as cache:
        with pytest.raises(OutOfBlocks, match="make the PagedCache with more max_sequences"):
            text(llama, input_ids=torch.cat([prompt(9, seed) for seed in range(4)]), cache=cache)
        assert_nothing_held(cache)


# ---- what can't be served rightly is refused -------------------------------------------------------------------------


def refused(llama, cache, match, **inputs):
    with pytest.raises(SequenceError, match=match):
        llama.generate(**inputs, cache=cache, max_new_tokens=2, do_sample=False)
    expected = text(llama, input_ids=prompt(9))
    assert text(llama, input_ids=prompt(9), cache=cache) == expected


def test_right_padding_is_refused(llama, cache):
    rows = left_padded(prompt(9), prompt(5, seed=1))
    flipped = {name: value.flip(1) for name, value in rows.items()}
    refused(llama, cache, "padding_side = 'left'", **flipped)


def test_embeddings_are_refused(llama, cache):
    refused(llama, cache, "pass input_ids", inputs_embeds=llama.get_input_embeddings()(prompt(9)).detach())


def test_inputs_beside_the_token_ids_are_refused(llama, cache):
    with pytest.raises(SequenceError, match="can't tell what token_type_ids does"):
        llama(prompt(9), cache=cache, token_type_ids=torch.ones(1, 9))


def test_padded_rows_need_their_mask_and_positions_every_time(llama, cache):
    rows = left_padded(prompt(9), prompt(5, seed=1))
    with pytest.raises(SequenceError, match="need attention_mask and position_ids"):
        llama(**rows, cache=cache)
    text(llama, **rows, cache=cache)
    with pytest.raises(SequenceError, match="need attention_mask and position_ids"):
        llama(torch.ones(2, 1, dtype=torch.long), cache=cache)


def test_other_rows_than_there_are_cannot_go_on(llama, cache):
    text(llama, input_ids=torch.cat([prompt(9), prompt(9, seed=1)]), cache=cache)
    with pytest.raises(SequenceError, match="1 rows would go on at column None, but the cache holds 2 rows"):
        llama(prompt(1), cache=cache)


def test_positions_of_ones_own_are_refused(llama, cache):
    refused(llama, cache, "position_ids must count", input_ids=prompt(9), position_ids=2 * torch.arange(9)[None])


def test_an_empty_row_is_refused(llama, cache):
    rows = left_padded(prompt(9), prompt(9, seed=1))
    rows["attention_mask"][1] = 0
    refused(llama, cache, "row 1 of the batch has no token", **rows)


def test_new_tokens_after_a_past_that_the_cache_does_not_hold_are_refused(llama, cache):
    text(llama, input_ids=prompt(20), cache=cache)
    refused(
        llama, cache, "1 rows would go on at column 40", input_ids=prompt(3), attention_mask=torch.ones(1, 43).long()
    )


def test_another_model_is_refused(cache):
    other = tiny_model("llama", seed=2)
    with pytest.raises(SequenceError, match="the model that it was made for"):
        text(other, input_ids=prompt(9), cache=cache)


def test_a_forward_that_fails_half_way_must_not_be_gone_on_with(llama, cache):
    def fail(*_):
        raise KeyboardInterrupt

    with torch.no_grad():
        llama(prompt(9), cache=cache)
        hook = llama.model.layers[2].register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            llama(prompt(1), cache=cache)
        hook.remove()
        with pytest.raises(SequenceError, match="failed half way"):
            llama(prompt(1), cache=cache)
    expected = text(llama, input_ids=prompt(20))
    assert text(llama, input_ids=prompt(20), cache=cache) == expected


def test_a_generate_that_marks_no_calls_is_told_to_reset(llama, cache, monkeypatch):
    monkeypatch.setattr(PagedCache, "_is_user_defined", True)
    monkeypatch.setattr(module, "_MARKS_CALLS", False)
    expected = text(llama, input_ids=prompt(20))
    assert text(llama, input_ids=prompt(20), cache=cache) == expected
    with pytest.raises(SequenceError, match=r"reset\(\) it before each"):
        text(llama, input_ids=prompt(20), cache=cache)
    cache.reset()
    assert text(llama, input_ids=prompt(20), cache=cache) == expected
    assert cache.num_cached_tokens == [19]


UNSUITED = {
    "takes no position_ids": lambda: MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1)),
    "RoPE of type dynamic": lambda: tiny_model(
        "llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    ),
    "tokens attend to later ones": lambda: tiny_model("llama", use_bidirectional_attention=True),
    "encoder-decoder": lambda: T5ForConditionalGeneration(
        T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    ),
}


@pytest.mark.parametrize("reason", UNSUITED)
def test_models_whose_prefixes_cannot_be_reused_are_refused(reason):
    model = UNSUITED[reason]()
    with pytest.raises(ConfigError, match=reason):
        PagedCache(model, num_blocks=10)
    assert not model._forward_hooks


def test_windows_that_are_written_over_are_refused():
    with pytest.raises(ConfigError, match="ring is True, but a PagedCache needs windows"):
        PagedCache(model_of("gemma3_text"), num_blocks=10, ring=True)


# ---- lifetime --------------------------------------------------------------------------------------------------------


def test_closing_takes_the_hooks_off_the_model(llama):
    hooks = len(llama._forward_hooks), len(llama._forward_pre_hooks)
    with PagedCache(llama, num_blocks=20, block_size=BLOCK_SIZE) as cache:
        text(llama, input_ids=prompt(9), cache=cache)
    assert (len(llama._forward_hooks), len(llama._forward_pre_hooks)) == hooks
    assert_nothing_held(cache)
    with pytest.raises(SequenceError, match="the model that it was made for"):
        text(llama, input_ids=prompt(9), cache=cache)


def test_a_cache_made_in_inference_mode_works_outside_of_it(llama):
    with torch.inference_mode():
        cache = PagedCache(llama, num_blocks=20, block_size=BLOCK_SIZE)
        expected = text(llama, input_ids=prompt(9), cache=cache)
    with cache:
        assert text(llama, input_ids=prompt(9), cache=cache) == expected
    with torch.inference_mode():
        made_inside = tiny_model("llama")
    with PagedCache(made_inside, num_blocks=20, block_size=BLOCK_SIZE) as cache, torch.inference_mode():
        assert text(made_inside, input_ids=prompt(9), cache=cache) == expected


def test_a_cache_that_is_dropped_leaves_the_model_as_it_was():
    model = tiny_model("llama")
    PagedCache(model, num_blocks=20, block_size=BLOCK_SIZE)
    gc.collect()
    assert len(text(model, input_ids=prompt(9))[0]) == 21


def test_the_size_can_be_given_in_bytes_or_left_out(llama, monkeypatch):
    assert module._DEFAULT_MEMORY == "1 GiB"
    monkeypatch.setattr(module, "_DEFAULT_MEMORY", "2 MiB")
    token_bytes = 2 * tiny_config("llama").num_hidden_layers * 2 * 16 * 4
    with PagedCache(llama, memory="1 MiB", block_size=BLOCK_SIZE) as cache:
        assert cache.manager.num_blocks == 2**20 // (BLOCK_SIZE * token_bytes)
    with PagedCache(llama) as cache:
        assert cache.manager.num_blocks == 2**21 // (16 * token_bytes)
    with PagedCache(model_of("gemma3_text"), typical_length=10 * WINDOW) as cache:
        full, sliding = cache.manager.config.group_num_blocks
        assert 9 * sliding <= full <= 11 * sliding
