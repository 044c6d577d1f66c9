"""A web server of slides for those who know a password or the signature of today."""

import base64
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from tests.support.range_server import RangeServer

WORD = "S3CRETp4ss"
SIGNATURES = ("9f86d081884c7d659a2feaa0c55ad015", "b94d27b9934d3e08a52e52d7da7dabfa")


class GuardedServer(RangeServer):
    """Serves one file in ranges to those who know a password or a signature of today."""

    data: bytes  # of every name that `files` lacks
    files: Mapping[str, bytes] = {}
    signature: str

    def answer(self) -> tuple[int, bytes, dict[str, str]]:
        expected = base64.b64encode(f"bob:{WORD}".encode()).decode()
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        is_known = self.headers.get("Authorization") == f"Basic {expected}"
        is_signed = query.get("X-Amz-Signature") == [self.signature]
        if not is_known and not is_signed:
            return 403, b"no", {}
        return 200, self.files.get(parts.path.removeprefix("/"), self.data), {}


def leaks(folder: Path) -> list[str]:
    """Files of a folder that hold a secret, in their bytes or their name."""
    secrets = [word.encode() for word in (WORD, *SIGNATURES)]
    return [
        str(path)
        for path in folder.rglob("*")
        if path.is_file()
        and any(s in path.read_bytes() + path.name.encode() for s in secrets)
    ]
