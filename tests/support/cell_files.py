"""Files of cells as QuPath writes them, of octagons on a drawn slide."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import thinsection as ts
from thinsection.stages.config import RunConfig

# size of the slide, which is not square
SIZE = (1700, 1300)
CLASSES = ("Immune cells", "Tumour")


def write_cells(
    path: Path,
    *,
    number: int,
    seed: int,
    names: Sequence[str] = CLASSES,
    size: tuple[int, int] = SIZE,
) -> Path:
    """Octagons of several sizes, as QuPath writes cells."""
    rng = np.random.default_rng(seed)
    # most of them on the tissue, as real ones are
    middle = np.array(size) / 2
    centers = rng.normal(middle, middle / 4, (number, 2)).clip(20, 2 * middle - 20)
    angles = np.linspace(0, 2 * np.pi, 8, endpoint=False)
    features = []
    for i, center in enumerate(centers):
        radius = rng.uniform(4, 10)
        ring = center + radius * np.stack((np.cos(angles), np.sin(angles)), axis=1)
        features.append(
            {
                "type": "Feature",
                "id": f"{i}",
                "geometry": {
                    "type": "Polygon",
                    "coordinates": [[*ring.tolist(), ring[0].tolist()]],
                },
                "properties": {
                    "objectType": "cell",
                    "classification": {"name": names[i % len(names)]},
                },
            }
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    return path


def run_with_cells(
    root: Path,
    names: Sequence[str],
    *,
    slides: Sequence[str] = ("a",),
    **settings: object,
) -> Path:
    """Runs `root/SLIDE.svs` until tiles, with these folders of cells; returns the results."""
    ts.run(
        [root / f"{slide}.svs" for slide in slides],
        out=root / "results",
        config=RunConfig(),
        until="tiles",
        cells=[str(root / name) for name in names],
        **settings,
    )
    return root / "results"
