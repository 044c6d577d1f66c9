"""OCELOT 2023 in the folder that its owners publish: cells of the cell patches."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from thinsection.errors import DatasetError
from thinsection.files.atomic import write_text
from thinsection.probe.data import images
from thinsection.probe.grid import suite_jobs

PX = 128  # of a drawn patch; a published one has 1,024


def published(root: Path) -> Path:
    """Two samples for training, of two slides, one for validation and one for the test."""
    base = root / "ocelot2023_v1.0.1"
    samples = {"001": "train", "002": "train", "401": "val", "538": "test"}
    pairs = {}
    for number, (name, split) in enumerate(samples.items()):
        # red is x, green is y, blue the sample
        y, x = np.mgrid[:PX, :PX]
        picture = np.stack([x, y, np.full_like(x, number)], axis=2).astype(np.uint8)
        for kind in ("cell", "tissue"):
            path = base / "images" / split / kind / f"{name}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            # a PNG by its bytes: exact pixels, and Pillow reads by content
            Image.fromarray(picture).save(path, format="PNG")
        cells = [(60 + number, 64, 1), (70, 50 + number, 2), (5, 120, 2)]
        lines = [",".join(map(str, cell)) for cell in cells]
        write_text(
            base / "annotations" / split / "cell" / f"{name}.csv", "\n".join(lines)
        )
        pairs[name] = {"slide_name": f"TCGA-AA-{number:04}-01Z-00-DX1", "subset": split}
    write_text(base / "metadata.json", json.dumps({"sample_pairs": pairs}))
    return base


def test_cells_are_squares_with_their_class_split_and_slide(tmp_path: Path) -> None:
    published(tmp_path)
    data = images.load_images("ocelot", tmp_path)  # the folder above works too
    assert data.class_names == ("other cell", "tumour cell")
    assert data.labels.tolist() == [0, 1, 1] * 3
    assert [rows.tolist() for rows in data.fold] == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]
    assert data.groups is not None
    assert data.groups.of_row[0] != data.groups.of_row[3]
    assert not any("538" in image.path.name for image in data.images)
    assert data.images[7].name == "cell/401.jpg:70x52"


def test_a_square_is_centred_on_its_cell_and_black_beyond_the_patch(
    tmp_path: Path,
) -> None:
    published(tmp_path)
    data = images.load_images("ocelot", tmp_path)
    tiles = [*images.read_images(data.images)]
    assert {tile.shape for tile in tiles if tile is not None} == {(96, 96, 3)}
    for ref, tile in zip(data.images, tiles, strict=True):
        assert ref.square is not None and tile is not None
        assert tile[48, 48, :2].tolist() == [ref.square.x, ref.square.y]
    corner = tiles[2]
    assert corner is not None
    assert not corner[:, :43].any()  # x 5 - 48 ... -1
    assert not corner[56:].any()  # y 128 ...
    assert corner[55, 43, :2].tolist() == [0, 127]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        (
            "annotations/train/cell/002.csv",
            "3,4,1\n3,4,7",
            r"'3,4,7' in line 2 of .*002",
        ),
        ("annotations/train/cell/009.csv", "3,4,1", r"no .*009\.jpg.*009\.csv"),
        ("metadata.json", '{"sample_pairs": {"001": {}}}', "slide_name"),
        ("metadata.json", '{"sample_pairs": {}}', r"got no '001' in .*metadata\.json"),
    ],
)
def test_a_bad_file_is_named(
    file: str, text: str, message: str, tmp_path: Path
) -> None:
    base = published(tmp_path)
    write_text(base / file, text)
    with pytest.raises(DatasetError, match=message):
        images.load_images("ocelot", base)


def test_a_cell_outside_its_patch_is_left_out_and_named(tmp_path: Path) -> None:
    base = published(tmp_path)
    write_text(base / "annotations/train/cell/001.csv", "300,4,1\n60,60,2")
    data = images.load_images("ocelot", base)
    reasons: dict[str, str] = {}
    tiles = [*images.read_images(data.images, reasons.__setitem__)]
    assert [tile is None for tile in tiles[:2]] == [True, False]
    (place,) = reasons
    assert place.endswith("001.jpg:300x4")
    assert "must lie in its image of 128 x 128 px, got 300, 4" in reasons[place]


def test_a_folder_of_another_kind_says_what_was_looked_for(tmp_path: Path) -> None:
    base = published(tmp_path)
    (base / "metadata.json").unlink()
    with pytest.raises(DatasetError, match=r"metadata\.json"):
        images.load_images("ocelot", tmp_path)


def test_a_task_of_a_suite_is_the_folder_and_not_its_metadata(tmp_path: Path) -> None:
    base = published(tmp_path)
    task = {"data": base.name, "layout": "ocelot"}
    jobs = suite_jobs(
        tmp_path / "suite.toml", {"encoders": ["a", "b"], "tasks": [task]}
    )
    assert {job.data for job in jobs} == {str(base)}
    assert [job.probe for job in jobs] == ["knn", "linear", "fewshot"] * 2
