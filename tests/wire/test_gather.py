"""Gathering within one process: what ranks tell one another, bounds, stops and time limits, by hand and by threads."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.errors import ArgumentError, SequenceError, TransferError, WireError
from kvist.wire.gather import Gather
from kvist.wire.gather_local import local_transports
from kvist.wire.gather_messages import Kind, Message


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def gathers(size, clock=None, **options):
    options = {"period_s": 1.0, "timeout_s": 10.0, "threaded": False, **options}
    return [Gather(end, clock=clock or Clock(), **options) for end in local_transports(size)]


def advance(ranks):
    for gather in ranks:
        gather.advance()


# -- messages ---------------------------------------------------------------------------------------------------------


def test_a_message_has_golden_bytes():
    packed = Message(Kind.EVENTS, [b"stored", b""], num_lost=258).pack()
    assert packed.hex() == "6b673101020100000000000002000000000000000600000000000000" + b"stored".hex()
    assert Message.unpack(packed) == Message(Kind.EVENTS, [b"stored", b""], 258)


@given(st.sampled_from(Kind), st.lists(st.binary(max_size=40), max_size=20), st.integers(0, 2**64 - 1))
def test_messages_come_back_as_they_were(kind, events, num_lost):
    assert Message.unpack(Message(kind, events, num_lost).pack()) == Message(kind, events, num_lost)


@pytest.mark.parametrize(
    ("packed", "told"),
    [
        (b"", "head: expected 20 bytes, got 0"),
        (b"xx" + bytes(18), r"magic: expected b'kg1', got b'xx\\x00'"),
        (b"kg1\x07" + bytes(16), "kind: expected 1 to 6, got 7"),
        (Message(Kind.LAST, [b"a", b"b"]).pack()[:24], "lengths: expected 2 of 4 bytes, got 4 bytes"),
        (Message(Kind.LAST, [b"abc"]).pack()[:-1], "events: expected 3 bytes, got 2"),
    ],
)
def test_what_is_not_a_message_is_refused(packed, told):
    with pytest.raises(WireError, match=told):
        Message.unpack(packed)


# -- construction -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_events": 0}, "max_events is 0, must be an int above 0"),
        ({"max_events": True}, "max_events is True"),
        ({"rank": 0}, "rank is 0, size is None: give both, or neither"),
        ({"size": 4}, "rank is None, size is 4: give both, or neither"),
        ({"rank": 4, "size": 4}, "rank is 4, must be from 0 to size - 1 = 3"),
        ({"rank": -1, "size": 4}, "rank is -1, must be from 0"),
        ({"rank": 0.0, "size": 1}, r"rank is 0\.0, must be an int"),
        ({"rank": 1, "size": 2}, "rank is 1 of 2, but there is no transport"),
        ({"period_s": 0}, "period_s is 0, must be a number of seconds above 0"),
        ({"timeout_s": float("inf")}, "timeout_s is inf"),
        ({"period_s": 1.0, "timeout_s": 1.5}, r"timeout_s is 1\.5, must be at least two periods of 1\.0 s"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, told):
    with pytest.raises(ArgumentError, match=told):
        Gather(None, **options)


def test_a_rank_must_be_that_of_the_transport():
    ends = local_transports(2)
    with pytest.raises(ArgumentError, match="rank is 0 of 2, but the transport is 1 of 2"):
        Gather(ends[1], rank=0, size=2)


def test_a_thread_is_refused_where_none_may_call():
    (end,) = local_transports(1)
    end.unfit_for_threads = "MPI has MPI_THREAD_FUNNELED"
    with pytest.raises(ArgumentError, match=r"MPI_THREAD_FUNNELED; pass threaded=False and call advance\(\)"):
        Gather(end)


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_each_event_arrives_in_order_with_its_rank():
    clock = Clock()
    ranks = gathers(3, clock)
    for gather in ranks:
        gather.offer([b"first of %d" % gather.rank, b"second of %d" % gather.rank])
    clock.now_s = 1.0
    advance(ranks[1:] + ranks[:1])
    assert sorted(ranks[0].poll()) == [(r, b"%s of %d" % (n, r)) for r in range(3) for n in (b"first", b"second")]


def test_a_rank_tells_once_a_period_and_only_after_an_answer():
    clock, told = Clock(), []
    ends = local_transports(2)
    leader, follower = (Gather(end, 1.0, threaded=False, clock=clock) for end in ends)
    ends[1].send = lambda rank, message: told.append((clock.now_s, len(Message.unpack(message).events)))
    for clock.now_s in (0.5, 1.0, 1.5, 2.5):
        follower.offer([b"event"])
        follower.advance()
    assert told == [(1.0, 2)]
    ends[0].send(1, Message(Kind.GO_ON).pack())
    follower.advance()
    assert told == [(1.0, 2), (2.5, 2)]
    assert leader.poll() == []


def test_a_rank_keeps_the_newest_events_up_to_its_bound_and_rank_0_that_many_for_each():
    clock = Clock()
    ranks = gathers(2, clock, max_events=3)
    for gather in ranks:
        gather.offer([b"%d" % number for number in range(8)])
    clock.now_s = 1.0
    advance(ranks[1:] + ranks[:1])
    assert ranks[0].num_lost == {0: 5, 1: 5}
    gathered = ranks[0].poll()
    assert gathered == [(0, b"5"), (0, b"6"), (0, b"7"), (1, b"5"), (1, b"6"), (1, b"7")]
    assert ranks[1].num_lost == {1: 5}


@pytest.mark.parametrize("closing", [0, 2])
def test_all_stop_when_one_does_and_what_was_offered_before_arrives(closing):
    clock = Clock()
    ranks = gathers(3, clock)
    for gather in ranks:
        gather.offer([b"event"])
    ranks[closing]._role.finish()
    for clock.now_s in range(1, 5):
        advance(ranks)
    assert all(gather.is_stopped for gather in ranks)
    assert sorted(ranks[0].poll(None)) == [(rank, b"event") for rank in range(3)]
    ranks[1].offer([b"too late"])
    assert ranks[1].num_lost == {1: 1}
    for gather in ranks:
        gather.close()
        gather.close()


def test_more_than_one_message_holds_arrives_as_well(monkeypatch):
    monkeypatch.setattr("kvist.wire.gather_roles.MAX_MESSAGE_BYTES", 10)
    clock = Clock()
    leader, follower = gathers(2, clock)
    events = [b"12345", b"67890", b"longer than a message may be", b"x"]
    follower.offer(events)
    follower._role.finish()
    for clock.now_s in range(1, 5):
        follower.advance()
        leader.advance()
    assert [event for _, event in leader.poll()] == events


def test_a_rank_that_is_silent_is_named_on_all_others():
    clock = Clock()
    ends = local_transports(3)
    ranks = [Gather(end, 1.0, timeout_s=10.0, threaded=False, clock=clock) for end in ends]
    for clock.now_s in range(1, 5):
        advance(ranks)
    ends[2].is_cut = True
    ranks[1].offer([b"before"])
    for clock.now_s in range(5, 16):
        advance(ranks[:2])
    clock.now_s = 16
    ranks[1].advance()
    with pytest.raises(TransferError, match=r"^rank 2 has not been heard for 11\.0 s, the limit is 10 s$"):
        ranks[0].advance()
    with pytest.raises(TransferError, match=r"^rank 0 has ended the gathering: rank 2 has not been heard"):
        ranks[1].advance()
    assert ranks[0].poll() == [(1, b"before")]
    for call in (ranks[0].poll, lambda: ranks[1].offer([b"x"]), ranks[1].advance, ranks[1].close):
        with pytest.raises(TransferError, match="rank 2 has not been heard"):
            call()


def test_ranks_that_rank_0_does_not_answer_end_by_themselves():
    clock = Clock()
    _, follower, _ = gathers(3, clock)
    clock.now_s = 1.0
    follower.advance()
    clock.now_s = 11.5
    with pytest.raises(TransferError, match=r"^rank 0 has not answered for 10\.5 s, the limit is 10 s$"):
        follower.advance()


def test_a_message_of_something_else_ends_the_gathering_everywhere():
    clock = Clock()
    ends = local_transports(3)
    ranks = [Gather(end, 1.0, threaded=False, clock=clock) for end in ends]
    ends[1].send(0, b"something else, not of this protocol")
    with pytest.raises(TransferError, match="magic: expected"):
        ranks[0].advance()
    with pytest.raises(TransferError, match="rank 0 has ended the gathering: magic"):
        ranks[2].advance()


def test_what_breaks_in_a_transport_is_a_transfer_error():
    (_, end) = local_transports(2)
    gather = Gather(end, 1.0, threaded=False)
    end.receive = lambda: 1 / 0
    with pytest.raises(TransferError, match="rank 1 cannot gather events: ZeroDivisionError"):
        gather.advance()


def test_B186_only_rank_0_polls():
    with pytest.raises(SequenceError, match="events are gathered on rank 0, this is rank 1"):
        gathers(2)[1].poll()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=40), st.integers(1, 20))
def test_whatever_the_order_of_steps_nothing_comes_twice_and_all_is_counted(steps, max_events):
    clock = Clock()
    ranks = gathers(3, clock, max_events=max_events, timeout_s=1000.0)
    offered, gathered = [0, 0, 0], []
    for rank, n in steps:
        clock.now_s += 0.5
        ranks[rank].offer([b"%d" % number for number in range(offered[rank], offered[rank] + n)])
        offered[rank] += n
        ranks[rank if n % 2 else 0].advance()
        gathered += ranks[0].poll() if n % 3 else []
    for gather in ranks:
        gather._role.finish()
    for _ in range(4):
        advance(ranks)
    gathered += ranks[0].poll()
    for rank in range(3):
        numbers = [int(event) for origin, event in gathered if origin == rank]
        assert all(before < after for before, after in pairwise(numbers))
        assert len(numbers) + ranks[0].num_lost.get(rank, 0) == offered[rank]


# -- by threads -------------------------------------------------------------------------------------------------------


def test_threads_gather_while_ranks_offer():
    ranks = [Gather(end, 0.002) for end in local_transports(4)]
    for number in range(200):
        for gather in ranks:
            gather.offer([b"%d" % number])
    gathered = []
    while len(gathered) < 800:
        gathered += ranks[0].poll(None)
    ranks[3].close()
    for gather in ranks:
        gather.close()
    assert [int(event) for rank, event in gathered if rank == 2] == list(range(200))
    assert ranks[0].poll(None) == []


def test_a_thread_that_fails_wakes_who_polls():
    ends = local_transports(2)
    with (
        pytest.raises(TransferError, match="rank 1 has not been heard"),
        Gather(ends[0], 0.01, timeout_s=0.05) as alone,
    ):
        alone.poll(None)
