"""slide2vec's folder: tilings as hs2p stores them, embeddings as tensors, its list of slides."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from thinsection.files.atomic import write_json
from thinsection.pipeline.peer_export import Layout, PeerSlide, Source, Tables
from thinsection.slide.geometry import nominal_mpp

# keys of hs2p's metadata, which it asks for by name; those that we know are set below
_HS2P = {
    "provenance": (
        "sample_id image_path mask_path backend requested_backend spacing_at_level_0 "
        "mask_backend requested_mask_backend"
    ),
    "slide": "",
    "tiling": "",
    "segmentation": (
        "tissue_method requested_seg_downsample seg_downsample seg_level seg_spacing_um "
        "sthresh sthresh_up mthresh close sam2_checkpoint_path sam2_config_path "
        "mask_path ref_tile_size_px tissue_mask_tissue_value mask_level mask_spacing_um"
    ),
    "filtering": (
        "a_t a_h filter_white filter_black white_threshold black_threshold "
        "fraction_threshold filter_grayspace grayspace_saturation_threshold "
        "grayspace_fraction_threshold filter_blur blur_threshold qc_spacing_um"
    ),
    "artifact": "coordinate_space tile_order annotation selection_strategy output_mode",
}
_PROCESS = (
    "annotation output_mode mask_path requested_mask_backend mask_backend tiles_tar_path "
    "mask_preview_path tiling_preview_path output_variant error traceback"
)


def _slide2vec(slide: PeerSlide) -> Iterator[tuple[str, Source]]:
    """Source: clemsgrs/slide2vec 7cfa6bf, slide2vec/artifacts.py, and hs2p 6.1.0, tiling/io.py."""
    slide.check_embedded("slide2vec")
    x, y = slide.tiles.coords_l0.T
    order = np.lexsort((y, x))  # its tiles are sorted by x, then y
    fractions = slide.tiles.columns.get("tissue_fraction", np.ones(len(x)))[order]

    def coordinates(path: Path) -> None:
        index = np.arange(len(order), dtype=np.int32)
        columns = {"x": x[order], "y": y[order], "tile_index": index}
        with path.open("wb") as file:
            np.savez_compressed(
                file, **columns, tissue_fractions=fractions.astype(np.float32)
            )

    edge, px = slide.edge_l0, int(slide.tiles.attributes["patch_size"])
    embedded = {
        **{
            "sample_id": slide.slide_id,
            "artifact_type": "tile_embeddings",
            "format": "pt",
        },
        **{"feature_dim": slide.dim, "num_tiles": len(order)},
        **{"encoder_name": slide.encoder, "encoder_level": "tile"},
        **_paths(slide, f"{slide.out}/"),
        **{"tiles_tar_path": "", "image_path": slide.path, "mask_path": None},
        **{"tile_size_lv0": edge, "backend": "openslide", "read_tile_size_px": edge},
        **{"requested_tile_size_px": px, "encoder_input_size_px": None},
        **{"requested_spacing_um": _asked_mpp(slide), "annotation": None},
    }
    meta, home = _hs2p_meta(slide), f"tile_embeddings/{slide.slide_id}"
    npz, of_tiles = _paths(slide, "").values()
    yield npz, coordinates
    yield of_tiles, lambda path: write_json(path, meta)
    yield f"{home}.pt", lambda path: slide.write_pt(path, order)
    yield f"{home}.meta.json", lambda path: write_json(path, embedded)


def _paths(slide: PeerSlide, folder: str) -> dict[str, str]:
    """The files of its tiles."""
    stem = f"{folder}tiles/{slide.slide_id}.coordinates"
    return {
        "coordinates_npz_path": f"{stem}.npz",
        "coordinates_meta_path": f"{stem}.meta.json",
    }


def _asked_mpp(slide: PeerSlide) -> float:
    """What was asked for, equal in all slides; the true one where nobody knows."""
    said = slide.tiles.attributes
    if power := float(said.get("target_magnification", 0)):
        return nominal_mpp(power)
    return slide.mpp[0] * slide.edge_l0 / int(said["patch_size"])


def _hs2p_meta(slide: PeerSlide) -> dict[str, Any]:
    """What hs2p asks of a tiling; every key must be there, and what does not apply is None."""
    said, edge, mpp = slide.tiles.attributes, slide.edge_l0, slide.mpp[0]
    px, levels = (
        int(said["patch_size"]),
        slide.facts.get("levels") or [{"downsample": 1}],
    )
    read = {
        "backend": "openslide",
        "requested_backend": "openslide",
        "spacing_at_level_0": mpp,
    }
    known: dict[str, dict[str, Any]] = {
        "provenance": {"sample_id": slide.slide_id, "image_path": slide.path, **read},
        "slide": {
            **{"dimensions": list(slide.size), "base_spacing_um": mpp},
            "level_downsamples": [float(lv["downsample"]) for lv in levels],
        },
        "tiling": {
            **{"requested_tile_size_px": px, "requested_spacing_um": _asked_mpp(slide)},
            "read_level": 0,  # the field of view in px of level 0: exact, whatever the levels are
            **{
                "read_tile_size_px": edge,
                "read_spacing_um": mpp,
                "tile_size_lv0": edge,
            },
            "tolerance": float(said.get("mpp_tolerance", 0)),
            **{
                "step_px_lv0": int(said["stride_l0"][0]),
                "overlap": int(said["overlap"]) / px,
            },
            **{"min_tissue_fraction": 0.0, "is_within_tolerance": edge == px},
            "n_tiles": len(slide.tiles.coords_l0),
        },
        "segmentation": {"tissue_method": "thinsection"},
        "filtering": {},
        "artifact": {"coordinate_space": "level0_px", "tile_order": "x_then_y"},
    }
    return {
        name: dict.fromkeys(keys.split()) | known[name] for name, keys in _HS2P.items()
    }


def _slide2vec_tables(slides: Sequence[PeerSlide]) -> Tables:
    """The list that its pipeline goes on from, and the manifest of slides."""
    lists, manifest = [], []
    for s in slides:
        known = {
            "sample_id": s.slide_id,
            "image_path": s.path,
            "spacing_at_level_0": s.mpp[0],
        }
        manifest.append(known)
        lists.append(
            dict.fromkeys(_PROCESS.split())
            | {"sample_id": s.slide_id, "annotation": "tissue", "image_path": s.path}
            | {"requested_backend": "openslide", "backend": "openslide"}
            | {"tiling_status": "success", "spacing_at_level_0": s.mpp[0]}
            | {"num_tiles": len(s.tiles.coords_l0), **_paths(s, f"{s.out}/")}
            | {"feature_status": "success"}
            | {"feature_path": f"{s.out}/tile_embeddings/{s.slide_id}.pt"}
            | {"encoder_name": s.encoder, "feature_kind": "tile"}
        )
    return {"process_list.csv": lists, "slides.csv": manifest}


SLIDE2VEC = Layout(files=_slide2vec, tables=_slide2vec_tables)
