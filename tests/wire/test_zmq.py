"""The publisher as vLLM-style subscribers see it. The client is written from vLLM's protocol, and knows no more."""

import socket
import threading
from collections import Counter

import msgspec
import pytest
import zmq
from tests.tiers.services import free_port
from tests.wire.listed import PATIENT, ListedSource, cleared, wait_until

from kvist import ArgumentError, ConfigError
from kvist.wire.opening import EventsConfig, open_publisher
from kvist.wire.publishing import Feed, NullPublisher
from kvist.wire.zmq import ZmqPublisher, offset_endpoint

ANY_PORT = "tcp://127.0.0.1:*"
PATIENT_MS = int(PATIENT * 1000)


class Subscriber:
    """Follows the batches of a publisher, asks for those it has missed, and keeps what they store in an index."""

    def __init__(self, endpoint, replay_endpoint=None, *, topic=b"", binds=False, **options):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        for name, value in options.items():
            setattr(self.socket, name, value)
        self.socket.subscribe(topic)
        (self.socket.bind if binds else self.socket.connect)(endpoint)
        self.replay = None
        if replay_endpoint is not None:
            self.replay = self.context.socket(zmq.DEALER)
            self.replay.rcvhwm = 0
            self.replay.connect(replay_endpoint)
        self.last, self.index, self.num_gaps = -1, {}, 0

    def close(self):
        self.context.destroy(linger=0)

    def receive(self, timeout_ms=PATIENT_MS):
        """One message as (topic, sequence number, payload), None if none comes."""
        if not self.socket.poll(timeout_ms):
            return None
        topic, sequence, payload = self.socket.recv_multipart()
        assert len(sequence) == 8
        return topic, int.from_bytes(sequence, "big"), payload

    def replayed(self, start):
        """What the publisher still has from a number on, as (topic, sequence number, payload)."""
        self.replay.send_multipart([b"", start.to_bytes(8, "big")])
        return self.answer()

    def answer(self):
        """The messages of one answer, without the end mark."""
        found = []
        while True:
            assert self.replay.poll(PATIENT_MS)
            empty, topic, sequence, payload = self.replay.recv_multipart()
            assert empty == b""
            if int.from_bytes(sequence, "big", signed=True) == -1:
                assert (topic, payload) == (b"", b"")
                return found
            found.append((topic, int.from_bytes(sequence, "big"), payload))

    def follow(self, until):
        """Take messages, and ask for those in a gap, until a number has been applied."""
        while self.last < until:
            _, sequence, payload = self.receive()
            if sequence <= self.last:
                continue
            if sequence > self.last + 1:
                self.num_gaps += 1
                self.catch_up()
            if sequence > self.last:
                assert sequence == self.last + 1
                self.apply(sequence, payload)

    def catch_up(self):
        for _, sequence, payload in self.replayed(self.last + 1):
            assert sequence == self.last + 1, "what was missed is not kept any more"
            self.apply(sequence, payload)

    def apply(self, sequence, payload):
        _, events, _ = msgspec.msgpack.decode(payload)
        for event in events:
            if event["type"] == "BlockStored":
                self.index |= dict.fromkeys(event["block_hashes"], event["medium"])
            elif event["type"] == "BlockRemoved":
                for key in event["block_hashes"]:
                    del self.index[key]
            else:
                self.index.clear()
        self.last = sequence


class Worker:
    """Stores and removes blocks, and publishes that."""

    def __init__(self, publisher, padding=0):
        self.publisher, self.index, self.num_batches, self.padding = publisher, {}, 0, b"p" * padding

    def step(self):
        number = self.num_batches
        key = number.to_bytes(8, "big") + self.padding
        events = [stored(key)]
        self.index[key] = "GPU"
        if number % 3 == 2:
            gone = next(iter(self.index))
            del self.index[gone]
            events.append({"type": "BlockRemoved", "block_hashes": [gone], "medium": "GPU"})
        self.num_batches += 1
        assert self.publisher.publish(batch(events))
        return number

    def run(self, num_steps):
        for _ in range(num_steps):
            self.step()
        wait_until(lambda: self.publisher.stats().num_published == self.num_batches)


def stored(*hashes):
    told = {"type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": None, "token_ids": [1, 2]}
    return told | {"block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None}


def batch(events, rank=None):
    return msgspec.msgpack.encode([1.5, events, rank])


def replaying(**settings):
    return ZmqPublisher(ANY_PORT, replay_endpoint=ANY_PORT, **settings)


@pytest.fixture
def publisher():
    with replaying() as made:
        yield made


@pytest.fixture
def subscribe():
    made = []

    def subscribe(publisher, **options):
        made.append(Subscriber(publisher.endpoint, publisher.replay_endpoint, **options))
        return made[-1]

    yield subscribe
    for each in made:
        each.close()


def joined(subscriber, act):
    """Act until the subscriber gets messages, and return the first."""
    while (message := subscriber.receive(20)) is None:
        act()
    return message


# -- messages ---------------------------------------------------------------------------------------------------------


def test_a_message_is_topic_number_and_batch_and_numbers_begin_with_0(subscribe):
    with replaying(topic="kv@worker") as publisher:
        subscriber = subscribe(publisher, topic=b"kv@")
        _, first, payload = joined(subscriber, lambda: publisher.publish(b"probe"))
        assert payload == b"probe"
        publisher.publish(b"batch")
        while (message := subscriber.receive())[2] == b"probe":
            first = message[1]
        assert message == (b"kv@worker", first + 1, b"batch")
        assert subscriber.replayed(0)[0] == (b"kv@worker", 0, b"probe")


def test_a_subscriber_to_another_topic_gets_nothing(subscribe):
    with replaying(topic="ours") as publisher:
        ours, others = subscribe(publisher, topic=b"ours"), subscribe(publisher, topic=b"theirs")
        joined(ours, lambda: publisher.publish(b"probe"))
        assert others.receive(0) is None


def test_defaults_are_those_of_vllm_but_for_an_endpoint_that_only_this_machine_reaches():
    config = EventsConfig()
    assert (config.endpoint, config.replay_endpoint, config.topic) == (None, None, "")
    assert (config.buffer_steps, config.hwm, config.max_queue_size) == (10_000, 100_000, 100_000)


def test_a_publisher_that_is_not_told_where_is_bound_to_the_loopback(subscribe):
    with ZmqPublisher(rank=free_port() - 5557) as publisher:
        assert publisher.endpoint.startswith("tcp://127.0.0.1:")
        subscriber = subscribe(publisher)
        assert joined(subscriber, lambda: publisher.publish(b"batch"))[2] == b"batch"


def test_a_subscription_longer_than_any_topic_is_not_kept_and_its_sender_is_cut_off(publisher, subscribe):
    with zmq.Context() as context, context.socket(zmq.SUB) as greedy, context.socket(zmq.PAIR) as events:
        greedy.monitor("inproc://events of greedy", zmq.EVENT_DISCONNECTED)
        events.connect("inproc://events of greedy")
        greedy.linger = 0
        greedy.subscribe(b"x" * 8000)
        greedy.connect(publisher.endpoint)
        assert events.poll(PATIENT_MS)
        greedy.monitor(None, 0)
    subscriber = subscribe(publisher)
    assert joined(subscriber, lambda: publisher.publish(b"batch"))[2] == b"batch"


def test_an_endpoint_without_a_wildcard_is_connected_to():
    gateway = Subscriber(ANY_PORT, binds=True)
    endpoint = gateway.socket.get_string(zmq.LAST_ENDPOINT)
    with ZmqPublisher(endpoint) as publisher:
        assert publisher.endpoint == endpoint
        assert joined(gateway, lambda: publisher.publish(b"batch"))[2] == b"batch"
    gateway.close()


def test_inproc_and_ipc_are_bound(tmp_path):
    for endpoint in ("inproc://kvist-events", f"ipc://{tmp_path}/events"):
        with ZmqPublisher(endpoint) as publisher:
            socket = zmq.Context.instance().socket(zmq.SUB)
            socket.subscribe(b"")
            socket.connect(publisher.endpoint)
            while not socket.poll(20):
                publisher.publish(b"batch")
            assert socket.recv_multipart()[2] == b"batch"
            socket.close(0)


def test_an_endpoint_in_use_is_an_error_and_leaves_nothing_behind(publisher):
    num_threads = threading.active_count()
    with pytest.raises(zmq.ZMQError, match="in use"):
        ZmqPublisher("tcp://*:" + publisher.endpoint.rpartition(":")[2])
    with pytest.raises(zmq.ZMQError, match="in use"):
        ZmqPublisher(ANY_PORT, replay_endpoint=publisher.replay_endpoint)
    assert threading.active_count() == num_threads


@pytest.mark.parametrize("setting", ["hwm", "buffer_steps", "rank", "max_queue_size"])
def test_limits_below_0_are_refused(setting):
    with pytest.raises(ArgumentError, match="-1"):
        ZmqPublisher(ANY_PORT, **{setting: -1})


# -- ranks and settings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 1, "tcp://*:5558"),
        ("tcp://[::1]:5557", 3, "tcp://[::1]:5560"),
        ("inproc://cache", 1, "inproc://cache_dp1"),
        ("ipc:///tmp/cache", 0, "ipc:///tmp/cache"),
    ],
)
def test_V81_each_rank_has_an_endpoint_of_its_own(endpoint, rank, expected):
    assert offset_endpoint(endpoint, rank) == expected


@pytest.mark.parametrize("endpoint", ["ipc:///tmp/cache", "tcp://host", "tcp://127.0.0.1:*", "udp://1.2.3.4:5"])
def test_V81_a_rank_without_an_endpoint_of_its_own_is_an_error(endpoint):
    with pytest.raises(ArgumentError, match="rank 1 has no endpoint"):
        offset_endpoint(endpoint, 1)


def test_V81_a_rank_publishes_at_its_endpoint_with_its_number_in_each_batch():
    with ZmqPublisher("inproc://ranks", replay_endpoint="inproc://past", rank=1) as publisher:
        assert publisher.endpoint == "inproc://ranks_dp1"
        assert publisher.replay_endpoint == "inproc://past_dp1"
        socket = zmq.Context.instance().socket(zmq.SUB)
        socket.subscribe(b"")
        socket.connect("inproc://ranks_dp1")
        source = ListedSource(*cleared(0))
        with Feed(source, lambda _: batch([{"type": "AllBlocksCleared"}], publisher.rank), publisher):
            assert socket.poll(PATIENT_MS)
            assert msgspec.msgpack.decode(socket.recv_multipart()[2]) == [1.5, [{"type": "AllBlocksCleared"}], 1]
        socket.close(0)


def test_V81_events_that_are_not_enabled_are_not_published():
    assert isinstance(open_publisher(EventsConfig(enabled=False, publisher="zmq")), NullPublisher)
    assert isinstance(open_publisher(EventsConfig(enabled=True, publisher="null")), NullPublisher)


def test_V81_events_that_are_enabled_are_published_over_zmq_unless_something_else_is_named():
    with open_publisher(EventsConfig(enabled=True, endpoint="inproc://opened", topic="t"), rank=2) as publisher:
        assert isinstance(publisher, ZmqPublisher)
        assert (publisher.endpoint, publisher.rank, publisher.topic) == ("inproc://opened_dp2", 2, "t")


def test_a_publisher_of_another_name_is_an_error():
    with pytest.raises(ConfigError, match="'nats'"):
        EventsConfig(enabled=True, publisher="nats")


# -- replay -----------------------------------------------------------------------------------------------------------


def past(publisher, subscriber, num_batches):
    """Publish batches whose contents are their numbers, and wait until they are out."""
    for number in range(num_batches):
        assert publisher.publish(b"%d" % number)
    wait_until(lambda: publisher.stats().num_published == num_batches)


def test_V80_a_replay_has_the_batches_from_a_number_on_with_their_topic(subscribe):
    with replaying(topic="events") as publisher:
        subscriber = subscribe(publisher)
        past(publisher, subscriber, 19)
        assert subscriber.replayed(10) == [(b"events", number, b"%d" % number) for number in range(10, 19)]


def test_V80_of_more_batches_than_are_kept_the_last_are_replayed(subscribe):
    with replaying(buffer_steps=7) as publisher:
        subscriber = subscribe(publisher)
        past(publisher, subscriber, 17)
        assert [number for _, number, _ in subscriber.replayed(0)] == list(range(10, 17))


def test_a_replay_from_the_highest_number_on_is_the_end_mark_alone(publisher, subscribe):
    subscriber = subscribe(publisher)
    past(publisher, subscriber, 3)
    assert subscriber.replayed(2**64 - 1) == []
    assert subscriber.replayed(3) == []
    assert publisher.stats().num_replays == 2


@pytest.mark.parametrize("frames", [[b"", b"abc"], [b"", b""], [b"x" * 8], [b"", b"a", b"\0" * 8]])
def test_what_is_no_request_gets_the_end_mark_and_is_counted(publisher, subscribe, frames):
    subscriber = subscribe(publisher)
    past(publisher, subscriber, 3)
    subscriber.replay.send_multipart(frames)
    assert subscriber.answer() == []
    assert publisher.stats().num_errors == 1


def test_a_long_replay_is_whole_however_often_it_is_asked_for(subscribe):
    with replaying(buffer_steps=3000) as publisher:
        subscriber = subscribe(publisher)
        past(publisher, subscriber, 3000)
        for _ in range(3):
            assert [number for _, number, _ in subscriber.replayed(0)] == list(range(3000))


def test_a_client_that_asks_and_never_reads_holds_up_nobody(subscribe):
    with replaying(buffer_steps=500) as publisher:
        rude, subscriber = subscribe(publisher), subscribe(publisher)
        past(publisher, subscriber, 500)
        rude.replay.rcvhwm = 1
        for _ in range(50):
            rude.replay.send_multipart([b"", bytes(8)])
        assert [number for _, number, _ in subscriber.replayed(0)] == list(range(500))
        joined(subscriber, lambda: publisher.publish(b"probe"))
        wait_until(lambda: publisher.stats().num_replays == 51)
        assert publisher.publish(b"last")
        while subscriber.receive()[2] != b"last":
            pass


# -- subscribers that come and go: in the end, each index equals the worker's -----------------------------------------


def settled(worker, subscriber):
    """Let the subscriber follow to the end."""
    sent = worker.step()
    if subscriber.last < 0:
        message = joined(subscriber, worker.step)
        subscriber.catch_up()
        assert subscriber.last >= message[1]
        sent = worker.step()
    subscriber.follow(sent)
    return subscriber.index


def test_B174_a_late_joiner_replays_what_was_before(publisher, subscribe):
    worker = Worker(publisher)
    worker.run(500)
    subscriber = subscribe(publisher)
    assert settled(worker, subscriber) == worker.index


def test_a_subscriber_that_stalls_sees_a_gap_and_catches_up(subscribe):
    with replaying(hwm=10) as publisher:
        worker = Worker(publisher, padding=4000)
        stalled, lively = subscribe(publisher, rcvhwm=10, rcvbuf=4096), subscribe(publisher)
        assert settled(worker, stalled) == worker.index
        worker.run(4000)  # while nobody reads
        assert settled(worker, stalled) == worker.index
        assert stalled.num_gaps >= 1
        assert settled(worker, lively) == worker.index


def test_a_subscriber_that_dies_and_comes_back_empty_replays_all(publisher, subscribe):
    worker = Worker(publisher)
    first = subscribe(publisher)
    settled(worker, first)
    worker.run(100)
    first.socket.recv_multipart()
    first.close()
    worker.run(100)
    assert settled(worker, subscribe(publisher)) == worker.index


def test_a_subscriber_that_reconnects_replays_what_it_has_missed(publisher, subscribe):
    worker = Worker(publisher)
    subscriber = subscribe(publisher)
    settled(worker, subscriber)
    subscriber.socket.disconnect(publisher.endpoint)
    worker.run(100)
    subscriber.socket.connect(publisher.endpoint)
    while subscriber.receive(20) is None:
        worker.step()
    assert settled(worker, subscriber) == worker.index
    assert subscriber.num_gaps == 1


def test_subscribers_that_reconnect_100_times_miss_nothing_in_the_end(publisher, subscribe):
    worker, subscriber = Worker(publisher), subscribe(publisher)
    settled(worker, subscriber)
    for number in range(100):
        subscriber.socket.disconnect(publisher.endpoint)
        if number % 2:
            worker.step()
        subscriber.socket.connect(publisher.endpoint)
        worker.step()
    while subscriber.receive(20) is None:
        worker.step()
    assert settled(worker, subscriber) == worker.index


@pytest.mark.parametrize(
    "attack", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b"\xff" + bytes(8) + b"\x01\x7f" + b"\0" * 100]
)
def test_what_speaks_no_zmq_hurts_nobody(publisher, subscribe, attack):
    worker, subscriber = Worker(publisher), subscribe(publisher)
    settled(worker, subscriber)
    for endpoint in (publisher.endpoint, publisher.replay_endpoint):
        host, port = endpoint.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(attack)
            worker.run(20)
    assert settled(worker, subscriber) == worker.index


def test_a_request_too_long_to_be_one_ends_its_own_connection_only(publisher, subscribe):
    worker, rude, subscriber = Worker(publisher), subscribe(publisher), subscribe(publisher)
    settled(worker, subscriber)
    rude.replay.send_multipart([b"", bytes(1 << 24)])
    worker.run(20)
    assert settled(worker, subscriber) == worker.index
    assert len(subscriber.replayed(0)) == worker.num_batches


def test_B177_a_publisher_that_restarts_numbers_from_0_and_a_subscriber_that_forgets_then_is_right(subscribe):
    old = replaying()
    worker = Worker(old)
    subscriber = subscribe(old)
    settled(worker, subscriber)
    worker.run(50)
    settled(worker, subscriber)
    assert old.close(PATIENT)
    with ZmqPublisher(old.endpoint.replace("127.0.0.1", "*"), replay_endpoint=old.replay_endpoint) as new:
        worker = Worker(new)
        _, sequence, _ = joined(subscriber, worker.step)
        assert sequence < subscriber.last
        subscriber.last, subscriber.index = -1, {}
        assert settled(worker, subscriber) == worker.index


def test_a_batch_that_was_dropped_is_a_gap_that_no_replay_fills(publisher, subscribe):
    subscriber = subscribe(publisher)
    publisher.publish(b"0")
    publisher.skip()
    publisher.publish(b"2")
    wait_until(lambda: publisher.stats().num_published == 2)
    assert [number for _, number, _ in subscriber.replayed(0)] == [0, 2]
    assert publisher.stats().num_dropped == 1


# -- threads and ends -------------------------------------------------------------------------------------------------


def test_batches_of_many_threads_all_go_out_with_a_number_each(publisher, subscribe):
    def publish(name):
        for number in range(200):
            publisher.publish(b"%s %d" % (name, number))

    threads = [threading.Thread(target=publish, args=(name,)) for name in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: publisher.stats().num_published == 600)
    messages = subscribe(publisher).replayed(0)
    assert [number for _, number, _ in messages] == list(range(600))
    for name in (b"a", b"b", b"c"):
        assert [p for _, _, p in messages if p.startswith(name)] == [b"%s %d" % (name, n) for n in range(200)]


def test_what_was_queued_before_the_end_is_sent(subscribe):
    publisher = replaying()
    subscriber = subscribe(publisher, rcvhwm=0)
    first = joined(subscriber, lambda: publisher.publish(b"probe"))
    for number in range(5000):
        assert publisher.publish(b"%d" % number)
    assert publisher.close(PATIENT)
    messages = [first]
    while messages[-1][2] != b"4999":
        messages.append(subscriber.receive())
    assert [payload for _, _, payload in messages if payload != b"probe"] == [b"%d" % n for n in range(5000)]
    assert publisher.stats().num_waiting == 0


def test_after_the_end_batches_are_dropped_and_ending_again_is_fine(publisher):
    assert publisher.close(PATIENT)
    assert not publisher.publish(b"late")
    assert publisher.stats().num_dropped == 1
    assert publisher.close()


def test_a_subscriber_that_never_reads_holds_an_end_up_until_its_limit_only(subscribe):
    publisher = replaying()
    subscriber = subscribe(publisher, rcvhwm=1, rcvbuf=4096)
    joined(subscriber, lambda: publisher.publish(b"probe"))
    for _ in range(4000):
        publisher.publish(b"x" * 4000)
    assert not publisher.close(0.2)


def test_what_a_thread_cannot_take_in_time_is_dropped_and_counted():
    with ZmqPublisher(ANY_PORT, max_queue_size=3) as publisher:
        counts = Counter(publisher.publish(b"batch") for _ in range(20_000))
        wait_until(lambda: not publisher.stats().num_waiting)
        wait_until(lambda: publisher.stats().num_published == counts[True])
        assert publisher.stats().num_dropped == counts[False]


def test_sockets_may_live_in_a_context_of_the_callers(subscribe):
    context = zmq.Context()
    publisher = ZmqPublisher(ANY_PORT, context=context)
    subscriber = Subscriber(publisher.endpoint)
    joined(subscriber, lambda: publisher.publish(b"probe"))
    assert publisher.close(PATIENT)
    assert not context.closed
    subscriber.close()
    context.term()
