"""Tissue mask and artefact checks: array in, mask or score out."""

from thinsection.qc.polygons import MaskPolygon, mask_polygons

__all__ = ["MaskPolygon", "mask_polygons"]
