"""Benchmarks: each answers one question, checks before it times, and writes JSON."""
