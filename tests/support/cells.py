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


def scattered_polygons(
    count: int, *, seed: int = 0, pitch_px: float = 60.0, digits: int = 0
) -> list[shapely.Polygon]:
    """Nuclei that do not overlap: smooth outlines, rounded as contours of masks are."""
    rng = np.random.default_rng(seed)
    nuclei = []
    angles = np.linspace(0, 2 * np.pi, 33)[:-1]
    for center in _scattered_centers(count, pitch_px, rng):
        radii = rng.uniform(0.15, 0.3, 2) * pitch_px
        wave = 1 + 0.1 * np.sin(angles * rng.integers(2, 5) + rng.uniform(0, 6))
        turn = rng.uniform(0, np.pi)
        x = radii[0] * wave * np.cos(angles)
        y = radii[1] * wave * np.sin(angles)
        points = np.stack(
            [x * np.cos(turn) - y * np.sin(turn), x * np.sin(turn) + y * np.cos(turn)],
            axis=1,
        )
        points = np.round(points + center, digits)
        kept = np.r_[True, (np.diff(points, axis=0) != 0).any(axis=1)]
        nuclei.append(shapely.Polygon(points[kept]))
    return nuclei


def _scattered_centers(
    count: int, pitch_px: float, rng: np.random.Generator
) -> list[Floats]:
    """Places at least a pitch apart, anywhere in a square that they fill by a third."""
    edge = pitch_px * np.sqrt(3 * count)
    by_box: dict[tuple[int, int], list[Floats]] = {}
    centers: list[Floats] = []
    while len(centers) < count:
        center = rng.uniform(pitch_px, edge, 2)
        column, row = (center // pitch_px).astype(int).tolist()
        near = [
            other
            for dx in (-1, 0, 1)
            for dy in (-1, 0, 1)
            for other in by_box.get((column + dx, row + dy), ())
        ]
        if all(np.hypot(*(center - other)) >= pitch_px for other in near):
            centers.append(center)
            by_box.setdefault((column, row), []).append(center)
    return centers


def cut_at_lines(
    nuclei: list[shapely.Polygon], lines: list[float], count: int, *, axis: int = 0
) -> tuple[list[shapely.Polygon], list[int]]:
    """Cuts so many nuclei where a line crosses them; returns all, and the places of the parts."""
    kept: list[shapely.Polygon] = []
    parts: list[shapely.Polygon] = []
    num_cut = 0
    for nucleus in nuclei:
        low, high = nucleus.bounds[axis], nucleus.bounds[axis + 2]
        inside = [
            line
            for line in lines
            if low + 0.2 * (high - low) < line < high - 0.2 * (high - low)
        ]
        if not inside or num_cut == count:
            kept.append(nucleus)
            continue
        cut = inside[0]
        halves = []
        for side in (-1, 1):
            edge = 1e6
            box = [-edge, -edge, edge, edge]
            box[axis + 2 if side < 0 else axis] = cut
            half = nucleus.intersection(shapely.box(*box))
            halves += [part for part in shapely.get_parts(half) if part.area > 0]
        if len(halves) != 2:
            kept.append(nucleus)
            continue
        parts += halves
        num_cut += 1
    assert num_cut == count
    return [*kept, *parts], list(range(len(kept), len(kept) + len(parts)))
