"""A features folder is read as it stands by others' dataset code: what each of them reaches for.

The readers themselves were fetched and run on such a folder, docs/formats.md has the figures. Here
is how each of them reaches into the files, in our own words (repository, file and commit stand
beside each test), so that a change which would shut one of them out fails without their packages.
`features_folder` is the one place that says where the files come from.
"""

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from thinsection.store.tiles_h5 import TilesWriter, tile_attributes
from thinsection.testing.synthetic import ArraySlide
from thinsection.tiles import TilesConfig, tile_grid
from thinsection.types import Mpp

DIM = 24
# slide_id -> (width, height) px: not square, no multiple of the tile, a dot in the name
SLIDES = {"narrow-1": (2300, 1100), "TCGA-2.x": (1300, 3100)}


def write_features(path: Path, *, slide_mpp: Mpp = (0.5, 0.5)) -> None:
    """What embedding a slide stores, with numbers in place of embeddings."""
    width, height = SLIDES.get(path.stem, (2300, 1100))
    slide = ArraySlide([np.zeros((height, width, 3), np.uint8)], slide_mpp=slide_mpp)
    config = TilesConfig(tile_px=256, tile_mpp="0.5")
    table = tile_grid(slide, config)
    attributes = tile_attributes(path.stem, slide, table, config=config)
    features = (
        np.random.default_rng(width).normal(size=(len(table), DIM)).astype(np.float32)
    )
    with TilesWriter(
        path, dim=DIM, attributes=attributes | {"encoder": "toy"}
    ) as writer:
        writer.append(table.coords_l0, features)


@pytest.fixture
def features_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "256px_0.5mpp" / "features_toy"
    folder.mkdir(parents=True)
    for slide_id in SLIDES:
        write_features(folder / f"{slide_id}.h5")
    return folder


def test_trident_encodes_slides_of_the_folder(features_folder: Path) -> None:
    """mahmoodlab/TRIDENT, trident/wsi_objects/WSI.py: extract_slide_features, a91fa84."""
    for slide_id in SLIDES:
        with h5py.File(features_folder / f"{slide_id}.h5", "r") as file:
            coords, features = file["coords"][:], file["features"][:]
            attributes = dict(file["coords"].attrs)
        assert int(attributes["patch_size_level0"]) == 256
        batch = torch.from_numpy(features).float().unsqueeze(0)
        assert batch.shape == (1, len(coords), DIM)
        assert not torch.is_floating_point(torch.from_numpy(coords))
        assert batch.mean(dim=1).isfinite().all()


@pytest.mark.parametrize(
    ("mpp", "size_l0"), [(0.5, 256), (0.499, 256), (0.25, 512), (0.23, 557)]
)
def test_trident_reads_the_px_that_we_read(
    tmp_path: Path, mpp: float, size_l0: int
) -> None:
    """mahmoodlab/TRIDENT, trident/wsi_objects/WSIPatcher.py: __init__, a91fa84.

    It takes px of level 0 from the ratio of the two magnifications, not from `patch_size_level0`.
    """
    write_features(tmp_path / "a.h5", slide_mpp=(mpp, mpp))
    with h5py.File(tmp_path / "a.h5", "r") as file:
        attributes = dict(file["coords"].attrs)
    source_mpp = 10 / attributes["level0_magnification"]
    target_mpp = 10 / attributes["target_magnification"]
    assert round(attributes["patch_size"] * (target_mpp / source_mpp)) == size_l0
    assert attributes["patch_size_level0"] == size_l0


def test_patho_bench_joins_the_slides_of_a_patient(features_folder: Path) -> None:
    """mahmoodlab/Patho-Bench, patho_bench/datasets/PatchEmbeddingsDataset.py, 660e770.

    Slides by the name of each *.h5; features and coords joined along their first axis, which only
    equal `patch_size_level0` allow.
    """
    paths = {
        path.name.removesuffix(".h5"): path for path in features_folder.glob("*.h5")
    }
    assert set(paths) == set(SLIDES)
    assets: dict[str, list[torch.Tensor]] = {"features": [], "coords": []}
    sizes = []
    for slide_id in SLIDES:
        with h5py.File(paths[slide_id], "r") as file:
            for name, parts in assets.items():
                parts.append(torch.from_numpy(file[name][:]))
            sizes.append(
                {"patch_size_level0": file["coords"].attrs["patch_size_level0"]}
            )
    assert all(size == sizes[0] for size in sizes)
    features, coords = (torch.cat(parts) for parts in assets.values())
    assert features.shape == (len(coords), DIM)
    assert features.dtype == torch.float32
    assert coords.dtype == torch.int64


def test_mil_lab_trains_on_bags_of_the_folder(features_folder: Path) -> None:
    """mahmoodlab/MIL-Lab, README.md: (batch, tiles, dim) of float32 into its models, dfc3c17.

    It has no dataset class; the bags are those of mahmoodlab/TRIDENT, tutorials/3-..., a91fa84.
    """
    bags = []
    for slide_id in SLIDES:
        with h5py.File(features_folder / (slide_id + ".h5"), "r") as file:
            features = torch.from_numpy(file["features"][:])
        bags.append(features[torch.randint(features.shape[0], (16,))])
    logits = torch.nn.Linear(DIM, 2)(torch.stack(bags))
    assert logits.shape == (len(SLIDES), 16, 2)


def test_clam_reads_the_folder_under_its_own_name(
    features_folder: Path, tmp_path: Path
) -> None:
    """mahmoodlab/CLAM, dataset_modules/dataset_generic.py: load_from_h5, 53e2409."""
    (tmp_path / "h5_files").symlink_to(features_folder)
    for slide_id in SLIDES:
        with h5py.File(tmp_path / "h5_files" / f"{slide_id}.h5", "r") as file:
            assert len(file["features"][:]) == len(file["coords"][:]) > 0


def test_stamp_stops_instead_of_taking_px_for_micrometres(
    features_folder: Path,
) -> None:
    """KatherLab/STAMP, src/stamp/modeling/data.py: BagDataset and get_coords, c54ce06.

    It wants `feats` or `patch_embeddings`, and takes `coords` as µm; a stride of 224 px it takes
    for its first format. Only the absence of the two names keeps it from reading px as µm.
    """
    for path in features_folder.glob("*.h5"):
        with h5py.File(path, "r") as file:
            assert not {"feats", "patch_embeddings"} & set(file)
            assert not {"tile_size", "tile_size_um", "unit"} & set(file.attrs)
