"""The folders of TRIDENT, CLAM, STAMP and slide2vec: which files a slide has there.

What is the same file in both is ours, to be linked. What their readers take for the field of view
is ours in µm: docs/formats.md says which of them were run on it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError, require
from thinsection.store.tiles_h5 import TilesFile, TilesWriter, add_dataset, read_tiles

_COMPOUND = (".ome.tif", ".ome.tiff", ".ome.zarr")  # suffixes that TRIDENT takes as one

Source = Path | Callable[[Path], None]  # a file of ours, or what writes one
Tables = Mapping[str, list[dict[str, Any]]]  # file name -> rows


@dataclass(frozen=True, kw_only=True)
class PeerSlide:
    """One slide as a layout sees it."""

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
        """Edge of a tile in level-0 px.

        Raises InvalidInputError: tiles are not square there.
        """
        width, height = (int(n) for n in self.tiles.attributes["tile_size_l0"])
        got = f"{width} x {height} in {self.slide_id!r}; export to stamp, which has µm"
        require(width == height, "tiles must be square in level-0 px", got)
        return width

    @property
    def size(self) -> tuple[int, int]:
        """Px of level 0. Raises InvalidInputError: nobody knows them."""
        width, height = self._known("size", ("width", "height"), "import it with --slides")
        return int(width), int(height)

    @property
    def mpp(self) -> tuple[float, float]:
        """µm/px. Raises InvalidInputError: nobody knows it."""
        x, y = self._known("slide_mpp", ("mpp_x", "mpp_y"), "give it to the run")
        return float(x), float(y)

    def _known(self, what: str, names: Sequence[str], remedy: str) -> list[Any]:
        found = [self.facts.get(name) for name in names]
        if not all(found):
            raise InvalidInputError(f"{what} is missing in {self.slide_id!r}; {remedy}")
        return found

    def features(self) -> TilesFile:
        """Their embeddings. Memory: 4 N D bytes."""
        assert self.features_path is not None
        return read_tiles(self.features_path)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a tool lays out its folder."""

    files: Callable[[PeerSlide], Iterator[tuple[str, Source]]]  # relative name, what is there
    tables: Callable[[Sequence[PeerSlide]], Tables]


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
        yield f"{grid}/features_{slide.encoder}/{slide.file_stem}.h5", slide.features_path
    for name, path in slide.slide_features.items():
        yield f"{grid}/slide_features_{name}/{slide.file_stem}.h5", path


def _trident_tables(slides: Sequence[PeerSlide]) -> Tables:
    """`--custom_list_of_wsis`: an absolute path wins over its --wsi_dir."""
    rows = [{"wsi": str(Path(s.path).absolute()), "mpp": s.facts.get("mpp_x")} for s in slides]
    return {"slides.csv": rows}


def _clam(slide: PeerSlide) -> Iterator[tuple[str, Source]]:
    """Source: mahmoodlab/CLAM 53e2409, extract_features_fp.py, wsi_core/WholeSlideImage.py.

    It reads patch_size px of patch_level, so both are given of level 0: there is no level whose
    number its OpenSlide and our reader count alike in every file.
    """
    size = slide.size
    attributes = {
        "patch_size": slide.edge_l0,
        "patch_level": 0,
        "patch_size_level0": slide.edge_l0,
        "downsample": (1.0, 1.0),
        "downsampled_level_dim": size,
        "level_dim": size,
        "name": slide.file_stem,
        "save_path": "",
    }

    def write_coords(path: Path) -> None:
        with TilesWriter(path, dim=0, attributes=attributes) as writer:
            writer.append(slide.tiles.coords_l0, None)

    yield f"patches/{slide.file_stem}.h5", write_coords
    if slide.features_path is not None:
        yield f"h5_files/{slide.file_stem}.h5", slide.features_path
        yield f"pt_files/{slide.file_stem}.pt", lambda path: write_pt(slide, path)


def write_pt(slide: PeerSlide, path: Path, order: npt.NDArray[np.intp] | None = None) -> None:
    """Writes the embeddings as one tensor, float32 (N, D); `order` is of its rows."""
    import torch

    values = slide.features().features
    assert values is not None
    tensor = torch.from_numpy(values if order is None else values[order]).float()
    with path.open("wb") as file:  # by a name, the archive would hold that of the temporary file
        torch.save(tensor, file)


def _clam_tables(slides: Sequence[PeerSlide]) -> Tables:
    """What `extract_features_fp.py --csv_path` and its dataset classes read."""
    files = [{"slide_id": Path(s.path).name, "process": 0, "status": "processed"} for s in slides]
    labels = [
        {
            "case_id": s.facts.get("patient_id") or s.file_stem,
            "slide_id": s.file_stem,
            "label": s.facts["label"],
        }
        for s in slides
        if s.facts.get("label")
    ]
    return {"process_list_autogen.csv": files} | ({"dataset.csv": labels} if labels else {})


def _stamp(slide: PeerSlide) -> Iterator[tuple[str, Source]]:
    """Source: KatherLab/STAMP c54ce06, src/stamp/preprocessing/__init__.py: `feats`, µm."""
    mpp = slide.mpp

    def write(path: Path) -> None:
        import h5py

        stored, said = slide.features(), slide.tiles.attributes
        assert stored.features is not None
        with h5py.File(path, "w", locking="best-effort") as file:
            add_dataset(file, "feats", stored.features)
            add_dataset(file, "coords", stored.coords_l0 * np.array(mpp))
            file.attrs["extractor"] = slide.encoder
            file.attrs["unit"] = "um"
            file.attrs["tile_size_um"] = float(said["tile_size_l0"][0]) * mpp[0]
            file.attrs["tile_size_px"] = int(said["patch_size"])
            file.attrs["feat_type"] = "tile"

    check_embedded(slide, "STAMP")
    yield f"{slide.encoder}/{slide.slide_id}.h5", write


def _stamp_tables(slides: Sequence[PeerSlide]) -> Tables:
    """Its `clini_table` and `slide_table`; the ground truth's column is LABEL."""
    patients = {s.slide_id: s.facts.get("patient_id") or s.slide_id for s in slides}
    labels = {patients[s.slide_id]: s.facts["label"] for s in slides if s.facts.get("label")}
    files = [{"PATIENT": patients[s.slide_id], "FILENAME": f"{s.slide_id}.h5"} for s in slides]
    clinical = [{"PATIENT": patient, "LABEL": label} for patient, label in labels.items()]
    return {"slide.csv": files} | ({"clini.csv": clinical} if clinical else {})


def check_embedded(slide: PeerSlide, tool: str) -> None:
    """InvalidInputError where the slide has no embedding of any tile."""
    got = f"none of {slide.slide_id!r}; {tool} has no files of coordinates alone"
    there = slide.features_path is not None and len(slide.tiles.coords_l0)
    require(there, "tiles must be embedded", got)


TRIDENT = Layout(files=_trident, tables=_trident_tables)
CLAM = Layout(files=_clam, tables=_clam_tables)
STAMP = Layout(files=_stamp, tables=_stamp_tables)
