"""Embeddings of patients: late and early, in folders of runs and of TRIDENT."""

import json
from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np
import pytest
from safetensors.torch import save_file
from tests.run.make import write_features
from tests.support.author_embeddings import seeded_tiles
from typer.testing import CliRunner

import thinsection as ts
from thinsection.cli.app import build_app
from thinsection.errors import ConfigError, StoreError
from thinsection.pool import load_slide_encoder, patient_embedding
from thinsection.pool.attention_pools import ChiefSlideEncoder
from thinsection.pool.moozy import MoozySizes, MoozySlideEncoder
from thinsection.run.patients import write_patients
from thinsection.run.pooling import aggregate_folder
from thinsection.stages.config import AggregateRunConfig, PoolingConfig
from thinsection.store.tiles_h5 import read_slide_embedding, read_tiles
from thinsection.testing.synthetic import write_he_slide


@pytest.fixture
def trident(tmp_path: Path) -> Path:
    """Features of four slides as TRIDENT writes them, and a table with their cases."""
    folder = tmp_path / "20x_512px" / "features_uni_v1"
    folder.mkdir(parents=True)
    for index, name in enumerate("abcd"):
        write_features(folder / f"{name}.h5", num_tiles=5 + 9 * index, seed=index)
    table = "slide,case_id\na.svs,P/1\nb.svs,P/1\nc.svs,P2\n"
    (tmp_path / "cohort.csv").write_text(table)
    return folder


def aggregate(folder: Path, *flags: str) -> tuple[int, str]:
    arguments = ["aggregate", str(folder), *flags]
    result = CliRunner().invoke(build_app(arguments), arguments)
    return result.exit_code, f"{result.output}{result.exception or ''}"


def stored(folder: Path) -> dict[str, tuple[np.ndarray, Mapping[str, object]]]:
    """Embedding and attributes of each patient, by name."""
    patients = {}
    for path in folder.glob("*.h5"):
        file = read_slide_embedding(path)
        patients[str(file.attributes["name"])] = (file.slide_embedding, file.attributes)
    return patients


def tiles_of(folder: Path, name: str) -> np.ndarray:
    with h5py.File(folder / f"{name}.h5") as file:
        return np.asarray(file["features"])


def test_late_weighs_slides_and_early_weighs_tiles_in_a_folder_of_trident(
    trident: Path,
) -> None:
    table = str(trident.parents[1] / "cohort.csv")
    for fusion in ("late", "early"):
        code, said = aggregate(trident, "--patients", fusion, "--cohort", table)
        assert code == 0, said
        assert "4 of 4 slides" in said and "3 of 3 patients" in said
        assert "1 slide without a patient in the cohort, such as 'd'" in said
    late = stored(trident.parent / "patient_features_mean-uni_v1")
    early = stored(trident.parent / "patient_features_mean-uni_v1_early")
    assert late.keys() == early.keys() == {"P/1", "P2", "d"}
    a, b, c, d = (tiles_of(trident, name).astype(np.float64) for name in "abcd")
    wanted_late = (a.mean(0) + b.mean(0)) / 2
    wanted_early = np.concatenate([a, b]).mean(0)
    np.testing.assert_allclose(late["P/1"][0], wanted_late, atol=1e-6)
    np.testing.assert_allclose(early["P/1"][0], wanted_early, atol=1e-6)
    assert np.abs(wanted_late - wanted_early).max() > 0.01
    for name, tiles in (
        ("P2", c),
        ("d", d),
    ):  # of one slide both are the slide embedding
        np.testing.assert_array_equal(late[name][0], early[name][0])
        slide = {"P2": "c", "d": "d"}[name]
        path = trident.parent / "slide_features_mean-uni_v1" / f"{slide}.h5"
        np.testing.assert_array_equal(
            late[name][0], read_slide_embedding(path).slide_embedding
        )
        np.testing.assert_allclose(late[name][0], tiles.mean(0), atol=1e-6)
    attributes = late["P/1"][1]
    assert json.loads(str(attributes["slides"])) == ["a", "b"]
    assert (attributes["fusion"], attributes["slide_encoder"]) == ("late", "mean")


def test_what_is_complete_is_skipped_and_a_changed_slide_is_not(trident: Path) -> None:
    pooling = PoolingConfig(
        patients="late", cohort=str(trident.parents[1] / "cohort.csv")
    )
    mean = load_slide_encoder("mean")

    def statuses() -> dict[str, str]:
        aggregate_folder(trident, config=AggregateRunConfig(pooling=pooling))
        results = write_patients(trident, mean, pooling=pooling)
        return {result.slide_id: result.status for result in results}

    assert set(statuses().values()) == {"done"}
    assert set(statuses().values()) == {"skipped"}
    write_features(trident / "b.h5", num_tiles=3, seed=99)
    changed = {"patient P/1": "done", "patient P2": "skipped", "patient d": "skipped"}
    assert statuses() == changed


def test_a_patient_with_a_failed_slide_fails_and_the_others_do_not(
    trident: Path,
) -> None:
    (trident / "b.h5").write_bytes(b"no HDF5")
    table = str(trident.parents[1] / "cohort.csv")
    code, said = aggregate(trident, "--patients", "late", "--cohort", table)
    assert code == 3
    assert "patient P/1: failed (patients): tiles file must be readable HDF5" in said
    assert "2 of 3 patients have an embedding" in said
    assert stored(trident.parent / "patient_features_mean-uni_v1").keys() == {"P2", "d"}
    (trident.parents[1] / "cohort.csv").write_text("slide_id,label\na,1\n")
    with pytest.raises(StoreError, match=r"cohort must have rows with slide_id"):
        pooling = PoolingConfig(patients="late", cohort=table)
        write_patients(trident, load_slide_encoder("mean"), pooling=pooling)


def test_a_run_makes_embeddings_of_the_cohorts_patients(tmp_path: Path) -> None:
    for seed in range(3):
        write_he_slide(tmp_path / f"s{seed}.svs", (1100, 900), seed=seed)
    rows = "slide_path,case_id\ns0.svs,A\ns1.svs,A\ns2.svs,B\n"
    (tmp_path / "cohort.csv").write_text(rows)
    messages: list[str] = []
    summary = ts.run(
        [tmp_path / "cohort.csv"],
        out=tmp_path / "out",
        tile_px=128,
        patients="late",
        on_message=messages.append,
    )
    assert summary.exit_code == 0
    assert [patient.status for patient in summary.patients] == ["done", "done"]
    assert "2 of 2 patients have an embedding" in messages
    (grid,) = (tmp_path / "out").glob("*/tiles")
    patients = stored(grid.parent / "patient_features_mean-efficientnet_lite0")
    slides = {
        path.stem: read_slide_embedding(path).slide_embedding
        for path in grid.parent.glob("slide_features_mean-efficientnet_lite0/*.h5")
    }
    wanted = (slides["s0"].astype(np.float64) + slides["s1"]) / 2
    np.testing.assert_allclose(patients["A"][0], wanted, atol=1e-6)
    np.testing.assert_array_equal(patients["B"][0], slides["s2"])
    # `aggregate` takes the cases that the run recorded, and finds its result complete
    code, said = aggregate(tmp_path / "out", "--patients", "late")
    assert code == 0 and "2 of 2 patients have an embedding" in said, said


def test_patients_need_slide_embeddings(tmp_path: Path) -> None:
    write_he_slide(tmp_path / "s.svs", (900, 700), seed=1)
    with pytest.raises(
        ConfigError, match=r"patients must be 'none' in a run that ends"
    ):
        ts.run(
            [tmp_path / "s.svs"], out=tmp_path / "out", until="tiles", patients="late"
        )
    with pytest.raises(
        ConfigError, match="patients must be 'none' with results at a URL"
    ):
        ts.run([tmp_path / "s.svs"], out="s3://bucket/out", patients="late")


def test_a_run_and_its_patients_take_a_published_slide_encoder(tmp_path: Path) -> None:
    sizes = MoozySizes(
        dim=48, num_layers=1, mlp_dim=48, case_layers=1, case_normed_heads=True
    )
    weights = MoozySlideEncoder.random_weights(sizes, seed=3)
    save_file(weights, tmp_path / "moozy.safetensors")
    for seed in range(2):
        write_he_slide(tmp_path / f"s{seed}.svs", (1000, 800), seed=seed)
    rows = "slide_path,case_id\ns0.svs,A\ns1.svs,A\n"
    (tmp_path / "cohort.csv").write_text(rows)
    summary = ts.run(
        [tmp_path / "cohort.csv"],
        out=tmp_path / "out",
        tile_px=224,
        encoders=("lunit_vits8",),
        pretrained=False,
        slide_encoders=("moozy:case",),
        slide_weights=str(tmp_path / "moozy.safetensors"),
        patients="late",
    )
    assert summary.exit_code == 0, summary.results
    (features,) = (tmp_path / "out").glob("*/features_*")
    (folder,) = features.parent.glob("patient_features_*")
    slides = [read_tiles(features / f"s{seed}.h5") for seed in range(2)]
    encoder = load_slide_encoder(
        "moozy:case", weights=tmp_path / "moozy.safetensors", device="cpu"
    )
    wanted = patient_embedding(
        [(tiles.features, tiles.coords_l0) for tiles in slides],
        slide_encoder=encoder,
        tile_px_l0=[tiles.size_l0[0] for tiles in slides],
    )
    np.testing.assert_allclose(stored(folder)["A"][0], wanted, rtol=0, atol=1e-6)
    of_slides = [
        read_slide_embedding(path).slide_embedding
        for path in features.parent.glob("slide_features_*/*.h5")
    ]
    assert len(of_slides) == 2
    assert np.abs(np.mean(of_slides, 0) - wanted).max() > 1e-3  # no mean


def test_a_folder_of_trident_takes_its_own_slide_encoder_and_no_other(
    tmp_path: Path,
) -> None:
    save_file(ChiefSlideEncoder.random_weights(seed=3), tmp_path / "chief.safetensors")
    flags = (
        "--slide-encoder",
        "chief",
        "--slide-weights",
        str(tmp_path / "chief.safetensors"),
    )
    accepted = "1 of 1 slides have an embedding of chief"
    for encoder, tile_px, power, code, words in (
        ("ctranspath", 256, 10, 0, accepted),
        ("uni_v1", 256, 10, 3, "tile encoder must be ctranspath or chief_ctranspath"),
        ("ctranspath", 512, 10, 3, "tile_px must be 256 for slide encoder 'chief'"),
        ("ctranspath", 256, 20, 3, "tile_mpp must be 1 for slide encoder 'chief'"),
    ):
        grid = tmp_path / f"{power}x_{tile_px}px_0px_overlap"
        folder = grid / f"features_{encoder}"
        folder.mkdir(parents=True)
        tiles = seeded_tiles(30, 768)
        with h5py.File(folder / "a.h5", "w") as file:
            file["features"] = tiles
            file["features"].attrs["encoder"] = encoder
            places = np.arange(30)
            file["coords"] = np.stack([places % 6, places // 6], 1) * 1024
            for name, value in {
                "patch_size": tile_px,
                "patch_size_level0": 1024,
                "target_magnification": power,
            }.items():
                file["coords"].attrs[name] = value
        got, said = aggregate(folder, *flags)
        assert got == code and words in said, said
        assert "warning" not in said
    grid = tmp_path / "10x_256px_0px_overlap"
    (path,) = grid.glob("slide_features_chief_w*/a.h5")  # named after the weights
    chief = load_slide_encoder("chief", weights=flags[-1], device="cpu")
    wanted = chief.encode(tiles, places[:, None] * np.ones(2, int), tile_px_l0=1024)
    np.testing.assert_array_equal(read_slide_embedding(path).slide_embedding, wanted)
