"""Tissue mask and artefact checks: array in, mask or score out."""

from thinsection.qc.checks.check import Outcome, QcCheck, QcView, area, length
from thinsection.qc.engine import prepare_models, run_qc
from thinsection.qc.pipeline import (
    CHECKS,
    Pipeline,
    load_pipeline,
    pipeline_identity,
    preset_names,
)
from thinsection.qc.result import QcResult, tile_qc_columns
from thinsection.qc.rules import qc_fail
from thinsection.qc.tissue import TissueConfig, TissueMask, tissue_mask

__all__ = [
    "CHECKS",
    "Outcome",
    "Pipeline",
    "QcCheck",
    "QcResult",
    "QcView",
    "TissueConfig",
    "TissueMask",
    "area",
    "length",
    "load_pipeline",
    "pipeline_identity",
    "prepare_models",
    "preset_names",
    "qc_fail",
    "run_qc",
    "tile_qc_columns",
    "tissue_mask",
]
