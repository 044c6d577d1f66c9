"""HistoQC's example pictures and templates, which are not ours to ship: where they are."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from thinsection.errors import ConfigError
from thinsection.qc.checks.by_example import ExampleCheck
from thinsection.qc.checks.check import QcCheck, Score
from thinsection.qc.checks.measures import Histogram, template_column

_REMEDY = "name the folder histoqc/data of HistoQC's source with --histoqc-data, or install HistoQC"


def installed_folders() -> list[Path]:
    """Folders of an installed HistoQC that have its pictures."""
    origin = getattr(find_spec("histoqc"), "origin", None)
    if not origin:
        return []
    return [Path(origin).parent / "data", Path(origin).parent]


def uses_pictures(check: QcCheck) -> bool:
    """True if a check names example pictures or templates, also if these are missing."""
    absent = check.absent if isinstance(check, ExampleCheck | Histogram) else ()
    return bool(check.files or absent)


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


def refuse_folder_without_pictures(checks: Iterable[QcCheck], folder: Path) -> None:
    """Refuses a folder that a user names for HistoQC's pictures, and that has none of them.

    Call it before `with_pictures` makes the paths absolute.

    Raises ConfigError: names the folder and the files.
    """
    names: dict[str, None] = {}
    for check in checks:
        absent = check.absent if isinstance(check, Histogram) else ()
        for name in (*check.files, *absent):
            if not Path(name).is_absolute():
                names[name] = None
    if names and not any((folder / name).is_file() for name in names):
        raise ConfigError(
            f"histoqc_data must be a folder with HistoQC's pictures, got {str(folder)!r} without "
            f"any of {', '.join(names)}; name the folder histoqc/data of HistoQC's source"
        )


def _find_picture(name: str, folders: Sequence[Path]) -> Path | None:
    """Absolute path in the first folder that has the picture: workers have other folders."""
    for folder in folders:
        if (folder / name).is_file():
            return (folder / name).resolve()
    return None


def notes_on_absent(checks: Iterable[QcCheck]) -> list[str]:
    """Sentences about checks that lack pictures."""
    left_out: list[str] = []
    num_templates = 0
    for check in checks:
        if isinstance(check, ExampleCheck) and check.absent:
            left_out.append(check.name)
        elif isinstance(check, Histogram):
            num_templates += len(check.absent)
    return _notes(left_out, num_templates)


def notes_on_row(checks: Iterable[QcCheck], row: Mapping[str, Score]) -> list[str]:
    """The same sentences for the row of a slide that these checks have made, now or earlier."""
    left_out: list[str] = []
    num_templates = 0
    for check in checks:
        if isinstance(check, ExampleCheck) and row.get(check.name) == "NA":
            left_out.append(check.name)
        elif isinstance(check, Histogram):
            columns = map(template_column, (*check.templates, *check.absent))
            num_templates += sum(row.get(column) == "NA" for column in columns)
    return _notes(left_out, num_templates)


def _notes(left_out: Sequence[str], num_templates: int) -> list[str]:
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
