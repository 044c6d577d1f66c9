"""A model of STAMP with ALiBi, trained by its own command, and a slide to predict."""

import os
import subprocess
from pathlib import Path

import h5py
import numpy as np

_CONFIG = """
training:
  output_dir: {place}/model
  clini_table: {place}/clini.csv
  slide_table: {place}/slide.csv
  feature_dir: {place}/small
  task: classification
  ground_truth_label: LABEL
deployment:
  output_dir: {place}/predictions
  clini_table: {place}/clini_large.csv
  slide_table: {place}/slide_large.csv
  feature_dir: {place}/large
  ground_truth_label: LABEL
  checkpoint_paths: ["{place}/model/model.ckpt"]
  accelerator: cpu
  num_workers: 0
  patient_label: PATIENT
  filename_label: FILENAME
advanced_config:
  seed: 1
  max_epochs: 2
  patience: 2
  batch_size: 4
  bag_size: 64
  num_workers: 0
  accelerator: cpu
  max_lr: 1e-4
  div_factor: 25.
  model_name: vit
  model_params:
    vit:
      dim_model: 512
      dim_feedforward: 512
      n_heads: 8
      n_layers: 2
      dropout: 0.25
      use_alibi: true
"""
TILE_UM = 256.0


def write_stamp_job(folder: Path, place: Path, *, python: str) -> None:
    """Writes `config.yaml`, trains, and writes the slide of `tiles_768.h5` in STAMP's form."""
    (place / "config.yaml").write_text(_CONFIG.format(place=place))
    with h5py.File(folder / "tiles_768.h5") as file:
        tiles = file["features"][:]
        coords = file["coords"][:] / 512 * TILE_UM
    labels = {}
    for number in range(16):
        labels[f"p{number}"] = "ab"[number % 2]
        rows = slice(5 * number, 5 * number + 60)
        write_slide(place / "small" / f"p{number}.h5", tiles[rows], coords[rows])
    write_tables(place, labels, ending="")
    write_slide(place / "large" / "large.h5", tiles, coords)
    write_tables(place, {"large": "a"}, ending="_large")
    command = [
        str(Path(python).parent / "stamp"),
        "--config",
        "config.yaml",
        "train",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, cwd=place, env=environment, capture_output=True, text=True, check=False
    )
    if ended.returncode != 0:
        raise SystemExit(f"stamp train failed:\n{ended.stdout}\n{ended.stderr}")


def write_slide(path: Path, tiles: np.ndarray, coords: np.ndarray) -> None:
    """Features file of STAMP."""
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as file:
        file["feats"] = tiles
        file["coords"] = coords.astype(np.float32)
        file.attrs["unit"] = "um"
        file.attrs["tile_size_um"] = TILE_UM
        file.attrs["tile_size_px"] = 224
        file.attrs["stamp_version"] = "2.0.0"
        file.attrs["encoder"] = "seeded"
        file.attrs["feat_type"] = "tile"


def write_tables(place: Path, labels: dict[str, str], *, ending: str) -> None:
    """Clinical and slide tables."""
    clini = [f"{patient},{label}" for patient, label in labels.items()]
    slide = [f"{patient},{patient}.h5" for patient in labels]
    (place / f"clini{ending}.csv").write_text("\n".join(["PATIENT,LABEL", *clini]))
    (place / f"slide{ending}.csv").write_text("\n".join(["PATIENT,FILENAME", *slide]))
