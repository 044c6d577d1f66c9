"""What a check is, what it sees and what it answers.

A check is a frozen dataclass: its fields are the settings of a `[[check]]` table, and calling it
with a view of a slide gives an outcome. Another package adds its own by entry point (docs/qc.md).
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, dataclass_transform

import numpy.typing as npt

from thinsection.arrays import Array, ArrayNamespace
from thinsection.arrays.morphology import region_areas
from thinsection.errors import ConfigError
from thinsection.types import RgbArray, Size

Score = float | str
Statistics = Literal["relative2mask", "relative2image", "absolute"]
# (width, height) of all, and (left, top, right, bottom) -> RGB px of that part, on the host
Regions = tuple[Size, Callable[[int, int, int, int], RgbArray]]
EMPTY_SCORE = -100.0  # what HistoQC writes where there is no px to measure
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(px|um|mm|um2|mm2)\s*")
_UNITS = {  # what is written, and µm or µm² of each unit
    "length": ("a length such as '10 px' or '80 um'", {"um": 1.0, "mm": 1000.0}),
    "area": ("an area such as '64 px' or '0.65 mm2'", {"um2": 1.0, "mm2": 1e6}),
}


def length(default: str) -> Any:
    """A field of a check that is a length: '10 px' of the work image, '80 um' or '0.5 mm'."""
    return field(default=default, metadata={"size": "length"})


def area(default: str) -> Any:
    """A field of a check that is an area: '64 px' of the work image, '4096 um2' or '0.65 mm2'."""
    return field(default=default, metadata={"size": "area"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one check answers."""

    mask_use: Array | None = (
        None  # bool (H, W), the mask after it; None leaves it as it was
    )
    touched: Array | None = (
        None  # bool (H, W), what it found (or filled); None if it only measures
    )
    scores: Mapping[str, Score] = field(
        default_factory=dict
    )  # columns of the slide's row
    # on the host: a picture, uint8 (H, W), or densities of R, G and B, float64 (bins, 3)
    tables: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    enforce: bool = (
        False  # takes `touched` out of the final mask again, whatever filled it since
    )
    warnings: tuple[str, ...] = ()  # sentences for the slide's row
    stain: str = (
        ""  # that was measured; the checks after it may have other settings for it
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class QcView:
    """One slide at the work resolution, as a check sees it. Arrays live on the device of `ns`."""

    ns: ArrayNamespace
    rgb: Array  # uint8 (H, W, 3)
    gray: Array  # float64 (H, W), luma in [0, 1]
    mask_use: Array  # bool (H, W), what the checks before this one have left
    mpp_th: float  # µm per px of the work image
    statistics: Statistics = "relative2mask"  # how a share is written
    gray_at: Callable[
        [float], Array
    ]  # nominal mpp -> gray, float32, from the same pass
    regions_at: Callable[
        [float], Regions
    ]  # mpp -> what reads parts of the slide at about that mpp
    probability_of: Callable[
        [Any], Array
    ]  # by-example check -> P of each px, float32 (H, W)
    artefact_maps: Callable[
        [], Mapping[str, Array]
    ]  # class -> P in 255ths, uint8 (H, W)
    touched: Mapping[str, Array] = field(
        default_factory=dict
    )  # by earlier checks, bool (H, W)
    # an associated image of the slide by name ('macro'), on the host; None where it has none
    associated: Callable[[str], RgbArray | None] = lambda name: None

    @property
    def gray8(self) -> Array:
        """The same gray, uint8."""
        return (self.gray * 255).astype(self.ns.xp.uint8)

    def shown(self, name: str) -> Array:
        """P of a class of artefacts at each px, float32 (H, W)."""
        return self.artefact_maps()[name] / self.ns.xp.float32(255)

    def length_px(self, text: str) -> float:
        """A length as px of the work image."""
        return _size_px(text, self.mpp_th, "length")

    def area_px(self, text: str) -> float:
        """An area as px of the work image."""
        return _size_px(text, self.mpp_th**2, "area")

    def share(self, new_mask: Array) -> float:
        """What a step took from `mask_use`, in the view's statistics."""
        left, before = (
            int(self.ns.xp.count_nonzero(m)) for m in (new_mask, self.mask_use)
        )
        if self.statistics == "relative2mask":
            return EMPTY_SCORE if before == 0 else 1.0 - left / before
        return (
            float(left)
            if self.statistics == "absolute"
            else left / float(new_mask.size)
        )

    def left(self, new: Array, column: str, *, enforce: bool = False) -> Outcome:
        """The outcome of a check that leaves `new` of the mask; its share is one column."""
        scores: dict[str, Score] = {column: self.share(new)}
        touched = self.mask_use & ~new
        return Outcome(mask_use=new, touched=touched, scores=scores, enforce=enforce)

    def found(self, found: Array, column: str) -> Outcome:
        """The outcome of a check that takes what it found, and shows what of it is on glass too."""
        return replace(
            self.left(self.mask_use & ~found, column, enforce=True), touched=found
        )

    def left_regions(
        self, new: Array, prefix: str, touched: Array | None = None
    ) -> Outcome:
        """The same with four columns, of the regions that it touched (else what it took)."""
        touched = self.mask_use & ~new if touched is None else touched
        scores = self.region_scores(prefix, touched, self.share(new))
        return Outcome(mask_use=new, touched=touched, scores=scores)

    def region_scores(self, prefix: str, mask: Array, share: float) -> dict[str, Score]:
        """Number, mean and largest area of the 8-connected regions of a mask, and a share."""
        areas = region_areas(self.ns, mask)
        return {
            f"{prefix}_num_regions": float(len(areas)),
            f"{prefix}_mean_area": float(areas.sum()) / max(1, len(areas)),
            f"{prefix}_max_area": float(areas.max()) if len(areas) else 0.0,
            f"{prefix}_percent": share,
        }


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class QcCheck(ABC):
    """One check: a subclass's fields are those of its `[[check]]` table, each with a default.

    The first line of a subclass's docstring is its help.
    """

    kind: ClassVar[
        str
    ]  # of the table; the entry point's name, where another package brings it
    needs: ClassVar[
        tuple[str, ...]
    ] = ()  # packages beyond ours that it imports, by import name
    guarded: ClassVar[bool] = (
        True  # False if taking most of a slide's tissue is no mistake: ink
    )
    fills: ClassVar[bool] = (
        False  # True if what it touches is given to the mask, not taken from it
    )
    name: str = ""  # unique in a pipeline: of the mask, its picture and, in most checks, the column
    statistics: Statistics | None = (
        None  # how its share is written; None as the pipeline says
    )

    def __init_subclass__(cls, kind: str = "", **attributes: bool) -> None:
        """`class Flat(QcCheck, kind="flat")` is a frozen dataclass; attributes are those above."""
        if kind:
            for name, value in {"kind": kind, **attributes}.items():
                setattr(cls, name, value)
            dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        """Lengths and areas are parsed once, so that a wrong one fails before any slide is read."""
        for f in fields(self):
            if "size" in f.metadata:
                _size_px(
                    getattr(self, f.name),
                    1.0,
                    f.metadata["size"],
                    f"{self.kind}.{f.name}",
                )
        if not self.name or "/" in self.name:
            raise ConfigError(
                f"{self.kind}.name must be a file name, got {self.name!r}"
            )

    @abstractmethod
    def __call__(self, view: QcView) -> Outcome:
        """What the check answers for a slide."""

    @property
    def removes_glass(self) -> bool:
        """Whether what it removes is plain background: drawn gray."""
        return False

    @property
    def files(self) -> tuple[str, ...]:
        """Picture files on which its answer depends."""
        return ()

    @property
    def image_mpps(self) -> tuple[float, ...]:
        """Nominal µm/px of the images, beside the work image, that it asks `gray_at` for."""
        return ()


def _size_px(text: str, um_per_px: float, what: str, key: str = "") -> float:
    """Px of the work image in a length (in an area, where um_per_px is µm²)."""
    (rule, um), match = _UNITS[what], _SIZE.fullmatch(text)
    if match is None or match[2] not in ("px", *um):
        raise ConfigError(f"{key or what} must be {rule}, got {text!r}")
    value = float(match[1])
    return value if match[2] == "px" else value * um[match[2]] / um_per_px
