"""Tissue mask and artefact checks: array in, mask or score out."""

from thinsection.qc.checks.check import Outcome, QcCheck, QcView, area, length
from thinsection.qc.engine import (
    QcResult,
    prepare_models,
    qc_fail,
    run_qc,
    tile_qc_columns,
)
from thinsection.qc.pipeline import (
    CHECKS,
    Pipeline,
    load_pipeline,
    pipeline_identity,
    preset_names,
)
from thinsection.qc.tissue import TissueConfig, TissueMask, tissue_mask

__all__ = ["CHECKS", "Pipeline", "load_pipeline", "pipeline_identity", "preset_names"]
__all__ += ["Outcome", "QcCheck", "QcView", "area", "length"]
__all__ += ["QcResult", "prepare_models", "qc_fail", "run_qc", "tile_qc_columns"]
__all__ += ["TissueConfig", "TissueMask", "tissue_mask"]
