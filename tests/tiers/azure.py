"""A stand-in for the wire to Azure's blob storage, and not the service: no server of it can be installed from packages.

It answers the few calls of its REST interface that stores make, from memory, in the forms that Azure documents, and
checks the signatures of none. Listings come a few names at a time, as Azure may cut them anywhere.
"""

import re
from email.utils import formatdate
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""What the emulators of Azure are opened with everywhere; no secret."""
LISTED_AT_ONCE = 4


class AzureWire:
    """Blobs of one container by name, over HTTP on the loopback."""

    def __init__(self, container):
        self.container, self.blobs, self.lock = container, {}, Lock()
        handler = type("Handler", (Call,), {"wire": self})
        self._server = type("Listening", (ThreadingHTTPServer,), {"request_queue_size": 128})(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        address = f"http://127.0.0.1:{self._server.server_port}/{ACCOUNT}"
        self.url = (
            f"az://{container}/cache?account_name={ACCOUNT}&account_key={KEY.replace('+', '%2B')}&endpoint={address}"
        )

    def close(self):
        self._server.shutdown()
        self._server.server_close()


class Call(BaseHTTPRequestHandler):
    """One call: Put Blob, Get Blob, Get Blob Properties, Delete Blob, List Blobs, or Blob Batch with what to delete."""

    protocol_version = "HTTP/1.1"
    wire = None

    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path, _, query = self.path.partition("?")
        _, account, container, *name = unquote(path).split("/", 3)
        if not self.headers.get("Authorization", "").startswith(f"SharedKey {account}:"):
            return self.fail(403, "AuthenticationFailed")
        if container != self.wire.container:
            return self.fail(404, "ContainerNotFound")
        if not name:
            asked = parse_qs(query, keep_blank_values=True)
            assert asked["restype"] == ["container"]
            return {"list": self.list, "batch": self.batch}[asked["comp"][0]](asked, body)
        with self.wire.lock:
            return self.act(name[0], body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer  # noqa: N815

    def act(self, name, body):
        blobs = self.wire.blobs
        if self.command == "PUT":
            if self.headers["x-ms-blob-type"] != "BlockBlob":
                return self.fail(400, "InvalidHeaderValue")
            blobs[name] = body
            return self.tell(201, self.properties(body))
        if name not in blobs:
            return self.fail(404, "BlobNotFound")
        if self.command == "DELETE":
            del blobs[name]
            return self.tell(202)
        return self.tell(200, {**self.properties(blobs[name]), "x-ms-blob-type": "BlockBlob"}, blobs[name])

    def batch(self, query, body):
        """Delete what each part names, and tell of each in a part of the answer."""
        answers = []
        for part in re.split(rb"--batch_[^\r\n]*\r\n", body):
            if number := re.search(rb"Content-ID: (\d+)", part):
                name = unquote(re.search(rb"\r\nDELETE ([^? ]+)", part)[1].decode()).split("/", 3)[3]
                with self.wire.lock:
                    is_gone = self.wire.blobs.pop(name, None) is not None
                told = "202 Accepted\r\n" if is_gone else "404 Not Found\r\nx-ms-error-code: BlobNotFound\r\n"
                head = f"Content-Type: application/http\r\nContent-ID: {number[1].decode()}\r\n\r\n"
                answers.append(f"--batchresponse_1\r\n{head}HTTP/1.1 {told}x-ms-version: 2023-11-03\r\n\r\n")
        kind = "multipart/mixed; boundary=batchresponse_1"
        return self.tell(202, {"Content-Type": kind}, f"{''.join(answers)}--batchresponse_1--".encode())

    def list(self, query, body):
        prefix, marker = (query.get(name, [""])[0] for name in ("prefix", "marker"))
        with self.wire.lock:
            there = sorted(each for each in self.wire.blobs.items() if each[0].startswith(prefix) and each[0] >= marker)
        shown, after = there[:LISTED_AT_ONCE], [name for name, _ in there[LISTED_AT_ONCE:]][:1]
        blobs = "".join(f"<Blob><Name>{escape(name)}</Name>{self.properties_xml(body)}</Blob>" for name, body in shown)
        next_marker = f"<NextMarker>{escape(after[0])}</NextMarker>" if after else "<NextMarker />"
        told = f"<EnumerationResults><Blobs>{blobs}</Blobs>{next_marker}</EnumerationResults>"
        return self.tell(
            200, {"Content-Type": "application/xml"}, f'<?xml version="1.0" encoding="utf-8"?>{told}'.encode()
        )

    def properties(self, body):
        return {"Last-Modified": formatdate(usegmt=True), "ETag": f'"0x{md5(body).hexdigest()[:15].upper()}"'}

    def properties_xml(self, body):
        told = {**self.properties(body), "Content-Length": len(body), "Content-Type": "application/octet-stream"}
        inner = "".join(f"<{name}>{escape(str(value))}</{name}>" for name, value in told.items())
        return f"<Properties>{inner}</Properties>"

    def fail(self, status, code):
        told = f'<?xml version="1.0" encoding="utf-8"?><Error><Code>{code}</Code></Error>'.encode()
        return self.tell(status, {"x-ms-error-code": code, "Content-Type": "application/xml"}, told)

    def tell(self, status, headers=(), body=b""):
        self.send_response(status)
        for name, value in {**dict(headers), "Content-Length": len(body), "x-ms-version": "2023-11-03"}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments):
        pass
