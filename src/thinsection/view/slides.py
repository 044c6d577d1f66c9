"""Which slides a viewer shows, and every answer on them; a few are open at a time."""

import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thinsection.config import option, section
from thinsection.errors import BudgetError, SlideOpenError, require
from thinsection.pipeline.folder import Results, open_results
from thinsection.slide import Slide
from thinsection.slide.cohort import SlideEntry
from thinsection.slide.segments import CACHE_BYTES
from thinsection.stages.config import RunConfig, SlidesConfig
from thinsection.stages.request import cohort_of
from thinsection.store.ledger import LEDGER_NAME, SLIDES
from thinsection.types import MIB
from thinsection.units import format_bytes, parse_bytes
from thinsection.view.layers import Layer, layers_of, outline_layers
from thinsection.view.pixels import DeepZoom, JpegCache, encode
from thinsection.view.similar import similar_tiles

_BASE_BYTES = 320 * MIB  # of the process, with PyTorch, which a search for similar tiles loads
_LEAST_BYTES = _BASE_BYTES + 192 * MIB
_OPEN_BYTES = CACHE_BYTES + 32 * MIB  # of an open slide
_THUMBNAIL_PX, _CROP_PX, _SIMILAR = 240, 160, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewerConfig:
    """What the viewer shows."""

    port: int = option(0, "Port on 127.0.0.1; 0 takes a free one.")
    memory: str = option("1GiB", "Bound on the memory of the viewer's process, at least 512MiB.")
    annotations: Path | None = option(None, "Folder with ID.geojson of slides, in level-0 px.")
    clusters: int = option(8, "Clusters of a slide's tile embeddings, by k-means.")
    show_label: bool = option(False, "Show label and macro pictures: they may name a patient.")

    @property
    def spare_bytes(self) -> int:
        """Beside the process itself: half is for open slides, a quarter for encoded tiles, a
        quarter for what is computed of embeddings.

        Raises BudgetError: memory is below 512 MiB.
        """
        num_bytes = parse_bytes(self.memory, name="memory")
        rule = f"memory must be >= {format_bytes(_LEAST_BYTES)}"
        require(num_bytes >= _LEAST_BYTES, rule, self.memory, error=BudgetError)
        return num_bytes - _BASE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewConfig:
    """All settings of `thinsection view`, by section."""

    view: ViewerConfig = section(ViewerConfig)
    slides: SlidesConfig = section(SlidesConfig)


@dataclass(frozen=True)
class _Opened:
    deep: DeepZoom
    layers: dict[int, Layer]


class ShownSlides:
    """The slides of a viewer, and every answer on them. Thread-safe.

    Methods raise KeyError where there is no such slide, layer or picture.

    Memory: some kB a slide, and what `ViewerConfig.spare_bytes` says.
    """

    def __init__(self, source: Slide | Results | Sequence[str | Path], config: ViewConfig) -> None:
        self._config, self._reader, self._lock = config.view, config.slides.reader, threading.Lock()
        spare, self._open = config.view.spare_bytes, OrderedDict[str, _Opened]()
        self._most, self._budget = max(1, spare // 2 // _OPEN_BYTES), spare // 4
        self._cache, self._results = JpegCache(spare // 4), None
        if isinstance(source, Slide):
            name = Path(source.slide_path).name
            self._entries = {name: SlideEntry(slide_id=name, slide_path=source.slide_path)}
            self._open[name] = self._with_layers(name, source)  # who opened it closes it
            return
        paths: Sequence[str | Path] = ()
        if isinstance(source, Results):
            self._results = source
        else:
            made = [path for path in source if any(Path(path, SLIDES).glob(f"*/{LEDGER_NAME}"))]
            require(len(made) < 2, "paths must name at most one results folder", made)
            self._results = open_results(made[0]) if made else None
            paths = [path for path in source if path not in made]
        entries = [*self._recorded(config), *(cohort_of(paths, RunConfig(slides=config.slides)) if paths else ())]
        self._entries = {entry.slide_id: entry for entry in entries}  # those that are given win

    def _recorded(self, config: ViewConfig) -> Iterator[SlideEntry]:
        """The slides of the results."""
        for name, ledger in (self._results.ledgers if self._results else {}).items():
            path, mpp = str(ledger.slide.get("slide_path", "")), None
            if ledger.slide.get("mpp_x") and ledger.slide.get("mpp_y"):
                mpp = (ledger.slide["mpp_x"], ledger.slide["mpp_y"])
            look = config.slides.look
            yield SlideEntry(slide_id=name, slide_path=path, slide_mpp=mpp, look=look)

    def _opened(self, slide_id: str) -> _Opened:
        """A slide, opened where it is not; the one that was used the longest ago may go."""
        entry = self._entries[slide_id]
        with self._lock:
            if slide_id not in self._open:
                try:
                    slide = entry.open(self._reader)
                except SlideOpenError as error:
                    error.add_note("where slides were moved, name their folder beside the results")
                    raise
                self._open[slide_id] = found = self._with_layers(slide_id, slide)
                weakref.finalize(found.deep, slide.close)  # once no request reads it any more
                while len(self._open) > self._most:
                    self._open.popitem(last=False)
            self._open.move_to_end(slide_id)
            return self._open[slide_id]

    def _with_layers(self, slide_id: str, slide: Slide) -> _Opened:
        layers: list[Layer] = []
        if self._results and slide_id in self._results.ledgers:
            of = {"clusters": self._config.clusters, "budget_bytes": self._budget}
            layers += layers_of(self._results, slide_id, **of)
        drawn = self._config.annotations and self._config.annotations / f"{slide_id}.geojson"
        if drawn and drawn.is_file():
            layers += outline_layers(drawn, "annotations")
        return _Opened(DeepZoom(slide), dict(enumerate(layers)))

    def _features(self, slide_id: str) -> dict[int, str]:
        """Addresses of the embeddings that a slide has."""
        found = self._results.features if self._results else ()
        stages = self._results.ledgers[slide_id].stages if found else ()
        return dict(enumerate(address for address in found if address in stages))

    def listed(self) -> list[dict[str, Any]]:
        """Every slide, and whether results have layers of it."""
        known = self._results.ledgers if self._results else {}
        return [{"id": name, "results": name in known} for name in self._entries]

    def facts(self, slide_id: str) -> dict[str, Any]:
        """Sizes and levels, layers, names of embeddings and of other pictures."""
        opened = self._opened(slide_id)
        slide, shown = opened.deep.slide, self._config.show_label
        return {
            **{"id": slide_id, "size": slide.size, "mpp": slide.slide_mpp, "notes": slide.notes},
            **{"power": slide.objective_power, "vendor": slide.vendor, "reader": slide.reader},
            "levels": [asdict(level) for level in opened.deep.levels],
            "layers": [layer.facts for layer in opened.layers.values()],
            "features": [*self._features(slide_id).values()],
            "pictures": slide.associated_names if shown else (),
            "hidden": () if shown else slide.associated_names,
        }

    def tile(self, slide_id: str, level: int, column: int, row: int) -> bytes:
        """A tile of a level of the deep zoom, as a JPEG."""
        deep, key = self._opened(slide_id).deep, (slide_id, level, column, row)
        return self._cache.get(key) or self._cache.put(key, deep.tile(level, column, row))

    def layer(self, slide_id: str, number: int) -> bytes:
        """What a layer draws."""
        layer, key = self._opened(slide_id).layers[number], (slide_id, number)
        return self._cache.get(key) or self._cache.put(key, layer.read())

    def thumbnail(self, slide_id: str) -> bytes:
        """The whole slide, small: the results' picture where there is one."""
        name = self._entries[slide_id].slide_id  # not as the URL has it
        folder = self._results.folder if self._results else Path()
        made = sorted((folder / SLIDES / name).glob("thumbnail*.jpg")) if self._results else []
        if made:
            return made[0].read_bytes()
        size = (_THUMBNAIL_PX, _THUMBNAIL_PX)
        return encode(self._opened(slide_id).deep.slide.thumbnail(size))

    def picture(self, slide_id: str, name: str) -> bytes:
        """Label, macro or thumbnail, where they are shown."""
        slide = self._opened(slide_id).deep.slide
        names = slide.associated_names if self._config.show_label else ()
        return encode(slide.associated_image(dict(zip(names, names))[name]))

    def crop(self, slide_id: str, x: int, y: int, width: int, height: int) -> bytes:
        """A region of level 0, small, as a JPEG."""
        return self._opened(slide_id).deep.crop(x, y, (width, height), _CROP_PX)

    def similar(self, slide_id: str, features: int, x: int, y: int) -> Iterator[bytes]:
        """Lines of JSON: the tiles that are most similar to the one at a point, so far."""
        address, results = self._features(slide_id)[features], self._results
        assert results is not None  # it has embeddings
        how = {"count": _SIMILAR, "budget_bytes": self._budget}
        for found in similar_tiles(results, slide_id, address, (x, y), **how):
            yield json.dumps(found).encode() + b"\n"
