"""AnnData export: tile embeddings of a run's slides as one table."""

from pathlib import Path

import numpy as np

from thinsection.errors import MissingDependencyError, StoreError
from thinsection.files.atomic import atomic_path
from thinsection.pipeline.folder import one_address, open_results


def export_anndata(folder: Path, target: Path, *, features: str | None = None) -> int:
    """Writes an .h5ad: X = tile embeddings, obsm['spatial'] = level-0 coordinates.

    `obs` has slide_id, patient_id, label, split and the per-tile columns that all slides share;
    its index is `<slide_id>:<x>x<y>`.

    Args:
        folder: a results folder.
        target: the .h5ad file.
        features: which embeddings: 'GRID/features_NAME' or NAME; None where there are one.

    Returns:
        Number of tiles written.

    Memory: the embeddings of all slides, twice while they are joined.

    Raises:
        StoreError: no embeddings in the folder.
        InvalidInputError: several embeddings and none named.
    """
    try:
        import anndata
        import pandas as pd
    except ImportError as error:
        raise MissingDependencyError(
            "export needs anndata; pip install 'thinsection[export]'"
        ) from error
    results = open_results(folder)
    slides = {}
    address = one_address(results.features, features, "features") if results.features else ""
    for slide_id, ledger in results.ledgers.items():
        if address in ledger.stages:
            stored = results.tile_embeddings(slide_id, address)
            if len(stored.coords_l0):
                slides[slide_id] = stored
    if not slides:
        raise StoreError(
            f"folder must hold tile embeddings, got none in {str(folder)!r}; "
            "run `thinsection embed` first"
        )
    tables = []
    for slide_id, stored in slides.items():
        slide = results.ledgers[slide_id].slide
        columns = {name: slide.get(name) for name in ("patient_id", "label", "split")}
        columns |= dict(results.tiles(slide_id, address.split("/")[0]).columns)
        names = [f"{slide_id}:{x}x{y}" for x, y in stored.coords_l0.tolist()]
        tables.append(pd.DataFrame({"slide_id": slide_id, **columns}, index=names))
    obs = pd.concat(tables, join="inner")
    for name in ("slide_id", "patient_id", "label", "split"):
        obs[name] = obs[name].astype("string").astype("category")
    found = [s for s in slides.values() if s.features is not None]
    data = anndata.AnnData(
        X=np.concatenate([stored.features for stored in found]),
        obs=obs,
        obsm={"spatial": np.concatenate([stored.coords_l0 for stored in found])},
        uns={"encoder": str(found[0].attributes.get("encoder", "")), "features": address},
    )
    with atomic_path(target) as tmp:
        data.write_h5ad(tmp)
    return len(obs)
