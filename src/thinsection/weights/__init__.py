"""Weights of networks: find, pin, read, hash, place."""
