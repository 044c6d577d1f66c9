"""Meaning of the value of a cell: missing, a class, an event, a number; by general rules.

The rules look at the form of a value; which values are missing is in `files/missing_cells.py`. The
user is shown how a value was read, and changes it by `--read`.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from thinsection.errors import ConfigError, DatasetError
from thinsection.evaluation.cases import listed_names
from thinsection.files.missing_cells import (
    NOT_WORDS,
    is_missing,
    plain_text,
    words_in,
)
from thinsection.types import counted

Meaning = Literal["class", "missing", "event", "censored", "number", "limit", "unclear"]
# text, meaning, and the class or number that the text becomes ('' if missing)
Cell = tuple[str, Meaning, str]
# meanings that `--read` accepts
MEANINGS = ("missing", "class", "number", "event", "censored")
MAX_SHOWN = 12  # different numbers that are shown one by one
_SPACED = re.compile(r"[+-]?\d{1,3}(?:[ '\u2019]\d{3})+(?:[.,]\d+)?")  # 1 234.5
_SPACES = re.compile(r"[ '\u2019]")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
# digits in groups of three, with a decimal point (1,234.5) or a decimal comma (1.234,5)
_GROUPED_DECIMAL_POINT = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_GROUPED_DECIMAL_COMMA = re.compile(r"[+-]?\d{1,3}(?:\.\d{3})+(?:,\d+)?")
_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+(?:[eE][+-]?\d+)?")
# 1.234 and 1,234: a decimal sign, or a separator of thousands
_AMBIGUOUS_POINT = re.compile(r"[+-]?[1-9]\d{0,2}\.\d{3}")
_AMBIGUOUS_COMMA = re.compile(r"[+-]?[1-9]\d{0,2},\d{3}")
# a bound on a number, not a number: <5, >= 90, 90+
_BOUND = re.compile(r"(?:[<>≤≥]=?|=[<>])\s*[\d.,\s]+\+?|[\d.,]+\s*\+")
_CODE = re.compile(r"-?(?:7+|8+|9+)|-1")
# an event as a code and a word, as in cBioPortal: 1:DECEASED, 0 (alive)
_CODED_EVENT = re.compile(r"([01])(?:\.0+)?(?:\s*[:=;\-\u2013(.]\s*(.*?)\)?)?")
_NEGATIONS = frozenset(("no", "not", "non", "without", "never", "kein", "keine"))
_DIGITS = re.compile(r"(.*?)((?:(?<!.)-)?\d+(?:\.\d+)?)(.*)", re.DOTALL)
# (?i) stage IIIA, grade iv
_ROMAN = re.compile(r"(.*?)\b([IVX]+)((?:[A-D]\d?)?)\b(.*)", re.DOTALL | re.IGNORECASE)
_ROMAN_NUMBERS = {
    name: number
    for number, name in enumerate(
        ("i", "ii", "iii", "iv", "v", "vi", "vii", "viii", "ix", "x"), start=1
    )
}


_CENSORED_WORDS = words_in(
    """alive living lives live survived survives surviving survivor survivors censored censor cens
    free lost ongoing false no n f lebt lebend lebendig vivant vivante vivo viva levend"""
)
_EVENT_WORDS = words_in(
    """dead deceased died dies death expired demised fatal event events uncensored recurred
    recurrence recurrent relapse relapsed progressed progression progressive metastasized failure
    failed true yes y t tot verstorben gestorben décédé décédée mort morte muerto muerta fallecido
    fallecida deceduto overleden"""
)
_TRUE = words_in(
    "1 1.0 true yes y t checked positive pos present x ja oui si sí + detected"
)
_FALSE = words_in("0 0.0 false no n f unchecked negative neg absent nein non -") | {
    "not detected"
}


def class_name(text: str) -> str:
    """A label's text; whole numbers without '.0', so that 1 and 1.0 are one class."""
    try:
        number = float(text)
    except ValueError:
        return text
    return str(int(number)) if number.is_integer() else text


def event_of(text: str) -> bool | None:
    """True if a value means that the event happened, False if it means censored, else None.

    Accepts 1 and 0, words in any capitals, and cBioPortal's '1:DECEASED' if its word does not
    contradict the number.
    """
    plain = plain_text(text).casefold()
    coded = _CODED_EVENT.fullmatch(plain)
    if coded:
        event = coded[1] == "1"
        event_by_words = _event_by_words(coded[2] or "")
        return None if event_by_words not in (None, event) else event
    return _event_by_words(plain)


def _event_by_words(text: str) -> bool | None:
    words = NOT_WORDS.sub(" ", text).split()
    if not words:
        return None
    if words[0] in _NEGATIONS and len(words) > 1:
        inner = _event_by_words(" ".join(words[1:]))
        return None if inner is None else not inner
    if words[-1].endswith("free"):
        return False if not {*words} & {"dead", "deceased", "died"} else None
    is_censored = not _CENSORED_WORDS.isdisjoint(words)
    is_event = not _EVENT_WORDS.isdisjoint(words)
    return None if is_censored == is_event else is_event


def flag_of(text: str) -> bool | None:
    """Whether a label applies: 1 or 0, yes or no, REDCap's Checked, positive; None if unclear."""
    plain = plain_text(text).casefold()
    if plain in _TRUE:
        return True
    return False if plain in _FALSE else None


def is_bound(text: str) -> bool:
    """Tells whether a value is a bound on a number, not a number: '<5', '>= 90', '90+'."""
    return _BOUND.fullmatch(plain_text(text)) is not None


class Numbers:
    """Numbers of one column. All values together decide what a comma means in it."""

    def __init__(self, texts: Iterable[str]):
        """Looks at the values of a column."""
        plain = {_bare(text) for text in texts}
        # some value makes sense only with a decimal comma
        self.sure_decimal_comma = any(
            _DECIMAL_COMMA.fullmatch(text) and not _AMBIGUOUS_COMMA.fullmatch(text)
            for text in plain
        ) or any(
            _GROUPED_DECIMAL_COMMA.fullmatch(text) and "," in text for text in plain
        )
        # some value makes sense only with a decimal point
        self.sure_decimal_point = any(
            _NUMBER.fullmatch(text)
            and "." in text
            and not _AMBIGUOUS_POINT.fullmatch(text)
            for text in plain
        ) or any(
            _GROUPED_DECIMAL_POINT.fullmatch(text) and "." in text for text in plain
        )
        # some value has several commas, which can only separate thousands
        has_groups = any(
            _GROUPED_DECIMAL_POINT.fullmatch(text) and text.count(",") > 1
            for text in plain
        )
        self._commas_are_thousands = has_groups or self.sure_decimal_point

    def read(self, text: str) -> float | None:
        """The number of a value; None if it is no number, or if it may be two numbers."""
        plain = _bare(text)
        if self.sure_decimal_comma and self.sure_decimal_point:
            plain = plain if "," not in plain else ""
        elif self.sure_decimal_comma:
            if _GROUPED_DECIMAL_COMMA.fullmatch(plain):
                plain = plain.replace(".", "")
            plain = plain.replace(",", ".")
        elif _GROUPED_DECIMAL_POINT.fullmatch(plain):
            plain = plain.replace(",", "") if self._commas_are_thousands else ""
        if not _NUMBER.fullmatch(plain):
            return None
        value = float(plain)
        return value if np.isfinite(value) else None

    def reading(self, text: str) -> tuple[Meaning, str]:
        """Meaning of a value, and its number as text with 10 digits ('' if it is no number)."""
        number = self.read(text)
        return ("unclear", "") if number is None else ("number", f"{number:.10g}")

    def fault(self, text: str) -> str:
        """Reason why a value is no number."""
        if is_bound(text):
            return "a limit, and no number"
        if "," in text and any(sign.isdigit() for sign in text):
            return "a comma that may be a decimal one or one between thousands"
        return "no number"


def _bare(text: str) -> str:
    """A value without spaces and apostrophes between thousands, with a plain minus."""
    plain = plain_text(text).replace("\u2212", "-")
    return _SPACES.sub("", plain) if _SPACED.fullmatch(plain) else plain


def is_code(value: float, others: Sequence[float]) -> bool:
    """Tells whether a number may be a code for "no value": 999 among 0 to 14, -1 among ages.

    A code is -1, or has only the digit 7, only 8 or only 9, and it lies far outside of the other
    values. A single 9 is a code only if all other values are whole numbers of at most 4; a single 7
    or 8 is never a code.
    """
    if not others or not value.is_integer() or not _CODE.fullmatch(f"{value:.0f}"):
        return False
    if value < 0:
        return min(others) >= 0
    if value < 10:
        are_whole = all(other.is_integer() for other in others)
        return value == 9 and are_whole and max(others) <= 4
    return value > 2 * max(*others, 1.0) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueReading:
    """Meaning of one value of a column, or of a range of numbers.

    Attributes:
        column: name of the column.
        value: the value as it is written in the table.
        count: number of rows with this value.
        reading: its meaning: class, missing, event, censored, number; for an unusable value limit
            (a bound on a number) or unclear.
        becomes: the class or number that the model is trained on; '' if there is none.
    """

    column: str
    value: str
    count: int
    reading: Meaning
    becomes: str = ""


def parse_overrides(items: Sequence[str]) -> dict[str, str]:
    """Meaning by case-folded value, from texts such as 'NA=class', '2=event' or 'pos=positive'.

    The meaning is one of MEANINGS, or the word or number that replaces the value.

    Raises ConfigError: a text without '='.
    """
    overrides = {}
    for item in items:
        value, sign, reading = item.rpartition("=")
        if not sign:
            raise ConfigError(
                f"read must be VALUE=READING, got {item!r}; READING is one of "
                f"{', '.join(MEANINGS)}, or the word or number to read"
            )
        overrides[plain_text(value).casefold()] = plain_text(reading) or "missing"
    return overrides


class ColumnValues:
    """Values of one column: which are missing, and what replaces the others."""

    def __init__(
        self,
        texts: Iterable[str],
        overrides: Mapping[str, str],
        classes: Sequence[str] = (),
    ):
        """Takes all values of the column, and the overrides of `parse_overrides`.

        A value in `classes`, the classes of a trained model, is a class whatever it looks like.
        """
        self._overrides = {name.casefold(): "class" for name in classes} | {**overrides}
        plain = {plain_text(text) for text in texts}
        # if the column has '+', then '-' is a class and not a missing value
        self._has_plus = any(text and not text.strip("+") for text in plain)

    def value(self, text: str) -> str | None:
        """The value of a cell for training, as text; None if it is missing.

        If an override says 'event' the value is '1', and if it says 'censored' it is '0'.
        """
        plain = plain_text(text)
        reading = self._overrides.get(plain.casefold())
        if reading is None:
            is_sign = self._has_plus and plain in ("-", "\u2013", "\u2212")
            return None if not is_sign and is_missing(plain) else plain
        if reading == "missing":
            return None
        if reading in ("class", "number"):
            return plain
        return {"event": "1", "censored": "0"}.get(reading, reading)


def read_cells(
    texts: Iterable[str],
    values: Iterable[str | None],
    read: Callable[[str], tuple[Meaning, str]],
) -> tuple[Cell, ...]:
    """Meaning of each cell: missing if its value is None, else by `read`."""
    cells: list[Cell] = []
    for text, value in zip(texts, values, strict=True):
        reading: tuple[Meaning, str] = ("missing", "") if value is None else read(value)
        cells.append((text, *reading))
    return tuple(cells)


def shown_readings(column: str, cells: Sequence[Cell]) -> list[ValueReading]:
    """Readings of the different cells of a column, the most frequent first.

    More than MAX_SHOWN different numbers become one reading, from the smallest to the largest.
    """
    counts = Counter(cells)
    numbers = {cell for cell in counts if cell[1] == "number"}
    readings = []
    if len(numbers) > MAX_SHOWN:
        ends = sorted(numbers, key=lambda cell: float(cell[2]))
        readings.append(
            ValueReading(
                column=column,
                value=f"{ends[0][0]} to {ends[-1][0]} ({len(numbers)} values)",
                count=sum(counts[cell] for cell in numbers),
                reading="number",
                becomes=f"{ends[0][2]} to {ends[-1][2]}",
            )
        )
        counts = Counter(
            {cell: count for cell, count in counts.items() if cell not in numbers}
        )
    for (text, meaning, becomes), count in counts.most_common():
        readings.append(
            ValueReading(
                column=column,
                value=text,
                count=count,
                reading=meaning,
                becomes=becomes,
            )
        )
    return readings


def missing_words(
    rows: Sequence[Mapping[str, str]], columns: Sequence[str], names: Sequence[str]
) -> str:
    """A sentence that counts the rows without a value by what they contain, and names the rows."""
    words = Counter(
        row[column] for row in rows for column in columns if is_missing(row[column])
    )
    counts = [f"{word!r} {count}" for word, count in words.most_common() if word]
    written = f" ({', '.join(counts)})" if counts else ""
    return (
        f"no {' or '.join(columns)} in {counted(len(names), 'row')}{written}: "
        f"{listed_names(names)}"
    )


def read_number(text: str, column: str, where: str, *, flag: bool = False) -> float:
    """The number of a cell; for a flag 0 or 1, see `flag_of` and `event_of`.

    Raises DatasetError: the cell has no number, or no finite one.
    """
    if flag:
        value_of_flag = flag_of(text)
        if value_of_flag is None:
            value_of_flag = event_of(text)
        if value_of_flag is None:
            raise DatasetError(f"{column} must be 0 or 1, got {text!r} in {where!r}")
        return float(value_of_flag)
    value = Numbers([text]).read(text)
    if value is None:
        raise DatasetError(f"{column} must be a number, got {text!r} in {where!r}")
    return value


class _NameParts(NamedTuple):
    """Parts of a class name with a number, such as 'stage IIIA'."""

    before: str
    number: float
    after: str


def ordered_classes(names: Collection[str]) -> tuple[str, ...] | None:
    """Class names in ascending order; None if their order is not certain.

    Names are ordered by the number in each name, in digits or Roman: 1, 2; G1, G2; stage II, stage
    IIIA. The text before the number must be the same in all names. If two names have the same
    number, single letters after it must give the order: 2a, 2b.
    """
    parts = {name: _name_parts(name) for name in names}
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


def _name_parts(name: str) -> _NameParts | None:
    """Parts of a class name; None if it has no number."""
    text = name.strip().casefold()
    roman = _ROMAN.fullmatch(text)
    if roman and roman[2] in _ROMAN_NUMBERS:
        return _NameParts(
            roman[1].strip(), _ROMAN_NUMBERS[roman[2]], roman[3] + roman[4]
        )
    digits = _DIGITS.fullmatch(text)
    if digits is None:
        return None
    return _NameParts(digits[1].strip(), float(digits[2]), digits[3].strip())
