"""Predictions per slide and per case, from slides or from existing embeddings.

OUT/predictions_MODEL.csv        a row per slide, and per case of several slides
OUT/predictions_MODEL/           see `answering`
OUT/validation_MODEL/            if labels are given, see `validation`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Unpack

from thinsection.config import (
    Settings,
    as_mapping,
    from_mapping,
    listing_settings,
    option,
    replace_flat,
    section,
)
from thinsection.errors import (
    ConfigError,
    InvalidInputError,
    StoreError,
    rewording,
    slide_boundary,
)
from thinsection.evaluation.cases import group_rows
from thinsection.evaluation.covariates import (
    CovariateSource,
    case_covariates,
    check_before_embedding,
)
from thinsection.evaluation.embeddings import (
    EMBEDDING_SUFFIXES,
    FeatureFiles,
    feature_files,
    unsigned_note,
)
from thinsection.evaluation.follow_up import TIMES_SIGN
from thinsection.evaluation.label_values import LabelsConfig
from thinsection.evaluation.labels import Cohort, join_labels, known_patients
from thinsection.evaluation.target import Target
from thinsection.extras import Need
from thinsection.files.atomic import output_errors, read_json, read_table, write_table
from thinsection.files.tables import path_and_sheet
from thinsection.jobs.backend import ignore_event
from thinsection.jobs.execute import execute
from thinsection.jobs.executor import ExecutorConfig
from thinsection.jobs.task import Report
from thinsection.predict.answering import Prediction, PredictTask
from thinsection.predict.inputs import (
    Inputs,
    check_inputs,
    is_grid_of,
    read_inputs,
    run_config,
)
from thinsection.predict.model_file import ModelCard, read_card
from thinsection.predict.replacing import (
    check_validation,
    heatmap_folder,
    remove_stale_heatmaps,
    stale_words,
)
from thinsection.predict.validation import Locked, use_lines, write_validation
from thinsection.report.index import refresh_index
from thinsection.report.verdict import GOOD, load_rules, verdict
from thinsection.results.folder import open_results
from thinsection.results.records import recording
from thinsection.results.tables import grid_rows
from thinsection.run.process import OnEvent
from thinsection.run.progress import Progress, chosen_progress, showing
from thinsection.run.run import run
from thinsection.slide.cohort import is_table
from thinsection.stages.own_tables import qc_rows
from thinsection.stages.spec import qc_stage, resolve
from thinsection.store.identity import file_sum
from thinsection.store.ledger import SLIDES
from thinsection.store.outcome import known_slides
from thinsection.tiles.budget import StreamConfig
from thinsection.types import Document, counted, ignore_message, parse_bytes
from thinsection.weights.origin import slug

if TYPE_CHECKING:
    from thinsection.settings_types import PredictSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictConfig:
    """Settings for predictions by a model."""

    device: str = option(
        "auto",
        "Device of the model and the encoder: auto, cpu, cuda or cuda:1.",
        daily=True,
    )
    features: str | None = option(
        None,
        "Embeddings to use, if the folder has several: 256px_0.5mpp/features_uni2_h, or a "
        "unique part of this name, such as uni2_h.",
        daily=True,
    )
    covariate_table: Path | None = option(
        None,
        "Table with slide_id or case_id and the columns that the model needs beside the tiles. "
        "[default: the table of labels, and summary.csv]",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationConfig:
    """Labels of new cases, on which the fixed model is tested."""

    labels: Path | None = option(
        None,
        "Table (CSV, TSV, Excel or Parquet) with slide_id or case_id and the true values of "
        "the new cases. The page validation_MODEL/index.html then compares them with "
        "the predictions.",
        daily=True,
    )
    target: tuple[str, ...] = option(
        (),
        "Column with the true values; repeat the option for several labels. [default: "
        "the name in training]",
        daily=True,
    )
    time: str | tuple[str, ...] | None = option(
        None,
        "Survival: column with the time to event or end of follow-up. Repeat the option if "
        "the times are in two columns. [default: the name in training]",
        daily=True,
    )
    read: tuple[str, ...] = option(
        (),
        "How to read a true value, as VALUE=READING: see `thinsection labels --help-all`.",
    )
    drop_unusable: bool = option(
        False,
        "Leave out rows with a missing or negative time, or with a limit such as <5 in place of a "
        "number. Without it they are an error that names the rows.",
    )
    site: str | None = option(
        None,
        "Column with the hospital or centre of the new cases, for scores by site. [default: the "
        "site in TCGA barcodes]",
    )
    subgroup: tuple[str, ...] = option(
        (),
        "Column for whose values the page of the test has separate scores; repeat the option for "
        "several.",
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class PredictRunConfig(Settings):
    """All settings of `thinsection predict`, by section; the model file has those of training."""

    predict: PredictConfig = section(PredictConfig, "Prediction")
    validation: ValidationConfig = section(ValidationConfig, "Test on labelled cases")
    stream: StreamConfig = section(StreamConfig, "Memory and workers")
    executor: ExecutorConfig = section(ExecutorConfig, "Memory and workers")

    def needs(self) -> Iterator[Need]:
        """Packages of the sections, and of the page of a test."""
        yield from super().needs()
        if self.validation.labels is not None:
            yield "the page of scores", ("matplotlib",)


class Predictions(NamedTuple):
    """Results of `predict`."""

    table: Path
    results: Path  # folder with the embeddings
    address: str  # address of the embeddings
    rows: list[Prediction]
    validation: Document | None = None  # content of validation.json
    page: Path | None = None  # page of the validation
    heatmaps: Path | None = None  # GRID/heatmap_MODEL, if requested

    def __repr__(self) -> str:
        rows = counted(len(self.rows), "prediction")
        tested = "" if self.validation is None else ", validated"
        return (
            f"Predictions({rows} in {self.table.name!r}, from {self.address!r}{tested})"
        )


class Source(NamedTuple):
    """Embeddings for which a model makes predictions."""

    data: Path  # folder with the embeddings
    home: Path  # folder for the results
    # slides that this call names; None means all slides of the folder
    requested_slides: set[str] | None
    files: dict[str, Path]  # slide id -> file of embeddings
    lacking: dict[str, str]  # slide id -> reason why it has no embeddings
    address: str


@listing_settings(PredictRunConfig)
def predict(
    model: str | Path,
    slides: Sequence[str | Path] | str | Path,
    *,
    out: str | Path | None = None,
    config: PredictRunConfig | None = None,
    heatmaps: bool = False,
    overwrite: bool = False,
    on_event: OnEvent | None = None,
    on_message: Callable[[str], None] | None = None,
    **settings: Unpack[PredictSettings],
) -> Predictions:
    """Predicts slides and their cases by a model; existing predictions are reused.

    Args:
        model: file from `thinsection train`.
        slides: slide files, folders or cohort CSVs, which are embedded with the model's settings;
            or one folder with embeddings: of results, TRIDENT, CLAM, STAMP or slide2vec.
        out: results folder; None uses that of the embeddings.
        config: all settings; `settings` are single ones that replace them: device="cuda". With
            labels="external.csv" the model is also tested on these labels, see `validation`.
        heatmaps: True also writes `GRID/heatmap_MODEL/ID.h5`, below `out` if it is given.
        overwrite: True replaces a validation of another model or of other labels.
        on_event: receives the progress of embedding; `thinsection.progress()` shows it. None shows
            it in a notebook, and nothing in a script.
        on_message: called with lines of text for the user.

    Memory: as `run`, then in each worker that of `answering.through`. A bag that a head must read
    whole (4 N D bytes) is a row with an error if it is larger than `memory`. `thinsection plan
    --command predict` predicts the peak.

    Raises:
        InvalidInputError: embeddings with another encoder, commit, tile_px, tile_mpp, ...
        ThinsectionError: bad settings, no model, no slides. A bad slide is a row with its error.
    """
    config = replace_flat(config or PredictRunConfig(), settings)
    config.check_packages()
    progress = chosen_progress(on_event)
    on_event = progress or on_event or ignore_event
    on_message = on_message or ignore_message
    path = Path(model).absolute()
    card = read_card(Path(model))
    _check_covariate_table(config.predict.covariate_table, card)
    labels = _labels_config(config.validation, card.target)
    sources = [slides] if isinstance(slides, str | Path) else list(slides)
    requested_slides = None
    data = Path(sources[0]).absolute()
    are_slides = len(sources) > 1 or not _has_embeddings(data)
    if are_slides and out is None:
        raise InvalidInputError("out must be set when slides are passed, got None")
    home = Path(out).absolute() if out else data
    model_sum = file_sum(path)
    validation = home / f"validation_{slug(card.name)}"
    if labels is not None and not overwrite:
        check_validation(validation, model_sum, labels)
    if are_slides:
        data = home
        requested_slides = _embed(
            sources,
            card,
            config,
            out=str(out),
            on_event=on_event,
            on_message=on_message,
        )
    name = f"predictions_{slug(card.name)}"
    table = home / f"{name}.csv"
    used_slides = None
    if requested_slides is not None:
        used_slides = requested_slides | _slides_in_table(table)
    embeddings = _embeddings(data, card.inputs, config.predict.features, used_slides)
    source = Source(
        data=data,
        home=home,
        requested_slides=requested_slides,
        files=embeddings.files,
        lacking=embeddings.missing,
        address=embeddings.place,
    )
    for line in unsigned_note(embeddings):
        on_message(line)
    patient_by_slide = known_patients(data)
    cohort = None
    if labels is not None:
        if requested_slides is not None:
            tested = requested_slides.union(embeddings.missing)
            embeddings = embeddings.taking(tested)
        cohort = join_labels(embeddings, patient_by_slide, labels, card.target)
        for line in cohort.account:
            on_message(line)
    heatmaps_folder = _heatmap_folder(source, card.name) if heatmaps else None
    if heatmaps_folder is not None:
        num_stale = remove_stale_heatmaps(heatmaps_folder, model_sum)
        if num_stale:
            on_message(stale_words(heatmaps_folder, num_stale))
    task = PredictTask(
        model=path,
        model_sum=model_sum,
        folder=home / name,
        device=config.predict.device,
        budget_bytes=parse_bytes(config.stream.memory),
        heatmaps=heatmaps_folder,
    )
    entries = _with_covariates(
        list(_bags(source.files, patient_by_slide, cohort)),
        card,
        CovariateSource(
            table=config.predict.covariate_table or config.validation.labels,
            data=data,
            grid=source.address.split("/")[0],
            patient_by_slide=patient_by_slide,
        ),
    )
    rows = _answers(
        entries, task, source, config, progress=progress, on_message=on_message
    )
    rows = _with_slide_warnings(rows, source, card.inputs)
    elsewhere = [] if home == data else _rows_of_other_data(task, rows)
    write_table(table, [_line(row, card.target) for row in (*rows, *elsewhere)])
    document = None
    page = None
    if cohort is not None and labels is not None:
        page = validation / "index.html"
        locked = Locked(card=card, path=path, sha256=task.model_sum)
        # a case is its one slide, or has a row of its own
        row_by_files = {row.files: row for row in rows}
        answered = [row_by_files[files] for files in cohort.files]
        document = write_validation(
            page.parent,
            locked,
            cohort,
            answered,
            table=Path(labels.labels or ""),
            results=data,
        )
        for line in use_lines(document):
            on_message(line)
    refresh_index(home)
    if requested_slides is not None:
        requested_files = {
            str(source.files[slide])
            for slide in requested_slides
            if slide in source.files
        }
        rows = [
            row
            for row in rows
            if row.name in requested_slides or requested_files & {*row.files}
        ]
    return Predictions(
        table, data, source.address, rows, document, page, heatmaps_folder
    )


def _heatmap_folder(source: Source, model: str) -> Path | None:
    """Folder for the heatmaps: beside the embeddings, or below another results folder.

    None if no slide has embeddings.
    """
    if not source.files:
        return None
    if source.home != source.data:
        return heatmap_folder(source.home / source.address.split("/")[0], model)
    return heatmap_folder(next(iter(source.files.values())).parent.parent, model)


def _answers(
    entries: Sequence[Prediction],
    task: PredictTask,
    source: Source,
    config: PredictRunConfig,
    *,
    progress: Progress | None,
    on_message: Callable[[str], None],
) -> list[Prediction]:
    """Row for each bag, and for each slide without embeddings."""
    done: dict[str, Prediction] = {}
    # slides of earlier calls that this call does not name get no heatmap now
    plain = replace(task, heatmaps=None)
    requested = source.requested_slides
    if requested is not None:
        # the table of this call need not have the slides of earlier calls
        entries = [
            entry if entry.name in requested else plain.with_earlier_covariates(entry)
            for entry in entries
        ]
    for entry in entries:
        is_requested = requested is None or entry.name in requested
        earlier = None
        if not is_requested and entry.level != "case":
            earlier = plain.finished(entry)
        if earlier is not None:
            done[task.name(entry)] = earlier

    def collect(report: Report[Prediction]) -> None:
        done.update({task.name(row): row for row in report.results})
        if progress is not None:
            for row in report.results:
                progress(row)

    command = "predict" if task.heatmaps is None else "heatmap"
    settings = as_mapping(config) | {"model": str(task.model)}
    waiting = [entry for entry in entries if task.name(entry) not in done]
    home = source.home
    with (
        output_errors(home),
        recording(home, command, settings) as record,
        showing(progress, len(waiting), "predictions"),
    ):
        execute(
            waiting,
            task,
            config.executor,
            folder=record.folder,
            on_report=collect,
            on_message=on_message,
        )
        answered = [entry for entry in waiting if done[task.name(entry)].answers]
        record.counts["predicted"] = len(answered)
        record.counts["failed"] = len(waiting) - len(answered)
    rows = [done[task.name(entry)] for entry in entries]
    for slide, error in source.lacking.items():
        if slide not in source.files:
            rows.append(Prediction("slide", slide, "", error=error))
    return rows


def _slides_in_table(table: Path) -> set[str]:
    """Slides that were predicted earlier; their rows stay."""
    if not table.is_file():
        return set()
    with rewording("table must be a UTF-8 CSV", table, ValueError, error=StoreError):
        return {row["slide_id"] for row in read_table(table) if row.get("slide_id")}


def _rows_of_other_data(
    task: PredictTask, rows: Sequence[Prediction]
) -> list[Prediction]:
    """Earlier predictions of this model in this folder, for embeddings in another folder."""
    plain = replace(task, heatmaps=None)
    names = {task.name(row) for row in rows}
    other_rows = list[Prediction]()
    for path in sorted(task.folder.glob("*.json")):
        with suppress(OSError, ValueError, KeyError):
            document = read_json(path)
            document.pop("key")
            earlier = plain.finished(from_mapping(Prediction, document))
            if earlier is not None and task.name(earlier) not in names:
                other_rows.append(earlier)
    return other_rows


def _labels_config(config: ValidationConfig, target: Target) -> LabelsConfig | None:
    """Settings for reading the labels of new cases, by the model's task; None without labels.

    Raises ConfigError: columns are given without a table.
    """
    if config.labels is None:
        columns = config.target or config.time or config.site or config.subgroup
        if columns:
            raise ConfigError(
                "target, time, site and subgroup must be combined with labels, got "
                f'{columns} alone; pass labels="FILE" too'
            )
        return None
    survival = target.kind in ("cox", "discrete")
    trained = target.columns[:1] if survival else target.columns
    times = tuple(target.columns[1].split(TIMES_SIGN)) if survival else None
    return LabelsConfig(
        labels=config.labels,
        target=config.target or trained,
        time=config.time or times,
        read=config.read,
        drop_unusable=config.drop_unusable,
        site=config.site,
        subgroup=config.subgroup,
        task=target.kind,
    )


def _embed(
    slides: Sequence[str | Path],
    card: ModelCard,
    config: PredictRunConfig,
    *,
    out: str,
    on_event: OnEvent,
    on_message: Callable[[str], None],
) -> set[str]:
    """Embeds slides with the model's settings; returns their ids.

    Raises DatasetError: no file will have a covariate that the model needs.
    """
    settings = run_config(card.inputs, card.name)
    # the columns of a table of slides are copied to summary.csv
    if not any(is_table(str(item)) for item in slides):
        check_before_embedding(
            card.covariates,
            config.predict.covariate_table or config.validation.labels,
            Path(out),
            has_qc=settings.qc.qc != "off",
        )
    settings = replace(
        settings,
        encode=replace(settings.encode, device=config.predict.device),
        stream=config.stream,
        executor=config.executor,
    )
    done = run(
        slides,
        config=settings,
        until="slide-embeddings" if card.inputs.level == "slide" else "embeddings",
        out=out,
        on_event=on_event,
        on_message=on_message,
    )
    return {result.slide_id for result in done.results}


def _has_embeddings(folder: Path) -> bool:
    """True for a folder of results, or with embeddings of another tool."""
    if not folder.is_dir():
        return False
    if (folder / SLIDES).is_dir():
        return True
    return any(file.suffix in EMBEDDING_SUFFIXES for file in folder.rglob("*"))


def _embeddings(
    data: Path, inputs: Inputs, named: str | None, kept: set[str] | None
) -> FeatureFiles:
    """Embeddings of some slides (None: of all slides) that the model accepts.

    Raises InvalidInputError: there are none; the message explains the nearest candidates.
    """
    addresses: Sequence[str | None] = [named]
    if named is None and (data / SLIDES).is_dir():
        results = open_results(data)
        uses_slide_embeddings = inputs.level == "slide"
        addresses = (
            results.slide_features if uses_slide_embeddings else results.features
        )
    candidates = {}
    num_equal = {}
    for address in addresses or [None]:
        embeddings = feature_files(data, address)
        facts = _first_facts(embeddings)
        candidates[embeddings.place] = (facts, embeddings)
        # number of facts, and grid settings, that equal those of the training
        is_equal = [getattr(facts, f) == value for f, value in asdict(inputs).items()]
        grid = embeddings.place.split("/", maxsplit=1)[0]
        num_equal[embeddings.place] = sum(is_equal) + is_grid_of(inputs, grid)
    place, *others = [
        name for name, count in num_equal.items() if count == max(num_equal.values())
    ]
    if others:
        place = open_results(data).choose_features(None, [place, *others])
    facts, embeddings = candidates[place]
    check_inputs(inputs, facts, next(iter(embeddings.files)))
    return embeddings if kept is None else embeddings.taking(kept)


def _first_facts(embeddings: FeatureFiles) -> Inputs:
    """Facts in the first file of embeddings that can be read.

    Raises StoreError: no file can be read.
    """
    reasons = dict(embeddings.missing)
    for slide, path in embeddings.files.items():
        facts = None
        with slide_boundary(slide, reasons.__setitem__):
            facts = read_inputs(path)
        if facts is not None:
            return facts
    shown = "; ".join(f"{slide}: {why}" for slide, why in [*reasons.items()][:3])
    raise StoreError(
        f"embeddings must be readable, got none in {embeddings.place!r} ({shown})"
    )


def _bags(
    files: Mapping[str, Path],
    known_patient_by_slide: Mapping[str, str],
    cohort: Cohort | None,
) -> Iterator[Prediction]:
    """Bags to predict: each slide, then each case of several slides.

    Args:
        files: slide id -> file of embeddings.
        known_patient_by_slide: slide id -> patient id, for slides whose patient the results know.
        cohort: labelled cases, which do not share slides; None if there are none.
    """
    patients = [known_patient_by_slide.get(slide, "") for slide in files]
    of_row = group_rows([*files], patients, where="the results").of_row
    case_by_slide = dict(zip(files, of_row, strict=True))
    patient_by_slide = dict(known_patient_by_slide)
    patient_by_case: dict[str, str] = {}
    paths: dict[str, list[str]] = {}
    if cohort:
        patient_by_case = dict(zip(cohort.cases, cohort.patients, strict=True))
        for i, case in enumerate(cohort.cases):
            paths[case] = [*cohort.files[i]]
            for slide in cohort.slides[i]:
                case_by_slide[slide] = case
                patient_by_slide[slide] = cohort.patients[i]
    for slide, path in files.items():
        case = case_by_slide[slide]
        if case not in patient_by_case:
            paths.setdefault(case, []).append(str(path))
        yield Prediction(
            "slide",
            slide,
            case,
            (str(path.absolute()),),
            patient_id=patient_by_slide.get(slide, ""),
        )
    for case, case_paths in paths.items():
        if len(case_paths) > 1:
            patient = patient_by_case.get(case, "")
            yield Prediction("case", case, case, tuple(case_paths), patient_id=patient)


def _check_covariate_table(table: Path | None, card: ModelCard) -> None:
    """Raises ConfigError: the table does not exist, or the model needs none."""
    if table is None:
        return
    if not card.covariates:
        raise ConfigError(
            f"covariate_table must be left out for a model without covariates, got {str(table)!r}"
        )
    if not path_and_sheet(table)[0].is_file():
        raise ConfigError(
            f"covariate_table must be an existing file, got {str(table)!r}"
        )


def _with_covariates(
    entries: Sequence[Prediction],
    card: ModelCard,
    source: CovariateSource,
) -> list[Prediction]:
    """Bags with the covariates that the model needs; a slide has those of its case.

    Raises DatasetError: no table has a column, see `case_covariates`.
    """
    if not card.covariates:
        return list(entries)
    slides_by_case: dict[str, list[str]] = {}
    for entry in entries:
        if entry.level == "slide":
            slides_by_case.setdefault(entry.case_id, []).append(entry.name)
    rows, _ = case_covariates(card.covariates, [*slides_by_case.values()], source)
    values_by_case = dict(zip(slides_by_case, rows, strict=True))
    return [
        replace(entry, covariates=values_by_case[entry.case_id]) for entry in entries
    ]


def _with_slide_warnings(
    rows: Sequence[Prediction], source: Source, inputs: Inputs
) -> list[Prediction]:
    """Rows with the warnings of the run and of quality control for their slides."""
    if not (source.data / SLIDES).is_dir():
        return list(rows)
    results = open_results(source.data)
    grid = source.address.split("/")[0]
    warnings: dict[str, list[str]] = {}
    for ledger in results.ledgers.values():
        for grid_row in grid_rows(ledger):
            if grid_row["grid"] == grid and grid_row["warnings"]:
                warnings[grid_row["slide_id"]] = [grid_row["warnings"]]
    config = run_config(inputs, "the model") if inputs.run else None
    if config is not None and config.qc.qc != "off":
        stage = qc_stage(resolve(config, {"until": "qc"}))
        for qc_row in qc_rows(known_slides(results.folder), stage):
            judged, words = verdict(qc_row, load_rules(config.qc.qc_rules))
            if judged != GOOD:
                line = f"QC: {judged}: {words}"
                warnings.setdefault(str(qc_row["slide_id"]), []).append(line)
    return [
        replace(row, warnings=(*row.warnings, *warnings.get(row.name, ())))
        for row in rows
    ]


def _line(row: Prediction, target: Target) -> dict[str, object]:
    """Row of predictions_MODEL.csv."""
    warnings = [*row.warnings, row.error] if row.error else row.warnings
    return {
        "level": row.level,
        "case_id": row.case_id,
        "slide_id": row.name if row.level == "slide" else "",
        **target.cells(row.answers),
        **target.named("sd_", row.spread),
        "members": len(row.members),
        "distance": row.distance,
        "warnings": "; ".join(warnings),
    }
