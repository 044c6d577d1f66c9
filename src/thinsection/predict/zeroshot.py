"""Zero-shot classification: compares each tile and slide with texts, without training.

GRID/zeroshot_ENCODER_PROMPTS/ID.h5           `tiles/CLASS`: cosine of each tile with the class
                              scores.csv      a row for each slide
                              zeroshot.json   prompts, encoder, K

Prompts are a TOML file with the names of each class, and templates for sentences with them:

    templates = ["an H&E image of {}."]     # {} is the name; without templates: the name alone

    [classes]
    tumour = ["adenocarcinoma", "malignant glands"]
    stroma = ["fibrous stroma"]

The folder is a per-tile table: `heatmap`, `view` and exports show its columns.

Source: Radford et al., arXiv:2103.00020 (the mean over a class's prompts); Lu et al.,
doi:10.1038/s41591-024-02856-4 (the mean of the K best tiles of each class).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Unpack

import numpy as np
import numpy.typing as npt

from thinsection.config import (
    Settings,
    as_mapping,
    listing_settings,
    nearest,
    option,
    read_toml,
    replace_flat,
    section,
)
from thinsection.encode.registry import check_encoder_name, is_declared_encoder
from thinsection.errors import ConfigError, InvalidInputError, UnknownEncoderError
from thinsection.extras import require_packages
from thinsection.files.atomic import output_errors, read_json, write_json, write_table
from thinsection.results.folder import Results, leaving_out, open_results
from thinsection.results.records import recording
from thinsection.stages.tiles import write_columns
from thinsection.store.tile_tables import EmbeddingRows
from thinsection.store.tiles_h5 import TilesFile
from thinsection.tiles.table import Column
from thinsection.types import Document, Floats, Json, counted, shortened
from thinsection.weights.origin import slug

if TYPE_CHECKING:
    from thinsection.encode.text import TextEncoder
    from thinsection.settings_types import ZeroshotSettings


FOLDER = "zeroshot_"
DOCUMENT = "zeroshot.json"
MOST_NAMED = 5  # largest number of slides in a message
ROWS = 4096  # embeddings that are compared in one step
Cosines = npt.NDArray[np.float32]
_KEYS = ("templates", "classes")
_PLACE = "{}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroshotConfig:
    """Settings of zero-shot classes."""

    top_k: int = option(
        50,
        "Number K of tiles that count for the slide: the score of a class is the mean of its K "
        "highest similarities. The authors of CONCH compare 1, 5, 10, 50 and 100.",
        daily=True,
    )
    features: str | None = option(
        None,
        "Embeddings to use, if the folder has several: 256px_0.5mpp/features_plip, or a "
        "unique part of this name, such as plip.",
        daily=True,
    )
    text_encoder: str | None = option(
        None,
        "Encoder with the text tower, as in `run --encoder`. [default: the encoder of the "
        "embeddings]",
        daily=True,
    )
    weights: str | None = option(
        None,
        "Local weights of both towers, in place of the published ones. Pass the value of "
        "`run --weights` if you used it.",
    )
    tokenizer: Path | None = option(
        None, "File tokenizer.json. Pass it if there is none beside the weights."
    )
    device: str = option(
        "auto", "Device of the text tower: auto, cpu, cuda or cuda:1.", daily=True
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class ZeroshotRunConfig(Settings):
    """All settings of `thinsection zeroshot`, by section."""

    zeroshot: ZeroshotConfig = section(ZeroshotConfig, "Zero-shot")


@dataclass(frozen=True, kw_only=True)
class SlideScores:
    """Scores of one slide."""

    slide_id: str
    num_tiles: int
    # mean of the K highest cosines for each class; {} for a slide without tiles
    scores: Mapping[str, float]
    # softmax of the scores multiplied by the model's scale; they are not calibrated
    probabilities: Mapping[str, float]

    @property
    def predicted(self) -> str:
        """Class with the highest score; '' for a slide without tiles."""
        return max(self.scores, key=lambda name: self.scores[name], default="")


class Zeroshot(NamedTuple):
    """Results of `zeroshot`."""

    folder: Path  # GRID/zeroshot_ENCODER_PROMPTS
    table: Path  # scores.csv
    rows: list[SlideScores]
    columns: tuple[str, ...]  # names for `heatmap`, one for each class
    unread: tuple[str, ...]  # slides whose embeddings cannot be read

    def __repr__(self) -> str:
        return (
            f"Zeroshot({counted(len(self.rows), 'slide')} in {self.folder.name!r}, columns: "
            f"{shortened(self.columns)}, {len(self.unread)} unread)"
        )


@listing_settings(ZeroshotRunConfig)
def zeroshot(
    results: str | Path,
    prompts: str | Path | Prompts,
    *,
    text_encoder: TextEncoder | None = None,
    config: ZeroshotRunConfig | None = None,
    on_message: Callable[[str], None] | None = None,
    **settings: Unpack[ZeroshotSettings],
) -> Zeroshot:
    """Scores the tiles and slides of a results folder for classes that are described by texts.

    Args:
        results: results folder with embeddings of a two-tower encoder: conch, plip, ...
        prompts: TOML file with the classes (`read_prompts`), or `Prompts`.
        text_encoder: loaded text encoder; None loads the one that belongs to the embeddings.
        config: all settings; `settings` are single values that replace those in it: top_k=10.
        on_message: called with a line for each slide whose embeddings cannot be read; such slides
            are left out, and a tile table of an earlier call with the same prompts and weights
            stays. Also called with a line about tables that are removed. None raises the error of
            the first slide.

    Memory: the weights of both towers while they are loaded; then, for a slide of N tiles and C
    classes, 4 N C bytes, and 12 D bytes for each of 4,096 tiles.

    Raises:
        ConfigError: the prompts are wrong. InvalidInputError: the encoder has no text tower, or
        the embeddings come from another encoder or from other weights.
    """
    config = replace_flat(config or ZeroshotRunConfig(), settings)
    config.check_packages()
    if text_encoder is None:
        require_packages("the texts of the classes", "tokenizers")
    options = config.zeroshot
    if options.top_k < 1:
        raise InvalidInputError(f"top_k must be >= 1, got {options.top_k}")
    if not isinstance(prompts, Prompts):
        prompts = read_prompts(prompts)
    opened = open_results(results)
    address = opened.choose_features(options.features)
    slides = [s for s, ledger in opened.ledgers.items() if address in ledger.stages]
    if text_encoder is None:
        text_encoder = _load(opened, address, slides[0], options)
    for slide_id in slides:
        _check_same_encoder(opened, address, slide_id, text_encoder)
    classes = class_vectors(text_encoder, prompts)
    grid, _, features = address.partition("/")
    encoder = features.removeprefix("features_")
    folder = opened.folder / grid / f"{FOLDER}{encoder}_{prompts.name}"
    recorded = as_mapping(config) | {"prompts": prompts.name}
    document: Document = {
        "prompts": {name: list(prompts.texts(name)) for name in prompts.classes},
        "top_k": options.top_k,
        "scale": text_encoder.scale,
        "features": address,
        "encoder": text_encoder.name,
        "weights_hash": text_encoder.image_hash,
    }
    with (
        output_errors(folder),
        recording(opened.folder, "zeroshot", recorded) as record,
    ):
        _begin_folder(folder, document, slides, on_message)
        rows = []
        files = {slide_id: opened.file(slide_id, address) for slide_id in slides}
        compared = _compared(files, text_encoder, classes, on_message)
        for slide_id, tiles, cosines in compared:
            columns: dict[str, Column] = {
                name: np.ascontiguousarray(cosines[:, number])
                for number, name in enumerate(prompts.classes)
            }
            path = folder / f"{slide_id}.h5"
            write_columns(path, tiles.coords_l0, columns, tiles.attributes)
            rows.append(
                _scores(slide_id, cosines, prompts, options.top_k, text_encoder.scale)
            )
        record.counts["predicted"] = len(rows)
        scored = {row.slide_id for row in rows}
        unread = tuple(slide_id for slide_id in slides if slide_id not in scored)
        for slide_id, ledger in opened.ledgers.items():
            with leaving_out(slide_id, on_message):
                unread += (slide_id,) if ledger.damage else ()
                ledger.check()
        record.counts["failed"] = len(unread)
        for slide_id in unread:
            if on_message is not None and (folder / f"{slide_id}.h5").exists():
                on_message(f"{slide_id}: the tile table of an earlier call stays")
        table = folder / "scores.csv"
        write_table(table, [_line(row, prompts, options.top_k) for row in rows])
    names = tuple(f"{folder.name}:{name}" for name in prompts.classes)
    return Zeroshot(folder, table, rows, names, unread)


def class_vectors(encoder: TextEncoder, prompts: Prompts) -> Cosines:
    """Unit vectors (C, D) float32 of the classes: each is the mean over the prompts of a class."""
    vectors = []
    for name in prompts.classes:
        mean = encoder.encode(prompts.texts(name)).mean(dim=0)
        vectors.append((mean / mean.norm()).numpy())
    return np.stack(vectors)


def top_k_scores(cosines: Cosines, top_k: int) -> Floats:
    """Mean (C,) of each class's K highest cosines in (N, C); of all N if there are fewer."""
    count = min(top_k, len(cosines))
    highest = np.partition(cosines, len(cosines) - count, axis=0)[-count:]
    return np.asarray(highest.mean(axis=0, dtype=np.float64))


def _load(
    results: Results, address: str, slide_id: str, options: ZeroshotConfig
) -> TextEncoder:
    """Text encoder that belongs to the embeddings, unless the settings name another one."""
    from thinsection.encode.text import load_text_encoder

    facts: Document = dict(results.ledgers[slide_id].stages[address].facts)
    name = options.text_encoder
    if name is None:
        name = str(facts.get("encoder", ""))
        try:
            check_encoder_name(name)
        except UnknownEncoderError as error:
            raise InvalidInputError(
                f"text_encoder must be given for embeddings of {name!r}, got none; pass "
                "text_encoder=... with the encoder of the run"
            ) from error
        revision = facts.get("revision")
        if revision and is_declared_encoder(name):
            name = f"{name}@{revision}"  # the weights of the embeddings
    return load_text_encoder(
        name,
        weights=options.weights,
        tokenizer=options.tokenizer,
        device=options.device,
    )


def _check_same_encoder(
    results: Results, address: str, slide_id: str, encoder: TextEncoder
) -> None:
    """Raises InvalidInputError: the slide's embeddings were made by another image tower."""
    facts: Document = dict(results.ledgers[slide_id].stages[address].facts)
    stored = facts.get("weights_hash")
    if stored != encoder.image_hash:
        raise InvalidInputError(
            f"embeddings must come from the image tower of {encoder.name!r} with the weights "
            f"{encoder.image_hash[:12]}, got {facts.get('encoder')!r} with "
            f"{str(stored)[:12]} in {slide_id!r} of {address!r}; pass the encoder of the "
            "embeddings (text_encoder=..., weights=...), or embed the slides with this one"
        )


def _compared(
    files: Mapping[str, Path],
    encoder: TextEncoder,
    classes: Cosines,
    on_message: Callable[[str], None] | None,
) -> Iterator[tuple[str, TilesFile, Cosines]]:
    """Yields for each slide its id, its tiles, and their cosines (N, C) with the classes."""
    import torch

    for slide_id, path in files.items():
        with leaving_out(slide_id, on_message):
            stored = EmbeddingRows(path)
            cosines = np.empty((len(stored), len(classes)), dtype=np.float32)
            for start in range(0, len(stored), ROWS):
                block = stored[start : start + ROWS].astype(np.float32)
                units = encoder.project(torch.from_numpy(block)).numpy()
                cosines[start : start + ROWS] = units @ classes.T
            yield slide_id, stored.tiles, cosines


def _scores(
    slide_id: str, cosines: Cosines, prompts: Prompts, top_k: int, scale: float
) -> SlideScores:
    if not len(cosines):
        return SlideScores(slide_id=slide_id, num_tiles=0, scores={}, probabilities={})
    pooled = top_k_scores(cosines, top_k)
    powers = np.exp(scale * (pooled - pooled.max()))
    shares = powers / powers.sum()
    return SlideScores(
        slide_id=slide_id,
        num_tiles=len(cosines),
        scores=dict(zip(prompts.classes, pooled.tolist(), strict=True)),
        probabilities=dict(zip(prompts.classes, shares.tolist(), strict=True)),
    )


def _line(row: SlideScores, prompts: Prompts, top_k: int) -> dict[str, object]:
    """Row of scores.csv."""
    line: dict[str, object] = {
        "slide_id": row.slide_id,
        "predicted": row.predicted,
        "num_tiles": row.num_tiles,
        "top_k": min(top_k, row.num_tiles),
    }
    for name in prompts.classes:
        line[f"score_{name}"] = row.scores.get(name, "")
    for name in prompts.classes:
        line[f"probability_{name}"] = row.probabilities.get(name, "")
    return line


def _begin_folder(
    folder: Path,
    document: Mapping[str, Json],
    slides: Sequence[str],
    on_message: Callable[[str], None] | None,
) -> None:
    """Writes zeroshot.json; removes tables of other prompts, other weights or absent slides.

    The document is written before any table. Therefore it holds for every table in the folder, even
    if the call is killed.
    """
    path = folder / DOCUMENT
    tables = sorted(folder.glob("*.h5"))
    try:
        earlier = read_json(path)
    except (FileNotFoundError, ValueError):
        earlier = None  # no readable document of an earlier call
    if _columns_of(earlier) == _columns_of(document):
        reason = "their slides have no embeddings any more"
        current = set(slides)
        tables = [table for table in tables if table.stem not in current]
    else:
        reason = "their prompts or weights are others or unknown"
        (folder / "scores.csv").unlink(missing_ok=True)
    if tables and on_message is not None:
        names = ", ".join(table.stem for table in tables[:MOST_NAMED])
        more = "" if len(tables) <= MOST_NAMED else ", ..."
        on_message(
            f"{folder.name}: {len(tables)} earlier tile tables are removed, because {reason}: "
            f"{names}{more}"
        )
    for table in tables:
        table.unlink()
    write_json(path, dict(document))


def _columns_of(document: Json | Mapping[str, Json]) -> Document:
    """Values that decide the columns of tile tables; K affects only the scores of slides."""
    if not isinstance(document, Mapping):
        return {}
    return {name: value for name, value in document.items() if name != "top_k"}


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Classes of a zero-shot classifier, in order, and the templates for their names."""

    classes: Mapping[str, tuple[str, ...]] = field(hash=False)  # class -> its names
    templates: tuple[str, ...] = (_PLACE,)
    name: str = "prompts"  # used in the name of the results folder

    def texts(self, class_name: str) -> list[str]:
        """Sentences for a class: each of its names in each template."""
        return [
            template.replace(_PLACE, name)
            for name in self.classes[class_name]
            for template in self.templates
        ]


def read_prompts(path: str | Path) -> Prompts:
    """Reads the prompts of a TOML file.

    Raises ConfigError: no such file, not TOML, an unknown key, fewer than two classes, a class
    without names, a template without {}; it names the file and the key.
    """
    path = Path(path)
    table = read_toml(path)
    for key in table:
        if key not in _KEYS:
            raise ConfigError(
                f"prompts must have the keys {' and '.join(_KEYS)}, got {key!r} in "
                f"{str(path)!r}{nearest(key, _KEYS)}"
            )
    classes = table.get("classes")
    if not isinstance(classes, dict) or len(classes) < 2:
        number = len(classes) if isinstance(classes, dict) else 0
        raise ConfigError(
            f"prompts must have a table [classes] of >= 2 classes, got {number} in "
            f'{str(path)!r}; add a line such as stroma = ["fibrous stroma"]'
        )
    templates = [_PLACE]
    if "templates" in table:
        templates = list(_sentences(table["templates"], "templates", path))
    for template in templates:
        if _PLACE not in template:
            raise ConfigError(
                f"templates must have {_PLACE} at the place of the name, got {template!r} in "
                f"{str(path)!r}"
            )
    names = {}
    for name, values in classes.items():
        if slug(name) != name:
            raise ConfigError(
                "classes must have names of letters, digits, '_', '-' and '.', got "
                f"{name!r} in {str(path)!r}; the words for the model stand behind the ="
            )
        names[name] = tuple(_sentences(values, f"classes.{name}", path))
    return Prompts(classes=names, templates=tuple(templates), name=slug(path.stem))


def _sentences(values: Json, key: str, path: Path) -> Iterator[str]:
    """Yields the texts of a list, which must have at least one."""
    if not isinstance(values, list) or not values:
        raise ConfigError(
            f"{key} must be a list of at least one text, got {values!r} in {str(path)!r}; "
            'write ["adenocarcinoma"]'
        )
    for value in values:
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(
                f"{key} must have texts that are not empty, got {value!r} in {str(path)!r}"
            )
        yield value
