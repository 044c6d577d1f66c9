"""Names of encoders: those declared here, those that other packages bring, and the nearest one."""

import difflib
from collections.abc import Mapping
from functools import cache
from importlib import import_module, metadata
from types import MappingProxyType

from thinsection.encode.spec import EncoderSpec
from thinsection.errors import UnknownEncoderError

DEFAULT_ENCODER = "efficientnet_lite0"
ENTRY_POINT_GROUP = "thinsection.encoders"
# files of `thinsection.encode.families`, each with a tuple SPECS, in the order of `models`
FAMILIES = (
    *("lite0", "mahmood", "paige", "gigapath", "bioptimus", "owkin", "histai", "kaiko", "lunit"),
    "dinov2",
)


@cache
def declared_encoders() -> Mapping[str, EncoderSpec]:
    """Every declared encoder by name."""
    specs = [
        spec
        for family in FAMILIES
        for spec in import_module(f"thinsection.encode.families.{family}").SPECS
    ]
    by_name = {spec.name: spec for spec in specs}
    if len(by_name) != len(specs):
        raise AssertionError("two families declare an encoder of the same name")
    return MappingProxyType(by_name)


def plugin_encoders() -> dict[str, metadata.EntryPoint]:
    """Encoders that installed packages bring under the entry point group, by name."""
    return {point.name: point for point in metadata.entry_points(group=ENTRY_POINT_GROUP)}


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
    known = [*declared_encoders(), *plugin_encoders()]
    key = name.lower().replace("-", "_")
    longer = sorted(k for k in known if key and k.startswith(key))  # uni2 means uni2_h, not uni
    near = longer or difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UnknownEncoderError(
        f"encoder must be a declared one, 'timm:<name>', 'hf:<repo>' or a checkpoint's path, "
        f"got {name!r}; {hint}'thinsection models' lists all"
    )
