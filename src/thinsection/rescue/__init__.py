"""Our bounded-memory code inside other people's pipelines, put in place and taken back."""

from thinsection.rescue.openfold3 import openfold3
from thinsection.rescue.titan import titan

__all__ = ["openfold3", "titan"]
