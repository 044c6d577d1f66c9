"""A results folder with two slides and two grids, one of them resampled."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import thinsection as ts
from thinsection.store.tiles_h5 import TilesWriter
from thinsection.testing.synthetic import write_he_slide

FINE = "64px_0.5mpp"
COARSE = "48px_1mpp"


@pytest.fixture(scope="session")
def two_slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the slides 'a' and 'b c'."""
    folder = tmp_path_factory.mktemp("two slides")
    for seed, (name, size) in enumerate({"a": (900, 700), "b c": (700, 1000)}.items()):
        write_he_slide(folder / f"{name}.svs", size, seed=seed, mpp=0.5)
    return folder


@pytest.fixture(scope="session")
def two_grids(two_slides: Path) -> Path:
    """Results of both slides on two grids; the fine one has the column 'heatmap_m:grade'.

    The grade of a tile is its row number modulo 3; every fifth tile has none (NaN).
    """
    out = two_slides / "results"
    for tile_px, tile_mpp in ((64, "0.5"), (48, "1")):
        ts.run(
            sorted(two_slides.glob("*.svs")),
            out=out,
            until="tiles",
            tile_px=tile_px,
            tile_mpp=tile_mpp,
            memory="64MiB",
        )
    results = ts.open_results(out)
    for slide_id in results.slides:
        coords_l0 = results.tiles(slide_id, FINE).coords_l0
        path = out / FINE / "heatmap_m" / f"{slide_id}.h5"
        path.parent.mkdir(exist_ok=True)
        with TilesWriter(path, dim=0, attributes={"name": slide_id}) as writer:
            writer.append(coords_l0, None)
            writer.add_table()
            writer.add_column("grade", grades(len(coords_l0)))
    return out


def grades(num_tiles: int) -> npt.NDArray[np.float32]:
    """Values of the column 'heatmap_m:grade'."""
    values = (np.arange(num_tiles) % 3).astype(np.float32)
    values[::5] = np.nan
    return values
