"""Contract of a quality check: its settings, the view that it gets, and its outcome.

A check is a frozen dataclass. Its fields are the settings of a `[[check]]` table, and calling it
with the view of a slide returns an outcome. Other packages add checks by entry points (docs/qc.md).
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self, dataclass_transform

import numpy as np
import numpy.typing as npt

from thinsection.arrays import Array, ArrayNamespace
from thinsection.arrays.bands import row_bands
from thinsection.arrays.filters import gray_from_rgb
from thinsection.arrays.morphology import region_areas
from thinsection.errors import ConfigError, InvalidInputError
from thinsection.types import RgbArray, Size

# a cell of the slide's row: a number, a label, or 'NA'
Score = float | str
Statistics = Literal["relative2mask", "relative2image", "absolute"]
# (width, height) of the whole image, and a function (left, top, right, bottom) -> RGB pixels of
# that part, on the host
Regions = tuple[Size, Callable[[int, int, int, int], RgbArray]]
# On the host: a picture, uint8 (H, W), or densities of R, G and B, float64 (bins, 3).
ReportTable = npt.NDArray[np.uint8] | npt.NDArray[np.float64]

# µm/px; on coarser pictures the artefact network cannot tell an artefact from tissue.
COARSEST_MPP = 12.0
# In names of files and columns about tissue that a check could not judge.
UNJUDGED = "unjudged"
# HistoQC's value if there is no pixel to measure.
EMPTY_SCORE = -100.0

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(px|um|mm|um2|mm2)\s*")
# µm or µm² of each unit
_UNITS = {
    "length": {"um": 1.0, "mm": 1000.0},
    "area": {"um2": 1.0, "mm2": 1e6},
}
_EXAMPLES = {
    "length": "a length such as '10 px' or '80 um'",
    "area": "an area such as '64 px' or '0.65 mm2'",
}


def length(default: str) -> str:
    """A field of a check that is a length: '10 px' of the work image, '80 um' or '0.5 mm'."""
    return field(default=default, metadata={"size": "length"})


def area(default: str) -> str:
    """A field of a check that is an area: '64 px' of the work image, '4096 um2' or '0.65 mm2'."""
    return field(default=default, metadata={"size": "area"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one check."""

    # bool (H, W), the mask after the check; None does not change the mask
    mask_use: Array | None = None
    # bool (H, W), pixels that the check found (or filled); None if it only measures
    affected_area: Array | None = None
    # columns of the slide's row
    scores: Mapping[str, Score] = field(default_factory=dict)
    tables: Mapping[str, ReportTable] = field(default_factory=dict)
    # True removes `affected_area` from the final mask again, if a later check has added it back
    enforce: bool = False
    # bool (H, W), the part of `affected_area` that is removed even if the check is overruled,
    # because it would remove most of the tissue; None for no part
    sure_area: Array | None = None
    # bool (H, W), pixels of tissue that the check could not judge: it neither removes nor approves
    # them; None if it judged all of them
    unjudged_area: Array | None = None
    # sentences for the slide's row
    warnings: tuple[str, ...] = ()
    # the measured stain; a pipeline may have other settings for this stain in later checks
    stain: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PenInk:
    """Pen ink on a picture, each bool (H, W)."""

    ink: Array
    # what looks like ink in tissue at the border of the picture
    unjudged: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class QcView:
    """View of one slide at the work resolution, for a check; arrays are on the device."""

    ns: ArrayNamespace
    rgb: Array  # uint8 (H, W, 3)
    mask_use: Array  # bool (H, W), pixels that earlier checks have not removed
    mpp_th: float  # µm per px of the work image
    statistics: Statistics = "relative2mask"  # form in which a share is written
    # nominal mpp -> gray image, float32, read in the same pass over the slide
    gray_at: Callable[[float], Array]
    # mpp -> reader of parts of the slide at about that mpp
    regions_at: Callable[[float], Regions]
    # by-example check -> probability per pixel, float32 (H, W)
    probability_of: Callable[[Any], Array]
    # class -> probability in 255ths, uint8 (H, W)
    artefact_maps: Callable[[], Mapping[str, Array]]
    # pen ink, which the default tissue mask removes
    pen_ink: Callable[[], PenInk]
    # name of an earlier check -> its affected area, bool (H, W)
    affected_areas: Mapping[str, Array] = field(default_factory=dict)
    # name of a check of kind 'class' -> area of its segmenter's classes, bool (H, W)
    class_areas: Mapping[str, Array] = field(default_factory=dict)
    # class of the check that gets this view, for its errors
    check: str = "a check"
    # name ('macro') -> associated image of the slide, on the host; None if the slide has none
    associated: Callable[[str], RgbArray | None] = lambda name: None

    @property
    def gray(self) -> Array:
        """Luma in [0, 1], float64 (H, W); it is computed anew each time."""
        gray = self.ns.xp.empty(self.mask_use.shape)
        for band in row_bands(len(gray)):
            gray[band.inside] = gray_from_rgb(self.ns, self.rgb[band.inside])
        return gray

    @property
    def gray8(self) -> Array:
        """The gray image as uint8; it is computed anew each time."""
        gray8 = self.ns.xp.empty(self.mask_use.shape, dtype=self.ns.xp.uint8)
        for band in row_bands(len(gray8)):
            gray = gray_from_rgb(self.ns, self.rgb[band.inside])
            gray8[band.inside] = (gray * 255).astype(gray8.dtype)
        return gray8

    def artefact_probability(self, name: str) -> Array:
        """Probability of a class of artefacts at each pixel, float32 (H, W)."""
        return self.artefact_maps()[name] / self.ns.xp.float32(255)

    def artefact_exceeds(self, name: str, threshold: float) -> Array:
        """True where a class of artefacts has a probability above a threshold, bool (H, W).

        Memory: 2 bytes per pixel; a comparison of `artefact_probability` takes 6.
        """
        xp = self.ns.xp
        above = xp.arange(256, dtype=xp.uint8) / xp.float32(255) > threshold
        return self.artefact_maps()[name] > 255 - int(above.sum())

    def length_px(self, text: str) -> float:
        """A length in px of the work image."""
        return _size_px(text, self.mpp_th, "length")

    def area_px(self, text: str) -> float:
        """An area in px of the work image."""
        return _size_px(text, self.mpp_th**2, "area")

    def share(self, new_mask: Array) -> float:
        """Share of `mask_use` that a check removes, in the form of the view's `statistics`."""
        after = int(self.ns.xp.count_nonzero(new_mask))
        before = int(self.ns.xp.count_nonzero(self.mask_use))
        return share_of(after, before, new_mask.size, self.statistics)

    def left(self, new: Array, column: str, *, enforce: bool = False) -> Outcome:
        """Outcome of a check that leaves the mask `new`; the removed share is one column."""
        check_mask("mask", new, self)
        return Outcome(
            mask_use=new,
            affected_area=self.mask_use & ~new,
            scores={column: self.share(new)},
            enforce=enforce,
        )

    def without(self, artefact: Array, column: str) -> Outcome:
        """Outcome of a check that removes an artefact; the artefact is drawn on glass too."""
        check_mask("mask", artefact, self)
        outcome = self.left(self.mask_use & ~artefact, column, enforce=True)
        return replace(outcome, affected_area=artefact)

    def left_regions(
        self, new: Array, prefix: str, affected_area: Array | None = None
    ) -> Outcome:
        """Outcome of a check that leaves the mask `new`, with four columns about regions.

        `affected_area` gives the regions; None means the pixels that the check removes.
        """
        check_mask("mask", new, self)
        if affected_area is None:
            affected_area = self.mask_use & ~new
        scores = self.region_scores(prefix, affected_area, self.share(new))
        return Outcome(mask_use=new, affected_area=affected_area, scores=scores)

    def region_scores(self, prefix: str, mask: Array, share: float) -> dict[str, Score]:
        """Number, mean and largest area of the 8-connected regions of a mask, and a share."""
        areas = region_areas(self.ns, mask)
        return {
            f"{prefix}_num_regions": float(len(areas)),
            f"{prefix}_mean_area": float(areas.sum()) / max(1, len(areas)),
            f"{prefix}_max_area": float(areas.max()) if len(areas) else 0.0,
            f"{prefix}_percent": share,
        }


def share_of(after: int, before: int, image_px: int, statistics: Statistics) -> float:
    """Share that a check removes; the two other forms of HistoQC count what it leaves."""
    if statistics == "relative2mask":
        return EMPTY_SCORE if before == 0 else 1.0 - after / before
    if statistics == "absolute":
        return float(after)
    return after / float(image_px)


def check_mask(name: str, mask: object, view: QcView) -> None:
    """Raises InvalidInputError: a mask of a check is not like the view's `mask_use`."""
    kind = str(getattr(mask, "dtype", type(mask).__name__))
    shape = getattr(mask, "shape", None)
    if kind != "bool" or shape != view.mask_use.shape:
        raise InvalidInputError(
            f"{name} of {view.check} must be bool of shape {view.mask_use.shape}, as "
            f"view.mask_use, got {kind} {'' if shape is None else shape}; compare an array "
            "of that shape, such as view.gray, with a threshold first"
        )


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class QcCheck(ABC):
    """One check: the fields of a subclass are those of its `[[check]]` table, with defaults.

    The first line of a subclass's docstring is its help.
    """

    # kind of the check in its table; for a check of another package the name of its entry point
    kind: ClassVar[str]
    # further packages that the check imports, by import name
    needs: ClassVar[tuple[str, ...]] = ()
    # True if the affected pixels are added to the mask, not removed from it
    fills: ClassVar[bool] = False
    # False if it only measures; a person can correct the other checks, except those that fill
    marks: ClassVar[bool] = True
    # µm/px of the coarsest work image on which the check works; on coarser images it does not run
    coarsest_mpp: ClassVar[float] = math.inf
    # unique in a pipeline: name of the mask, of its picture and, in most checks, of the column
    name: str = ""
    # form in which the share is written; None for the form of the pipeline
    statistics: Statistics | None = None

    def __init_subclass__(cls, kind: str = "", **attributes: float | str) -> None:
        """Makes `class Flat(QcCheck, kind="flat")` a frozen dataclass.

        `attributes` set class variables above, or replace properties below.
        """
        if kind:
            cls.kind = kind
            for name, value in attributes.items():
                setattr(cls, name, value)
            dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        """Parses lengths and areas, so that a wrong one fails before any slide is read."""
        for f in fields(self):
            if "size" in f.metadata:
                text = getattr(self, f.name)
                _size_px(text, 1.0, f.metadata["size"], key=f"{self.kind}.{f.name}")
        if not self.name or "/" in self.name:
            raise ConfigError(
                f"{self.kind}.name must be a file name, got {self.name!r}"
            )

    @abstractmethod
    def __call__(self, view: QcView) -> Outcome:
        """Runs the check on the view of a slide."""

    @property
    def share_column(self) -> str:
        """Column with the share of the tissue that the check removes, in the form of its view."""
        return self.name

    @property
    def removes(self) -> bool:
        """False if the check only shows and measures what it finds, and the tissue stays."""
        return True

    def removing(self) -> Self:
        """The same check, which removes what it finds from the tissue."""
        return self

    @property
    def removes_glass(self) -> bool:
        """True if the removed pixels are plain background, which is drawn gray."""
        return False

    @property
    def asks_network(self) -> bool:
        """True if the check uses the artefact network."""
        return False

    @property
    def files(self) -> tuple[str, ...]:
        """Picture files on which the outcome depends."""
        return ()

    @property
    def image_mpps(self) -> tuple[float, ...]:
        """Nominal µm/px of further images that the check reads by `gray_at`."""
        return ()


def _size_px(text: str, um_per_px: float, quantity: str, key: str = "") -> float:
    """Length in px of the work image, or area if `um_per_px` is in µm² per px."""
    units = _UNITS[quantity]
    match = _SIZE.fullmatch(text)
    if match is None or match[2] not in ("px", *units):
        raise ConfigError(
            f"{key or quantity} must be {_EXAMPLES[quantity]}, got {text!r}"
        )
    value = float(match[1])
    if match[2] == "px":
        return value
    return value * units[match[2]] / um_per_px
