"""The other name of `types`, by which qc/ still imports."""

from thinsection.types import format_mpp

__all__ = ["format_mpp"]
