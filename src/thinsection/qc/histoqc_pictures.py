"""HistoQC's example pictures and templates, which are not ours to ship: where they are."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from thinsection.qc.checks.by_example import ExampleCheck
from thinsection.qc.checks.check import QcCheck
from thinsection.qc.checks.measures import Histogram

_REMEDY = "name the folder histoqc/data of HistoQC's source with --histoqc-data, or install HistoQC"


def installed_folders() -> list[Path]:
    """Folders of an installed HistoQC that have its pictures."""
    origin = getattr(find_spec("histoqc"), "origin", None)
    if not origin:
        return []
    return [Path(origin).parent / "data", Path(origin).parent]


def with_pictures(
    checks: Iterable[QcCheck], folders: Sequence[Path]
) -> tuple[QcCheck, ...]:
    """The checks with the paths of pictures that are in one of the folders.

    A check by example with a missing picture keeps the names of its pictures, and `absent` has
    those that are missing.
    """
    return tuple(_with_pictures(check, folders) for check in checks)


def _with_pictures(check: QcCheck, folders: Sequence[Path]) -> QcCheck:
    if isinstance(check, ExampleCheck):
        paths = {name: _find_picture(name, folders) for name in check.files}
        absent = tuple(name for name, path in paths.items() if path is None)
        if absent:
            return replace(check, absent=absent)
        return replace(
            check,
            example_images=tuple(str(paths[name]) for name in check.example_images),
            example_masks=tuple(str(paths[name]) for name in check.example_masks),
            absent=(),
        )
    if isinstance(check, Histogram):
        names = (*check.templates, *check.absent)
        paths = {name: _find_picture(name, folders) for name in names}
        return replace(
            check,
            templates=tuple(str(path) for path in paths.values() if path is not None),
            absent=tuple(name for name, path in paths.items() if path is None),
        )
    return check


def _find_picture(name: str, folders: Sequence[Path]) -> Path | None:
    """Absolute path in the first folder that has the picture: workers have other folders."""
    for folder in folders:
        if (folder / name).is_file():
            return (folder / name).resolve()
    return None


def notes_on_absent(checks: Iterable[QcCheck]) -> list[str]:
    """Sentences about checks that lack pictures."""
    left_out = []
    num_templates = 0
    for check in checks:
        if isinstance(check, ExampleCheck) and check.absent:
            left_out.append(check.name)
        elif isinstance(check, Histogram):
            num_templates += len(check.absent)
    notes = []
    if left_out:
        notes.append(
            f"{', '.join(left_out)}: HistoQC's example pictures are missing, so these checks are "
            f"left out and their columns are NA; {_REMEDY}"
        )
    if num_templates:
        notes.append(
            f"templates: {num_templates} of HistoQC's template pictures are missing, so their "
            f"columns are NA; {_REMEDY}"
        )
    return notes
