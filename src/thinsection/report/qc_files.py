"""The files that quality control leaves: of a slide (and read back), of a run, and HistoQC's."""

import math
import re
import shutil
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from thinsection.errors import StoreError, importing, require, rewording
from thinsection.files.atomic import (
    atomic_path,
    safe_cell,
    write_json,
    write_table,
    write_text,
)
from thinsection.files.json_text import read_json
from thinsection.files.pages import render_page
from thinsection.qc.checks.check import EMPTY_SCORE, Score
from thinsection.qc.checks.measures import SavedMask
from thinsection.qc.engine import QcResult
from thinsection.qc.pipeline import pipeline_from_mapping
from thinsection.qc.tissue import TISSUE_COLOR
from thinsection.report import verdict as verdicts
from thinsection.report.draw import (
    Layer,
    Outline,
    Picture,
    Tint,
    save_picture,
    write_drawing,
)
from thinsection.report.index import THUMBNAILS, drop_sheets, write_sheets
from thinsection.report.verdict import VerdictRule, load_rules
from thinsection.store.geojson import write_masks_geojson
from thinsection.types import MaskFrame, RgbArray

Row = Mapping[str, Score]  # of one slide, by column name
QC_FORMAT = "thinsection-qc/2"
QC_JSON = "qc.json"  # written last: where it is, everything is
_PLAIN = (
    "facts",
    "scores",
    "mpp_th",
    "seconds",
    "crossings",
)  # fields that are JSON as they are
_HISTOGRAM_PX = (420, 200)  # width, height
_REMEDY = "run quality control again"
_rewording = partial(rewording, error=StoreError, more=f"; {_REMEDY}")
_SMALL_EDGE_PX = 500  # in HistoQC's folders
_OUTLIER_DEVIATIONS = (
    3.5  # of the median absolute deviation, scaled to a normal's sigma
)
_MIN_SLIDES = 5  # fewer say nothing about what is usual
Usual = (
    tuple[float, float] | None
)  # a column's median and scaled median absolute deviation
_PLOTTED = "grayscale_brightness chan1_brightness chan3_brightness deconv_c0_mean deconv_c1_mean"
# HistoQC's first columns, of the file itself; those of the checks follow
_HISTOQC_FIRST = (
    *(
        "filename",
        "comments",
        "image_bounding_box",
        "base_mag",
        "type",
        "levels",
        "height",
    ),
    *("width", "mpp_x", "mpp_y", "comment"),
)
_HISTOQC_LAST = ("pixels_to_use", "warnings")
_HISTOQC_NAMES = {"tissue_pieces_num_regions": "#pieces_of_tissue"}
_NO_CHECKS = {
    "slide_id",
    "slide_path",
    "folder",
    "status",
    "fails",
}  # our own columns of a row
_BREAKS = re.compile(r"[\t\n\r]")  # in no cell of HistoQC's table
_HEADERS = ("start_time", "pipeline", "outdir", "config_file", "command_line_args")
_SUFFIXES = {  # our picture -> the end of HistoQC's file name
    **{"thumbnail": "thumb", "flat_areas": "flat", "histogram": "hist"},
    **{"small_filled": "small_fill", "small_removed": "small_remove"},
    "equalised": "equalized_thumb",
}


def write_qc(
    result: QcResult, folder: Path, *, key: str = "", picture: RgbArray | None = None
) -> None:
    """Writes pictures, masks, GeoJSON and, last, `qc.json`; each file atomically.

    `<check>.png` is what a check touched, `mask_use.png` what is left (both white = True),
    `mask_kept.png` what the guard keeps if that is more, `thumbnail.png` the work image,
    `overlay.png` both together with a legend, drawn on the slide's picture (H, W, 3) where one is
    given, which `picture.jpg` then is; `histogram.png` the colours in the mask, `qc.geojson` all
    masks in level-0 px. By its key a later run knows the result again.
    """
    densities = {name: t for name, t in result.tables.items() if t.dtype != np.uint8}
    drawn = {**result.tables, **{name: _histogram(t) for name, t in densities.items()}}
    pictures = {**result.masks, "mask_use": result.mask_use, "thumbnail": result.rgb}
    if result.kept is not None:
        pictures["mask_kept"] = result.kept
    for name, pixels in {**pictures, **drawn}.items():
        _write_png(folder / f"{name}.png", pixels)
    if picture is not None:
        save_picture(folder / "picture.jpg", picture)
    frame, rgb = result.frame, result.rgb if picture is None else picture
    x, y = (result.mpp_th / downsample for downsample in frame.downsample_xy)
    base = Picture(rgb=rgb, size_l0=frame.size_l0, slide_mpp=(x, y))
    write_drawing(folder / "overlay.png", base, _overlay_layers(result))
    for check in result.pipeline.checks:
        if (
            isinstance(check, SavedMask)
            and check.geojson
            and check.name in result.tables
        ):
            saved = [(check.name, result.tables[check.name] > 0, TISSUE_COLOR)]
            write_masks_geojson(folder / f"{check.name}.geojson", saved, frame)
    masks = [("Usable tissue", result.mask_use, TISSUE_COLOR)]
    masks += [
        (name, result.masks[name], color) for name, color in result.colors.items()
    ]
    write_masks_geojson(folder / "qc.geojson", masks, frame)
    document = {
        **{"format": QC_FORMAT, "key": key, "warnings": result.warnings},
        **{name: getattr(result, name) for name in _PLAIN},
        **{"size_l0": frame.size_l0, "size_th": frame.size_th},
        "masks": [name for name in pictures if name != "thumbnail"],
        "pipeline": result.pipeline.as_mapping(),
        "tables": dict.fromkeys(result.tables)
        | {n: t.tolist() for n, t in densities.items()},
    }
    write_json(folder / QC_JSON, document)


def _overlay_layers(result: QcResult) -> list[Layer]:
    """What no check took as it is, the rest lighter and tinted by what took it, most first."""
    use, px = result.mask_use, max(1, result.mask_use.size)
    glass = {
        check.name
        for check in result.pipeline.checks
        if check.removes_glass or check.fills
    }
    layers: list[Layer] = [Tint(~use, color=(255, 255, 255), opacity=0.5)]
    took = {
        name: mask & ~use for name, mask in result.masks.items() if name not in glass
    }
    for name in sorted(
        (n for n in took if took[n].any()), key=lambda n: -int(took[n].sum())
    ):
        share = f"{took[name].sum() / px:.2%} of the slide"
        layers.append(
            Tint(took[name], f"{name.replace('_', ' ')}, {share}", result.colors[name])
        )
    outline = "tissue without artefacts" if took else "tissue"
    return [*layers, Outline(use, f"{outline}, {use.mean():.1%} of the slide")]


def load_qc(folder: Path) -> QcResult:
    """The result that `write_qc` left in a folder, equal to the fresh one; no slide is opened.

    Memory: O(H * W) for each mask, and the work image.

    Raises StoreError, ConfigError: files are missing, damaged, of another format or check.
    """
    path = folder / QC_JSON
    tampered = (
        OSError,
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
    )  # a list for a table
    with _rewording("qc result must be whole", path, *tampered):
        document: dict[str, Any] = read_json(path)
        got = f"{document.get('format')!r} in {str(path)!r}; {_REMEDY}"
        written = document.get("format") == QC_FORMAT
        require(written, f"qc result must be {QC_FORMAT!r}", got, error=StoreError)
        masks = {name: _read_png(folder / f"{name}.png") for name in document["masks"]}
        tables = {
            name: _read_png(folder / f"{name}.png") if rows is None else np.array(rows)
            for name, rows in document["tables"].items()
        }
        told: dict[str, Any] = {name: document[name] for name in _PLAIN}
        told |= {
            "mask_use": masks.pop("mask_use"),
            "kept": masks.pop("mask_kept", None),
        }
        told |= {
            "masks": masks,
            "tables": tables,
            "warnings": tuple(document["warnings"]),
        }
        sizes = {name: tuple(document[name]) for name in ("size_th", "size_l0")}
        told |= {
            "frame": MaskFrame(**sizes),
            "rgb": _read_png(folder / "thumbnail.png"),
        }
        return QcResult(**told, pipeline=pipeline_from_mapping(document["pipeline"]))


def _read_png(path: Path) -> npt.NDArray[Any]:
    damaged = (OSError, SyntaxError)  # a damaged PNG is a SyntaxError to Pillow
    with (
        _rewording("qc picture must be readable", path, *damaged),
        Image.open(path) as picture,
    ):
        return np.array(picture)


def _histogram(density: npt.NDArray[Any]) -> RgbArray:
    """Steps of the density of R, G and B, (bins, 3), over 0 to 255."""
    width, height = _HISTOGRAM_PX
    image = Image.new("RGB", _HISTOGRAM_PX, "white")
    draw = ImageDraw.Draw(image)
    y = height - 12 - (height - 24) * density / max(float(density.max()), 1e-12)
    x = np.arange(len(density) + 1) * width / len(density)
    for channel, color in enumerate(("#c0392b", "#27ae60", "#2e5fc0")):
        steps = zip(
            np.repeat(x, 2)[1:-1].tolist(), np.repeat(y[:, channel], 2).tolist()
        )
        draw.line(list(steps), fill=color, width=2)
    draw.line([(0, height - 12), (width, height - 12)], fill="#888888")
    return np.asarray(image)


def _write_png(path: Path, picture: npt.NDArray[Any]) -> None:
    with atomic_path(path) as tmp:
        Image.fromarray(picture).save(tmp, format="PNG")


def write_qc_csv(path: Path, rows: Sequence[Row]) -> None:
    """Writes one line per slide; columns are those of all rows, what a row lacks is empty."""
    write_table(
        path, [{name: _plain_number(v) for name, v in row.items()} for row in rows]
    )


def _plain_number(value: Score) -> Score | int:
    """Whole numbers without a decimal point."""
    whole = isinstance(value, float) and math.isfinite(value) and value == int(value)
    return int(value) if whole else value


def write_qc_parquet(path: Path, rows: Sequence[Row]) -> None:
    """The same table as Parquet; a column of words is text, what a row lacks is null."""
    with importing("--write parquet must have pyarrow", "export"):
        import pyarrow as pa
        import pyarrow.parquet as pq

    arrays = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        column = [row.get(name) for row in rows]
        words = any(isinstance(value, str) for value in column)
        arrays[name] = [str(v) if words and v is not None else v for v in column]
    with atomic_path(path) as tmp:
        pq.write_table(
            pa.table({name: pa.array(column) for name, column in arrays.items()}), tmp
        )


def judged(rows: Sequence[Row], rules: Sequence[VerdictRule]) -> list[dict[str, Score]]:
    """The rows with columns `verdict` and `why`; what is unusual is so among these rows."""
    usual, found = _usual(rows), list[dict[str, Score]]()
    for row in rows:
        measured = [name for name in usual if row.get(name) != EMPTY_SCORE]
        outliers = [n for n in measured if is_outlier(row.get(n), usual[n])]
        said, why = verdicts.verdict(row, rules, outliers)
        first = {
            n: row[n]
            for n in ("slide_id", "slide_path", "folder", "status")
            if n in row
        }
        found.append({**first, "verdict": said, "why": why, **row})
    return found


def _usual(rows: Sequence[Row]) -> dict[str, Usual]:
    names = dict.fromkeys(
        n for row in rows for n, v in row.items() if not isinstance(v, str)
    )
    ordered = verdicts.column_order(list(names))
    return {n: usual_of([row.get(n) for row in rows]) for n in ordered}


def write_qc_sheet(
    path: Path,
    rows: Sequence[Row],
    *,
    title: str,
    rules: Sequence[VerdictRule] | None = None,
) -> None:
    """Writes the page: verdicts, thumbnails with overlays, sortable columns, outliers marked.

    Rows are those of qc.csv; `folder` (else `slide_id`) is where a slide's pictures lie, relative
    to the page's folder. Thumbnails lie in sheets in the folder `index` beside it, and the larger
    pictures are links. No server, no address outside.
    """
    rules, home = rules or load_rules(None), path.parent
    in_order = sorted(rows, key=lambda row: verdicts.natural_key(str(row["slide_id"])))
    lines, usual = judged(in_order, rules), _usual(in_order)
    overlays = {str(r["slide_id"]): (home / _home(r) / "overlay.png",) for r in lines}
    there = {key: files for key, files in overlays.items() if files[0].is_file()}
    thumbs = write_sheets(home / THUMBNAILS, path.stem, there, Image.open)
    shown = [_line(row, usual, home, thumbs.get(str(row["slide_id"]))) for row in lines]
    told: dict[str, Any] = {"title": title, "columns": list(usual), "lines": shown}
    groups = groupby(usual, key=verdicts.group_of)
    told["groups"] = [(name, len(list(of))) for name, of in groups]
    told["rules"] = [f"{rule.verdict}: {rule.words} ({rule.rule})" for rule in rules]
    told["counts"] = Counter(line["verdict"] for line in shown)
    told["points"] = [_point(row) for row in lines if row["status"] != "failed"]
    told["num_outliers"] = sum(line["num_outliers"] > 0 for line in shown)
    page = render_page("thinsection.report", "qc_sheet.html", **told)
    write_text(path, page)
    drop_sheets(home / THUMBNAILS, path.stem, page)


def usual_of(column: Sequence[Score | None]) -> Usual:
    """Median and scaled median absolute deviation of a column; None where slides are too few."""
    values = [
        v
        for v in column
        if isinstance(v, float) and math.isfinite(v) and v != EMPTY_SCORE
    ]
    if len(values) < _MIN_SLIDES:
        return None
    median = statistics.median(values)
    return median, 1.4826 * statistics.median(abs(v - median) for v in values)


def is_outlier(value: Score | None, usual: Usual) -> bool:
    """Whether a value lies far from the run's usual; -100 (nothing to measure) always does."""
    if not isinstance(value, float) or usual is None or value == EMPTY_SCORE:
        return value == EMPTY_SCORE
    return abs(deviations(value, usual)) > _OUTLIER_DEVIATIONS


def deviations(value: float, usual: tuple[float, float]) -> float:
    """How many scaled median absolute deviations a value lies above the usual: a robust z."""
    median, deviation = usual
    least = 1e-3 * max(1.0, abs(median))  # equal slides make a deviation of 0
    return (value - median) / max(deviation, least)


def _point(row: Row) -> dict[str, Any]:
    """What the page's plots of batches show of a slide."""
    found = {name: row.get(name) for name in _PLOTTED.split()}
    known = {
        n: v if isinstance(v, float) and v != EMPTY_SCORE else None
        for n, v in found.items()
    }
    told = {"slide": str(row["slide_id"]), "scanner": str(row.get("type", ""))}
    return {**told, "folder": Path(str(row["slide_path"])).parent.name, **known}


def _line(
    row: Row,
    usual: Mapping[str, Usual],
    folder: Path,
    thumb: tuple[str, int, int] | None,
) -> dict[str, Any]:
    """What the page's template shows of a slide."""
    cells, where = [_cell(row.get(name), usual[name]) for name in usual], _home(row)
    names = {path.stem for path in (folder / where).glob("*.png")}
    telling = [name for name in ("overlay", "thumbnail", "mask_use") if name in names]
    names_in_order = [*telling, *sorted(names.difference(telling))]
    return {
        **{
            "verdict": row["verdict"],
            "why": row["why"],
            "slide_id": str(row["slide_id"]),
        },
        "failed": row["status"] == "failed",
        "warnings": [w for w in str(row.get("warnings", "")).split("|") if w],
        "thumb": thumb and (quote(thumb[0]), thumb[1] // 2, thumb[2] // 2),
        "pictures": [(name, quote(f"{where}/{name}.png")) for name in names_in_order],
        **{"cells": cells, "num_outliers": sum(cell["outlier"] for cell in cells)},
    }


def _home(row: Row) -> str:
    return str(row.get("folder", row["slide_id"]))


def _cell(value: Score | None, usual: Usual) -> dict[str, Any]:
    if value is None or isinstance(value, str):
        return {"text": value or "", "sort": "", "outlier": False}
    text = f"{value:,.0f}" if value == int(value) else f"{value:.4g}"
    return {"text": text, "sort": repr(value), "outlier": is_outlier(value, usual)}


def write_histoqc(out: Path, rows: Sequence[Row], headers: Mapping[str, str]) -> None:
    """Writes `results.tsv`, and per slide a folder named like its file with HistoQC's pictures.

    A slide is named `<slide_id><suffix of its file>`: the file's own name, but for equal names
    from different folders. Failed slides have no line, as in HistoQC. Columns are those of the
    pipeline's checks in its order, by HistoQC's names, ours among them; what a row lacks is NA, no
    number to pandas and HistoQC's UI.

    Args:
        out: folder of HistoQC's files.
        rows: of the run; `folder` (else `slide_id`) is where pictures lie, relative to `out`.
        headers: 'start_time', 'pipeline', 'outdir', 'config_file' and 'command_line_args'.
    """
    lines = [f"#{key}:\t{_BREAKS.sub(' ', headers[key])}" for key in _HEADERS]
    done = [row for row in rows if row["status"] != "failed"]
    apart = {*_HISTOQC_FIRST, *_HISTOQC_LAST, *_NO_CHECKS}
    found = dict.fromkeys(n for row in sorted(done, key=len, reverse=True) for n in row)
    columns = (
        *_HISTOQC_FIRST,
        *(name for name in found if name not in apart),
        *_HISTOQC_LAST,
    )
    names = (_HISTOQC_NAMES.get(name, name) for name in columns)
    lines.append("#dataset:" + "\t".join(names))
    for row in done:
        name = f"{row['slide_id']}{Path(str(row['slide_path'])).suffix or '.slide'}"
        _copy_pictures(out / _home(row), out / name)
        known = {"warnings": "", **row, "filename": name, "comments": " "}
        if "width" in row:
            width, height = _plain_number(row["width"]), _plain_number(row["height"])
            known["image_bounding_box"] = f"(0, 0, {width}, {height})"
        values = (_plain_number(known.get(column, "NA")) for column in columns)
        lines.append(
            "\t".join(_BREAKS.sub(" ", str(safe_cell(value))) for value in values)
        )
    write_text(out / "results.tsv", "\n".join(lines) + "\n")


def _copy_pictures(source: Path, target: Path) -> None:
    for path in sorted(source.glob("*.geojson")):
        if path.stem != "qc":
            with atomic_path(target / f"{target.name}_{path.name}") as tmp:
                shutil.copyfile(path, tmp)
    work = source / "thumbnail.png"
    if work.is_file():
        gray = np.rint(_read_png(work) @ (0.2125, 0.7154, 0.0721)).astype(np.uint8)
        mask = _read_png(source / "mask_use.png").astype(np.uint8) * 255
        _write_png(
            target / f"{target.name}_fuse.png", np.stack([mask, gray, mask], axis=2)
        )
    for path in sorted(source.glob("*.png")):
        ending = _SUFFIXES.get(path.stem, path.stem)
        with Image.open(path) as picture:
            plain = (
                picture.convert("L") if picture.mode == "1" else picture
            )  # 0 and 255
            _write_png(target / f"{target.name}_{ending}.png", np.asarray(plain))
            if path.stem == "thumbnail":
                picture.thumbnail((_SMALL_EDGE_PX, _SMALL_EDGE_PX))
                _write_png(
                    target / f"{target.name}_thumb_small.png", np.asarray(picture)
                )
