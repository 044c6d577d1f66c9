"""Readers are declared in one place, and another package's is as good as ours, shell included."""

import re
from pathlib import Path

import numpy as np
import pytest
from tests.support.other_package import in_python, in_shell, install

from thinsection.config import from_mapping
from thinsection.errors import ConfigError
from thinsection.slide import available_readers
from thinsection.slide.cohort import load_cohort
from thinsection.slide.readers import (
    READERS,
    TRIED_ON_ANY_FILE,
    reader_choices,
    slide_suffixes,
)
from thinsection.stages.config import RunConfig
from thinsection.testing.synthetic import he_texture, write_he_slide

ALL = (*TRIED_ON_ANY_FILE, "zarr", "dicom")
TOY_READER = '''
import numpy as np
from thinsection.errors import SlideOpenError
from thinsection.slide import Slide
from thinsection.types import Level


class ToySlide(Slide):
    """Arrays in files called .toy."""

    reader = "toy"
    suffixes = (".toy",)

    def __init__(self, path, *, slide_mpp=None):
        try:
            self._pixels = np.load(path, allow_pickle=False)
        except ValueError as error:
            raise SlideOpenError(f"toy: {error}") from None
        height, width = self._pixels.shape[:2]
        level = Level(index=0, size=(width, height), downsample=1.0)
        super().__init__(path, [level], slide_mpp=slide_mpp or (0.5, 0.5))

    def _fill(self, origin_lv, level, out):
        x, y = origin_lv
        out[:] = self._pixels[y : y + out.shape[0], x : x + out.shape[1]]
'''


@pytest.fixture
def toy(tmp_path: Path) -> dict[str, str]:
    """The environment of a process in which a package with a reader is installed."""
    return install(tmp_path, "toy_reader", TOY_READER, "readers", toy="ToySlide")


def write_toy(path: Path) -> np.ndarray:
    pixels = np.full((300, 420, 3), 245, np.uint8)
    pixels[:260, :300] = he_texture(np.random.default_rng(0))[:260, :300]
    with path.open("wb") as file:
        np.save(file, pixels)
    return pixels


def python(code: str, env: dict[str, str], *arguments: object) -> str:
    done = in_python(env, "-c", code, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_reader_of_ours_says_what_it_is_and_is_called_as_it_says() -> None:
    assert READERS.names() == ALL
    for entry in READERS:
        assert entry.help.endswith(".")
        assert entry.suffixes
        assert all(s == s.lower() and s.startswith(".") for s in entry.suffixes)
        assert set(entry.suffixes) <= set(slide_suffixes())
    assert reader_choices() == ("auto", *ALL)
    assert [status.name for status in available_readers()] == list(ALL)


def test_the_docs_tables_have_a_row_for_every_reader_and_no_other() -> None:
    for name in ("docs/readers.md", "README.md"):
        text = (Path(__file__).parents[2] / name).read_text()
        table = text.split("| reader | opens |")[1].split("\n\n")[0]
        listed = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
        assert sorted({*listed} - {"auto"}) == sorted(ALL), name


def test_settings_take_the_readers_that_are_known_and_no_other() -> None:
    assert (
        from_mapping(RunConfig, {"slides": {"reader": "tiff"}}).slides.reader == "tiff"
    )
    with pytest.raises(
        ConfigError, match=r"slides\.reader must be a known name, got 'tif'; did y"
    ):
        from_mapping(RunConfig, {"slides": {"reader": "tif"}})


def test_folders_are_searched_for_every_suffix_that_some_reader_opens(
    tmp_path: Path,
) -> None:
    for suffix in (*slide_suffixes(), ".txt", ".toy"):
        (tmp_path / f"of{suffix[1:]}{suffix.upper()}").touch()
    found = {Path(entry.slide_path).suffix.lower() for entry in load_cohort([tmp_path])}
    assert found == set(slide_suffixes())


def test_another_packages_reader_opens_its_files_by_name_and_by_auto(
    toy: dict[str, str], tmp_path: Path
) -> None:
    pixels = write_toy(tmp_path / "a.toy")
    code = (
        "import sys, numpy as np; from thinsection.slide import open_slide, available_readers\n"
        "for reader in ('toy', 'auto'):\n"
        "    with open_slide(sys.argv[1], reader=reader) as slide:\n"
        "        print(slide.reader, slide.choice, slide.read_region((5, 7), 0, (40, 30)).sum())\n"
        "print([s.detail for s in available_readers() if s.name == 'toy'])"
    )
    total = pixels[7:37, 5:45].sum()
    assert python(code, toy, tmp_path / "a.toy").splitlines() == [
        f"toy toy: asked for {total}",
        f"toy toy: OpenSlide does not know the format {total}",
        "['Arrays in files called .toy.']",
    ]


def test_auto_says_what_the_other_package_answered(
    toy: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "bad.toy").write_text("no array\n" * 99)
    code = (
        "import sys; from thinsection.slide import open_slide\n"
        "try: open_slide(sys.argv[1])\n"
        "except OSError as error: print(error)"
    )
    said = python(code, toy, tmp_path / "bad.toy")
    assert said.startswith("no reader opens 'bad.toy': tiff: ")
    assert "; toy: " in said


def test_a_package_that_cannot_be_imported_is_named_and_stops_no_slide_of_ours(
    toy: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "site" / "toy_reader.py").write_text("import nosuchthing\n")
    write_toy(tmp_path / "a.toy")
    code = (
        "import sys; from thinsection.slide import open_slide, available_readers\n"
        "print(*[s.detail for s in available_readers() if not s.available and s.name == 'toy'])\n"
        "try: open_slide(sys.argv[1])\n"
        "except OSError as error: print(error)"
    )
    status, opening = python(code, toy, tmp_path / "a.toy").splitlines()
    for said in (status, opening):
        assert "reader 'toy' must be importable" in said
        assert "nosuchthing" in said
        assert "repair or remove the package" in said


def test_a_package_that_cannot_be_imported_leaves_a_folder_of_our_slides_alone(
    toy: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "site" / "toy_reader.py").write_text("import nosuchthing\n")
    (tmp_path / "slides").mkdir()
    write_he_slide(tmp_path / "slides" / "a.svs", (700, 500))
    code = (
        "import sys, thinsection as ts\n"
        "print(ts.run(sys.argv[1], out=sys.argv[2], until='tiles', tile_px=128))"
    )
    assert "1 done" in python(code, toy, tmp_path / "slides", tmp_path / "out")


@pytest.mark.parametrize(
    "arguments", [["--reader", "toy"], []], ids=["by name", "by folder"]
)
def test_the_shell_runs_another_packages_slides(
    toy: dict[str, str], tmp_path: Path, arguments: list[str]
) -> None:
    slides = tmp_path / "slides"
    slides.mkdir()
    write_toy(slides / "a.toy")
    given = slides / "a.toy" if arguments else slides
    options = [
        *arguments,
        "--out",
        tmp_path / "out",
        "--tile-px",
        "64",
        "--device",
        "cpu",
    ]
    done = in_shell(toy, "run", given, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((tmp_path / "out").rglob("*.h5"))


def test_the_shell_answers_an_unknown_reader_with_the_nearest(
    toy: dict[str, str], tmp_path: Path
) -> None:
    write_toy(tmp_path / "a.toy")
    done = in_shell(
        toy, "run", tmp_path / "a.toy", "--reader", "toi", "--out", tmp_path / "out"
    )
    assert done.returncode != 0
    assert "got 'toi'; did you mean 'toy'?" in " ".join(
        (done.stdout + done.stderr).split()
    )
    assert "toy" in in_shell(toy, "doctor").stdout
