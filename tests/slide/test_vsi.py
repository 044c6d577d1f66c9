"""The shell file of an Olympus VSI is refused as such."""

import shutil
from pathlib import Path

import pytest
from tests.conftest import REAL_SLIDES

from thinsection.errors import SlideOpenError
from thinsection.slide import open_slide
from thinsection.testing.synthetic import PyramidKind, write_pyramid


@pytest.mark.parametrize("reader", ["auto", "tiff", "image"])
def test_a_vsi_shell_is_refused_with_the_folder_that_holds_its_pixels(
    tmp_path: Path, reader: str
) -> None:
    write_pyramid(
        tmp_path / "a.tif", (620, 212), PyramidKind(tile=None, downsamples=(1,))
    )
    shell = shutil.copy(tmp_path / "a.tif", tmp_path / "s-1.vsi")
    with pytest.raises(
        SlideOpenError, match=r"VSI.*preview.*'_s-1_', which is not in the same folder"
    ):
        open_slide(shell, reader=reader)
    (tmp_path / "_s-1_").mkdir()
    with pytest.raises(
        SlideOpenError, match=r"'_s-1_', which is in the same folder.*convert it to OME"
    ):
        open_slide(shell, reader=reader)


def test_the_real_shell_is_refused() -> None:
    shell = REAL_SLIDES / "other" / "vsi-shell-only.vsi"
    if not shell.is_file():
        pytest.skip(f"no real VSI shell at {shell}; set THINSECTION_TEST_SLIDES")
    with pytest.raises(SlideOpenError, match="Olympus VSI contains a preview only"):
        open_slide(shell)
