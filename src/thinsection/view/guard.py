"""Who may ask the viewer: this machine's own addresses, and those who know a token.

Two tokens keep two kinds of pages apart. One opens the viewer. The other opens pages of a results
folder, which somebody else may have written: a script of such a page reads its own address, and
finds no token in it that opens slides. A page's link to the viewer leads to `/PAGES/`, which
redirects; a page cannot read where a redirect led.
"""

import secrets
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from thinsection.errors import importing

with importing("the viewer must have starlette and uvicorn", "view"):
    from starlette.datastructures import Headers
    from starlette.responses import RedirectResponse, Response
    from starlette.types import ASGIApp, Receive, Scope, Send

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
        if not _is_own(f"http://{host}"):
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


def _is_own(url: str) -> bool:
    try:
        return urlsplit(url).hostname in _HOSTS
    except ValueError:
        return False
