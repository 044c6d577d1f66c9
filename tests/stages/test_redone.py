"""A stage that is redone: what it may take over, what it removes, and what it refuses."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.stages.make import Opened, later, lay_grid, open_work
from tests.stages.test_round_trips import GRID, MASK, UNI, embed, random_embeddings

from thinsection.errors import StaleResultError
from thinsection.qc.tissue import TissueConfig
from thinsection.stages.features import FeaturesStage
from thinsection.stages.leaves import FormatStage, GraphStage
from thinsection.stages.masks import TissueStage
from thinsection.stages.stage import Output, SlideWork
from thinsection.stages.tiles import TilesStage
from thinsection.store.identity import Source
from thinsection.testing.synthetic import write_he_slide
from thinsection.tiles.transforms import StainConfig, stain_target

GRAPH = GraphStage(tiles=GRID, spec="knn:3")
TSV = FormatStage(features=UNI, format="tsv")


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    """A slide with mask, grid, embeddings, graph and TSV."""
    path = tmp_path / "a.svs"
    write_he_slide(path, (1400, 1000), seed=3, downsamples=(1,))
    made = open_work(path, tmp_path / "out", MASK, GRID, UNI, GRAPH, TSV)
    with made.slide:
        made.perform(MASK)
        lay_grid(made, GRID)
        embed(made, UNI, random_embeddings(made.work))
        made.perform(GRAPH)
        made.perform(TSV)
        yield made


@pytest.fixture
def work(opened: Opened) -> SlideWork:
    return opened.work


def of_another_file(work: SlideWork) -> SlideWork:
    """The slide after its file was replaced."""
    changed = later(work)
    changed.source = Source(key="other pixels")
    changed.find_missing()
    return changed


def files(work: SlideWork) -> set[str]:
    found = (p for p in work.out.rglob("*") if p.is_file() and p.name != "slide.json")
    return {str(p.relative_to(work.out)) for p in found}


def test_results_of_another_file_are_refused_with_the_ways_out(work: SlideWork) -> None:
    changed = of_another_file(work)
    assert changed.missing == list(changed.stages)
    before = {name: work.path(name).read_bytes() for name in files(work)}
    with pytest.raises(
        StaleResultError,
        match=r"slides/tissue of 'a' must come from the same slide file and settings, "
        r"got a result of another slide file, resolution, weights or version; pass overwrite=True "
        r".*, or pass another out=",
    ):
        changed.check_stale()
    assert {name: work.path(name).read_bytes() for name in files(work)} == before
    changed.overwrite = True
    changed.check_stale()
    work.missing = []
    work.check_stale()


def test_what_is_redone_of_another_file_takes_all_that_was_made_from_it_along(
    opened: Opened,
    work: SlideWork,
) -> None:
    beside = TissueStage(config=TissueConfig(mask_mpp=16.0))
    opened.perform(beside)
    changed = of_another_file(work)
    changed.remove_outdated(MASK)
    ends = ("tissue.png", "picture.jpg")
    own = {f"slides/a/{'_mask_mpp-16.'.join(end.split('.'))}" for end in ends}
    assert files(work) == own
    assert list(later(work).ledger.stages) == [
        beside.address
    ]  # said before files are replaced


def test_what_is_redone_with_the_same_key_keeps_what_was_made_from_it(
    opened: Opened,
    work: SlideWork,
) -> None:
    before = files(work)
    again = later(work)
    again.remove_outdated(MASK)
    assert files(work) == before
    again.slide = opened.slide
    again.perform(MASK)
    assert files(work) == before
    assert all(again.is_done(stage) for stage in work.stages)


@pytest.mark.parametrize("change", [{"label": "LUSC"}, {"patient_id": "p8"}])
def test_what_the_cohort_corrects_is_written_again_and_nothing_else_is(
    work: SlideWork, change: dict[str, str]
) -> None:
    (old,) = work.ledger.stages[TSV.address].files
    corrected = later(work, entry=replace(work.entry, **change))
    corrected.find_missing()
    assert corrected.missing == [TSV]
    corrected.check_stale()  # no --overwrite is asked for: it costs no tile
    corrected.perform(TSV)
    words = {"patient_id": "p7", "label": "LUAD"} | change
    row = work.path(old).read_text().splitlines()[1].split("\t")
    assert row[-3:-1] == list(words.values())
    assert later(corrected).ledger.slide.items() >= words.items()
    unnamed = later(corrected, entry=replace(work.entry, patient_id=None, label=None))
    assert all(
        unnamed.is_done(stage) for stage in unnamed.stages
    )  # what was said is kept


def test_a_file_that_a_stage_does_not_write_again_goes(work: SlideWork) -> None:
    name = GRAPH.file("a")
    work.record(GRAPH, Output(files=()))
    assert not work.path(name).exists()
    assert work.is_done(GRAPH)  # nothing to write is a result, too


def test_the_content_of_embeddings_is_pixels_tiles_and_encoder_and_nothing_else(
    work: SlideWork,
) -> None:
    table = work.value(GRID)
    content = UNI.content(work, table)
    other_mask = TissueStage(config=TissueConfig(mask_mpp=16.0))
    same_tiles = FeaturesStage(
        tiles=TilesStage(config=GRID.config, mask=other_mask),
        encoder="uni",
        identity=UNI.identity,
    )
    assert same_tiles.content(work, table) == content
    assert same_tiles.address != UNI.address
    assert (
        UNI.content(work, table.with_columns({"more": np.zeros(len(table))})) == content
    )
    others = [
        UNI.content(of_another_file(work), table),
        UNI.content(work, table.select(np.arange(len(table) - 1))),
        UNI.content(work, table.select(np.arange(len(table))[::-1])),
        FeaturesStage(tiles=GRID, encoder="x", identity={"name": "x"}).content(
            work, table
        ),
        FeaturesStage(
            tiles=GRID, encoder="uni", identity=UNI.identity, dtype="float16"
        ).content(work, table),
        UNI.content(work, replace(table, plan=replace(table.plan, tile_px=127))),
    ]
    assert len({content, *others}) == 7


def test_stain_normalisation_looks_at_the_tissue_so_its_mask_counts(
    work: SlideWork,
) -> None:
    stain = StainConfig(stain_norm="macenko")
    contents = set()
    for mask in (MASK, TissueStage(config=TissueConfig(mask_mpp=16.0))):
        stage = FeaturesStage(
            tiles=TilesStage(config=GRID.config, mask=mask),
            encoder="uni",
            identity=UNI.identity,
            stain=stain,
            target=stain_target(stain),
        )
        contents.add(stage.content(work, work.value(GRID)))
    assert len(contents) == 2


def under_another_name() -> FeaturesStage:
    mask = TissueStage(config=TissueConfig(mask_mpp=16.0))
    return FeaturesStage(
        tiles=TilesStage(config=GRID.config, mask=mask),
        encoder="uni",
        identity=UNI.identity,
    )


def test_the_same_tiles_under_another_grids_name_are_taken_over(
    work: SlideWork,
) -> None:
    stage, table = under_another_name(), work.value(GRID)
    output = stage.reuse(work, table)
    assert output is not None
    (name,) = output.files
    assert work.path(name).read_bytes() == work.path(UNI.file("a")).read_bytes()
    assert (
        work.path(name).stat().st_ino == work.path(UNI.file("a")).stat().st_ino
    )  # no copy
    work.record(stage, output)
    assert (
        work.ledger.stages[stage.address].facts == work.ledger.stages[UNI.address].facts
    )
    work.path(UNI.file("a")).unlink()
    assert work.is_done(stage)


def test_a_damaged_file_or_other_tiles_are_not_taken_over(work: SlideWork) -> None:
    stage, table = under_another_name(), work.value(GRID)
    assert stage.reuse(work, table.select(np.arange(3))) is None
    with work.path(UNI.file("a")).open("ab") as file:
        file.write(b"x")
    assert stage.reuse(work, table) is None
    assert not work.path(stage.address).exists()
    assert UNI.reuse(work, table) is None  # not from itself
