"""Runs another tool's own code on a folder in its layout, by the Python that has its packages.

    python peer_readers.py TOOL SOURCES FOLDER TARGET.npz
    python peer_readers.py TOOL-writes SOURCES FOLDER TARGET.npz

SOURCES holds clones of the tools' repositories. What they read is written as arrays, named
`SLIDE/what`: `features`, `coords`, `tile` (the px of one tile, as it reads them) and `edge_l0`.
As writers they tile the slides that $SLIDES names; the feature of a tile is its mean color.
"""

import contextlib
import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd

ROW = 3  # the tile whose px are compared


def mean_color() -> Any:
    """A network whose embedding of a tile is its mean color."""
    import torch

    class MeanColor(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean((2, 3))

    return MeanColor()


def tensor(image: Any) -> Any:
    """(3, H, W), 0 to 255."""
    import torch

    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).float()


def trident(folder: Path) -> dict[str, Any]:
    """Its Processor embeds the tiles by an encoder of its own, and pools the features."""
    import torch
    from trident import Processor
    from trident.IO import read_coords
    from trident.patch_encoder_models.load import CustomInferenceEncoder
    from trident.slide_encoder_models.load import encoder_factory

    (grid,) = (path for path in folder.iterdir() if path.is_dir())
    (features,) = grid.glob("features_*")
    name = features.name.removeprefix("features_")
    lists = {"custom_list_of_wsis": str(folder / "slides.csv"), "max_workers": 1}
    job = Processor(job_dir=str(folder), wsi_source="/", **lists)
    colors = CustomInferenceEncoder("rgb", mean_color(), tensor, torch.float32)
    job.run_patch_feature_extraction_job(
        coords_dir=grid.name, patch_encoder=colors, device="cpu"
    )
    mean = encoder_factory("mean-resnet50")
    mean.enc_name = f"mean-{name}"
    pooled = grid / f"slide_features_{mean.enc_name}"
    theirs = pooled.with_name("theirs")
    mean_dir = os.path.relpath(theirs, folder)
    job.run_slide_feature_extraction_job(mean, grid.name, device="cpu", saveto=mean_dir)
    found: dict[str, Any] = {}
    for slide in job.wsis:
        attributes, coords = read_coords(
            str(grid / "patches" / f"{slide.name}_patches.h5")
        )
        opened = type(slide)(slide.slide_path, lazy_init=False, mpp=slide.mpp)
        patcher = opened.create_patcher(
            patch_size=attributes["patch_size"],
            src_mag=attributes["level0_magnification"],
            dst_mag=attributes["target_magnification"],
            custom_coords=coords,
        )
        found[f"{slide.name}/coords"] = coords
        found[f"{slide.name}/tile"] = patcher[ROW][0]
        found[f"{slide.name}/edge_l0"] = patcher.patch_size_src
        for key, path in (("colors", grid / "features_rgb"), ("mean", theirs)):
            with h5py.File(path / f"{slide.name}.h5") as file:
                found[f"{slide.name}/{key}"] = file["features"][:]
    return found


def clam(folder: Path) -> dict[str, Any]:
    """Its dataset of tiles, and its dataset of bags from h5_files and from pt_files."""
    import openslide
    import torch
    from dataset_modules.dataset_generic import Generic_MIL_Dataset
    from dataset_modules.dataset_h5 import Dataset_All_Bags, Whole_Slide_Bag_FP

    found: dict[str, Any] = {}
    bags = Dataset_All_Bags(folder / "process_list_autogen.csv")
    sources = {Path(p).name: p for p in os.environ["SLIDES"].split(os.pathsep)}
    for index in range(len(bags)):
        name = Path(bags[index]).stem
        wsi = openslide.open_slide(sources[bags[index]])
        tiles = Whole_Slide_Bag_FP(folder / "patches" / f"{name}.h5", wsi, np.array)
        found[f"{name}/tile"] = tiles[ROW]["img"]
        found[f"{name}/edge_l0"] = (
            len(tiles[ROW]["img"]) * wsi.level_downsamples[tiles.patch_level]
        )
        found[f"{name}/coords"] = np.array(
            [tiles[row]["coord"] for row in range(len(tiles))]
        )
    labels = sorted(set(pd.read_csv(folder / "dataset.csv")["label"]))
    dataset = Generic_MIL_Dataset(
        data_dir=str(folder),
        csv_path=str(folder / "dataset.csv"),
        print_info=False,
        label_dict={label: number for number, label in enumerate(labels)},
    )
    for index in range(len(dataset)):
        name = dataset.slide_data["slide_id"][index]
        dataset.load_from_h5(False)
        found[f"{name}/pt"] = dataset[index][0].numpy()
        dataset.load_from_h5(True)
        features, found[f"{name}/label"], _ = dataset[index]
        assert isinstance(features, torch.Tensor)
        found[f"{name}/features"] = features.numpy()
    return found


def stamp(folder: Path) -> dict[str, Any]:
    """Its loader of patients, its dataset of bags, and what it takes the coordinates for."""
    import torch
    from stamp.modeling import data

    (feature_dir,) = (path for path in folder.iterdir() if path.is_dir())
    names = {
        "patient_label": "PATIENT",
        "filename_label": "FILENAME",
        "time_label": None,
    }
    patients, kind = data.load_patient_data_(
        feature_dir=feature_dir,
        clini_table=folder / "clini.csv",
        slide_table=folder / "slide.csv",
        task="classification",
        ground_truth_label="LABEL",
        status_label=None,
        **names,
    )
    assert kind == "tile"
    found: dict[str, Any] = {}
    for patient in patients.values():
        (path,) = patient.feature_files
        truth = torch.ones(1, 1)
        bag = data.BagDataset(
            bags=[[path]], bag_size=None, ground_truths=truth, transform=None
        )[0]
        with h5py.File(path) as file:
            told = data.get_coords(file)
        name = Path(path).stem
        found[f"{name}/features"], found[f"{name}/coords_um"] = (
            bag[0].numpy(),
            bag[1].numpy(),
        )
        found[f"{name}/tile_um"], found[f"{name}/mpp"] = told.tile_size_um, told.mpp
        found[f"{name}/label"] = str(patient.ground_truth)
    return found


def slide2vec(folder: Path) -> dict[str, Any]:
    """Its process list, its tilings (hs2p's) and its artifacts of tiles."""
    from hs2p import load_tiling_result
    from slide2vec.artifacts import load_array
    from slide2vec.runtime.persistence import load_tile_artifact
    from slide2vec.utils import tiling_io

    found: dict[str, Any] = {}
    rows = tiling_io.load_embedding_process_df(folder / "process_list.csv")
    assert set(rows["feature_status"]) == set(rows["tiling_status"]) == {"success"}
    for _, row in rows.iterrows():
        name = row["sample_id"]
        tiling = tiling_io.load_tiling_result_from_row(row)
        how = {"output_format": "pt", "annotation": row["annotation"]}
        artifact = load_tile_artifact(name, output_dir=folder, **how)
        told = artifact.metadata
        again = load_tiling_result(
            Path(told["coordinates_npz_path"]), Path(told["coordinates_meta_path"])
        )
        assert np.array_equal(again.x, tiling.x)
        assert artifact.num_tiles == tiling.num_tiles
        found[f"{name}/features"] = load_array(artifact.path).numpy()
        found[f"{name}/coords"] = np.stack([tiling.x, tiling.y], axis=1)
        found[f"{name}/edge_l0"] = tiling.tile_size_lv0
        found[f"{name}/read_um"] = tiling.read_tile_size_px * tiling.read_spacing_um
    specs = tiling_io.load_slide_manifest(folder / "slides.csv")
    assert sorted(spec.sample_id for spec in specs) == sorted(rows["sample_id"])
    return found


def trident_writes(folder: Path) -> dict[str, Any]:
    """Coordinates at 20x in px of 256 that overlap by 32, and features of its own encoder."""
    import torch
    from trident import OpenSlideWSI
    from trident.patch_encoder_models.load import CustomInferenceEncoder

    colors = CustomInferenceEncoder("rgb", mean_color(), tensor, torch.float32)
    grid = folder / "20x_256px_32px_overlap"
    for path in os.environ["SLIDES"].split(os.pathsep):
        slide = OpenSlideWSI(path, lazy_init=False, max_workers=1)
        coords = slide.extract_tissue_coords(20, 256, str(grid), overlap=32)
        where = str(grid / "features_rgb")
        slide.extract_patch_features(colors, coords, where, device="cpu")
    return {}


def clam_writes(folder: Path) -> dict[str, Any]:
    """Tissue, patches of 256 px of level 0, h5_files and pt_files, as its scripts make them."""
    import torch
    from dataset_modules.dataset_h5 import Whole_Slide_Bag_FP
    from utils.file_utils import save_hdf5
    from wsi_core.WholeSlideImage import WholeSlideImage

    for name in ("patches", "h5_files", "pt_files"):
        (folder / name).mkdir(parents=True)
    for path in os.environ["SLIDES"].split(os.pathsep):
        slide = WholeSlideImage(path)
        limits = {"a_t": 1, "a_h": 1, "max_n_holes": 8}
        slide.segmentTissue(seg_level=1, filter_params=limits)
        slide.process_contours(str(folder / "patches"), patch_level=0, patch_size=256)
        name = f"{slide.name}.h5"
        tiles = Whole_Slide_Bag_FP(folder / "patches" / name, slide.wsi, tensor)
        rows = [tiles[row] for row in range(len(tiles))]
        features = torch.stack([row["img"].mean((1, 2)) for row in rows])
        coords = np.stack([row["coord"] for row in rows]).astype(np.int32)
        save_hdf5(
            folder / "h5_files" / name, {"features": features.numpy(), "coords": coords}
        )
        torch.save(features, folder / "pt_files" / f"{slide.name}.pt")
    return {}


def stamp_writes(folder: Path) -> dict[str, Any]:
    """Its preprocessing with an extractor of colors: 224 px of 256 µm."""
    from stamp.preprocessing import extract_
    from stamp.preprocessing.extractor import Extractor

    slides = [Path(path) for path in os.environ["SLIDES"].split(os.pathsep)]
    # its picture of rejected tiles fails on a small slide, whose features are written by then;
    # it skips what is there
    for _ in slides:
        with contextlib.suppress(IndexError):
            extract_(
                wsi_dir=slides[0].parent,
                output_dir=folder,
                wsi_list=None,
                cache_dir=None,
                cache_tiles_ext="jpg",
                extractor=Extractor(
                    model=mean_color(), transform=tensor, identifier="rgb"
                ),
                tile_size_px=224,
                tile_size_um=256.0,
                max_workers=1,
                device="cpu",
                default_slide_mpp=None,
                brightness_cutoff=None,
                canny_cutoff=None,
                generate_hash=False,
            )
    return {}


def slide2vec_writes(folder: Path) -> dict[str, Any]:
    """What it read in $SLIDE2VEC, written again by hs2p and by its own writer of artifacts."""
    from hs2p import save_tiling_result
    from slide2vec.artifacts import load_array, load_metadata, write_tile_embeddings
    from slide2vec.utils import tiling_io

    source = Path(os.environ["SLIDE2VEC"])
    rows = tiling_io.load_embedding_process_df(source / "process_list.csv")
    for _, row in rows.iterrows():
        name = row["sample_id"]
        save_tiling_result(tiling_io.load_tiling_result_from_row(row), folder)
        home = source / "tile_embeddings"
        features = load_array(home / f"{name}.pt").half()
        told = load_metadata(home / f"{name}.meta.json")
        how = {"output_format": "npz" if name == "half" else "pt"}
        metadata = {key: told[key] for key in ("encoder_name", "tile_size_lv0")}
        write_tile_embeddings(
            name, features, output_dir=folder, metadata=metadata, **how
        )
    return {}


READERS = {
    "trident": (trident, "TRIDENT"),
    "clam": (clam, "CLAM"),
    "stamp": (stamp, "STAMP/src"),
    "slide2vec": (slide2vec, "slide2vec"),
    "trident-writes": (trident_writes, "TRIDENT"),
    "clam-writes": (clam_writes, "CLAM"),
    "stamp-writes": (stamp_writes, "STAMP/src"),
    "slide2vec-writes": (slide2vec_writes, "slide2vec"),
}


def main(tool: str, sources: Path, folder: Path, target: Path) -> None:
    """Reads the folder by the tool's code and writes what that gave."""
    sys.path[:0] = [str(sources)]
    if (sources / "shim.py").exists():  # what a machine's torchvision lacks
        __import__("shim")
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: (
        "2.5.0" if name == "stamp" else version(name)
    )
    reader, source = READERS[tool]
    sys.path.insert(0, str(sources / source))
    np.savez(target, **reader(folder))


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:5]))
