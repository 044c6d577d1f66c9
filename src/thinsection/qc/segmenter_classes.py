"""Classes of a segmenter as areas of checks: the table `[segmenter]` of a pipeline, and the check.

Quality control runs no segmenter. Its caller gives the classes of the slide.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from thinsection.arrays import morphology
from thinsection.config import nearest
from thinsection.errors import ConfigError, InvalidInputError
from thinsection.qc.checks.check import Outcome, QcCheck, QcView, area
from thinsection.types import Document, MaskArray, MaskFrame, Size

Scalar = TypeVar("Scalar", bound=np.generic)


class ClassMap(Protocol):
    """Classes of the pixels of a slide; a `Segmentation` is one."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the labels 1, 2, ..."""

    @property
    def labels(self) -> npt.NDArray[np.uint8]:
        """The class of each pixel of the frame, (H, W); 0 is none."""

    @property
    def frame(self) -> MaskFrame:
        """Place of the labels on the slide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmenterClasses:
    """A segmenter, and the check that each of its classes feeds."""

    # declared, or a TOML file
    name: str
    # file in place of the declared weights
    weights: str | None = None
    # class of the segmenter -> name of the check
    classes: Mapping[str, str]

    def __post_init__(self) -> None:
        if not self.classes:
            raise ConfigError(
                "segmenter.classes must name a class, got none; write a line such as "
                'fold = "folds"'
            )

    @property
    def check_names(self) -> tuple[str, ...]:
        """Names of the checks, each once, in the order of the table."""
        return tuple(dict.fromkeys(self.classes.values()))

    def as_mapping(self) -> Document:
        """Plain values, as the TOML file would hold them."""
        plain: Document = {"name": self.name, "classes": dict(self.classes)}
        if self.weights is not None:
            plain["weights"] = self.weights
        return plain

    def refuse_unknown(self, known: Iterable[str]) -> None:
        """Raises ConfigError if the segmenter lacks a class of the table."""
        known = tuple(known)
        for name in self.classes:
            if name not in known:
                raise ConfigError(
                    f"segmenter.classes must be classes of {self.name!r}, got {name!r}"
                    f"{nearest(name, known)}"
                )


class ClassCheck(QcCheck, kind="class"):
    """Removes pixels of the segmenter's classes that the table `[segmenter.classes]` gives it."""

    # as in that table
    name: str = "class"
    # True: the area is removed even if it is most of the tissue
    sure: bool = False
    # smaller finds are dropped
    min_area: str = area("0 um2")

    def __call__(self, view: QcView) -> Outcome:
        found = morphology.drop_small(
            view.ns, view.class_areas[self.name], view.area_px(self.min_area)
        )
        outcome = view.left_regions(
            view.mask_use & ~found, f"{self.name}_removed", found
        )
        return replace(outcome, enforce=True, sure_area=found if self.sure else None)

    @property
    def share_column(self) -> str:
        return f"{self.name}_removed_percent"


def beside(folder: Path, table: Document) -> Document:
    """The table `[segmenter]` of a file in `folder`: paths become relative to the process."""
    values = dict(table)
    for key in ("name", "weights"):
        value = values.get(key)
        if isinstance(value, str) and (key == "weights" or value.endswith(".toml")):
            values[key] = str(folder / value)
    return values


def class_areas(
    segmenter: SegmenterClasses,
    segmentation: ClassMap,
    *,
    size_l0: Size,
    frame: MaskFrame,
) -> dict[str, MaskArray]:
    """Area of each check's classes on the work image, bool (H, W).

    Args:
        segmenter: the table of the pipeline.
        segmentation: classes of the slide.
        size_l0: (width, height) of the slide.
        frame: place of the work image.

    Memory: 1 byte per pixel of the work image for each check.

    Raises:
        ConfigError: the segmentation lacks a class of the table.
        InvalidInputError: it belongs to a slide of another size.
    """
    segmenter.refuse_unknown(segmentation.classes)
    # the last row and column of the labels may extend beyond the slide
    for length, step, covered in zip(
        size_l0, segmentation.frame.downsample_xy, segmentation.frame.size_l0
    ):
        if abs(covered - length) > step + 1:
            raise InvalidInputError(
                f"segmentation must belong to the slide of {size_l0} px, got one of "
                f"{segmentation.frame.size_l0} px"
            )
    labels = resampled(segmentation.labels, segmentation.frame, frame)
    areas = {}
    for check_name in segmenter.check_names:
        numbers = [
            segmentation.classes.index(name) + 1
            for name, fed in segmenter.classes.items()
            if fed == check_name
        ]
        areas[check_name] = np.isin(labels, numbers)
    return areas


def resampled(
    pixels: npt.NDArray[Scalar], source: MaskFrame, target: MaskFrame
) -> npt.NDArray[Scalar]:
    """The pixels (H, W) of `source` at the centres of the pixels of `target`."""
    columns = _nearest(source, target, axis=0)
    rows = _nearest(source, target, axis=1)
    return np.asarray(pixels[rows[:, None], columns])


def _nearest(
    source: MaskFrame, target: MaskFrame, *, axis: int
) -> npt.NDArray[np.int64]:
    """Indices along an axis of `source` at the centres of the pixels of `target`."""
    centres_l0 = (np.arange(target.size_th[axis]) + 0.5) * target.downsample_xy[axis]
    places = (centres_l0 / source.downsample_xy[axis]).astype(np.int64)
    return np.minimum(places, source.size_th[axis] - 1)
