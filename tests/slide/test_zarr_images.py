"""OME-Zarr of several images: which one is shown, and at which scale its levels are.

The folders are written by zarr-python; the pixels that were put in are the judge.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from tests.slide.planted import tissue

from thinsection import open_slide
from thinsection.errors import ImageError, SlideOpenError
from thinsection.types import RgbArray

ROLES = ("macro", "label", "thumbnail", "")
MPP = 0.5


@dataclass(frozen=True)
class Drawn:
    """One image that was written."""

    pixels: RgbArray
    name: str
    downsamples: tuple[int, ...]


def reduced(pixels: RgbArray, factor: int) -> RgbArray:
    height, width = pixels.shape[0] // factor, pixels.shape[1] // factor
    parts = pixels[: height * factor, : width * factor]
    means = parts.reshape(height, factor, width, factor, 3).mean((1, 3))
    return means.round().astype(np.uint8)


def padded(pixels: RgbArray, right: int, below: int) -> RgbArray:
    return np.pad(pixels, ((0, below), (0, right), (0, 0)), constant_values=255)


def write_arrays(
    group: zarr.Group,
    arrays: list[RgbArray],
    scales: list[float | None],
    *,
    prefix: str = "",
    chunk: int = 64,
) -> dict[str, Any]:
    """Writes arrays (H, W, 3) as c, y, x; returns their entry of `multiscales`."""
    datasets = []
    for index, (pixels, scale) in enumerate(zip(arrays, scales)):
        stored = np.ascontiguousarray(pixels.transpose(2, 0, 1))
        array = group.create_array(
            f"{prefix}{index}", shape=stored.shape, chunks=(3, chunk, chunk), dtype="u1"
        )
        array[:] = stored
        dataset: dict[str, Any] = {"path": f"{prefix}{index}"}
        if scale is not None:
            step = {"type": "scale", "scale": [1, MPP * scale, MPP * scale]}
            dataset["coordinateTransformations"] = [step]
        datasets.append(dataset)
    axes = [{"name": "c", "type": "channel"}]
    axes += [{"name": name, "type": "space", "unit": "micrometer"} for name in "yx"]
    return {"axes": axes, "datasets": datasets}


def say(group: zarr.Group, version: int, **metadata: Any) -> None:
    if version == 3:
        group.attrs["ome"] = {"version": "0.5", **metadata}
    else:
        group.attrs.update(metadata)


def write_one(path: Path, arrays: list[RgbArray], scales: list[float | None]) -> Path:
    group = zarr.create_group(path, zarr_format=2)
    say(group, 2, multiscales=[write_arrays(group, arrays, scales)])
    return path


def draw(rng: np.random.Generator, name: str) -> Drawn:
    size = (int(rng.integers(150, 420)), int(rng.integers(150, 420)))
    return Drawn(
        tissue(size, int(rng.integers(1 << 30))),
        name,
        (1, 2, 4)[: int(rng.integers(1, 4))],
    )


def write_series(
    path: Path, images: list[Drawn], version: int, *, listed: bool
) -> None:
    """Writes images in bioformats2raw's layout, their names in its OME-XML."""
    root = zarr.create_group(path, zarr_format=version)
    say(root, version, **{"bioformats2raw.layout": 3})
    names = [str(place) for place in range(len(images))]
    if listed:
        names = [f"s{place}" for place in names[::-1]]
        say(root.create_group("OME"), version, series=names)
    for name, image in zip(names, images):
        group = root.create_group(name)
        levels = [reduced(image.pixels, down) for down in image.downsamples]
        scales: list[float | None] = [float(down) for down in image.downsamples]
        say(group, version, multiscales=[write_arrays(group, levels, scales)])
    xml = "".join(
        f'<Image ID="Image:{n}" Name="{i.name}"/>' for n, i in enumerate(images)
    )
    (path / "OME").mkdir(exist_ok=True)
    (path / "OME" / "METADATA.ome.xml").write_text(f"<OME>{xml}</OME>")


def write_multiscales(path: Path, images: list[Drawn], version: int) -> None:
    root = zarr.create_group(path, zarr_format=version)
    entries = []
    for number, image in enumerate(images):
        levels = [reduced(image.pixels, down) for down in image.downsamples]
        scales: list[float | None] = [float(down) for down in image.downsamples]
        entry = write_arrays(root, levels, scales, prefix=f"{number}_")
        entries.append({**entry, "name": image.name})
    say(root, version, multiscales=entries)


@pytest.mark.parametrize("seed", range(16))
def test_the_largest_that_is_no_macro_is_shown_and_the_others_are_named(
    tmp_path: Path, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    names = [str(rng.choice(ROLES)) for _ in range(rng.integers(1, 5))]
    names.insert(int(rng.integers(len(names) + 1)), "")
    images = [
        draw(rng, f"{name} image {n}" if name else "") for n, name in enumerate(names)
    ]
    version = int(rng.choice([2, 3]))
    path = tmp_path / "a.zarr"
    if seed % 2:
        write_series(path, images, version, listed=bool(seed % 4 == 1))
    else:
        write_multiscales(path, images, version)
    slides = [image for image in images if not image.name]
    largest = max(slides, key=lambda image: image.pixels.size)
    with open_slide(path) as slide:
        shown = slide.read_region((0, 0), 0, slide.size)
        np.testing.assert_array_equal(shown, largest.pixels)
        assert [level.downsample for level in slide.levels] == list(largest.downsamples)
        for level in slide.levels:
            pixels = slide.read_region((0, 0), level.index, level.size)
            expected = reduced(largest.pixels, int(level.downsample))
            np.testing.assert_array_equal(pixels, expected)
        assert [picture.size for picture in slide.pictures] == [
            image.pixels.shape[1::-1] for image in images
        ]
        others = len(slides) > 1 or images[0] is not largest
        assert any("--image chooses" in note for note in slide.notes) == others
    for number, image in enumerate(images, start=1):
        with open_slide(path, image=number) as slide:
            shown = slide.read_region((0, 0), 0, slide.size)
            np.testing.assert_array_equal(shown, image.pixels)
    with pytest.raises(ImageError, match="choose a number or name of: 1"):
        open_slide(path, image="nothing")


@pytest.mark.parametrize("seed", range(12))
def test_the_same_tissue_lies_at_the_same_place_on_every_padded_level(
    tmp_path: Path, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    pixels = tissue((int(rng.integers(500, 700)), int(rng.integers(400, 600))), seed)
    downsamples = (1, 2, 4)
    levels = [reduced(pixels, down) for down in downsamples]
    # level 0 too may be padded
    pads = [(int(rng.integers(0, 90)), int(rng.integers(0, 90))) for _ in downsamples]
    arrays = [padded(level, *pad) for level, pad in zip(levels, pads)]
    path = write_one(tmp_path / "a.zarr", arrays, [float(down) for down in downsamples])
    with open_slide(path) as slide:
        assert [level.downsample for level in slide.levels] == list(downsamples)
        for level, expected in zip(slide.levels, levels):
            height, width = expected.shape[:2]
            shown = slide.read_region((0, 0), level.index, (width, height))
            np.testing.assert_array_equal(shown, expected)
        # no level shows more of the padding than the one that has least of it
        ends = [(a.shape[1] * d, a.shape[0] * d) for a, d in zip(arrays, downsamples)]
        for axis in (0, 1):
            least = min(end[axis] for end in ends)
            for level in slide.levels:
                end = level.size[axis] * level.downsample
                assert end <= least + 2 * level.downsample
        if max(max(pad) for pad in pads) > 8:
            assert any("padding" in note for note in slide.notes)


def test_a_scale_that_pixels_contradict_gives_way_to_the_size(tmp_path: Path) -> None:
    pixels = tissue((640, 480), 5)
    levels = [reduced(pixels, down) for down in (1, 2, 4)]
    for scales in ([1.0, 2.0, 3.0], [1.0, 1.0, 1.0], [1.0, 2.5, 7.0], [1.0, None, 4.0]):
        path = write_one(tmp_path / f"{scales}.zarr", levels, scales)
        with open_slide(path) as slide:
            assert [level.downsample for level in slide.levels] == [1, 2, 4]
            assert slide.size == (640, 480)
            wrong = None not in scales
            assert (
                any("by its size it counts as" in note for note in slide.notes) == wrong
            )


def test_a_level_that_shows_something_else_or_lies_elsewhere_is_left_out(
    tmp_path: Path,
) -> None:
    pixels = tissue((640, 480), 5)
    other = tissue((320, 240), 99)
    path = write_one(
        tmp_path / "a.zarr", [pixels, other, reduced(pixels, 4)], [1.0, 2.0, 4.0]
    )
    with open_slide(path) as slide:
        assert [level.downsample for level in slide.levels] == [1, 4]
        assert (
            "level '1' of 320 x 240 px does not show what level 0 shows"
            in slide.notes[0]
        )
        region = slide.read_region((400, 200), 1, (30, 20))
        np.testing.assert_array_equal(region, reduced(pixels, 4)[50:70, 100:130])
    metadata = tmp_path / "a.zarr" / ".zattrs"
    attributes = json.loads(metadata.read_text())
    for dataset, shift in zip(attributes["multiscales"][0]["datasets"], (0, 0.25, 30)):
        step = {"type": "translation", "translation": [0, shift, shift]}
        dataset["coordinateTransformations"].append(step)
    metadata.write_text(json.dumps(attributes))
    with open_slide(path) as slide:
        assert len(slide.levels) == 1
        assert any("'2'" in note and "translation" in note for note in slide.notes)


def test_levels_may_be_listed_coarsest_first(tmp_path: Path) -> None:
    pixels = tissue((320, 240), 5)
    levels = [reduced(pixels, down) for down in (4, 2, 1)]
    path = write_one(tmp_path / "a.zarr", levels, [4.0, 2.0, 1.0])
    with open_slide(path) as slide:
        assert slide.slide_mpp == (MPP, MPP)
        assert [level.downsample for level in slide.levels] == [1, 2, 4]
        np.testing.assert_array_equal(slide.read_region((0, 0), 0, slide.size), pixels)


@pytest.mark.parametrize("version", [2, 3])
def test_lost_chunks_are_counted(tmp_path: Path, version: int) -> None:
    pixels = tissue((320, 240), 5)
    path = tmp_path / "a.zarr"
    group = zarr.create_group(path, zarr_format=version)
    say(group, version, multiscales=[write_arrays(group, [pixels], [1.0])])
    with open_slide(path) as slide:
        assert slide.notes == ()
    names = ("0.1.2", "0.2.3") if version == 2 else ("c/0/1/2", "c/0/2/3")
    for name in names:
        (path / "0" / name).unlink()
    with open_slide(path) as slide:
        assert slide.notes == (
            "level '0' lacks 2 of 20 chunks; they show the fill value 0",
        )


COLOURS: dict[str, list[Any]] = {
    "hash": ["#FF0000", "#00ff00", "#0000FF"],
    "rgba": ["FF0000FF", "00FF00FF", "0000FFFF"],
    "hash-rgba": ["#ff0000ff", "#00ff00ff", "#0000ffff"],
    "argb": ["FFFF0000", "FF00FF00", "FF0000FF"],
    "0x": ["0xFF0000", "0x00FF00", "0x0000FF"],
    "short": ["#F00", "#0F0", "#00F"],
    "numbers": [0xFF0000, 0x00FF00, 0x0000FF],
    "signed-numbers": [-16776961, 16711935, 65535],
    "none": ["", "", ""],
}


@pytest.mark.parametrize("name", COLOURS)
def test_red_green_and_blue_are_known_in_every_form(tmp_path: Path, name: str) -> None:
    pixels = tissue((160, 120), 5)
    path = tmp_path / "a.zarr"
    group = zarr.create_group(path, zarr_format=2)
    channels = [
        {"label": c, "color": colour} for c, colour in zip("RGB", COLOURS[name])
    ]
    say(
        group,
        2,
        multiscales=[write_arrays(group, [pixels], [1.0])],
        omero={"channels": channels},
    )
    with open_slide(path) as slide:
        np.testing.assert_array_equal(slide.read_region((0, 0), 0, slide.size), pixels)


def test_a_plate_and_a_well_are_refused_by_name(tmp_path: Path) -> None:
    plate = zarr.create_group(tmp_path / "p.zarr", zarr_format=2)
    wells = [{"path": "B/3", "rowIndex": 1, "columnIndex": 2}] * 2
    plate.attrs["plate"] = {"name": "screen 7", "wells": wells}
    with pytest.raises(
        SlideOpenError, match=r"a plate 'screen 7' of 2 wells .*'B/3/0'"
    ):
        open_slide(tmp_path / "p.zarr")
    well = zarr.create_group(tmp_path / "w.zarr", zarr_format=3)
    well.attrs["ome"] = {"version": "0.5", "well": {"images": [{"path": "4"}]}}
    with pytest.raises(SlideOpenError, match=r"a well with 1 images .*'4'"):
        open_slide(tmp_path / "w.zarr")


def test_a_series_that_is_not_there_is_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    write_series(tmp_path / "a.zarr", [draw(rng, ""), draw(rng, "")], 2, listed=True)
    (tmp_path / "a.zarr" / "s0" / ".zgroup").unlink()
    with pytest.raises(SlideOpenError, match="got none at 's0'"):
        open_slide(tmp_path / "a.zarr")
