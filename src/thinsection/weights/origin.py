"""Origin of weights: what a model of them is called, their files, known again by their stamps.

A file whose size, time stamps and inode are the same holds the same bytes: whoever writes to it
changes its ctime, which no program can set back. Stamps that are too young are not kept, since a
file may change twice within one tick of a file system's clock.
"""

import json
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from thinsection.config import user_cache_dir
from thinsection.errors import WeightsError
from thinsection.files.atomic import read_json, write_json

COMMIT = re.compile("[0-9a-f]{40}")
INDEX = ".index.json"  # of a checkpoint in several files
# name, size, mtime and ctime in ns, and inode of each file
Stamps = tuple[tuple[str, int, int, int, int], ...]
# age at which stamps count: the coarsest clock of a file system ticks every 2 s
_SETTLED_NS = 2_000_000_000
# packages that decide what a network makes of a file of weights
_PACKAGES = ("thinsection", "torch", "timm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Origin of a model's weights, as its loader was asked.

    Attributes:
        name: what the model is called in a label; None: the name in its registry.
        revision: commit on the hub; None where they did not come from there.
        own_weights: True where the caller brought them: a local checkpoint, or `weights`.
        files: what was read of them, with its folder; None where that is not all that decides what
            they are.
        seed: seed of random weights; None: published or own ones.
    """

    name: str | None = None
    revision: str | None = None
    own_weights: bool = False
    files: tuple[str, ...] | None = None
    seed: int | None = None

    def label(self, name: str, *, precision: str, weights_hash: str | None) -> str:
        """Returns a folder name: 'uni2_h_bf16', own weights 'uni_w1a2b3c', random 'uni_seed0'."""
        parts = [slug(self.name or name)]
        if precision != "fp32":
            parts.append(precision)
        if self.own_weights and weights_hash is not None:
            parts.append(f"w{weights_hash[:6]}")
        if self.seed is not None:
            parts.append(f"seed{self.seed}")
        return "_".join(parts)

    def identity(
        self, name: str, *, precision: str, weights_hash: str | None
    ) -> dict[str, str]:
        """Returns name, weights_hash and precision, and the revision on the hub, if any.

        The hash sees every weight: two revisions of equal weights give the same results.
        """
        identity = {
            "name": name,
            "weights_hash": weights_hash or "",
            "precision": precision,
        }
        if self.revision:
            identity["revision"] = self.revision
        return identity


def slug(name: str) -> str:
    """Makes a file name of a name: 'timm-resnet18' of 'timm:resnet18'; commits keep 7 digits."""
    short = re.sub("[0-9a-f]{40}", lambda commit: commit[0][:7], name)
    return re.sub(r"[^\w.]+", "-", short, flags=re.ASCII).strip("-.") or "model"


def commit_of(path: Path) -> str | None:
    """Returns the commit that a file of the hub's cache belongs to; None for any other file."""
    for folder in path.parents:
        if folder.parent.name == "snapshots":
            return folder.name if COMMIT.fullmatch(folder.name) else None
    return None


def shard_names(index: Path) -> tuple[str, ...]:
    """File names of the shards of an index, each once; WeightsError if they lie elsewhere."""
    try:
        document = json.loads(index.read_text(encoding="utf-8"))
        names = sorted(set(document["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(
            f"index must have a weight_map, got {str(index)!r}"
        ) from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or name.endswith(INDEX):
            raise WeightsError(
                f"shards must be in the folder of their index, got {name!r} in {str(index)!r}"
            )
    return tuple(names)


def files_of(path: Path) -> tuple[str, ...]:
    """Lists all that decides what a checkpoint is: the folder, the file, its configs and shards."""
    paths = [path.parent, path, *sorted(path.parent.glob("*.json"))]
    if path.name.endswith(INDEX):
        paths += [path.parent / name for name in shard_names(path)]
    return tuple(str(each.absolute()) for each in dict.fromkeys(paths))


def read_stamps(files: Iterable[str | Path]) -> Stamps | None:
    """Stamps of the files; None if one is missing."""
    try:
        stats = [(str(file), Path(file).stat()) for file in files]
    except OSError:
        return None
    return tuple(
        (name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
        for name, stat in stats
    )


def are_settled(stamps: Stamps) -> bool:
    """Tells whether the files still have their stamps, and these are old enough to count."""
    if stamps != read_stamps(stamp[0] for stamp in stamps):
        return False
    newest_ns = max(max(stamp[2:4]) for stamp in stamps)
    return time.time_ns() - newest_ns >= _SETTLED_NS


def keep_stamps(path: Path, stamps: Stamps | None, **facts: str) -> None:
    """Writes stamps that were read before the files' content, with what was found in them.

    Nothing is written if a file is missing, has changed since or is too young, or if the folder
    cannot be written: the files are then read again.
    """
    if stamps is None or not are_settled(stamps):
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"stamps": stamps, **facts})
    except OSError:
        return


def kept_facts(path: Path, stamps: Stamps | None) -> dict[str, str] | None:
    """What `keep_stamps` wrote about files with these stamps; None if it wrote nothing."""
    if stamps is None:
        return None
    try:
        document = read_json(path)
        kept = document.pop("stamps")
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
    if kept != [list(stamp) for stamp in stamps]:
        return None
    return {str(name): str(value) for name, value in document.items()}


def known_hash(network: str, stamps: Stamps | None) -> str | None:
    """Hash of the network's weights from the files with these stamps, if it was computed before.

    Args:
        network: text that tells networks apart which the same file may fill.
        stamps: stamps of all files that decide the weights.
    """
    facts = kept_facts(_hash_path(network, stamps or ()), stamps)
    return None if facts is None else facts.get("weights_hash")


def keep_hash(network: str, stamps: Stamps | None, weights_hash: str) -> None:
    """Keeps a hash for `known_hash`, in the user's cache. See `keep_stamps`."""
    path = _hash_path(network, stamps or ())
    keep_stamps(path, stamps, weights_hash=weights_hash)


def _hash_path(network: str, stamps: Sequence[tuple[object, ...]]) -> Path:
    names = [stamp[0] for stamp in stamps]
    parts = [network, names, [installed_version(package) for package in _PACKAGES]]
    name = sha256(json.dumps(parts).encode()).hexdigest()[:32]
    return user_cache_dir() / "weights" / f"{name}.json"


def installed_version(package: str) -> str:
    """Version of a package; '' if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
