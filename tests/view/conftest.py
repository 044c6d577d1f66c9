"""A results folder of two slides, with hostile names, and what the viewer makes of it."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from thinsection.config import replace_flat
from thinsection.errors import MissingDependencyError
from thinsection.results.folder import Results, open_results
from thinsection.run.run import run
from thinsection.stages.config import RunConfig
from thinsection.store.tiles_h5 import TilesWriter
from thinsection.testing.synthetic import write_he_slide
from thinsection.view import Viewer

GRID = "256px_0.5mpp"
A, B = "a #1 &amp; 'ü' 日本", "b"
OWN_CLASS = "own <b>class"  # a column of categories, some tiles have none
HOSTILE = '<img src=x onerror="document.title=1">'


@pytest.fixture(scope="session")
def view_slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("view slides")
    write_he_slide(folder / f"{A}.svs", (2100, 1500), seed=3, downsamples=(1, 4))
    write_he_slide(folder / f"{B}.svs", (1300, 1700), seed=5, downsamples=(1, 4))
    return folder


@pytest.fixture(scope="session")
def view_results(
    tmp_path_factory: pytest.TempPathFactory, view_slides: Path
) -> Results:
    """With checks, measures, a graph, embeddings, a heatmap that no ledger names, and classes."""
    out = tmp_path_factory.mktemp("view") / "results"
    flat = {"memory": "256MiB", "pretrained": False, "qc": "auto", "measures": True}
    config = replace_flat(RunConfig(), {**flat, "graph": "knn:4"})
    run([view_slides], out=out, config=config, until="embeddings")
    results = open_results(out)
    for slide_id in results.slides:
        (grid,) = results.grids
        path = out / grid / "heatmap_m" / f"{slide_id}.h5"
        path.parent.mkdir(exist_ok=True)
        coords_l0 = results.tiles(slide_id).coords_l0
        with TilesWriter(
            path, dim=0, attributes={"tile_size_l0": [256, 256]}
        ) as writer:
            writer.append(coords_l0, None)
            writer.add_column(
                HOSTILE.replace("/", ""), coords_l0[:, 0].astype(np.float32)
            )
        words = [(HOSTILE, "fat", "")[row % 3] for row in range(len(coords_l0))]
        colors = {HOSTILE: "#FF0000", "fat": "#0000FF"}
        results.write_column(slide_id, OWN_CLASS, words, colors=colors)
    return results


@pytest.fixture(scope="session")
def annotations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A square with a hole, a line and points, of a class with a hostile name."""
    folder = tmp_path_factory.mktemp("annotations")
    outer, hole = (
        [[100, 100], [900, 100], [900, 900], [100, 900]],
        [[300, 300], [300, 500], [500, 500]],
    )
    shapes = [
        {"type": "Polygon", "coordinates": [[*outer, outer[0]], [*hole, hole[0]]]},
        {"type": "LineString", "coordinates": [[0, 0], [50, 60]]},
        {"type": "MultiPoint", "coordinates": [[5, 6], [7, 8]]},
    ]
    told = {"classification": {"name": HOSTILE, "color": [255, 0, 0]}}
    features = [{"type": "Feature", "geometry": s, "properties": told} for s in shapes]
    text = json.dumps({"type": "FeatureCollection", "features": features})
    (folder / f"{A}.geojson").write_text(text)
    return folder


@pytest.fixture(scope="session")
def viewer(view_results: Results, annotations: Path) -> Iterator[Viewer]:
    """Skipped with the reason where what it draws with was not fetched."""
    pytest.importorskip("uvicorn", reason="the extra `view` is not installed")
    try:
        running = Viewer(view_results, annotations=annotations, clusters=3)
    except MissingDependencyError as error:
        pytest.skip(str(error))
    with running:
        yield running


@pytest.fixture(scope="session")
def chromium() -> str:
    """Debian's."""
    if (path := shutil.which("chromium")) is None:
        pytest.skip("chromium is not installed")
    return path
