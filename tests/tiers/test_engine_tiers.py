"""An engine in the middle of its work while the server of its tier is stopped, killed, filled and restarted.

No token is wrong, and every step returns while the server is still stopped or gone; afterwards hits come back. The
thread that steps asks no store itself, and waits for what is on its way no longer than the tier's time limit.
"""

from functools import partial
from threading import get_ident
from typing import ClassVar

import pytest
from tests.serve.test_tiers import PATIENT, pressed, run, work
from tests.tiers.services import S3, FullDisk, Valkey, needs, running

from kvist import DiskTier, HostTier, RemoteTier
from kvist.tiers import stack
from kvist.tiers.breaker import CircuitBreaker
from kvist.tiers.guard import GuardedStore
from kvist.tiers.stack import Coming

needs("redis")
needs("obstore")

pytestmark = pytest.mark.slow

BUCKET = "bucket"


class WatchedStore(GuardedStore):
    """A guarded store that notes which threads ask it."""

    askers: ClassVar[set[int]] = set()

    def contains(self, keys):
        self.askers.add(get_ident())
        return super().contains(keys)

    def get(self, keys, buffers):
        self.askers.add(get_ident())
        return super().get(keys, buffers)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Breakers open at the second failure, and ask again soon."""

    def guarded(store, timeout_s, **settings):
        return WatchedStore(store, timeout_s, breaker=CircuitBreaker(num_failures=2, retry_s=0.1), **settings)

    monkeypatch.setattr(stack, "GuardedStore", guarded)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "anybody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a secret")


@pytest.fixture
def waits(monkeypatch):
    """For how many seconds at most a step has waited, each time; at the end, that it has asked no store itself."""
    found, wait = [], Coming.wait
    WatchedStore.askers.clear()
    monkeypatch.setattr(Coming, "wait", lambda self, timeout_s=None: found.append(timeout_s) or wait(self, timeout_s))
    yield found
    assert WatchedStore.askers
    assert get_ident() not in WatchedStore.askers


@pytest.fixture
def valkey(tmp_path):
    with running(Valkey(tmp_path)) as server:
        yield server


@pytest.fixture
def s3():
    with running(S3()) as server:
        server.make_bucket(BUCKET)
        yield server


class Midway:
    """Does something in the middle of each run of an engine: as its `n`th step begins."""

    def __init__(self, engine, monkeypatch):
        self._step, self._acts, self._num_steps = engine.step, {}, 0
        monkeypatch.setattr(engine, "step", self.step)

    def at(self, acts):
        """Do these in the next run, by number of the step."""
        self._acts, self._num_steps = dict(acts), 0

    def step(self):
        self._num_steps += 1
        self._acts.pop(self._num_steps, lambda: None)()
        return self._step()

    def assert_done(self):
        assert not self._acts


def num_hits(engine):
    return sum(stats.num_hits for stats in engine.manager.store_stats().values())


def hits_come_back(engine, kind):
    """Run until the tier has brought something: outcomes, whatever the time they take."""
    before = num_hits(engine)
    for _ in range(200):
        run(engine, kind)
        if num_hits(engine) > before:
            return True
        engine.manager.flush(PATIENT)
    return False


def run_until_a_store_fails(engine, kind):
    """Run until a tier has noticed that its server takes nothing."""
    for _ in range(200):
        run(engine, kind)
        if any(stats.num_timeouts + stats.num_errors for stats in engine.manager.store_stats().values()):
            return


def restart(server, bucket=None):
    server.start()
    if bucket is not None:
        server.make_bucket(bucket)


@pytest.mark.parametrize("kind", ["llama", pytest.param("gemma3_text", marks=pytest.mark.long), "qwen3_next"])
def test_an_engine_goes_on_while_its_valkey_server_is_stopped_killed_filled_and_restarted(
    kind, valkey, monkeypatch, waits
):
    with pressed(kind, [HostTier(num_blocks=20), RemoteTier(valkey.url, timeout_s=0.2)]) as engine:
        midway = Midway(engine, monkeypatch)
        assert hits_come_back(engine, kind)
        midway.at({7: valkey.pause})
        run(engine, kind)  # which ends while the server is stopped
        run(engine, kind)
        midway.at({7: valkey.resume})
        run(engine, kind)
        assert hits_come_back(engine, kind)
        midway.at({7: valkey.kill})
        run(engine, kind)
        run(engine, kind)  # while there is none
        midway.at({7: partial(restart, valkey)})
        run(engine, kind)
        assert hits_come_back(engine, kind)
        with valkey.client() as client:
            midway.at({7: partial(client.config_set, "maxmemory", 1), 15: client.flushall})
            run(engine, kind)
            run(engine, kind)  # while it takes nothing
            client.config_set("maxmemory", 0)
        assert hits_come_back(engine, kind)
        midway.assert_done()
        stats = engine.manager.store_stats()["valkey"]
    assert stats.num_timeouts > 0
    assert stats.num_errors > 0
    assert stats.num_refused > 0
    assert stats.num_corrupt == 0
    assert max(waits, default=0.0) <= 0.2


@pytest.mark.parametrize("kind", ["llama", pytest.param("gemma3_text", marks=pytest.mark.long)])
def test_an_engine_goes_on_while_its_s3_server_is_stopped_killed_and_restarted(kind, s3, monkeypatch, waits):
    with pressed(kind, [RemoteTier(s3.url(BUCKET), timeout_s=1.0)]) as engine:
        midway = Midway(engine, monkeypatch)
        assert hits_come_back(engine, kind)
        midway.at({7: s3.pause})
        run(engine, kind)  # which ends while the server is stopped
        midway.at({7: s3.resume})
        run(engine, kind)
        assert hits_come_back(engine, kind)
        midway.at({7: s3.kill})
        run(engine, kind)
        run(engine, kind)  # while there is none
        midway.at({7: partial(restart, s3, BUCKET)})
        run(engine, kind)
        assert hits_come_back(engine, kind)
        midway.assert_done()
        stats = engine.manager.store_stats()["s3"]
    assert stats.num_timeouts + stats.num_errors > 0
    assert stats.num_corrupt == 0
    assert max(waits) <= 1.0


@pytest.mark.parametrize("kind", ["llama", pytest.param("gemma3_text", marks=pytest.mark.long)])
def test_an_engine_goes_on_while_its_s3_server_is_full(kind, s3, monkeypatch, waits):
    front = FullDisk(s3)
    with pressed(kind, [RemoteTier(front.url(BUCKET), timeout_s=1.0)]) as engine:
        midway = Midway(engine, monkeypatch)
        assert hits_come_back(engine, kind)
        engine.manager.drop(namespace=())
        midway.at({7: partial(setattr, front, "is_full", True)})
        run(engine, kind)
        midway.assert_done()
        run_until_a_store_fails(engine, kind)  # its client tries again for a while
        front.is_full = False
        assert hits_come_back(engine, kind)
        stats = engine.manager.store_stats()["s3"]
    front.close()
    assert front.num_refused > 0
    assert stats.num_timeouts + stats.num_errors > 0
    assert stats.num_corrupt == 0
    assert max(waits) <= 1.0


def test_two_engines_share_a_server_and_one_of_them_keeps_what_it_got_on_disk(valkey, tmp_path):
    remote = RemoteTier(valkey.url, timeout_s=PATIENT)
    with pressed("llama", [remote]) as engine:
        assert run(engine, "llama")[0].stats.num_cached_tokens == 0
        assert engine.manager.flush(PATIENT)
    disk = DiskTier(tmp_path / "blocks", "8 MiB", timeout_s=PATIENT)
    with pressed("llama", [disk, remote]) as engine:
        assert run(engine, "llama")[0].stats.num_cached_tokens > 0
        assert engine.manager.flush(PATIENT)
    valkey.kill()
    with pressed("llama", [disk]) as engine:
        assert run(engine, "llama")[0].stats.num_cached_tokens > 0


def test_a_server_that_is_not_there_changes_nothing_but_hits(valkey):
    valkey.kill()
    with pressed("llama", [RemoteTier(valkey.url, timeout_s=PATIENT)]) as engine:
        run(engine, "llama")
        assert num_hits(engine) == 0
    assert len(work("llama")[0]) == 12
