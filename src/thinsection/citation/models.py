"""Accounts of trained models, validations and probes, from the JSON and model files they wrote."""

from collections.abc import Iterable
from pathlib import Path

from thinsection.citation.methods import Account, Method, citation_of, joined
from thinsection.errors import ConfigError, StoreError, WeightsError, rewording
from thinsection.evaluation.metrics import kind_of
from thinsection.evaluation.rows import METRIC_WORDS
from thinsection.files.atomic import read_json
from thinsection.predict.inputs import Inputs
from thinsection.predict.model_file import read_card
from thinsection.predict.tested import EXPERIMENT_NAME
from thinsection.types import Document, counted, rounded

VALIDATION_NAME = "validation.json"
MODEL_NAME = "model.safetensors"
_SHOWN_HASH = 12  # hexadecimal digits of a checksum in a sentence
_UNIT_WORDS = {
    "patient": "the cases of a patient are in one fold",
    "site": "the cases of a site are in one fold",
    "each-site": "each fold tests one site",
}


def read_document(path: Path, command: str) -> Document:
    """Content of a JSON file of a command. Raises StoreError: it is missing or damaged."""
    rule = f"{path.name} must be a file of `thinsection {command}`"
    with rewording(rule, path, OSError, ValueError, error=StoreError):
        document = read_json(path)
        if not isinstance(document, dict):
            raise ValueError("it has no fields")
    return document


def experiment_account(folder: Path) -> Account:
    """Training of a model, folds and scores. Raises StoreError: experiment.json is damaged."""
    path = folder / EXPERIMENT_NAME
    document = read_document(path, "train")
    damage = (KeyError, TypeError, AttributeError, IndexError)
    rule = f"{EXPERIMENT_NAME} must have the fields of `thinsection train`"
    with rewording(rule, path, *damage, error=StoreError):
        account = _training(document) + _scores(document, document["cases"])
    return account + _inputs_of(folder / MODEL_NAME)


def model_account(path: Path) -> Account:
    """What a model file says of its training. Raises WeightsError, ConfigError: it is no model."""
    card = read_card(path)
    head = Method("head", card.head.head)
    target = Method("target", card.target.kind)
    scores = ", ".join(
        f"{METRIC_WORDS.get(name, name)} {text}" for name, text in card.scores.items()
    )
    sentence = (
        f"The model {card.name} ({counted(len(card.members), 'member')} of the head {head.name}"
        f"{head.cited}) predicts {', '.join(card.target.columns)} ({card.target.kind_words}"
        f"{target.cited})."
    )
    sentences = [sentence]
    if scores:
        sentences.append(
            f"Its scores in training, on cases that were held out: {scores}."
        )
    own = Account(
        sentences=tuple(sentences),
        methods=(head, target) if target.keys else (head,),
        unknown=_unknown(head, "head"),
        versions=tuple(filter(None, [card.versions.get("thinsection", "")])),
    )
    return own + _inputs(card.inputs)


def validation_account(folder: Path) -> Account:
    """Test of a model on labelled cases. Raises StoreError: validation.json is damaged."""
    path = folder / VALIDATION_NAME
    document = read_document(path, "predict --labels")
    rule = f"{VALIDATION_NAME} must have the fields of `thinsection predict --labels`"
    damage = (KeyError, TypeError, AttributeError, IndexError)
    with rewording(rule, path, *damage, error=StoreError):
        model = document["model"]
        head = Method("head", str(model["head"]))
        patients = document.get("patients")
        of_patients = f" of {counted(patients, 'patient')}" if patients else ""
        tripod = Method("reporting", "tripod")
        sentences = [
            f"The model {model['name']} (SHA-256 {str(model['sha256'])[:_SHOWN_HASH]}, head "
            f"{head.name}{head.cited}) was tested without change in an {document['validation']} "
            f"validation on {counted(document['cases'], 'case')}{of_patients} with "
            f"{counted(document['slides'], 'slide')}; it is reported by TRIPOD+AI{tripod.cited}."
        ]
        left_out: dict[str, int] = {}
        for one in document["left_out"]:
            left_out[one["why"]] = left_out.get(one["why"], 0) + 1
        for why, number in left_out.items():
            sentences.append(f"{counted(number, 'case')} left out: {why}.")
        methods = [head, tripod]
        if any(one.get("recalibration") for one in document["outcomes"]):
            method = Method("calibration", "recalibration")
            methods.append(method)
            sentences.append(
                f"Calibration was assessed by a logistic recalibration{method.cited}."
            )
        if document.get("survival"):
            at_times = [Method("metric", "auroc_at"), Method("metric", "brier_at")]
            methods += at_times
            keys = [key for one in at_times for key in one.keys]
            sentences.append(f"Survival was scored at fixed times{citation_of(keys)}.")
        own = Account(
            sentences=tuple(sentences),
            methods=tuple(methods),
            unknown=_unknown(head, "head"),
            versions=(str(document["versions"]["thinsection"]),),
        )
        return own + _scores(document, document["cases"])


def probe_account(path: Path) -> Account:
    """One probe of an encoder. Raises StoreError: the file is damaged."""
    document = read_document(path, "probe")
    rule = f"{path.name} must have the fields of `thinsection probe`"
    damage = (KeyError, TypeError, AttributeError, IndexError)
    with rewording(rule, path, *damage, error=StoreError):
        probe = Method("probe", str(document["probe"]))
        protocol = Method("protocol", str(document["protocol"]["name"]))
        data = document["data"]
        methods = [probe, protocol]
        unknown = [*_unknown(probe, "probe"), *_unknown(protocol, "protocol")]
        of_encoder = ""
        if data.get("encoder"):
            encoder = Method(
                "tile_encoder", str(data["encoder"]), str(data.get("precision", ""))
            )
            methods.append(encoder)
            unknown += _unknown(encoder, "tile encoder")
            of_encoder = f" for embeddings of {encoder.name}{encoder.cited}"
        else:
            unknown.append(f"the encoder of the embeddings of {document['dataset']}")
        interval = dict(document.get("interval") or {})
        score = {
            "value": document["score"],
            **interval,
            "missing": interval.get("missing", ""),
        }
        rows = int(interval.get("units") or 0)
        words, measures = _score_words(str(document["metric"]), score, rows)
        sentence = (
            f"The probe {probe.name}{probe.cited} by the protocol {protocol.name}{protocol.cited} "
            f"was run on {document['dataset']}{of_encoder}: {words}."
        )
        return Account(
            sentences=(sentence,),
            methods=(*methods, *measures),
            unknown=(
                *unknown,
                f"the version of Thinsection that ran the probe {probe.name}",
            ),
        )


def is_probe(path: Path) -> bool:
    """True for the JSON file of a probe's result."""
    try:
        document = read_json(path)
    except (OSError, ValueError):
        return False
    return (
        isinstance(document, dict)
        and {"probe", "protocol", "metric"} <= document.keys()
    )


def _training(document: Document) -> Account:
    """Head, target, folds and calibration."""
    settings = document["settings"]
    cross = settings["cross"]
    fit = settings["fit"]
    head = Method("head", str(document["head"]))
    target = Method("target", str(document["task"]))
    unit = str(cross["fold_unit"])
    folds = Method("folds", unit)
    methods = [head, *(one for one in (target, folds) if one.keys)]
    number = len(document["folds"])
    how = f"{number}-fold cross-validation ({_UNIT_WORDS.get(unit, unit)}{folds.cited})"
    if cross.get("splits"):
        how = f"the {counted(number, 'split')} of a file"
        methods = [one for one in methods if one != folds]
    elif cross["repeats"] > 1:
        how = f"{cross['repeats']} repeats of {cross['folds']}-fold cross-validation"
        how += f" ({_UNIT_WORDS.get(unit, unit)}{folds.cited})"
    sentences = [
        f"The head {head.name}{head.cited} was trained to predict {document['target']} "
        f"({document['task']}{target.cited}) on {counted(document['cases'], 'case')} by {how}, "
        f"with AdamW, weight decay {fit['weight_decay']:g} and seed {fit['seed']}; in each fold "
        f"one of {cross['inner_folds']} parts of the training cases was the validation set, which "
        "decided when training ended."
    ]
    if cross.get("search"):
        sentences.append(f"Each fold searched the settings {joined(cross['search'])}.")
    temperature = float(document.get("temperature") or 1)
    if temperature != 1:
        method = Method("calibration", "temperature")
        methods.append(method)
        sentences.append(
            f"Logits were divided by a common temperature of {temperature:.2f}{method.cited}."
        )
    for slide, why in dict(document.get("left_out") or {}).items():
        sentences.append(f"Slide {slide} was left out: {why}.")
    return Account(
        sentences=tuple(sentences),
        methods=tuple(methods),
        unknown=_unknown(head, "head"),
        versions=(str(document["versions"]["thinsection"]),),
    )


def _scores(document: Document, cases: int) -> Account:
    """Scores with their intervals, and the methods of these."""
    sentences = []
    methods: list[Method] = []
    words = []
    for name, score in document["scores"].items():
        text, used = _score_words(name, score, cases)
        words.append(text)
        methods += used
    if words:
        sentences.append(f"Scores: {'; '.join(words)}.")
    return Account(sentences=tuple(sentences), methods=tuple(dict.fromkeys(methods)))


def _score_words(metric: str, score: Document, rows: int) -> tuple[str, list[Method]]:
    """A score with its interval in words, and the methods of both."""
    methods = [Method("metric", metric)] if Method("metric", metric).is_known else []
    name = METRIC_WORDS.get(metric, metric)
    if score["value"] is None:
        return f"{name} without a value", methods
    words = f"{name} {rounded(score['value'], rows)}"
    if score.get("low") is None or score.get("high") is None:
        reason = score.get("missing") or "the record has none"
        return f"{words} (no interval: {reason})", methods
    own = Method("interval", metric)
    methods += [Method("interval", kind_of(metric)), *([own] if own.is_known else [])]
    ends = f"{rounded(score['low'], rows)} to {rounded(score['high'], rows)}"
    keys = [key for method in methods for key in method.keys]
    return f"{words} (95 % confidence interval {ends}){citation_of(keys)}", methods


def _inputs_of(path: Path) -> Account:
    """Embeddings that a model of an experiment takes; unknown without its file."""
    try:
        return _inputs(read_card(path).inputs)
    except (WeightsError, ConfigError, OSError):
        return Account(
            unknown=(
                f"the embeddings of the training: {path.name} is missing or damaged",
            )
        )


def _inputs(inputs: Inputs) -> Account:
    """Encoder, tiles and weights of the embeddings that a model takes."""
    if inputs.encoder is None:
        return Account(unknown=("the encoder of the embeddings that the model takes",))
    facts = []
    if inputs.tile_px and inputs.tile_mpp:
        facts.append(f"tiles of {inputs.tile_px} px at {inputs.tile_mpp:g} µm/px")
    if inputs.revision:
        facts.append(f"commit {inputs.revision[:_SHOWN_HASH]}")
    if inputs.weights_hash:
        facts.append(f"SHA-256 of the weights {inputs.weights_hash[:_SHOWN_HASH]}")
    if inputs.precision:
        facts.append(inputs.precision)
    kind = "slide_encoder" if inputs.level == "slide" else "tile_encoder"
    name = (
        inputs.encoder.partition(":")[0] if inputs.level == "slide" else inputs.encoder
    )
    method = Method(kind, name, ", ".join(facts))
    about = f" ({method.facts})" if facts else ""
    sentence = f"Its input is {inputs.level} embeddings of {inputs.encoder}{method.cited}{about}."
    unknown = [*_unknown(method, kind.replace("_", " "))]
    if not inputs.weights_hash:
        unknown.append(f"weights of {inputs.encoder}, whose embeddings the model takes")
    return Account(sentences=(sentence,), methods=(method,), unknown=tuple(unknown))


def _unknown(method: Method, words: str) -> tuple[str, ...]:
    """What to say of a method that this package does not know."""
    return () if method.is_known else (f"the reference of the {words} {method.name}",)


def accounts_of(paths: Iterable[Path]) -> Account:
    """Accounts of the experiments, validations and probes among some files, in order."""
    account = Account()
    for path in paths:
        if path.name == EXPERIMENT_NAME:
            account += experiment_account(path.parent)
        elif path.name == VALIDATION_NAME:
            account += validation_account(path.parent)
        elif is_probe(path):
            account += probe_account(path)
    return account
