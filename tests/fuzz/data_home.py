"""A folder with every kind of data file, the commands that read them, and which reads which.

Every command is called in the folder that holds the files, so that its words hold no path.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.two_towers import write_clip

import thinsection as ts
from thinsection.config import replace_flat
from thinsection.predict.config import TrainConfig
from thinsection.predict.experiment import train
from thinsection.store.cache import CacheKey, CacheWriter
from thinsection.testing.synthetic import write_he_slide

SLIDES = tuple(f"slide{number}" for number in range(10))
SIZE = (1100, 800)
FITTED = {"folds": 2, "inner_folds": 2, "epochs": 1, "bag_size": 8, "device": "cpu"}
_FIT = "--target label --folds 2 --inner-folds 2 --epochs 1 --device cpu"
_TILES = "--until tiles --tile-px 32 --tile-mpp 2 --no-overview"
MODEL = "model/model.safetensors"

# name -> command line; HOME is the folder above, which no mutant changes, and new/ is empty
COMMANDS: dict[str, str] = {
    "ls": "ls results --json",
    "verify": "verify results --json",
    "aggregate": "aggregate results --slide-encoder max --out new",
    "aggregate patients": "aggregate results --slide-encoder mean --patients late",
    "train": f"train results --labels labels.csv --out new/e {_FIT}",
    "audit": "audit results --labels labels.csv --target label",
    "labels": "labels labels.csv results --target label --out new/clean.csv",
    "predict": f"predict {MODEL} results --out new --device cpu",
    "predict labels": f"predict {MODEL} results --out new --labels labels.csv --device cpu",
    "heatmap": f"heatmap {MODEL} results --out new --top-tiles 1 --device cpu",
    "heatmap column": "heatmap tissue_fraction results --out new --top-tiles 0",
    "zeroshot": "zeroshot results --prompts words.toml --text-encoder HOME/small_clip --device cpu",
    "merge": "merge results --out new/all",
    "export anndata": "export anndata results --out new/x.h5ad",
    "export qupath": "export qupath results --out new/q",
    "export trident": "export trident results --out new/t",
    "export clam": "export clam results --out new/c",
    "export stamp": "export stamp results --out new/s",
    "export slide2vec": "export slide2vec results --out new/s",
    "export png": "export png results --out new/p",
    "probe slide": "probe slide labels.csv --embeddings results --out new --device cpu",
    "probe linear": "probe linear results --labels regions.geojson --out new --device cpu",
    "bench": "bench suite.toml --out new",
    "efficiency": "efficiency results",
    "relink": "relink results HOME/slides",
    "run again": f"run HOME/slides --out results {_TILES}",
    "view": "VIEW results --annotations outlines",
    "model show": f"model show {MODEL}",
    "train against": f"train results --labels labels.csv --out new/e --against model {_FIT}",
    "train again": f"train results --labels labels.csv --out model --bag-size 8 {_FIT}",
    "run config": "run HOME/slides/slide0.svs --out new --config settings.toml --until tiles",
    "config": "config --config settings.toml",
    "train config": "train results --config train.toml --out new/e --device cpu",
    "qc": "qc HOME/slides/slide0.svs --out new --qc checks.toml --qc-rules rules.toml",
    "run cohort": f"run cohort.csv --out new {_TILES}",
    "plan": "plan cohort.csv --until tiles",
    "segment": "segment HOME/slides/slide0.svs --out new --segmenter segmenter.toml",
    **{
        f"run roi {form}": f"run HOME/slides/slide0.svs --out new --roi roi/slide0.{form} {_TILES}"
        for form in ("geojson", "xml", "csv")
    },
    "import trident": "import trident trident --out new --slides HOME/slides",
    "cache ls": "cache ls --cache-dir caches",
    "cache verify": "cache verify CACHE --cache-dir caches",
}
for _suffix in ("tsv", "xlsx", "parquet"):
    for _name in ("labels", "audit", "train", "predict labels", "probe slide"):
        COMMANDS[f"{_name} {_suffix}"] = COMMANDS[_name].replace(
            "labels.csv", f"labels.{_suffix}"
        )
for _name in ("run cohort", "plan"):
    COMMANDS[f"{_name} xlsx"] = COMMANDS[_name].replace("cohort.csv", "cohort.xlsx")

_READ_EMBEDDINGS = (
    *("ls", "verify", "aggregate", "aggregate patients", "train", "audit"),
    *("predict", "predict labels", "heatmap", "zeroshot", "merge"),
    *("export anndata", "export trident", "export clam", "export stamp"),
    *("export slide2vec", "probe slide", "probe linear", "bench", "relink"),
    *("run again", "view"),
)
_READ_TILES = (
    *("ls", "verify", "heatmap column", "export qupath", "export png"),
    *("export anndata", "export trident", "merge", "run again", "view", "heatmap"),
)
_READ_FOLDER = (*_READ_EMBEDDINGS, "heatmap column", "export qupath", "efficiency")


@dataclass(frozen=True)
class Target:
    """Files of one kind, and the commands that read them."""

    pattern: str  # below the folder
    commands: tuple[str, ...]
    # results with a digest: a command that ends with 0 must give what it gives on sound files
    has_digest: bool = False
    share: int = 1  # how often it is chosen
    # a refusal names the file or its slide; of a table of labels it may name a class instead
    is_named: bool = True


def _labels(suffix: str) -> tuple[str, ...]:
    names = ("labels", "audit", "train", "predict labels", "probe slide")
    ending = "" if suffix == "csv" else f" {suffix}"
    return tuple(f"{name}{ending}" for name in names)


TARGETS = (
    Target("results/32px_2mpp/features_*/*.h5", _READ_EMBEDDINGS, True, 5),
    Target("results/32px_2mpp/slide_features_*/*.h5", _READ_EMBEDDINGS, True, 2),
    Target("results/32px_2mpp/tiles/*.h5", _READ_TILES, True, 4),
    Target("results/slides/*/slide.json", (*_READ_FOLDER, "export png"), False, 5),
    Target("results/slides/*/tissue.png", ("verify", "view", "run again")),
    Target("results/slide_ids.json", ("run again", "merge", "ls", "relink")),
    Target("results/*.csv", ("run again", "merge", "ls", "verify", "export anndata")),
    Target("results/records/*/*.json", ("ls", "efficiency", "merge", "run again"), share=2),
    Target("results/records/*.js*", ("ls", "efficiency", "merge", "run again")),
    Target("results/records/*/*/*.jsonl", ("ls", "efficiency", "merge", "run again")),
    Target("results/index/*.js", ("run again", "merge", "view", "predict")),
    Target(MODEL, ("predict", "predict labels", "heatmap", "model show", "train against"), share=4),
    Target("model/folds/*.safetensors", ("train again", "train against")),
    Target("model/*.json", ("train against", "train again", "predict", "heatmap"), share=2),
    Target("model/predictions.csv", ("train against", "train again")),
    Target("labels.csv", _labels("csv"), share=3, is_named=False),
    Target("labels.tsv", _labels("tsv"), share=2, is_named=False),
    Target("labels.xlsx", _labels("xlsx"), share=3, is_named=False),
    Target("labels.parquet", _labels("parquet"), share=3, is_named=False),
    Target("cohort.csv", ("run cohort", "plan"), share=2),
    Target("cohort.xlsx", ("run cohort xlsx", "plan xlsx")),
    Target("settings.toml", ("run config", "config"), share=3),
    Target("train.toml", ("train config",)),
    Target("words.toml", ("zeroshot",)),
    Target("suite.toml", ("bench",)),
    Target("checks.toml", ("qc",), share=2),
    Target("rules.toml", ("qc",)),
    Target("segmenter.toml", ("segment",)),
    Target("network.safetensors", ("segment",)),
    Target("regions.geojson", ("probe linear",), share=2),
    Target("outlines/*.geojson", ("view",), share=2),
    Target("roi/*.geojson", ("run roi geojson",), share=2),
    Target("roi/*.xml", ("run roi xml",)),
    Target("roi/*.csv", ("run roi csv",)),
    Target("trident/**/*.*", ("import trident",), share=2),
    Target("caches/*/*", ("cache ls", "cache verify"), share=2),
)  # fmt: skip


def make_home(home: Path) -> None:
    """Slides and a CLIP model below `home`, and all files that are damaged in `home/data`.

    Some 20 CPU-seconds.
    """
    write_clip(home / "small_clip")
    slides = home / "slides"
    slides.mkdir()
    for seed, name in enumerate(SLIDES):
        write_he_slide(slides / f"{name}.svs", SIZE, seed=seed, downsamples=(1, 4))
    data = home / "data"
    data.mkdir()
    _write_tables(data, slides)
    results = data / "results"
    ts.run(
        [slides],
        out=results,
        encoders=(str(home / "small_clip"),),
        tile_px=32,
        tile_mpp="2",
        device="cpu",
        precision="fp32",
    )
    config = replace_flat(
        TrainConfig(), {"labels": data / "labels.csv", "target": ("label",), **FITTED}
    )
    train(results, out=data / "model", config=config)
    _write_settings(data, home)
    _write_regions(data)
    _write_cache(data / "caches")
    from thinsection.exchange.peer_export import export_peer

    export_peer(results, data / "trident", "trident", copy=True)


def _write_tables(data: Path, slides: Path) -> None:
    """Labels and cohorts, in each form."""
    import openpyxl
    import pyarrow as pa
    import pyarrow.parquet as pq

    labels: dict[str, list[Any]] = {
        "slide_id": list(SLIDES),
        "case_id": [f"case{number}" for number in range(len(SLIDES))],
        "label": ["ab"[number % 2] for number in range(len(SLIDES))],
        "days": [100 + 10 * number for number in range(len(SLIDES))],
    }
    cohort: dict[str, list[Any]] = {
        "slide_path": [f"{slides}/{name}.svs" for name in SLIDES[:3]],
        "slide_id": list(SLIDES[:3]),
        "slide_mpp": ["0.5", "", "0.5x0.5"],
        "patient_id": ["p1", "p2", "p2"],
    }
    for name, columns in (("labels", labels), ("cohort", cohort)):
        rows = [list(columns), *map(list, zip(*columns.values(), strict=True))]
        for suffix, delimiter in (("csv", ","), ("tsv", "\t")):
            lines = [delimiter.join(map(str, row)) for row in rows]
            (data / f"{name}.{suffix}").write_text("\n".join(lines) + "\n")
        book = openpyxl.Workbook()
        for row in rows:
            book.worksheets[0].append(row)
        book.save(data / f"{name}.xlsx")
        pq.write_table(pa.table(columns), data / f"{name}.parquet")


def _write_settings(data: Path, home: Path) -> None:
    """Settings, prompts, checks, rules, a suite and a network."""
    import torch
    from safetensors.torch import save_file

    (data / "settings.toml").write_text(
        '[slides]\nfingerprint = "samples"\n[tissue]\nmask_mpp = 8.0\nmin_speck_um2 = 2000.0\n'
        '[tiles]\ntile_px = 32\ntile_mpp = [2.0]\ntile_filter = ["tissue", "tissue_fraction>0.1"]\n'
        '[stream]\nmemory = "256MiB"\n'
    )
    (data / "train.toml").write_text(
        '[labels]\nlabels = "labels.csv"\ntarget = ["label"]\n[head]\nhead = "linear"\n'
        "[fit]\nepochs = 1\nlr = 1e-3\n[cross]\nfolds = 2\ninner_folds = 2\n"
    )
    (data / "words.toml").write_text('[classes]\na = ["tumour"]\nb = ["stroma"]\n')
    (data / "suite.toml").write_text(
        '[encoders.clip]\nencoder = "clip"\n[[tasks]]\nname = "grade"\nprobes = ["slide"]\n'
        'data = "labels.csv"\nembeddings = "results"\n'
    )
    (data / "checks.toml").write_text(
        'name = "mine"\nwork_mpp = 8.0\nwork_from = "mpp"\n[[check]]\nkind = "intensity"\n'
        'name = "bright"\nupper_gray = 0.9\nlower_std = 10.0\n[[check]]\nkind = "fragments"\n'
        'min_area = "0.01 mm2"\n'
    )
    (data / "rules.toml").write_text(
        '[[verdict]]\nwords = "little tissue"\nrule = "pixels_to_use<100"\n'
        'verdict = "exclude"\n'
    )
    weights = {"weight": torch.ones(2, 3, 1, 1), "bias": torch.tensor([0.0, 0.1])}
    save_file(weights, data / "network.safetensors")
    (data / "segmenter.toml").write_text(
        '[segmenter]\nname = "colours"\noutputs = ["glass", "tumour"]\nbackground = "glass"\n'
        'mpp = 4.0\npx = 64\narchitecture = "torch.nn:Conv2d"\n'
        "options = {in_channels = 3, out_channels = 2, kernel_size = 1}\n"
        'weights = "network.safetensors"\n'
    )


def _polygon(box: tuple[int, int, int, int], name: str) -> dict[str, Any]:
    x0, y0, x1, y1 = box
    ring = [[x0, y0], [x1, y0], [x1, y1], [x0, y1], [x0, y0]]
    return {
        "type": "Feature",
        "geometry": {"type": "Polygon", "coordinates": [ring]},
        "properties": {"classification": {"name": name}},
    }


def _write_regions(data: Path) -> None:
    """Regions as GeoJSON, ImageScope XML and boxes."""
    shapes = [_polygon((0, 0, 550, 800), "a"), _polygon((550, 0, 1100, 800), "b")]
    text = json.dumps({"type": "FeatureCollection", "features": shapes}, indent=1)
    of_slides = []
    for name in SLIDES:
        for shape in shapes:
            properties = {**shape["properties"], "slide_id": name}
            of_slides.append({**shape, "properties": properties})
    regions = {"type": "FeatureCollection", "features": of_slides}
    (data / "regions.geojson").write_text(json.dumps(regions))
    for folder in ("outlines", "roi"):
        (data / folder).mkdir()
        (data / folder / "slide0.geojson").write_text(text)
    (data / "roi" / "slide0.xml").write_text(
        '<Annotations MicronsPerPixel="0.5"><Annotation Id="1" Name="a"><Regions>'
        '<Region Id="1" Type="0" NegativeROA="0"><Vertices>'
        '<Vertex X="0" Y="0"/><Vertex X="600" Y="0"/><Vertex X="600" Y="700"/>'
        "</Vertices></Region></Regions></Annotation></Annotations>\n"
    )
    (data / "roi" / "slide0.csv").write_text(
        "slide_id,x,y,width,height,label\nslide0,0,0,600,700,a\nslide1,5,5,90,80,b\n"
    )


def _write_cache(root: Path) -> None:
    key = CacheKey(encoder="e", weights_hash="w", preprocessing="p", data_hash="d")
    values = np.random.default_rng(0).normal(size=(24, 5, 16)).astype(np.float32)
    with CacheWriter(root, key, values.shape, budget_bytes=1 << 20) as writer:
        writer.append(values)
        writer.finish()


def command_line(name: str, home: Path) -> list[str]:
    """Arguments of a command, called in a copy of `home/data`."""
    words = COMMANDS[name].replace("HOME", str(home)).split()
    if "CACHE" in words:
        folders = sorted((home / "data" / "caches").iterdir())
        words[words.index("CACHE")] = folders[0].name
    return words
