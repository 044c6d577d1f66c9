"""Predictions from embeddings: heads, model files, predictions, heatmaps."""
