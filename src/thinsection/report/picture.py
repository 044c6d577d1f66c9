"""Pictures of whole slides: made from a slide, stored in its folder, opened again to draw on."""

import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from thinsection.errors import StoreError, rewording
from thinsection.files.atomic import write_bytes
from thinsection.report.qc_store import MASK_KEPT, MASK_USE, QC_FILE, read_qc
from thinsection.slide import Slide, read_resized
from thinsection.slide.geometry import best_level
from thinsection.slide.open import open_slide
from thinsection.store.claims import check_slide_exists, slide_place
from thinsection.store.ledger import SlideLedger
from thinsection.types import MaskArray, Mpp, RgbArray, Size

# long side of a picture in pixels, or that of the slide if it is smaller
LONG_SIDE = 1600
# prefixes of the names of stored pictures
PICTURE = "picture"
PICTURE_NAME = f"{PICTURE}.jpg"
# pictures of what each check marked; older versions wrote a PNG
OVERLAYS = ("overlay.jpg", "overlay.png")
# long side in pixels from which a thumbnail is used, if the level has more pixels than the second
_FAIR_LONG_SIDE = 1000
_GIANT_LEVEL_PX = 50_000_000
# qualities of a stored JPEG that are tried before it gets fewer pixels
_JPEG_QUALITIES = (85, 75, 65)
# largest size of a stored picture in bytes
_PICTURE_BYTES = 120_000


@dataclass(frozen=True, kw_only=True)
class Picture:
    """Whole slide at a size for viewing."""

    # uint8 (H, W, 3)
    rgb: RgbArray
    size_l0: Size
    # None means no scale bar
    slide_mpp: Mpp | None = None

    @property
    def size(self) -> Size:
        """(width, height) in pixels."""
        return self.rgb.shape[1], self.rgb.shape[0]


def slide_picture(slide: Slide, thumbnail: RgbArray | None = None) -> RgbArray:
    """Slide with `LONG_SIDE` pixels along its long side, or all it has, uint8 (H, W, 3).

    It is read in strips from the best level, or made from a thumbnail that is large enough. If
    reading that level would take seconds, a thumbnail of 1000 pixels is enough. For a URL, no level
    is downloaded that is finer than the thumbnail's, and level 0 is not downloaded twice; the
    picture may then be small.

    Memory:
        As `read_resized`: 160 MiB and the picture, for a slide of any size.

    Raises:
        SlideReadError: the slide's pixels cannot be decoded.
    """
    shrink = max(1.0, max(slide.size) / LONG_SIDE)
    enough_px = LONG_SIDE
    if math.prod(best_level(slide.levels, shrink).size) > _GIANT_LEVEL_PX:
        enough_px = _FAIR_LONG_SIDE
    if thumbnail is not None and slide.source is not None:
        thumbnail_downsample = max(slide.size) / max(thumbnail.shape[:2])
        thumbnail_level = best_level(slide.levels, thumbnail_downsample)
        shrink = max(shrink, thumbnail_level.downsample)
        if thumbnail_level.index == 0:
            enough_px = 0
    width = max(1, round(slide.size[0] / shrink))
    height = max(1, round(slide.size[1] / shrink))
    least_px = min(enough_px, max(width, height))
    if thumbnail is None or max(thumbnail.shape[:2]) < least_px:
        return read_resized(slide, (width, height))
    image = Image.fromarray(thumbnail)
    image.thumbnail((width, height), Image.Resampling.LANCZOS)
    return np.asarray(image)


def save_picture(path: Path, rgb: RgbArray) -> None:
    """Writes a picture of a slide as a JPEG of at most 120 kB, atomically."""
    write_bytes(path, fitted_jpeg(rgb, _PICTURE_BYTES))


def fitted_jpeg(rgb: RgbArray, most_bytes: int) -> bytes:
    """JPEG of at most so many bytes; a picture full of detail has a lower quality or fewer pixels.

    Memory:
        The picture once more, and the JPEG.
    """
    image = Image.fromarray(rgb)
    while True:
        for quality in _JPEG_QUALITIES:
            buffer = io.BytesIO()
            image.save(buffer, format="JPEG", quality=quality)
            if buffer.tell() <= most_bytes:
                return buffer.getvalue()
        shrink = min(0.9, math.sqrt(most_bytes / buffer.tell()))
        size = [max(1, round(edge * shrink)) for edge in image.size]
        if max(size) == 1:  # the header alone is larger
            return buffer.getvalue()
        image = image.resize((size[0], size[1]), Image.Resampling.LANCZOS)


def picture_files(folder: Path) -> tuple[Path, ...]:
    """Picture in a slide's folder, and the file with its mask; empty if there is no picture.

    `read_tissue` reads the mask. Folders of older versions have only a thumbnail.
    """
    names = file_names(folder)
    for kind in (PICTURE, "thumbnail"):
        files = _pictures_of(folder, names, kind)
        for name in names:
            if not files and name.startswith("qc_"):
                files = _pictures_of(folder / name, file_names(folder / name), kind)
        if files:
            return files
    return ()


def file_names(folder: Path) -> list[str]:
    """Names in a folder, in order; none if there is no such folder."""
    try:
        return sorted(entry.name for entry in os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _pictures_of(folder: Path, names: Sequence[str], kind: str) -> tuple[Path, ...]:
    """First picture of a kind among the names in a folder, and the first mask that exists."""
    for name in names:
        if not (name.startswith(kind) and name.endswith(".jpg")):
            continue
        tissue = name.removesuffix(".jpg").replace(kind, "tissue")
        for mask in (
            f"{tissue}.png",
            QC_FILE,
            f"{MASK_KEPT}.png",
            f"{MASK_USE}.png",
        ):
            if mask in names:
                return folder / name, folder / mask
        return (folder / name,)
    return ()


def overlay_file(folder: Path) -> Path | None:
    """Picture of a slide's folder that shows what each check marked; None if there is none."""
    for name in OVERLAYS:
        path = folder / name
        if path.is_file():
            return path
    return None


def thumbnail_file(folder: Path) -> Path | None:
    """Smallest picture of the whole slide in its folder, from any stage; or None."""
    for pattern in ("thumbnail*.jpg", f"{PICTURE}*.jpg", f"qc_*/{PICTURE}*.jpg"):
        paths = sorted(folder.glob(pattern))
        if paths:
            return paths[0]
    return None


def open_picture(ledger: SlideLedger) -> Picture:
    """Picture of a slide of a results folder, to draw on; made from the slide if none is stored.

    Raises:
        StoreError: the stored picture is damaged, or there is neither a picture nor a slide.
        SlideOpenError: the slide cannot be opened.
    """
    slide = ledger.slide
    files = picture_files(ledger.path.parent)
    if not files or not slide.get("width"):
        return _picture_of_file(ledger)
    readable = rewording(
        "picture must be readable", files[0], OSError, error=StoreError
    )
    with readable, Image.open(files[0]) as file:
        rgb = np.array(file.convert("RGB"))
    slide_mpp = (slide["mpp_x"], slide["mpp_y"]) if slide.get("mpp_x") else None
    return Picture(
        rgb=rgb, size_l0=(slide["width"], slide["height"]), slide_mpp=slide_mpp
    )


def _picture_of_file(ledger: SlideLedger) -> Picture:
    """Picture from the slide's file, for results that another tool made."""
    facts = ledger.slide
    if not facts.get("slide_path"):
        raise StoreError(
            f"picture of {ledger.slide_id!r} must exist, got none; run `thinsection run` first, or "
            "import with --slides"
        )
    path = slide_place(ledger)
    check_slide_exists(path, ledger.slide_id)
    mpp = (facts["mpp_x"], facts["mpp_y"]) if facts.get("mpp_x") else None
    with open_slide(path, slide_mpp=mpp) as slide:
        return Picture(
            rgb=slide_picture(slide), size_l0=slide.size, slide_mpp=slide.slide_mpp
        )


def read_tissue(path: Path) -> MaskArray:
    """Reads the mask on which tiles are laid, bool (H, W), from a file of `picture_files`."""
    if path.name != QC_FILE:
        return read_mask(path)
    stored = read_qc(path.parent)
    return stored.mask(MASK_KEPT if MASK_KEPT in stored.names else MASK_USE)


def read_mask(path: Path) -> MaskArray:
    """Reads a mask from a picture, bool (H, W)."""
    with Image.open(path) as file:
        return np.asarray(file.convert("L")) > 0
