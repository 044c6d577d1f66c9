"""Settings of cells that another tool segmented, and the file of each slide."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from thinsection.config import option
from thinsection.errors import ConfigError, InvalidInputError
from thinsection.extras import Need
from thinsection.slide.annotations import absolute_source, check_source
from thinsection.slide.cohort import SlideEntry
from thinsection.slide.ids import KnownIds

ROLE = "cells"
# Bytes of a file that are read, stored and counted in a CPU-second; by end of its name. Measured
# with 100,000 drawn cells a slide and with the nuclei of histolytics.
_BYTES_PER_S = {".geojson": 24e6, ".json": 24e6, ".gz": 6e6, ".parquet": 14e6}
# label images and SpatialData
_USUAL_BYTES_PER_S = 5e6


@dataclass(frozen=True, slots=True, kw_only=True)
class CellsConfig:
    """Cells that another tool segmented."""

    cells: tuple[str, ...] = option(
        (),
        "Count the cells of another tool in the tiles (GeoJSON of QuPath, JSON of CellViT or "
        "HoVer-Net, Parquet, SpatialData, label images in TIFF or OME-Zarr): a folder with a file "
        "for each SLIDE_ID, a file for one slide, or a column of the cohort table with their "
        "paths. Repeat the option for several sources.",
    )
    cells_frame: str | None = option(
        None,
        "Unit of the coordinates in the files of cells: um, the µm of one pixel such as 0.5, or a "
        "magnification such as 20x. By default what the format states, else pixels of level 0.",
    )
    cells_columns: tuple[str, ...] = option(
        (),
        "Column of a table of cells by its meaning, such as class=cell_type or x=centroid_x, if "
        "its name does not say it; repeat the option for several.",
    )

    def __post_init__(self) -> None:
        # a worker may have another current folder
        sources = tuple(str(absolute_source(source)) for source in self.cells)
        object.__setattr__(self, "cells", sources)
        names = [name_of_source(source) for source in sources]
        if len(set(names)) < len(names):
            raise ConfigError(
                "cells must have different names, which are those of their folders or columns, "
                f"got {', '.join(names)}; rename a folder"
            )

    def check(self, entries: Sequence[SlideEntry]) -> None:
        """Refuses a source that does not exist, or one file for several slides.

        Raises:
            ConfigError: the message names the source.
        """
        for source in self.cells:
            check_source(source, ROLE, entries)

    def needs(self) -> Iterator[Need]:
        """Packages of the table of cells."""
        if self.cells:
            yield "--cells", ("pyarrow",)

    def file(self, source: str, entry: SlideEntry) -> Path:
        """File with the cells of a slide, one of several formats; may be a folder, such as Zarr.

        Args:
            source: one of `cells`.
            entry: the slide.

        Raises:
            InvalidInputError: there is none, or there are several.
        """
        path = Path(source)
        if not path.exists():
            path = Path(entry.folder, entry.more.get(source) or source)
        elif path.is_dir() and not _is_cell_file(path.name):
            return _file_in(path, entry)
        if not path.exists():
            raise _no_file(path, entry)
        return path

    def import_s(self, entry: SlideEntry) -> float:
        """Estimated CPU-seconds to read all files with cells of a slide and to count them.

        Raises:
            InvalidInputError: a file is missing.
        """
        seconds = 0.0
        for source in self.cells:
            path = self.file(source, entry)
            files = path.rglob("*") if path.is_dir() else [path]
            num_bytes = sum(file.stat().st_size for file in files if file.is_file())
            seconds += num_bytes / _BYTES_PER_S.get(
                path.suffix.lower(), _USUAL_BYTES_PER_S
            )
        return seconds


def _suffixes() -> tuple[str, ...]:
    """Ends of the names of files that a reader takes."""
    # imported here: a run without cells has no use for the readers
    from thinsection.cells.sources import SUFFIXES

    return SUFFIXES


def _is_cell_file(name: str) -> bool:
    return name.lower().endswith(_suffixes())


def _file_in(folder: Path, entry: SlideEntry) -> Path:
    """File in a folder with the name of a slide: 'ID.geojson', 'ID.svs.geojson', 'ID/cells.json'.

    Raises InvalidInputError: there is none, or there are several.
    """
    names = dict.fromkeys((entry.slide_id, Path(entry.slide_path).name))
    paths = [folder / f"{name}{end}" for name in names for end in _suffixes()]
    slide_path = Path(entry.slide_path)
    found = [path for path in paths if path.exists() and path != slide_path]
    for name in names:
        subfolder = folder / name
        if not found and subfolder.is_dir():
            found = [
                path for path in sorted(subfolder.iterdir()) if _is_cell_file(path.name)
            ]
    if not found:
        others = [path.name.partition(".")[0] for path in folder.iterdir()]
        similar = KnownIds(others).similar(entry.slide_id)
        hint = f"; did you mean {similar!r}?" if similar else ""
        raise _no_file(folder / f"{entry.slide_id}.geojson", entry, hint)
    if len(found) > 1:
        listed = ", ".join(path.name for path in found[:5])
        raise InvalidInputError(
            f"cells must be in one file of each slide, got {listed} for {entry.slide_id!r} in "
            f"{str(folder)!r}; name one in a column of the cohort, or move the others"
        )
    return found[0]


def _no_file(path: Path, entry: SlideEntry, hint: str = "") -> InvalidInputError:
    return InvalidInputError(
        f"cells must exist for every slide, got no file {str(path)!r} for {entry.slide_id!r}{hint}"
    )


def name_of_source(source: str) -> str:
    """Name of cells, from their folder, file or column: 'cellvit' of 'exports/cellvit'."""
    path = Path(source)
    return path.stem if path.is_file() else path.name
