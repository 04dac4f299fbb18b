"""Journals: what is recorded, and that a replay comes to the same; managers in lockstep."""

import json
import re
import sys
from array import array
from threading import Thread

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test

from kvist import AttentionSpec, CacheConfig, KVCacheManager, Media, Retention
from kvist.config import StateSpec
from kvist.errors import ArgumentError, SequenceError, TransferError, WireError
from kvist.journal import Journal, Lockstep, LockstepError, Replay, ReplayError, describe, replay, report
from kvist.journal.settings import policy_name, read_config, write_config
from kvist.journal.values import Names, Values, compact
from kvist.testing import CacheMachine
from kvist.tier_config import DiskTier, HostTier, RemoteTier
from kvist.wire.gather_local import local_transports

LAYER = AttentionSpec(2, 64)


def config_of(**options):
    return CacheConfig([LAYER], **{"block_size": 4, "num_blocks": 8, **options})


class Clock:
    now_s = 0.0

    def __call__(self):
        self.now_s += 0.5
        return self.now_s


@pytest.fixture
def path(tmp_path):
    return tmp_path / "calls.jsonl"


def hits(extent):
    return extent.hits


# -- random calls -----------------------------------------------------------------------------------------------------


def test_whatever_is_done_to_a_manager_a_replay_comes_to_the_same(tmp_path_factory):
    path = tmp_path_factory.mktemp("journal") / "calls.jsonl"

    class RecordedMachine(CacheMachine):
        @initialize(data=st.data())
        def start(self, data):
            super().start(data)
            self.journal = Journal(path, survives=False, digest_every=7).attach(self.manager)

        def teardown(self):
            is_right = sys.exc_info()[1] is self._outer_error
            super().teardown()
            if hasattr(self, "journal"):
                self.journal.close()
                if is_right:
                    self.require_the_same()

        def require_the_same(self):
            config, digest = self.config, self.manager.digest()
            policies = {
                policy_name(policy): policy
                for policy in (config.policy, *(tier.policy for tier in config.tiers))
                if callable(policy)
            }
            again = replay(path, policies=policies).manager
            again.check()
            assert again.digest() == digest

    run_state_machine_as_test(RecordedMachine)


# -- values -----------------------------------------------------------------------------------------------------------

scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=5) | st.binary(max_size=9)
values = st.recursive(
    scalars | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple),
    max_leaves=12,
)


@given(values)
def test_plain_values_come_back_as_they_were(value):
    written = json.loads(compact(Values(Names()).write(value)))
    again = Values(Names()).read(written)
    assert again == value
    assert type(again) is type(value)


@given(
    st.sampled_from(["<i4", "<i8", "<u2", "i1", ">i4", "<u8", "?", "<f8"]),
    st.lists(st.integers(0, 100) | st.integers(0, 127), max_size=40),
    st.booleans(),
)
def test_arrays_come_back_with_dtype_shape_and_values(dtype, numbers, is_flat):
    original = np.array(numbers, dtype).reshape(-1 if is_flat else (1, -1))
    again = Values(Names()).read(json.loads(compact(Values(Names()).write(original))))
    assert again.dtype == original.dtype
    assert again.shape == original.shape
    assert again.tolist() == original.tolist()


@pytest.mark.parametrize(
    "original",
    [range(3, 9, 2), bytearray(b"ab"), array("i", [1, 2]), np.int32(7), {"a": (1, b"b")}, np.array([None, 3])],
    ids=lambda original: type(original).__name__,
)
def test_other_values_come_back_as_they_were(original):
    again = Values(Names()).read(json.loads(compact(Values(Names()).write(original))))
    assert type(again) is type(original)
    assert np.array_equal(again, original) if isinstance(original, np.ndarray) else again == original


def test_token_ids_take_two_bytes_where_these_hold_them():
    tokens = np.arange(1000, dtype=np.int32)
    assert len(compact(Values(Names()).write(tokens))) < 2.8 * len(tokens)


def test_what_was_not_written_is_refused():
    with pytest.raises(WireError, match=r"argument: expected one of tuple, dict, .*, got 'pickle'"):
        Values(Names()).read({"pickle": "gASV"})


# -- settings ---------------------------------------------------------------------------------------------------------


def test_settings_come_back_without_directories_hosts_and_credentials():
    layers = [AttentionSpec(2, 64, sliding_window=8), StateSpec([(2, 3)], "float16")]
    tiers = [
        HostTier(num_blocks=4, policy=hits),
        DiskTier("/secret/place", "1 GiB", write="back"),
        RemoteTier("valkey://user:password@host:1/2", timeout_s=0.5),
    ]
    config = CacheConfig(layers, 4, num_blocks=[8, 4], policy="lru", tiers=tiers, model="model@1")
    told = compact(write_config(config))
    assert not any(word in told for word in ("secret", "user", "password", "host:"))
    again = read_config(json.loads(told), {policy_name(hits): hits})
    again.validate()
    assert again.layers == config.layers
    assert again.fingerprint == config.fingerprint
    assert again.tiers[0] == tiers[0]
    assert (again.tiers[1].write, again.tiers[2].timeout_s) == ("back", 0.5)


def test_layers_that_are_alike_are_written_once():
    assert len(compact(write_config(CacheConfig([LAYER] * 80, num_blocks=8)))) < 1000
    assert read_config(json.loads(compact(write_config(CacheConfig([LAYER] * 3, num_blocks=8))))).layers == [LAYER] * 3


def test_a_policy_of_a_users_own_must_be_given_again(path):
    with Journal(path).attach(KVCacheManager(config_of(policy=hits))):
        pass
    with pytest.raises(ArgumentError, match=r"policy .*\.hits: pass policies="):
        replay(path)
    assert replay(path, policies={policy_name(hits): hits}).num_calls == 1


# -- recording and replaying ------------------------------------------------------------------------------------------


def busy(manager):
    """Use most calls, with a refusal and an error of each kind."""
    first = manager.add_sequence(
        np.arange(10),
        namespace=("tenant", 1, b"salt"),
        media=iter([Media(2, 3, "image")]),
        retention=Retention([(0, 4, 80, 5.0)]),
    )
    manager.commit([first])
    second, third = manager.fork(first, 2)
    manager.append(np.array([second.row, third.row]), np.array([7, 8]))
    manager.append((each for each in [second]), [[1, 2]])
    manager.commit(iter([second, third]))
    match = manager.match_prefix(list(range(5)))
    with manager.pin(match):
        pass
    with pytest.raises(RuntimeError):
        manager.add_sequence(range(30))
    with pytest.raises(ValueError, match="freed"):
        manager.free(first)
        manager.free(first)
    with pytest.raises(TypeError):
        manager.add_sequence(object())
    manager.perform(manager.forecast().release(second).add([1, 2, 3]))
    manager.suspend(third)
    manager.resume(third)
    manager.rewind(third, 1)
    assert manager.num_free_blocks
    manager.evict(1)
    return third


def test_calls_clock_and_errors_are_recorded_and_replayed(path):
    manager = KVCacheManager(config_of(num_blocks=8, max_sequence_length=64), clock=Clock())
    with Journal(path).attach(manager):
        busy(manager)
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert lines[0]["versions"].keys() == {"kvist", "numpy", "python"}
    assert [line[3]["raised"] for line in lines[1:] if "raised" in line[3]] == [
        "OutOfBlocks",
        "SequenceError",
        "ArgumentTypeError",
    ]
    assert any("clock" in line[3] for line in lines[1:])
    again = replay(path)
    assert again.num_calls == len(lines) - 1
    assert again.manager.digest() == manager.digest()


def test_what_expires_does_so_again_at_the_same_call(path):
    clock = Clock()
    manager = KVCacheManager(config_of(), clock=clock)
    with Journal(path).attach(manager):
        sequence = manager.add_sequence([1, 2, 3, 4, 5])
        manager.commit([sequence])
        manager.free(sequence)
        manager.pin(manager.match_prefix([1, 2, 3, 4, 5]), lifetime_s=3.0)
        clock.now_s += 10
        assert manager.stats().num_pins == 0
    assert replay(path).manager.digest() == manager.digest()
    written = re.sub(rb'"clock":\[[^]]*]', b'"clock":[0.0]', path.read_bytes())
    path.write_bytes(written)
    with pytest.raises(ReplayError, match="the digest is"):
        replay(path)


def test_after_closing_the_manager_is_as_it_was(path):
    clock = Clock()
    manager = KVCacheManager(config_of(), clock=clock)
    journal = Journal(path).attach(manager)
    pin = manager.pin(manager.match_prefix([1]))
    assert type(manager) is not KVCacheManager
    journal.close()
    journal.close()
    assert type(manager) is KVCacheManager
    pin.release()
    size = path.stat().st_size
    manager.add_sequence([1])
    assert path.stat().st_size == size


def test_a_replay_stops_where_it_is_told_and_shows_the_state(path):
    manager = KVCacheManager(config_of())
    with Journal(path).attach(manager):
        first = manager.add_sequence([1, 2, 3, 4, 5])
        manager.commit([first])
        digest = manager.digest()
        manager.free(first)
    again = Replay(path)
    assert again.run(stop_at=3).digest() == digest
    assert str(again.step()) == 'call 4: free({"sequence": 0})'
    told = report(path, stop_at=2, state=True)
    assert told["num_calls"] == 2
    assert told["calls"] == {"add_sequence": 1, "commit": 1}
    assert told["problem"] is None
    assert told["state"].splitlines()[-1].startswith("row 0: 5 tokens, 5 computed, 0 found in the cache")
    assert describe(manager).startswith("0 sequences run")
    json.dumps(told)


def test_a_call_that_does_something_else_is_named(path):
    manager = KVCacheManager(config_of())
    with Journal(path).attach(manager):
        manager.free(manager.add_sequence([1, 2, 3]))
        manager.add_sequence([1, 2])
    written = path.read_text(encoding="utf-8")
    path.write_text(written.replace("[[1,2]],{},{}", '[[1,2]],{},{"raised":"OutOfBlocks"}'), encoding="utf-8")
    with pytest.raises(ReplayError, match=r"call 3: add_sequence.*it raised nothing, the journal says OutOfBlocks"):
        replay(path)
    path.write_text(written.replace("[[1,2]],{},{}", "[[1,3]],{},{}"), encoding="utf-8")
    assert "call 4: digest() raised" not in (problem := report(path)["problem"])
    assert problem.startswith("call 4: digest(): the digest is")
    path.write_text(written.replace("[[1,2]],{},{}", '[[1,2]],{},{"clock":[1.0]}'), encoding="utf-8")
    with pytest.raises(ReplayError, match=r"call 3: .*asked less of clock"):
        replay(path)


def test_a_journal_that_is_cut_off_is_replayed_as_far_as_it_goes(path):
    manager = KVCacheManager(config_of())
    with Journal(path).attach(manager):
        manager.commit([manager.add_sequence([1, 2, 3])])
    whole = path.read_bytes()
    num_before = whole.count(b"\n") - 1
    last = whole.rindex(b"\n", 0, -1) + 1
    seen = set()
    for end in range(last, len(whole) + 1):
        path.write_bytes(whole[:end])
        told = report(path)
        assert told["problem"] is None
        seen.add((told["num_calls"] - num_before + 1, told["never_returned"]))
    assert seen == {(0, False), (1, True), (1, False)}


def test_each_call_is_in_the_file_before_it_is_made(path):
    manager = KVCacheManager(config_of())
    journal = Journal(path).attach(manager)

    class Looking:
        def __iter__(self):
            return iter([])

        def __index__(self):
            seen.append(path.read_bytes().splitlines()[-1])
            raise KeyboardInterrupt

    seen = []
    with pytest.raises(KeyboardInterrupt):
        manager.add_sequence([1, Looking()])
    journal.close()
    assert seen == [b'["add_sequence",[[1,[]]],{},']
    assert json.loads(path.read_bytes().splitlines()[1])[3] == {"raised": "KeyboardInterrupt"}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "head: expected that of a journal, got b''"),
        (b"[1]\n", "head: expected that of a journal"),
        (b'{"kvist journal": 99}\n', "head: expected format 1, got 99"),
    ],
)
def test_what_is_no_journal_is_refused(path, content, told):
    path.write_bytes(content)
    with pytest.raises(WireError, match=told):
        replay(path)


def test_only_calls_of_a_manager_are_made(path):
    with Journal(path).attach(KVCacheManager(config_of())):
        pass
    path.write_bytes(path.read_bytes() + b'["__init__",[],{},{}]\n')
    with pytest.raises(WireError, match="call 2: expected a known call"):
        replay(path)


def test_a_journal_begins_before_anything_runs(path):
    manager = KVCacheManager(config_of())
    sequence = manager.add_sequence([1, 2, 3])
    with pytest.raises(
        SequenceError, match="a journal begins with an empty manager, before its first call; reset: 1 seq"
    ):
        Journal(path).attach(manager)
    manager.free(sequence)
    with Journal(path).attach(manager) as journal, pytest.raises(SequenceError, match="attached already"):
        journal.attach(manager)
    assert replay(path).manager.digest() == manager.digest()


class FailingMemory:
    num_left = 0

    def perform(self, moves):
        self.num_left -= 1
        if self.num_left == 0:
            raise OSError("broken")


def test_failures_of_the_memory_are_replayed(path):
    memory = FailingMemory()
    manager = KVCacheManager(config_of(), memory)
    with Journal(path).attach(manager):
        first = manager.add_sequence([1, 2, 3, 4, 5, 6])
        manager.commit([first])
        memory.num_left = 1
        with pytest.raises(TransferError):
            manager.fork(first)
        manager.fork(first)
    assert b'{"memory":[0],"raised":"TransferError"}' in path.read_bytes()
    assert replay(path).manager.digest() == manager.digest()


def test_many_ended_sequences_are_forgotten_and_still_refused(path, monkeypatch):
    monkeypatch.setattr("kvist.journal.values.MAX_FORGOTTEN", 4)
    manager = KVCacheManager(config_of())
    with Journal(path).attach(manager) as journal:
        journal._values.names._sweep_at = 8
        oldest = manager.add_sequence([1])
        manager.free(oldest)
        for _ in range(40):
            manager.free(manager.add_sequence([1]))
        assert len(journal._values.names._things) < 20
        for call in (manager.free, manager.suspend, manager.resume, manager.fork):
            with pytest.raises(SequenceError):
                call(oldest)
        with pytest.raises(SequenceError):
            manager.commit([oldest])
    assert replay(path).manager.digest() == manager.digest()


def test_what_came_from_stores_is_replayed_without_them(path, tmp_path):
    from kvist.testing import TokenMemory

    config = config_of(tiers=[DiskTier(tmp_path / "store")], model="model@1")
    for is_recorded in (False, True):
        memory = TokenMemory(config)
        with KVCacheManager(config, memory) as manager:
            memory.attach(manager)
            journal = Journal(path).attach(manager) if is_recorded else None
            sequence = manager.add_sequence(np.arange(12))
            assert sequence.num_cached_tokens == 8 * is_recorded
            memory.write(sequence, sequence.num_cached_tokens, 12)
            manager.commit([sequence])
            manager.match_prefix(np.arange(12))
            manager.flush()
            manager.drop(namespace=("other",))
            if journal:
                journal.close()
                digest = manager.digest()
    assert b'"stored":[2]' in path.read_bytes()
    assert replay(path).manager.digest() == digest


# -- lockstep ---------------------------------------------------------------------------------------------------------


def in_lockstep(size, play, **options):
    """Let each rank, in a thread of its own, play with a manager; returns what each has raised."""
    raised = [None] * size

    def run(rank, transport):
        manager = KVCacheManager(config_of(max_sequences=4))
        lockstep = Lockstep(manager, transport, **{"every_n_steps": 4, **options})
        try:
            play(rank, manager, lockstep)
        except (LockstepError, TransferError) as error:
            raised[rank] = error

    threads = [Thread(target=run, args=each) for each in enumerate(local_transports(size))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def request(manager, tokens):
    sequence = manager.add_sequence(tokens)
    manager.commit([sequence])
    manager.free(sequence)


def test_ranks_that_are_fed_the_same_stay_equal():
    def play(rank, manager, lockstep):
        compared = 0
        for step in range(40):
            request(manager, [step, 1, 2, 3, 4])
            compared += lockstep.step()
        assert compared == 10

    assert in_lockstep(3, play) == [None] * 3


@pytest.mark.parametrize("step_of_fault", [0, 5, 19])
def test_the_first_call_that_differs_is_named_on_all_ranks(step_of_fault):
    def play(rank, manager, lockstep):
        for step in range(20):
            request(manager, [step, 9 if rank == 1 and step == step_of_fault else 1, 2, 3, 4])
            lockstep.step()

    texts = {str(error) for error in in_lockstep(3, play)}
    assert len(texts) == 1
    lines = texts.pop().splitlines()
    number = 3 * step_of_fault + step_of_fault // 4 + 1
    assert lines[0] == f"call {number} was the first that differed:"
    assert lines[1].startswith(f'  rank 0, 2: ["add_sequence",[[{step_of_fault},1,2,3,4]]')
    assert lines[2].startswith(f'  rank 1: ["add_sequence",[[{step_of_fault},9,2,3,4]]')


def test_a_call_that_one_rank_did_not_make_is_named():
    def play(rank, manager, lockstep):
        request(manager, [1, 2, 3])
        if rank == 0:
            manager.evict(1)
        lockstep.compare()

    texts = [str(error) for error in in_lockstep(2, play)]
    assert texts[0] == texts[1]
    assert texts[0].startswith('call 4 was the first that differed:\n  rank 0: ["evict",[1],{}] -> ')
    assert '\n  rank 1: ["digest",[],{}] -> ' in texts[0]


def test_a_difference_that_is_older_than_what_is_remembered_is_told_so():
    def play(rank, manager, lockstep):
        manager.evict(rank)
        for _ in range(9):
            manager.evict(0)
        lockstep.compare()

    texts = [str(error) for error in in_lockstep(2, play, num_remembered=4)]
    assert texts[0].startswith("the ranks differ since before call 8, the oldest that is remembered")


def test_states_that_differ_after_equal_calls_are_told_so():
    def play(rank, manager, lockstep):
        request(manager, [1, 2, 3, 4])
        if rank:
            manager._state.tree.tick += 1
        for extent in manager._state.tree.extents():
            extent.hits += rank
        lockstep.compare()

    texts = [str(error) for error in in_lockstep(2, play)]
    assert "differ" in texts[0]
    assert texts[0] == texts[1]


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_the_limit():
    def play(rank, manager, lockstep):
        if rank == 0:
            lockstep.compare()

    raised = in_lockstep(2, play, timeout_s=0.05)
    assert isinstance(raised[0], TransferError)


def test_a_journal_and_lockstep_listen_to_one_manager(path):
    manager = KVCacheManager(config_of())
    lockstep = Lockstep(manager, local_transports(1)[0], 1)
    with Journal(path, digest_every=2).attach(manager):
        for step in range(6):
            request(manager, [step, 2, 3])
            lockstep.step()
    assert replay(path).manager.digest() == manager.digest()
    lockstep.close()
    assert type(manager) is KVCacheManager


@pytest.mark.parametrize("options", [{"every_n_steps": 0}, {"num_remembered": True}])
def test_lockstep_refuses_counts_that_cannot_be(options):
    with pytest.raises(ArgumentError, match="must be an int above 0"):
        Lockstep(KVCacheManager(config_of()), local_transports(1)[0], **options)
