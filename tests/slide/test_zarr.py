"""OME-Zarr: against the contract, and what its metadata say."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.zarr_slides import ZarrKind, write_ome

from thinsection.errors import (
    ChannelsError,
    ConfigError,
    SlideOpenError,
    SlideReadError,
    StoreError,
)
from thinsection.slide import open_slide
from thinsection.slide.cohort import load_cohort
from thinsection.slide.look import Look
from thinsection.store.identity import fingerprint, whole_sum
from thinsection.testing.slide_contract import SIZE, SlideContract
from thinsection.testing.synthetic import PyramidKind, position_pixels
from thinsection.types import RgbArray, Size

USUAL = ZarrKind()
KINDS: dict[str, PyramidKind] = {
    "0.5": USUAL,
    "0.4": ZarrKind(version="0.4"),
    "0.5-gzip-chunks-of-rgb": ZarrKind(
        compression="gzip", axes="cyx", channels_in_chunk=3
    ),
    "0.5-blosc-rgb-last": ZarrKind(
        compression="blosc", axes="yxc", channels_in_chunk=3
    ),
    "0.5-uncompressed": ZarrKind(compression=None, tile=(240, 128)),
    "0.5-shards": ZarrKind(shard=2),
    "0.4-rgb-last": ZarrKind(version="0.4", axes="zyxc", channels_in_chunk=3),
    "0.4-nm": ZarrKind(version="0.4", unit="nanometer", um=1e-3, mpp=(0.25, 0.5)),
    "one-chunk": ZarrKind(tile=(512, 1024)),
    "no-mpp": ZarrKind(mpp=None),
    "no-levels": ZarrKind(downsamples=(1,)),
    "gap-in-levels": ZarrKind(downsamples=(1, 2, 4)),
}


class TestZarr(SlideContract):
    reader = "zarr"
    name = "a.ome.zarr"
    kinds = KINDS
    usual = USUAL

    def write(self, path: Path, size: Size, kind: PyramidKind) -> list[RgbArray]:
        assert isinstance(kind, ZarrKind)
        finest = position_pixels(size)
        levels = [
            finest[::down, ::down][: size[1] // down, : size[0] // down]
            for down in kind.downsamples
        ]
        write_ome(path, levels, kind)
        return levels

    def damage(self, path: Path) -> None:
        chunk = path / "0" / "c" / "0" / "0" / "0" / "1" / "2"
        chunk.write_bytes(bytes(chunk.stat().st_size))

    def cut(self, path: Path) -> None:
        """A chunk that is not there is empty, by the format; one that is cut is damage."""
        for chunk in (path / "0" / "c" / "0" / "0" / "0" / "1").iterdir():
            chunk.write_bytes(chunk.read_bytes()[: chunk.stat().st_size // 2])


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_auto_takes_a_folder_by_its_suffix_and_says_so(
    version: str, tmp_path: Path
) -> None:
    pixels = position_pixels(SIZE)
    write_ome(tmp_path / "a.zarr", [pixels], ZarrKind(version=version))
    with open_slide(tmp_path / "a.zarr") as slide:
        assert (slide.reader, slide.choice) == (
            "zarr",
            "zarr: chosen by the suffix of the folder",
        )
        np.testing.assert_array_equal(slide.read_region((0, 0), 0, SIZE), pixels)


@pytest.mark.parametrize("version", ["0.5-dev-spatialdata", "0.5.1"])
def test_a_draft_of_a_version_is_read(version: str, tmp_path: Path) -> None:
    pixels = position_pixels(SIZE)
    write_ome(tmp_path / "a.zarr", [pixels], USUAL)
    description = json.loads((tmp_path / "a.zarr" / "zarr.json").read_text())
    description["attributes"]["ome"]["version"] = version
    (tmp_path / "a.zarr" / "zarr.json").write_text(json.dumps(description))
    with open_slide(tmp_path / "a.zarr") as slide:
        np.testing.assert_array_equal(slide.read_region((0, 0), 0, SIZE), pixels)


def test_an_empty_chunk_has_the_arrays_fill_value(tmp_path: Path) -> None:
    pixels = position_pixels(SIZE)
    write_ome(tmp_path / "a.zarr", [pixels], USUAL)
    (tmp_path / "a.zarr" / "0" / "c" / "0" / "1" / "0" / "0" / "0").unlink()
    pixels[:256, :256, 1] = 0
    with open_slide(tmp_path / "a.zarr") as slide:
        np.testing.assert_array_equal(slide.read_region((0, 0), 0, SIZE), pixels)


def test_the_first_image_of_bioformats2raw_is_the_slide(tmp_path: Path) -> None:
    write_ome(tmp_path / "a.zarr" / "0", [position_pixels(SIZE)], USUAL)
    write_ome(tmp_path / "a.zarr" / "1", [position_pixels((60, 40))], USUAL)
    said = {"ome": {"version": "0.5", "bioformats2raw.layout": 3}}
    group = {"zarr_format": 3, "node_type": "group", "attributes": said}
    (tmp_path / "a.zarr" / "zarr.json").write_text(json.dumps(group))
    with open_slide(tmp_path / "a.zarr") as slide:
        assert slide.size == SIZE


def test_one_channel_of_8_bits_is_grey(tmp_path: Path) -> None:
    pixels = position_pixels(SIZE)[..., :1]
    write_ome(tmp_path / "a.zarr", [pixels], replace(USUAL, axes="yx"))
    with open_slide(tmp_path / "a.zarr") as slide:
        assert "gray" in slide.notes[0]
        found = slide.read_region((0, 0), 0, SIZE)
        np.testing.assert_array_equal(found, np.repeat(pixels, 3, axis=2))


def channels(count: int, dtype: Any) -> np.ndarray:
    y, x = np.mgrid[: SIZE[1], : SIZE[0]]
    return np.stack(
        [(x * (c + 1) + y * 3) % 4000 for c in range(count)], axis=2
    ).astype(dtype)


def named(*names: str | int, colours: tuple[str, ...] = ()) -> dict[str, Any]:
    found: list[dict[str, str | int]] = [{"label": name} for name in names]
    for channel, colour in zip(found, colours):
        channel["color"] = colour
    return {"omero": {"channels": found}}


@pytest.mark.parametrize("kind", ["0.4", "0.5", "0.5-blosc-rgb-last"])
@pytest.mark.parametrize("dtype", ["<u2", ">u2", "<f4"])
def test_channels_are_refused_by_name_and_picked_by_name(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    stored = channels(5, dtype)
    how = KINDS[kind]
    assert isinstance(how, ZarrKind)
    levels = [stored, stored[::4, ::4]]
    write_ome(
        tmp_path / "a.zarr", levels, how, **named("DAPI", "CD3", "CD8", "AF", "PanCK")
    )
    for reader in ("auto", "zarr"):
        with pytest.raises(
            ChannelsError, match=r"5 channels .*DAPI, CD3.*channels=.DAPI,CD3"
        ):
            open_slide(tmp_path / "a.zarr", reader=reader)
    look = Look(channels=("cd8", "0"), percentiles=(1, 99))
    with open_slide(tmp_path / "a.zarr", look=look) as slide:
        for level, values in enumerate(levels):
            found = slide.read_region((0, 0), level, slide.levels[level].size)
            for n, channel in enumerate((2, 0)):
                low, high = np.percentile(stored[..., channel], (1, 99))
                scaled = np.clip(
                    (values[..., channel] - low) * 255 / (high - low), 0, 255
                )
                assert np.abs(found[..., n] - scaled).max() <= 1
            assert not found[..., 2].any()
        assert "CD8" in slide.rendering
    with pytest.raises(ConfigError, match="CD9"):
        open_slide(tmp_path / "a.zarr", look=Look(channels=("CD9",)))


def test_three_channels_that_are_painted_otherwise_are_no_rgb(tmp_path: Path) -> None:
    pixels = position_pixels(SIZE)
    told = named("DAPI", "FITC", "Cy5", colours=("0000FF", "00FF00", "FF0000"))
    write_ome(tmp_path / "a.zarr", [pixels], USUAL, **told)
    with pytest.raises(ChannelsError, match="DAPI, FITC, Cy5"):
        open_slide(tmp_path / "a.zarr")
    told = named("a", "b", "c", colours=("FF0000", "00FF00", "0000FF"))
    write_ome(tmp_path / "b.zarr", [pixels], USUAL, **told)
    with open_slide(tmp_path / "b.zarr") as slide:
        np.testing.assert_array_equal(slide.read_region((0, 0), 0, SIZE), pixels)
    with pytest.raises(SlideOpenError, match="leave out channels="):
        open_slide(tmp_path / "b.zarr", look=Look(channels=("a",)))


def test_channels_may_be_called_by_numbers(tmp_path: Path) -> None:
    told = named(0, 1, 2, colours=("0000FF", "00FF00", "FF0000"))
    write_ome(tmp_path / "a.zarr", [position_pixels(SIZE)], USUAL, **told)
    with pytest.raises(ChannelsError, match=r"\(0, 1, 2\)"):
        open_slide(tmp_path / "a.zarr")


BROKEN: dict[str, tuple[tuple[str | int, ...], Any]] = {
    "version 0.1": (("ome", "version"), "0.1"),
    "no levels": (("ome", "multiscales", 0, "datasets"), []),
    "no such level": (("ome", "multiscales", 0, "datasets", 0, "path"), "9"),
    "a level above the folder": (
        ("ome", "multiscales", 0, "datasets", 0, "path"),
        "../b",
    ),
    "levels that grow": (("ome", "multiscales", 0, "datasets", 1, "path"), "0"),
    "axes of no sense": (("ome", "multiscales", 0, "axes"), [{"name": "x"}] * 5),
    "axes too few": (("ome", "multiscales", 0, "axes"), [{"name": "y"}, {"name": "x"}]),
    "axes no list": (("ome", "multiscales", 0, "axes"), 7),
    "a scale of words": (
        ("ome", "multiscales", 0, "coordinateTransformations"),
        [{"type": "scale", "scale": "many"}],
    ),
    "multiscales no list": (("ome", "multiscales"), {"a": 1}),
    "a plate": (("ome", "plate"), {}),
    "nothing": (("ome",), {}),
    "omero no table": (("ome", "omero"), [1]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_damaged_metadata_are_an_open_error_that_names_the_slide(
    name: str, tmp_path: Path
) -> None:
    pixels = position_pixels(SIZE)
    write_ome(tmp_path / "a.zarr", [pixels, pixels[::4, ::4]], USUAL)
    path = tmp_path / "a.zarr" / "zarr.json"
    told = json.loads(path.read_text())
    *way, last = BROKEN[name][0]
    at = told["attributes"]
    for key in way:
        at = at[key]
    at[last] = BROKEN[name][1]
    path.write_text(json.dumps(told))
    for reader in ("auto", "zarr"):
        with pytest.raises(SlideOpenError, match=r"a\.zarr"):
            open_slide(tmp_path / "a.zarr", reader=reader)


@pytest.mark.parametrize("array", ["zarr.json", "0/zarr.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "[" * 200_000])
def test_metadata_that_are_no_json_are_an_open_error(
    array: str, text: str, tmp_path: Path
) -> None:
    write_ome(tmp_path / "a.zarr", [position_pixels(SIZE)], USUAL)
    (tmp_path / "a.zarr" / array).write_text(text)
    with pytest.raises(SlideOpenError, match=r"a\.zarr"):
        open_slide(tmp_path / "a.zarr")


def test_a_giant_of_a_few_bytes_opens_no_chunk_that_is_too_large(
    tmp_path: Path,
) -> None:
    write_ome(tmp_path / "a.zarr", [position_pixels(SIZE)], USUAL)
    path = tmp_path / "a.zarr" / "0" / "zarr.json"
    told = json.loads(path.read_text())
    told["shape"] = [1, 3, 1, 1 << 20, 1 << 20]
    told["chunk_grid"]["configuration"]["chunk_shape"] = [1, 3, 1, 1 << 15, 1 << 15]
    path.write_text(json.dumps(told))
    with pytest.raises(
        SlideOpenError, match="chunks must have <= 128 MiB, got 3072 MiB"
    ):
        open_slide(tmp_path / "a.zarr")


@pytest.mark.parametrize(
    ("width", "height"),
    [(1 << 31, 1 << 31), (300, 1 << 31), (1 << 31, 300), (1 << 21, 1 << 21)],
)
def test_a_level_of_declared_px_next_to_a_small_one_is_refused_on_opening(
    tmp_path: Path, width: int, height: int
) -> None:
    pixels = position_pixels((300, 300))
    write_ome(tmp_path / "a.zarr", [pixels, pixels[::2, ::2]], USUAL)
    for level, step in (("0", 1), ("1", 2)):
        path = tmp_path / "a.zarr" / level / "zarr.json"
        told = json.loads(path.read_text())
        told["shape"] = [1, 3, 1, height // step, width // step]
        told["chunk_grid"]["configuration"]["chunk_shape"] = [1, 3, 1, 300, 300]
        path.write_text(json.dumps(told))
    got = f"got {width} x {height} in 'a.zarr'; the file is damaged"
    for reader in ("auto", "zarr"):
        with pytest.raises(SlideOpenError, match=got):
            open_slide(tmp_path / "a.zarr", reader=reader)


def test_a_folder_of_times_or_focal_planes_is_refused(tmp_path: Path) -> None:
    write_ome(tmp_path / "a.zarr", [channels(4, "u1")], replace(USUAL, axes="czyx"))
    path = tmp_path / "a.zarr" / "zarr.json"
    path.write_text(path.read_text().replace('"name": "c"', '"name": "t"'))
    with pytest.raises(ChannelsError, match="got 4 along T; split the file"):
        open_slide(tmp_path / "a.zarr")


def test_a_cohort_takes_the_folder_as_one_slide_and_looks_into_none(
    tmp_path: Path,
) -> None:
    write_ome(tmp_path / "s" / "a.ome.zarr", [position_pixels(SIZE)], USUAL)
    (tmp_path / "s" / "a.ome.zarr" / "inside.svs").touch()
    (tmp_path / "s" / "b.svs").touch()
    found = load_cohort([tmp_path / "s"])
    assert [Path(entry.slide_path).name for entry in found] == ["a.ome.zarr", "b.svs"]
    one = load_cohort([f"{tmp_path}/s/a.ome.zarr/", tmp_path / "s" / "a.ome.zarr"])
    assert [entry.slide_id for entry in one] == ["a.ome"]


def test_the_fingerprint_sees_metadata_names_sizes_and_chunks(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    write_ome(path, [position_pixels(SIZE)], USUAL)
    known, whole = fingerprint(path), whole_sum(path)
    shutil.move(path, tmp_path / "b.zarr")
    path = tmp_path / "b.zarr"
    assert (fingerprint(path), whole_sum(path)) == (known, whole)
    chunks = sorted(p for p in path.rglob("*") if p.is_file() and not p.suffix)
    for changed in (
        path / "zarr.json",
        path / "0" / "zarr.json",
        chunks[0],
        chunks[-1],
    ):
        data = changed.read_bytes()
        changed.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        assert fingerprint(path) != known
        assert whole_sum(path) != whole
        changed.write_bytes(data)
    chunks[3].unlink()
    assert fingerprint(path) != known


def test_by_url_its_px_and_its_identity_are_those_of_the_folder(tmp_path: Path) -> None:
    path, url = tmp_path / "a.zarr", f"file://{tmp_path}/a.zarr"
    write_ome(path, [position_pixels(SIZE)], USUAL)
    assert [entry.slide_id for entry in load_cohort([url])] == ["a"]
    with open_slide(url) as slide, open_slide(path) as local:
        assert slide.reader == "zarr"
        found = slide.read_region((30, 40), 0, (500, 300))
        np.testing.assert_array_equal(found, local.read_region((30, 40), 0, (500, 300)))
    assert (fingerprint(url), whole_sum(url)) == (fingerprint(path), whole_sum(path))
    with pytest.raises(StoreError, match="server must list the files"):
        fingerprint(f"file://{tmp_path}/b.zarr")


def test_a_chunk_of_which_its_head_lies_is_an_error_of_its_region(
    tmp_path: Path,
) -> None:
    write_ome(tmp_path / "a.zarr", [position_pixels(SIZE)], USUAL)
    chunk = tmp_path / "a.zarr" / "0" / "c" / "0" / "0" / "0" / "1" / "1"
    chunk.write_bytes(b"\x28\xb5\x2f\xfd\xe0" + b"\xff" * 60)  # zstd: of 2^64 bytes
    with open_slide(tmp_path / "a.zarr") as slide:
        with pytest.raises((SlideReadError, MemoryError)):
            slide.read_region((300, 300), 0, (100, 100))
        assert slide.read_region((0, 0), 0, (100, 100)).std() > 10
