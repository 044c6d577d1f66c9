"""From slides, or from embeddings that are there, to a prediction per slide and per case.

OUT/predictions_MODEL.csv        a row per slide, and per case of several slides
OUT/predictions_MODEL/ID.json    what the row says, and a key of model and files: for a resume
GRID/heatmap_MODEL/ID.h5         asked for: attention and contribution to each score, per tile
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch

from thinsection.config import as_mapping, from_mapping, option, replace_flat, section
from thinsection.errors import OutputError, require
from thinsection.files.atomic import write_json, write_table, writing
from thinsection.jobs.contract import OnEvent, Report, Task
from thinsection.jobs.execute import execute
from thinsection.jobs.executor import ExecutorConfig
from thinsection.pipeline.folder import Results, open_results
from thinsection.pipeline.records import begin_record
from thinsection.pipeline.results import grid_rows, qc_rows, qc_stage
from thinsection.pipeline.run import run
from thinsection.pipeline.task import set_threads
from thinsection.predict import model_file
from thinsection.predict.bags import Bag, Bags
from thinsection.predict.labels import Found, Target, feature_files
from thinsection.predict.model_file import Inputs, Model, ModelCard
from thinsection.probe.data.files import EMBEDDING_SUFFIXES
from thinsection.probe.groups import group_rows
from thinsection.report.index import write_index
from thinsection.report.verdict import GOOD, load_rules, verdict
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.tiles import write_columns
from thinsection.store.identity import file_sum
from thinsection.store.ledger import SLIDES, stage_key
from thinsection.store.tiles_h5 import open_h5
from thinsection.stream.tile_stream import StreamConfig
from thinsection.weights.origin import slug
from thinsection.weights.placement import resolve_device


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictConfig:
    """How a model is asked."""

    device: str = option("auto", "auto, cpu, cuda or cuda:1; of the head, and of the encoder")
    features: str | None = option(None, "embeddings, where RESULTS has several: GRID/features_NAME")


@dataclass(frozen=True, kw_only=True)
class PredictRunConfig:
    """All settings of `thinsection predict`, by section; what a model was trained on it says."""

    predict: PredictConfig = section(PredictConfig)
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
    spread: tuple[float, ...] = ()  # standard deviation over members; () for fewer than two
    members: int = 0  # that were asked: of a training case those that have not seen it
    distance: float | None = None  # of the mean embedding, see `Usual`
    warnings: tuple[str, ...] = ()
    error: str = ""


class Predictions(NamedTuple):
    """What `predict` left."""

    table: Path
    results: Path  # the folder with the embeddings
    address: str  # of these
    rows: list[Prediction]


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

    def __call__(self, entries: Sequence[Prediction], *, on_event: OnEvent) -> Report[Prediction]:
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
        return entry.name if entry.level == "slide" else f"case-{model_file.case_mark(entry.name)}"

    def finished(self, entry: Prediction) -> Prediction | None:
        """See `Task.finished`: by the same model, of the same files."""
        try:
            told = json.loads((self.folder / f"{self.name(entry)}.json").read_text("utf-8"))
            same = told.pop("key") == self._key(entry)
            drawn = not self.heatmaps or entry.level == "case" or self._heatmap(entry).is_file()
            return from_mapping(Prediction, told) if same and drawn else None
        except (OSError, ValueError, KeyError):
            return None

    def _heatmap(self, entry: Prediction) -> Path:
        folder = self.folder.name.replace("predictions", "heatmap")
        return Path(entry.files[0]).parent.parent / folder / f"{entry.name}.h5"

    def _key(self, entry: Prediction) -> str:
        stats = [(path, (s := Path(path).stat()).st_size, s.st_mtime_ns) for path in entry.files]
        return stage_key(model=self.model_sum, case=entry.case_id, files=stats)

    def _answer(self, model: Model, entry: Prediction) -> Prediction:
        paths, key, card = [Path(path) for path in entry.files], self._key(entry), model.card
        for path in paths:
            model_file.check_inputs(card.inputs, model_file.read_inputs(path), path.stem)
        with Bags([paths], cells=model.heads[0].needs_cells) as bags:
            bag = bags.read(0)
        members, warnings = model.asked(entry.name, entry.case_id), []
        logits, tiles = through(model, members, bag, self.device, tiles=self.heatmaps)
        answers = model.answers(logits, members)
        distance = model.usual.distance(bag.features.mean(0, dtype=np.float64))
        if distance > card.threshold:
            than = f"distance {distance:.4g}, threshold {card.threshold:.4g}"
            warnings.append(f"unlike the training set ({than})")
        if len(members) < len(model.heads):
            warnings.append("of the training set: answered by heads that have not seen it")
        spread = answers.std(0).tolist() if len(members) > 1 else ()
        told: dict[str, Any] = {"answers": tuple(answers.mean(0).tolist()), "spread": tuple(spread)}
        told |= {"members": len(members), "distance": distance, "warnings": tuple(warnings)}
        if self.heatmaps and entry.level == "slide":
            with open_h5(paths[0]) as file:
                coords, said = file["coords"][:], dict(file["coords"].attrs)
            said = {k: v for k, v in said.items() if not k.startswith("thinsection_")}
            columns = {name: values.astype(np.float32) for name, values in tiles.items()}
            write_columns(self._heatmap(entry), coords, columns, said)
        found = replace(entry, **told)
        write_json(self.folder / f"{self.name(entry)}.json", asdict(found) | {"key": key})
        return found


@torch.inference_mode()
def through(
    model: Model, members: Sequence[int], bag: Bag, device: str, *, tiles: bool
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits (M, K) of some members, and columns of the tiles (their mean over members).

    `attention`, the mean over a head's attentions; `score_NAME`, the evidence over the member's
    temperature, of classes that exclude each other less the mean over classes: what the tile adds
    to the log-odds.
    """
    target, where = model.card.target, resolve_device(device, mps=False)
    inputs = [None if a is None else torch.from_numpy(a).to(where) for a in bag]
    logits, columns = [], dict[str, np.ndarray]()
    for i in members:
        out = model.heads[i].to(where)(*inputs)
        logits.append(out.logits.double().cpu().numpy())
        if tiles:
            rule = f"head {model.card.head.head!r} must say what each tile adds"
            require(out.evidence is not None, rule, "nothing; take another head for heatmaps")
            score = out.evidence.cpu().numpy() / model.card.members[i].temperature
            score = score - score.mean(1, keepdims=True) if target.exclusive else score
            made = {f"score_{slug(name)}": score[:, k] for k, name in enumerate(target.names)}
            made["attention"] = out.attention.mean(1).cpu().numpy()
            columns = {n: columns.get(n, 0) + v / len(members) for n, v in made.items()}
    return np.stack(logits), columns


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
        config: all settings; `settings` are single ones over it: device="cuda".
        heatmaps: also write `GRID/heatmap_MODEL/ID.h5`.

    Memory: of the run, then in each worker one bag, 4 N D bytes, and what the head takes.

    Raises:
        InvalidInputError: embeddings of another encoder, commit, tile_px, tile_mpp, ...
        ThinsectionError: bad settings, no model, no slides. A bad slide is a row with its error.
    """
    config = replace_flat(config or PredictRunConfig(), settings)
    model, card = Path(model).absolute(), model_file.read_card(Path(model))
    given = [slides] if isinstance(slides, str | Path) else list(slides)
    data, wanted = Path(given[0]).absolute(), None
    if len(given) > 1 or not _has_embeddings(data):
        require(out is not None, "out must be given with slides", None)
        data = Path(str(out)).absolute()
        told: dict[str, Any] = {"on_event": on_event, "on_message": on_message}
        wanted = _embed(given, card, config, out=str(out), **told)
    home, name = Path(out).absolute() if out else data, f"predictions_{slug(card.name)}"
    files, lacking, address = _embeddings(data, card.inputs, config.predict.features, wanted)
    results = open_results(data) if (data / SLIDES).is_dir() else None
    entries = list(_bags(files, results))
    asked: dict[str, Any] = {"device": config.predict.device, "heatmaps": heatmaps}
    task = PredictTask(model=model, model_sum=file_sum(model), folder=home / name, **asked)
    done: dict[str, Prediction] = {}

    def take(report: Report[Prediction]) -> None:
        done.update({task.name(row): row for row in report.results})

    with writing(home):
        place = begin_record(home, "predict", as_mapping(config) | {"model": str(model)}).folder
        told = {"folder": place, "on_report": take, "on_message": on_message}
        execute(entries, task, config.executor, **told)
    rows = [done[task.name(entry)] for entry in entries]
    rows += [Prediction("slide", s, "", error=lacking[s]) for s in lacking if s not in files]
    said = _slide_warnings(results, address.split("/")[0], card.inputs) if results else {}
    rows = [replace(r, warnings=(*r.warnings, *said.get(r.name, ()))) for r in rows]
    write_table(home / f"{name}.csv", [_line(row, card.target) for row in rows])
    if results and home == data:
        write_index(home)
    return Predictions(home / f"{name}.csv", data, address, rows)


def _embed(slides: Any, card: ModelCard, config: PredictRunConfig, **how: Any) -> set[str]:
    """Embeds slides as the model says; their ids."""
    made = model_file.run_config(card.inputs, card.name)
    encode = replace(made.encode, device=config.predict.device)
    made = replace(made, encode=encode, stream=config.stream, executor=config.executor)
    stage = "aggregate" if card.inputs.level == "slide" else "embed"
    return {result.slide_id for result in run(slides, config=made, stage=stage, **how).results}


def _has_embeddings(folder: Path) -> bool:
    """Whether it is a folder of results, or of another's embeddings."""
    files = folder.rglob("*") if folder.is_dir() else ()
    return (folder / SLIDES).is_dir() or any(f.suffix in EMBEDDING_SUFFIXES for f in files)


def _embeddings(data: Path, inputs: Inputs, named: str | None, wanted: set[str] | None) -> Found:
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


def _bags(files: Mapping[str, Path], results: Results | None) -> Iterator[Prediction]:
    """What is asked: each slide, then each case of several slides."""
    ledgers = results.ledgers if results else {}
    told = [str(ledgers[s].slide.get("patient_id") or "") if s in ledgers else "" for s in files]
    paths: dict[str, list[str]] = {}
    of_row = group_rows([*files], told, where="the results").of_row
    for (slide, path), case in zip(files.items(), of_row, strict=True):
        paths.setdefault(case, []).append(str(path))
        yield Prediction("slide", slide, case, (str(path),))
    yield from (Prediction("case", c, c, tuple(own)) for c, own in paths.items() if len(own) > 1)


def _slide_warnings(results: Results, grid: str, inputs: Inputs) -> dict[str, list[str]]:
    """What the run and quality control say of each slide."""
    told = [row for ledger in results.ledgers.values() for row in grid_rows(ledger)]
    said = {r["slide_id"]: [r["warnings"]] for r in told if r["grid"] == grid and r["warnings"]}
    config = model_file.run_config(inputs, "the model") if inputs.run else None
    if config is not None and config.qc.qc != "off":
        entries = [SlideEntry(slide_id=s, slide_path="") for s in results.slides]
        for row in qc_rows(results.folder, entries, qc_stage(config)):
            judged, words = verdict(row, load_rules(config.qc.qc_rules))
            if judged != GOOD:
                said.setdefault(str(row["slide_id"]), []).append(f"QC: {judged}: {words}")
    return said


def _line(row: Prediction, target: Target) -> dict[str, Any]:
    """A row of predictions_MODEL.csv."""
    slide = row.name if row.level == "slide" else ""
    line: dict[str, Any] = {"level": row.level, "case_id": row.case_id, "slide_id": slide}
    line |= target.cells(row.answers) | target.named("sd_", row.spread)
    line |= {"members": row.members, "distance": row.distance}
    return line | {"warnings": "; ".join((*row.warnings, *filter(None, [row.error])))}
