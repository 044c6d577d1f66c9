"""OME-TIFF: the file's own levels, planes and units win over OpenSlide's generic view."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from thinsection.slide import open_slide
from thinsection.testing.slide_contract import SIZE, crop_on_white, regions
from thinsection.testing.synthetic import position_pixels, reduced_pixels

FINEST = position_pixels(SIZE)
LEVELS = [FINEST, reduced_pixels(FINEST, (SIZE[0] // 2, SIZE[1] // 2), 2)]


def write_ome(
    path: Path, *, planar: bool = False, below: Any = None, **facts: Any
) -> None:
    """A pyramid as QuPath and bfconvert write it: levels are pages below the first."""
    options: dict[str, Any] = {
        "tile": (128, 128),
        "photometric": "rgb",
        "compression": "deflate",
    }
    levels = LEVELS
    if planar:
        levels = [pixels.transpose(2, 0, 1) for pixels in LEVELS]
        options["planarconfig"] = "separate"
    with tifffile.TiffWriter(path, bigtiff=True, ome=True) as writer:
        writer.write(
            levels[0],
            subifds=1,
            metadata={"axes": "CYX" if planar else "YXS", **facts},
            **options,
        )
        writer.write(levels[1], subfiletype=1, **{**options, **(below or {})})
        macro = np.full((90, 256, 3), 7, np.uint8)
        writer.write(
            macro, photometric="rgb", tile=(128, 128), metadata={"Name": "macro"}
        )


def physical(x: float, y: float, unit: str | None) -> dict[str, Any]:
    units = (
        {} if unit is None else {"PhysicalSizeXUnit": unit, "PhysicalSizeYUnit": unit}
    )
    return {"PhysicalSizeX": x, "PhysicalSizeY": y, **units}


@pytest.mark.parametrize(
    ("x", "y", "unit"),
    [
        (0.25, 0.5, None),
        (0.25, 0.5, "µm"),
        (250, 500, "nm"),
        (2.5e-4, 5e-4, "mm"),
        (2500, 5e3, "Å"),
    ],
)
def test_the_resolution_is_read_in_every_unit_of_length(
    tmp_path: Path, x: float, y: float, unit: str | None
) -> None:
    write_ome(tmp_path / "a.ome.tif", **physical(x, y, unit))
    with open_slide(tmp_path / "a.ome.tif") as slide:
        assert slide.slide_mpp == pytest.approx((0.25, 0.5))


@pytest.mark.parametrize("unit", ["pixel", "reference frame"])
def test_units_that_are_no_length_are_no_resolution(tmp_path: Path, unit: str) -> None:
    write_ome(tmp_path / "a.ome.tif", **physical(1, 1, unit))
    with open_slide(tmp_path / "a.ome.tif") as slide:
        assert slide.slide_mpp is None


@pytest.mark.parametrize("planar", [False, True], ids=["RGB", "planes"])
@pytest.mark.parametrize(
    "below", [{}, {"tile": None, "rowsperstrip": 16}], ids=["tiles", "strips"]
)
def test_auto_keeps_levels_and_px_of_the_file(
    tmp_path: Path, planar: bool, below: Any
) -> None:
    write_ome(
        tmp_path / "a.ome.tif", planar=planar, below=below, **physical(0.5, 0.5, "µm")
    )
    with open_slide(tmp_path / "a.ome.tif") as slide:
        assert slide.choice.startswith("tiff: uses the OME metadata")
        assert [level.size for level in slide.levels] == [
            SIZE,
            (SIZE[0] // 2, SIZE[1] // 2),
        ]
        assert (slide.properties["ome.SizeX"], slide.properties["ome.SizeC"]) == (
            "600",
            "3",
        )
        for level, truth in zip(slide.levels, LEVELS):
            for origin, size in regions(slide.size):
                expected = crop_on_white(truth, origin, level.downsample, size)
                pixels = slide.read_region(origin, level.index, size)
                np.testing.assert_array_equal(pixels, expected)


def test_planes_are_read_by_openslide_alike(tmp_path: Path) -> None:
    write_ome(tmp_path / "a.ome.tif", planar=True)
    with (
        open_slide(tmp_path / "a.ome.tif") as slide,
        open_slide(tmp_path / "a.ome.tif", reader="openslide") as reference,
    ):
        assert len(reference.levels) == 1 < len(slide.levels)
        pixels = slide.read_region((0, 0), 0, SIZE)
        np.testing.assert_array_equal(pixels, reference.read_region((0, 0), 0, SIZE))
