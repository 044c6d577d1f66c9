"""A results folder as Python sees it: slides, tables, embeddings; and as AnnData."""

import csv
import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from thinsection.config import nearest
from thinsection.errors import (
    InvalidInputError,
    StoreError,
    importing,
    require,
    rewording,
)
from thinsection.files.atomic import atomic_path, read_table
from thinsection.files.pages import data_uri
from thinsection.pipeline.records import Record, read_records
from thinsection.report.draw import thumbnail_file
from thinsection.stages.facts import OF_COHORTS
from thinsection.store.identity import file_sum
from thinsection.store.ledger import SLIDES, SlideLedger, StageRecord, load_ledgers
from thinsection.store.tile_tables import (
    TILES,
    EmbeddingRows,
    TileTableFile,
    tile_table_files,
)
from thinsection.store.tiles_h5 import (
    TilesFile,
    damaged_datasets,
    read_slide_embedding,
    read_tiles,
)
from thinsection.types import format_bytes

if TYPE_CHECKING:
    import pandas

Listener = Callable[[str], None]  # is told a line of text
_SHOWN_SLIDES = 8  # thumbnails of `_repr_html_`
_SHOWN_PX = 96  # their height


def open_results(out: str | Path) -> "Results":
    """The results of `run`, `qc` and `aggregate` in a folder.

    Memory: some kB per slide. Raises StoreError: it is no results folder.
    """
    folder = Path(out)
    rule = f"results must be a folder of `thinsection run` with {SLIDES}/ in it"
    require((folder / SLIDES).is_dir(), rule, repr(str(folder)), error=StoreError)
    return Results(
        folder=folder, ledgers={lg.slide_id: lg for lg in load_ledgers(folder)}
    )


@dataclass(frozen=True)
class FolderRow:
    """One folder of results, over all slides."""

    address: str  # '256px_0.5mpp/features_uni2_h'
    num_slides: int  # that have a result there
    num_bytes: int  # of its files
    facts: Mapping[str, Any]  # of the last slide: encoder, dim and so on


@dataclass(frozen=True, kw_only=True)
class Results:
    """A results folder; what is read is read when it is asked for."""

    folder: Path
    ledgers: Mapping[str, SlideLedger]  # by slide id

    @property
    def slides(self) -> tuple[str, ...]:
        """Slide ids."""
        return tuple(self.ledgers)

    @cached_property
    def folders(self) -> tuple[FolderRow, ...]:
        """Every folder of results: masks, grids, embeddings, slide embeddings, pictures."""
        found: dict[str, list[StageRecord]] = {}
        for address, record in (
            item for lg in self.ledgers.values() for item in lg.stages.items()
        ):
            found.setdefault(address, []).append(record)
        sizes = {
            name: sum(sum(r.files.values()) for r in of) for name, of in found.items()
        }
        rows = [
            FolderRow(name, len(of), sizes[name], of[-1].facts)
            for name, of in found.items()
        ]
        in_order = sorted(
            rows, key=lambda r: (not r.address.startswith(f"{SLIDES}/"), r.address)
        )
        return tuple(in_order)

    @property
    def grids(self) -> tuple[str, ...]:
        """Names of the tile grids."""
        names = (row.address.split("/")[0] for row in self.folders)
        return tuple(dict.fromkeys(name for name in names if name != SLIDES))

    @property
    def features(self) -> tuple[str, ...]:
        """Addresses of tile embeddings: 'GRID/features_NAME'."""
        return self._addresses("features_")

    @property
    def slide_features(self) -> tuple[str, ...]:
        """Addresses of slide embeddings: 'GRID/slide_features_NAME'."""
        return self._addresses("slide_features_")

    @property
    def records(self) -> list[Record]:
        """The invocations that worked here, oldest first."""
        return read_records(self.folder)

    def rows(self, labels: str | Path | None = None) -> list[dict[str, Any]]:
        """A row per slide and grid, as summary.csv has them.

        `labels` is a CSV with a column slide_id, whose other columns are joined by it.

        Raises StoreError: the labels cannot be read.
        """
        from thinsection.pipeline.tables import (
            grid_rows,
        )  # a run is made of it: not for a listing

        joined = {} if labels is None else _labels(Path(labels))
        rows = (
            (name, row)
            for name, ledger in self.ledgers.items()
            for row in grid_rows(ledger)
        )
        return [{"slide_id": name} | row | joined.get(name, {}) for name, row in rows]

    def table(self, labels: str | Path | None = None) -> "pandas.DataFrame":
        """`rows` as a data frame. Raises MissingDependencyError: pandas is not installed."""
        with importing("table needs pandas (`rows` does not)", "probe"):
            import pandas as pd
        return pd.DataFrame(self.rows(labels))

    def tiles(self, slide_id: str, grid: str | None = None) -> TilesFile:
        """Coordinates and columns of a slide's tile grid: those of every table of the same tiles.

        `slide_id` is of `slides`, `grid` of `grids`: None where there is one.

        Memory: 16 bytes a tile, and 4 of each column.
        """
        table, *others = self.tile_tables(slide_id, grid)
        found = table.read()
        columns = dict(found.columns)
        for other, more in ((other, other.read()) for other in others):
            if np.array_equal(more.coords_l0, found.coords_l0):
                columns |= {
                    other.label(name): values for name, values in more.columns.items()
                }
        return replace(found, columns=columns)

    def tile_tables(
        self, slide_id: str, grid: str | None = None
    ) -> tuple[TileTableFile, ...]:
        """The per-tile tables of a slide: tiles, measures, heatmaps; no values are read.

        Raises StoreError: the slide has no such grid.
        """
        named = one_address(self.grids, grid, "grid")
        self.file(slide_id, f"{named}/{TILES}")
        stages = self.ledgers[slide_id].stages.items()
        files = {a: self.folder / next(iter(r.files)) for a, r in stages if r.files}
        return tuple(tile_table_files(self.folder, named, slide_id, files))

    def tile_embeddings(self, slide_id: str, features: str | None = None) -> TilesFile:
        """Embeddings (N, D) and coordinates of a slide's tiles.

        `features` is of `features`, or its last part without 'features_'; None where there is one.

        Memory: 4 N D bytes.
        """
        return read_tiles(
            self.file(slide_id, one_address(self.features, features, "features"))
        )

    def embedding_rows(
        self, slide_id: str, features: str | None = None
    ) -> EmbeddingRows:
        """The same embeddings, rows of which are read from the file when they are asked for."""
        return EmbeddingRows(
            self.file(slide_id, one_address(self.features, features, "features"))
        )

    def slide_embeddings(
        self, name: str | None = None
    ) -> tuple[tuple[str, ...], npt.NDArray[np.float32]]:
        """Slide ids and their embeddings, float32 (S, D), of the slides that have one.

        `name` is of `slide_features`, or its last part; None where there is one.

        Memory: 4 S D bytes.
        """
        address = one_address(self.slide_features, name, "slide features")
        stages = {
            name: ledger.stages.get(address) for name, ledger in self.ledgers.items()
        }
        files = {
            name: self.folder / file
            for name, r in stages.items()
            if r
            for file in r.files
        }
        found = [read_slide_embedding(path).slide_embedding for path in files.values()]
        return tuple(files), np.stack(found) if found else np.empty((0, 0), "f4")

    def failures(self) -> dict[str, str]:
        """Slide id -> message of each slide whose last run failed, or whose ledger is damaged."""
        from thinsection.pipeline.results import read_failure

        names = [
            path.name
            for path in sorted((self.folder / SLIDES).iterdir())
            if path.is_dir()
        ]
        found = ((name, read_failure(self.folder, name)) for name in names)
        damaged = {name: lg.damage for name, lg in self.ledgers.items() if lg.damage}
        return damaged | {
            name: result.error for name, result in found if result is not None
        }

    def __repr__(self) -> str:
        lines = [f"<Results {str(self.folder)!r}: {len(self.slides)} slides>"]
        for row in self.folders:
            size = format_bytes(row.num_bytes)
            lines.append(f"  {row.address:<60} {row.num_slides:>6} slides {size:>10}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        pictures, rows = "", ""
        for slide_id in self.slides[:_SHOWN_SLIDES]:
            path = thumbnail_file(self.folder / SLIDES / slide_id)
            if path is not None:
                with Image.open(path) as picture:
                    source = data_uri(picture, 2 * _SHOWN_PX)
                title = html.escape(slide_id)
                pictures += (
                    f'<img height="{_SHOWN_PX}" title="{title}" src="{source}"> '
                )
        for row in self.folders:
            cells = (
                html.escape(row.address),
                row.num_slides,
                format_bytes(row.num_bytes),
            )
            rows += f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        return (
            f"<b>{html.escape(str(self.folder))}</b>: {len(self.slides)} slides"
            f"<div>{pictures}</div>"
            f"<table><tr><th>folder</th><th>slides</th><th>size</th></tr>{rows}</table>"
        )

    def _addresses(self, prefix: str) -> tuple[str, ...]:
        named = [row.address for row in self.folders]
        return tuple(
            name for name in named if name.rpartition("/")[2].startswith(prefix)
        )

    def file(self, slide_id: str, address: str) -> Path:
        """The file of a slide in a folder of results. Raises StoreError: there is none."""
        record = self.ledger(slide_id).stages.get(address)
        if record is None or not record.files:
            raise StoreError(
                f"{address} of {slide_id!r} must be there, got none; run it first"
            )
        return self.folder / next(iter(record.files))

    def ledger(self, slide_id: str) -> SlideLedger:
        """What is known of a slide. Raises InvalidInputError: it is not of this folder."""
        got = f"{slide_id!r}{nearest(slide_id, self.slides)}"
        require(slide_id in self.ledgers, "slide_id must be of this folder", got)
        return self.ledgers[slide_id]


def one_address(known: Sequence[str], name: str | None, what: str) -> str:
    """The address that a name means: whole, its last part, or that without its prefix.

    Raises InvalidInputError: none or several of that name.
    """

    def names(address: str) -> tuple[str, ...]:
        last = address.rpartition("/")[2]
        return address, last, *map(last.removeprefix, ("features_", "slide_features_"))

    found = [address for address in known if name is None or name in names(address)]
    got = f"{name!r}; pass the whole name"
    require(len(found) == 1, f"{what} must name one of {list(known)}", got)
    return found[0]


def _labels(path: Path) -> dict[str, dict[str, str]]:
    errors = (OSError, UnicodeDecodeError, csv.Error)
    with rewording("labels must be a UTF-8 CSV", path, *errors, error=StoreError):
        rows = read_table(path)
    named = {row["slide_id"]: row for row in rows if "slide_id" in row}
    got = f"{list(rows[0]) if rows else []} in {str(path)!r}"
    require(
        named or not rows, "labels must have a column slide_id", got, error=StoreError
    )
    return named


def verify(folder: Path) -> tuple[int, list[str]]:
    """(Checksums that were compared, a line for each file that is damaged or missing).

    Of a results folder every file that a ledger names; of another folder each dataset of its .h5
    files. Files of earlier versions have sizes only.

    Memory: 256 KiB, or one dataset.

    Raises StoreError: it holds neither.
    """
    if not (folder / SLIDES).is_dir():
        found = [damaged_datasets(path) for path in sorted(folder.rglob("*.h5"))]
        rule = "folder must hold results, or .h5 files"
        require(found, rule, f"none in {str(folder)!r}", error=StoreError)
        return sum(count for count, _ in found), [
            line for _, lines in found for line in lines
        ]
    checked, wrong = 0, []
    for slide_id, ledger in open_results(folder).ledgers.items():
        wrong += [f"{slide_id}: {ledger.damage}"] * bool(ledger.damage)
        for record in ledger.stages.values():
            checked += len(record.sums)
            for name, size in record.files.items():
                path = folder / name
                if not path.is_file():
                    wrong += [f"{name}: missing"] * (name not in ledger.elsewhere.files)
                elif path.stat().st_size != size:
                    wrong.append(
                        f"{name}: {path.stat().st_size} bytes, {size} were written"
                    )
                elif name in record.sums and file_sum(path) != record.sums[name]:
                    wrong.append(f"{name}: other bytes than were written")
    return checked, wrong


@contextmanager
def leaving_out(
    slide_id: str, told: Listener | None, *errors: type[Exception]
) -> Iterator[None]:
    """Tells of an error with a slide, which is left out; where nobody is told, it is raised."""
    try:
        yield
    except errors as error:
        if told is None:
            raise
        told(f"{slide_id}: left out: {error}")


def export_anndata(
    folder: Path,
    target: Path,
    *,
    features: str | None = None,
    on_damage: Listener | None = None,
) -> int:
    """Number of tiles written to an .h5ad: X = embeddings, obsm['spatial'] = level-0 coordinates.

    `obs` has slide_id, patient_id, label, split and the per-tile columns that all slides share;
    its index is `<slide_id>:<x>x<y>`. `features` is 'GRID/features_NAME' or NAME; None where there
    is one. A damaged slide is an error; with `on_damage`, which is told of it, it is left out.

    Memory: the embeddings of all slides, twice while they are joined.

    Raises StoreError: no embeddings in the folder; InvalidInputError: several and none named.
    """
    with importing("export needs anndata", "export"):
        import anndata
        import pandas as pd
    results = open_results(folder)
    address = (
        one_address(results.features, features, "features") if results.features else ""
    )
    tables, arrays = [], []
    for slide_id, ledger in results.ledgers.items():
        with leaving_out(slide_id, on_damage, StoreError, InvalidInputError):
            require(
                not ledger.damage,
                "ledger must be whole",
                ledger.damage,
                error=StoreError,
            )
            if address not in ledger.stages:
                continue
            stored = results.tile_embeddings(slide_id, address)
            columns = {"slide_id": slide_id} | {
                n: ledger.slide.get(n) for n in OF_COHORTS
            }
            columns |= results.tiles(slide_id, address.split("/")[0]).columns
            if names := [f"{slide_id}:{x}x{y}" for x, y in stored.coords_l0.tolist()]:
                tables.append(pd.DataFrame(columns, index=names))
                arrays.append((stored.features, stored.coords_l0))
                encoder = str(stored.attributes.get("encoder", ""))
    got = f"none in {str(folder)!r}; run `thinsection embed` first"
    require(tables, "folder must hold tile embeddings", got, error=StoreError)
    obs = pd.concat(tables, join="inner")
    for name in ("slide_id", *OF_COHORTS):
        obs[name] = obs[name].astype("string").astype("category")
    embeddings, coords_l0 = map(np.concatenate, zip(*arrays))
    uns = {"encoder": encoder, "features": address}
    with atomic_path(target) as tmp:
        anndata.AnnData(
            X=embeddings, obs=obs, obsm={"spatial": coords_l0}, uns=uns
        ).write_h5ad(tmp)
    return len(obs)
