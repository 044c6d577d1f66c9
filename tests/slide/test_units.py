"""One table of units: names of every writer, and what is no length."""

import numpy as np
import pytest
import tifffile

from thinsection.slide.geometry import um_per_unit
from thinsection.slide.open import open_slide


@pytest.mark.parametrize(
    ("names", "um"),
    [
        ("µm μm um UM micron Microns micrometer micrometre Micrometers \\u00B5m", 1.0),
        ("mm MM millimeter millimetres", 1e3),
        ("cm centimeter", 1e4),
        ("in inch inches INCH", 25_400.0),
        ("nm nanometre", 1e-3),
        ("Å \u212b A\u030a angstrom ångström", 1e-4),
        ("m meter", 1e6),
    ],
)
def test_names_of_a_unit_are_one_unit(names: str, um: float) -> None:
    assert [um_per_unit(name) for name in names.split()] == [um] * len(names.split())


@pytest.mark.parametrize(
    "name", ["pixel", "pixels", "", "reference frame", "Mm", "s", None, 1]
)
def test_what_is_no_length_has_no_unit(name: str | int | None) -> None:
    assert um_per_unit(name) is None


def test_the_numbers_of_tiff_are_inch_and_centimetre() -> None:
    assert [um_per_unit(2), um_per_unit(3)] == [25_400.0, 1e4]


@pytest.mark.parametrize(("unit", "per_unit"), [("micron", 4.0), ("mm", 4000.0)])
def test_imagej_names_its_unit_in_the_description(tmp_path, unit, per_unit) -> None:
    path = tmp_path / "imagej.tif"
    picture = np.full((64, 96, 3), 200, np.uint8)
    tifffile.imwrite(
        path,
        picture,
        photometric="rgb",
        description=f"ImageJ=1.54f\nunit={unit}\n",
        resolution=(per_unit, per_unit / 2),
        resolutionunit="NONE",
        metadata=None,
    )
    with open_slide(path, reader="tiff") as slide:
        assert slide.slide_mpp == pytest.approx((0.25, 0.5))
