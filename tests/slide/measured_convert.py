"""What test_convert measures in a process of its own."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from thinsection.slide.convert import convert
from thinsection.testing.synthetic import write_pyramid


def warm_up(**_: Any) -> None:
    """Imports and first allocations."""
    with TemporaryDirectory() as folder:
        write_pyramid(Path(folder) / "a.tif", (2100, 300))
        convert(Path(folder) / "a.tif", Path(folder) / "a.ome.tif")


def write(_: None, *, slide_path: str, out: str) -> None:
    convert(slide_path, out)
