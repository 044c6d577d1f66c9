"""Damaged OME-Zarr folders and DICOM files: chunks, metadata and elements."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from tests.fuzz.data_mutants import change_json
from tests.support.mutants import mutate

Random = np.random.Generator

_ELEMENT_VALUES: tuple[Any, ...] = (
    None,
    "",
    0,
    1,
    -1,
    7,
    65535,
    2**31 - 1,
    2**32 - 1,
    "x",
    "1\\2\\3",
    b"\x00\xff",
    0.0,
    1e308,
)


def damage_zarr(folder: Path, rng: Random) -> str:
    """Damages files of a folder of chunks, and returns in words what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    metadata = [path for path in files if path.name[0] == "." or path.suffix == ".json"]
    chunks = [path for path in files if path not in metadata]
    done = []
    for _ in range(int(rng.choice((1, 1, 2, 5)))):
        among = metadata if rng.random() < 0.5 else chunks
        path = among[int(rng.integers(len(among)))]
        name = path.relative_to(folder).as_posix()
        if not path.is_file():
            continue
        kind = rng.random()
        if path in metadata and kind < 0.7:
            try:
                value, how = change_json(json.loads(path.read_text()), rng)
            except ValueError:  # damaged before
                continue
            path.write_text(json.dumps(value))
        elif kind < 0.15:
            path.unlink()
            how = "removed"
        elif kind < 0.25:
            path.unlink()
            path.mkdir()
            how = "a folder"
        elif kind < 0.5 and path in chunks:
            other = chunks[int(rng.integers(len(chunks)))]
            how = f"is {other.relative_to(folder).as_posix()}"
            if other.is_file() and other != path:
                shutil.copy(other, path)
        else:
            data, how = mutate(path.read_bytes(), rng)
            path.write_bytes(data)
        done.append(f"{name}: {how}")
    return ", ".join(done)


def mutate_dicom(data: bytes, rng: Random) -> tuple[bytes, str]:
    """A DICOM file with other elements, or other bytes; see `mutate`."""
    import pydicom

    if rng.random() < 0.4:
        return mutate(data, rng)
    done = []
    dataset = pydicom.dcmread(io.BytesIO(data))
    for _ in range(int(rng.choice((1, 1, 2)))):
        items = [dataset, dataset.file_meta]
        for element in dataset:
            if element.VR == "SQ" and element.value:
                items += list(element.value)
        item = items[int(rng.integers(len(items)))]
        tags = [tag for tag in item.keys() if tag != (0x7FE0, 0x0010)]  # noqa: SIM118
        if not tags:
            continue
        tag = tags[int(rng.integers(len(tags)))]
        name = item[tag].keyword or str(tag)
        if rng.random() < 0.3:
            del item[tag]
            done.append(f"no {name}")
            continue
        value = _ELEMENT_VALUES[int(rng.integers(len(_ELEMENT_VALUES)))]
        before = item[tag].value
        item[tag]._value = value
        try:
            dataset.save_as(io.BytesIO(), enforce_file_format=False)
        except Exception:  # noqa: BLE001 - no such value can be written
            item[tag]._value = before
        else:
            done.append(f"{name} is {str(value)[:20]!r}")
    written = io.BytesIO()
    try:
        dataset.save_as(written, enforce_file_format=False)
    except Exception:  # noqa: BLE001 - without its head it cannot be written
        return mutate(data, rng)
    return written.getvalue(), ", ".join(done) or "written again"
