"""The folders of TRIDENT, CLAM, STAMP and slide2vec: which files a slide has there.

What is the same file in both is ours, to be linked. What their readers take for the field of view
is ours in µm: docs/formats.md says which of them were run on it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinsection.errors import InvalidInputError, importing, require
from thinsection.store.tiles_h5 import TilesFile, TilesWriter, read_tiles

_COMPOUND = (".ome.tif", ".ome.tiff", ".ome.zarr")  # suffixes that TRIDENT takes as one

Source = Path | Callable[[Path], None]  # a file of ours, or what writes one
Tables = Mapping[str, list[dict[str, Any]]]  # file name -> rows


@dataclass(frozen=True, kw_only=True)
class PeerSlide:
    """One slide as a layout sees it."""

    slide_id: str
    facts: Mapping[str, Any]  # of the ledger: slide_path, width, mpp_x, label, ...
    tiles: TilesFile  # coordinates, attributes and columns; no embeddings
    tiles_path: Path
    encoder: str = ""  # its name there; '' where there are no embeddings
    features_path: Path | None = None
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
    def mpp(self) -> tuple[float, float]:
        """µm/px. Raises InvalidInputError: nobody knows it."""
        x, y = self.facts.get("mpp_x"), self.facts.get("mpp_y")
        if not x or not y:
            raise InvalidInputError(
                f"slide_mpp is missing in {self.slide_id!r}; give it to the run"
            )
        return float(x), float(y)

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
    size = (int(slide.facts["width"]), int(slide.facts["height"]))
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
        yield f"pt_files/{slide.file_stem}.pt", lambda path: _write_pt(slide, path)


def _write_pt(slide: PeerSlide, path: Path) -> None:
    with importing("CLAM's pt_files need torch", "torch"):
        import torch
    values = slide.features().features
    assert values is not None
    with path.open("wb") as file:  # by a name, the archive would hold that of the temporary file
        torch.save(torch.from_numpy(values).float(), file)


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


TRIDENT = Layout(files=_trident, tables=_trident_tables)
CLAM = Layout(files=_clam, tables=_clam_tables)
