"""A run knows about how many tiles it has, by which `auto` compiles; it tells another engine."""

from pathlib import Path

import pytest
import torch

from thinsection import encode
from thinsection.encode import Workload
from thinsection.extras import missing_of
from thinsection.run import models as run_models
from thinsection.run import task
from thinsection.run.run import make_task, run
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.config import RunConfig
from thinsection.stages.spec import resolve

SETTINGS = {"overview": False, "batch_size": 4, "device": "cpu", "precision": "fp32"}


def slides_of(folder: Path, *sizes: int) -> list[SlideEntry]:
    entries = []
    for number, size in enumerate(sizes):
        path = folder / f"{number}.svs"
        with path.open("wb") as file:
            file.truncate(size)
        entries.append(SlideEntry(slide_id=path.stem, slide_path=str(path)))
    return entries


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch):
    """A GPU for those who count them; the encoders stay on the CPU."""
    monkeypatch.setattr(task, "visible_gpus", lambda: ("0",))


def expected(tmp_path: Path, entries: list[SlideEntry], **settings) -> int | None:
    spec = resolve(RunConfig(), {"until": "embeddings", **settings})
    return make_task(tmp_path / "out", spec).with_expected_tiles(entries).num_tiles


def test_the_bytes_of_the_slides_predict_the_tiles_of_each_process(tmp_path):
    entries = slides_of(tmp_path, 10**9, 2 * 10**9)
    assert 2**15 < 3e9 / 0.2 / 512**2 < 2**16
    assert expected(tmp_path, entries) == 2**15
    assert expected(tmp_path, entries[:1]) == 2**14
    assert expected(tmp_path, entries, tile_mpp="native") == 2**17
    both = expected(tmp_path, entries, tile_mpp=("0.5", "0.25"))
    assert both == 2**18
    assert expected(tmp_path, entries, workers=3) == 2**14
    urls = [SlideEntry(slide_id="a", slide_path="s3://bucket/a.svs")]
    assert expected(tmp_path, urls) is None


def test_nobody_asks_without_a_gpu_or_for_an_engine_by_name(tmp_path, monkeypatch):
    entries = slides_of(tmp_path, 10**9)
    assert expected(tmp_path, entries, engine="compiled") is None
    monkeypatch.setattr(task, "visible_gpus", lambda: ())
    assert expected(tmp_path, entries) is None


def test_the_prediction_is_that_of_a_drawn_slide_within_a_factor_of_eight(
    he_slide, tmp_path
):
    out = tmp_path / "out"
    summary = run([he_slide], out=out, until="tiles", overview=False)
    tiles = summary.results[0].facts["num_tiles"]
    entry = SlideEntry(slide_id="he", slide_path=str(he_slide))
    predicted = expected(tmp_path, [entry])
    assert tiles / 8 <= predicted <= 8 * tiles


def test_an_encoder_is_loaded_for_the_work_of_the_run(he_slide, tmp_path, monkeypatch):
    workloads = []
    load_encoder = encode.load_encoder

    def noted(name, *, workload, **options):
        workloads.append(workload)
        return load_encoder(name, workload=workload, **options)

    monkeypatch.setattr(encode, "load_encoder", noted)
    run_models.load_models.cache_clear()
    run([he_slide], out=tmp_path / "out", **SETTINGS)
    (workload,) = workloads
    entry = SlideEntry(slide_id="he", slide_path=str(he_slide))
    predicted = expected(tmp_path, [entry])
    assert workload == Workload(num_tiles=predicted, batch_size=4)


@pytest.fixture
def other_engine(monkeypatch):
    """A second engine, which is PyTorch under another name."""
    load_encoder = encode.load_encoder

    def load_as_other(name, **options):
        encoder = load_encoder(name, **options | {"engine": "torch"})
        encoder.engine = "compiled torch 9 (cosine 1)"
        return encoder

    def use() -> None:
        run_models.load_models.cache_clear()
        monkeypatch.setattr(encode, "load_encoder", load_as_other)

    yield use
    run_models.load_models.cache_clear()


def test_a_resume_in_another_precision_has_a_folder_of_its_own(he_slide, tmp_path):
    if missing_of(("timm",)):
        pytest.skip("needs timm")
    out = tmp_path / "out"
    settings = {**SETTINGS, "encoder": "timm:test_vit", "pretrained": False}
    assert run([he_slide], out=out, **settings).counts["done"] == 1
    first = folder_bytes(out, "features_timm-test_vit_seed0")
    rounded = {**settings, "precision": "fp8"}
    assert run([he_slide], out=out, **rounded).counts["done"] == 1
    names = sorted(path.name for path in out.rglob("features_*"))
    assert names == ["features_timm-test_vit_fp8_seed0", "features_timm-test_vit_seed0"]
    assert folder_bytes(out, names[1]) == first
    # each is finished, in whatever order they are asked for
    for again in (rounded, settings):
        assert run([he_slide], out=out, **again).counts["skipped"] == 1
    records = [path.read_text() for path in out.rglob("run.json")]
    assert any("fp8 in 24 of 24 linear layers, cosine 0.99" in text for text in records)


def folder_bytes(out: Path, name: str) -> dict[str, bytes]:
    (folder,) = out.rglob(name)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_resume_on_another_engine_is_told_and_finished_slides_stay(
    he_slide, tmp_path, other_engine
):
    second = tmp_path / "second.svs"
    second.write_bytes(he_slide.read_bytes())
    out = tmp_path / "out"
    messages: list[str] = []
    settings = {"out": out, "on_message": messages.append, **SETTINGS}
    first = run([he_slide], engine="torch", **settings)
    assert first.counts["done"] == 1
    again = run([he_slide, second], engine="torch", **settings)
    assert again.counts == first.counts | {"skipped": 1}
    assert not [line for line in messages if "was computed by" in line]
    other_engine()
    third = tmp_path / "third.svs"
    third.write_bytes(he_slide.read_bytes())
    mixed = run([he_slide, second, third], **settings)
    assert mixed.counts == first.counts | {"skipped": 2}
    (line,) = [line for line in messages if "was computed by" in line]
    assert line.startswith(
        "note: efficientnet_lite0 was computed by compiled torch 9, and earlier in this folder by "
        f"torch {torch.__version__}; "
    )
