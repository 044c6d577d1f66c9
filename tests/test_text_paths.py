"""Functions that the documentation shows take a path as text, as they take a `Path`."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from thinsection.errors import ConfigError
from thinsection.qc import Outcome, Pipeline, QcCheck, QcView, run_qc
from thinsection.report.qc_files import load_qc, write_qc
from thinsection.report.qc_pictures import write_qc_pictures
from thinsection.slide import open_slide
from thinsection.slide.annotations import read_regions
from thinsection.testing.synthetic import (
    ArraySlide,
    PyramidKind,
    write_he_slide,
    write_pyramid,
)


@dataclass(frozen=True, kw_only=True)
class Left(QcCheck):
    """Keeps the left half."""

    kind = "left"
    name: str = "left"

    def __call__(self, view: QcView) -> Outcome:
        left = view.mask_use.copy()
        left[:, left.shape[1] // 2 :] = False
        return view.left(left, self.name)


@pytest.mark.parametrize("kind", [str, Path])
def test_a_quality_check_is_written_and_read_by_text(
    kind: type, tmp_path: Path
) -> None:
    slide = ArraySlide([np.full((320, 480, 3), 200, np.uint8)])
    pipeline = Pipeline(name="test", checks=(Left(),))
    result = run_qc(slide, pipeline, cache_dir=kind(tmp_path / "the cache"))
    folder = tmp_path / "slide a:1"
    folder.mkdir()
    write_qc(result, kind(folder))
    assert "left.png" in write_qc_pictures(result, kind(folder))
    assert (folder / "left.png").is_file()
    stored = (folder / "qc.zip").is_file(), (folder / "picture.jpg").is_file()
    assert stored == (True, True)
    with pytest.raises(ConfigError, match="qc check must be a known name"):
        load_qc(kind(folder))


@pytest.mark.parametrize("kind", [str, Path])
def test_slides_and_annotations_are_written_and_read_by_text(
    kind: type, tmp_path: Path
) -> None:
    write_he_slide(kind(tmp_path / "a 1.svs"), (300, 200))
    levels = write_pyramid(
        kind(tmp_path / "b.tif"), (120, 90), PyramidKind(compression=None)
    )
    with open_slide(kind(tmp_path / "a 1.svs")) as first:
        assert first.size == (300, 200)
    with open_slide(kind(tmp_path / "b.tif")) as second:
        pixels = second.read_region((0, 0), 0, second.size)
        np.testing.assert_array_equal(pixels, levels[0])
    ring = [[0, 0], [50, 0], [50, 40], [0, 40], [0, 0]]
    feature = {
        "type": "Feature",
        "geometry": {"type": "Polygon", "coordinates": [ring]},
        "properties": {"classification": {"name": "tumour"}},
    }
    point = {
        "type": "Feature",
        "geometry": {"type": "Point", "coordinates": [5, 5]},
        "properties": {},
    }
    document = {"type": "FeatureCollection", "features": [feature, point]}
    path = tmp_path / "a 1.geojson"
    path.write_text(json.dumps(document))
    regions = read_regions(kind(path), (300, 200))
    assert regions == read_regions(path, (300, 200))
    assert "a 1.geojson" in str(regions.notes)
