"""What stores bring back: the same bytes or nothing, after a restart, from another machine, whatever a store does."""

import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.core.layers import FULL
from tests.core.test_failures import LosingMemory

from kvist import (
    AttentionSpec,
    CacheConfig,
    ConfigError,
    DiskTier,
    HostTier,
    KVCacheManager,
    Media,
    NeverFits,
    OutOfBlocks,
    RemoteTier,
    StateSpec,
    TransferError,
)
from kvist.core import restoring
from kvist.core.contents import Contents
from kvist.errors import ArgumentTypeError
from kvist.memory.arena import TorchMemory
from kvist.testing import FAULTY_URL, TokenMemory, faulty_stores
from kvist.testing.token_memory import Prefixes
from kvist.tiers.breaker import CircuitBreaker
from kvist.tiers.simulated import Conditions, SimulatedStore

PATIENT = 60.0
SERVERS = {}
"""Stores that several managers reach, by name, as a server would be; closing a client closes none of them."""


class Client:
    """One manager's way to a store that others use, too."""

    def __init__(self, store):
        self.store, self.keys_put, self.asked = store, [], []

    def contains(self, keys):
        self.asked.append("contains")
        return self.store.contains(keys)

    def put(self, entries):
        self.keys_put += [key for key, _ in entries]
        return self.store.put(entries)

    def get(self, keys, buffers):
        self.asked.append("get")
        return self.store.get(keys, buffers)

    def drop(self, tag):
        self.store.drop(tag)

    def stats(self):
        return self.store.stats()

    def close(self):
        pass


CLIENTS = []


def server(format, timeout_s):
    """Connect to the one store that there is of a format."""
    store = SERVERS.setdefault(format.fingerprint, SimulatedStore(format))
    CLIENTS.append(Client(store))
    return CLIENTS[-1]


def slower_server(format, timeout_s):
    """Connect to another one."""
    store = SERVERS.setdefault(b"slower" + format.fingerprint, SimulatedStore(format))
    CLIENTS.append(Client(store))
    return CLIENTS[-1]


@pytest.fixture(autouse=True)
def _no_servers():
    SERVERS.clear()
    CLIENTS.clear()
    yield
    SERVERS.clear()
    CLIENTS.clear()


def shared(name="server", **options):
    assert "tests.tiers.test_stored" in sys.modules
    return RemoteTier(url=f"tests.tiers.test_stored:{name}", timeout_s=PATIENT, **options)


def the_store():
    [store] = SERVERS.values()
    return store


def configured(*tiers, num_blocks=12, block_size=2, layers=(FULL,), model="a model@1", **options):
    options = {"max_sequences": 8, "max_sequence_length": 256, "partial_reuse": False} | options
    return CacheConfig(list(layers), block_size, num_blocks, tiers=list(tiers or [shared()]), model=model, **options)


# -- with the oracle --------------------------------------------------------------------------------------------------


class Machine:
    """A manager and an oracle for its memory; what the oracle's numbers mean, all machines of a test agree on."""

    def __init__(self, config, prefixes=None, memory=None):
        self.memory = memory or TokenMemory(config)
        if prefixes is not None:
            self.memory.prefixes = prefixes
        self.manager = self.memory.attach(KVCacheManager(config, self.memory))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.manager.close()

    def compute(self, tokens, *, symbols=None, **options):
        """Admit a prompt, prove what is said to be there, compute the rest."""
        sequence = self.manager.add_sequence(tokens, **options)
        self.memory.verify(sequence, tokens=symbols)
        self.memory.write(sequence, tokens=symbols)
        self.manager.commit([sequence])
        self.manager.check()
        return sequence

    def leave(self, tokens, **options):
        """Compute a prompt, and end it when what it left is written; how much of it was there."""
        sequence = self.compute(tokens, **options)
        self.manager.free(sequence)
        assert self.manager.flush(PATIENT)
        return sequence.num_cached_tokens


def again(machine, config=None):
    """A new process: a new manager and a new memory."""
    return Machine(config or machine.manager.config, machine.memory.prefixes)


def told(tmp_path):
    """A disk and a server, as tiers, by name."""
    return {"disk": DiskTier(tmp_path / "disk", "4 MiB", timeout_s=PATIENT), "server": shared()}


@pytest.fixture(params=["disk", "server"])
def tier(request, tmp_path):
    return told(tmp_path)[request.param]


def test_after_a_restart_all_whole_blocks_are_there(tier):
    with Machine(configured(tier)) as machine:
        assert machine.leave(range(9)) == 0
    with again(machine) as second:
        assert second.manager.match_prefix(range(9)).num_tokens == 0
        assert second.leave(range(9)) == 8
        assert second.manager.stats().num_hit_tokens == 8


def test_the_last_token_is_computed_even_if_a_store_has_its_block(tier):
    with Machine(configured(tier)) as machine:
        machine.leave(range(8))
    with again(machine) as second:
        assert second.leave(range(8)) == 6


def test_a_prompt_that_goes_another_way_has_what_is_common(tier):
    with Machine(configured(tier)) as machine:
        machine.leave(range(8))
    with again(machine) as second:
        assert second.leave([0, 1, 2, 3, 4, 99, 6, 7, 8]) == 4
        assert second.leave([9, *range(1, 9)]) == 0


@pytest.mark.parametrize("layer", [AttentionSpec(1, 1, chunk_tokens=4), AttentionSpec(1, 1, sliding_window=1)])
def test_a_prompt_that_needs_no_block_to_go_on_is_looked_up(layer):
    config = CacheConfig([layer], 2, 8, tiers=[RemoteTier(url=FAULTY_URL)], model="a model")
    with faulty_stores():
        memory = TokenMemory(config)
        manager = memory.attach(KVCacheManager(config, memory))
        assert manager.match_prefix(range(5)).num_tokens == 0
        assert "cold" in str(manager.explain(range(5)))


def test_a_store_adds_to_what_the_device_has(tier):
    with Machine(configured(tier)) as machine:
        machine.leave(range(12))
        machine.manager.evict(3)
        assert machine.manager.match_prefix([*range(12), 9]).num_tokens == 6
        assert machine.leave([*range(12), 9]) == 12


def test_a_store_adds_to_what_host_memory_has(tier):
    with Machine(configured(HostTier(num_blocks=2), tier)) as machine:
        machine.leave(range(12))
        machine.manager.evict(12)
        assert machine.manager.match_prefix([*range(12), 9]).tiers["host"] == 4
        assert machine.leave([*range(12), 9]) == 12


def test_what_has_no_room_on_the_device_is_not_asked_for(tier):
    with Machine(configured(tier)) as machine:
        machine.leave(range(12))
    with again(machine, configured(tier, num_blocks=8)) as second:
        running = second.compute(range(50, 56))
        with pytest.raises(OutOfBlocks):
            second.manager.add_sequence([*range(12), 9])
        second.manager.check()
        second.manager.free(running)
        assert second.leave([*range(12), 9]) == 12


def test_loading_evicts_what_is_cached_and_unused(tier):
    with Machine(configured(tier, num_blocks=8)) as machine:
        machine.leave(range(12))
        assert machine.leave(range(50, 66)) == 0
        assert machine.leave([*range(12), 9]) == 12
        assert machine.leave([*range(50, 64), 9]) == 14


def test_forks_and_beams_read_what_a_store_brought(tier):
    with Machine(configured(tier, num_blocks=16)) as machine:
        machine.leave(range(8))
    with again(machine) as second:
        leader = second.manager.add_sequence([*range(8), 9], num_beams=2)
        assert leader.num_cached_tokens == 8
        second.memory.write(leader)
        second.manager.commit([leader])
        for beam in leader.beams:
            second.memory.verify(beam)
        [fork] = second.manager.fork(leader.beams[0]) if len(leader.beams) == 1 else [leader.beams[1]]
        second.manager.append([fork], [5])
        second.memory.write(fork)
        second.memory.verify(fork)
        second.manager.check()


def test_a_suspended_sequence_goes_on_from_a_store(tier):
    with Machine(configured(tier, num_blocks=6)) as machine:
        sequence = machine.compute(range(12))
        machine.manager.suspend(sequence)
        assert machine.manager.flush(PATIENT)
        machine.leave(range(50, 62))
        assert machine.manager.resume(sequence) == 0
        machine.memory.verify(sequence)
        machine.manager.check()


def test_a_suspended_sequence_goes_on_from_host_memory_and_a_store():
    with Machine(configured(HostTier(num_blocks=2), shared(), num_blocks=6)) as machine:
        sequence = machine.compute(range(12))
        machine.manager.suspend(sequence)
        machine.manager.evict(6)
        assert machine.manager.flush(PATIENT)
        assert machine.manager.match_prefix([*range(12), 9]).tiers["host"] == 4
        assert machine.manager.resume(sequence) == 0


def test_without_reuse_a_store_is_not_asked():
    with Machine(configured()) as machine:
        machine.leave(range(8))
        machine.manager.evict(8)
        CLIENTS[0].asked.clear()
        assert machine.leave(range(9), reuse=False) == 0
        assert CLIENTS[0].asked == []


def test_content_that_is_on_the_device_is_not_asked_for():
    with Machine(configured()) as machine:
        machine.leave(range(8))
        CLIENTS[0].asked.clear()
        assert machine.leave(range(8)) == 6
        assert "get" not in CLIENTS[0].asked


def test_what_must_not_be_published_is_not_stored():
    with Machine(configured()) as machine:
        machine.leave(range(8), publish=False)
    assert the_store().stats().num_entries == 0


def test_media_and_extra_ids_are_found_by_a_process_that_met_them_in_another_order(tier):
    prompts = [
        {"media": [Media(1, 3, "cat")]},
        {"media": [Media(1, 3, "dog")]},
        {"extra_ids": [0, 5, 0, 0, 0, 0, 0]},
        {},
    ]
    symbols = [[(number, token) for token in (5, 9, 9, 9, 6, 7, 8)] for number in range(4)]
    with Machine(configured(tier, num_blocks=16)) as machine:
        for options, meant in zip(prompts, symbols, strict=True):
            assert machine.leave([5, 9, 9, 9, 6, 7, 8], symbols=meant, **options) == 0
    with again(machine) as second:
        for options, meant in [*zip(prompts, symbols, strict=True)][::-1]:
            assert second.leave([5, 9, 9, 9, 6, 7, 8], symbols=meant, publish=False, **options) == 6


# -- namespaces, formats, secrets -------------------------------------------------------------------------------------


def test_namespaces_share_nothing_in_a_store(tier):
    with Machine(configured(tier)) as machine:
        machine.leave(range(8), namespace=("salt 1",))
        machine.manager.evict(12)
        for other in ((), ("salt 2",), ("salt 1", 0), (b"salt 1",)):
            assert machine.leave(range(9), namespace=other, publish=False) == 0
        assert machine.leave(range(9), namespace=("salt 1",)) == 8


def test_a_dropped_namespace_is_gone_after_a_restart_and_others_are_not(tier):
    with Machine(configured(tier)) as machine:
        machine.leave(range(4), namespace=("a",))
        machine.leave(range(4), namespace=("b",))
        machine.manager.drop(namespace=("a",))
        assert machine.manager.flush(PATIENT)
    with again(machine) as second:
        assert second.leave([*range(4), 9], namespace=("a",)) == 0
        assert second.leave([*range(4), 9], namespace=("b",)) == 4


def test_what_was_committed_right_before_its_namespace_is_dropped_is_dropped(tier):
    with Machine(configured(tier)) as machine:
        sequence = machine.compute(range(8), namespace=("a",))
        machine.manager.drop(namespace=("a",))
        machine.manager.free(sequence)
        assert machine.manager.flush(PATIENT)
    with again(machine) as second:
        assert second.leave([*range(8), 9], namespace=("a",)) == 0


def test_two_managers_share_one_store():
    with Machine(configured()) as one, again(one) as other:
        assert one.leave(range(8)) == 0
        assert other.leave([*range(8), 50, 51, 52]) == 8
        assert one.leave([*range(8), 50, 51, 9]) == 10
        assert len(CLIENTS) == 2


@pytest.mark.parametrize(
    "change",
    [{"model": "a model@2"}, {"block_size": 4}, {"layers": [AttentionSpec(1, 1, dtype="float16")]},
     {"layers": [AttentionSpec(1, 2)]}, {"layers": [AttentionSpec(1, 1)] * 2},
     {"layers": [AttentionSpec(1, 1, sliding_window=64)]}],
    ids=str,
)  # fmt: skip
def test_content_of_another_model_layout_or_block_size_is_not_found(change):
    """Keys differ even where two caches were to reach one store in spite of its format."""
    first, second = configured(), configured(**change)
    assert first.fingerprint != second.fingerprint
    one, other = KVCacheManager(first, TokenMemory(first)), KVCacheManager(second, TokenMemory(second))
    roots = {manager._state.keeper.chain.root(()) for manager in (one, other)}
    assert len(roots) == 2


def test_a_directory_of_another_model_is_refused(tmp_path):
    tier = DiskTier(tmp_path, "1 MiB")
    with Machine(configured(tier)):
        pass
    config = configured(tier, model="another")
    with pytest.raises(ConfigError):
        KVCacheManager(config, TokenMemory(config))


def test_neither_keys_nor_files_hold_tokens_or_names(tmp_path):
    """The last id is one that would be seen in any byte order."""
    tokens = [0x41424344, 0x45464748, 0x494A4B4C, 0x4D4E4F50] * 2
    texts = [b"DCBA", b"ABCD", b"tenant-salt", b"secret-image"]
    tiers = [DiskTier(tmp_path, "1 MiB", timeout_s=PATIENT), shared()]
    with Machine(configured(*tiers)) as machine:
        media = [Media(4, 2, "secret-image")]
        machine.leave(tokens, namespace=("tenant-salt",), media=media, symbols=list(enumerate(tokens)))
    [client] = [each for each in CLIENTS if each.keys_put]
    assert len(client.keys_put) == 4
    for key in client.keys_put:
        assert len(key) == 50
        assert not any(text in key for text in texts)
    files = [path for path in Path(tmp_path).rglob("*") if path.is_file()]
    assert files
    for path in files:
        contents = path.name.encode() + path.read_bytes()
        assert not any(text in contents for text in texts), path


# -- when it is written and where -------------------------------------------------------------------------------------


def test_written_through_content_is_there_before_anything_is_evicted():
    with Machine(configured(shared(write="through"))) as machine:
        machine.leave(range(8))
        assert the_store().stats().num_entries == 4
        machine.manager.evict(8)
        assert machine.manager.flush(PATIENT)
        assert the_store().stats().num_put == 4


def test_written_back_content_is_there_once_it_was_evicted():
    with Machine(configured(shared(write="back"))) as machine:
        machine.leave(range(8))
        assert the_store().stats().num_entries == 0
        machine.manager.evict(2)
        assert machine.manager.flush(PATIENT)
        assert the_store().stats().num_entries == 2
        assert machine.leave([*range(8), 9]) == 8


def test_written_back_content_passes_host_memory_first():
    config = configured(HostTier(num_blocks=2), shared(write="back"), num_blocks=4)
    with Machine(config) as machine:
        machine.leave(range(8))
        machine.manager.evict(2)
        assert machine.manager.flush(PATIENT)
        assert the_store().stats().num_entries == 0
        machine.manager.evict(2)
        assert machine.manager.flush(PATIENT)
        assert the_store().stats().num_entries == 2
        assert machine.leave([*range(6), 9]) == 6


def test_content_that_is_evicted_to_make_room_is_stored_before_its_block_is_written():
    with Machine(configured(shared(write="back"), num_blocks=4)) as machine:
        for first in (0, 20, 40, 0, 20, 40):
            machine.leave(range(first, first + 8))
    with again(machine) as second:
        for first in (0, 20, 40):
            assert second.leave(range(first, first + 8)) in (4, 6)


def test_a_faster_store_is_filled_from_a_slower_one(tmp_path):
    slow = shared()
    with Machine(configured(slow)) as machine:
        machine.leave(range(8))
    both = configured(DiskTier(tmp_path, "1 MiB", timeout_s=PATIENT), slow)
    with again(machine, both) as second:
        assert second.leave(range(9), publish=False) == 8
        assert second.manager.store_stats()["disk"].num_entries == 4
    the_store().drop(b"")
    with again(machine, both) as third:
        assert third.leave(range(9)) == 8


def test_later_prompts_fill_what_a_store_lost_of_their_prefix():
    with Machine(configured()) as machine:
        machine.leave(range(12))
        lost = CLIENTS[0].keys_put[0]
        assert the_store().change(lost, lambda entry: entry[:-1])
        machine.manager.evict(12)
        assert machine.leave([*range(12), 9]) == 0
        machine.manager.evict(12)
        assert machine.leave([*range(12), 9]) == 12


# -- prefetch ---------------------------------------------------------------------------------------------------------


def test_after_a_prefetch_an_admission_asks_no_store():
    with Machine(configured()) as machine:
        machine.leave(range(8))
    with again(machine) as second:
        fetched = second.manager.prefetch([*range(8), 9])
        assert (fetched.num_tokens, fetched.num_asked_tokens) == (0, 8)
        assert fetched.wait(PATIENT)
        assert fetched.is_done
        CLIENTS[-1].asked.clear()
        assert second.leave([*range(8), 9]) == 8
        assert CLIENTS[-1].asked == []


def test_what_no_store_has_is_asked_for_again_after_an_admission():
    with Machine(configured()) as one, again(one) as other:
        assert other.manager.prefetch(range(9)).wait(PATIENT)
        one.leave(range(8))
        assert other.leave(range(9), publish=False) == 0, "the prefetch has just found nothing"
        assert other.leave(range(9), publish=False) == 8


def test_a_prefetch_of_what_is_there_asks_nothing():
    with Machine(configured()) as machine:
        machine.leave(range(8))
        fetched = machine.manager.prefetch(range(8))
        assert (fetched.num_tokens, fetched.num_asked_tokens, fetched.is_done) == (6, 0, True)


def test_media_that_this_process_has_never_met_may_be_looked_up_and_prefetched():
    """A look does not note what they are, and so cannot name what a store has of them; an admission does."""
    options = {"media": [Media(0, 2, "cat")]}
    with Machine(configured()) as machine:
        machine.leave([9, 9, 1, 2, 3], symbols=[(0, 9), (1, 9), 1, 2, 3], **options)
    with again(machine) as second:
        assert second.manager.match_prefix([9, 9, 1, 2, 3], **options).num_tokens == 0
        assert second.manager.prefetch([9, 9, 1, 2, 3], **options).wait(PATIENT)
        assert second.leave([9, 9, 1, 2, 3], symbols=[(0, 9), (1, 9), 1, 2, 3], **options) == 4


def test_dropping_a_namespace_forgets_what_was_prefetched_of_it():
    with Machine(configured()) as machine:
        machine.leave(range(8))
    with again(machine) as second:
        assert second.manager.prefetch(range(9)).wait(PATIENT)
        second.manager.drop(namespace=())
        assert second.leave(range(9)) == 0


# -- load or recompute ------------------------------------------------------------------------------------------------


class Time:
    """Sleeping that takes no time, but is seen by who measures."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def timed(machine, latency_s):
    """Let the one store of a machine seem to take so long for each call."""
    time = Time()
    [level] = machine.manager._link.stack._levels
    level.store._speed._clock = level.store._clock = time
    the_store()._sleep = time.sleep
    the_store().conditions = Conditions(latency_s=latency_s)


@pytest.mark.parametrize(("rate", "expected"), [(None, 8), (1e9, 0), (4.0, 8), (16.0, 0)])
def test_what_takes_longer_to_load_than_to_compute_is_computed(rate, expected):
    """A call takes 1 s: 8 tokens at 4 tokens a second take 2 s to compute, at 16 half a second."""
    with Machine(configured()) as machine:
        machine.leave(range(8))
    with again(machine) as second:
        timed(second, 1.0)
        second.leave([*range(8), 7], publish=False)  # to learn how long it takes
        second.manager.evict(12)
        second.manager.prefill_tokens_per_s = rate
        assert second.leave([*range(8), 9], publish=False) == expected
        assert second.manager._link.num_declined_tokens == 8 - expected


def test_what_was_prefetched_takes_no_time_to_load():
    with Machine(configured()) as machine:
        machine.leave(range(8))
    with again(machine) as second:
        timed(second, 1.0)
        assert second.manager.prefetch([*range(8), 9]).wait(PATIENT)
        second.manager.prefill_tokens_per_s = 1e9
        assert second.leave([*range(8), 9], publish=False) == 8


def test_the_head_that_a_fast_store_has_is_loaded_though_the_rest_is_faster_computed(tmp_path):
    """4 tokens are on disk, 4 more far away: at a second a call, those are computed."""
    fast, slow = DiskTier(tmp_path, "1 MiB", timeout_s=PATIENT), shared()
    with Machine(configured(slow)) as machine:
        machine.leave(range(8))
    with again(machine, configured(fast)) as machine:
        machine.leave(range(4))
    with again(machine, configured(fast, slow)) as second:
        near, far = second.manager._link.stack._levels
        for level, seconds in ((near, 1e-6), (far, 1.0)):
            level.store._speed.note(16, seconds)
        second.manager.prefill_tokens_per_s = 100.0
        assert second.leave([*range(8), 9], publish=False) == 4
        assert second.manager._link.num_declined_tokens == 4


@pytest.mark.parametrize(("rate", "expected"), [(1e9, 0), (4.0, 8)])
def test_what_takes_longer_to_load_than_to_compute_is_not_prefetched(rate, expected):
    with Machine(configured()) as machine:
        machine.leave(range(8))
    with again(machine) as second:
        [level] = second.manager._link.stack._levels
        level.store._speed.note(64, 1.0)
        second.manager.prefill_tokens_per_s = rate
        assert second.manager.prefetch([*range(8), 9]).wait(PATIENT)
        assert CLIENTS[-1].asked.count("get") == (1 if expected else 0)
        assert second.leave([*range(8), 9], publish=False) == expected
        assert second.manager._link.num_declined_tokens == 2 * (8 - expected)  # by the admission, too


def test_an_admission_that_asks_no_store_takes_what_was_prefetched():
    with Machine(configured()) as machine:
        machine.leave(range(8))
    with again(machine) as second:
        second.manager.asks_stores = False
        assert second.leave([*range(8), 9], publish=False) == 0
        assert CLIENTS[-1].asked == []
        assert second.manager.prefetch([*range(8), 9]).wait(PATIENT)
        num_asked = len(CLIENTS[-1].asked)
        assert second.leave([*range(8), 9], publish=False) == 8
        second.manager.evict(12)
        assert second.leave([*range(8), 9], publish=False) == 0
        assert len(CLIENTS[-1].asked) == num_asked
        assert second.manager.asks_stores is False


# -- windows and states that the device has lost ----------------------------------------------------------------------


LOSING = {
    "sliding": [AttentionSpec(1, 1), AttentionSpec(1, 1, sliding_window=4)],
    "with a sink": [AttentionSpec(1, 1), AttentionSpec(1, 1, sliding_window=5, sink_tokens=1)],
    "chunked": [AttentionSpec(1, 1), AttentionSpec(1, 1, chunk_tokens=12)],
    "states": [AttentionSpec(1, 1), StateSpec([(1,)], checkpoint_tokens=2)],
}


def lose(machine, columns):
    """Let the device lose blocks of the only extent that its second group has."""
    [spanned] = machine.manager._state.spanned
    [extent] = machine.manager._state.tree.extents()
    at = np.array([column for column in columns if extent.blocks[spanned.index, column] >= 0])
    assert spanned._take(extent, at, len(at), "made room") == len(at)
    machine.manager.check()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", LOSING)
def test_what_the_device_has_lost_below_what_it_has_comes_from_stores(kind, ahead, tier):
    """It still has the K and V of full attention, and of the other group the end only."""
    config = configured(tier, layers=LOSING[kind], num_blocks=[24, 24], event_buffer=1000)
    with Machine(config) as machine:
        sequence = machine.manager.add_sequence(range(17))
        for end in (4, 8, 12, 16, 17):
            machine.memory.write(sequence, stop=end)
            machine.manager.commit([sequence], end)
        machine.manager.free(sequence)
        assert machine.manager.flush(PATIENT)
        lose(machine, range(6))
        prompt = [*range(8), 50, 51, 52]
        found = machine.manager.match_prefix(prompt)
        assert (found.num_tokens, sum(found.tiers.values())) == (0, 8)
        if ahead:
            assert machine.manager.prefetch(prompt).wait(PATIENT)
        assert machine.leave(prompt) == 8
        events = machine.manager.events
        assert Contents.of_snapshot(events.snapshot()).digest() == events.content_digest()
        assert machine.leave([*range(16), 9]) == 16


def test_what_was_lost_and_has_no_room_is_computed():
    config = configured(layers=LOSING["sliding"], num_blocks=[24, 9])
    with Machine(config) as machine:
        machine.leave(range(16))
        lose(machine, range(6))
        held = machine.compute(range(100, 112))
        assert machine.leave([*range(8), 50]) in (0, 8)
        machine.manager.free(held)


def lose_some(machine, chance):
    """Let the device lose a few blocks of its second group that nobody has in span, wherever they are."""
    state = machine.manager._state
    [group] = state.spanned
    for extent in list(state.tree.extents()):
        if extent.parent is not None and chance.random() < 0.5:
            columns = np.flatnonzero(extent.blocks[group.index] >= 0)
            num_lost = group._take(
                extent, np.sort(np.array(chance.sample(columns.tolist(), len(columns) // 2), int)), len(columns), "lost"
            )
            state.tree.note_evicted(num_lost)
            if extent.ticket:
                state.tree.queue.withdraw(extent)
                state.tree.offer(extent)


def computed_in_chunks(machine, tokens):
    """Compute a prompt, with a commit at every block, where states are kept."""
    sequence = machine.manager.add_sequence(tokens)
    machine.memory.verify(sequence)
    for end in range(sequence.num_cached_tokens // 2 * 2 + 2, len(tokens) + 2, 2):
        machine.memory.write(sequence, stop=min(end, len(tokens)))
        machine.manager.commit([sequence], min(end, len(tokens)))
    return sequence


@pytest.mark.parametrize("host", [0, 6])
@pytest.mark.parametrize("kind", LOSING)
@pytest.mark.parametrize("seed", range(3))
def test_what_is_lost_anywhere_comes_back_or_is_computed_and_is_never_wrong(kind, host, seed, monkeypatch):
    tiers = [HostTier(num_blocks=host, write="through" if seed else "back")] if host else []
    config = configured(*tiers, shared(), layers=LOSING[kind], num_blocks=[16, 12], event_buffer=10**6)
    chance, contents, kept, num_filled = Random(seed), Contents(), [], []
    fill_holes = restoring._fill_holes
    monkeypatch.setattr(restoring, "_fill_holes", lambda *each: num_filled.append(fill_holes(*each)) or num_filled[-1])
    with Machine(config) as machine:
        for turn in range(60):
            tokens = [turn % 2 * 100 + at for at in range(chance.randrange(3, 18))] + [200 + turn] * (turn % 5)
            if turn % 3 == 2:
                assert machine.manager.prefetch(tokens).wait(PATIENT)
            try:
                sequence = computed_in_chunks(machine, tokens)
            except OutOfBlocks:
                machine.manager.free(kept.pop(0)) if kept else None
                continue
            kept.append(sequence)
            if len(kept) > chance.randrange(3):
                machine.manager.free(kept.pop(0))
            assert machine.manager.flush(PATIENT)
            lose_some(machine, chance)
            machine.manager.check()
            for each in kept:
                machine.memory.verify(each)
            assert contents.follow(machine.manager.events.poll())
            assert contents.digest() == machine.manager.events.content_digest()
    assert sum(map(bool, num_filled)) > 3


@pytest.mark.parametrize("rate", [0, -1.0])
def test_a_rate_of_nothing_is_refused(rate):
    with Machine(configured()) as machine:
        with pytest.raises(ValueError, match="prefill_tokens_per_s"):
            machine.manager.prefill_tokens_per_s = rate
        assert machine.manager.prefill_tokens_per_s is None


# -- stores that are bad ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "conditions",
    [{"loss": 0.3}, {"corruption": 0.3}, {"failure": 0.3}, {"loss": 1.0}, {"corruption": 1.0}, {"failure": 1.0},
     {"loss": 0.2, "corruption": 0.2, "failure": 0.2}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(
    "layers", [[AttentionSpec(1, 1)], [AttentionSpec(1, 1), AttentionSpec(1, 1, sliding_window=5)]]
)
def test_a_store_that_loses_damages_or_fails_costs_tokens_and_is_never_wrong(conditions, layers):
    num_groups = len(layers)
    config = configured(num_blocks=[16] * num_groups, layers=layers)
    with Machine(config) as machine:
        chance = Random(7)
        for _ in range(60):
            the_store().conditions = Conditions(**conditions)
            tokens = [chance.randrange(2) for _ in range(chance.randrange(1, 20))]
            machine.leave(tokens)  # proves what it says
            if chance.random() < 0.5:
                machine.manager.evict(chance.randrange(16))
        if "failure" not in conditions:
            the_store().conditions = Conditions()
            machine.manager.evict(64)
            assert machine.leave([5, 5, 5, 5, 5]) == 0
            machine.manager.evict(64)
            assert machine.leave([5, 5, 5, 5, 5]) == 4


def test_a_store_that_lost_the_head_has_nothing_to_go_on_from():
    with Machine(configured()) as machine:
        machine.leave(range(12))
        the_store()._forget(CLIENTS[0].keys_put[0])
        machine.manager.evict(12)
        assert machine.leave([*range(12), 9]) == 0


def test_of_a_store_that_lost_the_middle_the_head_is_used():
    with Machine(configured()) as machine:
        machine.leave(range(12))
        the_store()._forget(CLIENTS[0].keys_put[3])
        machine.manager.evict(12)
        assert machine.leave([*range(12), 9], publish=False) == 6


def test_a_block_that_turns_out_damaged_when_it_is_read_shortens_the_prefix():
    with Machine(configured()) as machine:
        machine.leave(range(12))
        the_store().change(CLIENTS[0].keys_put[3], lambda entry: entry[:-1] + bytes([entry[-1] ^ 1]))
        machine.manager.evict(12)
        assert machine.leave([*range(12), 9], publish=False) == 6
        assert the_store().stats().num_corrupt == 1


class BadMemory(TokenMemory):
    """An oracle whose blocks cannot be filled, read, or copied, as a test says."""

    cannot = ()

    def perform(self, moves, *, late=False):
        if "perform" in self.cannot:
            raise OSError("cannot copy")
        super().perform(moves, late=late)

    def write_blocks(self, group, blocks, rows):
        if "write" in self.cannot:
            raise OSError("cannot write")
        super().write_blocks(group, blocks, rows)

    def read_blocks(self, group, blocks, tier="device"):
        if "read" in self.cannot:
            raise OSError("cannot read")
        return super().read_blocks(group, blocks, tier)


@pytest.mark.parametrize(
    "layers", [[AttentionSpec(1, 1)], [AttentionSpec(1, 1), AttentionSpec(1, 1, sliding_window=5)]]
)
def test_what_could_not_be_filled_is_computed_and_nobody_reads_it(layers):
    config = configured(num_blocks=[12] * len(layers), layers=layers)
    with Machine(config, memory=BadMemory(config)) as machine:
        machine.leave(range(8))
        machine.manager.evict(24)
        machine.memory.cannot = ("write",)
        assert machine.leave([*range(8), 9], publish=False) == 0
        machine.memory.cannot = ()
        assert machine.leave([*range(8), 9], publish=False) == 8


def test_what_could_not_be_filled_is_gone_with_what_host_memory_split_off_it():
    """Host memory has a fork of the prompt without its window, so that it adds nothing itself."""
    layers = [AttentionSpec(1, 1), AttentionSpec(1, 1, sliding_window=4)]
    tiers = [HostTier(num_blocks=[16, 16]), shared()]
    config = configured(*tiers, num_blocks=[12, 12], layers=layers)
    with Machine(config, memory=BadMemory(config)) as machine:
        machine.leave(range(12))
        machine.manager.evict(24)
        machine.memory.cannot = ("write",)
        machine.leave([*range(6), 90, 91, 92, 93, 94], publish=False)
        machine.manager.check()
        machine.memory.cannot = ()
        for prompt in ([*range(6), 9], [*range(4), 9], [*range(12), 9]):
            machine.leave(prompt, publish=False)


@pytest.mark.parametrize(
    "partial_reuse",
    [False, True],
)
def test_a_prompt_whose_filling_failed_goes_on_from_what_is_still_there(partial_reuse):
    """Room for what could not be filled was made by evicting what the prompt matched in part."""
    config = configured(num_blocks=5, block_size=4, partial_reuse=partial_reuse)
    with Machine(config, memory=BadMemory(config)) as machine:
        machine.leave(range(16))
        machine.manager.evict(5)
        machine.leave([0, 1, 2, 99], publish=True)
        machine.memory.cannot = ("write",)
        machine.leave([*range(16), 9], publish=False)
        machine.memory.cannot = ()
        assert machine.leave([*range(16), 9], publish=False) == 16


def test_a_prompt_whose_filling_failed_is_not_published_below_a_root_that_is_gone():
    """Room for what could not be filled was made by evicting all that there was of its namespace."""
    config = configured(num_blocks=4)
    with Machine(config, memory=BadMemory(config)) as machine:
        machine.leave(range(8))
        machine.leave(range(20, 28))
        machine.memory.cannot = ("write",)
        machine.leave(range(8))
        machine.manager.check()
        assert machine.manager.match_prefix(range(9)).num_tokens == 8


def test_a_copy_that_fails_while_a_store_is_to_be_read_leaves_nothing_held():
    config = configured(HostTier(num_blocks=8), shared(), num_blocks=6)
    with Machine(config, memory=BadMemory(config)) as machine:
        machine.leave(range(12))
        machine.manager.evict(6)
        machine.manager._state.lower._evict(0, 6)  # host memory keeps the head only
        machine.leave(range(50, 62))
        machine.memory.cannot = ("perform",)
        with pytest.raises(TransferError):
            machine.manager.add_sequence([*range(10), 9])
        machine.memory.cannot = ()
        machine.manager.check()
        assert machine.manager.num_free_blocks == 6
        machine.leave([*range(10), 9])


def test_a_namespace_is_dropped_from_stores_even_if_the_memory_fails():
    config = configured(HostTier(num_blocks=8), shared(), num_blocks=6)
    with Machine(config, memory=BadMemory(config)) as machine:
        machine.leave(range(8), namespace=("a",))
        machine.memory.cannot = ("perform",)
        for call in (lambda: machine.manager.evict(1), lambda: machine.manager.drop(namespace=("a",))):
            with pytest.raises(TransferError):
                call()
        machine.memory.cannot = ()
        machine.manager.evict(0)
        assert machine.manager.flush(PATIENT)
        assert the_store().stats().num_entries == 0
        assert machine.leave(range(9), namespace=("a",)) == 0


@pytest.mark.parametrize("write", ["through", "back"])
def test_a_state_that_the_memory_could_not_copy_is_not_stored(write):
    layers = [FULL, StateSpec([(1,)], checkpoint_tokens=2)]
    config = configured(shared(write=write), num_blocks=[12, 12], layers=layers)
    with Machine(config, memory=LosingMemory(config)) as machine:
        sequence = machine.manager.add_sequence(range(5))
        machine.memory.write(sequence, stop=4)
        machine.memory.loses = lambda move: move.group == 1
        with pytest.raises(TransferError):
            machine.manager.commit([sequence], 4)
        machine.memory.loses = lambda move: False
        machine.memory.write(sequence)
        machine.manager.commit([sequence])
        machine.manager.free(sequence)
        machine.manager.evict(24)
        assert machine.manager.flush(PATIENT)
        with again(machine) as second:
            assert second.leave([*range(4), 9], publish=False) == 0


def test_what_was_to_be_stored_before_copies_that_the_caller_makes_is_not_stored_after_them():
    config = configured(shared(write="back"), num_blocks=6, pin_budget=1.0)
    with Machine(config, memory=BadMemory(config)) as machine:
        machine.leave([20, 21])
        machine.memory.cannot = ("perform",)
        for tokens in (range(4), range(10, 14)):
            sequence = machine.compute(tokens)
            machine.manager.pin(machine.manager.match_prefix([*tokens, 9]))
        for one in machine.manager._state.rows.running():
            with pytest.raises(TransferError):
                machine.manager.rewind(one, 1)
        machine.memory.cannot = ()
        machine.memory.perform(machine.manager.take_moves(), late=True)
        machine.manager.append([sequence], [[7]])
        machine.memory.verify(sequence)
        assert machine.manager.flush(PATIENT)
        with again(machine) as second:
            assert second.leave([20, 21, 9], publish=False) == 0


def test_closing_closes_the_stores_even_if_the_memory_fails():
    config = configured(HostTier(num_blocks=4), shared(write="back"), num_blocks=4)
    machine = Machine(config, memory=BadMemory(config))
    machine.leave(range(8))
    machine.memory.cannot = ("perform",)
    with pytest.raises(TransferError):
        machine.manager.evict(4)
    with pytest.raises(TransferError):
        machine.manager.close()
    assert machine.manager._link.stack._is_closed


def test_the_state_in_which_a_sequence_ends_is_stored():
    """Its block was published before, without the state, which is kept when the sequence ends."""
    config = configured(layers=[AttentionSpec(1, 1), StateSpec([(1,)], checkpoint_tokens=4)], num_blocks=[12, 12])
    with Machine(config) as machine:
        sequence = machine.compute(range(8))
        machine.manager.append([sequence], [[8, 9]])
        machine.memory.write(sequence)
        machine.manager.commit([sequence])
        machine.manager.stats()
        machine.manager.free(sequence)
        assert machine.manager.match_prefix(range(11)).num_tokens == 10
        assert machine.manager.flush(PATIENT)
    with again(machine) as second:
        assert second.leave(range(11), publish=False) == 10


def test_blocks_that_cannot_be_read_for_a_store_are_not_stored_and_nothing_else():
    config = configured()
    with Machine(config, memory=BadMemory(config)) as machine:
        machine.memory.cannot = ("read",)
        sequence = machine.manager.add_sequence(range(8))
        machine.memory.write(sequence)
        machine.manager.commit([sequence])
        machine.manager.check()
        machine.memory.cannot = ()
        assert machine.leave(range(20, 24)) == 0
        assert machine.manager.flush(PATIENT)
        assert the_store().stats().num_entries == 2
        assert machine.leave(range(9)) == 8


def test_media_may_come_from_an_iterator_that_is_read_once():
    with Machine(configured(partial_reuse=False)) as machine:
        media = [Media(1, 3, "cat")]
        manager = machine.manager
        sequence = manager.add_sequence([7, 9, 9, 9, 5, 6, 7], media=iter(media))
        machine.memory.write(sequence)
        manager.commit([sequence])
        manager.free(sequence)
        assert manager.flush(PATIENT)
        manager.evict(12)
        assert manager.match_prefix([7, 9, 9, 9, 5, 6, 7], media=iter(media)).tiers["tests.tiers.test_stored"] == 6
        assert manager.prefetch([7, 9, 9, 9, 5, 6, 7], media=iter(media)).num_asked_tokens == 6


def test_a_manager_without_bytes_cannot_have_stores():
    with pytest.raises(ArgumentTypeError, match="block_format"):
        KVCacheManager(configured())


# -- real bytes -------------------------------------------------------------------------------------------------------

DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int4"]
KINDS = {
    "full": lambda dtype: [AttentionSpec(2, 8, dtype=dtype)] * 2,
    "full and sliding": lambda dtype: [
        AttentionSpec(2, 8, dtype=dtype),
        AttentionSpec(1, 4, dtype=dtype, sliding_window=5),
    ],
    "full and state": lambda dtype: [AttentionSpec(2, 8, dtype=dtype), StateSpec([(3, 5), (2,)], "float32", 4)],
}


class Bytes:
    """A manager over real memory, whose model writes bytes that depend on the prefix; what it wrote is remembered."""

    def __init__(self, config, written=None):
        self.memory = TorchMemory(config)
        self.manager = KVCacheManager(config, self.memory)
        self.written = {} if written is None else written

    def row_of(self, sequence, group, block):
        return np.asarray(self.memory.read_blocks(group, np.array([block], np.int32)))[0].tobytes()

    def leave(self, tokens, namespace=()):
        """Compute a prompt, whole blocks only, and end it; how much of it was there."""
        manager, memory, size = self.manager, self.memory, self.manager.config.block_size
        sequence = manager.add_sequence(tokens, namespace=namespace)
        num_cached = sequence.num_cached_tokens
        self.require(sequence, tokens, namespace, num_cached)
        for end in range(num_cached + size, len(tokens) + 1, size):
            for group, spec in enumerate(manager.config.groups):
                column = 0 if spec.kind == "state" else end // size - 1
                block = sequence.group_blocks(group)[column]
                content = namespace, tuple(tokens[:end]), group
                row = Random(repr(content)).randbytes(memory.layouts[group].num_bytes)
                memory.write_blocks(group, np.array([block], np.int32), np.frombuffer(bytearray(row), np.uint8)[None])
                self.written[content] = self.row_of(sequence, group, block)
            manager.commit([sequence], end)
            manager.stats()
        manager.commit([sequence])
        manager.free(sequence)
        assert manager.flush(PATIENT)
        manager.check()
        return num_cached

    def require(self, sequence, tokens, namespace, num_cached):
        """Prove that all that the next token reads is what was written, byte by byte."""
        size = self.manager.config.block_size
        for group, spec in enumerate(self.manager.config.groups):
            blocks = sequence.group_blocks(group)
            if spec.kind == "state":
                if num_cached:
                    expected = self.written[namespace, tuple(tokens[:num_cached]), group]
                    assert self.row_of(sequence, group, blocks[0]) == expected
                continue
            first = max(num_cached + 1 - spec.window, 0) // size if spec.window else 0
            for column in range(first, num_cached // size):
                expected = self.written[namespace, tuple(tokens[: (column + 1) * size]), group]
                assert self.row_of(sequence, group, blocks[column]) == expected


def real(kind, dtype, *tiers, order="layer_major", num_blocks=8):
    layers = KINDS[kind](dtype)
    num_groups = 1 if kind == "full" else 2
    return configured(*tiers, num_blocks=[num_blocks] * num_groups, layers=layers, storage_order=order)


@pytest.mark.parametrize("order", ["layer_major", "block_major"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_come_back_as_they_were_through_all_tiers_and_a_restart(dtype, kind, order, tmp_path):
    tiers = [HostTier(num_blocks=4), DiskTier(tmp_path, "4 MiB", timeout_s=PATIENT), shared()]
    config = real(kind, dtype, *tiers, order=order)
    one = Bytes(config)
    assert one.leave(range(8)) == 0
    one.manager.evict(16)
    assert one.leave([*range(8), 9, 9]) == 8
    assert one.leave(range(20, 32)) == 0
    assert one.leave([*range(4), 50, 51]) == 4
    one.manager.close()
    other = Bytes(config, one.written)
    assert other.leave([*range(20, 32), 7, 7]) == 12
    assert other.leave([*range(8), 9, 9, 7, 7]) == 10
    other.manager.close()


def test_one_storage_order_reads_what_another_has_stored():
    one = Bytes(real("full and sliding", "bfloat16", order="layer_major"))
    one.leave(range(8))
    other = Bytes(real("full and sliding", "bfloat16", order="block_major"), one.written)
    assert other.leave([*range(8), 7, 7]) == 8


def test_random_prompts_over_tiny_tiers_are_never_wrong(tmp_path):
    for number, kind in enumerate(KINDS):
        tiers = [HostTier(num_blocks=3), DiskTier(tmp_path / kind, "64 KiB", timeout_s=PATIENT), shared(write="back")]
        machine = Bytes(real(kind, "float16", *tiers, num_blocks=8))
        chance, num_hit = Random(number), 0
        for _ in range(40):
            tokens = [chance.randrange(2) for _ in range(2 * chance.randrange(1, 7))]
            num_hit += machine.leave(tokens, chance.choice([(), ("a",)]))
        assert num_hit
        machine.manager.close()


def test_torch_is_there_for_real_bytes():
    assert torch.zeros(1).dtype == torch.float32


# -- random calls -----------------------------------------------------------------------------------------------------


class StoreMachine(RuleBasedStateMachine):
    """Two machines that share a store, restart, and whose stores are bad now and then, each checked by an oracle."""

    @initialize(
        host=st.integers(0, 6), write=st.sampled_from(("through", "back")), block_size=st.sampled_from((1, 2)),
        num_blocks=st.integers(4, 9), layers=st.sampled_from(range(4)), partial_reuse=st.booleans(),
        min_priority=st.sampled_from((0, 36)), slower=st.booleans(), through=st.booleans(),
    )  # fmt: skip
    def start(self, host, write, block_size, num_blocks, layers, partial_reuse, min_priority, slower, through):
        SERVERS.clear()
        CLIENTS.clear()
        kinds = [
            [AttentionSpec(1, 1)],
            [AttentionSpec(1, 1), AttentionSpec(1, 1, sliding_window=2 * block_size + 1)],
            [AttentionSpec(1, 1), StateSpec([(1,)], checkpoint_tokens=block_size)],
            [AttentionSpec(1, 1, sliding_window=3), AttentionSpec(1, 1, chunk_tokens=2 * block_size)],
        ][layers]
        write_host = "through" if through else "back"
        tiers = [HostTier(num_blocks=host, min_priority=min_priority, write=write_host)] if host else []
        tiers += [shared(write=write), *([shared("slower_server")] if slower else [])]
        config = configured(
            *tiers, num_blocks=[num_blocks] * (2 if layers else 1), layers=kinds, block_size=block_size,
            partial_reuse=partial_reuse, max_sequences=4, max_sequence_length=8 * block_size, event_buffer=10**6,
        )  # fmt: skip
        self.config = config
        self.prefixes = Prefixes()
        self.contents = [Contents(), Contents()]
        self.machines = [self.opened(), self.opened()]
        self.live = [[], []]
        self.asleep = [[], []]
        self.prompts = []

    def opened(self):
        machine = Machine(self.config, self.prefixes, BadMemory(self.config))
        for level in machine.manager._link.stack._levels:
            level.store.breaker = CircuitBreaker(num_failures=10**9)
        return machine

    @rule(
        which=st.integers(0, 1),
        tokens=st.lists(st.sampled_from((0, 0, 0, 0, 1)), min_size=4, max_size=14),
        space=st.sampled_from(((), ("a",))),
        keep=st.booleans(),
        ahead=st.booleans(),
        publish=st.integers(0, 5),
    )
    def prompt(self, which, tokens, space, keep, ahead, publish):
        machine = self.machines[which]
        tokens = tokens[: self.config.max_sequence_length - 1]
        self.prompts = [*self.prompts[-9:], (tokens, space)]
        if ahead:
            assert machine.manager.prefetch(tokens, namespace=space).wait(PATIENT)
        try:
            sequence = machine.compute(tokens, namespace=space, publish=publish > 0)
        except (OutOfBlocks, NeverFits):
            return
        if keep:
            self.live[which].append(sequence)
        else:
            machine.manager.free(sequence)
        assert machine.manager.flush(PATIENT)

    @precondition(lambda self: self.prompts)
    @rule(which=st.integers(0, 1), pick=st.integers(0, 9), more=st.integers(0, 3), keep=st.booleans())
    def prompt_again(self, which, pick, more, keep):
        """Ask for an earlier prompt, on a device that has lost some or all of it."""
        tokens, space = self.prompts[pick % len(self.prompts)]
        self.machines[which].manager.evict(pick * 2)
        tokens = [*tokens, *[0, 1, 0][:more]]
        self.prompt(which, tokens=tokens, space=space, keep=keep, ahead=pick == 9, publish=1)

    @precondition(lambda self: any(self.live))
    @rule(which=st.integers(0, 1), pick=st.integers(0, 9), what=st.sampled_from(("free", "append", "suspend", "fork")))
    def go_on(self, which, pick, what):
        machine, live = self.machines[which], self.live[which]
        if not live:
            return
        sequence = live[pick % len(live)]
        try:
            if what == "append":
                machine.manager.append([sequence], [pick % 2])
                machine.memory.write(sequence)
                machine.manager.commit([sequence])
            elif what == "fork":
                live += machine.manager.fork(sequence)
            else:
                live.remove(sequence)
                getattr(machine.manager, what)(sequence)
                if what == "suspend":
                    self.asleep[which].append(sequence)
        except (OutOfBlocks, ValueError):
            pass
        assert machine.manager.flush(PATIENT)

    @precondition(lambda self: any(self.asleep))
    @rule(which=st.integers(0, 1))
    def resume(self, which):
        machine = self.machines[which]
        if not self.asleep[which]:
            return
        sequence = self.asleep[which][0]
        try:
            machine.manager.resume(sequence)
        except OutOfBlocks:
            return
        self.asleep[which].pop(0)
        machine.memory.verify(sequence)
        machine.memory.write(sequence)
        machine.manager.commit([sequence])
        self.live[which].append(sequence)

    @rule(which=st.integers(0, 1), pick=st.integers(0, 9))
    def lose(self, which, pick):
        """Let the device lose blocks of a window or of states that nobody has in span, wherever they are."""
        machine = self.machines[which]
        state = machine.manager._state
        found = [(extent, group) for extent in state.tree.extents() for group in state.spanned]
        if found:
            extent, group = found[pick % len(found)]
            num_lost = group.take_any(extent, 1 + pick // 2, "made room")
            state.tree.note_evicted(num_lost)
            if num_lost and extent.ticket:
                state.tree.queue.withdraw(extent)
                state.tree.offer(extent)

    @rule(which=st.integers(0, 1), n=st.integers(1, 20))
    def evict(self, which, n):
        self.machines[which].manager.evict(n)
        assert self.machines[which].manager.flush(PATIENT)

    @rule(which=st.integers(0, 1), what=st.sampled_from(("restart", "restart", "drop", "break", "mend", "conditions")),
          bad=st.sampled_from(("", "", "loss", "corruption", "failure")))  # fmt: skip
    def disturb(self, which, what, bad):
        """Restart a machine, let it drop a namespace or be unable to fill blocks, or let the stores be bad."""
        machine = self.machines[which]
        if what == "restart":
            machine.manager.close()
            self.machines[which], self.contents[which] = self.opened(), Contents()
            self.live[which], self.asleep[which] = [], []
        elif what == "drop":  # what the other machine has on its device, it may store again
            machine.manager.drop(namespace=("a",) if bad else ())
        elif what == "conditions":
            for store in SERVERS.values():
                store.conditions = Conditions(**({bad: 0.3} if bad else {}))
        else:
            machine.memory.cannot = ("write",) if what == "break" else ()

    @invariant()
    def everything_is_right(self):
        for machine, live in zip(getattr(self, "machines", ()), getattr(self, "live", ()), strict=True):
            machine.manager.check()
            for sequence in live:
                machine.memory.verify(sequence)

    @invariant()
    def events_tell_what_is_there(self):
        for machine, contents in zip(getattr(self, "machines", ()), getattr(self, "contents", ()), strict=True):
            assert contents.follow(machine.manager.events.poll())
            assert contents.digest() == machine.manager.events.content_digest()

    def teardown(self):
        for machine, live in zip(getattr(self, "machines", ()), getattr(self, "live", ()), strict=True):
            for sequence in live:
                machine.manager.free(sequence)
            manager = machine.manager
            assert manager.num_free_blocks == manager.num_blocks
            manager.close()


def test_two_machines_that_share_a_store_never_read_anything_wrong():
    options = {"database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}
    chosen = settings(max_examples=60, stateful_step_count=30, derandomize=True, **options)
    run_state_machine_as_test(StoreMachine, settings=chosen)
