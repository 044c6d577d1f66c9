"""Data of probes: labelled sets, and how they are read from disk."""
