"""What a model saw where: per tile as a picture, as GeoJSON for QuPath, as a sheet of top tiles.

GRID/heatmap_MODEL/ID.h5           `tiles/attention`, `tiles/score_NAME`, see `predicting`
                   ID.COLUMN.png   the slide with a column over it
                   ID.geojson      tiles with all columns as measurements
                   ID.top.png      the tiles of highest score, a row for each column
Of a column of any other per-tile table the same lies in GRID/heatmap_COLUMN.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from thinsection.config import from_mapping, option, replace_flat, section
from thinsection.errors import require
from thinsection.files.atomic import atomic_path
from thinsection.pipeline.folder import Results, one_address, open_results
from thinsection.predict.model_file import read_card
from thinsection.predict.predicting import PredictRunConfig, predict
from thinsection.report.draw import Values, open_picture, write_drawing
from thinsection.slide import open_slide
from thinsection.slide.geometry import ReadPlan
from thinsection.slide.resize import read_tiles
from thinsection.store.geojson import write_tiles_geojson
from thinsection.store.ledger import SlideLedger
from thinsection.store.tiles_h5 import TilesFile
from thinsection.store.tiles_h5 import read_tiles as read_tiles_file
from thinsection.weights.origin import slug

_SHOWN_PX, _GAP, _TEXT = 192, 6, 18  # of a tile on the sheet, between tiles, of the text
Names = tuple[Sequence[str], Sequence[str]]  # of columns: those that are shown, and scores
_MOST = 4  # pictures of scores where classes do not exclude each other


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatmapConfig:
    """What is drawn."""

    top_tiles: int = option(8, "tiles of highest score on the sheet, of each class; 0: no sheet")
    clip: float = option(99.0, "percentile of values that gets the last colour")
    geojson: bool = option(True, "write tiles and values for QuPath")


@dataclass(frozen=True, kw_only=True)
class HeatmapRunConfig(PredictRunConfig):
    """All settings of `thinsection heatmap`, by section."""

    heatmap: HeatmapConfig = section(HeatmapConfig)


def heatmap(
    source: str | Path,
    slides: Sequence[str | Path] | str | Path,
    *,
    out: str | Path | None = None,
    config: HeatmapRunConfig | None = None,
    **settings: Any,
) -> list[Path]:
    """The pictures of where a model's answer comes from, or of a per-tile column; what was written.

    Args:
        source: a model file; or a column of a per-tile table of a results folder: 'px_focus',
            'heatmap_grade:score_high'.
        slides, out: as of `predict`; with a column `slides` is a results folder.
        config: all settings; other keywords are those of `predict`, and single settings.

    Memory: that of `predict`; to draw, 100 bytes a tile and the picture, the GeoJSON in pieces.

    Raises ThinsectionError: as of `predict`; no such column, a head without evidence.
    """
    told = {name: settings.pop(name) for name in ("on_event", "on_message") if name in settings}
    config = replace_flat(config or HeatmapRunConfig(), settings)
    if not Path(source).is_file():
        return _of_column(open_results(Path(str(slides))), str(source), config.heatmap)
    found = predict(source, slides, out=out, config=config, heatmaps=True, **told)
    results, name = open_results(found.results), found.table.stem.replace("predictions", "heatmap")
    home, drawn = results.folder / found.address.split("/")[0] / name, list[Path]()
    target = read_card(Path(source)).target
    scores = [f"score_{slug(label)}" for label in target.names]
    for row in found.rows:
        if row.level == "slide" and row.answers:
            table = read_tiles_file(home / f"{row.name}.h5")
            best = [scores[int(np.argmax(row.answers))]] if target.exclusive else scores[:_MOST]
            ledger, shown = results.ledgers[row.name], ["attention", *best]
            drawn += _write(home, table, (shown, scores), ledger=ledger, config=config.heatmap)
    return drawn


def _of_column(results: Results, column: str, config: HeatmapConfig) -> list[Path]:
    """The same of a stored column, of all slides that have it."""
    grid = one_address(results.grids, None, "grid")
    drawn, known, home = list[Path](), set[str](), results.folder / grid / f"heatmap_{slug(column)}"
    for slide_id, ledger in results.ledgers.items():
        table = results.tiles(slide_id, grid) if f"{grid}/tiles" in ledger.stages else None
        known |= set(table.columns if table else ())
        if table is not None and column in table.columns:
            table = replace(table, columns={column: table.columns[column]})
            drawn += _write(home, table, ([column], [column]), ledger=ledger, config=config)
    require(drawn, f"source must be a model file or one of {sorted(known)}", repr(column))
    return drawn


def _write(
    home: Path, table: TilesFile, names: Names, *, ledger: SlideLedger, config: HeatmapConfig
) -> list[Path]:
    """Pictures of the shown columns, GeoJSON of all, and the sheet of top tiles of scores."""
    shown, scores = names
    if not len(table.coords_l0):
        return []
    width, height = map(int, table.attributes["tile_size_l0"])
    picture, slide_id = open_picture(ledger), ledger.slide_id
    drawn = [home / f"{slide_id}.{slug(name)}.png" for name in shown]
    for path, name in zip(drawn, shown, strict=True):
        values, colors = table.columns[name], "turbo"
        most = float(np.nanpercentile(np.abs(values), config.clip))
        limits = (float(np.nanmin(values)), most)
        if name.startswith("score_"):
            colors, limits = "coolwarm", (-most, most)
        layer = Values(table.coords_l0, (width, height), values, name, colors, limits)
        write_drawing(path, picture, [layer])
    if config.geojson:
        drawn.append(home / f"{slide_id}.geojson")
        write_tiles_geojson(drawn[-1], table)
    if config.top_tiles:
        drawn.append(home / f"{slide_id}.top.png")
        facts = ledger.stages[f"{home.parent.name}/tiles"].facts["plan"]
        sheet = _sheet(ledger, from_mapping(ReadPlan, facts), table, scores, config.top_tiles)
        with atomic_path(drawn[-1]) as tmp:
            sheet.save(tmp, format="PNG")
    return drawn


def _sheet(
    ledger: SlideLedger, plan: ReadPlan, table: TilesFile, scores: Sequence[str], most: int
) -> Image.Image:
    """The tiles of highest score, best first, a row for each column, read from the slide."""
    said, coords = ledger.slide, table.coords_l0
    mpp = (said["mpp_x"], said["mpp_y"]) if said.get("mpp_x") else None
    count, row_px = min(most, len(coords)), _SHOWN_PX + 2 * _TEXT + 3 * _GAP
    sheet = Image.new("RGB", (count * (_SHOWN_PX + _GAP) + _GAP, row_px * len(scores)), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(_TEXT)
    px = np.empty((count, plan.tile_px, plan.tile_px, 3), np.uint8)
    with open_slide(said["slide_path"], slide_mpp=mpp) as slide:
        for top, name in zip(range(0, sheet.height, row_px), scores, strict=True):
            values = table.columns[name]
            best = np.argsort(-values, kind="stable")[:count]
            best = best[(values[best] > 0) | (values.max() <= 0)]  # what speaks against is none
            read_tiles(slide, plan, coords[best], px[: len(best)])
            pen.text((_GAP, top + _GAP), f"{name}: {ledger.slide_id}", "black", font)
            for i, value in enumerate(values[best].tolist()):
                x, y = _GAP + i * (_SHOWN_PX + _GAP), top + _TEXT + 2 * _GAP
                sheet.paste(Image.fromarray(px[i]).resize((_SHOWN_PX, _SHOWN_PX)), (x, y))
                pen.text((x, y + _SHOWN_PX), f"{value:.3g}", "black", font)
    return sheet
