"""TLS for the servers of tests: certificates of an authority of our own, and a front for servers that have none."""

import socket
import ssl
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from select import select
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Thread

from tests.tiers.services import missing


class Authority:
    """Somebody who signs certificates, and the files that whoever trusts it, or is to be trusted, is given."""

    def __init__(self, folder):
        if find_spec("trustme") is None:
            missing("trustme is not installed")
        import trustme

        self._folder, self._signer = folder, trustme.CA()
        self.ca_file = folder / "ca.pem"
        self._signer.cert_pem.write_to_path(self.ca_file)

    def issue(self, *names):
        """A file each with a certificate for these names, and with its key."""
        issued = self._signer.issue_cert(*names)
        files = self._folder / f"{names[0]}.pem", self._folder / f"{names[0]}.key"
        issued.cert_chain_pems[0].write_to_path(files[0])
        issued.private_key_pem.write_to_path(files[1])
        return files

    def context(self, *names):
        """What a server needs that shows a certificate for these names."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*self.issue(*names))
        return context


class TlsFront(ThreadingTCPServer):
    """A port that speaks TLS, and passes on what it is told to one that does not: the client's side is the real one."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, upstream_port, context):
        super().__init__(("127.0.0.1", 0), Passing)
        self.upstream, self.context, self.is_ended = ("127.0.0.1", upstream_port), context, False
        self.port = self.server_address[1]
        Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def end(self):
        self.is_ended = True
        self.shutdown()
        self.server_close()


class Passing(BaseRequestHandler):
    """One connection, until either side ends it. One thread for both ways: no TLS connection is safe with two."""

    def handle(self):
        self.request.settimeout(10)
        with (
            suppress(OSError),
            self.server.context.wrap_socket(self.request, server_side=True) as ours,
            socket.create_connection(self.server.upstream, 10) as theirs,
        ):
            for each in (ours, theirs):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while not self.server.is_ended and self.passed(ours, theirs):
                pass

    def passed(self, ours, theirs):
        """Pass on what comes, and say whether more may."""
        readable = [ours] if ours.pending() else select([ours, theirs], [], [], 0.05)[0]
        for source, target in ((ours, theirs), (theirs, ours)):
            if source in readable:
                some = self.received(source)
                if some == b"":
                    return False
                target.sendall(some or b"")
        return True

    @staticmethod
    def received(source):
        """What has come, nothing at the end, and None for what is only a part of a record of TLS."""
        source.settimeout(0)
        try:
            return source.recv(1 << 16)
        except ssl.SSLWantReadError:
            return None
        finally:
            source.settimeout(10)


@contextmanager
def tls_front(upstream_port, context):
    """The port of a front, for the length of a block."""
    front = TlsFront(upstream_port, context)
    try:
        yield front.port
    finally:
        front.end()
