"""Predictions of a model for one bag after another; a bag has a slide, or all slides of a case.

OUT/predictions_MODEL/ID.json    the prediction, and a key of model and files, to resume
GRID/heatmap_MODEL/ID.h5         if requested: attention and contribution to each score, per tile
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from thinsection.config import from_mapping
from thinsection.errors import (
    BudgetError,
    InvalidInputError,
    StoreError,
    slide_boundary,
)
from thinsection.evaluation.embeddings import open_embeddings
from thinsection.evaluation.leaks import content_digest
from thinsection.evaluation.target import Target
from thinsection.files.atomic import read_json, write_json
from thinsection.jobs.task import OnEvent, Report, Task
from thinsection.predict.bags import Stored, StoredBag
from thinsection.predict.inputs import check_inputs, read_inputs
from thinsection.predict.model_file import (
    Model,
    Seen,
    case_mark,
    content_mark,
    load_model,
    name_marks,
)
from thinsection.predict.outputs import outputs_of, reads_whole
from thinsection.run.task import set_threads
from thinsection.stages.tiles import write_columns
from thinsection.store.hdf5 import open_h5, read_values
from thinsection.store.ledger import stage_key
from thinsection.store.tile_tables import EmbeddingRows
from thinsection.types import Floats, Reals, format_bytes
from thinsection.weights.origin import slug
from thinsection.weights.placement import resolve_device

FORMAT = 3  # format of ID.json
MODEL_ATTRIBUTE = "heatmap_model"  # attribute of ID.h5: SHA-256 of the model's file
# start of a warning; stored predictions of earlier versions go on with "set"
UNLIKE = "unlike the training"

TileColumns = dict[str, Reals]  # (N,) each


@dataclass(frozen=True)
class Prediction:
    """Prediction of a model for one bag, as plain values."""

    level: Literal["slide", "case"]
    name: str
    case_id: str
    files: tuple[str, ...] = ()  # files of embeddings, absolute
    answers: tuple[float, ...] = ()  # see `Target.answers`; () if there are none
    # standard deviation over members; () for fewer than two
    spread: tuple[float, ...] = ()
    # members that predicted; for a training case, only those that were not trained on it
    members: tuple[int, ...] = ()
    distance: float | None = None  # distance of the mean embedding, see `Usual`
    warnings: tuple[str, ...] = ()
    error: str = ""
    patient_id: str = ""  # '' if not known
    seen: Seen = ""
    # numbers of the case in the columns of the model's card; None where it has none
    covariates: tuple[float | None, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PredictTask(Task[Prediction, Prediction]):
    """See `Task`: predicts some bags in one process, which loads the model once."""

    kind: ClassVar[str] = "predict"
    entry_type: ClassVar[type[Prediction]] = Prediction
    result_type: ClassVar[type[Prediction]] = Prediction
    streams: ClassVar[bool] = True

    model: Path
    model_sum: str
    folder: Path  # OUT/predictions_MODEL
    device: str
    budget_bytes: int  # memory for a bag that its head reads whole
    heatmaps: Path | None = None  # GRID/heatmap_MODEL; None writes none

    def __call__(
        self, entries: Sequence[Prediction], *, on_event: OnEvent
    ) -> Report[Prediction]:
        """See `Task.__call__`; a bad file gives a prediction with an error.

        Memory: see `through`.
        """
        set_threads(self.threads, torch_too=True)
        model = load_model(self.model)
        predictions = []
        for entry in entries:
            reasons: dict[str, str] = {}
            with slide_boundary(entry.name, reasons.__setitem__):
                predictions.append(self.finished(entry) or self._answer(model, entry))
            predictions += [self.lost(entry, why) for why in reasons.values()]
        return Report(results=tuple(predictions))

    def lost(self, entry: Prediction, reason: str) -> Prediction:
        """See `Task.lost`."""
        return replace(entry, error=reason)

    def name(self, entry: Prediction) -> str:
        """See `Task.name`; also of its file, as a case's name may be no valid file name."""
        if entry.level == "slide":
            return entry.name
        return f"case-{case_mark(entry.name)}"

    def finished(self, entry: Prediction) -> Prediction | None:
        """See `Task.finished`; the prediction must come from the same model and files."""
        try:
            document = read_json(self.folder / f"{self.name(entry)}.json")
            if document.pop("key") != self._key(entry):
                return None
            if self._draws(entry):
                # another model may have the same name
                with open_h5(self._heatmap(entry)) as file:
                    if file.attrs.get(MODEL_ATTRIBUTE) != self.model_sum:
                        return None
            return from_mapping(Prediction, document)
        except (OSError, ValueError, KeyError):
            return None

    def with_earlier_covariates(self, entry: Prediction) -> Prediction:
        """An entry without covariates gets those of its earlier prediction if that still holds."""
        if all(value is None for value in entry.covariates):
            with suppress(OSError, ValueError, KeyError):
                document = read_json(self.folder / f"{self.name(entry)}.json")
                values = tuple(document["covariates"])
                earlier = replace(entry, covariates=values)
                if self.finished(earlier) is not None:
                    return earlier
        return entry

    def _draws(self, entry: Prediction) -> bool:
        """True if the entry gets a heatmap."""
        return self.heatmaps is not None and entry.level == "slide"

    def _heatmap(self, entry: Prediction) -> Path:
        assert self.heatmaps is not None
        return self.heatmaps / f"{entry.name}.h5"

    def _key(self, entry: Prediction) -> str:
        """Hash of all that decides a prediction: the model, the names and the files."""
        files = []
        for path in entry.files:
            stat = Path(path).stat()
            files.append((path, stat.st_size, stat.st_mtime_ns))
        return stage_key(
            format=FORMAT,
            model=self.model_sum,
            case=entry.case_id,
            patient=entry.patient_id,
            files=files,
            covariates=entry.covariates,
        )

    def _answer(self, model: Model, entry: Prediction) -> Prediction:
        """Makes the prediction of the model, and writes it."""
        key = self._key(entry)
        paths = [Path(path) for path in entry.files]
        slides, left_out = _open_slides(model, paths)
        paths = [path for path in paths if path.stem not in left_out]
        bag = StoredBag(slides, paths)
        contents = [content_mark(content_digest(tiles)) for tiles in slides]
        means = np.stack(
            [
                StoredBag([tiles], [path]).mean()
                for tiles, path in zip(slides, paths, strict=True)
            ]
        )
        stems = [path.stem for path in paths]
        names = name_marks(entry.name, entry.case_id, entry.patient_id, *stems)
        marks = [*names, *contents]
        members = model.asked(marks)
        seen = model.seen_as(names, contents, means)
        warnings = model.seen_warnings(seen, marks)
        logits, columns = through(
            model,
            members,
            bag,
            self.device,
            tiles=self._draws(entry),
            budget_bytes=self.budget_bytes,
            covariates=_covariates(model, entry),
        )
        missing = [
            column
            for column, value in zip(
                model.card.covariates, entry.covariates, strict=True
            )
            if value is None
        ]
        if missing:
            warnings.append(
                f"without {', '.join(missing)}: the mean of the training cases is used"
            )
        answers = model.answers(logits, members)
        warnings += [
            f"without the slide {slide!r}: {why}" for slide, why in left_out.items()
        ]
        mean = means[0] if len(means) == 1 else bag.mean()
        distance = model.usual.distance(mean, len(bag))
        threshold = model.card.threshold
        if distance > threshold:
            warnings.append(
                f"{UNLIKE} cases (distance {distance:.4g}, threshold {threshold:.4g})"
            )
        if self._draws(entry):
            _write_heatmap(self._heatmap(entry), paths[0], columns, self.model_sum)
        prediction = replace(
            entry,
            answers=tuple(answers.mean(0).tolist()),
            spread=tuple(answers.std(0).tolist()) if len(members) > 1 else (),
            members=tuple(members),
            distance=distance,
            warnings=tuple(warnings),
            seen=seen,
        )
        document = asdict(prediction) | {"key": key}
        write_json(self.folder / f"{self.name(entry)}.json", document)
        return prediction


def _covariates(model: Model, entry: Prediction) -> Tensor | None:
    """Covariates (C,) of an entry, NaN for none; None for a model without.

    Raises InvalidInputError: another number of them than the model has columns.
    """
    columns = model.card.covariates
    if len(entry.covariates) != len(columns):
        raise InvalidInputError(
            f"covariates must be {', '.join(columns) or 'none'} for this model, got "
            f"{len(entry.covariates)} values for {entry.name!r}; predict with the table that has "
            "them"
        )
    if not columns:
        return None
    return torch.tensor(
        [math.nan if value is None else value for value in entry.covariates],
        dtype=torch.float32,
    )


def _open_slides(
    model: Model, paths: Sequence[Path]
) -> tuple[list[Stored], dict[str, str]]:
    """Embeddings of the slides of a bag, and the reasons why some slides are left out.

    Raises StoreError: none of the slides can be used.
    """
    slides: list[Stored] = []
    left_out: dict[str, str] = {}

    def read(path: Path) -> None:
        check_inputs(model.card.inputs, read_inputs(path), path.stem)
        tiles = open_embeddings(path)
        if isinstance(tiles, EmbeddingRows):
            tiles.check()
        slides.append(tiles)

    if len(paths) == 1:
        read(paths[0])
        return slides, left_out
    for path in paths:
        with slide_boundary(path.stem, left_out.__setitem__):
            read(path)
    if not slides:
        reasons = "; ".join(f"{slide}: {why}" for slide, why in left_out.items())
        raise StoreError(f"a case must have a slide that can be used, got {reasons}")
    return slides, left_out


def _write_heatmap(
    path: Path, embeddings: Path, columns: TileColumns, model_sum: str
) -> None:
    """Writes a per-tile table with the coordinates of the tiles and the model's SHA-256."""
    with open_h5(embeddings) as file:
        coords = read_values(file, "coords", embeddings)
        attributes = {
            name: value
            for name, value in file["coords"].attrs.items()
            if not name.startswith("thinsection_")
        }
    attributes[MODEL_ATTRIBUTE] = model_sum
    stored = {name: values.astype(np.float32) for name, values in columns.items()}
    write_columns(path, coords, stored, attributes)


def score_column(name: str) -> str:
    """Column with the score of a class or an output."""
    return f"score_{slug(name)}"


@torch.inference_mode()
def through(
    model: Model,
    members: Sequence[int],
    bag: StoredBag,
    device: str,
    *,
    tiles: bool,
    budget_bytes: int,
    covariates: Tensor | None = None,
) -> tuple[Floats, TileColumns]:
    """Logits (M, K) of some members, and per-tile columns (mean over members).

    `attention` is the mean over a head's attentions. `score_NAME` is the contribution of the tile
    to the prediction, at the member's temperature. It refers to the log-odds of NAME for two
    classes, to the logit of NAME minus the mean logit of the others for more classes, to the one
    score of ordered classes, and else to the logit itself. A head whose logits are not a sum over
    tiles has only attention.

    `covariates` (C,) are the numbers of the case that the model needs beside its tiles.

    Memory: the model. A head that reads blocks: four blocks of BLOCK_ROWS x D values, and for each
    member 4 N (A + K) bytes (abmil, clam), 4 N K (linear) or 4 N (K + K²) (dsmil). mlp: a block, as
    it needs the mean alone. Another head (transmil, transformer): the bag, 4 N D bytes of at most
    `budget_bytes`, and its own memory (`Head.forward`).

    Raises:
        InvalidInputError: `tiles` for a head with neither attention nor evidence.
        BudgetError: the bag must be read whole and is larger than `budget_bytes`.
    """
    target = model.card.target
    logits = []
    sums: TileColumns = {}
    torch_device = resolve_device(device, mps=False)
    if covariates is not None:
        covariates = covariates.to(torch_device)
    heads = {member: model.heads[member].to(torch_device) for member in members}
    if bag.num_bytes > budget_bytes and any(map(reads_whole, heads.values())):
        raise BudgetError(
            f"memory must be >= {format_bytes(bag.num_bytes)} for {len(bag)} tiles, which head "
            f"{model.card.head.head!r} reads at once, got {format_bytes(budget_bytes)}; raise "
            "memory=..., or train head 'abmil', which reads tiles in blocks"
        )
    for member, output in outputs_of(heads, bag, torch_device, covariates=covariates):
        logits.append(output.logits.double().cpu().numpy())
        if not tiles:
            continue
        if output.attention is None:
            raise InvalidInputError(
                f"head {model.card.head.head!r} must have attention for heatmaps, got a head "
                "without; train another head, for example abmil"
            )
        columns = {"attention": output.attention.mean(1).cpu().numpy()}
        if output.evidence is not None:
            temperature = model.card.members[member].temperature
            scores = tile_scores(output.evidence.cpu().numpy() / temperature, target)
            for name, values in zip(target.score_names, scores.T, strict=True):
                columns[score_column(name)] = values
        for name, values in columns.items():
            sums[name] = sums.get(name, 0) + values
    means: TileColumns = {name: values / len(members) for name, values in sums.items()}
    return np.stack(logits), means


def tile_scores(evidence: Reals, target: Target) -> Reals:
    """Scores (N, K) of tiles from their evidence (N, K), see `through`.

    If classes without an order exclude each other, the mean evidence for the other classes is
    subtracted.
    """
    if not target.exclusive or target.kind == "ordinal":
        return evidence
    num_classes = evidence.shape[1]
    others = (evidence.sum(axis=1, keepdims=True) - evidence) / (num_classes - 1)
    return np.asarray(evidence - others)
