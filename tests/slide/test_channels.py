"""Files of many channels or 16 bits: which are refused, what is picked, and how it is scaled."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tifffile

from thinsection.errors import (
    ChannelsError,
    ConfigError,
    SlideOpenError,
    SlideReadError,
)
from thinsection.slide import open_slide
from thinsection.slide.look import Look
from thinsection.slide.resize import read_tiles
from thinsection.tiles.grid import TilesConfig, tile_grid

HEIGHT, WIDTH = 470, 610  # no multiple of the tile
NAMES = ["DAPI", "CD3", "A&F", "CD8"]
Stored = npt.NDArray[Any]


def planes(dtype: Any, count: int = 4) -> Stored:
    """(count, H, W), whose px tell channel and place."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    top = np.iinfo(dtype).max if np.issubdtype(dtype, np.integer) else 1000
    return np.stack([(x * (c + 1) + y * 3) % top for c in range(count)]).astype(dtype)


def write(path: Path, kind: str) -> Stored:
    """Writes a file, and gives its level 0 as (channel, H, W)."""
    tile: dict[str, Any] = {"tile": (128, 256), "photometric": "minisblack"}
    if kind == "ome":
        data, channels = planes(np.uint16), {"Name": NAMES}
        sizes = {"PhysicalSizeX": 0.5, "PhysicalSizeY": 0.5}
        with tifffile.TiffWriter(path, ome=True) as writer:
            told = {"axes": "CYX", "Channel": channels} | sizes
            writer.write(data, subifds=1, compression="zlib", metadata=told, **tile)
            writer.write(data[:, ::2, ::2], subfiletype=1, compression="zlib", **tile)
        return data
    if kind == "rgb16":
        data = planes(np.uint16, 3)
        tifffile.imwrite(
            path, np.moveaxis(data, 0, -1), **(tile | {"photometric": "rgb"})
        )
        return data
    if kind == "five8":
        data = planes(np.uint8, 5)
        tifffile.imwrite(path, np.moveaxis(data, 0, -1), planarconfig="contig", **tile)
        return data
    if kind == "apart":
        data = planes(np.uint16, 5)
        tifffile.imwrite(path, data, planarconfig="separate", **tile)
        return data
    if kind == "float":
        data = planes(np.float32, 1)
        tifffile.imwrite(path, data[0], rowsperstrip=100, photometric="minisblack")
        return data
    data = planes(np.uint8, 4)
    tifffile.imwrite(
        path, data, photometric="minisblack", metadata={"axes": "CYX"}, ome=True
    )
    return data


KINDS = ("ome", "rgb16", "five8", "apart", "float", "ome8")


def scaled(plane: Stored, limits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    low, high = limits
    return np.asarray(
        np.clip((plane.astype(np.float64) - low) * 255 / (high - low), 0, 255)
    )


@pytest.mark.parametrize("reader", ["auto", "tiff", "openslide"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_picture_of_8_bits_is_refused_with_what_it_has(
    kind: str, reader: str, tmp_path: Path
) -> None:
    count = len(write(tmp_path / "a.tif", kind))
    with pytest.raises(
        ChannelsError, match=rf"got {count} channels? of .* in 'a.tif'; choose one"
    ):
        open_slide(tmp_path / "a.tif", reader=reader)


def test_the_refusal_names_bits_and_channels(tmp_path: Path) -> None:
    write(tmp_path / "a.ome.tif", "ome")
    rule = r"4 channels of 16 bits \(DAPI, CD3, A&F, CD8\).*channels=.DAPI,CD3,A&F."
    with pytest.raises(ChannelsError, match=rule):
        open_slide(tmp_path / "a.ome.tif")


@pytest.mark.parametrize("kind", KINDS)
def test_the_picked_channels_are_scaled_between_their_own_percentiles(
    kind: str, tmp_path: Path
) -> None:
    data = write(tmp_path / "a.tif", kind)
    picked = (len(data) - 1, 0)[: len(data)]
    look = Look(channels=tuple(map(str, picked)), percentiles=(2, 90))
    with open_slide(tmp_path / "a.tif", look=look) as slide:
        assert slide.size == (WIDTH, HEIGHT)
        got = slide.read_region((250, 120), 0, (400, 400))
        whole = slide.read_region((0, 0), 0, slide.size)
    for n, channel in enumerate(picked):
        limits = np.percentile(data[channel], (2, 90))
        assert np.abs(whole[..., n] - scaled(data[channel], limits)).max() <= 0.51
        assert f"{limits[0]:g} to {limits[1]:g}" in slide.rendering
    assert (got[:350, :360] == whole[120:, 250:]).all()
    assert (got[350:] == 255).all()
    if len(picked) == 1:
        assert (whole[..., 1] == whole[..., 0]).all()
    else:
        assert (whole[..., 2] == 0).all()


@pytest.mark.parametrize("kind", ["ome", "float"])
def test_tiles_that_cut_segments_are_those_of_the_whole(
    kind: str, tmp_path: Path
) -> None:
    write(tmp_path / "a.tif", kind)
    with open_slide(tmp_path / "a.tif", look=Look(channels=("0",))) as slide:
        whole = slide.read_region((0, 0), 0, slide.size)
        config = TilesConfig(tile_px=90, overlap=20, tile_mpp="native")
        table = tile_grid(slide, config)
        slide.expect(table.coords_l0, table.plan)
        tiles = np.empty((len(table), 90, 90, 3), np.uint8)
        read_tiles(slide, table.plan, table.coords_l0, tiles)
    for (x, y), tile in zip(table.coords_l0.tolist(), tiles):
        assert (tile == whole[y : y + 90, x : x + 90]).all()


def test_lower_levels_are_the_files_own_at_the_same_scale(tmp_path: Path) -> None:
    data = write(tmp_path / "a.ome.tif", "ome")
    with open_slide(tmp_path / "a.ome.tif", look=Look(channels=("cd8",))) as slide:
        assert [level.size for level in slide.levels] == [(610, 470), (305, 235)]
        assert slide.slide_mpp == (0.5, 0.5)
        got = slide.read_region((0, 0), 1, (305, 235))
    limits = np.percentile(data[3], (0.5, 99.5))
    assert np.abs(got[..., 0] - scaled(data[3, ::2, ::2], limits)).max() <= 0.51


@pytest.mark.parametrize(
    ("kind", "picked", "message"),
    [
        (
            "ome",
            "CD4",
            "must be channels of the file, got 'CD4'; it has 4 channels of 16 bits",
        ),
        ("ome", "4", "must be channels of the file, got '4'"),
    ],
)
def test_a_channel_that_is_not_there_is_named_with_those_that_are(
    kind: str, picked: str, message: str, tmp_path: Path
) -> None:
    write(tmp_path / "a.tif", kind)
    with pytest.raises(ConfigError, match=message):
        open_slide(tmp_path / "a.tif", look=Look(channels=(picked,)))


def test_channels_of_a_plain_picture_are_refused(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", planes(np.uint8, 1)[0])
    with pytest.raises(
        SlideOpenError, match=r"no channels to choose.*leave out channels="
    ):
        open_slide(tmp_path / "a.tif", look=Look(channels=("0",)))


def test_a_stack_of_focal_planes_is_refused_by_its_axes(tmp_path: Path) -> None:
    data, path = np.stack([planes(np.uint16, 2)] * 3), tmp_path / "a.ome.tif"
    tifffile.imwrite(path, data, photometric="minisblack", metadata={"axes": "ZCYX"})
    with pytest.raises(
        ChannelsError, match="by channel only, got 2 along C, 3 along Z"
    ):
        open_slide(path)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"channels": ("a", "b", "c", "d")}, "must name at most 3 channels, got 4"),
        ({"percentiles": (99.0, 1.0)}, r"must rise within \[0, 100\], got 99,1"),
        ({"channels": ("a",), "icc": True}, "icc must be off with channels"),
    ],
)
def test_a_look_that_means_nothing_is_refused(
    wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Look(**wrong)


def test_gray_is_read_with_a_word(tmp_path: Path) -> None:
    gray = planes(np.uint8, 1)[0]
    tifffile.imwrite(
        tmp_path / "a.tif", gray, tile=(128, 128), photometric="minisblack"
    )
    with open_slide(tmp_path / "a.tif") as slide:
        assert slide.notes == ("gray: one channel, shown as red, green and blue",)
        assert (slide.read_region((0, 0), 0, slide.size) == gray[..., None]).all()


def test_damage_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    write(tmp_path / "a.tif", "ome")
    with tifffile.TiffFile(tmp_path / "a.tif") as file:
        offset = file.pages[1].dataoffsets[0]
    damaged = bytearray((tmp_path / "a.tif").read_bytes())
    damaged[offset : offset + 40] = b"\0" * 40
    (tmp_path / "a.tif").write_bytes(damaged)
    with pytest.raises(SlideReadError, match=r"segment must be decodable.*'a.tif'"):
        open_slide(tmp_path / "a.tif", look=Look(channels=("1",)))
