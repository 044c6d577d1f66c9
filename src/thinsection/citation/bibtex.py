"""References in BibTeX: the package's list, and an entry as text.

The list is written by hand in a plain form, and read strictly: an entry opens with `@kind{key,`,
has one field a line (`name = {value},`), and closes with `}`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from thinsection.errors import StoreError

_OPENING = re.compile(r"@([a-z]+)\{([\w-]+),")
_FIELD = re.compile(r"  ([a-z]+) = \{(.+)\},")
_LIST = Path(__file__).with_name("references.bib")
_MOST_NAMED = 2  # authors that a short form names


@dataclass(frozen=True, slots=True)
class Reference:
    """One entry of the list."""

    key: str
    kind: str  # article, inproceedings or misc
    fields: Mapping[str, str]  # as BibTeX has them, with braces round names

    @property
    def authors(self) -> list[str]:
        """Family names, or names of groups; 'others' is the last if not all are listed."""
        names = re.split(r"\s+and\s+", self.fields["author"])
        return [_plain(name.partition(",")[0]) for name in names]

    @property
    def short(self) -> str:
        """'Chen et al. 2024', 'Tan and Le 2019'; without a year if none is known."""
        names = self.authors
        named = " and ".join(names)
        if len(names) > _MOST_NAMED or "others" in names:
            named = f"{names[0]} et al."
        return f"{named} {self.fields.get('year', '')}".strip()

    @property
    def identifier(self) -> str:
        """'doi:...', 'arXiv:...', or an address; '' if there is none."""
        if "doi" in self.fields:
            return f"doi:{self.fields['doi']}"
        if "eprint" in self.fields:
            return f"arXiv:{self.fields['eprint']}"
        return self.fields.get("url", "")

    @property
    def text(self) -> str:
        """The entry in one line, as a list of references has it."""
        fields = self.fields
        names = ", ".join(
            "et al." if name == "others" else name for name in self.authors
        )
        parts = [names, _plain(fields["title"])]
        place = fields.get("journal") or fields.get("booktitle")
        place = _plain(place or fields.get("howpublished", ""))
        for name, form in (("volume", " {}"), ("pages", ", {}")):
            if name in fields:
                place += form.format(fields[name].replace("--", "-"))
        if "note" in fields:
            place = f"{_plain(fields['note'])}, {place}"
        if "year" in fields:
            place = f"{place} ({fields['year']})".strip()
        parts += [place, self.identifier]
        return ". ".join(part.rstrip(".") for part in parts if part)

    @property
    def bibtex(self) -> str:
        """The entry in BibTeX."""
        lines = [f"  {name} = {{{value}}}," for name, value in self.fields.items()]
        return "\n".join([f"@{self.kind}{{{self.key},", *lines, "}"])


def _plain(text: str) -> str:
    """Text of a field without BibTeX's braces and dashes."""
    return re.sub(r"[{}]", "", text).replace("--", "-")


def parse_bibtex(text: str) -> dict[str, Reference]:
    """Entries by key.

    Raises StoreError: a line does not have the plain form, or a key is there twice.
    """
    references: dict[str, Reference] = {}
    kind = ""
    key = ""
    fields: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        opening = _OPENING.fullmatch(line)
        field = _FIELD.fullmatch(line)
        if opening is not None and not key:
            kind, key = opening.groups()
            fields = {}
        elif field is not None and key and field[1] not in fields:
            fields[field[1]] = field[2]
        elif line == "}" and key and key not in references:
            references[key] = Reference(key, kind, MappingProxyType(fields))
            key = ""
        elif line and (key or not line.startswith("%")):
            raise StoreError(
                f"line {number} must be BibTeX in the plain form, got {line!r}"
            )
    if key:
        raise StoreError(
            f"entry {key!r} must end with a line '}}', got the end of the file"
        )
    return references


@cache
def known_references() -> Mapping[str, Reference]:
    """References of the package, by key."""
    return MappingProxyType(parse_bibtex(_LIST.read_text(encoding="utf-8")))
