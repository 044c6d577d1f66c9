"""What to cite for results, models, validations and probes, from their record."""

from thinsection.citation.cite import Citation, cite

__all__ = ["Citation", "cite"]
