"""Parts of an Aperio description that a copy keeps: those that are needed to read the pixels."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from thinsection.types import Size

APERIO = "Aperio"  # beginning of a description by Aperio's software
_MAKER = "Aperio Image Library"
# versions 8.0.0 to 12.4.99 of the library; 19.75.04 would be a date
_MAKER_LINE = re.compile(rf"{_MAKER}( v?([89]|1[0-2])\.[0-4]\.\d{{1,2}})?", re.ASCII)
# names of profiles that Aperio's scanners write
_PROFILE_NAMES = (
    r"AT2|AT Turbo|GT450|GT450 DX|CS2|CS|VERSA|ScanScope v1|sRGB|"
    r"IEC 61966-2\.1 Default RGB colour space - sRGB"
)


@dataclass(frozen=True)
class _Number:
    """Form of a number, and the range of values that are possible for its key."""

    form: str
    least: float
    most: float

    def fits(self, text: str) -> bool:
        if not re.fullmatch(self.form, text, re.ASCII):
            return False
        return self.least <= float(text.replace(",", ".")) <= self.most


# Positions, times and counts of the scanner (Left, Exposure Time, ...) are not needed to read the
# pixels, and any number could hide in them, so they are left out.
_NUMBERS = {
    "AppMag": _Number(r"\d{1,3}([.,]\d{1,2})?", 0.1, 200),
    "MPP": _Number(r"\d{0,2}[.,]\d{1,6}|\d{1,2}", 0.01, 50),  # µm/px
    "Gamma": _Number(r"\d([.,]\d{1,3})?", 0.1, 9),
}
_WIDTH_KEYS = ("OriginalWidth",)
_HEIGHT_KEYS = ("OriginalHeight", "Originalheight")
_PROFILE_KEY = "ICC Profile"
# '46000x32914 [0,100 46000x32914] (256x256) -> 387x463 JPEG/RGB Q=30'; only the first part is
# required
_PLACE = r"\[\d{1,7},\d{1,7} \d{1,7}x\d{1,7}\]"
_CODEC = r"(JPEG/RGB|JPEG/YCbCr|JPEG/YCC|J2K/KDU|J2K/YUV16|J2K/RGB|JPEG|LZW|RAW)"
_SIZES_LINE = re.compile(
    rf"(?P<whole>\d{{1,7}}x\d{{1,7}})(?P<place> {_PLACE})?(?P<tile> \(\d{{1,4}}x\d{{1,4}}\))?"
    rf"(?P<reduced> -> \d{{1,7}}x\d{{1,7}})?( -)?(?P<codec> {_CODEC})?(?P<quality> Q=\d{{1,3}})?"
)


@dataclass(frozen=True)
class KnownSizes:
    """Sizes of the image, which its description may contain: (width, height), px."""

    slide: Size
    page: Size
    tile: Size


def kept_description(text: str, sizes: KnownSizes) -> tuple[str, list[str]]:
    """Returns the kept part of an ImageDescription, and a line for each part that is left out.

    Kept of a description by Aperio: the maker, the true sizes of the image, and pairs whose value
    is possible for their key. Of other descriptions nothing is kept.
    """
    text = text.strip("\0 ")
    if not text:
        return "", []
    if not text.startswith(APERIO):
        return "", ["ImageDescription: free text"]
    head, *pairs = text.split("|")
    removed: list[str] = []
    kept_lines = list(_head_lines(head, sizes, removed))
    kept_pairs: dict[str, str] = {}
    for pair in pairs:
        key, separator, value = (part.strip() for part in pair.partition("="))
        fits = _fits(key, value, sizes)
        if fits is None:
            name = key if key and separator else "text"
            removed.append(f"{name} in Aperio's description")
        elif key in kept_pairs:
            if value != kept_pairs[key]:
                removed.append(f"a second {key} in Aperio's description")
        elif not fits:
            removed.append(f"{key} in Aperio's description: its value has another form")
        else:
            kept_pairs[key] = value
    pieces = [f"{key} = {value}" for key, value in kept_pairs.items()]
    return "|".join(["\r\n".join(kept_lines), *pieces]), removed


def _fits(key: str, value: str, sizes: KnownSizes) -> bool | None:
    """Tells whether a value is possible for its key; None if the key is not kept at all."""
    if key in _NUMBERS:
        return _NUMBERS[key].fits(value)
    if key in _WIDTH_KEYS:
        return value == str(sizes.slide[0])
    if key in _HEIGHT_KEYS:
        return value == str(sizes.slide[1])
    if key == _PROFILE_KEY:
        return bool(re.fullmatch(_PROFILE_NAMES, value, re.ASCII))
    return None


def _head_lines(head: str, sizes: KnownSizes, removed: list[str]) -> Iterator[str]:
    """Yields the lines before the pairs: the maker, and the true sizes of the image.

    A slide that was cut out of another slide repeats both lines for that slide; these are left out.
    """
    lines = [line.strip() for line in re.split(r"[\r\n;]+", head)]
    makers = [line for line in lines if _MAKER_LINE.fullmatch(line)]
    yield makers[0] if makers else _MAKER
    others = [line for line in lines if line and not _MAKER_LINE.fullmatch(line)]
    forms = [_SIZES_LINE.fullmatch(line) for line in others]
    if any(form is None for form in forms):
        removed.append("text in the first lines of Aperio's description")
    if makers[1:]:
        removed.append("a second maker in Aperio's description")
    stated = [form for form in forms if form is not None]
    if not stated:
        return
    line = _sizes_line(stated[0], sizes)
    stated_line = re.sub(r" -(?!>)", "", stated[0].group())
    if line != stated_line or stated[1:]:
        removed.append("sizes in Aperio's description that the image does not have")
    yield line


def _sizes_line(stated: re.Match[str], sizes: KnownSizes) -> str:
    """Returns a line of sizes in which the true sizes of the image replace the stated sizes."""
    whole = _size_text(sizes.slide)
    line = whole
    if stated["place"] == f" [0,0 {whole}]":
        line += stated["place"]
    if stated["tile"]:
        line += f" ({_size_text(sizes.tile)})"
    if stated["reduced"]:
        line += f" -> {_size_text(sizes.page)}"
    if stated["codec"]:
        line += stated["codec"]
    quality = stated["quality"]
    if quality and int(quality.removeprefix(" Q=")) <= 100:
        line += quality
    return line


def _size_text(size: Size) -> str:
    return f"{size[0]}x{size[1]}"
