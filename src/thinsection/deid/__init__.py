"""De-identified copies of slides."""

from thinsection.deid.copy import deidentify, deidentify_dicom, examine
from thinsection.deid.dicom import split_by_kind
from thinsection.deid.report import Report

__all__ = ["Report", "deidentify", "deidentify_dicom", "examine", "split_by_kind"]
