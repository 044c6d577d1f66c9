"""The stages of a slide as values."""
