"""A task of HEST-bench, in the folders that its authors publish."""

import csv
import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from thinsection.config import replace_flat
from thinsection.errors import DatasetError
from thinsection.probe import ProbeConfig
from thinsection.probe.data.load import load_values
from thinsection.probe.registry import regression

anndata = pytest.importorskip("anndata", reason="anndata is not installed")

GENES = ["G2", "G0", "G5"]
SPOTS = {"S1": 30, "S2": 41, "S3": 25}


def published(root: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
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
    for i, held_out in enumerate(("S1", "S3")):
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
        load_values(tmp_path / "task", ProbeConfig())
    (tmp_path / "task" / "var_50genes.json").write_text('{"genes": ["G2", "G9"]}')
    with pytest.raises(DatasetError, match=r"got no 'G9' in .*S1"):
        load_values(tmp_path / "task", config_of(tmp_path))
    (tmp_path / "features" / "S2.h5").unlink()
    (tmp_path / "task" / "var_50genes.json").write_text(json.dumps({"genes": GENES}))
    with pytest.raises(DatasetError, match=r"for each sample, got no .*S2\.h5"):
        load_values(tmp_path / "task", config_of(tmp_path))
