"""Checks of embeddings that were read: finite values, and the file that the ledger lists."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError, StoreError
from thinsection.store.ledger import LEDGER_NAME, SLIDES, load_ledger
from thinsection.types import PlainValues

_SHOWN_ROWS = 3  # in a message


def check_finite(
    values: npt.NDArray[np.floating], path: Path, *, first_row: int = 0
) -> None:
    """Compares embeddings (N, D) with what a number can be.

    Memory: 8 N bytes where a value is not finite.

    Raises:
        InvalidInputError: NaN or infinity; the message names rows of the file.
    """
    # a sum in float32 is quick, but may overflow although every value is finite
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(values.sum(dtype=np.float32)):
            return
        rows = np.flatnonzero(~np.isfinite(values.sum(axis=-1, dtype=np.float64)))
    if len(rows):
        names = ", ".join(str(row + first_row) for row in rows[:_SHOWN_ROWS].tolist())
        more = ", ..." if len(rows) > _SHOWN_ROWS else ""
        raise InvalidInputError(
            f"embeddings must be finite, got NaN or inf in {len(rows)} of {len(values)} rows "
            f"({names}{more}) of {str(path)!r}; compute these again with --precision fp32"
        )


def check_recorded(
    path: Path,
    attributes: PlainValues,
    *,
    num_tiles: int | None = None,
    channels: int | None = None,
) -> None:
    """Compares `GRID/FOLDER/ID.h5` of a results folder with what the ledger of the slide says.

    A file that no ledger lists (of another tool, or copied elsewhere) is not compared.

    Args:
        path: of the file.
        attributes: of the file and its datasets.
        num_tiles: rows of its coordinates; None in a file of a slide embedding.
        channels: of its embeddings; None in a tile table.

    Raises:
        StoreError: the ledger is damaged, or the file has another size, other numbers of
            tiles or channels, or values of another slide.
    """
    place = path.absolute()
    if len(place.parts) < 4:
        return
    out = place.parents[2]
    slide_id = path.stem
    if not (out / SLIDES / slide_id / LEDGER_NAME).is_file():
        return
    ledger = load_ledger(out, slide_id)
    ledger.check()
    grid = place.parts[-3]
    record = ledger.stages.get(f"{grid}/{place.parts[-2]}")
    name = str(place.relative_to(out))
    if record is None or name not in record.files:
        return
    size = path.stat().st_size
    content = "tile table" if channels is None else "embeddings"
    if size != record.files[name]:
        raise StoreError(
            f"{content} must have the {record.files[name]} bytes that were written, got "
            f"{size} in {str(path)!r}; remove the file and run the same command again"
        )
    if num_tiles is not None:
        tiles = ledger.stages.get(f"{grid}/tiles")
        recorded_tiles = None if tiles is None else tiles.facts.get("num_tiles")
        _check_number(num_tiles, recorded_tiles, f"{content} must have", "tiles", path)
    if channels is not None:
        fact = "slide_dim" if num_tiles is None else "dim"
        recorded_channels = record.facts.get(fact)
        _check_number(
            channels, recorded_channels, f"{content} must have", "channels", path
        )
    owner = attributes.get("name") if "thinsection_version" in attributes else None
    if owner is not None and owner != slide_id:
        raise StoreError(
            f"{content} must be of the slide {slide_id!r}, got that of {owner!r} in "
            f"{str(path)!r}; remove the file and run the same command again"
        )


def _check_number(
    number: int, recorded: object, rule: str, unit: str, path: Path
) -> None:
    """Raises StoreError: a number differs from the ledger's, which may know none."""
    if recorded is not None and number != recorded:
        raise StoreError(
            f"{rule} the {recorded} {unit} that were written, got {number} in "
            f"{str(path)!r}; remove the file and run the same command again"
        )
