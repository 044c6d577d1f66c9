"""Choice of a grid or of embeddings if a results folder has several: `Results.choose_grid`.

`matching` finds the addresses that a name means. If there are several, or no name is given, the
records decide: the newest invocation that made any of them. One line tells the choice, and names
the setting with which another can be chosen. The line goes to a logger: Python shows it on standard
error, and the command line prints it with the names of options.
"""

import logging
from collections.abc import Iterable, Sequence

from thinsection.config import from_mapping
from thinsection.encode.registry import OWN_PREFIX
from thinsection.errors import ThinsectionError
from thinsection.results.records import Record
from thinsection.stages.config import TILED, RunConfig
from thinsection.stages.features import features_label
from thinsection.stages.labels import slug
from thinsection.stages.spec import grid_names, resolve, stages_of
from thinsection.store.outcome import grid_of
from thinsection.types import Document, PlainValues

# sections of a run's settings that decide the names of its grids and embeddings
_DECIDING = (
    *("slides", "tissue", "regions", "qc", "segment", "tiles"),
    *("stain", "encode", "aggregate", "output"),
)
_log = logging.getLogger(__name__)


def say_choice(line: str) -> None:
    """Tells a choice to whoever listens; if nobody does, Python shows it on standard error."""
    _log.warning("%s", line)


def matching(known: Sequence[str], name: str | None) -> list[str]:
    """Addresses that a name means: the address, one of its parts, or text that it contains."""
    if name is None:
        return [*known]
    addresses = []
    for address in known:
        grid, _, last = address.rpartition("/")
        label = last.removeprefix("features_").removeprefix("slide_features_")
        if name in (address, grid, last, label):
            addresses.append(address)
    return addresses or [address for address in known if name in address]


def newest_of(addresses: Sequence[str], records: Iterable[Record]) -> list[str]:
    """Addresses that the newest invocation made, among invocations that made any of `addresses`.

    Empty if no invocation made any, or if the results of a newer invocation are unknown.
    """

    def time_of(record: Record) -> str:
        # a merge has results of older runs
        origins = record.document.get("merged_from") or [record.document]
        return max(str(origin.get("started", "")) for origin in origins)

    for record in sorted(records, key=time_of, reverse=True):
        made = _made_by(record, addresses)
        if made is None:
            return []
        if made:
            return made
    return []


def _made_by(record: Record, addresses: Sequence[str]) -> list[str] | None:
    """Addresses, among `addresses`, that an invocation made; None if unknown."""
    config: Document = record.document.get("config", {})
    if "pooling" in config:
        pooling = config["pooling"]
        wanted = pooling.get("features") or ""
        kind = ("slide_features_" + slug(pooling.get("slide_encoder", "")),)
        return [a for a in addresses if _last(a).startswith(kind) and wanted in a]
    if "tiles" not in config and "grids" not in record.document:
        tool = config.get("import", {}).get("tool")
        # an older version imported the folders
        return [a for a in addresses if tool and a.startswith(f"{tool}_")]
    grids = recorded_grids(record)
    if grids is None:
        return None
    # the address of a grid is its name
    in_grids = [a for a in addresses if (grid_of(a) or a) in grids]
    if not any("/" in address for address in in_grids):
        return in_grids
    names, starts = _folder_names(record)
    with_name = [a for a in in_grids if _last(a) in names]
    with_start = [a for a in in_grids if _last(a).startswith(starts)]
    return with_name or with_start or in_grids


def _last(address: str) -> str:
    return address.rpartition("/")[2]


def _folder_names(record: Record) -> tuple[set[str], tuple[str, ...]]:
    """Names of the folders of embeddings that a run writes into its grids, and their beginnings.

    A run that ended has recorded its models, which give the whole name.
    """
    config: Document = record.document.get("config", {})
    try:
        settings = settings_of(config)
    except ThinsectionError:  # settings of another version
        return set(), ("",)
    encoders = settings.encode.encoders
    starts = [f"features_{slug(name.removeprefix(OWN_PREFIX))}" for name in encoders]
    poolers = settings.aggregate.slide_encoders
    starts += [f"slide_features_{slug(name)}" for name in poolers]
    stain = settings.stain if settings.stain.stain_norm != "none" else None
    names = set()
    for label in [*record.document.get("models", {})][: len(encoders)]:
        dtype = settings.output.embedding_dtype
        names.add(f"features_{features_label(label, dtype=dtype, stain=stain)}")
    return names, tuple(starts)


def recorded_grids(record: Record) -> tuple[str, ...] | None:
    """Names of the grids that an invocation made; None if they are not known.

    Older versions did not record them. They then follow from the settings, unless a file that the
    settings name is missing.
    """
    if "grids" in record.document:
        return tuple(record.document["grids"])
    config: Document = record.document.get("config", {})
    if config.get("output", {}).get("until", "slide-embeddings") not in TILED:
        return ()
    try:
        return grid_names(stages_of(resolve(settings_of(config), {"until": "tiles"})))
    except (ThinsectionError, OSError):
        return None


def settings_of(config: PlainValues) -> RunConfig:
    """Settings of a recorded run that name its results. Raises ConfigError: unknown ones."""
    deciding = {name: section for name, section in config.items() if name in _DECIDING}
    return from_mapping(RunConfig, deciding)
