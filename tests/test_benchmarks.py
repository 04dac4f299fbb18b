"""The references are right: they find, share and evict as Kvist does; and every benchmark runs and reports its rows."""

import gzip
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import bench_groups
from bench_import import with_bytecode_in
from harness import Work, again, interleave
from kvist import AttentionSpec, CacheConfig, KVCacheManager, StateSpec
from references.field import Block as FieldBlock
from references.field import BlockMap, FieldManager, FreeQueue, Request, block_hash
from references.lean import BlockChainIndex, ObjectPerBlockManager, block_digests, bytes_agree
from report import AtMost, AtMostTimes, Row, TimesFaster, machine, machine_line, sha_instructions, table
from subjects import FULL, admit_field, kvist_manager, serve_field, serve_in_chunks, step_field
from workloads import DecodeBatch, PrefixForest, SharedPrefixes, expand_ids, random_tokens, read_trace, synthetic_trace

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ROW_KEYS = {"name", "value", "unit", "reference", "reference_name", "ratio", "target", "holds", "goal", "note"}


def ids(*tokens):
    return np.array(tokens, np.int32)


def kvist(num_blocks, block_size, policy="lru"):
    config = CacheConfig(
        layers=[AttentionSpec(num_kv_heads=1, head_dim=8)],
        block_size=block_size,
        num_blocks=num_blocks,
        max_sequences=8,
        max_sequence_length=256,
        partial_reuse=False,
        policy=policy,
    )
    return KVCacheManager(config)


def served(manager, tokens):
    sequence = manager.add_sequence(tokens)
    manager.commit([sequence] if isinstance(manager, KVCacheManager) else sequence)
    manager.free(sequence)
    return sequence.num_cached_tokens


def num_found(objects, tokens):
    return len(objects.find(block_digests(tokens.tobytes(), objects.block_bytes))) * objects.block_size


def shared_prefix_prompts(seed, num_prompts, block_size):
    """Prompts over three tokens that often go on from an earlier prompt, none ending at a block boundary."""
    rng = np.random.default_rng(seed)
    prompts = []
    for _ in range(num_prompts):
        history = prompts[rng.integers(len(prompts))] if prompts and rng.random() < 0.8 else ids()
        kept = history[: rng.integers(len(history) + 1)]
        prompt = np.concatenate([kept, rng.integers(0, 3, rng.integers(1, 12), dtype=np.int32)])[:60]
        prompts.append(prompt if len(prompt) % block_size else np.append(prompt, np.int32(7)))
    return prompts


def assert_queue_is_whole(manager):
    """Walk the queue both ways: the blocks nobody holds, each once, and no published block lost."""
    forward, block = [], manager.free_queue.head.next
    while block is not manager.free_queue.tail:
        forward.append(block)
        assert block.next.previous is block
        block = block.next
    assert len(forward) == len(set(map(id, forward))) == manager.free_queue.num_blocks
    assert {id(block) for block in manager.blocks if not block.references} == set(map(id, forward))
    assert all(block.digest == digest for digest, block in manager.cached.items())


def field(num_blocks, block_size=2, **options):
    """The field's manager; it keeps one block more, as its null block."""
    return FieldManager(num_blocks + 1, block_size, **options)


def queued(pool):
    """Walk the free queue both ways; returns the blocks in order."""
    forward, block = [], pool.free_queue.head.next
    while block is not pool.free_queue.tail:
        forward.append(block)
        assert block.next.previous is block
        block = block.next
    return forward


def assert_field_is_whole(manager):
    """The queue has the blocks nobody holds, each once; the map has what the blocks say, and nothing else."""
    pool = manager.pool
    free = queued(pool)
    assert len(free) == len(set(map(id, free))) == pool.num_free_blocks
    assert {id(block) for block in pool.blocks[1:] if not block.num_references} == set(map(id, free))
    found = pool.block_map.by_key.items()
    published = {
        (key, id(block))
        for key, value in found
        for block in (value if isinstance(value, dict) else {0: value}).values()
    }
    assert published == {(block.key, id(block)) for block in pool.blocks if block.key}


def hit_ids(manager, tokens):
    """Block ids that a new request with these tokens would start with."""
    blocks, num_tokens = manager.computed_blocks(Request("probe", list(tokens), manager.block_size))
    (found,) = blocks.block_ids()
    assert num_tokens == len(found) * manager.block_size
    return found


@pytest.mark.parametrize("block_size", [2, 4])
@pytest.mark.parametrize("num_blocks", [1000, 40])
def test_the_references_find_as_much_as_kvist_also_when_blocks_are_evicted(block_size, num_blocks):
    if num_blocks * block_size < 160:
        num_blocks = 160 // block_size
    ours, lean, fields = (
        kvist(num_blocks, block_size),
        ObjectPerBlockManager(num_blocks, block_size),
        field(num_blocks, block_size),
    )
    prompts = shared_prefix_prompts(block_size, 300, block_size)
    found = [served(ours, prompt) for prompt in prompts]
    assert sum(found) > 300
    assert [served(lean, prompt) for prompt in prompts] == found
    assert [serve_field(fields, [prompt.tolist()]) for prompt in prompts] == found
    assert_queue_is_whole(lean)
    assert_field_is_whole(fields)


def test_the_field_hashes_parent_tokens_and_extra_keys():
    plain, adapted, salted = (
        Request("r", [0, 1, 2, 3, 4, 5, 6], 3, **keys).block_hashes for keys in ({}, {"adapter": "a"}, {"salt": "s"})
    )
    assert len(plain) == 2
    assert plain[1] == block_hash(plain[0], (3, 4, 5), None)
    assert adapted[1] == block_hash(adapted[0], (3, 4, 5), ("a",))
    assert salted[1] == block_hash(salted[0], (3, 4, 5), None)
    assert len({plain[0], adapted[0], salted[0]}) == 3


def test_a_field_request_hashes_a_block_when_its_last_token_is_appended():
    whole = Request("whole", [1, 2, 3, 4, 5], 2)
    grown = Request("grown", [1], 2)
    counts = []
    for token in (2, 3, 4, 5):
        grown.append(token)
        counts.append(len(grown.block_hashes))
    assert counts == [1, 1, 2, 2]
    assert (grown.block_hashes, grown.tokens, grown.output_tokens) == (whole.block_hashes, whole.tokens, [2, 3, 4, 5])


def test_the_field_gives_out_unpublished_blocks_first_and_published_ones_last_from_the_tail():
    manager = field(10, 16)
    common = [token for token in range(3) for _ in range(16)]
    first, _ = admit_field(manager, common + [3] * 7)
    second, num_hit_tokens = admit_field(manager, common + [4] * 5)
    assert manager.block_ids(first) == ([1, 2, 3, 4],)
    assert (num_hit_tokens, manager.block_ids(second)) == (48, ([1, 2, 3, 5],))
    manager.free(first)
    manager.free(second)
    assert [block.block_id for block in queued(manager.pool)] == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
    assert hit_ids(manager, [*common, 9]) == [1, 2, 3]
    third, _ = admit_field(manager, list(range(100, 100 + 8 * 16)))
    assert manager.block_ids(third) == ([5, 4, 6, 7, 8, 9, 10, 3],)
    assert hit_ids(manager, [*common, 9]) == [1, 2]
    assert_field_is_whole(manager)


def test_the_field_refuses_what_does_not_fit_and_changes_nothing():
    manager = field(4)
    running, _ = admit_field(manager, [1, 2, 3, 4, 5])
    waiting = Request("waiting", [1, 2, 6, 7, 8, 9], 2)
    hits, num_hit_tokens = manager.computed_blocks(waiting)
    assert num_hit_tokens == 2
    assert manager.allocate_slots(waiting, 4, num_hit_tokens, hits) is None
    assert [manager.pool.blocks[i].num_references for i in range(1, 5)] == [1, 1, 1, 0]
    with pytest.raises(RuntimeError, match="4 tokens do not fit"):
        admit_field(manager, [1, 2, 6, 7, 8, 9])
    with pytest.raises(ValueError, match="must be positive"):
        manager.allocate_slots(running, 0)
    with pytest.raises(ValueError, match="2 blocks are needed, but only 1 are free"):
        manager.pool.new_blocks(2)
    assert_field_is_whole(manager)


def test_the_field_counts_hits_that_are_free_lookahead_reserve_and_watermark_as_needed():
    manager = field(4, watermark=0.25)
    serve_field(manager, [[1, 2, 3, 4]])
    request = Request("r", [1, 2, 3, 4, 5, 6], 2)
    hits, num_hit_tokens = manager.computed_blocks(request)
    allocate = partial(manager.allocate_slots, request, 2, num_hit_tokens, hits)
    assert num_hit_tokens == 4
    assert allocate(num_lookahead_tokens=2) is None
    assert allocate(num_reserved_blocks=1) is None
    assert allocate(others_run=False, num_lookahead_tokens=3) is None
    (new,) = allocate().blocks
    assert [block.key is not None for block in new] == [True]
    assert manager.allocate_slots(request, 2, num_lookahead_tokens=0) is manager.no_blocks


def test_a_field_decode_step_takes_a_block_at_a_boundary_and_publishes_the_one_that_is_full():
    manager = field(8)
    requests = [admit_field(manager, prompt)[0] for prompt in ([1, 2, 3], [5, 6])]
    for tokens in ([4, 7], [9, 8]):
        step_field(manager, requests, tokens)
    assert [request.num_computed_tokens for request in requests] == [5, 4]
    assert [len(manager.block_ids(request)[0]) for request in requests] == [3, 2]
    assert hit_ids(manager, [1, 2, 3, 4, 0]) == manager.block_ids(requests[0])[0][:2]
    assert hit_ids(manager, [5, 6, 7, 8, 0]) == manager.block_ids(requests[1])[0]
    with pytest.raises(RuntimeError, match="no block is free"):
        for token in range(20, 40):
            step_field(manager, requests, [token, token])
    assert_field_is_whole(manager)


def test_the_field_keeps_equal_blocks_apart_and_shares_hits_over_all_groups():
    manager = field(12, num_groups=2)
    first, _ = admit_field(manager, [1, 2, 3])
    copy = Request("copy", [1, 2, 3], 2)
    manager.allocate_slots(copy, 3)
    assert manager.block_ids(first) == ([1, 2], [3, 4])
    assert manager.block_ids(copy) == ([5, 6], [7, 8])
    probe = Request("probe", [1, 2, 9], 2)
    assert manager.computed_blocks(probe)[0].block_ids() == ([1], [3])
    manager.free(first)
    serve_field(manager, [[7] * 8])
    assert manager.computed_blocks(probe)[0].block_ids() == ([5], [7])
    assert_field_is_whole(manager)


def test_the_free_queue_keeps_the_order_that_it_is_given():
    blocks = [FieldBlock(i) for i in range(6)]
    queue = FreeQueue(blocks[:1])
    queue.prepend_n(blocks[4:6])
    queue.prepend_n(blocks[1:3])
    queue.append_n([])
    queue.prepend_n([])
    queue.remove(blocks[5])
    with pytest.raises(RuntimeError, match="block 5 is not in the queue"):
        queue.remove(blocks[5])
    queue.append_n(blocks[5:])
    assert [block.block_id for block in queue.popleft_n(5)] == [1, 2, 4, 0, 5]
    assert queue.num_blocks == 0
    with pytest.raises(AssertionError):
        queue.popleft_n(1)


def test_the_block_map_finds_the_first_of_equal_blocks():
    blocks, block_map = [FieldBlock(i) for i in range(3)], BlockMap()
    for block in blocks:
        block_map.insert(b"key", block)
    found = []
    for block in blocks:
        found.append(block_map.find(b"key").block_id)
        block_map.remove(b"key", block.block_id)
    assert found == [0, 1, 2]
    assert block_map.find(b"key") is None


def test_the_report_says_on_what_machine_it_was_made():
    assert sha_instructions("fpu sse4_2 sha_ni") == sha_instructions("fp asimd sha2") == "yes"
    assert sha_instructions("fpu sse4_2") == "no"
    assert sha_instructions("") == "unknown"
    software = f"Python {machine()['python']}, NumPy {np.__version__}"
    assert machine_line(machine()).startswith(f"Kvist's core {machine()['core']}, {software}; ")


def test_a_line_without_target_can_have_its_ratio_in_the_sense_of_one():
    row = Row(name="x", value=2.0, unit="µs", reference=60.0, reference_name="y", ratio_as=TimesFaster(50))
    assert (row.ratio, row.holds, row.as_json()["target"]) == (30.0, None, None)


def test_the_least_recently_used_prefix_goes_first_and_from_its_tail():
    objects = ObjectPerBlockManager(num_blocks=6, block_size=2)
    first, second = ids(1, 1, 2, 2, 9), ids(3, 3, 4, 4, 9)
    served(objects, first)
    served(objects, second)
    served(objects, ids(5, 5, 6, 6, 7, 9))  # takes the two blank blocks, and the tail of `first`
    assert num_found(objects, first) == 2
    assert num_found(objects, second) == 4


def test_a_prefix_that_was_used_again_outlives_one_that_was_not():
    objects = ObjectPerBlockManager(num_blocks=6, block_size=2)
    first, second = ids(1, 1, 2, 2, 9), ids(3, 3, 4, 4, 9)
    for prompt in (first, second, first, ids(5, 5, 6, 6, 7, 9)):
        served(objects, prompt)
    assert num_found(objects, first) == 4
    assert num_found(objects, second) == 2


def test_running_sequences_share_cached_blocks_and_keep_them():
    objects = ObjectPerBlockManager(num_blocks=5, block_size=2)
    first = objects.add_sequence(ids(1, 1, 2, 2, 9))
    objects.commit(first)
    second = objects.add_sequence(ids(1, 1, 2, 2, 8))
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] != first.block_ids[2]
    objects.free(first)
    with pytest.raises(RuntimeError, match="3 blocks are needed, but only 2 are free"):
        objects.add_sequence(ids(4, 4, 5, 5, 6))
    assert_queue_is_whole(objects)


def test_nothing_is_found_before_it_is_committed_and_the_last_token_never():
    objects = ObjectPerBlockManager(num_blocks=8, block_size=2)
    prompt = ids(1, 2, 3, 4)
    sequence = objects.add_sequence(prompt)
    assert objects.add_sequence(prompt).num_cached_tokens == 0
    objects.commit(sequence, 3)
    assert objects.add_sequence(prompt).num_cached_tokens == 2
    objects.commit(sequence)
    assert objects.add_sequence(prompt).num_cached_tokens == 2
    assert objects.find(block_digests(prompt.tobytes(), 8)) == sequence.blocks


def test_appended_tokens_are_found_like_a_prompt():
    objects = ObjectPerBlockManager(num_blocks=20, block_size=4)
    tokens = list(range(3, 20))
    sequence = objects.add_sequence(ids(*tokens[:2]))
    for token in tokens[2:]:
        objects.append(sequence, token)
        objects.commit(sequence)
    assert len(sequence.block_ids) == 5
    objects.free(sequence)
    assert objects.add_sequence(ids(*tokens, 1)).num_cached_tokens == 16


def test_objects_refuse_wrong_calls_and_change_nothing():
    objects = ObjectPerBlockManager(num_blocks=2, block_size=2)
    sequence = objects.add_sequence(ids(1, 2, 3, 4))
    for wrong in (
        lambda: objects.add_sequence(ids()),
        lambda: objects.add_sequence(ids(1, -1)),
        lambda: objects.append(sequence, 2**31),
        lambda: objects.commit(sequence, 5),
    ):
        with pytest.raises(ValueError):  # noqa: PT011
            wrong()
    with pytest.raises(RuntimeError, match="none is free"):
        objects.append(sequence, 1)
    assert (sequence.tokens, sequence.num_computed_tokens) == ([1, 2, 3, 4], 0)
    objects.free(sequence)
    with pytest.raises(ValueError, match="was freed"):
        objects.free(sequence)
    assert_queue_is_whole(objects)


def test_a_block_chain_finds_the_shared_blocks_and_no_more():
    index = BlockChainIndex(block_size=2)
    index.publish(ids(1, 2, 3, 4, 5, 6).tobytes())
    assert index.match(ids(1, 2, 3, 4, 5, 6, 7).tobytes()) == [0, 1, 2]
    assert index.match(ids(1, 2, 0, 4, 5, 6).tobytes()) == [0]
    assert index.match(ids(3, 4).tobytes()) == []


def test_memcmp_tells_prompts_apart():
    assert bytes_agree(ids(1, 2).tobytes(), ids(1, 2).tobytes())
    assert not bytes_agree(ids(1, 2).tobytes(), ids(1, 3).tobytes())


def test_workloads_are_the_same_for_the_same_seed():
    first, again_ = (SharedPrefixes(2, 3, 4, seed=5).batch(5) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again_, strict=True))
    assert np.array_equal(first[0][:3], first[2][:3])
    assert not np.array_equal(first[0][3:], first[2][3:])
    forests = [PrefixForest(30, seed=1).batch(20) for _ in range(2)]
    assert all(np.array_equal(a, b) for a, b in zip(*forests, strict=True))
    assert synthetic_trace(50, seed=2) == synthetic_trace(50, seed=2) != synthetic_trace(50, seed=3)


def test_workloads_are_int32_tokens_in_range():
    rng = np.random.default_rng(0)
    work = DecodeBatch.make(num_sequences=8, num_steps=3)
    prompts = [random_tokens(rng, 9), *PrefixForest(10).batch(5), *work.prompts, *work.steps, expand_ids([3, 1], 4)]
    assert {prompt.dtype for prompt in prompts} == {np.dtype(np.int32)}
    assert min(int(prompt.min()) for prompt in prompts) >= 0
    assert work.steps.shape == (3, 8)
    assert work.num_blocks(block_size=4) >= sum(-(-(len(prompt) + 3) // 4) for prompt in work.prompts)


def test_a_decode_batch_can_begin_past_a_window():
    work = DecodeBatch.make(num_sequences=50, num_steps=1, shortest=1_025)
    lengths = [len(prompt) for prompt in work.prompts]
    assert 1_025 <= min(lengths) < max(lengths) < 1_025 + 64


def test_prompts_of_models_with_states_are_gone_on_from_once_a_state_is_kept_there():
    layers = (FULL, StateSpec(shapes=((4,),), dtype="float32"))
    manager = kvist_manager(32, layers=layers, max_sequence_length=64)
    prompts = SharedPrefixes(1, 32, 20).batch(3)
    found = [serve_in_chunks(manager, [prompt]) for prompt in prompts]
    assert found == [0, 0, 32]


def test_the_mixes_have_the_groups_that_they_are_named_for():
    kinds = {
        name: [group.kind for group in CacheConfig(mix.layers, num_blocks=1).groups]
        for name, mix in bench_groups.MIXES.items()
    }
    assert kinds == {
        "one": ["full"],
        "three": ["full", "sliding", "sliding"],
        "states": ["full", "sliding", "state"],
    }


def test_a_comparison_of_groups_refuses_pools_that_are_not_full_and_prompts_that_are_not_cached(monkeypatch):
    monkeypatch.setattr(bench_groups, "steady", lambda *_: None)
    three = bench_groups.MIXES["three"]
    with pytest.raises(RuntimeError, match="should evict, but 8192 full blocks are blank"):
        bench_groups.FullPools.of(three, SharedPrefixes(1, 16, 16))
    with pytest.raises(RuntimeError, match="only 0 of its tokens are"):
        bench_groups.matching(three, [], ids(1, 2, 3), times=1)


def test_conversations_of_the_synthetic_trace_go_on_from_each_other():
    seen, found, total = set(), 0, 0
    for request in synthetic_trace(2000):
        found += sum(1 for block in request if block in seen)
        total += len(request)
        seen.update(request)
    assert 0.25 < found / total < 0.45
    assert 18 < total / 2000 < 30


def test_a_trace_is_read_from_json_lines_plain_or_packed(tmp_path):
    text = '{"hash_ids": [0, 1]}\n{"hash_ids": [0, 2, 3]}\n'
    (tmp_path / "trace.jsonl").write_text(text)
    with gzip.open(tmp_path / "trace.jsonl.gz", "wt") as packed:
        packed.write(text)
    assert read_trace(tmp_path / "trace.jsonl") == read_trace(tmp_path / "trace.jsonl.gz") == [[0, 1], [0, 2, 3]]
    assert expand_ids([0, 2], 4).tolist() == [0, 1, 2, 3, 8, 9, 10, 11]


def test_contestants_take_turns_and_warmup_is_not_counted():
    order = []
    names = ("a", "b")
    contestants = {
        name: (lambda repetition, name=name: Work(lambda: order.append((repetition, name)), 2)) for name in names
    }
    timings = interleave(contestants, repeats=3, warmup=1)
    assert order == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b"), (3, "b"), (3, "a")]
    assert all(len(timings[name].samples_ns) == 3 for name in names)


def test_again_calls_as_often_as_it_says():
    calls = []
    work = again(lambda: calls.append(1), 5)
    work.call()
    assert (len(calls), work.num_units) == (5, 5)


@pytest.mark.parametrize(
    ("target", "value", "reference", "holds", "ratio"),
    [
        (AtMost(10, "µs"), 10.0, 4.0, True, 2.5),
        (AtMost(10, "µs"), 10.1, 4.0, False, 2.525),
        (AtMostTimes(5, 10, "µs"), 20.0, 2.0, True, 10.0),
        (AtMostTimes(5, 10, "µs"), 20.5, 2.0, False, 10.25),
        (TimesFaster(30), 2.0, 60.0, True, 30.0),
        (TimesFaster(30), 2.0, 59.0, False, 29.5),
    ],
)
def test_a_target_says_whether_it_holds(target, value, reference, holds, ratio):
    row = Row(name="x", value=value, unit="µs", reference=reference, reference_name="y", target=target)
    assert row.holds is holds
    assert row.ratio == pytest.approx(ratio)
    assert ("yes" if holds else "NO") in table([row.as_json()]).splitlines()[-1]


@pytest.mark.parametrize(
    "benchmark",
    [
        "match",
        "admit",
        "decode",
        "scale",
        "groups",
        "policies",
        "transfer",
        "disk",
        "events",
        "lab",
        "import",
        "pauses",
    ],
)
def test_every_benchmark_reports_its_rows_as_json(benchmark, tmp_path):
    trace = tmp_path / "small.jsonl"
    trace.write_text("".join(json.dumps({"hash_ids": request}) + "\n" for request in synthetic_trace(40)))
    script = BENCHMARKS / f"bench_{benchmark}.py"
    command = [sys.executable, str(script), "--quick", "--json", "--trace", str(trace)]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert result["benchmark"] == benchmark
    assert result["quick"] is True
    assert result["rows"]
    for row in result["rows"]:
        assert row.keys() == ROW_KEYS
        assert row["value"] > 0
        assert row["reference"] > 0
        assert (row["holds"] is None) == (row["target"] is None)
    if benchmark == "scale":
        assert "small.jsonl" in result["rows"][-1]["note"]
    assert {"python", "numpy", "processor", "sha_instructions"} <= result.keys()


def test_imports_are_timed_with_bytecode_whatever_the_environment_says(monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    environment = with_bytecode_in("folder")
    assert "PYTHONDONTWRITEBYTECODE" not in environment
    assert environment["PYTHONPYCACHEPREFIX"] == "folder"


def test_the_summary_counts_targets_and_names_the_missed():
    from run import summary

    rows = [
        {"name": "a", "target": "at most 1 µs", "reference_name": "memcmp", "holds": True},
        {"name": "b", "target": "at least 30x faster", "reference_name": "objects", "holds": False},
        {"name": "c", "target": None, "reference_name": "objects", "holds": None},
    ]
    text = summary({"match": {"rows": rows}})
    assert text.splitlines()[0] == "1 of 2 targets hold"
    assert text.splitlines()[1].strip() == "missed: b: at least 30x faster, against objects"
