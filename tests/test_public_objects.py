"""What `ts` hands out prints itself in one or two lines, and travels or says why it does not."""

import copy
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from tests.predict.test_model_file import model as trained_model
from tests.segment.test_segment import write_entry
from tests.store.cache_data import features, write
from tests.support.known_machine import know_machine

import thinsection as ts
from thinsection.config import replace_flat
from thinsection.errors import CopyError, StoreError
from thinsection.files.atomic import atomic_path
from thinsection.predict.predicting import Predictions, PredictRunConfig
from thinsection.predict.zeroshot import Zeroshot, ZeroshotRunConfig
from thinsection.run.qc_run import QcRunConfig
from thinsection.store.cache import CacheKey, CacheWriter, FeatureCache
from thinsection.store.tiles_h5 import TilesWriter
from thinsection.testing.synthetic import ArraySlide, position_pixels, write_he_slide
from thinsection.tiles import TilesConfig
from thinsection.tiles.categories import Categories

ADDRESS = re.compile(r"0x[0-9a-f]{6,}|object at")
NAMES = ("first slide", "second:slide")
SETTINGS = {
    "tile_px": 128,
    "tile_mpp": "native",
    "memory": "128MiB",
    "pretrained": False,
    "slide_encoders": ("mean",),
    "measures": True,
}


LABELS = ["0", "1"] * 30
PATIENTS = [f"P{row // 2}" for row in range(60)]
SCORES = np.random.default_rng(0).random(60)


@pytest.fixture(scope="module")
def slide_paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("slides of two")
    paths = [folder / f"{name}.svs" for name in NAMES]
    for seed, path in enumerate(paths):
        write_he_slide(path, (1100 + 200 * seed, 900), seed=seed, downsamples=(1, 4))
    return paths


@pytest.fixture(scope="module")
def objects(
    slide_paths: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """Objects that public functions return, by name."""
    folder = tmp_path_factory.mktemp("objects")
    with pytest.MonkeyPatch.context() as patch:
        know_machine(patch, folder / "cache")
        planned = ts.plan(slide_paths, config=replace_flat(ts.RunConfig(), SETTINGS))
    config = replace_flat(ts.RunConfig(), SETTINGS)
    summary = ts.run(slide_paths, out=folder / "out", config=config)
    results = ts.open_results(folder / "out")
    first, second = (ts.open_slide(path) for path in slide_paths)
    table, other = (
        ts.tile_grid(slide, TilesConfig(tile_px=128, tile_mpp="native"))
        for slide in (first, second)
    )
    stream = ts.iter_tiles(second, other.select(np.arange(3)), batch_size=2)
    slide_id = results.slides[1]
    cache_folder, _ = write(folder / "caches", features("fp32"))
    rows = [("a", 0.5)] * 500
    yield {
        "ts": ts,
        "slide": first,
        "stored slide": second.stored,
        "slide of arrays": ArraySlide([position_pixels((90, 70))]),
        "table": table,
        "table with many columns": table.with_columns(
            {f"column number {n}": np.zeros(len(table)) for n in range(60)}
        ),
        "pictures": first.tiles(table),
        "batch": next(stream),
        "mask": ts.tissue_mask(second),
        "qc": ts.run_qc(first),
        "segmenter": (segmenter := ts.load_segmenter(write_entry(folder, mpp=1.0))),
        "segmentation": ts.segment(second, segmenter),
        "encoder": (encoder := ts.load_encoder("efficientnet_lite0", pretrained=False)),
        "own encoder": ts.make_encoder(
            mean_colour, name="colours", version="2", tile_px=128
        ),
        "embeddings": ts.embed_tiles(first, table.select(np.arange(3)), encoder),
        "slide encoder": ts.load_slide_encoder("max"),
        "slide encoder with weights": ts.load_slide_encoder(
            "madeleine", pretrained=False, device="cpu"
        ),
        "model": trained_model("abmil"),
        "config": ts.RunConfig(),
        "changed config": replace_flat(
            ts.RunConfig(),
            SETTINGS | {"encoders": tuple(f"encoder{n}" for n in range(90))},
        ),
        "training config": ts.TrainConfig(),
        "prediction config": PredictRunConfig(),
        "zeroshot config": ZeroshotRunConfig(),
        "qc config": QcRunConfig(),
        "summary": summary,
        "plan": planned,
        "results": results,
        "ledger": results.ledger(slide_id),
        "folder": results.folders[0],
        "record": results.records[0],
        "tiles": results.tiles(slide_id),
        "tile embeddings": results.tile_embeddings(slide_id),
        "embedding rows": results.embedding_rows(slide_id),
        "dataset": (dataset := ts.TileDataset(results, memory="4MiB")),
        "tiles by number": dataset.map_style(),
        "tile loader": dataset.loader(num_workers=2),
        "slide of results": (stored := results.open_slide(slide_id)),
        "folds": (folds := ts.folds(LABELS, patients=PATIENTS, folds=4)),
        "fold": folds[1],
        "interval": ts.interval(LABELS, SCORES, patients=PATIENTS),
        "comparison": ts.compare(LABELS, SCORES, SCORES[::-1], patients=PATIENTS),
        "audit": ts.audit(LABELS, patients=PATIENTS),
        "categories": Categories(
            names=tuple(f"class {n}" for n in range(90)), colors=("#102030",) * 90
        ),
        "cache": (cache := FeatureCache(cache_folder)),
        "predictions": Predictions(
            table=folder / "a.csv",
            results=folder,
            address="g/f",
            rows=rows,  # type: ignore[arg-type]
        ),
        "zeroshot": Zeroshot(
            folder=folder,
            table=folder / "a.csv",
            rows=rows,
            columns=("a",),
            unread=(),  # type: ignore[arg-type]
        ),
    }
    stored.close()
    cache.close()
    stream.close()  # type: ignore[attr-defined]
    first.close()
    second.close()


def mean_colour(tiles: torch.Tensor) -> torch.Tensor:
    return tiles.float().mean(dim=(2, 3))


# arrays, which print themselves
ARRAYS = ("embeddings",)


def test_each_object_prints_at_most_two_lines_without_an_address(
    objects: dict[str, Any],
) -> None:
    faults = []
    for name, each in objects.items():
        text = repr(each)
        if name in ARRAYS or isinstance(each, ModuleType):
            continue
        if len(text) > 300 or text.count("\n") > 1 or ADDRESS.search(text):
            faults.append((name, len(text), text[:400]))
    assert not faults, faults


EXPECTED = {
    "slide": r"TiffSlide\('first slide\.svs': 1100 x 900 px, 2 levels, 0\.5 µm/px",
    "table": r"TileTable\(\d+ tiles of 128 px at 0\.5 µm/px",
    "table with many columns": r"and \d\d more\)",
    "batch": r"TileBatch\(2 tiles of 128 px at 0\.5 µm/px, rows 0 to 1, slide 'second:slide",
    "tiles": r"TilesFile\(\d+ tiles of 128 px at 0\.5 µm/px, columns: ",
    "tile embeddings": r"embeddings of 1280 float32",
    "results": r"Results\('.*out': 2 slides, .* folders: .*128px",
    "dataset": r"TileDataset\(\d+ tiles of 128 px of 2 slides",
    "tiles by number": r"IndexedTiles\(\d+ tiles of 128 px of 2 slides\)",
    "tile loader": r"TileLoader\(epoch 0, batches of 32 tiles, 2 workers\)",
    "cache": r"FeatureCache\(37 x 5 x 24, ",
    "encoder": r"<efficientnet_lite0: 1280-d, fp32 on cpu",
    "slide encoder with weights": r"<madeleine: 512-d, fp32, tiles of conch",
    "config": r"RunConfig\(all defaults\)",
    "changed config": r"RunConfig\(.*tiles\.tile_px=128.*, 6 settings\)",
    "segmenter": r"<colours: red, blue, 1 µm/px, colours\.safetensors on auto>",
    "categories": r"Categories\(90: class 0, .* and 8\d more\)",
    "model": r"Model\('grade': abmil for low, high, 2 members, tiles of uni2_h, 6-d\)",
    "predictions": r"Predictions\(500 predictions in 'a\.csv'",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_what_it_prints_has_size_resolution_and_number(
    objects: dict[str, Any], name: str
) -> None:
    assert re.search(EXPECTED[name], repr(objects[name])), repr(objects[name])


def test_what_a_notebook_shows_escapes_and_is_small(objects: dict[str, Any]) -> None:
    shown = 0
    for name, each in objects.items():
        html = getattr(each, "_repr_html_", None)
        if html is None or isinstance(each, ModuleType):
            continue
        text = html()
        assert "<" in text and len(text) < 200_000, name
        shown += 1
    assert shown > 20


def through_pickle(each: Any) -> Any:
    return pickle.loads(pickle.dumps(each))  # noqa: S301


def through_cloudpickle(each: Any) -> Any:
    return pickle.loads(cloudpickle.dumps(each))  # noqa: S301


@pytest.mark.parametrize("way", [through_pickle, through_cloudpickle, copy.deepcopy])
def test_each_object_travels_and_prints_the_same_afterwards(
    objects: dict[str, Any], way: Callable[[Any], Any]
) -> None:
    faults = []
    for name, each in objects.items():
        try:
            copied = way(each)
        except Exception as error:  # noqa: BLE001 - all of them are reported together
            faults.append((name, repr(error)))
            continue
        if repr(copied) != repr(each):
            faults.append((name, f"{each!r} became {copied!r}"))
        if name in ("slide", "stored slide", "slide of results", "cache"):
            copied.close()
    assert not faults, faults


def test_the_module_arrives_as_itself() -> None:
    for way in (through_pickle, through_cloudpickle, copy.copy, copy.deepcopy):
        assert way(ts) is ts


def test_copies_have_the_values_of_the_original(objects: dict[str, Any]) -> None:
    for way in (through_pickle, copy.deepcopy):
        mask, copied = objects["mask"], way(objects["mask"])
        np.testing.assert_array_equal(copied.mask, mask.mask)
        assert copied.frame == mask.frame
        qc, copied = objects["qc"], way(objects["qc"])
        np.testing.assert_array_equal(copied.mask_use, qc.mask_use)
        assert copied.row == qc.row
        results, copied = objects["results"], way(objects["results"])
        for slide_id in results:
            one, other = (each.tile_embeddings(slide_id) for each in (results, copied))
            np.testing.assert_array_equal(one.features, other.features)
            assert other.plan == one.plan and list(other.columns) == list(one.columns)
        assert way(objects["config"]) == objects["config"]
        segmenter, copied = objects["segmenter"], way(objects["segmenter"])
        assert copied.identity == segmenter.identity
        assert (copied.network(planes()) == segmenter.network(planes())).all()
        bag = torch.randn(5, 6)
        cells = torch.arange(10).view(5, 2)
        for one, other in zip(
            objects["model"].heads, way(objects["model"]).heads, strict=True
        ):
            assert torch.equal(one(bag, cells).logits, other(bag, cells).logits)


def planes() -> np.ndarray:
    return np.random.default_rng(2).random((2, 3, 64, 64)).astype(np.float32)


@pytest.mark.parametrize("way", [through_pickle, copy.deepcopy])
def test_a_dataset_that_travels_reads_the_same_tiles(
    objects: dict[str, Any], way: Callable[[Any], Any]
) -> None:
    dataset = objects["dataset"]
    copied = way(dataset)
    for each in (dataset, copied):
        each.set_epoch(3)
    pairs = list(zip(dataset, copied, strict=True))
    assert len(pairs) == dataset.num_tiles
    for one, other in pairs:
        assert one["slide_id"] == other["slide_id"] and one["row"] == other["row"]
        assert torch.equal(one["image"], other["image"])


def test_results_by_a_relative_folder_arrive_in_another_one(
    objects: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = objects["results"].folder
    monkeypatch.chdir(folder.parent)
    results = ts.open_results(folder.name)
    data = pickle.dumps(results)
    monkeypatch.chdir("/")
    copied = pickle.loads(data)  # noqa: S301
    assert len(copied.tiles(copied.slides[1])) == len(
        objects["results"].tiles(copied.slides[1])
    )


def test_results_are_asked_for_their_slides_as_a_collection(
    objects: dict[str, Any], tmp_path: Path
) -> None:
    results = objects["results"]
    assert len(results) == 2
    assert list(results) == list(results.slides)
    assert all(slide_id in results for slide_id in results)
    assert "third slide" not in results
    (tmp_path / "slides").mkdir()
    empty = ts.open_results(str(tmp_path))
    assert bool(empty) and len(empty) == 0 and list(empty) == []


# the feature cache


def test_a_cache_that_travels_opens_its_folder_again(tmp_path: Path) -> None:
    data = [features("fp32", seed=seed) for seed in (1, 2)]
    caches = []
    for number, values in enumerate(data):
        folder, _ = write(tmp_path, values, encoder=f"stub {number}")
        caches.append(FeatureCache(folder, budget_bytes=1 << 20))
    for way in (through_pickle, copy.copy, copy.deepcopy):
        for cache, values in zip(caches, data, strict=True):
            copied = way(cache)
            np.testing.assert_array_equal(copied.read([3, 0]), values[[3, 0]])
            copied.close()
            copied.close()
            np.testing.assert_array_equal(cache[5], values[5])
            np.testing.assert_array_equal(cache[-3:], values[-3:])
    for cache in caches:
        cache.close()
        assert "closed" in repr(cache)
        with pytest.raises(CopyError, match="cache must be open"):
            pickle.dumps(cache)
        with pytest.raises(StoreError, match="cache must be open, got a closed one"):
            cache.read([1])
        with pytest.raises(IndexError):
            cache[len(cache)]


def test_another_cache_in_the_folder_is_refused(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, features("fp32", seed=1))
    other, _ = write(tmp_path, features("fp32", seed=2), encoder="other")
    with FeatureCache(folder) as cache:
        data = pickle.dumps(cache)
        for file in other.iterdir():
            file.replace(folder / file.name)
        with pytest.raises(StoreError, match="must be the one that was opened"):
            pickle.loads(data)  # noqa: S301


# what stays


@pytest.mark.parametrize("way", [through_pickle, copy.copy, copy.deepcopy])
def test_writers_and_viewers_say_that_they_stay(
    way: Callable[[Any], Any], tmp_path: Path, slide_paths: list[Path]
) -> None:
    with (
        atomic_path(tmp_path / "a.h5") as path,
        TilesWriter(path, dim=2, attributes={}) as writer,
        pytest.raises(CopyError, match="TilesWriter must stay in the process"),
    ):
        way(writer)
    key = CacheKey(encoder="a", weights_hash="b", preprocessing="c", data_hash="d")
    with (
        CacheWriter(tmp_path, key, (3, 2)) as cache_writer,
        pytest.raises(CopyError, match="CacheWriter must stay in the process"),
    ):
        way(cache_writer)


def test_a_viewer_prints_its_url_and_stays(slide_paths: list[Path]) -> None:
    pytest.importorskip("uvicorn", reason="the extra `view` is not installed")
    with ts.view(slide_paths) as viewer:
        assert repr(viewer) == f"Viewer({viewer.url!r})"
        for way in (through_pickle, copy.copy, copy.deepcopy):
            with pytest.raises(CopyError, match="pass its url"):
                way(viewer)
    assert repr(viewer) == "Viewer('closed')"
