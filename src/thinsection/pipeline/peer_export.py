"""A results folder in the folder of another tool: links where files are equal, never replaced.

What their readers take for the field of view is ours in µm: docs/formats.md says which of them were
run on it.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.encode.registry import peer_encoder
from thinsection.errors import InvalidInputError, StoreError, require
from thinsection.files.atomic import atomic_path, link_or_copy, read_table, write_table
from thinsection.pipeline.folder import (
    Listener,
    Results,
    leaving_out,
    one_address,
    open_results,
)
from thinsection.registry import Entry, Registry
from thinsection.store.identity import file_sum
from thinsection.store.ledger import SlideLedger
from thinsection.store.tiles_h5 import (
    TilesFile,
    TilesWriter,
    add_dataset,
    new_h5,
    read_tiles,
)

_COMPOUND = (".ome.tif", ".ome.tiff", ".ome.zarr")  # suffixes that TRIDENT takes as one

Source = Path | Callable[[Path], None]  # a file of ours, or what writes one
Tables = Mapping[str, list[dict[str, Any]]]  # file name -> rows


@dataclass(frozen=True, kw_only=True)
class PeerSlide:
    """One slide as a layout sees it. Properties raise InvalidInputError where nobody knows them."""

    slide_id: str
    out: Path  # the tool's folder
    facts: Mapping[str, Any]  # of the ledger: slide_path, width, mpp_x, label, ...
    tiles: TilesFile  # coordinates, attributes and columns; no embeddings
    tiles_path: Path
    encoder: str = ""  # its name there; '' where there are no embeddings
    features_path: Path | None = None
    dim: int = 0  # of its embeddings
    slide_features: Mapping[str, Path]  # by name of the slide encoder

    @property
    def path(self) -> str:
        """The slide's file."""
        return str(self.facts["slide_path"])

    @property
    def file_stem(self) -> str:
        """The file's name without suffix, by which TRIDENT and CLAM find a slide's files."""
        name = Path(self.path).name
        cut = next((len(s) for s in _COMPOUND if name.lower().endswith(s)), 0)
        return name[:-cut] if cut else Path(name).stem

    @property
    def edge_l0(self) -> int:
        """Edge of a tile in level-0 px; tiles that are not square there are refused."""
        width, height = (int(n) for n in self.tiles.attributes["tile_size_l0"])
        got = f"{width} x {height} in {self.slide_id!r}; export to stamp, which has µm"
        require(width == height, "tiles must be square in level-0 px", got)
        return width

    @property
    def size(self) -> tuple[int, int]:
        """Px of level 0."""
        width, height = self._known(
            "size", ("width", "height"), "import it with --slides"
        )
        return int(width), int(height)

    @property
    def mpp(self) -> tuple[float, float]:
        """µm/px."""
        x, y = self._known("slide_mpp", ("mpp_x", "mpp_y"), "give it to the run")
        return float(x), float(y)

    def _known(self, what: str, names: Sequence[str], remedy: str) -> list[Any]:
        found = [self.facts.get(name) for name in names]
        if not all(found):
            raise InvalidInputError(f"{what} is missing in {self.slide_id!r}; {remedy}")
        return found

    def features(self) -> npt.NDArray[Any]:
        """Its embeddings (N, D). Memory: 4 N D bytes."""
        there = read_tiles(self.features_path).features if self.features_path else None
        assert there is not None
        return there

    def write_pt(
        self, path: Path, order: npt.NDArray[np.intp] | slice = slice(None)
    ) -> None:
        """Writes the embeddings as one tensor, float32 (N, D); `order` is of its rows."""
        import torch

        tensor = torch.from_numpy(self.features()[order]).float()
        with path.open(
            "wb"
        ) as file:  # by a name, the archive would hold the temporary file's
            torch.save(tensor, file)

    def check_embedded(self, tool: str) -> None:
        """Refuses a slide without the embedding of any tile."""
        got = f"none of {self.slide_id!r}; {tool} has no files of coordinates alone"
        there = self.features_path is not None and len(self.tiles.coords_l0)
        require(there, "tiles must be embedded", got)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a tool lays out its folder."""

    files: Callable[
        [PeerSlide], Iterator[tuple[str, Source]]
    ]  # relative name, what is there
    tables: Callable[[Sequence[PeerSlide]], Tables]


def _tool(name: str, help: str, module: str = "peer_export") -> Entry:
    return Entry(
        name=name, help=help, target=f"thinsection.pipeline.{module}:{name.upper()}"
    )


LAYOUTS: Registry[Layout] = Registry(
    "layout",
    "thinsection.layouts",
    (
        _tool("trident", "TRIDENT's job_dir: coordinates, features, slide features."),
        _tool("clam", "CLAM's patches, h5_files, pt_files and its lists."),
        _tool(
            "stamp", "STAMP's feature_dir, coordinates in µm, clini and slide tables."
        ),
        _tool(
            "slide2vec",
            "slide2vec's tilings, tile embeddings and lists.",
            "peer_slide2vec",
        ),
    ),
)


def export_peer(
    folder: Path,
    out: Path,
    tool: str,
    *,
    features: str | None = None,
    copy: bool = False,
    on_left_out: Listener | None = None,
) -> int:
    """Number of slides that are now in a folder as `tool` writes it.

    What is there is never replaced by other bytes; doing it again adds slides that are new. Files
    that are equal in both are hard links (copies across file systems, or with `copy`).

    `out` is job_dir of TRIDENT, feat_dir of CLAM, ...; `tool` of `LAYOUTS`; `features`
    'GRID/features_NAME' or NAME, None where there is one, or coordinates alone; `copy` is for
    tools that write over their files; `on_left_out` is told of each slide that cannot be exported:
    with None that is an error.

    Memory: a slide's embeddings, 4 N D bytes; some kB per slide.

    Raises StoreError: nothing to export, or other bytes are in the way; InvalidInputError: several
    embeddings and none named, or two slides of one file name.
    """
    layout, results, done = LAYOUTS.load(tool), open_results(folder), list[PeerSlide]()
    known = results.features
    address = one_address(known, features, "features") if known or features else ""
    grid = (
        address.split("/")[0] if address else one_address(results.grids, None, "grid")
    )
    slides, stems = dict[str, PeerSlide](), dict[str, str]()
    how: dict[str, Any] = {
        "out": out.absolute(),
        "grid": grid,
        "address": address,
        "tool": tool,
    }
    for slide_id, ledger in results.ledgers.items():
        with leaving_out(slide_id, on_left_out, StoreError, InvalidInputError):
            require(
                not ledger.damage,
                "ledger must be whole",
                ledger.damage,
                error=StoreError,
            )
            if f"{grid}/tiles" in ledger.stages and (
                not address or address in ledger.stages
            ):
                slides[slide_id] = _slide(results, ledger, **how)
    for slide_id, slide in slides.items():
        other = stems.setdefault(slide.file_stem, slide_id)
        got = f"{slide.file_stem!r} of {other!r} and {slide_id!r}; {tool} cannot tell them apart"
        rule = "slides must have different file names"
        require(tool in ("stamp", "slide2vec") or other == slide_id, rule, got)
    for slide_id, slide in slides.items():
        with leaving_out(slide_id, on_left_out, InvalidInputError):
            for name, source in layout.files(slide):
                _place(out / name, source, copy=copy)
            done.append(slide)
    require(
        done, "folder must hold tiles", f"none in {str(folder)!r}", error=StoreError
    )
    for name, rows in layout.tables(done).items():
        _place_table(out / name, rows)
    return len(done)


def _slide(
    results: Results,
    ledger: SlideLedger,
    *,
    out: Path,
    grid: str,
    address: str,
    tool: str,
) -> PeerSlide:
    stages, prefix = ledger.stages, f"{grid}/slide_features_"
    files = {
        a: results.folder / next(iter(r.files)) for a, r in stages.items() if r.files
    }
    pooled = [a for a in files if a.startswith(prefix) and address in stages[a].needs]
    told = stages[address].facts if address else {}
    label = address.rpartition("/")[2].removeprefix("features_")
    encoder = peer_encoder(tool, str(told.get("encoder", "")), label)
    tiles = files[f"{grid}/tiles"]
    named = {a.removeprefix(prefix).replace(label, encoder): files[a] for a in pooled}
    embedded: dict[str, Any] = {"encoder": encoder, "dim": int(told.get("dim", 0))}
    embedded |= {"features_path": files.get(address), "slide_features": named}
    known: dict[str, Any] = {
        "facts": ledger.slide,
        "tiles": read_tiles(tiles),
        **embedded,
    }
    return PeerSlide(slide_id=ledger.slide_id, out=out, tiles_path=tiles, **known)


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


def _trident(slide: PeerSlide) -> Iterator[tuple[str, Source]]:
    """Source: mahmoodlab/TRIDENT a91fa84, trident/Processor.py."""
    said = slide.tiles.attributes
    power = float(said.get("target_magnification", 0))
    got = f"{power} in {slide.slide_id!r}; TRIDENT needs a slide_mpp or an objective's power"
    require(power > 0, "target_magnification must be positive", got)
    require(slide.edge_l0 > 0, "tiles must have an edge", str(slide.edge_l0))
    grid = f"{power:g}x_{int(said['patch_size'])}px_{int(said['overlap'])}px_overlap"
    yield f"{grid}/patches/{slide.file_stem}_patches.h5", slide.tiles_path
    if slide.features_path is not None:
        yield (
            f"{grid}/features_{slide.encoder}/{slide.file_stem}.h5",
            slide.features_path,
        )
    for name, path in slide.slide_features.items():
        yield f"{grid}/slide_features_{name}/{slide.file_stem}.h5", path


def _trident_tables(slides: Sequence[PeerSlide]) -> Tables:
    """`--custom_list_of_wsis`: an absolute path wins over its --wsi_dir."""
    rows = [
        {"wsi": str(Path(s.path).absolute()), "mpp": s.facts.get("mpp_x")}
        for s in slides
    ]
    return {"slides.csv": rows}


def _clam(slide: PeerSlide) -> Iterator[tuple[str, Source]]:
    """Source: mahmoodlab/CLAM 53e2409, extract_features_fp.py, wsi_core/WholeSlideImage.py."""
    size, edge, name = slide.size, slide.edge_l0, slide.file_stem
    # it reads patch_size px of patch_level, so both are given of level 0: there is no level whose
    # number its OpenSlide and our reader count alike in every file
    attributes = {
        **{"patch_size": edge, "patch_level": 0, "patch_size_level0": edge},
        **{"downsample": (1.0, 1.0), "downsampled_level_dim": size, "level_dim": size},
        **{"name": name, "save_path": ""},
    }

    def write_coords(path: Path) -> None:
        with TilesWriter(path, dim=0, attributes=attributes) as writer:
            writer.append(slide.tiles.coords_l0, None)

    yield f"patches/{name}.h5", write_coords
    if slide.features_path is not None:
        yield f"h5_files/{name}.h5", slide.features_path
        yield f"pt_files/{name}.pt", slide.write_pt


def _clam_tables(slides: Sequence[PeerSlide]) -> Tables:
    """What `extract_features_fp.py --csv_path` and its dataset classes read."""
    files = [
        {"slide_id": Path(s.path).name, "process": 0, "status": "processed"}
        for s in slides
    ]
    labels = []
    for name, facts in ((s.file_stem, s.facts) for s in slides if s.facts.get("label")):
        case = facts.get("patient_id") or name
        labels.append({"case_id": case, "slide_id": name, "label": facts["label"]})
    return {"process_list_autogen.csv": files} | (
        {"dataset.csv": labels} if labels else {}
    )


def _stamp(slide: PeerSlide) -> Iterator[tuple[str, Source]]:
    """Source: KatherLab/STAMP c54ce06, src/stamp/preprocessing/__init__.py: `feats`, µm."""
    mpp, said = slide.mpp, slide.tiles.attributes

    def write(path: Path) -> None:
        edge_um = float(said["tile_size_l0"][0]) * mpp[0]
        told = {"extractor": slide.encoder, "unit": "um", "tile_size_um": edge_um}
        told |= {"tile_size_px": int(said["patch_size"]), "feat_type": "tile"}
        with new_h5(path) as file:
            add_dataset(file, "feats", slide.features())
            add_dataset(file, "coords", slide.tiles.coords_l0 * np.array(mpp))
            file.attrs.update(told)

    slide.check_embedded("STAMP")
    yield f"{slide.encoder}/{slide.slide_id}.h5", write


def _stamp_tables(slides: Sequence[PeerSlide]) -> Tables:
    """Its `clini_table` and `slide_table`; the ground truth's column is LABEL."""
    patients = {s.slide_id: s.facts.get("patient_id") or s.slide_id for s in slides}
    labels = {
        patients[s.slide_id]: s.facts["label"] for s in slides if s.facts.get("label")
    }
    files = [
        {"PATIENT": patients[s.slide_id], "FILENAME": f"{s.slide_id}.h5"}
        for s in slides
    ]
    clinical = [
        {"PATIENT": patient, "LABEL": label} for patient, label in labels.items()
    ]
    return {"slide.csv": files} | ({"clini.csv": clinical} if clinical else {})


TRIDENT = Layout(files=_trident, tables=_trident_tables)
CLAM = Layout(files=_clam, tables=_clam_tables)
STAMP = Layout(files=_stamp, tables=_stamp_tables)
