"""JSON that others wrote: any text gives a value or a ValueError."""

import json
from collections.abc import Iterator
from pathlib import Path

from thinsection.types import Json

MAX_DEPTH = 64  # of nested lists and tables; GeoJSON has 8, our own documents 6


def parse_json(text: str | bytes) -> Json:
    """Returns the value of a JSON text; ValueError for whatever is none, or is nested too deep.

    Python's parser raises RecursionError, which is no ValueError, some thousand brackets deep; with
    fewer, whatever walks through the value would.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    # bytes may be UTF-16, whose brackets are not counted here
    if isinstance(text, str) and text.count("{") + text.count("[") <= MAX_DEPTH:
        return value
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _containers(outer)]
        if not level:
            return value
    raise _too_deep()


def read_json(path: Path) -> Json:
    """Returns the value of a JSON file; ValueError: it is none, OSError: it cannot be read."""
    return parse_json(path.read_text(encoding="utf-8"))


def _containers(value: Json) -> Iterator[Json]:
    """Yields the lists and tables that stand in a list or a table."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return
    for item in value:
        if isinstance(item, list | dict):
            yield item


def _too_deep() -> ValueError:
    return ValueError(f"brackets must be nested at most {MAX_DEPTH} deep")
