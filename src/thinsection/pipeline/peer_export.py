"""A results folder in the folder of another tool: links where files are equal, never replaced."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from thinsection.encode.peer_names import peer_encoder
from thinsection.errors import InvalidInputError, StoreError, require
from thinsection.files.atomic import atomic_path, link_or_copy, read_table, write_table
from thinsection.pipeline.folder import Results, one_address, open_results
from thinsection.pipeline.peer_layouts import Layout, PeerSlide, Source
from thinsection.pipeline.peers import LAYOUTS
from thinsection.store.identity import file_sum
from thinsection.store.ledger import SlideLedger
from thinsection.store.tiles_h5 import read_tiles


def export_peer(
    folder: Path,
    out: Path,
    tool: str,
    *,
    features: str | None = None,
    copy: bool = False,
    on_left_out: Callable[[str], None] | None = None,
) -> int:
    """Number of slides that are now in a folder as `tool` writes it.

    What is there is never replaced by other bytes; doing it again adds slides that are new. Files
    that are equal in both are hard links (copies across file systems, or with `copy`).

    Args:
        folder: a results folder.
        out: the tool's folder: job_dir of TRIDENT, feat_dir of CLAM, ...
        tool: name of `LAYOUTS`.
        features: 'GRID/features_NAME' or NAME; None where there is one. A folder without
            embeddings gives its coordinates.
        copy: no hard links: for tools that are told to write over their files.
        on_left_out: told of each slide that cannot be exported; None: that is an error.

    Memory: a slide's embeddings, 4 N D bytes; some kB per slide.

    Raises:
        StoreError: nothing to export, or other bytes are in the way.
        InvalidInputError: several embeddings and none named, or two slides of one file name.
    """
    layout: Layout = LAYOUTS.load(tool)
    results = open_results(folder)
    found = list(_slides(results, out.absolute(), tool, features, on_left_out))
    done = []
    for slide in found:
        try:
            for name, source in layout.files(slide):
                _place(out / name, source, copy=copy)
            done.append(slide)
        except InvalidInputError as error:
            if on_left_out is None:
                raise
            on_left_out(f"{slide.slide_id}: left out: {error}")
    require(done, "folder must hold tiles", f"none in {str(folder)!r}", error=StoreError)
    for name, rows in layout.tables(done).items():
        _place_table(out / name, rows)
    return len(done)


def _slides(
    results: Results,
    out: Path,
    tool: str,
    features: str | None,
    on_left_out: Callable[[str], None] | None,
) -> Iterator[PeerSlide]:
    known = results.features
    address = one_address(known, features, "features") if known or features else ""
    grid = address.split("/")[0] if address else one_address(results.grids, None, "grid")
    stems: dict[str, str] = {}
    for slide_id, ledger in results.ledgers.items():
        try:
            require(not ledger.damage, "ledger must be whole", ledger.damage, error=StoreError)
            if f"{grid}/tiles" not in ledger.stages or (address and address not in ledger.stages):
                continue
            slide = _slide(results, ledger, out, grid=grid, address=address, tool=tool)
        except (StoreError, InvalidInputError) as error:
            if on_left_out is None:
                raise
            on_left_out(f"{slide_id}: left out: {error}")
            continue
        other = stems.setdefault(slide.file_stem, slide_id)
        got = f"{slide.file_stem!r} of {other!r} and {slide_id!r}; {tool} cannot tell them apart"
        rule = "slides must have different file names"
        require(tool in ("stamp", "slide2vec") or other == slide_id, rule, got)
        yield slide


def _slide(
    results: Results, ledger: SlideLedger, out: Path, *, grid: str, address: str, tool: str
) -> PeerSlide:
    def file(name: str) -> Path:
        return results.folder / next(iter(ledger.stages[name].files))

    told = ledger.stages[address].facts if address else {}
    label = address.rpartition("/")[2].removeprefix("features_")
    pooled = [a for a in ledger.stages if a.startswith(f"{grid}/slide_features_")]
    names = {a: a.rpartition("/")[2].removeprefix("slide_features_") for a in pooled}
    of_these = [a for a in pooled if address in ledger.stages[a].needs and ledger.stages[a].files]
    encoder = peer_encoder(tool, str(told.get("encoder", "")), label)
    return PeerSlide(
        slide_id=ledger.slide_id,
        out=out,
        facts=ledger.slide,
        tiles=read_tiles(file(f"{grid}/tiles")),
        tiles_path=file(f"{grid}/tiles"),
        encoder=encoder,
        dim=int(told.get("dim", 0)),
        features_path=file(address) if address else None,
        slide_features={names[a].replace(label, encoder): file(a) for a in of_these},
    )


def _place(target: Path, source: Source, *, copy: bool = False) -> None:
    """Puts a file where none is, or where the same one is."""
    with atomic_path(target) as tmp:
        if isinstance(source, Path):
            link_or_copy(source, tmp, copy=copy)
        else:
            source(tmp)
        same = not target.exists() or file_sum(tmp) == file_sum(target)
        got = f"another one at {str(target)!r}; pass another --out"
        require(same, "file must be new or the same", got, error=StoreError)


def _place_table(target: Path, rows: list[dict[str, Any]]) -> None:
    """Writes a table where none is, or one whose rows are all in the new one."""
    with atomic_path(target) as tmp:
        write_table(tmp, rows)
        with contextlib.suppress(FileNotFoundError):
            new = read_table(tmp)
            kept = all(row in new for row in read_table(target))
            got = f"one with other rows at {str(target)!r}; pass another --out"
            require(kept, "table must be new, or only grow", got, error=StoreError)
