"""A model is one safetensors file: the heads of an ensemble, and all that predicting needs.

Metadata `thinsection_model`: the `ModelCard` as JSON. Tensors: `head<i>.<name>` of each member;
`usual.*`, see `Usual`. Loading runs no code, and a header that does not fit is refused before a
tensor is read.
"""

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import thinsection
from thinsection.config import as_mapping, from_mapping
from thinsection.errors import WeightsError, require, rewording
from thinsection.files.atomic import atomic_path
from thinsection.predict.heads.config import HeadConfig, build_head
from thinsection.predict.heads.head import Head
from thinsection.predict.inputs import Inputs
from thinsection.predict.labels import Target
from thinsection.types import MIB
from thinsection.weights.files import load_strictly, read_state_dict

KEY, FORMAT = "thinsection_model", 1
MAX_HEADER = 16 * MIB
_MOST = {"members": 1000, "dim": 1 << 16, "outputs": 4096, "num_layers": 64}
_MOST |= dict.fromkeys(("hidden_dim", "attention_dim", "num_heads"), 1 << 14)
Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Usual:
    """Mean embeddings (D,) of the training cases: their mean and covariance, and how far is far.

    The covariance is Ledoit and Wolf's shrunk one (2004), kept as R axes and their variances; in
    all other directions the variance is `floor`.
    """

    mean: Vector  # (D,)
    axes: Vector  # (R, D), orthonormal
    variances: Vector  # (R,)
    floor: float
    threshold: float  # a distance; 99 % of training cases are nearer to the others

    @classmethod
    def of(cls, means: npt.NDArray[np.floating]) -> "Usual":
        """From the mean embedding of each training case, (n, D), n >= 3. Memory: 24 n D bytes."""
        n, dim = means.shape
        require(n >= 3, "training cases must be at least 3", n)
        mean = means.mean(0, dtype=np.float64)
        u, s, axes = np.linalg.svd(means - mean, full_matrices=False)
        rows, variances = (u * s) ** 2, s**2 / n
        level, square = variances.sum() / dim, (variances**2).sum()
        spread = ((rows.sum(1) ** 2).sum() / n - square) / n
        shrink = min(1.0, spread / max(square - dim * level**2, 1e-300))
        floor = float(max(shrink * level, 1e-9 * level, 1e-300))
        # each case against the others, whose covariance is one product less (Sherman-Morrison)
        others = (1 - shrink) * n / (n - 1) * variances + floor
        q, b = (rows / others).sum(1), (1 - shrink) * n / (n - 1) ** 2
        alone = n / (n - 1) * np.sqrt(q / np.maximum(1 - b * q, 1e-9))
        threshold = float(np.quantile(alone, 0.99))
        shrunk = (1 - shrink) * variances + floor
        return cls(mean=mean, axes=axes, variances=shrunk, floor=floor, threshold=threshold)

    def distance(self, embedding: npt.NDArray[np.floating]) -> float:
        """Mahalanobis distance of a mean embedding (D,)."""
        z = embedding - self.mean
        along = (self.axes @ z) ** 2
        rest = max(0.0, float(z @ z - along.sum())) if len(self.axes) < len(z) else 0.0
        return float(np.sqrt((along / self.variances).sum() + rest / self.floor))


@dataclass(frozen=True, kw_only=True)
class Member:
    """One head of the ensemble."""

    temperature: float = 1.0  # that divides its logits (Guo et al. 2017), from inner folds
    held_out: tuple[str, ...] = ()  # `case_mark` of the training cases that it has not seen


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
    table_sha256: str = ""  # of the training table's bytes
    data: dict[str, Any] = field(default_factory=dict)  # cases, slides, and so on, as the card says
    scores: dict[str, Any] = field(default_factory=dict)  # metric -> number or text
    versions: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model in memory."""

    card: ModelCard
    heads: tuple[Head, ...]  # as `card.members`
    usual: Usual

    def answers(self, logits: npt.NDArray[np.floating], members: Sequence[int]) -> Vector:
        """Calibrated answers (M, K) of some members' logits (M, K); see `Target.answers`."""
        warm = np.array([[self.card.members[i].temperature] for i in members])
        return self.card.target.answers(logits / warm)

    def asked(self, case_id: str) -> list[int]:
        """The members that answer for a case: all, or those that have not trained on it."""
        mark = case_mark(case_id)
        unseen = [i for i, member in enumerate(self.card.members) if mark in member.held_out]
        return unseen or list(range(len(self.heads)))


def case_mark(case_id: str) -> str:
    """What stands for a training case in the header: no name leaves the hospital."""
    return hashlib.sha256(case_id.encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """Of what computes."""
    return {
        "thinsection": thinsection.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def save_model(path: Path, model: Model) -> None:
    """Writes the model, atomically; the same model gives the same bytes."""
    from safetensors.torch import save_file

    tensors = {
        f"head{i}.{k}": v for i, h in enumerate(model.heads) for k, v in h.state_dict().items()
    }
    for name in ("mean", "axes", "variances"):
        tensors[f"usual.{name}"] = torch.from_numpy(getattr(model.usual, name)).float()
    told = json.dumps(as_mapping(model.card), allow_nan=False, sort_keys=True)
    with atomic_path(path) as tmp:
        save_file({k: v.cpu().contiguous() for k, v in tensors.items()}, tmp, {KEY: told})


def read_card(path: Path) -> ModelCard:
    """The header of a model file, every field checked; no tensor is read.

    Raises:
        WeightsError: it is no model, or its tensors are not those of its head.
        ConfigError: a field of the header is unknown, missing or of another type.
    """
    return _checked(Path(path))[0]


def load_model(path: str | Path) -> Model:
    """The model of a file. Memory: its size, twice while it is read. Raises: as `read_card`."""
    card, heads = _checked(path := Path(path))
    state, loaded = read_state_dict(path), []
    for i, head in enumerate(heads):
        own = {
            k.removeprefix(f"head{i}."): v for k, v in state.items() if k.startswith(f"head{i}.")
        }
        load_strictly(head, own, source=str(path))
        loaded.append(head.eval().requires_grad_(False))
    parts = {n: state[f"usual.{n}"].double().numpy() for n in ("mean", "axes", "variances")}
    finite = all(bool(v.isfinite().all()) for v in state.values())
    require(finite, "tensors of a model must be finite", repr(str(path)), error=WeightsError)
    usual = Usual(floor=card.floor, threshold=card.threshold, **parts)
    return Model(card=card, heads=tuple(loaded), usual=usual)


def _checked(path: Path) -> tuple[ModelCard, list[Head]]:
    """Card, and heads without values, whose tensors are exactly those of the file."""
    errors = (OSError, ValueError, KeyError, TypeError, RecursionError, AttributeError)
    with (
        rewording("model must be a file of `thinsection train`", path, *errors, error=WeightsError),
        path.open("rb") as file,
    ):
        size = int.from_bytes(file.read(8), "little")
        fits = size <= min(MAX_HEADER, path.stat().st_size)
        require(fits, f"header must have at most {MAX_HEADER} bytes", size, error=WeightsError)
        header = json.loads(file.read(size))
        told = json.loads(header.pop("__metadata__")[KEY])
        known = FORMAT if told.get("format") is None else told["format"]
        rule = f"format must be {FORMAT}"
        require(known == FORMAT, rule, f"{known!r}; update thinsection", error=WeightsError)
        found = {n: (t["dtype"], tuple(t["shape"])) for n, t in header.items()}
    card = from_mapping(ModelCard, told, where="model.")
    sizes = {"dim": card.inputs.dim, "outputs": len(card.target.names)}
    sizes |= {"members": len(card.members), **as_mapping(card.head)}
    for name, most in _MOST.items():
        fits = 0 < sizes[name] <= most or (name == "hidden_dim" and not sizes[name])
        require(fits, f"{name} must be in 1..{most}", sizes[name], error=WeightsError)
    warm = all(member.temperature > 0 for member in card.members) and card.floor > 0
    require(warm, "temperatures and floor must be > 0", "others", error=WeightsError)
    with torch.device("meta"):
        made = [
            build_head(card.head.head, sizes["dim"], sizes["outputs"], card.head)
            for _ in card.members
        ]
    wanted = {
        f"head{i}.{k}": tuple(v.shape)
        for i, h in enumerate(made)
        for k, v in h.state_dict().items()
    }
    rank = found.get("usual.variances", ("", ()))[1]
    wanted |= {
        "usual.mean": (sizes["dim"],),
        "usual.axes": (*rank, sizes["dim"]),
        "usual.variances": rank,
    }
    wrong = sorted(n for n in {*wanted, *found} if found.get(n) != ("F32", wanted.get(n)))
    rule = "tensors must be those of the head, float32"
    require(
        not wrong and len(rank) == 1,
        rule,
        f"others: {wrong[:3]} in {str(path)!r}",
        error=WeightsError,
    )
    return card, made


def card_markdown(card: ModelCard) -> str:
    """The model card: intended use, data, figures, limits."""
    head, inputs, target = card.head, card.inputs, card.target
    by = {"binary": "class", "multiclass": "class", "multilabel": "labels", "regression": "value"}
    what = f"{by.get(target.kind, 'risk')} of {', '.join(target.columns)} ({target.kind})"
    edge = f"{inputs.tile_px} px at {inputs.tile_mpp} µm/px"
    lines = [f"# {card.name}", "", "**For research use only. Not a medical device.**"]
    sections: dict[str, Mapping[str, Any]] = {
        "Intended use": {"predicts": what, "answers": ", ".join(target.names)},
        "Input": {
            "embeddings": f"{inputs.level} embeddings of {inputs.encoder}, {inputs.dim} channels",
            "commit": inputs.revision,
            "weights": inputs.weights_hash,
            "tiles": None if inputs.tile_px is None else edge,
            "tissue and quality control": inputs.run.get("qc", {}).get("qc"),
            "stain normalisation": inputs.run.get("stain", {}).get("stain_norm"),
        },
        "Model": {
            "head": f"{head.head}, {len(card.members)} members",
            "calibration": "temperatures "
            + ", ".join(f"{m.temperature:.3g}" for m in card.members),
        },
        "Training data": card.data | {"SHA-256 of the table": card.table_sha256},
        "Figures": card.scores,
        "Versions": card.versions,
    }
    for title, rows in sections.items():
        shown = [
            f"- {k}: {v:.4g}" if isinstance(v, float) else f"- {k}: {v}"
            for k, v in rows.items()
            if v
        ]
        lines += ["", f"## {title}", *shown]
    return "\n".join([*lines, "", "## Limits", *_LIMITS, ""])


_LIMITS = (
    "- Figures are of held-out cases of the training data; other scanners, stains, hospitals and",
    "  populations may give worse ones. Test it on your own before you rely on it.",
    "- A warning `unlike the training set` means that a slide's mean embedding is farther from the",
    "  training cases than 99 % of these are; no warning does not mean that the slide is usual.",
    "- Heatmaps say what the model looked at, not what causes a disease.",
)
