"""A task of HEST-bench, in the folders that its authors publish."""

import csv
import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from typer.testing import CliRunner

from thinsection.cli.app import build_app
from thinsection.config import replace_flat
from thinsection.encode import load_encoder
from thinsection.errors import DatasetError
from thinsection.files.atomic import write_text
from thinsection.probe import ProbeConfig
from thinsection.probe.data.load import load_values
from thinsection.probe.grid import find_tasks
from thinsection.probe.registry import regression

anndata = pytest.importorskip("anndata", reason="anndata is not installed")

GENES = ["G2", "G0", "G5"]
SPOTS = {"S1": 30, "S2": 41, "S3": 25}


def published(root: Path, folds: int = 2) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Writes a task; returns embeddings and counts of the genes, in the order of the files."""
    rng = np.random.default_rng(4)
    projection = rng.normal(size=(3, 8))
    truth = {}
    for sample, n in SPOTS.items():
        names = [f"spot{i}" for i in range(n)]
        counts = rng.poisson(4.0, (n, 6)).astype(np.float32)
        table = anndata.AnnData(counts)
        table.obs_names = names
        table.var_names = [f"G{i}" for i in range(6)]
        order = rng.permutation(n)  # of the spots of the embeddings
        (root / "task" / "adata").mkdir(parents=True, exist_ok=True)
        table.write_h5ad(root / "task" / "adata" / f"{sample}.h5ad")
        chosen = counts[order][:, [2, 0, 5]]
        x = np.log1p(chosen) @ projection + rng.normal(size=(n, 8)) / 4
        (root / "features").mkdir(exist_ok=True)
        with h5py.File(root / "features" / f"{sample}.h5", "w") as file:
            file["embeddings"] = x.astype(np.float32)
            file["barcodes"] = np.array([[names[i].encode()] for i in order])
        truth[sample] = (x.astype(np.float32), chosen)
    (root / "task" / "splits").mkdir()
    for i, held_out in enumerate(("S1", "S3", "S2")[:folds]):
        for part, samples in (
            ("train", [s for s in SPOTS if s != held_out]),
            ("test", [held_out]),
        ):
            path = root / "task" / "splits" / f"{part}_{i}.csv"
            with path.open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(["sample_id", "patches_path", "expr_path"])
                for s in samples:
                    writer.writerow([s, f"patches/{s}.h5", f"adata/{s}.h5ad"])
    (root / "task" / "var_50genes.json").write_text(json.dumps({"genes": GENES}))
    return truth


def published_patches(root: Path, px: int = 48) -> dict[str, np.ndarray]:
    """Patches of the samples: the redder, the more of G2 and G0, the bluer, the more of G5."""
    rng = np.random.default_rng(9)
    patches = {}
    (root / "task" / "patches").mkdir()
    for sample, n in SPOTS.items():
        counts = anndata.read_h5ad(root / "task" / "adata" / f"{sample}.h5ad")
        order = rng.permutation(n)
        chosen = counts.to_df()[GENES].to_numpy()[order]
        colours = np.stack([chosen[:, 0], chosen[:, 1], chosen[:, 2]], axis=1) * 16
        noise = rng.integers(0, 30, (n, px, px, 3))
        image = np.clip(colours[:, None, None] + noise, 0, 255).astype(np.uint8)
        names = [f"spot{i}".encode() for i in order]
        with h5py.File(root / "task" / "patches" / f"{sample}.h5", "w") as file:
            file["img"] = image
            file["barcode"] = np.array(names)[:, None]
            file["coords"] = np.zeros((n, 2), np.int64)
        patches[sample] = image
    return patches


def config_of(root: Path) -> ProbeConfig:
    return replace_flat(ProbeConfig(), {"embeddings": root / "features"})


def test_spots_genes_and_splits_are_the_authors(tmp_path: Path) -> None:
    truth = published(tmp_path)
    data = load_values(tmp_path / "task", config_of(tmp_path))
    assert data.target_names == ("G2", "G0", "G5")
    vectors = np.concatenate([truth[s][0] for s in SPOTS])
    counts = np.concatenate([truth[s][1] for s in SPOTS])
    np.testing.assert_array_equal(data.embeddings, vectors)
    np.testing.assert_allclose(data.targets, np.log1p(counts.astype(np.float64)))
    owners = np.repeat([*SPOTS], [*SPOTS.values()])
    assert len(data.folds) == 2
    for held_out, (train, val) in zip(("S1", "S3"), data.folds, strict=True):
        assert set(owners[val]) == {held_out}
        assert set(owners[train]) == set(SPOTS) - {held_out}
    result = regression(data, ProbeConfig())
    assert result.score > 0.8  # the genes made the embeddings
    assert set(result.details["pearson_by_target"]) == set(GENES)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    published(tmp_path)
    with pytest.raises(DatasetError, match=r"must be a folder of SAMPLE_ID\.h5"):
        load_values(tmp_path / "task", config_of(tmp_path / "elsewhere"))
    with pytest.raises(DatasetError, match=r"patches must exist .*S[12]\.h5"):
        load_values(tmp_path / "task", ProbeConfig())
    (tmp_path / "task" / "var_50genes.json").write_text('{"genes": ["G2", "G9"]}')
    with pytest.raises(DatasetError, match=r"got no 'G9' in .*S1"):
        load_values(tmp_path / "task", config_of(tmp_path))
    (tmp_path / "features" / "S2.h5").write_bytes(b"cut short")
    (tmp_path / "task" / "var_50genes.json").write_text(json.dumps({"genes": GENES}))
    with pytest.raises(DatasetError, match=r"must be readable.*S2\.h5"):
        load_values(tmp_path / "task", config_of(tmp_path))
    (tmp_path / "features" / "S2.h5").unlink()
    (tmp_path / "task" / "var_50genes.json").write_text(json.dumps({"genes": GENES}))
    with pytest.raises(DatasetError, match=r"for each sample, got no .*S2\.h5"):
        load_values(tmp_path / "task", config_of(tmp_path))


def test_patches_are_embedded_in_the_order_of_their_file(tmp_path: Path) -> None:
    published(tmp_path)
    patches = published_patches(tmp_path)
    settings = {"encoder": "efficientnet_lite0:64px", "engine": "torch"}
    data = load_values(tmp_path / "task", replace_flat(ProbeConfig(), settings))
    encoder = load_encoder("efficientnet_lite0:64px", engine="torch")
    ones = np.concatenate(
        [encoder.encode(patches[sample]).float().numpy() for sample in SPOTS]
    )
    np.testing.assert_allclose(data.embeddings, ones, atol=1e-4)
    with h5py.File(tmp_path / "task" / "patches" / "S2.h5") as file:
        names = [f"S2:{name[0].decode()}" for name in file["barcode"][:]]
    first = SPOTS["S1"]
    assert list(data.ids[first : first + SPOTS["S2"]]) == names
    counts = anndata.read_h5ad(tmp_path / "task" / "adata" / "S2.h5ad").to_df()
    row = counts.loc[names[0].removeprefix("S2:"), GENES].to_numpy(np.float64)
    np.testing.assert_allclose(data.targets[first], np.log1p(row))
    assert data.facts["encoder"] == "efficientnet_lite0_64px"


def test_damaged_patches_are_named(tmp_path: Path) -> None:
    published(tmp_path)
    published_patches(tmp_path)
    with h5py.File(tmp_path / "task" / "patches" / "S2.h5", "a") as file:
        del file["barcode"]
        file["barcode"] = np.array([[b"spot1"], [b"spot2"]])
    with pytest.raises(DatasetError, match=r"one barcode a row, got \(41, .*S2\.h5"):
        load_values(tmp_path / "task", ProbeConfig())
    (tmp_path / "task" / "splits" / "test_1.csv").unlink()
    with pytest.raises(DatasetError, match=r"split 1 must have .* no .*test_1\.csv"):
        load_values(tmp_path / "task", ProbeConfig())


def test_bench_finds_and_scores_each_task_of_the_published_folder(
    tmp_path: Path,
) -> None:
    for name in ("IDC", "SKCM"):
        published(tmp_path / name, folds=len(name) - 1)
        published_patches(tmp_path / name)
        (tmp_path / "bench_data").mkdir(exist_ok=True)
        (tmp_path / name / "task").rename(tmp_path / "bench_data" / name)
    (tmp_path / "bench_data" / "fm_v1").mkdir()  # the authors' weights lie beside
    kinds = {name: kind for name, _, kind in find_tasks(tmp_path / "bench_data")}
    assert kinds == {"IDC": "values", "SKCM": "values"}
    suite = """
encoders = ["efficientnet_lite0:64px", "efficientnet_lite0:32px"]
device = "cpu"
engine = "torch"
[[tasks]]
data = "bench_data"
"""
    write_text(tmp_path / "suite.toml", suite)
    arguments = ["bench", str(tmp_path / "suite.toml"), "--executor", "inline"]
    arguments += ["--out", str(tmp_path / "out")]
    result = CliRunner().invoke(build_app(["bench"]), arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "not compared: IDC, regression: number of groups must be >= 3" in (
        result.output
    )
    compared = json.loads((tmp_path / "out/comparison.json").read_text())
    assert [task["task"] for task in compared["tasks"]] == ["SKCM, regression"]
    small = tmp_path / "out/scores/IDC-efficientnet_lite0_64px-regression.json"
    score = json.loads(small.read_text())
    assert score["metric"] == "pearson"
    assert score["score"] > 0.3  # colours were made of counts
    assert len([*(tmp_path / "out/scores").glob("*.json")]) == 4
