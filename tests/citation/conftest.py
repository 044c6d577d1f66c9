"""A results folder with two encoders, two grids, two readers, and a slide that failed."""

from pathlib import Path

import pytest

import thinsection as ts
from thinsection.testing.synthetic import write_he_slide

FINE = "128px_0.5mpp"


@pytest.fixture(scope="session")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slides 'a' and 'b_1' of patient p, 'c' of patient q, and 'broken', which no reader opens."""
    folder = tmp_path_factory.mktemp("cohort")
    sizes = {"a": (900, 700), "b_1": (700, 1000), "c": (820, 760)}
    for seed, (name, size) in enumerate(sizes.items()):
        write_he_slide(folder / f"{name}.svs", size, seed=seed, mpp=0.5)
    (folder / "broken.svs").write_bytes(b"no slide")
    lines = ["slide_path,patient_id"]
    patients = {"a": "p", "b_1": "p", "c": "q", "broken": "r"}
    lines += [f"{folder / name}.svs,{patient}" for name, patient in patients.items()]
    (folder / "cohort.csv").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="session")
def two_encoders(cohort: Path) -> Path:
    """efficientnet_lite0 on FINE, all slides; lunit_vits16 on tiles at 2 µm/px, two slides."""
    out = cohort / "results"
    ts.run([cohort / "cohort.csv"], out=out, tile_px=128, memory="256MiB")
    ts.run(
        [cohort / "a.svs", cohort / "b_1.svs"],
        out=out,
        encoders=("lunit_vits16",),
        slide_encoders=("mean", "max"),
        pretrained=False,
        stain_norm="reinhard",
        tile_px=96,
        tile_mpp="2",
        overlap=24,
        min_tissue_fraction=0.25,
        reader="openslide",
        memory="256MiB",
    )
    return out
