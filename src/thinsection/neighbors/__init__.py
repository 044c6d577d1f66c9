"""Masked nearest neighbours in bounded memory, and token frames of structures."""
