"""Exports results to another tool's folder; equal files are linked, and nothing is overwritten.

The exported tiles cover the same field of view in µm as ours. docs/formats.md lists the programs
that have read such a folder.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from thinsection.encode.registry import peer_encoder
from thinsection.errors import InvalidInputError, OverwriteError, StoreError
from thinsection.files.atomic import atomic_path, link_or_copy, read_table, write_table
from thinsection.registry import Entry, Registry
from thinsection.results.folder import (
    Listener,
    Results,
    leaving_out,
    open_results,
)
from thinsection.results.tiled_slide import TiledSlide, tiled_slide
from thinsection.store.identity import file_sum
from thinsection.store.ledger import SlideLedger
from thinsection.store.tile_tables import EmbeddingRows
from thinsection.store.tiles_h5 import (
    TilesFile,
    read_slide_embedding,
    read_tiles,
)
from thinsection.types import Document, counted

# file name endings that TRIDENT treats as one suffix
_COMPOUND_SUFFIXES = (".ome.tif", ".ome.tiff", ".ome.zarr")
# tools that name a slide's files by the slide id instead of the file name
_NAMED_BY_ID = ("stamp", "slide2vec", "jpeg", "png", "webdataset")

# rows of embeddings that are copied in one step
BLOCK_ROWS = 2048

# a file to link, or a function that writes the file
Source = Path | Callable[[Path], object]
# rows by file name
Tables = Mapping[str, list[Document]]


@dataclass(frozen=True, kw_only=True)
class PeerSlide:
    """One slide to export. Properties raise InvalidInputError if the value is not known.

    Attributes:
        slide_id: id in our results.
        out: the tool's folder.
        facts: facts from the ledger: slide_path, width, mpp_x, label, ...
        tiles_path: file of the tiles.
        encoder: the tool's name of the encoder; '' if there are no embeddings.
        features_path: file of the embeddings.
        dim: dimension of the embeddings.
        slide_features: files of slide embeddings, by name of the slide encoder.
        tiled: returns the slide and its grid, to read tiles again from the slide's file.
    """

    slide_id: str
    out: Path
    facts: Document
    tiles_path: Path
    encoder: str = ""
    features_path: Path | None = None
    dim: int = 0
    slide_features: Mapping[str, Path]
    tiled: Callable[[], TiledSlide]

    @property
    def tiles(self) -> TilesFile:
        """Coordinates, attributes and columns of the tiles, without embeddings, as now on disk.

        Memory:
            The tiles of the slide that was used last.
        """
        path = self.tiles_path
        changed_ns = path.stat().st_mtime_ns if path.is_file() else 0
        return _tiles_of(path, changed_ns)

    @property
    def path(self) -> str:
        """The slide's file."""
        return str(self.facts["slide_path"])

    @property
    def file_stem(self) -> str:
        """Name of the slide's file without suffix; TRIDENT and CLAM name their files after it."""
        name = Path(self.path).name
        for suffix in _COMPOUND_SUFFIXES:
            if name.lower().endswith(suffix):
                return name[: -len(suffix)]
        return Path(name).stem

    @property
    def edge_l0(self) -> int:
        """Edge of a tile in level-0 pixels. Raises an error if tiles are not square there."""
        width, height = (int(edge) for edge in self.tiles.attributes["tile_size_l0"])
        if width != height:
            raise InvalidInputError(
                f"tiles must be square in level-0 pixels, got {width} x {height} in "
                f"{self.slide_id!r}; export to stamp, which uses µm"
            )
        return width

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of level 0 in pixels."""
        width = self.facts.get("width")
        height = self.facts.get("height")
        if not width or not height:
            raise InvalidInputError(
                f"size is missing in {self.slide_id!r}; import it with slides=..."
            )
        return int(width), int(height)

    @property
    def mpp(self) -> tuple[float, float]:
        """Resolution of level 0 in µm per pixel."""
        mpp_x = self.facts.get("mpp_x")
        mpp_y = self.facts.get("mpp_y")
        if not mpp_x or not mpp_y:
            raise InvalidInputError(
                f"slide_mpp is missing in {self.slide_id!r}; run again with slide_mpp=..."
            )
        return float(mpp_x), float(mpp_y)

    def features(self) -> EmbeddingRows:
        """Embeddings (N, D), which are read from their file when they are indexed."""
        assert self.features_path is not None
        return EmbeddingRows(self.features_path)

    def check(self) -> None:
        """Checks the files of tiles and embeddings, which may be linked without being read.

        Memory:
            8 MiB.

        Raises:
            StoreError: a file is damaged.
        """
        if self.features_path is not None:
            EmbeddingRows(self.features_path).check()
        for path in self.slide_features.values():
            read_slide_embedding(path)
        _ = self.tiles

    def write_pt(
        self, path: Path, order: npt.NDArray[np.intp] | slice = slice(None)
    ) -> None:
        """Writes the embeddings as one tensor, float32 (N, D); `order` reorders the rows.

        Memory:
            4 N D bytes, as such a file is written from one tensor.
        """
        import torch

        rows = self.features()
        place = np.empty(len(rows), dtype=np.intp)
        place[order] = np.arange(len(rows))
        tensor = torch.empty(rows.shape)
        array = tensor.numpy()
        start = 0
        for block in rows.blocks(BLOCK_ROWS):
            array[place[start : start + len(block)]] = block
            start += len(block)
        # given a path, torch.save would write the temporary file's name into the archive
        with path.open("wb") as file:
            torch.save(tensor, file)

    def check_embedded(self, tool: str) -> None:
        """Raises an error if a slide has no embedding of any tile."""
        if self.features_path is None or not len(self.tiles.coords_l0):
            raise InvalidInputError(
                f"tiles must have embeddings, got none in {self.slide_id!r}; {tool} has no "
                "files for coordinates alone"
            )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Layout of another tool's folder.

    Attributes:
        files: yields the relative name and the source of each file of a slide.
        tables: returns the tables of all slides.
        embeddings: False if the layout has tiles only; then several embeddings need no choice.
    """

    files: Callable[[PeerSlide], Iterator[tuple[str, Source]]]
    tables: Callable[[Sequence[PeerSlide]], Tables]
    embeddings: bool = True


_BUILT_IN = (
    Entry(
        name="trident",
        help="Write coordinates and embeddings as a job_dir of TRIDENT.",
        target="thinsection.exchange.peer_layouts:TRIDENT",
    ),
    Entry(
        name="clam",
        help="Write coordinates, embeddings and slide lists for CLAM.",
        target="thinsection.exchange.peer_layouts:CLAM",
    ),
    Entry(
        name="stamp",
        help="Write embeddings, clini table and slide table for STAMP.",
        target="thinsection.exchange.peer_layouts:STAMP",
    ),
    Entry(
        name="slide2vec",
        help="Write coordinates, embeddings, slide lists for slide2vec.",
        target="thinsection.exchange.peer_layouts:SLIDE2VEC",
    ),
    Entry(
        name="jpeg",
        help="Write every tile as a JPEG, in a folder for each slide.",
        target="thinsection.exchange.tile_images:JPEG",
    ),
    Entry(
        name="png",
        help="Write every tile as a PNG, in a folder for each slide.",
        target="thinsection.exchange.tile_images:PNG",
    ),
    Entry(
        name="webdataset",
        help="Write tiles as JPEGs into tar shards for WebDataset.",
        target="thinsection.exchange.tile_images:WEBDATASET",
    ),
)
LAYOUTS: Registry[Layout] = Registry("layout", "thinsection.layouts", _BUILT_IN)


def export_peer(
    folder: str | Path,
    out: str | Path,
    tool: str,
    *,
    features: str | None = None,
    copy: bool = False,
    on_left_out: Listener | None = None,
) -> int:
    """Writes a results folder in the layout of `tool`; returns the number of slides now in `out`.

    Existing files are never overwritten with other bytes; a second export adds the new slides.
    Equal files become hard links (copies on another file system, or with `copy`).

    Args:
        folder: a results folder.
        out: job_dir of TRIDENT, feat_dir of CLAM, ...
        tool: a name in `LAYOUTS`.
        features: 'GRID/features_NAME' or NAME; None if there is one, or to export only coordinates.
            For tiles as images: GRID; None if there is one.
        copy: copies files, for tools that write over their files.
        on_left_out: called with each slide that cannot be exported; with None that is an error.

    Memory:
        A slide's embeddings, 4 N D bytes, for the tensors of CLAM and slide2vec; else some MiB and
        16 bytes per tile. Some kB per slide. `thinsection plan --command 'export clam'` predicts
        the peak.

    Raises:
        StoreError: nothing to export, or a file with other bytes exists.
        InvalidInputError: several embeddings and no name given, or two slides with one file name.
    """
    folder = Path(folder)
    out = Path(out)
    layout = LAYOUTS.load(tool)
    results = open_results(folder)
    if layout.embeddings:
        grid, address = results.choose_tiles(features)
    else:
        grid = results.choose_grid(features, chooser='features="..."')
        address = ""
    out_absolute = out.absolute()
    reasons: list[str] = []
    listener = noting(reasons, on_left_out)
    slides: list[PeerSlide] = []
    for slide_id, ledger in results.ledgers.items():
        with leaving_out(slide_id, listener):
            ledger.check()
            has_features = not address or address in ledger.stages
            if f"{grid}/tiles" in ledger.stages and has_features:
                slide = _peer_slide(
                    results,
                    ledger,
                    out=out_absolute,
                    grid=grid,
                    address=address,
                    tool=tool,
                )
                slides.append(slide)
    if tool not in _NAMED_BY_ID:
        _check_file_stems(slides, tool)
    exported: list[PeerSlide] = []
    for slide in slides:
        with leaving_out(slide.slide_id, listener):
            slide.check()
            for name, source in layout.files(slide):
                _place(out / name, source, copy=copy)
            exported.append(slide)
    if not exported:
        raise nothing_exported(folder, tool, reasons)
    for name, rows in layout.tables(exported).items():
        _place_table(out / name, rows)
    return len(exported)


def noting(reasons: list[str], on_left_out: Listener | None) -> Listener | None:
    """Returns a listener that also adds each line to `reasons`; None if there is no listener."""
    if on_left_out is None:
        return None

    def leave_out(line: str) -> None:
        reasons.append(line)
        on_left_out(line)

    return leave_out


def nothing_exported(folder: Path, tool: str, reasons: Sequence[str]) -> StoreError:
    """Error if no slide was exported, with the reason of the first one."""
    place = repr(str(folder))
    if not reasons:
        return StoreError(f"folder must contain tiles, got none in {place}")
    return StoreError(
        f"folder must have slides that {tool} can hold, got none of "
        f"{counted(len(reasons), 'slide')} in {place}; {reasons[0]}"
    )


@lru_cache(maxsize=1)
def _tiles_of(path: Path, changed_ns: int) -> TilesFile:
    """Tiles of one slide; cached because a layout asks for them several times."""
    return read_tiles(path)


def _check_file_stems(slides: Sequence[PeerSlide], tool: str) -> None:
    """Raises an error for two slides with one file name, which the tool could not distinguish."""
    ids_by_stem: dict[str, str] = {}
    for slide in slides:
        other = ids_by_stem.setdefault(slide.file_stem, slide.slide_id)
        if other != slide.slide_id:
            raise InvalidInputError(
                f"slides must have different file names, got {slide.file_stem!r} for {other!r} "
                f"and {slide.slide_id!r}; {tool} cannot distinguish them"
            )


def _peer_slide(
    results: Results,
    ledger: SlideLedger,
    *,
    out: Path,
    grid: str,
    address: str,
    tool: str,
) -> PeerSlide:
    """One slide of a results folder, with the tool's name of its encoder."""
    files = {}
    for stage_address, record in ledger.stages.items():
        if record.files:
            files[stage_address] = results.folder / next(iter(record.files))
    facts = ledger.stages[address].facts if address else {}
    label = address.rpartition("/")[2].removeprefix("features_")
    encoder = peer_encoder(tool, str(facts.get("encoder", "")), label)
    prefix = f"{grid}/slide_features_"
    slide_features = {}
    for stage_address, path in files.items():
        is_pooled = stage_address.startswith(prefix)
        if is_pooled and address in ledger.stages[stage_address].needs:
            name = stage_address.removeprefix(prefix).replace(label, encoder)
            slide_features[name] = path
    tiles_path = files[f"{grid}/tiles"]
    return PeerSlide(
        slide_id=ledger.slide_id,
        out=out,
        facts=ledger.slide,
        tiles_path=tiles_path,
        encoder=encoder,
        features_path=files.get(address),
        dim=int(facts.get("dim", 0)),
        slide_features=slide_features,
        tiled=partial(tiled_slide, results, ledger, grid),
    )


def _place(target: Path, source: Source, *, copy: bool = False) -> None:
    """Writes or links a file; an existing file must have the same content."""
    may_be_linked = not copy and target.exists()
    if isinstance(source, Path) and may_be_linked and target.samefile(source):
        return
    with atomic_path(target) as tmp:
        if isinstance(source, Path):
            link_or_copy(source, tmp, copy=copy)
        else:
            source(tmp)
        if target.exists() and file_sum(tmp) != file_sum(target):
            raise OverwriteError(
                f"file must be new or unchanged, got a different one at {str(target)!r}; pass "
                'another out="..."'
            )


def _place_table(target: Path, rows: list[Document]) -> None:
    """Writes a table; all rows of an existing table must be in the new one."""
    with atomic_path(target) as tmp:
        write_table(tmp, rows)
        with contextlib.suppress(FileNotFoundError):
            new_rows = {frozenset(row.items()) for row in read_table(tmp)}
            rows_before = [frozenset(row.items()) for row in read_table(target)]
            if any(row not in new_rows for row in rows_before):
                raise OverwriteError(
                    "table must be new or only gain rows, got one with other rows at "
                    f'{str(target)!r}; pass another out="..."'
                )
