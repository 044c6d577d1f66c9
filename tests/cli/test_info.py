"""`thinsection info`: the pictures of a file, and which one is shown."""

import json
from pathlib import Path

import numpy as np
import pytest
import tifffile
from tests.support.shell import thinsection


@pytest.fixture
def glass(tmp_path: Path) -> Path:
    path = tmp_path / "glass.ome.tif"
    with tifffile.TiffWriter(path, ome=True) as writer:
        for name, width in (("macro", 300), ("left", 400), ("right", 500)):
            pixels = np.full((200, width, 3), 200, np.uint8)
            metadata = {"axes": "YXS", "Name": name, "PhysicalSizeX": 0.5}
            metadata["PhysicalSizeY"] = 0.25
            writer.write(pixels, tile=(64, 64), photometric="rgb", metadata=metadata)
    return path


def test_the_list_marks_what_is_shown_and_says_why(glass: Path) -> None:
    ended = thinsection("info", glass)
    assert ended.returncode == 0, ended.stderr
    lines = [" ".join(line.split()) for line in ended.stdout.splitlines()]
    assert "size 500 x 200 px" in lines
    assert "resolution 0.5 x 0.25 µm/px (OME-XML)" in lines
    assert (
        "images 1 macro 'macro': 300 x 200 px, 0.5 x 0.25 µm/px, OME image 1, named 'macro'"
        in lines
    )
    assert "3* slide 'right': 500 x 200 px, 0.5 x 0.25 µm/px, OME image 3" in lines
    assert any(line.startswith("notes image 3 of 3 is shown") for line in lines)


def test_an_image_is_chosen_and_one_that_is_not_there_is_a_failure(
    glass: Path, tmp_path: Path
) -> None:
    ended = thinsection("info", glass, "--image", "left", "--json")
    (slide,) = json.loads(ended.stdout)["slides"]
    shown = [picture["name"] for picture in slide["pictures"] if picture["is_shown"]]
    assert (slide["width"], shown) == (400, ["left"])
    empty = tmp_path / "empty.svs"
    empty.touch()
    ended = thinsection("info", glass, empty, "--image", "4", "--json")
    assert ended.returncode == 3
    failures = json.loads(ended.stdout)["failures"]
    assert [failure["slide_path"] for failure in failures] == [str(glass), str(empty)]
    assert "choose a number or name of: 1 'macro' (macro" in failures[0]["error"]
