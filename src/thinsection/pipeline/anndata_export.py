"""AnnData export: tile embeddings of a run's slides as one table."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from thinsection.errors import InvalidInputError, MissingDependencyError, StoreError
from thinsection.files.atomic import atomic_path
from thinsection.stages import naming
from thinsection.store.ledger import load_ledger
from thinsection.store.tiles_h5 import TilesFile, read_tiles


def export_anndata(folder: Path, target: Path) -> int:
    """Writes an .h5ad: X = tile embeddings, obsm['spatial'] = level-0 coordinates.

    `obs` has slide_id, patient_id, label, split and the per-tile columns that all slides share;
    its index is `<slide_id>:<x>x<y>`.

    Args:
        folder: a run's folder, or one slide's.
        target: the .h5ad file.

    Returns:
        Number of tiles written.

    Memory: the embeddings of all slides, twice while they are joined.

    Raises:
        StoreError: no tiles.h5 with embeddings below the folder.
        InvalidInputError: slides embedded by encoders of different width.
    """
    try:
        import anndata
        import pandas as pd
    except ImportError as error:
        raise MissingDependencyError(
            "export needs anndata; pip install 'thinsection[export]'"
        ) from error
    slides = list(_slides(folder))
    widths = {tiles.features.shape[1] for _, tiles in slides if tiles.features is not None}
    if not slides:
        raise StoreError(
            f"folder must hold tiles.h5 files with embeddings, got none in {str(folder)!r}; "
            "run `thinsection embed` first"
        )
    if len(widths) > 1:
        raise InvalidInputError(f"embeddings must have one width, got {sorted(widths)}")
    tables = []
    for path, tiles in slides:
        slide = load_ledger(path).slide
        columns = {name: slide.get(name) for name in ("patient_id", "label", "split")}
        names = [f"{path.name}:{x}x{y}" for x, y in tiles.coords_l0.tolist()]
        table = pd.DataFrame({"slide_id": path.name, **columns, **tiles.columns}, index=names)
        tables.append(table)
    obs = pd.concat(tables, join="inner")
    for name in ("slide_id", "patient_id", "label", "split"):
        obs[name] = obs[name].astype("string").astype("category")
    data = anndata.AnnData(
        X=np.concatenate([tiles.features for _, tiles in slides if tiles.features is not None]),
        obs=obs,
        obsm={"spatial": np.concatenate([tiles.coords_l0 for _, tiles in slides])},
        uns={"encoder": str(slides[0][1].attributes.get("encoder", ""))},
    )
    with atomic_path(target) as tmp:
        data.write_h5ad(tmp)
    return len(obs)


def _slides(folder: Path) -> Iterator[tuple[Path, TilesFile]]:
    candidates = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    for path in candidates:
        if (path / naming.TILES).is_file():
            tiles = read_tiles(path / naming.TILES)
            if tiles.features is not None and len(tiles.coords_l0):
                yield path, tiles
