"""Pictures and levels of TIFFs of any order, by the pixels that were put into them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from thinsection.errors import ImageError
from thinsection.slide import open_slide
from thinsection.slide.base import Slide
from thinsection.types import RgbArray, Size

TILE = 128
READERS = ("tiff", "auto")


def tissue(size: Size, seed: int, box: tuple[int, int, int, int]) -> RgbArray:
    """Pink texture in a box (left, top, right, bottom) on glass."""
    rng = np.random.default_rng(seed)
    pixels = np.full((size[1], size[0], 3), 245, np.uint8)
    left, top, right, bottom = box
    rows, columns = bottom - top, right - left
    coarse = rng.normal(0, 1, (rows // 16 + 1, columns // 16 + 1))
    noise = coarse.repeat(16, 0).repeat(16, 1)[:rows, :columns]
    noise = noise + rng.normal(0, 0.4, (rows, columns))
    colours = np.stack([190 + 20 * noise, 90 + 30 * noise, 160 + 20 * noise], -1)
    pixels[top:bottom, left:right] = np.clip(colours, 0, 255)
    return pixels


def reduce(pixels: RgbArray, factor: int) -> RgbArray:
    height, width = pixels.shape[0] // factor, pixels.shape[1] // factor
    blocks = pixels[: height * factor, : width * factor]
    blocks = blocks.reshape(height, factor, width, factor, 3)
    return np.asarray(blocks.mean((1, 3)).round().astype(np.uint8))


def padded(pixels: RgbArray, multiple: int) -> RgbArray:
    height, width = pixels.shape[:2]
    rows, columns = -height % multiple, -width % multiple
    return np.pad(pixels, ((0, rows), (0, columns), (0, 0)), constant_values=255)


def options(mpp: float | None = None, *, tiled: bool = True, **more: Any) -> Any:
    chosen: dict[str, Any] = {
        "photometric": "rgb",
        "compression": "deflate",
        "metadata": None,
    }
    if tiled:
        chosen["tile"] = (TILE, TILE)
    if mpp is not None:
        chosen["resolution"] = (1e4 / mpp, 1e4 / mpp)
        chosen["resolutionunit"] = "CENTIMETER"
    return chosen | more


SLIDE = tissue((900, 700), 0, (100, 120, 500, 560))
OTHER = tissue((900, 700), 7, (480, 60, 880, 400))
MACRO = tissue((300, 128), 9, (20, 20, 200, 100))


def check_levels(slide: Slide, truth: RgbArray, factors: Sequence[int]) -> None:
    """The levels are those reductions of the picture, at the right place."""
    assert slide.size == truth.shape[1::-1]
    assert [round(level.downsample, 1) for level in slide.levels] == list(factors)
    for level, factor in zip(slide.levels, factors):
        expected = reduce(truth, factor)
        pixels = slide.read_region((0, 0), level.index, expected.shape[1::-1])
        np.testing.assert_array_equal(pixels, expected)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("order", [(4, 1, 2), (1, 4, 2), (2, 4, 1)])
@pytest.mark.parametrize("flagged", [True, False])
def test_the_order_of_pages_does_not_matter(
    tmp_path: Path, reader: str, order: tuple[int, ...], flagged: bool
) -> None:
    path = tmp_path / "a.tif"
    with tifffile.TiffWriter(path) as writer:
        for factor in order:
            flag = int(flagged and factor > 1)
            writer.write(
                reduce(SLIDE, factor), subfiletype=flag, **options(0.5 * factor)
            )
    with open_slide(path, reader=reader) as slide:
        check_levels(slide, SLIDE, (1, 2, 4))
        assert slide.slide_mpp == pytest.approx((0.5, 0.5))
        assert slide.notes == ()


@pytest.mark.parametrize("reader", READERS)
def test_two_interleaved_pyramids_are_two_slides(tmp_path: Path, reader: str) -> None:
    path = tmp_path / "a.tif"
    with tifffile.TiffWriter(path) as writer:
        for factor in (1, 2, 4):
            for pixels in (SLIDE, OTHER):
                flag = int(factor > 1)
                writer.write(reduce(pixels, factor), subfiletype=flag, **options())
    for image, truth in ((None, SLIDE), ("1", SLIDE), ("2", OTHER)):
        with open_slide(path, reader=reader, image=image) as slide:
            check_levels(slide, truth, (1, 2, 4))
            assert any("of 2 is shown" in note for note in slide.notes)


@pytest.mark.parametrize("reader", READERS)
def test_reduced_pages_in_tiles_are_levels_of_slides_in_strips(
    tmp_path: Path, reader: str
) -> None:
    path = tmp_path / "a.tif"
    second = tissue((640, 600), 3, (60, 60, 500, 500))
    with tifffile.TiffWriter(path) as file:
        for picture in (second, SLIDE):
            file.write(picture, **options(tiled=False))
        for factor in (2, 4):
            for picture in (second, SLIDE):
                file.write(reduce(picture, factor), **options(subfiletype=1))
        # of the slide's shape, larger than one of its levels
        file.write(reduce(SLIDE, 3), **options(tiled=False))
    with open_slide(path, reader=reader) as slide:
        check_levels(slide, SLIDE, (1, 2, 4))
        roles = [picture.role for picture in slide.pictures]
        assert roles == ["slide", "slide", "thumbnail"]
    with open_slide(path, reader=reader, image=1) as slide:
        check_levels(slide, second, (1, 2, 4))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("where", ["flagged page", "page", "SubIFD"])
def test_a_page_that_shows_something_else_is_no_level(
    tmp_path: Path, reader: str, where: str
) -> None:
    path = tmp_path / "a.tif"
    with tifffile.TiffWriter(path) as writer:
        below = int(where == "SubIFD")
        writer.write(SLIDE, subifds=below, **options())
        flag = int(where != "page")
        writer.write(reduce(OTHER, 2), subfiletype=flag, **options())
    with open_slide(path, reader=reader) as slide:
        check_levels(slide, SLIDE, (1,))
        (note,) = slide.notes
        assert "not shown: 2 (other, 450 x 350 px)" in note
    with open_slide(path, reader=reader, image=2) as slide:
        check_levels(slide, reduce(OTHER, 2), (1,))


@pytest.mark.parametrize("reader", READERS)
def test_padded_levels_lie_where_their_scale_says(tmp_path: Path, reader: str) -> None:
    """Levels of whole tiles; level 3 is half padding."""
    path = tmp_path / "a.tif"
    truth = tissue((1900, 1400), 1, (200, 150, 1500, 1200))
    with tifffile.TiffWriter(path) as writer:
        for factor in (1, 2, 4, 8):
            pixels = padded(reduce(truth, factor), 256)
            flag = int(factor > 1)
            writer.write(
                pixels, subfiletype=flag, **options(0.25 * factor, tile=(256, 256))
            )
    with open_slide(path, reader=reader) as slide:
        assert [level.downsample for level in slide.levels] == pytest.approx(
            [1, 2, 4, 8]
        )
        for level in slide.levels:
            factor = round(level.downsample)
            expected = reduce(truth, factor)[50:140, 30:100]
            origin = (30 * factor, 50 * factor)
            pixels = slide.read_region(origin, level.index, (70, 90))
            np.testing.assert_array_equal(pixels, expected)
            # none reaches beyond what level 0 has
            for side, whole in zip(level.size, slide.size):
                assert side * factor < whole + factor


@pytest.mark.parametrize("reader", READERS)
def test_padding_without_a_stated_scale_is_found_by_the_pixels(
    tmp_path: Path, reader: str
) -> None:
    path = tmp_path / "a.tif"
    truth = tissue((1900, 1400), 1, (200, 150, 1500, 1200))
    with tifffile.TiffWriter(path) as writer:
        writer.write(truth, **options())
        small = padded(reduce(truth, 4), 256)[:384]
        writer.write(small, subfiletype=1, **options())
    with open_slide(path, reader=reader) as slide:
        assert len(slide.levels) == 1
        assert "not shown: 2 (other" in slide.notes[0]


def test_the_slide_ends_where_an_unpadded_level_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    with tifffile.TiffWriter(path) as writer:
        writer.write(padded(SLIDE, TILE), **options(0.5))
        writer.write(reduce(SLIDE, 2), subfiletype=1, **options(1.0))
    with open_slide(path) as slide:
        assert slide.size == (900, 700)
        np.testing.assert_array_equal(slide.read_region((0, 0), 0, (900, 700)), SLIDE)
        beyond = slide.read_region((900, 0), 0, (10, 10))
        assert (beyond == 255).all()


def test_rounded_resolutions_are_no_padding(tmp_path: Path) -> None:
    """0.2528 and 0.5056 µm/px, written with two digits."""
    path = tmp_path / "a.tif"
    truth = tissue((4000, 900), 3, (100, 100, 3900, 800))
    with tifffile.TiffWriter(path) as writer:
        writer.write(truth, **options(0.25))
        writer.write(reduce(truth, 2), subfiletype=1, **options(0.51))
    with open_slide(path) as slide:
        check_levels(slide, truth, (1, 2))
        assert slide.notes == ()


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("more", "role"),
    [
        ({"subfiletype": 4}, "other"),
        ({"description": "Label image"}, "label"),
        ({"description": "macro 600x300"}, "macro"),
        ({"extratags": [(285, "s", 0, "Thumbnail", True)]}, "thumbnail"),
    ],
)
def test_a_first_page_that_says_it_is_no_slide_is_none(
    tmp_path: Path, reader: str, more: Any, role: str
) -> None:
    path = tmp_path / "a.tif"
    flag = more.get("subfiletype", 0)
    with tifffile.TiffWriter(path) as writer:
        first = tissue((1000, 800), 5, (0, 0, 300, 300))
        writer.write(first, **options(**(more | {"subfiletype": 0})))
        for factor in (1, 2):
            writer.write(
                reduce(SLIDE, factor), subfiletype=int(factor > 1), **options()
            )
    with tifffile.TiffFile(path, mode="r+b") as file:
        file.pages.first.tags[254].overwrite(
            flag
        )  # tifffile writes no masks of colours
    with open_slide(path, reader=reader) as slide:
        check_levels(slide, SLIDE, (1, 2))
        assert slide.pictures[0].role == role
    with open_slide(path, reader=reader, image=1) as slide:
        assert slide.size == (1000, 800)


def test_a_file_of_macro_and_label_is_refused_with_its_inventory(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.ome.tif"
    with tifffile.TiffWriter(path, ome=True) as writer:
        for name in ("macro image", "label image"):
            metadata = {"axes": "YXS", "Name": name}
            writer.write(MACRO, **options(metadata=metadata))
    with pytest.raises(ImageError, match="2 'label image' \\(label, 300 x 128 px\\)"):
        open_slide(path)
    with open_slide(path, image="Label image") as slide:
        assert slide.size == (300, 128)


def test_images_of_ome_are_found_by_their_tiff_data_not_by_the_order_of_pages(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.ome.tif"
    areas = {"first": SLIDE, "second": OTHER}
    with tifffile.TiffWriter(path, ome=True) as writer:
        for name, pixels in areas.items():
            metadata = {"axes": "YXS", "Name": name, "PhysicalSizeX": 0.5}
            metadata["PhysicalSizeY"] = 0.25 if name == "second" else 0.5
            writer.write(pixels, **options(metadata=metadata))
    with tifffile.TiffFile(path) as file:
        xml = file.ome_metadata or ""
        swapped = xml.replace('IFD="0"', 'IFD="x"').replace('IFD="1"', 'IFD="0"')
    tifffile.tiffcomment(path, swapped.replace('IFD="x"', 'IFD="1"').encode())
    with open_slide(path) as slide:
        np.testing.assert_array_equal(slide.read_region((0, 0), 0, (900, 700)), OTHER)
        assert slide.slide_mpp == (0.5, 0.5)
        assert "'first'" in slide.notes[0]
    with open_slide(path, image="second") as slide:
        np.testing.assert_array_equal(slide.read_region((0, 0), 0, (900, 700)), SLIDE)
        assert slide.slide_mpp == (0.5, 0.25)
    with pytest.raises(ImageError, match="image must be a picture of the file"):
        open_slide(path, image="third")


def test_planes_of_ome_are_said_and_can_be_chosen(tmp_path: Path) -> None:
    path = tmp_path / "a.ome.tif"
    planes = np.stack([SLIDE, OTHER, 255 - SLIDE])
    metadata = {"axes": "ZYXS", "Name": "stack"}
    with tifffile.TiffWriter(path, ome=True) as writer:
        writer.write(planes, **options(metadata=metadata))
    with open_slide(path) as slide:
        np.testing.assert_array_equal(slide.read_region((0, 0), 0, (900, 700)), SLIDE)
        assert "2 'stack z 1 t 0' (plane" in slide.notes[0]
    with open_slide(path, image=3) as slide:
        pixels = slide.read_region((0, 0), 0, (900, 700))
        np.testing.assert_array_equal(pixels, planes[2])


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("axis", "ZT")
def test_planes_of_grey_ome_stacks_can_be_chosen(
    tmp_path: Path, reader: str, axis: str
) -> None:
    path = tmp_path / "a.ome.tif"
    stack = np.stack([each[..., 0] for each in (SLIDE, OTHER, SLIDE[::-1])])
    with tifffile.TiffWriter(path, ome=True) as file:
        grey = options(photometric="minisblack", metadata={"axes": f"{axis}YX"})
        file.write(stack, **grey, subifds=1)
        grey["metadata"] = None
        file.write(stack[:, ::2, ::2], **grey, subfiletype=1)
    for number in (None, 1, 2, 3):
        with open_slide(path, reader=reader, image=number) as slide:
            roles = [picture.role for picture in slide.pictures]
            assert roles == ["slide", "plane", "plane"]
            assert any("--image chooses" in note for note in slide.notes)
            plane = stack[(number or 1) - 1]
            for level in slide.levels:
                pixels = slide.read_region((0, 0), level.index, level.size)
                expected = plane[:: 1 + level.index, :: 1 + level.index]
                np.testing.assert_array_equal(pixels[..., 0], expected)
            assert len(slide.levels) == 2


@pytest.mark.parametrize("reader", READERS)
def test_samples_that_are_called_signed_are_said(tmp_path: Path, reader: str) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, SLIDE.view(np.int8), **options())
    with open_slide(path, reader=reader) as slide:
        check_levels(slide, SLIDE, (1,))
        assert any("called signed" in note for note in slide.notes)
    tifffile.imwrite(tmp_path / "b.tif", SLIDE, **options())
    with open_slide(tmp_path / "b.tif", reader=reader) as slide:
        assert slide.notes == ()


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("positions", [("0", "1.5"), ("-2", "0.5"), ("3", "0")])
def test_of_focal_planes_of_aperio_the_one_nearest_to_0_is_shown(
    tmp_path: Path, reader: str, positions: tuple[str, str]
) -> None:
    path = tmp_path / "a.svs"
    planes = dict(zip(positions, (SLIDE, OTHER)))
    with tifffile.TiffWriter(path) as writer:
        for position, pixels in planes.items():
            text = "Aperio Image Library v11\r\n900x700|AppMag = 20|MPP = 0.5|"
            for factor in (1, 4):
                description = f"{text}OffsetZ = {position}"
                writer.write(reduce(pixels, factor), **options(description=description))
    nearest = min(planes, key=lambda position: abs(float(position)))
    with open_slide(path, reader=reader) as slide:
        check_levels(slide, planes[nearest], (1, 4))
        assert slide.slide_mpp == (0.5, 0.5)
        assert "plane" in slide.notes[0]


def test_what_the_pixels_said_is_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("thinsection.weights.origin._SETTLED_NS", -1)
    path = tmp_path / "a.tif"
    with tifffile.TiffWriter(path) as writer:
        writer.write(SLIDE, **options())
        for pixels in (reduce(SLIDE, 2), reduce(OTHER, 4)):
            writer.write(pixels, subfiletype=1, **options())
    with open_slide(path) as slide:
        first = (slide.levels, slide.notes)

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("levels are compared again")

    monkeypatch.setattr(
        "thinsection.slide.formats.tiff_reader.judge_levels", fail, raising=True
    )
    with open_slide(path) as slide:
        assert (slide.levels, slide.notes) == first
        assert len(slide.levels) == 2


def scn_image(
    name: str, sizes: Sequence[tuple[Size, int]], view: Sequence[int], power: float
) -> str:
    """One image of Leica's XML; `sizes` are those of its levels, with their pages."""
    width, height = sizes[0][0]
    dimensions = "".join(
        f'<dimension sizeX="{w}" sizeY="{h}" r="{level}" ifd="{page}"/>'
        for level, ((w, h), page) in enumerate(sizes)
    )
    size_x, size_y, offset_x, offset_y = view
    return (
        f'<image name="{name}"><creationDate>2020</creationDate><device model="L"/>'
        f'<pixels sizeX="{width}" sizeY="{height}">{dimensions}</pixels>'
        f'<view sizeX="{size_x}" sizeY="{size_y}" offsetX="{offset_x}" offsetY="{offset_y}"/>'
        f"<scanSettings><objectiveSettings><objective>{power}</objective></objectiveSettings>"
        "<illuminationSettings><numericalAperture>.4</numericalAperture>"
        "<illuminationSource>brightfield</illuminationSource></illuminationSettings>"
        "</scanSettings></image>"
    )


def test_all_areas_of_an_scn_are_shown_and_said(tmp_path: Path) -> None:
    path = tmp_path / "a.scn"
    areas = {"a": (SLIDE, (1_000_000, 1_000_000)), "b": (OTHER, (3_000_000, 2_000_000))}
    images = [scn_image("macro", [((300, 128), 0)], (9_000_000, 9_000_000, 0, 0), 0.6)]
    page = 1
    for name, (pixels, offset) in areas.items():
        height, width = pixels.shape[:2]
        sizes = [((width, height), page), ((width // 4, height // 4), page + 1)]
        view = (width * 500, height * 500, *offset)
        images.append(scn_image(name, sizes, view, 20))
        page += 2
    xml = (
        '<?xml version="1.0"?>'
        '<scn xmlns="http://www.leica-microsystems.com/scn/2010/10/01">'
        '<collection name="c" sizeX="9000000" sizeY="9000000"><barcode>x</barcode>'
        f"{''.join(images)}</collection></scn>"
    )
    jpeg = {"compression": "jpeg", "compressionargs": {"level": 95}}
    with tifffile.TiffWriter(path, bigtiff=True) as writer:
        writer.write(MACRO, **options(description=xml, **jpeg))
        for pixels, _ in areas.values():
            for factor in (1, 4):
                writer.write(reduce(pixels, factor), **options(**jpeg))
    with open_slide(path) as slide:
        assert slide.reader == "openslide"
        (note,) = slide.notes
        assert note.startswith("2 scanned areas are shown")
        assert "900 x 700 px at (2000, 2000), 900 x 700 px at (6000, 4000)" in note
        names = [(picture.role, picture.name) for picture in slide.pictures]
        assert names == [
            ("slide", ""), ("slide", "area 1"), ("slide", "area 2"), ("macro", "macro")
        ]  # fmt: skip
        for pixels, offset in areas.values():
            place = (offset[0] // 500, offset[1] // 500)
            shown = slide.read_region(place, 0, (900, 700)).astype(int)
            assert np.abs(shown - pixels).mean() < 3
    for image, (pixels, _) in zip(("area 1", "3"), areas.values(), strict=True):
        with open_slide(path, image=image) as slide:
            assert slide.size == (900, 700)
            assert [level.size for level in slide.levels] == [(900, 700), (225, 175)]
            for level, factor in enumerate((1, 4)):
                size = slide.levels[level].size
                shown = slide.read_region((0, 0), level, size).astype(int)
                assert np.abs(shown - reduce(pixels, factor)).mean() < 3
            (note,) = slide.notes
            assert "asked for" in note and "not shown: 1 (slide" in note
    with pytest.raises(
        ImageError, match=r"image must be the slide or one of its areas"
    ):
        open_slide(path, image="macro")
    with pytest.raises(ImageError, match=r"choose a number or name"):
        open_slide(path, image="area 3")
