"""HDF5 datasets with checksums, read without trust.

Each dataset that we write has a hash of its values, type, shape and attributes, which readers
compare. Links to other files are not followed, and a dataset cannot declare more values than its
file can hold. Embeddings must be finite, and must agree with the ledger of their slide.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError, StoreError
from thinsection.files.atomic import KeepingFile, parse_json
from thinsection.store.ledger import LEDGER_NAME, SLIDES, load_ledger
from thinsection.types import PlainValues, format_bytes

if TYPE_CHECKING:
    import h5py


Values = npt.NDArray[Any]  # the file decides the type

# Name of a dataset's attribute with its hash.
CHECKSUM = "thinsection_sha256"
# Name of a file's attribute with the names of its datasets and groups, as JSON.
DATASETS = "thinsection_datasets"
# larger attributes cannot be stored in HDF5
_MAX_ATTRIBUTE_BYTES = 60_000
# Smaller datasets would become larger by compression.
_LEAST_COMPRESSED_BYTES = 4096
# Largest allowed ratio of declared bytes to file size; deflate reaches 1,032 for constant values.
_MAX_UNPACKED = 4096


@contextmanager
def new_h5(path: Path) -> "Iterator[h5py.File]":
    """Opens a new HDF5 file; OSError at the end of the block if it was not written completely."""
    import h5py

    with KeepingFile(path, "w+") as raw, h5py.File(raw, "w") as file:
        yield file
        list_datasets(file)


def open_h5(path: Path) -> "h5py.File":
    """Opens a file for reading.

    Raises:
        StoreError: the file is missing, not HDF5, truncated, or is ours and lacks a dataset that
            was written.
    """
    import h5py

    try:
        file = h5py.File(path, "r", locking="best-effort")
    except OSError as error:
        reason = "no such file" if not Path(path).exists() else str(error)
        raise StoreError(
            f"tiles file must be readable HDF5, got {str(path)!r}: {reason}"
        ) from None
    try:
        _check_names(file, path)
    except StoreError:
        file.close()
        raise
    return file


def list_datasets(file: "h5py.File") -> None:
    """Stores the names of a file's datasets, so that readers notice if one is lost."""
    text = json.dumps(_names_in(file))
    if len(text) < _MAX_ATTRIBUTE_BYTES:
        file.attrs[DATASETS] = text


def _names_in(file: "h5py.File") -> list[str]:
    names: list[str] = []
    file.visit_links(names.append)
    return sorted(names)


def _is_in_group(file: "h5py.File", name: str) -> bool:
    """True if a dataset's group is still a group, or is missing too."""
    import h5py

    parent = name.rpartition("/")[0]
    if not parent or parent not in _names_in(file):
        return True
    link = file.get(parent, getlink=True)
    return isinstance(link, h5py.HardLink) and isinstance(file[parent], h5py.Group)


def _check_names(file: "h5py.File", path: Path) -> None:
    """Raises StoreError: a file of ours lacks a dataset that was written; others may be added."""
    if DATASETS not in file.attrs:
        return
    try:
        recorded = {str(name) for name in parse_json(file.attrs[DATASETS])}
        missing = recorded.difference(_names_in(file))
        # if something else replaced a group, reading the group by name raises the error
        missing = {name for name in missing if _is_in_group(file, name)}
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"names of datasets must be readable, got {error} in {str(path)!r}"
        ) from None
    if missing:
        raise StoreError(
            f"file must contain the datasets that were written, got none of "
            f"{sorted(missing)} in {str(path)!r}; remove the file and run the same command again"
        )


def add_dataset(
    file: "h5py.File",
    name: str,
    values: Values,
    attributes: PlainValues | None = None,
    *,
    compressed: bool = False,
) -> None:
    """Writes a dataset with its attributes and checksum; datasets of some kB may be compressed."""
    if compressed and values.nbytes >= _LEAST_COMPRESSED_BYTES:
        dataset = file.create_dataset(
            name, data=values, compression="gzip", shuffle=True
        )
    else:
        dataset = file.create_dataset(name, data=values)
    dataset.attrs.update(attributes or {})
    dataset.attrs[CHECKSUM] = dataset_checksum(dataset, _hash_values(values))


def dataset_checksum(dataset: "h5py.Dataset", of_values: "hashlib._Hash") -> str:
    """Hash of a dataset's values, type, shape and attributes."""
    attributes = {
        name: np.asarray(value).tolist()
        for name, value in sorted(dataset.attrs.items())
        if name != CHECKSUM
    }
    description = json.dumps(
        [dataset.dtype.str, dataset.shape, attributes], default=str
    )
    digest = of_values.copy()
    digest.update(description.encode())
    return digest.hexdigest()


def _hash_values(values: Values) -> "hashlib._Hash":
    return hashlib.sha256(np.ascontiguousarray(values).data)


def read_values(
    file: "h5py.File", name: str, path: Path, *, verify: bool = True
) -> Values:
    """Reads a dataset of numbers, and compares it with its checksum, if it has one.

    Raises:
        StoreError: the dataset is missing, damaged, or not in the file itself.
    """
    dataset = stored_dataset(file, name, path)
    values = _read_part(dataset, (), path)
    if verify and CHECKSUM in dataset.attrs:
        _compare(dataset, _hash_values(values), path)
    return values


def read_blocks(
    dataset: "h5py.Dataset", path: Path, num_rows: int, *, verify: bool = True
) -> Iterator[Values]:
    """Reads a dataset in blocks of rows, and compares it with its checksum after the last one.

    Memory: one block.

    Raises:
        StoreError: the dataset is damaged.
    """
    digest = hashlib.sha256()
    verify = verify and CHECKSUM in dataset.attrs
    for start in range(0, len(dataset), num_rows):
        block = _read_part(dataset, slice(start, start + num_rows), path)
        if verify:
            digest.update(np.ascontiguousarray(block).data)
        yield block
    if verify:
        _compare(dataset, digest, path)


def _read_part(dataset: "h5py.Dataset", part: slice | tuple[()], path: Path) -> Values:
    try:
        return np.asarray(dataset[part])
    except (OSError, RuntimeError) as error:
        raise StoreError(
            f"{_name_of(dataset)!r} must be readable, got {error} in {str(path)!r}"
        ) from None


def _compare(dataset: "h5py.Dataset", of_values: "hashlib._Hash", path: Path) -> None:
    """Raises StoreError: a dataset does not have its checksum."""
    if dataset.attrs[CHECKSUM] != dataset_checksum(dataset, of_values):
        raise StoreError(
            f"{_name_of(dataset)!r} must contain the bytes that were written, got other bytes "
            f"in {str(path)!r}; remove the file and run the same command again"
        )


def _name_of(dataset: "h5py.Dataset") -> str:
    return str(dataset.name).lstrip("/")


def stored_dataset(file: "h5py.File", name: str, path: Path) -> "h5py.Dataset":
    """Returns a dataset of numbers that is stored in the file itself.

    A tiny file can declare a dataset of any size without storing values. Therefore more than
    `_MAX_UNPACKED` declared bytes per byte of the file are refused.

    Raises:
        StoreError: there is no such dataset.
    """
    import h5py

    if name not in file:
        raise StoreError(
            f"tiles file must contain {name!r}, got {sorted(file)} in {str(path)!r}; expected a "
            "tiles.h5 of thinsection, or a features file of TRIDENT or CLAM"
        )
    item = _linkless_item(file, name, path)
    # False for h5py.Empty
    is_dataset = isinstance(item, h5py.Dataset) and item.shape is not None
    if not is_dataset or item.dtype.kind not in "biuf":
        raise StoreError(
            f"{name!r} must be a dataset of numbers, got {item!r} in {str(path)!r}"
        )
    if item.is_virtual or item.external:
        raise StoreError(
            f"{name!r} must be stored in its own file, got {item!r} in {str(path)!r}"
        )
    declared_bytes = item.dtype.itemsize * math.prod(item.shape)
    if declared_bytes > _MAX_UNPACKED * Path(path).stat().st_size:
        raise StoreError(
            f"{name!r} must have at most as many values as its file can store, got "
            f"{format_bytes(declared_bytes)} of shape {item.shape} in {str(path)!r}; the file "
            "is damaged"
        )
    return item


def stored_group(file: "h5py.File", name: str, path: Path) -> "h5py.Group":
    """Returns a group that is stored in the file itself.

    Raises:
        StoreError: the name belongs to something else.
    """
    import h5py

    item = _linkless_item(file, name, path)
    if not isinstance(item, h5py.Group):
        raise StoreError(f"{name!r} must be a group, got {item!r} in {str(path)!r}")
    return item


def _linkless_item(
    file: "h5py.File", name: str, path: Path
) -> "h5py.Dataset | h5py.Group":
    """Returns the item with this name; no part of the name may be a link."""
    import h5py

    parts = name.split("/")
    for depth in range(len(parts)):
        prefix = "/".join(parts[: depth + 1])
        link = file.get(prefix, getlink=True)
        if not isinstance(link, h5py.HardLink):
            raise StoreError(
                f"{prefix!r} must not be a link, got a link {vars(link)} in {str(path)!r}"
            )
    return file[name]


def damaged_datasets(path: Path) -> tuple[int, list[str]]:
    """Checks every dataset of an HDF5 file of ours.

    Returns:
        The number of datasets with a checksum, and the damage of the file: one message or none.
    """
    import h5py

    num_checked = 0
    names: list[str] = []
    try:
        with open_h5(path) as file:
            file.visit_links(names.append)
            for name in names:
                if not isinstance(_linkless_item(file, name, path), h5py.Group):
                    read_values(file, name, path)
                    num_checked += CHECKSUM in file[name].attrs
    except (StoreError, RuntimeError) as error:
        return num_checked, [str(error)]
    return num_checked, []


_SHOWN_ROWS = 3  # largest number of rows in a message


def check_finite(
    values: npt.NDArray[np.floating], path: Path, *, first_row: int = 0
) -> None:
    """Checks that embeddings (N, D) are finite.

    Memory: 8 N bytes if a value is not finite.

    Raises:
        InvalidInputError: NaN or infinity; the message names rows of the file.
    """
    # a sum in float32 is quick, but may overflow although every value is finite
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(values.sum(dtype=np.float32)):
            return
        rows = np.flatnonzero(~np.isfinite(values.sum(axis=-1, dtype=np.float64)))
    if len(rows):
        names = ", ".join(str(row + first_row) for row in rows[:_SHOWN_ROWS].tolist())
        more = ", ..." if len(rows) > _SHOWN_ROWS else ""
        raise InvalidInputError(
            f"embeddings must be finite, got NaN or inf in {len(rows)} of {len(values)} rows "
            f'({names}{more}) of {str(path)!r}; compute these again with precision="fp32"'
        )


def check_recorded(
    path: Path,
    attributes: PlainValues,
    *,
    num_tiles: int | None = None,
    channels: int | None = None,
) -> None:
    """Compares `GRID/FOLDER/ID.h5` of a results folder with the ledger of its slide.

    A file that no ledger lists (of another tool, or copied elsewhere) is not checked.

    Args:
        path: path of the file.
        attributes: attributes of the file and its datasets.
        num_tiles: number of coordinates; None for a file with a slide embedding.
        channels: channels of the embeddings; None for a tile table.

    Raises:
        StoreError: the ledger is damaged, or the file has another size, another number of tiles or
            channels, or values of another slide.
    """
    place = path.absolute()
    if len(place.parts) < 4:
        return
    out = place.parents[2]
    slide_id = path.stem
    if not (out / SLIDES / slide_id / LEDGER_NAME).is_file():
        return
    ledger = load_ledger(out, slide_id)
    ledger.check()
    grid = place.parts[-3]
    record = ledger.stages.get(f"{grid}/{place.parts[-2]}")
    name = str(place.relative_to(out))
    if record is None or name not in record.files:
        return
    size = path.stat().st_size
    content = "tile table" if channels is None else "embeddings"
    if size != record.files[name]:
        raise StoreError(
            f"{content} must have the {record.files[name]} bytes that were written, got "
            f"{size} in {str(path)!r}; remove the file and run the same command again"
        )
    if num_tiles is not None:
        tiles = ledger.stages.get(f"{grid}/tiles")
        recorded_tiles = None if tiles is None else tiles.facts.get("num_tiles")
        _check_number(num_tiles, recorded_tiles, f"{content} must have", "tiles", path)
    if channels is not None:
        fact = "slide_dim" if num_tiles is None else "dim"
        recorded_channels = record.facts.get(fact)
        _check_number(
            channels, recorded_channels, f"{content} must have", "channels", path
        )
    owner = attributes.get("name") if "thinsection_version" in attributes else None
    if owner is not None and owner != slide_id:
        raise StoreError(
            f"{content} must be of the slide {slide_id!r}, got that of {owner!r} in "
            f"{str(path)!r}; remove the file and run the same command again"
        )


def _check_number(
    number: int, recorded: object, rule: str, unit: str, path: Path
) -> None:
    """Raises StoreError: a number differs from the ledger's; nothing if the ledger has none."""
    if recorded is not None and number != recorded:
        raise StoreError(
            f"{rule} the {recorded} {unit} that were written, got {number} in "
            f"{str(path)!r}; remove the file and run the same command again"
        )
