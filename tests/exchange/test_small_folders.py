"""Folders of other tools from fabricated tiles: what each file says, and what is refused.

No slide is read, so that each rule has a test of its own that takes a moment.
"""

import csv
import json
import os
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import tifffile
import torch

from thinsection.errors import InvalidInputError, OverwriteError, StoreError
from thinsection.exchange.anndata import export_anndata
from thinsection.exchange.peer_export import export_peer
from thinsection.exchange.peer_import import import_peer
from thinsection.exchange.peer_sources import SOURCES
from thinsection.exchange.qupath import SCRIPT, _groovy, _tile_classes, export_qupath
from thinsection.files.atomic import write_json
from thinsection.results.folder import open_results
from thinsection.run.pooling import aggregate_folder

COORDS = [[480, 0], [0, 480], [0, 0], [480, 960]]
EDGE_L0 = 512
GRID = "20x_256px_16px_overlap"
OURS = f"trident_{GRID}"


def trident_slide(
    job: Path, name: str, *, features: bool = True, power: float = 20.0
) -> None:
    """Tiles of 256 px at 20x with 16 px of overlap, of a slide of 3000 x 2000 px at 40x."""
    attributes = {
        "patch_size": 256,
        "patch_size_level0": EDGE_L0,
        "level0_magnification": 2 * power,
        "target_magnification": power,
        "overlap": 16,
        "name": name,
        "level0_width": 3000,
        "level0_height": 2000,
    }
    files = {job / GRID / "patches" / f"{name}_patches.h5": False}
    if features:
        files[job / GRID / "features_uni_v2" / f"{name}.h5"] = True
    for path, has_features in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with h5py.File(path, "w") as file:
            file["coords"] = np.array(COORDS, dtype=np.int64)
            file["coords"].attrs.update(attributes)
            if has_features:
                values = np.arange(len(COORDS) * 3, dtype=np.float32)
                file["features"] = values.reshape(-1, 3) + len(name)


TABLE = "wsi,mpp,case_id,label\nx/a.svs,0.25,p1,yes\nx/bb.svs,0.25,p1,yes\n"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Results of two slides, imported from a job_dir of TRIDENT."""
    job = tmp_path / "job"
    for name in ("bb", "a"):
        trident_slide(job, name)
    (job / "list.csv").write_text(TABLE)
    assert import_peer(job, tmp_path / "results", "trident") == 2
    return tmp_path / "results"


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# import


def test_an_imported_slide_has_what_the_table_says(results: Path) -> None:
    slide = open_results(results).ledgers["bb"].slide
    assert slide == {
        "slide_id": "bb",
        "slide_path": "x/bb.svs",
        "patient_id": "p1",
        "label": "yes",
        "mpp_x": 0.25,
        "mpp_y": 0.25,
        "width": 3000,
        "height": 2000,
    }


def test_imported_tiles_say_their_field_of_view(results: Path) -> None:
    attributes = open_results(results).tile_embeddings("a").attributes
    assert attributes["patch_size"] == 256
    assert attributes["patch_size_level0"] == EDGE_L0
    assert attributes["overlap"] == 16
    assert attributes["target_magnification"] == 20
    assert attributes["level0_magnification"] == 40
    assert list(attributes["tile_size_l0"]) == [EDGE_L0, EDGE_L0]
    assert list(attributes["stride_l0"]) == [480, 480]
    assert attributes["tile_mpp"] == 0.5
    assert list(attributes["slide_mpp"]) == [0.25, 0.25]
    assert attributes["imported_from"] == "trident"
    assert attributes["name"] == "a"


def test_without_a_resolution_tiles_have_a_power_alone(tmp_path: Path) -> None:
    trident_slide(tmp_path / "job", "a")
    import_peer(tmp_path / "job", tmp_path / "out", "trident")
    attributes = open_results(tmp_path / "out").tile_embeddings("a").attributes
    assert "tile_mpp" not in attributes
    assert "slide_mpp" not in attributes
    assert attributes["target_magnification"] == 20


def test_the_record_of_an_import_counts_slides_and_names_grids(results: Path) -> None:
    (record,) = open_results(results).records
    assert record.document["counts"] == {"imported": 2}
    assert record.document["grids"] == [OURS]
    assert record.document["config"]["import"]["tool"] == "trident"


def test_the_facts_of_an_imported_stage_say_where_it_comes_from(results: Path) -> None:
    stages = open_results(results).ledgers["a"].stages
    tiles = stages[f"{OURS}/tiles"]
    assert tiles.facts == {"num_tiles": 4, "imported_from": "trident"}
    assert tiles.needs == ()
    features = stages[f"{OURS}/features_uni2_h"]
    assert features.facts == {
        "num_tiles": 4,
        "imported_from": "trident",
        "encoder": "uni2_h",
        "dim": 3,
    }
    assert features.needs == (f"{OURS}/tiles",)


def test_the_users_encoder_names_features_that_no_file_names(tmp_path: Path) -> None:
    clam = tmp_path / "clam"
    (clam / "patches").mkdir(parents=True)
    (clam / "h5_files").mkdir()
    for path in (clam / "patches" / "a.h5", clam / "h5_files" / "a.h5"):
        with h5py.File(path, "w") as file:
            file["coords"] = np.array(COORDS, dtype=np.int64)
            attributes = {"patch_size": 256, "patch_level": 1, "patch_size_level0": 512}
            file["coords"].attrs.update({**attributes, "level_dim": (1500, 1000)})
            file["features"] = np.ones((4, 3), np.float16)
    import_peer(clam, tmp_path / "out", "clam", encoder="mine")
    opened = open_results(tmp_path / "out")
    assert opened.features == ("clam_patches/features_mine",)
    # the size of another level is not that of level 0
    assert "width" not in opened.ledgers["a"].slide
    stored = opened.tile_embeddings("a").features
    assert stored is not None
    assert stored.dtype == np.float16


def test_an_import_without_its_record_goes_on_and_replaces_nothing(
    results: Path, tmp_path: Path
) -> None:
    ledger = results / "slides" / "a" / "slide.json"
    text = ledger.read_text()
    ledger.unlink()
    assert import_peer(tmp_path / "job", results, "trident") == 2
    assert ledger.read_text() == text
    ledger.unlink()
    stored = results / OURS / "features_uni2_h" / "a.h5"
    with h5py.File(stored, "r+") as file:
        file["features"][0] = 99
    before = stored.read_bytes()
    with pytest.raises(StoreError, match="imported results must be new or unchanged"):
        import_peer(tmp_path / "job", results, "trident")
    assert stored.read_bytes() == before


def test_a_table_of_patients_gives_a_slide_the_label_of_its_patient(
    tmp_path: Path,
) -> None:
    job = tmp_path / "job"
    trident_slide(job, "a")
    (job / "b.csv").write_text("slide_id,patient_id\na,p1\n")
    (job / "a.csv").write_text("patient_id,label,split\np1,no,train\np2,x,test\n")
    import_peer(job, tmp_path / "out", "trident")
    slide = open_results(tmp_path / "out").ledgers["a"].slide
    assert (slide["patient_id"], slide["label"], slide["split"]) == (
        "p1",
        "no",
        "train",
    )


def test_a_slide_that_is_given_is_opened_with_the_resolution_of_the_table(
    tmp_path: Path,
) -> None:
    slide = tiff(tmp_path / "a.tiff")
    trident_slide(tmp_path / "job", "a")
    (tmp_path / "job" / "l.csv").write_text("wsi,mpp,label\na.svs,0.25,no\n")
    out = tmp_path / "out"
    import_peer(tmp_path / "job", out, "trident", slides=[slide])
    facts = open_results(out).ledgers["a"].slide
    assert (facts["mpp_x"], facts["mpp_y"]) == (0.25, 0.25)
    assert (facts["width"], facts["height"]) == (3000, 2000)
    assert facts["levels"] == [{"size": [3000, 2000], "downsample": 1.0}]
    assert facts["slide_path"] == str(slide)
    assert facts["reader"]
    assert facts["label"] == "no"
    assert open_results(out).ledgers["a"].source["samples"]


def tiff(path: Path) -> Path:
    """A slide of 3000 x 2000 px without a resolution."""
    pixels = np.zeros((2000, 3000, 3), np.uint8)
    tifffile.imwrite(path, pixels, tile=(256, 256), photometric="rgb")
    return path


@pytest.mark.parametrize("name", ["scan", "mine"])
def test_a_slide_is_known_by_its_id_and_by_the_name_of_its_file(
    tmp_path: Path, name: str
) -> None:
    tiff(tmp_path / "scan.tiff")
    cohort = tmp_path / "cohort.csv"
    cohort.write_text("slide_path,slide_id,slide_mpp\nscan.tiff,mine,0.25\n")
    trident_slide(tmp_path / "job", name)
    import_peer(tmp_path / "job", tmp_path / "out", "trident", slides=[cohort])
    facts = open_results(tmp_path / "out").ledgers[name].slide
    assert facts["slide_path"] == str(tmp_path / "scan.tiff")
    assert facts["mpp_x"] == 0.25


def test_an_import_writes_the_tables_and_the_page_of_its_folder(results: Path) -> None:
    rows = rows_of(results / "summary.csv")
    assert [row["slide_id"] for row in rows] == ["a", "bb"]
    assert {row["grid"] for row in rows} == {OURS}
    assert (results / "index.html").is_file()


def test_the_record_of_an_import_names_its_grids_in_order(tmp_path: Path) -> None:
    for number in range(6):
        trident_slide(tmp_path / "job", "a")
        (tmp_path / "job" / GRID).rename(tmp_path / "job" / f"grid{number}")
    import_peer(tmp_path / "job", tmp_path / "out", "trident")
    (record,) = open_results(tmp_path / "out").records
    assert record.document["grids"] == [f"trident_grid{number}" for number in range(6)]


def test_a_stored_file_of_other_tiles_is_not_taken_for_the_imported_one(
    results: Path, tmp_path: Path
) -> None:
    (results / "slides" / "a" / "slide.json").unlink()
    with h5py.File(results / OURS / "tiles" / "a.h5", "r+") as file:
        file["coords"][0] = (960, 960)
    with pytest.raises(StoreError, match="imported results must be new or unchanged"):
        import_peer(tmp_path / "job", results, "trident")


def test_a_stored_file_without_embeddings_is_not_taken_for_one_with(
    results: Path, tmp_path: Path
) -> None:
    (results / "slides" / "a" / "slide.json").unlink()
    tiles = results / OURS / "tiles" / "a.h5"
    shutil.copy(tiles, results / OURS / "features_uni2_h" / "a.h5")
    with pytest.raises(StoreError, match="imported results must be new or unchanged"):
        import_peer(tmp_path / "job", results, "trident")


def test_a_pickle_in_a_tiling_never_runs(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    slide2vec_slide(tmp_path / "s2v", packed=True)
    bomb = np.array([Bomb()], dtype=object)
    tiling = tmp_path / "s2v" / "tiles" / "a.coordinates.npz"
    np.savez(tiling, x=bomb, y=bomb)
    with pytest.raises(StoreError, match="tiling must be one of hs2p's"):
        import_peer(tmp_path / "s2v", tmp_path / "out", "slide2vec")
    embeddings = tmp_path / "s2v" / "tile_embeddings" / "a.npz"
    np.savez(tiling, x=np.zeros(1), y=np.zeros(1))
    np.savez(embeddings, features=bomb)
    with pytest.raises(StoreError, match="tiling must be one of hs2p's"):
        import_peer(tmp_path / "s2v", tmp_path / "out", "slide2vec")
    assert not (tmp_path / "ran").exists()


def test_edges_of_tridents_tiles_are_rounded(tmp_path: Path) -> None:
    trident_slide(tmp_path / "job", "a")
    for path in (tmp_path / "job").rglob("*.h5"):
        with h5py.File(path, "r+") as file:
            file["coords"].attrs["level0_magnification"] = 40.07  # 512.896 px
    import_peer(tmp_path / "job", tmp_path / "out", "trident")
    stored = open_results(tmp_path / "out").tile_embeddings("a")
    assert stored.attributes["patch_size_level0"] == 513


def test_a_half_stated_size_is_no_size(tmp_path: Path) -> None:
    trident_slide(tmp_path / "job", "a")
    for path in (tmp_path / "job").rglob("*.h5"):
        with h5py.File(path, "r+") as file:
            file["coords"].attrs["level0_height"] = 0
    import_peer(tmp_path / "job", tmp_path / "out", "trident")
    assert "width" not in open_results(tmp_path / "out").ledgers["a"].slide


def test_features_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    trident_slide(tmp_path / "job", "a")
    grid = tmp_path / "job" / GRID
    for name in "zyxwabc":
        shutil.copytree(grid / "features_uni_v2", grid / f"features_{name}")
    tiles = list(SOURCES["trident"].read(grid / "patches" / "a_patches.h5", {}))
    names = [each.encoder for each in tiles]
    assert names == sorted([*"zyxwabc", "uni_v2"])


def test_the_overlap_of_slide2vec_is_rounded_to_px(tmp_path: Path) -> None:
    slide2vec_slide(tmp_path / "s2v", packed=True)
    path = tmp_path / "s2v" / "tiles" / "a.coordinates.meta.json"
    document = json.loads(path.read_text())
    document["tiling"]["overlap"] = 0.0534  # 11.96 px
    path.write_text(json.dumps(document))
    import_peer(tmp_path / "s2v", tmp_path / "out", "slide2vec")
    assert (
        open_results(tmp_path / "out").tile_embeddings("a").attributes["overlap"] == 12
    )


@pytest.mark.parametrize(
    ("mpp", "edge_um", "edge_l0"), [(0.25, 0.75, 3), (0.2503, 256.0, 1023)]
)
def test_edges_of_stamps_tiles_are_rounded(
    tmp_path: Path, mpp: float, edge_um: float, edge_l0: int
) -> None:
    folder = tmp_path / "stamp"
    folder.mkdir()
    with h5py.File(folder / "a.h5", "w") as file:
        file["feats"] = np.ones((2, 3), "f4")
        file["coords"] = np.array([[0.0, 0], [edge_um, 0]])
        file.attrs.update({"unit": "um", "tile_size_um": edge_um, "tile_size_px": 4})
    (folder / "slide.csv").write_text(f"PATIENT,FILENAME,mpp\np,a.h5,{mpp}\n")
    import_peer(folder, tmp_path / "out", "stamp")
    stored = open_results(tmp_path / "out").tile_embeddings("a")
    assert stored.attributes["patch_size_level0"] == edge_l0


def test_an_unknown_tool_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"tool must be one of trident.*'x'"):
        import_peer(tmp_path, tmp_path / "out", "x")


def test_coords_without_a_magnification_are_refused(tmp_path: Path) -> None:
    trident_slide(tmp_path / "job", "a")
    path = tmp_path / "job" / GRID / "patches" / "a_patches.h5"
    with h5py.File(path, "r+") as file:
        del file["coords"].attrs["target_magnification"]
    with pytest.raises(StoreError, match=r"got no \['target_magnification'\]"):
        import_peer(tmp_path / "job", tmp_path / "out", "trident")


def test_features_of_other_tiles_are_refused(tmp_path: Path) -> None:
    trident_slide(tmp_path / "job", "a")
    path = tmp_path / "job" / GRID / "features_uni_v2" / "a.h5"
    with h5py.File(path, "r+") as file:
        file["coords"][0] = (7, 7)
    with pytest.raises(StoreError, match="must belong to the tiles in patches/"):
        import_peer(tmp_path / "job", tmp_path / "out", "trident")


def test_of_two_patterns_the_first_that_matches_counts_and_hidden_files_never(
    tmp_path: Path,
) -> None:
    files = ["patches/b_patches.h5", "patches/a_patches.h5", "patches/._a_patches.h5"]
    for name in (*files, "g/patches/c_patches.h5"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = SOURCES["trident"].find_files(tmp_path)
    assert [path.name for path in found] == ["a_patches.h5", "b_patches.h5"]
    assert SOURCES["clam"].find_files(tmp_path / "g" / "none") == []


def slide2vec_slide(folder: Path, *, packed: bool) -> None:
    """Tiles of 224 px at 0.5 µm/px with a quarter of overlap, of one slide."""
    (folder / "tiles").mkdir(parents=True)
    (folder / "tile_embeddings").mkdir()
    x, y = np.array(COORDS).T
    np.savez(folder / "tiles" / "a.coordinates.npz", x=x, y=y)
    tiling = {
        "requested_tile_size_px": 224,
        "requested_spacing_um": 0.5,
        "tile_size_lv0": 448,
        "overlap": 0.25,
    }
    document = {"tiling": tiling, "slide": {"dimensions": [3000, 2000]}}
    (folder / "tiles" / "a.coordinates.meta.json").write_text(json.dumps(document))
    embeddings = folder / "tile_embeddings"
    (embeddings / "a.meta.json").write_text(json.dumps({"encoder_name": "conchv15"}))
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    if packed:
        np.savez(embeddings / "a.npz", features=values)
    else:
        torch.save(torch.from_numpy(values).half(), embeddings / "a.pt")


@pytest.mark.parametrize("packed", [True, False])
def test_slide2vecs_tilings_have_their_overlap_and_size(
    tmp_path: Path, packed: bool
) -> None:
    slide2vec_slide(tmp_path / "s2v", packed=packed)
    import_peer(tmp_path / "s2v", tmp_path / "out", "slide2vec")
    opened = open_results(tmp_path / "out")
    assert opened.features == ("slide2vec_224px_0.5mpp/features_conch_v15",)
    stored = opened.tile_embeddings("a")
    assert stored.coords_l0.tolist() == COORDS
    assert stored.attributes["overlap"] == 56
    assert list(stored.attributes["stride_l0"]) == [336, 336]
    assert stored.features is not None
    assert stored.features.dtype == (np.float32 if packed else np.float16)
    assert stored.features.tolist() == np.arange(12).reshape(4, 3).tolist()
    slide = opened.ledgers["a"].slide
    assert (slide["width"], slide["height"]) == (3000, 2000)


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    slide2vec_slide(tmp_path / "s2v", packed=False)
    torch.save(torch.zeros(4), tmp_path / "s2v" / "tile_embeddings" / "a.pt")
    with pytest.raises(StoreError, match=r"Tensor in a\.pt is not a tensor \(N, D\)"):
        import_peer(tmp_path / "s2v", tmp_path / "out", "slide2vec")


# export


def test_trident_gets_links_to_our_files_and_a_list_of_slides(
    results: Path, tmp_path: Path
) -> None:
    aggregate_folder(results)
    assert export_peer(results, tmp_path / "t", "trident") == 2
    files = {str(p.relative_to(tmp_path / "t")) for p in (tmp_path / "t").rglob("*.*")}
    names = [f"{GRID}/patches/{name}_patches.h5" for name in ("a", "bb")]
    names += [f"{GRID}/features_uni_v2/{name}.h5" for name in ("a", "bb")]
    names += [f"{GRID}/slide_features_mean-uni_v2/{name}.h5" for name in ("a", "bb")]
    assert files == {*names, "slides.csv"}
    ours = results / OURS / "features_uni2_h" / "a.h5"
    assert ours.samefile(tmp_path / "t" / GRID / "features_uni_v2" / "a.h5")
    assert rows_of(tmp_path / "t" / "slides.csv") == [
        {"wsi": str(Path("x/a.svs").absolute()), "mpp": "0.25"},
        {"wsi": str(Path("x/bb.svs").absolute()), "mpp": "0.25"},
    ]


def test_clam_gets_edges_in_level_0_px_and_its_lists(
    results: Path, tmp_path: Path
) -> None:
    out = tmp_path / "c"
    assert export_peer(results, out, "clam") == 2
    with h5py.File(out / "patches" / "a.h5") as file:
        assert file["coords"][:].tolist() == COORDS
        attributes = dict(file["coords"].attrs)
    assert attributes["patch_size"] == EDGE_L0
    assert attributes["patch_level"] == 0
    assert attributes["patch_size_level0"] == EDGE_L0
    assert list(attributes["level_dim"]) == [3000, 2000]
    assert list(attributes["downsampled_level_dim"]) == [3000, 2000]
    assert list(attributes["downsample"]) == [1, 1]
    assert attributes["name"] == "a"
    tensor = torch.load(out / "pt_files" / "a.pt", weights_only=True)
    assert tensor.dtype == torch.float32
    assert tensor.tolist() == (np.arange(12).reshape(4, 3) + 1).tolist()
    assert rows_of(out / "process_list_autogen.csv") == [
        {"slide_id": "a.svs", "process": "0", "status": "processed"},
        {"slide_id": "bb.svs", "process": "0", "status": "processed"},
    ]
    assert rows_of(out / "dataset.csv") == [
        {"case_id": "p1", "slide_id": "a", "label": "yes"},
        {"case_id": "p1", "slide_id": "bb", "label": "yes"},
    ]


def test_slides_without_a_label_are_in_no_list_of_labels(tmp_path: Path) -> None:
    job = tmp_path / "job"
    for name in ("a", "bb"):
        trident_slide(job, name)
    (job / "l.csv").write_text("wsi,mpp,label\na.svs,0.25,\nbb.svs,0.25,yes\n")
    import_peer(job, tmp_path / "out", "trident")
    export_peer(tmp_path / "out", tmp_path / "c", "clam")
    assert rows_of(tmp_path / "c" / "dataset.csv") == [
        {"case_id": "bb", "slide_id": "bb", "label": "yes"}
    ]
    export_peer(tmp_path / "out", tmp_path / "s", "stamp")
    assert rows_of(tmp_path / "s" / "clini.csv") == [{"PATIENT": "bb", "LABEL": "yes"}]
    (job / "l.csv").write_text("wsi,mpp\na.svs,0.25\nbb.svs,0.25\n")
    import_peer(job, tmp_path / "none", "trident")
    export_peer(tmp_path / "none", tmp_path / "c2", "clam")
    export_peer(tmp_path / "none", tmp_path / "s2", "stamp")
    assert not (tmp_path / "c2" / "dataset.csv").exists()
    assert not (tmp_path / "s2" / "clini.csv").exists()


def test_stamp_gets_micrometres_and_one_line_a_patient(
    results: Path, tmp_path: Path
) -> None:
    out = tmp_path / "s"
    assert export_peer(results, out, "stamp") == 2
    with h5py.File(out / "uni2" / "a.h5") as file:
        assert file["coords"][:].tolist() == (np.array(COORDS) * 0.25).tolist()
        assert file["feats"][:].tolist() == (np.arange(12).reshape(4, 3) + 1).tolist()
        assert dict(file.attrs) == {
            **{"extractor": "uni2", "unit": "um", "feat_type": "tile"},
            **{"tile_size_um": 128.0, "tile_size_px": 256},
        } | {name: file.attrs[name] for name in file.attrs if "thinsection" in name}
    assert rows_of(out / "slide.csv") == [
        {"PATIENT": "p1", "FILENAME": "a.h5"},
        {"PATIENT": "p1", "FILENAME": "bb.h5"},
    ]
    assert rows_of(out / "clini.csv") == [{"PATIENT": "p1", "LABEL": "yes"}]


def test_slide2vec_gets_tiles_by_x_then_y_and_its_documents(
    results: Path, tmp_path: Path
) -> None:
    out = tmp_path / "v"
    assert export_peer(results, out, "slide2vec") == 2
    order = [2, 1, 0, 3]
    with np.load(out / "tiles" / "a.coordinates.npz") as file:
        corners = np.stack([file["x"], file["y"]], axis=1)
        assert file["tile_index"].tolist() == [0, 1, 2, 3]
        assert file["tissue_fractions"].tolist() == [1, 1, 1, 1]
    assert corners.tolist() == [COORDS[place] for place in order]
    tensor = torch.load(out / "tile_embeddings" / "a.pt", weights_only=True)
    assert tensor[:, 0].tolist() == [3 * place + 1 for place in order]
    document = json.loads((out / "tiles" / "a.coordinates.meta.json").read_text())
    tiling = document["tiling"]
    assert tiling["requested_tile_size_px"] == 256
    assert tiling["requested_spacing_um"] == 0.5
    assert tiling["read_level"] == 0
    assert tiling["read_tile_size_px"] == EDGE_L0
    assert tiling["read_spacing_um"] == 0.25
    assert tiling["tile_size_lv0"] == EDGE_L0
    assert tiling["tolerance"] == 0
    assert tiling["step_px_lv0"] == 480
    assert tiling["overlap"] == 16 / 256
    assert tiling["min_tissue_fraction"] == 0
    assert tiling["is_within_tolerance"] is False
    assert tiling["n_tiles"] == 4
    assert document["slide"] == {
        "dimensions": [3000, 2000],
        "base_spacing_um": 0.25,
        "level_downsamples": [1.0],
    }
    assert document["provenance"]["sample_id"] == "a"
    assert document["provenance"]["spacing_at_level_0"] == 0.25
    assert document["provenance"]["mask_path"] is None
    assert document["segmentation"]["tissue_method"] == "thinsection"
    assert document["segmentation"]["sthresh"] is None
    assert document["filtering"]["a_t"] is None
    assert document["artifact"]["tile_order"] == "x_then_y"
    embedding = json.loads((out / "tile_embeddings" / "a.meta.json").read_text())
    assert embedding["feature_dim"] == 3
    assert embedding["num_tiles"] == 4
    assert embedding["encoder_name"] == "uni2"
    assert embedding["tile_size_lv0"] == EDGE_L0
    assert embedding["requested_tile_size_px"] == 256
    assert embedding["requested_spacing_um"] == 0.5
    assert embedding["coordinates_npz_path"] == str(out / "tiles/a.coordinates.npz")
    row = rows_of(out / "process_list.csv")[1]
    assert row["sample_id"] == "bb"
    assert row["num_tiles"] == "4"
    assert row["annotation"] == "tissue"
    assert row["feature_path"] == str(out / "tile_embeddings" / "bb.pt")
    assert row["error"] == ""
    assert rows_of(out / "slides.csv")[0] == {
        "sample_id": "a",
        "image_path": "x/a.svs",
        "spacing_at_level_0": "0.25",
    }


def test_slide2vec_gets_the_resolution_along_x_and_the_one_that_was_asked_for(
    tmp_path: Path,
) -> None:
    trident_slide(tmp_path / "job", "a")
    (tmp_path / "job" / "l.csv").write_text("wsi,mpp\na.svs,0.2498x0.26\n")
    import_peer(tmp_path / "job", tmp_path / "out", "trident")
    out = tmp_path / "v"
    export_peer(tmp_path / "out", out, "slide2vec")
    document = json.loads((out / "tiles" / "a.coordinates.meta.json").read_text())
    assert document["provenance"]["spacing_at_level_0"] == 0.2498
    assert document["slide"]["base_spacing_um"] == 0.2498
    # 20x is 0.5 µm/px, whatever the scanner's pixels are
    assert document["tiling"]["requested_spacing_um"] == 0.5
    assert document["tiling"]["read_spacing_um"] == 0.2498
    assert rows_of(out / "process_list.csv")[0]["spacing_at_level_0"] == "0.2498"
    assert rows_of(out / "slides.csv")[0]["spacing_at_level_0"] == "0.2498"


def test_trident_needs_a_magnification(tmp_path: Path) -> None:
    clam = tmp_path / "clam"
    (clam / "patches").mkdir(parents=True)
    with h5py.File(clam / "patches" / "a.h5", "w") as file:
        file["coords"] = np.array(COORDS, dtype=np.int64)
        attributes = {"patch_size": 256, "patch_level": 0, "patch_size_level0": 512}
        file["coords"].attrs.update({**attributes, "level_dim": (3000, 2000)})
    import_peer(clam, tmp_path / "out", "clam")
    with pytest.raises(InvalidInputError, match="TRIDENT states a magnification"):
        export_peer(tmp_path / "out", tmp_path / "t", "trident")


def test_two_slides_of_one_file_name_are_refused_by_tools_that_go_by_it(
    tmp_path: Path,
) -> None:
    job = tmp_path / "job"
    for name in ("a", "bb"):
        trident_slide(job, name)
    (job / "l.csv").write_text(
        "slide_id,wsi,mpp\na,x/s.ome.tif,0.25\nbb,y/s.ome.tif,0.25\n"
    )
    import_peer(job, tmp_path / "out", "trident")
    for tool in ("trident", "clam"):
        with pytest.raises(InvalidInputError, match="'s' for 'a' and 'bb'"):
            export_peer(tmp_path / "out", tmp_path / tool, tool)
    assert export_peer(tmp_path / "out", tmp_path / "stamp", "stamp") == 2


@pytest.mark.parametrize(
    "folder", ["tiles", "features_uni2_h", "slide_features_mean-uni2_h"]
)
def test_a_slide_whose_stored_file_is_damaged_is_left_out(
    results: Path, tmp_path: Path, folder: str
) -> None:
    aggregate_folder(results)
    (results / OURS / folder / "a.h5").write_bytes(b"no HDF5 at all")
    left: list[str] = []
    out = tmp_path / "t"
    assert export_peer(results, out, "trident", on_left_out=left.append) == 1
    assert [line.partition(":")[0] for line in left] == ["a"]
    assert not list(out.rglob("a*.h5"))
    assert [row["wsi"] for row in rows_of(out / "slides.csv")] == [
        str(Path("x/bb.svs").absolute())
    ]


def test_an_export_of_nothing_says_the_first_reason(tmp_path: Path) -> None:
    job = tmp_path / "job"
    for name in ("a", "bb"):
        trident_slide(job, name)
    import_peer(job, tmp_path / "out", "trident")
    left: list[str] = []
    with pytest.raises(
        StoreError,
        match=r"stamp can hold, got none of 2 slides.*a: left out: slide_mpp",
    ):
        export_peer(tmp_path / "out", tmp_path / "s", "stamp", on_left_out=left.append)
    assert len(left) == 2
    with pytest.raises(InvalidInputError, match="slide_mpp is missing in 'a'"):
        export_peer(tmp_path / "out", tmp_path / "s", "stamp")


def test_tools_that_hold_embeddings_alone_refuse_bare_tiles(tmp_path: Path) -> None:
    trident_slide(tmp_path / "job", "a", features=False)
    (tmp_path / "job" / "l.csv").write_text("wsi,mpp\na.svs,0.25\n")
    import_peer(tmp_path / "job", tmp_path / "out", "trident")
    for tool in ("stamp", "slide2vec"):
        with pytest.raises(InvalidInputError, match="tiles must have embeddings"):
            export_peer(tmp_path / "out", tmp_path / tool, tool)
    assert export_peer(tmp_path / "out", tmp_path / "t", "trident") == 1
    assert not list((tmp_path / "t").rglob("features_*"))
    assert export_peer(tmp_path / "out", tmp_path / "c", "clam") == 1
    assert not (tmp_path / "c" / "h5_files").exists()


def test_a_second_export_adds_slides_and_refuses_other_tables(
    results: Path, tmp_path: Path
) -> None:
    out = tmp_path / "t"
    export_peer(results, out, "trident")
    trident_slide(tmp_path / "job", "ccc")
    import_peer(tmp_path / "job", results, "trident")
    assert export_peer(results, out, "trident") == 3
    assert len(rows_of(out / "slides.csv")) == 3
    (out / "slides.csv").write_text("wsi,mpp\nelsewhere.svs,1\n")
    with pytest.raises(OverwriteError, match="table must be new or only gain rows"):
        export_peer(results, out, "trident")


def test_a_second_export_does_not_touch_what_is_linked(
    results: Path, tmp_path: Path
) -> None:
    export_peer(results, tmp_path / "t", "trident")
    file = tmp_path / "t" / GRID / "features_uni_v2" / "a.h5"
    before = file.stat()
    export_peer(results, tmp_path / "t", "trident")
    # a new link to the same file would change the time
    assert file.stat().st_ctime_ns == before.st_ctime_ns
    assert file.stat().st_ino == before.st_ino


def test_tiles_that_changed_since_the_last_export_are_read_again(
    tmp_path: Path,
) -> None:
    job = tmp_path / "job"
    trident_slide(job, "a")
    (job / "l.csv").write_text("wsi,mpp\na.svs,0.25\n")
    import_peer(job, tmp_path / "out", "trident")
    export_peer(tmp_path / "out", tmp_path / "s1", "stamp")
    shutil.rmtree(tmp_path / "out")
    for path in job.rglob("*.h5"):
        with h5py.File(path, "r+") as file:
            file["coords"][0] = (960, 960)
    import_peer(job, tmp_path / "out", "trident")
    export_peer(tmp_path / "out", tmp_path / "s2", "stamp")
    with h5py.File(tmp_path / "s2" / "uni2" / "a.h5") as file:
        assert file["coords"][0].tolist() == [240, 240]


@pytest.mark.parametrize("copy", [False, True])
def test_another_file_in_the_way_is_kept(
    results: Path, tmp_path: Path, copy: bool
) -> None:
    out = tmp_path / "t"
    export_peer(results, out, "trident", copy=copy)
    file = out / GRID / "features_uni_v2" / "a.h5"
    ours = results / OURS / "features_uni2_h" / "a.h5"
    assert file.samefile(ours) is not copy
    file.unlink()
    file.write_bytes(b"theirs")
    with pytest.raises(OverwriteError, match="file must be new or unchanged"):
        export_peer(results, out, "trident", copy=copy)
    assert file.read_bytes() == b"theirs"


def test_an_imported_slide_of_no_size_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "stamp"
    folder.mkdir()
    with h5py.File(folder / "a.h5", "w") as file:
        file["feats"] = np.ones((2, 3), "f4")
        file["coords"] = np.array([[0.0, 0], [256, 0]])
        file.attrs.update({"unit": "um", "tile_size_um": 256.0, "tile_size_px": 224})
    (folder / "slide.csv").write_text("PATIENT,FILENAME,mpp\np,a.h5,0.25x0.26\n")
    import_peer(folder, tmp_path / "out", "stamp")
    stored = open_results(tmp_path / "out").tile_embeddings("a")
    assert stored.coords_l0.tolist() == [[0, 0], [1024, 0]]
    assert stored.attributes["target_magnification"] == pytest.approx(
        10 / (0.25 * 1024 / 224)
    )
    with pytest.raises(InvalidInputError, match="size is missing in 'a'"):
        export_peer(tmp_path / "out", tmp_path / "c", "clam")
    ledger = tmp_path / "out" / "slides" / "a" / "slide.json"
    text = ledger.read_text()
    assert '"slide_id": "a"' in text
    document = json.loads(text)
    document["slide"]["width"] = 3000  # and no height
    write_json(ledger, document)
    with pytest.raises(InvalidInputError, match="size is missing in 'a'"):
        export_peer(tmp_path / "out", tmp_path / "c", "clam")


@pytest.mark.parametrize(
    ("coords", "feats"), [((3, 2), (2, 3)), ((2, 3), (2, 3)), ((2, 2), (2,))]
)
def test_feats_and_coords_of_other_shapes_are_refused(
    tmp_path: Path, coords: tuple[int, ...], feats: tuple[int, ...]
) -> None:
    folder = tmp_path / "stamp"
    folder.mkdir()
    with h5py.File(folder / "a.h5", "w") as file:
        file["feats"] = np.ones(feats, "f4")
        file["coords"] = np.zeros(coords)
        file.attrs.update({"unit": "um", "tile_size_um": 256.0})
    (folder / "slide.csv").write_text("PATIENT,FILENAME,mpp\np,a.h5,0.25\n")
    with pytest.raises(StoreError, match="must belong to the same tiles"):
        import_peer(folder, tmp_path / "out", "stamp")


# QuPath and AnnData


def test_the_class_of_a_tile_is_that_of_its_largest_score() -> None:
    columns = {
        "m:score_A": np.array([0.1, 0.4, np.nan], np.float32),
        "m:score_B": np.array([0.2, 0.3, np.nan], np.float32),
        "cluster": np.array([1, 2, 3], np.float32),
    }
    assert _tile_classes(columns) == ["B", "A", "A"]


def test_a_class_covers_at_least_half_of_its_tile() -> None:
    columns = {
        "class_A": np.array([0.5, 0.4, 0.1], np.float32),
        "class_B": np.array([0.2, 0.45, 0.9], np.float32),
    }
    assert _tile_classes(columns) == ["A", "", "B"]


def test_clusters_are_classes_where_nothing_else_is() -> None:
    assert _tile_classes({"x:cluster": np.array([1, 12], np.float32)}) == [
        "Cluster 1",
        "Cluster 12",
    ]
    assert _tile_classes({"tissue_fraction": np.array([1, 1], np.float32)}) == []


def test_a_text_in_groovy_stays_as_it_is() -> None:
    assert _groovy("a'b\\c\nd") == "'a\\'b\\\\c\\nd'"


def test_qupath_gets_a_file_a_slide_and_a_script(results: Path, tmp_path: Path) -> None:
    assert export_qupath(results, tmp_path / "q") == 2
    features = json.loads((tmp_path / "q" / "a.geojson").read_text())["features"]
    assert len(features) == 4
    assert features[0]["geometry"]["coordinates"][0][0] == COORDS[0]
    script = (tmp_path / "q" / SCRIPT).read_text()
    assert "    'a.svs': 'a.geojson',\n    'bb.svs': 'bb.geojson'\n" in script
    assert _groovy(str(tmp_path / "q")) in script


def test_qupath_gets_the_slides_that_can_be_read(results: Path, tmp_path: Path) -> None:
    damaged = results / OURS / "tiles" / "a.h5"
    damaged.write_bytes(b"no HDF5")
    left: list[str] = []
    assert export_qupath(results, tmp_path / "q", on_left_out=left.append) == 1
    assert [line.partition(":")[0] for line in left] == ["a"]
    assert not (tmp_path / "q" / "a.geojson").exists()
    (results / OURS / "tiles" / "bb.h5").write_bytes(b"no HDF5")
    with pytest.raises(StoreError, match="QuPath can hold, got none of 2 slides"):
        export_qupath(results, tmp_path / "q2", on_left_out=left.append)
    with pytest.raises(StoreError):
        export_qupath(results, tmp_path / "q3")


def test_anndata_has_the_tiles_of_all_slides_with_their_columns(
    results: Path, tmp_path: Path
) -> None:
    anndata = pytest.importorskip("anndata")
    target = tmp_path / "t.h5ad"
    assert export_anndata(results, target) == 8
    table = anndata.read_h5ad(target)
    assert list(table.obs_names[:2]) == ["a:480x0", "a:0x480"]
    assert list(table.obs["slide_id"]) == ["a"] * 4 + ["bb"] * 4
    assert set(table.obs["patient_id"]) == {"p1"}
    assert table.obsm["spatial"].tolist() == COORDS * 2
    assert table.X[4].tolist() == [2, 3, 4]
    assert table.uns["encoder"] == "uni2_h"
    assert table.uns["features"] == f"{OURS}/features_uni2_h"


def test_anndata_leaves_out_a_damaged_slide_with_a_word(
    results: Path, tmp_path: Path
) -> None:
    anndata = pytest.importorskip("anndata")
    (results / OURS / "features_uni2_h" / "a.h5").write_bytes(b"no HDF5")
    with pytest.raises(StoreError):
        export_anndata(results, tmp_path / "t.h5ad")
    left: list[str] = []
    assert export_anndata(results, tmp_path / "t.h5ad", on_damage=left.append) == 4
    assert left[0].startswith("a: left out")
    assert set(anndata.read_h5ad(tmp_path / "t.h5ad").obs["slide_id"]) == {"bb"}


def test_anndata_without_embeddings_says_what_to_run(tmp_path: Path) -> None:
    pytest.importorskip("anndata")
    trident_slide(tmp_path / "job", "a", features=False)
    import_peer(tmp_path / "job", tmp_path / "out", "trident")
    with pytest.raises(StoreError, match="tile embeddings, got none"):
        export_anndata(tmp_path / "out", tmp_path / "t.h5ad")
