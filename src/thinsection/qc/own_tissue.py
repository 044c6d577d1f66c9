"""Tissue that somebody brings: a mask with its µm/px, a geometry, or a file of outlines."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from PIL import Image

from thinsection.arrays import as_numpy
from thinsection.errors import InvalidInputError, MissingMppError
from thinsection.qc.tissue import (
    Shares,
    TissueConfig,
    TissueMask,
    mask_shares,
    work_frame,
)
from thinsection.slide import Slide
from thinsection.types import CoordsL0, MaskArray, MaskFrame, Mpp, Size

if TYPE_CHECKING:
    from shapely import Geometry

    from thinsection.qc.result import QcResult
    from thinsection.types import Document

# tissue with its place on the slide
Tissue: TypeAlias = TissueMask | tuple[MaskArray, MaskFrame]
# what `as_tissue` makes one of
AnyTissue: TypeAlias = (
    "Tissue | QcResult | tuple[Any, float | Mpp] | Geometry | Document | str | Path"
)
_FORMS = (
    "(mask, µm/px), a shapely geometry in level-0 pixels, GeoJSON or a file of outlines"
)
# how a text of WKT begins
_WKT = ("POLYGON", "MULTIPOLYGON", "GEOMETRYCOLLECTION", "SRID=")
# relative difference between the extents of a mask and its slide, beside one mask pixel
_EXTENT_TOLERANCE = 0.01


@dataclass(frozen=True, kw_only=True)
class AnnotatedTissue(TissueMask):
    """Annotated polygons; their mask at the detector's resolution is only for pictures."""

    area: Geometry

    def fractions(self, coords_l0: CoordsL0, size_l0: Size) -> Shares:
        from thinsection.arrays.polygons import coverage

        return coverage(self.area, coords_l0, size_l0)


@dataclass(frozen=True, kw_only=True)
class PlacedTissue(TissueMask):
    """Somebody's mask; the mask at the detector's resolution is only for pictures."""

    own_mask: MaskArray  # bool (H, W), its corner at that of the slide
    downsample_xy: tuple[float, float]  # level-0 px per px of it

    def fractions(self, coords_l0: CoordsL0, size_l0: Size) -> Shares:
        return mask_shares(self.own_mask, self.downsample_xy, coords_l0, size_l0)


def as_tissue(slide: Slide, tissue: AnyTissue) -> Tissue:
    """Makes tissue of what somebody brings.

    Args:
        slide: an opened slide.
        tissue: a `TissueMask`; a `QcResult`, whose `tissue` is taken; a mask, bool (H, W) of NumPy
            or torch, with its frame or its µm/px (one number, or x and y), whose first pixel is
            the slide's corner; a shapely geometry, or GeoJSON as a dict, in level-0 pixels; or
            the path of a file of outlines, as `--tissue` takes it.

    Memory: as `tissue_mask` without its filters.

    Raises:
        InvalidInputError: none of these, or it does not fit the slide.
        MissingMppError: a mask comes with its µm/px, and the slide has none.
    """
    if isinstance(tissue, TissueMask):
        if tissue.frame.size_l0 != slide.size:
            raise InvalidInputError(
                f"tissue must belong to the slide of {slide.size} px, got one of "
                f"{tissue.frame.size_l0} px"
            )
        return tissue
    _refuse_several_geometries(tissue)
    if isinstance(tissue, tuple) and len(tissue) == 2:
        brought, place = tissue
        mask = _bool_mask(brought)
        if isinstance(place, MaskFrame):
            return mask, place
        return _placed(slide, mask, _mpp_xy(place))
    if hasattr(tissue, "__array_interface__") or hasattr(tissue, "detach"):
        raise InvalidInputError(
            "tissue must say its µm/px, got an array alone; pass (mask, 8.0) for a mask of "
            "8 µm/px"
        )
    from shapely import box

    from thinsection.qc.result import QcResult

    if isinstance(tissue, QcResult):
        return as_tissue(slide, tissue.tissue)
    area = _area(slide, tissue)
    width, height = slide.size
    if not area.intersects(box(0, 0, width, height)):
        bounds = tuple(area.bounds) if area.area else "no area"
        raise InvalidInputError(
            f"tissue must lie on the slide of {width} x {height} px, got {bounds}; its "
            "coordinates are level-0 pixels"
        )
    return annotated_tissue(slide, area)


def _refuse_several_geometries(tissue: object) -> None:
    """Raises InvalidInputError: several geometries in place of one."""
    if not isinstance(tissue, list | tuple | np.ndarray) or not len(tissue):
        return
    if hasattr(tissue[0], "geom_type"):  # of shapely, which a mask does not need
        raise InvalidInputError(
            f"tissue must be one geometry, got {len(tissue)} in a {type(tissue).__name__}; "
            "pass shapely.union_all(geometries)"
        )


def _bool_mask(brought: Any) -> MaskArray:
    """The mask as an array of NumPy. Raises InvalidInputError: it is not bool (H, W)."""
    rule = "tissue_mask must be bool of shape (H, W)"
    try:
        mask = as_numpy(brought)
    except (TypeError, ValueError):
        mask = np.asarray(None)
    if mask.dtype.kind not in "biufc":
        raise InvalidInputError(
            f"{rule}, got {type(brought).__name__}; pass an array of bool"
        )
    if mask.dtype == np.bool_ and mask.ndim == 2:
        return mask
    if isinstance(brought, Image.Image):
        raise InvalidInputError(
            f"{rule}, got an image of mode {brought.mode}; pass "
            "np.asarray(image.convert('L')) > 0"
        )
    form = f"{mask.dtype} {mask.shape}"
    if mask.ndim != 2:
        raise InvalidInputError(f"{rule}, got {form}; pass one plane, such as mask[0]")
    limit = 0.5 if mask.dtype.kind == "f" else 0
    raise InvalidInputError(f"{rule}, got {form}; pass mask > {limit}")


def _mpp_xy(mpp: object) -> Mpp:
    """µm/px along x and y of a mask."""
    try:
        numbers = as_numpy(mpp)
    except (TypeError, ValueError):
        numbers = np.asarray(None)
    are_numbers = numbers.dtype.kind in "iuf" and numbers.shape in ((), (2,))
    if not are_numbers or not ((numbers > 0) & (numbers < math.inf)).all():
        raise InvalidInputError(
            f"mask_mpp must be one or two numbers > 0, got {mpp!r}; pass (mask, 8.0) for a mask "
            "of 8 µm/px"
        )
    x, y = np.broadcast_to(numbers, 2).tolist()
    return float(x), float(y)


def _placed(slide: Slide, mask: MaskArray, mask_mpp: Mpp) -> PlacedTissue:
    if slide.slide_mpp is None:
        raise MissingMppError(
            f"slide_mpp is missing in {Path(slide.slide_path).name!r}, which is needed to "
            "place the mask; pass slide_mpp to open_slide"
        )
    x, y = (of_mask / of_slide for of_mask, of_slide in zip(mask_mpp, slide.slide_mpp))
    height, width = mask.shape
    for extent, downsample, length in (
        (slide.size[0], x, width),
        (slide.size[1], y, height),
    ):
        allowed = downsample + _EXTENT_TOLERANCE * extent
        if abs(length * downsample - extent) > allowed:
            raise InvalidInputError(
                f"tissue_mask must cover the slide of {slide.size[0]} x {slide.size[1]} px, got "
                f"{width} x {height} px that cover {width * x:.0f} x {height * y:.0f}; check "
                "its µm/px"
            )
    where = work_frame(slide, TissueConfig().mask_mpp)
    # of each px of the picture, the px of the mask at its centre
    columns = _centres(where.frame.size_th[0], where.frame.downsample_xy[0] / x, width)
    rows = _centres(where.frame.size_th[1], where.frame.downsample_xy[1] / y, height)
    return PlacedTissue(
        mask=np.asarray(mask[np.ix_(rows, columns)]),
        frame=where.frame,
        mask_mpp=where.mask_mpp,
        thumbnail=where.thumbnail,
        own_mask=mask,
        downsample_xy=(x, y),
    )


def _centres(count: int, step: float, most: int) -> list[int]:
    return [min(most - 1, int((place + 0.5) * step)) for place in range(count)]


def _area(slide: Slide, tissue: object) -> Geometry:
    """Area of outlines in level-0 px."""
    import shapely

    if isinstance(tissue, str | Path):
        stem = Path(slide.slide_path).stem
        _refuse_text_of_geometry(str(tissue))
        path = Path(tissue)
        if not path.is_file():
            raise InvalidInputError(
                f"tissue must be an existing file, got {str(path)!r}"
            )
        from thinsection.slide.annotations import RegionsConfig, read_regions

        regions = read_regions(path, slide.size, slide_id=stem)
        return regions.area(exclude=RegionsConfig().exclude_class)
    if isinstance(tissue, dict):
        try:
            tissue = shapely.from_geojson(json.dumps(tissue))
        except (TypeError, ValueError, shapely.errors.GEOSException) as error:
            raise InvalidInputError(f"tissue must be GeoJSON, got {error}") from None
    if not isinstance(tissue, shapely.Geometry):
        raise InvalidInputError(
            f"tissue must be a TissueMask, {_FORMS}, got {type(tissue).__name__}"
        )
    if not tissue.is_valid:
        raise InvalidInputError(
            f"tissue must not cross itself, got {shapely.is_valid_reason(tissue)}; pass "
            "shapely.make_valid(tissue)"
        )
    return shapely.union_all(
        [
            part
            for part in shapely.get_parts([tissue])
            if isinstance(part, shapely.Polygon | shapely.MultiPolygon)
        ]
    )


def _refuse_text_of_geometry(text: str) -> None:
    """Raises InvalidInputError: GeoJSON or WKT as text, where a text is a path."""
    begin = text.lstrip()[:40]
    rule = "tissue must be the path of a file if it is a text"
    if begin.startswith("{"):
        raise InvalidInputError(f"{rule}, got GeoJSON; pass json.loads(text)")
    if begin.upper().startswith(_WKT) and "(" in text:
        raise InvalidInputError(f"{rule}, got WKT; pass shapely.from_wkt(text)")


def annotated_tissue(
    slide: Slide, area: Geometry, config: TissueConfig | None = None
) -> AnnotatedTissue:
    """Tissue of polygons in level-0 px. Memory: as `as_tissue`."""
    from thinsection.arrays.polygons import rasterised

    config = config or TissueConfig()
    where = work_frame(slide, config.mask_mpp)
    return AnnotatedTissue(
        mask=rasterised(area, where.frame),
        frame=where.frame,
        mask_mpp=where.mask_mpp,
        thumbnail=where.thumbnail,
        area=area,
    )
