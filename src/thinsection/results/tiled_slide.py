"""Slides of a results folder with their tile grids, to read the same tiles from the slide files."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from thinsection.config import from_mapping
from thinsection.errors import InvalidInputError, StoreError
from thinsection.files.trust import check_table_url
from thinsection.files.urls import is_url
from thinsection.results.folder import Listener, Results, leaving_out
from thinsection.slide import Slide
from thinsection.slide.cohort import SlideEntry
from thinsection.slide.cohort_table import SlidesConfig
from thinsection.slide.geometry import ReadPlan, best_level
from thinsection.store.ledger import SlideLedger
from thinsection.store.slide_ids import check_slide_exists, slide_place
from thinsection.store.tiles_h5 import Attributes, read_tiles
from thinsection.tiles import TileTable
from thinsection.types import Size


@dataclass(frozen=True, kw_only=True)
class TiledSlide:
    """A slide and its tile grid: plain values that travel between processes.

    Attributes:
        entry: the slide's id, file, resolution, picture and look, as in the run.
        size_l0: (width, height) of the slide in level-0 px; None if it is not known.
        reader: reader that was used to make the tiles.
        rendering: description of the look by the reader; '' if pixels were not changed.
        tiles_path: file of the tile grid.
        num_tiles: number of tiles in the grid.
        plan: how the tiles are read; None for a grid of another tool.
    """

    entry: SlideEntry
    size_l0: Size | None
    reader: str
    rendering: str
    tiles_path: Path
    num_tiles: int
    plan: ReadPlan | None

    def open(self) -> Slide:
        """Opens the slide with the reader of the run.

        Raises:
            SlideOpenError: as `open_slide`.
            InvalidInputError: the file is not the one that the run has read.
        """
        check_slide_exists(self.entry.slide_path, self.entry.slide_id)
        # the look decides which reader is used for picked channels
        slide = self.entry.open("auto" if self.entry.look else self.reader)
        is_same = slide.rendering == self.rendering
        if self.size_l0 is not None and slide.size != self.size_l0:
            is_same = False
        if not is_same:
            slide.close()
            raise InvalidInputError(
                f"slide must be the file of the run, got {slide.size} px "
                f"{slide.rendering!r} for {self.size_l0} px {self.rendering!r} in "
                f"{self.entry.slide_path!r}; run again"
            )
        return slide

    def table(self, slide: Slide) -> TileTable:
        """Tile table of the opened slide, with its columns. Raises StoreError: it is damaged."""
        stored = read_tiles(self.tiles_path, embeddings=False)
        if len(stored.coords_l0) != self.num_tiles:
            raise StoreError(
                f"tiles must be {self.num_tiles}, got {len(stored.coords_l0)} in "
                f"{str(self.tiles_path)!r}; run again"
            )
        plan = self.plan or _plan_of_peer(slide, stored.attributes)
        return TileTable(coords_l0=stored.coords_l0, plan=plan, columns=stored.columns)


def tiled_slides(
    results: Results, grid: str, on_left_out: Listener | None = None
) -> Iterator[TiledSlide]:
    """Yields the slides of a results folder that have tiles in a grid, in the folder's order.

    Args:
        results: an opened results folder.
        grid: one of `results.grids`.
        on_left_out: called with a line for each slide without tiles; with None that is an error.
    """
    for slide_id, ledger in results.ledgers.items():
        with leaving_out(slide_id, on_left_out):
            ledger.check()
            yield tiled_slide(results, ledger, grid)


def tiled_slide(results: Results, ledger: SlideLedger, grid: str) -> TiledSlide:
    """Returns one slide of a results folder with its tile grid.

    Raises:
        StoreError: the slide has no tiles in this grid.
        InvalidInputError: the slide was imported without the path of its file.
    """
    slide = ledger.slide
    tiles_path = results.file(ledger.slide_id, f"{grid}/tiles")
    if not slide.get("slide_path"):
        raise InvalidInputError(
            f"slide_path is missing in {ledger.slide_id!r}; import it with --slides"
        )
    if is_url(slide["slide_path"]):
        # own runs may read from this machine, and a ledger does not show whose run it was
        check_table_url(
            slide["slide_path"], f"the ledger of {ledger.slide_id!r}", allow_local=True
        )
    facts = ledger.stages[f"{grid}/tiles"].facts
    rendering = slide.get("rendering") or ""
    look = None  # look of the last invocation that set one
    for record in results.records if rendering else ():
        section = record.document.get("config", {}).get("slides")
        if section:
            look = from_mapping(SlidesConfig, section).look or look
    entry = SlideEntry(
        slide_id=ledger.slide_id,
        slide_path=slide_place(ledger),
        slide_mpp=(slide["mpp_x"], slide["mpp_y"]) if slide.get("mpp_x") else None,
        look=look,
        image=slide.get("image"),
    )
    return TiledSlide(
        entry=entry,
        size_l0=(slide["width"], slide["height"]) if slide.get("width") else None,
        reader=slide.get("reader") or "auto",
        rendering=rendering,
        tiles_path=tiles_path,
        num_tiles=int(facts["num_tiles"]),
        plan=from_mapping(ReadPlan, facts["plan"]) if "plan" in facts else None,
    )


def _plan_of_peer(slide: Slide, attributes: Attributes) -> ReadPlan:
    """Read plan for tiles of another tool, from the attributes that our import has written."""
    edge = int(attributes["patch_size_level0"])
    tile_px = int(attributes["patch_size"])
    stride_x, stride_y = (int(step) for step in attributes["stride_l0"])
    level = best_level(slide.levels, edge / tile_px)
    edge_lv = round(edge / level.downsample)
    mpp = attributes.get("tile_mpp")
    return ReadPlan(
        tile_px=tile_px,
        tile_mpp=None if mpp is None else float(mpp),
        level=level.index,
        downsample=level.downsample,
        size_lv=(edge_lv, edge_lv),
        size_l0=(edge, edge),
        stride_l0=(stride_x, stride_y),
    )
