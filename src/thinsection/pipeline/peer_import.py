"""Folders of TRIDENT, CLAM, STAMP and slide2vec as results of ours: coordinates, features, lists.

What is imported lies under a grid's name of its own (`trident_20x_256px_0px_overlap`) with keys
that no run of ours has, so that none takes it for its own. `ls`, `verify`, `aggregate`, `probe` and
`export` read it.
"""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from thinsection.encode.peer_names import our_name
from thinsection.errors import StoreError, ThinsectionError, require, rewording
from thinsection.files.atomic import atomic_path, read_table
from thinsection.files.lock import LOCK_NAME, hold
from thinsection.pipeline.folder import leaving_out
from thinsection.pipeline.peer_sources import SOURCES, Found
from thinsection.pipeline.records import begin_record, end_record
from thinsection.pipeline.results import write_tables
from thinsection.report.index import write_index
from thinsection.slide.cohort import SlideEntry, load_cohort, named_columns, parse_mpp
from thinsection.slide.readers import slide_suffixes
from thinsection.stages.labels import slug
from thinsection.stages.stage import OF_COHORTS
from thinsection.store.identity import file_sum
from thinsection.store.ledger import SLIDES, SlideLedger, StageRecord, load_ledger, stage_key
from thinsection.store.tiles_h5 import TilesWriter


def import_peer(
    folder: Path,
    out: Path,
    tool: str,
    *,
    slides: Sequence[str | Path] = (),
    encoder: str | None = None,
    on_left_out: Callable[[str], None] | None = None,
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
    require(tool in SOURCES, f"tool must be one of {', '.join(SOURCES)}", repr(tool))
    found, rule = list(SOURCES[tool](folder)), f"folder must hold features or coordinates of {tool}"
    require(found, rule, f"none in {str(folder)!r}", error=StoreError)
    entries = {entry.slide_id: entry for entry in load_cohort(slides)} if slides else {}
    entries |= {Path(entry.slide_path).stem: entry for entry in entries.values()}
    listed, done = _listed(folder), set[str]()
    record = begin_record(out, "import", {"import": {"tool": tool, "folder": str(folder)}})
    for slide_id, sourced in found:
        with leaving_out(slide_id, on_left_out, ThinsectionError):
            told = _told(slide_id, listed.get(slide_id, {}), entries.get(slide_id))
            _take(out, tool, told, sourced(told), encoder)
            done.add(slide_id)
    require(done, rule, f"none that can be read in {str(folder)!r}", error=StoreError)
    write_tables(out, (), ())
    end_record(record, {"counts": {"imported": len(done)}})
    write_index(out)
    return len(done)


def _listed(folder: Path) -> dict[str, dict[str, str]]:
    """What the tables of a folder say of each slide, under our names."""
    slides: dict[str, dict[str, str]] = {}
    patients: dict[str, dict[str, str]] = {}
    for path in sorted(folder.glob("*.csv")):
        with rewording("table must be a UTF-8 CSV", path, ValueError, csv.Error, error=StoreError):
            rows = read_table(path)
        for row in rows:
            known = {name: value for name, value in named_columns(row).items() if value}
            if "slide_path" in known:  # TRIDENT's and STAMP's name of the file is all there is
                known.setdefault("slide_id", known["slide_path"])
            if "slide_id" in known:
                slides.setdefault(_plain(known.pop("slide_id")), {}).update(known)
            elif "patient_id" in known:
                patients.setdefault(known["patient_id"], {}).update(known)
    return {name: patients.get(row.get("patient_id", ""), {}) | row for name, row in slides.items()}


def _plain(name: str) -> str:
    """A slide's id from the name of its file, or of a file of its features."""
    last = Path(name).name
    cut = next((s for s in (*slide_suffixes(), ".h5") if last.lower().endswith(s)), "")
    return last[: len(last) - len(cut)]


def _told(slide_id: str, row: Mapping[str, str], entry: SlideEntry | None) -> dict[str, Any]:
    """Facts of a slide for its ledger; of the opened slide where one is given."""
    facts: dict[str, Any] = {"slide_id": slide_id, "slide_path": row.get("slide_path", "")}
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
        facts["levels"] = [{"size": list(v.size), "downsample": v.downsample} for v in slide.levels]
        size = {"width": slide.size[0], "height": slide.size[1]}
        return facts | {"slide_path": entry.slide_path, "reader": slide.reader, **size}


def _take(
    out: Path, tool: str, told: Mapping[str, Any], found: Iterator[Found], encoder: str | None
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
            ledger = _write(ledger, f"{grid}/tiles", replace(one, features=None), attributes)
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
    ledger: SlideLedger, address: str, one: Found, attributes: Mapping[str, Any]
) -> SlideLedger:
    """The ledger with the file of a stage, which is written where it is not there yet."""
    name, tool = f"{address}/{ledger.slide_id}.h5", attributes["imported_from"]
    target, facts = ledger.out / name, {"num_tiles": len(one.coords_l0), "imported_from": tool}
    needs, how = tuple[str, ...](), dict[str, Any](dim=0)
    if (features := one.features) is not None:
        needs = (f"{address.rpartition('/')[0]}/tiles",)
        how = {"dim": features.shape[1]}
        facts |= {"encoder": attributes["encoder"], **how}
        how |= {"dtype": "float16"} if features.dtype == np.float16 else {}
    with atomic_path(target) as tmp:
        with TilesWriter(tmp, attributes=attributes, **how) as writer:
            writer.append(one.coords_l0, features)
        digest, size = file_sum(tmp), tmp.stat().st_size
        # no run's key has this form: never taken for a result of ours
        key = f"imported-{stage_key(tool=tool, sum=digest)}"
        there = ledger.stages.get(address)
        free = not target.exists() or file_sum(target) == digest  # also after a kill
        same = key == there.key if there else free
        got = f"another result at {str(target)!r}; pass another --out"
        require(same, "what is imported must be new or the same", got, error=StoreError)
    sums = {name: digest}
    record = StageRecord(key=key, files={name: size}, needs=needs, facts=facts, sums=sums)
    return ledger.with_stage(address, record)
