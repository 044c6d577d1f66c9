"""A local viewer of slides and results: deep zoom, layers, similar tiles."""

from thinsection.view.server import Viewer, view
from thinsection.view.shown import ViewConfig, ViewerConfig

__all__ = ["ViewConfig", "Viewer", "ViewerConfig", "view"]
