"""A slide that agreed with OpenSlide is not compared again, and a changed file always is."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from thinsection.slide import auto_reader, level_check, open_slide, readers
from thinsection.slide.auto_reader import find_difference
from thinsection.slide.base import Slide
from thinsection.slide.formats.tiff_reader import TiffSlide
from thinsection.slide.level_check import (
    cache_agreement,
    is_cached_agreement,
    slide_stamps,
)
from thinsection.slide.look import Look
from thinsection.testing.synthetic import write_pyramid
from thinsection.types import Mpp
from thinsection.weights import origin

AGREES = "tiff: fastest reader that agrees with OpenSlide"


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Verdicts go into a new folder, and files of the test are old enough."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(origin, "_SETTLED_NS", -1)
    return tmp_path / "cache"


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of the slides that are compared."""
    compared: list[str] = []

    def note(slide: Slide, reference: Slide) -> str:
        compared.append(slide.slide_path)
        return find_difference(slide, reference)

    monkeypatch.setattr(auto_reader, "find_difference", note)
    return compared


@pytest.fixture
def slide_path(tmp_path: Path) -> Path:
    write_pyramid(tmp_path / "a.tif", (1100, 700))
    return tmp_path / "a.tif"


def open_and_sum(path: Path) -> int:
    with open_slide(path) as slide:
        assert slide.choice == AGREES
        return int(slide.read_region((0, 0), 0, slide.size).sum())


def test_the_second_opening_compares_nothing_and_reads_the_same(
    slide_path: Path, comparisons: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_and_sum(slide_path)
    loaded: list[str] = []
    load = readers.load_slide

    def note(name: str, path: str, slide_mpp: Mpp | None, **options: Look) -> Slide:
        loaded.append(name)
        return load(name, path, slide_mpp, **options)

    monkeypatch.setattr("thinsection.slide.auto_reader.load_slide", note)
    monkeypatch.chdir(slide_path.parent)
    assert open_and_sum(Path("a.tif")) == first
    assert comparisons == [str(slide_path)]
    assert loaded == ["tiff"]


def test_a_file_that_was_written_to_is_compared_again(
    slide_path: Path, comparisons: list[str]
) -> None:
    open_and_sum(slide_path)
    before = slide_path.stat()
    with slide_path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    os.utime(slide_path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert slide_path.stat().st_mtime_ns == before.st_mtime_ns
    open_slide(slide_path).close()
    assert len(comparisons) == 2


def test_another_file_in_its_place_is_compared_again(
    slide_path: Path, comparisons: list[str], tmp_path: Path
) -> None:
    open_and_sum(slide_path)
    write_pyramid(tmp_path / "b.tif", (1100, 700))
    (tmp_path / "b.tif").replace(slide_path)
    open_and_sum(slide_path)
    assert len(comparisons) == 2


def test_a_young_file_and_another_resolution_are_compared_again(
    slide_path: Path, comparisons: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin, "_SETTLED_NS", 3_600_000_000_000)
    open_and_sum(slide_path)
    open_and_sum(slide_path)
    assert len(comparisons) == 2
    monkeypatch.setattr(origin, "_SETTLED_NS", -1)
    open_and_sum(slide_path)
    open_slide(slide_path, slide_mpp=(0.3, 0.3)).close()
    assert len(comparisons) == 4


def test_another_version_of_a_package_compares_again(
    slide_path: Path, comparisons: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_and_sum(slide_path)
    monkeypatch.setattr(level_check, "_versions", lambda: ("another",))
    open_and_sum(slide_path)
    assert len(comparisons) == 2


def test_a_slide_that_differs_is_compared_at_each_opening(
    slide_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def differs(slide: Slide, reference: Slide) -> str:
        asked.append(slide)
        return "its pixels differ"

    monkeypatch.setattr(auto_reader, "find_difference", differs)
    for _ in range(2):
        with open_slide(slide_path) as slide:
            assert slide.choice == "openslide: tiff: its pixels differ"
    assert len(asked) == 2


def test_a_damaged_or_closed_cache_only_costs_a_comparison(
    slide_path: Path, comparisons: list[str], cache_folder: Path
) -> None:
    open_and_sum(slide_path)
    shards = list(cache_folder.rglob("*.json"))
    for shard in shards:
        shard.write_text("[1")
    open_and_sum(slide_path)
    assert len(comparisons) == 2
    for shard in shards:
        shard.write_text("[1]")
    open_and_sum(slide_path)
    assert len(comparisons) == 3
    folder = shards[0].parent
    shutil.rmtree(folder)
    folder.write_text("no folder")
    open_and_sum(slide_path)
    open_and_sum(slide_path)
    assert len(comparisons) == 5


def test_a_user_without_a_home_folder_opens_slides(
    slide_path: Path,
    comparisons: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    open_and_sum(slide_path)
    open_and_sum(slide_path)
    assert len(comparisons) == 1  # their cache is in the folder for temporary files


def test_a_file_of_verdicts_keeps_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(level_check, "_SHARDS", 1)
    monkeypatch.setattr(level_check, "_MAX_PER_SHARD", 3)
    paths = [tmp_path / f"{number}.tif" for number in range(5)]
    for path in paths:
        path.write_bytes(b"a")
        cache_agreement(slide_stamps(str(path)), None)
        cache_agreement(slide_stamps(str(path)), None)
    known = [is_cached_agreement(slide_stamps(str(path)), None) for path in paths]
    assert known == [False, False, True, True, True]


def test_segments_of_the_comparison_do_not_stay_in_memory(slide_path: Path) -> None:
    with open_slide(slide_path) as slide:
        assert isinstance(slide, TiffSlide)
        assert not len(slide._cache)
        slide.read_region((10, 10), 0, (50, 50))
        assert len(slide._cache)
