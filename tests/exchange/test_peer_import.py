"""Other tools' folders as results of ours: coordinates, fields of view, features, lists.

`test_peer_export` has the slides and says where the tools' own code comes from.
"""

import json
import os
import re
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from tests.exchange.test_peer_export import (
    ENCODER,
    SLIDES,
    out,
    read_by,
    slides,
    stored,
)
from typer.testing import CliRunner

from thinsection.cli.app import build_app
from thinsection.config import replace_flat
from thinsection.errors import StoreError
from thinsection.evaluation.embeddings import read_embeddings
from thinsection.exchange.peer_export import export_peer
from thinsection.exchange.peer_import import import_peer
from thinsection.results.folder import open_results
from thinsection.results.verify import verify
from thinsection.run.pooling import aggregate_folder
from thinsection.run.run import run
from thinsection.slide.open import open_slide
from thinsection.stages.config import RunConfig
from thinsection.store.hdf5 import DATASETS
from thinsection.store.tiles_h5 import TilesFile

__all__ = ["out", "slides"]  # fixtures
GRIDS = {
    "trident": "trident_20x_256px_0px_overlap",
    "clam": "clam_patches",
    "stamp": "stamp_256px",
    "slide2vec": "slide2vec_256px_0.5mpp",
}


@pytest.mark.parametrize("tool", GRIDS)
def test_what_was_exported_comes_back(
    tool: str, slides: Path, out: Path, tmp_path: Path
) -> None:
    export_peer(out, tmp_path / tool, tool)
    back = tmp_path / "back"
    how = {"slides": [slides], "encoder": ENCODER}
    assert import_peer(tmp_path / tool, back, tool, **how) == len(SLIDES)
    results = open_results(back)
    assert results.features == (f"{GRIDS[tool]}/features_{ENCODER}",)
    for name, (size, mpp, edge) in SLIDES.items():
        ours, theirs = stored(out, name), results.tile_embeddings(name)
        order = (
            np.lexsort(ours.coords_l0.T[::-1]) if tool == "slide2vec" else slice(None)
        )
        assert np.array_equal(theirs.coords_l0, ours.coords_l0[order])
        assert np.array_equal(theirs.features, ours.features[order])
        assert theirs.tile_px_l0 == edge
        told = results.ledgers[name].slide
        assert (told["width"], told["height"], told["mpp_x"]) == (*size, mpp)
        # slide2vec's lists know of no patients
        assert tool in ("trident", "slide2vec") or told["label"] in ("normal", "tumor")
    assert verify(back) == (2 * len(SLIDES), [])
    assert (back / "summary.csv").read_text().count(GRIDS[tool]) == len(SLIDES)


def check_colors(found: TilesFile, slide_path: Path) -> None:
    """The feature of each tile is the mean color of the px that we would read for it."""
    edge, features = found.tile_px_l0, found.features
    assert edge and features is not None and len(features) > 3
    with open_slide(slide_path) as slide:
        for (x, y), color in zip(found.coords_l0.tolist(), features, strict=True):
            if x + edge > slide.size[0] or y + edge > slide.size[1]:
                continue  # padded, each tool by a color of its own
            tile = slide.read_region((x, y), 0, (edge, edge))
            assert color == pytest.approx(tile.mean((0, 1)), abs=0.75)


@pytest.mark.parametrize(
    ("tool", "grid", "edges"),
    [
        ("trident", "trident_20x_256px_32px_overlap", (256, 512, 256)),
        ("clam", "clam_patches", (256, 256, 256)),
        ("stamp", "stamp_224px", (512, 1024, 513)),
    ],
)
def test_their_own_files_have_their_field_of_view(
    tool: str, grid: str, edges: tuple[int, ...], slides: Path, tmp_path: Path
) -> None:
    read_by(f"{tool}-writes", slides, tmp_path / tool)
    assert import_peer(
        tmp_path / tool, tmp_path / "back", tool, slides=[slides]
    ) == len(SLIDES)
    results = open_results(tmp_path / "back")
    assert results.grids == (grid,)
    for name, edge in zip(SLIDES, edges, strict=True):
        found = results.tile_embeddings(name)
        assert found.tile_px_l0 == edge
        check_colors(found, slides / f"{name}.svs")


def test_slide2vecs_own_files_are_read(
    slides: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_peer(out, tmp_path / "ours", "slide2vec")
    monkeypatch.setitem(os.environ, "SLIDE2VEC", str(tmp_path / "ours"))
    read_by("slide2vec-writes", slides, tmp_path / "theirs")
    assert import_peer(tmp_path / "theirs", tmp_path / "back", "slide2vec") == len(
        SLIDES
    )
    results = open_results(tmp_path / "back")
    for name, (_, _, edge) in SLIDES.items():
        ours, found = stored(out, name), results.tile_embeddings(name)
        order = np.lexsort(ours.coords_l0.T[::-1])
        assert found.tile_px_l0 == edge
        assert np.array_equal(found.coords_l0, ours.coords_l0[order])
        assert np.array_equal(found.features, ours.features[order].astype(np.float16))


def trident_job(job: Path, name: str = "a", *, features: bool = True) -> None:
    """mahmoodlab/TRIDENT, trident/IO.py: coords_to_h5; WSI.extract_patch_features, a91fa84."""
    coords = np.array([[0, 0], [514, 0], [0, 514]], dtype=np.int64)
    attributes = {
        "patch_size": 256,
        "patch_size_level0": 513,
        "level0_magnification": 40.16,
        "target_magnification": 20.0,
        "overlap": 0,
        "name": name,
        "savetodir": "x",
        "level0_width": 3000,
        "level0_height": 2000,
    }
    grid = job / "20x_256px_0px_overlap"
    for path in (
        grid / "patches" / f"{name}_patches.h5",
        grid / "features_uni_v2" / f"{name}.h5",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        with h5py.File(path, "w") as file:
            file["coords"] = coords
            file["coords"].attrs.update(attributes)
            if features and path.parent.name != "patches":
                file["features"] = np.arange(12, dtype=np.float32).reshape(3, 4)


def test_a_job_dir_without_slides_keeps_its_names_and_its_px(tmp_path: Path) -> None:
    trident_job(tmp_path / "job")
    (tmp_path / "job" / "list.csv").write_text("wsi,mpp\nsub/a.svs,0.249\n")
    assert import_peer(tmp_path / "job", tmp_path / "out", "trident") == 1
    results = open_results(tmp_path / "out")
    found = results.tile_embeddings("a", "uni2_h")  # our name of theirs
    assert found.tile_px_l0 == round(256 * 40.16 / 20)  # what its patcher reads
    told = results.ledgers["a"].slide
    assert (told["slide_path"], told["mpp_x"], told["width"]) == (
        "sub/a.svs",
        0.249,
        3000,
    )
    stored_file = tmp_path / "out" / GRIDS["trident"] / "features_uni2_h" / "a.h5"
    assert read_embeddings(stored_file).tolist() == np.arange(12).reshape(3, 4).tolist()
    (pooled,) = aggregate_folder(tmp_path / "out")
    assert pooled.status == "done"
    _, means = open_results(tmp_path / "out").slide_embeddings()
    assert means[0].tolist() == [4, 5, 6, 7]


def test_importing_again_changes_nothing_and_other_files_are_refused(
    tmp_path: Path,
) -> None:
    out, job = tmp_path / "out", tmp_path / "job"
    trident_job(job)
    import_peer(job, out, "trident")
    ledger = (out / "slides" / "a" / "slide.json").read_bytes()
    import_peer(job, out, "trident")
    assert (out / "slides" / "a" / "slide.json").read_bytes() == ledger
    before = open_results(out).tile_embeddings("a").features
    assert before is not None
    with h5py.File(
        job / "20x_256px_0px_overlap" / "features_uni_v2" / "a.h5", "r+"
    ) as file:
        file["features"][0] = 99
    with pytest.raises(StoreError, match="imported results must be new or unchanged"):
        import_peer(job, out, "trident")
    assert np.array_equal(open_results(out).tile_embeddings("a").features, before)


def test_a_second_import_that_fails_at_its_features_leaves_a_whole_folder(
    tmp_path: Path,
) -> None:
    out, job = tmp_path / "out", tmp_path / "job"
    trident_job(job)
    import_peer(job, out, "trident")
    before = open_results(out).tiles("a").attributes
    # the table gives the tiles other attributes, and one value of the features is another
    (job / "list.csv").write_text("wsi,mpp\nsub/a.svs,0.249\n")
    features = job / "20x_256px_0px_overlap" / "features_uni_v2" / "a.h5"
    with h5py.File(features, "r+") as file:
        file["features"][0] = 99
    with pytest.raises(StoreError, match="imported results must be new or unchanged"):
        import_peer(job, out, "trident")
    assert open_results(out).tiles("a").attributes != before
    assert verify(out)[1] == []  # no fault


def test_no_run_takes_what_was_imported_for_its_own(
    slides: Path, out: Path, tmp_path: Path
) -> None:
    export_peer(out, tmp_path / "job", "trident")
    back = tmp_path / "back"
    import_peer(tmp_path / "job", back, "trident", slides=[slides])
    ledgers = open_results(back).ledgers.values()
    keys = [record.key for ledger in ledgers for record in ledger.stages.values()]
    assert all(key.startswith("imported-") for key in keys)
    config = replace_flat(RunConfig(), {"memory": "256MiB"})
    summary = run([slides / "half.svs"], out=back, config=config, until="tiles")
    assert summary.counts["done"] == 1  # not skipped
    assert set(open_results(back).grids) == {GRIDS["trident"], "256px_0.5mpp"}
    assert len(open_results(back).tile_embeddings("half").coords_l0)


def test_stamp_needs_a_resolution_and_a_pickle_never_runs(tmp_path: Path) -> None:
    folder = tmp_path / "stamp"
    folder.mkdir()
    with h5py.File(folder / "a.h5", "w") as file:
        file["feats"], file["coords"] = (
            np.ones((2, 3), "f4"),
            np.array([[0.0, 0], [256, 0]]),
        )
        file.attrs.update({"unit": "um", "tile_size_um": 256.0, "tile_size_px": 224})
    left: list[str] = []
    with pytest.raises(StoreError, match="no readable file"):
        import_peer(folder, tmp_path / "out", "stamp", on_left_out=left.append)
    assert "slide_mpp is missing" in left[0]
    (folder / "slide.csv").write_text("PATIENT,FILENAME,mpp\np,a.h5,0.25\n")
    (folder / "clini.csv").write_text("PATIENT,LABEL\np,tumor\n")
    assert import_peer(folder, tmp_path / "out", "stamp") == 1
    results = open_results(tmp_path / "out")
    assert results.tile_embeddings("a").coords_l0.tolist() == [[0, 0], [1024, 0]]
    assert results.ledgers["a"].slide["label"] == "tumor"
    assert not list(tmp_path.rglob("*.tmp-*"))


def test_a_damaged_file_is_that_slides_own(out: Path, tmp_path: Path) -> None:
    folder = tmp_path / "slide2vec"
    export_peer(out, folder, "slide2vec")
    meta = folder / "tiles" / "half.coordinates.meta.json"
    meta.write_text(json.dumps({"tiling": {}}))

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save(Bomb(), folder / "tile_embeddings" / "snapped.pt")
    arguments = ["import", "slide2vec", str(folder), "--out", str(tmp_path / "back")]
    done = CliRunner().invoke(build_app(arguments), arguments)
    assert done.exit_code == 3, done.output
    assert "half: left out: tiling must be one of hs2p's" in done.output
    assert "snapped: left out" in done.output
    assert "1 slides of slide2vec are in" in done.output
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("tool", GRIDS)
def test_one_tools_folder_becomes_anothers(
    tool: str, slides: Path, out: Path, tmp_path: Path
) -> None:
    """By way of ours: the same tiles and features as from our own results."""
    export_peer(out, tmp_path / "first", tool)
    how = {"slides": [slides / "cohort.csv"], "encoder": ENCODER}
    import_peer(tmp_path / "first", tmp_path / "ours", tool, **how)
    export_peer(tmp_path / "ours", tmp_path / "second", "stamp")
    export_peer(out, tmp_path / "direct", "stamp")
    for path in (tmp_path / "direct").rglob("*.h5"):
        with (
            h5py.File(path) as direct,
            h5py.File(next((tmp_path / "second").rglob(path.name))) as by,
        ):
            rows = [np.lexsort(file["coords"][:].T) for file in (direct, by)]
            for name in ("coords", "feats"):
                assert np.array_equal(direct[name][:][rows[0]], by[name][:][rows[1]])
            told = dict(direct.attrs)
            if tool == "clam":  # whose tiles are px of level 0
                told["tile_size_px"] = SLIDES[path.stem][2]
            assert dict(by.attrs) == told


def test_what_nobody_knows_of_a_slide_leaves_it_out(tmp_path: Path) -> None:
    folder, left = tmp_path / "stamp", list[str]()
    folder.mkdir()
    with h5py.File(folder / "a.h5", "w") as file:
        file["feats"], file["coords"] = (
            np.ones((2, 3), "f4"),
            np.array([[0.0, 0], [256, 0]]),
        )
        file.attrs.update({"unit": "um", "tile_size_um": 256.0, "tile_size_px": 224})
    (folder / "slide.csv").write_text("PATIENT,FILENAME,mpp\np,a.h5,0.25\n")
    import_peer(folder, tmp_path / "out", "stamp")
    with pytest.raises(
        StoreError, match=r"none of 1 slide in .*; a: left out: size is"
    ):
        export_peer(
            tmp_path / "out", tmp_path / "clam", "clam", on_left_out=left.append
        )
    assert "size is missing in 'a'" in left[0]


@pytest.mark.parametrize(
    "attributes", [{}, {"tile_size": 224}, {"tile_size": 224.0, "unit": "px"}]
)
def test_stamps_files_before_version_2_have_tiles_of_224_px(
    tmp_path: Path, attributes: dict[str, object]
) -> None:
    """modeling/data.py: get_coords takes corners times 256/224 for µm."""
    stamp_file(tmp_path / "stamp", [[224, 0], [448, 224], [672, 0]], attributes)
    assert import_peer(tmp_path / "stamp", tmp_path / "out", "stamp") == 1
    found = open_results(tmp_path / "out").tile_embeddings("a")
    assert found.coords_l0.tolist() == [[1024, 0], [2048, 1024], [3072, 0]]
    assert (found.tile_px_l0, found.attributes["patch_size"]) == (1024, 224)
    export_peer(tmp_path / "out", tmp_path / "job", "trident")
    (file,) = (tmp_path / "job").glob("8.75x_224px_0px_overlap/patches/a_patches.h5")
    assert file.is_file()


@pytest.mark.parametrize(
    ("coords", "attributes", "reason"),
    [
        ([[0, 0], [256, 0]], {}, "got tiles of 256 and the attributes"),
        ([[0, 0], [224, 0]], {"tile_size": 512}, "got tiles of 512"),
        ([[0, 0]], {}, "got tiles of 0"),
    ],
)
def test_a_file_of_no_version_of_stamp_says_why(
    tmp_path: Path,
    coords: list[list[int]],
    attributes: dict[str, object],
    reason: str,
) -> None:
    stamp_file(tmp_path / "stamp", coords, attributes)
    with pytest.raises(StoreError, match=reason):
        import_peer(tmp_path / "stamp", tmp_path / "out", "stamp")


def stamp_file(
    folder: Path, coords: list[list[int]], attributes: dict[str, object]
) -> None:
    """One slide of STAMP with 0.25 µm/px."""
    folder.mkdir()
    with h5py.File(folder / "a.h5", "w") as file:
        file["feats"] = np.ones((len(coords), 3), "f4")
        file["coords"] = np.array(coords, dtype=np.float64)
        file.attrs.update({"extractor": "ctranspath", **attributes})
    (folder / "slide.csv").write_text("PATIENT,FILENAME,mpp\np,a.h5,0.25\n")


def test_tiles_of_two_encoders_are_counted_once(tmp_path: Path) -> None:
    trident_job(tmp_path / "job")
    grid = tmp_path / "job" / "20x_256px_0px_overlap"
    (grid / "features_second").mkdir()
    shutil.copy(grid / "features_uni_v2" / "a.h5", grid / "features_second" / "a.h5")
    import_peer(tmp_path / "job", tmp_path / "out", "trident")
    results = open_results(tmp_path / "out")
    assert [row["num_tiles"] for row in results.rows()] == [3]
    assert len(results.tiles("a").coords_l0) == 3
    arguments = ["aggregate", str(tmp_path / "out"), "--slide-encoder", "mean"]
    done = CliRunner().invoke(build_app(arguments), arguments)
    assert "1 of 1 slides have an embedding of mean" in done.output


def test_an_import_of_an_older_version_is_read_and_imported_again(
    tmp_path: Path,
) -> None:
    trident_job(tmp_path / "job")
    import_peer(tmp_path / "job", tmp_path / "out", "trident")
    (stored_file,) = (tmp_path / "out").glob("*/tiles/a.h5")
    with h5py.File(stored_file, "r+") as file:
        del file["tiles"]
        del file.attrs[DATASETS]
    ledger_file = tmp_path / "out" / "slides" / "a" / "slide.json"
    text = ledger_file.read_text()
    ledger_file.write_text(re.sub(r"imported-\w{4}", "imported-0000", text))
    assert len(open_results(tmp_path / "out").tiles("a").coords_l0) == 3
    assert import_peer(tmp_path / "job", tmp_path / "out", "trident") == 1
    assert ledger_file.read_text() == text
    with h5py.File(stored_file) as file:
        assert "tiles" in file


@pytest.mark.parametrize("tool", GRIDS)
def test_a_folder_of_nothing_leaves_nothing(tool: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"coordinates of {tool}, got none in"):
        import_peer(tmp_path / "typo", tmp_path / "out", tool)
    assert not (tmp_path / "out").exists()
