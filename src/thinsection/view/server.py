"""The viewer's slides, every answer on them, and its server: behind a token, read-only.

It is bound to 127.0.0.1. A URL names a slide by its id and the rest by numbers; both are looked up
in what the viewer was started with, so that no part of a URL becomes a path.
"""

import contextlib
import json
import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from html import escape
from itertools import chain
from mimetypes import guess_type
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from thinsection import errors
from thinsection.config import option, replace_flat, section
from thinsection.errors import ThinsectionError, importing, require, rewording
from thinsection.pipeline.folder import Results, open_results
from thinsection.report.draw import thumbnail_file
from thinsection.slide import Slide
from thinsection.slide.cohort import SlideEntry
from thinsection.slide.look import Look
from thinsection.slide.segments import CACHE_BYTES
from thinsection.stages.config import SlidesConfig
from thinsection.stages.request import cohort_of
from thinsection.store.ledger import LEDGER_NAME, SLIDES, SlideLedger, load_ledger
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
_BINARY = "application/octet-stream"
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; "
    "style-src 'self' 'unsafe-inline'; base-uri 'none'; form-action 'none'",
    "Referrer-Policy": "no-referrer",  # the address has the token
    "X-Content-Type-Options": "nosniff",
}
_KEPT = _HEADERS | {
    "Cache-Control": "private, max-age=86400"
}  # of this start: its token is new
_BASE_BYTES = (
    320 * MIB
)  # of the process, with PyTorch, which a search for similar tiles loads
_OPEN_BYTES = CACHE_BYTES + 32 * MIB  # of an open slide
_THUMBNAIL_PX, _CROP_PX, _SIMILAR = 240, 160, 12
_IDENTIFYING = ("label", "macro")
_NOTHING = Results(folder=Path(), ledgers={})
Source = (
    Results | Sequence[str | Path]
)  # paths: slides, folders, cohort CSVs, a results folder


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewerConfig:
    """What the viewer shows."""

    port: int = option(0, "Port on 127.0.0.1; 0 takes a free one.")
    memory: str = option(
        "1GiB", "Bound on the memory of the viewer's process, at least 512MiB."
    )
    annotations: Path | None = option(
        None, "Folder with ID.geojson of slides, in level-0 px."
    )
    clusters: int = option(8, "Clusters of a slide's tile embeddings, by k-means.")
    show_label: bool = option(
        False, "Show label and macro pictures: they may name a patient."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewConfig:
    """All settings of `thinsection view`, by section."""

    view: ViewerConfig = section(ViewerConfig)
    slides: SlidesConfig = section(SlidesConfig)


def _slides_of(source: Source, config: ViewConfig) -> tuple[Results, list[SlideEntry]]:
    """The results, and the slides that are named beside them, whose paths hold."""
    if isinstance(source, Results):
        results = source
        named = list[str | Path]()
    else:
        folders = _results_folders(source)
        results = open_results(folders[0]) if folders else _NOTHING
        named = [path for path in source if path not in folders]
    if not named and results.ledgers:
        return results, []
    return results, list(cohort_of(named, config.slides))


def _results_folders(source: Source) -> list[str | Path]:
    """The one results folder that is named, or none. Raises InvalidInputError: several."""
    if isinstance(source, Results):
        return [source.folder]
    folders = [p for p in source if any(Path(p, SLIDES).glob(f"*/{LEDGER_NAME}"))]
    require(len(folders) < 2, "paths must name at most one results folder", folders)
    return folders


def _entry_of(ledger: SlideLedger, look: Look | None) -> SlideEntry:
    """The slide of a ledger, with the resolution that its run gave it."""
    facts = ledger.slide
    mpp = None
    if facts.get("mpp_x") and facts.get("mpp_y"):
        mpp = (facts["mpp_x"], facts["mpp_y"])
    return SlideEntry(
        slide_id=ledger.slide_id,
        slide_path=str(facts.get("slide_path", "")),
        slide_mpp=mpp,
        look=look,
    )


def _stamps(folder: Path) -> dict[Path, int]:
    """When each ledger of a results folder, and each folder of its results, last changed."""
    if not (folder / SLIDES).is_dir():
        return {}
    paths = [*(folder / SLIDES).glob(f"*/{LEDGER_NAME}"), *folder.glob("*/*/")]
    stamps = dict[Path, int]()
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # it went between the two looks
            stamps[path] = path.stat().st_mtime_ns
    return stamps


@dataclass(kw_only=True)
class _OpenSlide:
    """A slide that is open, and how many requests read it now."""

    deep: DeepZoom
    readers: int = 0


class ShownSlides:
    """The slides of a viewer, and every answer on them. Thread-safe.

    Methods raise LookupError where there is no such slide, level, layer or picture.

    Memory: some kB a slide. Of `memory` less 320 MiB of the process half is for open slides (96 MiB
        each, at least one, and those that requests read), a quarter for encoded tiles, a quarter
        for work on embeddings.

    Raises CohortError: the paths name no slide; BudgetError: memory is below 512 MiB;
    InvalidInputError: several results folders.
    """

    def __init__(self, source: Slide | Source, config: ViewConfig) -> None:
        self._config = config.view
        self._reader = config.slides.reader
        self._look = config.slides.look
        self._lock = threading.Lock()
        total = parse_bytes(config.view.memory, name="memory")
        if total < 512 * MIB:
            got = f"memory must be >= 512 MiB, got {config.view.memory}"
            raise errors.BudgetError(got)
        self._budget = (total - _BASE_BYTES) // 4
        self._most_open = max(1, 2 * self._budget // _OPEN_BYTES)
        self._cache = BytesCache(self._budget)
        self._open = OrderedDict[str, _OpenSlide]()  # the last used last
        self._layers = dict[str, list[Layer]]()
        self._version = 0  # of the results folder, as it was read last
        self._fresh = set[str]()  # slides whose layers are of this version
        self._results = _NOTHING
        self._stamps = dict[Path, int]()
        if isinstance(source, Slide):  # whoever opened it closes it
            name = Path(source.slide_path).name
            entry = SlideEntry(slide_id=name, slide_path=source.slide_path)
            self._named = [entry]
            self._open[name] = _OpenSlide(deep=DeepZoom(source))
        else:
            for folder in _results_folders(source):  # before its ledgers are read
                self._stamps = _stamps(Path(folder))
            self._results, self._named = _slides_of(source, config)
        self._entries = self._all_entries()

    def _all_entries(self) -> dict[str, SlideEntry]:
        """The slides of the results, then those that are named; the latter's paths hold."""
        ledgers = self._results.ledgers.values()
        entries = {ledger.slide_id: _entry_of(ledger, self._look) for ledger in ledgers}
        return entries | {entry.slide_id: entry for entry in self._named}

    def _reload(self) -> None:
        """Reads what changed in the results folder since it was read last."""
        if self._results is _NOTHING:
            return
        with self._lock:
            stamps = _stamps(self._results.folder)
            changed = {p for p, stamp in stamps.items() if self._stamps.get(p) != stamp}
            if not changed:
                return
            self._stamps = stamps
            ids = {path.parent.name for path in changed if path.name == LEDGER_NAME}
            folder = self._results.folder
            ledgers = {slide_id: load_ledger(folder, slide_id) for slide_id in ids}
            known = {**self._results.ledgers, **ledgers}
            self._results = Results(folder=folder, ledgers=dict(sorted(known.items())))
            self._entries = self._all_entries()
            self._version += 1
            self._fresh.clear()

    @contextlib.contextmanager
    def _reading(self, slide_id: str) -> Iterator[DeepZoom]:
        """A slide that is open, and stays so, as long as the block reads it."""
        entry = self._entries[slide_id]
        with self._lock:
            if slide_id not in self._open:
                self._open[slide_id] = _OpenSlide(deep=DeepZoom(self._opened(entry)))
            opened = self._open[slide_id]
            opened.readers += 1
            self._open.move_to_end(slide_id)
            self._close_idle()
        try:
            yield opened.deep
        finally:
            with self._lock:
                opened.readers -= 1
                self._close_idle()

    def _opened(self, entry: SlideEntry) -> Slide:
        try:
            return entry.open(self._reader)
        except errors.SlideOpenError as error:
            error.add_note(
                "where slides were moved, name their folder beside the results"
            )
            raise

    def _close_idle(self) -> None:
        """Closes slides beyond the memory, the least recently used first, if nobody reads them."""
        idle = [name for name, opened in self._open.items() if not opened.readers]
        for name in idle[: max(0, len(self._open) - self._most_open)]:
            self._open.pop(name).deep.slide.close()

    def _layers_of(self, slide_id: str) -> list[Layer]:
        """The layers of a slide as the folder now has them.

        A layer keeps its number while the viewer runs: a page that was loaded earlier asks by it.
        """
        with self._lock:
            if slide_id in self._fresh:
                return self._layers[slide_id]
            results, version = self._results, self._version
        found = {
            (layer.group, layer.name): layer for layer in self._read(results, slide_id)
        }
        with self._lock:
            layers = list[Layer]()
            for layer in self._layers.get(slide_id, []):
                layers.append(found.pop((layer.group, layer.name), layer))
            layers += found.values()
            self._layers[slide_id] = layers
            if version == self._version:
                self._fresh.add(slide_id)
            return layers

    def _read(self, results: Results, slide_id: str) -> Iterator[Layer]:
        if slide_id in results.ledgers:
            yield from layers_of(results, slide_id, self._config.clusters, self._budget)
        folder = self._config.annotations
        if folder and (drawn := folder / f"{slide_id}.geojson").is_file():
            yield from outline_layers(drawn, "annotations")

    def _features(self, slide_id: str) -> list[str]:
        """Addresses of the embeddings that a slide has."""
        ledger = self._results.ledgers.get(slide_id)
        return [
            name for name in self._results.features if ledger and name in ledger.stages
        ]

    def listed(self) -> list[str]:
        """The id of every slide, of those too that were finished since the start."""
        self._reload()
        return list(self._entries)

    def facts(self, slide_id: str) -> dict[str, Any]:
        """Sizes and levels, layers, names of embeddings and of other pictures."""
        layers = self._layers_of(slide_id) if slide_id in self._entries else []
        shown = ("group", "name", "kind", "color")
        with self._reading(slide_id) as deep:
            slide = deep.slide
            return {
                "id": slide_id,
                "size": slide.size,
                "mpp": slide.slide_mpp,
                "notes": slide.notes,
                "power": slide.objective_power,
                "vendor": slide.vendor,
                "reader": slide.reader,
                "levels": [asdict(level) for level in deep.levels],
                "layers": [{n: getattr(layer, n) for n in shown} for layer in layers],
                "features": self._features(slide_id),
                "pictures": [n for n in slide.associated_names if n in _IDENTIFYING],
                "show": self._config.show_label,
            }

    def tile(self, slide_id: str, level: int, column: int, row: int) -> bytes:
        """A tile of a level of the deep zoom, as a JPEG."""

        def read() -> bytes:
            with self._reading(slide_id) as deep:
                return deep.tile(level, column, row)

        return self._cache.get((slide_id, level, column, row), read)

    def layer(self, slide_id: str, number: int) -> bytes:
        """What a layer draws."""
        if slide_id not in self._entries:
            raise KeyError(slide_id)
        layer = self._layers_of(slide_id)[number]
        return self._cache.get((slide_id, number, "layer", self._version), layer.read)

    def thumbnail(self, slide_id: str) -> bytes:
        """The whole slide, small: made of the results' picture where there is one."""
        entry = self._entries[slide_id]  # its id is a name, whatever the URL has
        size = (_THUMBNAIL_PX, _THUMBNAIL_PX)

        def read() -> bytes:
            stored = None
            if slide_id in self._results.ledgers:
                stored = thumbnail_file(self._results.folder / SLIDES / entry.slide_id)
            if stored is None:
                with self._reading(slide_id) as deep:
                    return encode(deep.slide.thumbnail(size))
            rule = "picture must be readable"
            with (
                rewording(rule, stored, OSError, error=errors.StoreError),
                Image.open(stored) as picture,
            ):
                small = picture.convert("RGB")
                small.thumbnail(size)
                return encode(np.asarray(small))

        return self._cache.get((slide_id, "thumbnail"), read)

    def picture(self, slide_id: str, name: str) -> bytes:
        """Label or macro, where they are shown."""
        if name not in _IDENTIFYING or not self._config.show_label:
            raise KeyError(name)
        with self._reading(slide_id) as deep:
            return encode(deep.slide.associated_image(name))

    def crop(self, slide_id: str, x: int, y: int, width: int, height: int) -> bytes:
        """A region of level 0, small, as a JPEG."""
        with self._reading(slide_id) as deep:
            return deep.crop(x, y, (width, height), _CROP_PX)

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
        self,
        source: Slide | Source,
        config: ViewConfig | None = None,
        **settings: object,
    ) -> None:
        config = replace_flat(config or ViewConfig(), settings)
        token = secrets.token_urlsafe(24)
        self._shown = ShownSlides(source, config)
        app = _WithToken(_application(self._shown), token)
        with rewording(
            "port must be free", config.view.port, OSError, error=errors.ConfigError
        ):
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
            time.sleep(
                0.2
            )  # a signal during `join` would make Python 3.11 take it for ended

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
    require(
        ready,
        "the viewer must have OpenSeadragon",
        got,
        error=errors.MissingDependencyError,
    )

    def static(request: Request) -> Response:
        name = request.path_params.get("name", "viewer.html")
        return Response(files[name], media_type=guess_type(name)[0], headers=_HEADERS)

    def answering(make: Callable[..., Any], kind: str) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            made = make(**request.path_params)
            if kind == _LINES:
                lines = chain(
                    [next(made)], made
                )  # it refuses before an answer has begun
                return StreamingResponse(lines, media_type=kind, headers=_HEADERS)
            if kind == _JSON:
                return Response(json.dumps(made), media_type=kind, headers=_HEADERS)
            headers = _KEPT if kind == _JPEG else _HEADERS  # results may change
            return Response(made, media_type=kind, headers=headers)

        return answer

    answers: dict[str, tuple[Callable[..., Any], str]] = {
        "": (shown.listed, _JSON),
        "/{slide_id}": (shown.facts, _JSON),
        "/{slide_id}/tiles/{level:int}/{column:int}/{row:int}": (shown.tile, _JPEG),
        "/{slide_id}/layers/{number:int}": (shown.layer, _BINARY),
        "/{slide_id}/thumbnail": (shown.thumbnail, _JPEG),
        "/{slide_id}/pictures/{name}": (shown.picture, _JPEG),
        "/{slide_id}/crop/{x:int}/{y:int}/{width:int}/{height:int}": (
            shown.crop,
            _JPEG,
        ),
        "/{slide_id}/similar/{features:int}/{x:int}/{y:int}": (shown.similar, _LINES),
    }
    routes = [Route("/", static), Route("/static/{name}", static)]
    routes += [
        Route(f"/slides{path}", answering(*how)) for path, how in answers.items()
    ]
    handlers = dict.fromkeys((ThinsectionError, LookupError), _refused)
    return Starlette(routes=routes, exception_handlers=handlers)


def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, LookupError) and not isinstance(error, ThinsectionError):
        return JSONResponse({"error": "there is no such thing here"}, 404, _HEADERS)
    lines = [str(error), *getattr(error, "__notes__", [])]
    return JSONResponse({"error": "\n".join(lines)}, 422, _HEADERS)


def view(source: Slide | Source, **settings: object) -> Viewer:
    """Shows a slide or results in a viewer, which a notebook displays as a frame.

    It runs in a thread until `close()`; close it before a slide that it shows.

    Args:
        source: an open slide, results, or paths: slides, folders, cohort CSVs, a results folder.
        settings: those of `thinsection view`: port, memory, annotations, show_label.

    Raises MissingDependencyError: the extra 'view' is not installed; as of `Viewer` besides.
    """
    return Viewer(source, None, **settings)
