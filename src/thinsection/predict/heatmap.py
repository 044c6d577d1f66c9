"""Heatmaps: per-tile values drawn over the slide, as GeoJSON for QuPath, and as a sheet of tiles.

GRID/heatmap_MODEL/ID.h5           `tiles/attention`, `tiles/score_NAME`, see `predicting`
                   ID.COLUMN.png   the slide with a column over it
                   ID.geojson      tiles with all columns as measurements
                   ID.top.png      tiles with the highest scores, a row for each column
                   scale.json      the values of the first and last colour on each slide, and
                                   the SHA-256 of the model
Pictures for a column of another per-tile table are in GRID/heatmap_COLUMN.

Each slide has its own scale, which its caption gives. `--scale cohort` gives all slides of a folder
one scale, so that a colour has the same meaning on each; if a new slide changes the scale, the
pictures of the other slides are drawn again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from thinsection.config import listing_settings, nearest, option, replace_flat, section
from thinsection.errors import ConfigError, InvalidInputError, slide_boundary
from thinsection.evaluation.target import Kind, Target
from thinsection.files.atomic import atomic_path, read_json, write_json
from thinsection.files.lock import (
    LOCK_NAME,
    find_unfinished_files,
    hold,
    unfinished_files_of,
)
from thinsection.predict.answering import score_column
from thinsection.predict.model_file import SUFFIX, check_model_exists, read_card
from thinsection.predict.predicting import PredictRunConfig, predict
from thinsection.predict.replacing import (
    SCALE_NAME,
    heatmap_folder,
    refresh_heatmap_links,
)
from thinsection.report.draw import write_drawing
from thinsection.report.index import refresh_index
from thinsection.report.layers import Classes, Layer, Values, short_number
from thinsection.report.stored import open_picture
from thinsection.report.values import (
    Limits,
    Numbers,
    is_score,
    limits_up_to,
    shown_values,
    value_kind,
    value_words,
)
from thinsection.results.folder import Results, open_results
from thinsection.results.tiled_slide import TiledSlide, tiled_slide
from thinsection.run.process import OnEvent
from thinsection.slide.resize import read_tiles
from thinsection.store.geojson import write_tiles_geojson
from thinsection.store.identity import file_sum
from thinsection.store.tiles_h5 import TilesFile
from thinsection.store.tiles_h5 import read_tiles as read_tiles_file
from thinsection.types import Document, counted, ignore_message
from thinsection.weights.origin import slug

if TYPE_CHECKING:
    from thinsection.settings_types import HeatmapSettings

TILE_PX = 192  # edge of a tile on the sheet in pixels
GAP_PX = 6  # gap between tiles of the sheet in pixels
TEXT_PX = 18  # height of the sheet's text in pixels
MAX_CATEGORIES = 24  # largest number of rows of a sheet for categories
MAX_SCORES = 4  # largest number of score pictures if classes do not exclude each other
QUANTILES = 512  # values that represent a larger slide in the cohort's scale
# unit of a tile's score, see `answering.through`
SCORE_UNITS: dict[Kind, str] = {
    "binary": "log-odds",
    "multiclass": "logit minus the mean of the other classes",
    "ordinal": "log-odds of a higher class, divided by the temperature",
    "multilabel": "logit",
    "regression": "standard deviations of the training cases",
    "cox": "logarithm of the risk",
    "discrete": "logit",
}
# kinds with one score that grows with an amount, instead of a score for each class
AMOUNTS: tuple[Kind, ...] = ("ordinal", "regression", "cox", "discrete")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatmapConfig:
    """Settings of the pictures."""

    positive: str | None = option(
        None,
        "Class whose score is drawn. [default: of two classes the model's positive "
        "class; the predicted class if there are more]",
        daily=True,
    )
    top_tiles: int = option(
        8,
        "Number of tiles with the highest score that are shown for each class; 0 shows "
        "none.",
        daily=True,
    )
    grid: str | None = option(
        None,
        "Tile grid whose column is drawn, if the folder has several; with a model, use "
        "--features.",
        daily=True,
    )
    scale: Literal["slide", "cohort"] = option(
        "slide",
        "Scale of the colours. slide: each slide has its own. cohort: all slides of the "
        "folder share one, so that colours can be compared between slides.",
        daily=True,
    )
    clip: float = option(
        99.0, "Percentile of the values that gets the strongest colour."
    )
    geojson: bool = option(
        True, "Write the tiles with their scores as GeoJSON for QuPath."
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class HeatmapRunConfig(PredictRunConfig):
    """All settings of `thinsection heatmap`, by section."""

    heatmap: HeatmapConfig = section(HeatmapConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Data that the pictures of one folder share."""

    results: Results
    home: Path  # GRID/heatmap_NAME
    load: Callable[[str], TilesFile]  # returns the table of a slide id
    sheet_columns: tuple[str, ...]  # columns that get a row of top tiles
    target_kind: Kind | None  # kind of the model's target; None for a column
    model_name: str  # name in the caption; '' for a column
    model_sum: str  # SHA-256 of the model's file; '' for a column
    config: HeatmapConfig
    # called with a slide id and the reason why it has no heatmap
    leave_out: Callable[[str, str], None]


@listing_settings(HeatmapRunConfig)
def heatmap(
    source: str | Path,
    slides: Sequence[str | Path] | str | Path,
    *,
    out: str | Path | None = None,
    config: HeatmapRunConfig | None = None,
    on_event: OnEvent | None = None,
    on_message: Callable[[str], None] | None = None,
    on_left_out: Callable[[str], None] | None = None,
    **settings: Unpack[HeatmapSettings],
) -> list[Path]:
    """Draws a model's heatmaps or a stored per-tile column; returns the files that were written.

    `ts.write_heatmap` draws values that are in your program.

    Args:
        source: a model file, or a column of a per-tile table of a results folder: 'px_focus',
            'heatmap_grade:score_high', or one that `results.write_column` has stored.
        slides, out: as for `predict`; with a column, `slides` is a results folder. All files are
            written below `out`, or below the results folder if it is None.
        config: all settings; `settings` are single values that replace those in `config`.
        on_event, on_message: as for `predict`.
        on_left_out: called with a line for each slide without a heatmap; None uses `on_message`.

    Memory: as for `predict`; drawing takes 100 bytes per tile of one slide, 16 kB per slide for the
    scale, and the picture. The GeoJSON is written in pieces.

    Raises ThinsectionError: as for `predict`; no such column or class, a head without attention.
    """
    config = replace_flat(config or HeatmapRunConfig(), settings)
    config.check_packages()
    if not isinstance(source, str | Path):
        raise InvalidInputError(
            "source must be a model file or the name of a column, got "
            f"{type(source).__name__}; ts.write_heatmap draws values of your own"
        )
    report = on_left_out or on_message or ignore_message

    def leave_out(slide_id: str, reason: str) -> None:
        report(f"{slide_id}: left out: {reason}")

    if Path(source).suffix == SUFFIX or len(Path(source).parts) > 1:
        check_model_exists(Path(source))
    if not Path(source).is_file():
        folders = [slides] if isinstance(slides, str | Path) else list(slides)
        if len(folders) != 1:
            raise InvalidInputError(
                "slides must be one results folder when a column is drawn, got "
                f"{len(folders)}"
            )
        results = open_results(Path(folders[0]))
        root = results.folder if out is None else Path(out)
        return _draw_column(results, str(source), root, config.heatmap, leave_out)
    if config.heatmap.grid is not None:
        raise ConfigError(
            f"grid must go without a model, got {config.heatmap.grid!r}; pass features=GRID"
        )
    card = read_card(Path(source))
    _check_positive(config.heatmap.positive, card.target)
    predictions = predict(
        source,
        slides,
        out=out,
        config=config,
        heatmaps=True,
        on_event=on_event,
        on_message=on_message,
    )
    say = on_message or ignore_message
    for row in predictions.rows:
        if row.answers:
            say(f"{row.name}: {_answer_words(row.answers, card.target)}")
        for warning in row.warnings:
            say(f"{row.name}: {warning}")
    for row in predictions.rows:
        if not row.answers:
            leave_out(row.name, row.error)
    home = predictions.heatmaps
    if home is None:
        return []
    results = open_results(predictions.results)
    drawing = Drawing(
        results=results,
        home=home,
        load=lambda slide_id: read_tiles_file(home / f"{slide_id}.h5"),
        sheet_columns=tuple(score_column(name) for name in card.target.score_names),
        target_kind=card.target.kind,
        model_name=card.name,
        model_sum=file_sum(Path(source)),
        config=config.heatmap,
        leave_out=leave_out,
    )
    columns_by_slide = {
        row.name: (
            "attention",
            *_drawn_scores(row.answers, card.target, config.heatmap),
        )
        for row in predictions.rows
        if row.level == "slide" and row.answers
    }
    written = _draw_folder(drawing, columns_by_slide)
    refresh_heatmap_links(Path(source), home)
    refresh_index(home)
    return written


def _answer_words(answers: Sequence[float], target: Target) -> str:
    """The predicted class with its probability, for other targets the outputs."""
    if target.exclusive:
        best = int(np.argmax(answers))
        return f"{target.names[best]}, predicted probability {answers[best]:.3f}"
    if target.kind == "discrete":
        return f"risk {target.risk(np.array([answers]))[0]:.4g}"
    outputs = zip(target.names, answers, strict=True)
    words = ", ".join(f"{name} {value:.4g}" for name, value in outputs)
    if target.kind == "multilabel":
        return f"predicted probability of {words}"
    return words


def _draw_column(
    results: Results,
    column: str,
    root: Path,
    config: HeatmapConfig,
    leave_out: Callable[[str, str], None],
) -> list[Path]:
    """Draws a stored column for all slides that have it, below `root`."""
    grid = results.choose_grid(config.grid)
    all_columns: set[str] = set()
    slides_with_column = []
    for slide_id, ledger in results.ledgers.items():
        with slide_boundary(slide_id, leave_out):
            ledger.check()
            if f"{grid}/tiles" not in ledger.stages:
                continue
            columns = results.tiles(slide_id, grid).columns
            all_columns |= set(columns)
            if column in columns:
                slides_with_column.append(slide_id)
    if not slides_with_column:
        raise InvalidInputError(
            f"source must be a model file or one of {', '.join(sorted(all_columns))}, got "
            f"{column!r}{nearest(column, sorted(all_columns))}"
        )

    def load(slide_id: str) -> TilesFile:
        table = results.tiles(slide_id, grid)
        categories = {
            name: named for name, named in table.categories.items() if name == column
        }
        columns = {column: table.columns[column]}
        return replace(table, columns=columns, categories=categories)

    drawing = Drawing(
        results=results,
        home=heatmap_folder(root / grid, column),
        load=load,
        sheet_columns=(column,),
        target_kind=None,
        model_name="",
        model_sum="",
        config=config,
        leave_out=leave_out,
    )
    written = _draw_folder(drawing, dict.fromkeys(slides_with_column, (column,)))
    refresh_index(drawing.home)
    return written


def _check_positive(positive: str | None, target: Target) -> None:
    """Raises ConfigError: the model has no such class, or only one score for all classes."""
    if positive is not None and target.kind == "ordinal":
        raise ConfigError(
            f"positive must be left out for ordered classes, got {positive!r}; the one score is "
            f"that of a higher {target.columns[0]}"
        )
    if positive is not None and positive not in target.names:
        raise ConfigError(
            f"positive must be one of {', '.join(target.names)}, got {positive!r}"
            f"{nearest(positive, target.names)}"
        )


def _drawn_scores(
    answers: Sequence[float], target: Target, config: HeatmapConfig
) -> list[str]:
    """Score columns to draw for a slide with these predictions (K,)."""
    if config.positive is not None:
        return [score_column(config.positive)]
    if not target.exclusive or target.kind == "ordinal":
        return [score_column(name) for name in target.score_names[:MAX_SCORES]]
    if len(target.names) == 2:
        return [score_column(target.positive_name)]
    return [score_column(target.names[int(np.argmax(answers))])]


def _draw_folder(
    drawing: Drawing, columns_by_slide: Mapping[str, Sequence[str]]
) -> list[Path]:
    """Draws the slides, and other slides of the folder if their scale has changed.

    Returns the files of the requested slides. In the record, slides that could not be drawn are
    left out, and pictures that were not drawn again keep their scale.
    """
    record = _read_record(drawing.home)
    done: set[str] = set()
    recorded = {
        slide_id: columns
        for slide_id, columns in record.get("pictures", {}).items()
        if slide_id in drawing.results.ledgers
    }
    earlier = {
        slide_id: columns
        for slide_id, columns in recorded.items()
        if slide_id not in columns_by_slide
    }
    is_new_scale = record.get("scale") != drawing.config.scale
    # if slides have their own scales, earlier pictures stay as they are
    redrawn = earlier if is_new_scale or drawing.config.scale == "cohort" else {}
    drawn_columns = {**redrawn, **columns_by_slide}
    if drawing.config.scale == "slide":
        limits = {
            slide_id: _shared_limits(drawing, {slide_id: columns})
            for slide_id, columns in drawn_columns.items()
        }
    else:
        limits = dict.fromkeys(drawn_columns, _shared_limits(drawing, drawn_columns))
    earlier_limits = {} if is_new_scale else record["limits"]
    for slide_id, columns in redrawn.items():
        before = earlier_limits.get(slide_id, {})
        changed = [
            c for c in columns if [*limits[slide_id].get(c, ())] != before.get(c)
        ]
        with (
            slide_boundary(slide_id, drawing.leave_out),
            _own_pictures(drawing, slide_id),
        ):
            table = drawing.load(slide_id)
            _write_pictures(drawing, slide_id, table, changed, limits[slide_id])
            done.add(slide_id)
    written: list[Path] = []
    places: dict[str, dict[str, list[int]]] = dict(record.get("places", {}))
    for slide_id, columns in columns_by_slide.items():
        with slide_boundary(slide_id, drawing.leave_out):
            table = drawing.load(slide_id)
            if not len(table.coords_l0):
                done.add(slide_id)
                continue
            with _own_pictures(drawing, slide_id):
                of_slide = limits[slide_id]
                written += _write_pictures(drawing, slide_id, table, columns, of_slide)
                done.add(slide_id)
                places[slide_id] = _highest_tiles(table, columns)
                # the tables need the slide file, which may have moved since the earlier run
                written += _write_tables(drawing, slide_id, table)
    if written:
        drawn = recorded | {
            name: columns for name, columns in columns_by_slide.items() if name in done
        }
        record = {
            "scale": drawing.config.scale,
            "limits": {
                name: limits[name] if name in done else earlier_limits.get(name, {})
                for name in drawn
            },
            "pictures": drawn,
            "places": {name: places[name] for name in drawn if name in places},
            "model": drawing.model_sum,
        }
        write_json(drawing.home / SCALE_NAME, record)
    return written


def _highest_tiles(table: TilesFile, columns: Iterable[str]) -> dict[str, list[int]]:
    """Centre of the tile with the highest value of each column, in level-0 px."""
    places = {}
    for name in columns:
        values = table.columns.get(name)
        if name in table.categories:
            continue  # no category is higher than another
        if values is not None and np.isfinite(values).any():
            middle = (
                table.coords_l0[np.nanargmax(values)] + np.array(table.size_l0) // 2
            )
            places[name] = [int(value) for value in middle]
    return places


@contextmanager
def _own_pictures(drawing: Drawing, slide_id: str) -> Iterator[None]:
    """Locks the slide's pictures, and deletes pictures that a killed process left incomplete.

    The lock is stored beside the pictures, since the results may belong to someone else.
    """
    with hold(drawing.home / f"{LOCK_NAME}-{slide_id}"):
        unfinished = find_unfinished_files([drawing.home])
        for path in unfinished_files_of(slide_id, unfinished):
            path.unlink(missing_ok=True)
        yield


def _read_record(home: Path) -> Document:
    """Reads the last record of `_draw_folder`; {} if it is missing or damaged."""
    try:
        record = read_json(home / SCALE_NAME)
    except (OSError, ValueError, RecursionError):
        return {}
    is_record = isinstance(record, dict) and {"limits", "pictures"} <= record.keys()
    return record if is_record else {}


def _shared_limits(
    drawing: Drawing, columns_by_slide: Mapping[str, Sequence[str]]
) -> dict[str, Limits]:
    """Values of the first and last colour for each column, shared by several slides.

    Each slide has a weight equal to its number of tiles. For a model's scores, the last colour
    stands for at least 1 / tiles: if all tiles together change the prediction by less than 1, they
    remain pale. Memory: 16 QUANTILES bytes per slide and column.
    """
    samples: dict[str, list[Numbers]] = {}
    weights: dict[str, list[Numbers]] = {}
    lowest: dict[str, float] = {}
    most_tiles = 1
    for slide_id, columns in columns_by_slide.items():
        table = None
        # errors are ignored here and reported when the slide is drawn
        with slide_boundary(slide_id, lambda slide_id, reason: None):
            table = drawing.load(slide_id)
        if table is None:
            continue
        most_tiles = max(most_tiles, len(table.coords_l0))
        for name in (name for name in columns if name in table.columns):
            if name in table.categories:
                continue  # their colours are their own on each slide
            values = shown_values(name, table.columns[name])
            values = values[np.isfinite(values)]
            if not len(values):
                continue
            is_signed = value_kind(name) == "signed"
            sample = np.sort(np.abs(values) if is_signed else values)
            if len(sample) > QUANTILES:
                sample = np.quantile(sample, np.linspace(0, 1, QUANTILES))
            samples.setdefault(name, []).append(sample)
            shares = np.full(len(sample), len(values) / len(sample))
            weights.setdefault(name, []).append(shares)
            lowest[name] = min(lowest.get(name, np.inf), float(values.min()))
    limits: dict[str, Limits] = {}
    for name, of_slides in samples.items():
        values = np.concatenate(of_slides)
        share = np.concatenate(weights[name])
        highest = _weighted_quantile(values, share, drawing.config.clip / 100)
        if drawing.target_kind and is_score(name):
            highest = max(highest, 1 / most_tiles)
        limits[name] = limits_up_to(value_kind(name), highest, lowest[name])
    return limits


def _weighted_quantile(values: Numbers, weights: Numbers, level: float) -> float:
    """Smallest value such that the values up to it have at least `level` of the total weight."""
    order = np.argsort(values, kind="stable")
    share = np.cumsum(weights[order])
    place = int(np.searchsorted(share, level * share[-1] * (1 - 1e-12)))
    return float(values[order[min(place, len(values) - 1)]])


def _write_pictures(
    drawing: Drawing,
    slide_id: str,
    table: TilesFile,
    columns: Iterable[str],
    limits: Mapping[str, Limits],
) -> list[Path]:
    """Draws the slide with each column over it."""
    written = []
    for name in (name for name in columns if name in table.columns):
        path = drawing.home / f"{slide_id}.{slug(name)}.png"
        if name in table.categories:
            codes = table.columns[name]
            layers: list[Layer] = [
                Classes(table.coords_l0, table.size_l0, codes, table.categories[name])
            ]
            picture = open_picture(drawing.results.ledgers[slide_id])
            write_drawing(path, picture, layers, caption=f"{slide_id} | {name}")
            written.append(path)
            continue
        width, height = map(int, table.attributes["tile_size_l0"])
        values = shown_values(name, table.columns[name])
        label = value_words(name)
        if drawing.target_kind and is_score(name):
            label += f", {SCORE_UNITS[drawing.target_kind]}"
        layer = Values(
            table.coords_l0,
            (width, height),
            values,
            label,
            value_kind(name),
            limits.get(name),
        )
        picture = open_picture(drawing.results.ledgers[slide_id])
        caption = _caption(drawing, slide_id, name, layer)
        write_drawing(path, picture, [layer], caption=caption)
        written.append(path)
    return written


def _caption(drawing: Drawing, slide_id: str, column: str, layer: Values) -> str:
    """Slide, model, meaning of the colours, and the slides of the scale."""
    words = [slide_id]
    if drawing.model_name:
        words.append(f"model {drawing.model_name}")
    if layer.kind == "signed" and is_score(column):
        name = column.rpartition(":")[2].removeprefix("score_")
        if drawing.target_kind in AMOUNTS:
            words.append(f"red speaks for a higher {name}, blue for a lower one")
        else:
            words.append(f"red speaks for {name}, blue against it")
    if layer.kind == "signed":
        words.append("no colour at 0")
    whose = "this slide's own" if drawing.config.scale == "slide" else "the cohort's"
    words.append(f"scale: {whose}, up to percentile {drawing.config.clip:g}")
    return " | ".join(words)


def _write_tables(drawing: Drawing, slide_id: str, table: TilesFile) -> list[Path]:
    """Writes the GeoJSON of all columns, and the sheet of top tiles."""
    written = []
    if drawing.config.geojson:
        path = drawing.home / f"{slide_id}.geojson"
        write_tiles_geojson(path, table)
        written.append(path)
    columns = [name for name in drawing.sheet_columns if name in table.columns]
    # a model without tile scores has top tiles by attention
    columns = columns or [*table.columns]
    if drawing.config.top_tiles:
        path = drawing.home / f"{slide_id}.top.png"
        ledger = drawing.results.ledgers[slide_id]
        tiled = tiled_slide(drawing.results, ledger, drawing.home.parent.name)
        sheet = draw_top_tiles(tiled, table, columns, drawing.config.top_tiles)
        with atomic_path(path) as tmp:
            sheet.save(tmp, format="PNG")
        written.append(path)
    return written


def draw_top_tiles(
    tiled: TiledSlide,
    table: TilesFile,
    columns: Sequence[str],
    num_tiles: int,
) -> Image.Image:
    """Tiles with the highest values, best first, a row for each column, read from the slide.

    In a row for a class score, only tiles that speak for the class are shown; if there are none,
    the row says so. Categories have a row each, with tiles spread evenly over those of the slide.
    Memory: the tiles of one row, and the sheet.
    """
    count = min(num_tiles, len(table.coords_l0))
    rows = list(_sheet_rows(table, columns, count, tiled.entry.slide_id))
    row_px = TILE_PX + 2 * TEXT_PX + 3 * GAP_PX
    sheet_size = (count * (TILE_PX + GAP_PX) + GAP_PX, row_px * len(rows))
    sheet = Image.new("RGB", sheet_size, "white")
    pen = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(TEXT_PX)
    with tiled.open() as slide:
        plan = tiled.table(slide).plan
        tiles = np.empty((count, plan.tile_px, plan.tile_px, 3), np.uint8)
        for number, row in enumerate(rows):
            top = number * row_px
            shown = row.tiles
            if len(shown):
                read_tiles(slide, plan, table.coords_l0[shown], tiles[: len(shown)])
            pen.text((GAP_PX, top + GAP_PX), row.title, "black", font)
            for i, text in enumerate(row.texts):
                left = GAP_PX + i * (TILE_PX + GAP_PX)
                tile_top = top + TEXT_PX + 2 * GAP_PX
                tile = Image.fromarray(tiles[i]).resize((TILE_PX, TILE_PX))
                sheet.paste(tile, (left, tile_top))
                pen.text((left, tile_top + TILE_PX), text, "black", font)
    return sheet


@dataclass(frozen=True, kw_only=True)
class _SheetRow:
    """Row of tiles on a sheet."""

    title: str
    tiles: npt.NDArray[np.integer]  # rows in the tile table
    texts: list[str]  # a text below each tile


def _sheet_rows(
    table: TilesFile, columns: Sequence[str], count: int, slide_id: str
) -> Iterator[_SheetRow]:
    """Rows of a sheet with at most `count` tiles each."""
    for name in columns:
        values = table.columns[name]
        if name in table.categories:
            yield from _category_rows(table, name, count, slide_id)
            continue
        best = np.argsort(-values.astype(np.float64), kind="stable")[:count]
        title = f"{name}: {slide_id}"
        if is_score(name):
            best = best[values[best] > 0]
        if not len(best):
            title += f": no tile speaks for {name.removeprefix('score_')}"
        texts = [
            short_number(value) for value in values[best].astype(np.float64).tolist()
        ]
        yield _SheetRow(title=title, tiles=best, texts=texts)


def _category_rows(
    table: TilesFile, name: str, count: int, slide_id: str
) -> Iterator[_SheetRow]:
    """A row for each category that the slide has, for the `MAX_CATEGORIES` largest."""
    codes = table.columns[name]
    names = table.categories[name].names
    present = [code for code in range(len(names)) if (codes == code).any()]
    present.sort(key=lambda code: -int((codes == code).sum()))
    for code in present[:MAX_CATEGORIES]:
        tiles = np.flatnonzero(codes == code)
        title = f"{name} {names[code]}: {counted(len(tiles), 'tile')} of {slide_id}"
        if len(tiles) > count:
            tiles = tiles[np.linspace(0, len(tiles) - 1, count).round().astype(int)]
        yield _SheetRow(title=title, tiles=tiles, texts=[""] * len(tiles))
