"""Thinsection: whole-slide pathology images to embeddings and predictions, in bounded memory.

What a notebook needs is here; attention, neighbours, the feature cache, structures and rescue are
imported by the names of their rooms. Names are resolved on first use, so that `import thinsection`
pulls in neither torch nor a reader.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from thinsection import errors as errors

if TYPE_CHECKING:  # what type checkers see of the names below
    from thinsection.encode import embed_tiles as embed_tiles
    from thinsection.encode import load_encoder as load_encoder
    from thinsection.encode import make_encoder as make_encoder
    from thinsection.evaluation.own_audit import audit as audit
    from thinsection.evaluation.own_folds import folds as folds
    from thinsection.evaluation.own_scores import compare as compare
    from thinsection.evaluation.own_scores import interval as interval
    from thinsection.exchange.anndata import export_anndata as export_anndata
    from thinsection.exchange.peer_export import export_peer as export_peer
    from thinsection.exchange.peer_import import import_peer as import_peer
    from thinsection.exchange.qupath import export_qupath as export_qupath
    from thinsection.exchange.spatialdata import (
        export_spatialdata as export_spatialdata,
    )
    from thinsection.pool import aggregate as aggregate
    from thinsection.pool import load_slide_encoder as load_slide_encoder
    from thinsection.predict.config import TrainConfig as TrainConfig
    from thinsection.predict.experiment import train as train
    from thinsection.predict.heatmap import heatmap as heatmap
    from thinsection.predict.predicting import predict as predict
    from thinsection.predict.zeroshot import zeroshot as zeroshot
    from thinsection.qc import run_qc as run_qc
    from thinsection.qc import tissue_mask as tissue_mask
    from thinsection.results import plot as plot
    from thinsection.results.folder import open_results as open_results
    from thinsection.results.heatmap_file import write_heatmap as write_heatmap
    from thinsection.results.tile_dataset import TileDataset as TileDataset
    from thinsection.run.plan import plan as plan
    from thinsection.run.progress import progress as progress
    from thinsection.run.run import run as run
    from thinsection.segment import load_segmenter as load_segmenter
    from thinsection.segment import segment as segment
    from thinsection.slide import open_slide as open_slide
    from thinsection.stages.config import RunConfig as RunConfig
    from thinsection.tiles import iter_tiles as iter_tiles
    from thinsection.tiles import parent_rows as parent_rows
    from thinsection.tiles import tile_grid as tile_grid
    from thinsection.view import view as view

__version__ = "0.2.0"  # the one place of the version; pyproject.toml reads it

# public name -> module that defines it; the one list of the Python surface
_PUBLIC = {
    "open_slide": "thinsection.slide",
    "tissue_mask": "thinsection.qc",
    "run_qc": "thinsection.qc",
    "segment": "thinsection.segment",
    "load_segmenter": "thinsection.segment",
    "tile_grid": "thinsection.tiles",
    "parent_rows": "thinsection.tiles",
    "iter_tiles": "thinsection.tiles",
    "load_encoder": "thinsection.encode",
    "make_encoder": "thinsection.encode",
    "embed_tiles": "thinsection.encode",
    "load_slide_encoder": "thinsection.pool",
    "aggregate": "thinsection.pool",
    "run": "thinsection.run.run",
    "RunConfig": "thinsection.stages.config",
    "plan": "thinsection.run.plan",
    "progress": "thinsection.run.progress",
    "open_results": "thinsection.results.folder",
    "TileDataset": "thinsection.results.tile_dataset",
    "train": "thinsection.predict.experiment",
    "TrainConfig": "thinsection.predict.config",
    "folds": "thinsection.evaluation.own_folds",
    "interval": "thinsection.evaluation.own_scores",
    "compare": "thinsection.evaluation.own_scores",
    "audit": "thinsection.evaluation.own_audit",
    "plot": "thinsection.results.plot",
    "predict": "thinsection.predict.predicting",
    "zeroshot": "thinsection.predict.zeroshot",
    "heatmap": "thinsection.predict.heatmap",
    "write_heatmap": "thinsection.results.heatmap_file",
    "view": "thinsection.view",
    "export_anndata": "thinsection.exchange.anndata",
    "export_spatialdata": "thinsection.exchange.spatialdata",
    "export_qupath": "thinsection.exchange.qupath",
    "export_peer": "thinsection.exchange.peer_export",
    "import_peer": "thinsection.exchange.peer_import",
}

__all__ = ["__version__", "errors", *_PUBLIC]  # noqa: PLE0604


class _Face(ModuleType):
    """A room that is imported does not hide the function of its name: segment, predict."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _PUBLIC and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        """Pickles as an import, as cloudpickle does with any other module."""
        return import_module, (__name__,)


sys.modules[__name__].__class__ = _Face

if not TYPE_CHECKING:  # a checker that saw this would take every misspelt name for Any

    def __getattr__(name: str) -> object:
        if name in _PUBLIC:
            from thinsection.extras import check_slides

            check_slides()
            module = import_module(_PUBLIC[name])
            return getattr(module, name, module)  # `plot` is a module
        raise AttributeError(f"module 'thinsection' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
