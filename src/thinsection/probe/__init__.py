"""Probes of frozen encoders: linear, kNN, few-shot, segmentation, slide level, survival."""
