"""Tissue mask and artefact checks: array in, mask or score out."""

from typing import TYPE_CHECKING

from thinsection.registry import lazy_names, listed_names

if TYPE_CHECKING:
    from thinsection.qc.checks.check import Outcome as Outcome
    from thinsection.qc.checks.check import QcCheck as QcCheck
    from thinsection.qc.checks.check import QcView as QcView
    from thinsection.qc.checks.check import area as area
    from thinsection.qc.checks.check import length as length
    from thinsection.qc.edits import QcEdit as QcEdit
    from thinsection.qc.edits import read_edits as read_edits
    from thinsection.qc.engine import prepare_models as prepare_models
    from thinsection.qc.engine import run_qc as run_qc
    from thinsection.qc.pipeline import CHECKS as CHECKS
    from thinsection.qc.pipeline import Pipeline as Pipeline
    from thinsection.qc.pipeline import load_pipeline as load_pipeline
    from thinsection.qc.pipeline import pipeline_identity as pipeline_identity
    from thinsection.qc.pipeline import preset_names as preset_names
    from thinsection.qc.result import QcResult as QcResult
    from thinsection.qc.result import tile_qc_columns as tile_qc_columns
    from thinsection.qc.rules import qc_fail as qc_fail
    from thinsection.qc.tissue import TissueConfig as TissueConfig
    from thinsection.qc.tissue import TissueMask as TissueMask
    from thinsection.qc.tissue import tissue_mask as tissue_mask

# these names are imported on first use: a run without quality control needs no check
_NAMES_OF = {
    "checks.check": "Outcome QcCheck QcView area length",
    "edits": "QcEdit read_edits",
    "engine": "prepare_models run_qc",
    "pipeline": "CHECKS Pipeline load_pipeline pipeline_identity preset_names",
    "result": "QcResult tile_qc_columns",
    "rules": "qc_fail",
    "tissue": "TissueConfig TissueMask tissue_mask",
}
__all__ = [*listed_names(_NAMES_OF)]  # noqa: PLE0604
__getattr__ = lazy_names(__name__, _NAMES_OF)
