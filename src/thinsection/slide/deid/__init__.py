"""De-identified copies of slides."""

from thinsection.slide.deid.copy import deidentify, deidentify_dicom, examine
from thinsection.slide.deid.report import Report

__all__ = ["Report", "deidentify", "deidentify_dicom", "examine"]
