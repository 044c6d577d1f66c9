"""Tissue of the same slides by our masks and by other tools, for `bench_artefacts`.

Other tools run in the Python that THINSECTION_TEST_PEER_PYTHON names; CLAM's code is that of the
checkout that THINSECTION_TEST_CLAM names. A tool that does not run is listed with the reason.
HistoQC stands for itself through our preset, whose masks are HistoQC's (docs/validation/qc.md.j2).
"""

import os
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tests.support.held_out_tissue import TissueSlide
from training.artefact_slide import ArtefactSlide

from benchmarks.artefact_counts import rim, union
from thinsection.qc import run_qc, tissue_mask
from thinsection.testing.synthetic import PyramidKind, write_levels
from thinsection.types import MaskArray, RgbArray

PROGRAM = Path(__file__).parent / "peer_programs" / "tissue_masks.py"
# Tool -> modules that it needs in the Python of the peers.
PEERS = {
    "clam": "cv2",
    "clam_otsu": "cv2",
    "clam_biopsy": "cv2",
    "lazyslide": "lazyslide",
    "tiatoolbox": "tiatoolbox",
    "trident_otsu": "trident",
}
# µm/px of the pictures for tools that take one; a coarser slide keeps its own.
PICTURE_MPP = 8.0
_UM_PER_INCH = 25_400.0
# A slide has an IoU if at least this share of its tissue has no artefact on it.
LEAST_BARE = 0.25
Slides = Mapping[str, Sequence[ArtefactSlide]]


def ours(preset: str) -> Callable[[ArtefactSlide], MaskArray]:
    """Mask by a preset of quality control; 'default': that of a run without it."""

    def mask(slide: ArtefactSlide) -> MaskArray:
        with slide.open() as opened:
            if preset == "default":
                return tissue_mask(opened).mask
            return run_qc(opened, preset).mask_use

    return mask


def compare_tissue(slides: Slides, presets: Sequence[str]) -> dict[str, Any]:
    """Rows of each preset and each peer on each generator's slides."""
    rows: dict[str, Any] = {}
    for preset in ("default", *presets):
        mask_of = ours(preset)
        rows[preset] = {
            generator: scores([(slide, mask_of(slide)) for slide in drawn])
            for generator, drawn in slides.items()
        }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        places = write_slides(slides, folder)
        for peer in PEERS:
            reason = run_peer(peer, folder)
            if reason:
                rows[peer] = {"not run": reason}
                continue
            rows[peer] = {
                generator: scores(
                    [(slide, read_mask(path, peer)) for slide, path in found]
                )
                for generator, found in places.items()
            }
    return rows


def write_slides(
    slides: Slides, folder: Path
) -> dict[str, list[tuple[ArtefactSlide, Path]]]:
    """Writes the two files of each slide, and returns the place of the first."""
    places: defaultdict[str, list[tuple[ArtefactSlide, Path]]] = defaultdict(list)
    for generator, drawn in slides.items():
        for slide in drawn:
            path = folder / f"{generator[0]}_{len(places[generator]):03}.tif"
            write_slide(path, slide.rgb, slide.mpp)
            places[generator].append((slide, path))
    return dict(places)


def write_slide(path: Path, rgb: RgbArray, mpp: float) -> None:
    """Writes a lossless TIFF of one level, and a picture of `PICTURE_MPP` or coarser beside it."""
    kind = PyramidKind(downsamples=(1,), compression="deflate", mpp=(mpp, mpp))
    write_levels(path, [rgb], kind)
    image = Image.fromarray(rgb)
    picture_mpp = max(mpp, PICTURE_MPP)
    scale = mpp / picture_mpp
    size = (round(image.width * scale), round(image.height * scale))
    picture = image.resize(size, Image.Resampling.BOX)
    dpi = _UM_PER_INCH / picture_mpp
    picture.save(path.with_suffix(".png"), dpi=(dpi, dpi))


def run_peer(peer: str, folder: Path) -> str:
    """Runs a peer on the folder; returns why it does not run, or ''."""
    python = os.environ.get("THINSECTION_TEST_PEER_PYTHON")
    if not python:
        return "not installed: THINSECTION_TEST_PEER_PYTHON names no Python"
    if peer.startswith("clam") and not os.environ.get("THINSECTION_TEST_CLAM"):
        return "not installed: THINSECTION_TEST_CLAM names no checkout of CLAM"
    environment = {key: v for key, v in os.environ.items() if key != "PYTHONPATH"}
    environment["OMP_NUM_THREADS"] = "1"
    command = [python, "-W", "ignore", str(PROGRAM), peer, str(folder)]
    child = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment
    )
    if child.returncode == 0:
        return ""
    last = (child.stderr.strip() or f"exit code {child.returncode}").splitlines()[-1]
    missing = f"No module named '{PEERS[peer]}'" in last
    return f"{'not installed' if missing else 'failed'}: {last}"


def read_mask(path: Path, peer: str) -> MaskArray:
    """Mask that a peer has written for a slide."""
    with Image.open(path.with_suffix(f".{peer}.mask.png")) as image:
        return np.asarray(image) > 127


def scores(masks: Sequence[tuple[ArtefactSlide, MaskArray]]) -> dict[str, Any]:
    """IoU with the tissue by slide, glass that is taken, pen that is kept, biology that is lost.

    Pixels of artefacts do not count for the IoU and for glass. With "edges left out", those near
    the outline of the tissue or of an artefact do not count either.
    """
    ious = []
    inner_ious = []
    parts: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for slide, mask in masks:
        truth = {name: resized_to(where, mask) for name, where in slide.masks.items()}
        none = np.zeros_like(mask)
        artefacts = union(truth.items(), none, leave=("tissue",))
        tissue = truth["tissue"] & ~artefacts
        px_um = slide.mpp * slide.rgb.shape[1] / mask.shape[1]
        inner = ~artefacts
        for area in (truth["tissue"], ~truth["tissue"], artefacts):
            inner &= ~rim(area, px_um)
        if np.count_nonzero(tissue) >= LEAST_BARE * np.count_nonzero(truth["tissue"]):
            ious.append(_iou(mask, tissue, ~artefacts))
            inner_ious.append(_iou(mask, tissue, inner))
        areas = {"glass taken": ~truth["tissue"] & ~artefacts}
        areas["pen kept"] = truth.get("pen", none)
        areas["clean tissue lost"] = resized_to(slide.clean, mask)
        inner_clean = areas["clean tissue lost"] & inner
        areas["clean tissue lost, edges left out"] = inner_clean
        if isinstance(slide, TissueSlide):
            for name, where in slide.biology.items():
                areas[f"{name} lost"] = resized_to(where, mask)
        for name, area in areas.items():
            counted = area & ~mask if "lost" in name else area & mask
            parts[name].append((np.count_nonzero(counted), np.count_nonzero(area)))
    row: dict[str, Any] = {"slides with an iou": len(ious)}
    if ious:
        row["iou mean"] = round(statistics.mean(ious), 4)
        row["iou median"] = round(statistics.median(ious), 4)
        row["iou least"] = round(min(ious), 4)
        row["iou mean, edges left out"] = round(statistics.mean(inner_ious), 4)
    for name, counts in parts.items():
        counted, area = np.sum(counts, axis=0)
        if area:
            row[name] = round(float(counted / area), 4)
    return row


def _iou(mask: MaskArray, tissue: MaskArray, counted: MaskArray) -> float:
    hits = np.count_nonzero(mask & tissue & counted)
    return hits / max(1, np.count_nonzero((mask | tissue) & counted))


def resized_to(where: MaskArray, mask: MaskArray) -> MaskArray:
    """A mask of level 0 at the size of another one."""
    image = Image.fromarray(where.astype(np.uint8) * 255)
    size = (mask.shape[1], mask.shape[0])
    return np.asarray(image.resize(size, Image.Resampling.BOX)) > 127
