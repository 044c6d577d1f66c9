"""A slide encoder refuses tiles that it was not trained on, and says what is unknown."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from thinsection.errors import InvalidInputError
from thinsection.pool import Expects, check_fit, load_slide_encoder

TITAN_LIKE = SimpleNamespace(
    name="t",
    expects=Expects(
        tile_encoders=("conch_v15",), tile_dim=768, tile_px=512, tile_mpp=0.5
    ),
)


def test_fitting_tiles_give_no_warning_whatever_the_spelling() -> None:
    assert check_fit(TITAN_LIKE, "conch_v15", 512, 0.5) == ()  # type: ignore[arg-type]
    assert check_fit(TITAN_LIKE, "CONCH_v1.5", 512, 0.4942) == ()  # type: ignore[arg-type]


def test_another_tile_encoder_is_an_error() -> None:
    with pytest.raises(
        InvalidInputError, match=r"must be conch_v15 .* got 'uni_v2'; embed"
    ):
        check_fit(TITAN_LIKE, "uni_v2", 512, 0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tile_px", "tile_mpp", "message"),
    [
        (
            256,
            0.5,
            r"tile_px must be 512 for slide encoder 't', got 256 in 'a.h5'; embed tiles "
            r"with tile_px=512, or choose another slide encoder$",
        ),
        (
            512,
            0.25,
            r"tile_mpp must be 0.5 for slide encoder 't', got 0.25 in 'a.h5'; embed tiles "
            r"with tile_mpp=0.5, or choose another slide encoder$",
        ),
        (512, 0.56, "got 0.56 in"),
        (512, 0.44, "got 0.44 in"),
        # what is known is checked beside what is not
        (256, None, "got 256 in"),
        (None, 1.0, "got 1 in"),
    ],
)
def test_another_size_and_resolution_are_errors(
    tile_px: int | None, tile_mpp: float | None, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        check_fit(TITAN_LIKE, "conch_v15", tile_px, tile_mpp, file=Path("a.h5"))  # type: ignore[arg-type]


def test_the_tolerance_covers_scanners() -> None:
    assert check_fit(TITAN_LIKE, "conch_v15", 512, 0.46) == ()  # type: ignore[arg-type]
    assert check_fit(TITAN_LIKE, "conch_v15", 512, 0.54) == ()  # type: ignore[arg-type]


def test_what_is_unknown_is_said() -> None:
    warnings = check_fit(TITAN_LIKE, None, None, None)  # type: ignore[arg-type]
    assert len(warnings) == 3
    assert all("unknown" in w for w in warnings)


def test_mean_takes_anything() -> None:
    assert check_fit(load_slide_encoder("mean", device="cpu"), None, None, None) == ()
