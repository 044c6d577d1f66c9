"""Polygons drawn on slides: GeoJSON as QuPath writes it, level-0 px."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.errors import DatasetError
from thinsection.probe.tables import split_name

Ring = npt.NDArray[np.float64]  # (M, 2), x and y in level-0 px


@dataclass(frozen=True, slots=True)
class Region:
    """One labelled polygon.

    Attributes:
        label: name of its class.
        slide_id: whose slide; None where there is only one.
        split: 'train', 'val', or None.
        rings: outer rings and holes together: a point inside an odd number of them is inside.
    """

    label: str
    slide_id: str | None
    split: str | None
    rings: tuple[Ring, ...]

    def holds(self, points: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        """Which points (N, 2) lie inside, by the even-odd rule.

        Memory: O(N).
        """
        inside = np.zeros(len(points), dtype=bool)
        x, y = points[:, 0], points[:, 1]
        for ring in self.rings:
            for (x0, y0), (x1, y1) in zip(ring, np.roll(ring, -1, axis=0), strict=True):
                if y0 == y1:
                    continue
                spans = (y0 <= y) != (y1 <= y)
                inside ^= spans & (x < x0 + (y - y0) * (x1 - x0) / (y1 - y0))
        return inside


def read_regions(path: Path) -> list[Region]:
    """Labelled polygons of a GeoJSON file; the label is QuPath's classification name.

    Raises:
        DatasetError: not GeoJSON, a feature without label, or not a polygon.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DatasetError(f"labels must be GeoJSON, got {str(path)!r}: {error}") from error
    features = document.get("features") if isinstance(document, dict) else document
    if not isinstance(features, list) or not features:
        raise DatasetError(f"labels must be a FeatureCollection with features, got {str(path)!r}")
    return [_region(feature, i, path) for i, feature in enumerate(features)]


def _region(feature: Any, number: int, path: Path) -> Region:
    properties = feature.get("properties") or {}
    geometry = feature.get("geometry") or {}
    classification = properties.get("classification") or {}
    label = properties.get("label") or classification.get("name") or properties.get("name")
    kind = geometry.get("type")
    if not label or kind not in ("Polygon", "MultiPolygon"):
        raise DatasetError(
            f"each feature must be a labelled Polygon or MultiPolygon, got {kind!r} with label "
            f"{label!r} as feature {number} in {str(path)!r}; name a class in QuPath or set "
            "properties.classification.name"
        )
    polygons = [geometry["coordinates"]] if kind == "Polygon" else geometry["coordinates"]
    rings = tuple(
        np.asarray(ring, dtype=np.float64)[:, :2] for polygon in polygons for ring in polygon
    )
    split = properties.get("split")
    return Region(
        label=str(label),
        slide_id=properties.get("slide_id"),
        split=None if split is None else split_name(str(split), str(path)),
        rings=rings,
    )
