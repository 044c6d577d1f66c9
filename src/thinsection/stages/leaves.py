"""Stages that read only stored results: pooling, overview, tile graph, other formats."""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

from thinsection.errors import ConfigError, StoreError, naming_part
from thinsection.files.atomic import atomic_path
from thinsection.pool.encoder import SlideEncoderIdentity, check_fit
from thinsection.report.draw import write_drawing
from thinsection.report.layers import Layer, Outline, Tiles, overlay_layers
from thinsection.report.stored import open_picture
from thinsection.slide.geometry import nominal_mpp
from thinsection.stages.features import FeaturesStage, result_fields
from thinsection.stages.formats import FORMATS, EmbeddingTable
from thinsection.stages.labels import join_label, slug
from thinsection.stages.masks import CheckedTissue
from thinsection.stages.stage import AnyStage, Output, Reads, SlideWork, Stage
from thinsection.stages.tiles import MeasuresStage, TilesStage
from thinsection.store import hdf5, tiles_h5
from thinsection.store.tile_tables import MEASURED, EmbeddingRows
from thinsection.types import PlainValues

if TYPE_CHECKING:
    from thinsection.pool import SlideEncoder, TileLayout

_GRAPH_SPEC = re.compile(r"\s*(knn|radius)\s*:\s*(\d+(?:\.\d+)?)\s*(?:um|µm)?\s*")


def pool_tiles(
    source: Path,
    encoder: "SlideEncoder",
    path: Path,
    layout: "TileLayout",
    **more_attributes: str,
) -> int:
    """Pools the tiles of the file `source`, writes (D,) to `path`, and returns D.

    The file's attributes record the slide encoder, the hash of its weights, the number of tiles,
    and `more_attributes`.

    Memory: 4 N D bytes, or a block of rows for an encoder that reads blocks; and the slide
    encoder's own limit.
    """
    coords_l0 = tiles_h5.read_tiles(source, embeddings=False).coords_l0
    rows = EmbeddingRows(source)
    embeddings: Any = rows if encoder.reads_blocks else rows[:]
    embedding = encoder.encode_tiles(embeddings, coords_l0, layout)
    attributes = {
        "name": path.stem,
        "slide_encoder": encoder.name,
        "weights_hash": encoder.weights_hash or "",
        "num_tiles": len(coords_l0),
        **more_attributes,
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
    """Layout of tiles from the attributes of their file; the arguments fill in missing values.

    Raises StoreError: neither the file nor the arguments state the size of a tile.
    """
    from thinsection.pool import TileLayout

    if tiles.tile_px_l0 is not None:
        size_l0 = tiles.size_l0
    elif tile_px_l0 is not None:
        size_l0 = (tile_px_l0, tile_px_l0)
    else:
        raise StoreError(
            f"tile_px_l0 is missing in {str(path)!r}; pass tile_px_l0=... "
            "(512 for 512 px tiles of a 20x slide)"
        )
    if tiles.stride_l0 is not None:
        return TileLayout(size_l0, tiles.stride_l0)
    if stride_l0 is not None:
        return TileLayout(size_l0, (stride_l0, stride_l0))
    return TileLayout(size_l0)


def compatibility_warnings(
    tiles: tiles_h5.TilesFile,
    slide_encoder: "SlideEncoder | SlideEncoderIdentity",
    path: Path,
) -> tuple[str, ...]:
    """Warnings if the file at `path` does not record the encoder, size or resolution of its tiles.

    Without these values it is not certain that the slide encoder accepts the tiles; see
    `check_fit`.

    Raises InvalidInputError: the slide encoder expects another tile encoder, size or resolution.
    """
    attributes = tiles.attributes
    name = attributes.get("encoder")
    tile_px = attributes.get("patch_size")
    mpp = attributes.get("tile_mpp")
    power = attributes.get("target_magnification")
    if mpp is None and power:  # TRIDENT's files contain only the magnification
        mpp = nominal_mpp(float(power))
    if mpp is None:
        # CLAM's patch_size is in pixels of a level whose resolution the file does not state
        tile_px = None
    return check_fit(
        slide_encoder,
        None if name is None else str(name),
        None if tile_px is None else int(tile_px),
        None if mpp is None else float(mpp),
        file=path,
    )


@dataclass(frozen=True, kw_only=True)
class PoolingStage(Stage[None]):
    """`GRID/slide_features_NAME/ID.h5`: `features` (D,), pooled from stored tile embeddings."""

    title: ClassVar[str] = "aggregate"
    reads: ClassVar[Reads] = "store"

    features: AnyStage  # stage of the tile embeddings
    slide_encoder: SlideEncoderIdentity

    @cached_property
    def address(self) -> str:
        grid, _, folder = self.features.address.rpartition("/")
        label = self.slide_encoder.label(folder.removeprefix("features_"))
        return f"{grid}/slide_features_{label}"

    @cached_property
    def settings(self) -> PlainValues:
        return {"slide_encoder": result_fields(self.slide_encoder.identity)}

    def make(self, work: SlideWork) -> Output[None]:
        """Pools the tiles; a slide without tiles gets no embedding and no file.

        Memory: as `pool_tiles`.
        """
        slide_id = work.entry.slide_id
        encoder = work.slide_encoders[self.slide_encoder.name]
        source = work.path(self.features.file(slide_id))
        tiles = tiles_h5.read_tiles(source, embeddings=False)
        if not len(tiles.coords_l0):
            return Output(files=(), facts={"slide_dim": 0})
        warnings = compatibility_warnings(tiles, self.slide_encoder, source)
        layout = tile_layout(tiles, source)
        name = self.file(slide_id)
        dim = pool_tiles(source, encoder, work.path(name), layout)
        facts = {
            "slide_encoder": encoder.name,
            "slide_dim": dim,
            "warnings": "; ".join(warnings),
        }
        return Output(files=(name,), facts=facts)


@dataclass(frozen=True, kw_only=True)
class OverviewStage(Stage[None]):
    """`GRID/overviews/ID.jpg`: the slide's picture, tissue outline, marks of checks, tiles."""

    title: ClassVar[str] = "overview"
    reads: ClassVar[Reads] = "store"

    tiles: TilesStage

    @cached_property
    def address(self) -> str:
        return f"{self.tiles.grid}/overviews"

    @property
    def needs(self) -> tuple[AnyStage, ...]:
        return (self.tiles, self.tiles.mask)

    def make(self, work: SlideWork) -> Output[None]:
        """Draws from stored files only, so that the picture is the same whenever it is made."""
        name = self.file(work.entry.slide_id, ".jpg")
        table = work.value(self.tiles)
        tissue = work.value(self.tiles.mask)
        layers: list[Layer] = []
        if isinstance(tissue, CheckedTissue):
            layers += overlay_layers(tissue.qc)
        else:
            caption = f"tissue, {tissue.tissue_fraction:.1%} of the slide"
            layers.append(Outline(tissue.mask, caption))
        plural = "" if len(table) == 1 else "s"
        tiles = Tiles(
            table.coords_l0, table.plan.size_l0, f"{len(table):,} tile{plural}"
        )
        picture = open_picture(work.ledger)
        write_drawing(work.path(name), picture, (*layers, tiles))
        return Output(files=(name,))


class GraphRule(TypedDict, total=False):
    """Rule by which tiles are neighbours: exactly one of these arguments of `tile_graph`."""

    k: int
    radius_um: float


def parse_graph_spec(text: str) -> GraphRule:
    """Arguments of `tile_graph` for a text such as 'knn:8' or 'radius:100' (µm).

    Raises ConfigError: the text has neither form.
    """
    match = _GRAPH_SPEC.fullmatch(text)
    kind, value = match.groups() if match else ("", "0")
    if float(value) <= 0 or (kind == "knn" and "." in value):
        raise ConfigError(
            "graph must be 'knn:K' (K neighbours) or 'radius:R' (R in µm), "
            f"got {text!r}"
        )
    return {"k": int(value)} if kind == "knn" else {"radius_um": float(value)}


@dataclass(frozen=True, kw_only=True)
class GraphStage(Stage[None]):
    """`GRID/graph_SPEC/ID.h5`: `edge_index` (2, E) int64 and `distances`.

    `edge_index` has row indices of the tile table.
    """

    title: ClassVar[str] = "graph"
    reads: ClassVar[Reads] = "store"

    tiles: TilesStage
    spec: str  # 'knn:8' or 'radius:100'

    @cached_property
    def address(self) -> str:
        return f"{self.tiles.grid}/graph_{slug(self.spec)}"

    @cached_property
    def settings(self) -> PlainValues:
        return {"graph": self.spec}

    def make(self, work: SlideWork) -> Output[None]:
        """Builds the graph. Memory: as `tile_graph`."""
        from thinsection.tiles.graph import tile_graph

        table = work.value(self.tiles)
        slide = work.ledger.slide
        mpp = (slide["mpp_x"], slide["mpp_y"]) if slide.get("mpp_x") else None
        name = self.file(work.entry.slide_id)
        with atomic_path(work.path(name)) as tmp, hdf5.new_h5(tmp) as file:
            file.attrs["spec"] = self.spec
            if len(table):
                neighbours = parse_graph_spec(self.spec)
                graph = tile_graph(table.coords_l0, **neighbours, slide_mpp=mpp)
                hdf5.add_dataset(file, "edge_index", graph.edge_index)
                hdf5.add_dataset(file, "distances", graph.distances)
        return Output(files=(name,))


@dataclass(frozen=True, kw_only=True)
class FormatStage(Stage[None]):
    """`GRID/FORMAT_ENCODER/ID.SUFFIX`: the embeddings of a slide in another format."""

    title: ClassVar[str] = "export"
    reads: ClassVar[Reads] = "store"
    cohort_columns: ClassVar[tuple[str, ...]] = ("patient_id", "label")

    features: FeaturesStage
    format: str  # name in `FORMATS`
    # stage whose measured columns are written beside those of the tile table; None for none
    measures: MeasuresStage | None = None

    @cached_property
    def address(self) -> str:
        name = f"{slug(self.format)}_{self.features.label}"
        if self.measures is not None:
            name = join_label(name, MEASURED)
        return f"{self.features.tiles.grid}/{name}"

    @cached_property
    def settings(self) -> PlainValues:
        return {"format": self.format}

    @property
    def needs(self) -> tuple[AnyStage, ...]:
        if self.measures is None:
            return (self.features, self.features.tiles)
        return (self.features, self.features.tiles, self.measures)

    def make(self, work: SlideWork) -> Output[None]:
        """Writes the file. Memory: the slide's embeddings, 4 N D bytes."""
        slide_id = work.entry.slide_id
        name = self.file(slide_id, FORMATS.entry(self.format).suffixes[0])
        stored = self.features.load(work)
        # sorted by name, so that a fresh table gives the same file as one that was loaded
        columns = dict(sorted(work.value(self.features.tiles).columns.items()))
        if self.measures is not None:
            columns |= work.value(self.measures)
        table = EmbeddingTable(
            slide_id=slide_id,
            patient_id=work.ledger.slide.get("patient_id"),
            label=work.ledger.slide.get("label"),
            coords_l0=stored.coords_l0,
            tile_embeddings=stored.embeddings,
            columns=columns,
        )
        with atomic_path(work.path(name)) as tmp:
            write = FORMATS.load(self.format)
            with naming_part("format", self.format, write):
                write(table, tmp)
        return Output(files=(name,))
