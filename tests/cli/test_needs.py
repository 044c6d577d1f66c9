"""A command that will need a package which is missing says so before any work.

There are no results, labels or models in the folder, and the one slide is no slide. So whatever a
command reads before it asks for its packages is another error.
"""

import sys
from pathlib import Path

import pytest
from tests.support.shell import thinsection

from thinsection.cli.app import COMMANDS
from thinsection.extras import EXTRAS, remedy_for

RUN = "run slides --out out"
TRAIN = "train results --labels labels.csv --target grade --out out"
PREDICT = "predict model.safetensors slides --out out"
# command line -> packages that it needs
NEEDS = {
    f"{RUN} --executor dask": "dask distributed",
    f"{RUN} --jobqueue slurm": "dask_jobqueue distributed",
    f"{RUN} --executor ray": "ray",
    f"{RUN} --encoder uni": "timm huggingface_hub",
    f"{RUN} --encoder phikon": "transformers huggingface_hub",
    f"{RUN} --encoder timm:resnet18": "timm",
    f"{RUN} --encoder hf:owner/name": "huggingface_hub",
    f"{RUN} --engine openvino": "openvino",
    f"{RUN} --slide-encoder titan": "huggingface_hub",
    f"{RUN} --segmenter lavlab-shell": "onnxruntime",
    f"{RUN} --segmenter grandqc-tissue": "segmentation_models_pytorch",
    f"{RUN} --segmenter hest-tissue": "torchvision",
    f"{RUN} --write parquet": "pyarrow",
    f"{RUN} --write zarr": "zarr",
    f"{RUN} --cells folder": "pyarrow",
    "cells check cohort.parquet": "pyarrow",
    f"{RUN} --reader zarr": "zarr",
    "run slide.zarr --out out": "zarr",
    "run folder --out out": "zarr",
    "run cohort.parquet --out out": "pyarrow",
    "run s3://bucket/a.svs --out out": "fsspec s3fs",
    "run slides --out s3://bucket/out": "fsspec s3fs",
    "segment slides --out out --segmenter lavlab-shell": "onnxruntime",
    "qc slides --out out --write parquet": "pyarrow",
    "qc slides --out out --executor ray": "ray",
    "aggregate results --slide-encoder titan": "huggingface_hub",
    "aggregate results --executor dask": "distributed",
    TRAIN: "matplotlib",
    f"{TRAIN} --executor dask": "distributed",
    TRAIN.replace("labels.csv", "labels.parquet"): "pyarrow",
    f"{PREDICT} --labels labels.csv": "matplotlib",
    f"{PREDICT} --labels labels.parquet": "pyarrow",
    f"{PREDICT} --executor ray": "ray",
    "heatmap model.safetensors slides --out out --executor ray": "ray",
    "zeroshot results --prompts prompts.toml": "tokenizers",
    "labels labels.parquet": "pyarrow",
    "audit results --labels labels.parquet": "pyarrow",
    "probe linear data --out out": "matplotlib",
    "probe linear data --out out --encoder uni": "timm",
    "probe linear data --out out --encoder uni --engine openvino": "openvino",
    "probe segment data --out out --encoder uni": "timm matplotlib",
    "probe grid data --out out --encoder uni": "timm",
    "probe grid data --out out --executor dask": "distributed",
    "bench suite.toml --out out --executor ray": "ray",
    "bench suite.toml --out out": "timm",
    "view slides": "starlette uvicorn",
    "export anndata results --out out.h5ad": "anndata pandas",
    "export spatialdata results --out out": "spatialdata",
    "info slide.zarr": "zarr",
    "info s3://bucket/a.svs": "fsspec s3fs",
    "convert slide.zarr --out out": "zarr",
    "ls s3://bucket/results": "fsspec s3fs",
    "frames structure.cif --out out.csv": "gemmi pyarrow",
    "slurm submit slides --out out --encoder uni": "timm",
    "slurm submit probe grid data --out out --encoder uni": "timm",
}
# commands that need no package beyond those of the extra `slides`
NEED_NONE = {
    *(
        "doctor",
        "models",
        "plan",
        "demo",
        "skill",
        "rescue",
        "import",
        "relink",
        "merge",
    ),
    *("verify", "efficiency", "config", "cache", "model", "deid", "cite"),
}
# packages without which a command does the same work (pynvml), of Python only (umap), and of a kind
# of data folder that is recognised when it is read, before anything is written (yaml)
ONLY_FOR_MORE = {"pynvml", "umap", "yaml"}
CASES = [(line, name) for line, names in NEEDS.items() for name in names.split()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: names without contents."""
    (tmp_path / "slides").mkdir()
    (tmp_path / "slides" / "a.svs").write_text("no slide")
    (tmp_path / "slide.zarr").mkdir()
    (tmp_path / "folder" / "b.zarr").mkdir(parents=True)
    for name in ("cohort.parquet", "labels.parquet"):
        (tmp_path / name).write_bytes(b"PAR1 no table PAR1")
    (tmp_path / "structure.cif").write_text("no structure")
    (tmp_path / "suite.toml").write_text(
        'encoders = ["uni"]\n[[tasks]]\nname = "a"\ndata = "data"\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def block(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a package look as if it were not installed, for a process that may have it already."""
    monkeypatch.setitem(sys.modules, package, None)
    for name in [*sys.modules]:
        # it imports its packages when it is imported
        if name.startswith("thinsection.view"):
            monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(("line", "package"), CASES)
def test_a_missing_package_is_named_before_any_work(
    line: str, package: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(folder.rglob("*"))
    block(package, monkeypatch)
    ended = thinsection(*line.split())
    assert ended.returncode == 2, ended.stdout + ended.stderr
    names, _, rest = ended.stderr.partition(" must be installed for ")
    assert package in names and rest
    assert f"got no {package}; {remedy_for([package])}" in rest
    assert sorted(folder.rglob("*")) == before
    assert not ended.stdout


def test_every_command_and_every_package_of_an_extra_has_its_case() -> None:
    """A new command belongs into one of the two lists above."""
    named = {line.split()[0] for line in NEEDS}
    assert named | NEED_NONE == set(COMMANDS)
    assert not named & NEED_NONE
    blocked = {package for _, package in CASES}
    packages = {name for extra in ("hub", "cluster", "view") for name in EXTRAS[extra]}
    assert packages - blocked == ONLY_FOR_MORE
