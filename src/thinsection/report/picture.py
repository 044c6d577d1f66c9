"""Pictures of whole slides: made of a slide, stored in its folder, opened again to draw on."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from thinsection.errors import StoreError, rewording
from thinsection.files.atomic import atomic_path
from thinsection.slide import Slide, read_resized
from thinsection.slide.geometry import best_level
from thinsection.store.ledger import SlideLedger
from thinsection.types import MaskArray, Mpp, RgbArray, Size

# px of a picture, never more than the slide has
LONG_SIDE = 1600
# how the names of stored pictures begin
PICTURE = "picture"
# px of the long side of a thumbnail that will do, where a level has more px than the second
_FAIR_LONG_SIDE = 1000
_GIANT_LEVEL_PX = 50_000_000
_JPEG_QUALITY = 90


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A whole slide at a size that can be looked at."""

    # uint8 (H, W, 3)
    rgb: RgbArray
    size_l0: Size
    # without it there is no scale bar
    slide_mpp: Mpp | None = None

    @property
    def size(self) -> Size:
        """(width, height), px."""
        return self.rgb.shape[1], self.rgb.shape[0]


def slide_picture(slide: Slide, thumbnail: RgbArray | None = None) -> RgbArray:
    """The slide with `LONG_SIDE` px along its long side, or as many as it has, uint8 (H, W, 3).

    It is read from the fitting level, in strips, or made of a thumbnail that is large enough: of
    1000 px where that level is so large that to read it once more would cost seconds. By URL no
    finer level is fetched than the thumbnail was made of, and level 0 not once more: a picture of
    few px then.

    Memory:
        That of `read_resized`: 160 MiB and the picture, whatever the slide's size.

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
    """Writes a picture of a slide as a JPEG, atomically."""
    with atomic_path(path) as tmp:
        Image.fromarray(rgb).save(tmp, format="JPEG", quality=_JPEG_QUALITY)


def picture_files(folder: Path) -> tuple[Path, ...]:
    """The picture in a slide's folder, and the mask that it was stored with; empty without one.

    Folders of older versions have a thumbnail only.
    """
    places = [folder, *sorted(folder.glob("qc_*"))]
    for kind in (PICTURE, "thumbnail"):
        for place in places:
            for path in sorted(place.glob(f"{kind}*.jpg")):
                return _with_mask(path, kind)
    return ()


def _with_mask(picture: Path, kind: str) -> tuple[Path, ...]:
    """A stored picture, and the first of the masks that may lie beside it."""
    tissue = picture.stem.replace(kind, "tissue")
    for name in (tissue, "mask_kept", "mask_use"):
        mask = picture.with_name(f"{name}.png")
        if mask.is_file():
            return (picture, mask)
    return (picture,)


def thumbnail_file(folder: Path) -> Path | None:
    """The smallest picture of the whole slide in its folder, whichever stage left it; or None."""
    for pattern in ("thumbnail*.jpg", f"{PICTURE}*.jpg", f"qc_*/{PICTURE}*.jpg"):
        paths = sorted(folder.glob(pattern))
        if paths:
            return paths[0]
    return None


def open_picture(ledger: SlideLedger) -> Picture:
    """The stored picture of a slide of a results folder, to draw on.

    Raises:
        StoreError: it has none, or it is damaged.
    """
    slide = ledger.slide
    files = picture_files(ledger.path.parent)
    if not files or not slide.get("width"):
        raise StoreError(
            f"picture of {ledger.slide_id!r} must be there, got none; run it first"
        )
    readable = rewording(
        "picture must be readable", files[0], OSError, error=StoreError
    )
    with readable, Image.open(files[0]) as file:
        rgb = np.array(file.convert("RGB"))
    slide_mpp = (slide["mpp_x"], slide["mpp_y"]) if slide.get("mpp_x") else None
    return Picture(
        rgb=rgb, size_l0=(slide["width"], slide["height"]), slide_mpp=slide_mpp
    )


def read_mask(path: Path) -> MaskArray:
    """A mask that was stored as a picture, bool (H, W)."""
    with Image.open(path) as file:
        return np.asarray(file.convert("L")) > 0
