"""Order of classes for an ordinal target, read from the number in each class name."""

import re
from collections.abc import Collection
from typing import NamedTuple

_DIGITS = re.compile(r"(.*?)((?:(?<!.)-)?\d+(?:\.\d+)?)(.*)", re.DOTALL)
# (?i) stage IIIA, grade iv
_ROMAN = re.compile(r"(.*?)\b([IVX]+)((?:[A-D]\d?)?)\b(.*)", re.DOTALL | re.IGNORECASE)
_ROMAN_NUMBERS = {
    name: number
    for number, name in enumerate(
        ("i", "ii", "iii", "iv", "v", "vi", "vii", "viii", "ix", "x"), start=1
    )
}


class _Numbered(NamedTuple):
    """A class name in its parts."""

    before: str
    number: float
    after: str


def ordered_classes(names: Collection[str]) -> tuple[str, ...] | None:
    """Class names, the lowest first; None where they have no order that is certain.

    The order is that of the one number in each name, in digits or Roman: 1, 2; G1, G2; stage II,
    stage IIIA. What stands before the number must be the same in all names. One number twice is
    an order only where single letters follow it: 2a, 2b.
    """
    parts = {name: _numbered(name) for name in names}
    numbered = [(part, name) for name, part in parts.items() if part is not None]
    if len(numbered) < len(parts):
        return None
    if len({part.before for part, _ in numbered}) != 1:
        return None
    keys = [(part.number, part.after) for part, _ in numbered]
    is_twice = len({number for number, _ in keys}) < len(keys)
    by_letter = len(set(keys)) == len(keys) and all(len(after) < 2 for _, after in keys)
    if is_twice and not by_letter:
        return None
    numbered.sort(key=lambda pair: (pair[0].number, pair[0].after))
    return tuple(name for _, name in numbered)


def _numbered(name: str) -> _Numbered | None:
    text = name.strip().casefold()
    roman = _ROMAN.fullmatch(text)
    if roman and roman[2] in _ROMAN_NUMBERS:
        return _Numbered(
            roman[1].strip(), _ROMAN_NUMBERS[roman[2]], roman[3] + roman[4]
        )
    digits = _DIGITS.fullmatch(text)
    if digits is None:
        return None
    return _Numbered(digits[1].strip(), float(digits[2]), digits[3].strip())
