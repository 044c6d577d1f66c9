"""Which embeddings a head was trained on, and whether others are of the same kind."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from thinsection.config import as_mapping, from_mapping, option
from thinsection.errors import ConfigError, InvalidInputError, StoreError, require
from thinsection.pipeline.records import read_records
from thinsection.probe.data.files import read_embeddings
from thinsection.slide.geometry import nominal_mpp
from thinsection.stages.config import RunConfig
from thinsection.stages.labels import features_label
from thinsection.stages.request import mask_stage, segment_stages
from thinsection.stages.tiles import TilesStage
from thinsection.store.ledger import SLIDES
from thinsection.store.tiles_h5 import open_h5, stored_dataset
from thinsection.weights.origin import slug

# sections of a run's settings that decide what is embedded, not where
_DECIDING = ("slides", "tissue", "qc", "segment", "tiles", "stain", "encode", "aggregate")
_SLIDE = "slide_features_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a file of embeddings says of itself; None: nothing. Metadata are names in messages."""

    level: Literal["tile", "slide"] = option("tile", "level of the embeddings")
    encoder: str | None = option(None, "encoder")
    weights_hash: str | None = option(None, "weights of the encoder")
    revision: str | None = option(None, "commit of the encoder")
    tile_px: int | None = option(None, "tile_px")
    tile_mpp: float | None = option(None, "tile_mpp")  # that was asked for, µm/px
    precision: str | None = option(None, "precision of the encoder")
    preprocessing: str | None = option(None, "preprocessing")
    resample: str | None = option(None, "resampling")
    features: str | None = option(None, "embeddings")  # 'uni2_h_macenko'; None: no folder of ours
    dim: int = option(1, "channels")
    run: dict[str, Any] = field(default_factory=dict)  # settings of the run that made them


def read_inputs(path: Path) -> Inputs:
    """Of one file of embeddings. Raises StoreError: it is none."""
    if path.suffix.lower() not in (".h5", ".hdf5"):
        return Inputs(dim=read_embeddings(path).shape[1])
    folder = path.parent.name
    with open_h5(path) as file:
        data = stored_dataset(file, "features", path)
        parts = (file, *([file["coords"]] if "coords" in file else []), data)
        said = {k: v for part in parts for k, v in part.attrs.items()}
        level: Literal["tile", "slide"] = "slide" if folder.startswith(_SLIDE) else "tile"
        dim = int(data.shape[-1])
    power = float(said.get("target_magnification", 0))
    said["encoder"] = said.get("encoder", said.get("slide_encoder"))
    names = ("encoder", "weights_hash", "revision", "precision", "resample", "preprocessing")
    text: dict[str, Any] = {name: str(said[name]) for name in names if said.get(name)}
    label = f"{path.parts[-3]}/{folder.removeprefix(_SLIDE)}" if level == "slide" else folder
    return Inputs(
        level=level,
        dim=dim,
        tile_px=int(said["patch_size"]) if "patch_size" in said else None,
        tile_mpp=round(nominal_mpp(power), 6) if power else None,
        features=features_label(label) if "weights_hash" in text else None,
        **text,
    )


def training_inputs(files: Sequence[Path]) -> Inputs:
    """What all files of a training set are of, and the settings of the run that made them.

    Raises InvalidInputError: they differ.
    """
    first = read_inputs(files[0])
    for path in files[1:]:
        check_inputs(first, read_inputs(path), path.stem, of="the training set's")
    return Inputs(**asdict(first) | {"run": _run_settings(files[0], first)})


def check_inputs(wanted: Inputs, found: Inputs, slide_id: str, *, of: str = "the model's") -> None:
    """Refuses embeddings that the head has never seen the like of.

    Raises InvalidInputError: names the first that differs, encoder, weights, commit, tile_px, ...
    """
    for f in fields(Inputs):
        want, got, name = getattr(wanted, f.name), getattr(found, f.name), f.metadata.get("help")
        unsaid = f.name in ("revision", "features") and None in (want, got)
        numbers = isinstance(want, float) and isinstance(got, float)
        if name is None or unsaid or want == got or (numbers and math.isclose(want, got)):
            continue
        remedy = "predict from the slides, or embed them with the model's settings"
        rule = f"{name} must be {of}, {want!r}"
        raise InvalidInputError(f"{rule}, got {got!r} in {slide_id!r}; {remedy}")


def _run_settings(path: Path, found: Inputs) -> dict[str, Any]:
    """Settings of the newest run that made this grid with this encoder; {} for others' files."""
    out, grid = path.absolute().parents[2], path.absolute().parts[-3]
    for record in reversed(read_records(out) if (out / SLIDES).is_dir() else []):
        told = {k: v for k, v in record.document.get("config", {}).items() if k in _DECIDING}
        with contextlib.suppress(ConfigError, StoreError):  # a file of checks that is gone, say
            config = from_mapping(RunConfig, told)
            mask = mask_stage(config)
            segments = segment_stages(config, mask)
            tiles = TilesStage(config=config.tiles, mask=mask, segments=segments)
            named = [n for n in config.encode.encoders if slug(n) in (found.features or "")]
            if tiles.grid == grid and named:
                run = {name: as_mapping(config)[name] for name in _DECIDING}
                return run | {"encode": run["encode"] | {"encoders": [max(named, key=len)]}}
    return {}


def run_config(inputs: Inputs, model: str) -> RunConfig:
    """The settings of a run that makes such embeddings.

    Raises ConfigError: another tool made those that the model was trained on.
    """
    got = f"none in {model!r}; embed the slides as then, and predict from that folder"
    rule = "a model must know the run that made its embeddings"
    require(inputs.run, rule, got, error=ConfigError)
    return from_mapping(RunConfig, inputs.run, where="run.")
