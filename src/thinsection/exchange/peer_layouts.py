"""Layouts of TRIDENT, CLAM, STAMP and slide2vec: the files of one slide, and the tables.

For slide2vec these are tilings in hs2p's format, embeddings as tensors, and a list of slides.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from thinsection.config import read_toml
from thinsection.errors import InvalidInputError
from thinsection.exchange.peer_export import (
    BLOCK_ROWS,
    Layout,
    PeerSlide,
    Source,
    Tables,
)
from thinsection.files.atomic import write_json
from thinsection.slide.geometry import nominal_mpp
from thinsection.store.hdf5 import add_dataset, new_h5
from thinsection.store.tile_tables import add_rows
from thinsection.store.tiles_h5 import TilesWriter
from thinsection.types import Document


def _trident_files(slide: PeerSlide) -> Iterator[tuple[str, Source]]:
    """Files of a job_dir.

    Source:
        mahmoodlab/TRIDENT a91fa84, trident/Processor.py.
    """
    attributes = slide.tiles.attributes
    power = float(attributes.get("target_magnification", 0))
    if power <= 0 and attributes.get("tile_mpp"):
        # an older version of thinsection imported these tiles
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
            add_rows(file, "feats", slide.features(), BLOCK_ROWS)
            add_dataset(file, "coords", slide.tiles.coords_l0 * np.array(mpp))
            file.attrs["extractor"] = slide.encoder
            file.attrs["unit"] = "um"
            file.attrs["tile_size_um"] = float(attributes["tile_size_l0"][0]) * mpp[0]
            file.attrs["tile_size_px"] = int(attributes["patch_size"])
            file.attrs["feat_type"] = "tile"

    slide.check_embedded("STAMP")
    yield f"{slide.encoder}/{slide.slide_id}.h5", write


def _stamp_tables(slides: Sequence[PeerSlide]) -> Tables:
    """Tables `clini_table` and `slide_table`; the target's column is LABEL."""
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


_BACKEND = "openslide"


@cache
def _slide2vec_keys() -> Document:
    """Keys that each of slide2vec's JSON documents must have."""
    return read_toml(Path(__file__).with_name("slide2vec_keys.toml"))


def _slide2vec_files(slide: PeerSlide) -> Iterator[tuple[str, Source]]:
    """Files with the tiling and the embeddings of a slide.

    Source:
        clemsgrs/slide2vec 7cfa6bf, slide2vec/artifacts.py, and hs2p 6.1.0, tiling/io.py.
    """
    slide.check_embedded("slide2vec")
    x, y = slide.tiles.coords_l0.T
    order = np.lexsort((y, x))  # slide2vec sorts tiles by x, then y
    fractions = slide.tiles.columns.get("tissue_fraction", np.ones(len(x)))[order]
    tiling = _tiling_document(slide)
    embedding = _embedding_document(slide)

    def write_coordinates(path: Path) -> None:
        with path.open("wb") as file:
            np.savez_compressed(
                file,
                x=x[order],
                y=y[order],
                tile_index=np.arange(len(order), dtype=np.int32),
                tissue_fractions=fractions.astype(np.float32),
            )

    yield _coordinates_name(slide, "npz"), write_coordinates
    yield _coordinates_name(slide, "meta.json"), lambda path: write_json(path, tiling)
    name = f"tile_embeddings/{slide.slide_id}"
    yield f"{name}.pt", lambda path: slide.write_pt(path, order)
    yield f"{name}.meta.json", lambda path: write_json(path, embedding)


def _coordinates_name(slide: PeerSlide, suffix: str) -> str:
    """Name of a slide's tile file, relative to the tool's folder."""
    return f"tiles/{slide.slide_id}.coordinates.{suffix}"


def _embedding_document(slide: PeerSlide) -> Document:
    """Metadata of a slide's embeddings."""
    return {
        "sample_id": slide.slide_id,
        "artifact_type": "tile_embeddings",
        "format": "pt",
        "feature_dim": slide.dim,
        "num_tiles": len(slide.tiles.coords_l0),
        "encoder_name": slide.encoder,
        "encoder_level": "tile",
        "coordinates_npz_path": f"{slide.out}/{_coordinates_name(slide, 'npz')}",
        "coordinates_meta_path": f"{slide.out}/{_coordinates_name(slide, 'meta.json')}",
        "tiles_tar_path": "",
        "image_path": slide.path,
        "mask_path": None,
        "tile_size_lv0": slide.edge_l0,
        "backend": _BACKEND,
        "read_tile_size_px": slide.edge_l0,
        "requested_tile_size_px": int(slide.tiles.attributes["patch_size"]),
        "encoder_input_size_px": None,
        "requested_spacing_um": _requested_mpp(slide),
        "annotation": None,
    }


def _requested_mpp(slide: PeerSlide) -> float:
    """Requested resolution, the same for all slides; if it is unknown, the slide's own."""
    attributes = slide.tiles.attributes
    power = float(attributes.get("target_magnification", 0))
    if power:
        return nominal_mpp(power)
    return slide.mpp[0] * slide.edge_l0 / int(attributes["patch_size"])


def _tiling_document(slide: PeerSlide) -> Document:
    """Metadata of a tiling for hs2p; fields that do not apply to it are None."""
    attributes = slide.tiles.attributes
    edge_l0 = slide.edge_l0
    mpp = slide.mpp[0]
    tile_px = int(attributes["patch_size"])
    levels = slide.facts.get("levels") or [{"downsample": 1}]
    keys = _slide2vec_keys()
    provenance = dict.fromkeys(keys["provenance"]) | {
        "sample_id": slide.slide_id,
        "image_path": slide.path,
        "backend": _BACKEND,
        "requested_backend": _BACKEND,
        "spacing_at_level_0": mpp,
    }
    return {
        "provenance": provenance,
        "slide": {
            "dimensions": list(slide.size),
            "base_spacing_um": mpp,
            "level_downsamples": [float(level["downsample"]) for level in levels],
        },
        "tiling": {
            "requested_tile_size_px": tile_px,
            "requested_spacing_um": _requested_mpp(slide),
            # the field of view in level-0 pixels, which is exact for any pyramid
            "read_level": 0,
            "read_tile_size_px": edge_l0,
            "read_spacing_um": mpp,
            "tile_size_lv0": edge_l0,
            "tolerance": float(attributes.get("mpp_tolerance", 0)),
            "step_px_lv0": int(attributes["stride_l0"][0]),
            "overlap": int(attributes["overlap"]) / tile_px,
            "min_tissue_fraction": 0.0,
            "is_within_tolerance": edge_l0 == tile_px,
            "n_tiles": len(slide.tiles.coords_l0),
        },
        "segmentation": dict.fromkeys(keys["segmentation"])
        | {"tissue_method": "thinsection"},
        "filtering": dict.fromkeys(keys["filtering"]),
        "artifact": dict.fromkeys(keys["artifact"])
        | {"coordinate_space": "level0_px", "tile_order": "x_then_y"},
    }


def _slide2vec_tables(slides: Sequence[PeerSlide]) -> Tables:
    """The list from which slide2vec's pipeline resumes, and the manifest of slides."""
    process_list = []
    manifest = []
    for slide in slides:
        manifest.append(
            {
                "sample_id": slide.slide_id,
                "image_path": slide.path,
                "spacing_at_level_0": slide.mpp[0],
            }
        )
        row: Document = dict.fromkeys(_slide2vec_keys()["process_list"])
        row |= {
            "sample_id": slide.slide_id,
            "annotation": "tissue",
            "image_path": slide.path,
            "requested_backend": _BACKEND,
            "backend": _BACKEND,
            "tiling_status": "success",
            "spacing_at_level_0": slide.mpp[0],
            "num_tiles": len(slide.tiles.coords_l0),
            "coordinates_npz_path": f"{slide.out}/{_coordinates_name(slide, 'npz')}",
            "coordinates_meta_path": (
                f"{slide.out}/{_coordinates_name(slide, 'meta.json')}"
            ),
            "feature_status": "success",
            "feature_path": f"{slide.out}/tile_embeddings/{slide.slide_id}.pt",
            "encoder_name": slide.encoder,
            "feature_kind": "tile",
        }
        process_list.append(row)
    return {"process_list.csv": process_list, "slides.csv": manifest}


SLIDE2VEC = Layout(files=_slide2vec_files, tables=_slide2vec_tables)
