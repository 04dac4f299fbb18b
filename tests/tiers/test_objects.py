"""ObjectStore in memory, in a folder, and against a real S3 server that is paused, killed and restarted."""

import os
from threading import Thread

import pytest
from tests.tiers.remote import FORMAT, PATIENT, entries, found
from tests.tiers.services import S3, needs, running

from kvist.errors import ConfigError, TransferError
from kvist.testing.stores import StoreSuite, key_of
from kvist.tiers.breaker import CircuitBreaker
from kvist.tiers.guard import GuardedStore, Limits

needs("obstore")

from kvist.tiers.objects import ObjectStore  # noqa: E402

KEYS = [key_of(number) for number in range(20)]


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "anybody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a secret")


@pytest.fixture(scope="module")
def shared():
    with running(S3()) as server:
        server.make_bucket("shared")
        yield server


@pytest.fixture
def server():
    with running(S3()) as server:
        server.make_bucket("bucket")
        yield server


class TestFolder(StoreSuite):
    def open_store(self, format, place):
        return ObjectStore(f"file://{place}/objects", format, timeout_s=PATIENT)

    def damage(self, store, key, change):
        (path,) = self.place.glob(f"objects/kvist/*/{key[:16].hex()}/{key[16:].hex()}")
        path.write_bytes(change(path.read_bytes()))
        return True

    @pytest.fixture(autouse=True)
    def _remember(self, tmp_path):
        self.place = tmp_path


class TestMemory(StoreSuite):
    keeps = False

    def open_store(self, format, place):
        return ObjectStore("memory://", format, timeout_s=PATIENT)


class TestS3(StoreSuite):
    @pytest.fixture(autouse=True)
    def _serve(self, shared):
        self.server = shared

    def open_store(self, format, place):
        return ObjectStore(self.server.url("shared"), format, timeout_s=PATIENT)


def test_a_stopped_server_costs_the_time_limit_and_hits_come_back(server):
    store = ObjectStore(server.url("bucket"), FORMAT, timeout_s=0.2)
    patient = ObjectStore(server.url("bucket"), FORMAT, timeout_s=PATIENT)
    patient.put(entries(KEYS))
    server.pause()
    for act in (lambda: found(store, KEYS), lambda: store.contains(KEYS), lambda: store.put(entries(KEYS))):
        with pytest.raises(OSError, match=r"nothing came within|no request was served"):
            act()  # returns while the server is still stopped
    with pytest.raises(OSError, match=r"nothing came within|no request was served"):
        store.drop(b"")
    assert store.stats().num_timeouts + store.stats().num_errors == 61
    server.resume()
    assert found(patient, KEYS) == [True] * 20
    patient.close()
    store.close()


def test_a_killed_server_is_an_error_and_a_restarted_one_serves_the_same_store(server):
    store = ObjectStore(server.url("bucket"), FORMAT, timeout_s=PATIENT, num_retries=0)
    store.put(entries(KEYS))
    server.kill()
    with pytest.raises(TransferError, match="no request was served"):
        found(store, KEYS)
    server.start()
    server.make_bucket("bucket")
    assert found(store, KEYS) == [False] * 20
    assert store.put(entries(KEYS)) == 20
    assert found(store, KEYS) == [True] * 20
    store.close()


def test_a_bucket_that_is_not_there_takes_nothing(shared):
    store = ObjectStore(shared.url("nowhere"), FORMAT, timeout_s=PATIENT)
    with pytest.raises(TransferError):
        store.put(entries(KEYS[:2]))
    assert found(store, KEYS[:2]) == [False, False]
    store.close()


def test_a_store_closed_in_the_middle_of_a_call_ends_it(server):
    store = ObjectStore(server.url("bucket"), FORMAT, timeout_s=PATIENT, num_retries=0)
    server.pause()
    failed = []

    def ask():
        try:
            found(store, KEYS)
        except TransferError as error:
            failed.append(str(error))

    thread = Thread(target=ask)
    thread.start()
    while not store._loop._loop:
        pass  # the call has not begun
    store.close()  # the server is still stopped, and the limit far away
    thread.join()
    assert failed == ["the store was closed meanwhile"]


def test_guarded_calls_return_while_the_server_is_stopped_or_gone_and_hits_come_back(server):
    inner = ObjectStore(server.url("bucket"), FORMAT, timeout_s=PATIENT, num_retries=0)
    breaker = CircuitBreaker(num_failures=2, retry_s=0.01)
    store = GuardedStore(inner, 0.3, Limits(num_threads=20), breaker=breaker)
    assert until_all_are_found(store)
    server.pause()
    for _ in range(4):
        assert found(store, KEYS) == [False] * 20
        store.put(entries(KEYS))
    server.resume()
    assert until_all_are_found(store)
    server.kill()
    for _ in range(4):
        assert found(store, KEYS) == [False] * 20
        store.put(entries(KEYS))
    server.start()
    server.make_bucket("bucket")
    assert until_all_are_found(store)
    stats = store.stats()
    assert stats.num_timeouts > 0
    assert stats.num_errors > 0
    assert stats.num_corrupt == 0
    store.close()


def until_all_are_found(store):
    """Put and get until all are there again: outcomes, whatever the time they take."""
    for _ in range(1000):
        store.put(entries(KEYS))
        store.flush(PATIENT)
        if all(found(store, KEYS)):
            return True
    return False


@pytest.mark.parametrize("url", ["s3://bucket?colour=blue", "s3://", "ftp://host/folder"])
def test_what_cannot_be_opened_is_told(url):
    with pytest.raises(ConfigError):
        ObjectStore(url, FORMAT)


def test_an_object_that_others_have_made_too_long_is_not_read(tmp_path):
    """A sparse file of a terabyte: reading it would never end."""
    store = ObjectStore(f"file://{tmp_path}", FORMAT, timeout_s=PATIENT)
    store.put(entries(KEYS[:2]))
    (path,) = tmp_path.rglob(KEYS[0][16:].hex())
    os.truncate(path, 1 << 40)
    assert found(store, KEYS[:2]) == [False, True]
    assert not path.exists()
    store.close()
