"""ObjectStore against a server of Google's storage, the wire to Azure's, and S3 over TLS."""

import gc
from contextlib import closing

import pytest
from tests.tiers.azure import AzureWire
from tests.tiers.remote import FORMAT, PATIENT, entries, found
from tests.tiers.services import S3, Gcs, GcsUploads, needs, running
from tests.tiers.tls import Authority, tls_front

from kvist.errors import ConfigError, TransferError
from kvist.testing.stores import StoreSuite, key_of
from kvist.tiers.guard import GuardedStore
from kvist.tiers.opening import open_store

needs("obstore")

import obstore  # noqa: E402

from kvist.tiers.objects import ObjectStore  # noqa: E402

KEYS = [key_of(number) for number in range(20)]


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "anybody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a secret")


@pytest.fixture(scope="module")
def gcs():
    with running(Gcs()) as server, closing(GcsUploads(server)) as front:
        server.make_bucket("shared")
        yield front


@pytest.fixture(scope="module")
def azure():
    with closing(AzureWire("shared")) as wire:
        yield wire


@pytest.fixture(scope="module")
def s3():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "4")
        with running(S3()) as server:
            server.make_bucket("shared")
            yield server


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("stranger"))


@pytest.fixture(scope="module")
def https(s3, authority):
    """The URL of a bucket over TLS, signed by an authority that nobody trusts unasked."""
    with tls_front(s3.port, authority.context("127.0.0.1")) as port:
        yield f"s3://shared/over/tls?region=us-east-1&endpoint=https://127.0.0.1:{port}"


class BucketSuite(StoreSuite):
    """The suite for a bucket whose objects can be damaged through the store's own client."""

    url = ""

    def open_store(self, format, place):
        return ObjectStore(self.url, format, timeout_s=PATIENT)

    def damage(self, store, key, change):
        path = store._path(key)
        obstore.put(store._bucket, path, change(bytes(obstore.get(store._bucket, path).bytes())))
        return True


class TestGcs(BucketSuite):
    @pytest.fixture(autouse=True)
    def _serve(self, gcs):
        self.url = gcs.url("shared")


class TestAzureWire(BucketSuite):
    @pytest.fixture(autouse=True)
    def _serve(self, azure):
        self.url = azure.url


class TestS3OverTls(BucketSuite):
    @pytest.fixture(autouse=True)
    def _serve(self, https, authority):
        self.url = f"{https}&ca_file={authority.ca_file}"


def test_a_stopped_and_a_killed_server_of_gcs_cost_hits_only_and_a_restarted_one_serves_the_same_store():
    with running(Gcs()) as server, closing(GcsUploads(server)) as front:
        server.make_bucket("bucket")
        store = ObjectStore(front.url("bucket"), FORMAT, timeout_s=PATIENT, num_retries=0)
        hasty = ObjectStore(front.url("bucket"), FORMAT, timeout_s=0.2)
        assert store.put(entries(KEYS)) == 20
        server.pause()
        for act in (lambda: found(hasty, KEYS), lambda: hasty.put(entries(KEYS)), lambda: hasty.drop(b"")):
            with pytest.raises(OSError, match=r"nothing came within|no request was served"):
                act()  # returns while the server is still stopped
        server.resume()
        assert found(store, KEYS) == [True] * 20
        server.kill()
        with pytest.raises(TransferError, match="no request was served"):
            found(store, KEYS)
        server.start()
        server.make_bucket("bucket")
        assert found(store, KEYS) == [False] * 20
        assert store.put(entries(KEYS)) == 20
        assert found(store, KEYS) == [True] * 20
        store.close()
        hasty.close()


def test_listings_that_are_given_up_leave_nothing_behind_that_panics():
    """What is let go of later, on any thread, waits for nothing in `obstore`; of a panic pytest would tell."""
    with running(Gcs()) as server, closing(GcsUploads(server)) as front:
        server.make_bucket("bucket")
        store = ObjectStore(front.url("bucket"), FORMAT, timeout_s=0.05)
        server.pause()
        for _ in range(20):
            with pytest.raises(OSError, match=r"nothing came within|no request was served"):
                store.drop(b"")
        server.resume()
        store.close()
        gc.collect()


@pytest.mark.parametrize("kind", ["azure", "s3"])
def test_what_is_listed_in_pages_is_dropped_to_the_last(kind, request):
    """Both tell of four objects at a time here."""
    server = request.getfixturevalue(kind)
    store = ObjectStore(server.url if kind == "azure" else server.url("shared"), FORMAT, timeout_s=PATIENT)
    assert store.put(entries(KEYS)) == 20
    store.drop(KEYS[0][:16])
    assert store.contains(KEYS) == [False] * 20
    store.close()


def test_a_container_that_is_not_there_and_credentials_that_are_wrong_are_errors(azure, gcs):
    for url in (
        azure.url.replace("//shared", "//nowhere"),
        azure.url.partition("account_key=")[0] + f"skip_signature=true&{azure.url[azure.url.index('endpoint=') :]}",
        gcs.url("nowhere"),
    ):
        store = ObjectStore(url, FORMAT, timeout_s=PATIENT)
        with pytest.raises(TransferError, match="no request was served"):
            store.put(entries(KEYS[:2]))
        store.close()


def test_a_certificate_that_is_not_trusted_is_an_error_that_says_so_and_behind_a_guard_a_miss(https, stranger):
    for url in (https, f"{https}&ca_file={stranger.ca_file}"):
        store = ObjectStore(url, FORMAT, timeout_s=PATIENT, num_retries=0)
        with pytest.raises(TransferError, match=r"certificate is not trusted \(UnknownIssuer\)"):
            store.put(entries(KEYS))
        guarded = GuardedStore(store, PATIENT)
        assert found(guarded, KEYS) == guarded.contains(KEYS) == [False] * 20
        assert "certificate is not trusted" in str(guarded.last_error)
        guarded.close()


def test_a_certificate_for_another_host_is_an_error_that_says_so(s3, authority):
    with tls_front(s3.port, authority.context("elsewhere.example")) as port:
        url = f"s3://shared?region=us-east-1&endpoint=https://127.0.0.1:{port}&ca_file={authority.ca_file}"
        store = open_store(url, FORMAT, timeout_s=PATIENT)
        with pytest.raises(TransferError, match=r"certificate is not trusted \(NotValidForName"):
            store.contains(KEYS)
        store.close()


def test_what_the_system_trusts_is_trusted(https, authority, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca_file))
    store = open_store(https, FORMAT, timeout_s=PATIENT)
    assert store.put(entries(KEYS)) == 20
    assert found(store, KEYS) == [True] * 20
    store.close()


def test_a_file_that_holds_no_certificates_is_told_when_the_store_is_opened(https, tmp_path):
    (tmp_path / "empty.pem").touch()
    for name in ("none", "empty"):
        with pytest.raises(ConfigError, match="no certificates can be loaded"):
            open_store(f"{https}&ca_file={tmp_path}/{name}.pem", FORMAT)


def test_settings_of_the_client_are_taken_and_an_address_of_the_environment_is_asked(s3, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3.port}")
    store = open_store("s3://shared/by/environment?region=us-east-1&allow_http=true", FORMAT, timeout_s=PATIENT)
    assert store.put(entries(KEYS)) == 20
    assert found(store, KEYS) == [True] * 20
    store.close()


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_settings_of_the_client_that_cannot_be_are_told(scheme):
    with pytest.raises(ConfigError, match=f"{scheme}://bucket"):
        ObjectStore(f"{scheme}://bucket?account_name=us&allow_http=maybe", FORMAT)
    with pytest.raises(ConfigError, match="timeout: all time limits of a store are its timeout_s"):
        ObjectStore(f"{scheme}://bucket?timeout=3s", FORMAT)
