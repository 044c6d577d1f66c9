"""Self-contained HTML: pages from the templates of a room, and what notebooks show."""

import base64
import io
from collections.abc import Sequence
from functools import cache
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment
    from PIL.Image import Image

    from thinsection.types import RgbArray

NOTEBOOK_EDGE_PX = 360
# meta element by which the viewer tells its address to a page that it serves
VIEWER_META = "thinsection-viewer"


def render_page(room: str, template: str, **values: object) -> str:
    """Renders the page of a template with values; text that is not marked safe is escaped.

    `room` is the package whose folder `templates` holds the file, such as 'thinsection.report'; a
    value that the template names and that is missing is an error. Templates may include those of
    `thinsection.files`: `home.html` links to the index of the results, whose address is `home`, and
    `viewer_links.js` makes links into the viewer. A page of results extends `page.html`, which has
    its head, style and scripts, and imports notes, tables and pictures from `parts.html`.
    """
    return _environment(room).get_template(template).render(**values)


def data_uri(picture: "Image", max_edge_px: int) -> str:
    """Returns the picture as a JPEG inside an address, its longer edge at most so long."""
    small = picture.convert("RGB")
    buffer = io.BytesIO()
    small.thumbnail((max_edge_px, max_edge_px))
    small.save(buffer, format="JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def notebook_html(picture: "RgbArray | None", title: str, lines: Sequence[str]) -> str:
    """Returns a picture (H, W, 3), if any, beside lines of text, as HTML for a notebook's cell."""
    from PIL import Image

    image = ""
    if picture is not None:
        uri = data_uri(Image.fromarray(picture), NOTEBOOK_EDGE_PX)
        image = f'<img src="{uri}" alt="{escape(title)}">'
    text = "<br>".join(escape(line) for line in lines)
    text = f"<div><strong>{escape(title)}</strong><br>{text}</div>"
    return f'<div style="display:flex;gap:16px">{image}{text}</div>'


def bars_html(title: str, bars: Sequence[tuple[str, float, str]]) -> str:
    """Returns horizontal bars with a name, a length and words each, as HTML for a notebook."""
    longest = max((length for _, length, _ in bars), default=0.0) or 1.0
    rows = ""
    for name, length, words in bars:
        width_px = round(NOTEBOOK_EDGE_PX / 2 * max(length, 0.0) / longest)
        bar = f'<div style="width:{width_px}px;height:10px;background:#2060c8"></div>'
        rows += (
            f"<tr><td>{escape(name)}</td><td>{bar}</td><td>{escape(words)}</td></tr>"
        )
    return f"<div><strong>{escape(title)}</strong><table>{rows}</table></div>"


@cache
def _environment(room: str) -> "Environment":
    from jinja2 import (
        ChoiceLoader,
        Environment,
        PackageLoader,
        StrictUndefined,
        select_autoescape,
    )

    escaped = select_autoescape(disabled_extensions=("md.j2",), default=True)
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(room), PackageLoader("thinsection.files")]),
        autoescape=escaped,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["viewer_meta"] = VIEWER_META
    return environment
