"""Pictures of others: each is fetched at its commit, has one role, and a truth that is drawn."""

import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile
from benchmarks.bench_real_grounds import behind
from benchmarks.peer_programs.tissue_masks import mpp_of
from benchmarks.real_grounds import Ground, fetch, grounds_folder, read_table
from benchmarks.tissue_tools import write_slide
from PIL import Image

# Copies are allowed to use and show pictures; none of these is in the package.
LICENCES = {
    "Apache-2.0",
    "Artistic-2.0",
    "BSD-3-Clause",
    "BSD-3-Clause-Clear",
    "CC-BY-NC-SA-4.0",
    "CC-BY-SA-4.0",
    "MIT",
}
PICTURE = Ground(
    name="drawn",
    repository="someone/slides",
    commit="HEAD",
    path="docs/sheet.png",
    licence="MIT",
    mpp=20.0,
    mpp_from="estimated",
    role="judge",
    box=(10, 20, 110, 80),
    density=0.03,
)


@pytest.fixture
def checkouts(tmp_path: Path) -> Path:
    """A repository of a sheet: glass with two pink squares, and a mask of the left one."""
    work = tmp_path / "work"
    (work / "docs").mkdir(parents=True)
    sheet = np.full((100, 130, 3), 240, np.uint8)
    sheet[40:60, 30:50] = (200, 120, 170)
    sheet[40:60, 80:100] = (200, 120, 170)
    Image.fromarray(sheet).save(work / "docs" / "sheet.png")
    left = np.zeros((100, 130), np.uint8)
    left[40:60, 30:50] = 255
    Image.fromarray(left).save(work / "docs" / "mask.png")
    git = ["git", "-C", str(work), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "pictures"]):
        subprocess.run([*git, *command], check=True)
    work.rename(tmp_path / "someone+slides")
    return tmp_path


def fetched(ground: Ground, checkouts: Path) -> Path:
    folder = checkouts / "out"
    folder.mkdir(exist_ok=True)
    fetch(ground, checkouts, folder)
    return folder


def test_a_density_and_polygons_make_the_truth_of_a_cut_picture(
    checkouts: Path,
) -> None:
    folder = fetched(PICTURE, checkouts)
    assert PICTURE.read(folder).shape == (60, 100, 3)
    both = PICTURE.truth(folder)
    assert both.counted.all()
    assert both.tissue.sum() == pytest.approx(2 * 20 * 20, rel=0.25)
    right = (60, 0, 99, 0, 99, 59, 60, 59)
    left_only = replace(PICTURE, glass=(right,)).truth(folder)
    assert left_only.tissue[:, :60].sum() == both.tissue[:, :60].sum()
    assert not left_only.tissue[:, 60:].any()
    loose = replace(PICTURE, loose=(right,)).truth(folder)
    assert (loose.tissue == both.tissue).all()
    # the tissue within loose tissue counts, the clear spaces do not
    assert (loose.counted[:, 60:99] == both.tissue[:, 60:99]).all()
    inked = replace(PICTURE, ink=((5, 0, 30, 99, 30),)).truth(folder)
    assert 4 * 100 <= (~inked.counted).sum() <= 6 * 100


@pytest.mark.parametrize("brightness", [0.6, 0.8])
def test_the_truth_under_a_dim_lamp_is_relative_to_its_glass(
    checkouts: Path, brightness: float
) -> None:
    folder = fetched(PICTURE, checkouts)
    bright = PICTURE.truth(folder).tissue
    dim = (PICTURE.read(folder) * brightness).astype(np.uint8)
    Image.fromarray(dim).save(folder / "drawn.png")
    assert (PICTURE.truth(folder).tissue == bright).mean() > 0.99


def test_the_mask_of_the_owner_is_the_truth_where_there_is_one(checkouts: Path) -> None:
    box = (10, 20, 110, 80)
    owned = replace(PICTURE, density=0.0, mask_path="docs/mask.png", mask_box=box)
    truth = owned.truth(fetched(owned, checkouts))
    assert truth.tissue.sum() == 20 * 20
    assert truth.tissue[20:40, 20:40].all()


def test_every_picture_has_one_role_a_licence_and_a_truth() -> None:
    table = read_table()
    names = [ground.name for ground in table]
    assert len(set(names)) == len(names)
    assert {ground.licence for ground in table} <= LICENCES
    assert all(len(ground.commit) == 40 for ground in table)
    places: dict[tuple[object, ...], set[str]] = {}
    for ground in table:
        places.setdefault((ground.path, ground.box), set()).add(ground.role)
        if ground.role != "ground":
            assert ground.density or ground.mask_path, ground.name
    assert all(len(roles) == 1 for roles in places.values())
    roles = [ground.role for ground in table]
    assert roles.count("chosen") >= 10
    assert roles.count("judge") >= 15
    assert roles.count("blind") >= 3


@pytest.mark.parametrize(
    ("mpp", "picture_mpp", "size"),
    [(3.0, 8.0, (45, 30)), (8.0, 8.0, (120, 80)), (60.0, 60.0, (120, 80))],
)
def test_other_tools_get_a_picture_that_states_its_resolution(
    tmp_path: Path, mpp: float, picture_mpp: float, size: tuple[int, int]
) -> None:
    rgb = np.full((80, 120, 3), 200, np.uint8)
    rgb[:, 40:] = (200, 120, 170)
    path = tmp_path / f"drawn_{mpp:g}.tif"
    write_slide(path, rgb, mpp)
    with Image.open(path.with_suffix(".png")) as picture:
        assert mpp_of(picture) == pytest.approx(picture_mpp, rel=1e-3)
        assert picture.size == size
        assert picture.getpixel((size[0] - 1, 0)) == (200, 120, 170)
    with tifffile.TiffFile(path) as file:
        page = file.pages[0]
        assert page.shape == (80, 120, 3)
        numerator, denominator = page.tags["XResolution"].value
    # the unit of resolution is a centimetre
    assert 10_000 * denominator / numerator == pytest.approx(mpp, rel=1e-3)


def test_cases_on_which_another_tool_is_better_are_listed() -> None:
    ours = {"blind": {"one": {"8": 0.9, "16": 0.95}, "two": {"60": 0.8}}}
    others = {
        "clam": {"blind": {"one": {"8": 0.904, "16": 0.96}, "two": {"60": 0.7}}},
        "lazyslide": {"blind": {"one": {"8": 0.1, "16": 0.97}, "two": {"60": 0.79}}},
        "missing": {},
    }
    assert behind(ours, others) == [
        {
            "role": "blind",
            "picture": "one",
            "mpp": "16",
            "iou": 0.95,
            "best tool": "lazyslide",
            "its iou": 0.97,
        }
    ]
    assert behind(ours, {"missing": {}}) == []


@pytest.mark.skipif(grounds_folder() is None, reason="no THINSECTION_TEST_GROUNDS")
def test_the_polygons_of_the_table_lie_on_their_pictures() -> None:
    folder = grounds_folder()
    assert folder is not None
    for ground in read_table():
        height, width = ground.read(folder).shape[:2]
        for polygon in (*ground.tissue, *ground.glass, *ground.loose, *ground.unsure):
            assert max(polygon[::2]) <= width + 3, ground.name
            assert max(polygon[1::2]) <= height + 3, ground.name
        if ground.role != "ground":
            share = ground.truth(folder).tissue.mean()
            assert 0.002 < share < 0.9, ground.name
