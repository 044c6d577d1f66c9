"""Words of a slide's description that are kept: known keys, with values of their form."""

import re
from collections.abc import Iterator

_WHOLE = r"\d{1,7}"
_NUMBER = r"[+-]?(\d{1,6}([.,]\d{1,8})?|[.,]\d{1,8})"
_VERSION = r"v?\d{1,3}(\.\d{1,3}){1,3}"
# names of profiles that Aperio's scanners write
_PROFILE_NAMES = (
    r"AT2|AT Turbo|GT450|GT450 DX|CS2|CS|VERSA|ScanScope v1|sRGB|"
    r"IEC 61966-2\.1 Default RGB colour space - sRGB"
)
_APERIO_VALUES = {
    "AppMag": r"\d{1,3}([.,]\d{1,3})?",
    "MPP": r"\d{0,2}[.,]\d{1,8}|\d{1,2}",
    "StripeWidth": _WHOLE,
    "Left": _NUMBER,
    "Top": _NUMBER,
    "LineAreaXOffset": _NUMBER,
    "LineAreaYOffset": _NUMBER,
    "LineCameraSkew": _NUMBER,
    "OriginalWidth": _WHOLE,
    "OriginalHeight": _WHOLE,
    "Originalheight": _WHOLE,
    "Focus Offset": _NUMBER,
    "DisplayColor": r"\d{1,2}",
    "Gamma": r"\d{1,2}([.,]\d{1,6})?",
    "ICC Profile": _PROFILE_NAMES,
    "Exposure Time": _WHOLE,
    "Exposure Scale": _NUMBER,
    "Total Depth": _NUMBER,
}
APERIO = "Aperio"  # how a description of theirs begins
_MAKER = "Aperio Image Library"
_MAKER_LINE = re.compile(rf"{_MAKER}( {_VERSION})?")
# '46000x32914 [0,100 46000x32914] (256x256) -> 387x463 JPEG/RGB Q=30'; only the first part must be
_PLACE = r"\[\d{1,7},\d{1,7} \d{1,7}x\d{1,7}\]"
_CODEC = r"(JPEG/RGB|JPEG/YCbCr|JPEG/YCC|J2K/KDU|J2K/YUV16|J2K/RGB|JPEG|LZW|RAW)"
_SIZES = re.compile(
    rf"\d{{1,7}}x\d{{1,7}}( {_PLACE})?( \(\d{{1,4}}x\d{{1,4}}\))?"
    rf"( -> \d{{1,7}}x\d{{1,7}})?( -)?( {_CODEC})?( Q=\d{{1,3}})?"
)


def kept_description(text: str) -> tuple[str, list[str]]:
    """Returns what is kept of an ImageDescription, and what is left out, one line each.

    Of Aperio's words the maker, sizes and pairs whose value has the form that its key asks for;
    of any other text nothing.
    """
    text = text.strip("\0 ")
    if not text:
        return "", []
    if not text.startswith(APERIO):
        return "", ["ImageDescription: free text"]
    head, *pairs = text.split("|")
    removed: list[str] = []
    kept_lines = list(_head_lines(head, removed))
    kept_pairs: dict[str, str] = {}
    for pair in pairs:
        key, separator, value = (part.strip() for part in pair.partition("="))
        pattern = _APERIO_VALUES.get(key)
        if pattern is None:
            name = key if key and separator else "text"
            removed.append(f"{name} in Aperio's description")
        elif key in kept_pairs:
            if value != kept_pairs[key]:
                removed.append(f"a second {key} in Aperio's description")
        elif not re.fullmatch(pattern, value, re.ASCII):
            removed.append(f"{key} in Aperio's description: its value has another form")
        else:
            kept_pairs[key] = value
    pieces = [f"{key} = {value}" for key, value in kept_pairs.items()]
    return "|".join(["\r\n".join(kept_lines), *pieces]), removed


def _head_lines(head: str, removed: list[str]) -> Iterator[str]:
    """Yields the lines before the pairs: maker and sizes, twice of a scanned slide that was cut."""
    lines = [line.strip() for line in re.split(r"[\r\n;]+", head)]
    has_maker = False
    for line in lines:
        if _MAKER_LINE.fullmatch(line) and not has_maker:
            has_maker = True
            yield line
            continue
        if not has_maker:
            has_maker = True
            yield _MAKER
        if _SIZES.fullmatch(line):
            yield line
        elif line and not _MAKER_LINE.fullmatch(line):
            removed.append("text in the first lines of Aperio's description")
