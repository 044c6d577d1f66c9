"""Folders of TRIDENT, CLAM and STAMP: the files for one slide, and the tables."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from thinsection.errors import InvalidInputError
from thinsection.exchange.peer_export import Layout, PeerSlide, Source, Tables
from thinsection.store.hdf5 import add_dataset, new_h5
from thinsection.store.tiles_h5 import TilesWriter


def _trident_files(slide: PeerSlide) -> Iterator[tuple[str, Source]]:
    """Files of a job_dir.

    Source:
        mahmoodlab/TRIDENT a91fa84, trident/Processor.py.
    """
    attributes = slide.tiles.attributes
    power = float(attributes.get("target_magnification", 0))
    if power <= 0 and attributes.get("tile_mpp"):
        # imported by an older version
        raise InvalidInputError(
            f"magnification must be stored with the tiles, got none in {slide.slide_id!r}; "
            "import them again"
        )
    if power <= 0:
        raise InvalidInputError(
            f"slide_mpp is missing in {slide.slide_id!r}, and TRIDENT states a magnification; "
            "import or run again with a resolution"
        )
    if slide.edge_l0 <= 0:
        raise InvalidInputError(
            f"tiles must have an edge length > 0, got {slide.edge_l0}"
        )
    tile_px = int(attributes["patch_size"])
    grid = f"{power:g}x_{tile_px}px_{int(attributes['overlap'])}px_overlap"
    stem = slide.file_stem
    yield f"{grid}/patches/{stem}_patches.h5", slide.tiles_path
    if slide.features_path is not None:
        yield f"{grid}/features_{slide.encoder}/{stem}.h5", slide.features_path
    for name, path in slide.slide_features.items():
        yield f"{grid}/slide_features_{name}/{stem}.h5", path


def _trident_tables(slides: Sequence[PeerSlide]) -> Tables:
    """Table for `--custom_list_of_wsis`; its absolute paths replace TRIDENT's --wsi_dir."""
    rows = []
    for slide in slides:
        path = str(Path(slide.path).absolute())
        rows.append({"wsi": path, "mpp": slide.facts.get("mpp_x")})
    return {"slides.csv": rows}


def _clam_files(slide: PeerSlide) -> Iterator[tuple[str, Source]]:
    """Files of a feat_dir with its patches.

    Source:
        mahmoodlab/CLAM 53e2409, extract_features_fp.py, wsi_core/WholeSlideImage.py.
    """
    stem = slide.file_stem
    # CLAM reads patch_size pixels at patch_level. Both refer to level 0 here, since OpenSlide and
    # our reader do not number the other levels alike in every file.
    attributes = {
        "patch_size": slide.edge_l0,
        "patch_level": 0,
        "patch_size_level0": slide.edge_l0,
        "downsample": (1.0, 1.0),
        "downsampled_level_dim": slide.size,
        "level_dim": slide.size,
        "name": stem,
        "save_path": "",
    }

    def write_coords(path: Path) -> None:
        with TilesWriter(path, dim=0, attributes=attributes) as writer:
            writer.append(slide.tiles.coords_l0, None)

    yield f"patches/{stem}.h5", write_coords
    if slide.features_path is not None:
        yield f"h5_files/{stem}.h5", slide.features_path
        yield f"pt_files/{stem}.pt", slide.write_pt


def _clam_tables(slides: Sequence[PeerSlide]) -> Tables:
    """Tables that `extract_features_fp.py --csv_path` and CLAM's dataset classes read."""
    processed = []
    labels = []
    for slide in slides:
        name = Path(slide.path).name
        processed.append({"slide_id": name, "process": 0, "status": "processed"})
        label = slide.facts.get("label")
        if label:
            stem = slide.file_stem
            case = slide.facts.get("patient_id") or stem
            labels.append({"case_id": case, "slide_id": stem, "label": label})
    tables = {"process_list_autogen.csv": processed}
    if labels:
        tables["dataset.csv"] = labels
    return tables


def _stamp_files(slide: PeerSlide) -> Iterator[tuple[str, Source]]:
    """File of a feature_dir: `feats`, and `coords` in µm.

    Source:
        KatherLab/STAMP c54ce06, src/stamp/preprocessing/__init__.py.
    """
    mpp = slide.mpp
    attributes = slide.tiles.attributes

    def write(path: Path) -> None:
        with new_h5(path) as file:
            add_dataset(file, "feats", slide.features())
            add_dataset(file, "coords", slide.tiles.coords_l0 * np.array(mpp))
            file.attrs["extractor"] = slide.encoder
            file.attrs["unit"] = "um"
            file.attrs["tile_size_um"] = float(attributes["tile_size_l0"][0]) * mpp[0]
            file.attrs["tile_size_px"] = int(attributes["patch_size"])
            file.attrs["feat_type"] = "tile"

    slide.check_embedded("STAMP")
    yield f"{slide.encoder}/{slide.slide_id}.h5", write


def _stamp_tables(slides: Sequence[PeerSlide]) -> Tables:
    """Tables `clini_table` and `slide_table`; the ground truth's column is LABEL."""
    files = []
    label_by_patient = {}
    for slide in slides:
        patient = slide.facts.get("patient_id") or slide.slide_id
        files.append({"PATIENT": patient, "FILENAME": f"{slide.slide_id}.h5"})
        if slide.facts.get("label"):
            label_by_patient[patient] = slide.facts["label"]
    tables = {"slide.csv": files}
    if label_by_patient:
        tables["clini.csv"] = [
            {"PATIENT": patient, "LABEL": label}
            for patient, label in label_by_patient.items()
        ]
    return tables


TRIDENT = Layout(files=_trident_files, tables=_trident_tables)
CLAM = Layout(files=_clam_files, tables=_clam_tables)
STAMP = Layout(files=_stamp_files, tables=_stamp_tables)
