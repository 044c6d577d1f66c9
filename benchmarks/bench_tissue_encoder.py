"""Does the encoder half of a network that was trained on H&E beat the default tile encoder?

The network is that of the package lavlab-shell (MIT), cut before its first upsampling. A tile's
vector is the mean of the feature maps of its four stages (16 + 32 + 64 + 128 channels). The labels
are those of nuclei in two H&E crops of the package histolytics (BSD-3). lavlab-shell and
histolytics are only read, so they may be installed without their dependencies; onnx cuts the graph.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet
import shapely
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV, GroupKFold, StratifiedKFold
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler, normalize

import thinsection as ts
from benchmarks.harness import arguments, finish
from thinsection.segment.channels import StainChannels

CROPS = {"hgsc_nest": "hgsc_nest", "hgsc_stromal_he": "hgsc_stromal_cells"}
PACKAGES = ("shell", "histolytics", "onnx", "onnxruntime")
TILE_PX = 100  # at 0.5 µm/px
STRIP_PX = 300  # width of a strip, and edge of a block
MIN_NUCLEI = 3  # tiles with fewer have no label
NEIGHBOURS = 15
STAGES = ("add_75", "add_216", "add_357", "add_634")  # outputs of the four stages
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
Vectors = npt.NDArray[np.floating]
Rgb = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Crop:
    """A picture, its tiles with a label, and the name of their strips."""

    name: str
    rgb: Rgb
    corners: npt.NDArray[np.int64]  # (N, 2) in pixels of the picture
    is_tumour: npt.NDArray[np.bool_]  # (N,)
    strips: npt.NDArray[np.str_]  # (N,), tested together
    blocks: npt.NDArray[np.str_]  # (N,), squares that are drawn together for intervals


def folder_of(package: str) -> Path:
    """Folder of an installed package, which is not imported."""
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations, package
    return Path(spec.submodule_search_locations[0])


def read_crop(name: str, nuclei: str) -> Crop:
    """Tiles whose nuclei have classes; the label is that of most of them."""
    data = folder_of("histolytics") / "data"
    rgb = np.asarray(Image.open(data / f"{name}.jpg").convert("RGB"))
    table = pyarrow.parquet.read_table(data / f"{nuclei}.parquet").to_pydict()
    shapes = shapely.from_wkb(table["geometry"])
    centres = shapely.get_coordinates(shapely.centroid(shapes))
    neoplastic = np.array(table["class_name"]) == "neoplastic"
    corners = []
    labels = []
    for y in range(0, rgb.shape[0] - TILE_PX + 1, TILE_PX):
        for x in range(0, rgb.shape[1] - TILE_PX + 1, TILE_PX):
            inside = ((centres >= (x, y)) & (centres < (x + TILE_PX, y + TILE_PX))).all(
                1
            )
            if inside.sum() >= MIN_NUCLEI:
                corners.append((x, y))
                labels.append(neoplastic[inside].mean() > 0.5)
    strips = np.array([f"{name} {x // STRIP_PX}" for x, _ in corners])
    blocks = np.array([f"{name} {x // STRIP_PX} {y // STRIP_PX}" for x, y in corners])
    return Crop(name, rgb, np.array(corners), np.array(labels), strips, blocks)


def tiles_of(crop: Crop) -> Rgb:
    """Tiles uint8 (N, TILE_PX, TILE_PX, 3)."""
    windows = [crop.rgb[y : y + TILE_PX, x : x + TILE_PX] for x, y in crop.corners]
    return np.stack(windows)


def halved(rgb: Rgb) -> Rgb:
    """Means of 2 x 2 pixels: 0.5 to 1 µm/px, that of the network."""
    *before, height, width, colours = rgb.shape
    blocks = rgb.reshape(*before, height // 2, 2, width // 2, 2, colours)
    return np.asarray(blocks.mean(axis=(-4, -2)).round().astype(np.uint8))


class ShellEncoder:
    """The encoder half of lavlab-shell's network, in ONNX Runtime."""

    def __init__(self, folder: Path) -> None:
        import onnx
        import onnxruntime

        whole = folder_of("shell") / "weights" / "model_v1.onnx"
        half = folder / "encoder.onnx"
        onnx.utils.extract_model(str(whole), str(half), ["input"], list(STAGES))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(str(half), options)

    def maps(self, planes: npt.NDArray[np.float32]) -> list[npt.NDArray[np.float32]]:
        """Feature maps (B, C, H, W) of the four stages."""
        return list(self._session.run(list(STAGES), {"input": planes}))

    def of_tiles(self, crop: Crop, stains: StainChannels) -> Vectors:
        """Means of the maps of each tile alone, as a tile encoder sees it."""
        planes = stains(halved(tiles_of(crop)))
        parts = [
            [feature.mean((2, 3)) for feature in self.maps(planes[i : i + 16])]
            for i in range(0, len(planes), 16)
        ]
        return np.concatenate([np.concatenate(part, axis=1) for part in parts])

    def of_crop(self, crop: Crop, stains: StainChannels) -> Vectors:
        """Means of the maps of the whole crop over each tile, as the network was trained."""
        maps = self.maps(stains(halved(crop.rgb)[None]))
        rows = []
        for x, y in crop.corners // 2:
            means = []
            for stage, feature in enumerate(maps):
                step = 2**stage
                first = (int(x) // step, int(y) // step)
                last = ((int(x) + 50) // step, (int(y) + 50) // step)
                part = feature[0, :, first[1] : last[1], first[0] : last[0]]
                means.append(part.mean((1, 2)))
            rows.append(np.concatenate(means))
        return np.stack(rows)


def fixed_stains() -> StainChannels:
    """Stains of Ruifrok and Johnston for every slide: all that a tile encoder can know."""
    hematoxylin = np.array([0.65, 0.70, 0.29])
    eosin = np.array([0.07, 0.99, 0.11])
    axes = [stain / np.linalg.norm(stain) for stain in (eosin, hematoxylin)]
    residual = np.cross(*axes)
    matrix = np.stack([*axes, residual / np.linalg.norm(residual)], axis=1)
    unmixing = np.linalg.inv(matrix)
    rows = np.stack([unmixing[0], unmixing[1], np.full(3, 1 / 3)])
    return StainChannels(white=240.0, rows=rows, low=(0.0,) * 3, high=(1.5,) * 3)


def linear_probe() -> Any:
    """Logistic regression; tiles of the training set choose the penalty."""
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    grid = {"logisticregression__C": list(PENALTIES)}
    folds = StratifiedKFold(4, shuffle=True, random_state=0)
    return GridSearchCV(model, grid, scoring="neg_log_loss", cv=folds)


def scores_of(vectors: Vectors, labels: npt.NDArray[np.bool_], strips: Any) -> Any:
    """Scores (N,) of the linear probe and of kNN for tiles of strips left out."""
    linear = np.empty(len(labels))
    nearest = np.empty(len(labels))
    unit = normalize(vectors)
    for train, test in GroupKFold(5).split(vectors, labels, strips):
        model = linear_probe().fit(vectors[train], labels[train])
        linear[test] = model.predict_proba(vectors[test])[:, 1]
        knn = KNeighborsClassifier(NEIGHBOURS).fit(unit[train], labels[train])
        nearest[test] = knn.predict_proba(unit[test])[:, 1]
    return {"linear": linear, "knn": nearest}


def interval(
    labels: Any, blocks: Any, scores: Any, baseline: Any, samples: int
) -> tuple[float, float]:
    """95 % interval of the difference of two AUROCs: blocks are drawn with replacement."""
    rng = np.random.default_rng(0)
    names = np.unique(blocks)
    rows = {name: np.flatnonzero(blocks == name) for name in names}
    differences = []
    while len(differences) < samples:
        drawn = np.concatenate([rows[name] for name in rng.choice(names, len(names))])
        if len(set(labels[drawn])) == 2:
            first = roc_auc_score(labels[drawn], scores[drawn])
            differences.append(first - roc_auc_score(labels[drawn], baseline[drawn]))
    low, high = np.percentile(differences, (2.5, 97.5))
    return float(low), float(high)


def main() -> None:
    asked = arguments(__doc__ or "")
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        print(f"not measured: needs {', '.join(missing)}")
        return
    crops = [read_crop(*names) for names in CROPS.items()]
    encoder = ts.load_encoder("efficientnet_lite0", device="cpu", engine="torch")
    fixed = fixed_stains()
    with tempfile.TemporaryDirectory() as folder:
        shell = ShellEncoder(Path(folder))
        ways: dict[str, Callable[[Crop], Vectors]] = {
            "efficientnet_lite0": lambda c: encoder.encode(tiles_of(c)).numpy(),
            "shell_tile_fixed_stains": lambda c: shell.of_tiles(c, fixed),
            "shell_tile_slide_stains": lambda c: shell.of_tiles(
                c, StainChannels.fit(c.rgb, c.name)
            ),
            "shell_whole_crop": lambda c: shell.of_crop(
                c, StainChannels.fit(c.rgb, c.name)
            ),
        }
        vectors: dict[str, Vectors] = {}
        seconds: dict[str, float] = {}
        for name, way in ways.items():
            began = time.process_time()
            vectors[name] = np.concatenate([way(crop) for crop in crops])
            seconds[name] = time.process_time() - began
    labels = np.concatenate([crop.is_tumour for crop in crops])
    strips = np.concatenate([crop.strips for crop in crops])
    blocks = np.concatenate([crop.blocks for crop in crops])
    in_nest = np.char.startswith(strips, "hgsc_nest")
    scores = {name: scores_of(vectors[name], labels, strips) for name in ways}
    rows = []
    for name in ways:
        row: dict[str, Any] = {
            "encoder": name,
            "dim": vectors[name].shape[1],
            "cpu_s": seconds[name],
        }
        for probe in ("linear", "knn"):
            own = scores[name][probe]
            base = scores["efficientnet_lite0"][probe]
            for where, chosen in (("both", in_nest | True), ("nest", in_nest)):
                row[f"auroc_{probe}_{where}"] = float(
                    roc_auc_score(labels[chosen], own[chosen])
                )
                if name != "efficientnet_lite0":
                    row[f"difference_{probe}_{where}"] = interval(
                        labels[chosen],
                        blocks[chosen],
                        own[chosen],
                        base[chosen],
                        100 if asked.smoke else 1000,
                    )
        rows.append(row)
        print(row)
    tiles = {"both": len(labels), "nest": int(in_nest.sum())}
    tumour = {"both": int(labels.sum()), "nest": int(labels[in_nest].sum())}
    finish(
        "bench_tissue_encoder",
        {"tiles": tiles, "tumour_tiles": tumour, "rows": rows},
        asked,
    )


if __name__ == "__main__":
    main()
