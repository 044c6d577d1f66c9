"""Do these tiles fit that slide encoder?"""

import math

from thinsection.errors import InvalidInputError
from thinsection.pool.protocol import SlideEncoder

MPP_TOLERANCE = 0.1  # relative: 0.5 µm/px covers scanners from 0.45 to 0.55


def check_fit(
    slide_encoder: SlideEncoder,
    tile_encoder_name: str | None,
    tile_px: int | None,
    tile_mpp: float | None,
) -> tuple[str, ...]:
    """Warnings, one sentence each, where the tiles differ from what the slide encoder expects.

    Embeddings of a wrong tile encoder mean nothing to a slide encoder: an error. Another tile size
    or resolution shifts its input: a warning. What is not known (None) cannot be checked: a
    warning that says so.

    Raises:
        InvalidInputError: the tile encoder is known and not one that the slide encoder takes.
    """
    wants, name = slide_encoder.expects, slide_encoder.name
    warnings: list[str] = []
    if wants.tile_encoders is not None:
        takes = " or ".join(wants.tile_encoders)
        if tile_encoder_name is None:
            warnings.append(
                f"slide encoder {name!r} takes embeddings of {takes}; theirs is unknown"
            )
        elif _plain(tile_encoder_name) not in {_plain(n) for n in wants.tile_encoders}:
            remedy = f"embed the tiles with {takes}, or choose another slide encoder"
            message = f"tile encoder must be {takes} for slide encoder {name!r}"
            raise InvalidInputError(f"{message}, got {tile_encoder_name!r}; {remedy}")
    if wants.tile_px is not None and tile_px != wants.tile_px:
        got = "an unknown size" if tile_px is None else f"{tile_px} px"
        warnings.append(
            f"slide encoder {name!r} was trained on {wants.tile_px} px tiles, got {got}"
        )
    if wants.tile_mpp is not None and not _close(tile_mpp, wants.tile_mpp):
        got = "an unknown resolution" if tile_mpp is None else f"{tile_mpp:g} µm/px"
        at = f"at {wants.tile_mpp:g} µm/px"
        warnings.append(f"slide encoder {name!r} was trained on tiles {at}, got {got}")
    return tuple(warnings)


def _plain(name: str) -> str:
    """The name as compared: lower case, letters and digits only (CONCH_v1.5 is conch_v15)."""
    return "".join(c for c in name.lower() if c.isalnum())


def _close(tile_mpp: float | None, wanted: float) -> bool:
    return tile_mpp is not None and math.isclose(tile_mpp, wanted, rel_tol=MPP_TOLERANCE)
