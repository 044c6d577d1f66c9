"""A web server of slides for those who know a password or the signature of today."""

import base64
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

WORD = "S3CRETp4ss"
SIGNATURES = ("9f86d081884c7d659a2feaa0c55ad015", "b94d27b9934d3e08a52e52d7da7dabfa")


class GuardedServer(BaseHTTPRequestHandler):
    """Serves one file in ranges to those who know a password or a signature of today."""

    protocol_version = "HTTP/1.1"
    data: bytes  # of every name that `files` lacks
    files: Mapping[str, bytes] = {}
    signature: str

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        expected = base64.b64encode(f"bob:{WORD}".encode()).decode()
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        data = self.files.get(parts.path.removeprefix("/"), self.data)
        is_known = self.headers.get("Authorization") == f"Basic {expected}"
        is_signed = query.get("X-Amz-Signature") == [self.signature]
        body = data if is_known or is_signed else b"no"
        status = 200 if is_known or is_signed else 403
        span = self.headers.get("Range")
        if status == 200 and span:
            first, _, last = span.removeprefix("bytes=").partition("-")
            end = min(int(last or len(body)), len(body) - 1)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{end}/{len(body)}")
            body = body[int(first) : end + 1]
        else:
            self.send_response(status)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)


def leaks(folder: Path) -> list[str]:
    """Files of a folder that hold a secret, in their bytes or their name."""
    secrets = [word.encode() for word in (WORD, *SIGNATURES)]
    return [
        str(path)
        for path in folder.rglob("*")
        if path.is_file()
        and any(s in path.read_bytes() + path.name.encode() for s in secrets)
    ]
