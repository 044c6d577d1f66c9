"""Results lie side by side: what is new is computed, what is there is not touched or redone."""

import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from thinsection.config import replace_flat
from thinsection.errors import ConfigError
from thinsection.results.folder import open_results
from thinsection.run.ending import RunSummary
from thinsection.run.pooling import aggregate_folder
from thinsection.run.process import RunEvent
from thinsection.run.run import run
from thinsection.slide import open_slide
from thinsection.stages.config import AggregateRunConfig, RunConfig
from thinsection.testing.synthetic import write_he_slide
from thinsection.tiles.transforms import StainConfig, fit_stain

GRID, LITE0, RESNET = "256px_0.5mpp", "efficientnet_lite0_seed0", "timm-resnet18_seed0"


class Counting:
    """Runs over one folder, and counts the tiles that were decoded and given to encoders."""

    def __init__(self, slide: Path, out: Path) -> None:
        self.slide, self.out = slide, out
        self.tiles = 0

    def __call__(self, event: RunEvent) -> None:
        self.tiles += event.num_tiles if event.kind == "tiles" else 0

    def run(self, *, until: str = "slide-embeddings", **flat: object) -> int:
        """The number of tiles that went through the encoders."""
        self.tiles = 0
        settings = {"memory": "256MiB", "pretrained": False, "batch_size": 4, **flat}
        config = replace_flat(RunConfig(), settings)
        summary = run(
            [self.slide], out=self.out, config=config, until=until, on_event=self
        )
        assert summary.counts["failed"] == 0, summary.results
        return self.tiles

    def files(self) -> dict[str, tuple[bytes, int]]:
        """Name -> bytes and time stamp of every result of a slide."""
        found = {}
        for path in sorted(self.out.rglob("*")):
            name = str(path.relative_to(self.out))
            ours = (
                path.suffix not in (".csv", ".html", ".js")
                and path.name != "slide.json"
            )
            if path.is_file() and ours and not name.startswith("records/"):
                found[name] = (path.read_bytes(), path.stat().st_mtime_ns)
        return found


@pytest.fixture
def finished(tmp_path: Path) -> Counting:
    slide = tmp_path / "s.svs"
    write_he_slide(slide, (1500, 1200), seed=3, downsamples=(1,), white=255)
    counting = Counting(slide, tmp_path / "out")
    assert counting.run() == num_tiles(counting)
    return counting


def num_tiles(counting: Counting, grid: str = GRID) -> int:
    return len(open_results(counting.out).tiles("s", grid).coords_l0)


def test_what_is_derived_encodes_no_tile_and_touches_nothing(
    finished: Counting,
) -> None:
    before = finished.files()
    assert finished.run(write=["tsv"]) == 0
    assert finished.run(graph="knn:8") == 0
    assert finished.run(overview=False) == 0
    assert finished.run(slide_encoders=["max"]) == 0
    after = finished.files()
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {
        *(f"{GRID}/tsv_{LITE0}/s.tsv", f"{GRID}/graph_knn-8/s.h5"),
        f"{GRID}/slide_features_max-{LITE0}/s.h5",
    }
    assert finished.run() == 0


def test_aggregate_and_run_know_each_others_slide_embeddings(
    finished: Counting,
) -> None:
    config = replace_flat(AggregateRunConfig(), {"slide_encoder": "max"})
    (result,) = aggregate_folder(finished.out, config=config)
    assert result.status == "done"
    before = finished.files()
    assert finished.run(slide_encoders=["max"]) == 0
    assert finished.files() == before
    (again,) = aggregate_folder(finished.out, config=config)
    assert again.status == "skipped"
    mean = f"{GRID}/slide_features_mean-{LITE0}/s.h5"
    assert mean in before
    assert finished.run() == 0


def test_a_second_encoder_and_a_second_grid_encode_their_own_tiles_alone(
    finished: Counting,
) -> None:
    before = finished.files()
    assert finished.run(encoders=["timm:resnet18"]) == num_tiles(finished)
    assert finished.run(tile_px=200) == num_tiles(finished, "200px_0.5mpp")
    after = finished.files()
    assert {name: after[name] for name in before} == before
    assert f"{GRID}/features_{RESNET}/s.h5" in after
    assert f"200px_0.5mpp/features_{LITE0}/s.h5" in after


def test_the_same_tiles_under_another_masks_name_are_not_encoded_again(
    finished: Counting, tmp_path: Path
) -> None:
    for name in ("one", "other"):
        (tmp_path / f"{name}.toml").write_text(
            f'name = "{name}"\nwork_mpp = 8.0\n[[check]]\nkind = "otsu"\n'
        )
    first = finished.run(qc=str(tmp_path / "one.toml"), tile_px=200)
    before = finished.files()
    assert first > 0
    assert finished.run(qc=str(tmp_path / "other.toml"), tile_px=200) == 0
    after = finished.files()
    assert {name: after[name][0] for name in before} == {
        n: b for n, (b, _) in before.items()
    }
    features = sorted(
        n for n in after if "features_eff" in n and "slide_features" not in n
    )
    assert len(features) == 3  # two of quality control, and the plain grid
    assert after[features[0]][0] == after[features[1]][0]


def test_two_encoders_in_one_pass_leave_the_bytes_of_two_runs_and_decode_once(
    finished: Counting, tmp_path: Path
) -> None:
    finished.run(encoders=["timm:resnet18"])
    both = Counting(finished.slide, tmp_path / "both")
    decoded = both.run(encoders=["efficientnet_lite0", "timm:resnet18"])
    assert decoded == num_tiles(finished)
    one_by_one, together = finished.files(), both.files()
    assert set(one_by_one) == set(together)
    assert {n: b for n, (b, _) in one_by_one.items()} == {
        n: b for n, (b, _) in together.items()
    }


def test_an_encoder_that_is_done_is_left_out_of_a_pass_of_two(
    finished: Counting,
) -> None:
    before = finished.files()
    assert finished.run(encoders=["efficientnet_lite0", "timm:resnet18"]) == num_tiles(
        finished
    )
    after = finished.files()
    assert {name: after[name] for name in before} == before
    assert finished.run(encoders=["efficientnet_lite0", "timm:resnet18"]) == 0


def test_tokens_lie_beside_the_embeddings_and_are_those_of_the_encoder(
    finished: Counting,
) -> None:
    assert finished.run(tokens=True, pretrained=True) == num_tiles(finished)
    results = open_results(finished.out)
    stored = results.tile_embeddings("s", "efficientnet_lite0")
    with h5py.File(finished.out / GRID / "tokens_efficientnet_lite0" / "s.h5") as file:
        tokens = file["tokens"][...]
        np.testing.assert_array_equal(file["coords"][...], stored.coords_l0)
    assert tokens.shape == (len(stored.coords_l0), 49, 1280)  # 224 px, 32 px a token
    assert tokens.dtype == np.float16
    # this encoder's embedding is the mean of its tokens
    assert stored.features is not None
    assert np.abs(stored.features).max() > 0.5
    np.testing.assert_allclose(
        tokens.astype(np.float32).mean(axis=1), stored.features, atol=2e-3
    )
    assert finished.run(tokens=True, pretrained=True) == 0


def test_stain_normalisation_has_embeddings_of_its_own(finished: Counting) -> None:
    before = finished.files()
    assert finished.run(stain_norm="macenko") == num_tiles(finished)
    assert finished.run(stain_norm="reinhard") == num_tiles(finished)
    assert finished.run(stain_norm="macenko") == 0
    after = finished.files()
    assert {name: after[name] for name in before} == before
    results = open_results(finished.out)
    plain, macenko, reinhard = (
        results.tile_embeddings("s", name).features
        for name in (LITE0, f"{LITE0}_macenko", f"{LITE0}_reinhard")
    )
    assert plain is not None and macenko is not None and reinhard is not None
    size = np.abs(plain).max()
    assert np.abs(plain - macenko).max() > 0.05 * size
    assert np.abs(reinhard - macenko).max() > 0.05 * size
    with open_slide(finished.slide) as slide:  # the target is not the slide's own look
        assert (
            fit_stain(slide, None, StainConfig(stain_norm="macenko")).matrix is not None
        )


@pytest.mark.check
def test_two_processes_with_different_encoders_on_one_folder_both_complete(
    tmp_path: Path,
) -> None:
    (tmp_path / "slides").mkdir()
    for name in ("a", "b", "c"):
        write_he_slide(tmp_path / "slides" / f"{name}.svs", (1100, 900), seed=ord(name))
    command = [sys.executable, "-m", "thinsection", "run", str(tmp_path / "slides")]
    command += ["--out", str(tmp_path / "out"), "--no-pretrained", "--batch-size", "2"]
    children = [
        subprocess.Popen(
            [*command, "--encoder", name], stdout=subprocess.PIPE, text=True
        )
        for name in ("efficientnet_lite0", "timm:resnet18")
    ]
    outputs = [child.communicate()[0] for child in children]
    assert [child.returncode for child in children] == [0, 0], outputs
    results = open_results(tmp_path / "out")
    assert results.slides == ("a", "b", "c")
    assert results.features == (f"{GRID}/features_{LITE0}", f"{GRID}/features_{RESNET}")
    for slide_id in results.slides:
        for features in results.features:
            assert len(results.tile_embeddings(slide_id, features).coords_l0)
    assert len(results.records) == 2
    assert all(record.document["counts"]["done"] == 3 for record in results.records)


def test_weights_of_ones_own_go_with_one_encoder(finished: Counting) -> None:
    with pytest.raises(
        ConfigError, match="weights must be combined with exactly one encoder, got 2"
    ):
        finished.run(
            encoders=["efficientnet_lite0", "timm:resnet18"], weights="w.safetensors"
        )


def test_a_resume_that_found_all_done_leaves_the_report_of_the_run_that_worked(
    finished: Counting,
) -> None:
    (worked,) = (record for record in open_results(finished.out).records)
    page = (worked.folder / "efficiency.html").read_bytes()
    document = (worked.folder / "run.json").read_bytes()
    summary = run(
        [finished.slide],
        out=finished.out,
        config=replace_flat(RunConfig(), {"memory": "256MiB", "pretrained": False}),
    )
    assert isinstance(summary, RunSummary)
    assert summary.counts["skipped"] == 1
    assert (worked.folder / "efficiency.html").read_bytes() == page
    assert (worked.folder / "run.json").read_bytes() == document
    assert not (summary.record / "efficiency.html").exists()
