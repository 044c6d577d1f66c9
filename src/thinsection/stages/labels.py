"""Names of folders and files, made from the settings alone; the disk is not read.

Default settings have the short name that TRIDENT's users know (`256px_0.5mpp`). Each other setting
adds a part, so that two different results never share a name.
"""

import dataclasses
import hashlib
import json
import re
from typing import TYPE_CHECKING

from thinsection.tiles.grid import TilesConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_MAX_PART = 60  # longest part of a name in characters; longer parts become a hash
_NO_ITEMS = "none"
_EXACT = re.compile(r"-?[A-Za-z0-9.]+")
# settings that have a fixed position in a grid's name
_POSITIONED = ("tile_px", "tile_mpp", "overlap", "region_px")


def grid_label(tiles: TilesConfig, mask_label: str) -> str:
    """Folder of a tile grid: '256px_0.5mpp', '512px_native_64px_overlap_qc-auto', ...

    `mask_label` is the label of the tissue mask or of quality control; '' at the defaults.
    """
    mpp = "native" if tiles.mpp is None else f"{slug(tiles.mpp)}mpp"
    overlap = f"{tiles.overlap}px_overlap" if tiles.overlap else ""
    regions = f"{tiles.region_px}px_regions" if tiles.region_px else ""
    others = variant(tiles, leave_out=_POSITIONED)
    return join_label(f"{tiles.tile_px}px", mpp, overlap, regions, others, mask_label)


def join_label(*parts: str) -> str:
    """Joins the non-empty parts by underscores."""
    return "_".join(part for part in parts if part)


def variant(section: "DataclassInstance", *, leave_out: tuple[str, ...] = ()) -> str:
    """The settings of a section that differ from their defaults, as part of a name; '' for none."""
    defaults = type(section)()
    changed: dict[str, object] = {}
    for field in dataclasses.fields(section):
        if field.name in leave_out:
            continue
        value = getattr(section, field.name)
        default = getattr(defaults, field.name)
        if value != default:
            # 1 and 1.0 give the same name
            changed[field.name] = float(value) if isinstance(default, float) else value
    name = join_label(*(f"{key}-{slug(value)}" for key, value in changed.items()))
    if len(name) > _MAX_PART:
        return short_hash(changed)
    for value in changed.values():
        items = value if isinstance(value, tuple | list) else (value,)
        for item in items:
            # another value may have the same slug
            if item == _NO_ITEMS or not _EXACT.fullmatch(str(item)):
                return f"{name}-{short_hash(changed)}"
    return name


def slug(value: object) -> str:
    """A value as part of a file's name: letters, digits, dots, dashes, pluses and underscores."""
    if isinstance(value, tuple | list):
        return "+".join(slug(item) for item in value) or _NO_ITEMS
    # the shortest digits that give the same float: '0.5', '8'
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return re.sub(r"[^\w.+-]+", "-", str(value)).strip("-") or "x"


def short_hash(value: object) -> str:
    """Six hex digits of a plain value."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:6]
