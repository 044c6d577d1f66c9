"""Scores of the packaged encoder on pictures that scikit-image and scikit-learn carry.

    python -m benchmarks.bench_scores [--out FOLDER] [--smoke]

It writes benchmarks/results/scores/*.json, the small results of `thinsection bench`, and
`thinsection probe scores benchmarks/results` makes the table of docs/probes.md of them. The tasks
are none of pathology: they show the command, and whether a change of the package changes a score.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

import numpy as np
import skimage.data
from PIL import Image
from sklearn.datasets import load_digits

from thinsection.probe.grid import run_suite
from thinsection.probe.scores import SCORES

RESULTS = Path(__file__).parent / "results" / SCORES
TEXTURES = ("brick", "grass", "gravel")
TILE_PX = 64
NUM_DIGITS = 600
ENCODERS = ("efficientnet_lite0", "efficientnet_lite0:160px")
Row = tuple[np.ndarray, str, str]  # picture, label, independent unit


def textures() -> list[Row]:
    """Tiles of three pictures of 512 px; a unit is a square of 2 x 2 tiles."""
    rows = []
    for name in TEXTURES:
        picture = getattr(skimage.data, name)()
        for top in range(0, 512, TILE_PX):
            for left in range(0, 512, TILE_PX):
                tile = picture[top : top + TILE_PX, left : left + TILE_PX]
                unit = f"{name}-{top // (2 * TILE_PX)}-{left // (2 * TILE_PX)}"
                rows.append((tile, name, unit))
    return rows


def faces() -> list[Row]:
    """100 faces and 100 other crops of 25 px, each a unit."""
    pictures = skimage.data.lfw_subset()
    return [
        ((255 * picture).astype(np.uint8), "face" if i < 100 else "other", f"crop{i}")
        for i, picture in enumerate(pictures)
    ]


def digits() -> list[Row]:
    """Handwritten digits of 8 px, each a unit."""
    data = load_digits()
    return [
        ((picture * 15).astype(np.uint8), f"digit {label}", f"digit{i}")
        for i, (picture, label) in enumerate(
            zip(data.images[:NUM_DIGITS], data.target[:NUM_DIGITS], strict=True)
        )
    ]


def main() -> None:
    """Writes the pictures, runs the suite and keeps its small results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--smoke", action="store_true", help="one task, no files")
    args = parser.parse_args()
    makers = (faces,) if args.smoke else (textures, faces, digits)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        suite = [f"encoders = {list(ENCODERS)!r}", 'protocol = "honest"']
        for make in makers:
            task = make.__name__
            lines = ["path,label,case_id"]
            for number, (picture, label, unit) in enumerate(make()):
                path = folder / task / f"{number}.png"
                path.parent.mkdir(exist_ok=True)
                # resized by Pillow, so that the encoder sees more than a few pixels
                image = Image.fromarray(picture).convert("RGB")
                image.resize((224, 224), Image.Resampling.BICUBIC).save(path)
                lines.append(f"{task}/{number}.png,{label},{unit}")
            (folder / f"{task}.csv").write_text("\n".join(lines) + "\n")
            suite += [
                "[[tasks]]",
                f'data = "{task}.csv"',
                'probes = ["knn", "fewshot"]',
            ]
        (folder / "suite.toml").write_text("\n".join(suite) + "\n")
        run_suite(folder / "suite.toml", folder / "out", on_message=print)
        if args.smoke:
            return
        args.out.mkdir(parents=True, exist_ok=True)
        for path in sorted((folder / "out" / SCORES).glob("*.json")):
            shutil.copyfile(path, args.out / path.name)


if __name__ == "__main__":
    main()
