"""Cells drawn at random: outlines, their GeoJSON as QuPath writes it, and their slide."""

import json
from pathlib import Path

import numpy as np
import shapely

from thinsection.cells.place import CellSlide
from thinsection.types import Floats, Json

SLIDE = CellSlide(slide_id="a", size_l0=(20_000, 31_000), slide_mpp=(0.25, 0.3))
CLASSES = ("Tumor", "Stroma", None)


def random_rings(
    count: int, *, seed: int = 0, size_l0: tuple[int, int] = SLIDE.size_l0
) -> list[Floats]:
    """Star-shaped outlines of 5 to 29 points, 10 to 60 px wide, anywhere on the slide."""
    rng = np.random.default_rng(seed)
    rings = []
    for _ in range(count):
        num_points = int(rng.integers(5, 30))
        angles = np.sort(rng.uniform(0, 2 * np.pi, num_points))
        radii = rng.uniform(0.6, 1, num_points) * rng.uniform(5, 30)
        center = rng.uniform(100, np.array(size_l0) - 100)
        squeeze = np.array([1, rng.uniform(0.4, 1)])
        points = np.stack([np.cos(angles), np.sin(angles)], axis=1)
        rings.append(center + points * radii[:, None] * squeeze)
    return rings


def closed(ring: Floats) -> list[list[float]]:
    """The points of a ring with the first again at the end, as lists."""
    return [*ring.tolist(), ring[0].tolist()]


def feature(ring: Floats, number: int, **more: Json) -> dict[str, Json]:
    """A detection of QuPath with a class and a measurement."""
    properties: dict[str, Json] = {
        "objectType": "detection",
        "measurements": {"Nucleus: Area": float(number), "Detection probability": 0.5},
    }
    name = CLASSES[number % len(CLASSES)]
    if name:
        properties["classification"] = {"name": name, "color": [200, 0, 0]}
    return {
        "type": "Feature",
        "id": f"id-{number}",
        "geometry": {"type": "Polygon", "coordinates": [closed(ring)]},
        "properties": properties,
        **more,
    }


def write_geojson(path: Path, features: list[Json]) -> Path:
    """Writes a FeatureCollection."""
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    return path


def polygons(rings: list[Floats]) -> list[shapely.Polygon]:
    """The rings as shapely's polygons."""
    return [shapely.Polygon(ring) for ring in rings]
