"""Slides of a viewer, and the responses to all requests for them."""

import contextlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import parse_qsl

import numpy as np
from PIL import Image

from thinsection.config import Settings, option, section
from thinsection.errors import (
    BudgetError,
    ConfigError,
    InvalidInputError,
    SlideOpenError,
    StoreError,
    rewording,
)
from thinsection.files.trust import check_table_url
from thinsection.files.urls import is_url
from thinsection.machine import cpu_count
from thinsection.report.index import is_results_folder
from thinsection.report.stored import thumbnail_file
from thinsection.results.folder import Results, open_results
from thinsection.slide import Slide
from thinsection.slide.cohort import SlideEntry
from thinsection.slide.cohort_table import SlidesConfig
from thinsection.slide.formats.segments import CACHE_BYTES
from thinsection.slide.look import Look
from thinsection.stages.spec import cohort_of
from thinsection.store.ledger import LEDGER_NAME, SLIDES, SlideLedger, load_ledger
from thinsection.store.slide_ids import RELINK, slide_place
from thinsection.tiles.budget import MemoryAllowance
from thinsection.types import MIB, Size, parse_bytes
from thinsection.view.layers import Layer, group_words, layers_of, outline_layers
from thinsection.view.pixels import PICTURE_BYTES, BytesCache, DeepZoom, encode
from thinsection.view.similar import similar_tiles

T = TypeVar("T")

_LEAST_BYTES = 512 * MIB
# memory of the process with PyTorch, which the search for similar tiles loads
_BASE_BYTES = 320 * MIB
# memory of an open slide
_OPEN_BYTES = CACHE_BYTES + 32 * MIB
_THUMBNAIL_PX = 240
_CROP_PX = 160
_NUM_SIMILAR = 12
# pictures that may name a patient
_IDENTIFYING = ("label", "macro")
_NO_RESULTS = Results(folder=Path(), ledgers={})
# results, or paths: slides, folders, cohort CSVs, a results folder
Source = Results | Sequence[str | Path] | str | Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewerConfig:
    """Settings of the viewer."""

    port: int = option(0, "Port on 127.0.0.1; 0 means a free one.", daily=True)
    memory: str = option(
        "1GiB", "Memory limit of the viewer, at least 512MiB.", daily=True
    )
    annotations: Path | None = option(
        None,
        "Folder with annotations to show: SLIDE_ID.geojson in pixels of level 0.",
        daily=True,
    )
    clusters: int = option(
        8, "Number of clusters of a slide's tile embeddings (k-means)."
    )
    at: str | None = option(
        None,
        "View to open: a link copied in the viewer, or the part of the link after '#'.",
        daily=True,
    )
    show_label: bool = option(
        False, "Show label and macro images, which may identify a patient."
    )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ViewConfig(Settings):
    """All settings of `thinsection view`, by section."""

    view: ViewerConfig = section(ViewerConfig, "Viewer")
    slides: SlidesConfig = section(SlidesConfig)


@dataclass(kw_only=True)
class _OpenSlide:
    """Open slide, and the number of requests that read it now."""

    deep: DeepZoom
    readers: int = 0


def layer_bytes(memory_bytes: int) -> int:
    """Bytes for a layer or a step of a search: a quarter of the memory beside the process."""
    return (memory_bytes - _BASE_BYTES) // 4


class ShownSlides:
    """Slides of a viewer, and the responses to all requests for them. Thread-safe.

    Methods raise LookupError if the slide, level, layer or picture does not exist.

    Memory:
        Some kB per slide. Of `memory`, without 320 MiB for the process, half is for open
        slides (96 MiB each, at least one), a quarter and `PICTURE_BYTES` for the work of all
        requests together, and the rest for encoded tiles and layers. Each request takes what it
        needs from one allowance, and waits while that is not free. A request for a further slide
        waits while all open ones are read.

    Raises:
        CohortError: the paths contain no slide.
        BudgetError: memory is below 512 MiB.
        InvalidInputError: more than one results folder.
    """

    def __init__(self, source: Slide | Source, config: ViewConfig) -> None:
        memory_bytes = parse_bytes(config.view.memory, name="memory")
        if memory_bytes < _LEAST_BYTES:
            raise BudgetError(f"memory must be >= 512 MiB, got {config.view.memory}")
        self._config = config.view
        self._reader = config.slides.reader
        self._look = config.slides.look
        self._allow_local_urls = config.slides.allow_local_urls
        self._lock = threading.Lock()
        # notified when a request has finished reading a slide
        self._unread = threading.Condition(self._lock)
        quarter = layer_bytes(memory_bytes)
        self._max_open = max(1, 2 * quarter // _OPEN_BYTES)
        # a layer or a step of a search; one at a time, which leaves room for a picture
        self._layer_bytes = quarter
        self._work = MemoryAllowance(quarter + PICTURE_BYTES)
        self._cache = BytesCache(quarter - PICTURE_BYTES)
        # the libraries keep buffers for each thread that calls them: 20 MiB and more
        self._layer_thread = ThreadPoolExecutor(1, "layers")
        self._picture_threads = ThreadPoolExecutor(min(4, cpu_count()), "pictures")
        # the most recently used slide is last
        self._open: OrderedDict[str, _OpenSlide] = OrderedDict()
        self._layers: dict[str, list[Layer]] = {}
        # version of the results folder at the last reading
        self._version = 0
        # slides whose layers belong to this version
        self._fresh: set[str] = set()
        self._results = _NO_RESULTS
        self._stamps: dict[Path, int] = {}
        if isinstance(source, Slide):  # the caller opened this slide and must close it
            name = Path(source.slide_path).name
            entry = SlideEntry(slide_id=name, slide_path=source.slide_path)
            self._named = [entry]
            self._open[name] = _OpenSlide(deep=DeepZoom(source))
        else:
            self._named = []
            if isinstance(source, str | Path):
                source = [source]
            folder = _results_folder(source)
            if folder is not None:
                # versions are read before the ledgers
                self._stamps = _change_times(Path(folder))
            if isinstance(source, Results):
                self._results = source
            else:
                if folder is not None:
                    self._results = open_results(folder)
                named = [path for path in source if path != folder]
                if named or folder is None:
                    self._named = list(cohort_of(named, config.slides))
        self._at_start = frozenset(self._results.ledgers)
        self._entries = self._all_entries()

    def _in_layer_thread(self, make: Callable[[], T]) -> T:
        """Makes a layer or a step of a search, one at a time."""
        with self._work.taken(self._layer_bytes):
            return self._layer_thread.submit(make).result()

    def _in_picture_thread(self, make: Callable[[], T]) -> T:
        """Makes a picture; as many at a time as there are threads and memory for."""
        with self._work.taken(PICTURE_BYTES):
            return self._picture_threads.submit(make).result()

    def _all_entries(self) -> dict[str, SlideEntry]:
        """Slides of the results, then the named ones; paths of the latter take precedence."""
        entries = {}
        for ledger in self._results.ledgers.values():
            entries[ledger.slide_id] = _entry_of(ledger, self._look)
        for entry in self._named:
            entries[entry.slide_id] = entry
        return entries

    def _reload(self) -> None:
        """Reads changes in the results folder since the last reading."""
        if self._results is _NO_RESULTS:
            return
        with self._lock:
            folder = self._results.folder
            stamps = _change_times(folder)
            changed = [
                path
                for path, stamp in stamps.items()
                if self._stamps.get(path) != stamp
            ]
            if not changed:
                return
            self._stamps = stamps
            ledgers = dict(self._results.ledgers)
            for path in changed:
                if path.name == LEDGER_NAME:
                    slide_id = path.parent.name
                    ledgers[slide_id] = load_ledger(folder, slide_id)
            self._results = Results(
                folder=folder, ledgers=dict(sorted(ledgers.items()))
            )
            self._entries = self._all_entries()
            self._version += 1
            self._fresh.clear()

    @contextlib.contextmanager
    def _reading(self, slide_id: str) -> Iterator[DeepZoom]:
        """Opens a slide, and keeps it open while the block reads it."""
        entry = self._entries[slide_id]
        with self._lock:
            while slide_id not in self._open and self._are_all_read():
                self._unread.wait()
            if slide_id not in self._open:
                self._make_room()
                slide = self._open_slide(entry)
                self._open[slide_id] = _OpenSlide(deep=DeepZoom(slide))
            opened = self._open[slide_id]
            opened.readers += 1
            self._open.move_to_end(slide_id)
        try:
            yield opened.deep
        finally:
            with self._lock:
                opened.readers -= 1
                self._unread.notify_all()

    def _open_slide(self, entry: SlideEntry) -> Slide:
        is_named = any(entry is named for named in self._named)
        if is_url(entry.slide_path) and not is_named:
            check_table_url(
                entry.slide_path,
                f"the results of {entry.slide_id!r}",
                allow_local=self._allow_local_urls,
            )
        try:
            return entry.open(self._reader)
        except SlideOpenError as error:
            error.add_note(f"{RELINK}; or pass their folder after the results folder")
            raise

    def _are_all_read(self) -> bool:
        """True if no further slide may be open, and requests read all that are."""
        is_full = len(self._open) >= self._max_open
        return is_full and all(opened.readers for opened in self._open.values())

    def _make_room(self) -> None:
        """Closes unused slides until one more may be open, the least recently used first."""
        idle = [name for name, opened in self._open.items() if not opened.readers]
        num_too_many = max(0, len(self._open) + 1 - self._max_open)
        for name in idle[:num_too_many]:
            self._open.pop(name).deep.slide.close()

    def _layers_of(self, slide_id: str) -> list[Layer]:
        """Current layers of a slide.

        A layer keeps its number while the viewer runs, as pages that were loaded earlier use it.
        """
        with self._lock:
            if slide_id in self._fresh:
                return self._layers[slide_id]
        return self._in_layer_thread(lambda: self._read_layers(slide_id))

    def _read_layers(self, slide_id: str) -> list[Layer]:
        """Current layers of a slide, read anew unless another request has just read them."""
        with self._lock:
            if slide_id in self._fresh:
                return self._layers[slide_id]
            results = self._results
            version = self._version
        current = {}
        found: list[Layer] = []
        if slide_id in results.ledgers:
            clusters = self._config.clusters
            found += layers_of(results, slide_id, clusters, self._layer_bytes)
        if self._config.annotations is not None:
            drawn = self._config.annotations / f"{slide_id}.geojson"
            if drawn.is_file():
                found += outline_layers(drawn, "annotations")
        for layer in found:
            current[layer.group, layer.name] = layer
        with self._lock:
            layers = []
            for layer in self._layers.get(slide_id, []):
                layers.append(current.pop((layer.group, layer.name), layer))
            layers += current.values()
            self._layers[slide_id] = layers
            if version == self._version:
                self._fresh.add(slide_id)
            return layers

    def _features(self, slide_id: str) -> list[str]:
        """Addresses of a slide's embeddings."""
        ledger = self._results.ledgers.get(slide_id)
        if ledger is None:
            return []
        return [name for name in self._results.features if name in ledger.stages]

    def listed(self) -> list[str]:
        """Ids of all slides, including those finished since the start."""
        self._reload()
        return list(self._entries)

    @property
    def place(self) -> str:
        """Where the viewer opens: the end of its address from '#', or ''.

        Raises ConfigError: `at` names no slide of the viewer.
        """
        if self._config.at is None:
            return ""
        place = self._config.at.rpartition("#")[2]
        slide_id = dict(parse_qsl(place)).get("slide")
        if slide_id not in self._entries:
            raise ConfigError(
                f"at must name a slide that the viewer shows, got {self._config.at!r}"
            )
        return f"#{place}"

    @property
    def results_folder(self) -> Path | None:
        """Results folder of the viewer, if there is one."""
        return None if self._results is _NO_RESULTS else self._results.folder

    def news(self) -> dict[str, object]:
        """Slides with results that had none at the start, and a number that grows with changes."""
        self._reload()
        with self._lock:
            ledgers = self._results.ledgers
            new = [slide_id for slide_id in ledgers if slide_id not in self._at_start]
            has_index = self.results_folder is not None
            return {"new": new, "version": self._version, "index": has_index}

    def facts(self, slide_id: str) -> dict[str, object]:
        """Sizes and levels, layers, names of embeddings and of further pictures."""
        layers = self._layers_of(slide_id) if slide_id in self._entries else []
        with self._reading(slide_id) as deep:
            slide = deep.slide
            names = slide.associated_names
            return {
                "id": slide_id,
                "size": slide.size,
                "mpp": slide.slide_mpp,
                "notes": slide.notes,
                "power": slide.objective_power,
                "vendor": slide.vendor,
                "reader": slide.reader,
                "levels": [asdict(level) for level in deep.levels],
                "layers": [_layer_facts(layer) for layer in layers],
                "features": self._features(slide_id),
                "pictures": [name for name in names if name in _IDENTIFYING],
                "show": self._config.show_label,
            }

    def tile(self, slide_id: str, level: int, column: int, row: int) -> bytes:
        """Tile of a deep-zoom level, as a JPEG."""

        def read() -> bytes:
            with self._reading(slide_id) as deep:
                return self._in_picture_thread(lambda: deep.tile(level, column, row))

        return self._cache.get((slide_id, level, column, row), read)

    def layer(self, slide_id: str, number: int) -> bytes:
        """Bytes to draw for a layer."""
        if slide_id not in self._entries:
            raise KeyError(slide_id)
        layer = self._layers_of(slide_id)[number]

        def read() -> bytes:
            return self._in_layer_thread(layer.read)

        return self._cache.get((slide_id, number, "layer", self._version), read)

    def layer_part(self, slide_id: str, number: int, column: int, row: int) -> bytes:
        """Bytes to draw for a square of a layer of cells."""
        if slide_id not in self._entries:
            raise KeyError(slide_id)
        read_part = self._layers_of(slide_id)[number].read_part
        if read_part is None:
            raise KeyError(number)

        def read() -> bytes:
            return self._in_layer_thread(lambda: read_part(column, row))

        return self._cache.get(
            (slide_id, number, "part", column, row, self._version), read
        )

    def thumbnail(self, slide_id: str) -> bytes:
        """Small picture of the whole slide, from the results' picture if there is one."""
        # checked id, so that no text from the URL becomes a path
        entry = self._entries[slide_id]
        return self._cache.get(
            (slide_id, "thumbnail"), lambda: self._read_thumbnail(entry)
        )

    def _read_thumbnail(self, entry: SlideEntry) -> bytes:
        size = (_THUMBNAIL_PX, _THUMBNAIL_PX)
        stored = None
        if entry.slide_id in self._results.ledgers:
            stored = thumbnail_file(self._results.folder / SLIDES / entry.slide_id)
        if stored is None:
            with self._reading(entry.slide_id) as deep:
                return self._in_picture_thread(
                    lambda: encode(deep.slide.thumbnail(size))
                )
        return self._in_picture_thread(partial(_reduced, stored, size))

    def picture(self, slide_id: str, name: str) -> bytes:
        """Label or macro image, if the settings allow it."""
        if name not in _IDENTIFYING or not self._config.show_label:
            raise KeyError(name)
        with self._reading(slide_id) as deep:
            return self._in_picture_thread(
                lambda: encode(deep.slide.associated_image(name))
            )

    def crop(self, slide_id: str, x: int, y: int, width: int, height: int) -> bytes:
        """Small JPEG of a region of level 0."""
        with self._reading(slide_id) as deep:
            return self._in_picture_thread(
                lambda: deep.crop(x, y, (width, height), _CROP_PX)
            )

    def similar(self, slide_id: str, features: int, x: int, y: int) -> Iterator[bytes]:
        """Lines of JSON with the tiles most similar to the one at a point, as they are found."""
        answers = similar_tiles(
            self._results,
            slide_id,
            self._features(slide_id)[features],
            (x, y),
            count=_NUM_SIMILAR,
            budget=self._layer_bytes,
        )
        while True:
            # nothing is held while the browser takes a line
            answer = self._in_layer_thread(lambda: next(answers, None))
            if answer is None:
                return
            yield json.dumps(answer).encode() + b"\n"


def _reduced(path: Path, size: Size) -> bytes:
    """Picture of a file that is reduced to at most a size, as a JPEG."""
    readable = rewording("picture must be readable", path, OSError, error=StoreError)
    with readable, Image.open(path) as picture:
        small = picture.convert("RGB")
        small.thumbnail(size)
        return encode(np.asarray(small))


def _layer_facts(layer: Layer) -> dict[str, object]:
    """Text for a layer in the viewer's list."""
    return {
        "key": layer.key,
        "group": layer.group,
        "name": layer.name,
        "words": layer.words,
        "group_words": group_words(layer.group),
        "kind": layer.kind,
        "color": layer.color,
        "scale": layer.scale,
        "colors": layer.colors,
        "names": layer.names,
        "map": layer.map,
        "empty": layer.is_empty,
    }


def _results_folder(source: Results | Sequence[str | Path]) -> str | Path | None:
    """Results folder among the sources, or None; there may be only one.

    Raises:
        InvalidInputError: there are several.
    """
    if isinstance(source, Results):
        return source.folder
    folders = []
    for path in source:
        folder = Path(path)
        # a new one may have finished no slide yet
        if is_results_folder(folder) or any((folder / SLIDES).glob(f"*/{LEDGER_NAME}")):
            folders.append(path)
    if len(folders) > 1:
        raise InvalidInputError(
            f"paths must contain at most one results folder, got {folders}"
        )
    return folders[0] if folders else None


def _entry_of(ledger: SlideLedger, look: Look | None) -> SlideEntry:
    """Slide from a ledger, with the resolution that its run used."""
    facts = ledger.slide
    mpp = None
    if facts.get("mpp_x") and facts.get("mpp_y"):
        mpp = (facts["mpp_x"], facts["mpp_y"])
    return SlideEntry(
        slide_id=ledger.slide_id,
        slide_path=slide_place(ledger),
        slide_mpp=mpp,
        look=look,
        image=facts.get("image"),
    )


def _change_times(folder: Path) -> dict[Path, int]:
    """Time of the last change of each ledger and of each results subfolder."""
    if not (folder / SLIDES).is_dir():
        return {}
    paths = []
    for subfolder in folder.iterdir():
        if subfolder.name == SLIDES:
            paths += [slide / LEDGER_NAME for slide in subfolder.iterdir()]
        else:
            paths += subfolder.glob("*/")
    times: dict[Path, int] = {}
    for path in paths:
        # it does not exist yet, or was deleted since it was listed
        with contextlib.suppress(OSError):
            times[path] = path.stat().st_mtime_ns
    return times
