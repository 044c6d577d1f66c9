"""Our results in other tools' folders: what lies where, and what their own readers make of it.

Their readers run where THINSECTION_TEST_PEERS names a folder with clones of their repositories
(TRIDENT, CLAM, STAMP, slide2vec) and environments that have their packages, `v-TOOL/` or `v/`.
"""

import csv
import json
import os
import subprocess
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from tests.support import peer_readers
from typer.testing import CliRunner

from thinsection.cli.app import build_app
from thinsection.config import replace_flat
from thinsection.encode.registry import our_name, peer_encoder
from thinsection.errors import StoreError
from thinsection.exchange.peer_export import export_peer
from thinsection.files.atomic import read_table
from thinsection.results.folder import open_results
from thinsection.run.run import run
from thinsection.slide.open import open_slide
from thinsection.stages.config import RunConfig
from thinsection.store.hdf5 import damaged_datasets
from thinsection.store.tiles_h5 import TilesFile
from thinsection.testing.synthetic import write_he_slide

# file name -> (size, µm/px, level-0 px of a tile of 256 px at 0.5 µm/px)
SLIDES = {
    "half": ((1500, 1100), 0.5, 256),
    "TCGA-2.x": ((2200, 3000), 0.25, 512),
    "snapped": ((1700, 1500), 0.499, 256),
}
ENCODER = "efficientnet_lite0_seed0"
PEERS = os.environ.get("THINSECTION_TEST_PEERS", "")


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("slides")
    rows: list[tuple[str, ...]] = [("slide_path", "patient_id", "label")]
    for number, (name, (size, mpp, _)) in enumerate(SLIDES.items()):
        write_he_slide(
            root / f"{name}.svs", size, mpp=mpp, seed=number + 3, downsamples=(1, 4)
        )
        rows.append((f"{name}.svs", f"p{number}", "tumor" if number else "normal"))
    with (root / "cohort.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return root


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, slides: Path) -> Path:
    out = tmp_path_factory.mktemp("out") / "results"
    flat = {"memory": "256MiB", "pretrained": False, "slide_encoders": ["mean"]}
    config = replace_flat(RunConfig(), flat)
    assert run([slides / "cohort.csv"], out=out, config=config).counts["done"] == len(
        SLIDES
    )
    return out


def stored(out: Path, name: str) -> TilesFile:
    return open_results(out).tile_embeddings(name)


def tile_of(slides: Path, out: Path, name: str) -> np.ndarray:
    """The px of one of our tiles, as level 0 has them."""
    edge = SLIDES[name][2]
    with open_slide(slides / f"{name}.svs") as slide:
        x, y = stored(out, name).coords_l0[peer_readers.ROW]
        return slide.read_region((int(x), int(y)), 0, (edge, edge))


def read_by(tool: str, slides: Path, folder: Path) -> dict[str, np.ndarray]:
    """What the tool's own reader makes of the folder."""
    own = Path(PEERS) / f"v-{tool.removesuffix('-writes')}" / "bin" / "python"
    python = own if own.exists() else Path(PEERS) / "v" / "bin" / "python"
    if not PEERS or not python.exists():
        pytest.skip(
            "THINSECTION_TEST_PEERS names no folder with the tools' sources and packages"
        )
    target = folder.parent / f"{tool}.npz"
    paths = os.pathsep.join(str(slides / f"{name}.svs") for name in SLIDES)
    env = {**os.environ, "SLIDES": paths, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ""}
    command = [
        str(python),
        peer_readers.__file__,
        tool,
        PEERS,
        str(folder),
        str(target),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(target) as found:
        return dict(found)


def test_trident_finds_its_job_dir_and_its_files_are_ours(
    out: Path, tmp_path: Path
) -> None:
    """mahmoodlab/TRIDENT, trident/Processor.py, a91fa84."""
    job = tmp_path / "job"
    assert export_peer(out, job, "trident") == len(SLIDES)
    grid = job / "20x_256px_0px_overlap"
    for name in SLIDES:
        pairs = {
            grid / "patches" / f"{name}_patches.h5": f"tiles/{name}.h5",
            grid
            / f"features_{ENCODER}"
            / f"{name}.h5": f"features_{ENCODER}/{name}.h5",
        }
        for theirs, ours in pairs.items():
            assert theirs.samefile(out / "256px_0.5mpp" / ours)
        assert (grid / f"slide_features_mean-{ENCODER}" / f"{name}.h5").exists()
    rows = read_table(job / "slides.csv")
    assert [(Path(row["wsi"]).stem, float(row["mpp"])) for row in rows] == sorted(
        (name, mpp) for name, (_, mpp, _) in SLIDES.items()
    )


def test_clam_gets_the_field_of_view_in_px_of_level_0(
    out: Path, tmp_path: Path
) -> None:
    """mahmoodlab/CLAM, dataset_modules/dataset_h5.py: Whole_Slide_Bag_FP, 53e2409."""
    folder = tmp_path / "clam"
    assert export_peer(out, folder, "clam") == len(SLIDES)
    for name, (size, mpp, edge) in SLIDES.items():
        ours = stored(out, name)
        with h5py.File(folder / "patches" / f"{name}.h5") as file:
            attributes = dict(file["coords"].attrs)
            assert np.array_equal(file["coords"][:], ours.coords_l0)
        assert (attributes["patch_level"], attributes["patch_size"]) == (0, edge)
        assert edge * mpp == pytest.approx(128, rel=0.003)  # µm
        assert tuple(attributes["level_dim"]) == size
        features = torch.load(folder / "pt_files" / f"{name}.pt", weights_only=True)
        assert np.array_equal(features.numpy(), ours.features)
        assert damaged_datasets(folder / "h5_files" / f"{name}.h5") == (2, [])
    listed = [
        row["slide_id"] for row in read_table(folder / "process_list_autogen.csv")
    ]
    assert sorted(listed) == sorted(f"{name}.svs" for name in SLIDES)
    rows = read_table(folder / "dataset.csv")
    assert {row["slide_id"]: row["label"] for row in rows} == {
        "half": "normal",
        "TCGA-2.x": "tumor",
        "snapped": "tumor",
    }


def test_clam_reads_our_tiles_px_by_px(slides: Path, out: Path, tmp_path: Path) -> None:
    export_peer(out, tmp_path / "clam", "clam")
    found = read_by("clam", slides, tmp_path / "clam")
    for name, (_, _, edge) in SLIDES.items():
        ours = stored(out, name)
        assert found[f"{name}/edge_l0"] == edge
        assert np.array_equal(found[f"{name}/coords"], ours.coords_l0)
        assert np.array_equal(found[f"{name}/tile"], tile_of(slides, out, name))
        assert np.array_equal(found[f"{name}/features"], ours.features)
        assert np.array_equal(found[f"{name}/pt"], ours.features)


def test_trident_reads_our_tiles_and_pools_our_features(
    slides: Path, out: Path, tmp_path: Path
) -> None:
    export_peer(out, tmp_path / "job", "trident")
    found = read_by("trident", slides, tmp_path / "job")
    names, means = open_results(out).slide_embeddings()
    for name, (_, _, edge) in SLIDES.items():
        tile = tile_of(slides, out, name)
        assert found[f"{name}/edge_l0"] == edge
        assert np.array_equal(found[f"{name}/coords"], stored(out, name).coords_l0)
        if edge == 256:  # no resampling
            assert np.array_equal(found[f"{name}/tile"], tile)
        # the mean color of its own picture of that tile, in 256 px
        color = found[f"{name}/colors"][peer_readers.ROW]
        assert color == pytest.approx(tile.mean((0, 1)), abs=0.5)
        ours = means[names.index(name)]
        assert found[f"{name}/mean"].ravel() == pytest.approx(ours, abs=1e-5)


def test_stamp_gets_feats_and_micrometres(out: Path, tmp_path: Path) -> None:
    """KatherLab/STAMP, src/stamp/modeling/data.py: BagDataset, get_coords, c54ce06."""
    assert export_peer(out, tmp_path / "stamp", "stamp") == len(SLIDES)
    files = {path.stem: path for path in (tmp_path / "stamp").rglob("*.h5")}
    assert set(files) == set(SLIDES)
    for name, (_, mpp, edge) in SLIDES.items():
        ours = stored(out, name)
        with h5py.File(files[name]) as file:
            assert np.array_equal(file["feats"][:], ours.features)
            assert file["coords"][:] == pytest.approx(ours.coords_l0 * mpp)
            assert file.attrs["tile_size_um"] == pytest.approx(edge * mpp)
            assert (file.attrs["unit"], file.attrs["feat_type"]) == ("um", "tile")
            assert file.attrs["extractor"] == ENCODER
            assert "encoder" not in file.attrs
    rows = read_table(tmp_path / "stamp" / "slide.csv")
    assert {row["FILENAME"] for row in rows} == {f"{name}.h5" for name in SLIDES}
    labels = read_table(tmp_path / "stamp" / "clini.csv")
    assert {row["PATIENT"]: row["LABEL"] for row in labels} == {
        "p0": "normal",
        "p1": "tumor",
        "p2": "tumor",
    }


def test_stamp_reads_our_bags_in_micrometres(
    slides: Path, out: Path, tmp_path: Path
) -> None:
    export_peer(out, tmp_path / "stamp", "stamp")
    found = read_by("stamp", slides, tmp_path / "stamp")
    for name, (_, mpp, edge) in SLIDES.items():
        ours = stored(out, name)
        assert np.array_equal(found[f"{name}/features"], ours.features)
        assert found[f"{name}/coords_um"] == pytest.approx(
            ours.coords_l0 * mpp, abs=1e-3
        )
        assert found[f"{name}/tile_um"] == pytest.approx(edge * mpp)
        assert found[f"{name}/mpp"] == pytest.approx(edge * mpp / 256)
        assert found[f"{name}/label"] == ("normal" if name == "half" else "tumor")


def test_slide2vec_gets_tiles_by_x_then_y(out: Path, tmp_path: Path) -> None:
    """clemsgrs/slide2vec, slide2vec/artifacts.py, 7cfa6bf."""
    folder = tmp_path / "slide2vec"
    assert export_peer(out, folder, "slide2vec") == len(SLIDES)
    for name, (_, mpp, edge) in SLIDES.items():
        ours = stored(out, name)
        with np.load(folder / "tiles" / f"{name}.coordinates.npz") as tiles:
            coords = np.stack([tiles["x"], tiles["y"]], axis=1)
            assert np.array_equal(tiles["tile_index"], np.arange(len(coords)))
        features = torch.load(
            folder / "tile_embeddings" / f"{name}.pt", weights_only=True
        )
        assert coords.tolist() == sorted(ours.coords_l0.tolist())
        by_corner = dict(
            zip(map(tuple, ours.coords_l0.tolist()), ours.features, strict=True)
        )
        for corner, row in zip(coords.tolist(), features.numpy(), strict=True):
            assert np.array_equal(row, by_corner[tuple(corner)])
        told = json.loads(
            (folder / "tiles" / f"{name}.coordinates.meta.json").read_text()
        )
        assert told["tiling"]["read_tile_size_px"] * told["tiling"][
            "read_spacing_um"
        ] == (pytest.approx(edge * mpp))


def test_slide2vec_reads_our_tilings_and_embeddings(
    slides: Path, out: Path, tmp_path: Path
) -> None:
    export_peer(out, tmp_path / "slide2vec", "slide2vec")
    found = read_by("slide2vec", slides, tmp_path / "slide2vec")
    for name, (_, mpp, edge) in SLIDES.items():
        ours = stored(out, name)
        order = np.lexsort(ours.coords_l0.T[::-1])
        assert np.array_equal(found[f"{name}/coords"], ours.coords_l0[order])
        assert np.array_equal(found[f"{name}/features"], ours.features[order])
        assert found[f"{name}/edge_l0"] == edge
        assert found[f"{name}/read_um"] == pytest.approx(edge * mpp)


def test_what_is_there_is_never_replaced_by_other_bytes(
    out: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "clam"
    export_peer(out, folder, "clam")
    before = {
        p: (p.stat().st_ino, p.read_bytes()) for p in folder.rglob("*") if p.is_file()
    }
    export_peer(out, folder, "clam")  # again: nothing is other
    assert {p: p.read_bytes() for p in before} == {p: b for p, (_, b) in before.items()}
    assert not list(folder.rglob("*.tmp-*"))
    other = folder / "pt_files" / "half.pt"
    other.write_bytes(b"theirs")
    with pytest.raises(
        StoreError, match="file must be new or unchanged, got a different one at"
    ):
        export_peer(out, folder, "clam")
    assert other.read_bytes() == b"theirs"
    other.unlink()
    (folder / "dataset.csv").write_text("case_id,slide_id,label\nx,y,z\n")
    with pytest.raises(StoreError, match="table must be new or only gain rows"):
        export_peer(out, folder, "clam")


def test_a_copy_shares_no_bytes_with_ours(out: Path, tmp_path: Path) -> None:
    export_peer(out, tmp_path / "clam", "clam", copy=True)
    copied = tmp_path / "clam" / "h5_files" / "half.h5"
    ours = out / "256px_0.5mpp" / f"features_{ENCODER}" / "half.h5"
    assert copied.read_bytes() == ours.read_bytes()
    assert not copied.samefile(ours)


def test_the_command_says_what_was_left_out(out: Path, tmp_path: Path) -> None:
    ledger = out / "slides" / "half" / "slide.json"
    whole = ledger.read_text()
    ledger.write_text("{")
    try:
        arguments = ["export", "trident", str(out), "--out", str(tmp_path / "job")]
        result = CliRunner().invoke(build_app(arguments), arguments)
    finally:
        ledger.write_text(whole)
    assert result.exit_code == 3
    assert "half: left out: ledger must be readable" in result.stdout
    assert "2 slides are in" in result.stdout


@pytest.mark.parametrize(
    ("tool", "encoder", "label", "name"),
    [
        ("trident", "uni2_h", "uni2_h", "uni_v2"),
        ("trident", "uni", "uni_macenko", "uni_v1_macenko"),
        ("trident", "toy", "toy", "toy"),
        ("stamp", "h_optimus_0", "h_optimus_0", "h-optimus-0"),
        ("slide2vec", "conch_v15", "conch_v15", "conchv15"),
        ("clam", "uni", "uni", "uni"),
    ],
)
def test_an_encoder_has_the_tools_name(
    tool: str, encoder: str, label: str, name: str
) -> None:
    assert peer_encoder(tool, encoder, label) == name
    if label == encoder:
        assert our_name(name) == encoder
