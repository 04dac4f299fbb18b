"""T13: what never fits is told so at once, what does not fit now waits without stopping others, and all end."""

from random import Random

import pytest
from tests.core.small import refused
from tests.torture.over import EVERYWHERE, over
from tests.torture.rig import GROUPS, opened

from kvist import CacheConfig, KVCacheManager, NeverFits, OutOfBlocks
from kvist.serve.scheduler import Request, Scheduler

ENGINE_GROUPS = [name for name in GROUPS if name not in ("ring", "cross")]


def scheduler(groups, num_blocks, max_running=4, max_step_tokens=8, **settings):
    layers, needs = GROUPS[groups]
    sizes = 2 * num_blocks if "shared_pool" in needs else num_blocks
    config = CacheConfig(
        layers,
        4,
        sizes,
        max_sequences=max_running,
        max_sequence_length=96,
        max_chunk_tokens=max_step_tokens,
        **settings,
    )
    return Scheduler(KVCacheManager(config), max_running=max_running, max_step_tokens=max_step_tokens)


def run(each, requests, *, most_idle=1, most_steps=3000):
    """Step until all have ended; never may more than `most_idle` steps in a row compute nothing."""
    idle = 0
    for _ in range(most_steps):
        if not each.has_work:
            return
        chunks = each.plan()
        idle = 0 if chunks else idle + 1
        assert idle <= most_idle, "nothing gets on"
        each.complete(chunks, [1 + len(chunk.request.tokens) % 50 for chunk in chunks if chunk.is_last])
        each._manager.check()
    raise AssertionError(f"{most_steps} steps were not enough for {requests}")


@over(EVERYWHERE, num_blocks=6)
def test_B111_a_prompt_larger_than_the_pool_never_fits_and_one_that_has_to_wait_does(rig):
    with refused(rig.manager, NeverFits):
        rig.manager.add_sequence(range(60))
    first = rig.serve(range(100, 120))
    with refused(rig.manager, OutOfBlocks):
        rig.manager.add_sequence(range(20))
    rig.free(first)
    rig.free(rig.serve(range(20)))
    rig.require_all_back()


@pytest.mark.parametrize("groups", ENGINE_GROUPS)
def test_B114_B121_two_that_do_not_fit_together_both_end_and_neither_gives_way_for_ever(groups):
    """Each comes to need 6 blocks of 8: the later one waits, and is preempted a bounded number of times."""
    each = scheduler(groups, 8, max_running=2)
    requests = [Request([number] * 12, 12) for number in (5, 6)]
    for request in requests:
        each.submit(request)
    run(each, requests)
    assert [request.num_generated_tokens for request in requests] == [12, 12]
    assert requests[0].num_preemptions == 0
    assert requests[1].num_preemptions <= 3


@pytest.mark.parametrize("groups", ENGINE_GROUPS)
def test_B117_B118_above_capacity_each_step_computes_something_and_preemption_is_counted(groups):
    """40 requests of half as much again as fits: no step is idle, the oldest is never preempted, all end."""
    chance, each = Random(7), scheduler(groups, 14)
    requests = [
        Request([chance.randrange(3) for _ in range(chance.randint(1, 20))], chance.randint(1, 12)) for _ in range(40)
    ]
    for request in requests:
        each.submit(request)
    run(each, requests)
    assert all(request.is_finished for request in requests)
    stats = each._manager.stats()
    num_preemptions = sum(request.num_preemptions for request in requests)
    assert stats.num_suspended == num_preemptions
    assert num_preemptions > 0 or groups in ("windows alone", "one pool")  # these have room for all
    assert stats.num_resumed == stats.num_suspended
    assert requests[0].num_preemptions == 0
    assert each._manager.num_free_blocks == each._manager.num_blocks


def test_B121_who_was_preempted_comes_before_all_that_wait():
    each = scheduler("full", 8, max_running=3, max_step_tokens=16)
    requests = [Request([number] * 8, 14) for number in (1, 2)]
    for request in requests:
        each.submit(request)
    newcomers = []
    while not requests[1].num_preemptions:
        chunks = each.plan()
        each.complete(chunks, [9 for chunk in chunks if chunk.is_last])
        newcomers.append(Request([50 + len(newcomers)] * 20, 2))
        each.submit(newcomers[-1])
    assert each.waiting[0] is requests[1]
    run(each, [*requests, *newcomers], most_steps=5000)
    assert all(request.is_finished for request in (*requests, *newcomers))


@pytest.mark.parametrize("groups", ENGINE_GROUPS)
def test_B111_what_can_never_be_served_is_refused_when_it_is_submitted(groups):
    each = scheduler(groups, 6)
    for never in [Request([1] * 20, 90)] + [Request([1] * 20, 40)] * (groups != "windows alone"):
        with pytest.raises(NeverFits):
            each.submit(never)
    request = Request([1] * 4, 4)
    each.submit(request)
    run(each, [request])
    assert request.is_finished


@over(EVERYWHERE, num_blocks=10)
def test_B122_victims_that_would_not_be_enough_are_not_taken(rig):
    """A forecast gives all of them up and still says no; the real ones run on."""
    running = [rig.serve(range(100 * number, 100 * number + 6)) for number in range(3)]
    held = rig.manager.pin(rig.manager.match_prefix(range(6)))
    before = rig.manager.num_free_blocks
    forecast = rig.manager.forecast()
    for sequence in running:
        forecast.release(sequence)
    assert not forecast.fits(range(500, 560))
    assert rig.manager.num_free_blocks == before
    for sequence in running:
        rig.memory.verify(sequence)
        rig.free(sequence)
    held.release()
    rig.require_all_back()


def test_B033_B034_B125_a_hold_with_a_deadline_gives_all_back_when_it_has_passed():
    """Even if nobody ever evicts: asking what is free is enough."""
    for groups in GROUPS:
        with opened(groups) as rig:
            rig.leave(range(17))
            pin = rig.manager.pin(rig.manager.match_prefix(range(17)), lifetime_s=480.0)
            rig.clock.advance(479.9)
            held = rig.manager.num_blocks - rig.manager.num_free_blocks
            assert held > 0
            rig.clock.advance(0.2)
            rig.require_all_back()
            pin.release()
            rig.require_all_back()
