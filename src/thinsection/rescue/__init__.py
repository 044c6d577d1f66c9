"""Our bounded-memory code inside other people's pipelines, put in place and taken back."""

from thinsection.rescue.gigapath import gigapath
from thinsection.rescue.openfold3 import openfold3
from thinsection.rescue.stamp import stamp
from thinsection.rescue.titan import titan

__all__ = ["gigapath", "openfold3", "stamp", "titan"]
