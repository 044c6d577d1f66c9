"""A web server of bytes that answers requests for ranges, as servers of slides do."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class RangeServer(BaseHTTPRequestHandler):
    """Serves bytes, whole or in ranges; a subclass says which, or answers otherwise."""

    protocol_version = "HTTP/1.1"

    def answer(self) -> tuple[int, bytes, dict[str, str]]:
        """(Status, whole content, headers) for `self.path`; a range is cut for status 200."""
        raise NotImplementedError

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        status, body, headers = self.answer()
        span = self.headers.get("Range")
        if status == 200 and span:
            first, _, last = span.removeprefix("bytes=").partition("-")
            end = min(int(last or len(body)), len(body) - 1)
            status = 206
            headers = {**headers, "Content-Range": f"bytes {first}-{end}/{len(body)}"}
            body = body[int(first) : end + 1]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@contextmanager
def serving(handler: type[RangeServer]) -> Iterator[int]:
    """Port of this machine at which the handler answers in the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
