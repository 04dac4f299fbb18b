"""GET /kv_cache_events: waiting, cursors, limits, clients that are rude, ends."""

import json
import socket
import threading
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest
from tests.wire.listed import PATIENT, ListedSource, cleared, wait_until

from kvist import ArgumentError
from kvist.wire.http import EventServer, HttpLimits


def ids(events):
    return json.dumps([event.id for event in events]).encode()


class Client:
    """Asks one server over one connection."""

    def __init__(self, server):
        self.connection = HTTPConnection(urlsplit(server.url).netloc, timeout=PATIENT)

    def ask(self, query="", method="GET", body=None, headers=None, path="/kv_cache_events"):
        """Status, decoded body, headers."""
        self.connection.request(method, path + query, body, headers or {})
        response = self.connection.getresponse()
        return response.status, json.loads(response.read() or "null"), response.headers

    def events(self, query=""):
        status, body, _ = self.ask(query)
        assert status == 200
        return body


class Serving:
    """A server, its source, and clients; all are closed in the end."""

    def __init__(self):
        self.source, self.servers, self.clients = ListedSource(), [], []

    def server(self, encode=ids, **limits):
        self.servers.append(EventServer(self.source, encode, limits=HttpLimits(**limits)))
        return self.servers[-1]

    def client(self, server):
        self.clients.append(Client(server))
        return self.clients[-1]


@pytest.fixture
def serving():
    made = Serving()
    yield made
    for client in made.clients:
        client.connection.close()
    for server in made.servers:
        server.close(PATIENT)


def follow(client, num_events, query="", after="start"):
    """Events from a cursor on, until there are so many, with the cursor and what was lost."""
    found, num_lost = [], 0
    while len(found) < num_events:
        status, body, headers = client.ask(f"?timeout_s=30&after={after}{query}")
        assert status == 200
        assert body
        found, after, num_lost = found + body, headers["Kvist-Next"], num_lost + int(headers["Kvist-Num-Lost"])
    return found, after, num_lost


# -- what is answered -------------------------------------------------------------------------------------------------


def test_events_are_answered_as_they_are_encoded_each_once(serving):
    server = serving.server()
    client = serving.client(server)
    serving.source.add(*cleared(0, 1, 2))
    assert client.events("?timeout_s=30&max_events=2") == [0, 1]
    assert client.events("?timeout_s=30") == [2]
    assert client.events() == []


def test_a_client_waits_for_the_first_event(serving):
    client = serving.client(serving.server())
    adding = threading.Timer(0.05, lambda: serving.source.add(*cleared(0)))
    adding.start()
    assert client.events("?timeout_s=30") == [0]
    adding.join()


def test_a_client_that_has_waited_long_enough_gets_nothing(serving):
    assert serving.client(serving.server()).events("?timeout_s=0.01") == []
    assert serving.client(serving.server(max_wait_s=0.01)).events("?timeout_s=3600") == []


def test_clients_with_cursors_get_everything_each(serving):
    server = serving.server()
    serving.source.add(*cleared(*range(5)))
    first, second = serving.client(server), serving.client(server)
    found, after, num_lost = follow(first, 5, "&max_events=2")
    assert (found, num_lost) == ([0, 1, 2, 3, 4], 0)
    serving.source.add(*cleared(5, 6))
    assert follow(first, 2, after=after)[0] == [5, 6]
    assert follow(second, 7)[0] == list(range(7))
    assert follow(second, 2, after=after)[0] == [5, 6]


def test_a_cursor_of_what_is_not_kept_any_more_says_how_many_were_lost(serving):
    server = serving.server(max_kept=4)
    client = serving.client(server)
    serving.source.add(*cleared(*range(10)))
    wait_until(lambda: server._kept.end == 10)
    found, _, num_lost = follow(client, 4)
    assert (found, num_lost) == ([6, 7, 8, 9], 6)


def test_a_cursor_of_another_server_is_gone(serving):
    serving.source.add(*cleared(0))
    client = serving.client(serving.server())
    _, after, _ = follow(client, 1)
    status, body, _ = serving.client(serving.server()).ask(f"?after={after}")
    assert status == 410
    assert "after=start" in body["error"]
    assert client.ask(f"?after={after.partition('-')[0]}-99")[0] == 410


def test_what_is_kept_has_so_many_bytes_at_most(serving):
    server = serving.server(max_kept_bytes=6)
    serving.source.add(*cleared(10, 11, 12, 13, 14))
    wait_until(lambda: server._kept.end == 5)
    assert follow(serving.client(server), 3)[::2] == ([12, 13, 14], 2)


def test_each_event_is_encoded_once_and_in_order_whoever_asks(serving):
    encoded = []

    def encode(events):
        encoded.extend(event.id for event in events)
        return b"" if events[0].id == 1 else b'[{"id":%d}, {"id":0}]' % events[0].id

    server = serving.server(encode)
    serving.source.add(*cleared(0, 1, 2))
    wait_until(lambda: server._kept.end == 3)
    for _ in range(2):
        told = serving.client(server).events("?after=start")
        assert told == [{"id": 0}, {"id": 0}, {"id": 2}, {"id": 0}]
    assert encoded == [0, 1, 2]


def test_post_is_answered_as_get_is(serving):
    client = serving.client(serving.server())
    serving.source.add(*cleared(0))
    assert client.ask("?timeout_s=30", method="POST", body=b"{}")[:2] == (200, [0])
    assert client.ask(method="POST")[:2] == (200, [])


def test_it_serves_this_machine_only(serving):
    assert serving.server().url.startswith("http://127.0.0.1:")


# -- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("?timeout_s=-1", 400),
        ("?timeout_s=nan", 400),
        ("?timeout_s=soon", 400),
        ("?max_events=0", 400),
        ("?after=here", 400),
        ("?afterwards=1", 400),
        ("?after=" + "x" * 3000, 414),
        ("/more", 404),
    ],
)
def test_what_cannot_be_asked_is_an_error_and_the_next_question_is_answered(serving, query, status):
    client = serving.client(serving.server())
    found, body, _ = client.ask(query)
    assert (found, list(body)) == (status, ["error"])
    assert client.events() == []


def test_other_methods_and_long_bodies_are_refused(serving):
    server = serving.server()
    assert serving.client(server).ask(method="POST", headers={"Content-Length": "999999"})[0] == 413
    assert serving.client(server).ask(method="POST", headers={"Transfer-Encoding": "chunked"}, body=[b""])[0] == 411
    connection = serving.client(server).connection
    connection.request("PUT", "/kv_cache_events")
    assert connection.getresponse().status == 501


def test_an_answer_has_so_many_bytes_at_most_and_at_least_one_event(serving):
    client = serving.client(serving.server(max_response_bytes=10))
    serving.source.add(*cleared(1, 2, 3, 4, 10**20))
    found = []
    while len(found) < 5:
        _, body, headers = client.ask("?timeout_s=30")
        assert int(headers["Content-Length"]) <= 10 or len(body) == 1
        found += body
    assert found == [1, 2, 3, 4, 10**20]


def test_B185_an_event_that_cannot_be_encoded_is_left_out_and_counted(serving, caplog):
    def encode(events):
        if any(event.id == 1 for event in events):
            raise TypeError("priority is None")
        return ids(events)

    server = serving.server(encode)
    serving.source.add(*cleared(0, 1, 2))
    wait_until(lambda: server._kept.end == 3)
    assert serving.client(server).events("?timeout_s=30") == [0, 2]
    serving.source.add(*cleared(1))
    assert serving.client(server).events("?timeout_s=30") == []
    assert server.num_errors == 2
    assert caplog.text.count("could not be encoded") == 1


def test_limits_below_1_are_refused():
    with pytest.raises(ArgumentError, match="max_clients is 0"):
        HttpLimits(max_clients=0)


# -- clients that are rude, and ends ----------------------------------------------------------------------------------


def connected(server):
    host, port = urlsplit(server.url).netloc.split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENT)


def test_more_clients_than_there_is_room_for_are_told_to_come_back(serving):
    server = serving.server(max_clients=1)
    first = serving.client(server)
    assert first.events() == []
    with connected(server) as second:
        assert second.recv(100).startswith(b"HTTP/1.1 503")
    first.connection.close()
    wait_until(lambda: serving.client(server).ask()[0] == 200)


def test_a_client_that_says_nothing_is_let_go(serving):
    server = serving.server(io_timeout_s=0.05)
    with connected(server) as silent:
        assert silent.recv(100) == b""


def test_a_client_that_dies_while_it_waits_hurts_nobody(serving):
    server = serving.server()
    with connected(server) as dying:
        dying.sendall(b"GET /kv_cache_events?timeout_s=30&after=start HTTP/1.1\r\nHost: x\r\n\r\n")
    serving.source.add(*cleared(0))
    assert serving.client(server).events("?timeout_s=30") == [0]


def test_what_is_no_http_is_answered_with_an_error(serving):
    server = serving.server()
    with connected(server) as odd:
        odd.sendall(b"\x16\x03\x01\x00\r\n\r\n")
        assert b"400" in odd.recv(1000)
    assert serving.client(server).events() == []


def test_an_end_answers_those_who_wait(serving):
    server = serving.server()
    client = serving.client(server)
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(client.ask("?timeout_s=30&after=start")))
    waiting.start()
    wait_until(lambda: server._server.num_answering == 1)
    assert server.close(PATIENT)
    waiting.join(PATIENT)
    status, body, headers = answers[0]
    assert (status, body, headers["Connection"]) == (200, [], "close")


def test_an_end_lets_idle_clients_go_and_is_fine_twice(serving):
    server = serving.server()
    client = serving.client(server)
    assert client.events() == []
    assert server.close(PATIENT)
    assert server.close(PATIENT)
    client.connection.close()
    with pytest.raises(ConnectionRefusedError):
        client.events()


def test_a_client_that_does_not_read_holds_an_end_up_until_its_limit_only(serving):
    server = serving.server(lambda events: json.dumps(["x" * (1 << 26)]).encode())
    serving.source.add(*cleared(0))
    with connected(server) as stalled:
        stalled.sendall(b"GET /kv_cache_events?timeout_s=30 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert stalled.recv(10)
        assert not server.close(0.1)
    wait_until(lambda: server._server.num_answering == 0)
