"""Declared encoders, one file per publisher; `thinsection.encode.registry` collects them."""
