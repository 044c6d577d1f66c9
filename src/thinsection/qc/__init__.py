"""Tissue mask and artefact checks: array in, mask or score out."""
