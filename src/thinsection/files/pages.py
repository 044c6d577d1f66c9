"""Self-contained HTML pages from the templates of a room: one jinja environment for all."""

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment


def render_page(room: str, template: str, **values: Any) -> str:
    """The page that a template makes of the values; what is not marked safe is escaped.

    Args:
        room: package whose folder `templates` holds the file, such as 'thinsection.report'.
        template: name of the file.
        values: what the template names; one that is missing is an error.
    """
    return _environment(room).get_template(template).render(**values)


@cache
def _environment(room: str) -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader(room),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
