"""What the value of a cell means: missing, a class, an event, a number; by general rules.

A rule decides by the form of a value, not by a list of tables: a value without a letter or digit,
in brackets, or made of words for "no value" is missing. Words that may be a real class ('None' for
no metastasis) are read by the same rules, shown with their reading, and changed by `--read`.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from thinsection.errors import ConfigError, DatasetError
from thinsection.evaluation.cases import listed_names
from thinsection.types import counted

Meaning = Literal["class", "missing", "event", "censored", "number", "limit", "unclear"]
Cell = tuple[str, Meaning, str]  # text, meaning, what it becomes
READINGS = ("missing", "class", "number", "event", "censored")
MOST_SHOWN = 12  # different numbers that are shown one by one
# and pairs of letters between signs: n/a, n.d., k.A.
_LETTERS = frozenset(("n a", "n d", "n k", "k a"))
# and beginnings of words for how a value comes to be known; 'not detected', 'not identified' and
# 'not present' are findings, and 'not given' may be a treatment
_OF_KNOWING = re.compile(
    r"(?:avail|report|appli|evalua|known|determin|record|assess|assay|ascertain|done|perform|test|"
    r"provid|state|specif|collect|document|examin|measur|submit|enter|obtain|sampl|sequenc|asked|"
    r"answer|coded|filled|interpret|calcul|comput|disclos|releas|supplied|defined|listed|noted|"
    r"graded|scored|staged|typed|classif|conclus|verfügbar|bekannt|bestimm|erhoben|untersucht|"
    r"angegeben|dokumentiert|anwendbar|disponible|disponibile|disponível|connu|renseigné|noto|"
    r"bekend|aplica|déterminé)"
)
_PHRASES = frozenset(
    (
        "to be determined",
        "yet to be determined",
        "prefer not to say",
        "do not know",
        "don t know",
        "dont know",
    )
)
_BRACKETED = re.compile(r"\[.*\]|<.*>|\{.*\}|\(.*\)", re.DOTALL)
_SHEET_ERROR = re.compile(r"#[^\W\d_¡]?[^\s]*[!?]|#(?:N/A|NV|N/D|NA)|#[A-Z_]{3,}")
_NOT_WORDS = re.compile(r"[\W_]+")
_SPACED = re.compile(r"[+-]?\d{1,3}(?:[ '\u2019]\d{3})+(?:[.,]\d+)?")  # 1 234.5
_SPACES = re.compile(r"[ '\u2019]")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_POINT_GROUPS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")  # 1,234.5
_COMMA_GROUPS = re.compile(r"[+-]?\d{1,3}(?:\.\d{3})+(?:,\d+)?")  # 1.234,5
_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+(?:[eE][+-]?\d+)?")
_POINT_GROUP = re.compile(r"[+-]?[1-9]\d{0,2}\.\d{3}")  # 1.234: between thousands?
_ONE_GROUP = re.compile(r"[+-]?[1-9]\d{0,2},\d{3}")  # 1.234 or 1234
_LIMIT = re.compile(r"(?:[<>≤≥]=?|=[<>])\s*[\d.,\s]+\+?|[\d.,]+\s*\+")
_CODE = re.compile(r"-?(?:7+|8+|9+)|-1")
_NUMBERED = re.compile(r"([01])(?:\.0+)?(?:\s*[:=;\-\u2013(.]\s*(.*?)\)?)?")
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


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# words that mean "no value" on their own
_NO_VALUE = _words(
    """na nan nat nil null none nul nd nk unk unknown unkn undetermined undefined unspecified
    unavailable unreported undocumented unassessed unassessable unevaluable unobtainable unrecorded
    missing blank empty void pending tbd tba discrepancy discrepant redacted withheld restricted
    declined refused unbekannt fehlend fehlt inconnu inconnue manquant desconocido desconocida
    sconosciuto onbekend desconhecido"""
)
_NEGATIONS_OF_VALUES = _words(
    "no not non cannot unable never without nicht kein keine keinen niet sin sans senza"
)
# what is not there: words for a value
_OF_VALUES = _words(
    """data datum information info value values result results record records answer entry database
    file angabe angaben daten wert datos dato données"""
)
_OTHER_WORDS = _words(
    """or and yet been be is was were the a of to at by in on for from this currently otherwise can
    could allowed required patient status due insufficient prefer say do know don t dont oder und
    noch"""
)


_CENSORED_WORDS = _words(
    """alive living lives live survived survives surviving survivor survivors censored censor cens
    free lost ongoing false no n f lebt lebend lebendig vivant vivante vivo viva levend"""
)
_EVENT_WORDS = _words(
    """dead deceased died dies death expired demised fatal event events uncensored recurred
    recurrence recurrent relapse relapsed progressed progression progressive metastasized failure
    failed true yes y t tot verstorben gestorben décédé décédée mort morte muerto muerta fallecido
    fallecida deceduto overleden"""
)
_TRUE = _words(
    "1 1.0 true yes y t checked positive pos present x ja oui si sí + detected"
)
_FALSE = _words("0 0.0 false no n f unchecked negative neg absent nein non -") | {
    "not detected"
}


def plain_text(text: str) -> str:
    """Returns a text with single spaces, in Unicode's composed form, without invisible signs."""
    visible = (sign for sign in text if unicodedata.category(sign) != "Cf")
    return " ".join(unicodedata.normalize("NFC", "".join(visible)).split())


def is_missing(text: str) -> bool:
    """Tells whether a value looks like no value, see the head of this file."""
    plain = plain_text(text)
    if not any(sign.isalnum() for sign in plain):
        return "+" not in plain
    if _BRACKETED.fullmatch(plain) or _SHEET_ERROR.fullmatch(plain.upper()):
        return True
    words = " ".join(_NOT_WORDS.sub(" ", plain.casefold()).split())
    return words in _LETTERS or words in _PHRASES or _say_no_value(words.split())


def _say_no_value(words: Sequence[str]) -> bool:
    """Tells whether words say that there is no value, and nothing else.

    'not reported or unknown' and 'data unavailable' do; 'unknown primary' has a word more.
    """
    negated = False
    about_value = False
    for word in words:
        if word in _NO_VALUE:
            negated = about_value = True
        elif word in _NEGATIONS_OF_VALUES:
            negated = True
        elif word in _OF_VALUES or _OF_KNOWING.match(word):
            about_value = True
        elif word not in _OTHER_WORDS:
            return False
    return negated and about_value


def class_name(text: str) -> str:
    """A label's text; whole numbers without '.0', so that 1 and 1.0 are one class."""
    try:
        number = float(text)
    except ValueError:
        return text
    return str(int(number)) if number.is_integer() else text


def event_of(text: str) -> bool | None:
    """Whether a value says that the event happened; None where it does not say.

    1 and 0, words in any capitals, and cBioPortal's '1:DECEASED', whose word must agree.
    """
    plain = plain_text(text).casefold()
    numbered = _NUMBERED.fullmatch(plain)
    if numbered:
        event = numbered[1] == "1"
        said = _event_by_words(numbered[2] or "")
        return None if said is not None and said != event else event
    return _event_by_words(plain)


def _event_by_words(text: str) -> bool | None:
    words = _NOT_WORDS.sub(" ", text).split()
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
    """Whether a label applies: 1 or 0, yes or no, REDCap's Checked, positive; None otherwise."""
    plain = plain_text(text).casefold()
    if plain in _TRUE:
        return True
    return False if plain in _FALSE else None


def is_limit(text: str) -> bool:
    """Tells whether a value is a limit of a number: '<5', '>= 90', '90+'."""
    return _LIMIT.fullmatch(plain_text(text)) is not None


class Numbers:
    """Numbers of one column, whose values decide together what a comma means."""

    def __init__(self, texts: Iterable[str]):
        """Looks at the values of a column."""
        plain = {_bare(text) for text in texts}
        self.has_comma = any(
            _DECIMAL_COMMA.fullmatch(text) and not _ONE_GROUP.fullmatch(text)
            for text in plain
        ) or any(_COMMA_GROUPS.fullmatch(text) and "," in text for text in plain)
        self.has_point = any(
            _NUMBER.fullmatch(text) and "." in text and not _POINT_GROUP.fullmatch(text)
            for text in plain
        ) or any(_POINT_GROUPS.fullmatch(text) and "." in text for text in plain)
        has_groups = any(
            _POINT_GROUPS.fullmatch(text) and text.count(",") > 1 for text in plain
        )
        self._groups_are_points = has_groups or self.has_point

    def read(self, text: str) -> float | None:
        """The number of a value; None where it is none, or may be two numbers."""
        plain = _bare(text)
        if self.has_comma and self.has_point:
            plain = plain if "," not in plain else ""
        elif self.has_comma:
            if _COMMA_GROUPS.fullmatch(plain):
                plain = plain.replace(".", "")
            plain = plain.replace(",", ".")
        elif _POINT_GROUPS.fullmatch(plain):
            plain = plain.replace(",", "") if self._groups_are_points else ""
        if not _NUMBER.fullmatch(plain):
            return None
        value = float(plain)
        return value if np.isfinite(value) else None

    def reading(self, text: str) -> tuple[Meaning, str]:
        """Meaning of a value, and the number with the digits that are shown."""
        number = self.read(text)
        return ("unclear", "") if number is None else ("number", f"{number:.10g}")

    def fault(self, text: str) -> str:
        """Why a value is no number, with a remedy."""
        if is_limit(text):
            return "a limit, and no number"
        if "," in text and any(sign.isdigit() for sign in text):
            return "a comma that may be a decimal one or one between thousands"
        return "no number"


def _bare(text: str) -> str:
    """A number without spaces and apostrophes between thousands, with a plain minus."""
    plain = plain_text(text).replace("\u2212", "-")
    return _SPACES.sub("", plain) if _SPACED.fullmatch(plain) else plain


def is_code(value: float, others: Sequence[float]) -> bool:
    """Tells whether a number may be a code for no value: 999 among 0 to 14, -1 among ages.

    Its digits are all 7, 8 or 9, or it is -1, and it lies far outside of the others. One 9 is a
    code among whole numbers to 4 only.
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
    """How one value of a column, or a range of numbers, is read.

    Attributes:
        column: name of the column.
        value: as the table has it.
        count: rows that have it.
        reading: class, missing, event, censored, number; limit or unclear where it is unusable.
        becomes: the class or number that is learnt; '' for none.
    """

    column: str
    value: str
    count: int
    reading: Meaning
    becomes: str = ""


def parse_overrides(items: Sequence[str]) -> dict[str, str]:
    """Value, folded -> reading, of texts such as 'NA=class', '2=event' or 'pos=positive'.

    Raises ConfigError: a text without '='.
    """
    overrides = {}
    for item in items:
        value, sign, reading = item.rpartition("=")
        if not sign:
            raise ConfigError(
                f"read must be VALUE=READING, got {item!r}; READING is one of "
                f"{', '.join(READINGS)}, or the word or number to read"
            )
        overrides[plain_text(value).casefold()] = plain_text(reading) or "missing"
    return overrides


class ColumnValues:
    """Values of one column: what each is replaced by, and which are missing."""

    def __init__(
        self,
        texts: Iterable[str],
        overrides: Mapping[str, str],
        classes: Sequence[str] = (),
    ):
        """Takes all values of the column; overrides are those of `parse_overrides`.

        `classes` of a trained model are classes, whatever they look like.
        """
        self._overrides = {name.casefold(): "class" for name in classes} | {**overrides}
        plain = {plain_text(text) for text in texts}
        # beside '+' a '-' is a class
        self._has_plus = any(text and not text.strip("+") for text in plain)

    def value(self, text: str) -> str | None:
        """The value that is learnt from a cell, as text; None where it is missing.

        An event that an override names is '1', a censored case '0'.
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
    """How cells are read: as missing where they have no value, else by `read`."""
    cells: list[Cell] = []
    for text, value in zip(texts, values, strict=True):
        reading: tuple[Meaning, str] = ("missing", "") if value is None else read(value)
        cells.append((text, *reading))
    return tuple(cells)


def shown_readings(column: str, cells: Sequence[Cell]) -> list[ValueReading]:
    """Readings of a column: (text, meaning, what it becomes) of each row, the commonest first.

    More than MOST_SHOWN different numbers are one line, from the least to the largest.
    """
    counts = Counter(cells)
    numbers = {cell for cell in counts if cell[1] == "number"}
    readings = []
    if len(numbers) > MOST_SHOWN:
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
    """A sentence that counts and names the rows without a value, by their words for it."""
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
    """The number of a cell; of a flag 0 or 1, see `flag_of` and `event_of`.

    Raises DatasetError: it is none, or not finite.
    """
    if flag:
        said = flag_of(text)
        if said is None:
            said = event_of(text)
        if said is None:
            raise DatasetError(f"{column} must be 0 or 1, got {text!r} in {where!r}")
        return float(said)
    value = Numbers([text]).read(text)
    if value is None:
        raise DatasetError(f"{column} must be a number, got {text!r} in {where!r}")
    return value


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
