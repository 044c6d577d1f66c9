"""Tasks of HEST-bench in the folders that its authors publish.

    TASK/splits/train_0.csv, test_0.csv, ...   sample_id, patches_path, expr_path
    TASK/var_50genes.json                      {"genes": [...]}
    TASK/adata/*.h5ad                          counts of spots, by barcode
    EMBEDDINGS/SAMPLE_ID.h5                    embeddings (N, D) and barcodes, of hest.bench

Source: `hest.bench` of mahmoodlab/HEST: log(1 + count) of the listed genes, without other scaling.
"""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np

from thinsection.errors import DatasetError
from thinsection.evaluation.cases import group_rows
from thinsection.evaluation.metrics import FloatVector, Fold
from thinsection.extras import require_packages
from thinsection.probe.data.sets import ValueSet

GENES = "var_50genes.json"


def is_hest_task(path: Path) -> bool:
    """True for the folder of a task of HEST-bench."""
    return (path / "splits" / "train_0.csv").is_file()


def load_hest(path: Path, embeddings: Path | None) -> ValueSet:
    """Spots of a task with the expression of its genes; a fold is a split of the authors.

    Memory: 4 N D + 8 N T, and the counts of one sample.

    Raises:
        DatasetError: a file is missing, or its spots are not those of the other one.
        MissingDependencyError: anndata is not installed.
    """
    require_packages("HEST-bench", "anndata")
    if embeddings is None or not embeddings.is_dir():
        raise DatasetError(
            "embeddings must be a folder of SAMPLE_ID.h5 for a task of HEST-bench, got "
            f"{str(embeddings)!r}; hest.bench writes one"
        )
    genes = json.loads((path / GENES).read_text(encoding="utf-8"))["genes"]
    splits = [
        tuple(
            _samples(path / "splits" / f"{part}_{i}.csv") for part in ("train", "test")
        )
        for i in range(len([*path.glob("splits/train_*.csv")]))
    ]
    expression_of = {
        s: e for split in splits for part in split for s, e in part.items()
    }
    vectors = []
    targets = []
    names: list[str] = []
    barcodes: list[str] = []
    for sample in sorted(expression_of):
        embedded, spots = _spots(embeddings / f"{sample}.h5")
        vectors.append(embedded)
        targets.append(_expression(path / expression_of[sample], spots, genes))
        names += [sample] * len(spots)
        barcodes += spots
    owners = np.array(names)
    folds: list[Fold] = [
        (
            np.flatnonzero(np.isin(owners, [*train])),
            np.flatnonzero(np.isin(owners, [*test])),
        )
        for train, test in splits
    ]
    return ValueSet(
        name=path.name,
        ids=tuple(f"{s}:{b}" for s, b in zip(names, barcodes, strict=True)),
        embeddings=np.concatenate(vectors).astype(np.float32),
        target_names=tuple(genes),
        targets=np.concatenate(targets),
        folds=tuple(folds),
        groups=group_rows(names, where=repr(str(path))),
        facts={"table": f"{path.name}/splits", "targets": len(genes)},
    )


def _samples(path: Path) -> dict[str, str]:
    """Path of the expression of each sample of a split."""
    with path.open(newline="", encoding="utf-8") as file:
        return {row["sample_id"]: row["expr_path"] for row in csv.DictReader(file)}


def _spots(path: Path) -> tuple[FloatVector, list[str]]:
    """Embeddings (N, D) and barcodes of a sample."""
    import h5py  # here, since every start of `probe` reads this module

    if not path.is_file():
        raise DatasetError(
            f"embeddings must exist for each sample, got no {str(path)!r}"
        )
    with h5py.File(path) as file:
        embedded = np.asarray(file["embeddings"][:])
        raw = np.asarray(file["barcodes"][:]).reshape(-1)
    spots = [b.decode() if isinstance(b, bytes) else str(b) for b in raw]
    if len(spots) != len(embedded):
        raise DatasetError(
            f"embeddings must have one barcode a row, got {len(embedded)} rows and {len(spots)} "
            f"barcodes in {str(path)!r}"
        )
    return embedded, spots


def _expression(path: Path, spots: list[str], genes: list[str]) -> FloatVector:
    """log(1 + count) (N, T) of the genes, in the order of the spots."""
    import anndata

    counts: Any = anndata.read_h5ad(path)
    missing = [gene for gene in genes if gene not in counts.var_names]
    missing += [spot for spot in spots if spot not in counts.obs_names]
    if missing:
        raise DatasetError(
            f"counts must have each gene and barcode, got no {missing[0]!r} in {str(path)!r}"
        )
    chosen: FloatVector = counts[spots, genes].to_df().to_numpy(dtype=np.float64)
    return np.log1p(chosen)
