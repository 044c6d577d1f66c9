"""The viewer's server: bound to 127.0.0.1, behind a token, read-only.

A URL names a slide by its id and the rest by numbers; both are looked up in what the viewer was
started with, so that no part of a URL becomes a path.
"""

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from html import escape
from itertools import chain
from mimetypes import guess_type
from pathlib import Path
from typing import Any

from thinsection.config import replace_flat
from thinsection.errors import (
    ConfigError,
    MissingDependencyError,
    ThinsectionError,
    importing,
    require,
    rewording,
)
from thinsection.pipeline.folder import Results
from thinsection.slide import Slide
from thinsection.types import Closing
from thinsection.view.slides import ShownSlides, ViewConfig

with importing("the viewer must have starlette and uvicorn", "view"):
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send

_STATIC = Path(__file__).parent / "static"
_JSON, _JPEG, _LINES = "application/json", "image/jpeg", "application/x-ndjson"
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; "
    "style-src 'self' 'unsafe-inline'; base-uri 'none'; form-action 'none'",
    "Referrer-Policy": "no-referrer",  # the address has the token
    "X-Content-Type-Options": "nosniff",
}
_KEPT = _HEADERS | {"Cache-Control": "private, max-age=86400"}  # of this start: its token is new


class Viewer(Closing):
    """A running viewer at `url`, in a thread of its own; a notebook shows it as a frame.

    Args:
        source: an open slide, results, or paths: slides, folders, cohort CSVs, a results folder.
        config: all settings.
        settings: single ones, in their place: `port=8765`.

    Memory: `config.view.memory`, as `ShownSlides` spends it.

    Raises:
        MissingDependencyError: OpenSeadragon was not fetched.
        ConfigError: the port is taken.
        ThinsectionError: as of `ShownSlides`.
    """

    def __init__(
        self,
        source: Slide | Results | Sequence[str | Path],
        config: ViewConfig | None = None,
        **settings: object,
    ) -> None:
        config = replace_flat(config or ViewConfig(), settings)
        token = secrets.token_urlsafe(24)
        app = _WithToken(_application(ShownSlides(source, config)), token)
        with rewording("port must be free", config.view.port, OSError, error=ConfigError):
            self._socket = socket.create_server(("127.0.0.1", config.view.port))
        # else the head and the body of an answer are 40 ms apart
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/{token}/"
        how: dict[str, Any] = {"log_level": "warning", "timeout_graceful_shutdown": 1}
        self._server = uvicorn.Server(uvicorn.Config(app, access_log=False, **how))
        sockets = {"sockets": [self._socket]}
        self._thread = threading.Thread(target=self._server.run, kwargs=sockets, daemon=True)
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)

    def wait(self) -> None:
        """Until somebody closes it, or the process is asked to end."""
        while self._thread.is_alive():
            time.sleep(0.2)  # a signal during `join` would make Python 3.11 take it for ended

    def close(self) -> None:
        """Ends the server."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def _repr_html_(self) -> str:
        return f'<iframe src="{escape(self.url)}" width="100%" height="640"></iframe>'


class _WithToken:
    """Answers 403 where the first part of the path is not the token; it is compared in full."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            first, _, rest = scope["path"].removeprefix("/").partition("/")
            scope = {**scope, "path": f"/{rest}"}
            if not secrets.compare_digest(first.encode(), self._token):
                words = "wrong token; take the address that the viewer printed"
                await Response(words, 403)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _application(shown: ShownSlides) -> Starlette:
    """Every address of the viewer; in threads, as browsers ask for six things at a time."""
    files = {path.name: path.read_bytes() for path in _STATIC.iterdir()}
    remedy = "run `make setup` in a checkout, or install a wheel of `make wheel`"
    got = f"no openseadragon.min.js; {remedy}"
    ready = "openseadragon.min.js" in files
    require(ready, "the viewer must have OpenSeadragon", got, error=MissingDependencyError)

    def static(request: Request) -> Response:
        name = request.path_params.get("name", "viewer.html")
        return Response(files[name], media_type=guess_type(name)[0], headers=_HEADERS)

    def answering(make: Callable[..., Any], kind: str) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            made = make(**request.path_params)
            if kind == _LINES:
                lines = chain([next(made)], made)  # it refuses before an answer has begun
                return StreamingResponse(lines, media_type=kind, headers=_HEADERS)
            data, how = (json.dumps(made), _HEADERS) if kind == _JSON else (made, _KEPT)
            return Response(data, media_type=kind, headers=how)

        return answer

    answers: dict[str, tuple[Callable[..., Any], str]] = {
        "": (shown.listed, _JSON),
        "/{slide_id}": (shown.facts, _JSON),
        "/{slide_id}/tiles/{level:int}/{column:int}/{row:int}": (shown.tile, _JPEG),
        "/{slide_id}/layers/{number:int}": (shown.layer, "application/octet-stream"),
        "/{slide_id}/thumbnail": (shown.thumbnail, _JPEG),
        "/{slide_id}/pictures/{name}": (shown.picture, _JPEG),
        "/{slide_id}/crop/{x:int}/{y:int}/{width:int}/{height:int}": (shown.crop, _JPEG),
        "/{slide_id}/similar/{features:int}/{x:int}/{y:int}": (shown.similar, _LINES),
    }
    routes = [Route("/", static), Route("/static/{name}", static)]
    routes += [Route(f"/slides{path}", answering(*how)) for path, how in answers.items()]
    handlers = dict.fromkeys((ThinsectionError, LookupError), _refused)
    return Starlette(routes=routes, exception_handlers=handlers)


def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, LookupError) and not isinstance(error, ThinsectionError):
        return JSONResponse({"error": "there is no such thing here"}, 404, _HEADERS)
    lines = [str(error), *getattr(error, "__notes__", [])]
    return JSONResponse({"error": "\n".join(lines)}, 422, _HEADERS)
