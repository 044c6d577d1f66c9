"""Tissue mask and artefact checks: array in, mask or score out."""

from thinsection.qc.coverage import box_fractions
from thinsection.qc.engine import QcResult, prepare_models, run_qc
from thinsection.qc.pipeline import Check, Pipeline, load_pipeline, preset_names
from thinsection.qc.polygons import MaskPolygon, mask_polygons
from thinsection.qc.row import qc_key
from thinsection.qc.rules import QcRule, parse_rule, qc_fail
from thinsection.qc.tile_columns import tile_qc_columns
from thinsection.qc.tissue import TissueConfig, TissueMask, tissue_mask

__all__ = [
    "Check",
    "MaskPolygon",
    "Pipeline",
    "QcResult",
    "QcRule",
    "TissueConfig",
    "TissueMask",
    "box_fractions",
    "load_pipeline",
    "mask_polygons",
    "parse_rule",
    "prepare_models",
    "preset_names",
    "qc_fail",
    "qc_key",
    "run_qc",
    "tile_qc_columns",
    "tissue_mask",
]
