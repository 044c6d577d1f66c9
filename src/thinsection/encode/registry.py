"""Names of tile encoders: those declared here, then those that other packages bring.

The declarations are data: `encoders_own.toml` and `encoders_timm.toml` beside this file.
"""

import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from thinsection.encode.spec import Architecture, EncoderSpec
from thinsection.errors import UnknownEncoderError
from thinsection.registry import Entry, Registry

DEFAULT_ENCODER = "efficientnet_lite0"
_TABLES = ("encoders_own.toml", "encoders_timm.toml")


@cache
def declared_encoders() -> Mapping[str, EncoderSpec]:
    """Every declared encoder by name."""
    specs = [spec for table in _TABLES for spec in _read_table(table)]
    by_name = {spec.name: spec for spec in specs}
    if len(by_name) != len(specs):
        raise AssertionError("two declarations of an encoder have the same name")
    return MappingProxyType(by_name)


def _read_table(name: str) -> Iterator[EncoderSpec]:
    text = files("thinsection.encode").joinpath(name).read_text(encoding="utf-8")
    for row in tomllib.loads(text)["encoder"]:
        row["architecture"] = Architecture(
            kind=row.pop("kind"), model=row.pop("model"), options=row.pop("options", {})
        )
        if row.get("tile_mpp") == "any":
            row["tile_mpp"] = None
        declared: dict[str, Any] = {
            field: tuple(value) if isinstance(value, list) else value
            for field, value in row.items()
        }
        yield EncoderSpec(**declared)


def _entries() -> Iterator[Entry]:
    for spec in declared_encoders().values():
        at = f" at {spec.tile_mpp:g} µm/px" if spec.tile_mpp else ""
        line = f"{spec.dim}-d, tiles of {spec.tile_px} px{at}; {spec.licence}; {spec.source}"
        yield Entry(name=spec.name, help=line, target=spec, needs=spec.needs, extra="hub")


# ours are specs; another package's is called with device, precision, weights, pretrained and seed,
# by keyword, and gives a TileEncoder
ENCODERS: Registry[Any] = Registry(
    "encoder", "thinsection.encoders", _entries, error=UnknownEncoderError
)


def encoder_spec(name: str) -> EncoderSpec:
    """The declaration of a registry name.

    Raises:
        UnknownEncoderError: not declared; the message names the nearest one.
    """
    specs = declared_encoders()
    if name not in specs:
        raise unknown_encoder(name)
    return specs[name]


def unknown_encoder(name: str) -> UnknownEncoderError:
    """The error for a name that nobody declares."""
    hint = ENCODERS.nearest(name)
    return UnknownEncoderError(
        "encoder must be a declared one, 'timm:<name>', 'hf:<repo>' or a checkpoint's path, "
        f"got {name!r}{hint if 'did you mean' in hint else ''}; 'thinsection models' lists all"
    )
