"""Deprecated names of what `thinsection.frames` holds."""

from thinsection.deprecations import moved_names, names_moved_from

__all__ = names_moved_from(__name__)  # noqa: PLE0605
__getattr__ = moved_names(__name__)
