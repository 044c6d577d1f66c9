"""What to cite for a folder or model, and a methods paragraph, in words or in BibTeX."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import thinsection
from thinsection.citation.bibtex import Reference, known_references
from thinsection.citation.folder import FolderAccount
from thinsection.citation.methods import Account, Method
from thinsection.citation.models import (
    VALIDATION_NAME,
    accounts_of,
    is_probe,
    model_account,
)
from thinsection.errors import StoreError
from thinsection.predict.model_file import SUFFIX
from thinsection.predict.tested import EXPERIMENT_NAME
from thinsection.results.folder import open_results
from thinsection.store.ledger import SLIDES
from thinsection.types import counted

Format = Literal["text", "bibtex"]
_OWN_KEY = "thinsection"
_CITATION = re.compile(r" \[(@[\w-]+(?:; @[\w-]+)*)\]")
# characters of a sentence that LaTeX would read as its own
_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "%": r"\%",
    "_": r"\_",
    "#": r"\#",
    "^": r"\^{}",
    "~": r"\~{}",
    "µ": r"\textmu{}",
}
_KIND_WORDS = {
    "qc_check": "quality control",
    "tool": "import",
    "target": "kind of target",
    "metric": "score",
    "interval": "interval of scores",
}


@dataclass(frozen=True, repr=False)
class Citation:
    """References and methods paragraph of a folder or model; `text` and `bibtex` print it."""

    account: Account

    def __repr__(self) -> str:
        methods = counted(len(self.methods), "method")
        references = counted(len(self.references), "reference")
        return f"Citation({methods}, {references}, {len(self.unknown)} unknown)"

    @property
    def methods(self) -> tuple[Method, ...]:
        """Methods that were used, each once."""
        return tuple(dict.fromkeys(self.account.methods))

    @property
    def references(self) -> tuple[Reference, ...]:
        """References of the methods, in the order of the paragraph."""
        keys = [key for method in self.methods for key in method.keys]
        known = known_references()
        return tuple(known[key] for key in dict.fromkeys(keys))

    @property
    def unknown(self) -> tuple[str, ...]:
        """What the record does not say, a line each."""
        lines = (" ".join(line.split()) for line in self.account.unknown)
        return tuple(dict.fromkeys(lines))

    @property
    def software(self) -> Reference:
        """Entry of this package, of the version that made the results."""
        fields = {
            "author": "{The Thinsection developers}",
            "title": "Thinsection",
            "howpublished": "Software, Apache-2.0",
        }
        if self.account.versions:
            fields["note"] = f"Version {self._versions}"
        return Reference(_OWN_KEY, "misc", fields)

    @property
    def _versions(self) -> str:
        made = sorted(set(self.account.versions))
        return " and ".join(made) or "a version that is not recorded"

    @property
    def paragraph(self) -> str:
        """The methods paragraph, which cites as pandoc does: [@key]."""
        version = f" {self._versions}" if self.account.versions else ""
        opening = f"The work was done with Thinsection{version} [@{_OWN_KEY}]."
        # names and messages in it are those of users, and may have line ends
        return " ".join(" ".join([opening, *self.account.sentences]).split())

    @property
    def text(self) -> str:
        """All of it in words."""
        lines = [
            f"Thinsection {thinsection.__version__}; the results were made with {self._versions}"
        ]
        lines += ["", "Methods", _CITATION.sub(self._in_words, self.paragraph)]
        lines += ["", "Used"]
        lines += [f"  {line}" for line in self._used()]
        if self.unknown:
            lines += ["", "Not known from the record; fill it in"]
            lines += [f"  {line}" for line in self.unknown]
        lines += ["", "References"]
        lines += [f"  {one.text}" for one in (self.software, *self.references)]
        return "\n".join(lines)

    @property
    def bibtex(self) -> str:
        """References in BibTeX; the paragraph is a comment above them, in LaTeX."""
        paragraph = self.paragraph
        parts = []
        end = 0
        for match in _CITATION.finditer(paragraph):
            keys = match[1].replace("@", "").replace("; ", ",")
            parts += [_latex(paragraph[end : match.start()]), rf" \cite{{{keys}}}"]
            end = match.end()
        parts.append(_latex(paragraph[end:]))
        lines = [f"% {line}" for line in ["Methods:", "".join(parts)]]
        lines += [f"% not known: {line}" for line in self.unknown]
        entries = [one.bibtex for one in (self.software, *self.references)]
        return "\n\n".join(["\n".join(lines), *entries])

    def _used(self) -> Iterable[str]:
        """A line for each method, with its references; checks of quality control share one."""
        by_line: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
        for method in self.methods:
            name = "" if method.kind == "qc_check" else method.name
            by_line.setdefault((method.kind, name, method.keys), []).append(method.name)
        known = known_references()
        for (kind, name, keys), names in by_line.items():
            words = _KIND_WORDS.get(kind, kind.replace("_", " "))
            cited = "; ".join(known[key].short for key in keys)
            if not keys:
                is_known = Method(kind, names[0]).is_known
                cited = "of Thinsection" if is_known else "reference not known"
            yield f"{words}: {name or ', '.join(dict.fromkeys(names))} ({cited})"

    def _in_words(self, match: re.Match[str]) -> str:
        """' (Chen et al. 2024)' for ' [@chen2024uni]'."""
        known = {**known_references(), _OWN_KEY: self.software}
        keys = match[1].replace("@", "").split("; ")
        return f" ({'; '.join(known[key].short for key in keys)})"


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def cite(path: str | Path) -> Citation:
    """References and methods paragraph of results, a model, an experiment, a validation or probes.

    Args:
        path: a results folder (its experiments, validations and probes too); a folder of `train`,
            `predict --labels`, `probe` or `bench`; or a model file.

    Memory: some kB per slide.

    Raises:
        StoreError: nothing there was made by these commands, or a file is damaged.
    """
    place = Path(path)
    if place.is_file() and place.suffix == SUFFIX:
        return Citation(model_account(place))
    if not place.is_dir():
        raise StoreError(
            f"path must be a folder of results or a model file ({SUFFIX}), got {str(path)!r}; "
            "check the path"
        )
    account = Account()
    if (place / SLIDES).is_dir():
        account += FolderAccount(open_results(place)).account()
    account += accounts_of(_documents(place))
    if account == Account():
        raise StoreError(
            "path must contain results of `thinsection run`, `train`, `predict --labels` or "
            f"`probe`, got none in {str(path)!r}; run one of them first"
        )
    return Citation(account)


def _documents(place: Path) -> list[Path]:
    """JSON files of experiments, validations and probes, in a folder and below it."""
    found = [place / EXPERIMENT_NAME, place / VALIDATION_NAME]
    found += sorted(place.glob(f"experiments/*/{EXPERIMENT_NAME}"))
    found += sorted(place.glob(f"validation_*/{VALIDATION_NAME}"))
    found += [path for path in sorted(place.glob("*.json")) if is_probe(path)]
    for pattern in ("*/*.json", "probes/**/*.json"):
        for path in sorted(place.glob(pattern)):
            is_job = path.parent.parent == place and (place / "probes.csv").is_file()
            if (is_job or pattern.startswith("probes")) and is_probe(path):
                found.append(path)
    return [path for path in dict.fromkeys(found) if path.is_file()]
