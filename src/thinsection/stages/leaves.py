"""Stages that no tile needs: measures of tiles, pooling, overview, tile graph, other formats."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from thinsection.errors import ConfigError, InvalidInputError, StoreError, require
from thinsection.files.atomic import atomic_path, write_table
from thinsection.pool.encoder import SlideEncoderIdentity
from thinsection.report.draw import Outline, Tiles, open_picture, write_drawing
from thinsection.stages.formats import FORMATS, EmbeddingTable
from thinsection.stages.labels import join_label, slug
from thinsection.stages.stage import Output, SlideWork, Stage
from thinsection.stages.tiles import FeaturesStage, TilesStage, deciding, write_columns
from thinsection.store import tiles_h5
from thinsection.store.tile_tables import MEASURED
from thinsection.tiles import TileTable
from thinsection.tiles.measures import MEASURES, measure_tiles
from thinsection.tiles.transforms import StainVectors
from thinsection.types import TileArray

if TYPE_CHECKING:
    from thinsection.pool import SlideEncoder, TileLayout

_SPEC = re.compile(r"\s*(knn|radius)\s*:\s*(\d+(?:\.\d+)?)\s*(?:um|µm)?\s*")
_SAMPLED = (
    256  # tiles, spread evenly over the table, from which stain vectors are estimated
)
_SAMPLE_PX = 32  # of each, at least so many rows and columns, spread evenly
_PARTS = ("hematoxylin", "eosin")
STAIN_COLUMNS = (
    *(
        f"macenko_{stain}_{channel}"
        for stain in _PARTS
        for channel in ("red", "green", "blue")
    ),
    *(f"macenko_{stain}_strength" for stain in _PARTS),
)


@dataclass(eq=False)
class TileMeasures:
    """Measures of a slide's tiles while decode workers take them, in whatever order.

    Memory: 64 bytes per tile, and a sample of at most 2**20 px, 3 bytes each.
    """

    num_tiles: int
    tile_px: int
    values: npt.NDArray[np.float32] = field(init=False)  # (N, measures)

    def __post_init__(self) -> None:
        self.values = np.full((self.num_tiles, len(MEASURES)), np.nan, dtype=np.float32)
        count, self._step = (
            min(self.num_tiles, _SAMPLED),
            max(1, self.tile_px // _SAMPLE_PX),
        )
        self._places = (
            np.linspace(0, self.num_tiles - 1, count).round().astype(np.int64)
        )
        edge = len(range(0, self.tile_px, self._step))
        self._sample = np.empty((count, edge, edge, 3), dtype=np.uint8)

    def __call__(self, indices: npt.NDArray[np.int64], tiles: TileArray) -> None:
        """Takes tiles (b, tile_px, tile_px, 3) at their places in the table; from any thread."""
        if len(indices):
            self.values[indices] = measure_tiles(tiles)
        for row in np.flatnonzero(np.isin(indices, self._places)).tolist():
            slot = np.searchsorted(self._places, indices[row])
            self._sample[slot] = tiles[row, :: self._step, :: self._step]

    def sampled(self, kept: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """Px (n, 3) of the sampled tiles that were kept."""
        return self._sample[np.isin(self._places, kept)].reshape(-1, 3)


@dataclass(frozen=True, kw_only=True)
class MeasuresStage(Stage):
    """`GRID/measures/ID.h5` and `.tsv`: a row per tile; facts: what they say of the slide.

    Fed by the stream, in the pass that encoders need, or in one of its own.
    """

    title: ClassVar[str] = "measures"
    reads = "tiles"

    tiles: TilesStage

    @property
    def address(self) -> str:
        return f"{self.tiles.grid}/{MEASURED}"

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"measures": list(MEASURES), "version": 1}

    def begin(self, work: SlideWork, table: TileTable) -> TileMeasures:
        """What takes the tiles of the table."""
        made = TileMeasures(num_tiles=len(table), tile_px=table.plan.tile_px)
        work.values[f"{self.address}, of all tiles"] = made
        return made

    def write(self, work: SlideWork, kept: npt.NDArray[np.int64]) -> Output:
        """Writes the measures of the tiles that filters kept, in the order of the tile table."""
        table: TileTable = work.value(self.tiles)
        made: TileMeasures = work.values.pop(f"{self.address}, of all tiles")
        columns = dict(zip(MEASURES, np.ascontiguousarray(made.values[kept].T)))
        name, text = (
            self.file(work.entry.slide_id, suffix) for suffix in (".h5", ".tsv")
        )
        write_columns(work.path(name), table.coords_l0, columns, work.attributes)
        shown = dict(zip(("x_l0", "y_l0"), table.coords_l0.T))
        shown |= (
            dict(sorted(table.columns.items())) | columns
        )  # as a table that was read back
        write_table(work.path(text), zip(*shown.values()), tuple(shown))
        facts: dict[str, Any] = {"warnings": ""}
        if len(kept):
            facts |= {
                column: float(np.median(values)) for column, values in columns.items()
            }
            facts |= _stains(made.sampled(kept), work.entry.slide_id)
        return Output(files=(name, text), facts=facts, value=columns)

    def load(self, work: SlideWork) -> Mapping[str, npt.NDArray]:
        """The stored columns, in the order of `MEASURES`."""
        stored = tiles_h5.read_tiles(work.path(self.file(work.entry.slide_id))).columns
        return {name: stored[name] for name in MEASURES}


def _stains(px: npt.NDArray[np.uint8], slide_id: str) -> dict[str, Any]:
    """Macenko's stain vectors and strengths; none, and why, where there are not two stains."""
    try:
        found = StainVectors.estimate(px, slide_id)
    except InvalidInputError as error:
        reason = (
            str(error)
            .partition("; ")[0]
            .replace("stain normalisation", "stain vectors")
        )
        return {"warnings": reason}
    return dict(
        zip(STAIN_COLUMNS, (*found.hematoxylin, *found.eosin, *found.strengths))
    )


def pool_tiles(
    tiles: tiles_h5.TilesFile,
    encoder: "SlideEncoder",
    path: Path,
    layout: "TileLayout",
    **key: str,
) -> int:
    """Writes the embedding (D,) of the slide that the path is named by, and what it is of; D."""
    assert tiles.features is not None
    embedding = encoder.encode_tiles(tiles.features, tiles.coords_l0, layout)
    attributes = {
        "name": path.stem,
        "slide_encoder": encoder.name,
        "weights_hash": encoder.weights_hash or "",
        "num_tiles": len(tiles.coords_l0),
        **key,
    }
    tiles_h5.write_slide_embedding(path, embedding, attributes)
    return len(embedding)


def tile_layout(
    tiles: tiles_h5.TilesFile,
    path: Path,
    *,
    tile_px_l0: int | None = None,
    stride_l0: int | None = None,
) -> "TileLayout":
    """Layout that the tiles file of this path says; the arguments count where it is silent.

    Raises StoreError: nobody says the size of a tile.
    """
    from thinsection.pool import TileLayout

    if tiles.tile_px_l0 is not None:
        size_l0 = tiles.size_l0
    elif tile_px_l0 is not None:
        size_l0 = (tile_px_l0, tile_px_l0)
    else:
        raise StoreError(
            f"tile_px_l0 is missing in {str(path)!r}; pass --tile-px-l0 "
            "(512 for 512 px tiles of a 20x slide)"
        )
    if tiles.stride_l0 is not None:
        return TileLayout(size_l0, tiles.stride_l0)
    if stride_l0 is not None:
        return TileLayout(size_l0, (stride_l0, stride_l0))
    return TileLayout(size_l0)


@dataclass(frozen=True, kw_only=True)
class PoolingStage(Stage):
    """`GRID/slide_features_NAME/ID.h5`: `features` (D,), of the stored embeddings of its tiles."""

    title: ClassVar[str] = "aggregate"

    features: Stage  # of the tile embeddings
    slide_encoder: SlideEncoderIdentity
    warnings: tuple[str, ...] = ()  # what does not fit between the two

    @property
    def address(self) -> str:
        grid, _, folder = self.features.address.rpartition("/")
        return f"{grid}/slide_features_{self.slide_encoder.label(folder.removeprefix('features_'))}"

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"slide_encoder": deciding(self.slide_encoder.identity)}

    def run(self, work: SlideWork) -> Output:
        """Pools; a slide without tiles has no embedding and no file.

        Memory: 4 N D bytes and the slide encoder's own bound.
        """
        slide_id = work.entry.slide_id
        encoder = work.slide_encoders[self.slide_encoder.name]
        source = work.path(self.features.file(slide_id))
        tiles = tiles_h5.read_tiles(source)
        if tiles.features is None or len(tiles.features) == 0:
            return Output(files=(), facts={"slide_dim": 0})
        layout = tile_layout(tiles, source)
        dim = pool_tiles(tiles, encoder, work.path(self.file(slide_id)), layout)
        warnings = "; ".join(self.warnings)
        facts = {"slide_encoder": encoder.name, "slide_dim": dim, "warnings": warnings}
        return Output(files=(self.file(slide_id),), facts=facts)


@dataclass(frozen=True, kw_only=True)
class OverviewStage(Stage):
    """`GRID/overviews/ID.png`: the slide's picture, tissue outline, tiles."""

    title: ClassVar[str] = "overview"

    tiles: TilesStage

    @property
    def address(self) -> str:
        return f"{self.tiles.grid}/overviews"

    @property
    def needs(self) -> tuple[Stage, ...]:
        return (self.tiles, self.tiles.mask)

    def run(self, work: SlideWork) -> Output:
        """Draws what is stored, so that the picture is the same at any time."""
        name, table = self.file(work.entry.slide_id, ".png"), work.value(self.tiles)
        tissue, told = (
            work.value(self.tiles.mask),
            f"{len(table):,} tile{'s' * (len(table) != 1)}",
        )
        outline = Outline(
            tissue.mask, f"tissue, {tissue.tissue_fraction:.1%} of the slide"
        )
        layers = (outline, Tiles(table.coords_l0, table.plan.size_l0, told))
        write_drawing(work.path(name), open_picture(work.ledger), layers)
        return Output(files=(name,))


def parse_graph_spec(text: str) -> dict[str, Any]:
    """The arguments of `tile_graph` that 'knn:8' or 'radius:100' (µm) names.

    Raises ConfigError: it names none.
    """
    match = _SPEC.fullmatch(text)
    kind, value = match.groups() if match else ("", "0")
    valid = float(value) > 0 and not (kind == "knn" and "." in value)
    rule = "graph must be 'knn:K' (K neighbours) or 'radius:R' (R in µm)"
    require(valid, rule, repr(text), error=ConfigError)
    return {"k": int(value)} if kind == "knn" else {"radius_um": float(value)}


@dataclass(frozen=True, kw_only=True)
class GraphStage(Stage):
    """`GRID/graph_SPEC/ID.h5`: `edge_index` (2, E) int64 over the rows of the grid, `distances`."""

    title: ClassVar[str] = "graph"

    tiles: TilesStage
    spec: str  # 'knn:8' or 'radius:100'

    @property
    def address(self) -> str:
        return f"{self.tiles.grid}/graph_{slug(self.spec)}"

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"graph": self.spec}

    def run(self, work: SlideWork) -> Output:
        """Builds the graph. Memory: that of `tile_graph`."""
        from thinsection.neighbors import tile_graph

        table: TileTable = work.value(self.tiles)
        wanted, slide = parse_graph_spec(self.spec), work.ledger.slide
        mpp = (slide["mpp_x"], slide["mpp_y"]) if slide.get("mpp_x") else None
        name = self.file(work.entry.slide_id)
        with atomic_path(work.path(name)) as tmp, tiles_h5.new_h5(tmp) as file:
            file.attrs["spec"] = self.spec
            if len(table):
                graph = tile_graph(table.coords_l0, **wanted, slide_mpp=mpp)
                tiles_h5.add_dataset(file, "edge_index", graph.edge_index)
                tiles_h5.add_dataset(file, "distances", graph.distances)
        return Output(files=(name,))


@dataclass(frozen=True, kw_only=True)
class FormatStage(Stage):
    """`GRID/FORMAT_ENCODER/ID.SUFFIX`: the embeddings of a slide in another format."""

    title: ClassVar[str] = "export"
    told: ClassVar[tuple[str, ...]] = ("patient_id", "label")

    features: FeaturesStage
    format: str  # name of `FORMATS`
    measures: MeasuresStage | None = (
        None  # whose columns go beside those of the tile table
    )

    @property
    def address(self) -> str:
        name = f"{slug(self.format)}_{self.features.label}"
        return f"{self.features.tiles.grid}/{join_label(name, MEASURED if self.measures else '')}"

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"format": self.format}

    @property
    def needs(self) -> tuple[Stage, ...]:
        return (self.features, self.features.tiles, *filter(None, (self.measures,)))

    def run(self, work: SlideWork) -> Output:
        """Writes the file. Memory: the slide's embeddings, 4 N D bytes."""
        name = self.file(work.entry.slide_id, FORMATS.entry(self.format).suffixes[0])
        stored = self.features.load(work)
        assert stored.features is not None
        columns = dict(
            sorted(work.value(self.features.tiles).columns.items())
        )  # as read back
        columns |= work.value(self.measures) if self.measures else {}
        known: dict[str, Any] = {n: work.ledger.slide.get(n) for n in self.told}
        known |= {"slide_id": work.entry.slide_id, "coords_l0": stored.coords_l0}
        table = EmbeddingTable(
            tile_embeddings=stored.features, columns=columns, **known
        )
        with atomic_path(work.path(name)) as tmp:
            FORMATS.load(self.format)(table, tmp)
        return Output(files=(name,))
