"""Small results of `thinsection bench` that can be sent, kept and put into one table.

    OUT/scores/TASK-ENCODER-PROBE.json

A file says what was scored, how sure it is, of which weights, rows and seed, and by which versions.
"""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import thinsection
from thinsection.errors import InvalidInputError
from thinsection.files.atomic import read_json
from thinsection.probe.compare import IDENTITY
from thinsection.types import Document
from thinsection.weights.origin import installed_version

SCORES = "scores"  # folder below that of `thinsection bench`
_KEYS = ("format_version", "probe", "dataset", "metric", "score", "interval")
_FACTS = (*IDENTITY, "engine", "fingerprint", "train_rows", "val_rows", "dim")
# packages whose versions may change a score
_PACKAGES = ("numpy", "scipy", "scikit-learn", "torch", "timm", "transformers")


def small_result(result: Mapping[str, object]) -> Document:
    """The small form of a result file of a probe, with the versions of this installation."""
    document: Document = dict(result)
    facts = document["data"]
    protocol = document["protocol"]
    return {
        **{key: document[key] for key in _KEYS},
        "protocol": {key: protocol[key] for key in ("name", "seed")},
        "data": {name: facts[name] for name in _FACTS if name in facts},
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Versions that may change a score, and the commit of a checkout."""
    named = {name: installed_version(name) for name in _PACKAGES}
    installed = {name: version for name, version in named.items() if version}
    own = {"thinsection": thinsection.__version__}
    commit = _commit(Path(__file__).parents[3])
    if commit:
        own["commit"] = commit
    return own | installed


def _commit(root: Path) -> str:
    """Commit of a checkout, with '+' if its files differ from it; '' if this is none."""
    if not (root / ".git").exists():
        return ""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        return answer.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "HEAD") + ("+" if changed else "")


def read_scores(folders: Sequence[Path]) -> list[Document]:
    """Small results in the folders and below them, one of each task, probe and encoder.

    Raises:
        InvalidInputError: there is none, or two of the same task, probe and encoder differ.
    """
    found: dict[tuple[str, ...], tuple[Path, Document]] = {}
    for folder in folders:
        # '.' may be such a folder itself
        for path in sorted(Path(folder).resolve().rglob("*.json")):
            if path.parent.name != SCORES:
                continue
            document = read_json(path)
            key = (*_task(document), document["data"]["encoder"])
            first, other = found.setdefault(key, (path, document))
            if other["score"] != document["score"]:
                raise InvalidInputError(
                    "scores of one task, probe and encoder must be equal, got "
                    f"{other['score']} in {str(first)!r} and {document['score']} in {str(path)!r}; "
                    "leave out one of them"
                )
    if not found:
        raise InvalidInputError(
            f"folders must hold {SCORES}/*.json of `thinsection bench`, got none in "
            f"{', '.join(map(repr, map(str, folders)))}"
        )
    return [document for _, document in found.values()]


def _task(document: Document) -> tuple[str, ...]:
    """What must be equal for two encoders to be compared."""
    data = document["data"]
    protocol = document["protocol"]
    return (
        document["dataset"],
        document["probe"],
        document["metric"],
        protocol["name"],
        str(protocol["seed"]),
        data.get("rows_sha256", ""),
    )


def score_table(documents: Sequence[Document]) -> str:
    """Markdown: a row per task and probe, a column per encoder, scores with their intervals."""
    encoders = sorted({document["data"]["encoder"] for document in documents})
    cells = {
        (_task(document), document["data"]["encoder"]): _cell(document)
        for document in documents
    }
    heading = [
        "task",
        "probe",
        "metric",
        "protocol",
        *(f"`{each}`" for each in encoders),
    ]
    lines = [_line(heading), "|" + "---|" * 4 + "---:|" * len(encoders)]
    for task in sorted({_task(document) for document in documents}):
        scores = [cells.get((task, encoder), "") for encoder in encoders]
        lines.append(_line([*task[:4], *scores]))
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(document: Document) -> str:
    """Score, and its interval if it has one: '0.943 [0.921, 0.962]'."""
    interval = document["interval"]
    words = f"{document['score']:.3f}"
    if interval and interval["low"] is not None:
        words += f" [{interval['low']:.3f}, {interval['high']:.3f}]"
    return words
