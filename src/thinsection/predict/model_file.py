"""Model in one safetensors file: the heads of an ensemble, and all other data for predictions.

Metadata `thinsection_model`: the `ModelCard` as JSON, with the `Inputs` of its heads. Tensors:
`<i>.<name>` of each member; `mean`, `axes`, `variances`, `within` of `Usual`. Loading runs
no code. An invalid header is an error before any tensor is read.
"""

import difflib
import hashlib
import json
import platform
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import nn

import thinsection
from thinsection.config import as_mapping, from_mapping
from thinsection.errors import WeightsError, naming_file, rewording
from thinsection.evaluation.cases import plain_id
from thinsection.evaluation.leaks import is_near, near_limit, sketches
from thinsection.evaluation.target import Target
from thinsection.files.atomic import parse_json
from thinsection.files.pages import render_page
from thinsection.predict.heads.config import HeadConfig
from thinsection.predict.heads.head import Head, head_for
from thinsection.predict.inputs import Inputs
from thinsection.predict.usual import Usual
from thinsection.types import MIB, Document, Floats, Reals, counted, shortened
from thinsection.weights.files import (
    MODEL_KEY,
    fill_strictly,
    read_state_dict,
    write_tensors,
)

FORMAT = 2
SUFFIX = ".safetensors"
FOLDS = (
    "folds"  # folder of an experiment with the heads of its folds, which are no models
)
MOST_LISTED = 1000  # files among which a model with a similar name is looked for
# Ways to recognise a slide or case from training: not at all, by its name or its patient's name, by
# its embeddings under another name, or approximately by its mean embedding.
Seen = Literal["", "name", "content", "near"]
USUAL_TENSORS = ("mean", "axes", "variances", "within")
MAX_HEADER = 16 * MIB
MAX_SIZES = {
    "members": 1000,
    "dim": 1 << 16,
    "outputs": 4096,
    "num_layers": 64,
    "hidden_dim": 1 << 14,
    "attention_dim": 1 << 14,
    "num_heads": 1 << 14,
    "covariates": 1000,
}


@dataclass(frozen=True, kw_only=True)
class Member:
    """Head in the ensemble."""

    # divisor of its logits (Guo et al. 2017), fitted on inner folds
    temperature: float = 1.0
    # marks of training cases and slides that this head was not trained on: of their names
    # (`case_mark`) and of their embeddings (`content_mark`)
    held_out: tuple[str, ...] = ()
    # target with centre, spread and edges of its training cases; None: the card's target
    target: Target | None = None


@dataclass(frozen=True, kw_only=True)
class Lock:
    """Figures that training has fixed, by which new cases are judged; see `locking.lock_of`."""

    # output -> predicted probability from which a case counts as positive; for two classes only
    # the positive one
    thresholds: dict[str, float] = field(default_factory=dict)
    inner_cases: int = 0  # number of cases on which the thresholds were chosen
    risk_cut: float | None = None  # risks above it are high
    horizons: tuple[float, ...] = ()  # times at which survival is scored
    # only for 'cox': times of events, and the cumulative baseline hazard from each time on
    times: tuple[float, ...] = ()
    hazard: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """Header of a model file, as plain values."""

    name: str
    head: HeadConfig
    target: Target
    inputs: Inputs
    covariates: tuple[str, ...] = ()  # columns that a case must have beside its tiles
    members: tuple[Member, ...]
    floor: float  # `floor` of `Usual`
    threshold: float
    within_floor: float = 0.0
    num_tiles: float = 1.0
    table_sha256: str = ""  # sha256 of the training table's bytes
    trained: tuple[str, ...] = ()  # marks of all training cases and slides
    # sketches of the mean embedding of each training slide
    sketches: tuple[str, ...] = ()
    lock: Lock | None = None  # None if the file comes from a version that fixed nothing
    # counts of cases, slides, and so on, for the card
    data: Document = field(default_factory=dict)
    scores: Document = field(default_factory=dict)  # metric -> number or text
    versions: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True, repr=False)
class Model:
    """Model in memory."""

    card: ModelCard
    heads: tuple[Head, ...]  # same order as `card.members`
    usual: Usual

    def __repr__(self) -> str:
        card = self.card
        inputs = card.inputs
        return (
            f"Model({card.name!r}: {card.head.head} for {shortened(card.target.names)}, "
            f"{counted(len(self.heads), 'member')}, tiles of {inputs.encoder}, {inputs.dim}-d)"
        )

    def answers(self, logits: Reals, members: Sequence[int]) -> Floats:
        """Calibrated predictions (M, K) from some members' logits (M, K); see `Target.answers`."""
        answers = []
        for row, i in zip(logits, members, strict=True):
            member = self.card.members[i]
            target = member.target or self.card.target
            answers.append(target.answers(row[None] / member.temperature)[0])
        return np.stack(answers)

    def asked(self, marks: Collection[str]) -> list[int]:
        """Members that predict a case or slide; for training cases, those not trained on it."""
        members = enumerate(self.card.members)
        unseen = [i for i, member in members if {*marks} & {*member.held_out}]
        return unseen or list(range(len(self.heads)))

    @cached_property
    def near_limit(self) -> int:
        """See `leaks.near_limit`."""
        return near_limit(self.card.sketches)

    def seen_as(
        self,
        names: Collection[str],
        contents: Collection[str],
        means: Reals,
    ) -> Seen:
        """Way in which a slide or case is recognised from training.

        Args:
            names: marks from its names.
            contents: marks from the embeddings of its slides.
            means: mean embedding of each of its slides (S, D).
        """
        marks = {*self.card.trained}
        for member in self.card.members:
            marks |= {*member.held_out}
        if marks & {*names}:
            return "name"
        if marks & {*contents}:
            return "content"
        own = sketches(means, self.usual.center)
        trained = self.card.sketches
        if any(is_near(sketch, trained, self.near_limit) for sketch in own):
            return "near"
        return ""

    def seen_warnings(self, seen: Seen, marks: Collection[str]) -> list[str]:
        """Messages for the user if a slide or case is recognised from training.

        Args:
            seen: see `seen_as`.
            marks: marks from its names and its embeddings.
        """
        if not seen:
            return []
        if seen == "near":
            return [
                "nearly the mean embedding of a training slide: if it shows the same tissue, "
                "this prediction does not test the model"
            ]
        what = "part of the training study"
        if seen == "content":
            what = "the embeddings of a training slide with another name"
        if any({*marks} & {*member.held_out} for member in self.card.members):
            return [
                f"{what}: predicted by the models of folds that did not train on it"
            ]
        return [
            f"{what}: the models of all folds were trained on it, so this prediction does not "
            "test the model"
        ]


def case_mark(case_id: str) -> str:
    """Mark of a training case in the header: a hash, so that the file has no patient names."""
    return hashlib.sha256(case_id.encode()).hexdigest()[:16]


def name_marks(*names: str) -> list[str]:
    """Marks of ids, as written, and without spaces, capitals and leading zeros."""
    forms = []
    for name in filter(None, names):
        forms += [name, plain_id(name)]
    return [case_mark(form) for form in dict.fromkeys(forms)]


def content_mark(digest: str) -> str:
    """Mark of the embeddings of a training slide in the header."""
    return f"c{digest[:16]}"


def versions() -> dict[str, str]:
    """Versions of the packages that compute results."""
    return {
        "thinsection": thinsection.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def save_model(path: Path, model: Model) -> None:
    """Writes the model atomically; the same model gives the same bytes."""
    tensors = {
        name: tensor.cpu().contiguous()
        for name, tensor in nn.ModuleList(model.heads).state_dict().items()
    }
    for name in USUAL_TENSORS:
        array = torch.from_numpy(getattr(model.usual, name))
        tensors[name] = array.float().contiguous()
    header = json.dumps(as_mapping(model.card), allow_nan=False, sort_keys=True)
    write_tensors(path, tensors, {MODEL_KEY: header})


def check_model_exists(path: Path) -> None:
    """Raises WeightsError: there is no such file; the message has the nearest model's path."""
    if path.is_file():
        return
    home = path.parent
    while not home.is_dir():
        home = home.parent
    found = [
        file
        for pattern in ("*.safetensors", "*/*.safetensors", "*/*/*.safetensors")
        for file in islice(home.glob(pattern), MOST_LISTED)
        if file.parent.name != FOLDS
    ]
    near = difflib.get_close_matches(str(path), map(str, found), n=1, cutoff=0)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise WeightsError(f"model must be an existing file, got {str(path)!r}{hint}")


def read_card(path: Path) -> ModelCard:
    """Reads the header of a model file and checks every field; no tensor is read.

    Raises WeightsError: not a model, or a number is out of bounds. ConfigError: a field is wrong.
    """
    header = _read_header(path)
    with naming_file(path):
        if header.get("format") != FORMAT:
            raise WeightsError(
                f"format must be {FORMAT}, got {header.get('format')!r}; update thinsection"
            )
        card = from_mapping(ModelCard, header, where="model.")
        sizes = {
            "members": len(card.members),
            "dim": card.inputs.dim,
            "outputs": len(card.target.names),
            "num_layers": card.head.num_layers,
            "hidden_dim": card.head.hidden_dim,
            "attention_dim": card.head.attention_dim,
            "num_heads": card.head.num_heads,
            "covariates": len(card.covariates),
        }
        for name, most in MAX_SIZES.items():
            least = 0 if name in ("hidden_dim", "covariates") else 1
            if not least <= sizes[name] <= most:
                raise WeightsError(f"{name} must be in 1..{most}, got {sizes[name]}")
        target = card.target
        if target.positive and target.positive not in target.names:
            raise WeightsError(
                f"positive must be one of {', '.join(target.names)}, got {target.positive!r}"
            )
        above_0 = (
            all(member.temperature > 0 for member in card.members) and card.floor > 0
        )
        if not (above_0 and card.within_floor >= 0 and card.num_tiles >= 1):
            temperatures = [member.temperature for member in card.members]
            raise WeightsError(
                "temperatures and floor must be > 0, within_floor >= 0 and num_tiles >= 1, got "
                f"{temperatures}, {card.floor}, {card.within_floor} and {card.num_tiles} in the "
                "model; copy the file again, or train again"
            )
        if card.lock is not None:
            _check_lock(card.lock)
        return card


def _read_header(path: Path) -> Document:
    """Card as JSON values. Raises WeightsError: the file is not a model."""
    check_model_exists(path)
    rule = "model must be a file of `thinsection train`"
    errors = (OSError, ValueError, KeyError, TypeError, RecursionError, AttributeError)
    with rewording(rule, path, *errors, error=WeightsError), path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > min(MAX_HEADER, path.stat().st_size):
            raise WeightsError(f"{rule}, got {str(path)!r}, which has another format")
        metadata = parse_json(file.read(size))["__metadata__"]
        header: Document = parse_json(metadata[MODEL_KEY])
        header.get("format")  # raises AttributeError if it is not an object
    return header


def _check_lock(lock: Lock) -> None:
    """Raises WeightsError: thresholds are not probabilities, or the hazard is not valid."""
    if not all(0 <= threshold <= 1 for threshold in lock.thresholds.values()):
        raise WeightsError(f"thresholds must be in 0..1, got {lock.thresholds}")
    rising = all(np.all(np.diff(v) >= 0) for v in (lock.times, lock.hazard))
    paired = len(lock.times) == len(lock.hazard)
    if not rising or not paired or min(lock.hazard, default=0) < 0:
        raise WeightsError(
            f"baseline hazard must rise over its times, got {len(lock.hazard)} values at "
            f"{len(lock.times)} times"
        )


def load_model(path: str | Path) -> Model:
    """Loads the model of a file, whose tensors must be exactly those of its heads.

    Memory: the size of the file, twice while it is read. Raises: as for `read_card`.
    """
    card = read_card(Path(path))
    state = read_state_dict(path)
    if not all(bool(value.isfinite().all()) for value in state.values()):
        raise WeightsError(f"tensors of a model must be finite, got {str(path)!r}")
    dim = card.inputs.dim
    arrays = {
        name: state.pop(name, torch.empty(0)).double().numpy() for name in USUAL_TENSORS
    }
    rank = len(arrays["within"])
    shapes = [array.shape for array in arrays.values()]
    if shapes != [(dim,), (rank, dim), (rank,), (rank,)]:
        raise WeightsError(
            f"{', '.join(USUAL_TENSORS)} must have matching shapes, got {shapes}"
        )
    with torch.device("meta"):
        heads = [
            head_for(card.head, dim, card.target, len(card.covariates))
            for _ in card.members
        ]
    fill_strictly(
        nn.ModuleList(heads).eval().requires_grad_(False), state, source=str(path)
    )
    usual = Usual(
        mean=arrays["mean"],
        axes=arrays["axes"],
        variances=arrays["variances"],
        floor=card.floor,
        threshold=card.threshold,
        within=arrays["within"],
        within_floor=card.within_floor,
        num_tiles=card.num_tiles,
    )
    return Model(card=card, heads=tuple(heads), usual=usual)


def card_markdown(card: ModelCard) -> str:
    """Model card: intended use, data, figures, limits; only printable characters."""
    text = render_page(
        "thinsection.predict", "card.md.j2", card=card, inputs=card.inputs
    )
    return "".join(c for c in text if c.isprintable() or c == "\n") + "\n"
