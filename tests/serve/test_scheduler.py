import subprocess
import sys
from itertools import count

import pytest

from kvist import CacheConfig, KVCacheManager, NeverFits, OutOfBlocks
from kvist.config import AttentionSpec, StateSpec
from kvist.errors import ArgumentError, ArgumentTypeError, ConfigError
from kvist.serve.scheduler import Request, Scheduler

FULL, SLIDING = AttentionSpec(1, 1, dtype="float32"), AttentionSpec(1, 1, dtype="float32", sliding_window=6)
STATE = StateSpec([(2,)])


def scheduler(*, layers=(FULL,), block_size=4, max_running=4, max_step_tokens=8, num_blocks=16, **settings):
    config = CacheConfig(
        layers,
        num_blocks=num_blocks,
        block_size=block_size,
        max_sequences=8,
        **{"max_sequence_length": 64} | settings,
    )
    return Scheduler(KVCacheManager(config), max_running=max_running, max_step_tokens=max_step_tokens)


def request(num_tokens=4, max_new_tokens=4, *, first=0, **settings):
    return Request(range(first, first + num_tokens), max_new_tokens, **settings)


def submit(of, *requests):
    for each in requests:
        of.submit(each)


def spans(chunks):
    """Requests and token spans of a plan, as a list of (request, start, end)."""
    return [(chunk.request, chunk.start, chunk.end) for chunk in chunks]


def finish_step(of, chunks, tokens=None):
    """Complete a planned step; generated tokens are 1000, 1001, ... if none are given."""
    tokens = iter(count(1000) if tokens is None else tokens)
    return of.complete(chunks, [next(tokens) for chunk in chunks if chunk.is_last])


def run(of, max_steps=1000):
    """Step until all is done; each request's tokens follow from its text alone. Returns the number of steps."""
    for num_steps in range(max_steps):
        if not of.has_work:
            return num_steps
        chunks = of.plan()
        assert chunks
        of.complete(chunks, [following(chunk.request) for chunk in chunks if chunk.is_last])
        of._manager.check()
    raise AssertionError(f"not done after {max_steps} steps: {of.running}, {of.waiting}")


def following(of):
    return (sum(of.tokens) * 31 + len(of.tokens)) % 1009


def test_the_scheduler_needs_no_torch():
    program = "import sys, kvist.serve.scheduler; assert not {'torch', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True)


def loading_scheduler(loading, **settings):
    """A scheduler for which requests in `loading` are not ready."""
    made = scheduler(**settings)
    return Scheduler(
        made._manager,
        max_running=settings.get("max_running", 4),
        max_step_tokens=settings.get("max_step_tokens", 8),
        is_ready=lambda each: each not in loading,
    )


def test_those_behind_pass_a_request_that_is_being_loaded_for():
    early, late, last = request(4), request(4, first=100), request(4, first=200)
    loading = {early}
    of = loading_scheduler(loading)
    submit(of, early, late, last)
    chunks = of.plan()
    assert spans(chunks) == [(late, 0, 4), (last, 0, 4)]
    assert (of.waiting, of.running) == ((early,), (late, last))
    finish_step(of, chunks)
    loading.clear()
    assert spans(of.plan()) == [(late, 4, 5), (last, 4, 5), (early, 0, 4)]
    assert of.running == (late, last, early)


def test_where_all_are_being_loaded_for_there_is_work_and_no_chunk():
    only = request(4, 1)
    loading = {only}
    of = loading_scheduler(loading)
    of.submit(only)
    assert (of.plan(), of.has_work, of.waiting) == ([], True, (only,))
    of.abort(only)
    assert not of.has_work


def test_nobody_passes_a_request_that_was_preempted():
    early, late, last = request(8, 9), request(8, 9, first=100), request(2, 1, first=200)
    loading = set()
    of = loading_scheduler(loading, num_blocks=5, max_running=4, max_step_tokens=16)
    submit(of, early, late)
    while not late.num_preemptions:
        finish_step(of, of.plan())
    of.submit(last)
    loading.add(late)
    while early.finish_reason is None:
        assert {chunk.request for chunk in of.plan()} == {early}
        finish_step(of, of.plan())
    assert (of.plan(), of.waiting) == ([], (late, last))
    loading.clear()
    assert run(of) > 0
    assert [each.finish_reason for each in (early, late, last)] == ["length"] * 3


def test_text_is_the_same_whoever_waits_for_what():
    expected = [request(9, 7, first=100 * index) for index in range(6)]
    for each in expected:
        alone = scheduler()
        alone.submit(each)
        run(alone)
    loaded = [request(9, 7, first=100 * index) for index in range(6)]
    loading = set(loaded[:5])
    of = loading_scheduler(loading, num_blocks=7)
    submit(of, *loaded)
    for _ in range(1000):
        if not of.has_work:
            break
        chunks = of.plan()
        of.complete(chunks, [following(chunk.request) for chunk in chunks if chunk.is_last])
        of._manager.check()
        loading -= set(loaded[len(loading) - 1 : len(loading)])  # one comes in each step, the last first
    assert [each.output for each in loaded] == [each.output for each in expected]
    assert sum(each.num_preemptions for each in loaded) > 0


def test_a_prompt_is_computed_in_chunks_of_the_budget():
    of, prompt = scheduler(max_step_tokens=8), request(19, 1)
    of.submit(prompt)
    for expected in [(0, 8), (8, 16), (16, 19)]:
        chunks = of.plan()
        assert spans(chunks) == [(prompt, *expected)]
        assert chunks[0].is_last == (expected == (16, 19))
        finish_step(of, chunks)
    assert prompt.output == [1000]
    assert prompt.finish_reason == "length"
    assert not of.has_work


def test_no_chunk_is_longer_than_the_cache_was_promised():
    of, prompt = scheduler(max_step_tokens=16, max_chunk_tokens=5), request(12, 1)
    of.submit(prompt)
    chunks = []
    while of.has_work:
        chunks.append(of.plan())
        finish_step(of, chunks[-1])
    assert [spans(each) for each in chunks] == [[(prompt, 0, 5)], [(prompt, 5, 10)], [(prompt, 10, 12)]]


def test_chunks_end_where_states_are_kept():
    of = scheduler(layers=[FULL, STATE], max_step_tokens=64)
    ends = []
    for tokens in ([*range(22)], [*range(18), 1, 2, 3], [*range(18), 4, 5, 6]):
        each = Request(tokens, 1)
        of.submit(each)
        ends.append([])
        while of.has_work:
            chunks = of.plan()
            ends[-1] += [(chunk.start, chunk.end) for chunk in chunks]
            finish_step(of, chunks)
    # Each is cut where its last whole block ends. The second parts from the first after 18 tokens, 16 in whole blocks.
    assert ends == [[(0, 20), (20, 22)], [(0, 16), (16, 20), (20, 21)], [(16, 20), (20, 21)]]


def test_running_requests_come_first_and_a_prompt_gets_what_is_left():
    of = scheduler(max_step_tokens=8)
    early, late = request(4), request(20, first=100)
    submit(of, early)
    finish_step(of, of.plan())
    submit(of, late)
    assert spans(of.plan()) == [(early, 4, 5), (late, 0, 7)]


def test_a_chunk_of_a_running_prompt_goes_before_a_new_prompt():
    of = scheduler(max_step_tokens=8)
    first, second = request(12), request(12, first=100)
    submit(of, first, second)
    finish_step(of, of.plan())
    assert spans(of.plan()) == [(first, 8, 12), (second, 0, 4)]


def test_no_more_than_max_running_run_at_once():
    of = scheduler(max_running=2)
    requests = [request(2, 1, first=10 * index) for index in range(3)]
    submit(of, *requests)
    chunks = of.plan()
    assert [chunk.request for chunk in chunks] == requests[:2]
    assert of.waiting == (requests[2],)
    finish_step(of, chunks)
    assert [chunk.request for chunk in of.plan()] == requests[2:]


def test_the_last_new_token_needs_no_room():
    of, fits = scheduler(num_blocks=2), request(4, 5)
    of.submit(fits)
    run(of)
    assert fits.num_generated_tokens == 5
    with pytest.raises(
        NeverFits, match="4 prompt tokens and 6 new ones need 3 blocks of 4 tokens, but the whole cache has 2"
    ):
        of.submit(request(4, 6))


@pytest.mark.parametrize(
    ("layers", "num_blocks", "settings", "pool"),
    [
        ([FULL, SLIDING], [3, 2], {}, "need 3 blocks of 4 tokens, but the whole pool of group 1 has 2"),
        (
            [FULL, SLIDING],
            [3, 2],
            {"shared_pool": True},
            "need 6 blocks of 4 tokens, but the whole pool of group 0 has 5",
        ),
        ([SLIDING, STATE], [2, 9], {}, "need 3 blocks of 4 tokens, but the whole pool of group 0 has 2"),
        ([SLIDING], 2, {"max_chunk_tokens": 2}, "need 3 blocks of 4 tokens, but the whole cache has 2"),
    ],
)
def test_a_request_must_fit_in_every_group(layers, num_blocks, settings, pool):
    of = scheduler(layers=layers, num_blocks=num_blocks, **settings)
    with pytest.raises(NeverFits, match=f"8 prompt tokens and 5 new ones {pool}; give it more blocks"):
        of.submit(request(8, 5))
    fits = request(4, 2) if settings else request(4, 5)
    of.submit(fits)
    run(of)
    assert fits.is_finished


def test_a_request_longer_than_any_sequence_is_refused_at_once():
    of = scheduler(max_sequence_length=32)
    with pytest.raises(NeverFits, match="sequence of 33, but max_sequence_length is 32"):
        of.submit(request(24, 10))
    assert not of.has_work


def test_a_stop_token_ends_the_text_and_is_part_of_it():
    of, stopping = scheduler(), request(stop_token_ids={7})
    of.submit(stopping)
    finish_step(of, of.plan(), [5])
    finish_step(of, of.plan(), [7])
    assert stopping.output == [5, 7]
    assert stopping.finish_reason == "stop"
    assert of._manager.num_free_blocks == 16


def test_a_prefix_computed_before_is_not_computed_again():
    of = scheduler(max_step_tokens=16)
    first, second, without = request(13, 1), request(13, 1), request(13, 1, reuse=False)
    submit(of, first)
    run(of)
    submit(of, second)
    chunks = of.plan()
    assert spans(chunks) == [(second, 12, 13)]
    finish_step(of, chunks)
    submit(of, without)
    assert spans(of.plan()) == [(without, 0, 13)]
    assert [each.num_cached_tokens for each in (first, second, without)] == [0, 12, 0]


def test_namespaces_share_nothing():
    of = scheduler(max_step_tokens=16)
    submit(of, request(13, 1, namespace=("a",)))
    run(of)
    other, same = request(13, 1, namespace=("b",)), request(13, 1, namespace=("a",))
    submit(of, other, same)
    run(of)
    assert (other.num_cached_tokens, same.num_cached_tokens) == (0, 12)


def test_the_latest_arrival_is_preempted_and_waits_in_front():
    of = scheduler(num_blocks=3, max_step_tokens=16)
    requests = [request(4, 5, first=100 * index) for index in range(4)]
    submit(of, *requests)
    finish_step(of, of.plan())
    assert of.running == tuple(requests[:3])
    chunks = of.plan()
    assert of.running == (requests[0],)
    assert of.waiting == (requests[1], requests[2], requests[3])
    assert spans(chunks) == [(requests[0], 4, 5)]
    assert [each.num_preemptions for each in requests] == [0, 1, 1, 0]
    assert [each.output for each in requests] == [[1000], [1001], [1002], []]


def test_a_preempted_request_goes_on_where_it_was():
    of = scheduler(num_blocks=4, max_step_tokens=16)
    first, second = request(8, 5), request(8, 5, first=100)
    submit(of, first, second)
    run(of)
    assert second.num_preemptions > 0
    assert second.num_cached_tokens == 0
    alone = request(8, 5, first=100)
    of = scheduler(num_blocks=4)
    of.submit(alone)
    run(of)
    assert second.output == alone.output


def test_a_preempted_request_is_suspended_and_counted_once():
    of = scheduler(num_blocks=4, max_step_tokens=16)
    first, second = request(8, 5), request(8, 5, first=100)
    submit(of, first, second)
    finish_step(of, of.plan())
    of.plan()
    assert of.waiting == (second,)
    assert second.sequence.is_suspended
    assert second.sequence.row == -1
    run(of)
    stats = of._manager.stats()
    assert (stats.num_admitted, stats.num_suspended, stats.num_resumed) == (2, 1, 1)
    assert second.num_cached_tokens == 0


def test_a_suspended_request_can_be_aborted():
    of = scheduler(num_blocks=4, max_step_tokens=16)
    kept, aborted = request(8, 5), request(8, 5, first=100)
    submit(of, kept, aborted)
    finish_step(of, of.plan())
    of.plan()
    of.abort(aborted)
    assert (aborted.finish_reason, aborted.sequence, of.waiting) == ("aborted", None, ())
    run(of)
    assert of._manager.stats().num_suspended_now == 0
    assert kept.num_generated_tokens == 5


def test_a_request_that_cannot_be_resumed_yet_waits_in_front():
    of = scheduler(num_blocks=5, max_step_tokens=16)
    first, second, third = request(8, 9), request(8, 5, first=100), request(2, 1, first=200)
    submit(of, first, second)
    finish_step(of, of.plan())
    while not of.waiting:
        finish_step(of, of.plan())
    of.submit(third)
    while not first.is_finished:
        assert of.waiting == (second, third)
        finish_step(of, of.plan())
    run(of)
    assert second.num_generated_tokens == 5


@pytest.mark.parametrize("layers", [[FULL], [FULL, SLIDING], [FULL, STATE], [SLIDING, STATE]], ids=str)
@pytest.mark.parametrize("num_blocks", [5, 6, 9, 14])
@pytest.mark.parametrize("max_step_tokens", [4, 7, 64])
def test_every_request_ends_with_its_own_tokens_however_short_of_blocks(num_blocks, max_step_tokens, layers):
    requests = [request(3 + 5 * index % 11, 1 + 3 * index % 7, first=7 * (index % 3)) for index in range(20)]
    of = scheduler(layers=layers, num_blocks=num_blocks, max_step_tokens=max_step_tokens)
    submit(of, *requests)
    run(of)
    for each in requests:
        text = list(each.tokens[: each.num_prompt_tokens])
        while len(text) < each.num_prompt_tokens + each.max_new_tokens:
            text.append((sum(text) * 31 + len(text)) % 1009)
        assert list(each.tokens) == text
    assert of._manager.num_free_blocks == of._manager.num_blocks


@pytest.mark.parametrize("num_window_blocks", [3, 4, 5])
@pytest.mark.parametrize("max_step_tokens", [4, 8, 64])
def test_prompts_in_chunks_share_a_pool_that_holds_few_windows(num_window_blocks, max_step_tokens):
    # A window of 6 tokens and a chunk of 4 touch 3 blocks of 4 at most.
    of = scheduler(
        layers=[FULL, SLIDING], num_blocks=[60, num_window_blocks], max_step_tokens=max_step_tokens, max_chunk_tokens=4
    )
    requests = [request(3 + 7 * index % 40, 1 + 3 * index % 7, first=50 * index) for index in range(12)]
    submit(of, *requests)
    while of.has_work:
        chunks = of.plan()
        assert chunks[0].request is next(each for each in requests if not each.is_finished)
        assert all(chunk.num_tokens <= 4 for chunk in chunks)
        of.complete(chunks, [following(chunk.request) for chunk in chunks if chunk.is_last])
        of._manager.check()
    assert [each.num_generated_tokens for each in requests] == [each.max_new_tokens for each in requests]
    assert requests[0].num_preemptions == 0
    assert sum(each.num_preemptions for each in requests) > 0


def test_the_oldest_request_is_never_preempted():
    of = scheduler(num_blocks=6, max_step_tokens=16)
    requests = [request(4, 17, first=100 * index) for index in range(6)]
    submit(of, *requests)
    while of.has_work:
        chunks = of.plan()
        oldest = next(each for each in requests if not each.is_finished)
        assert chunks[0].request is oldest
        finish_step(of, chunks)
    assert requests[0].num_preemptions == 0
    assert sum(each.num_preemptions for each in requests) > 0


def test_abort_ends_a_request_in_any_state():
    of = scheduler(max_running=1)
    running, waiting = request(), request(first=100)
    submit(of, running, waiting)
    finish_step(of, of.plan())
    of.abort(waiting)
    of.abort(running)
    of.abort(running)
    assert [running.finish_reason, waiting.finish_reason] == ["aborted", "aborted"]
    assert (running.output, waiting.output) == ([1000], [])
    assert not of.has_work
    assert of._manager.num_free_blocks == 16


def test_a_request_aborted_between_plan_and_complete_gets_no_token():
    of = scheduler()
    aborted, other = request(2), request(2, first=100)
    submit(of, aborted, other)
    chunks = of.plan()
    of.abort(aborted)
    assert finish_step(of, chunks) == [other]
    assert (aborted.output, other.output) == ([], [1001])


def test_abort_refuses_a_request_that_was_never_submitted():
    with pytest.raises(ArgumentError, match="not submitted to this scheduler"):
        scheduler().abort(request())


def test_a_request_is_submitted_once():
    of, once = scheduler(), request(4, 1)
    of.submit(once)
    with pytest.raises(ArgumentError, match="submitted before"):
        of.submit(once)
    run(of)
    with pytest.raises(ArgumentError, match="submitted before"):
        of.submit(once)


def test_a_step_that_failed_can_be_planned_again():
    of, retried = scheduler(), request(4, 3)
    of.submit(retried)
    of.plan()
    finish_step(of, of.plan())
    of.plan()
    assert spans(of.plan()) == [(retried, 4, 5)]
    run(of)
    assert retried.num_generated_tokens == 3


def test_blocks_held_by_others_are_reported_and_waited_for():
    of = scheduler(num_blocks=4)
    manager = of._manager
    holder = manager.add_sequence(range(500, 512))
    waits = request(8, 1)
    of.submit(waits)
    with pytest.raises(OutOfBlocks):
        of.plan()
    assert of.waiting == (waits,)
    manager.free(holder)
    run(of)
    assert waits.finish_reason == "length"


def test_a_running_request_that_others_keep_from_growing_is_reported_and_goes_on_later():
    of = scheduler(num_blocks=4)
    grows = request(4, 3)
    of.submit(grows)
    finish_step(of, of.plan())
    holder = of._manager.add_sequence(range(500, 512))
    with pytest.raises(OutOfBlocks):
        of.plan()
    assert of.running == (grows,)
    of._manager.free(holder)
    run(of)
    assert grows.num_generated_tokens == 3


@pytest.mark.parametrize(("max_running", "max_step_tokens"), [(0, 4), (5, 4)])
def test_limits_that_would_starve_a_request_are_refused(max_running, max_step_tokens):
    with pytest.raises(ConfigError, match=f"max_step_tokens .{max_step_tokens}. must be at least max_running"):
        scheduler(max_running=max_running, max_step_tokens=max_step_tokens)


@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "message"),
    [
        ([], 1, "at least one token"),
        ([1, -1], 1, r"0 \.\. 2147483647, got -1"),
        ([2**31], 1, r"0 \.\. 2147483647, got 2147483648"),
        ([2**70], 1, "more than 64 bits"),
        ([1], 0, "max_new_tokens must be at least 1"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(prompt, max_new_tokens, message):
    with pytest.raises(ArgumentError, match=message):
        Request(prompt, max_new_tokens)


@pytest.mark.parametrize("prompt", ["text", [1.5], ["a"], 7, b"abc"])
def test_tokens_that_are_no_ints_are_refused(prompt):
    with pytest.raises(ArgumentTypeError, match="tokens must be ints"):
        Request(prompt, 1)


@pytest.mark.parametrize("tokens", [[], [7, 8]])
def test_a_step_is_completed_with_one_token_a_last_chunk_or_not_at_all(tokens):
    of, whole = scheduler(), request(4, 1)
    of.submit(whole)
    chunks = of.plan()
    with pytest.raises(ArgumentError, match=f"1 chunks are the last .* {len(tokens)} tokens were given"):
        of.complete(chunks, tokens)
    assert whole.sequence.num_computed_tokens == 0
    assert of.complete(chunks, [7]) == [whole]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_request_whose_sequence_was_suspended_because_a_copy_failed_goes_on_and_so_do_those_after_it(which):
    of, requests = scheduler(max_step_tokens=12), [request(first=first) for first in (0, 100, 200)]
    submit(of, *requests)
    finish_step(of, of.plan(), [following(each) for each in requests])
    of._manager.suspend(requests[which].sequence)
    chunks = of.plan()
    assert of.running == tuple(requests)
    assert [each.num_preemptions for each in requests] == [0] * which + [1] * (3 - which)
    of.complete(chunks, [following(chunk.request) for chunk in chunks if chunk.is_last])
    run(of)
    alone = scheduler()
    for each in requests:
        again = request(first=each.tokens[0])
        submit(alone, again)
        run(alone)
        assert each.tokens == again.tokens
