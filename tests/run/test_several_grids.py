"""Several resolutions in one run: the bytes of one run for each, from one look at the slide."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from thinsection.cli.app import build_app
from thinsection.config import as_mapping, from_mapping, replace_flat
from thinsection.encode.registry import EncoderIdentity
from thinsection.errors import InvalidInputError, SlideReadError
from thinsection.pool.encoder import Expects, SlideEncoderIdentity
from thinsection.results.folder import open_results
from thinsection.run.ending import RunSummary
from thinsection.run.plan import slide_size
from thinsection.run.process import RunEvent
from thinsection.run.run import run
from thinsection.slide import Slide
from thinsection.slide.cohort import SlideEntry
from thinsection.slide.geometry import ReadPlan
from thinsection.slide.resize import read_tiles
from thinsection.stages.checks import QcStage
from thinsection.stages.config import RunConfig
from thinsection.stages.leaves import PoolingStage
from thinsection.stages.masks import TissueStage
from thinsection.stages.spec import Models, resolve, stages_of
from thinsection.testing.synthetic import PyramidKind, write_he_slide, write_pyramid
from thinsection.tiles.grid import TilesConfig
from thinsection.view.layers import layers_of

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
FINE = "128px_0.5mpp"
COARSE = "128px_1mpp"
BOTH = ["0.5", "1.0"]
SMALL = {"memory": "256MiB", "pretrained": False, "batch_size": 4, "tile_px": 128}


class Folder:
    """A results folder, and what the last run on it reported."""

    def __init__(self, out: Path, slide: Path) -> None:
        self.out = out
        self.slide = slide
        self.events: list[RunEvent] = []

    def run(self, mpp: str | list[str], **flat: object) -> RunSummary:
        self.events = []
        config = replace_flat(RunConfig(), SMALL | {"tile_mpp": mpp} | flat)
        return run(
            [self.slide], out=self.out, config=config, on_event=self.events.append
        )

    @property
    def num_encoded(self) -> int:
        return sum(event.num_tiles for event in self.events if event.kind == "tiles")

    def count(self, kind: str) -> int:
        return sum(event.kind == kind for event in self.events)

    def files(self) -> dict[str, bytes]:
        """Bytes of every file of results; of a ledger its entries, whatever their order."""
        found = {}
        for path in sorted(self.out.rglob("*")):
            name = str(path.relative_to(self.out))
            # the page has the time of the last run
            if path.is_file() and not name.startswith(("records/", "index")):
                content = path.read_bytes()
                if path.name == "slide.json":
                    content = json.dumps(json.loads(content), sort_keys=True).encode()
                found[name] = content
        return found

    def num_tiles(self, grid: str) -> int:
        return len(open_results(self.out).tiles("s", grid).coords_l0)


@pytest.fixture(scope="module")
def slide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("slides") / "s.svs"
    write_he_slide(path, (1500, 1200), seed=3, downsamples=(1,), white=255)
    return path


@pytest.mark.parametrize(
    "flat",
    [
        {"slide_encoders": ["mean", "max"], "write": ["tsv"], "graph": "knn:4"},
        {"tile_filter": ["tissue", "contrast"], "measures": True},
        {"stain_norm": "macenko", "min_tissue_fraction": 0.8},
    ],
    ids=["derived", "filtered", "normalised"],
)
def test_one_run_leaves_the_bytes_of_a_run_for_each_resolution(
    tmp_path: Path, slide: Path, flat: Mapping[str, object]
) -> None:
    together = Folder(tmp_path / "together", slide)
    one_by_one = Folder(tmp_path / "one_by_one", slide)
    summary = together.run(BOTH, **flat)
    for mpp in BOTH:
        one_by_one.run(mpp, **flat)
    assert summary.counts["done"] == 1
    files = together.files()
    assert {"tiles", "overviews"} <= {
        name.split("/")[1] for name in files if "/" in name
    }
    assert files == one_by_one.files()
    num_tiles = [together.num_tiles(grid) for grid in (FINE, COARSE)]
    assert min(num_tiles) > 0
    assert summary.results[0].facts["num_tiles"] == sum(num_tiles)


@pytest.mark.parametrize("qc", ["off", "otsu.toml"])
def test_the_slide_is_opened_and_its_tissue_found_once(
    tmp_path: Path, slide: Path, qc: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def counted(cls: type, name: str) -> None:
        original = getattr(cls, name)

        def wrapper(*args: object, **kwargs: object) -> object:
            calls.append(f"{cls.__name__}.{name}")
            return original(*args, **kwargs)

        monkeypatch.setattr(cls, name, wrapper)

    counted(TissueStage, "make")
    if "make" in vars(QcStage):
        counted(QcStage, "make")
    counted(SlideEntry, "open")
    if qc != "off":
        text = 'name = "otsu"\nwork_mpp = 8.0\n[[check]]\nkind = "otsu"\n'
        (tmp_path / qc).write_text(text)
        qc = str(tmp_path / qc)
    folder = Folder(tmp_path / "out", slide)
    folder.run(["0.5", "1.0", "2.0"], until="tiles", qc=qc)
    mask = "TissueStage.make" if qc == "off" else "QcStage.make"
    assert sorted(calls) == sorted(["SlideEntry.open", mask])
    assert len(open_results(folder.out).grids) == 3
    assert [folder.count(kind) for kind in ("opening", "started", "ended")] == [1, 1, 1]


def test_a_resolution_that_is_there_is_not_computed_again(
    tmp_path: Path, slide: Path
) -> None:
    folder = Folder(tmp_path / "out", slide)
    folder.run("1.0")
    stamps = {p: p.stat().st_mtime_ns for p in (folder.out / COARSE).rglob("*.h5")}
    folder.run(BOTH)
    assert folder.num_encoded == folder.num_tiles(FINE)
    assert {p: p.stat().st_mtime_ns for p in stamps} == stamps
    assert folder.run(BOTH).counts["skipped"] == 1
    assert folder.run("0.5").counts["skipped"] == 1
    before = folder.files()
    # a picture more for each grid is made from files
    folder.run(BOTH, graph="knn:4")
    assert folder.num_encoded == 0
    added = folder.files().keys() - before.keys()
    assert added == {f"{grid}/graph_knn-4/s.h5" for grid in (FINE, COARSE)}


@pytest.mark.parametrize("mpps", [["0.5", "2.0"], ["2.0", "0.5"]])
def test_a_slide_that_lacks_one_resolution_has_the_others_and_fails(
    tmp_path: Path, mpps: list[str]
) -> None:
    path = tmp_path / "s.tif"
    kind = PyramidKind(mpp=(1.0, 1.0), downsamples=(1,), compression=None)
    write_pyramid(path, (1400, 900), kind)
    flat = {"tile_filter": [], "write": ["tsv"]}
    folder = Folder(tmp_path / "out", path)
    summary = folder.run(mpps, **flat)
    assert summary.counts["failed"] == 1
    assert "tile_mpp must be >= 1, got 0.5" in summary.results[0].error
    assert folder.count("ended") == 1
    alone = Folder(tmp_path / "alone", path)
    assert alone.run("2.0", **flat).counts["done"] == 1
    results = {name: content for name, content in folder.files().items() if "/" in name}
    expected = alone.files()
    del results["slides/s/failure.json"]
    assert results == {name: expected[name] for name in results}
    assert any("tsv_" in name for name in results)
    assert any("slide_features_" in name for name in results)


def test_a_slide_without_any_of_the_resolutions_fails_before_its_pixels_are_read(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s.tif"
    write_pyramid(path, (700, 500), PyramidKind(mpp=None, downsamples=(1,)))
    folder = Folder(tmp_path / "out", path)
    summary = folder.run(BOTH, until="tiles")
    assert "slide_mpp is missing" in summary.results[0].error
    assert not list((tmp_path / "out").rglob("tissue.png"))


def test_a_grid_that_cannot_be_decoded_ends_the_slide_once(
    tmp_path: Path, slide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(slide: Slide, plan: ReadPlan, *args: object) -> None:
        if plan.tile_mpp == 0.5:
            raise SlideReadError("a damaged block")
        read_tiles(slide, plan, *args)

    folder = Folder(tmp_path / "out", slide)
    with monkeypatch.context() as patch:
        patch.setattr("thinsection.tiles.stream.read_tiles", read)
        summary = folder.run(BOTH)
    assert (summary.counts["failed"], folder.count("ended")) == (1, 1)
    assert summary.results[0].stage == "decode"
    assert not list(folder.out.glob("*/features_*/s.h5"))
    assert folder.run(BOTH).counts["done"] == 1
    whole = Folder(tmp_path / "whole", slide)
    whole.run(BOTH)
    assert folder.files().keys() == whole.files().keys()


def test_a_grid_without_tiles_is_named_in_the_warning(
    tmp_path: Path, slide: Path
) -> None:
    folder = Folder(tmp_path / "out", slide)
    summary = folder.run(["0.5", "8.0"], until="tiles")
    assert summary.counts["done"] == 1
    facts = summary.results[0].facts
    assert facts["warnings"] == "128px_8mpp: no tile contains enough tissue"
    assert facts["num_tiles"] == folder.num_tiles(FINE)
    rows = {row["grid"]: row for row in open_results(folder.out).rows()}
    assert rows["128px_8mpp"]["num_tiles"] == 0
    assert rows["128px_8mpp"]["warnings"] == "no tile contains enough tissue"
    assert rows[FINE]["warnings"] == ""
    # no grid at all
    assert folder.run(["8.0", "9.0"], until="tiles").counts["empty"] == 1


def test_pages_commands_and_the_viewer_show_each_grid(
    tmp_path: Path, slide: Path
) -> None:
    folder = Folder(tmp_path / "out", slide)
    folder.run(BOTH, until="tiles")
    folder.run("0.5", until="tiles", region_px=512, min_tissue_fraction=0.3)
    results = open_results(folder.out)
    regions = f"{FINE}_512px_regions_min_tissue_fraction-0.3"
    assert set(results.grids) == {FINE, COARSE, regions}
    pages = [path.read_text() for path in (folder.out / "index").glob("part_*.js")]
    listed = CliRunner().invoke(build_app(["ls"]), ["ls", str(folder.out)]).output
    for grid in results.grids:
        assert any(f'"{grid}"' in page for page in pages)
        assert f"{grid}/tiles" in listed
    layers = list(layers_of(results, "s", 3, 128 << 20))
    assert all(layer.read() for layer in layers)
    keys = [layer.key for layer in layers]
    assert len(set(keys)) == len(keys)
    assert {f"{grid}/tissue_fraction" for grid in results.grids} <= set(keys)
    assert f"{regions}/region" in keys


def test_the_settings_travel_to_workers_and_records() -> None:
    spec = resolve(RunConfig(), {"tile_mpp": [0.5, "2.0"]})
    assert spec.tiles.tile_mpp == ("0.5", "2.0")
    again = from_mapping(RunConfig, json.loads(json.dumps(as_mapping(spec))))
    assert again.tiles == spec.tiles
    assert from_mapping(RunConfig, as_mapping(again)).tiles == spec.tiles
    assert [grid.mpp for grid in spec.tiles.grids] == [0.5, 2.0]
    assert TilesConfig(tile_mpp=("0.5",)) == TilesConfig(tile_mpp=0.5) == TilesConfig()


def test_the_plan_counts_the_tiles_of_all_resolutions(slide: Path) -> None:
    def size(mpp: str | list[str]) -> tuple[int, int]:
        spec = resolve(RunConfig(), {"tile_mpp": mpp, "tile_px": 128})
        planned = slide_size(SlideEntry(slide_id="s", slide_path=str(slide)), spec)
        return planned.num_tiles, planned.decoded_px

    fine, coarse, both = size("0.5"), size("1.0"), size(BOTH)
    assert both == (fine[0] + coarse[0], fine[1] + coarse[1])


def test_regions_take_over_the_embeddings_of_the_same_tiles(
    tmp_path: Path, slide: Path
) -> None:
    folder = Folder(tmp_path / "out", slide)
    folder.run("0.5", until="embeddings")
    plain = open_results(folder.out).tile_embeddings("s")
    row_of = {tuple(corner): row for row, corner in enumerate(plain.coords_l0.tolist())}
    folder.run("0.5", until="embeddings", region_px=512, min_tissue_fraction=0.3)
    grid = "128px_0.5mpp_512px_regions_min_tissue_fraction-0.3"
    results = open_results(folder.out)
    tiles = results.tiles("s", grid)
    stored = results.tile_embeddings("s", f"{grid}/features_efficientnet_lite0_seed0")
    assert (tiles.attributes["region_px"], tiles.attributes["patch_size"]) == (512, 128)
    np.testing.assert_array_equal(stored.coords_l0, tiles.coords_l0)
    regions = stored.features.reshape(-1, 4, 4, stored.features.shape[1])
    number, row, column = (
        tiles.columns[name] for name in ("region", "region_row", "region_column")
    )
    np.testing.assert_array_equal(regions[number, row, column], stored.features)
    shared = [row_of.get(tuple(corner), -1) for corner in tiles.coords_l0.tolist()]
    known = np.array(shared) >= 0
    assert 0 < known.sum() < len(known)
    assert folder.num_encoded == (~known).sum()
    assert plain.features is not None
    expected = plain.features[np.array(shared)[known]]
    np.testing.assert_array_equal(stored.features[known], expected)
    assert folder.run(
        "0.5", until="embeddings", region_px=512, min_tissue_fraction=0.3
    ).counts["skipped"]


def test_a_slide_encoder_pools_only_the_resolution_that_it_knows() -> None:
    encoder = EncoderIdentity(name="a", label="a", provenance={"name": "a"})
    titan = SlideEncoderIdentity(
        name="b", own_label="b", identity={}, expects=Expects(tile_mpp=0.5)
    )
    models = Models(encoders=(encoder,), slide_encoders=(titan,))

    def pooled(mpp: list[str]) -> list[str]:
        spec = resolve(RunConfig(), {"tile_mpp": mpp, "tile_px": 128})
        stages = stages_of(spec, models)
        return [stage.address for stage in stages if isinstance(stage, PoolingStage)]

    assert [address.split("/")[0] for address in pooled(BOTH)] == [FINE]
    with pytest.raises(
        InvalidInputError, match=r"tile_mpp must be 0\.5 for slide encoder"
    ):
        pooled(["1.0", "2.0"])


@pytest.mark.check
@pytest.mark.timeout(900)
def test_killed_at_every_rename_a_resumed_run_leaves_the_same_bytes(
    tmp_path: Path,
) -> None:
    slide = tmp_path / "s.svs"
    write_he_slide(slide, (700, 600), seed=3, downsamples=(1,), white=255)
    settings = SMALL | {"tile_mpp": BOTH, "overview": False}
    command = [sys.executable, str(HERE / "kill_at_rename.py"), str(slide)]
    command += [str(tmp_path), json.dumps(settings)]
    child = subprocess.run(
        command, capture_output=True, text=True, env=ENVIRONMENT, check=False
    )
    assert child.returncode == 0, child.stderr
    lines = dict(line.split() for line in child.stdout.splitlines())
    reference = lines.pop("reference")
    # tiles, embeddings and pooled embeddings of two grids, each with the ledger after it
    assert len(lines) >= 13
    assert set(lines.values()) == {reference}
