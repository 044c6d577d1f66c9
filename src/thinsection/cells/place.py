"""Places cells on a slide: their scale, and whether they fit the slide and its tissue."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from thinsection.cells.outlines import Flags
from thinsection.errors import InvalidInputError, MissingMppError
from thinsection.slide.geometry import nominal_mpp
from thinsection.types import Floats, MaskArray, Mpp, Size

if TYPE_CHECKING:
    from thinsection.qc.tissue import TissueMask
    from thinsection.slide import Slide

# words of a frame that are no resolution
PX = "px"
UM = "um"
# objective powers of scanners, for slides that do not state theirs
_POWERS = (2.5, 5, 10, 20, 40, 60, 80, 100)
# largest share of centres outside the slide
_MAX_OUTSIDE = 0.01
# smallest share of centres on tissue
_MIN_ON_TISSUE = 0.5
# another frame is the right one if it has so large a share on tissue, and the stated one so small
_RIGHT_SHARE = 0.95
_WRONG_SHARE = 0.8
_SAMPLE = 8192  # centres that are kept to find the right frame
_MAX_SHIFT_TH = 64  # longest offset that is looked for, px of a mask of 256 px
_SHIFT_PX = 256


@dataclass(frozen=True, kw_only=True)
class CellSlide:
    """Slide on which cells lie, as far as their table needs it."""

    slide_id: str
    size_l0: Size
    slide_mpp: Mpp
    objective_power: float | None = None

    def holds(self, centers_l0: Floats) -> Flags:
        """True for each centre (N, 2) on the slide; False for NaN."""
        inside = (centers_l0 >= 0) & (centers_l0 < self.size_l0)
        return np.asarray(inside.all(axis=1))


def cell_slide(slide: "Slide", slide_id: str = "") -> CellSlide:
    """An opened slide, as cells need it; without a resolution its mpp is NaN."""
    return CellSlide(
        slide_id=slide_id,
        size_l0=slide.levels[0].size,
        slide_mpp=slide.slide_mpp or (float("nan"), float("nan")),
        objective_power=slide.objective_power,
    )


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How coordinates of a file become px of level 0: times a scale, plus an offset.

    Attributes:
        scale_xy: level-0 px per unit of the file, along x and y.
        offset_l0: level-0 px of the file's origin.
        rule: the same in words: 'px of level 0', 'µm', 'px of 0.5 µm'.
    """

    scale_xy: tuple[float, float] = (1.0, 1.0)
    offset_l0: tuple[float, float] = (0.0, 0.0)
    rule: str = "px of level 0"

    def centers_l0(self, centers: Floats) -> Floats:
        """Centres (N, 2) of the file in level-0 px."""
        moved = centers * np.asarray(self.scale_xy) + np.asarray(self.offset_l0)
        return np.asarray(moved)


def placement_of(frame: str, slide: CellSlide) -> Placement:
    """Placement for a frame: 'px' of level 0, 'um', the µm of one px ('0.5'), or a power ('20x').

    Raises:
        InvalidInputError: the frame is none of these.
        MissingMppError: the slide has no resolution, and the frame needs it.
    """
    text = frame.strip().lower().replace("µ", "u")
    if text == PX:
        return Placement()
    if text.endswith("x"):
        power = _positive(text[:-1], frame)
        scale = _power_of(slide) / power
        return Placement(scale_xy=(scale, scale), rule=f"px at {power:g}x")
    unit_um = 1.0 if text == UM else _positive(text, frame)
    rule = "µm" if text == UM else f"px of {unit_um:g} µm"
    _check_mpp(slide)
    mpp_x, mpp_y = slide.slide_mpp
    return Placement(scale_xy=(unit_um / mpp_x, unit_um / mpp_y), rule=rule)


def _positive(text: str, frame: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < np.inf:
        raise InvalidInputError(
            "frame of cells must be px (of level 0), um, the µm of one px such as 0.5, or a "
            f"magnification such as 20x, got {frame!r}"
        )
    return value


def _check_mpp(slide: CellSlide) -> None:
    if not all(0 < mpp < np.inf for mpp in slide.slide_mpp):
        raise MissingMppError(
            f"slide_mpp is missing in {slide.slide_id!r}; pass slide_mpp=... or add a slide_mpp "
            "column to the cohort"
        )


def _power_of(slide: CellSlide) -> float:
    """Objective power of a slide; the usual one of its resolution if it does not state it."""
    if slide.objective_power:
        return slide.objective_power
    _check_mpp(slide)
    mpp = float(np.mean(slide.slide_mpp))
    return min(_POWERS, key=lambda power: abs(np.log(nominal_mpp(power) / mpp)))


class PlacementCheck:
    """Sees the centres of a file, and refuses the file if they do not fit the slide.

    Memory: 128 KiB, and a copy of the mask of the tissue with 256 px.

    Args:
        slide: the slide.
        placement: how the centres were placed.
        tissue: the slide's tissue; None if it is not known.
    """

    def __init__(
        self, slide: CellSlide, placement: Placement, tissue: "TissueMask | None"
    ) -> None:
        self._slide = slide
        self._placement = placement
        self._tissue = tissue
        self._size = np.asarray(slide.size_l0, dtype=np.float64)
        self._num_seen = 0
        self._num_outside = 0
        self._num_on_tissue = 0
        self._sample = np.zeros((0, 2))
        self._step = 1  # every so many-th centre is in the sample
        self._low = np.full(2, np.inf)
        self._high = np.full(2, -np.inf)

    def add(self, centers_l0: Floats) -> None:
        """Sees centres (N, 2), finite, also those outside the slide."""
        if not len(centers_l0):
            return
        first = -self._num_seen % self._step
        self._sample = np.concatenate([self._sample, centers_l0[first :: self._step]])
        while len(self._sample) > _SAMPLE:
            self._sample = self._sample[::2]
            self._step *= 2
        self._num_seen += len(centers_l0)
        self._num_outside += int(np.count_nonzero(~self._slide.holds(centers_l0)))
        self._low = np.minimum(self._low, centers_l0.min(axis=0))
        self._high = np.maximum(self._high, centers_l0.max(axis=0))
        if self._tissue is not None:
            self._num_on_tissue += int(np.count_nonzero(self.are_on_tissue(centers_l0)))

    @property
    def on_tissue(self) -> float | None:
        """Share of the centres that lie on tissue; None if the tissue is not known."""
        if self._tissue is None or not self._num_seen:
            return None
        return self._num_on_tissue / self._num_seen

    def finish(self, path: str) -> None:
        """Judges all centres.

        Raises:
            InvalidInputError: too many lie outside the slide or on glass; the message names the
                frame that would fit, if there is one.
        """
        if not self._num_seen:
            return
        width, height = self._slide.size_l0
        where = f"read as {self._placement.rule}, in {path!r}"
        if self._num_outside > _MAX_OUTSIDE * self._num_seen:
            raise InvalidInputError(
                f"cells must lie on the slide of {width} x {height} px, got "
                f"{self._num_outside:,} of {self._num_seen:,} outside: x from {self._low[0]:.0f} "
                f"to {self._high[0]:.0f} and y from {self._low[1]:.0f} to {self._high[1]:.0f}, "
                f"{where}; {self._remedy()}"
            )
        share = self.on_tissue
        if share is None or share > _WRONG_SHARE:
            return
        remedy = self._remedy()
        if share < _MIN_ON_TISSUE or "would" in remedy:
            raise InvalidInputError(
                f"cells must lie on tissue, got {1 - share:.0%} of {self._num_seen:,} on glass, "
                f"{where}; {remedy}"
            )

    def are_on_tissue(self, centers: Floats) -> Flags:
        """True for each centre on tissue; False outside the slide."""
        if self._tissue is None:
            return np.zeros(len(centers), dtype=bool)
        mask: MaskArray = self._tissue.mask
        pixels = np.floor(centers / self._tissue.frame.downsample_xy)
        columns = pixels[:, 0]
        rows = pixels[:, 1]
        height, width = mask.shape
        inside = (columns >= 0) & (columns < width) & (rows >= 0) & (rows < height)
        is_on = np.zeros(len(centers), dtype=bool)
        places = rows[inside].astype(np.int64), columns[inside].astype(np.int64)
        is_on[inside] = mask[places]
        return is_on

    def _share(self, centers: Floats) -> float:
        """Share of centres that are as they should be: on tissue, or on the slide."""
        if self._tissue is not None:
            return float(self.are_on_tissue(centers).mean())
        return float(self._slide.holds(centers).mean())

    def _remedy(self) -> str:
        """Sentence that names the frame in which the cells would fit."""
        general = "state their frame (px, um, or the µm of one px), or use this slide's own file"
        sample = self._sample
        source = (sample - self._placement.offset_l0) / np.asarray(
            self._placement.scale_xy
        )
        shares = {"with x and y swapped": self._share(sample[:, ::-1])}
        for frame in self._other_frames():
            other = placement_of(frame, self._slide)
            words = f"as {other.rule} (frame {frame})"
            shares[words] = self._share(other.centers_l0(source))
        best = max(shares, key=lambda words: shares[words])
        if shares[best] >= _RIGHT_SHARE:
            unit = "on tissue" if self._tissue is not None else "on the slide"
            return f"{shares[best]:.0%} would lie {unit} {best}"
        shift = self._best_shift()
        if shift is not None:
            return (
                f"nearly all would lie on tissue if moved by {shift[0]:+} px in x and "
                f"{shift[1]:+} px in y"
            )
        return general

    def _other_frames(self) -> list[str]:
        """Frames that people use: px, µm, and px of 0.25, 0.5, 1 and 2 µm."""
        frames = [PX]
        if all(0 < mpp < np.inf for mpp in self._slide.slide_mpp):
            frames += [UM, "0.25", "0.5", "1", "2"]
            mpp = float(np.mean(self._slide.slide_mpp))
            frames += [f"{mpp * factor:.6g}" for factor in (2, 4, 8, 16, 32)]
        placements = {frame: placement_of(frame, self._slide) for frame in frames}
        return [
            frame
            for frame, placement in placements.items()
            if not np.allclose(placement.scale_xy, self._placement.scale_xy, rtol=0.02)
        ]

    def _best_shift(self) -> tuple[int, int] | None:
        """Offset, level-0 px, by which nearly all centres would lie on tissue; None for none."""
        if self._tissue is None:
            return None
        scale = float(self._size.max()) / _SHIFT_PX
        shape = np.ceil(self._size[::-1] / scale).astype(int) + 2 * _MAX_SHIFT_TH
        mask = self._tissue.mask
        rows, columns = np.indices((_SHIFT_PX, _SHIFT_PX)).reshape(2, -1)
        points = (np.stack([columns, rows], axis=1) + 0.5).astype(np.float64) * scale
        tissue = np.zeros(shape)
        on_tissue = self.are_on_tissue(points)
        tissue[rows[on_tissue], columns[on_tissue]] = 1
        pixels = np.floor(self._sample / scale).astype(np.int64)
        near = (
            (pixels >= -_MAX_SHIFT_TH) & (pixels < shape[::-1] - _MAX_SHIFT_TH)
        ).all(1)
        if near.mean() < _RIGHT_SHARE or not mask.any():
            return None
        cells = np.zeros(shape)
        np.add.at(cells, tuple(pixels[near, ::-1].T), 1)
        # number of cells on tissue for each shift, by the theorem of correlation
        spectrum = np.fft.rfft2(tissue) * np.conj(np.fft.rfft2(cells))
        hits = np.fft.irfft2(spectrum, s=tuple(shape))
        reach = np.r_[-_MAX_SHIFT_TH : _MAX_SHIFT_TH + 1]
        near_hits = hits[np.ix_(reach, reach)]
        row, column = np.unravel_index(np.argmax(near_hits), near_hits.shape)
        if near_hits[row, column] < _RIGHT_SHARE * len(self._sample):
            return None
        return round(reach[column] * scale), round(reach[row] * scale)
