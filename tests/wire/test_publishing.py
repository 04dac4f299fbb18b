"""From a source to a publisher: batches, gaps, failures, ends; and the queue between threads."""

import select

import pytest
from tests.wire.listed import PATIENT, ListedSource, cleared, wait_until

from kvist import ArgumentError
from kvist.wire.publishing import Feed, NullPublisher, Outbox, Pump


class Notes(NullPublisher):
    """Notes what it is given; None is a number that is skipped."""

    def __init__(self):
        self.given = []

    def publish(self, batch):
        self.given.append(batch)
        return True

    def skip(self):
        self.given.append(None)


def ids(events):
    return b" ".join(b"%d" % event.id for event in events)


def fed(*events, encode=ids):
    """What a publisher gets of each of these lists of events."""
    notes, source = Notes(), ListedSource()
    with Feed(source, encode, notes) as feed:
        for some in events:
            num_given = len(notes.given)
            source.add(*some)
            wait_until(lambda num_given=num_given: len(notes.given) > num_given)
        assert feed.close(PATIENT)
    return notes.given


def test_what_has_come_is_one_batch():
    assert fed(cleared(0, 1, 2), cleared(3)) == [b"0 1 2", b"3"]


def test_what_the_source_has_at_the_end_is_passed_on():
    notes, source = Notes(), ListedSource()
    feed = Feed(source, ids, notes)
    source.add(*cleared(*range(100)))
    assert feed.close(PATIENT)
    assert sum(len(batch.split()) for batch in notes.given) == 100
    assert feed.close(PATIENT)


def test_B174_events_that_the_source_has_lost_are_a_gap():
    assert fed(cleared(5, 6), cleared(7, 8)) == [None, b"5 6", b"7 8"]
    assert fed(cleared(0, 1, 3)) == [None, b"0 1 3"]


def test_ids_of_another_epoch_begin_again():
    assert fed([*cleared(0, 1), *cleared(0, epoch=8)], cleared(1, epoch=8)) == [b"0 1 0", b"1"]
    assert fed(cleared(0, 1), cleared(1, epoch=8)) == [b"0 1", None, b"1"]


def test_B185_events_that_cannot_be_encoded_are_a_gap_and_the_next_are_passed_on(caplog):
    def encode(events):
        if events[0].id == 0:
            raise TypeError("priority is None")
        return ids(events)

    assert fed(cleared(0), cleared(1), encode=encode) == [None, b"1"]
    assert "priority is None" in caplog.text


def test_a_source_that_fails_is_asked_again():
    class Failing(ListedSource):
        num_asked = 0

        def poll(self, timeout_s):
            self.num_asked += 1
            if self.num_asked < 3:
                raise OSError("not now")
            return super().poll(timeout_s)

    taken = []
    source = Failing(*cleared(0))
    with Pump(source, taken.extend, wait_s=0.001) as pump:
        wait_until(lambda: taken)
    assert taken == cleared(0)
    assert pump.num_errors == 2


def test_a_source_that_hangs_holds_an_end_up_no_longer_than_its_limit():
    class Hanging(ListedSource):
        def poll(self, timeout_s):
            return super().poll(PATIENT if timeout_s else 0.0)

    source = Hanging()
    pump = Pump(source, lambda _: None)
    assert not pump.close(0.01)
    source.add(*cleared(0))
    assert pump.close(PATIENT)


def test_an_outbox_drops_what_it_has_no_room_for_and_numbers_it_all_the_same():
    outbox = Outbox(2)
    assert [outbox.put(b"%d" % number) for number in range(3)] == [True, True, False]
    assert outbox.take() == (0, b"0")
    assert outbox.put(b"3")
    assert [outbox.take(), outbox.take(), outbox.take()] == [(1, b"1"), (3, b"3"), None]
    outbox.skip()
    outbox.put(b"5")
    assert outbox.take() == (5, b"5")
    assert outbox.num_dropped == 2
    outbox.dispose()


def test_an_outbox_wakes_its_thread_once_for_many_batches_and_for_its_end():
    outbox = Outbox(10)
    assert not select.select([outbox], [], [], 0)[0]
    outbox.put(b"a")
    outbox.put(b"b")
    assert select.select([outbox], [], [], 0)[0]
    outbox.acknowledge()
    assert not select.select([outbox], [], [], 0)[0]
    outbox.close(1.0)
    assert select.select([outbox], [], [], 0)[0]
    assert not outbox.put(b"c")
    outbox.dispose()
    assert (outbox.num_dropped, outbox.num_waiting) == (3, 0)


def test_an_outbox_without_room_is_refused():
    with pytest.raises(ArgumentError, match="max_waiting is 0"):
        Outbox(0)


def test_a_null_publisher_takes_everything():
    with NullPublisher() as publisher:
        assert publisher.publish(b"batch")
        publisher.skip()
        assert publisher.close()
        assert publisher.stats().num_published == 0
