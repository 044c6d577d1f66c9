"""Slide encoders: tile embeddings in, one embedding per slide out."""
