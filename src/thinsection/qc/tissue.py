"""The default tissue mask, and of any mask its picture and the share of a box that it covers."""

import colorsys
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from thinsection.arrays import get_namespace
from thinsection.arrays.morphology import dilated_by_disk, drop_small, opened_by_disk
from thinsection.config import option
from thinsection.errors import InvalidInputError
from thinsection.files.pages import notebook_html
from thinsection.qc.checks.by_example import ByExample, probabilities, trained_model
from thinsection.qc.checks.tissue import Tissue, detect_tissue
from thinsection.qc.work_image import resolution_of, work_size
from thinsection.slide import Slide, read_resized
from thinsection.types import (
    CoordsL0,
    MaskArray,
    MaskFrame,
    Mpp,
    RgbArray,
    Size,
    format_mpp,
)

_INK_UM, _INK_GAP_UM, _MIN_INK_UM2 = (
    16.0,
    64.0,
    6400.0,
)  # px looked at; gaps in ink; least spot
Color = tuple[int, int, int]  # RGB, 0 to 255
Tints = Iterable[tuple[MaskArray, Color]]
Shares = npt.NDArray[np.float32]  # (N,), in [0, 1]
TISSUE_COLOR: Color = (0, 160, 80)
_DIMMED = 0.35  # share of its own colour that a px out of use keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class TissueConfig:
    """Settings of the default tissue mask."""

    mask_mpp: float = option(8.0, "Resolution of the tissue mask in µm/px.")
    min_speck_um2: float = option(
        20_000.0, "Tissue pieces smaller than this are dropped, µm²."
    )
    min_hole_um2: float = option(10_000.0, "Holes smaller than this are filled, µm².")
    black_level: int = option(
        Tissue.black_level,
        "Px whose brightest channel is below this are not tissue, 0-255.",
    )

    def __post_init__(self) -> None:
        if not 0 < self.mask_mpp < math.inf:
            raise InvalidInputError(
                f"mask_mpp must be > 0 and finite, got {self.mask_mpp}"
            )


@dataclass(frozen=True, kw_only=True, repr=False)
class TissueMask:
    """A mask and where it lies."""

    mask: MaskArray  # bool (H, W), True = tissue
    frame: MaskFrame  # how its px map to level 0
    mask_mpp: Mpp | None  # (x, y) µm per mask px, or None where the slide has no mpp
    thumbnail: RgbArray  # uint8 (H, W, 3), the image that it was made from
    # that was measured: 'H&E', 'IHC', 'unsure' (of the two), 'grey' or 'dark'; '' where none was
    stain: str = ""
    pen_fraction: float = (
        0.0  # share of the slide that would be tissue but for ink, [0, 1]
    )

    @property
    def tissue_fraction(self) -> float:
        """The share of the slide that is tissue, [0, 1]."""
        return float(self.mask.mean())

    def fractions(self, coords_l0: CoordsL0, size_l0: Size) -> Shares:
        """The share of tissue of each box, as of `box_fractions`."""
        return box_fractions(self.mask, self.frame, coords_l0, size_l0)

    def __repr__(self) -> str:
        height, width = self.mask.shape
        size = f"{width} x {height} px, {format_mpp(self.mask_mpp)}"
        return f"TissueMask({size}, {self.tissue_fraction:.1%} tissue)"

    def _repr_html_(self) -> str:
        picture = overlay(self.thumbnail, self.mask)
        return notebook_html(
            picture, f"{self.tissue_fraction:.1%} tissue", [repr(self)]
        )


def tissue_mask(slide: Slide, config: TissueConfig | None = None) -> TissueMask:
    """Where the tissue of a slide is, of any stain, without pen, slide edge and dust.

    Optical density, colour and texture of a thumbnail of about 8 µm/px against the glass that it
    shows (docs/tissue.md): an empty slide gives an empty mask, a slide full of tissue a full one.
    Pieces and holes below the configured areas go (without an mpp, as many px as at 8 µm/px).

    Memory: O(thumbnail): about 60 bytes per mask px, beside one strip of the level that is read.

    Raises:
        SlideReadError: the slide's pixels cannot be decoded.
    """
    config = config or TissueConfig()
    where = work_frame(slide, config.mask_mpp)
    rgb = where.thumbnail
    found, stain = segment_tissue(rgb, config, px_um=where.px_um)
    mask = found & ~_ink(rgb, where.px_um) if found.any() else found
    pen_fraction = float((found & ~mask).mean())
    if pen_fraction:  # what is left of a piece between two strokes
        least_px = config.min_speck_um2 / where.px_um**2
        mask = drop_small(get_namespace("cpu"), mask, least_px)
    return TissueMask(
        mask=mask,
        frame=where.frame,
        mask_mpp=where.mask_mpp,
        thumbnail=rgb,
        stain=stain,
        pen_fraction=pen_fraction,
    )


@dataclass(frozen=True, kw_only=True)
class WorkFrame:
    """The picture of a slide on which tissue is found, and where it lies."""

    thumbnail: RgbArray  # uint8 (H, W, 3)
    frame: MaskFrame  # how its px map to level 0
    mask_mpp: Mpp | None  # (x, y) µm per px, or None where the slide has no mpp
    px_um: float  # µm per px, assumed where the slide has no mpp


def work_frame(slide: Slide, mask_mpp: float) -> WorkFrame:
    """The picture of a slide at about `mask_mpp`: that of quality control in µm, px by px."""
    mpp_xy = resolution_of(slide, mask_mpp, slide.slide_mpp)
    frame = MaskFrame(
        size_th=work_size(slide.size, mpp_xy, mask_mpp), size_l0=slide.size
    )
    x, y = np.multiply(mpp_xy, frame.downsample_xy).tolist()
    return WorkFrame(
        thumbnail=read_resized(slide, frame.size_th),
        frame=frame,
        mask_mpp=(x, y) if slide.slide_mpp else None,
        px_um=math.sqrt(x * y),
    )


def segment_tissue(
    rgb: RgbArray, config: TissueConfig, *, px_um: float
) -> tuple[MaskArray, str]:
    """Mask (H, W) and measured stain of an RGB thumbnail (H, W, 3) of px of px_um µm."""
    areas_px = config.min_speck_um2 / px_um**2, config.min_hole_um2 / px_um**2
    return detect_tissue(get_namespace("cpu"), rgb, px_um, areas_px, config.black_level)


def _ink(thumbnail: RgbArray, px_um: float) -> MaskArray:
    """Where there is pen, by the small network of `--qc auto` at 16 µm/px, bool (H, W)."""
    check, ns = ByExample(), get_namespace("cpu")
    model = trained_model(check, Path())  # the package's own: no cache
    factor = max(1, round(_INK_UM / px_um))
    small = np.asarray(Image.fromarray(thumbnail).reduce(factor))
    found = probabilities(ns, small, {check: model})[check] > check.threshold
    found = drop_small(ns, found, _MIN_INK_UM2 / (px_um * factor) ** 2)
    gap = _INK_GAP_UM / (px_um * factor)  # streaks of a dry pen, and its rim
    found = ~opened_by_disk(ns, ~dilated_by_disk(ns, found, gap / 4), gap)
    whole = found.repeat(factor, axis=0).repeat(factor, axis=1)
    return np.asarray(whole[: thumbnail.shape[0], : thumbnail.shape[1]])


def hues(num: int) -> list[Color]:
    """So many colours, spread over the hues."""
    spread = [
        colorsys.hsv_to_rgb((0.02 + n * 0.618) % 1.0, 0.85, 0.9) for n in range(num)
    ]
    return [(round(r * 255), round(g * 255), round(b * 255)) for r, g, b in spread]


def overlay(rgb: RgbArray, mask_use: MaskArray, tints: Tints = ()) -> RgbArray:
    """The picture: out of use dimmed and tinted by the mask that took it, the rest outlined."""
    from scipy import ndimage

    picture, unused = rgb.astype(np.float32), ~mask_use
    tint = np.full_like(picture, 255.0)
    for mask, color in tints:
        tint[mask & unused] = color
    picture[unused] = picture[unused] * _DIMMED + tint[unused] * (1 - _DIMMED) * 0.9
    picture[mask_use & ~ndimage.binary_erosion(mask_use)] = TISSUE_COLOR
    return np.clip(picture, 0, 255).astype(np.uint8)


def box_fractions(
    mask: MaskArray, frame: MaskFrame, coords_l0: CoordsL0, size_l0: Size
) -> Shares:
    """The area-weighted share of each box that lies on True mask px, float32 (N,).

    Boxes of one size (width, height) have their top-left corners at coords_l0, (N, 2). Mask px that
    a box cuts count by the part that it cuts; what lies outside the mask (H, W) counts as False.

    Memory: 8 bytes per mask px for the integral image, and about 100 bytes per box.
    """
    (height, width), downsample = mask.shape, np.array(frame.downsample_xy)
    integral = np.zeros((height + 1, width + 1), dtype=np.float64)
    np.cumsum(np.cumsum(mask, axis=0, dtype=np.float64), axis=1, out=integral[1:, 1:])
    left, top = (coords_l0 / downsample).T
    right, bottom = ((coords_l0 + np.array(size_l0)) / downsample).T

    def up_to(row: npt.NDArray, column: npt.NDArray) -> npt.NDArray:
        """Area of the mask above and left of points, bilinear between nodes, clipped outside."""
        row, column = np.clip(row, 0, height), np.clip(column, 0, width)
        r0 = np.minimum(row.astype(np.int64), height - 1)
        c0 = np.minimum(column.astype(np.int64), width - 1)
        fr, fc = row - r0, column - c0
        upper = integral[r0, c0] * (1 - fc) + integral[r0, c0 + 1] * fc
        lower = integral[r0 + 1, c0] * (1 - fc) + integral[r0 + 1, c0 + 1] * fc
        return np.asarray(upper * (1 - fr) + lower * fr)

    # so and not by SciPy's map_coordinates, which makes 1e-17 of nothing
    covered = (
        up_to(bottom, right)
        - up_to(top, right)
        - up_to(bottom, left)
        + up_to(top, left)
    )
    shares = covered / np.prod(size_l0 / downsample)
    return np.asarray(np.clip(shares, 0.0, 1.0), dtype=np.float32)
