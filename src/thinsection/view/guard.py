"""Who may ask the viewer: this machine's own addresses, and those who know a token.

Two tokens keep two kinds of pages apart. One opens the viewer. The other opens pages of a results
folder, which somebody else may have written: a script of such a page reads its own address, and
finds no token in it that opens slides. A page's link to the viewer leads to `/PAGES/`, which
redirects; a page cannot read where a redirect led.

A page of a results folder runs scripts, so it is served as a sandbox: its scripts have an origin of
their own and read nothing from the viewer. Its links open slides in the viewer.
"""

import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from mimetypes import guess_type
from pathlib import Path
from urllib.parse import urlsplit

from thinsection.extras import importing
from thinsection.files.pages import VIEWER_META

with importing("the viewer", "starlette", "uvicorn"):
    from starlette.datastructures import Headers
    from starlette.requests import Request
    from starlette.responses import FileResponse, RedirectResponse, Response
    from starlette.types import ASGIApp, Receive, Scope, Send

# what pages are made of, and the files to which they link
_SUFFIXES = {
    *(".html", ".css", ".js", ".json", ".jsonl", ".geojson"),
    *(".png", ".jpg", ".jpeg", ".webp", ".svg"),
    *(".csv", ".tsv", ".txt", ".log", ".md", ".toml"),
}
_PAGE_HEADERS = {
    "Content-Security-Policy": "sandbox allow-scripts allow-popups allow-downloads "
    "allow-popups-to-escape-sandbox; default-src 'none'; img-src 'self' data:; "
    "script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",  # the address contains the token
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
# names of this machine; a port forwarded by ssh has another number, so that the port is free
_HOSTS = ("127.0.0.1", "localhost", "::1")
_RESULTS = "results/"
_HEADERS = {"Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}


def _token() -> str:
    return secrets.token_urlsafe(24)


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """First parts of the paths that are answered."""

    viewer: str = field(default_factory=_token)
    pages: str = field(default_factory=_token)


class Guard:
    """Answers 403 to another host, another origin, and who knows no token.

    Tokens are compared in constant time.
    """

    def __init__(self, app: ASGIApp, tokens: Tokens) -> None:
        """Guards an application that knows no tokens."""
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or hands it on without its token."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = self._refusal(Headers(scope=scope)) or self._turned(scope)
        if answer is not None:
            await answer(scope, receive, send)
            return
        path = scope["path"].removeprefix("/").partition("/")[2]
        await self._app({**scope, "path": f"/{path}"}, receive, send)

    def _refusal(self, headers: Headers) -> Response | None:
        """Refuses a name that somebody made point here (DNS rebinding), and other sites' pages."""
        host = headers.get("host", "")
        name = None
        with suppress(ValueError):  # no address at all
            name = urlsplit(f"http://{host}").hostname
        if name not in _HOSTS:
            words = (
                "the host must be 127.0.0.1 or localhost; open the address that the viewer "
                "printed"
            )
            return Response(words, 403, _HEADERS)
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{host}":
            words = "the origin must be the viewer's own"
            return Response(words, 403, _HEADERS)
        return None

    def _turned(self, scope: Scope) -> Response | None:
        """Redirects between the viewer and the pages; refuses who knows no token; None: go on."""
        first, _, path = scope["path"].removeprefix("/").partition("/")
        query = scope["query_string"].decode("latin-1")
        query = f"?{query}" if query else ""
        is_viewer = secrets.compare_digest(first.encode(), self._tokens.viewer.encode())
        is_page = secrets.compare_digest(first.encode(), self._tokens.pages.encode())
        is_result = path.startswith(_RESULTS)
        if is_viewer and is_result:
            raw = scope["raw_path"].decode("latin-1").partition(f"/{first}/")[2]
            place = f"/{self._tokens.pages}/{raw.partition('?')[0]}{query}"
            return RedirectResponse(place, 307, _HEADERS)
        # a script or a picture of a page asks for no document
        kind = Headers(scope=scope).get("sec-fetch-dest", "document")
        if is_page and not path and kind == "document":
            return RedirectResponse(f"/{self._tokens.viewer}/{query}", 303, _HEADERS)
        if is_viewer or (is_page and is_result):
            return None
        words = "the token in the address is wrong; open the address that the viewer printed"
        return Response(words, 403)


def page_of(folder: Path) -> Callable[[Request], Response]:
    """Answers requests for pages, pictures and tables of a results folder.

    A path that leads out of the folder, also by a link, or to another kind of file is not found. A
    page gets the address of the viewer, relative to itself.
    """
    root = folder.resolve()

    def answer(request: Request) -> Response:
        name = request.path_params["name"]
        path = _file_below(root, name)
        if path is None:
            raise LookupError(name)
        if path.suffix != ".html":
            kind = guess_type(path.name)[0] or "text/plain"
            return FileResponse(path, media_type=kind, headers=_PAGE_HEADERS)
        up = "../" * (name.count("/") + 1)
        # the icon, so that the browser does not ask for one without the token
        icon = '<link rel="icon" href="data:,">'
        meta = f'{icon}<meta name="{VIEWER_META}" content="{up}">'
        text = path.read_text(encoding="utf-8", errors="replace")
        text = text.replace("<head>", f"<head>\n{meta}", 1)
        return Response(text, media_type="text/html", headers=_PAGE_HEADERS)

    return answer


def _file_below(root: Path, name: str) -> Path | None:
    """File of a folder that may be served, or None."""
    if "\\" in name or "\0" in name:
        return None
    try:
        path = (root / name).resolve()
        is_served = path.suffix.lower() in _SUFFIXES and path.is_relative_to(root)
        return path if is_served and path.is_file() else None
    except OSError:  # a name that no file system can have
        return None
