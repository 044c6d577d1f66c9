"""HistoQC's own layout of files, so that its UI and CohortFinder open our results."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from thinsection.qc.view import Score
from thinsection.report.qc_files import write_png
from thinsection.report.qc_table import write_histoqc_tsv

# our picture -> the end of HistoQC's file name
_SUFFIXES = {
    "thumbnail": "_thumb.png",
    "overlay": "_fuse.png",
    "mask_use": "_mask_use.png",
    "flat_areas": "_flat.png",
    "small_filled": "_small_fill.png",
    "small_removed": "_small_remove.png",
    "equalised": "_equalized_thumb.png",
    "histogram": "_hist.png",
}
_SMALL_EDGE_PX = 500


def write_histoqc(
    out: Path, rows: Sequence[Mapping[str, Score]], headers: Mapping[str, str]
) -> None:
    """Writes `results.tsv`, and per slide a folder named like its file with HistoQC's pictures.

    A slide is named `<slide_id><suffix of its file>`: the file's own name, but for equal names
    from different folders. Failed slides have no line, as in HistoQC.

    Args:
        out: folder of the run; our results lie in `out/<slide_id>/`.
        rows: of the run.
        headers: of `write_histoqc_tsv`.
    """
    named = []
    for row in rows:
        if row["status"] == "failed":
            continue
        name = f"{row['slide_id']}{Path(str(row['slide_path'])).suffix or '.slide'}"
        named.append({**row, "filename": name})
        _copy_pictures(out / str(row["slide_id"]), out / name, name)
    write_histoqc_tsv(out / "results.tsv", named, headers)


def _copy_pictures(source: Path, target: Path, name: str) -> None:
    for path in sorted(source.glob("*.png")):
        ending = _SUFFIXES.get(path.stem, f"_{path.stem}.png")
        with Image.open(path) as picture:
            write_png(target / f"{name}{ending}", np.asarray(picture))
            if path.stem == "thumbnail":
                picture.thumbnail((_SMALL_EDGE_PX, _SMALL_EDGE_PX))
                write_png(target / f"{name}_thumb_small.png", np.asarray(picture))
