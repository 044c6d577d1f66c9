"""Methods that a record names, the references of each, and sentences that cite them.

A sentence cites as `[@key; @other]`, as pandoc does; `cite.py` turns this into words or LaTeX.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from thinsection.config import coerce, read_toml

_TABLE = Path(__file__).with_name("methods.toml")
KeysByName = Mapping[str, tuple[str, ...]]


@cache
def known_methods() -> Mapping[str, KeysByName]:
    """Keys of references by name, for each kind of method."""
    table = read_toml(_TABLE)
    return {
        kind: coerce(names, dict[str, tuple[str, ...]], kind)
        for kind, names in table.items()
    }


@dataclass(frozen=True, slots=True)
class Method:
    """One method that was used."""

    kind: str  # as in methods.toml: 'tile_encoder', 'stain', ...
    name: str  # as the record has it
    facts: str = ""  # weights, precision, number of slides, in words

    @property
    def is_known(self) -> bool:
        """False for a method of another package, whose reference this package does not have."""
        return self.name in known_methods().get(self.kind, {})

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of its references; () for a method of this package, or of an unknown one."""
        return known_methods().get(self.kind, {}).get(self.name, ())

    @property
    def cited(self) -> str:
        """Its citation after a space: ' [@key]'; '' if it has none."""
        return citation_of(self.keys)


def citation_of(keys: Iterable[str]) -> str:
    """Citation of keys, after a space; '' for none."""
    listed = "; ".join(f"@{key}" for key in dict.fromkeys(keys))
    return f" [{listed}]" if listed else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What one folder or file says about how it was made."""

    sentences: tuple[str, ...] = ()  # of the methods paragraph, in order
    methods: tuple[Method, ...] = ()
    unknown: tuple[
        str, ...
    ] = ()  # what the record does not say, for the reader to fill in
    versions: tuple[str, ...] = ()  # of Thinsection that worked here

    def __add__(self, other: "Account") -> "Account":
        return Account(
            sentences=self.sentences + other.sentences,
            methods=self.methods + other.methods,
            unknown=self.unknown + other.unknown,
            versions=self.versions + other.versions,
        )


def joined(words: Iterable[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    listed = list(words)
    if len(listed) < 2:
        return "".join(listed)
    return f"{', '.join(listed[:-1])} and {listed[-1]}"
