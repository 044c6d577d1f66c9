"""A local viewer of slides and results: deep zoom, layers, similar tiles."""

from thinsection.view.server import ViewConfig, Viewer, ViewerConfig, view

__all__ = ["ViewConfig", "Viewer", "ViewerConfig", "view"]
