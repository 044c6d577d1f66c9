"""The tutorial's way against ours: same tiles, same embeddings, how much time and memory?

The tutorial's way, written from its description: the whole level 0 as one array, tiles of it one
at a time through the contrast rule and, one at a time, through the encoder, and a TSV written row
by row. Ours: `thinsection run --tile-mpp native --tile-filter contrast --write tsv`.
"""

import csv
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import arguments, finish
from thinsection.testing import run_and_measure
from thinsection.testing.synthetic import write_he_slide

MODULE = "benchmarks.bench_tutorial"
PX = 256


def tutorial(path: str, out: str) -> int:
    """Whole image in memory, one tile at a time, row by row; returns the number of rows."""
    import openslide

    from thinsection.encode import load_encoder

    encoder = load_encoder("efficientnet_lite0", device="cpu")
    slide = openslide.OpenSlide(path)
    image = np.array(slide.read_region((0, 0), 0, slide.dimensions).convert("RGB"))
    rows = 0
    with Path(out).open("w") as file:
        for y in range(0, image.shape[0] - PX + 1, PX):
            for x in range(0, image.shape[1] - PX + 1, PX):
                tile = image[y : y + PX, x : x + PX]
                if not (tile.min() < 135 and tile.max() >= 255):
                    continue
                if not (np.percentile(tile, 5) < 162 and np.median(tile) < 225):
                    continue
                values = encoder.encode(tile[None].copy())[0].numpy()
                file.write(
                    "\t".join([*map(str, values), "slide", "", f"{x}x_{y}y"]) + "\n"
                )
                rows += 1
    return rows


def ours(path: str, out: str) -> int:
    """The main job with the tutorial's settings; returns the number of tiles."""
    from thinsection.config import replace_flat
    from thinsection.run.run import run
    from thinsection.stages.config import RunConfig

    settings = {"tile_mpp": "native", "tile_filter": ["contrast"], "write": ["tsv"]}
    config = replace_flat(RunConfig(), {**settings, "device": "cpu"})
    result = run([path], out=out, config=config).results[0]
    assert result.status == "done", result.error
    return int(result.facts["num_tiles"])


def read_tsv(path: Path, *, header: bool) -> dict[str, np.ndarray]:
    """Tile name -> embedding."""
    with path.open() as file:
        rows = list(csv.reader(file, delimiter="\t"))[1 if header else 0 :]
    return {row[-1]: np.array(row[:-3], dtype=np.float32) for row in rows}


def only(folder: Path, pattern: str) -> Path:
    """The one file of that pattern."""
    (path,) = folder.glob(pattern)
    return path


def main() -> None:
    """Runs both in processes of their own, compares their tables, writes."""
    args = arguments(__doc__ or "")
    size = (1800, 1500) if args.smoke else (12_000, 10_000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        slide = folder / "slide.svs"
        write_he_slide(slide, size, seed=4, white=255)
        plain = run_and_measure(
            MODULE, "tutorial", path=str(slide), out=str(folder / "plain.tsv")
        )
        mine = run_and_measure(
            MODULE, "ours", path=str(slide), out=str(folder / "ours")
        )
        theirs = read_tsv(folder / "plain.tsv", header=False)
        found = read_tsv(only(folder / "ours", "*/tsv_*/slide.tsv"), header=True)
    assert theirs, "the rule must keep some tiles"
    assert set(theirs) == set(found), "the same tiles"
    worst = max(float(np.abs(theirs[key] - found[key]).max()) for key in theirs)
    assert worst <= 1e-5, f"embeddings equal to 1e-5, got {worst}"
    results: dict[str, Any] = {
        "slide_px": size,
        "tiles": len(theirs),
        "largest_difference": worst,
        "tutorial": _figures(plain),
        "ours": _figures(mine),
        "time_ratio": round(plain.seconds / mine.seconds, 2),
        "cpu_ratio": round(plain.cpu_seconds / mine.cpu_seconds, 2),
        "peak_ratio": round(plain.peak_bytes / mine.peak_bytes, 2),
    }
    finish("bench_tutorial", results, args)


def _figures(measured: Any) -> dict[str, float]:
    return {
        "seconds": round(measured.seconds, 2),
        "cpu_seconds": round(measured.cpu_seconds, 2),
        "peak_rss_mb": round(measured.peak_bytes / 1e6, 1),
    }


if __name__ == "__main__":
    main()
