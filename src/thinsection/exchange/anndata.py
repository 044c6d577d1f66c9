"""Exports the embeddings of a results folder as AnnData."""

from pathlib import Path

from thinsection.extras import require_packages
from thinsection.results.folder import Listener, open_results


def export_anndata(
    folder: str | Path,
    target: str | Path,
    *,
    features: str | None = None,
    on_damage: Listener | None = None,
) -> int:
    """Writes an .h5ad: X = embeddings, obsm['spatial'] = level-0 coordinates; returns its tiles.

    `obs` has slide_id, patient_id, label, split and the per-tile columns that all slides share;
    columns of categories are categorical, and `uns["NAME_colors"]` has their colours. The index is
    `<slide_id>:<x>x<y>`, by which `results.write_columns` finds the tiles again.

    Args:
        folder: a results folder.
        target: the file.
        features: 'GRID/features_NAME' or NAME; None if there is only one.
        on_damage: called with a line for each damaged slide, which is left out; with None that is
            an error.

    Memory: some MiB of embeddings; about 300 bytes per tile of all slides, and its columns.
    `thinsection plan --command 'export anndata'` predicts the peak.

    Raises:
        MissingDependencyError: anndata is not installed.
        StoreError: no embeddings in the folder.
        InvalidInputError: several embeddings and no name given.
    """
    require_packages("AnnData", "anndata", "pandas")
    return open_results(folder).write_h5ad(target, features, on_left_out=on_damage)
