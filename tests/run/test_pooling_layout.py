"""Slide encoders get the size of tiles and the step between them, as the tiles file says."""

from importlib.metadata import EntryPoint
from pathlib import Path

import h5py
import numpy as np
import pytest

from thinsection.config import replace_flat
from thinsection.encode.registry import our_slide_encoder
from thinsection.errors import InvalidInputError, UnknownEncoderError
from thinsection.pool import Expects, SlideEncoder, TileLayout
from thinsection.pool.encoder import SLIDE_ENCODERS
from thinsection.run.pooling import aggregate_folder
from thinsection.run.run import run
from thinsection.stages.config import AggregateRunConfig, RunConfig
from thinsection.store.outcome import SlideResult
from thinsection.store.tiles_h5 import read_slide_embedding, read_tiles
from thinsection.testing.synthetic import write_he_slide


class LayoutEncoder(SlideEncoder):
    """Width, height, steps along x and y (-1: not known)."""

    name = "layout"

    def encode(self, tile_embeddings, coords_l0, *, tile_px_l0):
        raise AssertionError("the layout is known, so encode_tiles is asked")

    def encode_tiles(self, tile_embeddings, coords_l0, layout: TileLayout):
        return np.float32([*layout.size_l0, *(layout.stride_l0 or (-1, -1))])


class ChoosyEncoder(LayoutEncoder):
    """Takes only certain tiles."""

    name = "choosy"
    expects = Expects(tile_px=224, tile_mpp=0.5)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoder in (LayoutEncoder, ChoosyEncoder):
        target = f"{__name__}:{encoder.__name__}"
        point = EntryPoint(encoder.name, target, SLIDE_ENCODERS.group)
        monkeypatch.setitem(SLIDE_ENCODERS._points, encoder.name, point)


def aggregated(folder: Path, **settings: object) -> SlideResult:
    wanted = {"slide_encoder": "layout", "device": "cpu", **settings}
    config = replace_flat(AggregateRunConfig(), wanted)
    (result,) = aggregate_folder(folder, config=config)
    return result


def pooled(folder: Path) -> list[float]:
    (path,) = folder.rglob("slide_features_layout*/*.h5")
    return read_slide_embedding(path).slide_embedding.tolist()


def test_a_run_and_aggregate_hand_on_what_the_grid_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slide, out = tmp_path / "s.svs", tmp_path / "out"
    write_he_slide(slide, (1500, 1200), mpp=0.25, seed=3, downsamples=(1,), white=255)
    settings = {
        "slide_encoders": ("layout",),
        "tile_px": 224,
        "overlap": 56,
        "memory": "256MiB",
        "pretrained": False,
        "batch_size": 4,
    }
    config = replace_flat(RunConfig(), settings)
    summary = run([slide], out=out, config=config, until="slide-embeddings")
    assert summary.counts["failed"] == 0, summary.results
    assert pooled(out) == [448, 448, 336, 336]
    assert aggregated(out).status == "skipped"  # by the same key
    monkeypatch.setattr(LayoutEncoder, "version", 2)
    result = aggregated(out)
    assert result.status == "failed"
    assert "weights or version; pass --overwrite" in result.error


def test_tiles_that_the_slide_encoder_does_not_expect_are_refused(
    tmp_path: Path,
) -> None:
    slides = [tmp_path / "coarse.svs", tmp_path / "fine.svs"]
    for path, mpp in zip(slides, (0.48, 0.25), strict=True):
        write_he_slide(path, (1500, 1200), mpp=mpp, seed=3, downsamples=(1,), white=255)
    settings = {
        "slide_encoders": ["choosy"],
        "memory": "256MiB",
        "pretrained": False,
        "batch_size": 4,
    }
    out = tmp_path / "out"
    # before anything is encoded, where the settings tell
    with pytest.raises(InvalidInputError, match=r"tile_px must be 224 .* got 256; "):
        run(slides, out=out, config=replace_flat(RunConfig(), settings))
    settings["tile_px"] = 224
    with pytest.raises(InvalidInputError, match=r"tile_mpp must be 0\.5 .* got 1; "):
        changed = settings | {"tile_mpp": "1"}
        run(slides, out=out, config=replace_flat(RunConfig(), changed))
    assert not list(out.rglob("*.h5"))
    # slide by slide, where each has a resolution of its own
    native = replace_flat(RunConfig(), settings | {"tile_mpp": "native"})
    for _ in range(2):
        summary = run(slides, out=out, config=native)
        done, failed = sorted(summary.results, key=lambda result: result.slide_id)
        assert done.status in ("done", "skipped")
        assert not done.facts["warnings"]
        assert failed.status == "failed"
        assert "tile_mpp must be 0.5 " in failed.error
        assert "got 0.25 in " in failed.error and "fine.h5" in failed.error
    coarse, fine = sorted(
        aggregate_folder(
            out,
            config=replace_flat(AggregateRunConfig(), {"slide_encoder": "choosy"}),
        ),
        key=lambda result: result.slide_id,
    )
    assert coarse.status == "skipped"
    assert "got 0.25 in " in fine.error


def write_foreign(path: Path, **attributes: object) -> Path:
    path.parent.mkdir()
    with h5py.File(path, "w") as file:
        file["features"] = np.ones((6, 3), np.float32)
        file["coords"] = np.arange(12).reshape(6, 2) * 100
        file["coords"].attrs.update(attributes)
    return path.parent


@pytest.mark.parametrize(
    ("attributes", "settings", "wanted"),
    [
        # TRIDENT: overlap in px of a tile, at 40x
        (
            {"patch_size": 512, "patch_size_level0": 1024, "overlap": 128},
            {},
            [1024, 1024, 768, 768],
        ),
        (
            {"patch_size": 512, "patch_size_level0": 1024, "overlap": 0},
            {"stride_l0": 7},
            [1024, 1024, 1024, 1024],
        ),
        # CLAM: no word of the step
        (
            {"patch_size": 256, "patch_level": 1, "downsample": (4.0, 4.0)},
            {},
            [1024, 1024, -1, -1],
        ),
        ({"patch_size_level0": 512}, {"stride_l0": 256}, [512, 512, 256, 256]),
        ({}, {"tile_px_l0": 224}, [224, 224, -1, -1]),
        # ours, of px that are not square
        (
            {
                "patch_size_level0": 512,
                "tile_size_l0": (512, 509),
                "stride_l0": (512, 509),
            },
            {},
            [512, 509, 512, 509],
        ),
    ],
)
def test_a_features_file_of_others_says_size_and_step(
    tmp_path: Path,
    attributes: dict[str, object],
    settings: dict[str, object],
    wanted: list[float],
) -> None:
    folder = write_foreign(tmp_path / "features" / "a.h5", **attributes)
    assert aggregated(folder, **settings).status == "done"
    assert pooled(tmp_path) == wanted
    assert aggregated(folder, **settings).status == "skipped"


def test_another_layout_or_version_is_pooled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_foreign(tmp_path / "features" / "a.h5", patch_size_level0=512)
    assert aggregated(folder).status == "done"
    assert aggregated(folder, stride_l0=256).status == "done"
    assert pooled(tmp_path) == [512, 512, 256, 256]
    assert aggregated(folder, stride_l0=256).status == "skipped"
    monkeypatch.setattr(LayoutEncoder, "version", 2)
    assert aggregated(folder, stride_l0=256).status == "done"


def test_nobody_says_the_size_of_a_tile(tmp_path: Path) -> None:
    folder = write_foreign(tmp_path / "features" / "a.h5")
    result = aggregated(folder)
    assert result.status == "failed"
    assert "tile_px_l0 is missing in" in result.error
    assert str(folder / "a.h5") in result.error
    assert read_tiles(folder / "a.h5").stride_l0 is None


def test_an_output_may_be_named_wherever_a_slide_encoder_is(tmp_path: Path) -> None:
    assert our_slide_encoder("Prov-GigaPath:cls-11") == "gigapath:cls-11"
    assert our_slide_encoder("titan_slide") == "titan"
    folder = write_foreign(tmp_path / "features" / "a.h5", patch_size_level0=512)
    with pytest.raises(UnknownEncoderError, match="known name, got 'gigapaht'"):
        aggregated(folder, slide_encoder="gigapaht:cls")


def test_a_size_without_a_resolution_is_unknown(tmp_path: Path) -> None:
    # CLAM at 40x: 512 px of level 0, which its encoders see as 256
    attributes = {"patch_size": 512, "patch_level": 0, "downsample": (1.0, 1.0)}
    folder = write_foreign(tmp_path / "h5_files" / "a.h5", **attributes)
    result = aggregated(folder, slide_encoder="choosy")
    assert result.status == "done", result.error
    warnings = str(result.facts["warnings"])
    assert "tiles of 224 px; the size of these tiles is unknown" in warnings
    assert "at 0.5 µm/px; the resolution of these tiles is unknown" in warnings
