"""Units of length: one table for TIFF, OME, ImageJ, OME-Zarr and DICOM."""

import unicodedata

UM_PER_INCH = 25_400.0
# µm per unit, by the names that files use, in lower case and without a plural s
_UM_PER_UNIT: dict[str, float] = {}
for _um, _names in {
    1e6: "m meter metre",
    1e5: "dm decimeter decimetre",
    1e4: "cm centimeter centimetre",
    1e3: "mm millimeter millimetre",
    1.0: "um μm micron micrometer micrometre",
    1e-3: "nm nanometer nanometre",
    1e-4: "å angstrom ångström ångstrom",
    1e-6: "pm picometer picometre",
    UM_PER_INCH: 'in inch inche "',
}.items():
    _UM_PER_UNIT |= dict.fromkeys(_names.split(), _um)
_OF_RESOLUTION_UNIT = {2: UM_PER_INCH, 3: 1e4}  # inch, cm
_HUGE = ("Mm", "Pm")  # megametre and petametre of OME, which are no mm and no pm


def um_per_unit(unit: str | int | None) -> float | None:
    r"""Returns µm per unit of length; None where it is none ('pixel', 'reference frame').

    Args:
        unit: a name in any capitals, its plural, the sign of µ or Å in any of its Unicode forms,
            ImageJ's '\\u00B5m'; or the number of a TIFF's ResolutionUnit.
    """
    if unit is None:
        return None
    if isinstance(unit, int):
        return _OF_RESOLUTION_UNIT.get(unit)
    if unit.strip() in _HUGE:
        return None
    # the micro sign becomes the Greek letter, the ångström sign the letter Å
    name = unicodedata.normalize("NFKC", unit.replace("\\u00B5", "\u00b5"))
    name = name.strip().strip("\0").casefold()
    return _UM_PER_UNIT.get(name) or _UM_PER_UNIT.get(name.removesuffix("s"))
