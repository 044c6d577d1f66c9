"""The main job from slides to embeddings: what it leaves, resumes, refuses and survives."""

import csv
import json
import subprocess
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image
from training.tuning_slide import tuning_slide

from thinsection.config import replace_flat
from thinsection.encode import load_encoder
from thinsection.encode.embed import embed_tiles
from thinsection.errors import (
    BudgetError,
    ConfigError,
    DiskSpaceError,
    StoreError,
    UnknownEncoderError,
)
from thinsection.exchange.qupath import export_qupath
from thinsection.files.lock import FileLock
from thinsection.report.qc_files import load_qc
from thinsection.run.process import RunEvent
from thinsection.run.run import run
from thinsection.slide import open_slide
from thinsection.stages.config import RunConfig
from thinsection.stages.tiles import write_columns
from thinsection.store.tiles_h5 import TilesFile, read_slide_embedding, read_tiles
from thinsection.testing.synthetic import write_he_slide
from thinsection.tiles import TilesConfig, iter_tiles, tile_grid
from thinsection.tiles.filters import contrast
from thinsection.types import MaskFrame

GRID = "256px_0.5mpp"
LITE0 = "efficientnet_lite0"
FILES = {
    *("failed.csv", "summary.csv", "slide_ids.json"),
    *("slides/he/slide.json", "slides/he/tissue.png", "slides/he/picture.jpg"),
    *(
        f"{GRID}/tiles/he.h5",
        f"{GRID}/features_{LITE0}/he.h5",
        f"{GRID}/overviews/he.jpg",
    ),
    f"{GRID}/slide_features_mean-{LITE0}/he.h5",
}


def files_of(folder: Path) -> dict[str, bytes]:
    """Name -> bytes of every result, the records of invocations left out."""
    names = {
        str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()
    }
    return {n: p.read_bytes() for n, p in names.items() if not n.startswith("records/")}


def features_of(
    out: Path, slide_id: str, *, grid: str = GRID, encoder: str = LITE0
) -> TilesFile:
    return read_tiles(out / grid / f"features_{encoder}" / f"{slide_id}.h5")


def settings(**flat: object) -> RunConfig:
    return replace_flat(RunConfig(), {"memory": "256MiB", **flat})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, he_slide: Path) -> Path:
    out = tmp_path_factory.mktemp("run")
    assert run([he_slide], out=out, config=settings()).exit_code == 0
    return out


def test_a_slide_leaves_the_files_that_the_documentation_names(
    tmp_path: Path, he_slide: Path
) -> None:
    finished = tmp_path / "run"
    assert run([he_slide], out=finished, config=settings()).exit_code == 0
    parts = {str(path.relative_to(finished)) for path in finished.glob("index/*")}
    assert {Path(name).suffix for name in parts} == {".jpg", ".js"}
    assert len(parts) == 2
    assert set(files_of(finished)) == {*FILES, "index.html"} | parts
    (record,) = finished.glob("records/*/")
    assert {p.name for p in record.iterdir()} == {
        "run.json",
        "run.log",
        "usage",
        "efficiency.html",
        "ended",
    }
    with Image.open(finished / GRID / "overviews" / "he.jpg") as picture:
        assert (picture.format, max(picture.size)) >= ("JPEG", 600)


def sizes_beside_embeddings(out: Path) -> dict[str, int]:
    """Size of each file that the slide 'he' has in a results folder, by the file's name."""
    sizes = {}
    for path in out.rglob("he.*"):
        if "features" not in path.parent.name:
            sizes[path.name] = path.stat().st_size
    for path in (out / "slides" / "he").rglob("*.*"):
        sizes[path.name] = path.stat().st_size
    return sizes


def test_a_slide_leaves_five_small_files_beside_its_embeddings(finished: Path) -> None:
    sizes = sizes_beside_embeddings(finished)
    wanted = {"he.h5", "he.jpg", "picture.jpg", "slide.json", "tissue.png"}
    assert sizes.keys() == wanted
    assert sum(sizes.values()) <= 300_000


@pytest.mark.parametrize("checks", ["auto", "histoqc-light"])
def test_with_quality_control_a_slide_leaves_five_small_files_too(
    checks: str, tmp_path: Path, he_slide: Path
) -> None:
    summary = run([he_slide], out=tmp_path, config=settings(qc=checks), until="tiles")
    assert summary.counts["done"] == 1
    sizes = sizes_beside_embeddings(tmp_path)
    wanted = {"he.h5", "he.jpg", "picture.jpg", "slide.json", "qc.zip"}
    assert sizes.keys() == wanted
    assert sum(sizes.values()) <= 300_000


def test_a_table_of_thousands_of_tiles_with_checks_stays_small(tmp_path: Path) -> None:
    """4,000 tiles with 15 shares: 336 kB as plain numbers."""
    rng = np.random.default_rng(0)
    corners = np.argwhere(rng.random((90, 90)) < 0.5)[:4000] * 512
    columns = {"tissue_fraction": np.ones(4000, np.float32)}
    for index in range(15):
        share = rng.integers(0, 257, 4000) / 256
        share[rng.random(4000) < 0.95] = 0
        columns[f"qc_{index}"] = share.astype(np.float32)
    write_columns(tmp_path / "t.h5", corners, columns, {})
    assert (tmp_path / "t.h5").stat().st_size < 80_000
    stored = read_tiles(tmp_path / "t.h5")
    np.testing.assert_array_equal(stored.coords_l0, corners)
    for name, column in columns.items():
        np.testing.assert_array_equal(stored.columns[name], column)


def test_embeddings_equal_those_of_the_plain_functions(
    finished: Path, he_slide: Path
) -> None:
    tiles = features_of(finished, "he")
    with open_slide(he_slide) as slide:
        grid = tile_grid(slide, TilesConfig())
        wanted = {tuple(c) for c in tiles.coords_l0.tolist()}
        kept = np.array([tuple(c) in wanted for c in grid.coords_l0.tolist()])
        plain, table = embed_tiles(
            slide, grid.select(kept), load_encoder("efficientnet_lite0")
        )
    np.testing.assert_array_equal(table.coords_l0, tiles.coords_l0)
    np.testing.assert_array_equal(plain, tiles.features)
    assert tiles.features is not None
    mean = tiles.features.astype(np.float64).mean(axis=0)
    pooled = read_slide_embedding(
        finished / GRID / f"slide_features_mean-{LITE0}" / "he.h5"
    ).slide_embedding
    np.testing.assert_allclose(pooled, mean, atol=1e-6)


def test_a_pixel_filter_leaves_the_bytes_of_a_run_over_the_kept_tiles_alone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "white.svs"
    write_he_slide(path, (1800, 1300), seed=3, downsamples=(1,), white=255)
    sizes: list[int] = []

    def count(event: RunEvent) -> None:
        if event.kind == "tiles":
            sizes.append(event.num_tiles)

    config = settings(batch_size=4, tile_filter=["contrast"])
    assert (
        run([path], out=tmp_path / "out", config=config, on_event=count).exit_code == 0
    )
    tiles = features_of(tmp_path / "out", "white", grid=f"{GRID}_tile_filter-contrast")
    with open_slide(path) as slide:
        grid = tile_grid(slide, TilesConfig())
        kept = np.concatenate([contrast(b.tiles) for b in iter_tiles(slide, grid)])
        encoder = load_encoder("efficientnet_lite0")
        plain, table = embed_tiles(slide, grid.select(kept), encoder, batch_size=4)
    assert 8 < kept.sum() < len(grid)
    assert sizes == [4] * (kept.sum() // 4) + [kept.sum() % 4] * bool(kept.sum() % 4)
    np.testing.assert_array_equal(tiles.coords_l0, table.coords_l0)
    np.testing.assert_array_equal(tiles.features, plain)


def test_the_attributes_that_trident_reads_are_there(finished: Path) -> None:
    with h5py.File(finished / GRID / f"features_{LITE0}" / "he.h5") as file:
        attributes = dict(file["coords"].attrs)
    assert attributes["patch_size"] == 256
    assert attributes["patch_size_level0"] == 256
    assert attributes["level0_magnification"] == 20
    assert attributes["target_magnification"] == 20
    assert attributes["overlap"] == 0
    assert attributes["name"] == "he"
    assert attributes["encoder"] == "efficientnet_lite0"


def test_the_geojson_is_one_feature_collection_for_qupath(
    finished: Path, tmp_path: Path
) -> None:
    export_qupath(finished, tmp_path)
    document = json.loads((tmp_path / "he.geojson").read_text())
    assert document["type"] == "FeatureCollection"
    assert document["features"][0]["properties"]["objectType"] == "annotation"


def test_a_second_run_skips_what_is_done_and_touches_nothing(
    finished: Path, he_slide: Path
) -> None:
    def stamps() -> dict[Path, int]:
        found = {p: p.stat().st_mtime_ns for p in finished.rglob("*") if p.is_file()}
        return {
            p: t
            for p, t in found.items()
            if "records" not in p.parts and p.suffix != ".csv"
        }

    before = stamps()
    summary = run([he_slide], out=finished, config=settings())
    assert [r.status for r in summary.results] == ["skipped"]
    assert stamps() == before


def test_settings_that_cannot_change_a_result_do_not_undo_it(
    finished: Path, he_slide: Path
) -> None:
    config = settings(batch_size=8, decode_threads=1, memory="300MiB")
    assert run([he_slide], out=finished, config=config).results[0].status == "skipped"


@pytest.mark.parametrize(
    "change", [{"overlap": 64}, {"mask_mpp": 6.0}, {"tile_px": 200}]
)
def test_other_settings_are_computed_anew(
    tmp_path: Path, he_slide: Path, change: dict[str, object]
) -> None:
    run([he_slide], out=tmp_path, config=settings(), until="tiles")
    again = run([he_slide], out=tmp_path, config=settings(**change), until="tiles")
    assert again.results[0].status == "done"


def test_a_changed_or_missing_file_is_computed_anew(
    tmp_path: Path, he_slide: Path
) -> None:
    run([he_slide], out=tmp_path, config=settings(), until="tiles")
    path = tmp_path / GRID / "tiles" / "he.h5"
    good = path.read_bytes()
    path.write_bytes(good[:100])
    assert (
        run([he_slide], out=tmp_path, config=settings(), until="tiles").counts["done"]
        == 1
    )
    assert path.read_bytes() == good


def test_stages_build_on_each_other(tmp_path: Path, he_slide: Path) -> None:
    for until in ("tissue", "tiles", "embeddings", "slide-embeddings"):
        assert (
            run([he_slide], out=tmp_path, config=settings(), until=until).counts["done"]
            == 1
        )
        assert (
            run([he_slide], out=tmp_path, config=settings(), until=until).counts[
                "skipped"
            ]
            == 1
        )
    # an earlier stage asked for again is done
    assert (
        run([he_slide], out=tmp_path, config=settings(), until="tiles").counts[
            "skipped"
        ]
        == 1
    )
    assert features_of(tmp_path, "he").features is not None


def test_a_bad_slide_stops_no_other_and_is_reported(
    tmp_path: Path, slide_folder: Path
) -> None:
    events: list[RunEvent] = []
    summary = run(
        [slide_folder], out=tmp_path, config=settings(), on_event=events.append
    )
    status = {r.slide_id: (r.status, r.stage) for r in summary.results}
    assert summary.exit_code == 3
    assert status["good"] == ("done", "")
    assert status["other"] == ("done", "")
    assert {name for name, (state, _) in status.items() if state == "failed"} == {
        *("truncated", "empty", "text")
    }
    with (tmp_path / "failed.csv").open() as file:
        rows = {row["slide_id"]: row for row in csv.DictReader(file)}
    assert "not a TIFF" in rows["text"]["error"]
    assert "0 bytes" in rows["empty"]["error"]
    assert "Traceback" in (tmp_path / rows["text"]["details"]).read_text()
    assert not list(tmp_path.rglob("truncated.h5"))
    assert {e.slide_id for e in events if e.kind == "ended"} == set(status)


def test_a_failed_slide_is_tried_again_and_its_traces_go(
    tmp_path: Path, slide_folder: Path, he_slide: Path
) -> None:
    path = tmp_path / "slide.svs"
    path.write_bytes((slide_folder / "truncated.svs").read_bytes())
    out = tmp_path / "out"
    assert run([path], out=out, config=settings(), until="tiles").exit_code == 3
    path.write_bytes(he_slide.read_bytes())
    assert run([path], out=out, config=settings(), until="tiles").exit_code == 0
    assert not (out / "slides" / "slide" / "failure.json").exists()
    assert (out / "failed.csv").read_text().count("\n") == 1


def test_the_table_keeps_slides_of_earlier_runs(
    tmp_path: Path, slide_folder: Path
) -> None:
    run([slide_folder / "good.svs"], out=tmp_path, config=settings(), until="tiles")
    run([slide_folder / "other.svs"], out=tmp_path, config=settings(), until="tiles")
    with (tmp_path / "summary.csv").open() as file:
        rows = {row["slide_id"]: row["status"] for row in csv.DictReader(file)}
    assert rows == {"good": "done", "other": "done"}


def test_a_slide_that_another_process_holds_is_waited_for(
    tmp_path: Path, he_slide: Path
) -> None:
    lock = FileLock(tmp_path / "slides" / "he" / ".lock")
    assert lock.acquire()
    waited: list[str] = []

    def on_event(event: RunEvent) -> None:
        if event.kind == "waiting":
            waited.append(event.slide_id)
            lock.release()

    summary = run(
        [he_slide], out=tmp_path, config=settings(), until="tiles", on_event=on_event
    )
    assert waited == ["he"]
    assert summary.counts["done"] == 1


def test_a_slide_without_mpp_says_what_to_do_before_any_pixel_is_read(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(np.full((300, 400, 3), 200, np.uint8)).save(path)
    result = run(
        [path], out=tmp_path / "out", config=settings(), until="tiles"
    ).results[0]
    assert result.status == "failed"
    assert "slide_mpp is missing in 'a.png'; pass --slide-mpp" in result.error
    given = run(
        [path], out=tmp_path / "out", config=settings(slide_mpp="0.5"), until="tiles"
    ).results[0]
    assert given.status == "empty"  # it is read: a flat picture has no tissue


def test_a_slide_without_tissue_is_empty_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "white.png"
    Image.fromarray(np.full((600, 800, 3), 244, np.uint8)).save(path)
    summary = run([path], out=tmp_path / "out", config=settings(slide_mpp="0.5"))
    assert summary.results[0].status == "empty"
    assert "no tissue" in str(summary.results[0].facts["warnings"])
    assert features_of(tmp_path / "out", "white").coords_l0.shape == (0, 2)
    assert not list((tmp_path / "out" / GRID).glob("slide_features_*/*.h5"))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"encoders": ["uni3"]}, UnknownEncoderError, "uni3"),
        ({"tile_filter": ["contrats"]}, ConfigError, "did you mean 'contrast'"),
        ({"graph": "knn"}, ValueError, "knn"),
        ({"memory": "1MiB"}, BudgetError, "memory must be >="),
    ],
)
def test_bad_settings_stop_the_run_before_it_starts(
    tmp_path: Path,
    he_slide: Path,
    change: dict[str, object],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        run([he_slide], out=tmp_path / "out", config=settings(**change))
    assert not (tmp_path / "out" / "slides").exists()


def test_an_output_that_cannot_be_a_folder_is_named(
    tmp_path: Path, he_slide: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="out must be a writable folder"):
        run([he_slide], out=tmp_path / "file" / "out", config=settings())


def test_further_formats_hold_the_same_embeddings(
    tmp_path: Path, he_slide: Path
) -> None:
    import pyarrow.parquet as pq
    import zarr

    config = settings(write=["tsv", "parquet", "zarr"], graph="knn:4")
    run([he_slide], out=tmp_path, config=config, until="embeddings")
    folder = tmp_path / GRID
    tiles = features_of(tmp_path, "he")
    assert tiles.features is not None
    rows = (folder / f"tsv_{LITE0}" / "he.tsv").read_text().splitlines()
    assert rows[0].split("\t")[-3:] == ["submitter_id", "cancer_type", "tile"]
    values = np.array([row.split("\t")[:-3] for row in rows[1:]], dtype=np.float32)
    np.testing.assert_array_equal(values, tiles.features)
    x, y = tiles.coords_l0[0]
    assert rows[1].split("\t")[-1] == f"{x}x_{y}y"
    table = pq.read_table(folder / f"parquet_{LITE0}" / "he.parquet")
    np.testing.assert_array_equal(
        np.stack(table["embedding"].to_numpy()), tiles.features
    )
    store = zarr.storage.ZipStore(folder / f"zarr_{LITE0}" / "he.zarr.zip", mode="r")
    np.testing.assert_array_equal(
        zarr.open_group(store, mode="r")["features"][:], tiles.features
    )
    store.close()
    with h5py.File(folder / "graph_knn-4" / "he.h5") as file:
        assert file["edge_index"].shape == (2, 4 * len(tiles.coords_l0))


def test_half_precision_storage_is_asked_for_not_assumed(
    tmp_path: Path, he_slide: Path
) -> None:
    run(
        [he_slide],
        out=tmp_path,
        config=settings(embedding_dtype="float16"),
        until="embeddings",
    )
    features = features_of(tmp_path, "he", encoder=f"{LITE0}_float16").features
    assert features is not None
    assert features.dtype == np.float16


def test_quality_control_makes_the_mask_and_says_which_check_touched_each_tile(
    tmp_path: Path, he_slide: Path
) -> None:
    summary = run(
        [he_slide], out=tmp_path, config=settings(qc="histoqc-light"), until="tiles"
    )
    assert summary.counts["done"] == 1, summary.results
    tiles = read_tiles(tmp_path / f"{GRID}_qc-histoqc-light" / "tiles" / "he.h5")
    touched = [name for name in tiles.columns if name.startswith("qc_")]
    assert touched
    assert all(((c >= 0) & (c <= 1)).all() for c in tiles.columns.values())
    assert (tmp_path / "slides" / "he" / "qc_histoqc-light" / "qc.zip").is_file()
    assert "he" in (tmp_path / "qc_histoqc-light.csv").read_text()
    assert (tmp_path / "qc_histoqc-light.html").is_file()
    stored = load_qc(tmp_path / "slides" / "he" / "qc_histoqc-light")
    assert stored.mask_kept is not None
    with open_slide(he_slide) as slide:
        mask = stored.mask_kept
        frame = MaskFrame(size_th=(mask.shape[1], mask.shape[0]), size_l0=slide.size)
        grid = tile_grid(slide, TilesConfig(), tissue=(mask, frame))
    np.testing.assert_array_equal(grid.coords_l0, tiles.coords_l0)


def test_a_slide_that_fails_a_quality_rule_is_left_out_and_said_so(
    tmp_path: Path, he_slide: Path
) -> None:
    config = settings(qc="histoqc-light", qc_fail=["pixels_to_use<100000000"])
    summary = run([he_slide], out=tmp_path, config=config, until="tiles")
    assert summary.counts["excluded"] == 1
    assert summary.exit_code == 0
    assert (
        "excluded by 'pixels_to_use<100000000'" in (tmp_path / "failed.csv").read_text()
    )
    assert not list(tmp_path.rglob("he.h5"))
    # its marks are drawn, and the page shows them
    assert list(tmp_path.rglob("overlay.jpg"))
    assert (
        "he/qc_histoqc-light/overlay.jpg"
        in (tmp_path / "qc_histoqc-light.html").read_text()
    )


def test_a_quality_rule_without_quality_control_is_refused(
    tmp_path: Path, he_slide: Path
) -> None:
    with pytest.raises(ConfigError, match="qc_fail must be combined with qc"):
        run(
            [he_slide],
            out=tmp_path,
            config=settings(qc_fail=["pixels_to_use<1"]),
            until="tiles",
        )


def test_a_full_disk_stops_the_run_before_it_starts(
    tmp_path: Path, he_slide: Path
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small tmpfs is not allowed here")
    try:
        with pytest.raises(
            DiskSpaceError, match=r"out must have 256.0 MiB free, got 8.0 MiB"
        ):
            run([he_slide], out=small / "out", config=settings())
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_slide_without_any_tile_is_empty_and_not_done(tmp_path: Path) -> None:
    out, glass = tmp_path / "out", tmp_path / "glass.png"
    Image.new("RGB", (1400, 1100), (243, 242, 244)).save(glass)
    for again in (False, True):  # found so now, and by an earlier run
        summary = run([glass], out=out, config=settings(slide_mpp="0.5"), until="tiles")
        assert summary.counts == dict.fromkeys(summary.counts, 0) | {"empty": 1}, again
        assert summary.exit_code == 3
        assert summary.results[0].facts["warnings"] == "no tissue was found"
    config = settings(slide_mpp="0.5", allow_empty=True)
    assert run([glass], out=out, config=config, until="tiles").exit_code == 0
    with (out / "summary.csv").open() as file:
        assert next(csv.DictReader(file))["status"] == "empty"


def test_no_pen_is_tiled_by_default(tmp_path: Path) -> None:
    drawn = tuning_slide(5, size=(2400, 1800), mpp=2.0, stain="he", artefacts=("pen",))
    drawn.write(tmp_path / "pen.tif")
    config = settings(tile_mpp="2", tile_px=64)
    run([tmp_path / "pen.tif"], out=tmp_path / "out", config=config, until="tiles")
    tiles = read_tiles(tmp_path / "out" / "64px_2mpp" / "tiles" / "pen.h5")
    pen, coords = drawn.masks["pen"], tiles.coords_l0
    shares = [pen[y : y + 64, x : x + 64].mean() for x, y in coords]
    assert pen.mean() > 0.01
    # the tile filter asks for half a tile of tissue; ink is looked for in px of 16 µm
    assert max(shares) < 0.65 and np.mean(np.array(shares) > 0.5) < 0.02
    assert len(coords) > 100
