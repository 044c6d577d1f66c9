"""Runs another tool's own reader on a folder in its layout, by the Python that has its packages.

    python peer_readers.py TOOL SOURCES FOLDER TARGET.npz

SOURCES holds clones of the tools' repositories. What they read is written as arrays, named
`SLIDE/what`: `features`, `coords`, `tile` (the px of one tile, as it reads them) and `edge_l0`.
"""

import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd

ROW = 3  # the tile whose px are compared


def trident(folder: Path) -> dict[str, Any]:
    """Its Processor embeds the tiles by an encoder of its own, and pools the features."""
    import torch
    from trident import Processor
    from trident.IO import read_coords
    from trident.patch_encoder_models.load import CustomInferenceEncoder
    from trident.slide_encoder_models.load import encoder_factory

    class MeanColor(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean((2, 3))

    def tensor(image: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).float()

    (grid,) = (path for path in folder.iterdir() if path.is_dir())
    (features,) = grid.glob("features_*")
    name = features.name.removeprefix("features_")
    lists = {"custom_list_of_wsis": str(folder / "slides.csv"), "max_workers": 1}
    job = Processor(job_dir=str(folder), wsi_source="/", **lists)
    colors = CustomInferenceEncoder("rgb", MeanColor(), tensor, torch.float32)
    job.run_patch_feature_extraction_job(coords_dir=grid.name, patch_encoder=colors, device="cpu")
    mean = encoder_factory("mean-resnet50")
    mean.enc_name = f"mean-{name}"
    pooled = grid / f"slide_features_{mean.enc_name}"
    theirs = pooled.with_name("theirs")
    mean_dir = os.path.relpath(theirs, folder)
    job.run_slide_feature_extraction_job(mean, grid.name, device="cpu", saveto=mean_dir)
    found: dict[str, Any] = {}
    for slide in job.wsis:
        attributes, coords = read_coords(str(grid / "patches" / f"{slide.name}_patches.h5"))
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
        found[f"{name}/edge_l0"] = len(tiles[ROW]["img"]) * wsi.level_downsamples[tiles.patch_level]
        found[f"{name}/coords"] = np.array([tiles[row]["coord"] for row in range(len(tiles))])
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
    names = {"patient_label": "PATIENT", "filename_label": "FILENAME", "time_label": None}
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
        bag = data.BagDataset(bags=[[path]], bag_size=None, ground_truths=truth, transform=None)[0]
        with h5py.File(path) as file:
            told = data.get_coords(file)
        name = Path(path).stem
        found[f"{name}/features"], found[f"{name}/coords_um"] = bag[0].numpy(), bag[1].numpy()
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


READERS = {
    "trident": (trident, "TRIDENT"),
    "clam": (clam, "CLAM"),
    "stamp": (stamp, "STAMP/src"),
    "slide2vec": (slide2vec, "slide2vec"),
}


def main(tool: str, sources: Path, folder: Path, target: Path) -> None:
    """Reads the folder by the tool's code and writes what that gave."""
    sys.path[:0] = [str(sources)]
    if (sources / "shim.py").exists():  # what a machine's torchvision lacks
        __import__("shim")
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "2.5.0" if name == "stamp" else version(name)
    reader, source = READERS[tool]
    sys.path.insert(0, str(sources / source))
    np.savez(target, **reader(folder))


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:5]))
