"""Weights of every network: found, pinned, read without running code, hashed, placed."""
