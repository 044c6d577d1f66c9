"""Tiles as images and as shards: every tile once, right pixels, resumed, never replaced."""

import csv
import gc
import json
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import openslide
import pytest
from PIL import Image
from typer.testing import CliRunner

import thinsection as ts
from thinsection.cli.app import build_app
from thinsection.config import replace_flat
from thinsection.errors import StoreError
from thinsection.exchange import tile_images
from thinsection.exchange.peer_export import export_peer
from thinsection.testing.synthetic import write_he_slide

NAMES = ("a.b", "c")


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slides")
    for seed, name in enumerate(NAMES):
        path = folder / f"{name}.svs"
        write_he_slide(path, (1300, 900), seed=seed, downsamples=(1, 4))
    return folder


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, slides: Path) -> Path:
    out = tmp_path_factory.mktemp("tiled") / "results"
    flat = {"tile_px": 128, "memory": "64MiB", "until": "tiles"}
    ts.run([slides], out=out, config=replace_flat(ts.RunConfig(), flat))
    return out


def pixels_of(slides: Path, name: str, x: int, y: int) -> np.ndarray[Any, Any]:
    with openslide.OpenSlide(slides / f"{name}.svs") as slide:
        return np.asarray(slide.read_region((x, y), 0, (128, 128)).convert("RGB"))


def test_a_png_for_each_tile_has_the_pixels_of_openslide(
    out: Path, slides: Path, tmp_path: Path
) -> None:
    assert export_peer(out, tmp_path / "png", "png") == 2
    results = ts.open_results(out)
    for name in NAMES:
        with (tmp_path / "png" / name / "tiles.csv").open() as file:
            rows = list(csv.DictReader(file))
        coords = results.tiles(name).coords_l0.tolist()
        assert [[int(row["x_l0"]), int(row["y_l0"])] for row in rows] == coords
        assert all(row["tissue_fraction"] for row in rows)
        for row in rows:
            with Image.open(tmp_path / "png" / name / row["file"]) as image:
                tile = np.asarray(image)
            expected = pixels_of(slides, name, int(row["x_l0"]), int(row["y_l0"]))
            np.testing.assert_array_equal(tile, expected)


# webdataset leaves the shards to the garbage collector
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_shards_are_read_by_webdataset(
    out: Path, slides: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    webdataset = pytest.importorskip("webdataset")
    monkeypatch.setattr(tile_images, "_SHARD_TILES", 7)
    export_peer(out, tmp_path, "webdataset")
    shards = sorted(str(path) for path in tmp_path.glob("*.tar"))
    samples = list(
        webdataset.WebDataset(shards, shardshuffle=False)
        .decode("rgb8")
        .to_tuple("jpg", "json")
    )
    gc.collect()
    results = ts.open_results(out)
    expected = {
        (n, x, y) for n in NAMES for x, y in results.tiles(n).coords_l0.tolist()
    }
    assert len(samples) == len(expected) > 14 and len(shards) > 2
    for tile, facts in samples:
        x, y = facts["x_l0"], facts["y_l0"]
        expected.remove((facts["slide_id"], x, y))
        difference = tile.astype(int) - pixels_of(slides, facts["slide_id"], x, y)
        assert np.abs(difference).mean() < 3  # JPEG of quality 95


@pytest.mark.parametrize("tool", ["jpeg", "webdataset"])
def test_a_stopped_export_goes_on_with_what_is_missing(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    monkeypatch.setattr(tile_images, "_SHARD_TILES", 7)
    export_peer(out, tmp_path / "whole", tool)
    images = [
        p for p in (tmp_path / "whole").rglob("*") if p.suffix in (".jpg", ".tar")
    ]
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    for image in images[::2]:
        (tmp_path / "part" / image.relative_to(tmp_path / "whole")).unlink()
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "part").rglob("*.*g")}
    export_peer(out, tmp_path / "part", tool)
    for image in images:
        again = tmp_path / "part" / image.relative_to(tmp_path / "whole")
        assert again.read_bytes() == image.read_bytes()
    assert all(p.stat().st_mtime_ns == time for p, time in times.items())


@pytest.mark.parametrize("tool", ["jpeg", "png", "webdataset"])
def test_images_of_other_tiles_are_never_replaced(
    out: Path, tmp_path: Path, tool: str
) -> None:
    export_peer(out, tmp_path / "images", tool)
    before = {
        p: p.read_bytes() for p in (tmp_path / "images").rglob("*.*") if p.is_file()
    }
    other = tmp_path / "other"
    flat = {"tile_px": 100, "memory": "64MiB", "until": "tiles"}
    slide = ts.open_results(out).ledger("c").slide["slide_path"]
    ts.run([slide], out=other, config=replace_flat(ts.RunConfig(), flat))
    message = "file must be new or unchanged.*export.json.*pass another out="
    with pytest.raises(StoreError, match=message):
        export_peer(other, tmp_path / "images", tool)
    assert {p: p.read_bytes() for p in before} == before


def test_a_slide_that_cannot_be_read_is_left_out(out: Path, tmp_path: Path) -> None:
    moved = tmp_path / "results"
    shutil.copytree(out, moved)
    ledger = moved / "slides" / "c" / "slide.json"
    ledger.write_text(re.sub(r"/c\.svs", "/gone.svs", ledger.read_text()))
    messages: list[str] = []
    with pytest.raises(OSError, match=r"gone\.svs"):
        export_peer(moved, tmp_path / "all", "jpeg")
    assert (
        export_peer(moved, tmp_path / "some", "jpeg", on_left_out=messages.append) == 1
    )
    assert len(messages) == 1 and messages[0].startswith("c: left out: ")
    assert (tmp_path / "some" / "a.b" / "tiles.csv").exists()
    assert not (tmp_path / "some" / "c" / "tiles.csv").exists()


def test_the_command_writes_shards(out: Path, tmp_path: Path) -> None:
    command = ["export", "webdataset", str(out), "--out", str(tmp_path / "shards")]
    result = CliRunner().invoke(build_app(command), command)
    assert result.exit_code == 0, result.output
    assert "2 slides are in" in result.output
    shard = tmp_path / "shards" / "a.b-000000.tar"
    with tarfile.open(shard) as archive:
        names = archive.getnames()
        facts = json.loads(archive.extractfile(names[1]).read())  # type: ignore[union-attr]
    assert names[:2] == ["a-b_000000.jpg", "a-b_000000.json"]
    assert facts["slide_id"] == "a.b"
