"""A model is one safetensors file: the heads of an ensemble, and all that predicting needs.

Metadata `thinsection_model`: the `ModelCard` as JSON, with the `Inputs` of its heads. Tensors:
`<i>.<name>` of each member; `mean`, `axes`, `variances` of `Usual`. Loading runs no code; a header
that does not fit is refused before a tensor is read.
"""

import contextlib
import hashlib
import json
import math
import platform
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

import thinsection
from thinsection.config import as_mapping, from_mapping, option
from thinsection.errors import ConfigError, StoreError, WeightsError, require, rewording
from thinsection.evaluation.cases import plain_id
from thinsection.evaluation.embeddings import read_embeddings
from thinsection.evaluation.labels import Floats, Target
from thinsection.evaluation.leaks import is_near, sketches
from thinsection.files.json_text import parse_json
from thinsection.files.pages import render_page
from thinsection.pipeline.records import read_records
from thinsection.predict.heads.config import HeadConfig, build_head
from thinsection.predict.heads.head import Head
from thinsection.slide.geometry import nominal_mpp
from thinsection.stages.config import RunConfig
from thinsection.stages.request import mask_stage, segment_stages
from thinsection.stages.tiles import TilesStage
from thinsection.store.ledger import SLIDES
from thinsection.store.tiles_h5 import check_numbers, open_h5, stored_dataset
from thinsection.types import MIB
from thinsection.weights.files import (
    MODEL_KEY,
    load_strictly,
    read_state_dict,
    write_tensors,
)
from thinsection.weights.origin import slug

FORMAT = 2
# how a slide or case is known from training: not; by its name or its patient's; by its embeddings
# under another name; nearly by its mean embedding
Seen = Literal["", "name", "content", "near"]
_BLOCK = 1024  # cases that are looked at together
_USUAL = ("mean", "axes", "variances", "within")  # tensors of `Usual`
MAX_HEADER = 16 * MIB
_MOST = {"members": 1000, "dim": 1 << 16, "outputs": 4096, "num_layers": 64}
_MOST |= dict.fromkeys(("hidden_dim", "attention_dim", "num_heads"), 1 << 14)
# sections of a run's settings that decide what is embedded, not where
_DECIDING = (
    "slides",
    "tissue",
    "qc",
    "segment",
    "tiles",
    "stain",
    "encode",
    "aggregate",
)
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
    features: str | None = option(
        None, "embeddings"
    )  # 'uni2_h_macenko'; None: no folder of ours
    dim: int = option(1, "channels")
    run: dict[str, Any] = field(
        default_factory=dict
    )  # settings of the run that made them


def read_inputs(path: Path) -> Inputs:
    """Of one file of embeddings. Raises StoreError: it is none."""
    if path.suffix.lower() not in (".h5", ".hdf5"):
        return Inputs(dim=read_embeddings(path).shape[1])
    folder = path.parent.name
    with open_h5(path) as file:
        data = stored_dataset(file, "features", path)
        parts = (file, *([file["coords"]] if "coords" in file else []), data)
        said = {k: v for part in parts for k, v in part.attrs.items()}
        level: Literal["tile", "slide"] = (
            "slide" if folder.startswith(_SLIDE) else "tile"
        )
        dim = int(data.shape[-1])
    check_numbers(said, path)
    power = float(said.get("target_magnification", 0))
    if not 0 <= power < math.inf:
        raise StoreError(
            f"attribute 'target_magnification' must be a number >= 0, got {power} in "
            f"{str(path)!r}; make the file anew"
        )
    said["encoder"] = said.get("encoder", said.get("slide_encoder"))
    names = (
        "encoder",
        "weights_hash",
        "revision",
        "precision",
        "resample",
        "preprocessing",
    )
    text: dict[str, Any] = {name: str(said[name]) for name in names if said.get(name)}
    label = (
        f"{path.parts[-3]}/{folder.removeprefix(_SLIDE)}"
        if level == "slide"
        else folder
    )
    features = label.removeprefix("features_") if "weights_hash" in text else None
    text["tile_px"] = int(said["patch_size"]) if "patch_size" in said else None
    text["tile_mpp"] = round(nominal_mpp(power), 6) if power else None
    return Inputs(level=level, dim=dim, features=features, **text)


def training_inputs(files: Sequence[Path]) -> Inputs:
    """What all files of a training set are of, and the settings of the run that made them."""
    first = read_inputs(files[0])
    for path in files[1:]:
        check_inputs(first, read_inputs(path), path.stem, of="the training set's")
    return replace(first, run=_run_settings(files[0], first))


def check_inputs(
    wanted: Inputs, found: Inputs, slide_id: str, *, of: str = "the model's"
) -> None:
    """Refuses embeddings that the head has never seen the like of.

    Raises InvalidInputError: names the first that differs, encoder, weights, commit, tile_px, ...
    """
    remedy = "predict from the slides, or embed them with the model's settings"
    for f in fields(Inputs):
        want, got, name = (
            getattr(wanted, f.name),
            getattr(found, f.name),
            f.metadata.get("help"),
        )
        unsaid = f.name in ("revision", "features") and None in (want, got)
        both = isinstance(want, float) and isinstance(got, float)
        alike = want == got or (both and math.isclose(want, got))
        rule, found_in = (
            f"{name} must be {of}, {want!r}",
            f"{got!r} in {slide_id!r}; {remedy}",
        )
        require(name is None or unsaid or alike, rule, found_in)


def _run_settings(path: Path, found: Inputs) -> dict[str, Any]:
    """Settings of the newest run that made this grid with this encoder; {} for others' files."""
    out, grid = path.absolute().parents[2], path.absolute().parts[-3]
    for record in reversed(read_records(out) if (out / SLIDES).is_dir() else []):
        told = {
            k: v for k, v in record.document.get("config", {}).items() if k in _DECIDING
        }
        with contextlib.suppress(
            ConfigError, StoreError
        ):  # a file of checks that is gone, say
            config = from_mapping(RunConfig, told)
            mask = mask_stage(config)
            segments = segment_stages(config, mask)
            tiles = TilesStage(config=config.tiles, mask=mask, segments=segments)
            named = [
                n for n in config.encode.encoders if slug(n) in (found.features or "")
            ]
            if tiles.grid == grid and named:
                run = {name: as_mapping(config)[name] for name in _DECIDING}
                return run | {
                    "encode": run["encode"] | {"encoders": [max(named, key=len)]}
                }
    return {}


def run_config(inputs: Inputs, model: str) -> RunConfig:
    """The settings of a run that makes such embeddings; ConfigError: another tool made them."""
    got = f"none in {model!r}; embed the slides as then, and predict from that folder"
    rule = "a model must know the run that made its embeddings"
    require(inputs.run, rule, got, error=ConfigError)
    return from_mapping(RunConfig, inputs.run, where="run.")


@dataclass(frozen=True)
class Usual:
    """Mean embeddings (D,) of the training cases: their mean and covariance, and how far is far.

    The covariance is Ledoit and Wolf's shrunk one (2004), kept as R axes and their variances; in
    all other directions the variance is `floor`.
    """

    mean: Floats  # (D,)
    axes: Floats  # (R, D), orthonormal
    variances: Floats  # (R,)
    floor: float
    threshold: float  # a distance; 99 % of training cases are nearer to the others
    within: Floats  # (R,) variance of the tiles of one case along each axis
    within_floor: float  # variance of the tiles of one case in any other direction
    num_tiles: float  # of a training case, harmonic mean

    @classmethod
    def of(
        cls,
        means: npt.NDArray[np.floating],
        residuals: Iterable[npt.NDArray[np.floating]] = (),
        num_tiles: Sequence[int] = (),
    ) -> "Usual":
        """What is usual, from the training cases.

        Args:
            means: mean embedding of each case, (n, D), n >= 3.
            residuals: some tiles of each case less their mean, (tiles, D).
            num_tiles: tiles of each case.

        Memory: 32 D² bytes.
        """
        n, dim = means.shape
        require(n >= 3, "training cases must be at least 3", n)
        mean = means.mean(0, dtype=np.float64)

        def over(values: Callable[[Floats], Floats]) -> Iterator[Floats]:
            return (
                values(means[at : at + _BLOCK] - mean) for at in range(0, n, _BLOCK)
            )

        if n > dim:
            squares, columns = np.linalg.eigh(reduce(np.add, over(lambda z: z.T @ z)))
            squares, axes = squares[::-1].clip(0), np.ascontiguousarray(columns.T[::-1])
        else:
            _, s, axes = np.linalg.svd(means - mean, full_matrices=False)
            squares = s**2
        lengths, variances = (
            np.concatenate([*over(lambda z: (z**2).sum(1))]),
            squares / n,
        )
        level, square = variances.sum() / dim, (variances**2).sum()
        spread = ((lengths**2).sum() / n - square) / n
        shrink = min(1.0, spread / max(square - dim * level**2, 1e-300))
        # equal cases vary by what float32 rounds away: a distance stays a finite number
        rounding = (np.finfo(np.float32).eps * np.abs(mean).max()) ** 2
        floor = float(max(shrink * level, 1e-9 * level, rounding, 1e-30))
        # each case against the others, whose covariance is one product less (Sherman-Morrison)
        others = (1 - shrink) * n / (n - 1) * variances + floor
        q = np.concatenate([*over(lambda z: ((z @ axes.T) ** 2 / others).sum(1))])
        b = (1 - shrink) * n / (n - 1) ** 2
        alone = n / (n - 1) * np.sqrt(q / np.maximum(1 - b * q, 1e-9))
        threshold = float(np.quantile(alone, 0.99))
        shrunk = (1 - shrink) * variances + floor
        within, within_floor = _tile_variance(residuals, axes)
        usual_tiles = 1 / float(np.mean([1 / n for n in num_tiles])) if num_tiles else 1
        return cls(
            mean=mean,
            axes=axes,
            variances=shrunk,
            floor=floor,
            threshold=threshold,
            within=within,
            within_floor=within_floor,
            num_tiles=usual_tiles,
        )

    @property
    def center(self) -> Floats:
        """The mean as a model file holds it, in float32: sketches begin there."""
        return self.mean.astype(np.float32).astype(np.float64)

    def distance(
        self, embedding: npt.NDArray[np.floating], num_tiles: float | None = None
    ) -> float:
        """Mahalanobis distance of a mean embedding (D,) of `num_tiles` tiles (None: as usual).

        The mean of fewer tiles than usual varies more: by the variance of a case's tiles times
        1 / tiles - 1 / usual tiles.
        """
        extra = max(0.0, 1 / (num_tiles or self.num_tiles) - 1 / self.num_tiles)
        z = embedding - self.mean
        along = (self.axes @ z) ** 2
        rest = max(0.0, float(z @ z - along.sum())) if len(self.axes) < len(z) else 0.0
        variances = self.variances + extra * self.within
        floor = self.floor + extra * self.within_floor
        return float(np.sqrt((along / variances).sum() + rest / floor))


def _tile_variance(
    residuals: Iterable[npt.NDArray[np.floating]], axes: Floats
) -> tuple[Floats, float]:
    """Variance of a case's tiles along axes (R, D), and in any other direction."""
    rank, dim = axes.shape
    along = np.zeros(rank)
    rest = 0.0
    degrees = 0
    for tiles in residuals:
        projected = ((tiles @ axes.T) ** 2).sum(axis=0)
        along += projected
        rest += max(0.0, float((tiles**2).sum() - projected.sum()))
        degrees += len(tiles) - 1
    degrees = max(1, degrees)
    return along / degrees, rest / degrees / max(1, dim - rank)


@dataclass(frozen=True, kw_only=True)
class Member:
    """One head of the ensemble."""

    temperature: float = (
        1.0  # that divides its logits (Guo et al. 2017), from inner folds
    )
    # marks of training cases and slides that it has not seen: of their names (`case_mark`) and of
    # their embeddings (`content_mark`)
    held_out: tuple[str, ...] = ()
    # with centre, spread and edges of its training cases; None: the card's target
    target: Target | None = None


@dataclass(frozen=True, kw_only=True)
class Lock:
    """What training cases have fixed, and new cases are only judged by; see `locking.lock_of`."""

    # output -> predicted probability from which a case counts as positive; of two classes the
    # second one alone
    thresholds: dict[str, float] = field(default_factory=dict)
    inner_cases: int = 0  # that the thresholds were chosen on
    risk_cut: float | None = None  # risks above it are high
    horizons: tuple[float, ...] = ()  # times at which survival is scored
    # of 'cox': times of events, and the cumulative baseline hazard from each on
    times: tuple[float, ...] = ()
    hazard: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """The header of a model file; plain values."""

    name: str
    head: HeadConfig
    target: Target
    inputs: Inputs
    members: tuple[Member, ...]
    floor: float  # of `Usual`
    threshold: float
    within_floor: float = 0.0
    num_tiles: float = 1.0
    table_sha256: str = ""  # of the training table's bytes
    trained: tuple[str, ...] = ()  # marks of all training cases and slides
    sketches: tuple[str, ...] = ()  # of the mean embedding of each training slide
    lock: Lock | None = None  # None: made by a version that fixed nothing
    data: dict[str, Any] = field(
        default_factory=dict
    )  # cases, slides, and so on, as the card says
    scores: dict[str, Any] = field(default_factory=dict)  # metric -> number or text
    versions: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model in memory."""

    card: ModelCard
    heads: tuple[Head, ...]  # as `card.members`
    usual: Usual

    def answers(
        self, logits: npt.NDArray[np.floating], members: Sequence[int]
    ) -> Floats:
        """Calibrated answers (M, K) of some members' logits (M, K); see `Target.answers`."""
        answers = []
        for row, i in zip(logits, members, strict=True):
            member = self.card.members[i]
            target = member.target or self.card.target
            answers.append(target.answers(row[None] / member.temperature)[0])
        return np.stack(answers)

    def asked(self, marks: Collection[str]) -> list[int]:
        """The members that answer for a case or slide: all, or those that have not seen it."""
        members = enumerate(self.card.members)
        unseen = [i for i, member in members if {*marks} & {*member.held_out}]
        return unseen or list(range(len(self.heads)))

    def seen_as(
        self,
        names: Collection[str],
        contents: Collection[str],
        means: npt.NDArray[np.floating],
    ) -> Seen:
        """How a slide or case is known from training.

        Args:
            names: marks of its names.
            contents: marks of the embeddings of its slides.
            means: mean embedding of each of its slides (S, D).
        """
        known = {*self.card.trained}
        for member in self.card.members:
            known |= {*member.held_out}
        if known & {*names}:
            return "name"
        if known & {*contents}:
            return "content"
        own = sketches(means, self.usual.center)
        if any(is_near(sketch, self.card.sketches) for sketch in own):
            return "near"
        return ""

    def seen_warnings(self, seen: Seen, marks: Collection[str]) -> list[str]:
        """What a person should know of a slide or case that is known from training.

        Args:
            seen: see `seen_as`.
            marks: of its names and its embeddings.
        """
        if not seen:
            return []
        if seen == "near":
            return [
                "nearly the mean embedding of a training slide: if it shows the same tissue, "
                "the answer is no test of the model"
            ]
        what = "of the training set"
        if seen == "content":
            what = "the embeddings of a training slide under another name"
        if any({*marks} & {*member.held_out} for member in self.card.members):
            return [f"{what}: answered by heads that have not seen it"]
        return [f"{what}: every head has seen it, the answer is no test of the model"]


def case_mark(case_id: str) -> str:
    """Mark of a training case in the header: no name leaves the hospital."""
    return hashlib.sha256(case_id.encode()).hexdigest()[:16]


def name_marks(*names: str) -> list[str]:
    """Marks of ids, as they are written and without spaces, capitals and leading zeros."""
    written = [form for name in names if name for form in (name, plain_id(name))]
    return [case_mark(name) for name in dict.fromkeys(written)]


def content_mark(digest: str) -> str:
    """Mark of the embeddings of a training slide in the header."""
    return f"c{digest[:16]}"


def versions() -> dict[str, str]:
    """Of what computes."""
    python, ours = platform.python_version(), thinsection.__version__
    return {"thinsection": ours, "torch": str(torch.__version__), "python": python}


def save_model(path: Path, model: Model) -> None:
    """Writes the model, atomically; the same model gives the same bytes."""
    tensors = nn.ModuleList(model.heads).state_dict()
    tensors |= {n: torch.from_numpy(getattr(model.usual, n)).float() for n in _USUAL}
    told = json.dumps(as_mapping(model.card), allow_nan=False, sort_keys=True)
    plain = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    write_tensors(path, plain, {MODEL_KEY: told})


def read_card(path: Path) -> ModelCard:
    """The header of a model file, every field checked; no tensor is read.

    Raises WeightsError: it is no model, a number is out of bounds. ConfigError: a field is wrong.
    """
    errors = (OSError, ValueError, KeyError, TypeError, RecursionError, AttributeError)
    what = "model must be a file of `thinsection train`"
    with rewording(what, path, *errors, error=WeightsError), path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        fits = size <= min(MAX_HEADER, path.stat().st_size)
        require(
            fits,
            f"header must have at most {MAX_HEADER} bytes",
            size,
            error=WeightsError,
        )
        told = parse_json(parse_json(file.read(size))["__metadata__"][MODEL_KEY])
        found = told.get("format")
    got = f"{found!r}; update thinsection"
    require(found == FORMAT, f"format must be {FORMAT}", got, error=WeightsError)
    card = from_mapping(ModelCard, told, where="model.")
    sizes = {"dim": card.inputs.dim, "outputs": len(card.target.names)}
    sizes |= {"members": len(card.members), **as_mapping(card.head)}
    for name, most in _MOST.items():
        fits = int(name != "hidden_dim") <= sizes[name] <= most
        require(fits, f"{name} must be in 1..{most}", sizes[name], error=WeightsError)
    warm = all(member.temperature > 0 for member in card.members) and card.floor > 0
    warm = warm and card.within_floor >= 0 and card.num_tiles >= 1
    require(warm, "temperatures and floor must be > 0", "others", error=WeightsError)
    if card.lock is not None:
        _check_lock(card.lock)
    return card


def _check_lock(lock: Lock) -> None:
    """Raises WeightsError: thresholds are no probabilities, or the hazard is none."""
    if not all(0 <= threshold <= 1 for threshold in lock.thresholds.values()):
        raise WeightsError(f"thresholds must be in 0..1, got {lock.thresholds}")
    rising = all(np.all(np.diff(v) >= 0) for v in (lock.times, lock.hazard))
    if (
        len(lock.times) != len(lock.hazard)
        or not rising
        or min(lock.hazard, default=0) < 0
    ):
        raise WeightsError(
            f"baseline hazard must rise over its times, got {len(lock.hazard)} values at "
            f"{len(lock.times)} times"
        )


def load_model(path: str | Path) -> Model:
    """The model of a file, whose tensors are exactly those of its heads.

    Memory: its size, twice while it is read. Raises: as `read_card`.
    """
    card, state = read_card(Path(path)), read_state_dict(path)
    finite = all(bool(v.isfinite().all()) for v in state.values())
    require(
        finite, "tensors of a model must be finite", repr(str(path)), error=WeightsError
    )
    parts = [state.pop(n, torch.empty(0)).double().numpy() for n in _USUAL]
    dim, rank, outputs = card.inputs.dim, len(parts[-1]), len(card.target.names)
    fits = [part.shape for part in parts] == [(dim,), (rank, dim), (rank,), (rank,)]
    require(
        fits,
        f"{', '.join(_USUAL)} must fit",
        [p.shape for p in parts],
        error=WeightsError,
    )
    with torch.device("meta"):
        heads = [build_head(card.head, dim, outputs) for _ in card.members]
    load_strictly(
        nn.ModuleList(heads).eval().requires_grad_(False), state, source=str(path)
    )
    usual = Usual(
        mean=parts[0],
        axes=parts[1],
        variances=parts[2],
        floor=card.floor,
        threshold=card.threshold,
        within=parts[3],
        within_floor=card.within_floor,
        num_tiles=card.num_tiles,
    )
    return Model(card=card, heads=tuple(heads), usual=usual)


def card_markdown(card: ModelCard) -> str:
    """The model card: intended use, data, figures, limits; printable characters only."""
    text = render_page(
        "thinsection.predict", "card.md.j2", card=card, inputs=card.inputs
    )
    return "".join(c for c in text if c.isprintable() or c == "\n") + "\n"
