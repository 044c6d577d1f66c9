"""What a run leaves is found as it stands: one features folder is taken, none or more refused."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.probe.make import results_folder, two_regions, write_tiles_h5

from thinsection.config import replace_flat
from thinsection.errors import ConfigError, DatasetError
from thinsection.evaluation.embeddings import (
    find_tile_files,
    read_embeddings,
    slide_files,
)
from thinsection.probe import ProbeConfig
from thinsection.probe.data.cases import load_cases
from thinsection.probe.data.load import load_tiles
from thinsection.store.tiles_h5 import TilesWriter, read_tiles

GRID = "256px_0.5mpp"


def test_a_features_folder_its_grid_and_the_whole_results_give_the_same_tiles(
    tmp_path: Path,
) -> None:
    run, labels = two_regions(tmp_path)
    folder = run / GRID / "features_toy"
    config = replace_flat(ProbeConfig(), {"labels": labels, "allow_leakage": True})
    sets = [
        load_tiles(path, config)
        for path in (run, run / GRID, folder, folder / "slide-1.h5")
    ]
    assert len(sets[0].val) > 0
    for other in sets[1:]:
        assert sets[0].val.ids == other.val.ids
        np.testing.assert_array_equal(sets[0].val.embeddings, other.val.embeddings)


def test_classes_that_were_drawn_are_the_labels_where_none_are_given(
    tmp_path: Path,
) -> None:
    run, _ = two_regions(tmp_path)
    config = replace_flat(ProbeConfig(), {"allow_leakage": True})
    with pytest.raises(ConfigError, match="labels must be set for tile embeddings"):
        load_tiles(run, config)
    (path,) = (run / GRID / "features_toy").glob("*.h5")
    coords = read_tiles(path).coords_l0
    tumour = np.clip((4000 - coords[:, 0]) / 512, 0, 1).astype("f4")
    with TilesWriter(grid_file(run, path.name), dim=0, attributes={}) as writer:
        writer.append(coords, None)
        for name, column in (
            ("Tumour", tumour),
            ("Stroma", 0.9 - tumour),
            ("x", tumour),
        ):
            writer.add_column(f"class_{name}" if name != "x" else name, column)
    data = load_tiles(run, config)
    assert data.class_names == ("Stroma", "Tumour")
    for split in (data.train, data.val):
        for name, label in zip(split.ids, split.labels, strict=True):
            assert label == (int(name.split(":")[1].split("x")[0]) < 4000 - 256)


def grid_file(run: Path, name: str) -> Path:
    (run / GRID / "tiles").mkdir(exist_ok=True)
    return run / GRID / "tiles" / name


def test_several_encoders_are_listed_and_one_is_asked_for(tmp_path: Path) -> None:
    run = results_folder(tmp_path)
    for name in ("features_a", "features_b"):
        write_tiles_h5(
            run / GRID / name / "s.h5", np.zeros((1, 2)), np.ones((1, 2), "f4")
        )
    message = rf"one folder of embeddings, got {GRID}/features_a, {GRID}/features_b in .*name one"
    with pytest.raises(DatasetError, match=message):
        find_tile_files(run)
    with pytest.raises(DatasetError, match=message):
        slide_files(run, ["s"])
    assert (
        slide_files(run / GRID / "features_b", ["s"])["s"].parent.name == "features_b"
    )


@pytest.mark.parametrize("layout", ["auto", "folder", "tiles"])
def test_a_run_without_features_is_refused_and_never_taken_for_pictures(
    layout: str, tmp_path: Path
) -> None:
    run = results_folder(tmp_path)
    for slide in ("a", "b", "c"):
        folder = run / "slides" / slide
        folder.mkdir()
        (folder / "slide.json").write_text("{}")
        Image.new("RGB", (8, 8)).save(folder / "thumbnail.jpg")
        write_tiles_h5(
            run / GRID / "tiles" / f"{slide}.h5", np.zeros((1, 2)), np.ones((1, 2))
        )
    config = replace_flat(ProbeConfig(), {"layout": layout})
    for path in (run, run / "slides", run / "slides" / "a"):
        with pytest.raises(
            DatasetError, match=r"results must contain embeddings, got no .*`thinsect"
        ):
            load_tiles(path, config)
    (run / "records").rmdir()  # killed before the first one
    with pytest.raises(DatasetError, match="results must contain embeddings"):
        load_tiles(run, config)


def test_features_without_labels_ask_for_labels(tmp_path: Path) -> None:
    run, _ = two_regions(tmp_path)
    for path in (run, run / GRID / "features_toy"):
        with pytest.raises(
            ConfigError, match="labels must be set for tile embeddings, got none"
        ):
            load_tiles(path, ProbeConfig())


def test_slide_embeddings_are_cases_where_there_are_no_tiles(tmp_path: Path) -> None:
    import h5py

    run = results_folder(tmp_path)
    folder = run / GRID / "slide_features_titan"
    folder.mkdir(parents=True)
    for i, name in enumerate("ab"):
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file["features"] = np.arange(3, dtype=np.float32) + i
    assert read_embeddings(folder / "b.h5").shape == (1, 3)
    (tmp_path / "l.csv").write_text("slide_id,label\na.svs,x\nb,y\n")
    cases = load_cases(
        tmp_path / "l.csv", replace_flat(ProbeConfig(), {"embeddings": run})
    )
    np.testing.assert_array_equal(cases.vectors, [[0, 1, 2], [1, 2, 3]])
    write_tiles_h5(
        run / GRID / "features_x" / "a.h5", np.zeros((2, 2)), np.ones((2, 5), "f4")
    )
    write_tiles_h5(run / GRID / "features_x" / "b.h5", np.zeros((2, 2)), np.eye(2, 5))
    cases = load_cases(
        tmp_path / "l.csv", replace_flat(ProbeConfig(), {"embeddings": run})
    )
    assert cases.vectors.shape == (2, 5)  # the mean of tiles goes first


def test_a_parquet_table_is_as_good_as_a_csv(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    np.save(tmp_path / "all.npy", np.arange(12, dtype=np.float32).reshape(6, 2))
    columns = {"row": [5, 0, 2, 3], "label": ["b", "a", "a", "b"]}
    columns["split"] = ["train", "train", "val", "val"]
    parquet.write_table(pa.table(columns), tmp_path / "m.parquet")
    config = replace_flat(ProbeConfig(), {"embeddings": tmp_path / "all.npy"})
    tiles = load_tiles(tmp_path / "m.parquet", config)
    np.testing.assert_array_equal(tiles.train.embeddings, [[10, 11], [0, 1]])
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(
        DatasetError, match=r"table must be a readable file, got .*bad\.parquet"
    ):
        load_tiles(tmp_path / "bad.parquet", config)
