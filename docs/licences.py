"""Tables of the page "Licences": every package, weight and data set, or an error about a licence.

`python docs/licences.py` prints them, docs/hooks.py fills licences.md.j2 with them, and
tests/docs/test_licences.py checks them. What is installed or distributed must have an accepted
licence, which the GPL is not. Packages are those of this environment; `dev` counts too.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src" / "thinsection"
BASE = "(always)"
# tile encoders that are declared in this package
ENCODERS = ("encoders_own.toml", "encoders_timm.toml")
# slide encoders that have no weights of others
WITHOUT_WEIGHTS = {"mean", "max", "abmil"}


class LicenceError(ValueError):
    """Something that is used has an unknown licence, or one that is not accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package that an extra installs, itself or for another package."""

    name: str
    licence: str
    source: str
    extras: tuple[str, ...]

    @property
    def is_for_dev(self) -> bool:
        """True if developers alone install it."""
        return self.extras == ("dev",)


def facts() -> dict[str, Any]:
    """Facts of licences.toml."""
    return read(Path(__file__).with_suffix(".toml"))


def read(path: Path) -> dict[str, Any]:
    """Tables of a TOML file."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def is_accepted(licence: str, accepted: set[str]) -> bool:
    """Tells whether each part of an SPDX expression offers a licence that is accepted."""
    parts = re.split(r" AND (?![^()]*\))", licence)
    return all(accepted & set(part.strip("() ").split(" OR ")) for part in parts)


@cache
def extras_by_package() -> dict[str, set[str]]:
    """Every package that is installed, by its name -> the extras that bring it."""
    project = read(ROOT / "pyproject.toml")["project"]
    extras = project["optional-dependencies"]
    found: dict[str, set[str]] = {}
    for extra, wanted in {BASE: project["dependencies"], **extras}.items():
        for name in closure(wanted, extras):
            found.setdefault(name, set()).add(extra)
    return found


def closure(wanted: list[str], extras: dict[str, list[str]]) -> set[str]:
    """Names of packages that requirements bring in this environment."""
    waiting = [(Requirement(line), ("",)) for line in wanted]
    done: set[tuple[str, tuple[str, ...]]] = set()
    while waiting:
        requirement, of_extras = waiting.pop()
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": e}) for e in of_extras):
            continue
        name = canonicalize_name(requirement.name)
        asked = ("", *sorted(requirement.extras))
        if (name, asked) in done:
            continue
        if name == "thinsection":
            lines = [line for extra in requirement.extras for line in extras[extra]]
        else:
            done.add((name, asked))
            lines = requirements_of(name)
        waiting += [(Requirement(line), asked) for line in lines]
    return {name for name, _ in done}


def requirements_of(name: str) -> list[str]:
    """Requirements of a package; an empty list if it is not installed here."""
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


def packages() -> list[Package]:
    """Every package. Raises LicenceError: a licence is unknown or not accepted."""
    known = facts()
    accepted = set(known["accepted"])
    listed = []
    for name, extras in sorted(extras_by_package().items()):
        licence = known["packages"].get(name) or stated_licence(name, known)
        if licence is None:
            raise LicenceError(
                f"package must have a known licence, got none for {name!r} of "
                f"{', '.join(sorted(extras))}; look it up, and add it to docs/licences.toml"
            )
        if not is_accepted(licence, accepted):
            raise LicenceError(
                f"package must have a licence that is accepted, got {licence} for {name!r} of "
                f"{', '.join(sorted(extras))}; use another package"
            )
        listed.append(
            Package(
                name=name,
                licence=licence,
                source=source_of(name),
                extras=tuple(sorted(extras)),
            )
        )
    return listed


def stated_licence(name: str, known: dict[str, Any]) -> str | None:
    """SPDX expression that the metadata of an installed package states; None if there is none."""
    try:
        stated = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return None
    words = known["words"]
    expression = stated.get("License-Expression")
    if expression:
        return str(expression)
    classifiers = [
        line.rpartition(" :: ")[2]
        for line in stated.get_all("Classifier") or []
        if line.startswith("License :: OSI Approved :: ")
    ]
    # a name, or the first line of a whole text
    field, *_ = (stated.get("License") or "").strip().splitlines() or [""]
    if field in words:
        return str(words[field])
    # a classifier is vague: "BSD License" is any of several
    if field != "BSD" and is_accepted(field, set(known["accepted"])):
        return field
    # all of them hold, as no metadata says whether one may choose
    if classifiers and all(word in words for word in classifiers):
        return " AND ".join(dict.fromkeys(words[word] for word in classifiers))
    return field or None


@cache
def source_of(name: str) -> str:
    """Address of a package's code; 'PyPI' if its metadata has none, or it is not installed."""
    try:
        stated = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return "PyPI"
    addresses = {}
    for line in stated.get_all("Project-URL") or []:
        label, _, address = line.partition(", ")
        addresses[re.sub(r"[^a-z]", "", label.lower())] = address
    for label in ("source", "sourcecode", "repository", "github", "code", "homepage"):
        if label in addresses:
            return addresses[label].strip()
    home = str(stated.get("Home-page") or "")
    return home if home.startswith("http") else "PyPI"


def rows_of_weights() -> Iterator[tuple[str, str, str, str]]:
    """Name, kind, licence and source of all weights. Raises LicenceError: one is unknown."""
    for file in ENCODERS:
        for spec in read(SOURCES / "encode" / file)["encoder"]:
            repo = spec.get("repo")
            source = f"https://huggingface.co/{repo}" if repo else "in the package"
            yield (
                spec["name"],
                "tile encoder",
                known_licence(spec),
                f"{source}; {spec['source']}",
            )
    slide_weights = facts()["slide_encoders"]
    for spec in read(SOURCES / "pool" / "slide_encoders.toml")["slide_encoder"]:
        name = spec["name"]
        if name in WITHOUT_WEIGHTS:
            continue
        if name not in slide_weights:
            raise LicenceError(
                f"slide encoder must be in docs/licences.toml, got {name!r}; add it"
            )
        own = slide_weights[name]
        yield name, "slide encoder", own["licence"], own["source"]
    for spec in read(SOURCES / "segment" / "segmenters.toml")["segmenter"]:
        yield spec["name"], "segmenter", known_licence(spec), spec["source"]


def known_licence(spec: dict[str, Any]) -> str:
    """Licence of a declared network. Raises LicenceError: it declares none."""
    licence = str(spec.get("licence", "unknown"))
    if licence == "unknown":
        raise LicenceError(
            f"weights must have a known licence, got none for {spec['name']!r}; declare it"
        )
    return licence


def rows_of_files() -> list[tuple[str, str, str, str]]:
    """Path, licence, source and words of weights and libraries in the package.

    Raises LicenceError: a file of weights is not listed, or its licence is not accepted.
    """
    known = facts()
    listed = {file["path"]: file for file in known["files"]}
    for path in sorted(SOURCES.rglob("*")):
        name = path.relative_to(ROOT).as_posix()
        is_foreign = path.suffix in (".safetensors", ".npz", ".onnx", ".pth", ".pt")
        if (is_foreign or path.name.endswith(".min.js")) and name not in listed:
            raise LicenceError(
                f"file must be in docs/licences.toml, got {name!r}; add its licence and source"
            )
    for file in listed.values():
        if not is_accepted(file["licence"], set(known["accepted"])):
            raise LicenceError(
                f"file must have a licence that is accepted, got {file['licence']} for "
                f"{file['path']!r}"
            )
    return [
        (file["path"], file["licence"], file["source"], file["words"])
        for file in listed.values()
    ]


def rows_of_data() -> list[tuple[str, str, str, str]]:
    """Name, licence, source and use of data. Raises LicenceError: one in the code is not listed."""
    data = facts()["data"]
    names = {name for entry in data.values() for name in entry["names"]}
    missing = sorted(names_of_data() - names)
    if missing:
        raise LicenceError(
            f"data sets must be in docs/licences.toml, got {', '.join(missing)}; add them"
        )
    return [
        (name, entry["licence"], entry["source"], entry["use"])
        for name, entry in data.items()
    ]


def names_of_data() -> set[str]:
    """Data sets that the code knows by name: layouts of folders, and subsets of PathoROB."""
    from thinsection.probe.protocol import RobustnessSettings

    layouts = read(SOURCES / "probe" / "data" / "layouts.toml")
    named = {name for name, _ in RobustnessSettings().k_by_subset}
    named |= {name for name, _ in RobustnessSettings().max_k_by_subset}
    return named | {layout.get("name") or name for name, layout in layouts.items()}


def linked(text: str) -> str:
    """Text whose addresses are links."""
    return re.sub(r"https?://[^\s,;()]+", lambda match: f"<{match[0]}>", text)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Markdown of a table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def words_of_extras(extras: tuple[str, ...]) -> str:
    """Extras that bring a package, without those that contain another one of them."""
    for smallest in (BASE, "slides"):
        if smallest in extras:
            return smallest
    return ", ".join(extra for extra in extras if extra not in ("all", "dev")) or "all"


def tables() -> dict[str, str]:
    """Tables of the page, by the names that licences.md.j2 has for them. Raises LicenceError."""
    rows = [(p, (p.name, p.licence, linked(p.source))) for p in packages()]
    return {
        "files": table(
            ("file", "licence", "what it is", "source"),
            [
                (f"`{path}`", licence, words, linked(source))
                for path, licence, source, words in rows_of_files()
            ],
        ),
        "packages": table(
            ("package", "licence", "source", "extra"),
            [(*row, words_of_extras(p.extras)) for p, row in rows if not p.is_for_dev],
        ),
        "developers": table(
            ("package", "licence", "source"),
            [row for p, row in rows if p.is_for_dev],
        ),
        "by_name": table(
            ("package", "licence", "source", "use"),
            [
                (name, own["licence"], linked(own["source"]), own["use"])
                for name, own in facts()["by_name"].items()
            ],
        ),
        "weights": table(
            ("weights", "kind", "licence", "source"),
            [
                (f"`{name}`", kind, licence, linked(source))
                for name, kind, licence, source in rows_of_weights()
            ],
        ),
        "data": table(
            ("data", "licence", "used for", "source"),
            [
                (name, licence, use, linked(source))
                for name, licence, source, use in rows_of_data()
            ],
        ),
    }


if __name__ == "__main__":
    sys.stdout.write("\n\n".join(tables().values()) + "\n")
