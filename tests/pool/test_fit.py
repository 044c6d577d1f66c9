"""What a slide encoder says of tiles that it was not trained on."""

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


def test_another_size_and_resolution_are_warnings() -> None:
    size, mpp = check_fit(TITAN_LIKE, "conch_v15", 256, 0.25)  # type: ignore[arg-type]
    assert "512 px tiles, got 256 px" in size
    assert "0.5 µm/px, got 0.25 µm/px" in mpp


def test_what_is_unknown_is_said() -> None:
    warnings = check_fit(TITAN_LIKE, None, None, None)  # type: ignore[arg-type]
    assert len(warnings) == 3
    assert all("unknown" in w for w in warnings)


def test_mean_takes_anything() -> None:
    assert check_fit(load_slide_encoder("mean", device="cpu"), None, None, None) == ()
