"""From embeddings to predictions: heads, model files, predictions, heatmaps."""
