"""From slides, or from embeddings that are there, to a prediction per slide and per case.

OUT/predictions_MODEL.csv        a row per slide, and per case of several slides
OUT/predictions_MODEL/ID.json    what the row is made of, and of which files; what a resume looks at
GRID/heatmap_MODEL/ID.h5         asked for: attention and contribution to each score, per tile
"""

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch

from thinsection.config import as_mapping, from_mapping, option, replace_flat, section
from thinsection.errors import OutputError, ThinsectionError, require
from thinsection.files.atomic import atomic_path, write_json, write_table, writing
from thinsection.jobs.contract import Report, Task
from thinsection.jobs.execute import execute
from thinsection.jobs.executor import ExecutorConfig
from thinsection.pipeline.folder import Results, open_results
from thinsection.pipeline.records import begin_record, end_record
from thinsection.pipeline.results import grid_rows, qc_rows, qc_stage
from thinsection.pipeline.run import run
from thinsection.pipeline.task import set_threads
from thinsection.predict.bags import Bag, Bags
from thinsection.predict.inputs import Inputs, check_inputs, read_inputs, run_config
from thinsection.predict.labels import feature_files
from thinsection.predict.model_file import Model, case_mark, load_model, read_card
from thinsection.probe.groups import group_rows
from thinsection.report.verdict import GOOD, load_rules, verdict
from thinsection.slide.cohort import SlideEntry
from thinsection.store.identity import file_sum
from thinsection.store.ledger import SLIDES, stage_key
from thinsection.store.tiles_h5 import TilesWriter, open_h5
from thinsection.stream.plan import StreamConfig
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


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One bag: a slide, or all slides of a case."""

    level: Literal["slide", "case"]
    name: str
    case_id: str
    files: tuple[str, ...]  # absolute


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a model says of a bag; plain values."""

    level: Literal["slide", "case"]
    name: str
    case_id: str
    answers: tuple[float, ...] = ()  # see `Target.answers`; () where there are none
    spread: tuple[float, ...] = ()  # standard deviation over members; () for fewer than two
    members: int = 0  # that were asked: of a training case those that have not seen it
    distance: float = 0.0  # of the mean embedding, see `Usual`
    warnings: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """What `predict` left."""

    table: Path
    results: Path  # the folder with the embeddings
    address: str  # of these
    rows: tuple[Prediction, ...]

    @property
    def exit_code(self) -> int:
        """3 where some slide has no prediction."""
        return 3 if any(not row.answers for row in self.rows) else 0


@dataclass(frozen=True, kw_only=True)
class PredictTask(Task[Asked, Prediction]):
    """See `Task`: some bags in one process, which loads the model once."""

    kind: ClassVar[str] = "predict"
    entry_type: ClassVar[type[Any]] = Asked
    result_type: ClassVar[type[Any]] = Prediction

    model: Path
    model_sum: str
    folder: Path  # OUT/predictions_MODEL
    device: str
    heatmaps: bool = False
    threads: int = 0

    def __call__(
        self, entries: Sequence[Asked], *, on_event: Callable[[Any], None]
    ) -> Report[Prediction]:
        """See `Task.__call__`; a bad file is a prediction with an error.

        Memory: the model, and one bag: its embeddings, and what the head takes (`Head.forward`).
        """
        set_threads(self.threads, torch_too=True)
        model, found = _loaded(self.model, self.model_sum), []
        for asked in entries:
            try:
                found.append(self.finished(asked) or self._answer(model, asked))
            except OutputError:
                raise
            except Exception as error:  # noqa: BLE001 - the per-slide boundary
                found.append(self.lost(asked, f"{type(error).__name__}: {error}"))
        return Report(results=tuple(found))

    def on_worker(self, *, threads: int, monitored: bool) -> Self:
        """See `Task.on_worker`."""
        return replace(self, threads=threads)

    def lost(self, entry: Asked, reason: str) -> Prediction:
        """See `Task.lost`."""
        known = {"level": entry.level, "name": entry.name, "case_id": entry.case_id}
        return from_mapping(Prediction, known | {"error": reason})

    def name(self, entry: Asked) -> str:
        """See `Task.name`: also of its file; a case's name may be no file's."""
        return entry.name if entry.level == "slide" else f"case-{case_mark(entry.name)}"

    def finished(self, entry: Asked) -> Prediction | None:
        """See `Task.finished`: of the same model and the same files."""
        try:
            told = json.loads((self.folder / f"{self.name(entry)}.json").read_text("utf-8"))
            same = told.pop("key") == self._key(entry)
            drawn = not self.heatmaps or entry.level == "case" or self.heatmap(entry).is_file()
            return from_mapping(Prediction, told) if same and drawn else None
        except (OSError, ValueError, KeyError):
            return None

    def heatmap(self, entry: Asked) -> Path:
        """`GRID/heatmap_MODEL/ID.h5`."""
        (path,) = map(Path, entry.files)
        model = self.folder.name.removeprefix("predictions_")
        return path.parent.parent / f"heatmap_{model}" / f"{entry.name}.h5"

    def _key(self, entry: Asked) -> str:
        stats = [(path, (s := Path(path).stat()).st_size, s.st_mtime_ns) for path in entry.files]
        return stage_key(model=self.model_sum, case=entry.case_id, files=stats)

    def _answer(self, model: Model, entry: Asked) -> Prediction:
        paths, key = [Path(path) for path in entry.files], self._key(entry)
        for path in paths:
            check_inputs(model.card.inputs, read_inputs(path), path.stem)
        with Bags([paths], cells=model.heads[0].needs_cells) as bags:
            bag = bags.read(0)
        members = model.asked(entry.case_id)
        logits, tiles = _through(model, members, bag, self.device, self.heatmaps)
        answers = model.answers(logits, members)
        distance = model.usual.distance(bag.features.mean(0, dtype=np.float64))
        warnings = []
        if distance > model.card.threshold:
            than = f"distance {distance:.4g}, threshold {model.card.threshold:.4g}"
            warnings.append(f"unlike the training set ({than})")
        if len(members) < len(model.heads):
            warnings.append("of the training set: answered by heads that have not seen it")
        found = Prediction(
            level=entry.level,
            name=entry.name,
            case_id=entry.case_id,
            answers=tuple(answers.mean(0).tolist()),
            spread=tuple(answers.std(0).tolist()) if len(members) > 1 else (),
            members=len(members),
            distance=distance,
            warnings=tuple(warnings),
        )
        if self.heatmaps and entry.level == "slide":
            _write_heatmap(self.heatmap(entry), paths[0], tiles, model.card.name)
        write_json(self.folder / f"{self.name(entry)}.json", asdict(found) | {"key": key})
        return found


@functools.lru_cache(maxsize=1)
def _loaded(path: Path, model_sum: str) -> Model:
    return load_model(path)


@torch.inference_mode()
def _through(
    model: Model, members: Sequence[int], bag: Bag, device: str, tiles: bool
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
        if not tiles:
            continue
        rule = f"head {model.card.head.head!r} must say what each tile adds"
        require(out.evidence is not None, rule, "nothing; take another head for heatmaps")
        score = out.evidence.cpu().numpy() / model.card.members[i].temperature
        if target.exclusive:
            score = score - score.mean(1, keepdims=True)
        made = {"attention": out.attention.mean(1).cpu().numpy()}
        made |= {f"score_{slug(name)}": score[:, k] for k, name in enumerate(target.names)}
        columns = {n: columns.get(n, 0) + v / len(members) for n, v in made.items()}
    return np.stack(logits), columns


def _write_heatmap(path: Path, features: Path, tiles: dict[str, np.ndarray], model: str) -> None:
    with open_h5(features) as file:
        coords, said = file["coords"][:], dict(file["coords"].attrs)
    said = {k: v for k, v in said.items() if not k.startswith("thinsection_")} | {"model": model}
    with atomic_path(path) as tmp, TilesWriter(tmp, dim=0, attributes=said) as writer:
        writer.append(coords, None)
        for name, values in tiles.items():
            writer.add_column(name, values.astype(np.float32))


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
    model, card = Path(model).absolute(), read_card(Path(model))
    given = [slides] if isinstance(slides, str | Path) else list(slides)
    wanted: set[str] | None = None
    if not _is_embeddings(given):
        require(out is not None, "out must be given with slides", None)
        settings = {"device": config.predict.device, "executor": config.executor}
        made = run_config(card.inputs, card.name)
        encode = replace(made.encode, device=config.predict.device)
        made = replace(made, encode=encode, stream=config.stream, executor=config.executor)
        stage = "aggregate" if card.inputs.level == "slide" else "embed"
        told = {"on_event": on_event, "on_message": on_message}
        summary = run(given, out=str(out), config=made, stage=stage, **told)
        given, wanted = [Path(str(out))], {result.slide_id for result in summary.results}
    data = Path(given[0]).absolute()
    home = Path(out).absolute() if out else data
    address, files, why = _embeddings(data, card.inputs, config.predict.features)
    results = open_results(data) if (data / SLIDES).is_dir() else None
    entries = list(_bags(files, results, wanted))
    name = slug(card.name)
    task = PredictTask(
        model=model,
        model_sum=file_sum(model),
        folder=home / f"predictions_{name}",
        device=config.predict.device,
        heatmaps=heatmaps,
    )
    rows: dict[str, Prediction] = {}

    def take(report: Report[Prediction]) -> None:
        for row in report.results:
            rows[f"{row.level} {row.name}"] = row
            on_event(row)

    record = begin_record(home, "predict", as_mapping(config) | {"model": str(model)})
    with writing(home):
        place = record.folder
        execute(entries, task, config.executor, folder=place, on_report=take, on_message=on_message)
    end_record(record, {"counts": {"done": sum(not r.error for r in rows.values())}})
    lacking = {k: v for k, v in why.items() if k not in files and (wanted is None or k in wanted)}
    answered = [rows[f"{entry.level} {entry.name}"] for entry in entries]
    answered += [Prediction(level="slide", name=k, case_id="", error=v) for k, v in lacking.items()]
    if results is not None:
        said = _slide_warnings(results, address.split("/")[0], card.inputs)
        answered = [replace(r, warnings=(*r.warnings, *said.get(r.name, ()))) for r in answered]
    found = Predictions(
        table=home / f"predictions_{name}.csv", results=data, address=address, rows=tuple(answered)
    )
    write_table(found.table, _table(found.rows, card.target))
    return found


def _is_embeddings(given: Sequence[str | Path]) -> bool:
    """Whether one folder was given, of results or of another's embeddings."""
    if len(given) != 1 or not Path(given[0]).is_dir():
        return False
    try:
        return bool(feature_files(Path(given[0]), None)[0])
    except ThinsectionError:
        return (Path(given[0]) / SLIDES).is_dir()


def _embeddings(
    data: Path, inputs: Inputs, named: str | None
) -> tuple[str, dict[str, Path], dict[str, str]]:
    """Address, files by slide, and why others have none: of the embeddings that the model takes.

    Raises InvalidInputError: none are; says what is wrong with those that come nearest.
    """
    known: Sequence[str | None] = [named]
    if named is None and (data / SLIDES).is_dir():
        results = open_results(data)
        known = results.slide_features if inputs.level == "slide" else results.features
    tried = []
    for address in known or [None]:
        files, why, place = feature_files(data, address)
        found = read_inputs(next(iter(files.values())))
        alike = sum(getattr(found, n) == getattr(inputs, n) for n in asdict(found))
        tried.append((alike, place, files, why, found))
    _, address, files, why, found = max(tried, key=lambda one: one[0])
    check_inputs(inputs, found, next(iter(files)))
    return address, files, why


def _bags(
    files: dict[str, Path], results: Results | None, wanted: set[str] | None
) -> Iterator[Asked]:
    """Each slide, then each case of several slides."""
    slides = [slide for slide in files if wanted is None or slide in wanted]
    ledgers = results.ledgers if results else {}
    told = [ledgers[s].slide.get("patient_id") or "" if s in ledgers else "" for s in slides]
    case_of = group_rows(slides, told, where="the results").of_row
    paths: dict[str, list[str]] = {}
    for slide, case in zip(slides, case_of, strict=True):
        paths.setdefault(case, []).append(str(files[slide]))
        yield Asked(level="slide", name=slide, case_id=case, files=(str(files[slide]),))
    for case, own in paths.items():
        if len(own) > 1:
            yield Asked(level="case", name=case, case_id=case, files=tuple(own))


def _slide_warnings(results: Results, grid: str, inputs: Inputs) -> dict[str, list[str]]:
    """What the run and quality control say of each slide."""
    said = {
        slide_id: [row["warnings"]]
        for slide_id, ledger in results.ledgers.items()
        for row in grid_rows(ledger)
        if row["grid"] == grid and row.get("warnings")
    }
    config = run_config(inputs, "the model") if inputs.run else None
    if config is None or config.qc.qc == "off":
        return said
    rules = load_rules(config.qc.qc_rules)
    entries = [SlideEntry(slide_id=s, slide_path="") for s in results.slides]
    for row in qc_rows(results.folder, entries, qc_stage(config)):
        judged, words = verdict(row, rules)
        if judged != GOOD:
            said.setdefault(str(row["slide_id"]), []).append(f"QC: {judged}: {words}")
    return said


def _table(rows: Sequence[Prediction], target: Any) -> list[dict[str, Any]]:
    """The rows of predictions_MODEL.csv."""
    begin = "" if target.kind in ("cox", "regression") else "p_"
    table = []
    for row in rows:
        line: dict[str, Any] = {"level": row.level, "case_id": row.case_id}
        line["slide_id"] = row.name if row.level == "slide" else ""
        if row.answers and target.exclusive:
            line["prediction"] = target.names[int(np.argmax(row.answers))]
        elif target.kind == "discrete" and row.answers:
            line["risk"] = float(target.risk(np.array([row.answers]))[0])
        answers = row.answers or [None] * len(target.names)
        spread = row.spread or [None] * len(target.names)
        line |= {f"{begin}{n}": v for n, v in zip(target.names, answers, strict=True)}
        line |= {f"sd_{n}": v for n, v in zip(target.names, spread, strict=True)}
        line |= {"members": row.members, "distance": row.distance}
        table.append(line | {"warnings": "; ".join((*row.warnings, *filter(None, [row.error])))})
    return table
