"""Server of the viewer: read-only, and guarded (`view.guard`).

It listens on 127.0.0.1. A URL contains the id of a slide and numbers. All of them are looked up in
the viewer's sources, so that no part of a URL becomes a path. One route is different: the pages of
the results folder and what they link to (`view.guard.page_of`).
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from html import escape
from itertools import chain
from mimetypes import guess_type
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from thinsection.config import listing_settings, replace_flat
from thinsection.errors import (
    ConfigError,
    MissingDependencyError,
    ThinsectionError,
    rewording,
)
from thinsection.extras import importing
from thinsection.slide import Slide
from thinsection.types import KIB, Closing, Uncopied
from thinsection.view.guard import Guard, Tokens, page_of
from thinsection.view.shown import ShownSlides, Source, ViewConfig

with importing("the viewer", "starlette", "uvicorn"):
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

if TYPE_CHECKING:
    from thinsection.settings_types import ViewSettings

_STATIC = Path(__file__).parent / "static"
_LIBRARY = "openseadragon.min.js"
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; "
    "style-src 'self' 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    # a notebook on this machine shows the viewer as a frame
    "frame-ancestors 'self' http://localhost:* http://127.0.0.1:* https://localhost:* "
    "vscode-webview:",
    "Referrer-Policy": "no-referrer",  # the address contains the token
    "X-Content-Type-Options": "nosniff",
}
# pictures may be cached, results may change; a new start has a new token
_PICTURE_HEADERS = {**_HEADERS, "Cache-Control": "private, max-age=86400"}

# larger responses are sent in pieces of this size
_PIECE_BYTES = 256 * KIB

Answer = Callable[[Request], Response]


class Viewer(Uncopied, Closing):
    """Running viewer at `url`, in its own thread; a notebook shows it as a frame.

    Args:
        source: an open slide, results, or paths: slides, folders, cohort CSVs, a results folder.
        config: all settings.
        settings: single settings, which replace those of `config`: `port=8765`.

    Memory:
        `config.view.memory`, divided as in `ShownSlides`.

    Raises:
        MissingDependencyError: OpenSeadragon was not downloaded.
        ConfigError: the port is taken.
        ThinsectionError: as for `ShownSlides`.
    """

    copy_remedy = "pass its url"

    def __init__(
        self,
        source: Slide | Source,
        config: ViewConfig | None = None,
        **settings: Unpack[ViewSettings],
    ) -> None:
        config = replace_flat(config or ViewConfig(), settings)
        tokens = Tokens()
        self._shown = ShownSlides(source, config)
        place = self._shown.place
        app = Guard(_application(self._shown), tokens)
        port = config.view.port
        with rewording("port must be free", port, OSError, error=ConfigError):
            self._socket = socket.create_server(("127.0.0.1", port))
        # otherwise the head and the body of a response are 40 ms apart
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.url = (
            f"http://127.0.0.1:{self._socket.getsockname()[1]}/{tokens.viewer}/{place}"
        )
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                access_log=False,
                log_level="warning",
                timeout_graceful_shutdown=1,
            )
        )
        self._thread = threading.Thread(
            target=lambda: self._server.run(sockets=[self._socket]), daemon=True
        )
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)

    def wait(self) -> None:
        """Waits until `close` is called, or the process is asked to end."""
        while self._thread.is_alive():
            # after a signal during `join`, Python 3.11 would regard the thread as ended
            time.sleep(0.2)

    def close(self) -> None:
        """Stops the server."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def __repr__(self) -> str:
        words = self.url if self._thread.is_alive() else "closed"
        return f"Viewer({words!r})"

    def _repr_html_(self) -> str:
        url = escape(self.url)
        size = 'width="100%" height="640"'
        return f'<iframe src="{url}" {size} allow="clipboard-write"></iframe>'


def _application(shown: ShownSlides) -> Starlette:
    """Routes of the viewer; they run in threads, as browsers send six requests at a time."""
    static = _static_files()
    slide = "/slides/{slide_id}"
    routes = [
        Route("/", static),
        Route("/static/{name}", static),
        Route("/slides", _as_json(shown.listed)),
        Route("/news", _as_json(shown.news)),
        Route(slide, _as_json(shown.facts)),
        Route(
            slide + "/tiles/{level:int}/{column:int}/{row:int}", _as_jpeg(shown.tile)
        ),
        Route(
            slide + "/layers/{number:int}",
            _as_bytes(shown.layer, "application/octet-stream"),
        ),
        Route(
            slide + "/layers/{number:int}/{column:int}/{row:int}",
            _as_bytes(shown.layer_part, "application/octet-stream"),
        ),
        Route(slide + "/thumbnail", _as_jpeg(shown.thumbnail)),
        Route(slide + "/pictures/{name}", _as_jpeg(shown.picture)),
        Route(
            slide + "/crop/{x:int}/{y:int}/{width:int}/{height:int}",
            _as_jpeg(shown.crop),
        ),
        Route(
            slide + "/similar/{features:int}/{x:int}/{y:int}", _as_lines(shown.similar)
        ),
    ]
    folder = shown.results_folder
    if folder is not None:
        routes.append(Route("/results/{name:path}", page_of(folder)))
    handlers = {ThinsectionError: _refuse, LookupError: _refuse}
    return Starlette(routes=routes, exception_handlers=handlers)


def _static_files() -> Answer:
    """Serves the page and its scripts, which are read once."""
    files = {path.name: path.read_bytes() for path in _STATIC.iterdir()}
    if _LIBRARY not in files:
        raise MissingDependencyError(
            f"the viewer must have OpenSeadragon, got no {_LIBRARY}; "
            "`pip install -e .` in a clone fetches it"
        )

    def answer(request: Request) -> Response:
        name = request.path_params.get("name", "viewer.html")
        return Response(files[name], media_type=guess_type(name)[0], headers=_HEADERS)

    return answer


def _as_json(make: Callable[..., object]) -> Answer:
    return _as_bytes(
        lambda **parameters: json.dumps(make(**parameters)).encode(),
        "application/json",
    )


def _as_jpeg(make: Callable[..., bytes]) -> Answer:
    return _as_bytes(make, "image/jpeg", _PICTURE_HEADERS)


def _as_bytes(
    make: Callable[..., bytes], kind: str, headers: dict[str, str] = _HEADERS
) -> Answer:
    def answer(request: Request) -> Response:
        data = make(**request.path_params)
        if len(data) <= _PIECE_BYTES:
            return Response(data, media_type=kind, headers=headers)
        length = {"Content-Length": str(len(data))}
        return StreamingResponse(
            _pieces(data), media_type=kind, headers={**headers, **length}
        )

    return answer


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    """Pieces of a response; in one piece, each connection would have a copy of what is not sent."""
    for start in range(0, len(data), _PIECE_BYTES):
        yield data[start : start + _PIECE_BYTES]


def _as_lines(make: Callable[..., Iterator[bytes]]) -> Answer:
    def answer(request: Request) -> Response:
        lines = make(**request.path_params)
        first = next(lines)  # errors are raised here, before the response begins
        return StreamingResponse(
            chain([first], lines), media_type="application/x-ndjson", headers=_HEADERS
        )

    return answer


def _refuse(request: Request, error: Exception) -> Response:
    """Response to an error: 404 if the object does not exist, else 422 with the message."""
    if isinstance(error, LookupError) and not isinstance(error, ThinsectionError):
        return JSONResponse({"error": "the viewer has no such page"}, 404, _HEADERS)
    lines = [str(error), *getattr(error, "__notes__", [])]
    return JSONResponse({"error": "\n".join(lines)}, 422, _HEADERS)


@listing_settings(ViewConfig)
def view(source: Slide | Source, **settings: Unpack[ViewSettings]) -> Viewer:
    """Shows a slide or results in a viewer, which a notebook displays as a frame.

    It runs in a thread until `close()`. Close it before you close a slide that it shows.

    Args:
        source: an open slide, results, or paths: slides, folders, cohort CSVs, a results folder.
        settings: settings of `thinsection view`: port, memory, annotations, show_label.

    Raises:
        MissingDependencyError: the extra 'view' is not installed.
        ThinsectionError: as for `Viewer`.
    """
    return Viewer(source, None, **settings)
