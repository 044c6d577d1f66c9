"""The viewer's slides, every answer on them, and its server: behind a token, read-only.

It is bound to 127.0.0.1. A URL names a slide by its id and the rest by numbers; both are looked up
in what the viewer was started with, so that no part of a URL becomes a path.
"""

import json
import secrets
import socket
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from html import escape
from itertools import chain
from mimetypes import guess_type
from pathlib import Path
from typing import Any

from thinsection import errors
from thinsection.config import option, replace_flat, section
from thinsection.errors import ThinsectionError, importing, require, rewording
from thinsection.pipeline.folder import Results, open_results
from thinsection.slide import Slide
from thinsection.slide.cohort import SlideEntry
from thinsection.slide.segments import CACHE_BYTES
from thinsection.stages.config import RunConfig, SlidesConfig
from thinsection.stages.request import cohort_of
from thinsection.store.ledger import LEDGER_NAME, SLIDES
from thinsection.types import MIB, Closing, parse_bytes
from thinsection.view.layers import Layer, layers_of, outline_layers, similar_tiles
from thinsection.view.pixels import BytesCache, DeepZoom, encode

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
_BASE_BYTES = 320 * MIB  # of the process, with PyTorch, which a search for similar tiles loads
_OPEN_BYTES = CACHE_BYTES + 32 * MIB  # of an open slide
_THUMBNAIL_PX, _CROP_PX, _SIMILAR = 240, 160, 12
_IDENTIFYING = ("label", "macro")
_NOTHING = Results(folder=Path(), ledgers={})
Source = Results | Sequence[str | Path]  # paths: slides, folders, cohort CSVs, a results folder


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewerConfig:
    """What the viewer shows."""

    port: int = option(0, "Port on 127.0.0.1; 0 takes a free one.")
    memory: str = option("1GiB", "Bound on the memory of the viewer's process, at least 512MiB.")
    annotations: Path | None = option(None, "Folder with ID.geojson of slides, in level-0 px.")
    clusters: int = option(8, "Clusters of a slide's tile embeddings, by k-means.")
    show_label: bool = option(False, "Show label and macro pictures: they may name a patient.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewConfig:
    """All settings of `thinsection view`, by section."""

    view: ViewerConfig = section(ViewerConfig)
    slides: SlidesConfig = section(SlidesConfig)


def _slides_of(source: Source, config: ViewConfig) -> tuple[Results, list[SlideEntry]]:
    """The results, and the slides: theirs, then those that are named, whose paths hold."""
    results, paths = _NOTHING, list[str | Path]()
    if isinstance(source, Results):
        results = source
    else:
        made = [path for path in source if any(Path(path, SLIDES).glob(f"*/{LEDGER_NAME}"))]
        require(len(made) < 2, "paths must name at most one results folder", made)
        results = open_results(made[0]) if made else results
        paths = [path for path in source if path not in made]
    found, look = [], config.slides.look
    for name, said in ((name, ledger.slide) for name, ledger in results.ledgers.items()):
        path, x, y = str(said.get("slide_path", "")), said.get("mpp_x"), said.get("mpp_y")
        mpp = (x, y) if x and y else None
        found.append(SlideEntry(slide_id=name, slide_path=path, slide_mpp=mpp, look=look))
    if paths or not found:
        found += cohort_of(paths, RunConfig(slides=config.slides))
    return results, found


class ShownSlides:
    """The slides of a viewer, and every answer on them. Thread-safe.

    Methods raise LookupError where there is no such slide, level, layer or picture.

    Memory: some kB a slide. Of `memory` less 320 MiB of the process half is for open slides (96 MiB
        each, at least one), a quarter for encoded tiles, a quarter for work on embeddings.

    Raises CohortError: the paths name no slide; BudgetError: memory is below 512 MiB;
    InvalidInputError: several results folders.
    """

    def __init__(self, source: Slide | Source, config: ViewConfig) -> None:
        self._config, self._reader, self._lock = config.view, config.slides.reader, threading.Lock()
        total, got = parse_bytes(config.view.memory, name="memory"), config.view.memory
        require(total >= 512 * MIB, "memory must be >= 512 MiB", got, error=errors.BudgetError)
        self._budget = (total - _BASE_BYTES) // 4
        self._most, self._cache = max(1, 2 * self._budget // _OPEN_BYTES), BytesCache(self._budget)
        self._open = OrderedDict[str, tuple[DeepZoom, list[Layer]]]()
        if isinstance(source, Slide):  # whoever opened it closes it
            name, self._results = Path(source.slide_path).name, _NOTHING
            self._entries = {name: SlideEntry(slide_id=name, slide_path=source.slide_path)}
            self._open[name] = DeepZoom(source), self._layers(name)
            return
        self._results, found = _slides_of(source, config)
        self._entries = {entry.slide_id: entry for entry in found}

    def _opened(self, slide_id: str) -> tuple[DeepZoom, list[Layer]]:
        """A slide, opened where it is not; the one that was used the longest ago may go."""
        entry = self._entries[slide_id]
        with self._lock:
            if slide_id not in self._open:
                try:
                    slide = entry.open(self._reader)
                except errors.SlideOpenError as error:
                    error.add_note("where slides were moved, name their folder beside the results")
                    raise
                self._open[slide_id] = DeepZoom(slide), self._layers(slide_id)
                # once no request reads it any more
                weakref.finalize(self._open[slide_id][0], slide.close)
                while len(self._open) > self._most:
                    self._open.popitem(last=False)
            self._open.move_to_end(slide_id)
            return self._open[slide_id]

    def _layers(self, slide_id: str) -> list[Layer]:
        found, folder = list[Layer](), self._config.annotations
        if slide_id in self._results.ledgers:
            found += layers_of(self._results, slide_id, self._config.clusters, self._budget)
        if folder and (drawn := folder / f"{slide_id}.geojson").is_file():
            found += outline_layers(drawn, "annotations")
        return found

    def _features(self, slide_id: str) -> list[str]:
        """Addresses of the embeddings that a slide has."""
        ledger = self._results.ledgers.get(slide_id)
        return [name for name in self._results.features if ledger and name in ledger.stages]

    def listed(self) -> list[str]:
        """The id of every slide."""
        return list(self._entries)

    def facts(self, slide_id: str) -> dict[str, Any]:
        """Sizes and levels, layers, names of embeddings and of other pictures."""
        deep, layers = self._opened(slide_id)
        slide, told = deep.slide, ("group", "name", "kind", "color")
        return {
            **{"id": slide_id, "size": slide.size, "mpp": slide.slide_mpp, "notes": slide.notes},
            **{"power": slide.objective_power, "vendor": slide.vendor, "reader": slide.reader},
            "levels": [asdict(level) for level in deep.levels],
            "layers": [{name: getattr(layer, name) for name in told} for layer in layers],
            "features": self._features(slide_id),
            "pictures": [name for name in slide.associated_names if name in _IDENTIFYING],
            "show": self._config.show_label,
        }

    def tile(self, slide_id: str, level: int, column: int, row: int) -> bytes:
        """A tile of a level of the deep zoom, as a JPEG."""
        deep, place = self._opened(slide_id)[0], (level, column, row)
        return self._cache.get((slide_id, *place), lambda: deep.tile(*place))

    def layer(self, slide_id: str, number: int) -> bytes:
        """What a layer draws."""
        return self._cache.get((slide_id, number), self._opened(slide_id)[1][number].read)

    def thumbnail(self, slide_id: str) -> bytes:
        """The whole slide, small: the results' picture where there is one."""
        entry = self._entries[slide_id]  # its id is a name, whatever the URL has
        folder = self._results.folder / SLIDES / entry.slide_id
        if made := slide_id in self._results.ledgers and sorted(folder.glob("thumbnail*.jpg")):
            return made[0].read_bytes()
        size = (_THUMBNAIL_PX, _THUMBNAIL_PX)
        return encode(self._opened(slide_id)[0].slide.thumbnail(size))

    def picture(self, slide_id: str, name: str) -> bytes:
        """Label or macro, where they are shown."""
        if name not in _IDENTIFYING or not self._config.show_label:
            raise KeyError(name)
        return encode(self._opened(slide_id)[0].slide.associated_image(name))

    def crop(self, slide_id: str, x: int, y: int, width: int, height: int) -> bytes:
        """A region of level 0, small, as a JPEG."""
        return self._opened(slide_id)[0].crop(x, y, (width, height), _CROP_PX)

    def similar(self, slide_id: str, features: int, x: int, y: int) -> Iterator[bytes]:
        """Lines of JSON: the tiles that are most similar to the one at a point, so far."""
        of = self._results, slide_id, self._features(slide_id)[features]
        for found in similar_tiles(*of, (x, y), count=_SIMILAR, budget=self._budget):
            yield json.dumps(found).encode() + b"\n"


class Viewer(Closing):
    """A running viewer at `url`, in a thread of its own; a notebook shows it as a frame.

    Args:
        source: an open slide, results, or paths: slides, folders, cohort CSVs, a results folder.
        config: all settings.
        settings: single ones, in their place: `port=8765`.

    Memory: `config.view.memory`, as `ShownSlides` spends it.

    Raises MissingDependencyError: OpenSeadragon was not fetched; ConfigError: the port is taken;
    ThinsectionError: as of `ShownSlides`.
    """

    def __init__(
        self, source: Slide | Source, config: ViewConfig | None = None, **settings: object
    ) -> None:
        config = replace_flat(config or ViewConfig(), settings)
        token = secrets.token_urlsafe(24)
        app = _WithToken(_application(ShownSlides(source, config)), token)
        with rewording("port must be free", config.view.port, OSError, error=errors.ConfigError):
            self._socket = socket.create_server(("127.0.0.1", config.view.port))
        # else the head and the body of an answer are 40 ms apart
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/{token}/"
        how: dict[str, Any] = {"log_level": "warning", "timeout_graceful_shutdown": 1}
        self._server = uvicorn.Server(uvicorn.Config(app, access_log=False, **how))
        run = partial(self._server.run, sockets=[self._socket])
        self._thread = threading.Thread(target=run, daemon=True)
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
    require(ready, "the viewer must have OpenSeadragon", got, error=errors.MissingDependencyError)

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
