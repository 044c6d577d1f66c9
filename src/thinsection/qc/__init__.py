"""Tissue mask and artefact checks: array in, mask or score out."""

from thinsection.qc.engine import QcResult, default_cache_dir, prepare_models, run_qc
from thinsection.qc.pipeline import Check, Pipeline, load_pipeline, preset_names
from thinsection.qc.polygons import MaskPolygon, mask_polygons
from thinsection.qc.row import qc_key, qc_row
from thinsection.qc.rules import QcRule, parse_rule, qc_fail
from thinsection.qc.tile_columns import mask_share, tile_qc_columns

__all__ = [
    "Check",
    "MaskPolygon",
    "Pipeline",
    "QcResult",
    "QcRule",
    "default_cache_dir",
    "load_pipeline",
    "mask_polygons",
    "mask_share",
    "parse_rule",
    "prepare_models",
    "preset_names",
    "qc_fail",
    "qc_key",
    "qc_row",
    "run_qc",
    "tile_qc_columns",
]
