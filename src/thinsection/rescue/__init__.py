"""Our bounded-memory code inside other people's pipelines, put in place and taken back."""

from thinsection.rescue.titan import titan

__all__ = ["titan"]
