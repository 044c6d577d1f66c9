"""Exports the embeddings of a results folder as AnnData."""

from pathlib import Path

import numpy as np

from thinsection.errors import StoreError, importing
from thinsection.files.atomic import atomic_path
from thinsection.results.folder import Listener, leaving_out, open_results
from thinsection.store.ledger import OF_COHORTS
from thinsection.store.tiles_h5 import Embeddings
from thinsection.types import CoordsL0


def export_anndata(
    folder: Path,
    target: Path,
    *,
    features: str | None = None,
    on_damage: Listener | None = None,
) -> int:
    """Writes an .h5ad: X = embeddings, obsm['spatial'] = level-0 coordinates; returns its tiles.

    `obs` has slide_id, patient_id, label, split and the per-tile columns that all slides share.
    Its index is `<slide_id>:<x>x<y>`. `features` is 'GRID/features_NAME' or NAME; None if there is
    only one. A damaged slide is an error; with `on_damage`, it is reported there and left out.

    Memory: the embeddings of all slides, twice while they are joined.

    Raises StoreError: no embeddings in the folder; InvalidInputError: several and no name given.
    """
    with importing("export needs anndata", "export"):
        import anndata
        import pandas as pd
    results = open_results(folder)
    address = ""
    if results.features:
        address = results.choose_features(features)
    tables = []
    coords: list[CoordsL0] = []
    embeddings: list[Embeddings] = []
    encoder = ""
    for slide_id, ledger in results.ledgers.items():
        with leaving_out(slide_id, on_damage):
            ledger.check()
            if address not in ledger.stages:
                continue
            stored = results.tile_embeddings(slide_id, address)
            names = [f"{slide_id}:{x}x{y}" for x, y in stored.coords_l0.tolist()]
            columns: dict[str, object] = {"slide_id": slide_id}
            for name in OF_COHORTS:
                columns[name] = ledger.slide.get(name)
            columns |= results.tiles(slide_id, address.split("/")[0]).columns
            if names:
                assert stored.features is not None
                tables.append(pd.DataFrame(columns, index=names))
                coords.append(stored.coords_l0)
                embeddings.append(stored.features)
                encoder = str(stored.attributes.get("encoder", ""))
    if not tables:
        raise StoreError(
            f"folder must contain tile embeddings, got none in {str(folder)!r}; run "
            "`thinsection run` first"
        )
    obs = pd.concat(tables, join="inner")
    for name in ("slide_id", *OF_COHORTS):
        obs[name] = obs[name].astype("string").astype("category")
    table = anndata.AnnData(
        X=np.concatenate(embeddings),
        obs=obs,
        obsm={"spatial": np.concatenate(coords)},
        uns={"encoder": encoder, "features": address},
    )
    with atomic_path(target) as tmp:
        table.write_h5ad(tmp)
    return len(obs)
