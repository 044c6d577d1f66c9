"""A stage of each kind, declared outside the package, is made by a run without further ado."""

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from thinsection.config import replace_flat
from thinsection.run.process import SlideProcessor
from thinsection.slide import open_slide
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.config import RunConfig
from thinsection.stages.spec import Models, grids_of, resolve, stages_of
from thinsection.stages.stage import (
    AnyStage,
    GridTiles,
    Output,
    Reads,
    SlideWork,
    Stage,
    TileWriter,
)
from thinsection.stages.tiles import TilesStage
from thinsection.store.ledger import load_ledger
from thinsection.testing.synthetic import write_he_slide
from thinsection.tiles import iter_tiles
from thinsection.tiles.stream import EmbeddedBatch
from thinsection.types import TileArray


def write_values(work: SlideWork, name: str, values: Any) -> None:
    path = work.path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))


@dataclass(frozen=True, kw_only=True)
class Corner(Stage[list[int]]):
    """`slides/ID/corner.json`: the colour of the slide's first pixel."""

    title: ClassVar[str] = "corner"
    reads: ClassVar[Reads] = "slide"

    @property
    def address(self) -> str:
        return "slides/corner"

    def make(self, work: SlideWork) -> Output[list[int]]:
        pixel = work.opened.read_region((0, 0), 0, (1, 1))[0, 0].tolist()
        name = f"slides/{work.entry.slide_id}/corner.json"
        write_values(work, name, pixel)
        return Output(files=(name,), value=pixel)

    def load(self, work: SlideWork) -> list[int]:
        pixel: list[int] = json.loads(
            work.path(f"slides/{work.entry.slide_id}/corner.json").read_text()
        )
        return pixel


@dataclass(frozen=True, kw_only=True)
class TileCount(Stage[int]):
    """A stage of the slide that needs its grid."""

    title: ClassVar[str] = "count"
    reads: ClassVar[Reads] = "slide"

    tiles: TilesStage

    @property
    def address(self) -> str:
        return "slides/count"

    def make(self, work: SlideWork) -> Output[int]:
        count = len(work.value(self.tiles))
        return Output(files=(), facts={"count": count}, value=count)


@dataclass(frozen=True, kw_only=True)
class MeanColor(Stage[list[list[float]]]):
    """`GRID/mean_color/ID.json`: the mean colour of each tile."""

    title: ClassVar[str] = "mean color"
    reads: ClassVar[Reads] = "tiles"

    tiles: TilesStage

    @cached_property
    def address(self) -> str:
        return f"{self.tiles.grid}/mean_color"

    def open(self, tiles: GridTiles) -> TileWriter:
        return MeanColorWriter(self, tiles)

    def load(self, work: SlideWork) -> list[list[float]]:
        name = self.file(work.entry.slide_id, ".json")
        colors: list[list[float]] = json.loads(work.path(name).read_text())
        return colors


@dataclass(eq=False)
class MeanColorWriter(TileWriter):
    """Mean colours, which decode threads add in any order."""

    reads_pixels: ClassVar[bool] = True

    stage: MeanColor
    tiles: GridTiles
    kept: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.colors = np.zeros((self.tiles.num_tiles, 3))

    def measure(self, indices: npt.NDArray[np.int64], tiles: TileArray) -> None:
        self.colors[indices] = tiles.mean(axis=(1, 2))

    def append(self, batch: EmbeddedBatch[GridTiles]) -> None:
        self.kept += batch.indices.tolist()

    def finish(self) -> Output[list[list[float]]]:
        work = self.tiles.work
        name = self.stage.file(work.entry.slide_id, ".json")
        write_values(work, name, self.colors[self.kept].tolist())
        return Output(files=(name,))


@dataclass(frozen=True, kw_only=True)
class Darkest(Stage[None]):
    """`GRID/darkest/ID.json`: the darkest tile, from the mean colours."""

    title: ClassVar[str] = "darkest"
    reads: ClassVar[Reads] = "store"

    colors: MeanColor

    @cached_property
    def address(self) -> str:
        return f"{self.colors.tiles.grid}/darkest"

    def make(self, work: SlideWork) -> Output[None]:
        name = self.file(work.entry.slide_id, ".json")
        sums = [sum(color) for color in work.value(self.colors)]
        write_values(work, name, sums.index(min(sums)) if sums else None)
        return Output(files=(name,))


SETTINGS = {
    "memory": "256MiB",
    "until": "tiles",
    "tile_px": 128,
    "overview": False,
    "tile_mpp": ["0.5", "1.0"],
}


def slides_in(folder: Path) -> list[SlideEntry]:
    entries = []
    for seed, name in enumerate(("a", "b")):
        path = folder / f"{name}.svs"
        write_he_slide(path, (1300 + 200 * seed, 900), seed=seed, downsamples=(1,))
        entries.append(SlideEntry(slide_id=name, slide_path=str(path)))
    return entries


def processed(
    entries: list[SlideEntry], out: Path, spec: RunConfig, stages: tuple[AnyStage, ...]
) -> list[str]:
    """Status of each slide after a run with these stages."""
    processor = SlideProcessor(out=out, spec=spec, models=Models(), stages=stages)
    results = processor.process(entries)
    assert not [result.error for result in results if result.error]
    return [result.status for result in results]


@pytest.mark.parametrize("tile_filter", [["tissue"], ["tissue", "contrast"]])
def test_a_stage_of_each_kind_is_made_once_for_each_slide_and_grid(
    tmp_path: Path, tile_filter: list[str]
) -> None:
    entries = slides_in(tmp_path)
    out = tmp_path / "out"
    spec = resolve(replace_flat(RunConfig(), SETTINGS | {"tile_filter": tile_filter}))
    stages = stages_of(spec, Models())
    colors = [MeanColor(tiles=grid) for grid in grids_of(stages)]
    own = (Corner(), *colors, *(Darkest(colors=stage) for stage in colors))
    assert processed(entries, out, spec, (*stages, *own)) == ["done", "done"]
    num_tiles = 0
    for entry in entries:
        ledger = load_ledger(out, entry.slide_id)
        assert {stage.address for stage in own} <= set(ledger.stages)
        with open_slide(entry.slide_path) as slide:
            for stage in colors:
                work = SlideWork(
                    entry=entry,
                    out=out,
                    source=None,  # type: ignore[arg-type]
                    ledger=ledger,
                    stages=(),
                )
                table = stage.tiles.load(work)
                expected = [
                    tile.mean(axis=(0, 1))
                    for batch in iter_tiles(slide, table)
                    for tile in batch.tiles
                ]
                found = stage.load(work)
                assert len(found) == len(table)
                np.testing.assert_allclose(found, expected)
                name = Darkest(colors=stage).file(entry.slide_id, ".json")
                darkest = json.loads((out / name).read_text())
                sums = [float(np.sum(color)) for color in expected]
                assert darkest == (sums.index(min(sums)) if sums else None)
                num_tiles += len(table)
    assert num_tiles > 10
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*.json")}
    assert processed(entries, out, spec, (*stages, *own)) == ["skipped", "skipped"]
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*.json")} == before


def test_a_stage_of_the_slide_may_need_the_grid(tmp_path: Path) -> None:
    entries = slides_in(tmp_path)
    spec = resolve(replace_flat(RunConfig(), SETTINGS))
    stages = stages_of(spec, Models())
    count = TileCount(tiles=grids_of(stages)[1])
    assert processed(entries, tmp_path / "out", spec, (*stages, count)) == ["done"] * 2
    ledger = load_ledger(tmp_path / "out", "a")
    tiles = ledger.stages[count.tiles.address].facts["num_tiles"]
    assert ledger.stages["slides/count"].facts == {"count": tiles}


def test_a_stage_that_cannot_be_made_fails_the_slide_by_name(tmp_path: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Elsewhere(MeanColor):
        @cached_property
        def address(self) -> str:
            return "elsewhere/mean_color"

    entries = slides_in(tmp_path)
    spec = resolve(replace_flat(RunConfig(), SETTINGS))
    stages = stages_of(spec, Models())
    lost = Elsewhere(tiles=grids_of(stages)[0])
    processor = SlideProcessor(
        out=tmp_path / "out",
        spec=spec,
        models=Models(),
        stages=(*stages, lost),
    )
    for result in processor.process(entries):
        assert result.status == "failed"
        assert "elsewhere/mean_color must be made before the slide ends" in result.error
