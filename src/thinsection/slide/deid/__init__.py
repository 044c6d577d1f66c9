"""Former name of `thinsection.deid`."""

from thinsection.deprecations import moved_names

__getattr__ = moved_names(__name__)
