"""Tasks of HEST-bench in the folders that its authors publish.

    TASK/splits/train_0.csv, test_0.csv, ...   sample_id, patches_path, expr_path
    TASK/var_50genes.json                      {"genes": [...]}
    TASK/patches/SAMPLE_ID.h5                  img uint8 (N, H, W, 3) and barcode (N, 1)
    TASK/adata/*.h5ad                          counts of spots, by barcode
    EMBEDDINGS/SAMPLE_ID.h5                    embeddings (N, D) and barcodes, of hest.bench

The embeddings are those of a folder that hest.bench wrote, or an encoder makes them of the patches.

Source: `hest.bench` of mahmoodlab/HEST: log(1 + count) of the listed genes, without other scaling.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from thinsection.errors import DatasetError, rewording
from thinsection.evaluation.cases import group_rows
from thinsection.evaluation.embeddings import Embeddings
from thinsection.evaluation.metrics import FloatVector, Fold, IndexArray
from thinsection.evaluation.tables import read_rows
from thinsection.extras import require_packages
from thinsection.probe.data import images
from thinsection.probe.data.sets import ImageRef, ValueSet
from thinsection.types import Json

if TYPE_CHECKING:
    from thinsection.encode import TileEncoder

GENES = "var_50genes.json"
FIRST_SPLIT = "splits/train_0.csv"
_COLUMNS = ("sample_id", "patches_path", "expr_path")
_DAMAGE = (OSError, KeyError, ValueError, TypeError)


class _Sample(NamedTuple):
    """Places of a sample, below the folder of the task."""

    patches: str
    expression: str


@dataclass(frozen=True, slots=True)
class _Spots:
    """Spots of a sample."""

    embeddings: Embeddings  # (N, D)
    barcodes: list[str]  # (N,)


def is_hest_task(path: Path) -> bool:
    """True for the folder of a task of HEST-bench."""
    return (path / FIRST_SPLIT).is_file()


def load_hest(
    path: Path,
    embeddings: Path | None,
    *,
    load_encoder: Callable[[], "TileEncoder"],
    batch_size: int = 64,
) -> ValueSet:
    """Spots of a task with the expression of its genes; a fold is a split of the authors.

    Args:
        path: folder of the task.
        embeddings: folder of SAMPLE_ID.h5 that hest.bench wrote; None: an encoder makes them.
        load_encoder: gives the encoder of the patches; not called where there are embeddings.
        batch_size: patches at a time.

    Memory: 4 N D + 8 N T, and the counts of one sample; with an encoder, `embed_images`.

    Raises:
        DatasetError: a file is missing or damaged, or its spots are not those of the other one.
        MissingDependencyError: anndata is not installed.
    """
    require_packages("HEST-bench", "anndata")
    if embeddings is not None and not embeddings.is_dir():
        raise DatasetError(
            "embeddings must be a folder of SAMPLE_ID.h5 for a task of HEST-bench, got "
            f"{str(embeddings)!r}; hest.bench writes one, or name an encoder instead"
        )
    genes = _genes(path / GENES)
    splits = _splits(path)
    samples = {
        name: sample
        for split in splits
        for part in split
        for name, sample in part.items()
    }
    facts: dict[str, Json] = {"table": f"{path.name}/splits", "targets": len(genes)}
    if embeddings is None:
        for _, sample in sorted(samples.items()):
            _check_patches(path / sample.patches)
        encoder = load_encoder()  # after the files, as it may take long
        facts |= images.encoder_facts(encoder)
    rows_of: dict[str, IndexArray] = {}
    vectors: list[Embeddings] = []
    targets: list[FloatVector] = []
    owners: list[str] = []
    barcodes: list[str] = []
    for name, sample in sorted(samples.items()):
        if embeddings is not None:
            spots = _embedded(embeddings / f"{name}.h5")
        else:
            spots = _encoded(path / sample.patches, encoder, batch_size)
        expression = _expression(path / sample.expression, spots.barcodes, genes)
        rows_of[name] = np.arange(len(spots.barcodes)) + len(barcodes)
        vectors.append(spots.embeddings)
        targets.append(expression)
        owners += [name] * len(spots.barcodes)
        barcodes += spots.barcodes
    folds: list[Fold] = [
        (_rows(rows_of, train), _rows(rows_of, test)) for train, test in splits
    ]
    return ValueSet(
        name=path.name,
        ids=tuple(f"{s}:{b}" for s, b in zip(owners, barcodes, strict=True)),
        embeddings=np.concatenate(vectors).astype(np.float32),
        target_names=tuple(genes),
        targets=np.concatenate(targets),
        folds=tuple(folds),
        groups=group_rows(owners, where=repr(str(path))),
        facts=facts,
    )


def _rows(rows_of: dict[str, IndexArray], samples: Iterable[str]) -> IndexArray:
    """Rows of samples, in the order of the table of a split."""
    return np.concatenate([rows_of[name] for name in samples])


def _genes(path: Path) -> list[str]:
    """Genes of a task."""
    with rewording(
        "genes must be a JSON file with a list 'genes'",
        path,
        *_DAMAGE,
        error=DatasetError,
    ):
        genes = json.loads(path.read_text(encoding="utf-8"))["genes"]
    if not isinstance(genes, list) or not genes:
        raise DatasetError(f"genes must be a list, got {genes!r} in {str(path)!r}")
    return [str(gene) for gene in genes]


def _splits(path: Path) -> list[tuple[dict[str, _Sample], dict[str, _Sample]]]:
    """Samples for training and for the test, of each split in the order of their numbers."""
    count = len([*path.glob("splits/train_*.csv")])
    splits = []
    for number in range(count):
        parts = []
        for part in ("train", "test"):
            table = path / "splits" / f"{part}_{number}.csv"
            if not table.is_file():
                raise DatasetError(
                    f"split {number} must have a table for training and one for the test, got "
                    f"no {str(table)!r}; download the folder of the task again"
                )
            rows = read_rows(table, _COLUMNS)
            parts.append(
                {
                    row["sample_id"]: _Sample(row["patches_path"], row["expr_path"])
                    for row in rows
                }
            )
        splits.append((parts[0], parts[1]))
    return splits


def _embedded(path: Path) -> _Spots:
    """Embeddings and barcodes of a sample that hest.bench embedded."""
    import h5py  # here, since every start of `probe` reads this module

    if not path.is_file():
        raise DatasetError(
            f"embeddings must exist for each sample, got no {str(path)!r}"
        )
    rule = "embeddings of hest.bench must be readable"
    with (
        rewording(rule, path, *_DAMAGE, error=DatasetError),
        h5py.File(path) as file,
    ):
        embedded = np.asarray(file["embeddings"][:])
        barcodes = _texts(file["barcodes"])
    if len(barcodes) != len(embedded):
        raise DatasetError(
            f"embeddings must have one barcode a row, got {len(embedded)} rows and "
            f"{len(barcodes)} barcodes in {str(path)!r}"
        )
    return _Spots(embedded, barcodes)


def _check_patches(path: Path) -> list[str]:
    """Barcodes of the patches of a sample, one an image."""
    import h5py

    if not path.is_file():
        raise DatasetError(
            f"patches must exist for each sample, got no {str(path)!r}; download them, or pass "
            "a folder of embeddings"
        )
    rule = "patches must have img and barcode"
    with (
        rewording(rule, path, *_DAMAGE, error=DatasetError),
        h5py.File(path) as file,
    ):
        barcodes = _texts(file["barcode"])
        shape = file["img"].shape
    if len(shape) != 4 or shape[3] != 3 or shape[0] != len(barcodes):
        raise DatasetError(
            f"img must be (N, H, W, 3) with one barcode a row, got {shape} and "
            f"{len(barcodes)} barcodes in {str(path)!r}"
        )
    return barcodes


def _encoded(path: Path, encoder: "TileEncoder", batch_size: int) -> _Spots:
    """Embeddings and barcodes of the patches of a sample."""
    barcodes = _check_patches(path)
    vectors, _ = images.embed_images(
        [ImageRef(path, row, "img") for row in range(len(barcodes))],
        images.embeddings_by(encoder),
        batch_size=batch_size,
    )
    return _Spots(vectors, barcodes)


def _texts(dataset: Any) -> list[str]:
    """Barcodes of an HDF5 dataset (N,) or (N, 1)."""
    cells = np.asarray(dataset[:]).reshape(-1)
    return [
        cell.decode("utf-8") if isinstance(cell, bytes) else str(cell) for cell in cells
    ]


def _expression(path: Path, spots: list[str], genes: list[str]) -> FloatVector:
    """log(1 + count) (N, T) of the genes, in the order of the spots."""
    import anndata

    if not path.is_file():
        raise DatasetError(
            f"counts must exist for each sample, got no {str(path)!r}; download the folder "
            "adata of the task"
        )
    with rewording("counts must be readable", path, *_DAMAGE, error=DatasetError):
        counts: Any = anndata.read_h5ad(path)
    missing = [gene for gene in genes if gene not in counts.var_names]
    missing += [spot for spot in spots if spot not in counts.obs_names]
    if missing:
        raise DatasetError(
            f"counts must have each gene and barcode, got no {missing[0]!r} in {str(path)!r}"
        )
    chosen: FloatVector = counts[spots, genes].to_df().to_numpy(dtype=np.float64)
    return np.log1p(chosen)
