"""Imports folders of TRIDENT, CLAM, STAMP and slide2vec: coordinates, features, lists of slides.

Imported files get their own grid name (`trident_20x_256px_0px_overlap`) and keys that no run of
ours produces, so that no run takes them for its own results. `ls`, `verify`, `aggregate`, `probe`
and `export` can read them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from thinsection.encode.registry import our_name
from thinsection.errors import (
    InvalidInputError,
    StoreError,
)
from thinsection.exchange.peer_sources import SOURCES, PeerTiles
from thinsection.files.atomic import atomic_path
from thinsection.files.lock import LOCK_NAME, hold
from thinsection.files.tables import open_table
from thinsection.report.index import write_index
from thinsection.results.folder import Listener, leaving_out
from thinsection.results.records import begin_record, update_record
from thinsection.results.tables import write_tables
from thinsection.slide.cohort import SlideEntry, load_cohort
from thinsection.slide.cohort_table import named_columns, parse_mpp
from thinsection.slide.geometry import nominal_power
from thinsection.slide.ids import plain_id
from thinsection.stages.labels import slug
from thinsection.store.hdf5 import open_h5
from thinsection.store.identity import Identity, file_sum
from thinsection.store.ledger import (
    OF_COHORTS,
    SLIDES,
    SlideLedger,
    StageRecord,
    load_ledger,
    stage_key,
)
from thinsection.store.outcome import known_slides
from thinsection.store.tile_tables import EmbeddingRows
from thinsection.store.tiles_h5 import Embeddings, TilesWriter, read_tiles
from thinsection.types import MIB, Document

# embeddings that are copied in one step
_BLOCK_BYTES = 8 * MIB


def import_peer(
    folder: str | Path,
    out: str | Path,
    tool: str,
    *,
    slides: Sequence[str | Path] = (),
    encoder: str | None = None,
    on_left_out: Listener | None = None,
) -> int:
    """Imports a tool's folder into a results folder; returns the number of slides then in it.

    Tables (`*.csv`) in the tool's folder give patients, labels, paths and resolutions. Files that
    were imported before are left as they are; other files with the same name are an error.

    Args:
        folder: job_dir of TRIDENT, feat_dir of CLAM (with patches/), feature_dir of STAMP, output
            folder of slide2vec.
        out: results folder.
        tool: a name in `SOURCES`.
        slides: as for `run`, to get size and µm per pixel. STAMP's coordinates are in µm, so STAMP
            needs this, or a table with the resolution.
        encoder: encoder of the features, if the tool's files do not name it (CLAM).
        on_left_out: called with each slide that cannot be imported; with None that is an error.

    Memory:
        Blocks of 8 MiB of a slide's embeddings, and 64 bytes per tile; some kB per slide.
        Embeddings of slide2vec are read whole, 4 N D bytes. `thinsection plan --command import`
        predicts it.

    Raises:
        StoreError: no files of the tool, or other results with the same name.
    """
    folder = Path(folder)
    out = Path(out)
    if tool not in SOURCES:
        raise InvalidInputError(
            f"tool must be one of {', '.join(SOURCES)}, got {tool!r}"
        )
    source = SOURCES[tool]
    files = source.find_files(folder)
    rule = f"folder must contain features or coordinates of {tool}"
    if not files:
        raise StoreError(f"{rule}, got none in {str(folder)!r}")
    entries: dict[str, SlideEntry] = {}
    if slides:
        cohort = load_cohort(slides)
        entries |= {entry.slide_id: entry for entry in cohort}
        entries |= {Path(entry.slide_path).stem: entry for entry in cohort}
    rows = _read_tables(folder)
    imported: set[str] = set()
    grids: set[str] = set()
    record = begin_record(
        out, "import", {"import": {"tool": tool, "folder": str(folder)}}
    )
    for path in files:
        slide_id = path.name.removesuffix(source.end)
        with leaving_out(slide_id, on_left_out):
            facts = _slide_facts(
                slide_id, rows.get(slide_id, {}), entries.get(slide_id)
            )
            grids |= _import_slide(out, tool, facts, source.read(path, facts), encoder)
            imported.add(slide_id)
    if not imported:
        raise StoreError(f"{rule}, got no readable file in {str(folder)!r}")
    write_tables(out, known_slides(out))
    update_record(
        record, {"counts": {"imported": len(imported)}, "grids": sorted(grids)}
    )
    write_index(out)
    return len(imported)


def _read_tables(folder: Path) -> dict[str, dict[str, str]]:
    """Columns of a folder's tables for each slide, under our names."""
    slides: dict[str, dict[str, str]] = {}
    patients: dict[str, dict[str, str]] = {}
    for path in sorted(folder.glob("*.csv")):
        table = open_table(path, error=StoreError)
        for row in table.rows:
            cells = {name: text for name, text in named_columns(row).items() if text}
            # TRIDENT's and STAMP's tables may give only the name of the file
            if "slide_path" in cells:
                cells.setdefault("slide_id", cells["slide_path"])
            if "slide_id" in cells:
                slide_id = plain_id(cells.pop("slide_id"))
                slides.setdefault(slide_id, {}).update(cells)
            elif "patient_id" in cells:
                patients.setdefault(cells["patient_id"], {}).update(cells)
    for slide_id, row in slides.items():
        patient = patients.get(row.get("patient_id", ""), {})
        slides[slide_id] = patient | row
    return slides


def _slide_facts(
    slide_id: str, row: Mapping[str, str], entry: SlideEntry | None
) -> Document:
    """Facts of a slide for its ledger, including those of the opened slide if there is one."""
    facts: Document = {"slide_id": slide_id, "slide_path": row.get("slide_path", "")}
    facts |= {name: row.get(name) for name in OF_COHORTS}
    if row.get("slide_mpp"):
        where = f"the table's row of {slide_id!r}"
        facts["mpp_x"], facts["mpp_y"] = parse_mpp(row["slide_mpp"], where=where)
    if entry is None:
        return facts
    for name in OF_COHORTS:
        value = getattr(entry, name)
        if value is not None:
            facts[name] = value
    mpp = (facts["mpp_x"], facts["mpp_y"]) if "mpp_x" in facts else None
    with replace(entry, slide_mpp=entry.slide_mpp or mpp).open("auto") as slide:
        facts["mpp_x"], facts["mpp_y"] = slide.slide_mpp or (None, None)
        facts["levels"] = [
            {"size": list(level.size), "downsample": level.downsample}
            for level in slide.levels
        ]
        facts["slide_path"] = entry.slide_path
        facts["reader"] = slide.reader
        facts["width"], facts["height"] = slide.size
    return facts


def _import_slide(
    out: Path,
    tool: str,
    facts: Document,
    peer_tiles: Iterable[PeerTiles],
    encoder: str | None,
) -> set[str]:
    """Writes a slide's grids and features, then its ledger; returns the names of the grids."""
    grids = set()
    slide_id = facts["slide_id"]
    known_facts = {name: value for name, value in facts.items() if value is not None}
    with hold(out / SLIDES / slide_id / LOCK_NAME):
        ledger = load_ledger(out, slide_id)
        was_known = bool(ledger.stages)
        if "reader" in facts and not ledger.source:
            # the hash of its samples identifies the slide after a move
            identity = Identity.read(facts["slide_path"], {}, "samples")
            ledger = replace(ledger, source=asdict(identity))
        for tiles in peer_tiles:
            size = {}
            if tiles.size is not None:
                size = {"width": tiles.size[0], "height": tiles.size[1]}
            ledger = replace(ledger, slide=size | dict(ledger.slide) | known_facts)
            grid = f"{tool}_{slug(tiles.grid)}"
            grids.add(grid)
            attributes = _attributes(tool, tiles, facts)
            coords = replace(tiles, features=None)
            ledger = _write_stage(ledger, f"{grid}/tiles", coords, attributes)
            if (
                was_known
            ):  # the file may have other attributes now, whatever the features do
                ledger.save()
            if tiles.features is not None:
                name = our_name(tiles.encoder) or encoder or tool
                address = f"{grid}/features_{slug(name)}"
                attributes["encoder"] = name
                ledger = _write_stage(ledger, address, tiles, attributes)
        ledger.save()
    return grids


def _attributes(tool: str, tiles: PeerTiles, facts: Document) -> Document:
    """Attributes for a file of imported tiles; unknown ones are left out."""
    edge_l0 = tiles.edge_l0
    tile_px = tiles.tile_px
    stride_l0 = round(edge_l0 * (1 - tiles.overlap_px / tile_px))
    mpp_x = facts.get("mpp_x")
    slide_mpp = None
    tile_mpp = None
    if mpp_x:
        slide_mpp = [mpp_x, facts.get("mpp_y") or mpp_x]
        tile_mpp = mpp_x * edge_l0 / tile_px
    power = tiles.power
    if power is None and tile_mpp is not None:
        power = nominal_power(tile_mpp)
    slide_power = None if power is None else power * edge_l0 / tile_px
    attributes = {
        "name": facts["slide_id"],
        "patch_size": tile_px,
        "patch_size_level0": edge_l0,
        "overlap": tiles.overlap_px,
        "target_magnification": power,
        "level0_magnification": slide_power,
        "tile_size_l0": [edge_l0, edge_l0],
        "stride_l0": [stride_l0, stride_l0],
        "tile_mpp": tile_mpp,
        "slide_mpp": slide_mpp,
        "imported_from": tool,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _has_same_rows(path: Path, tiles: PeerTiles) -> bool:
    """True if a file has these tiles and features, even if its attributes differ."""
    try:
        coords_l0 = read_tiles(path, embeddings=False).coords_l0
        with open_h5(path) as file:
            has_features = "features" in file
        if not np.array_equal(coords_l0, tiles.coords_l0):
            return False
        if not has_features or tiles.features is None:
            return not has_features and tiles.features is None
        stored = EmbeddingRows(path)
        stored.check()
    except StoreError:
        return False
    if stored.shape != tiles.features.shape:
        return False
    return all(
        np.array_equal(stored[rows], tiles.features[rows].astype(stored.dtype))
        for rows in _blocks(tiles.features)
    )


def _blocks(features: Embeddings | EmbeddingRows) -> Iterator[slice]:
    """Rows of features that are read at a time, some MiB."""
    num_tiles, dim = features.shape
    num_rows = max(1, _BLOCK_BYTES // (4 * max(1, dim)))
    for start in range(0, num_tiles, num_rows):
        yield slice(start, start + num_rows)


def _write_stage(
    ledger: SlideLedger, address: str, tiles: PeerTiles, attributes: Document
) -> SlideLedger:
    """Adds a stage to the ledger, and writes its file if that does not exist yet."""
    tool = attributes["imported_from"]
    name = f"{address}/{ledger.slide_id}.h5"
    target = ledger.out / name
    facts = {"num_tiles": len(tiles.coords_l0), "imported_from": tool}
    needs: tuple[str, ...] = ()
    dim = 0
    dtype = "float32"
    if tiles.features is not None:
        dim = tiles.features.shape[1]
        needs = (f"{address.rpartition('/')[0]}/tiles",)
        facts |= {"encoder": attributes["encoder"], "dim": dim}
        if tiles.features.dtype == np.float16:
            dtype = "float16"
    with atomic_path(target) as tmp:
        with TilesWriter(tmp, attributes=attributes, dim=dim, dtype=dtype) as writer:
            if tiles.features is None:
                writer.append(tiles.coords_l0, None)
                writer.add_table()
            else:
                for rows in _blocks(tiles.features):
                    writer.append(tiles.coords_l0[rows], tiles.features[rows])
        digest = file_sum(tmp)
        size = tmp.stat().st_size
        # no run makes keys of this form, so no run takes the file for its own
        key = f"imported-{stage_key(tool=tool, sum=digest)}"
        recorded = ledger.stages.get(address)
        if recorded is not None:
            is_same = recorded.key == key
        else:  # a killed process may have written the file but not its record
            is_same = not target.exists() or file_sum(target) == digest
        # older versions wrote fewer attributes
        if not is_same and not _has_same_rows(target, tiles):
            raise StoreError(
                "imported results must be new or unchanged, got a different result at "
                f'{str(target)!r}; pass another out="..."'
            )
    record = StageRecord(
        key=key, files={name: size}, needs=needs, facts=facts, sums={name: digest}
    )
    return ledger.with_stage(address, record)
