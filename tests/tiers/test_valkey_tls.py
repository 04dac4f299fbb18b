"""ValkeyStore over TLS: a real server behind a front that speaks it, with certificates that are right and wrong."""

import socket
import ssl

import pytest
from tests.tiers.remote import FORMAT, PATIENT, entries, found
from tests.tiers.services import Valkey, needs, running
from tests.tiers.tls import Authority, tls_front

from kvist.errors import ConfigError, TransferError
from kvist.testing.stores import StoreSuite, key_of
from kvist.tiers.guard import GuardedStore
from kvist.tiers.opening import open_store

needs("redis")

from kvist.tiers.valkey import ValkeyStore  # noqa: E402

KEYS = [key_of(number) for number in range(5)]


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("stranger"))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running(Valkey(tmp_path_factory.mktemp("valkey"))) as server:
        yield server


@pytest.fixture(scope="module")
def port(server, authority):
    with tls_front(server.port, authority.context("127.0.0.1")) as port:
        yield port


def opened(port, *settings, timeout_s=PATIENT, host="127.0.0.1"):
    return open_store(f"valkeys://{host}:{port}?{'&'.join(settings)}", FORMAT, timeout_s=timeout_s)


class TestValkeyTls(StoreSuite):
    @pytest.fixture(autouse=True)
    def _serve(self, port, authority):
        self.url = f"rediss://127.0.0.1:{port}/0?ca_file={authority.ca_file}"

    def open_store(self, format, place):
        return ValkeyStore(self.url, format, timeout_s=PATIENT)


@pytest.mark.parametrize("settings", [(), ("ca_file",)], ids=["what the system trusts", "another authority"])
def test_a_certificate_that_is_not_trusted_is_an_error_and_behind_a_guard_a_miss(port, stranger, settings):
    store = opened(port, *(f"{name}={getattr(stranger, name)}" for name in settings))
    with pytest.raises(TransferError, match="certificate verify failed"):
        store.put(entries(KEYS))
    with pytest.raises(TransferError, match="certificate verify failed"):
        found(store, KEYS)
    guarded = GuardedStore(store, PATIENT)
    assert found(guarded, KEYS) == guarded.contains(KEYS) == [False] * 5
    assert "certificate verify failed" in str(guarded.last_error)
    guarded.close()


def test_what_the_system_trusts_is_trusted(port, authority, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca_file))
    store = opened(port)
    assert store.put(entries(KEYS)) == 5
    assert found(store, KEYS) == [True] * 5
    store.close()


def test_a_certificate_for_another_host_is_an_error(server, authority):
    with tls_front(server.port, authority.context("elsewhere.example")) as port:
        store = opened(port, f"ca_file={authority.ca_file}")
        with pytest.raises(TransferError, match=r"certificate is not valid for '127\.0\.0\.1'"):
            store.contains(KEYS)
        store.close()


def test_a_server_that_wants_to_know_us_is_shown_our_certificate(server, authority, stranger):
    context = authority.context("127.0.0.1")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(authority.ca_file)
    ours, wrong = (
        [f"{name}={file}" for name, file in zip(("cert_file", "key_file"), each.issue("us.example"), strict=True)]
        for each in (authority, stranger)
    )
    with tls_front(server.port, context) as port:
        store = opened(port, f"ca_file={authority.ca_file}", *ours)
        assert store.put(entries(KEYS)) == 5
        assert found(store, KEYS) == [True] * 5
        store.close()
        for unknown in ([], wrong):
            store = opened(port, f"ca_file={authority.ca_file}", *unknown)
            with pytest.raises(TransferError):
                store.contains(KEYS)
            store.close()


def test_a_cluster_is_asked_over_tls_for_all_that_it_tells_of(tmp_path, authority):
    """The slots are told by the server, with the port that it is reached by from outside."""
    server = Valkey(tmp_path, "--cluster-enabled", "yes")
    with tls_front(server.port, authority.context("127.0.0.1")) as port:
        server.command += ["--cluster-announce-port", str(port), "--cluster-announce-ip", "127.0.0.1"]
        server.command += ["--cluster-port", str(server.port + 1)]
        with running(server), server.client() as client:
            client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
            while client.cluster("INFO")["cluster_state"] != "ok":
                pass  # it waits for two seconds
            store = opened(port, f"ca_file={authority.ca_file}", "cluster=true")
            assert store.put(entries(KEYS)) == 5
            assert found(store, KEYS) == [True] * 5
            store.close()
            store = opened(port, "cluster=true")
            with pytest.raises(TransferError, match="certificate verify failed"):
                found(store, KEYS)
            store.close()


def test_who_never_answers_a_greeting_costs_the_time_limit(authority):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = opened(silent.getsockname()[1], f"ca_file={authority.ca_file}", timeout_s=0.05)
        with pytest.raises(TimeoutError):
            store.contains(KEYS)
        store.close()


def test_a_server_without_tls_is_an_error_and_so_is_a_client_without(server, port):
    store = opened(server.port, timeout_s=0.5)
    with pytest.raises(OSError, match=r"no answer from the server in time|the server did not do it"):
        store.contains(KEYS)
    store.close()
    store = ValkeyStore(f"valkey://127.0.0.1:{port}", FORMAT, timeout_s=PATIENT)
    with pytest.raises(TransferError):
        store.contains(KEYS)
    store.close()


def test_files_are_read_when_the_store_is_opened(tmp_path, authority):
    empty = tmp_path / "empty.pem"
    empty.touch()
    certificate, key = authority.issue("us.example")
    for settings in (
        f"ca_file={tmp_path}/none.pem",
        f"ca_file={empty}",
        f"ca_file={authority.ca_file}&cert_file={certificate}",
        f"cert_file={certificate}&key_file={empty}",
        f"key_file={key}",
    ):
        with pytest.raises(ConfigError, match="no certificates can be loaded"):
            open_store(f"valkeys://127.0.0.1?{settings}", FORMAT)
    with pytest.raises(ConfigError, match="valkey:// is not encrypted and has no ca_file: valkeys:// is"):
        open_store(f"valkey://127.0.0.1?ca_file={authority.ca_file}", FORMAT)
