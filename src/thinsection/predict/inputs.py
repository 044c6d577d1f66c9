"""Embeddings that a model accepts: the facts in a file, and which of them must agree."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

from thinsection.config import as_mapping, from_mapping, option
from thinsection.encode.registry import OWN_PREFIX
from thinsection.errors import ConfigError, InvalidInputError, StoreError, WeightsError
from thinsection.evaluation.embeddings import read_embeddings
from thinsection.files.trust import check_model_settings
from thinsection.results.records import read_records
from thinsection.slide.geometry import nominal_mpp
from thinsection.stages.config import RunConfig
from thinsection.stages.spec import grid_names, resolve, stages_of
from thinsection.store.hdf5 import open_h5, stored_dataset
from thinsection.store.ledger import SLIDES
from thinsection.store.tiles_h5 import check_numbers
from thinsection.types import Document
from thinsection.weights.origin import slug

# sections of a run's settings that decide the embeddings
DECIDING = (
    "slides",
    "tissue",
    "qc",
    "segment",
    "tiles",
    "stain",
    "encode",
    "aggregate",
)
_OF_COHORT = ("name_pattern", "allow_local_urls")  # settings of slides
SLIDE_FEATURES = "slide_features_"  # prefix of folders with slide embeddings


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Facts in a file of embeddings; None if not stated. Metadata are names for messages."""

    level: Literal["tile", "slide"] = option("tile", "level of the embeddings")
    encoder: str | None = option(None, "encoder")
    weights_hash: str | None = option(None, "weights of the encoder")
    revision: str | None = option(None, "commit of the encoder")
    tile_px: int | None = option(None, "tile_px")
    tile_mpp: float | None = option(None, "tile_mpp")  # requested resolution in µm/px
    precision: str | None = option(None, "precision of the encoder")
    preprocessing: str | None = option(None, "preprocessing")
    resample: str | None = option(None, "resampling")
    # such as 'uni2_h_macenko'; None if the folder is not ours
    features: str | None = option(None, "embeddings")
    dim: int = option(1, "channels")
    # settings of the run that made the embeddings
    run: Document = field(default_factory=dict)


def read_inputs(path: Path) -> Inputs:
    """Reads the facts of one file of embeddings. Raises StoreError: the file has none."""
    if path.suffix.lower() not in (".h5", ".hdf5"):
        return Inputs(dim=read_embeddings(path).shape[1])
    folder = path.parent.name
    with open_h5(path) as file:
        data = stored_dataset(file, "features", path)
        attributes = dict(file.attrs)
        if "coords" in file:
            attributes |= file["coords"].attrs
        attributes |= data.attrs
        dim = int(data.shape[-1])
    check_numbers(attributes, path)
    power = float(attributes.get("target_magnification", 0))
    if not 0 <= power < math.inf:
        raise StoreError(
            f"attribute 'target_magnification' must be a number >= 0, got {power} in "
            f"{str(path)!r}; create the file again"
        )
    attributes.setdefault("encoder", attributes.get("slide_encoder"))
    of_slide = folder.startswith(SLIDE_FEATURES)
    features = None
    if attributes.get("weights_hash"):
        features = folder.removeprefix("features_")
        if of_slide:
            features = f"{path.parts[-3]}/{folder.removeprefix(SLIDE_FEATURES)}"
    tile_px = attributes.get("patch_size")

    def text(name: str) -> str | None:
        return str(attributes[name]) if attributes.get(name) else None

    return Inputs(
        level="slide" if of_slide else "tile",
        dim=dim,
        features=features,
        tile_px=None if tile_px is None else int(tile_px),
        tile_mpp=round(nominal_mpp(power), 6) if power else None,
        encoder=text("encoder"),
        weights_hash=text("weights_hash"),
        revision=text("revision"),
        precision=text("precision"),
        resample=text("resample"),
        preprocessing=text("preprocessing"),
    )


def training_inputs(files: Sequence[Path]) -> Inputs:
    """Facts that all files of a training set share, and the settings of their run."""
    first = read_inputs(files[0])
    for path in files[1:]:
        check_inputs(first, read_inputs(path), path.stem, in_training=True)
    return replace(first, run=_run_settings(files[0], first))


def check_inputs(
    expected: Inputs, inputs: Inputs, slide_id: str, *, in_training: bool = False
) -> None:
    """Raises an error for embeddings that differ from those of the head's training.

    With `in_training`, `expected` are the facts of the first slide of the training set.

    Raises InvalidInputError: names the first difference: encoder, weights, commit, tile_px, ...
    """
    for fact in fields(Inputs):
        words = fact.metadata.get("help")
        want = getattr(expected, fact.name)
        got = getattr(inputs, fact.name)
        is_unstated = fact.name in ("revision", "features") and None in (want, got)
        if words is None or is_unstated or want == got:
            continue
        if (
            isinstance(want, float)
            and isinstance(got, float)
            and math.isclose(want, got)
        ):
            continue
        owner = "the model"
        remedy = "predict from the slides, or embed them with the model's settings"
        if in_training:
            owner = "the other slides of the training set"
            remedy = "embed all slides with the same settings"
        raise InvalidInputError(
            f"{words} must be {want!r} as in {owner}, got {got!r} in {slide_id!r}; {remedy}"
        )


def _run_settings(path: Path, inputs: Inputs) -> Document:
    """Settings of the newest run that made this grid with this encoder; {} for other tools."""
    out = path.absolute().parents[2]
    grid = path.absolute().parts[-3]
    if not (out / SLIDES).is_dir():
        return {}
    for record in reversed(read_records(out)):
        settings = {
            name: section
            for name, section in record.document.get("config", {}).items()
            if name in DECIDING
        }
        # a file with checks or weights may have been deleted
        with contextlib.suppress(ConfigError, StoreError, WeightsError):
            config = from_mapping(RunConfig, settings)
            encoders = [
                name
                for name in config.encode.encoders
                if slug(name.removeprefix(OWN_PREFIX)) in (inputs.features or "")
            ]
            for tiles in config.tiles.grids:
                one_grid = replace(config, tiles=tiles)
                if encoders and _is_of_grid(one_grid, grid):
                    run = {name: as_mapping(one_grid)[name] for name in DECIDING}
                    run["encode"] |= {"encoders": [max(encoders, key=len)]}
                    if not one_grid.segment.tissue_segmenter:
                        run["segment"] = as_mapping(RunConfig())["segment"]
                    return _without_cohort(run)
    return {}


def _is_of_grid(config: RunConfig, grid: str) -> bool:
    """True if a run with these settings has one grid, with this name."""
    spec = resolve(config, {"until": "tiles", "patients": "none"})
    return grid_names(stages_of(spec)) == (grid,)


def is_grid_of(inputs: Inputs, grid: str) -> bool:
    """True if the run that made the embeddings of the training would give a grid this name."""
    # a file with checks or weights may have been deleted
    with contextlib.suppress(ConfigError, StoreError, WeightsError):
        return bool(inputs.run) and _is_of_grid(run_config(inputs, "the model"), grid)
    return False


def run_config(inputs: Inputs, model: str) -> RunConfig:
    """Settings of a run that makes such embeddings; ConfigError: they come from another tool."""
    if not inputs.run:
        raise ConfigError(
            f"a model must record the run that made its embeddings, got none in {model!r}; "
            "embed the slides with the same settings, then predict from that folder"
        )
    settings = _without_cohort(inputs.run)
    check_model_settings(settings, as_mapping(RunConfig()), model)
    return from_mapping(RunConfig, settings, where="run.")


def _without_cohort(settings: Document) -> Document:
    """Settings of a run without those on the paths and ids of its slides."""
    qc = settings.get("qc")
    if isinstance(qc, dict):
        # corrections belong to the slides on which they were drawn
        without_edits = {name: qc[name] for name in qc if name != "qc_edits"}
        settings = settings | {"qc": without_edits}
    slides = settings.get("slides")
    if not isinstance(slides, dict):
        return settings
    other_settings = {name: slides[name] for name in slides if name not in _OF_COHORT}
    return settings | {"slides": other_settings}
