"""The mosaic that the benchmarks read: OpenSlide reads it too, and its blocks are real tissue."""

from pathlib import Path

import numpy as np
import openslide
import pytest
import tifffile
from benchmarks import mosaic

from thinsection.slide import open_slide

SIZE = (3000, 2100)  # no multiple of a tile or of a square
BLOCK_PX = 8


@pytest.fixture(scope="module")
def source() -> Path:
    found = mosaic.source()
    if found is None:
        pytest.skip(f"THINSECTION_TEST_SLIDES has no {mosaic.SOURCE}")
    return found


@pytest.fixture(scope="module")
def path(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mosaic") / "mosaic.svs"
    mosaic.write_mosaic(path, SIZE, mpp=0.252, seed=3)
    return path


def test_openslide_reads_the_same_pixels_on_all_levels(path: Path) -> None:
    with openslide.OpenSlide(str(path)) as theirs, open_slide(path) as ours:
        assert (ours.reader, ours.slide_mpp) == ("tiff", (0.252, 0.252))
        assert theirs.level_dimensions == tuple(level.size for level in ours.levels)
        assert theirs.level_downsamples == pytest.approx((1, 4, 16), rel=1e-2)
        assert theirs.properties["openslide.mpp-x"] == "0.252"
        for level, size in enumerate(theirs.level_dimensions):
            pixels = np.asarray(theirs.read_region((0, 0), level, size))[..., :3]
            assert np.array_equal(ours.read_region((0, 0), level, size), pixels)


def test_blocks_are_those_of_the_test_slide_or_mirrored(
    path: Path, source: Path
) -> None:
    with openslide.OpenSlide(str(source)) as slide:
        tissue = np.asarray(slide.read_region((0, 0), 0, slide.dimensions))[..., :3]
    blocks = _blocks(tissue)
    with openslide.OpenSlide(str(path)) as slide:
        tile = np.asarray(slide.read_region((0, 0), 0, SIZE))[..., :3]
    wanted = _blocks(tile)
    wanted = wanted[wanted.std(axis=(1, 2, 3)) > 25]
    chosen = wanted[:: len(wanted) // 25]
    for block in chosen:
        distances = [
            np.abs(blocks - form).mean(axis=(1, 2, 3)).min()
            for form in (block, block[:, ::-1])
        ]
        assert min(distances) < 1.0
    assert len(chosen) >= 25


def test_the_form_of_the_jpeg_is_that_of_the_test_slide(
    path: Path, source: Path
) -> None:
    with tifffile.TiffFile(path) as file, tifffile.TiffFile(source) as real:
        page, real_page = file.pages.first, real.pages.first
        assert page.photometric == real_page.photometric
        assert page.jpegtables is not None and real_page.jpegtables is not None
        quantisation = page.jpegtables.index(b"\xff\xdb")
        theirs = real_page.jpegtables.index(b"\xff\xdb")
        assert (
            page.jpegtables[quantisation : quantisation + 69]
            == real_page.jpegtables[theirs : theirs + 69]
        )
        rate = sum(real_page.databytecounts) / (2220 * 2967)
        # one draw of six squares has more or less glass than the whole
        assert sum(page.databytecounts) / (3072 * 2304) == pytest.approx(rate, rel=0.5)


def test_a_lower_level_has_the_means_of_level_0(path: Path) -> None:
    with openslide.OpenSlide(str(path)) as slide:
        fine = np.asarray(slide.read_region((0, 0), 0, (2048, 2048)))[..., :3]
        for level, downsample in ((1, 4), (2, 16)):
            edge = 2048 // downsample
            means = fine.reshape(edge, downsample, edge, downsample, 3).mean((1, 3))
            coarse = np.asarray(slide.read_region((0, 0), level, (edge, edge)))
            # beside the loss of quality 30
            assert np.abs(coarse[..., :3] - means).mean() < 9
            moved = np.roll(means, 1, axis=1)
            assert (
                np.abs(coarse[..., :3] - moved).mean()
                > 1.2 * np.abs(coarse[..., :3] - means).mean()
            )


def test_without_the_test_slide_only_the_generated_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THINSECTION_TEST_SLIDES", str(tmp_path))
    paths = mosaic.write_slides(tmp_path, "a", (700, 500), mpp=0.5)
    assert list(paths) == ["generated"]
    made = mosaic.described(paths, (700, 500))["slides"]
    assert made["real"].startswith("not measured") and paths["generated"].is_file()
    with pytest.raises(FileNotFoundError, match="must have"):
        mosaic.write_mosaic(tmp_path / "b.svs", (700, 500), mpp=0.5)


def _blocks(pixels: np.ndarray) -> np.ndarray:
    """Aligned blocks (N, 8, 8, 3), float32."""
    rows, columns = (length // BLOCK_PX for length in pixels.shape[:2])
    whole = pixels[: rows * BLOCK_PX, : columns * BLOCK_PX].astype(np.float32)
    parts = whole.reshape(rows, BLOCK_PX, columns, BLOCK_PX, 3)
    return parts.swapaxes(1, 2).reshape(-1, BLOCK_PX, BLOCK_PX, 3)
