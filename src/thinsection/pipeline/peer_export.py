"""A results folder in the folder of another tool: links where files are equal, never replaced.

What their readers take for the field of view is ours in µm: docs/formats.md says which of them were
run on it.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.encode.registry import peer_encoder
from thinsection.errors import InvalidInputError, StoreError
from thinsection.files.atomic import atomic_path, link_or_copy, read_table, write_table
from thinsection.pipeline.folder import (
    Listener,
    Results,
    leaving_out,
    one_address,
    open_results,
)
from thinsection.registry import Entry, Registry
from thinsection.store.identity import file_sum
from thinsection.store.ledger import SlideLedger
from thinsection.store.tiles_h5 import TilesFile, read_tiles

# suffixes that TRIDENT takes as one
_COMPOUND_SUFFIXES = (".ome.tif", ".ome.tiff", ".ome.zarr")
# tools that name a slide's files by its id, not by its file's name
_NAMED_BY_ID = ("stamp", "slide2vec")

# a file of ours, or what writes one
Source = Path | Callable[[Path], None]
# file name -> rows
Tables = Mapping[str, list[dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class PeerSlide:
    """One slide as a layout sees it. Properties raise InvalidInputError where nobody knows them.

    Attributes:
        slide_id: our id.
        out: the tool's folder.
        facts: facts of the ledger: slide_path, width, mpp_x, label, ...
        tiles: coordinates, attributes and columns; no embeddings.
        tiles_path: file of the tiles.
        encoder: its name in the tool; '' where there are no embeddings.
        features_path: file of the embeddings.
        dim: dimension of the embeddings.
        slide_features: files of slide embeddings, by name of the slide encoder.
    """

    slide_id: str
    out: Path
    facts: Mapping[str, Any]
    tiles: TilesFile
    tiles_path: Path
    encoder: str = ""
    features_path: Path | None = None
    dim: int = 0
    slide_features: Mapping[str, Path]

    @property
    def path(self) -> str:
        """The slide's file."""
        return str(self.facts["slide_path"])

    @property
    def file_stem(self) -> str:
        """The file's name without suffix, by which TRIDENT and CLAM find a slide's files."""
        name = Path(self.path).name
        for suffix in _COMPOUND_SUFFIXES:
            if name.lower().endswith(suffix):
                return name[: -len(suffix)]
        return Path(name).stem

    @property
    def edge_l0(self) -> int:
        """Edge of a tile in level-0 px; tiles that are not square there are refused."""
        width, height = (int(edge) for edge in self.tiles.attributes["tile_size_l0"])
        if width != height:
            raise InvalidInputError(
                f"tiles must be square in level-0 px, got {width} x {height} in "
                f"{self.slide_id!r}; export to stamp, which has µm"
            )
        return width

    @property
    def size(self) -> tuple[int, int]:
        """Px of level 0."""
        width = self.facts.get("width")
        height = self.facts.get("height")
        if not width or not height:
            raise InvalidInputError(
                f"size is missing in {self.slide_id!r}; import it with --slides"
            )
        return int(width), int(height)

    @property
    def mpp(self) -> tuple[float, float]:
        """µm/px."""
        mpp_x = self.facts.get("mpp_x")
        mpp_y = self.facts.get("mpp_y")
        if not mpp_x or not mpp_y:
            raise InvalidInputError(
                f"slide_mpp is missing in {self.slide_id!r}; give it to the run"
            )
        return float(mpp_x), float(mpp_y)

    def features(self) -> npt.NDArray[Any]:
        """Its embeddings (N, D).

        Memory:
            4 N D bytes.
        """
        embeddings = None
        if self.features_path is not None:
            embeddings = read_tiles(self.features_path).features
        assert embeddings is not None
        return embeddings

    def write_pt(
        self, path: Path, order: npt.NDArray[np.intp] | slice = slice(None)
    ) -> None:
        """Writes the embeddings as one tensor, float32 (N, D); `order` is of its rows."""
        import torch

        tensor = torch.from_numpy(self.features()[order]).float()
        # by a name, the archive would hold the temporary file's
        with path.open("wb") as file:
            torch.save(tensor, file)

    def check_embedded(self, tool: str) -> None:
        """Refuses a slide without the embedding of any tile."""
        if self.features_path is None or not len(self.tiles.coords_l0):
            raise InvalidInputError(
                f"tiles must be embedded, got none of {self.slide_id!r}; "
                f"{tool} has no files of coordinates alone"
            )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Layout of a tool's folder.

    Attributes:
        files: relative name of each file of a slide, and its source.
        tables: tables of all slides.
    """

    files: Callable[[PeerSlide], Iterator[tuple[str, Source]]]
    tables: Callable[[Sequence[PeerSlide]], Tables]


_BUILT_IN = (
    Entry(
        name="trident",
        help="TRIDENT's job_dir: coordinates, features, slide features.",
        target="thinsection.pipeline.peer_layouts:TRIDENT",
    ),
    Entry(
        name="clam",
        help="CLAM's patches, h5_files, pt_files and its lists.",
        target="thinsection.pipeline.peer_layouts:CLAM",
    ),
    Entry(
        name="stamp",
        help="STAMP's feature_dir, coordinates in µm, clini and slide tables.",
        target="thinsection.pipeline.peer_layouts:STAMP",
    ),
    Entry(
        name="slide2vec",
        help="slide2vec's tilings, tile embeddings and lists.",
        target="thinsection.pipeline.peer_slide2vec:SLIDE2VEC",
    ),
)
LAYOUTS: Registry[Layout] = Registry("layout", "thinsection.layouts", _BUILT_IN)


def export_peer(
    folder: Path,
    out: Path,
    tool: str,
    *,
    features: str | None = None,
    copy: bool = False,
    on_left_out: Listener | None = None,
) -> int:
    """Writes a folder as `tool` writes it, and returns the number of slides that are now in it.

    What is there is never replaced by other bytes; doing it again adds slides that are new. Files
    that are equal in both are hard links (copies across file systems, or with `copy`).

    Args:
        folder: a results folder.
        out: job_dir of TRIDENT, feat_dir of CLAM, ...
        tool: a name in `LAYOUTS`.
        features: 'GRID/features_NAME' or NAME; None where there is one, or coordinates alone.
        copy: copies files, for tools that write over their files.
        on_left_out: called with each slide that cannot be exported: with None that is an error.

    Memory:
        A slide's embeddings, 4 N D bytes; some kB per slide.

    Raises:
        StoreError: nothing to export, or other bytes are in the way.
        InvalidInputError: several embeddings and none named, or two slides of one file name.
    """
    layout = LAYOUTS.load(tool)
    results = open_results(folder)
    address = ""
    if results.features or features:
        address = one_address(results.features, features, "features")
        grid = address.split("/")[0]
    else:
        grid = one_address(results.grids, None, "grid")
    out_absolute = out.absolute()
    slides: list[PeerSlide] = []
    for slide_id, ledger in results.ledgers.items():
        with leaving_out(slide_id, on_left_out, StoreError, InvalidInputError):
            if ledger.damage:
                raise StoreError(f"ledger must be whole, got {ledger.damage}")
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
        with leaving_out(slide.slide_id, on_left_out, InvalidInputError):
            for name, source in layout.files(slide):
                _place(out / name, source, copy=copy)
            exported.append(slide)
    if not exported:
        raise StoreError(f"folder must hold tiles, got none in {str(folder)!r}")
    for name, rows in layout.tables(exported).items():
        _place_table(out / name, rows)
    return len(exported)


def _check_file_stems(slides: Sequence[PeerSlide], tool: str) -> None:
    """Refuses two slides of one file name, whose files the tool would take for each other's."""
    ids_by_stem: dict[str, str] = {}
    for slide in slides:
        other = ids_by_stem.setdefault(slide.file_stem, slide.slide_id)
        if other != slide.slide_id:
            raise InvalidInputError(
                f"slides must have different file names, got {slide.file_stem!r} of "
                f"{other!r} and {slide.slide_id!r}; {tool} cannot tell them apart"
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
    """A slide of a results folder, with the names that its encoders have in the tool."""
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
        tiles=read_tiles(tiles_path),
        tiles_path=tiles_path,
        encoder=encoder,
        features_path=files.get(address),
        dim=int(facts.get("dim", 0)),
        slide_features=slide_features,
    )


def _place(target: Path, source: Source, *, copy: bool = False) -> None:
    """Puts a file where none is, or where the same one is."""
    with atomic_path(target) as tmp:
        if isinstance(source, Path):
            link_or_copy(source, tmp, copy=copy)
        else:
            source(tmp)
        if target.exists() and file_sum(tmp) != file_sum(target):
            raise StoreError(
                f"file must be new or the same, got another one at {str(target)!r}; "
                "pass another --out"
            )


def _place_table(target: Path, rows: list[dict[str, Any]]) -> None:
    """Writes a table where none is, or one whose rows are all in the new one."""
    with atomic_path(target) as tmp:
        write_table(tmp, rows)
        with contextlib.suppress(FileNotFoundError):
            new_rows = read_table(tmp)
            if any(row not in new_rows for row in read_table(target)):
                raise StoreError(
                    "table must be new, or only grow, got one with other rows at "
                    f"{str(target)!r}; pass another --out"
                )
