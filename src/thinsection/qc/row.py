"""The key by which a finished slide is known again."""

import hashlib
import json
from pathlib import Path

from thinsection.qc.by_example import ByExample
from thinsection.qc.measures import Histogram
from thinsection.qc.pipeline import Pipeline

_VERSION = 1  # of the checks: raise it when one answers differently


def qc_key(pipeline: Pipeline, slide_path: str, *, slide_mpp: float | None = None) -> str:
    """A short hash of all that the result of a slide depends on: file, pipeline, mpp, version.

    The file counts by size and modification time, so do example and template pictures.
    """
    pictures: list[str] = []
    for check in pipeline.checks:
        if isinstance(check.params, ByExample):
            pictures += [*check.params.example_images, *check.params.example_masks]
        elif isinstance(check.params, Histogram):
            pictures += check.params.templates
    stamps = [_stamp(path) for path in (slide_path, *pictures)]
    text = json.dumps([_VERSION, pipeline.as_mapping(), slide_mpp, stamps])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _stamp(path: str) -> list[int]:
    try:
        stat = Path(path).stat()
    except OSError:  # a URL, or gone: the run itself will say so
        return []
    return [stat.st_size, stat.st_mtime_ns]
