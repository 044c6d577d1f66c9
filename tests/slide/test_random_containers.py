"""Random TIFFs of several pictures, judged by the pixels put in and by tifffile's series."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from tests.slide.test_tiff_pictures import options, padded, reduce, tissue

from thinsection.slide import open_slide
from thinsection.slide.base import Slide
from thinsection.types import RgbArray

TILE = 128
MPP = 0.5


@dataclass
class Content:
    """One picture that is put into a file."""

    pixels: RgbArray
    factors: tuple[int, ...]
    name: str = ""
    levels: list[RgbArray] = field(default_factory=list)

    @property
    def size(self) -> tuple[int, int]:
        return (self.pixels.shape[1], self.pixels.shape[0])


def random_contents(rng: np.random.Generator) -> list[Content]:
    """One to five pictures of different areas and texture, with one to three levels."""
    contents = []
    for seed in rng.integers(0, 1 << 30, rng.integers(1, 6)):
        width, height = (int(n) for n in rng.integers(420, 1100, 2))
        left, top = (int(n) for n in rng.integers(10, 80, 2))
        right = int(rng.integers(width // 2, width - 10))
        bottom = int(rng.integers(height // 2, height - 10))
        pixels = tissue((width, height), int(seed), (left, top, right, bottom))
        factors = (1, 2, 4)[: rng.integers(1, 4)]
        contents.append(Content(pixels, factors))
    return contents


def largest_first(contents: list[Content]) -> Content:
    return max(contents, key=lambda content: content.size[0] * content.size[1])


def check_shown(slide: Slide, content: Content) -> None:
    """The slide is this picture, and each level shows the tissue at its place."""
    width, height = content.size
    assert abs(slide.size[0] - width) < TILE and abs(slide.size[1] - height) < TILE
    np.testing.assert_array_equal(
        slide.read_region((0, 0), 0, (width, height)), content.pixels
    )
    for level in slide.levels:
        factor = round(level.downsample)
        assert level.downsample == pytest.approx(factor, rel=0.02)
        small = reduce(content.pixels, factor)
        rows, columns = small.shape[:2]
        y, x = rows // 3, columns // 3
        expected = small[y : y + 60, x : x + 60]
        size = (expected.shape[1], expected.shape[0])
        origin = (round(x * level.downsample), round(y * level.downsample))
        pixels = slide.read_region(origin, level.index, size)
        np.testing.assert_array_equal(pixels, expected)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("reader", ["tiff", "auto"])
def test_pages_in_any_order_with_and_without_padding(
    tmp_path: Path, seed: int, reader: str
) -> None:
    """Flagged levels of several pictures, all pages shuffled; scales are stated."""
    rng = np.random.default_rng(seed)
    contents = random_contents(rng)
    pad = bool(rng.integers(0, 2))
    pages: list[tuple[RgbArray, int]] = []
    for content in contents:
        for factor in content.factors:
            pixels = reduce(content.pixels, factor)
            pages.append((padded(pixels, TILE) if pad else pixels, factor))
    rng.shuffle(pages)  # type: ignore[arg-type]
    path = tmp_path / "a.tif"
    with tifffile.TiffWriter(path, bigtiff=bool(seed % 2)) as writer:
        for pixels, factor in pages:
            flag = int(factor > 1)
            writer.write(pixels, subfiletype=flag, **options(MPP * factor))
    stored = [padded(c.pixels, TILE) if pad else c.pixels for c in contents]
    areas = [pixels.shape[0] * pixels.shape[1] for pixels in stored]
    sizes = {pixels.shape for pixels in stored}
    if areas.count(max(areas)) > 1 or len(sizes) < len(stored):
        pytest.skip("two pictures have one size")
    expected = contents[areas.index(max(areas))]
    with open_slide(path, reader=reader) as slide:
        check_shown(slide, expected)
        assert len(slide.levels) == len(expected.factors)
        assert slide.slide_mpp == pytest.approx((MPP, MPP))
        others = [note for note in slide.notes if "is shown" in note]
        assert bool(others) == (len(contents) > 1)
        numbers = {
            picture.size: picture.number
            for picture in slide.pictures
            if picture.role == "slide"
        }
    for content, pixels in zip(contents, stored):
        number = numbers[pixels.shape[1::-1]]
        with open_slide(path, reader=reader, image=number) as slide:
            check_shown(slide, content)


@pytest.mark.parametrize("seed", range(8))
def test_images_of_ome_are_those_of_tifffile(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    contents = random_contents(rng)
    names = ["macro", "label image", "area", "", "Slide 5"]
    rng.shuffle(names)
    path = tmp_path / "a.ome.tif"
    with tifffile.TiffWriter(path, ome=True) as writer:
        for content, name in zip(contents, names):
            content.name = name
            metadata: dict[str, Any] = {"axes": "YXS", "PhysicalSizeX": MPP}
            metadata |= {"PhysicalSizeY": MPP, "Name": name or "x"}
            below = len(content.factors) - 1
            writer.write(content.pixels, subifds=below, **options(metadata=metadata))
            for factor in content.factors[1:]:
                pixels = reduce(content.pixels, factor)
                writer.write(pixels, subfiletype=1, **options())
    slides = [c for c in contents if c.name not in ("macro", "label image")]
    image = None if slides else "1"
    expected = largest_first(slides) if slides else contents[0]
    with open_slide(path, image=image) as slide:
        check_shown(slide, expected)
        assert len(slide.levels) == len(expected.factors)
        listed = [
            (picture.size, [level.size for level in picture.levels])
            for picture in slide.pictures
        ]
    with tifffile.TiffFile(path) as file:
        series = [
            (one.shape[1::-1], [level.shape[1::-1] for level in one.levels])
            for one in file.series
        ]
    assert listed == series


@pytest.mark.parametrize("seed", range(8))
def test_a_level_that_is_exchanged_for_another_picture_is_left_out(
    tmp_path: Path, seed: int
) -> None:
    rng = np.random.default_rng(200 + seed)
    truth = tissue((1000, 800), seed, (60, 80, 700, 600))
    other = tissue((1000, 800), seed + 50, (250, 200, 950, 750))
    exchanged = int(rng.choice([2, 4]))
    subifds = bool(rng.integers(0, 2))
    path = tmp_path / "a.tif"
    with tifffile.TiffWriter(path) as writer:
        writer.write(truth, subifds=2 if subifds else None, **options())
        for factor in (2, 4):
            pixels = reduce(other if factor == exchanged else truth, factor)
            writer.write(pixels, subfiletype=1, **options())
    with open_slide(path) as slide:
        assert [round(level.downsample) for level in slide.levels] == [
            1,
            6 - exchanged,
        ]
        check_shown(slide, Content(truth, (1,)))
        assert "(other, " in slide.notes[0]
