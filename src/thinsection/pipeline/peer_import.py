"""Folders of TRIDENT, CLAM, STAMP and slide2vec as results of ours: coordinates, features, lists.

What is imported lies under a grid's name of its own (`trident_20x_256px_0px_overlap`) with keys
that no run of ours has, so that none takes it for its own. `ls`, `verify`, `aggregate`, `probe` and
`export` read it.
"""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import PickleError
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from thinsection.encode.registry import our_name
from thinsection.errors import (
    InvalidInputError,
    StoreError,
    ThinsectionError,
    require,
    rewording,
)
from thinsection.files.atomic import atomic_path, read_table
from thinsection.files.json_text import read_json
from thinsection.files.lock import LOCK_NAME, hold
from thinsection.pipeline.folder import Listener, leaving_out
from thinsection.pipeline.records import begin_record, end_record
from thinsection.pipeline.tables import known_slides, write_tables
from thinsection.report.index import write_index
from thinsection.slide.cohort import SlideEntry, load_cohort, named_columns, parse_mpp
from thinsection.slide.readers import slide_suffixes
from thinsection.stages.facts import OF_COHORTS
from thinsection.stages.labels import slug
from thinsection.store.identity import file_sum
from thinsection.store.ledger import (
    SLIDES,
    SlideLedger,
    StageRecord,
    load_ledger,
    stage_key,
)
from thinsection.store.tiles_h5 import TilesWriter, open_h5, read_tiles, stored_dataset
from thinsection.types import CoordsL0, Size

# what Python raises of a file that is not what it should be; UnpicklingError is a PickleError
_DAMAGE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    RuntimeError,
    PickleError,
    BadZipFile,
)


@dataclass(frozen=True, kw_only=True)
class Found:
    """Tiles of one slide with one encoder's features, or without."""

    grid: str  # as the tool names the folder, or what its files say
    coords_l0: CoordsL0
    edge_l0: int  # level-0 px that a tile covers
    tile_px: int  # that the encoder was given, before its own resizing
    overlap_px: int = 0  # of tile_px
    power: float | None = None  # nominal, of the tiles
    size: Size | None = None  # of level 0
    encoder: str = ""  # as the tool calls it; '' where it does not say
    features: npt.NDArray[Any] | None = None  # (N, D)


def _trident(path: Path, told: Mapping[str, Any]) -> Iterator[Found]:
    """Of a job_dir, or one grid of it. Source: mahmoodlab/TRIDENT a91fa84, trident/IO.py."""
    grid, tiles = path.parent.parent, read_tiles(path)
    said = tiles.attributes
    names = ("patch_size", "level0_magnification", "target_magnification")
    missing = [name for name in names if not said.get(name)]
    got = f"none of {missing} in {str(path)!r}"
    require(not missing, "coords must say their magnification", got, error=StoreError)
    px, source, power = (float(said[name]) for name in names)
    bare = Found(
        grid=grid.name,
        coords_l0=tiles.coords_l0,
        edge_l0=round(px * source / power),  # what its patcher reads
        tile_px=int(px),
        overlap_px=int(said.get("overlap", 0)),
        power=power,
        size=_size(said.get("level0_width"), said.get("level0_height")),
    )
    embedded = sorted(
        grid.glob(f"features_*/{path.name.removesuffix('_patches.h5')}.h5")
    )
    if not embedded:
        yield bare
    for file in embedded:
        encoder = file.parent.name.removeprefix("features_")
        yield replace(bare, features=_features(file, bare.coords_l0), encoder=encoder)


def _features(file: Path, coords_l0: CoordsL0) -> npt.NDArray[Any] | None:
    """Those of the tiles at these corners. Raises StoreError: the file has others."""
    found, got = read_tiles(file), f"other coords in {str(file)!r}"
    same = np.array_equal(found.coords_l0, coords_l0)
    require(same, "features must be of the tiles in patches/", got, error=StoreError)
    return found.features


def _clam(path: Path, told: Mapping[str, Any]) -> Iterator[Found]:
    """Of a save_dir that is the feat_dir. Source: mahmoodlab/CLAM 53e2409, create_patches_fp.py"""
    tiles, file = read_tiles(path), path.parent.parent / "h5_files" / path.name
    said, edge = tiles.attributes, tiles.tile_px_l0
    missing = edge is None or "patch_level" not in said
    got = f"attributes {sorted(said)} in {str(path)!r}"
    require(
        not missing, "coords must say patch_size and patch_level", got, error=StoreError
    )
    size = _size(*np.ravel(said.get("level_dim", (0, 0))).tolist())
    yield Found(
        grid="patches",  # a folder is one run: sizes in px may differ by scanner
        coords_l0=tiles.coords_l0,
        edge_l0=int(edge or 0),
        tile_px=int(said["patch_size"]),
        size=size if int(said["patch_level"]) == 0 else None,
        features=_features(file, tiles.coords_l0) if file.exists() else None,
    )


def _stamp(path: Path, told: Mapping[str, Any]) -> Iterator[Found]:
    """Of a feature_dir, or the folder above. Source: KatherLab/STAMP c54ce06, modeling/data.py."""
    mpp = told.get("mpp_x"), told.get("mpp_y")
    if not mpp[0] or not mpp[1]:
        remedy = "its coordinates are µm: pass --slides, or a table with the column mpp"
        raise InvalidInputError(f"slide_mpp is missing for {str(path)!r}; {remedy}")
    with open_h5(path) as file:
        features = np.asarray(stored_dataset(file, "feats", path)[...])
        coords_um = np.asarray(
            stored_dataset(file, "coords", path)[...], dtype=np.float64
        )
        said = dict(file.attrs)
    edge_um = float(said.get("tile_size_um", 0) or said.get("tile_size", 0))
    known = said.get("unit") == "um" and edge_um > 0
    got = f"attributes {sorted(said)} in {str(path)!r}"
    require(known, "coords must be µm with their tile_size_um", got, error=StoreError)
    fits = features.ndim == 2 and coords_um.shape == (len(features), 2)
    got = f"{features.shape} and {coords_um.shape} in {str(path)!r}"
    require(fits, "feats and coords must be of the same tiles", got, error=StoreError)
    edge = round(edge_um / mpp[0])
    px = int(said.get("tile_size_px", 0)) or edge
    corners = np.rint(coords_um / np.array(mpp)).astype(np.int64)
    tiles = Found(grid=f"{px}px", coords_l0=corners, edge_l0=edge, tile_px=px)
    yield replace(tiles, encoder=str(said.get("extractor", "")), features=features)


def _slide2vec(path: Path, told: Mapping[str, Any]) -> Iterator[Found]:
    """Of its output folder. Source: clemsgrs/slide2vec 7cfa6bf, artifacts.py; hs2p 6.1.0."""
    slide_id, home = (
        path.name.removesuffix(_TILING),
        path.parent.parent / "tile_embeddings",
    )
    meta = home / f"{slide_id}.meta.json"
    with rewording("tiling must be one of hs2p's", path, *_DAMAGE, error=StoreError):
        document = read_json(path)
        tiling, embedded = document["tiling"], {"encoder_name": ""}
        with np.load(
            path.with_name(f"{slide_id}.coordinates.npz"), allow_pickle=False
        ) as file:
            coords = np.stack([file["x"], file["y"]], axis=1).astype(np.int64)
        if meta.exists():
            embedded = read_json(meta)
        px = int(tiling["requested_tile_size_px"])
        found = Found(
            grid=f"{px}px_{float(tiling['requested_spacing_um']):.6g}mpp",
            coords_l0=coords,
            edge_l0=int(tiling["tile_size_lv0"]),
            tile_px=px,
            overlap_px=round(float(tiling["overlap"]) * px),
            size=_size(*document["slide"]["dimensions"]),
            encoder=str(embedded["encoder_name"]),
            features=_array(home, slide_id) if meta.exists() else None,
        )
    yield found


def _array(home: Path, slide_id: str) -> npt.NDArray[Any]:
    """One array (N, D) of an .npz or a .pt, without running what a pickle may hold."""
    import torch

    if (packed := home / f"{slide_id}.npz").exists():
        with np.load(packed, allow_pickle=False) as file:
            return np.asarray(file["features"])
    tensor = torch.load(home / f"{slide_id}.pt", map_location="cpu", weights_only=True)
    if not isinstance(tensor, torch.Tensor) or tensor.ndim != 2:
        raise ValueError(
            f"{type(tensor).__name__} in {slide_id}.pt is not a tensor (N, D)"
        )
    return np.asarray(tensor if tensor.dtype == torch.float16 else tensor.float())


def _size(width: Any, height: Any) -> Size | None:
    return (int(width), int(height)) if width and height else None


_PATCHES, _TILING = "_patches.h5", ".coordinates.meta.json"
# tool -> its files of tiles, the first pattern that any fits; how they end after a slide's name;
# what reads one, told what is known of the slide (mpp_x)
_Read = Callable[[Path, Mapping[str, Any]], Iterator[Found]]
_SOURCES: dict[str, tuple[tuple[str, ...], str, _Read]] = {
    "trident": ((f"patches/*{_PATCHES}", f"*/patches/*{_PATCHES}"), _PATCHES, _trident),
    "clam": (("patches/*.h5",), ".h5", _clam),
    "stamp": (("**/*.h5",), ".h5", _stamp),
    "slide2vec": ((f"tiles/*{_TILING}",), _TILING, _slide2vec),
}


def import_peer(
    folder: Path,
    out: Path,
    tool: str,
    *,
    slides: Sequence[str | Path] = (),
    encoder: str | None = None,
    on_left_out: Listener | None = None,
) -> int:
    """Number of slides of a tool's folder that are now in a results folder.

    Tables (`*.csv`) in the tool's folder give patients, labels, paths and resolutions. The same
    files again are left as they are; others under a name that is there are refused.

    `folder` is job_dir of TRIDENT, feat_dir of CLAM (with patches/), feature_dir of STAMP, output
    folder of slide2vec; `slides` as of `run`, for size and µm/px: STAMP's coordinates are µm, so
    that it needs them, or a table with the resolution; `encoder` whose features these are, where
    the tool's files do not say (CLAM). `on_left_out` is told of each slide that cannot be imported:
    with None that is an error.

    Memory: a slide's embeddings, 8 N D bytes; some kB per slide.

    Raises StoreError: nothing there that the tool writes, or other results are in the way.
    """
    require(tool in _SOURCES, f"tool must be one of {', '.join(_SOURCES)}", repr(tool))
    patterns, end, read = _SOURCES[tool]
    listings = (sorted(folder.glob(pattern)) for pattern in patterns)
    found = [
        path
        for path in next(filter(None, listings), [])
        if not path.name.startswith(".")
    ]
    rule = f"folder must hold features or coordinates of {tool}"
    require(found, rule, f"none in {str(folder)!r}", error=StoreError)
    entries = {entry.slide_id: entry for entry in load_cohort(slides)} if slides else {}
    entries |= {Path(entry.slide_path).stem: entry for entry in entries.values()}
    listed, done = _listed(folder), set[str]()
    record = begin_record(
        out, "import", {"import": {"tool": tool, "folder": str(folder)}}
    )
    for slide_id, path in ((path.name.removesuffix(end), path) for path in found):
        with leaving_out(slide_id, on_left_out, ThinsectionError):
            told = _told(slide_id, listed.get(slide_id, {}), entries.get(slide_id))
            _take(out, tool, told, read(path, told), encoder)
            done.add(slide_id)
    require(done, rule, f"none that can be read in {str(folder)!r}", error=StoreError)
    write_tables(out, known_slides(out))
    end_record(record, {"counts": {"imported": len(done)}})
    write_index(out)
    return len(done)


def _listed(folder: Path) -> dict[str, dict[str, str]]:
    """What the tables of a folder say of each slide, under our names."""
    slides, patients = dict[str, dict[str, str]](), dict[str, dict[str, str]]()
    for path in sorted(folder.glob("*.csv")):
        with rewording(
            "table must be a UTF-8 CSV", path, ValueError, csv.Error, error=StoreError
        ):
            rows = read_table(path)
        for row in rows:
            known = {name: value for name, value in named_columns(row).items() if value}
            if (
                "slide_path" in known
            ):  # TRIDENT's and STAMP's name of the file is all there is
                known.setdefault("slide_id", known["slide_path"])
            if "slide_id" in known:
                slides.setdefault(_plain(known.pop("slide_id")), {}).update(known)
            elif "patient_id" in known:
                patients.setdefault(known["patient_id"], {}).update(known)
    return {
        name: patients.get(row.get("patient_id", ""), {}) | row
        for name, row in slides.items()
    }


def _plain(name: str) -> str:
    """A slide's id from the name of its file, or of a file of its features."""
    last = Path(name).name
    cut = next((s for s in (*slide_suffixes(), ".h5") if last.lower().endswith(s)), "")
    return last[: len(last) - len(cut)]


def _told(
    slide_id: str, row: Mapping[str, str], entry: SlideEntry | None
) -> dict[str, Any]:
    """Facts of a slide for its ledger; of the opened slide where one is given."""
    facts: dict[str, Any] = {
        "slide_id": slide_id,
        "slide_path": row.get("slide_path", ""),
    }
    facts |= {name: row.get(name) for name in OF_COHORTS}
    if row.get("slide_mpp"):
        where = f"the table's row of {slide_id!r}"
        facts["mpp_x"], facts["mpp_y"] = parse_mpp(row["slide_mpp"], where=where)
    if entry is None:
        return facts
    said = {name: getattr(entry, name) for name in OF_COHORTS}
    facts |= {name: value for name, value in said.items() if value is not None}
    mpp = (facts["mpp_x"], facts["mpp_y"]) if "mpp_x" in facts else None
    with replace(entry, slide_mpp=entry.slide_mpp or mpp).open("auto") as slide:
        facts["mpp_x"], facts["mpp_y"] = slide.slide_mpp or (None, None)
        facts["levels"] = [
            {"size": list(v.size), "downsample": v.downsample} for v in slide.levels
        ]
        size = {"width": slide.size[0], "height": slide.size[1]}
        return facts | {"slide_path": entry.slide_path, "reader": slide.reader, **size}


def _take(
    out: Path,
    tool: str,
    told: Mapping[str, Any],
    found: Iterator[Found],
    encoder: str | None,
) -> None:
    """Writes a slide's grids and features, then its ledger."""
    slide_id = told["slide_id"]
    with hold(out / SLIDES / slide_id / LOCK_NAME):
        ledger = load_ledger(out, slide_id)
        for one in found:
            grid, attributes = f"{tool}_{slug(one.grid)}", _attributes(tool, one, told)
            size = {"width": one.size[0], "height": one.size[1]} if one.size else {}
            known = {name: value for name, value in told.items() if value is not None}
            ledger = replace(ledger, slide=size | ledger.slide | known)
            ledger = _write(
                ledger, f"{grid}/tiles", replace(one, features=None), attributes
            )
            if one.features is not None:
                name = our_name(one.encoder) or encoder or tool
                more = attributes | {"encoder": name}
                ledger = _write(ledger, f"{grid}/features_{slug(name)}", one, more)
        ledger.save()


def _attributes(tool: str, one: Found, told: Mapping[str, Any]) -> dict[str, Any]:
    edge, px, power, mpp = one.edge_l0, one.tile_px, one.power, told.get("mpp_x")
    step = round(edge * (1 - one.overlap_px / px))
    known = {
        **{"name": told["slide_id"], "patch_size": px, "patch_size_level0": edge},
        **{"overlap": one.overlap_px, "target_magnification": power},
        "level0_magnification": power and power * edge / px,
        **{"tile_size_l0": [edge, edge], "stride_l0": [step, step]},
        "tile_mpp": mpp and mpp * edge / px,
        "slide_mpp": mpp and [mpp, told.get("mpp_y") or mpp],
        "imported_from": tool,
    }
    return {name: value for name, value in known.items() if value is not None}


def _write(
    ledger: SlideLedger, address: str, one: Found, said: Mapping[str, Any]
) -> SlideLedger:
    """The ledger with the file of a stage, which is written where it is not there yet."""
    name, tool = f"{address}/{ledger.slide_id}.h5", said["imported_from"]
    target, facts = (
        ledger.out / name,
        {"num_tiles": len(one.coords_l0), "imported_from": tool},
    )
    needs, how = tuple[str, ...](), dict[str, Any](dim=0)
    if (features := one.features) is not None:
        needs, how = (
            (f"{address.rpartition('/')[0]}/tiles",),
            {"dim": features.shape[1]},
        )
        facts |= {"encoder": said["encoder"], **how}
        how |= {"dtype": "float16"} if features.dtype == np.float16 else {}
    with atomic_path(target) as tmp:
        with TilesWriter(tmp, attributes=said, **how) as writer:
            writer.append(one.coords_l0, features)
        digest, size = file_sum(tmp), tmp.stat().st_size
        # no run's key has this form: never taken for a result of ours
        key = f"imported-{stage_key(tool=tool, sum=digest)}"
        there = ledger.stages.get(address)
        free = not target.exists() or file_sum(target) == digest  # also after a kill
        same = key == there.key if there else free
        got = f"another result at {str(target)!r}; pass another --out"
        require(same, "what is imported must be new or the same", got, error=StoreError)
    told: dict[str, Any] = {"needs": needs, "facts": facts, "sums": {name: digest}}
    return ledger.with_stage(address, StageRecord(key=key, files={name: size}, **told))
