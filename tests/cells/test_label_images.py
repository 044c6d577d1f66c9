"""Cells of label images: read in bands, equal to the whole image."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import shapely
import tifffile
import zarr
from skimage.draw import ellipse
from skimage.measure import regionprops
from tests.support.cells import SLIDE

from thinsection.cells.batch import CellBatch
from thinsection.cells.label_images import (
    label_cells,
    label_frame,
    read_label_cells,
)
from thinsection.cells.sources import format_of, import_cells
from thinsection.errors import InvalidInputError

Labels = npt.NDArray[np.uint32]


def drawn_labels(*, seed: int = 0) -> Labels:
    """Ellipses that touch each other, in an image of 701 x 523 px."""
    rng = np.random.default_rng(seed)
    labels = np.zeros((701, 523), dtype=np.uint32)
    for number in range(1, 300):
        center = rng.uniform(0, labels.shape)
        y, x = center
        height, width = rng.uniform(3, 20, 2)
        rows, columns = ellipse(y, x, height, width, shape=labels.shape)
        labels[rows, columns] = number * 1000
    return labels


def in_bands(labels: Labels, height: int) -> Iterator[Labels]:
    for top in range(0, len(labels), height):
        yield labels[top : top + height]


def outlines_by_id(
    batches: Iterator[CellBatch],
) -> dict[str, shapely.Polygon]:
    shapes = {}
    for batch in batches:
        assert isinstance(batch.ids, pa.Array)
        for number, cell_id in enumerate(batch.ids.to_pylist()):
            first, last = batch.outlines.offsets[number : number + 2]
            assert cell_id not in shapes
            shapes[cell_id] = shapely.Polygon(batch.outlines.points[first:last])
    return shapes


@pytest.mark.parametrize("height", [1, 64, 97, 701])
def test_cells_are_those_of_scikit_image_whatever_the_bands(height: int) -> None:
    labels = drawn_labels()
    shapes = outlines_by_id(label_cells(in_bands(labels, height)))
    regions = regionprops(labels)
    assert set(shapes) == {str(region.label) for region in regions}
    num_whole = 0
    for region in regions:
        rows, columns = region.coords.T
        squares = shapely.box(columns, rows, columns + 1, rows + 1)
        pieces = shapely.get_parts(shapely.union_all(squares))
        largest = max(pieces, key=lambda piece: float(piece.area))
        wanted = shapely.Polygon(largest.exterior)
        assert shapes[str(region.label)].equals(wanted)
        num_whole += wanted.area == region.area
    assert num_whole > 100


def write_tiff(path: Path, labels: npt.NDArray[np.generic]) -> Path:
    tifffile.imwrite(
        path, labels, tile=(64, 64), compression="zlib", photometric="minisblack"
    )
    return path


def write_zarr(path: Path, labels: npt.NDArray[np.generic]) -> Path:
    group = zarr.open_group(path, mode="w", zarr_format=2)
    own = group.create_group("labels").create_group("nuclei")
    array = own.create_array(
        "0", shape=(1, *labels.shape), chunks=(1, 64, 64), dtype=labels.dtype
    )
    array[:] = labels[None]
    own.attrs["multiscales"] = [{"datasets": [{"path": "0"}], "version": "0.4"}]
    return path


@pytest.mark.parametrize("name", ["a.tif", "a.zarr"])
def test_files_give_cells_in_level_0_px(name: str, tmp_path: Path) -> None:
    labels = drawn_labels(seed=1)
    write = write_tiff if name == "a.tif" else write_zarr
    path = write(tmp_path / name, labels)
    assert format_of(path).name == "labels"
    table = import_cells(
        path, tmp_path / "out" / "a.parquet", name="own", slide=SLIDE, frame="0.5"
    ).to_table()
    wanted = outlines_by_id(label_cells(iter([labels])))
    shapes = shapely.from_wkb(table["geometry"].to_numpy())
    assert len(shapes) == len(wanted)
    scale = np.array([0.5 / 0.25, 0.5 / 0.3])
    for cell_id, shape in zip(table["id"].to_pylist(), shapes, strict=True):
        moved = shapely.transform(wanted[cell_id], lambda points: points * scale)
        assert shapely.hausdorff_distance(shape, moved) < 1e-6


def with_axes(path: Path, unit: str | None, *steps: dict[str, object]) -> Path:
    """Writes what OME-Zarr 0.4 says of units and transformations."""
    group = zarr.open_group(path / "labels" / "nuclei", mode="r+")
    (multiscale,) = group.attrs["multiscales"]
    multiscale["axes"] = [
        {"name": "c", "type": "channel"},
        {"name": "y", "type": "space", "unit": unit},
        {"name": "x", "type": "space", "unit": unit},
    ]
    multiscale["datasets"][0]["coordinateTransformations"] = list(steps[:1])
    multiscale["coordinateTransformations"] = list(steps[1:])
    group.attrs["multiscales"] = [multiscale]
    return path


def scale(*values: float) -> dict[str, object]:
    return {"type": "scale", "scale": list(values)}


def test_an_ome_zarr_states_its_own_micrometres(tmp_path: Path) -> None:
    labels = drawn_labels(seed=1)
    path = write_zarr(tmp_path / "a.zarr", labels)
    assert label_frame(path) == "px"
    # the first scale is that of the level, the second one that of all levels
    with_axes(path, "nanometer", scale(1, 2, 2), scale(1, 250, 250))
    assert float(label_frame(path)) == pytest.approx(0.5)
    areas = []
    for frame in (None, "0.5", "px"):
        table = import_cells(
            path, tmp_path / "out.parquet", name="own", slide=SLIDE, frame=frame
        )
        areas.append(table.to_table(["area_um2"])["area_um2"].to_numpy().sum())
    assert areas[0] == areas[1]
    assert areas[0] == pytest.approx(np.count_nonzero(labels) * 0.25, rel=0.05)
    assert areas[2] == pytest.approx(areas[0] * 0.25 * 0.3 / 0.25)
    # without a unit the numbers are none of the slide
    assert label_frame(with_axes(path, None, scale(1, 2, 2))) == "px"
    # OME-Zarr 0.3 has names of axes, and no units
    group = zarr.open_group(path / "labels" / "nuclei", mode="r+")
    (multiscale,) = group.attrs["multiscales"]
    group.attrs["multiscales"] = [{**multiscale, "axes": ["c", "y", "x"]}]
    assert label_frame(path) == "px"
    with_axes(path, "micrometer", scale(1, 0.5, 0.25))
    with pytest.raises(InvalidInputError, match=r"square pixels .*got 0.25 x 0.5 µm"):
        label_frame(path)
    translation: dict[str, object] = {"type": "translation", "translation": [0, 0, 90]}
    with_axes(path, "micrometer", scale(1, 0.5, 0.5), translation)
    with pytest.raises(InvalidInputError, match="moved by 90 µm"):
        label_frame(path)


@pytest.mark.parametrize(
    ("labels", "rule"),
    [
        (np.ones((70, 90), dtype=np.float32), "must be integers, got float32"),
        (np.full((70, 90), -2, dtype=np.int32), "must be >= 0, got -2"),
        (np.ones((3, 70, 90), dtype=np.uint8), "must have one plane"),
    ],
)
def test_an_image_without_labels_is_refused(
    labels: npt.NDArray[np.generic], rule: str, tmp_path: Path
) -> None:
    path = write_tiff(tmp_path / "a.tif", labels)
    with pytest.raises(InvalidInputError, match=rule):
        list(read_label_cells(path))


def test_a_damaged_tiff_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    path.write_bytes(b"no TIFF")
    with pytest.raises(InvalidInputError, match="must be readable"):
        list(read_label_cells(path))


def test_pieces_far_apart_are_two_cells_whatever_the_bands() -> None:
    labels = np.zeros((900, 40), dtype=np.uint32)
    labels[10:20, 5:9] = 7
    labels[200:230, 5:9] = 7
    labels[800:805, 5:9] = 7
    for height in (50, 900):
        batches = list(label_cells(in_bands(labels, height)))
        areas = [
            shape
            for batch in batches
            for shape in batch.outlines.shapes((1, 1)).area_um2
        ]
        assert areas == [120, 20]
        assert sum(map(len, batches)) == 2
