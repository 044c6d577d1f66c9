"""Two hundred of the mutants of `make fuzz`, and the mutator itself."""

import os
from pathlib import Path

import numpy as np
import pytest
from tests.slide.fuzz import fuzz, write_good
from tests.support.mutants import mutate

from thinsection.testing.synthetic import PyramidKind, write_pyramid

SLIDES = os.environ.get("THINSECTION_TEST_SLIDES")


@pytest.mark.check
@pytest.mark.timeout(900)  # some 220 CPU-s
def test_two_hundred_mutants_end_in_px_or_in_an_error_that_names_them(
    tmp_path: Path,
) -> None:
    real = Path(SLIDES) if SLIDES else None
    wrong, counts = fuzz(range(200), 15, tmp_path, real, ("auto",), run_slides=200)
    assert not wrong, "\n".join(wrong)
    assert sum(n for end, n in counts.items() if end.startswith("auto: px")) > 20
    assert sum(n for end, n in counts.items() if end.startswith("run: failed")) > 60


def test_a_seed_gives_the_same_mutants_and_another_seed_others(tmp_path: Path) -> None:
    write_pyramid(tmp_path / "a.tif", (300, 200), PyramidKind())
    data = (tmp_path / "a.tif").read_bytes()

    def mutants(seed: int) -> list[tuple[bytes, str]]:
        return [mutate(data, np.random.default_rng((seed, n))) for n in range(60)]

    first = mutants(1)
    assert first == mutants(1)
    assert first != mutants(2)
    words = " ".join(how for _, how in first)
    for change in (
        "bits flipped",
        "cut to",
        "a value",
        "type",
        "count",
        "becomes",
        "link",
        "all",
    ):
        assert change in words, change


@pytest.mark.parametrize(
    "data", [b"", b"II", b"II*\0", b"MM\0*" + bytes(12), b"x" * 17]
)
def test_any_bytes_can_be_mutated(data: bytes) -> None:
    for number in range(200):
        changed, how = mutate(data, np.random.default_rng(number))
        assert isinstance(changed, bytes)
        assert isinstance(how, str)


def test_every_good_file_of_the_fuzz_is_read(tmp_path: Path) -> None:
    from tests.slide.fuzz import one

    for path in write_good(tmp_path, Path(SLIDES) if SLIDES else None):
        assert one(path, "auto").startswith("px by"), path.name
