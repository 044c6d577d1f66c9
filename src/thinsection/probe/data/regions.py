"""Labelled polygons of GeoJSON, as QuPath writes them; level-0 px."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.errors import DatasetError, rewording
from thinsection.probe.data import files
from thinsection.probe.data.files import check

Ring = npt.NDArray[np.float64]  # (M, 2), x and y in level-0 px


@dataclass(frozen=True, slots=True)
class LabelledRegion:
    """One labelled polygon."""

    label: str
    slide_id: str | None  # None where there is only one slide
    split: str | None  # 'train', 'val', 'test'
    case_id: str
    rings: tuple[Ring, ...]  # outer rings and holes: inside is inside an odd number of them

    def holds(self, points: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        """Which points (N, 2) lie inside, by the even-odd rule. Memory: O(N)."""
        inside, (x, y) = np.zeros(len(points), dtype=bool), points.T
        for ring in self.rings:
            for (x0, y0), (x1, y1) in zip(ring, np.roll(ring, -1, axis=0), strict=True):
                if y0 == y1:
                    continue
                spans = (y0 <= y) != (y1 <= y)
                inside ^= spans & (x < x0 + (y - y0) * (x1 - x0) / (y1 - y0))
        return inside


def read_regions(path: Path) -> list[LabelledRegion]:
    """Labelled polygons of a GeoJSON file; the label is QuPath's classification name."""
    with rewording("labels must be GeoJSON", path, OSError, ValueError, error=DatasetError):
        document = json.loads(path.read_text(encoding="utf-8"))
    features: Any = document.get("features") if isinstance(document, dict) else document
    some = isinstance(features, list) and features
    check(some, "labels must be a FeatureCollection with features", repr(str(path)))
    return [_region(feature, i, path) for i, feature in enumerate(features)]


def _region(feature: Any, number: int, path: Path) -> LabelledRegion:
    properties, geometry = (feature.get(key) or {} for key in ("properties", "geometry"))
    of_class = (properties.get("classification") or {}).get("name")
    label = properties.get("label") or of_class or properties.get("name")
    kind, remedy = geometry.get("type"), "set properties.classification.name"
    found = f"{kind!r} with label {label!r} as feature {number} in {str(path)!r}"
    rule = "each feature must be a labelled Polygon or MultiPolygon"
    fits = label and kind in ("Polygon", "MultiPolygon")
    check(fits, rule, f"{found}; name a class in QuPath or {remedy}")
    polygons = [geometry["coordinates"]] if kind == "Polygon" else geometry["coordinates"]
    rings = [np.asarray(ring, dtype=np.float64)[:, :2] for polygon in polygons for ring in polygon]
    if (split := properties.get("split")) is not None:
        split = files.split_name(str(split), str(path))
    case = str(properties.get("case_id") or "")
    return LabelledRegion(str(label), properties.get("slide_id"), split, case, tuple(rings))
