"""Results that are not of this slide file or of this layout are refused, or replaced when asked."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from thinsection.config import replace_flat
from thinsection.errors import StoreError
from thinsection.results.folder import open_results
from thinsection.run.ending import RunSummary
from thinsection.run.pooling import aggregate_folder
from thinsection.run.run import check_folder, run
from thinsection.stages.config import AggregateRunConfig, RunConfig
from thinsection.store.identity import fingerprint
from thinsection.testing.synthetic import write_he_slide
from thinsection.weights.placement import optional_package

GRID, LITE0 = "256px_0.5mpp", "efficientnet_lite0_seed0"
LEDGER = "slides/s/slide.json"
# tables, and the page with its parts: they say what became of each slide
TOLD = (".csv", ".html", ".js")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two slides that come under one name, one after the other."""
    root = tmp_path_factory.mktemp("files")
    for name, size, seed in (("first", (1300, 1000), 3), ("second", (1100, 1300), 5)):
        write_he_slide(root / f"{name}.svs", size, seed=seed, downsamples=(1,))
    return root / "first.svs", root / "second.svs"


@pytest.fixture
def slide(tmp_path: Path, files: tuple[Path, Path]) -> Path:
    shutil.copy(files[0], tmp_path / "s.svs")
    return tmp_path / "s.svs"


def do(
    slide: Path, out: Path, *, until: str = "slide-embeddings", **flat: object
) -> RunSummary:
    config = replace_flat(
        RunConfig(), {"memory": "256MiB", "pretrained": False, **flat}
    )
    return run([slide], out=out, config=config, until=until)


def results(out: Path) -> dict[str, tuple[bytes, int]]:
    """Every file of the slide with its time stamp; not the tables and records of invocations."""
    paths = [p for p in sorted(out.rglob("*")) if p.is_file() and p.suffix not in TOLD]
    found = {
        str(p.relative_to(out)): (p.read_bytes(), p.stat().st_mtime_ns) for p in paths
    }
    return {n: f for n, f in found.items() if not n.startswith("records/")}


def test_a_slide_file_that_was_replaced_is_refused_and_nothing_changes(
    slide: Path, files: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert do(slide, out).exit_code == 0
    before = results(out)
    shutil.copy(files[1], slide)
    refused = do(slide, out)
    assert refused.exit_code == 3
    (result,) = refused.results
    assert result.error == (
        "slides/tissue of 's' must come from the same slide file and settings, "
        "got a result of another slide file, resolution, weights or version; pass --overwrite to "
        "replace it and "
        "all results that "
        "were made from it, or pass another --out"
    )
    after = results(out)
    assert json.loads(after.pop("slides/s/failure.json")[0])["error"] == result.error
    assert after == before
    # another grid of the new file would lie beside results of the old one: refused as well
    assert do(slide, out, tile_px=200).counts["failed"] == 1
    shutil.copy(files[0], slide)
    assert do(slide, out).counts["skipped"] == 1
    again = results(out)
    again.pop(LEDGER), before.pop(LEDGER)  # it remembers the copy's time
    assert again == before
    assert do(slide, out).counts["skipped"] == 1
    assert results(out)[LEDGER][0] == (out / LEDGER).read_bytes()


def test_a_change_between_the_samples_is_refused_and_a_copied_folder_is_not_recomputed(
    tmp_path: Path, files: tuple[Path, Path]
) -> None:
    slide, out = tmp_path / "s.svs", tmp_path / "out"
    data = files[0].read_bytes()
    slide.write_bytes(data + bytes(1_000_000))  # room between the samples
    assert do(slide, out).counts["done"] == 1
    before = {name: file for name, file in results(out).items() if name != LEDGER}
    moved = tmp_path / "copy" / "s.svs"
    moved.parent.mkdir()
    shutil.copy(slide, moved)
    assert do(moved, out).counts["skipped"] == 1
    assert {
        name: file for name, file in results(out).items() if name != LEDGER
    } == before
    with slide.open("r+b") as file:
        file.seek(len(data) + 400_000)
        file.write(b"x" * 1000)
    assert fingerprint(slide) == fingerprint(moved)
    refused = do(slide, out)
    assert "got a result of another slide file" in refused.results[0].error
    assert do(slide, out, fingerprint="samples").counts["skipped"] == 1  # asked for
    assert do(slide, out, overwrite=True).counts["done"] == 1
    assert do(slide, out).counts["skipped"] == 1


def test_overwriting_leaves_what_a_run_of_the_new_file_alone_leaves(
    slide: Path, files: tuple[Path, Path], tmp_path: Path
) -> None:
    out, fresh = tmp_path / "out", tmp_path / "fresh"
    more = {"write": ["tsv"], "graph": "knn:4", "slide_encoders": ["mean", "max"]}
    do(slide, out, **more)
    do(slide, out, tile_px=200)
    do(slide, out, mask_mpp=16.0, until="tissue")  # not made from what is replaced
    shutil.copy(files[1], slide)
    assert do(slide, out, overwrite=True).counts["done"] == 1
    do(slide, fresh)
    of_old = {n for n in results(out) if "mask_mpp-16" in n}
    assert len(of_old) == 2  # mask and picture
    found = {n: data for n, (data, _) in results(out).items() if n not in of_old}
    expected = {n: data for n, (data, _) in results(fresh).items()}
    one, other = json.loads(found.pop(LEDGER)), json.loads(expected.pop(LEDGER))
    assert found == expected
    del one["stages"]["slides/tissue_mask_mpp-16"]
    assert one == other
    assert do(slide, out, overwrite=True).counts["skipped"] == 1


def test_weights_of_ones_own_that_were_replaced_have_results_of_their_own(
    slide: Path, tmp_path: Path
) -> None:
    timm = optional_package("timm")
    weights, out = tmp_path / "w.safetensors", tmp_path / "out"
    own = {"encoders": ["timm:resnet18"], "weights": str(weights), "pretrained": True}
    before: dict[str, tuple[bytes, int]] = {}
    for seed in (1, 2):
        torch.manual_seed(seed)
        save_file(timm.create_model("resnet18", num_classes=0).state_dict(), weights)
        assert do(slide, out, until="embeddings", **own).counts["done"] == 1
        after = results(out)
        assert {n: after[n] for n in before if n != LEDGER} == {
            n: f for n, f in before.items() if n != LEDGER
        }
        before = after
    one, other = open_results(out).features
    assert one.startswith(f"{GRID}/features_timm-resnet18_w")
    embeddings = (
        open_results(out).tile_embeddings("s", name).features for name in (one, other)
    )
    assert not np.array_equal(*embeddings)


def test_slide_embeddings_of_features_that_are_gone_are_made_again_by_the_run_alone(
    slide: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    do(slide, out, until="embeddings")
    (out / GRID / f"features_{LITE0}" / "s.h5").unlink()
    config = replace_flat(AggregateRunConfig(), {"slide_encoder": "max"})
    (result,) = aggregate_folder(out, config=config)
    assert (result.status, result.stage) == ("failed", "aggregate")
    assert "no such file" in result.error
    assert do(slide, out, slide_encoders=["max"]).counts["done"] == 1
    assert open_results(out).slide_embeddings()[0] == ("s",)


@pytest.mark.parametrize("old", ["run.json", "s/slide.json"])
def test_a_folder_of_the_earlier_layout_is_refused_and_left_as_it_was(
    slide: Path, tmp_path: Path, old: str
) -> None:
    out = tmp_path / "out"
    (out / old).parent.mkdir(parents=True)
    (out / old).write_text("{}")
    with pytest.raises(
        StoreError, match=r"results of an earlier version .*nothing was changed"
    ):
        do(slide, out, until="tiles")
    assert [p for p in out.rglob("*") if p.is_file()] == [out / old]
    with pytest.raises(
        StoreError, match="results must be a folder of `thinsection run`"
    ):
        open_results(out)


def test_files_of_others_beside_the_results_are_no_earlier_layout(
    slide: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    assert do(slide, out, until="tissue").exit_code == 0
    (out / "run.json").write_text("{}")  # somebody's, once the folder is ours
    assert check_folder(out) == out
    assert (out / "notes.txt").read_text() == "mine"


def test_an_embedding_that_the_ledger_does_not_know_is_not_pooled(
    slide: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    do(slide, out, until="embeddings")
    stray = out / GRID / "features_stray"
    stray.mkdir()
    shutil.copy(out / GRID / f"features_{LITE0}" / "s.h5", stray / "s.h5")
    found = aggregate_folder(out)
    assert [result.status for result in found] == ["done"]
    assert not (out / GRID / "slide_features_mean-stray").exists()
