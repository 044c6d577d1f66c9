"""Texts of table cells that mean that there is no value, by general rules.

The rules look at the form of a text. A text without a letter or digit, a text in brackets, and a
text made of words for "no value" are missing. A word that may be a real class ('None' for no
metastasis) is read by the same rules; whoever reads a table shows how it was read.
"""

import re
import unicodedata
from collections.abc import Sequence

# signs between words
NOT_WORDS = re.compile(r"[\W_]+")
# two letters with punctuation between them that mean "no value": n/a, n.d., k.A.
_LETTERS = frozenset(("n a", "n d", "n k", "k a"))
# stems of words that mean "no value" after a negation: not available, not assessed, nicht bekannt;
# 'not detected', 'not identified' and 'not present' are findings, and 'not given' may be a
# treatment
_STEMS_AFTER_NOT = re.compile(
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


def words_in(text: str) -> frozenset[str]:
    """The words of a text, without repeats."""
    return frozenset(text.split())


# words that mean "no value" on their own
_NO_VALUE = words_in(
    """na nan nat nil null none nul nd nk unk unknown unkn undetermined undefined unspecified
    unavailable unreported undocumented unassessed unassessable unevaluable unobtainable unrecorded
    missing blank empty void pending tbd tba discrepancy discrepant redacted withheld restricted
    declined refused unbekannt fehlend fehlt inconnu inconnue manquant desconocido desconocida
    sconosciuto onbekend desconhecido"""
)
_NEGATIONS_OF_VALUES = words_in(
    "no not non cannot unable never without nicht kein keine keinen niet sin sans senza"
)
# words for a value, which mean "no value" after a negation: no data, no result
_VALUE_WORDS = words_in(
    """data datum information info value values result results record records answer entry database
    file angabe angaben daten wert datos dato données"""
)
# words that say nothing about a value: they may stand beside the others
_FILLER_WORDS = words_in(
    """or and yet been be is was were the a of to at by in on for from this currently otherwise can
    could allowed required patient status due insufficient prefer say do know don t dont oder und
    noch"""
)


def plain_text(text: str) -> str:
    """Returns a text with single spaces, in Unicode's composed form, without invisible signs."""
    visible = (sign for sign in text if unicodedata.category(sign) != "Cf")
    return " ".join(unicodedata.normalize("NFC", "".join(visible)).split())


def is_missing(text: str) -> bool:
    """Tells whether a value means "missing"; see the head of this file."""
    plain = plain_text(text)
    if not any(sign.isalnum() for sign in plain):
        return "+" not in plain
    if _BRACKETED.fullmatch(plain) or _SHEET_ERROR.fullmatch(plain.upper()):
        return True
    words = " ".join(NOT_WORDS.sub(" ", plain.casefold()).split())
    return words in _LETTERS or words in _PHRASES or _say_no_value(words.split())


def _say_no_value(words: Sequence[str]) -> bool:
    """Tells whether words say that there is no value, and nothing else.

    True for 'not reported or unknown' and 'data unavailable'; False for 'unknown primary', because
    'primary' says something else.
    """
    negated = False
    about_value = False
    for word in words:
        if word in _NO_VALUE:
            negated = about_value = True
        elif word in _NEGATIONS_OF_VALUES:
            negated = True
        elif word in _VALUE_WORDS or _STEMS_AFTER_NOT.match(word):
            about_value = True
        elif word not in _FILLER_WORDS:
            return False
    return negated and about_value
