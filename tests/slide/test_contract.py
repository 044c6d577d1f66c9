"""Every reader against the contract, and all of them against OpenSlide."""

import pytest

from thinsection.testing.slide_contract import KINDS, STRIPED, SlideContract


class TestTiff(SlideContract):
    reader = "tiff"
    kinds = KINDS | STRIPED


class TestOpenSlide(SlideContract):
    reader = "openslide"
    whole_px = False


class TestCucim(SlideContract):
    reader = "cucim"
    reports_damage = False  # it prints to stdout and returns memory that nobody wrote

    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("cucim")


class TestImage(SlideContract):
    """TIFFs of one level; PNG and JPEG have tests of their own."""

    reader = "image"
    usual = STRIPED["strips-jpeg"]
    kinds = STRIPED | {"no-levels": KINDS["no-levels"]}
