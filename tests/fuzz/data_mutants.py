"""Damaged results, models, tables and settings: seeded changes that know each form.

    text = damage(path, np.random.default_rng((seed, number)))

Half of the changes keep the form whole (another value, a missing column, a dataset of another
shape), because a file whose form is broken is refused early. The others are bytes.
"""

import csv
import io
import json
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from tests.support.mutants import mutate

Random = np.random.Generator
# changes the file in place, and says what it did
Change = Callable[[Path, Random], str]

_DEEP = 3000
_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    7,
    2**31,
    2**63,
    -(2**70),
    0.5,
    -0.0,
    1e308,
    1e-320,
    float("nan"),
    float("inf"),
    "",
    " ",
    "nan",
    "x",
    "x" * 5000,
    "ü\u202e\U0001f9ec",
    "\ud800",
    "\x00",
    "../../x",
    "/etc/passwd",
    "a\nb",
    "[bold]",
    "<script>alert(1)</script>",
    "{0}{x}%s%(x)s",
    [],
    {},
    [[]],
    [None],
    [0] * 40,
    {"": 0},
    {"__class__": "x"},
)
_CELLS = (
    "",
    " ",
    "nan",
    "NA",
    "None",
    "0",
    "-1",
    "1e400",
    "1e-320",
    "inf",
    "9" * 400,
    "0x10",
    "1,5",
    "x" * 5000,
    "=1+1",
    '"',
    "a\nb",
    "\x00",
    "ü\u202e",
    "../../x",
    "/etc/passwd",
    "http://127.0.0.1/x.svs",
    "[bold]",
    "{0}%s",
    "2020-13-45",
    "true",
)
_TOML = (
    "-1",
    "0",
    "1e400",
    "nan",
    "inf",
    '""',
    '"x"',
    '"../../x"',
    "[]",
    "{}",
    "[[]]",
    "true",
    "9" * 30,
    '"' + "x" * 5000 + '"',
    '"\\u0000"',
    "2020-01-01",
    "[1, 'a']",
    "",
    "?",
    '"[bold]"',
    '"os:system"',
)


def damage(path: Path, rng: Random, others: tuple[Path, ...] = ()) -> str:
    """Changes a file, one to three times, and returns in words what was done.

    Args:
        path: the file.
        rng: where every choice comes from.
        others: sound files of the same kind, one of which may take its place.
    """
    forms = FORMS.get(path.suffix, ())
    done = []
    for _ in range(int(rng.choice((1, 1, 1, 2, 3)))):
        if others and rng.random() < 0.05:
            other = others[int(rng.integers(len(others)))]
            path.write_bytes(other.read_bytes())
            done.append(f"is {other.name}")
        elif forms and rng.random() < 0.75:
            change = forms[int(rng.integers(len(forms)))]
            try:
                done.append(change(path, rng))
            except Exception:  # noqa: BLE001 - an earlier change has broken the form
                done.append(_bytes(path, rng))
        else:
            done.append(_bytes(path, rng))
    return ", ".join(done)


def _pick(rng: Random, values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def _bytes(path: Path, rng: Random) -> str:
    kind = rng.random()
    if kind < 0.04:
        path.write_bytes(b"")
        return "emptied"
    if kind < 0.08:
        path.unlink()
        path.mkdir()
        return "a folder"
    if not path.is_file():
        return "left as it is"
    data = path.read_bytes()
    if kind < 0.12 and len(data) > 4:
        a, b = sorted(int(n) for n in rng.integers(len(data), size=2))
        c = (a + b) // 2
        path.write_bytes(data[:a] + data[c:b] + data[a:c] + data[b:])
        return f"{a}:{c} and {c}:{b} swapped"
    data, how = mutate(data, rng)
    path.write_bytes(data)
    return how


# JSON and GeoJSON


def _json_places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key or index) below a value."""
    places = []
    waiting = [value]
    while waiting and len(places) < 20000:
        container = waiting.pop()
        pairs = (
            container.items() if isinstance(container, dict) else enumerate(container)
        )
        for key, item in pairs:
            places.append((container, key))
            if isinstance(item, dict | list):
                waiting.append(item)
    return places


def change_json(value: Any, rng: Random) -> tuple[Any, str]:
    """A value with one change somewhere, and what it was."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.04:
        new = _pick(rng, _VALUES)
        return new, f"all is {str(new)[:20]!r}"
    places = _json_places(value)
    # a document has more numbers than fields: half of the changes are near its top
    if rng.random() < 0.5:
        places = places[:40]
    container, key = _pick(rng, places)
    kind = int(rng.integers(6))
    if kind == 0:
        del container[key]
        return value, f"no {key!r}"
    if kind == 1:
        other, name = _pick(rng, places)
        container[key], other[name] = other[name], container[key]
        try:
            json.dumps(value)
        except (ValueError, RecursionError):  # it holds itself now
            container[key] = None
        return value, f"{key!r} and {name!r} swapped"
    if kind == 2 and isinstance(container, dict):
        container[f"{key}x"] = container.pop(key)
        return value, f"{key!r} renamed"
    if kind == 3 and isinstance(container[key], int | float):
        factor = float(_pick(rng, (-1, 0, 2, 1.0001, 1e9)))
        container[key] = type(container[key])(container[key] * factor)
        return value, f"{key!r} times {factor:g}"
    if kind == 4 and isinstance(container[key], list):
        container[key] = container[key] * 2
        return value, f"{key!r} twice"
    new = _pick(rng, _VALUES)
    container[key] = new
    return value, f"{key!r} is {str(new)[:20]!r}"


def _json(path: Path, rng: Random) -> str:
    value, how = change_json(json.loads(path.read_text()), rng)
    path.write_text(json.dumps(value))
    return how


def _json_text(path: Path, rng: Random) -> str:
    text = path.read_text()
    kind = int(rng.integers(4))
    if kind == 0:
        path.write_text("[" * _DEEP + "]" * _DEEP)
        return "nested deep"
    if kind == 1:
        path.write_bytes(text.encode("utf-16"))
        return "UTF-16"
    if kind == 2:
        path.write_bytes(b"\xef\xbb\xbf" + text.encode())
        return "with a byte order mark"
    path.write_text(text + text)
    return "twice in a file"


# tables


def change_rows(rows: list[list[Any]], rng: Random) -> str:
    """Changes a table in place, and says how."""
    kind = int(rng.integers(9))
    row = int(rng.integers(len(rows)))
    width = max(1, len(rows[0]))
    column = int(rng.integers(width))
    if kind <= 2:
        rows[row] += [""] * (column + 1 - len(rows[row]))
        rows[row][column] = _pick(rng, _CELLS)
        return f"row {row} column {column} is {str(rows[row][column])[:20]!r}"
    if kind == 3:
        cell = _pick(rng, _CELLS)
        for cells in rows[1:]:
            if column < len(cells):
                cells[column] = cell
        return f"all of column {column} are {cell[:20]!r}"
    if kind == 4:
        rows.append(list(rows[row]))
        return f"row {row} twice"
    if kind == 5:
        rows[row] = rows[row][:column]
        return f"row {row} has {column} cells"
    if kind == 6:
        for cells in rows:
            cells.extend(cells[column : column + 1])
        return f"column {column} twice"
    if kind == 7:
        for cells in rows:
            del cells[column : column + 1]
        return f"no column {column}"
    del rows[row]
    return f"no row {row}"


def _delimiter(path: Path) -> str:
    return "\t" if path.suffix == ".tsv" else ","


def _table(path: Path, rng: Random) -> str:
    delimiter = _delimiter(path)
    rows = list(csv.reader(io.StringIO(path.read_text()), delimiter=delimiter))
    how = change_rows(rows, rng)
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter)
    writer.writerows(rows)
    path.write_text(text.getvalue(), encoding="utf-8", errors="surrogatepass")
    return how


def _table_text(path: Path, rng: Random) -> str:
    text = path.read_text()
    encoding = str(_pick(rng, ("utf-16", "utf-8-sig", "utf-32")))
    if rng.random() < 0.5:
        path.write_bytes(text.encode(encoding))
        return encoding
    other = str(_pick(rng, (";", "\t", "|")))
    path.write_text(text.replace(_delimiter(path), other))
    return f"divided by {other!r}"


def _workbook(path: Path, rng: Random) -> str:
    import openpyxl

    book = openpyxl.load_workbook(path)
    sheet = book.worksheets[0]
    rows = [list(cells) for cells in sheet.iter_rows(values_only=True)]
    how = change_rows(rows, rng)
    book.remove(sheet)
    sheet = book.create_sheet()
    for cells in rows:
        plain = [re.sub(r"[\x00-\x1f]", "", str(cell or "")) for cell in cells]
        sheet.append(plain)
    book.save(path)
    return how


def _archive(path: Path, rng: Random) -> str:
    """One member of an archive, damaged, with a right checksum."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = _pick(rng, sorted(members))
    members[name], how = mutate(members[name], rng)
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)
    return f"{name}: {how}"


def _parquet(path: Path, rng: Random) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    kind = int(rng.integers(4))
    if kind == 0:
        name = str(_pick(rng, table.column_names))
        pq.write_table(table.drop_columns([name]), path)
        return f"no column {name!r}"
    if kind == 1:
        pq.write_table(table.slice(0, 0), path)
        return "no rows"
    name = str(_pick(rng, table.column_names))
    place = table.column_names.index(name)
    types: tuple[Any, ...] = (
        [{"a": 1}] * len(table),
        [[1, 2]] * len(table),
        [b"\xff\x00"] * len(table),
        [None] * len(table),
        [True] * len(table),
        [float("nan")] * len(table),
        [2**62] * len(table),
    )
    column = _pick(rng, types)
    table = table.set_column(place, name, pa.array(column))
    pq.write_table(table, path)
    return f"column {name!r} of {str(column[:1])[:20]}"


# settings


def _toml(path: Path, rng: Random) -> str:
    lines = path.read_text().splitlines()
    row = int(rng.integers(len(lines)))
    kind = int(rng.integers(5))
    if kind == 0:
        removed = lines.pop(row)
        how = f"no {removed[:30]!r}"
    elif kind == 1:
        lines.insert(row, lines[row])
        how = f"{lines[row][:30]!r} twice"
    elif kind == 2:
        other = int(rng.integers(len(lines)))
        lines[row], lines[other] = lines[other], lines[row]
        how = f"lines {row} and {other} swapped"
    elif kind == 3 and "=" in lines[row]:
        name, _, value = lines[row].partition("=")
        lines[row] = f"{name.strip()}x ={value}"
        how = f"{name.strip()!r} renamed"
    else:
        name = lines[row].partition("=")[0].strip()
        value = str(_pick(rng, _TOML))
        lines[row] = f"{name} = {value}"
        how = f"{name!r} is {value[:20]}"
    path.write_text("\n".join(lines) + "\n")
    return how


# HDF5


def _h5(path: Path, rng: Random) -> str:
    with h5py.File(path, "r+") as file:
        names = list[str]()
        file.visit(names.append)
        name = str(_pick(rng, names))
        item = file[name]
        kind = int(rng.integers(9))
        if kind <= 1 and len(item.attrs):
            attribute = str(_pick(rng, sorted(item.attrs)))
            return f"{name}.{attribute} {_attribute(item, attribute, rng)}"
        if kind <= 2 and len(file.attrs):
            attribute = str(_pick(rng, sorted(file.attrs)))
            return f"{attribute} {_attribute(file, attribute, rng)}"
        if kind == 3:
            del file[name]
            return f"no {name}"
        if kind == 4:
            del file[name]
            target = _pick(rng, ("/nowhere", f"/{name}", "/"))
            file[name] = h5py.SoftLink(target)
            if rng.random() < 0.5:
                del file[name]
                file[name] = h5py.ExternalLink("/etc/passwd", "/x")
            return f"{name} is a link"
        if not isinstance(item, h5py.Dataset) or item.shape is None:
            return "left as it is"
        values = item[()]
        if kind in (5, 6):
            return f"{name} {_values(item, values, rng)}"
        attributes = dict(item.attrs)
        del file[name]
        new, how = _other_dataset(values, rng)
        if isinstance(new, h5py.Empty) or new is not None:
            file[name] = new
            file[name].attrs.update(attributes)
        else:
            file.create_group(name).attrs.update(attributes)
        return f"{name} {how}"


def _attribute(item: Any, name: str, rng: Random) -> str:
    if rng.random() < 0.3:
        del item.attrs[name]
        return "removed"
    before = item.attrs[name]
    if isinstance(before, str) and before.startswith("{") and rng.random() < 0.5:
        value, how = change_json(json.loads(before), rng)
        item.attrs[name] = json.dumps(value)
        return how
    values = (0, -1, 1e308, float("nan"), "", "x", "\u202e", "x" * 5000, [1, 2, 3])
    value = h5py.Empty("f") if rng.random() < 0.1 else _pick(rng, values)
    item.attrs[name] = value
    return f"is {str(value)[:20]!r}"


def _values(item: Any, values: Any, rng: Random) -> str:
    """Other values in the same dataset; its checksum is that of the first ones."""
    values = np.array(values)
    if values.size == 0:
        return "left as it is"
    if rng.random() < 0.4 and values.ndim:
        item[...] = values[::-1]
        return "reversed"
    flat = values.reshape(-1)
    place = int(rng.integers(flat.size))
    if values.dtype.kind == "f":
        flat[place] = _pick(rng, (np.nan, np.inf, -1.0, 0.0, 1e30))
    elif values.dtype.kind in "iu":
        flat[place] = flat[place] ^ 1 if rng.random() < 0.5 else 0
    else:
        return "left as it is"
    item[...] = values
    return f"value {place} is {flat[place]}"


def _other_dataset(values: Any, rng: Random) -> tuple[Any, str]:
    values = np.asarray(values)
    kind = int(rng.integers(7))
    if kind == 0:
        return h5py.Empty("f4"), "is empty (no shape)"
    if kind == 1:
        return None, "is a group"
    if kind == 2:
        return values[:-1] if values.ndim else values, "lacks a row"
    if kind == 3:
        return values.reshape(-1), "is flat"
    if kind == 4:
        return np.full(values.shape, b"x"), "are bytes"
    if kind == 5 and values.dtype.kind in "iuf":
        return values.astype(np.float64) * 0.5, "are halves, float64"
    return values[:0] if values.ndim else values, "has no rows"


# safetensors


def _tensors(path: Path, rng: Random) -> str:
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    stored = header.get("__metadata__", {})
    inner = [name for name, text in stored.items() if text.startswith("{")]
    if inner and rng.random() < 0.7:
        name = str(_pick(rng, inner))
        value, how = change_json(json.loads(stored[name]), rng)
        stored[name] = json.dumps(value)
        how = f"{name}: {how}"
    else:
        header, how = change_json(header, rng)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
    return f"header: {how}"


# XML


def _xml(path: Path, rng: Random) -> str:
    text = path.read_text()
    numbers = list(re.finditer(r'"[^"<>]*"', text))
    if not numbers:
        return "left as it is"
    found = _pick(rng, numbers)
    new = str(_pick(rng, _CELLS)).replace('"', "").replace("<", "")
    path.write_text(text[: found.start()] + f'"{new}"' + text[found.end() :])
    return f"{found[0][:20]} is {new[:20]!r}"


FORMS: dict[str, tuple[Change, ...]] = {
    ".json": (_json, _json, _json, _json, _json_text),
    ".geojson": (_json, _json, _json, _json, _json_text),
    ".csv": (_table, _table, _table, _table_text),
    ".tsv": (_table, _table, _table, _table_text),
    ".xlsx": (_workbook, _workbook, _archive),
    ".parquet": (_parquet,),
    ".toml": (_toml,),
    ".h5": (_h5,),
    ".safetensors": (_tensors, _tensors, _tensors),
    ".xml": (_xml,),
}
