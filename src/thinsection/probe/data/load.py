"""Loading: from the path that a person names to the tiles that a probe takes.

A manifest is a table of tiles: images, embedding files, or rows of one; eva's too. Its columns
stand in docs/probes.md. Test rows are never opened. For labels by region see `regions`.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from thinsection.errors import ConfigError, DatasetError, rewording
from thinsection.evaluation import embeddings, tables
from thinsection.evaluation.cases import CASE_COLUMNS, table_groups
from thinsection.evaluation.metrics import Fold
from thinsection.evaluation.splits import grouped_folds
from thinsection.evaluation.tables import TEST, TextRow
from thinsection.probe.config import DataSection, ProbeConfig
from thinsection.probe.data import images, sets
from thinsection.probe.data.hest import is_hest_task, load_hest
from thinsection.probe.data.regions import load_regions
from thinsection.probe.data.sets import LabelledRows, RobustnessSet, TileSet, ValueSet
from thinsection.types import Json

if TYPE_CHECKING:
    from thinsection.encode import TileEncoder

PATH_COLUMNS = ("embeddings", "path", "image")
LABEL_COLUMNS = ("label", "target")
ROBUSTNESS_COLUMNS = ("slide_id", "biological_class", "medical_center")
# columns of a table of values that are no targets; fold_* neither
_NO_TARGETS = frozenset(
    {*PATH_COLUMNS, *CASE_COLUMNS, "row", "slide_id", "split", "x", "y", "origin"}
)


class Sources(NamedTuple):
    """Places of the rows of a table, one entry a row."""

    paths: list[Path]
    rows: list[str]  # in the file; '' where it holds one
    names: list[str]  # the same, whichever encoder's file holds the row

    def take(self, entries: Sequence[int]) -> "Sources":
        """Places of some rows."""
        return Sources(
            [self.paths[entry] for entry in entries],
            [self.rows[entry] for entry in entries],
            [self.names[entry] for entry in entries],
        )


def load_tiles(path: Path, config: ProbeConfig) -> TileSet:
    """Labelled tile embeddings of a path; images are embedded by the configuration's encoder.

    Memory: 12 N D at most while rows are split, 4 N D after; the largest file. Raises DatasetError:
    see `check_tile_set`.
    """
    rows = _labelled_rows(path, config)
    if rows.embeddings is not None:
        train, val = rows.fold
        data = rows.tile_set((rows.embeddings[train], rows.embeddings[val]))
    else:
        data = images.embed_rows(
            rows, _encoder(config), batch_size=config.compute.batch_size
        )
    data = replace(data, allow_leakage=config.data.allow_leakage)
    if config.data.test is not None:
        test_data = replace(config.data, test=None, allow_leakage=True)
        test = load_tiles(config.data.test, replace(config, data=test_data))
        data = data.tested_on(test)
    return sets.check_tile_set(data)


def image_rows(path: Path, config: ProbeConfig) -> tuple[LabelledRows, "TileEncoder"]:
    """Labelled images that are not yet embedded, and the encoder that would."""
    return _labelled_rows(path, config), _encoder(config)


def _labelled_rows(path: Path, config: ProbeConfig) -> LabelledRows:
    """The rows of a path, as many of a class as are asked for."""
    data = config.data
    seed = config.protocol.seed
    layout = str(data.layout)
    if layout == "auto":
        layout = _layout_of(path, data)
    if layout == "manifest":
        rows = load_manifest(path, data, seed=seed)
    elif data.held_out != tables.VAL:
        raise DatasetError(
            f"held_out test needs a table with a split column, got {data.held_out!r} for "
            f"{str(path)!r}"
        )
    elif layout == "tiles" or embeddings.is_results(path):
        files = embeddings.find_tile_files(path)
        rows = load_regions(files, data.labels, seed=seed)
    else:
        rows = images.load_images(layout, path, seed=seed)
    if data.max_per_class is None:
        return rows
    return rows.at_most_per_class(data.max_per_class, seed=seed)


def _layout_of(path: Path, data: DataSection) -> str:
    """Layout of data that nobody names: 'tiles', 'manifest' or 'folder'."""
    if not path.exists():
        raise DatasetError(f"data must exist, got {str(path)!r}")
    suffix = path.suffix.lower()
    if data.labels is not None or suffix in embeddings.H5_SUFFIXES:
        return "tiles"
    if any(path.glob("*.h5")):
        return "tiles"
    return "manifest" if suffix in tables.TABLE_SUFFIXES else "folder"


def _sources(
    rows: Sequence[TextRow], column: str, table: Path, data: DataSection
) -> Sources:
    """Files of the rows of a table: `embeddings`, or paths below `root`."""
    if data.embeddings:
        paths = [data.embeddings] * len(rows)
        stems = [table.stem] * len(rows)
    else:
        paths = [(data.root or table.parent) / row[column] for row in rows]
        stems = [path.name for path in paths]
    places = [row.get("row", "") for row in rows]
    names = [
        f"{stem}:{place}" if place else stem
        for stem, place in zip(stems, places, strict=True)
    ]
    return Sources(paths, places, names)


def _first_column(row: TextRow, names: Sequence[str], table: Path) -> str:
    """The first of some columns that a table has."""
    present = [name for name in names if name in row]
    if not present:
        raise DatasetError(
            f"manifest must have a column {' or '.join(map(repr, names))}, "
            f"got {', '.join(row)} in {str(table)!r}"
        )
    return present[0]


def load_manifest(
    table: Path, data: DataSection | None = None, *, seed: int = 1337
) -> LabelledRows:
    """The tiles that a manifest lists: paths below `root`, or rows of `embeddings`, one by one."""
    data = data or DataSection()
    listed = tables.read_rows(table, ())
    where = repr(str(table))
    label = _first_column(listed[0], LABEL_COLUMNS, table)
    column = "" if data.embeddings else _first_column(listed[0], PATH_COLUMNS, table)
    labelled = [{**row, "label": row[label]} for row in listed]
    rows = tables.open_rows(labelled, where, data.held_out)
    sources = _sources(rows, column, table, data)
    rule = "split column"
    if data.held_out == TEST:
        rule = "split column, scored on test"
    suffixes = {path.suffix.lower() for path in sources.paths}
    if suffixes <= {*images.IMAGE_SUFFIXES}:
        return sets.label_rows(
            rows,
            table.stem,
            where=where,
            rule=rule,
            seed=seed,
            facts={"manifest": table.name},
            images=[sets.ImageRef(path) for path in sources.paths],
        )
    if not suffixes <= {*embeddings.EMBEDDING_SUFFIXES}:
        raise DatasetError(
            f"files must be all images ({', '.join(images.IMAGE_SUFFIXES)}) or all embeddings "
            f"({', '.join(embeddings.EMBEDDING_SUFFIXES)}), got {', '.join(sorted(suffixes))} "
            f"in {where}"
        )
    left_out: dict[str, str] = {}
    vectors, kept = embeddings.gather_rows(
        sources.paths, sources.rows, table, left_out.__setitem__
    )
    rows = [rows[entry] for entry in kept]
    names = [sources.names[entry] for entry in kept]
    pairs = zip(rows, names, strict=True)
    return sets.label_rows(
        rows,
        table.stem,
        where=where,
        rule=rule,
        seed=seed,
        facts={"manifest": table.name, **sets.left_out_fact(left_out)},
        ids=[row.get("origin") or name for row, name in pairs],
        embeddings=vectors,
    )


def load_values(path: Path, config: ProbeConfig) -> ValueSet:
    """Rows of a table with numbers to predict: every column that names no row, split or group.

    Folds are its columns fold_*, or its split, else one of three over groups (rows). A folder of a
    task of HEST-bench is read as its authors publish it. Memory: 4 N D + 8 N T.
    """
    if is_hest_task(path):
        return load_hest(
            path,
            config.data.embeddings,
            load_encoder=lambda: _encoder(config),
            batch_size=config.compute.batch_size,
        )
    where = repr(str(path))
    listed = tables.read_rows(path, ())
    column = ""
    if config.data.embeddings is None:
        column = _first_column(listed[0], PATH_COLUMNS, path)
    else:
        listed = [{"row": str(place)} | row for place, row in enumerate(listed)]
    rows = tables.open_rows(listed, where)
    names = tuple(
        name
        for name in listed[0]
        if name not in _NO_TARGETS and not name.startswith("fold_")
    )
    if not names:
        raise DatasetError(
            f"table must have a column of numbers to predict, got none in {where}"
        )
    with rewording("targets must be numbers", path, ValueError, error=DatasetError):
        targets = np.array([[float(row[name]) for name in names] for row in rows])
    if not np.isfinite(targets).all():
        raise DatasetError(f"targets must be finite, got NaN or inf in {where}")
    left_out: dict[str, str] = {}
    sources = _sources(rows, column, path, config.data)
    vectors, kept = embeddings.gather_rows(
        sources.paths, sources.rows, path, left_out.__setitem__
    )
    rows = [rows[entry] for entry in kept]
    sources = sources.take(kept)
    targets = targets[kept]
    groups = table_groups(rows, where)
    fold_columns = [name for name in listed[0] if name.startswith("fold_")]
    if not fold_columns and "split" in listed[0]:
        fold_columns = ["split"]
    folds: Sequence[Fold] = tables.column_folds(rows, fold_columns, where)
    if not folds:
        owners = groups.of_row if groups else sources.rows
        strata = np.zeros(len(rows), dtype=np.int64)
        seed = config.protocol.seed
        folds = grouped_folds(strata, owners, folds=sets.FOLDS, seed=seed)
    return ValueSet(
        name=path.stem,
        ids=tuple(sources.names),
        embeddings=vectors,
        target_names=names,
        targets=targets,
        folds=tuple(folds),
        groups=groups,
        facts={
            "table": path.name,
            "targets": len(names),
            **sets.left_out_fact(left_out),
            **embeddings.encoder_facts(sources.paths[0]),
        },
    )


def load_robustness(path: Path, config: ProbeConfig) -> RobustnessSet:
    """The tiles that a table lists (slide_id, biological_class, medical_center).

    Memory: 4 N D + what embeds the images.
    """
    rows = tables.read_rows(path, ROBUSTNESS_COLUMNS)
    file = config.data.embeddings
    if file is None and "path" in rows[0]:
        encoder = _encoder(config)
        encode, words = images.class_and_mean(encoder)
        refs = [sets.ImageRef(path.parent / row["path"]) for row in rows]
        left_out: dict[str, str] = {}
        vectors, kept = images.embed_images(
            refs,
            encode,
            batch_size=config.compute.batch_size,
            leave_out=left_out.__setitem__,
        )
        rows = [rows[row] for row in kept]
        facts: dict[str, Json] = {
            "embedding": words,
            **sets.left_out_fact(left_out),
            **images.encoder_facts(encoder),
        }
    elif file is None or not file.is_file():
        raise ConfigError(
            f"embeddings must be a file, got {file}; pass embeddings=FILE, or add a column "
            "'path' of images to the table"
        )
    else:
        places = [row.get("row") or str(place) for place, row in enumerate(rows)]
        vectors, _ = embeddings.gather_rows([file] * len(rows), places, path)
        facts = {"embedding": file.name}
    settings = config.protocol.robustness
    in_pairs = settings is not None and path.stem in settings.paired_subsets
    pairs: tuple[str, ...] = ()
    if in_pairs and "subset" in rows[0]:
        pairs = tuple(row["subset"] for row in rows)
    return RobustnessSet(
        name=path.stem,
        embeddings=vectors,
        biological_class=tuple(row["biological_class"] for row in rows),
        medical_center=tuple(row["medical_center"] for row in rows),
        slide_id=tuple(row["slide_id"] for row in rows),
        pair=pairs,
        groups=table_groups(rows, repr(str(path))),
        facts={"table": path.name, **facts},
    )


def _encoder(config: ProbeConfig) -> "TileEncoder":
    from thinsection.encode import DEFAULT_ENCODER, load_encoder

    return load_encoder(
        config.data.encoder or DEFAULT_ENCODER,
        device=config.compute.device,
        precision=config.compute.precision,
        engine=config.compute.engine,
    )
