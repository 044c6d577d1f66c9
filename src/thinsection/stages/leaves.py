"""Stages that read what is stored and that nothing else needs: overview, graph, other formats."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import h5py

from thinsection.files.atomic import atomic_path
from thinsection.neighbors import parse_graph_spec, tile_graph
from thinsection.report.overview import draw_overview
from thinsection.stages.features import FeaturesStage
from thinsection.stages.formats import FORMATS, EmbeddingTable
from thinsection.stages.labels import slug
from thinsection.stages.stage import Output, SlideWork, Stage
from thinsection.stages.tiles import TilesStage
from thinsection.tiles import TileTable


@dataclass(frozen=True, kw_only=True)
class OverviewStage(Stage):
    """`GRID/overviews/ID.png`: thumbnail, tissue outline, tiles.

    Attributes:
        tiles: stage of the grid.
    """

    title: ClassVar[str] = "overview"

    tiles: TilesStage

    @property
    def address(self) -> str:
        return f"{self.tiles.grid}/overviews"

    @property
    def settings(self) -> Mapping[str, Any]:
        return {}

    @property
    def needs(self) -> tuple[Stage, ...]:
        return (self.tiles, self.tiles.mask)

    def run(self, work: SlideWork) -> Output:
        """Draws what is stored, so that the picture is the same at any time."""
        name = self.file(work.entry.slide_id, ".png")
        tissue = self.tiles.mask.load(work)
        table: TileTable = work.value(self.tiles)
        draw_overview(
            work.path(name),
            tissue.thumbnail,
            tissue.mask,
            table.coords_l0,
            tile_size_l0=table.plan.size_l0,
            size_l0=tissue.frame.size_l0,
        )
        return Output(files=(name,))


@dataclass(frozen=True, kw_only=True)
class GraphStage(Stage):
    """`GRID/graph_SPEC/ID.h5`: `edge_index` (2, E) int64 over the rows of the grid, `distances`.

    Attributes:
        tiles: stage of the grid.
        spec: 'knn:8' or 'radius:100'.
    """

    title: ClassVar[str] = "graph"

    tiles: TilesStage
    spec: str

    @property
    def address(self) -> str:
        return f"{self.tiles.grid}/graph_{slug(self.spec)}"

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"graph": self.spec}

    @property
    def needs(self) -> tuple[Stage, ...]:
        return (self.tiles,)

    def run(self, work: SlideWork) -> Output:
        """Builds the graph.

        Memory: that of `tile_graph`.
        """
        table: TileTable = work.value(self.tiles)
        wanted, slide = parse_graph_spec(self.spec), work.ledger.slide
        mpp = (slide["mpp_x"], slide["mpp_y"]) if slide.get("mpp_x") else None
        name = self.file(work.entry.slide_id)
        with atomic_path(work.path(name)) as tmp, h5py.File(tmp, "w") as file:
            file.attrs["spec"] = self.spec
            if len(table):
                graph = tile_graph(
                    table.coords_l0, k=wanted.k, radius_um=wanted.radius_um, slide_mpp=mpp
                )
                file.create_dataset("edge_index", data=graph.edge_index)
                file.create_dataset("distances", data=graph.distances)
        return Output(files=(name,))


@dataclass(frozen=True, kw_only=True)
class FormatStage(Stage):
    """`GRID/FORMAT_ENCODER/ID.SUFFIX`: the embeddings of a slide in another format.

    Attributes:
        features: stage of the embeddings.
        format: name of `FORMATS`.
    """

    title: ClassVar[str] = "export"

    features: FeaturesStage
    format: str

    @property
    def address(self) -> str:
        return f"{self.features.tiles.grid}/{slug(self.format)}_{self.features.label}"

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"format": self.format}

    @property
    def needs(self) -> tuple[Stage, ...]:
        return (self.features, self.features.tiles)

    def run(self, work: SlideWork) -> Output:
        """Writes the file.

        Memory: the slide's embeddings, 4 N D bytes.
        """
        entry = FORMATS.entry(self.format)
        name = self.file(work.entry.slide_id, entry.suffixes[0])
        stored = self.features.load(work)
        assert stored.features is not None
        table: TileTable = work.value(self.features.tiles)
        with atomic_path(work.path(name)) as tmp:
            write = FORMATS.load(self.format)
            write(
                EmbeddingTable(
                    slide_id=work.entry.slide_id,
                    patient_id=work.entry.patient_id,
                    label=work.entry.label,
                    coords_l0=stored.coords_l0,
                    tile_embeddings=stored.features,
                    columns=table.columns,
                ),
                tmp,
            )
        return Output(files=(name,))
