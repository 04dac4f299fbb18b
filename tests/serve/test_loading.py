"""What is on its way for requests that wait, by a clock of the test, and how fast prompts are computed."""

import pytest

from kvist import AttentionSpec, CacheConfig, DiskTier, HostTier, RemoteTier
from kvist.core.matching import Prefetch
from kvist.errors import TransferError
from kvist.serve import loading as module
from kvist.serve.loading import Loading, PrefillRate
from kvist.serve.scheduler import Chunk, Request


class Coming:
    """Something that comes when the test says so."""

    def __init__(self):
        self.is_done, self.waited = False, []

    def wait(self, timeout_s=None):
        self.waited.append(timeout_s)
        return self.is_done


class Manager:
    """Hands out prefetches that the test ends; what is asked for is noted."""

    def __init__(self, *tiers):
        layer = AttentionSpec(1, 4, dtype="float32")  # 32 bytes a token
        self.config = CacheConfig([layer], num_blocks=4, max_sequences=4, tiers=tiers, model="a model")
        self.asked, self.coming = [], []

    def prefetch(self, tokens, *, namespace):
        self.asked.append((list(tokens), namespace))
        self.coming.append(Coming())
        return Prefetch(0, len(tokens), self.coming[-1])


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def requests(count, **settings):
    return [Request([number], 1, **settings) for number in range(count)]


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def loading(clock):
    manager = Manager(HostTier("1 MiB"), DiskTier("d", timeout_s=3), RemoteTier("memory://", timeout_s=5))
    loading = Loading(manager, clock)
    loading.manager = manager
    return loading


def test_the_first_that_wait_are_loaded_for_once_each(loading):
    waiting = requests(6, namespace=("tenant",))
    loading.begin(waiting)
    loading.begin(waiting)
    assert loading.manager.asked == [([number], ("tenant",)) for number in range(4)]  # as many as may run
    loading.begin(waiting[2:])
    assert [tokens for tokens, _ in loading.manager.asked[4:]] == [[4], [5]]


def test_no_more_is_loaded_when_much_was_asked_for(loading, monkeypatch):
    monkeypatch.setattr(module, "AHEAD_BYTES", 63)
    waiting = requests(4)
    loading.begin(waiting)
    assert loading.manager.asked == [([0], ()), ([1], ())]
    loading.begin(waiting[1:])
    assert [tokens for tokens, _ in loading.manager.asked[2:]] == [[2]]


def test_a_request_is_ready_when_all_has_come_or_its_time_is_over(loading, clock):
    first, second, third = requests(3)
    loading.begin([first, second])
    assert [loading.is_ready(each) for each in (first, second, third)] == [False, False, False]
    loading.manager.coming[1].is_done = True
    assert [loading.is_ready(each) for each in (first, second)] == [False, True]
    clock.now += 4.9
    loading.begin([first, third])
    clock.now += 0.1
    assert [loading.is_ready(each) for each in (first, second, third)] == [True, False, False]


def test_waiting_is_for_the_first_and_ends_with_its_time(loading, clock):
    loading.begin(requests(2))
    clock.now += 2
    loading.wait()
    clock.now += 9
    loading.wait()
    assert [coming.waited for coming in loading.manager.coming] == [[3, 0], []]
    loading.begin([])
    loading.wait()


def test_nothing_is_loaded_for_a_request_without_reuse(loading):
    (request,) = requests(1, reuse=False)
    loading.begin([request])
    assert loading.is_ready(request)
    assert loading.manager.asked == []


def test_what_cannot_be_copied_is_not_waited_for(loading, monkeypatch):
    def fails(tokens, *, namespace):
        raise TransferError("no memory")

    monkeypatch.setattr(loading.manager, "prefetch", fails)
    (request,) = requests(1)
    loading.begin([request])
    assert loading.is_ready(request)


def chunks(*counts):
    return [Chunk(None, None, 0, num_tokens, is_last=False) for num_tokens in counts]


def test_the_rate_counts_prompts_and_weighs_steps_by_their_size():
    rate = PrefillRate()
    assert rate.note(chunks(1, 1, 1), 0.1) is None
    assert rate.note(chunks(100, 1), 1.0) == 100
    assert rate.note(chunks(63), 9.0) == 100  # tells how long a step takes at least
    assert rate.note(chunks(100, 320), 1.0) == pytest.approx((0.8 * 100 + 420) / 1.8)
    for _ in range(40):
        measured = rate.note(chunks(512), 2.0)
    assert measured == pytest.approx(256, rel=1e-2)
