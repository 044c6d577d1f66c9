"""Text of a cohort: its settings, the columns of its table, a resolution, and names of files."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thinsection.config import option
from thinsection.errors import CohortError, ConfigError
from thinsection.extras import Need
from thinsection.files.tables import Table, open_table
from thinsection.files.urls import is_url
from thinsection.slide.geometry import positive_number
from thinsection.slide.look import Look
from thinsection.slide.readers import AUTO, READERS, reader_choices, slide_suffixes
from thinsection.types import Mpp

# limits of a resolution, µm/px: from an electron microscope to a photograph of the glass slide
_FINEST_MPP = 1e-4
_COARSEST_MPP = 1e4
# our columns, and the names of these columns in tables of TRIDENT, CLAM, slide2vec and STAMP
_ALIASES: dict[str, tuple[str, ...]] = {
    "slide_path": ("wsi", "image_path", "filename", "slide"),
    "slide_id": ("sample_id",),
    "slide_mpp": ("mpp", "spacing_at_level_0", "spacing"),
    "image": (),
    "patient_id": ("case_id", "patient"),
    "label": ("target",),
    "split": (),
}
# columns of our result tables; a column of a cohort cannot have such a name
# fmt: off
_RESULT_COLUMNS = frozenset((
    "status", "reader", "width", "height", "vendor", "grid", "stain", "warnings", "look",
))
# fmt: on
# columns with a meaning of their own, which do not become further columns (`more`) of a slide
_USED_COLUMNS = (
    frozenset(_ALIASES)
    .union(*_ALIASES.values(), _RESULT_COLUMNS)
    .difference({"case_id"})
)
_RESERVED_GROUPS = _RESULT_COLUMNS | {"slide_id", "slide_path", "slide_mpp", "image"}

# how a changed file of a slide is noticed; see `store/identity.py`
FingerprintMode = Literal["times", "full", "samples"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidesConfig:
    """Settings of opening slides."""

    reader: str = option(
        AUTO,
        "Library that reads the slides. auto uses the fastest one whose pixels agree with "
        "those of OpenSlide.",
        choices=reader_choices,
    )
    fingerprint: FingerprintMode = option(
        "times",
        "How a later run notices that a slide file has changed. times: size, samples of"
        " the content and time stamps; full: every byte; samples: size and samples.",
    )
    slide_mpp: str | float | None = option(
        None,
        "µm/px of level 0, such as 0.25 or 0.25x0.26. It replaces the value in the slide "
        "files; a column slide_mpp of the cohort table replaces both.",
        daily=True,
    )
    image: str | None = option(
        None,
        "Picture of each file to use as the slide: its name, or its number in the list of "
        "`thinsection info`. By default the largest that is no macro, label or thumbnail. A "
        "column image of the cohort table replaces both.",
    )
    channels: str | None = option(
        None,
        "One to three channels to show as RGB, for slides with other channels or 16 "
        "bits: 'DAPI,CD3' or '0,2'.",
    )
    channel_range: str = option(
        ",".join(f"{share:g}" for share in Look().percentiles),
        "Percentiles of a channel's values that become 0 and 255.",
    )
    icc: bool = option(
        False, "Convert the colours to sRGB with the slide's ICC profile."
    )
    name_pattern: str | None = option(
        None,
        "Regular expression for slide paths. Its named groups become columns of every "
        r"table: '(?P<cohort>[^/]+)/(?P<case_id>TCGA-\w\w-\w{4})'.",
    )

    allow_local_urls: bool = option(
        False,
        "Allow URLs in a cohort table that point to this machine or to a link-local network. Use "
        "it only for tables that you trust.",
    )

    def __post_init__(self) -> None:
        _ = self.look  # refuses impossible channels and percentiles
        if self.name_pattern is not None:
            path_columns(self.name_pattern, "")

    @property
    def mpp(self) -> Mpp | None:
        """(x, y) µm/px of slides whose table gives none. Raises CohortError: no resolution."""
        if not self.slide_mpp:
            return None
        return parse_mpp(str(self.slide_mpp), where="slides.slide_mpp")

    def needs(self) -> Iterator[Need]:
        """Packages of the reader that is named."""
        if self.reader in READERS:
            yield f"--reader {self.reader}", READERS.entry(self.reader).needs

    @property
    def look(self) -> Look | None:
        """Channels and profile that turn pixels into RGB; None leaves the pixels as they are."""
        if self.channels is None and not self.icc:
            return None
        parts = [part.strip() for part in (self.channels or "").split(",")]
        names = tuple(part for part in parts if part)
        try:
            low, high = map(float, self.channel_range.split(","))
        except ValueError:
            raise ConfigError(
                "slides.channel_range must be two percentiles such as '1,99', "
                f"got {self.channel_range!r}"
            ) from None
        return Look(channels=names, percentiles=(low, high), icc=self.icc)


@dataclass(frozen=True, slots=True, kw_only=True)
class CohortRow:
    """One line of a cohort table.

    Attributes:
        place: line and file, for messages.
        columns: cells under our names; '' where the table has none.
        more: cells of further columns, by the table's own names.
    """

    place: str
    columns: Mapping[str, str]
    more: Mapping[str, str]


def read_cohort_rows(path: Path, on_message: Callable[[str], None]) -> list[CohortRow]:
    """Reads a cohort table.

    In CLAM's lists the column slide_id holds the name of a file, which is the slide's path.
    `on_message` takes the notes of the table, such as which sheet of a workbook is read.

    Raises:
        CohortError: the file is no table, or no column holds the paths of slides.
    """
    table = open_table(path, error=CohortError)
    _check_columns(table)
    for note in table.notes:
        on_message(f"{path.name}: {note}")
    cohort_rows = []
    for number, row in enumerate(table.rows):
        columns = named_columns(row)
        slide_id = columns["slide_id"]
        if not columns["slide_path"] and slide_id.lower().endswith(slide_suffixes()):
            columns |= {"slide_path": slide_id, "slide_id": ""}
        more = {
            name: text
            for name, text in row.items()
            if text and name not in _USED_COLUMNS
        }
        cohort_rows.append(
            CohortRow(place=table.place(number), columns=columns, more=more)
        )
    header = list(table.columns)
    path_names = ("slide_path", *_ALIASES["slide_path"])
    has_column = any(str(name).lower() in path_names for name in header)
    if not has_column and not any(row.columns["slide_path"] for row in cohort_rows):
        raise CohortError(
            f"cohort must have a column 'slide_path', got {header} in {str(path)!r}; "
            f"also known: {', '.join(_ALIASES['slide_path'])}"
        )
    return cohort_rows


def _check_columns(table: Table) -> None:
    """Refuses names that differ only in capitals, and two different resolutions of a slide."""
    by_lower_name: dict[str, str] = {}
    for column in table.columns:
        other = by_lower_name.setdefault(column.lower(), column)
        if other != column and column.lower() in _USED_COLUMNS:
            raise CohortError(
                f"columns must differ by more than capitals, got {other!r} and {column!r} in "
                f"{str(table.path)!r}; rename or delete one"
            )
    names = ("slide_mpp", *_ALIASES["slide_mpp"])
    columns = [by_lower_name[name] for name in names if name in by_lower_name]
    for number, row in enumerate(table.rows):
        texts = {row[column] for column in columns if row[column]}
        if len({positive_number(text) or text for text in texts}) > 1:
            raise CohortError(
                f"a slide must have one resolution, got {' and '.join(sorted(texts))} in "
                f"{', '.join(columns)} in {table.place(number)}; delete one column"
            )


def named_columns(row: Mapping[str, str]) -> dict[str, str]:
    """Returns the cells of a row under the names of our columns; '' for a missing column."""
    texts = {name.lower(): text for name, text in row.items()}
    columns: dict[str, str] = {}
    for name, aliases in _ALIASES.items():
        filled = (texts[key] for key in (name, *aliases) if texts.get(key))
        columns[name] = next(filled, "")
    return columns


def parse_mpp(text: str, *, where: str) -> Mpp:
    """Parses (x, y) µm/px from '0.25' or '0.25x0.26'.

    Raises:
        CohortError: not one or two numbers, or a resolution that no slide has.
    """
    numbers = [positive_number(part) for part in text.lower().split("x")]
    x = numbers[0]
    y = numbers[-1]
    if x is None or y is None or len(numbers) > 2:
        raise CohortError(
            f"slide_mpp must be '0.25' or '0.25x0.26', got {text!r} in {where}"
        )
    if min(x, y) < _FINEST_MPP or max(x, y) > _COARSEST_MPP:
        raise CohortError(
            f"slide_mpp must be in [{_FINEST_MPP:g}, {_COARSEST_MPP:g}] µm/px, "
            f"got {text!r} in {where}"
        )
    return (x, y)


def path_columns(pattern: str, path: str) -> dict[str, str]:
    """Returns the text in a path that each named group of a regular expression matches.

    The result is {} if the expression does not match.

    Raises:
        CohortError: `pattern` is no regular expression, has no named group, or a group has the name
            of one of our own columns.
    """
    try:
        parsed = re.compile(pattern)
    except re.error as error:
        raise CohortError(
            f"name_pattern must be a regular expression, got {pattern!r}: {error}"
        ) from None
    if not parsed.groupindex or not _RESERVED_GROUPS.isdisjoint(parsed.groupindex):
        raise CohortError(
            "name_pattern must have named groups such as (?P<case_id>...) and none of our own "
            f"columns, got {pattern!r}"
        )
    match = parsed.search(path if is_url(path) else Path(path).as_posix())
    if match is None:
        return {}
    return {name: text for name, text in match.groupdict().items() if text}
