"""The default tissue mask; pictures of masks, and the share of a box that a mask covers."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinsection.arrays import get_namespace, morphology
from thinsection.config import option
from thinsection.errors import InvalidInputError
from thinsection.files.pages import notebook_html
from thinsection.qc.checks.tissue import Detected, Tissue, detect_tissue
from thinsection.qc.work_image import resolution_of, work_size
from thinsection.slide import Slide, check_slide, read_resized
from thinsection.types import (
    CoordsL0,
    MaskArray,
    MaskFrame,
    Mpp,
    RgbArray,
    Size,
    format_mpp,
)

Color = tuple[int, int, int]  # RGB, 0 to 255
Tints = Iterable[tuple[MaskArray, Color]]
Shares = npt.NDArray[np.float32]  # (N,), in [0, 1]
TISSUE_COLOR: Color = (0, 160, 80)
# of stripes over tissue that a check did not judge
UNJUDGED_COLOR: Color = (72, 72, 92)

# Pixels of a mask whose integral image is made at once.
_BAND_PX = 1 << 20
# Share of its own colour that a px out of use keeps.
_DIMMED = 0.35


@dataclass(frozen=True, slots=True, kw_only=True)
class TissueConfig:
    """Settings of the default tissue mask."""

    mask_mpp: float = option(
        8.0,
        "Resolution of the tissue mask in µm/px. Lower it for tissue pieces smaller "
        "than 0.1 mm.",
    )
    min_speck_um2: float = option(
        20_000.0,
        "Smallest piece of tissue in µm²; smaller ones are removed. Lower it for fine "
        "needle biopsies.",
    )
    min_hole_um2: float = option(
        10_000.0, "Holes in the tissue up to this area in µm² are filled."
    )
    black_level: int = option(
        Tissue.black_level,
        "Pixels whose brightest channel is below this value (0 to 255) are not tissue.",
    )

    def __post_init__(self) -> None:
        if not 0 < self.mask_mpp < math.inf:
            raise InvalidInputError(
                f"mask_mpp must be > 0 and finite, got {self.mask_mpp}"
            )


@dataclass(frozen=True, kw_only=True, repr=False)
class TissueMask:
    """A mask and its place on the slide.

    `tile_grid(slide, tissue=(own, tissue.mask_mpp))` takes a mask of your own that was made of
    `thumbnail`.

    Attributes:
        mask: bool (H, W), True for tissue.
        mask_mpp: (x, y) µm per pixel of the mask and of `thumbnail`; None without a resolution.
        thumbnail: uint8 (H, W, 3), the picture from which the mask was made.
        stain: 'H&E', 'IHC', 'unsure' (of these two), 'grey' or 'dark'; '' if it was not measured.
        pen_fraction: share of the slide that would be tissue without ink, from 0 to 1.
        frame: place of the mask's pixels at level 0.
    """

    mask: MaskArray  # bool (H, W), True = tissue
    frame: MaskFrame  # maps its px to level 0
    mask_mpp: Mpp | None  # (x, y) µm per mask px, or None where the slide has no mpp
    thumbnail: RgbArray  # uint8 (H, W, 3), the image that it was made from
    # the measured stain: 'H&E', 'IHC', 'unsure' (of the two), 'grey' or 'dark'; '' where
    # none was measured
    stain: str = ""
    # share of the slide that would be tissue but for ink, [0, 1]
    pen_fraction: float = 0.0
    # says why the share of tissue was not judged; '' if it was
    warning: str = ""

    @property
    def tissue_fraction(self) -> float:
        """The share of the slide that is tissue, [0, 1]."""
        return float(self.mask.mean())

    def fractions(self, coords_l0: CoordsL0, size_l0: Size) -> Shares:
        """The share of tissue of each box; see `box_fractions`."""
        return box_fractions(self.mask, self.frame, coords_l0, size_l0)

    def __repr__(self) -> str:
        height, width = self.mask.shape
        return (
            f"TissueMask({width} x {height} px, {format_mpp(self.mask_mpp)}, "
            f"{self.tissue_fraction:.1%} tissue)"
        )

    def _repr_html_(self) -> str:
        picture = overlay(self.thumbnail, self.mask)
        title = f"{self.tissue_fraction:.1%} tissue"
        return notebook_html(picture, title, [repr(self)])


def tissue_mask(slide: Slide, config: TissueConfig | None = None) -> TissueMask:
    """Detects the tissue of a slide, of any stain, without pen, slide edge and dust.

    Optical density, colour and texture of a thumbnail of about 8 µm/px are compared with
    the glass that it shows (docs/tissue.md): an empty slide gives an empty mask, a slide
    full of tissue a full one. Pieces and holes below the configured areas go (without an
    mpp, as many px as at 8 µm/px).

    Memory: O(thumbnail): about 60 bytes per mask px, beside one strip of the level that is read,
        and up to 100 MB for the search for ink.

    Raises:
        SlideReadError: the slide's pixels cannot be decoded.
    """
    # imports the models of ink, which a run without unfinished slides does not need
    from thinsection.qc.checks.pen_ink import find_pen_ink

    check_slide(slide)
    config = config or TissueConfig()
    picture = work_frame(slide, config.mask_mpp)
    detected = _detect(picture.thumbnail, config, px_um=picture.px_um)
    mask = detected.mask
    if mask.any():
        mask = mask & ~find_pen_ink(picture.thumbnail, picture.px_um).ink
    pen_fraction = float((detected.mask & ~mask).mean())
    if pen_fraction:
        # specks that remain of a piece between two strokes
        least_px = config.min_speck_um2 / picture.px_um**2
        mask = morphology.drop_small(get_namespace("cpu"), mask, least_px)
    return TissueMask(
        mask=mask,
        frame=picture.frame,
        mask_mpp=picture.mask_mpp,
        thumbnail=picture.thumbnail,
        stain=detected.stain,
        pen_fraction=pen_fraction,
        warning=detected.warning_of(detected.mask),
    )


@dataclass(frozen=True, kw_only=True)
class WorkFrame:
    """The picture of a slide on which tissue is detected, and its place."""

    thumbnail: RgbArray  # uint8 (H, W, 3)
    frame: MaskFrame  # maps its px to level 0
    mask_mpp: Mpp | None  # (x, y) µm per px, or None where the slide has no mpp
    px_um: float  # µm per px, assumed where the slide has no mpp


def work_frame(slide: Slide, mask_mpp: float) -> WorkFrame:
    """The picture of a slide at about `mask_mpp`: the one that quality control sees."""
    mpp_xy = resolution_of(slide, mask_mpp, slide.slide_mpp)
    size_th = work_size(slide.size, mpp_xy, mask_mpp)
    frame = MaskFrame(size_th=size_th, size_l0=slide.size)
    downsample_x, downsample_y = frame.downsample_xy
    mpp_x = mpp_xy[0] * downsample_x
    mpp_y = mpp_xy[1] * downsample_y
    return WorkFrame(
        thumbnail=read_resized(slide, size_th),
        frame=frame,
        mask_mpp=(mpp_x, mpp_y) if slide.slide_mpp else None,
        px_um=math.sqrt(mpp_x * mpp_y),
    )


def segment_tissue(
    rgb: RgbArray, config: TissueConfig, *, px_um: float
) -> tuple[MaskArray, str]:
    """Mask (H, W) and measured stain of an RGB thumbnail (H, W, 3) of px of px_um µm."""
    detected = _detect(rgb, config, px_um=px_um)
    return detected.mask, detected.stain


def _detect(rgb: RgbArray, config: TissueConfig, *, px_um: float) -> Detected:
    return detect_tissue(
        get_namespace("cpu"),
        rgb,
        px_um,
        min_piece_px=config.min_speck_um2 / px_um**2,
        min_hole_px=config.min_hole_um2 / px_um**2,
        black_level=config.black_level,
    )


def hues(num: int) -> list[Color]:
    """Makes colours that are spread over the hues."""
    colors = []
    for n in range(num):
        red, green, blue = colorsys.hsv_to_rgb((0.02 + n * 0.618) % 1.0, 0.85, 0.9)
        colors.append((round(red * 255), round(green * 255), round(blue * 255)))
    return colors


def diagonal_stripes(shape: tuple[int, ...], step_px: int = 8) -> MaskArray:
    """Stripes of a third of the step from lower left to upper right, bool (H, W)."""
    rows, columns = np.ogrid[: shape[0], : shape[1]]
    return np.asarray((rows + columns) % step_px < max(1, step_px // 3))


def overlay(
    rgb: RgbArray, mask_use: MaskArray, tints: Tints = (), shown: Tints = ()
) -> RgbArray:
    """Draws a mask on its picture: px in use are outlined, others dimmed and tinted.

    `tints` are the masks that took px out of use, with their colours; `shown` are masks of px
    that stay in use.
    """
    picture = rgb.astype(np.float32)
    unused = ~mask_use
    tint = np.full_like(picture, 255.0)
    for mask, color in tints:
        tint[mask & unused] = color
    picture[unused] = picture[unused] * _DIMMED + tint[unused] * (1 - _DIMMED) * 0.9
    for mask, color in shown:
        here = mask & mask_use
        picture[here] = (picture[here] + np.asarray(color, np.float32)) / 2
    picture[mask_use & ~morphology.inner(mask_use)] = TISSUE_COLOR
    return np.clip(picture, 0, 255).astype(np.uint8)


def box_fractions(
    mask: MaskArray | npt.NDArray[np.floating],
    frame: MaskFrame,
    coords_l0: CoordsL0,
    size_l0: Size,
) -> Shares:
    """The area-weighted share of each box that lies on True mask px, float32 (N,).

    Boxes of one size (width, height) have their top-left corners at coords_l0, (N, 2).
    Mask px that a box cuts count by the part that it cuts; area outside the mask (H, W)
    counts as False. A mask may hold shares in place of bool.

    Memory: as `mask_shares`.
    """
    return mask_shares(mask, frame.downsample_xy, coords_l0, size_l0)


def mask_shares(
    mask: MaskArray | npt.NDArray[np.floating],
    downsample_xy: tuple[float, float],
    coords_l0: CoordsL0,
    size_l0: Size,
) -> Shares:
    """As `box_fractions`, of a mask at the slide's corner, by its level-0 px per mask px.

    Memory: 16 bytes for each of `_BAND_PX` mask px, or of the px of a row of boxes if these are
        more, and about 100 bytes per box.
    """
    height, width = mask.shape
    downsample = np.array(downsample_xy)
    left, top = (coords_l0 / downsample).T
    right, bottom = ((coords_l0 + np.array(size_l0)) / downsample).T
    covered = np.zeros(len(coords_l0))
    # from top to bottom: boxes of one size end in the order in which they begin
    order = np.argsort(top, kind="stable")
    first_rows = np.clip(np.floor(top[order]), 0, height).astype(np.int64)
    end_rows = np.clip(np.ceil(bottom[order]), 0, height).astype(np.int64)
    start = 0
    while start < len(order):
        first = int(first_rows[start])
        end = max(int(end_rows[start]), first + _BAND_PX // max(1, width))
        stop = int(np.searchsorted(end_rows, end, side="right"))
        boxes = order[start:stop]
        band = mask[first : int(end_rows[stop - 1])]
        # outside the mask nothing is covered
        covered[boxes] = _covered_area(
            band, top[boxes] - first, bottom[boxes] - first, left[boxes], right[boxes]
        )
        start = stop
    shares = covered / np.prod(size_l0 / downsample)
    return np.asarray(np.clip(shares, 0.0, 1.0), dtype=np.float32)


_Floats = npt.NDArray[np.float64]


def _covered_area(
    mask: MaskArray | npt.NDArray[np.floating],
    top: _Floats,
    bottom: _Floats,
    left: _Floats,
    right: _Floats,
) -> _Floats:
    """Area of a mask (H, W) inside boxes (N,) whose borders are places between its px."""
    integral = np.zeros((len(mask) + 1, mask.shape[1] + 1), dtype=np.float64)
    np.cumsum(np.cumsum(mask, axis=0, dtype=np.float64), axis=1, out=integral[1:, 1:])
    # SciPy's map_coordinates would make 1e-17 of nothing
    return (
        _area_above_left(integral, bottom, right)
        - _area_above_left(integral, top, right)
        - _area_above_left(integral, bottom, left)
        + _area_above_left(integral, top, left)
    )


def _area_above_left(integral: _Floats, row: _Floats, column: _Floats) -> _Floats:
    """Area of a mask above and left of points: bilinear between nodes, clipped outside."""
    height = integral.shape[0] - 1
    width = integral.shape[1] - 1
    row = np.clip(row, 0, height)
    column = np.clip(column, 0, width)
    r0 = np.minimum(row.astype(np.int64), height - 1)
    c0 = np.minimum(column.astype(np.int64), width - 1)
    row_part = row - r0
    column_part = column - c0
    upper = integral[r0, c0] * (1 - column_part) + integral[r0, c0 + 1] * column_part
    lower = (
        integral[r0 + 1, c0] * (1 - column_part)
        + integral[r0 + 1, c0 + 1] * column_part
    )
    return np.asarray(upper * (1 - row_part) + lower * row_part)
