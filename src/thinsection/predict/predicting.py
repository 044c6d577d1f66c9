"""From slides, or from embeddings that are there, to a prediction per slide and per case.

OUT/predictions_MODEL.csv        a row per slide, and per case of several slides
OUT/predictions_MODEL/ID.json    what the row says, and a key of model and files: for a resume
OUT/validation_MODEL/            asked for with labels, see `validation`
GRID/heatmap_MODEL/ID.h5         asked for: attention and contribution to each score, per tile
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch

from thinsection.config import as_mapping, from_mapping, option, replace_flat, section
from thinsection.errors import (
    ConfigError,
    InvalidInputError,
    OutputError,
    StoreError,
    require,
    rewording,
)
from thinsection.evaluation.cases import group_rows
from thinsection.evaluation.embeddings import (
    EMBEDDING_SUFFIXES,
    Found,
    feature_files,
    open_embeddings,
)
from thinsection.evaluation.labels import (
    Cohort,
    LabelsConfig,
    Target,
    join_labels,
    known_patients,
)
from thinsection.evaluation.leaks import content_digest
from thinsection.files.atomic import read_table, write_json, write_table, writing
from thinsection.files.json_text import read_json
from thinsection.jobs.contract import OnEvent, Report, Task
from thinsection.jobs.execute import execute
from thinsection.jobs.executor import ExecutorConfig
from thinsection.pipeline.folder import Results, open_results
from thinsection.pipeline.records import recording
from thinsection.pipeline.results import grid_rows, known_slides, qc_rows, qc_stage
from thinsection.pipeline.run import run
from thinsection.pipeline.task import set_threads
from thinsection.predict import model_file
from thinsection.predict.bags import Bag, Bags
from thinsection.predict.model_file import Inputs, Model, ModelCard, Seen
from thinsection.predict.validation import Answered, Locked, write_validation
from thinsection.report.index import write_index
from thinsection.report.verdict import GOOD, load_rules, verdict
from thinsection.stages.tiles import write_columns
from thinsection.store.identity import file_sum
from thinsection.store.ledger import SLIDES, stage_key
from thinsection.store.tiles_h5 import open_h5
from thinsection.stream.tile_stream import StreamConfig
from thinsection.weights.origin import slug
from thinsection.weights.placement import resolve_device

FORMAT = 2  # of ID.json


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictConfig:
    """How a model is asked."""

    device: str = option(
        "auto", "auto, cpu, cuda or cuda:1; of the head, and of the encoder"
    )
    features: str | None = option(
        None, "embeddings, where RESULTS has several: GRID/features_NAME"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationConfig:
    """Labels of new cases, that the locked model is tested on."""

    labels: Path | None = option(
        None,
        "CSV, TSV or Parquet with slide_id or case_id and the truth of new cases: "
        "also writes validation_MODEL/index.html",
    )
    target: tuple[str, ...] = option(
        (), "column of the truth; none: named as in training; repeat for several labels"
    )
    time: str | None = option(
        None, "column of the time to the event or the end; none: named as in training"
    )


@dataclass(frozen=True, kw_only=True)
class PredictRunConfig:
    """All settings of `thinsection predict`, by section; what a model was trained on it says."""

    predict: PredictConfig = section(PredictConfig)
    validation: ValidationConfig = section(ValidationConfig)
    stream: StreamConfig = section(StreamConfig)
    executor: ExecutorConfig = section(ExecutorConfig)


@dataclass(frozen=True)
class Prediction:
    """What a model says of a bag: a slide, or all slides of a case. Plain values."""

    level: Literal["slide", "case"]
    name: str
    case_id: str
    files: tuple[str, ...] = ()  # of embeddings, absolute
    answers: tuple[float, ...] = ()  # see `Target.answers`; () where there are none
    spread: tuple[
        float, ...
    ] = ()  # standard deviation over members; () for fewer than two
    members: int = 0  # that were asked: of a training case those that have not seen it
    distance: float | None = None  # of the mean embedding, see `Usual`
    warnings: tuple[str, ...] = ()
    error: str = ""
    patient_id: str = ""  # '': not known
    seen: Seen = ""


class Predictions(NamedTuple):
    """What `predict` left."""

    table: Path
    results: Path  # the folder with the embeddings
    address: str  # of these
    rows: list[Prediction]
    validation: dict[str, Any] | None = None  # what validation.json holds
    page: Path | None = None  # of the validation


@dataclass(frozen=True, kw_only=True)
class PredictTask(Task[Prediction, Prediction]):
    """See `Task`: some bags in one process, which loads the model once."""

    kind: ClassVar[str] = "predict"
    entry_type: ClassVar[type[Any]] = Prediction
    result_type: ClassVar[type[Any]] = Prediction
    streams: ClassVar[bool] = True

    model: Path
    model_sum: str
    folder: Path  # OUT/predictions_MODEL
    device: str
    heatmaps: bool = False

    def __call__(
        self, entries: Sequence[Prediction], *, on_event: OnEvent
    ) -> Report[Prediction]:
        """See `Task.__call__`; a bad file is a prediction with an error.

        Memory: the model, and one bag: its embeddings, and what the head takes (`Head.forward`).
        """
        set_threads(self.threads, torch_too=True)
        model, found = model_file.load_model(self.model), []
        for entry in entries:
            try:
                found.append(self.finished(entry) or self._answer(model, entry))
            except OutputError:
                raise
            except Exception as error:  # noqa: BLE001 - the per-slide boundary
                found.append(self.lost(entry, f"{type(error).__name__}: {error}"))
        return Report(results=tuple(found))

    def lost(self, entry: Prediction, reason: str) -> Prediction:
        """See `Task.lost`."""
        return replace(entry, error=reason)

    def name(self, entry: Prediction) -> str:
        """See `Task.name`: also of its file; a case's name may be no file's."""
        return (
            entry.name
            if entry.level == "slide"
            else f"case-{model_file.case_mark(entry.name)}"
        )

    def finished(self, entry: Prediction) -> Prediction | None:
        """See `Task.finished`: by the same model, of the same files."""
        try:
            told = read_json(self.folder / f"{self.name(entry)}.json")
            same = told.pop("key") == self._key(entry)
            drawn = (
                not self.heatmaps
                or entry.level == "case"
                or self._heatmap(entry).is_file()
            )
            return from_mapping(Prediction, told) if same and drawn else None
        except (OSError, ValueError, KeyError):
            return None

    def _heatmap(self, entry: Prediction) -> Path:
        folder = self.folder.name.replace("predictions", "heatmap")
        return Path(entry.files[0]).parent.parent / folder / f"{entry.name}.h5"

    def _key(self, entry: Prediction) -> str:
        stats = [
            (path, (s := Path(path).stat()).st_size, s.st_mtime_ns)
            for path in entry.files
        ]
        return stage_key(
            format=FORMAT,
            model=self.model_sum,
            case=entry.case_id,
            patient=entry.patient_id,
            files=stats,
        )

    def _answer(self, model: Model, entry: Prediction) -> Prediction:
        paths, key, card = (
            [Path(path) for path in entry.files],
            self._key(entry),
            model.card,
        )
        for path in paths:
            model_file.check_inputs(
                card.inputs, model_file.read_inputs(path), path.stem
            )
        with Bags([paths], cells=model.heads[0].needs_cells) as bags:
            bag = bags.read(0)
        stems = [path.stem for path in paths]
        names = model_file.name_marks(
            entry.name, entry.case_id, entry.patient_id, *stems
        )
        contents = []
        means = []
        for path in paths:
            tiles_of_slide = open_embeddings(path)[:]
            contents.append(model_file.content_mark(content_digest(tiles_of_slide)))
            means.append(tiles_of_slide.mean(axis=0, dtype=np.float64))
        mean = bag.features.mean(0, dtype=np.float64)
        members = model.asked([*names, *contents])
        seen = model.seen_as(names, contents, np.stack(means))
        warnings = model.seen_warnings(seen, [*names, *contents])
        logits, tiles = through(model, members, bag, self.device, tiles=self.heatmaps)
        answers = model.answers(logits, members)
        distance = model.usual.distance(mean, len(bag.features))
        if distance > card.threshold:
            than = f"distance {distance:.4g}, threshold {card.threshold:.4g}"
            warnings.append(f"unlike the training set ({than})")
        spread = answers.std(0).tolist() if len(members) > 1 else ()
        told: dict[str, Any] = {
            "answers": tuple(answers.mean(0).tolist()),
            "spread": tuple(spread),
        }
        told |= {
            "members": len(members),
            "distance": distance,
            "warnings": tuple(warnings),
            "seen": seen,
        }
        if self.heatmaps and entry.level == "slide":
            with open_h5(paths[0]) as file:
                coords, said = file["coords"][:], dict(file["coords"].attrs)
            said = {k: v for k, v in said.items() if not k.startswith("thinsection_")}
            columns = {
                name: values.astype(np.float32) for name, values in tiles.items()
            }
            write_columns(self._heatmap(entry), coords, columns, said)
        found = replace(entry, **told)
        write_json(
            self.folder / f"{self.name(entry)}.json", asdict(found) | {"key": key}
        )
        return found


@torch.inference_mode()
def through(
    model: Model, members: Sequence[int], bag: Bag, device: str, *, tiles: bool
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits (M, K) of some members, and columns of the tiles (their mean over members).

    `attention` is the mean over a head's attentions. `score_NAME` is what the tile adds to the
    answer, at the member's temperature: of two classes to the log-odds of NAME, of more classes
    to the logit of NAME less the mean logit of the others, else to the logit itself. A head whose
    logits are no sum over tiles has attention alone.

    Raises InvalidInputError: `tiles` of a head that has neither attention nor evidence.
    """
    target = model.card.target
    where = resolve_device(device, mps=False)
    inputs = [
        None if part is None else torch.from_numpy(part).to(where) for part in bag
    ]
    logits = []
    sums: dict[str, np.ndarray] = {}
    for member in members:
        output = model.heads[member].to(where)(*inputs)
        logits.append(output.logits.double().cpu().numpy())
        if not tiles:
            continue
        if output.attention is None:
            raise InvalidInputError(
                f"head {model.card.head.head!r} must have attention for heatmaps, got none; "
                "train another head, for example abmil"
            )
        columns = {"attention": output.attention.mean(1).cpu().numpy()}
        if output.evidence is not None:
            evidence = output.evidence.cpu().numpy()
            scores = tile_scores(
                evidence / model.card.members[member].temperature, target
            )
            columns |= {
                f"score_{slug(name)}": scores[:, k]
                for k, name in enumerate(target.names)
            }
        for name, values in columns.items():
            sums[name] = sums.get(name, 0) + values
    means = {name: values / len(members) for name, values in sums.items()}
    return np.stack(logits), means


def tile_scores(evidence: np.ndarray, target: Target) -> np.ndarray:
    """Scores (N, K) of tiles by their evidence (N, K), see `through`.

    Where classes exclude each other, the mean evidence for the other classes is taken off.
    """
    if not target.exclusive:
        return evidence
    num_classes = evidence.shape[1]
    others = (evidence.sum(axis=1, keepdims=True) - evidence) / (num_classes - 1)
    return np.asarray(evidence - others)


def predict(
    model: str | Path,
    slides: Sequence[str | Path] | str | Path,
    *,
    out: str | Path | None = None,
    config: PredictRunConfig | None = None,
    heatmaps: bool = False,
    on_event: Callable[[Any], None] = lambda event: None,
    on_message: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> Predictions:
    """A model's predictions of slides, and of their cases; what is there already is not redone.

    Args:
        model: file of `thinsection train`.
        slides: slide files, folders or cohort CSVs, which are embedded as the model says; or one
            folder with embeddings: of results, TRIDENT, CLAM, STAMP or slide2vec.
        out: results folder; None for that of the embeddings.
        config: all settings; `settings` are single ones over it: device="cuda". With
            labels="external.csv" the model is also tested on these, see `validation`.
        heatmaps: also write `GRID/heatmap_MODEL/ID.h5`.

    Memory: of the run, then in each worker one bag, 4 N D bytes, and what the head takes.

    Raises:
        InvalidInputError: embeddings of another encoder, commit, tile_px, tile_mpp, ...
        ThinsectionError: bad settings, no model, no slides. A bad slide is a row with its error.
    """
    config = replace_flat(config or PredictRunConfig(), settings)
    model, card = Path(model).absolute(), model_file.read_card(Path(model))
    labels = _labels_config(config.validation, card.target)
    given = [slides] if isinstance(slides, str | Path) else list(slides)
    data, wanted = Path(given[0]).absolute(), None
    name = f"predictions_{slug(card.name)}"
    if len(given) > 1 or not _has_embeddings(data):
        require(out is not None, "out must be given with slides", None)
        data = Path(str(out)).absolute()
        told: dict[str, Any] = {"on_event": on_event, "on_message": on_message}
        wanted = _embed(given, card, config, out=str(out), **told)
    home = Path(out).absolute() if out else data
    table = home / f"{name}.csv"
    kept = None if wanted is None else wanted | _slides_in_table(table)
    files, lacking, address = _embeddings(
        data, card.inputs, config.predict.features, kept
    )
    results = open_results(data) if (data / SLIDES).is_dir() else None
    owners = known_patients(data)
    cohort = None
    if labels is not None:
        tested = {s: f for s, f in files.items() if wanted is None or s in wanted}
        cohort = join_labels((tested, lacking, address), owners, labels, card.target)
    entries = list(_bags(files, owners, cohort))
    asked: dict[str, Any] = {"device": config.predict.device, "heatmaps": heatmaps}
    task = PredictTask(
        model=model, model_sum=file_sum(model), folder=home / name, **asked
    )
    plain = replace(task, heatmaps=False)
    done: dict[str, Prediction] = {}
    for entry in entries:  # asked about earlier, and not now: no heatmap is due
        if wanted is not None and entry.level == "slide" and entry.name not in wanted:
            found = plain.finished(entry)
            done |= {} if found is None else {task.name(entry): found}

    def take(report: Report[Prediction]) -> None:
        done.update({task.name(row): row for row in report.results})

    command = "heatmap" if heatmaps else "predict"
    settings = as_mapping(config) | {"model": str(model)}
    waiting = [entry for entry in entries if task.name(entry) not in done]
    with writing(home), recording(home, command, settings) as record:
        execute(
            waiting,
            task,
            config.executor,
            folder=record.folder,
            on_report=take,
            on_message=on_message,
        )
        answered = [entry for entry in waiting if done[task.name(entry)].answers]
        record.counts["predicted"] = len(answered)
        record.counts["failed"] = len(waiting) - len(answered)
    rows = [done[task.name(entry)] for entry in entries]
    rows += [
        Prediction("slide", s, "", error=lacking[s]) for s in lacking if s not in files
    ]
    said = (
        _slide_warnings(results, address.split("/")[0], card.inputs) if results else {}
    )
    rows = [replace(r, warnings=(*r.warnings, *said.get(r.name, ()))) for r in rows]
    elsewhere = _rows_of_other_data(plain, rows) if home != data else []
    lines = [_line(row, card.target) for row in (*rows, *elsewhere)]
    write_table(table, lines)
    validated = None
    page = None
    if cohort is not None and labels is not None:
        page = home / f"validation_{slug(card.name)}" / "index.html"
        validated = write_validation(
            page.parent,
            Locked(card=card, file=model.name, sha256=task.model_sum),
            cohort,
            _answered(rows, cohort),
            table=Path(labels.labels or ""),
        )
    if results and home == data:
        write_index(home)
    if wanted is not None:
        asked_files = {str(files[slide]) for slide in wanted if slide in files}
        rows = [r for r in rows if r.name in wanted or asked_files & {*r.files}]
    return Predictions(table, data, address, rows, validated, page)


def _slides_in_table(table: Path) -> set[str]:
    """The slides that were asked about before: their rows stay."""
    if not table.is_file():
        return set()
    with rewording("table must be a UTF-8 CSV", table, ValueError, error=StoreError):
        return {row["slide_id"] for row in read_table(table) if row.get("slide_id")}


def _rows_of_other_data(
    task: PredictTask, rows: Sequence[Prediction]
) -> list[Prediction]:
    """What the same model said earlier, in the same folder, of embeddings that lie elsewhere."""
    names = {task.name(row) for row in rows}
    found = list[Prediction]()
    for path in sorted(task.folder.glob("*.json")):
        with suppress(OSError, ValueError, KeyError):
            document = read_json(path)
            document.pop("key")
            earlier = task.finished(from_mapping(Prediction, document))
            if earlier is not None and task.name(earlier) not in names:
                found.append(earlier)
    return found


def _labels_config(config: ValidationConfig, target: Target) -> LabelsConfig | None:
    """How labels of new cases are read, by the model's task; None: there are none.

    Raises ConfigError: columns without a table.
    """
    if config.labels is None:
        if config.target or config.time:
            got = f"{config.target or config.time} alone; pass --labels FILE too"
            raise ConfigError(f"target and time must be of labels, got {got}")
        return None
    survival = target.kind in ("cox", "discrete")
    trained = target.columns[:1] if survival else target.columns
    return LabelsConfig(
        labels=config.labels,
        target=config.target or trained,
        time=config.time or (target.columns[1] if survival else None),
        task=target.kind,
    )


def _answered(rows: Sequence[Prediction], cohort: Cohort) -> list[Answered]:
    """What the model says of each labelled case: of its one slide, or of all its slides."""
    by_files = {row.files: row for row in rows}
    answered = []
    for files in cohort.files:
        row = by_files[files]
        answered.append(
            Answered(
                answers=row.answers,
                members=row.members,
                seen=row.seen,
                warnings=row.warnings,
                error=row.error,
            )
        )
    return answered


def _embed(
    slides: Any, card: ModelCard, config: PredictRunConfig, **how: Any
) -> set[str]:
    """Embeds slides as the model says; their ids."""
    made = model_file.run_config(card.inputs, card.name)
    encode = replace(made.encode, device=config.predict.device)
    made = replace(made, encode=encode, stream=config.stream, executor=config.executor)
    stage = "aggregate" if card.inputs.level == "slide" else "embed"
    return {
        result.slide_id
        for result in run(slides, config=made, stage=stage, **how).results
    }


def _has_embeddings(folder: Path) -> bool:
    """Whether it is a folder of results, or of another's embeddings."""
    files = folder.rglob("*") if folder.is_dir() else ()
    return (folder / SLIDES).is_dir() or any(
        f.suffix in EMBEDDING_SUFFIXES for f in files
    )


def _embeddings(
    data: Path, inputs: Inputs, named: str | None, wanted: set[str] | None
) -> Found:
    """Those of the slides that are wanted (None: of all), as the model takes them.

    Raises InvalidInputError: none are; says what is wrong with those that come nearest.
    """
    known: Sequence[str | None] = [named]
    if named is None and (data / SLIDES).is_dir():
        results = open_results(data)
        known = results.slide_features if inputs.level == "slide" else results.features
    tried = []
    for address in known or [None]:
        files, lacking, place = feature_files(data, address)
        found = model_file.read_inputs(next(iter(files.values())))
        alike = sum(getattr(found, n) == value for n, value in asdict(inputs).items())
        tried.append((alike, found, place, files, lacking))
    _, found, place, files, lacking = max(tried, key=lambda one: one[0])
    model_file.check_inputs(inputs, found, next(iter(files)))
    kept = {*files, *lacking} if wanted is None else wanted
    lacking = {s: why for s, why in lacking.items() if s in kept}
    return {s: file for s, file in files.items() if s in kept}, lacking, place


def _bags(
    files: Mapping[str, Path], owners: Mapping[str, str], cohort: Cohort | None
) -> Iterator[Prediction]:
    """What is asked: each slide, then each case of several slides.

    Args:
        files: slide id -> file of embeddings.
        owners: slide id -> patient.
        cohort: labelled cases, whose slides are theirs alone; None: there are none.
    """
    patients = [owners.get(slide, "") for slide in files]
    of_row = group_rows([*files], patients, where="the results").of_row
    case_by_slide = dict(zip(files, of_row, strict=True))
    patient_by_slide = dict(owners)
    labelled = cohort.cases if cohort else ()
    labelled_cases = frozenset(labelled)
    paths: dict[str, list[str]] = {}
    if cohort:
        for i, case in enumerate(labelled):
            paths[case] = [*cohort.files[i]]
            for slide in cohort.slides[i]:
                case_by_slide[slide] = case
                patient_by_slide[slide] = cohort.patients[i]
    for slide, path in files.items():
        case = case_by_slide[slide]
        if case not in labelled_cases:
            paths.setdefault(case, []).append(str(path))
        yield Prediction(
            "slide",
            slide,
            case,
            (str(path.absolute()),),
            patient_id=patient_by_slide.get(slide, ""),
        )
    owner_of_case = dict(zip(labelled, cohort.patients, strict=True)) if cohort else {}
    for case, own in paths.items():
        if len(own) > 1:
            patient = owner_of_case.get(case, "")
            yield Prediction("case", case, case, tuple(own), patient_id=patient)


def _slide_warnings(
    results: Results, grid: str, inputs: Inputs
) -> dict[str, list[str]]:
    """What the run and quality control say of each slide."""
    told = [row for ledger in results.ledgers.values() for row in grid_rows(ledger)]
    said = {
        r["slide_id"]: [r["warnings"]]
        for r in told
        if r["grid"] == grid and r["warnings"]
    }
    config = model_file.run_config(inputs, "the model") if inputs.run else None
    if config is not None and config.qc.qc != "off":
        for row in qc_rows(known_slides(results.folder), qc_stage(config)):
            judged, words = verdict(row, load_rules(config.qc.qc_rules))
            if judged != GOOD:
                said.setdefault(str(row["slide_id"]), []).append(
                    f"QC: {judged}: {words}"
                )
    return said


def _line(row: Prediction, target: Target) -> dict[str, Any]:
    """A row of predictions_MODEL.csv."""
    slide = row.name if row.level == "slide" else ""
    line: dict[str, Any] = {
        "level": row.level,
        "case_id": row.case_id,
        "slide_id": slide,
    }
    line |= target.cells(row.answers) | target.named("sd_", row.spread)
    line |= {"members": row.members, "distance": row.distance}
    return line | {"warnings": "; ".join((*row.warnings, *filter(None, [row.error])))}
