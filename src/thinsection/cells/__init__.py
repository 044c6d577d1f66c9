"""Cells that other tools segmented: their table, readers of their files, and checks."""
