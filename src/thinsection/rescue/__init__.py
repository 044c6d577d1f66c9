"""Our bounded-memory code inside other people's pipelines, put in place and taken back."""

from thinsection.deprecations import moved_names
from thinsection.rescue.gigapath import gigapath
from thinsection.rescue.stamp import stamp
from thinsection.rescue.titan import titan

__all__ = ["gigapath", "stamp", "titan"]
__getattr__ = moved_names(__name__)
