"""Tile encoders: a declared registry, one file per model family."""
