"""Places in the viewer, as the part of its address after '#'."""

from collections.abc import Sequence
from urllib.parse import urlencode


def viewer_place(slide_id: str, *, layers: Sequence[str] = ()) -> str:
    """Address of a slide in the viewer, such as 'slide=s1&layer=qc_auto%2F'.

    The viewer adds x and y, the level-0 px in the middle of its window, and downsample, the
    level-0 px per pixel of the screen.

    Args:
        slide_id: id of the slide.
        layers: keys of the layers to show, `view.layers.Layer.key`; a key with '/' at the end
            means all outlines of this group. None of them: those that the viewer shows first.
    """
    return urlencode([("slide", slide_id), *(("layer", key) for key in layers)])
